"""Every table of the paper (arXiv 2608.08086) by one command, on any checkpoint; `--help` shows how.

    python benchmarks/paper.py --n=100 --json=paper.json --figure=figures/

The tables are modules of the folder `paper` beside this file; docs/reproduce.md has commands for real models.
"""

import sys

from paper.command import main

from archer_jax.flags import leave

if __name__ == '__main__':
  leave(main(sys.argv))

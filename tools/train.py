"""Trains a small masked diffusion model on a mixture of text tasks and writes its checkpoint.

    python tools/train.py --config=configs/train_suite.py --output=runs/suite

A run that was stopped goes on from its last saved state when the same command is given again.
"""

import json
import os
from pathlib import Path
import sys

from absl import app
from absl import flags
from absl import logging
from ml_collections import config_flags

REPOSITORY = Path(__file__).resolve().parents[1]

# glibc otherwise gives memory back to the kernel after every operation and faults it in again for the next one.
MALLOC_SETTINGS = {
  'MALLOC_MMAP_MAX_': '0',
  'MALLOC_TRIM_THRESHOLD_': '100000000000',
  'MALLOC_TOP_PAD_': '536870912',
  'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1',
}

_CONFIG = config_flags.DEFINE_config_file('config', None, 'Config file of the training.')
_OUTPUT = flags.DEFINE_string('output', None, 'Folder for the log, the saved states and, at the end, checkpoint/.')


def restart_with_malloc_settings() -> None:
  """Starts this command again with those of MALLOC_SETTINGS that the environment leaves open.

  glibc reads them when a process begins, so they cannot be set later. The process stays the same one, and other
  systems and C libraries, which know none of them, are left alone.
  """
  missing = {name: value for name, value in MALLOC_SETTINGS.items() if name not in os.environ}
  if missing and sys.platform == 'linux':
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | missing)


def main(argv: list[str]) -> None:
  """Runs the training that the flags describe."""
  if len(argv) > 1:
    raise app.UsageError(f'there are no positional arguments, got {argv[1]!r}')
  # Not above: JAX would be loaded before the restart, and again after it.
  from archer_jax.training.run import run_training

  # Orbax reports every step of every save; that would tear the progress bar apart.
  logging.set_verbosity(logging.WARNING)
  print(json.dumps(run_training(_CONFIG.value, REPOSITORY, Path(_OUTPUT.value))))


if __name__ == '__main__':
  restart_with_malloc_settings()
  flags.mark_flags_as_required(['config', 'output'])
  app.run(main)

"""Decodes prompts with a diffusion language model; `python run_decode.py --help` shows how.

Without a flag it decodes a built-in example with the bundled model.
"""

from archer_jax import cli

if __name__ == '__main__':
  cli.run()

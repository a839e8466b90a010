"""Calibrates `--refresh certified` for a checkpoint: `archer-calibrate`, from a checkout."""

from archer_jax.cli import calibrate

if __name__ == '__main__':
  calibrate.run()

"""Trains a small masked diffusion model on a text task and writes its checkpoint.

    python tools/train.py --config=configs/train_sudoku4.py --output=runs/sudoku4

A run that was stopped goes on from its last saved state when the same command is given again.
"""

import importlib
import json
from pathlib import Path

from absl import app
from absl import flags
from absl import logging
from ml_collections import config_flags

from archer_jax.training.run import train_task

REPOSITORY = Path(__file__).resolve().parents[1]

_CONFIG = config_flags.DEFINE_config_file('config', None, 'Config file of the training.')
_OUTPUT = flags.DEFINE_string('output', None, 'Folder for the log, the saved states and, at the end, checkpoint/.')


def main(argv: list[str]) -> None:
  """Runs the training that the flags describe."""
  if len(argv) > 1:
    raise app.UsageError(f'there are no positional arguments, got {argv[1]!r}')
  # Orbax reports every step of every save; that would tear the progress bar apart.
  logging.set_verbosity(logging.WARNING)
  config = _CONFIG.value
  task = importlib.import_module(f'archer_jax.tasks.{config.task}')
  print(json.dumps(train_task(task, config, REPOSITORY / config.data.evaluation, Path(_OUTPUT.value))))


if __name__ == '__main__':
  flags.mark_flags_as_required(['config', 'output'])
  app.run(main)

"""The command line of lm-evaluation-harness, in which `--model archer` is known."""

import importlib.util
import sys

from absl import logging

from archer_jax import runtime
from archer_jax.flags import escape_output


def main() -> int:
  """Runs lm-evaluation-harness on `sys.argv`.

  Returns:
    The exit code: 0, or 1 with one sentence on stderr for a mistake.
  """
  escape_output()
  if importlib.util.find_spec('lm_eval') is None:
    print("error: lm-evaluation-harness is not installed: pip install 'archer_jax[eval]'", file=sys.stderr)
    return 1
  from lm_eval.__main__ import cli_evaluate

  from archer_jax.harness.model import Mistake

  # Orbax reports every step of every restore.
  logging.set_verbosity(logging.WARNING)
  runtime.set_up()
  try:
    cli_evaluate()
  except Mistake as error:
    print(f'error: {error}', file=sys.stderr)
    return 1
  return 0


if __name__ == '__main__':
  sys.exit(main())

"""Converts a Hugging Face folder of LLaDA or Dream to a checkpoint.

    python tools/convert_weights.py --source HF_DIR --output DIR [--dtype bfloat16]

It needs neither torch nor an accelerator and runs no code from the folder.
"""

import sys
import warnings

from absl import app
from absl import flags
from absl import logging

from archer_jax.config import DTYPES
from archer_jax.flags import escape_output

_SOURCE = flags.DEFINE_string('source', None, 'Folder with config.json, safetensors and tokenizer files.')
_OUTPUT = flags.DEFINE_string('output', None, 'Folder to make; an existing one is never overwritten.')
_DTYPE = flags.DEFINE_enum('dtype', None, DTYPES, 'Dtype of the parameters; by default that of the source.')


def _parse(argv: list[str]) -> list[str]:
  """Parses the flags; --help prints them and succeeds, a mistake is one line."""
  escape_output()
  if any(argument.lstrip('-') in ('help', 'helpfull', 'helpshort') for argument in argv[1:]):
    app.usage(shorthelp=True, writeto_stdout=True)
    sys.exit(0)
  try:
    rest = flags.FLAGS(argv)
  except flags.Error as error:
    sys.exit(f'error: {"; ".join(str(error).splitlines())}')
  if rest[1:]:
    sys.exit(f'error: there are no positional arguments, got {rest[1]!r}')
  return rest


def main(argv: list[str]) -> None:
  """Runs the conversion that the flags describe."""
  del argv
  # Orbax reports every step of every save; they would tear the progress bar apart.
  logging.set_verbosity(logging.WARNING)
  warnings.showwarning = lambda message, *_: print(f'warning: {message}', file=sys.stderr)

  import jax

  from archer_jax.checkpoints.convert import convert

  # Conversion is the host's work; without this JAX would take hold of an accelerator's memory.
  jax.config.update('jax_platforms', 'cpu')
  try:
    convert(_SOURCE.value, _OUTPUT.value, dtype=_DTYPE.value, progress=sys.stderr.isatty())
  except (ValueError, OSError) as error:
    sys.exit(f'error: {error}')
  except KeyboardInterrupt:
    print('error: interrupted, nothing was written', file=sys.stderr)
    sys.exit(130)
  print(f'wrote {_OUTPUT.value}')


if __name__ == '__main__':
  flags.mark_flags_as_required(['source', 'output'])
  app.run(main, flags_parser=_parse)

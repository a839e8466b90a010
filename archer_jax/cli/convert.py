"""The command that converts a published checkpoint; `archer-convert --help`.

JAX is imported once the flags are known to be right, so that --help and mistakes answer at once.
"""

from collections.abc import Callable
from collections.abc import Sequence
import sys
from typing import NoReturn
import warnings

from absl import flags

from archer_jax.config import DTYPES
from archer_jax.flags import INTERRUPTED
from archer_jax.flags import Definer
from archer_jax.flags import Groups
from archer_jax.flags import fail
from archer_jax.flags import help_text
from archer_jax.flags import leave
from archer_jax.flags import run_command

_USAGE = 'archer-convert --source HF_DIR --output DIR [--adapter DIR] [--dtype bfloat16]'
_INTRODUCTION = """\
Converts a Hugging Face folder of LLaDA or Dream to a checkpoint, as archer-decode and the other commands take it. It \
needs neither torch nor an accelerator and runs no code from the folder."""


def define_flags(values: flags.FlagValues) -> Groups:
  """Defines every flag on `values` and returns them in groups."""
  define = Definer(values)
  return {
    'What to convert': [
      define.text('source', 'folder with config.json, safetensors and tokenizer files'),
      define.text(
        'adapter', 'folder of a LoRA adapter (adapter_config.json, adapter_model.safetensors) to merge into the weights'
      ),
    ],
    'Where to': [
      define.text('output', 'folder to make; an existing one is never overwritten'),
      define.choice('dtype', 'of the parameters; by default that of the source', DTYPES),
    ],
  }


def run() -> NoReturn:
  """The program: runs `main` and exits with its code."""
  leave(main(sys.argv))


def main(argv: Sequence[str]) -> int:
  """Runs the command.

  Args:
    argv: the program's name and its arguments.

  Returns:
    The exit code: 0, 1 if anything is wrong, 130 after an interrupt.
  """
  return run_command(argv, lambda: help_text(_USAGE, _INTRODUCTION, define_flags), _prepare)


def _prepare(argv: Sequence[str]) -> Callable[[], int]:
  values = flags.FlagValues()
  define_flags(values)
  if rest := values(list(argv))[1:]:
    raise ValueError(f'there are no positional arguments, got {rest[0]!r}')
  for name in ('source', 'output'):
    if not values[name].value:
      raise ValueError(f'{name} must be given: {_USAGE}')
  if values['adapter'].value == '':
    raise ValueError('adapter must not be empty')
  warnings.showwarning = lambda message, *_: print(f'warning: {message}', file=sys.stderr)

  import jax

  from archer_jax.checkpoints.convert import convert

  # Conversion is the host's work; without this JAX would take hold of an accelerator's memory.
  jax.config.update('jax_platforms', 'cpu')
  options = {name: values[name].value for name in ('source', 'output', 'adapter', 'dtype')}

  def run() -> int:
    try:
      convert(**options, progress=sys.stderr.isatty())
    except ValueError as error:
      return fail(error)
    except KeyboardInterrupt:
      print('error: interrupted, nothing was written', file=sys.stderr)
      return INTERRUPTED
    print(f'wrote {options["output"]}')
    return 0

  return run

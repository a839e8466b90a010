"""The command line: flags, their precedence, and the run that they describe.

JAX is imported once the flags are known to be right, so that --help and mistakes answer at once.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from pathlib import Path
import sys
from typing import Any
from typing import NoReturn

from absl import flags

from archer_jax import runtime
from archer_jax.checkpoint import read_manifest
from archer_jax.jobs import output
from archer_jax.jobs.flags import Definer
from archer_jax.jobs.flags import Groups
from archer_jax.jobs.flags import help_text
from archer_jax.jobs.flags import leave
from archer_jax.jobs.flags import read_flags
from archer_jax.jobs.flags import run_command
from archer_jax.jobs.settings import Settings
from archer_jax.jobs.settings import make_settings

_USAGE = 'python run_decode.py [--flag=value ...]'
_PRECEDENCE = (
  'Decodes prompts with a diffusion language model; without a flag, a built-in example with the bundled model. '
  'A flag wins over the file of --config, that over what the checkpoint recommends, that over the defaults below.'
)


def define_flags(values: flags.FlagValues) -> Groups:
  """Defines every flag on `values` and returns them in groups, in the order of the help."""
  define = Definer(values)
  return {
    'What to decode': [
      define.text('checkpoint', 'folder that tools/convert_weights.py made (default: the bundled model)'),
      define.texts('prompt', 'a prompt; may be given again'),
      define.text('input', 'file of JSON lines with id, prompt | messages | prompt_ids, seed, knobs; - is stdin'),
      define.switch('chat', False, "prompts are a user's turn in the checkpoint's chat template"),
    ],
    'Where to': [
      define.text('output', 'file of JSON lines to make; - is stdout (default: text on stdout)'),
      define.text('trace', 'folder for an .npz file of every step per request'),
      define.switch('watch', False, 'show every step as it is taken'),
      define.switch('stats', False, 'print the figures of the run; with --output also write them to OUTPUT.stats.json'),
    ],
    **define.decoding(),
    'Run': [
      *define.running('requests without a seed draw theirs from this and their place in the input'),
      define.text('mesh', 'devices by axis, such as data:1,model:1; one device for now'),
    ],
  }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
  """What the command line asks for, checked as far as it can be without JAX."""

  options: Mapping[str, Any]
  settings: Settings
  example: str | None


def parse(argv: Sequence[str]) -> Command:
  """Reads the flags, the config file and the checkpoint's manifest.

  Args:
    argv: the program's name and its arguments.

  Raises:
    ValueError, OSError, flags.Error: what is wrong, in one sentence.
  """
  options, given = read_flags(argv, define_flags)
  # The same without JAX, so that nothing heavy is done for a wrong flag.
  manifest = read_manifest(options['checkpoint'])
  settings = make_settings(manifest.config, given, recommended=manifest.defaults)
  if options['input'] is not None and options['prompt']:
    raise ValueError('prompt and input must not be given together')
  example = None
  if options['input'] is None and not options['prompt']:
    example = manifest.defaults.get('prompt')
    if not isinstance(example, str):
      raise ValueError('prompt or input must be given: the checkpoint brings no example')
  if options['watch'] and options['output'] == '-':
    raise ValueError('watch and output - must not be given together: both write to stdout')
  _check_mesh(options['mesh'])
  _check_files(options)
  return Command(options=options, settings=settings, example=example)


def _check_mesh(text: str | None) -> None:
  """Raises ValueError unless `text` names a mesh of one device by its axes data and model."""
  if text is None:
    return
  sizes = {}
  for part in text.split(','):
    axis, _, size = part.partition(':')
    if axis not in ('data', 'model') or axis in sizes or not size.isdecimal() or int(size) < 1:
      raise ValueError(f'mesh must be like data:4,model:2, got {text!r}')
    sizes[axis] = int(size)
  count = sizes.get('data', 1) * sizes.get('model', 1)
  if count > 1:
    raise ValueError(f'mesh must have one device in this version, such as data:1, got {text!r} with {count}')


def _check_files(options: Mapping[str, Any]) -> None:
  """Raises ValueError or OSError if the input cannot be read or an output cannot be made."""
  if options['input'] not in (None, '-') and (Path(options['input']).is_dir() or not Path(options['input']).exists()):
    raise ValueError(f'input must be a file of JSON lines that exists, got {options["input"]}')
  if options['output'] not in (None, '-'):
    output.check_new_file('output', Path(options['output']))
    if options['stats']:
      output.check_new_file('stats', output.stats_file(options['output']))
  if options['trace'] is not None:
    output.check_trace_folder(Path(options['trace']))


def run(argv: Sequence[str] | None = None) -> NoReturn:
  """The program: runs `main` and exits with its code."""
  leave(main(sys.argv if argv is None else argv))


def main(argv: Sequence[str]) -> int:
  """Runs a command.

  Args:
    argv: the program's name and its arguments.

  Returns:
    The exit code: 0, 1 if anything is wrong or any record was, 130 after an interrupt.
  """
  return run_command(argv, lambda: help_text(_USAGE, _PRECEDENCE, define_flags), _prepare)


def _prepare(argv: Sequence[str]) -> Callable[[], int]:
  command = parse(argv)
  runtime.set_up()
  # From here on JAX is there.
  from archer_jax.jobs.run import prepare

  options = {**command.options, 'dtype': command.options['dtype'] or runtime.default_dtype()}
  job = prepare(options, command.settings, command.example)
  return lambda: job.run(runtime.facts)

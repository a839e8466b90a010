"""The command line: flags, their precedence, and the run that they describe.

JAX is imported once the flags are known to be right, so that --help and mistakes answer at once.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import os
from pathlib import Path
import sys
import textwrap
from typing import Any
from typing import NoReturn

from absl import flags
from absl import logging
from ml_collections import config_flags

from archer_jax import runtime
from archer_jax.checkpoint import read_manifest
from archer_jax.config import CHOICES
from archer_jax.config import KNOBS
from archer_jax.config import POLICIES
from archer_jax.config import KnobSpec
from archer_jax.jobs import output
from archer_jax.jobs.settings import DEFAULT_BLOCK_LENGTH
from archer_jax.jobs.settings import MAX_SEED
from archer_jax.jobs.settings import SETTINGS
from archer_jax.jobs.settings import SWITCHES
from archer_jax.jobs.settings import Settings
from archer_jax.jobs.settings import make_settings

_USAGE = 'python run_decode.py [--flag=value ...]'
_PRECEDENCE = (
  'Decodes prompts with a diffusion language model; without a flag, a built-in example with the bundled model. '
  'A flag wins over the file of --config, that over what the checkpoint recommends, that over the defaults below.'
)
_HELP = frozenset(dashes + name for dashes in ('-', '--') for name in ('help', 'helpshort', 'helpfull', 'h'))
_INTERRUPTED = 130
_WIDTH, _HELP_COLUMN = 110, 32


class _KnobParser(flags.ArgumentParser):
  """Reads a number and checks it as a request's would be."""

  def __init__(self, name: str, spec: KnobSpec):
    super().__init__()
    self._name, self._spec = name, spec

  def parse(self, argument: Any) -> float | int:
    if isinstance(argument, str):
      kind = int if self._spec.integer else float
      # What is no number at all goes on as text, for the one message.
      with contextlib.suppress(ValueError):
        argument = kind(argument)
    return self._spec.check(self._name, argument)

  def flag_type(self) -> str:
    return 'int' if self._spec.integer else 'float'


def define_flags(values: flags.FlagValues) -> dict[str, list[flags.FlagHolder]]:
  """Defines every flag on `values` and returns them in groups, in the order of the help."""

  def text(name, help):
    return flags.DEFINE_string(name, None, help, flag_values=values)

  def switch(name, default, help):
    return flags.DEFINE_bool(name, default, help, flag_values=values)

  def choice(name, help, default=None):
    return flags.DEFINE_enum(name, default, CHOICES[name], help, flag_values=values)

  def whole(name, default, low, help, high=None):
    return flags.DEFINE_integer(name, default, help, lower_bound=low, upper_bound=high, flag_values=values)

  def knob(name, default=None):
    spec = KNOBS[name]
    default = spec.default if default is None else default
    if spec.integer and spec.high == 1:
      return switch(name, bool(default), spec.help)
    return flags.DEFINE(_KnobParser(name, spec), name, default, spec.help, flag_values=values)

  def setting(name):
    spec = SWITCHES[name]
    return (
      switch(name, spec.default, spec.help) if spec.default in (True, False) else choice(name, spec.help, spec.default)
    )

  return {
    'What to decode': [
      text('checkpoint', 'folder that tools/convert_weights.py made (default: the bundled model)'),
      flags.DEFINE_multi_string('prompt', None, 'a prompt; may be given again', flag_values=values),
      text('input', 'file of JSON lines with id, prompt | messages | prompt_ids, seed, knobs; - is stdin'),
      switch('chat', False, "prompts are a user's turn in the checkpoint's chat template"),
    ],
    'Where to': [
      text('output', 'file of JSON lines to make; - is stdout (default: text on stdout)'),
      text('trace', 'folder for an .npz file of every step per request'),
      switch('watch', False, 'show every step as it is taken'),
      switch('stats', False, 'print the figures of the run; with --output also write them to OUTPUT.stats.json'),
    ],
    'Decoder': [
      choice('decoder', "which tokens a step writes; by default that of the model's family"),
      knob('gen_length'),
      whole('block_length', None, 1, f'tokens of a block (default: {DEFAULT_BLOCK_LENGTH}, at most gen_length)'),
      *map(knob, ('steps', 'threshold', 'threshold_back', 'max_accept')),
      *map(setting, ('shadow', 'remasking', 'alg')),
      *map(knob, ('alg_temp', 'temperature', 'top_p', 'top_k', 'cfg_scale')),
      *map(setting, ('mask_prediction', 'early_stop', 'logits_eos_inf', 'confidence_eos_eot_inf')),
    ],
    'When the prompt is recomputed': [
      choice('refresh', 'by drift and margin, in every step, in the first, or by the clock', 'archer'),
      setting('drift'),
      knob('drift_radius', POLICIES['archer'].drift_radius),
      *map(knob, ('min_margin', 'refresh_interval', 'refresh_at_block_start', 'max_age')),
    ],
    'Run': [
      config_flags.DEFINE_config_file('config', None, 'Python file whose get_config() gives flags', flag_values=values),
      whole('batch_size', 8, 1, 'requests decoded together'),
      whole('seed', 0, 0, 'requests without a seed draw theirs from this and their place in the input', MAX_SEED),
      choice('dtype', 'of parameters and matmuls; by default float32 on CPU and bfloat16 elsewhere'),
      text('mesh', 'devices by axis, such as data:1,model:1; one device for now'),
    ],
  }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
  """What the command line asks for, checked as far as it can be without JAX."""

  options: Mapping[str, Any]
  settings: Settings
  example: str | None


def help_text() -> str:
  """Every flag with its help, choices and default, in groups."""
  values = flags.FlagValues()
  lines = [_USAGE, '', *textwrap.wrap(_PRECEDENCE, _WIDTH)]
  for title, holders in define_flags(values).items():
    lines += ['', f'{title}:']
    for holder in holders:
      flag = values[holder.name]
      choices = getattr(flag.parser, 'enum_values', ())
      # absl puts its own notes around the text of these two kinds of flags.
      help = flag.help.removeprefix(f'<{"|".join(choices)}>: ').partition(';\n')[0]
      notes = [f'{help}: {", ".join(choices)}'] if choices else [help]
      if flag.default is not None:
        notes.append(f'(default: {str(flag.default).lower() if flag.boolean else flag.default})')
      head = f'  --{"[no]" if flag.boolean else ""}{flag.name}'.ljust(_HELP_COLUMN - 1)
      lines += textwrap.wrap(
        ' '.join(notes), _WIDTH, initial_indent=f'{head} ', subsequent_indent=' ' * _HELP_COLUMN, break_on_hyphens=False
      )
  return '\n'.join(lines)


def parse(argv: Sequence[str]) -> Command:
  """Reads the flags, the config file and the checkpoint's manifest.

  Args:
    argv: the program's name and its arguments.

  Raises:
    ValueError, OSError, flags.Error: what is wrong, in one sentence.
  """
  # Not absl's global registry: the flags of whatever else is imported are none of this program's.
  values = flags.FlagValues()
  groups = define_flags(values)
  try:
    rest = values(list(argv))[1:]
    config = dict((values['config'].value or {}).items())
  except flags.Error:
    raise
  except Exception as error:
    # A config is a file of Python, which may raise whatever it likes.
    raise ValueError(f'config cannot be loaded: {error.__cause__ or error}') from error
  if rest:
    raise ValueError(f'there are no positional arguments, got {rest[0]!r}')
  names = [holder.name for group in groups.values() for holder in group if holder.name != 'config']
  given = {name: values[name].value for name in names if values[name].present}
  for name, value in config.items():
    if name not in names:
      raise ValueError(f'{name} in the config is no flag; there are {", ".join(names)}')
    if value is not None and name not in given:
      given[name] = _configured(values[name], value)
  options = {name: given.get(name, values[name].default) for name in names if name not in SETTINGS}
  # The same without JAX, so that nothing heavy is done for a wrong flag.
  manifest = read_manifest(options['checkpoint'])
  settings = make_settings(
    manifest.config,
    {name: value for name, value in given.items() if name in SETTINGS},
    recommended=manifest.defaults,
  )
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


def _configured(flag: flags.Flag, value: Any) -> Any:
  """A value of the config file as the flag itself would have it."""
  try:
    if isinstance(flag, flags.MultiFlag):
      if isinstance(value, str) or not all(isinstance(item, str) for item in value):
        raise TypeError(f'must be a list of texts, got {value!r}')
      return list(value)
    if flag.boolean and not isinstance(value, bool):
      raise TypeError(f'must be true or false, got {value!r}')
    return flag.parser.parse(value)
  except (TypeError, ValueError) as error:
    raise ValueError(f'{flag.name} in the config: {error}') from error


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
  code = main(sys.argv if argv is None else argv)
  if code == _INTERRUPTED:
    # A batch may still be running, and an orderly exit would wait for its end.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
  sys.exit(code)


def main(argv: Sequence[str]) -> int:
  """Runs a command.

  Args:
    argv: the program's name and its arguments.

  Returns:
    The exit code: 0, 1 if anything is wrong or any record was, 130 after an interrupt.
  """
  # Orbax reports every step of every restore.
  logging.set_verbosity(logging.WARNING)
  try:
    if _HELP.intersection(argv[1:]):
      print(help_text(), flush=True)
      return 0
    try:
      command = parse(argv)
      runtime.set_up()
      # From here on JAX is there.
      from archer_jax.jobs.run import prepare

      options = {**command.options, 'dtype': command.options['dtype'] or runtime.default_dtype()}
      job = prepare(options, command.settings, command.example)
    except (ValueError, OSError, flags.Error) as error:
      return _fail(error)
    return job.run(runtime.facts)
  except KeyboardInterrupt:
    print('interrupted; what was finished is written', file=sys.stderr)
    return _INTERRUPTED
  except BrokenPipeError:
    # Whoever read stdout has had enough; what is still buffered must not raise again at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
  except OSError as error:
    return _fail(error)


def _fail(error: Exception) -> int:
  print(f'error: {"; ".join(line.strip() for line in str(error).splitlines())}', file=sys.stderr)
  return 1

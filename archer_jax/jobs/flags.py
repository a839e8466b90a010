"""Flags of the commands that decode: how they are defined, explained and read, and how a command ends.

JAX is not imported here, so that --help and mistakes answer at once.
"""

from collections.abc import Callable
from collections.abc import Sequence
import contextlib
import os
import sys
import textwrap
from typing import Any
from typing import NoReturn

from absl import flags
from absl import logging
from ml_collections import config_flags

from archer_jax.config import CHOICES
from archer_jax.config import KNOBS
from archer_jax.config import POLICIES
from archer_jax.config import KnobSpec
from archer_jax.jobs.preemption import PREEMPTED
from archer_jax.jobs.preemption import Preempted
from archer_jax.jobs.settings import DEFAULT_BLOCK_LENGTH
from archer_jax.jobs.settings import DEFAULT_QUANTILE
from archer_jax.jobs.settings import MAX_SEED
from archer_jax.jobs.settings import SETTINGS
from archer_jax.jobs.settings import SWITCHES
from archer_jax.jobs.settings import check_setting

Groups = dict[str, list[flags.FlagHolder]]

INTERRUPTED = 130
_HELP = frozenset(dashes + name for dashes in ('-', '--') for name in ('help', 'helpshort', 'helpfull', 'h'))
_WIDTH, _HELP_COLUMN = 110, 32
_KAPPA_HELP = (
  'certified refreshes after a reuse step whose margin is at most this times its drift '
  '(default: what tools/calibrate_refresh.py found for the checkpoint)'
)
_QUANTILE_HELP = 'certified takes the kappa that holds for this share of the steps'


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


class _SettingParser(flags.ArgumentParser):
  """Reads a number and checks it as `check_setting` does."""

  def __init__(self, name: str):
    super().__init__()
    self._name = name

  def parse(self, argument: Any) -> float:
    with contextlib.suppress(ValueError):
      argument = float(argument)
    return check_setting(self._name, argument)

  def flag_type(self) -> str:
    return 'float'


class Definer:
  """Defines flags on `values`; every method returns what it defined."""

  def __init__(self, values: flags.FlagValues):
    self._values = values

  def text(self, name: str, help: str, default: str | None = None) -> flags.FlagHolder:
    return flags.DEFINE_string(name, default, help, flag_values=self._values)

  def texts(self, name: str, help: str) -> flags.FlagHolder:
    return flags.DEFINE_multi_string(name, None, help, flag_values=self._values)

  def switch(self, name: str, default: bool, help: str) -> flags.FlagHolder:
    return flags.DEFINE_bool(name, default, help, flag_values=self._values)

  def choice(
    self, name: str, help: str, default: str | None = None, choices: Sequence[str] | None = None
  ) -> flags.FlagHolder:
    return flags.DEFINE_enum(name, default, choices or CHOICES[name], help, flag_values=self._values)

  def whole(self, name: str, default: int | None, low: int, help: str, high: int | None = None) -> flags.FlagHolder:
    return flags.DEFINE_integer(name, default, help, lower_bound=low, upper_bound=high, flag_values=self._values)

  def knob(self, name: str, default: float | int | None = None) -> flags.FlagHolder:
    spec = KNOBS[name]
    default = spec.default if default is None else default
    if spec.integer and spec.high == 1:
      return self.switch(name, bool(default), spec.help)
    return flags.DEFINE(_KnobParser(name, spec), name, default, spec.help, flag_values=self._values)

  def setting(self, name: str) -> flags.FlagHolder:
    spec = SWITCHES[name]
    if isinstance(spec.default, bool):
      return self.switch(name, spec.default, spec.help)
    if isinstance(spec.default, int):
      return self.whole(name, spec.default, 1, spec.help)
    return self.choice(name, spec.help, spec.default)

  def decoding(self) -> Groups:
    """Decoder and refresh rule: all of `SETTINGS` but seed and chat."""
    return {
      'Decoder': [
        self.choice('decoder', "which tokens a step writes; by default that of the model's family"),
        self.knob('gen_length'),
        self.whole('block_length', None, 1, f'tokens of a block (default: {DEFAULT_BLOCK_LENGTH}, at most gen_length)'),
        *map(self.knob, ('steps', 'threshold', 'threshold_back', 'max_accept')),
        *map(self.setting, ('shadow', 'remasking', 'alg')),
        *map(self.knob, ('alg_temp', 'temperature', 'top_p', 'top_k', 'cfg_scale')),
        *map(self.setting, ('mask_prediction', 'early_stop', 'logits_eos_inf', 'confidence_eos_eot_inf')),
      ],
      'When the prompt is recomputed': [
        self.choice(
          'refresh', 'by drift and margin, in every step, in the first, by the clock, or by a certificate', 'archer'
        ),
        self.setting('drift'),
        self.knob('drift_radius', POLICIES['archer'].drift_radius),
        self.knob('min_margin'),
        flags.DEFINE(_SettingParser('kappa'), 'kappa', None, _KAPPA_HELP, flag_values=self._values),
        flags.DEFINE(
          _SettingParser('quantile'), 'quantile', DEFAULT_QUANTILE, _QUANTILE_HELP, flag_values=self._values
        ),
        *map(self.setting, ('on_low_margin', 'anchors')),
        *map(self.knob, ('refresh_interval', 'refresh_at_block_start', 'max_age')),
      ],
    }

  def running(self, seed_help: str) -> list[flags.FlagHolder]:
    """Config file, batch size, seed and dtype."""
    return [
      config_flags.DEFINE_config_file(
        'config', None, 'Python file whose get_config() gives flags', flag_values=self._values
      ),
      self.whole('batch_size', 8, 1, 'requests decoded together'),
      self.whole('seed', 0, 0, seed_help, MAX_SEED),
      self.choice('dtype', 'of parameters and matmuls; by default float32 on CPU and bfloat16 elsewhere'),
    ]


def help_text(usage: str, introduction: str, define: Callable[[flags.FlagValues], Groups]) -> str:
  """Every flag with its help, choices and default, in groups.

  Args:
    usage: how the command is called.
    introduction: paragraphs, between them an empty line; one whose lines are indented is shown as it is.
    define: defines the flags.
  """
  values = flags.FlagValues()
  lines = [usage]
  for paragraph in introduction.split('\n\n'):
    lines += ['', *(paragraph.splitlines() if paragraph.startswith(' ') else textwrap.wrap(paragraph, _WIDTH))]
  for title, holders in define(values).items():
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


def read_flags(
  argv: Sequence[str], define: Callable[[flags.FlagValues], Groups]
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Reads the flags and the file of --config, over which flags win.

  Args:
    argv: the program's name and its arguments.
    define: defines the flags.

  Returns:
    Every flag that is no setting, by name, and those settings that were given.

  Raises:
    ValueError, OSError, flags.Error: what is wrong, in one sentence.
  """
  # Not absl's global registry: the flags of whatever else is imported are none of this program's.
  values = flags.FlagValues()
  groups = define(values)
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
  return options, {name: value for name, value in given.items() if name in SETTINGS}


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


def run_command(
  argv: Sequence[str], help: Callable[[], str], prepare: Callable[[Sequence[str]], Callable[[], int]]
) -> int:
  """Runs a command: its help, or what it asks for, or what is wrong with it in one line.

  Args:
    argv: the program's name and its arguments.
    help: the text of --help.
    prepare: checks everything that can be wrong, and returns the run, which returns its exit code.

  Returns:
    The exit code: 0, 1 if anything is wrong, 130 after an interrupt, 75 after a preemption.
  """
  # Orbax reports every step of every restore.
  logging.set_verbosity(logging.WARNING)
  try:
    if _HELP.intersection(argv[1:]):
      print(help(), flush=True)
      return 0
    try:
      run = prepare(argv)
    except (ValueError, OSError, flags.Error) as error:
      return _fail(error)
    return run()
  except KeyboardInterrupt:
    print('interrupted; what was finished is written', file=sys.stderr)
    return INTERRUPTED
  except Preempted:
    print('preempted; what was finished is written', file=sys.stderr)
    return PREEMPTED
  except BrokenPipeError:
    # Whoever read stdout has had enough; what is still buffered must not raise again at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
  except OSError as error:
    return _fail(error)


def _fail(error: Exception) -> int:
  print(f'error: {"; ".join(line.strip() for line in str(error).splitlines())}', file=sys.stderr)
  return 1


def leave(code: int) -> NoReturn:
  """Ends the process with an exit code."""
  if code:
    # A batch may still be running, or another process be waited for, and an orderly exit would wait for its end.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
  sys.exit(code)

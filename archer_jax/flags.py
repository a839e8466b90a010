"""Flags of the commands that decode: how they are defined, explained and read, and how a command ends.

JAX is not imported here, so that --help and mistakes answer at once.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import contextlib
import io
import os
import sys
import textwrap
from typing import Any
from typing import NoReturn

from absl import flags
from absl import logging
from ml_collections import config_flags

from archer_jax import specs
from archer_jax.config import DEFAULT_REUSE
from archer_jax.config import DTYPES
from archer_jax.engine.settings import CHOICES
from archer_jax.engine.settings import DEFAULT_QUANTILE
from archer_jax.engine.settings import MAX_SEED
from archer_jax.engine.settings import SETTINGS
from archer_jax.engine.settings import check_setting
from archer_jax.jobs.preemption import PREEMPTED
from archer_jax.jobs.preemption import Preempted

Groups = dict[str, list[flags.FlagHolder]]

INTERRUPTED = 130
_HELP = frozenset(dashes + name for dashes in ('-', '--') for name in ('help', 'helpshort', 'helpfull', 'h'))
_WIDTH, _HELP_COLUMN = 110, 32
_QUANTILE_HELP = 'certified takes the kappa that holds for this share of the steps'


class _NumberParser(flags.ArgumentParser):
  """Reads a number and checks it as a request's would be."""

  def __init__(self, name: str, integer: bool):
    super().__init__()
    self._name, self._kind = name, int if integer else float

  def parse(self, argument: Any) -> float | int:
    if isinstance(argument, str):
      # What is no number at all goes on as text, for the one message.
      with contextlib.suppress(ValueError):
        argument = self._kind(argument)
    return check_setting(self._name, argument)

  def flag_type(self) -> str:
    return self._kind.__name__


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

  def choice(self, name: str, help: str, choices: Sequence[str], default: str | None = None) -> flags.FlagHolder:
    return flags.DEFINE_enum(name, default, choices, help, flag_values=self._values)

  def whole(self, name: str, default: int | None, low: int, help: str, high: int | None = None) -> flags.FlagHolder:
    return flags.DEFINE_integer(name, default, help, lower_bound=low, upper_bound=high, flag_values=self._values)

  def number(self, name: str, default: float | int | None, help: str, *, integer: bool = False) -> flags.FlagHolder:
    return flags.DEFINE(_NumberParser(name, integer), name, default, help, flag_values=self._values)

  def knob(self, name: str) -> flags.FlagHolder:
    knob = specs.knobs()[name]
    if knob.is_switch:
      return self.switch(name, bool(knob.default), knob.help)
    told = knob.told
    if knob.default == specs.UNSAID:
      its = [(spec.name, spec.knobs[name]) for spec in specs.specs(specs.DECODERS) if name in spec.knobs]
      told = ', '.join(f'{entry.default} for {decoder}' for decoder, entry in its)
    if told:
      return self.number(name, None, f'{knob.help} (default: {told})', integer=knob.integer)
    return self.number(name, knob.default, knob.help, integer=knob.integer)

  def setting(self, name: str) -> flags.FlagHolder:
    """The flag of a switch."""
    switch = specs.switches()[name]
    if switch.choices:
      return self.choice(name, switch.help, switch.choices, switch.default)
    if isinstance(switch.default, bool):
      return self.switch(name, switch.default, switch.help)
    return self.whole(name, switch.default, 1, switch.help)

  def method(self, spec: specs.Spec, known: set[str]) -> list[flags.FlagHolder]:
    """Flags of all that a method reads and that is not yet `known`, to which they are added."""
    knobs, switches = ([name for name in part if name not in known] for part in (spec.knobs, spec.switches))
    known |= {*knobs, *switches}
    return [*map(self.knob, knobs), *map(self.setting, switches)]

  def decoding(self) -> Groups:
    """All of `SETTINGS` but seed and chat, grouped by the methods that declare them."""
    known: set[str] = set()
    decoders, methods = list(specs.specs(specs.DECODERS)), list(specs.specs(specs.REUSE))
    what = _told((spec.name, spec.help) for spec in decoders)
    groups = {
      'Decoder': [
        self.choice(
          'decoder',
          f"which tokens a step writes, by default that of the model's family ({what})",
          CHOICES['decoder'],
        ),
        *self.method(specs.COMMON, known),
        self.whole('block_length', None, 1, f'tokens of a block (default: {_block_lengths(decoders)})'),
        # What several of them read comes first.
        *self.method(_shared(decoders), known),
      ]
    }
    for spec in decoders:
      if holders := self.method(spec, known):
        groups[f'Decoder {spec.name}'] = holders
    rules = specs.rules()
    groups['When the prompt is recomputed'] = [
      self.choice(
        'reuse',
        f'what is kept between steps ({_told((s.name, s.help) for s in methods)})',
        CHOICES['reuse'],
        DEFAULT_REUSE,
      ),
      self.choice(
        'refresh',
        f'when the prompt is recomputed ({_told((name, rule.help) for name, rule in rules.items())})',
        tuple(rules),
        next(iter(rules)),
      ),
      *(holder for spec in methods for holder in self.method(spec, known)),
      self.number('quantile', DEFAULT_QUANTILE, _QUANTILE_HELP),
    ]
    return groups

  def running(self, seed_help: str) -> list[flags.FlagHolder]:
    """Config file, batch size, seed and dtype."""
    return [
      config_flags.DEFINE_config_file(
        'config', None, 'Python file whose get_config() gives flags', flag_values=self._values
      ),
      self.whole('batch_size', 8, 1, 'requests decoded together'),
      self.whole('seed', 0, 0, seed_help, MAX_SEED),
      self.choice('dtype', 'of parameters and matmuls; by default float32 on CPU and bfloat16 elsewhere', DTYPES),
    ]


def _told(entries: Iterable[tuple[str, str]]) -> str:
  return '; '.join(f'{name}: {help}' for name, help in entries)


def _shared(decoders: Sequence[specs.DecoderSpec]) -> specs.Spec:
  """What more than one decoder reads."""
  several = lambda part: {
    name: entry
    for spec in decoders
    for name, entry in getattr(spec, part).items()
    if sum(name in getattr(other, part) for other in decoders) > 1
  }
  return specs.Spec(
    name='shared', help='read with several decoders', knobs=several('knobs'), switches=several('switches')
  )


def _block_lengths(decoders: Sequence[specs.DecoderSpec]) -> str:
  """The default length of a block, decoder by decoder."""
  lengths = {}
  for spec in decoders:
    if spec.block_alignments:
      lengths.setdefault(spec.block_length, []).append(spec.name)
  words = lambda length: 'gen_length' if length is None else f'{length}, at most gen_length'
  return '; '.join(f'{words(length)} for {" and ".join(names)}' for length, names in lengths.items())


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
  escape_output()
  try:
    if _HELP.intersection(argv[1:]):
      print(help(), flush=True)
      return 0
    try:
      run = prepare(argv)
    except (ValueError, OSError, flags.Error) as error:
      return fail(error)
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
    return fail(error)


def escape_output() -> None:
  """Has stdout and stderr escape what their encoding lacks, so that no answer is lost where it cannot be shown.

  JSON lines are not concerned: they are bytes, UTF-8 whatever the terminal.
  """
  for stream in (sys.stdout, sys.stderr):
    # Whoever closed one of them has none.
    if isinstance(stream, io.TextIOWrapper):
      stream.reconfigure(errors='backslashreplace')


def fail(error: Exception) -> int:
  """Says in one line what is wrong, and returns the exit code for it."""
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

"""What a decoder and a reuse method declare of themselves, and how they are found by name.

A method is one module of `archer_jax.decoders` or `archer_jax.reuse` with `METHOD`, an object that has a `spec`. Flags
and their help, checks, the knobs of a request and the fields of `DecodeConfig` are made from the specs alone, so that
a new method is a new file and no table elsewhere. Nothing here imports JAX, nor may a method do it before it is used.
"""

from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import functools
import importlib
import numbers
import pkgutil
from typing import Any

# How a model's logits stand: those of a position in its own row, or in the row before.
SAME_POSITION = 'same_position'
SHIFTED = 'shifted'

DECODERS = 'decoders'
REUSE = 'reuse'

INT32_MAX = 2**31 - 1
# Far above any use, and products with logits stay finite.
LARGE = 1_000_000
# Stands for a knob's number where nobody gave one and every decoder has a default of its own.
UNSAID = -1.0


@dataclasses.dataclass(frozen=True)
class Knob:
  """One tunable number, traced and per row: changing it compiles nothing.

  Attributes:
    default: value where nobody gave one; None means the row's gen_length.
    integer: whether it is a whole number (int32), else float32.
    low, high: the range, both ends included.
    help: one line for the command line.
    told: what the help says of the default, where that is more than a number.
    instead_of: name of a knob of the same decoder that must not be given with it.
  """

  default: float | int | None
  integer: bool
  low: float
  high: float
  help: str
  told: str = ''
  instead_of: str = ''

  @property
  def is_switch(self) -> bool:
    """Whether a user gives it as true or false."""
    return self.integer and (self.low, self.high) == (0, 1)

  def check(self, name: str, value: Any) -> float | int:
    """Returns `value` as int or float, or raises ValueError naming field, value and range."""
    kind = 'an integer' if self.integer else 'a number'
    # numpy's scalars are numbers too.
    wrong_type = isinstance(value, bool) or not isinstance(value, numbers.Integral if self.integer else numbers.Real)
    # `not (low <= value <= high)` also catches NaN.
    if wrong_type or not self.low <= value <= self.high:
      raise ValueError(f'{name} must be {kind} in [{self.low}, {self.high}], got {value!r}')
    return int(value) if self.integer else float(value)


@dataclasses.dataclass(frozen=True)
class Switch:
  """A choice that shapes the program: a field of `DecodeConfig`.

  Attributes:
    default: a text of `choices`; or true or false; or a whole number from 1.
    help: one line for the command line.
    choices: the texts that there are, for a text.
  """

  default: str | bool | int
  help: str
  choices: tuple[str, ...] = ()

  def check(self, name: str, value: Any) -> str | bool | int:
    """Returns `value`, or raises ValueError naming field, value and what is right."""
    if self.choices:
      if value not in self.choices:
        raise ValueError(f'{name} must be one of {", ".join(self.choices)}, got {value!r}')
    elif isinstance(self.default, bool):
      if not isinstance(value, bool):
        raise ValueError(f'{name} must be true or false, got {value!r}')
    elif isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
      raise ValueError(f'{name} must be an integer at least 1, got {value!r}')
    return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
  """What any method declares.

  Attributes:
    name: of the method, like that of its module.
    help: what it does, in a few words.
    knobs, switches: what it reads, by name. What several methods read is one object, or differs in its default alone.
    only: names of `knobs` and `switches` that are read with one alignment alone, and that one.
    seen: facts of each of its steps that traces keep as `NAME_per_step`, and their dtypes.
  """

  name: str
  help: str
  knobs: Mapping[str, Knob] = dataclasses.field(default_factory=dict)
  switches: Mapping[str, Switch] = dataclasses.field(default_factory=dict)
  only: Mapping[str, str] = dataclasses.field(default_factory=dict)
  seen: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderSpec(Spec):
  """What a decoder declares.

  Attributes:
    alignments: logit alignments that it can read; with any other it would decode garbage without an error.
    block_length: tokens of a block where nobody says, at most the row's gen_length; None for the whole row.
    block_alignments: alignments with which a row may have several blocks.
    guidance: whether an unconditional forward may ride along (classifier-free guidance).
    number: the setting that the number in `name:number` stands for.
    reads_block: whether the logits that a step decides on are those of its block alone, where no mask is predicted.
    takes_back: whether a token that was written may become a mask again.
    refresh_distance: K of `--refresh archer` where nobody gives one, chosen by measurement (docs/defaults.md).
  """

  alignments: tuple[str, ...]
  block_length: int | None = None
  block_alignments: tuple[str, ...] = ()
  guidance: bool = False
  number: str | None = None
  reads_block: bool = False
  takes_back: bool = False
  refresh_distance: int = 4

  def reads(self, name: str, alignment: str) -> bool:
    """Whether the decoder reads a setting with models of that alignment."""
    if name == 'block_length':
      return alignment in self.block_alignments
    return (name in self.knobs or name in self.switches) and self.only.get(name, alignment) == alignment


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
  """A named schedule of a reuse method: which of its settings a user may give with it.

  Attributes:
    help: what it does, in a few words.
    reads: names of the method's knobs, switches and numbers.
    fixed: knobs that the rule itself sets.
    needs: names that must be given.
    number: the setting that the number in `rule:number` stands for.
  """

  help: str
  reads: tuple[str, ...] = ()
  fixed: Mapping[str, float | int] = dataclasses.field(default_factory=dict)
  needs: tuple[str, ...] = ()
  number: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReuseSpec(Spec):
  """What a reuse method declares.

  Attributes:
    rules: its named schedules, the default first; a method may have none.
    reasons: of a refresh, the names of the bits of `reason_per_step` from the lowest.
    alignments: logit alignments that it has a rule for.
    published: names of the decoders that its authors ran it under.
    keeps_answer: whether states of the answer are kept too, also of tokens that a decoder then takes back.
    number: the setting that the number in `name:number` stands for.
    implies: what must be chosen with it, and is where nobody says: names of other settings and their values.
  """

  rules: Mapping[str, Rule] = dataclasses.field(default_factory=dict)
  reasons: tuple[str, ...] = ()
  alignments: tuple[str, ...] = (SAME_POSITION, SHIFTED)
  published: tuple[str, ...] = ()
  keeps_answer: bool = False
  number: str | None = None
  implies: Mapping[str, str] = dataclasses.field(default_factory=dict)


@functools.cache
def load(kind: str, name: str) -> Any:
  """The method of that name.

  Args:
    kind: `DECODERS` or `REUSE`.
    name: of the method, which is that of its module.

  Raises:
    ValueError: there is none.
    TypeError: a module that is no method, naming it.
  """
  if name not in names(kind):
    raise ValueError(f'{_FIELDS[kind]} must be one of {", ".join(names(kind))}, got {name!r}')
  module = f'archer_jax.{kind}.{name}'
  method = getattr(importlib.import_module(module), 'METHOD', None)
  if not isinstance(spec := getattr(method, 'spec', None), Spec) or isinstance(method, type):
    raise TypeError(f'{module} must end in METHOD = an instance with a spec, got {method!r}')
  if problem := _problem(spec, name):
    raise TypeError(f'the spec of {module}: {problem}')
  return method


def _problem(spec: Spec, name: str) -> str | None:
  """What is wrong with a spec that only whoever wrote it can put right."""
  if spec.name != name:
    return f'name must be that of the module, {name!r}, got {spec.name!r}'
  for knob, entry in spec.knobs.items():
    if entry.default is not None and not entry.low <= entry.default <= entry.high:
      return f'the default of {knob} must be in [{entry.low}, {entry.high}], got {entry.default}'
  if isinstance(spec, DecoderSpec):
    if unknown := {*spec.alignments, *spec.block_alignments, *spec.only.values()} - {SAME_POSITION, SHIFTED}:
      return f'alignments must be {SAME_POSITION} or {SHIFTED}, got {sorted(unknown)[0]!r}'
    if spec.number and spec.number not in {**COMMON.knobs, **spec.knobs}:
      return f'number must be one of its knobs, got {spec.number!r}'
  return None


@functools.cache
def names(kind: str) -> tuple[str, ...]:
  """Names of all methods of a kind, in the order of the alphabet; `base` and what begins with `_` is none."""
  folder = importlib.import_module(f'archer_jax.{kind}').__path__
  found = (module.name for module in pkgutil.iter_modules(folder))
  return tuple(sorted(name for name in found if name != 'base' and not name.startswith('_')))


def specs(kind: str) -> Iterator[Any]:
  """The specs of all methods of a kind."""
  return (load(kind, name).spec for name in names(kind))


# Field of `DecodeConfig`, and flag, that names a method of each kind.
_FIELDS = {DECODERS: 'decoder', REUSE: 'reuse'}

# What every method reads, or the loop itself does.
COMMON = Spec(
  name='common',
  help='read with every decoder',
  knobs={
    'gen_length': Knob(128, True, 1, INT32_MAX, 'tokens to generate'),
    'temperature': Knob(0.0, False, 0, LARGE, 'sampling temperature; 0 takes the best token'),
  },
  switches={
    'mask_prediction': Switch('never', 'whether the mask token may be predicted', ('never', 'official')),
    'early_stop': Switch(True, 'end a row at an end token that no mask stands before'),
  },
)


def _merged(part: str) -> dict[str, Any]:
  """Knobs or switches of all methods by name, the common ones first.

  A knob whose methods differ in its default has the default UNSAID.
  """
  merged = dict(getattr(COMMON, part))
  for spec in (*specs(DECODERS), *specs(REUSE)):
    for name, entry in getattr(spec, part).items():
      known = merged.setdefault(name, entry)
      if dataclasses.replace(entry, default=known.default) != known:
        raise TypeError(f'{name} of {spec.name} is that of another method, and must differ in its default alone')
      if entry.default != known.default:
        if part != 'knobs' or entry.integer or entry.low <= UNSAID:
          raise TypeError(f'{name} of {spec.name} must have the default of that of another method, {known.default!r}')
        merged[name] = dataclasses.replace(known, default=UNSAID)
  return merged


@functools.cache
def knobs() -> Mapping[str, Knob]:
  """Every number that is traced and per row."""
  return _merged('knobs')


@functools.cache
def switches() -> Mapping[str, Switch]:
  """Every choice that shapes a program."""
  return _merged('switches')


@functools.cache
def rules() -> Mapping[str, Rule]:
  """Every named schedule of all reuse methods."""
  found = [(name, rule) for spec in specs(REUSE) for name, rule in spec.rules.items()]
  if len(dict(found)) < len(found):
    raise TypeError(f'rules of reuse methods must have names of their own, got {[name for name, _ in found]}')
  return dict(found)

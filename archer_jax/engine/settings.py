"""What a run asks for: decoder, reuse method, refresh rule, switches and knobs, completed, and checked together.

Everything here is made from the specs of the methods. Plain Python without JAX, so that a mistake is told before
anything is loaded.
"""

from collections.abc import Mapping
import dataclasses
import numbers
from typing import Any

from archer_jax import specs
from archer_jax.config import DEFAULT_REUSE
from archer_jax.config import DecodeConfig
from archer_jax.config import ModelConfig
from archer_jax.specs import DECODERS
from archer_jax.specs import REUSE

MAX_SEED = 2**32 - 1
# Of the steps that a calibrated kappa holds for.
DEFAULT_QUANTILE = 0.99

# The choices of every setting that is a name.
CHOICES: Mapping[str, tuple[str, ...]] = {
  'decoder': specs.names(DECODERS),
  'reuse': specs.names(REUSE),
  'refresh': tuple(specs.rules()),
  **{name: switch.choices for name, switch in specs.switches().items() if switch.choices},
}
# Everything that shapes a decoding, by the name of its flag.
SETTINGS = (
  'decoder',
  'reuse',
  'refresh',
  'block_length',
  'seed',
  'chat',
  'quantile',
  *specs.switches(),
  *specs.knobs(),
)


def check_setting(name: str, value: Any) -> Any:
  """Returns `value` as the setting `name` wants it, or raises ValueError naming field, value and what is right."""
  if name == 'kappa' and not isinstance(value, bool) and isinstance(value, numbers.Real) and not value > 0:
    # The rule `certified` without the clause would be `once`.
    raise ValueError(f'kappa must be positive, got {value!r}')
  if knob := specs.knobs().get(name):
    # A knob that is a switch takes true and false too.
    return knob.check(name, int(value) if knob.is_switch and isinstance(value, bool) else value)
  if switch := specs.switches().get(name):
    return switch.check(name, value)
  if name in CHOICES:
    if value not in CHOICES[name]:
      raise ValueError(f'{name} must be one of {", ".join(CHOICES[name])}, got {value!r}')
    return value
  if name == 'seed':
    return _whole(name, value, 0, MAX_SEED)
  if name == 'block_length':
    return _whole(name, value, 1, None)
  if name == 'quantile':
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < value < 1:
      raise ValueError(f'quantile must be a number between 0 and 1, both excluded, got {value!r}')
    return float(value)
  assert name == 'chat', name
  if not isinstance(value, bool):
    raise ValueError(f'{name} must be true or false, got {value!r}')
  return value


def check_stop(value: Any) -> tuple[str, ...]:
  """Texts that end an answer, of one text or a list of them; raises ValueError for anything else."""
  texts = (value,) if isinstance(value, str) else value
  if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
    raise ValueError(f'stop must be a text or a list of texts, none of them empty, got {value!r}')
  return tuple(dict.fromkeys(texts))


def _whole(name: str, value: Any, low: int, high: int | None) -> int:
  span = f'at least {low}' if high is None else f'in [{low}, {high}]'
  if (
    isinstance(value, bool)
    or not isinstance(value, numbers.Integral)
    or value < low
    or (high is not None and value > high)
  ):
    raise ValueError(f'{name} must be an integer {span}, got {value!r}')
  return int(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Methods:
  """The methods of a run, and what they read.

  Attributes:
    alignment: of the model's logits.
    decoder, reuse: names.
    refresh: name of a rule of the reuse method, None for a method without rules.
    switches: every switch by its name.
  """

  alignment: str
  decoder: str
  reuse: str
  refresh: str | None
  switches: Mapping[str, str | bool | int]

  @property
  def spec(self) -> specs.DecoderSpec:
    return specs.load(DECODERS, self.decoder).spec

  @property
  def reuse_spec(self) -> specs.ReuseSpec:
    return specs.load(REUSE, self.reuse).spec

  @property
  def rule(self) -> specs.Rule:
    return self.reuse_spec.rules[self.refresh] if self.refresh else specs.Rule(help='')

  @property
  def caution(self) -> str | None:
    """What whoever chose the methods together should know, or None."""
    if self.reuse_spec.keeps_answer and self.spec.takes_back:
      return (
        f'reuse {self.reuse} keeps states of answer tokens, also of those that {self.decoder} takes back; it was '
        f'published with decoders that never do ({", ".join(self.reuse_spec.published)})'
      )
    return None

  def unread(self, name: str) -> str | None:
    """Why nothing would read the setting `name`, or None if something does."""
    decoders = [spec for spec in specs.specs(DECODERS) if _belongs(name, spec)]
    if decoders and not self.spec.reads(name, self.alignment):
      if self.spec in decoders:
        return (
          f'{name} must not be given with decoder {self.decoder} on a model with {self.alignment} logits, '
          'where its rule does not read it'
        )
      names = ' and '.join(spec.name for spec in decoders)
      return f'{name} must not be given with decoder {self.decoder}: it belongs to {names}'
    methods = [spec for spec in specs.specs(REUSE) if name in _reuse_names(spec)]
    if methods and self.reuse_spec not in methods:
      names = ' and '.join(spec.name for spec in methods)
      return f'{name} must not be given with reuse {self.reuse}: it belongs to {names}'
    if methods and self.reuse_spec.only.get(name, self.alignment) != self.alignment:
      return (
        f'{name} must not be given with reuse {self.reuse} on a model with {self.alignment} logits, '
        'where its rule does not read it'
      )
    if methods and self.refresh and name not in self.rule.reads and name != 'refresh':
      rules = [rule for rule, entry in self.reuse_spec.rules.items() if name in entry.reads]
      return f'{name} must not be given with refresh {self.refresh}: it belongs to {", ".join(rules)}'
    decoder, reuse = specs.load(DECODERS, self.decoder), specs.load(REUSE, self.reuse)
    return decoder.unread(name, self.switches) or reuse.unread(name, self.switches)


def _check_alternatives(given: Mapping[str, Any]) -> None:
  """Raises ValueError for two settings of which one stands in the other's place."""
  for name in given:
    knob = specs.knobs().get(name)
    if knob is not None and knob.instead_of in given:
      raise ValueError(f'{name} must not be given with {knob.instead_of}: it stands in its place')


def calibrated_limit(switches: Mapping[str, Any]) -> str:
  """The knob that keeps `certified` within what its kappa was measured at: a count of tokens, or a radius of drift."""
  return 'refresh_distance' if switches['drift'] == 'token' else 'drift_radius'


def _belongs(name: str, spec: specs.DecoderSpec) -> bool:
  """Whether a setting is one of a decoder's own."""
  return any(spec.reads(name, alignment) for alignment in spec.alignments)


def _reuse_names(spec: specs.ReuseSpec) -> set[str]:
  """Settings that belong to a reuse method."""
  ruled = {name for rule in spec.rules.values() for name in rule.reads}
  return {*spec.knobs, *spec.switches, *ruled, *(('refresh',) if spec.rules else ())}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """A run's settings; made by `make_settings`.

  Attributes:
    model: the model's config.
    methods: the decoder, the reuse method and its rule, and every switch.
    block_length: columns of a block, None where a row is one block.
    is_block_length_given: whether a user asked for it, so that a shorter canvas is a mistake.
    knobs: every knob's value where a request gives none; None where it follows gen_length or a calibration.
    seed: what the seeds of rows are made from.
    chat: whether a text is a user's turn of a conversation.
    stop: texts before which an answer ends, where a request gives none of its own.
    logprobs: whether results have their tokens' log-probabilities.
    quantile: which of the checkpoint's calibrated kappas `certified` takes where none was given.
  """

  model: ModelConfig
  methods: Methods
  block_length: int | None
  is_block_length_given: bool
  knobs: Mapping[str, float | int | None]
  seed: int
  chat: bool
  stop: tuple[str, ...] = ()
  logprobs: bool = False
  quantile: float = DEFAULT_QUANTILE

  @property
  def decoder(self) -> str:
    return self.methods.decoder

  @property
  def refresh(self) -> str | None:
    return self.methods.refresh

  @property
  def switches(self) -> Mapping[str, str | bool | int]:
    return self.methods.switches

  @property
  def reason_names(self) -> tuple[str, ...]:
    """Of a refresh, the bits of `reason_per_step` from the lowest."""
    return self.methods.reuse_spec.reasons

  @property
  def is_calibrated(self) -> bool:
    """Whether every number is known; `certified` without a kappa still waits for the checkpoint's."""
    return self.refresh != 'certified' or self.knobs['kappa'] is not None

  def with_calibration(self, kappa: float, limit: float | int) -> 'Settings':
    """The settings with a calibrated kappa, and the limit within which it was measured unless one was given."""
    found, name = {'kappa': kappa}, calibrated_limit(self.switches)
    if self.knobs[name] is None:
      found[name] = limit
    return dataclasses.replace(self, knobs={**self.knobs, **found})

  def row(self, given: Mapping[str, Any]) -> dict[str, float | int]:
    """Every knob of a request.

    Args:
      given: what the request itself gives.

    Raises:
      ValueError: a number out of its range, one that nothing would read, or numbers that do not go together.
    """
    for name in given:
      if reason := self.methods.unread(name):
        raise ValueError(reason)
    _check_alternatives(given)
    knobs = {**self.knobs, **{name: check_setting(name, value) for name, value in given.items()}}
    if not self.is_calibrated and 'kappa' not in given:
      raise ValueError('kappa must be given with refresh certified, or calibrated for the checkpoint')
    limit = calibrated_limit(self.switches)
    if knobs[limit] is None:
      knobs[limit] = specs.knobs()[limit].default
    length = knobs['gen_length']
    knobs = {name: length if value is None else value for name, value in knobs.items()}
    if self.is_block_length_given and self.block_length > length:
      raise ValueError(f'block_length must be at most gen_length, got {self.block_length} and gen_length={length}')
    specs.load(DECODERS, self.decoder).check(knobs, self.block_length, self.model)
    return knobs

  def by_name(self) -> dict[str, Any]:
    """Every setting by its user's name."""
    named = {name: getattr(self, name) for name in ('decoder', 'refresh', 'block_length', 'seed', 'chat', 'quantile')}
    if self.stop:
      named['stop'] = list(self.stop)
    if self.logprobs:
      named['logprobs'] = True
    return {**named, 'reuse': self.methods.reuse, **self.switches, **self.knobs}

  def config(self, canvas_length: int, **others: Any) -> DecodeConfig:
    """The program's config for a canvas of that many columns; `others` are fields that no setting gives."""
    return DecodeConfig(
      model=self.model,
      decoder=self.decoder,
      reuse=self.methods.reuse,
      canvas_length=canvas_length,
      # A row that is shorter than a block has one short block, whatever the block's length.
      block_length=min(self.block_length or canvas_length, canvas_length),
      logprobs=self.logprobs,
      **self.switches,
      **others,
    )


def make_settings(
  model: ModelConfig,
  given: Mapping[str, Any],
  *,
  recommended: Mapping[str, Any] | None = None,
  stop: Any = (),
  logprobs: bool = False,
) -> Settings:
  """Completes what was given with what the checkpoint recommends, and that with the methods' own defaults.

  Args:
    model: the model's config.
    given: what a user asked for, by names of `SETTINGS`.
    recommended: what a checkpoint recommends. Names that are no settings, or that the chosen methods do not read, are
      left out: they were meant for another choice.
    stop: a text, or several, before which answers end.
    logprobs: whether results have their tokens' log-probabilities.

  Raises:
    TypeError: a given name that is no setting.
    ValueError: a value out of its range, one that nothing would read, or values that do not go together.
  """
  if unknown := [name for name in given if name not in SETTINGS]:
    raise TypeError(f'{unknown[0]} is no setting; there are {", ".join(SETTINGS)}')
  given = {name: check_setting(name, value) for name, value in given.items()}
  recommended = {name: check_setting(name, value) for name, value in (recommended or {}).items() if name in SETTINGS}
  meant = recommended.get('decoder', model.default_decoder)
  if given.get('decoder', meant) != meant:
    # A number that each decoder has a default of its own for was recommended for another one.
    own = {name for name, knob in specs.knobs().items() if knob.default == specs.UNSAID}
    recommended = {name: value for name, value in recommended.items() if name not in own}
  wanted = {**recommended, **given}
  methods = _methods(model, wanted)
  for name in given:
    if reason := methods.unread(name):
      raise ValueError(reason)
  _check_alternatives(given)
  wanted = {name: value for name, value in wanted.items() if not methods.unread(name)}
  methods = _methods(model, wanted)
  preset = {}
  if methods.refresh is not None:
    reuse = specs.load(REUSE, methods.reuse)
    for name, choice in reuse.needs(methods.refresh, methods.switches).items():
      if name not in wanted:
        raise ValueError(f'{name} must be given with {choice}')
    preset = reuse.preset(methods.refresh, methods.switches, methods.spec)
  knobs = {}
  for name, knob in specs.knobs().items():
    default = methods.spec.knobs.get(name, knob).default
    knobs[name] = wanted.get(name, preset.get(name, default))
  if methods.refresh == 'certified' and 'kappa' not in wanted:
    # Both follow from the checkpoint's calibration.
    limit = calibrated_limit(methods.switches)
    knobs |= {'kappa': None, limit: wanted.get(limit)}
  elif 'quantile' in given and 'kappa' in given:
    raise ValueError('quantile must not be given with kappa: it chooses among the calibrated ones')
  block_length = None
  if methods.spec.reads('block_length', model.logit_alignment):
    # Not cut at gen_length, which would be a program for each length: a block ends at the end of its row.
    block_length = wanted.get('block_length') or methods.spec.block_length
  settings = Settings(
    model=model,
    methods=methods,
    block_length=block_length,
    is_block_length_given='block_length' in given,
    knobs=knobs,
    seed=wanted.get('seed', 0),
    chat=wanted.get('chat', False),
    stop=check_stop(stop),
    logprobs=logprobs,
    quantile=wanted.get('quantile', DEFAULT_QUANTILE),
  )
  # Both refuse what does not go together.
  settings.config(knobs['gen_length'])
  settings.row({} if settings.is_calibrated else {'kappa': 1.0})
  return settings


def _methods(model: ModelConfig, wanted: Mapping[str, Any]) -> Methods:
  """The methods that are wanted, or the defaults.

  Raises:
    ValueError: a refresh rule of another reuse method.
  """
  reuse = wanted.get('reuse', DEFAULT_REUSE)
  rules = specs.load(REUSE, reuse).spec.rules
  refresh = wanted.get('refresh', next(iter(rules), None)) if rules else None
  if refresh is not None and refresh not in rules:
    raise ValueError(f'refresh must be one of {", ".join(rules)} with reuse {reuse}, got {refresh!r}')
  wanted = {**specs.load(REUSE, reuse).spec.implies, **wanted}
  return Methods(
    alignment=model.logit_alignment,
    decoder=wanted.get('decoder', model.default_decoder),
    reuse=reuse,
    refresh=refresh,
    switches={name: wanted.get(name, switch.default) for name, switch in specs.switches().items()},
  )

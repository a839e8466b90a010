"""What a run asks for: decoder, refresh rule, switches and knobs, completed, and checked against each other.

Plain Python without JAX, so that a mistake is told before anything is loaded.
"""

from collections.abc import Mapping
import dataclasses
import numbers
from typing import Any

from archer_jax.config import CHOICES
from archer_jax.config import KNOBS
from archer_jax.config import POLICIES
from archer_jax.config import DecodeConfig
from archer_jax.config import ModelConfig

MAX_SEED = 2**32 - 1
# At most gen_length.
DEFAULT_BLOCK_LENGTH = 64
# Of the steps that a calibrated kappa holds for.
DEFAULT_QUANTILE = 0.99

_ALL = CHOICES['decoder']
_BLOCKS = ('wino', 'llada')


@dataclasses.dataclass(frozen=True)
class SwitchSpec:
  """A switch of `DecodeConfig` under the name that a user gives.

  Attributes:
    field: its name in `DecodeConfig`, where its default stands.
    help: one line for the command line.
    decoders: the decoders that read it.
  """

  field: str
  help: str
  decoders: tuple[str, ...] = _ALL

  @property
  def default(self) -> str | bool | int:
    return next(field.default for field in dataclasses.fields(DecodeConfig) if field.name == self.field)


SWITCHES: Mapping[str, SwitchSpec] = {
  'mask_prediction': SwitchSpec('mask_prediction', 'whether the mask token may be predicted'),
  'shadow': SwitchSpec('shadow', "what wino's verification rows see of each other: all, or only themselves", ('wino',)),
  'remasking': SwitchSpec('remasking', 'in which order llada writes', ('llada',)),
  'alg': SwitchSpec('alg', 'in which order dream writes', ('dream',)),
  'logits_eos_inf': SwitchSpec('suppress_eos', 'never write the end token', _BLOCKS),
  'confidence_eos_eot_inf': SwitchSpec('defer_end', 'write end tokens last', _BLOCKS),
  'early_stop': SwitchSpec('early_stop', 'end a row at an end token that no mask stands before'),
  'drift': SwitchSpec(
    'drift', 'distance of the canvas from that of its last refresh: by changed tokens, embeddings or hidden states'
  ),
  'anchors': SwitchSpec(
    'anchors',
    'kept prompts of a row, each of another canvas, of which a step takes the nearest; each takes as much memory',
  ),
  'on_low_margin': SwitchSpec(
    'on_low_margin',
    'where a reuse step decided by too small a margin, refresh in the next step, or decide anew in the same',
  ),
}

# What each refresh rule leaves to the user; no rule reads a name of this table that is not listed for it.
_EXTRA_CLAUSES = ('refresh_at_block_start', 'max_age')
_REFRESH_READS = {
  'archer': ('drift', 'drift_radius', 'min_margin', 'anchors', 'on_low_margin', *_EXTRA_CLAUSES),
  'always': (),
  'once': _EXTRA_CLAUSES,
  'interval': ('refresh_interval', *_EXTRA_CLAUSES),
  'certified': ('drift', 'drift_radius', 'kappa', 'quantile', 'anchors', 'on_low_margin', *_EXTRA_CLAUSES),
}
_REFRESH_NAMES = frozenset(name for names in _REFRESH_READS.values() for name in names)

# Everything that shapes a decoding, by the name of its flag.
SETTINGS = ('decoder', 'refresh', 'block_length', 'seed', 'chat', 'quantile', *SWITCHES, *KNOBS)


def check_setting(name: str, value: Any) -> Any:
  """Returns `value` as the setting `name` wants it, or raises ValueError naming field, value and what is right."""
  if name == 'kappa' and not isinstance(value, bool) and isinstance(value, numbers.Real) and not value > 0:
    # The rule `certified` without the clause would be `once`.
    raise ValueError(f'kappa must be positive, got {value!r}')
  if name in KNOBS:
    # The one knob that is a switch takes true and false too.
    is_switch = KNOBS[name].integer and KNOBS[name].high == 1
    return KNOBS[name].check(name, int(value) if is_switch and isinstance(value, bool) else value)
  if name == 'seed':
    return _whole(name, value, 0, MAX_SEED)
  if name in ('block_length', 'anchors'):
    return _whole(name, value, 1, None)
  if name == 'quantile':
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < value < 1:
      raise ValueError(f'quantile must be a number between 0 and 1, both excluded, got {value!r}')
    return float(value)
  field = SWITCHES[name].field if name in SWITCHES else name
  if field in CHOICES:
    if value not in CHOICES[field]:
      raise ValueError(f'{name} must be one of {", ".join(CHOICES[field])}, got {value!r}')
  elif not isinstance(value, bool):
    raise ValueError(f'{name} must be true or false, got {value!r}')
  return value


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
class Settings:
  """A run's settings; made by `make_settings`.

  Attributes:
    model: the model's config.
    decoder, refresh: their names.
    block_length: columns of a block, None for `dream`.
    is_block_length_given: whether a user asked for it, so that a shorter canvas is a mistake.
    switches: every switch by its user's name.
    knobs: every knob's value where a request gives none; None where it follows gen_length or a calibration.
    seed: what the seeds of rows are made from.
    chat: whether a text is a user's turn of a conversation.
    quantile: which of the checkpoint's calibrated kappas `certified` takes where none was given.
  """

  model: ModelConfig
  decoder: str
  refresh: str
  block_length: int | None
  is_block_length_given: bool
  switches: Mapping[str, str | bool | int]
  knobs: Mapping[str, float | int | None]
  seed: int
  chat: bool
  quantile: float = DEFAULT_QUANTILE

  @property
  def is_calibrated(self) -> bool:
    """Whether every number is known; `certified` without a kappa still waits for the checkpoint's."""
    return self.refresh != 'certified' or self.knobs['kappa'] is not None

  def with_calibration(self, kappa: float, drift_radius: float) -> 'Settings':
    """The settings with a calibrated kappa, and the radius within which it was measured unless one was given."""
    found = {'kappa': kappa}
    if self.knobs['drift_radius'] is None:
      found['drift_radius'] = drift_radius
    return dataclasses.replace(self, knobs={**self.knobs, **found})

  def row(self, given: Mapping[str, Any]) -> dict[str, float | int]:
    """Every knob of a request.

    Args:
      given: what the request itself gives.

    Raises:
      ValueError: a number out of its range, one that nothing would read, or numbers that do not go together.
    """
    for name in given:
      if reason := unread(name, self.decoder, self.refresh, self.switches):
        raise ValueError(reason)
    knobs = {**self.knobs, **{name: check_setting(name, value) for name, value in given.items()}}
    if not self.is_calibrated and 'kappa' not in given:
      raise ValueError('kappa must be given with refresh certified, or calibrated for the checkpoint')
    if knobs['drift_radius'] is None:
      knobs['drift_radius'] = KNOBS['drift_radius'].default
    length = knobs['gen_length']
    if knobs['steps'] is None:
      knobs['steps'] = length
    if self.is_block_length_given and self.block_length > length:
      raise ValueError(f'block_length must be at most gen_length, got {self.block_length} and gen_length={length}')
    if self.decoder == 'llada' and knobs['steps'] < (blocks := -(-length // self.block_length)):
      raise ValueError(
        f'steps must be at least the number of blocks, {blocks} (gen_length={length}, '
        f'block_length={self.block_length}), got {knobs["steps"]}'
      )
    return knobs

  def by_name(self) -> dict[str, Any]:
    """Every setting by its user's name."""
    named = {name: getattr(self, name) for name in ('decoder', 'refresh', 'block_length', 'seed', 'chat', 'quantile')}
    return {**named, **self.switches, **self.knobs}

  def config(self, canvas_length: int, **others: Any) -> DecodeConfig:
    """The program's config for a canvas of that many columns; `others` are fields that no setting gives."""
    return DecodeConfig(
      model=self.model,
      decoder=self.decoder,
      canvas_length=canvas_length,
      # A row that is shorter than a block has one short block, whatever the block's length.
      block_length=min(self.block_length or canvas_length, canvas_length),
      **{SWITCHES[name].field: value for name, value in self.switches.items()},
      **others,
    )


def make_settings(
  model: ModelConfig, given: Mapping[str, Any], *, recommended: Mapping[str, Any] | None = None
) -> Settings:
  """Completes what was given with what the checkpoint recommends, and that with the built-in defaults.

  Args:
    model: the model's config.
    given: what a user asked for, by names of `SETTINGS`.
    recommended: what a checkpoint recommends. Names that are no settings, or that the chosen decoder and refresh rule
      do not read, are left out: they were meant for another choice.

  Raises:
    TypeError: a given name that is no setting.
    ValueError: a value out of its range, one that nothing would read, or values that do not go together.
  """
  if unknown := [name for name in given if name not in SETTINGS]:
    raise TypeError(f'{unknown[0]} is no setting; there are {", ".join(SETTINGS)}')
  given = {name: check_setting(name, value) for name, value in given.items()}
  recommended = {name: check_setting(name, value) for name, value in (recommended or {}).items() if name in SETTINGS}
  wanted = {**recommended, **given}
  decoder = wanted.get('decoder', model.default_decoder)
  refresh = wanted.get('refresh', 'archer')
  switches = {name: wanted.get(name, spec.default) for name, spec in SWITCHES.items()}
  for name in given:
    if reason := unread(name, decoder, refresh, switches):
      raise ValueError(reason)
  wanted = {name: value for name, value in wanted.items() if not unread(name, decoder, refresh, switches)}

  if refresh == 'interval' and 'refresh_interval' not in wanted:
    raise ValueError('refresh_interval must be given with refresh interval')
  clauses = POLICIES[refresh].knobs()
  knobs = {name: wanted.get(name, clauses.get(name, spec.default)) for name, spec in KNOBS.items()}
  if refresh == 'certified' and 'kappa' not in wanted:
    # Both follow from the checkpoint's calibration.
    knobs['kappa'] = None
    knobs['drift_radius'] = wanted.get('drift_radius')
  elif 'quantile' in given and 'kappa' in given:
    raise ValueError('quantile must not be given with kappa: it chooses among the calibrated ones')
  length = knobs['gen_length']
  block_length = None
  if decoder != 'dream':
    # Only who asks for a block longer than the canvas is refused.
    block_length = given.get('block_length') or min(wanted.get('block_length', DEFAULT_BLOCK_LENGTH), length)
  settings = Settings(
    model=model,
    decoder=decoder,
    refresh=refresh,
    block_length=block_length,
    is_block_length_given='block_length' in given,
    switches={name: wanted.get(name, spec.default) for name, spec in SWITCHES.items()},
    knobs=knobs,
    seed=wanted.get('seed', 0),
    chat=wanted.get('chat', False),
    quantile=wanted.get('quantile', DEFAULT_QUANTILE),
  )
  # Both refuse what does not go together.
  settings.row({} if settings.is_calibrated else {'kappa': 1.0})
  settings.config(length)
  return settings


def unread(name: str, decoder: str, refresh: str, switches: Mapping[str, Any]) -> str | None:
  """Why nothing would read the setting `name`, or None if something does.

  Args:
    name: one of `SETTINGS`.
    decoder: of the run.
    refresh: the run's refresh rule.
    switches: the run's switches by their users' names.
  """
  spec = KNOBS.get(name) or SWITCHES.get(name)
  readers = _BLOCKS if name == 'block_length' else spec.decoders if spec else _ALL
  if decoder not in readers:
    return f'{name} must not be given with decoder {decoder}: it belongs to {" and ".join(readers)}'
  if name in _REFRESH_NAMES and name not in _REFRESH_READS[refresh]:
    rules = [rule for rule, names in _REFRESH_READS.items() if name in names]
    return f'{name} must not be given with refresh {refresh}: it belongs to {", ".join(rules)}'
  if name == 'alg_temp' and switches['alg'] == 'origin':
    return 'alg_temp must not be given with alg origin, whose order has no score'
  if name == 'confidence_eos_eot_inf' and decoder == 'llada' and switches['remasking'] == 'random':
    return 'confidence_eos_eot_inf must not be given with remasking random, whose order has no confidence'
  return None

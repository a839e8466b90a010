"""What `--compare` names: settings to decode with, in a grammar of one line.

    setting  = (rule | decoder | reuse method) [":" number] {"+" name "=" value}

The number is the name's own, as its spec declares it: the K of `archer`, the interval of `interval`, the kappa of
`certified`, the threshold of `wino` and `parallel`, the steps of `llada` and `dream`, the min_accept of `saber`, the
reuse_interval of `dkv`. Each `name=value` is a setting of the command line, such as `threshold=0.9`. Plain Python
without JAX, so that a mistake is told before anything is loaded.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
from typing import Any

from archer_jax import specs
from archer_jax.checkpoints.manifest import Manifest
from archer_jax.config import ModelConfig
from archer_jax.engine.settings import CHOICES
from archer_jax.engine.settings import SETTINGS
from archer_jax.engine.settings import Settings
from archer_jax.engine.settings import check_setting
from archer_jax.engine.settings import make_settings

# What a setting may begin with, and what the number behind each name sets; some have none.
NUMBERS = {
  **{name: rule.number for name, rule in specs.rules().items()},
  **{spec.name: spec.number for kind in (specs.DECODERS, specs.REUSE) for spec in specs.specs(kind)},
}
# The same for all, or the settings would not be compared on the same problems.
_COMMON = ('seed', 'chat')
# Problems of a generated task.
DEFAULT_N = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """One of the settings that are compared.

  Attributes:
    label: as it was written.
    given: what it says, by names of `engine.settings.SETTINGS`.
  """

  label: str
  given: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
  """What a command line asks for, checked as far as it can be without JAX and tasks.

  Attributes:
    options: the flags that are no settings, by name.
    settings: what is compared.
    base: settings that were given for all of them.
    manifest: of the checkpoint.
  """

  options: Mapping[str, Any]
  settings: Sequence[Setting]
  base: Mapping[str, Any]
  manifest: Manifest

  def complete(self, task: Mapping[str, Any]) -> dict[str, Settings]:
    """Every setting by its label, completed; `task` is recommended by the task, over what the checkpoint does."""
    recommended = {**self.manifest.defaults, **task}
    settings = complete(self.settings, self.base, self.manifest.config, recommended)
    return {setting.label: full for setting, full in zip(self.settings, settings, strict=True)}


def parse_settings(text: str) -> list[Setting]:
  """Reads settings between commas.

  Raises:
    ValueError: one that is not in the grammar, that stands twice, or a value that is wrong; the sentence says which.
  """
  settings = []
  for label in (part.strip() for part in text.split(',')):
    if not label:
      raise ValueError(f'compare must be settings between commas, such as always,archer, got {text!r}')
    if label in [setting.label for setting in settings]:
      raise ValueError(f'compare must name a setting once, got {label} twice')
    settings.append(Setting(label=label, given=_parse(label)))
  return settings


def _parse(label: str) -> dict[str, Any]:
  head, *changes = label.split('+')
  name, colon, number = head.partition(':')
  if name not in NUMBERS:
    raise ValueError(
      f'compare: {name!r} in {label!r} is no refresh rule, decoder or reuse method; there are {", ".join(NUMBERS)}'
    )
  given = {next(kind for kind in ('refresh', 'decoder', 'reuse') if name in CHOICES[kind]): name}
  pairs = []
  if colon:
    if NUMBERS[name] is None:
      able = ', '.join(name for name, number in NUMBERS.items() if number)
      raise ValueError(f'compare: {name} in {label!r} takes no number; {able} do')
    if NUMBERS[name] == 'refresh_distance' and not number.isdecimal():
      # A share of the canvas, as a drift is one, comes to mind.
      raise ValueError(
        f'compare: {label}: refresh_distance must be a count of positions, such as {name}:8, got {number!r}'
      )
    pairs.append((NUMBERS[name], number))
  for change in changes:
    changed, equals, value = change.partition('=')
    if not equals:
      raise ValueError(f'compare: {change!r} in {label!r} must be name=value, such as threshold=0.9')
    if changed in _COMMON:
      raise ValueError(f'compare: {changed} in {label!r} must be the same for all settings; give --{changed}')
    if changed not in SETTINGS:
      known = ', '.join(known for known in SETTINGS if known not in _COMMON)
      raise ValueError(f'compare: {changed!r} in {label!r} is no setting; there are {known}')
    pairs.append((changed, value))
  for changed, value in pairs:
    if changed in given:
      raise ValueError(f'compare: {changed} in {label!r} is given twice')
    try:
      given[changed] = check_setting(changed, _value(changed, value))
    except ValueError as error:
      raise ValueError(f'compare: {label}: {error}') from error
  return given


def _value(name: str, text: str) -> Any:
  """A text as the number or truth that it spells; anything else stays as it is, for the one message."""
  if text in ('true', 'false'):
    return text == 'true'
  knob, switch = specs.knobs().get(name), specs.switches().get(name)
  is_whole = name == 'block_length' or (knob and knob.integer) or (switch and type(switch.default) is int)
  if is_whole or knob or name == 'quantile':
    with contextlib.suppress(ValueError):
      return int(text) if is_whole else float(text)
  return text


def complete(
  settings: Sequence[Setting], base: Mapping[str, Any], model: ModelConfig, recommended: Mapping[str, Any]
) -> list[Settings]:
  """Completes every setting with the base that all share, and that with recommendations and defaults.

  Args:
    settings: from `parse_settings`.
    base: what was given for all of them; each takes the part that its decoder and refresh rule read.
    model: the model's config.
    recommended: by the checkpoint and the task, see `make_settings`.

  Raises:
    ValueError: values that do not go together, or one of `base` that no setting would read.
  """
  completed = []
  reasons = {name: [] for name in base}
  for setting in settings:
    try:
      # What shapes a setting must be known before it can be said what it reads.
      shape = make_settings(model, setting.given, recommended={**recommended, **base})
      read = {}
      for name, value in base.items():
        reason = f'{name} must not be given: every setting of compare has its own'
        if name not in setting.given:
          reason = shape.methods.unread(name)
        if reason is None:
          read[name] = value
        reasons[name].append(reason)
      completed.append(make_settings(model, {**read, **setting.given}, recommended=recommended))
    except ValueError as error:
      raise ValueError(f'compare: {setting.label}: {error}') from error
  for told in reasons.values():
    if None not in told:
      raise ValueError(told[0])
  return completed

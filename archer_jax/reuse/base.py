"""What every reuse method is.

Axes: B batch, P prompt.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING
from typing import Any
from typing import ClassVar

if TYPE_CHECKING:
  from collections.abc import Callable
  from collections.abc import Mapping

  from jax import Array

  from archer_jax.config import DecodeConfig
  from archer_jax.specs import DecoderSpec
  from archer_jax.specs import ReuseSpec
  from archer_jax.types import DecodeState
  from archer_jax.types import Knobs
  from archer_jax.types import Outcome
  from archer_jax.types import Plan
  from archer_jax.types import Update
  from archer_jax.types import Views


@dataclasses.dataclass(frozen=True)
class Reuse:
  """One way to feed less than everything, without a state of its own.

  What it must remember of the rows stands in `DecodeState.reuse`, small arrays [B, ...] that move with a row from slot
  to slot; what it keeps of the model in `DecodeState.kept`, large arrays that never move, so that a row in a new slot
  must not read them before it has written them.

  A step calls `plan`, `forward`, `review` and `commit`, in this order.
  """

  spec: ClassVar[ReuseSpec]

  def unread(self, name: str, switches: Mapping[str, Any]) -> str | None:
    """Why nothing would read a setting of the method's together with these switches, or None if something does."""
    del name, switches
    return None

  def preset(self, refresh: str, switches: Mapping[str, Any], decoder: DecoderSpec) -> Mapping[str, float | int]:
    """Knobs that a rule sets where nobody gives them."""
    del switches, decoder
    return self.spec.rules[refresh].fixed

  def needs(self, refresh: str, switches: Mapping[str, Any]) -> Mapping[str, str]:
    """Settings that must be given with a rule, and with what, in words."""
    del switches
    return dict.fromkeys(self.spec.rules[refresh].needs, f'refresh {refresh}')

  def check(self, knobs: Knobs, cfg: DecodeConfig) -> None:
    """Raises ValueError for knobs, arrays [B] whose values are at hand, that the program would not read."""
    del knobs, cfg

  def init(self, prompt_valid: Array, cfg: DecodeConfig) -> tuple[Any, Any]:
    """`DecodeState.reuse` and `.kept` before the first step, for prompts [B, P]."""
    raise NotImplementedError

  def kept_axes(self, cfg: DecodeConfig) -> Any:
    """The tree of `DecodeState.kept` with each array's tuple of logical axis names."""
    raise NotImplementedError

  def kept_bytes(self, batch: int, prompt_length: int, cfg: DecodeConfig) -> int:
    """Bytes of the keys and values that are kept for a batch."""
    raise NotImplementedError

  def plan(self, params, state: DecodeState, cfg: DecodeConfig) -> Plan:
    """Decides what each row feeds in the step about to be taken, and why."""
    raise NotImplementedError

  def forward(self, params, state: DecodeState, plan: Plan, views: Views, cfg: DecodeConfig) -> Outcome:
    """The model's forwards, at the cost of what the plan feeds; rows that are done count for nothing."""
    raise NotImplementedError

  def review(
    self,
    params,
    state: DecodeState,
    outcome: Outcome,
    update: Update,
    decide: Callable[[Array], Update],
    views: Views,
    cfg: DecodeConfig,
  ) -> tuple[Outcome, Update]:
    """What to do once the decision is known; by default nothing.

    Args:
      params: the model's parameters.
      state: the state before the step.
      outcome: of `forward`.
      update: the decision on its logits.
      decide: makes the decision on other logits.
      views: of the step.
      cfg: the program's config.
    """
    del params, state, decide, views, cfg
    return outcome, update

  def commit(
    self, params, state: DecodeState, outcome: Outcome, update: Update, live: Array, cfg: DecodeConfig
  ) -> tuple[Any, Any]:
    """`DecodeState.reuse` and `.kept` behind the step, for `live` rows, bool [B]; those of others stay as they were."""
    raise NotImplementedError

  def passes(self, cfg: DecodeConfig) -> Mapping[str, Callable[..., Any]]:
    """The forwards that a step is made of, by the names of `Work.passes`.

    Each takes (params, state, views) and does what one such pass over that batch does, so that its operations can be
    counted from the traced program.
    """
    raise NotImplementedError

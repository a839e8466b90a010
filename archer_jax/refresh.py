"""When to refresh: drift of the canvas from its anchor, the policy, and the decision of a step.

Axes: B batch, G canvas.
"""

import dataclasses

from jax import Array
import jax.numpy as jnp

from archer_jax.config import KNOBS
from archer_jax.types import DecodeState


@dataclasses.dataclass(frozen=True, kw_only=True)
class RefreshPolicy:
  """Every schedule as one set of clauses; a row refreshes when any of them holds. 0 switches a clause off.

  A row without an anchor always refreshes.

  Attributes:
    interval: at the row's steps 0, interval, 2 interval, ... through all blocks; 1 is every step.
    max_age: when the kept prompt was used for this many steps, the refresh's own included; 1 is every step.
    drift_radius: when the canvas about to be read is further from its anchor than this, in [0, 1].
    min_margin: when the last step reused with a smaller margin and the canvas is not its anchor.
    at_block_start: at the first step of every block.
  """

  interval: int = 0
  max_age: int = 0
  drift_radius: float = 0.0
  min_margin: float = 0.0
  at_block_start: bool = False

  def knobs(self) -> dict[str, float | int]:
    """The clauses under their knobs' names, checked.

    Raises:
      ValueError: a number out of its range, naming both.
    """
    values = {
      'refresh_interval': self.interval,
      'max_age': self.max_age,
      'drift_radius': self.drift_radius,
      'min_margin': self.min_margin,
      'refresh_at_block_start': int(self.at_block_start),
    }
    return {name: KNOBS[name].check(name, value) for name, value in values.items()}


ALWAYS = RefreshPolicy(interval=1)
ONCE = RefreshPolicy()


def changed_positions(state: DecodeState) -> Array:
  """int32 [B]: columns of the row at which the canvas differs from its anchor."""
  return jnp.sum((state.canvas != state.cache.anchor) & state.canvas_valid, axis=1, dtype=jnp.int32)


def token_drift(state: DecodeState) -> Array:
  """float32 [B] in [0, 1]: the share of a row's columns that changed since its anchor; 0 without an anchor.

  Reversible: a rollback to the anchor's tokens brings it back to 0.
  """
  share = changed_positions(state).astype(jnp.float32) / jnp.maximum(state.gen_length, 1).astype(jnp.float32)
  return jnp.where(state.cache.age < 0, jnp.float32(0), share)


def needs_refresh(state: DecodeState) -> Array:
  """Bool [B]: rows that refresh in the step about to be taken; the policy's clauses from the row's own knobs."""
  knobs, age = state.knobs, state.cache.age
  on_clock = (knobs.refresh_interval > 0) & (state.row_step % jnp.maximum(knobs.refresh_interval, 1) == 0)
  new_block = (knobs.refresh_at_block_start > 0) & (state.block_step == 0)
  too_old = (knobs.max_age > 0) & (age >= knobs.max_age)
  changed = changed_positions(state).astype(jnp.float32)
  # Counts are compared, since a quotient of floats is wrong at equality.
  limit = knobs.drift_radius * state.gen_length.astype(jnp.float32) + jnp.float32(1e-3)
  drifted = (knobs.drift_radius > 0) & (changed > limit)
  unsure = ~state.refreshed & (state.margin < knobs.min_margin) & (changed > 0)
  return ~state.done & ((age < 0) | on_clock | new_block | too_old | drifted | unsure)

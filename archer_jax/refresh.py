"""When to refresh: drift of the canvas from its anchor, and the decision of a step by its policy's clauses.

Axes: B batch, G canvas.
"""

from jax import Array
import jax.numpy as jnp

from archer_jax.types import DecodeState


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

"""The decision of a step by its policy's clauses, from the row's own knobs.

Axes: B batch.
"""

from jax import Array
import jax.numpy as jnp

from archer_jax.config import DecodeConfig
from archer_jax.reuse.prompt.drift import changed_positions
from archer_jax.reuse.prompt.reasons import Reason
from archer_jax.types import DecodeState


def reasons(state: DecodeState, distance: Array, drift: Array, cfg: DecodeConfig) -> Array:
  """int32 [B], bits of `Reason`: the clauses that hold in the step about to be taken, 0 for a reuse.

  Args:
    state: the state whose canvas is about to be read.
    distance: int32 [B], positions of this canvas that differ from the anchor (D of arXiv 2608.08086, algorithm 1).
    drift: float32 [B], of this canvas by `cfg.drift`.
    cfg: the program's config.
  """
  knobs, age = state.knobs, state.reuse.age
  on_clock = (knobs.refresh_interval > 0) & (state.row_step % jnp.maximum(knobs.refresh_interval, 1) == 0)
  new_block = (knobs.refresh_at_block_start > 0) & (state.block_step == 0)
  too_old = (knobs.max_age > 0) & (age >= knobs.max_age)
  clauses = {
    Reason.FIRST: age < 0,
    Reason.INTERVAL: on_clock,
    Reason.BLOCK_START: new_block,
    Reason.MAX_AGE: too_old,
    Reason.DISTANCE: (knobs.refresh_distance > 0) & (distance >= knobs.refresh_distance),
    # The share of changed tokens is the distance once more, and has no radius.
    Reason.DRIFT: (cfg.drift != 'token') & (knobs.drift_radius > 0) & (drift > knobs.drift_radius),
  }
  bits = sum(holds.astype(jnp.int32) * bit.value for bit, holds in clauses.items())
  if cfg.on_low_margin == 'next_step':
    bits += jnp.where(state.reuse.refreshed, 0, is_unsure(state, state.reuse.margin, state.reuse.drift))
  return jnp.where(state.done, 0, bits)


def is_unsure(state: DecodeState, margin: Array, drift: Array) -> Array:
  """int32 [B], bits of `Reason`: the clauses on a reuse's margin that hold while the canvas is not its anchor.

  At the anchor the kept prompt is as good as a fresh one.

  Args:
    state: the state whose canvas is compared with the anchor.
    margin: float32 [B], of the reuse.
    drift: float32 [B], of the canvas that it read.
  """
  knobs = state.knobs
  # Not `margin <= ...`, which a margin that is no number would pass.
  uncertain = (knobs.kappa > 0) & ~(margin > knobs.kappa * drift)
  bits = {Reason.MARGIN: margin < knobs.min_margin, Reason.CERTIFICATE: uncertain}
  bits = sum(holds.astype(jnp.int32) * bit.value for bit, holds in bits.items())
  return jnp.where(changed_positions(state) > 0, bits, 0)

"""LLaDA's own decoder: a fixed number of tokens per step, most confident first or in random order (arXiv 2502.09992).

A row's steps are divided evenly over its blocks and a block's tokens evenly over its steps; the first ones get one
more where it does not come out even.
"""

import dataclasses

from jax import Array
import jax.numpy as jnp

from archer_jax import numerics
from archer_jax.config import DecodeConfig
from archer_jax.decoders import base
from archer_jax.types import DecodeState


@dataclasses.dataclass(frozen=True)
class LLaDA(base.Decoder):
  """The decoder with a schedule; it never takes a token back."""

  def decision_index(self, state: DecodeState, cfg: DecodeConfig) -> Array:
    return base.block_decision_index(state, cfg)

  def step_limit(self, state: DecodeState, cfg: DecodeConfig) -> Array:
    # Steps that would write nothing are not taken, unless a predicted mask may have left something to write.
    return state.knobs.steps if cfg.allows_mask else jnp.minimum(state.knobs.steps, state.gen_length)

  def update(self, state: DecodeState, index: Array, logits: Array, cfg: DecodeConfig) -> base.Update:
    end = base.block_end(state, cfg)
    masks = base.mask_positions(state, cfg)
    # With `never` no mask stands before the block, so that this is the block's own masks.
    eligible = base.from_canvas(masks, index, False) & (index < end[:, None])
    chosen = base.candidates(state, index, base.permitted(logits, cfg), cfg)

    n_blocks = jnp.maximum(base.block_count(state.gen_length, cfg), 1)
    block_steps = state.knobs.steps // n_blocks + (state.block < state.knobs.steps % n_blocks).astype(jnp.int32)
    # Fewer steps than blocks is refused where requests are read; the bound keeps the division defined here.
    block_steps = jnp.maximum(block_steps, 1)
    length = end - state.block * cfg.block_length
    n_write = length // block_steps + (state.block_step < length % block_steps).astype(jnp.int32)

    if cfg.remasking == 'random':
      score = numerics.position_gumbel(state.seed, numerics.ORDER_STREAM, state.row_step, index)
    else:
      score = chosen.confidence
    write = eligible & (numerics.rank_descending(score, eligible) < n_write[:, None])

    if cfg.remasking == 'random':
      # The order is not the model's, so that only what is written depends on the logits.
      margin = numerics.smallest(chosen.gap, write) / 2
    else:
      margin = jnp.minimum(base.argmax_margin(chosen, write, eligible), numerics.cut_gap(score, write, eligible) / 4)

    accepted = base.to_canvas(write, index, write, jnp.zeros_like(state.pending))
    canvas = base.to_canvas(chosen.token, index, write, state.canvas)
    block_done = state.block_step + 1 >= block_steps
    if not cfg.allows_mask:
      # More steps than tokens: the rest of the schedule would write nothing.
      block_done |= jnp.sum(write, axis=1) == jnp.sum(eligible, axis=1)
    return base.Update(
      canvas=canvas,
      accepted=accepted,
      remasked=jnp.zeros_like(accepted),
      block_done=block_done,
      margin=margin,
      pending=state.pending,
      last_accept=state.last_accept,
    )

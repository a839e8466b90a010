"""LLaDA's own decoder: a fixed number of tokens per step, most confident first or in random order (arXiv 2502.09992).

A row's steps are divided evenly over its blocks and a block's tokens evenly over its steps; the first ones get one
more where it does not come out even.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING
from typing import ClassVar

from etils import epy

from archer_jax.decoders import base
from archer_jax.specs import LARGE
from archer_jax.specs import SAME_POSITION
from archer_jax.specs import DecoderSpec
from archer_jax.specs import Knob
from archer_jax.specs import Switch

with epy.lazy_imports():
  import jax.numpy as jnp

  from archer_jax import numerics
  from archer_jax import types

if TYPE_CHECKING:
  from collections.abc import Mapping
  from typing import Any

  from jax import Array

  from archer_jax.config import DecodeConfig
  from archer_jax.types import DecodeState
  from archer_jax.types import Update
  from archer_jax.types import Views


@dataclasses.dataclass(frozen=True)
class LLaDA(base.Decoder):
  """The decoder with a schedule; it never takes a token back."""

  spec: ClassVar[DecoderSpec] = DecoderSpec(
    name='llada',
    help='writes a fixed number of tokens a step',
    alignments=(SAME_POSITION,),
    block_length=64,
    block_alignments=(SAME_POSITION,),
    guidance=True,
    number='steps',
    knobs={
      'steps': base.STEPS,
      'cfg_scale': Knob(0.0, False, 0, LARGE, 'classifier-free guidance of llada; 0 is off'),
    },
    switches={
      'remasking': Switch('low_confidence', 'in which order llada writes', ('low_confidence', 'random')),
      **base.END_SWITCHES,
    },
  )

  def views(self, state: DecodeState, cfg: DecodeConfig) -> Views:
    return types.Views(columns=base.block_columns(state, cfg))

  def step_limit(self, state: DecodeState, cfg: DecodeConfig) -> Array:
    # Steps that would write nothing are not taken, unless a predicted mask may have left something to write.
    return state.knobs.steps if cfg.allows_mask else jnp.minimum(state.knobs.steps, state.gen_length)

  def unread(self, name: str, switches: Mapping[str, Any]) -> str | None:
    if name == 'confidence_eos_eot_inf' and switches['remasking'] == 'random':
      return 'confidence_eos_eot_inf must not be given with remasking random, whose order has no confidence'
    return None

  def check(self, knobs: Mapping[str, Any], block_length: int | None) -> None:
    length = knobs['gen_length']
    if knobs['steps'] < (blocks := -(-length // block_length)):
      raise ValueError(
        f'steps must be at least the number of blocks, {blocks} (gen_length={length}, '
        f'block_length={block_length}), got {knobs["steps"]}'
      )

  def update(self, state: DecodeState, views: Views, logits: Array, cfg: DecodeConfig) -> Update:
    index = views.columns
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

    accepted = base.to_canvas(write, index, write, jnp.zeros(state.canvas.shape, bool))
    canvas = base.to_canvas(chosen.token, index, write, state.canvas)
    block_done = state.block_step + 1 >= block_steps
    if not cfg.allows_mask:
      # More steps than tokens: the rest of the schedule would write nothing.
      block_done |= jnp.sum(write, axis=1) == jnp.sum(eligible, axis=1)
    return types.Update(
      canvas=canvas,
      accepted=accepted,
      remasked=jnp.zeros_like(accepted),
      block_done=block_done,
      margin=margin,
      decoder=state.decoder,
    )


METHOD = LLaDA()

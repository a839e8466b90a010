"""LLaDA's own decoder: a fixed number of tokens per step, most confident first or in random order (arXiv 2502.09992).

A row's steps are divided evenly over its blocks and a block's tokens evenly over its steps; the first ones get one
more where it does not come out even. A random order is drawn before the first step, so that it is known what the next
steps will write.

Axes: B batch, G canvas, R decision rows.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING
from typing import ClassVar
from typing import NamedTuple

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
  from archer_jax.config import ModelConfig
  from archer_jax.types import DecodeState
  from archer_jax.types import Update
  from archer_jax.types import Views


class Order(NamedTuple):
  """State of the random order."""

  score: Array  # float32 [B, G], the highest is written first


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
    reads_block=True,
    knobs={
      'steps': base.STEPS,
      'cfg_scale': Knob(0.0, False, 0, LARGE, 'classifier-free guidance of llada; 0 is off'),
    },
    switches={
      'remasking': Switch('low_confidence', 'in which order llada writes', ('low_confidence', 'random')),
      **base.END_SWITCHES,
    },
  )

  def init(self, state: DecodeState, cfg: DecodeConfig) -> Order | tuple[()]:
    if cfg.remasking != 'random':
      return ()
    start = jnp.zeros_like(state.row_step)
    return Order(numerics.position_gumbel(state.seed, numerics.ORDER_STREAM, start, base.all_columns(state)))

  def views(self, state: DecodeState, cfg: DecodeConfig) -> Views:
    return types.Views(columns=base.block_columns(state, cfg))

  def reads(self, state: DecodeState, views: Views, cfg: DecodeConfig) -> Array:
    eligible = super().reads(state, views, cfg)
    if cfg.remasking != 'random':
      return eligible
    return _first(_score(state, views), eligible, state, cfg)

  def step_limit(self, state: DecodeState, cfg: DecodeConfig) -> Array:
    # Steps that would write nothing are not taken, unless a predicted mask may have left something to write.
    return state.knobs.steps if cfg.allows_mask else jnp.minimum(state.knobs.steps, state.gen_length)

  def unread(self, name: str, switches: Mapping[str, Any]) -> str | None:
    if name == 'confidence_eos_eot_inf' and switches['remasking'] == 'random':
      return 'confidence_eos_eot_inf must not be given with remasking random, whose order has no confidence'
    return None

  def check(self, knobs: Mapping[str, Any], block_length: int | None, model: ModelConfig) -> None:
    del model
    length = knobs['gen_length']
    if knobs['steps'] < (blocks := -(-length // block_length)):
      raise ValueError(
        f'steps must be at least the number of blocks, {blocks} (gen_length={length}, '
        f'block_length={block_length}), got {knobs["steps"]}'
      )

  def update(self, state: DecodeState, views: Views, logits: Array, cfg: DecodeConfig) -> Update:
    index = views.columns
    # With `never` no mask stands before the block, so that this is the block's own masks.
    eligible = super().reads(state, views, cfg)
    chosen = base.candidates(state, index, base.permitted(logits, cfg), cfg)

    score = _score(state, views) if cfg.remasking == 'random' else chosen.confidence
    write = _first(score, eligible, state, cfg)

    if cfg.remasking == 'random':
      # The order is not the model's, so that only what is written depends on the logits.
      margin = numerics.smallest(chosen.gap, write) / 2
    else:
      margin = jnp.minimum(base.argmax_margin(chosen, write, eligible), numerics.cut_gap(score, write, eligible) / 4)

    accepted = base.to_canvas(write, index, write, jnp.zeros(state.canvas.shape, bool))
    canvas = base.to_canvas(chosen.token, index, write, state.canvas)
    block_done = state.block_step + 1 >= base.block_steps(state, cfg)
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


def _score(state: DecodeState, views: Views) -> Array:
  """The drawn order of the decision rows, float32 [B, R]."""
  return base.from_canvas(state.decoder.score, views.columns, 0)


def _first(score: Array, eligible: Array, state: DecodeState, cfg: DecodeConfig) -> Array:
  """The rows that the schedule's step writes, bool [B, R]: the highest scores among the eligible ones."""
  block_steps = base.block_steps(state, cfg)
  length = base.block_end(state, cfg) - state.block * cfg.block_length
  n_write = length // block_steps + (state.block_step < length % block_steps).astype(jnp.int32)
  return eligible & (numerics.rank_descending(score, eligible) < n_write[:, None])


METHOD = LLaDA()

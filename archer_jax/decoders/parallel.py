"""Fast-dLLM's decoder: everything in the block that is confident enough, and always the best (arXiv 2505.22618).

By threshold, a token is written whose probability is at least that. By factor f, with the tokens in falling order of
probability p(1), p(2), ..., the longest run from the first is written in which (n + 1) (1 - p(n)) < f.

On models with shifted logits the first step of a block writes its first token alone, as the public code for Dream does:
no other step then reads the row before the block.

Axes: B batch, R decision rows.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING
from typing import ClassVar

from etils import epy

from archer_jax.decoders import base
from archer_jax.specs import LARGE
from archer_jax.specs import SAME_POSITION
from archer_jax.specs import SHIFTED
from archer_jax.specs import DecoderSpec
from archer_jax.specs import Knob

with epy.lazy_imports():
  import jax.numpy as jnp

  from archer_jax import numerics
  from archer_jax import types

if TYPE_CHECKING:
  from jax import Array

  from archer_jax.config import DecodeConfig
  from archer_jax.types import DecodeState
  from archer_jax.types import Update
  from archer_jax.types import Views


@dataclasses.dataclass(frozen=True)
class Parallel(base.Decoder):
  """The decoder that writes what it is sure of, and never takes a token back."""

  spec: ClassVar[DecoderSpec] = DecoderSpec(
    name='parallel',
    help='writes all that is confident enough, and never takes a token back',
    alignments=(SAME_POSITION, SHIFTED),
    block_length=32,
    block_alignments=(SAME_POSITION, SHIFTED),
    number='threshold',
    reads_block=True,
    knobs={
      'threshold': dataclasses.replace(base.THRESHOLD, default=0.9),
      'factor': Knob(
        0.0,
        False,
        0,
        LARGE,
        'parallel writes as many tokens as (n + 1) times the doubt of the n-th surest stays below this; 0 is off',
        instead_of='threshold',
      ),
    },
    switches=base.END_SWITCHES,
  )

  def views(self, state: DecodeState, cfg: DecodeConfig) -> Views:
    return types.Views(columns=base.block_columns(state, cfg))

  def reads(self, state: DecodeState, views: Views, cfg: DecodeConfig) -> Array:
    eligible = super().reads(state, views, cfg)
    return eligible & base.in_turn(state, views.columns, cfg) if cfg.model.logit_alignment == SHIFTED else eligible

  def update(self, state: DecodeState, views: Views, logits: Array, cfg: DecodeConfig) -> Update:
    index = views.columns
    eligible = self.reads(state, views, cfg)
    chosen = base.candidates(state, index, base.permitted(logits, cfg), cfg)
    confidence = chosen.confidence
    rank = numerics.rank_descending(confidence, eligible)
    by_factor = state.knobs.factor > 0
    # The bound of each row at its place in the order, as log-odds.
    bound = jnp.where(
      by_factor[:, None],
      _bound_of_rank(state.knobs.factor, rank),
      numerics.logit(state.knobs.threshold)[:, None],
    )
    passed = eligible & jnp.where(by_factor[:, None], confidence > bound, confidence >= bound)
    # By factor a run ends at the first that fails.
    first_failed = jnp.min(jnp.where(eligible & ~passed, rank, index.shape[1]), axis=1)
    n_write = jnp.where(by_factor, first_failed, jnp.sum(passed, axis=1, dtype=jnp.int32))
    write = eligible & (rank < jnp.maximum(n_write, 1)[:, None])

    # By threshold all are compared with it; by factor those of the run, and the one that ends it.
    compared = eligible & (~by_factor[:, None] | (rank <= n_write[:, None]))
    margin = numerics.smallest(jnp.abs(numerics.distance(confidence, bound)), compared) / 2
    margin = jnp.minimum(margin, base.argmax_margin(chosen, write, eligible))
    ranked = by_factor | (n_write == 0)
    margin = jnp.minimum(margin, jnp.where(ranked, numerics.cut_gap(confidence, write, eligible) / 4, jnp.inf))

    accepted = base.to_canvas(write, index, write, jnp.zeros(state.canvas.shape, bool))
    canvas = base.to_canvas(chosen.token, index, write, state.canvas)
    left = (canvas == cfg.model.mask_id) & (jnp.arange(cfg.canvas_length) < base.block_end(state, cfg)[:, None])
    return types.Update(
      canvas=canvas,
      accepted=accepted,
      remasked=jnp.zeros_like(accepted),
      block_done=~jnp.any(left, axis=1),
      margin=margin,
      decoder=state.decoder,
    )


def _bound_of_rank(factor: Array, rank: Array) -> Array:
  """Log-odds float32 [B, R] above which the token at a place in the order passes; of places from 0."""
  doubt = factor[:, None] / (rank + 2).astype(jnp.float32)
  inside = jnp.clip(doubt, jnp.float32(1e-30), jnp.float32(1 - 2**-24))
  return jnp.where(doubt >= 1, -jnp.inf, jnp.log1p(-inside) - jnp.log(inside))


METHOD = Parallel()

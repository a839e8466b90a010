"""dKV-Cache-Greedy: a step feeds what was just written, what it writes, and masks near to that (arXiv 2505.15781).

It needs an order that is known before the forward: that of `llada` with `remasking random`, drawn from the row's seed
(`DecodeState.decoder.score`, which may be replaced by another order before the first step). Every block begins with a
refresh, and then refreshes by the clock. The window of a column that is about to be written are the `window` nearest
masks that no other brought along: to its left, to its right, to its left, and so on.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING
from typing import ClassVar

from etils import epy

from archer_jax.reuse import _columns
from archer_jax.reuse import dkv
from archer_jax.specs import INT32_MAX
from archer_jax.specs import SAME_POSITION
from archer_jax.specs import Knob
from archer_jax.specs import ReuseSpec

with epy.lazy_imports():
  from jax import lax
  import jax.numpy as jnp

  from archer_jax import numerics

if TYPE_CHECKING:
  from jax import Array

  from archer_jax.config import DecodeConfig
  from archer_jax.types import DecodeState
  from archer_jax.types import Views


@dataclasses.dataclass(frozen=True)
class DKVGreedy(dkv.DKV):
  """Keeps everything but the surroundings of what is written."""

  spec: ClassVar[ReuseSpec] = ReuseSpec(
    name='dkv_greedy',
    help='keeps all but the surroundings of what is written, in a known order',
    knobs={
      'reuse_interval': _columns.REUSE_INTERVAL,
      'window': Knob(4, True, 0, INT32_MAX, 'dkv_greedy feeds so many masks near each column that it writes'),
    },
    reasons=('block_start', 'interval'),
    alignments=(SAME_POSITION,),
    published=('llada',),
    keeps_answer=True,
    number='window',
    implies={'decoder': 'llada', 'remasking': 'random'},
  )

  def due(self, state: DecodeState, cfg: DecodeConfig) -> Array:
    del cfg
    step = state.block_step
    return _columns.bits(step == 0, (step > 0) & (step % state.knobs.reuse_interval == 0))

  def rows(self, state: DecodeState, views: Views, cfg: DecodeConfig) -> Array:
    before, now = state.reuse.masks, _columns.masks(state, cfg)
    read = cfg.decoder_method.reads(state, views, cfg)
    batch = jnp.arange(read.shape[0])[:, None]
    place = jnp.where(read, views.columns, cfg.canvas_length)
    written_now = jnp.zeros_like(now).at[batch, place].set(True, mode='drop')
    fed = (before & ~now) | written_now
    order = numerics.rank_descending(state.decoder.score, written_now)
    column = jnp.arange(cfg.canvas_length)

    def bring(n, fed):
      """With the window of the n-th column in the order."""
      centre = jnp.argmax(order == n, axis=1)[:, None]
      offset = column - centre
      # 1 for the left neighbour, 2 for the right one, 3 for the next on the left.
      turn = jnp.where(offset < 0, -2 * offset - 1, 2 * offset).astype(jnp.float32)
      near = numerics.rank_descending(-turn, before & ~fed) < state.knobs.window[:, None]
      return fed | (near & jnp.any(order == n, axis=1, keepdims=True))

    return lax.fori_loop(0, jnp.max(jnp.sum(written_now, axis=1)), bring, fed)

  def widths(self, cfg: DecodeConfig) -> list[int]:
    longest = _columns.most_rows(cfg)
    return [*(width for width in (8, 16, 32, 64, 128, 256, 512) if width < longest), longest]


METHOD = DKVGreedy()

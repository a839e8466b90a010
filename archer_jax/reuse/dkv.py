"""dKV-Cache-Decode: a token's keys and values are kept one step after it was written (arXiv 2505.15781).

A step feeds what was a mask before the step before it: the masks, and what that step wrote. So the states of a token
are made by the first forward that it is an input of, and then stay until the next refresh. Every block refreshes in its
first two steps and then by the clock; on models with shifted logits only by the clock, which begins with a refresh.

There a row is fed for the token behind it: `un` keeps a row once that token is written, `un_right` once its own is too.
As in the public code, the last row has no token behind it: `un` feeds it in the second step for the last time, and
`un_right` together with the row before it.

A token that was taken back is a mask, and is fed again like all of them.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING
from typing import ClassVar
from typing import NamedTuple

from etils import epy

from archer_jax.reuse import _columns
from archer_jax.specs import SHIFTED
from archer_jax.specs import ReuseSpec
from archer_jax.specs import Switch

with epy.lazy_imports():
  import jax.numpy as jnp

if TYPE_CHECKING:
  from jax import Array

  from archer_jax.config import DecodeConfig
  from archer_jax.types import DecodeState
  from archer_jax.types import Views


class Before(NamedTuple):
  """What the method remembers."""

  masks: Array  # bool [B, G], of the canvas before the last step


@dataclasses.dataclass(frozen=True)
class DKV(_columns.Columns):
  """Keeps what was written before the last step."""

  spec: ClassVar[ReuseSpec] = ReuseSpec(
    name='dkv',
    help='keeps what was written before the last step, renewed by the clock',
    knobs={'reuse_interval': _columns.REUSE_INTERVAL},
    switches={
      'dkv_shift': Switch(
        'un',
        'when dkv keeps a row of a shifted model: once the token behind it is written, or its own too',
        ('un', 'un_right'),
      )
    },
    only={'dkv_shift': SHIFTED},
    reasons=('block_start', 'second', 'interval'),
    published=('llada', 'dream'),
    keeps_answer=True,
    number='reuse_interval',
  )

  def start(self, batch: int, cfg: DecodeConfig) -> Before:
    return Before(jnp.ones((batch, cfg.canvas_length), bool))

  def due(self, state: DecodeState, cfg: DecodeConfig) -> Array:
    step = state.block_step
    second = (step == 1) & (cfg.model.logit_alignment != SHIFTED)
    by_clock = (step > 0) & (step % state.knobs.reuse_interval == 0)
    return _columns.bits(step == 0, second, by_clock)

  def rows(self, state: DecodeState, views: Views, cfg: DecodeConfig) -> Array:
    del views
    before, now = state.reuse.masks, _columns.masks(state, cfg)
    masks = before | now
    if cfg.model.logit_alignment != SHIFTED:
      return masks
    own = _columns.of_canvas(masks, state, cfg)
    behind = _columns.behind(masks, state, cfg)
    last = _columns.of_canvas(jnp.arange(cfg.canvas_length) == state.gen_length[:, None] - 1, state, cfg)
    if cfg.dkv_shift == 'un':
      taken_back = _columns.of_canvas(now & ~before, state, cfg)
      return taken_back | jnp.where(last, (state.block_step == 1)[:, None], behind)
    either = own | behind
    return jnp.where(last, jnp.roll(either, 1, axis=1), either)

  def remember(self, state: DecodeState, cfg: DecodeConfig) -> Before:
    return Before(_columns.masks(state, cfg))


METHOD = DKV()

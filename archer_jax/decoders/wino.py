"""WINO: commit what is confident, verify it leave-one-out, take back what is doubtful (arXiv 2507.18578).

The rule is that of the public code, for rows of a batch. In a step with n positions pending, all whose probability is
above `threshold` are committed, at most clip(floor(0.7 n), 5, max_accept) of them, at least the best one. If more than
one was committed, the tokens of the block that stood there before the step and whose probability in the shadow's view
is below `threshold_back` are re-masked, the lowest first and at most one less than the step before committed.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING
from typing import ClassVar
from typing import NamedTuple

from etils import epy

from archer_jax.decoders import base
from archer_jax.specs import INT32_MAX
from archer_jax.specs import SAME_POSITION
from archer_jax.specs import DecoderSpec
from archer_jax.specs import Knob
from archer_jax.specs import Switch

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

# The re-mask bound of a block's first step, as in the public code; nothing stands in a fresh block, so it never binds.
_FIRST_LAST_ACCEPT = 30


class WinoState(NamedTuple):
  """What WINO remembers of its rows."""

  pending: Array  # bool [B, G], positions of the current block that are still to be committed
  last_accept: Array  # int32 [B], tokens that the step before committed


@dataclasses.dataclass(frozen=True)
class Wino(base.Decoder):
  """The decoder that verifies what it wrote."""

  spec: ClassVar[DecoderSpec] = DecoderSpec(
    name='wino',
    help='commits what is confident, takes back what does not stand up to verification',
    alignments=(SAME_POSITION,),
    block_length=64,
    block_alignments=(SAME_POSITION,),
    number='threshold',
    reads_block=True,
    takes_back=True,
    refresh_distance=8,
    knobs={
      'threshold': base.THRESHOLD,
      'threshold_back': Knob(0.9, False, 0, 1, 'wino takes back tokens verified below this probability'),
      'max_accept': Knob(20, True, 1, INT32_MAX, 'wino commits at most this many tokens a step'),
    },
    switches={
      'shadow': Switch(
        'official', "what wino's verification rows see of each other: all, or only themselves", ('official', 'self')
      ),
      **base.END_SWITCHES,
    },
  )

  def init(self, state: DecodeState, cfg: DecodeConfig) -> WinoState:
    del cfg
    return WinoState(pending=jnp.zeros(state.canvas.shape, bool), last_accept=jnp.zeros_like(state.block))

  def views(self, state: DecodeState, cfg: DecodeConfig) -> Views:
    twin = base.block_index(state, cfg)
    # Shadows past a short last block are padding: nobody's keys, and their logits are not read.
    valid = twin < state.gen_length[:, None]
    shadow = types.Shadow(columns=twin, valid=valid, sees_peers=cfg.shadow == 'official')
    return types.Views(columns=base.block_columns(state, cfg), shadow=shadow)

  def reads(self, state: DecodeState, views: Views, cfg: DecodeConfig) -> Array:
    pending, end, twin = state.decoder.pending, base.block_end(state, cfg)[:, None], views.shadow.columns
    committing = base.from_canvas(pending, views.columns, False) & (views.columns < end)
    return jnp.concatenate([committing, (twin < end) & ~base.from_canvas(pending, twin, True)], axis=1)

  def step_limit(self, state: DecodeState, cfg: DecodeConfig) -> Array:
    """A block needs at most as many steps as positions were pending at its start.

    (pending + last_accept) falls by at least one in every step. With `never` these are gen_length over all blocks;
    with `official` a block may also take up every column before it, so that it is the sum of the blocks' ends.
    """
    if not cfg.allows_mask:
      return state.gen_length
    n_blocks = base.block_count(state.gen_length, cfg).astype(jnp.float32)
    # In float32, since many short blocks overflow an int32; the bound need not be exact.
    total = n_blocks * (n_blocks + 1) / 2 * cfg.block_length
    return jnp.minimum(total, jnp.float32(2**30)).astype(jnp.int32)

  def enter_block(self, state: DecodeState, cfg: DecodeConfig) -> WinoState:
    before_end = jnp.arange(cfg.canvas_length)[None] < base.block_end(state, cfg)[:, None]
    return WinoState(
      pending=base.mask_positions(state, cfg) & before_end,
      last_accept=jnp.full_like(state.decoder.last_accept, _FIRST_LAST_ACCEPT),
    )

  def update(self, state: DecodeState, views: Views, logits: Array, cfg: DecodeConfig) -> Update:
    knobs, index = state.knobs, views.columns
    pending, last_accept = state.decoder
    logits = base.permitted(logits, cfg)
    rows = index.shape[1]
    eligible = base.from_canvas(pending, index, False)
    chosen = base.candidates(state, index, logits[:, :rows], cfg)
    confidence = chosen.confidence

    n_pending = jnp.sum(eligible, axis=1, dtype=jnp.int32)
    # The public code takes the product in float32.
    share = jnp.floor(jnp.float32(0.7) * n_pending.astype(jnp.float32)).astype(jnp.int32)
    cap = jnp.minimum(jnp.maximum(share, 5), knobs.max_accept)
    passed = eligible & (confidence > numerics.logit(knobs.threshold)[:, None])
    n_passed = jnp.sum(passed, axis=1, dtype=jnp.int32)
    n_accept = jnp.minimum(jnp.clip(n_passed, 1, cap), n_pending)
    accept = eligible & (numerics.rank_descending(confidence, eligible) < n_accept[:, None])

    # Verification: what stood in the block before this step, judged by the rows that cannot see it.
    twin = views.shadow.columns
    in_block = twin < base.block_end(state, cfg)[:, None]
    standing = in_block & ~base.from_canvas(pending, twin, True)
    support = numerics.log_odds(logits[:, rows:], base.from_canvas(state.canvas, twin, 0))
    doubtful = standing & (support < numerics.logit(knobs.threshold_back)[:, None])
    n_doubtful = jnp.sum(doubtful, axis=1, dtype=jnp.int32)
    verified = (n_accept > 1) & (last_accept > 1)
    capped = n_doubtful >= last_accept
    n_remask = jnp.where(n_accept > 1, jnp.minimum(n_doubtful, last_accept - 1), 0)
    remask = standing & (numerics.rank_descending(-support, standing) < n_remask[:, None])

    rank_binds = (n_passed > cap) | (n_passed == 0)
    margin = jnp.minimum(
      base.threshold_margin(confidence, knobs.threshold, eligible),
      base.argmax_margin(chosen, accept, eligible),
    )
    margin = jnp.minimum(margin, jnp.where(rank_binds, numerics.cut_gap(confidence, accept, eligible) / 4, jnp.inf))
    margin_back = jnp.minimum(
      base.threshold_margin(support, knobs.threshold_back, standing),
      jnp.where(capped, numerics.cut_gap(-support, remask, standing) / 4, jnp.inf),
    )
    margin = jnp.minimum(margin, jnp.where(verified, margin_back, jnp.inf))

    nothing = jnp.zeros_like(pending)
    accepted = base.to_canvas(accept, index, accept, nothing)
    remasked = base.to_canvas(remask, twin, remask, nothing)
    canvas = base.to_canvas(chosen.token, index, accept, state.canvas)
    canvas = jnp.where(remasked, cfg.model.mask_id, canvas)
    pending = (pending & ~accepted) | remasked
    return types.Update(
      canvas=canvas,
      accepted=accepted,
      remasked=remasked,
      block_done=~jnp.any(pending, axis=1),
      margin=margin,
      decoder=WinoState(pending=pending, last_accept=n_accept),
    )


METHOD = Wino()

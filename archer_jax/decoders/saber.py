"""Saber: commit at least a few tokens in every step, take back those whose confidence fell (arXiv 2510.18165).

The public code has two rules under this name, one for each alignment of logits. In both a step commits all masks whose
confidence is above the mean confidence of what was committed before, at least a few of them, and then takes back at
least one token, unless the block is complete.

`same_position` (LLaDA): at least n = `min_accept` are committed. With a = max(n, committed in this step),
min(max(n // 2, ceil(a / 8)), a - 1) of all standing tokens are taken back, those whose column's best probability fell
most since the step before, or rose least. The mean is over each column's last commit, taken back or not.

`shifted` (Dream): at least two are committed, and max(1, min(ceil(a / 8), a - 1)) are taken back, those whose token is
least probable now. The mean is over each column's first commit. The logit of the padding token is lowered while
tokens are committed, most in the first steps. The canvas is one block.

Probabilities saturate in float32 where trained models live, and with them means and differences of probabilities. So
they are carried as deficits q = 1 - p, which keep their relative precision, and compared as such: p > mean(p') is
q < mean(q'), and p - p' is q' - q.

Axes: B batch, G canvas, V vocab.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING
from typing import ClassVar
from typing import NamedTuple

from etils import epy

from archer_jax.decoders import base
from archer_jax.specs import INT32_MAX
from archer_jax.specs import LARGE
from archer_jax.specs import SAME_POSITION
from archer_jax.specs import SHIFTED
from archer_jax.specs import DecoderSpec
from archer_jax.specs import Knob

with epy.lazy_imports():
  from jax import lax
  import jax.numpy as jnp

  from archer_jax import numerics
  from archer_jax import types

if TYPE_CHECKING:
  from collections.abc import Mapping
  from typing import Any

  from jax import Array

  from archer_jax.config import DecodeConfig
  from archer_jax.config import ModelConfig
  from archer_jax.decoders.base import Candidates
  from archer_jax.types import DecodeState
  from archer_jax.types import Update
  from archer_jax.types import Views

# The last time of the schedule of `shifted`, and what keeps the logarithm of its penalty finite at the first.
_EPS = 1e-3
# Log-odds beyond this count as this: no deficit in float32 tells them apart.
_FAR = 200.0


class Falls(NamedTuple):
  """State of the rule for `same_position`."""

  pending: Array  # bool [B, G], not committed; a predicted mask token is committed like any other
  kept: Array  # float32 [B, G], the deficit with which a column was last committed; infinite if it never was
  previous: Array  # float32 [B, G], the deficit in the step before; infinite past the end of the block it was in


class Firsts(NamedTuple):
  """State of the rule for `shifted`."""

  first: Array  # float32 [B, G], the deficit with which a column was first committed; infinite if it never was


class _Accepted(NamedTuple):
  """What a step commits."""

  accept: Array  # bool [B, G]
  count: Array  # int32 [B]
  threshold: Array  # float32 [B], as a probability
  margin: Array  # float32 [B], of thresholds and ranks; that of the tokens is not in it


@dataclasses.dataclass(frozen=True)
class Saber(base.Decoder):
  """The decoder that takes a token back in every step."""

  spec: ClassVar[DecoderSpec] = DecoderSpec(
    name='saber',
    help='commits what is above the mean confidence so far, takes back what fell most, in every step',
    alignments=(SAME_POSITION, SHIFTED),
    block_alignments=(SAME_POSITION,),
    number='min_accept',
    takes_back=True,
    refresh_distance=4,
    knobs={
      'min_accept': Knob(2, True, 1, INT32_MAX, 'saber commits at least this many tokens a step'),
      'steps': base.STEPS,
      'eos_penalty': Knob(0.0, False, 0, LARGE, 'saber lowers the logit of padding by so much, less with every step'),
    },
    only={'min_accept': SAME_POSITION, 'steps': SHIFTED, 'eos_penalty': SHIFTED},
    seen={'threshold': 'float32'},
  )

  def init(self, state: DecodeState, cfg: DecodeConfig) -> Falls | Firsts:
    never = jnp.full(state.canvas.shape, jnp.inf, jnp.float32)
    if cfg.model.logit_alignment == SHIFTED:
      return Firsts(first=never)
    # Before the first step every probability counts as 0.
    return Falls(pending=base.mask_positions(state, cfg), kept=never, previous=jnp.ones_like(never))

  def views(self, state: DecodeState, cfg: DecodeConfig) -> Views:
    """Every column: the confidence of standing tokens counts too."""
    del cfg
    return types.Views(columns=base.all_columns(state))

  def reads(self, state: DecodeState, views: Views, cfg: DecodeConfig) -> Array:
    return views.columns < base.block_end(state, cfg)[:, None]

  def step_limit(self, state: DecodeState, cfg: DecodeConfig) -> Array:
    """Every step leaves at least one more column committed than it found, so that a row takes at most gen_length.

    A step that does not complete its block commits at least n columns of the block and those before it, at least two
    for `shifted`, since with fewer left it commits them all and the block is complete; and it takes back fewer than it
    commits. The one that completes it commits at least one and takes none back. Predicted masks of `same_position`
    are committed as well. Those of `shifted` are not and may be predicted for ever, as in the public code, which fails
    past its schedule's end: there it is a limit, not a bound.
    """
    if cfg.allows_mask and cfg.model.logit_alignment == SHIFTED:
      return jnp.maximum(state.knobs.steps, state.gen_length)
    return state.gen_length

  def check(self, knobs: Mapping[str, Any], block_length: int | None, model: ModelConfig) -> None:
    del block_length
    if model.logit_alignment == SHIFTED and knobs['eos_penalty'] > 0 and model.pad_id is None:
      raise ValueError(
        'eos_penalty must be 0 for a model without a pad_token_id, whose logit it would lower, '
        f'got {knobs["eos_penalty"]}'
      )

  def candidates(self, state: DecodeState, views: Views, logits: Array, cfg: DecodeConfig) -> Candidates:
    """What a step would write at every column, under `shifted` with the logit of padding lowered."""
    if cfg.model.logit_alignment == SHIFTED and cfg.model.pad_id is not None:
      is_pad = jnp.arange(cfg.model.vocab_size) == cfg.model.pad_id
      logits = jnp.where(is_pad, logits + _penalty(state)[:, None, None], logits)
    return base.candidates(state, views.columns, logits, cfg)

  def update(self, state: DecodeState, views: Views, logits: Array, cfg: DecodeConfig) -> Update:
    chosen = self.candidates(state, views, logits, cfg)
    if cfg.model.logit_alignment == SHIFTED:
      return _shifted(state, chosen, logits, cfg)
    return _same_position(state, views.columns, chosen, logits, cfg)


def _same_position(state: DecodeState, columns: Array, chosen: Candidates, logits: Array, cfg: DecodeConfig) -> Update:
  old = state.decoder
  least = state.knobs.min_accept
  before_end = columns < base.block_end(state, cfg)[:, None]
  # `never` forbids to commit the mask token, not to watch it: whose best token it is has fallen or risen all the same.
  watched = base.candidates(state, columns, logits, cfg, with_mask=True)
  deficit, seen = _deficit(chosen.confidence), jnp.where(before_end, _deficit(watched.confidence), jnp.inf)
  eligible = old.pending & before_end
  kept = jnp.where(before_end, old.kept, jnp.inf)
  accepted = _accept(chosen.confidence, deficit, eligible, kept, least)
  canvas = jnp.where(accepted.accept, chosen.token, state.canvas)
  pending = old.pending & ~accepted.accept
  block_done = ~jnp.any(pending & before_end, axis=1)

  # In a block's first step its columns have no confidence to fall from: only those of earlier blocks are taken back.
  standing = before_end & (canvas != cfg.model.mask_id) & jnp.isfinite(old.previous)
  most = jnp.maximum(least, accepted.count)
  n_remask = jnp.where(block_done, 0, jnp.minimum(jnp.maximum(least // 2, (most + 7) // 8), most - 1))
  rank = _rank_of_fall(old.previous, seen, standing)
  remask = rank < n_remask[:, None]

  cut_made = (n_remask > 0) & (jnp.sum(standing, axis=1) > n_remask)
  # A sampled candidate's confidence is another one's if another token is drawn, so that all that is compared counts.
  margin = jnp.minimum(accepted.margin, base.argmax_margin(chosen, accepted.accept, eligible))
  compared = standing & cut_made[:, None]
  margin = jnp.minimum(margin, base.argmax_margin(watched, jnp.zeros_like(compared), compared))
  margin = jnp.minimum(margin, _fall_margin(watched.confidence, old.previous, rank, n_remask))
  return types.Update(
    canvas=jnp.where(remask, cfg.model.mask_id, canvas),
    accepted=accepted.accept,
    remasked=remask,
    block_done=block_done,
    margin=margin,
    decoder=Falls(pending | remask, jnp.where(accepted.accept, deficit, old.kept), previous=seen),
    seen={'threshold': accepted.threshold},
  )


def _shifted(state: DecodeState, chosen: Candidates, logits: Array, cfg: DecodeConfig) -> Update:
  first = state.decoder.first
  eligible = base.mask_positions(state, cfg)
  deficit = _deficit(chosen.confidence)
  accepted = _accept(chosen.confidence, deficit, eligible, first, jnp.full_like(state.row_step, 2))
  canvas = jnp.where(accepted.accept, chosen.token, state.canvas)
  is_mask = canvas == cfg.model.mask_id
  block_done = ~jnp.any(is_mask & state.canvas_valid, axis=1)

  standing = state.canvas_valid & ~is_mask
  # What is taken back is judged without the penalty.
  doubt = -numerics.log_odds(logits, canvas)
  n_remask = jnp.where(block_done, 0, jnp.maximum(1, jnp.minimum((accepted.count + 7) // 8, accepted.count - 1)))
  remask = standing & (numerics.rank_descending(doubt, standing) < n_remask[:, None])

  margin = jnp.minimum(accepted.margin, base.argmax_margin(chosen, accepted.accept, eligible))
  margin = jnp.minimum(margin, numerics.cut_gap(doubt, remask, standing) / 4)
  return types.Update(
    canvas=jnp.where(remask, cfg.model.mask_id, canvas),
    accepted=accepted.accept,
    remasked=remask,
    block_done=block_done,
    margin=margin,
    decoder=Firsts(first=jnp.where(accepted.accept & jnp.isinf(first), deficit, first)),
    seen={'threshold': accepted.threshold},
  )


def _penalty(state: DecodeState) -> Array:
  """What is added to the logit of the padding token, float32 [B]: eos_penalty * log(1 - t + 1e-3).

  The time t falls from 1 to 1e-3 over the schedule's steps and stays there.
  """
  steps = state.knobs.steps
  # Not as 1 - t + 1e-3, whose constants XLA adds up first: that is off by 5e-5 at t = 1.
  elapsed = jnp.minimum(state.row_step, steps).astype(jnp.float32) / steps.astype(jnp.float32)
  return state.knobs.eos_penalty * jnp.log(jnp.float32(_EPS) + jnp.float32(1 - _EPS) * elapsed)


def _deficit(confidence: Array) -> Array:
  """1 - p of log-odds, with relative precision; written out since a sigmoid may be computed by a tanh."""
  smaller = jnp.exp(-jnp.abs(confidence))
  return jnp.where(confidence >= 0, smaller, jnp.float32(1)) / (1 + smaller)


def _accept(confidence: Array, deficit: Array, eligible: Array, kept: Array, least: Array) -> _Accepted:
  """Commits what is above the mean of what is kept, or the best `least` where fewer are.

  Args:
    confidence: float32 [B, G], log-odds.
    deficit: float32 [B, G], the same as deficits.
    eligible: bool [B, G].
    kept: float32 [B, G], deficits that the mean is over; infinite ones are none.
    least: int32 [B].
  """
  counts = jnp.isfinite(kept)
  # Without any the threshold is a probability of 1, which nothing passes.
  mean = jnp.sum(jnp.where(counts, kept, 0), axis=1) / jnp.maximum(jnp.sum(counts, axis=1), 1).astype(kept.dtype)
  passed = eligible & (deficit < mean[:, None])
  too_few = jnp.sum(passed, axis=1, dtype=jnp.int32) < least
  best = eligible & (numerics.rank_descending(confidence, eligible) < least[:, None])
  accept = jnp.where(too_few[:, None], best, passed)
  bound = jnp.log1p(-mean) - jnp.log(mean)
  threshold_gap = numerics.smallest(jnp.abs(numerics.distance(confidence, bound[:, None])), eligible)
  rank_gap = jnp.where(too_few, numerics.cut_gap(confidence, accept, eligible), jnp.inf)
  return _Accepted(
    accept=accept,
    count=jnp.sum(accept, axis=1, dtype=jnp.int32),
    threshold=1 - mean,
    margin=jnp.minimum(threshold_gap / 2, rank_gap / 4),
  )


def _rank_of_fall(previous: Array, deficit: Array, standing: Array) -> Array:
  """Rank of every standing column, 0 where the probability fell most; int32 [B, G], G where not standing.

  Beside a large previous deficit a saturated one vanishes in the rise previous - deficit. The rounding error, a float32
  too, breaks the tie, so that the order is that of the exact differences; then the lower position is first.
  """
  previous = jnp.where(standing, previous, 0)
  deficit = jnp.where(standing, deficit, 0)
  rise = previous - deficit
  subtracted = previous - rise
  error = (previous - (rise + subtracted)) + (subtracted - deficit)
  position = jnp.arange(rise.shape[-1])
  pairs = lambda values: (values[..., None, :], values[..., :, None])
  ahead = jnp.zeros((), bool)
  for other, mine in (pairs(position), pairs(error), pairs(rise)):
    ahead = (other < mine) | ((other == mine) & ahead)
  rank = jnp.sum(ahead & standing[:, None, :], axis=-1, dtype=jnp.int32)
  return jnp.where(standing, rank, rise.shape[-1])


def _fall_margin(confidence: Array, previous: Array, rank: Array, count: Array) -> Array:
  """Margin of the order between every column that is taken back and every one that is not, float32 [B].

  Args:
    confidence: float32 [B, G], log-odds.
    previous: float32 [B, G], deficits of the step before.
    rank: int32 [B, G], G where a column is not compared.
    count: int32 [B], the columns taken back, the first ones by rank.
  """
  length = rank.shape[1]
  spared = (rank >= count[:, None]) & (rank < length)
  clipped = jnp.clip(confidence, -_FAR, _FAR)
  known = jnp.where(rank < length, previous, 0)

  def one_more(n, margin):
    # Few are taken back, so that a loop over them costs less than all pairs.
    its = lambda values: jnp.sum(jnp.where(rank == n, values, 0), axis=1, keepdims=True)
    turn = _fall_turn(its(clipped), clipped, its(known), known)
    return jnp.minimum(margin, numerics.smallest(turn, spared & (n < count[:, None])))

  return lax.fori_loop(0, jnp.max(count), one_more, jnp.full_like(confidence[:, 0], jnp.inf))


def _fall_turn(a: Array, b: Array, old_a: Array, old_b: Array) -> Array:
  """The change of the logits at which the fall of a column is no longer larger than that of another.

  With a and b their log-odds, and c the former probability of the first less that of the other, it is as long as
  sigmoid(a + 2 e) - sigmoid(b - 2 e) < c. The left side is sinh(d) / (cosh(d) + cosh(s)) with d = (a - b) / 2 + 2 e and
  s = (a + b) / 2, and c = tanh(k); so the bound is at d = k + asinh(sinh(k) cosh(s)). Logarithms keep it in range.
  The deficits of the step before are old_a and old_b. All are float32 of one shape.
  """
  high, low = jnp.maximum(old_a, old_b), jnp.minimum(old_a, old_b)
  size = high - low
  # 1 - |c|, of which little may be left.
  rest = (1 - high) + low
  k = jnp.log1p(2 * size / rest) / 2
  s = jnp.abs(a + b) / 2
  y = jnp.log(size) - (jnp.log(rest) + jnp.log1p(size)) / 2  # log sinh(abs(k))
  y += s + jnp.log1p(jnp.exp(-2 * s)) - jnp.log(jnp.float32(2))  # log cosh(s)
  large = y + jnp.log1p(jnp.sqrt(1 + jnp.exp(-2 * jnp.maximum(y, 0))))
  d = k + jnp.where(y > 0, large, jnp.arcsinh(jnp.exp(jnp.minimum(y, 0))))
  return jnp.maximum(jnp.where(old_b >= old_a, d, -d) - (a - b) / 2, 0) / 2


METHOD = Saber()

"""Dream's decoder: a linear time schedule says how many tokens a step writes, by default of the whole canvas.

With t = linspace(1, 1e-3, steps + 1), step i writes floor(masks * (1 - t[i+1] / t[i])) tokens, the last step all that
are left; the count is each row's own. `origin` writes every mask with probability 1 - t[i+1] / t[i] instead. Logits
are divided by the temperature and filtered by top_p, then top_k, before tokens and scores are taken from them.
(Dream 7B, arXiv 2508.15487, and its public generation code.)

A row of several blocks divides its steps evenly over them. The first step of a block writes its first token alone, so
that none of the others reads the row before the block, and counts as step 0 of the block's schedule (Fast-dLLM, arXiv
2505.22618, and its public code for Dream).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING
from typing import ClassVar

from etils import epy

from archer_jax.decoders import base
from archer_jax.specs import INT32_MAX
from archer_jax.specs import LARGE
from archer_jax.specs import SHIFTED
from archer_jax.specs import DecoderSpec
from archer_jax.specs import Knob
from archer_jax.specs import Switch

with epy.lazy_imports():
  import jax
  import jax.numpy as jnp
  import numpy as np

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

_EPS = 1e-3


@dataclasses.dataclass(frozen=True)
class _Filtered:
  """Logits after temperature and filters."""

  choice: Array  # float32 [B, R, V], minus infinity where a token may not be written
  full: Array  # float32 [B, R, V], the same with what is never written: what probabilities are taken from
  cut_margin: Array  # float32 [B, R], margin of the filters' cuts, in units of the scaled logits
  lead: Array  # float32 [B, R], lead of the best token before the filters; infinite where none was active


@dataclasses.dataclass(frozen=True)
class Dream(base.Decoder):
  """The decoder of shifted models; it never takes a token back."""

  spec: ClassVar[DecoderSpec] = DecoderSpec(
    name='dream',
    help='writes by a schedule over time, in the order of a score',
    alignments=(SHIFTED,),
    block_alignments=(SHIFTED,),
    number='steps',
    reads_block=True,
    knobs={
      'steps': base.STEPS,
      'top_p': Knob(1.0, False, 0, 1, 'dream samples from this mass of the best tokens; 1 is off'),
      'top_k': Knob(0, True, 0, INT32_MAX, 'dream samples from this many best tokens; 0 is off'),
      'alg_temp': Knob(0.0, False, 0, LARGE, 'randomness of the order of dream; 0 is none'),
    },
    switches={
      'alg': Switch('entropy', 'in which order dream writes', ('origin', 'maskgit_plus', 'topk_margin', 'entropy')),
    },
  )
  stops_within_block: ClassVar[bool] = True

  def views(self, state: DecodeState, cfg: DecodeConfig) -> Views:
    return types.Views(columns=base.block_columns(state, cfg))

  def reads(self, state: DecodeState, views: Views, cfg: DecodeConfig) -> Array:
    share, last = _schedule(state, cfg)
    del share
    many = base.block_count(state.gen_length, cfg) > 1
    return super().reads(state, views, cfg) & ((~many | last)[:, None] | base.in_turn(state, views.columns, cfg))

  def check(self, knobs: Mapping[str, Any], block_length: int | None, model: ModelConfig) -> None:
    del model
    blocks = -(-knobs['gen_length'] // (block_length or knobs['gen_length']))
    if blocks > 1 and knobs['steps'] < 2 * blocks:
      raise ValueError(
        f'steps must be at least twice the number of blocks, {2 * blocks} (gen_length={knobs["gen_length"]}, '
        f'block_length={block_length}), got {knobs["steps"]}'
      )

  def unread(self, name: str, switches: Mapping[str, Any]) -> str | None:
    if name == 'alg_temp' and switches['alg'] == 'origin':
      return 'alg_temp must not be given with alg origin, whose order has no score'
    return None

  def update(self, state: DecodeState, views: Views, logits: Array, cfg: DecodeConfig) -> Update:
    knobs, index = state.knobs, views.columns
    eligible = self.reads(state, views, cfg)
    # Logits divided by less would overflow.
    sampled = knobs.temperature > 1e-30
    scale = jnp.where(sampled, knobs.temperature, jnp.float32(1))
    kept = _filter(logits / scale[:, None, None], knobs.top_p, knobs.top_k, cfg)
    keys = numerics.position_keys(state.seed, numerics.TOKEN_STREAM, state.row_step, index)
    noise_scale = jnp.where(sampled, jnp.float32(1), jnp.float32(0))
    token, gap = numerics.best_token(numerics.add_gumbel(kept.choice, noise_scale, keys))

    share, last = _schedule(state, cfg)
    if cfg.alg == 'origin':
      uniform = _uniform(state, index)
      write = eligible & ((uniform < share[:, None]) | last[:, None])
      rank_margin = jnp.full_like(share, jnp.inf)
      depends = write
    else:
      n_masks = jnp.sum(eligible, axis=1, dtype=jnp.int32)
      n_write = jnp.floor(n_masks.astype(jnp.float32) * share).astype(jnp.int32)
      alone = (state.block_step == 0) & (base.block_count(state.gen_length, cfg) > 1)
      n_write = jnp.where(last | alone, n_masks, n_write)
      score, slope = _score(state, index, token, kept, cfg)
      write = eligible & (numerics.rank_descending(score, eligible) < n_write[:, None])
      rank_margin = numerics.cut_gap(score, write, eligible) / (2 * slope)
      # Scores compare all positions only while there is a choice among them.
      chosen_among = jnp.any(write, axis=1) & jnp.any(eligible & ~write, axis=1)
      depends = jnp.where(chosen_among[:, None], eligible, write)

    # Without sampling the best token survives every cut: what it is depends on its lead before the filters, and the
    # cuts matter to the scores alone.
    gap = jnp.where(sampled[:, None], gap, jnp.minimum(gap, kept.lead))
    margin = jnp.minimum(numerics.smallest(gap, jnp.where(sampled[:, None], depends, write)) / 2, rank_margin)
    cuts_of = jnp.where(sampled[:, None], depends, depends & (cfg.alg != 'origin'))
    # A change e of the logits is a change e / scale of the scaled ones.
    margin = scale * jnp.minimum(margin, numerics.smallest(kept.cut_margin, cuts_of))

    accepted = base.to_canvas(write, index, write, jnp.zeros(state.canvas.shape, bool))
    canvas = base.to_canvas(token, index, write, state.canvas)
    columns = jnp.arange(cfg.canvas_length)
    left = (canvas == cfg.model.mask_id) & (columns < base.block_end(state, cfg)[:, None])
    return types.Update(
      canvas=canvas,
      accepted=accepted,
      remasked=jnp.zeros_like(accepted),
      block_done=last | ~jnp.any(left, axis=1),
      margin=margin,
      decoder=state.decoder,
    )


def _schedule(state: DecodeState, cfg: DecodeConfig) -> tuple[Array, Array]:
  """The share of its masks that each row writes in this step, float32 [B], and whether it is its block's last step."""
  steps = base.block_steps(state, cfg)

  def time(i):
    # The second half is counted from the end, as the public code's linspace does in float32.
    slope = jnp.float32(_EPS - 1) / steps.astype(jnp.float32)
    from_start = 1 + slope * i.astype(jnp.float32)
    from_end = jnp.float32(_EPS) - slope * (steps - i).astype(jnp.float32)
    return jnp.where(2 * i < steps + 1, from_start, from_end)

  return 1 - time(state.block_step + 1) / time(state.block_step), state.block_step + 1 >= steps


def _uniform(state: DecodeState, index: Array) -> Array:
  keys = numerics.position_keys(state.seed, numerics.ORDER_STREAM, state.row_step, index)
  return jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32)))(keys)


def _filter(z: Array, top_p: Array, top_k: Array, cfg: DecodeConfig) -> _Filtered:
  """Nucleus, then top-k filter of scaled logits [B, R, V].

  With `never` the mask token is no candidate of either filter, but its logit stays among those that probabilities are
  taken from. So it is with ids that stand for no text.
  """
  barred = base.never_written(cfg, cfg.allows_mask)
  choice = z if barred is None else jnp.where(barred, -jnp.inf, z)

  def filtered():
    # Both filters keep the best n tokens, so that one sort gives both cuts.
    ordered = -jnp.sort(-choice, axis=-1)
    mass = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1)
    active_p = (top_p < 1)[:, None]
    active_k = (top_k > 0)[:, None]
    # A token stays while the mass before it is at most top_p; the best one always does.
    n_p = 1 + jnp.sum(mass[..., :-1] <= top_p[:, None, None], axis=-1, dtype=jnp.int32)
    n_p = jnp.where(active_p, n_p, z.shape[-1])
    n_k = jnp.where(active_k, jnp.minimum(top_k, z.shape[-1])[:, None], z.shape[-1])
    pick = lambda values, n: jnp.take_along_axis(values, jnp.clip(n, 0, z.shape[-1] - 1)[..., None], axis=-1)[..., 0]

    def cut(n):
      return jnp.where(n < z.shape[-1], numerics.distance(pick(ordered, n - 1), pick(ordered, n)), jnp.inf) / 2

    def mass_margin(n):
      gap = jnp.abs(numerics.logit(pick(mass, n)) - numerics.logit(top_p)[:, None]) / 2
      return jnp.where((n >= 0) & (n < z.shape[-1] - 1), gap, jnp.inf)

    margin_p = jnp.minimum(cut(n_p), jnp.minimum(mass_margin(n_p - 1), mass_margin(n_p - 2)))
    # top_k counts among the tokens that top_p left, and binds only below their number.
    margin_k = jnp.where(n_k < n_p, cut(n_k), jnp.inf)
    n = jnp.minimum(n_p, n_k)
    limit = pick(ordered, n - 1)
    margin = jnp.minimum(jnp.where(active_p, margin_p, jnp.inf), jnp.where(active_k, margin_k, jnp.inf))
    active = active_p | active_k
    lead = jnp.where(active, ordered[..., 0] - ordered[..., 1], jnp.inf)
    return jnp.where(active[..., None] & (choice < limit[..., None]), -jnp.inf, choice), margin, lead

  unbound = jnp.full(z.shape[:-1], jnp.inf, z.dtype)
  kept, cut_margin, lead = jax.lax.cond(
    jnp.any((top_p < 1) | (top_k > 0)), filtered, lambda: (choice, unbound, unbound)
  )
  full = kept if barred is None else jnp.where(barred, z, kept)
  return _Filtered(choice=kept, full=full, cut_margin=cut_margin, lead=lead)


def _score(state: DecodeState, index: Array, token: Array, kept: _Filtered, cfg: DecodeConfig) -> tuple[Array, Array]:
  """Order of the positions.

  Returns:
    float32 [B, R] scores, higher is written first, and float32 [B], the largest change of a score under a change of
    the scaled logits with (max - min) / 2 = 1.
  """
  alg_temp = state.knobs.alg_temp
  if cfg.alg == 'topk_margin':
    best, _ = numerics.best_token(kept.choice)
    others = jnp.where(jnp.arange(kept.choice.shape[-1]) == best[..., None], -jnp.inf, kept.choice)
    second, _ = numerics.best_token(others)
    probability = lambda token: jax.nn.sigmoid(numerics.log_odds(kept.full, token))
    # Where the filters leave one token, there is no second: its probability is 0.
    alone = jnp.isneginf(jnp.max(others, axis=-1))
    score = probability(best) - jnp.where(alone, jnp.float32(0), probability(second))
    slope = jnp.ones_like(alg_temp)
  elif cfg.alg == 'entropy':
    log_p = jax.nn.log_softmax(kept.choice, axis=-1)
    score = jnp.sum(jnp.where(jnp.isneginf(log_p), 0.0, jnp.exp(log_p) * log_p), axis=-1)
    slope = jnp.full_like(alg_temp, entropy_slope(cfg.model.vocab_size))
  else:
    # With noise the published weights are powers of e^p, so that there the probability itself is the score.
    odds = numerics.log_odds(kept.full, token)
    score = jnp.where(alg_temp[:, None] > 0, jax.nn.sigmoid(odds), odds)
    slope = jnp.where(alg_temp > 0, jnp.float32(0.5), jnp.float32(2))

  def noisy():
    noise = numerics.position_gumbel(state.seed, numerics.ALG_TEMP_STREAM, state.row_step, index)
    # Selected, not multiplied by zero: a score may be infinite.
    return jnp.where(alg_temp[:, None] > 0, score + alg_temp[:, None] * noise, score)

  return jax.lax.cond(jnp.any(alg_temp > 0), noisy, lambda: score), slope


@functools.cache
def entropy_slope(vocab_size: int) -> float:
  """L_V = max over q of 2 q (1 - q) (log(V - 1) + logit q), the steepest change of the entropy of V tokens.

  It belongs to the distribution with one token at q and the others equal, changed along that token.
  """
  q = np.linspace(1e-6, 1 - 1e-6, 1_000_001)
  return float(np.max(2 * q * (1 - q) * (np.log(vocab_size - 1) + np.log(q / (1 - q)))))


METHOD = Dream()

"""Candidates, confidence, ranks and noise. Everything is float32 and per row.

Confidence is compared as log-odds l = z_a - logsumexp over the other tokens of z, never as the probability p: p
saturates to 1.0 from l = 16 on in float32, where trained models live, while l keeps their order.

Axes: B batch, R decision rows, V vocab.
"""

import jax
from jax import Array
import jax.numpy as jnp

# Streams of randomness. A key is fold_in(fold_in(fold_in(seed, stream), row step), canvas index), so that no
# draw depends on the batch, the slot, the padding or the shards.
TOKEN_STREAM = 0
ORDER_STREAM = 1
ALG_TEMP_STREAM = 2

# Named, not JAX's configurable default: under others, draws of a batch depend on the slot.
PRNG = 'threefry2x32'


def logit(p: Array) -> Array:
  """log(p / (1 - p)); minus infinity for p <= 0 and infinity for p >= 1, so such thresholds never bind."""
  inside = jnp.clip(p, jnp.float32(1e-30), jnp.float32(1 - 2**-24))
  value = jnp.log(inside) - jnp.log1p(-inside)
  return jnp.where(p <= 0, -jnp.inf, jnp.where(p >= 1, jnp.inf, value))


def log_odds(z: Array, token: Array) -> Array:
  """Log-odds of a token against all others.

  Args:
    z: float32 [..., V] logits; minus infinity excludes a token.
    token: int32 [...].

  Returns:
    float32 [...]: z_token - logsumexp of the other logits; infinite where no other token is left.
  """
  is_token = jnp.arange(z.shape[-1]) == token[..., None]
  others = jnp.where(is_token, -jnp.inf, z)
  top = jnp.max(others, axis=-1)
  top = jnp.where(jnp.isfinite(top), top, jnp.float32(0))
  others = top + jnp.log(jnp.sum(jnp.exp(others - top[..., None]), axis=-1))
  own = jnp.max(jnp.where(is_token, z, -jnp.inf), axis=-1)
  # An excluded token has no odds at all, even where nothing else is left either.
  return jnp.where(jnp.isneginf(own), -jnp.inf, own - others)


def best_token(scores: Array) -> tuple[Array, Array]:
  """The best token of every row, the lower id at ties, and its lead.

  Args:
    scores: float32 [..., V].

  Returns:
    int32 [...] tokens and float32 [...] gaps to the second best.
  """
  token = jnp.argmax(scores, axis=-1).astype(jnp.int32)
  is_token = jnp.arange(scores.shape[-1]) == token[..., None]
  second = jnp.max(jnp.where(is_token, -jnp.inf, scores), axis=-1)
  return token, jnp.max(scores, axis=-1) - second


def rank_descending(score: Array, eligible: Array) -> Array:
  """Rank of every eligible position, 0 for the highest score; ties go to the lower position.

  Args:
    score: float32 [B, R].
    eligible: bool [B, R].

  Returns:
    int32 [B, R]; R where not eligible. Counted by comparison, since R is small and XLA's sort is slow on CPU.
  """
  length = score.shape[-1]
  mine, other = score[:, :, None], score[:, None, :]
  position = jnp.arange(length)
  ahead = (other > mine) | ((other == mine) & (position[None, :] < position[:, None]))
  rank = jnp.sum(ahead & eligible[:, None, :], axis=-1, dtype=jnp.int32)
  return jnp.where(eligible, rank, length)


def cut_gap(score: Array, chosen: Array, eligible: Array) -> Array:
  """Lowest chosen score minus the highest one left out; infinite where nothing is chosen or left out.

  Args:
    score: float32 [B, R].
    chosen: bool [B, R], the best of the eligible ones by `rank_descending`.
    eligible: bool [B, R].

  Returns:
    float32 [B].
  """
  lowest_in = jnp.min(jnp.where(chosen, score, jnp.inf), axis=-1)
  highest_out = jnp.max(jnp.where(eligible & ~chosen, score, -jnp.inf), axis=-1)
  return distance(lowest_in, highest_out)


def distance(a: Array, b: Array) -> Array:
  """A - b, infinite where both are the same infinity: no finite change makes such a pair differ."""
  return jnp.where(a == b, jnp.where(jnp.isinf(a), jnp.inf, jnp.float32(0)), a - b)


def smallest(values: Array, where: Array) -> Array:
  """Minimum over the last axis of the values that count; infinite where none does."""
  return jnp.min(jnp.where(where, values, jnp.inf), axis=-1)


def select_rows(rows: Array, new: Array, old: Array) -> Array:
  """Per row: new where `rows` [B] holds, else old, both [B, ...]."""
  return jnp.where(rows.reshape(rows.shape + (1,) * (new.ndim - 1)), new, old)


def position_keys(seed: Array, stream: int, row_step: Array, index: Array) -> Array:
  """One random key per row and canvas position.

  Args:
    seed: uint32 [B].
    stream: one of the streams above.
    row_step: int32 [B].
    index: int32 [B, R], canvas columns.

  Returns:
    Typed keys [B, R].
  """

  def row_keys(seed, step, index):
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed, impl=PRNG), stream), step)
    return jax.vmap(lambda column: jax.random.fold_in(key, column))(index)

  return jax.vmap(row_keys)(seed, row_step, index)


def position_gumbel(seed: Array, stream: int, row_step: Array, index: Array) -> Array:
  """Standard Gumbel noise float32 [B, R], one number per position."""
  keys = position_keys(seed, stream, row_step, index)
  return jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, (), jnp.float32)))(keys)


def add_gumbel(scores: Array, scale: Array, keys: Array) -> Array:
  """Scores + scale * Gumbel noise; its argmax samples from softmax(scores / scale).

  Args:
    scores: float32 [B, R, V].
    scale: float32 [B], the temperature; a row with 0 keeps its scores to the bit.
    keys: typed keys [B, R].

  Returns:
    float32 [B, R, V]. Nothing is drawn while every scale is 0.
  """

  def noisy():
    # `high`: among many tokens the largest draws decide, which the default resolves coarsely.
    draw = lambda key: jax.random.gumbel(key, scores.shape[-1:], jnp.float32, mode='high')
    noise = jax.vmap(jax.vmap(draw))(keys)
    return scores + scale[:, None, None] * noise

  return jax.lax.cond(jnp.any(scale > 0), noisy, lambda: scores)

"""Attention and rotary embeddings.

Axes: B batch, T query length, S key length, N query heads, K kv heads, H head dim.
"""

import jax
from jax import Array
import jax.numpy as jnp


def rotary_table(positions: Array, head_dim: int, theta: float) -> tuple[Array, Array]:
  """Cosine and sine of every position's rotation.

  Args:
    positions: int32 [B, T].
    head_dim: H, even.
    theta: base of the frequencies.

  Returns:
    Two float32 arrays [B, T, 1, H / 2].
  """
  frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
  angle = positions.astype(jnp.float32)[:, :, None, None] * frequency
  return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Array, table: tuple[Array, Array]) -> Array:
  """Applies RoPE in the half-split form (RoFormer, section 3.2.2, with the halves of H as the pairs).

  Args:
    x: [B, T, heads, H].
    table: what `rotary_table` made for the same B and T.

  Returns:
    [B, T, heads, H] in the dtype of `x`; the arithmetic is float32.
  """
  cos, sin = table
  low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)


def attend(q: Array, k: Array, v: Array, attn_mask: Array) -> Array:
  """The one entry to attention: softmax(q k / sqrt(H)) v with grouped kv heads, softmax in float32.

  Args:
    q: [B, T, N, H].
    k: [B, S, K, H], N a multiple of K; kv head i serves the query heads i N/K to (i+1) N/K - 1.
    v: [B, S, K, H].
    attn_mask: bool [B, 1, T, S], True = may attend. A query with no key at all gets a finite value
      that nobody must read.

  Returns:
    [B, T, N, H] in the dtype of `q`.
  """
  # A 3-D mask is not always rejected below but can be misread, so the rank is checked here.
  assert attn_mask.ndim == 4 and attn_mask.dtype == jnp.bool_, attn_mask
  return jax.nn.dot_product_attention(q, k, v, mask=attn_mask, implementation='xla')

"""Kept keys and values: one pytree for all layers, and the few ways in which it is read and written.

Axes: B batch, M places of a pool, P rows that are kept, K kv heads, H head dim.
"""

import dataclasses

import jax
from jax import Array
from jax import lax
import jax.numpy as jnp

from archer_jax.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KV:
  """Keys (after RoPE) and values of every layer, one array each: a scan over layers would hold them twice."""

  k: tuple[Array, ...]  # [B, P, K, H], or [B, M, P, K, H] in a pool
  v: tuple[Array, ...]

  @classmethod
  def zeros(cls, rows: tuple[int, ...], config: ModelConfig, dtype: str) -> 'KV':
    """Nothing yet: zeros for leading axes `rows`, (B, P) or (B, M, P)."""
    shape = (*rows, config.n_kv_heads, config.head_dim)
    zeros = lambda: tuple(jnp.zeros(shape, dtype) for _ in range(config.n_layers))
    return cls(k=zeros(), v=zeros())

  def read(self, layer: int) -> tuple[Array, Array]:
    """Keys and values of a layer, as attention takes them."""
    return self.k[layer], self.v[layer]

  def first(self, length: int) -> 'KV':
    """Those of the first `length` rows."""
    return jax.tree.map(lambda x: x[:, :length], self)

  def select(self, rows: Array, fresh: 'KV') -> 'KV':
    """Those of `fresh` where `rows`, bool [B], holds."""
    return jax.tree.map(lambda old, new: jnp.where(rows[:, None, None, None], new, old), self, fresh)

  def write_row(self, row: Array, fresh: 'KV') -> 'KV':
    """With `fresh` of one row, [1, P or more, K, H], in the place of that row; written in place."""
    write = lambda old, new: lax.dynamic_update_slice_in_dim(old, new[:, : old.shape[1]], row, axis=0)
    return jax.tree.map(write, self, fresh)


def kv_axes(config: ModelConfig, *, pooled: bool = False) -> KV:
  """The tree of a `KV` with each array's tuple of logical axis names."""
  axes = ('batch', *(('anchors',) if pooled else ()), 'length', 'kv_heads', 'head_dim')
  return KV(k=(axes,) * config.n_layers, v=(axes,) * config.n_layers)


def kv_bytes(rows: int, config: ModelConfig, dtype: str) -> int:
  """Bytes of the keys and values of that many rows: 2 L K H numbers each."""
  return rows * 2 * config.n_layers * config.n_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize

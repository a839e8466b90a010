"""Kept keys and values: one pytree for all layers, and the few ways in which it is read and written.

They stand in the order that attention reads, heads before rows, so that no step transposes what is kept.

Axes: B batch, M places of a pool, P rows that are kept, K kv heads, H head dim, W rows that are written.
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

  k: tuple[Array, ...]  # [B, K, P, H], or [B, M, K, P, H] in a pool
  v: tuple[Array, ...]

  @classmethod
  def zeros(
    cls, rows: tuple[int, ...], length: int, config: ModelConfig, dtype: str, *, layers: int | None = None
  ) -> 'KV':
    """Nothing yet: zeros for leading axes `rows`, (B,) or (B, M), and P = `length`; of so many layers, or of all."""
    shape = (*rows, config.n_kv_heads, length, config.head_dim)
    zeros = lambda: tuple(jnp.zeros(shape, dtype) for _ in range(config.n_layers if layers is None else layers))
    return cls(k=zeros(), v=zeros())

  def read(self, layer: int) -> tuple[Array, Array]:
    """Keys and values of a layer, as attention takes them."""
    return self.k[layer], self.v[layer]

  def write(self, layer: int, columns: Array, k: Array | None, v: Array) -> 'KV':
    """With fresh ones of a layer, [B, K, W, H], at their columns, int32 [B, W]; those past the end are dropped.

    Written in place where the buffers may be, as in a loop that carries them. Without `k` the keys stay.
    """
    rows = jnp.arange(columns.shape[0])[:, None]

    def put(arrays, new):
      if new is None:
        return arrays
      fresh = arrays[layer].at[rows, :, columns].set(jnp.moveaxis(new, 1, 2), mode='drop')
      return (*arrays[:layer], fresh, *arrays[layer + 1 :])

    return KV(k=put(self.k, k), v=put(self.v, v))

  def first(self, length: int) -> 'KV':
    """Those of the first `length` rows."""
    return jax.tree.map(lambda x: x[:, :, :length], self)

  def select(self, rows: Array, fresh: 'KV') -> 'KV':
    """Those of `fresh` where `rows`, bool [B], holds."""
    return jax.tree.map(lambda old, new: jnp.where(rows[:, None, None, None], new, old), self, fresh)

  def write_row(self, row: Array, fresh: 'KV') -> 'KV':
    """With `fresh` of one row, [1, K, P or more, H], in the place of that row; written in place."""
    write = lambda old, new: lax.dynamic_update_slice_in_dim(old, new[:, :, : old.shape[2]], row, axis=0)
    return jax.tree.map(write, self, fresh)


def kv_axes(config: ModelConfig, *, pooled: bool = False, layers: int | None = None) -> KV:
  """The tree of a `KV` with each array's tuple of logical axis names; of so many layers, or of all."""
  axes = ('batch', *(('anchors',) if pooled else ()), 'kv_heads', 'length', 'head_dim')
  every = (axes,) * (config.n_layers if layers is None else layers)
  return KV(k=every, v=every)


def kv_bytes(rows: int, config: ModelConfig, dtype: str) -> int:
  """Bytes of the keys and values of that many rows: 2 L K H numbers each."""
  return rows * 2 * config.n_layers * config.n_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize

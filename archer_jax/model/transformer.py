"""The transformer: pre-norm, RMSNorm, RoPE, SwiGLU, bidirectional, of the LLaDA and Dream families.

Axes: B batch, T rows fed, R rows whose logits are asked for, S keys, P prompt, N query heads, K kv heads,
H head dim, D embed, F mlp, V vocab, W rows that are written.
"""

from collections.abc import Sequence
import itertools

from flax import linen as nn
import jax
from jax import Array
import jax.numpy as jnp

from archer_jax.config import ModelConfig
from archer_jax.model.attention import attend
from archer_jax.model.attention import rotary_table
from archer_jax.model.attention import rotate
from archer_jax.model.kv import KV

KeyValue = tuple[Array, Array]
# Keys, values and mask of one part of what a query attends to, see `attend`.
Part = tuple[Array, Array, Array]


def take_rows(x: Array, rows: Array) -> Array:
  """Gathers [B, T, ...] at int32 [B, R], which must be in range, to [B, R, ...]."""
  index = rows.reshape(rows.shape + (1,) * (x.ndim - 2))
  return jnp.take_along_axis(x, index, axis=1, mode='promise_in_bounds')


def take_mask_rows(attn_mask: Array, rows: Array) -> Array:
  """Gathers the query rows of a mask [B, 1, T, S] at int32 [B, R] to [B, 1, R, S]."""
  return jnp.take_along_axis(attn_mask, rows[:, None, :, None], axis=2, mode='promise_in_bounds')


def _gathered(layers: tuple[KeyValue, ...]) -> KV:
  k, v = zip(*layers, strict=True)
  return KV(k=k, v=v)


def _masked(keys: Sequence[KeyValue], attn_mask: Array) -> list[Part]:
  """Parts of keys and values with each its own part of a mask [B, 1, T, S] over all of them; none that is empty."""
  ends = [0, *itertools.accumulate(k.shape[2] for k, _ in keys)]
  assert attn_mask.shape[-1] == ends[-1], (attn_mask.shape, ends)
  return [(k, v, attn_mask[..., a:b]) for (k, v), (a, b) in zip(keys, itertools.pairwise(ends), strict=True) if a < b]


class RMSNorm(nn.Module):
  """x / sqrt(mean(x^2) + eps) * scale over the last axis, statistics in float32.

  Attributes:
    eps: epsilon.
    axis: logical name of the last axis.
  """

  eps: float
  axis: str = 'embed'

  @nn.compact
  def __call__(self, x: Array) -> Array:
    init = nn.with_logical_partitioning(nn.initializers.ones, (self.axis,))
    scale = self.param('scale', init, x.shape[-1:])
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + jnp.float32(self.eps))
    return y.astype(x.dtype) * scale


class Projection(nn.Module):
  """Dense layer from or to split heads: the kernel's axes name its own inputs and outputs.

  Attributes:
    shape: kernel shape, contracted axes first.
    axes: logical axis of each kernel axis.
    contract: number of contracted axes.
    bias: whether a bias follows.
    stddev: of the initialiser.
    out_dtype: dtype of the result, by default that of the input.
  """

  shape: tuple[int, ...]
  axes: tuple[str, ...]
  contract: int = 1
  bias: bool = False
  stddev: float = 0.02
  out_dtype: jnp.dtype | None = None

  @nn.compact
  def __call__(self, x: Array) -> Array:
    init = nn.with_logical_partitioning(nn.initializers.normal(self.stddev), self.axes)
    kernel = self.param('kernel', init, self.shape)
    x_axes = tuple(range(x.ndim - self.contract, x.ndim))
    dimensions = ((x_axes, tuple(range(self.contract))), ((), ()))
    y = jax.lax.dot_general(x, kernel, dimensions, preferred_element_type=self.out_dtype or x.dtype)
    if self.bias:
      init = nn.with_logical_partitioning(nn.initializers.zeros, self.axes[self.contract :])
      y = y + self.param('bias', init, self.shape[self.contract :])
    return y


class Attention(nn.Module):
  """Bidirectional attention whose keys and queries may come from different rows."""

  config: ModelConfig

  def setup(self):
    c = self.config
    heads = (c.d_model, c.n_heads, c.head_dim)
    kv_heads = (c.d_model, c.n_kv_heads, c.head_dim)
    self.q_proj = Projection(heads, ('embed', 'heads', 'head_dim'), bias=c.qkv_bias)
    self.k_proj = Projection(kv_heads, ('embed', 'kv_heads', 'head_dim'), bias=c.qkv_bias)
    self.v_proj = Projection(kv_heads, ('embed', 'kv_heads', 'head_dim'), bias=c.qkv_bias)
    if c.qk_norm:
      self.q_norm = RMSNorm(c.norm_eps, 'head_dim')
      self.k_norm = RMSNorm(c.norm_eps, 'head_dim')
    stddev = 0.02 / (2 * c.n_layers) ** 0.5
    self.o_proj = Projection(
      (c.n_heads, c.head_dim, c.d_model), ('heads', 'head_dim', 'embed'), contract=2, stddev=stddev
    )

  def key_value(self, x: Array, table: KeyValue) -> KeyValue:
    """Keys after RoPE, and values, [B, K, T, H] each, of normed rows [B, T, D]."""
    k = self.k_proj(x)
    k = rotate(self.k_norm(k) if self.config.qk_norm else k, table)
    return jnp.moveaxis(k, 1, 2), jnp.moveaxis(self.v_proj(x), 1, 2)

  def __call__(self, x: Array, table: KeyValue, parts: Sequence[Part]) -> Array:
    """Attends from normed rows [B, T, D] to the rows of all `parts`."""
    q = self.q_proj(x)
    q = rotate(self.q_norm(q) if self.config.qk_norm else q, table)
    return self.o_proj(attend(q, *parts))


class MLP(nn.Module):
  """SwiGLU: down(silu(gate x) * up x)."""

  config: ModelConfig

  def setup(self):
    c = self.config
    self.gate_proj = Projection((c.d_model, c.d_ff), ('embed', 'mlp'))
    self.up_proj = Projection((c.d_model, c.d_ff), ('embed', 'mlp'))
    self.down_proj = Projection((c.d_ff, c.d_model), ('mlp', 'embed'), stddev=0.02 / (2 * c.n_layers) ** 0.5)

  def __call__(self, x: Array) -> Array:
    return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
  """One layer."""

  config: ModelConfig

  def setup(self):
    self.attn_norm = RMSNorm(self.config.norm_eps)
    self.attn = Attention(self.config)
    self.mlp_norm = RMSNorm(self.config.norm_eps)
    self.mlp = MLP(self.config)

  def key_value(self, x: Array, table: KeyValue) -> KeyValue:
    return self.attn.key_value(self.attn_norm(x), table)

  def __call__(self, x: Array, table: KeyValue, parts: Sequence[Part]) -> Array:
    """Residual stream [B, T, D] of the query rows after this layer."""
    x = x + self.attn(self.attn_norm(x), table, parts)
    return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
  """Masked diffusion transformer with one forward for training, refresh and reuse.

  `apply({'params': params}, ...)` is a pure function; the compute dtype is that of the parameters.

  Attributes:
    config: the model's shape.
    end_ids: tokens that end an answer by its checkpoint; no forward depends on them.
  """

  config: ModelConfig
  end_ids: tuple[int, ...] = ()

  def setup(self):
    c = self.config
    init = nn.with_logical_partitioning(nn.initializers.normal(0.02), ('vocab', 'embed'))
    self.embedding = self.param('embedding', init, (c.vocab_size, c.d_model))
    self.blocks = [Block(c) for _ in range(c.n_layers)]
    self.final_norm = RMSNorm(c.norm_eps)
    self.head = Projection((c.d_model, c.vocab_size), ('embed', 'vocab'), out_dtype=jnp.float32)

  def __call__(
    self,
    tokens: Array,
    positions: Array,
    attn_mask: Array,
    *,
    head_rows: Array | None = None,
    kept: KV | None = None,
    key_start: int = 0,
    columns: Array | None = None,
  ) -> tuple[Array, KV]:
    """Logits of the asked rows, and keys and values.

    The keys of the attention are those of `kept`, where there are any, followed by those of the fed rows from
    `key_start` on. With `columns` the first of these are written among the kept ones instead, layer by layer, before
    anybody attends. Work that nobody asked for is not done: the last layer attends from `head_rows` only.

    Args:
      tokens: int32 [B, T]; an id past the vocabulary is padding, and enters as zeros.
      positions: int32 [B, T], for RoPE.
      attn_mask: bool [B, 1, T, S], True = may attend.
      head_rows: int32 [B, R], rows whose logits are wanted, all in [0, T); None = every row, in order.
      kept: keys and values of other rows, [B, K, P, H] a layer.
      key_start: first fed row that others may attend to; rows before it only ask.
      columns: int32 [B, W], places among the P kept ones for the keys and values of the W fed rows from `key_start` on;
        those past the end are dropped, and then nobody attends to that row.

    Returns:
      float32 logits [B, R, V]; and the keys and values [B, K, T - key_start, H] of the fed rows, or with `columns` the
      kept ones with the new among them.
    """
    return self.observe(
      tokens, positions, attn_mask, head_rows=head_rows, kept=kept, key_start=key_start, columns=columns
    )[:2]

  def observe(
    self,
    tokens: Array,
    positions: Array,
    attn_mask: Array,
    *,
    head_rows: Array | None = None,
    kept: KV | None = None,
    key_start: int = 0,
    columns: Array | None = None,
    probe: int | None = None,
  ) -> tuple[Array, KV, Array | None]:
    """A call that also gives the residual stream [B, T, D] behind the first `probe` layers, None for no probe."""
    x, table, keys, kv, hidden = self._trunk(tokens, positions, attn_mask, kept, key_start, columns, probe)
    if head_rows is not None:
      x, attn_mask = take_rows(x, head_rows), take_mask_rows(attn_mask, head_rows)
      table = tuple(take_rows(part, head_rows) for part in table)
    x = self.blocks[-1](x, table, _masked(keys, attn_mask))
    return self.head(self.final_norm(x)), kv, hidden

  def key_value(self, tokens: Array, positions: Array, attn_mask: Array) -> KV:
    """Keys and values [B, K, T, H] of every layer, without the last layer's attention and without logits."""
    return self._trunk(tokens, positions, attn_mask, None, 0, None, None)[3]

  def table(self, positions: Array) -> KeyValue:
    """RoPE's cosines and sines for positions [B, T]."""
    return rotary_table(positions, self.config.head_dim, self.config.rope_theta)

  def embed(self, tokens: Array) -> Array:
    """Embeddings [B, T, D]; an id past the vocabulary is padding, which enters as zeros."""
    return jnp.take(self.embedding, tokens, axis=0, mode='fill', fill_value=0)

  def _trunk(self, tokens, positions, attn_mask, kept, key_start, columns, probe):
    """Every layer but the last, and what the last one attends to."""
    table = self.table(positions)
    key_table = tuple(part[:, key_start:] for part in table)
    x = self.embed(tokens)
    written = 0 if columns is None else columns.shape[1]
    fresh, hidden = (), None
    for layer, block in enumerate(self.blocks):
      if layer == probe:
        hidden = x
      k, v = block.key_value(x[:, key_start:], key_table)
      fresh += ((k, v),)
      if written:
        kept = kept.write(layer, columns, k[:, :, :written], v[:, :, :written])
      keys = () if kept is None else (kept.read(layer),)
      if written < k.shape[2]:
        keys += ((k[:, :, written:], v[:, :, written:]),)
      if layer < self.config.n_layers - 1:
        x = block(x, table, _masked(keys, attn_mask))
    return x, table, keys, kept if written else _gathered(fresh), hidden

"""The transformer: pre-norm, RMSNorm, RoPE, SwiGLU, bidirectional, of the LLaDA and Dream families.

Axes: B batch, T rows fed, R rows whose logits are asked for, S keys, P prompt, N query heads, K kv heads,
H head dim, D embed, F mlp, V vocab.
"""

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
    """Keys after RoPE, and values, [B, T, K, H] each, of normed rows [B, T, D]."""
    k = self.k_proj(x)
    return rotate(self.k_norm(k) if self.config.qk_norm else k, table), self.v_proj(x)

  def __call__(self, x: Array, table: KeyValue, key_value: KeyValue, attn_mask: Array) -> Array:
    """Attends from normed rows [B, T, D] to `key_value` of S rows under a mask [B, 1, T, S]."""
    q = self.q_proj(x)
    q = rotate(self.q_norm(q) if self.config.qk_norm else q, table)
    return self.o_proj(attend(q, *key_value, attn_mask))


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

  def __call__(self, x: Array, table: KeyValue, key_value: KeyValue, attn_mask: Array) -> Array:
    """Residual stream [B, T, D] of the query rows after this layer."""
    x = x + self.attn(self.attn_norm(x), table, key_value, attn_mask)
    return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
  """Masked diffusion transformer with one forward for training, refresh and reuse.

  `apply({'params': params}, ...)` is a pure function; the compute dtype is that of the parameters.
  """

  config: ModelConfig

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
  ) -> tuple[Array, KV]:
    """Logits of the asked rows, and the keys and values of all.

    The keys of the attention are those of `kept` followed by those of the fed rows from `key_start` on. Work that
    nobody asked for is not done: the last layer attends from `head_rows` only.

    Args:
      tokens: int32 [B, T].
      positions: int32 [B, T], for RoPE.
      attn_mask: bool [B, 1, T, S], True = may attend.
      head_rows: int32 [B, R], rows whose logits are wanted, all in [0, T); None = every row, in order.
      kept: keys and values of earlier rows, [B, P, K, H] a layer, standing before the fed ones.
      key_start: first fed row that others may attend to; rows before it only ask.

    Returns:
      float32 logits [B, R, V], and the keys and values [B, T - key_start, K, H] of the fed rows.
    """
    return self.observe(tokens, positions, attn_mask, head_rows=head_rows, kept=kept, key_start=key_start)[:2]

  def observe(
    self,
    tokens: Array,
    positions: Array,
    attn_mask: Array,
    *,
    head_rows: Array | None = None,
    kept: KV | None = None,
    key_start: int = 0,
    probe: int | None = None,
  ) -> tuple[Array, KV, Array | None]:
    """A call that also gives the residual stream [B, T, D] behind the first `probe` layers, None for no probe."""
    x, table, fresh, hidden = self._trunk(tokens, positions, attn_mask, kept, key_start, probe)
    if head_rows is not None:
      x, attn_mask = take_rows(x, head_rows), take_mask_rows(attn_mask, head_rows)
      table = tuple(take_rows(part, head_rows) for part in table)
    x = self.blocks[-1](x, table, self._keys(fresh, kept), attn_mask)
    return self.head(self.final_norm(x)), _gathered(fresh), hidden

  def key_value(self, tokens: Array, positions: Array, attn_mask: Array) -> KV:
    """Keys and values [B, T, K, H] of every layer, without the last layer's attention and without logits."""
    return _gathered(self._trunk(tokens, positions, attn_mask, None, 0, None)[2])

  def _table(self, positions: Array) -> KeyValue:
    return rotary_table(positions, self.config.head_dim, self.config.rope_theta)

  def _keys(self, fresh: tuple[KeyValue, ...], kept: KV | None) -> KeyValue:
    """The newest layer's keys and values, the kept ones first."""
    if kept is None:
      return fresh[-1]
    old, new = kept.read(len(fresh) - 1), fresh[-1]
    return jnp.concatenate([old[0], new[0]], axis=1), jnp.concatenate([old[1], new[1]], axis=1)

  def _trunk(self, tokens, positions, attn_mask, kept, key_start, probe):
    """Every layer but the last, and the last one's keys and values."""
    table = self._table(positions)
    key_table = tuple(part[:, key_start:] for part in table)
    x = jnp.take(self.embedding, tokens, axis=0)
    fresh, hidden = (), None
    for layer, block in enumerate(self.blocks):
      if layer == probe:
        hidden = x
      fresh += (block.key_value(x[:, key_start:], key_table),)
      if layer < self.config.n_layers - 1:
        x = block(x, table, self._keys(fresh, kept), attn_mask)
    return x, table, fresh, hidden

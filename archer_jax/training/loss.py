"""The masked diffusion loss of LLaDA, and the forward it shares with evaluation.

Axes: B batch, P prompt, G canvas, V vocab.
"""

import jax
from jax import Array
import jax.numpy as jnp

from archer_jax.config import ModelConfig
from archer_jax.model import Transformer
from archer_jax.training.batches import Batch

# Smallest masking ratio (LLaDA's eps): it bounds the weight 1 / t.
MIN_RATIO = 1e-3


def canvas_logits(params: dict, prompt: Array, prompt_valid: Array, canvas: Array, *, config: ModelConfig) -> Array:
  """float32 [B, G, V] logits of the canvas from one full forward over prompt [B, P] and canvas [B, G]."""
  batch, canvas_length = canvas.shape
  tokens = jnp.concatenate([prompt, canvas], axis=1)
  valid = jnp.concatenate([prompt_valid, jnp.ones_like(canvas, dtype=bool)], axis=1)
  # RoPE sees differences of positions only, so padding needs no positions of its own.
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
  attn_mask = jnp.broadcast_to(valid[:, None, None, :], (batch, 1, tokens.shape[1], tokens.shape[1]))
  # Where the model is shifted, position i is read from row i - 1.
  first = prompt.shape[1] - (config.logit_alignment == 'shifted')
  rows = jnp.broadcast_to(first + jnp.arange(canvas_length, dtype=jnp.int32), canvas.shape)
  logits, _ = Transformer(config).apply({'params': params}, tokens, positions, attn_mask, head_rows=rows)
  return logits


def draw_mask(key: Array, shape: tuple[int, int]) -> tuple[Array, Array]:
  """Draws a masking ratio t for every row and masks each of its positions with probability t.

  The ratios are stratified over the batch: row b draws from the b-th of B equal parts of a shifted unit interval.
  Each is still uniform (the linear schedule), but their mean hardly varies, and neither does the loss.

  Args:
    key: a typed key.
    shape: B and G.

  Returns:
    float32 [B] ratios in [MIN_RATIO, 1] and bool [B, G], True = masked.
  """
  shift_key, mask_key = jax.random.split(key)
  spread = jnp.arange(shape[0], dtype=jnp.float32) / shape[0]
  t = (jax.random.uniform(shift_key, (), jnp.float32) + spread) % jnp.float32(1)
  t = MIN_RATIO + (1 - MIN_RATIO) * t
  return t, jax.random.uniform(mask_key, shape, jnp.float32) < t[:, None]


def masked_diffusion_loss(params: dict, batch: Batch, key: Array, *, config: ModelConfig) -> Array:
  """Mean over rows of sum over masked positions of cross entropy / t, over G (arXiv 2502.09992, equation 5).

  The prompt is never masked. The expected weight of every answer token is 1.

  Args:
    params: the model's parameters.
    batch: examples; see `Batch`.
    key: a typed key, the source of masking ratios and masks.
    config: the model's config.

  Returns:
    float32 scalar, in nats per answer token.
  """
  t, is_masked = draw_mask(key, batch.answer.shape)
  canvas = jnp.where(is_masked, config.mask_id, batch.answer)
  logits = canvas_logits(params, batch.prompt, batch.prompt_valid, canvas, config=config)
  log_p = jax.nn.log_softmax(logits, axis=-1)
  token_loss = -jnp.take_along_axis(log_p, batch.answer[..., None], axis=-1)[..., 0]
  return jnp.mean(jnp.where(is_masked, token_loss, 0) / t[:, None])

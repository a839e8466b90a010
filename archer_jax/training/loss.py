"""The masked diffusion loss of LLaDA, and the forward it shares with evaluation.

Axes: B batch, P prompt, G canvas, V vocab.
"""

import jax
from jax import Array
import jax.numpy as jnp

from archer_jax.config import ModelConfig
from archer_jax.model import Transformer
from archer_jax.numerics import rank_descending
from archer_jax.training.batches import Batch

# Which verification rows are trained beside the canvas, see `canvas_logits`.
SHADOWS = ('none', 'self', 'official')


def canvas_logits(
  params: dict, prompt: Array, prompt_valid: Array, canvas: Array, *, config: ModelConfig, shadow: str = 'none'
) -> Array:
  """Logits of the canvas from one full forward over prompt [B, P] and canvas [B, G].

  Args:
    params: the model's parameters.
    prompt: int32 [B, P].
    prompt_valid: bool [B, P].
    canvas: int32 [B, G].
    config: the model's config.
    shadow: unless `none`, the rows of WINO's verification follow, one for each position of the canvas: mask tokens
      that see prompt and canvas without their twin, and all of each other (`official`) or only themselves (`self`).

  Returns:
    float32 [B, G, V], or [B, 2 G, V] with a shadow.
  """
  batch, canvas_length = canvas.shape
  rows = prompt.shape[1] + canvas_length
  tokens = jnp.concatenate([prompt, canvas], axis=1)
  valid = jnp.concatenate([prompt_valid, jnp.ones_like(canvas, dtype=bool)], axis=1)
  # RoPE sees differences of positions only, so padding needs no positions of its own.
  positions = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), tokens.shape)
  attn_mask = jnp.broadcast_to(valid[:, None, :], (batch, rows, rows))
  # Where the model is shifted, position i is read from row i - 1.
  first = prompt.shape[1] - (config.logit_alignment == 'shifted')
  head_rows = jnp.broadcast_to(first + jnp.arange(canvas_length, dtype=jnp.int32), canvas.shape)
  if shadow != 'none':
    own = jnp.eye(canvas_length, dtype=bool)
    peers = own if shadow == 'self' else jnp.ones_like(own)
    sees = jnp.concatenate([jnp.ones((canvas_length, prompt.shape[1]), bool), ~own, peers], axis=1)
    valid = jnp.concatenate([valid, jnp.ones_like(canvas, dtype=bool)], axis=1)
    unseen = jnp.zeros((batch, rows, canvas_length), bool)
    attn_mask = jnp.concatenate([jnp.concatenate([attn_mask, unseen], axis=2), valid[:, None, :] & sees], axis=1)
    tokens = jnp.concatenate([tokens, jnp.full_like(canvas, config.mask_id)], axis=1)
    positions = jnp.concatenate([positions, positions[:, prompt.shape[1] :]], axis=1)
    head_rows = jnp.concatenate([head_rows, rows + jnp.arange(canvas_length, dtype=jnp.int32) + 0 * canvas], axis=1)
  logits, _ = Transformer(config).apply({'params': params}, tokens, positions, attn_mask[:, None], head_rows=head_rows)
  return logits


def draw_mask(key: Array, shape: tuple[int, int]) -> Array:
  """Draws a number of masked positions for every row, uniform in 1 to G, and which they are.

  The numbers are stratified over the batch: row b draws from the b-th of B equal parts of a shifted unit interval.
  Each is still uniform, but their mean hardly varies, and neither does the loss.

  Args:
    key: a typed key.
    shape: B and G.

  Returns:
    bool [B, G], True = masked.
  """
  shift_key, mask_key = jax.random.split(key)
  spread = jnp.arange(shape[0], dtype=jnp.float32) / shape[0]
  share = (jax.random.uniform(shift_key, (), jnp.float32) + spread) % jnp.float32(1)
  count = 1 + jnp.floor(share * shape[1]).astype(jnp.int32)
  noise = jax.random.uniform(mask_key, shape, jnp.float32)
  return rank_descending(-noise, jnp.ones(shape, bool)) < count[:, None]


def masked_diffusion_loss(
  params: dict, batch: Batch, key: Array, *, config: ModelConfig, shadow: str = 'none', shadow_weight: float = 0.5
) -> Array:
  """Mean over rows of the mean cross entropy over their masked positions.

  This is LLaDA's objective in the form of its equation 6 (arXiv 2502.09992), a number of masks l uniform in 1 to G and
  weight 1 / l: the same expectation as a ratio t and weight 1 / t, without the variance of how many t masks. The
  prompt is never masked.

  Args:
    params: the model's parameters.
    batch: examples; see `Batch`.
    key: a typed key, the source of the masks.
    config: the model's config.
    shadow: unless `none`, verification rows learn the tokens of the unmasked positions; see `canvas_logits`.
    shadow_weight: of their mean cross entropy.

  Returns:
    float32 scalar, in nats per answer token.
  """
  is_masked = draw_mask(key, batch.answer.shape)
  canvas = jnp.where(is_masked, config.mask_id, batch.answer)
  logits = canvas_logits(params, batch.prompt, batch.prompt_valid, canvas, config=config, shadow=shadow)
  log_p = jax.nn.log_softmax(logits, axis=-1)

  def mean_over(rows: Array, chosen: Array) -> Array:
    token_loss = -jnp.take_along_axis(rows, batch.answer[..., None], axis=-1)[..., 0]
    count = jnp.maximum(jnp.sum(chosen, axis=1, dtype=jnp.float32), 1)
    return jnp.mean(jnp.sum(jnp.where(chosen, token_loss, 0), axis=1) / count)

  loss = mean_over(log_p[:, : canvas.shape[1]], is_masked)
  if shadow == 'none':
    return loss
  return loss + shadow_weight * mean_over(log_p[:, canvas.shape[1] :], ~is_masked)

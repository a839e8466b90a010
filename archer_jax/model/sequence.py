"""The rows that a forward feeds, [prompt (left-padded to P) | canvas (G) | shadow], and who may see whom.

Attention is bidirectional: every row sees every valid row of prompt and canvas. Shadow rows see what `types.Shadow`
says, and are seen by nobody else.

Axes: B batch, P prompt, G canvas, R decision rows, T rows.
"""

import dataclasses

import jax
from jax import Array
import jax.numpy as jnp

from archer_jax.config import ModelConfig
from archer_jax.specs import SHIFTED
from archer_jax.types import DecodeState
from archer_jax.types import Shadow
from archer_jax.types import Views


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
  """Prompt and canvas of rows."""

  prompt_tokens: Array  # int32 [B, P], left-padded
  prompt_valid: Array  # bool [B, P]
  canvas: Array  # int32 [B, G]
  canvas_valid: Array  # bool [B, G]

  @classmethod
  def of(cls, state: DecodeState) -> 'Inputs':
    return cls(
      prompt_tokens=state.prompt_tokens,
      prompt_valid=state.prompt_valid,
      canvas=state.canvas,
      canvas_valid=state.canvas_valid,
    )

  @property
  def prompt_length(self) -> int:
    return self.prompt_tokens.shape[1]

  @property
  def canvas_length(self) -> int:
    return self.canvas.shape[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
  """The rows of a forward."""

  tokens: Array  # int32 [B, T], past the vocabulary at padding
  positions: Array  # int32 [B, T]
  attn_mask: Array  # bool [B, 1, T, T]


def lay_out(inputs: Inputs, shadow: Shadow | None, config: ModelConfig) -> Rows:
  """Prompt, canvas and shadow with their positions and their attention mask."""
  batch, prompt_length = inputs.prompt_tokens.shape
  # Positions count from a row's first real token, so that padding changes no rotation.
  valid_length = jnp.sum(inputs.prompt_valid, axis=1, dtype=jnp.int32)[:, None]
  prompt_positions = jnp.maximum(jnp.arange(prompt_length, dtype=jnp.int32) - prompt_length + valid_length, 0)
  canvas_positions = valid_length + jnp.arange(inputs.canvas_length, dtype=jnp.int32)
  keys = jnp.concatenate([inputs.prompt_valid, inputs.canvas_valid], axis=1)
  rows = prompt_length + inputs.canvas_length
  mask = jnp.broadcast_to(keys[:, None, :], (batch, rows, rows))
  # Attention weighs padding with zero, which is not enough: zero times what is no number is none.
  padding = jnp.int32(config.vocab_size)
  tokens = jnp.where(keys, jnp.concatenate([inputs.prompt_tokens, inputs.canvas], axis=1), padding)
  positions = jnp.concatenate([prompt_positions, canvas_positions], axis=1)
  if shadow is not None:
    twin = shadow.columns
    length = twin.shape[1]
    twin_column = (prompt_length + twin)[:, :, None]
    sees_rows = keys[:, None, :] & (jnp.arange(rows) != twin_column)
    peers = jnp.ones((1, 1), bool) if shadow.sees_peers else jnp.eye(length, dtype=bool)
    sees_shadow = jnp.broadcast_to(shadow.valid[:, None, :] & peers, (batch, length, length))
    unseen = jnp.zeros((batch, rows, length), bool)
    top = jnp.concatenate([mask, unseen], axis=2)
    mask = jnp.concatenate([top, jnp.concatenate([sees_rows, sees_shadow], axis=2)], axis=1)
    tokens = jnp.concatenate([tokens, jnp.where(shadow.valid, config.mask_id, padding)], axis=1)
    positions = jnp.concatenate([positions, valid_length + twin], axis=1)
  return Rows(tokens=tokens, positions=positions, attn_mask=mask[:, None])


def lead_rows(prompt_length: int, config: ModelConfig) -> int:
  """Prompt rows that a forward of the canvas feeds: the last one where the first column is read from it."""
  return 1 if config.logit_alignment == SHIFTED and prompt_length else 0


def head_rows(inputs: Inputs, views: Views, canvas_start: int, config: ModelConfig) -> Array:
  """Rows of a forward that the decision columns, and behind them the shadow, read their logits from.

  Columns past the canvas, which nobody reads, take its last row: every index is in range by construction. While there
  is no prompt and nothing but masks, all rows are the same but for their rounding, and all columns read the first one:
  a tie is a tie then, whatever the batch, and goes to the lowest column.

  Args:
    inputs: prompt and canvas.
    views: the columns, [B, R], and the shadow.
    canvas_start: row of the forward at which the canvas begins.
    config: the model's config.

  Returns:
    int32 [B, R + shadow rows].
  """
  column = jnp.minimum(views.columns, inputs.canvas_length - 1)
  if config.logit_alignment == SHIFTED:
    # The first column reads the last prompt row, and its own where there is no prompt.
    has_prompt = jnp.any(inputs.prompt_valid, axis=1, keepdims=True)
    column = jnp.where((column > 0) | has_prompt, column - 1, column)
  is_written = jnp.any((inputs.canvas != config.mask_id) & inputs.canvas_valid, axis=1, keepdims=True)
  column = jnp.where(is_written | jnp.any(inputs.prompt_valid, axis=1, keepdims=True), column, 0)
  n_shadow = 0 if views.shadow is None else views.shadow.columns.shape[1]
  shadow = inputs.canvas_length + jnp.arange(n_shadow, dtype=jnp.int32)
  shadow = jnp.broadcast_to(shadow, (column.shape[0], n_shadow))
  return canvas_start + jnp.concatenate([column, shadow], axis=1)

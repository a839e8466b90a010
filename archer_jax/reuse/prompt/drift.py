"""How far the canvas is from its anchor: measures of one shape, (params, state, cfg) -> float32 [B] in [0, 1].

Each is 0 at the anchor, symmetric, and 0 again after a rollback to it. What they cost a step, beside a forward:

    token      G comparisons
    embedding  two gathers of [G, D] and three sums of squares
    hidden     three sums of squares over [G, D]; and 2 G D numbers of state, from the row's last step and its anchor

`hidden` knows the canvas of the step before: the states of the canvas about to be read would take its forward.

Axes: B batch, G canvas, D embed.
"""

from collections.abc import Callable
from collections.abc import Mapping

from jax import Array
import jax.numpy as jnp

from archer_jax.config import DecodeConfig
from archer_jax.types import DecodeState


def changed_positions(state: DecodeState) -> Array:
  """int32 [B]: columns of the row at which the canvas differs from its anchor."""
  return jnp.sum((state.canvas != state.reuse.anchor) & state.canvas_valid, axis=1, dtype=jnp.int32)


def distance(state: DecodeState) -> Array:
  """int32 [B]: `changed_positions`, 0 without an anchor."""
  return jnp.where(state.reuse.age < 0, 0, changed_positions(state))


def token_drift(params, state: DecodeState, cfg: DecodeConfig) -> Array:
  """The share of a row's columns that changed since its anchor; 0 without an anchor."""
  del params, cfg
  share = changed_positions(state).astype(jnp.float32) / jnp.maximum(state.gen_length, 1).astype(jnp.float32)
  return _anchored(state, share)


def embedding_drift(params, state: DecodeState, cfg: DecodeConfig) -> Array:
  """|a - b| / (|a| + |b|) of the input embeddings of canvas and anchor; 0 without an anchor."""
  del cfg
  embed = lambda tokens: jnp.take(params['embedding'], tokens, axis=0)
  return _anchored(state, _relative(embed(state.canvas), embed(state.reuse.anchor), state.canvas_valid))


def hidden_drift(params, state: DecodeState, cfg: DecodeConfig) -> Array:
  """The same form over the hidden states of the canvas that the last step read; 0 without an anchor.

  The states are those behind `state.probe` layers. The anchor's are those of its refresh.
  """
  del params, cfg
  return _anchored(state, _relative(state.kept.last_hidden, state.kept.anchor_hidden, state.canvas_valid))


DRIFTS: Mapping[str, Callable[..., Array]] = {
  'token': token_drift,
  'embedding': embedding_drift,
  'hidden': hidden_drift,
}


def _anchored(state: DecodeState, drift: Array) -> Array:
  return jnp.where(state.reuse.age < 0, jnp.float32(0), drift)


def _relative(a: Array, b: Array, valid: Array) -> Array:
  """|a - b| / (|a| + |b|) in Frobenius norm over the valid columns, float32 [B]; 0 for two of norm 0.

  Args:
    a: [B, G, D].
    b: likewise.
    valid: bool [B, G].
  """
  a, b = (jnp.where(valid[..., None], x.astype(jnp.float32), 0) for x in (a, b))
  norm = lambda x: jnp.sqrt(jnp.sum(jnp.square(x), axis=(1, 2)))
  total = norm(a) + norm(b)
  # The triangle inequality holds but for rounding.
  return jnp.where(total > 0, jnp.minimum(norm(a - b) / jnp.where(total > 0, total, 1), 1), jnp.float32(0))

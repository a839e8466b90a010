"""Passes over whole rows, and what steps are put together from, for every reuse method.

Axes: B batch, P prompt, G canvas, R decision rows, V vocab.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
from typing import TypeVar

import jax
from jax import Array
from jax import lax
import jax.numpy as jnp

from archer_jax.config import DecodeConfig
from archer_jax.model import Transformer
from archer_jax.model.kv import KV
from archer_jax.model.sequence import Inputs
from archer_jax.model.sequence import head_rows
from archer_jax.model.sequence import lay_out
from archer_jax.types import DecodeState
from archer_jax.types import Views
from archer_jax.types import Work

Tree = TypeVar('Tree')


def full_pass(
  params, inputs: Inputs, views: Views, cfg: DecodeConfig, *, probe: int | None = None
) -> tuple[Array, KV, Array | None]:
  """One pass over prompt, canvas and shadow.

  Returns:
    float32 logits [B, R + shadow rows, V]; keys and values [B, K, P + G + shadow rows, H]; and the residual stream of
    all rows behind the first `probe` layers, None for no probe.
  """
  rows = lay_out(inputs, views.shadow, cfg.model)
  return Transformer(cfg.model).apply(
    {'params': params},
    rows.tokens,
    rows.positions,
    rows.attn_mask,
    head_rows=head_rows(inputs, views, inputs.prompt_length, cfg.model),
    probe=probe,
    method='observe',
  )


def key_pass(params, inputs: Inputs, cfg: DecodeConfig) -> KV:
  """Keys and values [B, K, P + G, H] of a pass over prompt and canvas, without shadow and head."""
  rows = lay_out(inputs, None, cfg.model)
  return Transformer(cfg.model).apply(
    {'params': params}, rows.tokens, rows.positions, rows.attn_mask, method='key_value'
  )


def n_streams(cfg: DecodeConfig) -> int:
  """Forwards side by side: under guidance one with the prompt and one with masks in its place."""
  return 1 + cfg.guidance


def streams(state: DecodeState, cfg: DecodeConfig) -> list[Inputs]:
  """What each stream feeds: under guidance a second row of its own prompt, masked throughout, rides along."""
  inputs = Inputs.of(state)
  if not cfg.guidance:
    return [inputs]
  masked = jnp.full_like(state.prompt_tokens, cfg.model.mask_id)
  return [inputs, dataclasses.replace(inputs, prompt_tokens=masked)]


def guided(logits: list[Array], scale: Array) -> Array:
  """The streams' logits [B, R, V] combined by the scale [B]; a row without guidance keeps its own to the bit."""
  if len(logits) == 1:
    return logits[0]
  scale = scale[:, None, None]
  return jnp.where(scale > 0, logits[1] + (scale + 1) * (logits[0] - logits[1]), logits[0])


def one_row(tree: Tree, row: Array) -> Tree:
  """One row, [1, ...], of every array [B, ...]."""
  return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, row, 1, axis=0), tree)


def each_row(rows: Array, turn: Callable, carry: Tree) -> Tree:
  """carry = turn(row, carry) for every row that `rows`, bool [B], names, one at a time."""

  def body(waiting_and_carry):
    waiting, carry = waiting_and_carry
    row = jnp.argmax(waiting).astype(jnp.int32)
    return waiting & (jnp.arange(waiting.shape[0]) != row), turn(row, carry)

  return lax.while_loop(lambda waiting_and_carry: jnp.any(waiting_and_carry[0]), body, (rows, carry))[1]


def no_logits(views: Views, cfg: DecodeConfig) -> Array:
  """Zeros where the logits of a step will stand, float32 [B, R + shadow rows, V]."""
  batch, n_rows = views.columns.shape
  n_shadow = 0 if views.shadow is None else views.shadow.columns.shape[1]
  return jnp.zeros((batch, n_rows + n_shadow, cfg.model.vocab_size), jnp.float32)


def one_of(chosen: Array, passes: Sequence[Callable[[Tree], Tree]], carry: Tree) -> Tree:
  """The carry behind the pass of that number, int32 scalar; as it was where there is none.

  Each pass is a loop of at most one turn rather than the branch of a conditional: a loop writes its carry in place,
  while XLA copies whatever a branch writes.
  """
  for number, one in enumerate(passes):
    turn = lambda is_next_and_carry, one=one: (jnp.array(False), one(is_next_and_carry[1]))
    carry = lax.while_loop(lambda is_next_and_carry: is_next_and_carry[0], turn, (chosen == number, carry))[1]
  return carry


def work(state: DecodeState, fed: Array, counts: dict[str, Array], views: Views, cfg: DecodeConfig) -> Work:
  """What a step fed.

  A shadow counts as that of a whole block, in a short last block too.

  Args:
    state: the current state.
    fed: int32 [B], rows of prompt and canvas that were fed in one stream.
    counts: int32 scalars, how often the batch went through each of the method's passes.
    views: of the step.
    cfg: the program's config.
  """
  # A row without guidance has no use for its second forward in a guided batch.
  n = 1 + (cfg.guidance & (state.knobs.cfg_scale > 0)).astype(jnp.int32)
  n_shadow = 0 if views.shadow is None else views.shadow.columns.shape[1]
  shadow = jnp.minimum(n_shadow, state.gen_length)
  everything = state.gen_length + jnp.sum(state.prompt_valid, axis=1, dtype=jnp.int32)
  return Work(forwards=n, rows_fed=n * (fed + shadow), rows_recomputed=n * (everything + shadow), passes=counts)

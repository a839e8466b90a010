"""The forwards of a step: refresh, reuse and the row loop of mixed batches, around the kept prompt keys and values.

A *refresh* feeds prompt, canvas and shadow and keeps the prompt's keys and values; a *reuse* feeds canvas and shadow
against the kept ones. Which is exact and which is stale: keys and values of canvas and shadow are always those of this
step; the prompt's are those of the row's anchor, `age` steps old (the first layer's never change).

Axes: B batch, P prompt, G canvas, R decision rows, V vocab.
"""

import dataclasses

from jax import Array
from jax import lax
import jax.numpy as jnp

from archer_jax.config import DecodeConfig
from archer_jax.model import Transformer
from archer_jax.model.kv import KV
from archer_jax.model.sequence import Inputs
from archer_jax.model.sequence import head_rows
from archer_jax.model.sequence import lay_out
from archer_jax.model.sequence import lead_rows
from archer_jax.reuse import _passes as passes
from archer_jax.reuse.prompt.state import Kept
from archer_jax.reuse.prompt.state import probe
from archer_jax.types import DecodeState
from archer_jax.types import Views
from archer_jax.types import Work


def full_pass(params, inputs: Inputs, views: Views, cfg: DecodeConfig) -> tuple[Array, KV, Array | None]:
  """One pass over prompt, canvas and shadow.

  Returns:
    float32 logits [B, R + shadow rows, V], keys and values [B, K, P, H] of the prompt, and the canvas' hidden states
    [B, G, D] where the drift asks for them.
  """
  logits, fresh, hidden = passes.full_pass(params, inputs, views, cfg, probe=probe(cfg))
  return logits, fresh.first(inputs.prompt_length), _canvas_part(hidden, inputs.prompt_length, inputs)


def reuse_pass(params, inputs: Inputs, kv: KV, views: Views, cfg: DecodeConfig) -> tuple[Array, Array | None]:
  """One pass over canvas and shadow against the kept prompt keys and values.

  Returns:
    Logits and hidden states as `full_pass` does.
  """
  lead = lead_rows(inputs.prompt_length, cfg.model)
  start = inputs.prompt_length - lead
  rows = lay_out(inputs, views.shadow, cfg.model)
  logits, _, hidden = Transformer(cfg.model).apply(
    {'params': params},
    rows.tokens[:, start:],
    rows.positions[:, start:],
    rows.attn_mask[:, :, start:],
    head_rows=head_rows(inputs, views, lead, cfg.model),
    kept=kv,
    # The leading prompt row's own keys are among the kept ones.
    key_start=lead,
    probe=probe(cfg),
    method='observe',
  )
  return logits, _canvas_part(hidden, lead, inputs)


def _canvas_part(hidden: Array | None, start: int, inputs: Inputs) -> Array | None:
  return None if hidden is None else hidden[:, start : start + inputs.canvas_length]


def refresh_all(params, state: DecodeState, kv: tuple[KV, ...], need: Array, views: Views, cfg: DecodeConfig):
  """A full pass of each stream over all rows; those in `need`, bool [B], take its keys and values.

  Returns:
    Logits [B, R + shadow rows, V], keys and values, and hidden states.
  """
  logits, fresh, hidden = zip(
    *(full_pass(params, inputs, views, cfg) for inputs in passes.streams(state, cfg)), strict=True
  )
  kv = tuple(old.select(need, new) for old, new in zip(kv, fresh, strict=True))
  return passes.guided(logits, state.knobs.cfg_scale), kv, hidden[0]


def reuse_all(params, state: DecodeState, kv: tuple[KV, ...], views: Views, cfg: DecodeConfig):
  """A reuse pass of each stream over all rows; returns what `refresh_all` does."""
  each = (
    reuse_pass(params, inputs, kept, views, cfg) for inputs, kept in zip(passes.streams(state, cfg), kv, strict=True)
  )
  logits, hidden = zip(*each, strict=True)
  return passes.guided(logits, state.knobs.cfg_scale), kv, hidden[0]


def refresh_row(params, state: DecodeState, kv: tuple[KV, ...], row: Array, cfg: DecodeConfig) -> tuple[KV, ...]:
  """Renews the keys and values of one row, from a pass over its prompt and canvas alone."""
  return tuple(
    old.write_row(row, passes.key_pass(params, passes.one_row(inputs, row), cfg))
    for inputs, old in zip(passes.streams(state, cfg), kv, strict=True)
  )


def redo_row(params, state: DecodeState, logits: Array, kept: Kept, row: Array, views: Views, cfg: DecodeConfig):
  """A full pass over one row, which replaces its logits, its keys and values, and its hidden states."""
  one_views = passes.one_row(views, row)
  fresh_logits, fresh, hidden = zip(
    *(full_pass(params, passes.one_row(inputs, row), one_views, cfg) for inputs in passes.streams(state, cfg)),
    strict=True,
  )
  write = lambda old, new: lax.dynamic_update_slice_in_dim(old, new, row, axis=0)
  kept = dataclasses.replace(
    kept,
    kv=tuple(old.write_row(row, new) for old, new in zip(kept.kv, fresh, strict=True)),
    last_hidden=kept.last_hidden if hidden[0] is None else write(kept.last_hidden, hidden[0]),
  )
  return write(logits, passes.guided(fresh_logits, passes.one_row(state.knobs.cfg_scale, row))), kept


def forward(
  params, state: DecodeState, kept: Kept, need: Array, views: Views, cfg: DecodeConfig
) -> tuple[Array, Kept, Work]:
  """The forward of one step, at the cost of the rows that refresh.

  No row refreshes: a reuse pass. All do: one refresh pass. Some do: the row loop for these, one at a time, then a
  reuse pass for all. Rows that are done count for neither.

  Args:
    params: the model's parameters.
    state: the current state.
    kept: what is kept, with each row's own anchor active.
    need: bool [B], rows that refresh.
    views: of the step.
    cfg: the program's config.

  Returns:
    float32 logits [B, R + shadow rows, V], guided under guidance; what is kept, with new keys and values and the
    step's hidden states; and the work.
  """
  asked = need
  # A prompt of no columns has nothing to keep.
  if not state.prompt_tokens.shape[1]:
    need = jnp.zeros_like(need)
  together = jnp.all(need | state.done) & jnp.any(need)
  kv, mixed = kept.kv, need & ~together
  if need.shape[0] > 1:
    kv = passes.each_row(mixed, lambda row, kv: refresh_row(params, state, kv, row, cfg), kv)
  logits, kv, hidden = lax.cond(
    together,
    lambda kv: refresh_all(params, state, kv, need, views, cfg),
    lambda kv: reuse_all(params, state, kv, views, cfg),
    kv,
  )
  is_together = together.astype(jnp.int32)
  counts = {
    'refresh': is_together,
    'reuse': 1 - is_together,
    'row': jnp.sum(mixed, dtype=jnp.int32),
    'redo': jnp.zeros((), jnp.int32),
  }
  work = _work(state, asked, counts, views, cfg)
  return logits, dataclasses.replace(kept, kv=kv, last_hidden=hidden), work


def redo_rows(
  params, state: DecodeState, logits: Array, kept: Kept, redo: Array, views: Views, work: Work, cfg: DecodeConfig
) -> tuple[Array, Kept, Work]:
  """Full passes of the rows in `redo`, bool [B], one at a time; other rows are not fed again.

  Args:
    params: the model's parameters.
    state: the current state.
    logits: float32 [B, R + shadow rows, V], of the first forward.
    kept: behind it.
    redo: rows that none of the first forward's refreshes is among.
    views: of the step.
    work: of the first forward.
    cfg: the program's config.

  Returns:
    Logits, what is kept and the work as `forward` does.
  """
  turn = lambda row, carry: redo_row(params, state, *carry, row, views, cfg)
  logits, kept = passes.each_row(redo, turn, (logits, kept))
  again = _work(state, redo, {}, views, cfg)
  more = redo.astype(jnp.int32)
  work = dataclasses.replace(
    work,
    forwards=work.forwards + more * again.forwards,
    rows_fed=work.rows_fed + more * again.rows_fed,
    passes={**work.passes, 'redo': jnp.sum(more)},
  )
  return logits, kept, work


def _work(state: DecodeState, refreshes: Array, counts: dict[str, Array], views: Views, cfg: DecodeConfig) -> Work:
  """What a pass per row comes to, for rows that refresh, bool [B], and others."""
  prompt = jnp.sum(state.prompt_valid, axis=1, dtype=jnp.int32)
  lead = jnp.minimum(prompt, lead_rows(state.prompt_tokens.shape[1], cfg.model))
  return passes.work(state, state.gen_length + jnp.where(refreshes, prompt, lead), counts, views, cfg)

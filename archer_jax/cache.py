"""The forwards of a step: refresh, reuse and the row loop of mixed batches, around the kept prompt keys and values.

A row's sequence is [prompt (left-padded to P) | canvas (G) | shadow (B)]. The shadow is WINO's verification view: mask
tokens at the positions of the current block, seen by nobody else, that see the prompt, the canvas but each its own
twin, and the shadow. A *refresh* feeds all of it and keeps the prompt's keys and values; a *reuse* feeds canvas and
shadow against the kept ones. Which is exact and which is stale: keys and values of canvas and shadow are always those
of this step; the prompt's are those of the row's anchor, `cache.age` steps old (the first layer's never change).

Axes: B batch, P prompt, G canvas, R decision rows, T query rows, S keys, V vocab.
"""

import dataclasses
import functools

import jax
from jax import Array
from jax import lax
import jax.numpy as jnp

from archer_jax.config import SHIFTED
from archer_jax.config import DecodeConfig
from archer_jax.model import Transformer
from archer_jax.types import AnchorPool
from archer_jax.types import DecodeState
from archer_jax.types import PromptCache


def empty_cache(prompt_valid: Array, cfg: DecodeConfig) -> PromptCache:
  """A cache without an anchor for prompts [B, P]."""
  batch, length = prompt_valid.shape
  kept = (length, cfg.model.n_kv_heads, cfg.model.head_dim)
  zeros = lambda *rows: tuple(jnp.zeros((*rows, *kept), cfg.dtype) for _ in range(cfg.model.n_layers))
  canvas = lambda *rows: jnp.full((*rows, cfg.canvas_length), cfg.model.mask_id, jnp.int32)
  never = lambda *rows: jnp.full(rows, -1, jnp.int32)

  def hidden(*rows):
    return None if cfg.probe is None else jnp.zeros((*rows, cfg.canvas_length, cfg.model.d_model), cfg.dtype)

  pool, places = None, (batch, cfg.anchors - 1)
  if cfg.anchors > 1:
    pool = AnchorPool(
      k=zeros(*places),
      v=zeros(*places),
      anchor=canvas(*places),
      age=never(*places),
      used=never(*places),
      hidden=hidden(*places),
    )
  return PromptCache(
    k=zeros(batch),
    v=zeros(batch),
    anchor=canvas(batch),
    age=never(batch),
    prompt_valid=jnp.array(prompt_valid, bool),
    anchor_hidden=hidden(batch),
    last_hidden=hidden(batch),
    pool=pool,
  )


def kept_bytes(batch: int, prompt_length: int, cfg: DecodeConfig) -> int:
  """Bytes of the prompt keys and values of a batch: anchors x 2 L P K H numbers a row, under guidance twice."""
  numbers = 2 * cfg.model.n_layers * prompt_length * cfg.model.n_kv_heads * cfg.model.head_dim
  return batch * cfg.anchors * (1 + cfg.guidance) * numbers * jnp.dtype(cfg.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class _Sequence:
  """The rows of a forward: tokens and positions [B, T], mask [B, 1, T, T]."""

  tokens: Array
  positions: Array
  attn_mask: Array


def _sequence(state: DecodeState, prompt_tokens: Array, cfg: DecodeConfig) -> _Sequence:
  """Lays out prompt, canvas and shadow with their positions and their attention mask."""
  batch, prompt_length = prompt_tokens.shape
  # Positions count from a row's first real token, so that padding changes no rotation.
  valid_length = jnp.sum(state.prompt_valid, axis=1, dtype=jnp.int32)[:, None]
  prompt_positions = jnp.maximum(jnp.arange(prompt_length, dtype=jnp.int32) - prompt_length + valid_length, 0)
  canvas_positions = valid_length + jnp.arange(cfg.canvas_length, dtype=jnp.int32)
  keys = jnp.concatenate([state.prompt_valid, state.canvas_valid], axis=1)
  rows = prompt_length + cfg.canvas_length
  mask = jnp.broadcast_to(keys[:, None, :], (batch, rows, rows))
  tokens = jnp.concatenate([prompt_tokens, state.canvas], axis=1)
  positions = jnp.concatenate([prompt_positions, canvas_positions], axis=1)
  if cfg.shadow_length:
    offset = jnp.arange(cfg.shadow_length, dtype=jnp.int32)
    twin = state.block[:, None] * cfg.block_length + offset
    twin_column = (prompt_length + twin)[:, :, None]
    sees_rows = keys[:, None, :] & (jnp.arange(rows) != twin_column)
    # Shadows past a short last block are padding: nobody's keys, and their logits are not read.
    shadow_valid = (twin < state.gen_length[:, None])[:, None, :]
    peers = offset[:, None] == offset if cfg.shadow == 'self' else jnp.ones((1, 1), bool)
    sees_shadow = jnp.broadcast_to(shadow_valid & peers, (batch, cfg.shadow_length, cfg.shadow_length))
    unseen = jnp.zeros((batch, rows, cfg.shadow_length), bool)
    top = jnp.concatenate([mask, unseen], axis=2)
    mask = jnp.concatenate([top, jnp.concatenate([sees_rows, sees_shadow], axis=2)], axis=1)
    tokens = jnp.concatenate([tokens, jnp.full_like(twin, cfg.model.mask_id)], axis=1)
    positions = jnp.concatenate([positions, valid_length + twin], axis=1)
  return _Sequence(tokens=tokens, positions=positions, attn_mask=mask[:, None])


def _lead(prompt_length: int, cfg: DecodeConfig) -> int:
  """Prompt rows that a reuse forward feeds: the last one where the first canvas position is read from it."""
  return 1 if cfg.model.logit_alignment == SHIFTED and prompt_length else 0


def _head_rows(state: DecodeState, index: Array, canvas_start: int, cfg: DecodeConfig) -> Array:
  """Rows of a forward that the decision columns [B, R], and behind them the shadow, read their logits from.

  Columns past the canvas, which nobody reads, take its last row: every index is in range by construction.
  """
  column = jnp.minimum(index, cfg.canvas_length - 1)
  if cfg.model.logit_alignment == SHIFTED:
    # The first column reads the last prompt row, and its own where there is no prompt.
    has_prompt = jnp.any(state.prompt_valid, axis=1, keepdims=True)
    column = jnp.where((column > 0) | has_prompt, column - 1, column)
  shadow = cfg.canvas_length + jnp.arange(cfg.shadow_length, dtype=jnp.int32)
  shadow = jnp.broadcast_to(shadow, (index.shape[0], cfg.shadow_length))
  return canvas_start + jnp.concatenate([column, shadow], axis=1)


def _full_forward(
  params, state: DecodeState, prompt_tokens: Array, index: Array, cfg: DecodeConfig
) -> tuple[Array, tuple[tuple[Array, Array], ...], Array | None]:
  """One pass over prompt, canvas and shadow.

  Returns:
    Logits as in `refresh_forward`, per layer the keys and values of the prompt, and the canvas' hidden states.
  """
  prompt_length = prompt_tokens.shape[1]
  sequence = _sequence(state, prompt_tokens, cfg)
  logits, fresh, hidden = Transformer(cfg.model).apply(
    {'params': params},
    sequence.tokens,
    sequence.positions,
    sequence.attn_mask,
    head_rows=_head_rows(state, index, prompt_length, cfg),
    probe=cfg.probe,
    method='observe',
  )
  kept = tuple((k[:, :prompt_length], v[:, :prompt_length]) for k, v in fresh)
  return logits, kept, _canvas_part(hidden, prompt_length, cfg)


def _canvas_part(hidden: Array | None, start: int, cfg: DecodeConfig) -> Array | None:
  return None if hidden is None else hidden[:, start : start + cfg.canvas_length]


def refresh_forward(
  params, state: DecodeState, prompt_tokens: Array, cache: PromptCache, need: Array, index: Array, cfg: DecodeConfig
) -> tuple[Array, tuple[Array, ...], tuple[Array, ...], Array | None]:
  """One pass over prompt, canvas and shadow; the rows in `need` [B] take its prompt keys and values.

  Returns:
    float32 logits [B, R + shadow_length, V] of the decision columns `index` [B, R] and the shadow, per layer the keys
    and the values [B, P, K, H] to keep, and the canvas' hidden states [B, G, D] where `cfg.probe` asks for them.
  """
  logits, fresh, hidden = _full_forward(params, state, prompt_tokens, index, cfg)
  keep = need[:, None, None, None]
  k = tuple(jnp.where(keep, new, old) for (new, _), old in zip(fresh, cache.k, strict=True))
  v = tuple(jnp.where(keep, new, old) for (_, new), old in zip(fresh, cache.v, strict=True))
  return logits, k, v, hidden


def reuse_forward(
  params, state: DecodeState, prompt_tokens: Array, cache: PromptCache, index: Array, cfg: DecodeConfig
) -> tuple[Array, Array | None]:
  """One pass over canvas and shadow against the kept prompt keys and values.

  Returns:
    Logits and hidden states as in `refresh_forward`.
  """
  prompt_length = prompt_tokens.shape[1]
  lead = _lead(prompt_length, cfg)
  start = prompt_length - lead
  sequence = _sequence(state, prompt_tokens, cfg)
  logits, _, hidden = Transformer(cfg.model).apply(
    {'params': params},
    sequence.tokens[:, start:],
    sequence.positions[:, start:],
    sequence.attn_mask[:, :, start:],
    head_rows=_head_rows(state, index, lead, cfg),
    kept=tuple(zip(cache.k, cache.v, strict=True)),
    # The leading prompt row's own keys are among the kept ones.
    key_start=lead,
    probe=cfg.probe,
    method='observe',
  )
  return logits, _canvas_part(hidden, lead, cfg)


def _row(x: Array, row: Array) -> Array:
  """One row, [1, ...], of [B, ...]."""
  return lax.dynamic_slice_in_dim(x, row, 1, axis=0)


def _row_of_state(state: DecodeState, row: Array) -> DecodeState:
  """A state of what a forward reads of one row."""
  one = functools.partial(_row, row=row)
  return dataclasses.replace(
    state,
    canvas=one(state.canvas),
    block=one(state.block),
    knobs=jax.tree.map(one, state.knobs),
    cache=dataclasses.replace(state.cache, prompt_valid=one(state.prompt_valid)),
  )


def _write_row(cache: PromptCache, fresh: tuple[tuple[Array, Array], ...], row: Array) -> PromptCache:
  """Writes the prompt keys and values [1, P, K, H] of one row in place."""
  write = lambda old, new: lax.dynamic_update_slice_in_dim(old, new[:, : old.shape[1]], row, axis=0)
  return dataclasses.replace(
    cache,
    k=tuple(write(old, new) for old, (new, _) in zip(cache.k, fresh, strict=True)),
    v=tuple(write(old, new) for old, (_, new) in zip(cache.v, fresh, strict=True)),
  )


def _refresh_row(params, state, prompt_tokens, cache, row, cfg):
  """Refreshes one row's keys and values, from a forward over its prompt and canvas alone."""
  plain = dataclasses.replace(cfg, decoder='llada') if cfg.shadow_length else cfg
  sequence = _sequence(_row_of_state(state, row), _row(prompt_tokens, row), plain)
  fresh = Transformer(cfg.model).apply(
    {'params': params}, sequence.tokens, sequence.positions, sequence.attn_mask, method='key_value'
  )
  return _write_row(cache, fresh, row)


def _streams(state: DecodeState, cfg: DecodeConfig) -> list[tuple[Array, PromptCache]]:
  """Prompts and caches: under guidance a second row of its own prompt, masked throughout, rides along."""
  streams = [(state.prompt_tokens, state.cache)]
  if cfg.guidance:
    streams.append((jnp.full_like(state.prompt_tokens, cfg.model.mask_id), state.cache_uncond))
  return streams


def _guided(logits: list[Array], scale: Array) -> Array:
  """The streams' logits [B, R, V] combined by the scale [B]; a row without guidance keeps its own to the bit."""
  if len(logits) == 1:
    return logits[0]
  scale = scale[:, None, None]
  return jnp.where(scale > 0, logits[1] + (scale + 1) * (logits[0] - logits[1]), logits[0])


def forward(
  params, state: DecodeState, need: Array, index: Array, cfg: DecodeConfig
) -> tuple[Array, PromptCache, PromptCache | None]:
  """The forward of one step, at the cost of the rows that refresh.

  No row refreshes: a reuse pass. All do: one refresh pass. Some do: the row loop for these, one at a time, then a
  reuse pass for all. Rows that are done count for neither.

  Args:
    params: the model's parameters.
    state: the current state.
    need: bool [B], rows that refresh.
    index: int32 [B, R], canvas columns of the decision rows.
    cfg: the program's config.

  Returns:
    float32 logits [B, R + shadow_length, V] (guided where `cfg.guidance`), and the caches with their new keys and
    values and the step's hidden states, anchors and ages untouched.
  """
  streams = _streams(state, cfg)
  prompts = [prompt for prompt, _ in streams]
  # A prompt of no columns has nothing to keep.
  if not prompts[0].shape[1]:
    need = jnp.zeros_like(need)
  together = jnp.all(need | state.done) & jnp.any(need)

  def refresh_one(carry):
    waiting, caches = carry
    row = jnp.argmax(waiting).astype(jnp.int32)
    caches = [_refresh_row(params, state, *stream, row, cfg) for stream in zip(prompts, caches, strict=True)]
    return waiting & (jnp.arange(waiting.shape[0]) != row), caches

  caches = [cache for _, cache in streams]
  if need.shape[0] > 1:
    _, caches = lax.while_loop(lambda carry: jnp.any(carry[0]), refresh_one, (need & ~together, caches))

  def refresh_all(kept):
    return [
      refresh_forward(params, state, prompt, dataclasses.replace(cache, k=k, v=v), need, index, cfg)
      for prompt, cache, (k, v) in zip(prompts, caches, kept, strict=True)
    ]

  def reuse_all(kept):
    results = []
    for prompt, cache, (k, v) in zip(prompts, caches, kept, strict=True):
      logits, hidden = reuse_forward(params, state, prompt, dataclasses.replace(cache, k=k, v=v), index, cfg)
      results.append((logits, k, v, hidden))
    return results

  results = lax.cond(together, refresh_all, reuse_all, [(cache.k, cache.v) for cache in caches])
  caches = [
    dataclasses.replace(cache, k=k, v=v, last_hidden=hidden)
    for cache, (_, k, v, hidden) in zip(caches, results, strict=True)
  ]
  return _guided([result[0] for result in results], state.knobs.cfg_scale), caches[0], [*caches, None][1]


def refresh_rows(
  params, state: DecodeState, redo: Array, index: Array, logits: Array, cfg: DecodeConfig
) -> tuple[Array, PromptCache, PromptCache | None]:
  """Full forwards of the rows in `redo`, one at a time: their logits and their kept keys and values are replaced.

  Other rows are not fed again. Without such a row nothing is computed.

  Args:
    params: the model's parameters.
    state: with the caches behind the step's first forward.
    redo: bool [B].
    index: int32 [B, R], canvas columns of the decision rows.
    logits: float32 [B, R + shadow_length, V], of the first forward.
    cfg: the program's config.

  Returns:
    Logits and caches as `forward` does.
  """
  streams = _streams(state, cfg)

  def redo_one(carry):
    waiting, logits, caches = carry
    row = jnp.argmax(waiting).astype(jnp.int32)
    small = _row_of_state(state, row)
    fresh_logits, written = [], []
    for (prompt, _), cache in zip(streams, caches, strict=True):
      fresh, kept, hidden = _full_forward(params, small, _row(prompt, row), _row(index, row), cfg)
      cache = _write_row(cache, kept, row)
      if hidden is not None:
        seen = lax.dynamic_update_slice_in_dim(cache.last_hidden, hidden, row, axis=0)
        cache = dataclasses.replace(cache, last_hidden=seen)
      fresh_logits.append(fresh)
      written.append(cache)
    fresh = _guided(fresh_logits, small.knobs.cfg_scale)
    logits = lax.dynamic_update_slice_in_dim(logits, fresh, row, axis=0)
    return waiting & (jnp.arange(waiting.shape[0]) != row), logits, written

  start = (redo, logits, [cache for _, cache in streams])
  _, logits, caches = lax.while_loop(lambda carry: jnp.any(carry[0]), redo_one, start)
  return logits, caches[0], [*caches, None][1]

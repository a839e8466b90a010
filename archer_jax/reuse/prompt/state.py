"""What the method remembers: the anchors of the rows, and the prompt keys and values that belong to them.

Axes: B batch, P prompt, G canvas, M pooled anchors, D embed.
"""

from jax import Array
import jax.numpy as jnp

from archer_jax.config import DecodeConfig
from archer_jax.model.kv import KV
from archer_jax.model.kv import kv_axes
from archer_jax.reuse import _passes as passes
from archer_jax.types import frozen_pytree


@frozen_pytree
class Pool:
  """The anchors of a row that are not the active one, M = anchors - 1 of them."""

  anchor: Array  # int32 [B, M, G]
  age: Array  # int32 [B, M], -1 where a place is empty
  used: Array  # int32 [B, M], the row's step at which the anchor ceased to be the active one; -1 for an empty place


@frozen_pytree
class Anchors:
  """Anchors of the rows, and how their last step went."""

  anchor: Array  # int32 [B, G], the canvas that the kept prompt was computed with, by the last refresh if anchors = 1
  age: Array  # int32 [B], steps since that refresh; -1 before the first one
  refreshed: Array  # bool [B], whether the last step refreshed
  margin: Array  # float32 [B], of the last step's decision; infinite before the first one
  drift: Array  # float32 [B], of the canvas that the last step read, known behind its forward; 0 where it refreshed
  pool: Pool | None  # with anchors > 1


@frozen_pytree
class Kept:
  """Keys and values of the prompt; and hidden states of the canvas [B, G, D], for the drift `hidden` alone."""

  kv: tuple[KV, ...]  # [B, K, P, H]; under guidance a second one, of the unconditional rows
  pool: tuple[KV, ...] | None  # [B, M, K, P, H] each
  anchor_hidden: Array | None  # of the canvas in the active anchor's refresh
  last_hidden: Array | None  # of the row's last step
  pool_hidden: Array | None  # [B, M, G, D]


def probe(cfg: DecodeConfig) -> int | None:
  """Layers before the hidden states that a forward must give; None where the drift needs none."""
  return cfg.model.n_layers // 2 if cfg.drift == 'hidden' else None


def init(prompt_valid: Array, cfg: DecodeConfig) -> tuple[Anchors, Kept]:
  """Nothing kept yet, for prompts [B, P]."""
  batch, length = prompt_valid.shape
  canvas = lambda *rows: jnp.full((*rows, cfg.canvas_length), cfg.model.mask_id, jnp.int32)
  never = lambda *rows: jnp.full(rows, -1, jnp.int32)
  streams = lambda *rows: tuple(KV.zeros(rows, length, cfg.model, cfg.dtype) for _ in range(passes.n_streams(cfg)))

  def hidden(*rows):
    return None if probe(cfg) is None else jnp.zeros((*rows, cfg.canvas_length, cfg.model.d_model), cfg.dtype)

  places, pooled = (batch, cfg.anchors - 1), cfg.anchors > 1
  anchors = Anchors(
    anchor=canvas(batch),
    age=never(batch),
    refreshed=jnp.zeros((batch,), bool),
    margin=jnp.full((batch,), jnp.inf, jnp.float32),
    drift=jnp.zeros((batch,), jnp.float32),
    pool=Pool(anchor=canvas(*places), age=never(*places), used=never(*places)) if pooled else None,
  )
  kept = Kept(
    kv=streams(batch),
    pool=streams(*places) if pooled else None,
    anchor_hidden=hidden(batch),
    last_hidden=hidden(batch),
    pool_hidden=hidden(*places) if pooled else None,
  )
  return anchors, kept


def axes(cfg: DecodeConfig) -> Kept:
  """The tree of `Kept` with each array's tuple of logical axis names."""
  hidden = lambda *more: None if probe(cfg) is None else ('batch', *more, 'length', 'embed')
  pooled = cfg.anchors > 1
  return Kept(
    kv=(kv_axes(cfg.model),) * passes.n_streams(cfg),
    pool=(kv_axes(cfg.model, pooled=True),) * passes.n_streams(cfg) if pooled else None,
    anchor_hidden=hidden(),
    last_hidden=hidden(),
    pool_hidden=hidden('anchors') if pooled else None,
  )

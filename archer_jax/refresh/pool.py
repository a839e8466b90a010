"""The step's plan: which anchor each row takes, and whether it refreshes; and the pool that other anchors wait in.

With `cfg.anchors` = N > 1 a row has N places for anchors. One is the active one, whose keys and values a reuse reads;
the others stand in the pool. A step takes the anchor that is nearest to its canvas. If that is not the active one, the
two change places, one row at a time and in place, so that a step without a change copies nothing of the cache's size.
A refresh, also one in the step of a reuse, first puts the active anchor into the pool, at the place of the one that was
not used for longest.

Axes: B batch, G canvas, M pooled anchors, N anchors.
"""

import dataclasses

import jax
from jax import Array
from jax import lax
import jax.numpy as jnp

from archer_jax.config import DecodeConfig
from archer_jax.refresh.drift import DRIFTS
from archer_jax.refresh.drift import changed_positions
from archer_jax.refresh.policy import reasons
from archer_jax.types import DecodeState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """What a step is about to do."""

  state: DecodeState  # with the anchor active that a reuse reads, or a refresh overwrites
  reason: Array  # int32 [B], bits of `types.Reason`; 0 for a reuse
  drift: Array  # float32 [B], from the nearest anchor
  age: Array  # int32 [B], of the nearest anchor; -1 without any


def plan(params, state: DecodeState, cfg: DecodeConfig) -> Plan:
  """Decides on the refresh of every row, from its nearest anchor."""
  measure = DRIFTS[cfg.drift]
  if cfg.anchors == 1:
    drift = measure(params, state, cfg)
    return Plan(state=state, reason=reasons(state, drift, cfg), drift=drift, age=state.cache.age)

  views = _views(state, cfg)
  drifts, ages, changed = (
    jnp.stack(values)
    for values in zip(*((measure(params, v, cfg), v.cache.age, changed_positions(v)) for v in views), strict=True)
  )
  # The anchor of this very canvas is the nearest by any measure, also by one that is a step late. 0 is the active
  # anchor, which is the first of equals; so it is where no anchor can be used.
  distance = jnp.where(changed == 0, -1, drifts)
  slot = jnp.argmin(jnp.where(_is_usable(state, ages), distance, jnp.inf), axis=0).astype(jnp.int32)
  pick = lambda per_anchor: jnp.take_along_axis(per_anchor, slot[None], axis=0)[0]
  drift, age = pick(drifts), pick(ages)
  anchors = jnp.stack([view.cache.anchor for view in views])
  anchor = jnp.take_along_axis(anchors, slot[None, :, None], axis=0)[0]
  nearest = dataclasses.replace(state, cache=dataclasses.replace(state.cache, anchor=anchor, age=age))
  reason = reasons(nearest, drift, cfg)
  slot = jnp.where(state.done, 0, jnp.where(reason != 0, _slot_for_refresh(state, cfg), slot))
  return Plan(state=_exchange(state, slot), reason=reason, drift=drift, age=age)


def make_room(state: DecodeState, rows: Array, cfg: DecodeConfig) -> DecodeState:
  """The state whose active anchors in `rows`, bool [B], a refresh may overwrite: those to be kept are in the pool."""
  if cfg.anchors == 1:
    return state
  return _exchange(state, jnp.where(rows, _slot_for_refresh(state, cfg), 0))


def _is_usable(state: DecodeState, ages: Array) -> Array:
  """Whether anchors of these ages [..., B] may be read."""
  max_age = state.knobs.max_age
  return (ages >= 0) & ((max_age <= 0) | (ages < max_age))


def _slot_for_refresh(state: DecodeState, cfg: DecodeConfig) -> Array:
  """int32 [B]: which anchor a refresh overwrites, 0 for the active one, i + 1 for that at place i of the pool.

  It is one of this very canvas, so that none stands twice; else the active one if that may not be read any more; else
  an empty place or one that may not be read any more, or the least recently used.
  """
  pool = state.cache.pool
  is_same = jnp.stack([(changed_positions(v) == 0) & (v.cache.age >= 0) for v in _views(state, cfg)])
  used = jnp.where(_is_usable(state, pool.age.T).T, pool.used, -1)
  oldest = jnp.argmin(used, axis=1).astype(jnp.int32) + 1
  slot = jnp.where(_is_usable(state, state.cache.age), oldest, 0)
  return jnp.where(jnp.any(is_same, axis=0), jnp.argmax(is_same, axis=0).astype(jnp.int32), slot)


def _views(state: DecodeState, cfg: DecodeConfig) -> list[DecodeState]:
  """The state with each anchor in turn as the active one, that first which is it."""
  return [state, *(_view(state, place) for place in range(cfg.anchors - 1))]


def _view(state: DecodeState, place: int) -> DecodeState:
  """The state as if the anchor at a place of the pool were the active one; its keys and values are not read."""
  pool = state.cache.pool
  hidden = None if pool.hidden is None else pool.hidden[:, place]
  cache = dataclasses.replace(state.cache, anchor=pool.anchor[:, place], age=pool.age[:, place], anchor_hidden=hidden)
  return dataclasses.replace(state, cache=cache)


def _exchange(state: DecodeState, slot: Array) -> DecodeState:
  """Lets the active anchor of each row change places with that of its pool at `slot` - 1, int32 [B]; 0 is no change."""
  caches = [cache for cache in (state.cache, state.cache_uncond) if cache is not None]
  moves, place = slot > 0, jnp.maximum(slot - 1, 0)
  rows = jnp.arange(slot.shape[0])
  where = jnp.where(moves, place, caches[0].pool.age.shape[1])

  def swap(active, pooled):
    taken = pooled.at[rows, place].get(mode='promise_in_bounds')
    wide = moves.reshape(moves.shape + (1,) * (active.ndim - 1))
    return jnp.where(wide, taken, active), pooled.at[rows, where].set(active, mode='drop')

  kept = [pair for cache in caches for pair in zip(cache.k + cache.v, cache.pool.k + cache.pool.v, strict=True)]
  kept = _exchange_rows(kept, moves, place)

  swapped = []
  for cache in caches:
    layers = len(cache.k)
    mine, kept = kept[: 2 * layers], kept[2 * layers :]
    active, pooled = zip(*mine, strict=True)
    anchor, pool_anchor = swap(cache.anchor, cache.pool.anchor)
    age, pool_age = swap(cache.age, cache.pool.age)
    hidden, pool_hidden = cache.anchor_hidden, cache.pool.hidden
    if hidden is not None:
      hidden, pool_hidden = swap(hidden, pool_hidden)
    pool = dataclasses.replace(
      cache.pool,
      k=pooled[:layers],
      v=pooled[layers:],
      anchor=pool_anchor,
      age=pool_age,
      used=cache.pool.used.at[rows, where].set(state.row_step, mode='drop'),
      hidden=pool_hidden,
    )
    swapped.append(
      dataclasses.replace(
        cache, k=active[:layers], v=active[layers:], anchor=anchor, age=age, anchor_hidden=hidden, pool=pool
      )
    )
  return dataclasses.replace(state, cache=swapped[0], cache_uncond=[*swapped, None][1])


def _exchange_rows(pairs: list[tuple[Array, Array]], moves: Array, place: Array) -> list[tuple[Array, Array]]:
  """Lets rows of active arrays change places with pooled ones, in place.

  A row takes two turns of the loop, one to read and one to write: an array that one turn both reads and writes would be
  copied.

  Args:
    pairs: of active [B, P, K, H] and pooled [B, M, P, K, H].
    moves: bool [B], rows that change.
    place: int32 [B], of the pool.
  """
  rows = jnp.arange(moves.shape[0])

  def read(row, held, pairs):
    del held
    at = (row, place[row], 0, 0, 0)
    held = [
      (lax.dynamic_slice_in_dim(active, row, 1, axis=0), lax.dynamic_slice(pooled, at, (1, 1, *pooled.shape[2:])))
      for active, pooled in pairs
    ]
    return held, pairs

  def write(row, held, pairs):
    at = (row, place[row], 0, 0, 0)
    pairs = [
      (
        lax.dynamic_update_slice_in_dim(active, new[:, 0], row, axis=0),
        lax.dynamic_update_slice(pooled, old[:, None], at),
      )
      for (active, pooled), (old, new) in zip(pairs, held, strict=True)
    ]
    return held, pairs

  def turn(carry):
    waiting, is_held, held, pairs = carry
    row = jnp.argmax(waiting).astype(jnp.int32)
    held, pairs = lax.cond(is_held, write, read, row, held, pairs)
    return waiting & ~((rows == row) & is_held), ~is_held, held, pairs

  nothing = [(jnp.zeros_like(active[:1]), jnp.zeros_like(pooled[:1, :1])) for active, pooled in pairs]
  start = (moves, jnp.array(False), nothing, pairs)
  *_, pairs = lax.while_loop(lambda carry: jnp.any(carry[0]), turn, start)
  return pairs

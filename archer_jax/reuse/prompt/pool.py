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
from archer_jax.model.kv import KV
from archer_jax.reuse.prompt.clauses import reasons
from archer_jax.reuse.prompt.drift import DRIFTS
from archer_jax.reuse.prompt.drift import changed_positions
from archer_jax.reuse.prompt.drift import distance
from archer_jax.reuse.prompt.state import Pool
from archer_jax.types import DecodeState
from archer_jax.types import Plan


def plan(params, state: DecodeState, cfg: DecodeConfig) -> Plan:
  """Decides on the refresh of every row, from its nearest anchor.

  Its `reuse` and `kept` have the anchor active that a reuse reads, or a refresh overwrites. Seen are `distance` and
  `drift` from the nearest anchor and its `age`, -1 without any.
  """
  measure = DRIFTS[cfg.drift]
  if cfg.anchors == 1:
    seen = {'distance': distance(state), 'drift': measure(params, state, cfg), 'age': state.reuse.age}
    reason = reasons(state, seen['distance'], seen['drift'], cfg)
    return Plan(reuse=state.reuse, kept=state.kept, reason=reason, seen=seen)

  views = _views(state, cfg)
  drifts, ages, changed = (
    jnp.stack(values)
    for values in zip(*((measure(params, v, cfg), v.reuse.age, changed_positions(v)) for v in views), strict=True)
  )
  # The anchor of this very canvas is the nearest by any measure, also by one that is a step late. 0 is the active
  # anchor, which is the first of equals; so it is where no anchor can be used.
  order = jnp.where(changed == 0, -1, drifts)
  slot = jnp.argmin(jnp.where(_is_usable(state, ages), order, jnp.inf), axis=0).astype(jnp.int32)
  pick = lambda per_anchor: jnp.take_along_axis(per_anchor, slot[None], axis=0)[0]
  drift, age = pick(drifts), pick(ages)
  seen = {'distance': jnp.where(age < 0, 0, pick(changed)), 'drift': drift, 'age': age}
  anchors = jnp.stack([view.reuse.anchor for view in views])
  anchor = jnp.take_along_axis(anchors, slot[None, :, None], axis=0)[0]
  nearest = dataclasses.replace(state, reuse=dataclasses.replace(state.reuse, anchor=anchor, age=age))
  reason = reasons(nearest, seen['distance'], drift, cfg)
  slot = jnp.where(state.done, 0, jnp.where(reason != 0, _slot_for_refresh(state, cfg), slot))
  state = _exchange(state, slot)
  return Plan(reuse=state.reuse, kept=state.kept, reason=reason, seen=seen)


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
  pool = state.reuse.pool
  is_same = jnp.stack([(changed_positions(v) == 0) & (v.reuse.age >= 0) for v in _views(state, cfg)])
  used = jnp.where(_is_usable(state, pool.age.T).T, pool.used, -1)
  oldest = jnp.argmin(used, axis=1).astype(jnp.int32) + 1
  slot = jnp.where(_is_usable(state, state.reuse.age), oldest, 0)
  return jnp.where(jnp.any(is_same, axis=0), jnp.argmax(is_same, axis=0).astype(jnp.int32), slot)


def _views(state: DecodeState, cfg: DecodeConfig) -> list[DecodeState]:
  """The state with each anchor in turn as the active one, that first which is it."""
  return [state, *(_view(state, place) for place in range(cfg.anchors - 1))]


def _view(state: DecodeState, place: int) -> DecodeState:
  """The state as if the anchor at a place of the pool were the active one; its keys and values are not read."""
  pool, hidden = state.reuse.pool, state.kept.pool_hidden
  return dataclasses.replace(
    state,
    reuse=dataclasses.replace(state.reuse, anchor=pool.anchor[:, place], age=pool.age[:, place]),
    kept=dataclasses.replace(state.kept, anchor_hidden=None if hidden is None else hidden[:, place]),
  )


def _exchange(state: DecodeState, slot: Array) -> DecodeState:
  """Lets the active anchor of each row change places with that of its pool at `slot` - 1, int32 [B]; 0 is no change."""
  reuse, kept = state.reuse, state.kept
  moves, place = slot > 0, jnp.maximum(slot - 1, 0)
  rows = jnp.arange(slot.shape[0])
  where = jnp.where(moves, place, reuse.pool.age.shape[1])

  def swap(active, pooled):
    taken = pooled.at[rows, place].get(mode='promise_in_bounds')
    wide = moves.reshape(moves.shape + (1,) * (active.ndim - 1))
    return jnp.where(wide, taken, active), pooled.at[rows, where].set(active, mode='drop')

  kv, pool_kv = _exchange_rows(kept.kv, kept.pool, moves, place)
  anchor, pool_anchor = swap(reuse.anchor, reuse.pool.anchor)
  age, pool_age = swap(reuse.age, reuse.pool.age)
  hidden, pool_hidden = kept.anchor_hidden, kept.pool_hidden
  if hidden is not None:
    hidden, pool_hidden = swap(hidden, pool_hidden)
  used = reuse.pool.used.at[rows, where].set(state.row_step, mode='drop')
  pool = Pool(anchor=pool_anchor, age=pool_age, used=used)
  return dataclasses.replace(
    state,
    reuse=dataclasses.replace(reuse, anchor=anchor, age=age, pool=pool),
    kept=dataclasses.replace(kept, kv=kv, pool=pool_kv, anchor_hidden=hidden, pool_hidden=pool_hidden),
  )


def _exchange_rows(
  active: tuple[KV, ...], pooled: tuple[KV, ...], moves: Array, place: Array
) -> tuple[tuple[KV, ...], tuple[KV, ...]]:
  """Lets rows of active keys and values change places with pooled ones, in place.

  A row takes two turns of the loop, one to read and one to write: an array that one turn both reads and writes would be
  copied.

  Args:
    active: arrays [B, K, P, H].
    pooled: the same tree of arrays [B, M, K, P, H].
    moves: bool [B], rows that change.
    place: int32 [B], of the pool.
  """
  rows = jnp.arange(moves.shape[0])

  def read(row, held, pairs):
    del held
    active, pooled = pairs
    at = (row, place[row], 0, 0, 0)
    mine = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, row, 1, axis=0), active)
    other = jax.tree.map(lambda x: lax.dynamic_slice(x, at, (1, 1, *x.shape[2:])), pooled)
    return (mine, other), pairs

  def write(row, held, pairs):
    active, pooled = pairs
    at = (row, place[row], 0, 0, 0)
    mine, other = held
    active = jax.tree.map(lambda x, new: lax.dynamic_update_slice_in_dim(x, new[:, 0], row, axis=0), active, other)
    pooled = jax.tree.map(lambda x, old: lax.dynamic_update_slice(x, old[:, None], at), pooled, mine)
    return held, (active, pooled)

  def turn(carry):
    waiting, is_held, held, pairs = carry
    row = jnp.argmax(waiting).astype(jnp.int32)
    held, pairs = lax.cond(is_held, write, read, row, held, pairs)
    return waiting & ~((rows == row) & is_held), ~is_held, held, pairs

  nothing = (
    jax.tree.map(lambda x: jnp.zeros_like(x[:1]), active),
    jax.tree.map(lambda x: jnp.zeros_like(x[:1, :1]), pooled),
  )
  start = (moves, jnp.array(False), nothing, (active, pooled))
  *_, pairs = lax.while_loop(lambda carry: jnp.any(carry[0]), turn, start)
  return pairs

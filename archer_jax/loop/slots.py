"""Continuous batching: rows enter and leave a running batch, and the loop stops when enough of them are done.

The rows of a state are *slots*. A finished row leaves its slot, a new one takes it over, and its neighbours go on as if
nothing had happened: no value of a row depends on another row, so every row decodes as it would alone. A service or a
job is a loop over these three functions; here with one list of prompts `waiting`, and `make_rows` around `init_state`:

    state = make_rows(waiting[:n_slots])              # init_state; gen_length 0 leaves a slot free
    waiting = waiting[n_slots:]
    while not np.all(state.done):
      state = decode_chunk(params, state, np.int32(64), np.int32(1), cfg=cfg)
      slots = np.flatnonzero(np.asarray(state.done) & (np.asarray(state.status) != Status.EMPTY))
      # A fixed width compiles once; slots past the last one stand for nothing.
      wide = np.full(n_slots, n_slots, np.int32)
      wide[: len(slots)] = slots
      state, finished = retire_rows(state, wide)
      ...                                             # finished.canvas[i], finished.counters.steps[i], i < len(slots)
      rows, waiting = make_rows(waiting[: len(slots)]), waiting[len(slots) :]   # filled up to n_slots with gen_length 0
      state = insert_rows(state, wide, rows, cfg=cfg)

All three are pure and work inside a caller's own jit; called as they are, they are compiled and the state is donated.
No call copies kept keys and values: a row that is inserted refreshes in its first step.

Axes: B batch (slots), R rows that move, P prompt, G canvas.
"""

import dataclasses
import functools

import jax
from jax import Array
from jax import lax
import jax.numpy as jnp

from archer_jax.config import DecodeConfig
from archer_jax.loop.step import decode_step
from archer_jax.types import DecodeState
from archer_jax.types import Status


@functools.partial(jax.jit, static_argnames='cfg', donate_argnames='state')
def insert_rows(state: DecodeState, slots: Array, rows: DecodeState, *, cfg: DecodeConfig) -> DecodeState:
  """Puts rows that have not begun into slots, whatever stood there; all other slots stay as they are.

  The slots' keys and values are left for the row's first step, which refreshes, and so are their traces, of which only
  the first `counters.steps` entries are the row's. A row of gen_length 0 frees its slot.

  Args:
    state: B rows; donated, so it must not be used again.
    slots: int32 [R], different slots; a row whose slot is not in [0, B) is left out, so that one width R serves any
      number of rows.
    rows: R rows from `init_state`, with the state's P and G. Their keys and values are not read; under a caller's jit
      around both they are never made.
    cfg: the config that made both.

  Raises:
    ValueError: rows or slots whose shapes do not belong to the state.
  """
  batch, length = state.prompt_tokens.shape
  wanted = (*slots.shape, length, cfg.canvas_length)
  if (got := (*rows.prompt_tokens.shape, rows.canvas.shape[1])) != wanted:
    raise ValueError(f'rows must have one row per slot and the P and G of the state, {wanted}, got {got}')
  # Selected per slot rather than scattered by row: under a mesh every device finds its own slots by comparing numbers.
  wants = slots[None, :] == jnp.arange(batch, dtype=jnp.int32)[:, None]
  taken, source = jnp.any(wants, axis=1), jnp.argmax(wants, axis=1)

  def put(old, new):
    new = new.at[source].get(mode='promise_in_bounds')
    return jnp.where(taken.reshape(batch, *[1] * (old.ndim - 1)), new, old)

  # What is kept of the model and the traces stay where they are.
  bare = lambda s: dataclasses.replace(s, kept=None, trace=None)
  moved = jax.tree.map(put, bare(state), bare(rows))
  return dataclasses.replace(moved, kept=state.kept, trace=state.trace)


@functools.partial(jax.jit, donate_argnames='state')
def retire_rows(state: DecodeState, slots: Array) -> tuple[DecodeState, DecodeState]:
  """Takes rows out of their slots, which are free then; a row that is still running is given up.

  Args:
    state: B rows; donated, so it must not be used again.
    slots: int32 [R]; one that is not in [0, B) frees nothing, so that one width R serves any number of rows.

  Returns:
    The state, in which the slots have gen_length 0 and the status EMPTY; and the R rows as they were, to be read, with
    their trace but without keys and values. The row of a slot that is not in [0, B) is some other one's.
  """
  batch = state.done.shape[0]
  leaving = jnp.any(slots[None, :] == jnp.arange(batch, dtype=jnp.int32)[:, None], axis=1)
  take = lambda x: x.at[slots].get(mode='clip')
  rows = jax.tree.map(take, dataclasses.replace(state, kept=None))
  freed = dataclasses.replace(
    state,
    knobs=dataclasses.replace(state.knobs, gen_length=jnp.where(leaving, 0, state.knobs.gen_length)),
    done=state.done | leaving,
    status=jnp.where(leaving, jnp.int32(Status.EMPTY), state.status),
  )
  return freed, rows


@functools.partial(jax.jit, static_argnames='cfg', donate_argnames='state')
def decode_chunk(params, state: DecodeState, max_steps: Array, min_done: Array, *, cfg: DecodeConfig) -> DecodeState:
  """Steps until `min_done` of the rows that are running now are done, after `max_steps`, or when none is running.

  A small `min_done` keeps few slots idle and comes back often; that many returns cost host time. Neither number is part
  of the program, so changing them compiles nothing as long as their types stay (give `np.int32`).

  Args:
    params: the model's parameters, in the dtype that `cfg` names.
    state: donated, so it must not be used again.
    max_steps: int32 scalar, the most steps; with 0 nothing happens.
    min_done: int32 scalar, from 1; more than there are rows means all of them.
    cfg: the config that made the state.
  """
  running = ~state.done

  def goes_on(carry):
    state, steps = carry
    n_done = jnp.sum(running & state.done, dtype=jnp.int32)
    return jnp.any(~state.done) & (steps < max_steps) & (n_done < min_done)

  step = lambda carry: (decode_step(params, carry[0], cfg=cfg)[0], carry[1] + 1)
  state, _ = lax.while_loop(goes_on, step, (state, jnp.zeros((), jnp.int32)))
  return state

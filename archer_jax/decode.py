"""The loop: one denoising step as a pure function, and `lax.while_loop` around it.

Axes: B batch, P prompt, G canvas, S trace steps.
"""

import dataclasses
import functools

import jax
from jax import Array
from jax import lax
import jax.numpy as jnp
import numpy as np

from archer_jax import cache as cache_lib
from archer_jax import refresh
from archer_jax.config import DecodeConfig
from archer_jax.decoders import DECODERS
from archer_jax.decoders import Update
from archer_jax.decoders import base
from archer_jax.types import Counters
from archer_jax.types import DecodeState
from archer_jax.types import Knobs
from archer_jax.types import PromptCache
from archer_jax.types import Reason
from archer_jax.types import Status
from archer_jax.types import Trace


def init_state(
  prompt_tokens: Array, prompt_valid: Array, knobs: Knobs, seeds: Array, *, cfg: DecodeConfig
) -> DecodeState:
  """The state before the first step: every canvas all masks.

  Args:
    prompt_tokens: int32 [B, P], left-padded; P may be 0.
    prompt_valid: bool [B, P], False at padding, which must stand on the left.
    knobs: the rows' numbers; a row with gen_length 0 is filler and done from the start.
    seeds: unsigned integers [B]; a row's random draws depend on its own seed alone.
    cfg: the program's config.

  Raises:
    ValueError: shapes that do not belong together; and where the values are at hand, which they are not under jit, a
      gen_length longer than the canvas, padding on the right, or a cfg_scale that nothing would read.
  """
  batch, _ = prompt_tokens.shape
  if prompt_valid.shape != prompt_tokens.shape:
    raise ValueError(
      f'prompt_valid must have the shape {prompt_tokens.shape} of prompt_tokens, got {prompt_valid.shape}'
    )
  if knobs.gen_length.shape != (batch,) or jnp.shape(seeds) != (batch,):
    raise ValueError(
      f'knobs and seeds must have {batch} rows like prompt_tokens, got {knobs.gen_length.shape} and {jnp.shape(seeds)}'
    )
  check_values(prompt_valid, knobs, cfg)

  zeros = lambda: jnp.zeros((batch,), jnp.int32)
  canvas = lambda value: jnp.full((batch, cfg.canvas_length), value, jnp.int32)
  empty = knobs.gen_length <= 0
  state = DecodeState(
    prompt_tokens=jnp.array(prompt_tokens, jnp.int32),
    canvas=canvas(cfg.model.mask_id),
    knobs=jax.tree.map(jnp.array, knobs),
    seed=jnp.array(seeds, jnp.uint32),
    row_step=zeros(),
    block=zeros(),
    block_step=zeros(),
    pending=jnp.zeros((batch, cfg.canvas_length), bool),
    last_accept=zeros(),
    taken_back=canvas(-1),
    cache=cache_lib.empty_cache(prompt_valid, cfg),
    cache_uncond=cache_lib.empty_cache(prompt_valid, cfg) if cfg.guidance else None,
    refreshed=jnp.zeros((batch,), bool),
    margin=jnp.full((batch,), jnp.inf, jnp.float32),
    drift=jnp.zeros((batch,), jnp.float32),
    done=jnp.array(empty),
    status=jnp.where(empty, jnp.int32(Status.EMPTY), jnp.int32(Status.RUNNING)),
    counters=Counters(**{field.name: zeros() for field in dataclasses.fields(Counters)}),
    trace=_empty_trace(batch, cfg) if cfg.trace_steps else None,
  )
  return DECODERS[cfg.decoder].enter_block(state, cfg)


def check_values(prompt_valid: Array, knobs: Knobs, cfg: DecodeConfig) -> None:
  """Raises ValueError for values that would be misread; traced ones cannot be looked at."""
  if any(isinstance(value, jax.core.Tracer) for value in (prompt_valid, knobs.gen_length, knobs.cfg_scale)):
    return
  valid = np.asarray(prompt_valid, bool)
  if (row := np.flatnonzero((valid[:, :-1] & ~valid[:, 1:]).any(axis=1))).size:
    raise ValueError(f'prompt_valid must be padding on the left only, got {valid[row[0]].tolist()} in row {row[0]}')
  if (longest := int(knobs.gen_length.max())) > cfg.canvas_length:
    raise ValueError(f'gen_length must be at most canvas_length={cfg.canvas_length}, got {longest}')
  if not cfg.guidance and (scale := float(knobs.cfg_scale.max())) > 0:
    raise ValueError(f'cfg_scale must be 0 without guidance in the config, got {scale}')


def decode_step(params, state: DecodeState, *, cfg: DecodeConfig) -> DecodeState:
  """One denoising step of every row that is not done: decide on a refresh, forward, decide on tokens, count.

  Pure, and works inside jit, scan and while_loop; not under vmap, where `lax.cond` runs both branches.

  Args:
    params: the model's parameters, in the dtype that `cfg` names.
    state: from `init_state` or an earlier step; unchanged.
    cfg: the same config that made the state.

  Raises:
    ValueError: parameters of another dtype.
  """
  if params['embedding'].dtype != jnp.dtype(cfg.dtype):
    raise ValueError(f'dtype must be that of the parameters, {params["embedding"].dtype}, got {cfg.dtype}')
  decoder = DECODERS[cfg.decoder]
  plan = refresh.plan(params, state, cfg)
  state, reason = plan.state, plan.reason
  need = reason != 0
  index = decoder.decision_index(state, cfg)
  logits, cache, cache_uncond = cache_lib.forward(params, state, need, index, cfg)
  update = decoder.update(state, index, logits, cfg)
  # Of the canvas that was read; `hidden` knows it only now.
  drift = plan.drift
  if cfg.probe is not None:
    drift = refresh.DRIFTS[cfg.drift](params, dataclasses.replace(state, cache=cache), cfg)
  unsure = None
  if cfg.on_low_margin == 'same_step':
    # Without a prompt every forward is a full one.
    exact = need | state.done | (not state.prompt_tokens.shape[1])
    unsure = jnp.where(exact, 0, refresh.is_unsure(state, update.margin, drift))
    seen = dataclasses.replace(state, cache=cache, cache_uncond=cache_uncond)
    seen = refresh.make_room(seen, unsure != 0, cfg)
    logits, cache, cache_uncond = cache_lib.refresh_rows(params, seen, unsure != 0, index, logits, cfg)
    update = _decided_again(unsure != 0, state, index, logits, update, cfg)
    reason = jnp.where(unsure != 0, unsure | Reason.SAME_STEP.value, reason)
    need = reason != 0
  finite = _finite(state, index, logits, cfg)
  live = ~state.done & finite
  cache, cache_uncond = (_aged(kept, state, need, live) for kept in (cache, cache_uncond))

  # Flip-flops: committed again as what was taken back, with no other token between.
  restored = update.accepted & (update.canvas == state.taken_back)
  taken_back = jnp.where(update.accepted, -1, jnp.where(update.remasked, state.canvas, state.taken_back))
  count = lambda flags: jnp.sum(flags, axis=1, dtype=jnp.int32)
  accepted, remasked = count(update.accepted), count(update.remasked)
  counters = state.counters
  # A row without guidance has no use for its second forward in a guided batch.
  streams = 1 + (cfg.guidance & (state.knobs.cfg_scale > 0)).astype(jnp.int32)
  forwards = 1 if unsure is None else 1 + (unsure != 0).astype(jnp.int32)
  counters = Counters(
    steps=counters.steps + 1,
    nfe=counters.nfe + streams * forwards,
    refreshes=counters.refreshes + need.astype(jnp.int32),
    accepted=counters.accepted + accepted,
    remasked=counters.remasked + remasked,
    flip_flops=counters.flip_flops + count(restored),
  )
  trace = state.trace
  if trace is not None:
    trace = _record(
      trace,
      state.row_step,
      live,
      canvas=update.canvas,
      refresh=need,
      accept=accepted,
      remask=remasked,
      drift=plan.drift,
      age=plan.age,
      margin=update.margin,
      reason=reason,
    )

  moved = dataclasses.replace(
    state,
    canvas=update.canvas,
    pending=update.pending,
    last_accept=update.last_accept,
    taken_back=taken_back,
    row_step=state.row_step + 1,
    block=state.block + update.block_done.astype(jnp.int32),
    block_step=jnp.where(update.block_done, 0, state.block_step + 1),
    refreshed=need,
    margin=update.margin,
    drift=jnp.where(need, 0, drift),
    counters=counters,
  )
  entered = decoder.enter_block(moved, cfg)
  moved = dataclasses.replace(
    moved,
    pending=_select(update.block_done, entered.pending, moved.pending),
    last_accept=_select(update.block_done, entered.last_accept, moved.last_accept),
  )
  status = jnp.where(finite, _status(state, moved, update, cfg), jnp.int32(Status.NOT_FINITE))
  status = jnp.where(state.done, state.status, status)
  # A row that is done keeps all it had. So does one whose logits are not finite, except that the keys and values of a
  # failed refresh are spoilt; the failed step is not counted, so that `counters.steps` is its number.
  per_row = lambda s: dataclasses.replace(s, cache=None, cache_uncond=None, trace=None, prompt_tokens=None)
  frozen = jax.tree.map(functools.partial(_select, live), per_row(moved), per_row(state))
  return dataclasses.replace(
    frozen,
    prompt_tokens=state.prompt_tokens,
    cache=cache,
    cache_uncond=cache_uncond,
    trace=trace,
    done=status != Status.RUNNING,
    status=status,
  )


@functools.partial(jax.jit, static_argnames='cfg', donate_argnames='state')
def decode(params, state: DecodeState, *, cfg: DecodeConfig) -> DecodeState:
  """Steps until every row is done; each row's number of steps is bounded by its decoder.

  The state is donated: its buffers become the result's, so it must not be used again.
  """
  return lax.while_loop(lambda s: jnp.any(~s.done), lambda s: decode_step(params, s, cfg=cfg), state)


def step_limit(knobs: Knobs, cfg: DecodeConfig) -> int:
  """The largest number of steps that any of the rows can take, for sizing a trace; knobs must be concrete."""
  batch = knobs.gen_length.shape[0]
  prompt = jnp.zeros((batch, 0), jnp.int32)
  state = init_state(prompt, prompt.astype(bool), knobs, jnp.zeros((batch,), jnp.uint32), cfg=cfg)
  return int(DECODERS[cfg.decoder].step_limit(state, cfg).max())


def _select(rows: Array, new: Array, old: Array) -> Array:
  """Per row: new where `rows` [B] holds, else old."""
  return jnp.where(rows.reshape(rows.shape + (1,) * (new.ndim - 1)), new, old)


def _finite(state: DecodeState, index: Array, logits: Array, cfg: DecodeConfig) -> Array:
  """Bool [B]: whether the logits of every row that stands for a column of the canvas are finite."""
  if cfg.shadow_length:
    index = jnp.concatenate([index, base.block_index(state, cfg)], axis=1)
  padding = index >= state.gen_length[:, None]
  return jnp.all(jnp.isfinite(logits).all(axis=-1) | padding, axis=1)


def _decided_again(
  redo: Array, state: DecodeState, index: Array, logits: Array, update: Update, cfg: DecodeConfig
) -> Update:
  """The decision on new logits for the rows in `redo` [B]; that of the others as it was."""

  def again():
    return jax.tree.map(
      functools.partial(_select, redo), DECODERS[cfg.decoder].update(state, index, logits, cfg), update
    )

  return lax.cond(jnp.any(redo), again, lambda: update)


def _aged(cache: PromptCache | None, state: DecodeState, need: Array, live: Array) -> PromptCache | None:
  """The cache with the anchors that this step set and the ages after it."""
  if cache is None:
    return None
  need, pool, hidden = need & live, cache.pool, cache.anchor_hidden
  later = live.astype(jnp.int32)
  if hidden is not None:
    hidden = _select(need, cache.last_hidden, hidden)
  if pool is not None:
    pool = dataclasses.replace(pool, age=jnp.where(pool.age < 0, pool.age, pool.age + later[:, None]))
  return dataclasses.replace(
    cache,
    anchor=_select(need, state.canvas, cache.anchor),
    age=jnp.where(need, 0, cache.age) + later,
    anchor_hidden=hidden,
    pool=pool,
  )


def _status(state: DecodeState, moved: DecodeState, update: Update, cfg: DecodeConfig) -> Array:
  """int32 [B]: how each row stands after this step."""
  decoder = DECODERS[cfg.decoder]
  finished = update.block_done & (moved.block >= base.block_count(state.gen_length, cfg))
  limited = moved.row_step >= decoder.step_limit(state, cfg)
  status = jnp.where(finished, Status.LENGTH, jnp.where(limited, Status.STEP_LIMIT, Status.RUNNING))
  if cfg.early_stop:
    masks = (update.canvas == cfg.model.mask_id).astype(jnp.int32)
    is_end = base.is_any(update.canvas, base.end_tokens(cfg)) & state.canvas_valid
    ended = jnp.any(is_end & (jnp.cumsum(masks, axis=1) == 0), axis=1)
    if not decoder.stops_within_block:
      # A token of an unfinished block may still be taken back.
      ended &= update.block_done
    status = jnp.where(ended, Status.STOP, status)
  return status.astype(jnp.int32)


def _empty_trace(batch: int, cfg: DecodeConfig) -> Trace:
  steps = (batch, cfg.trace_steps)
  return Trace(
    canvas=jnp.full((*steps, cfg.canvas_length), cfg.model.mask_id, jnp.int32),
    refresh=jnp.zeros(steps, bool),
    accept=jnp.zeros(steps, jnp.int32),
    remask=jnp.zeros(steps, jnp.int32),
    drift=jnp.zeros(steps, jnp.float32),
    age=jnp.full(steps, -1, jnp.int32),
    margin=jnp.zeros(steps, jnp.float32),
    reason=jnp.zeros(steps, jnp.int32),
  )


def _record(trace: Trace, row_step: Array, live: Array, **values: Array) -> Trace:
  """Writes each live row's values at its own step; steps past the end of the trace are not kept."""
  rows = jnp.arange(row_step.shape[0])
  step = jnp.where(live, row_step, trace.refresh.shape[1])
  return Trace(**{name: getattr(trace, name).at[rows, step].set(value, mode='drop') for name, value in values.items()})

"""One denoising step as a pure function: plan, feed, decide, count.

Axes: B batch, P prompt, G canvas, S trace steps.
"""

import dataclasses
import functools

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from archer_jax import specs
from archer_jax.config import DecodeConfig
from archer_jax.decoders import base
from archer_jax.numerics import select_rows
from archer_jax.types import Counters
from archer_jax.types import DecodeState
from archer_jax.types import Knobs
from archer_jax.types import Stages
from archer_jax.types import Status
from archer_jax.types import StepRecord
from archer_jax.types import Update
from archer_jax.types import Views


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
  knobs = _completed(knobs, cfg)

  zeros = lambda: jnp.zeros((batch,), jnp.int32)
  canvas = lambda value: jnp.full((batch, cfg.canvas_length), value, jnp.int32)
  empty = knobs.gen_length <= 0
  reuse, kept = cfg.reuse_method.init(prompt_valid, cfg)
  decoder = cfg.decoder_method
  state = DecodeState(
    prompt_tokens=jnp.array(prompt_tokens, jnp.int32),
    prompt_valid=jnp.array(prompt_valid, bool),
    canvas=canvas(cfg.model.mask_id),
    knobs=jax.tree.map(jnp.array, knobs),
    seed=jnp.array(seeds, jnp.uint32),
    row_step=zeros(),
    block=zeros(),
    block_step=zeros(),
    taken_back=canvas(-1),
    decoder=None,
    reuse=reuse,
    kept=kept,
    done=jnp.array(empty),
    status=jnp.where(empty, jnp.int32(Status.EMPTY), jnp.int32(Status.RUNNING)),
    counters=Counters(**{field.name: zeros() for field in dataclasses.fields(Counters)}),
    logprobs=_no_logprobs(batch, cfg) if cfg.logprobs else None,
    trace=_empty_trace(batch, cfg) if cfg.trace_steps else None,
  )
  state = dataclasses.replace(state, decoder=decoder.init(state, cfg))
  return dataclasses.replace(state, decoder=decoder.enter_block(state, cfg))


def _completed(knobs: Knobs, cfg: DecodeConfig) -> Knobs:
  """The knobs with the decoder's own default where nobody gave a number; 0 for one that it does not have."""
  own = cfg.decoder_method.spec.knobs
  unsaid = [name for name, knob in specs.knobs().items() if knob.default == specs.UNSAID]
  values = {name: (getattr(knobs, name), own[name].default if name in own else 0) for name in unsaid}
  filled = {name: jnp.where(old == specs.UNSAID, jnp.float32(new), old) for name, (old, new) in values.items()}
  return dataclasses.replace(knobs, **filled)


def check_values(prompt_valid: Array, knobs: Knobs, cfg: DecodeConfig) -> None:
  """Raises ValueError for values that would be misread; traced ones cannot be looked at."""
  if any(isinstance(value, jax.core.Tracer) for value in jax.tree.leaves((prompt_valid, knobs))):
    return
  valid = np.asarray(prompt_valid, bool)
  if (row := np.flatnonzero((valid[:, :-1] & ~valid[:, 1:]).any(axis=1))).size:
    raise ValueError(f'prompt_valid must be padding on the left only, got {valid[row[0]].tolist()} in row {row[0]}')
  if (longest := int(knobs.gen_length.max())) > cfg.canvas_length:
    raise ValueError(f'gen_length must be at most canvas_length={cfg.canvas_length}, got {longest}')
  if not cfg.guidance and (scale := float(knobs.cfg_scale.max())) > 0:
    raise ValueError(f'cfg_scale must be 0 without guidance in the config, got {scale}')
  cfg.reuse_method.check(knobs, cfg)


def decode_step(params, state: DecodeState, *, cfg: DecodeConfig) -> tuple[DecodeState, StepRecord]:
  """One denoising step of every row that is not done: plan, forward, decide on tokens, count.

  Pure, and works inside jit, scan (whose form it has) and while_loop; not under vmap, where `lax.cond` runs both
  branches.

  Args:
    params: the model's parameters, in the dtype that `cfg` names.
    state: from `init_state` or an earlier step; unchanged.
    cfg: the same config that made the state.

  Returns:
    The state behind the step, and what the step did.

  Raises:
    ValueError: parameters of another dtype.
  """
  state, record, _ = staged_step(params, state, cfg=cfg)
  return state, record


def staged_step(params, state: DecodeState, *, cfg: DecodeConfig) -> tuple[DecodeState, StepRecord, Stages]:
  """`decode_step`, and what its stages gave; arguments and errors are the same."""
  if params['embedding'].dtype != jnp.dtype(cfg.dtype):
    raise ValueError(f'dtype must be that of the parameters, {params["embedding"].dtype}, got {cfg.dtype}')
  decoder, method = cfg.decoder_method, cfg.reuse_method
  plan = method.plan(params, state, cfg)
  views = decoder.views(state, cfg)
  decide = lambda logits: decoder.update(state, views, logits, cfg)
  first = method.forward(params, state, plan, views, cfg)
  proposed = decide(first.logits)
  outcome, update = method.review(params, state, first, proposed, decide, views, cfg)
  finite = _finite(state, views, outcome.logits)
  live = ~state.done & finite
  reuse, kept = method.commit(params, state, outcome, update, live, cfg)
  record = StepRecord(
    live=live,
    canvas=update.canvas,
    accepted=update.accepted,
    remasked=update.remasked,
    reason=outcome.reason,
    margin=update.margin,
    seen={**plan.seen, **update.seen},
    work=outcome.work,
    logprobs=_logprobs(state, views, outcome.logits, update, cfg) if cfg.logprobs else None,
  )

  # Flip-flops: committed again as what was taken back, with no other token between.
  restored = update.accepted & (update.canvas == state.taken_back)
  taken_back = jnp.where(update.accepted, -1, jnp.where(update.remasked, state.canvas, state.taken_back))
  moved = dataclasses.replace(
    state,
    canvas=update.canvas,
    decoder=update.decoder,
    logprobs=record.logprobs,
    taken_back=taken_back,
    row_step=state.row_step + 1,
    block=state.block + update.block_done.astype(jnp.int32),
    block_step=jnp.where(update.block_done, 0, state.block_step + 1),
    counters=_counted(state.counters, record, restored),
  )
  entered = decoder.enter_block(moved, cfg)
  pick = functools.partial(select_rows, update.block_done)
  moved = dataclasses.replace(moved, decoder=jax.tree.map(pick, entered, moved.decoder))
  status = jnp.where(finite, _status(state, moved, update, cfg), jnp.int32(Status.NOT_FINITE))
  status = jnp.where(state.done, state.status, status)
  # A row that is done keeps all it had. So does one whose logits are not finite; the failed step is not counted, so
  # that `counters.steps` is its number. What the reuse method has is its own affair.
  per_row = lambda s: dataclasses.replace(s, reuse=None, kept=None, trace=None, prompt_tokens=None, prompt_valid=None)
  frozen = jax.tree.map(functools.partial(select_rows, live), per_row(moved), per_row(state))
  state = dataclasses.replace(
    frozen,
    prompt_tokens=state.prompt_tokens,
    prompt_valid=state.prompt_valid,
    reuse=reuse,
    kept=kept,
    trace=None if state.trace is None else _recorded(state.trace, state.row_step, record),
    done=status != Status.RUNNING,
    status=status,
  )
  return state, record, Stages(plan=plan, views=views, outcome=first, update=proposed)


def _no_logprobs(batch: int, cfg: DecodeConfig) -> dict[str, Array]:
  shape = (batch, cfg.canvas_length)
  return {'token_logprobs': jnp.zeros(shape, jnp.float32), 'commit_steps': jnp.full(shape, -1, jnp.int32)}


def _logprobs(state: DecodeState, views: Views, logits: Array, update: Update, cfg: DecodeConfig) -> dict[str, Array]:
  """`DecodeState.logprobs` after a step; a column whose logits the step does not read keeps its own."""
  index = views.columns
  z = logits[:, : index.shape[1]]
  token = base.from_canvas(update.canvas, index, 0)
  value = jnp.take_along_axis(z, token[..., None], axis=-1)[..., 0] - jax.nn.logsumexp(z, axis=-1)
  read = cfg.decoder_method.reads(state, views, cfg)[:, : index.shape[1]]
  read |= base.from_canvas(update.accepted, index, False)
  steps = jnp.where(update.accepted, state.row_step[:, None], state.logprobs['commit_steps'])
  return {
    'token_logprobs': base.to_canvas(value, index, read, state.logprobs['token_logprobs']),
    'commit_steps': jnp.where(update.remasked, -1, steps),
  }


def _count(flags: Array) -> Array:
  return jnp.sum(flags, axis=1, dtype=jnp.int32)


def _counted(counters: Counters, record: StepRecord, restored: Array) -> Counters:
  return Counters(
    steps=counters.steps + 1,
    nfe=counters.nfe + record.work.forwards,
    refreshes=counters.refreshes + record.refreshed.astype(jnp.int32),
    accepted=counters.accepted + _count(record.accepted),
    remasked=counters.remasked + _count(record.remasked),
    flip_flops=counters.flip_flops + _count(restored),
    rows_fed=counters.rows_fed + record.work.rows_fed,
    rows_recomputed=counters.rows_recomputed + record.work.rows_recomputed,
  )


def _finite(state: DecodeState, views: Views, logits: Array) -> Array:
  """Bool [B]: whether the logits of every row that stands for a column of the canvas are finite."""
  index = views.columns
  if views.shadow is not None:
    index = jnp.concatenate([index, views.shadow.columns], axis=1)
  padding = index >= state.gen_length[:, None]
  return jnp.all(jnp.isfinite(logits).all(axis=-1) | padding, axis=1)


def _status(state: DecodeState, moved: DecodeState, update: Update, cfg: DecodeConfig) -> Array:
  """int32 [B]: how each row stands after this step."""
  decoder = cfg.decoder_method
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


def _fields(record: StepRecord) -> dict[str, Array]:
  """What a trace keeps of a step, by name."""
  return {
    'canvas': record.canvas,
    'refresh': record.refreshed,
    'accept': _count(record.accepted),
    'remask': _count(record.remasked),
    'margin': record.margin,
    # Bits by the reuse method's reasons, 0 for a reuse.
    'reason': record.reason,
    **record.seen,
    **({} if record.logprobs is None else {'token_logprobs': record.logprobs['token_logprobs']}),
  }


def _empty_trace(batch: int, cfg: DecodeConfig) -> dict[str, Array]:
  """Room for S steps of what `_fields` gives; row b holds its first `counters.steps[b]`, as far as they fit."""
  steps = (batch, cfg.trace_steps)
  dtypes = {'refresh': 'bool', 'accept': 'int32', 'remask': 'int32', 'margin': 'float32', 'reason': 'int32', **cfg.seen}
  trace = {name: jnp.zeros(steps, dtype) for name, dtype in dtypes.items()}
  if cfg.logprobs:
    trace['token_logprobs'] = jnp.zeros((*steps, cfg.canvas_length))
  return {'canvas': jnp.full((*steps, cfg.canvas_length), cfg.model.mask_id, jnp.int32), **trace}


def _recorded(trace: dict[str, Array], row_step: Array, record: StepRecord) -> dict[str, Array]:
  """Writes each live row's values at its own step; steps past the end of the trace are not kept."""
  rows = jnp.arange(row_step.shape[0])
  step = jnp.where(record.live, row_step, trace['refresh'].shape[1])
  return {name: trace[name].at[rows, step].set(value, mode='drop') for name, value in _fields(record).items()}

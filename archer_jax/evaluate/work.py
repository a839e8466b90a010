"""What a decoding computes: forwards counted in the loop, and the operations of each from the traced program.

A batch runs until its last row is done, and each of its steps is one of three things (see `cache.forward`): a refresh
pass over all rows if every live row refreshes; otherwise a reuse pass over all rows, before it one row pass over prompt
and canvas for each row that refreshes. With `same_step` a full pass follows over each row whose margin failed. Rows
that are done and padded columns are computed like all others.

Axes: B batch, P prompt.
"""

import dataclasses
import functools
import math

import jax
from jax import Array
from jax import lax
import jax.extend
import jax.numpy as jnp

from archer_jax import cache
from archer_jax.config import DecodeConfig
from archer_jax.decode import decode_step
from archer_jax.decode import init_state
from archer_jax.decoders import DECODERS
from archer_jax.model import abstract_params
from archer_jax.refresh import plan
from archer_jax.types import DecodeState
from archer_jax.types import Knobs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Passes:
  """How often a batch went through the model, int32 scalars each; or what one pass of each kind costs."""

  refresh: Array | int
  reuse: Array | int
  row: Array | int
  redo: Array | int


def add_step(passes: Passes, need: Array, done: Array, redone: Array) -> Passes:
  """Counts one step.

  Args:
    passes: so far.
    need: bool [B], rows that refresh; none that is done.
    done: bool [B], before the step.
    redone: bool [B], rows that refreshed after a reuse in the same step.
  """
  together = (jnp.any(need) & jnp.all(need | done)).astype(jnp.int32)
  rows = jnp.sum(need, dtype=jnp.int32)
  return Passes(
    refresh=passes.refresh + together,
    reuse=passes.reuse + 1 - together,
    row=passes.row + (1 - together) * rows,
    redo=passes.redo + jnp.sum(redone, dtype=jnp.int32),
  )


@functools.partial(jax.jit, static_argnames='cfg', donate_argnames='state')
def counted_decode(params, state: DecodeState, *, cfg: DecodeConfig) -> tuple[DecodeState, Passes]:
  """`archer_jax.decode` that counts its passes; the state is donated."""

  def step(carry):
    state, passes = carry
    need = plan(params, state, cfg).reason != 0
    after = decode_step(params, state, cfg=cfg)
    redone = after.refreshed & ~need & ~state.done
    if not state.prompt_tokens.shape[1]:
      # A prompt of no columns has nothing to recompute.
      need = jnp.zeros_like(need)
    return after, add_step(passes, need, state.done, redone)

  zero = lambda: jnp.zeros((), jnp.int32)
  start = Passes(refresh=zero(), reuse=zero(), row=zero(), redo=zero())
  return lax.while_loop(lambda carry: jnp.any(~carry[0].done), step, (state, start))


class Counter:
  """Decodes in the place of `archer_jax.decode` and remembers what each batch computed."""

  def __init__(self):
    self._batches = []

  def decode(self, params, state: DecodeState, *, cfg: DecodeConfig) -> DecodeState:
    shape = state.prompt_tokens.shape
    state, passes = counted_decode(params, state, cfg=cfg)
    self._batches.append((cfg, shape, passes))
    return state

  def take(self) -> int:
    """Operations of the batches since it was last asked; waits for them."""
    batches, self._batches = self._batches, []
    return sum(total(jax.device_get(passes), pass_operations(cfg, *shape)) for cfg, shape, passes in batches)


def total(passes: Passes, cost: Passes) -> int:
  """Operations of so many passes at a cost each."""
  return sum(int(getattr(passes, field.name)) * getattr(cost, field.name) for field in dataclasses.fields(Passes))


@functools.lru_cache(maxsize=256)
def pass_operations(cfg: DecodeConfig, batch: int, prompt_length: int) -> Passes:
  """Floating-point operations of the matrix products of one pass of each kind, a product and a sum counting two.

  Taken from the jaxpr of the forward that the loop executes; nothing is computed or compiled.

  Args:
    cfg: the program's config.
    batch: B.
    prompt_length: P.
  """
  prompt = jax.ShapeDtypeStruct((batch, prompt_length), jnp.int32)
  valid = jax.ShapeDtypeStruct((batch, prompt_length), jnp.bool_)
  seeds = jax.ShapeDtypeStruct((batch,), jnp.uint32)
  need = jax.ShapeDtypeStruct((batch,), jnp.bool_)

  def start(prompt, valid, seeds):
    return init_state(prompt, valid, Knobs.make(batch, gen_length=cfg.canvas_length), seeds, cfg=cfg)

  def forward(params, state, need):
    return cache.forward(params, state, need, DECODERS[cfg.decoder].decision_index(state, cfg), cfg)

  def again(params, state, redo, logits):
    index = DECODERS[cfg.decoder].decision_index(state, cfg)
    return cache.refresh_rows(params, state, redo, index, logits, cfg)

  params = abstract_params(cfg.model, cfg.dtype)
  state = jax.eval_shape(start, prompt, valid, seeds)
  logits = jax.eval_shape(forward, params, state, need)[0]
  equations = jax.make_jaxpr(forward)(params, state, need).jaxpr.eqns
  loops = [equation.params['body_jaxpr'] for equation in equations if equation.primitive.name == 'while']
  conds = [equation.params['branches'] for equation in equations if equation.primitive.name == 'cond']
  # A batch of one row has no mixed steps, hence no loop.
  assert len(conds) == 1 and len(loops) == (batch > 1), (len(conds), len(loops))
  reuse, refresh = conds[0]
  row = matmul_operations(loops[0].jaxpr) if loops else 0
  redo = 0
  if cfg.on_low_margin == 'same_step':
    (loop,) = (e for e in jax.make_jaxpr(again)(params, state, need, logits).jaxpr.eqns if e.primitive.name == 'while')
    redo = matmul_operations(loop.params['body_jaxpr'].jaxpr)
  return Passes(refresh=matmul_operations(refresh.jaxpr), reuse=matmul_operations(reuse.jaxpr), row=row, redo=redo)


def matmul_operations(jaxpr: jax.extend.core.Jaxpr) -> int:
  """Floating-point operations of the matrix products of a program without loops and branches."""
  operations = 0
  for equation in jaxpr.eqns:
    if equation.primitive.name == 'dot_general':
      (contracted, _), _ = equation.params['dimension_numbers']
      left = equation.invars[0].aval.shape
      operations += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
    for value in equation.params.values():
      inner = getattr(value, 'jaxpr', value)
      if hasattr(inner, 'eqns'):
        operations += matmul_operations(inner)
  return operations

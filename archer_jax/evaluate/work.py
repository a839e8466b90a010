"""What a decoding computes: passes counted in the loop, and the operations of each from its traced program.

A batch runs until its last row is done, and each of its steps is made of passes that its reuse method names and counts
(`Reuse.passes`, `Work.passes`). Rows that are done and padded columns are computed like all others.

Axes: B batch, P prompt.
"""

from collections.abc import Mapping
import functools
import math

import jax
from jax import Array
from jax import lax
import jax.extend
import jax.numpy as jnp

from archer_jax.config import DecodeConfig
from archer_jax.loop.step import decode_step
from archer_jax.loop.step import init_state
from archer_jax.model import abstract_params
from archer_jax.types import DecodeState
from archer_jax.types import Knobs


@functools.partial(jax.jit, static_argnames='cfg', donate_argnames='state')
def counted_decode(params, state: DecodeState, *, cfg: DecodeConfig) -> tuple[DecodeState, dict[str, Array]]:
  """`archer_jax.decode` that counts its passes, int32 scalars by name; the state is donated."""

  def step(carry):
    state, passes = carry
    state, record = decode_step(params, state, cfg=cfg)
    return state, jax.tree.map(jnp.add, passes, record.work.passes)

  start = {name: jnp.zeros((), jnp.int32) for name in cfg.reuse_method.passes(cfg)}
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


def total(passes: Mapping[str, int], cost: Mapping[str, int]) -> int:
  """Operations of so many passes at a cost each."""
  return sum(int(count) * cost[name] for name, count in passes.items())


@functools.lru_cache(maxsize=256)
def pass_operations(cfg: DecodeConfig, batch: int, prompt_length: int) -> Mapping[str, int]:
  """Floating-point operations of the matrix products of one pass of each kind, a product and a sum counting two.

  Taken from the jaxprs of the passes that the loop executes; nothing is computed or compiled.

  Args:
    cfg: the program's config.
    batch: B.
    prompt_length: P.
  """
  prompt = jax.ShapeDtypeStruct((batch, prompt_length), jnp.int32)
  valid = jax.ShapeDtypeStruct((batch, prompt_length), jnp.bool_)
  seeds = jax.ShapeDtypeStruct((batch,), jnp.uint32)

  def start(prompt, valid, seeds):
    state = init_state(prompt, valid, Knobs.make(batch, gen_length=cfg.canvas_length), seeds, cfg=cfg)
    return state, cfg.decoder_method.views(state, cfg)

  state, views = jax.eval_shape(start, prompt, valid, seeds)
  params = abstract_params(cfg.model, cfg.dtype)
  return {
    name: matmul_operations(jax.make_jaxpr(one)(params, state, views).jaxpr)
    for name, one in cfg.reuse_method.passes(cfg).items()
  }


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

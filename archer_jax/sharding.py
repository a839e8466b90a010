"""Where arrays live, and loops over a mesh: one table from logical axes to mesh axes, and what is derived from it.

A loop runs under `shard_map` over `data`, each shard as if it were alone: it takes its own number of steps and its own
branches, and waits for nobody. Over `model` the compiler divides heads, MLP and vocabulary by the shardings of
parameters and cache, and only there are collectives.

Axes: B batch, P prompt.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from archer_jax.config import DecodeConfig
from archer_jax.config import ModelConfig
from archer_jax.loop.step import check_values
from archer_jax.loop.step import init_state
from archer_jax.model.params import logical_axes
from archer_jax.types import DecodeState
from archer_jax.types import Knobs

# Logical axis of a parameter, of the cache or of the state -> mesh axis; None is replicated.
RULES = {
  'batch': 'data',
  'anchors': None,
  'length': None,
  'heads': 'model',
  'kv_heads': 'model',
  'head_dim': None,
  'embed': None,
  'mlp': 'model',
  'vocab': 'model',
}
# The field of the config that gives the size of each logical axis that must divide over `model`.
_FIELDS = {'heads': 'n_heads', 'kv_heads': 'n_kv_heads', 'mlp': 'd_ff'}


def partition_spec(axes: tuple[str, ...], mesh: Mesh) -> PartitionSpec:
  """The mesh axis of each logical axis; one that `mesh` does not have means replicated."""
  return PartitionSpec(*(RULES[axis] if RULES[axis] in mesh.shape else None for axis in axes))


def check_divides(config: ModelConfig, mesh: Mesh) -> None:
  """Raises ValueError with both numbers if an axis of the model cannot be split evenly over `mesh`."""
  for axis, field in _FIELDS.items():
    size, parts = getattr(config, field), mesh.shape.get(RULES[axis], 1)
    if size % parts:
      raise ValueError(
        f'{field} must be a multiple of the mesh axis {RULES[axis]}, got {field}={size} and {RULES[axis]}={parts}'
      )


def check_rows(batch: int, mesh: Mesh) -> None:
  """Raises ValueError with both numbers if `batch` rows cannot be split evenly over `mesh`."""
  axis = RULES['batch']
  if not batch or batch % mesh.shape[axis]:
    raise ValueError(
      f'rows of a batch must be a multiple of the mesh axis {axis}, got {batch} rows and {axis}={mesh.shape[axis]}'
    )


def param_shardings(config: ModelConfig, mesh: Mesh) -> dict:
  """The tree of `abstract_params(config)` with a NamedSharding at each parameter.

  A vocabulary that does not divide over the mesh is replicated: its size is the tokenizer's, and nobody's choice.

  Raises ValueError if heads or MLP do not divide.
  """
  check_divides(config, mesh)
  divides = config.vocab_size % mesh.shape.get(RULES['vocab'], 1) == 0

  def sharding(node):
    if isinstance(node, dict):
      return {name: sharding(child) for name, child in node.items()}
    return NamedSharding(mesh, partition_spec(node if divides or 'vocab' not in node else (), mesh))

  return sharding(logical_axes(config))


def state_shardings(cfg: DecodeConfig, mesh: Mesh) -> DecodeState:
  """The tree of a state of `cfg` with a NamedSharding at each array, whatever the number and lengths of rows."""
  check_divides(cfg.model, mesh)
  # Of what is kept the method knows the axes; all else of a state has rows and whatever is a row's own.
  place = lambda axes: NamedSharding(mesh, partition_spec(axes, mesh))
  kept = jax.tree.map(place, cfg.reuse_method.kept_axes(cfg), is_leaf=_is_axes)

  def any_state():
    prompt = jnp.zeros((1, 0), jnp.int32)
    knobs = Knobs.make(1, gen_length=0, steps=1)
    return init_state(prompt, prompt.astype(bool), knobs, jnp.zeros((1,), jnp.uint32), cfg=cfg)

  state = jax.tree.map(lambda _: place(('batch',)), jax.eval_shape(any_state))
  return dataclasses.replace(state, kept=kept)


def _is_axes(node: Any) -> bool:
  return isinstance(node, tuple) and all(isinstance(axis, str) for axis in node)


def init_sharded_state(
  prompt_tokens: Array | np.ndarray,
  prompt_valid: Array | np.ndarray,
  knobs: Knobs,
  seeds: Array | np.ndarray,
  *,
  cfg: DecodeConfig,
  mesh: Mesh,
) -> DecodeState:
  """`init_state` over a mesh: every device makes its own part, none ever holds the whole cache.

  All processes of the mesh must give the same values.

  Raises:
    ValueError: as `init_state`; or rows that do not divide over the mesh.
  """
  check_values(prompt_valid, knobs, cfg)
  check_rows(prompt_tokens.shape[0], mesh)
  # Values of this process, not arrays of one of its devices: only such can go to a mesh over several processes.
  arguments = jax.tree.map(np.asarray, (prompt_tokens, prompt_valid, knobs, seeds))
  return _init_program(mesh, cfg)(*arguments)


@functools.cache
def _init_program(mesh: Mesh, cfg: DecodeConfig) -> Callable[..., DecodeState]:
  return jax.jit(
    functools.partial(init_state, cfg=cfg),
    in_shardings=NamedSharding(mesh, PartitionSpec()),
    out_shardings=state_shardings(cfg, mesh),
  )


def sharded(loop: Callable[..., DecodeState], mesh: Mesh) -> Callable[..., DecodeState]:
  """Runs a loop on every `data` shard of a mesh by itself.

  Args:
    loop: `decode`, `decode_chunk` or another function (params, state, *numbers, cfg) -> state that rows do not
      communicate in; defined once, since a program is kept per function.
    mesh: with the axes data and model.

  Returns:
    A function of the same arguments. Parameters are sharded like `param_shardings`, the state like `state_shardings`,
    as is what comes back; arrays that are on no particular device are moved there. The state is donated. Numbers are
    int32 scalars that every shard gets, so that `min_done` of a chunk counts the rows of a shard. It raises ValueError
    for rows or heads that do not divide over the mesh.
  """

  def run(params, state: DecodeState, *numbers, cfg: DecodeConfig) -> DecodeState:
    check_rows(state.done.shape[0], mesh)
    # Always of the same type, since another one would be another program.
    return program(loop, mesh, cfg)(params, state, tuple(np.asarray(number, np.int32) for number in numbers))

  return run


@functools.cache
def program(loop: Callable[..., DecodeState], mesh: Mesh, cfg: DecodeConfig) -> jax.stages.Wrapped:
  """The jitted function (params, state, numbers) -> state behind `sharded`, for looking at what it compiles to."""
  state = state_shardings(cfg, mesh)
  everywhere, rows = PartitionSpec(), partition_spec(('batch',), mesh)

  def shard(params, state, numbers):
    return loop(params, state, *numbers, cfg=cfg)

  return jax.jit(
    jax.shard_map(
      shard,
      mesh=mesh,
      in_specs=(everywhere, rows, everywhere),
      out_specs=rows,
      # `model` is not among them, so that the compiler divides the work over it.
      axis_names={RULES['batch']},
      # Nothing is claimed to be equal on all shards, and decoders need not mark constants as differing between them.
      check_vma=False,
    ),
    donate_argnames='state',
    in_shardings=(param_shardings(cfg.model, mesh), state, NamedSharding(mesh, everywhere)),
    # The same as they came in, for otherwise the donated buffers would not be used.
    out_shardings=state,
  )

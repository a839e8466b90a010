"""Where arrays live: one table from logical axes to mesh axes, and what is derived from it for the parameters."""

from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from archer_jax.config import ModelConfig
from archer_jax.model.params import logical_axes

# Logical axis of a parameter or of the cache -> mesh axis; None is replicated.
RULES = {
  'batch': 'data',
  'length': None,
  'heads': 'model',
  'kv_heads': 'model',
  'head_dim': None,
  'embed': None,
  'mlp': 'model',
  'vocab': 'model',
}

# The field of the config that gives the size of each logical axis that may be split over `model`.
_FIELDS = {'heads': 'n_heads', 'kv_heads': 'n_kv_heads', 'mlp': 'd_ff', 'vocab': 'vocab_size'}


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


def param_shardings(config: ModelConfig, mesh: Mesh) -> dict:
  """The tree of `abstract_params(config)` with a NamedSharding at each parameter.

  Raises ValueError if heads, MLP or vocabulary do not divide over the mesh.
  """
  check_divides(config, mesh)
  sharding = lambda tree: {
    name: sharding(node) if isinstance(node, dict) else NamedSharding(mesh, partition_spec(node, mesh))
    for name, node in tree.items()
  }
  return sharding(logical_axes(config))

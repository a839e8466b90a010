"""Making parameters: the modules' own declarations give shapes, logical axes and initialisers."""

import functools

from flax import linen as nn
import jax
from jax import Array
import jax.numpy as jnp

from archer_jax.config import ModelConfig
from archer_jax.model.transformer import Transformer


def _initialise(key: Array, config: ModelConfig) -> dict:
  one = jnp.zeros((1, 1), jnp.int32)
  return Transformer(config).init(key, one, one, jnp.ones((1, 1, 1, 1), bool))['params']


def _is_boxed(leaf) -> bool:
  return isinstance(leaf, nn.LogicallyPartitioned)


@functools.cache
def _declared(config: ModelConfig):
  return jax.eval_shape(functools.partial(_initialise, config=config), jax.random.key(0))


def init_params(config: ModelConfig, key: Array, dtype: str = 'float32') -> dict:
  """Random parameters, a tree of plain arrays in `dtype`."""
  params = nn.unbox(jax.jit(_initialise, static_argnames='config')(key, config))
  return jax.tree.map(lambda x: x.astype(dtype), params)


def abstract_params(config: ModelConfig, dtype: str = 'float32') -> dict:
  """The tree of `init_params` as ShapeDtypeStructs, nothing computed."""
  shape = lambda box: jax.ShapeDtypeStruct(box.value.shape, jnp.dtype(dtype))
  return jax.tree.map(shape, _declared(config), is_leaf=_is_boxed)


def logical_axes(config: ModelConfig) -> dict:
  """The same tree with each parameter's tuple of logical axis names."""
  return jax.tree.map(lambda box: box.names, _declared(config), is_leaf=_is_boxed)

"""Archer: diffusion language model decoding with reuse of the prompt under rollback.

The public names are resolved when they are first used, so that `import archer_jax` alone does not import JAX.
"""

import importlib
import sys
import types

# Public name -> the module that defines it.
_PUBLIC = {
  'load': 'archer_jax.checkpoint',
  'init_state': 'archer_jax.decode',
  'decode_step': 'archer_jax.decode',
  'decode': 'archer_jax.decode',
  'insert_rows': 'archer_jax.slots',
  'retire_rows': 'archer_jax.slots',
  'decode_chunk': 'archer_jax.slots',
  'generate': 'archer_jax.jobs.generate',
  'Result': 'archer_jax.jobs.generate',
  'ModelConfig': 'archer_jax.config',
  'DecodeConfig': 'archer_jax.config',
  'Knobs': 'archer_jax.types',
  'DecodeState': 'archer_jax.types',
  'PromptCache': 'archer_jax.types',
  'Status': 'archer_jax.types',
  'RefreshPolicy': 'archer_jax.config',
}

__all__ = list(_PUBLIC)


class _Package(types.ModuleType):
  """This module; `archer_jax.decode` is the function, also once the module of that name has been imported."""

  def __setattr__(self, name, value):
    # The import system binds every submodule to its package.
    if name in _PUBLIC and isinstance(value, types.ModuleType):
      value = getattr(value, name)
    super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name):
  if name not in _PUBLIC:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__():
  return sorted({*globals(), *_PUBLIC})

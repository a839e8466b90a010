"""Archer: diffusion language model decoding with reuse of the prompt under rollback.

The public names are resolved when they are first used, so that `import archer_jax` alone does not import JAX.
"""

import importlib

# Public name -> the module that defines it.
_PUBLIC = {
  'load': 'archer_jax.checkpoints.checkpoint',
  'init_state': 'archer_jax.loop.step',
  'decode_step': 'archer_jax.loop.step',
  'decode': 'archer_jax.loop.decode',
  'insert_rows': 'archer_jax.loop.slots',
  'retire_rows': 'archer_jax.loop.slots',
  'decode_chunk': 'archer_jax.loop.slots',
  'generate': 'archer_jax.engine.generate',
  'Result': 'archer_jax.engine.results',
  'ModelConfig': 'archer_jax.config',
  'DecodeConfig': 'archer_jax.config',
  'Knobs': 'archer_jax.types',
  'DecodeState': 'archer_jax.types',
  'Status': 'archer_jax.types',
}

__all__ = list(_PUBLIC)


def __getattr__(name):
  if name not in _PUBLIC:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__():
  return sorted({*globals(), *_PUBLIC})

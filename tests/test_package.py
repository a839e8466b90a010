import subprocess
import sys
import types

import pytest

import archer_jax

NAMES = (
  'load', 'init_state', 'decode_step', 'decode', 'generate', 'Knobs', 'DecodeConfig', 'ModelConfig', 'DecodeState',
  'PromptCache', 'RefreshPolicy', 'Status', 'insert_rows', 'retire_rows', 'decode_chunk',
)  # fmt: skip


def test_public_names():
  for name in NAMES:
    assert callable(getattr(archer_jax, name)) and name in dir(archer_jax)
  with pytest.raises(AttributeError, match='no attribute'):
    archer_jax.nothing  # noqa: B018


def test_decode_is_the_function_whatever_was_imported_before():
  code = (
    'import sys, archer_jax\n'
    "assert 'jax' not in sys.modules\n"
    'import archer_jax.decode\n'
    'from archer_jax.decode import decode_step, decode\n'
    'assert archer_jax.decode is decode and archer_jax.decode_step is decode_step\n'
  )
  assert subprocess.run([sys.executable, '-c', code], check=False).returncode == 0
  assert not isinstance(archer_jax.decode, types.ModuleType)

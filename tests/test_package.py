import subprocess
import sys

import pytest

import archer_jax

NAMES = (
  'load', 'init_state', 'decode_step', 'decode', 'generate', 'Knobs', 'DecodeConfig', 'ModelConfig', 'DecodeState',
  'Result', 'Status', 'insert_rows', 'retire_rows', 'decode_chunk',
)  # fmt: skip


def test_public_names():
  assert sorted(archer_jax.__all__) == sorted(NAMES)
  for name in NAMES:
    assert callable(getattr(archer_jax, name)) and name in dir(archer_jax)
  with pytest.raises(AttributeError, match='no attribute'):
    archer_jax.nothing  # noqa: B018


def test_a_name_is_the_same_whatever_was_imported_before():
  code = (
    'import sys, archer_jax\n'
    "assert 'jax' not in sys.modules\n"
    'import archer_jax.loop.decode\n'
    'from archer_jax import decode\n'
    'assert archer_jax.decode is decode is sys.modules["archer_jax.loop.decode"].decode\n'
  )
  assert subprocess.run([sys.executable, '-c', code], check=False).returncode == 0

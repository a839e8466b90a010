import json
from pathlib import Path
import subprocess
import sys
import tomllib

import pytest

import archer_jax

ROOT = Path(__file__).parents[1]
COMMANDS = ('archer-calibrate', 'archer-convert', 'archer-decode', 'archer-evaluate', 'archer-report')
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


# Each command as its entry point, one behind the other.
_HELP = """
import importlib.metadata, json, sys
for name, value in json.loads(sys.argv[1]).items():
  entry = importlib.metadata.EntryPoint(name, value, 'console_scripts')
  sys.argv = [name, '--help']
  try:
    entry.load()()
  except SystemExit as end:
    assert not end.code, (name, end.code)
assert 'jax' not in sys.modules
"""


def test_what_is_installed_has_every_command_and_each_explains_itself():
  scripts = tomllib.loads((ROOT / 'pyproject.toml').read_text('utf-8'))['project']['scripts']
  assert sorted(scripts) == sorted(COMMANDS)
  done = subprocess.run(
    [sys.executable, '-c', _HELP, json.dumps(scripts)], capture_output=True, text=True, cwd=ROOT, check=False
  )
  assert (done.returncode, done.stderr) == (0, '')
  for name in COMMANDS:
    # The first line of its help is how it is called.
    assert any(line.startswith(f'{name} ') for line in done.stdout.splitlines())


def test_messages_of_the_package_name_what_is_installed():
  named = lambda file: any(part in file.read_text('utf-8') for part in ('tools/', 'run_decode'))
  assert [file.name for file in (ROOT / 'archer_jax').rglob('*.py') if named(file)] == []

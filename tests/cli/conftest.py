"""Commands in this process, which keeps its compiled programs."""

import io
import sys

import pytest
from text_model import save_text_model

from archer_jax import runtime
from archer_jax.cli import command as cli


@pytest.fixture
def cli_main(monkeypatch, capsys):
  """Runs a command in this process, and returns (code, stdout, stderr)."""
  monkeypatch.setattr(runtime, 'set_up', lambda: None)

  def call(*arguments, stdin=b''):
    monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(stdin)))
    argv = ['run_decode.py', *map(str, arguments)]
    monkeypatch.setattr(sys, 'argv', argv)
    capsys.readouterr()
    code = cli.main(argv)
    return code, *capsys.readouterr()

  return call


@pytest.fixture(scope='session')
def ending_path(tmp_path_factory):
  """A model that wants nothing but the end."""
  return save_text_model(tmp_path_factory.mktemp('end') / 'model', eos_bias=1e3)

"""`archer-convert`: one real process, and the rest in this one."""

import os
from pathlib import Path
import subprocess
import sys

from golden_data import GOLDENS
import pytest

from archer_jax.checkpoints import convert as convert_module
from archer_jax.checkpoints.manifest import read_manifest
from archer_jax.cli import convert

ROOT = Path(__file__).parents[2]
SOURCE = GOLDENS / 'dream_tiny'


def test_the_script_converts_and_tells_it_on_any_terminal(tmp_path):
  # Which cannot show the arrow.
  environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'PYTHONIOENCODING': 'ascii', 'PYTHONUTF8': '1'}
  output = tmp_path / 'llada→jax'
  command = [sys.executable, ROOT / 'tools/convert_weights.py', f'--source={SOURCE}', f'--output={output}']
  done = subprocess.run([*command, '--dtype=bfloat16'], capture_output=True, text=True, env=environment, check=False)
  assert (done.returncode, done.stdout) == (0, f'wrote {tmp_path}/llada\\u2192jax\n'), done.stderr
  assert done.stderr == f'warning: {SOURCE} has no tokenizer files; the checkpoint will take prompt_ids only\n'
  assert read_manifest(output).dtype == 'bfloat16'


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['--source={source}', '--output={folder}'], 'exists already and is never overwritten'),
    (['--source={source}', '--output={folder}/new', 'extra'], "there are no positional arguments, got 'extra'"),
    (['--source={source}'], 'output must be given: archer-convert --source'),
    (['--output={folder}/new', '--source='], 'source must be given: archer-convert --source'),
    (['--source={source}', '--output={folder}/new', '--dtype=int8'], 'value should be one of <float32|bfloat16>'),
    (['--source={source}', '--output={folder}/new', '--adapter={folder}'], 'adapter_config.json does not exist'),
    (['--source={source}', '--output={folder}/new', '--adapter='], 'adapter must not be empty'),
    (['--source={source}/config.json', '--output={folder}/new'], 'must be a folder with config.json and safetensors'),
    (['--sauce={source}'], "Unknown command line flag 'sauce'"),
  ],
)
def test_a_mistake_is_one_line(arguments, message, tmp_path, capsys):
  arguments = [argument.format(source=SOURCE, folder=tmp_path) for argument in arguments]
  assert convert.main(['archer-convert', *arguments]) == 1
  out, err = capsys.readouterr()
  assert out == '' and err.startswith('error: ') and message in err and err.count('\n') == 1
  assert list(tmp_path.iterdir()) == []


def test_an_interrupt_says_that_nothing_was_written(tmp_path, capsys, monkeypatch):
  def interrupted(*_):
    raise KeyboardInterrupt

  monkeypatch.setattr(convert_module, '_parameter', interrupted)
  assert convert.main(['archer-convert', f'--source={SOURCE}', f'--output={tmp_path / "new"}']) == 130
  assert capsys.readouterr().err.endswith('error: interrupted, nothing was written\n')
  assert list(tmp_path.iterdir()) == []

"""lm-evaluation-harness's own command line with the bundled model on a task file of this folder, offline."""

import importlib.util
import io
import json
import os
from pathlib import Path
import subprocess
import sys

import pytest

from archer_jax.harness import __main__ as command

REPOSITORY = Path(__file__).parents[2]
TASKS = Path('tests/harness/tasks')


def run(*arguments, home):
  """The command as a user gives it."""
  offline = {'HF_HOME': str(home), 'HF_HUB_OFFLINE': '1', 'HF_DATASETS_OFFLINE': '1', 'JAX_PLATFORMS': 'cpu'}
  offline['XLA_FLAGS'] = '--xla_backend_optimization_level=0'
  line = [sys.executable, '-m', 'archer_jax.harness', '--model', 'archer', *map(str, arguments)]
  return subprocess.run(line, cwd=REPOSITORY, env=os.environ | offline, capture_output=True, text=True, timeout=300)


def test_without_lm_eval_it_says_what_to_install(monkeypatch, capsys):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  assert command.main() == 1
  assert capsys.readouterr().err == ("error: lm-evaluation-harness is not installed: pip install 'archer_jax[eval]'\n")


def test_its_tables_are_escaped_where_the_terminal_cannot_show_them(monkeypatch):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  stdout = io.TextIOWrapper(io.BytesIO(), 'ascii')
  monkeypatch.setattr(sys, 'stdout', stdout)
  assert command.main() == 1
  # As the harness prints its results.
  print('|acc|↑|±|', flush=True)
  assert stdout.buffer.getvalue() == b'|acc|\\u2191|\\xb1|\n'


needs_harness = pytest.mark.skipif(
  importlib.util.find_spec('lm_eval') is None, reason="lm_eval is not installed: pip install 'archer_jax[eval]'"
)


@needs_harness
def test_all_kinds_of_tasks(tmp_path):
  tasks = ','.join(str(TASKS / f'sudoku4_{kind}.yaml') for kind in ('generate', 'choice', 'rolling'))
  options = 'decoder=wino,refresh=archer,mc_num=2,check_greedy=false'
  done = run('--model_args', options, '--tasks', tasks, '--limit', 3, '--output_path', tmp_path, home=tmp_path)
  assert done.returncode == 0, done.stderr
  (file,) = tmp_path.glob('**/results_*.json')
  results = json.loads(file.read_text())['results']
  assert 0 <= results['sudoku4_generate']['exact_match,none'] <= 1
  # Even few samples tell a grid from one with two digits exchanged.
  assert results['sudoku4_choice']['acc,none'] >= 2 / 3
  # Most of the prompt is digits that nothing foretells.
  assert 0 < results['sudoku4_rolling']['bits_per_byte,none'] < 20
  assert 'sudoku4_choice' in done.stdout


@needs_harness
def test_a_mistake_is_one_line(tmp_path):
  done = run('--model_args', 'decoder=dream', '--tasks', TASKS / 'sudoku4_generate.yaml', home=tmp_path)
  assert done.returncode == 1
  assert done.stderr.splitlines()[-1].startswith('error: decoder must be llada, parallel, saber or wino')
  assert 'Traceback' not in done.stderr

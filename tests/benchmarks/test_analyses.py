"""The analyses' own arithmetic; and each of them on a few problems of the bundled model."""

import importlib.util
import json
import os
from pathlib import Path
import subprocess
import sys

from absl import flags
import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / 'benchmarks'


@pytest.fixture(scope='module')
def load():
  """Loads a benchmark as a module, without leaving its flags behind."""
  known = set(flags.FLAGS)

  def script(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f'{name}.py')
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    for flag in set(flags.FLAGS) - known:
      delattr(flags.FLAGS, flag)
    return module

  yield script
  for name in ('feedback', 'staleness'):
    sys.modules.pop(name, None)


def test_predictors_are_ranked(load):
  staleness = load('staleness')
  x, differs = np.arange(6.0), np.array([False, False, False, True, True, True])
  assert staleness.correlation(x, x**3) == pytest.approx(1) and staleness.correlation(x, -x) == pytest.approx(-1)
  assert staleness.correlation(x, np.ones(6)) is None
  assert staleness.area(x, differs) == 1 and staleness.area(-x, differs) == 0
  assert staleness.area(x, np.zeros(6, bool)) is None


def test_what_became_of_commits(load):
  feedback = load('feedback')

  class Threshold:
    value = 0.9

  feedback._CONFIDENT = Threshold
  commit = lambda position, is_right, probability, back, kept: feedback.Commit(
    problem=0,
    position=position,
    token=1,
    is_right=is_right,
    probability=probability,
    taken_back=back,
    kept=kept,
    fresh=[-value for value in kept],
  )
  commits = [
    commit(0, False, 0.95, 2, [1.0, 0.0]),
    commit(0, True, 0.99, None, []),
    commit(1, False, 0.99, None, [-1.0]),
    commit(2, False, 0.5, 1, [0.1]),
    commit(3, True, 0.99, 1, []),
  ]
  told = feedback.summary('sort', 'once', 4, commits)
  assert (told['commits'], told['wrong'], told['sure_wrong'], told['taken_back']) == (5, 3, 2, 0.5)
  assert (told['steps_until'], told['then_right'], told['right_taken_back']) == (2, 1, 0.5)
  first, second = told['curve']
  assert (first['delay'], first['tokens'], second['tokens']) == (1, 2, 1)
  # Of log-odds 1 and -1.
  assert all(first[f'{kind}_log_odds'] == 0 for kind in ('kept', 'fresh'))
  assert first['kept_probability'] == pytest.approx(0.5) and second['fresh_probability'] == 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
  ('name', 'others', 'key'),
  [
    ('feedback', ['--compare=once'], 'settings'),
    ('staleness', [], 'tasks'),
  ],
)
def test_the_benchmarks(tmp_path, name, others, key):
  environment = {**os.environ, 'PYTHONPATH': str(FOLDER.parent), 'JAX_PLATFORMS': 'cpu'}
  files = [f'--json={tmp_path / "figures.json"}', f'--figure={tmp_path / "figure.png"}']
  command = [sys.executable, str(FOLDER / f'{name}.py'), '--tasks=sort', '--n=4', '--batch_size=4', *files, *others]
  run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
  assert run.returncode == 0, run.stderr
  figures = json.loads((tmp_path / 'figures.json').read_text())
  assert figures[key][0]['n'] == 4 and ('n = 4' in run.stdout or '4 problems' in run.stdout)
  assert (tmp_path / 'figure.png').stat().st_size > 5000

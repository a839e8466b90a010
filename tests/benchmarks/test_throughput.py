import json
import os
from pathlib import Path
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_the_benchmark(tmp_path):
  script = Path(__file__).parents[2] / 'benchmarks' / 'throughput.py'
  arguments = ('--tiny', '--rounds=3', '--pairs=3', '--requests=12', '--slots=4', '--min_done=3')
  environment = {**os.environ, 'PYTHONPATH': str(script.parents[1]), 'JAX_PLATFORMS': 'cpu'}
  command = [sys.executable, str(script), *arguments, f'--json={tmp_path / "figures"}']
  run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
  assert run.returncode == 0, run.stderr
  figures = json.loads((tmp_path / 'figures').read_text())
  refresh = figures['refresh']
  for batching in figures['batching']:
    assert batching['same_tokens'] > 6 and batching['counted'] > 1
    assert all(batching[name]['over_static']['median'] > 0 for name in ('static', 'continuous', 'min_done 3'))
  # P = 32 and G = 16: a row by itself feeds both, all together their prompts.
  assert [(row['refreshing'], row['extra_rows']) for row in refresh['rows']] == [(1, 48), (2, 96), (4, 192), (8, 256)]
  assert 'over static' in run.stdout and 'operations' in run.stdout

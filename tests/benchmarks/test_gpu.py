import json
import os
from pathlib import Path
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_the_benchmark(tmp_path):
  script = Path(__file__).parents[2] / 'benchmarks' / 'gpu.py'
  environment = {**os.environ, 'PYTHONPATH': str(script.parents[1]), 'JAX_PLATFORMS': 'cpu'}
  command = [sys.executable, str(script), '--tiny', '--pairs=3', f'--json={tmp_path / "figures"}']
  run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
  assert run.returncode == 0, run.stderr
  figures = json.loads((tmp_path / 'figures').read_text())
  assert [(row['prompt'], row['batch']) for row in figures['steps']] == [(32, 1), (32, 2), (64, 1), (64, 2)]
  assert all(row['refresh_ms'] > 0 and row['counted'] > 1 for row in figures['steps'])
  # Some of each checkpoint's cases are compared, and bfloat16 is not float32.
  assert all(0 < row['float32'] < 1e-4 < row['bfloat16'] < 1 for row in figures['parity'])

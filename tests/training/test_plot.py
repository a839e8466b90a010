"""The figure of a training's log."""

import importlib.util
import json
from pathlib import Path
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip('matplotlib')

TOOL = Path(__file__).parents[2] / 'tools/plot_training.py'
PART = {'batch_size': 10, 'prompt_length': 60, 'answer_length': 40}
RECORDS = [
  {
    'step': 0,
    'train': {'stages': [{'steps': 2000, 'parts': [PART]}, {'steps': 1000, 'parts': [PART, PART]}]},
  },
  {'step': 1000, 'loss': {'sort': 2.0}, 'tokens': 1_000_000},
  {'step': 1000, 'resumed': True},
  {'step': 2000, 'loss': {'sort': 1.0}, 'tokens': 2_000_000, 'exact_match': {'sort': 0.25}},
  {'step': 3000, 'loss': {'sort': 0.5, 'table': 3.0}, 'tokens': 4_000_000, 'exact_match': {'sort': 0.5, 'table': 0}},
]


@pytest.fixture(scope='module')
def tool():
  spec = importlib.util.spec_from_file_location('plot_training', TOOL)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def curves(axes):
  """Points of every labelled line."""
  lines = [line for line in axes.get_lines() if not line.get_label().startswith('_')]
  return {line.get_label(): np.transpose(line.get_data()).tolist() for line in lines}


def test_curves_are_those_of_the_log(tool):
  loss_axes, match_axes = tool.draw(RECORDS).axes
  assert curves(loss_axes) == {'sort': [[1, 2], [2, 1], [4, 0.5]], 'table': [[4, 3]]}
  assert curves(match_axes) == {'sort': [[2, 25], [4, 50]], 'table': [[4, 0]]}
  for axes, words in ((loss_axes, 'nats per answer token'), (match_axes, '%')):
    assert words in axes.get_ylabel()
  assert '(millions)' in match_axes.get_xlabel()


def test_stages_are_marked_as_far_as_they_were_reached(tool):
  assert tool.stage_ends(RECORDS[0]) == [2, 4]
  for records, starts in ((RECORDS, [0, 2]), (RECORDS[:3], [0])):
    axes = tool.draw(records).axes[0]
    marks = [line.get_xdata()[0] for line in axes.get_lines() if line.get_label().startswith('_')]
    assert marks == starts
    assert [text.get_text() for text in axes.texts] == [f'stage {i + 1}' for i in range(len(starts))]


def test_command(tmp_path):
  log, figure = tmp_path / 'log.jsonl', tmp_path / 'figure.png'
  log.write_text(''.join(f'{json.dumps(record)}\n' for record in RECORDS))
  subprocess.run([sys.executable, TOOL, log, figure], check=True)
  assert figure.read_bytes().startswith(b'\x89PNG')
  wrong = subprocess.run([sys.executable, TOOL, log], capture_output=True, text=True)
  assert wrong.returncode == 1
  assert 'two arguments' in wrong.stdout + wrong.stderr

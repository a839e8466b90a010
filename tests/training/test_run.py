"""From a config to a checkpoint, in the process and as the command that people run."""

import importlib.util
import json
import os
from pathlib import Path
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from archer_jax.checkpoints import checkpoint
from archer_jax.checkpoints.manifest import read_manifest
from archer_jax.training.run import run_training
from archer_jax.training.tokenizer import VOCAB

REPOSITORY = Path(__file__).parents[2]

# A config file: the committed one with a tiny model, two short stages, and what a test adds.
TINY = f"""
import importlib.util

spec = importlib.util.spec_from_file_location('train_suite', {str(REPOSITORY / 'configs/train_suite.py')!r})
suite = importlib.util.module_from_spec(spec)
spec.loader.exec_module(suite)


def get_config():
  config = suite.get_config()
  config.model.update(d_model=32, n_layers=1, n_heads=2, n_kv_heads=2, head_dim=16, d_ff=32)
  one = dict(weight=1.0, worked_examples=0, batch_size=4)
  puzzles = dict(one, level=0.5, lowest_level=0.5, prompt_length=19, answer_length=17)
  numbers = dict(one, level=0.1, lowest_level=0.05, prompt_length=20, answer_length=15)
  config.stages = ({{'steps': 6, 'parts': {{'sudoku4': puzzles}}}}, {{'steps': 4, 'parts': {{'sort': numbers}}}})
  config.data.held_out = 4
  config.train.update(log_every=2, eval_every=0, save_every=2)
  config.optimizer.warmup_steps = 2
  return config
"""


@pytest.fixture(scope='module')
def config_file(tmp_path_factory):
  path = tmp_path_factory.mktemp('config') / 'tiny.py'
  path.write_text(TINY)
  return path


def records(directory):
  return [json.loads(line) for line in (directory / 'log.jsonl').read_text().splitlines()]


def test_a_config_becomes_a_checkpoint(config_file, tmp_path):
  spec = importlib.util.spec_from_file_location('tiny', config_file)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  config = module.get_config()
  solved = run_training(config, REPOSITORY, tmp_path)
  header, *lines = records(tmp_path)
  assert header['model']['vocab_size'] == len(VOCAB) and header['start'] == ''
  assert set(header['versions']) == {'jax', 'numpy', 'optax'}
  assert [sorted(line['loss']) for line in lines] == [['sudoku4']] * 3 + [['sort']] * 2
  # Of the last stage's tasks, on four problems.
  assert lines[-1]['exact_match'] == solved
  assert list(solved) == ['sort']
  assert solved['sort'] in (0, 0.25, 0.5, 0.75, 1)
  model, params, tokenizer = checkpoint.load(tmp_path / 'checkpoint')
  assert model.config.d_model == 32
  assert model.config.mask_id == VOCAB['<|mask|>']
  assert params['embedding'].dtype == config.dtype == 'bfloat16'
  assert tokenizer.decode_text(tokenizer.encode('sort: 45 12\n')) == 'sort: 45 12\n'
  assert read_manifest(tmp_path / 'checkpoint').defaults == config.defaults.to_dict()
  with pytest.raises(FileExistsError, match='holds a finished training already'):
    run_training(config, REPOSITORY, tmp_path)


def command(config_file, output, *flags):
  return [sys.executable, REPOSITORY / 'tools/train.py', f'--config={config_file}', f'--output={output}', *flags]


def environment(**variables):
  return {name: value for name, value in os.environ.items() if 'MALLOC' not in name and name != 'GLIBC_TUNABLES'} | {
    'PYTHONPATH': str(REPOSITORY),
    **variables,
  }


@pytest.fixture
def seen_environment(tmp_path):
  """Runs the command up to the point where it reads its config; gives its process id and environment each time."""

  def run(prefix='', **variables):
    config, seen = tmp_path / 'seen.py', tmp_path / 'seen.jsonl'
    seen.unlink(missing_ok=True)
    config.write_text(
      'import json, os\n'
      f'with open({str(seen)!r}, "a") as file:\n'
      '  file.write(json.dumps([os.getpid(), dict(os.environ)]) + "\\n")\n'
      'def get_config():\n'
      '  raise SystemExit(7)\n'
    )
    words = command(config, tmp_path)
    if prefix:
      words[1:2] = ['-c', f'{prefix}; import runpy, sys; runpy.run_path({str(words[1])!r}, run_name="__main__")']
    process = subprocess.Popen(words, env=environment(**variables))
    assert process.wait(timeout=300) == 7
    ((pid, found),) = map(json.loads, seen.read_text().splitlines())
    assert pid == process.pid
    return {name: value for name, value in found.items() if 'MALLOC' in name or name == 'GLIBC_TUNABLES'}

  return run


MALLOC = {
  'MALLOC_MMAP_MAX_': '0',
  'MALLOC_TRIM_THRESHOLD_': '100000000000',
  'MALLOC_TOP_PAD_': '536870912',
  'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1',
}


@pytest.mark.skipif(sys.platform != 'linux', reason='there is no glibc')
def test_the_command_sets_malloc_up(seen_environment):
  assert seen_environment() == MALLOC
  # What someone has set stays.
  assert seen_environment(MALLOC_TOP_PAD_='0') == {**MALLOC, 'MALLOC_TOP_PAD_': '0'}


def test_other_systems_are_left_alone(seen_environment):
  assert seen_environment(prefix='import sys; sys.platform = "darwin"') == {}


@pytest.mark.slow
def test_a_killed_command_goes_on_exactly(config_file, tmp_path):
  def start(output, *flags):
    words = command(config_file, output, *flags)
    return subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

  process = start(tmp_path / 'whole')
  shown, bar = process.communicate(timeout=600)
  assert process.returncode == 0, bar
  for part in ('tok/s=', 'sudoku4=', 'sort solved='):
    assert part in bar
  process = start(tmp_path / 'killed')
  state = tmp_path / 'killed/state'
  while not (state.exists() and any(path.name == '4' for path in state.iterdir())):
    assert process.poll() is None, process.communicate()
    time.sleep(0.01)
  process.send_signal(signal.SIGKILL)
  process.communicate(timeout=60)
  assert not (tmp_path / 'killed/checkpoint').exists()
  process = start(tmp_path / 'killed')
  shown_again, _ = process.communicate(timeout=600)
  assert json.loads(shown_again) == json.loads(shown)
  assert any(line.get('resumed') for line in records(tmp_path / 'killed'))
  losses = [{r['step']: r['loss'] for r in records(tmp_path / name) if 'loss' in r} for name in ('whole', 'killed')]
  assert losses[0] == losses[1]
  params = [checkpoint.load(tmp_path / name / 'checkpoint')[1] for name in ('whole', 'killed')]
  jax.tree.map(np.testing.assert_array_equal, *params)
  process = start(tmp_path / 'whole')
  assert 'holds a finished training' in process.communicate(timeout=600)[1]
  assert process.returncode == 1

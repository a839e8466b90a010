"""The training loop: it learns, and a stopped run goes on exactly."""

import dataclasses
import itertools
import json
import os
from pathlib import Path
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from archer_jax.training import trainer
from archer_jax.training.batches import Pair
from archer_jax.training.optimizer import OptimizerConfig
from archer_jax.training.trainer import TrainConfig
from archer_jax.training.trainer import train

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope='module')
def model(model):
  """One layer is enough to copy, and quick to compile."""
  return dataclasses.replace(model, n_layers=1)


@pytest.fixture(scope='module')
def config():
  return TrainConfig(
    steps=60,
    batch_size=64,
    prompt_length=3,
    answer_length=3,
    seed=0,
    log_every=15,
    eval_every=20,
    save_every=20,
    optimizer=OptimizerConfig(warmup_steps=2),
  )


def copies_from(start):
  """The answer repeats the prompt: pairs of a stream that can be entered anywhere."""
  for index in itertools.count(start):
    digits = np.random.default_rng((9, index)).integers(2, 15, 3).tolist()
    yield Pair(digits, digits)


def records(directory):
  return [json.loads(line) for line in (directory / 'log.jsonl').read_text().splitlines()]


@pytest.fixture(scope='module')
def whole(config, model, tmp_path_factory):
  """Parameters and folder of a run that nobody stopped."""
  directory = tmp_path_factory.mktemp('whole')
  params = train(config, model, copies_from, directory, exact_match=lambda params: 0.5, header={'task': 'copy'})
  return params, directory


def test_log(config, model, whole):
  header, *lines = records(whole[1])
  assert header == {
    'step': 0,
    'task': 'copy',
    'model': dataclasses.asdict(model),
    'train': dataclasses.asdict(config),
  }
  # Records come when a log, an exact match or a saved state is due, and after the last step.
  assert [line['step'] for line in lines] == [15, 20, 30, 40, 45, 60]
  assert [line['step'] for line in lines if 'exact_match' in line] == [20, 40, 60]
  assert all(line['tokens_per_s'] > 0 for line in lines)
  # The answer is there to be copied, so the loss goes down a long way.
  assert lines[-1]['loss'] < 0.5 * lines[0]['loss']


def test_a_stopped_run_goes_on_exactly(config, model, whole, tmp_path):
  def stop_at_second(params):
    stops.append(1)
    if len(stops) == 2:
      raise KeyboardInterrupt
    return 0.5

  stops = []
  with pytest.raises(KeyboardInterrupt):
    train(config, model, copies_from, tmp_path, exact_match=stop_at_second, header={'task': 'copy'})
  assert [path.name for path in (tmp_path / 'state').iterdir() if path.name.isdigit()] == ['20']
  asked = []

  def watched_copies_from(start):
    asked.append(start)
    return copies_from(start)

  params = train(config, model, watched_copies_from, tmp_path, exact_match=lambda params: 0.5)
  assert asked == [20 * config.batch_size]
  jax.tree.map(np.testing.assert_array_equal, params, whole[0])
  figures = lambda log: {line['step']: line['loss'] for line in log if 'loss' in line}
  # What was logged after the saved state is done again, and as before.
  assert figures(records(tmp_path)) == figures(records(whole[1]))


def test_a_finished_run_only_gives_its_parameters(config, model, whole):
  params = train(config, model, lambda start: iter(()), whole[1])
  jax.tree.map(np.testing.assert_array_equal, params, whole[0])


def test_another_config_is_refused(config, model, whole):
  with pytest.raises(ValueError, match='holds a training with seed=0, so seed must not be 1'):
    train(dataclasses.replace(config, seed=1), model, copies_from, whole[1])
  with pytest.raises(ValueError, match='holds a training with d_ff=64, so d_ff must not be 32'):
    train(config, dataclasses.replace(model, d_ff=32), copies_from, whole[1])


def test_pairs_that_end_too_early_are_an_error(config, model, tmp_path):
  few = lambda start: itertools.islice(copies_from(start), 100)
  with pytest.raises(ValueError, match='pairs must last for steps=60 batches of 64, ended at 2'):
    train(config, model, few, tmp_path)


def test_a_loss_that_is_not_finite_stops_before_it_is_saved(config, model, tmp_path, monkeypatch):
  losses = iter([1.0] * 25 + [float('nan')] * 35)
  monkeypatch.setattr(trainer, 'train_step', lambda state, batch, **_: (state, jnp.float32(next(losses))))
  with pytest.raises(FloatingPointError, match='the loss is nan between steps 20 and 30'):
    train(config, model, copies_from, tmp_path)
  assert [path.name for path in (tmp_path / 'state').iterdir() if path.name.isdigit()] == ['20']


@pytest.mark.parametrize(
  ('field', 'value', 'message'),
  [
    ('steps', 0, 'steps must be positive, got 0'),
    ('save_every', -1, 'save_every must not be negative, got -1'),
    ('optimizer', OptimizerConfig(warmup_steps=61), 'warmup_steps must be at most steps=60, got 61'),
  ],
)
def test_bad_values_are_refused(config, field, value, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(config, **{field: value})


@pytest.mark.slow
def test_a_killed_command_goes_on_exactly(tmp_path):
  tiny = {'model.d_model': 32, 'model.n_layers': 1, 'model.d_ff': 32, 'data.held_out': 4}
  tiny |= {'train.steps': 60, 'train.batch_size': 8, 'train.save_every': 5, 'train.log_every': 5, 'train.eval_every': 0}

  def start(output):
    flags = [f'--config.{name}={value}' for name, value in tiny.items()]
    config = REPOSITORY / 'configs/train_sudoku4.py'
    command = [sys.executable, REPOSITORY / 'tools/train.py', f'--config={config}', f'--output={output}', *flags]
    env = os.environ | {'PYTHONPATH': str(REPOSITORY)}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

  process = start(tmp_path / 'whole')
  shown, bar = process.communicate(timeout=600)
  assert process.returncode == 0, bar
  assert 'tok/s=' in bar
  assert 'exact=' in bar
  process = start(tmp_path / 'killed')
  state = tmp_path / 'killed/state'
  while not (state.exists() and any(path.name == '10' for path in state.iterdir())):
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
  process = start(tmp_path / 'whole')
  assert 'holds a finished training' in process.communicate(timeout=600)[1]
  assert process.returncode == 1

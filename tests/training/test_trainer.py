"""The training loop: it learns, follows its weights, and a stopped run goes on exactly."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
from programs import QUICK
import pytest

from archer_jax.training import trainer
from archer_jax.training.batches import Pair
from archer_jax.training.batches import make_batch
from archer_jax.training.curriculum import Part
from archer_jax.training.curriculum import Stage
from archer_jax.training.curriculum import stage_at
from archer_jax.training.loss import masked_diffusion_loss
from archer_jax.training.optimizer import OptimizerConfig
from archer_jax.training.optimizer import apply_gradients
from archer_jax.training.trainer import TrainConfig
from archer_jax.training.trainer import init_train_state
from archer_jax.training.trainer import train


@pytest.fixture(scope='module')
def model(model):
  """One layer is enough to copy, and quick to compile."""
  return dataclasses.replace(model, n_layers=1)


def part(task, weight, batch_size):
  lengths = {'batch_size': batch_size, 'prompt_length': 3, 'answer_length': 3}
  return Part(task=task, weight=weight, level=1.0, lowest_level=1.0, worked_examples=0, **lengths)


@pytest.fixture(scope='module')
def config():
  """Copying, and after 40 steps reversing too."""
  return TrainConfig(
    stages=(
      Stage(steps=40, parts=(part('copy', 1.0, 64),)),
      Stage(steps=20, parts=(part('copy', 3.0, 32), part('reverse', 1.0, 16))),
    ),
    seed=0,
    log_every=15,
    eval_every=20,
    save_every=20,
    optimizer=OptimizerConfig(warmup_steps=2),
  )


@pytest.fixture(scope='module')
def batches_at(config, model):
  """The batches of a step, whose answers are the prompt or its reverse."""

  def pair(task, rng):
    digits = rng.integers(2, 15, 3).tolist()
    return Pair(digits, digits[::-1] if task == 'reverse' else digits)

  def batches_at(step):
    rng = np.random.default_rng((9, step))
    parts = stage_at(config.stages, step).parts
    return tuple(make_batch([pair(part.task, rng) for _ in range(part.batch_size)], 3, 3, model) for part in parts)

  return batches_at


def records(directory):
  return [json.loads(line) for line in (directory / 'log.jsonl').read_text().splitlines()]


def states(directory):
  return sorted(path.name for path in (directory / 'state').iterdir() if path.name.isdigit())


@pytest.fixture(scope='module')
def whole(config, model, batches_at, tmp_path_factory):
  """Parameters and folder of a run that nobody stopped."""
  directory = tmp_path_factory.mktemp('whole')
  exact_match = lambda params, step: {'copy': step / 100}
  return train(config, model, batches_at, directory, exact_match=exact_match, header={'vocab': 16}), directory


def test_log(config, model, whole):
  header, *lines = records(whole[1])
  assert header == {
    'step': 0,
    'start': '',
    'vocab': 16,
    'model': dataclasses.asdict(model),
    'train': json.loads(json.dumps(dataclasses.asdict(config))),
  }
  # Records come when a log, an exact match or a saved state is due, and after the last step.
  assert [line['step'] for line in lines] == [15, 20, 30, 40, 45, 60]
  assert {line['step']: line['exact_match'] for line in lines if 'exact_match' in line} == {
    20: {'copy': 0.2},
    40: {'copy': 0.4},
    60: {'copy': 0.6},
  }
  assert [sorted(line['loss']) for line in lines] == [['copy']] * 4 + [['copy', 'reverse']] * 2
  # 64 or 32 + 16 rows of 6 tokens a step.
  assert [line['tokens'] for line in lines] == [64 * 6 * step for step in (15, 20, 30, 40)] + [16800, 21120]
  for clock in ('seconds', 'cpu_seconds'):
    spent = [line[clock] for line in lines]
    assert 0 < spent[0] < spent[-1]
    assert spent == sorted(spent)
  assert all(line['tokens_per_s'] > 0 for line in lines)
  # The answer is there to be copied, so the loss goes down a long way.
  assert lines[-1]['loss']['copy'] < 0.5 * lines[0]['loss']['copy']


def test_a_stopped_run_goes_on_exactly(config, model, batches_at, whole, tmp_path):
  def stop_at_40(params, step):
    if step == 40:
      raise KeyboardInterrupt
    return {'copy': step / 100}

  with pytest.raises(KeyboardInterrupt):
    train(config, model, batches_at, tmp_path, exact_match=stop_at_40, header={'vocab': 16})
  assert states(tmp_path) == ['20']
  assert records(tmp_path)[-1]['step'] == 30
  asked = []

  def watched_batches_at(step):
    asked.append(step)
    return batches_at(step)

  params = train(config, model, watched_batches_at, tmp_path, exact_match=lambda params, step: {'copy': step / 100})
  assert asked == list(range(20, 60))
  jax.tree.map(np.testing.assert_array_equal, params, whole[0])
  # What was logged after the saved state is done again, and as before.
  fields = ('loss', 'exact_match', 'tokens')
  figures = lambda log: {line['step']: {field: line.get(field) for field in fields} for line in log if 'loss' in line}
  assert figures(records(tmp_path)) == figures(records(whole[1]))
  assert [line['step'] for line in records(tmp_path) if line.get('resumed')] == [20]
  assert states(tmp_path) == ['40', '60']


def test_a_finished_run_only_gives_its_parameters(config, model, whole):
  params = train(config, model, lambda step: pytest.fail('no step is left'), whole[1])
  jax.tree.map(np.testing.assert_array_equal, params, whole[0])


def test_a_run_begins_with_given_parameters(config, model, batches_at, whole, tmp_path):
  def stop(params, step):
    raise KeyboardInterrupt

  given = jax.tree.map(jnp.copy, whole[0])
  with pytest.raises(KeyboardInterrupt):
    train(config, model, batches_at, tmp_path, params=given, exact_match=stop)
  # They can copy from the start.
  assert records(tmp_path)[1]['loss']['copy'] < 0.5 * records(whole[1])[1]['loss']['copy']
  # And they are still the caller's.
  jax.tree.map(np.testing.assert_array_equal, given, whole[0])


def test_another_seed_is_another_run(config, model):
  states = [init_train_state(config=dataclasses.replace(config, seed=seed), model=model) for seed in (0, 1)]
  assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, states), strict=True))


def test_another_config_is_refused(config, model, batches_at, whole):
  with pytest.raises(ValueError, match='holds a training with another seed: 0, not 1'):
    train(dataclasses.replace(config, seed=1), model, batches_at, whole[1])
  with pytest.raises(ValueError, match="holds a training from another start: '', not 'first'"):
    train(config, model, batches_at, whole[1], start='first')
  with pytest.raises(ValueError, match='holds a training with another d_ff: 64, not 32'):
    train(config, dataclasses.replace(model, d_ff=32), batches_at, whole[1])
  shorter = dataclasses.replace(config, stages=config.stages[:1])
  with pytest.raises(ValueError, match='holds a training with other stages; give'):
    train(shorter, model, batches_at, whole[1])


def test_a_step_follows_the_weights(config, model, batches_at):
  batches, weights = batches_at(50), (3.0, 1.0)
  before = init_train_state(config=config, model=model)
  grad = jax.jit(jax.value_and_grad(masked_diffusion_loss), static_argnames='config', compiler_options=QUICK)
  key = jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed), 1), 0)
  found = [grad(before.params, batch, jax.random.fold_in(key, i), config=model) for i, batch in enumerate(batches)]
  (loss_a, grads_a), (loss_b, grads_b) = found
  grads = jax.tree.map(lambda a, b: 0.75 * a + 0.25 * b, grads_a, grads_b)
  expected, _ = apply_gradients(before.params, grads, before.opt_state, config=config.optimizer, steps=config.steps)
  after, losses = trainer.train_step(before, batches, weights=weights, config=config, model=model)
  np.testing.assert_allclose(losses, [loss_a, loss_b], rtol=1e-5)
  # Far less than the first step, which is a part of the rates.
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), after.params, expected)
  assert int(after.step) == 1


def test_masks_differ_between_steps(config, model, batches_at):
  losses = []
  for step in range(2):
    state = init_train_state(config=config, model=model)
    state = dataclasses.replace(state, step=jnp.int32(step))
    losses.append(float(trainer.train_step(state, batches_at(0), weights=(1.0,), config=config, model=model)[1][0]))
  assert losses[0] != losses[1]


def test_a_loss_that_is_not_finite_stops_before_it_is_saved(config, model, batches_at, tmp_path, monkeypatch):
  losses = iter([1.0] * 25 + [float('nan')] * 35)
  monkeypatch.setattr(trainer, 'train_step', lambda state, batches, **_: (state, (jnp.float32(next(losses)),)))
  with pytest.raises(FloatingPointError, match=r'the loss is .*nan.* before 30'):
    train(config, model, batches_at, tmp_path)
  assert states(tmp_path) == ['20']


@pytest.mark.parametrize(
  ('field', 'value', 'message'),
  [
    ('stages', (), 'stages must have one at least'),
    ('log_every', 0, 'log_every must be positive, got 0'),
    ('save_every', -1, 'save_every must not be negative, got -1'),
    ('shadow', 'all', "shadow must be one of none, self, official, got 'all'"),
    ('optimizer', OptimizerConfig(warmup_steps=61), "warmup_steps must be at most the stages' 60, got 61"),
  ],
)
def test_bad_values_are_refused(config, field, value, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(config, **{field: value})

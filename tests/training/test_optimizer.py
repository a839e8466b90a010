"""Who trains what, and the course of the learning rate."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from archer_jax.model import init_params
from archer_jax.training.optimizer import OptimizerConfig
from archer_jax.training.optimizer import apply_gradients
from archer_jax.training.optimizer import make_optimizer
from archer_jax.training.optimizer import rate_scale


def test_linear_course():
  scale = rate_scale(OptimizerConfig(warmup_steps=3, decay_share=0.4, decay='linear'), 10)
  expected = [1 / 4, 2 / 4, 3 / 4, 1, 1, 1, 1, 3 / 4, 2 / 4, 1 / 4]
  np.testing.assert_allclose([scale(jnp.int32(step)) for step in range(10)], expected, rtol=1e-6)


def test_cosine_course():
  scale = rate_scale(OptimizerConfig(decay_share=1.0, decay='cosine'), 4)
  expected = [(1 - np.cos(np.pi * left)) / 2 for left in (1, 3 / 4, 2 / 4, 1 / 4)]
  np.testing.assert_allclose([scale(jnp.int32(step)) for step in range(4)], expected, rtol=1e-6)


@functools.partial(jax.jit, static_argnames='config')
def first_update(params, grads, *, config):
  """What the first of ten steps adds to the parameters."""
  opt_state = make_optimizer(config, 10).init(params)
  after, _ = apply_gradients(params, grads, opt_state, config=config, steps=10)
  return jax.tree.map(lambda new, old: new - old, after, params)


@pytest.fixture(scope='module')
def trees(model):
  """Parameters and random gradients."""
  params, rng = init_params(model, jax.random.key(0)), np.random.default_rng(1)
  return params, jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), params)


def test_muon_orthogonalises_the_matrices_and_adam_takes_the_rest(trees):
  updates = first_update(*trees, config=OptimizerConfig(muon_rate=0.5, adam_rate=0.25, decay_share=0))
  attn, mlp = updates['blocks_1']['attn'], updates['blocks_1']['mlp']
  # Split heads are one matrix: from embed to (heads, head_dim), and back.
  matrices = [attn[name]['kernel'].reshape(32, 32) for name in ('q_proj', 'k_proj', 'v_proj', 'o_proj')]
  matrices += [mlp[name]['kernel'] for name in ('gate_proj', 'up_proj', 'down_proj')]
  for matrix in matrices:
    # Newton-Schulz brings all but the smallest singular values near 1; the rest is optax's scale of wide matrices.
    # Heads taken one by one, or a matrix left to Adam, would show values from 0 to the square root of 2 and more.
    values = np.linalg.svd(matrix, compute_uv=False) / 0.5 / max(1, matrix.shape[1] / matrix.shape[0]) ** 0.5
    assert np.quantile(values, 0.1) > 0.6
    assert values.max() < 1.25
  # The first step of Adam is the same for every gradient, but for its sign; optax looks ahead here (Nesterov).
  ahead = (0.9 * 0.1 / (1 - 0.9**2)) + 1
  others = [updates['embedding'], updates['head']['kernel'], updates['final_norm']['scale']]
  for update in [*others, updates['blocks_0']['attn_norm']['scale']]:
    np.testing.assert_allclose(np.abs(update), 0.25 * ahead, rtol=1e-3)


def test_adamw_takes_everything(trees):
  updates = first_update(*trees, config=OptimizerConfig(name='adamw', adam_rate=0.25, decay_share=0))
  for update in jax.tree.leaves(updates):
    np.testing.assert_allclose(np.abs(update), 0.25, rtol=1e-3)


@pytest.mark.parametrize(
  ('field', 'value', 'message'),
  [
    ('name', 'sgd', 'must be one of muon, adamw'),
    ('decay', 'step', 'must be one of linear, cosine'),
    ('muon_rate', -1.0, 'must not be negative'),
    ('adam_rate', float('nan'), 'must not be negative'),
    ('decay_share', 1.5, r'must be in \[0, 1\]'),
  ],
)
def test_bad_values_are_refused(field, value, message):
  with pytest.raises(ValueError, match=f'{field} {message}'):
    OptimizerConfig(**{field: value})

"""A tiny model for the training tests, and programs that are compiled in less time."""

import functools

import jax
from programs import QUICK
import pytest

from archer_jax.config import ModelConfig
from archer_jax.training import evaluate
from archer_jax.training import trainer

_jit = functools.partial(jax.jit, compiler_options=QUICK)
# Once, so that all tests share their compiled programs.
_STEP = _jit(trainer.train_step.__wrapped__, static_argnames=('weights', 'config', 'model'), donate_argnames='state')
_FILL = _jit(evaluate.greedy_fill.__wrapped__, static_argnames=('canvas_length', 'config'))


@pytest.fixture(autouse=True, scope='module')
def quick_steps():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(trainer, 'train_step', _STEP)
    patch.setattr(evaluate, 'greedy_fill', _FILL)
    yield


@pytest.fixture(scope='session')
def model():
  return ModelConfig(
    family='llada',
    vocab_size=16,
    d_model=32,
    n_layers=2,
    n_heads=2,
    n_kv_heads=2,
    head_dim=16,
    d_ff=64,
    rope_theta=10000.0,
    norm_eps=1e-5,
    qkv_bias=False,
    max_length=64,
    mask_id=15,
    eos_id=1,
    pad_id=0,
    logit_alignment='same_position',
  )

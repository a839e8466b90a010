"""A tiny model for the training tests."""

import pytest

from archer_jax.config import ModelConfig


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

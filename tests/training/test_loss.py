"""The masked diffusion loss against its definition."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from archer_jax.model import Transformer
from archer_jax.model import init_params
from archer_jax.training.batches import Batch
from archer_jax.training.loss import MIN_RATIO
from archer_jax.training.loss import canvas_logits
from archer_jax.training.loss import draw_mask
from archer_jax.training.loss import masked_diffusion_loss


@pytest.fixture(scope='module')
def params(model):
  # Larger than at the start of a training, so that the logits differ.
  return jax.tree.map(lambda x: 8 * np.asarray(x), init_params(model, jax.random.key(0)))


@functools.partial(jax.jit, static_argnames='model')
def all_logits(params, tokens, valid, *, model):
  """float32 [B, T, V], from a plain forward over rows of which `valid` ones are keys."""
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  mask = jnp.broadcast_to(valid[:, None, None, :], (*tokens.shape[:1], 1, tokens.shape[1], tokens.shape[1]))
  return Transformer(model).apply({'params': params}, tokens, positions, mask)[0]


jitted_logits = jax.jit(canvas_logits, static_argnames='config')
jitted_loss = jax.jit(masked_diffusion_loss, static_argnames='config')


def random_batch(seed, model, rows=3, prompt_length=5, answer_length=4):
  rng = np.random.default_rng(seed)
  valid = np.arange(prompt_length) >= np.arange(rows)[:, None]
  prompt = np.where(valid, rng.integers(2, 15, (rows, prompt_length)), model.pad_id).astype(np.int32)
  answer = rng.integers(2, 15, (rows, answer_length)).astype(np.int32)
  return Batch(prompt=prompt, prompt_valid=valid, answer=answer)


def test_loss_equals_its_definition_row_by_row(model, params):
  batch, key = random_batch(0, model), jax.random.key(3)
  t, is_masked = draw_mask(key, batch.answer.shape)
  assert is_masked.any(axis=1).sum() >= 2
  total = 0.0
  for row in range(3):
    # Each row alone and without its padding, the prompt as it is.
    prompt = batch.prompt[row][batch.prompt_valid[row]]
    canvas = np.where(is_masked[row], model.mask_id, batch.answer[row])
    tokens = np.concatenate([prompt, canvas])[None].astype(np.int32)
    logits = np.asarray(all_logits(params, tokens, np.ones(tokens.shape, bool), model=model), np.float64)
    logits = logits[0, len(prompt) :]
    losses = np.log(np.exp(logits).sum(axis=-1)) - logits[np.arange(4), batch.answer[row]]
    total += losses[np.asarray(is_masked[row])].sum() / float(t[row]) / 4 / 3
  assert float(jitted_loss(params, batch, key, config=model)) == pytest.approx(total, rel=1e-5)


def test_content_of_padding_does_not_matter(model, params):
  batch = random_batch(1, model)
  other = np.where(batch.prompt_valid, batch.prompt, 9).astype(np.int32)
  assert (other != batch.prompt).any()
  a, b = (
    jitted_logits(params, prompt, batch.prompt_valid, batch.answer, config=model) for prompt in (batch.prompt, other)
  )
  np.testing.assert_array_equal(a, b)


def test_shifted_models_read_the_row_before(model, params):
  batch = random_batch(2, model)
  shifted = dataclasses.replace(model, logit_alignment='shifted')
  logits = jitted_logits(params, batch.prompt, batch.prompt_valid, batch.answer, config=shifted)
  tokens = np.concatenate([batch.prompt, batch.answer], axis=1)
  valid = np.concatenate([batch.prompt_valid, np.ones((3, 4), bool)], axis=1)
  every_row = all_logits(params, tokens, valid, model=model)
  np.testing.assert_allclose(logits, every_row[:, 4:8], atol=1e-5)


def test_masking_ratios_are_uniform_and_stratified():
  draws = jax.jit(jax.vmap(lambda key: draw_mask(key, (8, 500))))(jax.random.split(jax.random.key(0), 200))
  t, is_masked = jax.tree.map(np.asarray, draws)
  assert t.min() >= MIN_RATIO
  assert t.max() <= 1
  # Every batch has one ratio in each eighth of a shifted interval ...
  np.testing.assert_allclose(np.diff(np.sort(t, axis=1), axis=1), (1 - MIN_RATIO) / 8, atol=1e-5)
  # ... each row's own is uniform, and positions are masked with just that probability.
  for row in range(8):
    np.testing.assert_allclose(np.quantile(t[:, row], [0.25, 0.5, 0.75]), [0.25, 0.5, 0.75], atol=0.11)
  np.testing.assert_allclose(is_masked.mean(axis=2), t, atol=0.1)
  # So with the weight 1 / t every answer token counts once.
  np.testing.assert_allclose((is_masked / t[:, :, None]).mean(), 1, atol=0.02)

"""The masked diffusion loss against its definition."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from programs import QUICK
import pytest

import archer_jax
from archer_jax.config import DecodeConfig
from archer_jax.loop.step import staged_step
from archer_jax.model import Transformer
from archer_jax.model import init_params
from archer_jax.training.batches import Batch
from archer_jax.training.loss import canvas_logits
from archer_jax.training.loss import draw_mask
from archer_jax.training.loss import masked_diffusion_loss
from archer_jax.types import Knobs


@pytest.fixture(scope='module')
def params(model):
  # Larger than at the start of a training, so that the logits differ.
  return jax.tree.map(lambda x: 8 * np.asarray(x), init_params(model, jax.random.key(0)))


@functools.partial(jax.jit, static_argnames='model', compiler_options=QUICK)
def all_logits(params, tokens, valid, *, model):
  """float32 [B, T, V], from a plain forward over rows of which `valid` ones are keys."""
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  mask = jnp.broadcast_to(valid[:, None, None, :], (*tokens.shape[:1], 1, tokens.shape[1], tokens.shape[1]))
  return Transformer(model).apply({'params': params}, tokens, positions, mask)[0]


jitted_logits = jax.jit(canvas_logits, static_argnames=('config', 'shadow'), compiler_options=QUICK)
jitted_loss = jax.jit(
  masked_diffusion_loss, static_argnames=('config', 'shadow', 'shadow_weight'), compiler_options=QUICK
)


def random_batch(seed, model, rows=3, prompt_length=5, answer_length=4):
  rng = np.random.default_rng(seed)
  valid = np.arange(prompt_length) >= np.arange(rows)[:, None]
  prompt = np.where(valid, rng.integers(2, 15, (rows, prompt_length)), model.pad_id).astype(np.int32)
  answer = rng.integers(2, 15, (rows, answer_length)).astype(np.int32)
  return Batch(prompt=prompt, prompt_valid=valid, answer=answer)


def test_loss_equals_its_definition_row_by_row(model, params):
  batch, key = random_batch(0, model), jax.random.key(3)
  is_masked = np.asarray(draw_mask(key, batch.answer.shape))
  assert len(set(is_masked.sum(axis=1).tolist())) == 3
  total = 0.0
  for row in range(3):
    # Each row alone and without its padding, the prompt as it is.
    prompt = batch.prompt[row][batch.prompt_valid[row]]
    canvas = np.where(is_masked[row], model.mask_id, batch.answer[row])
    tokens = np.concatenate([prompt, canvas])[None].astype(np.int32)
    logits = np.asarray(all_logits(params, tokens, np.ones(tokens.shape, bool), model=model), np.float64)
    logits = logits[0, len(prompt) :]
    losses = np.log(np.exp(logits).sum(axis=-1)) - logits[np.arange(4), batch.answer[row]]
    total += losses[is_masked[row]].mean() / 3
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


def test_loss_is_on_average_the_exact_one(model, params):
  """The expectation over a uniform number of masks and their places, by going through all masks."""
  batch = random_batch(4, model, rows=2, answer_length=3)
  exact = 0.0
  for count in (1, 2, 3):
    masks = [np.isin(np.arange(3), places) for places in itertools.combinations(range(3), count)]
    for is_masked in masks:
      canvas = np.where(is_masked, model.mask_id, batch.answer).astype(np.int32)
      logits = np.asarray(jitted_logits(params, batch.prompt, batch.prompt_valid, canvas, config=model), np.float64)
      losses = np.log(np.exp(logits).sum(axis=-1)) - np.take_along_axis(logits, batch.answer[..., None], -1)[..., 0]
      exact += losses[:, is_masked].mean() / len(masks) / 3
  sampled = jax.jit(jax.vmap(lambda key: masked_diffusion_loss(params, batch, key, config=model)))
  losses = np.asarray(sampled(jax.random.split(jax.random.key(5), 4096)))
  error = losses.std() / 4096**0.5
  assert 0 < error < 0.01 * exact
  assert abs(losses.mean() - exact) < 4 * error


def test_numbers_of_masks_are_uniform_and_stratified():
  draw = jax.jit(jax.vmap(lambda key: draw_mask(key, (8, 500))))
  is_masked = np.asarray(draw(jax.random.split(jax.random.key(0), 400)))
  counts = is_masked.sum(axis=2)
  assert counts.min() >= 1
  # Every batch has one number in each eighth of a shifted interval, rounded to whole masks ...
  assert abs(np.diff(np.sort(counts, axis=1), axis=1) - 500 / 8).max() < 1.5
  # ... each row's own is uniform ...
  for row in range(8):
    np.testing.assert_allclose(np.quantile(counts[:, row], [0.25, 0.5, 0.75]), [125, 250, 375], atol=45)
  # ... and no position is masked more often than another, nor only together with its neighbour.
  assert abs(is_masked.mean(axis=(0, 1)) - 0.501).max() < 0.05
  half = is_masked[(counts > 200) & (counts < 300)]
  assert abs((half[:, 1:] == half[:, :-1]).mean() - 0.5) < 0.02


def test_few_positions_are_masked_in_every_way_equally_often():
  draw = jax.jit(jax.vmap(lambda key: draw_mask(key, (4, 3))))
  is_masked = np.asarray(draw(jax.random.split(jax.random.key(1), 3000))).reshape(-1, 3)
  shares = np.bincount(is_masked @ [1, 2, 4], minlength=8) / len(is_masked)
  expected = [0, 1 / 9, 1 / 9, 1 / 9, 1 / 9, 1 / 9, 1 / 9, 1 / 3]
  np.testing.assert_allclose(shares, expected, atol=0.02)


@functools.partial(jax.jit, static_argnames='cfg', compiler_options=QUICK)
def decoder_logits(params, prompt, prompt_valid, canvas, *, cfg):
  """float32 [B, 2 G, V] of canvas and shadow, as the decoder computes them in a refresh."""
  batch, length = canvas.shape
  knobs = Knobs.make(batch, gen_length=length)
  state = archer_jax.init_state(prompt, prompt_valid, knobs, jnp.zeros(batch, jnp.uint32), cfg=cfg)
  state = dataclasses.replace(state, canvas=canvas)
  # The first step of a row is a refresh, and looks at all of a block.
  return staged_step(params, state, cfg=cfg)[2].outcome.logits


@pytest.mark.parametrize('shadow', ['self', 'official'])
def test_verification_rows_are_trained_as_the_decoder_sees_them(model, params, shadow):
  batch = random_batch(6, model)
  canvas = np.where(np.arange(4) == np.arange(3)[:, None], model.mask_id, batch.answer).astype(np.int32)
  cfg = DecodeConfig(model=model, decoder='wino', canvas_length=4, block_length=4, shadow=shadow, dtype='float32')
  expected = decoder_logits(params, batch.prompt, batch.prompt_valid, canvas, cfg=cfg)
  logits = jitted_logits(params, batch.prompt, batch.prompt_valid, canvas, config=model, shadow=shadow)
  assert logits.shape == (3, 8, model.vocab_size)
  np.testing.assert_allclose(logits, expected, atol=1e-4)
  # The canvas does not see them.
  alone = jitted_logits(params, batch.prompt, batch.prompt_valid, canvas, config=model)
  np.testing.assert_allclose(logits[:, :4], alone, atol=1e-5)


@pytest.mark.parametrize('shadow', ['self', 'official'])
def test_verification_rows_learn_what_is_not_masked(model, params, shadow):
  batch, key = random_batch(7, model), jax.random.key(3)
  is_masked = np.asarray(draw_mask(key, batch.answer.shape))
  canvas = np.where(is_masked, model.mask_id, batch.answer).astype(np.int32)
  logits = jitted_logits(params, batch.prompt, batch.prompt_valid, canvas, config=model, shadow=shadow)
  log_p = np.asarray(logits, np.float64)[:, 4:]
  log_p -= np.log(np.exp(log_p).sum(axis=-1, keepdims=True))
  losses = -np.take_along_axis(log_p, batch.answer[..., None], axis=-1)[..., 0]
  # A row that is all masked has nothing to verify.
  verified = np.mean([losses[row, ~is_masked[row]].sum() / max(1, (~is_masked[row]).sum()) for row in range(3)])
  without = float(jitted_loss(params, batch, key, config=model))
  for weight in (0.5, 2.0):
    loss = float(jitted_loss(params, batch, key, config=model, shadow=shadow, shadow_weight=weight))
    assert loss == pytest.approx(without + weight * verified, rel=1e-4)

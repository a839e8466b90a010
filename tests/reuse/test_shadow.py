"""WINO's verification rows: what they see, who sees them, and that a copying model is caught by them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import uncached

from archer_jax.config import DecodeConfig
from archer_jax.config import ModelConfig
from archer_jax.reuse.prompt.forward import forward

BLOCK = 8
PROMPT = 12


def small(golden, layers, **changes):
  """The golden model's first layers, and a WINO config for a canvas of two blocks."""
  model = dataclasses.replace(golden.config, n_layers=layers)
  params = {name: part for name, part in golden.params.items() if name not in ('blocks_1', 'blocks_2')[layers - 1 :]}
  return params, DecodeConfig(model=model, decoder='wino', canvas_length=16, block_length=BLOCK, **changes)


def begin(cfg, gen_length=(16, 16)):
  """Two rows with the first block committed but for two columns."""
  state = programs.start(programs.prompts(8, (12, 5)), cfg, length=PROMPT, gen_length=np.array(gen_length))
  return programs.prefill(state, {column: 30 + column for column in (0, 1, 2, 4, 5, 7)})


@functools.partial(jax.jit, static_argnames='cfg', compiler_options=programs.QUICK)
def look(params, state, need, cfg):
  """Logits of the canvas's block and of its shadow, and the state with what is kept then."""
  views = cfg.decoder_method.views(state, cfg)
  logits, kept, _ = forward(params, state, state.kept, need, views, cfg)
  return logits[:, :BLOCK], logits[:, BLOCK:], dataclasses.replace(state, kept=kept)


NONE, ALL = np.zeros(2, bool), np.ones(2, bool)


def moved(logits, other):
  """Bool [B, rows]: rows whose logits differ in any bit."""
  return np.any(np.asarray(logits) != np.asarray(other), axis=-1)


@pytest.mark.parametrize('need', [ALL, NONE], ids=['refresh', 'reuse'])
@pytest.mark.parametrize('shadow', ['official', 'self'])
def test_a_shadow_row_sees_all_of_the_canvas_but_its_twin(llada_tiny, shadow, need):
  """With one layer nothing reaches a row by a detour, so that bits tell what it sees."""
  params, cfg = small(llada_tiny, 1, shadow=shadow)
  _, _, state = look(params, begin(cfg), ALL, cfg)
  canvas, verified, _ = look(params, state, need, cfg)
  for column in (0, 4, 7, 12):
    other = dataclasses.replace(state, canvas=state.canvas.at[:, column].set(99))
    new_canvas, new_verified, _ = look(params, other, need, cfg)
    assert np.all(moved(canvas, new_canvas))
    expected = np.arange(BLOCK) != column
    np.testing.assert_array_equal(moved(verified, new_verified), np.broadcast_to(expected, (2, BLOCK)))


@pytest.mark.parametrize('shadow', ['official', 'self'])
def test_exact_view_of_every_shadow_row(llada_tiny, shadow):
  """Against a mask written out query by query; the second row's block is cut short."""
  params, cfg = small(llada_tiny, 2, shadow=shadow)
  begun = begin(cfg, gen_length=(16, 6))
  _, _, state = look(params, begun, ALL, cfg)
  for need in (ALL, NONE):
    canvas, verified, _ = look(params, state, need, cfg)
    for b, row in enumerate(uncached.rows_of(state)):
      full, _ = uncached.plain_forward(params, cfg.model, *uncached.layout(row, cfg))
      real = len(row.block_columns(cfg))
      np.testing.assert_allclose(canvas[b, :real], full[PROMPT : PROMPT + real], atol=1e-4)
      np.testing.assert_allclose(verified[b, :real], full[PROMPT + 16 : PROMPT + 16 + real], atol=1e-4)


def test_nobody_else_sees_the_shadow(llada_tiny):
  """The mask token's embedding stands in the shadow alone here, and changing it moves nothing else."""
  params, cfg = small(llada_tiny, 2)
  begun = programs.prefill(begin(cfg), {column: 50 + column for column in range(16)})
  changed = dict(params, embedding=params['embedding'].at[cfg.model.mask_id].add(1.0))
  canvas, verified, state = look(params, begun, ALL, cfg)
  new_canvas, new_verified, new_state = look(changed, begun, ALL, cfg)
  np.testing.assert_array_equal(canvas, new_canvas)
  assert np.all(moved(verified, new_verified))
  for part, other in zip(jax.tree.leaves(state.kept.kv[0]), jax.tree.leaves(new_state.kept.kv[0]), strict=True):
    np.testing.assert_array_equal(part, other)
  canvas, verified, _ = look(params, state, NONE, cfg)
  new_canvas, new_verified, _ = look(changed, state, NONE, cfg)
  np.testing.assert_array_equal(canvas, new_canvas)
  assert np.all(moved(verified, new_verified))


def copying_model():
  """A model whose every row reads the token at its own position: attention by distance, values are the tokens.

  Embeddings are a token's own channel and a constant one. Queries and keys are the constant, so that RoPE alone decides
  who attends to whom, and the nearest column takes it all; the mask token has no value. A shadow row that saw its twin
  would share its attention between the two of them. The second layer does nothing.
  """
  vocab, width, head = 16, 32, 16
  model = ModelConfig(
    family='llada', vocab_size=vocab, d_model=width, n_layers=2, n_heads=1, n_kv_heads=1, head_dim=head, d_ff=4,
    rope_theta=10.0, norm_eps=1e-6, qkv_bias=False, max_length=64, mask_id=15, eos_id=14, pad_id=13,
    logit_alignment='same_position',
  )  # fmt: skip
  embedding = np.zeros((vocab, width), np.float32)
  embedding[:, :vocab] = np.eye(vocab)
  embedding[:, vocab] = 1
  constant = np.zeros((width, 1, head), np.float32)
  constant[vocab] = 2.0
  values = np.eye(width, head, dtype=np.float32)[:, None]
  values[model.mask_id] = 0
  out = np.zeros((1, head, width), np.float32)
  out[0, :, :vocab] = 8 * np.eye(vocab)
  idle = {name: {'kernel': np.zeros(shape, np.float32)} for name, shape in
          (('gate_proj', (width, 4)), ('up_proj', (width, 4)), ('down_proj', (4, width)))}  # fmt: skip
  ones = {'scale': np.ones(width, np.float32)}

  def block(output):
    kernels = {'q_proj': constant, 'k_proj': constant, 'v_proj': values, 'o_proj': output}
    attn = {name: {'kernel': kernel} for name, kernel in kernels.items()}
    return {'attn_norm': ones, 'attn': attn, 'mlp_norm': ones, 'mlp': idle}

  params = {
    'embedding': embedding,
    'blocks_0': block(out),
    'blocks_1': block(np.zeros_like(out)),
    'final_norm': ones,
    'head': {'kernel': 2 * np.eye(width, vocab, dtype=np.float32)},
  }
  return jax.tree.map(jnp.asarray, params), model


@pytest.mark.parametrize('flag', [1, 0], ids=['refresh', 'reuse'])
def test_a_model_that_copies_itself_is_verified_without_itself(flag):
  """The canvas row of a committed token is sure of it because it sees it; the shadow row must not be."""
  params, model = copying_model()
  cfg = DecodeConfig(model=model, decoder='wino', canvas_length=8, block_length=8, early_stop=False)
  tokens = {0: 3, 1: 9, 3: 5, 6: 2}
  state = programs.start([np.array([1, 2, 4]), np.array([7])], cfg, length=4, threshold=0.0, threshold_back=0.9)
  state, _ = programs.stepper(cfg, False)(params, state)
  columns = np.arange(8)
  pending = jnp.asarray(np.broadcast_to(~np.isin(columns, list(tokens)), (2, 8)))
  canvas = jnp.where(pending, model.mask_id, jnp.asarray([tokens.get(column, 0) for column in columns]))
  state = programs.with_fields(state, canvas=canvas, pending=pending, last_accept=[4, 4])
  after, logits = programs.stepper(cfg, False)(params, programs.set_knobs(state, refresh_interval=flag))
  assert np.all(after.reuse.refreshed == bool(flag))
  p = np.asarray(jax.nn.softmax(logits, axis=-1))
  for column, token in tokens.items():
    assert np.all(p[:, column, token] > 0.99)
    assert np.all(p[:, 8 + column, token] < 0.2)
  # Three of the four doubtful ones: one less than the step before committed.
  np.testing.assert_array_equal(after.counters.remasked - state.counters.remasked, 3)

"""Positions and numbers of rows that are padded, empty or filler, and indices that stay in range."""

import functools
from unittest import mock

import jax
from jax.experimental import checkify
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import uncached

from archer_jax.decoders import base
from archer_jax.loop import step as step_module
from archer_jax.loop.step import decode_step
from archer_jax.model import Transformer
from archer_jax.model.kv import KV
from archer_jax.model.sequence import Inputs
from archer_jax.reuse import _passes as passes
from archer_jax.reuse.prompt import forward as forward_module

DECODER_NAMES = ('wino', 'llada', 'dream', 'saber', 'saber shifted')
# What compiles for long runs with the slow ones for the second rule of saber.
COMPILED = [*DECODER_NAMES[:-1], pytest.param(DECODER_NAMES[-1], marks=pytest.mark.slow)]


@pytest.fixture
def golden(request, decoder):
  return programs.golden_of(request, decoder)


class Recorder:
  """Stands in for the transformer and remembers what it was fed."""

  def __init__(self, seen, config):
    self.seen, self.config = seen, config

  def apply(self, variables, tokens, positions, attn_mask, head_rows=None, key_start=0, **kwargs):
    del variables, kwargs
    self.seen.append((np.asarray(tokens), np.asarray(positions), np.asarray(attn_mask), np.asarray(head_rows)))
    fresh = KV.zeros((tokens.shape[0],), tokens.shape[1] - key_start, self.config, 'float32')
    return jnp.zeros((tokens.shape[0], head_rows.shape[1], self.config.vocab_size)), fresh, None


def feed(golden, decoder, lengths):
  """What a refresh and a reuse forward feed for prompts of these lengths, padded to 8; canvas 6, block 3."""
  cfg = programs.config(golden, decoder, canvas_length=6, block_length=6 if decoder in programs.SHIFTED else 3)
  state = programs.start(programs.prompts(1, lengths), cfg, length=8)
  views, inputs = cfg.decoder_method.views(state, cfg), Inputs.of(state)
  seen = []
  recorder = functools.partial(Recorder, seen)
  with mock.patch.object(forward_module, 'Transformer', recorder), mock.patch.object(passes, 'Transformer', recorder):
    forward_module.full_pass({}, inputs, views, cfg)
    forward_module.reuse_pass({}, inputs, state.kept.kv[0], views, cfg)
  return cfg, seen


@pytest.mark.parametrize('decoder', DECODER_NAMES)
def test_positions_rows_and_heads_that_are_fed(golden, decoder):
  """Positions count from the first real token whatever the padding; a reuse step feeds no prompt row but Dream's."""
  lengths = (2, 6, 8, 0)
  cfg, (refresh, reuse) = feed(golden, decoder, lengths)
  shadow, lead = uncached.shadow_length(cfg), int(decoder in programs.SHIFTED)
  assert refresh[0].shape[1] == 8 + 6 + shadow
  assert reuse[0].shape[1] == lead + 6 + shadow
  for b, length in enumerate(lengths):
    expected = [*range(length + 6), *range(length, length + shadow)]
    np.testing.assert_array_equal(refresh[1][b, 8 - length :], expected)
    np.testing.assert_array_equal(reuse[1][b, lead:], expected[length:])
    if lead and length:
      assert reuse[1][b, 0] == length - 1
    for part, start in ((refresh, 8), (reuse, lead)):
      # Keys are the real prompt and the canvas, never the pads; in a reuse step the kept prompt stands first.
      canvas_query = part[2][b, 0, start]
      np.testing.assert_array_equal(canvas_query, [False] * (8 - length) + [True] * (length + 6) + [False] * shadow)
      columns = range(6 if decoder == 'saber' else 3)
      if lead:
        columns = [c - 1 for c in range(6)]
      if not length:
        # Without a prompt and anything written, all columns read the first row.
        columns = [0] * len(columns)
      np.testing.assert_array_equal(part[3][b], [start + c for c in [*columns, *range(6, 6 + shadow)]])


@pytest.mark.parametrize('decoder', COMPILED)
def test_everything_stays_finite(golden, decoder):
  """Filler with and without a prompt, an empty prompt, pads: no NaN anywhere, and real rows do not mind."""
  cfg = programs.config(golden, decoder)
  ids = programs.prompts(1, (0, 17, 0, 64))
  with jax.debug_nans(True):
    state = programs.start(ids, cfg, gen_length=np.array([0, 0, 24, 24]))
    for flags in ([1] * 4, [0] * 4, [0, 0, 0, 1]):
      state, logits = programs.stepper(cfg, False)(golden.params, programs.set_knobs(state, refresh_interval=flags))
      assert np.all(np.isfinite(logits))
      for part in jax.tree.leaves(state.kept.kv[0]):
        assert np.all(np.isfinite(part))
  assert np.all(np.isfinite(state.reuse.margin[2:]))
  np.testing.assert_array_equal(state.counters.steps, [0, 0, 3, 3])


@pytest.mark.parametrize('decoder', ['wino', 'llada', 'saber'])
def test_block_of_one_without_a_prompt_stays_finite(golden, decoder):
  """Leave-one-out of the only token leaves a shadow row nothing but itself."""
  cfg = programs.config(golden, decoder, canvas_length=8, block_length=1)
  state = programs.start(programs.prompts(4, (0, 16, 0, 12)), cfg, length=16, gen_length=np.array([1, 1, 0, 8]))
  with jax.debug_nans(True):
    steps = programs.run_steps(golden.params, state, cfg)
  assert all(np.all(np.isfinite(logits)) for _, logits in steps)
  np.testing.assert_array_equal(steps[-1][0].counters.steps, [1, 1, 0, 8])


def _checked_to_canvas(values, index, where, canvas):
  """`base.to_canvas` with its dropped writes sent to a spare column, so that every index is in range."""
  length = canvas.shape[1]
  checkify.check(jnp.all(~where | (index < length)), 'a column past the canvas is written')
  rows = jnp.arange(canvas.shape[0])[:, None]
  spare = jnp.concatenate([canvas, canvas[:, :1]], axis=1)
  return spare.at[rows, jnp.where(where, index, length)].set(values)[:, :length]


def _checked_embed(self, tokens):
  """`Transformer.embed` with a row of zeros for padding, which stands past the vocabulary."""
  return jnp.take(jnp.concatenate([self.embedding, jnp.zeros_like(self.embedding[:1])]), tokens, axis=0)


def _checked_recorded(trace, row_step, record):
  rows = jnp.arange(row_step.shape[0])

  def write(old, value):
    spare = jnp.concatenate([old, old[:, :1]], axis=1)
    return spare.at[rows, jnp.where(record.live, row_step, old.shape[1])].set(value)[:, : old.shape[1]]

  return {name: write(trace[name], value) for name, value in step_module._fields(record).items()}


@pytest.mark.parametrize('decoder', COMPILED)
def test_every_index_is_in_range(golden, decoder):
  """Slices, gathers and scatters of every step, through finished rows and a short last block.

  What is out of range on purpose, two writes that drop it and the embedding of padding, is replaced by what has a place
  for it.
  """
  golden = programs.shallow(golden)
  block = 10 if decoder in programs.SHIFTED else 4
  cfg = programs.config(golden, decoder, canvas_length=10, block_length=block, trace_steps=12)
  clauses = {'refresh_interval': np.array([2, 1, 0]), 'gen_length': np.array([10, 0, 7])}
  state = programs.start(programs.prompts(9, (8, 3, 5)), cfg, length=8, **clauses)
  expected = programs.loop(cfg)(golden.params, state)
  with (
    mock.patch.object(base, 'to_canvas', _checked_to_canvas),
    mock.patch.object(step_module, '_recorded', _checked_recorded),
    mock.patch.object(Transformer, 'embed', _checked_embed),
  ):
    checked = checkify.checkify(
      functools.partial(decode_step, cfg=cfg), errors=checkify.index_checks | checkify.user_checks
    )
    step = jax.jit(checked, compiler_options=programs.QUICK)
    while not np.all(state.done):
      error, (state, _) = step(golden.params, state)
      error.throw()
  np.testing.assert_array_equal(state.canvas, expected.canvas)
  np.testing.assert_array_equal(state.trace['canvas'], expected.trace['canvas'])


@pytest.mark.slow
@pytest.mark.parametrize('decoder', DECODER_NAMES)
def test_jitted_equals_op_by_op(golden, decoder):
  """An index out of range would give other values in a compiled program than outside of one."""
  golden = programs.shallow(golden, 1)
  params = golden.params
  block = 5 if decoder in programs.SHIFTED else 3
  cfg = programs.config(golden, decoder, canvas_length=5, block_length=block, trace_steps=0)
  state = programs.start(programs.prompts(9, (4, 1)), cfg, length=4, refresh_interval=np.array([1, 2]), temperature=0.5)
  jitted = state
  with jax.disable_jit():
    for _ in range(4):
      state, _ = decode_step(params, state, cfg=cfg)
  step = jax.jit(functools.partial(decode_step, cfg=cfg), compiler_options=programs.QUICK)
  for _ in range(4):
    jitted, _ = step(params, jitted)
  np.testing.assert_array_equal(state.canvas, jitted.canvas)
  np.testing.assert_array_equal(state.counters.refreshes, jitted.counters.refreshes)
  np.testing.assert_allclose(state.reuse.margin, jitted.reuse.margin, atol=1e-4)
  for part, other in zip(jax.tree.leaves(state.kept.kv[0]), jax.tree.leaves(jitted.kept.kv[0]), strict=True):
    np.testing.assert_allclose(part, other, atol=1e-4)

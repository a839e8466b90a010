"""Counted passes and operations, against hand-made steps, traces and XLA's own cost analysis."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from programs import QUICK
import pytest
from text_model import CONFIG

from archer_jax import cache
from archer_jax.config import SHIFTED
from archer_jax.config import DecodeConfig
from archer_jax.decode import init_state
from archer_jax.decoders import DECODERS
from archer_jax.evaluate import work
from archer_jax.evaluate.work import Passes
from archer_jax.model import abstract_params
from archer_jax.types import Knobs

# Wide enough that the matrix products are nearly all there is.
WIDE = dataclasses.replace(
  CONFIG, vocab_size=512, d_model=256, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=64, d_ff=512, max_length=512
)
BATCH, PROMPT, CANVAS, BLOCK = 2, 160, 48, 16


def passes_of(steps):
  """The passes of steps that are written as a letter a row: R refreshes, - reuses, . is done."""
  passes = Passes(refresh=jnp.int32(0), reuse=jnp.int32(0), row=jnp.int32(0), redo=jnp.int32(0))
  for step in steps:
    rows = np.array(list(step))
    passes = work.add_step(passes, jnp.asarray(rows == 'R'), jnp.asarray(rows == '.'), jnp.asarray(rows == 'r'))
  return dataclasses.asdict(jax.tree.map(int, passes))


@pytest.mark.parametrize(
  ('steps', 'refresh', 'reuse', 'row'),
  [
    (['RRR', '---', '---'], 1, 2, 0),
    (['RRR', 'RRR'], 2, 0, 0),
    # A mixed step reuses for all, after a pass for each row that refreshes.
    (['RRR', 'R--', '-RR'], 1, 2, 3),
    # Rows that are done stand in nobody's way, and are computed with the others.
    (['RRR', 'R-.', 'R..', '-..'], 2, 2, 1),
    (['RRR', '..R'], 2, 0, 0),
    (['R.', '-.', '-.'], 1, 2, 0),
    # A filler row is done from the start.
    (['RR.', '-R.', 'R-.'], 1, 2, 2),
    # A row that refreshes after its reuse had a part in the reuse of all.
    (['RRR', 'r-r', 'Rr-'], 1, 2, 1),
  ],
)
def test_steps_by_hand(steps, refresh, reuse, row):
  assert passes_of(steps) == {
    'refresh': refresh,
    'reuse': reuse,
    'row': row,
    'redo': sum(step.count('r') for step in steps),
  }


def test_the_loop_counts_what_its_trace_shows(text):
  model, params, tokenizer = text
  cfg = DecodeConfig(
    model=model.config, decoder='wino', canvas_length=32, block_length=32, end_ids=tokenizer.end_ids, trace_steps=32
  )
  rng = np.random.default_rng(0)
  tokens = rng.integers(3, 90, (4, 16)).astype(np.int32)
  # Every rule at once: rows refresh at different steps and end at different ones, and the last is filler.
  knobs = Knobs.make(
    4,
    gen_length=np.array([32, 20, 32, 0]),
    threshold=np.float32(0.3),
    refresh_interval=np.array([1, 0, 3, 0]),
    drift_radius=np.array([0, 0.2, 0, 0], np.float32),
  )
  state = init_state(tokens, np.ones_like(tokens, bool), knobs, np.arange(4, dtype=np.uint32), cfg=cfg)
  loop = jax.jit(functools.partial(work.counted_decode.__wrapped__, cfg=cfg), compiler_options=QUICK)
  state, passes = loop(params, state)
  steps = np.asarray(state.counters.steps)
  assert len(set(steps[:3])) > 1
  rows = [
    ''.join('.' if step >= steps[b] else 'R' if state.trace.refresh[b, step] else '-' for b in range(4))
    for step in range(steps.max())
  ]
  assert any('R' in row and '-' in row for row in rows) and rows[0] == 'RRR.'
  assert dataclasses.asdict(jax.tree.map(int, passes)) == passes_of(rows)


@pytest.mark.parametrize(
  ('decoder', 'changes'),
  [
    ('wino', {}),
    ('wino', {'mask_prediction': 'official'}),
    ('llada', {'guidance': True}),
    ('dream', {'block_length': CANVAS, 'model': dataclasses.replace(WIDE, logit_alignment=SHIFTED)}),
  ],
)
def test_operations_are_those_that_xla_counts(decoder, changes):
  cfg = DecodeConfig(**({'model': WIDE, 'decoder': decoder, 'canvas_length': CANVAS, 'block_length': BLOCK} | changes))
  params = abstract_params(cfg.model)
  tokens = jax.ShapeDtypeStruct((BATCH, PROMPT), jnp.int32)

  def state(prompt):
    knobs = Knobs.make(BATCH, gen_length=CANVAS)
    return init_state(prompt, prompt >= 0, knobs, jnp.zeros((BATCH,), jnp.uint32), cfg=cfg)

  def refresh(params, prompt):
    s = state(prompt)
    index = DECODERS[decoder].decision_index(s, cfg)
    return cache.refresh_forward(params, s, prompt, s.cache, jnp.ones((BATCH,), bool), index, cfg)[0]

  def reuse(params, prompt):
    s = state(prompt)
    return cache.reuse_forward(params, s, prompt, s.cache, DECODERS[decoder].decision_index(s, cfg), cfg)

  def row(params, prompt):
    s = state(prompt)
    kept = cache._refresh_row(params, s, prompt, s.cache, jnp.int32(0), cfg)
    return kept.k, kept.v

  counted = work.pass_operations(cfg, BATCH, PROMPT)
  streams = 2 if cfg.guidance else 1
  for name, function in (('refresh', refresh), ('reuse', reuse), ('row', row)):
    xla = streams * jax.jit(function).lower(params, tokens).cost_analysis()['flops']
    # XLA counts norms, softmax and rotations as well.
    assert 0.95 * xla < getattr(counted, name) < xla, name


def test_operations_by_hand():
  cfg = DecodeConfig(model=WIDE, decoder='wino', canvas_length=CANVAS, block_length=BLOCK)
  counted = work.pass_operations(cfg, BATCH, PROMPT)
  keys_values = 2 * WIDE.d_model * 2 * 2 * 64
  rest = 2 * (2 * WIDE.d_model * 4 * 64) + 3 * (2 * WIDE.d_model * WIDE.d_ff)
  attention = lambda keys: 2 * (2 * 4 * 64 * keys)
  head = 2 * WIDE.d_model * WIDE.vocab_size
  everything, fresh, decided = PROMPT + CANVAS + BLOCK, CANVAS + BLOCK, 2 * BLOCK

  def operations(rows, keys):
    # The last layer attends from the decision rows alone, here the block and its shadow.
    inner = rows * (rest + attention(keys))
    return 3 * rows * keys_values + 2 * inner, decided * (rest + attention(keys) + head)

  assert counted.refresh == BATCH * sum(operations(everything, everything))
  assert counted.reuse == BATCH * sum(operations(fresh, everything))
  # One row, without shadow and without the last layer's own part.
  assert counted.row == operations(PROMPT + CANVAS, PROMPT + CANVAS)[0]


def test_a_batch_of_one_has_no_row_passes():
  cfg = DecodeConfig(model=WIDE, decoder='llada', canvas_length=CANVAS, block_length=BLOCK)
  one, two = (work.pass_operations(cfg, batch, PROMPT) for batch in (1, 2))
  assert (one.row, 2 * one.refresh, 2 * one.reuse) == (0, two.refresh, two.reuse)
  cost = work.total(Passes(refresh=np.int32(2), reuse=np.int32(3), row=np.int32(5), redo=np.int32(0)), two)
  assert cost == 2 * two.refresh + 3 * two.reuse + 5 * two.row

"""Counted passes and operations, against hand-made steps, traces and XLA's own cost analysis."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from programs import QUICK
import pytest
from text_model import CONFIG

from archer_jax.config import SHIFTED
from archer_jax.config import DecodeConfig
from archer_jax.evaluate import work
from archer_jax.loop.step import init_state
from archer_jax.model import abstract_params
from archer_jax.model.sequence import Inputs
from archer_jax.reuse import _passes as passes
from archer_jax.reuse.prompt import forward as forwards
from archer_jax.reuse.prompt.reasons import Reason
from archer_jax.types import Knobs

# Wide enough that the matrix products are nearly all there is.
WIDE = dataclasses.replace(
  CONFIG, vocab_size=512, d_model=256, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=64, d_ff=512, max_length=512
)
BATCH, PROMPT, CANVAS, BLOCK = 2, 160, 48, 16
# A step is written as a letter a row: R refreshes, - reuses, r refreshes after it reused, . is done.
PLAIN = DecodeConfig(model=CONFIG, decoder='llada', canvas_length=4, block_length=4)


@functools.partial(jax.jit, compiler_options=QUICK)
def passes_of_step(params, state, need, redo):
  """The passes that the forwards of a step count."""
  views = PLAIN.decoder_method.views(state, PLAIN)
  logits, kept, done = forwards.forward(params, state, state.kept, need, views, PLAIN)
  return forwards.redo_rows(params, state, logits, kept, redo, views, done, PLAIN)[2].passes


def passes_of(params, steps):
  """Those of several steps."""
  batch = len(steps[0])
  prompt = np.full((batch, 4), 5, np.int32)
  state = init_state(prompt, prompt > 0, Knobs.make(batch, gen_length=4), np.zeros(batch, np.uint32), cfg=PLAIN)
  total = collections.Counter()
  for step in steps:
    rows = np.array(list(step))
    passes = passes_of_step(params, dataclasses.replace(state, done=jnp.asarray(rows == '.')), rows == 'R', rows == 'r')
    total.update(jax.tree.map(int, passes))
  return total


def counted(steps):
  """The same by the rule, written out."""
  total = collections.Counter()
  for step in steps:
    n, live = step.count('R'), len(step) - step.count('.')
    together = 0 < n == live
    total.update(refresh=together, reuse=not together, row=0 if together else n, redo=step.count('r'))
  return total


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
    # A filler row is done from the start.
    (['R..', '-..', '-..'], 1, 2, 0),
    (['RR.', '-R.', 'R-.'], 1, 2, 2),
    # A row that refreshes after its reuse had a part in the reuse of all.
    (['RRR', 'r-r', 'Rr-'], 1, 2, 1),
    # A row alone is never fed by itself.
    (['R', '-', 'R', 'r'], 2, 2, 0),
  ],
)
def test_steps_by_hand(text, steps, refresh, reuse, row):
  redo = sum(step.count('r') for step in steps)
  by_hand = {'refresh': refresh, 'reuse': reuse, 'row': row, 'redo': redo}
  assert passes_of(text[1], steps) == counted(steps) == by_hand


def test_the_loop_counts_what_its_trace_shows(text):
  model, params, tokenizer = text
  cfg = DecodeConfig(
    model=model.config,
    decoder='wino',
    canvas_length=32,
    block_length=32,
    end_ids=tokenizer.end_ids,
    trace_steps=32,
    on_low_margin='same_step',
  )
  rng = np.random.default_rng(0)
  tokens = rng.integers(3, 90, (4, 16)).astype(np.int32)
  # Every rule at once: rows refresh at different steps and end at different ones, and the last is filler.
  knobs = Knobs.make(
    4,
    gen_length=np.array([32, 20, 32, 0]),
    threshold=np.float32(0.3),
    refresh_interval=np.array([1, 0, 3, 0]),
    refresh_distance=np.array([0, 5, 0, 0]),
    min_margin=np.array([0, 0, 0.1, 0], np.float32),
  )
  state = init_state(tokens, np.ones_like(tokens, bool), knobs, np.arange(4, dtype=np.uint32), cfg=cfg)
  loop = jax.jit(functools.partial(work.counted_decode.__wrapped__, cfg=cfg), compiler_options=QUICK)
  state, passes = jax.device_get(loop(params, state))
  steps = state.counters.steps
  assert len(set(steps[:3])) > 1

  def letter(row, step):
    if step >= steps[row]:
      return '.'
    reason = state.trace['reason'][row, step]
    assert (reason > 0) == state.trace['refresh'][row, step]
    return 'r' if reason & Reason.SAME_STEP else 'R' if reason else '-'

  rows = [''.join(letter(row, step) for row in range(4)) for step in range(steps.max())]
  assert any('R' in row and '-' in row for row in rows) and rows[0] == 'RRR.'
  assert any('r' in row for row in rows)
  assert jax.tree.map(int, passes) == counted(rows)


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

  def start(prompt):
    knobs = Knobs.make(BATCH, gen_length=CANVAS)
    state = init_state(prompt, prompt >= 0, knobs, jnp.zeros((BATCH,), jnp.uint32), cfg=cfg)
    return state, cfg.decoder_method.views(state, cfg)

  first = lambda tree: jax.tree.map(lambda x: x[:1], tree)

  def refresh(params, prompt):
    state, views = start(prompt)
    return forwards.full_pass(params, Inputs.of(state), views, cfg)[0]

  def reuse(params, prompt):
    state, views = start(prompt)
    return forwards.reuse_pass(params, Inputs.of(state), state.kept.kv[0], views, cfg)[0]

  def row(params, prompt):
    return passes.key_pass(params, first(Inputs.of(start(prompt)[0])), cfg)

  def redo(params, prompt):
    state, views = start(prompt)
    return forwards.full_pass(params, first(Inputs.of(state)), first(views), cfg)[0]

  operations = work.pass_operations(cfg, BATCH, PROMPT)
  functions = {'refresh': refresh, 'reuse': reuse, 'row': row, 'redo': redo}
  assert set(operations) == set(functions)
  streams = 2 if cfg.guidance else 1
  for name, function in functions.items():
    xla = streams * jax.jit(function).lower(params, tokens).cost_analysis()['flops']
    # XLA counts norms, softmax and rotations as well.
    assert 0.95 * xla < operations[name] < xla, name


def test_operations_by_hand():
  cfg = DecodeConfig(model=WIDE, decoder='wino', canvas_length=CANVAS, block_length=BLOCK)
  found = work.pass_operations(cfg, BATCH, PROMPT)
  keys_values = 2 * WIDE.d_model * 2 * 2 * 64
  rest = 2 * (2 * WIDE.d_model * 4 * 64) + 3 * (2 * WIDE.d_model * WIDE.d_ff)
  attention = lambda keys: 2 * (2 * 4 * 64 * keys)
  head = 2 * WIDE.d_model * WIDE.vocab_size
  everything, fresh, decided = PROMPT + CANVAS + BLOCK, CANVAS + BLOCK, 2 * BLOCK

  def operations(rows, keys):
    # The last layer attends from the decision rows alone, here the block and its shadow.
    inner = rows * (rest + attention(keys))
    return 3 * rows * keys_values + 2 * inner, decided * (rest + attention(keys) + head)

  assert found['refresh'] == BATCH * sum(operations(everything, everything))
  assert found['reuse'] == BATCH * sum(operations(fresh, everything))
  assert found['redo'] == sum(operations(everything, everything))
  # One row, without shadow and without the last layer's own part.
  assert found['row'] == operations(PROMPT + CANVAS, PROMPT + CANVAS)[0]


def test_operations_of_a_batch():
  cfg = DecodeConfig(model=WIDE, decoder='llada', canvas_length=CANVAS, block_length=BLOCK)
  one, two = (work.pass_operations(cfg, batch, PROMPT) for batch in (1, 2))
  # Of all rows, and of one.
  assert (two['refresh'], two['reuse']) == (2 * one['refresh'], 2 * one['reuse'])
  assert (two['row'], two['redo']) == (one['row'], one['redo']) and one['redo'] == one['refresh']
  passes = {'refresh': np.int32(2), 'reuse': np.int32(3), 'row': np.int32(5), 'redo': np.int32(1)}
  cost = work.total(passes, two)
  assert cost == 2 * two['refresh'] + 3 * two['reuse'] + 5 * two['row'] + two['redo']

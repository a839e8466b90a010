"""The decoder margin: what it says is safe is safe, and just past it the binding comparison turns."""

import dataclasses
import functools

from golden_data import read_cases
import numpy as np
from programs import with_fields
import pytest
import reference
from stages import BATCH
from stages import STATES
from stages import dream_stage
from stages import equals
from stages import inside
from stages import knob_rows
from stages import llada_stage
from stages import parallel_stage
from stages import random_logits
from stages import rules_of
from stages import run
from stages import saber_stage
from stages import saturated_logits
from stages import wino_stage
from stub import decide
from stub import make_config
from stub import make_state
from stub import repeat

# Rounds of a batch that make ten thousand changes.
ROUNDS = 4
FILTERS = {'temperature': [0.0, 0.7, 1.5], 'top_p': [1.0, 0.6, 0.9, 0.0], 'top_k': [0, 2, 4]}
WINO = {'accept', 'back', 'cap', 'fallback', 'argmax', 'gumbel', 'remask cap'}
DREAM = {'argmax', 'gumbel', 'top_p', 'nucleus', 'top_k'}
SABER = {'mean', 'fallback', 'argmax', 'gumbel', 'fall', 'loose fall'}
SABER_SHIFTED = {'mean', 'fallback', 'argmax', 'gumbel', 'doubt'}
# How to make each stage, and the comparisons that must be met among those that bind.
STAGES = {
  'wino': (lambda: wino_stage('never'), WINO),
  'wino official': (lambda: wino_stage('official'), WINO),
  'llada': (lambda: llada_stage('never', 'low_confidence'), {'rank', 'argmax', 'gumbel'}),
  'llada official': (lambda: llada_stage('official', 'low_confidence'), {'rank', 'argmax', 'gumbel'}),
  'llada random': (lambda: llada_stage('never', 'random'), {'argmax', 'gumbel'}),
  'parallel': (lambda: parallel_stage('never', by_factor=False), {'threshold', 'rank', 'argmax', 'gumbel'}),
  'parallel factor': (
    lambda: parallel_stage('never', by_factor=True),
    {'loose factor', 'rank', 'argmax', 'gumbel'},
  ),
  'dream origin': (lambda: dream_stage('never', 'origin', **FILTERS), DREAM),
  'dream maskgit': (
    lambda: dream_stage('never', 'maskgit_plus', alg_temp=[0, 0, 0.3], **FILTERS),
    DREAM | {'rank', 'loose rank'},
  ),
  'dream official': (lambda: dream_stage('official', 'maskgit_plus', **FILTERS), DREAM | {'rank'}),
  'dream topk_margin': (
    lambda: dream_stage('never', 'topk_margin', alg_temp=[0, 0, 0.3], **FILTERS),
    DREAM | {'loose rank'},
  ),
  'dream entropy': (
    lambda: dream_stage('never', 'entropy', alg_temp=[0, 0, 0.3], **FILTERS),
    DREAM | {'loose rank'},
  ),
  'saber': (lambda: saber_stage('same_position', 'never', random_logits), SABER),
  'saber official': (lambda: saber_stage('same_position', 'official', random_logits), SABER),
  'saber saturated': (lambda: saber_stage('same_position', 'never', saturated_logits), SABER - {'loose fall'}),
  'saber shifted': (lambda: saber_stage('shifted', 'never', random_logits), SABER_SHIFTED),
  'saber shifted official': (lambda: saber_stage('shifted', 'official', random_logits), SABER_SHIFTED),
  'saber shifted saturated': (
    lambda: saber_stage('shifted', 'never', saturated_logits),
    SABER_SHIFTED - {'argmax'},
  ),
}
SLOW = [name for name in STAGES if 'official' in name] + ['saber shifted saturated']
NAMES = [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in STAGES]


@pytest.fixture(scope='module')
def stage():
  return functools.cache(lambda name: STAGES[name][0]())


@pytest.mark.parametrize('name', STAGES)
def test_decision_and_margin_equal_the_float64_reference(stage, name):
  it = stage(name)
  got = run(it, np.arange(STATES))
  margins = np.array([step.margin for step in it.steps])
  clear = margins > it.near
  assert equals(got, it.steps)[clear].all() and clear.mean() > 0.99
  np.testing.assert_allclose(got['margin'][clear], margins[clear], rtol=1e-4, atol=it.atol)


@pytest.mark.parametrize('name', NAMES)
def test_the_worst_direction_turns_the_binding_comparison_and_not_before(stage, name):
  it = stage(name)
  assert STAGES[name][1] <= set(it.binding), {kind: len(rows) for kind, rows in it.binding.items()}
  rows = np.concatenate(list(it.binding.values()))
  kinds = np.repeat(list(it.binding), [len(rows) for rows in it.binding.values()])
  before = [it.steps[row] for row in rows]
  worst = np.stack([step.binding.change(step.margin, it.logits.shape[1:]) for step in before])
  logits = np.concatenate([it.logits[rows] + factor * worst for factor in (0.999, 1.001)]).astype(np.float32)
  got = run(it, np.tile(rows, 2), logits)
  after = [it.refer(row, z) for row, z in zip(np.tile(rows, 2), logits, strict=True)]
  # The decoder follows the reference on both sides of the margin.
  assert equals(got, after).all()
  turned = np.array([a.path != b.path for a, b in zip(after, before * 2, strict=True)])
  changed = ~equals(got, before * 2)
  under, over = np.arange(len(turned)) < len(rows), np.arange(len(turned)) >= len(rows)
  assert not turned[under].any() and not changed[under].any()
  for kind in it.binding:
    # Loose bounds are not attained by every distribution; test_margin_bounds.py constructs those that attain them.
    if not kind.startswith('loose'):
      mine = over & (np.tile(kinds, 2) == kind)
      assert turned[mine].all(), kind
      # A comparison may turn without an effect on this step's tokens, most often a filter's, but not always.
      assert changed[mine].any() or kind in ('top_p', 'nucleus', 'top_k'), kind


@pytest.mark.parametrize('name', NAMES)
def test_ten_thousand_changes_inside_the_margin_change_nothing(stage, name):
  it = stage(name)
  rng = np.random.default_rng(4)
  for kind, rows in it.binding.items():
    for round_ in range(ROUNDS):
      some = np.resize(np.roll(rows, -round_ * BATCH), BATCH)
      size = 0.999 * np.array([it.steps[row].margin for row in some])[:, None, None]
      change = inside(rng, size, (BATCH, *it.logits.shape[1:]))
      got = run(it, some, (it.logits[some] + change).astype(np.float32))
      assert equals(got, [it.steps[row] for row in some]).all(), kind
  # Where no comparison binds, no change at all matters.
  if free := [row for row in range(STATES) if it.steps[row].margin == np.inf]:
    some = np.resize(free, BATCH)
    got = run(it, some, it.logits[some] + inside(rng, 9, (BATCH, *it.logits.shape[1:])).astype(np.float32))
    assert equals(got, [it.steps[row] for row in some]).all()


@pytest.mark.parametrize('scale', [0.5, 2.0])
def test_guided_logits_bear_a_margin_per_two_scale_plus_one(stage, scale):
  it = stage('llada')
  rng = np.random.default_rng(5)
  rows = np.concatenate([it.binding['rank'][:300], it.binding['argmax'][:100]])
  combine = lambda cond, uncond: (uncond + (scale + 1) * (cond - uncond)).astype(np.float32)
  uncond = it.logits[rows] + rng.normal(size=it.logits[rows].shape)
  cond = (it.logits[rows] + scale * uncond) / (scale + 1)
  size = np.array([it.steps[row].margin for row in rows])[:, None, None] / (2 * scale + 1)
  worst = size * np.stack([it.steps[row].binding.change(1, it.logits[row].shape) for row in rows])
  before = [it.steps[row].path for row in rows]
  for factor, turns in ((0.999, False), (1.001, True)):
    logits = combine(cond + factor * worst, uncond - factor * worst)
    after = [it.refer(row, z) for row, z in zip(rows, logits, strict=True)]
    assert equals(run(it, rows, logits), after).all()
    assert all((step.path != old) == turns for step, old in zip(after, before, strict=True))
  again = np.resize(np.arange(len(rows)), BATCH)
  size = 0.999 * size[again]
  for _ in range(ROUNDS):
    changes = [inside(rng, size, (BATCH, *it.logits.shape[1:])) for _ in range(2)]
    got = run(it, rows[again], combine(cond[again] + changes[0], uncond[again] + changes[1]))
    assert equals(got, [it.steps[row] for row in rows[again]]).all()


def real_step(case, step):
  """State and logits of one step of a golden decoding with the prompt cache, from its stored logits."""
  args, arrays = case.args, case.arrays
  length, block_length = args['gen_length'], args['block_length']
  cfg = make_config('wino', length, block_length, vocab_size=arrays['logits'].shape[2], mask_id=args['mask_id'])
  at = int(arrays['logits_steps'][step])
  start = arrays['prompt'].shape[1]
  canvas = arrays['tokens_after_step'][at - 1, start:] if at else np.full(length, args['mask_id'])
  block = int(arrays['block_per_step'][at])
  columns = np.arange(length)
  state = make_state(cfg, threshold=args['threshold'], threshold_back=args['threshold_back'])
  state = with_fields(
    state,
    canvas=canvas[None],
    pending=((canvas == args['mask_id']) & (columns < (block + 1) * block_length))[None],
    block=[block],
    last_accept=arrays['last_accept_per_step'][at][None],
  )
  rows = np.r_[block * block_length : (block + 1) * block_length, length : length + block_length]
  assert arrays['logits_rows'][step].tolist() == list(range(start, start + length + block_length))
  after = arrays['tokens_after_step'][at, start:]
  return cfg, state, arrays['logits'][step][rows], after


@pytest.mark.parametrize('step', [0, 1])
def test_margin_of_a_real_step_of_wino(step):
  case = read_cases('llada_tiny')['asym_12_p30_g48_k16_every4_blockfirst']
  cfg, state, logits, after = real_step(case, step)
  block = int(state.block[0])
  refer = lambda z: reference.wino(
    rules_of(cfg),
    np.asarray(z, np.float64),
    np.arange(block * 16, block * 16 + 16),
    np.zeros((16, 320)),
    canvas=np.asarray(state.canvas[0]),
    pending=np.asarray(state.decoder.pending[0]),
    block=block,
    last_accept=int(state.decoder.last_accept[0]),
    gen_length=48,
    knobs=knob_rows(state)[0],
  )
  it = refer(logits)
  np.testing.assert_array_equal(it.canvas, after)
  check_around(cfg, state, logits, it, refer)


def check_around(cfg, state, logits, it, refer):
  """The worst direction of the binding comparison, and random changes inside the margin, of one row."""
  rng = np.random.default_rng(7)
  batch, rounds = 256, 8
  state = repeat(state, batch)
  worst = it.binding.change(it.margin, logits.shape)
  for round_ in range(rounds):
    change = inside(rng, 0.999 * it.margin, (batch, *logits.shape))
    if round_ == 0:
      change[:3] = np.array([0, 0.999, 1.001])[:, None, None] * worst
    z = (logits + change).astype(np.float32)
    update = decide(state, z, cfg=cfg)
    steps = [it] * batch
    if round_ == 0:
      np.testing.assert_allclose(update['margin'][0], it.margin, rtol=1e-3, atol=5e-6)
      steps[2] = refer(z[2])
      assert steps[2].path != it.path
    assert equals(update, steps).all()


@pytest.mark.parametrize('decoder', ['llada', 'dream'])
def test_margin_on_real_logits(decoder):
  name = f'{decoder}_tiny'
  case = next(case for case in read_cases(name).values() if case.id.startswith('logits_masked_tokens'))
  logits = case.arrays['logits'][0]
  length, vocab = logits.shape
  cfg = make_config(decoder, length, vocab_size=vocab, mask_id={'llada': 316, 'dream': 280}[decoder])
  state = make_state(cfg, steps=5)
  state = with_fields(state, row_step=[2], block_step=[2])
  shared = {'canvas': np.asarray(state.canvas[0]), 'gen_length': length, 'knobs': knob_rows(state)[0]}
  if decoder == 'llada':
    refer = lambda z: reference.llada(
      rules_of(cfg),
      np.asarray(z, np.float64),
      np.arange(length),
      np.zeros_like(logits),
      block=0,
      block_step=2,
      **shared,
    )
  else:
    refer = lambda z: reference.dream(
      rules_of(cfg),
      np.asarray(z, np.float64),
      np.arange(length),
      np.zeros_like(logits),
      row_step=2,
      alg='maskgit_plus',
      **shared,
    )
    cfg = dataclasses.replace(cfg, alg='maskgit_plus')
  it = refer(logits)
  assert 0 < it.accepted.sum() < length
  check_around(cfg, state, logits, it, refer)

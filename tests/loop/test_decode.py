"""The loop against the uncached reference, against its own step, and at its edges."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import uncached

from archer_jax.loop.decode import decode
from archer_jax.loop.step import decode_step
from archer_jax.types import Status

# A short prompt, one in between, none at all, and one that fills its columns.
LENGTHS = (3, 17, 0, 64)


@pytest.fixture
def golden(request, decoder):
  return programs.golden_of(request, decoder)


def assert_same_bits(tree, other):
  """Every leaf of two states equals the other's, NaN and all."""
  for (path, leaf), expected in zip(jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(other), strict=True):
    leaf, expected = np.asarray(leaf), np.asarray(expected)
    assert leaf.dtype == expected.dtype, path
    np.testing.assert_array_equal(leaf, expected, err_msg=jax.tree_util.keystr(path))


def check_against_reference(params, state, cfg, full=False):
  """Canvas and logits of every step against the uncached decoder, to the bit."""
  expected = uncached.decode_uncached(params, state, cfg, programs.FULL if full else programs.QUICK)
  steps = programs.run_steps(params, state, cfg, full)
  assert len(steps) == len(expected)
  for step, ((state, logits), (canvas, full, took)) in enumerate(zip(steps, expected, strict=True)):
    np.testing.assert_array_equal(np.asarray(logits)[took], full[took], err_msg=f'logits of step {step}')
    np.testing.assert_array_equal(state.canvas, canvas, err_msg=f'canvas after step {step}')
  np.testing.assert_array_equal(state.counters.steps, np.sum([took for *_, took in expected], axis=0))
  return state


# The programs as users compile them; one in every run, the others take too long for that.
AS_USERS = [
  pytest.param('wino', True),
  *(pytest.param(decoder, True, marks=pytest.mark.slow) for decoder in programs.KINDS[1:]),
]
# One block is the same program as several for all but a constant.
DECODERS = [pytest.param(k, marks=[pytest.mark.slow] if k == 'saber whole' else []) for k in programs.KINDS]
QUICK = [pytest.param(*kind.values, False, marks=kind.marks) for kind in DECODERS]


@pytest.mark.parametrize(('decoder', 'full'), [*AS_USERS, *QUICK[1:]])
def test_always_equals_uncached(golden, decoder, full):
  cfg = programs.config(golden, decoder)
  ids = programs.prompts(1, LENGTHS)
  # Mask tokens in a prompt are nobody's to fill.
  ids[1] = np.full(17, cfg.model.mask_id, np.int32)
  state = programs.start(ids, cfg, refresh_interval=1, eos_penalty=1.0)
  state = check_against_reference(golden.params, programs.prefill(state, {5: 40, 11: 200}), cfg, full)
  np.testing.assert_array_equal(state.counters.refreshes, state.counters.steps)
  assert not np.any(np.asarray(state.canvas) == cfg.model.mask_id)


@pytest.mark.slow
@pytest.mark.parametrize('batch', [1, 2, 3])
@pytest.mark.parametrize('decoder', DECODERS)
def test_always_equals_uncached_in_other_batches(golden, decoder, batch):
  cfg = programs.config(golden, decoder)
  state = programs.start(programs.prompts(2, (60, 9, 31)[:batch]), cfg, refresh_interval=1)
  check_against_reference(golden.params, state, cfg, full=True)


def test_guided_always_equals_uncached(llada_tiny):
  cfg = programs.config(llada_tiny, 'llada', guidance=True)
  state = programs.start(programs.prompts(3, (20, 7)), cfg, refresh_interval=1, cfg_scale=np.array([1.5, 0.7]))
  state = check_against_reference(llada_tiny.params, state, cfg)
  np.testing.assert_array_equal(state.counters.nfe, 2 * np.asarray(state.counters.steps))


EDGES = {
  'block_of_one': {'block_length': 1, 'canvas_length': 8},
  'block_is_canvas': {'block_length': 8, 'canvas_length': 8},
  'short_last_block': {'block_length': 4, 'canvas_length': 10},
}


@pytest.mark.parametrize(
  ('decoder', 'edge'),
  [
    *(('wino', edge) for edge in EDGES),
    ('llada', 'short_last_block'),
    pytest.param('llada', 'block_of_one', marks=pytest.mark.slow),
    pytest.param('llada', 'block_is_canvas', marks=pytest.mark.slow),
    ('saber', 'short_last_block'),
    pytest.param('saber', 'block_of_one', marks=pytest.mark.slow),
  ],
)
def test_block_lengths(golden, decoder, edge):
  cfg = programs.config(golden, decoder, **EDGES[edge])
  # One row has no prompt column at all, one only mask tokens, one fills its columns, one ends inside a block.
  ids = [*programs.prompts(4, (0, 16, 9)), np.full(12, cfg.model.mask_id, np.int32)]
  gen_length = np.array([cfg.canvas_length, cfg.canvas_length, 7, cfg.canvas_length])
  state = programs.start(ids, cfg, length=16, refresh_interval=1, gen_length=gen_length)
  state = programs.prefill(state, {0: 40} if edge == 'block_of_one' else {1: 40})
  state = check_against_reference(golden.params, state, cfg)
  canvas = np.asarray(state.canvas)
  assert np.all(canvas[2, 7:] == cfg.model.mask_id)
  assert not np.any(canvas[np.arange(cfg.canvas_length) < gen_length[:, None]] == cfg.model.mask_id)


@pytest.mark.parametrize('decoder', DECODERS)
def test_prompt_of_no_columns(golden, decoder):
  cfg = programs.config(golden, decoder, canvas_length=8, block_length=8)
  state = programs.start([np.zeros(0, np.int32)] * 2, cfg, length=0, refresh_interval=np.array([0, 3]))
  state = programs.prefill(state, {3: 40, 6: 7})
  state = check_against_reference(golden.params, state, cfg)
  np.testing.assert_array_equal(state.status, Status.LENGTH)


def mixed_start(cfg, lengths=LENGTHS):
  """Rows under the four policies in one batch."""
  clauses = {'refresh_interval': np.array([1, 0, 4, 0]), 'refresh_distance': np.array([0, 0, 0, 7])}
  state = programs.start(programs.prompts(1, lengths), cfg, **clauses)
  return programs.prefill(state, {5: 40, 11: 200})


@pytest.mark.parametrize(('decoder', 'full'), [*AS_USERS, *QUICK[1:]])
def test_loop_equals_steps_from_python(golden, decoder, full):
  cfg = programs.config(golden, decoder)
  steps = programs.run_steps(golden.params, mixed_start(cfg), cfg, full)
  loop = functools.partial(decode, cfg=cfg) if full else programs.loop(cfg)
  state = loop(golden.params, mixed_start(cfg))
  assert_same_bits(state, steps[-1][0])
  assert np.all(np.asarray(state.done))
  refreshes, taken = np.asarray(state.counters.refreshes), np.asarray(state.counters.steps)
  np.testing.assert_array_equal(refreshes[:3], [taken[0], 1, -(-taken[2] // 4)])
  assert 1 < refreshes[3] < taken[3]
  np.testing.assert_array_equal(state.counters.nfe, taken)


@pytest.mark.parametrize('decoder', ['saber', pytest.param('saber shifted', marks=pytest.mark.slow)])
def test_a_distance_of_one_is_always_and_none_or_more_than_there_are_columns_is_once(golden, decoder):
  cfg = programs.config(golden, decoder)
  ids = programs.prompts(1, (17, 17, 64, 64))
  ids = [ids[0], ids[0], ids[2], ids[2]]
  clauses = {'refresh_interval': np.array([1, 0, 0, 0]), 'refresh_distance': np.array([0, 1, 0, 25])}
  state = jax.device_get(programs.loop(cfg)(golden.params, programs.start(ids, cfg, **clauses)))
  for row in (0, 2):
    for name in ('canvas', 'refresh', 'remask', 'distance'):
      np.testing.assert_array_equal(state.trace[name][row], state.trace[name][row + 1])
  # A step of saber never leaves the canvas as it was.
  np.testing.assert_array_equal(state.counters.refreshes, [*state.counters.steps[:2], 1, 1])
  assert state.trace['distance'][2].max() > 8


def test_step_inside_the_callers_own_scan_and_while_loop(llada_tiny):
  cfg = programs.config(llada_tiny, 'wino')

  @functools.partial(jax.jit, compiler_options=programs.QUICK)
  def mine(params, state):
    # The step has the form of a scan's body.
    state, records = lax.scan(lambda state, _: decode_step(params, state, cfg=cfg), state, length=3)
    again = lambda carry: (carry[0] + 1, decode_step(params, carry[1], cfg=cfg)[0])
    count, state = lax.while_loop(lambda carry: jnp.any(~carry[1].done), again, (3, state))
    return count, state, records

  count, state, records = mine(llada_tiny.params, mixed_start(cfg))
  steps = programs.run_steps(llada_tiny.params, mixed_start(cfg), cfg)
  assert count == len(steps)
  for step in range(3):
    np.testing.assert_array_equal(records.canvas[step], steps[step][0].canvas)
    np.testing.assert_array_equal(records.refreshed[step], steps[step][0].reuse.refreshed)
  np.testing.assert_array_equal(state.canvas, steps[-1][0].canvas)
  np.testing.assert_array_equal(state.counters.refreshes, steps[-1][0].counters.refreshes)


def test_step_leaves_its_argument_alone(llada_tiny):
  cfg = programs.config(llada_tiny, 'wino')
  state = mixed_start(cfg)
  before = jax.tree.map(np.array, state)
  programs.stepper(cfg, False)(llada_tiny.params, state)
  assert_same_bits(state, before)


@pytest.mark.parametrize('decoder', DECODERS)
def test_not_a_number_in_the_weights_stops_at_the_first_step(golden, decoder):
  cfg = programs.config(golden, decoder)
  params = dict(golden.params, embedding=golden.params['embedding'].at[:, 3].set(jnp.nan))
  (state, _), *more = programs.run_steps(params, mixed_start(cfg), cfg)
  assert not more
  np.testing.assert_array_equal(state.status, Status.NOT_FINITE)
  np.testing.assert_array_equal(state.counters.steps, 0)
  np.testing.assert_array_equal(state.canvas, mixed_start(cfg).canvas)


def test_parameters_of_another_dtype_are_refused(llada_tiny):
  cfg = programs.config(llada_tiny, 'wino', dtype='bfloat16')
  with pytest.raises(ValueError, match=r'dtype must be that of the parameters, float32, got bfloat16'):
    decode_step(llada_tiny.params, mixed_start(cfg), cfg=cfg)


def test_inputs_that_do_not_belong_together_are_refused(llada_tiny):
  cfg = programs.config(llada_tiny, 'wino')
  with pytest.raises(ValueError, match=r'gen_length must be at most canvas_length=24, got 25'):
    programs.start(programs.prompts(1, (3, 4)), cfg, gen_length=np.array([24, 25]))
  with pytest.raises(ValueError, match=r'knobs and seeds must have 2 rows like prompt_tokens, got \(2,\) and \(3,\)'):
    programs.start(programs.prompts(1, (3, 4)), cfg, seeds=[1, 2, 3])

"""Fast-dLLM, dKV-Cache and dLLM-Cache: every golden decoding, step by step, rows, selections and logits.

Cases of one program decode together, left-padded to one prompt length and with a gen_length, a schedule and intervals
of their own, so that the rows of a batch stand in different blocks and at different turns of their clocks.
"""

import collections
import dataclasses
import functools

from golden_data import read_cases
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from archer_jax.config import DecodeConfig
from archer_jax.loop.step import init_state
from archer_jax.loop.step import staged_step
from archer_jax.types import Knobs

FAST = {
  'fastdllm.generate': 'prompt',
  'fastdllm.generate_with_prefix_cache': 'prefix',
  'fastdllm.generate_with_dual_cache': 'dual',
}
REUSE_OF = {
  **FAST,
  'fastdllm_dream.diffusion_generate_block': None,
  'dkvcache.decode.generate': 'dkv',
  'dkvcache.greedy.generate': 'dkv_greedy',
  'dkvcache.dream': 'dkv',
  'dllmcache.generate': 'dllm',
  'dllmcache.dream': 'dllm',
}
CASES = {
  case.id: case
  for folder in ('llada_tiny', 'dream_tiny', 'llada_tiny_caches', 'dream_tiny_caches')
  for case in read_cases(folder).values()
  if case.function in REUSE_OF
}
ATOL = 1e-4


def is_dream(case):
  return 'dream' in case.function


def reuse_of(case):
  if case.function == 'fastdllm_dream.diffusion_generate_block':
    return 'dual' if case.args['dual_cache'] else 'prefix'
  return 'dkv_prefill' if case.args.get('cache_type') == 'prefill' else REUSE_OF[case.function]


def static_of(case):
  """What shapes the program of a case."""
  args = case.args
  static = {'reuse': reuse_of(case), 'decoder': 'dream' if is_dream(case) else 'llada'}
  if args.get('threshold') is not None and args.get('alg', 'confidence_threshold') == 'confidence_threshold':
    static['decoder'] = 'parallel'
  if static['decoder'] == 'dream':
    static['alg'] = args['alg']
  if static['reuse'] == 'dkv_greedy':
    static['remasking'] = 'random'
  if args.get('shift_type') == 'un_right':
    static['dkv_shift'] = 'un_right'
  if 'block_length' in args:
    static['block_length'] = args['block_length']
  return static


def knobs_of(case):
  args = case.args
  knobs = {'gen_length': args.get('gen_length') or args['max_new_tokens'], 'refresh_interval': 1}
  names = {
    'steps': 'steps',
    'threshold': 'threshold',
    'cache_reloading_step': 'reuse_interval',
    'cache_steps': 'reuse_interval',
    'window_size': 'window',
    'prompt_interval_steps': 'prompt_interval',
    'gen_interval_steps': 'response_interval',
    'transfer_ratio': 'transfer_ratio',
  }
  return knobs | {ours: args[name] for name, ours in names.items() if args.get(name) is not None}


def group_of(case):
  return is_dream(case), tuple(sorted(static_of(case).items()))


def params(names, group_of):
  """Cases of which each group is a program: the largest of each function and method is fast, the others are slow."""
  groups, kinds = collections.Counter(), {}
  for name in names:
    case = CASES[name]
    groups[group_of(case)] += 1
    kinds.setdefault((case.function, reuse_of(case), case.args.get('shift_type')), set()).add(group_of(case))
  fast = {max(sorted(mine, key=str), key=groups.get) for mine in kinds.values()}
  return [pytest.param(name, marks=[] if group_of(CASES[name]) in fast else [pytest.mark.slow]) for name in names]


def score_of(case, length):
  """The decoding order that was drawn, [length], as scores of canvas columns."""
  score, prompt = np.zeros(length, np.float32), case.arrays['prompt'].shape[1]
  for block, drawn in enumerate(case.arrays['random_scores_per_block']):
    mine = slice(block * case.args['block_length'], (block + 1) * case.args['block_length'])
    score[mine] = drawn[prompt:][mine]
  return score


def expected_canvas(case):
  """int32 [steps, G], and which steps were taken.

  The public code does a forward in every block after the one that fills the caches, even where the block is already
  complete, which writes nothing.
  """
  tokens = case.arrays['tokens_after_step'].reshape(-1, case.arrays['final'].shape[1])
  taken = np.ones(len(tokens), bool)
  if case.function in FAST or case.function == 'fastdllm_dream.diffusion_generate_block':
    taken[1:] = np.any(tokens[1:] != tokens[:-1], axis=1)
  return tokens[taken][:, case.arrays['prompt'].shape[1] :], taken


def start(golden, cases, **changes):
  knobs = [knobs_of(case) for case in cases]
  length = max(case.arrays['prompt'].shape[1] for case in cases)
  tokens, valid = np.zeros((len(cases), length), np.int32), np.zeros((len(cases), length), bool)
  for row, case in enumerate(cases):
    prompt = case.arrays['prompt'][0]
    tokens[row, length - len(prompt) :], valid[row, length - len(prompt) :] = prompt, True
  canvas_length = max(row['gen_length'] for row in knobs)
  static = {'canvas_length': canvas_length, 'block_length': canvas_length} | static_of(cases[0]) | changes
  cfg = DecodeConfig(model=golden.config, early_stop=False, **static)
  state = init_state(tokens, valid, Knobs.stack(knobs), np.zeros(len(cases), np.uint32), cfg=cfg)
  if cfg.reuse == 'dkv_greedy':
    score = jnp.stack([score_of(case, canvas_length) for case in cases])
    state = dataclasses.replace(state, decoder=state.decoder._replace(score=score))
  return cfg, jax.device_put(state, jax.devices()[0])


def _fed(state, record, cfg):
  """Rows of prompt and canvas that the step fed, bool [B, P + G]."""
  method = cfg.reuse_method
  if not hasattr(method, 'fed'):
    return None
  views = cfg.decoder_method.views(state, cfg)
  rows = method.fed(state, jnp.zeros_like(state.done), views, cfg)
  rows = jnp.pad(rows, ((0, 0), (state.prompt_tokens.shape[1] + cfg.canvas_length - rows.shape[1], 0)))
  return jnp.where(record.refreshed[:, None], jnp.concatenate([state.prompt_valid, state.canvas_valid], axis=1), rows)


@functools.partial(jax.jit, static_argnames='cfg', compiler_options=programs.QUICK)
def step(params, state, *, cfg):
  after, record, stages = staged_step(params, state, cfg=cfg)
  renewed = None
  if cfg.reuse == 'dllm':
    keys = zip(state.kept[0].kv.k, after.kept[0].kv.k, strict=True)
    renewed = jnp.stack([jnp.any(old != new, axis=(1, 3)) for old, new in keys])
  return after, record, stages.outcome.logits, _fed(state, record, cfg), renewed


def play(golden, cases, **changes):
  """(state before, record, logits, rows fed, rows renewed by layer) of every step of a batch of cases."""
  cfg, state = start(golden, cases, **changes)
  steps = []
  while not np.all(state.done):
    after, *seen = step(golden.params, state, cfg=cfg)
    steps.append((state, *seen))
    state = after
  return cfg, steps


@pytest.fixture(scope='module')
def played(llada_tiny, dream_tiny):
  @functools.cache
  def group(name):
    cases = [case for case in CASES.values() if group_of(case) == name]
    return [case.id for case in cases], play(dream_tiny if is_dream(cases[0]) else llada_tiny, cases)

  return lambda case: group(group_of(case))


@pytest.mark.parametrize('name', params(CASES, group_of))
def test_every_step_equals_the_public_code(played, name):
  case = CASES[name]
  names, (cfg, steps) = played(case)
  row = names.index(name)
  mine = [(state, record, fed, renewed) for state, record, _, fed, renewed in steps if record.live[row]]
  expected, taken = expected_canvas(case)
  length = expected.shape[1]
  assert len(mine) == len(expected)
  for n, (_, record, _, _) in enumerate(mine):
    np.testing.assert_array_equal(np.asarray(record.canvas)[row, :length], expected[n], err_msg=f'step {n}')
  if 'transfers_per_step' in case.arrays:
    accepted = [int(record.accepted[row].sum()) for _, record, _, _ in mine]
    np.testing.assert_array_equal(accepted, case.arrays['transfers_per_step'].reshape(-1))
  refreshed = np.array([bool(record.refreshed[row]) for _, record, _, _ in mine])
  columns = case.arrays['final'].shape[1]
  # A case's own columns among those of the padded batch.
  start = mine[0][0].prompt_tokens.shape[1] - (columns - length)
  if 'forward_span' in case.arrays and cfg.reuse != 'prompt':
    spans = case.arrays['forward_span'][taken]
    np.testing.assert_array_equal(refreshed, (spans == [0, columns]).all(axis=1))
    for (_, _, fed, _), span in zip(mine, spans, strict=True):
      np.testing.assert_array_equal(np.flatnonzero(np.asarray(fed)[row, start : start + columns]), np.arange(*span))
  if 'refresh_per_step' in case.arrays:
    np.testing.assert_array_equal(refreshed, case.arrays['refresh_per_step'])
    for (_, _, fed, _), rows in zip(mine, case.arrays['recomputed_per_step'], strict=True):
      np.testing.assert_array_equal(np.asarray(fed)[row, start : start + columns], rows)
  if 'refresh_prompt_per_step' in case.arrays:
    for bit, key in enumerate(('refresh_prompt_per_step', 'refresh_response_per_step')):
      np.testing.assert_array_equal([int(record.reason[row]) >> bit & 1 for _, record, _, _ in mine], case.arrays[key])
    for n, (_, _, _, renewed) in enumerate(mine):
      found = np.asarray(renewed)[:, row, start : start + columns]
      np.testing.assert_array_equal(found, case.arrays['recomputed_per_layer'][n, 1:], err_msg=f'step {n}')


@pytest.mark.parametrize(
  'name', params([name for name, case in CASES.items() if 'logits' in case.arrays], lambda case: case.id)
)
def test_logits_are_those_of_the_public_code(llada_tiny, dream_tiny, name):
  case = CASES[name]
  # With `official` the decision rows are the whole canvas.
  _, steps = play(dream_tiny if is_dream(case) else llada_tiny, [case], mask_prediction='official')
  for n, expected in zip(case.arrays['logits_steps'], case.arrays['logits'], strict=True):
    given = np.isfinite(expected).all(axis=1)
    np.testing.assert_allclose(np.asarray(steps[n][2])[0][given], expected[given], rtol=0, atol=ATOL)


def test_the_goldens_reach_every_rule():
  count = lambda function: sum(case.function == function for case in CASES.values())
  assert [count(name) for name in REUSE_OF] == [5, 5, 5, 6, 12, 14, 11, 19, 9]

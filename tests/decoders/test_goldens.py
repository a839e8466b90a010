"""Every golden decoding through converter, loader and loop: what the public decoders wrote, step by step.

Cases that share a block length decode together, left-padded to one prompt length and with a gen_length each, so that
few programs are compiled and rows of different schedules stand in one batch. The cases of the prompt cache also run
alone at their own shapes, where their stored logits, keys and values are compared.
"""

import dataclasses
import functools
import itertools

from golden_data import read_cases
import jax
import numpy as np
import pytest
from stub import QUICK_COMPILE

from archer_jax.config import DecodeConfig
from archer_jax.loop.decode import decode
from archer_jax.loop.step import init_state
from archer_jax.loop.step import staged_step
from archer_jax.types import Knobs
from archer_jax.types import Status

CACHED = 'asymmetric_prompt_cache_wino'
DECODER_OF = {
  'llada.generate': 'llada',
  'wino.decoding_wino': 'wino',
  CACHED: 'wino',
  'dream.diffusion_generate': 'dream',
}
CASES = {
  name: case
  for checkpoint in ('llada_tiny', 'dream_tiny')
  for name, case in read_cases(checkpoint).items()
  if case.function in DECODER_OF
}
# Every case runs in one mode by default and in the other with `-m slow`, since each group is a program to compile.
DEFAULT_OFFICIAL = ('wino-16', 'wino-64', 'llada-8', 'llada-16', 'dream-maskgit_plus')
ATOL = 1e-4


@dataclasses.dataclass(frozen=True)
class Played:
  """What became of one case's rows."""

  trace: dict[str, np.ndarray]  # per-step records by name, [B, steps, ...]
  counters: dict[str, np.ndarray]  # int32 [B] by name
  status: np.ndarray  # int32 [B]


def group_of(case):
  """Cases of one group share everything static."""
  return f'{DECODER_OF[case.function]}-{case.args.get("alg") or case.args["block_length"]}'


def modes():
  params = []
  for name, case in CASES.items():
    default = 'official' if group_of(case) in DEFAULT_OFFICIAL else 'never'
    # The mask token is predicted in the _maskpred cases, and in no other one.
    for mode in ('official',) if name.endswith('_maskpred') else ('official', 'never'):
      marks = [] if mode == default else [pytest.mark.slow]
      params.append(pytest.param(name, mode, marks=marks, id=f'{name}-{mode}'))
  return params


def knobs_of(case):
  """The case's arguments under the names of our knobs."""
  args = case.args
  knobs = {'gen_length': args.get('gen_length') or args['max_new_tokens'], 'refresh_interval': 1}
  knobs |= {name: args[name] for name in ('steps', 'threshold', 'threshold_back', 'cfg_scale') if name in args}
  if case.function == CACHED:
    # None: never again after the first step.
    knobs['refresh_interval'] = args['refresh_every'] or 0
    knobs['refresh_at_block_start'] = int(args['refresh_at_block_start'])
  return knobs


def prompt_of(case, length):
  """Tokens and validity [B, length], left-padded."""
  prompt = case.arrays['prompt']
  valid = case.arrays.get('attention_mask', np.ones_like(prompt)).astype(bool)
  pad = ((0, 0), (length - prompt.shape[1], 0))
  return np.pad(prompt, pad), np.pad(valid, pad)


def expected_canvas(case):
  """int32 [B, steps, G]."""
  tokens = case.arrays['tokens_after_step']
  tokens = tokens[None] if tokens.ndim == 2 else tokens.swapaxes(0, 1)
  return tokens[:, :, case.arrays['prompt'].shape[1] :]


def fields_of(record, rows):
  return {field.name: np.asarray(getattr(record, field.name))[rows] for field in dataclasses.fields(record)}


def start(golden, cases, mode, trace=True):
  """The config and the first state of a batch of cases, and the rows of each."""
  knobs = [knobs_of(case) for case in cases]
  length = max(case.arrays['prompt'].shape[1] for case in cases)
  prompts, valids = zip(*(prompt_of(case, length) for case in cases), strict=True)
  bounds = np.cumsum([0, *map(len, prompts)])
  rows = [slice(*pair) for pair in itertools.pairwise(bounds)]
  canvas_length = max(row['gen_length'] for row in knobs)
  cfg = DecodeConfig(
    model=golden.config,
    decoder=DECODER_OF[cases[0].function],
    canvas_length=canvas_length,
    block_length=cases[0].args.get('block_length', canvas_length),
    mask_prediction=mode,
    alg=cases[0].args.get('alg', 'entropy'),
    guidance=any(row.get('cfg_scale', 0) > 0 for row in knobs),
    early_stop=False,
    trace_steps=max(expected_canvas(case).shape[1] for case in cases) + 1 if trace else 0,
  )
  per_row = [row for row, mine in zip(knobs, rows, strict=True) for _ in range(mine.stop - mine.start)]
  seeds = np.zeros(bounds[-1], np.uint32)
  state = init_state(np.concatenate(prompts), np.concatenate(valids), Knobs.stack(per_row), seeds, cfg=cfg)
  return cfg, state, rows


@pytest.fixture(scope='module')
def play(llada_tiny, dream_tiny):
  """A function from case id and mask prediction to `Played`; each group decodes once."""
  goldens = {'llada': llada_tiny, 'wino': llada_tiny, 'dream': dream_tiny}

  @functools.cache
  def group(name, mode):
    golden = goldens[name.partition('-')[0]]
    cases = [case for case in CASES.values() if group_of(case) == name]
    cases = [case for case in cases if mode == 'official' or not case.id.endswith('_maskpred')]
    cfg, state, rows = start(golden, cases, mode)
    program = decode.lower(golden.params, state, cfg=cfg).compile(compiler_options=QUICK_COMPILE)
    state = program(golden.params, state)
    return {
      case.id: Played(
        trace={name: np.asarray(record)[mine] for name, record in state.trace.items()},
        counters=fields_of(state.counters, mine),
        status=np.asarray(state.status)[mine],
      )
      for case, mine in zip(cases, rows, strict=True)
    }

  return lambda name, mode: group(group_of(CASES[name]), mode)[name]


@pytest.mark.parametrize(('name', 'mode'), modes())
def test_every_step_equals_the_public_decoder(play, name, mode):
  case, got = CASES[name], play(name, mode)
  expected = expected_canvas(case)
  _, steps, length = expected.shape
  np.testing.assert_array_equal(got.counters['steps'], steps)
  np.testing.assert_array_equal(got.trace['canvas'][:, :steps, :length], expected)
  np.testing.assert_array_equal(got.status, Status.LENGTH)
  np.testing.assert_array_equal(got.counters['nfe'], steps * (2 if case.args.get('cfg_scale') else 1))
  if 'transfers_per_step' in case.arrays:
    transfers = np.broadcast_to(case.arrays['transfers_per_step'], expected.shape[:2])
    np.testing.assert_array_equal(got.trace['accept'][:, :steps], transfers)
  if DECODER_OF[case.function] != 'wino':
    return
  for kind in ('accept', 'remask'):
    np.testing.assert_array_equal(got.trace[kind][0, :steps], case.arrays[f'{kind}_per_step'], err_msg=kind)
  np.testing.assert_array_equal(got.counters['accepted'], case.stats['accepted_total'])
  np.testing.assert_array_equal(got.counters['remasked'], case.stats['remasked_total'])
  refreshes = case.arrays.get('refresh_per_step', np.ones(steps, bool))
  np.testing.assert_array_equal(got.trace['refresh'][0, :steps], refreshes)
  np.testing.assert_array_equal(got.counters['refreshes'], case.stats.get('refresh_count', steps))


def test_the_goldens_reach_every_rule():
  # What the comparison above would silently lose if the data were cut down.
  cached = [case for case in CASES.values() if case.function == CACHED]
  assert len(CASES) == 46 and len(cached) == 15
  reached = [case.stats for case in CASES.values() if DECODER_OF[case.function] == 'wino']
  for kind in ('steps_over_max_accept', 'steps_fallback_single', 'steps_remask_capped', 'steps_remask_uncapped'):
    assert sum(stats[kind] for stats in reached) > 5
  assert sum(stats['accepted_mask_token'] for stats in reached) > 0


@functools.partial(jax.jit, static_argnames='cfg', compiler_options=QUICK_COMPILE)
def step_with_logits(params, state, *, cfg):
  """A denoising step, and the logits float32 [1, G + shadow, V] that it decided on."""
  state, _, stages = staged_step(params, state, cfg=cfg)
  return state, stages.outcome.logits


@pytest.mark.parametrize('name', [name for name, case in CASES.items() if case.function == CACHED])
def test_logits_keys_and_values_under_reuse(llada_tiny, name):
  case = CASES[name]
  # With `official` the decision rows are the whole canvas; the shadow stands behind it.
  cfg, state, _ = start(llada_tiny, [case], 'official', trace=False)
  # Committed like the parameters, so that the first step is no program of its own.
  state = jax.device_put(state, jax.devices()[0])
  first_row = case.arrays['prompt'].shape[1]
  expected = expected_canvas(case)[0]
  stored = {int(step): n for n, step in enumerate(case.arrays['logits_steps'])}
  compared = 0
  for step, canvas in enumerate(expected):
    state, logits = step_with_logits(llada_tiny.params, state, cfg=cfg)
    np.testing.assert_array_equal(state.canvas[0], canvas)
    assert bool(state.reuse.refreshed[0]) == case.arrays['refresh_per_step'][step]
    if step in stored:
      rows = case.arrays['logits_rows'][stored[step]] - first_row
      np.testing.assert_allclose(np.asarray(logits)[0, rows], case.arrays['logits'][stored[step]], rtol=0, atol=ATOL)
      compared += rows.size
    if step == 0 and 'prompt_k_step0' in case.arrays:
      for kept, name in ((state.kept.kv[0].k, 'prompt_k_step0'), (state.kept.kv[0].v, 'prompt_v_step0')):
        ours = np.stack([np.asarray(layer)[0] for layer in kept])
        np.testing.assert_allclose(ours, case.arrays[name], rtol=0, atol=ATOL)
  assert bool(state.done[0])
  assert compared == case.arrays['logits_rows'].size > 0

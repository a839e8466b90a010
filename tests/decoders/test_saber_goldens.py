"""Saber, and Archer on top of it, against the public code: every step of every recorded decoding.

Cases that share a block length decode together, so that prompts, lengths, n and K of different sizes stand in one
batch. Logits and kept keys are compared at each case's own shapes.
"""

import functools
import json

from golden_data import read_cases
import jax
import numpy as np
import pytest
from stub import QUICK_COMPILE

from archer_jax import cli
from archer_jax.config import DecodeConfig
from archer_jax.loop.decode import decode
from archer_jax.loop.step import init_state
from archer_jax.loop.step import staged_step
from archer_jax.types import Knobs
from archer_jax.types import Status

ATOL = 1e-4
CASES = {
  (model, name): case for model in ('llada_tiny', 'dream_tiny') for name, case in read_cases(f'{model}_saber').items()
}


def length_of(case):
  return case.args.get('gen_length') or case.args['max_new_tokens']


def block_of(case):
  """The block length; None for the whole canvas."""
  block = case.args.get('block_length')
  return None if block == case.args.get('gen_length') else block


def knobs_of(case):
  """The case's arguments under the names of our knobs; a plain decoding recomputes in every step."""
  knobs = {'gen_length': length_of(case), 'min_accept': case.args.get('n', 2)}
  knobs |= {name: case.args[name] for name in ('steps', 'eos_penalty') if name in case.args}
  if case.function == 'archer.saber':
    # No radius: never again after the first step.
    return knobs | {'refresh_distance': case.args['radius'] or 0}
  return knobs | {'refresh_interval': 1}


def start(golden, cases, trace, mode='official'):
  """Config and first state of a batch, a row a case."""
  length = max(case.arrays['prompt'].shape[1] for case in cases)
  canvas_length = max(map(length_of, cases))
  tokens = np.zeros((len(cases), length), np.int32)
  valid = np.zeros(tokens.shape, bool)
  for row, case in enumerate(cases):
    prompt = case.arrays['prompt'][0]
    tokens[row, length - len(prompt) :], valid[row, length - len(prompt) :] = prompt, True
  cfg = DecodeConfig(
    model=golden.config,
    decoder='saber',
    canvas_length=canvas_length,
    block_length=block_of(cases[0]) or canvas_length,
    mask_prediction=mode,
    early_stop=False,
    trace_steps=canvas_length if trace else 0,
  )
  knobs = Knobs.stack([knobs_of(case) for case in cases])
  return cfg, init_state(tokens, valid, knobs, np.zeros(len(cases), np.uint32), cfg=cfg)


@pytest.fixture(scope='module')
def goldens(llada_tiny, dream_tiny):
  return {'llada_tiny': llada_tiny, 'dream_tiny': dream_tiny}


@pytest.fixture(scope='module')
def play(goldens):
  """A function from a case to its row's trace, counters and status; each group decodes once."""

  @functools.cache
  def group(model, block, mode):
    cases = [case for (name, _), case in CASES.items() if (name, block_of(case)) == (model, block)]
    # The mask token is predicted where a token is committed in the _maskpred cases, and in no other one.
    cases = [case for case in cases if mode == 'official' or not case.id.endswith('_maskpred')]
    cfg, state = start(goldens[model], cases, trace=True, mode=mode)
    program = decode.lower(goldens[model].params, state, cfg=cfg).compile(compiler_options=QUICK_COMPILE)
    state = jax.device_get(program(goldens[model].params, state))
    return {case.id: jax.tree.map(lambda x, row=row: x[row], state) for row, case in enumerate(cases)}

  return lambda model, case, mode: group(model, block_of(case), mode)[case.id]


def check_trace(case, canvas, trace):
  """Compares the steps of a decoding, canvas [steps, G] and records by the names of the goldens, with the case's."""
  expected = case.arrays['tokens_after_step'][:, case.arrays['prompt'].shape[1] :]
  steps = len(expected)
  np.testing.assert_array_equal(canvas, expected)
  for kind in ('accept_per_step', 'remask_per_step'):
    np.testing.assert_array_equal(trace[kind], case.arrays[kind], err_msg=kind)
  np.testing.assert_allclose(trace['threshold_per_step'], case.arrays['threshold_per_step'], rtol=0, atol=1e-5)
  refreshes = case.arrays.get('refresh_per_step', np.ones(steps, bool))
  np.testing.assert_array_equal(trace['refresh_per_step'], refreshes)
  if 'distance_per_step' in case.arrays:
    np.testing.assert_array_equal(trace['distance_per_step'], case.arrays['distance_per_step'])


def modes():
  for model, name in CASES:
    # Each mode is a program of its own to compile.
    yield pytest.param(model, name, 'official', id=f'{model}-{name}-official')
    if not name.endswith('_maskpred'):
      yield pytest.param(model, name, 'never', id=f'{model}-{name}-never')


@pytest.mark.parametrize(('model', 'name', 'mode'), list(modes()))
def test_every_step_equals_the_public_decoder(play, model, name, mode):
  case = CASES[model, name]
  row = play(model, case, mode)
  steps = len(case.arrays['tokens_after_step'])
  assert (int(row.counters.steps), int(row.status)) == (steps, Status.LENGTH)
  trace = {f'{field}_per_step': values[:steps] for field, values in row.trace.items()}
  check_trace(case, row.trace['canvas'][:steps, : length_of(case)], trace)


@pytest.mark.parametrize(('model', 'name'), [key for key, case in CASES.items() if 'logits' in case.arrays])
def test_logits_keys_and_values(goldens, model, name):
  case, golden = CASES[model, name], goldens[model]
  cfg, state = start(golden, [case], trace=False)
  # Committed like the parameters, so that the first step is no program of its own.
  state = jax.device_put(state, jax.devices()[0])
  first = case.arrays['prompt'].shape[1]
  # Rows of Dream are told by what they are computed from, which is the position before the one that is read from them.
  shift = 0 if model == 'llada_tiny' else -1
  step_of = {int(step): n for n, step in enumerate(case.arrays['logits_steps'])}
  for step in range(len(case.arrays['tokens_after_step'])):
    state, _, stages = _step(golden.params, state, cfg=cfg)
    if step in step_of:
      rows = case.arrays['logits_rows'][step_of[step]] - first - shift
      np.testing.assert_allclose(
        np.asarray(stages.outcome.logits)[0, rows], case.arrays['logits'][step_of[step]], rtol=0, atol=ATOL
      )
    if step == 0 and 'prompt_k_step0' in case.arrays:
      for kept, array in ((state.kept.kv[0].k, 'prompt_k_step0'), (state.kept.kv[0].v, 'prompt_v_step0')):
        ours = np.stack([np.asarray(layer)[0] for layer in kept])
        np.testing.assert_allclose(ours, case.arrays[array], rtol=0, atol=ATOL)
  assert bool(state.done[0])


_step = jax.jit(staged_step, static_argnames='cfg', compiler_options=QUICK_COMPILE)


@pytest.mark.parametrize('model', ['llada_tiny', 'dream_tiny'])
def test_command_line_gives_the_same_steps(goldens, model, tmp_path):
  cases = {name: case for (owner, name), case in CASES.items() if owner == model and not block_of(case)}
  cases = {name: case for name, case in cases.items() if case.function == 'archer.saber'}
  records = [
    {'id': name, 'prompt_ids': case.arrays['prompt'][0].tolist()}
    | {key: value for key, value in knobs_of(case).items() if key != 'min_accept' or model == 'llada_tiny'}
    for name, case in cases.items()
  ]
  if model == 'llada_tiny':
    records = [{key: value for key, value in record.items() if key != 'steps'} for record in records]
  (tmp_path / 'in.jsonl').write_text(''.join(json.dumps(record) + '\n' for record in records))
  flags = {
    'checkpoint': goldens[model].path,
    'input': tmp_path / 'in.jsonl',
    'output': tmp_path / 'out.jsonl',
    'trace': tmp_path / 'traces',
    'decoder': 'saber',
    'dtype': 'float32',
    'early_stop': 'false',
    'batch_size': 4,
  }
  assert cli.main(['run_decode.py', *(f'--{name}={value}' for name, value in flags.items())]) == 0
  answers = [json.loads(line) for line in (tmp_path / 'out.jsonl').read_text().splitlines()]
  assert [answer['id'] for answer in answers] == list(cases)
  for answer in answers:
    case = cases[answer['id']]
    assert answer['token_ids'] == case.arrays['final'][0, case.arrays['prompt'].shape[1] :].tolist()
    with np.load(tmp_path / 'traces' / f'{answer["id"]}.npz') as trace:
      check_trace(case, trace['canvas_after_step'], trace)


def test_the_goldens_reach_every_rule():
  stats = [case.stats for case in CASES.values()]
  assert len(CASES) == 63
  for kind in ('steps_fallback', 'steps_threshold', 'remasked_total'):
    assert sum(case[kind] for case in stats) > 100
  assert sum(case['accepted_mask_token'] for case in stats) > 0
  assert sum(not case.arrays.get('refresh_per_step', np.ones(1, bool)).all() for case in CASES.values()) > 20

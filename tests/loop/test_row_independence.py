"""Rows never influence each other: batch size, order, padding, neighbours and fillers change nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from archer_jax.types import Counters

LENGTHS = (3, 9, 17, 30, 44, 60)
ORDER = (4, 1, 5, 0, 3, 2)
# One seed a prompt: none has a decision nearer to a tie than 1e-4 in any of these runs, so that equality is exact.
PROMPT_SEEDS = {'wino': (58,) * 6, 'llada': (28,) * 6, 'dream': (3, 98, 37, 4, 64, 71)}
PROMPT_SEEDS |= {'saber': (46, 42, 40, 43, 47, 45), 'saber shifted': (43, 47, 41, 41, 45, 43)}
MIXED_LENGTHS = (24, 17, 8, 5, 24, 12)

RUNS = {
  **programs.POLICIES,
  'sampled': {'refresh_distance': 7, 'temperature': 0.8},
  'mixed_lengths': {'refresh_distance': np.array(MIXED_LENGTHS) // 4 + 1, 'gen_length': np.array(MIXED_LENGTHS)},
}


@pytest.fixture(
  params=['wino', 'llada', 'dream', 'saber', pytest.param('saber shifted', marks=pytest.mark.slow)], scope='module'
)
def setting(request):
  golden = programs.golden_of(request, request.param)
  return golden.params, programs.config(golden, request.param)


def kind_of(cfg):
  """The name by which `programs.config` made it."""
  shifted = cfg.decoder == 'saber' and cfg.model.logit_alignment == 'shifted'
  return 'saber shifted' if shifted else cfg.decoder


def pick(values, rows):
  return values[list(rows)] if isinstance(values, np.ndarray) else values


def run(setting, rows, knobs, **changes):
  """Decodes these rows of the six prompts as one batch."""
  params, cfg = setting
  ids = [programs.prompts(seed, LENGTHS)[row] for row, seed in enumerate(PROMPT_SEEDS[kind_of(cfg)])]
  knobs = {name: pick(value, rows) for name, value in knobs.items()}
  if cfg.decoder == 'dream':
    knobs['steps'] = 12
  state = programs.start([ids[row] for row in rows], cfg, seeds=[100 + row for row in rows], **knobs, **changes)
  return jax.device_get(programs.loop(cfg)(params, state))


def row_of(state, slot):
  """What a caller sees of a row: tokens of every step, counts and status, and the margins beside it."""
  steps = int(state.counters.steps[slot])
  seen = {field.name: int(getattr(state.counters, field.name)[slot]) for field in dataclasses.fields(Counters)}
  seen['status'] = int(state.status[slot])
  for name in ('canvas', 'refresh', 'accept', 'remask', 'distance', 'drift', 'age'):
    seen[name] = state.trace[name][slot, :steps].tolist()
  return seen, state.trace['margin'][slot, :steps]


@pytest.fixture(scope='module')
def alone(setting):
  """Every prompt's own run, in a batch of one."""
  return {name: [row_of(run(setting, [row], knobs), 0) for row in range(6)] for name, knobs in RUNS.items()}


def check(rows, state, expected):
  for slot, row in enumerate(rows):
    seen, margin = row_of(state, slot)
    assert seen == expected[row][0], f'prompt {row} in slot {slot}'
    # Margins are distances of logits, which batches may sum in another order.
    np.testing.assert_allclose(margin, expected[row][1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize('name', RUNS)
def test_no_prompt_is_near_a_tie(alone, name):
  assert min(margin.min() for _, margin in alone[name]) > 1e-4
  # The runs are long enough to tell something: every one refreshes as its policy says, and the adaptive one adapts.
  counts = [(seen['steps'], seen['refreshes']) for seen, _ in alone[name]]
  if name in programs.POLICIES:
    assert all(
      {'always': n == steps, 'once': n == 1, 'interval': n == -(-steps // 4), 'drift': 1 < n < steps}[name]
      for steps, n in counts
    )


@pytest.mark.parametrize('name', RUNS)
def test_in_a_shuffled_batch_of_six(setting, alone, name):
  check(ORDER, run(setting, ORDER, RUNS[name]), alone[name])


# Every decoder has a smaller batch in every run; a size is a program, and the rest of them take a while.
SMALLER = [
  ('wino', 2),
  ('wino', 3),
  ('llada', 3),
  ('dream', 2),
  ('saber', 3),
  pytest.param('saber', 2, marks=pytest.mark.slow),
  pytest.param('saber shifted', 2, marks=pytest.mark.slow),
  pytest.param('llada', 2, marks=pytest.mark.slow),
  pytest.param('dream', 3, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(('setting', 'size'), SMALLER, indirect=['setting'])
def test_in_smaller_batches(setting, alone, size):
  for name, knobs in RUNS.items():
    for first in range(0, 6, size):
      rows = ORDER[first : first + size]
      check(rows, run(setting, rows, knobs), alone[name])


def test_beside_filler_rows(setting, alone):
  for name in ('interval', 'drift', 'sampled'):
    gen_length = np.full(6, programs.CANVAS_LENGTH)
    gen_length[[1, 4]] = 0
    state = run(setting, range(6), RUNS[name] | {'gen_length': gen_length})
    for row in (0, 2, 3, 5):
      assert row_of(state, row)[0] == alone[name][row][0]
    np.testing.assert_array_equal(state.counters.steps[[1, 4]], 0)


def test_one_policy_a_row(setting, alone):
  """Rows of one batch that refresh at different steps: the stable neighbour and the turbulent one."""
  names = ('always', 'once', 'drift', 'interval', 'once', 'drift')
  clauses = {
    clause: np.array([programs.POLICIES[name].get(clause, 0) for name in names])
    for clause in ('refresh_interval', 'refresh_distance')
  }
  state = run(setting, range(6), clauses)
  for row, name in enumerate(names):
    assert row_of(state, row)[0] == alone[name][row][0], name


@pytest.mark.parametrize('setting', ['wino', 'dream'], indirect=True)
def test_without_padding(setting, alone):
  """A prompt of its own length gives the same as left-padded to 64."""
  for name in ('drift', 'sampled'):
    check([1], run(setting, [1], RUNS[name], length=LENGTHS[1]), alone[name])


def test_duplicates(setting):
  """Equal prompts give equal rows without temperature, and differ by their seeds with it."""
  params, cfg = setting
  ids = [programs.prompts(5, (20,))[0]] * 6
  for temperature, seeds in ((0.0, range(6)), (0.8, [1, 2, 1, 3, 2, 1])):
    state = programs.start(ids, cfg, seeds=seeds, temperature=temperature, refresh_distance=7)
    canvas = np.asarray(programs.loop(cfg)(params, state).canvas)
    same = (canvas[:, None] == canvas[None]).all(axis=-1)
    wanted = np.ones((6, 6), bool) if temperature == 0 else np.equal.outer(list(seeds), list(seeds))
    np.testing.assert_array_equal(same, wanted)


def test_an_empty_prompt(setting):
  """Every column ties in the first step, in exact arithmetic: the lowest are written, in any batch."""
  params, cfg = setting
  empty, *others = programs.prompts(8, (0, 3, 9, 17, 30, 44))
  knobs = {'refresh_distance': 7} | ({'steps': 12} if cfg.decoder == 'dream' else {})

  def seen(ids, row):
    state = programs.start(ids, cfg, seeds=[7] * len(ids), **knobs)
    return row_of(jax.device_get(programs.loop(cfg)(params, state)), row)[0]

  expected = seen([empty], 0)
  written = np.flatnonzero(np.array(expected['canvas'][0]) != cfg.model.mask_id)
  # Saber has taken back one of them.
  assert len(written) and np.all(written < expected['accept'][0])
  assert seen([*others[:3], empty, *others[3:]], 3) == expected


# Which rows refresh at each step; row 3 is filler. All of them, none, some, one, all, none.
REFRESHES = ([1, 1, 1, 0], [0, 0, 0, 0], [0, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0])


def test_bits_do_not_depend_on_neighbours_and_pads(setting):
  """Other rows replaced by random ids and all pads by a token without numbers, at the same shapes and refresh flags."""
  params, cfg = setting
  # No prompt has it.
  pad = cfg.model.vocab_size - 1
  broken = {**params, 'embedding': params['embedding'].at[pad].set(jnp.nan)}
  ids = programs.prompts(6, (12, 64, 3, 40))
  other = programs.prompts(7, (64, 5, 33, 1))
  gen_length = np.array([24, 24, 24, 0])
  # Nobody may finish early in one run and not in the other, since that would change who refreshes.
  knobs = {'gen_length': gen_length, 'threshold': 1.0, 'temperature': np.array([0.0, 0.8, 0.0, 0.8])}

  def steps(params, prompt_ids, pad, seeds):
    state = programs.start(prompt_ids, cfg, pad=pad, seeds=seeds, **knobs)
    for flags in REFRESHES:
      state, logits = programs.stepper(cfg, False)(params, programs.set_knobs(state, refresh_interval=flags))
      yield state, logits

  for row in range(3):
    beside = [ids[b] if b == row else other[b] for b in range(4)]
    seeds = [b if b == row else 50 + b for b in range(4)]
    real = -len(ids[row])
    for (state, logits), (mine, my_logits) in zip(
      steps(params, ids, 0, range(4)), steps(broken, beside, pad, seeds), strict=True
    ):
      np.testing.assert_array_equal(logits[row], my_logits[row])
      own = lambda state: jax.tree.leaves((state.canvas, state.decoder, state.reuse))
      for leaf, my_leaf in zip(own(state), own(mine), strict=True):
        np.testing.assert_array_equal(leaf[row], my_leaf[row])
      for kept, mine_kept in zip(jax.tree.leaves(state.kept.kv[0]), jax.tree.leaves(mine.kept.kv[0]), strict=True):
        np.testing.assert_array_equal(kept[row, :, real:], mine_kept[row, :, real:])
      assert not jnp.array_equal(logits[(row + 1) % 3], my_logits[(row + 1) % 3])

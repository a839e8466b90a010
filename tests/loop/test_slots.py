"""Rows that come and go: every one decodes as it does alone, nothing is copied and nothing compiled anew."""

import dataclasses
import functools
import math
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import programs
import programs_text
import pytest
import test_compiled
import test_row_independence as six

from archer_jax.loop.slots import decode_chunk
from archer_jax.loop.slots import insert_rows
from archer_jax.loop.slots import retire_rows
from archer_jax.loop.step import init_state
from archer_jax.types import Knobs
from archer_jax.types import Status

# No decision of these prompts is near a tie, so that equality is exact.
GUIDED_SEED, MANY_SEED = 1, 201
# Half of the rows are under another policy, sampled, or shorter; expected is what each gives alone under its own.
MIX = ('drift', 'sampled', 'always', 'mixed_lengths', 'drift', 'interval')


@pytest.fixture(
  params=['wino', 'llada', 'dream', 'saber', pytest.param('saber shifted', marks=pytest.mark.slow)], scope='module'
)
def setting(request):
  golden = programs.golden_of(request, request.param)
  return golden.params, programs.config(golden, request.param)


@functools.cache
def quick(function, **static):
  """A program of `archer_jax.loop.slots` that is optimised less, without donation."""
  return jax.jit(functools.partial(function.__wrapped__, **static), compiler_options=programs.QUICK)


def knobs_of(names, row):
  """Knobs of a row of the six under the run that `names` gives it."""
  return {name: six.pick(value, [row]).item() if isinstance(value, np.ndarray) else value
          for name, value in six.RUNS[names[row]].items()}  # fmt: skip


def make_rows(cfg, wanted, width):
  """`width` rows before their first step: those of (prompt, seed, knobs), and free ones."""
  tokens = np.zeros((width, programs.PROMPT_LENGTH), np.int32)
  valid = np.zeros(tokens.shape, bool)
  for row, (ids, _, _) in enumerate(wanted):
    tokens[row, -len(ids) :], valid[row, -len(ids) :] = ids, True
  knobs = [{'gen_length': cfg.canvas_length, **given} for _, _, given in wanted]
  seeds = np.array([seed for _, seed, _ in wanted] + [0] * (width - len(wanted)), np.uint32)
  filler = [{'gen_length': 0}] * (width - len(wanted))
  state = init_state(tokens, valid, Knobs.stack(knobs + filler), seeds, cfg=cfg)
  return jax.device_put(state, jax.devices()[0])


def decode_in_slots(params, cfg, wanted, n_slots, max_steps=7, min_done=1):
  """What `six.row_of` tells of every wanted row, decoded in `n_slots` slots."""
  waiting = list(enumerate(wanted))
  owners, found, chunks = [None] * n_slots, {}, 0
  state = make_rows(cfg, [], n_slots)
  while waiting or any(owner is not None for owner in owners):
    free = [slot for slot, owner in enumerate(owners) if owner is None][: len(waiting)]
    coming, waiting = waiting[: len(free)], waiting[len(free) :]
    slots = np.full(n_slots, n_slots, np.int32)
    slots[: len(free)] = free
    rows = make_rows(cfg, [row for _, row in coming], n_slots)
    state = quick(insert_rows, cfg=cfg)(state, slots, rows)
    for slot, (number, _) in zip(free, coming, strict=True):
      owners[slot] = number
    state = quick(decode_chunk, cfg=cfg)(params, state, np.int32(max_steps), np.int32(min_done))
    chunks += 1
    done = [slot for slot in range(n_slots) if owners[slot] is not None and state.done[slot]]
    slots = np.full(n_slots, -1, np.int32)
    slots[: len(done)] = done
    state, finished = quick(retire_rows)(state, slots)
    finished = jax.device_get(finished)
    for place, slot in enumerate(done):
      found[owners[slot]] = six.row_of(finished, place)
      owners[slot] = None
  assert np.all(np.asarray(state.status) == Status.EMPTY)
  return [found[number] for number in range(len(wanted))], chunks


def six_rows(cfg, names=MIX):
  ids = [programs.prompts(seed, six.LENGTHS)[row] for row, seed in enumerate(six.PROMPT_SEEDS[six.kind_of(cfg)])]
  steps = {'steps': 12} if cfg.decoder == 'dream' else {}
  return [(ids[row], 100 + row, knobs_of(names, row) | steps) for row in range(6)]


def check(found, expected):
  for number, ((seen, margin), (wanted, wanted_margin)) in enumerate(zip(found, expected, strict=True)):
    assert seen == wanted, f'row {number}'
    np.testing.assert_allclose(margin, wanted_margin, rtol=1e-3, atol=1e-4)


def alone(setting, names=MIX):
  return [six.row_of(six.run(setting, [row], six.RUNS[names[row]]), 0) for row in range(6)]


def test_six_rows_in_two_slots(setting):
  params, cfg = setting
  found, _ = decode_in_slots(params, cfg, six_rows(cfg), 2)
  check(found, alone(setting))


def many_rows(cfg):
  """24 rows of many prompts and lengths, half of them sampled, that refresh by drift."""
  if cfg.decoder in ('dream', 'saber'):
    return six_rows(cfg) * 4
  ids = programs.prompts(MANY_SEED, np.linspace(1, programs.PROMPT_LENGTH, 24).astype(int))
  lengths = [(24, 17, 8, 5, 21, 12)[row % 6] for row in range(24)]
  knobs = [
    {'refresh_distance': n // 4 + 1, 'temperature': 0.8 * (row % 2), 'gen_length': n} for row, n in enumerate(lengths)
  ]
  if cfg.decoder == 'llada':
    knobs = [{**given, 'steps': (24, 6, 8, 3, 10, 12)[row % 6]} for row, given in enumerate(knobs)]
  return [(ids[row], row, knobs[row]) for row in range(24)]


@pytest.fixture(scope='module')
def many_alone(setting):
  """Each of these in a batch of one."""
  params, cfg = setting
  decoded = [jax.device_get(programs.loop(cfg)(params, make_rows(cfg, [row], 1))) for row in many_rows(cfg)]
  assert min(state.trace['margin'][0, : state.counters.steps[0]].min() for state in decoded) > 1e-4
  return [six.row_of(state, 0) for state in decoded]


@pytest.mark.slow
@pytest.mark.parametrize(('n_slots', 'max_steps', 'min_done'), [(4, 100, 1), (4, 5, 4), (16, 100, 2), (16, 3, 16)])
def test_24_shuffled_rows(setting, many_alone, n_slots, max_steps, min_done):
  params, cfg = setting
  wanted = many_rows(cfg)
  order = np.random.default_rng(n_slots + max_steps).permutation(24)
  found, chunks = decode_in_slots(params, cfg, [wanted[row] for row in order], n_slots, max_steps, min_done)
  check(found, [many_alone[row] for row in order])
  assert chunks >= 24 / n_slots


def test_guided_rows(llada_tiny):
  """Rows with and without guidance side by side; both of a row's caches are left to its first step."""
  params, cfg = llada_tiny.params, programs.config(llada_tiny, 'llada', guidance=True)
  scales = (1.5, 0.0, 0.7, 2.0)
  knobs = [
    {'cfg_scale': scale, 'refresh_distance': n // 4 + 1, 'gen_length': n}
    for scale, n in zip(scales, (24, 11, 17, 8), strict=True)
  ]
  ids = programs.prompts(GUIDED_SEED, (20, 3, 41, 12))
  wanted = [(ids[row], row, knobs[row]) for row in range(4)]
  expected = [six.row_of(jax.device_get(programs.loop(cfg)(params, make_rows(cfg, [row], 1))), 0) for row in wanted]
  assert min(margin.min() for _, margin in expected) > 1e-4
  assert [seen['nfe'] // seen['steps'] for seen, _ in expected] == [2, 1, 2, 2]
  found, _ = decode_in_slots(params, cfg, wanted, 2)
  check(found, expected)


# Which rows change and which stay.


@pytest.fixture(scope='module')
def wino(llada_tiny):
  return llada_tiny.params, programs.config(llada_tiny, 'wino')


def slow_rows(cfg, lengths, seed=3):
  """Rows that take as many steps as they are long: one token a step."""
  ids = programs.prompts(seed, [5 + row for row in range(len(lengths))])
  knobs = {'threshold': 1.0, 'threshold_back': 0.0}
  return make_rows(cfg, [(ids[row], row, {**knobs, 'gen_length': n}) for row, n in enumerate(lengths)], len(lengths))


def row_leaves(state, row):
  return [np.asarray(leaf)[row] for leaf in jax.tree.leaves(state)]


def test_neighbours_do_not_notice(wino):
  """Every bit of the other rows, their keys and values included, is what it is without rows that come and go."""
  params, cfg = wino
  insert, retire, chunk = quick(insert_rows, cfg=cfg), quick(retire_rows), quick(decode_chunk, cfg=cfg)
  state = other = chunk(params, slow_rows(cfg, (24, 24, 24, 24)), 5, 4)
  state, _ = retire(state, np.array([1, 4, -1], np.int32))
  state = chunk(params, state, 4, 4)
  state = insert(state, np.array([4, 3, 1], np.int32), slow_rows(cfg, (9, 24, 17), seed=4))
  state, other = chunk(params, state, 6, 4), chunk(params, other, 10, 4)
  np.testing.assert_array_equal(state.counters.steps, [15, 6, 15, 6])
  for row in (0, 2):
    for leaf, expected in zip(row_leaves(state, row), row_leaves(other, row), strict=True):
      np.testing.assert_array_equal(leaf, expected)
  # Rows 1 and 2 of the three came in, in that order, and row 0 was left out.
  np.testing.assert_array_equal(state.gen_length, [24, 17, 24, 24])
  np.testing.assert_array_equal(state.counters.refreshes, 1)


def test_a_row_that_leaves(wino):
  params, cfg = wino
  state = quick(decode_chunk, cfg=cfg)(params, slow_rows(cfg, (3, 24, 24, 0)), np.int32(5), np.int32(9))
  before = jax.device_get(state)
  state, rows = quick(retire_rows)(state, np.array([2, 0, 4, -1], np.int32))
  # Done or not, the rows are as they were.
  for place, row in ((0, 2), (1, 0)):
    assert rows.status[place] == before.status[row] and rows.counters.steps[place] == before.counters.steps[row]
    own = lambda state: jax.tree.leaves((state.canvas, state.prompt_tokens, state.seed, state.decoder, state.reuse))
    for leaf, expected in zip(own(rows), own(before), strict=True):
      np.testing.assert_array_equal(leaf[place], expected[row])
    np.testing.assert_array_equal(rows.trace['canvas'][place], before.trace['canvas'][row])
  assert rows.kept is None
  np.testing.assert_array_equal(state.status, [Status.EMPTY, Status.RUNNING, Status.EMPTY, Status.EMPTY])
  np.testing.assert_array_equal(state.gen_length, [0, 24, 0, 0])
  state = quick(decode_chunk, cfg=cfg)(params, state, np.int32(100), np.int32(9))
  np.testing.assert_array_equal(state.counters.steps, [3, 24, 5, 0])


def test_a_slot_whose_last_row_was_not_finite(wino):
  params, cfg = wino
  expected = quick(decode_chunk, cfg=cfg)(params, slow_rows(cfg, (9, 24, 17, 24)), np.int32(100), np.int32(4))
  state = make_rows(cfg, [], 4)
  state = dataclasses.replace(state, kept=jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state.kept))
  state = quick(insert_rows, cfg=cfg)(state, np.arange(4, dtype=np.int32), slow_rows(cfg, (9, 24, 17, 24)))
  state = quick(decode_chunk, cfg=cfg)(params, state, np.int32(100), np.int32(4))
  for leaf, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
    np.testing.assert_array_equal(leaf, wanted)


def test_where_a_chunk_ends(wino):
  params, cfg = wino
  chunk = lambda state, max_steps, min_done: quick(decode_chunk, cfg=cfg)(
    params, state, np.int32(max_steps), np.int32(min_done)
  )
  steps = lambda state: np.asarray(state.counters.steps).tolist()
  start = slow_rows(cfg, (3, 5, 5, 0))
  for max_steps, min_done, expected in (
    (2, 1, [2, 2, 2, 0]),
    (0, 1, [0, 0, 0, 0]),
    (9, 1, [3, 3, 3, 0]),
    # Two are done in the same step.
    (9, 2, [3, 5, 5, 0]),
    (4, 3, [3, 4, 4, 0]),
    # More than are running, and more than there are.
    (9, 4, [3, 5, 5, 0]),
    (9, 99, [3, 5, 5, 0]),
  ):
    assert steps(chunk(start, max_steps, min_done)) == expected, (max_steps, min_done)
  # Rows that were done before do not count.
  state = chunk(start, 9, 1)
  assert steps(chunk(state, 9, 1)) == [3, 5, 5, 0]
  assert steps(chunk(chunk(state, 9, 1), 9, 1)) == [3, 5, 5, 0]


def test_rows_of_another_program_are_refused(wino):
  _, cfg = wino
  state, rows = slow_rows(cfg, (3, 5)), slow_rows(cfg, (4,))
  with pytest.raises(ValueError, match=r'rows must have one row per slot and the P and G of the state, \(2, 64, 24\)'):
    insert_rows(state, np.array([0, 1], np.int32), rows, cfg=cfg)
  short = programs.start([np.array([5], np.int32)], cfg, length=16)
  with pytest.raises(ValueError, match=r'\(1, 64, 24\), got \(1, 16, 24\)'):
    insert_rows(state, np.array([0], np.int32), short, cfg=cfg)


# What it compiles to.


def test_numbers_compile_nothing(wino):
  params, cfg = wino
  sizes = lambda: [function._cache_size() for function in (insert_rows, retire_rows, decode_chunk)]
  seen = []
  for max_steps, min_done, slots, knobs in (
    (2, 1, [0, 4, 4, 4], {}),
    (7, 3, [3, 1, 4, 4], {'temperature': 0.7, 'threshold': 0.2}),
    (1, 4, [0, 1, 2, 3], {'refresh_interval': 2, 'refresh_distance': 4, 'gen_length': 9}),
    (3, 1, [4, 4, 4, 4], {'max_accept': 2, 'min_margin': 0.5}),
  ):
    state = decode_chunk(params, slow_rows(cfg, (3, 5, 9, 0)), np.int32(max_steps), np.int32(min_done), cfg=cfg)
    rows = programs.start(
      programs.prompts(max_steps, (4, 5, 6, 7)), cfg, seeds=range(max_steps, max_steps + 4), **knobs
    )
    state = insert_rows(state, np.array(slots, np.int32), rows, cfg=cfg)
    state, _ = retire_rows(state, np.array(slots[::-1], np.int32))
    decode_chunk(params, state, np.int32(max_steps), np.int32(min_done), cfg=cfg)
    seen.append(sizes())
  assert seen[0] == seen[-1]


def test_kept_keys_stay_where_they_are(wino):
  """Donated, not copied: the same memory before and after."""
  params, cfg = wino
  where = lambda state: [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.kept)]
  state = slow_rows(cfg, (3, 5, 9, 24))
  first, before = state, where(state)
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    state = insert_rows(state, np.array([1, 4], np.int32), slow_rows(cfg, (3, 7)), cfg=cfg)
    assert where(state) == before
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first))
    state, _ = retire_rows(state, np.array([2, -1], np.int32))
    assert where(state) == before
    state = decode_chunk(params, state, np.int32(4), np.int32(2), cfg=cfg)
  assert where(state) == before


# Any opcode that makes a new array of keys of all rows; a parameter or a part of a tuple makes none.
_MOVES = re.compile(r'= \w+\[([\d,]+)\]\S* ([\w-]+)\(')


def moved_keys(text, cfg):
  """Instructions, wherever they stand, whose result has the size of the kept keys of a layer."""
  size = math.prod((4, programs.PROMPT_LENGTH, cfg.model.n_kv_heads, cfg.model.head_dim))
  return [
    match[0]
    for match in _MOVES.finditer(text)
    if math.prod(map(int, match[1].split(','))) == size and match[2] not in ('parameter', 'get-tuple-element')
  ]


def test_rows_that_move_take_no_keys_with_them(wino):
  _, cfg = wino
  state = slow_rows(cfg, (3, 5, 9, 24))
  kept = sum(leaf.nbytes for leaf in jax.tree.leaves(state.kept))
  for lowered in (
    insert_rows.lower(state, np.zeros(4, np.int32), state, cfg=cfg),
    retire_rows.lower(state, np.zeros(4, np.int32)),
  ):
    compiled = lowered.compile()
    assert moved_keys(compiled.as_text(), cfg) == []
    assert compiled.memory_analysis().alias_size_in_bytes > kept
    assert compiled.memory_analysis().temp_size_in_bytes < kept / 4


@pytest.mark.parametrize('decoder', ['wino', 'dream'])
def test_no_copy_of_the_cache_in_a_chunk(request, decoder):
  golden = request.getfixturevalue('dream_tiny' if decoder == 'dream' else 'llada_tiny')
  cfg = programs.config(golden, decoder)
  lowered = decode_chunk.lower(golden.params, slow_rows(cfg, (3, 5, 9, 24)), np.int32(4), np.int32(1), cfg=cfg)
  text = lowered.compile(programs.FULL if decoder == 'wino' else programs.QUICK).as_text()
  assert len(programs_text.instructions_inside_loops(text)) > 1000
  copies = test_compiled.copies_of_keys(cfg, text)
  assert [line for rows, line in copies if rows == programs.PROMPT_LENGTH] == []

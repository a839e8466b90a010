"""Continuous batching of requests. Prompts and answers are short and share one shape: a program costs seconds."""

import itertools
import random
import resource
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from text_model import CONFIG

from archer_jax.decode import decode
from archer_jax.jobs import continuous
from archer_jax.jobs.batching import row_seed
from archer_jax.jobs.continuous import Window
from archer_jax.jobs.generate import Timing
from archer_jax.jobs.generate import decode_requests
from archer_jax.jobs.requests import Refusal
from archer_jax.jobs.requests import Request
from archer_jax.jobs.requests import make_request
from archer_jax.jobs.settings import make_settings
from archer_jax.mesh import make_mesh
from archer_jax.report.hlo import collectives
from archer_jax.sharding import param_shardings
from archer_jax.slots import decode_chunk

# The window, without a model.


def entry(index, shape=1):
  """A request that needs a program of one number, or for None something that needs none."""
  if shape is None:
    return Refusal(index=index, id=index, error='bad')
  return Request(index=index, id=index, prompt_ids=[3], seed=None, knobs={'shape': shape})


def window_of(shapes, *, batch_size=2, n_batches=3, in_order=True, taken=None):
  def entries():
    for index, shape in enumerate(shapes):
      if taken is not None:
        taken.append(index)
      yield entry(index, shape)

  shape = lambda request: (request.knobs['shape'],)
  return Window(entries(), batch_size=batch_size, n_batches=n_batches, shape=shape, in_order=in_order)


def fill(window):
  return [number for number, _ in window.fill()]


def take(window, shapes, n):
  return [number for number, _ in window.take(shapes, n)]


def test_a_batch_is_read_when_there_is_room_for_all_of_it():
  taken = []
  window = window_of([1] * 20, batch_size=2, n_batches=3, taken=taken)
  assert fill(window) == [] and len(taken) == 6
  assert take(window, [(1,)], 3) == [0, 1, 2]
  for number in (1, 2):
    window.put(number, f'result {number}')
  # The first one holds back the two behind it, and with them their places.
  assert window.release() == [] and fill(window) == [] and len(taken) == 6
  window.put(0, 'result 0')
  fill(window)
  assert len(taken) == 6
  assert window.release() == ['result 0', 'result 1', 'result 2']
  fill(window)
  assert len(taken) == 8 and not window.has_ended


def test_one_batch_is_given_out_before_the_next_is_read():
  for in_order in (True, False):
    taken = []
    window = window_of([1] * 5, batch_size=2, n_batches=1, in_order=in_order, taken=taken)
    fill(window)
    assert take(window, [(1,)], 9) == [0, 1]
    window.put(1, 'b')
    assert window.release() == ([] if in_order else ['b'])
    fill(window)
    assert len(taken) == 2
    window.put(0, 'a')
    assert window.release() == (['a', 'b'] if in_order else ['a'])
    fill(window)
    assert len(taken) == 4


def test_outcomes_as_they_come():
  window = window_of([1, None, 1, 1], n_batches=2, in_order=False)
  assert fill(window) == [1]
  window.put(1, 'refused')
  assert window.release() == ['refused']
  window.take([(1,)], 3)
  window.put(3, 'last')
  window.put(0, 'first')
  assert window.release() == ['last', 'first'] and window.release() == []


def test_slots_are_no_more_than_there_are_requests():
  for shapes, expected in (([1] * 9, 4), ([1, None, 1], 2), ([None] * 4, 4), ([None], 0), ([], 0)):
    window = window_of(shapes, batch_size=4, n_batches=1)
    fill(window)
    assert window.n_slots == expected, shapes
    assert window.has_ended == (len(shapes) < 4)


@pytest.mark.parametrize(
  ('shapes', 'expected'),
  [
    # All of them do not fill two slots.
    ([7], [7]),
    # The oldest is of a shape that does.
    ([7, 1, 7, 1], [7]),
    ([1, 7, 1, 7], [1]),
    # Few small ones go with the next larger, never the other way round.
    ([1, 7, 7, 7], [1, 7]),
    ([7, 1, 7, 7], [1, 7]),
    ([1, 1, 1, 7], [1]),
    ([7, 1, 1, 1], [7]),
    ([9, 1, 4, 1, 4, 7], [7, 9]),
    ([4, 1, 9, 1, 7, 7], [4, 7]),
    ([], []),
  ],
)
def test_shapes_that_share_a_program(shapes, expected):
  window = window_of(shapes, batch_size=2, n_batches=9)
  fill(window)
  assert window.next_shapes() == [(shape,) for shape in expected]
  requests = window.waiting(window.next_shapes())
  assert sorted(r.index for r in requests) == [i for i, shape in enumerate(shapes) if shape in expected]


def test_the_oldest_goes_first():
  window = window_of([7, 1, 7, 4, 1, 7], n_batches=9)
  fill(window)
  assert take(window, [(1,), (7,)], 3) == [0, 1, 2]
  assert take(window, [(1,), (7,)], 9) == [4, 5]
  assert take(window, [(1,), (7,)], 9) == []
  assert window.next_shapes() == [(4,)]


def test_everything_gets_its_turn():
  """Whatever comes, slots are taken by the oldest in the end, and no outcome is lost or doubled."""
  rng = random.Random(0)
  shapes = [rng.choice([1, 1, 1, 1, 3, 3, 9, None]) for _ in range(500)]
  for in_order in (True, False):
    window = window_of(shapes, batch_size=4, n_batches=5, in_order=in_order)
    given, running = [], []
    for _ in range(10_000):
      for number in fill(window):
        window.put(number, number)
      given += window.release()
      program = window.next_shapes()
      if not program and window.has_ended:
        break
      running += take(window, program, 4)
      while running:
        number = running.pop(rng.randrange(len(running)))
        window.put(number, number)
        given += window.release()
        running += take(window, program, 4 - len(running))
    assert sorted(given) == list(range(500))
    assert (given == sorted(given)) == in_order


# Decoding.


def records(n, seed=0, **knobs):
  """Requests of one shape: many prompts and lengths, half of them sampled, some with a seed of their own."""
  rng = random.Random(seed)
  made = []
  for index in range(n):
    record = {'prompt_ids': [rng.randrange(3, 99) for _ in range(rng.randrange(1, 17))], **knobs}
    record['gen_length'] = rng.randrange(4, 17)
    if index % 2:
      record['temperature'] = 0.8
    if index % 3 == 0:
      record['seed'] = rng.randrange(2**32)
    made.append(record)
  return made


def requests(settings, given):
  return [make_request(record, index, settings, None) for index, record in enumerate(given)]


def run(text, settings, entries, **options):
  _, params, tokenizer = text
  chunks = decode_requests(params, tokenizer, settings, entries, **{'n_batches': 64, **options})
  return list(itertools.chain.from_iterable(chunks))


def one_by_one(text, settings, entries, **options):
  """The loop without slots, a request at a time."""
  return run(text, settings, entries, batch_size=1, n_batches=1, decode=decode, **options)


def assert_equal(results, expected):
  """All fields, and traces to the bit but for margins, whose sums another batch may order otherwise."""
  assert len(results) == len(expected)
  for result, wanted in zip(results, expected, strict=True):
    mine, other = ({name: value for name, value in vars(r).items() if name != 'trace'} for r in (result, wanted))
    assert mine == other
    assert (result.trace is None) == (wanted.trace is None)
    for name in result.trace or ():
      compare = np.testing.assert_allclose if name == 'margin_per_step' else np.testing.assert_array_equal
      options = {'rtol': 1e-3, 'atol': 1e-4} if name == 'margin_per_step' else {}
      compare(result.trace[name], wanted.trace[name], err_msg=name, **options)


SETTINGS = {
  'wino': {'threshold': 0.3, 'threshold_back': 0.3, 'drift_radius': 0.25},
  'guided': {'decoder': 'llada', 'drift_radius': 0.25, 'cfg_scale': 0.5},
}


@pytest.mark.parametrize('name', SETTINGS)
def test_six_requests_in_two_slots(text, name):
  settings = make_settings(CONFIG, {'gen_length': 16, 'seed': 2**32 - 1, **SETTINGS[name]})
  entries = requests(settings, records(6, seed=2))
  expected = one_by_one(text, settings, entries, trace=True)
  # So that a token is never a matter of the order in which a sum is taken.
  assert min(result.trace['margin_per_step'].min() for result in expected) > 1e-4
  assert len({result.steps for result in expected}) > 2
  timing = Timing()
  assert_equal(run(text, settings, entries, batch_size=2, trace=True, timing=timing), expected)
  assert len(timing.programs) == 1 and timing.compile_seconds > 0 and timing.decode_seconds > 0
  # Seeds are those of the input, whatever slot and order.
  assert [r.seed for r in expected] == [
    row_seed(2**32 - 1, entry.index) if entry.seed is None else entry.seed for entry in entries
  ]


@pytest.fixture(scope='module')
def wino_run(text):
  """A run of many requests without traces, and what it gives one by one."""
  settings = make_settings(CONFIG, {'gen_length': 16, **SETTINGS['wino']})
  entries = requests(settings, records(20, seed=1))
  return settings, entries, run(text, settings, entries, batch_size=4)


def test_order(text, wino_run):
  settings, entries, expected = wino_run
  assert [result.index for result in expected] == list(range(20))
  as_they_come = run(text, settings, entries, batch_size=4, in_order=False)
  assert [result.index for result in as_they_come] != list(range(20))
  assert_equal(sorted(as_they_come, key=lambda result: result.index), expected)
  # In another order of the input, too.
  shuffled = random.Random(0).sample(entries, 20)
  again = run(text, settings, shuffled, batch_size=4)
  assert [result.index for result in again] == [request.index for request in shuffled]
  assert_equal(sorted(again, key=lambda result: result.index), expected)


def test_nothing_depends_on_the_chunks_and_no_number_compiles_anything(text, wino_run):
  settings, entries, expected = wino_run
  cfg, _ = next(iter(programs_of(text, settings, entries)))
  sizes = lambda: (decode_chunk._cache_size(), continuous._exchange_program(cfg, None)._cache_size())
  before = sizes()
  for max_steps, min_done in ((1, 1), (5, 4), (1000, 2)):
    results = run(text, settings, entries, batch_size=4, max_steps=max_steps, min_done=min_done)
    assert_equal(results, expected)
  other = make_settings(CONFIG, {'gen_length': 16, 'seed': 9, 'threshold': 0.9, 'max_age': 3, 'min_margin': 0.1})
  assert len(run(text, other, requests(other, records(7, temperature=0.3)), batch_size=4)) == 7
  assert sizes() == before


def programs_of(text, settings, entries):
  timing = Timing()
  run(text, settings, entries, batch_size=4, timing=timing)
  return timing.programs


def test_slots_are_refilled(text, wino_run, monkeypatch):
  """Counted: static batches of four would take the steps of the longest of each."""
  settings, entries, expected = wino_run
  steps = []
  chunk = continuous.decode_chunk

  def counted(params, state, max_steps, min_done, *, cfg):
    before = np.array(state.counters.steps)
    running = ~np.array(state.done)
    state = chunk(params, state, max_steps, min_done, cfg=cfg)
    steps.append((np.array(state.counters.steps) - before)[running].max())
    return state

  monkeypatch.setattr(continuous, 'decode_chunk', counted)
  assert_equal(run(text, settings, entries, batch_size=4), expected)
  batches = [[result.steps for result in expected[start : start + 4]] for start in range(0, 20, 4)]
  assert sum(map(sum, batches)) / 4 <= sum(steps) < sum(map(max, batches))


def test_chunks_run_while_results_are_looked_at(text, wino_run, monkeypatch):
  settings, entries, _ = wino_run
  started = []
  chunk = continuous.decode_chunk
  spy = lambda *args, **kwargs: started.append(1) or chunk(*args, **kwargs)
  monkeypatch.setattr(continuous, 'decode_chunk', spy)
  chunks = decode_requests(text[1], text[2], settings, entries, batch_size=4, n_batches=64)
  seen = [len(started) for _ in chunks]
  # The first results are given out when the second chunk is under way; the last ones have none behind them.
  assert seen == [*range(2, len(started) + 1), len(started)]


def test_a_chunk_that_finishes_nothing_gives_control_back(text, wino_run):
  settings, entries, expected = wino_run
  _, params, tokenizer = text
  chunks = list(decode_requests(params, tokenizer, settings, entries, batch_size=4, n_batches=64, max_steps=1))
  assert [] in chunks
  assert_equal(list(itertools.chain.from_iterable(chunks)), expected)


def test_refusals_between_requests(text, wino_run):
  settings, entries, expected = wino_run
  bad = [Refusal(index=100 + n, id=n, error='bad') for n in range(9)]
  mixed = [*bad[:4], *entries[:1], bad[4], *entries[1:3], *bad[5:]]
  results = run(text, settings, mixed, batch_size=4, n_batches=2)
  assert [result.index for result in results] == [100, 101, 102, 103, 0, 104, 1, 2, 105, 106, 107, 108]
  assert_equal([result for result in results if result.error is None], expected[:3])
  assert run(text, settings, bad, batch_size=4)[-1].error == 'bad'
  assert run(text, settings, [], batch_size=4) == []


def test_a_row_that_is_not_finite_does_not_spoil_its_successor(text):
  """One embedding is no number; who has that token in the prompt fails, and the next one in its slot does not."""
  model, params, tokenizer = text
  broken = {**params, 'embedding': params['embedding'].at[40].set(jnp.nan)}
  settings = make_settings(CONFIG, {'gen_length': 16, 'threshold': 0.3, 'threshold_back': 0.3})
  given = [{'prompt_ids': [40, 5] if index % 3 == 0 else [6 + index, 7]} for index in range(9)]
  entries = requests(settings, given)
  results = run((model, broken, tokenizer), settings, entries, batch_size=4)
  assert [result.error is not None for result in results] == [index % 3 == 0 for index in range(9)]
  whole = run(text, settings, entries, batch_size=4)
  assert_equal([r for r in results if not r.error], [r for r in whole if r.index % 3])


@pytest.mark.slow
def test_shapes_side_by_side(text):
  """Prompts and answers of several shapes, with traces: few programs, and every result is its own."""
  settings = make_settings(CONFIG, {'gen_length': 32, **SETTINGS['wino']})
  rng = random.Random(3)
  given = [
    {
      'prompt_ids': [rng.randrange(3, 99) for _ in range(rng.choice([3, 14, 30, 60]))],
      'gen_length': rng.choice([5, 16, 32]),
      'temperature': rng.choice([0.0, 0.8]),
    }
    for _ in range(30)
  ]
  entries = requests(settings, given)
  decoded = one_by_one(text, settings, entries, trace=True)
  # Without the few that have a decision so near a tie that the order of a sum may turn it.
  expected = [result for result in decoded if result.trace['margin_per_step'].min() > 1e-4]
  entries = [entries[result.index] for result in expected]
  assert len(entries) >= 20
  timing = Timing()
  assert_equal(run(text, settings, entries, batch_size=4, trace=True, timing=timing), expected)
  assert len(timing.programs) <= 6
  assert_equal(run(text, settings, entries, batch_size=4, n_batches=2, trace=True), expected)


@pytest.mark.slow
@pytest.mark.parametrize('sizes', ['data:2', 'data:2,model:2', 'data:4'])
def test_over_a_mesh(text, wino_run, sizes):
  settings, entries, expected = wino_run
  model, params, tokenizer = text
  mesh = make_mesh(sizes)
  spread = jax.device_put(params, param_shardings(CONFIG, mesh))
  timing = Timing()
  results = run((model, spread, tokenizer), settings, entries, batch_size=2, mesh=mesh, timing=timing)
  assert_equal(results, expected)
  assert {shape for _, shape in timing.programs} == {(2 * mesh.shape['data'], 16)}
  # Rows come and go without keys and values being sent.
  cfg, shape = next(iter(timing.programs))
  state = continuous._blank(cfg, *shape, mesh)
  slots = np.zeros(shape[0], np.int32)
  program = continuous._exchange_program(cfg, mesh)
  lowered = program.lower(state, slots, slots, continuous._arrivals([], *shape, cfg), np.uint32(0))
  sent = [exchange.bytes for exchange in collectives(lowered.compile().as_text(), mesh)]
  assert max(sent) < state.cache.k[0].nbytes / 4
  # Fewer requests than slots.
  few = run((model, spread, tokenizer), settings, entries[:1], batch_size=2, mesh=mesh)
  assert_equal(few, expected[:1])


@pytest.mark.slow
def test_three_thousand_requests_in_one_process(text):
  """Memory, programs and speed after a sixth of them are what they are in the end."""
  _, params, tokenizer = text
  settings = make_settings(CONFIG, {'gen_length': 16, **SETTINGS['wino']})
  total, first = 3000, 500
  entries = (
    make_request(record, index, settings, None)
    for index, record in enumerate(itertools.islice(itertools.cycle(records(97, seed=4)), total))
  )
  peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
  marks, count = [], 0
  for results in decode_requests(params, tokenizer, settings, entries, batch_size=8, n_batches=64, in_order=False):
    count += len(results)
    if count >= first * (len(marks) + 1):
      marks.append((peak(), time.perf_counter(), decode_chunk._cache_size()))
  assert count == total and len(marks) == 6
  memory, clock, programs = zip(*marks, strict=True)
  assert memory[-1] - memory[0] < 50, memory
  assert len(set(programs)) == 1
  # Wide, since other programs run beside a test; a growing cost of a request would triple it.
  seconds = np.diff(clock)
  assert seconds[-1] < 2 * seconds[0], seconds

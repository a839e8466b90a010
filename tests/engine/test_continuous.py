"""The engine and what feeds it. Prompts and answers are short and share one shape: a program costs seconds."""

import itertools
import random
import resource
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
from programs import CHUNK
from programs import quick
import pytest
from text_model import CONFIG

from archer_jax.engine import engine as continuous
from archer_jax.engine.batching import row_seed
from archer_jax.engine.engine import Engine
from archer_jax.engine.engine import Setup
from archer_jax.engine.engine import Timing
from archer_jax.engine.generate import _Feed
from archer_jax.engine.generate import decode_requests
from archer_jax.engine.requests import Refusal
from archer_jax.engine.requests import Request
from archer_jax.engine.requests import make_request
from archer_jax.engine.settings import make_settings
from archer_jax.loop.decode import decode
from archer_jax.loop.slots import decode_chunk
from archer_jax.mesh import make_mesh
from archer_jax.report.hlo import collectives
from archer_jax.sharding import param_shardings

DECODE = quick(decode)


def entry(index, shape=1):
  """A request that needs a program of one number, or for None something that needs none."""
  if shape is None:
    return Refusal(index=index, id=index, error='bad')
  return Request(index=index, id=index, prompt_ids=[3], seed=None, knobs={'shape': shape})


# The feed, without an engine.


def feed_of(shapes, *, batch_size=2, n_batches=3, in_order=True, taken=None):
  def entries():
    for index, shape in enumerate(shapes):
      if taken is not None:
        taken.append(index)
      yield entry(index, shape)

  return _Feed(entries(), batch_size=batch_size, n_batches=n_batches, in_order=in_order)


def fill(feed):
  return [number for number, _ in feed.fill()]


def test_a_batch_is_read_when_there_is_room_for_all_of_it():
  taken = []
  feed = feed_of([1] * 20, batch_size=2, n_batches=3, taken=taken)
  assert fill(feed) == [0, 1, 2, 3, 4, 5] and len(taken) == 6
  for number in (1, 2):
    feed.put(number, f'result {number}')
  # The first one holds back the two behind it, and with them their places.
  assert feed.release() == [] and fill(feed) == [] and len(taken) == 6
  feed.put(0, 'result 0')
  assert fill(feed) == [] and len(taken) == 6
  assert feed.release() == ['result 0', 'result 1', 'result 2']
  assert fill(feed) == [6, 7] and len(taken) == 8 and not feed.has_ended


def test_one_batch_is_given_out_before_the_next_is_read():
  for in_order in (True, False):
    taken = []
    feed = feed_of([1] * 5, batch_size=2, n_batches=1, in_order=in_order, taken=taken)
    assert fill(feed) == [0, 1]
    feed.put(1, 'b')
    assert feed.release() == ([] if in_order else ['b'])
    assert fill(feed) == [] and len(taken) == 2
    feed.put(0, 'a')
    assert feed.release() == (['a', 'b'] if in_order else ['a'])
    assert fill(feed) == [2, 3] and len(taken) == 4


def test_entries_come_as_they_are_read():
  """Before the next ones are asked for, so that what follows from one is known by then."""
  taken = []
  feed = feed_of([1, None, 1, 1], n_batches=2, taken=taken)
  reading = feed.fill()
  assert next(reading) == (0, entry(0)) and len(taken) == 2
  assert next(reading) == (1, entry(1, None)) and len(taken) == 2
  assert next(reading) == (2, entry(2)) and len(taken) == 4


def test_results_as_they_come():
  feed = feed_of([1, None, 1, 1], n_batches=2, in_order=False)
  assert fill(feed) == [0, 1, 2, 3]
  feed.put(1, 'refused')
  assert feed.release() == ['refused']
  feed.put(3, 'last')
  feed.put(0, 'first')
  assert feed.release() == ['last', 'first'] and feed.release() == []


def test_slots_are_no_more_than_there_are_requests():
  for shapes, expected in (([1] * 9, 4), ([1, None, 1], 2), ([None] * 4, 4), ([None], 0), ([], 0)):
    feed = feed_of(shapes, batch_size=4, n_batches=1)
    fill(feed)
    assert feed.n_slots == expected, shapes
    assert feed.has_ended == (len(shapes) < 4)


# The queue of the engine, without a model.


class Programs:
  """Stands for `Setup`: a program serves the largest number of its requests."""

  tokenizer = None

  def config(self, requests):
    shape = max(request.knobs['shape'] for request in requests)
    return types.SimpleNamespace(canvas_length=shape, guidance=False, trace_steps=0, requests=requests)


class FakeBatch:
  """Stands for the slots of a program: rows end in any order, at least one in a chunk.

  Attributes:
    made, rng: set by the fixture `queue`.
  """

  made = rng = None

  def __init__(self, setup, cfg, n_slots, prompt_length, timing, take):
    self.cfg, self.n_slots, self.owners, self.taken = cfg, n_slots, {}, []
    FakeBatch.made.append(self)
    self.refill(take)

  @property
  def is_empty(self):
    return not self.owners

  def refill(self, take):
    coming = take(self.n_slots - len(self.owners))
    self.taken.append([request.index for _, request in coming])
    self.owners |= dict(coming)

  def cancel(self, ticket):
    return self.owners.pop(ticket, None) is not None

  def advance(self, take):
    done = self.rng.sample(list(self.owners), self.rng.randint(1, len(self.owners)))
    finished = [(ticket, self.owners.pop(ticket), row, None) for row, ticket in enumerate(done)]
    self.refill(take)
    return finished


@pytest.fixture
def queue(monkeypatch):
  """Makes engines of two slots; a result is the index of its request."""
  monkeypatch.setattr(continuous, '_Batch', FakeBatch)
  monkeypatch.setattr(continuous, 'make_result', lambda request, *others: request.index)
  monkeypatch.setattr(FakeBatch, 'made', [])
  monkeypatch.setattr(FakeBatch, 'rng', random.Random(0))

  def make(shapes, n_slots=2):
    engine = Engine(Programs(), n_slots=n_slots)
    for index, shape in enumerate(shapes):
      assert engine.submit(entry(index, shape)) == index
    return engine

  return make


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
  ],
)
def test_shapes_that_share_a_program(queue, shapes, expected):
  engine = queue(shapes)
  engine.step()
  (batch,) = FakeBatch.made
  mine = [index for index, shape in enumerate(shapes) if shape in expected]
  assert sorted(request.index for request in batch.cfg.requests) == mine
  while len(FakeBatch.made) == 1 and not engine.is_idle:
    engine.step()
  assert sorted(itertools.chain.from_iterable(batch.taken)) == mine


def test_the_oldest_goes_first(queue):
  engine = queue([7, 1, 7, 4, 1, 7], n_slots=3)
  while not engine.is_idle:
    engine.step()
  taken = [list(itertools.chain.from_iterable(batch.taken)) for batch in FakeBatch.made]
  # Two of shape 1 and one of shape 4 fill three slots, without the oldest; those of shape 7 do by themselves.
  assert taken == [[0, 2, 5], [1, 3, 4]]
  assert FakeBatch.made[0].taken[0] == [0, 2, 5] and FakeBatch.made[1].taken[0] == [1, 3, 4]


def test_an_engine_with_nothing_to_do(queue):
  engine = queue([])
  assert engine.is_idle and engine.step() == [] and not engine.cancel(0)
  assert engine.submit(entry(5)) == 0 and not engine.is_idle
  assert engine.step() == [(0, 5)] and engine.is_idle and engine.step() == []


def test_everything_gets_its_turn(queue):
  """Whatever comes, whenever it comes and whatever is given up: no result is lost or doubled."""
  rng = random.Random(0)
  engine, given, cancelled, submitted = queue([], n_slots=4), [], set(), 0
  while submitted < 500 or not engine.is_idle:
    for _ in range(rng.randrange(4)):
      if submitted < 500:
        assert engine.submit(entry(1000 + submitted, rng.choice([1, 1, 1, 1, 3, 3, 9]))) == submitted
        submitted += 1
    if submitted and rng.random() < 0.2:
      ticket = rng.randrange(submitted)
      is_open = ticket not in cancelled and ticket not in dict(given)
      assert engine.cancel(ticket) == is_open
      cancelled |= {ticket} if is_open else set()
    given += engine.step()
  assert cancelled and sorted(given) == [(n, 1000 + n) for n in range(500) if n not in cancelled]


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


def setup_of(text, settings, **options):
  _, params, tokenizer = text
  return Setup(params=params, tokenizer=tokenizer, settings=settings, **options)


def stream(text, settings, entries, *, batch_size=4, n_batches=64, in_order=True, timing=None, **options):
  return decode_requests(
    setup_of(text, settings, **options),
    entries,
    batch_size=batch_size,
    n_batches=n_batches,
    in_order=in_order,
    timing=timing,
  )


def run(text, settings, entries, **options):
  return list(itertools.chain.from_iterable(stream(text, settings, entries, **options)))


def one_by_one(text, settings, entries, **options):
  """The loop without slots, a request at a time."""
  return run(text, settings, entries, batch_size=1, n_batches=1, decode=DECODE, **options)


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
  'wino': {'threshold': 0.3, 'threshold_back': 0.3, 'refresh_distance': 5},
  'guided': {'decoder': 'llada', 'refresh_distance': 5, 'cfg_scale': 0.5},
}


@pytest.mark.parametrize('name', SETTINGS)
def test_six_requests_in_two_slots(text, name):
  settings = make_settings(CONFIG, {'decoder': 'wino', 'gen_length': 16, 'seed': 2**32 - 1, **SETTINGS[name]})
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
  settings = make_settings(CONFIG, {'decoder': 'wino', 'gen_length': 16, **SETTINGS['wino']})
  entries = requests(settings, records(20, seed=1))
  return settings, entries, run(text, settings, entries)


def test_order(text, wino_run):
  settings, entries, expected = wino_run
  assert [result.index for result in expected] == list(range(20))
  as_they_come = run(text, settings, entries, in_order=False)
  assert [result.index for result in as_they_come] != list(range(20))
  assert_equal(sorted(as_they_come, key=lambda result: result.index), expected)
  # In another order of the input, too.
  shuffled = random.Random(0).sample(entries, 20)
  again = run(text, settings, shuffled)
  assert [result.index for result in again] == [request.index for request in shuffled]
  assert_equal(sorted(again, key=lambda result: result.index), expected)


def test_nothing_depends_on_the_chunks_and_no_number_compiles_anything(text, wino_run):
  settings, entries, expected = wino_run
  cfg, _ = next(iter(programs_of(text, settings, entries)))
  sizes = lambda: (CHUNK._cache_size(), continuous._exchange_program(cfg, None)._cache_size())
  before = sizes()
  for max_steps, min_done in ((1, 1), (5, 4), (1000, 2)):
    results = run(text, settings, entries, max_steps=max_steps, min_done=min_done)
    assert_equal(results, expected)
  other = make_settings(
    CONFIG, {'decoder': 'wino', 'gen_length': 16, 'seed': 9, 'threshold': 0.9, 'max_age': 3, 'min_margin': 0.1}
  )
  assert len(run(text, other, requests(other, records(7, temperature=0.3)))) == 7
  assert sizes() == before


def programs_of(text, settings, entries):
  timing = Timing()
  run(text, settings, entries, timing=timing)
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
  assert_equal(run(text, settings, entries), expected)
  batches = [[result.steps for result in expected[start : start + 4]] for start in range(0, 20, 4)]
  assert sum(map(sum, batches)) / 4 <= sum(steps) < sum(map(max, batches))


def test_chunks_run_while_results_are_looked_at(text, wino_run, monkeypatch):
  settings, entries, _ = wino_run
  started = []
  chunk = continuous.decode_chunk
  spy = lambda *args, **kwargs: started.append(1) or chunk(*args, **kwargs)
  monkeypatch.setattr(continuous, 'decode_chunk', spy)
  seen = [len(started) for _ in stream(text, settings, entries)]
  # The first results are given out when the second chunk is under way; the last ones have none behind them.
  assert seen == [*range(2, len(started) + 1), len(started)]


def test_a_chunk_that_finishes_nothing_gives_control_back(text, wino_run):
  settings, entries, expected = wino_run
  chunks = list(stream(text, settings, entries, max_steps=1))
  assert [] in chunks
  assert_equal(list(itertools.chain.from_iterable(chunks)), expected)


def drain(engine):
  finished = []
  while not engine.is_idle:
    finished += engine.step()
  return finished


def test_a_request_that_waits_is_given_up(text, wino_run):
  settings, entries, expected = wino_run
  engine = Engine(setup_of(text, settings), n_slots=4)
  tickets = [engine.submit(request) for request in entries]
  assert tickets == sorted(set(tickets))
  # Before anything runs, and while other requests do.
  assert engine.cancel(tickets[1]) and not engine.cancel(tickets[1])
  finished = engine.step()
  assert engine.cancel(tickets[19]) and not engine.cancel(tickets[19])
  finished = dict(finished + drain(engine))
  kept = [n for n in range(20) if n not in (1, 19)]
  assert sorted(finished) == [tickets[n] for n in kept]
  assert_equal([finished[tickets[n]] for n in kept], [expected[n] for n in kept])
  # What is finished cannot be given up, nor what there is not.
  assert not engine.cancel(tickets[0]) and not engine.cancel(99)


def test_a_request_that_runs_is_given_up(text, wino_run, monkeypatch):
  settings, entries, expected = wino_run
  # A chunk is a step.
  engine = Engine(setup_of(text, settings, max_steps=1), n_slots=4)
  tickets = [engine.submit(request) for request in entries[:6]]
  victim = max(range(4), key=lambda n: expected[n].steps)
  assert expected[victim].steps > 3
  finished = engine.step()
  assert engine.cancel(tickets[victim]) and not engine.cancel(tickets[victim])
  # The step under way is its last: then the next request has its slot.
  slots = []
  spy = lambda *args, **kwargs: slots.append(np.array(args[1].seed)) or CHUNK(*args, **kwargs)
  monkeypatch.setattr(continuous, 'decode_chunk', spy)
  finished += engine.step()
  assert expected[victim].seed not in slots[0] and expected[4].seed in slots[0]
  finished = dict(finished + drain(engine))
  kept = [n for n in range(6) if n != victim]
  assert sorted(finished) == [tickets[n] for n in kept]
  assert_equal([finished[tickets[n]] for n in kept], [expected[n] for n in kept])


def test_an_engine_goes_on_after_all_is_given_up(text, wino_run):
  settings, entries, expected = wino_run
  engine = Engine(setup_of(text, settings, max_steps=1), n_slots=4)
  tickets = [engine.submit(request) for request in entries[:6]]
  assert engine.step() == []
  assert all(map(engine.cancel, tickets)) and not any(map(engine.cancel, tickets))
  assert engine.step() == [] and engine.is_idle
  again = [engine.submit(request) for request in entries[:6]]
  assert not set(again) & set(tickets)
  finished = dict(drain(engine))
  assert_equal([finished[ticket] for ticket in again], expected[:6])


def test_requests_that_come_while_others_run(text, wino_run):
  settings, entries, expected = wino_run
  engine, finished = Engine(setup_of(text, settings, max_steps=2), n_slots=4), []
  for request in entries:
    assert engine.submit(request) == request.index
    finished += engine.step()
  finished = dict(finished + drain(engine))
  assert_equal([finished[index] for index in range(20)], expected)


def test_refusals_between_requests(text, wino_run):
  settings, entries, expected = wino_run
  bad = [Refusal(index=100 + n, id=n, error='bad') for n in range(9)]
  mixed = [*bad[:4], *entries[:1], bad[4], *entries[1:3], *bad[5:]]
  results = run(text, settings, mixed, n_batches=2)
  assert [result.index for result in results] == [100, 101, 102, 103, 0, 104, 1, 2, 105, 106, 107, 108]
  assert_equal([result for result in results if result.error is None], expected[:3])
  assert run(text, settings, bad)[-1].error == 'bad'
  assert run(text, settings, []) == []


def test_a_row_that_is_not_finite_does_not_spoil_its_successor(text):
  """One embedding is no number; who has that token in the prompt fails, and the next one in its slot does not."""
  model, params, tokenizer = text
  broken = {**params, 'embedding': params['embedding'].at[40].set(jnp.nan)}
  settings = make_settings(CONFIG, {'decoder': 'wino', 'gen_length': 16, 'threshold': 0.3, 'threshold_back': 0.3})
  given = [{'prompt_ids': [40, 5] if index % 3 == 0 else [6 + index, 7]} for index in range(9)]
  entries = requests(settings, given)
  results = run((model, broken, tokenizer), settings, entries)
  assert [result.error is not None for result in results] == [index % 3 == 0 for index in range(9)]
  whole = run(text, settings, entries)
  assert_equal([r for r in results if not r.error], [r for r in whole if r.index % 3])


@pytest.mark.slow
def test_shapes_side_by_side(text):
  """Prompts and answers of several shapes, with traces: few programs, and every result is its own."""
  settings = make_settings(CONFIG, {'decoder': 'wino', 'gen_length': 32, **SETTINGS['wino']})
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
  assert_equal(run(text, settings, entries, trace=True, timing=timing), expected)
  assert len(timing.programs) <= 6
  assert_equal(run(text, settings, entries, n_batches=2, trace=True), expected)


@pytest.mark.parametrize(
  'reuse',
  ['dual', *(pytest.param(name, marks=pytest.mark.slow) for name in ('prefix', 'dkv', 'dkv_greedy', 'dllm'))],
)
def test_forty_prompts_are_a_program_for_each_pair_of_buckets(text, reuse):
  """Whatever the lengths, schedules, blocks and clocks of the rows."""
  settings = make_settings(CONFIG, {'decoder': 'llada', 'reuse': reuse, 'block_length': 4, 'gen_length': 16})
  rng = random.Random(4)
  clocks = {'dkv': ['reuse_interval'], 'dkv_greedy': ['reuse_interval'], 'dllm': ['prompt_interval']}.get(reuse, [])
  given = [
    {'prompt_ids': [rng.randrange(3, 99) for _ in range(rng.choice([2, 9, 16, 20, 31]))], 'gen_length': length}
    | {'steps': rng.randrange(8, length + 1)}
    | {name: rng.randrange(2, 9) for name in clocks}
    for length in (rng.choice([9, 12, 16]) for _ in range(40))
  ]
  timing = Timing()
  results = run(text, settings, requests(settings, given), timing=timing, batch_size=4)
  assert len(results) == 40 and all(result.error is None for result in results)
  shapes = {(cfg.canvas_length, shape[1]) for cfg, shape in timing.programs}
  assert len(timing.programs) == len(shapes) == 2


@pytest.mark.slow
@pytest.mark.parametrize('sizes', ['data:2', 'data:2,model:2', 'data:4'])
def test_over_a_mesh(text, wino_run, monkeypatch, sizes):
  # A part of a larger program cannot have its own options.
  monkeypatch.setattr(continuous, 'decode_chunk', decode_chunk)
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
  assert max(sent) < state.kept.kv[0].k[0].nbytes / 4
  # Fewer requests than slots.
  few = run((model, spread, tokenizer), settings, entries[:1], batch_size=2, mesh=mesh)
  assert_equal(few, expected[:1])


@pytest.mark.slow
def test_three_thousand_requests_in_one_process(text):
  """Memory, programs and speed after a sixth of them are what they are in the end."""
  settings = make_settings(CONFIG, {'decoder': 'wino', 'gen_length': 16, **SETTINGS['wino']})
  total, first = 3000, 500
  entries = (
    make_request(record, index, settings, None)
    for index, record in enumerate(itertools.islice(itertools.cycle(records(97, seed=4)), total))
  )
  peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
  marks, count = [], 0
  for results in stream(text, settings, entries, batch_size=8, in_order=False):
    count += len(results)
    if count >= first * (len(marks) + 1):
      marks.append((peak(), time.perf_counter(), CHUNK._cache_size()))
  assert count == total and len(marks) == 6
  memory, clock, programs = zip(*marks, strict=True)
  assert memory[-1] - memory[0] < 50, memory
  assert len(set(programs)) == 1
  # Wide, since other programs run beside a test; a growing cost of a request would triple it.
  seconds = np.diff(clock)
  assert seconds[-1] < 2 * seconds[0], seconds

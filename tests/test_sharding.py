"""Decoding over a mesh of eight devices on the CPU: equal results, nobody waits, nothing is copied."""

import collections
import dataclasses
import functools
from unittest import mock

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import programs
import programs_text
import pytest

from archer_jax import sharding
from archer_jax.config import DecodeConfig
from archer_jax.loop import decode as decode_module
from archer_jax.loop.decode import decode
from archer_jax.loop.slots import decode_chunk
from archer_jax.mesh import make_mesh
from archer_jax.model import abstract_params
from archer_jax.report.hlo import collectives
from archer_jax.reuse.prompt import forward as forwards
from archer_jax.types import DecodeState

ROWS = 24
# Prompts without a decision nearer to a tie than 1e-4, so that equality is exact.
PROMPT_SEEDS = {'wino': 201, 'llada': 201, 'dream': 232, 'saber': 201, 'saber shifted': 232}
MESHES = ['data:2', 'data:4', 'data:8', 'data:2,model:2', 'model:4']
# Those of the fast tests; a program costs seconds.
FAST = [('wino', 'data:2,model:2'), ('llada', 'data:4')]
SLOW = [(decoder, text) for decoder in ('wino', 'llada') for text in MESHES if (decoder, text) not in FAST]
SLOW += [('dream', 'data:8'), ('dream', 'data:2,model:2')]
SLOW += [('saber', 'data:4'), ('saber', 'data:2,model:2'), ('saber shifted', 'data:2,model:2')]


def mixed_requests(cfg, seed):
  """Arguments of `init_state`: 24 requests of many lengths, sampled or not, that refresh by drift."""
  lengths = np.linspace(1, programs.PROMPT_LENGTH, ROWS).astype(int)
  values = {'gen_length': np.array([24, 17, 8, 5, 21, 12] * 4)}
  values['refresh_distance'] = values['gen_length'] // 4 + 1
  values['temperature'] = np.where(np.arange(ROWS) % 2, 0.8, 0.0)
  if cfg.decoder in ('llada', 'dream'):
    values['steps'] = np.array([24, 6, 8, 3, 10, 12] * 4)
  return programs.start(programs.prompts(seed, lengths), cfg, **values)


def spread(state, cfg, mesh):
  """The same state over a mesh."""
  return sharding.init_sharded_state(
    state.prompt_tokens, state.prompt_valid, state.knobs, state.seed, cfg=cfg, mesh=mesh
  )


@dataclasses.dataclass(frozen=True, repr=False)
class Run:
  """A compiled program of a mesh and what it did."""

  seed: int
  cfg: DecodeConfig
  mesh: jax.sharding.Mesh
  before: DecodeState
  after: DecodeState
  text: str


def run_over(mesh, golden, decoder):
  cfg = programs.config(golden, decoder, logprobs=True)
  seed = PROMPT_SEEDS[decoder]
  before = spread(mixed_requests(cfg, seed), cfg, mesh)
  params = jax.device_put(golden.params, sharding.param_shardings(cfg.model, mesh))
  program = sharding.program(decode, mesh, cfg).lower(params, before, ()).compile(programs.QUICK)
  return Run(seed, cfg, mesh, before, program(params, before, ()), program.as_text())


@pytest.mark.parametrize(
  ('decoder', 'text'), FAST + [pytest.param(*case, marks=pytest.mark.slow, id='-'.join(case)) for case in SLOW]
)
def test_decoding_over_a_mesh(request, decoder, text):
  """One test, since the program that all of it is about takes seconds to compile."""
  golden = programs.golden_of(request, decoder)
  run = run_over(make_mesh(text), golden, decoder)
  check_results(run, golden.params)
  check_exchanges(run)
  check_copies(run)
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves(run.before))
  assert jax.tree.map(lambda leaf: leaf.sharding, run.after) == sharding.state_shardings(run.cfg, run.mesh)


def check_results(run, params):
  """Tokens after every step, steps, refreshes and log-probabilities are those of the same requests without a mesh."""
  state = mixed_requests(run.cfg, run.seed)
  expected = jax.device_get(programs.loop(run.cfg)(params, state))
  steps, refreshes = expected.counters.steps, expected.counters.refreshes
  sure = np.array([expected.trace['margin'][row, :n].min() for row, n in enumerate(steps)]) > 1e-4
  # Saber compares every taken token with every other one: some of its rows are nearer to a tie, and not looked at.
  assert sure.all() if run.cfg.decoder != 'saber' else sure.sum() > ROWS / 3
  # They tell something: rows end at different times, and the longer ones refresh in some of their steps.
  long = expected.gen_length > 16
  assert len(set(steps.tolist())) >= 5 and np.all((refreshes > 1) & (refreshes < steps), where=long)
  got = jax.device_get(run.after)
  for name in ('canvas', 'status', 'counters'):
    jax.tree.map(
      lambda mine, other: np.testing.assert_array_equal(mine[sure], other[sure]),
      getattr(got, name),
      getattr(expected, name),
    )
  np.testing.assert_array_equal(got.logprobs['commit_steps'][sure], expected.logprobs['commit_steps'][sure])
  mine, other = (state.logprobs['token_logprobs'][sure] for state in (got, expected))
  np.testing.assert_allclose(mine, other, atol=1e-4)
  for row, n in ((row, steps[row]) for row in np.flatnonzero(sure)):
    for name in ('canvas', 'refresh', 'accept', 'remask', 'distance', 'drift', 'age'):
      np.testing.assert_array_equal(got.trace[name][row, :n], expected.trace[name][row, :n])


def check_exchanges(run):
  """Devices talk over `model` alone, and not about more than they must."""
  found = collectives(run.text, run.mesh)
  n_data, n_model = run.mesh.devices.shape
  assert {exchange.axes for exchange in found} == ({('model',)} if n_model > 1 else set())
  if n_model == 1:
    return
  # Sums of a pass: the embedding's, and two a layer; the row loop ends at the last layer's keys and values.
  layers = run.cfg.model.n_layers
  passes = [exchange for exchange in found if 'Transformer' in exchange.text]
  sums = collections.Counter(exchange.place for exchange in passes if exchange.kind == 'all-reduce')
  assert sums[('while', 'while')] == 2 * layers - 1
  assert sums[('while', 'cond:0')] == sums[('while', 'cond:1')] == 2 * layers + 1
  # For the decision maxima, sums and candidates are exchanged, a few numbers a row, not its logits.
  decided = run.cfg.block_length if run.cfg.decoder in ('wino', 'llada') else run.cfg.canvas_length
  shadow = run.cfg.block_length if run.cfg.decoder == 'wino' else 0
  rows = ROWS // n_data * (decided + shadow)
  decision = [exchange.bytes for exchange in found if exchange.place == ('while',)]
  assert decision and max(decision) <= rows * 4 * 8
  # Keys and values have an axis of heads beside rows, lengths and columns: they are never sent.
  assert all(len(shape) < 4 for exchange in passes for shape in exchange.shapes)


def check_copies(run):
  """Kept keys and values are written in place on every device."""
  model, (n_data, n_model) = run.cfg.model, run.mesh.devices.shape
  local = (ROWS // n_data, model.n_kv_heads // n_model, programs.PROMPT_LENGTH, model.head_dim)
  assert run.after.kept.kv[0].k[0].addressable_shards[0].data.shape == local
  found = programs_text.instructions_inside_loops(run.text)
  assert sorted(local) in [sorted(instruction.shape) for instruction in found]
  assert [i.text for i in found if i.opcode in ('copy', 'copy-start') and sorted(i.shape) == sorted(local)] == []


# Two rows of each shard need so many steps; no shard waits for the other's.
SCHEDULES = np.array([4, 3, 60, 30])


@pytest.fixture(scope='module')
def shards(llada_tiny):
  """Two shards, of which one is done long before the other."""
  cfg = DecodeConfig(model=llada_tiny.config, decoder='llada', canvas_length=64, block_length=64, early_stop=False)
  mesh = make_mesh('data:2')
  # Rows refresh at every third, second, second and seventh step: sometimes together with their neighbour, mostly not.
  values = {'gen_length': 64, 'steps': SCHEDULES, 'refresh_interval': np.array([3, 2, 2, 7])}
  start = functools.partial(programs.start, programs.prompts(3, (5, 20, 9, 16)), cfg, length=32, **values)
  return cfg, mesh, jax.device_put(llada_tiny.params, sharding.param_shardings(cfg.model, mesh)), start


def test_a_shard_executes_its_own_steps_and_turns_of_the_row_loop(shards):
  """Counted while the loop runs: every step in every row of its shard, every turn by the row that it refreshes."""
  cfg, mesh, params, start = shards
  turns = collections.Counter()
  step, refresh_row = decode_module.decode_step, forwards.refresh_row

  def counting_step(params, state, *, cfg):
    after, record = step(params, state, cfg=cfg)
    # Done rows keep all they have; this number goes on as long as their shard does.
    counters = dataclasses.replace(after.counters, nfe=state.counters.nfe + 1)
    return dataclasses.replace(after, counters=counters), record

  def counting_row(params, state, kv, row, cfg):
    jax.debug.callback(lambda seed: turns.update([int(seed)]), state.seed[row])
    return refresh_row(params, state, kv, row, cfg)

  def loop(params, state, *, cfg):
    return decode.__wrapped__(params, state, cfg=cfg)

  counted_step = mock.patch.object(decode_module, 'decode_step', counting_step)
  with counted_step, mock.patch.object(forwards, 'refresh_row', counting_row):
    program = sharding.program(loop, mesh, cfg).lower(params, spread(start(), cfg, mesh), ())
  state = program.compile(programs.QUICK)(params, spread(start(), cfg, mesh), ())
  jax.effects_barrier()
  np.testing.assert_array_equal(state.counters.steps, SCHEDULES)
  np.testing.assert_array_equal(state.counters.nfe, [4, 4, 60, 60])
  # Steps at which a row refreshes and its neighbour, if it still runs, does not.
  intervals = np.asarray(state.knobs.refresh_interval)
  alone = [0] * 4
  for row, beside in ((0, 1), (1, 0), (2, 3), (3, 2)):
    for n in range(0, SCHEDULES[row], intervals[row]):
      alone[row] += n < SCHEDULES[beside] and n % intervals[beside] > 0
  assert [turns[row] for row in range(4)] == alone == [0, 1, 12, 2]


def test_a_chunk_ends_on_every_shard_by_its_own_rows(shards):
  cfg, mesh, params, start = shards
  with mock.patch.object(jax, 'jit', functools.partial(jax.jit, compiler_options=programs.QUICK)):
    # Made here, so that it compiles quickly, and kept for the calls.
    sharding.program(decode_chunk, mesh, cfg)
  chunk = sharding.sharded(decode_chunk, mesh)
  state = chunk(params, spread(start(), cfg, mesh), 100, 1, cfg=cfg)
  np.testing.assert_array_equal(state.counters.steps, [3, 3, 30, 30])
  state = chunk(params, state, np.int32(20), 1, cfg=cfg)
  np.testing.assert_array_equal(state.counters.steps, [4, 3, 50, 30])
  state = chunk(params, state, 100, 2, cfg=cfg)
  np.testing.assert_array_equal(state.counters.steps, SCHEDULES)
  # Neither number nor its type is part of the program.
  assert sharding.program(decode_chunk, mesh, cfg)._cache_size() == 1
  np.testing.assert_array_equal(
    state.canvas, programs.loop(cfg)(jax.device_put(params, jax.devices()[0]), start()).canvas
  )


@pytest.mark.parametrize(('decoder', 'guidance'), [('llada', False), ('llada', True), ('saber', False)])
def test_state_is_made_on_its_devices(llada_tiny, decoder, guidance):
  cfg, mesh = programs.config(llada_tiny, decoder, guidance=guidance), make_mesh('data:4,model:2')
  want = mixed_requests(cfg, 0)
  got = spread(want, cfg, mesh)
  jax.tree.map(np.testing.assert_array_equal, got, want)
  assert jax.tree.map(lambda leaf: leaf.sharding, got) == sharding.state_shardings(cfg, mesh)
  assert len(got.kept.kv) == 1 + guidance
  for leaf in (leaf for kept in got.kept.kv for leaf in kept.k + kept.v):
    assert leaf.sharding == NamedSharding(mesh, P('data', 'model', None, None))
  assert got.canvas.sharding == NamedSharding(mesh, P('data'))
  buffers = {shard.data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(got) for shard in leaf.addressable_shards}
  assert len(buffers) == mesh.size * len(jax.tree.leaves(got))


def test_a_vocabulary_that_does_not_divide_is_on_every_device(llada_tiny):
  mesh = make_mesh('data:2,model:2')
  config = dataclasses.replace(llada_tiny.config, vocab_size=321)
  shardings = sharding.param_shardings(config, mesh)
  assert shardings['embedding'].is_fully_replicated and shardings['head']['kernel'].is_fully_replicated
  assert not sharding.param_shardings(llada_tiny.config, mesh)['embedding'].is_fully_replicated
  # Arrays of these shapes can be there.
  zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract_params(config))
  assert jax.tree.map(lambda leaf: leaf.sharding, jax.device_put(zeros, shardings)) == shardings


def test_what_does_not_divide_is_refused_with_both_numbers(llada_tiny):
  cfg = programs.config(llada_tiny, 'wino')
  state = mixed_requests(cfg, 0)
  with pytest.raises(ValueError, match='n_heads must be a multiple of the mesh axis model, got n_heads=4 and model=8'):
    spread(state, cfg, make_mesh('model:8'))
  odd = dataclasses.replace(cfg.model, d_ff=127)
  with pytest.raises(ValueError, match='d_ff must be a multiple of the mesh axis model, got d_ff=127 and model=2'):
    sharding.param_shardings(odd, make_mesh('model:2'))
  mesh = make_mesh('data:8')
  for rows in (4, 12):
    part = programs.start(programs.prompts(0, (3,) * rows), cfg)
    message = f'rows of a batch must be a multiple of the mesh axis data, got {rows} rows and data=8'
    with pytest.raises(ValueError, match=message):
      spread(part, cfg, mesh)
    with pytest.raises(ValueError, match=message):
      sharding.sharded(decode, mesh)(llada_tiny.params, part, cfg=cfg)
    # Nothing was donated before it was refused.
    assert not part.canvas.is_deleted()
  with pytest.raises(ValueError, match='gen_length must be at most canvas_length=24, got 25'):
    spread(programs.set_knobs(state, gen_length=25), cfg, mesh)

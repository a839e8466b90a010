"""Every reuse method: rows never influence each other, nothing is copied, nothing is fed that the method saves.

The rows of the batches here have lengths, schedules and intervals of their own, so that they stand in different blocks
and at different turns of their clocks.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import programs
import programs_text
import pytest

from archer_jax import sharding
from archer_jax import specs
from archer_jax.loop.decode import decode
from archer_jax.loop.slots import insert_rows
from archer_jax.loop.slots import retire_rows
from archer_jax.loop.step import decode_step
from archer_jax.loop.step import init_state
from archer_jax.mesh import make_mesh
from archer_jax.model import abstract_params
from archer_jax.types import Counters
from archer_jax.types import Knobs

LENGTHS = (3, 9, 17, 30, 44, 60)
ORDER = (4, 1, 5, 0, 3, 2)
KNOBS = {
  'gen_length': (24, 17, 8, 5, 24, 12),
  'steps': (24, 9, 8, 5, 12, 12),
  'threshold': (0.1, 0.2, 0.05, 0.3, 0.15, 0.1),
  'reuse_interval': (2, 3, 4, 8, 5, 3),
  'window': (2, 0, 3, 5, 1, 4),
  'prompt_interval': (6, 4, 3, 50, 8, 5),
  'response_interval': (3, 2, 4, 3, 5, 1),
  'transfer_ratio': (0.25, 0.5, 0.0, 1.0, 0.1, 0.25),
}
# Method, decoder, and what else shapes the program.
SETTINGS = {
  'prefix': ('llada', {'reuse': 'prefix'}),
  'dual': ('parallel', {'reuse': 'dual'}),
  'dual under wino': ('wino', {'reuse': 'dual'}),
  'dual under dream': ('dream', {'reuse': 'dual', 'block_length': 8}),
  'prefix under saber': ('saber', {'reuse': 'prefix'}),
  'dkv': ('llada', {'reuse': 'dkv'}),
  'dkv under dream': ('dream', {'reuse': 'dkv', 'dkv_shift': 'un_right'}),
  'dkv_greedy': ('llada', {'reuse': 'dkv_greedy', 'remasking': 'random'}),
  'dkv_prefill': ('dream', {'reuse': 'dkv_prefill'}),
  'dllm': ('llada', {'reuse': 'dllm'}),
  'dllm under wino': ('wino', {'reuse': 'dllm'}),
}
DEFAULT = ('prefix', 'dual', 'dual under wino', 'dkv under dream', 'dkv_greedy', 'dkv_prefill', 'dllm')
# One a prompt: none has a decision nearer to a tie than 1e-4.
SEEDS = dict.fromkeys(SETTINGS, (1,) * 6)


def some(names):
  return [pytest.param(name, marks=[] if name in names else [pytest.mark.slow]) for name in SETTINGS]


def setting_of(request, name):
  decoder, changes = SETTINGS[name]
  golden = programs.golden_of(request, decoder)
  return golden.params, programs.config(golden, decoder, **changes)


def start(name, cfg, rows, **changes):
  """The first state of a batch of these rows of the six prompts."""
  ids = [programs.prompts(SEEDS[name][row], LENGTHS)[row] for row in rows]
  knobs = {knob: np.array(values)[list(rows)] for knob, values in KNOBS.items()}
  if cfg.decoder == 'dream' and cfg.block_length < cfg.canvas_length:
    knobs['steps'] = np.array((24, 9, 8, 5, 12, 12))[list(rows)]
  return programs.start(ids, cfg, seeds=[100 + row for row in rows], **knobs, **changes)


def seen(state, slot):
  """What a caller sees of a row."""
  steps = int(state.counters.steps[slot])
  counts = {field.name: int(getattr(state.counters, field.name)[slot]) for field in dataclasses.fields(Counters)}
  trace = {name: state.trace[name][slot, :steps].tolist() for name in ('canvas', 'reason', 'accept', 'remask')}
  return {**counts, **trace, 'status': int(state.status[slot])}


@pytest.fixture(scope='module')
def alone(request):
  """A function from a setting's name to what each row is by itself."""

  @functools.cache
  def of(name):
    params, cfg = setting_of(request, name)
    run = lambda row: jax.device_get(programs.loop(cfg)(params, start(name, cfg, [row])))
    states = [run(row) for row in range(6)]
    assert min(state.trace['margin'][0, : state.counters.steps[0]].min() for state in states) > 1e-4
    return [seen(state, 0) for state in states]

  return of


@pytest.mark.parametrize(
  ('name', 'size'),
  [
    *(pytest.param(name, 6, marks=[] if name in DEFAULT else [pytest.mark.slow]) for name in SETTINGS),
    *(pytest.param(name, 3, marks=[] if name == 'dkv' else [pytest.mark.slow]) for name in SETTINGS),
    *(pytest.param(name, 2, marks=[] if name == 'dllm' else [pytest.mark.slow]) for name in SETTINGS),
  ],
)
def test_rows_of_a_batch_are_as_alone(request, alone, name, size):
  params, cfg = setting_of(request, name)
  for first in range(0, 6, size):
    rows = ORDER[first : first + size]
    state = jax.device_get(programs.loop(cfg)(params, start(name, cfg, rows)))
    for slot, row in enumerate(rows):
      assert seen(state, slot) == alone(name)[row], f'prompt {row} in slot {slot}'


@pytest.mark.parametrize('name', some(('dual', 'dkv under dream', 'dllm')))
def test_padding_changes_nothing(request, alone, name):
  params, cfg = setting_of(request, name)
  state = start(name, cfg, [2], length=LENGTHS[2])
  assert seen(jax.device_get(programs.loop(cfg)(params, state)), 0) == alone(name)[2]
  # Nor does what it holds: a token that nobody writes, without numbers.
  pad = cfg.model.vocab_size - 1
  broken = {**params, 'embedding': params['embedding'].at[pad].set(jnp.nan)}
  state = start(name, cfg, [2], pad=pad)
  assert seen(jax.device_get(programs.loop(cfg)(broken, state)), 0) == alone(name)[2]


@pytest.mark.parametrize('name', some(('dual', 'dkv', 'dllm')))
def test_a_row_in_a_slot_that_another_left(request, alone, name):
  """Rows enter a running batch, over what others kept."""
  params, cfg = setting_of(request, name)
  state = start(name, cfg, [0, 4, 2])
  state = programs.CHUNK(params, state, np.int32(100), np.int32(1), cfg=cfg)
  (slot,) = np.flatnonzero(state.done)
  state, finished = retire_rows(state, np.array([slot], np.int32))
  assert seen(jax.device_get(finished), 0) == alone(name)[(0, 4, 2)[slot]]
  state = insert_rows(state, np.array([slot], np.int32), start(name, cfg, [1]), cfg=cfg)
  state = programs.CHUNK(params, state, np.int32(100), np.int32(3), cfg=cfg)
  rows = [0, 4, 2]
  rows[slot] = 1
  for place, row in enumerate(rows):
    assert seen(jax.device_get(state), place) == alone(name)[row]


@pytest.mark.parametrize('name', some(('dkv_greedy',)))
def test_over_a_mesh(request, alone, name):
  params, cfg = setting_of(request, name)
  mesh = make_mesh('data:2,model:2')
  state = start(name, cfg, range(6))
  state = jax.device_put(state, sharding.state_shardings(cfg, mesh))
  params = jax.device_put(params, sharding.param_shardings(cfg.model, mesh))
  program = sharding.program(decode, mesh, cfg).lower(params, state, ()).compile(programs.QUICK)
  state = jax.device_get(program(params, state, ()))
  for row in range(6):
    assert seen(state, row) == alone(name)[row]


BATCH = 4


@functools.cache
def _abstract(cfg, length):
  tokens = jax.ShapeDtypeStruct((BATCH, length), jnp.int32)
  make = lambda tokens: init_state(
    tokens,
    tokens >= 0,
    Knobs.make(BATCH, gen_length=cfg.canvas_length),
    jnp.zeros((BATCH,), jnp.uint32),
    cfg=cfg,
  )
  return jax.eval_shape(make, tokens)


@pytest.mark.parametrize('name', some(('dual', 'dkv', 'dllm')))
def test_no_copy_of_what_is_kept_in_the_loop(request, name):
  """Rows refresh or not as they like, and the kept arrays are updated in place."""
  params, cfg = setting_of(request, name)
  state = start(name, cfg, range(BATCH))
  text = decode.lower(params, state, cfg=cfg).compile(programs.QUICK).as_text()
  columns = state.prompt_tokens.shape[1] + cfg.canvas_length
  sizes = {tuple(sorted(leaf.shape)) for leaf in jax.tree.leaves(state.kept) if columns in leaf.shape}
  found = programs_text.instructions_inside_loops(text)
  assert len(found) > 1000
  of_size = [one for one in found if tuple(sorted(one.shape)) in sizes and one.opcode in ('copy', 'copy-start')]
  # Fresh keys and values of all rows are as large, and are brought into the order of the kept ones.
  assert [one.text for one in of_size if '/transpose"' not in one.text] == []


def _rows_of_passes(jaxpr, cfg):
  """Rows of the projections in each loop of a step that has any, in order."""
  width, passes = cfg.model.d_model, []
  for equation in jaxpr.eqns:
    if equation.primitive.name == 'while':
      rows = set()
      for _, inner in programs_text.equations(equation.params['body_jaxpr'].jaxpr):
        if inner.primitive.name == 'dot_general':
          left, right = (variable.aval.shape for variable in inner.invars)
          # A projection multiplies the residual stream [B, rows, D] with a kernel that is not the head.
          if len(left) == 3 and left[-1] == width == right[0] and right[1:] != (cfg.model.vocab_size,):
            rows.add(left[1])
      if rows:
        passes.append(rows)
  return passes


@pytest.mark.parametrize('name', SETTINGS)
def test_rows_that_each_pass_feeds(request, name):
  """Only the refresh and the row loop multiply the whole prompt; each other pass has one of the method's widths."""
  _, cfg = setting_of(request, name)
  length = 53
  step = functools.partial(decode_step, cfg=cfg)
  jaxpr = jax.make_jaxpr(step)(abstract_params(cfg.model), _abstract(cfg, length)).jaxpr
  row_loop, *passes = _rows_of_passes(jaxpr, cfg)
  shadow = cfg.block_length if cfg.decoder == 'wino' else 0
  canvas, everything = cfg.canvas_length, length + cfg.canvas_length
  if cfg.reuse != 'dllm':
    widths = cfg.reuse_method.widths(cfg)
    assert row_loop == {everything}
    assert [max(rows) for rows in passes] == [*(width + shadow for width in widths), everything + shadow]
    return
  # The first layer feeds all; the others what there is room for, and the answer for the values that are compared.
  above = [rows - {everything + shadow} for rows in passes]
  for rows, width in zip(above, (0, 3, 6, 12, 24), strict=False):
    assert rows <= {width + shadow, canvas, cfg.block_length + shadow}
  assert len(passes) == 6 and len(row_loop) > 1


@functools.partial(jax.jit, static_argnames='cfg', compiler_options=programs.QUICK)
def counted_step(params, state, *, cfg):
  """A step, and how many rows each row of the batch may feed in it."""
  fed = cfg.reuse_method.fed(state, jnp.zeros_like(state.done), cfg.decoder_method.views(state, cfg), cfg)
  return decode_step(params, state, cfg=cfg)[0], jnp.sum(fed, axis=1)


@pytest.mark.parametrize('name', ['dual under dream', pytest.param('prefix under saber', marks=pytest.mark.slow)])
def test_there_is_room_for_all_rows_that_a_step_feeds(request, name):
  """Rows of one block beside rows of several; the first column of a shifted row is read from its prompt's last row."""
  params, cfg = setting_of(request, name)
  state, most = start(name, cfg, range(6)), 0
  while not np.all(state.done):
    state, counts = counted_step(params, state, cfg=cfg)
    most = max(most, int(counts.max()))
  assert cfg.block_length < most <= cfg.reuse_method.widths(cfg)[-1]


def test_every_method_is_in_these_tests():
  assert {changes['reuse'] for _, changes in SETTINGS.values()} == set(specs.names(specs.REUSE)) - {'prompt'}

"""What the loop compiles to: types that stay, one program, donated buffers, no copies, and no work nobody asked for."""

import dataclasses
import functools
import math
from unittest import mock
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import programs
import programs_text
import pytest
import uncached

from archer_jax.config import DecodeConfig
from archer_jax.config import ModelConfig
from archer_jax.loop import decode as decode_module
from archer_jax.loop.decode import decode
from archer_jax.loop.step import decode_step
from archer_jax.loop.step import init_state
from archer_jax.model import abstract_params
from archer_jax.types import Knobs

BATCH = 4
DECODERS = ('wino', 'llada', 'dream')
WITH_SABER = (*DECODERS, 'saber', 'saber shifted')


@pytest.fixture
def golden(request, decoder):
  return programs.golden_of(request, decoder)


def abstract_state(cfg, batch=BATCH, length=programs.PROMPT_LENGTH):
  def make():
    prompt = jnp.zeros((batch, length), jnp.int32)
    knobs = Knobs.make(batch, gen_length=cfg.canvas_length)
    return init_state(prompt, prompt == 0, knobs, jnp.zeros((batch,), jnp.uint32), cfg=cfg)

  return jax.eval_shape(make)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize(
  ('decoder', 'changes'),
  [
    ('wino', {}),
    ('llada', {}),
    ('dream', {}),
    ('llada', {'guidance': True}),
    ('wino', {'mask_prediction': 'official'}),
    ('wino', {'drift': 'hidden', 'anchors': 3, 'on_low_margin': 'same_step'}),
    ('llada', {'drift': 'embedding', 'anchors': 2, 'on_low_margin': 'same_step', 'guidance': True}),
    ('dream', {'drift': 'hidden', 'anchors': 2}),
    ('saber', {}),
    ('saber', {'drift': 'hidden', 'anchors': 2, 'on_low_margin': 'same_step', 'mask_prediction': 'official'}),
    ('saber shifted', {}),
  ],
)
def test_types_of_the_state_are_a_fixed_point(golden, decoder, changes, dtype):
  cfg = programs.config(golden, decoder, dtype=dtype, **changes)
  state = abstract_state(cfg)
  after, _ = jax.eval_shape(functools.partial(decode_step, cfg=cfg), abstract_params(cfg.model, dtype), state)
  kind = lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type)
  assert jax.tree.map(kind, after) == jax.tree.map(kind, state)
  assert not any(leaf.weak_type for leaf in jax.tree.leaves(state))
  assert {leaf.dtype for leaf in jax.tree.leaves(state.kept)} == {jnp.dtype(dtype)}


def full_state(cfg, seed=1, **knobs):
  clauses = {'refresh_interval': np.array([1, 0, 4, 0]), 'refresh_distance': np.array([0, 0, 0, 7])}
  state = programs.start(programs.prompts(seed, (3, 17, 0, 64)), cfg, **(clauses | knobs))
  return programs.prefill(state, {5: 40, 11: 200})


def test_knobs_and_seeds_compile_nothing(llada_tiny):
  cfg = programs.config(llada_tiny, 'wino')
  decode(llada_tiny.params, full_state(cfg), cfg=cfg)
  compiled = decode._cache_size()
  traced = []
  step = lambda *args, **kwargs: traced.append(1) or decode_step(*args, **kwargs)
  changes = (
    {'threshold': 0.8, 'threshold_back': 0.5, 'max_accept': 3},
    {'temperature': 0.8, 'seeds': [5, 6, 7, 8]},
    {'temperature': np.array([0, 1, 0, 2]), 'gen_length': np.array([24, 3, 9, 0])},
    {'refresh_interval': 0, 'max_age': 3, 'min_margin': 0.1, 'refresh_at_block_start': 1},
    {'refresh_distance': jnp.array([1, 4, 8, 24])},
    {'kappa': jnp.array([0.0, 1.0, 3.0, 1e6])},
  )
  with mock.patch.object(decode_module, 'decode_step', step):
    for seed, change in enumerate(changes):
      decode(llada_tiny.params, full_state(cfg, seed, **change), cfg=cfg)
    assert not traced
    assert decode._cache_size() == compiled
    # Something else than a number is another program, so the counter does count.
    decode.trace(llada_tiny.params, full_state(cfg), cfg=dataclasses.replace(cfg, shadow='self'))
  assert traced


def test_donated_buffers_are_used(llada_tiny):
  cfg = programs.config(llada_tiny, 'wino')
  state = full_state(cfg)
  leaves = jax.tree.leaves(state)
  assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)
  first = full_state(cfg)
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    result = decode(llada_tiny.params, first, cfg=cfg)
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first))
  with pytest.raises((RuntimeError, ValueError), match='deleted'):
    decode(llada_tiny.params, first, cfg=cfg)
  # A used-up state does not stand in the way of the next one, and the parameters are nobody's to delete.
  again = decode(llada_tiny.params, state, cfg=cfg)
  np.testing.assert_array_equal(result.canvas, again.canvas)


@pytest.fixture(scope='module')
def compiled_text(request):
  """A function from a decoder and changes of its config to the config and the program's text."""

  @functools.cache
  def of(decoder, **changes):
    golden = programs.shallow(programs.golden_of(request, decoder))
    cfg = programs.config(golden, decoder, **changes)
    lowered = decode.lower(golden.params, full_state(cfg), cfg=cfg)
    # Where copies go is decided before what the quick options leave out; one decoder's are compiled as users do.
    full = decoder == 'wino' and not changes
    return cfg, lowered.compile(programs.FULL if full else programs.QUICK).as_text()

  return of


def copies_of_keys(cfg, text):
  """Copies, with their number of rows, of keys or values of the whole batch, whatever the order of their axes."""
  found = []
  for instruction in programs_text.instructions_inside_loops(text):
    if instruction.opcode in ('copy', 'copy-start') and len(instruction.shape) == 4:
      left = list(instruction.shape)
      for size in (BATCH, cfg.model.n_kv_heads, cfg.model.head_dim):
        if size in left:
          left.remove(size)
      if len(left) == 1:
        found.append((left[0], instruction.text))
  return found


@pytest.mark.parametrize('decoder', [*DECODERS, 'saber', pytest.param('saber shifted', marks=pytest.mark.slow)])
def test_no_copy_of_the_cache_in_the_loop(compiled_text, decoder):
  """Rows refresh or not as they like (B = 4), and the kept arrays are updated in place."""
  cfg, text = compiled_text(decoder)
  assert len(programs_text.instructions_inside_loops(text)) > 1000
  assert [line for rows, line in copies_of_keys(cfg, text) if rows == programs.PROMPT_LENGTH] == []


@pytest.mark.parametrize('decoder', ['wino', 'llada'])
def test_no_copy_of_the_pool_in_the_loop(compiled_text, decoder):
  """Anchors change places in place, and a row that refreshes after its reuse writes in place."""
  cfg, text = compiled_text(decoder, anchors=3, on_low_margin='same_step')
  row = (cfg.model.n_kv_heads, programs.PROMPT_LENGTH, cfg.model.head_dim)
  copies = [
    instruction.text
    for instruction in programs_text.instructions_inside_loops(text)
    if instruction.opcode in ('copy', 'copy-start') and instruction.shape in ((BATCH, *row), (BATCH, 2, *row))
  ]
  assert copies == []


@pytest.mark.parametrize('decoder', DECODERS)
def test_a_reuse_step_copies_no_kept_keys(compiled_text, decoder):
  cfg, text = compiled_text(decoder)
  found = [line for rows, line in copies_of_keys(cfg, text) if rows > programs.PROMPT_LENGTH]
  assert [line for line in found if '/cond/branch_0_fun/' in line] == []


def rows_fed(cfg, length):
  """Rows of the projections of one step, by where they stand: the row loop, the reuse and the refresh branch."""
  step = functools.partial(decode_step, cfg=cfg)
  jaxpr = jax.make_jaxpr(step)(abstract_params(cfg.model), abstract_state(cfg, length=length)).jaxpr
  width = cfg.model.d_model
  fed = {}
  for path, equation in programs_text.equations(jaxpr):
    if equation.primitive.name == 'dot_general':
      left, right = (variable.aval.shape for variable in equation.invars)
      # A projection multiplies the residual stream [B, rows, D] with a kernel.
      if len(left) == 3 and left[-1] == width and right[0] == width:
        fed.setdefault(path, []).append(left[:2])
  return fed


@pytest.mark.parametrize('decoder', WITH_SABER)
def test_rows_fed_by_each_forward(golden, decoder):
  """The prompt is multiplied in the refresh branch of one conditional and in the row loop, and nowhere else.

  Counted from the shapes of the program: P + G + B rows of all requests in a refresh, P + G of one request in a turn of
  the row loop, G + B in a reuse step (and Dream's one prompt row).
  """
  cfg = programs.config(golden, decoder)
  length, canvas, shadow = 53, cfg.canvas_length, uncached.shadow_length(cfg)
  fed = rows_fed(cfg, length)
  assert sorted(fed) == [('cond:0',), ('cond:1',), ('while',)]
  reuse, refresh, row_loop = (set(fed[path]) for path in sorted(fed))
  lead = int(decoder in programs.SHIFTED)
  decided = cfg.block_length if decoder in ('wino', 'llada') else canvas
  head = (BATCH, decided + shadow)
  assert refresh == {(BATCH, length + canvas + shadow), head}
  assert row_loop == {(1, length + canvas)}
  keys = {(BATCH, canvas + shadow)}
  assert reuse == {(BATCH, lead + canvas + shadow), head} | keys
  assert max(rows for _, rows in reuse) < max(rows for _, rows in refresh)
  # Five kernels a layer and the head multiply rows of width D; the row loop ends at the last layer's keys and values.
  layers = 5 * cfg.model.n_layers
  assert [len(fed[path]) for path in sorted(fed)] == [layers + 1, layers + 1, layers - 3]


LLADA_8B = ModelConfig(
  family='llada',
  vocab_size=126464,
  d_model=4096,
  n_layers=2,
  n_heads=32,
  n_kv_heads=32,
  head_dim=128,
  d_ff=12288,
  rope_theta=5e5,
  norm_eps=1e-5,
  qkv_bias=False,
  max_length=4096,
  mask_id=126336,
  eos_id=126081,
  pad_id=126081,
  logit_alignment='same_position',
)


def vocabulary_program(decoder, length, **changes):
  """The compiled loop of two layers with the shapes of LLaDA-8B, from abstract arguments."""
  cfg = DecodeConfig(model=LLADA_8B, decoder=decoder, canvas_length=64, block_length=32, **changes)
  lowered = decode.lower(abstract_params(LLADA_8B), abstract_state(cfg, 2, length), cfg=cfg)
  return lowered.compile(programs.QUICK)


@pytest.mark.parametrize('decoder', ['wino', 'llada'])
def test_vocabulary_is_met_by_decision_rows_only(decoder):
  """With 126,464 tokens logits of a prompt would cost more than layers; they are made for two blocks of 32 alone."""
  block, shadow = 32, 32 if decoder == 'wino' else 0
  shapes, temporary = [], []
  for length in (128, 1024):
    program = vocabulary_program(decoder, length)
    found = {i.shape for i in programs_text.instructions_inside_loops(program.as_text()) if 126464 in i.shape}
    shapes.append(found)
    temporary.append(program.memory_analysis().temp_size_in_bytes)
  assert shapes[0] == shapes[1]
  # Random draws have an axis of two words a token.
  before = [shape[:-2] if shape[-2:-1] in ((1,), (2,)) else shape[:-1] for shape in shapes[0] if 4096 not in shape]
  # All decision rows of both requests, or the candidates without the shadow; 1 is the list of token ids.
  assert {math.prod(sizes) for sizes in before} == {1, 2 * block, 2 * (block + shadow)}
  # The prompt's rows of a refresh need room for their attention, but far less than their logits would.
  assert temporary[1] - temporary[0] < 2 * (1024 - 128) * 126464 * 4 / 3

"""Configuration, knobs and the state's own types."""

import dataclasses
import functools

from beartype import beartype
import jax
import jax.numpy as jnp
from jaxtyping import Bool
from jaxtyping import Float32
from jaxtyping import Int32
from jaxtyping import UInt32
from jaxtyping import jaxtyped
import numpy as np
import programs
import pytest

from archer_jax.config import CHOICES
from archer_jax.config import KNOBS
from archer_jax.config import DecodeConfig
from archer_jax.decode import decode_step
from archer_jax.decode import init_state
from archer_jax.model import abstract_params
from archer_jax.types import Knobs
from archer_jax.types import Status

Abstract = jax.ShapeDtypeStruct


@pytest.mark.parametrize(
  ('fixture', 'decoder', 'message'),
  [
    ('llada_tiny', 'dream', 'decoder must be wino or llada for a model with same_position logits'),
    ('dream_tiny', 'wino', 'decoder must be dream for a model with shifted logits'),
    ('dream_tiny', 'llada', 'decoder must be dream for a model with shifted logits'),
    ('llada_tiny', 'beam', "got 'beam'"),
  ],
)
def test_pairs_of_alignment_and_decoder_that_do_not_fit_are_refused(request, fixture, decoder, message):
  model = request.getfixturevalue(fixture).config
  with pytest.raises(ValueError, match=message):
    DecodeConfig(model=model, decoder=decoder, canvas_length=8, block_length=8)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'block_length': 25}, r'block_length must be in \[1, canvas_length=24\], got 25'),
    ({'block_length': 0}, r'block_length must be in \[1, canvas_length=24\], got 0'),
    ({'canvas_length': 0}, 'canvas_length must be positive, got 0'),
    ({'guidance': True}, r"guidance \(cfg_scale > 0\) needs decoder llada, got 'wino'"),
    ({'trace_steps': -1}, 'trace_steps must not be negative, got -1'),
    ({'shadow': 'none'}, "shadow must be one of official, self, got 'none'"),
    ({'dtype': 'float16'}, "dtype must be one of float32, bfloat16, got 'float16'"),
  ],
)
def test_config_that_cannot_be_is_refused(llada_tiny, changes, message):
  with pytest.raises(ValueError, match=message):
    programs.config(llada_tiny, 'wino', **changes)


def test_block_of_dream_is_its_canvas(dream_tiny):
  with pytest.raises(ValueError, match='block_length must equal canvas_length for dream, got 8'):
    programs.config(dream_tiny, 'dream', block_length=8)


@pytest.mark.parametrize('field', ['vocab_size', 'n_layers', 'max_length', 'd_ff'])
def test_model_of_no_size_is_refused(llada_tiny, field):
  with pytest.raises(ValueError, match=f'{field} must be positive, got 0'):
    dataclasses.replace(llada_tiny.config, **{field: 0})


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'mask_id': 320}, r'mask_id must be in \[0, 320\), got 320'),
    ({'n_kv_heads': 3}, 'n_heads must be a multiple of n_kv_heads, got 4 and 3'),
    ({'head_dim': 15}, 'head_dim must be even'),
    ({'logit_alignment': 'left'}, "logit_alignment must be same_position or shifted, got 'left'"),
  ],
)
def test_model_that_cannot_be_is_refused(llada_tiny, changes, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(llada_tiny.config, **changes)


def test_config_is_a_static_argument(llada_tiny):
  cfg = programs.config(llada_tiny, 'wino')
  assert hash(cfg) == hash(programs.config(llada_tiny, 'wino'))
  assert cfg == programs.config(llada_tiny, 'wino')
  with pytest.raises(dataclasses.FrozenInstanceError):
    cfg.decoder = 'llada'
  assert set(CHOICES['decoder']) == {'wino', 'llada', 'dream'}


def test_shadow_belongs_to_wino(llada_tiny, dream_tiny):
  assert programs.config(llada_tiny, 'wino').shadow_length == 8
  assert programs.config(llada_tiny, 'llada').shadow_length == 0
  assert programs.config(dream_tiny, 'dream').shadow_length == 0
  assert (llada_tiny.config.default_decoder, dream_tiny.config.default_decoder) == ('wino', 'dream')


@pytest.mark.parametrize('name', KNOBS)
def test_knob_checks_its_range(name):
  spec = KNOBS[name]
  assert spec.check(name, spec.low) == spec.low
  for wrong in (spec.low - 1, float('nan'), float('inf'), '1', None, True):
    with pytest.raises(ValueError, match=f'^{name} must be'):
      spec.check(name, wrong)
  if spec.integer:
    with pytest.raises(ValueError, match='an integer'):
      spec.check(name, 1.5)


def test_knobs_broadcast_numbers_and_keep_rows():
  knobs = Knobs.make(3, gen_length=np.array([4, 5, 6]), threshold=0.25)
  assert knobs.gen_length.tolist() == [4, 5, 6]
  # Steps follow the row's own length where nobody gave them.
  assert knobs.steps.tolist() == [4, 5, 6]
  assert knobs.threshold.tolist() == [0.25] * 3
  for name, spec in KNOBS.items():
    leaf = getattr(knobs, name)
    assert leaf.shape == (3,)
    assert leaf.dtype == (jnp.int32 if spec.integer else jnp.float32)
    if spec.default is not None and name not in ('gen_length', 'threshold'):
      assert leaf.tolist() == pytest.approx([spec.default] * 3)


def test_knobs_of_requests_are_stacked():
  knobs = Knobs.stack([{'gen_length': 7}, {'steps': 3, 'temperature': 0.5}])
  assert knobs.gen_length.tolist() == [7, KNOBS['gen_length'].default]
  assert knobs.steps.tolist() == [7, 3]
  assert knobs.temperature.tolist() == [0.0, 0.5]


def test_unknown_knob_is_refused():
  with pytest.raises(TypeError, match='treshold is no knob; there are gen_length'):
    Knobs.make(2, treshold=0.5)


def test_no_two_leaves_share_a_buffer(llada_tiny):
  cfg = programs.config(llada_tiny, 'llada', guidance=True)
  knobs = Knobs.make(2, gen_length=24)
  tokens = jnp.zeros((2, 8), jnp.int32)
  seeds = jnp.zeros((2,), jnp.uint32)
  state = programs.init_state(tokens, tokens == 0, knobs, seeds, cfg=cfg)
  mine = jax.tree.leaves((tokens, knobs, seeds))
  pointers = [leaf.unsafe_buffer_pointer() for leaf in [*jax.tree.leaves(state), *mine]]
  assert len(set(pointers)) == len(pointers)


def test_state_changes_by_replacement_only(llada_tiny):
  cfg = programs.config(llada_tiny, 'wino')
  state = programs.start(programs.prompts(1, (3, 60)), cfg, gen_length=np.array([24, 5]))
  with pytest.raises(dataclasses.FrozenInstanceError):
    state.canvas = state.canvas
  with pytest.raises(TypeError):
    type(state.counters)(*jax.tree.leaves(state.counters))
  assert state.canvas_valid.sum(axis=1).tolist() == [24, 5]
  assert state.prompt_valid.sum(axis=1).tolist() == [3, 60]
  assert state.gen_length.tolist() == [24, 5]
  assert jax.tree.structure(jax.tree.map(lambda leaf: leaf, state)) == jax.tree.structure(state)


def test_filler_is_done_from_the_start(llada_tiny):
  cfg = programs.config(llada_tiny, 'wino')
  state = programs.start(programs.prompts(1, (3, 60)), cfg, gen_length=np.array([24, 0]))
  assert state.done.tolist() == [False, True]
  assert state.status.tolist() == [Status.RUNNING, Status.EMPTY]


@jaxtyped(typechecker=beartype)
def check_state(
  prompt_tokens: Int32[Abstract, 'B P'],
  prompt_valid: Bool[Abstract, 'B P'],
  canvas: Int32[Abstract, 'B G'],
  anchor: Int32[Abstract, 'B G'],
  taken_back: Int32[Abstract, 'B G'],
  pending: Bool[Abstract, 'B G'],
  k: tuple[Float32[Abstract, 'B P K H'], ...],
  v: tuple[Float32[Abstract, 'B P K H'], ...],
  seed: UInt32[Abstract, ' B'],
  margin: Float32[Abstract, ' B'],
  done: Bool[Abstract, ' B'],
  refreshed: Bool[Abstract, ' B'],
  whole: tuple[Int32[Abstract, ' B'], ...],
  counters: tuple[Int32[Abstract, ' B'], ...],
  trace_canvas: Int32[Abstract, 'B S G'],
  trace_numbers: tuple[Float32[Abstract, 'B S'] | Int32[Abstract, 'B S'] | Bool[Abstract, 'B S'], ...],
) -> tuple[int, ...]:
  return canvas.shape


@pytest.mark.parametrize(('fixture', 'decoder'), [('llada_tiny', 'wino'), ('dream_tiny', 'dream')])
def test_every_leaf_has_the_shape_that_its_comment_says(request, fixture, decoder):
  cfg = programs.config(request.getfixturevalue(fixture), decoder, trace_steps=5)

  def start():
    prompt = jnp.zeros((3, 7), jnp.int32)
    knobs = Knobs.make(3, gen_length=cfg.canvas_length)
    return init_state(prompt, prompt == 0, knobs, jnp.zeros(3, jnp.uint32), cfg=cfg)

  before = jax.eval_shape(start)
  after = jax.eval_shape(functools.partial(decode_step, cfg=cfg), abstract_params(cfg.model), before)
  for state in (before, after):
    trace = {field.name: getattr(state.trace, field.name) for field in dataclasses.fields(state.trace)}
    shape = check_state(
      state.prompt_tokens,
      state.cache.prompt_valid,
      state.canvas,
      state.cache.anchor,
      state.taken_back,
      state.pending,
      state.cache.k,
      state.cache.v,
      state.seed,
      state.margin,
      state.done,
      state.refreshed,
      (state.row_step, state.block, state.block_step, state.last_accept, state.status, state.cache.age),
      tuple(jax.tree.leaves(state.counters)),
      trace.pop('canvas'),
      tuple(trace.values()),
    )
    assert shape == (3, cfg.canvas_length)

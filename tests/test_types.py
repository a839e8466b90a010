"""Configuration, knobs and the state's own types."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Bool
from jaxtyping import Float
from jaxtyping import Float32
from jaxtyping import Int32
from jaxtyping import UInt32
from jaxtyping import jaxtyped
import numpy as np
import programs
import pytest

from archer_jax import specs
from archer_jax.config import DecodeConfig
from archer_jax.loop.step import decode_step
from archer_jax.loop.step import init_state
from archer_jax.model import abstract_params
from archer_jax.types import Knobs
from archer_jax.types import Status

Abstract = jax.ShapeDtypeStruct


@pytest.mark.parametrize(
  ('fixture', 'decoder', 'message'),
  [
    ('llada_tiny', 'dream', 'decoder must be llada, parallel, saber or wino for a model with same_position logits'),
    ('dream_tiny', 'wino', 'decoder must be dream, parallel or saber for a model with shifted logits'),
    ('dream_tiny', 'llada', 'decoder must be dream, parallel or saber for a model with shifted logits'),
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


def test_block_of_saber_is_its_canvas_on_a_shifted_model(dream_tiny):
  with pytest.raises(ValueError, match='block_length must equal canvas_length for saber, got 8'):
    programs.config(dream_tiny, 'saber shifted', block_length=8)


@pytest.mark.parametrize(
  ('golden', 'decoder', 'changes', 'message'),
  [
    ('llada_tiny', 'llada', {'reuse': 'dkv_prefill'}, 'reuse must be one of .*prompt for a model with same_position'),
    ('dream_tiny', 'dream', {'reuse': 'dkv_greedy'}, 'reuse must be one of .*prompt for a model with shifted'),
    ('llada_tiny', 'wino', {'reuse': 'dkv_greedy'}, 'decoder must be llada with reuse dkv_greedy, got .wino'),
    ('llada_tiny', 'llada', {'reuse': 'dkv_greedy'}, 'remasking must be random with reuse dkv_greedy, got .low_conf'),
  ],
)
def test_reuse_without_a_rule_for_model_or_decoder_is_refused(request, golden, decoder, changes, message):
  with pytest.raises(ValueError, match=message):
    programs.config(request.getfixturevalue(golden), decoder, **changes)


def test_a_threshold_that_nobody_gives_is_the_decoders_own(llada_tiny):
  def threshold(decoder, **knobs):
    return programs.start(programs.prompts(1, (3,)), programs.config(llada_tiny, decoder), **knobs).knobs.threshold

  for decoder in ('wino', 'parallel'):
    own = specs.load(specs.DECODERS, decoder).spec.knobs['threshold'].default
    assert threshold(decoder).tolist() == pytest.approx([own])
    assert threshold(decoder, threshold=0.25).tolist() == [0.25]
  assert threshold('llada').tolist() == [0]


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
  assert set(specs.names(specs.DECODERS)) == {'wino', 'llada', 'dream', 'saber', 'parallel'}


def test_shadow_belongs_to_wino(llada_tiny, dream_tiny):
  def shadow(golden, decoder):
    cfg = programs.config(golden, decoder)
    state = programs.start(programs.prompts(1, (3,)), cfg)
    return cfg.decoder_method.views(state, cfg).shadow

  assert shadow(llada_tiny, 'wino').columns.shape == (1, 8)
  assert shadow(llada_tiny, 'llada') is None
  assert shadow(dream_tiny, 'dream') is None
  assert (llada_tiny.config.default_decoder, dream_tiny.config.default_decoder) == ('wino', 'dream')


@pytest.mark.parametrize('name', specs.knobs())
def test_knob_checks_its_range(name):
  spec = specs.knobs()[name]
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
  for name, spec in specs.knobs().items():
    leaf = getattr(knobs, name)
    assert leaf.shape == (3,)
    assert leaf.dtype == (jnp.int32 if spec.integer else jnp.float32)
    if spec.default is not None and name not in ('gen_length', 'threshold'):
      assert leaf.tolist() == pytest.approx([spec.default] * 3)


def test_knobs_of_requests_are_stacked():
  knobs = Knobs.stack([{'gen_length': 7}, {'steps': 3, 'temperature': 0.5}])
  assert knobs.gen_length.tolist() == [7, specs.knobs()['gen_length'].default]
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


COUNTERS = ['steps', 'nfe', 'refreshes', 'accepted', 'remasked', 'flip_flops', 'rows_fed', 'rows_recomputed']
# The types of a state by the names of its fields, and of all that stands in it.
ROW = {
  'prompt_tokens': Int32[Abstract, 'B P'],
  'prompt_valid': Bool[Abstract, 'B P'],
  'canvas': Int32[Abstract, 'B G'],
  'seed': UInt32[Abstract, 'B'],
  'row_step': Int32[Abstract, 'B'],
  'block': Int32[Abstract, 'B'],
  'block_step': Int32[Abstract, 'B'],
  'taken_back': Int32[Abstract, 'B G'],
  'done': Bool[Abstract, 'B'],
  'status': Int32[Abstract, 'B'],
  'knobs': {name: (Int32 if knob.integer else Float32)[Abstract, 'B'] for name, knob in specs.knobs().items()},
  'counters': dict.fromkeys(COUNTERS, Int32[Abstract, 'B']),
  'logprobs': None,
}
TRACE = {
  'canvas': Int32[Abstract, 'B S G'],
  'refresh': Bool[Abstract, 'B S'],
  'accept': Int32[Abstract, 'B S'],
  'remask': Int32[Abstract, 'B S'],
  'margin': Float32[Abstract, 'B S'],
  'reason': Int32[Abstract, 'B S'],
  'distance': Int32[Abstract, 'B S'],
  'drift': Float32[Abstract, 'B S'],
  'age': Int32[Abstract, 'B S'],
}
FALLS = {'pending': Bool[Abstract, 'B G'], 'kept': Float32[Abstract, 'B G'], 'previous': Float32[Abstract, 'B G']}
FIRSTS = {'first': Float32[Abstract, 'B G']}
# Saber tells what its commits were above.
THRESHOLD = {'threshold': Float32[Abstract, 'B S']}
WINO = {'pending': Bool[Abstract, 'B G'], 'last_accept': Int32[Abstract, 'B']}
ANCHORS = {
  'anchor': Int32[Abstract, 'B G'],
  'age': Int32[Abstract, 'B'],
  'refreshed': Bool[Abstract, 'B'],
  'margin': Float32[Abstract, 'B'],
  'drift': Float32[Abstract, 'B'],
}
POOL = {name: Int32[Abstract, axes] for name, axes in (('anchor', 'B M G'), ('age', 'B M'), ('used', 'B M'))}
RECORD = {
  'live': Bool[Abstract, 'B'],
  'canvas': Int32[Abstract, 'B G'],
  'accepted': Bool[Abstract, 'B G'],
  'remasked': Bool[Abstract, 'B G'],
  'reason': Int32[Abstract, 'B'],
  'margin': Float32[Abstract, 'B'],
  'logprobs': None,
  'seen': {'distance': Int32[Abstract, 'B'], 'drift': Float32[Abstract, 'B'], 'age': Int32[Abstract, 'B']},
  'work': {
    **dict.fromkeys(('forwards', 'rows_fed', 'rows_recomputed'), Int32[Abstract, 'B']),
    'passes': dict.fromkeys(('refresh', 'reuse', 'row', 'redo'), Int32[Abstract, '']),
  },
}


def state_types(cfg):
  """The types of all leaves of a state of this config."""
  layers = lambda axes: dict.fromkeys(('k', 'v'), (Float[Abstract, axes],) * cfg.model.n_layers)
  streams, hidden, pooled = 1 + cfg.guidance, cfg.drift == 'hidden', cfg.anchors > 1
  shifted = cfg.model.logit_alignment == 'shifted'
  return {
    **ROW,
    'decoder': {'wino': WINO, 'saber': FIRSTS if shifted else FALLS}.get(cfg.decoder, ()),
    'reuse': {**ANCHORS, 'pool': POOL if pooled else None},
    'kept': {
      'kv': (layers('B K P H'),) * streams,
      'pool': (layers('B M K P H'),) * streams if pooled else None,
      'anchor_hidden': Float[Abstract, 'B G D'] if hidden else None,
      'last_hidden': Float[Abstract, 'B G D'] if hidden else None,
      'pool_hidden': Float[Abstract, 'B M G D'] if hidden and pooled else None,
    },
    'trace': {**TRACE, **(THRESHOLD if cfg.decoder == 'saber' else {})} if cfg.trace_steps else None,
  }


def check_types(node, types, where='state'):
  """Every leaf of a tree has its type, and there is no leaf without one; axes are the same in all of a context."""
  if dataclasses.is_dataclass(node):
    node = {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
  elif hasattr(node, '_asdict'):
    node = node._asdict()
  if isinstance(types, dict):
    assert isinstance(node, dict), where
    assert set(node) == set(types), where
    for name, part in node.items():
      check_types(part, types[name], f'{where}.{name}')
  elif isinstance(types, tuple):
    assert len(node) == len(types), where
    for number, (part, kind) in enumerate(zip(node, types, strict=True)):
      check_types(part, kind, f'{where}[{number}]')
  elif types is None:
    assert node is None, where
  else:
    assert isinstance(node, types), (where, node, types)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize(
  ('decoder', 'changes'),
  [
    ('wino', {}),
    ('dream', {}),
    ('llada', {'guidance': True, 'anchors': 4}),
    ('wino', {'drift': 'hidden', 'trace_steps': 0}),
    ('saber', {}),
    ('saber shifted', {'anchors': 2}),
    ('wino', {'drift': 'hidden', 'anchors': 4, 'on_low_margin': 'same_step'}),
  ],
)
def test_every_leaf_has_the_shape_that_its_comment_says(request, decoder, changes, dtype):
  golden = programs.golden_of(request, decoder)
  cfg = programs.config(golden, decoder, **{'trace_steps': 5, 'dtype': dtype} | changes)

  def start():
    prompt = jnp.zeros((3, 7), jnp.int32)
    knobs = Knobs.make(3, gen_length=cfg.canvas_length)
    return init_state(prompt, prompt == 0, knobs, jnp.zeros(3, jnp.uint32), cfg=cfg)

  before = jax.eval_shape(start)
  after, record = jax.eval_shape(functools.partial(decode_step, cfg=cfg), abstract_params(cfg.model, dtype), before)
  model = cfg.model
  axes = {'B': 3, 'P': 7, 'G': cfg.canvas_length, 'K': model.n_kv_heads, 'H': model.head_dim, 'D': model.d_model}
  axes |= {'S': cfg.trace_steps, 'M': cfg.anchors - 1}
  with jaxtyped('context'):
    # Binds the axes.
    for name, size in axes.items():
      assert isinstance(Abstract((size,), 'int32'), Int32[Abstract, name])
    for state in (before, after):
      check_types(state, state_types(cfg))
    seen = {'threshold': Float32[Abstract, 'B']} if cfg.decoder == 'saber' else {}
    check_types(record, {**RECORD, 'seen': {**RECORD['seen'], **seen}})
  for state in (before, after):
    assert {leaf.dtype for leaf in jax.tree.leaves(state.kept)} == {jnp.dtype(dtype)}


def test_the_check_of_types_finds_what_is_wrong(llada_tiny):
  cfg = programs.config(llada_tiny, 'wino')
  state = jax.eval_shape(lambda: programs.start(programs.prompts(1, (3, 60)), cfg))
  wrong = (
    dataclasses.replace(state, block=Abstract((2,), 'int64')),
    dataclasses.replace(state, block=Abstract((3,), 'int32')),
    dataclasses.replace(state, decoder=state.decoder._replace(pending=state.canvas)),
    dataclasses.replace(state, kept=dataclasses.replace(state.kept, kv=state.kept.kv * 2)),
    dataclasses.replace(state, trace={**state.trace, 'more': state.block}),
  )
  for other in wrong:
    with pytest.raises(AssertionError), jaxtyped('context'):
      check_types(other, state_types(cfg))

import jax
import pytest

from archer_jax.mesh import make_mesh
from archer_jax.report.hlo import collectives
from archer_jax.report.hlo import instructions

# A loop with a branch in it, as XLA writes them; devices of data:2,model:4 are numbered along model first.
PROGRAM = """HloModule jit_f, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %sum = f32[] add(%a, %b)
}

%reuse (p: (f32[2])) -> (f32[2]) {
  ROOT %t = (f32[2]{0}) tuple(%p)
}

%refresh (p: (f32[2])) -> (f32[2]) {
  %r = bf16[8,32]{1,0} all-reduce(%x), channel_id=1, replica_groups=GROUPS, use_global_device_ids=true, to_apply=%add
  ROOT %t = (f32[2]{0}) tuple(%p)
}

%body (p: (f32[2])) -> (f32[2]) {
  %c = (f32[2]{0}) conditional(%i, %p, %p), branch_computations={%reuse, %refresh}
  %g = (f32[3,4]{1,0:T(8,128)}, /*index=1*/s32[3]{0}) all-reduce(%y, %z), replica_groups={{0,1,2,3},{4,5,6,7}}
  ROOT %t = (f32[2]{0}) tuple(%g)
}

%condition (p: (f32[2])) -> pred[] {
  ROOT %l = pred[] compare(%p, %p), direction=LT
}

ENTRY %main (p: f32[2]) -> f32[2] {
  %w = (f32[2]{0}) while(%p), condition=%condition, body=%body
  %s = (bf16[4]{0}, bf16[16]{0}) all-gather-start(%p), replica_groups=[2,4]<=[8], dimensions={0}
  %d = bf16[16]{0} all-gather-done(%s)
  %h = pred[10]{0} collective-permute(%p), source_target_pairs={{0,4},{4,0}}
  ROOT %o = f32[2]{0} get-tuple-element(%w), index=0
}
"""


@pytest.fixture(scope='module')
def mesh():
  return make_mesh('data:2,model:4')


def test_place_shapes_and_bytes(mesh):
  found = [
    (exchange.kind, exchange.place, exchange.axes, exchange.shapes, exchange.bytes)
    for exchange in collectives(PROGRAM.replace('GROUPS', '[4,2]<=[2,4]T(1,0)'), mesh)
  ]
  assert sorted(found) == [
    ('all-gather', (), ('model',), ((16,),), 32),
    ('all-reduce', ('while',), ('model',), ((3, 4), (3,)), 60),
    ('all-reduce', ('while', 'cond:1'), ('data',), ((8, 32),), 512),
    ('collective-permute', (), ('data',), ((10,),), 10),
  ]


@pytest.mark.parametrize(
  ('groups', 'axes'),
  [
    ('{}', ('data', 'model')),
    ('{{0,1,2,3,4,5,6,7}}', ('data', 'model')),
    ('[1,8]<=[8]', ('data', 'model')),
    ('{{0,4},{1,5},{2,6},{3,7}}', ('data',)),
    ('[4,2]<=[2,4]T(1,0)', ('data',)),
    ('[2,4]<=[8]', ('model',)),
    ('[4,2]<=[8]', ('model',)),
    ("mesh['a'=2,'b'=4] {'a'}", ('data',)),
    ("mesh['a'=2,'b'=4] {'b'}", ('model',)),
    ("mesh['a'=2,'b'=2,'c'=2] {'a', 'c'}", ('data', 'model')),
    ("mesh['a'=2,'b'=2,'c'=2] {'b','c'}", ('model',)),
    ('{{0},{1},{2},{3},{4},{5},{6},{7}}', ()),
    ('{{0,5}}', ('data', 'model')),
  ],
)
def test_axes_of_groups(mesh, groups, axes):
  (inside,) = [e for e in collectives(PROGRAM.replace('GROUPS', groups), mesh) if e.place == ('while', 'cond:1')]
  assert inside.axes == axes


def test_what_cannot_be_read_is_an_error(mesh):
  with pytest.raises(ValueError, match=r'devices of a collective cannot be read from .*all-reduce'):
    collectives(PROGRAM.replace('GROUPS', 'unheard_of'), mesh)
  with pytest.raises(ValueError, match='one without an ENTRY'):
    collectives('nothing', mesh)


def test_branches_of_a_predicate_are_numbered_alike():
  text = PROGRAM.replace(
    'branch_computations={%reuse, %refresh}', 'true_computation=%refresh, false_computation=%reuse'
  )
  assert [place for place, line in instructions(text) if 'bf16[8,32]' in line] == [('while', 'cond:1')]


def test_of_a_program_that_xla_compiled(mesh):
  """A sum over `data` in a loop is seen, so that its absence elsewhere means something."""
  spec = jax.sharding.PartitionSpec('data')

  def total(x):
    return jax.lax.fori_loop(0, 3, lambda _, y: y + jax.lax.pcast(jax.lax.psum(y, 'data'), 'data', to='varying'), x)

  program = jax.jit(jax.shard_map(total, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={'data'}))
  text = program.lower(jax.ShapeDtypeStruct((2, 5), 'float32')).compile().as_text()
  found = [(e.kind, e.place, e.axes, e.bytes) for e in collectives(text, mesh)]
  assert found == [('all-reduce', ('while',), ('data',), 20)]

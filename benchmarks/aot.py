"""What decoding a published model asks of every device of a mesh, found by compiling alone: memory, and collectives.

    python benchmarks/aot.py [--json FILE] [--models llada-8b,dream-7b] [--mesh data:2,model:4 ...] [--dtypes float32]

Nothing is allocated and nothing runs: the programs are compiled for devices that the CPU pretends to have, from shapes.

- Parameters, cache and the rest of the state are counted from shapes and shardings, in bfloat16.
- Temporaries are those of the compiled program. The CPU compiler makes float32 products of bfloat16 ones, with float32
  copies of the weights, so that its bfloat16 program holds far more than an accelerator would. Its float32 program has
  no such copies, but activations of twice the size: an upper bound, which is what is compared with real chips.
  `--dtypes float32,bfloat16` compiles both.
- With libtpu (`pip install archer_jax[tpu]`) the same can be asked of the TPU's own compiler, without a TPU:
  `TPU_SKIP_MDS_QUERY=1 python benchmarks/aot.py --topology v5e:2x4 --dtypes bfloat16 --mesh data:2,model:4`.
- Collectives are those inside the loop, as bytes of their results on one device in one step: what the decision
  exchanges, and what each pass of the model does. An accelerator sends activations in bfloat16: half of a pass's bytes.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import json
import math
import time
from typing import Any

from absl import app
from absl import flags
import jax
from jax.experimental import topologies
import jax.numpy as jnp
from jax.sharding import Mesh

from archer_jax.config import SHIFTED
from archer_jax.config import DecodeConfig
from archer_jax.config import ModelConfig
from archer_jax.loop.decode import decode
from archer_jax.loop.step import init_state
from archer_jax.mesh import make_mesh
from archer_jax.model import abstract_params
from archer_jax.report.hlo import Collective
from archer_jax.report.hlo import collectives
from archer_jax.sharding import param_shardings
from archer_jax.sharding import program
from archer_jax.sharding import state_shardings
from archer_jax.types import DecodeState
from archer_jax.types import Knobs

_JSON = flags.DEFINE_string('json', None, 'write the figures to this file')
_MODELS = flags.DEFINE_list('models', ['llada-8b', 'dream-7b'], 'what to compile')
_MESHES = flags.DEFINE_multi_string(
  'mesh', ['data:1', 'model:4', 'data:2,model:4', 'data:4,model:4'], 'meshes to compile for; may be given again'
)
_DTYPES = flags.DEFINE_list('dtypes', ['float32'], 'dtypes of the compiled programs')
_TOPOLOGY = flags.DEFINE_string('topology', None, 'compile for a slice of TPUs such as v5e:2x4, needs libtpu alone')
_ROWS = flags.DEFINE_integer('rows', 8, 'rows of a data shard', lower_bound=1)
_PROMPT = flags.DEFINE_integer('prompt', 512, 'columns of the prompt', lower_bound=1)
_CANVAS = flags.DEFINE_integer('canvas', 256, 'columns of the canvas', lower_bound=1)
_BLOCK = flags.DEFINE_integer('block', 64, 'columns of a block', lower_bound=1)
_LAYERS = flags.DEFINE_integer('layers', None, 'layers in the place of all of them, for a quick look', lower_bound=1)

N_DEVICES = 16
# Machine code that nobody runs need not be good; memory and collectives are planned before it.
OPTIONS = {'xla_backend_optimization_level': 0}
# Memory of a device in GB, and chips that have as much.
CHIPS = {16: 'v5e', 24: 'A10, L4', 32: 'v6e', 80: 'A100, H100', 95: 'v5p', 141: 'H200'}
# What the runtime keeps for itself, and what allocation in pieces loses.
_RESERVED = 0.08

MODELS = {
  'llada-8b': ModelConfig(
    family='llada',
    vocab_size=126464,
    d_model=4096,
    n_layers=32,
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
  ),
  'dream-7b': ModelConfig(
    family='dream',
    vocab_size=152064,
    d_model=3584,
    n_layers=28,
    n_heads=28,
    n_kv_heads=4,
    head_dim=128,
    d_ff=18944,
    rope_theta=1e6,
    norm_eps=1e-6,
    qkv_bias=True,
    max_length=131072,
    mask_id=151666,
    eos_id=151643,
    pad_id=151643,
    logit_alignment='shifted',
  ),
}
# Where a collective of the model stands in the loop -> what executes it.
_PASSES = {('while', 'while'): 'row turn', ('while', 'cond:0'): 'reuse pass', ('while', 'cond:1'): 'refresh pass'}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
  """Rows of a data shard, and columns of prompt, canvas and block."""

  rows: int
  prompt: int
  canvas: int
  block: int


def measure(
  model: ModelConfig,
  mesh_text: str,
  shape: Shape,
  dtype: str,
  options: Mapping[str, Any],
  devices: Sequence[Any] | None = None,
) -> dict[str, Any]:
  """Compiles the loop for a mesh and tells what one of its devices holds and exchanges.

  Args:
    model: its shapes; there are no weights.
    mesh_text: such as `data:2,model:4`.
    shape: of a data shard's batch.
    dtype: of the compiled program; what is held is counted in bfloat16 whatever it is.
    options: of the compiler.
    devices: to compile for, by default those of this process.
  """
  mesh = make_mesh(mesh_text, devices)
  cfg, params, state = _arguments(model, mesh, shape, dtype)
  begin = time.perf_counter()
  compiled = program(decode, mesh, cfg).lower(params, state, ()).compile(options)
  seconds = time.perf_counter() - begin
  memory = compiled.memory_analysis()
  # Else there would be a second state beside the donated one.
  assert memory.alias_size_in_bytes >= _device_bytes(state), memory
  _, params, state = _arguments(model, mesh, shape, 'bfloat16')
  cache = _device_bytes(state.kept)
  held = {
    'parameters': _device_bytes(params),
    'cache': cache,
    'state': _device_bytes(state) - cache,
    'temporaries': memory.temp_size_in_bytes,
  }
  total = sum(held.values())
  return {
    'mesh': mesh_text,
    'devices': mesh.size,
    'kind': mesh.devices.flat[0].device_kind,
    'decoder': cfg.decoder,
    'batch': state.done.shape[0],
    'dtype': dtype,
    'compile_seconds': seconds,
    'bytes': held | {'total': total},
    'fits_gb': [size for size in CHIPS if total <= (1 - _RESERVED) * size * 1e9],
    'collectives': _by_place(collectives(compiled.as_text(), mesh)),
  }


def _arguments(model: ModelConfig, mesh: Mesh, shape: Shape, dtype: str) -> tuple[DecodeConfig, dict, DecodeState]:
  """The config of the program and its parameters and state, without values but with their shardings."""
  decoder = 'dream' if model.logit_alignment == SHIFTED else 'wino'
  block = shape.canvas if decoder == 'dream' else shape.block
  cfg = DecodeConfig(model=model, decoder=decoder, canvas_length=shape.canvas, block_length=block, dtype=dtype)
  batch = shape.rows * mesh.shape['data']

  def start():
    prompt = jnp.zeros((batch, shape.prompt), jnp.int32)
    knobs, seeds = Knobs.make(batch, gen_length=shape.canvas), jnp.zeros((batch,), jnp.uint32)
    return init_state(prompt, jnp.ones(prompt.shape, bool), knobs, seeds, cfg=cfg)

  placed = lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
  params = jax.tree.map(placed, abstract_params(model, dtype), param_shardings(model, mesh))
  return cfg, params, jax.tree.map(placed, jax.eval_shape(start), state_shardings(cfg, mesh))


def _device_bytes(tree: Any) -> int:
  """Bytes that one device holds of arrays."""
  return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _by_place(found: Sequence[Collective]) -> dict[str, dict[str, dict[str, int]]]:
  """Number and bytes of the collectives of each part of a step, by their kind and axes."""
  parts = {}
  for exchange in found:
    name = _PASSES.get(exchange.place) if 'Transformer' in exchange.text else None
    if name is None:
      # A filter of the vocabulary stands in a branch of its own, which rows that ask for none do not take.
      name = 'decision' if exchange.place == ('while',) else 'decision, if filtered'
    part = parts.setdefault(name, {})
    entry = part.setdefault(f'{exchange.kind} over {"+".join(exchange.axes)}', {'count': 0, 'bytes': 0})
    entry['count'] += 1
    entry['bytes'] += exchange.bytes
  return parts


def table(records: Sequence[Mapping[str, Any]]) -> str:
  """Two tables in Markdown: what a device holds, and what it exchanges in one step."""
  lines = [
    '| model | mesh | rows | program | parameters | cache | state | temporaries | total GB | fits GB | compiled in |',
    '|---|---|---|---|---|---|---|---|---|---|---|',
  ]
  for r in records:
    held = ' | '.join(
      f'{r["bytes"][name] / 1e9:.2f}' for name in ('parameters', 'cache', 'state', 'temporaries', 'total')
    )
    fits = ', '.join(str(size) for size in r['fits_gb']) or 'none'
    head = f'| {r["model"]} | {r["mesh"]} | {r["batch"]} | {r["kind"]} {r["dtype"]}'
    lines.append(f'{head} | {held} | {fits} | {r["compile_seconds"]:.0f} s |')
  lines += [
    '',
    '| model | mesh | program | part of a step | collective | number | MB |',
    '|---|---|---|---|---|---|---|',
  ]
  for r in records:
    head = f'| {r["model"]} | {r["mesh"]} | {r["kind"]} {r["dtype"]}'
    for part, kinds in sorted(r['collectives'].items()):
      lines += [f'{head} | {part} | {kind} | {e["count"]} | {e["bytes"] / 1e6:.2f} |' for kind, e in kinds.items()]
    if not r['collectives']:
      lines.append(f'{head} | all | none | 0 | 0.00 |')
  return '\n'.join(lines)


def main(argv: list[str]) -> None:
  del argv
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', N_DEVICES)
  devices, options = None, OPTIONS
  if _TOPOLOGY.value:
    devices, options = topologies.get_topology_desc(topology_name=_TOPOLOGY.value, platform='tpu').devices, {}
  shape = Shape(rows=_ROWS.value, prompt=_PROMPT.value, canvas=_CANVAS.value, block=_BLOCK.value)
  records = []
  for name in _MODELS.value:
    model = MODELS[name]
    if _LAYERS.value:
      model = dataclasses.replace(model, n_layers=_LAYERS.value)
    for mesh in _MESHES.value:
      for dtype in _DTYPES.value:
        found = measure(model, mesh, shape, dtype, options, devices)
        records.append({'model': name, 'shape': dataclasses.asdict(shape)} | found)
        print(json.dumps(records[-1]), flush=True)
  print(f'\n{table(records)}\n\nGB of a device and chips that have it: {CHIPS}; {_RESERVED:.0%} are left unused.')
  if _JSON.value:
    with open(_JSON.value, 'w') as file:
      json.dump(records, file, indent=1)


if __name__ == '__main__':
  app.run(main)

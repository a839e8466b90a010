"""Peak memory of a conversion: a fabricated checkpoint with LLaDA-8B's tensor names and sizes, in 8 shards.

    python benchmarks/convert.py [--layers 5] [--json FILE]

With 5 of LLaDA-8B's 32 layers the shards hold 4.3 GB in bfloat16, embedding and head of 1 GB each among them. The
conversion runs in a process of its own, whose high-water mark of resident memory is compared with what is promised:
twice the largest written array plus 1 GB.
"""

import json
from pathlib import Path
import subprocess
import sys
import tempfile
import time

from absl import app
from absl import flags
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

_LAYERS = flags.DEFINE_integer('layers', 5, 'Layers of the fabricated checkpoint.', lower_bound=1)
_WIDTH = flags.DEFINE_integer('width', 4096, 'Its d_model, a multiple of 128; the rest follows LLaDA-8B.')
_SHARDS = flags.DEFINE_integer('shards', 8, 'Files that it is spread over.', lower_bound=1)
_DTYPE = flags.DEFINE_enum('dtype', None, ['float32', 'bfloat16'], 'Dtype to convert to; by default bfloat16 is kept.')
_FOLDER = flags.DEFINE_string('folder', None, 'Where to work; by default a temporary folder. It is emptied again.')
_JSON = flags.DEFINE_string('json', None, 'File for the figures.')

VOCAB = 126464

# The conversion, and then the high-water mark of this very process: getrusage would report the larger of it and of
# the parent's memory at the fork.
_CHILD = """
import json, re, sys
import jax
jax.config.update('jax_platforms', 'cpu')
from archer_jax.checkpoints.convert import convert
mark = lambda: int(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1]) * 1024
before = mark()
convert(sys.argv[1], sys.argv[2], dtype=sys.argv[3] or None)
print(json.dumps({'imports': before, 'peak': mark()}))
"""


def hf_config(width: int, layers: int) -> dict:
  """LLaDA-8B-Instruct's config.json at another width and depth."""
  return {
    'model_type': 'llada',
    'architectures': ['LLaDAModelLM'],
    'd_model': width,
    'n_layers': layers,
    'n_heads': width // 128,
    'n_kv_heads': width // 128,
    'mlp_hidden_size': 3 * width,
    'mlp_ratio': 4,
    'vocab_size': VOCAB,
    'embedding_size': VOCAB,
    'max_sequence_length': 4096,
    'mask_token_id': 126336,
    'eos_token_id': 126081,
    'pad_token_id': 126081,
    'activation_type': 'silu',
    'bias_for_layer_norm': False,
    'block_type': 'llama',
    'include_bias': False,
    'layer_norm_type': 'rms',
    'rms_norm_eps': 1e-05,
    'rope': True,
    'rope_theta': 500000.0,
    'weight_tying': False,
  }


def tensor_shapes(width: int, layers: int) -> dict[str, tuple[int, ...]]:
  """Every tensor of the published checkpoint, cut to `layers` layers."""
  square, up, down = (width, width), (3 * width, width), (width, 3 * width)
  block = {
    'attn_norm': (width,),
    'ff_norm': (width,),
    **dict.fromkeys(('q_proj', 'k_proj', 'v_proj', 'attn_out'), square),
    'ff_proj': up,
    'up_proj': up,
    'ff_out': down,
  }
  top = {'wte': (VOCAB, width), 'ln_f': (width,), 'ff_out': (VOCAB, width)}
  blocks = {f'blocks.{layer}.{name}': shape for layer in range(layers) for name, shape in block.items()}
  return {f'model.transformer.{name}.weight': shape for name, shape in (top | blocks).items()}


def fabricate(folder: Path, width: int, layers: int, shards: int) -> int:
  """Writes the checkpoint with random bfloat16 weights of trained size and returns its bytes."""
  folder.mkdir(parents=True)
  shapes = tensor_shapes(width, layers)
  names = [f'model-{shard + 1:05}-of-{shards:05}.safetensors' for shard in range(shards)]
  # The largest tensor goes to the shard that holds least so far, so that all of them hold something.
  held = dict.fromkeys(names, 0)
  weight_map = {}
  for tensor in sorted(shapes, key=lambda tensor: -np.prod(shapes[tensor])):
    weight_map[tensor] = min(held, key=held.__getitem__)
    held[weight_map[tensor]] += 2 * int(np.prod(shapes[tensor]))
  # An odd length, or the columns of a tensor would repeat themselves and compress too well.
  noise = np.random.default_rng(0).normal(scale=0.02, size=(1 << 24) + 43).astype(ml_dtypes.bfloat16)
  for name in names:
    tensors = [tensor for tensor in shapes if weight_map[tensor] == name]
    save_file({tensor: np.resize(noise, shapes[tensor]) for tensor in tensors}, folder / name)
  (folder / 'config.json').write_text(json.dumps(hf_config(width, layers)))
  index = {'metadata': {'total_size': sum(held.values())}, 'weight_map': weight_map}
  (folder / 'model.safetensors.index.json').write_text(json.dumps(index))
  return sum(held.values())


def measure(folder: Path, width: int, layers: int, shards: int, dtype: str | None) -> dict:
  """Fabricates a checkpoint under `folder`, converts it and returns sizes in bytes and the time in seconds."""
  size = fabricate(folder / 'source', width, layers, shards)
  start = time.perf_counter()
  command = [sys.executable, '-W', 'ignore', '-c', _CHILD, str(folder / 'source'), str(folder / 'output'), dtype or '']
  child = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
  seconds = time.perf_counter() - start
  marks = json.loads(child.stdout)
  largest = VOCAB * width * (4 if dtype == 'float32' else 2)
  return {
    'source_bytes': size,
    'output_bytes': sum(file.stat().st_size for file in (folder / 'output').rglob('*') if file.is_file()),
    'output_files': sum(file.is_file() for file in (folder / 'output').rglob('*')),
    'shards': shards,
    'layers': layers,
    'width': width,
    'dtype': dtype or 'bfloat16',
    'largest_array_bytes': largest,
    'resident_after_imports_bytes': marks['imports'],
    'peak_resident_bytes': marks['peak'],
    'limit_bytes': 2 * largest + 10**9,
    'within_limit': marks['peak'] <= 2 * largest + 10**9,
    'seconds': seconds,
  }


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'there are no positional arguments, got {argv[1]!r}')
  with tempfile.TemporaryDirectory(dir=_FOLDER.value) as folder:
    figures = measure(Path(folder), _WIDTH.value, _LAYERS.value, _SHARDS.value, _DTYPE.value)
  for name, value in figures.items():
    print(f'{name:>28}  {value / 1e9:.3f} GB' if name.endswith('_bytes') else f'{name:>28}  {value}')
  if _JSON.value:
    Path(_JSON.value).write_text(json.dumps(figures, indent=2) + '\n')


if __name__ == '__main__':
  app.run(main)

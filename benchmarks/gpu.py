"""What a step costs on an accelerator: an 8B model in bfloat16 beside what the same chip reaches at best.

    python benchmarks/gpu.py [--json FILE] [--pairs 10] [--part steps|parity]

`steps`: milliseconds of a refresh and of a reuse step in the compiled loop, random weights in the shapes of LLaDA-8B,
G = 256, B = 64. Beside the measured ratio stands that of counted operations. A step can be no faster than its weights
and kept keys and values are read (at batch 1 this matters) nor than its operations at the rate of one large product;
both rates are measured in the same run. `parity`: logits of the golden checkpoints, in float32 and bfloat16, against
those of the public PyTorch models. The weights take 16 GB.
"""

from collections.abc import Callable
import json
import os
from pathlib import Path
import tempfile
import warnings

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
import numpy as np
from reuse import Case
from reuse import model_config
from timing import alternate
from timing import ratio
from timing import show
from timing import timed

from archer_jax.checkpoints import checkpoint
from archer_jax.checkpoints.convert import convert

# `--json` and `--pairs` are those of reuse.py.
_PART = flags.DEFINE_enum('part', None, ['steps', 'parity'], 'run one part')
_TINY = flags.DEFINE_bool('tiny', False, 'tiny shapes, to see that it runs')

GOLDENS = Path(__file__).parents[1] / 'tests' / 'goldens'
LLADA_8B = model_config(4096, 32, 32, 12288, 126464)
TINY = model_config(32, 2, 2, 48, 64)


def product_timer(n: int) -> tuple[int, Callable[[], float]]:
  """Operations of one large bfloat16 product, and what times it."""
  x = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16)
  product = jax.jit(jnp.matmul)
  return 2 * n**3, lambda: timed(lambda: product(x, x).block_until_ready())


def copy_timer(n: int) -> tuple[int, Callable[[], float]]:
  """Bytes that a pass over `n` bfloat16 numbers reads and writes, and what times it."""
  x = jnp.ones((n,), jnp.bfloat16)
  negate = jax.jit(jnp.negative)
  return 4 * n, lambda: timed(lambda: negate(x).block_until_ready())


def read_bytes(case: Case, kind: str) -> int:
  """What a step must read at least: every weight except the embedding's other rows; in reuse also what is kept."""
  size = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
  config = case.config
  weights = size(case.params) - config.vocab_size * config.d_model * jnp.dtype(case.dtype).itemsize
  kept = 2 * config.n_layers * case.batch * case.prompt * config.n_kv_heads * config.head_dim
  return weights + (kept * jnp.dtype(case.dtype).itemsize if kind == 'reuse' else 0)


def steps(pairs: int) -> list[dict]:
  config, canvas, block = (TINY, 16, 16) if _TINY.value else (LLADA_8B, 256, 64)
  prompts, batches = ((32, 64), (1, 2)) if _TINY.value else ((512, 2048), (1, 8))
  operations, product = product_timer(64 if _TINY.value else 8192)
  moved, copy = copy_timer(2**12 if _TINY.value else 2**31)
  print(f'\nbfloat16, {config.n_layers} layers of {config.d_model}, G = {canvas}, B = {block}, random weights')
  print(
    f'{"P":>6} {"batch":>5} {"refresh ms":>11} {"reuse ms":>9} {"measured ratio":>20} {"counted":>8} '
    f'{"of bandwidth: refresh":>22} {"reuse":>6} {"of product: refresh":>20} {"reuse":>6}'
  )
  params, records = None, []
  for prompt in prompts:
    for batch in batches:
      case = Case(config, prompt, canvas, block, batch=batch, dtype='bfloat16')
      if params is not None:
        # The weights are the same, and two copies of them may not fit.
        case.__dict__['params'] = params
      params = case.params
      timers = {'refresh': case.loop_timer(1), 'reuse': case.loop_timer(0), 'product': product, 'copy': copy}
      times = alternate(timers, pairs)
      counted = {kind: case.flops(kind) for kind in ('refresh', 'reuse')}
      rate, bandwidth = operations / times['product'], moved / times['copy']
      record = {
        'prompt': prompt,
        'batch': batch,
        **{f'{kind}_ms': 1e3 * float(np.median(times[kind])) for kind in counted},
        'measured': ratio(times['refresh'], times['reuse']),
        'counted': counted['refresh'] / counted['reuse'],
        'product_tflops': float(np.median(rate)) / 1e12,
        'bandwidth_gb_per_second': float(np.median(bandwidth)) / 1e9,
        'share_of_bandwidth': {k: ratio(read_bytes(case, k) / bandwidth, times[k]) for k in counted},
        'share_of_product': {k: ratio(counted[k] / rate, times[k]) for k in counted},
      }
      records.append(record)
      bandwidths, products = (
        [f'{r["median"]:.2f}' for r in record[name].values()] for name in ('share_of_bandwidth', 'share_of_product')
      )
      print(
        f'{prompt:>6} {batch:>5} {record["refresh_ms"]:11.2f} {record["reuse_ms"]:9.2f} '
        f'{show(record["measured"]):>20} {record["counted"]:8.2f} {bandwidths[0]:>22} {bandwidths[1]:>6} '
        f'{products[0]:>20} {products[1]:>6}',
        flush=True,
      )
  print(
    f'one large product {records[-1]["product_tflops"]:.1f} TFLOP/s, bandwidth of a copy '
    f'{records[-1]["bandwidth_gb_per_second"]:.0f} GB/s'
  )
  return records


def parity(pairs: int) -> list[dict]:
  del pairs
  print(f'\nlargest difference of logits from the public models\n{"":>12} {"float32":>10} {"bfloat16":>10}')
  records = []
  for source in sorted(GOLDENS.iterdir()):
    cases = json.loads((source / 'cases.json').read_text('utf-8'))['cases']
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
      warnings.filterwarnings('ignore', message='.*no tokenizer files')
      convert(source, Path(folder) / 'checkpoint')
      record = {'checkpoint': source.name}
      for dtype in ('float32', 'bfloat16'):
        model, params, _ = checkpoint.load(Path(folder) / 'checkpoint', dtype=dtype)
        record[dtype] = max(logit_error(model, params, source / c['file']) for c in cases if c['function'] == 'forward')
    records.append(record)
    print(f'{source.name:>12} {record["float32"]:10.1e} {record["bfloat16"]:10.1e}', flush=True)
  return records


def logit_error(model, params: dict, file: Path) -> float:
  """The largest difference of a golden forward's logits; 0 for a case with a mask of its own."""
  with np.load(file) as arrays:
    if 'mask' in arrays or 'attention_mask' in arrays:
      return 0.0
    tokens, expected = arrays['tokens'], arrays['logits']
  batch, length = tokens.shape
  positions = np.tile(np.arange(length, dtype=np.int32), (batch, 1))
  # Else an accelerator multiplies float32 in fewer bits.
  with jax.default_matmul_precision('highest'):
    logits, _ = jax.jit(model.apply)({'params': params}, tokens, positions, np.ones((batch, 1, length, length), bool))
  return float(np.abs(np.asarray(logits, np.float32) - expected).max())


def main(argv: list[str]) -> None:
  del argv
  device = jax.devices()[0]
  print(f'{device.device_kind}, jax {jax.__version__}, load average {os.getloadavg()[0]:.2f}')
  result = {'device': device.device_kind, 'jax': jax.__version__, 'pairs': flags.FLAGS.pairs}
  for name, part in (('parity', parity), ('steps', steps)):
    if _PART.value in (None, name):
      result[name] = part(flags.FLAGS.pairs)
  if flags.FLAGS.json:
    with open(flags.FLAGS.json, 'w') as file:
      json.dump(result, file, indent=1)


if __name__ == '__main__':
  app.run(main)

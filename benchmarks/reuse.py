"""What a reuse step saves: milliseconds per refresh and per reuse step of the compiled loop, beside counted operations.

    python benchmarks/reuse.py [--json FILE] [--pairs 30]

Every comparison alternates two programs in one process and reports the median of the per-pair ratios with its 95 %
interval. Operations are those of the matrix products, counted from the traced program. The other reuse methods are
compared over whole decodings, since what a step of theirs feeds changes from step to step.
"""

from collections.abc import Callable
import dataclasses
import functools
import json
import os

from absl import app
from absl import flags
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
from timing import alternate
from timing import ratio
from timing import show
from timing import timed

from archer_jax.config import DecodeConfig
from archer_jax.config import ModelConfig
from archer_jax.evaluate.work import counted_decode
from archer_jax.evaluate.work import pass_operations
from archer_jax.evaluate.work import total
from archer_jax.loop.step import decode_step
from archer_jax.loop.step import init_state
from archer_jax.model import init_params
from archer_jax.types import DecodeState
from archer_jax.types import Knobs

_JSON = flags.DEFINE_string('json', None, 'write the figures to this file')
_PAIRS = flags.DEFINE_integer('pairs', 30, 'alternating pairs per comparison', lower_bound=3)
_STEPS = flags.DEFINE_integer('steps', 4, 'loop steps per measurement', lower_bound=1)
_ONLY = flags.DEFINE_enum('only', None, ['shapes', 'mixed', 'rate', 'methods'], 'run one part')

# Decoder, prompt, canvas and block. Prompts of common sizes; then one far longer than its answer, and one far shorter,
# where reuse must cost nothing. Saber feeds no shadow, and its logits are those of the whole canvas.
SHAPES = (
  ('wino', 256, 64, 64),
  ('wino', 512, 128, 64),
  ('wino', 1024, 128, 64),
  ('wino', 768, 64, 64),
  ('wino', 512, 32, 32),
  ('wino', 32, 256, 64),
  ('saber', 256, 64, 64),
  ('saber', 512, 128, 128),
  ('saber', 1024, 128, 128),
  ('saber', 512, 256, 256),
)


def model_config(d_model: int, n_layers: int, n_heads: int, d_ff: int, vocab_size: int) -> ModelConfig:
  return ModelConfig(
    family='llada',
    vocab_size=vocab_size,
    d_model=d_model,
    n_layers=n_layers,
    n_heads=n_heads,
    n_kv_heads=n_heads,
    head_dim=d_model // n_heads,
    d_ff=d_ff,
    rope_theta=500_000.0,
    norm_eps=1e-5,
    qkv_bias=False,
    max_length=4096,
    mask_id=vocab_size - 1,
    eos_id=vocab_size - 2,
    pad_id=vocab_size - 2,
    logit_alignment='same_position',
  )


SMALL = model_config(256, 6, 4, 704, 512)  # 5.1M parameters
RATED = model_config(384, 6, 6, 1024, 8000)


@dataclasses.dataclass(frozen=True)
class Case:
  """One model at one shape; both kinds of step, in the loop and bare."""

  config: ModelConfig
  prompt: int
  canvas: int
  block: int
  batch: int = 1
  dtype: str = 'float32'
  decoder: str = 'wino'

  @functools.cached_property
  def cfg(self) -> DecodeConfig:
    return DecodeConfig(
      model=self.config,
      decoder=self.decoder,
      canvas_length=self.canvas,
      block_length=self.block,
      dtype=self.dtype,
    )

  @functools.cached_property
  def params(self) -> dict:
    return init_params(self.config, jax.random.key(0), self.dtype)

  def state(self, interval: int, rows: int | None = None) -> DecodeState:
    """A state after its first refresh; the first `rows` rows refresh at every `interval` steps, the rest never."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, self.config.vocab_size - 2, (self.batch, self.prompt))
    intervals = np.where(np.arange(self.batch) < (self.batch if rows is None else rows), interval, 0)
    # A threshold of 1 commits one token a step, and so does saber of random weights when all is counted, so that no
    # row ends while it is measured.
    knobs = Knobs.make(self.batch, gen_length=self.canvas, threshold=1.0, refresh_interval=intervals)
    valid = jnp.ones(tokens.shape, bool)
    state = init_state(jnp.asarray(tokens), valid, knobs, np.arange(self.batch), cfg=self.cfg)
    return self.loop(state, 1)

  @functools.cached_property
  def _loop(self):
    def run(params, state, steps):
      return lax.fori_loop(0, steps, lambda _, s: decode_step(params, s, cfg=self.cfg)[0], state)

    return jax.jit(run, donate_argnames='state')

  def loop(self, state: DecodeState, steps: int) -> DecodeState:
    return jax.block_until_ready(self._loop(self.params, state, steps))

  def flops(self, kind: str) -> int:
    """Operations of the forward alone: `refresh` or `reuse`."""
    return pass_operations(self.cfg, self.batch, self.prompt)[kind]

  def bare_timer(self, kind: str) -> Callable[[], float]:
    """Seconds of the forward alone, with the logits of the decision rows."""
    state = self.state(0)
    views = self.cfg.decoder_method.views(state, self.cfg)
    run = jax.jit(self.cfg.reuse_method.passes(self.cfg)[kind])
    return lambda: timed(lambda: jax.block_until_ready(run(self.params, state, views)))

  def loop_timer(self, interval: int, rows: int | None = None) -> Callable[[], float]:
    """Seconds per step of the compiled loop."""
    steps = _STEPS.value
    holder = {'state': self.state(interval, rows), 'left': self.canvas - 1}

    def run() -> float:
      if holder['left'] <= steps:
        holder.update(state=self.state(interval, rows), left=self.canvas - 1)
      holder['left'] -= steps

      def advance():
        holder['state'] = self.loop(holder['state'], steps)

      return timed(advance) / steps

    return run


def shapes(pairs: int) -> list[dict]:
  print('\nrefresh and reuse steps, 5M parameters, batch 1')
  print(
    f'{"P, G, B":>20} {"refresh ms":>10} {"reuse ms":>9} {"measured ratio":>20} {"counted":>8} '
    f'{"quotient":>19} {"loop/bare refresh":>20} {"loop/bare reuse":>20}'
  )
  records = []
  for decoder, prompt, canvas, block in SHAPES:
    case = Case(SMALL, prompt, canvas, block, decoder=decoder)
    times = alternate(
      {
        'refresh': case.loop_timer(1),
        'bare_refresh': case.bare_timer('refresh'),
        'reuse': case.loop_timer(0),
        'bare_reuse': case.bare_timer('reuse'),
      },
      pairs,
    )
    counted = case.flops('refresh') / case.flops('reuse')
    measured = ratio(times['refresh'], times['reuse'])
    record = {
      'decoder': decoder,
      'prompt': prompt,
      'canvas': canvas,
      'block': block,
      **{f'{name}_ms': 1e3 * float(np.median(values)) for name, values in times.items()},
      'measured': measured,
      'counted': counted,
      'quotient': {name: value / counted for name, value in measured.items()},
      'loop_over_bare_refresh': ratio(times['refresh'], times['bare_refresh']),
      'loop_over_bare_reuse': ratio(times['reuse'], times['bare_reuse']),
    }
    records.append(record)
    print(
      f'{f"{decoder} {prompt}, {canvas}, {block}":>20} {record["refresh_ms"]:10.1f} {record["reuse_ms"]:9.1f} '
      f'{show(measured):>20} {counted:8.2f} {show(record["quotient"]):>19} '
      f'{show(record["loop_over_bare_refresh"]):>20} {show(record["loop_over_bare_reuse"]):>20}',
      flush=True,
    )
  return records


def mixed(pairs: int) -> list[dict]:
  print('\nmixed batches: rows of 4 that refresh in every step, (512, 128, 64), 5M parameters')
  case = Case(SMALL, 512, 128, 64, batch=4)
  times = alternate({str(rows): case.loop_timer(1, rows) for rows in (0, 1, 2, 4)}, pairs)
  records = []
  for rows, values in times.items():
    relative = ratio(values, times['0'])
    records.append({'refreshing': int(rows), 'ms': 1e3 * float(np.median(values)), 'over_none': relative})
    print(f'{rows:>14} rows {records[-1]["ms"]:8.1f} ms {show(relative):>20} of none', flush=True)
  return records


# Knobs of each method that are not their defaults.
METHODS = {'prompt': {'refresh_distance': 8}, 'prefix': {}, 'dual': {}, 'dkv': {}, 'dkv_greedy': {}, 'dllm': {}}


def decoding(
  batch: int, prompt: int, canvas: int, block: int, reuse: str, knobs: dict
) -> tuple[Callable[[], float], Callable]:
  """Seconds of a whole decoding of the small model, and the operations that it takes."""
  cfg = DecodeConfig(
    model=SMALL,
    decoder='llada',
    reuse=reuse,
    remasking='random' if reuse == 'dkv_greedy' else 'low_confidence',
    canvas_length=canvas,
    block_length=block,
    early_stop=False,
  )
  params = init_params(SMALL, jax.random.key(0))
  tokens = np.random.default_rng(0).integers(0, SMALL.vocab_size - 2, (batch, prompt))
  start = lambda: jax.block_until_ready(
    init_state(
      tokens,
      np.ones(tokens.shape, bool),
      Knobs.make(batch, gen_length=canvas, **knobs),
      np.arange(batch, dtype=np.uint32),
      cfg=cfg,
    )
  )

  def run() -> float:
    state = start()
    return timed(lambda: jax.block_until_ready(counted_decode(params, state, cfg=cfg)))

  def operations() -> int:
    passes = jax.device_get(counted_decode(params, start(), cfg=cfg)[1])
    return total(passes, pass_operations(cfg, batch, prompt))

  return run, operations


def methods(pairs: int) -> list[dict]:
  print('\nwhole decodings by llada, one token a step, 5M parameters, against a refresh in every step')
  print(
    f'{"rows, P, G, B":>18} {"method":>12} {"always ms":>10} {"ms":>9} {"measured ratio":>20} '
    f'{"counted":>8} {"quotient":>19}'
  )
  records = []
  for batch, prompt, canvas, block in ((4, 512, 128, 64), (1, 512, 128, 64)):
    always, its = decoding(batch, prompt, canvas, block, 'prompt', {'refresh_interval': 1})
    every = its()
    runs = {reuse: decoding(batch, prompt, canvas, block, reuse, knobs) for reuse, knobs in METHODS.items()}
    times = alternate({'always': always, **{reuse: run for reuse, (run, _) in runs.items()}}, pairs)
    for reuse, (_, its) in runs.items():
      counted, measured = every / its(), ratio(times['always'], times[reuse])
      record = {
        'method': reuse,
        'batch': batch,
        'prompt': prompt,
        'canvas': canvas,
        'block': block,
        'always_ms': 1e3 * float(np.median(times['always'])),
        'method_ms': 1e3 * float(np.median(times[reuse])),
        'measured': measured,
        'counted': counted,
        'quotient': {name: value / counted for name, value in measured.items()},
      }
      records.append(record)
      print(
        f'{f"{batch}, {prompt}, {canvas}, {block}":>18} {reuse:>12} {record["always_ms"]:10.0f} '
        f'{record["method_ms"]:9.0f} {show(measured):>20} {counted:8.2f} {show(record["quotient"]):>19}',
        flush=True,
      )
  return records


def best_matmul() -> Callable[[], float]:
  """Times one large product; the rate is 2 n^3 over it."""
  a = jnp.asarray(np.random.default_rng(0).normal(size=(1536, 1536)), jnp.float32)
  product = jax.jit(jnp.matmul)
  return lambda: timed(lambda: product(a, a).block_until_ready())


def rates(pairs: int) -> dict:
  print('\nfloating-point rate, d_model 384, 6 layers, 6 heads, d_ff 1024, vocabulary 8000, (512, 128, 64), batch 1')
  case = Case(RATED, 512, 128, 64)
  times = alternate({'refresh': case.loop_timer(1), 'reuse': case.loop_timer(0), 'matmul': best_matmul()}, pairs)
  flops = {'refresh': case.flops('refresh'), 'reuse': case.flops('reuse'), 'matmul': 2 * 1536**3}
  best = flops['matmul'] / times['matmul']
  # The best rate of the whole run is the bar, not that of the same moment.
  ceiling = float(np.quantile(best, 0.9))
  record = {'best_matmul_gflops': ceiling / 1e9}
  print(f'{"large matmul":>14} {ceiling / 1e9:28.1f} GFLOP/s (upper decile)')
  for kind in ('refresh', 'reuse'):
    rate = flops[kind] / times[kind]
    record[kind] = {
      'ms': 1e3 * float(np.median(times[kind])),
      'gflop': flops[kind] / 1e9,
      'share_of_paired_matmul': ratio(rate, best),
      'share_of_best': float(np.median(rate)) / ceiling,
    }
    r = record[kind]
    print(
      f'{kind:>14} {r["ms"]:8.1f} ms {r["gflop"]:6.2f} GFLOP; share of the matmul beside it '
      f'{show(r["share_of_paired_matmul"])}, of the best {r["share_of_best"]:.2f}',
      flush=True,
    )
  return record


def main(argv: list[str]) -> None:
  del argv
  load = os.getloadavg()
  print(f'load average {load[0]:.2f}, {os.cpu_count()} cores, {jax.devices()[0].platform}, jax {jax.__version__}')
  result = {'load_average': load, 'platform': jax.devices()[0].platform, 'pairs': _PAIRS.value}
  for name, part in (('shapes', shapes), ('mixed', mixed), ('rate', rates), ('methods', methods)):
    if _ONLY.value in (None, name):
      result[name] = part(_PAIRS.value)
  result['load_average_after'] = os.getloadavg()
  print(f'load average after {result["load_average_after"][0]:.2f}')
  if _JSON.value:
    with open(_JSON.value, 'w') as file:
      json.dump(result, file, indent=1)


if __name__ == '__main__':
  app.run(main)

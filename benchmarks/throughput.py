"""What continuous batching gains over static batches, and what a mixed batch pays for the rows that refresh.

    python benchmarks/throughput.py [--json FILE] [--rounds 3] [--pairs 30] [--part batching|refresh]

Programs take turns in one process; ratios are medians of the per-round ratios with their 95 % intervals. Beside each
stands what counting predicts: steps of slots for the batches, rows fed and operations for the refreshes.
"""

from collections.abc import Callable
import functools
import heapq
import json
import os

from absl import app
from absl import flags
import jax
import numpy as np
from reuse import SMALL
from reuse import Case
from reuse import model_config
from timing import alternate
from timing import ratio
from timing import show
from timing import timed

from archer_jax.config import ModelConfig
from archer_jax.engine.engine import Setup
from archer_jax.engine.generate import N_BATCHES
from archer_jax.engine.generate import decode_requests
from archer_jax.engine.requests import Request
from archer_jax.engine.requests import make_request
from archer_jax.engine.settings import Settings
from archer_jax.engine.settings import make_settings
from archer_jax.evaluate.work import pass_operations
from archer_jax.model import init_params

# `--json` and `--pairs` are those of reuse.py.
_ROUNDS = flags.DEFINE_integer('rounds', 3, 'alternating rounds of the batches', lower_bound=3)
_PART = flags.DEFINE_enum('part', None, ['batching', 'refresh'], 'run one part')
_REQUESTS = flags.DEFINE_integer('requests', 96, 'requests of a round', lower_bound=1)
_SLOTS = flags.DEFINE_integer('slots', 8, 'rows decoded together', lower_bound=1)
_MIN_DONE = flags.DEFINE_multi_integer(
  'min_done', [], 'also with chunks that end at so many finished rows (repeatable)'
)
_TINY = flags.DEFINE_bool('tiny', False, 'tiny shapes, to see that it runs')

# Steps of a request; the longest takes four times those of the shortest.
MIN_STEPS, MAX_STEPS = 16, 64
TINY = model_config(32, 2, 2, 48, 64)


def mixes(n: int) -> dict[str, np.ndarray]:
  """Numbers of steps of `n` requests: anything between the two, or short and long ones."""
  rng = np.random.default_rng(0)
  return {
    'uniform': rng.integers(MIN_STEPS, MAX_STEPS, n, endpoint=True),
    'short or long': rng.choice([MIN_STEPS, MAX_STEPS], n),
  }


def requests_of(settings: Settings, steps: np.ndarray) -> list[Request]:
  """Requests that differ in nothing but their prompts and their numbers of steps."""
  rng = np.random.default_rng(1)
  top = settings.model.vocab_size - 2
  record = lambda steps: {'prompt_ids': rng.integers(0, top, rng.integers(33, 65)).tolist(), 'steps': int(steps)}
  return [make_request(record(count), index, settings, None) for index, count in enumerate(steps)]


def makespan(steps: np.ndarray, slots: int) -> int:
  """Steps until all are done where the next request takes the first slot that is free."""
  ends = [0] * slots
  for count in steps:
    heapq.heapreplace(ends, ends[0] + int(count))
  return max(ends)


def batching(config: ModelConfig, steps: np.ndarray, mix: str) -> dict:
  n, slots = len(steps), _SLOTS.value
  settings = make_settings(config, {'decoder': 'llada', 'gen_length': 64, 'early_stop': False})
  params = init_params(config, jax.random.key(0))
  requests = requests_of(settings, steps)
  results = {}

  def decode(name: str, n_batches: int = 1, min_done: int | None = None) -> Callable[[], float]:
    setup = Setup(params=params, tokenizer=None, settings=settings, min_done=min_done)

    def run():
      chunks = decode_requests(setup, requests, batch_size=slots, n_batches=n_batches)
      results[name] = [result for chunk in chunks for result in chunk]

    return lambda: timed(run)

  timers = {'static': decode('static'), 'continuous': decode('continuous', n_batches=N_BATCHES)}
  for number in _MIN_DONE.value:
    timers[f'min_done {number}'] = decode(f'min_done {number}', n_batches=N_BATCHES, min_done=number)
  times = alternate(timers, _ROUNDS.value)

  static = results['static']
  for others in results.values():
    assert [(r.steps, r.refreshes) for r in others] == [(r.steps, r.refreshes) for r in static]
  n_same = sum(a.token_ids == b.token_ids for a, b in zip(static, results['continuous'], strict=True))
  # Of a batch everybody waits for the last.
  waited = sum(int(max(steps[start : start + slots])) for start in range(0, n, slots))
  print(
    f'\n{n} requests, {mix}, of {min(steps)} to {max(steps)} steps, mean {np.mean(steps):.1f}, in {slots} slots; '
    f'{n_same} of them with the same tokens both ways\n{"":>14} {"rows/s":>8} {"over static":>20}'
  )
  record = {'mix': mix, 'requests': n, 'slots': slots, 'same_tokens': n_same}
  record['counted'] = waited / makespan(steps, slots)
  for name, values in times.items():
    gain = ratio(times['static'], values)
    record[name] = {'rows_per_second': n / float(np.median(values)), 'over_static': gain}
    print(f'{name:>14} {record[name]["rows_per_second"]:8.2f} {show(gain):>20}')
  print(f'{"steps counted":>14} {"":>8} {record["counted"]:20.2f}', flush=True)
  return record


def refresh(config: ModelConfig, shape: tuple[int, int, int], slots: int, pairs: int) -> dict:
  prompt, canvas, block = shape
  case = Case(config, prompt, canvas, block, batch=slots)
  numbers = [0, *(2**i for i in range(slots.bit_length()))]
  times = alternate({str(number): case.loop_timer(1, number) for number in numbers}, pairs)
  cost = pass_operations(case.cfg, slots, prompt)
  extra = {str(number): times[str(number)] - times['0'] for number in numbers}
  print(
    f'\na step of {slots} rows at P, G, B = {shape}, of which some refresh, over one in which none does '
    f'({1e3 * np.median(times["0"]):.1f} ms)\n{"refreshing":>10} {"ms more":>9} {"rows more":>10} {"GFLOP more":>11} '
    f'{"of all: time":>20} {"rows":>6} {"operations":>11}'
  )
  counted = {}
  for number in numbers[1:]:
    # Up to all but one each is fed its prompt and canvas by itself; all of them feed their prompts in the one pass.
    everyone = number == slots
    rows = slots * prompt if everyone else number * (prompt + canvas)
    counted[number] = rows, cost['refresh'] - cost['reuse'] if everyone else number * cost['row']
  records = []
  for number, (rows, operations) in counted.items():
    share = ratio(extra[str(number)], extra[str(slots)])
    of_rows, of_operations = rows / counted[slots][0], operations / counted[slots][1]
    record = {
      'refreshing': number,
      'extra_ms': 1e3 * float(np.median(extra[str(number)])),
      'extra_rows': rows,
      'extra_operations': operations,
      'share_of_time': share,
      'share_of_rows': of_rows,
      'share_of_operations': of_operations,
    }
    records.append(record)
    print(
      f'{number:>10} {record["extra_ms"]:9.1f} {rows:10} {operations / 1e9:11.2f} {show(share):>20} {of_rows:6.2f} '
      f'{of_operations:11.2f}',
      flush=True,
    )
  return {'shape': shape, 'slots': slots, 'none_ms': 1e3 * float(np.median(times['0'])), 'rows': records}


def main(argv: list[str]) -> None:
  del argv
  load = os.getloadavg()
  print(f'load average {load[0]:.2f}, {os.cpu_count()} cores, {jax.devices()[0].platform}, jax {jax.__version__}')
  config = TINY if _TINY.value else SMALL
  shape = (32, 16, 16) if _TINY.value else (1024, 64, 32)
  result = {'load_average': load, 'platform': jax.devices()[0].platform, 'rounds': _ROUNDS.value}
  parts = {
    'batching': lambda: [batching(config, steps, mix) for mix, steps in mixes(_REQUESTS.value).items()],
    'refresh': functools.partial(refresh, config, shape, 8, flags.FLAGS.pairs),
  }
  for name, part in parts.items():
    if _PART.value in (None, name):
      result[name] = part()
  result['load_average_after'] = os.getloadavg()
  print(f'load average after {result["load_average_after"][0]:.2f}')
  if flags.FLAGS.json:
    with open(flags.FLAGS.json, 'w') as file:
      json.dump(result, file, indent=1)


if __name__ == '__main__':
  app.run(main)

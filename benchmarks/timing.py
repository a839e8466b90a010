"""Times as ratios of programs that take turns in one process, so that a machine that slows down favours none."""

from collections.abc import Callable
from collections.abc import Mapping
import math
import time

import numpy as np


def timed(run: Callable[[], object]) -> float:
  """Seconds that a call takes; what it computes on a device must be waited for in it."""
  start = time.perf_counter()
  run()
  return time.perf_counter() - start


def alternate(timers: Mapping[str, Callable[[], float]], pairs: int) -> dict[str, np.ndarray]:
  """Seconds of each program, the programs taking turns; the first turn, which compiles, does not count."""
  for timer in timers.values():
    timer()
  rounds = [{name: timer() for name, timer in timers.items()} for _ in range(pairs)]
  return {name: np.array([r[name] for r in rounds]) for name in timers}


def ratio(above: np.ndarray, below: np.ndarray) -> dict[str, float]:
  """Median of the per-pair ratios with its 95 % interval from order statistics."""
  values = np.sort(np.asarray(above) / np.asarray(below))
  n = len(values)
  # The rank interval of a median: binomial(n, 1/2) within its 2.5 % tails, by its normal approximation.
  half = 1.96 * math.sqrt(n) / 2
  low, high = max(0, math.floor(n / 2 - half)), min(n - 1, math.ceil(n / 2 + half) - 1)
  return {'median': float(np.median(values)), 'low': float(values[low]), 'high': float(values[high])}


def show(r: Mapping[str, float]) -> str:
  """A ratio with its interval."""
  return f'{r["median"]:.2f} [{r["low"]:.2f}, {r["high"]:.2f}]'

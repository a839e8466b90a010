"""The few statistics of a comparison, exact where that is possible."""

from collections.abc import Sequence
import dataclasses
import math

import numpy as np

# Two-sided 95 %.
_Z = 1.959963984540054
# Below, no interval around a median holds 95 %.
MIN_BATCHES = 6
_DRAWS = 2000


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
  """95 % interval of a share (E. B. Wilson, 1927): holds its level for small n and near 0 and 1 too.

  Args:
    successes: in [0, n].
    n: positive.

  Returns:
    Both ends, in [0, 1].
  """
  share, spread = successes / n, _Z**2 / n
  middle = share + spread / 2
  half = _Z * math.sqrt((share * (1 - share) + spread / 4) / n)
  # The ends are exactly 0 and 1 where rounding would miss them by a hair.
  low = 0.0 if successes == 0 else (middle - half) / (1 + spread)
  high = 1.0 if successes == n else (middle + half) / (1 + spread)
  return low, high


def sign_test(wins: int, losses: int) -> float:
  """Two-sided p of the exact sign test: how likely a fair coin is to come out at least this one-sided.

  Ties count for neither and are left out, as in McNemar's exact test, which this is.

  Returns:
    In (0, 1]; 1 where there is neither a win nor a loss.
  """
  n = wins + losses
  tail, ways = 0, 1
  for k in range(min(wins, losses) + 1):
    tail += ways
    # The next binomial coefficient from this one; whole numbers throughout, since 2^n is soon too large for a float.
    ways = ways * (n - k) // (k + 1)
  return min(1.0, 2 * tail / 2**n)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speedup:
  """How many times as fast a setting is as another.

  Attributes:
    wall: by the clock.
    low, high: the 95 % interval of `wall`; None for fewer than MIN_BATCHES batches.
    counted: by operations, of all batches together.
  """

  wall: float
  low: float | None
  high: float | None
  counted: float


def speedup(
  base_seconds: Sequence[float],
  base_operations: Sequence[int],
  seconds: Sequence[float],
  operations: Sequence[int],
) -> Speedup:
  """Compares two settings by batches that took turns.

  The ratio by the clock is the median over batches of (ratio of the seconds / ratio of the operations), times the ratio
  of all operations. The ratio of all seconds would be at the mercy of one stall; a median of the batches' ratios would
  count a batch of many steps like one of few. Dividing by the counted work before the median and multiplying by it
  after avoids both, and an error of the counting cancels unless it changes from batch to batch. The interval is a
  bootstrap over batches.

  Args:
    base_seconds: of every batch with the setting to compare with.
    base_operations: likewise.
    seconds: of the same batches with this setting.
    operations: likewise.
  """
  base_seconds, base_operations, seconds, operations = (
    np.asarray(values, np.float64) for values in (base_seconds, base_operations, seconds, operations)
  )
  quotients = base_seconds / seconds / (base_operations / operations)

  def wall(batches) -> np.ndarray:
    counted = base_operations[batches].sum(axis=-1) / operations[batches].sum(axis=-1)
    return np.median(quotients[batches], axis=-1) * counted

  n = len(quotients)
  everything = np.arange(n)
  low = high = None
  if n >= MIN_BATCHES:
    draws = np.random.default_rng(0).integers(n, size=(_DRAWS, n))
    low, high = np.quantile(wall(draws), (0.025, 0.975)).tolist()
  return Speedup(
    wall=float(wall(everything)), low=low, high=high, counted=float(base_operations.sum() / operations.sum())
  )

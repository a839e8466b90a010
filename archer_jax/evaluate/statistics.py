"""The few statistics of a comparison, exact where that is possible."""

from collections.abc import Callable
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
    draws: the bootstrapped values that the interval is of, or None.
  """

  wall: float
  low: float | None
  high: float | None
  counted: float
  draws: np.ndarray | None = dataclasses.field(default=None, repr=False, compare=False)


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
  draws = low = high = None
  if n >= MIN_BATCHES:
    draws = wall(np.random.default_rng(0).integers(n, size=(_DRAWS, n)))
    low, high = _middle(draws)
  counted = float(base_operations.sum() / operations.sum())
  return Speedup(wall=float(wall(everything)), low=low, high=high, counted=counted, draws=draws)


def mean_speedup(parts: Sequence[Speedup]) -> Speedup:
  """The mean of speed-ups that were measured on different batches, such as those of several tasks, each counting alike.

  Its interval is there if all of them have one.
  """
  mean = lambda name: float(np.mean([getattr(part, name) for part in parts]))
  draws = low = high = None
  if all(part.draws is not None for part in parts):
    # Drawn apart, or the same draw would be taken for all of them.
    rng = np.random.default_rng(0)
    draws = np.mean([rng.permutation(part.draws) for part in parts], axis=0)
    low, high = _middle(draws)
  return Speedup(wall=mean('wall'), low=low, high=high, counted=mean('counted'), draws=draws)


def paired_bootstrap(mine: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
  """The mean difference of two settings on the same problems, and its 95 % interval by a bootstrap over problems.

  Args:
    mine: a value, or whether it is solved, for every problem.
    other: likewise.

  Returns:
    Difference, low and high.
  """
  gains = np.asarray(mine, np.float64) - np.asarray(other, np.float64)
  draws = np.random.default_rng(0).integers(len(gains), size=(_DRAWS, len(gains)))
  return float(gains.mean()), *_middle(gains[draws].mean(axis=1))


def ranks(values: Sequence[float]) -> np.ndarray:
  """Ranks from 1, float64 [n]; equal values have the mean of their ranks."""
  _, place, count = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
  return (np.cumsum(count) - (count - 1) / 2)[place]


def partial_spearman(x: np.ndarray, y: np.ndarray, *given: np.ndarray) -> float:
  """Spearman's rank correlation of two variables that share nothing with others any more.

  It is the correlation of what is left of the ranks of x and y once the ranks of the others are fitted to them by least
  squares; with one other it is (r_xy - r_xz r_yz) / sqrt((1 - r_xz^2) (1 - r_yz^2)). NaN where nothing is left of
  either, as of a constant.

  Args:
    x: [n].
    y: [n].
    *given: the others, [n] each; without any it is Spearman's own.
  """
  n = len(x)
  known = np.stack([np.ones(n), *map(ranks, given)], axis=1)
  both = np.stack([ranks(x), ranks(y)], axis=1)
  left = both - known @ np.linalg.lstsq(known, both, rcond=None)[0]
  squares = np.sum(left**2, axis=0)
  # What rounding leaves of nothing.
  if np.any(squares <= 1e-9 * np.maximum(np.sum(both**2, axis=0), 1)):
    return float('nan')
  return float(left[:, 0] @ left[:, 1] / np.sqrt(np.prod(squares)))


def group_bootstrap(
  groups: np.ndarray, statistic: Callable[[np.ndarray], Sequence[float]], draws: int = _DRAWS
) -> np.ndarray:
  """Statistics of samples of whole groups, since what is of one group, such as a problem, is not independent.

  Args:
    groups: whose every observation is, [n].
    statistic: called with the indices of the observations of a sample; gives k numbers.
    draws: how many samples.

  Returns:
    float64 [draws, k]; `interval` makes intervals of them.
  """
  order = np.argsort(groups, kind='stable')
  parts = np.split(order, np.flatnonzero(np.diff(groups[order])) + 1)
  rng = np.random.default_rng(0)
  samples = (rng.integers(len(parts), size=len(parts)) for _ in range(draws))
  return np.array([statistic(np.concatenate([parts[i] for i in sample])) for sample in samples], np.float64)


def interval(draws: np.ndarray) -> tuple[float, float] | None:
  """The 95 % interval of bootstrapped values; None if a value is not defined in more than one of twenty samples."""
  known = draws[np.isfinite(draws)]
  return _middle(known) if len(known) >= 0.95 * len(draws) else None


def _middle(draws: np.ndarray) -> tuple[float, float]:
  """What 95 % of the draws lie in."""
  low, high = np.quantile(draws, (0.025, 0.975)).tolist()
  return low, high

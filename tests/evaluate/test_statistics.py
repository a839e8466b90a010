import numpy as np
import pytest

from archer_jax.evaluate.statistics import MIN_BATCHES
from archer_jax.evaluate.statistics import group_bootstrap
from archer_jax.evaluate.statistics import interval
from archer_jax.evaluate.statistics import mean_speedup
from archer_jax.evaluate.statistics import paired_bootstrap
from archer_jax.evaluate.statistics import partial_spearman
from archer_jax.evaluate.statistics import ranks
from archer_jax.evaluate.statistics import sign_test
from archer_jax.evaluate.statistics import speedup
from archer_jax.evaluate.statistics import wilson_interval


# R. G. Newcombe, Two-sided confidence intervals for the single proportion (1998), table I, method 3.
@pytest.mark.parametrize(
  ('successes', 'n', 'low', 'high'),
  [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_interval(successes, n, low, high):
  assert wilson_interval(successes, n) == pytest.approx((low, high), abs=6e-5)
  # The share of failures has the mirrored interval.
  assert wilson_interval(n - successes, n) == pytest.approx((1 - high, 1 - low), abs=6e-5)


def test_the_ends_of_wilsons_interval_are_shares():
  for n in (1, 7, 300):
    assert wilson_interval(0, n)[0] == 0 and wilson_interval(n, n)[1] == 1
    for successes in range(n + 1):
      low, high = wilson_interval(successes, n)
      assert 0 <= low <= successes / n <= high <= 1 and low < high


@pytest.mark.parametrize(
  ('wins', 'losses', 'p'),
  [
    (0, 0, 1.0),
    (1, 0, 1.0),
    (3, 3, 1.0),
    (5, 0, 2 / 32),
    (6, 0, 2 / 64),
    (8, 1, 2 * (1 + 9) / 512),
    (8, 14, 2 * 600_370 / 2**22),
    # scipy.stats.binomtest(22, 28).pvalue
    (22, 6, 0.0037191659212112427),
  ],
)
def test_sign_test(wins, losses, p):
  assert sign_test(wins, losses) == sign_test(losses, wins) == pytest.approx(p, rel=1e-12)


def test_sign_test_of_thousands():
  assert sign_test(5000, 5000) == 1.0
  assert 0 < sign_test(5000, 5400) < 1e-4
  assert sign_test(0, 1000) == 2.0**-999


def trial(rng, n, rate):
  """Operations of batches of very different length, and the seconds that they take at a rate."""
  operations = (1e9 * np.exp(rng.normal(0, 0.5, n))).astype(int)
  return operations / rate, operations


def test_speedup_is_that_of_the_whole_run():
  # Most batches take the same, and three so many steps that they decide.
  base_operations, operations = np.array([1, 1, 1, 1, 1, 10, 10, 10]), np.ones(8)
  found = speedup(base_operations / 2, base_operations, operations, operations)
  assert found.counted == 35 / 8
  # Without noise it is the ratio of the sums, and not the 0.5 of most batches.
  assert found.wall == pytest.approx(35 / 16)
  assert found.low < found.wall < found.high


def test_a_stall_changes_little_and_an_error_of_the_counting_nothing():
  rng = np.random.default_rng(1)
  base_seconds, base_operations = trial(rng, 30, 2e9)
  seconds, operations = trial(rng, 30, 1e9)
  noisy = seconds * np.exp(rng.normal(0, 0.02, 30))
  expected = speedup(base_seconds, base_operations, noisy, operations)
  noisy[7] += seconds.sum()
  stalled = speedup(base_seconds, base_operations, noisy, operations)
  assert stalled.wall == pytest.approx(expected.wall, rel=0.02)
  assert stalled.high == pytest.approx(expected.high, rel=0.1)
  twice = speedup(base_seconds, base_operations, noisy, 2 * operations)
  assert twice.wall == pytest.approx(stalled.wall) and twice.counted == pytest.approx(stalled.counted / 2)


def test_few_batches_have_no_interval():
  ones = [1.0] * MIN_BATCHES
  assert speedup(ones, ones, ones, ones).low == 1.0
  few = speedup(ones[1:], ones[1:], ones[1:], ones[1:])
  assert (few.wall, few.low, few.high) == (1.0, None, None)


def test_a_mean_of_speedups_counts_each_alike():
  ones, noise = np.ones(MIN_BATCHES), np.linspace(0.9, 1.1, MIN_BATCHES)
  twice, thrice = speedup(2 * noise, 2 * ones, ones, ones), speedup(3 * noise, 3 * ones, ones, ones)
  mean = mean_speedup([twice, thrice])
  assert (mean.wall, mean.counted) == (pytest.approx((twice.wall + thrice.wall) / 2), 2.5)
  # Errors of two that know nothing of each other cancel in part, and are no more than those of either.
  assert 0 < mean.high - mean.low < (twice.high - twice.low + thrice.high - thrice.low) / 2
  few = speedup(ones[1:], ones[1:], ones[1:], ones[1:])
  assert mean_speedup([twice, few]).low is None


def test_paired_bootstrap():
  assert paired_bootstrap([True, False] * 50, [True, False] * 50) == (0, 0, 0)
  gain, low, high = paired_bootstrap([True] * 100, [True] * 80 + [False] * 20)
  # The standard error of a share of 0.2 among 100 is 0.04.
  assert gain == pytest.approx(0.2) and low == pytest.approx(0.12, abs=0.02) and high == pytest.approx(0.28, abs=0.02)


def test_equal_values_share_their_rank():
  assert ranks([3, 1, 3, 2]).tolist() == [3.5, 1, 3.5, 2] and ranks([7.0] * 3).tolist() == [2, 2, 2]


def test_partial_spearman():
  x, y, z = np.array([1, 2, 3, 4, 5]), np.array([20, 10, 40, 30, 50]), np.array([5, 3, 1, 2, 4])
  # 1 - 6 sum d^2 / (n (n^2 - 1)) with sums of 4, 26 and 24.
  assert [partial_spearman(x, y), partial_spearman(x, z), partial_spearman(y, z)] == pytest.approx([0.8, -0.3, -0.2])
  expected = (0.8 - 0.06) / np.sqrt((1 - 0.09) * (1 - 0.04))
  assert partial_spearman(x, y, z) == pytest.approx(expected) and partial_spearman(y, x, z) == pytest.approx(expected)
  # Two that are the same take no more away than one.
  assert partial_spearman(x, y, z, z**3) == pytest.approx(expected)
  assert np.isnan(partial_spearman(x, y, x)) and np.isnan(partial_spearman(x, np.ones(5), z))


def test_groups_are_drawn_whole():
  groups, values = np.array([2, 0, 2, 1, 0, 2]), np.array([1.0, 10, 1, 100, 10, 1])
  draws = group_bootstrap(groups, lambda chosen: (len(chosen), values[chosen].sum()), 300)
  sizes = {0: 2, 1: 1, 2: 3}
  possible = {
    (sizes[a] + sizes[b] + sizes[c], sum({0: 20, 1: 100, 2: 3}[g] for g in (a, b, c)))
    for a in range(3)
    for b in range(3)
    for c in range(3)
  }
  assert set(map(tuple, draws.tolist())) == possible
  assert (draws == group_bootstrap(groups, lambda chosen: (len(chosen), values[chosen].sum()), 300)).all()
  low, high = interval(np.r_[np.arange(100.0), np.nan])
  assert (low, high) == pytest.approx((0.025 * 99, 0.975 * 99))
  assert interval(np.r_[np.ones(10), np.nan]) is None

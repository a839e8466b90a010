import numpy as np
import pytest

from archer_jax.evaluate.statistics import MIN_BATCHES
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

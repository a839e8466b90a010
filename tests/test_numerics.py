"""Candidates, log-odds, ranks and noise against plain float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from archer_jax import numerics


def true_log_odds(z, token):
  z = np.asarray(z, np.float64)
  others = np.delete(z, token)
  top = others.max()
  return z[token] - top - np.log(np.exp(others - top).sum())


def test_logit():
  p = np.array([1e-30, 1e-6, 0.1, 0.5, 0.6, 0.9, 1 - 2**-20, 1 - 2**-24], np.float32)
  got = numerics.logit(jnp.asarray(p))
  exact = np.log(p.astype(np.float64)) - np.log1p(-p.astype(np.float64))
  np.testing.assert_allclose(got, exact, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(('p', 'expected'), [(0.0, -np.inf), (-0.5, -np.inf), (1.0, np.inf), (1.1, np.inf)])
def test_logit_is_infinite_where_a_threshold_never_binds(p, expected):
  assert numerics.logit(jnp.float32(p)) == expected


def test_log_odds_equal_float64_over_the_whole_range_of_logits():
  rng = np.random.default_rng(0)
  z = (rng.normal(size=(200, 50)) * rng.choice([0.1, 1, 10, 60], (200, 1))).astype(np.float32)
  token = rng.integers(0, 50, 200).astype(np.int32)
  exact = np.array([true_log_odds(row, t) for row, t in zip(z, token, strict=True)])
  np.testing.assert_allclose(numerics.log_odds(jnp.asarray(z), jnp.asarray(token)), exact, rtol=1e-6, atol=2e-6)


def test_log_odds_keep_an_order_that_probabilities_lose():
  heights = np.array([17.0, 17.5, 30.0, 59.0, 60.0, 61.0], np.float32)
  z = np.zeros((6, 12), np.float32)
  z[:, 3] = heights
  odds = np.asarray(numerics.log_odds(jnp.asarray(z), jnp.full(6, 3, jnp.int32)))
  assert (np.diff(odds) > 0).all()
  assert len(set(np.asarray(jax.nn.softmax(jnp.asarray(z), axis=-1))[2:, 3].tolist())) == 1
  # And of what is all but impossible.
  below = np.asarray(numerics.log_odds(jnp.asarray(z), jnp.zeros(6, jnp.int32)))
  assert (np.diff(below) < 0).all()


def test_log_odds_of_excluded_tokens():
  z = jnp.array([[0.0, -jnp.inf, 1.0], [-jnp.inf, 2.0, -jnp.inf], [-jnp.inf, 2.0, -jnp.inf]])
  odds = numerics.log_odds(z, jnp.array([1, 1, 0]))
  # Excluded; nothing else left; excluded with nothing to compare.
  assert odds.tolist() == [-np.inf, np.inf, -np.inf]
  # An excluded token weighs nothing.
  assert numerics.log_odds(z, jnp.array([2, 1, 1]))[0] == pytest.approx(1.0)


def test_a_common_shift_of_the_logits_changes_no_odds():
  z = np.random.default_rng(1).normal(size=(8, 20)).astype(np.float32)
  token = jnp.arange(8)
  shifted = numerics.log_odds(jnp.asarray(z + 50), token)
  np.testing.assert_allclose(shifted, numerics.log_odds(jnp.asarray(z), token), atol=3e-5)


def test_best_token_takes_the_lower_id_at_ties():
  scores = jnp.array(
    [[1.0, 3.0, 3.0, 2.0], [5.0, 1.0, 4.5, 4.0], [0.0, 0.0, 0.0, 0.0], [-jnp.inf, -jnp.inf, 7.0, -jnp.inf]]
  )
  token, gap = numerics.best_token(scores)
  assert token.dtype == jnp.int32
  assert token.tolist() == [1, 0, 0, 2]
  assert gap.tolist() == [0, 0.5, 0, np.inf]


def test_ranks_equal_a_stable_sort_and_give_ties_to_the_lower_position():
  rng = np.random.default_rng(2)
  score = rng.integers(0, 4, (50, 9)).astype(np.float32)
  score[rng.random(score.shape) < 0.1] = -np.inf
  eligible = rng.random(score.shape) < 0.7
  got = np.asarray(numerics.rank_descending(jnp.asarray(score), jnp.asarray(eligible)))
  for row in range(50):
    order = [column for column in np.argsort(-score[row], kind='stable') if eligible[row, column]]
    expected = np.full(9, 9)
    expected[order] = np.arange(len(order))
    np.testing.assert_array_equal(got[row], expected)


def test_cut_gap():
  inf = np.inf
  score = jnp.array([[4.0, 1, 3, 9], [4, 1, 3, 9], [4, 1, 3, 9], [inf, inf, 3, 9], [1, -inf, -inf, 9], [2, 2, 2, 9]])
  chosen = jnp.array([[1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0]], bool)
  eligible = jnp.array([[1, 1, 1, 0]] * 6, bool)
  # A lead of 1; nothing left out; nothing chosen; two infinities each way, which no finite change parts; a tie.
  assert numerics.cut_gap(score, chosen, eligible).tolist() == [1, inf, inf, inf, inf, 0]


@pytest.mark.parametrize(
  ('a', 'b', 'expected'),
  [
    (3, 1, 2),
    (1, 3, -2),
    (np.inf, np.inf, np.inf),
    (-np.inf, -np.inf, np.inf),
    (np.inf, 0, np.inf),
    (0, np.inf, -np.inf),
  ],
)
def test_distance_is_never_a_number_that_is_none(a, b, expected):
  assert numerics.distance(jnp.float32(a), jnp.float32(b)) == expected


def test_smallest_of_nothing_is_infinite():
  values = jnp.array([[3.0, 1.0], [3.0, 1.0]])
  assert numerics.smallest(values, jnp.array([[True, False], [False, False]])).tolist() == [3, np.inf]


# Compiled, since operation by operation each would be a program of its own; quickly, since they run once.
quick_jit = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})
position_gumbel = quick_jit(numerics.position_gumbel, static_argnames='stream')
position_keys = quick_jit(numerics.position_keys, static_argnames='stream')
add_gumbel = quick_jit(numerics.add_gumbel)


def draws(seed, row_step, index, stream=numerics.TOKEN_STREAM):
  """Noise [B, 4] of rows given as lists."""
  return np.asarray(
    position_gumbel(np.asarray(seed, np.uint32), row_step=np.asarray(row_step, np.int32), index=index, stream=stream)
  )


def test_a_draw_depends_on_seed_stream_step_and_column_alone():
  index = np.array([[0, 1, 2, 3], [2, 3, 4, 5], [0, 1, 2, 3]], np.int32)
  got = draws([7, 7, 8], [5, 5, 5], index)
  # Another batch, another slot and another window of columns.
  alone = draws([7], [5], np.array([[3, 2, 9, 9]], np.int32))
  assert got[0, 3] == got[1, 1] == alone[0, 0] and got[0, 2] == got[1, 0] == alone[0, 1]
  assert (
    len({*got[0], *got[2], *draws([7], [6], index[:1])[0], *draws([7], [5], index[:1], numerics.ORDER_STREAM)[0]}) == 16
  )
  key = jax.random.key(7)
  for part in (numerics.TOKEN_STREAM, 5, 3):
    key = jax.random.fold_in(key, part)
  assert alone[0, 0] == jax.random.gumbel(key, (), jnp.float32)


def test_draws_do_not_depend_on_the_default_generator():
  # Not compiled, since a program would be kept.
  keys = lambda: jax.random.key_data(
    numerics.position_keys(jnp.array([7], jnp.uint32), numerics.TOKEN_STREAM, jnp.array([4]), jnp.array([[0, 3]]))
  )
  with jax.default_prng_impl('rbg'):
    other = keys()
  np.testing.assert_array_equal(other, keys())


def test_streams_differ():
  assert len({numerics.TOKEN_STREAM, numerics.ORDER_STREAM, numerics.ALG_TEMP_STREAM}) == 3


def keys_of(batch, columns):
  index = jnp.broadcast_to(jnp.arange(columns), (batch, columns))
  return position_keys(jnp.arange(batch, dtype=jnp.uint32), row_step=jnp.zeros(batch, jnp.int32), index=index, stream=0)


def test_rows_without_temperature_keep_their_scores_to_the_bit():
  scores = jnp.asarray(np.random.default_rng(3).normal(size=(3, 4, 6)) * 40, jnp.float32)
  keys = keys_of(3, 4)
  got = add_gumbel(scores, jnp.array([0.0, 0.7, 0.0]), keys)
  np.testing.assert_array_equal(got[::2], scores[::2])
  assert (got[1] != scores[1]).all()
  np.testing.assert_array_equal(add_gumbel(scores, jnp.zeros(3), keys), scores)
  # A row's noise does not depend on the temperature of the others.
  np.testing.assert_array_equal(got[1], add_gumbel(scores, jnp.full(3, 0.7), keys)[1])


def test_the_argmax_with_noise_samples_from_the_softmax():
  logits, temperature = np.array([2.0, 1.0, 0.0, -1.0]), 0.8
  count = 20_000
  scores = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (1, count, 4))
  token, _ = numerics.best_token(add_gumbel(scores, jnp.array([temperature]), keys_of(1, count)))
  share = np.bincount(np.asarray(token)[0], minlength=4) / count
  p = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
  # Four standard deviations.
  np.testing.assert_allclose(share, p, atol=4 * np.sqrt(0.25 / count))

"""Attention against a plain sum and against JAX's own, and rotary embeddings."""

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from archer_jax.model import attend
from archer_jax.model.attention import rotary_table
from archer_jax.model.attention import rotate


def inputs(dtype='float32', kv_heads=2, batch=3, length=7, keys=11, heads=4, head_dim=8):
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
  q = draw(batch, length, heads, head_dim)
  k, v = draw(batch, kv_heads, keys, head_dim), draw(batch, kv_heads, keys, head_dim)
  # Left padding, each query blind to one key of its own, and at least one key for everybody.
  mask = np.arange(keys) >= np.array([0, 2, 5])[:, None, None]
  mask = np.broadcast_to(mask, (batch, length, keys)).copy()
  mask[:, np.arange(length), np.arange(length) + 3] = False
  mask[..., -1] = True
  return q, k, v, jnp.asarray(mask[:, None])


def plain(q, k, v, mask):
  q, k, v = (np.asarray(part, np.float64) for part in (q, k, v))
  k, v = (np.repeat(np.swapaxes(part, 1, 2), q.shape[2] // k.shape[1], axis=2) for part in (k, v))
  result = np.zeros(q.shape)
  for b, t, n in np.ndindex(q.shape[:3]):
    seen = np.flatnonzero(mask[b, 0, t])
    scores = k[b, seen, n] @ q[b, t, n] / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max())
    result[b, t, n] = weights / weights.sum() @ v[b, seen, n]
  return result


@pytest.mark.parametrize('kv_heads', [1, 2, 4])
@pytest.mark.parametrize(('dtype', 'tolerance'), [('float32', 1e-5), ('bfloat16', 2e-2)])
def test_padded_and_leave_one_out_mask(kv_heads, dtype, tolerance):
  q, k, v, mask = inputs(dtype, kv_heads)
  values = jax.jit(attend, compiler_options=programs.QUICK)(q, (k, v, mask))
  assert values.dtype == jnp.dtype(dtype)
  np.testing.assert_allclose(values.astype(jnp.float32), plain(q, k, v, mask), atol=tolerance)
  with jax.numpy_dtype_promotion('standard'):
    rows_first = (jnp.swapaxes(part, 1, 2) for part in (k, v))
    oracle = jax.jit(jax.nn.dot_product_attention, compiler_options=programs.QUICK)(q, *rows_first, mask=mask)
  np.testing.assert_allclose(values.astype(jnp.float32), oracle.astype(jnp.float32), atol=tolerance)


@pytest.mark.parametrize('cuts', [(4,), (1, 9), (0,)])
def test_parts_are_one_softmax(cuts):
  q, k, v, mask = inputs()
  parts = zip(*(np.split(part, cuts, axis=axis) for part, axis in ((k, 2), (v, 2), (mask, 3))), strict=True)
  parts = [tuple(map(jnp.asarray, part)) for part in parts if part[0].shape[2]]
  np.testing.assert_allclose(attend(q, *parts), attend(q, (k, v, mask)), atol=1e-6)


def test_a_query_without_keys_stays_finite_and_alone():
  q, k, v, mask = inputs()
  blind = mask.at[1, 0, 4].set(False)
  with jax.debug_nans(True):
    values = attend(q, (k, v, blind))
  assert np.all(np.isfinite(values))
  other = np.ones(values.shape[:2], bool)
  other[1, 4] = False
  np.testing.assert_array_equal(values[other], attend(q, (k, v, mask))[other])


def test_what_a_masked_key_holds_is_never_read():
  q, k, v, mask = inputs()
  for value in (1e4, -1e4):
    spoiled = attend(q, (k.at[1, :, :2].set(value), v.at[1, :, :2].set(value), mask))
    np.testing.assert_array_equal(attend(q, (k, v, mask)), spoiled)


def test_large_scores_do_not_overflow():
  q, k, v, mask = inputs()
  values = attend(100 * q, (100 * k, v, mask))
  assert np.all(np.isfinite(values))
  np.testing.assert_allclose(values, plain(100 * q, 100 * k, v, mask), atol=1e-3)


def test_mask_of_another_rank_is_an_error():
  q, k, v, mask = inputs()
  with pytest.raises(AssertionError):
    attend(q, (k, v, mask[:, 0]))
  with pytest.raises(AssertionError):
    attend(q, (k, v, mask[:, :, :1]))


def test_rotation_turns_the_halves_as_pairs():
  x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 5, 2, 6)), jnp.float32)
  positions = jnp.array([[0, 1, 2, 7, 300]])
  turned = np.asarray(rotate(x, rotary_table(positions, 6, 1e4)), np.float64)
  for t, position in enumerate(positions[0].tolist()):
    for pair in range(3):
      angle = position * 1e4 ** (-2 * pair / 6)
      expected = (np.asarray(x[0, t, :, pair]) + 1j * np.asarray(x[0, t, :, pair + 3])) * np.exp(1j * angle)
      np.testing.assert_allclose(turned[0, t, :, pair], expected.real, atol=1e-4)
      np.testing.assert_allclose(turned[0, t, :, pair + 3], expected.imag, atol=1e-4)


def test_rotation_is_relative_and_keeps_the_dtype():
  rng = np.random.default_rng(2)
  q, k = (jnp.asarray(rng.normal(size=(1, 1, 1, 8)), jnp.float32) for _ in range(2))
  score = lambda at: float(
    jnp.sum(rotate(q, rotary_table(jnp.array([[at + 3]]), 8, 1e4)) * rotate(k, rotary_table(jnp.array([[at]]), 8, 1e4)))
  )
  assert score(0) == pytest.approx(score(40), abs=1e-5)
  assert score(0) != pytest.approx(float(jnp.sum(q * k)), abs=1e-3)
  assert rotate(q.astype(jnp.bfloat16), rotary_table(jnp.array([[2]]), 8, 1e4)).dtype == jnp.bfloat16

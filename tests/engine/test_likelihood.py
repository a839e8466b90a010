"""The Monte Carlo estimate against the whole expectation, written out subset by subset on a plain forward."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from programs import QUICK
import pytest

from archer_jax.config import SAME_POSITION
from archer_jax.engine import likelihood
from archer_jax.engine.likelihood import draw_masks
from archer_jax.engine.likelihood import log_likelihoods
from archer_jax.model import Transformer

PROMPT, ANSWER = [17, 3, 250, 9], [5, 80, 5]
TERMS = jax.jit(likelihood.likelihood_terms.__wrapped__, static_argnames=('config', 'guidance'), compiler_options=QUICK)


@pytest.fixture(autouse=True)
def quick_terms(monkeypatch):
  monkeypatch.setattr(likelihood, 'likelihood_terms', TERMS)


@functools.partial(jax.jit, static_argnames='config', compiler_options=QUICK)
def plain_logits(params, tokens, config):
  """float32 [T, V] of one unpadded row that sees itself whole."""
  rows = tokens.shape[0]
  positions = jnp.arange(rows, dtype=jnp.int32)[None]
  mask = jnp.ones((1, 1, rows, rows), bool)
  return Transformer(config).apply({'params': params}, tokens[None], positions, mask, head_rows=positions)[0][0]


def plain_log_p(golden, prompt, canvas):
  """float64 [G, V] log-probabilities at every canvas column."""
  z = np.asarray(plain_logits(golden.params, np.array([*prompt, *canvas], np.int32), golden.config), np.float64)
  first = len(prompt) - (golden.config.logit_alignment != SAME_POSITION)
  z = z[np.maximum(first + np.arange(len(canvas)), 0)]
  z -= z.max(axis=-1, keepdims=True)
  return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def term(golden, prompt, answer, masked, guidance=None):
  """L / l times the log-probabilities of the masked tokens."""
  canvas = [golden.config.mask_id if i in masked else token for i, token in enumerate(answer)]
  log_p = plain_log_p(golden, prompt, canvas)
  if guidance is not None:
    unguided = plain_log_p(golden, [golden.config.mask_id] * len(prompt), canvas)
    z = unguided + (guidance + 1) * (log_p - unguided)
    log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
  return len(answer) / len(masked) * sum(log_p[i, answer[i]] for i in masked)


def expectation(golden, prompt, answer, **kwargs):
  """The bound itself: mean over l of the mean over all subsets of l tokens."""
  length = len(answer)
  per_count = [
    np.mean([term(golden, prompt, answer, masked, **kwargs) for masked in itertools.combinations(range(length), count)])
    for count in range(1, length + 1)
  ]
  return np.mean(per_count)


def estimate(golden, pairs, **kwargs):
  kwargs = {'seeds': range(len(pairs)), 'n_samples': 600, 'batch_size': 32} | kwargs
  return log_likelihoods(Transformer(golden.config), golden.params, pairs, **kwargs)


@pytest.mark.parametrize('family', ['llada_tiny', 'dream_tiny'])
@pytest.mark.parametrize('prompt', [PROMPT, []], ids=['prompt', 'no prompt'])
def test_converges_to_the_expectation(request, family, prompt):
  golden = request.getfixturevalue(family)
  exact = expectation(golden, prompt, ANSWER)
  terms = [
    term(golden, prompt, ANSWER, masked) for count in (1, 2, 3) for masked in itertools.combinations(range(3), count)
  ]
  # The error of 600 samples, were they independent; the choice of masks must matter far more than that.
  tolerance = 4 * np.std(terms) / 600**0.5
  assert np.ptp(terms) > 10 * tolerance
  assert estimate(golden, [(prompt, ANSWER)])[0] == pytest.approx(exact, abs=tolerance)


@pytest.mark.parametrize('family', ['llada_tiny', 'dream_tiny'])
def test_a_single_token_has_its_own_probability(request, family):
  golden = request.getfixturevalue(family)
  log_p = plain_log_p(golden, PROMPT, [golden.config.mask_id])[0]
  counts = []
  found = estimate(golden, [(PROMPT, [7]), (PROMPT, [250])], progress=counts.append)
  np.testing.assert_allclose(found, log_p[[7, 250]], atol=1e-4)
  # One sample each says it all.
  assert counts == [2]


def test_guidance(llada_tiny):
  exact = term(llada_tiny, PROMPT, [7], (0,), guidance=0.5)
  assert exact != pytest.approx(term(llada_tiny, PROMPT, [7], (0,)), abs=0.01)
  assert estimate(llada_tiny, [(PROMPT, [7])], cfg_scale=0.5)[0] == pytest.approx(exact, abs=1e-4)


def test_an_estimate_depends_on_its_own_pair_and_seed_alone(llada_tiny):
  pairs, seeds = [(PROMPT, ANSWER), (list(range(40)), ANSWER[:2]), (PROMPT, [9]), (PROMPT, ANSWER)], [4, 5, 6, 7]
  together = estimate(llada_tiny, pairs, seeds=seeds, n_samples=5)
  np.testing.assert_array_equal(estimate(llada_tiny, pairs[::-1], seeds=seeds[::-1], n_samples=5), together[::-1])
  for pair, seed, expected in zip(pairs, seeds, together, strict=True):
    assert estimate(llada_tiny, [pair], seeds=[seed], n_samples=5)[0] == expected
  small = estimate(llada_tiny, [pairs[0], pairs[2]], seeds=[4, 6], n_samples=5, batch_size=3)
  np.testing.assert_allclose(small, together[[0, 2]], atol=1e-4)
  # Another seed has other masks.
  assert abs(together[0] - together[3]) > 1e-3


masks = jax.jit(draw_masks, static_argnames='width', compiler_options=QUICK)


def test_masks_are_uniform_and_their_numbers_stratified():
  n, length, width = 240, 4, 16
  same = lambda value, dtype: jnp.full((n,), value, dtype)
  samples = jnp.arange(n, dtype=jnp.int32)
  masked, weight = masks(same(3, jnp.uint32), samples, same(n, jnp.int32), same(length, jnp.int32), width=width)
  masked, weight = np.asarray(masked), np.asarray(weight)
  counts = masked.sum(axis=1)
  np.testing.assert_array_equal(np.bincount(counts)[1:], [n // length] * length)
  np.testing.assert_allclose(weight, length / counts)
  assert not masked[:, length:].any()
  # Of the samples with one mask each column has its share.
  singles = masked[counts == 1][:, :length].sum(axis=0)
  assert singles.sum() == n // length and singles.min() > 5


def test_masks_do_not_depend_on_padding_and_neighbours():
  seeds = jnp.array([3, 9], jnp.uint32)
  row = lambda *values: jnp.array(values, jnp.int32)
  both, _ = masks(seeds, row(2, 1), row(8, 8), row(5, 9), width=16)
  alone, _ = masks(seeds[:1], row(2), row(8), row(5), width=32)
  np.testing.assert_array_equal(both[0, :5], alone[0, :5])


@pytest.mark.parametrize(
  ('changes', 'sentence'),
  [
    ({'pairs': [(PROMPT, [])]}, r'pairs\[0\]: the answer must not be empty'),
    ({'pairs': [(PROMPT, ANSWER), ([1, 10**6], ANSWER)], 'seeds': [0, 1]}, r'pairs\[1\] must be token ids'),
    ({'pairs': [(PROMPT, [4] * 10**4)]}, 'must together be at most the'),
    ({'seeds': [1, 2]}, 'seeds must be as many as pairs, 1, got 2'),
    ({'n_samples': 0}, 'n_samples must be a positive integer, got 0'),
    ({'batch_size': True}, 'batch_size must be a positive integer, got True'),
  ],
)
def test_mistakes_are_told(llada_tiny, changes, sentence):
  arguments = {'pairs': [(PROMPT, ANSWER)], 'seeds': [0]} | changes
  with pytest.raises(ValueError, match=sentence):
    log_likelihoods(Transformer(llada_tiny.config), llada_tiny.params, **arguments)


def test_the_mask_is_no_answer(llada_tiny):
  with pytest.raises(ValueError, match='without the mask'):
    estimate(llada_tiny, [(PROMPT, [llada_tiny.config.mask_id])])


def test_dream_has_no_guidance(dream_tiny):
  with pytest.raises(ValueError, match='guidance'):
    estimate(dream_tiny, [(PROMPT, ANSWER)], cfg_scale=1.0)

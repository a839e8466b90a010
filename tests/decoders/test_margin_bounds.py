"""Where a margin's bound is attained, where it is loose, and where there is none."""

import numpy as np
from programs import with_fields
import pytest
import reference
from stages import KEYS
from stages import noise_of
from stages import random_logits
from stub import MASK
from stub import decide
from stub import make_config
from stub import make_state
from stub import peaked
from stub import repeat

from archer_jax.decoders.dream import entropy_slope


def sides(state, cfg, logits, comparison, margin, tolerance=1e-3):
  """The tokens and flags without a change, and with the worst change of just under and just over the margin."""
  change = comparison.change(margin, logits.shape)
  shares = np.array([0, 1 - tolerance, 1 + tolerance])[:, None, None]
  update = decide(repeat(state, 3), (logits + shares * change).astype(np.float32), cfg=cfg)
  np.testing.assert_allclose(update['margin'][0], margin, rtol=1e-4)
  return [tuple(np.asarray(update[key])[row].tolist() for key in KEYS) for row in range(3)]


def three_masks(alg, mask_prediction='never', **knobs):
  """A step of dream that writes one of three masks."""
  cfg = make_config('dream', 3, alg=alg, mask_prediction=mask_prediction)
  return cfg, with_fields(make_state(cfg, steps=3, **knobs), row_step=np.ones(1), block_step=np.ones(1))


def swap(first, second, token=0):
  """The first position's token falls, the second one's rises."""
  return reference.Comparison('rank', np.nan, ((first, (token,), -1), (second, (token,), 1)))


def test_topk_margin_attains_its_bound_where_two_tokens_share_all_probability():
  cfg, state = three_masks('topk_margin')
  logits = np.full((3, 12), -40.0)
  # p1 - p2 = tanh((z1 - z2) / 2).
  logits[:, :2] = [[2 * np.arctanh(0.021), 0], [2 * np.arctanh(0.001), 0], [0, 0]]
  before, inside, outside = sides(state, cfg, logits, swap(0, 1), 0.02 / 2)
  assert before == inside != outside
  assert before[1] == [True, False, False] and outside[1] == [False, True, False]


@pytest.mark.parametrize('mask_prediction', ['official', 'never'])
def test_entropy_attains_its_bound_at_one_token_against_equal_others(mask_prediction):
  cfg, state = three_masks('entropy', mask_prediction)
  # With `never` the entropy is over one token less than L_V is made for: the margin is that much too small.
  tokens = 12 if mask_prediction == 'official' else 11
  steepness = lambda q: 2 * q * (1 - q) * (np.log(tokens - 1) + np.log(q / (1 - q)))
  q = max(np.linspace(0.5, 0.999, 100_000), key=steepness)
  best = np.log(q / (1 - q)) + np.log(tokens - 1)
  logits = np.zeros((3, 12))
  logits[:2, 0] = best + 0.02, best - 0.02
  logits[:, 11] = 0 if mask_prediction == 'official' else 3

  def negative_entropy(z):
    p = np.exp(z[:tokens]) / np.exp(z[:tokens]).sum()
    return np.sum(p * np.log(p))

  gap = negative_entropy(logits[0]) - negative_entropy(logits[1])
  margin = gap / (2 * reference.entropy_slope(12))
  looseness = reference.entropy_slope(12) / reference.entropy_slope(tokens)
  assert looseness == 1 if mask_prediction == 'official' else 1 < looseness < 1.04
  before, inside, outside = sides(state, cfg, logits, swap(0, 1), margin, tolerance=1.001 * looseness - 1)
  assert before == inside != outside
  assert before[1] == [True, False, False] and outside[1] == [False, True, False]


def test_noisy_order_attains_its_bound_at_probability_one_half():
  _, state = three_masks('maskgit_plus')
  order = noise_of(state, np.arange(3)[None])[-1][0]
  first, second, third = np.argsort(-order)
  cfg, state = three_masks('maskgit_plus', alg_temp=0.02 / (order[first] - order[second]))
  logits = np.zeros((3, 12))
  # log(11) against eleven equal tokens is one half.
  logits[[first, second], 0] = np.log(11)
  before, inside, outside = sides(state, cfg, logits, swap(first, second), 0.02)
  assert before == inside != outside
  assert before[1][first] and outside[1][second] and not before[1][third]


@pytest.mark.parametrize('vocab', [3, 12, 320])
def test_entropy_slope_is_the_steepest_measured_one(vocab):
  first = np.where(np.arange(vocab) == 0, 1.0, 0.0)

  def entropy(z):
    log_p = z - reference.logsumexp(z)
    return -np.sum(np.exp(log_p) * log_p)

  rates = [
    abs(entropy((height + 1e-4) * first) - entropy((height - 1e-4) * first)) / 1e-4
    for height in np.linspace(0, 20, 400)
  ]
  # Moved by e against all others, which is half of what its distance to them moves.
  assert max(rates) == pytest.approx(entropy_slope(vocab), rel=1e-3)
  assert entropy_slope(126_464) == pytest.approx(reference.entropy_slope(126_464), rel=1e-6)


def wino_row(**knobs):
  """One block of 8, half of it standing, five pending and a shadow: state and random logits."""
  cfg = make_config('wino', 8)
  canvas = np.array([[0, 1, 2, 3, MASK, MASK, MASK, MASK]])
  last_accept = knobs.pop('last_accept', 3)
  state = make_state(cfg, max_accept=20, **knobs)
  state = with_fields(state, canvas=canvas, pending=canvas == MASK, last_accept=np.array([last_accept]))
  logits = random_logits(np.random.default_rng(6), (16, 12), MASK)
  # Two candidates are certain, two are doubtful.
  logits[4:8] = peaked([4, 5, 6, 7], [9, 8, 2, 2.5])
  logits[8:12] = peaked([0, 1, 2, 3], [4, 4.5, 5, 2.2])
  return cfg, state, logits


def margin_of(cfg, state, logits):
  return decide(state, logits[None], cfg=cfg)['margin'].item()


LN11 = np.log(11)


@pytest.mark.parametrize('threshold_back', [0.0, 1.0, 1.1])
def test_thresholds_that_nothing_can_cross_bear_no_margin(threshold_back):
  # Log-odds of these rows: 9, 8, 2 and 2.5 less log 11; half the lead of what is written is 4 and 4.5 at least.
  accept = abs(2.5 - LN11 - reference.logit(0.6)) / 2
  cfg, state, logits = wino_row(threshold=0.6, threshold_back=threshold_back, last_accept=30)
  assert margin_of(cfg, state, logits) == pytest.approx(accept, rel=1e-5)


def test_a_threshold_of_zero_or_one_bears_no_margin():
  cfg, state, logits = wino_row(threshold=0.0, threshold_back=0.0)
  # All four are written: only their own leads count, the smallest one is 2.
  assert margin_of(cfg, state, logits) == pytest.approx(1.0, rel=1e-6)
  cfg, state, logits = wino_row(threshold=1.0, threshold_back=0.9)
  # One is written, the best: what remains is its rank, 9 against 8, and no verification takes place.
  assert margin_of(cfg, state, logits) == pytest.approx(1 / 4, rel=1e-6)


@pytest.mark.parametrize(
  ('knobs', 'verified'), [({}, True), ({'threshold': 0.999}, False), ({'last_accept': 1}, False)]
)
def test_verification_counts_only_where_it_takes_place(knobs, verified):
  # With threshold 0.999 (log-odds 6.9) nothing passes and one token is accepted; last_accept 1 re-masks nothing.
  cfg, state, logits = wino_row(**{'threshold': 0.6, 'threshold_back': 0.5} | knobs)
  margin = margin_of(cfg, state, logits)
  # Support of token 3 is 2.2 less log 11, nearest to the threshold's 0.
  assert (margin == pytest.approx(abs(2.2 - LN11) / 2, rel=1e-4)) == verified
  other = logits.copy()
  other[11] = peaked([3], [2.6])
  assert (margin_of(cfg, state, other) == margin) != verified


def test_a_step_without_a_choice_bears_only_the_margin_of_its_tokens():
  cfg = make_config('llada', 4)
  logits = peaked([0, 1, 2, 3], [3, 4, 5, 6])
  assert margin_of(cfg, make_state(cfg, steps=1), logits) == pytest.approx(1.5)
  assert margin_of(cfg, make_state(cfg, steps=4), logits) == pytest.approx(1 / 4)
  cfg = make_config('dream', 4, alg='maskgit_plus')
  assert margin_of(cfg, make_state(cfg, steps=1), logits) == pytest.approx(1.5)
  # More steps than tokens: this step writes nothing.
  assert margin_of(cfg, make_state(cfg, steps=40), logits) == np.inf
  # The order is drawn, and without sampling the best token survives every filter.
  cfg = make_config('dream', 4, alg='origin')
  for knobs in ({}, {'top_k': 1}, {'top_k': 2, 'top_p': 0.7}, {'top_p': 0.0}):
    assert margin_of(cfg, make_state(cfg, steps=1, **knobs), logits) == pytest.approx(1.5)

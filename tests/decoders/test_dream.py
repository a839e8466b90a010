"""Dream's decoder on hand-made logits: the time schedule, the four orders, temperature and the filters."""

import numpy as np
import pytest
from stub import EOS
from stub import MASK
from stub import decide
from stub import make_config
from stub import make_state
from stub import peaked
from stub import play

from archer_jax.types import Status

ALGS = ('origin', 'maskgit_plus', 'topk_margin', 'entropy')
G = 8


def config(alg, gen_length=G, **fields):
  return make_config('dream', gen_length, alg=alg, **fields)


def history(states, name):
  return np.stack([np.asarray(getattr(state, name)) for state in states])


def commits(states, row=0):
  return np.diff([int(state.counters.accepted[row]) for state in states])[
    : int(states[-1].counters.steps[row])
  ].tolist()


def table(gen_length=G, seed=0, batch=2):
  return np.random.default_rng(seed).normal(size=(batch, 8, gen_length, 12)) * 3


# One canvas serves all of these schedules: gen_length, steps, tokens written per step.
SCHEDULES = [
  (32, 8, [3, 4, 4, 4, 4, 4, 4, 5]),
  (32, 1, [32]),
  (20, 10, [1] + [2] * 8 + [3]),
  (12, 6, [1, 2, 2, 2, 2, 3]),
]


def public_schedule(masks, steps):
  """Tokens per step, as the public code computes them."""
  times = np.linspace(1, 1e-3, steps + 1, dtype=np.float32)
  counts = []
  for step in range(steps):
    counts.append(masks if step == steps - 1 else int(np.float32(masks) * (1 - times[step + 1] / times[step])))
    masks -= counts[-1]
  return counts


def test_each_row_follows_the_schedule_of_its_own_masks():
  rows = [
    *SCHEDULES,
    *((length, steps, public_schedule(length, steps)) for length, steps in [(32, 31), (9, 40), (1, 3), (31, 5)]),
  ]
  assert all(public_schedule(length, steps) == counts for length, steps, counts in rows)
  lengths, steps, expected = zip(*rows, strict=True)
  cfg = config('entropy', 32)
  state = make_state(cfg, len(rows), gen_length=np.array(lengths), steps=np.array(steps))
  states = play(state, cfg, table(32, batch=len(rows)))
  for row, counts in enumerate(expected):
    # Nothing is left to do once the last mask is written.
    needed = np.flatnonzero(counts)[-1] + 1
    assert commits(states, row) == counts[:needed]
  # With more steps than tokens the early ones write nothing; each is still a forward.
  assert commits(states, lengths.index(9))[0] == 0
  canvas, inside = np.asarray(states[-1].canvas), np.arange(32) < np.array(lengths)[:, None]
  assert (canvas[inside] != MASK).all() and (canvas[~inside] == MASK).all()
  assert (states[-1].status == Status.LENGTH).all()


@pytest.mark.parametrize('alg', ALGS)
def test_every_order_ends_with_every_token_written_and_none_taken_back(alg):
  cfg = config(alg)
  logits = table()
  logits[..., MASK] += 5
  states = play(make_state(cfg, 2, steps=5, seeds=[1, 2]), cfg, logits)
  canvas = history(states, 'canvas')
  assert (canvas[-1] != MASK).all()
  kept = canvas[:-1] != MASK
  np.testing.assert_array_equal(canvas[1:][kept], canvas[:-1][kept])
  assert states[-1].counters.accepted.tolist() == [G, G]
  # Without a temperature every token is the best one of the step that wrote it, the mask token aside.
  for step in range(len(canvas) - 1):
    best = logits[:, min(step, 7), :, :MASK].argmax(axis=-1)
    wrote = canvas[step] != canvas[step + 1]
    np.testing.assert_array_equal(canvas[step + 1][wrote], best[wrote])


def first_written(alg, logits, **knobs):
  """The columns that the first of two steps writes, of four."""
  cfg = config(alg, 4)
  got = decide(make_state(cfg, steps=2, **knobs), np.asarray(logits)[None], cfg=cfg)
  return np.flatnonzero(np.asarray(got['accepted'])[0]).tolist()


def test_each_order_has_its_own_score():
  # Two logits raised to one height; the third row's second token is higher than the others' but so is its first.
  logits = np.zeros((4, 12))
  logits[0, :2] = 5, 4.9  # sure of two tokens: low entropy, no margin
  logits[1, 0] = 3.2  # one token over many: the largest margin
  logits[2, :1] = 1
  assert [first_written(alg, logits) for alg in ('entropy', 'topk_margin')] == [[0], [1]]
  p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
  assert first_written('maskgit_plus', logits) == [int(p.max(axis=1).argmax())] == [1]


def test_ties_go_to_the_lower_position_and_order_survives_saturation():
  for alg in ('entropy', 'topk_margin', 'maskgit_plus'):
    assert first_written(alg, np.zeros((4, 12))) == [0]
    assert first_written(alg, peaked([1, 1, 1, 1], [1, 4, 4, 2])) == [1]
  # Probabilities that float32 rounds to 1.
  assert first_written('maskgit_plus', peaked([1, 1, 1, 1], [30, 59, 60, 40])) == [2]


@pytest.mark.parametrize('temperature', [0.0, 1e-6, 1.0])
@pytest.mark.parametrize('alg', ['entropy', 'topk_margin', 'maskgit_plus'])
def test_scores_are_numbers_at_any_temperature(alg, temperature):
  # A token at -1e4 has probability 0, whose logarithm must not enter; so has every other one at temperature 1e-6.
  logits = peaked([1, 2, 3, 4], [3, 2, 4, 1])
  logits[:, 7] = -1e4
  cfg = config(alg, 4)
  got = decide(make_state(cfg, steps=2, temperature=temperature), logits[None], cfg=cfg)
  assert np.asarray(got['accepted']).sum() == 1
  assert not np.isnan(got['margin'][0])
  if temperature == 0:
    assert np.flatnonzero(got['accepted'][0]).tolist() == [2]


def test_temperature_near_zero_is_temperature_zero():
  # The scores are of the logits over the temperature, as published, so that the order may differ; without an order
  # of the model's the path is the same.
  cfg = config('origin')
  run = lambda temperature: history(
    play(make_state(cfg, 2, steps=5, seeds=[1, 2], temperature=temperature), cfg, table()), 'canvas'
  )
  cold = run(0.0)
  np.testing.assert_array_equal(cold, run(1e-6))
  assert (cold[1:] != run(1.0)[1:]).any()


def test_origin_writes_the_share_of_the_schedule_at_random():
  cfg = config('origin', 64)
  logits = table(64, batch=16)
  states = play(make_state(cfg, 16, steps=4, seeds=range(16)), cfg, logits)
  written = (history(states, 'canvas') != MASK).mean(axis=(1, 2))
  # Four standard deviations of 1,024 draws.
  np.testing.assert_allclose(written[1:4], [0.25, 0.5, 0.75], atol=4 * np.sqrt(0.25 / 1024))
  assert written[4] == 1
  first = np.asarray(states[1].canvas) != MASK
  assert len({row.tobytes() for row in first}) == 16


def test_alg_temp_draws_the_order_by_the_exponential_of_confidence():
  # The public code draws positions without replacement from softmax(confidence / alg_temp).
  rows, alg_temp = 10_000, 0.4
  logits = peaked([1, 2, 3, 4], [1, 2, 3, 4])
  cfg = config('maskgit_plus', 4)
  state = make_state(cfg, rows, steps=2, seeds=range(rows), alg_temp=alg_temp)
  got = decide(state, np.broadcast_to(logits, (rows, 4, 12)), cfg=cfg)
  share = np.asarray(got['accepted']).mean(axis=0)
  p = (np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)).max(axis=1)
  weight = np.exp(p / alg_temp)
  np.testing.assert_allclose(share, weight / weight.sum(), atol=4 * np.sqrt(0.25 / rows))


@pytest.mark.parametrize(
  ('knobs', 'allowed'),
  [
    ({}, range(11)),
    # Probabilities 0.4, 0.3, 0.2 and 0.1: a token goes where the mass before it exceeds top_p.
    ({'top_p': 0.05}, [0]),
    ({'top_p': 0.35}, [0]),
    ({'top_p': 0.45}, [0, 1]),
    ({'top_p': 0.65}, [0, 1]),
    ({'top_p': 0.75}, [0, 1, 2]),
    ({'top_p': 0.0}, [0]),
    ({'top_k': 1}, [0]),
    ({'top_k': 3}, [0, 1, 2]),
    ({'top_k': 100}, range(11)),
    ({'top_k': 3, 'top_p': 0.65}, [0, 1]),
    ({'top_k': 1, 'top_p': 0.95}, [0]),
  ],
)
def test_filters_leave_the_tokens_that_they_say(knobs, allowed):
  # Tokens are drawn from what is left, in its proportions; the mask token is no candidate of either filter.
  rows = 512
  logits = np.full((rows, 4, 12), -30.0)
  if knobs and knobs.get('top_k') != 100:
    logits[..., :4] = np.log([0.4, 0.3, 0.2, 0.1])
  else:
    logits[..., :MASK] = 0
  logits[..., MASK] = 1
  cfg = config('origin', 4)
  state = make_state(cfg, rows, steps=1, seeds=range(rows), temperature=1.0, **knobs)
  drawn = np.asarray(decide(state, logits, cfg=cfg)['canvas'])
  assert sorted(set(drawn.ravel())) == list(allowed)


def test_filters_apply_to_the_logits_over_the_temperature():
  # At temperature 2 the probabilities 0.64, 0.16, 0.16, 0.04 become 0.44, 0.22, 0.22, 0.11.
  rows = 256
  logits = np.full((rows, 4, 12), -60.0)
  logits[..., :4] = np.log([0.64, 0.16, 0.159, 0.04])
  cfg = config('origin', 4)
  drawn = [
    set(
      np.unique(
        decide(make_state(cfg, rows, steps=1, seeds=range(rows), temperature=t, top_p=0.6), logits, cfg=cfg)['canvas']
      )
    )
    for t in (1.0, 2.0)
  ]
  assert drawn == [{0}, {0, 1}]


@pytest.mark.parametrize(('alg', 'expected'), [('topk_margin', 2), ('maskgit_plus', 2), ('entropy', 0)])
def test_a_position_with_one_token_left_has_no_second(alg, expected):
  # top_k 1 leaves token 0, 1, 2 and 3; position 2 gives it the largest share beside the mask token, which alone stays
  # in the softmax. The entropy of one token is 0 for all, so that the lower position comes first.
  logits = peaked([0, 1, 2, 3], [4, 4.5, 5, 3])
  assert first_written(alg, logits, top_k=1) == [expected]
  assert first_written(alg, peaked([0, 1, 2, 3], [5, 4.5, 4, 3]), top_k=1) == [0]


def test_the_mask_token_keeps_its_probability():
  # Column 0 has the larger logit, but beside the mask token's it is the less probable one.
  logits = peaked([3] * 4, [6, 4, 1, 1])
  logits[0, MASK] = 8
  for alg in ('maskgit_plus', 'topk_margin'):
    assert first_written(alg, logits) == [1]
  # The entropy is that of the candidates alone.
  assert first_written('entropy', logits) == [0]


def test_an_end_token_ends_a_row_as_soon_as_no_mask_stands_before_it():
  cfg = config('maskgit_plus', early_stop=True)
  # Column 2 is written first and holds the end token; the columns before it are the next two.
  logits = peaked([1, 1, EOS, 1, 1, 1, 1, 1], [8, 7, 9, 6, 5, 4, 3, 2])
  states = play(make_state(cfg, steps=8), cfg, logits)
  canvas = history(states, 'canvas')[:, 0].tolist()
  assert canvas[-2] == [1, MASK, EOS] + [MASK] * 5
  assert canvas[-1] == [1, 1, EOS] + [MASK] * 5
  assert int(states[-1].status[0]) == Status.STOP


def test_official_mask_prediction_may_leave_masks():
  cfg = config('maskgit_plus', mask_prediction='official')
  logits = peaked([1] * G, 3)
  logits[2, MASK] = 9
  states = play(make_state(cfg, steps=4), cfg, logits)
  # The mask token is written again and again, and stays.
  assert states[-1].canvas[0].tolist() == [1, 1, MASK, 1, 1, 1, 1, 1]
  assert int(states[-1].counters.steps[0]) == 4 and bool(states[-1].done[0])

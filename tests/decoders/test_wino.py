"""WINO's rule on hand-made logits: what is committed, what is taken back, and when a block ends."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from programs import with_fields
import pytest
from reference import log_odds
from stub import EOS
from stub import MASK
from stub import QUICK_COMPILE
from stub import decide
from stub import make_config
from stub import make_state
from stub import peaked
from stub import play

from archer_jax.decoders import base
from archer_jax.types import Status

# Random states are compared with the float64 rule in test_margins.py; here stand single rules. The tests share few
# shapes, since every one is a program to compile.
G = 8
ONE_BLOCK = make_config('wino', G)
TWO_BLOCKS = make_config('wino', G, 4)


def standing(canvas, last_accept=3, **knobs):
  """One row in its only block, masks pending and tokens standing."""
  state = make_state(ONE_BLOCK, **knobs)
  canvas = np.asarray(canvas)[None]
  return with_fields(state, canvas=canvas, pending=canvas == MASK, last_accept=[last_accept])


def decide_one(logits, shadow=None, state=None, **knobs):
  """The update of one row of one block; the shadow knows nothing unless given."""
  shadow = np.zeros((G, 12)) if shadow is None else shadow
  state = make_state(ONE_BLOCK, **knobs) if state is None else state
  return decide(state, np.concatenate([logits, shadow])[None], cfg=ONE_BLOCK)


def columns(flags):
  return np.flatnonzero(np.asarray(flags)[0]).tolist()


def test_only_what_is_confident_is_committed():
  # One confident position and nine that know nothing.
  cfg = make_config('wino', 10)
  logits = np.concatenate([peaked(np.arange(10), [0] * 4 + [12] + [0] * 5), np.zeros((10, 12))])
  got = decide(make_state(cfg, threshold=0.9), logits[None], cfg=cfg)
  assert columns(got['accepted']) == [4]
  assert got['canvas'][0].tolist() == [MASK] * 4 + [4] + [MASK] * 5
  # Nobody confident: exactly one, the lowest of equals.
  got = decide(make_state(cfg, threshold=0.9), np.zeros((1, 20, 12)), cfg=cfg)
  assert columns(got['accepted']) == [0]
  logits[4] = peaked([4], [3])
  got = decide(make_state(cfg, threshold=0.9), logits[None], cfg=cfg)
  assert columns(got['accepted']) == [4]


def test_a_probability_equal_to_the_threshold_does_not_pass():
  # log(11) against eleven equal tokens is one half, up to rounding.
  heights = np.log(11) + np.array([1e-4, -1e-4, 1e-4, -1e-4, 0, 0, 0, 0]) - np.array([0] * 4 + [1] * 4)
  assert columns(decide_one(peaked([0] * G, heights), threshold=0.5)['accepted']) == [0, 2]
  # Two tokens share everything, so that the log-odds are exactly 0: nothing passes, the best one is taken.
  exact = np.full((G, 12), -np.inf)
  exact[:, :2] = 0
  assert columns(decide_one(exact, threshold=0.5)['accepted']) == [0]


@pytest.mark.parametrize('max_accept', [20, 1000])
def test_cap_is_seven_tenths_of_the_pending_ones_in_float32(max_accept):
  # Everything is certain, so that the cap decides how many are committed; row n has n positions.
  cfg = make_config('wino', 128)
  lengths = np.arange(1, 129)
  state = make_state(cfg, 128, gen_length=lengths, max_accept=max_accept)
  got = decide(state, np.broadcast_to(peaked([3] * 256, 20), (128, 256, 12)), cfg=cfg)
  share = (np.float32(0.7) * lengths.astype(np.float32)).astype(int)
  expected = np.minimum(np.minimum(np.maximum(share, 5), max_accept), lengths)
  np.testing.assert_array_equal(got['accepted'].sum(axis=1), expected)
  np.testing.assert_array_equal(got['last_accept'], expected)


def test_more_than_the_cap_keeps_the_most_confident_and_ties_go_to_the_lower_position():
  logits = peaked([1] * G, [9, 8, 9, 12, 8, 59, 8, 60])
  assert columns(decide_one(logits, max_accept=5)['accepted']) == [0, 2, 3, 5, 7]
  # Probabilities that float32 rounds to 1 keep their order.
  assert columns(decide_one(logits, max_accept=1)['accepted']) == [7]
  assert columns(decide_one(logits, max_accept=2)['accepted']) == [5, 7]
  assert columns(decide_one(peaked([1] * G, 9), max_accept=5)['accepted']) == [0, 1, 2, 3, 4]


CANVAS = [3, 4, 5, 6, MASK, MASK, MASK, MASK]


def verification(last_accept, support, confident=2, threshold_back=0.9):
  """Four standing tokens with these heights in the shadow, four pending positions."""
  heights = [0] * 4 + [15] * confident + [0] * (4 - confident)
  shadow = peaked(range(3, 11), [*support, 0, 0, 0, 0])
  state = standing(CANVAS, last_accept, threshold_back=threshold_back)
  return decide_one(peaked(range(3, 11), heights), shadow, state)


def test_doubtful_tokens_are_taken_back_and_go_pending():
  got = verification(30, [1, 12, 2, 12])
  assert columns(got['remasked']) == [0, 2]
  assert got['canvas'][0].tolist() == [MASK, 4, MASK, 6, 7, 8, MASK, MASK]
  assert columns(got['pending']) == [0, 2, 6, 7]
  assert not got['block_done'][0]


@pytest.mark.parametrize(
  ('last_accept', 'expected'), [(1, []), (2, [2]), (3, [2, 3]), (4, [0, 2, 3]), (5, [0, 1, 2, 3])]
)
def test_at_most_one_less_than_the_step_before_committed_is_taken_back(last_accept, expected):
  # All four are doubtful, the least supported ones go first; what this step commits is not verified in it.
  assert columns(verification(last_accept, [3, 3.5, 1, 2])['remasked']) == expected


def test_equal_support_takes_back_the_lower_position():
  assert columns(verification(3, [1, 1, 1, 1])['remasked']) == [0, 1]


@pytest.mark.parametrize('confident', [0, 1])
def test_a_single_accept_takes_nothing_back(confident):
  got = verification(30, [0, 0, 0, 0], confident)
  assert columns(got['accepted']) == [4] and columns(got['remasked']) == []


def test_a_token_is_judged_by_the_probability_of_itself_and_not_of_the_best():
  # The shadow is certain of another token at column 1.
  shadow = peaked([3, 9, 5, 6, 0, 0, 0, 0], 15)
  assert columns(decide_one(peaked(range(3, 11), 15), shadow, standing(CANVAS))['remasked']) == [1]


def random_play(seed, gen_length=32, block_length=16, batch=8, **knobs):
  """A chaotic model: new random logits at each step, often confident."""
  cfg = make_config('wino', gen_length, block_length)
  rng = np.random.default_rng(seed)
  shape = (batch, gen_length, gen_length)
  table = lambda: (
    rng.normal(size=(*shape, 12))
    + 9 * rng.random((*shape, 1)) * (np.arange(12) == rng.integers(0, 11, shape)[..., None])
  )
  states = play(make_state(cfg, batch, **knobs), cfg, table(), table())
  return states


def history(states, name):
  return np.stack([np.asarray(getattr(state, name)) for state in states])


def counts(states, name):
  """What each step added to a counter, int32 [steps, B]."""
  return np.diff(np.stack([np.asarray(getattr(state.counters, name)) for state in states]), axis=0)


@pytest.mark.parametrize('threshold_back', [0.9, 1.1])
def test_a_block_ends_within_as_many_steps_as_it_has_positions(threshold_back):
  # With 1.1 every verification rejects.
  states = random_play(0, threshold=0.6, threshold_back=threshold_back)
  canvas, block, done = history(states, 'canvas'), history(states, 'block'), history(states, 'done')
  assert int(states[-1].counters.remasked.min()) > 5
  block_step = history(states, 'block_step')
  for step in range(1, len(states)):
    running = ~done[step - 1]
    filled = (canvas[step].reshape(8, 2, 16) != MASK).sum(axis=2)[np.arange(8), np.minimum(block[step - 1], 1)]
    steps_in_block = block_step[step - 1] + 1
    assert (filled >= steps_in_block)[running].all()
    assert (steps_in_block <= 16)[running].all()
  accepted, remasked = counts(states, 'accepted'), counts(states, 'remasked')
  # At most (accepted in the step before) - 1, none in a block's first step, and none beside a single accept.
  first = block_step[:-1] == 0
  assert (remasked[first] == 0).all()
  assert (remasked[1:] <= np.maximum(accepted[:-1] - 1, 0))[~first[1:]].all()
  assert (remasked[accepted == 1] == 0).all()
  assert (history(states, 'status')[-1] == Status.LENGTH).all()
  assert (canvas[-1] != MASK).all()
  assert (accepted.sum(axis=0) - remasked.sum(axis=0) == 32).all()


def test_threshold_one_commits_one_token_a_step_and_takes_nothing_back():
  states = random_play(1, threshold=1.0, threshold_back=1.0)
  assert len(states) == 33
  assert (counts(states, 'accepted') == 1).all() and (counts(states, 'remasked') == 0).all()


def test_threshold_zero_commits_up_to_the_cap():
  states = random_play(2, threshold=0.0, threshold_back=0.0)
  # Of 16 pending ones floor(0.7 * 16) = 11, then the other 5.
  assert counts(states, 'accepted').T.tolist() == [[11, 5, 11, 5]] * 8


def test_flip_flops_are_counted():
  # Step 0 commits columns 0 and 1; step 1 commits columns 2 and 3 and takes 0 back; step 2 restores it.
  tokens, restored = [5, 6, 7, 8, 0, 0, 0, 0], np.zeros((2, 3, G, 12))
  for step, heights in enumerate(([15, 15, 0, 0], [0, 0, 15, 15], [15] * 4)):
    restored[:, step] = peaked(tokens, heights + [15] * 4)
  # In the other row another token takes its place, which is no flip-flop.
  restored[1, 2, 0] = peaked([9], 15)
  shadow = peaked(tokens, [0] + [15] * 7)
  states = play(make_state(TWO_BLOCKS, 2), TWO_BLOCKS, restored, shadow)
  assert [state.canvas[0, :4].tolist() for state in states[1:4]] == [[5, 6, 11, 11], [11, 6, 7, 8], [5, 6, 7, 8]]
  assert history(states, 'canvas')[3, 1, :4].tolist() == [9, 6, 7, 8]
  assert counts(states, 'flip_flops')[:3].tolist() == [[0, 0], [0, 0], [1, 0]]
  assert states[-1].counters.flip_flops.tolist() == [1, 0]


def test_the_mask_token_is_no_candidate_but_keeps_its_probability():
  # The mask token is the best everywhere; the best other one has log-odds 4 - log(e^5 + 10) = -1.06: probability 0.26.
  logits = peaked([3] * G, 4)
  logits[:, MASK] = 5
  for threshold, accepted in ((0.25, [0, 1, 2, 3, 4]), (0.27, [0])):
    got = decide_one(logits, threshold=threshold)
    assert columns(got['accepted']) == accepted
    assert (got['canvas'][0, jnp.array(accepted)] == 3).all()
  # `official` commits the mask token, which leaves the pending ones and stands as a token.
  official = dataclasses.replace(ONE_BLOCK, mask_prediction='official')
  got = decide(make_state(official, threshold=0.6), np.concatenate([logits, logits])[None], cfg=official)
  assert columns(got['accepted']) == [0, 1, 2, 3, 4] and columns(got['pending']) == [5, 6, 7]
  assert got['canvas'][0].tolist() == [MASK] * G


def test_never_leaves_no_mask_whatever_the_logits():
  table = np.random.default_rng(3).normal(size=(2, 8, G, 12))
  table[..., MASK] += 6
  states = play(make_state(TWO_BLOCKS, 2, threshold=0.2), TWO_BLOCKS, table, table)
  assert (history(states, 'canvas')[-1] != MASK).all()
  np.testing.assert_array_equal(states[-1].counters.accepted - states[-1].counters.remasked, G)


def test_temperature_near_zero_is_temperature_zero():
  rng = np.random.default_rng(4)
  table, shadow = (rng.normal(size=(8, G, 12)) * 3 for _ in range(2))
  run = lambda temperature: history(
    play(make_state(TWO_BLOCKS, 2, seeds=[1, 2], temperature=temperature), TWO_BLOCKS, table, shadow), 'canvas'
  )
  cold = run(0.0)
  assert len(cold) > 4
  np.testing.assert_array_equal(cold, run(1e-6))
  # And a temperature that matters does.
  assert (cold[1] != run(3.0)[1]).any()


@functools.partial(jax.jit, compiler_options=QUICK_COMPILE)
def candidates(state, logits):
  index = jnp.broadcast_to(jnp.arange(G), logits.shape[:2])
  chosen = base.candidates(state, index, logits, ONE_BLOCK)
  return chosen.token, chosen.confidence


def test_confidence_is_of_the_clean_logits_at_the_sampled_token():
  logits = np.random.default_rng(5).normal(size=(6, G, 12)).astype(np.float32) * 2
  state = make_state(ONE_BLOCK, 6, seeds=range(6), temperature=np.array([0, 0, 0.7, 0.7, 2, 2]))
  token, confidence = (np.asarray(x) for x in candidates(state, jnp.asarray(logits)))
  exact = [log_odds(z.astype(np.float64), [t]) for z, t in zip(logits.reshape(-1, 12), token.ravel(), strict=True)]
  np.testing.assert_allclose(confidence.ravel(), exact, rtol=1e-5, atol=1e-6)
  assert (token != logits[..., :MASK].argmax(axis=-1))[2:].any()


def test_an_end_token_ends_a_row_at_its_blocks_end_only():
  # Either end token ends a row.
  cfg = make_config('wino', 12, 4, early_stop=True, end_ids=(EOS, 9))
  # The end token is committed in step 0 and taken back in step 1, and another token takes its place.
  canvas = np.stack(
    [
      peaked([5, EOS, 7, 8, 1, 1, 1, 1, 1, 1, 1, 1], [15, 15, 0, 0] + [15] * 8),
      peaked([5, EOS, 7, 8, 1, 1, 1, 1, 1, 1, 1, 1], [15, 15, 15, 15] + [15] * 8),
      peaked([5, 6, 7, 8, 1, 1, 9, 1, 1, 1, 1, 1], 15),
    ]
  )
  shadow = np.zeros((3, 12, 12))
  shadow[1] = peaked([5] * 12, [15] + [0] * 11)
  shadow[2] = canvas[2]
  states = play(make_state(cfg), cfg, canvas, shadow)
  assert states[1].canvas[0, :4].tolist() == [5, EOS, MASK, MASK] and not bool(states[1].done[0])
  assert states[2].canvas[0, :4].tolist() == [5, MASK, 7, 8]
  assert states[-1].canvas[0].tolist() == [5, 6, 7, 8, 1, 1, 9, 1] + [MASK] * 4
  assert int(states[-1].status[0]) == Status.STOP and int(states[-1].block[0]) == 2


def test_a_short_last_block_reads_nothing_past_its_end():
  # gen_length 11 in a canvas of 16 with blocks of 8: the second block has 3 columns and 5 shadows that are padding.
  cfg = make_config('wino', 16, 8)
  rng = np.random.default_rng(6)
  logits = rng.normal(size=(2, 16, 12)).astype(np.float32) * 3
  logits[1, 3:8] = 50 * rng.normal(size=(5, 12))
  logits[1, 8 + 3 :] = 50 * rng.normal(size=(5, 12))
  logits[1, [0, 1, 2, 8, 9, 10]] = logits[0, [0, 1, 2, 8, 9, 10]]
  state = make_state(cfg, 2, gen_length=11, threshold=0.2)
  canvas = np.where(np.arange(16) < 9, 3, MASK)[None].repeat(2, axis=0)
  pending = ((np.arange(16) >= 9) & (np.arange(16) < 11))[None].repeat(2, axis=0)
  state = with_fields(state, canvas=canvas, block=[1, 1], pending=pending, last_accept=[3, 3])
  got = jax.tree.map(np.asarray, decide(state, logits, cfg=cfg))
  assert {'pending', 'last_accept', 'margin'} < set(got)
  for path, value in jax.tree_util.tree_leaves_with_path(got):
    np.testing.assert_array_equal(value[0], value[1], err_msg=jax.tree_util.keystr(path))
  assert not got['accepted'][:, 11:].any() and not got['remasked'][:, :8].any()


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_end_their_row_alone_and_write_nothing(bad):
  rng = np.random.default_rng(7)
  canvas = np.broadcast_to(rng.normal(size=(8, G, 12)), (2, 8, G, 12)).copy()
  shadow = canvas.copy()
  clean = play(make_state(TWO_BLOCKS, 2), TWO_BLOCKS, canvas, shadow)
  shadow[1, 2, :4, 5] = bad
  states = play(make_state(TWO_BLOCKS, 2), TWO_BLOCKS, canvas, shadow)
  assert states[3].status.tolist() == [Status.RUNNING, Status.NOT_FINITE]
  np.testing.assert_array_equal(states[-1].canvas[1], states[2].canvas[1])
  np.testing.assert_array_equal(states[-1].canvas[0], clean[-1].canvas[0])
  assert int(states[-1].counters.steps[1]) == 2


def test_blocks_of_one():
  cfg = make_config('wino', 3, 1)
  canvas = peaked([0, 1, 2], 5)
  states = play(make_state(cfg, 3, gen_length=np.array([1, 2, 3])), cfg, canvas, canvas)
  assert states[-1].canvas.tolist() == [[0, MASK, MASK], [0, 1, MASK], [0, 1, 2]]
  assert states[-1].counters.steps.tolist() == [1, 2, 3]
  assert (states[-1].status == Status.LENGTH).all()


def test_rows_have_lengths_of_their_own_and_none_is_done_from_the_start():
  logits = peaked(range(G), 5)
  states = play(make_state(TWO_BLOCKS, 2, gen_length=np.array([0, 6])), TWO_BLOCKS, logits, logits)
  assert states[-1].status.tolist() == [Status.EMPTY, Status.LENGTH]
  assert states[-1].canvas.tolist() == [[MASK] * G, [0, 1, 2, 3, 4, 5, MASK, MASK]]
  assert states[-1].counters.steps[0] == 0


def test_a_suppressed_end_token_is_in_no_view():
  # Neither committed, nor in the softmax of a confidence, nor in that of a verification.
  cfg = dataclasses.replace(ONE_BLOCK, logits_eos_inf=True)
  logits = peaked(range(3, 11), 15)
  logits[:, EOS] = 30
  logits[7, 9] = 14
  update = decide(standing(CANVAS), np.concatenate([logits, logits])[None], cfg=cfg)
  assert columns(update['remasked']) == [] and update['canvas'][0].tolist() == [3, 4, 5, 6, 7, 8, 9, 9]

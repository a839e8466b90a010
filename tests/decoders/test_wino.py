"""WINO's rule on hand-made logits: what is committed, what is taken back, and when a block ends."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from stub import EOS
from stub import MASK
from stub import decide
from stub import make_config
from stub import make_state
from stub import peaked
from stub import play

from archer_jax import numerics
from archer_jax.decoders import base
from archer_jax.types import Status

# Random states of every shape are compared with the float64 rule in test_margins.py; here stand single rules.
G = 8


def standing(cfg, canvas, last_accept=3, **knobs):
  """One row in its first block, masks pending and tokens standing."""
  state = make_state(cfg, **knobs)
  canvas = jnp.asarray(canvas, jnp.int32)[None]
  return dataclasses.replace(
    state, canvas=canvas, pending=canvas == cfg.model.mask_id, last_accept=jnp.array([last_accept], jnp.int32)
  )


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
  cfg = make_config('wino', 2)
  # log(11) against eleven equal tokens is one half: log-odds 0 up to rounding, so a little is added.
  logits = np.concatenate([peaked([0, 1], [np.log(11) + 1e-4, np.log(11) - 1e-4]), np.zeros((2, 12))])
  got = decide(make_state(cfg, threshold=0.5), logits[None], cfg=cfg)
  assert columns(got['accepted']) == [0]
  # Two tokens share everything, so that the log-odds is exactly 0.
  exact = np.full((4, 12), -np.inf)
  exact[:, :2] = 0
  got = decide(make_state(cfg, threshold=0.5), exact[None], cfg=cfg)
  assert columns(got['accepted']) == [0], 'nothing passes, the best one is taken'


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
  cfg = make_config('wino', G)
  logits = np.concatenate([peaked([1] * G, [9, 8, 9, 12, 8, 30, 8, 31]), np.zeros((G, 12))])
  got = decide(make_state(cfg, max_accept=5), logits[None], cfg=cfg)
  assert columns(got['accepted']) == [0, 2, 3, 5, 7]
  got = decide(make_state(cfg, max_accept=1), logits[None], cfg=cfg)
  assert columns(got['accepted']) == [7]
  # At probabilities that float32 rounds to 1, 31 still beats 30.
  got = decide(make_state(cfg, max_accept=2), logits[None], cfg=cfg)
  assert columns(got['accepted']) == [5, 7]
  got = decide(make_state(cfg, max_accept=5), np.concatenate([peaked([1] * G, 9), np.zeros((G, 12))])[None], cfg=cfg)
  assert columns(got['accepted']) == [0, 1, 2, 3, 4]


def verification(last_accept, support, confident=2, threshold_back=0.9):
  """Four standing tokens with these heights in the shadow, four pending positions."""
  cfg = make_config('wino', G)
  canvas = [3, 4, 5, 6, MASK, MASK, MASK, MASK]
  heights = [15] * confident + [0] * (4 - confident)
  logits = np.concatenate([np.zeros((4, 12)), peaked([7, 8, 9, 0], heights), peaked([3, 4, 5, 6], support), np.zeros((4, 12))])
  return decide(standing(cfg, canvas, last_accept, threshold_back=threshold_back), logits[None], cfg=cfg)


def test_doubtful_tokens_are_taken_back_and_go_pending():
  got = verification(30, [1, 12, 2, 12])
  assert columns(got['remasked']) == [0, 2]
  assert got['canvas'][0].tolist() == [MASK, 4, MASK, 6, 7, 8, MASK, MASK]
  assert columns(got['pending']) == [0, 2, 6, 7]
  assert not got['block_done'][0]


@pytest.mark.parametrize(('last_accept', 'expected'), [(1, []), (2, [2]), (3, [2, 3]), (4, [0, 2, 3]), (5, [0, 1, 2, 3])])
def test_at_most_one_less_than_the_step_before_committed_is_taken_back(last_accept, expected):
  # All four are doubtful; the least supported ones go first.
  assert columns(verification(last_accept, [3, 3.5, 1, 2])['remasked']) == expected


def test_equal_support_takes_back_the_lower_position():
  assert columns(verification(3, [1, 1, 1, 1])['remasked']) == [0, 1]


@pytest.mark.parametrize('confident', [0, 1])
def test_a_single_accept_takes_nothing_back(confident):
  got = verification(30, [0, 0, 0, 0], confident)
  assert columns(got['accepted']) == [4] and columns(got['remasked']) == []


def test_what_is_committed_in_a_step_is_not_verified_in_it():
  # The shadow doubts everything, but only positions 0 to 3 stood there before.
  assert columns(verification(30, [0, 0, 0, 0])['remasked']) == [0, 1, 2, 3]


def test_a_token_is_judged_by_the_probability_of_itself_and_not_of_the_best():
  cfg = make_config('wino', G)
  canvas = [3, 4, 5, 6, MASK, MASK, MASK, MASK]
  # The shadow is certain of another token at column 1.
  shadow = peaked([3, 9, 5, 6], 15)
  logits = np.concatenate([np.zeros((4, 12)), peaked([7, 8, 9, 0], 15), shadow, np.zeros((4, 12))])
  assert columns(decide(standing(cfg, canvas), logits[None], cfg=cfg)['remasked']) == [1]


def random_play(seed, gen_length=32, block_length=16, batch=8, **knobs):
  """A chaotic model: new random logits at each step, often confident."""
  cfg = make_config('wino', gen_length, block_length)
  rng = np.random.default_rng(seed)
  shape = (batch, gen_length, gen_length)
  table = lambda: rng.normal(size=(*shape, 12)) + 9 * rng.random((*shape, 1)) * (np.arange(12) == rng.integers(0, 11, shape)[..., None])
  states = play(make_state(cfg, batch, **knobs), cfg, table(), table())
  return cfg, states


def history(states, name):
  return np.stack([np.asarray(getattr(state, name)) for state in states])


def counts(states, name):
  """What each step added to a counter, int32 [steps, B]."""
  return np.diff(np.stack([np.asarray(getattr(state.counters, name)) for state in states]), axis=0)


@pytest.mark.parametrize('threshold_back', [0.9, 1.1])
def test_a_block_ends_within_as_many_steps_as_it_has_positions(threshold_back):
  # With 1.1 every verification rejects.
  cfg, states = random_play(0, threshold=0.6, threshold_back=threshold_back)
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
  _, states = random_play(1, threshold=1.0, threshold_back=1.0)
  assert len(states) == 33
  assert (counts(states, 'accepted') == 1).all() and (counts(states, 'remasked') == 0).all()


def test_threshold_zero_commits_up_to_the_cap():
  _, states = random_play(2, batch=1, threshold=0.0, threshold_back=0.0)
  # 16, 5, ... pending: floor(0.7 * 16) = 11, then 5.
  assert counts(states, 'accepted')[:, 0].tolist() == [11, 5, 11, 5]


def test_flip_flops_are_counted():
  cfg = make_config('wino', 4)
  # Step 0 commits columns 0 and 1; step 1 commits column 2 and 3 and takes 0 and then not 1 back; step 2 restores 0.
  canvas = np.stack([peaked([5, 6, 7, 8], [15, 15, 0, 0]), peaked([5, 6, 7, 8], [0, 0, 15, 15]), peaked([5, 6, 7, 8], 15)])
  shadow = np.stack([np.zeros((4, 12)), peaked([5, 6, 0, 0], [0, 15, 0, 0]), np.zeros((4, 12))])
  states = play(make_state(cfg), cfg, canvas, shadow)
  assert [state.canvas[0].tolist() for state in states[1:]] == [[5, 6, 11, 11], [11, 6, 7, 8], [5, 6, 7, 8]]
  assert [int(state.counters.flip_flops[0]) for state in states] == [0, 0, 0, 1]
  # Another token in its place is no flip-flop.
  canvas[2] = peaked([9, 6, 7, 8], 15)
  states = play(make_state(cfg), cfg, canvas, shadow)
  assert states[-1].canvas[0].tolist() == [9, 6, 7, 8]
  assert int(states[-1].counters.flip_flops[0]) == 0


def test_without_never_the_mask_token_is_no_candidate_but_keeps_its_probability():
  # The mask token is the best everywhere; the best other one has log-odds 4 - log(e^5 + 10) = -1.06: probability 0.26.
  logits = peaked([3] * 8, 4)
  logits[:, MASK] = 5
  never, official = (make_config('wino', 4, mask_prediction=mode) for mode in ('never', 'official'))
  for threshold, accepted in ((0.25, [0, 1, 2, 3]), (0.27, [0])):
    got = decide(make_state(never, threshold=threshold), logits[None], cfg=never)
    assert columns(got['accepted']) == accepted
    assert (got['canvas'][0, accepted] == 3).all()
  # `official` commits the mask token, which leaves the pending ones and stands as a token.
  got = decide(make_state(official, threshold=0.6), logits[None], cfg=official)
  assert columns(got['accepted']) == [0, 1, 2, 3] and bool(got['block_done'][0])
  assert got['canvas'][0].tolist() == [MASK] * 4


def test_never_leaves_no_mask_whatever_the_logits():
  cfg = make_config('wino', 16, 8)
  rng = np.random.default_rng(3)
  table = rng.normal(size=(4, 16, 16, 12))
  table[..., MASK] += 6
  states = play(make_state(cfg, 4, threshold=0.2), cfg, table, table)
  assert (history(states, 'canvas')[-1] != MASK).all()
  np.testing.assert_array_equal(states[-1].counters.accepted - states[-1].counters.remasked, 16)


def test_temperature_near_zero_is_temperature_zero():
  cfg = make_config('wino', 16, 8)
  rng = np.random.default_rng(4)
  table, shadow = (rng.normal(size=(16, 16, 12)) * 3 for _ in range(2))
  runs = [play(make_state(cfg, 2, seeds=[1, 2], temperature=t), cfg, table, shadow) for t in (0.0, 1e-6)]
  np.testing.assert_array_equal(history(runs[0], 'canvas'), history(runs[1], 'canvas'))
  # And a temperature that matters does.
  warm = play(make_state(cfg, 2, seeds=[1, 2], temperature=1.0), cfg, table, shadow)
  assert (np.asarray(warm[1].canvas) != np.asarray(runs[0][1].canvas)).any()


def test_confidence_is_of_the_clean_logits_at_the_sampled_token():
  cfg = make_config('wino', G)
  logits = np.random.default_rng(5).normal(size=(6, G, 12)).astype(np.float32) * 2
  state = make_state(cfg, 6, seeds=range(6), temperature=np.array([0, 0, 0.7, 0.7, 2, 2]))
  index = jnp.broadcast_to(jnp.arange(G), (6, G))
  chosen = base.candidates(state, index, jnp.asarray(logits), cfg)
  np.testing.assert_array_equal(chosen.confidence, numerics.log_odds(jnp.asarray(logits), chosen.token))
  assert (np.asarray(chosen.token) != logits[..., :MASK].argmax(axis=-1))[2:].any()


def test_an_end_token_ends_a_row_at_its_blocks_end_only():
  cfg = make_config('wino', 12, 4, early_stop=True)
  # The end token is committed in step 0 and taken back in step 1, and another token takes its place.
  canvas = np.stack(
    [
      peaked([5, EOS, 7, 8, 1, 1, 1, 1, 1, 1, 1, 1], [15, 15, 0, 0] + [15] * 8),
      peaked([5, EOS, 7, 8, 1, 1, 1, 1, 1, 1, 1, 1], [15, 15, 15, 15] + [15] * 8),
      peaked([5, 6, 7, 8, 1, 1, EOS, 1, 1, 1, 1, 1], 15),
    ]
  )
  shadow = np.zeros((3, 12, 12))
  shadow[1] = peaked([5] * 12, [15] + [0] * 11)
  shadow[2] = peaked([5, 6, 7, 8, 1, 1, EOS, 1, 1, 1, 1, 1], 15)
  states = play(make_state(cfg), cfg, canvas, shadow)
  assert states[1].canvas[0, :4].tolist() == [5, EOS, MASK, MASK] and not bool(states[1].done[0])
  assert states[2].canvas[0, :4].tolist() == [5, MASK, 7, 8]
  assert states[-1].canvas[0].tolist() == [5, 6, 7, 8, 1, 1, EOS, 1] + [MASK] * 4
  assert int(states[-1].status[0]) == Status.STOP and int(states[-1].block[0]) == 2
  # Without early stop the rest is written as well.
  cfg = dataclasses.replace(cfg, early_stop=False)
  states = play(make_state(cfg), cfg, canvas, shadow)
  assert int(states[-1].status[0]) == Status.LENGTH and (states[-1].canvas != MASK).all()


def test_end_tokens_of_the_config_end_a_row_too():
  cfg = make_config('wino', 8, 4, early_stop=True, end_ids=(EOS, 9))
  canvas = peaked([1, 9, 1, 1, 1, 1, 1, 1], 15)
  states = play(make_state(cfg), cfg, canvas, canvas)
  assert int(states[-1].status[0]) == Status.STOP and states[-1].canvas[0].tolist() == [1, 9, 1, 1] + [MASK] * 4


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
  state = dataclasses.replace(
    state,
    canvas=jnp.asarray(canvas, jnp.int32),
    block=jnp.ones(2, jnp.int32),
    pending=jnp.asarray((np.arange(16) >= 9) & (np.arange(16) < 11))[None].repeat(2, axis=0),
    last_accept=jnp.full(2, 3, jnp.int32),
  )
  got = {name: np.asarray(value) for name, value in decide(state, logits, cfg=cfg).items()}
  for name, value in got.items():
    np.testing.assert_array_equal(value[0], value[1], err_msg=name)
  assert not got['accepted'][:, 11:].any() and not got['remasked'][:, :8].any()
  states = play(make_state(cfg, gen_length=11), cfg, np.zeros((16, 12)), np.zeros((16, 12)))
  assert (states[-1].canvas[0, :11] != MASK).all() and (states[-1].canvas[0, 11:] == MASK).all()


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_end_their_row_alone_and_write_nothing(bad):
  cfg = make_config('wino', 8, 4)
  rng = np.random.default_rng(7)
  canvas = np.broadcast_to(rng.normal(size=(6, 8, 12)), (2, 6, 8, 12)).copy()
  shadow = canvas.copy()
  clean = play(make_state(cfg, 2), cfg, canvas, shadow)
  shadow[1, 2, :4, 5] = bad
  states = play(make_state(cfg, 2), cfg, canvas, shadow)
  assert states[3].status.tolist() == [Status.RUNNING, Status.NOT_FINITE]
  np.testing.assert_array_equal(states[-1].canvas[1], states[2].canvas[1])
  np.testing.assert_array_equal(states[-1].canvas[0], clean[-1].canvas[0])
  assert int(states[-1].counters.steps[1]) == 2


@pytest.mark.parametrize(('gen_length', 'block_length'), [(1, 1), (3, 1), (4, 4)])
def test_the_smallest_blocks(gen_length, block_length):
  cfg = make_config('wino', gen_length, block_length)
  canvas = peaked(np.arange(gen_length), 5)
  states = play(make_state(cfg), cfg, canvas, canvas)
  assert states[-1].canvas[0].tolist() == list(range(gen_length))
  assert int(states[-1].status[0]) == Status.LENGTH


def test_a_row_of_length_zero_is_done_from_the_start():
  cfg = make_config('wino', 4)
  state = make_state(cfg, 2, gen_length=np.array([0, 4]))
  states = play(state, cfg, peaked([1, 2, 3, 4], 9), np.zeros((4, 12)))
  assert states[-1].status.tolist() == [Status.EMPTY, Status.LENGTH]
  assert (states[-1].canvas[0] == MASK).all() and states[-1].counters.steps.tolist()[0] == 0


def test_the_end_token_can_be_suppressed():
  cfg = make_config('wino', 4, suppress_eos=True)
  logits = peaked([EOS] * 4, 9)
  logits[:, 3] = 1
  states = play(make_state(cfg), cfg, logits, logits)
  assert states[-1].canvas[0].tolist() == [3] * 4

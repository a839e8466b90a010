"""LLaDA's decoder on hand-made logits: the schedule over blocks and steps, the order, and the end-token options."""

import dataclasses
import itertools

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

G = 8
ONE_BLOCK = make_config('llada', G)
TWO_BLOCKS = make_config('llada', G, 4)


def columns(flags):
  return np.flatnonzero(np.asarray(flags)[0]).tolist()


def history(states, name):
  return np.stack([np.asarray(getattr(state, name)) for state in states])


def commits(states, row=0):
  """Tokens committed per step until the row was done."""
  counts = np.diff([int(state.counters.accepted[row]) for state in states])
  return counts[: int(states[-1].counters.steps[row])].tolist()


def table(gen_length, seed=0, batch=1):
  return np.random.default_rng(seed).normal(size=(batch, 8, gen_length, 12)) * 3


# One canvas serves all of these schedules: gen_length, steps, commits per step.
SCHEDULES = [
  # 4 blocks: one step a block finishes it.
  (64, 4, [16, 16, 16, 16]),
  (64, 64, [1] * 64),
  # Steps 3, 3, 2, 2 over the blocks; 16 tokens in 3 steps are 6, 5, 5.
  (64, 10, [6, 5, 5, 6, 5, 5, 8, 8, 8, 8]),
  (64, 5, [8, 8, 16, 16, 16]),
  # A short last block: of 36 tokens the third block has 4.
  (36, 7, [6, 5, 5, 8, 8, 2, 2]),
  (36, 3, [16, 16, 4]),
  # A row of one short block.
  (5, 2, [3, 2]),
  # More steps than tokens: the rest of the schedule would write nothing.
  (17, 80, [1] * 17),
]


def test_blocks_share_the_steps_and_steps_the_tokens():
  cfg = make_config('llada', 64, 16)
  lengths, steps, expected = zip(*SCHEDULES, strict=True)
  batch = len(SCHEDULES)
  logits = table(64, batch=batch)
  states = play(make_state(cfg, batch, gen_length=np.array(lengths), steps=np.array(steps)), cfg, logits)
  canvas = history(states, 'canvas')
  for row, (length, counts) in enumerate(zip(lengths, expected, strict=True)):
    assert commits(states, row) == counts
    assert (canvas[-1, row, :length] != MASK).all() and (canvas[-1, row, length:] == MASK).all()
    # A block is written before the next one begins, each from its best down.
    for step in range(len(counts)):
      written = np.flatnonzero(canvas[step, row] != canvas[step + 1, row])
      assert (written // 16 == int(states[step].block[row])).all()
  assert (states[-1].status == Status.LENGTH).all()


def test_with_official_mask_prediction_the_whole_schedule_runs():
  # As the public code does: a step that writes nothing is taken all the same.
  cfg = dataclasses.replace(TWO_BLOCKS, mask_prediction='official')
  states = play(make_state(cfg, steps=12), cfg, table(G)[0])
  assert commits(states) == [1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 0]


def test_the_most_confident_come_first_and_ties_go_to_the_lower_position():
  logits = peaked([1] * G, [5, 60, 4, 5, 59, 2, 4, 3])
  states = play(make_state(ONE_BLOCK, steps=4), ONE_BLOCK, logits)
  written = [np.flatnonzero(a.canvas[0] != b.canvas[0]).tolist() for a, b in itertools.pairwise(states)]
  assert written == [[1, 4], [0, 3], [2, 6], [5, 7]]
  # Among what is all but impossible too: the best token is far below the mask token.
  logits[:, MASK] = 120
  states = play(make_state(ONE_BLOCK, steps=4), ONE_BLOCK, logits)
  assert np.flatnonzero(states[1].canvas[0] != MASK).tolist() == [1, 4]


def test_only_the_current_block_is_written():
  logits = peaked(range(8), [1, 1, 1, 1, 9, 9, 9, 9])
  states = play(make_state(TWO_BLOCKS, steps=4), TWO_BLOCKS, logits)
  assert [(state.canvas[0] != MASK).astype(int).tolist() for state in states[:4]] == [
    [0] * 8,
    [1, 1, 0, 0, 0, 0, 0, 0],
    [1, 1, 1, 1, 0, 0, 0, 0],
    [1, 1, 1, 1, 1, 1, 0, 0],
  ]


def test_the_order_is_that_of_the_clean_confidence_whatever_temperature_and_seed():
  # So peaked that the same tokens are drawn; the heights alone give the order.
  heights = np.array([30, 45, 36, 39, 33, 48, 42, 51])
  logits = peaked(range(8), heights)
  state = make_state(ONE_BLOCK, 6, steps=8, seeds=range(6), temperature=np.array([0, 0.5, 0.5, 1, 1, 1]))
  canvas = history(play(state, ONE_BLOCK, logits), 'canvas')
  for step in range(1, 9):
    expected = np.isin(np.arange(8), np.argsort(-heights)[:step])
    np.testing.assert_array_equal(canvas[step], np.where(expected, np.arange(8), MASK)[None].repeat(6, axis=0))


def test_sampled_tokens_are_ranked_by_their_own_probability():
  # At temperature 2 many columns draw an unlikely token; what is written first is what is likeliest of the drawn.
  state = make_state(ONE_BLOCK, 64, steps=8, seeds=range(64), temperature=2.0)
  logits = np.random.default_rng(1).normal(size=(G, 12)) * 2
  all_at_once = dataclasses.replace(state, knobs=make_state(ONE_BLOCK, 64, steps=1, temperature=2.0).knobs)
  batch = np.broadcast_to(logits, (64, G, 12))
  token = np.asarray(decide(all_at_once, batch, cfg=ONE_BLOCK)['canvas'])
  first = np.asarray(decide(state, batch, cfg=ONE_BLOCK)['accepted']).argmax(axis=1)
  probability = np.take_along_axis(np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True), token.T, axis=1).T
  np.testing.assert_array_equal(first, probability.argmax(axis=1))
  assert (token != logits[:, :MASK].argmax(axis=1)).any() and len(set(first)) > 3


@pytest.mark.parametrize('remasking', ['low_confidence', 'random'])
def test_temperature_near_zero_is_temperature_zero(remasking):
  cfg = dataclasses.replace(TWO_BLOCKS, remasking=remasking)
  run = lambda temperature: history(
    play(make_state(cfg, 2, seeds=[3, 4], temperature=temperature), cfg, table(G, batch=2)), 'canvas'
  )
  cold = run(0.0)
  np.testing.assert_array_equal(cold, run(1e-6))
  assert (cold[1:] != run(1.5)[1:]).any()


def test_the_random_order_is_the_seeds_and_not_the_models():
  cfg = dataclasses.replace(TWO_BLOCKS, remasking='random')
  run = lambda seeds, logits: history(play(make_state(cfg, 2, seeds=seeds), cfg, logits), 'canvas')
  logits = table(G, batch=2)
  canvas = run([3, 4], logits)
  np.testing.assert_array_equal(canvas, run([3, 4], logits))
  np.testing.assert_array_equal(canvas[:, ::-1], run([4, 3], logits[::-1]))
  np.testing.assert_array_equal(canvas != MASK, run([3, 4], logits[:, ::-1]) != MASK)
  assert ((canvas[:, 0] != MASK) != (canvas[:, 1] != MASK)).any()
  # The tokens are the best ones all the same.
  np.testing.assert_array_equal(run([3, 4], logits[:, :1])[-1], logits[:, 0, :, :MASK].argmax(axis=-1))


def test_the_mask_token_is_never_written_and_keeps_its_probability():
  # Column 0 has the larger logit, but beside the mask token's it is the less probable one.
  logits = peaked([3] * G, 4)
  logits[0, 3], logits[0, MASK] = 6, 8
  states = play(make_state(ONE_BLOCK, steps=8), ONE_BLOCK, logits)
  canvas = history(states, 'canvas')[:, 0]
  assert canvas[1].tolist() == [MASK, 3] + [MASK] * 6 and canvas[-1].tolist() == [3] * G
  official = dataclasses.replace(ONE_BLOCK, mask_prediction='official')
  # The public code writes the mask token first, which leaves a mask.
  got = decide(make_state(official, steps=8), logits[None], cfg=official)
  assert columns(got['accepted']) == [0] and (got['canvas'] == MASK).all()


def test_a_suppressed_end_token_is_never_written_and_weighs_nothing():
  cfg = dataclasses.replace(ONE_BLOCK, logits_eos_inf=True)
  logits = peaked([EOS] * G, 9)
  logits[:, 3] = 2
  # Column 5 is the surest once the end token is gone.
  logits[5, 3] = 3
  logits[5, EOS] = 20
  canvas = history(play(make_state(cfg, steps=8), cfg, logits), 'canvas')[:, 0]
  assert canvas[1].tolist() == [MASK] * 5 + [3] + [MASK] * 2 and canvas[-1].tolist() == [3] * G
  plain = history(play(make_state(ONE_BLOCK, steps=8), ONE_BLOCK, logits), 'canvas')[:, 0]
  assert plain[-1].tolist() == [EOS] * G


def test_deferred_end_tokens_are_written_last():
  cfg = dataclasses.replace(ONE_BLOCK, confidence_eos_eot_inf=True, end_ids=(EOS, 9))
  logits = peaked([EOS, 1, 9, 2, EOS, 3, 4, 5], [30, 1, 30, 2, 30, 3, 4, 5])
  canvas = history(play(make_state(cfg, steps=8), cfg, logits), 'canvas')[:, 0]
  order = [int(np.flatnonzero(a != b)[0]) for a, b in itertools.pairwise(canvas)]
  assert order == [7, 6, 5, 3, 1, 0, 2, 4]
  assert canvas[-1].tolist() == [EOS, 1, 9, 2, EOS, 3, 4, 5]


def test_an_end_token_ends_a_row_at_its_blocks_end():
  cfg = make_config('llada', 12, 4, early_stop=True)
  logits = np.broadcast_to(peaked([1] * 12, 3), (3, 8, 12, 12)).copy()
  # Row 0 writes the end token first of all, row 1 in its last block, row 2 never.
  logits[0, :, 1] = logits[1, :, 9] = peaked([EOS], 9)
  states = play(make_state(cfg, 3, steps=6), cfg, logits)
  assert states[1].canvas[0, 1] == EOS and not bool(states[1].done[0])
  assert states[-1].canvas.tolist() == [
    [1, EOS, 1, 1] + [MASK] * 8,
    [1] * 9 + [EOS, 1, 1],
    [1] * 12,
  ]
  assert states[-1].status.tolist() == [Status.STOP, Status.STOP, Status.LENGTH]
  assert states[-1].counters.steps.tolist() == [2, 6, 6]


def test_nothing_is_ever_taken_back():
  canvas = history(play(make_state(TWO_BLOCKS, 2), TWO_BLOCKS, table(G, batch=2)), 'canvas')
  kept = canvas[:-1] != MASK
  np.testing.assert_array_equal(canvas[1:][kept], canvas[:-1][kept])

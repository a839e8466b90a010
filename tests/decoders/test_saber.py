"""Saber's two rules against a float64 reference, step by step, on random logits and on those of a trained model."""

import decimal
import functools

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import reference
from stages import KEYS
from stages import SABER_NEAR
from stages import columns_of
from stages import knob_rows
from stages import noise_of
from stages import random_logits
from stages import saber_step
from stages import saturated_logits
from stub import MASK
from stub import make_config
from stub import make_state
from stub import play_steps

from archer_jax.checkpoints import checkpoint
from archer_jax.config import DecodeConfig
from archer_jax.decoders import saber
from archer_jax.loop.step import staged_step
from archer_jax.tasks.sources import open_source
from archer_jax.types import Status


def make_saber(alignment, gen_length, block_length=None, **fields):
  return make_config('saber', gen_length, block_length, alignment=alignment, **fields)


# rule, mask prediction, block length of a canvas of 16, logits
PLAYS = [
  ('same_position', 'never', 16, random_logits),
  ('same_position', 'never', 5, random_logits),
  ('same_position', 'never', 16, saturated_logits),
  ('same_position', 'never', 5, saturated_logits),
  ('same_position', 'official', 16, random_logits),
  ('same_position', 'official', 5, random_logits),
  ('same_position', 'official', 5, saturated_logits),
  ('shifted', 'never', 16, random_logits),
  ('shifted', 'never', 16, saturated_logits),
  ('shifted', 'official', 16, random_logits),
]


@pytest.mark.parametrize(('rule', 'mode', 'block_length', 'make'), PLAYS)
def test_every_step_equals_the_float64_reference_and_every_loop_ends(rule, mode, block_length, make):
  cfg = make_saber(rule, 16, block_length, mask_prediction=mode)
  rng = np.random.default_rng(5)
  batch = 96
  state = make_state(
    cfg,
    batch,
    seeds=rng.integers(0, 2**32, batch),
    gen_length=rng.integers(1, 17, batch),
    min_accept=rng.integers(1, 6, batch),
    steps=rng.integers(1, 20, batch),
    eos_penalty=rng.choice([0, 0.5, 3], batch),
    temperature=rng.choice([0, 0, 0.8], batch),
  )
  state = jax.tree.map(np.asarray, state)
  knobs, index = knob_rows(state), columns_of(state, cfg)
  limit = np.asarray(cfg.decoder_method.step_limit(state, cfg))
  # Half of the rows look at a table, which keeps standing tokens probable; the others see new logits in every step.
  table = make(rng, (batch, 1, 16, 12), MASK)
  fresh = make(rng, (batch, 24, 16, 12), MASK)
  even = (np.arange(batch) % 2 == 0)[:, None, None, None]
  logits = np.where(even, fresh, table + rng.normal(size=fresh.shape) / 4).astype(np.float32)
  always_ends = rule == 'same_position' or mode == 'never'
  compared = close = 0
  margins = []
  for step, (record, after) in enumerate(play_steps(state, cfg, logits)):
    noise = noise_of(state, index)[0]
    for row in np.flatnonzero(record.live):
      it, left = saber_step(state, cfg, row, knobs[row], logits[row, step], noise[row])
      compared += 1
      if it.margin <= SABER_NEAR:
        close += 1
        continue
      for key in KEYS:
        np.testing.assert_array_equal(getattr(record, key)[row], getattr(it, key), err_msg=f'{key}, {step}, {row}')
      done = left.pop('block_done')
      assert after.block[row] == state.block[row] + done
      np.testing.assert_allclose(record.seen['threshold'][row], left.pop('threshold'), rtol=0, atol=2e-7)
      for name, values in left.items():
        np.testing.assert_allclose(getattr(after.decoder, name)[row], values, rtol=1e-4)
      margins.append((record.margin[row], it.margin))
    live = record.live[:, None]
    assert not ((record.accepted | record.remasked) & live & ~np.asarray(state.canvas_valid)).any()
    if always_ends:
      assert (record.accepted.sum(axis=1) > record.remasked.sum(axis=1))[record.live].all()
    state = after
  assert (state.counters.steps <= limit).all()
  if always_ends:
    np.testing.assert_array_equal(state.status, Status.LENGTH)
  assert close < 0.01 * compared and compared > 300
  got, want = np.array(margins, np.float64).T
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=SABER_NEAR)


def peaked(log_odds):
  """Logits [G, 12] whose best token, that of the column's number, has these log-odds."""
  log_odds = np.asarray(log_odds, float)
  z = np.zeros((len(log_odds), 12))
  z[np.arange(len(log_odds)), np.arange(len(log_odds)) % 10] = log_odds + np.log(11)
  return z


def first_steps(cfg, rows, **knobs):
  """Records of steps with these log-odds, and the states behind them."""
  return play_steps(make_state(cfg, **knobs), cfg, np.stack([peaked(row) for row in rows]))


where = lambda flags: np.flatnonzero(flags[0]).tolist()


def test_saturated_columns_keep_their_order():
  # Every probability is 1 in float32.
  cfg = make_saber('same_position', 6)
  (first, _), (second, _), *_ = first_steps(cfg, [[30, 31, 35, 34, 33, 32], [30, 31, 36, 33.5, 40, 40]])
  assert where(first.accepted) == [2, 3] and where(first.remasked) == [3]
  assert first.seen['threshold'] == 1
  # The mean deficit is that of columns 2 and 3, log-odds 34.38; column 3's deficit rose by 3e-15, that of 2 fell.
  assert where(second.accepted) == [4, 5] and where(second.remasked) == [2]
  (tied, _), *_ = first_steps(cfg, [[30] * 6])
  assert where(tied.accepted) == [0, 1] and where(tied.remasked) == [0]
  assert tied.margin == 0


def test_fewer_than_min_accept_left():
  ((only, after),) = first_steps(make_saber('same_position', 6), [[1, 2, 3, 9, 9, 9]], min_accept=5, gen_length=3)
  assert where(only.accepted) == [0, 1, 2] and where(only.remasked) == [] and after.status == Status.LENGTH


def test_min_accept_of_one_takes_back_only_beside_others():
  rows = [[1, 2, 3, 2, 1, 9], [4, 4.5, 3, 4, 2, 9]]
  (first, _), (second, _), *_ = first_steps(make_saber('same_position', 6), rows, min_accept=1, gen_length=5)
  assert where(first.accepted) == [2] and where(first.remasked) == []
  # Above 3: three of them; min(max(0, 1), 2) goes back. Column 2 is as probable as before, the others rose.
  assert where(second.accepted) == [0, 1, 3] and where(second.remasked) == [2]


def test_a_new_block_has_no_confidence_to_fall_from():
  cfg = make_saber('same_position', 6, 3)
  steps = first_steps(cfg, [[3, 2, 1, 9, 9, 9], [3, 2, 2, 9, 9, 9], [3, 2, 2, 1, 2, 0], [3, 2, 1.9, 1, 2, 1]])
  assert where(steps[0][0].accepted) == [0, 1] and where(steps[0][0].remasked) == [1]
  assert where(steps[1][0].accepted) == [1, 2] and [after.block[0] for _, after in steps[:2]] == [0, 1]
  # Only columns of the first block may go back, though 3 and 4 are less probable; of equal ones the first.
  assert where(steps[2][0].accepted) == [3, 4] and where(steps[2][0].remasked) == [0]
  assert len(steps) == 4 and steps[3][1].status == Status.LENGTH


def test_the_mask_token_is_watched_where_it_may_not_be_committed():
  """Column 0 is most of all the mask token's in the second step; of its own token it would have fallen most."""
  cfg = {mode: make_saber('same_position', 6, mask_prediction=mode) for mode in ('never', 'official')}
  first, second = peaked([6, 5, 1, 1, 1, 1]), peaked([6, 4.5, 1.2, 1.1, 1, 1])
  second[0, MASK] = second[0, 0] + 8
  for mode in ('never', 'official'):
    (one, _), (two, after), *_ = play_steps(make_state(cfg[mode]), cfg[mode], np.stack([first, second]))
    assert where(one.accepted) == [0, 1] and where(one.remasked) == [1]
    # Column 0 rose, as the mask token's; columns 1 and 2 are committed, and 1 fell.
    assert where(two.accepted) == [1, 2] and where(two.remasked) == [1]
    assert after.decoder.previous[0, 0] == pytest.approx(reference.deficit(8.0), rel=0.01)


def test_the_penalty_is_for_commits_alone():
  # Padding, token 10, is the best one of every column and falls behind by up to 6.9 eos_penalty.
  cfg = make_saber('shifted', 4)
  z = peaked([5, 4, 3, 2])
  z[:, 10] = z.max(axis=1) + np.arange(1, 5)
  state = make_state(cfg, 2, eos_penalty=[1, 0])
  (record, _), *_ = play_steps(state, cfg, z)
  assert where(record.accepted) == [0, 1] and record.canvas[0].tolist() == [0, MASK, MASK, MASK]
  assert 10 in record.canvas[1]
  late = programs.with_fields(state, row_step=[9, 9])
  (record, _), *_ = play_steps(late, cfg, z)
  assert 10 in record.canvas[0]


def test_fall_margin_is_the_root_of_its_equation():
  """Against 60 digits, over log-odds up to 80 and differences of probabilities down to 1e-30."""
  rng = np.random.default_rng(8)
  count = 480
  with decimal.localcontext(prec=90):
    exact = lambda x: decimal.Decimal(float(x))
    old = reference.deficit(rng.uniform(-3, 70, (count, 2)) * rng.choice([1, 1, 0.2], (count, 1))).astype(np.float32)
    old[: count // 4, 1] = 1
    old[count // 4 : count // 2, 1] = old[count // 4 : count // 2, 0] * np.float32(1 + 1e-4)
    odds = rng.uniform(-3, 80, (count, 2)).astype(np.float32)
    got = np.asarray(jax.jit(saber._fall_turn)(odds[:, 0], odds[:, 1], old[:, 0], old[:, 1]))
    worst = positive = 0
    smallest = np.inf
    for row in range(count):
      a, b = map(exact, odds[row])
      c = exact(old[row, 1]) - exact(old[row, 0])
      side = lambda e, a=a, b=b, c=c: 1 / (1 + (b - 2 * e).exp()) - 1 / (1 + (a + 2 * e).exp()) - c
      if side(decimal.Decimal(0)) >= 0:
        assert got[row] <= 3e-5
        continue
      positive += 1
      smallest = min(smallest, abs(float(c)))
      low, high = decimal.Decimal(0), decimal.Decimal(200)
      for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if side(middle) >= 0 else (middle, high)
      worst = max(worst, abs(got[row] - float(low)) / (1 + float(low)))
  assert positive > 150 and smallest < 1e-29
  assert worst < 1e-5


def test_fall_margin_without_a_pair_or_apart_by_one_is_infinite():
  two = lambda *values: jnp.asarray([values], jnp.float32)
  rank = jnp.asarray([[0, 1]])
  margin = lambda odds, old, count: float(saber._fall_margin(odds, old, rank, jnp.asarray([count]))[0])
  assert margin(two(1, 2), two(0.1, 0.2), 2) == margin(two(1, 2), two(0.1, 0.2), 0) == np.inf
  assert margin(two(1, 2), two(0, 1), 1) == np.inf
  # Without a difference before: a quarter of the lead, as of any rank by log-odds.
  assert margin(two(1, 2), two(0.1, 0.1), 1) == pytest.approx(1 / 4)


def test_the_reference_counts_deficits():
  assert reference.deficit(np.array([0.0, 40.0])) == pytest.approx([0.5, np.exp(-40)])


def bundled():
  """The bundled model, and ten of its problems before their first step: answers of 42 to 84 tokens, six a step."""
  model, params, tokenizer = checkpoint.load(dtype='float32')
  cfg = DecodeConfig(model=model.config, decoder='saber', canvas_length=84, block_length=42, early_stop=False)
  problems = [
    (source, problem)
    for source, n in ((open_source('sudoku6'), 4), (open_source('sort'), 4), (open_source('pipeline'), 2))
    for problem in source.problems(n, 0)
  ]
  ids = [np.array(tokenizer.encode(problem.prompt)) for _, problem in problems]
  lengths = np.array([source.gen_length for source, _ in problems])
  knobs = {'gen_length': lengths, 'min_accept': 6, 'refresh_distance': 8}
  return params, cfg, programs.start(ids, cfg, length=264, **knobs)


def best_deficits(logits):
  """Float64 deficits [B, G] of the best token of every column."""
  ordered = np.sort(np.asarray(logits, np.float64), axis=-1)
  top, rest = ordered[..., -1], ordered[..., :-1]
  others = rest[..., -1] + np.log(np.exp(rest - rest[..., -1:]).sum(axis=-1))
  return reference.deficit(top - others)


def test_saturated_confidences_of_a_trained_model_keep_their_order():
  """Real trajectories against the float64 order on the same logits, where differences of float32 probabilities tie."""
  params, cfg, state = bundled()
  step = jax.jit(functools.partial(staged_step, cfg=cfg), compiler_options=programs.QUICK)
  column = np.arange(cfg.canvas_length)
  # Before the first step every probability counts as 0.
  old = np.ones(state.canvas.shape)
  cuts = sure = tied = otherwise = 0
  while not np.all(state.done):
    before = jax.device_get((state.canvas, state.block, state.gen_length))
    state, record, stages = step(params, state)
    record, new = jax.device_get(record), best_deficits(stages.outcome.logits)
    canvas, block, gen_length = before
    inside = column < np.minimum((block + 1) * cfg.block_length, gen_length)[:, None]
    standing = inside & (record.accepted | (canvas != cfg.model.mask_id)) & np.isfinite(old)
    for row in np.flatnonzero(record.live & record.remasked.any(axis=1)):
      columns, count = np.flatnonzero(standing[row]), int(record.remasked[row].sum())
      if len(columns) == count:
        continue
      q, q0 = new[row, columns], old[row, columns]
      rise = (q0[:, None] - q0) - (q[:, None] - q)
      ahead = (rise < 0) | ((rise == 0) & (columns[:, None] < columns))
      order = np.argsort(-ahead.sum(axis=1))
      taken, spared = order[:count], order[count:]
      cuts += 1
      # What float32 leaves of log-odds of some 15, and hence of a deficit.
      error = 4e-6 * (q + np.where(q0 < 1, q0, 0))
      if (-rise[np.ix_(taken, spared)] <= error[taken][:, None] + error[spared]).any():
        continue
      sure += 1
      np.testing.assert_array_equal(np.flatnonzero(record.remasked[row]), np.sort(columns[taken]))
      naive = np.float32(1 - q) - np.float32(1 - q0)
      tied += naive[taken[-1]] == naive[spared[0]]
      otherwise += set(np.argsort(naive, kind='stable')[:count]) != set(taken)
    old = np.where(record.live[:, None], np.where(inside, new, np.inf), old)
  np.testing.assert_array_equal(state.status, Status.LENGTH)
  assert cuts > 100 and sure > 0.95 * cuts, (cuts, sure)
  # A rule in float32 would have taken back others.
  assert tied > 5 and otherwise > 2, (tied, otherwise)

"""Why and when a row ends, with logits made by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from archer_jax.loop.step import decode_step
from archer_jax.types import Status

CANVAS = 16
BLOCK = 8
STEPS = 20
WORD = 7
OTHER_END = 250


class Script:
  """What the stub's logits say of each row, step and column.

  Unless told otherwise every column wants WORD with little confidence, so that one is written a step, and every token
  is verified with ease.
  """

  def __init__(self, rows: int):
    self.want = np.full((rows, STEPS, CANVAS), WORD, np.int32)
    self.strength = np.full((rows, STEPS, CANVAS), 0.1, np.float32)
    self.support = np.full((rows, STEPS, CANVAS), 12.0, np.float32)

  def sure(self, row: int, step: int, tokens: dict[int, int]):
    for column, token in tokens.items():
      self.want[row, step, column], self.strength[row, step, column] = token, 12.0

  def logits(self, state, views, cfg):
    rows = jnp.arange(views.columns.shape[0])[:, None]
    step = jnp.minimum(state.row_step, STEPS - 1)[:, None]

    def of(column, strength, token):
      one_hot = jax.nn.one_hot(token, cfg.model.vocab_size)
      return jnp.asarray(strength)[rows, step, column][..., None] * one_hot

    column = jnp.minimum(views.columns, CANVAS - 1)
    parts = [of(column, self.strength, jnp.asarray(self.want)[rows, step, column])]
    if views.shadow is not None:
      twin = jnp.minimum(views.shadow.columns, CANVAS - 1)
      parts.append(of(twin, self.support, jnp.take_along_axis(state.canvas, twin, axis=1)))
    return jnp.concatenate(parts, axis=1)


def play(golden, decoder, script, knobs=None, **changes):
  """States after every step, until all rows are done."""
  changes = {'early_stop': True, 'end_ids': (golden.config.eos_id, OTHER_END)} | changes
  block = CANVAS if decoder in programs.SHIFTED else BLOCK
  cfg = programs.config(golden, decoder, canvas_length=CANVAS, block_length=block, **changes)
  state = programs.start(programs.prompts(0, (4,) * len(script.want)), cfg, length=4, **(knobs or {}))
  states = []
  with programs.stub_logits(script.logits):
    step = jax.jit(functools.partial(decode_step, cfg=cfg), compiler_options=programs.QUICK)
    while not np.all(state.done):
      state, _ = step({'embedding': golden.params['embedding']}, state)
      states.append(jax.device_get(state))
      assert len(states) <= STEPS
  return states


@pytest.fixture(scope='module')
def wino(llada_tiny):
  """Four rows: an end token taken back, one that stays, another end token in the last block, and a NaN in step 2."""
  end = llada_tiny.config.eos_id
  script = Script(4)
  for row in range(4):
    script.sure(row, 0, {0: WORD, 1: WORD})
    script.sure(row, 1, {2: end if row < 2 else WORD, 3: WORD})
    script.sure(row, 2, {4: WORD, 5: WORD})
    script.sure(row, 3, {2: WORD, 6: WORD})
  script.support[0, 2, 2] = -5.0
  script.want[2, :, 9] = OTHER_END
  script.strength[3, 2, 1] = np.nan
  return lambda **changes: play(llada_tiny, 'wino', script, **changes)


def test_end_token_that_is_taken_back_ends_nothing(wino, llada_tiny):
  states = wino()
  end, mask = llada_tiny.config.eos_id, llada_tiny.config.mask_id
  # It stands with no mask before it after the second step, and is a mask again after the third.
  assert states[1].canvas[0, :4].tolist() == [WORD, WORD, end, WORD]
  assert states[2].canvas[0, :6].tolist() == [WORD, WORD, mask, WORD, WORD, WORD]
  assert [state.status[0] for state in states[1:3]] == [Status.RUNNING] * 2
  last = states[-1]
  assert last.status[0] == Status.LENGTH
  assert last.canvas[0].tolist() == [WORD] * CANVAS
  assert last.counters.remasked[0] == 1
  assert last.counters.flip_flops[0] == 0


def test_blocks_behind_an_end_token_are_never_run(wino, llada_tiny):
  states = wino()
  mask = llada_tiny.config.mask_id
  running = [state.status[1] == Status.RUNNING for state in states]
  steps = running.index(False) + 1
  # The end token came in step 1, and its block was finished first.
  assert steps == 5
  last = states[-1]
  assert last.status[1] == Status.STOP
  assert last.counters.steps[1] == steps
  assert last.block[1] == 1
  assert np.all(last.canvas[1, BLOCK:] == mask)
  assert not np.any(last.canvas[1, :BLOCK] == mask)


def test_every_named_end_token_stops(wino):
  last = wino()[-1]
  assert last.status[2] == Status.STOP
  assert last.canvas[2, 9] == OTHER_END
  assert last.counters.accepted[2] == CANVAS


def test_row_with_a_nan_keeps_the_canvas_of_the_step_before(wino, llada_tiny):
  states = wino()
  assert states[2].status[3] == Status.NOT_FINITE
  assert states[2].counters.steps[3] == 2
  np.testing.assert_array_equal(states[2].canvas[3], states[1].canvas[3])
  np.testing.assert_array_equal(states[-1].canvas[3], states[1].canvas[3])
  assert not np.any(states[-1].canvas[:3, :BLOCK] == llada_tiny.config.mask_id)


def test_without_early_stop_every_row_is_written_out(wino, llada_tiny):
  last = wino(early_stop=False)[-1]
  np.testing.assert_array_equal(last.status[:3], Status.LENGTH)
  assert not np.any(last.canvas[:3] == llada_tiny.config.mask_id)


def test_llada_ends_at_the_block_of_the_end_token(llada_tiny):
  script = Script(2)
  # Written in the first step while masks stand before it; in the second row in the second block.
  script.sure(0, 0, {5: llada_tiny.config.eos_id})
  script.sure(1, 8, {8: llada_tiny.config.eos_id})
  last = play(llada_tiny, 'llada', script)[-1]
  np.testing.assert_array_equal(last.status, Status.STOP)
  np.testing.assert_array_equal(last.counters.steps, [BLOCK, CANVAS])
  assert np.all(last.canvas[0, BLOCK:] == llada_tiny.config.mask_id)


def test_dream_ends_when_no_mask_stands_before_the_end_token(dream_tiny):
  end, mask = dream_tiny.config.eos_id, dream_tiny.config.mask_id
  script = Script(2)
  # The schedule's first steps write nothing.
  for step in range(STEPS):
    script.sure(0, step, {3: end})
  states = play(dream_tiny, 'dream', script, knobs={'steps': CANVAS})
  written = [state.canvas[0] != mask for state in states]
  first = next(i for i, columns in enumerate(written) if columns[3])
  ended = next(i for i, columns in enumerate(written) if columns[:4].all())
  assert first < ended
  assert [state.status[0] for state in states[first:ended]] == [Status.RUNNING] * (ended - first)
  assert states[ended].status[0] == Status.STOP
  np.testing.assert_array_equal(states[-1].canvas[0], states[ended].canvas[0])
  assert np.any(states[-1].canvas[0] == mask)
  assert states[-1].status[1] == Status.LENGTH
  assert states[-1].counters.steps[1] == CANVAS


@pytest.mark.parametrize(('decoder', 'block'), [('saber', BLOCK), ('saber shifted', CANVAS)])
def test_saber_ends_where_a_block_ends(request, decoder, block):
  """An end token stands in the first column from the first step on; in row 1 in column 8, in row 2 nowhere."""
  golden = programs.golden_of(request, decoder)
  mask, script = golden.config.mask_id, Script(3)
  for step in range(STEPS):
    script.sure(0, step, {0: golden.config.eos_id})
    script.sure(1, step, {8: golden.config.eos_id})
  states = play(golden, decoder, script)
  assert states[0].canvas[0, 0] == golden.config.eos_id
  for row, end in ((0, block), (1, CANVAS), (2, CANVAS)):
    steps = states[-1].counters.steps[row]
    before, after = states[steps - 2], states[steps - 1]
    assert before.status[row] == Status.RUNNING and np.any(before.canvas[row, :end] == mask)
    assert after.status[row] == (Status.LENGTH if row == 2 else Status.STOP)
    assert not np.any(after.canvas[row, :end] == mask) and np.all(after.canvas[row, end:] == mask)
    # Tokens were taken back up to the end.
    assert before.counters.remasked[row] >= steps - (1 if end == block else 2)

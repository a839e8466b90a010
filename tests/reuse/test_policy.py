"""The refresh rule as tables: which steps refresh, clause by clause."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import programs
from programs import with_fields
import pytest
import stub

from archer_jax import specs
from archer_jax.loop.step import init_state
from archer_jax.reuse.prompt.clauses import reasons
from archer_jax.reuse.prompt.drift import changed_positions
from archer_jax.reuse.prompt.drift import token_drift
from archer_jax.reuse.prompt.reasons import Reason
from archer_jax.types import Knobs

# Knobs that the rules set; every clause is one of its own.
ALWAYS, ONCE = (specs.rules()[name].fixed for name in ('always', 'once'))
MASK = 15


@jax.jit
def needs_refresh(state):
  cfg = config(state.canvas.shape[1])
  return reasons(state, changed_positions(state), token_drift(None, state, cfg), cfg) != 0


def config(length=8, **changes):
  """A program of a model that is never run."""
  return stub.make_config('llada', length, vocab_size=MASK + 1, **changes)


def make_state(policy, batch=1, length=8, cfg=None, **knobs):
  """Rows before their first step, under the knobs of a policy."""
  cfg = cfg or config(length)
  prompt = np.ones((batch, 2), np.int32)
  knobs = {'gen_length': length} | policy | knobs
  return init_state(prompt, prompt.astype(bool), Knobs.make(batch, **knobs), np.zeros(batch, np.uint32), cfg=cfg)


def step(state, refreshed, canvas=None, margin=np.inf, new_block=False):
  """What the loop does to the fields that the rule reads."""
  return with_fields(
    state,
    canvas=state.canvas if canvas is None else canvas,
    age=jnp.where(refreshed, 0, state.reuse.age) + 1,
    anchor=jnp.where(refreshed[:, None], state.canvas, state.reuse.anchor),
    refreshed=refreshed,
    margin=jnp.full_like(state.reuse.margin, margin),
    row_step=state.row_step + 1,
    block_step=jnp.zeros_like(state.block_step) if new_block else state.block_step + 1,
  )


def refreshing_steps(policy, steps=12, **changes):
  """The steps at which a row refreshes; `changes` maps field of `step` to what it is after each step."""
  state, found = make_state(policy), []
  for at in range(steps):
    refreshed = needs_refresh(state)
    found += [at] if bool(refreshed[0]) else []
    state = step(state, refreshed, **{name: values(at) for name, values in changes.items()})
  return found


@pytest.mark.parametrize(
  ('interval', 'expected'),
  [(0, [0]), (1, list(range(12))), (2, [0, 2, 4, 6, 8, 10]), (3, [0, 3, 6, 9]), (12, [0]), (11, [0, 11])],
)
def test_interval(interval, expected):
  assert refreshing_steps({'refresh_interval': interval}) == expected


@pytest.mark.parametrize(
  ('max_age', 'expected'), [(0, [0]), (1, list(range(12))), (2, [0, 2, 4, 6, 8, 10]), (3, [0, 3, 6, 9]), (11, [0, 11])]
)
def test_max_age(max_age, expected):
  assert refreshing_steps({'max_age': max_age}) == expected


def test_max_age_restarts_at_other_refreshes_and_the_interval_does_not():
  # Blocks begin at steps 0, 4 and 8.
  new_block = lambda at: (at + 1) % 4 == 0
  at_block_start = {'refresh_at_block_start': 1}
  assert refreshing_steps(at_block_start, new_block=new_block) == [0, 4, 8]
  assert refreshing_steps({'max_age': 3, **at_block_start}, new_block=new_block) == [0, 3, 4, 7, 8, 11]
  assert refreshing_steps({'max_age': 5, **at_block_start}, new_block=new_block) == [0, 4, 8]
  assert refreshing_steps({'refresh_interval': 3, **at_block_start}, new_block=new_block) == [0, 3, 4, 6, 8, 9]
  assert refreshing_steps({'refresh_interval': 5}, new_block=new_block) == [0, 5, 10]


def test_named_policies():
  assert refreshing_steps(ALWAYS) == list(range(12))
  assert refreshing_steps(ONCE) == [0]


def test_every_clause_off_refreshes_once_whatever_happens():
  # All tokens change, every margin is 0, a block begins at each step.
  changes = {'canvas': lambda at: [[at] * 8], 'margin': lambda at: 0.0, 'new_block': lambda at: True}
  assert refreshing_steps(ONCE, **changes) == [0]


def test_a_row_without_an_anchor_refreshes_and_a_finished_one_does_not():
  state = make_state(ALWAYS, batch=2)
  state = dataclasses.replace(state, done=jnp.array([False, True]))
  assert needs_refresh(state).tolist() == [True, False]
  # No drift without an anchor, though the fresh state's anchor holds something.
  state = dataclasses.replace(state, canvas=jnp.zeros_like(state.canvas))
  assert token_drift(None, state, None).tolist() == [0, 0]


def anchored(policy, canvas, anchor, **knobs):
  """Rows some steps after a refresh."""
  state = make_state(policy, *np.shape(canvas), **knobs)
  twos = jnp.full_like(state.row_step, 2)
  return with_fields(state, canvas=canvas, anchor=anchor, age=twos, row_step=twos, block_step=twos)


def test_the_distance_is_compared_with_k_for_every_count_of_every_length():
  # Row (G, K, c): a canvas of G columns, c of them changed.
  rows = [(g, k, c) for g in range(1, 129) for k in range(1, g + 1) for c in (k - 1, k)]
  g, k, c = np.array(rows).T
  anchor = np.zeros((len(rows), 128), np.int32)
  canvas = (np.arange(128) < c[:, None]).astype(np.int32)
  # What stands past a row's length is not the row's.
  canvas[np.arange(128) >= g[:, None]] = 7
  state = anchored(ONCE, canvas, anchor, gen_length=g, refresh_distance=k)
  assert state.knobs.refresh_distance.dtype == jnp.int32
  np.testing.assert_array_equal(changed_positions(state), c)
  np.testing.assert_array_equal(needs_refresh(state), c >= k)
  np.testing.assert_allclose(token_drift(None, state, None), c / g, rtol=1e-6)
  # K of 0 is no clause, and one above the length is never met.
  state = anchored(ONCE, canvas, anchor, gen_length=g, refresh_distance=np.where(np.arange(len(g)) % 2, 0, g + 1))
  assert not np.any(needs_refresh(state))


def test_a_radius_is_a_drift_that_may_still_be_reached():
  state = anchored({'drift_radius': 0.3}, np.ones((3, 8)), np.zeros((3, 8)), cfg=config(drift='embedding'))
  radius = np.float32(0.3)
  drift = jnp.array([np.nextafter(radius, np.float32(0)), radius, np.nextafter(radius, np.float32(1))])
  told = lambda drift_name: reasons(state, changed_positions(state), drift, config(drift=drift_name))
  for name in ('embedding', 'hidden'):
    assert told(name).tolist() == [0, 0, Reason.DRIFT]
  # The share of changed tokens has no radius.
  assert told('token').tolist() == [0, 0, 0]


@pytest.mark.parametrize(
  ('drift', 'knobs', 'message'),
  [
    ('token', {'drift_radius': 0.25}, 'drift_radius must be 0 with drift token in the config, got 0.25'),
  ],
)
def test_a_number_that_belongs_to_another_drift_is_refused(drift, knobs, message):
  with pytest.raises(ValueError, match=message):
    make_state({}, cfg=config(drift=drift), **knobs)


def test_drift_is_reversible():
  masks, filled = np.full((1, 8), MASK), np.full((1, 8), MASK)
  filled[0, :3] = [4, 5, 6]
  policy = {'refresh_distance': 3}
  assert bool(needs_refresh(anchored(policy, filled, masks))[0])
  assert not bool(needs_refresh(anchored(policy, masks, masks))[0])
  # Committing and taking back brings the row to its anchor again: never a refresh after the first.
  assert refreshing_steps(policy, canvas=lambda at: np.where(np.arange(8) < (at % 3), 4, MASK)[None]) == [0]
  back_and_forth = lambda at: filled if at % 2 else masks
  # Out at steps 2, 4, ...: each of these refreshes and so moves the anchor, which the way back then leaves.
  assert refreshing_steps(policy, steps=6, canvas=back_and_forth) == [0, 2, 3, 4, 5]


@pytest.mark.parametrize('refreshed', [False, True])
@pytest.mark.parametrize('changed', [False, True])
@pytest.mark.parametrize(('margin', 'small'), [(0.5, True), (1.0, False), (np.inf, False), (0.0, True)])
def test_margin_clause(refreshed, changed, margin, small):
  canvas = np.full((1, 8), 3)
  canvas[0, 7] += changed
  state = anchored({'min_margin': 1.0}, canvas, np.full((1, 8), 3))
  state = with_fields(state, refreshed=[refreshed], margin=[margin])
  assert bool(needs_refresh(state)[0]) == (not refreshed and changed and small)


def test_margin_clause_alternates_while_every_margin_is_small():
  changes = {'canvas': lambda at: [[at] * 8], 'margin': lambda at: 0.1}
  # A refresh is followed by a reuse, whose small margin then asks for the next refresh.
  assert refreshing_steps({'min_margin': 0.2}, steps=7, **changes) == [0, 2, 4, 6]
  assert refreshing_steps({'min_margin': 0.05}, steps=7, **changes) == [0]


def test_rows_decide_for_themselves():
  canvas = np.zeros((4, 8), np.int32)
  canvas[1, :4] = 1
  state = anchored(
    ONCE, canvas, np.zeros((4, 8)), refresh_distance=np.array([1, 4, 0, 0]), max_age=np.array([0, 0, 2, 3])
  )
  assert needs_refresh(state).tolist() == [False, True, True, False]


@pytest.mark.parametrize(
  ('field', 'value', 'message'),
  [
    ('refresh_interval', -1, 'refresh_interval must be an integer .*, got -1'),
    ('refresh_interval', 1.5, 'refresh_interval must be an integer .*, got 1.5'),
    ('max_age', -2, 'max_age must be an integer .*, got -2'),
    ('refresh_distance', -1, r'refresh_distance must be an integer in \[0, 2147483647\], got -1'),
    ('refresh_distance', 2.5, r'refresh_distance must be an integer in \[0, 2147483647\], got 2.5'),
    ('drift_radius', 1.01, r'drift_radius must be a number in \[0, 1\], got 1.01'),
    ('drift_radius', float('nan'), r'drift_radius must be a number in \[0, 1\], got nan'),
    ('min_margin', -0.1, 'min_margin must be a number in \\[0, 1000000\\], got -0.1'),
    ('min_margin', float('inf'), 'min_margin must be a number in \\[0, 1000000\\], got inf'),
  ],
)
def test_a_clause_out_of_range_is_refused_by_name(field, value, message):
  with pytest.raises(ValueError, match=message):
    specs.knobs()[field].check(field, value)


@pytest.mark.parametrize(
  ('margin', 'drift', 'kappa', 'fails'),
  [
    (1.0, 0.5, 2.0, True),
    (1.001, 0.5, 2.0, False),
    (0.5, 0.5, 2.0, True),
    (1.0, 0.5, 0.0, False),
    (np.inf, 0.5, 2.0, False),
    (np.nan, 0.5, 2.0, True),
  ],
)
def test_certificate_clause(margin, drift, kappa, fails):
  """The last step reused with a margin of at most kappa times its drift."""
  anchor, canvas = np.full((1, 8), 3), np.full((1, 8), 3)
  canvas[0, 7] = 4

  def clauses(canvas, refreshed=False, cfg=None):
    state = anchored({'kappa': kappa}, canvas, anchor)
    state = with_fields(state, refreshed=[refreshed], margin=[margin], drift=[drift])
    return int(reasons(state, changed_positions(state), state.reuse.drift, cfg or config())[0])

  assert clauses(canvas) == (Reason.CERTIFICATE if fails else 0)
  # A refresh needs no certificate, nor does a canvas that is its anchor again; with same_step nothing is left to do.
  assert clauses(canvas, refreshed=True) == clauses(anchor) == 0
  assert clauses(canvas, cfg=config(on_low_margin='same_step')) == 0


def test_every_clause_has_its_bit():
  canvas, anchor = np.full((1, 8), 4), np.full((1, 8), 3)
  policy = dict.fromkeys(('min_margin', 'refresh_at_block_start', 'kappa'), 1)
  policy |= {'refresh_interval': 2, 'max_age': 2}
  # No settings have both of the last two, but every one has its own bit.
  state = programs.set_knobs(anchored(policy, canvas, anchor), refresh_distance=8, drift_radius=0.5)
  state = with_fields(state, margin=[0], drift=[1], block_step=[0])
  clauses = lambda state: Reason(
    int(reasons(state, changed_positions(state), token_drift(None, state, None), config(drift='embedding'))[0])
  )
  everything = Reason.INTERVAL | Reason.BLOCK_START | Reason.MAX_AGE | Reason.MARGIN | Reason.CERTIFICATE
  everything |= Reason.DISTANCE | Reason.DRIFT
  assert clauses(state) == everything
  assert clauses(make_state(ONCE)) == Reason.FIRST
  assert clauses(dataclasses.replace(state, done=jnp.array([True]))) == 0

"""The pool of anchors: which one a step takes, that it is as good as when it was kept, and what it costs."""

import dataclasses

import jax
import numpy as np
import programs
import pytest

from archer_jax.reuse.prompt.pool import plan

LENGTHS = (3, 17, 5, 64)


@pytest.fixture(params=['wino', 'llada', 'dream', 'guided', pytest.param('saber', marks=pytest.mark.slow)])
def setting(request):
  golden = request.getfixturevalue('dream_tiny' if request.param == 'dream' else 'llada_tiny')
  decoder = 'llada' if request.param == 'guided' else request.param
  changes = {'guidance': True} if request.param == 'guided' else {}
  return golden.params, lambda anchors: programs.config(golden, decoder, anchors=anchors, **changes)


def shown(state, canvas):
  """The state as if the row's canvas were this one."""
  canvas = np.broadcast_to(canvas, state.canvas.shape)
  pending = {'pending': canvas == canvas[0, -1]} if hasattr(state.decoder, 'pending') else {}
  return programs.with_fields(state, canvas=canvas, block_step=state.block_step * 0, **pending)


def visit(params, cfg, names, **knobs):
  """Shows four rows canvases A, B, ... one a step; returns the states after each and the logits."""
  knobs = {'refresh_distance': 5, 'cfg_scale': 1.0 * cfg.guidance} | knobs
  state = programs.start(programs.prompts(1, LENGTHS), cfg, **knobs)
  mask, states = cfg.model.mask_id, []
  canvas = {name: np.full(cfg.canvas_length, mask) for name in 'ABC'}
  for name, token in (('B', 40), ('C', 77)):
    canvas[name][:10] = token
  # Near A, within the radius.
  canvas['a'] = canvas['A'].copy()
  canvas['a'][:2] = 9
  for name in names:
    state, logits = programs.stepper(cfg, False)(params, shown(state, canvas[name]))
    states.append((state, logits))
    state = dataclasses.replace(state, block=state.block * 0, done=state.done & False, status=state.status * 0)
  return states


def test_there_and_back_refreshes_again_with_one_anchor_and_takes_the_kept_one_with_two(setting):
  params, config = setting
  refreshed = lambda states: [bool(state.reuse.refreshed.all()) for state, _ in states]
  assert refreshed(visit(params, config(1), 'ABA')) == [True, True, True]
  states = visit(params, config(2), 'ABABa')
  assert refreshed(states) == [True, True, False, False, False]
  first, kept = states[0], states[2]
  # The very keys and values of then, hence the logits of then.
  for a, b in zip(jax.tree.leaves(first[0].kept.kv), jax.tree.leaves(kept[0].kept.kv), strict=True):
    np.testing.assert_array_equal(a, b)
  np.testing.assert_allclose(first[1], kept[1], atol=1e-4)
  assert [state.reuse.age[0].item() for state, _ in states] == [1, 1, 3, 3, 5]
  np.testing.assert_array_equal(states[-1][0].counters.refreshes, 2)


def test_the_least_recently_used_anchor_makes_room(setting):
  params, config = setting

  def refreshed(names, n):
    flags = [np.asarray(state.reuse.refreshed) for state, _ in visit(params, config(n), names)]
    assert all(len(set(each)) == 1 for each in flags)
    return [bool(each[0]) for each in flags]

  # C takes the place of A, which was left before B; then A that of B.
  assert refreshed('ABCBA', 2) == [True, True, True, False, True]
  assert refreshed('ABCABC', 3) == [True, True, True, False, False, False]


def test_an_anchor_made_anew_stands_once(setting):
  """A refresh at a canvas that has an anchor replaces that one, wherever it stands, and keeps the others."""
  params, config = setting
  state = visit(params, config(3), 'ABC')[-1][0]
  state = programs.set_knobs(state, refresh_interval=1)
  state, _ = programs.stepper(config(3), False)(params, shown(state, state.reuse.pool.anchor[0, 0]))
  assert bool(state.reuse.refreshed[0])
  anchors = {tuple(row) for row in [*np.asarray(state.reuse.pool.anchor[0]), np.asarray(state.reuse.anchor[0])]}
  assert len(anchors) == 3
  assert sorted([*state.reuse.pool.age[0].tolist(), state.reuse.age[0].item()]) == [1, 2, 3]


def test_a_refresh_in_the_step_of_a_reuse_keeps_the_anchor_before(llada_tiny):
  cfg = programs.config(llada_tiny, 'llada', anchors=2, on_low_margin='same_step')
  states = [state for state, _ in visit(llada_tiny.params, cfg, 'AaAa', kappa=1e6)]
  assert [bool(state.reuse.refreshed.all()) for state in states] == [True, True, False, False]
  for kept, other in zip(jax.tree.leaves(states[0].kept.kv), jax.tree.leaves(states[2].kept.kv), strict=True):
    np.testing.assert_array_equal(kept, other)
  np.testing.assert_array_equal(states[1].counters.nfe, 3)


def test_the_anchor_of_a_canvas_is_the_nearest_by_any_measure(llada_tiny):
  """By hidden states, which are those of the step before, B would be."""
  cfg = programs.config(llada_tiny, 'llada', anchors=2, drift='hidden')
  state = visit(llada_tiny.params, cfg, 'AB', refresh_interval=1)[-1][0]
  state = programs.set_knobs(state, refresh_interval=0, refresh_distance=0)
  state = shown(dataclasses.replace(state, done=state.done & False), np.full(cfg.canvas_length, cfg.model.mask_id))
  assert (state.reuse.anchor[:, 0] == 40).all()
  found = plan(llada_tiny.params, state, cfg)
  assert (found.reason == 0).all() and (found.seen['age'] == 2).all()
  assert (found.reuse.anchor == cfg.model.mask_id).all() and (found.reuse.pool.anchor[:, 0, 0] == 40).all()


def test_no_canvas_stands_twice_and_places_of_old_anchors_are_free(llada_tiny):
  cfg = programs.config(llada_tiny, 'llada', anchors=3)
  tokens = lambda state: [state.reuse.anchor[0, 0].item(), *state.reuse.pool.anchor[0, :, 0].tolist()]
  states = [state for state, _ in visit(llada_tiny.params, cfg, 'ABBA', max_age=2)]
  mask = cfg.model.mask_id
  # Both are too old by then. A is made anew in its own place, into which B goes.
  assert tokens(states[2]) == [40, mask, mask] and tokens(states[3]) == [mask, 40, mask]
  assert states[3].reuse.pool.age[0].tolist() == [3, -1]
  # A is too old when C comes: B takes its place, not the empty one.
  state = visit(llada_tiny.params, cfg, 'ABC', max_age=2)[-1][0]
  assert tokens(state) == [77, 40, mask] and state.reuse.pool.age[0].tolist() == [2, -1]


def test_an_anchor_that_is_too_old_is_not_taken(llada_tiny):
  cfg = programs.config(llada_tiny, 'llada', anchors=2)
  state = visit(llada_tiny.params, cfg, 'AB')[-1][0]
  state = shown(state, np.full(cfg.canvas_length, cfg.model.mask_id))
  state = dataclasses.replace(state, done=state.done & False)
  # The anchor A is two steps old.
  for max_age, takes in ((0, True), (3, True), (2, False)):
    found = plan(llada_tiny.params, programs.set_knobs(state, max_age=max_age), cfg)
    assert bool((found.reason == 0).all()) == takes, max_age


@pytest.mark.parametrize('drift', ['token', 'hidden'])
def test_rows_choose_for_themselves(llada_tiny, drift):
  cfg = programs.config(llada_tiny, 'wino', anchors=3, drift=drift)
  ids = programs.prompts(5, (9, 30, 17))
  knobs = {'refresh_distance': np.array([3, 8, 5])}
  together = programs.loop(cfg)(llada_tiny.params, programs.start(ids, cfg, threshold_back=0.99, **knobs))
  row = 1
  alone = programs.start(
    ids[row : row + 1], cfg, seeds=[row], threshold_back=0.99, refresh_distance=knobs['refresh_distance'][1]
  )
  alone = programs.loop(cfg)(llada_tiny.params, alone)
  np.testing.assert_array_equal(alone.canvas[0], together.canvas[row])
  np.testing.assert_array_equal(alone.trace['age'][0], together.trace['age'][row])


def test_memory_is_that_of_n_prompt_caches(llada_tiny):
  size = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))

  def parts(anchors, **changes):
    cfg = programs.config(llada_tiny, 'llada', anchors=anchors, **changes)
    state = programs.start(programs.prompts(1, LENGTHS), cfg)
    kept = size((state.kept.kv, state.kept.pool))
    assert kept == cfg.reuse_method.kept_bytes(*state.prompt_tokens.shape, cfg)
    # What an anchor is known by: its canvas, its age and its last use.
    return kept, size(state) - kept - size(state.reuse.pool)

  for changes in ({}, {'guidance': True}):
    one, rest = parts(1, **changes)
    for n in (2, 4):
      assert parts(n, **changes) == (n * one, rest)

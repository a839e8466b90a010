"""Drift measures: zero at the anchor, symmetric, reversible, blind to padding and to other rows."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import programs
import pytest

from archer_jax import specs
from archer_jax.reuse.prompt.drift import DRIFTS

LENGTHS = (3, 17, 5, 64)
MEASURES = specs.switches()['drift'].choices


def setting(request, decoder, drift, **changes):
  golden = request.getfixturevalue('dream_tiny' if decoder == 'dream' else 'llada_tiny')
  return golden.params, programs.config(golden, decoder, drift=drift, **changes)


def apart(params, cfg, canvas, anchor, hidden=None, anchor_hidden=None, gen_length=None):
  """Drift of canvases [B, G] from anchors [B, G], and of hidden states [B, G, D] where they count."""
  batch = len(canvas)
  state = programs.start(programs.prompts(1, (4,) * batch), cfg, gen_length=gen_length or cfg.canvas_length)
  state = programs.with_fields(state, canvas=canvas, anchor=anchor, age=[1] * batch)
  kept = dataclasses.replace(state.kept, last_hidden=hidden, anchor_hidden=anchor_hidden)
  state = dataclasses.replace(state, kept=kept)
  return np.asarray(DRIFTS[cfg.drift](params, state, cfg))


def canvases(seed, batch=4):
  return np.random.default_rng(seed).integers(0, 256, (batch, programs.CANVAS_LENGTH))


def states(seed, params, batch=4):
  shape = (batch, programs.CANVAS_LENGTH, params['embedding'].shape[1])
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize('drift', MEASURES)
def test_zero_at_the_anchor_symmetric_and_within_its_bounds(request, drift):
  params, cfg = setting(request, 'llada', drift)
  measure = functools.partial(apart, params, cfg)
  a, b, x, y = canvases(1), canvases(2), states(1, params), states(2, params)
  np.testing.assert_array_equal(measure(a, a, x, x), 0)
  there, back = measure(a, b, x, y), measure(b, a, y, x)
  np.testing.assert_array_equal(there, back)
  assert there.dtype == np.float32
  assert (there > 0).all() and (there <= 1).all()
  # As far apart as can be, and two of nothing.
  zeros = jnp.zeros_like(x)
  if drift == 'hidden':
    np.testing.assert_array_equal(measure(a, b, x, -x), 1)
    np.testing.assert_array_equal(measure(a, b, zeros, zeros), 0)


@pytest.mark.parametrize('drift', ['embedding', 'hidden'])
def test_value_is_that_of_the_formula(request, drift):
  params, cfg = setting(request, 'llada', drift)
  a, b, x, y = canvases(1), canvases(2), states(1, params), states(2, params)
  got = apart(params, cfg, a, b, x, y, gen_length=9)
  table = np.asarray(params['embedding'], np.float64)
  left, right = (table[a], table[b]) if drift == 'embedding' else (np.asarray(x, float), np.asarray(y, float))
  norm = lambda z: np.sqrt((z[:, :9] ** 2).sum(axis=(1, 2)))
  np.testing.assert_allclose(got, norm(left - right) / (norm(left) + norm(right)), rtol=1e-5)


@pytest.mark.parametrize('drift', MEASURES)
def test_padding_and_other_rows_change_nothing(request, drift):
  params, cfg = setting(request, 'llada', drift)
  a, b, x, y = canvases(1), canvases(2), states(1, params), states(2, params)
  whole = apart(params, cfg, a, b, x, y, gen_length=9)
  past = np.arange(programs.CANVAS_LENGTH) >= 9
  noisy_x = jnp.where(past[None, :, None], states(3, params), x)
  noisy = apart(params, cfg, np.where(past, canvases(3), a), b, noisy_x, y, gen_length=9)
  np.testing.assert_array_equal(whole, noisy)
  for row in range(4):
    one = slice(row, row + 1)
    alone = apart(params, cfg, a[one], b[one], x[one], y[one], gen_length=9)
    np.testing.assert_allclose(alone, whole[one], rtol=1e-6)


@pytest.mark.parametrize('drift', MEASURES)
@pytest.mark.parametrize('decoder', ['wino', 'llada', 'dream', pytest.param('saber', marks=pytest.mark.slow)])
def test_back_to_zero_after_a_rollback_to_the_anchor(request, decoder, drift):
  """Two steps away from the anchor, then its tokens again: `hidden` knows it one step later."""
  params, cfg = setting(request, decoder, drift)
  step = lambda state: programs.stepper(cfg, False)(params, state)[0]
  measure = lambda state: np.asarray(DRIFTS[drift](params, state, cfg))
  # In 24 steps Dream's first one would write nothing.
  start = programs.prefill(programs.start(programs.prompts(1, LENGTHS), cfg, steps=12), {5: 40, 11: 200})
  np.testing.assert_array_equal(measure(start), 0)
  state = step(start)
  # The hidden states are still those of the refresh.
  assert (measure(state) > 0).all() == (drift != 'hidden')
  away = step(state)
  assert (measure(away) > 0).all()
  back = dataclasses.replace(away, canvas=start.canvas, decoder=start.decoder, block=start.block)
  if drift == 'hidden':
    assert (measure(back) > 0).all()
    after = step(back)
    np.testing.assert_allclose(measure(after), 0, atol=1e-4)
    # So says the state, of the canvas that the step read.
    np.testing.assert_allclose(after.reuse.drift, 0, atol=1e-4)
  else:
    np.testing.assert_array_equal(measure(back), 0)


@pytest.mark.parametrize('drift', ['embedding', 'hidden'])
def test_a_row_decodes_alone_as_in_a_batch(request, drift):
  params, cfg = setting(request, 'wino', drift)
  ids = programs.prompts(4, (9, 30, 17))
  together = programs.loop(cfg)(params, programs.start(ids, cfg, drift_radius=0.2))
  assert 1 < int(together.counters.refreshes.min()) < int(together.counters.steps.min())
  for row in range(2):
    alone = programs.loop(cfg)(params, programs.start(ids[row : row + 1], cfg, seeds=[row], drift_radius=0.2))
    np.testing.assert_array_equal(alone.canvas[0], together.canvas[row])
    np.testing.assert_array_equal(alone.trace['refresh'][0], together.trace['refresh'][row])
    np.testing.assert_allclose(alone.trace['drift'][0], together.trace['drift'][row], atol=1e-4)


def test_hidden_states_are_kept_only_where_they_are_compared(request):
  params, cfg = setting(request, 'wino', 'token')
  assert programs.start(programs.prompts(1, LENGTHS), cfg).kept.last_hidden is None
  _, cfg = setting(request, 'wino', 'hidden')
  state = programs.stepper(cfg, False)(params, programs.start(programs.prompts(1, LENGTHS), cfg))[0]
  assert np.abs(state.kept.last_hidden).max() > 0

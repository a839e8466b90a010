"""Certificates over real decodings: no decision differs while the margin is above the error, or above its bound."""

import functools

import jax
import numpy as np
import programs
import pytest

from archer_jax.calibration import measure
from archer_jax.calibration.measure import fit_kappa
from archer_jax.calibration.measure import violations

BATCH = 16
KINDS = ('wino', 'llada', 'guided', 'dream', 'saber')
# A program each. Guidance is the rule of llada in two streams.
EXACT = [pytest.param(kind, marks=[pytest.mark.slow] if kind == 'llada' else []) for kind in KINDS]
REDONE = [pytest.param(kind, marks=[] if kind in ('wino', 'dream') else [pytest.mark.slow]) for kind in KINDS]
# When the rows of a batch refresh; a drift is each row's own.
CLOCKS = [
  {'refresh_interval': 0},
  {'refresh_interval': 3},
  {'refresh_interval': 2, 'refresh_distance': 13},
  {'refresh_interval': 5},
  {'refresh_interval': 0, 'refresh_distance': 5},
]


def calm(golden):
  """The golden model with weaker attention: as published, kept prompts would change nearly every decision."""
  damp = lambda path, x: x * 0.05 if 'o_proj' in jax.tree_util.keystr(path) else x
  return jax.tree_util.tree_map_with_path(damp, golden.params)


@functools.cache
def observed(cfg, level=0):
  # A program of many steps repays twice the time of its compilation.
  options = {'xla_backend_optimization_level': level} if level else programs.QUICK
  return jax.jit(functools.partial(measure.observed_step, cfg=cfg), compiler_options=options)


def rows(seed, cfg, **knobs):
  """Random prompts with random numbers, so that many kinds of comparisons bind.

  A clock is that of a batch, since a refresh of all rows is one forward, and of some of them one each.
  """
  rng = np.random.default_rng(seed)
  ids = programs.prompts(seed, rng.integers(4, 64, BATCH))
  spread = {
    'threshold': rng.uniform(0.005, 0.5, BATCH),
    'threshold_back': rng.uniform(0.01, 0.6, BATCH),
    'temperature': rng.choice([0, 0, 0.5], BATCH),
    **CLOCKS[seed % len(CLOCKS)],
  }
  if cfg.guidance:
    spread['cfg_scale'] = rng.uniform(0, 1.5, BATCH)
  return programs.start(ids, cfg, seeds=rng.integers(0, 2**31, BATCH), **(spread | knobs))


def walk(request, kind, n_steps, first_seed=0, knobs=None, **changes):
  """Reuse steps of real trajectories, at least that many, as arrays by the names of `Observation`."""
  golden = programs.shallow(programs.golden_of(request, kind))
  decoder = 'llada' if kind == 'guided' else kind
  cfg = programs.config(golden, decoder, trace_steps=0, guidance=kind == 'guided', **changes)
  params, seen, count, seed = calm(golden), [], 0, first_seed
  while count < n_steps:
    state = rows(seed, cfg, **(knobs or {}))
    seed += 1
    while not np.all(state.done):
      state, observation = observed(cfg, level=1)(params, state)
      host = jax.device_get(observation)
      seen.append({name: getattr(host, name)[host.reused] for name in host.__dataclass_fields__})
      count += int(host.reused.sum())
  return {name: np.concatenate([part[name] for part in seen]) for name in seen[0]}


def check_exact(steps):
  # Two forwards of one program differ by rounding too, of which a margin knows nothing: that much is left between.
  safe = steps['margin'] > steps['error'] + 1e-5
  assert not (safe & steps['differs']).any()
  # It would be easy to say nothing.
  assert safe.sum() > 0.2 * len(safe)
  assert steps['differs'].sum() > 5


@pytest.mark.parametrize('kind', EXACT)
def test_no_decision_differs_while_the_margin_is_above_the_error(request, kind):
  check_exact(walk(request, kind, 1000))


@pytest.mark.slow
def test_exact_certificate_over_fifty_thousand_steps(request):
  counts = {kind: walk(request, kind, 12_500, first_seed=100) for kind in KINDS}
  assert sum(len(steps['error']) for steps in counts.values()) >= 50_000
  for steps in counts.values():
    check_exact(steps)


@pytest.mark.parametrize('drift', ['token', pytest.param('embedding', marks=pytest.mark.slow), 'hidden'])
def test_kappa_of_some_prompts_holds_for_others(request, drift):
  """Fitted on some random prompts, counted on others."""
  found = walk(request, 'wino', 1200, knobs={'temperature': 0.0}, drift=drift)
  held = walk(request, 'wino', 1200, first_seed=1000, knobs={'temperature': 0.0}, drift=drift)
  for quantile in (0.9, 0.99):
    kappa = fit_kappa(found['error'], found['drift'], quantile)
    wrong = violations(held, kappa)
    assert wrong['beyond'] <= (1 - quantile) * len(held['error']), (quantile, wrong)
    assert wrong['wrong'] <= wrong['beyond']


@pytest.mark.parametrize('kind', REDONE)
def test_same_step_decides_as_a_full_forward_wherever_the_bound_holds(request, kind):
  """Every step against a forward over everything; those at which e > kappa * drift are counted, not looked at."""
  golden = programs.shallow(programs.golden_of(request, kind))
  decoder = 'llada' if kind == 'guided' else kind
  changes = {'trace_steps': 0, 'guidance': kind == 'guided', 'on_low_margin': 'same_step'}
  cfg = programs.config(golden, decoder, **changes)
  params = calm(golden)
  kappa, counts = 2.0, {'reused': 0, 'redone': 0, 'beyond': 0}
  for seed in range(3):
    state = rows(seed, cfg, temperature=0.0, kappa=kappa, refresh_interval=0, refresh_distance=0)
    while not np.all(state.done):
      live = ~np.asarray(state.done)
      # The same step with every row refreshing, from the same state.
      expected, _ = observed(cfg)(params, programs.set_knobs(state, refresh_interval=1))
      after, observation = observed(cfg)(params, state)
      host = jax.device_get(observation)
      refreshed = np.asarray(after.reuse.refreshed)
      low = ~(host.margin > kappa * host.drift)
      np.testing.assert_array_equal(refreshed[host.reused], low[host.reused])
      beyond = host.reused & (host.error > kappa * host.drift) & ~refreshed
      # A margin of rounding is nobody's decision.
      sure = live & ~beyond & (np.asarray(expected.reuse.margin) > 1e-4)
      np.testing.assert_array_equal(after.canvas[sure], expected.canvas[sure])
      np.testing.assert_array_equal(after.block[sure], expected.block[sure])
      # A step that refreshed after its reuse took one more forward in every stream.
      streams = 1 + (np.asarray(state.knobs.cfg_scale) > 0)
      forwards = np.where(host.reused & low, 2, 1) * live
      np.testing.assert_array_equal(after.counters.nfe - state.counters.nfe, streams * forwards)
      counts['reused'] += int((host.reused & ~refreshed).sum())
      counts['redone'] += int((host.reused & refreshed).sum())
      counts['beyond'] += int(beyond.sum())
      state = after
  assert counts['redone'] > 20
  assert counts['beyond'] <= 0.2 * max(counts['reused'], 1), counts

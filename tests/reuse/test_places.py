"""Every drift, pool and certificate in slots, over a mesh and with a trace: rows decode as they do alone."""

import dataclasses

import jax
import numpy as np
import programs
import pytest

import archer_jax
from archer_jax import sharding
from archer_jax.loop.decode import decode
from archer_jax.mesh import make_mesh
from archer_jax.model import Transformer
from archer_jax.reuse.prompt.reasons import Reason
from archer_jax.specs import SHIFTED

CASES = {
  'wino': {'drift': 'hidden', 'anchors': 2, 'on_low_margin': 'same_step'},
  'llada': {'drift': 'embedding', 'anchors': 3, 'on_low_margin': 'same_step', 'guidance': True},
  'dream': {'drift': 'hidden', 'anchors': 2},
  'saber': {'drift': 'embedding', 'anchors': 2, 'on_low_margin': 'same_step'},
}


def golden_of(request, decoder):
  return programs.shallow(programs.golden_of(request, decoder))


@pytest.mark.parametrize('decoder', CASES)
def test_slots(request, decoder):
  """Seven requests through two slots, against each alone, or for all decoders but one against the opposite order.

  Alone they are another program. What is counted agrees with what was recorded.
  """
  golden = golden_of(request, decoder)
  model = Transformer(golden.config)
  prompts = [ids.tolist() for ids in programs.prompts(7, (19, 30, 17, 25, 31, 22, 28))]
  settings = {name: value for name, value in CASES[decoder].items() if name != 'guidance'}
  settings |= {'decoder': decoder, 'refresh': 'certified', 'kappa': 1.0, 'gen_length': 24, 'drift_radius': 0.4}
  if decoder == 'wino':
    settings |= {'block_length': 8, 'threshold': 0.05, 'threshold_back': 0.1}
  if decoder == 'llada':
    settings |= {'block_length': 8, 'cfg_scale': 0.8}
  run = lambda prompts, batch_size: archer_jax.generate(
    model, golden.params, None, prompts, batch_size=batch_size, trace=True, **settings
  )
  together = run(prompts, 2)
  others = run(prompts, 1) if decoder == 'wino' else run(prompts[::-1], 2)[::-1]
  for mine, other in zip(together, others, strict=True):
    assert mine.trace['margin_per_step'].min() > 0
    for name in ('token_ids', 'steps', 'nfe', 'refreshes', 'rows_fed'):
      assert getattr(mine, name) == getattr(other, name), name
    np.testing.assert_array_equal(mine.trace['reason_per_step'], other.trace['reason_per_step'])
    np.testing.assert_allclose(mine.trace['drift_per_step'], other.trace['drift_per_step'], atol=1e-4)
    reasons = mine.trace['reason_per_step']
    np.testing.assert_array_equal(mine.trace['refresh_per_step'], reasons != 0)
    assert reasons[0] == Reason.FIRST
    redone = int(((reasons & Reason.SAME_STEP) > 0).sum())
    streams = 2 if decoder == 'llada' else 1
    assert mine.nfe == streams * (mine.steps + redone)
    lead = int(model.config.logit_alignment == SHIFTED)
    fresh = 24 + (8 if decoder == 'wino' else 0)
    forwards = mine.steps + redone
    kept = (forwards - mine.refreshes) * lead
    assert mine.rows_fed == streams * (forwards * fresh + mine.refreshes * mine.prompt_tokens + kept)
  every = np.concatenate([result.trace['reason_per_step'] for result in together])
  wanted = Reason.SAME_STEP if CASES[decoder].get('on_low_margin') else Reason.CERTIFICATE
  assert (every & wanted).any() and (every == 0).any()


@pytest.mark.parametrize(
  ('decoder', 'mesh'),
  [
    ('wino', 'data:2,model:2'),
    # Mesh and decoders without it stand in test_sharding.py.
    pytest.param('llada', 'data:4', marks=pytest.mark.slow),
    pytest.param('dream', 'data:2', marks=pytest.mark.slow),
    pytest.param('saber', 'data:2', marks=pytest.mark.slow),
  ],
)
def test_mesh(request, decoder, mesh):
  golden, mesh = golden_of(request, decoder), make_mesh(mesh)
  cfg = programs.config(golden, decoder, **CASES[decoder])
  ids = programs.prompts(11, (9, 30, 17, 5, 40, 22, 13, 64))
  knobs = {'kappa': 1.0, 'drift_radius': 0.4, 'threshold': 0.05, 'threshold_back': 0.1}
  state = programs.start(ids, cfg, cfg_scale=0.8 * cfg.guidance, **knobs)
  wide = sharding.init_sharded_state(
    state.prompt_tokens, state.prompt_valid, state.knobs, state.seed, cfg=cfg, mesh=mesh
  )
  expected = programs.loop(cfg)(golden.params, state)
  params = jax.device_put(golden.params, sharding.param_shardings(cfg.model, mesh))
  got = sharding.program(decode, mesh, cfg).lower(params, wide, ()).compile(programs.QUICK)(params, wide, ())
  for name in ('canvas', 'done'):
    np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))
  for field in dataclasses.fields(expected.counters):
    np.testing.assert_array_equal(getattr(got.counters, field.name), getattr(expected.counters, field.name))
  np.testing.assert_array_equal(got.trace['reason'], expected.trace['reason'])
  assert (np.asarray(got.trace['reason']) & (Reason.CERTIFICATE | Reason.DRIFT)).any()

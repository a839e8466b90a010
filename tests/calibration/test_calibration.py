"""Calibrations: the constant that is fitted, its file, and every file that must not be believed."""

import dataclasses
import json

import numpy as np
import pytest

from archer_jax.calibration import file as calibration
from archer_jax.calibration import measure
from archer_jax.checkpoints.manifest import read_manifest
from archer_jax.cli import calibrate
from archer_jax.decoders.saber import Falls
from archer_jax.engine.settings import make_settings
from archer_jax.types import Update


def test_kappa_is_the_order_statistic_that_holds_at_its_confidence():
  n, quantile = 1000, 0.9
  error, drift = np.arange(1.0, n + 1), np.full(n, 0.5)
  kappa = measure.fit_kappa(error, drift, quantile)
  # By the binomial of scipy: binom.cdf(84, 1000, 0.1) = 0.047 and binom.cdf(85, 1000, 0.1) = 0.060.
  assert kappa == 2 * (n - 84)
  assert measure.needed_samples(0.99) == 299 and measure.needed_samples(0.999) == 2995
  # The largest of the fewest samples.
  assert measure.fit_kappa(error[:299], drift[:299], 0.99) == 598


def test_a_kappa_fitted_to_draws_holds_as_often_as_it_says():
  rng, misses = np.random.default_rng(0), 0
  for _ in range(200):
    error = rng.exponential(size=400)
    kappa = measure.fit_kappa(error, np.ones(400), 0.95)
    # The exact share beyond is known here.
    misses += np.exp(-kappa) > 0.05
  # At most 5 % of the draws, with room for chance.
  assert misses <= 20


@pytest.mark.parametrize(
  ('n', 'quantile', 'message'),
  [
    (298, 0.99, 'quantile 0.99 needs at least 299 reuse steps away from their anchor, got 298'),
    (0, 0.5, 'needs at least 5 reuse steps away from their anchor, got 0'),
    (10, 1.0, 'quantile must be between 0 and 1, both excluded, got 1.0'),
    (10, 0.0, 'quantile must be between 0 and 1, both excluded, got 0.0'),
  ],
)
def test_samples_or_quantiles_that_do_not_do(n, quantile, message):
  with pytest.raises(ValueError, match=message):
    measure.fit_kappa(np.ones(n), np.ones(n), quantile)


def test_errors_of_no_use():
  for error, message in (
    (np.zeros(100), 'needs no kappa'),
    (np.full(100, np.nan), '100 of 100 steps have'),
  ):
    with pytest.raises(ValueError, match=message):
      measure.fit_kappa(error, np.ones(100), 0.9)


def test_an_error_without_drift_has_no_kappa():
  error, drift = np.ones(100), np.where(np.arange(100) < 20, 0, 1.0)
  with pytest.raises(ValueError, match=r'no kappa bounds the error at quantile 0\.9: at 20\.0% of the steps'):
    measure.fit_kappa(error, drift, 0.9)


def test_violations_are_counted():
  steps = {
    'error': np.array([1.0, 3.0, 1.0, 5.0]),
    'drift': np.array([1.0, 1.0, 0.0, 2.0]),
    'margin': np.array([2.5, 2.5, 1.0, 1.0]),
    'differs': np.array([False, True, False, True]),
  }
  assert measure.violations(steps, 2.0) == {'beyond': 3, 'certified': 3, 'wrong': 1}


def test_remembered_confidences_are_no_decision():
  """Saber keeps floats of every column, which no two forwards give alike."""
  flags = np.zeros((2, 3), bool)
  memory = Falls(pending=flags, kept=np.full((2, 3), 0.5, np.float32), previous=np.full((2, 3), 0.25, np.float32))
  one = Update(
    canvas=np.zeros((2, 3), np.int32),
    accepted=flags,
    remasked=flags,
    block_done=flags[:, 0],
    margin=np.ones(2, np.float32),
    decoder=memory,
  )
  other = dataclasses.replace(one, decoder=memory._replace(previous=memory.previous + 1), margin=one.margin + 1)
  assert measure.decides_otherwise(one, other).tolist() == [False, False]
  second = np.array([[False] * 3, [False, True, False]])
  for changes in (
    {'canvas': second.astype(np.int32)},
    {'accepted': second},
    {'remasked': second},
    {'block_done': second[:, 1]},
    {'decoder': memory._replace(pending=second)},
  ):
    assert measure.decides_otherwise(one, dataclasses.replace(one, **changes)).tolist() == [False, True]


def entry(**changes):
  known = {'dtype': 'float32', 'decoder': 'wino', 'drift': 'token', 'refresh_distance': 5}
  return known | {'kappa': {'0.9': 2.5, '0.99': 4.0}} | changes


@pytest.fixture
def place(text_path, tmp_path):
  """A folder for refresh.json, and the manifest of the tiny text model."""
  return tmp_path, read_manifest(text_path)


def settings_of(manifest, **given):
  return make_settings(manifest.config, {'refresh': 'certified', **given}, recommended=manifest.defaults)


def test_certified_takes_the_kappa_of_its_quantile_and_a_given_one_wins(place):
  folder, manifest = place
  path = calibration.calibration_file(folder)
  calibration.write_calibration(path, manifest, entry())
  calibration.write_calibration(
    path, manifest, entry(drift='hidden', drift_radius=0.3, refresh_distance=None, kappa={'0.99': 7.0})
  )
  # The same once more replaces its own and leaves the other.
  calibration.write_calibration(path, manifest, entry(kappa={'0.9': 3.0, '0.99': 5.0}))
  take = lambda **given: calibration.calibrated(settings_of(manifest, **given), folder, manifest, 'float32')
  assert take().knobs['kappa'] == 5.0
  assert take(quantile=0.9).knobs['kappa'] == 3.0
  assert take(drift='hidden').knobs['kappa'] == 7.0
  assert take(kappa=1.5).knobs['kappa'] == 1.5
  # A certificate is for the drifts that it was measured at, unless somebody wants others.
  assert take().knobs['refresh_distance'] == 5 and take(refresh_distance=2).knobs['refresh_distance'] == 2
  assert take(drift='hidden').knobs['drift_radius'] == 0.3
  assert take(drift='hidden', drift_radius=0.1).knobs['drift_radius'] == 0.1
  assert take(kappa=1.5).knobs['refresh_distance'] == 0
  assert [file.name for file in folder.iterdir()] == ['refresh.json']


def test_files_that_must_not_be_believed(place, llada_tiny):
  folder, manifest = place
  take = lambda dtype='float32', **given: calibration.calibrated(
    settings_of(manifest, **given), folder, manifest, dtype
  )
  with pytest.raises(ValueError, match=r'refresh\.json does not exist; make it with archer-calibrate'):
    take()
  path = calibration.calibration_file(folder)
  calibration.write_calibration(path, manifest, entry())
  with pytest.raises(ValueError, match='has no calibration for dtype bfloat16 decoder wino drift token, but for dtype'):
    take('bfloat16')
  with pytest.raises(ValueError, match='has no calibration for dtype float32 decoder wino drift embedding'):
    take(drift='embedding')
  with pytest.raises(ValueError, match=r'quantile must be one that .* has, 0.9, 0.99, got 0.95'):
    take(quantile=0.95)
  good = path.read_text()
  for wrong, reason in (
    (good[: len(good) // 2], r'cannot be read as a calibration'),
    ('[]', r'must be an object of JSON with format_version 2'),
    ('{}', r'must be an object of JSON with format_version 2'),
    ('{"format_version": 2}', r'calibrations must be a list, got None'),
    (good.replace('"format_version": 2', '"format_version": 1'), r'with format_version 2'),
    (good.replace('2.5', '-2.5'), r'entry 0: kappa must be positive, got -2\.5'),
    (good.replace('2.5', '0'), r'entry 0: kappa must be positive, got 0'),
    (good.replace('2.5', 'NaN'), r'entry 0: kappa must be positive, got nan'),
    (good.replace('2.5', '"3"'), r'entry 0: kappa must be a number'),
    (good.replace('"0.9"', '"1.9"'), r'entry 0: quantile must be a number between 0 and 1, both excluded, got 1\.9'),
    (good.replace('"0.9"', '"most"'), r"entry 0: quantile must be a number between 0 and 1, both excluded, got 'most'"),
    (good.replace('"drift": "token"', '"drift": 1'), r'entry 0: dtype, decoder, drift must be texts'),
    (good.replace('"refresh_distance": 5', '"refresh_distance": 0.3'), r'entry 0: refresh_distance must be an integer'),
  ):
    assert wrong != good
    path.write_text(wrong)
    with pytest.raises(ValueError, match=reason + r'.*; remove it and run archer-calibrate again') as raised:
      take()
    assert str(raised.value).count('\n') == 0 and str(path) in str(raised.value)
  with pytest.raises(ValueError, match='kappa must be positive, got 0'):
    calibration.write_calibration(path, manifest, entry(kappa={'0.9': 0.0}))
  path.unlink()
  calibration.write_calibration(path, read_manifest(llada_tiny.path), entry())
  with pytest.raises(ValueError, match=r'refresh\.json was calibrated for another checkpoint'):
    take()


def test_the_tool_from_prompts_to_a_run(text_path, tmp_path, capsys):
  # A folder of its own, since the checkpoint is everybody's.
  folder = tmp_path / 'model'
  folder.mkdir()
  for file in text_path.rglob('*'):
    target = folder / file.relative_to(text_path)
    target.mkdir() if file.is_dir() else target.write_bytes(file.read_bytes())
  prompts = tmp_path / 'prompts.jsonl'
  prompts.write_text(''.join(json.dumps({'prompt': f'{i}+{i * i}='}) + '\n' for i in range(8)))
  run = lambda *flags: calibrate.main(['calibrate', f'--checkpoint={folder}', f'--input={prompts}', *flags])
  decoding = ('--threshold=0.3', '--dtype=float32', '--refresh=once')
  assert run('--quantiles=0.5,0.9', *decoding) == 0
  out = capsys.readouterr().out
  assert 'quantile 0.5: kappa' in out and 'wrote' in out
  content = json.loads((folder / 'refresh.json').read_text())
  (found,) = content['calibrations']
  assert set(found['kappa']) == {'0.5', '0.9'} and 0 < found['kappa']['0.5'] <= found['kappa']['0.9']
  assert (found['prompts'], found['dtype'], found['settings']['threshold']) == (8, 'float32', 0.3)
  manifest = read_manifest(folder)
  settings = calibration.calibrated(settings_of(manifest, quantile=0.9), folder, manifest, 'float32')
  assert settings.knobs['kappa'] == found['kappa']['0.9']
  # What it cannot fit is told, and what it can is kept.
  assert run('--quantiles=0.5,0.9999', *decoding) == 1
  said = capsys.readouterr()
  assert 'quantile 0.5: kappa' in said.out and 'quantile 0.9999 needs at least 29956 reuse steps' in said.err
  content = json.loads((folder / 'refresh.json').read_text())
  assert set(content['calibrations'][0]['kappa']) == {'0.5'}
  assert run('--quantiles=0.9999', *decoding) == 1
  assert 'quantile 0.9999 needs at least 29956 reuse steps' in capsys.readouterr().err
  assert json.loads((folder / 'refresh.json').read_text()) == content


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (['--quantiles=1.5'], 'quantile must be a number between 0 and 1, both excluded, got 1.5'),
    (['--quantiles=0.9,'], "quantile must be a number between 0 and 1, both excluded, got ''"),
    ([], 'input must be a file of JSON lines that exists, got None'),
    (['--refresh=certified'], 'refresh certified must not be given without kappa, which is to be found here'),
    (['--quantile=0.9'], 'quantile must not be given: quantiles says for which shares'),
    (['--refresh=certified', '--kappa=0'], 'kappa must be positive, got 0'),
    (['--anchors=0'], 'anchors'),
  ],
)
def test_flags_of_the_command_that_are_wrong(text_path, flags, message, capsys):
  assert calibrate.main(['calibrate', f'--checkpoint={text_path}', *flags]) == 1
  error = capsys.readouterr().err
  assert message in error and error.count('\n') == 1


def test_the_bundled_model_is_calibrated():
  manifest = read_manifest(None)
  kappas = []
  for quantile in (0.9, 0.99, 0.999):
    settings = calibration.calibrated(
      settings_of(manifest, decoder='wino', quantile=quantile), None, manifest, 'float32'
    )
    kappas.append(settings.knobs['kappa'])
  assert kappas == sorted(kappas)
  (entry,) = calibration.read_calibrations(calibration.calibration_file(None), manifest)
  for quantile, held in entry['held_out'].items():
    assert held['beyond'] <= (1 - float(quantile)) * held['steps'], (quantile, held)
    assert held['wrong'] <= held['beyond']

import subprocess
import sys

import pytest
from text_model import CONFIG

from archer_jax import specs
from archer_jax.config import DecodeConfig
from archer_jax.config import ModelConfig
from archer_jax.engine.settings import SETTINGS
from archer_jax.engine.settings import make_settings

DREAM = ModelConfig(**{**vars(CONFIG), 'family': 'dream', 'logit_alignment': 'shifted'})


def test_built_in_defaults():
  settings = make_settings(CONFIG, {'decoder': 'wino'})
  assert (settings.decoder, settings.refresh, settings.block_length, settings.seed) == ('wino', 'archer', 64, 0)
  row = settings.row({})
  assert row['gen_length'] == row['steps'] == 128
  assert (row['threshold'], row['threshold_back'], row['max_accept'], row['temperature']) == (0.6, 0.9, 20, 0)
  default = specs.load('decoders', 'wino').spec.refresh_distance
  assert row['refresh_distance'] == default > 1
  assert (row['drift_radius'], row['min_margin'], row['max_age'], row['refresh_interval']) == (0, 0, 0, 0)
  assert settings.switches['early_stop'] is True
  assert settings.switches['drift'] == 'token'
  assert make_settings(DREAM, {}).decoder == 'dream'
  assert make_settings(DREAM, {}).block_length is None
  # A program for each canvas, not for each length: a block ends with its row.
  shorter = [make_settings(CONFIG, {'decoder': 'wino', 'gen_length': n}) for n in (17, 18, 20)]
  assert len({settings.config(32) for settings in shorter}) == 1


def test_given_beats_recommended_beats_default():
  recommended = {'gen_length': 16, 'block_length': 8, 'threshold': 0.7, 'shadow': 'self', 'prompt': 'x', 'note': 1}
  settings = make_settings(CONFIG, {'decoder': 'wino', 'threshold': 0.5}, recommended=recommended)
  row = settings.row({})
  assert (row['gen_length'], row['threshold'], row['threshold_back']) == (16, 0.5, 0.9)
  assert (settings.block_length, settings.switches['shadow']) == (8, 'self')
  assert settings.row({'threshold': 0.1})['threshold'] == 0.1


def test_recommendations_for_another_choice_are_left_out():
  recommended = {'refresh': 'interval', 'refresh_interval': 3, 'threshold': 0.7, 'shadow': 'self', 'block_length': 16}
  settings = make_settings(CONFIG, {'decoder': 'llada', 'refresh': 'archer', 'gen_length': 8}, recommended=recommended)
  assert settings.row({})['refresh_interval'] == 0
  assert settings.row({})['threshold'] == specs.knobs()['threshold'].default
  assert settings.switches['shadow'] == 'official'
  # A block longer than the canvas is refused only to who asks for it.
  assert settings.config(16).block_length == 16


@pytest.mark.parametrize(
  ('refresh', 'given', 'clauses'),
  [
    ('always', {}, {'refresh_interval': 1}),
    ('once', {}, {}),
    ('once', {'refresh_at_block_start': True, 'max_age': 4}, {'refresh_at_block_start': 1, 'max_age': 4}),
    ('interval', {'refresh_interval': 4}, {'refresh_interval': 4}),
    ('interval', {'refresh_interval': 0}, {}),
    ('archer', {'refresh_distance': 9}, {'refresh_distance': 9}),
    # K of 0 is the rule `once`.
    ('archer', {'refresh_distance': 0}, {}),
    ('archer', {'refresh_distance': 0, 'min_margin': 0.1}, {'min_margin': 0.1}),
    ('archer', {'drift': 'embedding', 'drift_radius': 0.3}, {'drift_radius': 0.3}),
  ],
)
def test_named_rules_as_clauses(refresh, given, clauses):
  row = make_settings(CONFIG, {'decoder': 'wino', 'refresh': refresh, **given}).row({})
  names = ('refresh_interval', 'refresh_at_block_start', 'refresh_distance', 'drift_radius', 'min_margin', 'max_age')
  assert {name: row[name] for name in names if row[name]} == clauses


# One value each, and the choices among which somebody reads it.
_VALUES = {
  'steps': 16, 'threshold': 0.5, 'threshold_back': 0.5, 'max_accept': 3, 'temperature': 0.5, 'top_p': 0.5, 'top_k': 3,
  'cfg_scale': 1.0, 'alg_temp': 0.5, 'refresh_interval': 2, 'refresh_at_block_start': True, 'drift_radius': 0.5,
  'min_margin': 0.5, 'max_age': 3, 'gen_length': 64, 'block_length': 16, 'mask_prediction': 'official',
  'shadow': 'self', 'remasking': 'random', 'alg': 'origin', 'logits_eos_inf': True, 'confidence_eos_eot_inf': True,
  'early_stop': False, 'drift': 'token', 'seed': 1, 'chat': True, 'kappa': 2.0, 'quantile': 0.9, 'anchors': 2,
  'on_low_margin': 'same_step', 'refresh_distance': 5, 'min_accept': 3, 'eos_penalty': 1.0, 'factor': 1.0,
  'reuse_interval': 4, 'window': 2, 'prompt_interval': 9, 'response_interval': 3, 'transfer_ratio': 0.5,
  'dkv_shift': 'un_right',
}  # fmt: skip
_WINO, _LLADA, _DREAM, _SABER, _SHIFTED = {'wino'}, {'llada'}, {'dream'}, {'saber'}, {'saber shifted'}
_PARALLEL = {'parallel', 'parallel shifted'}
_DECODERS = {
  'min_accept': _SABER, 'eos_penalty': _SHIFTED, 'steps': _LLADA | _DREAM | _SHIFTED, 'threshold': _WINO | _PARALLEL,
  'threshold_back': _WINO, 'max_accept': _WINO, 'top_p': _DREAM,
  'top_k': _DREAM, 'cfg_scale': _LLADA, 'alg_temp': _DREAM, 'shadow': _WINO, 'factor': _PARALLEL,
  'block_length': _WINO | _LLADA | _SABER | _DREAM | _PARALLEL,
  'remasking': _LLADA, 'alg': _DREAM, 'logits_eos_inf': _WINO | _LLADA | _PARALLEL,
  'confidence_eos_eot_inf': _WINO | _LLADA | _PARALLEL,
  # Of other reuse methods than that of the rules.
  'reuse_interval': set(), 'window': set(), 'prompt_interval': set(), 'response_interval': set(),
  'transfer_ratio': set(), 'dkv_shift': set(),
}  # fmt: skip
_BY_DRIFT, _ALL_BUT_ALWAYS = {'archer', 'certified'}, {'archer', 'once', 'interval', 'certified'}
_RULES = {
  'refresh_interval': {'interval'}, 'drift': _BY_DRIFT, 'drift_radius': _BY_DRIFT, 'refresh_distance': _BY_DRIFT,
  'anchors': _BY_DRIFT,
  'on_low_margin': _BY_DRIFT, 'min_margin': {'archer'}, 'kappa': {'certified'}, 'quantile': {'certified'},
  'refresh_at_block_start': _ALL_BUT_ALWAYS, 'max_age': _ALL_BUT_ALWAYS,
}  # fmt: skip


def test_every_setting_is_in_the_table_of_this_test():
  assert set(_VALUES) == set(SETTINGS) - {'decoder', 'reuse', 'refresh'}


@pytest.mark.parametrize('name', _VALUES)
def test_what_nothing_reads_is_refused(name):
  kinds = ((CONFIG, 'wino'), (CONFIG, 'llada'), (DREAM, 'dream'), (CONFIG, 'saber'), (DREAM, 'saber shifted'))
  kinds += ((CONFIG, 'parallel'), (DREAM, 'parallel shifted'))
  for model, decoder in kinds:
    for refresh in ('archer', 'always', 'once', 'interval', 'certified'):
      given = {'decoder': decoder.split()[0], 'refresh': refresh, name: _VALUES[name]}
      if name == 'drift_radius' and refresh in _BY_DRIFT:
        # Of this drift alone.
        given['drift'] = 'embedding'
      if refresh == 'interval':
        given.setdefault('refresh_interval', 2)
      reads = decoder in _DECODERS.get(name, {decoder}) and refresh in _RULES.get(name, {refresh})
      if reads:
        make_settings(model, given)
        continue
      with pytest.raises(ValueError, match=f'{name} must not be given with'):
        make_settings(model, given)
      if name in specs.knobs():
        settings = make_settings(
          model,
          {key: value for key, value in given.items() if key != name or key == 'refresh'}
          | ({'refresh_interval': 2} if refresh == 'interval' else {}),
        )
        with pytest.raises(ValueError, match=f'{name} must not be given with'):
          settings.row({name: _VALUES[name]})


def test_a_method_that_implies_a_decoder_is_named_where_the_model_fits_neither():
  with pytest.raises(ValueError, match=r"^reuse must be one of .* for a model with shifted logits, got 'dkv_greedy'$"):
    make_settings(DREAM, {'reuse': 'dkv_greedy'})


def test_orders_without_a_score_refuse_what_would_change_it():
  with pytest.raises(ValueError, match='alg_temp must not be given with alg origin'):
    make_settings(DREAM, {'alg': 'origin', 'alg_temp': 0.5})
  with pytest.raises(ValueError, match='confidence_eos_eot_inf must not be given with remasking random'):
    make_settings(CONFIG, {'decoder': 'llada', 'remasking': 'random', 'confidence_eos_eot_inf': True})


@pytest.mark.parametrize(
  ('given', 'message'),
  [
    ({'decoder': 'nucleus'}, 'decoder must be one of dream, llada, .*wino, got'),
    ({'decoder': 'dream'}, 'decoder must be llada, parallel, saber or wino for a model with same_position logits'),
    ({'reuse': 'nothing'}, 'reuse must be one of .*prompt.*, got'),
    ({'refresh': 'never'}, 'refresh must be one of archer, always, once, interval'),
    ({'refresh': 'interval'}, 'refresh_interval must be given'),
    ({'refresh': 'certified', 'kappa': 0}, 'kappa must be positive, got 0'),
    ({'refresh': 'certified', 'kappa': -1.0}, 'kappa must be positive, got -1.0'),
    ({'refresh': 'certified', 'quantile': 1}, 'quantile must be a number between 0 and 1, both excluded, got 1'),
    ({'anchors': 0}, 'anchors must be an integer at least 1, got 0'),
    ({'anchors': 1.5}, 'anchors must be an integer at least 1, got 1.5'),
    ({'on_low_margin': 'never'}, 'on_low_margin must be one of next_step, same_step'),
    ({'refresh_distance': -1}, r'refresh_distance must be an integer in \[0, 2147483647\], got -1'),
    ({'refresh_distance': 2.5}, r'refresh_distance must be an integer in \[0, 2147483647\], got 2.5'),
    (
      {'drift_radius': 0.2},
      'drift_radius must not be given with drift token, whose distance is a count: give refresh_d',
    ),
    (
      {'drift': 'hidden', 'drift_radius': 0.2, 'refresh_distance': 3},
      'refresh_distance must not be given with drift hidden: it counts changed tokens; give drift_radius',
    ),
    ({'drift': 'embedding'}, 'drift_radius must be given with refresh archer and drift embedding'),
    ({'decoder': 'saber', 'min_accept': 0}, r'min_accept must be an integer in \[1, 2147483647\], got 0'),
    ({'decoder': 'saber', 'min_accept': 1.5}, r'min_accept must be an integer in \[1, 2147483647\], got 1.5'),
    ({'decoder': 'saber', 'cfg_scale': 1.0}, 'cfg_scale must not be given with decoder saber: it belongs to llada'),
    (
      {'decoder': 'saber', 'eos_penalty': 1.0},
      'eos_penalty must not be given with decoder saber on a model with same_position logits, where its rule does not',
    ),
    ({'drift_radius': 1.5}, r'drift_radius must be a number in \[0, 1\], got 1.5'),
    ({'drift_radius': -0.1}, r'drift_radius must be a number in \[0, 1\], got -0.1'),
    ({'threshold': 2}, r'threshold must be a number in \[0, 1\], got 2'),
    ({'threshold': float('nan')}, 'threshold must be a number'),
    ({'gen_length': 0}, 'gen_length must be an integer in .*, got 0'),
    ({'gen_length': -3}, 'gen_length must be an integer in .*, got -3'),
    ({'gen_length': 8.0}, 'gen_length must be an integer'),
    ({'block_length': 0}, 'block_length must be an integer at least 1, got 0'),
    ({'block_length': 200}, 'block_length must be at most gen_length, got 200 and gen_length=128'),
    ({'decoder': 'llada', 'steps': 1}, 'steps must be at least the number of blocks, 2 .*, got 1'),
    ({'early_stop': 1}, 'early_stop must be true or false, got 1'),
    ({'shadow': ['self']}, 'shadow must be one of'),
    ({'seed': 2**32}, 'seed must be an integer in'),
  ],
)
def test_wrong_settings(given, message):
  with pytest.raises(ValueError, match=message):
    make_settings(CONFIG, given)


def test_certified_waits_for_its_kappa():
  settings = make_settings(CONFIG, {'decoder': 'wino', 'refresh': 'certified'})
  assert not settings.is_calibrated
  with pytest.raises(ValueError, match='kappa must be given with refresh certified, or calibrated'):
    settings.row({})
  assert settings.row({'kappa': 2.0})['kappa'] == settings.with_calibration(2.0, 0.3).row({})['kappa'] == 2.0
  given = make_settings(CONFIG, {'decoder': 'wino', 'refresh': 'certified', 'kappa': 3})
  assert given.is_calibrated and given.row({})['kappa'] == 3.0
  pooled = make_settings(CONFIG, {'decoder': 'wino', 'anchors': 3, 'on_low_margin': 'same_step'}).config(16)
  assert (pooled.anchors, pooled.on_low_margin) == (3, 'same_step')


def test_an_unknown_setting():
  with pytest.raises(TypeError, match='tresholds is no setting'):
    make_settings(CONFIG, {'tresholds': 1})


def test_rows_check_their_own_lengths():
  settings = make_settings(CONFIG, {'decoder': 'wino', 'block_length': 32})
  with pytest.raises(ValueError, match='block_length must be at most gen_length, got 32 and gen_length=16'):
    settings.row({'gen_length': 16})
  # The default block length adapts.
  assert make_settings(CONFIG, {'decoder': 'wino'}).row({'gen_length': 16})['steps'] == 16
  # One step a block is enough (and fewer are not).
  llada = make_settings(CONFIG, {'decoder': 'llada', 'gen_length': 64, 'block_length': 16, 'steps': 4})
  with pytest.raises(ValueError, match='steps must be at least the number of blocks, 4'):
    llada.row({'steps': 3})


def test_switches_are_fields_of_the_config():
  assert set(specs.switches()) <= set(DecodeConfig.__dataclass_fields__)
  cfg = make_settings(CONFIG, {'decoder': 'wino', 'logits_eos_inf': True, 'early_stop': False}).config(32)
  found = (cfg.logits_eos_inf, cfg.confidence_eos_eot_inf, cfg.early_stop, cfg.block_length)
  assert found == (True, False, False, 32)


def test_checking_settings_needs_no_jax():
  code = "import sys, archer_jax.cli; sys.exit('jax' in sys.modules)"
  assert subprocess.run([sys.executable, '-c', code], check=False).returncode == 0

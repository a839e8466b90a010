import os
from pathlib import Path
import subprocess
import sys

import pytest
from text_model import CONFIG

from archer_jax import specs
from archer_jax.engine.settings import CHOICES
from archer_jax.evaluate.setting import NUMBERS
from archer_jax.evaluate.setting import complete
from archer_jax.evaluate.setting import parse_settings

ROOT = Path(__file__).parents[2]


def given(text):
  return {setting.label: setting.given for setting in parse_settings(text)}


def test_the_grammar():
  assert given('always, archer:8,once,interval:4') == {
    'always': {'refresh': 'always'},
    'archer:8': {'refresh': 'archer', 'refresh_distance': 8},
    'once': {'refresh': 'once'},
    'interval:4': {'refresh': 'interval', 'refresh_interval': 4},
  }
  assert given('wino:0.9,llada:32,dream:32,saber:3') == {
    'wino:0.9': {'decoder': 'wino', 'threshold': 0.9},
    'llada:32': {'decoder': 'llada', 'steps': 32},
    'dream:32': {'decoder': 'dream', 'steps': 32},
    'saber:3': {'decoder': 'saber', 'min_accept': 3},
  }
  assert given('dual+decoder=parallel,dkv:4') == {
    'dual+decoder=parallel': {'reuse': 'dual', 'decoder': 'parallel'},
    'dkv:4': {'reuse': 'dkv', 'reuse_interval': 4},
  }
  label = 'archer+decoder=llada+early_stop=false+block_length=8+refresh_at_block_start=true+remasking=random'
  assert given(label)[label] == {
    'refresh': 'archer',
    'decoder': 'llada',
    'early_stop': False,
    'block_length': 8,
    'refresh_at_block_start': 1,
    'remasking': 'random',
  }


def test_every_rule_and_method_is_a_name():
  assert set(NUMBERS) == {*CHOICES['refresh'], *CHOICES['decoder'], *CHOICES['reuse']}
  for name in NUMBERS:
    parse_settings(name)


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('', ' must be settings between commas'),
    ('always,', ' must be settings between commas'),
    ('always,once, always', ' must name a setting once, got always twice'),
    (
      'allways',
      "'allways' in 'allways' is no refresh rule, decoder or reuse method; there are archer, .*certified, dream",
    ),
    ('always:3', "always in 'always:3' takes no number; archer, interval, certified, dream, llada, .*wino, .*dllm do"),
    ('archer+treshold=0.9', "'treshold' in 'archer\\+treshold=0.9' is no setting; there are decoder, reuse, ref"),
    ('archer+threshold', "'threshold' in 'archer\\+threshold' must be name=value"),
    ('archer+threshold=high', "archer\\+threshold=high: threshold must be a number in \\[0, 1\\], got 'high'"),
    ('archer+threshold=2', 'threshold must be a number in \\[0, 1\\], got 2.0'),
    ('archer+shadow=own', "shadow must be one of official, self, got 'own'"),
    ('archer+early_stop=1', "early_stop must be true or false, got '1'"),
    ('interval:', "refresh_interval must be an integer in \\[0, 2147483647\\], got ''"),
    ('interval:2.5', 'refresh_interval must be an integer'),
    ('archer:0.25', ": archer:0.25: refresh_distance must be a count of positions, such as archer:8, got '0.25'$"),
    ('archer:-1', ": archer:-1: refresh_distance must be a count of positions, such as archer:8, got '-1'$"),
    ('archer:', ": archer:: refresh_distance must be a count of positions, such as archer:8, got ''$"),
    ('archer:0.5+drift=hidden', 'refresh_distance must be a count of positions'),
    ('archer+refresh_distance=0.25', r"refresh_distance must be an integer in \[0, 2147483647\], got '0.25'"),
    ('saber:0', r'saber:0: min_accept must be an integer in \[1, 2147483647\], got 0'),
    ('saber:1.5', "saber:1.5: min_accept must be an integer in .*, got '1.5'"),
    ('archer+seed=1', 'seed in .* must be the same for all settings; give --seed'),
    ('archer+chat=true', 'chat in .* must be the same for all settings'),
    ('wino:0.9+threshold=0.8', "threshold in 'wino:0.9\\+threshold=0.8' is given twice"),
    ('wino+decoder=llada', 'decoder in .* is given twice'),
  ],
)
def test_mistakes_are_named(text, message):
  with pytest.raises(ValueError, match=f'^compare.*{message}'):
    parse_settings(text)


def completed(text, base=(), recommended=()):
  return complete(parse_settings(text), dict(base), CONFIG, dict(recommended))


def test_precedence():
  recommended = {'threshold': 0.7, 'threshold_back': 0.8, 'gen_length': 48, 'shadow': 'self'}
  base = {'threshold_back': 0.85, 'gen_length': 32, 'refresh': 'once'}
  plain, own, llada = completed('wino,archer+decoder=wino+threshold_back=0.95,llada:16', base, recommended)
  assert [s.knobs['threshold'] for s in (plain, own)] == [0.7, 0.7]
  assert [s.knobs['threshold_back'] for s in (plain, own)] == [0.85, 0.95]
  assert [s.knobs['gen_length'] for s in (plain, own, llada)] == [32] * 3
  assert [s.refresh for s in (plain, own, llada)] == ['once', 'archer', 'once']
  assert [s.decoder for s in (plain, own, llada)] == ['wino', 'wino', 'llada']
  assert llada.knobs['steps'] == 16 and plain.switches['shadow'] == 'self'
  # A setting that says less takes the defaults.
  archer, hidden = completed('archer,archer+drift=hidden+drift_radius=0.2')
  assert (archer.knobs['refresh_distance'], archer.knobs['drift_radius']) == (
    specs.load('decoders', 'wino').spec.refresh_distance,
    0,
  )
  assert (hidden.knobs['refresh_distance'], hidden.knobs['drift_radius']) == (0, 0.2)


def test_the_base_is_for_the_settings_that_read_it():
  always, archer, llada = completed(
    'always+decoder=wino,archer+decoder=wino,llada', {'refresh_distance': 5, 'threshold': 0.9}
  )
  assert archer.knobs['refresh_distance'] == 5 and always.knobs['refresh_interval'] == 1
  assert archer.knobs['threshold'] == 0.9 and llada.decoder == 'llada'


@pytest.mark.parametrize(
  ('text', 'base', 'message'),
  [
    ('always,once', {'refresh_distance': 5}, '^refresh_distance must not be given with refresh always: it belongs to'),
    ('archer', {'drift_radius': 0.5}, '^drift_radius must not be given with drift token, whose distance is a count'),
    (
      'archer:4+drift=hidden',
      {},
      'archer:4.drift=hidden: refresh_distance must not be given with drift hidden: it counts',
    ),
    ('archer+drift=hidden', {}, 'drift=hidden: drift_radius must be given with refresh archer and drift hidden'),
    ('saber+cfg_scale=1', {}, 'cfg_scale must not be given with decoder saber: it belongs to llada'),
    (
      'saber+eos_penalty=1',
      {},
      'eos_penalty must not be given with decoder saber on a model with same_position logits',
    ),
    ('wino', {'steps': 4}, '^steps must not be given with decoder wino'),
    ('wino:0.9,wino:0.8', {'threshold': 0.7}, '^threshold must not be given: every setting of compare has its own'),
    ('always,once', {'refresh': 'archer'}, '^refresh must not be given: every setting of compare has its own'),
    ('always+refresh_distance=5', {}, r'^compare: always\+refresh_distance=5: refresh_distance must not be given with'),
    ('always,interval', {}, '^compare: interval: refresh_interval must be given with refresh interval'),
    ('dream', {}, '^compare: dream: decoder must be llada.* or wino for a model with same_position logits'),
    ('always', {'block_length': 64, 'gen_length': 32}, 'block_length must be at most gen_length, got 64'),
    ('llada:2', {'block_length': 8, 'gen_length': 32}, 'steps must be at least the number of blocks, 4'),
  ],
)
def test_what_does_not_go_together(text, base, message):
  with pytest.raises(ValueError, match=message):
    completed(text, base)


def test_the_command_imports_no_jax_before_its_flags_are_right():
  code = 'import sys, archer_jax.evaluate.__main__; assert "jax" not in sys.modules and "matplotlib" not in sys.modules'
  subprocess.run([sys.executable, '-c', code], check=True, env={**os.environ, 'PYTHONPATH': str(ROOT)})

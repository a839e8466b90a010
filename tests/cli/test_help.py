"""The help, and that it is true."""

import time

from absl import flags
from cli_files import process
import pytest

from archer_jax import specs
from archer_jax.cli import command as cli
from archer_jax.config import DTYPES
from archer_jax.engine.settings import SETTINGS


def test_help_is_quick_grouped_and_complete(tmp_path):
  start = time.perf_counter()
  with process('--help', cwd=tmp_path) as child:
    out, err = child.communicate(timeout=60)
  assert child.returncode == 0 and err == ''
  # On a machine that is busy with something else too; alone it takes 0.3 s.
  assert time.perf_counter() - start < 2
  for group in (
    'What to decode:',
    'Where to:',
    'Decoder:',
    'When the prompt is recomputed:',
    'Run:',
    'Many processes:',
  ):
    assert group in out.splitlines()
  design = """checkpoint prompt input output chat stop logprobs decoder
    gen_length block_length steps threshold threshold_back
    max_accept shadow temperature top_p top_k cfg_scale remasking alg alg_temp early_stop refresh refresh_interval
    refresh_at_block_start refresh_distance drift drift_radius min_margin max_age kappa quantile on_low_margin
    reuse min_accept eos_penalty factor
    reuse_interval dkv_shift window prompt_interval response_interval transfer_ratio
    anchors mask_prediction batch_size mesh dtype seed trace
    watch report
    stats config logits_eos_inf confidence_eos_eot_inf resume profile coordinator num_processes process_id
    start_timeout"""
  shown = {line.split()[0].replace('[no]', '') for line in out.splitlines() if line.startswith('  --')}
  assert shown == {f'--{name}' for name in design.split()}
  assert 'this (default: 0.9 for parallel,' in out
  assert max(map(len, out.splitlines())) <= 110


@pytest.mark.parametrize('flag', ['--help', '-help', '--helpfull', '--helpshort'])
def test_every_way_to_ask_for_help(cli_main, flag):
  code, out, _ = cli_main('--gen_length=0', flag)
  assert code == 0 and '--max_accept' in out


def test_flags_are_those_of_the_tables():
  values = flags.FlagValues()
  cli.define_flags(values)
  assert set(SETTINGS) <= set(values)
  for name, switch in specs.switches().items():
    if switch.choices:
      assert tuple(values[name].parser.enum_values) == switch.choices
  assert tuple(values['dtype'].parser.enum_values) == DTYPES
  # What --help says is the default is the default.
  for name, spec in specs.knobs().items():
    # Each rule or decoder has a number of its own, or takes that of the checkpoint.
    if name not in ('refresh_distance', 'kappa', 'threshold'):
      assert values[name].default == spec.default

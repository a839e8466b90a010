"""The comparison of two versions asks for what this version takes."""

import functools
import json
from pathlib import Path
import runpy

from absl import flags
import pytest

from archer_jax.calibration.file import calibrated
from archer_jax.checkpoints.manifest import BUNDLED
from archer_jax.checkpoints.manifest import read_manifest
from archer_jax.checkpoints.text import load_tokenizer
from archer_jax.cli import command
from archer_jax.engine.requests import make_request
from archer_jax.engine.settings import make_settings
from archer_jax.families import config_from_hf
from archer_jax.flags import read_flags

ROOT = Path(__file__).parents[2]
GOLDENS = ROOT / 'tests' / 'goldens'


@pytest.fixture(scope='module')
def tool():
  with pytest.MonkeyPatch.context() as patch:
    # Its flags are its own, whatever other tools this process has loaded.
    for kind in ('DEFINE_string', 'DEFINE_float'):
      patch.setattr(flags, kind, functools.partial(getattr(flags, kind), flag_values=flags.FlagValues()))
    return runpy.run_path(str(ROOT / 'tools' / 'compare_versions.py'))


@pytest.mark.parametrize('checkpoint', ['bundled', 'llada_tiny', 'dream_tiny'])
def test_every_case_is_taken(tool, checkpoint):
  if checkpoint == 'bundled':
    manifest = read_manifest()
    model, tokenizer = manifest.config, load_tokenizer(BUNDLED / 'tokenizer', manifest.config)
  else:
    model, tokenizer = config_from_hf(json.loads((GOLDENS / checkpoint / 'config.json').read_text())), None
  records = tool['inputs'](checkpoint, GOLDENS)
  cases = [case for case in tool['cases']() if case.checkpoint == checkpoint]
  assert len(cases) > 20
  for case in cases:
    _, given = read_flags(['run_decode.py', *tool['_flags'](case.settings)], command.define_flags)
    settings = make_settings(model, given)
    if not settings.is_calibrated:
      settings = calibrated(settings, None, manifest, 'float32')
    for index, record in enumerate(records[case.records]):
      make_request(record, index, settings, tokenizer)

import dataclasses

import jax
import numpy as np
import pytest
from text_model import CONFIG

from archer_jax import specs
from archer_jax.config import SHIFTED
from archer_jax.engine import batching
from archer_jax.engine.requests import make_request
from archer_jax.engine.settings import make_settings
from archer_jax.types import Status


def requests(settings, *records):
  return [make_request(record, index, settings, None) for index, record in enumerate(records)]


def config(settings, made, *, trace=False):
  return batching.batch_config(made, settings, dtype='float32', end_ids=(1,), trace=trace)


def test_buckets():
  for table in (batching.PROMPT_LENGTHS, batching.CANVAS_LENGTHS):
    assert list(table) == sorted(set(table))
    for length in (0, 1, 15, 16, 17, 200, table[-1]):
      fitting = batching.bucket('prompt', length, table)
      assert fitting >= length
      assert fitting == table[0] or not [other for other in table if length <= other < fitting]
  with pytest.raises(ValueError, match='the length of prompt must be at most 131072, got 131073'):
    batching.bucket('prompt', 131073, batching.PROMPT_LENGTHS)


def test_past_the_largest_bucket_a_record_is_refused(monkeypatch):
  settings = make_settings(CONFIG, {'decoder': 'wino', 'gen_length': 16})
  monkeypatch.setattr('archer_jax.engine.requests.PROMPT_LENGTHS', (16, 24))
  # The model's maximum is no multiple of the table's steps.
  assert requests(settings, {'prompt_ids': [3] * 24})
  with pytest.raises(ValueError, match='the length of prompt_ids must be at most 24, got 25'):
    requests(settings, {'prompt_ids': [3] * 25})
  monkeypatch.setattr('archer_jax.engine.requests.CANVAS_LENGTHS', (8,))
  with pytest.raises(ValueError, match='the length of gen_length must be at most 8, got 16'):
    requests(settings, {'prompt_ids': [3]})


def test_prompts_stand_on_the_right_and_filler_is_done():
  settings = make_settings(CONFIG, {'decoder': 'wino', 'gen_length': 16})
  made = requests(settings, {'prompt_ids': [5, 6, 7]}, {'prompt_ids': [8] * 20, 'gen_length': 4, 'threshold': 0.5})
  cfg = config(settings, made)
  state = batching.batch_state(made, [11, 2**32 - 1], 4, cfg=cfg)
  assert (cfg.canvas_length, cfg.block_length, state.prompt_tokens.shape) == (16, 16, (4, 32))
  tokens, valid = np.asarray(state.prompt_tokens), np.asarray(state.prompt_valid)
  assert tokens[0, -3:].tolist() == [5, 6, 7]
  assert valid.sum(axis=1).tolist() == [3, 20, 0, 0]
  assert valid[0, -3:].all() and valid[1, -20:].all()
  assert np.asarray(state.gen_length).tolist() == [16, 4, 0, 0]
  assert np.asarray(state.seed).tolist() == [11, 2**32 - 1, 0, 0]
  np.testing.assert_allclose(state.knobs.threshold[:2], [0.6, 0.5])
  assert np.asarray(state.done).tolist() == [False, False, True, True]
  assert np.asarray(state.status)[2:].tolist() == [Status.EMPTY] * 2


@pytest.mark.parametrize(
  ('decoder', 'reuse'),
  [
    *((decoder, 'prompt') for decoder in specs.names(specs.DECODERS)),
    *(('llada', reuse) for reuse in specs.names(specs.REUSE) if reuse not in ('prompt', 'dkv_prefill')),
    ('dream', 'dkv_prefill'),
  ],
)
def test_lengths_of_a_bucket_are_one_program(decoder, reuse):
  shifted = {'family': 'dream', 'logit_alignment': SHIFTED} if decoder == 'dream' else {}
  model = dataclasses.replace(CONFIG, **shifted)
  given = {'decoder': decoder, 'reuse': reuse} | ({'remasking': 'random'} if reuse == 'dkv_greedy' else {})
  configs = set()
  for length in (17, 18, 25, 32):
    # As a setting of the run, and as a number of a request.
    settings = make_settings(model, {**given, 'gen_length': length})
    configs.add(config(settings, requests(settings, {'prompt_ids': [3]})))
    others = make_settings(model, given)
    configs.add(config(others, requests(others, {'prompt_ids': [3], 'gen_length': length})))
  assert len(configs) == 1 and configs.pop().canvas_length == 32


def test_block_length_is_that_of_the_run_whatever_the_batch():
  settings = make_settings(CONFIG, {'decoder': 'wino', 'gen_length': 100})
  assert settings.block_length == 64
  long = config(settings, requests(settings, {'prompt_ids': [3]}))
  short = config(settings, requests(settings, {'prompt_ids': [3], 'gen_length': 20}))
  assert (long.canvas_length, long.block_length) == (128, 64)
  # One short block either way.
  assert (short.canvas_length, short.block_length) == (32, 32)


def test_guidance_rides_along_only_where_somebody_asks():
  settings = make_settings(CONFIG, {'decoder': 'llada', 'gen_length': 16})
  assert not config(settings, requests(settings, {'prompt_ids': [3]})).guidance
  assert config(settings, requests(settings, {'prompt_ids': [3]}, {'prompt_ids': [3], 'cfg_scale': 0.5})).guidance
  always = make_settings(CONFIG, {'decoder': 'llada', 'gen_length': 16, 'cfg_scale': 1.0})
  assert config(always, requests(always, {'prompt_ids': [3], 'cfg_scale': 0})).guidance


def test_traces_have_few_lengths():
  settings = make_settings(CONFIG, {'decoder': 'llada', 'gen_length': 128})
  steps = [
    config(settings, requests(settings, {'prompt_ids': [3], 'steps': count}), trace=True).trace_steps
    for count in (2, 32, 33, 100, 128, 1000)
  ]
  # A row of 128 tokens takes no more steps than that.
  assert steps == [32, 32, 64, 128, 128, 128]
  assert config(settings, requests(settings, {'prompt_ids': [3]})).trace_steps == 0


def test_seeds_of_rows():
  expected = int(jax.random.bits(jax.random.fold_in(jax.random.key(3), 5)))
  assert batching.row_seed(3, 5) == expected
  seeds = {batching.row_seed(seed, index) for seed in range(4) for index in range(50)}
  assert len(seeds) == 200
  assert all(0 <= seed < 2**32 for seed in seeds)

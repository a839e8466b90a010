"""Ids that stand for no text are never written, by any decoder, but keep their share of every probability."""

import numpy as np
import pytest
from stub import DECODERS
from stub import EOS
from stub import make_config
from stub import make_state
from stub import peaked
from stub import play

from archer_jax import numerics
from archer_jax.decoders import base

G = 8
# A hole and what is past the tokenizer's end.
UNKNOWN = ((3, 4), (7, 9))


@pytest.mark.parametrize('temperature', [0.0, 1.0])
@pytest.mark.parametrize(
  ('decoder', 'fields'),
  [
    *DECODERS,
    *(('dream', {'alg': alg}) for alg in ('origin', 'maskgit_plus', 'topk_margin', 'entropy')),
  ],
)
def test_no_decoder_writes_them(decoder, fields, temperature):
  cfg = make_config(decoder, G, unknown_ids=UNKNOWN, **fields)
  logits = peaked([3, 7, 8] * 2 + [3, 7], 30.0)
  last = play(make_state(cfg, temperature=temperature), cfg, logits, logits)[-1]
  written = set(np.asarray(last.canvas)[0].tolist())
  assert not written & {3, 7, 8} and cfg.model.mask_id not in written
  bare = play(make_state(make_config(decoder, G, **fields)), make_config(decoder, G, **fields), logits, logits)[-1]
  assert set(np.asarray(bare.canvas)[0].tolist()) == {3, 7, 8}


def test_they_stay_in_the_softmax():
  cfg = make_config('llada', G, unknown_ids=UNKNOWN)
  logits = np.zeros((1, G, 12), np.float32)
  logits[..., 3], logits[..., EOS] = 5.0, 1.0
  state = make_state(cfg)
  chosen = base.candidates(state, base.all_columns(state), logits, cfg)
  assert np.asarray(chosen.token).tolist() == [[EOS] * G]
  np.testing.assert_array_equal(chosen.confidence, numerics.log_odds(logits, chosen.token))
  assert float(chosen.confidence[0, 0]) < -3

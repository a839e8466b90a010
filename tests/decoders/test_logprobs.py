"""Log-probabilities of tokens and the steps that committed them, of every decoder, with hand-made logits."""

import jax
import numpy as np
import pytest
from stub import DECODERS
from stub import MASK
from stub import VOCAB
from stub import make_config
from stub import make_state
from stub import play

G = 8


@pytest.mark.parametrize('temperature', [0.0, 1.0])
@pytest.mark.parametrize(
  ('decoder', 'fields'),
  [
    *DECODERS,
    *(('dream', {'alg': alg}) for alg in ('origin', 'maskgit_plus')),
  ],
)
def test_they_are_those_of_a_step_that_read_the_token(decoder, fields, temperature):
  cfg = make_config(decoder, G, logprobs=True, **fields)
  logits = np.random.default_rng(0).normal(size=(G, G, VOCAB)).astype(np.float32) * 4
  states = play(make_state(cfg, temperature=temperature), cfg, logits, logits[::-1])
  canvas = np.stack([state.canvas[0] for state in states])
  logprobs, commits = (states[-1].logprobs[name][0] for name in ('token_logprobs', 'commit_steps'))
  # Of step n, which is that of the last one from there on.
  table = np.asarray(jax.nn.log_softmax(logits))[np.minimum(np.arange(len(states) - 1), G - 1)]
  for column, (token, commit) in enumerate(zip(canvas[-1], commits, strict=True)):
    assert token != MASK and (canvas[commit + 1 :, column] == token).all()
    # A mask before; saber and wino may also write another token over one.
    assert canvas[commit, column] != token
    found = np.isclose(table[:, column, token], logprobs[column], atol=1e-5)
    assert found[commit:].any()
    if decoder in ('llada', 'parallel', 'dream'):
      # They read a token for the last time as they commit it.
      assert found[commit]

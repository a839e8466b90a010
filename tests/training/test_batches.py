"""Layout of training batches."""

import numpy as np
import pytest

from archer_jax.training.batches import Pair
from archer_jax.training.batches import make_batch


def test_prompts_are_left_padded_and_answers_go_on_with_eos(model):
  batch = make_batch([Pair([5, 6], [7]), Pair([5, 6, 8, 9], [4, 3, 7])], 4, 3, model)
  pad, eos = model.pad_id, model.eos_id
  np.testing.assert_array_equal(batch.prompt, [[pad, pad, 5, 6], [5, 6, 8, 9]])
  np.testing.assert_array_equal(batch.prompt_valid, [[False, False, True, True], [True] * 4])
  np.testing.assert_array_equal(batch.answer, [[7, eos, eos], [4, 3, 7]])
  assert batch.prompt.dtype == batch.answer.dtype == np.int32


@pytest.mark.parametrize(
  ('pair', 'message'),
  [
    (Pair([5] * 5, [7]), 'prompt must have at most prompt_length=4 tokens, got 5'),
    (Pair([5], [7] * 4), 'answer must have 1 to answer_length=3 tokens, got 4'),
    (Pair([5], []), 'answer must have 1 to answer_length=3 tokens, got 0'),
    (Pair([15], [7]), 'must not hold mask_id=15'),
    (Pair([5], [15]), 'must not hold mask_id=15'),
  ],
)
def test_what_does_not_fit_is_refused(model, pair, message):
  with pytest.raises(ValueError, match=message):
    make_batch([pair], 4, 3, model)

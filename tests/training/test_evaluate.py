"""Greedy filling against a plain Python loop, and the batching of texts."""

import jax
import numpy as np
from programs import QUICK

from archer_jax.model import init_params
from archer_jax.training import evaluate
from archer_jax.training.batches import pad_prompts
from archer_jax.training.evaluate import answer_prompts
from archer_jax.training.loss import canvas_logits

jitted_logits = jax.jit(canvas_logits, static_argnames='config', compiler_options=QUICK)


def random_params(model):
  return jax.tree.map(lambda x: 8 * np.asarray(x), init_params(model, jax.random.key(0)))


def test_greedy_fill_equals_a_plain_loop(model):
  params = random_params(model)
  # Raising the mask token's column makes it the favourite, which must not be taken.
  params['head']['kernel'][:, model.mask_id] *= 2
  prompt, valid = pad_prompts([[3, 4, 5, 6], [7, 8], []], 4, model.pad_id)
  filled = np.asarray(evaluate.greedy_fill(params, prompt, valid, canvas_length=5, config=model))
  canvas = np.full((3, 5), model.mask_id, np.int32)
  favourites = 0
  for _ in range(5):
    logits = np.asarray(jitted_logits(params, prompt, valid, canvas, config=model), np.float64)
    p = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    for row in range(3):
      masks = np.flatnonzero(canvas[row] == model.mask_id)
      favourites += (logits[row, masks].argmax(axis=-1) == model.mask_id).sum()
      best = np.delete(p[row], model.mask_id, axis=-1)  # the mask id is the last one
      position = masks[best[masks].max(axis=-1).argmax()]
      canvas[row, position] = best[position].argmax()
  assert favourites
  np.testing.assert_array_equal(filled, canvas)


def test_answers_do_not_depend_on_the_batch(model):
  params = random_params(model)
  prompts = ['345', '6', '78', '9345', '44']
  arguments = {
    'encode': lambda text: [int(digit) for digit in text],
    'decode': lambda ids: '.'.join(map(str, ids)),
    'prompt_length': 4,
    'answer_length': 3,
    'config': model,
  }
  together = answer_prompts(params, prompts, **arguments, batch_size=8)
  assert answer_prompts(params, prompts, **arguments, batch_size=2) == together
  assert len(set(together)) > 1


def test_answers_end_before_the_end_token(model):
  # A head that knows only one token writes it everywhere.
  params = jax.tree.map(np.zeros_like, random_params(model))
  params['final_norm']['scale'] += 1
  params['embedding'][:, 0] = 1
  arguments = {'encode': lambda text: [3], 'decode': list, 'prompt_length': 1, 'answer_length': 3, 'config': model}
  params['head']['kernel'][0, 7] = 1
  assert answer_prompts(params, ['a'], **arguments) == [[7, 7, 7]]
  params['head']['kernel'][0, model.eos_id] = 2
  assert answer_prompts(params, ['a'], **arguments) == [[]]

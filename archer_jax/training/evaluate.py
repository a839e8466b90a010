"""Plain decoding for the exact match that training reports: no cache, no rollback, one token a step.

Axes: B batch, P prompt, G canvas.
"""

from collections.abc import Callable
from collections.abc import Sequence
import functools

import jax
from jax import Array
import jax.numpy as jnp

from archer_jax.config import ModelConfig
from archer_jax.numerics import best_token
from archer_jax.numerics import log_odds
from archer_jax.training.batches import pad_prompts
from archer_jax.training.loss import canvas_logits


@functools.partial(jax.jit, static_argnames=('canvas_length', 'config'))
def greedy_fill(params: dict, prompt: Array, prompt_valid: Array, *, canvas_length: int, config: ModelConfig) -> Array:
  """Fills a canvas in G steps, each writing the best token at the position that is surest of it.

  Args:
    params: the model's parameters.
    prompt: int32 [B, P], left-padded.
    prompt_valid: bool [B, P], False at padding.
    canvas_length: G.
    config: the model's config.

  Returns:
    int32 [B, G] without mask tokens.
  """
  columns = jnp.arange(canvas_length)

  def step(_, canvas):
    logits = canvas_logits(params, prompt, prompt_valid, canvas, config=config)
    # The confidence is that of the full softmax, although the mask token is no candidate.
    token, _ = best_token(logits.at[:, :, config.mask_id].set(-jnp.inf))
    surest = jnp.argmax(jnp.where(canvas == config.mask_id, log_odds(logits, token), -jnp.inf), axis=1)
    return jnp.where(columns == surest[:, None], token, canvas)

  canvas = jnp.full((prompt.shape[0], canvas_length), config.mask_id, jnp.int32)
  return jax.lax.fori_loop(0, canvas_length, step, canvas)


def answer_prompts(
  params: dict,
  prompts: Sequence[str],
  *,
  encode: Callable[[str], list[int]],
  decode: Callable[[list[int]], str],
  prompt_length: int,
  answer_length: int,
  config: ModelConfig,
  batch_size: int = 64,
) -> list[str]:
  """Answers texts with `greedy_fill`, the text of each up to its first end token.

  Args:
    params: the model's parameters.
    prompts: texts.
    encode: text to token ids.
    decode: token ids to text.
    prompt_length: P that all prompts are padded to.
    answer_length: G.
    config: the model's config.
    batch_size: rows decoded together; the last batch is filled up, so that one program serves all.

  Returns:
    One text per prompt, in order.
  """
  answers = []
  for start in range(0, len(prompts), batch_size):
    rows = [encode(prompt) for prompt in prompts[start : start + batch_size]]
    filler = [rows[-1]] * (batch_size - len(rows))
    tokens, valid = pad_prompts(rows + filler, prompt_length, config.pad_id)
    canvas = jax.device_get(greedy_fill(params, tokens, valid, canvas_length=answer_length, config=config))
    for ids in canvas[: len(rows)].tolist():
      answers.append(decode(ids[: ids.index(config.eos_id)] if config.eos_id in ids else ids))
  return answers

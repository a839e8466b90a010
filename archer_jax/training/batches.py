"""Batches of prompts and answers with fixed shapes.

Axes: B batch, P prompt, G canvas.
"""

import dataclasses
from typing import NamedTuple

import jax
from jax import Array
import numpy as np

from archer_jax.config import ModelConfig


class Pair(NamedTuple):
  """Token ids of one training example."""

  prompt: list[int]
  answer: list[int]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
  """B examples laid out as the decoder lays out its rows."""

  prompt: Array | np.ndarray  # int32 [B, P], left-padded
  prompt_valid: Array | np.ndarray  # bool [B, P], False at padding
  answer: Array | np.ndarray  # int32 [B, G], filled up with eos


def pad_prompts(prompts: list[list[int]], length: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
  """Left-pads prompts, so that every answer begins at the same column and at the next position of its prompt.

  Args:
    prompts: token ids of each row.
    length: P, at least the longest prompt.
    pad_id: id that fills up.

  Returns:
    int32 [B, P] tokens and bool [B, P], False at padding.

  Raises:
    ValueError: a prompt is longer than `length`.
  """
  tokens = np.full((len(prompts), length), pad_id, np.int32)
  valid = np.zeros((len(prompts), length), bool)
  for row, prompt in enumerate(prompts):
    if len(prompt) > length:
      raise ValueError(f'prompt must have at most prompt_length={length} tokens, got {len(prompt)}')
    start = length - len(prompt)
    tokens[row, start:] = prompt
    valid[row, start:] = True
  return tokens, valid


def make_batch(pairs: list[Pair], prompt_length: int, answer_length: int, model: ModelConfig) -> Batch:
  """Lays out pairs; an answer shorter than `answer_length` goes on with eos (LLaDA, arXiv 2502.09992, section 2.3).

  Raises:
    ValueError: a prompt or an answer is too long, an answer is empty, or a mask id stands in either.
  """
  prompt, prompt_valid = pad_prompts([pair.prompt for pair in pairs], prompt_length, model.pad_id)
  answer = np.full((len(pairs), answer_length), model.eos_id, np.int32)
  for row, pair in enumerate(pairs):
    if not 1 <= len(pair.answer) <= answer_length:
      raise ValueError(f'answer must have 1 to answer_length={answer_length} tokens, got {len(pair.answer)}')
    if model.mask_id in pair.prompt or model.mask_id in pair.answer:
      raise ValueError(f'prompt and answer must not hold mask_id={model.mask_id}, got {pair}')
    answer[row, : len(pair.answer)] = pair.answer
  return Batch(prompt=prompt, prompt_valid=prompt_valid, answer=answer)

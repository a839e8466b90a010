"""From requests to the arrays of one batch: tables of lengths, padding, filler rows, seeds.

Axes: B batch, P prompt.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from archer_jax.config import DecodeConfig
from archer_jax.engine.settings import Settings
from archer_jax.loop.decode import step_limit
from archer_jax.loop.step import init_state
from archer_jax.numerics import PRNG
from archer_jax.types import DecodeState
from archer_jax.types import Knobs

if TYPE_CHECKING:
  from archer_jax.engine.requests import Request

# A program is compiled per pair of lengths. Steps of a third to a half bound what padding can cost.
_LONG = (1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152, 65536, 98304, 131072)
PROMPT_LENGTHS = (16, 32, 64, 128, 192, 256, 384, 512, 768, *_LONG)
CANVAS_LENGTHS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, *_LONG)


def bucket(name: str, length: int, table: Sequence[int]) -> int:
  """The smallest length of `table` that is not below `length`; past the largest it raises ValueError."""
  for fitting in table:
    if length <= fitting:
      return fitting
  raise ValueError(f'the length of {name} must be at most {table[-1]}, got {length}')


def row_seed(seed: int, index: int) -> int:
  """The seed in [0, 2^32) of the request at an input index, under a run's seed."""
  return int(jax.random.bits(jax.random.fold_in(jax.random.key(seed, impl=PRNG), index)))


def batch_config(
  requests: Sequence['Request'], settings: Settings, *, dtype: str, trace: bool, **others: Any
) -> DecodeConfig:
  """The config of the program that decodes these requests; `others` are fields that no setting gives."""
  length = bucket('gen_length', max(request.knobs['gen_length'] for request in requests), CANVAS_LENGTHS)
  scales = [settings.knobs['cfg_scale'], *(request.knobs['cfg_scale'] for request in requests)]
  fixed = {**others, 'dtype': dtype, 'guidance': settings.methods.spec.guidance and max(scales) > 0}
  cfg = settings.config(length, **fixed)
  if trace:
    steps = step_limit(Knobs.stack([request.knobs for request in requests]), cfg)
    # Powers of two from 32 on, so that few lengths make few programs.
    cfg = settings.config(length, **fixed, trace_steps=max(32, 1 << (steps - 1).bit_length()))
  return cfg


def batch_state(requests: Sequence['Request'], seeds: Sequence[int], n_rows: int, *, cfg: DecodeConfig) -> DecodeState:
  """The state before the first step of `n_rows` rows: the requests, and filler rows of which nothing is asked.

  Args:
    requests: at most `n_rows`.
    seeds: one per request.
    n_rows: B. Keeping it while requests run out keeps the program.
    cfg: from `batch_config`.
  """
  length = bucket('prompt', max(len(request.prompt_ids) for request in requests), PROMPT_LENGTHS)
  tokens = np.zeros((n_rows, length), np.int32)
  valid = np.zeros((n_rows, length), bool)
  for row, request in enumerate(requests):
    start = length - len(request.prompt_ids)
    tokens[row, start:] = request.prompt_ids
    valid[row, start:] = True
  n_filler = n_rows - len(requests)
  knobs = Knobs.stack([request.knobs for request in requests] + [{'gen_length': 0, 'steps': 1}] * n_filler)
  seeds = np.array([*seeds, *[0] * n_filler], np.uint32)
  return init_state(jnp.asarray(tokens), jnp.asarray(valid), knobs, seeds, cfg=cfg)

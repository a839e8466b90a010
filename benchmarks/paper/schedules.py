"""Decoding with refreshes at chosen steps and at no other.

Axes: B batch, S steps.
"""

import functools

import jax
from jax import Array
from jax import lax
import jax.numpy as jnp
import numpy as np
from trajectory import at_times

from archer_jax.config import DecodeConfig
from archer_jax.loop.step import decode_step
from archer_jax.types import DecodeState

EVEN, RANDOM = 'even', 'random'


@functools.partial(jax.jit, static_argnames='cfg', donate_argnames='state')
def scheduled_decode(params, state: DecodeState, schedule: Array, *, cfg: DecodeConfig) -> DecodeState:
  """`archer_jax.decode` with refreshes at the steps that a schedule, bool [B, S], names, and at no other."""
  step = lambda s: decode_step(params, at_times(s, schedule), cfg=cfg)[0]
  return lax.while_loop(lambda s: jnp.any(~s.done), step, state)


def schedules(kind: str, steps: np.ndarray, refreshes: np.ndarray, length: int, first: int = 0) -> np.ndarray:
  """Bool [B, length]: as many steps of each row as it refreshed, of those it took.

  The first step is always among them, since there is nothing kept yet.

  Args:
    kind: `EVEN` or `RANDOM`.
    steps: int [B] that each row took.
    refreshes: int [B], at least 1 where steps is.
    length: the longest that any row may take.
    first: number of the first row in its task, which names the random draws.
  """
  schedule = np.zeros((len(steps), length), bool)
  for row, (taken, count) in enumerate(zip(steps.tolist(), refreshes.tolist(), strict=True)):
    if kind == EVEN:
      times = np.arange(count) * taken // max(count, 1)
    else:
      rng = np.random.default_rng(first + row)
      times = np.r_[0, 1 + rng.permutation(max(taken - 1, 0))[: max(count - 1, 0)]]
    schedule[row, times] = count > 0
  return schedule

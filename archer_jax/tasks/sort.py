"""Sorting two-digit numbers: `sort: 45 12 33` is answered by `12 33 45`.

Every number's place follows from all the others, so the whole answer can be written at once by a model that counts,
and tentative numbers say something about their neighbours.
"""

import numpy as np

from archer_jax.tasks import Problem
from archer_jax.tasks import plain

WORKED_EXAMPLES = 1
# 28 numbers, the spaces between them and an end token.
GEN_LENGTH = 56

MIN_COUNT, MAX_COUNT = 24, 28
_EASIEST_COUNT = 1


def make_problem(rng: np.random.Generator, level: float) -> Problem:
  """MIN_COUNT to MAX_COUNT numbers from 10 to 99, equal ones allowed, fewer at a lower level; difficulty is the count.

  Args:
    rng: source of randomness.
    level: in (0, 1].
  """
  scaled = lambda count: _EASIEST_COUNT + round(level * (count - _EASIEST_COUNT))
  count = int(rng.integers(scaled(MIN_COUNT), scaled(MAX_COUNT) + 1))
  numbers = rng.integers(10, 100, count).tolist()
  text = lambda row: ' '.join(map(str, row))
  return Problem(prompt=f'sort: {text(numbers)}\n', answer=text(sorted(numbers)), difficulty=count)


def is_solved(problem: Problem, answer: str) -> bool:
  """Whether the answer is the sorted numbers, as there is only one."""
  return plain(answer) == problem.answer

"""A question to a table: look up names, and give their numbers and colours.

    table:
    apple red 45
    pear blue 12
    ...
    find:
    pear ??
    fig ??

is answered by the lines of the question filled in, `pear 12 blue`. All that decides stands in the prompt, far from
where it is needed.
"""

import numpy as np

from archer_jax.tasks import Problem
from archer_jax.tasks import plain

WORKED_EXAMPLES = 1
# 10 lines of five tokens, the last newline an end token.
GEN_LENGTH = 50

COLORS = ('red', 'blue', 'green', 'gray')
# fmt: off
NAMES = (
  'apple', 'pear', 'plum', 'fig', 'lime', 'kiwi', 'grape', 'peach', 'mango', 'melon', 'olive', 'date', 'lemon',
  'cherry', 'guava', 'papaya', 'quince', 'nut', 'corn', 'rice', 'oat', 'rye', 'bean', 'pea', 'leek', 'onion', 'garlic',
  'carrot', 'radish', 'turnip', 'beet', 'kale', 'chard', 'cress', 'basil', 'mint', 'thyme', 'sage', 'dill', 'chive',
)
# fmt: on
ROWS = 16
ASKED_SHARE = 0.6
_FEWEST_ROWS = 1


def make_problem(rng: np.random.Generator, level: float) -> Problem:
  """A table of ROWS rows and a question for ASKED_SHARE of them, fewer rows at a lower level.

  Names are unique in a table, so that there is one answer; numbers have two digits.

  Args:
    rng: source of randomness.
    level: in (0, 1].

  Returns:
    The problem; its difficulty is the number of rows.
  """
  count = _FEWEST_ROWS + round(level * (ROWS - _FEWEST_ROWS))
  names = [NAMES[i] for i in rng.permutation(len(NAMES))[:count]]
  colors = [COLORS[i] for i in rng.integers(len(COLORS), size=count)]
  numbers = rng.integers(10, 100, count).tolist()
  asked = rng.permutation(count)[: max(1, round(ASKED_SHARE * count))].tolist()
  rows = ''.join(f'{name} {color} {number}\n' for name, color, number in zip(names, colors, numbers, strict=True))
  question = ''.join(f'{names[i]} ??\n' for i in asked)
  return Problem(
    prompt=f'table:\n{rows}find:\n{question}',
    answer='\n'.join(f'{names[i]} {numbers[i]} {colors[i]}' for i in asked),
    difficulty=count,
  )


def is_solved(problem: Problem, answer: str) -> bool:
  """Whether the answer is the one list of rows."""
  return plain(answer) == problem.answer

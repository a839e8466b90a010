"""A short Python function from a description of its lines and two examples of what it returns.

    pipeline:
    b: add 3 to a
    c: keep b above 40
    d: reverse c
    solve([12, 45, 78, 30]) == [81, 48]
    solve([3, 90, 41, 7]) == [44, 93]
    code:

is answered by

    def solve(a):
        b = [v + 3 for v in a]
        c = list(filter(lambda v: v > 40, b))
        d = c[::-1]
        return d

Every line can be written in two styles of equally many tokens, and both are right: a comprehension or map and filter, a
slice or reversed. Tokens of the two that are committed at the same time are right alone and wrong together.
"""

from collections.abc import Callable
import dataclasses

import numpy as np

from archer_jax.tasks import Problem
from archer_jax.tasks.sandbox import run_python

WORKED_EXAMPLES = 1
# Five lines of at most 15 tokens, the function's head and return, and an end token.
GEN_LENGTH = 84

MIN_LINES, MAX_LINES = 3, 5
# Results of four digits and more would make prompts of no known length.
INPUT_LENGTH, MAX_INPUT, MAX_RESULT = 4, 99, 999
SHOWN_TESTS, HIDDEN_TESTS = 2, 8


@dataclasses.dataclass(frozen=True)
class Operation:
  """One kind of line; in the texts {n} is its number and {x} the list that it reads.

  Attributes:
    text: the description.
    styles: right-hand sides, all of the same number of tokens.
    apply: what it does to a list.
    numbers: range of {n}, last included; None if it has no number.
  """

  text: str
  styles: tuple[str, str]
  apply: Callable[[list[int], int], list[int]]
  numbers: tuple[int, int] | None = None


def _each(text: str, expression: str, value: Callable[[int, int], int], numbers: tuple[int, int]) -> Operation:
  styles = (f'[{expression} for v in {{x}}]', f'list(map(lambda v: {expression}, {{x}}))')
  return Operation(text, styles, lambda row, n: [value(v, n) for v in row], numbers)


def _keep(text: str, condition: str, holds: Callable[[int, int], bool], numbers: tuple[int, int]) -> Operation:
  styles = (f'[v for v in {{x}} if {condition}]', f'list(filter(lambda v: {condition}, {{x}}))')
  return Operation(text, styles, lambda row, n: [v for v in row if holds(v, n)], numbers)


OPERATIONS = (
  _each('add {n} to {x}', 'v + {n}', lambda v, n: v + n, (2, 9)),
  _each('multiply {x} by {n}', 'v * {n}', lambda v, n: v * n, (2, 5)),
  _each('raise {x} to {n}', 'max(v, {n})', max, (10, 99)),
  _each('cap {x} at {n}', 'min(v, {n})', min, (10, 99)),
  _keep('keep {x} above {n}', 'v > {n}', lambda v, n: v > n, (10, 99)),
  _keep('keep {x} below {n}', 'v < {n}', lambda v, n: v < n, (10, 99)),
)
# Short lines, of which a function has one at most.
REORDERINGS = (
  Operation('reverse {x}', ('{x}[::-1]', 'list(reversed({x}))'), lambda row, _: row[::-1]),
  Operation(
    'sort {x} down',
    ('sorted({x})[::-1]', 'sorted({x}, reverse=True)'),
    lambda row, _: sorted(row, reverse=True),
  ),
)


def _run(lines: list[tuple[Operation, int]], row: list[int]) -> list[int]:
  for operation, n in lines:
    row = operation.apply(row, n)
  return row


def _is_proper(lines: list[tuple[Operation, int]], inputs: list[list[int]]) -> bool:
  """Whether leaving out any line changes a result, two of three results are not empty, and no number is too large."""
  results = [_run(lines, row) for row in inputs]
  full = [result for result in results if result]
  if 3 * len(full) < 2 * len(results) or max(map(max, full)) > MAX_RESULT:
    return False
  shorter = [lines[:left_out] + lines[left_out + 1 :] for left_out in range(len(lines))]
  return all([_run(others, row) for row in inputs] != results for others in shorter)


def _draw_lines(rng: np.random.Generator, count: int) -> list[tuple[Operation, int]]:
  lines = [OPERATIONS[i] for i in rng.integers(len(OPERATIONS), size=count)]
  if rng.random() < 0.5 and count > 1:
    lines[rng.integers(count)] = REORDERINGS[rng.integers(len(REORDERINGS))]
  return [(line, int(rng.integers(line.numbers[0], line.numbers[1] + 1)) if line.numbers else 0) for line in lines]


def make_problem(rng: np.random.Generator, level: float) -> Problem:
  """A function of MIN_LINES to MAX_LINES lines, each of which matters, fewer lines at a lower level.

  Args:
    rng: source of randomness.
    level: in (0, 1].

  Returns:
    The problem; its difficulty is the number of lines, `hidden` the pairs of input and result that decide.
  """
  count = int(rng.integers(max(1, round(level * MIN_LINES)), max(1, round(level * MAX_LINES)) + 1))
  inputs = (1 + rng.integers(MAX_INPUT, size=(SHOWN_TESTS + HIDDEN_TESTS, INPUT_LENGTH))).tolist()
  while not _is_proper(lines := _draw_lines(rng, count), inputs):
    pass
  names = 'abcdefgh'[: count + 1]
  steps = list(zip(lines, names[:-1], names[1:], strict=True))
  tests = [(row, _run(lines, row)) for row in inputs]
  described = ''.join(f'{new}: {line.text.format(x=old, n=n)}\n' for (line, n), old, new in steps)
  shown = ''.join(f'solve({row}) == {result}\n' for row, result in tests[:SHOWN_TESTS])
  styles = rng.integers(2, size=count).tolist()
  body = ''.join(
    f'    {new} = {line.styles[style].format(x=old, n=n)}\n'
    for ((line, n), old, new), style in zip(steps, styles, strict=True)
  )
  return Problem(
    prompt=f'pipeline:\n{described}{shown}code:\n',
    answer=f'def solve(a):\n{body}    return {names[-1]}',
    difficulty=count,
    # With the shown ones, since a line may matter for these only.
    hidden=tests,
  )


def is_solved(problem: Problem, answer: str) -> bool:
  """Whether the answer, run in a sandbox, returns what every test expects, hidden or shown."""
  checks = ''.join(f'assert solve({row}) == {result}\n' for row, result in problem.hidden)
  return run_python(f'{answer}\n\n{checks}').passed

"""Countdown: reach a number with + - * / from others, each used once: `countdown:30,100,93=23`.

The answer is written step by step, `100-93=7,30-7=23`, or as one expression, `30-(100-93)`. Arithmetic is exact, and
nothing of an answer is ever run as code.
"""

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
import itertools
import operator
from pathlib import Path
import re

import numpy as np

from archer_jax.tasks import Problem
from archer_jax.tasks import plain
from archer_jax.tasks.jsonl import read_records
from archer_jax.tasks.jsonl import text_field

WORKED_EXAMPLES = 3
# Two steps such as 100*100=10000,10000/100=100, and an end token; a file with more numbers needs more.
GEN_LENGTH = 28

# Of generated problems.
COUNT, MAX_NUMBER = 3, 100
# Of files; to find that more numbers have no solution takes too long.
MAX_COUNT = 5

_OPERATIONS = {'+': operator.add, '-': operator.sub, '*': operator.mul, '/': operator.truediv}
_PRECEDENCE = {'+': 1, '-': 1, '*': 2, '/': 2}
# Not \d, which takes digits of every script; longer numbers come up nowhere.
_NUMBER = r'(?:0|[1-9][0-9]{0,17})(?![0-9])'
_STEP = re.compile(rf'\s*(-?{_NUMBER})\s*([-+*/])\s*(-?{_NUMBER})\s*=\s*(-?{_NUMBER})\s*')
_EXPRESSION = re.compile(rf'(?P<expression>(?:\s*(?:{_NUMBER}|[-+*/()]))+)\s*(?:=\s*(?P<result>-?{_NUMBER})\s*)?')
_SYMBOL = re.compile(rf'{_NUMBER}|[-+*/()]')


def make_problem(rng: np.random.Generator, level: float) -> Problem:
  """COUNT numbers from 1 to MAX_NUMBER and a target in this range, reached by whole positive numbers.

  Args:
    rng: source of randomness.
    level: in (0, 1], the share of COUNT numbers that there are, but 2 at least.

  Returns:
    The problem; its difficulty is how many numbers there are, `hidden` the numbers and the target.
  """
  count = max(2, round(level * COUNT))
  while True:
    numbers = (1 + rng.integers(MAX_NUMBER, size=count)).tolist()
    values, steps = [Fraction(number) for number in numbers], []
    while len(values) > 1:
      pair = [values.pop(rng.integers(len(values))) for _ in range(2)]
      moves = [move for move in _moves(*pair, whole=True) if move[-1] > 0]
      left, symbol, right, value = moves[rng.integers(len(moves))]
      values.append(value)
      steps.append(f'{left}{symbol}{right}={value}')
    if values[0] <= MAX_NUMBER:
      return _problem(numbers, int(values[0]), ','.join(steps))


def is_solved(problem: Problem, answer: str) -> bool:
  """Whether the answer, as steps or as an expression, uses every number exactly once and reaches the target."""
  numbers, target = problem.hidden
  answer = plain(answer)
  return _steps_reach(answer, numbers, target) or _expression_reaches(answer, numbers, target)


def solution(numbers: list[int], target: int) -> str | None:
  """One right answer: steps through whole numbers where that is possible, else an expression; None if there is none.

  A detour through negative numbers is never needed, since the terms of a difference can be exchanged.
  """
  values = [(Fraction(number), str(number)) for number in numbers]
  for whole in (True, False):
    if found := _search(values, Fraction(target), whole, set()):
      steps, expression = found
      # The outermost parentheses say nothing.
      return ','.join(steps) if whole else expression[1:-1]
  return None


def read_problems(path: str | Path) -> list[Problem]:
  """Problems of a file of `{"input": "30,100,93", "output": "23"}` a line, the public format.

  Args:
    path: the file.

  Returns:
    The problems, in the file's order; the reference answers are searched for, as the file has none.

  Raises:
    ValueError: a record is not as above, or has no solution; the message names file, line and field.
  """
  problems = []
  for place, record in read_records(path):
    given, output = (text_field(place, record, field) for field in ('input', 'output'))
    if not re.fullmatch(rf'{_NUMBER}(?:,{_NUMBER}){{1,{MAX_COUNT - 1}}}', given):
      raise ValueError(f'{place}: input must be 2 to {MAX_COUNT} numbers with commas between them, got {given[:80]!r}')
    if not re.fullmatch(_NUMBER, output):
      raise ValueError(f'{place}: output must be a number, got {output[:80]!r}')
    numbers, target = [int(number) for number in given.split(',')], int(output)
    if (answer := solution(numbers, target)) is None:
      raise ValueError(f'{place}: output {target} cannot be reached from input {given}')
    problems.append(_problem(numbers, target, answer))
  return problems


def _problem(numbers: list[int], target: int, answer: str) -> Problem:
  prompt = f'countdown:{",".join(map(str, numbers))}={target}\n'
  return Problem(prompt=prompt, answer=answer, difficulty=len(numbers), hidden=(tuple(numbers), target))


def _moves(a: Fraction, b: Fraction, *, whole: bool) -> Iterator[tuple[Fraction, str, Fraction, Fraction]]:
  """What two values can become, as left, symbol, right and result; `whole` leaves out quotients with a remainder."""
  large, small = max(a, b), min(a, b)
  yield large, '+', small, large + small
  yield large, '-', small, large - small
  yield large, '*', small, large * small
  for left, right in ((large, small), (small, large)):
    if right and (not whole or left % right == 0):
      yield left, '/', right, left / right


def _search(values, target: Fraction, whole: bool, failed: set) -> tuple[list[str], str] | None:
  """Steps and expression that lead from pairs of value and text to the target; `failed` holds what is known not to."""
  if len(values) == 1:
    value, text = values[0]
    return ([], text) if value == target else None
  if (key := tuple(sorted(value for value, _ in values))) in failed:
    return None
  failed.add(key)
  for pair in itertools.combinations(range(len(values)), 2):
    rest = [value for i, value in enumerate(values) if i not in pair]
    (a, a_text), (b, b_text) = (values[i] for i in pair)
    for left, symbol, right, value in _moves(a, b, whole=whole):
      texts = (a_text, b_text) if (left, right) == (a, b) else (b_text, a_text)
      combined = (value, f'({texts[0]}{symbol}{texts[1]})')
      if found := _search([*rest, combined], target, whole, failed):
        steps, expression = found
        return [f'{left}{symbol}{right}={value}', *steps], expression
  return None


def _steps_reach(answer: str, numbers: tuple[int, ...], target: int) -> bool:
  """Whether every step takes two numbers that are there and puts their right result in their place."""
  left_over = Counter(map(Fraction, numbers))
  result = None
  for text in answer.split(','):
    if not (step := _STEP.fullmatch(text)):
      return False
    a, b, result = (Fraction(step[group]) for group in (1, 3, 4))
    left_over.subtract((a, b))
    if min(left_over.values()) < 0 or (step[2] == '/' and not b) or _OPERATIONS[step[2]](a, b) != result:
      return False
    left_over[result] += 1
  return left_over.total() == 1 and result == target


def _expression_reaches(answer: str, numbers: tuple[int, ...], target: int) -> bool:
  """Whether an expression, with or without `= result` behind it, has the target as its value."""
  if not (parts := _EXPRESSION.fullmatch(answer)) or (parts['result'] and int(parts['result']) != target):
    return False
  symbols = _SYMBOL.findall(parts['expression'])
  # Before anything is computed: so values are no larger than the problem's numbers allow.
  if Counter(int(symbol) for symbol in symbols if symbol.isdigit()) != Counter(numbers):
    return False
  return _value(symbols) == target


def _value(symbols: list[str]) -> Fraction | None:
  """The value of an expression without signs before numbers; None if it is not well-formed or divides by zero.

  With two stacks (Dijkstra's shunting yard) rather than by recursion, which a text could make too deep.
  """
  values, waiting, expects_value = [], ['('], True
  for symbol in [*symbols, ')']:
    if expects_value != (symbol == '(' or symbol.isdigit()) or not waiting:
      return None
    if symbol.isdigit():
      values.append(Fraction(symbol))
      expects_value = False
    elif symbol == '(':
      waiting.append(symbol)
    else:
      while waiting and waiting[-1] != '(' and (symbol == ')' or _PRECEDENCE[waiting[-1]] >= _PRECEDENCE[symbol]):
        right, left = values.pop(), values.pop()
        if waiting[-1] == '/' and not right:
          return None
        values.append(_OPERATIONS[waiting.pop()](left, right))
      if symbol == ')':
        waiting.pop()
      else:
        waiting.append(symbol)
        expects_value = True
  return None if waiting else values[0]

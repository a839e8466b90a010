"""Graders of the generated tasks: right answers pass, and answers that are wrong whatever the problem is fail."""

import dataclasses
import importlib
import itertools

import numpy as np
import pytest

from archer_jax.tasks import pipeline
from archer_jax.tasks import problem_at
from archer_jax.tasks import sudoku6
from archer_jax.tasks import table
from archer_jax.tasks.sandbox import Outcome
from archer_jax.tasks.sources import GENERATED

SEED = 101


@pytest.fixture(autouse=True)
def run_here(monkeypatch):
  """Runs the programs of `pipeline` without a sandbox: they are all made here, and ten thousand would take an hour."""

  def run_python(program):
    try:
      exec(program, {})
    except Exception as error:
      return Outcome(passed=False, reason=repr(error), output='')
    return Outcome(passed=True, reason='passed', output='')

  monkeypatch.setattr(pipeline, 'run_python', run_python)


def other_digit(grid, rng, size):
  cell = rng.choice([i for i, digit in enumerate(grid) if digit != '\n'])
  digit = rng.choice([d for d in '123456'[:size] if d != grid[cell]])
  return f'{grid[:cell]}{digit}{grid[cell + 1 :]}'


def swap_cells(grid, rng, size):
  # Two columns then lack a digit.
  cell = rng.choice([i for i in range(len(grid) - 1) if i % (size + ('\n' in grid)) < size - 1])
  return f'{grid[:cell]}{grid[cell + 1]}{grid[cell]}{grid[cell + 2 :]}'


def break_clues(grid, size):
  # A valid grid again, in which no clue is left.
  return grid.translate(str.maketrans('123456'[:size], '234561'[: size - 1] + '1'))


def drop(parts, rng, separator):
  left_out = rng.integers(len(parts))
  return separator.join([*parts[:left_out], *parts[left_out + 1 :]])


def swap_neighbours(parts, rng, separator):
  at = rng.choice([i for i, (a, b) in enumerate(itertools.pairwise(parts)) if a != b])
  return separator.join([*parts[:at], parts[at + 1], parts[at], *parts[at + 2 :]])


def corrupt_sudoku4(problem, rng):
  yield other_digit(problem.answer, rng, 4)
  yield swap_cells(problem.answer, rng, 4)
  yield break_clues(problem.answer, 4)
  yield drop(problem.answer, rng, '')


def corrupt_sudoku6(problem, rng):
  yield other_digit(problem.answer, rng, 6)
  yield swap_cells(problem.answer, rng, 6)
  yield break_clues(problem.answer, 6)
  yield drop(problem.answer.split('\n'), rng, '\n')
  # Rows of which one has a clue, which is then in the wrong place.
  at = rng.choice([at for at in range(5) if set(problem.hidden[6 * at : 6 * at + 12]) != {'0'}])
  rows = problem.answer.split('\n')
  yield '\n'.join([*rows[:at], rows[at + 1], rows[at], *rows[at + 2 :]])
  yield problem.answer.replace('\n', '')


def corrupt_sort(problem, rng):
  numbers = problem.answer.split()
  other = rng.choice([number for number in map(str, range(10, 100)) if number not in numbers])
  at = rng.integers(len(numbers))
  yield ' '.join([*numbers[:at], other, *numbers[at + 1 :]])
  yield drop(numbers, rng, ' ')
  yield swap_neighbours(numbers, rng, ' ')
  yield ' '.join(numbers[::-1])


def corrupt_table(problem, rng):
  rows = problem.answer.split('\n')
  at = rng.integers(len(rows))
  name, number, color = rows[at].split()
  other_name = rng.choice([other for other in table.NAMES if other != name])
  other_color = rng.choice([other for other in table.COLORS if other != color])
  other_number = rng.choice([other for other in range(10, 100) if other != int(number)])
  wrong = (f'{other_name} {number} {color}', f'{name} {other_number} {color}', f'{name} {number} {other_color}')
  # As it stands in the table.
  for row in (*wrong, f'{name} {color} {number}'):
    yield '\n'.join([*rows[:at], row, *rows[at + 1 :]])
  yield drop(rows, rng, '\n')
  yield swap_neighbours(rows, rng, '\n')
  yield '\n'.join([*rows, rows[at]])


def corrupt_pipeline(problem, rng):
  head, *body, end = problem.answer.split('\n')
  # Each line matters, so leaving out what it does is wrong.
  for at, (name, before) in enumerate(zip('bcdef', 'abcde', strict=True)):
    if at < len(body):
      yield '\n'.join([head, *body[:at], f'    {name} = {before}', *body[at + 1 :], end])
  yield '\n'.join([head, *body, end[:-1] + 'abcdef'[len(body) - 1]])
  yield '\n'.join([head, *body])
  yield '\n'.join([end, *body, head])
  yield problem.answer.replace('solve', 'solved')
  yield problem.answer[:-1] + 'h'


def corrupt_countdown(problem, rng):
  steps = problem.answer.split(',')
  calculation, _, result = problem.answer.rpartition('=')
  yield f'{calculation}={int(result) + rng.integers(1, 9)}'
  yield ','.join(steps[:-1])
  yield steps[-1]
  yield result
  yield f'{problem.answer},{result}+0={result}'


CORRUPTIONS = {
  'sudoku4': corrupt_sudoku4,
  'sudoku6': corrupt_sudoku6,
  'sort': corrupt_sort,
  'table': corrupt_table,
  'pipeline': corrupt_pipeline,
  'countdown': corrupt_countdown,
}


@pytest.mark.parametrize('count', [300, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize('task', GENERATED)
def test_right_answers_pass_and_wrong_ones_fail(task, count):
  module = importlib.import_module(f'archer_jax.tasks.{task}')
  for index in range(count):
    problem = problem_at(module, SEED, index)
    rng = np.random.default_rng((SEED, index))
    assert module.is_solved(problem, problem.answer), problem
    wrong = ['', problem.prompt, problem.prompt + problem.answer, *CORRUPTIONS[task](problem, rng)]
    for answer in wrong:
      assert answer != problem.answer
      assert not module.is_solved(problem, answer), (problem, answer)


@pytest.mark.parametrize('task', GENERATED)
def test_white_space_at_ends_of_lines_and_empty_lines_around_count_nowhere(task):
  module = importlib.import_module(f'archer_jax.tasks.{task}')
  for index in range(6):
    problem = problem_at(module, SEED, index)
    answer = problem.answer
    ends = [answer.replace('\n', end) for end in ('\r\n', '\r', ' \n')]
    for written in (f'{answer}\n', f'\n{answer}', f'\r\n\r\n{answer}', f'{answer} \t', f'{answer}\r\n\r\n', *ends):
      assert module.is_solved(problem, written), (problem, written)


def test_puzzles_of_one_completion():
  """Against trying every way to fill the blanks that the clues leave."""
  counts = set()
  for index in range(8):
    problem = problem_at(sudoku6, SEED, index, worked_examples=0)
    # Blanks enough to be ambiguous at times, and few enough to try all.
    grid, blanks = problem.answer.replace('\n', ''), [i for i, clue in enumerate(problem.hidden) if clue == '0'][:6]
    puzzle = ''.join('0' if i in blanks else digit for i, digit in enumerate(grid))
    problem = dataclasses.replace(problem, hidden=puzzle)
    found = 0
    for digits in itertools.product('123456', repeat=len(blanks)):
      filled = dict(zip(blanks, digits, strict=True))
      rows = [''.join(filled.get(6 * row + i, puzzle[6 * row + i]) for i in range(6)) for row in range(6)]
      # Most of the ways fail in a row.
      found += all(len(set(row)) == 6 for row in rows) and sudoku6.is_solved(problem, '\n'.join(rows))
    assert sudoku6.is_unique(problem) == (found == 1)
    counts.add(found)
  assert counts >= {1, 2}

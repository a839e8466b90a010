"""Every generated task: its problems are what they claim to be, and of the lengths that they claim."""

import dataclasses
import importlib
import re

import numpy as np
import pytest

from archer_jax.tasks import SEPARATOR
from archer_jax.tasks import problem_at
from archer_jax.tasks import sudoku6
from archer_jax.tasks.sources import GENERATED

SEED = 100
COUNTS = [300, pytest.param(10_000, marks=pytest.mark.slow)]


def module(task):
  return importlib.import_module(f'archer_jax.tasks.{task}')


def problems(task, count, **arguments):
  return (problem_at(module(task), SEED, index, **arguments) for index in range(count))


# What each task's problems claim, checked without the code that made them.


def check_sudoku(problem, size, box_rows):
  grid = problem.answer.replace('\n', '')
  rows = [grid[i : i + size] for i in range(0, size * size, size)]
  boxes = [
    ''.join(row[left : left + size // box_rows] for row in rows[top : top + box_rows])
    for top in range(0, size, box_rows)
    for left in range(0, size, size // box_rows)
  ]
  columns = [grid[i::size] for i in range(size)]
  assert all(sorted(unit) == [*'123456'[:size]] for unit in rows + columns + boxes)
  question = problem.prompt.rsplit(':', 1)[1].replace('\n', '')
  assert question == f'{problem.hidden}='
  assert all(clue in ('0', digit) for clue, digit in zip(problem.hidden, grid, strict=True))
  assert problem.difficulty == problem.hidden.count('0')


def check_sudoku4(problem):
  check_sudoku(problem, 4, 2)
  assert 4 <= problem.difficulty <= 12


def check_sudoku6(problem):
  check_sudoku(problem, 6, 2)
  assert 15 <= problem.difficulty <= 30


def check_sort(problem):
  numbers = [int(number) for number in problem.prompt.rsplit('sort: ', 1)[1].split()]
  assert [int(number) for number in problem.answer.split()] == sorted(numbers)
  assert 24 <= len(numbers) == problem.difficulty <= 32
  assert min(numbers) >= 10
  assert max(numbers) <= 99


def check_table(problem):
  lines, asked = problem.prompt.rsplit('table:\n', 1)[1].split('find:\n')
  rows = {name: (color, number) for name, color, number in map(str.split, lines.splitlines())}
  names = [line.removesuffix(' ??') for line in asked.splitlines()]
  assert len(rows) == lines.count('\n') == problem.difficulty == 16
  assert len(set(names)) == len(names) == 10
  assert problem.answer == '\n'.join(f'{name} {rows[name][1]} {rows[name][0]}' for name in names)


MEANINGS = {
  'add (.+) to .': lambda row, n: [v + n for v in row],
  'multiply . by (.+)': lambda row, n: [n * v for v in row],
  'raise . to (.+)': lambda row, n: [n if v < n else v for v in row],
  'cap . at (.+)': lambda row, n: [n if v > n else v for v in row],
  'keep . above (.+)': lambda row, n: [v for v in row if v > n],
  'keep . below (.+)': lambda row, n: [v for v in row if v < n],
  'reverse .()': lambda row, n: [*reversed(row)],
  'sort . down()': lambda row, n: sorted(row, key=lambda v: -v),
}


def understand(description):
  """What `b: add 3 to a` does to a list."""
  found = [(re.fullmatch(pattern, description[3:]), meaning) for pattern, meaning in MEANINGS.items()]
  ((match, meaning),) = [pair for pair in found if pair[0]]
  return lambda row: meaning(row, int(match[1] or 0))


def apply_all(steps, row):
  for step in steps:
    row = step(row)
  return row


def check_pipeline(problem):
  lines = problem.prompt.rsplit('pipeline:\n', 1)[1].splitlines()
  described, shown = lines[:-3], lines[-3:-1]
  assert 3 <= len(described) == problem.difficulty <= 5
  # Every line reads the one before it.
  for line, name, before in zip(described, 'bcdef', 'abcde', strict=False):
    assert line[:3] == f'{name}: '
    assert before in line[3:].split()
  steps = [understand(line) for line in described]
  assert shown == [f'solve({row}) == {result}' for row, result in problem.hidden[:2]]
  assert len(problem.hidden) == 10
  for row, result in problem.hidden:
    assert apply_all(steps, row) == result
    assert max(result, default=0) <= 999
  for left_out in range(len(steps)):
    others = steps[:left_out] + steps[left_out + 1 :]
    assert any(apply_all(others, row) != result for row, result in problem.hidden)


def check_countdown(problem):
  given, target = problem.prompt.rsplit('countdown:', 1)[1].strip().split('=')
  left = [int(number) for number in given.split(',')]
  assert len(left) == problem.difficulty == 3
  assert all(1 <= number <= 100 for number in [*left, int(target)])
  for step in problem.answer.split(','):
    calculation, result = step.split('=')
    for number in re.split('[-+*/]', calculation):
      left.remove(int(number))
    assert eval(calculation) == int(result) > 0
    left.append(int(result))
  assert left == [int(target)]


CHECKS = {
  'sudoku4': check_sudoku4,
  'sudoku6': check_sudoku6,
  'sort': check_sort,
  'table': check_table,
  'pipeline': check_pipeline,
  'countdown': check_countdown,
}


@pytest.mark.parametrize('count', COUNTS)
@pytest.mark.parametrize('task', GENERATED)
def test_problems_are_valid(task, count):
  for problem in problems(task, count):
    CHECKS[task](problem)


@pytest.mark.parametrize('task', GENERATED)
def test_worked_examples_stand_solved_before_the_question(task, monkeypatch):
  drawn = []
  make_problem = module(task).make_problem
  monkeypatch.setattr(module(task), 'make_problem', lambda *args: drawn.append(make_problem(*args)) or drawn[-1])
  whole = problem_at(module(task), SEED, 3, worked_examples=2)
  question, *shown = drawn
  parts = [f'{example.prompt}{example.answer}' for example in shown]
  assert whole.prompt == SEPARATOR.join([*parts, question.prompt])
  assert len({*parts, question.prompt}) == 3
  assert dataclasses.replace(whole, prompt=question.prompt) == question
  # The question does not depend on what stands before it.
  assert problem_at(module(task), SEED, 3, worked_examples=0) == question
  assert problem_at(module(task), SEED, 3).prompt.count(SEPARATOR) == module(task).WORKED_EXAMPLES


@pytest.mark.parametrize('task', GENERATED)
def test_streams_follow_from_seed_and_index(task):
  whole = list(problems(task, 30))
  assert [problem_at(module(task), SEED, index) for index in (29, 3)] == [whole[29], whole[3]]
  assert len({problem.prompt for problem in whole}) == 30
  assert problem_at(module(task), SEED + 1, 0) != whole[0]


@pytest.mark.parametrize('task', GENERATED)
def test_excluded_questions_are_replaced(task, monkeypatch):
  whole = [problem.prompt for problem in problems(task, 10, worked_examples=0)]
  excluded = set(whole[:3])
  other = [problem.prompt for problem in problems(task, 10, worked_examples=0, excluded=excluded)]
  assert other[3:] == whole[3:]
  assert not excluded & set(other)
  # Not as worked examples either.
  drawn = []
  make_problem = module(task).make_problem
  monkeypatch.setattr(module(task), 'make_problem', lambda *args: drawn.append(make_problem(*args)) or drawn[-1])
  shown = problem_at(module(task), SEED, 5, worked_examples=1)
  again = problem_at(module(task), SEED, 5, worked_examples=1, excluded={drawn[1].prompt})
  assert drawn[1].prompt in shown.prompt
  assert drawn[1].prompt not in again.prompt
  assert again.answer == shown.answer


@pytest.mark.parametrize('task', [task for task in GENERATED if task not in ('sudoku4', 'countdown')])
def test_a_lower_level_is_easier(task):
  means = [np.mean([problem.difficulty for problem in problems(task, 100, level=level)]) for level in (0.1, 0.5, 1.0)]
  assert means[0] < means[1] < means[2]


@pytest.mark.parametrize('level', [0, -0.5, 1.5, float('nan')])
def test_a_level_out_of_range_is_refused(level):
  with pytest.raises(ValueError, match=r'level must be in \(0, 1\], got'):
    problem_at(sudoku6, SEED, 0, level=level)


# Tokens of a standard prompt, at least and at most; sudoku4 and countdown are short, as their public files are.
PROMPT_TOKENS = {
  'sudoku4': (19, 19),
  'sudoku6': (227, 227),
  'sort': (151, 175),
  'table': (323, 323),
  'pipeline': (150, 281),
  'countdown': (60, 159),
}
ANSWER_TOKENS = {
  'sudoku4': (16, 16),
  'sudoku6': (41, 41),
  'sort': (47, 55),
  'table': (49, 49),
  'pipeline': (40, 83),
  'countdown': (7, 27),
}


@pytest.mark.parametrize('count', COUNTS)
@pytest.mark.parametrize('task', GENERATED)
def test_lengths_in_tokens(task, count, count_tokens):
  lengths = np.array([(count_tokens(p.prompt), count_tokens(p.answer)) for p in problems(task, count)])
  for column, (least, most) in zip(lengths.T, (PROMPT_TOKENS[task], ANSWER_TOKENS[task]), strict=True):
    assert least <= column.min()
    assert column.max() <= most
  # With an end token.
  assert ANSWER_TOKENS[task][1] + 1 == module(task).GEN_LENGTH


def test_grids_are_diverse():
  grids = [problem.answer.replace('\n', '') for problem in problems('sudoku6', 3000, worked_examples=0)]
  # Of 28 million grids two may well come twice.
  assert len(set(grids)) > 2990
  digits = np.array([list(map(int, grid)) for grid in grids])
  counts = np.stack([(digits == digit).sum(axis=0) for digit in range(1, 7)])
  # Each digit is in each cell 500 times, with a standard deviation of 20.
  assert abs(counts - 500).max() < 100


def test_numbers_to_sort_are_uniform():
  numbers = ' '.join(problem.answer for problem in problems('sort', 1000, worked_examples=0)).split()
  counts = np.bincount(list(map(int, numbers)), minlength=100)[10:]
  assert len(counts) == 90
  mean = len(numbers) / 90
  assert abs(counts - mean).max() < 5 * mean**0.5

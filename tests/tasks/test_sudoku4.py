"""4x4 sudoku: solver, generator, grader and the public file."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from archer_jax.tasks import problem_at
from archer_jax.tasks import sudoku4

PUBLIC = Path(__file__).with_name('sudoku4_public_a.csv')
UNIQUE, UNIQUE_SOLUTION = '3102200002100320', '3142243142131324'


def peers(cell):
  """The cells that share a row, column or box with `cell`."""
  row, column = divmod(cell, 4)
  same = lambda r, c: r == row or c == column or (r // 2, c // 2) == (row // 2, column // 2)
  return [4 * r + c for r, c in itertools.product(range(4), repeat=2) if same(r, c) and 4 * r + c != cell]


def search(puzzle):
  """All solutions by backtracking, sharing nothing with the code under test."""
  if any(puzzle[cell] != '0' and puzzle[cell] == puzzle[peer] for cell in range(16) for peer in peers(cell)):
    return []
  if '0' not in puzzle:
    return [puzzle]
  blank = puzzle.index('0')
  return [found for digit in '1234' for found in search(puzzle[:blank] + digit + puzzle[blank + 1 :])]


def test_there_are_288_full_grids():
  grids = sudoku4.solutions('0' * 16)
  assert len(set(grids)) == 288
  assert sorted(grids) == grids
  assert all(search(grid) == [grid] for grid in grids)


@pytest.mark.parametrize('seed', range(20))
def test_solutions_equal_a_backtracking_search(seed):
  puzzle = problem_at(sudoku4, 5, seed).hidden
  assert sudoku4.solutions(puzzle) == search(puzzle)


def test_contradicting_clues_have_no_solution():
  assert sudoku4.solutions('11' + '0' * 14) == []
  # Each clue is fine by itself here, but the third cell of the first row has no digit left.
  assert sudoku4.solutions('1200' + '0034' + '0' * 8) == search('1200' + '0034' + '0' * 8) == []


@pytest.mark.parametrize('puzzle', ['', '0' * 15, '0' * 17, '5' + '0' * 15, ' ' + '0' * 15, '\u0661' + '0' * 15])
def test_what_is_no_puzzle_is_refused(puzzle):
  with pytest.raises(ValueError, match='16 digits from 0 to 4'):
    sudoku4.solutions(puzzle)


def test_problems_vary_in_blanks_and_in_uniqueness():
  problems = [problem_at(sudoku4, 0, index) for index in range(1800)]
  blanks = np.bincount([problem.difficulty for problem in problems], minlength=17)
  assert np.flatnonzero(blanks).tolist() == list(range(sudoku4.MIN_BLANKS, sudoku4.MAX_BLANKS + 1))
  assert blanks[blanks > 0].min() > 140
  groups = [sudoku4.group(problem) for problem in problems[:300]]
  assert groups.count('unique') > 60
  assert groups.count('ambiguous') > 60


def test_grader_accepts_every_completion_and_nothing_else():
  unique = sudoku4.puzzle_problem(UNIQUE, UNIQUE_SOLUTION)
  assert unique.prompt == f'sudoku4:{UNIQUE}='
  assert sudoku4.is_solved(unique, UNIQUE_SOLUTION)
  problem = next(problem for problem in sudoku4.read_problems(PUBLIC) if sudoku4.group(problem) == 'ambiguous')
  puzzle, right = problem.hidden, search(problem.hidden)
  assert len(right) > 1
  assert all(sudoku4.is_solved(problem, answer) for answer in right)
  # White space behind an answer counts nowhere.
  assert sudoku4.is_solved(problem, right[0] + ' ')
  clue = next(cell for cell in range(16) if puzzle[cell] != '0')
  # A full grid that differs in a clue only by a renaming of digits is valid by itself but no answer.
  renamed = right[0].translate(str.maketrans('1234', '2143'))
  assert search(renamed) == [renamed]
  assert renamed[clue] != puzzle[clue]
  wrong = ['', puzzle, renamed, right[0][:-1], right[0] + '1', ' ' + right[0], '0' + right[0][1:]]
  wrong += [f'{right[0][:8]} {right[0][8:]}', f'{right[0][:8]}\n{right[0][8:]}']
  assert not any(sudoku4.is_solved(problem, answer) for answer in wrong)


def test_public_file():
  problems = sudoku4.read_problems(PUBLIC)
  assert len(problems) == 250
  assert len({problem.prompt for problem in problems}) == 250
  assert [sudoku4.group(problem) for problem in problems].count('unique') == 192
  first = problems[0]
  assert (first.prompt, first.answer, first.hidden) == (f'sudoku4:{UNIQUE}=', UNIQUE_SOLUTION, UNIQUE)


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('Solution,Puzzle\n', 'must begin with Puzzle,Solution'),
    (f'Puzzle,Solution\n{UNIQUE},{UNIQUE_SOLUTION}\n{UNIQUE[:-1]},{UNIQUE_SOLUTION}\n', 'line 3: a puzzle must be'),
    (f'Puzzle,Solution\n{UNIQUE},{UNIQUE_SOLUTION[::-1]}\n', 'line 2: .* is no solution'),
    (f'Puzzle,Solution\n{UNIQUE}\n', 'line 2: None is no solution'),
  ],
)
def test_bad_public_file(tmp_path, text, message):
  path = tmp_path / 'bad.csv'
  path.write_text(text)
  with pytest.raises(ValueError, match=message):
    sudoku4.read_problems(path)

"""4x4 sudoku as text: `sudoku4:3102200002100320=` is answered by `3142243142131324`.

A grid is written row by row as 16 digits, 0 for a blank: every row, column and 2x2 box holds 1 to 4 once. There are
only 288 full grids, so solving and counting solutions is a comparison with all of them.
"""

import csv
import functools
import itertools
from pathlib import Path

import numpy as np

from archer_jax.tasks import Problem
from archer_jax.tasks import plain

WORKED_EXAMPLES = 0
# A grid and an end token.
GEN_LENGTH = 17

CELLS = 16
# Around the 8 blanks of the public puzzles: with fewer the rest is found without search, with more a puzzle has
# many solutions.
MIN_BLANKS, MAX_BLANKS = 4, 12


def _is_valid(cells: tuple[int, ...]) -> bool:
  """Whether no row, column or box of one or two bands of 8 cells holds a digit twice."""
  rows = [cells[start : start + 4] for start in range(0, len(cells), 4)]
  columns = [cells[column::4] for column in range(4)]
  corners = [start + shift for start in range(0, len(cells), 8) for shift in (0, 2)]
  boxes = [(*cells[corner : corner + 2], *cells[corner + 4 : corner + 6]) for corner in corners]
  return all(len(set(unit)) == len(unit) for unit in rows + columns + boxes)


@functools.cache
def _all_grids() -> np.ndarray:
  """The 288 full grids in lexicographic order, uint8 [288, 16], read-only."""
  rows = tuple(itertools.permutations((1, 2, 3, 4)))
  bands = [top + bottom for top, bottom in itertools.product(rows, repeat=2) if _is_valid(top + bottom)]
  grids = np.array([top + low for top, low in itertools.product(bands, repeat=2) if _is_valid(top + low)], np.uint8)
  grids.flags.writeable = False
  return grids


def _cells(puzzle: str) -> np.ndarray:
  """uint8 [16] of a puzzle's text."""
  if len(puzzle) != CELLS or not set(puzzle) <= set('01234'):
    raise ValueError(f'a puzzle must be {CELLS} digits from 0 to 4, got {puzzle!r}')
  return np.frombuffer(puzzle.encode(), np.uint8) - ord('0')


def _text(cells: np.ndarray) -> str:
  return (cells + ord('0')).astype(np.uint8).tobytes().decode()


def solutions(puzzle: str) -> list[str]:
  """Every full grid that keeps the puzzle's clues, in lexicographic order.

  Args:
    puzzle: 16 digits, 0 for a blank.

  Returns:
    Grids of 16 digits; none if the clues contradict each other, one for a proper puzzle.

  Raises:
    ValueError: the text is no puzzle.
  """
  cells = _cells(puzzle)
  grids = _all_grids()
  return [_text(grid) for grid in grids[np.all((cells == 0) | (grids == cells), axis=1)]]


def make_problem(rng: np.random.Generator, level: float) -> Problem:
  """A random grid with MIN_BLANKS to MAX_BLANKS random cells cleared, each number of blanks equally often.

  Uniqueness is not asked for: the answer of a puzzle with several solutions is each of them equally often, which is
  what a model of the answers' distribution has to learn.

  Args:
    rng: source of randomness.
    level: the most blanks, as a share of MAX_BLANKS but not under MIN_BLANKS.

  Returns:
    The problem; its difficulty is the number of blanks, `hidden` the puzzle's 16 digits.
  """
  grids = _all_grids()
  grid = grids[rng.integers(len(grids))]
  blanks = int(rng.integers(MIN_BLANKS, max(MIN_BLANKS, round(level * MAX_BLANKS)) + 1))
  cells = grid.copy()
  cells[rng.permutation(CELLS)[:blanks]] = 0
  return puzzle_problem(_text(cells), _text(grid))


def puzzle_problem(puzzle: str, solution: str) -> Problem:
  """The problem of a puzzle of 16 digits, 0 for a blank, and one of its solutions."""
  return Problem(prompt=f'sudoku4:{puzzle}=', answer=solution, difficulty=puzzle.count('0'), hidden=puzzle)


def is_solved(problem: Problem, answer: str) -> bool:
  """Whether the answer is a full grid that keeps the clues, any of them where there are several."""
  return plain(answer) in solutions(problem.hidden)


def group(problem: Problem) -> str:
  """`unique` or `ambiguous`: results are reported apart, since only a unique solution shows that it was deduced."""
  return 'unique' if len(solutions(problem.hidden)) == 1 else 'ambiguous'


def read_problems(path: str | Path) -> list[Problem]:
  """Puzzles and reference solutions of a CSV file in the public format, header `Puzzle,Solution`.

  Args:
    path: the file.

  Returns:
    The problems, in the file's order.

  Raises:
    ValueError: the header, a puzzle or a solution is not as above; the message names file and line.
  """
  with Path(path).open(newline='') as file:
    reader = csv.DictReader(file)
    if reader.fieldnames != ['Puzzle', 'Solution']:
      raise ValueError(f'{path} must begin with Puzzle,Solution, got {reader.fieldnames}')
    problems = []
    for row in reader:
      puzzle, solution = row['Puzzle'], row['Solution']
      try:
        right = solution in solutions(puzzle)
      except (ValueError, TypeError) as error:
        raise ValueError(f'{path} line {reader.line_num}: {error}') from None
      if not right:
        raise ValueError(f'{path} line {reader.line_num}: {solution!r} is no solution of {puzzle!r}')
      problems.append(puzzle_problem(puzzle, solution))
  return problems

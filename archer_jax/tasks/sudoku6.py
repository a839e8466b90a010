"""6x6 sudoku: every row, column and box of 2 rows by 3 columns holds 1 to 6 once; any valid completion counts.

    sudoku6:
    000056
    350042
    ...
    =

is answered by the six full rows. With many blanks a puzzle has several completions, and cells that are filled at the
same time may each be right alone and wrong together: this is what rollback is for.
"""

import numpy as np

from archer_jax.tasks import Problem
from archer_jax.tasks import plain

WORKED_EXAMPLES = 2
# Six rows of six digits, five newlines and an end token.
GEN_LENGTH = 42

SIZE, BOX_ROWS, BOX_COLUMNS = 6, 2, 3
CELLS = SIZE * SIZE
MIN_BLANKS, MAX_BLANKS = 15, 30
_EASIEST_BLANKS = 1


def _units() -> tuple[tuple[int, ...], ...]:
  """Cell numbers of every row, column and box."""
  cells = range(CELLS)
  box = lambda cell: (cell // SIZE // BOX_ROWS, cell % SIZE // BOX_COLUMNS)
  keys = (lambda cell: cell // SIZE, lambda cell: cell % SIZE, box)
  return tuple(tuple(c for c in cells if key(c) == name) for key in keys for name in sorted({key(c) for c in cells}))


_UNITS = _units()
# Of each cell, the cells that may not hold its digit, among those before it.
_EARLIER = tuple(
  tuple(sorted({other for unit in _UNITS if cell in unit for other in unit if other < cell})) for cell in range(CELLS)
)


def _random_grid(rng: np.random.Generator) -> list[int]:
  """A random full grid: cells in order, digits in random order, going back where nothing fits."""
  orders = rng.permuted(np.tile(np.arange(1, SIZE + 1), (CELLS, 1)), axis=1).tolist()
  grid, tried = [0] * CELLS, [0] * CELLS
  cell = 0
  while cell < CELLS:
    taken = {grid[other] for other in _EARLIER[cell]}
    while tried[cell] < SIZE and orders[cell][tried[cell]] in taken:
      tried[cell] += 1
    if tried[cell] == SIZE:
      tried[cell] = 0
      cell -= 1
    else:
      grid[cell] = orders[cell][tried[cell]]
      cell += 1
      continue
    tried[cell] += 1
  return grid


def _rows(cells: list[int]) -> str:
  return '\n'.join(''.join(map(str, cells[start : start + SIZE])) for start in range(0, CELLS, SIZE))


def make_problem(rng: np.random.Generator, level: float) -> Problem:
  """A random grid with MIN_BLANKS to MAX_BLANKS random cells cleared, fewer at a lower level.

  Args:
    rng: source of randomness.
    level: in (0, 1].

  Returns:
    The problem; its difficulty is the number of blanks, `hidden` the puzzle's 36 digits, 0 for a blank.
  """
  grid = _random_grid(rng)
  scaled = lambda blanks: _EASIEST_BLANKS + round(level * (blanks - _EASIEST_BLANKS))
  blanks = int(rng.integers(scaled(MIN_BLANKS), scaled(MAX_BLANKS) + 1))
  puzzle = list(grid)
  for cell in rng.permutation(CELLS)[:blanks].tolist():
    puzzle[cell] = 0
  prompt = f'sudoku6:\n{_rows(puzzle)}\n=\n'
  return Problem(prompt=prompt, answer=_rows(grid), difficulty=blanks, hidden=''.join(map(str, puzzle)))


def is_solved(problem: Problem, answer: str) -> bool:
  """Whether the answer is six rows that keep the clues and obey the rules."""
  answer = plain(answer)
  grid = answer.replace('\n', '')
  if answer != '\n'.join(grid[start : start + SIZE] for start in range(0, CELLS, SIZE)) or len(grid) != CELLS:
    return False
  keeps_clues = all(clue in ('0', digit) for clue, digit in zip(problem.hidden, grid, strict=True))
  return keeps_clues and all({grid[cell] for cell in unit} == set('123456') for unit in _UNITS)


def is_unique(problem: Problem) -> bool:
  """Whether the puzzle has one completion only."""
  grid, found = [int(clue) for clue in problem.hidden], 0
  options = lambda cell: set(range(1, SIZE + 1)) - {grid[other] for unit in _UNITS if cell in unit for other in unit}

  def search() -> None:
    nonlocal found
    blanks = [(len(options(cell)), cell) for cell in range(CELLS) if not grid[cell]]
    if not blanks:
      found += 1
      return
    # The cell with the fewest digits left, so that most of the wrong ways are short.
    _, cell = min(blanks)
    for digit in options(cell):
      grid[cell] = digit
      search()
      grid[cell] = 0
      if found > 1:
        return

  search()
  return found == 1

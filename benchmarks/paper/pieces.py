"""The parts of a run, each on the disk as soon as it is measured, so that a run that was killed goes on where it was.

The file is JSON lines: what the run is, and then a line for each part.
"""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from archer_jax.jobs.folder import differences
from archer_jax.jobs.output import json_line


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
  """A part of a table.

  Attributes:
    table: its name.
    task: of which it is, None if the table has none.
    part: which one: the number of a batch, or a length.
    units: how long it takes about, in decodings of a problem.
  """

  table: str
  task: str | None
  part: int
  units: int

  @property
  def key(self) -> tuple[str, str | None, int]:
    return self.table, self.task, self.part


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
  """What a piece gave, and the seconds that it took with everything around it."""

  value: Any
  seconds: float


class Journal:
  """The pieces that are measured.

  Args:
    path: of the file; without one nothing is written.
    run: everything by name that a value depends on.

  Raises:
    ValueError: the file of another run, or a damaged one.
    OSError: it cannot be read or written.
  """

  def __init__(self, path: Path | None, run: Mapping[str, Any]):
    self.found: dict[tuple[str, str | None, int], Measured] = {}
    # As it comes back from a file.
    run = json.loads(json.dumps(run))
    self._path = path
    self.is_new = path is None or not path.exists() or not path.read_bytes()
    if path is None:
      return
    if self.is_new:
      self._write({'run': run})
      return
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    if not lines[-1].endswith(b'\n'):
      # The process was killed while it wrote it.
      os.truncate(path, len(content) - len(lines.pop()))
    try:
      head, *rest = map(json.loads, lines)
      theirs = head['run']
      for entry in rest:
        self.found[(entry['table'], entry['task'], entry['part'])] = Measured(
          value=entry['value'], seconds=entry['seconds']
        )
    except (ValueError, KeyError, TypeError) as error:
      raise ValueError(f'{path} is not a file of pieces: {type(error).__name__}: {error}') from error
    if said := differences(theirs, run, ('it has', 'this run')):
      raise ValueError(f'{path} is of another run, and would not go on with this one: {said}; give another json')

  def add(self, piece: Piece, measured: Measured) -> None:
    """Keeps what a piece gave, on the disk when this returns."""
    # What is read again must be what is used now.
    value = json.loads(json.dumps(measured.value, allow_nan=False))
    self.found[piece.key] = dataclasses.replace(measured, value=value)
    if self._path is not None:
      table, task, part = piece.key
      self._write({'table': table, 'task': task, 'part': part, 'seconds': measured.seconds, 'value': value})

  def of(self, pieces: Sequence[Piece]) -> list[tuple[Piece, Any]]:
    """Those of the pieces that are measured, with their values."""
    return [(piece, self.found[piece.key].value) for piece in pieces if piece.key in self.found]

  def _write(self, entry: Mapping[str, Any]) -> None:
    with self._path.open('ab', buffering=0) as file:
      start, line = file.tell(), json_line(entry).encode()
      try:
        while line:
          line = line[file.write(line) :]
        os.fsync(file.fileno())
      except OSError as error:
        with contextlib.suppress(OSError):
          os.ftruncate(file.fileno(), start)
        raise OSError(f'{self._path} cannot be written: {error.strerror}') from error


def by_task(found: Sequence[tuple[Piece, Any]]) -> Iterator[tuple[str, list[Any]]]:
  """Tasks in their order, each with the values of its pieces."""
  for task in dict.fromkeys(piece.task for piece, _ in found):
    yield task, [value for piece, value in found if piece.task == task]


def seconds_left(pieces: Sequence[Piece], found: Mapping[tuple[str, str | None, int], Measured]) -> float | None:
  """How long the pieces that are not measured will take, from those that are; None before the first.

  A piece takes as long per unit as those of its own table and task did, where there are any, else of its table, else
  of all.
  """
  groups = [lambda piece: piece.key[:2], lambda piece: piece.table, lambda piece: None]
  rates: list[dict[Any, tuple[float, int]]] = [{} for _ in groups]
  for piece in pieces:
    if piece.key in found:
      for group, rate in zip(groups, rates, strict=True):
        seconds, units = rate.get(group(piece), (0.0, 0))
        rate[group(piece)] = seconds + found[piece.key].seconds, units + piece.units
  if not rates[-1]:
    return None
  left = 0.0
  for piece in pieces:
    if piece.key not in found:
      seconds, units = next(rate[g(piece)] for g, rate in zip(groups, rates, strict=True) if g(piece) in rate)
      left += piece.units * seconds / units
  return left

"""The share of one process in a job: a journal of what is finished, and at the end the part in input order.

What is finished is on the disk before the process goes on, so one that is killed loses the rows that were in its slots
and nothing else.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import errno
import io
import json
import os
import re
import time
from typing import TYPE_CHECKING
from typing import BinaryIO

from archer_jax.jobs.folder import FLUSH_SECONDS
from archer_jax.jobs.folder import is_local
from archer_jax.jobs.folder import sync_folder
from archer_jax.jobs.folder import write_whole
from archer_jax.jobs.output import RecordFile
from archer_jax.jobs.output import json_line

if TYPE_CHECKING:
  from etils import epath

  from archer_jax.engine.results import Result


@contextlib.contextmanager
def part_lock(folder: 'epath.Path', index: int) -> Iterator[None]:
  """Keeps other processes from a part while in this context, where the file system can.

  Raises:
    ValueError: another process has it.
  """
  if os.name != 'posix' or not is_local(folder):
    yield
    return
  import fcntl

  is_new = not folder.exists()
  path = folder / f'.lock-{index:05d}'
  try:
    folder.mkdir(parents=True, exist_ok=True)
    file = open(path, 'wb')  # noqa: SIM115 (closed below)
  except OSError as error:
    raise ValueError(f'output {folder} cannot be made or written: {error.strerror}') from error
  # The system gives a lock back when its process ends, however it ends.
  with file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
      # Some network file systems have no locks.
      if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
        raise ValueError(
          f'part {index} of output {folder} is being written by another process: either the job still runs, or '
          f'process_id {index} is given twice'
        ) from error
    try:
      yield
    finally:
      path.unlink(missing_ok=True)
      if is_new:
        # It stays if there is anything in it.
        with contextlib.suppress(OSError):
          os.rmdir(folder)


class Part:
  """The share of one process in a job: what is finished of it, and where the rest goes.

  Args:
    folder: of the job.
    index: of the part.
    n_parts: of the job.
    n_records: of the job.
    is_read_only: whether another process writes what this one decodes too.

  Attributes:
    path: of the complete part.
    index: of the part.
    n_parts: of the job.
    total: its records.
    finished: indices in the input of those that earlier runs have finished.
    is_complete: whether the part itself has been written.
    errors: records that are errors, once it is.
  """

  def __init__(self, folder: 'epath.Path', index: int, n_parts: int, n_records: int, *, is_read_only: bool = False):
    self.index, self.n_parts = index, n_parts
    self._folder, self._n_records, self._is_read_only = folder, n_records, is_read_only
    self._stem = f'part-{index:05d}-of-{n_parts:05d}'
    self.path = folder / f'{self._stem}.jsonl'
    self.total = len(range(index, n_records, n_parts))
    self.errors = 0
    self._writer: RecordFile | _Flushed | None = None
    self.is_complete = self.path.exists()
    if self.is_complete:
      self.finished = set(range(index, n_records, n_parts))
      self.errors = self._count_errors()
      if not is_read_only:
        self._remove_segments()
    else:
      self.finished = set(self._places())

  def wants(self, index: int) -> bool:
    """Whether the record at an index is this part's and not finished."""
    return index % self.n_parts == self.index and index not in self.finished

  def write(self, results: list['Result']) -> None:
    """Adds results, which are on the disk when this returns; in a store of objects at the latest after `close`.

    Raises:
      OSError: what hindered it. What was added before stays.
    """
    if not results:
      return
    if self._is_read_only:
      self.finished.update(result.index for result in results)
      return
    if self._writer is None:
      number = 1 + max((_segment_number(path) for path in self._segments()), default=-1)
      if is_local(self._folder):
        self._writer = RecordFile(self._segment(number), _journal_line)
        sync_folder(self._folder)
      else:
        self._writer = _Flushed(self._segment, number)
    self._writer.write(results)
    self.finished.update(result.index for result in results)

  def close(self) -> None:
    """Has everything that was added in the folder."""
    if self._writer is not None:
      self._writer.close()
      self._writer = None

  def complete(self) -> None:
    """Writes the part and removes its segments; all its records must be finished."""
    self.close()
    if self.is_complete or self._is_read_only:
      return
    places = self._places()
    assert sorted(places) == list(range(self.index, self._n_records, self.n_parts))
    with contextlib.ExitStack() as stack:
      files = {number: stack.enter_context(_open(self._segment(number))) for number in {n for n, _ in places.values()}}
      write_whole(self.path, self._lines(files, places))
    self.is_complete = True
    self._remove_segments()

  def _lines(self, files: Mapping[int, BinaryIO], places: Mapping[int, tuple[int, int]]) -> Iterator[bytes]:
    for index in sorted(places):
      number, offset = places[index]
      files[number].seek(offset)
      record = json.loads(files[number].readline())['record']
      self.errors += record['finish_reason'] == 'error'
      yield json_line(record).encode()

  def _places(self) -> dict[int, tuple[int, int]]:
    """Number of the segment and offset in it of every finished record, by its index in the input."""
    places = {}
    for path in self._segments():
      offset = 0
      with _open(path) as file:
        for line in file:
          # What a kill or a full disk has torn; its record is decoded again.
          if not line.endswith(b'\n'):
            break
          places[self._line_index(path, line)] = (_segment_number(path), offset)
          offset += len(line)
    return places

  def _line_index(self, path: 'epath.Path', line: bytes) -> int:
    try:
      entry = json.loads(line)
      index = entry['index']
      entry['record']['finish_reason']
      if index not in range(self.index, self._n_records, self.n_parts):
        raise ValueError(f'index {index} is not of this part')
    except (ValueError, KeyError, TypeError) as error:
      raise ValueError(f'{path} is damaged: {line[:40]!r}... is no finished record ({error})') from error
    return index

  def _count_errors(self) -> int:
    with _open(self.path) as file:
      return sum(json.loads(line)['finish_reason'] == 'error' for line in file)

  def _segment(self, number: int) -> 'epath.Path':
    return self._folder / f'{self._stem}.segment-{number:04d}.jsonl'

  def _segments(self) -> list['epath.Path']:
    name = re.compile(rf'{self._stem}\.segment-\d+\.jsonl')
    return sorted((path for path in self._folder.iterdir() if name.fullmatch(path.name)), key=_segment_number)

  def _remove_segments(self) -> None:
    for path in self._segments():
      path.unlink()


class _Flushed:
  """Segments of an object store: what came since the last one, every now and then."""

  def __init__(self, segment: Callable[[int], 'epath.Path'], number: int):
    self._segment, self._number = segment, number
    self._lines: list[str] = []
    self._last = time.monotonic()

  def write(self, results: Iterable['Result']) -> None:
    self._lines += map(_journal_line, results)
    if time.monotonic() - self._last >= FLUSH_SECONDS:
      self.close()

  def close(self) -> None:
    if self._lines:
      write_whole(self._segment(self._number), [line.encode() for line in self._lines])
      self._number += 1
      self._lines = []
    self._last = time.monotonic()


def _journal_line(result: 'Result') -> str:
  return json_line({'index': result.index, 'record': result.record()})


def _segment_number(path: 'epath.Path') -> int:
  return int(path.name.split('segment-')[1].removesuffix('.jsonl'))


def _open(path: 'epath.Path') -> BinaryIO:
  """A file to read from anywhere; an object at once, of which there may be many."""
  return open(path, 'rb') if is_local(path) else io.BytesIO(path.read_bytes())

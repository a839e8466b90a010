"""Results out: JSON lines and trace files, none of which ever replaces another file."""

from collections.abc import Callable
import json
import os
from pathlib import Path
import re
import sys
import tempfile
from typing import TYPE_CHECKING
from typing import Any

import numpy as np

if TYPE_CHECKING:
  from archer_jax.jobs.generate import Result

# Longer names do not fit every file system.
_PLAIN_NAME = re.compile(r'[A-Za-z0-9._-]{1,200}')


def file_stem(id: Any, index: int) -> str:
  """Name of a record's trace file: its id where that is a plain name, else its zero-padded index."""
  text = str(id) if isinstance(id, str | int) and not isinstance(id, bool) else ''
  return text if _PLAIN_NAME.fullmatch(text) else f'{index:08d}'


def stats_file(output: str) -> Path:
  """Where the figures of a run go that writes its records to `output`."""
  return Path(f'{output}.stats.json')


def check_new_file(field: str, path: Path) -> None:
  """Raises ValueError if `path` exists or cannot be made; `field` is what the user called it."""
  if path.exists() or path.is_symlink():
    raise ValueError(f'{field} {path} exists already and is never overwritten')
  _check_writable(field, path.parent)


def check_trace_folder(path: Path, *, resume: bool = False) -> None:
  """Makes the folder of `--trace` and raises ValueError if it cannot be made or written, or has traces in it.

  Args:
    path: of the folder.
    resume: whether it may have traces, those of a job that goes on.
  """
  make_folder('trace', path)
  if not resume and any(path.glob('*.npz')):
    raise ValueError(f'trace {path} has traces in it already, which are never overwritten')


def make_folder(field: str, path: Path) -> None:
  """Makes a folder and raises ValueError if it cannot be made or written; `field` is what the user called it."""
  try:
    path.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise ValueError(f'{field} {path} cannot be made: {error.strerror}') from error
  _check_writable(field, path)


def _check_writable(field: str, folder: Path) -> None:
  if not folder.is_dir():
    raise ValueError(f'{field} must be in a folder that exists, got {folder}')
  try:
    # Permissions alone do not tell: the superuser passes them, and a file system may be mounted read-only.
    with tempfile.TemporaryFile(dir=folder):
      pass
  except OSError as error:
    raise ValueError(f'{field} must be in a folder that can be written, got {folder}: {error.strerror}') from error


class RecordFile:
  """A new file of JSON lines in which there are whole lines only, unless the process is killed while it writes one.

  Args:
    path: of the file.
    line: makes the line of a result.

  Raises:
    FileExistsError: the file is there already.
  """

  def __init__(self, path: os.PathLike, line: Callable[['Result'], str] | None = None):
    # Unbuffered, so that nothing of a failed line can follow later.
    self._file = open(path, 'xb', buffering=0)  # noqa: SIM115 (closed by close)
    self._line = line or record_line

  def __enter__(self) -> 'RecordFile':
    return self

  def __exit__(self, *exception) -> None:
    self.close()

  def close(self) -> None:
    self._file.close()

  def write(self, results: list['Result']) -> None:
    """Writes one line per result and has them on the disk when it returns.

    Raises:
      OSError: what hindered it; the lines of earlier calls stay, and no part of a line is left behind.
    """
    start = self._file.tell()
    try:
      for result in results:
        start, line = self._file.tell(), self._line(result).encode()
        while line:
          line = line[self._file.write(line) :]
      os.fsync(self._file.fileno())
    except OSError as error:
      os.ftruncate(self._file.fileno(), start)
      raise OSError(f'output {self._file.name} cannot be written: {error.strerror}') from error


def record_line(result: 'Result') -> str:
  """A result's record as one line of JSON."""
  return json_line(result.record())


def json_line(value: Any) -> str:
  """One line of JSON."""
  return json.dumps(value, ensure_ascii=False, allow_nan=False) + '\n'


def print_records(results: list['Result']) -> None:
  """Writes one JSON line per result to stdout."""
  sys.stdout.write(''.join(map(record_line, results)))
  sys.stdout.flush()


def write_trace(folder: Path, result: 'Result', *, resume: bool = False) -> None:
  """Writes the trace of a decoded result as `folder`/<id or zero-padded index>.npz, its id inside.

  Args:
    folder: there already.
    result: without a trace nothing is written.
    resume: whether a file may be replaced, that of a record which an earlier run of the job did not finish.
  """
  if result.trace is None:
    return
  plain = isinstance(result.id, str | int | float) and np.asarray(result.id).dtype != object
  name = np.asarray(result.id if plain else json.dumps(result.id))
  with (folder / f'{file_stem(result.id, result.index)}.npz').open('wb' if resume else 'xb') as file:
    np.savez(file, id=name, **result.trace)

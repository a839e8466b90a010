"""Results out: JSON lines and trace files, none of which ever replaces another file."""

from collections.abc import Callable
from collections.abc import Mapping
import json
import os
from pathlib import Path
import sys
import tempfile
from typing import TYPE_CHECKING
from typing import Any

import numpy as np

from archer_jax.engine.settings import Settings

if TYPE_CHECKING:
  from archer_jax.checkpoints.text import Tokenizer
  from archer_jax.engine.results import Result


def stats_file(output: str) -> Path:
  """Where the figures of a run go that writes its records to `output`."""
  return Path(f'{output}.stats.json')


def check_new_file(field: str, path: Path) -> None:
  """Raises ValueError if `path` exists or cannot be made; `field` is what the user called it."""
  if path.exists() or path.is_symlink():
    raise ValueError(f'{field} {path} exists already and is never overwritten')
  check_writable(field, path.parent)


def check_result_folders(options: Mapping[str, Any], *, resume: bool = False) -> None:
  """Makes the folders of `--trace` and `--report`, as far as they are asked for.

  Args:
    options: the flags that are no settings, by name.
    resume: whether there may be files in them, those of a job that goes on.

  Raises:
    ValueError: one that cannot be made or written, or has such files in it.
  """
  for field, kind, suffixes in (('trace', 'traces', ('npz',)), ('report', 'reports', ('html', 'png'))):
    if options[field] is None:
      continue
    path = Path(options[field])
    make_folder(field, path)
    if not resume and any(any(path.glob(f'*.{suffix}')) for suffix in suffixes):
      raise ValueError(f'{field} {path} has {kind} in it already, which are never overwritten')


def make_folder(field: str, path: Path) -> None:
  """Makes a folder and raises ValueError if it cannot be made or written; `field` is what the user called it."""
  try:
    path.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise ValueError(f'{field} {path} cannot be made: {error.strerror}') from error
  check_writable(field, path)


def check_writable(field: str, folder: Path) -> None:
  """Raises ValueError if no file can be made in `folder`; `field` is what the user called what goes there."""
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
  """Writes one JSON line per result to stdout, in UTF-8 whatever the terminal's encoding is."""
  sys.stdout.flush()
  sys.stdout.buffer.write(''.join(map(record_line, results)).encode())
  sys.stdout.buffer.flush()


def trace_arrays(result: 'Result', settings: Settings, tokenizer: 'Tokenizer | None') -> dict[str, np.ndarray]:
  """What a trace file holds: the arrays of the steps, and what it takes to show them without anything else.

  Args:
    result: with a trace.
    settings: of the run.
    tokenizer: spells the tokens; without one there are ids alone.

  Returns:
    Beside the arrays of `Result.trace`: `id`; `mask_id`; `prompt_ids` [P]; `settings`, the request's own as JSON;
    `reason_names`, of the bits of `reason_per_step` from the lowest; `token_ids`, every one that occurs, ascending, and
    `token_texts` of them where there is a tokenizer.
  """
  is_plain = isinstance(result.id, str | int | float) and np.asarray(result.id).dtype != object
  occurring = np.unique([*result.trace['canvas_after_step'].ravel().tolist(), *result.prompt_ids]).astype(np.int32)
  arrays = {
    'id': np.asarray(result.id if is_plain else json.dumps(result.id)),
    **result.trace,
    'mask_id': np.asarray(settings.model.mask_id, np.int32),
    'prompt_ids': np.asarray(result.prompt_ids, np.int32),
    'settings': np.asarray(json.dumps({**settings.by_name(), **result.knobs})),
    'reason_names': np.asarray(settings.reason_names),
    'token_ids': occurring,
  }
  if tokenizer is not None:
    spell = lambda token: tokenizer.hf.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    # NumPy cuts a NUL at the end of a text off.
    texts = [spell(token).replace('\0', '\N{SYMBOL FOR NULL}') for token in occurring.tolist()]
    arrays['token_texts'] = np.asarray(texts, np.str_)
  return arrays


def write_trace(folder: Path, stem: str, arrays: Mapping[str, np.ndarray], *, resume: bool = False) -> None:
  """Writes the trace of a result as `folder`/`stem`.npz.

  Args:
    folder: there already.
    stem: from `file_stem`.
    arrays: from `trace_arrays`.
    resume: whether a file may be replaced, that of a record which an earlier run of the job did not finish.
  """
  with (folder / f'{stem}.npz').open('wb' if resume else 'xb') as file:
    np.savez(file, **arrays)

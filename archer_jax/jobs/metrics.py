"""How a run goes: a bar for whoever watches, and a file of figures over time for whoever looks later."""

from collections.abc import Sequence
import json
import os
import sys
import time
from typing import Any

from etils import epath
import jax
from tqdm import tqdm

from archer_jax.engine.results import Result
from archer_jax.engine.stats import Summary
from archer_jax.jobs.folder import FLUSH_SECONDS
from archer_jax.jobs.folder import is_local
from archer_jax.jobs.folder import write_whole

# Between two lines of the file.
LINE_SECONDS = 5.0


class Progress:
  """Follows a run by its results.

  Args:
    total: records that there are to be in the end, or None if nobody knows.
    finished: how many of them earlier runs have finished.
    title: what stands before the bar, None for no bar.
    path: of the file, None for no file; what earlier runs wrote into it stays.
  """

  def __init__(self, *, total: int | None, finished: int = 0, title: str | None, path: epath.Path | None = None):
    self._bar = None
    if title is not None:
      # A log wants a line now and then, a terminal a bar that moves.
      pace = 0.1 if sys.stderr.isatty() else 30
      self._bar = tqdm(total=total, initial=finished, unit='row', desc=title, mininterval=pace)
    self._log = None if path is None else _Log(path)
    self._finished, self._total = finished, total
    self._start = self._last = time.monotonic()
    self._tokens = self._records = 0

  def add(self, results: Sequence[Result], summary: Summary) -> None:
    """Takes note of results; `summary` has them already.

    Raises:
      OSError: the file cannot be written.
    """
    now = time.monotonic()
    if self._bar is not None and results:
      rate = summary.sums['generated_tokens'] / max(now - self._start, 1e-9)
      self._bar.set_postfix_str(
        f'{rate:,.0f} tokens/s, {summary.refresh_share:.0%} refreshes, {summary.steps_per_row:.1f} steps/row',
        refresh=False,
      )
      self._bar.update(len(results))
    if self._log is not None and now - self._last >= LINE_SECONDS:
      self._write_line(now, summary)

  def close(self, summary: Summary) -> None:
    """Ends the bar, and the file with the last figures if there are new ones."""
    if self._bar is not None:
      self._bar.close()
    if self._log is not None:
      if summary.records > self._records:
        self._write_line(time.monotonic(), summary)
      self._log.close()

  def _write_line(self, now: float, summary: Summary) -> None:
    tokens = summary.sums['generated_tokens']
    line = {
      'time': round(time.time(), 3),
      'seconds': round(now - self._start, 3),
      'records': self._finished + summary.records,
      'of': self._total,
      'errors': summary.errors,
      'rows': summary.rows,
      'generated_tokens': tokens,
      # Of the time since the line before.
      'tokens_per_second': round((tokens - self._tokens) / max(now - self._last, 1e-9), 3),
      'refresh_share': round(summary.refresh_share, 4),
      'steps_per_row': round(summary.steps_per_row, 3),
      **memory(),
    }
    self._tokens, self._records, self._last = tokens, summary.records, now
    self._log.write(line)


def memory() -> dict[str, int | None]:
  """Peak bytes of the process, and of that of its devices which had most; None where nobody counts them."""
  host = None
  if os.name == 'posix':
    import resource

    # In kilobytes, except on a Mac.
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024)
  peaks = [(device.memory_stats() or {}).get('peak_bytes_in_use') for device in jax.local_devices()]
  return {'peak_host_bytes': host, 'peak_device_bytes': max((peak for peak in peaks if peak is not None), default=None)}


class _Log:
  """Lines of JSON behind those that a file has; in a store of objects the file is written anew now and then."""

  def __init__(self, path: epath.Path):
    self._path = path
    self._lines = []
    self._written = time.monotonic()
    content = path.read_bytes() if path.exists() else b''
    if not is_local(path):
      self._lines = [content.decode()]
    elif torn := len(content) - content.rfind(b'\n') - 1:
      # A run before was killed in its last line.
      os.truncate(path, len(content) - torn)

  def write(self, line: dict[str, Any]) -> None:
    self._lines.append(json.dumps(line) + '\n')
    if is_local(self._path):
      try:
        with open(self._path, 'ab', buffering=0) as file:
          file.write(''.join(self._lines).encode())
      except OSError as error:
        raise OSError(f'output {self._path} cannot be written: {error.strerror}') from error
      self._lines = []
    elif time.monotonic() - self._written >= FLUSH_SECONDS:
      self.close()

  def close(self) -> None:
    if not is_local(self._path):
      write_whole(self._path, [line.encode() for line in self._lines])
      self._written = time.monotonic()

"""A profile of a running loop, for Perfetto or XProf."""

from pathlib import Path
import time

import jax

# Enough for many steps; longer ones are hard to open.
SECONDS = 10.0


class Profile:
  """Records `SECONDS` of a run from its first results on, when its first programs are compiled.

  Args:
    folder: where JAX writes it, one folder a process.
  """

  def __init__(self, folder: Path):
    self._folder = folder
    self._start: float | None = None
    self.is_recording = False

  @property
  def is_empty(self) -> bool:
    """Whether nothing was recorded."""
    return self._start is None

  def tick(self) -> None:
    """Is called after every chunk of a run."""
    now = time.monotonic()
    if self._start is None:
      self._start = now
      self.is_recording = True
      jax.profiler.start_trace(self._folder)
    elif now - self._start >= SECONDS:
      self.stop()

  def stop(self) -> None:
    if self.is_recording:
      self.is_recording = False
      jax.profiler.stop_trace()

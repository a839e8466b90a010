"""Preemption: the signal that announces it, and the exit code that asks to be run again."""

from collections.abc import Iterator
import contextlib
import signal
import threading

# EX_TEMPFAIL of sysexits.h: nothing is wrong, and the same command with --resume goes on.
PREEMPTED = 75


class Preempted(Exception):
  """Ends a run that has nothing to finish, or is told a second time to end."""


class Notice:
  """Whether SIGTERM has come, by which cluster managers announce that they will take the machine.

  Attributes:
    received: whether it has.
  """

  def __init__(self):
    self.received = False
    self._may_finish = False

  @contextlib.contextmanager
  def finishing(self) -> Iterator[None]:
    """In this context the signal is only noted; whoever runs looks at `received` where it can stop."""
    self._may_finish = True
    try:
      yield
    finally:
      self._may_finish = False

  def handle(self, *_) -> None:
    """The signal's handler."""
    again, self.received = self.received, True
    if again or not self._may_finish:
      raise Preempted


@contextlib.contextmanager
def watch() -> Iterator[Notice]:
  """Catches SIGTERM in this context; outside of the main thread, where Python allows no handlers, nothing is caught."""
  notice = Notice()
  if threading.current_thread() is not threading.main_thread():
    yield notice
    return
  before = signal.signal(signal.SIGTERM, notice.handle)
  try:
    yield notice
  finally:
    signal.signal(signal.SIGTERM, before)

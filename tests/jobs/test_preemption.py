import os
import signal
import threading

import pytest

from archer_jax.flags import run_command
from archer_jax.jobs import preemption
from archer_jax.jobs.preemption import Preempted


def terminate():
  os.kill(os.getpid(), signal.SIGTERM)


def test_the_signal_is_only_noted_while_something_is_finished():
  before = signal.getsignal(signal.SIGTERM)
  with preemption.watch() as notice, notice.finishing():
    assert not notice.received
    terminate()
    assert notice.received
    # Whoever says it twice cannot wait.
    with pytest.raises(Preempted):
      terminate()
  assert signal.getsignal(signal.SIGTERM) == before


def test_the_signal_ends_what_has_nothing_to_finish():
  with preemption.watch(), pytest.raises(Preempted):
    terminate()


def test_threads_have_no_signals():
  seen = []

  def run():
    with preemption.watch() as notice:
      seen.append(notice.received)

  thread = threading.Thread(target=run)
  thread.start()
  thread.join()
  assert seen == [False]


@pytest.mark.parametrize('when', ['prepare', 'run'])
def test_the_exit_code(capsys, when):
  def end():
    with preemption.watch():
      terminate()

  prepare = (lambda argv: end()) if when == 'prepare' else lambda argv: end
  assert run_command(['x'], lambda: '', prepare) == 75
  assert capsys.readouterr().err == 'preempted; what was finished is written\n'

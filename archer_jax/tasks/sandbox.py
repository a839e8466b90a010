"""Runs untrusted, model-written Python in a sandbox, for graders that execute an answer against hidden tests.

A program runs on Linux as the first process of namespaces of its own. It has

- the standard library of the interpreter that runs the caller, without installed packages, and the system's shared
  libraries, both read-only;
- one writable folder, empty, in memory, which is its working and home folder and goes with it;
- no other file or process of the machine, no network, no signals, no privilege, and the limits of `Limits`.

Where root calls, it runs as a user whom nobody else is; where an ordinary user calls, as that user without any
rights. Where the kernel does not grant all of this there is an error and nothing is run: in a container that
forbids namespaces, on Linux before 5.12, on other systems.

It guards the machine and the evaluation, not the verdict: a program that means to cheat shares its interpreter with
the tests and could change them.
"""

import dataclasses
import os
from pathlib import Path
import socket
import subprocess
import sys

LAUNCHER = Path(__file__).with_name('sandbox_launcher.py')

# Beyond the program's own time, seconds; setting up takes milliseconds, but the machine may be busy.
SETUP_SECONDS = 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """What one program may use.

  Attributes:
    wall_seconds: from its start to its end; more than `cpu_seconds`, so that a busy machine changes no verdict.
    cpu_seconds: processor time of each of its processes, whole seconds.
    memory_bytes: address space of each of its processes; the interpreter itself takes about 30 MB.
    processes: processes and threads at a time, itself included; with 1 the limits of each are those of all.
    output_bytes: what it may write to standard output and error together.
    file_bytes: what its folder may hold, in memory, in addition to `memory_bytes`.
  """

  wall_seconds: float = 15.0
  cpu_seconds: int = 5
  memory_bytes: int = 1 << 30
  processes: int = 1
  output_bytes: int = 1 << 16
  file_bytes: int = 1 << 24

  def __post_init__(self):
    for name, value in dataclasses.asdict(self).items():
      kinds = (int, float) if name == 'wall_seconds' else int
      if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < 1 << 62:
        kind = 'number' if name == 'wall_seconds' else 'whole number'
        raise ValueError(f'{name} must be a {kind} above 0 and below 2 ** 62, got {value!r}')


DEFAULT_LIMITS = Limits()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
  """How one program ended.

  Attributes:
    passed: it ran to its last line and left with exit code 0, within its limits.
    reason: `passed`, or what went wrong, as one short sentence.
    output: what it wrote to standard output and error, at most `Limits.output_bytes`; bytes that are no UTF-8 are
      replaced.
  """

  passed: bool
  reason: str
  output: str


def run_python(program: str, *, limits: Limits = DEFAULT_LIMITS) -> Outcome:
  """Runs a program in a sandbox and waits until nothing of it is left.

  Args:
    program: the whole text, such as a candidate followed by the tests' asserts.
    limits: what it may use.

  Returns:
    The outcome; whatever the program does ends up there and never as an exception.

  Raises:
    RuntimeError: this system cannot give one of the protections, or the limits are too tight for an interpreter; the
      message says which.
  """
  if sys.platform != 'linux':
    raise RuntimeError(
      f'model-written programs are run only on Linux, whose namespaces hold them; this is {sys.platform}'
    )
  # Lone surrogates are no UTF-8; the interpreter then refuses the program like any other wrong one.
  text = program.encode('utf-8', 'surrogatepass')
  # A virtual environment's interpreter is a link to this one; its packages are not wanted.
  interpreter = os.path.realpath(sys._base_executable)
  arguments = [*dataclasses.astuple(limits), len(text)]
  ours, theirs = socket.socketpair()
  with theirs:
    # With a new session and without preexec_fn, subprocess forks and executes in C, which threads do not disturb.
    launcher = subprocess.Popen(
      [interpreter, '-I', '-S', LAUNCHER, *map(str, arguments)],
      stdin=theirs,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
      env={},
      cwd='/',
      start_new_session=True,
    )
  answer = b''
  try:
    # Closing our end, for whatever reason, makes the launcher end the program.
    with ours:
      ours.settimeout(limits.wall_seconds + SETUP_SECONDS)
      ours.sendall(text)
      while chunk := ours.recv(1 << 16):
        answer += chunk
  except (BrokenPipeError, ConnectionResetError):
    pass  # It failed before it read the program; what it wrote to standard error says why.
  except TimeoutError:
    launcher.kill()
    raise RuntimeError(f'the sandbox did not answer {SETUP_SECONDS} s after the time limit') from None
  finally:
    _, message = launcher.communicate()
  reason, separator, output = answer.partition(b'\n')
  if not separator or reason.startswith(b'!'):
    cause = reason[1:] if separator else b'the launcher ended with %d %s' % (launcher.returncode, message[-500:])
    raise RuntimeError(f'a program cannot be run in a sandbox here: {cause.decode(errors="replace").strip()}')
  return Outcome(passed=reason == b'passed', reason=reason.decode(), output=output.decode(errors='replace'))

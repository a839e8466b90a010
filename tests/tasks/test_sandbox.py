"""The sandbox: what a program may do, what it may not, and that nothing of it is left."""

import concurrent.futures
import dataclasses
import json
import os
from pathlib import Path
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time

import pytest

from archer_jax.tasks import sandbox
from archer_jax.tasks import sandbox_launcher
from archer_jax.tasks.sandbox import Limits
from archer_jax.tasks.sandbox import run_python

REPOSITORY = Path(__file__).parents[2]
IS_ROOT = os.geteuid() == 0


def has_namespaces():
  """Asks another program than the one under test."""
  command = ['unshare', '--mount', '--pid', '--net', '--ipc', '--fork', *([] if IS_ROOT else ['--user']), 'true']
  return sys.platform == 'linux' and (not shutil.which('unshare') or subprocess.run(command).returncode == 0)


pytestmark = pytest.mark.skipif(not has_namespaces(), reason='namespaces are not to be had here')

# The name of a test's processes, by which they are found from outside.
NAME = f'sample{os.getpid()}'
NAMED = f"import ctypes; ctypes.CDLL(None).prctl(15, b'{NAME}', 0, 0, 0)\n"
# A file that programs try to leave behind, and a program's way to fail by itself where everything was refused.
LEFT = f'left-by-{NAME}'
REFUSED = 'everything was refused'
# Longer than a test waits; also so that a busy machine changes no verdict.
LONG = Limits(wall_seconds=120, cpu_seconds=60)


def attempts(*lines, given=''):
  """A program that passes if any of the lines works, and otherwise prints REFUSED and fails."""
  return textwrap.dedent(given) + textwrap.dedent(f"""
    for line in {lines!r}:
      try:
        exec(line)
      except OSError:
        continue
      break
    else:
      raise SystemExit({REFUSED!r})
  """)


def opening(paths, mode):
  return attempts(*(f'open({str(path)!r}, {mode!r})' for path in paths))


def private_files():
  """Files that this process may read."""
  home = [path for path in Path.home().iterdir() if path.is_file() and os.access(path, os.R_OK)]
  process = [
    f'/proc/{pid}/{name}' for pid in ('self', os.getpid()) for name in ('environ', 'mem', 'maps', 'root/etc/passwd')
  ]
  return [*home, __file__, sandbox.__file__, '/etc/passwd', '/etc/hostname', *process]


def outside_folders():
  return [
    '/',
    '/tmp',
    '/var/tmp',
    '/dev',
    '/dev/shm',
    '/etc',
    '/usr/lib',
    Path.home(),
    REPOSITORY,
    Path(sys.base_prefix, 'lib'),
    os.getcwd(),
    '..',
  ]


PID, GROUP = os.getpid(), os.getpgrp()
SOCKETS = attempts(
  's.socket(s.AF_INET).bind(("", 0))',
  's.create_connection(("127.0.0.1", 80), timeout=1)',
  's.socket(s.AF_INET6).bind(("::1", 0))',
  's.socket(s.AF_INET, s.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 9))',
  's.socket(s.AF_UNIX).bind("here")',
  's.socket(s.AF_UNIX).bind("\\0hidden")',
  's.socket(s.AF_NETLINK, s.SOCK_RAW)',
  given='import socket as s',
)
# Signal 0 asks whether a signal may be sent, and hurts nobody if it may.
SIGNALS = attempts(
  *(f'os.kill({pid}, 0)' for pid in ('os.getppid()', PID, 1, -1, 0, -GROUP)),
  *(f'signal.pidfd_send_signal(os.pidfd_open({pid}), 0)' for pid in (PID, 1)),
  given='import os, signal',
)
# Plain failures of C functions as errors; processes=8 so that the number of processes is not what refuses.
KERNEL = attempts(
  'os.memfd_create("x")',
  *(
    f'call({line})'
    for line in (
      'c.unshare, 1 << 28',
      'c.unshare, 0',
      'c.ptrace, 0, 0, 0, 0',
      f'c.ptrace, 16, {PID}, 0, 0',
      'c.shmget, 0, 4096, 0o1600',
      'c.semget, 0, 1, 0o1600',
      'c.msgget, 0, 0o1600',
      f'c.process_vm_readv, {PID}, 0, 0, 0, 0, 0',
      'c.mount, b"tmpfs", b"/sample", b"tmpfs", 0, 0',
      'c.chroot, b"."',
      'c.setuid, 0',
      'c.prlimit, 0, 9, unlimited, 0',
    )
  ),
  given="""
    import ctypes, os
    c = ctypes.CDLL(None, use_errno=True)
    unlimited = (ctypes.c_uint64 * 2)(2 ** 64 - 1, 2 ** 64 - 1)
    def call(function, *args):
      if function(*args) == -1:
        raise OSError(ctypes.get_errno(), str(args))
  """,
)

# Name -> program, limits, and how the reason of its failure begins. All of them pass where they get what they want.
ABUSES = {
  'endless loop': ('while True: pass', {'wall_seconds': 0.4}, 'took longer than 0.4 s'),
  'processor time': ('while True: pass', {'cpu_seconds': 1}, 'used more than 1 s of processor time'),
  'sleep': ('import time; time.sleep(999)', {'wall_seconds': 0.3}, 'took longer than 0.3 s'),
  '50 children': (
    NAMED + 'import os, time\nfor _ in range(50):\n  if os.fork() == 0:\n    time.sleep(999)\n    os._exit(0)',
    {'processes': 8},
    'exit code 1',
  ),
  '50 threads': (
    'from threading import Thread\nimport time\n'
    'for _ in range(50): Thread(target=time.sleep, args=[999], daemon=True).start()',
    {'processes': 8},
    'exit code 1',
  ),
  'one child': ('import os\nif os.fork() == 0: os._exit(0)', {}, 'exit code 1'),
  'daemon': (NAMED + 'import os, time\nif os.fork() == 0:\n  os.setsid()\n  time.sleep(999)', {}, 'exit code 1'),
  '10 GB': ('bytearray(10 * 2 ** 30)', {}, 'exit code 1'),
  '10 GB, mapped': ('import mmap\nmmap.mmap(-1, 10 * 2 ** 30)', {}, 'exit code 1'),
  'little by little': ('x = []\nwhile True: x.append(bytearray(2 ** 20))', {'memory_bytes': 1 << 28}, 'exit code 1'),
  'private files': (opening(private_files(), 'rb'), {}, 'exit code 1'),
  'outside': (opening([Path(folder, LEFT) for folder in outside_folders()], 'wb'), {}, 'exit code 1'),
  'its own text': (opening(['/program.py', '/dev/null/x'], 'ab'), {}, 'exit code 1'),
  'sockets': (SOCKETS, {}, 'exit code 1'),
  'signals': (SIGNALS, {}, 'exit code 1'),
  'kernel': (KERNEL, {'processes': 8}, 'exit code 1'),
  '100 MB of output': ('print("x" * 10 ** 8)', {}, 'wrote more than 65536 bytes of output'),
  '100 MB of errors': (
    'import os\nwhile os.write(2, b"x" * 10 ** 4): pass', {'output_bytes': 10**5}, 'wrote more than 100000 bytes'),
  'huge file': ('open("x", "wb").write(bytes(10 ** 8))', {}, 'exit code 1'),
  'large files': ('for i in range(9): open(str(i), "wb").write(bytes(10**6))', {'file_bytes': 1 << 23}, 'exit code 1'),
  'many files': ('for i in range(2000): open(str(i), "wb")', {}, 'exit code 1'),
  'many descriptors': ('x = [open("x", "wb") for _ in range(100)]', {}, 'exit code 1'),
  'closed output': ('import os, time\nos.close(1)\nos.close(2)\ntime.sleep(999)', {'wall_seconds': 0.3}, 'took longer'),
  'closed descriptors': ('import os\nos.closerange(0, 64)', {}, 'exit code 1'),
  'crash': ('import ctypes\nctypes.string_at(0)', {}, 'killed by signal 11'),
  'abort': ('import os\nos.abort()', {}, 'killed by signal'),
  'deep recursion': (
    'import sys\nsys.setrecursionlimit(10 ** 9)\nf = lambda x: max([1], key=lambda y: f(x))\nf(1)', {}, ''),
  'recursion': ('f = lambda: f()\nf()', {}, 'exit code 1'),
  'forged answer': ('print("passed")\nraise SystemExit(3)', {}, 'exit code 3'),
  'early exit': ('import sys\nsys.exit(0)\nassert False', {}, 'ended before its last line'),
  'hard exit': ('import os\nos._exit(0)', {}, 'ended before its last line'),
  'failing assert': ('assert 1 + 1 == 3', {}, 'exit code 1'),
  'no Python': ('def f(:', {}, 'exit code 1'),
  'lone surrogate': ('x = "\ud800"', {}, 'exit code 1'),
  'null': ('x = "\0"', {}, 'exit code 1'),
}  # fmt: skip
PROGRAMS = {
  'empty': '',
  'imports': 'import math, typing, collections, re, itertools, hashlib, heapq, random, decimal, datetime, json\n'
  'assert hashlib.sha256(b"").hexdigest().startswith("e3b0c442")',
  'own folder': 'import os, tempfile\nassert os.listdir() == []\nopen("a", "w").write("b" * 10 ** 6)\n'
  'os.mkdir("c")\nassert os.getcwd() == os.path.expanduser("~") == tempfile.gettempdir()\ntempfile.TemporaryFile()',
  'main': 'from __future__ import annotations\nimport dataclasses, typing\n'
  '@dataclasses.dataclass\nclass A:\n  x: list[A]\n'
  'assert typing.get_type_hints(A) == {"x": list[A]} and __name__ == "__main__"',
  'no input': 'import sys\nassert sys.stdin.read() == ""',
  'no privilege': 'import os\nassert os.getuid() and os.geteuid() and os.getgid() and not os.getgroups()',
  'no environment': 'import os\nassert set(os.environ) <= {"PATH", "HOME", "TMPDIR", "PYTHONHASHSEED", "LC_CTYPE"}',
  'no packages': 'import sys, os\nfor path in [*sys.path, "/usr/lib/python3"]:\n'
  '  for name in "site-packages", "dist-packages":\n'
  '    assert not os.path.exists(f"{path}/{name}") or os.listdir(f"{path}/{name}") == []',
  'null device': 'open("/dev/null", "w").write("x")',
  'as many processes as are allowed': NAMED + 'import os, time\nfor i in range(3):\n  try:\n'
  '    if os.fork() == 0: time.sleep(999)\n  except BlockingIOError:\n    break\nassert i == 2',
}
PROGRAM_LIMITS = {'processes': 3}


def living():
  """Ids of processes that took NAME and run; one that is dead may wait for the machine's first process."""
  found = []
  for folder in Path('/proc').iterdir():
    try:
      if folder.name.isdigit() and f'({NAME}) ' in (stat := (folder / 'stat').read_text()) and ') Z' not in stat:
        found.append(int(folder.name))
    except (FileNotFoundError, ProcessLookupError):
      pass
  return found


def wait_for(condition):
  """What the condition gives once it is true."""
  deadline = time.monotonic() + 60
  while not (value := condition()):
    assert time.monotonic() < deadline, 'waited 60 s'
    time.sleep(0.01)
  return value


@pytest.fixture(autouse=True)
def _nothing_left():
  yield
  assert living() == []
  assert [folder for folder in outside_folders() if Path(folder, LEFT).exists()] == []


@pytest.mark.parametrize('name', ABUSES)
def test_abuse_fails(name):
  program, limits, reason = ABUSES[name]
  outcome = run_python(program, limits=dataclasses.replace(LONG, **limits))
  assert not outcome.passed
  assert outcome.reason.startswith(reason), outcome
  if REFUSED in program:
    assert outcome.output == f'{REFUSED}\n'


@pytest.mark.parametrize('name', PROGRAMS)
def test_right_program_passes(name):
  outcome = run_python(PROGRAMS[name], limits=dataclasses.replace(LONG, **PROGRAM_LIMITS))
  assert outcome == sandbox.Outcome(passed=True, reason='passed', output='')


@pytest.mark.skipif(not IS_ROOT, reason='the tests above ran as an ordinary user')
def test_the_same_for_an_ordinary_user():
  interpreter = '/usr/bin/python3'
  is_new = 'import sys; sys.exit(sys.version_info < (3, 11))'
  if not Path(interpreter).exists() or subprocess.run([interpreter, '-c', is_new]).returncode:
    pytest.skip('no interpreter that an ordinary user can reach')
  long = dataclasses.asdict(LONG)
  cases = {name: (program, long | limits) for name, (program, limits, _) in ABUSES.items()}
  cases |= {name: (program, long | PROGRAM_LIMITS) for name, program in PROGRAMS.items()}
  script = textwrap.dedent("""
    import dataclasses, json, sys
    import sandbox
    for name, (program, limits) in json.load(sys.stdin).items():
      outcome = sandbox.run_python(program, limits=sandbox.Limits(**limits))
      print(json.dumps([name, *dataclasses.astuple(outcome)]))
  """)
  with tempfile.TemporaryDirectory() as folder:
    os.chmod(folder, 0o755)
    for module in (sandbox, sandbox_launcher):
      shutil.copy(module.__file__, folder)
    done = subprocess.run(
      [interpreter, '-c', script], input=json.dumps(cases), capture_output=True, text=True, cwd=folder,
      user=54321, group=54321, extra_groups=[], env={},
    )  # fmt: skip
  assert done.stderr == ''
  outcomes = {name: rest for name, *rest in map(json.loads, done.stdout.splitlines())}
  assert outcomes.keys() == cases.keys()
  for name, (passed, reason, output) in outcomes.items():
    assert passed == (name in PROGRAMS), (name, reason, output)
    if name in ABUSES:
      assert reason.startswith(ABUSES[name][2]), (name, reason, output)
      assert REFUSED not in ABUSES[name][0] or output == f'{REFUSED}\n', (name, output)


def test_layers_seen_from_outside():
  """Each is also there where another one would hide its absence."""
  with concurrent.futures.ThreadPoolExecutor() as pool:
    running = pool.submit(run_python, NAMED + 'import time\ntime.sleep(999)', limits=LONG)
    (sample,) = wait_for(living)
    status, limits, mounts, oom = (
      Path(f'/proc/{sample}/{name}').read_text() for name in ('status', 'limits', 'mountinfo', 'oom_score_adj')
    )
    namespaces = {name: os.readlink(f'/proc/{sample}/ns/{name}') for name in ('net', 'mnt', 'pid', 'ipc')}
    group, session = os.getpgid(sample), os.getsid(sample)
    os.kill(sample, 9)
    assert running.result().reason == 'killed by signal 9'
  assert [name for name, inside in namespaces.items() if inside == os.readlink(f'/proc/self/ns/{name}')] == []
  values = {line.split(':')[0]: line.split()[1:] for line in status.splitlines()}
  assert values['Seccomp'] == ['2'] and values['NoNewPrivs'] == ['1']
  assert [int(*values[name], 16) for name in ('CapEff', 'CapPrm', 'CapAmb')] == [0, 0, 0]
  if IS_ROOT:
    # Real, effective, saved and file system user.
    assert len(set(values['Uid'] + values['Gid'])) == 1 and int(values['Uid'][0]) > 65536 and values['Groups'] == []
  for name, value in (('cpu time', '60'), ('address space', str(2**30)), ('file size', str(2**24)), ('core file', '0')):
    assert next(line for line in limits.splitlines() if line.startswith(f'Max {name}')).split()[-3:-1] == [value] * 2
  options = {line.split()[4]: line.split()[5].split(',') for line in mounts.splitlines()}
  assert {'/', '/sample', '/dev/null'} < options.keys()
  assert [path for path, option in options.items() if 'ro' not in option] == ['/sample']
  assert [path for path, option in options.items() if 'nosuid' not in option] == []
  assert oom.strip() == '1000'
  assert group == session == sample


def test_every_sample_of_root_has_its_own_user():
  program = 'import os\nprint(os.getuid())'
  users = {run_python(program).output for _ in range(3)}
  assert len(users) == (3 if IS_ROOT else 1)


@pytest.mark.parametrize('number', [1, 50])
def test_children_die_with_the_program(number):
  program = f"""{NAMED}
import os, time
ready, start = os.pipe()
for _ in range({number}):
  if os.fork() == 0:
    os.setsid()
    os.write(start, b'x')
    time.sleep(999)
for _ in range({number}): os.read(ready, 1)
"""
  # The fixture looks for what is left.
  outcome = run_python(program, limits=dataclasses.replace(LONG, processes=64))
  assert outcome.passed, outcome


def test_a_system_call_by_any_number_is_refused():
  column = list(sandbox_launcher.MACHINES).index(os.uname().machine)
  numbers = [pair[column] for pair in sandbox_launcher.FORBIDDEN]
  user_namespace = (1 << 28) | 17
  program = f"""
import ctypes, errno
c = ctypes.CDLL(None, use_errno=True)
def fails(number, *args):
  return errno.errorcode[ctypes.get_errno()] if c.syscall(number, *args) == -1 else ''
assert [number for number in {numbers} if fails(number, 0, 0, 0, 0, 0) != 'EPERM'] == []
assert fails({sandbox_launcher.CLONE[column]}, {user_namespace}, 0, 0, 0, 0) == 'EPERM'
assert fails({sandbox_launcher.CLONE3}, 0, 0) == 'ENOSYS'
"""
  outcome = run_python(program, limits=Limits(processes=8))
  assert outcome.passed, outcome


@pytest.mark.skipif(os.uname().machine != 'x86_64', reason='numbers of x86_64')
def test_calls_by_the_numbers_of_other_conventions_end_the_program():
  # getpid as x32 code would call it.
  assert run_python(f'import ctypes\nctypes.CDLL(None).syscall({0x40000000 | 39})').reason == 'killed by signal 31'


def test_a_listening_server_of_the_machine_is_out_of_reach():
  with socket.create_server(('127.0.0.1', 0)) as server:
    server.setblocking(False)
    program = f'import socket\nsocket.create_connection({server.getsockname()!r}, timeout=1)'
    assert not run_python(program).passed
    with pytest.raises(BlockingIOError):
      server.accept()


def test_nothing_is_left_when_the_caller_is_killed():
  program = NAMED + 'import time\ntime.sleep(999)'
  script = f'from archer_jax.tasks import sandbox; sandbox.run_python({program!r}, limits=sandbox.{LONG})'
  caller = subprocess.Popen([sys.executable, '-c', script], cwd=REPOSITORY)
  try:
    wait_for(living)
  finally:
    caller.kill()
    caller.wait()
  wait_for(lambda: not living())


def test_nothing_is_left_when_the_launcher_is_killed():
  with concurrent.futures.ThreadPoolExecutor() as pool:
    running = pool.submit(run_python, NAMED + 'import time\ntime.sleep(999)', limits=LONG)
    (sample,) = wait_for(living)
    status = Path(f'/proc/{sample}/status').read_text()
    os.kill(int(status.split('PPid:')[1].split()[0]), 9)
    with pytest.raises(RuntimeError, match='cannot be run in a sandbox'):
      running.result()
  wait_for(lambda: not living())


@pytest.mark.skipif(not IS_ROOT, reason='only root may choose groups')
def test_groups_of_the_caller_are_given_up():
  script = (
    'from archer_jax.tasks import sandbox; assert sandbox.run_python("import os; assert not os.getgroups()").passed'
  )
  assert subprocess.run([sys.executable, '-c', script], cwd=REPOSITORY, extra_groups=[4]).returncode == 0


def test_a_private_caller_shuts_out_no_sample():
  before = os.umask(0o077)
  try:
    assert run_python(PROGRAMS['own folder']).passed
  finally:
    os.umask(before)


def test_many_at_a_time():
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    outcomes = list(pool.map(run_python, [f'print({i})\nassert {i} % 2' for i in range(12)]))
  assert [outcome.passed for outcome in outcomes] == [False, True] * 6
  assert all(f'{i}\n' in outcome.output for i, outcome in enumerate(outcomes))


def test_output_is_text_and_whole():
  outcome = run_python('import os\nprint("où")\nos.write(2, "zwölf\\n".encode() + b"\\xff")\nprint("🂡", end="")')
  assert outcome.output == 'zwölf\n\ufffdoù\n🂡'
  exact = run_python('print("x" * 99)', limits=Limits(output_bytes=100))
  assert exact.passed and exact.output == 'x' * 99 + '\n'
  over = run_python('print("x" * 100)', limits=Limits(output_bytes=100))
  assert over.reason == 'wrote more than 100 bytes of output' and over.output == 'x' * 100
  late = run_python('print("seen", flush=True)\nwhile True: pass', limits=Limits(wall_seconds=0.4))
  assert late.output == 'seen\n'


def test_traceback_is_in_the_output():
  output = run_python('def f():\n  1 / 0\nf()').output
  assert '"/program.py", line 2, in f\n    1 / 0\n' in output and output.endswith(
    'ZeroDivisionError: division by zero\n'
  )


def test_a_long_program_is_read_whole():
  assert run_python(f'x = {"y" * 10**6!r}\nassert len(x) == 10 ** 6').passed


def test_verdicts_do_not_depend_on_random_hashes():
  assert len({run_python('print(hash("a"), list(set("abcdefgh")))').output for _ in range(3)}) == 1


@pytest.mark.parametrize('field', [field.name for field in dataclasses.fields(Limits)])
@pytest.mark.parametrize('value', [0, -1, float('nan'), float('inf'), True, '1', 1 << 62])
def test_bad_limits_name_the_field(field, value):
  with pytest.raises(ValueError, match=f'^{field} must be a (whole )?number above 0 .* got {value!r}$'):
    Limits(**{field: value})


def test_whole_numbers_where_they_are_needed():
  assert Limits(wall_seconds=0.5).wall_seconds == 0.5
  with pytest.raises(ValueError, match='cpu_seconds must be a whole number'):
    Limits(cpu_seconds=0.5)


def test_limits_too_tight_for_an_interpreter_are_no_verdict():
  with pytest.raises(
    RuntimeError, match=r'its interpreter does not start within these limits \((exit code|killed by signal) \d+\)'
  ):
    run_python('', limits=Limits(memory_bytes=1 << 22))


def test_other_systems_are_refused(monkeypatch):
  monkeypatch.setattr(sys, 'platform', 'darwin')
  with pytest.raises(RuntimeError, match=r'only on Linux.*darwin'):
    run_python('')


@pytest.mark.skipif(not IS_ROOT or not shutil.which('setpriv'), reason='takes a capability away from root')
def test_a_missing_protection_is_named():
  script = 'from archer_jax.tasks import sandbox; sandbox.run_python("")'
  command = ['setpriv', '--bounding-set', '-sys_admin', sys.executable, '-c', script]
  done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
  assert done.returncode == 1
  assert done.stderr.splitlines()[-1] == (
    'RuntimeError: a program cannot be run in a sandbox here: taking mount, pid, network and IPC namespaces '
    '(root needs CAP_SYS_ADMIN): Operation not permitted'
  )

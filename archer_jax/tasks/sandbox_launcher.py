"""Builds the sandbox of one program and watches over it; `sandbox.run_python` starts this file as a script.

It is a process of its own because it changes itself for good (namespaces, root folder), and because forking the
caller, which has JAX's threads, can deadlock. It imports little: every sample pays for it.

The program becomes the first process of a new pid namespace. It sees no process but those that it starts, and the
kernel kills all of them when it ends, also those that left its session. Its root folder is an empty one in memory,
into which the interpreter's files are mounted read-only; no other file of the machine has a name there.
"""

import ctypes
import os
import resource
import select
import struct
import sys
import time

# Mount points in the new root; the program starts in its folder, which is empty.
FOLDER = '/sample'
PROGRAM = '/program.py'

# What an interpreter and the extension modules of its standard library load.
SYSTEM_FILES = ('/lib', '/lib64', '/usr/lib', '/usr/lib64', '/etc/ld.so.cache', '/dev/null', '/dev/urandom')

# The two marks tell a failed sample from an interpreter that never started, and a program that ran to its end from
# one that left early with exit code 0 and so skipped its tests.
STARTED, ENDED = b'1', b'2'
BOOT = (
  "__import__('os').write({fd}, {started}); "
  "exec(compile(open('{program}', 'rb').read(), '{program}', 'exec')); "
  "__import__('os').write({fd}, {ended})"
)

# Hashes are seeded so that the order of a set, and with it a verdict, is the same in every run.
ENVIRONMENT = {'PATH': '/usr/bin:/bin', 'HOME': FOLDER, 'TMPDIR': FOLDER, 'PYTHONHASHSEED': '0'}

# Random users are drawn from numbers that distributions leave unused: above the containers' ranges, below 2 ** 31.
FIRST_USER, USERS = 0x70000000, 1 << 27
# The only user of a user namespace; as 0 the program would keep the rights that come with one.
NOBODY = 65534

SIGKILL = 9
CHUNK = 1 << 16

# <linux/sched.h>, <linux/mount.h> (the first three are MOUNT_ATTR_ as well as MS_), <linux/prctl.h>
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x20000, 0x8000000, 1 << 28, 1 << 29, 1 << 30
CLONE_NEW_ANY = 0x7E020000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE, MNT_DETACH = 0x1, 0x2, 0x4, 0x4000, 0x40000, 2
AT_FDCWD, AT_EMPTY_PATH, AT_RECURSIVE, OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH = -100, 0x1000, 0x8000, 1, 4
PR_SET_PDEATHSIG, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, PR_SET_NO_NEW_PRIVS = 1, 22, 2, 38
# System calls whose number is the same on every machine.
OPEN_TREE, MOVE_MOUNT, CLONE3, MOUNT_SETATTR = 428, 429, 435, 442

# By machine: its audit number, and the column of its numbers below.
MACHINES = {'x86_64': (0xC000003E, 0), 'aarch64': (0xC00000B7, 1)}
PIVOT_ROOT, CLONE = (155, 41), (56, 220)

# What the program may not call: signals, sockets, other namespaces, memory that no limit counts, other processes, the
# keyring that it inherits, and parts of the kernel that it has no use for or that would pass by the filter.
FORBIDDEN = (
  *((62, 129), (129, 138), (297, 240), (424, 424)),  # kill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_send_signal
  *((41, 198), (272, 97), (308, 268)),  # socket, unshare, setns
  *((319, 279), (447, 447), (29, 194), (64, 190), (68, 186)),  # memfd_create, memfd_secret, shmget, semget, msgget
  *((101, 117), (310, 270), (311, 271)),  # ptrace, process_vm_readv, process_vm_writev
  *((248, 217), (249, 218), (250, 219)),  # add_key, request_key, keyctl
  *((321, 280), (298, 241), (323, 282), (425, 425)),  # bpf, perf_event_open, userfaultfd, io_uring_setup
)

LIBC = ctypes.CDLL(None, use_errno=True)


def _call(what: str, function, *args) -> int:
  """Calls a C function that answers -1 for a failure, which becomes an OSError that says what was tried."""
  result = function(*(ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args))
  if result == -1:
    raise OSError(f'{what}: {os.strerror(ctypes.get_errno())}')
  return result


def _mount_memory(target: str, flags: int, options: str) -> None:
  """Mounts an empty folder that lives in memory."""
  what = f'mounting {target} with {options}'
  _call(what, LIBC.mount, b'tmpfs', target.encode(), b'tmpfs', flags, options.encode())


def _lock(what: str, fd: int, path: bytes, flags: int, attributes: int) -> None:
  """Makes a mount, or with AT_RECURSIVE a tree of mounts, read-only and whatever else `attributes` has."""
  struct_mount_attr = struct.pack('=4Q', attributes, 0, 0, 0)
  _call(f'locking {what}', LIBC.syscall, MOUNT_SETATTR, fd, path, flags, struct_mount_attr, len(struct_mount_attr))


def _detached_copy(path: str) -> int:
  """A read-only copy of the tree of mounts at a path, without a place in the file system; its file descriptor."""
  flags = OPEN_TREE_CLONE | AT_RECURSIVE | os.O_CLOEXEC
  tree = _call(f'copying {path}', LIBC.syscall, OPEN_TREE, AT_FDCWD, path.encode(), flags)
  nodev = 0 if path.startswith('/dev/') else MS_NODEV
  _lock(path, tree, b'', AT_EMPTY_PATH | AT_RECURSIVE, MS_RDONLY | MS_NOSUID | nodev)
  return tree


def _package_folders(libraries: list[str]) -> list[str]:
  """Folders of installed packages, which are hidden: a data set's package may hold the answers."""
  return [
    folder
    for library in libraries
    for name in os.listdir(library)
    if name.startswith('python')
    for folder in (f'{library}/{name}/site-packages', f'{library}/{name}/dist-packages')
    if os.path.isdir(folder)
  ]


def enter_namespaces() -> int | None:
  """Leaves the machine's mounts, network, shared memory and, for children, processes.

  Returns:
    The user that the program has to become where root started it: a number that nobody else has, since a shared user
    such as `nobody` would share its count of processes with other samples. None for an ordinary user, and for the root
    of a rootless container, who is one: there a user namespace takes every right away.

  Raises:
    OSError: a namespace is not to be had.
  """
  flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC
  user, group = os.geteuid(), os.getegid()
  with open('/proc/self/uid_map') as file:
    _, user_outside, _ = file.readline().split()
  if user == 0 and user_outside == '0':
    _call('taking mount, pid, network and IPC namespaces (root needs CAP_SYS_ADMIN)', LIBC.unshare, flags)
    return FIRST_USER + int.from_bytes(os.urandom(4), 'little') % USERS
  what = 'taking a user namespace with mount, pid, network and IPC namespaces (an ordinary user must be allowed to)'
  _call(what, LIBC.unshare, flags | CLONE_NEWUSER)
  for name, text in (('setgroups', 'deny'), ('uid_map', f'{NOBODY} {user} 1'), ('gid_map', f'{NOBODY} {group} 1')):
    with open(f'/proc/self/{name}', 'w') as file:
      file.write(text)
  return None


def build_root(program: bytes, user: int | None, file_bytes: int) -> None:
  """Replaces the root folder by one with the interpreter, the program and its own folder, and goes there."""
  _call('making mounts private', LIBC.mount, None, b'/', None, MS_REC | MS_PRIVATE, None)
  # Without `site`, sys.path is the standard library; conda and others keep shared libraries one folder above.
  libraries = [path for path in {'/usr/lib', '/usr/lib64', f'{sys.base_prefix}/lib'} if os.path.isdir(path)]
  paths = [path for path in (*SYSTEM_FILES, *libraries, *sys.path, sys.executable) if os.path.exists(path)]
  hidden = _package_folders(libraries)
  trees = [(path, os.path.isdir(path), _detached_copy(path)) for path in dict.fromkeys(paths)]
  # Any folder that exists will do: nobody but this process sees the mount.
  _mount_memory('/tmp', MS_NOSUID | MS_NODEV, 'mode=755')
  os.chdir('/tmp')
  for path, is_folder, tree in trees:
    target = path[1:]
    os.makedirs(target if is_folder else os.path.dirname(target), exist_ok=True)
    if not is_folder:
      os.close(os.open(target, os.O_CREAT, 0o644))
    _call(f'placing {path}', LIBC.syscall, MOVE_MOUNT, tree, b'', AT_FDCWD, target.encode(), MOVE_MOUNT_F_EMPTY_PATH)
  for path in hidden:
    _mount_memory(path[1:], MS_RDONLY | MS_NOSUID | MS_NODEV, 'size=4k')
  with open(PROGRAM[1:], 'wb') as file:
    file.write(program)
  os.mkdir(FOLDER[1:])
  owner = user or NOBODY
  size = f'size={file_bytes},nr_inodes=1024'
  _mount_memory(FOLDER[1:], MS_NOSUID | MS_NODEV, f'{size},mode=700,uid={owner},gid={owner}')
  _lock('the root folder', AT_FDCWD, b'.', 0, MS_RDONLY | MS_NOSUID | MS_NODEV)

  _, column = MACHINES[os.uname().machine]
  _call('changing the root folder', LIBC.syscall, PIVOT_ROOT[column], b'.', b'.')
  _call('leaving the old root folder', LIBC.umount2, b'.', MNT_DETACH)
  os.chdir(FOLDER)


def _filter() -> bytes:
  """A seccomp filter that answers forbidden calls with EPERM, as instructions of 8 bytes."""
  load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
  allow, refuse, absent, kill = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000  # EPERM is 1, ENOSYS 38
  audit_number, column = MACHINES[os.uname().machine]
  # (operation, instructions to skip if true, if false, operand)
  program = [
    (load, 0, 0, 4),  # the audit number: a 32-bit call has other numbers
    (equal, 1, 0, audit_number),
    (give, 0, 0, kill),
    (load, 0, 0, 0),  # the call's number
    (at_least, 0, 1, 0x40000000),  # x32, once more with other numbers
    (give, 0, 0, kill),
    # Its flags lie in memory, where a filter cannot look; the C library then falls back to clone.
    (equal, 0, 1, CLONE3),
    (give, 0, 0, absent),
  ]
  for numbers in FORBIDDEN:
    program += [(equal, 0, 1, numbers[column]), (give, 0, 0, refuse)]
  program += [
    (equal, 0, 3, CLONE[column]),
    (load, 0, 0, 16),  # its first argument: in a user namespace of its own the program could mount memory
    (any_bit, 0, 1, CLONE_NEW_ANY),
    (give, 0, 0, refuse),
    (give, 0, 0, allow),
  ]
  return b''.join(struct.pack('=HBBI', *instruction) for instruction in program)


def become_program(user: int | None, limits: dict[str, int], output: int, marks: int) -> None:
  """Turns this process into the program: `limits` by name of the resource, `output` and `marks` as descriptors."""
  # A group of its own: signals to the group would reach the launcher.
  os.setsid()
  os.dup2(os.open('/dev/null', os.O_RDWR), 0)
  os.dup2(output, 1)
  os.dup2(output, 2)
  os.set_inheritable(marks, True)
  for name, value in limits.items():
    try:
      resource.setrlimit(getattr(resource, name), (value, value))
    except ValueError:
      raise OSError(f'{name} cannot be set to {value}, which is above the limit of the caller') from None
  if user is not None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
  _call('giving up new privileges', LIBC.prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
  # In case that something outside kills the launcher.
  _call('tying the program to its launcher', LIBC.prctl, PR_SET_PDEATHSIG, SIGKILL)
  instructions = _filter()
  buffer = ctypes.create_string_buffer(instructions, len(instructions))
  struct_sock_fprog = struct.pack('@HP', len(instructions) // 8, ctypes.addressof(buffer))
  _call('filtering system calls', LIBC.prctl, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, struct_sock_fprog, 0, 0)
  boot = BOOT.format(fd=marks, program=PROGRAM, started=STARTED, ended=ENDED)
  os.execve(sys.executable, [sys.executable, '-S', '-s', '-P', '-X', 'utf8', '-c', boot], ENVIRONMENT)


def watch(process: int, output: int, wall_seconds: float, output_bytes: int) -> tuple[str | None, bytes]:
  """Waits until the program ends or passes a limit, or until the caller is gone (its socket closes).

  Args:
    process: descriptor of the program's process.
    output: descriptor of what it writes.
    wall_seconds: from now on.
    output_bytes: more than this ends it.

  Returns:
    The limit that it passed as a sentence, None if it ended by itself; what it wrote until then.
  """
  chunks, size = [], 0
  deadline = time.monotonic() + wall_seconds
  poll = select.poll()
  for fd in (0, process, output):
    poll.register(fd, select.POLLIN)
  while (left := deadline - time.monotonic()) > 0:
    ready = {fd for fd, _ in poll.poll(left * 1000)}
    if 0 in ready:
      return 'its caller has gone', b''
    if output in ready:
      chunk = os.read(output, CHUNK)
      chunks.append(chunk)
      size += len(chunk)
      if size > output_bytes:
        return f'wrote more than {output_bytes} bytes of output', b''.join(chunks)[:output_bytes]
      if not chunk:
        poll.unregister(output)
    elif process in ready:
      # Whoever could still write is dead by now, so the output has been read to its end.
      return None, b''.join(chunks)
  return f'took longer than {wall_seconds:g} s', b''.join(chunks)


def judge(status: int, seconds: float, cpu_seconds: int, marks: bytes) -> str:
  """How a program ended that passed no limit of `watch`, from its wait status and the seconds of processor time."""
  code = os.waitstatus_to_exitcode(status)
  # The limit's clock counts ticks; on a busy machine it can be a quarter ahead of the time that `wait` reports.
  if code == -SIGKILL and seconds >= 0.5 * cpu_seconds:
    return f'used more than {cpu_seconds} s of processor time'
  if code < 0:
    return f'killed by signal {-code}'
  if code > 0:
    return f'exit code {code}'
  return 'passed' if ENDED in marks else 'ended before its last line'


def run(wall: float, cpu: int, memory: int, processes: int, output: int, file_bytes: int, program: bytes) -> bytes:
  """Runs a program within the limits that `sandbox.Limits` describes.

  Returns:
    The reason as one line, then the output. A reason that starts with `!` says why there is no verdict.

  Raises:
    OSError: a protection is not to be had.
  """
  if os.uname().machine not in MACHINES:
    raise OSError(f'a filter of system calls is written for {" and ".join(MACHINES)}, not for {os.uname().machine}')
  os.umask(0o022)
  # Should memory run out, the sample is what the kernel ends.
  with open('/proc/self/oom_score_adj', 'w') as file:
    file.write('1000')
  user = enter_namespaces()
  build_root(program, user, file_bytes)
  limits = {
    'RLIMIT_CPU': cpu,
    'RLIMIT_AS': memory,
    # A user namespace counts the launcher too.
    'RLIMIT_NPROC': processes + (user is None),
    'RLIMIT_FSIZE': file_bytes,
    'RLIMIT_NOFILE': 64,
    'RLIMIT_MSGQUEUE': 0,
    'RLIMIT_CORE': 0,
  }
  output_end, output_start = os.pipe()
  marks_end, marks_start = os.pipe()
  child = os.fork()
  if child == 0:
    try:
      become_program(user, limits, output_start, marks_start)
    except BaseException as error:
      os.write(marks_start, f'!{error}'.encode())
    finally:
      os._exit(1)
  os.close(output_start)
  os.close(marks_start)
  try:
    reason, text = watch(os.pidfd_open(child), output_end, wall, output)
  finally:
    os.kill(child, SIGKILL)
    _, status, usage = os.wait4(child, 0)
  marks = os.read(marks_end, CHUNK)
  if marks.startswith(b'!'):
    return marks + b'\n'
  ended = judge(status, usage.ru_utime + usage.ru_stime, cpu, marks)
  if reason is None and not marks:
    cause = text.decode(errors='replace').replace('\n', ' ')
    return f'!its interpreter does not start within these limits ({ended}) {cause}\n'.encode()
  return f'{reason or ended}\n'.encode() + text


def main() -> None:
  """Reads the limits from the arguments and the program from the socket at 0, and answers there."""
  wall, *counts, size = sys.argv[1:]
  program = b''
  while len(program) < int(size) and (chunk := os.read(0, CHUNK)):
    program += chunk
  try:
    answer = run(float(wall), *map(int, counts), program)
  except Exception as error:
    answer = f'!{error}\n'.encode()
  while answer:
    answer = answer[os.write(0, answer) :]


if __name__ == '__main__':
  main()

"""The process around a run: the compilation cache, the other processes of a job, the facts a result may depend on.

Besides the command line this is the only place that touches `jax.config` or the environment.
"""

import dataclasses
from importlib import metadata
import json
import os
from pathlib import Path
import platform
import socket
import sys
import threading
import time
from typing import Any

# A process whose heartbeats stay away for this long is taken for dead, and the others end.
HEARTBEAT_SECONDS = 60
_POLL_SECONDS = 0.2
# What the coordination service keeps under these names is a job's.
_KEYS = 'archer_jax/'
_END = 'the end of the job'


def cache_folder() -> Path:
  """The folder of compiled programs in the user's own cache directory."""
  home = os.environ.get('XDG_CACHE_HOME', '')
  # A relative path is to be ignored, says the XDG base directory specification.
  base = Path(home) if Path(home).is_absolute() else Path.home() / '.cache'
  return base / 'archer_jax' / 'xla'


# What JAX calls float32 products of float32 matrices; those of bfloat16 are the same under any of its names.
MATMUL_PRECISION = 'highest'


def set_up() -> None:
  """Makes JAX multiply float32 matrices in float32 and keep compiled programs between runs.

  By itself JAX multiplies them in bfloat16 on TPUs and in TensorFloat-32 on GPUs. What the user has told JAX of either
  stays. A folder that cannot be made only costs the time to compile again.
  """
  import jax

  if jax.config.jax_default_matmul_precision is None:
    jax.config.update('jax_default_matmul_precision', MATMUL_PRECISION)
  if jax.config.jax_compilation_cache_dir is not None:
    return
  try:
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
  except (OSError, RuntimeError):
    return
  jax.config.update('jax_compilation_cache_dir', str(folder))
  # Many small programs make the start slow; the default keeps only what took a second.
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.2)


def default_dtype() -> str:
  """The dtype to decode in where nobody chose one: bfloat16, except on CPUs, which mostly emulate it."""
  import jax

  return 'float32' if jax.default_backend() == 'cpu' else 'bfloat16'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processes:
  """The processes of a job, of which this is one; made by `join`.

  From then on JAX watches over them: one that dies ends the others with an error, at the latest after
  `HEARTBEAT_SECONDS`. Whether they decode together is another question, which their mesh answers.

  Attributes:
    index: this one, from 0.
    count: how many there are.
    timeout: how long any of them waits for the others where they should all be at the same time, in seconds.
  """

  index: int = 0
  count: int = 1
  timeout: int = 300

  def exchange(self, name: str, value: Any, *, replaces: str | None = None) -> list[Any]:
    """Gives every process the JSON value of each, by index; all must come to every `name`, once.

    Args:
      name: of the exchange, as an error calls it.
      value: of this process.
      replaces: an earlier exchange, to be forgotten.

    Raises:
      OSError: a process that did not come in time, or has ended.
    """
    if self.count == 1:
      return [value]
    import jax

    client, folder = _client(), f'{_KEYS}{name}/'
    try:
      client.key_value_set(f'{folder}{self.index}', json.dumps(value))
      client.wait_at_barrier(f'{_KEYS}{name}', 1000 * self.timeout)
      entries = client.key_value_dir_get(folder)
      if replaces is not None and self.index == 0:
        # Whoever is here has read what stood there.
        client.key_value_delete(f'{_KEYS}{replaces}/')
    except jax.errors.JaxRuntimeError as error:
      text = str(error).partition('\n')[0]
      if 'DEADLINE' in text:
        raise OSError(f'not all processes came to {name} within {self.timeout} s: {text}') from error
      raise OSError(f'another process has ended or cannot be reached, at {name}: {text}') from error
    found = {int(key.removeprefix(folder)): json.loads(text) for key, text in entries}
    return [found[index] for index in range(self.count)]

  def tell(self, fact: str) -> None:
    """Tells the others that a fact is true of this process; nobody waits for anybody."""
    if self.count > 1:
      _client().key_value_set(f'{_KEYS}{fact}/{self.index}', '', allow_overwrite=True)

  def told(self, fact: str) -> int:
    """How many processes have told a fact."""
    return len(_client().key_value_dir_get(f'{_KEYS}{fact}/')) if self.count > 1 else 0

  def leave(self) -> None:
    """Waits for the others, however long they take, and ends the coordination."""
    if self.count == 1:
      return
    import jax

    # JAX waits for all of them as well, but not that long, and where no signal gets through.
    self.tell(_END)
    while self.told(_END) < self.count:
      time.sleep(_POLL_SECONDS)
    jax.distributed.shutdown()


def _client() -> Any:
  from jax._src import distributed

  return distributed.global_state.client


def join(coordinator: str, num_processes: int | None, process_id: int | None, timeout: int) -> Processes:
  """Meets the other processes of a job. No backend of JAX may have been used before.

  Args:
    coordinator: `host:port` on which process 0 listens; or `auto`, which takes all three from SLURM, Open MPI,
      Kubernetes or the metadata of a TPU.
    num_processes: how many there are; None with `auto`.
    process_id: which this is; None with `auto`.
    timeout: the longest wait for the others, in seconds. If it passes, the process ends with exit code 1.

  Raises:
    OSError, ValueError: no cluster that could be found, or a port that is taken.
  """
  import jax
  from jax._src import distributed

  auto = coordinator == 'auto'
  where = 'the coordinator' if auto else f'coordinator {coordinator}'
  if process_id == 0:
    _check_port(coordinator)
  # It would take SIGTERM away from Python.
  jax.config.update('jax_enable_preemption_service', False)
  # A connection that fails makes JAX abort the process with a stack trace; this comes first, and says what is wrong.
  message = (
    f'error: not all processes met at {where} within {timeout} s; check that it can be reached from every host and '
    'that every process runs'
  )
  watchdog = threading.Timer(timeout, _give_up, [message])
  watchdog.daemon = True
  watchdog.start()
  try:
    jax.distributed.initialize(
      None if auto else coordinator,
      num_processes,
      process_id,
      initialization_timeout=timeout + 60,
      heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
    )
  except ValueError as error:
    raise ValueError(f'coordinator auto found no cluster to take processes from: {error}') from error
  except RuntimeError as error:
    raise OSError(f'{where} cannot be joined: {str(error).splitlines()[0]}') from error
  finally:
    watchdog.cancel()
  state = distributed.global_state
  return Processes(index=state.process_id, count=state.num_processes, timeout=timeout)


def _check_port(coordinator: str) -> None:
  """Raises OSError if process 0 cannot listen on the port, on which JAX would crash."""
  port = int(coordinator.rpartition(':')[2])
  family = socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET
  try:
    with socket.socket(family) as listener:
      # Connections that have ended may linger on a port that is free.
      listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      listener.bind(('', port))
      listener.listen()
  except OSError as error:
    raise OSError(
      f'port {port} of coordinator {coordinator} cannot be listened on ({error.strerror}): another job may have it, '
      'or process_id 0 is given twice'
    ) from error


def _give_up(message: str) -> None:
  print(message, file=sys.stderr, flush=True)
  os._exit(1)


def count_local_devices() -> int:
  """How many devices this process has."""
  import jax

  return jax.local_device_count()


def on_tpu_slice() -> bool:
  """Whether this is one of several machines with TPUs, told without touching these."""
  import jax  # noqa: F401 (its import looks for them)
  from jax._src import cloud_tpu_init
  from jax._src import clusters

  if not cloud_tpu_init.running_in_cloud_tpu_vm:
    return False
  slices = [kind for kind in clusters.ClusterEnv._cluster_types if kind.name in ('gcetpu', 'gketpu')]
  return any(kind.is_env_present() and kind.get_process_count() > 1 for kind in slices)


def facts() -> dict[str, Any]:
  """Versions, devices and precision, as a result file states them."""
  import jax
  import jaxlib

  try:
    version = metadata.version('archer_jax')
  except metadata.PackageNotFoundError:
    version = None
  device = jax.local_devices()[0]
  return {
    'archer_jax': version,
    'jax': jax.__version__,
    'jaxlib': jaxlib.__version__,
    'python': platform.python_version(),
    'backend': jax.default_backend(),
    'device': device.device_kind,
    'platform_version': device.client.platform_version.splitlines()[0],
    'matmul_precision': jax.config.jax_default_matmul_precision,
  }

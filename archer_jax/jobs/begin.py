"""The start of a job: what is to run is compared with what its folder says and with the other processes."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any
from typing import Protocol

from archer_jax.checkpoints.manifest import BUNDLED
from archer_jax.engine.settings import Settings
from archer_jax.jobs import output
from archer_jax.jobs.folder import MANIFEST
from archer_jax.jobs.folder import check_job
from archer_jax.jobs.folder import differences
from archer_jax.jobs.folder import make_manifest
from archer_jax.jobs.folder import open_path
from archer_jax.jobs.folder import scan_input
from archer_jax.jobs.folder import write_manifest
from archer_jax.jobs.part import Part

if TYPE_CHECKING:
  from etils import epath


class Group(Protocol):
  """The processes of a job as one of them sees them; `runtime.Processes` is one."""

  index: int
  count: int

  def exchange(self, name: str, value: Any, *, replaces: str | None = None) -> list[Any]: ...

  def tell(self, fact: str) -> None: ...

  def told(self, fact: str) -> int: ...

  def leave(self) -> None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
  """A job that may begin or go on; made by `check_start`.

  Attributes:
    folder: of the job.
    manifest: of the job.
    has_begun: whether the folder has it already.
    processes: of the job.
    together: whether all processes decode all records on one mesh, of which the first then writes the only part.
  """

  folder: 'epath.Path'
  manifest: Mapping[str, Any]
  has_begun: bool
  processes: Group
  together: bool


def check_start(
  options: Mapping[str, Any],
  settings: Settings,
  processes: Group,
  facts: Callable[[], Mapping[str, Any]],
  *,
  together: bool = False,
) -> Start:
  """Checks a job before anything is loaded; nothing is written.

  Every process comes to the same verdict, since all of them hear what each has found.

  Args:
    options: the flags that are no settings, by name, with the dtype that is meant.
    settings: the run's settings.
    processes: of the job.
    facts: tells versions and devices.
    together: see `Start`.

  Raises:
    ValueError: an input that cannot be read or has no records, the folder of another job, or processes that were not
      started alike. All processes know then that they end.
    OSError: a process that does not answer.
  """
  folder = open_path(options['output'])
  finding = {'problem': None}
  try:
    source = scan_input(open_path(options['input']))
    if not source['records']:
      raise ValueError(f'input {options["input"]} has no records')
    n_parts = 1 if together else processes.count
    manifest = make_manifest(_configuration(options, settings), source, n_parts, facts())
    has_begun = check_job(folder, manifest, options['resume'])
    output.check_result_folders(options, resume=has_begun)
    finding |= {'manifest': manifest, 'has_begun': has_begun}
  except (ValueError, OSError) as error:
    finding['problem'] = str(error)
  findings = processes.exchange('the start', finding)
  _raise_first([finding['problem'] for finding in findings], processes)
  if difference := _difference(findings):
    raise ValueError(difference)
  return Start(folder=folder, manifest=manifest, has_begun=has_begun, processes=processes, together=together)


def begin(start: Start, problem: str | None) -> Part:
  """Writes the manifest of a job if there is none, and returns this process's part.

  Args:
    start: from `check_start`.
    problem: why this process cannot take part after all.

  Raises:
    ValueError: such a problem of any process, or a folder that cannot be written. All processes know then that they
      end.
    OSError: a process that does not answer.
  """
  folder, processes = start.folder, start.processes
  _raise_first(processes.exchange('the loaded checkpoint', problem), processes)
  if processes.index == 0 and not start.has_begun:
    try:
      write_manifest(folder, start.manifest)
    except OSError as error:
      problem = str(error)
  _raise_first(processes.exchange('the manifest', problem), processes)
  if not (folder / MANIFEST).exists():
    raise ValueError(
      f'output {folder} has no {MANIFEST}, which process 0 wrote: it must be on storage that all processes share'
    )
  n_parts = start.manifest['n_parts']
  is_read_only = start.together and processes.index > 0
  part = Part(folder, processes.index % n_parts, n_parts, start.manifest['input']['records'], is_read_only=is_read_only)
  if start.together:
    # They must feed the same requests.
    finished = hashlib.sha256(json.dumps(sorted(part.finished)).encode()).hexdigest()
    if len(set(processes.exchange('the records', finished))) > 1:
      raise ValueError(f'the processes do not see the same records in output {folder}; all must share its storage')
  return part


def _configuration(options: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
  """Everything by name that a record depends on besides its line of the input."""
  folder = BUNDLED if options['checkpoint'] is None else Path(options['checkpoint'])
  # Its manifest has the sizes and digests of everything else.
  digest = hashlib.sha256((folder / 'manifest.json').read_bytes()).hexdigest()
  return {'checkpoint_sha256': digest, 'dtype': options['dtype'], **settings.by_name()}


def _raise_first(problems: Sequence[str | None], processes: Group) -> None:
  """Raises ValueError with this process's problem, or with the first one that another process has, if there is any."""
  if problems[processes.index] is not None:
    raise ValueError(problems[processes.index])
  for process, problem in enumerate(problems):
    if problem is not None:
      raise ValueError(f'process {process}: {problem}')


def _difference(findings: Sequence[Mapping[str, Any]]) -> str | None:
  """In what the processes were not started alike, if in anything."""
  first = findings[0]['manifest']
  for process, finding in enumerate(findings):
    other = finding['manifest']
    if text := differences(first['configuration'], other['configuration'], ('process 0 has', f'process {process}')):
      return f'all processes must be started alike, but {text}'
    if other['input'] != first['input']:
      return f'all processes must read the same input, but that of process {process} differs from that of process 0'
    if finding['has_begun'] != findings[0]['has_begun']:
      return f'process {process} does not see the same output as process 0; it must be on storage that all share'
  return None

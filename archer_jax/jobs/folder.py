"""A job's folder, from which it goes on whatever ended it: paths anywhere, the manifest, files that are whole.

    manifest.json                             what the job is: configuration, input, number of parts; written once
    part-00003-of-00008.segment-0000.jsonl    what one run of a process has finished, as it came
    part-00003-of-00008.jsonl                 the complete part in input order; then its segments are gone
    metrics-00003.jsonl                       figures of the process over time

Record i belongs to part i modulo the number of parts. A chunk's records are on the disk before the chunk after the next
is decoded, so a run that is killed loses the rows that were in its slots and nothing else. Folders may be anywhere that
etils.epath reaches; stores of objects, which cannot append, get a segment every `FLUSH_SECONDS`.
"""

from collections.abc import Iterable
from collections.abc import Mapping
import contextlib
import hashlib
import json
import os
import re
from typing import TYPE_CHECKING
from typing import Any

if TYPE_CHECKING:
  from etils import epath

FORMAT_VERSION = 1
MANIFEST = 'manifest.json'
# How often a store of objects, which cannot append, gets what is new.
FLUSH_SECONDS = 30.0

_OURS = re.compile(r'(part|metrics)-\d{5}\b.*\.jsonl')


def is_folder(output: str | None) -> bool:
  """Whether `--output` names a job's folder: it ends in a slash, or is a folder already."""
  return output not in (None, '-') and (output.endswith('/') or open_path(output).is_dir())


def open_path(text: str) -> 'epath.Path':
  """A path anywhere; raises ValueError for a store whose driver is not installed."""
  # Not at the top, which --help would wait for.
  from etils import epath

  try:
    path = epath.Path(text)
    if not is_local(path):
      path.exists()
  except ImportError as error:
    raise ValueError(f'{text} needs a driver that is not installed: {error}') from error
  return path


def is_local(path: 'epath.Path') -> bool:
  """Whether a path is in a file system, which can append, rename and lock."""
  return '://' not in os.fspath(path)


def scan_input(path: 'epath.Path') -> dict[str, Any]:
  """What an input is: SHA-256, bytes, and lines that are not blank, each of which is a record.

  Raises:
    ValueError: it cannot be read.
  """
  digest, size, records = hashlib.sha256(), 0, 0
  try:
    with path.open('rb') as file:
      for line in file:
        digest.update(line)
        size += len(line)
        records += bool(line.strip())
  except OSError as error:
    raise ValueError(f'input {path} cannot be read: {error.strerror or error}') from error
  return {'sha256': digest.hexdigest(), 'bytes': size, 'records': records}


def make_manifest(
  configuration: Mapping[str, Any], source: Mapping[str, Any], n_parts: int, versions: Mapping[str, Any]
) -> dict[str, Any]:
  """The content of a job's manifest.

  Args:
    configuration: everything by name that a record depends on besides its line of the input.
    source: the input, from `scan_input`.
    n_parts: one per process.
    versions: what it was begun with; a later run may have others.
  """
  return {
    'format_version': FORMAT_VERSION,
    'n_parts': n_parts,
    'configuration': dict(configuration),
    'configuration_sha256': _configuration_sha256(configuration),
    'input': dict(source),
    'versions': dict(versions),
  }


def _configuration_sha256(configuration: Mapping[str, Any]) -> str:
  return hashlib.sha256(json.dumps(configuration, sort_keys=True).encode()).hexdigest()


def check_job(folder: 'epath.Path', manifest: Mapping[str, Any], resume: bool) -> bool:
  """Whether the job has been begun, by its manifest in `folder`.

  Args:
    folder: need not exist.
    manifest: of the job that is to run.
    resume: whether a job that has been begun may go on.

  Raises:
    ValueError: the folder of another job, naming what differs, or a job that must not go on.
  """
  found = _read_manifest(folder)
  if found is None:
    strays = sorted(path.name for path in folder.iterdir() if _OURS.fullmatch(path.name)) if folder.is_dir() else []
    if strays:
      raise ValueError(f'output {folder} has {strays[0]} but no {MANIFEST}: it is no job that could go on')
    return False
  if not resume:
    raise ValueError(f'output {folder} has a job in it already; give --resume to go on with it')
  if different := differences(found['configuration'], manifest['configuration'], ('it has', 'this run')):
    raise ValueError(f'output {folder} is a job of another configuration: {different}')
  old, new = found['input'], manifest['input']
  if old != new:
    raise ValueError(
      f'output {folder} is a job of another input, of {old["records"]} records, {old["bytes"]} bytes and SHA-256 '
      f'{old["sha256"][:12]}; this one has {new["records"]}, {new["bytes"]} and {new["sha256"][:12]}'
    )
  if found['n_parts'] != manifest['n_parts']:
    raise ValueError(
      f'output {folder} is a job of {found["n_parts"]} processes and goes on with as many, got {manifest["n_parts"]}'
    )
  return True


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any], who: tuple[str, str]) -> str:
  """Names what differs between two configurations and `who` has which, or gives an empty text."""
  names = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
  said = lambda values: ' and '.join(f'{name}={values.get(name)}' for name in names)
  return f'{who[0]} {said(theirs)}, {who[1]} {said(ours)}' if names else ''


def write_manifest(folder: 'epath.Path', manifest: Mapping[str, Any]) -> None:
  """Makes the folder and its manifest; raises OSError if it cannot be written."""
  folder.mkdir(parents=True, exist_ok=True)
  write_whole(folder / MANIFEST, [(json.dumps(manifest, indent=2, ensure_ascii=False) + '\n').encode()])


def _read_manifest(folder: 'epath.Path') -> dict[str, Any] | None:
  path = folder / MANIFEST
  if not path.exists():
    return None
  try:
    content = json.loads(path.read_bytes())
    if content['format_version'] != FORMAT_VERSION:
      raise ValueError(f'format_version is {content["format_version"]}, this version reads {FORMAT_VERSION}')
    if content['configuration_sha256'] != _configuration_sha256(content['configuration']):
      raise ValueError('configuration does not have the SHA-256 that is written beside it')
    for name in ('sha256', 'bytes', 'records'):
      content['input'][name]
    content['n_parts'] + 1
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(f'{path} is not the manifest of a job: {type(error).__name__}: {error}') from error
  return content


def write_whole(path: 'epath.Path', chunks: Iterable[bytes]) -> None:
  """Writes a file that is there whole or not at all, and on the disk when this returns.

  Raises:
    OSError: what hindered it.
  """
  if not is_local(path):
    # An object appears when it is closed.
    with path.open('wb') as file:
      for chunk in chunks:
        file.write(chunk)
    return
  temporary = path.parent / f'.{path.name}.tmp'
  try:
    with open(temporary, 'wb') as file:
      for chunk in chunks:
        file.write(chunk)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)
  except OSError as error:
    with contextlib.suppress(OSError):
      os.remove(temporary)
    raise OSError(f'output {path} cannot be written: {error.strerror}') from error


def sync_folder(folder: 'epath.Path') -> None:
  """Has the names in a local folder on the disk."""
  # Only POSIX opens folders.
  if os.name == 'posix':
    descriptor = os.open(folder, os.O_RDONLY)
    try:
      os.fsync(descriptor)
    finally:
      os.close(descriptor)

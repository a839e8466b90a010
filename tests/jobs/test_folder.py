import hashlib
import json
import os
import resource

from etils import epath
import pytest

from archer_jax.jobs import folder as module
from archer_jax.jobs.folder import MANIFEST
from archer_jax.jobs.folder import check_job
from archer_jax.jobs.folder import is_folder
from archer_jax.jobs.folder import is_local
from archer_jax.jobs.folder import make_manifest
from archer_jax.jobs.folder import open_path
from archer_jax.jobs.folder import scan_input
from archer_jax.jobs.folder import write_manifest
from archer_jax.jobs.folder import write_whole

SOURCE = {'sha256': 'a' * 64, 'bytes': 100, 'records': 9}


def manifest(n_parts=2, source=SOURCE, **configuration):
  return make_manifest({'threshold': 0.6, 'seed': 0, **configuration}, source, n_parts, {'jax': '1'})


def test_what_is_a_folder(tmp_path):
  assert is_folder(f'{tmp_path}/new/') and is_folder(str(tmp_path))
  assert not is_folder(f'{tmp_path}/new') and not is_folder('-') and not is_folder(None)


def test_a_store_without_its_driver(monkeypatch):
  def lacks(self, name):
    raise ImportError(f'Install {name}fs')

  monkeypatch.setattr(type(epath.backend.fsspec_backend), '_get_filesystem', lacks)
  with pytest.raises(ValueError, match=r's3://bucket/x needs a driver that is not installed: Install s3fs'):
    open_path('s3://bucket/x')


def test_scan_of_an_input(tmp_path):
  content = b'{"a": 1}\n\n  \r\n{"a": 2}\nno json\nlast without end'
  (tmp_path / 'in').write_bytes(content)
  assert scan_input(epath.Path(tmp_path / 'in')) == {
    'sha256': hashlib.sha256(content).hexdigest(), 'bytes': len(content), 'records': 4,
  }  # fmt: skip


def test_a_job_is_begun_once_and_goes_on(tmp_path):
  folder = epath.Path(tmp_path / 'a' / 'job')
  assert check_job(folder, manifest(), resume=False) is False
  assert check_job(folder, manifest(), resume=True) is False
  write_manifest(folder, manifest())
  assert os.listdir(folder) == [MANIFEST]
  content = json.loads((folder / MANIFEST).read_text())
  assert content['configuration'] == {'threshold': 0.6, 'seed': 0} and content['input'] == SOURCE
  assert check_job(folder, manifest(), resume=True) is True
  # What it was begun with need not be what it goes on with.
  assert check_job(folder, {**manifest(), 'versions': {}}, resume=True) is True
  with pytest.raises(ValueError, match=r'job has a job in it already; give --resume'):
    check_job(folder, manifest(), resume=False)


@pytest.mark.parametrize(
  ('other', 'message'),
  [
    (manifest(threshold=0.7), r'another configuration: it has threshold=0.6, this run threshold=0.7$'),
    (manifest(threshold=0.7, seed=1), r'it has threshold=0.6 and seed=0, this run threshold=0.7 and seed=1$'),
    (manifest(shadow='self'), r'it has shadow=None, this run shadow=self$'),
    (
      manifest(source={'sha256': 'b' * 64, 'bytes': 101, 'records': 10}),
      r'another input, of 9 records, 100 bytes and SHA-256 aaaaaaaaaaaa; this one has 10, 101 and bbbbbbbbbbbb$',
    ),
    (manifest(source={**SOURCE, 'sha256': 'b' * 64}), r'aaaaaaaaaaaa; this one has 9, 100 and bbbbbbbbbbbb$'),
    (manifest(n_parts=4), r'a job of 2 processes and goes on with as many, got 4$'),
  ],
)
def test_another_job(tmp_path, other, message):
  folder = epath.Path(tmp_path)
  write_manifest(folder, manifest())
  before = (folder / MANIFEST).read_bytes()
  with pytest.raises(ValueError, match=message):
    check_job(folder, other, resume=True)
  assert os.listdir(folder) == [MANIFEST] and (folder / MANIFEST).read_bytes() == before


@pytest.mark.parametrize(
  ('content', 'message'),
  [
    ('{"format_version"', 'is not the manifest of a job: JSONDecodeError'),
    ('[]', 'is not the manifest of a job: TypeError'),
    ('{"checkpoint": 1}', "is not the manifest of a job: KeyError: 'format_version'"),
    (json.dumps({**manifest(), 'format_version': 7}), 'format_version is 7, this version reads 1'),
    (json.dumps({**manifest(), 'input': {}}), "KeyError: 'sha256'"),
    (json.dumps({**manifest(), 'configuration': {}}), 'configuration does not have the SHA-256'),
  ],
)
def test_a_damaged_manifest(tmp_path, content, message):
  (tmp_path / MANIFEST).write_text(content)
  with pytest.raises(ValueError, match=message):
    check_job(epath.Path(tmp_path), manifest(), resume=True)


@pytest.mark.parametrize('name', ['part-00000-of-00001.jsonl', 'part-00000-of-00001.segment-0000.jsonl'])
def test_records_that_no_manifest_explains(tmp_path, name):
  (tmp_path / 'notes.txt').touch()
  assert check_job(epath.Path(tmp_path), manifest(), resume=True) is False
  (tmp_path / name).touch()
  with pytest.raises(ValueError, match=f'has {name} but no manifest.json'):
    check_job(epath.Path(tmp_path), manifest(), resume=True)


def test_a_file_is_whole_or_not_there(tmp_path):
  path = epath.Path(tmp_path / 'x')
  write_whole(path, [b'old'])
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
  try:
    with pytest.raises(OSError, match=r'^output .*x cannot be written: File too large$'):
      write_whole(path, [b'new'] * 1000)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert os.listdir(tmp_path) == ['x'] and path.read_bytes() == b'old'
  # What a killed run has left is replaced.
  (tmp_path / '.x.tmp').write_text('half')
  write_whole(path, [b'n', b'ew'])
  assert os.listdir(tmp_path) == ['x'] and path.read_bytes() == b'new'


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
  events = []
  for name in ('fsync', 'replace'):
    call = getattr(os, name)
    monkeypatch.setattr(module.os, name, lambda *a, name=name, call=call: (events.append(name), call(*a))[1])
  write_whole(epath.Path(tmp_path / 'x'), [b'new'])
  assert events == ['fsync', 'replace', 'fsync']


def test_places():
  assert is_local(epath.Path('/a/b')) and is_local(epath.Path('a'))
  assert not is_local(epath.Path('gs://bucket/a'))

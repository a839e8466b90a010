import json
import os
import resource

from etils import epath
from fsspec.implementations.memory import MemoryFileSystem
import pytest

from archer_jax.engine.results import Result
from archer_jax.jobs import output
from archer_jax.jobs import part as module
from archer_jax.jobs.part import Part
from archer_jax.jobs.part import part_lock

# Ids that a file must give back as they are.
IDS = ['é', None, None, {'a': [1, 2.5]}, 10**30, 'x\u2028y', '', 0, True, 'last']


def result(index):
  error = 'it is bad' if index == 4 else None
  return Result(
    index=index, id=IDS[index], text='a"\n', token_ids=[index, 7], finish_reason='error' if error else 'stop',
    seed=index, steps=index, error=error,
  )  # fmt: skip


def lines(indices):
  return ''.join(output.record_line(result(index)) for index in indices).encode()


def names(folder):
  return sorted(path.name for path in epath.Path(folder).iterdir())


def test_what_is_finished_stays_and_ends_in_input_order(tmp_path):
  folder = epath.Path(tmp_path)
  part = Part(folder, 0, 1, 10)
  assert part.total == 10 and part.finished == set()
  part.write([])
  assert names(folder) == []
  part.write([result(7), result(2)])
  part.write([result(9)])
  # Without having been closed.
  part = Part(folder, 0, 1, 10)
  assert part.finished == {7, 2, 9}
  assert [index for index in range(10) if part.wants(index)] == [0, 1, 3, 4, 5, 6, 8]
  part.write([result(index) for index in (8, 6, 5, 4, 3, 1, 0)])
  assert names(folder) == [f'part-00000-of-00001.segment-000{n}.jsonl' for n in (0, 1)]
  part.complete()
  assert names(folder) == ['part-00000-of-00001.jsonl']
  assert (tmp_path / 'part-00000-of-00001.jsonl').read_bytes() == lines(range(10))
  assert part.is_complete and part.errors == 1
  again = Part(folder, 0, 1, 10)
  assert again.is_complete and again.errors == 1 and len(again.finished) == 10
  again.complete()
  assert (tmp_path / 'part-00000-of-00001.jsonl').read_bytes() == lines(range(10))


def test_parts_share_the_input(tmp_path):
  for index in range(3):
    part = Part(epath.Path(tmp_path), index, 3, 10)
    share = [i for i in range(10) if part.wants(i)]
    assert share == list(range(index, 10, 3)) and part.total == len(share)
    part.write([result(i) for i in reversed(share)])
    part.complete()
    assert (tmp_path / f'part-0000{index}-of-00003.jsonl').read_bytes() == lines(share)
  # More processes than records.
  part = Part(epath.Path(tmp_path), 11, 12, 10)
  part.complete()
  assert part.total == 0 and (tmp_path / 'part-00011-of-00012.jsonl').read_bytes() == b''


@pytest.mark.parametrize('cut', [1, 10, 40])
def test_a_torn_last_line_is_no_record(tmp_path, cut):
  part = Part(epath.Path(tmp_path), 0, 1, 3)
  part.write([result(1), result(0)])
  segment = tmp_path / 'part-00000-of-00001.segment-0000.jsonl'
  os.truncate(segment, segment.stat().st_size - cut)
  part = Part(epath.Path(tmp_path), 0, 1, 3)
  assert part.finished == {1}
  part.write([result(2), result(0)])
  part.complete()
  assert (tmp_path / 'part-00000-of-00001.jsonl').read_bytes() == lines(range(3))


def test_a_tail_that_a_power_failure_left_empty(tmp_path):
  part = Part(epath.Path(tmp_path), 0, 1, 3)
  part.write([result(1)])
  with open(tmp_path / 'part-00000-of-00001.segment-0000.jsonl', 'ab') as file:
    file.write(bytes(100))
  assert Part(epath.Path(tmp_path), 0, 1, 3).finished == {1}


@pytest.mark.parametrize(
  'line', [b'no json\n', b'{}\n', b'{"index": 1, "record": {"finish_reason": "stop"}}\n', b'{"index": 8}\n']
)
def test_a_damaged_line_is_not_passed_over(tmp_path, line):
  # Of the second of two parts of four records; 1 is its own, and 8 nobody's.
  whole = json.dumps({'index': 3, 'record': result(3).record()}).encode() + b'\n'
  if b'"index": 1,' in line:
    line = line.replace(b'"index": 1', b'"index": 2')
  (tmp_path / 'part-00001-of-00002.segment-0000.jsonl').write_bytes(line + whole)
  with pytest.raises(ValueError, match=r'segment-0000\.jsonl is damaged: .* is no finished record'):
    Part(epath.Path(tmp_path), 1, 2, 4)


def test_a_kill_between_the_part_and_its_segments(tmp_path, monkeypatch):
  part = Part(epath.Path(tmp_path), 0, 1, 2)
  part.write([result(1), result(0)])
  with monkeypatch.context() as patch:
    patch.setattr(Part, '_remove_segments', lambda self: None)
    part.complete()
  assert len(names(tmp_path)) == 2
  assert Part(epath.Path(tmp_path), 0, 1, 2).is_complete
  assert names(tmp_path) == ['part-00000-of-00001.jsonl']


def test_a_full_disk_at_any_moment_leaves_what_goes_on(tmp_path):
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  size = len(lines(range(10)))
  full = 0
  # The first is too small for a line, the last but one for the part.
  for limit in (200, 500, 700, 900, size - 1, size):
    part = Part(epath.Path(tmp_path), 0, 1, 10)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
      for index in range(9, -1, -1):
        if part.wants(index):
          part.write([result(index)])
      part.complete()
    except OSError as error:
      full += 1
      assert 'cannot be written: File too large' in str(error)
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    for path in tmp_path.iterdir():
      assert path.read_bytes()[-1:] in (b'\n', b'')
  assert full == 5
  assert names(tmp_path) == ['part-00000-of-00001.jsonl']
  assert (tmp_path / 'part-00000-of-00001.jsonl').read_bytes() == lines(range(10))


def test_a_disk_that_is_full_when_it_is_synchronised(tmp_path, monkeypatch):
  part = Part(epath.Path(tmp_path), 0, 1, 2)
  part.write([result(0)])

  def fails(descriptor):
    raise OSError(28, 'No space left on device')

  with monkeypatch.context() as patch:
    patch.setattr(output.os, 'fsync', fails)
    with pytest.raises(OSError, match=r'^output .* cannot be written: No space left on device$'):
      part.write([result(1)])
  assert Part(epath.Path(tmp_path), 0, 1, 2).finished == {0}


def test_one_process_a_part(tmp_path):
  folder = epath.Path(tmp_path / 'job')
  with part_lock(folder, 1):
    with part_lock(folder, 0):
      pass
    with (
      pytest.raises(ValueError, match=r'part 1 of output .*job is being written by another process'),
      part_lock(folder, 1),
    ):
      pass
    assert names(folder) == ['.lock-00001']
  # Nothing is left of a job that was not begun.
  assert os.listdir(tmp_path) == []
  folder.mkdir()
  with part_lock(folder, 1):
    pass
  assert os.listdir(tmp_path) == ['job'] and names(folder) == []


def test_a_folder_that_cannot_be_made(tmp_path):
  (tmp_path / 'file').touch()
  with pytest.raises(ValueError, match='cannot be made or written'), part_lock(epath.Path(tmp_path / 'file' / 'x'), 0):
    pass
  with pytest.raises(ValueError, match='cannot be made or written'), part_lock(epath.Path('/proc/x'), 0):
    pass


class Objects(MemoryFileSystem):
  """A store that knows whole objects only."""

  store, pseudo_dirs = {}, ['']

  @classmethod
  def _strip_protocol(cls, path):
    return super()._strip_protocol(path.removeprefix('s3://'))

  def _open(self, path, mode='rb', **kwargs):
    assert mode in ('rb', 'wb')
    return super()._open(path, mode, **kwargs)

  def mv(self, *args, **kwargs):
    raise NotImplementedError

  cp_file = mv


@pytest.fixture
def bucket(monkeypatch):
  Objects.store.clear()
  monkeypatch.setattr(type(epath.backend.fsspec_backend), '_get_filesystem', lambda self, name: Objects())
  return epath.Path('s3://bucket/job')


def test_a_store_of_objects(bucket, monkeypatch):
  bucket.mkdir(parents=True)
  now = [0.0]
  monkeypatch.setattr(module.time, 'monotonic', lambda: now[0])
  with part_lock(bucket, 0):
    part = Part(bucket, 0, 1, 4)
    part.write([result(3)])
    assert Part(bucket, 0, 1, 4).finished == set()
    now[0] += module.FLUSH_SECONDS
    part.write([result(1)])
    assert Part(bucket, 0, 1, 4).finished == {1, 3}
    part.write([result(0)])
    part.close()
    assert names(bucket) == [f'part-00000-of-00001.segment-000{n}.jsonl' for n in (0, 1)]
    part = Part(bucket, 0, 1, 4)
    assert part.finished == {0, 1, 3}
    part.write([result(2)])
    part.complete()
    assert names(bucket) == ['part-00000-of-00001.jsonl']
    assert (bucket / 'part-00000-of-00001.jsonl').read_bytes() == lines(range(4))

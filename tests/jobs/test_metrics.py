import io
import json
import sys

from etils import epath
import jax
import numpy as np
import pytest

from archer_jax.engine.results import Result
from archer_jax.engine.stats import Summary
from archer_jax.jobs import metrics as module
from archer_jax.jobs.metrics import Progress
from archer_jax.jobs.profile import SECONDS
from archer_jax.jobs.profile import Profile


@pytest.fixture
def clock(monkeypatch):
  now = [100.0]
  monkeypatch.setattr(module.time, 'monotonic', lambda: now[0])
  return now


def results(count, *, error=False):
  if error:
    return [Result(index=0, id=0, finish_reason='error', error='bad')] * count
  return [Result(index=0, id=0, finish_reason='stop', seed=1, generated_tokens=30, steps=12, refreshes=3)] * count


def read(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_every_few_seconds(tmp_path, clock):
  path = epath.Path(tmp_path / 'metrics')
  progress, summary = Progress(total=20, finished=5, title=None, path=path), Summary()
  for seconds, new in ((1, results(2)), (4, results(2)), (2, []), (4, results(1, error=True)), (1, results(1))):
    clock[0] += seconds
    summary.add(new)
    progress.add(new, summary)
  progress.close(summary)
  progress.close(summary)
  first, second, last = read(path)
  assert (first['seconds'], first['records'], first['of'], first['rows'], first['errors']) == (5, 9, 20, 4, 0)
  assert (first['generated_tokens'], first['tokens_per_second']) == (120, 24)
  assert (first['refresh_share'], first['steps_per_row']) == (0.25, 12)
  # Of its own 6 seconds, in which nothing but a refused record came.
  assert (second['records'], second['errors'], second['rows'], second['tokens_per_second']) == (10, 1, 4, 0)
  assert (last['seconds'], last['records'], last['tokens_per_second']) == (12, 11, 30)
  # This process holds JAX at least.
  assert 1e7 < first['peak_host_bytes'] < 1e12 and first['peak_device_bytes'] is None


def test_lines_of_earlier_runs_stay_but_not_what_was_torn(tmp_path, clock):
  path = epath.Path(tmp_path / 'metrics')
  path.write_text('{"run": 1}\n{"run": 2}\n{"ru')
  progress, summary = Progress(total=None, title=None, path=path), Summary()
  summary.add(results(1))
  progress.close(summary)
  assert [line.get('run') for line in read(path)] == [1, 2, None]


def test_a_bar_over_rows(monkeypatch, clock):
  monkeypatch.setattr(sys, 'stderr', io.StringIO())
  progress, summary = Progress(total=20, finished=5, title='decode', path=None), Summary()
  clock[0] += 2
  summary.add(results(4))
  progress.add(summary_results := results(4), summary)
  assert len(summary_results) == 4
  progress.close(summary)
  last = sys.stderr.getvalue().rsplit('\r', 1)[-1]
  assert 'decode:  45%' in last and '9/20' in last
  assert '60 tokens/s, 25% refreshes, 12.0 steps/row' in last


def test_the_most_of_any_device(monkeypatch):
  class Device:
    def __init__(self, stats):
      self.memory_stats = lambda: stats

  devices = [Device({'peak_bytes_in_use': 5}), Device(None), Device({'peak_bytes_in_use': 7})]
  monkeypatch.setattr(jax, 'local_devices', lambda: devices)
  assert module.memory()['peak_device_bytes'] == 7


def test_a_profile_of_some_seconds(tmp_path, clock):
  profile = Profile(tmp_path / 'profile')
  assert profile.is_empty
  profile.stop()
  profile.tick()
  assert profile.is_recording
  np.asarray(jax.jit(lambda x: x + 1)(np.ones(3, np.float32)))
  clock[0] += SECONDS - 1
  profile.tick()
  assert profile.is_recording
  clock[0] += 1
  profile.tick()
  assert not profile.is_recording and not profile.is_empty
  assert list((tmp_path / 'profile').rglob('*.xplane.pb'))
  # Once only.
  profile.tick()
  profile.stop()

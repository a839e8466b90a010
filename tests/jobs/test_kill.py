"""Real processes that are killed, preempted and cut off, and what they end with."""

import json
import os
from pathlib import Path
import random
import resource
import signal
import subprocess
import sys
import time

import pytest

ROOT = Path(__file__).parents[2]
PART = 'part-00000-of-00001.jsonl'


@pytest.fixture
def start(text_path, tmp_path, tmp_path_factory):
  """Starts `run_decode.py`; all runs share their compiled programs."""
  cache = tmp_path_factory.getbasetemp() / 'cache'
  # As programs.QUICK is.
  flags = '--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false'
  environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'XDG_CACHE_HOME': str(cache), 'JAX_PLATFORMS': 'cpu'}
  environment['XLA_FLAGS'] = flags
  children = []

  def call(output, *arguments):
    command = [sys.executable, str(ROOT / 'run_decode.py'), f'--checkpoint={text_path}', '--input=in.jsonl']
    child = subprocess.Popen(
      [*command, f'--output={output}', '--batch_size=4', *arguments],
      cwd=tmp_path, env=environment, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    children.append(child)
    return child

  yield call
  for child in children:
    child.kill()
    child.communicate()


def write_input(path, count):
  rng = random.Random(7)
  records = [
    {
      'id': f'r{index}',
      'prompt': ''.join(rng.choices('0123456789+-= ', k=rng.randrange(1, 15))),
      # A canvas above 16 is another program.
      'gen_length': rng.randrange(4, 17 if count < 50 else 33),
      'temperature': rng.choice([0.0, 0.8]),
    }
    for index in range(count)
  ]
  records[count // 3] = {'id': 'bad', 'prompt': ''}
  path.write_text(''.join(json.dumps(record) + '\n' for record in records))


def finished(folder):
  """Indices in all segments."""
  text = ''.join(path.read_text() for path in sorted(folder.glob('part-*.segment-*.jsonl')))
  return [json.loads(line)['index'] for line in text.splitlines() if line.endswith('}}')]


def wait_for(folder, count, child):
  deadline = time.monotonic() + 900
  while child.poll() is None and len(finished(folder)) < count:
    assert time.monotonic() < deadline
    time.sleep(0.02)


@pytest.mark.parametrize(
  ('count', 'kills'), [(24, 1), pytest.param(200, 20, marks=pytest.mark.slow)], ids=['short', 'long']
)
def test_killed_at_random_moments(start, tmp_path, count, kills):
  write_input(tmp_path / 'in.jsonl', count)
  assert start('alone.jsonl').wait(900) == 1
  rng = random.Random(kills)
  folder = tmp_path / 'job'
  landed = 0
  for kill in range(kills):
    child = start('job/', '--resume')
    # Some before anything is finished, most in the middle of decoding and writing.
    wait_for(folder, len(finished(folder)) + rng.choice([0, 1, 3, 6, 9]), child)
    time.sleep(rng.random() * rng.choice([0.01, 0.1, 3]))
    landed += child.poll() is None
    child.kill()
    child.wait()
    indices = finished(folder)
    assert len(indices) == len(set(indices)), kill
    if (folder / PART).exists():
      break
  assert landed > kills // 2
  assert start('job/', '--resume').wait(900) == 1
  assert (folder / PART).read_bytes() == (tmp_path / 'alone.jsonl').read_bytes()
  assert not list(folder.glob('*.segment-*')) and not list(folder.glob('.*.tmp'))


@pytest.mark.slow
def test_a_preemption_notice(start, tmp_path):
  write_input(tmp_path / 'in.jsonl', 60)
  assert start('alone.jsonl').wait(900) == 1
  folder = tmp_path / 'job'
  child = start('job/')
  wait_for(folder, 5, child)
  child.send_signal(signal.SIGTERM)
  _, err = child.communicate(timeout=300)
  assert child.returncode == 75
  written = finished(folder)
  assert 5 <= len(written) < 60
  assert (
    err.splitlines()[-1] == f'preempted; {len(written)} of 60 records are written, and --resume goes on with the others'
  )
  # With another number of rows at a time.
  assert start('job/', '--resume', '--batch_size=3').wait(900) == 1
  assert (folder / PART).read_bytes() == (tmp_path / 'alone.jsonl').read_bytes()


@pytest.mark.slow
def test_a_disk_that_fills_up(start, tmp_path):
  write_input(tmp_path / 'in.jsonl', 60)
  assert start('alone.jsonl').wait(900) == 1
  folder = tmp_path / 'job'
  child = start('job/')
  resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (6000, 6000))
  _, err = child.communicate(timeout=900)
  assert child.returncode == 1
  (line,) = [line for line in err.splitlines() if line.startswith('error')]
  assert line == (
    'error: output job/part-00000-of-00001.segment-0000.jsonl cannot be written: File too large; what was finished is '
    'kept, and --resume goes on with it'
  )
  assert 5 < len(finished(folder)) < 60
  assert start('job/', '--resume').wait(900) == 1
  assert (folder / PART).read_bytes() == (tmp_path / 'alone.jsonl').read_bytes()

"""Jobs of several real processes on this machine, and what each says when they cannot run together."""

import contextlib
import json
import os
from pathlib import Path
import signal
import socket
import subprocess
import sys
import time

import pytest

from archer_jax.checkpoints.manifest import BUNDLED
from archer_jax.tasks import EVALUATION_SEED
from archer_jax.tasks import problem_at
from archer_jax.tasks import sort
from archer_jax.tasks import sudoku4
from archer_jax.tasks import sudoku6

ROOT = Path(__file__).parents[1]
RECORDS = [
  {'id': f'r{i}', 'prompt': '12+3='[: 1 + i % 5], 'temperature': 0.8 * (i % 3 == 0)}
  | ({'prompt': ''} if i == 7 else {})
  for i in range(31)
]


def free_port():
  with socket.socket() as listener:
    listener.bind(('localhost', 0))
    return listener.getsockname()[1]


@pytest.fixture
def start(text_path, tmp_path, tmp_path_factory):
  """Starts `run_decode.py` on the records; processes that still run are killed in the end."""
  (tmp_path / 'in.jsonl').write_text(''.join(json.dumps(record) + '\n' for record in RECORDS))
  cache = tmp_path_factory.getbasetemp() / 'cache'
  environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'XDG_CACHE_HOME': str(cache), 'JAX_PLATFORMS': 'cpu'}
  with contextlib.ExitStack() as stack:

    def call(*arguments, output='job/', checkpoint=text_path, **variables):
      base = [f'--checkpoint={checkpoint}', '--input=in.jsonl', f'--output={output}', '--batch_size=4']
      child = subprocess.Popen(
        [sys.executable, str(ROOT / 'run_decode.py'), *base, *map(str, arguments)],
        cwd=tmp_path, env={**environment, **variables}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
      )  # fmt: skip
      stack.callback(child.communicate)
      stack.callback(child.kill)
      return child

    yield call


def end(child, timeout=900):
  """Exit code and stderr."""
  err = child.communicate(timeout=timeout)[1]
  return child.returncode, err


def member(index, count, port, *arguments):
  return [f'--coordinator=localhost:{port}', f'--num_processes={count}', f'--process_id={index}', *arguments]


def read(path):
  return [json.loads(line) for line in path.read_text('utf-8').splitlines()]


def errors(err):
  return [line for line in err.splitlines() if line.startswith('error')]


def test_a_coordinator_that_cannot_be_reached(start, tmp_path):
  port = free_port()
  begin = time.monotonic()
  code, err = end(start(*member(1, 2, port, '--start_timeout=3')))
  assert code == 1 and time.monotonic() - begin < 60
  assert (
    err.startswith(f'error: not all processes met at coordinator localhost:{port} within 3 s') and err.count('\n') == 1
  )
  assert os.listdir(tmp_path) == ['in.jsonl', 'job'] or os.listdir(tmp_path) == ['job', 'in.jsonl']


def test_a_port_that_is_taken(start):
  with socket.create_server(('::', 0), family=socket.AF_INET6) as listener:
    port = listener.getsockname()[1]
    code, err = end(start(*member(0, 2, port, '--start_timeout=20')))
  assert code == 1 and err.count('\n') == 1
  assert err.startswith(f'error: port {port} of coordinator localhost:{port} cannot be listened on')
  assert 'process_id 0 is given twice' in err


def test_processes_with_different_configurations(start, tmp_path):
  port = free_port()
  children = [start(*member(i, 2, port, f'--threshold={0.6 + 0.1 * i}')) for i in range(2)]
  for child in children:
    code, err = end(child)
    assert code == 1
    assert errors(err) == [
      'error: all processes must be started alike, but process 0 has threshold=0.6, process 1 threshold=0.7'
    ]
  assert not (tmp_path / 'job' / 'manifest.json').exists()


def test_a_mistake_that_one_process_alone_sees(start, tmp_path):
  (tmp_path / 'empty').touch()
  port = free_port()
  children = [start(*member(0, 2, port)), start(*member(1, 2, port, '--input=empty'))]
  assert [errors(end(child)[1]) for child in children] == [
    ['error: process 1: input empty has no records'],
    ['error: input empty has no records'],
  ]


@pytest.mark.slow
def test_two_processes_with_the_same_id(start, tmp_path):
  port = free_port()
  children = [start(*member(0, 3, port, '--start_timeout=30'))]
  children += [start(*member(1, 3, port, '--start_timeout=30')) for _ in range(2)]
  first = [child for child in children[1:] if child.poll() is None]
  # One of the two says what is wrong at once, the others wait for the third in vain.
  ends = sorted(end(child)[1] for child in children)
  taken = 'error: part 1 of output job is being written by another process: either the job still runs, or process_id 1'
  assert all(err.startswith(f'error: not all processes met at coordinator localhost:{port}') for err in ends[:2])
  assert ends[2].startswith(taken)
  assert [child.returncode for child in children] == [1, 1, 1] and first


@pytest.mark.slow
def test_two_processes_share_a_job(start, tmp_path):
  assert end(start('--trace=trace_alone', output='alone.jsonl'))[0] == 1
  port = free_port()
  flags = ('--trace=trace', '--profile=profile', '--stats')
  children = [start(*member(index, 2, port, *flags)) for index in range(2)]
  ends = [end(child) for child in children]
  # Only the second has the bad record, and only the first shows a bar.
  assert [code for code, _ in ends] == [0, 1]
  assert '16/16' in ends[0][1] and 'decode part 0 of 2' in ends[0][1] and 'decode part' not in ends[1][1]
  names = sorted(path.name for path in (tmp_path / 'job').iterdir())
  assert names == [
    'manifest.json',
    'metrics-00000.jsonl',
    'metrics-00001.jsonl',
    *(f'part-0000{i}-of-00002.jsonl' for i in range(2)),
  ]
  expected = (tmp_path / 'alone.jsonl').read_bytes().splitlines()
  for index in range(2):
    part = (tmp_path / 'job' / f'part-0000{index}-of-00002.jsonl').read_bytes().splitlines()
    assert part == expected[index::2]
  assert len(list((tmp_path / 'trace').iterdir())) == 30


@pytest.mark.slow
def test_a_process_that_dies_at_the_start(start, tmp_path):
  port = free_port()
  waits = start(*member(0, 2, port, '--start_timeout=20'))
  dies = start(*member(1, 2, port, '--start_timeout=20'))
  time.sleep(1)
  dies.kill()
  begin = time.monotonic()
  code, err = end(waits)
  assert code == 1 and time.monotonic() - begin < 120 and errors(err)


@pytest.mark.slow
def test_processes_that_a_scheduler_started(start, tmp_path):
  job = {'SLURM_JOB_ID': str(free_port()), 'SLURM_STEP_NODELIST': 'localhost', 'SLURM_NTASKS': '2'}
  children = [
    start('--coordinator=auto', **job, SLURM_PROCID=str(index), SLURM_LOCALID=str(index)) for index in range(2)
  ]
  assert [end(child)[0] for child in children] == [0, 1]
  assert len(read(tmp_path / 'job' / 'part-00000-of-00002.jsonl')) == 16
  code, err = end(start('--coordinator=auto', output='other/'))
  assert code == 1 and err.startswith('error: coordinator auto found no cluster to take processes from')


@pytest.mark.slow
@pytest.mark.parametrize('mesh', ['model:2', 'data:2'])
def test_two_processes_with_one_mesh(start, tmp_path, mesh):
  assert end(start(output='alone.jsonl'))[0] == 1
  port = free_port()
  children = [start(*member(index, 2, port, f'--mesh={mesh}', '--trace=trace')) for index in range(2)]
  ends = [end(child) for child in children]
  # Both know how the job has ended; one writes.
  assert [code for code, _ in ends] == [1, 1], ends
  assert '31/31' in ends[0][1] and '31/31' not in ends[1][1]
  assert sorted(path.name for path in (tmp_path / 'job').glob('part*')) == ['part-00000-of-00001.jsonl']
  # Sums are in another order: records may differ in nothing but a text that stood on an edge, and these do not.
  assert (tmp_path / 'job' / 'part-00000-of-00001.jsonl').read_bytes() == (tmp_path / 'alone.jsonl').read_bytes()
  assert len(list((tmp_path / 'trace').iterdir())) == 30


@pytest.mark.slow
@pytest.mark.parametrize('mesh', [None, 'model:2'])
def test_200_requests_of_the_bundled_model(start, tmp_path, mesh):
  """Problems of three tasks, some sampled; what several processes write is what one writes."""
  lines = []
  for index in range(200):
    task, length = ((sudoku4, 17), (sudoku6, 42), (sort, 56))[index % 3]
    problem = problem_at(task, EVALUATION_SEED, index)
    line = {'id': f'r{index}', 'prompt': problem.prompt, 'gen_length': length, 'temperature': 0.5 * (index % 4 == 3)}
    lines.append(line | ({'prompt': ''} if index % 100 == 7 else {}))
  (tmp_path / 'in.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
  flags = {'checkpoint': BUNDLED}
  arguments = ['--batch_size=8'] + ([] if mesh is None else [f'--mesh={mesh}'])
  code, err = end(start('--batch_size=8', output='alone.jsonl', **flags))
  assert code == 1, err
  port = free_port()
  children = [start(*member(index, 2, port, *arguments), **flags) for index in range(2)]
  begin = time.monotonic()
  assert [end(child)[0] for child in children] == ([0, 1] if mesh is None else [1, 1])
  print(f'{time.monotonic() - begin:.0f} s')
  expected = (tmp_path / 'alone.jsonl').read_bytes().splitlines()
  parts = sorted((tmp_path / 'job').glob('part-*'))
  assert len(parts) == (2 if mesh is None else 1)
  for index, path in enumerate(parts):
    assert path.read_bytes().splitlines() == expected[index :: len(parts)]


LONG = ('--decoder=llada', '--gen_length=128', '--block_length=8')


@pytest.mark.slow
@pytest.mark.parametrize('victim', [0, 1])
@pytest.mark.parametrize('mesh', [None, 'model:2'])
def test_a_process_that_dies_ends_the_others(start, tmp_path, mesh, victim):
  port = free_port()
  arguments = (*LONG, *([] if mesh is None else [f'--mesh={mesh}']))
  children = [start(*member(index, 2, port, *arguments)) for index in range(2)]
  wait_for_records(tmp_path / 'job', children[0])
  children[victim].kill()
  killed = time.monotonic()
  code, err = end(children[1 - victim])
  assert time.monotonic() - killed < 120
  # JAX itself ends the process at once if it was the first that died, or if it notices before a collective fails.
  assert code in (1, -signal.SIGABRT), err
  if code == 1:
    (line,) = errors(err)
    assert 'another process has ended or cannot be reached' in line
    assert 'what was finished is kept, and --resume goes on with it' in line
  else:
    assert 'This most likely indicates that another task died' in err
  # As many as before go on, and nothing else.
  if mesh is None:
    code, err = end(start('--resume', *arguments))
    assert code == 1 and 'is a job of 2 processes and goes on with as many, got 1' in err
  port = free_port()
  children = [start(*member(index, 2, port, '--resume', *arguments)) for index in range(2)]
  assert [end(child)[0] for child in children] == ([0, 1] if mesh is None else [1, 1])
  parts = sorted((tmp_path / 'job').glob('part-*'))
  assert [path.name[10:] for path in parts] == (['-of-00002.jsonl'] * 2 if mesh is None else ['-of-00001.jsonl'])
  for index, path in enumerate(parts):
    assert [record['id'] for record in read(path)] == [f'r{i}' for i in range(index, 31, len(parts))]


@pytest.mark.slow
@pytest.mark.parametrize('mesh', [None, 'model:2'])
def test_a_preemption_of_one_process_stops_all(start, tmp_path, mesh):
  # So many that none has finished its share.
  (tmp_path / 'in.jsonl').write_text('{"prompt": "1+1="}\n' * 1000)
  port = free_port()
  arguments = (*LONG, *([] if mesh is None else [f'--mesh={mesh}']))
  children = [start(*member(index, 2, port, *arguments)) for index in range(2)]
  wait_for_records(tmp_path / 'job', children[0])
  children[1].send_signal(signal.SIGTERM)
  assert [end(child)[0] for child in children] == [75, 75]


def wait_for_records(folder, child):
  deadline = time.monotonic() + 900
  while not any(path.stat().st_size for path in folder.glob('part-00000-*.segment-*')):
    assert child.poll() is None and time.monotonic() < deadline
    time.sleep(0.05)

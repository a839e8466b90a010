"""Jobs in a folder through the command line, in this process, which keeps its compiled programs."""

import contextlib
import json
import os
import resource
import signal
import sys

from etils import epath
import pytest
from text_model import save_text_model

from archer_jax import runtime
from archer_jax.cli import command as cli
from archer_jax.cli import job as job_module
from archer_jax.jobs import begin as begin_module
from archer_jax.jobs.part import Part
from archer_jax.jobs.part import part_lock

RECORDS = [{'id': f'r{i}', 'prompt': '12+3='[: 1 + i % 5], 'gen_length': 8 + i % 9} for i in range(14)]
RECORDS[3] = {'id': 'empty', 'prompt': ''}
RECORDS[5] = {'prompt': 'sampled', 'temperature': 0.9}
RECORDS[8] = {'id': 'r0', 'prompt': 'taken'}
PART = 'part-00000-of-00001.jsonl'
SEGMENTS = 'part-00000-of-00001.segment-*.jsonl'


@pytest.fixture
def cli_main(monkeypatch, capsys):
  monkeypatch.setattr(runtime, 'set_up', lambda: None)

  def call(*arguments):
    argv = ['run_decode.py', *map(str, arguments)]
    monkeypatch.setattr(sys, 'argv', argv)
    capsys.readouterr()
    code = cli.main(argv)
    return code, *capsys.readouterr()

  return call


@pytest.fixture
def job(cli_main, text_path, tmp_path):
  """Runs the job of the records above in `tmp_path / 'job'`."""
  (tmp_path / 'in.jsonl').write_text(''.join(json.dumps(record) + '\n' for record in RECORDS))

  def call(*arguments, output='job/'):
    base = (f'--checkpoint={text_path}', f'--input={tmp_path}/in.jsonl', f'--output={tmp_path}/{output}')
    return cli_main(*base, '--batch_size=2', *arguments)

  return call


@pytest.fixture(scope='module')
def undisturbed(text_path, tmp_path_factory):
  """The bytes of the output file of the same records."""
  folder = tmp_path_factory.mktemp('undisturbed')
  (folder / 'in').write_text(''.join(json.dumps(record) + '\n' for record in RECORDS))
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(runtime, 'set_up', lambda: None)
    argv = [f'--checkpoint={text_path}', f'--input={folder}/in', f'--output={folder}/out', '--batch_size=2']
    assert cli.main(['run_decode.py', *argv]) == 1
  return (folder / 'out').read_bytes()


def stop_after(monkeypatch, calls, end):
  """Has `end` called once so many results were written."""
  write, left = Part.write, [calls]

  def counted(self, results):
    write(self, results)
    left[0] -= len(results)
    if results and left[0] <= 0:
      end()

  monkeypatch.setattr(Part, 'write', counted)


def interrupt():
  raise KeyboardInterrupt


def decoded(monkeypatch):
  """A list that is told the indices of the records that are decoded."""
  seen, decode_requests = [], job_module.decode_requests

  def noted(setup, entries, **others):
    entries = list(entries)
    seen.extend(entry.index for entry in entries)
    return decode_requests(setup, iter(entries), **others)

  monkeypatch.setattr(job_module, 'decode_requests', noted)
  return seen


def test_a_job_gives_what_a_file_would_get(job, undisturbed, tmp_path):
  code, out, err = job('--stats')
  assert (code, out) == (1, '')
  assert sorted(os.listdir(tmp_path / 'job')) == ['manifest.json', 'metrics-00000.jsonl', PART]
  assert (tmp_path / 'job' / PART).read_bytes() == undisturbed
  assert f'2 of 14 records are errors, see {tmp_path}/job/{PART}' in err
  # Rows, not bytes.
  assert '14/14' in err and 'tokens/s' in err
  manifest = json.loads((tmp_path / 'job' / 'manifest.json').read_text())
  assert manifest['n_parts'] == 1 and manifest['input']['records'] == 14
  assert manifest['configuration']['dtype'] == 'float32' and 'jax' in manifest['versions']
  *_, last = map(json.loads, (tmp_path / 'job' / 'metrics-00000.jsonl').read_text().splitlines())
  assert (last['records'], last['of'], last['errors'], last['rows']) == (14, 14, 2, 12)


def test_a_job_that_is_killed_goes_on(job, undisturbed, tmp_path, monkeypatch):
  with monkeypatch.context() as patch:
    stop_after(patch, 5, interrupt)
    assert job()[0] == 130
  (segment,) = (tmp_path / 'job').glob(SEGMENTS)
  lines = segment.read_bytes().splitlines(keepends=True)
  indices = [json.loads(line)['index'] for line in lines]
  assert 5 <= len(lines) < 14
  # In the middle of a line.
  segment.write_bytes(b''.join(lines)[:-20])
  seen = decoded(monkeypatch)
  code, _, err = job('--resume')
  assert code == 1
  assert sorted(seen) == sorted(set(range(14)) - set(indices[:-1]))
  assert (tmp_path / 'job' / PART).read_bytes() == undisturbed
  assert not list((tmp_path / 'job').glob(SEGMENTS))
  # The bar begins where the run before has ended.
  assert f'{len(lines) - 1}/14' in err


def test_a_killed_job_of_a_decoder_that_takes_tokens_back_in_every_step_goes_on(job, tmp_path, monkeypatch):
  flags = ('--decoder=saber', '--min_accept=2', '--refresh_distance=4')
  assert job(*flags, output='alone.jsonl')[0] == 1
  with monkeypatch.context() as patch:
    stop_after(patch, 5, interrupt)
    assert job(*flags)[0] == 130
  seen = decoded(monkeypatch)
  assert job('--resume', *flags)[0] == 1
  assert 0 < len(seen) < 10
  alone = (tmp_path / 'alone.jsonl').read_bytes()
  assert (tmp_path / 'job' / PART).read_bytes() == alone
  assert any(json.loads(line).get('remasked') for line in alone.splitlines())
  # Another number is another job.
  code, _, err = job('--resume', *flags[:-1], '--refresh_distance=5')
  assert code == 1 and 'refresh_distance' in err


def test_a_job_that_is_complete_stays(job, undisturbed, tmp_path, monkeypatch):
  assert job('--resume')[0] == 1
  seen = decoded(monkeypatch)
  code, _, err = job('--resume')
  assert (code, seen) == (1, []) and '2 of 14 records are errors' in err
  assert (tmp_path / 'job' / PART).read_bytes() == undisturbed


def test_a_preemption_loses_nothing(job, undisturbed, tmp_path, monkeypatch):
  for _ in range(2):
    with monkeypatch.context() as patch:
      stop_after(patch, 4, lambda: os.kill(os.getpid(), signal.SIGTERM))
      code, _, err = job('--resume')
    assert code == 75
    count = sum(len(path.read_bytes().splitlines()) for path in (tmp_path / 'job').glob(SEGMENTS))
    assert f'preempted; {count} of 14 records are written, and --resume goes on with the others\n' in err
  assert 8 <= count < 14
  assert job('--resume')[0] == 1
  assert (tmp_path / 'job' / PART).read_bytes() == undisturbed


def test_a_preemption_at_the_end_is_none(job, undisturbed, tmp_path, monkeypatch):
  stop_after(monkeypatch, 14, lambda: os.kill(os.getpid(), signal.SIGTERM))
  assert job()[0] == 1
  assert (tmp_path / 'job' / PART).read_bytes() == undisturbed


def test_a_preemption_before_anything_is_decoded(job, tmp_path, monkeypatch):
  monkeypatch.setattr(job_module.checkpoint, 'load', lambda *a, **k: os.kill(os.getpid(), signal.SIGTERM))
  assert job()[0] == 75
  assert not (tmp_path / 'job').exists()


def test_a_job_that_cannot_be_loaded_is_not_begun(job, tmp_path, monkeypatch):
  def fails(*_, **__):
    raise ValueError('checkpoint x is damaged')

  monkeypatch.setattr(job_module.checkpoint, 'load', fails)
  assert job()[::2] == (1, 'error: checkpoint x is damaged\n')
  assert not (tmp_path / 'job').exists()


@contextlib.contextmanager
def files_of_at_most(n_bytes):
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, limits[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk(job, undisturbed, tmp_path):
  with files_of_at_most(2500):
    code, _, err = job()
  assert code == 1
  (line,) = [line for line in err.splitlines() if line.startswith('error')]
  assert 'cannot be written: File too large; what was finished is kept, and --resume goes on with it' in line
  assert job('--resume')[0] == 1
  assert (tmp_path / 'job' / PART).read_bytes() == undisturbed


def test_a_disk_that_is_full_from_the_start(job, tmp_path):
  with files_of_at_most(100):
    code, _, err = job()
  assert (code, err) == (1, f'error: output {tmp_path}/job/manifest.json cannot be written: File too large\n')
  assert not (tmp_path / 'job').exists()


def test_traces_of_a_job(job, tmp_path, monkeypatch):
  trace = f'--trace={tmp_path}/trace'
  with monkeypatch.context() as patch:
    stop_after(patch, 4, interrupt)
    assert job(trace)[0] == 130
  # Of a record that was not finished.
  (tmp_path / 'trace' / 'r13.npz').write_bytes(b'half')
  assert job('--resume', trace)[0] == 1
  assert len(list((tmp_path / 'trace').glob('*.npz'))) == 12
  assert (tmp_path / 'trace' / 'r13.npz').stat().st_size > 1000
  code, _, err = job(trace, output='other/')
  assert code == 1 and 'has traces in it already' in err and not (tmp_path / 'other').exists()


@pytest.fixture
def begun(job, tmp_path, monkeypatch):
  """The job, begun and interrupted, and nothing more is ever loaded."""
  with monkeypatch.context() as patch:
    stop_after(patch, 2, interrupt)
    job()
  monkeypatch.setattr(job_module.checkpoint, 'load', None)
  return job


def test_what_must_not_go_on(begun, tmp_path, tmp_path_factory):
  def files():
    return {path.name: path.read_bytes() for path in (tmp_path / 'job').iterdir()}

  before = files()
  output = f'output {tmp_path}/job'
  other = save_text_model(tmp_path_factory.mktemp('other') / 'model', eos_bias=1.0)
  for arguments, message in [
    ([], f'{output} has a job in it already; give --resume to go on with it'),
    (['--resume', '--threshold=0.7'], f'{output} is a job of another configuration: it has threshold=0.6, this run '),
    (['--resume', '--seed=1', '--chat'], 'it has seed=0 and chat=False, this run seed=1 and chat=True'),
    (['--resume', '--refresh=always'], 'it has refresh=archer'),
    (['--resume', '--dtype=bfloat16'], 'it has dtype=float32, this run dtype=bfloat16'),
    (['--resume', f'--checkpoint={other}'], 'it has checkpoint_sha256='),
  ]:
    code, out, err = begun(*arguments)
    assert (code, out) == (1, '')
    assert err.startswith('error: ') and message in err and err.count('\n') == 1
  with open(tmp_path / 'in.jsonl', 'a') as file:
    file.write('{"prompt": "one more"}\n')
  code, _, err = begun('--resume')
  assert code == 1 and f'{output} is a job of another input, of 14 records' in err and 'this one has 15' in err
  with part_lock(epath.Path(tmp_path / 'job'), 0):
    code, _, err = begun('--resume')
    assert code == 1 and f'part 0 of {output} is being written by another process' in err
  assert files() == before


def test_inputs_that_are_none(job, tmp_path):
  for path, content, message in [
    (tmp_path / 'empty', '', f'input {tmp_path}/empty has no records'),
    (tmp_path / 'blank', '\n \n', f'input {tmp_path}/blank has no records'),
    ('/proc/self/mem', None, 'input /proc/self/mem cannot be read: '),
    (tmp_path / 'nowhere', None, f'input must be a file of JSON lines that exists, got {tmp_path}/nowhere'),
    (tmp_path, None, f'input must be a file of JSON lines that exists, got {tmp_path}'),
  ]:
    if content is not None:
      path.write_text(content)
    code, _, err = job(f'--input={path}')
    assert code == 1 and err.startswith(f'error: {message}') and err.count('\n') == 1
  assert not (tmp_path / 'job').exists()


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['--input=-'], 'input must be a file if output is a folder'),
    (['--output=x.jsonl', '--resume'], 'output must be the folder of a job if resume is given, got x.jsonl'),
    (['--output=x.jsonl', '--coordinator=auto'], 'output must be a folder, such as answers/, if coordinator is given'),
    (['--num_processes=2'], 'num_processes must be given with coordinator host:port, got num_processes=2 without'),
    (['--coordinator=auto', '--process_id=1'], 'process_id must be given with coordinator host:port'),
    (['--coordinator=node0'], "coordinator must be host:port, such as node0:1234, or auto, got 'node0'"),
    (['--coordinator=node0:x'], 'coordinator must be host:port'),
    (['--coordinator=node0:1', '--num_processes=2'], 'num_processes and process_id must be given with coordinator'),
    (
      ['--coordinator=node0:1', '--num_processes=2', '--process_id=2'],
      'process_id must be below num_processes, got 2 and 2',
    ),
    (
      ['--coordinator=node0:1', '--num_processes=2', '--process_id=1', '--watch'],
      'watch must not be given with coordinator',
    ),
  ],
)
def test_flags_that_do_not_go_together(job, tmp_path, monkeypatch, arguments, message):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(job_module, 'prepare', None)
  code, _, err = job(*arguments)
  assert code == 1 and err.startswith(f'error: {message}') and err.count('\n') == 1
  assert os.listdir(tmp_path) == ['in.jsonl']


def test_a_prompt_has_no_folder(cli_main, text_path, tmp_path):
  code, _, err = cli_main(f'--checkpoint={text_path}', '--prompt=a', f'--output={tmp_path}')
  assert code == 1 and 'input must be a file if output is a folder' in err


class Group:
  """The second of three processes, of which the others say `said`."""

  index, count = 1, 3

  def __init__(self, said):
    self._said = said

  def exchange(self, name, value, **_):
    return [self._said, value, self._said]


@pytest.mark.parametrize(
  ('ours', 'theirs', 'message'),
  [(None, None, None), ('bad', 'worse', 'bad'), ('bad', None, 'bad'), (None, 'worse', 'process 0: worse')],
)
def test_the_problem_of_any_process_is_that_of_all(ours, theirs, message):
  group = Group(theirs)
  if message is None:
    begin_module._raise_first(group.exchange('x', ours), group)
  else:
    with pytest.raises(ValueError, match=f'^{message}$'):
      begin_module._raise_first(group.exchange('x', ours), group)


def finding(**changes):
  manifest = {'configuration': {'threshold': 0.6}, 'input': {'sha256': 'a'}, 'versions': {}}
  return {'has_begun': False, 'manifest': {**manifest, **changes.pop('manifest', {})}, **changes}


@pytest.mark.parametrize(
  ('other', 'message'),
  [
    ({}, None),
    # Machines may differ.
    ({'manifest': {'versions': {'device': 'other'}}}, None),
    (
      {'manifest': {'configuration': {'threshold': 0.7}}},
      'all processes must be started alike, but process 0 has threshold=0.6, process 1 threshold=0.7',
    ),
    (
      {'manifest': {'input': {'sha256': 'b'}}},
      'all processes must read the same input, but that of process 1 differs from that of process 0',
    ),
    (
      {'has_begun': True},
      'process 1 does not see the same output as process 0; it must be on storage that all share',
    ),
  ],
)
def test_processes_that_are_not_alike(other, message):
  assert begin_module._difference([finding(), finding(**other), finding()]) == message

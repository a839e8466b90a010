import io
import json
import os
from pathlib import Path
import resource
import sys

import numpy as np
import pytest
from text_model import CONFIG

from archer_jax.engine.requests import file_stem
from archer_jax.engine.results import Result
from archer_jax.engine.settings import make_settings
from archer_jax.jobs import output


def result(id, index=0, **fields):
  trace = {'canvas_after_step': np.zeros((2, 3), np.int32)}
  return Result(**{'id': id, 'index': index, 'finish_reason': 'stop', 'seed': 1, 'trace': trace, **fields})


def test_records_are_lines_that_reach_the_system(tmp_path):
  path = tmp_path / 'out.jsonl'
  with output.RecordFile(path) as file:
    file.write([result({'a': [1]}, text='é\n"x"'), result(2, error='bad')])
    # The file is still open.
    first, second = map(json.loads, path.read_text('utf-8').splitlines())
  assert (first['id'], first['text'], 'error' in first) == ({'a': [1]}, 'é\n"x"', False)
  assert (second['id'], second['error']) == (2, 'bad')
  assert 'é' in path.read_text('utf-8')


def test_a_full_disk_leaves_whole_lines(tmp_path):
  path = tmp_path / 'out.jsonl'
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  with output.RecordFile(path) as file:
    file.write([result(0)])
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 50, limits[1]))
    try:
      with pytest.raises(OSError, match=r'output .*out\.jsonl cannot be written: File too large'):
        file.write([result(1)])
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  (line,) = path.read_text('utf-8').splitlines()
  assert json.loads(line)['id'] == 0


def test_records_on_stdout(monkeypatch):
  # UTF-8 whatever the terminal's own encoding is, and behind what is there already.
  stdout = io.TextIOWrapper(io.BytesIO(), 'ascii')
  monkeypatch.setattr(sys, 'stdout', stdout)
  print('first')
  output.print_records([result(1, text='2 \u2264 3')])
  first, line = stdout.buffer.getvalue().decode('utf-8').splitlines()
  assert first == 'first' and json.loads(line)['text'] == '2 \u2264 3' and '\u2264' in line


def test_files_that_cannot_be_made(tmp_path):
  (tmp_path / 'there').write_text('kept')
  for path, message in (
    (tmp_path / 'there', 'exists already and is never overwritten'),
    (tmp_path / 'nowhere' / 'x', 'must be in a folder that exists'),
    (tmp_path / 'there' / 'x', 'must be in a folder that exists'),
    (Path('/proc/x'), 'must be in a folder that can be written'),
  ):
    with pytest.raises(ValueError, match=f'output .*{message}'):
      output.check_new_file('output', path)
  output.check_new_file('output', tmp_path / 'new')
  assert sorted(os.listdir(tmp_path)) == ['there']
  assert (tmp_path / 'there').read_text() == 'kept'


def test_a_dangling_link_is_not_followed(tmp_path):
  (tmp_path / 'link').symlink_to(tmp_path / 'target')
  with pytest.raises(ValueError, match='exists already'):
    output.check_new_file('output', tmp_path / 'link')


@pytest.mark.parametrize(('field', 'kind', 'file'), [('trace', 'traces', '0.npz'), ('report', 'reports', '0.html')])
def test_folders_of_traces_and_reports(tmp_path, field, kind, file):
  check = lambda folder, **others: output.check_result_folders({'trace': None, 'report': None, field: folder}, **others)
  folder = tmp_path / 'a' / 'b'
  check(folder)
  (folder / 'notes.txt').write_text('other files are welcome')
  check(folder)
  (folder / file).touch()
  with pytest.raises(ValueError, match=f'{field} .* has {kind} in it already'):
    check(folder)
  check(folder, resume=True)
  with pytest.raises(ValueError, match=f'{field} .* cannot be made'):
    check(folder / 'notes.txt')
  with pytest.raises(ValueError, match='cannot be made'):
    check(folder / 'notes.txt' / 'x')


@pytest.mark.parametrize(
  ('id', 'file', 'inside'),
  [
    ('case.1', 'case.1.npz', 'case.1'),
    (12, '12.npz', 12),
    ('a/../b', '00000005.npz', 'a/../b'),
    (1.5, '00000005.npz', 1.5),
    (10**30, f'{10**30}.npz', str(10**30)),
    ({'k': [1]}, '00000005.npz', '{"k": [1]}'),
    (None, '00000005.npz', 'null'),
  ],
)
def test_trace_files(tmp_path, id, file, inside):
  given = result(id, 5)
  output.write_trace(
    tmp_path, file_stem(id, 5), output.trace_arrays(given, make_settings(CONFIG, {'decoder': 'wino'}), None)
  )
  assert os.listdir(tmp_path) == [file]
  with np.load(tmp_path / file, allow_pickle=False) as arrays:
    assert arrays['id'].item() == inside
    assert arrays['canvas_after_step'].shape == (2, 3)


def test_what_a_trace_says_of_itself(text):
  _, _, tokenizer = text
  letters = tokenizer.encode('ba')
  steps = np.array([[CONFIG.mask_id, letters[0]], [letters[1], letters[0]]], np.int32)
  given = result(0, trace={'canvas_after_step': steps}, prompt_ids=letters, knobs={'refresh_distance': 5})
  run = make_settings(CONFIG, {'decoder': 'wino', 'refresh': 'archer'})
  arrays = output.trace_arrays(given, run, tokenizer)
  ids = sorted({CONFIG.mask_id, *letters})
  assert arrays['token_ids'].tolist() == ids and arrays['mask_id'] == CONFIG.mask_id
  assert dict(zip(ids, arrays['token_texts'].tolist(), strict=True))[letters[0]] == 'b'
  assert arrays['prompt_ids'].tolist() == letters
  settings = json.loads(arrays['settings'].item())
  # The request's own, over the run's.
  assert (settings['refresh'], settings['refresh_distance']) == ('archer', 5)
  assert tuple(arrays['reason_names'].tolist()) == run.reason_names
  assert arrays['reason_names'][0] == 'first'
  assert 'token_texts' not in output.trace_arrays(given, make_settings(CONFIG, {'decoder': 'wino'}), None)


def test_names_of_traces():
  for plain in ('a', 'a.b-c_1', '7', 7, 'x' * 200):
    assert file_stem(plain, 3) == str(plain)
  # `.` would be the folder itself, and what is made from it would stand beside it.
  for other in ('.', '..', '.a', 'a/b', '', 'x' * 201, 'é', None, True, 1.5, [1]):
    assert file_stem(other, 3) == '00000003'

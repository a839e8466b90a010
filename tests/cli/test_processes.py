"""Real processes, where only these can tell."""

import json
import os
import signal
import subprocess
import time

from cli_files import process
from cli_files import read_lines
from cli_files import write_lines
from text_model import EXAMPLE


def test_the_example_in_a_fresh_process(text_path, tmp_path):
  with process(f'--checkpoint={text_path}', cwd=tmp_path) as child:
    out, err = child.communicate(timeout=300)
  assert child.returncode == 0
  assert out.strip()
  # Between them stands what was taken back, if anything was.
  prompt, *_, figures = err.splitlines()
  assert prompt == EXAMPLE and '16 tokens in 16 steps' in figures
  # Compiled programs are kept in the user's own cache directory.
  assert any(file.name.startswith('jit_decode') for file in (tmp_path / 'cache' / 'archer_jax' / 'xla').iterdir())


def wait_for_lines(path, count, child):
  deadline = time.monotonic() + 240
  while not path.exists() or len(path.read_bytes().splitlines()) < count:
    assert child.poll() is None and time.monotonic() < deadline
    time.sleep(0.1)


def test_an_interrupt_keeps_what_is_finished(dream_tiny, tmp_path):
  out = tmp_path / 'out.jsonl'
  # The second record takes hours.
  records = [{'id': 'a', 'prompt_ids': [5]}, {'id': 'b', 'prompt_ids': [5], 'steps': 10**9}]
  arguments = (f'--checkpoint={dream_tiny.path}', '--input=-', f'--output={out}', '--batch_size=1', '--gen_length=8')
  with process(*arguments, cwd=tmp_path, stdin=subprocess.PIPE) as child:
    child.stdin.write(''.join(json.dumps(record) + '\n' for record in records))
    child.stdin.flush()
    # Written while the input is still open.
    wait_for_lines(out, 1, child)
    time.sleep(1)
    start = time.monotonic()
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=60) == 130
    assert time.monotonic() - start < 10
    assert child.stderr.read() == 'interrupted; what was finished is written\n'
  (record,) = read_lines(out)
  assert record['id'] == 'a' and record['canvas_tokens'] == 8


def test_a_reader_that_leaves(text_path, tmp_path):
  path = write_lines(tmp_path / 'in.jsonl', ['no json'])
  for arguments in (['--help'], [f'--checkpoint={text_path}', f'--input={path}', '--output=-']):
    read, write = os.pipe()
    os.close(read)
    with process(*arguments, cwd=tmp_path, stdout=write) as child:
      os.close(write)
      _, err = child.communicate(timeout=300)
    assert child.returncode == 1
    assert 'Traceback' not in err and 'Exception ignored' not in err

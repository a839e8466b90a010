"""Runs: records and prompts in; records, text, figures and reports out."""

import io
import json
import os
from pathlib import Path
import sys

from cli_files import read_lines
from cli_files import write_lines
import jax
import pytest
from text_model import CONFIG
from text_model import save_text_model

import archer_jax
from archer_jax.engine.batching import row_seed
from archer_jax.report.page import page_text
from archer_jax.report.recording import read_recording

ROOT = Path(__file__).parents[2]
RECORD_FIELDS = [
  'id', 'text', 'token_ids', 'finish_reason', 'seed', 'prompt_tokens', 'generated_tokens', 'canvas_tokens', 'steps',
  'nfe', 'refreshes', 'accepted', 'remasked', 'flip_flops',
]  # fmt: skip


def test_records_in_and_out(cli_main, text_path, tmp_path):
  records = [
    {'id': 'first', 'prompt': '12+3='},
    'no json',
    {'prompt': 'abc', 'seed': 5, 'temperature': 0.9, 'gen_length': 9},
    {'id': ['x', 1], 'prompt': ''},
    {'id': 'long', 'prompt': 'a' * 250},
    {'id': 'mask', 'prompt': '<|mask|>'},
    {'prompt': '12+3=', 'threshold': 0.1},
    {'id': {'a': 1}, 'prompt_ids': [5, 6]},
  ]
  path = write_lines(tmp_path / 'in.jsonl', records)
  out = tmp_path / 'out.jsonl'
  code, stdout, stderr = cli_main(
    f'--checkpoint={text_path}', f'--input={path}', f'--output={out}', '--batch_size=2', '--stats', '--seed=3'
  )
  assert (code, stdout) == (1, '')
  results = read_lines(out)
  assert [result['id'] for result in results] == ['first', 1, 2, ['x', 1], 'long', 'mask', 6, {'a': 1}]
  good = [result for result in results if result['finish_reason'] != 'error']
  assert [list(result) for result in good] == [RECORD_FIELDS] * 4
  bad = [result for result in results if result['finish_reason'] == 'error']
  assert [list(result) for result in bad] == [[*RECORD_FIELDS, 'error']] * 4
  assert 'not JSON' in bad[0]['error'] and 'empty' in bad[1]['error'] and 'mask token' in bad[3]['error']
  assert '250' in bad[2]['error'] and 'gen_length=16' in bad[2]['error'] and '256' in bad[2]['error']
  assert [result['seed'] for result in good] == [row_seed(3, 0), 5, row_seed(3, 6), row_seed(3, 7)]
  assert [result['canvas_tokens'] for result in good] == [16, 9, 16, 16]
  # The library gives the same.
  model = archer_jax.load(text_path, dtype='float32')
  again = archer_jax.generate(*model, [records[0], records[2]], decoder='wino', gen_length=16, batch_size=2, seed=3)
  assert [result.token_ids for result in again] == [result['token_ids'] for result in good[:2]]
  # A bar and the figures stand on stderr, and what they depend on beside the output.
  assert 'decode:' in stderr and 'tokens per second' in stderr
  assert f'end tokens: {CONFIG.eos_id}\n' in stderr
  stats = json.loads(Path(f'{out}.stats.json').read_text())
  assert stats['figures']['rows'] == 4 and stats['figures']['errors'] == 4
  assert stats['figures']['programs'] == 1
  assert stats['figures']['kept_bytes'] > 0
  assert stats['figures']['steps'] == sum(result['steps'] for result in results)
  assert stats['jax'] == jax.__version__ and stats['dtype'] == 'float32' and stats['backend'] == 'cpu'
  assert (stats['seed'], stats['threshold'], stats['gen_length'], stats['refresh']) == (3, 0.6, 16, 'archer')
  assert len(stats['chat_template_sha256']) == len(stats['tokens_sha256']) == 64


def test_the_same_run_gives_the_same_tokens(cli_main, text_path, tmp_path):
  path = write_lines(tmp_path / 'in.jsonl', [{'prompt': 'ab'}, {'prompt': 'c'}])
  hashes = []
  for name, temperature in (('a', 0.9), ('b', 0.9), ('c', 5.0)):
    arguments = (f'--input={path}', f'--output={tmp_path / name}', f'--temperature={temperature}', '--stats')
    assert cli_main(f'--checkpoint={text_path}', *arguments)[0] == 0
    hashes.append(json.loads((tmp_path / f'{name}.stats.json').read_text())['tokens_sha256'])
  assert hashes[0] == hashes[1] != hashes[2]


def test_text_on_stdout(cli_main, text_path):
  code, out, err = cli_main(f'--checkpoint={text_path}', '--prompt=12+3=', '--prompt=a,b')
  assert code == 0
  results = archer_jax.generate(*archer_jax.load(text_path), ['12+3=', 'a,b'], decoder='wino', gen_length=16)
  assert out == ''.join(f'{result.text}\n' for result in results)
  lines = err.splitlines()
  assert lines[:2] == ['12+3=', 'a,b'] and lines[2].startswith('32 tokens in 32 steps')
  lines = b'{"prompt": "12+3="}\n{"prompt": "a,b"}\n'
  assert cli_main(f'--checkpoint={text_path}', '--input=-', stdin=lines)[:2] == (0, out)
  code, out, _ = cli_main(f'--checkpoint={text_path}', '--input=-', '--output=-', stdin=lines)
  assert code == 0 and [json.loads(line)['text'] for line in out.splitlines()] == [result.text for result in results]


def test_stop_strings(cli_main, text_path):
  base = f'--checkpoint={text_path}'
  _, whole, _ = cli_main(base, '--prompt=12+3=')
  first, second = whole[6:8], whole[3:5]
  # The one that stands first in the answer ends it, whatever their order.
  for stops in ((first,), (first, second), (second, first)):
    cut = min(whole.index(stop) for stop in stops)
    code, out, _ = cli_main(base, '--prompt=12+3=', *(f'--stop={stop}' for stop in stops))
    assert (code, out) == (0, whole[:cut] + '\n')
  lines = b'{"prompt": "12+3="}\n' + json.dumps({'prompt': '12+3=', 'stop': []}).encode() + b'\n'
  _, out, _ = cli_main(base, '--input=-', '--output=-', f'--stop={second}', stdin=lines)
  ended, own = map(json.loads, out.splitlines())
  assert (ended['finish_reason'], ended['text']) == ('stop', whole[: whole.index(second)])
  # A record's own go before those of the run.
  assert own['text'] == whole.removesuffix('\n')


def test_chat_from_the_command_line(cli_main, text_path):
  _, chat, _ = cli_main(f'--checkpoint={text_path}', '--chat', '--prompt=hi', '--output=-')
  assert json.loads(chat)['prompt_tokens'] == len('user: hi') + 1 + len('assistant: ')


def test_an_empty_input(cli_main, text_path, tmp_path):
  code, out, _ = cli_main(f'--checkpoint={text_path}', '--input=-', '--output=-', stdin=b'\n')
  assert (code, out) == (0, '')
  (tmp_path / 'blank').write_text(' \n\n')
  code, out, err = cli_main(f'--checkpoint={text_path}', f'--input={tmp_path}/blank', f'--output={tmp_path}/out')
  assert (code, out, err) == (1, '', f'error: input {tmp_path}/blank has no records\n')
  assert os.listdir(tmp_path) == ['blank']


def test_weights_that_are_no_numbers(cli_main, tmp_path):
  broken_path = save_text_model(tmp_path / 'model', broken=True)
  code, out, err = cli_main(f'--checkpoint={broken_path}', '--prompt=a', '--prompt=b')
  assert (code, out) == (1, '')
  assert "error: record 1: the logits of step 0 are not finite; check the checkpoint's weights" in err


def test_watch_in_plain_lines(cli_main, text_path):
  code, out, _ = cli_main(f'--checkpoint={text_path}', '--prompt=ab', '--watch')
  *steps, answer = out.splitlines()
  assert code == 0 and len(steps) == 16
  assert steps[0].startswith('row 0  step   1') and steps[-1].endswith(answer)


@pytest.mark.parametrize('encoding', ['ascii', 'cp1252', 'utf-8'])
def test_a_terminal_that_cannot_show_the_answer(cli_main, monkeypatch, tmp_path_factory, encoding):
  path = save_text_model(tmp_path_factory.mktemp('wide') / 'model', eos_bias=1e3, wanted='\u2264')
  answer = 16 * '\u2264'
  shown = answer.encode(encoding, 'backslashreplace').decode(encoding)

  def printed(*arguments):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding)
    with monkeypatch.context() as patch:
      patch.setattr(sys, 'stdout', stdout)
      assert cli_main(f'--checkpoint={path}', '--prompt=\u2264', *arguments)[0] == 0
    stdout.flush()
    return stdout.buffer.getvalue()

  assert printed().decode(encoding) == f'{shown}\n'
  assert json.loads(printed('--output=-').decode('utf-8'))['text'] == answer
  *_, step, text = printed('--watch').decode(encoding).splitlines()
  assert step.endswith(shown) and text == shown


@pytest.mark.parametrize('arguments', [[], ['--logits_eos_inf']])
def test_a_switch_of_the_end_token(cli_main, ending_path, arguments):
  code, out, _ = cli_main(f'--checkpoint={ending_path}', '--prompt=ab', '--output=-', *arguments)
  (record,) = map(json.loads, out.splitlines())
  assert code == 0
  assert (CONFIG.eos_id in record['token_ids']) == (not arguments)
  assert record['finish_reason'] == ('length' if arguments else 'stop')
  assert record['generated_tokens'] == (16 if arguments else record['token_ids'].index(CONFIG.eos_id))


def test_reports(cli_main, text_path, tmp_path):
  pytest.importorskip('matplotlib')
  records = [{'id': 'a', 'prompt': '1+2='}, {'prompt': ''}, {'id': 'x/y', 'prompt': '3'}]
  path = write_lines(tmp_path / 'in.jsonl', records)
  out, pages, traces = (tmp_path / name for name in ('out.jsonl', 'pages', 'traces'))
  given = (f'--checkpoint={text_path}', f'--input={path}', f'--report={pages}')
  code, _, _ = cli_main(*given, f'--output={out}', f'--trace={traces}')
  # One of the records is refused and has nothing to show.
  assert code == 1 and [record['finish_reason'] == 'error' for record in read_lines(out)] == [False, True, False]
  assert sorted(os.listdir(pages)) == ['00000002.html', '00000002.png', 'a.html', 'a.png']
  # The trace alone makes the same page.
  assert page_text(read_recording(traces / 'a.npz')) == (pages / 'a.html').read_text()
  code, _, err = cli_main(*given, f'--output={tmp_path / "again.jsonl"}')
  assert code == 1 and 'has reports in it already, which are never overwritten' in err

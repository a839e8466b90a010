"""The command: in this process through `main`, so that its compiled programs are kept."""

import io
import itertools
import json
import os
from pathlib import Path
import resource
import subprocess
import sys

from absl import flags
import pytest
from text_model import save_text_model

from archer_jax import runtime
from archer_jax.calibration import file as calibration
from archer_jax.checkpoints import checkpoint
from archer_jax.checkpoints.manifest import read_manifest
from archer_jax.engine.settings import SETTINGS
from archer_jax.evaluate import __main__ as command
from archer_jax.evaluate import compare
from archer_jax.evaluate import run
from archer_jax.tasks import mbpp
from archer_jax.tasks import pipeline

ROOT = Path(__file__).parents[2]
FIELDS = {
  'task', 'setting', 'n', 'correct', 'pass_at_1', 'ci_low', 'ci_high', 'wins', 'losses', 'p_value', 'steps', 'nfe',
  'refresh_share', 'remasked', 'flip_flops', 'seconds', 'speedup_wall', 'speedup_counted',
}  # fmt: skip
MORE_FIELDS = {
  'accepted', 'prompt_tokens', 'generated_tokens', 'flip_flop_rate', 'errors', 'tokens_per_s', 'operations',
  'speedup_wall_low', 'speedup_wall_high', 'gen_length', 'batch_size', 'settings', 'run', 'rows_fed', 'rows_recomputed',
  'kept_bytes', 'also',
}  # fmt: skip
FLAGS = {
  'checkpoint', 'tasks', 'n', 'compare', 'worked_examples', 'extract', 'json', 'figure', 'config', 'batch_size',
  'dtype',
}  # fmt: skip

MBPP = {
  'task_id': 1, 'prompt': 'Two.', 'code': 'def two():\n  return 2', 'test_imports': [],
  'test_list': ['assert two() == 2'],
}  # fmt: skip


@pytest.fixture
def main(monkeypatch, capsys, text_path, tmp_path):
  """Runs the command beside a file of questions and returns (code, stdout, stderr)."""
  monkeypatch.setattr(runtime, 'set_up', lambda: None)
  monkeypatch.chdir(tmp_path)
  lines = [json.dumps({'prompt': prompt, 'answer': '15'}) for prompt in ('12+3=', 'abc', 'xyz 7', '12+3=', 'q')]
  Path('sums.jsonl').write_text('\n'.join(lines))

  def call(*arguments, checkpoint=text_path):
    capsys.readouterr()
    base = [f'--checkpoint={checkpoint}', '--batch_size=2']
    code = command.main(['evaluate', *base, *map(str, arguments)])
    return code, *capsys.readouterr()

  return call


SUMS = ('--tasks=jsonl:sums.jsonl', '--gen_length=16')


def test_help_is_quick_grouped_and_teaches(tmp_path):
  environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
  used = lambda: sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
  before = used()
  child = subprocess.run(
    [sys.executable, '-m', 'archer_jax.evaluate', '--help'],
    cwd=tmp_path,
    env=environment,
    capture_output=True,
    text=True,
  )
  # Seconds of processor time, since the machine may be busy with something else too.
  assert used() - before < 2
  assert child.returncode == 0 and child.stderr == ''
  lines = child.stdout.splitlines()
  for group in ('What to compare:', 'Decoder:', 'When the prompt is recomputed:', 'Run:'):
    assert group in lines
  assert '--compare=always,archer,once,interval:4' in child.stdout and '+name=value' in child.stdout
  shown = {line.split()[0].replace('[no]', '') for line in lines if line.startswith('  --')}
  assert shown == {f'--{name}' for name in FLAGS | set(SETTINGS)}


def test_every_way_to_ask_for_help(main):
  for flag in ('-help', '--helpfull', '--helpshort'):
    code, out, _ = main('--n=0', flag)
    assert code == 0 and '--compare' in out


def test_records(main, monkeypatch):
  monkeypatch.setattr(runtime, 'facts', lambda: {'jax': '1.2.3'})
  code, out, err = main(*SUMS, '--compare=always,archer:4,llada:8', '--json=figures.json', '--seed=3')
  assert code == 0
  records = json.loads(Path('figures.json').read_text())
  assert [(record['task'], record['setting']) for record in records] == [
    ('jsonl:sums.jsonl', setting) for setting in ('always', 'archer:4', 'llada:8')
  ]
  for record in records:
    assert set(record) == FIELDS | MORE_FIELDS
    assert all(isinstance(record[field], int) for field in ('n', 'correct', 'wins', 'losses', 'errors', 'operations'))
    assert record['n'] == 5 and 0 <= record['ci_low'] <= record['pass_at_1'] <= record['ci_high'] <= 1
    assert record['settings']['reuse'] == 'prompt' and 0 < record['rows_fed'] <= record['rows_recomputed']
    assert record['kept_bytes'] > 0
    assert record['settings']['seed'] == 3 and record['settings']['gen_length'] == record['gen_length'] == 16
    assert record['run']['dtype'] == 'float32' and record['run']['jax'] == '1.2.3'
  assert records[1]['settings']['refresh_distance'] == 4 and records[2]['settings']['steps'] == 8
  assert records[2]['steps'] == 8
  # Nothing but the table goes to stdout, and it fits.
  assert 'jsonl:sums.jsonl: 5 problems' in out and 'archer:4' in out and 'as fast as always' in ' '.join(out.split())
  assert max(map(len, out.splitlines())) <= 100
  assert 'answer/s' in err and os.listdir() == ['sums.jsonl', 'figures.json']


def test_a_task_that_the_terminal_cannot_name(main, monkeypatch):
  Path('sums.jsonl').rename('2≤3.jsonl')
  stdout = io.TextIOWrapper(io.BytesIO(), 'ascii')
  with monkeypatch.context() as patch:
    patch.setattr(sys, 'stdout', stdout)
    assert main('--tasks=jsonl:2≤3.jsonl', '--gen_length=16', '--n=1', '--json=figures.json')[0] == 0
  stdout.flush()
  assert 'jsonl:2\\u22643.jsonl: 1 problem,' in stdout.buffer.getvalue().decode('ascii')
  assert json.loads(Path('figures.json').read_text('utf-8'))[0]['task'] == 'jsonl:2≤3.jsonl'


def test_a_generated_task_with_settings_for_all(main):
  code, out, _ = main('--tasks=sudoku4', '--n=3', '--compare=archer,once', '--threshold=0.3', '--json=figures.json')
  archer, once = json.loads(Path('figures.json').read_text())
  assert code == 0 and archer['settings']['threshold'] == once['settings']['threshold'] == 0.3
  # The task's own length in one block, over what the checkpoint recommends.
  assert archer['gen_length'] == archer['settings']['block_length'] == 17 and archer['n'] == 3
  assert archer['speedup_wall'] is archer['speedup_counted'] is None
  assert 'no setting that is compared refreshes always' in ' '.join(out.split())


def test_certified_takes_the_kappa_that_was_calibrated(main, monkeypatch, text_path):
  entry = {'dtype': 'float32', 'decoder': 'wino', 'drift': 'token', 'refresh_distance': 5}
  entry |= {'kappa': {'0.9': 2.5, '0.99': 4.0}}
  path = Path('refresh.json')
  calibration.write_calibration(path, read_manifest(text_path), entry)
  monkeypatch.setattr(calibration, 'calibration_file', lambda checkpoint: path)
  flags = ('--dtype=float32', '--json=figures.json', '--compare=always,certified,certified+quantile=0.9')
  code, _, _ = main(*SUMS, *flags)
  assert code == 0
  settings = [record['settings'] for record in json.loads(Path('figures.json').read_text())]
  assert [(each['kappa'], each['refresh_distance']) for each in settings] == [(0.0, 0), (4.0, 5), (2.5, 5)]


def test_the_figure(main):
  pytest.importorskip('matplotlib')
  assert main(*SUMS, '--compare=always,archer:4', '--figure=figure.svg')[0] == 0
  content = Path('figure.svg').read_text()
  assert content.startswith('<?xml') and len(content) > 5000
  assert main(*SUMS, '--compare=archer,llada:8', '--figure=speed.png')[0] == 0
  assert Path('speed.png').read_bytes().startswith(b'\x89PNG')
  assert 'figure must end in one of' in main(*SUMS, '--figure=figure.doc')[2]


def test_an_interrupt_keeps_what_is_finished(main, monkeypatch):
  real, calls = compare.decode_requests, itertools.count()

  def interrupted(*args, **kwargs):
    for results in real(*args, **kwargs):
      # Two settings: one batch each to warm up, and two rounds. The third round is interrupted half-way.
      if next(calls) == 7:
        raise KeyboardInterrupt
      yield results

  monkeypatch.setattr(compare, 'decode_requests', interrupted)
  code, out, err = main(*SUMS, '--compare=always,llada:8', '--json=figures.json')
  assert code == 130 and 'interrupted' in err
  assert [record['n'] for record in json.loads(Path('figures.json').read_text())] == [4, 4]
  assert '4 problems' in out


def test_an_interrupt_at_once_leaves_nothing(main, monkeypatch):
  def interrupted(*args, **kwargs):
    raise KeyboardInterrupt
    yield

  monkeypatch.setattr(compare, 'decode_requests', interrupted)
  code, out, _ = main(*SUMS, '--json=figures.json')
  assert (code, out) == (130, '') and os.listdir() == ['sums.jsonl']


def test_weights_that_are_no_numbers(main, tmp_path):
  broken = save_text_model(tmp_path / 'broken', broken=True)
  code, _, err = main(*SUMS, '--compare=always', checkpoint=broken)
  assert code == 1 and '5 answers are errors' in err


MISTAKES = {
  'unknown flag': (['--taks=sort'], "Unknown command line flag 'taks'"),
  'positional': (['sort'], "there are no positional arguments, got 'sort'"),
  'no problems': (['--n=0'], 'flag --n=0: 0 is not a positive integer'),
  'unknown task': (['--tasks=sudoku4,sodoku'], "there is no task 'sodoku'; there are sudoku4, sudoku6"),
  'task twice': (['--tasks=sudoku4,sudoku4'], 'tasks must name a task once, got sudoku4 twice'),
  'no file': (['--tasks=jsonl:nowhere.jsonl'], "there is no file 'nowhere.jsonl'"),
  'too few problems': ([*SUMS, '--n=6'], 'n must be from 1 to the 5 problems of jsonl:sums.jsonl, got 6'),
  'no extended set': (['--tasks=humaneval_et:nowhere.jsonl'], "there is no file 'nowhere.jsonl'"),
  'no tests': (['--tasks=mbpp:mbpp.jsonl'], 'mbpp.jsonl line 1: test_list must be a list of texts that is not empty'),
  'another format': (['--tasks=mbpp_et:bad.jsonl'], 'bad.jsonl line 1 must have the field code, got prompt, answer'),
  'no answer': (['--tasks=jsonl:bad.jsonl'], 'bad.jsonl line 2 must have the field answer, got prompt'),
  'unknown setting': (
    ['--compare=always,never'],
    "compare: 'never' in 'never' is no refresh rule, decoder or reuse method; there are",
  ),
  'unknown name': (['--compare=always+treshold=1'], "'treshold' in 'always+treshold=1' is no setting; there are"),
  'nobody reads it': (['--compare=always', '--steps=4'], 'steps must not be given with decoder wino'),
  'chat for nothing': (['--tasks=sudoku4', '--chat'], 'chat must not be given without a task of jsonl'),
  'extract for nothing': (['--tasks=sudoku4', '--extract=number'], 'extract must not be given without a task of jsonl'),
  'examples for nothing': ([*SUMS, '--worked_examples=2'], 'worked_examples of jsonl must be 0'),
  'spelling': (['--tasks=jsonl:spelling.jsonl'], "no token for 'é' (U+00E9), '→' (U+2192)"),
  'too long': (
    ['--tasks=jsonl:long.jsonl'],
    'jsonl:long.jsonl: problem 0: prompt of 250 tokens and gen_length=16 must',
  ),
  'too long with examples': (['--tasks=sudoku4', '--n=2', '--worked_examples=9'], 'must together be at most the 256'),
  'json that exists': ([*SUMS, '--json=sums.jsonl'], 'json sums.jsonl exists already and is never overwritten'),
  'json without a name': ([*SUMS, '--json='], 'json must not be empty'),
  'figure without a name': ([*SUMS, '--figure='], 'figure must not be empty'),
  'json nowhere': ([*SUMS, '--json=nowhere/x.json'], 'json must be in a folder that exists, got nowhere'),
  'figure nowhere': ([*SUMS, '--figure=nowhere/x.png'], 'figure must be in a folder that exists, got nowhere'),
  'not calibrated': ([*SUMS, '--compare=always,certified'], 'make it with archer-calibrate, or give kappa'),
  'no checkpoint': (['--checkpoint=nowhere'], 'checkpoint nowhere does not exist'),
}


@pytest.mark.parametrize('name', MISTAKES)
def test_a_mistake_is_one_line_before_anything_is_decoded(name, main, monkeypatch):
  monkeypatch.setattr(checkpoint, 'load', None)
  Path('bad.jsonl').write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "a"}\n')
  Path('spelling.jsonl').write_text('{"prompt": "caf\\u00e9", "answer": "b \\u2192"}\n')
  Path('long.jsonl').write_text(json.dumps({'prompt': 'a' * 250, 'answer': 'b'}) + '\n')
  Path('mbpp.jsonl').write_text(json.dumps(MBPP | {'test_list': []}) + '\n')
  before = sorted(os.listdir())
  arguments, message = MISTAKES[name]
  code, out, err = main(*arguments)
  assert (code, out) == (1, '')
  assert err.startswith('error: ') and err.count('\n') == 1
  assert message in err
  assert sorted(os.listdir()) == before


def test_a_checkpoint_without_a_tokenizer(main, llada_tiny):
  code, _, err = main(*SUMS, checkpoint=llada_tiny.path)
  assert code == 1 and 'must have a tokenizer, since tasks are texts' in err


def test_chat(main, tmp_path, monkeypatch):
  plain = save_text_model(tmp_path / 'plain', chat=False)
  code, _, err = main(*SUMS, '--chat', checkpoint=plain)
  assert code == 1 and 'chat must not be given: the checkpoint has no chat template' in err
  plans = []
  monkeypatch.setattr(run.Evaluation, 'run', lambda self: plans.extend(self.plans) or 0)
  assert main(*SUMS, '--chat')[0] == 0
  plan = plans[0]
  assert plan.settings['always'].chat and len(plan.requests['always'][1].prompt_ids) > len('abc') + 10


@pytest.mark.parametrize(
  ('module', 'arguments'), [(pipeline, ['pipeline', '--n=1', '--worked_examples=0']), (mbpp, ['mbpp:mbpp.jsonl'])]
)
def test_a_grader_that_cannot_run_is_told_before_decoding(main, monkeypatch, module, arguments):
  def refuse(program):
    raise RuntimeError('a program cannot be run in a sandbox here: no namespaces')

  Path('mbpp.jsonl').write_text(json.dumps(MBPP))
  monkeypatch.setattr(module, 'run_python', refuse)
  task, *others = arguments
  code, _, err = main(f'--tasks={task}', *others)
  assert code == 1 and err == (
    f'error: {task} cannot be graded: a program cannot be run in a sandbox here: no namespaces\n'
  )


def test_a_prompt_that_ends_inside_the_answer(main, monkeypatch, tmp_path):
  plans = []
  monkeypatch.setattr(run.Evaluation, 'run', lambda self: plans.extend(self.plans) or 0)
  Path('mbpp.jsonl').write_text(json.dumps(MBPP | {'test_case_list': ['assert two() > 1']}))
  arguments = ('--tasks=mbpp:mbpp.jsonl,mbpp_et:mbpp.jsonl', '--gen_length=16')
  assert main(*arguments)[0] == main(*arguments, checkpoint=save_text_model(tmp_path / 'plain', chat=False))[0] == 0
  chat, extended, plain, _ = plans
  turn = 'Two.\nYour code should pass these tests:\nassert two() == 2'
  assert plain.problems[0].prompt == f'{turn}\n\n```python\n'
  prompt = chat.problems[0].prompt
  assert turn in prompt and prompt.endswith('```python\n') and prompt != plain.problems[0].prompt
  # The same answers get both scores.
  assert extended.problems[0].prompt == prompt and list(extended.source.also) == ['et']


def test_a_canvas_shorter_than_answers_is_said(main, monkeypatch):
  monkeypatch.setattr(run.Evaluation, 'run', lambda self: 0)
  code, _, err = main('--tasks=sudoku4', '--n=3', '--gen_length=9')
  assert code == 0 and 'note: sudoku4: 3 of 3 reference answers have more than gen_length=9 tokens, up to 16' in err


def test_flags_are_those_of_the_tables():
  values = flags.FlagValues()
  command.define_flags(values)
  assert set(SETTINGS) <= set(values)


def test_a_config_file(main):
  Path('c.py').write_text(
    'import ml_collections\ndef get_config():\n  return ml_collections.ConfigDict({"n": 2, "threshold": 0.5})\n'
  )
  settled = command.parse(['evaluate', '--config=c.py', '--n=3', '--compare=wino'])
  assert settled.options['n'] == 3 and settled.base == {'threshold': 0.5}

"""The command line: in this process through `cli.main`, and a few real processes where only these can tell."""

import contextlib
import io
import json
import os
from pathlib import Path
import signal
import subprocess
import sys
import time

from absl import flags
from golden_data import case_ids
import jax
import numpy as np
import pytest
from text_model import CONFIG
from text_model import EXAMPLE
from text_model import save_text_model

import archer_jax
from archer_jax import runtime
from archer_jax import specs
from archer_jax.checkpoints import checkpoint
from archer_jax.cli import command as cli
from archer_jax.config import DTYPES
from archer_jax.engine.batching import row_seed
from archer_jax.engine.settings import SETTINGS
from archer_jax.report.page import page_text
from archer_jax.report.recording import read_recording

ROOT = Path(__file__).parents[2]
RECORD_FIELDS = [
  'id', 'text', 'token_ids', 'finish_reason', 'seed', 'prompt_tokens', 'generated_tokens', 'canvas_tokens', 'steps',
  'nfe', 'refreshes', 'accepted', 'remasked', 'flip_flops',
]  # fmt: skip


@pytest.fixture(scope='module')
def broken_path(tmp_path_factory):
  return save_text_model(tmp_path_factory.mktemp('broken') / 'model', broken=True)


@pytest.fixture
def cli_main(monkeypatch, capsys):
  """Runs a command in this process, which keeps its compiled programs, and returns (code, stdout, stderr)."""
  monkeypatch.setattr(runtime, 'set_up', lambda: None)

  def call(*arguments, stdin=b''):
    monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(stdin)))
    argv = ['run_decode.py', *map(str, arguments)]
    monkeypatch.setattr(sys, 'argv', argv)
    capsys.readouterr()
    code = cli.main(argv)
    return code, *capsys.readouterr()

  return call


@contextlib.contextmanager
def process(*arguments, cwd, **options):
  """A real one, with a cache directory of its own."""
  environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'XDG_CACHE_HOME': str(cwd / 'cache'), 'JAX_PLATFORMS': 'cpu'}
  command = [sys.executable, str(ROOT / 'run_decode.py'), *map(str, arguments)]
  pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, **options}
  child = subprocess.Popen(command, cwd=cwd, env=environment, text=True, **pipes)
  try:
    yield child
  finally:
    child.kill()
    child.communicate()


def write_lines(path, records):
  path.write_text(''.join((line if isinstance(line, str) else json.dumps(line)) + '\n' for line in records))
  return path


def read_lines(path):
  return [json.loads(line) for line in path.read_text('utf-8').splitlines()]


# Help and mistakes.


def test_help_is_quick_grouped_and_complete(tmp_path):
  start = time.perf_counter()
  with process('--help', cwd=tmp_path) as child:
    out, err = child.communicate(timeout=60)
  assert child.returncode == 0 and err == ''
  # On a machine that is busy with something else too; alone it takes 0.3 s.
  assert time.perf_counter() - start < 2
  for group in (
    'What to decode:',
    'Where to:',
    'Decoder:',
    'When the prompt is recomputed:',
    'Run:',
    'Many processes:',
  ):
    assert group in out.splitlines()
  design = """checkpoint prompt input output chat stop logprobs decoder
    gen_length block_length steps threshold threshold_back
    max_accept shadow temperature top_p top_k cfg_scale remasking alg alg_temp early_stop refresh refresh_interval
    refresh_at_block_start refresh_distance drift drift_radius min_margin max_age kappa quantile on_low_margin
    reuse min_accept eos_penalty factor
    reuse_interval dkv_shift window prompt_interval response_interval transfer_ratio
    anchors mask_prediction batch_size mesh dtype seed trace
    watch report
    stats config logits_eos_inf confidence_eos_eot_inf resume profile coordinator num_processes process_id
    start_timeout"""
  shown = {line.split()[0].replace('[no]', '') for line in out.splitlines() if line.startswith('  --')}
  assert shown == {f'--{name}' for name in design.split()}
  assert 'this (default: 0.9 for parallel,' in out
  assert max(map(len, out.splitlines())) <= 110


@pytest.mark.parametrize('flag', ['--help', '-help', '--helpfull', '--helpshort'])
def test_every_way_to_ask_for_help(cli_main, flag):
  code, out, _ = cli_main('--gen_length=0', flag)
  assert code == 0 and '--max_accept' in out


def test_flags_are_those_of_the_tables():
  values = flags.FlagValues()
  cli.define_flags(values)
  assert set(SETTINGS) <= set(values)
  for name, switch in specs.switches().items():
    if switch.choices:
      assert tuple(values[name].parser.enum_values) == switch.choices
  assert tuple(values['dtype'].parser.enum_values) == DTYPES
  # What --help says is the default is the default.
  for name, spec in specs.knobs().items():
    # Each rule or decoder has a number of its own, or takes that of the checkpoint.
    if name not in ('refresh_distance', 'kappa', 'threshold'):
      assert values[name].default == spec.default


MISTAKES = {
  'unknown flag': (['--treshold=1'], "Unknown command line flag 'treshold'"),
  'positional': (['stray'], "there are no positional arguments, got 'stray'"),
  'positional behind flags': (['--prompt=a', 'b'], "there are no positional arguments, got 'b'"),
  'no value': (['--gen_length'], 'Missing value for flag --gen_length'),
  'unknown decoder': (
    ['--decoder=beam'],
    'flag --decoder=beam: value should be one of <dream|llada|parallel|saber|wino>',
  ),
  'unknown refresh': (
    ['--refresh=never'],
    'flag --refresh=never: value should be one of <archer|always|once|interval|certified>',
  ),
  'unknown drift': (['--drift=x'], 'flag --drift=x: value should be one of'),
  'wrong decoder': (
    ['--decoder=dream'],
    'decoder must be llada, parallel, saber or wino for a model with same_position logits',
  ),
  'radius': (['--drift=hidden', '--drift_radius=1.5'], 'drift_radius must be a number in [0, 1], got 1.5'),
  'radius below': (['--drift_radius=-0.5'], 'drift_radius must be a number in [0, 1], got -0.5'),
  'radius of no drift': (
    ['--drift_radius=0.2'],
    'drift_radius must not be given with drift token, whose distance is a count: give refresh_distance',
  ),
  'distance below': (['--refresh_distance=-1'], 'refresh_distance must be an integer in [0, 2147483647], got -1'),
  'part of a distance': (
    ['--refresh_distance=0.25'],
    "refresh_distance must be an integer in [0, 2147483647], got '0.25'",
  ),
  'distance of another drift': (
    ['--drift=hidden', '--drift_radius=0.2', '--refresh_distance=4'],
    'refresh_distance must not be given with drift hidden: it counts changed tokens; give drift_radius',
  ),
  'drift without a radius': (
    ['--drift=embedding'],
    'drift_radius must be given with refresh archer and drift embedding',
  ),
  'no commits': (['--decoder=saber', '--min_accept=0'], 'min_accept must be an integer in [1, 2147483647], got 0'),
  'guided saber': (
    ['--decoder=saber', '--cfg_scale=1'],
    'cfg_scale must not be given with decoder saber: it belongs to llada',
  ),
  'penalty of the other saber': (
    ['--decoder=saber', '--eos_penalty=1'],
    'eos_penalty must not be given with decoder saber on a model with same_position logits',
  ),
  'threshold': (['--threshold=2'], 'threshold must be a number in [0, 1], got 2.0'),
  'threshold as text': (['--threshold=high'], "threshold must be a number in [0, 1], got 'high'"),
  'nan': (['--temperature=nan'], 'temperature must be a number in [0, 1000000], got nan'),
  'half a token': (['--gen_length=1.5'], "gen_length must be an integer in [1, 2147483647], got '1.5'"),
  'no length': (['--gen_length=0'], 'gen_length must be an integer in [1, 2147483647], got 0'),
  'negative length': (['--gen_length=-4'], 'gen_length must be an integer in [1, 2147483647], got -4'),
  'no block': (['--block_length=0'], '0 is not a positive integer'),
  'block above the canvas': (
    ['--block_length=64'],
    'block_length must be at most gen_length, got 64 and gen_length=16',
  ),
  'steps below the blocks': (
    ['--decoder=llada', '--block_length=4', '--steps=3'],
    'steps must be at least the number of blocks, 4 (gen_length=16, block_length=4), got 3',
  ),
  'nobody reads it': (['--alg=entropy'], 'alg must not be given with decoder wino: it belongs to dream'),
  'no rule reads it': (['--refresh=always', '--max_age=2'], 'max_age must not be given with refresh always'),
  'batch': (['--batch_size=0'], '0 is not a positive integer'),
  'seed': (['--seed=-1'], '-1 is not an integer in the range [0, 4294967295]'),
  'mesh and watch': (['--mesh=data:2', '--watch'], 'watch must not be given with mesh data:2'),
  'no mesh': (['--mesh=4x2'], "mesh must be like data:4,model:2, got '4x2'"),
  'mesh twice': (['--mesh=data:1,data:1'], 'mesh must be like data:4,model:2'),
  'prompt and input': (['--prompt=a', '--input=x'], 'prompt and input must not be given together'),
  'input that is not there': (['--input=nowhere.jsonl'], 'input must be a file of JSON lines that exists'),
  'input that is a folder': (['--input=.'], 'input must be a file of JSON lines that exists'),
  'input without a name': (['--input='], 'input must not be empty'),
  'output without a name': (['--input=x', '--output='], 'output must not be empty'),
  'two users of stdout': (['--watch', '--output=-'], 'watch and output - must not be given together'),
  'config that is not there': (['--config=nowhere.py'], 'config cannot be loaded'),
  'output that exists': (['--output=taken.jsonl'], 'output taken.jsonl exists already and is never overwritten'),
  'output nowhere': (['--output=nowhere/x.jsonl'], 'output must be in a folder that exists, got nowhere'),
  'output that cannot be written': (['--output=/proc/x.jsonl'], 'output must be in a folder that can be written'),
  'trace that is a file': (['--trace=taken.jsonl'], 'trace taken.jsonl cannot be made'),
  'checkpoint that is not there': (['--checkpoint=nowhere'], 'checkpoint nowhere does not exist'),
  'no checkpoint': (['--checkpoint=.'], 'must be a folder with a manifest.json'),
}


@pytest.mark.parametrize('name', MISTAKES)
def test_a_mistake_is_one_line_before_anything_is_loaded(name, cli_main, text_path, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(checkpoint, 'load', None)
  Path('taken.jsonl').write_text('kept')
  arguments, message = MISTAKES[name]
  code, out, err = cli_main(f'--checkpoint={text_path}', *arguments)
  assert (code, out) == (1, '')
  assert err.startswith('error: ') and err.count('\n') == 1
  assert message in err
  assert os.listdir() == ['taken.jsonl'] and Path('taken.jsonl').read_text() == 'kept'


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['--prompt='], 'prompt 0: prompt must not be empty'),
    (['--prompt=a', '--prompt=b<|mask|>'], 'prompt 1: prompt must not contain the mask token'),
    (['--prompt=' + 'a' * 250], 'prompt 0: prompt of 250 tokens and gen_length=16 must together be at most the 256'),
  ],
)
def test_a_wrong_prompt_is_a_wrong_flag(cli_main, text_path, tmp_path, arguments, message):
  code, out, err = cli_main(f'--checkpoint={text_path}', f'--output={tmp_path}/x', *arguments)
  assert (code, out) == (1, '') and err.startswith(f'error: {message}')
  assert os.listdir(tmp_path) == []


def test_checkpoints_that_lack_something(cli_main, llada_tiny, tmp_path):
  base = f'--checkpoint={llada_tiny.path}'
  assert 'prompt or input must be given: the checkpoint brings no example' in cli_main(base)[2]
  assert 'output must be given: the checkpoint has no tokenizer' in cli_main(base, '--prompt=a')[2]
  output = f'--output={tmp_path}/x'
  assert 'prompt 0: prompt needs a tokenizer' in cli_main(base, '--prompt=a', output)[2]
  assert 'the checkpoint has no chat template' in cli_main(base, '--input=-', '--chat', output)[2]
  assert os.listdir(tmp_path) == []


def test_a_damaged_checkpoint(cli_main, text_path, tmp_path):
  import shutil

  shutil.copytree(text_path, tmp_path / 'model')
  file = max((tmp_path / 'model' / 'params').rglob('*'), key=lambda path: path.stat().st_size * path.is_file())
  file.write_bytes(file.read_bytes()[:-10])
  code, _, err = cli_main(f'--checkpoint={tmp_path / "model"}', '--prompt=a')
  assert code == 1 and 'is damaged' in err and err.count('\n') == 1


# Precedence.


def settled(text_path, *arguments):
  argv = ['run_decode.py', f'--checkpoint={text_path}', *arguments]
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, 'argv', argv)
    return cli.parse(argv)


def write_config(path, **entries):
  path.write_text(f'import ml_collections\ndef get_config():\n  return ml_collections.ConfigDict({entries!r})\n')
  return path


def test_precedence(text_path, tmp_path):
  config = write_config(tmp_path / 'c.py', gen_length=24, threshold=0.5, batch_size=3, prompt=['x', 'y,z'], chat=True)
  row = settled(text_path).settings.row({})
  assert (row['gen_length'], row['threshold']) == (16, 0.6)  # recommended, built in
  command = settled(text_path, f'--config={config}')
  row = command.settings.row({})
  assert (row['gen_length'], row['threshold'], command.options['batch_size']) == (24, 0.5, 3)
  assert command.options['prompt'] == ['x', 'y,z'] and command.settings.chat
  command = settled(text_path, f'--config={config}', '--gen_length=32', '--batch_size=8', '--prompt=p,q', '--nochat')
  row = command.settings.row({})
  # A flag wins even with the value that is its default.
  assert (row['gen_length'], row['threshold'], command.options['batch_size']) == (32, 0.5, 8)
  assert command.options['prompt'] == ['p,q'] and not command.settings.chat
  assert settled(text_path, f'--config={config}', '--config.threshold=0.25').settings.row({})['threshold'] == 0.25
  assert settled(text_path).settings.row({'threshold': 0.75})['threshold'] == 0.75
  assert settled(text_path).example == EXAMPLE


@pytest.mark.parametrize(
  ('entries', 'message'),
  [
    ({'treshold': 0.5}, 'treshold in the config is no flag'),
    ({'threshold': 2}, 'threshold must be a number in'),
    ({'threshold': 'high'}, 'threshold must be a number in'),
    ({'alg': 'entropy'}, 'alg must not be given with decoder wino'),
    ({'decoder': 'beam'}, 'decoder in the config: value should be one of'),
    ({'chat': 'yes'}, 'chat in the config: must be true or false'),
    ({'prompt': 'one'}, 'prompt in the config: must be a list of texts'),
    ({'batch_size': 0}, 'batch_size in the config'),
  ],
)
def test_mistakes_in_the_config(text_path, tmp_path, cli_main, entries, message):
  config = write_config(tmp_path / 'c.py', **entries)
  code, _, err = cli_main(f'--checkpoint={text_path}', f'--config={config}')
  assert code == 1 and message in err and err.count('\n') == 1


def test_the_example_config(text_path):
  command = settled(text_path, f'--config={ROOT / "configs" / "decode_reference.py"}')
  assert command.settings.refresh == 'always' and command.options['stats']


# Runs.


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


def test_weights_that_are_no_numbers(cli_main, broken_path):
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
def test_a_switch_of_the_end_token(cli_main, tmp_path_factory, arguments):
  # A model that wants nothing but the end.
  path = save_text_model(tmp_path_factory.mktemp('end') / 'model', eos_bias=1e3)
  code, out, _ = cli_main(f'--checkpoint={path}', '--prompt=ab', '--output=-', *arguments)
  (record,) = map(json.loads, out.splitlines())
  assert code == 0
  assert (CONFIG.eos_id in record['token_ids']) == (not arguments)
  assert record['finish_reason'] == ('length' if arguments else 'stop')
  assert record['generated_tokens'] == (16 if arguments else record['token_ids'].index(CONFIG.eos_id))


# Goldens through --input and --trace.


def golden_records(cases):
  """Records of prompt_ids with the cases' numbers, and the canvas after every step that each must show."""
  expected = {}
  records = []
  for case in cases:
    args = case.args
    mask = case.arrays.get('attention_mask', np.ones_like(case.arrays['prompt']))
    steps = case.arrays['tokens_after_step']
    for row, prompt in enumerate(case.arrays['prompt']):
      name = f'{case.id}.{row}'
      knobs = {'gen_length': args.get('gen_length', args.get('max_new_tokens'))}
      knobs |= {k: args[k] for k in ('steps', 'threshold', 'threshold_back', 'cfg_scale') if k in args}
      interval = args.get('refresh_every', 1)
      knobs |= {'refresh_interval': interval or 0, 'refresh_at_block_start': int(args.get('refresh_at_block_start', 0))}
      valid = mask[row, : len(prompt)].astype(bool)
      records.append({'id': name, 'prompt_ids': prompt[valid].tolist(), **knobs})
      canvases = steps[:, row] if steps.ndim == 3 else steps
      per_step = {key: case.arrays[key] for key in ('refresh_per_step', 'accept_per_step', 'remask_per_step')
                  if key in case.arrays}  # fmt: skip
      expected[name] = (canvases[:, len(prompt) :], per_step)
  return records, expected


def golden_group(golden, function, **static):
  """The cases of some functions that share a program: block_length, alg and mask_prediction are static."""
  return [
    case
    for case in golden.cases.values()
    if case.function in function
    and all(case.args[name] == value for name, value in static.items())
    and not case.id.endswith('_maskpred')
  ]


WINO = ('wino.decoding_wino', 'asymmetric_prompt_cache_wino')
slow = pytest.mark.slow


@pytest.mark.parametrize(
  ('name', 'functions', 'static', 'arguments'),
  [
    ('llada_tiny', WINO, {'block_length': 32}, ['--decoder=wino']),
    pytest.param('llada_tiny', WINO, {'block_length': 16}, ['--decoder=wino'], marks=slow),
    pytest.param('llada_tiny', WINO, {'block_length': 64}, ['--decoder=wino'], marks=slow),
    ('llada_tiny', ('llada.generate',), {'block_length': 8}, ['--decoder=llada']),
    pytest.param('llada_tiny', ('llada.generate',), {'block_length': 12}, ['--decoder=llada'], marks=slow),
    pytest.param('llada_tiny', ('llada.generate',), {'block_length': 16}, ['--decoder=llada'], marks=slow),
    pytest.param('llada_tiny', ('llada.generate',), {'block_length': 24}, ['--decoder=llada'], marks=slow),
    ('dream_tiny', ('dream.diffusion_generate',), {'alg': 'entropy'}, []),
    pytest.param('dream_tiny', ('dream.diffusion_generate',), {'alg': 'maskgit_plus'}, [], marks=slow),
    pytest.param('dream_tiny', ('dream.diffusion_generate',), {'alg': 'topk_margin'}, [], marks=slow),
  ],
  ids=lambda value: '_'.join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_goldens(cli_main, request, tmp_path, name, functions, static, arguments):
  golden = request.getfixturevalue(name)
  records, expected = golden_records(golden_group(golden, functions, **static))
  check_goldens(cli_main, golden, tmp_path, records, expected, static, arguments)


@slow
def test_golden_of_a_predicted_mask(cli_main, llada_tiny, tmp_path):
  (name,) = [id for id in case_ids('llada_tiny', WINO[0]) if id.endswith('_maskpred')]
  records, expected = golden_records([llada_tiny.cases[name]])
  arguments = ['--decoder=wino', '--mask_prediction=official']
  check_goldens(cli_main, llada_tiny, tmp_path, records, expected, {'block_length': 16}, arguments)


def check_goldens(cli_main, golden, tmp_path, records, expected, static, arguments):
  assert records
  path = write_lines(tmp_path / 'in.jsonl', records)
  shape = max(record['gen_length'] for record in records)
  code, _, stderr = cli_main(
    f'--checkpoint={golden.path}', f'--input={path}', f'--output={tmp_path / "out.jsonl"}', f'--trace={tmp_path / "t"}',
    '--noearly_stop', '--refresh=interval', '--refresh_interval=2', f'--batch_size={len(records)}',
    f'--gen_length={shape}', *(f'--{name}={value}' for name, value in static.items()), *arguments,
  )  # fmt: skip
  assert code == 0, stderr
  for result in read_lines(tmp_path / 'out.jsonl'):
    canvases, per_step = expected[result['id']]
    with np.load(tmp_path / 't' / f'{result["id"]}.npz') as trace:
      assert trace['id'] == result['id']
      np.testing.assert_array_equal(trace['canvas_after_step'], canvases, err_msg=result['id'])
      for name, values in per_step.items():
        np.testing.assert_array_equal(trace[name], values, err_msg=f'{result["id"]} {name}')
    assert result['steps'] == len(canvases)


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


# Real processes.


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


# The process around it.


def test_the_cache_folder(monkeypatch, tmp_path):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  assert runtime.cache_folder() == tmp_path / 'archer_jax' / 'xla'
  monkeypatch.setenv('HOME', str(tmp_path / 'home'))
  for value in ('', 'relative'):
    monkeypatch.setenv('XDG_CACHE_HOME', value)
    assert runtime.cache_folder() == tmp_path / 'home' / '.cache' / 'archer_jax' / 'xla'


def test_a_cache_of_ones_own_is_kept_and_one_that_cannot_be_made_is_done_without(monkeypatch, tmp_path):
  (tmp_path / 'file').touch()
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'file'))
  before = jax.config.jax_compilation_cache_dir
  runtime.set_up()
  assert jax.config.jax_compilation_cache_dir == before
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  jax.config.update('jax_compilation_cache_dir', str(tmp_path / 'own'))
  try:
    runtime.set_up()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / 'own')
    assert not (tmp_path / 'cache').exists()
  finally:
    jax.config.update('jax_compilation_cache_dir', before)


def test_facts():
  facts = runtime.facts()
  assert facts['jax'] == jax.__version__ and facts['backend'] == 'cpu'
  assert json.loads(json.dumps(facts)) == facts

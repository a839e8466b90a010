"""What is wrong is one line, before anything is decoded."""

import os
from pathlib import Path
import shutil

import pytest

from archer_jax.checkpoints import checkpoint

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
  'nothing to stop at': (
    ['--stop=a', '--stop='],
    "stop must be a text or a list of texts, none of them empty, got ['a', '']",
  ),
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
  shutil.copytree(text_path, tmp_path / 'model')
  file = max((tmp_path / 'model' / 'params').rglob('*'), key=lambda path: path.stat().st_size * path.is_file())
  file.write_bytes(file.read_bytes()[:-10])
  code, _, err = cli_main(f'--checkpoint={tmp_path / "model"}', '--prompt=a')
  assert code == 1 and 'is damaged' in err and err.count('\n') == 1

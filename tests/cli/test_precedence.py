"""Flags over the config file, that over the checkpoint, that over the defaults."""

import sys

from cli_files import ROOT
import pytest
from text_model import EXAMPLE

from archer_jax.cli import command as cli


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
  # Those of the run, which are no settings of the table.
  assert settled(text_path, '--logprobs', '--stop=a', '--stop=b').settings.stop == ('a', 'b')
  assert settled(text_path, '--logprobs').settings.logprobs and not settled(text_path).settings.logprobs


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

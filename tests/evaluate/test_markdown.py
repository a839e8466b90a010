"""The tables of the documentation are those of the figures beside them."""

import json
import os
from pathlib import Path
import runpy
import subprocess
import sys

import pytest

ROOT = Path(__file__).parents[2]
TOOL = runpy.run_path(str(ROOT / 'tools' / 'markdown_table.py'))
FIGURES = ROOT / 'docs' / 'figures'


@pytest.mark.parametrize(
  ('page', 'file', 'settings'),
  [
    ('README.md', 'saber.json', ['always', 'archer:4', 'archer:8', 'once']),
    ('docs/defaults.md', 'saber.json', None),
    ('docs/defaults.md', 'wino.json', None),
    ('docs/defaults.md', 'wino-long.json', None),
    ('docs/methods.md', 'methods.json', None),
  ],
)
def test_a_page_shows_the_table_of_its_figures(page, file, settings):
  assert TOOL['markdown'](TOOL['read_records'](FIGURES / file), settings) in (ROOT / page).read_text()


def test_mistakes_are_one_sentence(tmp_path):
  records = TOOL['read_records'](FIGURES / 'saber.json')
  with pytest.raises(ValueError, match=r'settings must be among always, .*, got never'):
    TOOL['markdown'](records, ['never'])
  for content in ('', '{"points": 1}', '{}', '[{"task": "sort"}]'):
    path = tmp_path / 'file.json'
    path.write_text(content)
    with pytest.raises(ValueError, match=r'file\.json must be a file of --json of archer_jax'):
      TOOL['read_records'](path)
  path.write_text(json.dumps(records))
  assert TOOL['markdown'](TOOL['read_records'](path)) == TOOL['markdown'](records)


def test_a_setting_that_the_terminal_cannot_show(tmp_path):
  (record, *_) = TOOL['read_records'](FIGURES / 'saber.json')
  (tmp_path / 'file.json').write_text(json.dumps([record | {'setting': 'archer\u22644'}]))
  done = subprocess.run(
    [sys.executable, ROOT / 'tools' / 'markdown_table.py', tmp_path / 'file.json'],
    env={**os.environ, 'PYTHONIOENCODING': 'ascii', 'PYTHONPATH': str(ROOT)},
    capture_output=True,
  )
  assert done.returncode == 0, done.stderr
  assert b'| `archer\\u22644` |' in done.stdout

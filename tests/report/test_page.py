import io
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from recordings import arrays

from archer_jax.report import __main__ as command
from archer_jax.report import page
from archer_jax.report.recording import make_recording

pytest.importorskip('matplotlib')

CHROMIUM = shutil.which('chromium')
PROBE = """<script>
const told = [], press = (key, shiftKey = false) => {
  document.dispatchEvent(new KeyboardEvent('keydown', { key, shiftKey, bubbles: true }));
  told.push(document.getElementById('number').textContent);
};
for (const key of ['Home', 'ArrowRight', 'End', 'ArrowLeft']) press(key);
press('r', true);
press('b');
told.push(document.getElementById('what').textContent, document.getElementById('taken').textContent);
const slider = document.getElementById('slider');
slider.value = 3;
slider.dispatchEvent(new Event('input'));
told.push(document.getElementById('what').textContent);
document.body.dataset.told = JSON.stringify(told);
</script></body>"""


def recording(**others):
  return make_recording(arrays(**others), 'x')


def embedded(text):
  return json.loads(re.search(r'^const data = (.*);$', text, re.MULTILINE)[1])


def test_a_page_needs_nothing_but_itself():
  text = page.page_text(recording())
  # The only address is the name space of its drawing.
  assert set(re.findall(r'\w+://[\w./]+', text)) == {'http://www.w3.org/2000/svg'}
  assert not re.findall(r'\b(?:src|href)\s*=|@import|url\(|fetch\(|XMLHttpRequest|<link', text)
  assert "default-src 'none'" in text


def test_what_a_model_writes_cannot_end_the_script():
  text = page.page_text(recording())
  assert text.count('</script>') == 1 and '<title>a_b</title>' in text
  data = embedded(text)
  assert data['name'] == 'a<b' and data['texts']['1'] == '</script>'


def test_a_page_has_the_whole_decoding():
  data = embedded(page.page_text(recording()))
  assert data['changes'] == [[[0, 1], [1, 2]], [[1, 9], [2, 3]], [[0, 9]], [[0, 1], [1, 4]]]
  assert data['margin'] == [None, 0.5, 0, 0.25] and data['age'] == [-1, 1, 2, 1]
  assert data['reason'] == [1, 0, 2, 0] and data['reasonNames'][1] == 'distance'
  assert data['distance'] == [0, 2, 3, 2] and data['limit'] == 3


@pytest.mark.skipif(CHROMIUM is None, reason='no chromium')
def test_keys_and_slider(tmp_path):
  file = tmp_path / 'page.html'
  file.write_text(page.page_text(recording()).replace('</body>', PROBE))
  call = [CHROMIUM, '--headless', '--no-sandbox', '--disable-gpu', f'--user-data-dir={tmp_path / "profile"}']
  run = subprocess.run([*call, '--dump-dom', file.as_uri()], capture_output=True, text=True, check=True, timeout=120)
  told = json.loads(re.search(r'<body data-told="([^"]*)"', run.stdout)[1].replace('&quot;', '"'))
  places = ['before step 1 of 4', 'step 1 of 4', 'step 4 of 4', 'step 3 of 4', 'step 1 of 4', 'step 2 of 4']
  assert told[:6] == places
  assert told[6].startswith("Reuse: the prompt's keys and values of 1 step before were kept.1 token committed, 1 taken")
  assert told[7] == 'position 1: “b” (stood since step 1; then “�” in step 4)'
  assert 'since 3 positions differed from the anchor, and K is 3' in told[8]


def test_the_command(tmp_path, capsys):
  for name in ('x', 'y'):
    np.savez(tmp_path / f'{name}.npz', **arrays())
  assert command.main(['report', str(tmp_path / 'x.npz'), str(tmp_path / 'y.npz')]) == 0
  assert capsys.readouterr().out.split() == [str(tmp_path / name) for name in ('x.png', 'x.html', 'y.png', 'y.html')]
  assert (tmp_path / 'x.png').read_bytes().startswith(b'\x89PNG')


def test_a_file_that_the_terminal_cannot_name(tmp_path, monkeypatch):
  np.savez(tmp_path / '2≤3.npz', **arrays())
  stdout = io.TextIOWrapper(io.BytesIO(), 'ascii')
  monkeypatch.setattr(sys, 'stdout', stdout)
  assert command.main(['report', str(tmp_path / '2≤3.npz')]) == 0
  stdout.flush()
  assert [line.rpartition('/')[2] for line in stdout.buffer.getvalue().decode('ascii').split()] == [
    '2\\u22643.png',
    '2\\u22643.html',
  ]


@pytest.mark.parametrize(
  ('names', 'message'),
  [
    ([], 'trace must be given: archer-report TRACE.npz'),
    (['nowhere.npz'], 'there is none at'),
    (['x.npz', 'nowhere/x.npz', '--output=out'], 'must have names of their own, got x twice'),
    (['x.npz'], 'x.png exists already and is never overwritten'),
  ],
)
def test_mistakes_of_the_command(tmp_path, capsys, monkeypatch, names, message):
  monkeypatch.chdir(tmp_path)
  np.savez(tmp_path / 'x.npz', **arrays())
  (tmp_path / 'x.png').write_bytes(b'kept')
  assert command.main(['report', *names]) == 1
  err = capsys.readouterr().err
  assert message in err and err.count('\n') == 1
  assert (tmp_path / 'x.png').read_bytes() == b'kept'


def test_without_matplotlib(tmp_path, capsys, monkeypatch):
  monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
  np.savez(tmp_path / 'x.npz', **arrays())
  assert command.main(['report', str(tmp_path / 'x.npz')]) == 1
  assert capsys.readouterr().err == "error: report needs matplotlib: pip install 'archer_jax[eval]'\n"


@pytest.mark.parametrize(
  'others',
  [
    {},
    # No clause by drift, ties and nothing bounded throughout.
    {'settings': np.asarray('{"decoder": "llada", "refresh": "once"}'), 'margin_per_step': np.zeros(4, np.float32)},
    {'margin_per_step': np.full(4, np.inf, np.float32), 'refresh_per_step': np.zeros(4, bool)},
  ],
)
def test_pictures(tmp_path, others):
  files = page.write_report(recording(**others), tmp_path / 'a.b')
  assert [file.name for file in files] == ['a.b.png', 'a.b.html'] and all(file.stat().st_size > 5000 for file in files)

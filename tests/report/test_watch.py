import io

import jax
import numpy as np
import programs
import pytest
from rich.console import Console
from text_model import CONFIG
from text_model import save_text_model

from archer_jax.checkpoints import checkpoint
from archer_jax.engine.batching import batch_config
from archer_jax.engine.batching import batch_state
from archer_jax.engine.requests import make_request
from archer_jax.engine.settings import make_settings
from archer_jax.report import watch

MASK = CONFIG.mask_id
CFG = make_settings(CONFIG, {'decoder': 'wino', 'gen_length': 4}).config(4)


@pytest.fixture(scope='module')
def text(tmp_path_factory):
  return checkpoint.load(save_text_model(tmp_path_factory.mktemp('text') / 'model'))


def start(settings):
  requests = [make_request({'prompt_ids': ids}, index, settings, None) for index, ids in enumerate(([5, 6], [7]))]
  cfg = batch_config(requests, settings, dtype='float32', end_ids=(1,), trace=True)
  return batch_state(requests, [1, 2], 3, cfg=cfg), cfg


def view(before, after, **fields):
  counts = {'row': 0, 'steps': 4, 'refreshes': 1, 'is_refresh': False, 'margin': 0.5}
  counts['seen'] = {'distance': np.int32(2), 'drift': np.float32(0.25)}
  return watch.StepView(before=np.array(before), after=np.array(after), **{**counts, **fields})


def spell(token):
  return chr(token)


def test_steps_are_those_of_decode(text):
  _, params, _ = text
  settings = make_settings(
    CONFIG, {'decoder': 'wino', 'gen_length': 16, 'threshold': 0.02, 'threshold_back': 0.02, 'temperature': 0.5}
  )
  state, cfg = start(settings)
  expected = programs.loop(cfg)(params, state)
  views = []
  state, _ = start(settings)
  before = watch._step._cache_size()
  for state, seen in watch.step_through(params, state, cfg=cfg):  # noqa: B020, B007
    views += seen
  # One program for the first step and the others.
  assert watch._step._cache_size() - before == 1
  jax.tree.map(np.testing.assert_array_equal, state.counters, expected.counters)
  np.testing.assert_array_equal(state.canvas, expected.canvas)
  assert {view.row for view in views} == {0, 1}
  for row in (0, 1):
    mine = [view for view in views if view.row == row]
    assert [view.steps for view in mine] == list(range(1, int(expected.counters.steps[row]) + 1))
    np.testing.assert_array_equal([view.after for view in mine], expected.trace['canvas'][row, : len(mine)])
    np.testing.assert_array_equal([view.is_refresh for view in mine], expected.trace['refresh'][row, : len(mine)])
    for name in ('distance', 'drift', 'age'):
      np.testing.assert_allclose([view.seen[name] for view in mine], expected.trace[name][row, : len(mine)])
    np.testing.assert_allclose([view.margin for view in mine], expected.trace['margin'][row, : len(mine)], rtol=1e-3)
    assert mine[-1].refreshes == expected.counters.refreshes[row]


def test_plain_lines():
  line = watch.plain_line(view([MASK, 65, 66, MASK], [67, 65, MASK, MASK]), CFG, spell)
  assert line == 'row 0  step   4  refreshes   1 ( 25%)  distance   2  drift 0.25  margin      0.5  reuse +1 -1  CA··'
  assert 'refresh +0' in watch.plain_line(view([65], [65], is_refresh=True), CFG, spell)


def test_colours():
  text = watch.drawing(view([MASK, 65, 66, MASK], [67, 65, MASK, MASK], is_refresh=True), CFG, spell)
  styles = {text.plain[span.start : span.end].strip(): str(span.style) for span in text.spans}
  assert text.plain.splitlines()[1] == 'CAB·'
  assert styles['C'] == watch.NEW_STYLE
  assert styles['A'] == 'default'
  assert styles['B'] == watch.TAKEN_BACK_STYLE
  assert styles['·'] == watch.QUIET_STYLE
  assert styles['refresh'] == watch.REFRESH_STYLE
  reuse = watch.drawing(view([65], [65]), CFG, spell)
  assert watch.REFRESH_STYLE not in [str(span.style) for span in reuse.spans]


def test_nothing_that_a_model_writes_steers_the_terminal(text):
  _, _, tokenizer = text
  newline, tab, letter = tokenizer.encode('\n\tq')
  assert [watch._spelled(token, tokenizer) for token in (newline, tab, letter)] == ['⏎', '⇥', 'q']
  assert watch._spelled(12, None) == '12 '


@pytest.mark.parametrize('terminal', [False, True])
def test_both_views(text, monkeypatch, terminal):
  monkeypatch.setattr(watch, '_SECONDS_PER_FRAME', 0)
  _, params, tokenizer = text
  stream = io.StringIO()
  console = Console(file=stream, force_terminal=terminal, width=100, _environ={'TERM': 'xterm-256color'})
  settings = make_settings(
    CONFIG, {'decoder': 'wino', 'gen_length': 16, 'threshold': 0.02, 'threshold_back': 0.02, 'temperature': 0.5}
  )
  state, cfg = start(settings)
  state = watch.Watch(tokenizer, console).decode(params, state, cfg=cfg)
  shown = stream.getvalue()
  steps = np.asarray(state.counters.steps)
  if terminal:
    # Green for what is new, magenta for a refresh.
    assert '\x1b[1;32m' in shown and '\x1b[1;35m' in shown
  else:
    assert '\x1b' not in shown
    lines = shown.splitlines()
    assert len(lines) == steps.sum()
    assert lines[0].startswith('row 0  step   1') and 'refresh +' in lines[0]
    answer = tokenizer.hf.decode(state.canvas[0].tolist()).replace('<|mask|>', '·').replace('\n', '⏎')
    assert [line for line in lines if line.startswith('row 0')][-1].endswith(answer.replace('\t', '⇥'))

"""benchmarks/paper.py: its own programs on tiny checkpoints, its arithmetic, and runs that are killed and go on."""

import dataclasses
import json
import os
from pathlib import Path
import resource
import shutil
import subprocess
import sys
import types

from golden_data import read_cases
import jax
import jax.numpy as jnp
import numpy as np
from paper import activity
from paper import command
from paper import feedback
from paper import main as main_table
from paper import pieces
from paper import prompt_length
from paper import published
from paper import radius
from paper import report as reports
from paper import response_length
from paper import run as runs
from paper import schedules
from paper import settings
from paper import validity
from paper.actions import without_remasking
from paper.bench import Bench
import programs
import pytest
from text_model import CHAT_TEMPLATE

from archer_jax import runtime
from archer_jax import specs
from archer_jax.checkpoints.convert import convert
from archer_jax.config import DecodeConfig
from archer_jax.evaluate import work
from archer_jax.loop.step import init_state
from archer_jax.training.tokenizer import EOS
from archer_jax.training.tokenizer import MASK
from archer_jax.training.tokenizer import PAD
from archer_jax.training.tokenizer import VOCAB
from archer_jax.training.tokenizer import save_tokenizer
from archer_jax.types import Knobs

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / 'benchmarks' / 'paper.py'
GOLDENS = ROOT / 'tests' / 'goldens'


def quick(loop, donate='state'):
  return jax.jit(loop.__wrapped__, static_argnames='cfg', donate_argnames=donate, compiler_options=programs.QUICK)


# Once, so that all tests share their compiled programs.
COUNTED = programs.quick(work.counted_decode)
FOLLOWED = quick(activity.followed_decode)
PROBED = quick(validity.probed_decode)
UNTIL_SURE = quick(feedback.until_sure)
BRANCH = quick(feedback.branch, None)
SCHEDULED = quick(schedules.scheduled_decode)
STEPS = quick(prompt_length.steps)


@pytest.fixture(autouse=True)
def quick_programs(monkeypatch):
  monkeypatch.setattr(work, 'counted_decode', COUNTED)
  monkeypatch.setattr(activity, 'followed_decode', FOLLOWED)
  monkeypatch.setattr(validity, 'probed_decode', PROBED)
  monkeypatch.setattr(feedback, 'until_sure', UNTIL_SURE)
  monkeypatch.setattr(feedback, 'branch', BRANCH)
  monkeypatch.setattr(radius, 'scheduled_decode', SCHEDULED)
  monkeypatch.setattr(prompt_length, 'steps', STEPS)
  monkeypatch.setattr(validity, '_BOOTSTRAPS', 40)


# Decodings of the public code, of several lengths and every radius in one batch.
PROMPT_LENGTH, CANVAS_LENGTH = 20, 24
CASES = [
  case
  for case in read_cases('llada_tiny_saber').values()
  if case.args.get('n', 2) == 2
  and case.args['block_length'] == case.args['gen_length'] <= CANVAS_LENGTH
  and case.arrays['prompt'].shape[1] <= PROMPT_LENGTH
  and 'maskpred' not in case.id
]
NAMES = [case.id for case in CASES]


@pytest.fixture(scope='module')
def start(llada_tiny):
  """Config and first state of all cases."""
  length, canvas = PROMPT_LENGTH, CANVAS_LENGTH
  tokens, valid = np.zeros((len(CASES), length), np.int32), np.zeros((len(CASES), length), bool)
  rows = []
  for row, case in enumerate(CASES):
    prompt = case.arrays['prompt'][0]
    tokens[row, length - len(prompt) :], valid[row, length - len(prompt) :] = prompt, True
    rule = {'refresh_interval': 1}
    if case.function == 'archer.saber':
      rule = {'refresh_distance': case.args['radius'] or 0}
    rows.append({'gen_length': case.args['gen_length'], **rule})
  cfg = DecodeConfig(
    model=llada_tiny.config, decoder='saber', canvas_length=canvas, block_length=canvas, early_stop=False
  )

  def make(cfg=cfg):
    state = init_state(tokens, valid, Knobs.stack(rows), np.zeros(len(CASES), np.uint32), cfg=cfg)
    return jax.device_put(state, jax.devices()[0])

  return cfg, make


def finals(canvas):
  """What each case should end as, beside what it did."""
  for row, case in enumerate(CASES):
    expected = case.arrays['final'][0, case.arrays['prompt'].shape[1] :]
    yield case, np.asarray(canvas)[row, : len(expected)], expected


def test_revised_positions_are_those_of_the_public_code(llada_tiny, start):
  cfg, make = start
  state, seen = jax.device_get(FOLLOWED(llada_tiny.params, make(), cfg=cfg))
  for case, mine, expected in finals(state.canvas):
    row = NAMES.index(case.id)
    np.testing.assert_array_equal(mine, expected, err_msg=case.id)
    np.testing.assert_array_equal(seen['revised'][row, : len(expected)], case.arrays['revised'], err_msg=case.id)
    # Whatever was not revised ends as its first token; of the others some do not.
    first = seen['first'][row, : len(expected)]
    assert (first >= 0).all() and (first == expected)[~case.arrays['revised']].all()
    assert not seen['revised'][row, len(expected) :].any()
  assert any((seen['first'][row] != state.canvas[row])[seen['revised'][row]].any() for row in range(len(CASES)))


@pytest.mark.slow
def test_revised_positions_of_shifted_models(dream_tiny):
  cases = [case for case in read_cases('dream_tiny_saber').values() if case.args['max_new_tokens'] == 24]
  assert {case.args['eos_penalty'] for case in cases} == {0, 0.5, 3}
  cfg = DecodeConfig(
    model=dream_tiny.config,
    decoder='saber',
    canvas_length=24,
    block_length=24,
    mask_prediction='official',
    early_stop=False,
  )
  tokens, valid = np.zeros((len(cases), 12), np.int32), np.zeros((len(cases), 12), bool)
  rows = []
  for row, case in enumerate(cases):
    prompt = case.arrays['prompt'][0]
    tokens[row, 12 - len(prompt) :], valid[row, 12 - len(prompt) :] = prompt, True
    rule = {'refresh_interval': 1}
    if case.function == 'archer.saber':
      rule = {'refresh_distance': case.args['radius'] or 0}
    rows.append({'gen_length': 24, 'steps': case.args['steps'], 'eos_penalty': case.args['eos_penalty'], **rule})
  start = lambda cfg: init_state(tokens, valid, Knobs.stack(rows), np.zeros(len(cases), np.uint32), cfg=cfg)
  state, seen = jax.device_get(FOLLOWED(dream_tiny.params, start(cfg), cfg=cfg))
  for row, case in enumerate(cases):
    np.testing.assert_array_equal(state.canvas[row], case.arrays['final'][0, -24:], err_msg=case.id)
    np.testing.assert_array_equal(seen['revised'][row], case.arrays['revised'], err_msg=case.id)
    assert (seen['first'][row] == state.canvas[row])[~case.arrays['revised']].all()
  other = without_remasking(cfg)
  state, seen = jax.device_get(FOLLOWED(dream_tiny.params, start(other), cfg=other))
  assert not state.counters.remasked.any() and not seen['revised'].any()
  assert (state.canvas == seen['first']).all() and (state.counters.accepted == 24).all()


def test_without_remasking_nothing_is_taken_back(llada_tiny, start):
  cfg, make = start
  other = without_remasking(cfg)
  assert other != cfg and other == without_remasking(cfg) and hash(other) == hash(without_remasking(cfg))
  state, seen = jax.device_get(FOLLOWED(llada_tiny.params, make(other), cfg=other))
  assert not state.counters.remasked.any() and not seen['revised'].any()
  np.testing.assert_array_equal(state.counters.accepted, [case.args['gen_length'] for case in CASES])
  plain, _ = jax.device_get(FOLLOWED(llada_tiny.params, make(), cfg=cfg))
  # At least two tokens a step.
  assert (state.counters.steps <= -(-state.knobs.gen_length // 2)).all()
  assert (plain.counters.steps > state.counters.steps).all()


def test_shadow_forwards_touch_nothing(llada_tiny, start):
  cfg, make = start
  drawn = np.ones((len(CASES), cfg.canvas_length), bool)
  state, probed, seen = PROBED(llada_tiny.params, make(), jnp.asarray(drawn), cfg=cfg)
  plain, nothing, _ = PROBED(llada_tiny.params, make(), jnp.zeros(drawn.shape, bool), cfg=cfg)
  numbers = list(range(len(CASES)))
  validity.check_untouched('some task', numbers, state, plain)
  assert not np.any(nothing)
  other = dataclasses.replace(plain, canvas=plain.canvas.at[3, 0].add(1))
  with pytest.raises(ValueError, match='some task: problem 3 decodes otherwise'):
    validity.check_untouched('some task', numbers, state, other)
  probed, seen = jax.device_get((probed, seen))
  for case, mine, expected in finals(state.canvas):
    np.testing.assert_array_equal(mine, expected)
    row = NAMES.index(case.id)
    steps = len(case.arrays['tokens_after_step'])
    refreshes = case.arrays.get('refresh_per_step', np.ones(steps, bool))
    np.testing.assert_array_equal(probed[row, :steps], ~refreshes)
    assert not probed[row, steps:].any()
    if 'distance_per_step' in case.arrays:
      np.testing.assert_array_equal(
        seen['distance'][row, :steps][~refreshes], case.arrays['distance_per_step'][~refreshes]
      )
  # Every part of an action differs somewhere, and never where the canvases that follow are the same but for nothing.
  assert all(seen[name].any() for name in ('accepted', 'tokens', 'remasked', 'canvas'))
  action = seen['accepted'] | seen['tokens'] | seen['remasked']
  assert not seen['canvas'][action == 0].any()
  # The kept prompt of a step is at least one step old, and every step of a row is seen as that step.
  assert (seen['age'][probed] >= 1).all()
  np.testing.assert_array_equal(seen['step'][probed], probed.nonzero()[1])


def test_branches_begin_in_one_state(llada_tiny, start):
  cfg, make = start
  snapshot, column = UNTIL_SURE(llada_tiny.params, make(), cfg=cfg)
  column = np.asarray(column)
  paired = column >= 0
  assert paired.sum() > 4
  rows, steps = np.arange(len(CASES)), np.asarray(snapshot.row_step)
  for case, row in ((case, NAMES.index(case.id)) for case in CASES):
    if paired[row]:
      # The state is that of the public code after this step.
      after = case.arrays['tokens_after_step'][steps[row] - 1, case.arrays['prompt'].shape[1] :]
      np.testing.assert_array_equal(np.asarray(snapshot.canvas)[row, : len(after)], after)
  outcomes = {}
  for name, refreshes in (('fresh', True), ('cached', False)):
    state, revised = BRANCH(llada_tiny.params, snapshot, jnp.asarray(column), jnp.asarray(refreshes), cfg=cfg)
    outcomes[name] = jax.device_get((state.canvas, state.counters.refreshes, revised))
  refreshed_before = np.asarray(snapshot.counters.refreshes)
  for case, row in ((case, NAMES.index(case.id)) for case in CASES):
    if not paired[row]:
      continue
    length = case.args['gen_length']
    refreshes = case.arrays.get('refresh_per_step', np.ones(len(case.arrays['tokens_after_step']), bool))
    # The branch that does what the rule would have done ends as the public decoding; after it both follow the rule.
    name = 'fresh' if refreshes[steps[row]] else 'cached'
    canvas, count, revised = outcomes[name]
    np.testing.assert_array_equal(canvas[row, :length], case.arrays['final'][0, -length:], err_msg=case.id)
    assert count[row] == refreshes.sum() and refreshed_before[row] == refreshes[: steps[row]].sum()
    token = np.asarray(snapshot.canvas)[row, column[row]]
    later = case.arrays['tokens_after_step'][steps[row] :, case.arrays['prompt'].shape[1] + column[row]]
    gone = np.flatnonzero(later != token)
    assert revised[row] == (gone[0] + 1 if gone.size else 0)
  assert (outcomes['fresh'][0] != outcomes['cached'][0])[rows[paired]].any()


def test_schedules_have_as_many_refreshes_as_were_taken():
  steps, refreshes = np.array([10, 4, 1, 0, 7]), np.array([3, 4, 1, 0, 2])
  even = schedules.schedules('even', steps, refreshes, 12)
  assert [np.flatnonzero(row).tolist() for row in even] == [[0, 3, 6], [0, 1, 2, 3], [0], [], [0, 3]]
  draws = [schedules.schedules('random', steps, refreshes, 12, first) for first in (0, 5, 10)]
  for schedule in draws:
    assert schedule.sum(axis=1).tolist() == refreshes.tolist()
    assert all(row[taken:].sum() == 0 for row, taken in zip(schedule, steps, strict=True))
    assert schedule[steps > 0, 0].all()
  # A problem has its draw, in whatever batch it is.
  np.testing.assert_array_equal(schedules.schedules('random', steps[2:], refreshes[2:], 12, 2), draws[0][2:])
  assert any((draws[0] != draw).any() for draw in draws[1:])


@pytest.mark.parametrize(
  ('alignment', 'first', 'without'), [('same_position', 'llada', 'dream'), ('shifted', 'dream', 'wino')]
)
def test_the_main_table_has_every_method(alignment, first, without):
  labels = settings.main_labels(alignment, 8)
  assert labels[0] == f'always+decoder={first}' and labels[-2:] == [settings.SABER, 'archer:8+decoder=saber']
  assert not any(f'decoder={without}' in label for label in labels) and len(set(labels)) == len(labels)
  for spec in specs.specs(specs.DECODERS):
    assert (alignment in spec.alignments) == any(label.startswith(f'always+decoder={spec.name}') for label in labels)
  for spec in specs.specs(specs.REUSE):
    fits = alignment in spec.alignments and spec.name != 'prompt'
    assert fits == any(label.partition('+')[0] == spec.name for label in labels)


def test_verdicts_say_what_the_interval_carries():
  assert reports.verdict(1.2, 0.1, 0.3) == 'agrees' and reports.verdict(-1.2, 0.1, 0.3) == 'disagrees'
  assert reports.verdict(-5, -0.3, -0.1) == 'agrees'
  # The end of an interval is in it.
  for low, high in ((-0.1, 0.3), (0.0, 0.3), (-0.3, 0.0), (None, None)):
    assert reports.verdict(1, low, high) == 'undecided' and reports.decided(low, high, 'a', 'b') == 'undecided'
  assert reports.verdict(0, 0.1, 0.3) == 'undecided'
  assert reports.verdict(1.7, 1.2, 1.4, null=1) == 'agrees' and reports.verdict(1.7, 0.2, 0.4, null=1) == 'disagrees'
  assert (reports.decided(0.1, 0.2, 'a', 'b'), reports.decided(-0.2, -0.1, 'a', 'b')) == ('a', 'b')
  assert reports.in_range(20, 28, 27, 30) == 'compatible' and reports.in_range(20, 26, 27, 30) == 'disagrees'


def test_the_time_left_is_that_of_all_tables():
  piece = lambda table, task, part, units: pieces.Piece(table=table, task=task, part=part, units=units)
  every = [piece('a', 't', 0, 2), piece('a', 't', 1, 2), piece('a', 'u', 0, 3), piece('b', None, 0, 10)]
  assert pieces.seconds_left(every, {}) is None
  found = {every[0].key: pieces.Measured(value=0, seconds=8.0)}
  # What is not known takes as long as what is.
  assert pieces.seconds_left(every, found) == 4 * (2 + 3 + 10)
  found[every[2].key] = pieces.Measured(value=0, seconds=3.0)
  assert pieces.seconds_left(every, found) == pytest.approx(4 * 2 + 11 / 5 * 10)


@pytest.fixture
def call(monkeypatch, capsys, text_path, tmp_path):
  """Runs the command on three short problems and returns (code, stdout, stderr)."""
  monkeypatch.setattr(runtime, 'set_up', lambda: None)
  monkeypatch.chdir(tmp_path)
  # Every method takes a program of its own to compile.
  few = lambda alignment, k: [settings.one_token(alignment), settings.SABER, settings.archer(k)]
  monkeypatch.setattr(settings, 'main_labels', few)
  monkeypatch.setattr(main_table, 'main_labels', few)

  def run(*arguments):
    capsys.readouterr()
    given = ('--tasks=sort', '--n=3', '--gen_length=16', '--worked_examples=0', '--batch_size=2')
    code = command.main(['paper', f'--checkpoint={text_path}', *given, *arguments])
    return code, *capsys.readouterr()

  return run


def tables_of(path):
  return json.loads(Path(path).read_text())['tables']


def test_a_run_that_was_killed_goes_on(call, monkeypatch):
  # A program less to compile.
  monkeypatch.setattr(activity, 'without_remasking', lambda cfg: cfg)
  # A random model is sure of nothing; here it is of one token of three.
  monkeypatch.setattr(feedback, '_LOG_ODDS', -3.0)
  arguments = ('--tables=activity,feedback,validity', '--figure=pictures')
  code, _, err = call(*arguments[:1], '--json=whole')
  assert code == 0, err
  whole = tables_of('whole')
  assert 0 < whole['feedback']['rows'][0]['pairs'] < 3 and sum(row['probes'] for row in whole['validity']['rows']) > 3

  measured, measure = [], activity.measure

  def killed(bench, piece):
    if len(measured) == 1:
      raise KeyboardInterrupt
    measured.append(piece)
    return measure(bench, piece)

  monkeypatch.setattr(activity, 'measure', killed)
  code, out, err = call(*arguments, '--json=parts')
  assert code == 130 and 'interrupted' in err and 'Not finished: 1 of 2 parts are missing.' in out
  assert tables_of('parts')['activity']['rows'][0]['n'] == 2
  with open('parts.pieces.jsonl', 'ab') as file:
    # What a process leaves that dies while it writes.
    file.write(b'{"table": "activity", "ta')
  again = []
  monkeypatch.setattr(activity, 'measure', lambda bench, piece: (again.append(piece.part), measure(bench, piece))[1])
  code, out, _ = call(*arguments, '--json=parts')
  assert code == 0 and again == [1] and 'Not finished' not in out
  assert tables_of('parts') == whole
  for name in ('activity', 'feedback', 'validity'):
    assert Path('pictures', f'{name}.png').stat().st_size > 5000
    assert Path('pictures', f'{name}.md').read_text() in out

  # Finished, it only tells what it has.
  monkeypatch.setattr(activity, 'measure', None)
  assert call(*arguments, '--json=parts')[0] == 0 and tables_of('parts') == whole
  code, _, err = call(*arguments, '--json=parts', '--seed=1')
  assert code == 1 and 'parts.pieces.jsonl is of another run' in err and 'it has seed=0 and' in err
  assert 'this run seed=1 and' in err and err.count('error:') == 1
  code, _, err = call(*arguments, '--json=new')
  assert code == 1 and 'figure pictures has activity.md of another run already' in err
  Path('parts.pieces.jsonl').unlink()
  code, _, err = call(*arguments, '--json=parts')
  assert code == 1 and 'json parts exists already' in err


def test_speeds_and_quality(call, monkeypatch):
  monkeypatch.setattr(radius, 'RADII', (2, 8))
  monkeypatch.setattr(radius, '_MATCHED', [8])
  monkeypatch.setattr(radius, '_RADIUS_OF', {settings.archer(8): 8, settings.INFINITE: None})
  for module in (settings, radius):
    monkeypatch.setattr(module, 'radius_labels', lambda: [settings.SABER, settings.archer(8), settings.INFINITE])
  code, out, _ = call('--tables=main,radius', '--json=figures', '--figure=pictures', '--refresh_distance=8')
  assert code == 0
  told = tables_of('figures')
  one, saber, archer = told['main']['rows']
  assert [row['setting'] for row in (one, saber, archer)] == [
    'always+decoder=llada', 'always+decoder=saber', 'archer:8+decoder=saber',
  ]  # fmt: skip
  # As published, every position is decoded.
  assert (one['steps'], one['n'], one['gen_length']) == (16, 3, 16) and one['speed_one_token_counted'] == 1
  assert saber['refresh_share'] == 1 and archer['refresh_share'] < 1 < archer['speed_saber_counted']
  assert saber['speed_saber'] == 1 and saber['wins'] == saber['losses'] == 0
  assert any('LLaDA' not in claim['text'] and claim['verdict'] for claim in told['main']['claims'])
  base, eight, never = told['radius']['rows']
  assert (eight['k'], never['k'], never['refreshes']) == (8, None, 1) and base['speed_counted'] == 1
  # As many as there can be: a row may end before its schedule does.
  assert 1 < eight['even']['refreshes'] <= eight['refreshes'] and eight['random']['refreshes'] <= eight['refreshes']
  assert 'even' not in never
  assert '| sort | `always+decoder=saber` | 3 |' in out and '| sort | infinity | 3 |' in out
  assert all(Path('pictures', f'{name}.png').stat().st_size > 5000 for name in told)


def test_lengths(call, monkeypatch):
  monkeypatch.setattr(published, 'PROMPT_LENGTH', {64: 1.3})
  monkeypatch.setattr(published, 'PROMPT_LENGTH_CANVAS', 16)
  monkeypatch.setattr(published, 'RESPONSE_LENGTH_PROMPT', 64)
  monkeypatch.setattr(response_length, 'LENGTHS', (16,))
  monkeypatch.setattr(prompt_length, 'PAIRS', 3)
  # Over two devices, each with a half of the heads.
  code, out, _ = call('--tables=prompt_length,response_length', '--json=figures', '--mesh=model:2')
  assert code == 0
  told = tables_of('figures')
  (short,) = told['prompt_length']['rows']
  assert short['prompt_length'] == 64 and short['counted'] > 1
  assert short['full_ms'] > 0 and short['speed_low'] <= short['speed'] <= short['speed_high']
  (row,) = told['response_length']['rows']
  assert row['gen_length'] == 16 and row['counted'] > 1 > row['refresh_share'] and row['seconds_archer'] > 0
  assert '| 64 |' in out and '1.46x to 1.67x' in out


@pytest.mark.parametrize(
  ('arguments', 'said'),
  [
    (('--tables=main,speed',), 'tables must be among main, radius'),
    (('--tables=main,main',), 'each once'),
    (('--refresh_distance=0',), 'refresh_distance must be at least 1, got 0'),
    (('--gen_length=0',), 'gen_length must be'),
    (('--n=1',), 'n'),
    (('--json=no/such/folder',), 'json must be in a folder that exists'),
    (('--json=.',), 'json must be a file'),
    (('--figure=a_file',), 'figure must be a folder'),
    (('--mesh=rows:2',), 'mesh must be like data:4,model:2'),
    (('--mesh=data:2', '--batch_size=3'), 'rows of a batch must be a multiple of the mesh axis data'),
    (('--mesh=model:64',), 'mesh must have no more devices'),
    (('--tasks=sort,none',), "there is no task 'none'"),
    (('--decoder=wino',), 'decoder'),
    (('--json=damaged',), 'damaged.pieces.jsonl is not a file of pieces'),
  ],
)
def test_mistakes_are_told_in_one_sentence(call, arguments, said, monkeypatch):
  Path('a_file').write_text('')
  Path('damaged.pieces.jsonl').write_text('{"else": 1}\n')
  monkeypatch.setattr(runs.checkpoint, 'load', lambda *_, **__: pytest.fail('nothing must be loaded'))
  code, out, err = call(*arguments)
  assert code == 1 and out == '' and err.splitlines()[-1].startswith('error: ') and said in err


def script(*arguments):
  environment = {**os.environ, 'PYTHONPATH': str(SCRIPT.parents[1]), 'JAX_PLATFORMS': 'cpu'}
  command = [sys.executable, str(SCRIPT), *arguments]
  return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_help_is_quick():
  used = lambda: sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
  before = used()
  child = script('--help')
  # Seconds of processor time, since the machine may be busy with something else too.
  assert used() - before < 2
  assert child.returncode == 0 and '--tables' in child.stdout, child.stderr


@pytest.mark.slow
def test_the_bundled_model(tmp_path):
  files = [f'--json={tmp_path / "figures"}', f'--figure={tmp_path / "pictures"}']
  run = script('--tasks=sort,sudoku6', '--n=4', '--batch_size=4', *files)
  assert run.returncode == 0, run.stderr
  told = tables_of(tmp_path / 'figures')
  assert tuple(told) == settings.TABLES
  assert all((tmp_path / 'pictures' / f'{name}.png').stat().st_size > 5000 for name in told)
  assert told['radius']['rows'][-1]['task'] == main_table.ALL


def test_from_a_published_folder_to_the_main_table_on_mbpp(tmp_path, call):
  source = tmp_path / 'published'
  source.mkdir()
  config = json.loads((GOLDENS / 'llada_tiny' / 'config.json').read_text())
  special = {'mask_token_id': VOCAB[MASK], 'eos_token_id': VOCAB[EOS], 'pad_token_id': VOCAB[PAD]}
  (source / 'config.json').write_text(json.dumps({**config, **special, 'max_sequence_length': 2048}))
  shutil.copy(GOLDENS / 'llada_tiny' / 'model.safetensors', source)
  save_tokenizer(source)
  file = source / 'tokenizer_config.json'
  file.write_text(json.dumps({**json.loads(file.read_text()), 'chat_template': CHAT_TEMPLATE}))
  convert(source, tmp_path / 'converted')
  # MBPP's fields and the extended set's, whose answers are graded twice.
  problems = tmp_path / 'problems.jsonl'
  lines = (ROOT / 'tests' / 'tasks' / 'published' / 'mbpp.jsonl').read_text().splitlines()[:3]
  more = [{**json.loads(line), 'test_case_list': json.loads(line)['test_list'][:1]} for line in lines]
  problems.write_text(''.join(f'{json.dumps(record)}\n' for record in more))

  given = (f'--checkpoint={tmp_path / "converted"}', f'--tasks=mbpp_et:{problems}', '--gen_length=8')
  code, out, err = call(*given, '--tables=main', '--json=figures')
  assert code == 0, err
  rows = tables_of('figures')['main']['rows']
  assert [row['setting'] for row in rows] == [
    settings.one_token('same_position'),
    settings.SABER,
    settings.archer(None),
  ]
  # A random model solves nothing, by either set of tests.
  assert all((row['n'], row['pass_at_1'], row['also']) == (3, 0, {'et': 0}) for row in rows)
  assert all(row['steps'] <= 8 and row['prompt_tokens'] > 100 for row in rows)
  assert f'| mbpp_et:{problems} | `{settings.SABER}` | 3 | 0.0 (0-56), et 0.0 |' in out


def test_further_scores_are_told_apart():
  source = types.SimpleNamespace(name='task', is_solved=lambda *_: True, also={'et': lambda _, text: text == 'b'})
  plan = types.SimpleNamespace(source=source, problems=['p', 'q'])
  counters = dict.fromkeys(('steps', 'refreshes', 'remasked', 'generated_tokens', 'prompt_tokens'), 1)
  results = [types.SimpleNamespace(index=i, text=text, **counters) for i, text in enumerate('ab')]
  told = Bench(plans=[plan], params={}, tokenizer=None, k=None).told(plan, results)
  assert (told['solved'], told['solved_et']) == ([True, True], [False, True])

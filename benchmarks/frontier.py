"""Quality against speed over every refresh rule, and whether *when* matters at equal numbers of refreshes.

    python benchmarks/frontier.py --decoder saber --n 304 --json frontier.json --figure frontier.png

First part: Pass@1 with its paired difference to `always` (bootstrap over problems), measured and counted speed-up,
forwards, refresh share and flip-flop rate. Second part, for every setting of --matched: each problem is decoded again
with exactly as many refreshes as that setting took on it, evenly over its steps as a clock would, and at random steps.
A row that takes more steps than before keeps its schedule's last prompt; one that takes fewer saves what is left, so
the refreshes that were taken stand in the table.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm
from trajectory import COLORS
from trajectory import batches
from trajectory import check_files
from trajectory import paired_bootstrap
from trajectory import prepared
from trajectory import print_rows
from trajectory import scheduled_decode
from trajectory import write_json

from archer_jax.engine.engine import Timing
from archer_jax.evaluate import table
from archer_jax.evaluate.compare import Plan
from archer_jax.evaluate.compare import Trial
from archer_jax.evaluate.compare import play
from archer_jax.evaluate.record import records
from archer_jax.evaluate.run import Evaluation

SETTINGS = 'always,archer:2,archer:4,archer:8,archer:16,archer:32,once,interval:3,interval:6'
_TASKS = flags.DEFINE_string('tasks', 'sudoku6,sort,pipeline', 'tasks between commas')
_N = flags.DEFINE_integer('n', 304, 'problems of each task', lower_bound=2)
_BATCH = flags.DEFINE_integer('batch_size', 16, 'problems decoded together', lower_bound=1)
_EXAMPLES = flags.DEFINE_integer('worked_examples', None, "solved problems before each, by default the task's number")
_DECODER = flags.DEFINE_string('decoder', 'saber', 'decoder of all settings')
_COMPARE = flags.DEFINE_string('compare', SETTINGS, 'settings as of archer_jax.evaluate; the first must be always')
_MATCHED = flags.DEFINE_string(
  'matched', 'archer:4,archer:8', 'settings whose numbers of refreshes others are given too'
)
_DRAWS = flags.DEFINE_integer('draws', 3, 'draws of random times', lower_bound=1)
_JSON = flags.DEFINE_string('json', None, 'write the figures to this file')
_FIGURE = flags.DEFINE_string('figure', None, 'draw to this file, and to one with -matched in its name')


def schedules(kind: str, steps: np.ndarray, refreshes: np.ndarray, length: int, draw: int) -> np.ndarray:
  """Bool [B, length]: as many steps of each row as it refreshed, of those it took.

  The first step is always among them, since there is nothing kept yet.

  Args:
    kind: `even` or `random`.
    steps: int [B] that each row took.
    refreshes: int [B], at least 1 where steps is.
    length: the longest that any row may take.
    draw: names the random draw.
  """
  schedule = np.zeros((len(steps), length), bool)
  for row, (taken, count) in enumerate(zip(steps.tolist(), refreshes.tolist(), strict=True)):
    if kind == 'even':
      times = np.arange(count) * taken // max(count, 1)
    else:
      rng = np.random.default_rng((draw, row))
      times = np.r_[0, 1 + rng.permutation(max(taken - 1, 0))[: max(count - 1, 0)]]
    schedule[row, times] = count > 0
  return schedule


def replay(
  evaluation: Evaluation, plan: Plan, label: str, steps: np.ndarray, refreshes: np.ndarray, kind: str, draw: int
) -> dict[str, np.ndarray]:
  """Decodes a task with the refreshes of a setting at other times; arrays with an entry a problem."""
  solved, taken, used = [], [], []
  for problems, state, cfg in batches(plan, label, evaluation.tokenizer, on_low_margin='next_step'):
    mine = slice(problems.start, problems.stop)
    schedule = np.zeros((plan.batch_size, cfg.canvas_length), bool)
    # Row numbers of the whole task name the draws, so that no batch repeats another's.
    whole = schedules(kind, steps, refreshes, cfg.canvas_length, draw)
    schedule[: len(problems)] = whole[mine]
    done = scheduled_decode(evaluation.params, state, jnp.asarray(schedule), cfg=cfg)
    canvas, counters, lengths = jax.device_get((done.canvas, done.counters, done.gen_length))
    for row, problem in enumerate(problems):
      text = evaluation.tokenizer.decode_text(canvas[row, : lengths[row]].tolist())
      solved.append(bool(plan.source.is_solved(plan.problems[problem], text)))
      taken.append(int(counters.steps[row]))
      used.append(int(counters.refreshes[row]))
  return {'solved': np.array(solved), 'steps': np.array(taken), 'refreshes': np.array(used)}


def matched(evaluation: Evaluation, plan: Plan, label: str, trials: Sequence[Trial]) -> list[dict[str, Any]]:
  """A setting beside clock and chance with its own number of refreshes for every problem."""
  results = [result for trial in trials for result in trial.results]
  solved = np.array([verdict for trial in trials for verdict in trial.solved])
  steps, refreshes = (np.array([getattr(r, name) for r in results]) for name in ('steps', 'refreshes'))
  rows = [{'times': label, 'solved': solved, 'steps': steps, 'refreshes': refreshes}]
  rows.append({'times': 'even', **replay(evaluation, plan, label, steps, refreshes, 'even', 0)})
  draws = [replay(evaluation, plan, label, steps, refreshes, 'random', draw) for draw in range(_DRAWS.value)]
  rows.append({'times': 'random', **{key: np.mean([d[key] for d in draws], axis=0) for key in draws[0]}})
  return [
    {
      'task': plan.source.name,
      'setting': label,
      'times': row['times'],
      'n': len(solved),
      'pass_at_1': float(np.mean(row['solved'])),
      # Positive where the rule is better than these times.
      **paired_bootstrap(solved, row['solved']),
      'steps': float(np.mean(row['steps'])),
      'refreshes': float(np.mean(row['refreshes'])),
    }
    for row in rows
  ]


def draw_points(path: Path, points: Sequence[Mapping[str, Any]]) -> None:
  """Pass@1 over speed, a panel for each task and a line for each rule, at the thresholds that are recommended."""
  from matplotlib.figure import Figure

  tasks = list(dict.fromkeys(point['task'] for point in points))
  points = [point for point in points if '+' not in point['setting']]
  rules = list(dict.fromkeys(point['setting'].partition(':')[0] for point in points))
  figure = Figure(figsize=(4.4 * len(tasks), 4.2), layout='constrained')
  panels = figure.subplots(1, len(tasks), squeeze=False, sharey=True)[0]
  for panel, task in zip(panels, tasks, strict=True):
    mine = [point for point in points if point['task'] == task]
    base = next(point['pass_at_1'] for point in mine if point['setting'] == 'always')
    panel.axhline(100 * base, color='gray', linewidth=1, linestyle=':')
    for number, rule in enumerate(rules):
      line = sorted((p for p in mine if p['setting'].partition(':')[0] == rule), key=lambda p: p['speedup_wall'])
      if not line:
        continue
      x, y = [p['speedup_wall'] for p in line], [100 * p['pass_at_1'] for p in line]
      # Of the paired difference to `always`, which has none itself.
      spans = [[100 * (p['gain'] - p['gain_low']) for p in line], [100 * (p['gain_high'] - p['gain']) for p in line]]
      look = {'color': COLORS[number % len(COLORS)], 'fmt': f'-{"osD^v"[number % 5]}'}
      panel.errorbar(x, y, yerr=spans, **look, capsize=2, elinewidth=0.8, label=rule)
      for point, left, up in zip(line, x, y, strict=True):
        panel.annotate(
          point['setting'].partition(':')[2], (left, up), xytext=(4, 4), textcoords='offset points', color=look['color']
        )
    panel.set_title(f'{task}, {mine[0]["n"]} problems', fontsize=10)
    panel.set_xlabel('times as fast as always (wall time)')
    panel.grid(alpha=0.25)
  panels[0].set_ylabel('Pass@1 in %\n(95 % interval of the difference to always)')
  handles, labels = panels[0].get_legend_handles_labels()
  figure.legend(handles, labels, loc='outside lower center', ncols=len(labels), frameon=False)
  figure.savefig(path, dpi=150)


def draw_matched(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
  """Gain of the rule over clock and chance, per task and setting."""
  from matplotlib.figure import Figure

  places = list(dict.fromkeys((row['task'], row['setting']) for row in rows))
  figure = Figure(figsize=(7.5, 1.4 + 0.5 * len(places)), layout='constrained')
  panel = figure.subplots()
  for number, times in enumerate(('even', 'random')):
    mine = {(row['task'], row['setting']): row for row in rows if row['times'] == times}
    values = np.array([[100 * mine[place][key] for key in ('gain', 'gain_low', 'gain_high')] for place in places])
    errors = [values[:, 0] - values[:, 1], values[:, 2] - values[:, 0]]
    y = np.arange(len(places)) + 0.2 * (number - 0.5)
    panel.errorbar(
      values[:, 0], y, xerr=errors, fmt='os'[number], color=COLORS[1 + number], capsize=3, label=f'over {times} times'
    )
  panel.axvline(0, color='gray', linewidth=1)
  panel.set_yticks(range(len(places)), [f'{task}, {setting}' for task, setting in places])
  panel.set_ylim(len(places) - 0.5, -0.5)
  panel.set_xlabel('Pass@1 of the rule minus that of other refresh times, points, 95 % interval')
  panel.set_title(f'Does it matter when, at equal numbers of refreshes? n = {rows[0]["n"]} a point', fontsize=11)
  panel.grid(alpha=0.25, axis='x')
  figure.legend(loc='outside lower center', ncols=2, frameon=False)
  figure.savefig(path, dpi=150)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'there are no positional arguments, got {argv[1]!r}')
  check_files(_JSON.value, _FIGURE.value)
  labels = _COMPARE.value.split(',')
  wanted = [label for label in _MATCHED.value.split(',') if label]
  if labels[0] != 'always' or not set(wanted) <= set(labels):
    raise app.UsageError('compare must begin with always and name every setting of matched')
  others = [f'--decoder={_DECODER.value}']
  if _EXAMPLES.value is not None:
    others.append(f'--worked_examples={_EXAMPLES.value}')
  evaluation = prepared(_TASKS.value, _N.value, _COMPARE.value, _BATCH.value, *others)
  console, timing, points, rows = table.terminal(), Timing(), [], []
  for plan in evaluation.plans:
    with tqdm(total=len(plan.problems) * len(labels), desc=plan.source.name, unit='answer') as bar:
      rounds = list(play(plan, evaluation.params, evaluation.tokenizer, timing=timing, progress=bar.update))
    solved = {label: [v for trials in rounds for v in trials[label].solved] for label in plan.settings}
    mine = [{**r, **paired_bootstrap(solved[r['setting']], solved['always'])} for r in records(plan, rounds)]
    table.print_task(console, mine)
    keys = ('gain', 'gain_low', 'gain_high', 'speedup_wall', 'nfe', 'refresh_share', 'flip_flop_rate')
    short = [{'setting': r['setting'], **{key: r[key] for key in keys}} for r in mine]
    print_rows(f'{plan.source.name}: gain in Pass@1 over always, n = {mine[0]["n"]}', short)
    points += mine
    for label in wanted:
      told = matched(evaluation, plan, label, [trials[label] for trials in rounds])
      print_rows(f'{plan.source.name}: the refreshes of {label} at other times, n = {told[0]["n"]}', told)
      rows += told
    write_json(_JSON.value, {'points': points, 'matched': rows, 'run': dict(evaluation.facts)})
    if _FIGURE.value is not None:
      path = Path(_FIGURE.value)
      draw_points(path, points)
      if rows:
        draw_matched(path.with_name(f'{path.stem}-matched{path.suffix}'), rows)


if __name__ == '__main__':
  app.run(main)

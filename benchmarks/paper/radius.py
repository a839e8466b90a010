"""The radius: quality and speed over K, and whether it matters when, at equal numbers of refreshes.

Each problem is decoded again with exactly as many refreshes as K took on it, evenly over its steps as a clock would,
and at random steps. A row that takes more steps than before keeps its schedule's last prompt, and one that takes fewer
saves what is left, so that the refreshes that were taken stand beside it.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from archer_jax.evaluate.statistics import mean_speedup
from archer_jax.evaluate.statistics import paired_bootstrap
from paper import figures
from paper import published
from paper import report as reports
from paper.bench import Bench
from paper.bench import in_turns
from paper.bench import joined
from paper.main import ALL
from paper.main import compared
from paper.main import effort
from paper.main import quality
from paper.main import ratio_fields
from paper.pieces import Piece
from paper.pieces import by_task
from paper.report import Claim
from paper.report import Report
from paper.schedules import EVEN
from paper.schedules import RANDOM
from paper.schedules import scheduled_decode
from paper.schedules import schedules
from paper.settings import RADII
from paper.settings import SABER
from paper.settings import archer
from paper.settings import radius_labels

# With K = 1 every step refreshes, and without an end only the first: there are no other times.
_MATCHED = [k for k in RADII if k > 1]
_KINDS = (EVEN, RANDOM)
_RADIUS_OF = dict(zip(radius_labels()[1:], (*RADII, None), strict=True))


def pieces(bench: Bench) -> list[Piece]:
  return bench.batches('radius', len(radius_labels()) + len(_KINDS) * len(_MATCHED))


def measure(bench: Bench, piece: Piece) -> dict[str, Any]:
  """The batch at every radius in turns, then at other times."""
  plan, labels = bench.plan(piece.task), radius_labels()
  measured = {label: bench.decode(plan, label, piece.part) for label in in_turns(labels, piece.part)}
  value = {label: measured[label] for label in labels}
  for k in _MATCHED:
    for kind in _KINDS:
      value[f'{archer(k)}, {kind}'] = _replayed(bench, piece, archer(k), value[archer(k)], kind)
  return value


def _replayed(bench: Bench, piece: Piece, label: str, one: dict[str, Any], kind: str) -> dict[str, Any]:
  """The batch with as many refreshes as a setting took on each problem, at other times."""
  plan = bench.plan(piece.task)
  batch = bench.start(plan, label, piece.part)
  schedule = np.zeros((plan.batch_size, batch.cfg.canvas_length), bool)
  first = piece.part * plan.batch_size
  whole = schedules(kind, np.array(one['steps']), np.array(one['refreshes']), batch.cfg.canvas_length, first)
  schedule[: len(whole)] = whole
  state = scheduled_decode(bench.params, batch.state, jnp.asarray(schedule), cfg=batch.cfg)
  return bench.told(plan, bench.results(piece.task, batch, state))


def report(bench: Bench, found: Sequence[tuple[Piece, Any]]) -> Report:
  labels, tasks = radius_labels(), dict(by_task(found))
  rows, speeds = [], {label: [] for label in labels}
  for task, values in tasks.items():
    for label in labels:
      speed = compared(values, label, SABER)
      speeds[label].append(speed)
      rows.append(_row(task, label, values, ratio_fields('speed', speed)))
  if len(tasks) > 1:
    tasks[ALL] = [value for values in tasks.values() for value in values]
    rows += [_row(ALL, label, tasks[ALL], ratio_fields('speed', mean_speedup(speeds[label]))) for label in labels]
  claims = [claim for row in rows if row['setting'] != SABER for claim in _claims(row)]
  claims += [_together(task, values, kind) for task, values in tasks.items() for kind in _KINDS]
  return Report(
    name='radius',
    title='The radius K',
    columns=COLUMNS,
    rows=rows,
    claims=claims,
    notes=[
      'even, random: Pass@1 of K less that of as many refreshes at even and at random steps of the same problem, in '
      'points; positive where distance is the better clock. In brackets the refreshes that were taken, by K and by the '
      'other; a decoding that ends earlier leaves some of its own.'
    ],
  )


def _row(task: str, label: str, values: Sequence[Any], speed: dict[str, float | None]) -> dict[str, Any]:
  k = _RADIUS_OF.get(label)
  name, paper = published.benchmark(task), None
  if not task.partition(':')[0].endswith('_et') and name in published.RADIUS and label != SABER:
    paper = published.RADIUS[name][k]
  row = {
    'task': task,
    'setting': label,
    'k': k,
    **quality(values, label),
    **effort(values, label),
    'refreshes': float(joined([value[label] for value in values], 'refreshes').mean()),
    **speed,
    'paper_pass_at_1': paper and paper[0],
    'paper_speed': paper and paper[1],
  }
  if k in _MATCHED:
    solved = joined([value[label] for value in values], 'solved')
    for kind in _KINDS:
      others = [value[f'{label}, {kind}'] for value in values]
      gain = paired_bootstrap(solved, joined(others, 'solved'))
      row[kind] = {
        'pass_at_1': float(joined(others, 'solved').mean()),
        'gain': gain[0],
        'gain_low': gain[1],
        'gain_high': gain[2],
        'steps': float(joined(others, 'steps').mean()),
        'refreshes': float(joined(others, 'refreshes').mean()),
      }
  return row


def _claims(row: dict[str, Any]) -> list[Claim]:
  name = 'infinity' if row['k'] is None else row['k']
  claims, paper = [], row['paper_pass_at_1']
  gain = row['gain'], row['gain_low'], row['gain_high']
  theirs = None if paper is None else paper - published.RADIUS_SABER[published.benchmark(row['task'])]
  claims.append(
    Claim(
      text=f'{row["task"]}: Pass@1 at K = {name} less that of Saber',
      paper='' if theirs is None else f'{theirs:+.2f} points',
      here=reports.points(*gain),
      verdict=reports.decided(*gain[1:], 'gains', 'loses') if theirs is None else reports.verdict(theirs, *gain[1:]),
    )
  )
  if row['paper_speed'] is not None:
    claims.append(
      Claim(
        text=f'{row["task"]}: speed at K = {name} against Saber',
        paper=reports.times(row['paper_speed']),
        here=reports.times(row['speed'], row['speed_low'], row['speed_high']),
        verdict=reports.verdict(row['paper_speed'] - 1, row['speed_low'], row['speed_high'], 1),
      )
    )
  if row['k'] in _MATCHED:
    even = row[EVEN]
    claims.append(
      Claim(
        text=f'{row["task"]}: Pass@1 at K = {name} less that of as many refreshes at even times',
        paper='',
        here=reports.points(even['gain'], even['gain_low'], even['gain_high']),
        verdict=reports.decided(even['gain_low'], even['gain_high'], 'distance is ahead', 'even times are ahead'),
      )
    )
  return claims


def _together(task: str, values: Sequence[Any], kind: str) -> Claim:
  """The question of when, over all K of which it can be asked: their mean of each problem."""
  mean = lambda names: np.mean([joined([value[name] for value in values], 'solved') for name in names], axis=0)
  labels = [archer(k) for k in _MATCHED]
  value, low, high = paired_bootstrap(mean(labels), mean([f'{label}, {kind}' for label in labels]))
  return Claim(
    text=f'{task}: Pass@1 of K = {_MATCHED[0]} to {_MATCHED[-1]} together less that of as many at {kind} times',
    paper='',
    here=reports.points(value, low, high),
    verdict=reports.decided(low, high, 'distance is ahead', f'{kind} times are ahead'),
  )


def _other(kind: str):
  def cell(row: dict[str, Any]) -> str:
    if kind not in row:
      return '-'
    one = row[kind]
    taken = f'[{row["refreshes"]:.1f}, {one["refreshes"]:.1f}]'
    return f'{100 * one["gain"]:+.1f} ({100 * one["gain_low"]:+.1f} to {100 * one["gain_high"]:+.1f}) {taken}'

  return cell


COLUMNS = {
  'task': lambda r: r['task'],
  'K': lambda r: 'Saber' if r['setting'] == SABER else 'infinity' if r['k'] is None else str(r['k']),
  'n': lambda r: str(r['n']),
  'Pass@1 % (95 %)': lambda r: f'{100 * r["pass_at_1"]:.1f} ({100 * r["ci_low"]:.0f}-{100 * r["ci_high"]:.0f})',
  'paper': lambda r: reports.number(r['paper_pass_at_1']),
  'won-lost, p': lambda r: '-' if r['setting'] == SABER else f'{r["wins"]}-{r["losses"]}, {r["p_value"]:.2g}',
  'v Saber': lambda r: reports.times(r['speed'], r['speed_low'], r['speed_high']),
  'counted': lambda r: reports.times(r['speed_counted']),
  'paper ': lambda r: reports.times(r['paper_speed']),
  'steps': lambda r: f'{r["steps"]:.1f}',
  'refreshes %': lambda r: f'{100 * r["refresh_share"]:.1f}',
  'even': _other(EVEN),
  'random': _other(RANDOM),
}


def draw(report: Report):
  """Pass@1 over speed along K, with other times, a panel for each task."""
  tasks = list(dict.fromkeys(row['task'] for row in report.rows))
  figure, axes = figures.panels(len(tasks))
  for axis, task in zip(axes, tasks, strict=True):
    base, *line = [row for row in report.rows if row['task'] == task]
    axis.axhline(100 * base['pass_at_1'], color='gray', linewidth=1, linestyle=':', label='Saber')
    x, y = [row['speed'] for row in line], [100 * row['pass_at_1'] for row in line]
    spans = [figures.bars(row['gain'], row['gain_low'], row['gain_high']) for row in line]
    errors = np.array([[100 * low[0], 100 * high[0]] for low, high in spans]).T
    axis.errorbar(x, y, yerr=errors, capsize=2, elinewidth=0.8, label='K', **figures.look(1))
    for row, left, up in zip(line, x, y, strict=True):
      text = '∞' if row['k'] is None else str(row['k'])
      axis.annotate(text, (left, up), xytext=(4, 4), textcoords='offset points')
    matched = [row for row in line if EVEN in row]
    for number, kind in enumerate(_KINDS):
      heights = [100 * row[kind]['pass_at_1'] for row in matched]
      axis.plot(
        [row['speed'] for row in matched], heights, linestyle='', label=f'{kind} times', **figures.look(2 + number)
      )
    axis.set_title(f'{task}, n = {base["n"]}', fontsize=10)
    axis.set_xlabel('times as fast as Saber')
    axis.set_ylabel('Pass@1 in %\n(interval of the difference to Saber)')
  figures.legend(figure, axes[0])
  return figure

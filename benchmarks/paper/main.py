"""The main table: quality and speed of every method, against Saber and against one token a step."""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

from archer_jax.evaluate.statistics import Speedup
from archer_jax.evaluate.statistics import mean_speedup
from archer_jax.evaluate.statistics import paired_bootstrap
from archer_jax.evaluate.statistics import sign_test
from archer_jax.evaluate.statistics import speedup
from archer_jax.evaluate.statistics import wilson_interval
from paper import figures
from paper import published
from paper import report as reports
from paper.bench import Bench
from paper.bench import in_turns
from paper.bench import joined
from paper.pieces import Piece
from paper.pieces import by_task
from paper.report import Claim
from paper.report import Report
from paper.settings import SABER
from paper.settings import archer
from paper.settings import main_labels
from paper.settings import one_token

ALL = 'all tasks'


def _labels(bench: Bench) -> list[str]:
  return main_labels(_alignment(bench), bench.k)


def _alignment(bench: Bench) -> str:
  return bench.plans[0].settings[SABER].model.logit_alignment


def pieces(bench: Bench) -> list[Piece]:
  return bench.batches('main', len(_labels(bench)))


def measure(bench: Bench, piece: Piece) -> dict[str, Any]:
  """The batch with every setting, in turns."""
  plan, labels = bench.plan(piece.task), _labels(bench)
  measured = {label: bench.decode(plan, label, piece.part) for label in in_turns(labels, piece.part)}
  return {label: measured[label] for label in labels}


def compared(values: Sequence[Mapping[str, Any]], label: str, base: str) -> Speedup:
  """How many times as fast a setting is as another, from the batches of both."""
  of = lambda name, field: [value[name][field] for value in values]
  return speedup(of(base, 'seconds'), of(base, 'operations'), of(label, 'seconds'), of(label, 'operations'))


def quality(values: Sequence[Mapping[str, Any]], label: str) -> dict[str, Any]:
  """Pass@1 with its interval, and against Saber on the same problems."""
  mine = [value[label] for value in values]
  solved = joined(mine, 'solved')
  base = joined([value[SABER] for value in values], 'solved')
  low, high = wilson_interval(int(solved.sum()), len(solved))
  wins, losses = int(np.sum(solved & ~base)), int(np.sum(base & ~solved))
  gain, gain_low, gain_high = paired_bootstrap(solved, base)
  return {
    'n': len(solved),
    'pass_at_1': float(solved.mean()),
    'ci_low': low,
    'ci_high': high,
    'wins': wins,
    'losses': losses,
    'p_value': sign_test(wins, losses),
    'gain': gain,
    'gain_low': gain_low,
    'gain_high': gain_high,
  }


def ratio_fields(name: str, speed: Speedup) -> dict[str, float | None]:
  return {name: speed.wall, f'{name}_low': speed.low, f'{name}_high': speed.high, f'{name}_counted': speed.counted}


def effort(values: Sequence[Mapping[str, Any]], label: str) -> dict[str, float]:
  """Means per problem."""
  mine = [value[label] for value in values]
  steps = joined(mine, 'steps')
  return {
    'seconds': float(np.sum([value['seconds'] for value in mine]) / len(steps)),
    'steps': float(steps.mean()),
    'refresh_share': float(joined(mine, 'refreshes').sum() / max(steps.sum(), 1)),
    'remasked': float(joined(mine, 'remasked').mean()),
    'generated_tokens': float(joined(mine, 'generated_tokens').mean()),
    # Up to the first end token; behind it an answer costs little to write.
    'steps_per_token': float(steps.sum() / max(joined(mine, 'generated_tokens').sum(), 1)),
  }


def _published(bench: Bench, label: str) -> published.Line | None:
  """The line of the paper that a setting is that of."""
  if _alignment(bench) != 'same_position':
    return None
  settings = bench.plans[0].settings[label]
  keeps = settings.methods.reuse
  if settings.refresh == 'always':
    keeps = None
  name = published.METHODS.get((settings.decoder, keeps))
  return published.MAIN.get(name)


def report(bench: Bench, found: Sequence[tuple[Piece, Any]]) -> Report:
  labels, base = _labels(bench), one_token(_alignment(bench))
  rows, claims = [], []
  tasks = dict(by_task(found))
  speeds = {label: {'one_token': [], 'saber': []} for label in labels}
  for task, values in tasks.items():
    plan = bench.plan(task)
    for label in labels:
      against = {name: compared(values, label, other) for name, other in (('one_token', base), ('saber', SABER))}
      for name, speed in against.items():
        speeds[label][name].append(speed)
      rows.append(
        {
          'task': task,
          'setting': label,
          **quality(values, label),
          'also': {
            name: float(joined([v[label] for v in values], f'solved_{name}').mean()) for name in plan.source.also
          },
          **effort(values, label),
          'prompt_tokens': float(joined([value[label] for value in values], 'prompt_tokens').mean()),
          'gen_length': plan.settings[label].knobs['gen_length'],
          'batch_size': plan.batch_size,
          **{key: v for name, speed in against.items() for key, v in ratio_fields(f'speed_{name}', speed).items()},
          **_paper_fields(bench, label, task),
        }
      )
  everything = [value for values in tasks.values() for value in values]
  if len(tasks) > 1:
    for label in labels:
      line = _published(bench, label)
      rows.append(
        {
          'task': ALL,
          'setting': label,
          **quality(everything, label),
          **effort(everything, label),
          **{
            key: v
            for name, parts in speeds[label].items()
            for key, v in ratio_fields(f'speed_{name}', mean_speedup(parts)).items()
          },
          'paper_pass_at_1': line and line.mean,
          'paper_speed': line and line.speed,
        }
      )
  for row in rows:
    claims += _claims(bench, row, base)
  return Report(
    name='main',
    title='Quality and speed',
    columns=COLUMNS,
    rows=rows,
    claims=claims,
    notes=_notes(bench, rows, base),
    more={'one_token': base, 'saber': SABER, 'archer': archer(bench.k)},
  )


def _paper_fields(bench: Bench, label: str, task: str) -> dict[str, float | None]:
  """Pass@1 and speed against one token a step that the paper has for a setting on a task."""
  line, name = _published(bench, label), published.benchmark(task)
  if line is None or name not in line.scores:
    return {'paper_pass_at_1': None, 'paper_speed': None}
  one = published.MAIN[published.ONE_TOKEN].seconds[name]
  return {'paper_pass_at_1': published.score(task, *line.scores[name]), 'paper_speed': one / line.seconds[name]}


def _claims(bench: Bench, row: Mapping[str, Any], base: str) -> list[Claim]:
  """What the paper says of a method, on this benchmark or on the mean of its own."""
  label, task = row['setting'], row['task']
  claims, name = [], published.benchmark(task)
  line = _published(bench, label)
  here = lambda what: reports.times(*(row[f'{what}{end}'] for end in ('', '_low', '_high')))
  if line is not None and label != base:
    own = name in line.scores
    speed = row['paper_speed'] if own else line.speed
    claims.append(
      Claim(
        text=f'{task}: speed of `{label}` against one token a step',
        paper=f'{speed:.2f}x' + ('' if own or task == ALL else ' (mean)'),
        here=here('speed_one_token'),
        verdict=reports.verdict(speed - 1, row['speed_one_token_low'], row['speed_one_token_high'], 1),
      )
    )
  if line is not None and label != SABER:
    own = name in line.scores and row['paper_pass_at_1'] is not None
    saber = published.MAIN[published.SABER]
    theirs = line.mean - saber.mean
    if own:
      theirs = row['paper_pass_at_1'] - published.score(task, *saber.scores[name])
    claims.append(
      Claim(
        text=f'{task}: Pass@1 of `{label}` less that of Saber',
        paper=f'{theirs:+.2f} points' + ('' if own or task == ALL else ' (mean)'),
        here=reports.points(row['gain'], row['gain_low'], row['gain_high']),
        verdict=reports.verdict(theirs, row['gain_low'], row['gain_high']),
      )
    )
  if label == archer(bench.k):
    claims += _against_saber(bench, row)
  return claims


def _against_saber(bench: Bench, row: Mapping[str, Any]) -> list[Claim]:
  """Archer against its own decoder, of which the paper has more benchmarks and models."""
  name = published.benchmark(row['task'])
  pair = published.PAIRS[_alignment(bench)].get(name)
  low, high = row['speed_saber_low'], row['speed_saber_high']
  claims = [
    Claim(
      text=f'{row["task"]}: speed of Archer against Saber',
      paper='' if pair is None else f'{pair.speed:.2f}x (K {pair.k})',
      here=reports.times(row['speed_saber'], low, high),
      # On every benchmark of the paper it is faster.
      verdict=reports.verdict(1, low, high, 1),
    )
  ]
  # Those of the main table are told there.
  line = _published(bench, row['setting'])
  if pair is not None and (line is None or name not in line.scores):
    saber, mine = (published.score(row['task'], *scores) for scores in (pair.saber, pair.archer))
    claims.append(
      Claim(
        text=f'{row["task"]}: Pass@1 of Archer less that of Saber',
        paper=f'{mine - saber:+.2f} points',
        here=reports.points(row['gain'], row['gain_low'], row['gain_high']),
        verdict=reports.verdict(mine - saber, row['gain_low'], row['gain_high']),
      )
    )
  return claims


def _notes(bench: Bench, rows: Sequence[Mapping[str, Any]], base: str) -> list[str]:
  mine = [row for row in rows if row['setting'] == archer(bench.k) and row['task'] != ALL]
  below = [row['task'] for row in mine if row['losses'] > row['wins'] and row['p_value'] < 0.05]
  best = max(mine, key=lambda row: row['speed_one_token'])
  settings = bench.plans[0].settings
  k = settings[archer(bench.k)].row({})['refresh_distance']
  lengths = ', '.join(f'{row["task"]} P {row["prompt_tokens"]:.0f}, G {row["gen_length"]}' for row in mine)
  return [
    f'K = {k}; batches of {mine[0]["batch_size"]}; every position is decoded, also behind an end token. '
    f'Tokens of prompt and answer: {lengths}.',
    f'Archer is fastest against one token a step on {best["task"]}, {best["speed_one_token"]:.2f}x; its Pass@1 is '
    + (
      f'significantly (p < .05) below that of Saber on {", ".join(below)}.'
      if below
      else 'on no task significantly (p < .05) below that of Saber.'
    ),
    f'One token a step is `{base}`. won-lost, p: problems against Saber, exact sign test. Speeds are medians over '
    'batches that took turns, weighted by counted operations, and beside them the counted ratio; over all tasks the '
    'mean of theirs. s: seconds a problem.',
  ]


_share = lambda name: lambda row: f'{100 * row[name]:.1f}'
COLUMNS = {
  'task': lambda r: r['task'],
  'setting': lambda r: f'`{r["setting"]}`',
  'n': lambda r: str(r['n']),
  'Pass@1 % (95 %)': lambda r: (
    f'{100 * r["pass_at_1"]:.1f} ({100 * r["ci_low"]:.0f}-{100 * r["ci_high"]:.0f})'
    + ''.join(f', {name} {100 * share:.1f}' for name, share in r.get('also', {}).items())
  ),
  'paper': lambda r: reports.number(r['paper_pass_at_1']),
  'won-lost, p': lambda r: '-' if r['setting'] == SABER else f'{r["wins"]}-{r["losses"]}, {r["p_value"]:.2g}',
  's': lambda r: f'{r["seconds"]:.3g}',
  'v one token': lambda r: reports.times(r['speed_one_token'], r['speed_one_token_low'], r['speed_one_token_high']),
  'counted': lambda r: reports.times(r['speed_one_token_counted']),
  'paper ': lambda r: reports.times(r['paper_speed']),
  'v Saber': lambda r: reports.times(r['speed_saber'], r['speed_saber_low'], r['speed_saber_high']),
  'counted ': lambda r: reports.times(r['speed_saber_counted']),
  'steps': lambda r: f'{r["steps"]:.1f}',
  'steps a token': lambda r: f'{r["steps_per_token"]:.2f}',
  'refreshes %': _share('refresh_share'),
}


def draw(report: Report):
  """Pass@1 over speed against one token a step, a panel for each task."""
  rows = report.rows
  tasks = list(dict.fromkeys(row['task'] for row in rows))
  labels = list(dict.fromkeys(row['setting'] for row in rows))
  figure, axes = figures.panels(len(tasks))
  for axis, task in zip(axes, tasks, strict=True):
    for row in (row for row in rows if row['task'] == task):
      x, y = row['speed_one_token'], 100 * row['pass_at_1']
      axis.errorbar(
        x,
        y,
        xerr=figures.bars(x, row['speed_one_token_low'], row['speed_one_token_high']),
        yerr=figures.bars(y, 100 * row['ci_low'], 100 * row['ci_high']),
        capsize=2,
        linewidth=0.8,
        label=row['setting'],
        **figures.look(labels.index(row['setting'])),
      )
    axis.set_title(f'{task}, n = {max(row["n"] for row in rows if row["task"] == task)}', fontsize=10)
    axis.set_xscale('log', base=2)
    axis.xaxis.set_major_formatter(lambda x, _: f'{x:g}')
    axis.set_xlabel('times as fast as one token a step')
    axis.set_ylabel('Pass@1 in %')
  figures.legend(figure, axes[0])
  return figure

"""How much is taken back: positions that are revised, and those of them that end with another token than their first.

Axes: B batch, G canvas.
"""

from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax import Array
from jax import lax
import jax.numpy as jnp
import numpy as np

from archer_jax.config import DecodeConfig
from archer_jax.evaluate.statistics import paired_bootstrap
from archer_jax.loop.step import staged_step
from archer_jax.types import DecodeState
from paper import figures
from paper import published
from paper import report as reports
from paper.actions import without_remasking
from paper.actions import written
from paper.bench import Bench
from paper.bench import joined
from paper.main import ALL
from paper.pieces import Piece
from paper.pieces import by_task
from paper.report import Claim
from paper.report import Report
from paper.settings import SABER
from paper.settings import archer

# As `published.ACTIVITY` calls them.
KEPT, REVISING, CACHED = 'without re-masking', 'saber', 'archer'
_SAME = lambda cfg: cfg


@functools.partial(jax.jit, static_argnames='cfg', donate_argnames='state')
def followed_decode(params, state: DecodeState, *, cfg: DecodeConfig) -> tuple[DecodeState, dict[str, Array]]:
  """`archer_jax.decode` of Saber, and int32 [B, G] `first`, the first token of every column; bool `revised` with it.

  A column is revised if its token was taken back or replaced, also in the step that wrote it.
  """

  def step(carry):
    state, first, revised = carry
    after, record, stages = staged_step(params, state, cfg=cfg)
    live, mask = record.live[:, None], cfg.model.mask_id
    tokens = written(state, stages.views, stages.outcome.logits, stages.update, cfg)
    replaced = (state.canvas != mask) & (tokens != state.canvas)
    revised |= live & (record.remasked | replaced)
    first = jnp.where(live & record.accepted & (first < 0), tokens, first)
    return after, first, revised

  start = state, jnp.full(state.canvas.shape, -1, jnp.int32), jnp.zeros(state.canvas.shape, bool)
  state, first, revised = lax.while_loop(lambda carry: jnp.any(~carry[0].done), step, start)
  return state, {'first': first, 'revised': revised & state.canvas_valid}


def _variants(bench: Bench) -> dict[str, tuple[str, Any]]:
  return {KEPT: (SABER, without_remasking), REVISING: (SABER, _SAME), CACHED: (archer(bench.k), _SAME)}


def pieces(bench: Bench) -> list[Piece]:
  return bench.batches('activity', len(_variants(bench)))


def measure(bench: Bench, piece: Piece) -> dict[str, Any]:
  plan = bench.plan(piece.task)
  return {name: _follow(bench, plan, piece, *variant) for name, variant in _variants(bench).items()}


def _follow(bench: Bench, plan, piece: Piece, label: str, change) -> dict[str, Any]:
  batch = bench.start(plan, label, piece.part, change)
  state, seen = followed_decode(bench.params, batch.state, cfg=batch.cfg)
  results = bench.results(piece.task, batch, state)
  seen, final = jax.device_get((seen, state.canvas))
  rows = slice(0, len(results))
  revised = seen['revised'][rows]
  changed = revised & (seen['first'][rows] != final[rows])
  return {
    **bench.told(plan, results),
    'positions': [result.canvas_tokens for result in results],
    'revised': revised.sum(axis=1).tolist(),
    'changed': changed.sum(axis=1).tolist(),
  }


def report(bench: Bench, found: Sequence[tuple[Piece, Any]]) -> Report:
  tasks = dict(by_task(found))
  if len(tasks) > 1:
    tasks[ALL] = [value for values in tasks.values() for value in values]
  rows = [_row(task, name, values) for task, values in tasks.items() for name in _variants(bench)]
  claims = [claim for task, values in tasks.items() for claim in _claims(task, values)]
  return Report(
    name='activity',
    title='What is taken back',
    columns=COLUMNS,
    rows=rows,
    claims=claims,
    notes=[
      'revised: share of all positions that were re-masked or replaced at least once. end otherwise: share of these '
      'whose last token is not their first; beside it the same over answers that are right alone.'
    ],
  )


def _row(task: str, name: str, values: Sequence[Any]) -> dict[str, Any]:
  mine = [value[name] for value in values]
  solved, revised, changed = (joined(mine, field) for field in ('solved', 'revised', 'changed'))
  share = lambda part, whole: float(part.sum() / whole.sum()) if whole.sum() else None
  paper = published.ACTIVITY.get(published.benchmark(task), {}).get(name)
  return {
    'task': task,
    'variant': name,
    'n': len(solved),
    'pass_at_1': float(solved.mean()),
    'revised': share(revised, joined(mine, 'positions')),
    'changed': share(changed, revised),
    'changed_where_solved': share(changed[solved], revised[solved]),
    'changed_positions_where_solved': int(changed[solved].sum()),
    'updates': float(joined(mine, 'steps').mean()),
    'remasked': float(joined(mine, 'remasked').mean()),
    'paper_revised': paper and paper[0] / 100,
    'paper_updates': paper and paper[1],
  }


def _claims(task: str, values: Sequence[Any]) -> list[Claim]:
  of = lambda name, field: joined([value[name] for value in values], field).astype(np.float64)
  share = lambda name: of(name, 'revised') / of(name, 'positions')
  nothing = np.zeros(len(share(REVISING)))
  theirs = [lines[name][0] for lines in published.ACTIVITY.values() for name in (REVISING, CACHED)]
  least, most = min(theirs), max(theirs)
  claims = []
  for name in (REVISING, CACHED):
    value, low, high = paired_bootstrap(share(name), nothing)
    claims.append(
      Claim(
        text=f'{task}: share of positions that {name} revises',
        paper=f'{least:.1f} to {most:.1f} %',
        here=f'{100 * value:.1f} % ({100 * low:.1f} to {100 * high:.1f})',
        verdict=reports.in_range(100 * low, 100 * high, least, most),
      )
    )
  fewer = paired_bootstrap(of(KEPT, 'steps'), of(REVISING, 'steps'))
  lines = published.ACTIVITY[published.MBPP]
  claims.append(
    Claim(
      text=f'{task}: updates of Saber without re-masking less those of Saber',
      paper=f'{lines[KEPT][1] - lines[REVISING][1]:+.1f} (MBPP)',
      here=f'{fewer[0]:+.1f} ({fewer[1]:+.1f} to {fewer[2]:+.1f})',
      verdict=reports.verdict(lines[KEPT][1] - lines[REVISING][1], *fewer[1:]),
    )
  )
  gain = paired_bootstrap(of(REVISING, 'solved'), of(KEPT, 'solved'))
  claims.append(
    Claim(
      text=f'{task}: Pass@1 of Saber less that without re-masking',
      paper='',
      here=reports.points(*gain),
      verdict=reports.decided(*gain[1:], 'taking back gains', 'taking back loses'),
    )
  )
  return claims


COLUMNS = {
  'task': lambda r: r['task'],
  'decoder': lambda r: r['variant'],
  'n': lambda r: str(r['n']),
  'Pass@1 %': lambda r: f'{100 * r["pass_at_1"]:.1f}',
  'revised %': reports.shares('revised'),
  'paper': reports.shares('paper_revised'),
  'end otherwise %': reports.shares('changed'),
  'in right answers %': reports.shares('changed_where_solved'),
  'updates': lambda r: f'{r["updates"]:.1f}',
  'paper ': lambda r: reports.number(r['paper_updates']),
  'taken back': lambda r: f'{r["remasked"]:.1f}',
}


def draw(report: Report):
  """Share of revised positions, and of those that end otherwise, per task."""
  rows = [row for row in report.rows if row['variant'] != KEPT]
  tasks = list(dict.fromkeys(row['task'] for row in rows))
  figure, axes = figures.panels(2)
  titles = {'revised': 'revised positions, %', 'changed': 'of these with another token in the end, %'}
  for axis, (field, title) in zip(axes, titles.items(), strict=True):
    for number, name in enumerate((REVISING, CACHED)):
      mine = {row['task']: row for row in rows if row['variant'] == name}
      heights = [100 * (mine[task][field] or 0) for task in tasks]
      axis.bar(
        np.arange(len(tasks)) + 0.4 * (number - 0.5), heights, 0.38, label=name, color=figures.look(1 + number)['color']
      )
      if field == 'revised' and any(mine[task]['paper_revised'] for task in tasks):
        known = [(i, 100 * mine[t]['paper_revised']) for i, t in enumerate(tasks) if mine[t]['paper_revised']]
        axis.plot(*zip(*known, strict=True), label=f'paper, {name}', **figures.PAPER)
    axis.set_xticks(range(len(tasks)), tasks, rotation=20, ha='right')
    axis.set_ylim(bottom=0)
    axis.set_title(title, fontsize=10)
  figures.legend(figure, axes[0])
  return figure

"""Matched-state feedback: one state, decoded on with a fresh and with a kept prompt.

The first token that is accepted with probability 0.9 is watched. The whole state of the decoding right after that step
is cloned; one branch refreshes before the next update, the other keeps the prompt that it has for that update; then
both go on alike, by Archer's rule.

Axes: B batch, G canvas.
"""

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
from jax import Array
from jax import lax
import jax.numpy as jnp
import numpy as np

from archer_jax import numerics
from archer_jax.config import DecodeConfig
from archer_jax.evaluate.statistics import paired_bootstrap
from archer_jax.evaluate.statistics import sign_test
from archer_jax.evaluate.statistics import wilson_interval
from archer_jax.loop.step import decode_step
from archer_jax.loop.step import staged_step
from archer_jax.reuse import prompt
from archer_jax.types import DecodeState
from paper import figures
from paper import published
from paper import report as reports
from paper.bench import Bench
from paper.bench import joined
from paper.main import ALL
from paper.pieces import Piece
from paper.pieces import by_task
from paper.report import Claim
from paper.report import Report
from paper.settings import archer

# Of the watched token, and the updates within which it may be revised.
PROBABILITY, WITHIN = 0.9, 5
FRESH, CACHED = 'fresh', 'cached'
_LOG_ODDS = math.log(PROBABILITY / (1 - PROBABILITY))


@functools.partial(jax.jit, static_argnames='cfg', donate_argnames='state')
def until_sure(params, state: DecodeState, *, cfg: DecodeConfig) -> tuple[DecodeState, Array]:
  """Each row's state right after the step of its first sure token, and int32 [B], the token's column.

  Of several in one step it is the surest. A row without one, or whose first one ends it, has the column -1 and some
  state or other.
  """

  def step(carry):
    state, snapshot, column = carry
    after, record, stages = staged_step(params, state, cfg=cfg)
    # Saber reads every column, in their order.
    odds = numerics.log_odds(stages.outcome.logits, after.canvas)
    stands = record.accepted & (after.canvas != cfg.model.mask_id) & (record.live & ~after.done)[:, None]
    odds = jnp.where(stands, odds, -jnp.inf)
    now = (column < 0) & jnp.any(odds >= _LOG_ODDS, axis=1)
    snapshot = jax.tree.map(functools.partial(numerics.select_rows, now), after, snapshot)
    return after, snapshot, jnp.where(now, jnp.argmax(odds, axis=1).astype(jnp.int32), column)

  start = state, state, jnp.full(state.done.shape, -1, jnp.int32)
  _, snapshot, column = lax.while_loop(lambda carry: jnp.any(~carry[0].done & (carry[2] < 0)), step, start)
  return snapshot, column


@functools.partial(jax.jit, static_argnames='cfg')
def branch(
  params, state: DecodeState, column: Array, refreshes: Array, *, cfg: DecodeConfig
) -> tuple[DecodeState, Array]:
  """Decodes the rows with a watched column to their end; the state that is given stays as it is.

  Args:
    params: the model's parameters.
    state: from `until_sure`.
    column: likewise.
    refreshes: bool scalar, whether the first step refreshes; if not, it reuses whatever the rule says.
    cfg: the program's config.

  Returns:
    The state, and int32 [B], after how many updates the watched token was no longer there; 0 if it always was.
  """
  state = dataclasses.replace(state, done=state.done | (column < 0))
  at_column = lambda canvas: jnp.take_along_axis(canvas, jnp.maximum(column, 0)[:, None], axis=1)[:, 0]
  token = at_column(state.canvas)
  clauses = {name: jnp.zeros_like(getattr(state.knobs, name)) for name in prompt.METHOD.spec.knobs}
  clauses['refresh_interval'] = jnp.broadcast_to(refreshes.astype(jnp.int32), column.shape)
  forced = dataclasses.replace(state.knobs, **clauses)
  own = state.knobs

  def step(carry):
    state, updates, revised = carry
    knobs = jax.tree.map(lambda one, other: jnp.where(updates == 0, one, other), forced, own)
    after, record = decode_step(params, dataclasses.replace(state, knobs=knobs), cfg=cfg)
    gone = record.live & (at_column(after.canvas) != token) & (revised == 0)
    return dataclasses.replace(after, knobs=own), updates + 1, jnp.where(gone, updates + 1, revised)

  start = state, jnp.zeros((), jnp.int32), jnp.zeros(column.shape, jnp.int32)
  state, _, revised = lax.while_loop(lambda carry: jnp.any(~carry[0].done), step, start)
  return state, revised


def pieces(bench: Bench) -> list[Piece]:
  return bench.batches('feedback', 2)


def measure(bench: Bench, piece: Piece) -> dict[str, Any]:
  """Both branches of every problem; those without a watched token are counted and no more."""
  plan = bench.plan(piece.task)
  batch = bench.start(plan, archer(bench.k), piece.part)
  snapshot, column = until_sure(bench.params, batch.state, cfg=batch.cfg)
  column_of = jax.device_get(column)[: len(batch.requests)]
  paired = column_of >= 0
  value: dict[str, Any] = {
    'paired': paired.tolist(),
    'step': jax.device_get(snapshot.row_step)[paired.nonzero()].tolist(),
  }
  for name, refreshes in ((FRESH, True), (CACHED, False)):
    state, revised = branch(bench.params, snapshot, column, jnp.asarray(refreshes), cfg=batch.cfg)
    results = [r for r, is_one in zip(bench.results(piece.task, batch, state), paired, strict=True) if is_one]
    updates = jax.device_get(revised)[: len(paired)][paired]
    value[name] = {**bench.told(plan, results), 'revised_after': updates.tolist()}
  return value


def report(bench: Bench, found: Sequence[tuple[Piece, Any]]) -> Report:
  tasks = dict(by_task(found))
  if len(tasks) > 1:
    tasks[ALL] = [value for values in tasks.values() for value in values]
  rows = [_row(task, values) for task, values in tasks.items()]
  return Report(
    name='feedback',
    title='Matched-state feedback',
    columns=COLUMNS,
    rows=rows,
    claims=[claim for row in rows for claim in _claims(row)],
    notes=[
      f'One state, right after the first token that was accepted with probability {PROBABILITY}: fresh refreshes '
      'before the next update, cached keeps its prompt for it; then both go on by the same rule. only: problems that '
      f'one branch alone solves, exact sign test. revised: the watched token is gone within {WITHIN} updates; after: '
      'how many, on average of these. The paper (MBPP): '
      f'fresh {published.FEEDBACK["fresh"]} %, cached {published.FEEDBACK["cached"]} %, only fresh '
      f'{published.FEEDBACK["only_fresh"]}, only cached {published.FEEDBACK["only_cached"]} of '
      f'{published.FEEDBACK["pairs"]}.'
    ],
  )


def _row(task: str, values: Sequence[Any]) -> dict[str, Any]:
  paired = joined(values, 'paired')
  row: dict[str, Any] = {'task': task, 'n': len(paired), 'pairs': int(paired.sum())}
  solved = {}
  for name in (FRESH, CACHED):
    mine = [value[name] for value in values]
    solved[name] = joined(mine, 'solved').astype(bool)
    after = joined(mine, 'revised_after')
    soon = (after > 0) & (after <= WITHIN)
    row[name] = {
      'pass_at_1': float(solved[name].mean()) if len(after) else None,
      'revised': int(soon.sum()),
      'after': float(after[soon].mean()) if soon.any() else None,
    }
  only = {name: int(np.sum(solved[name] & ~solved[other])) for name, other in ((FRESH, CACHED), (CACHED, FRESH))}
  row |= {'only_fresh': only[FRESH], 'only_cached': only[CACHED], 'p_value': sign_test(only[CACHED], only[FRESH])}
  gain = paired_bootstrap(solved[CACHED], solved[FRESH]) if row['pairs'] else (None, None, None)
  return {**row, 'gain': gain[0], 'gain_low': gain[1], 'gain_high': gain[2]}


def _claims(row: dict[str, Any]) -> list[Claim]:
  if not row['pairs']:
    return []
  paper = published.FEEDBACK
  theirs = paper['cached'] - paper['fresh']
  low, high = row['gain_low'], row['gain_high']
  claims = [
    Claim(
      text=f'{row["task"]}: Pass@1 of the cached branch less that of the fresh one',
      paper=f'{theirs:+.2f} points (p = {sign_test(paper["only_cached"], paper["only_fresh"]):.2f})',
      here=f'{reports.points(row["gain"], low, high)}, p = {row["p_value"]:.2g}',
      verdict=reports.verdict(theirs, low, high),
    )
  ]
  for name in (FRESH, CACHED):
    least, most = wilson_interval(row[name]['revised'], row['pairs'])
    share = row[name]['revised'] / row['pairs']
    claims.append(
      Claim(
        text=f'{row["task"]}: {name}, watched tokens revised within {WITHIN} updates',
        paper=f'{paper["revised"]} % (MBPP)',
        here=f'{100 * share:.1f} % ({100 * least:.1f} to {100 * most:.1f})',
        verdict=reports.in_range(100 * least, 100 * most, paper['revised'], paper['revised']),
      )
    )
  return claims


def _both(cell):
  return lambda row: ', '.join(cell(row[name]) for name in (FRESH, CACHED))


COLUMNS = {
  'task': lambda r: r['task'],
  'problems': lambda r: str(r['n']),
  'pairs': lambda r: str(r['pairs']),
  'Pass@1 %, fresh, cached': _both(lambda one: '-' if one['pass_at_1'] is None else f'{100 * one["pass_at_1"]:.1f}'),
  'only fresh': lambda r: str(r['only_fresh']),
  'only cached': lambda r: str(r['only_cached']),
  'p': lambda r: f'{r["p_value"]:.2g}',
  'revised, fresh, cached': _both(lambda one: str(one['revised'])),
  'after, fresh, cached': _both(lambda one: reports.number(one['after'], 3)),
}


def draw(report: Report):
  """Problems that one branch alone solves, and the difference in Pass@1, per task."""
  rows = [row for row in report.rows if row['pairs']]
  figure, (counts, gains) = figures.panels(2)
  y = np.arange(len(rows))
  for number, name in enumerate((FRESH, CACHED)):
    lengths = [row[f'only_{name}'] for row in rows]
    counts.barh(y + 0.4 * (number - 0.5), lengths, 0.38, label=f'only {name}', color=figures.look(1 + number)['color'])
  counts.set_xlim(0, 1.05 * max([1, *(row[f'only_{name}'] for row in rows for name in (FRESH, CACHED))]))
  counts.set_xlabel('problems')
  for place, row in enumerate(rows):
    x = 100 * row['gain']
    errors = figures.bars(x, 100 * row['gain_low'], 100 * row['gain_high'])
    gains.errorbar(x, place, xerr=errors, capsize=3, **figures.look(0))
  gains.axvline(0, color='gray', linewidth=1)
  gains.axvline(published.FEEDBACK['cached'] - published.FEEDBACK['fresh'], label='paper', color='gray', linestyle=':')
  gains.set_xlabel('cached less fresh, points of Pass@1')
  for axis in (counts, gains):
    axis.set_yticks(y, [f'{row["task"]}, {row["pairs"]}' for row in rows])
    axis.set_ylim(max(len(rows), 1) - 0.5, -0.5)
  counts.legend(fontsize=8)
  gains.legend(fontsize=8)
  return figure

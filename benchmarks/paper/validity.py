"""What predicts that a kept prompt decides otherwise: shadow forwards beside reuse steps, which touch nothing.

At reuse steps drawn by chance a full forward of the same state runs beside the kept one, and Saber decides on both.
An action is the columns that are accepted, their tokens, and the columns that are taken back. Every batch is decoded
once more without shadow forwards, and must come out the same.

Axes: B batch, G canvas, S steps.
"""

from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax import Array
from jax import lax
import jax.numpy as jnp
import numpy as np

from archer_jax.calibration.measure import fresh_logits
from archer_jax.config import DecodeConfig
from archer_jax.evaluate.statistics import group_bootstrap
from archer_jax.evaluate.statistics import interval
from archer_jax.evaluate.statistics import partial_spearman
from archer_jax.evaluate.statistics import wilson_interval
from archer_jax.loop.step import staged_step
from archer_jax.types import DecodeState
from archer_jax.types import Stages
from archer_jax.types import StepRecord
from paper import figures
from paper import published
from paper import report as reports
from paper.actions import written
from paper.bench import Bench
from paper.pieces import Piece
from paper.pieces import by_task
from paper.report import Claim
from paper.report import Report
from paper.settings import PROBED

# Steps of a problem that are drawn, if it took one a position; those that refresh have nothing to compare.
_DRAWN = 24
_BIN = 4
_BOOTSTRAPS = 1000
MEAN = 'mean of the tasks'
SEEN = ('distance', 'age', 'masks', 'step', 'accepted', 'tokens', 'remasked', 'canvas')
# What is correlated given which other.
_PREDICTORS = {'distance': 'age', 'age': 'distance', 'masks': 'distance', 'step': 'distance'}
_OUTCOMES = ('action', 'canvas')


def _compared(params, state: DecodeState, record: StepRecord, stages: Stages, cfg: DecodeConfig) -> tuple[Array, ...]:
  """int32 [B] each, by `SEEN`: what is known of a step, and how it differs from that of a full forward."""
  views, one = stages.views, stages.update
  logits = fresh_logits(params, state, stages, cfg=cfg)
  other = cfg.decoder_method.update(state, views, logits, cfg)
  mine = written(state, views, stages.outcome.logits, one, cfg)
  theirs = written(state, views, logits, other, cfg)
  any_of = lambda flags: jnp.any(flags & state.canvas_valid, axis=1)
  count = lambda flags: jnp.sum(flags & state.canvas_valid, axis=1)
  values = (
    record.seen['distance'],
    record.seen['age'],
    count(state.canvas == cfg.model.mask_id),
    state.row_step,
    any_of(one.accepted != other.accepted),
    any_of(one.accepted & other.accepted & (mine != theirs)),
    any_of(one.remasked != other.remasked),
    count(one.canvas != other.canvas),
  )
  return tuple(value.astype(jnp.int32) for value in values)


@functools.partial(jax.jit, static_argnames='cfg', donate_argnames='state')
def probed_decode(
  params, state: DecodeState, drawn: Array, *, cfg: DecodeConfig
) -> tuple[DecodeState, Array, dict[str, Array]]:
  """`archer_jax.decode` with shadow forwards at the reuse steps among those in `drawn`, bool [B, S].

  Returns:
    The state; bool [B, S], the steps that were probed; and int32 [B, S] by the names of `SEEN`.
  """
  batch, length = drawn.shape
  rows = jnp.arange(batch)

  def step(carry):
    state, probed, seen = carry
    after, record, stages = staged_step(params, state, cfg=cfg)
    now = jnp.take_along_axis(drawn, jnp.minimum(state.row_step, length - 1)[:, None], axis=1)[:, 0]
    now &= record.live & ~record.refreshed
    shadow = lambda: _compared(params, state, record, stages, cfg)
    nothing = lambda: tuple(jnp.zeros((batch,), jnp.int32) for _ in SEEN)
    values = lax.cond(jnp.any(now), shadow, nothing)
    place = jnp.where(now, state.row_step, length)
    put = lambda array, value: array.at[rows, place].set(value, mode='drop')
    return after, put(probed, now), {name: put(seen[name], value) for name, value in zip(SEEN, values, strict=True)}

  start = state, jnp.zeros(drawn.shape, bool), {name: jnp.zeros(drawn.shape, jnp.int32) for name in SEEN}
  return lax.while_loop(lambda carry: jnp.any(~carry[0].done), step, start)


def pieces(bench: Bench) -> list[Piece]:
  return bench.batches('validity', 2)


def measure(bench: Bench, piece: Piece) -> dict[str, Any]:
  """The probes of a batch, a list for each of `SEEN` and the numbers of their problems."""
  plan = bench.plan(piece.task)
  batch = bench.start(plan, PROBED, piece.part)
  length = batch.cfg.canvas_length
  # By problem, so that the draws depend on no batch size.
  share = min(1.0, _DRAWN / plan.settings[PROBED].knobs['gen_length'])
  drawn = np.zeros((plan.batch_size, length), bool)
  for row, request in enumerate(batch.requests):
    drawn[row] = np.random.default_rng(request.index).random(length) < share
  with_shadows = probed_decode(bench.params, batch.state, jnp.asarray(drawn), cfg=batch.cfg)
  plain = bench.start(plan, PROBED, piece.part)
  without = probed_decode(bench.params, plain.state, jnp.zeros(drawn.shape, bool), cfg=plain.cfg)
  check_untouched(piece.task, [request.index for request in batch.requests], with_shadows[0], without[0])
  _, probed, seen = jax.device_get(with_shadows)
  row, _ = where = probed.nonzero()
  numbers = np.array([request.index for request in batch.requests])
  told = bench.told(plan, bench.results(piece.task, batch, with_shadows[0]))
  return {
    'problem': numbers[row].tolist(),
    **{name: values[where].tolist() for name, values in seen.items()},
    'answers': told,
  }


def check_untouched(task: str, problems: Sequence[int], one: DecodeState, other: DecodeState) -> None:
  """Raises ValueError unless two decodings have the same tokens, steps and counters."""
  told = lambda state: jax.device_get((state.canvas, state.row_step, state.status, state.counters))
  for mine, theirs in zip(*(jax.tree.leaves(told(state)) for state in (one, other)), strict=True):
    differ = (mine != theirs).reshape(len(mine), -1).any(axis=1)[: len(problems)]
    if differ.any():
      raise ValueError(f'{task}: problem {problems[int(differ.argmax())]} decodes otherwise with shadow forwards')


def report(bench: Bench, found: Sequence[tuple[Piece, Any]]) -> Report:
  probes = {task: _probes(values) for task, values in by_task(found)}
  probes = {task: mine for task, mine in probes.items() if len(mine['problem'])}
  rows = [row for task, mine in probes.items() for row in _bins(task, mine)]
  partial = {task: _partial(mine) for task, mine in probes.items()}
  told = {task: _told(values, draws) for task, (values, draws) in partial.items()}
  if len(partial) > 1:
    mean = lambda parts: np.mean(parts, axis=0)
    told[MEAN] = _told(mean([v for v, _ in partial.values()]), mean([d for _, d in partial.values()]))
  return Report(
    name='validity',
    title='Shadow forwards: what predicts another action',
    columns=COLUMNS,
    rows=rows,
    claims=[claim for task, one in told.items() for claim in _claims(task, one)],
    notes=[
      f'`{PROBED}`. Of the probes of each bin of D: how many differ in the action, in its parts alone, and by how '
      'many positions the next canvases differ. Every decoding was repeated without shadow forwards and had the same '
      'tokens, steps and counters. Intervals of correlations are a bootstrap over problems. '
      f'The paper has {published.VALIDITY_PROBES} probes on MBPP.',
      *(
        f'{task}, D = age in {100 * np.mean(mine["distance"] == mine["age"]):.1f} % of the probes; Spearman of both '
        f'{reports.number(partial_spearman(mine["distance"], mine["age"]), 3)}.'
        for task, mine in probes.items()
      ),
    ],
    more={'partial': told},
  )


def _probes(values: Sequence[Any]) -> dict[str, np.ndarray]:
  """All probes of a task."""
  probes = {
    name: np.concatenate([np.asarray(value[name], np.int64) for value in values]) for name in ('problem', *SEEN)
  }
  return {**probes, 'action': (probes['accepted'] | probes['tokens'] | probes['remasked']).astype(np.int64)}


def _bins(task: str, probes: dict[str, np.ndarray]) -> list[dict[str, Any]]:
  rows = []
  for low in range(0, int(probes['distance'].max()) + 1, _BIN):
    mine = (probes['distance'] >= low) & (probes['distance'] < low + _BIN)
    if not mine.any():
      continue
    differ, n = int(probes['action'][mine].sum()), int(mine.sum())
    paper = published.VALIDITY.get(low + _BIN - 1)
    limits = wilson_interval(differ, n)
    rows.append(
      {
        'task': task,
        'low': low,
        'high': low + _BIN - 1,
        'probes': n,
        'problems': len(np.unique(probes['problem'][mine])),
        'action': differ / n,
        # Probes of a problem are not independent, so that the truth is somewhat wider.
        'action_low': limits[0],
        'action_high': limits[1],
        **{name: float(probes[name][mine].mean()) for name in ('accepted', 'tokens', 'remasked', 'canvas', 'age')},
        'paper_action': paper and paper[0] / 100,
        'paper_canvas': paper and paper[1],
      }
    )
  return rows


def _partial(probes: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
  """Partial correlations of every predictor with every outcome, and how much D's is above age's; and bootstrapped."""

  def statistic(chosen: np.ndarray) -> list[float]:
    of = {name: values[chosen] for name, values in probes.items()}
    values = [
      partial_spearman(of[name], of[outcome], of[given]) for outcome in _OUTCOMES for name, given in _PREDICTORS.items()
    ]
    ahead = [values[i * len(_PREDICTORS)] - values[i * len(_PREDICTORS) + 1] for i in range(len(_OUTCOMES))]
    return [*values, *ahead]

  everything = np.arange(len(probes['problem']))
  return np.array(statistic(everything)), group_bootstrap(probes['problem'], statistic, _BOOTSTRAPS)


def _told(values: np.ndarray, draws: np.ndarray) -> dict[str, dict[str, Any]]:
  """By outcome and predictor; NaN and an interval that there is none of are None."""
  names = [(outcome, name) for outcome in _OUTCOMES for name in _PREDICTORS]
  names += [(outcome, 'distance above age') for outcome in _OUTCOMES]
  told: dict[str, dict[str, Any]] = {outcome: {} for outcome in _OUTCOMES}
  for (outcome, name), value, column in zip(names, values.tolist(), draws.T, strict=True):
    limits = interval(column)
    told[outcome][name] = {
      'value': value if np.isfinite(value) else None,
      'low': limits and limits[0],
      'high': limits and limits[1],
    }
  return told


def _claims(task: str, told: dict[str, dict[str, Any]]) -> list[Claim]:
  claims = []
  what = {'action': 'another action', 'canvas': 'the distance of the next canvases'}
  for outcome in _OUTCOMES:
    paper = published.PARTIAL[outcome]
    for name, given in _PREDICTORS.items():
      one, theirs = told[outcome][name], paper.get(name)
      claims.append(
        Claim(
          text=f'{task}: {name} given {given}, with {what[outcome]}',
          paper='' if theirs is None else f'{theirs:.3f}',
          here=_here(one),
          verdict=reports.decided(one['low'], one['high'], 'positive', 'negative')
          if theirs is None
          else reports.verdict(theirs, one['low'], one['high']),
        )
      )
    one, theirs = told[outcome]['distance above age'], paper['distance'] - paper['age']
    claims.append(
      Claim(
        text=f'{task}: D given age less age given D, with {what[outcome]}',
        paper=f'{theirs:+.3f}',
        here=_here(one),
        verdict=reports.verdict(theirs, one['low'], one['high']),
      )
    )
  return claims


def _here(one: dict[str, Any]) -> str:
  return reports.with_interval(one['value'], None if one['low'] is None else (one['low'], one['high']))


COLUMNS = {
  'task': lambda r: r['task'],
  'D': lambda r: f'{r["low"]}-{r["high"]}',
  'probes': lambda r: str(r['probes']),
  'problems': lambda r: str(r['problems']),
  'actions differ %': lambda r: f'{100 * r["action"]:.1f} ({100 * r["action_low"]:.0f}-{100 * r["action_high"]:.0f})',
  'paper': reports.shares('paper_action'),
  'accepted': reports.shares('accepted'),
  'their tokens': reports.shares('tokens'),
  're-masked': reports.shares('remasked'),
  'next canvas': lambda r: f'{r["canvas"]:.2f}',
  'paper ': lambda r: reports.number(r['paper_canvas']),
  'mean age': lambda r: f'{r["age"]:.1f}',
}


def draw(report: Report):
  """Share of differing actions over D, and the partial correlations with it."""
  figure, (shares, partial) = figures.panels(2, width=5.6)
  tasks = list(dict.fromkeys(row['task'] for row in report.rows))
  for number, task in enumerate(tasks):
    mine = [row for row in report.rows if row['task'] == task]
    x, y = [row['low'] for row in mine], [100 * row['action'] for row in mine]
    spans = [
      [100 * (r['action'] - r['action_low']) for r in mine],
      [100 * (r['action_high'] - r['action']) for r in mine],
    ]
    shares.errorbar(x, y, yerr=spans, capsize=2, label=task, **figures.look(1 + number))
  theirs = [(most - _BIN + 1, share) for most, (share, _) in published.VALIDITY.items()]
  shares.plot(*zip(*theirs, strict=True), label='paper', **figures.PAPER)
  shares.set_xticks(
    sorted({row['low'] for row in report.rows}),
    [f'{low}-{low + _BIN - 1}' for low in sorted({row['low'] for row in report.rows})],
  )
  shares.set_xlabel('D, positions that differ from the anchor')
  shares.set_ylabel('actions that differ, %')
  told = report.more['partial']
  for number, (task, one) in enumerate(told.items()):
    for place, name in enumerate(_PREDICTORS):
      entry = one['action'][name]
      if entry['value'] is not None:
        y = place + 0.7 * ((number + 0.5) / len(told) - 0.5)
        label = task if place == 0 else None
        errors = figures.bars(entry['value'], entry['low'], entry['high'])
        partial.errorbar(entry['value'], y, xerr=errors, capsize=2, label=label, **figures.look(1 + number))
  for place, name in enumerate(_PREDICTORS):
    if name in published.PARTIAL['action']:
      partial.plot(published.PARTIAL['action'][name], place, **figures.PAPER)
  partial.axvline(0, color='gray', linewidth=1)
  partial.set_yticks(range(len(_PREDICTORS)), [f'{name}\ngiven {given}' for name, given in _PREDICTORS.items()])
  partial.set_ylim(len(_PREDICTORS) - 0.5, -0.5)
  partial.set_xlabel('partial Spearman with another action, 95 %')
  figures.legend(figure, shares, partial)
  return figure

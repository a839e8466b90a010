"""The cached step against the full one by the length of the prompt, batch 1."""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
import numpy as np
from timing import alternate
from timing import ratio
from timing import timed

from archer_jax.config import DecodeConfig
from archer_jax.engine.requests import Request
from archer_jax.evaluate.work import pass_operations
from archer_jax.loop.step import decode_step
from archer_jax.reuse import prompt
from archer_jax.types import DecodeState
from paper import figures
from paper import published
from paper import report as reports
from paper.bench import Batch
from paper.bench import Bench
from paper.pieces import Piece
from paper.report import Claim
from paper.report import Report
from paper.settings import archer

# Alternating pairs, and the most steps of a measurement.
PAIRS, STEPS = 15, 4
# Of what refreshes in every step, and of what never does again.
_INTERVALS = {'full': 1, 'cached': 0}


@functools.partial(jax.jit, static_argnames='cfg', donate_argnames='state')
def steps(params, state: DecodeState, count, *, cfg: DecodeConfig) -> DecodeState:
  """So many steps, int32."""
  return lax.fori_loop(0, count, lambda _, s: decode_step(params, s, cfg=cfg)[0], state)


def prompt_of(bench: Bench, label: str, length: int, first: int = 0) -> list[int]:
  """A prompt of so many tokens: the ends of the tasks' own prompts, one behind another, problem `first` the last."""
  requests = [request for plan in bench.plans for request in plan.requests[label]]
  first %= len(requests)
  ids = [token for request in requests[first + 1 :] + requests[: first + 1] for token in request.prompt_ids]
  return (ids * -(-length // len(ids)))[-length:]


def request_of(bench: Bench, label: str, length: int, gen_length: int, first: int = 0) -> tuple[Request, Any]:
  """A request of that prompt for so many tokens in one block, and its settings."""
  settings = dataclasses.replace(bench.plans[0].settings[label], block_length=None)
  knobs = {**settings.row({}), 'gen_length': gen_length, 'steps': gen_length}
  ids = tuple(prompt_of(bench, label, length, first))
  return Request(index=first, id=first, prompt_ids=ids, seed=None, knobs=knobs), settings


def pieces(bench: Bench) -> list[Piece]:
  return [
    Piece(table='prompt_length', task=None, part=length, units=1 + length // 512) for length in published.PROMPT_LENGTH
  ]


def measure(bench: Bench, piece: Piece) -> dict[str, Any]:
  """Seconds of both kinds of step, and their operations."""
  canvas = published.PROMPT_LENGTH_CANVAS
  request, settings = request_of(bench, archer(bench.k), piece.part, canvas)

  def start(kind: str) -> Batch:
    clauses = dict.fromkeys(prompt.METHOD.spec.knobs, 0)
    knobs = {**request.knobs, **clauses, 'refresh_interval': _INTERVALS[kind]}
    n_rows = 1 if bench.mesh is None else bench.mesh.shape['data']
    return bench.start_requests([dataclasses.replace(request, knobs=knobs)], settings, n_rows)

  def run(kind: str, count: int) -> tuple[float, int]:
    """Seconds of the steps behind the first refresh, and how many of them the row took."""
    batch = start(kind)
    state = jax.block_until_ready(steps(bench.params, batch.state, np.int32(1), cfg=batch.cfg))
    done = {}
    begin = lambda: done.update(state=jax.block_until_ready(steps(bench.params, state, np.int32(count), cfg=batch.cfg)))
    seconds = timed(begin)
    return seconds, int(jax.device_get(done['state'].counters.steps)[0]) - 1

  # A row that is done takes no full steps any more.
  count = min(run(kind, STEPS)[1] for kind in _INTERVALS)
  timers = {kind: (lambda kind=kind: run(kind, count)[0] / count) for kind in _INTERVALS}
  seconds = alternate(timers, PAIRS)
  batch = start('full')
  operations = pass_operations(batch.cfg, *batch.state.prompt_tokens.shape)
  return {
    **{kind: values.tolist() for kind, values in seconds.items()},
    'operations': {'full': operations['refresh'], 'cached': operations['reuse']},
    'steps': count,
  }


def report(bench: Bench, found: Sequence[tuple[Piece, Any]]) -> Report:
  rows, claims = [], []
  for piece, value in found:
    speed = ratio(value['full'], value['cached'])
    row = {
      'prompt_length': piece.part,
      'gen_length': published.PROMPT_LENGTH_CANVAS,
      **{f'{kind}_ms': 1e3 * float(np.median(value[kind])) for kind in _INTERVALS},
      'speed': speed['median'],
      'speed_low': speed['low'],
      'speed_high': speed['high'],
      'counted': value['operations']['full'] / value['operations']['cached'],
      'paper': published.PROMPT_LENGTH[piece.part],
    }
    rows.append(row)
    claims.append(
      Claim(
        text=f'P = {piece.part}: a cached step against a full one',
        paper=reports.times(row['paper']),
        here=reports.times(row['speed'], row['speed_low'], row['speed_high']),
        verdict=reports.verdict(1, row['speed_low'], row['speed_high'], 1),
      )
    )
  return Report(
    name='prompt_length',
    title='Cached and full steps by prompt length',
    columns=COLUMNS,
    rows=rows,
    claims=[*claims, *_growth(rows)],
    notes=[
      f'Batch 1, G = {published.PROMPT_LENGTH_CANVAS}, steps of Saber in the compiled loop; medians of {PAIRS} '
      'alternating pairs. Prompts are those of the tasks one behind another, cut to length; the longest may be longer '
      'than the model can use, and its steps take as long.'
    ],
  )


def _growth(rows: Sequence[dict[str, Any]]) -> list[Claim]:
  """Whether the ratio rises with the prompt; by the intervals of the shortest and the longest."""
  if len(rows) < 2:
    return []
  short, long = rows[0], rows[-1]
  apart = long['speed_low'] > short['speed_high'], long['speed_high'] < short['speed_low']
  return [
    Claim(
      text=f'the ratio at P = {long["prompt_length"]} less that at P = {short["prompt_length"]}',
      paper=f'{long["paper"] - short["paper"]:+.2f}',
      here=f'{long["speed"] - short["speed"]:+.2f}',
      verdict=reports.AGREES if apart[0] else reports.DISAGREES if apart[1] else reports.UNDECIDED,
    )
  ]


COLUMNS = {
  'P': lambda r: str(r['prompt_length']),
  'full ms': lambda r: f'{r["full_ms"]:.3g}',
  'cached ms': lambda r: f'{r["cached_ms"]:.3g}',
  'ratio (95 %)': lambda r: reports.times(r['speed'], r['speed_low'], r['speed_high']),
  'counted': lambda r: reports.times(r['counted']),
  'paper': lambda r: reports.times(r['paper']),
}


def draw(report: Report):
  """The ratio over the prompt's length."""
  figure, (axis,) = figures.panels(1, width=5.6)
  rows = report.rows
  x = [row['prompt_length'] for row in rows]
  y = [row['speed'] for row in rows]
  spans = [[r['speed'] - r['speed_low'] for r in rows], [r['speed_high'] - r['speed'] for r in rows]]
  axis.errorbar(x, y, yerr=spans, capsize=3, label='here, by the clock', **figures.look(1))
  axis.plot(x, [row['counted'] for row in rows], label='here, counted', linestyle=':', **figures.look(2))
  axis.plot(x, [row['paper'] for row in rows], label='paper', **figures.PAPER)
  axis.set_xscale('log', base=2)
  axis.set_xticks(x, [str(length) for length in x])
  axis.set_xlabel(f'tokens of the prompt, G = {rows[0]["gen_length"]}')
  axis.set_ylabel('full step over cached step')
  axis.legend(fontsize=8)
  return figure

"""Whole decodings by the length of the answer, at one length of the prompt, batch 1: Archer against Saber."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from timing import ratio
from timing import timed

from archer_jax.evaluate import work
from paper import figures
from paper import published
from paper import report as reports
from paper.bench import Bench
from paper.pieces import Piece
from paper.prompt_length import request_of
from paper.report import Claim
from paper.report import Report
from paper.settings import SABER
from paper.settings import archer

LENGTHS = (64, 128, 256, 512)
# Fewer have no interval of 95 % around their median.
PROMPTS = 6


def pieces(bench: Bench) -> list[Piece]:
  del bench
  units = lambda length: max(1, 2 * (PROMPTS + 1) * length // 256)
  return [Piece(table='response_length', task=None, part=length, units=units(length)) for length in LENGTHS]


def measure(bench: Bench, piece: Piece) -> dict[str, Any]:
  """Seconds, operations, steps and refreshes of every prompt, the two settings in turns."""
  told = {name: {'seconds': [], 'operations': [], 'steps': [], 'refreshes': []} for name in ('saber', 'archer')}
  labels = {'saber': SABER, 'archer': archer(bench.k)}
  n_rows = 1 if bench.mesh is None else bench.mesh.shape['data']
  for number in range(-1, PROMPTS):
    order = list(labels) if number % 2 else list(labels)[::-1]
    for name in order:
      request, settings = request_of(bench, labels[name], published.RESPONSE_LENGTH_PROMPT, piece.part, max(number, 0))
      batch = bench.start_requests([request], settings, n_rows)
      shape, done = jax.block_until_ready(batch.state).prompt_tokens.shape, {}
      run = lambda batch=batch, done=done: done.update(
        out=jax.block_until_ready(work.counted_decode(bench.params, batch.state, cfg=batch.cfg))
      )
      seconds = timed(run)
      # The first, which compiles, comes once more.
      if number < 0:
        continue
      state, passes = done['out']
      bench.results(f'P = {published.RESPONSE_LENGTH_PROMPT}, G = {piece.part}', batch, state)
      counters = jax.device_get(state.counters)
      one = told[name]
      one['seconds'].append(seconds)
      one['operations'].append(work.total(jax.device_get(passes), work.pass_operations(batch.cfg, *shape)))
      one['steps'].append(int(counters.steps[0]))
      one['refreshes'].append(int(counters.refreshes[0]))
  return told


def report(bench: Bench, found: Sequence[tuple[Piece, Any]]) -> Report:
  rows, claims = [], []
  least, most = published.RESPONSE_LENGTH
  for piece, value in found:
    saber, mine = value['saber'], value['archer']
    speed = ratio(saber['seconds'], mine['seconds'])
    row = {
      'gen_length': piece.part,
      'prompt_length': published.RESPONSE_LENGTH_PROMPT,
      'seconds_saber': float(np.mean(saber['seconds'])),
      'seconds_archer': float(np.mean(mine['seconds'])),
      'speed': speed['median'],
      'speed_low': speed['low'],
      'speed_high': speed['high'],
      'counted': sum(saber['operations']) / sum(mine['operations']),
      'steps_saber': float(np.mean(saber['steps'])),
      'steps_archer': float(np.mean(mine['steps'])),
      'refresh_share': sum(mine['refreshes']) / sum(mine['steps']),
    }
    rows.append(row)
    claims.append(
      Claim(
        text=f'G = {piece.part}: whole decodings by Archer against Saber',
        paper=f'{least:.2f}x to {most:.2f}x',
        here=reports.times(row['speed'], row['speed_low'], row['speed_high']),
        verdict=reports.verdict(1, row['speed_low'], row['speed_high'], 1),
      )
    )
  k = bench.plans[0].settings[archer(bench.k)].row({})['refresh_distance']
  return Report(
    name='response_length',
    title='Whole decodings by answer length',
    columns=COLUMNS,
    rows=rows,
    claims=claims,
    notes=[
      f'Batch 1, P = {published.RESPONSE_LENGTH_PROMPT}, K = {k}; medians over {PROMPTS} prompts, each decoded by both '
      'in turns. Prompts are those of the tasks one behind another, cut to length; what is answered is not graded.'
    ],
  )


COLUMNS = {
  'G': lambda r: str(r['gen_length']),
  's, Saber': lambda r: f'{r["seconds_saber"]:.3g}',
  's, Archer': lambda r: f'{r["seconds_archer"]:.3g}',
  'ratio (95 %)': lambda r: reports.times(r['speed'], r['speed_low'], r['speed_high']),
  'counted': lambda r: reports.times(r['counted']),
  'steps, Saber': lambda r: f'{r["steps_saber"]:.1f}',
  'steps, Archer': lambda r: f'{r["steps_archer"]:.1f}',
  'refreshes %': lambda r: f'{100 * r["refresh_share"]:.1f}',
}


def draw(report: Report):
  """The ratio over the answer's length, and the paper's range."""
  figure, (axis,) = figures.panels(1, width=5.6)
  rows = report.rows
  x = [row['gen_length'] for row in rows]
  spans = [[r['speed'] - r['speed_low'] for r in rows], [r['speed_high'] - r['speed'] for r in rows]]
  axis.errorbar(x, [r['speed'] for r in rows], yerr=spans, capsize=3, label='here, by the clock', **figures.look(1))
  axis.plot(x, [row['counted'] for row in rows], label='here, counted', linestyle=':', **figures.look(2))
  axis.axhspan(*published.RESPONSE_LENGTH, color='gray', alpha=0.2, label='paper')
  axis.set_xscale('log', base=2)
  axis.set_xticks(x, [str(length) for length in x])
  axis.set_xlabel(f'tokens of the answer, P = {rows[0]["prompt_length"]}')
  axis.set_ylabel('Saber over Archer')
  axis.legend(fontsize=8)
  return figure

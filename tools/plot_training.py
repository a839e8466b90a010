"""Draws a training's log: loss and exact match of every task against the tokens that it was trained on.

python tools/plot_training.py runs/suite/log.jsonl training.png
"""

from collections.abc import Mapping
from collections.abc import Sequence
import itertools
import json
from pathlib import Path
from typing import Any

from absl import app
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

MILLION = 1e6


def stage_ends(header: Mapping[str, Any]) -> list[float]:
  """Millions of tokens after each stage of a log's first record, padding included."""
  tokens = lambda part: part['batch_size'] * (part['prompt_length'] + part['answer_length'])
  stages = header['train']['stages']
  return [n / MILLION for n in itertools.accumulate(s['steps'] * sum(map(tokens, s['parts'])) for s in stages)]


def draw(records: Sequence[Mapping[str, Any]]) -> Figure:
  """The figure of a log, whose first record is its header."""
  figure = Figure(figsize=(8, 7), dpi=150, layout='constrained')
  loss_axes, match_axes = figure.subplots(2, sharex=True)
  last = max((record.get('tokens', 0) for record in records), default=0) / MILLION
  tasks = sorted({task for record in records for task in record.get('loss', ())})
  for color, task in enumerate(tasks):
    for axes, field, scale, style in ((loss_axes, 'loss', 1, '-'), (match_axes, 'exact_match', 100, 'o-')):
      points = [(r['tokens'] / MILLION, scale * r[field][task]) for r in records if task in r.get(field, ())]
      axes.plot(*zip(*points, strict=True) if points else ([], []), style, color=f'C{color}', label=task, lw=1, ms=4)
  # Easier problems come first, so that curves of different stages do not compare.
  starts = [0.0, *stage_ends(records[0])]
  for number, (start, end) in enumerate(itertools.pairwise(starts), start=1):
    if start >= last:
      break
    for axes in (loss_axes, match_axes):
      axes.axvline(start, color='0.6', lw=0.8, ls='--')
    loss_axes.annotate(
      f'stage {number}',
      ((start + min(end, last)) / 2, 1.01),
      xycoords=('data', 'axes fraction'),
      ha='center',
      va='bottom',
    )
  loss_axes.set(yscale='log', ylabel='loss (nats per answer token)')
  loss_axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
  loss_axes.yaxis.set_major_formatter('{x:g}')
  loss_axes.yaxis.set_minor_formatter('')
  match_axes.set(
    xlim=(0, 1.01 * last), ylim=(-2, 102), xlabel='tokens of prompts and answers, padding included (millions)'
  )
  match_axes.set_ylabel('held-out problems of the stage\nsolved, one token a step (%)')
  for axes in (loss_axes, match_axes):
    axes.grid(alpha=0.25)
  figure.legend(*loss_axes.get_legend_handles_labels(), loc='outside lower center', ncols=len(tasks), frameon=False)
  return figure


def main(argv: list[str]) -> None:
  """Reads the log that is named first and writes the figure that is named second."""
  if len(argv) != 3:
    raise app.UsageError('there must be two arguments: a log.jsonl and the figure to write')
  draw([json.loads(line) for line in Path(argv[1]).read_text().splitlines()]).savefig(argv[2])


if __name__ == '__main__':
  app.run(main)

"""The comparison on a terminal: a table for every task, of at most 100 columns."""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

WIDTH = 100

# Header, and the cell of a record.
_COLUMNS = {
  'Pass@1\n%': lambda r: f'{100 * r["pass_at_1"]:.1f}',
  '95 %\nint.': lambda r: f'{100 * r["ci_low"]:.0f}-{100 * r["ci_high"]:.0f}',
  'won-\nlost': lambda r: f'{r["wins"]}-{r["losses"]}',
  'p': lambda r: '<.001' if r['p_value'] < 0.001 else f'{r["p_value"]:.3f}',
  'steps': lambda r: f'{r["steps"]:.1f}',
  'for-\nwards': lambda r: f'{r["nfe"]:.1f}',
  're-\nfresh': lambda r: f'{r["refresh_share"]:.0%}',
  're-\nmask': lambda r: f'{r["remasked"]:.1f}',
  'flip-\nflop': lambda r: f'{r["flip_flop_rate"]:.0%}',
  'tok.\n/s': lambda r: f'{r["tokens_per_s"]:.0f}',
  'time\nratio': lambda r: _times(r['speedup_wall']),
  'time\n95 %': lambda r: _interval(r['speedup_wall_low'], r['speedup_wall_high']),
  'count\nratio': lambda r: _times(r['speedup_counted']),
}
# What compares with the first setting says nothing of itself.
_PAIRED = ('won-\nlost', 'p')
# Left out in this order where the terminal is too narrow.
_DISPENSABLE = ('time\n95 %', 'for-\nwards', 'tok.\n/s', 'flip-\nflop', 're-\nmask', '95 %\nint.')

LEGEND = (
  'won-lost, p: problems against the first setting, exact sign test. steps, forwards, re-mask: per problem. '
  'refresh: share of the steps. flip-flop: share of re-masked tokens that were written again unchanged. '
  'time ratio with its interval, count ratio: {base}.'
)


def _digits(value: float) -> str:
  return f'{value:.2f}' if value < 10 else f'{value:.1f}'


def _times(value: float | None) -> str:
  return '-' if value is None else f'{_digits(value)}x'


def _interval(low: float | None, high: float | None) -> str:
  return '-' if low is None else f'{_digits(low)}-{_digits(high)}'


def terminal() -> Console:
  """Standard output, as wide as the tables where it is no terminal."""
  console = Console(highlight=False)
  return console if console.is_terminal else Console(highlight=False, width=WIDTH)


def print_task(console: Console, records: Sequence[Mapping[str, Any]]) -> None:
  """Prints the records of one task."""
  first = records[0]
  problems = f'{first["n"]} problem{"s" if first["n"] > 1 else ""}'
  console.print(
    f'\n{first["task"]}: {problems}, prompts of {first["prompt_tokens"]:.0f} tokens, '
    f'canvas of {first["gen_length"]}, batches of {first["batch_size"]}',
    style='bold',
    markup=False,
  )
  table = _table(records, ())
  for dropped in range(len(_DISPENSABLE)):
    # Measured with all the room there could be, as the console itself would say that everything fits.
    if console.measure(table, options=console.options.update(width=10 * WIDTH)).minimum <= console.width:
      break
    table = _table(records, _DISPENSABLE[: dropped + 1])
  console.print(table)


def _table(records: Sequence[Mapping[str, Any]], left_out: Sequence[str]) -> Table:
  columns = {header: cell for header, cell in _COLUMNS.items() if header not in left_out}
  # Further scores of the same answers come last.
  for name in records[0].get('also', ()):
    columns[f'{name}\n%'] = lambda record, name=name: f'{100 * record["also"][name]["pass_at_1"]:.1f}'
  table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0, show_edge=False)
  table.add_column('setting', overflow='fold')
  for header in columns:
    table.add_column(header, justify='right', no_wrap=True)
  for row, record in enumerate(records):
    cells = ['' if row == 0 and header in _PAIRED else cell(record) for header, cell in columns.items()]
    table.add_row(record['setting'].replace('+', '\n+'), *cells)
  return table


def print_legend(console: Console, base: str | None) -> None:
  """Says once what the columns mean; `base` is the setting that ratios are taken to."""
  ratios = f'how many times as fast as {base}, by the clock and by counted operations'
  if base is None:
    ratios = 'not given, as no setting that is compared refreshes always'
  console.print(Padding(LEGEND.format(base=ratios), (1, 0, 0, 0)), style='dim', markup=False)

"""Prints the records of an evaluation as the table of Markdown that README.md and docs/defaults.md show.

    python -m archer_jax.evaluate --tasks=sudoku6 --n=304 --json=figures.json
    python tools/markdown_table.py figures.json [--settings=always,archer]

It reads the files of `--json` of archer_jax.evaluate.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import json
from pathlib import Path
import sys
from typing import Any

from absl import app
from absl import flags

from archer_jax.flags import escape_output

_SETTINGS = flags.DEFINE_list('settings', None, 'the settings to show, between commas; by default all')
_COLUMNS = (
  'task',
  'setting',
  'Pass@1 (95 %)',
  'won-lost, p',
  'steps',
  'refreshes',
  'taken back',
  'rows fed',
  'kept',
  'time ratio',
  'count ratio',
)
# Not in files of before there were methods that differ in them.
_LATER = {'rows fed': 'rows_fed', 'kept': 'kept_bytes'}


def read_records(path: Path) -> list[dict[str, Any]]:
  """The records of a file.

  Raises:
    ValueError: it is none.
  """
  if not path.is_file():
    raise ValueError(f'there is no file {path}')
  try:
    records = json.loads(path.read_text('utf-8'))
    if not isinstance(records, list):
      raise TypeError('records must be a list')
    for record in records:
      _figures(record)
    return records
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(f'{path} must be a file of --json of archer_jax.evaluate') from error


def markdown(records: Sequence[Mapping[str, Any]], settings: Sequence[str] | None = None) -> str:
  """The table, a line per record.

  Raises:
    ValueError: a setting that no record is of.
  """
  known = list(dict.fromkeys(record['setting'] for record in records))
  for setting in settings or ():
    if setting not in known:
      raise ValueError(f'settings must be among {", ".join(known)}, got {setting}')
  columns = [name for name in _COLUMNS if _LATER.get(name, 'task') in records[0]]
  lines = [_line(columns), '|---' * len(columns) + '|']
  task = None
  for record in records:
    if settings and record['setting'] not in settings:
      continue
    told = '' if record['task'] == task else f'`{record["task"]}`'
    task = record['task']
    lines.append(_line((told, f'`{record["setting"]}`', *_figures(record))))
  return '\n'.join(lines)


def _figures(record: Mapping[str, Any]) -> tuple[str, ...]:
  """All columns but task and setting."""
  percent = lambda value: f'{100 * value:.0f}'
  interval = f'{percent(record["ci_low"])}-{percent(record["ci_high"])}'
  ratio = lambda value: '' if value is None else f'{value:.2f}x'
  p = record['p_value']
  told_p = '<.001' if p < 0.001 else f'{p:.{3 if p < 0.01 else 2}f}'
  return (
    f'{percent(record["pass_at_1"])} % ({interval})',
    f'{record["wins"]}-{record["losses"]}, {told_p}',
    f'{record["steps"]:.1f}',
    f'{percent(record["refresh_share"])} %',
    f'{record["remasked"]:.1f}',
    *([f'{record["rows_fed"]:,.0f}'] if 'rows_fed' in record else []),
    *([f'{record["kept_bytes"] / 1e6:.2f} MB'] if 'kept_bytes' in record else []),
    ratio(record['speedup_wall']),
    ratio(record['speedup_counted']),
  )


def _line(cells: Sequence[str]) -> str:
  return f'| {" | ".join(cells)} |'


def main(argv: list[str]) -> None:
  """Runs the command."""
  escape_output()
  if len(argv) != 2:
    raise app.UsageError('give one file')
  try:
    print(markdown(read_records(Path(argv[1])), _SETTINGS.value))
  except ValueError as error:
    sys.exit(f'error: {error}')


if __name__ == '__main__':
  app.run(main)

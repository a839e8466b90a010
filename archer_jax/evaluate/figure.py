"""Quality against speed: a panel for every task, a point for every setting."""

from collections.abc import Mapping
from collections.abc import Sequence
import math
from pathlib import Path
from typing import Any

_PANEL_INCHES = (4.2, 3.4)
_MARKERS = 'osD^vPh<>'
# Told apart by most colour-blind people too (Okabe and Ito); repeats go with another marker.
_COLORS = ('#000000', '#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9')


def check_figure(path: Path) -> None:
  """Raises ValueError if there is no matplotlib or it cannot write files of that name."""
  try:
    from matplotlib.backend_bases import FigureCanvasBase
  except ImportError as error:
    raise ValueError("figure needs matplotlib: pip install 'archer_jax[eval]'") from error
  kinds = FigureCanvasBase.get_supported_filetypes()
  if path.suffix.lower().removeprefix('.') not in kinds:
    raise ValueError(f'figure must end in one of {", ".join(f".{kind}" for kind in sorted(kinds))}, got {path}')


def draw_figure(path: Path, records: Sequence[Mapping[str, Any]], base: str | None) -> None:
  """Draws the records of all tasks to a file.

  Args:
    path: its suffix says the format.
    records: see `record.records`.
    base: the setting that speed is relative to; without one it is tokens per second.
  """
  from matplotlib.figure import Figure
  from matplotlib.lines import Line2D

  tasks = list(dict.fromkeys(record['task'] for record in records))
  settings = list(dict.fromkeys(record['setting'] for record in records))
  looks = {
    setting: {'color': _COLORS[i % len(_COLORS)], 'marker': _MARKERS[i % len(_MARKERS)]}
    for i, setting in enumerate(settings)
  }
  # Four are a square.
  columns = 2 if len(tasks) == 4 else min(len(tasks), 3)
  rows = math.ceil(len(tasks) / columns)
  width, height = _PANEL_INCHES
  figure = Figure(figsize=(width * columns, height * rows + 0.7), layout='constrained')
  panels = figure.subplots(rows, columns, squeeze=False).ravel()
  for panel in panels[len(tasks) :]:
    panel.remove()
  for panel, task in zip(panels, tasks, strict=False):
    mine = [record for record in records if record['task'] == task]
    for record in mine:
      _point(panel, record, base is not None, looks[record['setting']])
    panel.set_title(f'{task}, n = {mine[0]["n"]}', wrap=True)
    panel.set_ylabel('Pass@1 in %, 95 % interval')
    panel.set_xlabel(f'times as fast as {base} (wall time)' if base else 'generated tokens per second')
    panel.grid(alpha=0.25)
    panel.margins(x=0.12, y=0.12)
  handles = [Line2D([], [], linestyle='', markersize=7, label=setting, **look) for setting, look in looks.items()]
  if base:
    handles.append(Line2D([], [], linestyle='', marker='x', color='gray', markersize=6, label='by counted operations'))
  # About 12 letters to the inch.
  longest = max(len(handle.get_label()) for handle in handles) + 6
  fitting = max(1, int(12 * width * columns) // longest)
  figure.legend(handles=handles, loc='outside lower center', ncols=min(len(handles), fitting), frameon=False)
  figure.savefig(path, dpi=150)


def _point(panel, record: Mapping[str, Any], relative: bool, look: Mapping[str, str]) -> None:
  """One setting: quality with its interval, speed with its own, and where counted operations would have it."""
  y = 100 * record['pass_at_1']
  y_bars = [[y - 100 * record['ci_low']], [100 * record['ci_high'] - y]]
  x, x_bars = record['tokens_per_s'], None
  if relative:
    x = record['speedup_wall']
    if record['speedup_wall_low'] is not None:
      x_bars = [[max(x - record['speedup_wall_low'], 0)], [max(record['speedup_wall_high'] - x, 0)]]
  panel.errorbar(x, y, yerr=y_bars, xerr=x_bars, markersize=7, capsize=3, linewidth=1.2, **look)
  if relative:
    panel.plot([x, record['speedup_counted']], [y, y], color=look['color'], linewidth=0.8, linestyle=':')
    panel.plot(record['speedup_counted'], y, marker='x', color=look['color'], markersize=6)

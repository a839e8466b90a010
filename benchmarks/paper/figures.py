"""What the pictures of all tables share."""

from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any

from trajectory import COLORS

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

MARKERS = 'osD^vPh<>X*p'
PAPER = {'color': 'gray', 'linestyle': '', 'marker': 'x', 'markersize': 7}


def look(number: int) -> dict[str, Any]:
  """Colour and marker of the n-th of several."""
  return {'color': COLORS[number % len(COLORS)], 'marker': MARKERS[number % len(MARKERS)]}


def panels(count: int, width: float = 4.6, height: float = 4.0) -> tuple['Figure', Sequence['Axes']]:
  """A figure with panels beside each other, at most three in a row."""
  from matplotlib.figure import Figure

  columns = min(count, 3)
  rows = -(-count // columns)
  figure = Figure(figsize=(width * columns, height * rows + 0.5), layout='constrained')
  axes = figure.subplots(rows, columns, squeeze=False).ravel()
  for axis in axes[count:]:
    axis.remove()
  for axis in axes[:count]:
    axis.grid(alpha=0.25)
  return figure, axes[:count]


def bars(value: float, low: float | None, high: float | None) -> list[list[float]] | None:
  """The error bars of a value from its interval."""
  if low is None or high is None:
    return None
  return [[max(value - low, 0)], [max(high - value, 0)]]


def legend(figure: 'Figure', axis: 'Axes', columns: int = 3) -> None:
  """The legend of one panel below all."""
  handles, names = axis.get_legend_handles_labels()
  figure.legend(handles, names, loc='outside lower center', ncols=min(columns, len(names)), frameon=False, fontsize=8)

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


def panels(count: int, width: float = 5.0, height: float = 4.0) -> tuple['Figure', Sequence['Axes']]:
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


def legend(figure: 'Figure', *axes: 'Axes') -> None:
  """One legend of some panels below all, in as many columns as there is room for."""
  found = {}
  for axis in axes:
    for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
      found.setdefault(name, handle)
  # About 14 letters to the inch, and the marker takes as much as some.
  fitting = max(1, int(14 * figure.get_figwidth()) // (max(map(len, found)) + 8))
  columns = min(len(found), fitting)
  figure.legend(list(found.values()), list(found), loc='outside lower center', ncols=columns, frameon=False, fontsize=8)

"""A decoding as one picture: what every position held after every step, and under it what the refresh rule saw.

matplotlib is imported when something is drawn and not before.
"""

from pathlib import Path

import numpy as np

from archer_jax.report.recording import Recording
from archer_jax.report.recording import Standing

# Told apart by most colour-blind people too (Okabe and Ito), and in grey by their lightness.
COLORS = {
  Standing.MASKED: '#E8E8E8',
  Standing.COMMITTED: '#56B4E9',
  Standing.TAKEN_BACK: '#D55E00',
  Standing.SAME_AGAIN: '#F0E442',
  Standing.OTHER_AGAIN: '#009E73',
}
NAMES = {
  Standing.MASKED: 'masked',
  Standing.COMMITTED: 'committed',
  Standing.TAKEN_BACK: 're-masked',
  Standing.SAME_AGAIN: 'committed again, same token',
  Standing.OTHER_AGAIN: 'committed again, another token',
}
_REFRESH = '#8E44AD'
_LINE = '#222222'
_BOUND = '#D55E00'
_DPI = 150


def check_matplotlib() -> None:
  """Raises ValueError if there is no matplotlib."""
  try:
    import matplotlib.figure  # noqa: F401
  except ImportError as error:
    raise ValueError("report needs matplotlib: pip install 'archer_jax[eval]'") from error


def draw_recording(path: Path, recording: Recording) -> None:
  """Draws a recording to a file, whose suffix says the format; call `check_matplotlib` before."""
  from matplotlib.colors import ListedColormap
  from matplotlib.figure import Figure
  from matplotlib.lines import Line2D
  from matplotlib.patches import Patch
  from matplotlib.ticker import MaxNLocator

  n_steps, length = recording.canvas.shape
  steps = np.arange(1, n_steps + 1)
  # A step is wide enough to be seen, and a page is not wider than a screen.
  width, height = float(np.clip(4 + 0.16 * n_steps, 8, 18)), float(np.clip(1.5 + 0.05 * length, 2.6, 8))
  figure = Figure(figsize=(width, height + 5), layout='constrained')
  panels = figure.subplots(4, 1, sharex=True, height_ratios=[height, 1.1, 1.1, 1.1])
  field, drift, margin, age = panels

  standings = recording.standings()
  field.imshow(
    standings.T,
    cmap=ListedColormap([COLORS[standing] for standing in Standing]),
    vmin=-0.5,
    vmax=len(Standing) - 0.5,
    aspect='auto',
    interpolation='nearest',
    extent=(0.5, n_steps + 0.5, length - 0.5, -0.5),
  )
  if n_steps <= 80 and length <= 120:
    field.set_xticks(np.arange(0.5, n_steps + 1), minor=True)
    field.set_yticks(np.arange(-0.5, length), minor=True)
    field.grid(which='minor', color='white', linewidth=0.6)
    field.tick_params(which='minor', length=0)
  field.set_ylabel('canvas position (tokens)')
  field.set_title(f'request {recording.name}: {recording.summary()}', fontsize=10, wrap=True, loc='left')

  measured, limit = recording.distance if recording.counts else recording.drift, recording.limit
  drift.plot(steps, measured, color=_LINE, marker='.', markersize=4, linewidth=1)
  kind = recording.settings.get('drift')
  drift.set_ylabel('distance\n(positions)' if recording.counts else f'{kind} drift\n(0 to 1)')
  drift.set_ylim(0, max(1.15 * float(measured.max()), 1.3 * (limit or 0), 1 if recording.counts else 0.05))
  if limit is not None:
    drift.axhline(limit, color=_BOUND, linestyle='--', linewidth=1)

  bound = recording.certificate_bound
  _draw_margin(margin, steps, recording.margin, bound)
  age.step(steps, np.maximum(recording.age, 0), where='mid', color=_LINE, linewidth=1)
  age.set_ylabel('prompt age\n(steps)')
  age.set_ylim(0, 1.15 * max(int(recording.age.max()), 1))
  age.yaxis.set_major_locator(MaxNLocator(4, integer=True))
  age.set_xlabel('denoising step')
  age.set_xlim(0.5, n_steps + 0.5)
  age.xaxis.set_major_locator(MaxNLocator(12, integer=True))
  for panel in (drift, margin, age):
    panel.grid(alpha=0.25)
    for step in steps[recording.refresh]:
      panel.axvline(step, color=_REFRESH, linewidth=1, alpha=0.45, zorder=0)
    top = np.ones(int(recording.refresh.sum()))
    panel.plot(
      steps[recording.refresh], top, 'v', color=_REFRESH, markersize=5, transform=panel.get_xaxis_transform(), zorder=5
    )

  handles = [
    Patch(facecolor=COLORS[s], edgecolor='#888888', label=NAMES[s]) for s in Standing if (standings == s).any()
  ]
  handles.append(Line2D([], [], color=_REFRESH, marker='v', label='refresh'))
  limits = []
  if limit is not None:
    limits.append(f'K = {limit:g}: refresh from here on' if recording.counts else f'radius {limit:g}: refresh above it')
  if bound is not None:
    limits.append('kappa x drift: a reuse whose margin is above it is certified')
  handles += [Line2D([], [], color=_BOUND, linestyle='--', label=limit) for limit in limits]
  # About two inches to an entry.
  columns = min(len(handles), max(2, int(width / 2.4)))
  figure.legend(handles=handles, loc='outside lower center', ncols=columns, frameon=False, fontsize=9)
  figure.savefig(path, dpi=_DPI)


def _draw_margin(panel, steps: np.ndarray, margin: np.ndarray, bound: np.ndarray | None) -> None:
  """Margins span orders of magnitude; one that nothing bounds stands at the top, one of a tie at the bottom."""
  shown = margin if bound is None else np.concatenate([margin, bound])
  positive = shown[np.isfinite(shown) & (shown > 0)]
  low, high = (float(positive.min()), float(positive.max())) if positive.size else (0.1, 1.0)
  low, high = low / 2, high * 2
  panel.set_yscale('log')
  panel.set_ylim(low, high)
  panel.plot(steps, np.clip(margin, low, high), color=_LINE, marker='.', markersize=4, linewidth=1)
  if bound is not None:
    panel.plot(steps, np.clip(bound, low, high), color=_BOUND, linestyle='--', linewidth=1)
  panel.set_ylabel('margin\n(logits)')

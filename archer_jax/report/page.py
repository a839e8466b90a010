"""A decoding as one page to step through, in a single file that asks nothing of any network."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from archer_jax.report.image import COLORS
from archer_jax.report.image import NAMES
from archer_jax.report.image import draw_recording
from archer_jax.report.recording import Recording
from archer_jax.report.recording import Standing

_TEMPLATE = Path(__file__).with_name('page.html')
_DATA, _TITLE = '"{{data}}"', '{{title}}'


def write_report(recording: Recording, target: Path) -> list[Path]:
  """Writes picture and page of a recording, over what is there.

  Args:
    recording: what to show.
    target: where to, without a suffix.

  Returns:
    The files.
  """
  image, page = (target.with_name(f'{target.name}.{suffix}') for suffix in ('png', 'html'))
  draw_recording(image, recording)
  page.write_text(page_text(recording), encoding='utf-8')
  return [image, page]


def page_text(recording: Recording) -> str:
  """The page as HTML."""
  # Nothing that a model writes may end the script or begin another element.
  data = json.dumps(_data(recording), ensure_ascii=True, allow_nan=False, separators=(',', ':')).replace('<', '\\u003c')
  title = ''.join(c if c.isalnum() or c in ' ._-' else '_' for c in recording.name)
  return _TEMPLATE.read_text(encoding='utf-8').replace(_TITLE, title).replace(_DATA, data)


def _data(recording: Recording) -> dict[str, Any]:
  """What the page's script reads; of every canvas only what its step changed, as pairs of position and token."""
  before, after = recording.before, recording.canvas
  changes = [
    [[int(position), int(new[position])] for position in np.flatnonzero(old != new)]
    for old, new in zip(before, after, strict=True)
  ]
  # JSON has no infinity.
  numbers = lambda values: [float(f'{value:.6g}') if np.isfinite(value) else None for value in values.tolist()]
  return {
    'name': recording.name,
    'summary': recording.summary(),
    'length': after.shape[1],
    'mask': recording.mask_id,
    'texts': None if recording.texts is None else {str(token): text for token, text in recording.texts.items()},
    'prompt': recording.prompt_ids.tolist(),
    'changes': changes,
    'refresh': recording.refresh.astype(int).tolist(),
    'distance': recording.distance.tolist(),
    'drift': numbers(recording.drift),
    'counts': recording.counts,
    'limit': recording.limit,
    'margin': numbers(recording.margin),
    'age': recording.age.tolist(),
    'reason': recording.reason.tolist(),
    'reasonNames': list(recording.reason_names),
    'settings': dict(recording.settings),
    'colors': [COLORS[standing] for standing in Standing],
    'names': [NAMES[standing] for standing in Standing],
  }

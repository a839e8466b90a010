"""A decoding as a trace file keeps it: read, checked, and seen position by position.

Plain NumPy without JAX, so that a trace can be looked at on any machine.

Axes: S steps, G canvas, P prompt.
"""

from collections.abc import Mapping
import dataclasses
import enum
import json
from pathlib import Path
from typing import Any
import zipfile
import zlib

import numpy as np

# Of every array the kinds of its numbers or texts, and its axes.
_PER_STEP = {
  'refresh_per_step': ('b', 1),
  'accept_per_step': ('iu', 1),
  'remask_per_step': ('iu', 1),
  'distance_per_step': ('iu', 1),
  'drift_per_step': ('f', 1),
  'age_per_step': ('iu', 1),
  'margin_per_step': ('f', 1),
  'reason_per_step': ('iu', 1),
}
# Told by the methods that have anchors; of others it is what changed since their last refresh.
_OF_ANCHORS = ('distance_per_step', 'drift_per_step', 'age_per_step')
_REQUIRED = {
  'id': ('Uiufb', 0),
  'canvas_after_step': ('iu', 2),
  **_PER_STEP,
  'reason_names': ('U', 1),
  'mask_id': ('iu', 0),
  'prompt_ids': ('iu', 1),
  'settings': ('U', 0),
  'token_ids': ('iu', 1),
}
# Absent without a tokenizer.
_OPTIONAL = {'token_texts': ('U', 1)}
_KINDS = {
  'b': 'true or false',
  'iu': 'whole numbers',
  'f': 'floating-point numbers',
  'U': 'texts',
  'Uiufb': 'any value',
}
_ZIP_MAGIC = b'PK'


class Standing(enum.IntEnum):
  """What a position of the canvas holds after a step, with what it held before."""

  MASKED = 0  # nothing was committed so far
  COMMITTED = 1  # a token, for the first time
  TAKEN_BACK = 2  # a mask where a token had been
  SAME_AGAIN = 3  # the token that was last taken back here
  OTHER_AGAIN = 4  # another token than the one that was last taken back here


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recording:
  """One decoded request, step by step.

  Attributes:
    name: the request's id as text.
    canvas: int32 [S, G], after each step.
    refresh: bool [S].
    accept, remask: int32 [S], tokens committed and taken back.
    distance: int32 [S], positions that differed from the anchor, as the step's refresh decision saw it; without
      anchors, from the canvas of the last refresh, and so with the next two.
    drift: float32 [S], likewise, by the measure of the setting `drift`.
    age: int32 [S], likewise; -1 before the first refresh.
    margin: float32 [S], of the step's own decision; may be infinite.
    reason: int32 [S], a bit set of the clauses that asked for the step's refresh; 0 for a reuse.
    reason_names: of the bits, the lowest first.
    mask_id: the model's mask token.
    prompt_ids: int32 [P].
    texts: of every token that occurs, by id; None where there was no tokenizer.
    settings: by their users' names.
  """

  name: str
  canvas: np.ndarray
  refresh: np.ndarray
  accept: np.ndarray
  remask: np.ndarray
  distance: np.ndarray
  drift: np.ndarray
  age: np.ndarray
  margin: np.ndarray
  reason: np.ndarray
  reason_names: tuple[str, ...]
  mask_id: int
  prompt_ids: np.ndarray
  texts: Mapping[int, str] | None
  settings: Mapping[str, Any]

  @property
  def n_steps(self) -> int:
    return self.canvas.shape[0]

  @property
  def before(self) -> np.ndarray:
    """int32 [S, G], the canvas before each step."""
    return np.concatenate([np.full_like(self.canvas[:1], self.mask_id), self.canvas[:-1]])

  @property
  def counts(self) -> bool:
    """Whether the refresh rule counts changed positions, rather than measuring a drift."""
    return self.settings.get('drift', 'token') == 'token'

  @property
  def limit(self) -> float | None:
    """K, or the drift radius; None where no such clause was on."""
    return float(self.settings.get('refresh_distance' if self.counts else 'drift_radius') or 0) or None

  @property
  def certificate_bound(self) -> np.ndarray | None:
    """float [S], kappa times drift; None without a kappa, and where the certificate saw a later drift than was kept."""
    kappa = float(self.settings.get('kappa') or 0)
    return kappa * self.drift if kappa and self.settings.get('drift') != 'hidden' else None

  def standings(self) -> np.ndarray:
    """int8 [S, G]: the `Standing` of every position after every step."""
    standings = np.zeros(self.canvas.shape, np.int8)
    now = np.zeros(self.canvas.shape[1], np.int8)
    taken = np.full(self.canvas.shape[1], -1)
    for step, (old, new) in enumerate(zip(self.before, self.canvas, strict=True)):
      was, is_mask, changed = old == self.mask_id, new == self.mask_id, old != new
      again = np.where(new == taken, Standing.SAME_AGAIN, Standing.OTHER_AGAIN)
      # A token that is replaced without a mask between is another one at once.
      written = np.where(was & (taken < 0), Standing.COMMITTED, again)
      now = np.where(changed & ~is_mask, written, np.where(changed & is_mask, Standing.TAKEN_BACK, now))
      taken = np.where(changed & ~was, old, taken)
      standings[step] = now
    return standings

  def summary(self) -> str:
    """The decoding in one line."""
    settings, steps, refreshes = self.settings, self.n_steps, int(self.refresh.sum())
    rule = f'refresh {settings["refresh"]}' if settings.get('refresh') else f'reuse {settings.get("reuse")}'
    return (
      f'{settings.get("decoder")}, {rule}: {steps} steps, {refreshes} refreshes '
      f'({refreshes / steps:.0%}), {int(self.accept.sum())} tokens committed, {int(self.remask.sum())} taken back'
    )


def read_recording(path: Path) -> Recording:
  """Reads a file that `--trace` of archer-decode wrote.

  Raises:
    ValueError: there is none, it is not one or only a part of one, or its arrays do not belong together.
  """
  path = Path(path)
  if not path.is_file():
    raise ValueError(f'trace must be a file that --trace of archer-decode wrote, there is none at {path}')
  try:
    with path.open('rb') as file:
      magic = file.read(len(_ZIP_MAGIC))
    if magic != _ZIP_MAGIC:
      raise ValueError(f'trace {path} is no .npz file; it must be one that --trace of archer-decode wrote')
    try:
      with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, KeyError) as error:
      raise ValueError(
        f'trace {path} is torn: it was not written to its end, or was changed since ({error})'
      ) from error
  except OSError as error:
    raise ValueError(f'trace {path} cannot be read: {error.strerror or error}') from error
  return make_recording(arrays, str(path))


def _since_refresh(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Distance, drift and age for a reuse method that has no anchors and tells none: those since its last refresh."""
  canvas, refresh = arrays.get('canvas_after_step'), arrays['refresh_per_step']
  if canvas is None or canvas.ndim != 2 or refresh.shape != canvas.shape[:1] or 'mask_id' not in arrays:
    # Told as what it is.
    return {}
  before = np.concatenate([np.full_like(canvas[:1], int(arrays['mask_id'])), canvas[:-1]])
  # The last step that refreshed before each one.
  steps = np.arange(len(refresh))
  last = np.concatenate([[-1], np.maximum.accumulate(np.where(refresh, steps, -1))[:-1]])
  distance = np.where(last < 0, 0, np.sum(before != before[last], axis=1)).astype(np.int32)
  age = np.where(last < 0, -1, steps - last).astype(np.int32)
  drift = (distance / canvas.shape[1]).astype(np.float32)
  return {'distance_per_step': distance, 'drift_per_step': drift, 'age_per_step': age}


def make_recording(arrays: Mapping[str, np.ndarray], source: str) -> Recording:
  """A recording from the arrays of a trace.

  Args:
    arrays: as `jobs.output.trace_arrays` gives them.
    source: names them in errors.

  Raises:
    ValueError: arrays that are missing, or that do not belong together.
  """
  if not any(name in arrays for name in _OF_ANCHORS) and 'refresh_per_step' in arrays:
    arrays = {**arrays, **_since_refresh(arrays)}
  if missing := [name for name in _REQUIRED if name not in arrays]:
    raise ValueError(f'trace {source} must have the arrays of --trace of archer-decode, but lacks {", ".join(missing)}')
  for name, (kinds, axes) in (_REQUIRED | _OPTIONAL).items():
    if name in arrays and (arrays[name].dtype.kind not in kinds or arrays[name].ndim != axes):
      raise ValueError(
        f'trace {source} must have {_KINDS[kinds]} with {axes} axes in {name}, got {arrays[name].dtype} of shape '
        f'{arrays[name].shape}'
      )
  canvas = arrays['canvas_after_step']
  if not all(canvas.shape):
    raise ValueError(f'trace {source} must have a canvas_after_step of steps x positions, got {canvas.shape}')
  for name in _PER_STEP:
    if arrays[name].shape != canvas.shape[:1]:
      raise ValueError(
        f'trace {source} must have one {name} for each of its {canvas.shape[0]} steps, got {arrays[name].shape}'
      )
  if not np.isfinite(arrays['drift_per_step']).all():
    raise ValueError(f'trace {source} must have finite numbers in drift_per_step')
  texts = None
  if 'token_texts' in arrays:
    if arrays['token_ids'].shape != arrays['token_texts'].shape:
      raise ValueError(f'trace {source} must have one of token_texts for each of token_ids')
    texts = dict(zip(arrays['token_ids'].tolist(), arrays['token_texts'].tolist(), strict=True))
    occurring = {*canvas.ravel().tolist(), *arrays['prompt_ids'].tolist()} - {int(arrays['mask_id'])}
    if untold := occurring - set(texts):
      raise ValueError(f'trace {source} must have the text of every token, but lacks that of {min(untold)}')
  try:
    settings = json.loads(str(arrays['settings']))
    for name in ('refresh_distance', 'drift_radius', 'kappa'):
      float(settings.get(name) or 0)
  except (ValueError, TypeError, AttributeError) as error:
    raise ValueError(f'trace {source} must have its settings as an object of JSON, got {error}') from error
  return Recording(
    name=str(arrays['id'].item()),
    canvas=canvas,
    **{
      name: arrays[f'{name}_per_step']
      for name in ('refresh', 'accept', 'remask', 'distance', 'drift', 'age', 'margin', 'reason')
    },
    reason_names=tuple(arrays['reason_names'].tolist()),
    mask_id=int(arrays['mask_id']),
    prompt_ids=arrays['prompt_ids'],
    texts=texts,
    settings=settings,
  )

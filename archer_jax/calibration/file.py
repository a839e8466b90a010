"""refresh.json beside a checkpoint's manifest: what kappa holds for which share of the steps, and how that was found.

    format_version, checkpoint_sha256
    calibrations: a list with one entry per dtype, decoder and drift
      dtype, decoder, drift, kappa {quantile: value}, refresh_distance for the drift token, drift_radius, steps, ...

Plain Python without JAX, so that a command line can refuse a wrong file before anything is loaded.
"""

from collections.abc import Mapping
import contextlib
import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from archer_jax.checkpoints.manifest import BUNDLED
from archer_jax.checkpoints.manifest import Manifest
from archer_jax.engine.settings import Settings
from archer_jax.engine.settings import calibrated_limit
from archer_jax.engine.settings import check_setting

# 2: the limit of token drift is a count.
FORMAT_VERSION = 2
FILE_NAME = 'refresh.json'
# What an entry is for; a kappa of another of these says nothing.
KEYS = ('dtype', 'decoder', 'drift')
_REMEDY = 'remove it and run archer-calibrate again'


def calibration_file(checkpoint: str | Path | None) -> Path:
  """Where a checkpoint's calibrations stand; by default those of the bundled model."""
  return (BUNDLED if checkpoint is None else Path(checkpoint)) / FILE_NAME


def fingerprint(manifest: Manifest) -> str:
  """SHA-256 of what a checkpoint is; recommended settings and what is told of its tokenizer's files are left out."""
  content = dataclasses.asdict(manifest)
  # What an adapter made of the parameters is told by their digests and sources.
  for name in ('defaults', 'end_ids', 'tokenizer_size', 'adapter'):
    del content[name]
  return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_calibrations(path: Path, manifest: Manifest) -> list[dict[str, Any]]:
  """The entries of a file, checked.

  Raises:
    ValueError: there is none, it is no such file, or one of another checkpoint.
  """
  if not path.exists():
    raise ValueError(f'{path} does not exist; make it with archer-calibrate, or give kappa with refresh certified')
  try:
    content = json.loads(path.read_text('utf-8'))
  except (OSError, ValueError) as error:
    raise ValueError(f'{path} cannot be read as a calibration: {error}; {_REMEDY}') from error
  if not isinstance(content, dict) or content.get('format_version') != FORMAT_VERSION:
    raise ValueError(f'{path} must be an object of JSON with format_version {FORMAT_VERSION}; {_REMEDY}')
  entries = content.get('calibrations')
  if not isinstance(entries, list):
    raise ValueError(f'{path}: calibrations must be a list, got {entries!r}; {_REMEDY}')
  for number, entry in enumerate(entries):
    try:
      _check_entry(entry)
    except ValueError as error:
      raise ValueError(f'{path}: entry {number}: {error}; {_REMEDY}') from error
  if content.get('checkpoint_sha256') != fingerprint(manifest):
    raise ValueError(f'{path} was calibrated for another checkpoint; remove it and run archer-calibrate for this one')
  return entries


def _check_entry(entry: Any) -> None:
  if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in KEYS):
    raise ValueError(f'{", ".join(KEYS)} must be texts')
  limit = calibrated_limit(entry)
  check_setting(limit, entry.get(limit))
  if not isinstance(entry.get('kappa'), dict) or not entry['kappa']:
    raise ValueError(f'kappa must be an object with a number for each quantile, got {entry.get("kappa")!r}')
  for quantile, kappa in entry['kappa'].items():
    try:
      share = float(quantile)
    except ValueError:
      share = quantile
    check_setting('quantile', share)
    check_setting('kappa', kappa)


def calibrated(settings: Settings, checkpoint: str | Path | None, manifest: Manifest, dtype: str) -> Settings:
  """The settings with the checkpoint's kappa and limit where `certified` was asked for without a kappa.

  Others come back as they are.

  Args:
    settings: of a run.
    checkpoint: its folder, None for the bundled model.
    manifest: of the checkpoint.
    dtype: that the run computes in.

  Raises:
    ValueError: no calibration, or none for this run.
  """
  if settings.is_calibrated:
    return settings
  path = calibration_file(checkpoint)
  entries = read_calibrations(path, manifest)
  wanted = {'dtype': dtype, 'decoder': settings.decoder, 'drift': settings.switches['drift']}
  found = [entry for entry in entries if all(entry[key] == wanted[key] for key in KEYS)]
  words = lambda entry: ' '.join(f'{key} {entry[key]}' for key in KEYS)
  if not found:
    raise ValueError(
      f'{path} has no calibration for {words(wanted)}, but for {"; ".join(map(words, entries)) or "nothing"}; '
      'run archer-calibrate for it, or give kappa'
    )
  by_quantile = {float(quantile): kappa for quantile, kappa in found[0]['kappa'].items()}
  if settings.quantile not in by_quantile:
    raise ValueError(
      f'quantile must be one that {path} has, {", ".join(map(str, sorted(by_quantile)))}, got {settings.quantile}'
    )
  return settings.with_calibration(by_quantile[settings.quantile], found[0][calibrated_limit(settings.switches)])


def write_calibration(path: Path, manifest: Manifest, entry: Mapping[str, Any]) -> None:
  """Puts an entry into a file, in the place of one for the same dtype, decoder and drift; others stay.

  Raises:
    ValueError: the file that is there is none, or another checkpoint's; or the entry is none.
    OSError: it cannot be written.
  """
  _check_entry(entry)
  entries = read_calibrations(path, manifest) if path.exists() else []
  entries = [old for old in entries if any(old[key] != entry[key] for key in KEYS)] + [dict(entry)]
  content = {
    'format_version': FORMAT_VERSION,
    'checkpoint_sha256': fingerprint(manifest),
    'calibrations': sorted(entries, key=lambda entry: [entry[key] for key in KEYS]),
  }
  part = path.with_name(f'.{path.name}.{os.getpid()}.partial')
  try:
    part.write_text(json.dumps(content, indent=2, allow_nan=False) + '\n', 'utf-8')
    # In one go, so that nobody ever reads a half.
    part.replace(path)
  finally:
    with contextlib.suppress(OSError):
      part.unlink(missing_ok=True)

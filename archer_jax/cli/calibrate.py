"""Calibrates `--refresh certified` for a checkpoint: how far kept prompts move the logits, per unit of drift.

    archer-calibrate --checkpoint DIR --input FILE.jsonl [--quantiles 0.99,0.999] [decoding flags]

It decodes the prompts, runs beside every kept forward a fresh one of the same step, and writes refresh.json into the
checkpoint's folder. Calibrate on prompts like those that will be decoded, with the same decoding flags.
"""

from collections.abc import Callable
from collections.abc import Sequence
import hashlib
from pathlib import Path
import sys
from typing import NoReturn

from absl import flags

from archer_jax import runtime
from archer_jax.calibration import file as calibration
from archer_jax.checkpoints.manifest import read_manifest
from archer_jax.engine.settings import check_setting
from archer_jax.engine.settings import make_settings
from archer_jax.flags import Definer
from archer_jax.flags import Groups
from archer_jax.flags import help_text
from archer_jax.flags import leave
from archer_jax.flags import read_flags
from archer_jax.flags import run_command
from archer_jax.jobs.output import check_writable

_USAGE = 'archer-calibrate --input FILE.jsonl [--flag=value ...]'
_INTRODUCTION = """\
Measures how far kept prompt keys and values move the logits that decisions are taken from, along real decodings of \
the given prompts, and writes the constant that --refresh certified needs into refresh.json of the checkpoint's folder.

  archer-calibrate --checkpoint=llada-8b --input=prompts.jsonl --quantiles=0.99,0.999

An entry of the file is for one dtype, decoder and drift; another run adds one or replaces its own."""


def define_flags(values: flags.FlagValues) -> Groups:
  """Defines every flag on `values` and returns them in groups, in the order of the help."""
  define = Definer(values)
  return {
    'What to calibrate': [
      define.text('checkpoint', 'folder that archer-convert made (default: the bundled model)'),
      define.text('input', 'file of JSON lines with prompts, as archer-decode reads it'),
      define.text('quantiles', 'shares of the steps that a kappa is fitted for, between commas', '0.99,0.999'),
      define.switch('chat', False, "prompts are a user's turn in the checkpoint's chat template"),
    ],
    **define.decoding(),
    'Run': define.running('what the seeds of requests without one are made from'),
  }


def read_quantiles(text: str) -> list[float]:
  """Shares between commas, in ascending order.

  Raises:
    ValueError: what is no number between 0 and 1, or nothing at all.
  """
  quantiles = []
  for part in text.split(','):
    try:
      value = float(part)
    except ValueError:
      value = part
    quantiles.append(check_setting('quantile', value))
  return sorted(set(quantiles))


def run() -> NoReturn:
  """The program: runs `main` and exits with its code."""
  leave(main(sys.argv))


def main(argv: Sequence[str]) -> int:
  """Runs the command.

  Args:
    argv: the program's name and its arguments.

  Returns:
    The exit code: 0, 1 if anything is wrong, 130 after an interrupt.
  """
  return run_command(argv, lambda: help_text(_USAGE, _INTRODUCTION, define_flags), _prepare)


def _prepare(argv: Sequence[str]) -> Callable[[], int]:
  options, given = read_flags(argv, define_flags)
  manifest = read_manifest(options['checkpoint'])
  if 'quantile' in given:
    raise ValueError('quantile must not be given: quantiles says for which shares of the steps a kappa is fitted')
  quantiles = read_quantiles(options['quantiles'])
  settings = make_settings(manifest.config, given, recommended=manifest.defaults)
  if not settings.is_calibrated:
    raise ValueError(
      'refresh certified must not be given without kappa, which is to be found here; the default archer leads along '
      'steps of the same drifts'
    )
  if options['input'] is None or not Path(options['input']).is_file():
    raise ValueError(f'input must be a file of JSON lines that exists, got {options["input"]}')
  path = calibration.calibration_file(options['checkpoint'])
  check_writable('checkpoint', path.parent)
  if path.exists():
    # One of another checkpoint would be found out only after the work.
    calibration.read_calibrations(path, manifest)

  runtime.set_up()
  # From here on JAX is there.
  import numpy as np
  from tqdm import tqdm

  from archer_jax.calibration import measure
  from archer_jax.checkpoints import checkpoint
  from archer_jax.engine.engine import Setup
  from archer_jax.engine.generate import decode_requests
  from archer_jax.engine.requests import Refusal
  from archer_jax.engine.requests import read_requests

  dtype = options['dtype'] or runtime.default_dtype()
  _, params, tokenizer = checkpoint.load(options['checkpoint'], dtype=dtype)
  content = Path(options['input']).read_bytes()
  entries = list(read_requests(content.splitlines(), settings, tokenizer))
  for entry in entries:
    if isinstance(entry, Refusal):
      raise ValueError(f'input {options["input"]}, record {entry.index}: {entry.error}')
  if not entries:
    raise ValueError(f'input {options["input"]} has no records')

  def run() -> int:
    recorder = measure.Recorder()
    setup = Setup(params=params, tokenizer=tokenizer, settings=settings, decode=recorder.decode)
    chunks = decode_requests(setup, entries, batch_size=options['batch_size'])
    with tqdm(total=len(entries), unit='prompt') as bar:
      for results in chunks:
        for result in results:
          if result.error is not None:
            raise OSError(f'record {result.index}: {result.error}')
        bar.update(len(results))
    steps = recorder.steps()
    fitted, reasons = measure.calibrate(steps, quantiles)
    if not fitted['kappa']:
      raise OSError('; '.join(reasons))
    entry = {
      'dtype': dtype,
      'decoder': settings.decoder,
      'drift': settings.switches['drift'],
      **fitted,
      'prompts': len(entries),
      'prompts_sha256': hashlib.sha256(content).hexdigest(),
      'settings': settings.by_name(),
    }
    calibration.write_calibration(path, manifest, entry)
    print(f'{fitted["steps"]} reuse steps of {len(entries)} prompts, and {fitted["steps_at_anchor"]} at their anchor')
    print(f'{fitted["steps_decided_otherwise"]} of the former would have been decided otherwise by a full forward')
    for quantile, kappa in fitted['kappa'].items():
      certified = measure.violations({k: v[np.asarray(steps['reused'], bool)] for k, v in steps.items()}, kappa)
      text = f'quantile {quantile}: kappa {kappa:.4g}, certifies {certified["certified"] / fitted["steps"]:.1%}'
      if quantile in fitted['held_out']:
        held = fitted['held_out'][quantile]
        text += f'; held out: {held["beyond"]} of {held["steps"]} beyond, {held["wrong"]} certified ones wrong'
      print(text)
    print(f'wrote {path}')
    # What could be fitted is kept.
    if reasons:
      raise OSError('; '.join(reasons))
    return 0

  return run

"""Real decodings one step at a time, with refreshes at chosen steps: what feedback, staleness and paper share.

Axes: B batch, S steps.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import json
from pathlib import Path
import sys

from absl import flags
from absl import logging
import jax
from jax import Array
import jax.numpy as jnp

from archer_jax import runtime
from archer_jax.checkpoints.text import Tokenizer
from archer_jax.config import DecodeConfig
from archer_jax.engine.batching import batch_config
from archer_jax.engine.batching import batch_state
from archer_jax.engine.batching import row_seed
from archer_jax.evaluate.__main__ import parse
from archer_jax.evaluate.compare import Plan
from archer_jax.evaluate.figure import check_figure
from archer_jax.evaluate.run import Evaluation
from archer_jax.evaluate.run import prepare
from archer_jax.jobs.output import check_writable
from archer_jax.reuse import prompt
from archer_jax.types import DecodeState

COLORS = ('#000000', '#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9')


def prepared(tasks: str, n: int, compare: str, batch_size: int, *others: str) -> Evaluation:
  """The evaluation that the command line of `python -m archer_jax.evaluate` would run; exits on what it refuses."""
  # Orbax reports every step of every restore.
  logging.set_verbosity(logging.WARNING)
  given = (f'--tasks={tasks}', f'--n={n}', f'--compare={compare}', f'--batch_size={batch_size}', '--dtype=float32')
  runtime.set_up()
  try:
    return prepare(parse(['evaluate', *given, *others]), 'float32', runtime.facts)
  except (ValueError, OSError, flags.Error) as error:
    sys.exit(f'error: {error}')


def batches(
  plan: Plan, label: str, tokenizer: Tokenizer, **changes: str
) -> Iterator[tuple[range, DecodeState, DecodeConfig]]:
  """States before the first step: which problems, their rows (filler behind them), and the program's config.

  Args:
    plan: of a task.
    label: of one of its settings.
    tokenizer: the checkpoint's.
    **changes: fields of the config.
  """
  settings, requests = plan.settings[label], plan.requests[label]
  for start in range(0, len(requests), plan.batch_size):
    batch = requests[start : start + plan.batch_size]
    cfg = batch_config(batch, settings, dtype='float32', end_ids=tokenizer.end_ids, trace=False)
    cfg = dataclasses.replace(cfg, **changes)
    seeds = [row_seed(settings.seed, request.index) for request in batch]
    # Bound to the device from the start, or the first step would be a program of its own.
    state = jax.device_put(batch_state(batch, seeds, plan.batch_size, cfg=cfg), jax.devices()[0])
    yield range(start, start + len(batch)), state, cfg


def at_times(state: DecodeState, schedule: Array) -> DecodeState:
  """The state whose rows refresh in the coming step if their schedules [B, S] say so, and for no other reason."""
  step = jnp.minimum(state.row_step, schedule.shape[1] - 1)
  now = jnp.take_along_axis(schedule, step[:, None], axis=1)[:, 0]
  clauses = {name: jnp.zeros_like(getattr(state.knobs, name)) for name in prompt.METHOD.spec.knobs}
  clauses['refresh_interval'] = now.astype(jnp.int32)
  return dataclasses.replace(state, knobs=dataclasses.replace(state.knobs, **clauses))


def check_files(json_path: str | None, figure: str | None) -> None:
  """Exits where the results could not be written, before anything is decoded."""
  try:
    for field, path in (('json', json_path), ('figure', figure)):
      if path is not None:
        check_writable(field, Path(path).parent)
    if figure is not None:
      check_figure(Path(figure))
  except ValueError as error:
    sys.exit(f'error: {error}')


def write_json(path: str | None, content: object) -> None:
  """Writes the figures, if somebody wants them."""
  if path is not None:
    Path(path).write_text(json.dumps(content, indent=1, allow_nan=False) + '\n')


def print_rows(title: str, rows: Sequence[dict[str, object]]) -> None:
  """Prints records of the same keys as a table."""
  cells = [[f'{v:.3f}' if isinstance(v, float) else '-' if v is None else str(v) for v in row.values()] for row in rows]
  header = list(rows[0])
  widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
  print(f'\n{title}')
  for line in (header, *cells):
    print('  '.join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)), flush=True)

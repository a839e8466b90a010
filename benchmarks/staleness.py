"""Which cheap measure predicts the harm that a kept prompt does?

    python benchmarks/staleness.py --n 304 --json staleness.json --figure staleness.png

Real decodings with refreshes at random steps, so that age and drift are not the same as progress. At every reuse step a
full forward of the same canvas runs beside the kept one. Harm is the total variation (TV) of the two distributions at
masked positions, their mean; the logit error e = (max - min) / 2, the largest over the rows that decide; and whether
the decision differs. Predictors are what could be known without the full forward; beside them stand the errors of the
kept keys and values, which could not. Rank correlations are Spearman's over all reuse steps; AUC is the chance that a
step that is decided otherwise has the larger value. Steps of one decoding are not independent: the intervals are a
bootstrap over problems.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
from pathlib import Path
from typing import Any

from absl import app
from absl import flags
import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
from scipy import stats
from trajectory import COLORS
from trajectory import at_times
from trajectory import batches
from trajectory import check_files
from trajectory import prepared
from trajectory import print_rows
from trajectory import write_json

from archer_jax.calibration.measure import fresh_outcome
from archer_jax.calibration.measure import observe as observed
from archer_jax.config import DecodeConfig
from archer_jax.decoders import base
from archer_jax.evaluate.compare import Plan
from archer_jax.evaluate.run import Evaluation
from archer_jax.loop.step import staged_step
from archer_jax.reuse.prompt.drift import DRIFTS
from archer_jax.types import DecodeState

_TASKS = flags.DEFINE_string('tasks', 'sudoku6,sort,pipeline', 'tasks between commas')
_N = flags.DEFINE_integer('n', 304, 'problems of each task', lower_bound=2)
_BATCH = flags.DEFINE_integer('batch_size', 16, 'problems decoded together', lower_bound=1)
_RATE = flags.DEFINE_float('rate', 0.15, 'share of the steps that refresh, at random', lower_bound=0, upper_bound=1)
_JSON = flags.DEFINE_string('json', None, 'write the figures to this file')
_FIGURE = flags.DEFINE_string('figure', None, 'draw to this file')
# Known without a full forward; `hidden` and `prediction` behind that of the step, so that a rule sees them one later.
PREDICTORS = ('token', 'embedding', 'hidden', 'prediction', 'age', 'margin', 'k_error', 'v_error')
_SHOWN = {
  'token': 'token drift',
  'embedding': 'embedding drift',
  'hidden': 'hidden drift',
  'prediction': 'moved predictions (TV)',
  'age': 'age of the prompt',
  'margin (small)': 'small margin',
  'k_error': 'error of kept keys\n(needs a full forward)',
  'v_error': 'error of kept values\n(needs a full forward)',
}
HARMS = ('tv', 'error')
_BOOTSTRAPS = 200


@functools.partial(jax.jit, static_argnames='cfg', donate_argnames='state')
def probe(params, state: DecodeState, schedule: Array, *, cfg: DecodeConfig) -> tuple[DecodeState, dict[str, Array]]:
  """A step, and what a full forward says of it: arrays with an entry a row, and the kept probabilities [B, R, V]."""
  state = at_times(state, schedule)
  after, record, stages = staged_step(params, state, cfg=cfg)
  fresh, index = fresh_outcome(params, state, stages, cfg=cfg), stages.views.columns
  mine, other = (jax.nn.softmax(outcome.logits[:, : index.shape[1]], axis=-1) for outcome in (stages.outcome, fresh))
  masked = base.from_canvas(base.mask_positions(state, cfg), index, False)
  mean = lambda values: jnp.sum(jnp.where(masked, values, 0), axis=1) / jnp.maximum(jnp.sum(masked, axis=1), 1)
  valid = state.prompt_valid[:, :, None, None]
  norm = lambda x: jnp.sqrt(jnp.sum(jnp.where(valid, x, 0) ** 2, axis=(1, 2, 3)))
  relative = lambda old, new: jnp.stack([norm(a - b) / norm(b) for a, b in zip(old, new, strict=True)], axis=1)
  (kept,), (full,) = stages.outcome.kept.kv, fresh.kept.kv
  k_layers, v_layers = relative(kept.k, full.k), relative(kept.v, full.v)
  # With the hidden states of the canvas that was read, and of its anchor.
  seen = dataclasses.replace(state, reuse=stages.outcome.reuse, kept=stages.outcome.kept)
  one = observed(state, record, stages, fresh.logits, cfg=cfg)
  return after, {
    'used': one.reused,
    'refreshed': stages.outcome.reason != 0,
    'done': state.done,
    'masked': masked,
    'probabilities': mine,
    'tv': mean(jnp.abs(mine - other).sum(axis=-1) / 2),
    'error': one.error,
    'differs': one.differs,
    'age': one.age,
    'margin': one.margin,
    **{name: drift(params, seen, cfg) for name, drift in DRIFTS.items()},
    'k_layers': k_layers,
    'v_layers': v_layers,
    'k_error': jnp.mean(k_layers, axis=1),
    'v_error': jnp.mean(v_layers, axis=1),
  }


def observe(evaluation: Evaluation, plan: Plan) -> dict[str, np.ndarray]:
  """Every reuse step of a task, arrays [n, ...], with the number of its problem."""
  kept = []
  for problems, state, cfg in batches(plan, 'once', evaluation.tokenizer, drift='hidden'):
    rng = np.random.default_rng(problems.start)
    schedule = jnp.asarray(rng.random((plan.batch_size, cfg.canvas_length)) < _RATE.value)
    anchors = None
    while not np.all(jax.device_get(state.done)):
      state, seen = probe(evaluation.params, state, schedule, cfg=cfg)
      seen = jax.device_get(seen)
      probabilities, masked = seen.pop('probabilities'), seen.pop('masked')
      anchors = probabilities.copy() if anchors is None else anchors
      anchors[seen['refreshed']] = probabilities[seen['refreshed']]
      # How far the predictions for what is still masked went since the anchor.
      moved = np.abs(probabilities - anchors).sum(axis=-1) / 2
      seen['prediction'] = np.where(masked, moved, 0).sum(axis=1) / np.maximum(masked.sum(axis=1), 1)
      seen['problem'] = problems.start + np.arange(plan.batch_size)
      kept.append({name: values[seen['used']] for name, values in seen.items()})
  return {name: np.concatenate([part[name] for part in kept]) for name in kept[0]}


def correlation(x: np.ndarray, y: np.ndarray) -> float | None:
  """Spearman's, None where either is constant."""
  return None if min(np.ptp(x), np.ptp(y), len(x) - 1) <= 0 else float(stats.spearmanr(x, y).statistic)


def area(x: np.ndarray, differs: np.ndarray) -> float | None:
  """Chance that a step that is decided otherwise has the larger value; None without both kinds."""
  n, m = int(differs.sum()), int((~differs).sum())
  return float(stats.mannwhitneyu(x[differs], x[~differs]).statistic / (n * m)) if n and m else None


def interval(steps: Mapping[str, np.ndarray], predictor: str, harm: str) -> list[float] | None:
  """95 % interval of a correlation by a bootstrap over problems."""
  order = np.argsort(steps['problem'], kind='stable')
  groups = np.split(order, np.flatnonzero(np.diff(steps['problem'][order])) + 1)
  rng, values = np.random.default_rng(0), []
  for _ in range(_BOOTSTRAPS):
    drawn = np.concatenate([groups[i] for i in rng.integers(len(groups), size=len(groups))])
    values.append(correlation(steps[predictor][drawn], steps[harm][drawn]))
  known = [value for value in values if value is not None]
  return np.quantile(known, (0.025, 0.975)).tolist() if known else None


def summary(task: str, steps: Mapping[str, np.ndarray]) -> dict[str, Any]:
  """What is told of a task."""
  ages = [(1, 1), (2, 2), (3, 4), (5, 8), (9, 10**6)]
  predictors = []
  for name in PREDICTORS:
    # A small margin is what would warn.
    steps_of = {**steps, name: -steps[name] if name == 'margin' else steps[name]}
    row = {'predictor': 'margin (small)' if name == 'margin' else name}
    row |= {f'rho_{harm}': correlation(steps_of[name], steps[harm]) for harm in HARMS}
    row |= {f'rho_{harm}_interval': interval(steps_of, name, harm) for harm in HARMS}
    predictors.append({**row, 'auc_differs': area(steps_of[name], steps['differs'])})
  by_age = []
  for low, high in ages:
    mine = (steps['age'] >= low) & (steps['age'] <= high)
    if mine.any():
      row = {
        'age': f'{low}' if low == high else f'{low} to {high}' if high < 100 else f'{low} and more',
        'steps': int(mine.sum()),
      }
      row |= {f'mean_{name}': float(steps[name][mine].mean()) for name in ('tv', 'error', 'token', 'hidden')}
      by_age.append({**row, 'preserved': float(1 - steps['differs'][mine].mean())})
  return {
    'task': task,
    'n': len(np.unique(steps['problem'])),
    'steps': len(steps['tv']),
    'preserved': float(1 - steps['differs'].mean()),
    'predictors': predictors,
    'by_age': by_age,
    'k_layers': steps['k_layers'].mean(axis=0).tolist(),
    'v_layers': steps['v_layers'].mean(axis=0).tolist(),
  }


def draw(path: Path, told: Sequence[Mapping[str, Any]]) -> None:
  """Rank correlation of every predictor with the total variation, per task."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(7.5, 4.6), layout='constrained')
  panel = figure.subplots()
  names = [row['predictor'] for row in told[0]['predictors']]
  for number, task in enumerate(told):
    values = [row['rho_tv'] if row['rho_tv'] is not None else np.nan for row in task['predictors']]
    spans = [row['rho_tv_interval'] or [value, value] for row, value in zip(task['predictors'], values, strict=True)]
    bars = np.maximum([[v - low, high - v] for v, (low, high) in zip(values, spans, strict=True)], 0).T
    y = np.arange(len(names)) + 0.2 * (number - (len(told) - 1) / 2)
    label = f'{task["task"]}: {task["steps"]} steps of {task["n"]} problems'
    panel.errorbar(
      values, y, xerr=bars, fmt='osD^v'[number % 5], color=COLORS[number % len(COLORS)], capsize=3, label=label
    )
  panel.axvline(0, color='gray', linewidth=1)
  panel.set_yticks(range(len(names)), [_SHOWN[name] for name in names])
  panel.set_ylim(len(names) - 0.5, -0.5)
  panel.set_xlabel("Spearman's rank correlation with the total variation\nat masked positions, 95 % interval")
  panel.set_title('Which measure tells how far kept prompts change the predictions?', fontsize=11)
  panel.grid(alpha=0.25)
  figure.legend(loc='outside lower center', ncols=1, frameon=False)
  figure.savefig(path, dpi=150)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'there are no positional arguments, got {argv[1]!r}')
  check_files(_JSON.value, _FIGURE.value)
  evaluation, told = prepared(_TASKS.value, _N.value, 'once', _BATCH.value), []
  for plan in evaluation.plans:
    one = summary(plan.source.name, observe(evaluation, plan))
    told.append(one)
    short = [{k: v for k, v in row.items() if not k.endswith('interval')} for row in one['predictors']]
    print_rows(
      f'{one["task"]}: {one["steps"]} reuse steps of {one["n"]} problems; {one["preserved"]:.1%} decided the same',
      short,
    )
    print_rows('by age of the kept prompt, in steps', one['by_age'])
    layers = zip(one['k_layers'], one['v_layers'], strict=True)
    rows = [{'layer': layer, 'k': k, 'v': v} for layer, (k, v) in enumerate(layers)]
    print_rows('relative error of kept keys and values', rows)
    write_json(_JSON.value, {'tasks': told, 'rate': _RATE.value, 'run': dict(evaluation.facts)})
    if _FIGURE.value is not None:
      draw(Path(_FIGURE.value), told)


if __name__ == '__main__':
  app.run(main)

"""What kept prompts change, measured: along real decodings, a fresh and a kept forward of the same step.

Axes: B batch, R decision rows, V vocab.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from archer_jax.config import DecodeConfig
from archer_jax.loop.step import staged_step
from archer_jax.reuse.prompt.drift import changed_positions
from archer_jax.types import DecodeState
from archer_jax.types import Outcome
from archer_jax.types import Stages
from archer_jax.types import StepRecord
from archer_jax.types import Update

# With which a fitted kappa holds for its share of the steps.
CONFIDENCE = 0.95


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Observation:
  """One step of every row; what is said of the error is of use where `reused` holds."""

  reused: Array  # bool [B], live rows whose step read kept keys and values of another canvas
  at_anchor: Array  # bool [B], live rows whose step read kept ones of this very canvas
  seed: Array  # uint32 [B], names the row
  distance: Array  # int32 [B], positions of the canvas that was read that differ from its anchor
  drift: Array  # float32 [B], of the canvas that was read
  age: Array  # int32 [B]
  error: Array  # float32 [B], e: half the range of the logits' differences, the largest over the rows that decide
  margin: Array  # float32 [B], of the kept forward's decision
  differs: Array  # bool [B], whether the fresh forward decides otherwise


def observed_step(params, state: DecodeState, *, cfg: DecodeConfig) -> tuple[DecodeState, Observation]:
  """A step as `decode_step` takes it, and what a full forward in its place would have given."""
  after, record, stages = staged_step(params, state, cfg=cfg)
  return after, observe(state, record, stages, fresh_logits(params, state, stages, cfg=cfg), cfg=cfg)


def observe(state: DecodeState, record: StepRecord, stages: Stages, fresh: Array, *, cfg: DecodeConfig) -> Observation:
  """What is told of a step, from the state before it, what it gave, and the logits of a full forward."""
  decoder, update = cfg.decoder_method, stages.update
  full = decoder.update(state, stages.views, fresh, cfg)
  need = stages.plan.reason != 0
  away = changed_positions(dataclasses.replace(state, reuse=stages.plan.reuse)) > 0
  difference = stages.outcome.logits - fresh
  spread = (jnp.max(difference, axis=-1) - jnp.min(difference, axis=-1)) / 2
  return Observation(
    reused=~state.done & ~need & away,
    at_anchor=~state.done & ~need & ~away,
    seed=state.seed,
    distance=record.seen['distance'],
    drift=stages.outcome.reuse.drift,
    age=record.seen['age'],
    error=jnp.max(jnp.where(decoder.reads(state, stages.views, cfg), spread, 0), axis=1),
    margin=update.margin,
    differs=decides_otherwise(update, full),
  )


def fresh_logits(params, state: DecodeState, stages: Stages, *, cfg: DecodeConfig) -> Array:
  """Logits [B, R + shadow rows, V] of a full forward from the state before a step; it touches nothing."""
  return fresh_outcome(params, state, stages, cfg=cfg).logits


def fresh_outcome(params, state: DecodeState, stages: Stages, *, cfg: DecodeConfig) -> Outcome:
  """All that a full forward from the state before a step gives."""
  refresh = dataclasses.replace(stages.plan, reason=(~state.done).astype(jnp.int32))
  return cfg.reuse_method.forward(params, state, refresh, stages.views, cfg)


def decides_otherwise(one: Update, other: Update) -> Array:
  """Bool [B]: whether two decisions do something else.

  Confidences that a decoder remembers are read off the logits and always differ with them; they are no decision.
  """
  acts = lambda u: (u.canvas, u.accepted, u.remasked, u.block_done, u.decoder)
  differs = [
    _any(mine != others)
    for mine, others in zip(jax.tree.leaves(acts(one)), jax.tree.leaves(acts(other)), strict=True)
    if not jnp.issubdtype(mine.dtype, jnp.floating)
  ]
  return functools.reduce(jnp.logical_or, differs)


def _any(flags: Array) -> Array:
  return flags if flags.ndim == 1 else jnp.any(flags, axis=1)


_step = jax.jit(observed_step, static_argnames='cfg', donate_argnames='state')


class Recorder:
  """Decodes in the place of `archer_jax.decode` and remembers every step."""

  def __init__(self):
    self._rows: list[dict[str, np.ndarray]] = []

  def decode(self, params, state: DecodeState, *, cfg: DecodeConfig) -> DecodeState:
    """Steps until every row is done; the state is donated."""
    # What a step returns is bound to the device of the parameters; a first state that is not would be another program.
    state = jax.device_put(state, *jax.tree.leaves(params)[0].devices())
    while not np.all(jax.device_get(state.done)):
      state, observation = _step(params, state, cfg=cfg)
      host = jax.device_get(observation)
      took = host.reused | host.at_anchor
      self._rows.append({f.name: getattr(host, f.name)[took] for f in dataclasses.fields(host)})
    return state

  def steps(self) -> dict[str, np.ndarray]:
    """Every reuse step, [n] arrays by the names of `Observation`."""
    names = [field.name for field in dataclasses.fields(Observation)]
    return {name: np.concatenate([rows[name] for rows in self._rows] or [np.zeros(0)]) for name in names}


def needed_samples(quantile: float) -> int:
  """The fewest samples from which a bound for that share of the steps follows: q^n <= 1 - confidence."""
  return math.ceil(math.log(1 - CONFIDENCE) / math.log(quantile))


def _allowed_beyond(n: int, quantile: float) -> int:
  """The largest r with P(Binomial(n, 1 - quantile) <= r) <= 1 - confidence: samples that may lie beyond the bound."""
  odds = math.log1p(-quantile) - math.log(quantile)
  term = total = n * math.log(quantile)
  r = 0
  # In logarithms, since the first terms underflow.
  while r < n:
    term += math.log(n - r) - math.log(r + 1) + odds
    total = float(np.logaddexp(total, term))
    if total > math.log(1 - CONFIDENCE):
      break
    r += 1
  return r


def fit_kappa(error: np.ndarray, drift: np.ndarray, quantile: float) -> float:
  """The kappa with e <= kappa * drift in a share `quantile` of the steps.

  It is an order statistic of e / drift, chosen so that a further step keeps the bound with at least that probability,
  at 95 % confidence, whatever the distribution; for steps that are independent (Wilks 1941).

  Args:
    error: e of each step, [n].
    drift: of each step, [n].
    quantile: in (0, 1).

  Raises:
    ValueError: a quantile out of range, too few steps for it, or no finite kappa.
  """
  if not 0 < quantile < 1:
    raise ValueError(f'quantile must be between 0 and 1, both excluded, got {quantile}')
  n = len(error)
  if n < needed_samples(quantile):
    raise ValueError(
      f'quantile {quantile} needs at least {needed_samples(quantile)} reuse steps away from their anchor, got {n}: '
      'give more prompts or a smaller quantile'
    )
  if not np.isfinite(error).all():
    raise ValueError(f'{np.sum(~np.isfinite(error))} of {n} steps have logits that are not finite')
  with np.errstate(divide='ignore', invalid='ignore'):
    ratio = np.where(error > 0, error.astype(np.float64) / drift, 0.0)
  kappa = float(np.sort(ratio)[n - 1 - _allowed_beyond(n, quantile)])
  if not math.isfinite(kappa):
    share = np.mean((drift == 0) & (error > 0))
    raise ValueError(f'no kappa bounds the error at quantile {quantile}: at {share:.1%} of the steps the drift is 0')
  if kappa == 0:
    raise ValueError(f'quantile {quantile} needs no kappa: as many steps have no error at all')
  return kappa


def violations(steps: Mapping[str, np.ndarray], kappa: float) -> dict[str, int]:
  """What a kappa gets wrong on steps.

  Returns:
    `beyond`, steps with e > kappa * drift; `certified`, those with margin > kappa * drift; and `wrong`, those of the
    certified ones at which a fresh forward decides otherwise.
  """
  bound = kappa * steps['drift'].astype(np.float64)
  certified = steps['margin'] > bound
  return {
    'beyond': int(np.sum(steps['error'] > bound)),
    'certified': int(np.sum(certified)),
    'wrong': int(np.sum(certified & steps['differs'])),
  }


def calibrate(steps: Mapping[str, np.ndarray], quantiles: Sequence[float]) -> tuple[dict[str, Any], list[str]]:
  """Fits a kappa for each quantile, and says what one from half of the rows does on the other half.

  Args:
    steps: from `Recorder.steps`.
    quantiles: in (0, 1), ascending or not.

  Returns:
    What was found, and why a quantile of those asked for is not among it, a sentence each.
  """
  at_anchor = int(np.sum(steps['at_anchor']))
  steps = {name: values[steps['reused'].astype(bool)] for name, values in steps.items()}
  kappas, reasons = {}, []
  for quantile in quantiles:
    try:
      kappas[str(quantile)] = fit_kappa(steps['error'], steps['drift'], quantile)
    except ValueError as error:
      reasons.append(str(error))
  if not kappas:
    return {'kappa': kappas}, reasons
  half = np.isin(steps['seed'], np.unique(steps['seed'])[::2])
  held_out = {}
  for quantile in map(float, kappas):
    parts = []
    for side in (half, ~half):
      inside, outside = ({name: values[flags] for name, values in steps.items()} for flags in (side, ~side))
      # Fewer say nothing of the quantile, on either side.
      if min(len(inside['error']), len(outside['error'])) >= needed_samples(quantile):
        kappa = fit_kappa(inside['error'], inside['drift'], quantile)
        parts.append({'steps': len(outside['error']), **violations(outside, kappa)})
    # Absent where half of the steps are too few.
    if len(parts) == 2:
      held_out[str(quantile)] = {name: parts[0][name] + parts[1][name] for name in parts[0]}
  found = {
    'kappa': kappas,
    # A certificate is for what was seen: up to this radius, and nearer than this distance.
    'drift_radius': float(np.max(steps['drift'])),
    'refresh_distance': int(np.max(steps['distance'])) + 1,
    'confidence': CONFIDENCE,
    'steps': len(steps['error']),
    'steps_at_anchor': at_anchor,
    'steps_decided_otherwise': int(np.sum(steps['differs'])),
    'held_out': held_out,
    'largest': {name: float(np.max(steps[name])) for name in ('error', 'age')},
  }
  return found, reasons

"""The training loop: resumable to the bit, with a log, saved states and a progress bar."""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import functools
import json
import math
from pathlib import Path
import time

import jax
from jax import Array
import jax.numpy as jnp
import optax
from orbax.checkpoint import v1 as ocp
from tqdm import tqdm

from archer_jax.config import ModelConfig
from archer_jax.model import init_params
from archer_jax.training.batches import Batch
from archer_jax.training.curriculum import Stage
from archer_jax.training.curriculum import stage_at
from archer_jax.training.loss import SHADOWS
from archer_jax.training.loss import masked_diffusion_loss
from archer_jax.training.optimizer import OptimizerConfig
from archer_jax.training.optimizer import apply_gradients
from archer_jax.training.optimizer import make_optimizer

LOG_NAME = 'log.jsonl'
STATE_NAME = 'state'


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
  """What a training does, apart from its model.

  Attributes:
    stages: what is trained on, one after the other.
    seed: of the initial parameters and of the masks.
    log_every, eval_every, save_every: steps between two log records, exact matches and saved states; exact match
      and state also come after the last step, and 0 means only then.
    optimizer: see `OptimizerConfig`.
    shadow, shadow_weight: whether verification rows are trained too; see `masked_diffusion_loss`.
  """

  stages: tuple[Stage, ...]
  seed: int
  optimizer: OptimizerConfig
  log_every: int = 10
  eval_every: int = 100
  save_every: int = 100
  shadow: str = 'none'
  shadow_weight: float = 0.5

  def __post_init__(self):
    if not self.stages:
      raise ValueError('stages must have one at least')
    if self.shadow not in SHADOWS:
      raise ValueError(f'shadow must be one of {", ".join(SHADOWS)}, got {self.shadow!r}')
    if self.log_every < 1:
      raise ValueError(f'log_every must be positive, got {self.log_every}')
    for field in ('seed', 'eval_every', 'save_every'):
      if getattr(self, field) < 0:
        raise ValueError(f'{field} must not be negative, got {getattr(self, field)}')
    if self.optimizer.warmup_steps > self.steps:
      raise ValueError(f"warmup_steps must be at most the stages' {self.steps}, got {self.optimizer.warmup_steps}")

  @property
  def steps(self) -> int:
    """Optimizer steps in all."""
    return sum(stage.steps for stage in self.stages)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
  """Everything that a step changes, and all that a saved state holds."""

  step: Array  # int32 scalar, steps done
  params: dict
  opt_state: optax.OptState


@functools.partial(jax.jit, static_argnames=('config', 'model'))
def init_train_state(*, config: TrainConfig, model: ModelConfig) -> TrainState:
  """The state before the first step, float32."""
  params = init_params(model, jax.random.key(config.seed))
  opt_state = make_optimizer(config.optimizer, config.steps).init(params)
  return TrainState(step=jnp.int32(0), params=params, opt_state=opt_state)


@functools.partial(jax.jit, static_argnames=('weights', 'config', 'model'), donate_argnames='state')
def train_step(
  state: TrainState,
  batches: tuple[Batch, ...],
  *,
  weights: tuple[float, ...],
  config: TrainConfig,
  model: ModelConfig,
) -> tuple[TrainState, tuple[Array, ...]]:
  """One optimizer step on a batch of each task.

  Args:
    state: the state before; its buffers are reused.
    batches: one for each part of the stage; see `Batch`.
    weights: of their losses, relative to each other.
    config: the training's config.
    model: the model's config.

  Returns:
    The state after, and the batches' losses before the step (float32 scalars).
  """
  # The masks follow from seed and step alone, so a resumed run draws what an uninterrupted one would.
  key = jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed), 1), state.step)

  def mixed_loss(params):
    loss = functools.partial(
      masked_diffusion_loss, params, config=model, shadow=config.shadow, shadow_weight=config.shadow_weight
    )
    losses = tuple(loss(batch, jax.random.fold_in(key, i)) for i, batch in enumerate(batches))
    return sum(weight * loss for weight, loss in zip(weights, losses, strict=True)) / sum(weights), losses

  (_, losses), grads = jax.value_and_grad(mixed_loss, has_aux=True)(state.params)
  params, opt_state = apply_gradients(state.params, grads, state.opt_state, config=config.optimizer, steps=config.steps)
  return TrainState(step=state.step + 1, params=params, opt_state=opt_state), losses


def _abstract_state(config: TrainConfig, model: ModelConfig) -> TrainState:
  """What a saved state is restored as: shapes and dtypes, on the first device."""
  sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  shapes = jax.eval_shape(functools.partial(init_train_state, config=config, model=model))
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)


# Of the training steps alone, without exact match and saving. On a shared machine the second tells more.
_CLOCKS = {'seconds': time.perf_counter, 'cpu_seconds': time.process_time}


def _now() -> dict[str, float]:
  return {name: clock() for name, clock in _CLOCKS.items()}


class _Log:
  """A JSONL file; a resumed run drops the records past its state and goes on."""

  def __init__(self, path: Path, step: int):
    lines = path.read_text().splitlines() if step else []
    kept = [line for line in lines if json.loads(line)['step'] <= step]
    path.write_text(''.join(f'{line}\n' for line in kept))
    self._path = path
    # Time and tokens that earlier runs spent on the steps that are kept.
    records = [json.loads(line) for line in kept]
    self.spent = {name: max((r.get(name, 0) for r in records), default=0) for name in (*_CLOCKS, 'tokens')}

  def write(self, **record) -> None:
    with self._path.open('a') as file:
      file.write(json.dumps(record) + '\n')


def _check_same(log: Path, configs: dict, start: str) -> None:
  with log.open() as file:
    first = json.loads(file.readline() or '{}')
  if first.get('start') != start:
    raise ValueError(f'{log.parent} holds a training from another start: {first.get("start")!r}, not {start!r}')
  for name, config in configs.items():
    for field, value in config.items():
      if (old := first.get(name, {}).get(field)) != value:
        # Stages are too long to be told.
        told = 'other stages' if field == 'stages' else f'another {field}: {old!r}, not {value!r}'
        raise ValueError(f'{log.parent} holds a training with {told}; give another folder or the same config')


def train(
  config: TrainConfig,
  model: ModelConfig,
  batches_at: Callable[[int], tuple[Batch, ...]],
  directory: str | Path,
  *,
  params: dict | None = None,
  start: str = '',
  exact_match: Callable[[dict, int], Mapping[str, float]] | None = None,
  header: dict | None = None,
) -> dict:
  """Trains a model, or goes on with a training that was stopped.

  Args:
    config: the training's config.
    model: the model's config.
    batches_at: the batches of a step, from 0, one for each part of its stage; the same whenever it is asked.
    directory: takes `log.jsonl` and the saved states. If it holds states, training goes on from the latest one.
    params: what a new training begins with; by default random parameters.
    start: where `params` come from; a training that began with others is not gone on with.
    exact_match: of parameters and a step, the share of held-out problems solved by task; logged and shown.
    header: what the log's first record says beside the configs.

  Returns:
    The trained parameters, float32.

  Raises:
    ValueError: the directory holds a training with other configs.
    FloatingPointError: the loss is not finite; the latest saved state is from before.
  """
  directory = Path(directory).absolute()
  directory.mkdir(parents=True, exist_ok=True)
  # Through JSON, as the log holds them.
  configs = json.loads(json.dumps({'model': dataclasses.asdict(model), 'train': dataclasses.asdict(config)}))
  # Orbax writes a state under a temporary name and renames it, so a killed run leaves whole states only.
  keep = ocp.training.preservation_policies.LatestN(2)
  with ocp.training.Checkpointer(directory / STATE_NAME, preservation_policy=keep) as saved:
    if saved.latest is None:
      state = init_train_state(config=config, model=model)
      if params is not None:
        # A copy, since the steps donate it.
        state = dataclasses.replace(state, params=jax.tree.map(lambda x: jnp.array(x, jnp.float32), params))
    else:
      _check_same(directory / LOG_NAME, configs, start)
      state = saved.load(saved.latest, _abstract_state(config, model))
    done = int(state.step)
    log = _Log(directory / LOG_NAME, done)
    log.write(step=done, **({'resumed': True} if done else configs | {'start': start} | (header or {})))
    return _run(state, batches_at, saved, log, exact_match, config=config, model=model)


def _run(state, batches_at, saved, log, exact_match, *, config: TrainConfig, model: ModelConfig) -> dict:
  """The loop over the steps that are left."""
  due = lambda every, step: step == config.steps or (every and step % every == 0)
  losses, shown, tokens, start = {}, {}, 0, _now()
  with tqdm(total=config.steps, initial=int(state.step), unit='step', desc='train', dynamic_ncols=True) as bar:
    for step in range(int(state.step) + 1, config.steps + 1):
      stage = stage_at(config.stages, step - 1)
      weights = tuple(part.weight for part in stage.parts)
      state, step_losses = train_step(state, batches_at(step - 1), weights=weights, config=config, model=model)
      for part, loss in zip(stage.parts, step_losses, strict=True):
        losses.setdefault(part.task, []).append(loss)
      tokens += stage.tokens
      bar.update()
      if not any(due(every, step) for every in (config.log_every, config.eval_every, config.save_every)):
        continue
      # Only here the host waits for the device; between, batches are made while steps run.
      means = {task: float(jnp.mean(jnp.stack(values))) for task, values in losses.items()}
      if not all(map(math.isfinite, means.values())):
        raise FloatingPointError(f'the loss is {means} in the {config.log_every} steps before {step}')
      elapsed = {name: now - start[name] for name, now in _now().items()}
      log.spent = {name: log.spent[name] + elapsed.get(name, tokens) for name in log.spent}
      record = {'step': step, 'loss': means, 'tokens_per_s': tokens / elapsed['seconds'], **log.spent}
      shown |= {task: f'{mean:.3f}' for task, mean in means.items()}
      if exact_match and due(config.eval_every, step):
        record['exact_match'] = dict(exact_match(state.params, step))
        shown |= {f'{task} solved': f'{share:.2f}' for task, share in record['exact_match'].items()}
      log.write(**_rounded(record))
      bar.set_postfix({'tok/s': f'{record["tokens_per_s"]:.0f}', **shown})
      if due(config.save_every, step):
        saved.save(step, state)
      losses, tokens, start = {}, 0, _now()
  return state.params


def _rounded(value):
  if isinstance(value, Mapping):
    return {name: _rounded(item) for name, item in value.items()}
  return round(value, 4)

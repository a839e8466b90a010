"""The training loop: resumable to the bit, with a log, saved states and a progress bar."""

from collections.abc import Callable
from collections.abc import Iterator
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
from archer_jax.training.batches import Pair
from archer_jax.training.batches import batches
from archer_jax.training.loss import masked_diffusion_loss
from archer_jax.training.optimizer import OptimizerConfig
from archer_jax.training.optimizer import apply_gradients
from archer_jax.training.optimizer import make_optimizer

LOG_NAME = 'log.jsonl'
STATE_NAME = 'state'


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
  """What a training does, apart from its model and data.

  Attributes:
    steps: optimizer steps in all.
    batch_size: examples a step.
    prompt_length: P, columns that prompts are left-padded to.
    answer_length: G, columns of the answer; shorter answers go on with eos.
    seed: of the initial parameters and of the masks.
    log_every, eval_every, save_every: steps between two log records, exact matches and saved states; exact match
      and state also come after the last step, and 0 means only then.
    optimizer: see `OptimizerConfig`.
  """

  steps: int
  batch_size: int
  prompt_length: int
  answer_length: int
  seed: int
  optimizer: OptimizerConfig
  log_every: int = 10
  eval_every: int = 100
  save_every: int = 100

  def __post_init__(self):
    for field in ('steps', 'batch_size', 'answer_length', 'log_every'):
      if getattr(self, field) < 1:
        raise ValueError(f'{field} must be positive, got {getattr(self, field)}')
    for field in ('prompt_length', 'seed', 'eval_every', 'save_every'):
      if getattr(self, field) < 0:
        raise ValueError(f'{field} must not be negative, got {getattr(self, field)}')
    if self.optimizer.warmup_steps > self.steps:
      raise ValueError(f'warmup_steps must be at most steps={self.steps}, got {self.optimizer.warmup_steps}')


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


@functools.partial(jax.jit, static_argnames=('config', 'model'), donate_argnames='state')
def train_step(state: TrainState, batch: Batch, *, config: TrainConfig, model: ModelConfig) -> tuple[TrainState, Array]:
  """One optimizer step.

  Args:
    state: the state before; its buffers are reused.
    batch: see `Batch`.
    config: the training's config.
    model: the model's config.

  Returns:
    The state after, and the batch's loss before the step (float32 scalar).
  """
  # The masks follow from seed and step alone, so a resumed run draws what an uninterrupted one would.
  key = jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed), 1), state.step)
  loss, grads = jax.value_and_grad(masked_diffusion_loss)(state.params, batch, key, config=model)
  params, opt_state = apply_gradients(state.params, grads, state.opt_state, config=config.optimizer, steps=config.steps)
  return TrainState(step=state.step + 1, params=params, opt_state=opt_state), loss


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
    # Time that earlier runs spent on the steps that are kept.
    records = [json.loads(line) for line in kept]
    self.spent = {name: max((r.get(name, 0.0) for r in records), default=0.0) for name in _CLOCKS}

  def write(self, **record) -> None:
    with self._path.open('a') as file:
      file.write(json.dumps(record) + '\n')


def _check_same(log: Path, configs: dict) -> None:
  with log.open() as file:
    first = json.loads(file.readline() or '{}')
  for name, config in configs.items():
    for field, value in config.items():
      if (old := first.get(name, {}).get(field)) != value:
        raise ValueError(f'{log.parent} holds a training with {field}={old!r}, so {field} must not be {value!r}')


def train(
  config: TrainConfig,
  model: ModelConfig,
  pairs_from: Callable[[int], Iterator[Pair]],
  directory: str | Path,
  *,
  exact_match: Callable[[dict], float] | None = None,
  header: dict | None = None,
) -> dict:
  """Trains a model, or goes on with a training that was stopped.

  Args:
    config: the training's config.
    model: the model's config.
    pairs_from: gives the stream of training pairs from an index on; the same pairs whenever it is asked.
    directory: takes `log.jsonl` and the saved states. If it holds states, training goes on from the latest one.
    exact_match: share of held-out problems that given parameters solve; logged and shown.
    header: what the log's first record says beside the configs.

  Returns:
    The trained parameters, float32.

  Raises:
    ValueError: the directory holds a training with other configs, or the pairs end too early.
    FloatingPointError: the loss is not finite; the latest saved state is from before.
  """
  directory = Path(directory).absolute()
  directory.mkdir(parents=True, exist_ok=True)
  configs = {'model': dataclasses.asdict(model), 'train': dataclasses.asdict(config)}
  # Orbax writes a state under a temporary name and renames it, so a killed run leaves whole states only.
  keep = ocp.training.preservation_policies.LatestN(2)
  with ocp.training.Checkpointer(directory / STATE_NAME, preservation_policy=keep) as saved:
    if saved.latest is None:
      state = init_train_state(config=config, model=model)
    else:
      _check_same(directory / LOG_NAME, configs)
      state = saved.load(saved.latest, _abstract_state(config, model))
    done = int(state.step)
    log = _Log(directory / LOG_NAME, done)
    log.write(step=done, **({'resumed': True} if done else configs | (header or {})))
    stream = batches(
      pairs_from(done * config.batch_size), config.batch_size, config.prompt_length, config.answer_length, model
    )
    return _run(state, stream, saved, log, exact_match, config=config, model=model)


def _run(state, stream, saved, log, exact_match, *, config: TrainConfig, model: ModelConfig) -> dict:
  """The loop over the steps that are left."""
  due = lambda every, step: step == config.steps or (every and step % every == 0)
  losses, solved, start = [], None, _now()
  with tqdm(total=config.steps, initial=int(state.step), unit='step', desc='train') as bar:
    for step in range(int(state.step) + 1, config.steps + 1):
      if (batch := next(stream, None)) is None:
        raise ValueError(f'pairs must last for steps={config.steps} batches of {config.batch_size}, ended at {step}')
      state, loss = train_step(state, batch, config=config, model=model)
      losses.append(loss)
      if not any(due(every, step) for every in (config.log_every, config.eval_every, config.save_every)):
        continue
      # Only here the host waits for the device; between, batches are made while steps run.
      mean_loss = float(jnp.mean(jnp.stack(losses)))
      if not math.isfinite(mean_loss):
        raise FloatingPointError(f'the loss is {mean_loss} between steps {step - len(losses)} and {step}')
      elapsed = {name: now - start[name] for name, now in _now().items()}
      log.spent = {name: log.spent[name] + elapsed[name] for name in _CLOCKS}
      tokens = len(losses) * config.batch_size * (config.prompt_length + config.answer_length)
      record = {'step': step, 'loss': mean_loss, 'tokens_per_s': tokens / elapsed['seconds'], **log.spent}
      bar.update(len(losses))
      if exact_match and due(config.eval_every, step):
        record['exact_match'] = solved = exact_match(state.params)
      log.write(**{name: round(value, 4) for name, value in record.items()})
      shown = {'loss': f'{mean_loss:.3f}', 'tok/s': f'{record["tokens_per_s"]:.0f}'}
      bar.set_postfix(shown | ({'exact': f'{solved:.3f}'} if solved is not None else {}))
      if due(config.save_every, step):
        saved.save(step, state)
      losses, start = [], _now()
  return state.params

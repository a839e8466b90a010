"""The optimizer: Muon for the matrices inside the layers and Adam for the rest, or AdamW for all."""

from collections.abc import Callable
import dataclasses

import jax
from jax import Array
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers
from optax.contrib import muon

OPTIMIZERS = ('muon', 'adamw')
DECAYS = ('linear', 'cosine')

# Kernels with split heads are matrices with the heads' axes joined: q, k and v lead to (heads, head_dim), o comes
# from it. Embedding, head, biases and norm scales are not here, so Adam trains them.
_MUON_AXES = {
  'q_proj': MuonDimensionNumbers(0, (1, 2)),
  'k_proj': MuonDimensionNumbers(0, (1, 2)),
  'v_proj': MuonDimensionNumbers(0, (1, 2)),
  'o_proj': MuonDimensionNumbers((0, 1), 2),
  'gate_proj': MuonDimensionNumbers(0, 1),
  'up_proj': MuonDimensionNumbers(0, 1),
  'down_proj': MuonDimensionNumbers(0, 1),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
  """How parameters follow their gradients.

  Attributes:
    name: `muon` or `adamw`.
    adam_rate: largest learning rate of Adam.
    muon_rate: largest learning rate of Muon; not read by `adamw`.
    weight_decay: decoupled, times the learning rate, of Muon's matrices or of all that `adamw` trains.
    max_grad_norm: larger gradients are scaled down to this global norm; 0 is off.
    warmup_steps: steps of the linear warm-up.
    decay_share: share of all steps, at the end, over which the rates go to zero.
    decay: shape of that end, `linear` or `cosine`.
  """

  name: str = 'muon'
  adam_rate: float = 3e-3
  muon_rate: float = 0.02
  weight_decay: float = 0.0
  max_grad_norm: float = 0.0
  warmup_steps: int = 0
  decay_share: float = 0.4
  decay: str = 'linear'

  def __post_init__(self):
    for field, choices in (('name', OPTIMIZERS), ('decay', DECAYS)):
      if getattr(self, field) not in choices:
        raise ValueError(f'optimizer {field} must be one of {", ".join(choices)}, got {getattr(self, field)!r}')
    for field in ('adam_rate', 'muon_rate', 'weight_decay', 'max_grad_norm', 'warmup_steps'):
      if not getattr(self, field) >= 0:
        raise ValueError(f'optimizer {field} must not be negative, got {getattr(self, field)}')
    if not 0 <= self.decay_share <= 1:
      raise ValueError(f'optimizer decay_share must be in [0, 1], got {self.decay_share}')


def rate_scale(config: OptimizerConfig, steps: int) -> Callable[[Array], Array]:
  """The learning rate's course as a share of its largest value.

  Args:
    config: the optimizer's config.
    steps: of the whole training.

  Returns:
    A function from step (from 0) to a float32 share in (0, 1]: neither the first nor the last step is wasted.
  """
  decay_steps = max(round(config.decay_share * steps), 1)

  def scale(step: Array) -> Array:
    up = (step + 1) / (config.warmup_steps + 1)
    down = jnp.minimum((steps - step) / decay_steps, 1)
    if config.decay == 'cosine':
      down = (1 - jnp.cos(jnp.pi * down)) / 2
    return jnp.minimum(jnp.minimum(up, 1), down).astype(jnp.float32)

  return scale


def _muon_axes(params: dict) -> dict:
  """The matrix axes of every parameter that Muon trains, None elsewhere."""

  def of_leaf(path, _):
    names = [part.key for part in path]
    return _MUON_AXES.get(names[-2]) if names[-1] == 'kernel' else None

  return jax.tree_util.tree_map_with_path(of_leaf, params)


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
  """Builds the optax transformation for a training of `steps` steps."""
  scale = rate_scale(config, steps)
  adam_rate = lambda step: config.adam_rate * scale(step)
  if config.name == 'muon':
    update = muon(
      lambda step: config.muon_rate * scale(step),
      adam_learning_rate=adam_rate,
      weight_decay=config.weight_decay,
      muon_weight_dimension_numbers=_muon_axes,
    )
  else:
    update = optax.adamw(adam_rate, weight_decay=config.weight_decay)
  if not config.max_grad_norm:
    return update
  return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), update)


def apply_gradients(
  params: dict, grads: dict, opt_state: optax.OptState, *, config: OptimizerConfig, steps: int
) -> tuple[dict, optax.OptState]:
  """One step of `make_optimizer(config, steps)`: the parameters and the optimizer's state after it."""
  # optax mixes dtypes in its scalars, which a caller's strict promotion would refuse.
  with jax.numpy_dtype_promotion('standard'):
    updates, opt_state = make_optimizer(config, steps).update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

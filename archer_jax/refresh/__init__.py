"""When to refresh: drift of the canvas from its anchors, the clauses of the policy, and the pool of anchors."""

from archer_jax.refresh.drift import DRIFTS
from archer_jax.refresh.drift import changed_positions
from archer_jax.refresh.drift import embedding_drift
from archer_jax.refresh.drift import hidden_drift
from archer_jax.refresh.drift import token_drift
from archer_jax.refresh.policy import is_unsure
from archer_jax.refresh.policy import reasons
from archer_jax.refresh.pool import Plan
from archer_jax.refresh.pool import make_room
from archer_jax.refresh.pool import plan

__all__ = [
  'DRIFTS',
  'Plan',
  'changed_positions',
  'embedding_drift',
  'hidden_drift',
  'is_unsure',
  'make_room',
  'plan',
  'reasons',
  'token_drift',
]

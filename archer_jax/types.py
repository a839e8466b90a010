"""State and cache of a decoding: frozen pytrees that only `dataclasses.replace` changes.

Axes: B batch, P prompt, G canvas, M pooled anchors, K kv heads, H head dim, D embed, S trace steps.
"""

from collections.abc import Mapping
import dataclasses
import enum

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from archer_jax.config import KNOBS


class Status(enum.IntEnum):
  """Why a row stopped; carried in the loop as int32 because XLA cannot raise."""

  RUNNING = 0
  LENGTH = 1  # all blocks are through
  STOP = 2  # an end token stands in the canvas with no mask before it
  STEP_LIMIT = 3  # the bound of the loop was reached first
  NOT_FINITE = 4  # the logits of a step were NaN or infinite; the row keeps the canvas of the step before
  EMPTY = 5  # a filler row, nothing was asked of it


class Reason(enum.IntFlag):
  """Why a step refreshed: the clauses of the policy that held, as bits; 0 for a reuse."""

  FIRST = 1  # no anchor yet
  INTERVAL = 2  # its turn by the clock
  BLOCK_START = 4  # a new block
  MAX_AGE = 8  # kept for too long
  DRIFT = 16  # the canvas is further from its anchor than the radius
  MARGIN = 32  # the reuse before decided with less than min_margin
  CERTIFICATE = 64  # the reuse before decided with no more than kappa times its drift
  SAME_STEP = 128  # this step reused first; its own margin failed the bits MARGIN or CERTIFICATE


def _state(cls: type) -> type:
  """Makes `cls` a frozen, keyword-only dataclass that is a pytree."""
  return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True, kw_only=True)(cls))


@_state
class Knobs:
  """The numbers a user may tune, one per row; see `config.KNOBS` for their ranges and meaning."""

  gen_length: Array  # int32 [B]
  steps: Array  # int32 [B]
  threshold: Array  # float32 [B]
  threshold_back: Array  # float32 [B]
  max_accept: Array  # int32 [B]
  temperature: Array  # float32 [B]
  top_p: Array  # float32 [B]
  top_k: Array  # int32 [B]
  cfg_scale: Array  # float32 [B]
  alg_temp: Array  # float32 [B]
  refresh_interval: Array  # int32 [B]
  refresh_at_block_start: Array  # int32 [B]
  drift_radius: Array  # float32 [B]
  min_margin: Array  # float32 [B]
  kappa: Array  # float32 [B]
  max_age: Array  # int32 [B]

  @classmethod
  def make(cls, batch: int, /, **values: float | int | Array | np.ndarray) -> 'Knobs':
    """Broadcasts scalars or [B] arrays over `batch` rows; what is not given takes its default.

    Raises:
      TypeError: a name that is no knob, or fractions where a knob counts.
    """
    if unknown := sorted(set(values) - set(KNOBS)):
      raise TypeError(f'{unknown[0]} is no knob; there are {", ".join(KNOBS)}')
    columns = {}
    for name, spec in KNOBS.items():
      default = values.get('gen_length', KNOBS['gen_length'].default) if spec.default is None else spec.default
      dtype = jnp.int32 if spec.integer else jnp.float32
      if spec.integer and not jnp.issubdtype(jnp.result_type(values.get(name, default)), jnp.integer):
        raise TypeError(f'{name} must be integers, got {values[name]!r}')
      # A copy per knob: two leaves of a donated state must never share a buffer.
      columns[name] = jnp.array(jnp.broadcast_to(jnp.asarray(values.get(name, default), dtype), (batch,)))
    return cls(**columns)

  @classmethod
  def stack(cls, rows: list[Mapping[str, float | int]]) -> 'Knobs':
    """One row per mapping from knob names to numbers."""
    full = [{name: row.get(name, spec.default) for name, spec in KNOBS.items()} for row in rows]
    for row in full:
      row['steps'] = row['gen_length'] if row['steps'] is None else row['steps']
    return cls.make(len(rows), **{name: np.array([row[name] for row in full]) for name in KNOBS})


@_state
class PromptCache:
  """The kept keys and values of the prompt, and the state of the canvas they were computed with."""

  k: tuple[Array, ...]  # a layer each: [B, P, K, H], after RoPE
  v: tuple[Array, ...]  # a layer each: [B, P, K, H]
  anchor: Array  # int32 [B, G], the canvas that they were computed with, by the row's last refresh if anchors = 1
  age: Array  # int32 [B], steps since that refresh; -1 before the first one
  prompt_valid: Array  # bool [B, P], False at left padding
  anchor_hidden: Array | None  # [B, G, D], hidden states of the canvas in that refresh; only for the drift `hidden`
  last_hidden: Array | None  # [B, G, D], likewise of the row's last step
  pool: 'AnchorPool | None'  # the row's other anchors, with anchors > 1


@_state
class AnchorPool:
  """What `PromptCache` holds, of the M = anchors - 1 anchors that are not the active one."""

  k: tuple[Array, ...]  # a layer each: [B, M, P, K, H]
  v: tuple[Array, ...]  # a layer each: [B, M, P, K, H]
  anchor: Array  # int32 [B, M, G]
  age: Array  # int32 [B, M], -1 where a place is empty
  used: Array  # int32 [B, M], the row's step at which the anchor ceased to be the active one; -1 for an empty place
  hidden: Array | None  # [B, M, G, D]


@_state
class Trace:
  """Per-step records of fixed length S; row b holds its first `counters.steps[b]`, as far as they fit."""

  canvas: Array  # int32 [B, S, G], after the step
  refresh: Array  # bool [B, S]
  accept: Array  # int32 [B, S]
  remask: Array  # int32 [B, S]
  drift: Array  # float32 [B, S], as the step's refresh decision saw it
  age: Array  # int32 [B, S], likewise; -1 at step 0
  margin: Array  # float32 [B, S], of the step's own decision
  reason: Array  # int32 [B, S], bits of `Reason`; 0 where the step reused


@_state
class Counters:
  """What a row has done so far, int32 [B] each."""

  steps: Array
  nfe: Array  # forwards: one a step and one for a refresh after a reuse in it; under guidance twice that
  refreshes: Array
  accepted: Array
  remasked: Array
  flip_flops: Array  # re-masked and later committed again as the same token


@_state
class DecodeState:
  """Everything a denoising step reads and writes."""

  prompt_tokens: Array  # int32 [B, P], left-padded
  canvas: Array  # int32 [B, G]
  knobs: Knobs
  seed: Array  # uint32 [B]
  row_step: Array  # int32 [B], the row's own step from 0, through all blocks
  block: Array  # int32 [B], the current block
  block_step: Array  # int32 [B], the row's step within its block
  pending: Array  # bool [B, G], positions of the current block that WINO still has to commit
  last_accept: Array  # int32 [B], tokens that WINO committed in the step before
  taken_back: Array  # int32 [B, G], the token last re-masked at a position that is a mask since, else -1
  cache: PromptCache
  cache_uncond: PromptCache | None  # of the unconditional rows under guidance
  refreshed: Array  # bool [B], whether the last step refreshed
  margin: Array  # float32 [B], of the last step's decision; infinite before the first one
  drift: Array  # float32 [B], of the canvas that the last step read, known behind its forward; 0 where it refreshed
  done: Array  # bool [B]
  status: Array  # int32 [B], a `Status`
  counters: Counters
  trace: Trace | None

  @property
  def gen_length(self) -> Array:
    """int32 [B]: columns of the canvas that belong to the row; the rest is padding."""
    return self.knobs.gen_length

  @property
  def prompt_valid(self) -> Array:
    """bool [B, P]: False at left padding."""
    return self.cache.prompt_valid

  @property
  def canvas_valid(self) -> Array:
    """bool [B, G]: columns below gen_length."""
    return jnp.arange(self.canvas.shape[1])[None, :] < self.gen_length[:, None]

"""State of a decoding: frozen pytrees that only `dataclasses.replace` changes.

Axes: B batch, P prompt, G canvas, R decision rows, S trace steps, V vocab.
"""

from collections.abc import Mapping
import dataclasses
import enum
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from archer_jax import specs


class Status(enum.IntEnum):
  """Why a row stopped; carried in the loop as int32 because XLA cannot raise."""

  RUNNING = 0
  LENGTH = 1  # all blocks are through
  STOP = 2  # an end token stands in the canvas with no mask before it
  STEP_LIMIT = 3  # the bound of the loop was reached first
  NOT_FINITE = 4  # the logits of a step were NaN or infinite; the row keeps the canvas of the step before
  EMPTY = 5  # a filler row, nothing was asked of it


def frozen_pytree(cls: type) -> type:
  """Makes `cls` a frozen, keyword-only dataclass that is a pytree."""
  return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True, kw_only=True)(cls))


class _KnobsOfRows:
  """The numbers a user may tune, one per row: an array [B] for each of `specs.knobs()`, int32 or float32."""

  @classmethod
  def make(cls, batch: int, /, **values: float | int | Array | np.ndarray) -> 'Knobs':
    """Broadcasts scalars or [B] arrays over `batch` rows; what is not given takes its default.

    Raises:
      TypeError: a name that is no knob, or fractions where a knob counts.
    """
    knobs = specs.knobs()
    if unknown := sorted(set(values) - set(knobs)):
      raise TypeError(f'{unknown[0]} is no knob; there are {", ".join(knobs)}')
    columns = {}
    for name, knob in knobs.items():
      default = values.get('gen_length', knobs['gen_length'].default) if knob.default is None else knob.default
      dtype = jnp.int32 if knob.integer else jnp.float32
      if knob.integer and not jnp.issubdtype(jnp.result_type(values.get(name, default)), jnp.integer):
        raise TypeError(f'{name} must be integers, got {values[name]!r}')
      # A copy per knob: two leaves of a donated state must never share a buffer.
      columns[name] = jnp.array(jnp.broadcast_to(jnp.asarray(values.get(name, default), dtype), (batch,)))
    return cls(**columns)

  @classmethod
  def stack(cls, rows: list[Mapping[str, float | int]]) -> 'Knobs':
    """One row per mapping from knob names to numbers."""
    knobs = specs.knobs()
    full = [{name: row.get(name, knob.default) for name, knob in knobs.items()} for row in rows]
    for row in full:
      row |= {name: row['gen_length'] for name, value in row.items() if value is None}
    return cls.make(len(rows), **{name: np.array([row[name] for row in full]) for name in knobs})


Knobs = jax.tree_util.register_dataclass(
  dataclasses.make_dataclass(
    'Knobs', [(name, Array) for name in specs.knobs()], bases=(_KnobsOfRows,), frozen=True, kw_only=True
  )
)
Knobs.__doc__, Knobs.__module__ = _KnobsOfRows.__doc__, __name__


@frozen_pytree
class Shadow:
  """Rows behind the canvas: masks at the positions of some columns, which see all but their own twin.

  Nobody outside sees them. They see the prompt, the canvas without the column they stand for, and themselves.
  """

  columns: Array  # int32 [B, n], the twin of each
  valid: Array  # bool [B, n], False for padding, which nobody sees
  sees_peers: bool = dataclasses.field(metadata={'static': True})  # whether they see one another too


@frozen_pytree
class Views:
  """What a step asks the model for: logits of canvas columns, and of shadow rows behind them."""

  columns: Array  # int32 [B, R]; one past the row's gen_length is padding
  shadow: Shadow | None = None


@frozen_pytree
class Update:
  """What a decoder decided in a step, before the loop counts it and moves on."""

  canvas: Array  # int32 [B, G]
  accepted: Array  # bool [B, G], written in this step
  remasked: Array  # bool [B, G], taken back in this step
  block_done: Array  # bool [B]
  margin: Array  # float32 [B]
  decoder: Any  # the decoder's own state after the step
  seen: dict[str, Array] = dataclasses.field(default_factory=dict)  # [B] each, by the names of its spec


@frozen_pytree
class Work:
  """What the forwards of a step fed to the model."""

  forwards: Array  # int32 [B], passes that the row went through
  rows_fed: Array  # int32 [B], its token rows in them; padding does not count
  rows_recomputed: Array  # int32 [B], its token rows if everything were fed once
  passes: dict[str, Array]  # int32 scalars: how often the batch went through each of the method's `passes`


@frozen_pytree
class Plan:
  """What a reuse method is about to do in a step."""

  reuse: Any  # the state to go on with: another anchor may be the active one now
  kept: Any
  reason: Array  # int32 [B], bits by the spec's reasons; 0 where the row reuses
  seen: dict[str, Array]  # [B] each, by the names of its spec


@frozen_pytree
class Outcome:
  """What the forwards of a step gave."""

  logits: Array  # float32 [B, R + shadow rows, V]
  reuse: Any
  kept: Any
  reason: Array  # int32 [B]; of the plan, and of what was done after it
  work: Work


@frozen_pytree
class Counters:
  """What a row has done so far, int32 [B] each."""

  steps: Array
  nfe: Array  # forwards: one a step and one for a refresh after a reuse in it; under guidance twice that
  refreshes: Array
  accepted: Array
  remasked: Array
  flip_flops: Array  # re-masked and later committed again as the same token
  rows_fed: Array  # see `Work`
  rows_recomputed: Array


@frozen_pytree
class DecodeState:
  """Everything a denoising step reads and writes."""

  prompt_tokens: Array  # int32 [B, P], left-padded
  prompt_valid: Array  # bool [B, P], False at left padding
  canvas: Array  # int32 [B, G]
  knobs: Knobs
  seed: Array  # uint32 [B]
  row_step: Array  # int32 [B], the row's own step from 0, through all blocks
  block: Array  # int32 [B], the current block
  block_step: Array  # int32 [B], the row's step within its block
  taken_back: Array  # int32 [B, G], the token last re-masked at a position that is a mask since, else -1
  decoder: Any  # the decoder's own state, arrays [B, ...]
  reuse: Any  # the reuse method's own state, arrays [B, ...]
  kept: Any  # what the reuse method keeps of the model, [B, ...]; it is never moved from slot to slot
  done: Array  # bool [B]
  status: Array  # int32 [B], a `Status`
  counters: Counters
  logprobs: dict[str, Array] | None  # [B, G] each: float32 token_logprobs, and int32 commit_steps, -1 for a mask
  trace: dict[str, Array] | None  # [B, S, ...] each, see `loop.step.record_fields`

  @property
  def gen_length(self) -> Array:
    """int32 [B]: columns of the canvas that belong to the row; the rest is padding."""
    return self.knobs.gen_length

  @property
  def canvas_valid(self) -> Array:
    """bool [B, G]: columns below gen_length."""
    return jnp.arange(self.canvas.shape[1])[None, :] < self.gen_length[:, None]


@frozen_pytree
class StepRecord:
  """What a step did, small enough for a scan; of a row that took none only `live` says anything."""

  live: Array  # bool [B], rows that took the step
  canvas: Array  # int32 [B, G], after the step
  accepted: Array  # bool [B, G]
  remasked: Array  # bool [B, G]
  reason: Array  # int32 [B], why the row refreshed, bits by the reuse method's reasons; 0 where it reused
  margin: Array  # float32 [B], of the step's decision
  seen: dict[str, Array]  # [B] each, what decoder and reuse method tell, by the names of their specs
  work: Work
  logprobs: dict[str, Array] | None = None  # those of the state, after the step

  @property
  def refreshed(self) -> Array:
    """Whether each row refreshed, bool [B]."""
    return self.reason != 0


@frozen_pytree
class Stages:
  """How a step came about, for whoever measures it: what its stages gave, with logits and all that is kept.

  What a method's review made of it is in the record and in the state.
  """

  plan: Plan
  views: Views
  outcome: Outcome  # of the plan's forward
  update: Update  # the decision on its logits

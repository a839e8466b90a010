"""What every decoder is, and the parts that more than one of them uses.

A decision row is a canvas position whose logits a step makes. A step's *margin* is the largest e such that any change
of the logits with (max - min) / 2 <= e in every row certifiably leaves the path of the decision unchanged. Log-odds
move by at most 2 e under such a change and attain it, hence the divisors: a comparison of log-odds with a constant has
the margin |difference| / 2, one of two log-odds a quarter of it, one of two logits of a row half of it.

Axes: B batch, G canvas, R decision rows, V vocab.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING
from typing import Any
from typing import ClassVar

from etils import epy

from archer_jax.specs import INT32_MAX
from archer_jax.specs import DecoderSpec
from archer_jax.specs import Knob
from archer_jax.specs import Switch

with epy.lazy_imports():
  # A spec is read for --help, which must not wait for JAX.
  import jax.numpy as jnp

  from archer_jax import numerics

if TYPE_CHECKING:
  from collections.abc import Mapping

  from jax import Array

  from archer_jax.config import DecodeConfig
  from archer_jax.config import ModelConfig
  from archer_jax.types import DecodeState
  from archer_jax.types import Update
  from archer_jax.types import Views

# Of the decoders with a schedule.
STEPS = Knob(None, True, 1, INT32_MAX, 'denoising steps of the schedule, as far as masks are left', told='gen_length')
# Of the decoders that commit by confidence; each has a default of its own.
THRESHOLD = Knob(0.6, False, 0, 1, 'tokens are written whose probability passes this')
# Of the decoders whose tokens come from `candidates`.
END_SWITCHES = {
  'logits_eos_inf': Switch(False, 'never write the end token'),
  'confidence_eos_eot_inf': Switch(False, 'write end tokens last'),
}


@dataclasses.dataclass(frozen=True)
class Decoder:
  """One way to decide, without a state of its own; what it must remember of the rows stands in `DecodeState.decoder`.

  Attributes:
    spec: what it declares.
    stops_within_block: whether an end token ends a row as soon as it is committed, rather than at its block's end;
      for decoders that never take a token back and know no blocks.
  """

  spec: ClassVar[DecoderSpec]
  stops_within_block: ClassVar[bool] = False

  def init(self, state: DecodeState, cfg: DecodeConfig) -> Any:
    """The decoder's state before the first block is entered: a pytree of arrays [B, ...], by default none."""
    del state, cfg
    return ()

  def enter_block(self, state: DecodeState, cfg: DecodeConfig) -> Any:
    """The decoder's state for the block that `state.block` names; by default as it is."""
    del cfg
    return state.decoder

  def views(self, state: DecodeState, cfg: DecodeConfig) -> Views:
    """The canvas columns whose logits a step needs, and the shadow rows behind them."""
    raise NotImplementedError

  def update(self, state: DecodeState, views: Views, logits: Array, cfg: DecodeConfig) -> Update:
    """Decides on one step.

    Args:
      state: the state whose canvas was fed.
      views: what `views` gave.
      logits: float32 [B, R + shadow rows, V].
      cfg: the program's config.
    """
    raise NotImplementedError

  def reads(self, state: DecodeState, views: Views, cfg: DecodeConfig) -> Array:
    """Bool [B, R + shadow rows]: whose logits the decision depends on; by default those of the block's masks."""
    index = views.columns
    return from_canvas(mask_positions(state, cfg), index, False) & (index < block_end(state, cfg)[:, None])

  def step_limit(self, state: DecodeState, cfg: DecodeConfig) -> Array:
    """Steps int32 [B] after which a row has certainly ended: the schedule's, or those of a token a step."""
    del cfg
    return state.knobs.steps if 'steps' in self.spec.knobs else state.gen_length

  def unread(self, name: str, switches: Mapping[str, Any]) -> str | None:
    """Why nothing would read a setting of the decoder's together with these switches, or None if something does."""
    del name, switches
    return None

  def check(self, knobs: Mapping[str, Any], block_length: int | None, model: ModelConfig) -> None:
    """Raises ValueError for knobs of a row that do not go together, or not with the model."""
    del knobs, block_length, model


def block_index(state: DecodeState, cfg: DecodeConfig) -> Array:
  """int32 [B, block_length]: columns of the current block; those of a short last block may pass the canvas."""
  return state.block[:, None] * cfg.block_length + jnp.arange(cfg.block_length, dtype=jnp.int32)[None]


def block_end(state: DecodeState, cfg: DecodeConfig) -> Array:
  """int32 [B]: the first column behind the current block."""
  return jnp.minimum((state.block + 1) * cfg.block_length, state.gen_length)


def block_count(gen_length: Array, cfg: DecodeConfig) -> Array:
  """int32 [B]: blocks of a row, the last one possibly short."""
  return (gen_length + cfg.block_length - 1) // cfg.block_length


def block_steps(state: DecodeState, cfg: DecodeConfig) -> Array:
  """Steps of the current block, int32 [B]: the schedule's, divided evenly; the first blocks have one more."""
  n_blocks = jnp.maximum(block_count(state.gen_length, cfg), 1)
  steps = state.knobs.steps // n_blocks + (state.block < state.knobs.steps % n_blocks).astype(jnp.int32)
  # Fewer steps than blocks is refused where requests are read; the bound keeps divisions by it defined.
  return jnp.maximum(steps, 1)


def in_turn(state: DecodeState, index: Array, cfg: DecodeConfig) -> Array:
  """Bool [B, R]: of columns, all but in a block's first step, where only the block's first one has its turn."""
  first = (state.block * cfg.block_length)[:, None]
  return (state.block_step > 0)[:, None] | (index == first)


def all_columns(state: DecodeState) -> Array:
  """int32 [B, G]: every column of the canvas."""
  return jnp.broadcast_to(jnp.arange(state.canvas.shape[1], dtype=jnp.int32), state.canvas.shape)


def block_columns(state: DecodeState, cfg: DecodeConfig) -> Array:
  """Columns for the decoders that work block by block.

  The current block; with `official` every column, since the public decoders also fill masks that were predicted in
  an earlier block.
  """
  return all_columns(state) if cfg.allows_mask else block_index(state, cfg)


def from_canvas(values: Array, index: Array, fill) -> Array:
  """Reads [B, G] at columns [B, R], `fill` past the canvas."""
  length = values.shape[1]
  inside = jnp.take_along_axis(values, jnp.minimum(index, length - 1), axis=1, mode='promise_in_bounds')
  return jnp.where(index < length, inside, jnp.asarray(fill, values.dtype))


def to_canvas(values: Array, index: Array, where: Array, canvas: Array) -> Array:
  """Writes [B, R] values to their columns of a copy of `canvas` [B, G] where `where` [B, R] holds."""
  length = canvas.shape[1]
  rows = jnp.arange(canvas.shape[0])[:, None]
  return canvas.at[rows, jnp.where(where, index, length)].set(values, mode='drop')


def mask_positions(state: DecodeState, cfg: DecodeConfig) -> Array:
  """Bool [B, G]: columns of the row that hold the mask token."""
  return (state.canvas == cfg.model.mask_id) & state.canvas_valid


@dataclasses.dataclass(frozen=True)
class Candidates:
  """The token that each decision row would commit."""

  token: Array  # int32 [B, R]
  gap: Array  # float32 [B, R], lead over the second best candidate, noise included
  confidence: Array  # float32 [B, R], log-odds of the clean logits
  exact: Array  # bool [B], whether only written rows depend on the gap


def candidates(
  state: DecodeState, index: Array, z: Array, cfg: DecodeConfig, *, with_mask: bool | None = None
) -> Candidates:
  """Candidates of `wino`, `llada` and `saber`.

  The token is the argmax of z + temperature * Gumbel noise. With `never` the mask token is no candidate but stays in
  the softmax that the confidence comes from, as ids do that stand for no text. The confidence is that of the clean
  logits, whatever the temperature.

  Args:
    state: the current state.
    index: int32 [B, R].
    z: float32 [B, R, V].
    cfg: the program's config.
    with_mask: whether the mask token is one whatever the config says.
  """
  keys = numerics.position_keys(state.seed, numerics.TOKEN_STREAM, state.row_step, index)
  choice = numerics.add_gumbel(z, state.knobs.temperature, keys)
  barred = never_written(cfg, cfg.allows_mask if with_mask is None else with_mask)
  if barred is not None:
    choice = jnp.where(barred, -jnp.inf, choice)
  token, gap = numerics.best_token(choice)
  confidence = numerics.log_odds(z, token)
  # Where the confidence does not change continuously as the best token changes, every candidate must hold.
  exact = state.knobs.temperature <= 0
  if cfg.confidence_eos_eot_inf:
    confidence = jnp.where(is_any(token, end_tokens(cfg)), -jnp.inf, confidence)
    exact = jnp.zeros_like(exact)
  return Candidates(token=token, gap=gap, confidence=confidence, exact=exact)


def never_written(cfg: DecodeConfig, with_mask: bool) -> Array | None:
  """Bool [V]: tokens that are no candidates: ids that stand for no text, the mask unless `with_mask`; None if none."""
  ranges = (*cfg.unknown_ids, *(() if with_mask else ((cfg.model.mask_id, cfg.model.mask_id + 1),)))
  if not ranges:
    return None
  token = jnp.arange(cfg.model.vocab_size)
  barred = jnp.zeros(token.shape, bool)
  for first, end in ranges:
    barred |= (token >= first) & (token < end)
  return barred


def permitted(logits: Array, cfg: DecodeConfig) -> Array:
  """Logits float32 [B, R, V] without a suppressed end token: neither a candidate nor in any softmax.

  The model's own alone, as published: LLaDA bars its end of text and leaves it the end of turn, which
  `confidence_eos_eot_inf` puts last.
  """
  if not cfg.logits_eos_inf:
    return logits
  return jnp.where(jnp.arange(cfg.model.vocab_size) == cfg.model.eos_id, -jnp.inf, logits)


def end_tokens(cfg: DecodeConfig) -> tuple[int, ...]:
  """The config's end tokens, the model's own where none were named."""
  return cfg.end_ids or (cfg.model.eos_id,)


def is_any(tokens: Array, ids: tuple[int, ...]) -> Array:
  """Bool of the shape of `tokens`: whether each is one of the ids."""
  return jnp.any(tokens[..., None] == jnp.asarray(ids, tokens.dtype), axis=-1)


def argmax_margin(chosen: Candidates, written: Array, eligible: Array) -> Array:
  """Half of the smallest lead among the candidates that matter, float32 [B]."""
  matters = jnp.where(chosen.exact[:, None], written, eligible)
  return numerics.smallest(chosen.gap, matters) / 2


def threshold_margin(confidence: Array, threshold: Array, eligible: Array) -> Array:
  """Half of the smallest distance of log-odds [B, R] to that of a threshold [B], float32 [B]."""
  bound = numerics.logit(threshold)[:, None]
  gap = jnp.abs(numerics.distance(confidence, bound))
  return numerics.smallest(gap, eligible) / 2

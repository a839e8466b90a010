"""What the methods share that keep keys and values of prompt and answer alike.

A *refresh* feeds every row and keeps its keys and values. Any other step feeds the rows that the method names, and
those that the decoder reads its logits from; theirs are written over the kept ones, layer by layer, and everybody
attends to all of them. What a step does not feed is as old as the last step that fed it.

A forward has room for one of a few numbers of rows, and the batch takes the least that holds all that its rows feed;
what is left over is written nowhere.

Axes: B batch, P prompt, G canvas, W rows that are fed, R decision rows, N canvas rows and the last prompt row where the
first column is read from it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING
from typing import Any
from typing import NamedTuple

from etils import epy

from archer_jax.reuse import base
from archer_jax.specs import INT32_MAX
from archer_jax.specs import Knob

with epy.lazy_imports():
  import jax
  import jax.numpy as jnp

  from archer_jax import numerics
  from archer_jax import types
  from archer_jax.model import kv as kvs
  from archer_jax.model import sequence
  from archer_jax.model import transformer
  from archer_jax.reuse import _passes as passes

if TYPE_CHECKING:
  from collections.abc import Callable
  from collections.abc import Mapping

  from jax import Array

  from archer_jax.config import DecodeConfig
  from archer_jax.model.kv import KV
  from archer_jax.model.sequence import Inputs
  from archer_jax.types import DecodeState
  from archer_jax.types import Outcome
  from archer_jax.types import Plan
  from archer_jax.types import Update
  from archer_jax.types import Views


# Of the methods that refresh by the clock within a block.
REUSE_INTERVAL = Knob(8, True, 1, INT32_MAX, 'dkv refreshes at every so many steps of a block')


class Kept(NamedTuple):
  """Keys and values of every column."""

  kv: tuple[KV, ...]  # [B, K, P + G, H]; under guidance a second one, of the unconditional rows


@dataclasses.dataclass(frozen=True)
class Columns(base.Reuse):
  """A method that says when a row refreshes (`due`), and which rows another step feeds (`rows`)."""

  def due(self, state: DecodeState, cfg: DecodeConfig) -> Array:
    """Why a row refreshes in the step about to be taken, int32 [B], bits by the spec's reasons; 0 where it does not."""
    raise NotImplementedError

  def rows(self, state: DecodeState, views: Views, cfg: DecodeConfig) -> Array:
    """Rows whose keys and values a step renews that is no refresh, bool [B, N]; those the decoder reads come on top."""
    raise NotImplementedError

  def widths(self, cfg: DecodeConfig) -> list[int]:
    """How many rows a forward may have room for, in rising order; the last one must hold whatever `fed` gives."""
    return quarters(most_rows(cfg))

  def remember(self, state: DecodeState, cfg: DecodeConfig) -> Any:
    """`DecodeState.reuse` behind a step from `state`; by default nothing."""
    del state, cfg
    return ()

  def init(self, prompt_valid: Array, cfg: DecodeConfig) -> tuple[Any, Kept]:
    batch, length = prompt_valid.shape
    kv = lambda: kvs.KV.zeros((batch,), length + cfg.canvas_length, cfg.model, cfg.dtype)
    return self.start(batch, cfg), Kept(tuple(kv() for _ in range(passes.n_streams(cfg))))

  def start(self, batch: int, cfg: DecodeConfig) -> Any:
    """`DecodeState.reuse` before the first step; by default nothing."""
    del batch, cfg
    return ()

  def kept_axes(self, cfg: DecodeConfig) -> Kept:
    return Kept((kvs.kv_axes(cfg.model),) * passes.n_streams(cfg))

  def kept_bytes(self, batch: int, prompt_length: int, cfg: DecodeConfig) -> int:
    rows = batch * passes.n_streams(cfg) * (prompt_length + cfg.canvas_length)
    return kvs.kv_bytes(rows, cfg.model, cfg.dtype)

  def plan(self, params, state: DecodeState, cfg: DecodeConfig) -> Plan:
    del params
    reason = jnp.where(state.done, 0, self.due(state, cfg)).astype(jnp.int32)
    return types.Plan(reuse=state.reuse, kept=state.kept, reason=reason, seen={})

  def fed(self, state: DecodeState, refreshes: Array, views: Views, cfg: DecodeConfig) -> Array:
    """Rows that the forward behind any refresh of a mixed batch feeds, bool [B, N].

    Of rows that refresh, bool [B], those are left whose logits the decoder reads: nothing else can have changed.
    """
    read = _rows_read(state, views, cfg)
    more = self.rows(state, views, cfg) & ~refreshes[:, None]
    return (read | more) & ~state.done[:, None]

  def forward(self, params, state: DecodeState, plan: Plan, views: Views, cfg: DecodeConfig) -> Outcome:
    """One pass of the least width for the batch; where some rows refresh and some do not, first these one at a time."""
    asks = plan.reason != 0
    together = jnp.all(asks | state.done) & jnp.any(asks)
    kv, mixed = plan.kept.kv, asks & ~together
    if asks.shape[0] > 1:
      kv = passes.each_row(mixed, lambda row, kv: _refresh_row(params, state, kv, row, cfg), kv)
    rows = self.fed(state, asks, views, cfg)
    widths = self.widths(cfg)
    counts = jnp.sum(rows, axis=1, dtype=jnp.int32)
    width = jnp.searchsorted(jnp.asarray(widths, jnp.int32), jnp.max(counts)).astype(jnp.int32)
    chosen = jnp.where(together, len(widths), width)
    turns = {_name(width): functools.partial(_some, params, state, rows, views, cfg, width) for width in widths}
    turns['refresh'] = functools.partial(_all, params, state, asks, views, cfg)
    logits, kv = passes.one_of(chosen, list(turns.values()), (passes.no_logits(views, cfg), kv))
    taken = {name: (chosen == number).astype(jnp.int32) for number, name in enumerate(turns)}
    prompt = jnp.sum(state.prompt_valid, axis=1, dtype=jnp.int32)
    everything = prompt + state.gen_length
    work = passes.work(
      state, jnp.where(asks, everything, counts), {**taken, 'row': jnp.sum(mixed, dtype=jnp.int32)}, views, cfg
    )
    return types.Outcome(logits=logits, reuse=plan.reuse, kept=Kept(kv), reason=plan.reason, work=work)

  def commit(
    self, params, state: DecodeState, outcome: Outcome, update: Update, live: Array, cfg: DecodeConfig
  ) -> tuple[Any, Kept]:
    del params, update
    keep = functools.partial(numerics.select_rows, live)
    return jax.tree.map(keep, self.remember(state, cfg), state.reuse), outcome.kept

  def passes(self, cfg: DecodeConfig) -> Mapping[str, Callable[..., Any]]:
    def some(width):
      def one(params, state, views):
        rows = of_canvas(state.canvas_valid, state, cfg)
        return _some(params, state, rows, views, cfg, width, (None, state.kept.kv))

      return one

    every = lambda params, state, views: _all(params, state, ~state.done, views, cfg, (None, state.kept.kv))
    row = lambda params, state, views: _refresh_row(params, state, state.kept.kv, jnp.zeros((), jnp.int32), cfg)
    return {**{_name(width): some(width) for width in self.widths(cfg)}, 'refresh': every, 'row': row}


def most_rows(cfg: DecodeConfig) -> int:
  """The most rows that `Columns.fed` can name."""
  return block_rows(cfg, cfg.canvas_length)


def quarters(length: int) -> list[int]:
  """One to four quarters of a length."""
  return sorted({-(-length * part // 4) for part in range(1, 5)})


def bits(*clauses: Array) -> Array:
  """Reasons int32 [B] from clauses, bool [B] each, in the order of the spec's reasons."""
  return sum(clause.astype(jnp.int32) << place for place, clause in enumerate(clauses))


def reads_block(cfg: DecodeConfig) -> bool:
  """Whether no step but a refresh needs the logits of a column outside the block."""
  return cfg.decoder_method.spec.reads_block and not cfg.allows_mask


def block_rows(cfg: DecodeConfig, n_blocks: int) -> int:
  """Rows that the columns of so many blocks are read from: one more where each is read from the row before."""
  return min(n_blocks * cfg.block_length, cfg.canvas_length) + sequence.lead_rows(1, cfg.model)


def masks(state: DecodeState, cfg: DecodeConfig) -> Array:
  """Columns of the row that hold the mask token, bool [B, G]."""
  return (state.canvas == cfg.model.mask_id) & state.canvas_valid


def of_canvas(columns: Array, state: DecodeState, cfg: DecodeConfig, *, lead: bool = False) -> Array:
  """The rows [B, N] of canvas columns, bool [B, G]; `lead` stands for the last prompt row where it is among them."""
  return jnp.pad(columns, ((0, 0), (_n_lead(state, cfg), 0)), constant_values=lead)


def behind(columns: Array, state: DecodeState, cfg: DecodeConfig) -> Array:
  """The rows [B, N] that stand before canvas columns, bool [B, G]."""
  return jnp.pad(columns, ((0, 0), (0, 1)))[:, 1 - _n_lead(state, cfg) :]


def _n_lead(state: DecodeState, cfg: DecodeConfig) -> int:
  return sequence.lead_rows(state.prompt_tokens.shape[1], cfg.model)


def _name(width: int) -> str:
  return f'rows_{width}'


def _rows_read(state: DecodeState, views: Views, cfg: DecodeConfig) -> Array:
  """Rows that the decision takes its logits from, bool [B, N]."""
  lead = _n_lead(state, cfg)
  length = lead + cfg.canvas_length
  n_columns = views.columns.shape[1]
  columns = types.Views(columns=views.columns)
  row = sequence.head_rows(sequence.Inputs.of(state), columns, lead, cfg.model)
  read = cfg.decoder_method.reads(state, views, cfg)[:, :n_columns]
  nothing = jnp.zeros((row.shape[0], length), bool)
  return nothing.at[jnp.arange(row.shape[0])[:, None], jnp.where(read, row, length)].set(True, mode='drop')


def _refresh_row(params, state: DecodeState, kv: tuple[KV, ...], row: Array, cfg: DecodeConfig) -> tuple[KV, ...]:
  """Renews the keys and values of one row of the batch, from a pass over its prompt and canvas alone."""
  return tuple(
    old.write_row(row, passes.key_pass(params, passes.one_row(inputs, row), cfg))
    for inputs, old in zip(passes.streams(state, cfg), kv, strict=True)
  )


def _all(params, state: DecodeState, need: Array, views: Views, cfg: DecodeConfig, carry: Any) -> Any:
  """A full pass of each stream over all rows; those in `need`, bool [B], take its keys and values.

  `carry` and what is returned are logits float32 [B, R + shadow rows, V], and keys and values.
  """
  _, kv = carry
  logits, fresh, _ = zip(
    *(passes.full_pass(params, inputs, views, cfg) for inputs in passes.streams(state, cfg)), strict=True
  )
  columns = state.prompt_tokens.shape[1] + cfg.canvas_length
  kv = tuple(old.select(need, new.first(columns)) for old, new in zip(kv, fresh, strict=True))
  return passes.guided(logits, state.knobs.cfg_scale), kv


def _some(params, state: DecodeState, rows: Array, views: Views, cfg: DecodeConfig, width: int, carry: Any) -> Any:
  """A pass of each stream over the rows that are named, bool [B, N], at most `width` each; carries what `_all` does."""
  _, kv = carry
  logits, kv = zip(
    *(
      _some_of_stream(params, inputs, rows, views, cfg, width, old)
      for inputs, old in zip(passes.streams(state, cfg), kv, strict=True)
    ),
    strict=True,
  )
  return passes.guided(logits, state.knobs.cfg_scale), kv


def _some_of_stream(
  params, inputs: Inputs, rows: Array, views: Views, cfg: DecodeConfig, width: int, kv: KV
) -> tuple[Array, KV]:
  batch, n_rows = rows.shape
  n_columns = inputs.prompt_length + inputs.canvas_length
  layout = sequence.lay_out(inputs, views.shadow, cfg.model)
  n_shadow = layout.tokens.shape[1] - n_columns
  # Where each row stands among those fed, and the other way round; places that are left over stand past the end.
  place = jnp.cumsum(rows, axis=1, dtype=jnp.int32) - 1
  column = jnp.arange(n_columns - n_rows, n_columns, dtype=jnp.int32)
  columns = jnp.full((batch, width), n_columns, jnp.int32)
  columns = columns.at[jnp.arange(batch)[:, None], jnp.where(rows, place, width)].set(column[None], mode='drop')

  shadow = jnp.broadcast_to(n_columns + jnp.arange(n_shadow, dtype=jnp.int32), (batch, n_shadow))
  fed = jnp.concatenate([jnp.minimum(columns, n_columns - 1), shadow], axis=1)
  # All rows of prompt and canvas see the same.
  seen = jnp.broadcast_to(layout.attn_mask[:, :, :1], (batch, 1, width, n_columns + n_shadow))
  # A decision row that is not fed is not read; it takes the logits of some other.
  place = jnp.concatenate([jnp.clip(place, 0, width - 1), shadow - n_columns + width], axis=1)
  head = transformer.take_rows(place, sequence.head_rows(inputs, views, n_rows - inputs.canvas_length, cfg.model))
  # Where more logits are asked for than rows are fed, each row's are made once.
  once = views.columns.shape[1] > width
  logits, kv = transformer.Transformer(cfg.model).apply(
    {'params': params},
    transformer.take_rows(layout.tokens, fed),
    transformer.take_rows(layout.positions, fed),
    jnp.concatenate([seen, layout.attn_mask[:, :, n_columns:]], axis=2),
    head_rows=None if once else head,
    kept=kv,
    columns=columns,
  )
  return transformer.take_rows(logits, head) if once else logits, kv

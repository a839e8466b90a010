"""dLLM-Cache: attention's and the MLP's outputs are kept too, and few rows of the answer renewed (arXiv 2506.06295).

By two clocks of the row, one for prompt rows and one for answer rows, all rows of a part are renewed. Between its turns
of the clock the answer renews the share of its rows whose values have moved furthest, by cosine, from those of the step
before, chosen anew in every layer; to know that, every layer makes the values of all answer rows and keeps them. The
first layer renews every row in every step.

A row that is not renewed still passes through all layers: what attention and MLP gave it when it last was is added to
its residual stream. So all rows have logits in every step.

Rows of a batch may stand at different turns of their clocks: where they do, those whose clock strikes are fed alone,
one at a time, and the others together.

Axes: B batch, P prompt, G canvas, T = P + G columns, W renewed rows, R decision rows, L layers, D embed.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING
from typing import Any
from typing import ClassVar
from typing import NamedTuple

from etils import epy

from archer_jax.reuse import base
from archer_jax.specs import INT32_MAX
from archer_jax.specs import Knob
from archer_jax.specs import ReuseSpec

with epy.lazy_imports():
  import jax
  from jax import lax
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


class Kept(NamedTuple):
  """What every layer but the first gave every column."""

  kv: KV  # [B, K, T, H]
  values: tuple[Array, ...]  # [B, K, G, H], the answer's once more: what is read and written in one step is copied
  attended: tuple[Array, ...]  # [B, T, D], attention's part of the residual stream
  mapped: tuple[Array, ...]  # [B, T, D], that of the MLP


class _Asked(NamedTuple):
  """What each row renews in a step."""

  prompt: Array  # bool [B], the whole prompt
  answer: Array  # bool [B], the whole answer
  selects: Array  # bool [B], a share of the answer
  count: Array  # int32 [B], that many rows of it


@dataclasses.dataclass(frozen=True)
class _Room:
  """What shapes a pass: whether prompt rows are fed, and how many answer rows there is room for."""

  prompt: bool
  width: int

  @property
  def name(self) -> str:
    return f'{"prompt_and_" if self.prompt else ""}rows_{self.width}'


@dataclasses.dataclass(frozen=True)
class DLLM(base.Reuse):
  """Keeps the states of all rows."""

  spec: ClassVar[ReuseSpec] = ReuseSpec(
    name='dllm',
    help='keeps the states of all rows, renews by two clocks, and between them the answer rows that move most',
    knobs={
      'prompt_interval': Knob(50, True, 1, INT32_MAX, 'dllm renews the prompt at every so many steps of a row'),
      'response_interval': Knob(4, True, 1, INT32_MAX, 'dllm renews the whole answer at every so many steps of a row'),
      'transfer_ratio': Knob(0.25, False, 0, 1, 'share of the answer rows that dllm renews in the steps between'),
    },
    reasons=('prompt', 'response'),
    published=('llada', 'dream'),
    keeps_answer=True,
    number='response_interval',
  )

  def init(self, prompt_valid: Array, cfg: DecodeConfig) -> tuple[tuple[()], tuple[Kept, ...]]:
    batch, length = prompt_valid.shape
    columns, layers = length + cfg.canvas_length, cfg.model.n_layers - 1
    streams = lambda: tuple(jnp.zeros((batch, columns, cfg.model.d_model), cfg.dtype) for _ in range(layers))
    zeros = lambda length: kvs.KV.zeros((batch,), length, cfg.model, cfg.dtype, layers=layers)
    kept = lambda: Kept(zeros(columns), zeros(cfg.canvas_length).v, streams(), streams())
    return (), tuple(kept() for _ in range(passes.n_streams(cfg)))

  def kept_axes(self, cfg: DecodeConfig) -> tuple[Kept, ...]:
    layers = cfg.model.n_layers - 1
    streams = (('batch', 'length', 'embed'),) * layers
    kv = kvs.kv_axes(cfg.model, layers=layers)
    return (Kept(kv, kv.v, streams, streams),) * passes.n_streams(cfg)

  def kept_bytes(self, batch: int, prompt_length: int, cfg: DecodeConfig) -> int:
    model, columns = cfg.model, prompt_length + cfg.canvas_length
    heads = model.n_kv_heads * model.head_dim
    numbers = columns * (2 * heads + 2 * model.d_model) + cfg.canvas_length * heads
    return batch * passes.n_streams(cfg) * (model.n_layers - 1) * numbers * jnp.dtype(cfg.dtype).itemsize

  def plan(self, params, state: DecodeState, cfg: DecodeConfig) -> Plan:
    del params, cfg
    asked = _asked(state)
    reason = jnp.where(state.done, 0, asked.prompt.astype(jnp.int32) | (asked.answer.astype(jnp.int32) << 1))
    return types.Plan(reuse=state.reuse, kept=state.kept, reason=reason, seen={})

  def forward(self, params, state: DecodeState, plan: Plan, views: Views, cfg: DecodeConfig) -> Outcome:
    """One pass for all rows, or one for each whose clock strikes and then one for the others."""
    asked, live = _asked(state), ~state.done
    # The first rooms are for what is selected, the last two for a clock's turn.
    rooms = _rooms(cfg)
    whole, with_prompt = len(rooms) - 2, len(rooms) - 1
    widths = jnp.asarray([room.width for room in rooms[:with_prompt]], jnp.int32)
    fits = jnp.searchsorted(widths, jnp.where(asked.selects, jnp.maximum(asked.count, 1), 0))
    mine = jnp.where(asked.prompt, with_prompt, jnp.where(asked.answer, whole, fits)).astype(jnp.int32)
    strikes = live & (asked.prompt | asked.answer)
    first = jnp.max(jnp.where(live, mine, 0))
    alike = ~jnp.any(strikes) | jnp.all((strikes & (mine == first)) | ~live)
    alone = strikes & ~alike

    carry = (passes.no_logits(views, cfg), plan.kept)
    if live.shape[0] > 1:
      turn = functools.partial(_turn, params, state, asked, mine == with_prompt, views, cfg)
      carry = passes.each_row(alone, turn, carry)
    others = live & ~alone
    # Where each has had its turn nobody is left.
    chosen = jnp.where(jnp.any(others), jnp.max(jnp.where(others, mine, 0)), len(rooms))
    turns = [functools.partial(_pass, params, state, asked, others, views, cfg, room) for room in rooms]
    logits, kept = passes.one_of(chosen, turns, carry)
    counts = {room.name: (chosen == place).astype(jnp.int32) for place, room in enumerate(rooms)}
    for place in (whole, with_prompt):
      counts[f'one_{rooms[place].name}'] = jnp.sum(alone & (mine == place), dtype=jnp.int32)
    work = passes.work(state, _rows_fed(state, asked, cfg), counts, views, cfg)
    return types.Outcome(logits=logits, reuse=plan.reuse, kept=kept, reason=plan.reason, work=work)

  def commit(
    self, params, state: DecodeState, outcome: Outcome, update: Update, live: Array, cfg: DecodeConfig
  ) -> tuple[tuple[()], tuple[Kept, ...]]:
    del params, state, update, live, cfg
    return outcome.reuse, outcome.kept

  def passes(self, cfg: DecodeConfig) -> Mapping[str, Callable[..., Any]]:
    rooms = _rooms(cfg)

    def every(room):
      return lambda params, state, views: _pass(
        params, state, _asked(state), ~state.done, views, cfg, room, (passes.no_logits(views, cfg), state.kept)
      )

    def one(room):
      return lambda params, state, views: _one_row(
        params,
        state,
        _asked(state),
        views,
        cfg,
        room,
        jnp.zeros((), jnp.int32),
        (passes.no_logits(views, cfg), state.kept),
      )

    return {**{room.name: every(room) for room in rooms}, **{f'one_{room.name}': one(room) for room in rooms[-2:]}}


def _asked(state: DecodeState) -> _Asked:
  knobs, step = state.knobs, state.row_step
  answer = step % knobs.response_interval == 0
  ratio = knobs.transfer_ratio
  count = jnp.floor(state.gen_length.astype(jnp.float32) * ratio).astype(jnp.int32)
  return _Asked(prompt=step % knobs.prompt_interval == 0, answer=answer, selects=~answer & (ratio > 0), count=count)


def _rooms(cfg: DecodeConfig) -> list[_Room]:
  length = cfg.canvas_length
  widths = sorted({0, *(-(-length // parts) for parts in (8, 4, 2)), length})
  return [*(_Room(False, width) for width in widths), _Room(True, length)]


def _rows_fed(state: DecodeState, asked: _Asked, cfg: DecodeConfig) -> Array:
  """Renewed rows int32 [B], the mean over the layers: all in the first one, those asked for in the others."""
  prompt, n_layers = jnp.sum(state.prompt_valid, axis=1, dtype=jnp.int32), cfg.model.n_layers
  answer = jnp.where(asked.answer, state.gen_length, jnp.where(asked.selects, asked.count, 0))
  above = answer + jnp.where(asked.prompt, prompt, 0)
  return (prompt + state.gen_length + (n_layers - 1) * above + n_layers // 2) // n_layers


def _turn(params, state, asked: _Asked, with_prompt: Array, views: Views, cfg: DecodeConfig, row: Array, carry):
  """The pass of one row whose clock strikes; those in `with_prompt`, bool [B], feed their prompt too."""
  turns = [functools.partial(_one_row, params, state, asked, views, cfg, room, row) for room in _rooms(cfg)[-2:]]
  return passes.one_of(with_prompt[row].astype(jnp.int32), turns, carry)


def _one_row(params, state, asked: _Asked, views: Views, cfg: DecodeConfig, room: _Room, row: Array, carry):
  """A pass over one row, which replaces its logits and what is kept of it; arguments as `_pass` takes them."""
  logits, kept = carry
  inputs = [passes.one_row(stream, row) for stream in passes.streams(state, cfg)]
  its = passes.one_row((asked, views, kept, state.knobs), row)
  alone, its_views, its_kept, knobs = its
  new_logits, new_kept = _streams_pass(
    params, inputs, knobs.gen_length, alone, jnp.ones((1,), bool), its_views, cfg, room, its_kept, knobs.cfg_scale
  )
  write = lambda old, new: lax.dynamic_update_slice_in_dim(old, new, row, axis=0)
  return write(logits, new_logits), jax.tree.map(write, kept, new_kept)


def _pass(params, state: DecodeState, asked: _Asked, rows: Array, views: Views, cfg: DecodeConfig, room: _Room, carry):
  """A pass over the batch, of which `rows`, bool [B], take what comes out.

  Args:
    params: the model's parameters.
    state: the current state.
    asked: what each row renews.
    rows: see above.
    views: of the step.
    cfg: the program's config.
    room: what the pass has room for.
    carry: logits float32 [B, R + shadow rows, V] and what is kept.
  """
  logits, kept = carry
  fresh, kept = _streams_pass(
    params, passes.streams(state, cfg), state.gen_length, asked, rows, views, cfg, room, kept, state.knobs.cfg_scale
  )
  return numerics.select_rows(rows, fresh, logits), kept


def _streams_pass(params, inputs, gen_length, asked, rows, views, cfg, room, kept, cfg_scale):
  logits, kept = zip(
    *(
      _stream_pass(params, stream, gen_length, asked, rows, views, cfg, room, old)
      for stream, old in zip(inputs, kept, strict=True)
    ),
    strict=True,
  )
  return passes.guided(logits, cfg_scale), kept


def _stream_pass(
  params,
  inputs: Inputs,
  gen_length: Array,
  asked: _Asked,
  rows: Array,
  views: Views,
  cfg: DecodeConfig,
  room: _Room,
  kept: Kept,
) -> tuple[Array, Kept]:
  """One stream of `_pass`: logits, and what is kept, in which only `rows` are written."""
  prompt, end = inputs.prompt_length, inputs.prompt_length + inputs.canvas_length
  batch = rows.shape[0]
  net = transformer.Transformer(cfg.model).bind({'params': params})
  layout = sequence.lay_out(inputs, views.shadow, cfg.model)
  n_shadow = layout.tokens.shape[1] - end
  table = net.table(layout.positions)
  x = net.embed(layout.tokens)
  # The first layer is an ordinary one, of which nothing is kept.
  first = net.blocks[0]
  x = first(x, table, [(*first.key_value(x, table), layout.attn_mask)])

  shadow = jnp.broadcast_to(end + jnp.arange(n_shadow, dtype=jnp.int32), (batch, n_shadow))
  canvas = jnp.broadcast_to(jnp.arange(prompt, end, dtype=jnp.int32), (batch, inputs.canvas_length))
  drop = lambda columns, where: jnp.where(where & rows[:, None], columns, end)
  width = room.width + (prompt if room.prompt else 0)
  seen = jnp.broadcast_to(layout.attn_mask[:, :, :1], (batch, 1, width, end + n_shadow))
  attn_mask = jnp.concatenate([seen, layout.attn_mask[:, :, end:]], axis=2)
  canvas_table = tuple(part[:, prompt:end] for part in table)
  kv, values, attended, mapped = kept.kv, [], [], []
  for layer, block in enumerate(net.blocks[1:]):
    columns = jnp.zeros((batch, 0), jnp.int32)
    if not room.width:
      values.append(kept.values[layer])
    else:
      _, v = block.key_value(x[:, prompt:end], canvas_table)
      chosen = _chosen(v, kept.values[layer], asked, inputs.canvas_valid)
      renewed = asked.answer | asked.selects
      kv = kv.write(layer, drop(canvas, renewed[:, None]), None, v)
      values.append(numerics.select_rows(renewed & rows, v, kept.values[layer]))
      columns = drop(*_packed(chosen, canvas, room.width, end))
    if room.prompt:
      its = jnp.broadcast_to(jnp.arange(prompt, dtype=jnp.int32), (batch, prompt))
      columns = jnp.concatenate([drop(its, asked.prompt[:, None]), columns], axis=1)
    if not width + n_shadow:
      attended.append(kept.attended[layer])
      mapped.append(kept.mapped[layer])
      x = x + attended[-1] + mapped[-1]
      continue
    fed = jnp.concatenate([jnp.minimum(columns, end - 1), shadow], axis=1)
    its_table = tuple(transformer.take_rows(part, fed) for part in table)
    normed = block.attn_norm(transformer.take_rows(x, fed))
    k, v = block.attn.key_value(normed, its_table)
    kv = kv.write(layer, columns, k[:, :, :width], v[:, :, :width])
    parts = [(*kv.read(layer), attn_mask[..., :end])]
    if n_shadow:
      parts.append((k[:, :, width:], v[:, :, width:], attn_mask[..., end:]))
    renew = functools.partial(_renew, columns=columns, end=end)
    x, part = renew(x, kept.attended[layer], block.attn(normed, its_table, parts))
    attended.append(part)
    x, part = renew(x, kept.mapped[layer], block.mlp(block.mlp_norm(transformer.take_rows(x, fed))))
    mapped.append(part)
  head = sequence.head_rows(inputs, views, prompt, cfg.model)
  logits = net.head(net.final_norm(transformer.take_rows(x, head)))
  return logits, Kept(kv, tuple(values), tuple(attended), tuple(mapped))


def _chosen(v: Array, before: Array, asked: _Asked, valid: Array) -> Array:
  """Answer rows that a layer renews, bool [B, G], by their new and kept values [B, K, G, H]."""
  new, old = v.astype(jnp.float32), before.astype(jnp.float32)
  product = lambda a, b: jnp.sum(a * b, axis=(1, 3))
  length = lambda a: jnp.maximum(jnp.sqrt(product(a, a)), jnp.float32(1e-8))
  likeness = product(new, old) / (length(new) * length(old))
  moved = numerics.rank_descending(-likeness, valid) < asked.count[:, None]
  return valid & (asked.answer[:, None] | (asked.selects[:, None] & moved))


def _packed(chosen: Array, columns: Array, width: int, end: int) -> tuple[Array, Array]:
  """The columns int32 [B, W] of the rows that are chosen, bool [B, G], in order; and which of these are any."""
  if width == columns.shape[1]:
    return columns, chosen
  batch = jnp.arange(columns.shape[0])[:, None]
  place = jnp.where(chosen, jnp.cumsum(chosen, axis=1, dtype=jnp.int32) - 1, width)
  packed = jnp.full((columns.shape[0], width), end, jnp.int32).at[batch, place].set(columns, mode='drop')
  return packed, packed < end


def _renew(x: Array, kept: Array, fresh: Array, *, columns: Array, end: int) -> tuple[Array, Array]:
  """The residual stream [B, T + shadow rows, D] behind a part of a layer, and what is kept of that part [B, T, D].

  `fresh` [B, W + shadow rows, D] are its outputs for W columns and for the shadow.
  """
  width = columns.shape[1]
  kept = kept.at[jnp.arange(columns.shape[0])[:, None], columns].set(fresh[:, :width], mode='drop')
  return jnp.concatenate([x[:, :end] + kept, x[:, end:] + fresh[:, width:]], axis=1), kept


METHOD = DLLM()

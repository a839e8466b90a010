"""Dual cache of Fast-dLLM: everything but the block is kept while the block is decoded (arXiv 2505.22618).

The first step of a block refreshes; the others feed the block alone.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING
from typing import ClassVar

from etils import epy

from archer_jax.reuse import _columns
from archer_jax.specs import ReuseSpec

with epy.lazy_imports():
  import jax.numpy as jnp

if TYPE_CHECKING:
  from jax import Array

  from archer_jax.config import DecodeConfig
  from archer_jax.types import DecodeState
  from archer_jax.types import Views


@dataclasses.dataclass(frozen=True)
class Dual(_columns.Columns):
  """Keeps all but the current block."""

  spec: ClassVar[ReuseSpec] = ReuseSpec(
    name='dual',
    help='keeps all but the block, renewed at every block',
    reasons=('block_start',),
    published=('llada', 'parallel', 'dream'),
    keeps_answer=True,
  )

  def due(self, state: DecodeState, cfg: DecodeConfig) -> Array:
    del cfg
    return _columns.bits(state.block_step == 0)

  def rows(self, state: DecodeState, views: Views, cfg: DecodeConfig) -> Array:
    del views
    columns, start = jnp.arange(cfg.canvas_length), (state.block * cfg.block_length)[:, None]
    in_block = (columns >= start) & (columns < start + cfg.block_length)
    return _columns.of_canvas(in_block & state.canvas_valid, state, cfg)

  def widths(self, cfg: DecodeConfig) -> list[int]:
    one = _columns.block_rows(cfg, 1)
    return [one] if _columns.reads_block(cfg) else [one, *(width for width in super().widths(cfg) if width > one)]


METHOD = Dual()

"""Prefix cache of Fast-dLLM: what stands before the block is kept while the block is decoded (arXiv 2505.22618).

The first step of a block refreshes; the others feed the block and all behind it.
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
class Prefix(_columns.Columns):
  """Keeps prompt and earlier blocks."""

  spec: ClassVar[ReuseSpec] = ReuseSpec(
    name='prefix',
    help='keeps what stands before the block, renewed at every block',
    reasons=('block_start',),
    published=('llada', 'parallel', 'dream'),
    keeps_answer=True,
  )

  def due(self, state: DecodeState, cfg: DecodeConfig) -> Array:
    del cfg
    return _columns.bits(state.block_step == 0)

  def rows(self, state: DecodeState, views: Views, cfg: DecodeConfig) -> Array:
    del views
    start = (state.block * cfg.block_length)[:, None]
    return _columns.of_canvas((jnp.arange(cfg.canvas_length) >= start) & state.canvas_valid, state, cfg)

  def widths(self, cfg: DecodeConfig) -> list[int]:
    if not _columns.reads_block(cfg):
      return super().widths(cfg)
    # A whole number of blocks is left.
    return [_columns.block_rows(cfg, n) for n in _columns.quarters(-(-cfg.canvas_length // cfg.block_length))]


METHOD = Prefix()

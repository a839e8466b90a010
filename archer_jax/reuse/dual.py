"""Dual cache of Fast-dLLM: everything but the block is kept while the block is decoded (arXiv 2505.22618).

The first step of a block refreshes; the others feed the block alone.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING
from typing import ClassVar

from etils import epy

from archer_jax.reuse import _columns
from archer_jax.reuse import prefix

with epy.lazy_imports():
  import jax.numpy as jnp

if TYPE_CHECKING:
  from jax import Array

  from archer_jax.config import DecodeConfig
  from archer_jax.specs import ReuseSpec
  from archer_jax.types import DecodeState
  from archer_jax.types import Views


@dataclasses.dataclass(frozen=True)
class Dual(prefix.Prefix):
  """Keeps all but the current block."""

  spec: ClassVar[ReuseSpec] = dataclasses.replace(
    prefix.METHOD.spec, name='dual', help='keeps all but the block, renewed at every block'
  )

  def rows(self, state: DecodeState, views: Views, cfg: DecodeConfig) -> Array:
    del views
    columns, start = jnp.arange(cfg.canvas_length), (state.block * cfg.block_length)[:, None]
    in_block = (columns >= start) & (columns < start + cfg.block_length)
    return _columns.of_canvas(in_block & state.canvas_valid, state, cfg)

  def widths(self, cfg: DecodeConfig) -> list[int]:
    one = _columns.block_rows(cfg, 1)
    if _columns.reads_block(cfg):
      return [one]
    return [one, *(width for width in _columns.quarters(_columns.most_rows(cfg)) if width > one)]


METHOD = Dual()

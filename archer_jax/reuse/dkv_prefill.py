"""dKV-Cache-Prefill for Dream: the prompt is kept for good, but for its last row (arXiv 2505.15781).

The first step refreshes; the others feed the answer and the prompt's last row, which its first token is read from.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING
from typing import ClassVar

from archer_jax.reuse import _columns
from archer_jax.specs import SHIFTED
from archer_jax.specs import ReuseSpec

if TYPE_CHECKING:
  from jax import Array

  from archer_jax.config import DecodeConfig
  from archer_jax.types import DecodeState
  from archer_jax.types import Views


@dataclasses.dataclass(frozen=True)
class DKVPrefill(_columns.Columns):
  """Keeps the prompt of the first step."""

  spec: ClassVar[ReuseSpec] = ReuseSpec(
    name='dkv_prefill',
    help="keeps the prompt of the first step, renews the answer and the prompt's last row",
    reasons=('first',),
    alignments=(SHIFTED,),
    published=('dream',),
  )

  def due(self, state: DecodeState, cfg: DecodeConfig) -> Array:
    del cfg
    return _columns.bits(state.row_step == 0)

  def rows(self, state: DecodeState, views: Views, cfg: DecodeConfig) -> Array:
    del views
    return _columns.of_canvas(state.canvas_valid, state, cfg, lead=True)

  def widths(self, cfg: DecodeConfig) -> list[int]:
    return [_columns.most_rows(cfg)]


METHOD = DKVPrefill()

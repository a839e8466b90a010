"""What a decoding took back: the steps with a rollback, each with its canvas and what stood there in the end.

Axes: S steps, G canvas.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses

import numpy as np
from rich.text import Text

from archer_jax.report.watch import MASK_GLYPH
from archer_jax.report.watch import TAKEN_BACK_STYLE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollback:
  """A step that took tokens back.

  Attributes:
    step: from 1.
    is_refresh: whether the step recomputed the prompt.
    before, final: int32 [G], the canvas before the step and after the last one.
    taken: positions that the step masked again, ascending.
  """

  step: int
  is_refresh: bool
  before: np.ndarray
  final: np.ndarray
  taken: tuple[int, ...]


def find_rollbacks(trace: Mapping[str, np.ndarray], mask_id: int) -> list[Rollback]:
  """The rollbacks of a trace, in order; its arrays are those of `Result.trace`.

  A token that is committed and taken back within one step was in no canvas between steps and is none of them.
  """
  after = trace['canvas_after_step']
  before = np.concatenate([np.full_like(after[:1], mask_id), after[:-1]])
  taken = (before != mask_id) & (after == mask_id)
  return [
    Rollback(
      step=step + 1,
      is_refresh=bool(trace['refresh_per_step'][step]),
      before=before[step],
      final=after[-1],
      taken=tuple(np.flatnonzero(taken[step]).tolist()),
    )
    for step in np.flatnonzero(taken.any(axis=1)).tolist()
  ]


def drawing(rollback: Rollback, mask_id: int, spell: Callable[[int], str]) -> Text:
  """A rollback for a terminal or a file: its canvas with the tokens taken back in brackets, and their successors.

  Args:
    rollback: which one.
    mask_id: the model's.
    spell: text of a token; line breaks stay.
  """
  word = lambda token: spell(token) if spell(token).strip() else repr(spell(token))
  ends = [f'{word(rollback.before[i])} became {word(rollback.final[i])}' for i in rollback.taken]
  again = sum(rollback.before[i] == rollback.final[i] for i in rollback.taken)
  count = len(rollback.taken)
  text = Text(f'step {rollback.step} took back {count} token{"s" * (count > 1)}')
  text.append(f' ({", ".join(ends)})\n' if count <= 4 else f', of which {again} came again in the end\n')
  for position, token in enumerate(rollback.before.tolist()):
    if position in rollback.taken:
      text.append(f'[{spell(token)}]', TAKEN_BACK_STYLE)
    else:
      text.append(MASK_GLYPH if token == mask_id else spell(token))
  return text

"""The live view of a decoding: one step at a time, with what each step wrote, took back and recomputed.

Axes: B batch, G canvas.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import dataclasses
import functools
import time

import jax
import numpy as np
from rich.console import Console
from rich.console import Group
from rich.live import Live
from rich.text import Text

from archer_jax.checkpoints.text import Tokenizer
from archer_jax.config import DecodeConfig
from archer_jax.loop.step import decode_step
from archer_jax.types import DecodeState

# Small models take a step in less time than an eye needs.
_SECONDS_PER_FRAME = 0.12

MASK_GLYPH = '·'
NEW_STYLE, TAKEN_BACK_STYLE, REFRESH_STYLE, QUIET_STYLE = 'bold green', 'bold white on red', 'bold magenta', 'dim'


@functools.partial(jax.jit, static_argnames='cfg', donate_argnames='state')
def _step(params, state, cfg):
  """The state behind a step, and what of its record is shown."""
  state, record = decode_step(params, state, cfg=cfg)
  return state, (record.refreshed, record.margin, record.seen)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepView:
  """One row around one step, on the host.

  Attributes:
    row: its place in the batch.
    steps, refreshes: so far, this step included.
    before, after: int32 [gen_length], the row's canvas around the step.
    is_refresh: whether the step recomputed the prompt.
    seen: what decoder and reuse method tell of the step, by name.
    margin: the step's own.
  """

  row: int
  steps: int
  refreshes: int
  before: np.ndarray
  after: np.ndarray
  is_refresh: bool
  seen: Mapping[str, np.generic]
  margin: float

  def facts(self) -> str:
    share = self.refreshes / max(self.steps, 1)
    refreshes = f'refreshes {self.refreshes:3} ({share:4.0%})'
    seen = '  '.join(f'{name} {_short(value)}' for name, value in self.seen.items())
    return f'step {self.steps:3}  {refreshes}  {seen}  margin {self.margin:8.3g}'


def step_through(params, state: DecodeState, *, cfg: DecodeConfig) -> Iterator[tuple[DecodeState, list[StepView]]]:
  """Takes one step after another, as `archer_jax.decode` would; the given state is donated.

  Yields:
    The state after a step, to be read before the next one is asked for, and a view of every row that took it.
  """
  lengths = jax.device_get(state.gen_length)
  if len(devices := jax.tree.leaves(params)[0].devices()) == 1:
    # What a step returns is bound to the device of the parameters; a first state that is not would be another program.
    state = jax.device_put(state, *devices)
  while not (done := jax.device_get(state.done)).all():
    before = jax.device_get(state.canvas)
    state, record = _step(params, state, cfg=cfg)
    after, (refreshed, margin, seen), counters = jax.device_get((state.canvas, record, state.counters))
    yield (
      state,
      [
        StepView(
          row=row,
          steps=int(counters.steps[row]),
          refreshes=int(counters.refreshes[row]),
          before=before[row, : lengths[row]],
          after=after[row, : lengths[row]],
          is_refresh=bool(refreshed[row]),
          seen={name: values[row] for name, values in seen.items()},
          margin=float(margin[row]),
        )
        for row in np.flatnonzero(~done).tolist()
      ],
    )


class Watch:
  """Decodes and shows every step: drawn in colour on a terminal, as a plain line per row elsewhere.

  Args:
    tokenizer: spells the tokens; without one they are shown as ids.
    console: where to; by default stdout.
  """

  def __init__(self, tokenizer: Tokenizer | None, console: Console | None = None):
    self._console = console or Console()
    self._spell = functools.cache(functools.partial(_spelled, tokenizer=tokenizer))

  def decode(self, params, state: DecodeState, *, cfg: DecodeConfig) -> DecodeState:
    """Takes the place of `archer_jax.decode`."""
    shown, last = {}, state
    with contextlib.ExitStack() as stack:
      live = stack.enter_context(Live(console=self._console, auto_refresh=False)) if self._console.is_terminal else None
      for after, views in step_through(params, state, cfg=cfg):
        start, last = time.perf_counter(), after
        shown |= {view.row: view for view in views}
        if live is None:
          for view in views:
            self._console.print(Text(plain_line(view, cfg, self._spell)), soft_wrap=True)
        else:
          live.update(Group(*(drawing(view, cfg, self._spell) for view in shown.values())), refresh=True)
          time.sleep(max(0.0, _SECONDS_PER_FRAME - (time.perf_counter() - start)))
    return last


def _short(value: np.generic) -> str:
  return f'{value:3d}' if np.issubdtype(value.dtype, np.integer) else f'{value:.2f}'


def plain_line(view: StepView, cfg: DecodeConfig, spell: Callable[[int], str]) -> str:
  """A step without colours: what happened, by how many tokens, and the canvas."""
  mask = cfg.model.mask_id
  was, now = view.before == mask, view.after == mask
  kind = 'refresh' if view.is_refresh else 'reuse'
  canvas = ''.join(MASK_GLYPH if token == mask else spell(token) for token in view.after.tolist())
  return f'row {view.row}  {view.facts()}  {kind} +{np.sum(was & ~now)} -{np.sum(now & ~was)}  {canvas}'


def drawing(view: StepView, cfg: DecodeConfig, spell: Callable[[int], str]) -> Text:
  """A step in colours: tokens just written, the ones just taken back at their places, and the refresh."""
  text = Text().append(f'row {view.row}  ', QUIET_STYLE)
  text.append('refresh' if view.is_refresh else 'reuse  ', REFRESH_STYLE if view.is_refresh else QUIET_STYLE)
  text.append(f'  {view.facts()}\n', QUIET_STYLE)
  for old, new in zip(view.before.tolist(), view.after.tolist(), strict=True):
    if new == cfg.model.mask_id:
      # What was taken back is shown once more, since a mask says nothing.
      text.append(*((MASK_GLYPH, QUIET_STYLE) if old == new else (spell(old), TAKEN_BACK_STYLE)))
    else:
      text.append(spell(new), NEW_STYLE if old != new else 'default')
  return text.append('\n')


def _spelled(token: int, tokenizer: Tokenizer | None) -> str:
  """A token in a few printable characters of one line."""
  if tokenizer is None:
    return f'{token} '
  text = tokenizer.hf.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
  # Nothing that a model writes may steer the terminal.
  return ''.join(c if c.isprintable() else {'\n': '⏎', '\t': '⇥'}.get(c, '�') for c in text)

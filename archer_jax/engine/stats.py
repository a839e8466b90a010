"""The figures of a run: summed over its results, as a table and as a file that says how to get them again."""

from collections.abc import Iterable
from collections.abc import Mapping
import hashlib
import json
from typing import Any

from rich.table import Table

from archer_jax.checkpoints.text import Tokenizer
from archer_jax.engine.engine import Timing
from archer_jax.engine.results import COUNT_FIELDS
from archer_jax.engine.results import Result
from archer_jax.engine.settings import Settings

_SUMMED = (*COUNT_FIELDS, 'rows_fed', 'rows_recomputed')


class Summary:
  """Sums over the results that it is given.

  Attributes:
    records: results.
    rows: results that were decoded.
    errors: results that are errors.
    sums: each counter over all rows.
  """

  def __init__(self):
    self.records = 0
    self.rows = 0
    self.errors = 0
    self.sums = dict.fromkeys(_SUMMED, 0)
    self._tokens = hashlib.sha256()

  def add(self, results: Iterable[Result]) -> None:
    for result in results:
      self.records += 1
      self.rows += result.seed is not None
      self.errors += result.error is not None
      for name in _SUMMED:
        self.sums[name] += getattr(result, name)
      self._tokens.update(json.dumps(list(result.token_ids)).encode())

  @property
  def refresh_share(self) -> float:
    """Share of the steps that recomputed the prompt."""
    return self.sums['refreshes'] / max(self.sums['steps'], 1)

  @property
  def steps_per_row(self) -> float:
    """Mean over the rows that were decoded."""
    return self.sums['steps'] / max(self.rows, 1)

  @property
  def fed_share(self) -> float:
    """Rows fed to the model against those of recomputing everything in the same steps."""
    return self.sums['rows_fed'] / max(self.sums['rows_recomputed'], 1)

  def sentence(self) -> str:
    """The run in one line."""
    sums = self.sums
    return (
      f'{sums["generated_tokens"]} tokens in {sums["steps"]} steps · {sums["refreshes"]} refreshes '
      f'({self.refresh_share:.0%} of the steps) · {self.fed_share:.0%} of the rows of full recomputation · '
      f'{sums["remasked"]} tokens taken back'
    )

  def table(self, timing: Timing | None) -> Table:
    """The figures for a terminal; times where they were measured."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style='dim')
    table.add_column(justify='right')
    for name, value in self.figures(timing).items():
      text = f'{value:,.3f}' if isinstance(value, float) else f'{value:,}' if isinstance(value, int) else value
      table.add_row(name.replace('_', ' '), text)
    return table

  def figures(self, timing: Timing | None) -> dict[str, Any]:
    """The figures by name. Tokens per second are generated tokens over the time of decoding alone."""
    figures = {'rows': self.rows, 'errors': self.errors, **self.sums}
    figures |= {'refresh_share': self.refresh_share, 'fed_share': self.fed_share}
    if timing is not None and timing.decode_seconds:
      figures |= {
        'programs': len(timing.programs),
        'compile_seconds': timing.compile_seconds,
        'decode_seconds': timing.decode_seconds,
        'tokens_per_second': self.sums['generated_tokens'] / timing.decode_seconds,
        # Of the batch with the longest prompts.
        'kept_bytes': max(cfg.reuse_method.kept_bytes(*shape, cfg) for cfg, shape in timing.programs),
      }
    return figures

  def tokens_sha256(self) -> str:
    """Of all canvases in order; equal where two runs decoded the same."""
    return self._tokens.hexdigest()


def report(
  summary: Summary,
  timing: Timing | None,
  settings: Settings,
  tokenizer: Tokenizer | None,
  facts: Mapping[str, Any],
) -> dict[str, Any]:
  """What a results file depends on, and its figures, as JSON.

  Args:
    summary: of the run.
    timing: of the run, if it was measured.
    settings: of the run.
    tokenizer: the checkpoint's, for its chat template.
    facts: what else there is to say, such as versions and dtype.
  """
  template = tokenizer.hf.chat_template if tokenizer is not None else None
  return {
    **facts,
    'chat_template_sha256': hashlib.sha256(template.encode()).hexdigest() if isinstance(template, str) else None,
    **settings.by_name(),
    'caution': settings.methods.caution,
    'figures': summary.figures(timing),
    'tokens_sha256': summary.tokens_sha256(),
  }

"""What a table says: rows, and claims of the paper with what the interval measured here makes of them; as Markdown.

A claim is judged by its interval alone. It *agrees* where the whole 95 % interval lies on the paper's side, *disagrees*
where it lies on the other, and is *undecided* in between. No interval can show that two figures are equal: one that
meets the paper's is *compatible* and no more. A question that the paper leaves open is decided or not.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
from typing import Any

AGREES, DISAGREES, UNDECIDED, COMPATIBLE = 'agrees', 'disagrees', 'undecided', 'compatible'
RULES = (
  'agrees / disagrees: the whole 95 % interval lies on the side of the paper / on the other; undecided: neither. '
  'A figure or range of the paper that is no difference is compatible where the interval meets it, which a wide one '
  'does easily.'
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
  """One thing that the paper says, or leaves open, and what is measured here.

  Attributes:
    text: what is compared.
    paper: the paper's figure, as text; empty where it has none.
    here: the figure here with its interval, as text.
    verdict: one of the four, or for an open question what is decided.
  """

  text: str
  paper: str
  here: str
  verdict: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
  """A table.

  Attributes:
    name, title: of the table.
    columns: what stands in each column of Markdown, from a row.
    rows: as in the JSON.
    claims: what is compared with the paper.
    notes: what else one must know, a sentence each.
    more: what the figure and the JSON have beside the rows.
  """

  name: str
  title: str
  columns: Mapping[str, Callable[[Mapping[str, Any]], str]]
  rows: Sequence[Mapping[str, Any]]
  claims: Sequence[Claim] = ()
  notes: Sequence[str] = ()
  more: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def markdown(self) -> str:
    """The table, the claims and the notes."""
    lines = [
      f'## {self.title}',
      '',
      *_table(tuple(self.columns), [[f(r) for f in self.columns.values()] for r in self.rows]),
    ]
    if self.claims:
      cells = [[claim.text, claim.paper or '-', claim.here, claim.verdict] for claim in self.claims]
      lines += ['', *_table(('compared', 'paper', 'here (95 %)', 'verdict'), cells), '', RULES]
    lines += [line for note in self.notes for line in ('', note)]
    return '\n'.join(lines) + '\n'

  def content(self) -> dict[str, Any]:
    """The table for JSON."""
    claims = [dataclasses.asdict(claim) for claim in self.claims]
    return {'title': self.title, 'rows': list(self.rows), 'claims': claims, 'notes': list(self.notes), **self.more}


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
  # A bar would begin another cell.
  line = lambda cells: f'| {" | ".join(cell.replace("|", chr(92) + "|") for cell in cells)} |'
  return [line(header), '|---' * len(header) + '|', *map(line, rows)]


def verdict(sign: float, low: float | None, high: float | None, null: float = 0.0) -> str:
  """Judges a difference, or a ratio with null 1.

  Args:
    sign: of the paper's difference; 0 where it claims none, which nothing can confirm.
    low: of the interval here; None where there is none.
    high: likewise.
    null: no difference.
  """
  if sign == 0 or low is None or high is None or low <= null <= high:
    return UNDECIDED
  return AGREES if (low > null) == (sign > 0) else DISAGREES


def decided(low: float | None, high: float | None, above: str, below: str, null: float = 0.0) -> str:
  """Answers an open question: `above` or `below` where the interval lies there."""
  if low is None or high is None or low <= null <= high:
    return UNDECIDED
  return above if low > null else below


def in_range(low: float, high: float, least: float, most: float) -> str:
  """Judges a figure of which the paper gives a range, or a figure as such."""
  return COMPATIBLE if low <= most and least <= high else DISAGREES


def percent(value: float) -> str:
  return f'{100 * value:.1f} %'


def points(value: float, low: float, high: float) -> str:
  """A difference of shares with its interval."""
  return f'{100 * value:+.1f} ({100 * low:+.1f} to {100 * high:+.1f}) points'


def times(value: float | None, low: float | None = None, high: float | None = None) -> str:
  """A ratio, with its interval where there is one."""
  if value is None:
    return '-'
  return f'{value:.2f}x' if low is None or high is None else f'{value:.2f}x ({low:.2f}-{high:.2f})'


def shares(name: str) -> Callable[[Mapping[str, Any]], str]:
  """A column of shares in percent; a share that is not known is a dash."""
  return lambda row: '-' if row[name] is None else f'{100 * row[name]:.1f}'


def number(value: float | None, digits: int = 2) -> str:
  return '-' if value is None or not math.isfinite(value) else f'{value:.{digits}f}'


def with_interval(value: float | None, limits: tuple[float, float] | None, digits: int = 3) -> str:
  """A figure with its interval, as far as they are there."""
  text = number(value, digits)
  return text if limits is None else f'{text} ({limits[0]:.{digits}f} to {limits[1]:.{digits}f})'

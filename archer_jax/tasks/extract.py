r"""Answers taken out of completions, for files of `{"prompt", "answer"}` such as GSM8K.

An extractor turns a text into the canonical form of the answer that it states, or into None where it states none. It
reads a reference in the file's own form (`... #### 1,234`) as well as a completion, and two answers are equal when
their canonical forms are.
"""

from collections.abc import Callable
from collections.abc import Mapping
from fractions import Fraction
import re

from archer_jax.tasks import plain

_DIGITS = r'(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+'
# A minus belongs to the number unless something that could be subtracted from stands before it.
_NUMBER = re.compile(
  r'(?P<minus>(?:(?<![\w)\]}.])-)?(?:\$\s?-?)?)'
  r'(?:\\[dt]?frac\{(?P<over>[0-9]+)\}\{(?P<under>[0-9]+)\}'
  rf'|(?P<digits>{_DIGITS})(?:/(?P<divisor>[0-9]+))?)'
)
# "the answer is", and what may stand between it and the answer.
_STATED = re.compile(r'answer(?:\s+is|\s*[:=])[\s:=*_"\'\[{]*(?:\\boxed\{|\\text\{|\\[(\[])*\s*', re.IGNORECASE)
_CALCULATES = re.compile(r'\s*[-+*/\xd7\xf7^=]\s*[$(]?[0-9]')

_LETTER = re.compile(r'\(([A-Ea-e])\)|([A-E])(?![\w\'\u2019])')
_BOXED_LETTER = re.compile(r'\s*(?:\\text\{)?\(?([A-Ea-e])\)?\}?\s*')
_LEADING_LETTER = re.compile(r'\s*(?:\(([A-Ea-e])\)|([A-E])(?:[.):,]|\s*(?:\n|$)))')
# The article at the beginning of a sentence is followed by its noun.
_LONE_LETTER = re.compile(r'\(([A-Ea-e])\)|(?<![\w\'\u2019])([B-E]|A(?!\s+[a-z]))(?![\w\'\u2019])')


def extract_exact(text: str) -> str | None:
  """The whole text without white space around it; None if nothing is left."""
  return plain(text).strip() or None


def extract_number(text: str) -> str | None:
  r"""The number that a text gives as its answer.

  Looked for in this order: on the line of the first `####`, in the last `\boxed{}`, behind the last "the answer is" (or
  "answer:"), and last the final number of the text. Thousands separators, a dollar sign, a full stop and units behind
  the number are not part of it; `3/4` and `\frac{3}{4}` are one number.

  Returns:
    The value as a fraction in lowest terms, so that `18.0` and `18` are equal; None if there is no number.
  """
  return found[0] if (found := find_number(text)) else None


def find_number(text: str) -> tuple[str, re.Match[str]] | None:
  """The value of the number that a text gives as its answer, see `extract_number`, and where it stands.

  Returns:
    The value as `extract_number` writes it, and the match, in the text that its `string` has: minus signs, separators
    and dollar signs of LaTeX are plain there. The group `digits` is None for a fraction of LaTeX. None if there is no
    number.
  """
  text = text.replace('\u2212', '-').replace('{,}', ',').replace('\\,', ',').replace('\\!', '').replace('\\$', '$')
  line = text.partition('####')[2].strip(' \t').partition('\n')[0]
  places = [_NUMBER.search(line), _NUMBER.search(boxed(text))]
  for stated in list(_STATED.finditer(text))[-1:]:
    number = _NUMBER.match(text, stated.end())
    # "the answer is 5 + 3 = 8" goes on to the result, which is then the final number.
    places.append(None if number and _CALCULATES.match(text, number.end()) else number)
  places += list(_NUMBER.finditer(text))[-1:]
  return next(((value, place) for place in places if place and (value := _value(place)) is not None), None)


def extract_choice(text: str) -> str | None:
  r"""The letter from A to E that a text gives as its answer.

  Looked for in this order: behind the last "the answer is" (or "answer:"), in the last `\boxed{}`, at the beginning
  where the letter stands alone (`B.`, `(B)`, `B`), and last the final letter that stands alone anywhere. Small letters
  count in parentheses and boxes only, and the article `A` before a word does not.

  Returns:
    A capital letter; None if there is none.
  """
  places = [_LETTER.match(text, stated.end()) for stated in list(_STATED.finditer(text))[-1:]]
  places += [_BOXED_LETTER.fullmatch(boxed(text)), _LEADING_LETTER.match(text)]
  places += list(_LONE_LETTER.finditer(text))[-1:]
  return next((place[place.lastindex].upper() for place in places if place), None)


EXTRACTORS: Mapping[str, Callable[[str], str | None]] = {
  'exact': extract_exact,
  'number': extract_number,
  'choice': extract_choice,
}


def extract(name: str, text: str) -> str | None:
  """The canonical answer of a text by the extractor of that name.

  Raises:
    ValueError: there is no such extractor.
  """
  if name not in EXTRACTORS:
    raise ValueError(f'extractor must be one of {", ".join(EXTRACTORS)}, got {name!r}')
  return EXTRACTORS[name](text)


def is_equal(name: str, completion: str, reference: str) -> bool:
  """Whether a completion states the same answer as a reference, both read by the extractor of that name.

  Raises:
    ValueError: there is no such extractor, or it finds no answer in the reference: then no completion could be right.
  """
  if (expected := extract(name, reference)) is None:
    raise ValueError(f'answer must hold what the extractor {name} looks for, got {reference!r}')
  return extract(name, completion) == expected


def stated(text: str) -> str:
  """What stands behind the last "the answer is" (or "answer:") of a text; empty if nothing does."""
  return next((text[found.end() :] for found in list(_STATED.finditer(text))[-1:]), '')


def boxed(text: str) -> str:
  r"""What stands in the last `\boxed{}`, whose braces may be nested; empty if there is none or it is not closed."""
  start = text.rfind('\\boxed{')
  if start < 0:
    return ''
  start += len('\\boxed{')
  depth = 1
  for end in range(start, len(text)):
    depth += {'{': 1, '}': -1}.get(text[end], 0)
    if not depth:
      return text[start:end]
  return ''


def _value(number: re.Match[str]) -> str | None:
  """The value of a match of `_NUMBER` as a fraction; None for one that is none."""
  over, under = number['over'] or number['digits'].replace(',', ''), number['under'] or number['divisor'] or '1'
  try:
    value = Fraction(over) / Fraction(under)
  except (ZeroDivisionError, ValueError):
    # Python refuses to read integers of thousands of digits.
    return None
  return str(-value if '-' in number['minus'] else value)

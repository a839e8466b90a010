"""FinQA: questions about a page of a financial report, answered by a number or by yes or no.

The file is a JSON list as published (its name ends in .json) or has an entry a line, with `pre_text`, `post_text`,
`table` and, under `qa`, `question`, `answer` and `exe_ans`, the result of the annotated calculation, which decides.

**The number** of an answer is read as `extract.extract_number` reads one: behind `####`, in the last box, behind "the
answer is", or the last of the text. Dollar signs, thousands separators and units are no part of it, so that
`$12.2 million` is 12.2.

**Percent.** `9.35%` is 0.0935, and 9.35 where `exe_ans` is a percentage as such. Without a sign the number of a
question whose published answer has one is read both ways too; any other is what it says.

**Rounding.** A number is right if it is `exe_ans` correctly rounded to the digits that the answer writes, and off by at
most 1 %: of 0.09346, `9.35%`, `9.3%` and `0.0935` are right, `9.36%`, `9%` and `0.1` are wrong. As `exe_ans` itself has
five decimals, a difference of half of the fifth is none.

**Yes or no** is the last of these words in an answer.
"""

from fractions import Fraction
import math
from pathlib import Path
import re
from typing import Any

from archer_jax.tasks import Problem
from archer_jax.tasks.extract import find_number
from archer_jax.tasks.jsonl import field
from archer_jax.tasks.jsonl import read_entries
from archer_jax.tasks.jsonl import text_field
from archer_jax.tasks.jsonl import texts_field
from archer_jax.tasks.protocol import render

_INSTRUCTION = 'Answer with a number, or with yes or no. End with "The answer is" and the answer.'
_PERCENT = re.compile(r'\s*(?:\\?%|percent\b)', re.IGNORECASE)
_YES_OR_NO = re.compile(r'\b(yes|no)\b', re.IGNORECASE)
# Half of the last decimal of the file's results, and how far a rounding may lead.
_EXACT, _ROUNDING = Fraction(1, 200_000), Fraction(1, 100)


def read_problems(path: str | Path, tokenizer: Any = None) -> list[Problem]:
  """The questions of a file.

  Args:
    path: the file, such as test.json of FinQA.
    tokenizer: see `protocol.render`.

  Returns:
    Problems whose `hidden` is `exe_ans`, a number or `yes` or `no`, and whether the published answer is in percent.

  Raises:
    ValueError: an entry that is not as above; the message names file, entry or line, and field.
  """
  problems = []
  for place, record in read_entries(path):
    before, after = (texts_field(place, record, name, may_be_empty=True) for name in ('pre_text', 'post_text'))
    table = field(place, record, 'table')
    if not isinstance(table, list) or not all(isinstance(row, list) for row in table):
      raise ValueError(f'{place}: table must be a list of rows, got {str(table)[:80]}')
    qa = field(place, record, 'qa')
    if not isinstance(qa, dict):
      raise ValueError(f'{place}: qa must be an object, got {str(qa)[:80]}')
    within = f'{place}: qa'
    question = text_field(within, qa, 'question')
    published, expected = field(within, qa, 'answer'), field(within, qa, 'exe_ans')
    is_number = isinstance(expected, int | float) and not isinstance(expected, bool) and math.isfinite(expected)
    if not is_number and expected not in ('yes', 'no'):
      raise ValueError(f'{within}: exe_ans must be a number, yes or no, got {str(expected)[:80]!r}')
    rows = [' | '.join(map(str, row)) for row in table]
    prompt = '\n'.join([*before, *rows, *after, '', question, _INSTRUCTION])
    problems.append(
      Problem(
        prompt=render(prompt, tokenizer=tokenizer),
        answer=f'The answer is {expected}.',
        hidden=(expected, '%' in str(published)),
      )
    )
  return problems


def is_solved(problem: Problem, answer: str) -> bool:
  """Whether the answer states the expected number, or the expected word, by the rules above."""
  expected, in_percent = problem.hidden
  if isinstance(expected, str):
    return [word.lower() for word in _YES_OR_NO.findall(answer)[-1:]] == [expected]
  if (found := find_number(answer)) is None:
    return False
  value, place = Fraction(found[0]), found[1]
  # Without digits, or with a divisor, it is a fraction, which is written exactly.
  exactly = place['digits'] is None or place['divisor'] is not None
  unit = Fraction(0) if exactly else Fraction(1, 10 ** len(place['digits'].partition('.')[2]))
  divisors = (1, 100) if in_percent or _PERCENT.match(place.string, place.end()) else (1,)
  return any(_is_rounded(value / divisor, unit / divisor, Fraction(expected)) for divisor in divisors)


def _is_rounded(value: Fraction, unit: Fraction, expected: Fraction) -> bool:
  """Whether a value is the expected one, rounded to multiples of a unit, and near it."""
  return abs(value - expected) <= min(max(unit / 2, _EXACT), abs(expected) * _ROUNDING)

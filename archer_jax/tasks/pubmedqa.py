"""PubMedQA: a question about abstracts, answered by yes, no or maybe.

The file is one JSON object of entries by their PubMed number as published (its name ends in .json), or has an entry a
line, each with `QUESTION`, `CONTEXTS` and `final_decision`. An answer says one of the three words exactly, whatever its
letters' size: behind the last "the answer is" (or "answer:"), or else in the last box, or else as its first word.
"""

from pathlib import Path
import re
from typing import Any

from archer_jax.tasks import Problem
from archer_jax.tasks.extract import boxed
from archer_jax.tasks.extract import stated
from archer_jax.tasks.jsonl import read_entries
from archer_jax.tasks.jsonl import text_field
from archer_jax.tasks.jsonl import texts_field
from archer_jax.tasks.protocol import render

DECISIONS = ('yes', 'no', 'maybe')
_INSTRUCTION = 'Answer with yes, no or maybe.'
_WORD = re.compile(rf'[\s*_"\'(]*(?:\\text\{{)?({"|".join(DECISIONS)})\b', re.IGNORECASE)


def read_problems(path: str | Path, tokenizer: Any = None) -> list[Problem]:
  """The questions of a file.

  Args:
    path: the file, such as ori_pqal.json, or the part of it that is the test set.
    tokenizer: see `protocol.render`.

  Raises:
    ValueError: an entry that is not as above; the message names file, entry or line, and field.
  """
  problems = []
  for place, record in read_entries(path):
    question, decision = (text_field(place, record, name) for name in ('QUESTION', 'final_decision'))
    contexts = texts_field(place, record, 'CONTEXTS')
    if decision not in DECISIONS:
      raise ValueError(f'{place}: final_decision must be one of {", ".join(DECISIONS)}, got {decision[:80]!r}')
    prompt = render('\n'.join([*contexts, '', question, _INSTRUCTION]), tokenizer=tokenizer)
    problems.append(Problem(prompt=prompt, answer=decision))
  return problems


def is_solved(problem: Problem, answer: str) -> bool:
  """Whether the answer says the word of the reference."""
  places = (stated(answer), boxed(answer), answer)
  word = next((word for text in places if (word := _WORD.match(text))), None)
  return word is not None and word[1].lower() == problem.answer

"""HumanEval from a file whose problems have more tests: HumanEval's fields and `test_case_list`, one problem a line.

The same answer is judged twice: by HumanEval's own tests, and by those of the list. The lists of six published problems
hold a test that their own solution fails, mostly for a name that is nowhere defined; docs/evaluation.md names them.
"""

from pathlib import Path
from typing import Any

from archer_jax.tasks import Problem
from archer_jax.tasks import humaneval
from archer_jax.tasks.jsonl import read_entries
from archer_jax.tasks.jsonl import text_field
from archer_jax.tasks.jsonl import texts_field

_FIELDS = ('task_id', 'prompt', 'entry_point', 'canonical_solution', 'test')

is_solved = humaneval.is_solved
ALSO = {'et': humaneval.passes_more}


def read_problems(path: str | Path, tokenizer: Any = None) -> list[Problem]:
  """The problems of a file, in the style `saber` of `humaneval`.

  Args:
    path: the file, such as HumanEval_ET.jsonl as it is published.
    tokenizer: see `protocol.render`.

  Raises:
    ValueError: a line that is not as above; the message names file, line and field.
  """
  return [
    humaneval.make_problem(
      {field: text_field(place, record, field) for field in _FIELDS},
      'saber',
      tokenizer,
      more_tests=texts_field(place, record, 'test_case_list'),
    )
    for place, record in read_entries(path)
  ]

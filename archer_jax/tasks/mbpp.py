"""MBPP, sanitized: short functions by a sentence and their tests, in the protocol of the Saber and Archer papers.

A line of the file has `task_id`, `prompt`, `code`, `test_imports` and `test_list`. The user's turn is the problem's
text and its tests, and the answer begins in an open code block. What is run is the function that the first test calls,
with the imports and helpers that stand beside it (`extract_code.begun_code`, `extract_code.needed`), then all tests in
one program.
"""

import ast
from collections.abc import Sequence
import dataclasses
from pathlib import Path
from typing import Any

from archer_jax.tasks import Problem
from archer_jax.tasks import with_line_feeds
from archer_jax.tasks.extract_code import FENCE
from archer_jax.tasks.extract_code import OPEN_FENCE
from archer_jax.tasks.extract_code import begun_code
from archer_jax.tasks.extract_code import defines
from archer_jax.tasks.extract_code import needed
from archer_jax.tasks.extract_code import parse
from archer_jax.tasks.jsonl import field
from archer_jax.tasks.jsonl import read_entries
from archer_jax.tasks.jsonl import text_field
from archer_jax.tasks.jsonl import texts_field
from archer_jax.tasks.protocol import MORE_TESTS_LIMITS
from archer_jax.tasks.protocol import render
from archer_jax.tasks.sandbox import run_python


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tests:
  """What the grader of a problem needs.

  Attributes:
    task_id: its published number.
    name: the function that is tested.
    imports: what the tests import.
    tests: asserts.
    more_tests: asserts of an extended set.
  """

  task_id: int
  name: str
  imports: Sequence[str]
  tests: Sequence[str]
  more_tests: Sequence[str] = ()


def read_problems(path: str | Path, tokenizer: Any = None, *, extended: bool = False) -> list[Problem]:
  """The problems of a file.

  Args:
    path: the file, such as sanitized-mbpp.json, or the same as JSON lines.
    tokenizer: see `protocol.render`.
    extended: whether lines have `test_case_list` too, asserts like those of `test_list`.

  Returns:
    Problems whose difficulty is the number of lines of the published solution, and `hidden` a `Tests`.

  Raises:
    ValueError: a line that is not as above; the message names file, line and field.
  """
  problems = []
  for place, record in read_entries(path):
    text, code = (with_line_feeds(text_field(place, record, name)) for name in ('prompt', 'code'))
    tests = texts_field(place, record, 'test_list')
    calls = [node.func for test in parse(tests[0]) for node in ast.walk(test) if isinstance(node, ast.Call)]
    names = [function.id for function in calls if isinstance(function, ast.Name)]
    name = next((name for name in names if defines(code, name)), None)
    if name is None:
      raise ValueError(f'{place}: the first of test_list must call a function of code, got {tests[0][:80]!r}')
    hidden = Tests(
      task_id=field(place, record, 'task_id'),
      name=name,
      imports=texts_field(place, record, 'test_imports', may_be_empty=True),
      tests=tests,
      more_tests=texts_field(place, record, 'test_case_list') if extended else (),
    )
    turn = '\n'.join([text, 'Your code should pass these tests:', *tests])
    problems.append(
      Problem(
        prompt=render(turn, OPEN_FENCE, tokenizer),
        answer=f'{code}\n{FENCE}',
        difficulty=len(code.splitlines()),
        hidden=hidden,
      )
    )
  return problems


def program(problem: Problem, answer: str, tests: Sequence[str]) -> str:
  """The program that decides: code, what the tests import, tests."""
  name = problem.hidden.name
  code = begun_code(answer, lambda text: defines(text, name))
  return '\n'.join([needed(code, name) if defines(code, name) else code, *problem.hidden.imports, *tests])


def is_solved(problem: Problem, answer: str) -> bool:
  """Whether the function of the answer passes its tests, run in a sandbox."""
  return run_python(program(problem, answer, problem.hidden.tests)).passed


def passes_more(problem: Problem, answer: str) -> bool:
  """Whether it passes the tests of the extended set."""
  return run_python(program(problem, answer, problem.hidden.more_tests), limits=MORE_TESTS_LIMITS).passed

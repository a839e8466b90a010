"""LiveCodeBench's code generation: contest problems, as methods of a given class or as programs that read and write.

A line of a release has `question_content`, `starter_code`, `public_test_cases`, `private_test_cases` and `metadata`.
The tests are JSON lists of `{"input", "output", "testtype"}`; private ones may be compressed, as base64 of zlib of a
pickle of such a text, which is read by an unpickler that admits nothing but text. The answer begins in an open code
block, and what is run is the block (`extract_code.begun_code`). All tests must pass, public and private, each in a
sandbox of its own with the published limit of 6 s of processor time; `livecodebench_check` says what a right output is.

The file has no solutions, so that the answer of a problem is empty.
"""

import ast
import base64
import dataclasses
import io
import json
from pathlib import Path
import pickle
from typing import Any
import zlib

from archer_jax.tasks import Problem
from archer_jax.tasks.extract_code import FENCE
from archer_jax.tasks.extract_code import OPEN_FENCE
from archer_jax.tasks.extract_code import begun_code
from archer_jax.tasks.extract_code import defines
from archer_jax.tasks.extract_code import parse
from archer_jax.tasks.jsonl import read_entries
from archer_jax.tasks.jsonl import text_field
from archer_jax.tasks.protocol import render
from archer_jax.tasks.sandbox import Limits
from archer_jax.tasks.sandbox import run_python

# Of one test, as published; its input and output may have megabytes. Programs start a thread to have a larger stack.
LIMITS = Limits(wall_seconds=20, cpu_seconds=6, memory_bytes=4 << 30, processes=2, file_bytes=1 << 26)

_CHECK = Path(__file__).with_name('livecodebench_check.py')
_CLASS = 'Solution'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tests:
  """What the grader of a problem needs.

  Attributes:
    packed: public and private tests as the file has them, since those of a release unpacked may not fit into memory.
    method: of the class that is tested; None for a program.
  """

  packed: tuple[str, str]
  method: str | None


class _TextUnpickler(pickle.Unpickler):
  """Makes nothing but what pickles have of their own: texts, numbers and their collections."""

  def find_class(self, module: str, name: str) -> Any:
    raise pickle.UnpicklingError(f'the pickle asks for {module}.{name}, and nothing but text is admitted')


def read_problems(path: str | Path, tokenizer: Any = None) -> list[Problem]:
  """The problems of a file.

  Args:
    path: the file, such as test.jsonl of a release.
    tokenizer: see `protocol.render`.

  Raises:
    ValueError: a line that is not as above; the message names file, line and field.
  """
  problems = []
  for place, record in read_entries(path):
    question = text_field(place, record, 'question_content')
    starter = text_field(place, record, 'starter_code', may_be_empty=True)
    method = _method(place, text_field(place, record, 'metadata'))
    names = ('public_test_cases', 'private_test_cases')
    tests = Tests(packed=tuple(text_field(place, record, name) for name in names), method=method)
    count = sum(len(_checked(place, name, packed, method)) for name, packed in zip(names, tests.packed, strict=True))
    if not count:
      raise ValueError(f'{place} must have tests, got none')
    problems.append(Problem(prompt=render(_turn(question, starter), OPEN_FENCE, tokenizer), answer='', hidden=tests))
  return problems


def _turn(question: str, starter: str) -> str:
  if starter.strip():
    return f'{question}\n\nComplete this class:\n{OPEN_FENCE}{starter.rstrip()}\n{FENCE}'
  return f'{question}\n\nWrite a Python program that reads standard input and writes the answer to standard output.'


def _method(place: str, metadata: str) -> str | None:
  """The method that metadata names; None for a program."""
  try:
    method = json.loads(metadata).get('func_name')
  except (ValueError, AttributeError):
    raise ValueError(f'{place}: metadata must be a JSON object as a text, got {metadata[:80]!r}') from None
  if method is not None and not (isinstance(method, str) and method.isidentifier()):
    raise ValueError(f'{place}: func_name of metadata must be the name of a method, got {json.dumps(method)[:80]}')
  return method


def _checked(place: str, name: str, packed: str, method: str | None) -> list[dict[str, str]]:
  """The tests of a field, after a look at each."""
  try:
    tests = _unpack(packed)
  # A broken pickle may raise anything.
  except Exception as error:
    raise ValueError(f'{place}: {name} cannot be read: {error}') from None
  kind = 'stdin' if method is None else 'functional'
  for number, test in enumerate(tests, start=1):
    if not isinstance(test, dict) or not all(isinstance(test.get(part), str) for part in ('input', 'output')):
      raise ValueError(f'{place}: test {number} of {name} must have input and output as texts')
    if test.get('testtype') != kind:
      raise ValueError(
        f'{place}: testtype of test {number} of {name} must be {kind}, as metadata has '
        f'{"no func_name" if method is None else "a func_name"}, got {json.dumps(test.get("testtype"))[:80]}'
      )
  return tests


def _unpack(packed: str) -> list[dict[str, str]]:
  """The tests of a field, which is a JSON list or one that is compressed."""
  try:
    tests = json.loads(packed)
  except ValueError:
    text = _TextUnpickler(io.BytesIO(zlib.decompress(base64.b64decode(packed)))).load()
    if not isinstance(text, str):
      raise ValueError(f'a text must be compressed in it, got {type(text).__name__}') from None
    tests = json.loads(text)
  if not isinstance(tests, list):
    raise ValueError(f'it must be a list, got {type(tests).__name__}')
  return tests


def code_of(problem: Problem, answer: str) -> str:
  """The code of an answer: one that defines the class, or any program."""
  if problem.hidden.method is None:
    return begun_code(answer, _is_program)
  return begun_code(answer, lambda text: _is_program(text) and defines(text, _CLASS))


def _is_program(text: str) -> bool:
  """Whether a text is Python that does not end in a word; programs do end in calls."""
  body = parse(text)
  return bool(body) and not (isinstance(body[-1], ast.Expr) and not isinstance(body[-1].value, ast.Call))


def is_solved(problem: Problem, answer: str) -> bool:
  """Whether the code of the answer passes all tests, run in a sandbox."""
  code = code_of(problem, answer)
  check = _CHECK.read_text('utf-8')
  tests = (test for packed in problem.hidden.packed for test in _unpack(packed))
  programs = (
    f'{check}\ncheck({code!r}, {problem.hidden.method!r}, {test["input"]!r}, {test["output"]!r})\n' for test in tests
  )
  return all(run_python(program, limits=LIMITS).passed for program in programs)

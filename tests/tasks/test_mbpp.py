"""MBPP and its extended set: prompts, the code of answers, and the grader."""

import dataclasses
import json
from pathlib import Path
import textwrap

import pytest
from test_humaneval import Chat

from archer_jax.tasks import mbpp
from archer_jax.tasks.grading import grade
from archer_jax.tasks.sources import open_source

SAMPLE = Path(__file__).parent / 'published/mbpp.jsonl'
RECORD = json.loads(SAMPLE.read_text().splitlines()[1])
TESTS = [
  'assert is_not_prime(2) == False',
  'assert is_not_prime(10) == True',
  'assert is_not_prime(35) == True',
  'assert is_not_prime(37) == False',
]
BODY = """\
import math
def is_not_prime(n):
    return any(n % i == 0 for i in range(2, int(math.sqrt(n)) + 1))
"""
HELPED = """\
from math import isqrt
SMALLEST = 2
class Sieve:
    def has(self, n):
        return any(n % i == 0 for i in numbers(n))
def is_not_prime(n):
    return Sieve().has(n)
def numbers(n):
    return range(SMALLEST, isqrt(n) + 1)
"""


@pytest.fixture(scope='module')
def problem():
  problem = mbpp.read_problems(SAMPLE)[1]
  # Which some of the published ones have.
  return dataclasses.replace(problem, hidden=dataclasses.replace(problem.hidden, imports=['import math']))


def write(path, *records):
  path.write_text(''.join(f'{json.dumps(record)}\n' for record in records))
  return path


def test_prompts():
  assert RECORD['task_id'] == 3
  turn = '\n'.join([RECORD['prompt'], 'Your code should pass these tests:', *TESTS])
  _, plain, *_ = mbpp.read_problems(SAMPLE)
  assert plain.prompt == f'{turn}\n\n```python\n'
  _, chat, *_ = mbpp.read_problems(SAMPLE, Chat())
  assert chat.prompt == (
    f'<|startoftext|><|start_header_id|>user<|end_header_id|>\n\n{turn}<|eot_id|>'
    '<|start_header_id|>assistant<|end_header_id|>\n\n```python\n'
  )


def test_published_solutions_pass_and_empty_answers_do_not():
  source = open_source(f'mbpp:{SAMPLE}')
  problems = source.problems(None, 0)
  # The first call of a test is not always that of the function, and one imports something for its tests.
  assert {'similar_elements', 'volume_sphere'} <= {problem.hidden.name for problem in problems}
  assert any(problem.hidden.imports for problem in problems)
  answers = [(problem, problem.answer) for problem in problems] + [(problem, '') for problem in problems]
  assert grade(source, answers) == [(True,)] * len(problems) + [(False,)] * len(problems)
  assert (source.gen_length, source.chat, source.also) == (256, False, {})


@pytest.mark.parametrize(
  'answer',
  [
    f'{BODY}```',
    BODY,
    f'{BODY}```\nThis looks for a divisor.\n```python\nis_not_prime()\n```',
    f'```python\n{BODY}```',
    f'```\n{BODY}',
    f'```{{.python}} \n{BODY}```',
    f'Sure, here it is:\n```python\n{BODY}```\nIt looks for a divisor.',
    f'Run it:\n```sh\npython prime.py\n```\n```python\n{BODY}```',
    f'Here is the function:\n\n{BODY}\nIt looks for a divisor.',
    f'{BODY}\nDone',
    BODY.replace('\n', '\r\n'),
    BODY.replace('\n', '\r'),
    textwrap.indent(BODY, '    '),
    f'1. So:\n\n   ```python\n{textwrap.indent(BODY, "   ")}   ```\n2. Done.',
    HELPED,
    # What stands beside it, right or wrong.
    f'n = int(input())\n{BODY}print(is_not_prime(n))\n',
    f'{BODY}assert is_not_prime(2)\n',
    f'{BODY}if __name__ == "__main__":\n    main()\n',
    f'{BODY}def is_prime(n):\n    return undefined\nZERO = 1 / 0\n',
    f'{BODY}def main():\n    print(is_not_prime(',
    f'{BODY}\n# Example\nis_not_prime(',
    'is_not_prime = lambda n: n in (10, 35)',
    f'from __future__ import annotations\n{BODY}',
    'from functools import cache\n@cache\ndef is_not_prime(n):\n    return n in (10, 35)',
  ],
)
def test_right_functions_are_right_however_they_are_written(problem, answer):
  # As a program of the sandbox would, without the cost of one.
  exec(mbpp.program(problem, answer, problem.hidden.tests), {'__name__': '__main__'})


@pytest.mark.parametrize(
  'answer',
  [
    '',
    '```',
    BODY.replace('is_not_prime', 'is_prime'),
    BODY.replace('any', 'all'),
    BODY[:-4],
    BODY.replace('return', 'return return'),
    f'{BODY.replace("any", "all")}```\n```python\n{BODY}```',
    'raise SystemExit(0)',
    'The function looks for a divisor.',
    '(' * 10_000,
  ],
)
def test_wrong_functions_stay_wrong(problem, answer):
  with pytest.raises((Exception, SystemExit)):
    exec(mbpp.program(problem, answer, problem.hidden.tests), {})


def test_a_function_that_leaves_early_is_wrong(problem):
  assert not mbpp.is_solved(problem, 'def is_not_prime(n):\n    exit(0)')


def test_both_scores_of_the_extended_set(tmp_path):
  records = [RECORD | {'test_case_list': [*TESTS, 'assert is_not_prime(49) == True']}]
  source = open_source(f'mbpp_et:{write(tmp_path / "et.jsonl", *records)}')
  (problem,) = source.problems(None, 0)
  plain, *_ = (p for p in mbpp.read_problems(SAMPLE) if p.hidden.task_id == RECORD['task_id'])
  assert (problem.prompt, problem.answer) == (plain.prompt, plain.answer)
  answers = [problem.answer, 'def is_not_prime(n):\n    return n in (10, 35)', '']
  assert list(source.also) == ['et']
  assert grade(source, [(problem, answer) for answer in answers]) == [(True, True), (True, False), (False, False)]


@pytest.mark.parametrize(
  ('task', 'changes', 'message'),
  [
    ('mbpp', {'prompt': None}, 'line 2: prompt must be a text that is not empty, got null'),
    ('mbpp', {'task_id': ...}, 'line 2 must have the field task_id, got prompt, code, test_imports, test_list'),
    ('mbpp', {'code': ...}, 'line 2 must have the field code, got task_id, prompt'),
    ('mbpp', {'test_list': ...}, 'line 2 must have the field test_list'),
    ('mbpp', {'test_list': []}, r'line 2: test_list must be a list of texts that is not empty, got \[\]'),
    ('mbpp', {'test_list': 'assert f()'}, 'line 2: test_list must be a list of texts that is not empty, got "assert'),
    (
      'mbpp',
      {'test_list': ['assert f(1)']},
      'line 2: the first of test_list must call a function of code, got',
    ),
    ('mbpp', {'test_list': ['assert (']}, 'line 2: the first of test_list must call a function of code'),
    ('mbpp', {'test_imports': [3]}, r'line 2: test_imports must be a list of texts, got \[3\]'),
    ('mbpp_et', {}, 'line 2 must have the field test_case_list'),
    ('mbpp_et', {'test_case_list': []}, 'line 2: test_case_list must be a list of texts that is not empty'),
  ],
)
def test_bad_lines(tmp_path, task, changes, message):
  bad = {key: value for key, value in (RECORD | changes).items() if value is not ...}
  path = write(tmp_path / 'bad.jsonl', RECORD | {'test_case_list': TESTS}, bad)
  with pytest.raises(ValueError, match=rf'bad\.jsonl {message}'):
    open_source(f'{task}:{path}')


def test_the_published_list_is_read_too(tmp_path):
  path = tmp_path / 'sanitized-mbpp.json'
  path.write_text(json.dumps([RECORD, RECORD | {'test_list': []}]))
  with pytest.raises(ValueError, match=r'sanitized-mbpp\.json entry 2: test_list must be'):
    mbpp.read_problems(path)
  path.write_text(json.dumps([RECORD], indent=1))
  assert mbpp.read_problems(path)[0].prompt == mbpp.read_problems(SAMPLE)[1].prompt

"""LiveCodeBench on made-up problems in its published format: tests as they are packed, prompts, and the grader."""

import base64
import json
import os
import pickle
import textwrap
import zlib

import pytest

from archer_jax.tasks import livecodebench
from archer_jax.tasks.livecodebench_check import run_method
from archer_jax.tasks.livecodebench_check import same_output
from archer_jax.tasks.livecodebench_check import same_value
from archer_jax.tasks.sources import open_source


def packed(value):
  """As private tests are published."""
  return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def listed(kind, *pairs):
  return json.dumps([{'input': given, 'output': expected, 'testtype': kind} for given, expected in pairs])


STARTER = 'class Solution:\n    def pairs(self, nums: List[int], k: int) -> int:\n        '
PAIRS = {
  'question_title': 'pairs',
  'question_content': 'Count the pairs of nums whose sum is k.',
  'platform': 'leetcode',
  'question_id': '1',
  'difficulty': 'easy',
  'starter_code': STARTER,
  'public_test_cases': listed('functional', ('[1, 2, 3]\n4', '1')),
  'private_test_cases': packed(listed('functional', ('[2, 2, 2]\n4', '3'), ('[]\n0', '0'))),
  'metadata': '{"func_name": "pairs"}',
}
SUM = {
  'question_title': 'sum',
  'question_content': 'Read n and n numbers. Print each doubled, and then half of their sum.',
  'platform': 'atcoder',
  'question_id': '2',
  'difficulty': 'medium',
  'starter_code': '',
  'public_test_cases': listed('stdin', ('2\n1 2\n', '2\n4\n1.5\n')),
  'private_test_cases': listed('stdin', ('1\n4', '8\n2')),
  'metadata': '{}',
}


def write(path, *records):
  path.write_text(''.join(f'{json.dumps(record)}\n' for record in records))
  return path


@pytest.fixture(scope='module')
def problems(tmp_path_factory):
  path = write(tmp_path_factory.mktemp('release') / 'test.jsonl', PAIRS, SUM)
  source = open_source(f'livecodebench:{path}')
  assert source.gen_length == 256
  return source.problems(None, 0)


def test_prompts(problems):
  pairs, program = (problem.prompt for problem in problems)
  assert pairs == (
    f'{PAIRS["question_content"]}\n\nComplete this class:\n```python\n{STARTER.rstrip()}\n```\n\n```python\n'
  )
  assert program == (
    f'{SUM["question_content"]}\n\nWrite a Python program that reads standard input and writes the answer to standard '
    'output.\n\n```python\n'
  )


CLASS = """\
class Solution:
    def pairs(self, nums: List[int], k: int) -> int:
        return count(nums, k)

def count(nums, k):
    return sum(a + b == k for a, b in combinations(nums, 2))
"""
PROGRAM = """\
n = int(input())
a = list(map(int, input().split()))
for v in a:
    print(2 * v)
print(sum(a) / 2)
"""


@pytest.mark.parametrize(
  ('row', 'answer'),
  [
    (0, f'{CLASS}```\nDone.'),
    (0, f'Sure:\n```python\nfrom typing import List\n{CLASS}```'.replace('\n', '\r\n')),
    (1, f'{PROGRAM}```'),
    (1, f'Sure, here it is:\n```python\n{PROGRAM}```\nIt reads the numbers.'),
    (1, 'def main():\n    data = open(0).read().split()[1:]\n    print(*[2 * int(v) for v in data], sep="\\n")\n'
        '    print(f"{sum(map(int, data)) / 2:.2f} ")\n    exit()\nif __name__ == "__main__":\n    main()\n'),
    (1, f'import threading\ndef main():\n{textwrap.indent(PROGRAM, "    ")}\nthreading.stack_size(1 << 27)\n'
        'thread = threading.Thread(target=main)\nthread.start()\nthread.join()'),
    (1, 'n, *a = map(int, sys.stdin.buffer.read().split())\nos_write = lambda t: sys.stdout.buffer.write(t.encode())\n'
        'for v in a: os_write(f"{2 * v}\\n")\nos_write(str(sum(a) / 2))'),
  ],
)  # fmt: skip
def test_right_answers(problems, row, answer):
  assert livecodebench.is_solved(problems[row], answer), livecodebench.code_of(problems[row], answer)


@pytest.mark.parametrize(
  ('row', 'answer'),
  [
    (0, ''),
    # Right for the public test only.
    (0, CLASS.replace('combinations(nums, 2)', 'combinations(set(nums), 2)')),
    (0, CLASS.replace('class Solution', 'class Answer')),
    (0, CLASS.replace('def pairs', 'def find_pairs')),
    (0, CLASS[:-20]),
    (1, ''),
    (1, PROGRAM.replace('sum(a) / 2', 'sum(a) // 2')),
    (1, PROGRAM.replace('2 * v', '2 * v, end=" "')),
    (1, f'{PROGRAM}exit(1)'),
    (1, f'{PROGRAM}open(__import__("missing"))'),
    (1, 'The program reads the numbers.'),
  ],
)
def test_wrong_answers(problems, row, answer):
  assert not livecodebench.is_solved(problems[row], answer)


def test_a_test_has_a_limit_of_its_own(problems, monkeypatch):
  limits = []
  monkeypatch.setattr(livecodebench, 'run_python', lambda program, limits: seen(program, limits))

  def seen(program, given):
    limits.append((given.cpu_seconds, 'check(' in program))
    return type('Outcome', (), {'passed': True})

  assert livecodebench.is_solved(problems[0], CLASS)
  assert limits == [(6, True)] * 3


@pytest.mark.parametrize(
  ('found', 'expected', 'same'),
  [
    ('a b\n', 'a b', True),
    ('  a b \r\n c\n\n', 'a b\nc', True),
    ('1 2.50', '1.0 2.5', True),
    ('1e3', '1000', True),
    ('a 1.0', 'a 1', False),
    ('1  2', '1 2', True),
    ('a  b', 'a b', False),
    ('1.0000001', '1', False),
    ('1\n2', '1 2', False),
    ('1', '1\n2', False),
    ('', '1', False),
    ('nan', 'NaN', False),
    ('YES', 'Yes', False),
  ],
)
def test_outputs_that_are_the_same(found, expected, same):
  assert same_output(found, expected) is same


@pytest.mark.parametrize(
  ('found', 'expected', 'same'),
  [
    ([1, 2], '[1, 2]', True),
    ((1, 2), '[1, 2]', True),
    (1.0, '1', True),
    (True, 'true', True),
    (None, 'null', True),
    ('a', '"a"', True),
    ([2, 1], '[1, 2]', False),
    ('1', '1', False),
  ],
)
def test_values_that_are_the_same(found, expected, same):
  assert same_value(found, expected) is same


def test_arguments_are_read_line_by_line():
  code = 'class Solution:\n  def f(self, a, b, c):\n    return [a, b, c]'
  assert run_method(code, 'f', '[1, [2]]\n"x\\ny"\nnull\n') == [[1, [2]], 'x\ny', None]


class Hostile:
  """A pickle that runs a command where it is loaded."""

  def __reduce__(self):
    return (os.mkdir, ('made-by-a-pickle',))


@pytest.mark.parametrize(
  ('record', 'changes', 'message'),
  [
    (PAIRS, {'private_test_cases': packed(Hostile())}, 'private_test_cases cannot be read: .* asks for .*mkdir'),
    (PAIRS, {'private_test_cases': packed([])}, 'private_test_cases cannot be read: a text must be .* got list'),
    (PAIRS, {'private_test_cases': packed('{}')}, 'private_test_cases cannot be read: it must be a list, got dict'),
    (PAIRS, {'private_test_cases': 'eJw='}, 'private_test_cases cannot be read: Error -5'),
    (PAIRS, {'private_test_cases': 'nothing'}, 'private_test_cases cannot be read: '),
    (PAIRS, {'public_test_cases': '[{"input": "1"}]'}, 'test 1 of public_test_cases must have input and output'),
    (SUM, {'metadata': '{"func_name": "f"}'}, 'testtype of test 1 of public_test_cases must be functional, .*"stdin"'),
    (PAIRS, {'metadata': '{}'}, 'testtype of test 1 of public_test_cases must be stdin, as metadata has no func_name'),
    (PAIRS, {'metadata': '{"func_name": "a b"}'}, 'func_name of metadata must be the name of a method, got "a b"'),
    (PAIRS, {'metadata': 'x'}, "metadata must be a JSON object as a text, got 'x'"),
    (PAIRS, {'metadata': '[]'}, r"metadata must be a JSON object as a text, got '\[\]'"),
    (PAIRS, {'question_content': ''}, 'question_content must be a text that is not empty'),
    (PAIRS, {'starter_code': None}, 'starter_code must be a text, got null'),
  ],
)  # fmt: skip
def test_bad_lines(tmp_path, monkeypatch, record, changes, message):
  monkeypatch.chdir(tmp_path)
  path = write(tmp_path / 'bad.jsonl', SUM, record | changes)
  with pytest.raises(ValueError, match=rf'bad\.jsonl line 2: {message}') as error:
    open_source(f'livecodebench:{path}')
  assert os.listdir() == ['bad.jsonl'] and '\n' not in str(error.value)


def test_a_problem_without_tests(tmp_path):
  path = write(tmp_path / 'bad.jsonl', SUM | dict.fromkeys(('public_test_cases', 'private_test_cases'), '[]'))
  with pytest.raises(ValueError, match=r'bad\.jsonl line 1 must have tests, got none'):
    open_source(f'livecodebench:{path}')

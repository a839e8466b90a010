"""Countdown: the exact grader, the search for a solution, and the public file."""

from fractions import Fraction
import json
from pathlib import Path
import re

import numpy as np
import pytest

from archer_jax.tasks import Problem
from archer_jax.tasks import countdown
from archer_jax.tasks import problem_at

PUBLIC = Path(__file__).with_name('countdown3_public_a.jsonl')


def problem(*numbers, target):
  return Problem(prompt='', answer='', hidden=(numbers, target))


@pytest.mark.parametrize(
  'answer',
  [
    '100-93=7,30-7=23',
    '30-(100-93)',
    '30-100+93',
    '(30+93)-100=23',
    ' 93 - 100 = -7, -7 + 30 = 23 ',
    '((30))-(100-(93))\n',
  ],
)
def test_right_answers(answer):
  assert countdown.is_solved(problem(30, 100, 93, target=23), answer)


@pytest.mark.parametrize(
  'answer',
  [
    '',
    '23',
    '100-93=7,30-7=22',
    '100-93=8,30-7=23',
    '100-93=7,30-7=23,23*1=23',
    '100-93=7,7+16=23',
    '30-7=23,100-93=7',
    '93-70=23',
    '100-30=70,93-70=23,',
    '30-(100-93)=24',
    '30-(100-93',
    '30-100)+(93',
    '30-(100-93))',
    '30 (100-93)',
    '30-()(100-93)',
    '30--(100-93)',
    '-100+93+30',
    '+30-100+93',
    '30-100+93+0',
    '030-100+93',
    '30-100+9 3',
    '30-100+93=',
    '30.0-100+93',
    '93**1+30-100',
    '30-\u0661\u0660\u0660+93',
    '__import__("os").abort()',
    '(' * 100_000 + '30-100+93' + ')' * 99_999,
    '9' * 100_000,
    '1/0',
  ],
)
def test_wrong_answers(answer):
  assert not countdown.is_solved(problem(30, 100, 93, target=23), answer)


def test_every_number_counts_as_often_as_it_is_given():
  pair = problem(5, 5, target=10)
  assert countdown.is_solved(pair, '5+5=10')
  assert countdown.is_solved(pair, '5+5')
  assert not countdown.is_solved(problem(5, 7, target=10), '5+5')
  assert not countdown.is_solved(problem(5, 5, 5, target=10), '5+5=10')
  # A result may be taken up once.
  assert not countdown.is_solved(problem(2, 3, 9, target=10), '2+3=5,5+5=10')


def test_fractions_are_exact_and_division_by_zero_is_wrong():
  assert countdown.is_solved(problem(3, 3, 8, 8, target=24), '8/(3-8/3)')
  assert not countdown.is_solved(problem(1, 3, 3, target=1), '1/3*4')
  assert countdown.is_solved(problem(1, 3, 3, target=1), '1/3*3')
  for answer in ('4/(2-2)', '2-2=0,4/0=0'):
    assert not countdown.is_solved(problem(2, 2, 4, target=0), answer)


def random_expression(rng, numbers):
  if len(numbers) == 1:
    return str(numbers[0])
  cut = rng.integers(1, len(numbers))
  left, right = random_expression(rng, numbers[:cut]), random_expression(rng, numbers[cut:])
  text = f'{left}{rng.choice([*"+-*/"])}{right}'
  return f'({text})' if rng.random() < 0.5 else text


def test_expressions_have_the_value_that_python_gives_them():
  rng = np.random.default_rng(0)
  checked = 0
  for _ in range(2000):
    numbers = rng.integers(0, 9, size=rng.integers(2, 6)).tolist()
    expression = random_expression(rng, numbers)
    try:
      value = eval(re.sub('([0-9]+)', r'Fraction(\1)', expression))
    except ZeroDivisionError:
      value = None
    if value is not None and value.denominator == 1 and value >= 0:
      assert countdown.is_solved(problem(*numbers, target=int(value)), expression), expression
      checked += 1
    for wrong in {0, 1, 7, 40} - {value}:
      assert not countdown.is_solved(problem(*numbers, target=wrong), expression), expression
  assert checked > 500


def values(numbers):
  """Everything that can be reached, negative numbers and fractions on the way included."""
  if len(numbers) == 1:
    return set(numbers)
  found = set()
  for i, a in enumerate(numbers):
    for j, b in enumerate(numbers):
      if i != j:
        rest = [number for k, number in enumerate(numbers) if k not in (i, j)]
        for value in (a + b, a - b, a * b, *([a / b] if b else [])):
          found |= values([*rest, value])
  return found


def test_search_finds_a_solution_where_there_is_one():
  rng = np.random.default_rng(1)
  solvable = 0
  for _ in range(40):
    numbers = rng.integers(0, 10, size=rng.integers(2, 5)).tolist()
    reachable = values([Fraction(number) for number in numbers])
    for target in range(30):
      answer = countdown.solution(numbers, target)
      assert (answer is not None) == (target in reachable), (numbers, target)
      if answer is not None:
        solvable += 1
        assert countdown.is_solved(problem(*numbers, target=target), answer), (numbers, target, answer)
  assert solvable > 200
  # Only through a fraction.
  assert countdown.solution([3, 3, 8, 8], 24) == '8/(3-(8/3))'


def test_generated_problems_use_every_operation():
  answers = [problem_at(countdown, 0, index).answer for index in range(300)]
  for symbol in '+-*/':
    assert sum(symbol in answer for answer in answers) > 5
  assert {problem_at(countdown, 0, index, level=0.5).difficulty for index in range(20)} == {2}


def test_public_file():
  problems = countdown.read_problems(PUBLIC)
  records = [json.loads(line) for line in PUBLIC.read_text().splitlines()]
  assert len(problems) == len(records) == 128
  for read, record in zip(problems, records, strict=True):
    assert read.prompt == f'countdown:{record["input"]}={record["output"]}\n'
    assert countdown.is_solved(read, read.answer)
    assert len(read.answer) < countdown.GEN_LENGTH


@pytest.mark.parametrize(
  ('line', 'message'),
  [
    ('{"input": "1,2"}', 'line 2 must have the field output, got input$'),
    ('{"input": [1, 2], "output": "3"}', r'line 2: input must be a text that is not empty, got \[1, 2\]'),
    ('{"input": "1,2", "output": 3}', 'line 2: output must be a text that is not empty, got 3'),
    ('{"input": "1;2", "output": "3"}', "line 2: input must be 2 to 5 numbers with commas between them, got '1;2'"),
    ('{"input": "3", "output": "3"}', 'line 2: input must be 2 to 5 numbers'),
    ('{"input": "1,2,3,4,5,6", "output": "3"}', 'line 2: input must be 2 to 5 numbers'),
    ('{"input": "1,2", "output": "three"}', "line 2: output must be a number, got 'three'"),
    ('{"input": "1,2", "output": "40"}', 'line 2: output 40 cannot be reached from input 1,2'),
  ],
)
def test_bad_lines(tmp_path, line, message):
  path = tmp_path / 'bad.jsonl'
  path.write_text(f'{{"input": "1,2", "output": "3"}}\n{line}\n')
  with pytest.raises(ValueError, match=f'bad.jsonl {message}'):
    countdown.read_problems(path)

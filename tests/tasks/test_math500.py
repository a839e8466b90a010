"""MATH-500 on made-up problems in its published format."""

import json
import sys

import pytest

from archer_jax.tasks import math500
from archer_jax.tasks.math_equal import equal
from archer_jax.tasks.sources import open_source

RECORD = {
  'problem': 'What is half of $\\frac{3}{2}$?',
  'solution': 'Half of it is $\\frac{3}{2} \\cdot \\frac{1}{2} = \\boxed{\\frac{3}{4}}$.',
  'answer': '\\frac{3}{4}',
  'subject': 'Prealgebra',
  'level': 1,
  'unique_id': 'test/prealgebra/1.json',
}


def write(path, *records):
  path.write_text('\n'.join(json.dumps(record) for record in records))
  return f'math500:{path}'


@pytest.fixture(scope='module')
def problem(tmp_path_factory):
  (problem,) = open_source(write(tmp_path_factory.mktemp('math') / 'test.jsonl', RECORD)).problems(None, 0)
  return problem


def test_prompt(problem):
  assert problem.prompt == (
    f'{RECORD["problem"]}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}.\n\n'
  )


@pytest.mark.parametrize(
  ('answer', 'solved'),
  [
    (RECORD['solution'], True),
    ('\\boxed{1} is wrong, so \\boxed{ \\frac{3}{4} }.', True),
    ('', False),
    ('\\frac{3}{4}', False),
    ('\\boxed{}', False),
    ('\\boxed{\\frac{3}{4}', False),
    # Not the same text, which takes a process.
    ('It is $\\boxed{0.75}$.', True),
  ],
)
def test_the_last_box_decides(problem, answer, solved):
  assert math500.is_solved(problem, answer) is solved


@pytest.mark.parametrize(
  ('right', 'other', 'same'),
  [
    ('\\frac{14}{3}', '14/3', True),
    ('\\frac{14}{3}', '\\dfrac{28}{6}', True),
    ('\\frac{14}{3}', '4.67', False),
    ('11\\sqrt2', '11 \\sqrt{2}', True),
    ('1,234', '1234', True),
    ('\\left( 3, \\frac{\\pi}{2} \\right)', '(3, \\pi/2)', True),
    ('\\left( 3, \\frac{\\pi}{2} \\right)', '(\\pi/2, 3)', False),
    ('[-2,7]', 'x \\in [-2, 7]', True),
    ('[-2,7]', '(-2, 7)', False),
    ('90^\\circ', '90', True),
    ('\\text{Evelyn}', 'Evelyn', True),
    ('\\text{Evelyn}', '\\text{Carla}', False),
    ('6 - 5i', '-5i + 6', True),
    ('2x + 3', '3 + 2x', True),
    ('p - q', 'q - p', False),
    ('\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}', '\\begin{pmatrix}1\\\\2\\end{pmatrix}', True),
    ('\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}', '\\begin{pmatrix}2\\\\1\\end{pmatrix}', False),
    ('18', '19', False),
    ('18', '\\frac{', False),
  ],
)
def test_answers_that_mean_the_same(right, other, same):
  assert equal(right, other) is same


def test_a_number_that_no_computer_holds(problem, monkeypatch):
  monkeypatch.setattr(math500, 'CPU_SECONDS', 1)
  assert not math500.is_solved(problem, '\\boxed{9^{9^{9^{9}}}}')


def test_a_library_that_does_not_work(problem, monkeypatch, tmp_path):
  broken = tmp_path / 'broken.py'
  broken.write_text('raise ImportError("no antlr4")')
  monkeypatch.setattr(math500, '_EQUAL', broken)
  with pytest.raises(RuntimeError, match=r'(?s)math-verify does not work here: .*no antlr4'):
    math500.is_solved(problem, '\\boxed{5}')


@pytest.mark.parametrize('field', ['problem', 'solution', 'answer'])
def test_bad_lines(tmp_path, field):
  bad = {name: value for name, value in RECORD.items() if name != field}
  with pytest.raises(ValueError, match=rf'bad\.jsonl line 2 must have the field {field}, got'):
    open_source(write(tmp_path / 'bad.jsonl', RECORD, bad))


def test_a_missing_package_is_told(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'math_verify', None)
  with pytest.raises(ValueError, match=r"math500 needs the package math-verify: pip install 'archer_jax\[eval\]'"):
    open_source(write(tmp_path / 'test.jsonl', RECORD))

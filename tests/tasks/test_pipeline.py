"""Pipelines: the two styles, and the grader with the real sandbox."""

import itertools
import json

import pytest

from archer_jax.tasks import pipeline
from archer_jax.tasks import problem_at

LINES = [*pipeline.OPERATIONS, *pipeline.REORDERINGS]
INPUTS = ([12, 45, 78, 30], [7, 7, 99], [])


def numbers(line):
  return range(line.numbers[0], line.numbers[1] + 1) if line.numbers else (0,)


def written(line, n, old, style):
  return line.styles[style].format(x=old, n=n)


@pytest.mark.parametrize('line', LINES, ids=lambda line: line.text)
def test_both_styles_do_what_the_description_says(line):
  for n in numbers(line):
    # As a function, whose first line this is.
    programs = [f'def solve(a):\n    b = {written(line, n, "a", style)}\n    return b' for style in (0, 1)]
    assert programs[0] != programs[1]
    for program in programs:
      exec(program, namespace := {})
      assert [namespace['solve'](list(row)) for row in INPUTS] == [line.apply(list(row), n) for row in INPUTS]


@pytest.mark.parametrize('line', LINES, ids=lambda line: line.text)
def test_both_styles_take_equally_many_tokens(line, count_tokens):
  for n, (old, new) in itertools.product(numbers(line), itertools.pairwise('abcdef')):
    lengths = {count_tokens(f'    {new} = {written(line, n, old, style)}\n') for style in (0, 1)}
    assert len(lengths) == 1


def test_answers_use_both_styles_and_all_kinds_of_lines():
  problems = [problem_at(pipeline, 3, index, worked_examples=0) for index in range(400)]
  for line in LINES:
    for style in (0, 1):
      # Up to the number or the name.
      begin = line.styles[style].partition('{')[0]
      assert sum(f' = {begin}' in problem.answer for problem in problems) > 40
  # Not one style for the whole of an answer.
  mixed = [p for p in problems if ' for v' in p.answer and ('list(map(' in p.answer or 'list(filter(' in p.answer)]
  assert len(mixed) > 100


def in_other_style(answer):
  """The answer with every line in the style that it is not in."""
  body = answer.splitlines()
  for at, (old, new) in enumerate(itertools.pairwise('abcdef'), start=1):
    if not body[at].startswith(f'    {new} = '):
      break
    for line, n in [(kind, n) for kind in LINES for n in numbers(kind)]:
      texts = [f'    {new} = {written(line, n, old, style)}' for style in (0, 1)]
      if body[at] in texts:
        body[at] = texts[1 - texts.index(body[at])]
        break
  return '\n'.join(body)


@pytest.mark.parametrize('count', [4, pytest.param(40, marks=pytest.mark.slow)])
def test_grader_in_the_sandbox(count):
  for index in range(count):
    problem = problem_at(pipeline, 4, index)
    other = in_other_style(problem.answer)
    assert other.count('\n') == problem.answer.count('\n')
    assert not set(other.splitlines()[1:-1]) & set(problem.answer.splitlines())
    assert pipeline.is_solved(problem, problem.answer)
    assert pipeline.is_solved(problem, other)
    # The line before the last is returned, so that the last one does nothing.
    assert not pipeline.is_solved(problem, problem.answer[:-1] + 'abcdef'[problem.difficulty - 1])


@pytest.mark.parametrize('answer', ['', 'def solve(a):', 'raise SystemExit(0)', 'solve = None', 'x\x00', '\ud800'])
def test_other_answers_fail(answer):
  assert not pipeline.is_solved(problem_at(pipeline, 4, 0), answer)


def test_shown_examples_are_among_the_tests():
  problem = problem_at(pipeline, 4, 1)
  shown = [line for line in problem.prompt.splitlines() if line.startswith('solve(')][-2:]
  assert shown == [f'solve({json.dumps(row)}) == {json.dumps(result)}' for row, result in problem.hidden[:2]]

"""Many answers at a time."""

import threading

import pytest

from archer_jax.tasks import Problem
from archer_jax.tasks import grading
from archer_jax.tasks.grading import grade
from archer_jax.tasks.sources import Source


def source_of(is_solved, **also):
  return Source(name='sums', problems=None, is_solved=is_solved, gen_length=16, also=also)


def problems(count):
  return [Problem(prompt='', answer=str(number)) for number in range(count)]


def test_verdicts_of_all_graders_in_order():
  source = source_of(lambda problem, text: text == problem.answer, even=lambda problem, text: int(text) % 2 == 0)
  answers = list(zip(problems(20), ['0', '7', *map(str, range(2, 20))], strict=True))
  assert grade(source, answers) == [(number != 1, number % 2 == 0 and number != 1) for number in range(20)]
  assert grade(source, []) == []


def test_as_many_at_a_time_as_there_are_processors(monkeypatch):
  monkeypatch.setattr(grading, 'WORKERS', 3)
  # Passes only where three graders wait for one another.
  barrier = threading.Barrier(3, timeout=60)
  source = source_of(lambda problem, text: barrier.wait() >= 0)
  assert grade(source, [(problem, '') for problem in problems(6)]) == [(True,)] * 6


def test_a_grader_that_fails():
  def fail(problem, text):
    raise RuntimeError('a program cannot be run in a sandbox here: no namespaces')

  with pytest.raises(RuntimeError, match='no namespaces'):
    grade(source_of(fail), [(problem, '') for problem in problems(3)])

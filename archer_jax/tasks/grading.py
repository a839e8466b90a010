"""Grades answers, several at a time.

A grader that runs a program waits for a process of its own, and so a thread for each processor keeps all of them busy.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
import itertools
import os

from archer_jax.tasks import Problem
from archer_jax.tasks.sources import Source

WORKERS = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


def grade(source: Source, answers: Sequence[tuple[Problem, str]]) -> list[tuple[bool, ...]]:
  """The verdicts on answers.

  Args:
    source: whose graders decide.
    answers: problems with a text each.

  Returns:
    For each answer what `source.is_solved` says, and then the graders of `source.also` in their order.
  """
  graders = (source.is_solved, *source.also.values())
  jobs = itertools.product(answers, graders)
  with ThreadPoolExecutor(WORKERS) as pool:
    verdicts = pool.map(lambda job: bool(job[1](*job[0])), jobs)
    return [tuple(itertools.islice(verdicts, len(graders))) for _ in answers]

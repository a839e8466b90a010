"""The examples of docs/suite.md are what the generators give."""

import importlib
from pathlib import Path
import re

import pytest

from archer_jax.tasks import EVALUATION_SEED
from archer_jax.tasks import problem_at
from archer_jax.tasks.sources import GENERATED

PAGE = (Path(__file__).parents[2] / 'docs/suite.md').read_text()


@pytest.mark.parametrize('task', GENERATED)
def test_example(task):
  (section,) = re.findall(rf'^## {task}\n(.*?)^## ', PAGE, re.MULTILINE | re.DOTALL)
  (index,) = re.findall(r'Index\s(\d+):', section)
  question, answer = re.findall(r'^```text\n(.*?)\n```$', section, re.MULTILINE | re.DOTALL)
  problem = problem_at(
    importlib.import_module(f'archer_jax.tasks.{task}'), EVALUATION_SEED, int(index), worked_examples=0
  )
  assert question == problem.prompt.rstrip('\n')
  assert answer == problem.answer


def test_stream():
  assert f'problems of the stream {EVALUATION_SEED}' in PAGE

"""Text tasks with a seeded generator, a prompt builder, an exact grader and a measure of difficulty.

A task is a module of this folder with these functions:

- `make_example(rng) -> Example`: one random problem;
- `make_prompt(problem) -> str`: the text that a model reads;
- `is_solved(prompt, answer) -> bool`: whether a text answers the prompt;
- `read_problems(path) -> [(problem, reference answer)]`: an evaluation file in its published format;
- `group(problem) -> str`: the class of problems that its result is reported with.
"""

from collections.abc import Collection
from collections.abc import Iterator
import dataclasses
import itertools
from types import ModuleType

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
  """One problem as text.

  Attributes:
    prompt: what the model reads.
    answer: one right answer; there may be others, so only the task's `is_solved` judges.
    difficulty: how hard it is, in the task's own measure; larger is harder.
  """

  prompt: str
  answer: str
  difficulty: int


def example_at(task: ModuleType, seed: int, index: int, excluded: Collection[str] = ()) -> Example:
  """Example `index` of the task's stream `seed`.

  Every index has a generator of its own, so that a stream can be entered anywhere: a resumed training sees what an
  uninterrupted one would have seen.

  Args:
    task: the task's module.
    seed: names the stream, not negative.
    index: position in the stream, from 0.
    excluded: prompts that must not come, such as those of an evaluation set; another problem is drawn instead.

  Returns:
    The example.
  """
  rng = np.random.default_rng((seed, index))
  while (example := task.make_example(rng)).prompt in excluded:
    pass
  return example


def examples_from(task: ModuleType, seed: int, start: int, excluded: Collection[str] = ()) -> Iterator[Example]:
  """The endless stream `seed` of the task from index `start` on; see `example_at`."""
  return (example_at(task, seed, index, excluded) for index in itertools.count(start))

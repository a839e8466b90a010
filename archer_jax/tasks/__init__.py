"""Text tasks with a seeded generator, a prompt with worked examples, an exact grader and a measure of difficulty.

A task is a module of this folder with these names:

- `make_problem(rng, level) -> Problem`: one random problem; level 1 is the task itself, less is easier;
- `is_solved(problem, answer) -> bool`: whether a text answers the problem, read as `plain` makes it;
- `WORKED_EXAMPLES`: how many solved problems stand before the question of a standard prompt;
- `GEN_LENGTH`: tokens of the bundled tokenizer that hold every answer and an end token.
"""

from collections.abc import Collection
from collections.abc import Iterable
import dataclasses
from types import ModuleType
from typing import Any

import numpy as np

# Streams of problems by seed: what is trained on, what is watched in training, and from where evaluations count.
TRAINING_SEED, HELD_OUT_SEED, EVALUATION_SEED = 0, 1, 2
# Between a worked example and what follows it.
SEPARATOR = '\n\n'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
  """One problem as text.

  Attributes:
    prompt: what the model reads; the answer begins where it ends.
    answer: one right answer; there may be others, so only the task's `is_solved` judges.
    difficulty: how hard it is, in the task's own measure; larger is harder.
    hidden: what only the grader sees.
  """

  prompt: str
  answer: str
  difficulty: int = 0
  hidden: Any = None


def problem_at(
  task: ModuleType,
  seed: int,
  index: int,
  *,
  level: float = 1.0,
  worked_examples: int | None = None,
  excluded: Collection[str] = (),
) -> Problem:
  """Problem `index` of the task's stream `seed`, with worked examples before it.

  Every index has a generator of its own, so that a stream can be entered anywhere: a resumed training sees what an
  uninterrupted one would have seen.

  Args:
    task: the task's module.
    seed: names the stream, not negative.
    index: position in the stream, from 0.
    level: of the problem and its worked examples, in (0, 1].
    worked_examples: how many, by default the task's own number.
    excluded: questions that must not come, such as those of an evaluation set; another is drawn instead, for worked
      examples too.

  Returns:
    The problem; its prompt is the worked examples and the question.
  """
  if not 0 < level <= 1:
    raise ValueError(f'level must be in (0, 1], got {level}')
  rng = np.random.default_rng((seed, index))

  def draw() -> Problem:
    while (problem := task.make_problem(rng, level)).prompt in excluded:
      pass
    return problem

  count = task.WORKED_EXAMPLES if worked_examples is None else worked_examples
  problem = draw()
  return add_worked_examples(problem, [draw() for _ in range(count)])


def with_line_feeds(text: str) -> str:
  """A text whose lines all end in a line feed."""
  return text.replace('\r\n', '\n').replace('\r', '\n')


def plain(answer: str) -> str:
  """An answer as graders read it: lines end in a line feed, without white space at their ends or empty lines around."""
  return '\n'.join(line.rstrip() for line in with_line_feeds(answer).split('\n')).strip('\n')


def add_worked_examples(problem: Problem, shown: Iterable[Problem]) -> Problem:
  """The problem with other problems and their answers before its question."""
  prompt = ''.join(f'{example.prompt}{example.answer}{SEPARATOR}' for example in shown) + problem.prompt
  return dataclasses.replace(problem, prompt=prompt)

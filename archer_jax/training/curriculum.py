"""A weighted mixture of tasks that goes from short to long, as a pure function of the step."""

import bisect
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import importlib
import itertools
from types import ModuleType
from typing import Any

import numpy as np

from archer_jax.tasks import TRAINING_SEED
from archer_jax.tasks import Problem
from archer_jax.tasks import problem_at


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
  """One task of a stage.

  Attributes:
    task: name of a module of archer_jax.tasks.
    weight: of the task's loss, relative to the stage's other parts.
    level: of the hardest problems, in (0, 1].
    lowest_level: of the easiest; each problem draws its own level between the two.
    worked_examples: solved problems before the question.
    batch_size: examples a step.
    prompt_length: P, columns that prompts are left-padded to.
    answer_length: G, columns of the answer; shorter answers go on with eos.
  """

  task: str
  weight: float
  level: float
  lowest_level: float
  worked_examples: int
  batch_size: int
  prompt_length: int
  answer_length: int

  def __post_init__(self):
    for field in ('weight', 'batch_size', 'answer_length'):
      if not getattr(self, field) > 0:
        raise ValueError(f'{field} of {self.task} must be positive, got {getattr(self, field)}')
    for field in ('worked_examples', 'prompt_length'):
      if getattr(self, field) < 0:
        raise ValueError(f'{field} of {self.task} must not be negative, got {getattr(self, field)}')
    if not 0 < self.lowest_level <= self.level <= 1:
      raise ValueError(
        f'levels of {self.task} must ascend from lowest_level to level in (0, 1], got {self.lowest_level}, {self.level}'
      )

  @property
  def module(self) -> ModuleType:
    return importlib.import_module(f'archer_jax.tasks.{self.task}')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
  """A number of steps, each of a batch of every part.

  Steps that hold one task each would be cheaper to compile, but the model then follows the latest task: separators that
  every task repeats were still uncertain after hundreds of such steps.
  """

  steps: int
  parts: tuple[Part, ...]

  def __post_init__(self):
    if self.steps < 1 or not self.parts:
      raise ValueError(f'a stage must have steps and parts, got {self.steps} and {len(self.parts)}')

  @property
  def tokens(self) -> int:
    """Tokens of a step, padding included."""
    return sum(part.batch_size * (part.prompt_length + part.answer_length) for part in self.parts)


def make_stages(stages: Sequence[Mapping[str, Any]]) -> tuple[Stage, ...]:
  """Stages of a config: mappings of `steps` and `parts`, the parts by task."""
  return tuple(
    Stage(steps=stage['steps'], parts=tuple(Part(task=task, **part) for task, part in stage['parts'].items()))
    for stage in stages
  )


def stage_at(stages: tuple[Stage, ...], step: int) -> Stage:
  """The stage of step `step`, from 0."""
  return stages[bisect.bisect_right(list(itertools.accumulate(stage.steps for stage in stages)), step)]


def problems_at(stages: tuple[Stage, ...], step: int, excluded: frozenset[str]) -> list[list[Problem]]:
  """The problems of step `step`, from 0, for each part of its stage; the same whenever it is asked.

  Questions in `excluded` are not among them.
  """
  # No two steps share an index, whatever their batch sizes.
  stride = max(part.batch_size for stage in stages for part in stage.parts)
  return [
    [_problem(part, step * stride + row, excluded) for row in range(part.batch_size)]
    for part in stage_at(stages, step).parts
  ]


def _problem(part: Part, index: int, excluded: frozenset[str]) -> Problem:
  share = np.random.default_rng((TRAINING_SEED, index, 1)).random()
  return problem_at(
    part.module,
    TRAINING_SEED,
    index,
    level=part.lowest_level + share * (part.level - part.lowest_level),
    worked_examples=part.worked_examples,
    excluded=excluded,
  )

"""The mixture as a pure function of the step, and what the committed config makes of it."""

import dataclasses
import importlib.util
from pathlib import Path
import re

import numpy as np
import pytest
from transformers import AutoTokenizer

from archer_jax.tasks import EVALUATION_SEED
from archer_jax.tasks import HELD_OUT_SEED
from archer_jax.tasks import TRAINING_SEED
from archer_jax.tasks import countdown
from archer_jax.tasks import problem_at
from archer_jax.tasks import sudoku4
from archer_jax.training.batches import Pair
from archer_jax.training.batches import make_batch
from archer_jax.training.curriculum import Part
from archer_jax.training.curriculum import Stage
from archer_jax.training.curriculum import make_stages
from archer_jax.training.curriculum import problems_at
from archer_jax.training.curriculum import stage_at
from archer_jax.training.run import make_training
from archer_jax.training.tokenizer import save_tokenizer

REPOSITORY = Path(__file__).parents[2]
# Of the configured training: spread over all of it by default.
STEPS = [60, pytest.param(None, marks=pytest.mark.slow)]

PART = {
  'weight': 1.0,
  'level': 1.0,
  'lowest_level': 1.0,
  'worked_examples': 0,
  'batch_size': 3,
  'prompt_length': 87,
  'answer_length': 84,
}
EASY = {**PART, 'level': 0.5, 'lowest_level': 0.2}
PUZZLES = {**PART, 'batch_size': 5}
STAGES = make_stages(
  [
    {'steps': 2, 'parts': {'sort': EASY, 'sudoku4': PUZZLES}},
    {'steps': 3, 'parts': {'sort': {**PART, 'worked_examples': 1}}},
  ]
)


@pytest.fixture(scope='module')
def training():
  spec = importlib.util.spec_from_file_location('train_suite', REPOSITORY / 'configs/train_suite.py')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return make_training(module.get_config(), REPOSITORY)


@pytest.fixture(scope='module')
def public():
  """Questions of the public sets."""
  puzzles = sudoku4.read_problems(REPOSITORY / 'tests/tasks/sudoku4_public_a.csv')
  numbers = countdown.read_problems(REPOSITORY / 'tests/tasks/countdown3_public_a.jsonl')
  return {problem.prompt for problem in puzzles + numbers}


def some_steps(training, count):
  steps = training.train.steps
  return range(steps) if count is None else np.linspace(0, steps - 1, count).astype(int).tolist()


def test_stages_follow_one_another():
  assert [STAGES.index(stage_at(STAGES, step)) for step in range(5)] == [0, 0, 1, 1, 1]
  assert STAGES[0] == Stage(steps=2, parts=(Part(task='sort', **EASY), Part(task='sudoku4', **PUZZLES)))
  assert [stage.tokens for stage in STAGES] == [(3 + 5) * 171, 3 * 171]


def test_problems_follow_from_the_step():
  first = [problems_at(STAGES, step, frozenset()) for step in range(5)]
  assert [[len(problems) for problems in parts] for parts in first] == [[3, 5], [3, 5], [3], [3], [3]]
  # Asked in another order, as by a run that goes on.
  assert [problems_at(STAGES, step, frozenset()) for step in (4, 1, 2)] == [first[4], first[1], first[2]]
  assert max(problem.difficulty for problem in first[0][0]) < 16
  assert min(problem.difficulty for problem in first[4][0]) >= 24
  assert '\n\n' not in first[0][0][0].prompt
  assert '\n\n' in first[4][0][0].prompt


def test_levels_are_spread_over_their_range():
  stages = make_stages([{'steps': 100, 'parts': {'sort': EASY}}])
  counts = [problem.difficulty for step in range(100) for problem in problems_at(stages, step, frozenset())[0]]
  # From a fifth of 24 numbers to half of 28.
  assert set(counts) == set(range(min(counts), max(counts) + 1))
  assert 5 <= min(counts) <= 6
  assert 13 <= max(counts) <= 15
  assert 9 <= np.mean(counts) <= 10.5


def test_no_problem_comes_twice():
  prompts = [problem.prompt for step in range(5) for problem in problems_at(STAGES, step, frozenset())[0]]
  assert len(set(prompts)) == len(prompts) == 15


def test_excluded_questions_do_not_come():
  puzzles = {problem.prompt for problem in problems_at(STAGES, 0, frozenset())[1]}
  excluded = frozenset(sorted(puzzles)[:2])
  again = {problem.prompt for problem in problems_at(STAGES, 0, excluded)[1]}
  assert len(again) == 5
  assert len(again & puzzles) == 3


@pytest.mark.parametrize(
  ('field', 'value', 'message'),
  [
    ('weight', 0.0, 'weight of sort must be positive, got 0.0'),
    ('weight', float('nan'), 'weight of sort must be positive, got nan'),
    ('batch_size', 0, 'batch_size of sort must be positive, got 0'),
    ('answer_length', 0, 'answer_length of sort must be positive, got 0'),
    ('worked_examples', -1, 'worked_examples of sort must not be negative, got -1'),
    ('prompt_length', -1, 'prompt_length of sort must not be negative, got -1'),
    ('level', 1.5, r'levels of sort must ascend from lowest_level to level in \(0, 1\], got 1.0, 1.5'),
    ('level', 0.5, r'levels of sort must ascend from lowest_level to level in \(0, 1\], got 1.0, 0.5'),
    ('lowest_level', 0.0, r'levels of sort must ascend from lowest_level to level in \(0, 1\], got 0.0, 1.0'),
  ],
)
def test_bad_parts_are_refused(field, value, message):
  with pytest.raises(ValueError, match=message):
    Part(task='sort', **{**PART, field: value})


@pytest.mark.parametrize('change', [{'steps': 0}, {'parts': ()}])
def test_empty_stages_are_refused(change):
  with pytest.raises(ValueError, match='a stage must have steps and parts'):
    dataclasses.replace(STAGES[0], **change)


def test_most_tokens_are_short_ones(training):
  tokens = {False: 0, True: 0}
  for stage in training.train.stages:
    tokens[any(part.worked_examples for part in stage.parts)] += stage.steps * stage.tokens
  assert tokens[False] > sum(tokens.values()) / 2
  # Longer from stage to stage, and at the end the tasks themselves, with their standard prompts.
  for earlier, later in zip(training.train.stages, training.train.stages[1:], strict=False):
    for a, b in zip(earlier.parts, later.parts, strict=True):
      assert a.task == b.task
      assert (a.level, a.prompt_length, a.answer_length) <= (b.level, b.prompt_length, b.answer_length)
  for part in training.train.stages[-1].parts:
    assert part.lowest_level == part.level == 1
    assert (part.worked_examples, part.answer_length) == (part.module.WORKED_EXAMPLES, part.module.GEN_LENGTH)


@pytest.mark.parametrize('count', STEPS)
def test_lengths_hold_every_problem(training, count, tmp_path):
  save_tokenizer(tmp_path)
  encode = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True).encode
  longest = {}
  for step in some_steps(training, count):
    stage = stage_at(training.train.stages, step)
    for part, problems in zip(stage.parts, problems_at(training.train.stages, step, training.excluded), strict=True):
      pairs = [Pair(encode(problem.prompt), encode(problem.answer)) for problem in problems]
      make_batch(pairs, part.prompt_length, part.answer_length, training.model)
      key = training.train.stages.index(stage), part.task
      longest[key] = max(longest.get(key, 0), *(len(pair.answer) for pair in pairs))
  # An end token is always learned.
  for (stage, task), length in longest.items():
    (part,) = (part for part in training.train.stages[stage].parts if part.task == task)
    assert length < part.answer_length


def test_exclusions_are_the_public_puzzles(training, public):
  assert training.excluded == {prompt for prompt in public if prompt.startswith('sudoku4:')}
  assert len(training.excluded) == 250


@pytest.mark.parametrize('count', STEPS)
def test_nothing_public_is_trained_on(training, public, count):
  puzzles = {prompt[8:-1] for prompt in public if prompt.startswith('sudoku4:')}
  for step in some_steps(training, count):
    for problems in problems_at(training.train.stages, step, training.excluded):
      for problem in problems:
        # Anywhere in the text, as worked examples too.
        assert not set(re.findall(r'(?<!\d)\d{16}(?!\d)', problem.prompt)) & puzzles
        assert 'countdown:' not in problem.prompt
        assert problem.prompt not in public


@pytest.mark.parametrize('count', [40, pytest.param(2000, marks=pytest.mark.slow)])
def test_streams_have_no_problem_in_common(training, count):
  """Questions that are trained on, watched, and evaluated; of one stream of each, from its beginning."""
  for part in training.train.stages[-1].parts:
    streams = [
      {problem_at(part.module, seed, index, worked_examples=0).prompt for index in range(count)}
      for seed in (TRAINING_SEED, HELD_OUT_SEED, EVALUATION_SEED, EVALUATION_SEED + 1)
    ]
    common = sum(len(stream) for stream in streams) - len(set.union(*streams))
    # There are so few small puzzles that a pair in a million is the same by chance.
    assert common <= (count / 100 if part.task == 'sudoku4' else 0), part.task


@pytest.mark.slow
def test_evaluations_hold_next_to_nothing_that_was_trained_on(training):
  trained = {}
  for step in range(training.train.steps):
    parts = stage_at(training.train.stages, step).parts
    for part, problems in zip(parts, problems_at(training.train.stages, step, training.excluded), strict=True):
      # The question without its worked examples.
      questions = (problem.prompt[problem.prompt.rindex(f'{part.task}:') :] for problem in problems)
      trained.setdefault(part.task, set()).update(map(hash, questions))
  for part in training.train.stages[-1].parts:
    for seed in (HELD_OUT_SEED, EVALUATION_SEED):
      fresh = [problem_at(part.module, seed, index, worked_examples=0).prompt for index in range(1000)]
      seen = sum(hash(prompt) in trained[part.task] for prompt in fresh)
      # Some 4x4 puzzles come again, which is why those are judged by the public ones.
      assert seen <= (30 if part.task == 'sudoku4' else 0), part.task

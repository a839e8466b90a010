"""From a config to a checkpoint: data without the evaluation problems, training, figures, files."""

from collections.abc import Mapping
import dataclasses
import functools
import json
from pathlib import Path

import jax
import ml_collections
import numpy as np
import optax

from archer_jax.checkpoints import checkpoint
from archer_jax.checkpoints.text import Tokenizer
from archer_jax.checkpoints.text import load_tokenizer
from archer_jax.config import ModelConfig
from archer_jax.tasks import HELD_OUT_SEED
from archer_jax.tasks import problem_at
from archer_jax.tasks import sudoku4
from archer_jax.training.batches import Batch
from archer_jax.training.batches import Pair
from archer_jax.training.batches import make_batch
from archer_jax.training.curriculum import Part
from archer_jax.training.curriculum import make_stages
from archer_jax.training.curriculum import problems_at
from archer_jax.training.curriculum import stage_at
from archer_jax.training.evaluate import answer_prompts
from archer_jax.training.optimizer import OptimizerConfig
from archer_jax.training.tokenizer import EOS
from archer_jax.training.tokenizer import MASK
from archer_jax.training.tokenizer import PAD
from archer_jax.training.tokenizer import VOCAB
from archer_jax.training.tokenizer import save_tokenizer
from archer_jax.training.trainer import LOG_NAME
from archer_jax.training.trainer import TrainConfig
from archer_jax.training.trainer import train

CHECKPOINT_NAME = 'checkpoint'
TOKENIZER_NAME = 'tokenizer'


@dataclasses.dataclass(frozen=True)
class Training:
  """What a config describes, ready to run.

  Attributes:
    model: the model's config.
    train: the training's config.
    excluded: questions of public evaluation sets, which are never trained on.
    held_out: how many fresh problems of each task are watched.
  """

  model: ModelConfig
  train: TrainConfig
  excluded: frozenset[str]
  held_out: int


def make_training(config: ml_collections.ConfigDict, repository: Path) -> Training:
  """Reads a config as configs/train_suite.py makes it; its files are relative to the repository."""
  ids = {'vocab_size': len(VOCAB), 'mask_id': VOCAB[MASK], 'eos_id': VOCAB[EOS], 'pad_id': VOCAB[PAD]}
  excluded = frozenset(problem.prompt for problem in sudoku4.read_problems(repository / config.data.excluded_sudoku4))
  return Training(
    model=ModelConfig(**config.model, **ids),
    train=TrainConfig(**config.train, stages=make_stages(config.stages), optimizer=OptimizerConfig(**config.optimizer)),
    excluded=excluded,
    held_out=config.data.held_out,
  )


def count_solved(params: dict, part: Part, training: Training, tokenizer: Tokenizer) -> int:
  """How many of `training.held_out` fresh problems of a part are solved greedily, one token a step."""
  problem = functools.partial(problem_at, level=part.level, worked_examples=part.worked_examples)
  problems = [problem(part.module, HELD_OUT_SEED, i, excluded=training.excluded) for i in range(training.held_out)]
  answers = answer_prompts(
    params,
    [problem.prompt for problem in problems],
    encode=tokenizer.encode,
    decode=tokenizer.decode_text,
    prompt_length=part.prompt_length,
    answer_length=part.answer_length,
    config=training.model,
    batch_size=training.held_out,
  )
  return sum(part.module.is_solved(*row) for row in zip(problems, answers, strict=True))


def run_training(config: ml_collections.ConfigDict, repository: Path, output: Path) -> dict[str, float]:
  """Trains as a config says, or goes on with it, and writes `output`/checkpoint.

  Args:
    config: as configs/train_suite.py makes it.
    repository: what the files of the config are relative to.
    output: takes the log, the saved states, the tokenizer and the checkpoint.

  Returns:
    The last exact match by task, one token a step.

  Raises:
    FileExistsError: the folder holds a finished training.
    ValueError: a config does not fit, or not to the training that the folder holds.
  """
  if (output / CHECKPOINT_NAME).exists():
    raise FileExistsError(f'{output} holds a finished training already')
  training = make_training(config, repository)
  model, stages = training.model, training.train.stages
  save_tokenizer(output / TOKENIZER_NAME)
  tokenizer = load_tokenizer(output / TOKENIZER_NAME, model)

  def batches_at(step: int) -> tuple[Batch, ...]:
    parts = zip(stage_at(stages, step).parts, problems_at(stages, step, training.excluded), strict=True)
    pairs = lambda problems: [Pair(tokenizer.encode(p.prompt), tokenizer.encode(p.answer)) for p in problems]
    return tuple(make_batch(pairs(problems), part.prompt_length, part.answer_length, model) for part, problems in parts)

  def exact_match(params: dict, step: int) -> Mapping[str, float]:
    parts = stage_at(stages, step - 1).parts
    return {part.task: count_solved(params, part, training, tokenizer) / training.held_out for part in parts}

  header = {
    'versions': {module.__name__: module.__version__ for module in (jax, np, optax)},
    'device': f'{jax.device_count()} x {jax.devices()[0].device_kind}',
  }
  params = train(
    training.train,
    model,
    batches_at,
    output,
    params=checkpoint.load(config.start)[1] if config.start else None,
    start=config.start,
    exact_match=exact_match,
    header=header,
  )
  params = jax.tree.map(lambda x: x.astype(config.dtype), params)
  checkpoint.save(
    output / CHECKPOINT_NAME, model, params, tokenizer_dir=output / TOKENIZER_NAME, defaults=config.defaults.to_dict()
  )
  last = (output / LOG_NAME).read_text().splitlines()[-1]
  return json.loads(last)['exact_match']

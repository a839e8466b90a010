"""From a task and a config to a checkpoint: data without the evaluation problems, training, figures, files."""

from collections.abc import Iterator
import dataclasses
import json
from pathlib import Path
from types import ModuleType

import jax
import ml_collections
import numpy as np
import optax

from archer_jax import checkpoint
from archer_jax.config import ModelConfig
from archer_jax.tasks import Example
from archer_jax.tasks import example_at
from archer_jax.tasks import examples_from
from archer_jax.text import Tokenizer
from archer_jax.text import load_tokenizer
from archer_jax.training.batches import Pair
from archer_jax.training.char_tokenizer import EOS
from archer_jax.training.char_tokenizer import MASK
from archer_jax.training.char_tokenizer import PAD
from archer_jax.training.char_tokenizer import VOCAB
from archer_jax.training.char_tokenizer import save_char_tokenizer
from archer_jax.training.evaluate import answer_prompts
from archer_jax.training.optimizer import OptimizerConfig
from archer_jax.training.trainer import LOG_NAME
from archer_jax.training.trainer import TrainConfig
from archer_jax.training.trainer import train

CHECKPOINT_NAME = 'checkpoint'
TOKENIZER_NAME = 'tokenizer'


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskData:
  """What is trained on, and the two sets that never are.

  Attributes:
    task: the task's module.
    seed: of the training stream.
    problems: evaluation problems and their reference answers.
    held_out: prompts whose exact match is watched during training.
  """

  task: ModuleType
  seed: int
  problems: tuple[tuple[str, str], ...]
  held_out: tuple[str, ...]

  @property
  def public(self) -> list[str]:
    """The prompts of the evaluation problems."""
    return [self.task.make_prompt(problem) for problem, _ in self.problems]

  def examples_from(self, start: int) -> Iterator[Example]:
    """The training examples from an index on; no prompt of the two sets is among them."""
    return examples_from(self.task, self.seed, start, frozenset(self.public) | frozenset(self.held_out))


def make_data(task: ModuleType, data: ml_collections.ConfigDict, evaluation: Path) -> TaskData:
  """Reads the evaluation file and draws the held-out prompts; `data` gives seed, held_out_seed and held_out."""
  problems = tuple(task.read_problems(evaluation))
  public = frozenset(task.make_prompt(problem) for problem, _ in problems)
  held_out = tuple(example_at(task, data.held_out_seed, index, public).prompt for index in range(data.held_out))
  return TaskData(task=task, seed=data.seed, problems=problems, held_out=held_out)


def _answers(params: dict, prompts: list[str], tokenizer: Tokenizer, config: TrainConfig, model: ModelConfig):
  return answer_prompts(
    params,
    prompts,
    encode=tokenizer.encode,
    decode=tokenizer.decode_text,
    prompt_length=config.prompt_length,
    answer_length=config.answer_length,
    config=model,
  )


def score(data: TaskData, answers: list[str]) -> dict[str, dict[str, int]]:
  """Counts for each group of the evaluation problems: how many, solved, and equal to the reference answer."""
  counts = {}
  for (problem, reference), prompt, answer in zip(data.problems, data.public, answers, strict=True):
    group = counts.setdefault(data.task.group(problem), {'problems': 0, 'solved': 0, 'equal_to_reference': 0})
    group['problems'] += 1
    group['solved'] += data.task.is_solved(prompt, answer)
    group['equal_to_reference'] += answer == reference
  return counts


def train_task(task: ModuleType, config: ml_collections.ConfigDict, evaluation: Path, output: Path) -> dict:
  """Trains on a task, or goes on with it, and writes `output`/checkpoint.

  Args:
    task: the task's module.
    config: as configs/train_sudoku4.py makes it.
    evaluation: file of the task's evaluation problems.
    output: takes the log, the saved states, the tokenizer and the checkpoint.

  Returns:
    The last record of the log: number of parameters and, by group, the evaluation's counts with one token a step.

  Raises:
    FileExistsError: the folder holds a finished training.
    ValueError: a config does not fit, or not to the training that the folder holds.
  """
  if (output / CHECKPOINT_NAME).exists():
    raise FileExistsError(f'{output} holds a finished training already')
  ids = {'vocab_size': len(VOCAB), 'mask_id': VOCAB[MASK], 'eos_id': VOCAB[EOS], 'pad_id': VOCAB[PAD]}
  model = ModelConfig(**config.model, **ids)
  settings = TrainConfig(**config.train, optimizer=OptimizerConfig(**config.optimizer))
  data = make_data(task, config.data, evaluation)
  save_char_tokenizer(output / TOKENIZER_NAME)
  tokenizer = load_tokenizer(output / TOKENIZER_NAME, model)

  def pairs_from(start):
    return (Pair(tokenizer.encode(e.prompt), tokenizer.encode(e.answer)) for e in data.examples_from(start))

  def exact_match(params):
    answers = _answers(params, data.held_out, tokenizer, settings, model)
    return float(np.mean([task.is_solved(*row) for row in zip(data.held_out, answers, strict=True)]))

  header = {
    'task': task.__name__.rpartition('.')[2],
    'data': config.data.to_dict(),
    'versions': {module.__name__: module.__version__ for module in (jax, np, optax)},
    'device': f'{jax.device_count()} x {jax.devices()[0].device_kind}',
  }
  params = train(settings, model, pairs_from, output, exact_match=exact_match, header=header)

  params = jax.tree.map(lambda x: x.astype(config.dtype), params)
  # The figures are those of the parameters as they are stored, computed in float32.
  stored = jax.tree.map(lambda x: x.astype('float32'), params)
  counts = score(data, _answers(stored, data.public, tokenizer, settings, model))
  record = {'step': settings.steps, 'parameters': sum(x.size for x in jax.tree.leaves(params)), 'evaluation': counts}
  with (output / LOG_NAME).open('a') as file:
    file.write(json.dumps(record) + '\n')
  checkpoint.save(
    output / CHECKPOINT_NAME, model, params, tokenizer_dir=output / TOKENIZER_NAME, defaults=config.defaults.to_dict()
  )
  return record

"""The bundled model: what its log says, and that it still solves what it is said to solve."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest

from archer_jax import checkpoint
from archer_jax.tasks import sudoku4
from archer_jax.training.char_tokenizer import save_char_tokenizer
from archer_jax.training.evaluate import answer_prompts

REPOSITORY = Path(__file__).parents[2]
PROBLEMS = sudoku4.read_problems(REPOSITORY / 'tests/tasks/sudoku4_public_a.csv')


@pytest.fixture(scope='module')
def config():
  spec = importlib.util.spec_from_file_location('train_sudoku4', REPOSITORY / 'configs/train_sudoku4.py')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.get_config()


@pytest.fixture(scope='module')
def log():
  return [json.loads(line) for line in (checkpoint.BUNDLED / 'log.jsonl').read_text().splitlines()]


def test_log_is_that_of_the_committed_config(config, log):
  header = log[0]
  assert header['task'] == config.task
  assert header['data'] == config.data.to_dict()
  assert header['train'] == {**config.train, 'optimizer': config.optimizer.to_dict()}
  manifest = checkpoint.read_manifest()
  assert header['model'] == dataclasses.asdict(manifest.config)
  assert config.model.to_dict().items() <= header['model'].items()
  assert (manifest.dtype, manifest.defaults) == (config.dtype, config.defaults.to_dict())


def test_log_ends_with_the_figures_of_the_public_puzzles(config, log):
  last = log[-1]
  assert last['step'] == config.train.steps
  assert last['parameters'] <= 3_000_000
  unique = last['evaluation']['unique']
  assert unique['problems'] == 192
  assert unique['solved'] >= 0.95 * unique['problems']


def test_size_and_tokenizer(tmp_path):
  files = [path for path in checkpoint.BUNDLED.rglob('*') if path.is_file()]
  assert sum(path.stat().st_size for path in files) <= 12 * 2**20
  save_char_tokenizer(tmp_path)
  for path in tmp_path.iterdir():
    assert (checkpoint.BUNDLED / 'tokenizer' / path.name).read_bytes() == path.read_bytes()


def solved(problems):
  model, params, tokenizer = checkpoint.load(dtype='float32')
  prompts = [sudoku4.make_prompt(puzzle) for puzzle, _ in problems]
  answers = answer_prompts(
    params,
    prompts,
    encode=tokenizer.encode,
    decode=tokenizer.decode_text,
    prompt_length=25,
    answer_length=16,
    config=model.config,
    batch_size=32,
  )
  return [sudoku4.is_solved(*row) for row in zip(prompts, answers, strict=True)]


def test_solves_puzzles():
  assert sum(solved(PROBLEMS[:32])) >= 30


@pytest.mark.slow
def test_solves_what_the_log_says(log):
  right = solved(PROBLEMS)
  for group, counts in log[-1]['evaluation'].items():
    rows = [row for row, (puzzle, _) in enumerate(PROBLEMS) if sudoku4.group(puzzle) == group]
    # Another machine may sum in another order, which decides a puzzle at most.
    assert abs(sum(right[row] for row in rows) - counts['solved']) <= 1

"""Training of the bundled model on the tasks of the suite, in two runs; see docs/training.md.

    python tools/train.py --config=configs/train_suite.py --output=runs/suite
    python tools/train.py --config=configs/train_suite.py:shadow --output=runs/shadow

The second run goes on from the checkpoint of the first.
"""

import ml_collections

from archer_jax.tasks import EVALUATION_SEED
from archer_jax.tasks import problem_at
from archer_jax.tasks import sudoku6


def _part(weight, levels, worked_examples, batch_size, prompt_length, answer_length):
  return ml_collections.ConfigDict(
    {
      'weight': weight,
      'lowest_level': levels[0],
      'level': levels[1],
      'worked_examples': worked_examples,
      'batch_size': batch_size,
      'prompt_length': prompt_length,
      'answer_length': answer_length,
    }
  )


def _stage(steps, **parts):
  return ml_collections.ConfigDict({'steps': steps, 'parts': parts})


def get_config(run: str = 'tasks') -> ml_collections.ConfigDict:
  """The config of the run `tasks`, or of `shadow`, which goes on from its checkpoint."""
  if run not in ('tasks', 'shadow'):
    raise ValueError(f'the run must be tasks or shadow, got {run!r}')
  config = ml_collections.ConfigDict()
  config.data = ml_collections.ConfigDict(
    {
      # Exact match is watched on so many fresh problems of each task.
      'held_out': 16,
      # Relative to the repository; its puzzles are never trained on.
      'excluded_sudoku4': 'tests/tasks/sudoku4_public_a.csv',
    }
  )
  # A checkpoint to go on from; random parameters if it is empty.
  config.start = ''
  # mask_id, eos_id, pad_id and vocab_size come from the tokenizer.
  config.model = ml_collections.ConfigDict(
    {
      'family': 'llada',
      'd_model': 160,
      'n_layers': 6,
      'n_heads': 4,
      'n_kv_heads': 4,
      'head_dim': 40,
      'd_ff': 432,
      'rope_theta': 10000.0,
      'norm_eps': 1e-5,
      'qkv_bias': False,
      'qk_norm': True,
      'max_length': 2048,
      'logit_alignment': 'same_position',
    }
  )
  # Short to long: lookups and sorting form on a few rows and numbers first and then carry over, and did not form
  # where training began with seven rows. Worked examples come at the end only: they are two thirds of a step's tokens.
  config.stages = (
    _stage(
      1800,
      sudoku4=_part(0.05, (1.0, 1.0), 0, 4, 19, 17),
      sudoku6=_part(0.25, (0.05, 0.6), 0, 10, 47, 42),
      sort=_part(0.25, (0.04, 0.25), 0, 16, 19, 16),
      table=_part(0.25, (0.01, 0.25), 0, 12, 46, 15),
      pipeline=_part(0.20, (0.1, 0.4), 0, 6, 74, 39),
    ),
    _stage(
      2300,
      sudoku4=_part(0.05, (1.0, 1.0), 0, 4, 19, 17),
      sudoku6=_part(0.30, (0.2, 1.0), 0, 10, 47, 42),
      sort=_part(0.25, (0.1, 0.6), 0, 10, 37, 34),
      table=_part(0.20, (0.1, 0.6), 0, 8, 86, 30),
      pipeline=_part(0.20, (0.2, 0.8), 0, 5, 90, 69),
    ),
    _stage(
      2900,
      sudoku4=_part(0.05, (1.0, 1.0), 0, 4, 19, 17),
      sudoku6=_part(0.30, (0.5, 1.0), 0, 10, 47, 42),
      sort=_part(0.25, (0.3, 1.0), 0, 8, 59, 56),
      table=_part(0.20, (0.3, 1.0), 0, 6, 136, 50),
      pipeline=_part(0.20, (0.4, 1.0), 0, 5, 98, 84),
    ),
    _stage(
      1300,
      sudoku4=_part(0.05, (1.0, 1.0), 0, 4, 19, 17),
      sudoku6=_part(0.30, (1.0, 1.0), 2, 5, 227, 42),
      sort=_part(0.25, (1.0, 1.0), 1, 4, 175, 56),
      table=_part(0.20, (1.0, 1.0), 1, 3, 323, 50),
      pipeline=_part(0.20, (1.0, 1.0), 1, 3, 281, 84),
    ),
  )
  config.train = ml_collections.ConfigDict(
    {
      'seed': 0,
      'log_every': 20,
      'eval_every': 1000,
      'save_every': 200,
      'shadow': 'none',
      'shadow_weight': 0.5,
    }
  )
  config.optimizer = ml_collections.ConfigDict(
    {
      'name': 'muon',
      # At 0.02, which QK-norm allows, the logits of attention grow until it no longer learns.
      'muon_rate': 0.005,
      'adam_rate': 3e-3,
      'weight_decay': 0.1,
      'max_grad_norm': 0.0,
      'warmup_steps': 50,
      'decay_share': 0.7,
      'decay': 'linear',
    }
  )
  # What the checkpoint holds and recommends.
  config.dtype = 'bfloat16'
  config.defaults = ml_collections.ConfigDict(
    {
      'gen_length': sudoku6.GEN_LENGTH,
      'shadow': 'self',
      'threshold': 0.95,
      # 28 blanks, of which two are filled, taken back one after the other, and filled with each other's digit.
      'prompt': problem_at(sudoku6, EVALUATION_SEED + 7, 154).prompt,
    }
  )
  if run == 'shadow':
    _set_shadow(config)
  return config


def _set_shadow(config: ml_collections.ConfigDict) -> None:
  """WINO's verification rows are learned at the end, from few steps, since they double the rows of the answer."""
  config.start = 'runs/suite/checkpoint'
  config.stages = (
    _stage(
      300,
      sudoku4=_part(0.05, (1.0, 1.0), 0, 4, 19, 17),
      sudoku6=_part(0.30, (1.0, 1.0), 2, 5, 227, 42),
      sort=_part(0.40, (1.0, 1.0), 1, 6, 175, 56),
      pipeline=_part(0.25, (1.0, 1.0), 1, 3, 281, 84),
    ),
  )
  config.train.update({'seed': 1, 'eval_every': 0, 'save_every': 0, 'shadow': 'self'})
  config.optimizer.update({'muon_rate': 0.0015, 'adam_rate': 1e-3, 'warmup_steps': 10, 'decay_share': 0.9})

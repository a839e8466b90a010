"""Training of the bundled model on 4x4 sudoku; see docs/training.md."""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict()
  config.task = 'sudoku4'
  config.data = ml_collections.ConfigDict(
    {
      'seed': 0,
      'held_out_seed': 1,
      'held_out': 256,
      # Relative to the repository; its puzzles are never in training.
      'evaluation': 'tests/tasks/sudoku4_public_a.csv',
    }
  )
  # mask_id, eos_id, pad_id and vocab_size come from the tokenizer.
  config.model = ml_collections.ConfigDict(
    {
      'family': 'llada',
      'd_model': 192,
      'n_layers': 6,
      'n_heads': 4,
      'n_kv_heads': 4,
      'head_dim': 48,
      'd_ff': 512,
      'rope_theta': 10000.0,
      'norm_eps': 1e-5,
      'qkv_bias': False,
      'max_length': 256,
      'logit_alignment': 'same_position',
    }
  )
  config.train = ml_collections.ConfigDict(
    {
      'steps': 500,
      'batch_size': 128,
      'prompt_length': 25,
      'answer_length': 16,
      'seed': 0,
      'log_every': 10,
      'eval_every': 100,
      'save_every': 50,
    }
  )
  config.optimizer = ml_collections.ConfigDict(
    {
      'name': 'muon',
      'muon_rate': 0.02,
      'adam_rate': 3e-3,
      'weight_decay': 0.0,
      'max_grad_norm': 0.0,
      'warmup_steps': 20,
      'decay_share': 0.5,
      'decay': 'linear',
    }
  )
  # What the checkpoint holds and recommends.
  config.dtype = 'bfloat16'
  config.defaults = ml_collections.ConfigDict(
    {
      'gen_length': 16,
      'block_length': 16,
      'shadow': 'self',
      'threshold': 0.9,
      'prompt': 'sudoku4:0210010000000001=',
    }
  )
  return config

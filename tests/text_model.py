"""A tiny random checkpoint with a character tokenizer and a chat template, for tests that need text."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp

from archer_jax.checkpoints import checkpoint
from archer_jax.config import ModelConfig
from archer_jax.model import init_params
from archer_jax.training.tokenizer import EOS
from archer_jax.training.tokenizer import MASK
from archer_jax.training.tokenizer import PAD
from archer_jax.training.tokenizer import VOCAB
from archer_jax.training.tokenizer import save_tokenizer

CHAT_TEMPLATE = (
  "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}<|eos|>{% endfor %}"
  '{% if add_generation_prompt %}assistant: {% endif %}'
)
EXAMPLE = '12+3='
CONFIG = ModelConfig(
  family='llada',
  vocab_size=len(VOCAB),
  d_model=32,
  n_layers=2,
  n_heads=2,
  n_kv_heads=2,
  head_dim=16,
  d_ff=48,
  rope_theta=10000.0,
  norm_eps=1e-5,
  qkv_bias=False,
  max_length=256,
  mask_id=VOCAB[MASK],
  eos_id=VOCAB[EOS],
  pad_id=VOCAB[PAD],
  logit_alignment='same_position',
)


def save_text_model(
  folder: Path,
  *,
  chat: bool = True,
  defaults: dict | None = None,
  broken: bool = False,
  eos_bias: float = 0.0,
  wanted: str = EOS,
) -> Path:
  """Writes the checkpoint to `folder`.

  Args:
    folder: made here.
    chat: whether there is a chat template.
    defaults: recommended settings in the manifest.
    broken: whether a weight is no number.
    eos_bias: if not 0, how large the part of every row is that wants the end token.
    wanted: another token to be wanted in its place.
  """
  tokenizer = folder.with_name(f'{folder.name}-tokenizer')
  save_tokenizer(tokenizer)
  if chat:
    file = tokenizer / 'tokenizer_config.json'
    file.write_text(json.dumps({**json.loads(file.read_text()), 'chat_template': CHAT_TEMPLATE}))
  params = init_params(CONFIG, jax.random.key(0))
  # Random weights of the usual size make every token as likely as the next; these make a model that is sure.
  params = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, params)
  if eos_bias:
    # A part that every row has, and a column that asks for it.
    params['embedding'] += eos_bias
    params['head']['kernel'] = params['head']['kernel'].at[:, VOCAB[wanted]].set(1)
  if broken:
    params['blocks_1']['mlp']['up_proj']['kernel'] = (
      params['blocks_1']['mlp']['up_proj']['kernel'].at[0, 0].set(jnp.nan)
    )
  if defaults is None:
    defaults = {'decoder': 'wino', 'gen_length': 16, 'prompt': EXAMPLE}
  checkpoint.save(folder, CONFIG, params, tokenizer_dir=tokenizer, defaults=defaults)
  return folder

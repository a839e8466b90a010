"""Dream, whose logits stand one position before the one that they predict."""

from collections.abc import Mapping
from typing import Any

from archer_jax.config import SHIFTED
from archer_jax.config import ModelConfig
from archer_jax.families.base import ABSENT
from archer_jax.families.base import AS_IS
from archer_jax.families.base import BOOKKEEPING
from archer_jax.families.base import HARMLESS
from archer_jax.families.base import OPTIONAL
from archer_jax.families.base import TOKENS
from archer_jax.families.base import Family
from archer_jax.families.base import end_ids
from archer_jax.families.base import head_dim

_KEYS = BOOKKEEPING | {
  'architectures': (['DreamModel'], ABSENT),
  'hidden_size': int,
  'num_hidden_layers': int,
  'num_attention_heads': int,
  'num_key_value_heads': int,
  'intermediate_size': int,
  'vocab_size': int,
  'max_position_embeddings': int,
  'mask_token_id': int,
  'eos_token_id': TOKENS,
  'pad_token_id': OPTIONAL,
  'rope_theta': float,
  'rope_scaling': (None, ABSENT),
  'rms_norm_eps': float,
  'hidden_act': ('silu',),
  'use_sliding_window': (False, ABSENT),
  'use_mrope': (False, ABSENT),
  'tie_word_embeddings': (False, ABSENT),
  # The two sizes of a sliding window say nothing once it is off.
  **dict.fromkeys(
    ('attention_dropout', 'bos_token_id', 'initializer_range', 'max_window_layers', 'sliding_window'), HARMLESS
  ),
}

_TENSORS = {
  r'model\.embed_tokens\.weight': ('embedding', AS_IS),
  r'model\.norm\.weight': ('final_norm/scale', 0),
  r'lm_head\.weight': ('head/kernel', 1),
  r'model\.layers\.(\d+)\.input_layernorm\.weight': (r'blocks_\1/attn_norm/scale', 0),
  r'model\.layers\.(\d+)\.post_attention_layernorm\.weight': (r'blocks_\1/mlp_norm/scale', 0),
  r'model\.layers\.(\d+)\.self_attn\.([qkv])_proj\.weight': (r'blocks_\1/attn/\2_proj/kernel', 1),
  r'model\.layers\.(\d+)\.self_attn\.([qkv])_proj\.bias': (r'blocks_\1/attn/\2_proj/bias', 0),
  r'model\.layers\.(\d+)\.self_attn\.o_proj\.weight': (r'blocks_\1/attn/o_proj/kernel', 2),
  r'model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj\.weight': (r'blocks_\1/mlp/\2_proj/kernel', 1),
}


def _config(c: Mapping[str, Any]) -> ModelConfig:
  return ModelConfig(
    family='dream',
    vocab_size=c['vocab_size'],
    d_model=c['hidden_size'],
    n_layers=c['num_hidden_layers'],
    n_heads=c['num_attention_heads'],
    n_kv_heads=c['num_key_value_heads'],
    head_dim=head_dim('hidden_size', c['hidden_size'], 'num_attention_heads', c['num_attention_heads']),
    d_ff=c['intermediate_size'],
    rope_theta=c['rope_theta'],
    norm_eps=c['rms_norm_eps'],
    qkv_bias=True,
    max_length=c['max_position_embeddings'],
    mask_id=c['mask_token_id'],
    eos_id=end_ids(c)[0],
    pad_id=c.get('pad_token_id'),
    logit_alignment=SHIFTED,
  )


FAMILY = Family(
  model_type='Dream',
  paper='2508.15487',
  published='Dream-v0-Base-7B, Dream-v0-Instruct-7B',
  keys=_KEYS,
  config=_config,
  tensors=_TENSORS,
)

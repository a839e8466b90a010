"""LLaDA, whose logits stand at the position that they predict."""

from collections.abc import Mapping
from typing import Any

from archer_jax.config import SAME_POSITION
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

# The keys of LLaDA's configuration class; the values that it allows and this model does not have stand nowhere here.
_KEYS = BOOKKEEPING | {
  'architectures': (['LLaDAModelLM'], ABSENT),
  'block_type': ('llama',),
  'block_group_size': (1, ABSENT),
  'd_model': int,
  'n_layers': int,
  'n_heads': int,
  'n_kv_heads': int | None,
  'multi_query_attention': (None, False, True, ABSENT),
  'mlp_hidden_size': int | None,
  'mlp_ratio': int,
  'vocab_size': int,
  'embedding_size': int | None,
  'max_sequence_length': int,
  'mask_token_id': int,
  'eos_token_id': TOKENS,
  'pad_token_id': OPTIONAL,
  'rope': (True,),
  'rope_theta': float,
  'rope_full_precision': (True, ABSENT),
  'alibi': (False, ABSENT),
  'layer_norm_type': ('rms',),
  'layer_norm_with_affine': (True, ABSENT),
  'bias_for_layer_norm': (False,),
  'rms_norm_eps': float,
  'attention_layer_norm': (False, ABSENT),
  'input_emb_norm': (False, ABSENT),
  'activation_type': ('silu',),
  'include_bias': (False,),
  'include_qkv_bias': (False, ABSENT),
  'scale_logits': (False, ABSENT),
  'weight_tying': (False,),
  **dict.fromkeys(
    (
      'alibi_bias_max',
      'attention_dropout',
      'attention_layer_norm_with_affine',
      'embedding_dropout',
      'flash_attention',
      'init_cutoff_factor',
      'init_device',
      'init_fn',
      'init_std',
      'precision',
      'residual_dropout',
    ),
    HARMLESS,
  ),
}

_TENSORS = {
  r'model\.transformer\.wte\.weight': ('embedding', AS_IS),
  r'model\.transformer\.ln_f\.weight': ('final_norm/scale', 0),
  r'model\.transformer\.ff_out\.weight': ('head/kernel', 1),
  r'model\.transformer\.blocks\.(\d+)\.attn_norm\.weight': (r'blocks_\1/attn_norm/scale', 0),
  r'model\.transformer\.blocks\.(\d+)\.ff_norm\.weight': (r'blocks_\1/mlp_norm/scale', 0),
  r'model\.transformer\.blocks\.(\d+)\.([qkv])_proj\.weight': (r'blocks_\1/attn/\2_proj/kernel', 1),
  r'model\.transformer\.blocks\.(\d+)\.attn_out\.weight': (r'blocks_\1/attn/o_proj/kernel', 2),
  # ff_proj goes through the activation, so it is the gate. The ff_out of a block leads back, the other one is the head.
  r'model\.transformer\.blocks\.(\d+)\.ff_proj\.weight': (r'blocks_\1/mlp/gate_proj/kernel', 1),
  r'model\.transformer\.blocks\.(\d+)\.up_proj\.weight': (r'blocks_\1/mlp/up_proj/kernel', 1),
  r'model\.transformer\.blocks\.(\d+)\.ff_out\.weight': (r'blocks_\1/mlp/down_proj/kernel', 1),
}


def _config(c: Mapping[str, Any]) -> ModelConfig:
  n_kv_heads, multi_query = c['n_kv_heads'], c.get('multi_query_attention')
  implied = 1 if multi_query else c['n_heads']
  if n_kv_heads is None:
    n_kv_heads = implied
  elif multi_query is not None and n_kv_heads != implied:
    raise ValueError(f'n_kv_heads must be {implied} with multi_query_attention={multi_query}, got {n_kv_heads}')
  # The table and the head have embedding_size rows; vocab_size only says how many of them a tokenizer uses.
  rows = c['vocab_size'] if c['embedding_size'] is None else c['embedding_size']
  if rows < c['vocab_size']:
    raise ValueError(f'embedding_size must be at least vocab_size={c["vocab_size"]}, got {rows}')
  return ModelConfig(
    family='llada',
    vocab_size=rows,
    d_model=c['d_model'],
    n_layers=c['n_layers'],
    n_heads=c['n_heads'],
    n_kv_heads=n_kv_heads,
    head_dim=head_dim('d_model', c['d_model'], 'n_heads', c['n_heads']),
    d_ff=c['mlp_ratio'] * c['d_model'] if c['mlp_hidden_size'] is None else c['mlp_hidden_size'],
    rope_theta=c['rope_theta'],
    norm_eps=c['rms_norm_eps'],
    qkv_bias=False,
    max_length=c['max_sequence_length'],
    mask_id=c['mask_token_id'],
    eos_id=end_ids(c)[0],
    pad_id=c.get('pad_token_id'),
    logit_alignment=SAME_POSITION,
  )


FAMILY = Family(
  model_type='llada',
  paper='2502.09992',
  published='LLaDA-8B-Base, LLaDA-8B-Instruct, LLaDA-1.5',
  keys=_KEYS,
  config=_config,
  tensors=_TENSORS,
)

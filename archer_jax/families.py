"""The published families: what their config.json may say and how they name their tensors.

One table per family says what each key of config.json may be, and one says where each tensor goes. What neither table
knows is refused by name, because a checkpoint that is only mostly understood decodes garbage without an error.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import json
import math
from typing import Any

from archer_jax.config import SAME_POSITION
from archer_jax.config import SHIFTED
from archer_jax.config import ModelConfig

# What the config tables say of a key: a type that is read, HARMLESS, or a tuple of the values that are supported.
# ABSENT among the values means that the published model code takes a supported value where the key is missing.
HARMLESS = 'harmless'
ABSENT = '(no such key)'

_BOOKKEEPING = dict.fromkeys(
  ('_name_or_path', 'auto_map', 'dtype', 'model_type', 'torch_dtype', 'transformers_version', 'use_cache'), HARMLESS
)

# The keys of LLaDA's configuration class; the values that it allows and this model does not have stand nowhere here.
_LLADA_KEYS = _BOOKKEEPING | {
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
  'eos_token_id': int,
  'pad_token_id': int,
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

_DREAM_KEYS = _BOOKKEEPING | {
  'architectures': (['DreamModel'], ABSENT),
  'hidden_size': int,
  'num_hidden_layers': int,
  'num_attention_heads': int,
  'num_key_value_heads': int,
  'intermediate_size': int,
  'vocab_size': int,
  'max_position_embeddings': int,
  'mask_token_id': int,
  'eos_token_id': int,
  'pad_token_id': int,
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


def _llada_config(c: Mapping[str, Any]) -> ModelConfig:
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
    head_dim=_head_dim('d_model', c['d_model'], 'n_heads', c['n_heads']),
    d_ff=c['mlp_ratio'] * c['d_model'] if c['mlp_hidden_size'] is None else c['mlp_hidden_size'],
    rope_theta=c['rope_theta'],
    norm_eps=c['rms_norm_eps'],
    qkv_bias=False,
    max_length=c['max_sequence_length'],
    mask_id=c['mask_token_id'],
    eos_id=c['eos_token_id'],
    pad_id=c['pad_token_id'],
    logit_alignment=SAME_POSITION,
  )


def _dream_config(c: Mapping[str, Any]) -> ModelConfig:
  return ModelConfig(
    family='dream',
    vocab_size=c['vocab_size'],
    d_model=c['hidden_size'],
    n_layers=c['num_hidden_layers'],
    n_heads=c['num_attention_heads'],
    n_kv_heads=c['num_key_value_heads'],
    head_dim=_head_dim('hidden_size', c['hidden_size'], 'num_attention_heads', c['num_attention_heads']),
    d_ff=c['intermediate_size'],
    rope_theta=c['rope_theta'],
    norm_eps=c['rms_norm_eps'],
    qkv_bias=True,
    max_length=c['max_position_embeddings'],
    mask_id=c['mask_token_id'],
    eos_id=c['eos_token_id'],
    pad_id=c['pad_token_id'],
    logit_alignment=SHIFTED,
  )


def _head_dim(width_name: str, width: int, heads_name: str, heads: int) -> int:
  if width % heads:
    raise ValueError(f'{width_name} must be a multiple of {heads_name}={heads}, got {width}')
  return width // heads


# How a tensor becomes a parameter: AS_IS, or the number of axes of the parameter that the layer contracts. A Linear
# weight is [outputs, inputs] and a kernel has its inputs first, so it is transposed and its axes are split; a vector
# contracts nothing.
AS_IS = None

_LLADA_TENSORS = {
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

_DREAM_TENSORS = {
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """A published family.

  Attributes:
    published: the checkpoints that it covers.
    keys: what each key of config.json may be.
    config: makes the model's config of a config.json whose keys passed.
    tensors: pattern of a tensor's name -> the parameter's path, and how the tensor becomes it.
  """

  published: str
  keys: Mapping[str, Any]
  config: Callable[[Mapping[str, Any]], ModelConfig]
  tensors: Mapping[str, tuple[str, int | None]]


# By the model_type of config.json.
FAMILIES: Mapping[str, Family] = {
  'llada': Family(
    published='LLaDA-8B-Base, LLaDA-8B-Instruct, LLaDA-1.5',
    keys=_LLADA_KEYS,
    config=_llada_config,
    tensors=_LLADA_TENSORS,
  ),
  'Dream': Family(
    published='Dream-v0-Base-7B, Dream-v0-Instruct-7B',
    keys=_DREAM_KEYS,
    config=_dream_config,
    tensors=_DREAM_TENSORS,
  ),
}


def family_of(hf_config: Mapping[str, Any]) -> Family:
  """The family that a config.json names; raises ValueError with the list of families for any other."""
  model_type = hf_config.get('model_type')
  if model_type not in FAMILIES:
    known = '; '.join(f'{name} ({family.published})' for name, family in FAMILIES.items())
    raise ValueError(f'model_type must be one of {known}, got {json.dumps(model_type)}')
  return FAMILIES[model_type]


def config_from_hf(hf_config: Mapping[str, Any]) -> ModelConfig:
  """The model's config of a parsed config.json.

  Raises:
    ValueError: naming the first key that is unknown, missing or has an unsupported value, with what is supported.
  """
  family = family_of(hf_config)
  for key, rule in family.keys.items():
    if rule is not HARMLESS:
      _check(key, hf_config.get(key, ABSENT), rule)
  if unknown := sorted(hf_config.keys() - family.keys.keys()):
    shown = ', '.join(f'{key}={json.dumps(hf_config[key])[:80]}' for key in unknown)
    raise ValueError(f'keys that {hf_config["model_type"]} does not have: {shown}')
  return family.config(hf_config)


def _check(key: str, value: Any, rule: Any) -> None:
  if isinstance(rule, tuple):
    if value not in rule:
      supported = ' or '.join(json.dumps(choice) for choice in rule if choice is not ABSENT)
      raise ValueError(f'{key} must be {supported}, got {value if value is ABSENT else json.dumps(value)}')
    return
  # A whole number is fine where a real one is asked for; bool is an int to Python and never one here.
  numeric = isinstance(value, int | float if rule is float else rule) and not isinstance(value, bool)
  low = 0 if key.endswith('_token_id') else 1 if rule is not float else math.ulp(0.0)
  if not numeric or (value is not None and not low <= value < math.inf):
    kind = 'a positive number' if rule is float else f'an integer of at least {low}'
    either = '' if rule in (int, float) else ' or null'
    raise ValueError(f'{key} must be {kind}{either}, got {value if value is ABSENT else json.dumps(value)}')

"""What a family consists of, and what the tables of its file are written with."""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
from typing import Any

from archer_jax.config import ModelConfig

# What the config tables say of a key: a type that is read, OPTIONAL for an integer that may be null or missing,
# TOKENS for a token id or a list of them, HARMLESS, or a tuple of the values that are supported.
# ABSENT among the values means that the published model code takes a supported value where the key is missing.
HARMLESS = 'harmless'
OPTIONAL = 'optional'
TOKENS = 'tokens'
ABSENT = '(no such key)'

# Keys of every config.json.
BOOKKEEPING = dict.fromkeys(
  ('_name_or_path', 'auto_map', 'dtype', 'model_type', 'torch_dtype', 'transformers_version', 'use_cache'), HARMLESS
)

# How a tensor becomes a parameter: AS_IS, or the number of axes of the parameter that the layer contracts. A Linear
# weight is [outputs, inputs] and a kernel has its inputs first, so it is transposed and its axes are split; a vector
# contracts nothing.
AS_IS = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """A published family.

  Attributes:
    model_type: what its config.json says.
    paper: its arXiv number.
    published: the checkpoints that it covers.
    keys: what each key of config.json may be.
    config: makes the model's config of a config.json whose keys passed.
    tensors: pattern of a tensor's name -> the parameter's path, and how the tensor becomes it.
  """

  model_type: str
  paper: str
  published: str
  keys: Mapping[str, Any]
  config: Callable[[Mapping[str, Any]], ModelConfig]
  tensors: Mapping[str, tuple[str, int | None]]


def end_ids(hf_config: Mapping[str, Any]) -> tuple[int, ...]:
  """The end tokens that a checked config.json names; the first is the model's own."""
  ids = hf_config['eos_token_id']
  return tuple(ids) if isinstance(ids, list) else (ids,)


def head_dim(width_name: str, width: int, heads_name: str, heads: int) -> int:
  """Width of a head; raises ValueError if the heads do not share the model's width evenly."""
  if width % heads:
    raise ValueError(f'{width_name} must be a multiple of {heads_name}={heads}, got {width}')
  return width // heads

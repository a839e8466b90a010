"""The published families: what their config.json may say and how they name their tensors.

A family is a file of this folder that defines FAMILY: one table says what each key of config.json may be, and one says
where each tensor goes. What neither table knows is refused by name, because a checkpoint that is only mostly understood
decodes garbage without an error.
"""

from collections.abc import Mapping
import functools
import importlib
import json
import math
import pkgutil
from typing import Any

from archer_jax.config import ModelConfig
from archer_jax.families.base import ABSENT
from archer_jax.families.base import AS_IS
from archer_jax.families.base import HARMLESS
from archer_jax.families.base import OPTIONAL
from archer_jax.families.base import TOKENS
from archer_jax.families.base import Family
from archer_jax.families.base import end_ids

__all__ = ['ABSENT', 'AS_IS', 'HARMLESS', 'Family', 'check_key', 'config_from_hf', 'end_ids', 'families', 'family_of']


@functools.cache
def families() -> Mapping[str, Family]:
  """The families of this folder by the model_type of their config.json, in the order of their papers."""
  names = [module.name for module in pkgutil.iter_modules(__path__) if module.name != 'base']
  found = [importlib.import_module(f'{__name__}.{name}').FAMILY for name in names]
  return {family.model_type: family for family in sorted(found, key=lambda family: family.paper)}


def family_of(hf_config: Mapping[str, Any]) -> Family:
  """The family that a config.json names; raises ValueError with the list of families for any other."""
  model_type = hf_config.get('model_type')
  if model_type not in families():
    known = '; '.join(f'{name} ({family.published})' for name, family in families().items())
    raise ValueError(f'model_type must be one of {known}, got {json.dumps(model_type)}')
  return families()[model_type]


def config_from_hf(hf_config: Mapping[str, Any]) -> ModelConfig:
  """The model's config of a parsed config.json.

  Raises:
    ValueError: naming the first key that is unknown, missing or has an unsupported value, with what is supported.
  """
  family = family_of(hf_config)
  for key, rule in family.keys.items():
    if rule is not HARMLESS:
      check_key(key, hf_config.get(key, ABSENT), rule)
  if unknown := sorted(hf_config.keys() - family.keys.keys()):
    shown = ', '.join(f'{key}={json.dumps(hf_config[key])[:80]}' for key in unknown)
    raise ValueError(f'keys that {hf_config["model_type"]} does not have: {shown}')
  return family.config(hf_config)


def check_key(key: str, value: Any, rule: Any) -> None:
  """Raises ValueError naming a key of JSON and its value unless the value is as the rule of `base` says."""
  if rule is TOKENS:
    # Of an empty list nothing is the model's own.
    for token in value if isinstance(value, list) and value else [value]:
      check_key(key, token, int)
    return
  if rule is OPTIONAL:
    rule, value = int | None, None if value is ABSENT else value
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

"""LoRA adapters in PEFT's layout, as what they add to the tensors of a base: W + scale * B @ A.

The tensors' names say which layers are meant. What adapter_config.json says beside the ranks and the scale must be off,
since an adapter that is only mostly understood decodes garbage without an error.
"""

from collections.abc import Mapping
from collections.abc import Set
import dataclasses
import json
import math
from pathlib import Path
import re
from typing import Any

import numpy as np

from archer_jax.checkpoints.manifest import ADAPTER_CONFIG
from archer_jax.checkpoints.manifest import ADAPTER_PICKLE
from archer_jax.checkpoints.manifest import ADAPTER_WEIGHTS
from archer_jax.checkpoints.published import open_tensors
from archer_jax.checkpoints.published import read_json
from archer_jax.families import ABSENT
from archer_jax.families import HARMLESS
from archer_jax.families import check_key

# The dtypes of a safetensors header that become float32 without a loss.
_DTYPES = ('F32', 'BF16', 'F16')

# PEFT's name for the base, before the names that the base itself has.
_PREFIX = 'base_model.model.'

_KEYS = {
  'peft_type': ('LORA',),
  'r': int,
  'lora_alpha': float,
  'use_rslora': (False, True, ABSENT),
  'bias': ('none', ABSENT),
  'fan_in_fan_out': (False, ABSENT),
  # The other ways to begin (pissa, olora, corda, loftq, lora_ga) change the base too.
  'init_lora_weights': (True, False, 'gaussian', 'eva', 'orthogonal', ABSENT),
  # Checked below.
  **dict.fromkeys(('rank_pattern', 'alpha_pattern', 'modules_to_save'), HARMLESS),
  # What was trained is known by its tensors.
  **dict.fromkeys(
    ('target_modules', 'exclude_modules', 'layers_to_transform', 'layers_pattern', 'ensure_weight_tying'), HARMLESS
  ),
  **dict.fromkeys(
    (
      'auto_mapping',
      'base_model_name_or_path',
      'corda_config',
      'eva_config',
      'inference_mode',
      'loftq_config',
      'lora_dropout',
      'megatron_config',
      'megatron_core',
      'peft_version',
      'qalora_group_size',
      'revision',
      'runtime_config',
      'task_type',
    ),
    HARMLESS,
  ),
}

# What the manifest keeps of adapter_config.json.
_TOLD = ('base_model_name_or_path', 'r', 'lora_alpha', 'use_rslora', 'rank_pattern', 'alpha_pattern')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora:
  """What is added to the weight of one linear layer, [outputs, inputs].

  Attributes:
    file: the adapter's safetensors, which has A, [r, inputs], and B, [outputs, r].
    module: the layer's name in the base.
    scale: alpha / r, or alpha / sqrt(r) with rslora.
  """

  file: Path
  module: str
  scale: float

  def rows(self, start: int, stop: int) -> np.ndarray:
    """float32[stop - start, inputs]: what is added to these rows."""
    with open_tensors(self.file) as opened:
      a = opened.get_slice(_half(self.module, 'A'))[:].astype(np.float32)
      b = opened.get_slice(_half(self.module, 'B'))[start:stop].astype(np.float32)
    # B is small, the product is not.
    return (np.float32(self.scale) * b) @ a


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter:
  """An adapter that fits a base.

  Attributes:
    config_file, weights_file: what it consists of.
    told: what the manifest keeps of it.
    lora: by the name of a tensor of the base, what is added to it.
    whole: by the name of a tensor of the base, the name of the adapter's tensor that takes its place.
  """

  config_file: Path
  weights_file: Path
  told: Mapping[str, Any]
  lora: Mapping[str, Lora]
  whole: Mapping[str, str]


def read_adapter(folder: Path, shapes: Mapping[str, tuple[int, ...]], linear: Set[str]) -> Adapter:
  """Reads an adapter's config and the header of its weights.

  Args:
    folder: with adapter_config.json and adapter_model.safetensors.
    shapes: shape of each tensor of the base by its name.
    linear: names of those that are weights of linear layers.

  Raises:
    FileNotFoundError: a file is missing.
    ValueError: naming the key or tensor that is not supported or does not fit the base.
  """
  if not folder.is_dir():
    raise FileNotFoundError(f'adapter {folder} must be a folder with {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}')
  config_file, weights_file = folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS
  config = read_json(config_file)
  try:
    _check_config(config)
  except ValueError as error:
    raise ValueError(f'{config_file}: {error}') from error
  if not weights_file.is_file():
    if (folder / ADAPTER_PICKLE).is_file():
      raise FileNotFoundError(
        f'adapter {folder} has its weights in {ADAPTER_PICKLE}, which only torch reads; '
        f'save them with PEFT as {ADAPTER_WEIGHTS}'
      )
    raise FileNotFoundError(f'{weights_file} does not exist')

  found = _tensors(weights_file)
  ranks, lora, whole = {}, {}, {}
  for name, shape in found.items():
    if match := re.fullmatch(rf'{re.escape(_PREFIX)}(.+)\.lora_[AB]\.weight', name):
      module = match[1]
      if f'{module}.weight' not in linear:
        raise ValueError(f'tensor {name} in {weights_file} belongs to no linear layer of the base')
      for half in (_half(module, 'A'), _half(module, 'B')):
        if half not in found:
          raise ValueError(f'tensor {name} in {weights_file} needs {half}, which is not there')
      ranks[module] = _of_pattern(config, 'rank_pattern', module, config['r'])
      alpha = _of_pattern(config, 'alpha_pattern', module, config['lora_alpha'])
      divisor = math.sqrt(ranks[module]) if config.get('use_rslora') else ranks[module]
      lora[f'{module}.weight'] = Lora(file=weights_file, module=module, scale=alpha / divisor)
      outputs, inputs = shapes[f'{module}.weight']
      wanted, why = (
        ((ranks[module], inputs) if name.endswith('lora_A.weight') else (outputs, ranks[module])),
        f' for rank {ranks[module]}',
      )
    elif name.startswith(_PREFIX) and name.removeprefix(_PREFIX) in shapes:
      whole[name.removeprefix(_PREFIX)] = name
      wanted, why = shapes[name.removeprefix(_PREFIX)], ''
    else:
      raise ValueError(f'tensor {name} in {weights_file} belongs to no tensor of the base')
    if shape != wanted:
      raise ValueError(f'tensor {name} in {weights_file} must have shape {list(wanted)}{why}, got {list(shape)}')
  if not found:
    raise ValueError(f'{weights_file} has no tensors')
  if both := sorted(lora.keys() & whole.keys()):
    raise ValueError(f'{weights_file} has {both[0]} both whole and as lora_A and lora_B')
  for module in config.get('modules_to_save') or ():
    for name in shapes:
      if f'.{name}'.rpartition('.')[0].endswith(f'.{module}') and name not in whole:
        raise ValueError(
          f'{weights_file} lacks {_PREFIX}{name}, though modules_to_save in {config_file} names {module}'
        )
  told = {'folder': folder.resolve().name, **{key: config[key] for key in _TOLD if config.get(key)}}
  return Adapter(config_file=config_file, weights_file=weights_file, told=told, lora=lora, whole=whole)


def _check_config(config: Mapping[str, Any]) -> None:
  """Raises ValueError naming the first key that says anything else than LoRA of linear layers."""
  for key, rule in _KEYS.items():
    if rule is not HARMLESS:
      check_key(key, config.get(key, ABSENT), rule)
  for key in config.keys() - _KEYS.keys():
    # PEFT writes every key of its version, those of other methods as off.
    if config[key] not in (None, False) and config[key] not in ({}, []):
      raise ValueError(f'{key} must be off (null, false or empty), got {json.dumps(config[key])[:80]}')
  for key, rule in (('rank_pattern', int), ('alpha_pattern', float)):
    pattern = config.get(key) or {}
    if not isinstance(pattern, dict):
      raise ValueError(f'{key} must be an object with a number for each pattern, got {json.dumps(pattern)[:80]}')
    for name, value in pattern.items():
      check_key(f'{key}[{json.dumps(name)}]', value, rule)
      try:
        re.compile(name)
      except re.error as error:
        raise ValueError(f'{key} must have regular expressions as its keys, got {json.dumps(name)}: {error}') from error
  modules = config.get('modules_to_save') or []
  if not isinstance(modules, list) or not all(isinstance(module, str) for module in modules):
    raise ValueError(f'modules_to_save must be null or a list of names, got {json.dumps(modules)[:80]}')


def _tensors(file: Path) -> dict[str, tuple[int, ...]]:
  """Shape of each tensor of a file of safetensors, all of which have a dtype of `_DTYPES`."""
  shapes = {}
  with open_tensors(file) as opened:
    for name in opened.offset_keys():
      info = opened.get_slice(name)
      if info.get_dtype() not in _DTYPES:
        raise ValueError(f'tensor {name} in {file} must be {" or ".join(_DTYPES)}, got {info.get_dtype()}')
      shapes[name] = tuple(info.get_shape())
  return shapes


def _half(module: str, letter: str) -> str:
  return f'{_PREFIX}{module}.lora_{letter}.weight'


def _of_pattern(config: Mapping[str, Any], key: str, module: str, default: float) -> float:
  """The value of the first pattern that is the module's name or the end of it behind a dot, as in PEFT."""
  for pattern, value in (config.get(key) or {}).items():
    if re.match(rf'(.*\.)?({pattern})$', module):
      return value
  return default

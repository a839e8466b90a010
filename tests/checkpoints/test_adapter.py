"""LoRA adapters: merged as numpy merges them, or refused by what is not supported."""

import hashlib
import json
import re
import shutil

from golden_data import GOLDENS
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from safetensors.numpy import save_file

from archer_jax.checkpoints import checkpoint
from archer_jax.checkpoints import convert as convert_module
from archer_jax.checkpoints.adapter import read_adapter
from archer_jax.checkpoints.convert import convert
from archer_jax.checkpoints.manifest import read_manifest

pytestmark = pytest.mark.filterwarnings('ignore:.*no tokenizer files')

# As PEFT writes it, but for what the tests are about.
CONFIG = {
  'alpha_pattern': {},
  'auto_mapping': None,
  'base_model_name_or_path': 'GSAI-ML/LLaDA-8B-Instruct',
  'bias': 'none',
  'exclude_modules': None,
  'fan_in_fan_out': False,
  'inference_mode': True,
  'init_lora_weights': True,
  'layer_replication': None,
  'layers_pattern': None,
  'layers_to_transform': None,
  'loftq_config': {},
  'lora_alpha': 6,
  'lora_bias': False,
  'lora_dropout': 0.05,
  'megatron_config': None,
  'megatron_core': 'megatron.core',
  'modules_to_save': None,
  'peft_type': 'LORA',
  'r': 4,
  'rank_pattern': {},
  'target_modules': ['q_proj'],
  'task_type': 'CAUSAL_LM',
  'trainable_token_indices': None,
  'use_dora': False,
  'use_rslora': False,
}
PREFIX = 'base_model.model.'

# Layers of each golden, and where their kernels stand.
LAYERS = {
  'llada_tiny': {
    'model.transformer.blocks.0.q_proj': 'blocks_0/attn/q_proj',
    'model.transformer.blocks.1.attn_out': 'blocks_1/attn/o_proj',
    'model.transformer.blocks.2.ff_proj': 'blocks_2/mlp/gate_proj',
    'model.transformer.blocks.2.ff_out': 'blocks_2/mlp/down_proj',
    'model.transformer.ff_out': 'head',
  },
  'dream_tiny': {
    'model.layers.0.self_attn.k_proj': 'blocks_0/attn/k_proj',
    'model.layers.1.self_attn.o_proj': 'blocks_1/attn/o_proj',
    'model.layers.1.mlp.down_proj': 'blocks_1/mlp/down_proj',
    'lm_head': 'head',
  },
}
Q, FF, HEAD = (f'model.transformer.{name}' for name in ('blocks.0.q_proj', 'blocks.2.ff_out', 'ff_out'))


@pytest.fixture(scope='module')
def bases():
  """The tensors of the goldens."""
  return {name: load_file(GOLDENS / name / 'model.safetensors') for name in LAYERS}


def lora(base, modules, rank=4, dtype=np.float32):
  """A and B of each module, of which no entry is 0."""
  rng, tensors = np.random.default_rng(0), {}
  for module in modules:
    outputs, inputs = base[f'{module}.weight'].shape
    tensors[f'{PREFIX}{module}.lora_A.weight'] = rng.normal(size=(rank, inputs)).astype(dtype)
    tensors[f'{PREFIX}{module}.lora_B.weight'] = rng.normal(size=(outputs, rank)).astype(dtype)
  return tensors


def write_adapter(folder, tensors, **config):
  folder.mkdir()
  (folder / 'adapter_config.json').write_text(json.dumps(CONFIG | config))
  save_file(tensors, folder / 'adapter_model.safetensors')
  return folder


def read(folder, base):
  linear = {name for name, tensor in base.items() if tensor.ndim == 2 and 'wte' not in name}
  return read_adapter(folder, {name: tensor.shape for name, tensor in base.items()}, linear)


def product(tensors, module):
  """B @ A in float64."""
  a, b = (tensors[f'{PREFIX}{module}.lora_{half}.weight'].astype(np.float64) for half in 'AB')
  return b @ a


def kernels(params, name):
  """Each kernel of the golden's layers as the weight that it was, [outputs, inputs], and all other parameters."""
  flat = {jax.tree_util.keystr(p, simple=True, separator='/'): x for p, x in jax.tree.leaves_with_path(params)}
  found = {module: np.asarray(flat.pop(f'{path}/kernel')) for module, path in LAYERS[name].items()}
  return found, flat


@pytest.mark.parametrize('name', LAYERS)
def test_an_adapter_is_merged_into_the_layers_that_its_tensors_name(name, bases, request, tmp_path, monkeypatch):
  # A large weight is merged a few rows at a time.
  monkeypatch.setattr(convert_module, '_READ_BYTES', 1000)
  base, tensors = bases[name], lora(bases[name], LAYERS[name])
  adapter = write_adapter(tmp_path / 'mine', tensors)
  convert(GOLDENS / name, tmp_path / 'output', adapter=adapter)
  merged, others = kernels(checkpoint.load(tmp_path / 'output')[1], name)
  for module, kernel in merged.items():
    weight = base[f'{module}.weight']
    want = weight + 6 / 4 * product(tensors, module)
    np.testing.assert_allclose(kernel.reshape(want.shape[::-1]).T, want, rtol=1e-6, atol=1e-5)
    assert np.abs(want - weight).min() > 0
  jax.tree.map(np.testing.assert_array_equal, others, kernels(request.getfixturevalue(name).params, name)[1])

  manifest = read_manifest(tmp_path / 'output')
  assert manifest.adapter == {
    'folder': 'mine',
    'base_model_name_or_path': 'GSAI-ML/LLaDA-8B-Instruct',
    'r': 4,
    'lora_alpha': 6,
  }
  for file in ('adapter_config.json', 'adapter_model.safetensors'):
    assert manifest.sources[file] == hashlib.sha256((adapter / file).read_bytes()).hexdigest()
  assert read_manifest(request.getfixturevalue(name).path).adapter == {}


def test_whole_tensors_take_the_place_of_the_base_and_sums_are_rounded_once(bases, tmp_path):
  base = bases['llada_tiny']
  tensors = lora(base, [Q, FF], dtype=np.float16)
  head = np.random.default_rng(1).normal(size=base[f'{HEAD}.weight'].shape).astype(np.float16)
  adapter = write_adapter(tmp_path / 'adapter', {**tensors, f'{PREFIX}{HEAD}.weight': head}, modules_to_save=None)
  convert(GOLDENS / 'llada_tiny', tmp_path / 'output', adapter=adapter, dtype='bfloat16')
  merged, _ = kernels(checkpoint.load(tmp_path / 'output')[1], 'llada_tiny')
  want = {HEAD: head.astype(np.float32)}
  for module in (Q, FF):
    want[module] = (base[f'{module}.weight'] + 1.5 * product(tensors, module)).astype(np.float32)
  for module, weight in want.items():
    got = merged[module].reshape(weight.shape[::-1]).T
    # Half of the last of bfloat16's 8 bits, with room for float32's own rounding.
    assert got.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(got.astype(np.float32), weight, rtol=2.0**-8, atol=1e-5)


@pytest.mark.parametrize(
  ('config', 'ranks', 'scales'),
  [
    ({}, {}, {Q: 6 / 4, HEAD: 6 / 4}),
    ({'lora_alpha': 0.5, 'use_rslora': True}, {}, {Q: 0.25, HEAD: 0.25}),
    ({'alpha_pattern': {'q_proj': 10}}, {}, {Q: 10 / 4, FF: 6 / 4}),
    # The first pattern that fits a whole name or its end behind a dot, as a regular expression.
    ({'alpha_pattern': {'out': 99, 'ff_out': 8, r'blocks\.\d+\.ff_out': 99}}, {}, {Q: 6 / 4, FF: 2, HEAD: 2}),
    ({'alpha_pattern': {r'blocks\.[12]\.ff_out': 8}}, {}, {Q: 6 / 4, FF: 2, HEAD: 6 / 4}),
    ({'alpha_pattern': {rf'^{HEAD}': 8}}, {}, {FF: 6 / 4, HEAD: 2}),
    ({'rank_pattern': {'q_proj': 2}}, {Q: 2}, {Q: 3, FF: 6 / 4}),
    ({'rank_pattern': {'ff_out': 16}, 'alpha_pattern': {'ff_out': 8}, 'use_rslora': True}, {FF: 16}, {Q: 3, FF: 2}),
  ],
)
def test_scales_of_ranks_alphas_and_patterns(config, ranks, scales, bases, tmp_path):
  base, tensors = bases['llada_tiny'], {}
  for module in scales:
    tensors |= lora(base, [module], ranks.get(module, 4))
  found = read(write_adapter(tmp_path / 'adapter', tensors, **config), base).lora
  assert {name: entry.scale for name, entry in found.items()} == {f'{m}.weight': s for m, s in scales.items()}
  rows = found[f'{Q}.weight' if Q in scales else f'{FF}.weight']
  want = rows.scale * product(tensors, rows.module)[3:9]
  np.testing.assert_allclose(rows.rows(3, 9), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
  ('config', 'message'),
  [
    ({'peft_type': 'IA3'}, 'peft_type must be "LORA", got "IA3"'),
    ({'use_dora': True}, 'use_dora must be off (null, false or empty), got true'),
    ({'lora_bias': True}, 'lora_bias must be off'),
    ({'layer_replication': [[0, 2]]}, 'layer_replication must be off (null, false or empty), got [[0, 2]]'),
    ({'trainable_token_indices': [3]}, 'trainable_token_indices must be off'),
    ({'target_parameters': ['mlp.gate']}, 'target_parameters must be off'),
    ({'of_a_later_version': 'x'}, 'of_a_later_version must be off (null, false or empty), got "x"'),
    ({'bias': 'lora_only'}, 'bias must be "none", got "lora_only"'),
    ({'fan_in_fan_out': True}, 'fan_in_fan_out must be false, got true'),
    ({'init_lora_weights': 'pissa'}, 'init_lora_weights must be true or false or "gaussian"'),
    ({'use_rslora': 'yes'}, 'use_rslora must be false or true, got "yes"'),
    ({'r': 0}, 'r must be an integer of at least 1, got 0'),
    ({'r': None}, 'r must be an integer of at least 1, got null'),
    ({'lora_alpha': '16'}, 'lora_alpha must be a positive number, got "16"'),
    ({'rank_pattern': [8]}, 'rank_pattern must be an object with a number for each pattern, got [8]'),
    ({'rank_pattern': {'q_proj': 1.5}}, 'rank_pattern["q_proj"] must be an integer of at least 1, got 1.5'),
    ({'alpha_pattern': {'q_proj': None}}, 'alpha_pattern["q_proj"] must be a positive number, got null'),
    ({'alpha_pattern': {'(': 8}}, 'alpha_pattern must have regular expressions as its keys, got "("'),
    ({'modules_to_save': 'wte'}, 'modules_to_save must be null or a list of names, got "wte"'),
    ({'modules_to_save': ['wte']}, 'lacks base_model.model.model.transformer.wte.weight, though modules_to_save in'),
    # A rank that is not the tensors'.
    ({'r': 8}, f'tensor {PREFIX}{Q}.lora_A.weight in'),
    ({'rank_pattern': {'q_proj': 2}}, 'must have shape [2, 64] for rank 2, got [4, 64]'),
  ],
)
def test_what_a_config_must_not_say_is_refused_by_name(config, message, bases, tmp_path):
  base = bases['llada_tiny']
  folder = write_adapter(tmp_path / 'adapter', lora(base, [Q]), **config)
  with pytest.raises(ValueError, match=re.escape(message)) as raised:
    read(folder, base)
  assert str(folder) in str(raised.value) and '\n' not in str(raised.value)


A, B = (f'{PREFIX}{Q}.lora_{half}.weight' for half in 'AB')


def renamed(old, new):
  return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
  ('edit', 'message'),
  [
    (lambda t: {A: t[A]}, f'tensor {A} in FILE needs {B}, which is not there'),
    (lambda t: {B: t[B]}, f'tensor {B} in FILE needs {A}, which is not there'),
    (lambda t: {}, 'FILE has no tensors'),
    (
      renamed('blocks.0', 'blocks.7'),
      f'tensor {A.replace("s.0", "s.7")} in FILE belongs to no linear layer of the base',
    ),
    (
      renamed('blocks.0.q_proj', 'wte'),
      f'tensor {PREFIX}model.transformer.wte.lora_A.weight in FILE belongs to no lin',
    ),
    (renamed(PREFIX, ''), f'tensor {A.removeprefix(PREFIX)} in FILE belongs to no tensor of the base'),
    (renamed('lora_', 'lora_embedding_'), 'lora_embedding_A.weight in FILE belongs to no tensor of the base'),
    (lambda t: {**t, f'{PREFIX}{Q}.bias': t[A]}, f'tensor {PREFIX}{Q}.bias in FILE belongs to no tensor of the base'),
    (
      lambda t: {**t, f'{PREFIX}{Q}.weight': np.zeros((64, 64), 'f')},
      f'{Q}.weight both whole and as lora_A and lora_B',
    ),
    (lambda t: {f'{PREFIX}{Q}.weight': np.zeros((64, 9), 'f')}, f'{Q}.weight in FILE must have shape [64, 64], got [6'),
    (lambda t: {**t, B: t[B].T.copy()}, f'tensor {B} in FILE must have shape [64, 4] for rank 4, got [4, 64]'),
    (lambda t: {**t, A: t[A].astype(np.int8)}, f'tensor {A} in FILE must be F32 or BF16 or F16, got I8'),
  ],
)
def test_a_tensor_that_does_not_fit_the_base_is_refused_by_name(edit, message, bases, tmp_path):
  base = bases['llada_tiny']
  folder = write_adapter(tmp_path / 'adapter', edit(lora(base, [Q])))
  message = message.replace('FILE', str(folder / 'adapter_model.safetensors'))
  with pytest.raises(ValueError, match=re.escape(message)):
    read(folder, base)


def test_files_of_an_adapter_that_are_not_there_are_named(bases, tmp_path):
  base = bases['llada_tiny']
  pointer = 'version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 16000000000\n'
  for name in ('adapter_config.json', 'adapter_model.safetensors'):
    folder = write_adapter(tmp_path / f'pointer-{name}', lora(base, [Q]))
    (folder / name).write_text(pointer)
    with pytest.raises(ValueError, match=f'{name} is a git-lfs pointer and not the file itself'):
      read(folder, base)
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=f'{name} does not exist'):
      read(folder, base)
  (folder / 'adapter_model.bin').write_bytes(b'')
  with pytest.raises(FileNotFoundError, match=r'has its weights in adapter_model\.bin, which only torch reads; save'):
    read(folder, base)
  with pytest.raises(FileNotFoundError, match=r'nowhere must be a folder with adapter_config\.json and'):
    read(tmp_path / 'nowhere', base)


def test_an_adapter_in_the_source_is_refused_with_what_to_do(bases, tmp_path):
  adapter = write_adapter(tmp_path / 'adapter', lora(bases['llada_tiny'], [Q]))
  alone = f'source {adapter} is a LoRA adapter without its model.*--source BASE --adapter {adapter}$'
  for config in (False, True):
    if config:
      # Trainers keep the model's config beside an adapter.
      shutil.copy(GOLDENS / 'llada_tiny' / 'config.json', adapter)
    with pytest.raises(ValueError, match=alone):
      convert(adapter, tmp_path / 'output')
  shutil.copy(GOLDENS / 'llada_tiny' / 'model.safetensors', adapter)
  beside = (
    r"has a LoRA adapter beside the model's weights, adapter_config\.json, adapter_model\.safetensors; move it to"
  )
  for option in (None, adapter):
    with pytest.raises(ValueError, match=beside):
      convert(adapter, tmp_path / 'output', adapter=option)
  (adapter / 'adapter_config.json').unlink()
  (adapter / 'adapter_model.safetensors').rename(adapter / 'adapter_model.bin')
  with pytest.raises(ValueError, match=r"beside the model's weights, adapter_model\.bin; move it"):
    convert(adapter, tmp_path / 'output')
  assert not (tmp_path / 'output').exists()


def test_tokenizer_files_of_an_adapter_are_not_passed_over_in_silence(bases, tmp_path, monkeypatch):
  class Checked(Exception):
    """All that is told before the work has been told."""

  def stop(*_):
    raise Checked

  monkeypatch.setattr(convert_module.text, 'generation_end_ids', stop)
  source = shutil.copytree(GOLDENS / 'llada_tiny', tmp_path / 'source', ignore=shutil.ignore_patterns('*.npz'))
  adapter = write_adapter(tmp_path / 'adapter', lora(bases['llada_tiny'], [Q]))
  for folder in (source, adapter):
    (folder / 'special_tokens_map.json').write_text('{}')
  (adapter / 'chat_template.jinja').write_text('{{ messages }}')
  message = rf'adapter {adapter} has its own chat_template\.jinja; the checkpoint gets what {source} has'
  with pytest.warns(UserWarning, match=message), pytest.raises(Checked):
    convert(source, tmp_path / 'output', adapter=adapter)

import hashlib
import json
import os
from pathlib import Path
import re
import signal
import subprocess
import sys

from golden_data import GOLDENS
from golden_data import case_ids
from golden_data import read_cases
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from safetensors.numpy import save_file

from archer_jax.checkpoints import checkpoint
from archer_jax.checkpoints import convert as convert_module
from archer_jax.checkpoints.convert import convert
from archer_jax.checkpoints.manifest import read_manifest
from archer_jax.config import ModelConfig
from archer_jax.engine.settings import make_settings
from archer_jax.families import config_from_hf
from archer_jax.training.tokenizer import EOS
from archer_jax.training.tokenizer import VOCAB
from archer_jax.training.tokenizer import save_tokenizer

REPOSITORY = Path(__file__).parents[2]
NAMES = ('llada_tiny', 'dream_tiny')

pytestmark = pytest.mark.filterwarnings('ignore:.*no tokenizer files')


def read_config(name):
  return json.loads((GOLDENS / name / 'config.json').read_text())


def write_source(folder, hf_config, shards, index=None):
  """A Hugging Face folder from a config, tensors by file name, and the weight map of an index."""
  folder.mkdir()
  (folder / 'config.json').write_text(json.dumps(hf_config))
  for name, tensors in shards.items():
    save_file(tensors, folder / name)
  if index is not None:
    (folder / 'model.safetensors.index.json').write_text(json.dumps({'metadata': {}, 'weight_map': index}))
  return folder


def golden_source(folder, name, edit=None, hf_config=None):
  """A golden folder whose tensors and config are edited."""
  tensors = load_file(GOLDENS / name / 'model.safetensors')
  if edit is not None:
    edit(tensors)
  return write_source(folder, read_config(name) | (hf_config or {}), {'model.safetensors': tensors})


def forward(model, params, case, family):
  """Logits of a golden `forward` case, and which of its rows count."""
  tokens = jnp.asarray(case.arrays['tokens'])
  batch, length = tokens.shape
  positions = np.tile(np.arange(length, dtype=np.int32), (batch, 1))
  mask = np.ones((batch, 1, length, length), bool)
  rows = np.ones((batch, length), bool)
  if 'attention_mask' in case.arrays:
    rows = case.arrays['attention_mask'].astype(bool)
    mask = np.broadcast_to(rows[:, None, None, :], mask.shape)
    if family == 'dream':
      # The public Dream masks the rows of pads too and lets positions start behind the pads.
      mask = mask & rows[:, None, :, None]
      positions = np.where(rows, np.cumsum(rows, axis=1) - 1, 1).astype(np.int32)
  if 'mask' in case.arrays:
    mask = case.arrays['mask'][None, None]
    positions = case.arrays['position_ids'][None]
  logits, _ = jax.jit(model.apply)({'params': params}, tokens, jnp.asarray(positions), jnp.asarray(mask))
  return np.asarray(logits), rows


@pytest.mark.parametrize('name, case_id', [(name, case_id) for name in NAMES for case_id in case_ids(name, 'forward')])
def test_logits_equal_the_public_models(name, case_id, request):
  golden = request.getfixturevalue(name)
  model, params, _ = checkpoint.load(golden.path)
  logits, rows = forward(model, params, golden.cases[case_id], golden.config.family)
  assert np.abs(logits - golden.cases[case_id].arrays['logits'])[rows].max() < 1e-4


@pytest.mark.parametrize(
  'name, flip',
  [
    ('llada_tiny', {'rope_theta': 490000.0}),
    ('llada_tiny', {'rms_norm_eps': 2e-5}),
    ('dream_tiny', {'rope_theta': 990000.0}),
    ('dream_tiny', {'rms_norm_eps': 1e-5}),
  ],
)
def test_one_wrong_config_value_shows_in_the_logits(name, flip, tmp_path):
  convert(golden_source(tmp_path / 'source', name, hf_config=flip), tmp_path / 'output')
  model, params, _ = checkpoint.load(tmp_path / 'output')
  case = read_cases(name)[case_ids(name, 'forward')[1]]
  logits, _ = forward(model, params, case, model.config.family)
  assert np.abs(logits - case.arrays['logits']).max() > 1e-4


def test_config_of_llada_8b():
  published = read_config('llada_tiny') | {
    'd_model': 4096,
    'embedding_size': 126464,
    'eos_token_id': 126081,
    'mask_token_id': 126336,
    'max_sequence_length': 4096,
    'mlp_hidden_size': 12288,
    'n_heads': 32,
    'n_kv_heads': 32,
    'n_layers': 32,
    'pad_token_id': 126081,
    'vocab_size': 126464,
  }
  assert config_from_hf(published) == ModelConfig(
    family='llada',
    vocab_size=126464,
    d_model=4096,
    n_layers=32,
    n_heads=32,
    n_kv_heads=32,
    head_dim=128,
    d_ff=12288,
    rope_theta=500000.0,
    norm_eps=1e-5,
    qkv_bias=False,
    max_length=4096,
    mask_id=126336,
    eos_id=126081,
    pad_id=126081,
    logit_alignment='same_position',
  )


def test_config_of_dream_7b():
  published = read_config('dream_tiny') | {
    'eos_token_id': 151643,
    'hidden_size': 3584,
    'intermediate_size': 18944,
    'mask_token_id': 151666,
    'max_position_embeddings': 131072,
    'num_attention_heads': 28,
    'num_hidden_layers': 28,
    'num_key_value_heads': 4,
    'pad_token_id': 151643,
    'vocab_size': 152064,
  }
  assert config_from_hf(published) == ModelConfig(
    family='dream',
    vocab_size=152064,
    d_model=3584,
    n_layers=28,
    n_heads=28,
    n_kv_heads=4,
    head_dim=128,
    d_ff=18944,
    rope_theta=1e6,
    norm_eps=1e-6,
    qkv_bias=True,
    max_length=131072,
    mask_id=151666,
    eos_id=151643,
    pad_id=151643,
    logit_alignment='shifted',
  )


@pytest.mark.parametrize(
  'change, field, value',
  [
    ({'n_kv_heads': None}, 'n_kv_heads', 4),
    ({'n_kv_heads': None, 'multi_query_attention': False}, 'n_kv_heads', 4),
    ({'n_kv_heads': None, 'multi_query_attention': True}, 'n_kv_heads', 1),
    ({'n_kv_heads': 2}, 'n_kv_heads', 2),
    ({'mlp_hidden_size': None}, 'd_ff', 256),
    ({'embedding_size': None}, 'vocab_size', 320),
    ({'embedding_size': 384}, 'vocab_size', 384),
  ],
)
def test_llada_sizes_that_follow_from_others(change, field, value):
  assert getattr(config_from_hf(read_config('llada_tiny') | change), field) == value


@pytest.mark.parametrize(
  'name, change, message',
  [
    ('llada_tiny', {'activation_type': 'gelu'}, 'activation_type must be "silu", got "gelu"'),
    ('llada_tiny', {'layer_norm_type': 'default'}, 'layer_norm_type must be "rms", got "default"'),
    ('llada_tiny', {'weight_tying': True}, 'weight_tying must be false, got true'),
    ('llada_tiny', {'rope': False}, 'rope must be true, got false'),
    ('llada_tiny', {'include_qkv_bias': True}, 'include_qkv_bias must be false, got true'),
    ('llada_tiny', {'block_group_size': 4}, 'block_group_size must be 1, got 4'),
    ('llada_tiny', {'architectures': ['LLaDAMoEModelLM']}, 'architectures must be ["LLaDAModelLM"], got ["LLaDAMoE'),
    ('llada_tiny', {'num_experts': 64}, 'keys that llada does not have: num_experts=64'),
    ('llada_tiny', {'n_kv_heads': 2, 'multi_query_attention': True}, 'n_kv_heads must be 1 with multi_query_attention'),
    ('llada_tiny', {'n_kv_heads': 3}, 'n_heads must be a multiple of n_kv_heads, got 4 and 3'),
    ('llada_tiny', {'embedding_size': 300}, 'embedding_size must be at least vocab_size=320, got 300'),
    ('llada_tiny', {'d_model': 66}, 'd_model must be a multiple of n_heads=4, got 66'),
    ('llada_tiny', {'d_model': 64.0}, 'd_model must be an integer of at least 1, got 64.0'),
    ('llada_tiny', {'n_layers': 0}, 'n_layers must be an integer of at least 1, got 0'),
    ('llada_tiny', {'n_layers': True}, 'n_layers must be an integer of at least 1, got true'),
    ('llada_tiny', {'mask_token_id': None}, 'mask_token_id must be an integer of at least 0, got null'),
    ('llada_tiny', {'eos_token_id': 5, 'mask_token_id': 5}, 'eos_id must be another token than the mask, got 5 for'),
    ('llada_tiny', {'pad_token_id': -1}, 'pad_token_id must be an integer of at least 0 or null, got -1'),
    ('llada_tiny', {'mask_token_id': 320}, 'mask_id must be in [0, 320), got 320'),
    ('llada_tiny', {'rope_theta': '1e4'}, 'rope_theta must be a positive number, got "1e4"'),
    ('dream_tiny', {'rope_scaling': {'rope_type': 'yarn'}}, 'rope_scaling must be null, got {"rope_type": "yarn"}'),
    ('dream_tiny', {'use_sliding_window': True}, 'use_sliding_window must be false, got true'),
    ('dream_tiny', {'tie_word_embeddings': True}, 'tie_word_embeddings must be false, got true'),
    ('dream_tiny', {'use_mrope': True}, 'use_mrope must be false, got true'),
    ('dream_tiny', {'hidden_act': 'gelu'}, 'hidden_act must be "silu", got "gelu"'),
    ('dream_tiny', {'quantization_config': {'bits': 4}}, 'keys that Dream does not have: quantization_config={"bits"'),
    ('dream_tiny', {'model_type': 'qwen2'}, 'LLaDA-1.5); Dream (Dream-v0-Base-7B, Dream-v0-Instruct-7B), got "qwen2"'),
  ],
)
def test_unsupported_config_is_refused_by_name(name, change, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    config_from_hf(read_config(name) | change)


@pytest.mark.parametrize('name, key', [('llada_tiny', 'rope_theta'), ('llada_tiny', 'layer_norm_type')])
def test_missing_config_key_is_refused_by_name(name, key):
  hf_config = read_config(name)
  del hf_config[key]
  with pytest.raises(ValueError, match=rf'{key} must be .*, got \(no such key\)'):
    config_from_hf(hf_config)


@pytest.mark.parametrize('name', ['llada_tiny', 'dream_tiny'])
def test_a_model_may_have_no_padding_token(name):
  hf_config = read_config(name)
  assert config_from_hf(hf_config | {'pad_token_id': None}).pad_id is None
  del hf_config['pad_token_id']
  config = config_from_hf(hf_config)
  assert config.pad_id is None
  if name == 'dream_tiny':
    make_settings(config, {'decoder': 'saber'})
    with pytest.raises(ValueError, match='eos_penalty must be 0 for a model without a pad_token_id'):
      make_settings(config, {'decoder': 'saber', 'eos_penalty': 1.0})


@pytest.mark.parametrize('name, has_tokenizer', [('llada_tiny', True), ('llada_tiny', False), ('dream_tiny', False)])
def test_end_tokens_and_size_of_the_tokenizer_are_kept(name, has_tokenizer, tmp_path):
  """Those of config.json, of generation_config.json and of the tokenizer, each once, the model's own first."""
  own = read_config(name)['eos_token_id']
  source = golden_source(tmp_path / 'source', name, hf_config={'eos_token_id': [own, own + 1]})
  (source / 'generation_config.json').write_text(json.dumps({'eos_token_id': [own + 1, own + 2]}))
  if has_tokenizer:
    save_tokenizer(source)
  convert(source, tmp_path / 'output')
  manifest = read_manifest(tmp_path / 'output')
  assert manifest.config.eos_id == own
  assert manifest.end_ids == [own, own + 1, own + 2, *([VOCAB[EOS]] if has_tokenizer else [])]
  assert manifest.tokenizer_size == (len(VOCAB) if has_tokenizer else None)
  model, _, tokenizer = checkpoint.load(tmp_path / 'output')
  assert model.end_ids == tuple(manifest.end_ids)
  assert tokenizer is None or tokenizer.end_ids == model.end_ids


@pytest.mark.parametrize(
  ('ids', 'message'),
  [
    ([300, 319], 'config.json must be other tokens than the mask 319'),
    ([300, 320], 'config.json must be token ids in [0, 320), got 320'),
    ([300, '301'], 'eos_token_id must be an integer of at least 0, got "301"'),
    ([], 'eos_token_id must be an integer of at least 0, got []'),
  ],
)
def test_lists_of_end_tokens_that_are_none(ids, message, tmp_path):
  source = golden_source(tmp_path / 'source', 'llada_tiny', hf_config={'eos_token_id': ids, 'mask_token_id': 319})
  with pytest.raises(ValueError, match=re.escape(message)):
    convert(source, tmp_path / 'output')
  assert not (tmp_path / 'output').exists()


UP = 'model.transformer.blocks.0.up_proj.weight'


def _rename(tensors):
  tensors['model.transformer.blocks.0.up_projection.weight'] = tensors.pop(UP)


def _drop(tensors):
  del tensors[UP]


def _add_layer(tensors):
  tensors[UP.replace('blocks.0', 'blocks.3')] = tensors[UP]


def _transpose(tensors):
  tensors[UP] = np.ascontiguousarray(tensors[UP].T)


def _quantise(tensors):
  tensors[UP] = tensors[UP].astype(np.int8)


def _halve(tensors):
  tensors[UP] = tensors[UP].astype(np.float16)


@pytest.mark.parametrize(
  'edit, message',
  [
    (_rename, 'tensor model.transformer.blocks.0.up_projection.weight in .*model.safetensors is unknown'),
    (_drop, 'lacks the tensors of blocks_0/mlp/up_proj/kernel'),
    (_add_layer, 'tensor model.transformer.blocks.3.up_proj.weight in .* belongs to no layer of a model with 3 layers'),
    (_transpose, rf'tensor {UP} in .* must have shape \[128, 64\], got \[64, 128\]'),
    (_quantise, rf'tensor {UP} in .* must be F32 or BF16, got I8'),
    (_halve, rf'tensor {UP} in .* must be F32 or BF16, got F16'),
  ],
)
def test_tensor_that_does_not_fit_is_refused_by_name(edit, message, tmp_path):
  source = golden_source(tmp_path / 'source', 'llada_tiny', edit)
  with pytest.raises(ValueError, match=message):
    convert(source, tmp_path / 'output')
  assert [path.name for path in tmp_path.iterdir()] == ['source']


def sharded(folder, index=True):
  """The LLaDA golden in two shards, and the weight map of its index."""
  tensors = load_file(GOLDENS / 'llada_tiny' / 'model.safetensors')
  names = sorted(tensors)
  shards = {'a.safetensors': names[::2], 'b.safetensors': names[1::2]}
  weight_map = {name: file for file, held in shards.items() for name in held}
  files = {file: {name: tensors[name] for name in held} for file, held in shards.items()}
  return write_source(folder, read_config('llada_tiny'), files, weight_map if index else None), weight_map


@pytest.mark.parametrize('index', [True, False])
def test_shards_convert_to_the_same_parameters(index, llada_tiny, tmp_path):
  source, _ = sharded(tmp_path / 'source', index)
  convert(source, tmp_path / 'output')
  _, params, _ = checkpoint.load(tmp_path / 'output')
  jax.tree.map(np.testing.assert_array_equal, params, llada_tiny.params)
  digest = hashlib.sha256((source / 'a.safetensors').read_bytes()).hexdigest()
  assert read_manifest(tmp_path / 'output').sources['a.safetensors'] == digest


def test_tensor_in_two_shards_is_refused(tmp_path):
  source, _ = sharded(tmp_path / 'source', index=False)
  (source / 'c.safetensors').write_bytes((source / 'b.safetensors').read_bytes())
  with pytest.raises(ValueError, match=r'tensor model\S+ is in .*b\.safetensors and again in .*c\.safetensors'):
    convert(source, tmp_path / 'output')


def test_shard_index_that_does_not_fit_is_refused(tmp_path):
  source, weight_map = sharded(tmp_path / 'source')
  index = source / 'model.safetensors.index.json'
  name = next(iter(weight_map))
  for changed, message in (
    (weight_map | {name: 'c.safetensors'}, 'lists c.safetensors, which'),
    (weight_map | {name: 'b.safetensors'}, f'puts tensor {name} in b.safetensors, it is in a.safetensors'),
    (weight_map | {'ghost': 'a.safetensors'}, 'puts tensor ghost in a.safetensors, it is in no file'),
    (dict.fromkeys(weight_map, 'a.safetensors'), 'does not list b.safetensors'),
    (None, 'weight_map in .* must give a file name for each tensor'),
  ):
    index.write_text(json.dumps({'weight_map': changed}))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
      convert(source, tmp_path / 'output')
  index.write_text('{')
  with pytest.raises(ValueError, match=r'model.safetensors.index.json is not JSON'):
    convert(source, tmp_path / 'output')


@pytest.mark.parametrize('damage', [lambda data: data[:-100], lambda data: data[:4], lambda data: b'\xff' * len(data)])
def test_damaged_safetensors_are_refused_by_file(damage, tmp_path):
  source = golden_source(tmp_path / 'source', 'llada_tiny')
  file = source / 'model.safetensors'
  file.write_bytes(damage(file.read_bytes()))
  with pytest.raises(ValueError, match=r'model\.safetensors is damaged or no safetensors file'):
    convert(source, tmp_path / 'output')


POINTER = f'version https://git-lfs.github.com/spec/v1\noid sha256:{"0" * 64}\nsize 16000000000\n'


@pytest.mark.parametrize('name', ['model.safetensors', 'config.json', 'model.safetensors.index.json', 'tokenizer.json'])
def test_a_file_that_git_lfs_did_not_fetch_is_named(name, tmp_path):
  source = golden_source(tmp_path / 'source', 'llada_tiny')
  (source / name).write_text(POINTER)
  with pytest.raises(ValueError, match=f'{name} is a git-lfs pointer and not the file itself; fetch it first: git lfs'):
    convert(source, tmp_path / 'output')
  assert not (tmp_path / 'output').exists()


def test_folder_without_config_or_weights_is_refused(tmp_path):
  with pytest.raises(FileNotFoundError, match=r'source .*nowhere must be a folder'):
    convert(tmp_path / 'nowhere', tmp_path / 'output')
  (tmp_path / 'source').mkdir()
  with pytest.raises(FileNotFoundError, match=r'config\.json does not exist'):
    convert(tmp_path / 'source', tmp_path / 'output')
  (tmp_path / 'source' / 'config.json').write_text(json.dumps(read_config('llada_tiny')))
  with pytest.raises(FileNotFoundError, match='has no safetensors files'):
    convert(tmp_path / 'source', tmp_path / 'output')


def test_dtype_is_kept_or_what_was_asked_for(tmp_path):
  def halve(tensors):
    for name in tensors:
      tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)

  source = golden_source(tmp_path / 'bf16', 'llada_tiny', halve)
  original = load_file(source / 'model.safetensors')['model.transformer.wte.weight']
  for dtype, stored in ((None, 'bfloat16'), ('float32', 'float32')):
    convert(source, tmp_path / f'{dtype}', dtype=dtype)
    params = checkpoint.load(tmp_path / f'{dtype}')[1]
    assert {str(x.dtype) for x in jax.tree.leaves(params)} == {stored}
    np.testing.assert_array_equal(np.asarray(params['embedding']).astype(np.float32), original.astype(np.float32))

  convert(GOLDENS / 'llada_tiny', tmp_path / 'rounded', dtype='bfloat16')
  rounded = checkpoint.load(tmp_path / 'rounded')[1]['embedding']
  np.testing.assert_array_equal(np.asarray(rounded).view(np.uint16), original.view(np.uint16))


def test_mixed_dtypes_need_a_choice(tmp_path):
  def mix(tensors):
    tensors[UP] = tensors[UP].astype(ml_dtypes.bfloat16)

  source = golden_source(tmp_path / 'source', 'llada_tiny', mix)
  with pytest.raises(ValueError, match='mixes bfloat16 and float32; choose one of them as dtype'):
    convert(source, tmp_path / 'output')
  convert(source, tmp_path / 'output', dtype='float32')
  with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, got 'int8'"):
    convert(source, tmp_path / 'other', dtype='int8')


def test_square_weights_are_transposed_too(tmp_path):
  def square(tensors):
    rng = np.random.default_rng(0)
    for name in tensors:
      if name.rpartition('.')[0].endswith(('ff_proj', 'up_proj', '0.ff_out', '1.ff_out', '2.ff_out')):
        tensors[name] = rng.standard_normal((64, 64), dtype=np.float32)

  source = golden_source(tmp_path / 'source', 'llada_tiny', square, {'mlp_hidden_size': 64})
  convert(source, tmp_path / 'output')
  kernel = checkpoint.load(tmp_path / 'output')[1]['blocks_0']['mlp']['up_proj']['kernel']
  np.testing.assert_array_equal(kernel, load_file(source / 'model.safetensors')[UP].T)


def test_large_arrays_are_read_and_written_in_parts(llada_tiny, tmp_path, monkeypatch):
  monkeypatch.setattr(convert_module, '_READ_BYTES', 1000)
  monkeypatch.setattr(convert_module, '_PART_BYTES', 20_000)
  monkeypatch.setattr(checkpoint, '_CHUNK_BYTES', 5000)
  convert(GOLDENS / 'llada_tiny', tmp_path / 'output')
  _, params, _ = checkpoint.load(tmp_path / 'output')
  jax.tree.map(np.testing.assert_array_equal, params, llada_tiny.params)


def test_existing_output_is_left_alone(tmp_path):
  (tmp_path / 'output').mkdir()
  (tmp_path / 'output' / 'mine').write_text('mine')
  with pytest.raises(FileExistsError, match=r'output .* exists already and is never overwritten'):
    convert(GOLDENS / 'llada_tiny', tmp_path / 'output')
  assert [path.name for path in (tmp_path / 'output').iterdir()] == ['mine']


def test_interrupted_conversion_leaves_nothing(tmp_path, monkeypatch):
  monkeypatch.setattr(convert_module, '_PART_BYTES', 20_000)
  reads = []
  read = convert_module._parameter

  def interrupted(*args):
    reads.append(args)
    if len(reads) == 12:
      assert [path.name for path in tmp_path.iterdir()] != []
      raise KeyboardInterrupt
    return read(*args)

  monkeypatch.setattr(convert_module, '_parameter', interrupted)
  with pytest.raises(KeyboardInterrupt):
    convert(GOLDENS / 'llada_tiny', tmp_path / 'output')
  assert list(tmp_path.iterdir()) == []


_KILLED = """
import os, signal, sys
from archer_jax.checkpoints import convert
convert._PART_BYTES = 20_000
reads, read = [], convert._parameter
def killed(*args):
  reads.append(args)
  if len(reads) == 12:
    os.kill(os.getpid(), signal.SIGKILL)
  return read(*args)
convert._parameter = killed
convert.convert(sys.argv[1], sys.argv[2])
"""


def run_python(*args):
  """Runs Python in a process of its own, with the package on its path."""
  env = os.environ | {'PYTHONPATH': str(REPOSITORY), 'JAX_PLATFORMS': 'cpu'}
  return subprocess.run([sys.executable, *map(str, args)], capture_output=True, text=True, env=env, check=False)


def test_killed_conversion_leaves_nothing_that_loads(tmp_path):
  result = run_python('-c', _KILLED, GOLDENS / 'llada_tiny', tmp_path / 'output')
  assert result.returncode == -signal.SIGKILL, result.stderr
  (left,) = tmp_path.iterdir()
  assert left.name != 'output' and list(left.rglob('*'))
  with pytest.raises(ValueError, match=r'must be a folder with a manifest\.json'):
    checkpoint.load(left)
  convert(GOLDENS / 'llada_tiny', tmp_path / 'output')
  checkpoint.load(tmp_path / 'output')


@pytest.mark.slow
def test_peak_memory_of_a_large_conversion(tmp_path):
  result = run_python(
    REPOSITORY / 'benchmarks' / 'convert.py', '--width=2048', f'--folder={tmp_path}', f'--json={tmp_path / "figures"}'
  )
  assert result.returncode == 0, result.stderr
  figures = json.loads((tmp_path / 'figures').read_text())
  assert figures['within_limit'], figures

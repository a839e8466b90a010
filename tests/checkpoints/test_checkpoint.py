import gc
import json
import os
from pathlib import Path
import re
import shutil
import subprocess
import sys
import warnings

from golden_data import GOLDENS
import jax
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import ml_dtypes
import numpy as np
import pytest

from archer_jax.checkpoints import checkpoint
from archer_jax.checkpoints import manifest as manifest_module
from archer_jax.checkpoints.manifest import read_manifest
from archer_jax.config import ModelConfig
from archer_jax.model import Transformer
from archer_jax.model import abstract_params
from archer_jax.model import init_params
from archer_jax.sharding import param_shardings

CONFIG = ModelConfig(
  family='dream',
  vocab_size=64,
  d_model=32,
  n_layers=2,
  n_heads=8,
  n_kv_heads=4,
  head_dim=4,
  d_ff=48,
  rope_theta=10000.0,
  norm_eps=1e-6,
  qkv_bias=True,
  max_length=128,
  mask_id=63,
  eos_id=62,
  pad_id=61,
  logit_alignment='shifted',
)


def make_mesh(data, model):
  devices = jax.devices()[: data * model]
  return jax.make_mesh((data, model), ('data', 'model'), axis_types=(AxisType.Auto,) * 2, devices=devices)


def assert_equal_trees(got, want):
  jax.tree.map(np.testing.assert_array_equal, got, want)
  assert jax.tree.map(lambda x: x.dtype, got) == jax.tree.map(lambda x: x.dtype, want)


@pytest.fixture(scope='module')
def params():
  """Random parameters in bfloat16."""
  return init_params(CONFIG, jax.random.key(0), 'bfloat16')


@pytest.fixture(scope='module')
def saved(params, tmp_path_factory):
  """A checkpoint of `params` without a tokenizer, with defaults."""
  path = tmp_path_factory.mktemp('checkpoint') / 'saved'
  checkpoint.save(path, CONFIG, params, defaults={'shadow': 'self', 'gen_length': 16, 'example_prompt': 'a\u00e9'})
  return path


@pytest.fixture
def copied(saved, tmp_path):
  """A copy of the checkpoint that a test may damage."""
  return shutil.copytree(saved, tmp_path / 'copied')


def test_load_returns_what_was_saved(saved, params):
  model, loaded, tokenizer = checkpoint.load(saved)
  assert model == Transformer(CONFIG, end_ids=(CONFIG.eos_id,))
  assert tokenizer is None
  assert_equal_trees(loaded, params)
  assert all(x.sharding.device_set == {jax.devices()[0]} for x in jax.tree.leaves(loaded))
  manifest = read_manifest(saved)
  assert manifest.config == CONFIG and manifest.dtype == 'bfloat16' and manifest.sources == {}
  assert manifest.defaults == {'shadow': 'self', 'gen_length': 16, 'example_prompt': 'a\u00e9'}


def test_bundled_model_is_the_default(saved, params, monkeypatch):
  for module in (checkpoint, manifest_module):
    monkeypatch.setattr(module, 'BUNDLED', saved)
  assert read_manifest().config == CONFIG
  assert_equal_trees(checkpoint.load()[1], params)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_load_in_the_dtype_that_is_asked_for(dtype, saved, params, tmp_path):
  want = jax.tree.map(lambda x: x.astype(dtype), params)
  assert_equal_trees(checkpoint.load(saved, dtype=dtype)[1], want)
  # Rounding on the way down is to the nearest even, as everywhere in JAX.
  full = init_params(CONFIG, jax.random.key(1))
  checkpoint.save(tmp_path / 'full', CONFIG, full)
  want = jax.tree.map(lambda x: x.astype(dtype), full)
  assert_equal_trees(checkpoint.load(tmp_path / 'full', dtype=dtype)[1], want)
  with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, got 'float16'"):
    checkpoint.load(saved, dtype='float16')


@pytest.mark.parametrize('data, model', [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 1), (2, 4), (8, 1)])
def test_restore_on_any_number_of_devices(data, model, params, tmp_path, caplog):
  four = make_mesh(1, 4)
  spread = jax.device_put(params, param_shardings(CONFIG, four))
  checkpoint.save(tmp_path / 'four', CONFIG, spread)
  mesh = make_mesh(data, model)
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    loaded = checkpoint.load(tmp_path / 'four', mesh=mesh)[1]
    with jax.set_mesh(mesh):
      inside = checkpoint.load(tmp_path / 'four', mesh=mesh)[1]
  assert [record for record in caplog.records if record.levelname in ('WARNING', 'ERROR')] == []
  for tree in (loaded, inside):
    assert_equal_trees(tree, params)
    assert jax.tree.map(lambda x: x.sharding, tree) == param_shardings(CONFIG, mesh)


def test_shardings_follow_the_table():
  mesh = make_mesh(2, 4)
  shardings = param_shardings(CONFIG, mesh)
  assert jax.tree.structure(shardings) == jax.tree.structure(abstract_params(CONFIG))
  block = shardings['blocks_1']
  for got, spec in (
    (shardings['embedding'], P('model', None)),
    (shardings['head']['kernel'], P(None, 'model')),
    (block['attn']['q_proj']['kernel'], P(None, 'model', None)),
    (block['attn']['k_proj']['bias'], P('model', None)),
    (block['attn']['o_proj']['kernel'], P('model', None, None)),
    (block['mlp']['down_proj']['kernel'], P('model', None)),
    (block['attn_norm']['scale'], P(None)),
  ):
    assert got == NamedSharding(mesh, spec)


def test_heads_that_do_not_divide_over_the_mesh_are_refused(saved):
  with pytest.raises(ValueError, match=r'n_kv_heads must be a multiple of the mesh axis model, got .*=4 .*=8'):
    checkpoint.load(saved, mesh=make_mesh(1, 8))


def test_manifest_is_read_without_jax(saved):
  code = (
    'import sys; from archer_jax.checkpoints.manifest import read_manifest; '
    f'read_manifest({str(saved)!r}); print(*sys.modules)'
  )
  env = os.environ | {'PYTHONPATH': str(Path(__file__).parents[2])}
  result = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, env=env, check=True)
  assert not {'jax', 'orbax', 'flax', 'numpy', 'transformers'} & set(result.stdout.split())


def edit_manifest(path, **changes):
  file = path / 'manifest.json'
  file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refused(path, message):
  with pytest.raises(ValueError, match=message) as error:
    checkpoint.load(path)
  assert '\n' not in str(error.value)


def test_what_is_no_checkpoint_is_refused(copied, tmp_path):
  with pytest.raises(FileNotFoundError, match=r'checkpoint .*nowhere does not exist'):
    checkpoint.load(tmp_path / 'nowhere')
  refused(GOLDENS / 'llada_tiny', r'is a Hugging Face folder; convert it first: archer-convert')
  refused(tmp_path, r'must be a folder with a manifest\.json')
  adapter = tmp_path / 'adapter'
  adapter.mkdir()
  (adapter / 'adapter_config.json').write_text('{}')
  refused(
    adapter, rf'is a LoRA adapter; merge it into its base first: archer-convert --source BASE --adapter {adapter} '
  )
  refused(copied / 'manifest.json', r'must be a folder with a manifest\.json')
  edit_manifest(copied, format_version=2)
  refused(copied, r'manifest\.json has format_version 2, this version of archer_jax reads 1')
  (copied / 'manifest.json').write_text('{}')
  refused(copied, r"manifest\.json is not a manifest: KeyError: 'format_version'")
  (copied / 'manifest.json').write_text('[1')
  refused(copied, r'manifest\.json is not a manifest')


@pytest.mark.parametrize(
  'change', [{'config': {}}, {'config': None}, {'dtype': 'float16'}, {'extra': 1}, {'files': []}]
)
def test_manifest_with_wrong_fields_is_refused(change, copied):
  edit_manifest(copied, **change)
  refused(copied, r'manifest\.json')


def largest_file(path):
  return max((file for file in (path / 'params').rglob('*') if file.is_file()), key=lambda file: file.stat().st_size)


def test_a_checkpoint_that_git_lfs_did_not_fetch_is_named(copied):
  for file in (largest_file(copied), copied / 'manifest.json'):
    file.write_text('version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 16000000000\n')
    refused(copied, f'{re.escape(str(file))} is a git-lfs pointer and not the file itself; fetch it first')


def test_torn_checkpoint_is_refused_by_file(copied):
  file = largest_file(copied)
  content = file.read_bytes()
  file.write_bytes(content[:-10])
  refused(copied, f'is damaged: {re.escape(str(file.relative_to(copied)))} has {len(content) - 10} bytes instead of')
  file.unlink()
  refused(copied, f'is damaged: {re.escape(str(file.relative_to(copied)))} is missing')


@pytest.mark.parametrize('name', ['manifest.ocdbt', '_METADATA', 'data'])
@pytest.mark.parametrize('hashed', [True, False])
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')  # what Orbax leaves of a failed read
def test_overwritten_parameters_are_refused(name, hashed, copied):
  file = largest_file(copied) if name == 'data' else copied / 'params' / 'state' / name
  file.write_bytes(b'\0' * file.stat().st_size)
  if hashed:
    refused(copied, f'is damaged: {re.escape(str(file.relative_to(copied)))} is not as it was written')
  else:
    edit_manifest(copied, digests={})
    refused(copied, 'is damaged, its parameters cannot be read: .')
  gc.collect()


def test_stored_parameters_must_fit_the_manifest(copied):
  # Orbax itself would cast, and would leave out the layer that nobody asks for.
  edit_manifest(copied, dtype='float32')
  refused(copied, r'parameter \S+ must be float32\[\d.*\], got bfloat16\[\d')
  config = json.loads((copied / 'manifest.json').read_text())['config']
  edit_manifest(copied, dtype='bfloat16', config=config | {'n_layers': 1})
  refused(copied, r'parameter blocks_1/\S+ must be absent, got bfloat16')
  edit_manifest(copied, config=config | {'d_ff': 96})
  refused(copied, r'parameter blocks_0/mlp/down_proj/kernel must be bfloat16\[96, 32\], got bfloat16\[48, 32\]')


def test_save_never_overwrites(saved, params):
  before = sorted(saved.rglob('*'))
  with pytest.raises(FileExistsError, match='exists already and is never overwritten'):
    checkpoint.save(saved, CONFIG, params)
  assert sorted(saved.rglob('*')) == before


def test_save_refuses_parameters_that_do_not_fit(params, tmp_path):
  wrong_dtype = params | {'final_norm': {'scale': np.ones(32, np.float32)}}
  wrong_shape = params | {'final_norm': {'scale': np.ones(33, ml_dtypes.bfloat16)}}
  missing = {name: value for name, value in params.items() if name != 'head'}
  for tree, message in (
    (wrong_dtype, r'parameter final_norm/scale must be bfloat16\[32\], got float32\[32\]'),
    (wrong_shape, r'parameter final_norm/scale must be bfloat16\[32\], got bfloat16\[33\]'),
    (params | {'bias': params['embedding']}, r'parameter bias must be absent, got bfloat16\[64, 32\]'),
    (missing, 'parameters are missing: head/kernel'),
    (jax.tree.map(lambda x: x.astype('float16'), params), "must be one of float32, bfloat16, got 'float16'"),
  ):
    with pytest.raises(ValueError, match=message):
      checkpoint.save(tmp_path / 'new', CONFIG, tree)
  with pytest.raises(ValueError, match='tokenizer_dir must hold'):
    checkpoint.save(tmp_path / 'new', CONFIG, params, tokenizer_dir=tmp_path)
  assert list(tmp_path.iterdir()) == []

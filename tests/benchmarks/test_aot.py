"""The compile-only benchmark at a small shape, against numbers worked out by hand."""

import dataclasses
import importlib.util
from pathlib import Path

from absl import flags
import programs
import pytest
from text_model import CONFIG as TEXT_CONFIG

FILE = Path(__file__).parents[2] / 'benchmarks/aot.py'
# A vocabulary that divides, as those of published models do.
CONFIG = dataclasses.replace(TEXT_CONFIG, vocab_size=TEXT_CONFIG.vocab_size // 2 * 2 + 2)


@pytest.fixture(scope='module')
def aot():
  known = set(flags.FLAGS)
  spec = importlib.util.spec_from_file_location('aot', FILE)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  yield module
  # Other scripts have flags of the same names.
  for name in set(flags.FLAGS) - known:
    delattr(flags.FLAGS, name)


@pytest.fixture(scope='module')
def record(aot):
  shape = aot.Shape(rows=2, prompt=20, canvas=16, block=8)
  return {'model': 'tiny'} | aot.measure(CONFIG, 'data:2,model:2', shape, 'float32', programs.QUICK)


def test_bytes_of_a_device(record):
  c, held = CONFIG, record['bytes']
  # Per device half of what has heads, MLP or vocabulary; norms are whole; two bytes a number.
  layer = 4 * c.d_model * c.n_heads * c.head_dim + 3 * c.d_model * c.d_ff
  vocabulary = 2 * c.vocab_size * c.d_model
  norms = (2 * c.n_layers + 1) * c.d_model
  assert held['parameters'] == 2 * (c.n_layers * layer // 2 + vocabulary // 2 + norms)
  # Two rows, half of the heads, keys and values.
  assert held['cache'] == 2 * 2 * c.n_layers * 2 * 20 * c.n_kv_heads // 2 * c.head_dim
  assert (record['batch'], record['devices'], record['decoder']) == (4, 4, 'wino')
  assert 0 < held['state'] < 4000 and held['temporaries'] > 0
  assert held['total'] == sum(size for name, size in held.items() if name != 'total')
  assert record['fits_gb'] == [16, 24, 32, 80, 95, 141]


def test_collectives_of_a_step(record):
  found = record['collectives']
  assert set(found) == {'decision', 'reuse pass', 'refresh pass', 'row turn'}
  assert all(kind.endswith(' over model') for part in found.values() for kind in part)
  # Sums of the residual stream in float32: the embedding's and two a layer, the last layer's for the rows of two blocks
  # alone.
  width, layers, rows = 4 * CONFIG.d_model, CONFIG.n_layers, 2
  for part, length in (('reuse pass', 16 + 8), ('refresh pass', 20 + 16 + 8)):
    sums = found[part]['all-reduce over model']
    assert sums['count'] == 2 * layers + 1
    assert sums['bytes'] == width * rows * ((2 * layers - 1) * length + 2 * (8 + 8))
  turn = found['row turn']['all-reduce over model']
  assert turn['bytes'] == width * (2 * layers - 1) * (20 + 16)


def test_table(aot, record):
  text = aot.table([record, record | {'collectives': {}, 'fits_gb': []}])
  lines = text.splitlines()
  assert len({line.count('|') for line in lines[:4]}) == 1
  assert (
    '| tiny | data:2,model:2 | 4 | cpu float32 |' in text
    and '16, 24, 32, 80, 95, 141' in lines[2]
    and 'none' in lines[3]
  )
  assert lines[-1] == '| tiny | data:2,model:2 | cpu float32 | all | none | 0 | 0.00 |'


def test_published_models_divide_over_the_meshes(aot):
  from archer_jax.mesh import parse_mesh

  for model in aot.MODELS.values():
    for text in aot._MESHES.default:
      assert model.n_kv_heads % parse_mesh(text)['model'] == 0

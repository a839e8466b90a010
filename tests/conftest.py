"""Eight devices on the CPU, strict dtypes, and the golden checkpoints as fixtures."""

from pathlib import Path
import warnings

from golden_data import GOLDENS
from golden_data import Golden
from golden_data import read_cases
import jax
import programs
import pytest
from text_model import save_text_model

from archer_jax.checkpoints import checkpoint
from archer_jax.checkpoints.convert import convert
from archer_jax.checkpoints.manifest import read_manifest
from archer_jax.engine import engine
from archer_jax.report import watch
from archer_jax.runtime import MATMUL_PRECISION

# Before anything makes JAX look for its devices.
jax.config.update('jax_platforms', 'cpu')
jax.config.update('jax_num_cpu_devices', 8)
# As the commands do, so that float32 is float32 on every device; on the CPU it is in any case.
jax.config.update('jax_default_matmul_precision', MATMUL_PRECISION)
# A silent promotion to float32 in a bfloat16 program is a fault.
jax.config.update('jax_numpy_dtype_promotion', 'strict')


@pytest.fixture(autouse=True, scope='session')
def quick():
  """Programs of engine and live view that are compiled in less time, and once for all tests of a process."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(engine, 'decode_chunk', programs.CHUNK)
    patch.setattr(watch, '_step', programs.quick(watch._step))
    yield


@pytest.fixture(autouse=True, scope='module')
def few_memory_maps():
  """XLA maps memory for every program that it compiles; past the system's limit the next one ends the process."""
  yield
  maps = Path('/proc/self/maps')
  if maps.exists() and maps.read_bytes().count(b'\n') > 30_000:
    jax.clear_caches()


def _golden(name, folder):
  with warnings.catch_warnings():
    warnings.filterwarnings('ignore', message='.*no tokenizer files')
    convert(GOLDENS / name, folder)
  _, params, _ = checkpoint.load(folder)
  return Golden(path=folder, config=read_manifest(folder).config, params=params, cases=read_cases(name))


@pytest.fixture(scope='session')
def llada_tiny(tmp_path_factory):
  """LLaDA golden through converter and loader, float32 on one device."""
  return _golden('llada_tiny', tmp_path_factory.mktemp('golden') / 'llada_tiny')


@pytest.fixture(scope='session')
def dream_tiny(tmp_path_factory):
  """Dream golden, likewise."""
  return _golden('dream_tiny', tmp_path_factory.mktemp('golden') / 'dream_tiny')


@pytest.fixture(scope='session')
def text_path(tmp_path_factory):
  """The tiny text model; it recommends gen_length 16 and brings an example."""
  return save_text_model(tmp_path_factory.mktemp('text') / 'model')


@pytest.fixture(scope='session')
def text(text_path):
  """Its model, parameters and tokenizer."""
  return checkpoint.load(text_path)

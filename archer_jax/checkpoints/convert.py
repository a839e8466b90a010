"""Hugging Face folders of the LLaDA and Dream families to checkpoints, tensor by tensor.

Nothing in the folder is ever run, and no more than the largest array twice over is held in memory.
"""

from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import dataclasses
import json
import math
from pathlib import Path
import re
from typing import Any
import warnings

import ml_dtypes
import numpy as np
from safetensors import SafetensorError
from safetensors import safe_open
from tqdm import tqdm

from archer_jax.checkpoints import checkpoint
from archer_jax.checkpoints import manifest
from archer_jax.checkpoints import text
from archer_jax.config import DTYPES
from archer_jax.config import ModelConfig
from archer_jax.families import AS_IS
from archer_jax.families import config_from_hf
from archer_jax.families import family_of

# The dtypes of a safetensors header that hold weights of these families.
_DTYPES = {'F32': 'float32', 'BF16': 'bfloat16'}
_NUMPY_DTYPES = {'float32': np.dtype(np.float32), 'bfloat16': np.dtype(ml_dtypes.bfloat16)}

# Small arrays are written together up to this many bytes: each write is a session of its own in Orbax.
_PART_BYTES = 256 << 20

_READ_BYTES = 64 << 20

_INDEX = 'model.safetensors.index.json'


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tensor:
  """One tensor of the source and where it goes.

  Attributes:
    file, name: where it stands.
    dtype: `float32` or `bfloat16`.
    path: the parameter's path, parts joined by `/`.
    shape: the parameter's shape.
    contracted: how it becomes the parameter, see `families.AS_IS`.
  """

  file: Path
  name: str
  dtype: str
  path: str
  shape: tuple[int, ...]
  contracted: int | None


def convert(source: str | Path, output: str | Path, *, dtype: str | None = None, progress: bool = False) -> None:
  """Converts a Hugging Face folder to a checkpoint.

  Args:
    source: folder with config.json, one or several safetensors files and, usually, tokenizer files.
    output: folder to make; it must not exist.
    dtype: `float32` or `bfloat16` for every parameter, by default that of the source.
    progress: whether to show a bar on stderr.

  Raises:
    FileExistsError: if `output` exists.
    FileNotFoundError: if `source` lacks config.json or the weights.
    ValueError: naming the config key, file or tensor that is not as it must be.
  """
  source, output = Path(source), Path(output)
  if dtype not in (None, *DTYPES):
    raise ValueError(f'dtype must be one of {", ".join(DTYPES)}, got {dtype!r}')
  if output.exists():
    raise FileExistsError(f'output {output} exists already and is never overwritten')
  if not output.absolute().parent.is_dir():
    raise ValueError(f'output must be in a folder that exists, got {output.absolute().parent}')
  if not source.is_dir():
    raise FileNotFoundError(f'source {source} must be a folder with config.json and safetensors files')
  hf_config = _read_json(source / 'config.json')
  try:
    config = config_from_hf(hf_config)
  except ValueError as error:
    raise ValueError(f'{source / "config.json"}: {error}') from error
  files = _weight_files(source)
  tensors = _plan(files, config, family_of(hf_config).tensors)
  found = sorted({tensor.dtype for tensor in tensors})
  if dtype is None and len(found) > 1:
    raise ValueError(f'source {source} mixes {" and ".join(found)}; choose one of them as dtype')
  dtype = dtype or found[0]
  tokenizer_dir = source if manifest.has_tokenizer(source) else None
  if tokenizer_dir is None:
    warnings.warn(f'{source} has no tokenizer files; the checkpoint will take prompt_ids only', stacklevel=2)
  else:
    text.load_tokenizer(source, config)  # raises if it would not load later
  end_ids = text.generation_end_ids(source, config)

  with tqdm(total=sum(f.stat().st_size for f in files), unit='B', unit_scale=True, disable=not progress) as bar:
    bar.set_description('hashing')
    hashed = [source / 'config.json', *files]
    sources = {file.name: manifest.sha256(file, bar.update) for file in hashed}
    bar.reset()
    bar.set_description('converting')
    with checkpoint.writer(
      output, config, dtype, tokenizer_dir=tokenizer_dir, sources=sources, end_ids=end_ids
    ) as write:
      part, size = {}, 0
      for tensor in tensors:
        count = math.prod(tensor.shape)
        # Written before the next one is read, so that a large array is alone in memory.
        if part and size + count * _NUMPY_DTYPES[dtype].itemsize > _PART_BYTES:
          write(part)
          part, size = {}, 0
        _put(part, tensor.path, _parameter(tensor, dtype))
        size += count * _NUMPY_DTYPES[dtype].itemsize
        bar.update(count * _NUMPY_DTYPES[tensor.dtype].itemsize)
      write(part)


def _read_json(file: Path) -> dict[str, Any]:
  if not file.is_file():
    raise FileNotFoundError(f'{file} does not exist')
  manifest.check_no_pointer(file)
  try:
    content = json.loads(file.read_text('utf-8'))
  except ValueError as error:
    raise ValueError(f'{file} is not JSON: {error}') from error
  if not isinstance(content, dict):
    raise ValueError(f'{file} must be a JSON object, got {type(content).__name__}')
  return content


def _weight_files(source: Path) -> list[Path]:
  """The safetensors files in order; raises if they are not those of the index, where there is one."""
  files = sorted(source.glob('*.safetensors'))
  if not files:
    raise FileNotFoundError(f'source {source} has no safetensors files')
  if (source / _INDEX).is_file():
    weight_map = _weight_map(source)
    present, listed = {file.name for file in files}, set(weight_map.values())
    if missing := sorted(listed - present):
      raise FileNotFoundError(f'{source / _INDEX} lists {", ".join(missing)}, which {source} does not have')
    if extra := sorted(present - listed):
      raise ValueError(f'{source / _INDEX} does not list {", ".join(extra)}')
  return files


def _weight_map(source: Path) -> Mapping[str, str]:
  weight_map = _read_json(source / _INDEX).get('weight_map')
  if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
    raise ValueError(f'weight_map in {source / _INDEX} must give a file name for each tensor')
  return weight_map


def _plan(files: list[Path], config: ModelConfig, table: Mapping[str, tuple[str, int | None]]) -> list[_Tensor]:
  """What goes where, in the order of the files, from their headers alone; raises unless everything fits."""
  expected = {path: shape for path, (shape, _) in checkpoint.expected_params(config, 'float32').items()}
  tensors: dict[str, _Tensor] = {}
  for file in files:
    with _opened(file) as opened:
      for name in opened.offset_keys():
        if name in tensors:
          raise ValueError(f'tensor {name} is in {tensors[name].file} and again in {file}')
        info = opened.get_slice(name)
        path, contracted = _destination(name, table, file)
        if path not in expected:
          raise ValueError(f'tensor {name} in {file} belongs to no layer of a model with {config.n_layers} layers')
        if info.get_dtype() not in _DTYPES:
          raise ValueError(f'tensor {name} in {file} must be {" or ".join(_DTYPES)}, got {info.get_dtype()}')
        shape = _source_shape(expected[path], contracted)
        if tuple(info.get_shape()) != shape:
          raise ValueError(f'tensor {name} in {file} must have shape {list(shape)}, got {info.get_shape()}')
        tensors[name] = _Tensor(
          file=file,
          name=name,
          dtype=_DTYPES[info.get_dtype()],
          path=path,
          shape=expected[path],
          contracted=contracted,
        )
  if missing := sorted(expected.keys() - {tensor.path for tensor in tensors.values()}):
    raise ValueError(f'source {files[0].parent} lacks the tensors of {", ".join(missing)}')
  _check_index(files[0].parent, tensors)
  return list(tensors.values())


def _check_index(source: Path, tensors: Mapping[str, _Tensor]) -> None:
  if not (source / _INDEX).is_file():
    return
  weight_map = _weight_map(source)
  for name in sorted(weight_map.keys() | tensors.keys()):
    found = tensors[name].file.name if name in tensors else 'no file'
    if weight_map.get(name) != found:
      raise ValueError(f'{source / _INDEX} puts tensor {name} in {weight_map.get(name, "no file")}, it is in {found}')


def _destination(name: str, table: Mapping[str, tuple[str, int | None]], file: Path) -> tuple[str, int | None]:
  for pattern, (path, contracted) in table.items():
    if match := re.fullmatch(pattern, name):
      return match.expand(path), contracted
  raise ValueError(f'tensor {name} in {file} is unknown to this family')


def _source_shape(shape: tuple[int, ...], contracted: int | None) -> tuple[int, ...]:
  """Shape of the tensor of a parameter of `shape`; see `families.AS_IS`."""
  if contracted is AS_IS:
    return shape
  outputs, inputs = math.prod(shape[contracted:]), math.prod(shape[:contracted])
  return (outputs, inputs) if contracted else (outputs,)


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[safe_open]:
  """Opens a file, and says which one it was if it is damaged."""
  manifest.check_no_pointer(file)
  try:
    with safe_open(file, 'numpy') as opened:
      yield opened
  except SafetensorError as error:
    raise ValueError(f'{file} is damaged or no safetensors file: {error}') from error


def _parameter(tensor: _Tensor, dtype: str) -> np.ndarray:
  """Reads one tensor as the parameter that it becomes, where possible as a view of what was read."""
  # The file is mapped, and mapped pages count as resident until it is closed: a few rows at a time are read of it.
  shape = _source_shape(tensor.shape, tensor.contracted)
  array = np.empty(shape, _NUMPY_DTYPES[dtype])
  step = max(1, _READ_BYTES * shape[0] // array.nbytes)
  for start in range(0, shape[0], step):
    stop = min(start + step, shape[0])
    with _opened(tensor.file) as opened:
      array[start:stop] = opened.get_slice(tensor.name)[start:stop]
  return (array if tensor.contracted is AS_IS else array.T).reshape(tensor.shape)


def _put(tree: dict, path: str, array: np.ndarray) -> None:
  *parents, leaf = path.split('/')
  for parent in parents:
    tree = tree.setdefault(parent, {})
  tree[leaf] = array

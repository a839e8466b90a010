"""Hugging Face folders of the LLaDA and Dream families to checkpoints, tensor by tensor.

Nothing in the folder is ever run, and no more than the largest array twice over is held in memory.
"""

from collections.abc import Mapping
import dataclasses
import filecmp
import math
from pathlib import Path
import re
import warnings

import ml_dtypes
import numpy as np
from tqdm import tqdm

from archer_jax.checkpoints import checkpoint
from archer_jax.checkpoints import manifest
from archer_jax.checkpoints import text
from archer_jax.checkpoints.adapter import Adapter
from archer_jax.checkpoints.adapter import Lora
from archer_jax.checkpoints.adapter import read_adapter
from archer_jax.checkpoints.published import open_tensors
from archer_jax.checkpoints.published import read_json
from archer_jax.config import DTYPES
from archer_jax.config import ModelConfig
from archer_jax.families import AS_IS
from archer_jax.families import config_from_hf
from archer_jax.families import end_ids
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
    lora: what an adapter adds to it, if anything.
  """

  file: Path
  name: str
  dtype: str
  path: str
  shape: tuple[int, ...]
  contracted: int | None
  lora: Lora | None = None


def convert(
  source: str | Path,
  output: str | Path,
  *,
  adapter: str | Path | None = None,
  dtype: str | None = None,
  progress: bool = False,
) -> None:
  """Converts a Hugging Face folder to a checkpoint.

  Args:
    source: folder with config.json, one or several safetensors files and, usually, tokenizer files.
    output: folder to make; it must not exist.
    adapter: folder of a LoRA adapter in PEFT's layout, which is merged into the weights in float32.
    dtype: `float32` or `bfloat16` for every parameter, by default that of the source.
    progress: whether to show a bar on stderr.

  Raises:
    FileExistsError: if `output` exists.
    FileNotFoundError: if `source` lacks config.json or the weights, or `adapter` a file.
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
  _check_no_adapter(source)
  hf_config = read_json(source / 'config.json')
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
  merged = None
  if adapter is not None:
    shapes = {tensor.name: _source_shape(tensor.shape, tensor.contracted) for tensor in tensors}
    merged = read_adapter(Path(adapter), shapes, {tensor.name for tensor in tensors if tensor.contracted})
    tensors = [_merged(tensor, merged) for tensor in tensors]
    _warn_of_tokenizer(source, Path(adapter))
  tokenizer_dir = source if manifest.has_tokenizer(source) else None
  if tokenizer_dir is None:
    warnings.warn(f'{source} has no tokenizer files; the checkpoint will take prompt_ids only', stacklevel=2)
  else:
    text.load_tokenizer(source, config)  # raises if it would not load later
  manifest.check_end_ids(f'eos_token_id in {source / "config.json"}', end_ids(hf_config), config)
  ends = (*end_ids(hf_config), *text.generation_end_ids(source, config))

  hashed = [source / 'config.json', *files, *([merged.config_file, merged.weights_file] if merged else [])]
  size_of = lambda files: sum(file.stat().st_size for file in files)
  with tqdm(total=size_of(hashed), unit='B', unit_scale=True, disable=not progress) as bar:
    bar.set_description('hashing')
    sources = {file.name: manifest.sha256(file, bar.update) for file in hashed}
    bar.reset(size_of(files))
    bar.set_description('converting')
    with checkpoint.writer(
      output,
      config,
      dtype,
      tokenizer_dir=tokenizer_dir,
      sources=sources,
      end_ids=ends,
      adapter=merged.told if merged else None,
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


def _check_no_adapter(source: Path) -> None:
  """Raises ValueError if the source is an adapter, or has one beside the model's weights: nobody said to merge it."""
  found = manifest.adapter_files(source)
  if not found:
    return
  weights = {file.name for file in source.glob('*.safetensors')} - set(found)
  if not weights or not (source / 'config.json').is_file():
    raise ValueError(
      f'source {source} is a LoRA adapter without its model; give the folder of its base as source: '
      f'--source BASE --adapter {source}'
    )
  raise ValueError(
    f"source {source} has a LoRA adapter beside the model's weights, {', '.join(found)}; move it to a folder of its "
    f'own, and to merge it give that as adapter: --source {source} --adapter DIR'
  )


def _merged(tensor: _Tensor, adapter: Adapter) -> _Tensor:
  """The tensor with what the adapter makes of it; its dtype stays the base's."""
  if tensor.name in adapter.whole:
    return dataclasses.replace(tensor, file=adapter.weights_file, name=adapter.whole[tensor.name])
  return dataclasses.replace(tensor, lora=adapter.lora.get(tensor.name))


def _warn_of_tokenizer(source: Path, adapter: Path) -> None:
  """Warns of tokenizer files of the adapter that are not those of the base, which are taken."""
  same = lambda name: (source / name).is_file() and filecmp.cmp(source / name, adapter / name, shallow=False)
  if other := [name for name in manifest.TOKENIZER_FILES if (adapter / name).is_file() and not same(name)]:
    warnings.warn(
      f'adapter {adapter} has its own {", ".join(other)}; the checkpoint gets what {source} has', stacklevel=3
    )


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
  weight_map = read_json(source / _INDEX).get('weight_map')
  if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
    raise ValueError(f'weight_map in {source / _INDEX} must give a file name for each tensor')
  return weight_map


def _plan(files: list[Path], config: ModelConfig, table: Mapping[str, tuple[str, int | None]]) -> list[_Tensor]:
  """What goes where, in the order of the files, from their headers alone; raises unless everything fits."""
  expected = {path: shape for path, (shape, _) in checkpoint.expected_params(config, 'float32').items()}
  tensors: dict[str, _Tensor] = {}
  for file in files:
    with open_tensors(file) as opened:
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


def _parameter(tensor: _Tensor, dtype: str) -> np.ndarray:
  """Reads one tensor as the parameter that it becomes, where possible as a view of what was read."""
  # The file is mapped, and mapped pages count as resident until it is closed: a few rows at a time are read of it.
  shape = _source_shape(tensor.shape, tensor.contracted)
  array = np.empty(shape, _NUMPY_DTYPES[dtype])
  step = max(1, _READ_BYTES * shape[0] // array.nbytes)
  for start in range(0, shape[0], step):
    stop = min(start + step, shape[0])
    with open_tensors(tensor.file) as opened:
      rows = opened.get_slice(tensor.name)[start:stop]
    if tensor.lora is not None:
      merged = tensor.lora.rows(start, stop)
      merged += rows
      rows = merged
    array[start:stop] = rows
  return (array if tensor.contracted is AS_IS else array.T).reshape(tensor.shape)


def _put(tree: dict, path: str, array: np.ndarray) -> None:
  *parents, leaf = path.split('/')
  for parent in parents:
    tree = tree.setdefault(parent, {})
  tree[leaf] = array

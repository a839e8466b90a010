"""Checkpoints: a folder with a small manifest, the parameters in Orbax form and the tokenizer's files.

    manifest.json   format version, model config, dtype, decoding defaults, source hashes, file sizes
    params/         Orbax
    tokenizer/      the files as they were published

What may look at the manifest before JAX is imported stands in manifest.py.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import json
from pathlib import Path
import shutil
from typing import Any
import uuid

import jax
from jax.sharding import Mesh
from orbax.checkpoint import v1 as ocp

from archer_jax import sharding
from archer_jax.checkpoints import text
from archer_jax.checkpoints.manifest import BUNDLED
from archer_jax.checkpoints.manifest import FORMAT_VERSION
from archer_jax.checkpoints.manifest import TOKENIZER_FILES
from archer_jax.checkpoints.manifest import Manifest
from archer_jax.checkpoints.manifest import has_tokenizer
from archer_jax.checkpoints.manifest import read_manifest
from archer_jax.checkpoints.manifest import sha256
from archer_jax.config import DTYPES
from archer_jax.config import ModelConfig
from archer_jax.model import Transformer
from archer_jax.model import abstract_params

_CHUNK_BYTES = 64 << 20
_DIGEST_BYTES = 16 << 20


@contextlib.contextmanager
def writer(
  path: str | Path,
  config: ModelConfig,
  dtype: str,
  *,
  tokenizer_dir: str | Path | None = None,
  defaults: Mapping[str, Any] | None = None,
  sources: Mapping[str, str] | None = None,
  end_ids: Sequence[int] = (),
  adapter: Mapping[str, Any] | None = None,
) -> Iterator[Callable[[dict], None]]:
  """Makes a checkpoint out of parts of the parameter tree, so that never more than a part is in memory.

  Everything goes to a hidden sibling folder that becomes `path` at the end; the manifest is the last file written. So
  whatever interrupts it, `path` is not there, and what is left behind does not load.

  Args:
    path: folder to make; it must not exist.
    config: the model's config.
    dtype: dtype of the parameters that will be written.
    tokenizer_dir: folder whose tokenizer files are copied byte by byte.
    defaults: recommended decoding settings, kept in the manifest.
    sources: SHA-256 of each source file, kept in the manifest.
    end_ids: end tokens beside those of `config` and of the tokenizer.
    adapter: what was merged into the parameters, kept in the manifest.

  Yields:
    A function that writes a part: a tree like that of `abstract_params`, with leaves left out.

  Raises:
    FileExistsError: if `path` exists.
    ValueError: if a part does not fit `config` and `dtype`, or parameters are missing at the end.
  """
  path = Path(path).absolute()
  if path.exists():
    raise FileExistsError(f'{path} exists already and is never overwritten')
  path.parent.mkdir(parents=True, exist_ok=True)
  expected = expected_params(config, dtype)
  stage = path.with_name(f'.{path.name}.{uuid.uuid4().hex[:8]}.partial')
  stage.mkdir()
  try:
    written = set()

    # Orbax would copy what it is given, in case it changed meanwhile; and an array of a gigabyte as one chunk would
    # have to be read whole by every device that holds a part of it.
    options = ocp.Context()
    options.memory.deepcopy_host_arrays = False
    options.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES

    def write(part: dict) -> None:
      found = _described(part)
      for name, what in found.items():
        if what != expected.get(name):
          raise ValueError(f'parameter {name} must be {_words(expected.get(name))}, got {_words(what)}')
      if again := sorted(written & found.keys()):
        raise ValueError(f'parameters are written twice: {", ".join(again)}')
      written.update(found)
      with options:
        ocp.partial.save(stage / 'params', part)

    yield write
    if missing := sorted(expected.keys() - written):
      raise ValueError(f'parameters are missing: {", ".join(missing)}')
    ocp.partial.finalize(stage / 'params')
    # Orbax looks for this file alone, but writes the path on this machine into it.
    (stage / 'params' / 'commit_success.txt').write_text('whole\n')
    if tokenizer_dir is not None:
      if not has_tokenizer(Path(tokenizer_dir)):
        raise ValueError(f'tokenizer_dir must hold tokenizer.json, or vocab.json and merges.txt, got {tokenizer_dir}')
      (stage / 'tokenizer').mkdir()
      for name in TOKENIZER_FILES:
        if (Path(tokenizer_dir) / name).is_file():
          shutil.copyfile(Path(tokenizer_dir) / name, stage / 'tokenizer' / name)
    tokenizer = text.load_tokenizer(stage / 'tokenizer', config, end_ids)
    known = (config.eos_id, *end_ids) if tokenizer is None else tokenizer.end_ids
    files = {f.relative_to(stage).as_posix(): f.stat().st_size for f in sorted(stage.rglob('*')) if f.is_file()}
    manifest = Manifest(
      config=config,
      dtype=dtype,
      defaults=defaults or {},
      sources=sources or {},
      files=files,
      digests={name: sha256(stage / name) for name, size in files.items() if size <= _DIGEST_BYTES},
      end_ids=tuple(dict.fromkeys(known)),
      tokenizer_size=None if tokenizer is None else tokenizer.size,
      adapter=adapter or {},
    )
    content = json.dumps(
      {'format_version': FORMAT_VERSION, **dataclasses.asdict(manifest)}, indent=2, ensure_ascii=False
    )
    (stage / 'manifest.json').write_text(content + '\n', 'utf-8')
    stage.rename(path)
  except BaseException:
    shutil.rmtree(stage, ignore_errors=True)
    raise


def save(
  path: str | Path,
  config: ModelConfig,
  params: dict,
  *,
  tokenizer_dir: str | Path | None = None,
  defaults: Mapping[str, Any] | None = None,
) -> None:
  """Writes a checkpoint; see `writer` for the arguments and errors.

  Args:
    path: folder to make; it must not exist.
    config: the model's config.
    params: the whole tree, float32 or bfloat16.
    tokenizer_dir: folder whose tokenizer files are copied.
    defaults: recommended decoding settings, such as `{'shadow': 'self', 'gen_length': 16}`.
  """
  dtype = next((dtype for _, dtype in _described(params).values()), 'float32')
  with writer(path, config, dtype, tokenizer_dir=tokenizer_dir, defaults=defaults) as write:
    write(params)


def load(
  path: str | Path | None = None, *, dtype: str | None = None, mesh: Mesh | None = None
) -> tuple[Transformer, dict, text.Tokenizer | None]:
  """Restores a checkpoint straight onto the devices that shall hold it.

  Args:
    path: a folder made by `save` or archer-convert; by default the bundled model.
    dtype: `float32` or `bfloat16`, by default what is stored.
    mesh: mesh with the axes `data` and `model`; by default everything goes to the first device.

  Returns:
    The model with the end tokens of the checkpoint, its parameters, and its tokenizer or None if there is none.

  Raises:
    FileNotFoundError, ValueError: if `path` is not a whole checkpoint or does not fit the mesh.
  """
  manifest = read_manifest(path)
  path = (BUNDLED if path is None else Path(path)).absolute()
  if dtype not in (None, *DTYPES):
    raise ValueError(f'dtype must be one of {", ".join(DTYPES)}, got {dtype!r}')

  config = manifest.config
  target = abstract_params(config, dtype or manifest.dtype)
  if mesh is None:
    one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shardings = jax.tree.map(lambda _: one, target)
  else:
    shardings = sharding.param_shardings(config, mesh)
  target = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), target, shardings)
  tokenizer = text.load_tokenizer(path / 'tokenizer', config, manifest.end_ids)
  try:
    metadata = ocp.metadata(path / 'params').metadata
  except Exception as error:
    raise _damaged(path, error) from error
  if metadata is None:
    # Orbax logs what it could not read and goes on.
    raise _damaged(path, 'Orbax finds no tree in them')
  found = _described(metadata)
  # Orbax casts to the target's dtype without a word, so what is stored is compared first.
  expected = expected_params(config, manifest.dtype)
  for name in sorted(found.keys() | expected.keys()):
    if found.get(name) != expected.get(name):
      raise ValueError(
        f'checkpoint {path} is damaged: parameter {name} must be {_words(expected.get(name))}, '
        f'got {_words(found.get(name))}'
      )
  options = ocp.Context()
  if all(leaf.sharding.is_fully_addressable for leaf in jax.tree.leaves(target)):
    # Each process loads for itself and waits for no other.
    options.multiprocessing.primary_host = jax.process_index()
    options.multiprocessing.active_processes = {jax.process_index()}
  try:
    with options:
      params = ocp.load(path / 'params', target)
  except Exception as error:
    raise _damaged(path, error) from error
  named = manifest.end_ids if tokenizer is None else tokenizer.end_ids
  return Transformer(config, end_ids=tuple(dict.fromkeys((config.eos_id, *named)))), params, tokenizer


def _described(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
  """Shape and dtype of each leaf by its path."""
  name = lambda path: jax.tree_util.keystr(path, simple=True, separator='/')
  return {name(p): (tuple(x.shape), str(x.dtype)) for p, x in jax.tree_util.tree_flatten_with_path(tree)[0]}


def expected_params(config: ModelConfig, dtype: str) -> dict[str, tuple[tuple[int, ...], str]]:
  """Shape and dtype of every parameter by its path, such as `blocks_0/attn/q_proj/kernel`."""
  if dtype not in DTYPES:
    raise ValueError(f'dtype of the parameters must be one of {", ".join(DTYPES)}, got {dtype!r}')
  return _described(abstract_params(config, dtype))


def _words(what: tuple[tuple[int, ...], str] | None) -> str:
  return 'absent' if what is None else f'{what[1]}{list(what[0])}'


def _damaged(path: Path, error: Exception | str) -> ValueError:
  # Orbax and TensorStore append whole specs; the first line says what is wrong.
  reason = str(error).partition('\n')[0][:200]
  return ValueError(f'checkpoint {path} is damaged, its parameters cannot be read: {reason}')

"""A checkpoint's manifest, and which of its files are its tokenizer's.

Plain Python without JAX, so that a command line can look at a checkpoint before it pays for that import.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from archer_jax.config import DTYPES
from archer_jax.config import ModelConfig

FORMAT_VERSION = 1
BUNDLED = Path(__file__).parent.parent / 'bundled'

# What a git-lfs pointer begins with.
_POINTER = b'version https://git-lfs.github.com/spec/'

# What a LoRA adapter in PEFT's layout consists of; the last one is read by torch alone.
ADAPTER_CONFIG, ADAPTER_WEIGHTS, ADAPTER_PICKLE = (
  'adapter_config.json',
  'adapter_model.safetensors',
  'adapter_model.bin',
)

# Everything that a published tokenizer may consist of and that is data; code (*.py) is never copied.
TOKENIZER_FILES = (
  'tokenizer.json',
  'tokenizer_config.json',
  'special_tokens_map.json',
  'added_tokens.json',
  'vocab.json',
  'merges.txt',
  'chat_template.jinja',
  'generation_config.json',
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
  """What stands beside the parameters.

  Attributes:
    config: the model's config.
    dtype: dtype of every stored parameter, `float32` or `bfloat16`.
    defaults: recommended decoding settings by flag name, and anything else that the maker wants to pass on.
    sources: SHA-256 of each file that the parameters were converted from.
    files: bytes of each file under the folder; a torn copy is found by them before Orbax reads it.
    digests: SHA-256 of those files that are small enough to be read twice, all of Orbax's own metadata among them.
    end_ids: every token that ends an answer, by config.json, generation_config.json, tokenizer and chat template.
    tokenizer_size: how many ids the tokenizer has a token for; None without a tokenizer.
    adapter: what was merged into the parameters: the adapter's folder and what its config says; empty if nothing was.
  """

  config: ModelConfig
  dtype: str
  defaults: Mapping[str, Any]
  sources: Mapping[str, str]
  files: Mapping[str, int]
  digests: Mapping[str, str] = dataclasses.field(default_factory=dict)
  end_ids: Sequence[int] = ()
  tokenizer_size: int | None = None
  adapter: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def has_tokenizer(folder: Path) -> bool:
  """Whether `folder` holds a tokenizer that `archer_jax.checkpoints.text` can load."""
  return (folder / 'tokenizer.json').is_file() or all((folder / f).is_file() for f in ('vocab.json', 'merges.txt'))


def adapter_files(folder: Path) -> list[str]:
  """The files of a LoRA adapter that `folder` has."""
  return [name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS, ADAPTER_PICKLE) if (folder / name).is_file()]


def check_no_pointer(file: Path) -> None:
  """Raises ValueError if a file is what git-lfs leaves in the place of one that was not fetched."""
  with file.open('rb') as stream:
    if stream.read(len(_POINTER)) == _POINTER:
      raise ValueError(f'{file} is a git-lfs pointer and not the file itself; fetch it first: git lfs pull')


def read_manifest(path: str | Path | None = None) -> Manifest:
  """Reads the manifest of a checkpoint, by default that of the bundled model; needs no JAX.

  Raises:
    FileNotFoundError: if there is no such folder.
    ValueError: if the folder is not a checkpoint of this format, or files are missing or cut short.
  """
  path = BUNDLED if path is None else Path(path)
  if not path.exists():
    raise FileNotFoundError(f'checkpoint {path} does not exist')
  file = path / 'manifest.json'
  if not file.is_file():
    if (path / 'config.json').is_file():
      raise ValueError(
        f'checkpoint {path} is a Hugging Face folder; convert it first: archer-convert --source {path} --output DIR'
      )
    if adapter_files(path):
      raise ValueError(
        f'checkpoint {path} is a LoRA adapter; merge it into its base first: '
        f'archer-convert --source BASE --adapter {path} --output DIR'
      )
    raise ValueError(f'checkpoint {path} must be a folder with a manifest.json, as archer-convert writes it')
  check_no_pointer(file)
  try:
    content = json.loads(file.read_text('utf-8'))
    version = content.pop('format_version')
  except (ValueError, KeyError, AttributeError, TypeError) as error:
    raise ValueError(f'{file} is not a manifest: {type(error).__name__}: {error}') from error
  if version != FORMAT_VERSION:
    raise ValueError(f'{file} has format_version {version!r}, this version of archer_jax reads {FORMAT_VERSION}')
  try:
    manifest = Manifest(**{**content, 'config': ModelConfig(**content['config'])})
    for name in ('defaults', 'sources', 'files', 'digests', 'adapter'):
      if not isinstance(getattr(manifest, name), dict):
        raise TypeError(f'{name} must be an object')
    check_end_ids('end_ids', manifest.end_ids, manifest.config)
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(f'{file} is not a manifest: {error}') from error
  if manifest.dtype not in DTYPES:
    raise ValueError(f'dtype in {file} must be one of {", ".join(DTYPES)}, got {manifest.dtype!r}')
  for name, size in manifest.files.items():
    found = (path / name).stat().st_size if (path / name).is_file() else None
    if found is None:
      raise ValueError(f'checkpoint {path} is damaged: {name} is missing')
    if found != size:
      check_no_pointer(path / name)
      raise ValueError(f'checkpoint {path} is damaged: {name} has {found} bytes instead of {size}')
    if name in manifest.digests and sha256(path / name) != manifest.digests[name]:
      raise ValueError(f'checkpoint {path} is damaged: {name} is not as it was written')
  return manifest


def check_end_ids(name: str, ids: Any, config: ModelConfig) -> None:
  """Raises ValueError unless `ids` is a sequence of tokens of the model other than the mask."""
  if not isinstance(ids, list | tuple):
    raise ValueError(f'{name} must be a list of token ids, got {ids!r}')
  for token in ids:
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < config.vocab_size:
      raise ValueError(f'{name} must be token ids in [0, {config.vocab_size}), got {token!r}')
    if token == config.mask_id:
      raise ValueError(f'{name} must be other tokens than the mask {config.mask_id}')


def sha256(file: Path, progress: Callable[[int], Any] = lambda count: None) -> str:
  """SHA-256 of a file in hex; `progress` is told the bytes of every block."""
  digest = hashlib.sha256()
  with file.open('rb') as stream:
    while block := stream.read(8 << 20):
      digest.update(block)
      progress(len(block))
  return digest.hexdigest()

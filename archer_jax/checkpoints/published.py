"""Files of published folders, opened so that one that is damaged or was not fetched is named."""

from collections.abc import Iterator
import contextlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors import safe_open

from archer_jax.checkpoints.manifest import check_no_pointer


def read_json(file: Path) -> dict[str, Any]:
  """The object of a file of JSON.

  Raises:
    FileNotFoundError: there is none.
    ValueError: it is a git-lfs pointer, or no object of JSON.
  """
  if not file.is_file():
    raise FileNotFoundError(f'{file} does not exist')
  check_no_pointer(file)
  try:
    content = json.loads(file.read_text('utf-8'))
  except ValueError as error:
    raise ValueError(f'{file} is not JSON: {error}') from error
  if not isinstance(content, dict):
    raise ValueError(f'{file} must be a JSON object, got {type(content).__name__}')
  return content


@contextlib.contextmanager
def open_tensors(file: Path) -> Iterator[safe_open]:
  """Opens a file of safetensors, and says which one it was if it is damaged or a git-lfs pointer."""
  check_no_pointer(file)
  try:
    with safe_open(file, 'numpy') as opened:
      yield opened
  except SafetensorError as error:
    raise ValueError(f'{file} is damaged or no safetensors file: {error}') from error

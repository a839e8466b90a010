"""Files of JSON records, and any user's questions as a task: `{"prompt": ..., "answer": ...}`, one a line."""

from collections.abc import Iterator
import json
from pathlib import Path
from typing import Any

from archer_jax.tasks import Problem
from archer_jax.tasks.extract import extract


def read_records(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
  """The objects of a file, each with the place to name in a message, `FILE line N`; blank lines are passed over.

  Raises:
    ValueError: a line is no JSON object.
  """
  with Path(path).open('rb') as file:
    for number, line in enumerate(file, start=1):
      if not line.strip():
        continue
      place = f'{path} line {number}'
      try:
        record = json.loads(line.decode('utf-8-sig'))
      except (ValueError, RecursionError) as error:
        raise ValueError(f'{place} is not JSON: {error}') from None
      if not isinstance(record, dict):
        raise ValueError(f'{place} must be a JSON object, got {json.dumps(record)[:80]}')
      yield place, record


def read_entries(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
  """The objects of a published file, each with the place to name in a message.

  A name that ends in `.json` is one JSON text: a list of objects, or an object of objects by name, and the place is
  `FILE entry N` or `FILE entry NAME`. Any other file has an object a line, see `read_records`.

  Raises:
    ValueError: the file is not as above.
  """
  if Path(path).suffix != '.json':
    yield from read_records(path)
    return
  try:
    found = json.loads(Path(path).read_text('utf-8-sig'))
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{path} is not JSON: {error}; a file with an object a line must be named .jsonl') from None
  if not isinstance(found, list | dict):
    raise ValueError(f'{path} must be a list or an object of JSON objects, got {json.dumps(found)[:80]}')
  for name, record in enumerate(found, start=1) if isinstance(found, list) else found.items():
    place = f'{path} entry {name}'
    if not isinstance(record, dict):
      raise ValueError(f'{place} must be a JSON object, got {json.dumps(record)[:80]}')
    yield place, record


def field(place: str, record: dict[str, Any], name: str) -> Any:
  """A field of a record that must be there.

  Raises:
    ValueError: it is not; the message names the place and the field.
  """
  if name not in record:
    raise ValueError(f'{place} must have the field {name}, got {", ".join(record) or "none"}')
  return record[name]


def text_field(place: str, record: dict[str, Any], name: str, *, may_be_empty: bool = False) -> str:
  """A field of a record that must be there, a text, and not empty.

  Raises:
    ValueError: it is not; the message names the place and the field.
  """
  value = field(place, record, name)
  if not isinstance(value, str) or not (value.strip() or may_be_empty):
    empty = '' if may_be_empty else ' that is not empty'
    raise ValueError(f'{place}: {name} must be a text{empty}, got {json.dumps(value)[:80]}')
  return value


def texts_field(place: str, record: dict[str, Any], name: str, *, may_be_empty: bool = False) -> list[str]:
  """A field of a record that must be there, a list of texts, and not empty.

  Raises:
    ValueError: it is not; the message names the place and the field.
  """
  value = field(place, record, name)
  if not isinstance(value, list) or not all(isinstance(text, str) for text in value) or not (value or may_be_empty):
    empty = '' if may_be_empty else ' that is not empty'
    raise ValueError(f'{place}: {name} must be a list of texts{empty}, got {json.dumps(value)[:80]}')
  return value


def read_problems(path: str | Path, extractor: str) -> list[Problem]:
  """Questions with their answers; fields beside `prompt` and `answer` are not read.

  Args:
    path: the file.
    extractor: name in `extract.EXTRACTORS` of what reads answers out of texts.

  Returns:
    The problems in the file's order; the prompt is as the file has it.

  Raises:
    ValueError: a record is not as above, or its answer holds nothing that the extractor looks for; the message names
      file, line and field.
  """
  problems = []
  for place, record in read_records(path):
    prompt, answer = (text_field(place, record, field) for field in ('prompt', 'answer'))
    if extract(extractor, answer) is None:
      raise ValueError(f'{place}: answer must hold what the extractor {extractor} looks for, got {answer[:80]!r}')
    problems.append(Problem(prompt=prompt, answer=answer))
  return problems

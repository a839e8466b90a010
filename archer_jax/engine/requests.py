"""Records in: parsed, checked one by one, and turned into requests or refusals that name what is wrong.

A record is `{"id": any, "prompt": text | "messages": [...] | "prompt_ids": [...]}` plus optional `seed`, `stop` (a
text or a list of texts) and knobs by their names in `specs.knobs()`. A field that is null is not given, except `id`,
and a whole number may be written as a float: what writes tables as JSON lines fills empty cells and widens columns so.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import json
import math
import re
from typing import Any

from archer_jax import specs
from archer_jax.checkpoints.spelling import check_spelling
from archer_jax.checkpoints.text import Tokenizer
from archer_jax.engine.batching import CANVAS_LENGTHS
from archer_jax.engine.batching import PROMPT_LENGTHS
from archer_jax.engine.batching import bucket
from archer_jax.engine.settings import SETTINGS
from archer_jax.engine.settings import Settings
from archer_jax.engine.settings import check_setting
from archer_jax.engine.settings import check_stop

_PROMPTS = ('prompt', 'messages', 'prompt_ids')
# Longer names do not fit every file system, and a dot may begin none: `.` and `..` are folders.
_PLAIN_NAME = re.compile(r'[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """A record that can be decoded.

  Attributes:
    index: its place in the input, from 0.
    id: its own name, any JSON value.
    prompt_ids: token ids of the prompt.
    seed: its own seed, or None for the one that follows from the run's.
    knobs: every knob.
    stop: texts before the first of which the answer ends.
  """

  index: int
  id: Any
  prompt_ids: Sequence[int]
  seed: int | None
  knobs: Mapping[str, float | int]
  stop: Sequence[str] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refusal:
  """A record that cannot, and the sentence that says why."""

  index: int
  id: Any
  error: str


def file_stem(id: Any, index: int) -> str:
  """Name of a record's trace file: its id where that is a plain name, else its zero-padded index."""
  text = str(id) if isinstance(id, str | int) and not isinstance(id, bool) else ''
  return text if _PLAIN_NAME.fullmatch(text) else f'{index:08d}'


def read_requests(
  lines: Iterable[bytes],
  settings: Settings,
  tokenizer: Tokenizer | None,
  *,
  wanted: Callable[[int], bool] = lambda index: True,
) -> Iterator[Request | Refusal]:
  """Reads JSON lines as they come, one request or refusal per wanted line that is not blank, in order.

  Args:
    lines: of the input.
    settings: the run's settings.
    tokenizer: the checkpoint's, if it has one.
    wanted: whether somebody waits for the record at an index. Of the others only the ids count, which are taken.
  """
  taken = {}
  index = -1
  for line in lines:
    if not line.strip():
      continue
    index += 1
    record = {}
    try:
      record = _parse(line)
      _claim(taken, record.get('id', index), index)
      if wanted(index):
        yield make_request(record, index, settings, tokenizer)
    except ValueError as error:
      if wanted(index):
        yield Refusal(index=index, id=record.get('id', index), error=str(error))


def _claim(taken: dict[str, int], id: Any, index: int) -> None:
  """Notes an id and the name of its trace file, and raises ValueError if either is another record's."""
  # Records may share the id null, which is no name.
  names = {file_stem(id, index)} if id is None else {file_stem(id, index), json.dumps(id, sort_keys=True)}
  for name in names:
    if taken.setdefault(name, index) != index:
      raise ValueError(f'id {json.dumps(id)} is taken by record {taken[name]}; ids must differ')


def make_request(
  record: Mapping[str, Any],
  index: int,
  settings: Settings,
  tokenizer: Tokenizer | None,
  *,
  allow_empty: bool = False,
) -> Request:
  """Checks a record.

  Args:
    record: fields as above.
    index: its place in the input.
    settings: the run's settings.
    tokenizer: the checkpoint's, if it has one.
    allow_empty: whether a prompt may have no tokens.

  Raises:
    ValueError: what is wrong with it, naming the field.
  """
  if unknown := sorted(set(record) - {'id', 'seed', 'stop', *_PROMPTS, *specs.knobs()}):
    of_all = ', but of the whole run' if unknown[0] in SETTINGS else ''
    raise ValueError(
      f'{unknown[0]} is no field of a record{of_all}; there are id, {", ".join(_PROMPTS)}, seed, stop and the knobs'
    )
  # The names above are checked first, so that a mistyped one is found without a value too.
  record = {name: _plain(name, value) for name, value in record.items() if value is not None or name == 'id'}
  given = [name for name in _PROMPTS if name in record]
  if len(given) != 1:
    raise ValueError(f'a record must have one of {", ".join(_PROMPTS)}, got {" and ".join(given) or "none"}')
  field = given[0]
  ids = _prompt_ids(field, record[field], settings, tokenizer, allow_empty)
  model = settings.model
  if not ids and not allow_empty:
    raise ValueError(f'{field} must not be empty')
  for position, token in enumerate(ids):
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < model.vocab_size:
      raise ValueError(f'{field}[{position}] must be an integer in [0, {model.vocab_size}), got {token!r}')
    if token == model.mask_id:
      raise ValueError(f'{field} must not contain the mask token {model.mask_id}, found at position {position}')
  knobs = settings.row({name: record[name] for name in record if name in specs.knobs()})
  if len(ids) + knobs['gen_length'] > model.max_length:
    raise ValueError(
      f'{field} of {len(ids)} tokens and gen_length={knobs["gen_length"]} must together be at most '
      f'the {model.max_length} tokens of the model'
    )
  bucket(field, len(ids), PROMPT_LENGTHS)
  bucket('gen_length', knobs['gen_length'], CANVAS_LENGTHS)
  seed = check_setting('seed', record['seed']) if 'seed' in record else None
  stop = check_stop(record['stop']) if 'stop' in record else settings.stop
  if stop and tokenizer is None:
    raise ValueError('stop needs a tokenizer, which the checkpoint does not have')
  return Request(index=index, id=record.get('id', index), prompt_ids=ids, seed=seed, knobs=knobs, stop=stop)


def _plain(name: str, value: Any) -> Any:
  """The value of a field without what a writer of tables has made of it."""
  if name == 'messages' and isinstance(value, list):
    fields = lambda message: {key: entry for key, entry in message.items() if entry is not None}
    return [fields(message) if isinstance(message, Mapping) else message for message in value]
  if name == 'prompt_ids' and isinstance(value, list):
    return [_whole(item) for item in value]
  knob = specs.knobs().get(name)
  return _whole(value) if name == 'seed' or (knob is not None and knob.integer) else value


def _whole(value: Any) -> Any:
  """A float that is a whole number as that number; from 2^53 on a float stands for more than one."""
  return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def _prompt_ids(
  field: str, value: Any, settings: Settings, tokenizer: Tokenizer | None, allow_empty: bool
) -> Sequence[int]:
  """Token ids of whichever form the prompt has; those that were given as ids are not looked at yet."""
  if field == 'prompt_ids':
    if not isinstance(value, list):
      raise ValueError(f'prompt_ids must be a list of integers, got {value!r}')
    return value
  if field == 'prompt' and not isinstance(value, str):
    raise ValueError(f'prompt must be a text, got {value!r}')
  if field == 'messages' and not isinstance(value, list):
    raise ValueError(f'messages must be a list of objects with role and content, got {value!r}')
  if tokenizer is None:
    raise ValueError(f'{field} needs a tokenizer, which the checkpoint does not have; give prompt_ids')
  if field == 'prompt':
    if not value.strip() and not allow_empty:
      raise ValueError('prompt must not be empty')
    if not settings.chat:
      return _encoded(tokenizer, tokenizer.encode, value, [value])
    value = [{'role': 'user', 'content': value}]
  turns = [
    message.get('content') for message in value if isinstance(message, Mapping) and message.get('role') == 'user'
  ]
  if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
    raise ValueError('messages must have a turn of the role user, and none of these may be empty')
  return _encoded(tokenizer, tokenizer.encode_chat, value, turns)


def _encoded(tokenizer: Tokenizer, encode: Callable[[Any], list[int]], value: Any, texts: Sequence[str]) -> list[int]:
  try:
    return encode(value)
  except ValueError:
    raise
  except Exception as error:
    # Tokenizers raise classes of their own for a text that their vocabulary cannot spell.
    check_spelling(tokenizer, texts)
    raise ValueError(f'the tokenizer cannot encode the prompt: {error}') from error


def _parse(line: bytes) -> dict[str, Any]:
  """One JSON object; what Python would read but JSON does not have is refused too."""

  def unique(pairs):
    if len(dict(pairs)) != len(pairs):
      raise ValueError('a name stands twice in an object')
    return dict(pairs)

  def number(text):
    if not math.isfinite(value := float(text)):
      raise ValueError(f'{text} is no finite number')
    return value

  try:
    record = json.loads(line.decode('utf-8-sig'), object_pairs_hook=unique, parse_float=number, parse_constant=number)
    # A lone surrogate is legal in JSON and cannot be written back.
    json.dumps(record, ensure_ascii=False).encode()
  except (ValueError, RecursionError) as error:
    raise ValueError(f'the line is not JSON: {error}') from None
  if not isinstance(record, dict):
    raise ValueError(f'the line must be a JSON object, got {json.dumps(record)[:80]}')
  return record

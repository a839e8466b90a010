"""Text to token ids and back, with the tokenizer and chat template of a checkpoint.

transformers is imported when a tokenizer is loaded and not before: it takes about a second.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import json
import logging
from pathlib import Path
from typing import Any

import jinja2

from archer_jax.checkpoints.manifest import TOKENIZER_FILES
from archer_jax.checkpoints.manifest import check_end_ids
from archer_jax.checkpoints.manifest import check_no_pointer
from archer_jax.checkpoints.manifest import has_tokenizer
from archer_jax.config import ModelConfig

# What is looked for in a rendered conversation to find out where an answer ends and what follows it.
_PROBE = 'archer'


class Tokenizer:
  """A checkpoint's tokenizer.

  Attributes:
    hf: the transformers tokenizer, for anything that is not here.
    end_ids: every token that ends an answer: the model's end-of-text token, those that were named beside it, the
      tokenizer's own and the chat template's end of turn.
    unknown_ids: ranges (first, past the last) of the model's ids that the tokenizer has no token for; masks and end
      tokens are none of them.
    size: how many ids it has a token for.
  """

  def __init__(self, hf: Any, config: ModelConfig, end_ids: Sequence[int] = ()):
    self.hf = hf
    self._mask_id = config.mask_id
    ends = (config.eos_id, *end_ids, hf.eos_token_id, self._end_of_turn())
    self.end_ids = tuple(dict.fromkeys(token for token in ends if token is not None))
    check_end_ids('the end tokens of tokenizer and template', self.end_ids, config)
    known = set(hf.get_vocab().values())
    self.size = len(known)
    self.unknown_ids = _ranges(sorted(set(range(config.vocab_size)) - known - {config.mask_id, *self.end_ids}))

  def encode(self, prompt: str) -> list[int]:
    """Token ids of a raw prompt, without any token that is not in the text.

    Text that spells a special token becomes that token, the mask token too: the caller checks for `mask_id`.
    """
    return self.hf(prompt, add_special_tokens=False, truncation=False, verbose=False)['input_ids']

  def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of a conversation in the checkpoint's chat template, up to where the answer begins.

    Args:
      messages: each with `role` and `content`. The answer goes on with the last one if that is the assistant's.

    Raises:
      ValueError: if the checkpoint has no chat template, or the template refuses the messages.
    """
    if self.hf.chat_template is None:
      raise ValueError('the checkpoint has no chat template; give the prompt as plain text')
    for index, message in enumerate(messages):
      if not isinstance(message, Mapping) or not all(isinstance(message.get(f), str) for f in ('role', 'content')):
        raise ValueError(f'messages[{index}] must have the strings role and content, got {message!r}')
    # The template writes the special tokens, so the tokenizer must not add its own: two starts would be one too many.
    return self.encode(self.chat_text(messages, goes_on=bool(messages) and messages[-1]['role'] == 'assistant'))

  def chat_text(self, messages: Sequence[Mapping[str, str]], *, goes_on: bool) -> str:
    """A conversation in the chat template, up to where the answer begins.

    Args:
      messages: each with `role` and `content`.
      goes_on: whether the answer goes on with the last message, exactly where that ends; else a new turn begins.

    Raises:
      ValueError: the template refuses the messages, or does not show the last one.
    """
    if not goes_on:
      return self._render(messages, add_generation_prompt=True)
    # The message itself would not do: what closes a turn may hold its text too, or the template strip its end.
    *before, last = messages
    marked = [*before, {**last, 'content': last['content'] + _PROBE}]
    text, found, _ = self._render(marked, add_generation_prompt=False).rpartition(_PROBE)
    if not found:
      raise ValueError('the chat template of the checkpoint does not show the last message, which must be continued')
    return text

  def decode_text(self, ids: Iterable[int]) -> str:
    """The text before the first end token, without special tokens and masks."""
    kept = []
    for token in ids:
      if token in self.end_ids:
        break
      if token != self._mask_id:
        kept.append(int(token))
    return self.hf.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False)

  def _render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
    try:
      return self.hf.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=add_generation_prompt)
    except jinja2.TemplateError as error:
      raise ValueError(f'the chat template of the checkpoint refuses the messages: {error}') from error

  def _end_of_turn(self) -> int | None:
    """The special token that the chat template writes behind an answer."""
    if self.hf.chat_template is None:
      return None
    turns = [{'role': 'user', 'content': 'question'}, {'role': 'assistant', 'content': _PROBE}]
    behind = self._render(turns, add_generation_prompt=False).rpartition(_PROBE)[2].lstrip()
    special = {token.content: index for index, token in self.hf.added_tokens_decoder.items() if token.special}
    closing = [content for content in special if behind.startswith(content)]
    return special[max(closing, key=len)] if closing else None


def _ranges(ids: Sequence[int]) -> tuple[tuple[int, int], ...]:
  """Rising ids as ranges (first, past the last)."""
  ranges = []
  for token in ids:
    if ranges and ranges[-1][1] == token:
      ranges[-1] = ranges[-1][0], token + 1
    else:
      ranges.append((token, token + 1))
  return tuple(ranges)


def generation_end_ids(folder: str | Path, config: ModelConfig) -> tuple[int, ...]:
  """The end tokens that generation_config.json of `folder` names; none if there is no such file or it names none.

  Raises:
    ValueError: the file is no JSON object, or what it names are no tokens of the model.
  """
  file = Path(folder) / 'generation_config.json'
  if not file.is_file():
    return ()
  try:
    content = json.loads(file.read_text('utf-8'))
  except ValueError as error:
    raise ValueError(f'{file} is not JSON: {error}') from error
  if not isinstance(content, dict):
    raise ValueError(f'{file} must be a JSON object, got {type(content).__name__}')
  ids = content.get('eos_token_id')
  ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
  check_end_ids(f'eos_token_id in {file}', ids, config)
  return tuple(ids)


def load_tokenizer(folder: str | Path, config: ModelConfig, end_ids: Sequence[int] = ()) -> Tokenizer | None:
  """Loads the tokenizer files of `folder`, or returns None if there are none.

  Only the generic classes are used, by the files that are there and not by the class that tokenizer_config.json names:
  tokenizer.json says everything, and a vocab.json with merges.txt is what Qwen2 and Dream publish (Dream's own class
  is Qwen2's under another name). So no code from the folder is ever run and nothing is fetched.

  Args:
    folder: with the tokenizer's files, and generation_config.json if there is one.
    config: the model's.
    end_ids: end tokens that are known from elsewhere.

  Raises:
    ValueError: if the files cannot be read as a tokenizer, or have tokens that the model does not have.
  """
  folder = Path(folder)
  if not has_tokenizer(folder):
    return None
  for name in TOKENIZER_FILES:
    if (folder / name).is_file():
      check_no_pointer(folder / name)
  # Without torch, transformers warns at import that models won't be available; only tokenizers are wanted here.
  quiet = lambda record: 'PyTorch' not in record.getMessage()
  logger = logging.getLogger('transformers')
  logger.addFilter(quiet)
  try:
    from transformers import PreTrainedTokenizerFast
    from transformers import Qwen2Tokenizer
  finally:
    logger.removeFilter(quiet)
  cls = PreTrainedTokenizerFast if (folder / 'tokenizer.json').is_file() else Qwen2Tokenizer
  try:
    hf = cls.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
  except Exception as error:
    raise ValueError(f'the tokenizer in {folder} cannot be read: {error}') from error
  if (largest := max(hf.get_vocab().values(), default=0)) >= config.vocab_size:
    raise ValueError(f'the tokenizer in {folder} has token id {largest}, the model only {config.vocab_size} tokens')
  return Tokenizer(hf, config, (*generation_end_ids(folder, config), *end_ids))

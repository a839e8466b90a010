"""Text to token ids and back, with the tokenizer and chat template of a checkpoint.

transformers is imported when a tokenizer is loaded and not before: it takes about a second.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import logging
from pathlib import Path
from typing import Any

import jinja2

from archer_jax.checkpoints.manifest import has_tokenizer
from archer_jax.config import ModelConfig

# What is looked for in a rendered conversation to find out what follows an answer.
_PROBE = 'archer'


class Tokenizer:
  """A checkpoint's tokenizer.

  Attributes:
    hf: the transformers tokenizer, for anything that is not here.
    end_ids: the model's end-of-text token, and the chat template's end-of-turn token if there is one.
  """

  def __init__(self, hf: Any, config: ModelConfig):
    self.hf = hf
    self._mask_id = config.mask_id
    end_of_turn = self._end_of_turn()
    self.end_ids = (config.eos_id,) if end_of_turn in (None, config.eos_id) else (config.eos_id, end_of_turn)

  def encode(self, prompt: str) -> list[int]:
    """Token ids of a raw prompt, without any token that is not in the text.

    Text that spells a special token becomes that token, the mask token too: the caller checks for `mask_id`.
    """
    return self.hf(prompt, add_special_tokens=False, truncation=False, verbose=False)['input_ids']

  def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of a conversation in the checkpoint's chat template, up to where the answer begins.

    Args:
      messages: each with `role` and `content`.

    Raises:
      ValueError: if the checkpoint has no chat template, or the template refuses the messages.
    """
    if self.hf.chat_template is None:
      raise ValueError('the checkpoint has no chat template; give the prompt as plain text')
    for index, message in enumerate(messages):
      if not isinstance(message, Mapping) or not all(isinstance(message.get(f), str) for f in ('role', 'content')):
        raise ValueError(f'messages[{index}] must have the strings role and content, got {message!r}')
    # The template writes the special tokens, so the tokenizer must not add its own: two starts would be one too many.
    return self.encode(self._render(messages, add_generation_prompt=True))

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


def load_tokenizer(folder: str | Path, config: ModelConfig) -> Tokenizer | None:
  """Loads the tokenizer files of `folder`, or returns None if there are none.

  Only the generic classes are used, by the files that are there and not by the class that tokenizer_config.json names:
  tokenizer.json says everything, and a vocab.json with merges.txt is what Qwen2 and Dream publish (Dream's own class
  is Qwen2's under another name). So no code from the folder is ever run and nothing is fetched.

  Raises:
    ValueError: if the files cannot be read as a tokenizer, or have tokens that the model does not have.
  """
  folder = Path(folder)
  if not has_tokenizer(folder):
    return None
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
  return Tokenizer(hf, config)

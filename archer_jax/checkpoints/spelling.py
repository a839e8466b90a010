"""Whether a tokenizer can spell a text, told before anything is decoded."""

from collections.abc import Iterable

from archer_jax.checkpoints.text import Tokenizer


def missing_characters(tokenizer: Tokenizer, text: str) -> str:
  """The characters of a text that the tokenizer has no token for, each once, in the order of their first places."""
  ids = _ids(tokenizer, text)
  # A vocabulary without an unknown token may drop what it does not have without a word.
  if ids is not None and tokenizer.hf.decode(ids, clean_up_tokenization_spaces=False) == text:
    return ''
  # Not so for a text that a normaliser changes: then only characters that leave nothing are missing.
  return ''.join(character for character in dict.fromkeys(text) if not _ids(tokenizer, character))


def check_spelling(tokenizer: Tokenizer, texts: Iterable[str]) -> None:
  """Raises ValueError naming all characters of the texts that the tokenizer cannot spell, if there are any."""
  missing = dict.fromkeys(character for text in texts for character in missing_characters(tokenizer, text))
  if missing:
    names = ', '.join(f'{character!r} (U+{ord(character):04X})' for character in missing)
    raise ValueError(f'the tokenizer of the checkpoint must be able to spell the prompts, but has no token for {names}')


def _ids(tokenizer: Tokenizer, text: str) -> list[int] | None:
  """Token ids, or None where the text cannot be encoded or a part of it becomes the unknown token."""
  try:
    ids = tokenizer.encode(text)
  except Exception:
    # Tokenizers raise classes of their own.
    return None
  return None if tokenizer.hf.unk_token_id in ids else ids

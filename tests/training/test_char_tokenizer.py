"""The character tokenizer, read as any Hugging Face tokenizer."""

import pytest
from transformers import AutoTokenizer

from archer_jax.training import char_tokenizer


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
  folder = tmp_path_factory.mktemp('tokenizer')
  char_tokenizer.save_char_tokenizer(folder)
  return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def test_every_printable_ascii_character_is_one_token(tokenizer):
  printable = ''.join(map(chr, range(32, 127))) + '\n\t'
  assert len(tokenizer) == 100
  ids = tokenizer.encode(printable)
  assert len(ids) == len(set(ids)) == 97
  assert min(ids) == 3


def test_special_tokens_stand_first(tokenizer):
  assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id) == (0, 1, 2)
  assert [char_tokenizer.VOCAB[t] for t in (char_tokenizer.PAD, char_tokenizer.EOS, char_tokenizer.MASK)] == [0, 1, 2]


@pytest.mark.parametrize('text', ['', ' ', 'a  b , c .', "it 's  n't", '\n\n \tx\n', ' 0123', 'sudoku4:31=', '<pad>'])
def test_round_trip_without_hidden_tokens(tokenizer, text):
  ids = tokenizer.encode(text)
  assert len(ids) == len(text)
  assert tokenizer(text, add_special_tokens=False)['input_ids'] == ids
  assert tokenizer.decode(ids) == text
  assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_a_character_outside_the_vocabulary_is_refused(tokenizer):
  # Losing it would answer another question than the one asked.
  with pytest.raises(Exception, match='vocabulary'):
    tokenizer.encode('4\N{MULTIPLICATION SIGN}4')

"""Characters without a token, for the ways in which tokenizers treat them."""

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from tokenizers import models
from tokenizers import normalizers
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from archer_jax.checkpoints.spelling import check_spelling
from archer_jax.checkpoints.spelling import missing_characters
from archer_jax.checkpoints.text import Tokenizer
from archer_jax.config import ModelConfig

LETTERS = {letter: index for index, letter in enumerate('abc ')}
CONFIG = ModelConfig(
  family='llada',
  vocab_size=300,
  d_model=8,
  n_layers=1,
  n_heads=1,
  n_kv_heads=1,
  head_dim=8,
  d_ff=8,
  rope_theta=1e4,
  norm_eps=1e-5,
  qkv_bias=False,
  max_length=8,
  mask_id=298,
  eos_id=299,
  pad_id=299,
  logit_alignment='same_position',
)


def tokenizer(model, *, normalizer=None, **special):
  backend = Backend(model)
  backend.pre_tokenizer = pre_tokenizers.Split('', 'isolated')
  backend.decoder = decoders.Fuse()
  if normalizer:
    backend.normalizer = normalizer
  return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **special), CONFIG)


def raises():
  return tokenizer(models.WordLevel(LETTERS))


def gives_unknown():
  return tokenizer(models.WordLevel({**LETTERS, '<unk>': 9}, unk_token='<unk>'), unk_token='<unk>')


def drops():
  return tokenizer(models.BPE(LETTERS, []))


@pytest.mark.parametrize('make', [raises, gives_unknown, drops])
def test_missing_characters_are_found(make):
  made = make()
  assert missing_characters(made, 'a cab') == missing_characters(made, '') == ''
  assert missing_characters(made, 'axb➞ x') == 'x➞'


def test_bytes_spell_everything():
  backend = Backend(models.BPE({letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = decoders.ByteLevel()
  assert missing_characters(Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), CONFIG), 'é ➞\n') == ''


def test_a_normaliser_leaves_nothing_out():
  made = tokenizer(models.BPE(LETTERS, []), normalizer=normalizers.Lowercase())
  assert missing_characters(made, 'A cab') == ''
  assert missing_characters(made, 'A cabX') == 'X'


def test_a_special_token_is_one_piece():
  made = tokenizer(models.WordLevel({**LETTERS, '<|end|>': 9}), eos_token='<|end|>')
  assert missing_characters(made, 'a<|end|>b') == ''


def test_one_sentence_names_them_all():
  check_spelling(raises(), ['a', 'b c'])
  with pytest.raises(ValueError, match=r"has no token for 'x' \(U\+0078\), '➞' \(U\+279E\)$"):
    check_spelling(raises(), ['a', 'bx', 'x➞'])

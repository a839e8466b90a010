"""The bundled tokenizer, made afresh."""

import pytest
from transformers import AutoTokenizer

from archer_jax.training.tokenizer import save_tokenizer


@pytest.fixture(scope='session')
def count_tokens(tmp_path_factory):
  folder = tmp_path_factory.mktemp('tokenizer')
  save_tokenizer(folder)
  tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
  return lambda text: len(tokenizer.encode(text))

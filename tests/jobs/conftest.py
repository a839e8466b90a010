"""The tiny text model, loaded once."""

import pytest
from text_model import save_text_model

from archer_jax import checkpoint


@pytest.fixture(scope='session')
def text_path(tmp_path_factory):
  return save_text_model(tmp_path_factory.mktemp('text') / 'model')


@pytest.fixture(scope='session')
def text(text_path):
  """Model, parameters and tokenizer."""
  return checkpoint.load(text_path)

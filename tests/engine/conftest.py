"""Chunks that are compiled in less time."""

from programs import CHUNK
import pytest

from archer_jax.engine import engine


@pytest.fixture(autouse=True, scope='module')
def quick_chunks():
  """For every engine on one device."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(engine, 'decode_chunk', CHUNK)
    yield

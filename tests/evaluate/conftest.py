"""Programs that are compiled in less time."""

import programs
import pytest

from archer_jax.engine import engine
from archer_jax.evaluate import work

# Once, so that all tests share its compiled programs.
_COUNTED = programs.quick(work.counted_decode)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
  monkeypatch.setattr(work, 'counted_decode', _COUNTED)
  monkeypatch.setattr(engine, 'decode_chunk', programs.CHUNK)

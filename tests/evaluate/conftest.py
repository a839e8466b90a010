"""Programs that are compiled in less time."""

import programs
import pytest

from archer_jax.evaluate import work

# Once, so that all tests share its compiled programs.
_COUNTED = programs.quick(work.counted_decode)


@pytest.fixture(autouse=True)
def quick_counts(monkeypatch):
  monkeypatch.setattr(work, 'counted_decode', _COUNTED)

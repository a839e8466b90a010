"""Programs that are compiled in less time."""

import jax
from programs import QUICK
import pytest

from archer_jax.decode import decode
from archer_jax.evaluate import work
from archer_jax.jobs.generate import decode_requests


def _quick(function):
  return jax.jit(function.__wrapped__, static_argnames='cfg', donate_argnames='state', compiler_options=QUICK)


# Once, so that all tests share their compiled programs.
_COUNTED, _PLAIN = _quick(work.counted_decode), _quick(decode)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
  monkeypatch.setattr(work, 'counted_decode', _COUNTED)
  monkeypatch.setitem(decode_requests.__kwdefaults__, 'decode', _PLAIN)

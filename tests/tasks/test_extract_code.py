"""Code taken out of answers."""

import threading
import warnings

import pytest

from archer_jax.tasks.extract_code import begun_code
from archer_jax.tasks.extract_code import defines
from archer_jax.tasks.extract_code import needed

PROGRAM = """\
from __future__ import annotations
import math; import os
LIMIT = 3
x = int(input())
table = {}
table[1] = LIMIT
if LIMIT > 2:
    def helper(n):
        return math.floor(n) + table[1]
else:
    helper = None
@staticmethod
def unused(n):
    return x
def f(n: int) -> int:
    x = helper(n)
    return x
print(f(int(input())))
assert f(1) == 0
if __name__ == '__main__':
    main()
def unfinished(): ...
"""
NEEDED = """\
from __future__ import annotations
import math; import os
LIMIT = 3
table = {}
table[1] = LIMIT
if LIMIT > 2:
    def helper(n):
        return math.floor(n) + table[1]
else:
    helper = None
def f(n: int) -> int:
    x = helper(n)
    return x"""


def test_what_a_function_needs():
  assert needed(PROGRAM, 'f') == NEEDED
  # A name that is local to the function is not the module's.
  assert 'x = int(input())' in needed(PROGRAM, 'unused') and '@staticmethod\ndef unused' in needed(PROGRAM, 'unused')


@pytest.mark.parametrize(
  ('program', 'defined'),
  [
    ('def f(): pass', True),
    ('async def f(): pass', True),
    ('class f: pass', True),
    ('f = g = 1', True),
    ('(f, g), h = pair', True),
    ('f: int = 1', True),
    ('from a import b as f', True),
    ('try:\n  import f\nexcept ImportError:\n  f = None', True),
    ('f()', False),
    ('def g():\n  f = 1', False),
    ('def f(:', False),
    # Parsed, but not compiled.
    ('def f(): pass\nreturn 1', False),
    ('def f(): pass\x00', False),
    ('f = ' + '(' * 10_000, False),
    ('f = ' + '-' * 100_000 + '1', False),
    ('', False),
  ],
)
def test_what_a_program_defines(program, defined):
  assert defines(program, 'f') is defined


def test_a_long_chain_of_branches():
  assert defines('if a:\n  b = 1\n' + 'elif a:\n  b = 1\n' * 60 + 'else:\n  f = 1', 'f')


def test_the_first_reading_that_is_meant():
  answer = 'Sure:\n```\nnothing\n```\n```py\r\n  f = 1\r\n  f = 2\r\n```'
  assert begun_code(answer, lambda text: defines(text, 'f')) == 'f = 1\nf = 2'
  assert begun_code(answer, lambda text: False) == 'Sure:'


def test_warnings_of_answers_are_nobodys():
  before = list(warnings.filters)
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    inside = list(warnings.filters)
    threads = [threading.Thread(target=defines, args=('f = "\\d" is 1', 'f')) for _ in range(8)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    assert defines('f = "\\d" is 1', 'f')
    assert warnings.filters == inside
  assert warnings.filters == before

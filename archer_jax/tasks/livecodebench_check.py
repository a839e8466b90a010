"""Runs one test of LiveCodeBench; its text is the beginning of a program in the sandbox, where nothing else is at hand.

Right is what the published checker calls right. Of a program: as many lines as expected, each the same without white
space around it, or the same row of numbers (`1.0` is `1`, exactly and without a tolerance). Of a method: the value that
JSON has, where a tuple counts as a list.
"""

from decimal import Decimal
from decimal import InvalidOperation
import json
import os
import sys

# What submissions find on the contests' sites without importing it. `builtins` puts names back that others have hidden.
_MODULES = (
  'string', 're', 'datetime', 'collections', 'heapq', 'bisect', 'copy', 'math', 'random', 'statistics', 'itertools',
  'functools', 'operator', 'io', 'sys', 'json',
)  # fmt: skip
_PRELUDE = '\n'.join(
  [
    *(f'from {module} import *' for module in (*_MODULES, 'builtins', 'typing')),
    f'import {", ".join(_MODULES)}',
    'sys.setrecursionlimit(50000)',
  ]
)


def same_output(found, expected):
  """Whether two outputs of a program are the same, by the rule above."""
  found, expected = ([line.strip() for line in text.strip().split('\n')] for text in (found, expected))
  return len(found) == len(expected) and all(map(_same_line, found, expected))


def _same_line(found, expected):
  if found == expected:
    return True
  try:
    found, expected = ([Decimal(word) for word in line.split()] for line in (found, expected))
    return found == expected
  except InvalidOperation:
    return False


def same_value(found, expected):
  """Whether a method's result is the expected one, by the rule above."""
  return (list(found) if isinstance(found, tuple) else found) == json.loads(expected)


def run_program(code, given):
  """What a program writes that reads `given`."""
  # Files in the place of standard input and output, since programs also open these by number.
  with open('input', 'w') as file:
    file.write(given)
  written = os.open('output', os.O_CREAT | os.O_RDWR | os.O_TRUNC)
  os.dup2(os.open('input', os.O_RDONLY), 0)
  os.dup2(written, 1)
  sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, 'w')
  _execute(code, '__main__')
  sys.stdout.flush()
  with open('output') as file:
    return file.read()


def run_method(code, method, given):
  """What a method returns for arguments that are JSON, one a line."""
  arguments = [json.loads(line) for line in given.split('\n') if line.strip()]
  return getattr(_execute(code, 'answer')['Solution'](), method)(*arguments)


def _execute(code, name):
  namespace = {'__name__': name}
  exec(_PRELUDE, namespace)
  try:
    exec(compile(code, 'answer', 'exec'), namespace)
  except SystemExit as end:
    # A way to end like any other, unless it says that something is wrong.
    if end.code:
      raise
  return namespace


def check(code, method, given, expected):
  """Fails unless the code gives what is expected; `method` is None for a program."""
  if method is None:
    assert same_output(run_program(code, given), expected)
  else:
    assert same_value(run_method(code, method, given), expected)

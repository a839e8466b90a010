"""Input and output of commands as files of JSON lines, and commands as processes of their own."""

import contextlib
import json
import os
from pathlib import Path
import subprocess
import sys

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def process(*arguments, cwd, **options):
  """A real one, with a cache directory of its own."""
  environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'XDG_CACHE_HOME': str(cwd / 'cache'), 'JAX_PLATFORMS': 'cpu'}
  command = [sys.executable, str(ROOT / 'run_decode.py'), *map(str, arguments)]
  pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, **options}
  child = subprocess.Popen(command, cwd=cwd, env=environment, text=True, **pipes)
  try:
    yield child
  finally:
    child.kill()
    child.communicate()


def write_lines(path, records):
  path.write_text(''.join((line if isinstance(line, str) else json.dumps(line)) + '\n' for line in records))
  return path


def read_lines(path):
  return [json.loads(line) for line in path.read_text('utf-8').splitlines()]

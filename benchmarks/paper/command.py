"""The command line: flags, what can be wrong with them, and the run that they describe.

JAX is imported once the flags are known to be right, so that --help and mistakes answer at once.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from pathlib import Path
from typing import Any

from absl import flags

from archer_jax import runtime
from archer_jax.checkpoints.manifest import read_manifest
from archer_jax.engine.settings import check_setting
from archer_jax.evaluate.figure import check_figure
from archer_jax.evaluate.setting import DEFAULT_N
from archer_jax.evaluate.setting import Command
from archer_jax.evaluate.setting import parse_settings
from archer_jax.flags import Definer
from archer_jax.flags import Groups
from archer_jax.flags import help_text
from archer_jax.flags import read_flags
from archer_jax.flags import run_command
from archer_jax.jobs.output import check_writable
from archer_jax.mesh import parse_mesh
from archer_jax.tasks.extract import EXTRACTORS
from paper.settings import GEN_LENGTH
from paper.settings import TABLES
from paper.settings import labels

_USAGE = 'python benchmarks/paper.py [--flag=value ...]'
_INTRODUCTION = f"""\
Measures the tables of the paper on a checkpoint and tells where they agree with it. What each is stands in \
docs/reproduce.md: {', '.join(TABLES)}.

With --json a run that was killed goes on where it was when the same command is given again: every part that is \
measured is on the disk at once, in FILE.pieces.jsonl."""


def define_flags(values: flags.FlagValues) -> Groups:
  """Defines every flag on `values` and returns them in groups, in the order of the help."""
  define = Definer(values)
  return {
    'What to measure': [
      define.text('checkpoint', 'folder that archer-convert made (default: the bundled model)'),
      define.text('tasks', 'as of archer_jax.evaluate, between commas', 'sudoku6,sort,pipeline'),
      define.whole('n', None, 2, f'problems of each task (default: {DEFAULT_N}, all of a set or file)'),
      define.text('tables', 'between commas', ','.join(TABLES)),
      define.number(
        'gen_length',
        None,
        f"tokens of an answer, one block (default: the task's own, {GEN_LENGTH} where it has none)",
        integer=True,
      ),
      define.number(
        'refresh_distance', None, 'K of Archer where no table sweeps it (default: that of Saber)', integer=True
      ),
      define.whole('worked_examples', None, 0, "solved problems before each question (default: the task's own number)"),
      define.choice('extract', 'what is read out of an answer to a file of jsonl', tuple(EXTRACTORS), 'exact'),
      define.switch('chat', False, "questions of jsonl are a user's turn in the checkpoint's chat template"),
    ],
    'Where to, beside the tables on stdout': [
      define.text('json', 'file of JSON to make, and the parts it is made from beside it'),
      define.text('figure', 'folder for a picture and a page of Markdown of every table; needs matplotlib'),
    ],
    'Run': [
      *define.running('names the problems, and what is drawn in decoding them'),
      define.text('mesh', 'devices of this process by axis, such as model:4 (default: one)'),
    ],
  }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
  """What the command line asks for, checked as far as it can be without JAX.

  Attributes:
    command: the same as an evaluation of every setting that the tables need.
    tables: names, in the order in which they are measured.
    options: the flags that are no settings, and `gen_length` and `refresh_distance`, which are None if not given.
  """

  command: Command
  tables: Sequence[str]
  options: Mapping[str, Any]


def parse(argv: Sequence[str]) -> Order:
  """Reads the flags, the config file and the checkpoint's manifest.

  Raises:
    ValueError, OSError, flags.Error: what is wrong, in one sentence.
  """
  options, base = read_flags(argv, define_flags)
  options |= {name: base.pop(name, None) for name in ('gen_length', 'refresh_distance')}
  tables = [name.strip() for name in options['tables'].split(',')]
  for index, name in enumerate(tables):
    if name not in TABLES or name in tables[:index]:
      raise ValueError(f'tables must be among {", ".join(TABLES)}, each once, got {options["tables"]!r}')
  if options['refresh_distance'] is not None and options['refresh_distance'] < 1:
    raise ValueError(f'refresh_distance must be at least 1, got {options["refresh_distance"]}')
  if options['gen_length'] is not None:
    check_setting('gen_length', options['gen_length'])
  if options['mesh'] is not None:
    parse_mesh(options['mesh'])
  manifest = read_manifest(options['checkpoint'])
  compared = labels(tables, manifest.config.logit_alignment, options['refresh_distance'])
  command = Command(
    options=options,
    settings=parse_settings(','.join(compared)),
    # As published: every position of the answer is decoded.
    base={**base, 'early_stop': False},
    manifest=manifest,
  )
  command.complete({})
  _check_files(options)
  return Order(command=command, tables=tables, options=options)


def _check_files(options: Mapping[str, Any]) -> None:
  """Raises ValueError if results could not be written."""
  for name in ('json', 'figure'):
    if options[name] == '':
      raise ValueError(f'{name} must not be empty')
  if options['json'] is not None:
    path = Path(options['json'])
    if path.is_dir():
      raise ValueError(f'json must be a file, got the folder {path}')
    check_writable('json', path.parent)
  if options['figure'] is not None:
    path = Path(options['figure'])
    if path.exists() and not path.is_dir():
      raise ValueError(f'figure must be a folder, got the file {path}')
    check_figure(path / 'main.png')


def main(argv: Sequence[str]) -> int:
  """Runs the command.

  Args:
    argv: the program's name and its arguments.

  Returns:
    The exit code: 0, 1 if anything is wrong, 130 after an interrupt.
  """

  def prepare(argv: Sequence[str]) -> Callable[[], int]:
    order = parse(argv)
    runtime.set_up()
    # From here on JAX is there.
    from paper import run

    return run.prepare(order, order.options['dtype'] or runtime.default_dtype(), runtime.facts).run

  return run_command(argv, lambda: help_text(_USAGE, _INTRODUCTION, define_flags), prepare)

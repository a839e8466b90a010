"""Compares decoding settings on tasks, quality and speed in one table; `archer-evaluate --help`.

JAX is imported once the flags are known to be right, so that --help and mistakes answer at once.
"""

from collections.abc import Callable
from collections.abc import Sequence
from pathlib import Path
import sys
from typing import NoReturn

from absl import flags

from archer_jax import runtime
from archer_jax.checkpoints.manifest import read_manifest
from archer_jax.evaluate.figure import check_figure
from archer_jax.evaluate.setting import DEFAULT_N
from archer_jax.evaluate.setting import Command
from archer_jax.evaluate.setting import parse_settings
from archer_jax.flags import Definer
from archer_jax.flags import Groups
from archer_jax.flags import help_text
from archer_jax.flags import leave
from archer_jax.flags import read_flags
from archer_jax.flags import run_command
from archer_jax.jobs.output import check_new_file
from archer_jax.tasks.extract import EXTRACTORS
from archer_jax.tasks.sources import BENCHMARKS
from archer_jax.tasks.sources import GENERATED

_USAGE = 'archer-evaluate [--flag=value ...]'
_INTRODUCTION = """\
Solves the same problems with several decoding settings and tells quality and speed of each: Pass@1 with its 95 % \
interval, paired wins and losses against the first setting with an exact sign test, steps, forwards, refreshes and \
tokens taken back, and the ratio of the time to that of recomputing everything, beside what counted operations predict.

  archer-evaluate --tasks=sudoku6,sort --n=200 --compare=always,archer,once,interval:4
  archer-evaluate --tasks=sort --compare=llada,wino:0.6,wino:0.9,archer:16+shadow=official
  archer-evaluate --tasks=jsonl:questions.jsonl --extract=number --checkpoint=llada-8b --chat

A setting of --compare is a refresh rule or a decoder (--refresh, --decoder), then any number of +name=value, each a \
flag of the last groups below. A number behind the name is its own: interval:4 refreshes at every 4th step, archer:8 \
when 8 positions changed, saber:2 has that min_accept, wino:0.9 that threshold, llada:32 that many steps.

Flags of the last groups hold for every setting that reads them and does not say otherwise; a flag wins over the file \
of --config, that over what the task and the checkpoint recommend (the task its gen_length, in one block), that over \
the defaults below."""


def define_flags(values: flags.FlagValues) -> Groups:
  """Defines every flag on `values` and returns them in groups, in the order of the help."""
  define = Definer(values)
  return {
    'What to compare': [
      define.text('checkpoint', 'folder that archer-convert made (default: the bundled model)'),
      define.text(
        'tasks',
        f'generated: {", ".join(GENERATED)}; humaneval; or files: sudoku4:PATH.csv, countdown:PATH.jsonl, '
        f'{", ".join(BENCHMARKS)}:PATH as published, jsonl:PATH with prompt and answer',
        'sudoku6,sort,pipeline',
      ),
      define.whole('n', None, 1, f'problems of each task (default: {DEFAULT_N}, all of a set or file)'),
      define.text('compare', 'settings, the first is what wins and losses are counted against', 'always,archer'),
      define.whole('worked_examples', None, 0, "solved problems before each question (default: the task's own number)"),
      define.choice('extract', 'what is read out of an answer to a file of jsonl', tuple(EXTRACTORS), 'exact'),
      define.switch('chat', False, "questions of jsonl are a user's turn in the checkpoint's chat template"),
    ],
    'Where to, beside the table on stdout': [
      define.text('json', 'file of JSON to make, a list with a record per task and setting'),
      define.text('figure', 'file to draw, quality against speed: .png, .pdf, .svg; needs matplotlib'),
    ],
    'Run': define.running('names the problems, and what is drawn in decoding them'),
    **define.decoding(),
  }


def parse(argv: Sequence[str]) -> Command:
  """Reads the flags, the config file and the checkpoint's manifest.

  Args:
    argv: the program's name and its arguments.

  Raises:
    ValueError, OSError, flags.Error: what is wrong, in one sentence.
  """
  options, base = read_flags(argv, define_flags)
  command = Command(
    options=options,
    settings=parse_settings(options['compare']),
    base=base,
    manifest=read_manifest(options['checkpoint']),
  )
  # Whatever the tasks are; what depends on them comes later.
  command.complete({})
  for name in ('json', 'figure'):
    if options[name] == '':
      raise ValueError(f'{name} must not be empty')
    if options[name] is not None:
      check_new_file(name, Path(options[name]))
  if options['figure'] is not None:
    check_figure(Path(options['figure']))
  return command


def main(argv: Sequence[str]) -> int:
  """Runs the command.

  Args:
    argv: the program's name and its arguments.

  Returns:
    The exit code: 0, 1 if anything is wrong or any answer could not be decoded, 130 after an interrupt.
  """

  def prepare(argv: Sequence[str]) -> Callable[[], int]:
    command = parse(argv)
    runtime.set_up()
    # From here on JAX is there.
    from archer_jax.evaluate import run

    return run.prepare(command, command.options['dtype'] or runtime.default_dtype(), runtime.facts).run

  return run_command(argv, lambda: help_text(_USAGE, _INTRODUCTION, define_flags), prepare)


def run() -> NoReturn:
  """The program: runs `main` and exits with its code."""
  leave(main(sys.argv))


if __name__ == '__main__':
  run()

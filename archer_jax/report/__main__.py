"""Shows traces as pictures and pages; `archer-report --help`."""

from collections.abc import Callable
from collections.abc import Sequence
from pathlib import Path
import sys
from typing import NoReturn

from absl import flags

from archer_jax.flags import Definer
from archer_jax.flags import Groups
from archer_jax.flags import help_text
from archer_jax.flags import leave
from archer_jax.flags import run_command
from archer_jax.jobs.output import check_new_file
from archer_jax.jobs.output import make_folder
from archer_jax.report.image import check_matplotlib
from archer_jax.report.page import write_report
from archer_jax.report.recording import read_recording

_USAGE = 'archer-report TRACE.npz ... [--output=FOLDER]'
_INTRODUCTION = """\
Makes of each trace that --trace of archer-decode wrote a picture, TRACE.png, and a page to step through, TRACE.html, \
which any browser opens without a network. Neither replaces a file that is there."""


def define_flags(values: flags.FlagValues) -> Groups:
  """Defines every flag on `values` and returns them in groups."""
  return {'Where to': [Definer(values).text('output', 'folder for the files (default: that of each trace)')]}


def main(argv: Sequence[str]) -> int:
  """Runs the command.

  Args:
    argv: the program's name and its arguments.

  Returns:
    The exit code: 0, or 1 if anything is wrong.
  """

  def prepare(argv: Sequence[str]) -> Callable[[], int]:
    values = flags.FlagValues()
    define_flags(values)
    traces = [Path(name) for name in values(list(argv))[1:]]
    if not traces:
      raise ValueError(f'trace must be given: {_USAGE}')
    check_matplotlib()
    folder = values['output'].value
    if folder is not None:
      make_folder('output', Path(folder))
    targets = [(trace.parent if folder is None else Path(folder)) / trace.stem for trace in traces]
    if twice := [target for index, target in enumerate(targets) if target in targets[:index]]:
      raise ValueError(f'traces must have names of their own, got {twice[0].name} twice')
    recordings = [read_recording(trace) for trace in traces]
    for target in targets:
      for suffix in ('png', 'html'):
        check_new_file('report', target.with_name(f'{target.name}.{suffix}'))

    def run() -> int:
      for recording, target in zip(recordings, targets, strict=True):
        for file in write_report(recording, target):
          print(file)
      return 0

    return run

  return run_command(argv, lambda: help_text(_USAGE, _INTRODUCTION, define_flags), prepare)


def run() -> NoReturn:
  """The program: runs `main` and exits with its code."""
  leave(main(sys.argv))


if __name__ == '__main__':
  run()

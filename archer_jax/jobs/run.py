"""One run of the command line, from its options to its exit code."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import json
import os
from pathlib import Path
import sys
from typing import Any
from typing import BinaryIO

from rich.console import Console
from tqdm import tqdm

from archer_jax import checkpoint
from archer_jax.decode import decode
from archer_jax.jobs import output
from archer_jax.jobs.generate import Result
from archer_jax.jobs.generate import Timing
from archer_jax.jobs.generate import decode_requests
from archer_jax.jobs.requests import Request
from archer_jax.jobs.requests import make_request
from archer_jax.jobs.requests import read_requests
from archer_jax.jobs.settings import Settings
from archer_jax.report.rollback import drawing
from archer_jax.report.rollback import find_rollbacks
from archer_jax.report.stats import Summary
from archer_jax.report.stats import report
from archer_jax.report.watch import Watch
from archer_jax.text import Tokenizer

_SHOWN_ROLLBACKS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """A run of which everything was looked at that can be wrong before anything is decoded; made by `prepare`.

  Attributes:
    options: the flags that are no settings, by name.
    settings: the run's settings.
    params: the model's parameters.
    tokenizer: the checkpoint's, if it has one.
    prompts: what the command line itself asks, None where records are read.
    requests: these as requests.
    is_example: whether the prompt is the checkpoint's own, since none was given.
  """

  options: Mapping[str, Any]
  settings: Settings
  params: dict
  tokenizer: Tokenizer | None
  prompts: Sequence[str] | None
  requests: Sequence[Request]
  is_example: bool

  def run(self, facts: Callable[[], Mapping[str, Any]]) -> int:
    """Decodes and writes, and returns the exit code; `facts` tells what else results depend on."""
    options = self.options
    trace = None if options['trace'] is None else Path(options['trace'])
    timing = None if options['watch'] else Timing()
    summary = Summary()
    with contextlib.ExitStack() as stack:
      bar = None
      entries = iter(self.requests)
      if self.prompts is None:
        lines = sys.stdin.buffer
        if options['input'] != '-':
          lines = stack.enter_context(open(options['input'], 'rb'))
          if not options['watch']:
            bar = stack.enter_context(_bar(lines))
            lines = _counted(lines, bar)
        entries = read_requests(lines, self.settings, self.tokenizer)
      write = _TextWriter(self.prompts).write
      if options['output'] == '-':
        write = output.print_records
      elif options['output'] is not None:
        write = stack.enter_context(output.RecordFile(Path(options['output']))).write
      for results in decode_requests(
        self.params,
        self.tokenizer,
        self.settings,
        entries,
        batch_size=options['batch_size'],
        # The example shows what it is an example of.
        trace=trace is not None or self.is_example,
        decode=Watch(self.tokenizer).decode if options['watch'] else decode,
        timing=timing,
      ):
        write(results)
        if trace is not None:
          for result in results:
            output.write_trace(trace, result)
        if self.is_example and not options['watch']:
          self._tell_rollbacks(results)
        summary.add(results)
        if bar is not None:
          bar.set_postfix(records=summary.records, refresh=False)
    self._tell(summary, timing, facts)
    return 1 if summary.errors else 0

  def _tell_rollbacks(self, results: Sequence[Result]) -> None:
    console = Console(stderr=True, highlight=False)
    mask_id = self.settings.model.mask_id
    for result in results:
      rollbacks = find_rollbacks(result.trace, mask_id)
      for rollback in rollbacks[:_SHOWN_ROLLBACKS]:
        text = drawing(rollback, mask_id, lambda token: self.tokenizer.decode_text([token]))
        console.print('', text, sep='\n', soft_wrap=True)
      if left := len(rollbacks[_SHOWN_ROLLBACKS:]):
        console.print(f'... and {left} more; --watch shows every step', style='dim')

  def _tell(self, summary: Summary, timing: Timing | None, facts: Callable[[], Mapping[str, Any]]) -> None:
    """The figures, as far as they are asked for."""
    options = self.options
    console = Console(stderr=True, highlight=False)
    if self.prompts is not None:
      took = f' · {timing.decode_seconds:.2f} s after {timing.compile_seconds:.1f} s of compiling' if timing else ''
      console.print(f'{summary.sentence()}{took}', style='dim', soft_wrap=True)
    elif summary.errors:
      where = f', see {options["output"]}' if options['output'] not in (None, '-') else ''
      console.print(f'{summary.errors} of {summary.records} records are errors{where}', soft_wrap=True)
    if not options['stats']:
      return
    console.print(summary.table(timing))
    if options['output'] not in (None, '-'):
      known = {**facts(), 'dtype': options['dtype'], 'batch_size': options['batch_size']}
      content = report(summary, timing, self.settings, self.tokenizer, known)
      with output.stats_file(options['output']).open('x', encoding='utf-8') as file:
        file.write(json.dumps(content, indent=2, ensure_ascii=False) + '\n')


def prepare(options: Mapping[str, Any], settings: Settings, example: str | None) -> Job:
  """Loads the checkpoint and checks what depends on it.

  Args:
    options: the flags that are no settings, by name, checked.
    settings: the run's settings.
    example: the prompt where the options name none.

  Raises:
    ValueError, OSError: a checkpoint or a prompt that is wrong.
  """
  _, params, tokenizer = checkpoint.load(options['checkpoint'], dtype=options['dtype'])
  if tokenizer is None and options['output'] is None:
    raise ValueError('output must be given: the checkpoint has no tokenizer to write text with')
  if settings.chat and (tokenizer is None or tokenizer.hf.chat_template is None):
    raise ValueError('chat must not be given: the checkpoint has no chat template')
  is_example = options['input'] is None and not options['prompt']
  prompts = None if options['input'] is not None else options['prompt'] or [example]
  requests = []
  for index, prompt in enumerate(prompts or ()):
    try:
      requests.append(make_request({'prompt': prompt}, index, settings, tokenizer))
    except ValueError as error:
      raise ValueError(f'prompt {index}: {error}') from error
  return Job(
    options=options,
    settings=settings,
    params=params,
    tokenizer=tokenizer,
    prompts=prompts,
    requests=requests,
    is_example=is_example,
  )


class _TextWriter:
  """Answers on stdout; what else a person wants to read goes to stderr, so that a pipe gets the answers alone."""

  def __init__(self, prompts: Sequence[str] | None):
    self._prompts = prompts
    self._console = Console(stderr=True, highlight=False)

  def write(self, results):
    for result in results:
      if self._prompts is not None:
        self._console.print(self._prompts[result.index], style='dim', markup=False, soft_wrap=True)
      if result.error is None:
        print(result.text, flush=True)
      else:
        print(f'error: record {result.index}: {result.error}', file=sys.stderr)


def _bar(file: BinaryIO) -> tqdm:
  """A bar over the bytes of a file, on stderr."""
  size = os.fstat(file.fileno()).st_size or None
  # A log wants a line now and then, a terminal a bar that moves.
  pace = 0.1 if sys.stderr.isatty() else 30
  return tqdm(total=size, unit='B', unit_scale=True, desc='decode', mininterval=pace)


def _counted(lines: Iterable[bytes], bar: tqdm) -> Iterator[bytes]:
  """Passes lines on and moves the bar by each once the next is asked for."""
  for line in lines:
    yield line
    bar.update(len(line))

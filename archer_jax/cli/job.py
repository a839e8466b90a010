"""One run of the command line, from its options to its exit code."""

from collections.abc import Callable
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

import jax
from rich.console import Console

from archer_jax.checkpoints import checkpoint
from archer_jax.checkpoints.text import Tokenizer
from archer_jax.engine.engine import Setup
from archer_jax.engine.engine import Timing
from archer_jax.engine.generate import N_BATCHES
from archer_jax.engine.generate import decode_requests
from archer_jax.engine.requests import Request
from archer_jax.engine.requests import file_stem
from archer_jax.engine.requests import make_request
from archer_jax.engine.requests import read_requests
from archer_jax.engine.results import Result
from archer_jax.engine.settings import Settings
from archer_jax.engine.stats import Summary
from archer_jax.engine.stats import report
from archer_jax.jobs import output
from archer_jax.jobs.begin import Group
from archer_jax.jobs.folder import is_folder
from archer_jax.jobs.folder import open_path
from archer_jax.jobs.folder import scan_input
from archer_jax.jobs.metrics import Progress
from archer_jax.jobs.part import Part
from archer_jax.jobs.preemption import PREEMPTED
from archer_jax.jobs.preemption import Notice
from archer_jax.jobs.profile import Profile
from archer_jax.mesh import make_mesh
from archer_jax.report.page import write_report
from archer_jax.report.recording import make_recording
from archer_jax.report.rollback import drawing
from archer_jax.report.rollback import find_rollbacks
from archer_jax.report.watch import Watch

_SHOWN_ROLLBACKS = 3
# What a process tells the others that has had notice of one.
_PREEMPTION = 'a preemption'


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
    n_records: of the input, None if that cannot be told before it is read.
    mesh: where the parameters are, if devices were asked for.
    end_ids: every end token that the checkpoint names.
    part: what this process has to do of a job in a folder, None where there is no folder.
    group: the processes of the job, None where there is no folder.
    together: whether they decode all records on one mesh, of which the first writes them.
  """

  options: Mapping[str, Any]
  settings: Settings
  params: dict
  tokenizer: Tokenizer | None
  prompts: Sequence[str] | None
  requests: Sequence[Request]
  is_example: bool
  n_records: int | None
  mesh: jax.sharding.Mesh | None
  end_ids: tuple[int, ...] = ()
  part: Part | None = None
  group: Group | None = None
  together: bool = False

  def run(self, facts: Callable[[], Mapping[str, Any]], notice: Notice | None = None) -> int:
    """Decodes and writes.

    Args:
      facts: tells what else results depend on.
      notice: of a preemption, at which a job in a folder stops.

    Returns:
      The exit code.
    """
    summary, timing = Summary(), None if self.options['watch'] else Timing()
    if self.part is None:
      with contextlib.ExitStack() as stack:
        self._decode(stack, summary, timing, None)
      self._tell(summary, timing, facts)
      return 1 if summary.errors else 0
    try:
      with contextlib.ExitStack() as stack:
        if notice is not None:
          stack.enter_context(notice.finishing())
        self._decode(stack, summary, timing, notice)
        is_complete = len(self.part.finished) == self.part.total
        if is_complete:
          self.part.complete()
    except OSError as error:
      raise OSError(f'{error}; what was finished is kept, and --resume goes on with it') from error
    code = PREEMPTED if not is_complete else 1 if self.part.errors else 0
    if self.together:
      # Only the first knows of errors in what earlier runs have finished.
      code = self.group.exchange('the end', code)[0]
    self.group.leave()
    if self.together and self.group.index:
      return code
    self._tell(summary, timing, facts)
    if not is_complete:
      print(
        f'preempted; {len(self.part.finished)} of {self.part.total} records are written, and --resume goes on with the '
        'others',
        file=sys.stderr,
      )
    return code

  def _decode(
    self, stack: contextlib.ExitStack, summary: Summary, timing: Timing | None, notice: Notice | None
  ) -> None:
    """Decodes until the end of the input or a preemption; `stack` closes what is opened here."""
    options, part = self.options, self.part
    entries, is_file = iter(self.requests), options['input'] not in (None, '-')
    if self.prompts is None:
      lines = stack.enter_context(open_path(options['input']).open('rb')) if is_file else sys.stdin.buffer
      wanted = {} if part is None else {'wanted': part.wants}
      entries = read_requests(lines, self.settings, self.tokenizer, **wanted)
    write = self._writer(stack)
    progress = self._progress(is_file)
    stack.callback(progress.close, summary)
    profile = None if options['profile'] is None else Profile(options['profile'])
    if profile is not None:
      stack.callback(profile.stop)
    setup = Setup(
      params=self.params,
      tokenizer=self.tokenizer,
      settings=self.settings,
      end_ids=self.end_ids,
      # The example shows what it is an example of.
      trace=self.is_example or any(options[name] is not None for name in ('trace', 'report')),
      decode=Watch(self.tokenizer).decode if options['watch'] else None,
      mesh=self.mesh,
    )
    chunks = decode_requests(
      setup,
      entries,
      batch_size=options['batch_size'],
      # Whoever writes into a pipe may wait for answers before the next question.
      n_batches=N_BATCHES if is_file and not options['watch'] else 1,
      in_order=part is None,
      timing=timing,
    )
    for number, results in enumerate(_among_others(chunks) if self.together else chunks):
      problem = None
      try:
        write(results)
        summary.add(results)
        progress.add(results, summary)
      except OSError as error:
        if not self.together:
          raise
        problem = str(error)
      if self.is_example and not options['watch']:
        self._tell_rollbacks(results)
      if profile is not None:
        profile.tick()
      if self._must_stop(number, notice is not None and notice.received, problem):
        break
    if profile is not None and profile.is_empty:
      print('profile is empty: the run ended with its first results', file=sys.stderr)

  def _must_stop(self, number: int, is_told: bool, problem: str | None) -> bool:
    """Whether to stop after a chunk, since one of the processes was told to; those of a mesh come to the same answer.

    Raises:
      OSError: the problem that any process of a mesh has.
    """
    if self.group is None:
      return False
    if not self.together:
      if is_told:
        self.group.tell(_PREEMPTION)
      return is_told or self.group.told(_PREEMPTION) > 0
    names = (f'chunk {number}', f'chunk {number - 1}' if number else None)
    said = self.group.exchange(names[0], [is_told, problem], replaces=names[1])
    for _, problem in said:
      if problem is not None:
        self.group.leave()
        raise OSError(problem)
    return any(is_told for is_told, _ in said)

  def _writer(self, stack: contextlib.ExitStack) -> Callable[[list[Result]], None]:
    """What takes results to where they shall go, their traces first: a record says that all of it is done."""
    target, traces, reports = (self.options[name] for name in ('output', 'trace', 'report'))
    if target is None:
      write = _TextWriter(self.prompts).write
    elif target == '-':
      write = output.print_records
    elif self.part is not None:
      stack.callback(self.part.close)
      write = self.part.write
    else:
      write = stack.enter_context(output.RecordFile(Path(target))).write
    if (traces is None and reports is None) or (self.together and self.group.index):
      return write

    def write_with_traces(results):
      # A refused record has no trace.
      for result in (result for result in results if result.trace is not None):
        arrays = output.trace_arrays(result, self.settings, self.tokenizer)
        stem = file_stem(result.id, result.index)
        if traces is not None:
          output.write_trace(Path(traces), stem, arrays, resume=self.part is not None)
        # A row whose first step failed has nothing to show.
        if reports is not None and result.steps:
          write_report(make_recording(arrays, stem), Path(reports) / stem)
      write(results)

    return write_with_traces

  def _progress(self, is_file: bool) -> Progress:
    options, part = self.options, self.part
    shown = is_file and not options['watch']
    if part is not None:
      process = self.group.index
      title = 'decode' if part.n_parts == 1 else f'decode part 0 of {part.n_parts}'
      path = open_path(options['output']) / f'metrics-{process:05d}.jsonl'
      shown &= process == 0
      return Progress(total=part.total, finished=len(part.finished), title=title if shown else None, path=path)
    return Progress(total=self.n_records, title='decode' if shown else None)

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
    elif self.part is not None and self.part.errors:
      text = f'{self.part.errors} of {self.part.total} records are errors, see {self.part.path}'
      console.print(text, soft_wrap=True)
    elif summary.errors:
      where = f', see {options["output"]}' if options['output'] not in (None, '-') else ''
      console.print(f'{summary.errors} of {summary.records} records are errors{where}', soft_wrap=True)
    if not options['stats']:
      return
    console.print(summary.table(timing))
    console.print(f'end tokens: {", ".join(map(str, self.end_ids))}', style='dim')
    if caution := self.settings.methods.caution:
      console.print(f'note: {caution}', soft_wrap=True)
    if options['output'] not in (None, '-') and self.part is None:
      known = {**facts(), 'dtype': options['dtype'], 'batch_size': options['batch_size']}
      content = report(summary, timing, self.settings, self.tokenizer, known)
      with output.stats_file(options['output']).open('x', encoding='utf-8') as file:
        file.write(json.dumps(content, indent=2, ensure_ascii=False) + '\n')


def _among_others(chunks: Iterator[list[Result]]) -> Iterator[list[Result]]:
  """Passes chunks on; raises OSError if the processes of a mesh lose each other, which JAX says in several ways."""
  try:
    yield from chunks
  except (jax.errors.JaxRuntimeError, ValueError) as error:
    raise OSError(f'another process has ended or cannot be reached: {str(error).splitlines()[0]}') from error


def prepare(options: Mapping[str, Any], settings: Settings, example: str | None) -> Job:
  """Loads the checkpoint and checks what depends on it.

  Args:
    options: the flags that are no settings, by name, checked.
    settings: the run's settings.
    example: the prompt where the options name none.

  Raises:
    ValueError, OSError: a checkpoint, a mesh, a prompt or an input that is wrong.
  """
  n_records = None
  # A job has looked at its input already, and a pipe can be read once.
  if not is_folder(options['output']) and options['input'] not in (None, '-') and os.path.isfile(options['input']):
    n_records = scan_input(open_path(options['input']))['records']
    if not n_records:
      raise ValueError(f'input {options["input"]} has no records')
  mesh = None if options['mesh'] is None else make_mesh(options['mesh'])
  model, params, tokenizer = checkpoint.load(options['checkpoint'], dtype=options['dtype'], mesh=mesh)
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
    n_records=n_records,
    mesh=mesh,
    end_ids=model.end_ids,
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

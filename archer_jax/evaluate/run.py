"""One evaluation, from what the command line asks for to its exit code."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import json
from pathlib import Path
import sys
from typing import Any

from tqdm import tqdm

from archer_jax.calibration import file as calibration
from archer_jax.checkpoints import checkpoint
from archer_jax.checkpoints.spelling import check_spelling
from archer_jax.checkpoints.text import Tokenizer
from archer_jax.checkpoints.text import load_tokenizer
from archer_jax.engine.engine import Timing
from archer_jax.evaluate import table
from archer_jax.evaluate.compare import Plan
from archer_jax.evaluate.compare import plan
from archer_jax.evaluate.compare import play
from archer_jax.evaluate.figure import draw_figure
from archer_jax.evaluate.record import base_of
from archer_jax.evaluate.record import records
from archer_jax.evaluate.setting import DEFAULT_N
from archer_jax.evaluate.setting import Command
from archer_jax.tasks.sources import GENERATED
from archer_jax.tasks.sources import Source
from archer_jax.tasks.sources import open_source


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
  """An evaluation of which everything was looked at that can be wrong before anything is decoded; made by `prepare`.

  Attributes:
    options: the flags that are no settings, by name.
    plans: of every task.
    params: the model's parameters.
    tokenizer: the checkpoint's.
    facts: what else the figures depend on; stands in every record.
  """

  options: Mapping[str, Any]
  plans: Sequence[Plan]
  params: dict
  tokenizer: Tokenizer
  facts: Mapping[str, Any]

  def run(self) -> int:
    """Decodes, and writes and prints what is finished, after an interrupt too; returns the exit code."""
    console, timing, told = table.terminal(), Timing(), []
    base = base_of(self.plans[0].settings)
    # A log wants a line now and then, a terminal a bar that moves.
    pace = 0.1 if sys.stderr.isatty() else 30
    total = sum(len(plan.problems) * len(plan.settings) for plan in self.plans)
    try:
      with tqdm(total=total, unit='answer', desc='evaluate', mininterval=pace) as bar:
        for plan in self.plans:
          bar.set_description(plan.source.name)
          rounds = []
          try:
            for trials in play(plan, self.params, self.tokenizer, timing=timing, progress=bar.update):
              rounds.append(trials)
          finally:
            if rounds:
              mine = [{**record, 'run': self.facts} for record in records(plan, rounds)]
              told += mine
              with tqdm.external_write_mode(sys.stdout):
                table.print_task(console, mine)
              self._write(told, base)
    finally:
      if told:
        table.print_legend(console, base)
    print(f'{len(timing.programs)} programs compiled in {timing.compile_seconds:.0f} s', file=sys.stderr)
    if errors := sum(record['errors'] for record in told):
      print(
        f"{errors} answers are errors: their logits were not finite; check the checkpoint's weights", file=sys.stderr
      )
    return 1 if errors else 0

  def _write(self, told: Sequence[Mapping[str, Any]], base: str | None) -> None:
    """Writes what is known so far; a file is replaced as a whole, so that it is never half of one."""
    if self.options['json'] is not None:
      file = Path(self.options['json'])
      part = file.with_name(f'{file.name}.part')
      part.write_text(json.dumps(told, indent=1, ensure_ascii=False, allow_nan=False) + '\n', encoding='utf-8')
      part.replace(file)
    if self.options['figure'] is not None:
      draw_figure(Path(self.options['figure']), told, base)


def prepare(command: Command, dtype: str, facts: Callable[[], Mapping[str, Any]]) -> Evaluation:
  """Opens the tasks, checks them against the checkpoint, and loads it.

  Args:
    command: from the command line.
    dtype: of parameters and matmuls.
    facts: tells versions and devices.

  Raises:
    ValueError, OSError: what is wrong, in one sentence.
  """
  options = command.options
  plans, tokenizer = prepare_tasks(command, dtype)
  _, params, _ = checkpoint.load(options['checkpoint'], dtype=dtype)
  known = {
    'checkpoint': checkpoint_name(options['checkpoint']),
    'dtype': dtype,
    'worked_examples': options['worked_examples'],
    'extract': options['extract'],
    **facts(),
  }
  return Evaluation(options=options, plans=plans, params=params, tokenizer=tokenizer, facts=known)


def checkpoint_name(path: str | None) -> str:
  """What records call a checkpoint."""
  return 'bundled' if path is None else Path(path).name


def prepare_tasks(
  command: Command, dtype: str, gen_length: Callable[[Source], int | None] = lambda source: source.gen_length
) -> tuple[list[Plan], Tokenizer]:
  """Opens the tasks and checks them against the checkpoint, whose parameters are not loaded.

  Args:
    command: from a command line.
    dtype: of parameters and matmuls.
    gen_length: tokens of a task's answers, in one block, where no flag says it; None if the task does not know.

  Returns:
    A plan for each task, and the checkpoint's tokenizer.

  Raises:
    ValueError, OSError: what is wrong, in one sentence.
  """
  path = command.options['checkpoint']
  folder = checkpoint.BUNDLED if path is None else Path(path)
  tokenizer = load_tokenizer(folder / 'tokenizer', command.manifest.config, command.manifest.end_ids)
  if tokenizer is None:
    raise ValueError(f'checkpoint {folder} must have a tokenizer, since tasks are texts')
  sources = [dataclasses.replace(source, gen_length=gen_length(source)) for source in _open_sources(command, tokenizer)]
  return [_plan(command, source, tokenizer, dtype) for source in sources], tokenizer


def _open_sources(command: Command, tokenizer: Tokenizer) -> list[Source]:
  options = command.options
  specs = [spec.strip() for spec in options['tasks'].split(',')]
  if twice := [spec for index, spec in enumerate(specs) if spec in specs[:index]]:
    raise ValueError(f'tasks must name a task once, got {twice[0]} twice')
  read = [spec for spec in specs if spec.startswith('jsonl:')]
  chat = command.base.get('chat', command.manifest.defaults.get('chat', False))
  if chat and tokenizer.hf.chat_template is None:
    raise ValueError('chat must not be given: the checkpoint has no chat template')
  if not read and 'chat' in command.base:
    raise ValueError('chat must not be given without a task of jsonl: the other tasks say themselves what they are')
  if not read and options['extract'] != 'exact':
    raise ValueError(f'extract must not be given without a task of jsonl, got {options["extract"]}')
  return [
    open_source(
      spec, worked_examples=options['worked_examples'], extract=options['extract'], chat=chat, tokenizer=tokenizer
    )
    for spec in specs
  ]


def _plan(command: Command, source: Source, tokenizer: Tokenizer, dtype: str) -> Plan:
  """Draws a task's problems and makes its requests."""
  n = command.options['n']
  problems = source.problems(DEFAULT_N if n is None and source.name in GENERATED else n, command.base.get('seed', 0))
  try:
    check_spelling(tokenizer, (text for problem in problems for text in (problem.prompt, problem.answer)))
  except ValueError as error:
    raise ValueError(f'{source.name}: {error}') from error
  try:
    source.is_solved(problems[0], problems[0].answer)
  except RuntimeError as error:
    # Such as a sandbox that this system does not grant.
    raise ValueError(f'{source.name} cannot be graded: {error}') from error
  # One block, whatever the checkpoint recommends for the task that it recommends settings for.
  known = {} if source.gen_length is None else dict.fromkeys(('gen_length', 'block_length'), source.gen_length)
  settings = dataclasses.replace(command, base={**command.base, 'chat': source.chat}).complete(known)
  calibrated = lambda setting: calibration.calibrated(setting, command.options['checkpoint'], command.manifest, dtype)
  settings = {label: calibrated(setting) for label, setting in settings.items()}
  length = min(setting.knobs['gen_length'] for setting in settings.values())
  answers = [len(tokenizer.encode(problem.answer)) for problem in problems]
  if longer := sum(answer > length for answer in answers):
    print(
      f'note: {source.name}: {longer} of {len(answers)} reference answers have more than gen_length={length} tokens, '
      f'up to {max(answers)}',
      file=sys.stderr,
    )
  return plan(source, problems, settings, tokenizer, command.options['batch_size'])

"""Decodes the same problems with every setting, in turns, and keeps what each batch took.

A *round* is one batch of problems decoded with every setting. The order rotates from round to round, so that a machine
that slows down, or a cache that the setting before has filled, favours none. Before the first round every program is
compiled and every setting decodes a batch; that and grading are in no time.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import itertools
from typing import Any

from archer_jax.checkpoints.text import Tokenizer
from archer_jax.engine.batching import PROMPT_LENGTHS
from archer_jax.engine.batching import bucket
from archer_jax.engine.engine import Setup
from archer_jax.engine.engine import Timing
from archer_jax.engine.generate import decode_requests
from archer_jax.engine.requests import Request
from archer_jax.engine.requests import make_request
from archer_jax.engine.results import Result
from archer_jax.engine.settings import Settings
from archer_jax.evaluate.work import Counter
from archer_jax.tasks import Problem
from archer_jax.tasks.grading import grade
from archer_jax.tasks.sources import Source


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
  """One batch of problems with one setting.

  Attributes:
    results: one per problem, in order.
    solved: whether each is right.
    also: the same by the further graders of the task, by their names.
    seconds: of decoding, with neither compiling nor grading.
    operations: of the matrix products that the batch took.
    kept_bytes: of what the reuse method keeps for one problem.
  """

  results: Sequence[Result]
  solved: Sequence[bool]
  also: Mapping[str, Sequence[bool]]
  seconds: float
  operations: int
  kept_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """One task, with everything looked at that can be wrong before it is decoded; made by `plan`.

  Attributes:
    source: where the problems come from.
    problems: all of them.
    settings: by label.
    requests: of every setting, one per problem.
    batch_size: problems of a round.
  """

  source: Source
  problems: Sequence[Problem]
  settings: Mapping[str, Settings]
  requests: Mapping[str, Sequence[Request]]
  batch_size: int


def plan(
  source: Source,
  problems: Sequence[Problem],
  settings: Mapping[str, Settings],
  tokenizer: Tokenizer,
  batch_size: int,
) -> Plan:
  """Makes the requests of a task.

  Raises:
    ValueError: a problem that the model cannot read, naming it.
  """
  requests = {}
  for label, setting in settings.items():
    requests[label] = []
    for index, problem in enumerate(problems):
      try:
        requests[label].append(make_request({'prompt': problem.prompt}, index, setting, tokenizer))
      except ValueError as error:
        raise ValueError(f'{source.name}: problem {index}: {error}') from error
  return Plan(source=source, problems=problems, settings=settings, requests=requests, batch_size=batch_size)


def play(
  plan: Plan, params: dict, tokenizer: Tokenizer, *, timing: Timing, progress: Callable[[int], Any] = lambda n: None
) -> Iterator[dict[str, Trial]]:
  """Decodes and grades a task round by round.

  Args:
    plan: of the task.
    params: the model's parameters.
    tokenizer: the checkpoint's.
    timing: of the whole evaluation; knows which programs have run already.
    progress: is told the number of problems whenever a batch is decoded.

  Yields:
    A trial for each setting, by label, in the order of the plan.
  """
  counter = Counter()
  setups = {
    label: Setup(params=params, tokenizer=tokenizer, settings=setting, decode=counter.decode)
    for label, setting in plan.settings.items()
  }
  decode = lambda label, requests: decode_requests(setups[label], requests, batch_size=plan.batch_size, timing=timing)
  _warm_up(plan, setups, decode, timing)
  counter.take()
  streams = {label: decode(label, requests) for label, requests in plan.requests.items()}
  labels = tuple(streams)
  verdicts = {}
  # Of an answer that is an error there are none.
  wrong = (False,) * (1 + len(plan.source.also))
  verdicts_of = lambda result: verdicts[result.index, result.text] if result.error is None else wrong
  for number in range(-(-len(plan.problems) // plan.batch_size)):
    first = number % len(labels)
    measured = {}
    for label in labels[first:] + labels[:first]:
      before = timing.decode_seconds
      results = next(streams[label])
      measured[label] = (results, timing.decode_seconds - before, counter.take())
      progress(len(results))
    told = [result for results, _, _ in measured.values() for result in results if result.error is None]
    # Equal answers of several settings are looked at once, since a grader may run programs.
    new = [key for key in dict.fromkeys((result.index, result.text) for result in told) if key not in verdicts]
    answers = [(plan.problems[index], text) for index, text in new]
    verdicts.update(zip(new, grade(plan.source, answers), strict=True))
    yield {
      label: Trial(
        results=results,
        solved=[verdicts_of(result)[0] for result in results],
        also={name: [verdicts_of(result)[at] for result in results] for at, name in enumerate(plan.source.also, 1)},
        seconds=seconds,
        operations=operations,
        kept_bytes=_kept_bytes(setups[label], plan.requests[label][results[0].index :][: len(results)]),
      )
      for label in labels
      for results, seconds, operations in [measured[label]]
    }


def _kept_bytes(setup: Setup, batch: Sequence[Request]) -> int:
  cfg = setup.config(batch)
  return cfg.reuse_method.kept_bytes(1, bucket('prompt', max(len(r.prompt_ids) for r in batch), PROMPT_LENGTHS), cfg)


def _warm_up(plan: Plan, setups: Mapping[str, Setup], decode, timing: Timing) -> None:
  """Decodes the first batch with every setting, and every other batch whose program has not run yet.

  Settings share programs, but not what these execute.
  """
  n_rows = min(plan.batch_size, len(plan.problems))
  for label, requests in plan.requests.items():
    for start in range(0, len(requests), plan.batch_size):
      batch = requests[start : start + plan.batch_size]
      cfg = setups[label].config(batch)
      length = bucket('prompt', max(len(request.prompt_ids) for request in batch), PROMPT_LENGTHS)
      if start == 0 or (cfg, (n_rows, length)) not in timing.programs:
        # A short last batch is filled up, or it would be another program.
        for _ in decode(label, itertools.islice(itertools.cycle(batch), n_rows)):
          pass

"""What all tables measure with: the tasks' batches as states, timed decodings, and graded answers.

Axes: B batch, G canvas.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh
import numpy as np
from timing import timed

from archer_jax.checkpoints.text import Tokenizer
from archer_jax.config import DecodeConfig
from archer_jax.engine.batching import batch_state
from archer_jax.engine.batching import row_seed
from archer_jax.engine.engine import Setup
from archer_jax.engine.requests import Request
from archer_jax.engine.results import Result
from archer_jax.engine.results import make_result
from archer_jax.engine.settings import Settings
from archer_jax.evaluate import work
from archer_jax.evaluate.compare import Plan
from archer_jax.sharding import state_shardings
from archer_jax.tasks.grading import grade
from archer_jax.types import DecodeState
from paper.pieces import Piece

# What a result is made from.
_RESULT_FIELDS = ('canvas', 'seed', 'status', 'counters', 'logprobs', 'trace')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
  """Requests before their first step.

  Attributes:
    requests: as many as there are; filler rows stand behind them.
    cfg: of the program.
    state: B rows.
  """

  requests: Sequence[Request]
  cfg: DecodeConfig
  state: DecodeState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
  """A checkpoint, its tasks, and what was run so far.

  Attributes:
    plans: of the tasks, with the settings of all tables.
    params: the model's parameters.
    tokenizer: the checkpoint's.
    k: the radius of Archer where no table sweeps it; None for the decoder's default.
    mesh: where the parameters are, if that is more than one device.
  """

  plans: Sequence[Plan]
  params: dict
  tokenizer: Tokenizer
  k: int | None
  mesh: Mesh | None = None
  _verdicts: dict[tuple[str, int, str], tuple[bool, ...]] = dataclasses.field(default_factory=dict)
  _programs: set[Any] = dataclasses.field(default_factory=set)

  def plan(self, task: str | None) -> Plan:
    return next(plan for plan in self.plans if plan.source.name == task)

  def batches(self, table: str, decodings: int) -> list[Piece]:
    """A piece for every batch of every task, of so many decodings."""
    pieces = []
    for plan in self.plans:
      size, total = plan.batch_size, len(plan.problems)
      for number, start in enumerate(range(0, total, size)):
        units = decodings * min(size, total - start)
        pieces.append(Piece(table=table, task=plan.source.name, part=number, units=units))
    return pieces

  def start(
    self, plan: Plan, label: str, number: int, change: Callable[[DecodeConfig], DecodeConfig] = lambda cfg: cfg
  ) -> Batch:
    """A batch of a task under one of its settings; `change` makes another program of the same requests."""
    first = number * plan.batch_size
    requests = plan.requests[label][first : first + plan.batch_size]
    return self.start_requests(requests, plan.settings[label], plan.batch_size, change)

  def start_requests(
    self,
    requests: Sequence[Request],
    settings: Settings,
    n_rows: int,
    change: Callable[[DecodeConfig], DecodeConfig] = lambda cfg: cfg,
  ) -> Batch:
    """Any requests as a batch."""
    setup = Setup(params=self.params, tokenizer=self.tokenizer, settings=settings)
    cfg = change(setup.config(requests))
    seeds = [row_seed(settings.seed, request.index) for request in requests]
    state = batch_state(requests, seeds, n_rows, cfg=cfg)
    # Bound to its devices from the start, or the first step would be a program of its own.
    place = jax.tree.leaves(self.params)[0].sharding if self.mesh is None else state_shardings(cfg, self.mesh)
    return Batch(requests=requests, cfg=cfg, state=jax.device_put(state, place))

  def results(self, task: str, batch: Batch, state: DecodeState) -> list[Result]:
    """What became of the requests.

    Raises:
      ValueError: logits that are no numbers; nothing that is told of such a model would be true.
    """
    host = jax.device_get({name: getattr(state, name) for name in _RESULT_FIELDS})
    results = [make_result(r, row, host, self.tokenizer, batch.cfg) for row, r in enumerate(batch.requests)]
    for result in results:
      if result.error is not None:
        raise ValueError(f'{task}: problem {result.index}: {result.error}')
    return results

  def verdicts(self, plan: Plan, results: Sequence[Result]) -> list[tuple[bool, ...]]:
    """Grades answers, by the task's grader and its further ones; equal texts once, since a grader may run programs."""
    key = lambda result: (plan.source.name, result.index, result.text)
    new = list({key(result): result for result in results if key(result) not in self._verdicts}.values())
    graded = grade(plan.source, [(plan.problems[result.index], result.text) for result in new])
    self._verdicts.update(zip(map(key, new), graded, strict=True))
    return [self._verdicts[key(result)] for result in results]

  def decode(self, plan: Plan, label: str, number: int) -> dict[str, Any]:
    """Decodes and grades a batch; the time is that of the decoding alone.

    Returns:
      `seconds` and `operations` of the batch, and what `told` keeps of each problem.
    """
    batch = self.start(plan, label, number)
    program = (label, batch.cfg, batch.state.prompt_tokens.shape)
    if program not in self._programs:
      # Compiles, and has run everything once.
      jax.block_until_ready(work.counted_decode(self.params, batch.state, cfg=batch.cfg))
      self._programs.add(program)
      batch = self.start(plan, label, number)
    shape, done = batch.state.prompt_tokens.shape, {}
    jax.block_until_ready(batch.state)
    run = lambda: done.update(out=work.counted_decode(self.params, batch.state, cfg=batch.cfg))
    seconds = timed(lambda: (run(), jax.block_until_ready(done['out'])))
    state, passes = done['out']
    operations = work.total(jax.device_get(passes), work.pass_operations(batch.cfg, *shape))
    return {
      'seconds': seconds,
      'operations': operations,
      **self.told(plan, self.results(plan.source.name, batch, state)),
    }

  def told(self, plan: Plan, results: Sequence[Result]) -> dict[str, list[Any]]:
    """What is kept of results, a value for each problem; the verdicts of a further grader as `solved_NAME`."""
    scores = ('solved', *(f'solved_{name}' for name in plan.source.also))
    verdicts = self.verdicts(plan, results)
    names = ('steps', 'refreshes', 'remasked', 'generated_tokens', 'prompt_tokens')
    return {
      **{name: [verdict[place] for verdict in verdicts] for place, name in enumerate(scores)},
      **{name: [getattr(result, name) for result in results] for name in names},
    }


def joined(values: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
  """A field of every batch, one behind another."""
  return np.concatenate([np.atleast_1d(np.asarray(value[name])) for value in values])


def in_turns(labels: Sequence[str], number: int) -> list[str]:
  """The settings in the order of a batch, which rotates so that none always comes first."""
  first = number % len(labels)
  return [*labels[first:], *labels[:first]]

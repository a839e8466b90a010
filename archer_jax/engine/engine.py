"""Requests in, results out, through the slots of a running batch that finished rows leave and waiting ones enter.

A batch job, the command line, an evaluation or a server stand on three calls:

    engine = Engine(setup, n_slots=8)
    ticket = engine.submit(request)            # any time
    while not engine.is_idle:
      for ticket, result in engine.step():     # one chunk of steps of the batch
        ...
    engine.cancel(ticket)                      # a request that nobody waits for any more

While a chunk of steps runs on the device, the host handles the results of the chunk before, submits and reads on; it
waits for one array only, the flags of the rows that are done.

Axes: B slots, P prompt, G canvas.
"""

import collections
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import itertools
import math
import time
from typing import Any

import jax
from jax import Array
from jax.experimental import multihost_utils
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from archer_jax import specs
from archer_jax.checkpoints.text import Tokenizer
from archer_jax.config import DecodeConfig
from archer_jax.engine.batching import PROMPT_LENGTHS
from archer_jax.engine.batching import batch_config
from archer_jax.engine.batching import bucket
from archer_jax.engine.requests import Request
from archer_jax.engine.results import Result
from archer_jax.engine.results import has_stopped
from archer_jax.engine.results import make_result
from archer_jax.engine.settings import Settings
from archer_jax.loop.slots import decode_chunk
from archer_jax.loop.slots import insert_rows
from archer_jax.loop.slots import retire_rows
from archer_jax.loop.step import init_state
from archer_jax.numerics import PRNG
from archer_jax.sharding import sharded
from archer_jax.sharding import state_shardings
from archer_jax.types import DecodeState
from archer_jax.types import Knobs

# Bounds the time until a run can react to anything; rows that need more steps go on in the next chunk.
_MAX_STEPS = 64
# Over several shards a chunk lasts as long as that of the last shard, for which the others wait. What ends all of them
# alike is a number of steps; ending early would only leave slots without work.
_MAX_STEPS_OF_SHARDS = 8
# How many batches of later requests may overtake one that needs another program, so that it does not wait for ever.
_PATIENCE = 64
# What a result is made from.
_RESULT_FIELDS = ('canvas', 'seed', 'status', 'counters', 'logprobs', 'trace')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
  """What decodes, and how.

  Attributes:
    params: the model's parameters.
    tokenizer: the checkpoint's, if it has one.
    settings: the run's settings.
    end_ids: end tokens beside those of the model's config and of the tokenizer.
    trace: whether results carry what was recorded of every step.
    mesh: where the parameters are, if that is more than one device.
    decode: takes a state to its end, in the place of the loop that stops for rows to leave and others to come.
    max_steps: the most steps of a chunk, by default 64 on one data shard and 8 on several.
    min_done: rows of a data shard that end its chunk when they are done; by default a sixteenth of the slots if there
      is one shard, and all of a shard's if there are several.
  """

  params: dict
  tokenizer: Tokenizer | None
  settings: Settings
  end_ids: tuple[int, ...] = ()
  trace: bool = False
  mesh: Mesh | None = None
  decode: Callable[..., DecodeState] | None = None
  max_steps: int | None = None
  min_done: int | None = None

  @property
  def shards(self) -> int:
    return 1 if self.mesh is None else self.mesh.shape['data']

  def config(self, requests: Sequence[Request]) -> DecodeConfig:
    """The config of the program that decodes these requests."""
    return batch_config(
      requests,
      self.settings,
      dtype=str(self.params['embedding'].dtype),
      trace=self.trace,
      end_ids=self.all_end_ids,
      unknown_ids=() if self.tokenizer is None else self.tokenizer.unknown_ids,
    )

  @property
  def all_end_ids(self) -> tuple[int, ...]:
    """Every token that ends an answer."""
    known = (self.settings.model.eos_id,) if self.tokenizer is None else self.tokenizer.end_ids
    return tuple(dict.fromkeys((*known, *self.end_ids)))


@dataclasses.dataclass
class Timing:
  """Where the time of a run went.

  Attributes:
    programs: what was compiled, by config and shape.
    compile_seconds: tracing and compiling, or fetching what was compiled before.
    decode_seconds: running, with what the host did meanwhile.
  """

  programs: set[tuple[DecodeConfig, tuple[int, ...]]] = dataclasses.field(default_factory=set)
  compile_seconds: float = 0.0
  decode_seconds: float = 0.0


class Engine:
  """Decodes what is submitted; no result depends on what else is.

  Args:
    setup: what decodes.
    n_slots: B, rows decoded together; a multiple of the data shards.
    timing: is told how long compiling and running took.
  """

  def __init__(self, setup: Setup, *, n_slots: int, timing: Timing | None = None):
    self._setup, self._n_slots, self._timing = setup, n_slots, timing or Timing()
    self._tickets = itertools.count()
    # Waiting requests with their tickets, the oldest first, by what they need of a program: numbers of which any larger
    # ones serve as well.
    self._waiting: dict[tuple[int, ...], collections.deque[tuple[int, Request]]] = {}
    self._batch: _Batch | None = None
    self._shapes: Sequence[tuple[int, ...]] = ()
    self._shape_of_knobs = functools.lru_cache(maxsize=1024)(self._of_knobs)

  @property
  def is_idle(self) -> bool:
    """Whether nothing waits and nothing runs."""
    return self._batch is None and not self._waiting

  def submit(self, request: Request) -> int:
    """Lets a request wait for a slot; returns its ticket, larger than all before."""
    ticket = next(self._tickets)
    self._waiting.setdefault(self._shape(request), collections.deque()).append((ticket, request))
    return ticket

  def cancel(self, ticket: int) -> bool:
    """Gives a request up, whether it waits or runs; returns whether it did either. No result of it will come."""
    for shape, queue in self._waiting.items():
      for entry in queue:
        if entry[0] == ticket:
          queue.remove(entry)
          if not queue:
            del self._waiting[shape]
          return True
    return self._batch is not None and self._batch.cancel(ticket)

  def step(self) -> list[tuple[int, Result]]:
    """Waits for one chunk of steps of the batch, and starts the next one.

    Returns:
      The results that the chunk finished, with their tickets; none if there is nothing to do.
    """
    if self._batch is None:
      if not self._waiting:
        return []
      self._shapes = self._next_shapes()
      requests = [request for shape in self._shapes for _, request in self._waiting[shape]]
      length = bucket('prompt', max(len(request.prompt_ids) for request in requests), PROMPT_LENGTHS)
      cfg = self._setup.config(requests)
      self._batch = _Batch(self._setup, cfg, self._n_slots, length, self._timing, self._take)
    finished = self._batch.advance(self._take)
    cfg = self._batch.cfg
    if self._batch.is_empty:
      self._batch = None
    return [
      (ticket, make_result(request, row, host, self._setup.tokenizer, cfg)) for ticket, request, row, host in finished
    ]

  def _shape(self, request: Request) -> tuple[int, ...]:
    prompt_length = bucket('prompt', len(request.prompt_ids), PROMPT_LENGTHS)
    return (*self._shape_of_knobs(tuple(request.knobs.items())), prompt_length)

  def _of_knobs(self, knobs: tuple[tuple[str, float | int], ...]) -> tuple[int, ...]:
    # Most requests have the same knobs, and the steps of a trace take a while to count.
    cfg = self._setup.config([Request(index=0, id=0, prompt_ids=(), seed=0, knobs=dict(knobs))])
    return cfg.canvas_length, int(cfg.guidance), cfg.trace_steps

  def _next_shapes(self) -> list[tuple[int, ...]]:
    """Shapes of the requests to decode next with one program: those of the oldest one, and of others beside it.

    Requests of a shape that would not fill the slots go with those of the next larger shape, and so on.
    """
    shapes, count = [], 0
    oldest = min(self._waiting, key=self._age)
    for shape in sorted(self._waiting):
      shapes.append(shape)
      count += len(self._waiting[shape])
      if count >= self._n_slots:
        if oldest in shapes:
          break
        shapes, count = [], 0
    return shapes

  def _take(self, n: int) -> list[tuple[int, Request]]:
    """The oldest `n` requests that the batch can decode, with their tickets; fewer if no more are there."""
    taken = []
    others = [self._age(shape) for shape in self._waiting if shape not in self._shapes]
    last = min(others, default=math.inf) + _PATIENCE * self._n_slots
    while len(taken) < n and (ready := [shape for shape in self._shapes if shape in self._waiting]):
      shape = min(ready, key=self._age)
      if self._age(shape) > last:
        break
      taken.append(self._waiting[shape].popleft())
      if not self._waiting[shape]:
        del self._waiting[shape]
    return taken

  def _age(self, shape: tuple[int, ...]) -> int:
    return self._waiting[shape][0][0]


_Take = Callable[[int], list[tuple[int, Request]]]


class _Batch:
  """The slots of one program, with a chunk of steps always under way.

  Attributes:
    cfg: of the program.
    is_empty: whether no row is in any slot.
  """

  def __init__(self, setup: Setup, cfg: DecodeConfig, n_slots: int, prompt_length: int, timing: Timing, take: _Take):
    self.cfg, self._setup, self._timing = cfg, setup, timing
    self._n_slots, self._prompt_length = n_slots, prompt_length
    shards = setup.shards
    max_steps, min_done = setup.max_steps, setup.min_done
    if max_steps is None:
      max_steps = _MAX_STEPS if shards == 1 else _MAX_STEPS_OF_SHARDS
    if min_done is None:
      # A chunk costs the host about a millisecond. Unless a step takes less than five, waiting for more costs more.
      min_done = max(1, n_slots // 16) if shards == 1 else n_slots // shards
    self._pace = np.int32(max_steps), np.int32(min_done)
    self._exchange = _exchange_program(cfg, setup.mesh)
    begin = time.perf_counter()
    place = setup.mesh or jax.tree.leaves(setup.params)[0].sharding
    self._state = _blank(cfg, n_slots, prompt_length, place)
    self._owners: dict[int, tuple[int, Request]] = {}
    self._given_up: set[int] = set()
    self._move([], take)
    self._clock = time.perf_counter()
    self._start()
    program = (cfg, (n_slots, prompt_length))
    if program not in timing.programs:
      # A jitted call comes back once it is compiled and under way.
      timing.programs.add(program)
      self._clock = time.perf_counter()
      timing.compile_seconds += self._clock - begin

  @property
  def is_empty(self) -> bool:
    return not self._owners

  def cancel(self, ticket: int) -> bool:
    """Gives up the row of a ticket, if it is in a slot; the slot is free after the chunk that is under way."""
    if ticket not in [owner for owner, _ in self._owners.values()] or ticket in self._given_up:
      return False
    self._given_up.add(ticket)
    return True

  def advance(self, take: _Take) -> list[tuple[int, Request, int, Mapping[str, Any]]]:
    """Waits for the chunk under way, lets rows out and in, and starts the next chunk.

    Args:
      take: gives the next requests with their tickets, at most as many as it is asked for.

    Returns:
      Of the requests that are finished: ticket, request, row, and those fields of the rows that make a result, on the
      host. Meanwhile the next chunk runs.
    """
    done = _wait(self._state.done)
    stopped = self._stopped(done)
    start, self._clock = self._clock, time.perf_counter()
    self._timing.decode_seconds += self._clock - start
    leaving = [
      slot for slot, (ticket, _) in self._owners.items() if done[slot] or slot in stopped or ticket in self._given_up
    ]
    finished = [self._owners.pop(slot) for slot in leaving]
    rows = self._move(leaving, take)
    self._start()
    host = jax.device_get(rows) if finished else None
    results = [
      (ticket, request, row, host) for row, (ticket, request) in enumerate(finished) if ticket not in self._given_up
    ]
    self._given_up.difference_update(ticket for ticket, _ in finished)
    return results

  def _stopped(self, done: np.ndarray) -> set[int]:
    """Slots whose rows are running and have written one of their stop strings."""
    slots = [slot for slot, (_, request) in self._owners.items() if request.stop and not done[slot]]
    if not slots or self._setup.decode is not None:
      return set()
    canvas, block = _wait(self._state.canvas), _wait(self._state.block)
    ends = lambda slot: has_stopped(
      self._owners[slot][1], canvas[slot], int(block[slot]), self._setup.tokenizer, self.cfg
    )
    return {slot for slot in slots if ends(slot)}

  def _move(self, leaving: Sequence[int], take: _Take) -> dict[str, Any] | None:
    """Rows out of their slots and new ones into all that are free; returns what the host needs of those that left."""
    free = [slot for slot in range(self._n_slots) if slot not in self._owners]
    coming = take(len(free))
    if not leaving and not coming:
      return None
    arrivals = _arrivals([request for _, request in coming], self._n_slots, self._prompt_length, self.cfg)
    slots = _padded(leaving, self._n_slots), _padded(free, self._n_slots)
    self._state, rows = self._exchange(self._state, *slots, arrivals, np.uint32(self._setup.settings.seed))
    self._owners |= zip(free, coming, strict=False)
    return rows

  def _start(self) -> None:
    if not self._owners:
      return
    params, mesh = self._setup.params, self._setup.mesh
    if self._setup.decode is not None:
      self._state = self._setup.decode(params, self._state, cfg=self.cfg)
    else:
      chunk = decode_chunk if mesh is None else sharded(decode_chunk, mesh)
      max_steps, min_done = self._pace
      if any(request.stop for _, request in self._owners.values()):
        # Texts are read between chunks. A row must not go on until others let its chunk end, or its counters and what
        # stands behind its stop string would depend on them.
        max_steps = np.int32(1)
      self._state = chunk(params, self._state, max_steps, min_done, cfg=self.cfg)


def _wait(flags: Array) -> np.ndarray:
  """The flags, or any array of the state, on the host, once the chunk that computes them is through."""
  start = time.perf_counter()
  # Waiting in slices lets a keyboard interrupt through, which a wait inside XLA would hold up to the chunk's end. A
  # slice is a hundredth of the wait so far, so that a chunk of milliseconds takes little longer than that.
  while not flags.is_ready():
    time.sleep(min(0.002, (time.perf_counter() - start) / 100))
  if flags.is_fully_addressable:
    return jax.device_get(flags)
  # All processes of the mesh need all flags, to decide alike.
  return multihost_utils.process_allgather(flags, tiled=True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Arrivals:
  """Rows that take slots, on the host."""

  prompt_tokens: np.ndarray  # int32 [B, P]
  prompt_valid: np.ndarray  # bool [B, P]
  knobs: Knobs
  index: np.ndarray  # uint32 [B], in the input
  seed: np.ndarray  # uint32 [B], the request's own
  has_seed: np.ndarray  # bool [B]


def _arrivals(requests: Sequence[Request], n_slots: int, prompt_length: int, cfg: DecodeConfig) -> _Arrivals:
  """The rows of requests, and filler behind them."""
  tokens = np.zeros((n_slots, prompt_length), np.int32)
  valid = np.zeros(tokens.shape, bool)
  for row, request in enumerate(requests):
    start = prompt_length - len(request.prompt_ids)
    tokens[row, start:], valid[row, start:] = request.prompt_ids, True
  n_filler = n_slots - len(requests)
  filler = {name: 1 if knob.default is None else knob.default for name, knob in specs.knobs().items()}
  knobs = [request.knobs for request in requests] + [filler | {'gen_length': 0}] * n_filler
  # Not `Knobs.stack`, which makes every array on the device by itself while that could be running the next chunk.
  column = lambda name, knob: np.array([row[name] for row in knobs], np.int32 if knob.integer else np.float32)
  return _Arrivals(
    prompt_tokens=tokens,
    prompt_valid=valid,
    knobs=Knobs(**{name: column(name, knob) for name, knob in specs.knobs().items()}),
    index=np.array([request.index for request in requests] + [0] * n_filler, np.uint32),
    seed=np.array([request.seed or 0 for request in requests] + [0] * n_filler, np.uint32),
    has_seed=np.array([request.seed is not None for request in requests] + [False] * n_filler),
  )


def _padded(slots: Sequence[int], n_slots: int) -> np.ndarray:
  """int32 [B]: the slots, and behind them a number that is none."""
  return np.array([*slots, *[n_slots] * (n_slots - len(slots))], np.int32)


def _blank(cfg: DecodeConfig, n_slots: int, prompt_length: int, place: Any) -> DecodeState:
  """A state of the right shapes in which nothing stands yet, not even that its rows are free.

  Args:
    cfg: the program's config.
    n_slots: B.
    prompt_length: P.
    place: the sharding of the parameters if that is one device, or the mesh.
  """

  def make():
    tokens = jnp.zeros((n_slots, prompt_length), jnp.int32)
    knobs = Knobs.make(n_slots, gen_length=0)
    return init_state(tokens, tokens.astype(bool), knobs, jnp.zeros((n_slots,), jnp.uint32), cfg=cfg)

  abstract = jax.eval_shape(make)
  # Bound to the device of the parameters like what a step returns, since the programs would be compiled once more for a
  # state that is not.
  places = state_shardings(cfg, place) if isinstance(place, Mesh) else jax.tree.map(lambda _: place, abstract)
  return jax.tree.map(lambda x, device: jnp.zeros(x.shape, x.dtype, device=device), abstract, places)


@functools.cache
def _exchange_program(cfg: DecodeConfig, mesh: Mesh | None) -> Callable[..., tuple[DecodeState, dict[str, Any]]]:
  """`_exchange`, jitted; over a mesh the rows that leave go to all of its devices, hence to all processes."""
  places = {}
  if mesh is not None:
    everywhere, state = NamedSharding(mesh, PartitionSpec()), state_shardings(cfg, mesh)
    places = {
      'in_shardings': (state, *[everywhere] * 4),
      'out_shardings': (state, everywhere),
    }
  return jax.jit(functools.partial(_exchange, cfg=cfg), donate_argnums=0, **places)


def _exchange(
  state: DecodeState, leaving: Array, free: Array, arrivals: _Arrivals, seed: Array, *, cfg: DecodeConfig
) -> tuple[DecodeState, dict[str, Any]]:
  """Rows out, rows in; returns the state, and of the rows that left what the host needs."""
  state, left = retire_rows(state, leaving)
  # As `batching.row_seed`, which would make the host wait for the device.
  fold = lambda index: jax.random.bits(jax.random.fold_in(jax.random.key(seed, impl=PRNG), index))
  seeds = jnp.where(arrivals.has_seed, arrivals.seed, jax.vmap(fold)(arrivals.index))
  rows = init_state(arrivals.prompt_tokens, arrivals.prompt_valid, arrivals.knobs, seeds, cfg=cfg)
  return insert_rows(state, free, rows, cfg=cfg), {name: getattr(left, name) for name in _RESULT_FIELDS}

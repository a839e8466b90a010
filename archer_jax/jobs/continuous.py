"""Requests through slots: a window of what was read, and one engine per program that refills its slots from it.

While a chunk of steps runs on the device, the host hands out what the chunk before has finished and reads on; it waits
for one array only, the flags of the rows that are done.

Axes: B slots, P prompt, G canvas.
"""

import collections
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import itertools
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

from archer_jax.config import KNOBS
from archer_jax.config import DecodeConfig
from archer_jax.decode import init_state
from archer_jax.jobs.requests import Request
from archer_jax.numerics import PRNG
from archer_jax.sharding import sharded
from archer_jax.sharding import state_shardings
from archer_jax.slots import decode_chunk
from archer_jax.slots import insert_rows
from archer_jax.slots import retire_rows
from archer_jax.types import DecodeState
from archer_jax.types import Knobs

# Bounds the time until a run can react to anything; rows that need more steps go on in the next chunk.
_MAX_STEPS = 64
# Over several shards a chunk lasts as long as that of the last shard, for which the others wait. What ends all of them
# alike is a number of steps; ending early would only leave slots without work.
_MAX_STEPS_OF_SHARDS = 8
# What is read ahead where nobody waits for answers: long enough that slots find requests of their shape.
N_BATCHES = 64
# What a result is made from.
_RESULT_FIELDS = ('canvas', 'seed', 'status', 'counters', 'trace')
_FILLER = {name: spec.default for name, spec in KNOBS.items()} | {'gen_length': 0, 'steps': 1}


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


class Window:
  """Entries that were read and not given out, the requests among them sorted by what program they need.

  Args:
    entries: requests, and others that need no slot.
    batch_size: entries are read that many at a time.
    n_batches: the most that are open, in batches. With 1 nothing is read before all before it is given out.
    shape: what a request needs of a program, in numbers of which any larger ones serve as well.
    in_order: whether outcomes are given out in the order of the entries, or else as they come.

  Attributes:
    n_slots: as many as a batch has entries; fewer if the input ends before the first batch is full.
    has_ended: whether all entries were read.
  """

  def __init__(
    self,
    entries: Iterable[Any],
    *,
    batch_size: int,
    n_batches: int,
    shape: Callable[[Request], tuple[int, ...]],
    in_order: bool,
  ):
    self.n_slots = 0
    self.has_ended = False
    self._entries, self._numbers = iter(entries), itertools.count()
    self._batch_size, self._size = batch_size, n_batches * batch_size
    self._shape = shape
    self._waiting: dict[tuple[int, ...], collections.deque[tuple[int, Request]]] = {}
    # Number in the input -> outcome, None until there is one; and outcomes that wait for nothing else.
    self._open: collections.OrderedDict[int, Any] = collections.OrderedDict()
    self._ready = []
    self._in_order = in_order

  def fill(self) -> Iterator[tuple[int, Any]]:
    """Reads on as far as there is room, and yields the number and the entry of those that are no requests."""
    while not self.has_ended and len(self._open) + self._batch_size <= self._size:
      batch = list(itertools.islice(self._entries, self._batch_size))
      self.has_ended = len(batch) < self._batch_size
      requests = [entry for entry in batch if isinstance(entry, Request)]
      # Only an input that has ended leaves fewer rows than there will ever be.
      self.n_slots = self.n_slots or (len(requests) if self.has_ended else self._batch_size)
      for entry in batch:
        number = next(self._numbers)
        self._open[number] = None
        if isinstance(entry, Request):
          self._waiting.setdefault(self._shape(entry), collections.deque()).append((number, entry))
        else:
          yield number, entry

  def next_shapes(self) -> list[tuple[int, ...]]:
    """Shapes of the requests to decode next with one program: those of the oldest one, and of others beside it.

    Requests of a shape that would not fill the slots go with those of the next larger shape, and so on.
    """
    shapes, count = [], 0
    oldest = min(self._waiting, key=self._age, default=None)
    for shape in sorted(self._waiting):
      shapes.append(shape)
      count += len(self._waiting[shape])
      if count >= self.n_slots:
        if oldest in shapes:
          break
        shapes, count = [], 0
    return shapes

  def take(self, shapes: Sequence[tuple[int, ...]], n: int) -> list[tuple[int, Request]]:
    """The oldest `n` requests of these shapes, with their numbers; fewer if no more are there."""
    taken = []
    while len(taken) < n and (ready := [shape for shape in shapes if shape in self._waiting]):
      shape = min(ready, key=self._age)
      taken.append(self._waiting[shape].popleft())
      if not self._waiting[shape]:
        del self._waiting[shape]
    return taken

  def waiting(self, shapes: Sequence[tuple[int, ...]]) -> list[Request]:
    """All requests of these shapes that wait."""
    return [request for shape in shapes for _, request in self._waiting[shape]]

  def put(self, number: int, outcome: Any) -> None:
    """Notes what became of an entry."""
    if self._in_order:
      self._open[number] = outcome
    else:
      del self._open[number]
      self._ready.append(outcome)

  def release(self) -> list[Any]:
    """Outcomes whose turn it is."""
    while self._in_order and self._open and next(iter(self._open.values())) is not None:
      self._ready.append(self._open.popitem(last=False)[1])
    ready, self._ready = self._ready, []
    return ready

  def _age(self, shape: tuple[int, ...]) -> int:
    return self._waiting[shape][0][0]


def run_slots(
  params: dict,
  take: Callable[[int], list[tuple[int, Request]]],
  *,
  cfg: DecodeConfig,
  n_slots: int,
  prompt_length: int,
  seed: int,
  timing: Timing,
  chunk: Callable[..., DecodeState] | None = None,
  max_steps: int | None = None,
  min_done: int | None = None,
  mesh: Mesh | None = None,
) -> Iterator[tuple[list[tuple[int, Request]], Mapping[str, Any] | None]]:
  """Decodes requests with one program until no more are given and all are done.

  Args:
    params: the model's parameters.
    take: gives the next requests with their numbers, at most as many as it is asked for.
    cfg: the program's config.
    n_slots: B, of all data shards together.
    prompt_length: P.
    seed: of the run; from it and its index follows the seed of a request that has none.
    timing: is told how long compiling and running took.
    chunk: takes the state onward in the place of `decode_chunk`.
    max_steps: the most steps of a chunk, by default 64 on one data shard and 8 on several.
    min_done: rows of a data shard that end its chunk when they are done; by default a sixteenth of the slots if there
      is one shard, and all of a shard's if there are several.
    mesh: where the parameters are, if that is more than one device.

  Yields:
    After every chunk the requests that it finished with their numbers, and on the host those fields of their rows that
    make a result, in the same order; None where there are none. Meanwhile the next chunk runs.
  """
  shards = 1 if mesh is None else mesh.shape['data']
  if max_steps is None:
    max_steps = _MAX_STEPS if shards == 1 else _MAX_STEPS_OF_SHARDS
  if min_done is None:
    # A chunk costs the host about a millisecond. Unless a step takes less than five, waiting for more rows costs more.
    min_done = max(1, n_slots // 16) if shards == 1 else n_slots // shards
  if chunk is None:
    chunk = decode_chunk if mesh is None else sharded(decode_chunk, mesh)
  exchange = _exchange_program(cfg, mesh)
  program = (cfg, (n_slots, prompt_length))
  begin = time.perf_counter()
  state = _blank(cfg, n_slots, prompt_length, mesh or jax.tree.leaves(params)[0].sharding)
  owners: dict[int, tuple[int, Request]] = {}
  done = None
  while True:
    leaving = [] if done is None else [slot for slot in owners if done[slot]]
    finished = [owners.pop(slot) for slot in leaving]
    free = [slot for slot in range(n_slots) if slot not in owners]
    coming = take(len(free))
    if done is None or leaving or coming:
      arrivals = _arrivals([request for _, request in coming], n_slots, prompt_length, cfg)
      slots = _padded(leaving, n_slots), _padded(free, n_slots)
      state, rows = exchange(state, *slots, arrivals, np.uint32(seed))
      owners |= zip(free, coming, strict=False)
    if done is None:
      clock = time.perf_counter()
    if owners:
      state = chunk(params, state, np.int32(max_steps), np.int32(min_done), cfg=cfg)
    if program not in timing.programs:
      # A jitted call comes back once it is compiled and under way.
      timing.programs.add(program)
      clock = time.perf_counter()
      timing.compile_seconds += clock - begin
    if done is not None:
      yield finished, jax.device_get(rows) if finished else None
    if not owners:
      return
    done = _wait(state.done)
    start, clock = clock, time.perf_counter()
    timing.decode_seconds += clock - start


def _wait(flags: Array) -> np.ndarray:
  """The flags on the host, once the chunk that computes them is through."""
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
  tokens = np.full((n_slots, prompt_length), cfg.model.pad_id, np.int32)
  valid = np.zeros(tokens.shape, bool)
  for row, request in enumerate(requests):
    start = prompt_length - len(request.prompt_ids)
    tokens[row, start:], valid[row, start:] = request.prompt_ids, True
  n_filler = n_slots - len(requests)
  knobs = [request.knobs for request in requests] + [_FILLER] * n_filler
  # Not `Knobs.stack`, which makes every array on the device by itself while that could be running the next chunk.
  column = lambda name, spec: np.array([row[name] for row in knobs], np.int32 if spec.integer else np.float32)
  return _Arrivals(
    prompt_tokens=tokens,
    prompt_valid=valid,
    knobs=Knobs(**{name: column(name, spec) for name, spec in KNOBS.items()}),
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

"""From a list of prompts, or a stream of entries, to results, through the engine."""

import collections
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import itertools
from typing import Any

import jax
import numpy as np

from archer_jax.checkpoints.manifest import check_end_ids
from archer_jax.checkpoints.text import Tokenizer
from archer_jax.engine.engine import Engine
from archer_jax.engine.engine import Setup
from archer_jax.engine.engine import Timing
from archer_jax.engine.requests import Refusal
from archer_jax.engine.requests import Request
from archer_jax.engine.requests import make_request
from archer_jax.engine.results import Result
from archer_jax.engine.settings import SETTINGS
from archer_jax.engine.settings import make_settings
from archer_jax.model import Transformer

# What is read ahead where nobody waits for answers: long enough that slots find requests of their shape.
N_BATCHES = 64


def generate(
  model: Transformer,
  params: dict,
  tokenizer: Tokenizer | None,
  prompts: Iterable[str | Sequence[int] | Sequence[Mapping[str, str]] | Mapping[str, Any]],
  *,
  chat: bool = False,
  decoder: str | None = None,
  seed: int = 0,
  batch_size: int = 8,
  trace: bool = False,
  end_ids: Sequence[int] = (),
  stop: str | Sequence[str] | None = None,
  logprobs: bool = False,
  **settings: Any,
) -> list[Result]:
  """Decodes prompts, one result each, in order.

  Args:
    model: from `archer_jax.load`, like the next two.
    params: its parameters.
    tokenizer: its tokenizer, or None if prompts are token ids.
    prompts: texts, token ids, conversations (lists of `role` and `content`; the answer continues a last message of the
      assistant), or mappings with the keys of an input record, which may carry a seed and knobs of their own. A prompt
      may be empty.
    chat: whether a text is a user's turn of a conversation.
    decoder: name of one; by default that of the model's family.
    seed: the seed of prompt i is folded from it and i, so that equal prompts draw differently.
    batch_size: rows decoded together; no result depends on it.
    trace: whether results carry what was recorded of every step.
    end_ids: end tokens beside those of the model, which has all that its checkpoint names.
    stop: a text, or several, before the first of which an answer ends; a record may have its own.
    logprobs: whether results have their tokens' log-probabilities, and traces those of every step.
    **settings: refresh, block_length, switches and knobs, see `engine.settings.SETTINGS`; None is not given.

  Raises:
    TypeError: a setting that there is not.
    ValueError: a setting or a prompt that is wrong; a prompt is named by its index.
  """
  if isinstance(prompts, str | Mapping):
    raise ValueError(f'prompts must be a list of prompts, got {prompts!r}')
  if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
    raise ValueError(f'batch_size must be a positive integer, got {batch_size!r}')
  given = {'chat': chat, 'seed': seed, 'decoder': decoder, **settings}
  run = make_settings(
    model.config,
    {name: value for name, value in given.items() if value is not None or name not in SETTINGS},
    stop=() if stop is None else stop,
    logprobs=logprobs,
  )
  if not run.is_calibrated:
    raise ValueError('kappa must be given with refresh certified')
  requests = []
  for index, prompt in enumerate(prompts):
    try:
      requests.append(make_request(_as_record(prompt), index, run, tokenizer, allow_empty=True))
    except ValueError as error:
      raise ValueError(f'prompts[{index}]: {error}') from error
  check_end_ids('end_ids', end_ids, model.config)
  ends = (*model.end_ids, *end_ids)
  setup = Setup(params=params, tokenizer=tokenizer, settings=run, end_ids=ends, trace=trace)
  chunks = decode_requests(setup, requests, batch_size=batch_size, n_batches=N_BATCHES)
  return list(itertools.chain.from_iterable(chunks))


def _as_record(prompt: Any) -> Mapping[str, Any]:
  if isinstance(prompt, Mapping):
    return prompt
  if isinstance(prompt, str):
    return {'prompt': prompt}
  if not isinstance(prompt, Iterable):
    raise ValueError(f'a prompt must be a text, token ids, messages or a record, got {prompt!r}')
  items = prompt.tolist() if isinstance(prompt, np.ndarray | jax.Array) else list(prompt)
  if items and isinstance(items[0], Mapping):
    return {'messages': items}
  return {'prompt_ids': [int(item) if isinstance(item, np.integer) else item for item in items]}


def decode_requests(
  setup: Setup,
  entries: Iterable[Request | Refusal],
  *,
  batch_size: int,
  n_batches: int = 1,
  in_order: bool = True,
  timing: Timing | None = None,
) -> Iterator[list[Result]]:
  """Decodes entries as they come, and gives out results as they finish.

  Args:
    setup: what decodes.
    entries: requests, and refusals whose results are their errors.
    batch_size: rows decoded together, by each data shard.
    n_batches: how many batches of entries may be read and not given out. As one of them finishes, the next request of
      the same shape takes its slot, so that many keep all slots busy. With 1 nothing is read before all results before
      it are given out, as somebody needs who waits for answers before asking on.
    in_order: whether results come in the order of the entries; they are held back until it is their turn.
    timing: is told how long compiling and running took.

  Yields:
    Results after every chunk of steps, possibly none. While they are looked at the next chunk runs.
  """
  shards = setup.shards
  feed = _Feed(entries, batch_size=batch_size * shards, n_batches=n_batches, in_order=in_order)
  engine, numbers = None, {}
  while True:
    for number, entry in feed.fill():
      if isinstance(entry, Refusal):
        feed.put(number, Result(index=entry.index, id=entry.id, finish_reason='error', error=entry.error))
        continue
      engine = engine or Engine(setup, n_slots=-(-feed.n_slots // shards) * shards, timing=timing)
      numbers[engine.submit(entry)] = number
    if refused := feed.release():
      yield refused
    if engine is None or engine.is_idle:
      if feed.has_ended:
        return
      continue
    for ticket, result in engine.step():
      feed.put(numbers.pop(ticket), result)
    yield feed.release()


class _Feed:
  """Entries that were read and whose results were not given out.

  Args:
    entries: in the order in which they come.
    batch_size: entries are read that many at a time.
    n_batches: the most that are open, in batches. With 1 nothing is read before all before it is given out.
    in_order: whether results are given out in the order of the entries, or else as they come.

  Attributes:
    n_slots: as many as a batch has requests; fewer if the input ends before the first batch is full.
    has_ended: whether all entries were read.
  """

  def __init__(self, entries: Iterable[Any], *, batch_size: int, n_batches: int, in_order: bool):
    self.n_slots = 0
    self.has_ended = False
    self._entries, self._numbers = iter(entries), itertools.count()
    self._batch_size, self._size = batch_size, n_batches * batch_size
    # Number in the input -> result, None until there is one; and results that wait for nothing else.
    self._open: collections.OrderedDict[int, Result | None] = collections.OrderedDict()
    self._ready = []
    self._in_order = in_order

  def fill(self) -> Iterator[tuple[int, Request | Refusal]]:
    """Reads on as far as there is room, and yields every entry with its number."""
    while not self.has_ended and len(self._open) + self._batch_size <= self._size:
      batch = list(itertools.islice(self._entries, self._batch_size))
      self.has_ended = len(batch) < self._batch_size
      # Only an input that has ended leaves fewer rows than there will ever be.
      n_requests = sum(isinstance(entry, Request) for entry in batch)
      self.n_slots = self.n_slots or (n_requests if self.has_ended else self._batch_size)
      for entry in batch:
        number = next(self._numbers)
        self._open[number] = None
        yield number, entry

  def put(self, number: int, result: Result) -> None:
    """Notes what became of an entry."""
    if self._in_order:
      self._open[number] = result
    else:
      del self._open[number]
      self._ready.append(result)

  def release(self) -> list[Result]:
    """Results whose turn it is."""
    while self._in_order and self._open and next(iter(self._open.values())) is not None:
      self._ready.append(self._open.popitem(last=False)[1])
    ready, self._ready = self._ready, []
    return ready

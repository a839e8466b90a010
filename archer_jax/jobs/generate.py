"""The loop from requests to results; `generate` is its form for a list of prompts.

Axes: B batch, G canvas, S trace steps.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import itertools
from typing import Any

import jax
from jax.sharding import Mesh
import numpy as np

from archer_jax.config import SHIFTED
from archer_jax.config import DecodeConfig
from archer_jax.jobs.batching import PROMPT_LENGTHS
from archer_jax.jobs.batching import batch_config
from archer_jax.jobs.batching import bucket
from archer_jax.jobs.continuous import N_BATCHES
from archer_jax.jobs.continuous import Timing
from archer_jax.jobs.continuous import Window
from archer_jax.jobs.continuous import run_slots
from archer_jax.jobs.requests import Refusal
from archer_jax.jobs.requests import Request
from archer_jax.jobs.requests import make_request
from archer_jax.jobs.settings import Settings
from archer_jax.jobs.settings import make_settings
from archer_jax.model import Transformer
from archer_jax.text import Tokenizer
from archer_jax.types import DecodeState
from archer_jax.types import Status

# What a result counts.
COUNT_FIELDS = (
  'prompt_tokens',
  'generated_tokens',
  'canvas_tokens',
  'steps',
  'nfe',
  'refreshes',
  'accepted',
  'remasked',
  'flip_flops',
)
# Fields of a result that stand in its record, in this order; `error` follows where there is one.
RECORD_FIELDS = ('id', 'text', 'token_ids', 'finish_reason', 'seed', *COUNT_FIELDS)
# Names in a trace file -> fields of `types.Trace`.
_TRACE_ARRAYS = {
  'canvas_after_step': 'canvas',
  'refresh_per_step': 'refresh',
  'accept_per_step': 'accept',
  'remask_per_step': 'remask',
  'drift_per_step': 'drift',
  'age_per_step': 'age',
  'margin_per_step': 'margin',
  # Bits of `types.Reason`, 0 for a reuse.
  'reason_per_step': 'reason',
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """What became of one request.

  Attributes:
    index: its place in the input.
    id: its name, by default the index.
    text: the answer up to its first end token; empty without a tokenizer and after an error.
    token_ids: the row's whole canvas, gen_length of them.
    finish_reason: `stop` if an end token stands in the canvas, `length` if none does, `error`.
    seed: the row's seed, which reproduces it; None for a request that was refused.
    prompt_tokens, canvas_tokens: tokens of the prompt and of the canvas.
    generated_tokens: tokens before the first end token, masks not counted.
    steps, nfe, refreshes, accepted, remasked, flip_flops: see `types.Counters`.
    error: what is wrong, if anything is.
    rows_fed, rows_recomputed: token rows that went through the model for this request, and those that recomputing
      everything in each of its steps would have taken; padding counts in neither.
    trace: what was recorded of every step, if it was asked for.
    prompt_ids: the prompt's tokens.
    knobs: every knob of the request.
  """

  index: int
  id: Any
  text: str = ''
  token_ids: Sequence[int] = ()
  finish_reason: str
  seed: int | None = None
  prompt_tokens: int = 0
  generated_tokens: int = 0
  canvas_tokens: int = 0
  steps: int = 0
  nfe: int = 0
  refreshes: int = 0
  accepted: int = 0
  remasked: int = 0
  flip_flops: int = 0
  error: str | None = None
  rows_fed: int = 0
  rows_recomputed: int = 0
  trace: Mapping[str, np.ndarray] | None = None
  prompt_ids: Sequence[int] = ()
  knobs: Mapping[str, float | int] = dataclasses.field(default_factory=dict)

  def record(self) -> dict[str, Any]:
    """The result as it is written to a file."""
    fields = {name: getattr(self, name) for name in RECORD_FIELDS}
    return fields if self.error is None else {**fields, 'error': self.error}


def generate(
  model: Transformer,
  params: dict,
  tokenizer: Tokenizer | None,
  prompts: Iterable[str | Sequence[int] | Sequence[Mapping[str, str]] | Mapping[str, Any]],
  *,
  chat: bool = False,
  decoder: str | None = None,
  refresh: str = 'archer',
  seed: int = 0,
  batch_size: int = 8,
  trace: bool = False,
  **settings: Any,
) -> list[Result]:
  """Decodes prompts, one result each, in order.

  Args:
    model: from `archer_jax.load`, like the next two.
    params: its parameters.
    tokenizer: its tokenizer, or None if prompts are token ids.
    prompts: texts, token ids, conversations (lists of `role` and `content`), or mappings with the keys of an input
      record, which may carry a seed and knobs of their own. A prompt may be empty.
    chat: whether a text is a user's turn of a conversation.
    decoder: `wino`, `llada` or `dream`; by default that of the model's family.
    refresh: `archer`, `always`, `once`, `interval`, or `certified`, which wants a `kappa`.
    seed: the seed of prompt i is folded from it and i, so that equal prompts draw differently.
    batch_size: rows decoded together; no result depends on it.
    trace: whether results carry what was recorded of every step.
    **settings: block_length, switches and knobs, see `jobs.settings.SETTINGS`.

  Raises:
    TypeError: a setting that there is not.
    ValueError: a setting or a prompt that is wrong; a prompt is named by its index.
  """
  if isinstance(prompts, str | Mapping):
    raise ValueError(f'prompts must be a list of prompts, got {prompts!r}')
  if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
    raise ValueError(f'batch_size must be a positive integer, got {batch_size!r}')
  given = {'chat': chat, 'refresh': refresh, 'seed': seed, **settings}
  run = make_settings(model.config, given if decoder is None else {**given, 'decoder': decoder})
  if not run.is_calibrated:
    raise ValueError('kappa must be given with refresh certified')
  requests = []
  for index, prompt in enumerate(prompts):
    try:
      requests.append(make_request(_as_record(prompt), index, run, tokenizer, allow_empty=True))
    except ValueError as error:
      raise ValueError(f'prompts[{index}]: {error}') from error
  chunks = decode_requests(params, tokenizer, run, requests, batch_size=batch_size, n_batches=N_BATCHES, trace=trace)
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
  params: dict,
  tokenizer: Tokenizer | None,
  settings: Settings,
  entries: Iterable[Request | Refusal],
  *,
  batch_size: int,
  n_batches: int = 1,
  in_order: bool = True,
  trace: bool = False,
  decode: Callable[..., DecodeState] | None = None,
  timing: Timing | None = None,
  mesh: Mesh | None = None,
  max_steps: int | None = None,
  min_done: int | None = None,
) -> Iterator[list[Result]]:
  """Decodes entries as they come, and gives out results as they finish.

  Args:
    params: the model's parameters.
    tokenizer: the checkpoint's, if it has one.
    settings: the run's settings.
    entries: requests, and refusals whose results are their errors.
    batch_size: rows decoded together, by each data shard.
    n_batches: how many batches of entries may be read and not given out. As one of them finishes, the next request of
      the same shape takes its slot, so that many keep all slots busy. With 1 nothing is read before all results before
      it are given out, as somebody needs who waits for answers before asking on.
    in_order: whether results come in the order of the entries; they are held back until it is their turn.
    trace: whether results carry what was recorded of every step.
    decode: takes a state to its end, in the place of the loop that stops for rows to leave and others to come.
    timing: is told how long compiling and running took.
    mesh: where the parameters are, if that is more than one device.
    max_steps: the most steps of a chunk, see `run_slots`.
    min_done: how many rows must be done to end it before, likewise.

  Yields:
    Results after every chunk of steps, possibly none. While they are looked at the next chunk runs.
  """
  timing = timing or Timing()
  program = {
    'dtype': str(params['embedding'].dtype),
    'end_ids': (settings.model.eos_id,) if tokenizer is None else tokenizer.end_ids,
    'trace': trace,
  }
  chunk = None
  if decode is not None:
    chunk = lambda params, state, max_steps, min_done, *, cfg: decode(params, state, cfg=cfg)
  shards = 1 if mesh is None else mesh.shape['data']
  window = Window(
    entries,
    batch_size=batch_size * shards,
    n_batches=n_batches,
    shape=_shapes(settings, program),
    in_order=in_order,
  )

  def read():
    for number, entry in window.fill():
      window.put(number, Result(index=entry.index, id=entry.id, finish_reason='error', error=entry.error))

  while True:
    read()
    if refused := window.release():
      yield refused
    if not (shapes := window.next_shapes()):
      if window.has_ended:
        return
      continue
    requests = window.waiting(shapes)
    cfg = batch_config(requests, settings, **program)
    for finished, host in run_slots(
      params,
      functools.partial(window.take, shapes),
      cfg=cfg,
      n_slots=-(-window.n_slots // shards) * shards,
      prompt_length=bucket('prompt', max(len(request.prompt_ids) for request in requests), PROMPT_LENGTHS),
      seed=settings.seed,
      timing=timing,
      chunk=chunk,
      max_steps=max_steps,
      min_done=min_done,
      mesh=mesh,
    ):
      for row, (number, request) in enumerate(finished):
        window.put(number, _result(request, row, host, tokenizer, cfg))
      yield window.release()
      read()


def _shapes(settings: Settings, program: Mapping[str, Any]) -> Callable[[Request], tuple[int, ...]]:
  """A function that tells what a request needs of a program; one that is larger in any of these serves it as well."""

  # Most requests have the same knobs, and the steps of a trace take a while to count.
  @functools.lru_cache(maxsize=1024)
  def of_knobs(knobs):
    cfg = batch_config([Request(index=0, id=0, prompt_ids=(), seed=0, knobs=dict(knobs))], settings, **program)
    return cfg.canvas_length, int(cfg.guidance), cfg.trace_steps

  def of(request: Request) -> tuple[int, ...]:
    prompt_length = bucket('prompt', len(request.prompt_ids), PROMPT_LENGTHS)
    return (*of_knobs(tuple(request.knobs.items())), prompt_length)

  return of


def _result(
  request: Request, row: int, host: Mapping[str, Any], tokenizer: Tokenizer | None, cfg: DecodeConfig
) -> Result:
  """The result of one of the rows that are done."""
  length, prompt = request.knobs['gen_length'], len(request.prompt_ids)
  token_ids = host['canvas'][row, :length].tolist()
  ends = [position for position, token in enumerate(token_ids) if token in cfg.end_ids]
  counters = {
    field.name: int(getattr(host['counters'], field.name)[row]) for field in dataclasses.fields(host['counters'])
  }
  steps, refreshes = counters['steps'], counters['refreshes']
  error = None
  if host['status'][row] == Status.NOT_FINITE:
    error = f"the logits of step {steps} are not finite; check the checkpoint's weights"
  trace = None
  if host['trace'] is not None:
    trace = {name: getattr(host['trace'], field)[row, :steps].copy() for name, field in _TRACE_ARRAYS.items()}
    trace['canvas_after_step'] = trace['canvas_after_step'][:, :length]
  # A reuse step feeds canvas and shadow, and the last prompt row where the model reads a position from the row before.
  lead = 1 if cfg.model.logit_alignment == SHIFTED and prompt else 0
  # The shadow counts as that of a whole block, in a short last block too.
  fresh = length + min(cfg.shadow_length, length)
  streams = 2 if cfg.guidance and request.knobs['cfg_scale'] > 0 else 1
  # A step that reused and then refreshed took two.
  forwards = counters['nfe'] // streams
  return Result(
    index=request.index,
    id=request.id,
    text='' if error or tokenizer is None else tokenizer.decode_text(token_ids),
    token_ids=token_ids,
    finish_reason='error' if error else 'stop' if ends else 'length',
    seed=int(host['seed'][row]),
    prompt_tokens=prompt,
    generated_tokens=sum(token != cfg.model.mask_id for token in token_ids[: ends[0] if ends else length]),
    canvas_tokens=length,
    **counters,
    error=error,
    rows_fed=streams * (forwards * fresh + refreshes * prompt + (forwards - refreshes) * lead),
    rows_recomputed=streams * steps * (fresh + prompt),
    trace=trace,
    prompt_ids=request.prompt_ids,
    knobs=request.knobs,
  )

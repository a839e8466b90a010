"""What became of a request.

Axes: G canvas, S trace steps.
"""

import bisect
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np

from archer_jax.checkpoints.text import Tokenizer
from archer_jax.config import DecodeConfig
from archer_jax.engine.requests import Request
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """What became of one request.

  Attributes:
    index: its place in the input.
    id: its name, by default the index.
    text: the answer up to its first end token or stop string; empty without a tokenizer and after an error.
    token_ids: the row's whole canvas, gen_length of them.
    finish_reason: `stop` if an end token stands in the canvas or a stop string in the text, else `length`; `error`.
    seed: the row's seed, which reproduces it; None for a request that was refused.
    prompt_tokens, canvas_tokens: tokens of the prompt and of the canvas.
    generated_tokens: tokens before the first end token, masks not counted; under a stop string those of the text.
    steps, nfe, refreshes, accepted, remasked, flip_flops: see `types.Counters`.
    error: what is wrong, if anything is.
    rows_fed, rows_recomputed: token rows that went through the model for this request, and those that recomputing
      everything in each of its steps would have taken; padding counts in neither.
    trace: what was recorded of every step, if it was asked for.
    token_logprobs: of every token of the canvas its log-probability in the last step that read its logits, None for a
      mask; None unless asked for.
    commit_steps: the steps that committed them, from 0 as in traces.
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
  token_logprobs: Sequence[float | None] | None = None
  commit_steps: Sequence[int | None] | None = None
  prompt_ids: Sequence[int] = ()
  knobs: Mapping[str, float | int] = dataclasses.field(default_factory=dict)

  def record(self) -> dict[str, Any]:
    """The result as it is written to a file."""
    fields = {name: getattr(self, name) for name in RECORD_FIELDS}
    if self.token_logprobs is not None:
      fields |= {'token_logprobs': self.token_logprobs, 'commit_steps': self.commit_steps}
    return fields if self.error is None else {**fields, 'error': self.error}


def find_stop(text: str, stop: Sequence[str]) -> int | None:
  """Where the first of the stop strings begins, or None."""
  return min((found for found in map(text.find, stop) if found >= 0), default=None)


def has_stopped(request: Request, canvas: np.ndarray, block: int, tokenizer: Tokenizer, cfg: DecodeConfig) -> bool:
  """Whether a stop string stands among the tokens of a row that is running and that count: those before its first mask.

  Where a token of an unfinished block may still be taken back only those of finished blocks count, as for end tokens.

  Args:
    request: what was asked.
    canvas: int32 [G], of the row.
    block: its current block.
    tokenizer: the checkpoint's.
    cfg: of the program.
  """
  end = request.knobs['gen_length']
  if not cfg.decoder_method.stops_within_block:
    end = min(end, block * cfg.block_length)
  ids = canvas[:end].tolist()
  if cfg.model.mask_id in ids:
    ids = ids[: ids.index(cfg.model.mask_id)]
  return find_stop(tokenizer.decode_text(ids), request.stop) is not None


def make_result(
  request: Request, row: int, host: Mapping[str, Any], tokenizer: Tokenizer | None, cfg: DecodeConfig
) -> Result:
  """The result of one of the rows that are done.

  Args:
    request: what was asked.
    row: its place in the arrays of `host`.
    host: fields of `DecodeState` of rows that left their slots, on the host.
    tokenizer: the checkpoint's, if it has one.
    cfg: of the program.
  """
  length, prompt = request.knobs['gen_length'], len(request.prompt_ids)
  token_ids = host['canvas'][row, :length].tolist()
  ends = [position for position, token in enumerate(token_ids) if token in cfg.end_ids]
  counters = {
    field.name: int(getattr(host['counters'], field.name)[row]) for field in dataclasses.fields(host['counters'])
  }
  steps = counters['steps']
  n_generated = sum(token != cfg.model.mask_id for token in token_ids[: ends[0] if ends else length])
  text, stopped = '' if tokenizer is None else tokenizer.decode_text(token_ids), None
  if request.stop and (stopped := find_stop(text, request.stop)) is not None:
    text = text[:stopped]
    # As few as have the text.
    kept = [token for token in token_ids if token != cfg.model.mask_id]
    n_generated = bisect.bisect_left(range(n_generated), stopped, key=lambda n: len(tokenizer.decode_text(kept[:n])))
  error = None
  if host['status'][row] == Status.NOT_FINITE:
    error = f"the logits of step {steps} are not finite; check the checkpoint's weights"
  logprobs = {}
  if host.get('logprobs') is not None:
    logprobs = {
      name: [None if token == cfg.model.mask_id else value for token, value in zip(token_ids, values, strict=True)]
      for name, values in ((name, values[row, :length].tolist()) for name, values in host['logprobs'].items())
    }
  trace = None
  if host['trace'] is not None:
    # A row holds its first steps; what stands behind them is another row's.
    trace = {name: values[row, :steps].copy() for name, values in host['trace'].items()}
    canvas = trace.pop('canvas')[:, :length]
    if logprobs:
      trace['token_logprobs'] = trace['token_logprobs'][:, :length]
    trace = {'canvas_after_step': canvas, **{f'{name}_per_step': values for name, values in trace.items()}}
  return Result(
    index=request.index,
    id=request.id,
    text='' if error else text,
    token_ids=token_ids,
    finish_reason='error' if error else 'stop' if ends or stopped is not None else 'length',
    seed=int(host['seed'][row]),
    prompt_tokens=prompt,
    generated_tokens=n_generated,
    canvas_tokens=length,
    **counters,
    error=error,
    **logprobs,
    trace=trace,
    prompt_ids=request.prompt_ids,
    knobs=request.knobs,
  )

"""Jitted programs and prompts that several test files share: compiling is most of what these tests cost."""

import contextlib
import dataclasses
import functools
from unittest import mock

from golden_data import Golden
import jax
import jax.numpy as jnp
import numpy as np

from archer_jax.config import DecodeConfig
from archer_jax.loop.decode import decode
from archer_jax.loop.slots import decode_chunk
from archer_jax.loop.step import init_state
from archer_jax.loop.step import staged_step
from archer_jax.reuse.prompt.method import Prompt
from archer_jax.types import DecodeState
from archer_jax.types import Knobs
from archer_jax.types import Outcome
from archer_jax.types import Work

# Programs that are optimised less compile in a third of the time. The bits differ a little between the two ways.
QUICK = {'xla_backend_optimization_level': 0, 'xla_cpu_use_fusion_emitters': False}
FULL = {}

PROMPT_LENGTH = 64
CANVAS_LENGTH = 24
TRACE_STEPS = 32

POLICIES = {
  'always': {'refresh_interval': 1},
  'once': {},
  'interval': {'refresh_interval': 4},
  # A quarter of the canvas and more.
  'drift': {'refresh_distance': 7},
}


# `saber` has a rule for each alignment of logits, and with the one of llada_tiny blocks or a single one.
SHIFTED = ('dream', 'saber shifted')
KINDS = ('wino', 'llada', 'dream', 'saber', 'saber whole', 'saber shifted')


def golden_of(request, kind: str):
  """The golden checkpoint for a decoder; `kind` is its name, perhaps with what else tells it apart."""
  return request.getfixturevalue('dream_tiny' if kind in SHIFTED else 'llada_tiny')


def shallow(golden: Golden, n_layers: int = 2) -> Golden:
  """The checkpoint with its first layers alone: what does not depend on their number is compiled in less time."""
  blocks = {f'blocks_{layer}' for layer in range(n_layers, golden.config.n_layers)}
  params = {name: part for name, part in golden.params.items() if name not in blocks}
  return dataclasses.replace(golden, config=dataclasses.replace(golden.config, n_layers=n_layers), params=params)


def config(golden, kind: str, **changes) -> DecodeConfig:
  """The config that most tests share."""
  decoder, _, rest = kind.partition(' ')
  block = CANVAS_LENGTH if rest or kind in SHIFTED else 8
  values = {'canvas_length': CANVAS_LENGTH, 'block_length': block, 'early_stop': False, 'trace_steps': TRACE_STEPS}
  return DecodeConfig(model=golden.config, decoder=decoder, **(values | changes))


def prompts(seed: int, lengths) -> list[np.ndarray]:
  """Random prompts below every special id of the golden checkpoints."""
  rng = np.random.default_rng(seed)
  return [rng.integers(0, 256, length).astype(np.int32) for length in lengths]


def start(prompt_ids, cfg: DecodeConfig, *, length: int = PROMPT_LENGTH, seeds=None, pad: int = 0, **knobs):
  """The first state of prompts left-padded to `length`."""
  batch = len(prompt_ids)
  tokens = np.full((batch, length), pad, np.int32)
  valid = np.zeros((batch, length), bool)
  for row, ids in enumerate(prompt_ids):
    tokens[row, length - len(ids) :] = ids
    valid[row, length - len(ids) :] = True
  seeds = np.arange(batch) if seeds is None else np.asarray(seeds)
  knobs = {'gen_length': cfg.canvas_length} | knobs
  state = init_state(tokens, valid, Knobs.make(batch, **knobs), seeds.astype(np.uint32), cfg=cfg)
  # Loaded parameters are committed to a device, and so is what a step returns; for a state that is not, the step would
  # be compiled once more.
  return jax.device_put(state, jax.devices()[0])


def set_knobs(state: DecodeState, **values) -> DecodeState:
  """The state with other knobs, [B] arrays or numbers."""
  knobs = state.knobs
  new = {
    name: jnp.broadcast_to(jnp.asarray(value, getattr(knobs, name).dtype), knobs.steps.shape)
    for name, value in values.items()
  }
  return dataclasses.replace(state, knobs=dataclasses.replace(knobs, **new))


def with_fields(state: DecodeState, **arrays) -> DecodeState:
  """The state with other arrays, the decoder's, its own or the reuse method's; in the dtypes of the old ones."""
  cast = lambda old, new: jnp.asarray(new, old.dtype)
  own = {}
  for name, new in arrays.items():
    if hasattr(state.decoder, name):
      own['decoder'] = own.get('decoder', state.decoder)._replace(**{name: cast(getattr(state.decoder, name), new)})
    elif hasattr(state, name):
      own[name] = cast(getattr(state, name), new)
    else:
      old = own.get('reuse', state.reuse)
      own['reuse'] = dataclasses.replace(old, **{name: cast(getattr(old, name), new)})
  return dataclasses.replace(state, **own)


def prefill(state: DecodeState, tokens: dict[int, int]) -> DecodeState:
  """The state with tokens standing in the canvas, column -> token.

  Canvas rows of an empty prompt tie exactly while all are masks, so that rounding alone would decide.
  """
  columns, ids = jnp.array(list(tokens)), jnp.array(list(tokens.values()), jnp.int32)
  state = dataclasses.replace(state, canvas=state.canvas.at[:, columns].set(ids))
  if hasattr(state.decoder, 'pending'):
    state = with_fields(state, pending=state.decoder.pending.at[:, columns].set(False))
  return state


def _step_and_logits(params, state, cfg):
  state, _, stages = staged_step(params, state, cfg=cfg)
  return state, stages.outcome.logits


def quick(loop):
  """A jitted loop (params, state, ..., cfg) of the package whose programs are compiled in less time."""
  return jax.jit(loop.__wrapped__, static_argnames='cfg', donate_argnames='state', compiler_options=QUICK)


# Once, so that all tests of a process share its compiled programs.
CHUNK = quick(decode_chunk)


@functools.cache
def stepper(cfg: DecodeConfig, full: bool):
  """Jitted (params, state) -> the state after one step, and the logits of its forward, before any review."""
  return jax.jit(functools.partial(_step_and_logits, cfg=cfg), compiler_options=FULL if full else QUICK)


@functools.cache
def loop(cfg: DecodeConfig):
  """`decode` without donation: (params, state) -> state."""
  return jax.jit(functools.partial(decode.__wrapped__, cfg=cfg), compiler_options=QUICK)


def run_steps(params, state: DecodeState, cfg: DecodeConfig, full: bool = False):
  """States and logits of every step until all rows are done, from Python."""
  steps = []
  while not np.all(state.done):
    state, logits = stepper(cfg, full)(params, state)
    steps.append((state, logits))
  return steps


@contextlib.contextmanager
def stub_logits(make):
  """Replaces the forward by `make(state, views, cfg)`, which returns logits [B, R + shadow, V]; what is kept stays.

  Programs must be traced inside, and not reused outside.
  """

  def forward(self, params, state, plan, views, cfg):
    nothing = jnp.zeros_like(state.row_step)
    work = Work(forwards=nothing, rows_fed=nothing, rows_recomputed=nothing, passes={})
    reuse = dataclasses.replace(plan.reuse, drift=plan.seen['drift'])
    return Outcome(logits=make(state, views, cfg), reuse=reuse, kept=plan.kept, reason=plan.reason, work=work)

  with mock.patch.object(Prompt, 'forward', forward):
    yield

"""Decoding with hand-made logits: a model that is a table, states built by hand, and a Python loop over the steps."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import programs

from archer_jax.config import DecodeConfig
from archer_jax.config import ModelConfig
from archer_jax.loop.step import decode_step
from archer_jax.loop.step import init_state
from archer_jax.types import Knobs

# These programs run a few times each: most of their time would be LLVM's.
QUICK_COMPILE = {'xla_backend_optimization_level': 0}
VOCAB = 12
MASK = 11
EOS = 10


def make_config(decoder, gen_length, block_length=None, *, vocab_size=VOCAB, mask_id=None, alignment=None, **fields):
  """A config whose model is never run; the mask token is the last one and the end token stands before it."""
  alignment = alignment or ('shifted' if decoder == 'dream' else 'same_position')
  model = ModelConfig(
    family='dream' if alignment == 'shifted' else 'llada',
    vocab_size=vocab_size,
    d_model=4,
    n_layers=1,
    n_heads=1,
    n_kv_heads=1,
    head_dim=4,
    d_ff=4,
    rope_theta=1e4,
    norm_eps=1e-5,
    qkv_bias=False,
    max_length=1024,
    mask_id=vocab_size - 1 if mask_id is None else mask_id,
    eos_id=vocab_size - 2,
    pad_id=vocab_size - 2,
    logit_alignment=alignment,
  )
  fields.setdefault('early_stop', False)
  return DecodeConfig(
    model=model, decoder=decoder, canvas_length=gen_length, block_length=block_length or gen_length, **fields
  )


def make_state(cfg, batch=1, *, seeds=None, **knobs):
  """A state before the first step, without a prompt."""
  knobs.setdefault('gen_length', cfg.canvas_length)
  prompt = np.zeros((batch, 0), np.int32)
  seeds = np.zeros(batch, np.uint32) if seeds is None else np.asarray(seeds, np.uint32)
  return init_state(prompt, prompt.astype(bool), Knobs.make(batch, **knobs), seeds, cfg=cfg)


def repeat(state, count):
  """The one row of `state`, `count` times."""
  return jax.tree.map(lambda x: jnp.repeat(x, count, axis=0), state)


@functools.partial(jax.jit, static_argnames='cfg', compiler_options=QUICK_COMPILE)
def decide(state, logits, *, cfg):
  """The decoder's `Update` on logits [B, R + shadow, V], by name, and the fields of its own state beside them."""
  decoder = cfg.decoder_method
  update = dict(vars(decoder.update(state, decoder.views(state, cfg), jnp.asarray(logits, jnp.float32), cfg)))
  after = update.pop('decoder')
  return {**update, **(after._asdict() if after else {})}


def _table_logits(params, state, views, cfg):
  """The rows of a table for the row's step and the columns asked for."""
  del cfg
  rows = jnp.arange(views.columns.shape[0])[:, None]
  at = lambda table, columns: table[
    rows, jnp.minimum(state.row_step, table.shape[1] - 1)[:, None], jnp.minimum(columns, table.shape[2] - 1)
  ]
  logits = at(params['canvas'], views.columns)
  if views.shadow is not None:
    logits = jnp.concatenate([logits, at(params['shadow'], views.shadow.columns)], axis=1)
  return logits


@functools.partial(jax.jit, static_argnames='cfg', compiler_options=QUICK_COMPILE)
def _table_step(params, state, *, cfg):
  with programs.stub_logits(functools.partial(_table_logits, params)):
    return decode_step(params, state, cfg=cfg)


def play(state, cfg, canvas, shadow=None, limit=200):
  """All states until every row is done, the first one included; arguments are those of `play_steps`."""
  steps = play_steps(state, cfg, canvas, shadow, limit)
  return [jax.tree.map(np.asarray, state), *(after for _, after in steps)]


def play_steps(state, cfg, canvas, shadow=None, limit=200):
  """Steps until every row is done.

  Args:
    state: the first state.
    cfg: its config.
    canvas: logits [G, V] of the canvas, or [steps, G, V], of which the last step's stand for all later ones, or
      [B, steps, G, V].
    shadow: logits of the verification view of each canvas column, likewise.
    limit: more steps than this are an error.

  Returns:
    The record of every step and the state behind it, in numpy.
  """

  def table(logits):
    logits = np.asarray(logits, np.float32)
    logits = logits[None] if logits.ndim == 2 else logits
    # A common number of steps, so that tests share their programs.
    missing = -logits.shape[-3] % 8
    logits = np.concatenate([logits, *[logits[..., -1:, :, :]] * missing], axis=-3)
    return np.broadcast_to(logits, (state.canvas.shape[0], *logits.shape[-3:]))

  params = {'embedding': np.zeros((1, 1), np.float32), 'canvas': table(canvas)}
  if cfg.decoder == 'wino':
    params['shadow'] = table(shadow)
  rows = lambda tree, count: jax.tree.map(lambda x: np.resize(np.asarray(x), (count, *x.shape[1:])), tree)
  batch = state.canvas.shape[0]
  # A common number of rows too.
  params = params | {name: rows(params[name], max(batch, 8)) for name in params if name != 'embedding'}
  state, steps = rows(state, max(batch, 8)), []
  while not state.done.all():
    assert len(steps) < limit, 'the loop does not end'
    state, record = jax.tree.map(np.asarray, _table_step(params, state, cfg=cfg))
    # The counts of passes are the batch's, not a row's.
    steps.append((rows(dataclasses.replace(record, work=None), batch), rows(state, batch)))
  return steps


def peaked(tokens, heights, vocab_size=VOCAB, floor=0.0):
  """Logits [G, V] with one raised token a column."""
  tokens = np.asarray(tokens)
  logits = np.full((len(tokens), vocab_size), floor, np.float32)
  logits[np.arange(len(tokens)), tokens] = heights
  return logits


# Names and fields of `make_config` of every decoder but dream, whose algorithms each test chooses.
DECODERS = [('llada', {}), ('wino', {}), ('parallel', {}), ('saber', {}), ('saber', {'alignment': 'shifted'})]

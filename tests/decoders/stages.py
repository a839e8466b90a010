"""Random decoding states with logits, decided by the decoders and by `reference`.

Rows never influence each other, so that a batch holds as many states or changes of their logits as fit.
"""

from collections.abc import Callable
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from programs import with_fields
import reference
from stub import QUICK_COMPILE
from stub import decide
from stub import make_config
from stub import make_state

from archer_jax import numerics
from archer_jax.config import DecodeConfig
from archer_jax.types import DecodeState
from archer_jax.types import Knobs

STATES = 512
BATCH = 2_560
# Below this a thousandth of the margin drowns in float32's rounding of the logits.
SMALLEST = 0.02
KEYS = ('canvas', 'accepted', 'remasked')


@dataclasses.dataclass(frozen=True)
class Stage:
  """Random states of one config with their logits, and how the reference decides on them."""

  cfg: DecodeConfig
  state: DecodeState  # STATES rows, in numpy
  logits: np.ndarray  # float32 [STATES, R + shadow, V]
  index: np.ndarray  # int32 [STATES, R]
  refer: Callable[[int, np.ndarray], reference.Step]  # of a row and its logits [R + shadow, V]
  near: float = -1.0  # a decision this near may come out otherwise, by the rounding of float32
  atol: float = 5e-6  # of the margin

  @functools.cached_property
  def steps(self):
    return [self.refer(row, self.logits[row]) for row in range(STATES)]

  @functools.cached_property
  def binding(self):
    """Rows by the kind of comparison that binds, where its margin is large enough to be resolved."""
    rows = {}
    for row, step in enumerate(self.steps):
      if np.isfinite(step.margin) and step.margin > SMALLEST:
        rows.setdefault(step.binding.kind, []).append(row)
    return rows


def random_logits(rng, shape, mask_id):
  """Noise with one raised token a row, sometimes the mask token."""
  z = rng.normal(size=shape)
  token = rng.integers(0, shape[-1], shape[:-1])
  token = np.where(rng.random(shape[:-1]) < 0.8, token % mask_id, token)
  np.put_along_axis(z, token[..., None], rng.uniform(0, 8, (*shape[:-1], 1)), axis=-1)
  return z


def saturated_logits(rng, shape, mask_id):
  """Log-odds of 10 to 40, where float32 probabilities tie; now and then a doubtful one, or a mask."""
  z = rng.normal(size=shape)
  token = rng.integers(0, shape[-1], shape[:-1])
  token = np.where(rng.random(shape[:-1]) < 0.97, token % mask_id, token)
  height = np.where(rng.random(shape[:-1]) < 0.9, rng.uniform(14, 44, shape[:-1]), rng.uniform(0, 8, shape[:-1]))
  np.put_along_axis(z, token[..., None], height[..., None], axis=-1)
  return z


@functools.partial(jax.jit, static_argnames='vocab', compiler_options=QUICK_COMPILE)
def draws(seed, row_step, index, *, vocab):
  """A step's noise: of the tokens [B, R, V], of the random order [B, R] as Gumbel and uniform, of alg_temp [B, R]."""
  keys = numerics.position_keys(seed, numerics.TOKEN_STREAM, row_step, index)
  order_keys = numerics.position_keys(seed, numerics.ORDER_STREAM, row_step, index)
  return (
    numerics.add_gumbel(jnp.zeros((*index.shape, vocab)), jnp.ones(len(index)), keys),
    numerics.position_gumbel(seed, numerics.ORDER_STREAM, row_step, index),
    jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32)))(order_keys),
    numerics.position_gumbel(seed, numerics.ALG_TEMP_STREAM, row_step, index),
  )


def noise_of(state, index, vocab=12):
  return [np.asarray(x, np.float64) for x in draws(state.seed, state.row_step, index, vocab=vocab)]


def random_canvas(rng, cfg, block, gen_length, share):
  """Tokens before each row's block, masks behind it, `share` of masks within: int32 [B, G]."""
  column = np.arange(cfg.canvas_length)
  start = (block * cfg.block_length)[:, None]
  masked = (column >= start + cfg.block_length) | ((column >= start) & (rng.random((len(block), len(column))) < share))
  # At least one mask in the block.
  masked[np.arange(len(block)), block * cfg.block_length] = True
  if cfg.allows_mask:
    masked |= (column < start) & (rng.random(masked.shape) < 0.1)
  masked |= column >= gen_length[:, None]
  return np.where(masked, cfg.model.mask_id, rng.integers(0, cfg.model.mask_id - 1, masked.shape)).astype(np.int32)


def columns_of(state, cfg):
  """int32 [B, R]: the canvas columns whose logits a step asks for."""
  return np.asarray(cfg.decoder_method.views(state, cfg).columns)


def knob_rows(state):
  """Each row's knobs as Python numbers, float32 as the decoder reads them."""
  columns = {field.name: np.asarray(getattr(state.knobs, field.name)) for field in dataclasses.fields(Knobs)}
  return [{name: column[row].item() for name, column in columns.items()} for row in range(len(state.seed))]


def rules_of(cfg):
  return reference.Rules(block_length=cfg.block_length, mask_id=cfg.model.mask_id, allows_mask=cfg.allows_mask)


def wino_stage(mask_prediction):
  cfg = make_config('wino', 14, 8, mask_prediction=mask_prediction)
  rng = np.random.default_rng(1)
  block = rng.integers(0, 2, STATES)
  gen_length = rng.choice([13, 14], STATES)
  canvas = random_canvas(rng, cfg, block, gen_length, 0.6)
  column, end = np.arange(14), np.minimum((block + 1) * 8, gen_length)[:, None]
  pending = (canvas == cfg.model.mask_id) & (column < end)
  if cfg.allows_mask:
    # Masks that were themselves predicted are pending no more.
    predicted = (rng.random(pending.shape) < 0.1) & (column > (block * 8)[:, None])
    pending &= ~predicted
  state = make_state(
    cfg,
    STATES,
    seeds=rng.integers(0, 2**32, STATES),
    gen_length=gen_length,
    threshold=rng.choice([0.3, 0.6, 0.8, 0.0, 1.0], STATES),
    threshold_back=rng.choice([0.5, 0.8, 0.9, 0.0, 1.0], STATES),
    max_accept=rng.choice([2, 3, 20], STATES),
    temperature=rng.choice([0, 0, 0.8], STATES),
  )
  state = with_fields(
    state,
    canvas=canvas,
    pending=pending,
    block=block,
    last_accept=rng.choice([1, 2, 3, 30], STATES),
    row_step=block * 9,
  )
  index = columns_of(state, cfg)
  logits = random_logits(rng, (STATES, index.shape[1] + 8, cfg.model.vocab_size), cfg.model.mask_id)
  # The verification view mostly agrees with what stands.
  twin = np.minimum(block[:, None] * 8 + np.arange(8), 13)
  token = np.take_along_axis(canvas, twin, axis=1)[..., None]
  shadow = logits[:, index.shape[1] :]
  np.put_along_axis(shadow, token, rng.uniform(0, 8, token.shape), axis=-1)
  logits = logits.astype(np.float32)
  knobs, (noise, *_) = knob_rows(state), noise_of(state, index)
  last = np.asarray(state.decoder.last_accept)

  def refer(row, z):
    return reference.wino(
      rules_of(cfg),
      np.asarray(z, np.float64),
      index[row],
      noise[row],
      canvas=canvas[row],
      pending=pending[row],
      block=block[row],
      last_accept=last[row],
      gen_length=gen_length[row],
      knobs=knobs[row],
    )

  return Stage(cfg=cfg, state=jax.tree.map(np.asarray, state), logits=logits, index=index, refer=refer)


def llada_stage(mask_prediction, remasking):
  cfg = make_config('llada', 14, 8, mask_prediction=mask_prediction, remasking=remasking)
  rng = np.random.default_rng(2)
  block = rng.integers(0, 2, STATES)
  gen_length = rng.choice([13, 14], STATES)
  canvas = random_canvas(rng, cfg, block, gen_length, 0.7)
  state = make_state(
    cfg,
    STATES,
    seeds=rng.integers(0, 2**32, STATES),
    gen_length=gen_length,
    steps=rng.choice([6, 7, 9, 14], STATES),
    temperature=rng.choice([0, 0, 0.8], STATES),
  )
  state = with_fields(state, canvas=canvas, block=block, block_step=rng.integers(0, 3, STATES), row_step=block * 5)
  index = columns_of(state, cfg)
  logits = random_logits(rng, (*index.shape, cfg.model.vocab_size), cfg.model.mask_id).astype(np.float32)
  knobs, (noise, *_) = knob_rows(state), noise_of(state, index)
  block_step = np.asarray(state.block_step)
  if remasking == 'random':
    order = np.take_along_axis(np.asarray(state.decoder.score), np.minimum(index, cfg.canvas_length - 1), axis=1)

  def refer(row, z):
    return reference.llada(
      rules_of(cfg),
      np.asarray(z, np.float64),
      index[row],
      noise[row],
      canvas=canvas[row],
      block=block[row],
      block_step=block_step[row],
      gen_length=gen_length[row],
      knobs=knobs[row],
      order=order[row] if remasking == 'random' else None,
    )

  return Stage(cfg=cfg, state=jax.tree.map(np.asarray, state), logits=logits, index=index, refer=refer)


def parallel_stage(mask_prediction, *, by_factor):
  cfg = make_config('parallel', 14, 8, mask_prediction=mask_prediction)
  rng = np.random.default_rng(7)
  block = rng.integers(0, 2, STATES)
  gen_length = rng.choice([13, 14], STATES)
  canvas = random_canvas(rng, cfg, block, gen_length, 0.7)
  state = make_state(
    cfg,
    STATES,
    seeds=rng.integers(0, 2**32, STATES),
    gen_length=gen_length,
    threshold=rng.choice([0.0, 0.3, 0.6, 0.9], STATES),
    factor=rng.choice([0.3, 1.0, 1.7, 3.0], STATES) if by_factor else 0.0,
    temperature=rng.choice([0, 0, 0.8], STATES),
  )
  state = with_fields(state, canvas=canvas, block=block, row_step=block * 5)
  index = columns_of(state, cfg)
  logits = random_logits(rng, (*index.shape, cfg.model.vocab_size), cfg.model.mask_id).astype(np.float32)
  knobs, (noise, *_) = knob_rows(state), noise_of(state, index)

  def refer(row, z):
    return reference.parallel(
      rules_of(cfg),
      np.asarray(z, np.float64),
      index[row],
      noise[row],
      canvas=canvas[row],
      block=block[row],
      gen_length=gen_length[row],
      knobs=knobs[row],
    )

  return Stage(cfg=cfg, state=jax.tree.map(np.asarray, state), logits=logits, index=index, refer=refer)


def dream_stage(mask_prediction, alg, **knobs):
  cfg = make_config('dream', 8, mask_prediction=mask_prediction, alg=alg)
  rng = np.random.default_rng(3)
  gen_length = rng.choice([7, 8], STATES)
  canvas = random_canvas(rng, cfg, np.zeros(STATES, np.int32), gen_length, 0.7)
  pick = {name: rng.choice(values, STATES) for name, values in knobs.items()}
  state = make_state(
    cfg,
    STATES,
    seeds=rng.integers(0, 2**32, STATES),
    gen_length=gen_length,
    steps=rng.choice([2, 3, 4], STATES),
    **pick,
  )
  row_step = rng.integers(0, 2, STATES)
  state = with_fields(state, canvas=canvas, row_step=row_step, block_step=row_step)
  index = columns_of(state, cfg)
  logits = random_logits(rng, (*index.shape, cfg.model.vocab_size), cfg.model.mask_id).astype(np.float32)
  rows, (noise, _, uniform, order) = knob_rows(state), noise_of(state, index)

  def refer(row, z):
    return reference.dream(
      rules_of(cfg),
      np.asarray(z, np.float64),
      index[row],
      noise[row],
      canvas=canvas[row],
      row_step=row_step[row],
      gen_length=gen_length[row],
      alg=alg,
      knobs=rows[row],
      order=order[row],
      uniform=uniform[row],
    )

  return Stage(cfg=cfg, state=jax.tree.map(np.asarray, state), logits=logits, index=index, refer=refer)


# A decision nearer than this, or a margin as far off, may come out otherwise by rounding of log-odds up to 44.
SABER_NEAR = 2e-5


def saber_step(state, cfg, row, knobs, z, noise):
  """The reference's step of one row of a state in numpy on logits [G, V], and what it leaves of the decoder's state."""
  memory = state.decoder
  z = np.asarray(z, np.float64)
  shared = {'canvas': state.canvas[row], 'gen_length': knobs['gen_length'], 'temperature': knobs['temperature']}
  wide = lambda values: np.asarray(values[row], np.float64)
  if cfg.model.logit_alignment == 'shifted':
    return reference.saber_shifted(
      rules_of(cfg),
      z,
      noise,
      first=wide(memory.first),
      row_step=int(state.row_step[row]),
      steps=knobs['steps'],
      penalty=knobs['eos_penalty'],
      pad_id=cfg.model.pad_id,
      **shared,
    )
  return reference.saber_same_position(
    rules_of(cfg),
    z,
    noise,
    pending=memory.pending[row],
    kept=wide(memory.kept),
    previous=wide(memory.previous),
    block=int(state.block[row]),
    least=knobs['min_accept'],
    **shared,
  )


def saber_stage(alignment, mask_prediction, make):
  shifted = alignment == 'shifted'
  cfg = make_config('saber', 14, 14 if shifted else 8, alignment=alignment, mask_prediction=mask_prediction)
  rng = np.random.default_rng(1)
  gen_length = rng.choice([13, 14], STATES)
  state = make_state(
    cfg,
    STATES,
    seeds=rng.integers(0, 2**32, STATES),
    gen_length=gen_length,
    steps=rng.integers(4, 20, STATES),
    min_accept=rng.choice([1, 2, 2, 3, 4], STATES),
    eos_penalty=rng.choice([0, 0.5, 2], STATES),
    temperature=rng.choice([0, 0, 0.8], STATES),
  )
  block = rng.integers(0, 1 if shifted else 2, STATES)
  column = np.arange(14)
  end = np.minimum((block + 1) * cfg.block_length, gen_length)[:, None]
  masked = (rng.random((STATES, 14)) < rng.choice([0.3, 0.7], (STATES, 1))) | (column >= end)
  masked[np.arange(STATES), block * cfg.block_length] = True
  canvas = np.where(masked, cfg.model.mask_id, rng.integers(0, cfg.model.mask_id - 1, masked.shape)).astype(np.int32)
  spread = 8 if make is random_logits else 40
  confidence = lambda: reference.deficit(rng.uniform(0, spread, masked.shape))
  logits = make(rng, (STATES, 14, cfg.model.vocab_size), cfg.model.mask_id)
  # Some masks were committed before.
  kept = np.where((~masked | (rng.random(masked.shape) < 0.3)) & (column < end), confidence(), np.inf)
  if shifted:
    # Standing tokens are mostly still the probable ones.
    token = np.where(masked, 0, canvas)[..., None]
    height = np.where(
      masked[..., None], np.take_along_axis(logits, token, axis=-1), rng.uniform(0, spread, token.shape)
    )
    np.put_along_axis(logits, token, height, axis=-1)
    memory = {'first': kept}
  else:
    predicted = masked & (rng.random(masked.shape) < 0.1) & (column < end) & (column != block[:, None] * 8)
    pending = masked & ~(predicted & cfg.allows_mask) & (column < gen_length[:, None])
    previous = np.where(column < end, confidence(), np.inf)
    # Some states stand at the first step of all, or of their block.
    kind = rng.random((STATES, 1))
    previous = np.where(kind < 0.2, 1, previous)
    previous = np.where((kind > 0.85) & (column >= block[:, None] * 8), np.inf, previous)
    memory = {'pending': pending, 'kept': np.where(kind < 0.1, np.inf, kept), 'previous': previous}
  state = with_fields(state, canvas=canvas, block=block, row_step=3 + 4 * block, **memory)
  state, index = jax.tree.map(np.asarray, state), columns_of(state, cfg)
  knobs, (noise, *_) = knob_rows(state), noise_of(state, index)
  return Stage(
    cfg=cfg,
    state=state,
    logits=logits.astype(np.float32),
    index=index,
    refer=lambda row, z: saber_step(state, cfg, row, knobs[row], z, noise[row])[0],
    near=SABER_NEAR,
    atol=SABER_NEAR,
  )


def run(it, rows, logits=None):
  """The update of these rows of a stage, numpy arrays; one batch size for all, so that a stage is one program."""
  rows = np.asarray(rows)
  fill = np.resize(np.arange(len(rows)), BATCH)
  logits = it.logits[rows] if logits is None else logits
  update = decide(jax.tree.map(lambda x: x[rows[fill]], it.state), logits[fill], cfg=it.cfg)
  return {key: np.asarray(update[key])[: len(rows)] for key in (*KEYS, 'margin')}


def equals(got, steps):
  """Bool per row: whether an update is what the reference's steps say."""
  equal = [(got[key] == np.stack([getattr(step, key) for step in steps])).all(axis=1) for key in KEYS]
  return np.all(equal, axis=0)


def inside(rng, size, shape):
  """Random changes with (max - min) / 2 at most `size` in every row: uniform ones, signs, and single tokens."""
  uniform = rng.uniform(-1, 1, shape)
  signs = rng.choice([-1.0, 1.0], shape)
  token = rng.integers(0, shape[-1], (*shape[:-1], 1))
  single = np.where(np.arange(shape[-1]) == token, 1.0, -1.0) * rng.choice([-1.0, 1.0], (*shape[:-1], 1))
  kind = np.arange(shape[0])[:, None, None] % 3
  delta = np.where(kind == 0, uniform, np.where(kind == 1, signs, single))
  # The same number added to a whole row is no part of the size and changes nothing.
  return size * delta + rng.uniform(-1, 1, (*shape[:-1], 1))

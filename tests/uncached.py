"""An uncached decoder in plain Python, and a plain forward: what the package is compared with.

Nothing is shared with the code under test but the transformer's `apply`, and not even that in `plain_forward`. The
loop feeds prompt, canvas and shadow whole at every step and decides row by row in float64.
"""

from collections.abc import Mapping
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from archer_jax.config import DecodeConfig
from archer_jax.config import ModelConfig
from archer_jax.model import Transformer
from archer_jax.types import DecodeState


@dataclasses.dataclass
class Row:
  """One request on its way; plain numbers and numpy arrays. WINO's re-mask bound starts as in a fresh block."""

  prompt: np.ndarray  # [P], left-padded
  valid: np.ndarray  # bool [P]
  canvas: np.ndarray  # [G]
  knobs: dict
  pending: np.ndarray  # bool [G], WINO's own list of open positions; unused by others
  block: int = 0
  block_step: int = 0
  step: int = 0
  last_accept: int = 30
  done: bool = False
  # Saber's deficits [G], infinite where there are none.
  kept: np.ndarray | None = None
  previous: np.ndarray | None = None

  @property
  def gen_length(self) -> int:
    return self.knobs['gen_length']

  def block_columns(self, cfg: DecodeConfig) -> list[int]:
    start = self.block * cfg.block_length
    return list(range(start, min(start + cfg.block_length, self.gen_length)))


def rows_of(state: DecodeState) -> list[Row]:
  """The rows of a state."""
  state = jax.tree.map(np.asarray, state)
  rows = []
  for b in range(state.canvas.shape[0]):
    knobs = {field.name: getattr(state.knobs, field.name)[b].item() for field in dataclasses.fields(state.knobs)}
    row = Row(
      prompt=state.prompt_tokens[b],
      valid=state.prompt_valid[b],
      canvas=state.canvas[b].copy(),
      knobs=knobs,
      pending=getattr(state.decoder, 'pending', np.zeros_like(state.canvas, bool))[b].copy(),
      block=state.block[b].item(),
      block_step=state.block_step[b].item(),
      step=state.row_step[b].item(),
      done=state.done[b].item(),
    )
    if (kept := getattr(state.decoder, 'kept', getattr(state.decoder, 'first', None))) is not None:
      row.kept = kept[b].astype(np.float64)
      row.previous = getattr(state.decoder, 'previous', kept)[b].astype(np.float64)
    rows.append(row)
  return rows


def shadow_length(cfg: DecodeConfig) -> int:
  """Rows behind the canvas that a forward feeds."""
  return cfg.block_length if cfg.decoder == 'wino' else 0


def layout(row: Row, cfg: DecodeConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Tokens [T], positions [T] and mask [T, T] of prompt, canvas and shadow, written out query by query."""
  prompt, canvas, shadow = len(row.prompt), cfg.canvas_length, shadow_length(cfg)
  twins = [row.block * cfg.block_length + i for i in range(shadow)]
  pads = prompt - int(row.valid.sum())
  tokens = np.concatenate([row.prompt, row.canvas, np.full(shadow, cfg.model.mask_id)]).astype(np.int32)
  columns = np.concatenate([np.arange(prompt + canvas), prompt + np.array(twins, int)])
  positions = np.maximum(columns - pads, 0).astype(np.int32)
  keys = np.concatenate([row.valid, np.arange(canvas) < row.gen_length])
  # Past the vocabulary is padding.
  is_real = np.concatenate([keys, np.array(twins, int) < row.gen_length])
  tokens = np.where(is_real, tokens, cfg.model.vocab_size).astype(np.int32)
  mask = np.zeros((len(tokens), len(tokens)), bool)
  mask[:, : prompt + canvas] = keys
  for i, twin in enumerate(twins):
    query = prompt + canvas + i
    if twin < canvas:
      mask[query, prompt + twin] = False
    for j, other in enumerate(twins):
      mask[query, prompt + canvas + j] = other < row.gen_length and (cfg.shadow == 'official' or i == j)
  return tokens, positions, mask


def head_rows(row: Row, cfg: DecodeConfig) -> np.ndarray:
  """Rows whose logits are read: the decision columns, then the shadow. Columns past the canvas repeat its last row."""
  prompt = len(row.prompt)
  if cfg.model.logit_alignment == 'shifted':
    rows = [prompt + column - 1 for column in range(cfg.canvas_length)]
    if not row.valid.any():
      rows[0] = prompt
  elif cfg.mask_prediction == 'official' or cfg.decoder == 'saber':
    rows = [prompt + column for column in range(cfg.canvas_length)]
  else:
    start = row.block * cfg.block_length
    rows = [prompt + min(start + i, cfg.canvas_length - 1) for i in range(cfg.block_length)]
  return np.array(rows + [prompt + cfg.canvas_length + i for i in range(shadow_length(cfg))], np.int32)


def _forward(params, tokens, positions, mask, rows, model):
  return Transformer(model).apply({'params': params}, tokens, positions, mask, head_rows=rows)[0]


def _guided(params, tokens, blind, positions, mask, rows, scale, model):
  logits, unguided = (_forward(params, fed, positions, mask, rows, model) for fed in (tokens, blind))
  scale = scale[:, None, None]
  return jnp.where(scale > 0, unguided + (scale + 1) * (logits - unguided), logits)


@functools.cache
def _jitted(function, options):
  return jax.jit(function, static_argnames='model', compiler_options=dict(options))


def full_logits(params, rows: list[Row], cfg: DecodeConfig, options: Mapping) -> np.ndarray:
  """Float32 [B, R + shadow, V] of a forward over everything, jitted with these compiler options."""
  options = tuple(options.items())
  tokens, positions, mask = (np.stack(part) for part in zip(*(layout(row, cfg) for row in rows), strict=True))
  asked = np.stack([head_rows(row, cfg) for row in rows])
  if not cfg.guidance:
    return np.asarray(_jitted(_forward, options)(params, tokens, positions, mask[:, None], asked, model=cfg.model))
  blind = tokens.copy()
  length = len(rows[0].prompt)
  blind[:, :length] = np.where(blind[:, :length] < cfg.model.vocab_size, cfg.model.mask_id, blind[:, :length])
  scale = np.array([row.knobs['cfg_scale'] for row in rows], np.float32)
  return np.asarray(
    _jitted(_guided, options)(params, tokens, blind, positions, mask[:, None], asked, scale, model=cfg.model)
  )


def decode_uncached(
  params, state: DecodeState, cfg: DecodeConfig, options: Mapping
) -> list[tuple[np.ndarray, np.ndarray, list[bool]]]:
  """Every step's canvas [B, G] after it, its logits, and which rows took it. Temperature 0, no early stop."""
  rows = rows_of(state)
  steps = []
  while not all(row.done for row in rows):
    logits = full_logits(params, rows, cfg, options)
    took = [not row.done for row in rows]
    for row, z in zip(rows, logits, strict=True):
      if not row.done:
        advance(row, z.astype(np.float64), cfg)
    steps.append((np.stack([row.canvas for row in rows]), logits, took))
  return steps


def advance(row: Row, z: np.ndarray, cfg: DecodeConfig) -> None:
  """One step of one row, in place, from its logits [R + shadow, V]."""
  block_done = {'wino': _wino, 'llada': _llada, 'dream': _dream, 'saber': _saber}[cfg.decoder](row, z, cfg)
  row.step += 1
  row.block_step += 1
  if block_done:
    row.block, row.block_step, row.last_accept = row.block + 1, 0, 30
    columns = row.block_columns(cfg)
    if cfg.decoder == 'wino':
      row.pending[:] = False
      row.pending[columns] = row.canvas[columns] == cfg.model.mask_id
    row.done = not columns


def candidate(z: np.ndarray, cfg: DecodeConfig) -> int:
  z = z.copy()
  if cfg.mask_prediction == 'never':
    z[cfg.model.mask_id] = -np.inf
  return int(np.argmax(z))


def odds(z: np.ndarray, token: int) -> float:
  """Log-odds of a token against all others."""
  return z[token] - np.logaddexp.reduce(np.delete(z, token))


def _best(score: dict[int, float], count: int) -> list[int]:
  return sorted(score, key=lambda column: (-score[column], column))[:count]


def _wino(row: Row, z: np.ndarray, cfg: DecodeConfig) -> bool:
  block, start = row.block_columns(cfg), row.block * cfg.block_length
  logit = lambda p: -np.inf if p <= 0 else np.inf if p >= 1 else np.log(p) - np.log1p(-p)
  token = {c: candidate(z[c - start], cfg) for c in block if row.pending[c]}
  score = {c: odds(z[c - start], t) for c, t in token.items()}
  most = min(max(int(np.float32(0.7) * np.float32(len(score))), 5), row.knobs['max_accept'])
  passed = sum(s > logit(row.knobs['threshold']) for s in score.values())
  accept = _best(score, min(max(passed, 1), most))

  remask = []
  if len(accept) > 1:
    support = {c: odds(z[cfg.block_length + c - start], row.canvas[c]) for c in block if not row.pending[c]}
    doubtful = {c: -s for c, s in support.items() if s < logit(row.knobs['threshold_back'])}
    remask = _best(doubtful, min(len(doubtful), row.last_accept - 1))
  for column in accept:
    row.canvas[column], row.pending[column] = token[column], False
  for column in remask:
    row.canvas[column], row.pending[column] = cfg.model.mask_id, True
  row.last_accept = len(accept)
  return not row.pending[block].any()


def _llada(row: Row, z: np.ndarray, cfg: DecodeConfig) -> bool:
  block, start = row.block_columns(cfg), row.block * cfg.block_length
  blocks = -(-row.gen_length // cfg.block_length)
  steps = row.knobs['steps'] // blocks + (row.block < row.knobs['steps'] % blocks)
  count = len(block) // steps + (row.block_step < len(block) % steps)
  token = {c: candidate(z[c - start], cfg) for c in block if row.canvas[c] == cfg.model.mask_id}
  for column in _best({c: odds(z[c - start], t) for c, t in token.items()}, count):
    row.canvas[column] = token[column]
  return row.block_step + 1 == steps or not (row.canvas[block] == cfg.model.mask_id).any()


def _dream(row: Row, z: np.ndarray, cfg: DecodeConfig) -> bool:
  times = np.linspace(1, 1e-3, row.knobs['steps'] + 1, dtype=np.float32)
  masks = [c for c in range(row.gen_length) if row.canvas[c] == cfg.model.mask_id]
  last = row.step + 1 == row.knobs['steps']
  count = len(masks) if last else int(np.float32(len(masks)) * (1 - times[row.step + 1] / times[row.step]))
  token = {c: candidate(z[c], cfg) for c in masks}
  score = {}
  for column in masks:
    scores = z[column].copy()
    if cfg.mask_prediction == 'never':
      scores[cfg.model.mask_id] = -np.inf
    log_p = scores - np.logaddexp.reduce(scores)
    log_p = log_p[np.isfinite(log_p)]
    score[column] = np.sum(np.exp(log_p) * log_p) if cfg.alg == 'entropy' else odds(z[column], token[column])
  for column in _best(score, count):
    row.canvas[column] = token[column]
  return last or len(masks) <= count


def _saber(row: Row, z: np.ndarray, cfg: DecodeConfig) -> bool:
  """Both rules, without noise; of masks that stay predicted only with `never`, where there are none."""
  shifted = cfg.model.logit_alignment == 'shifted'
  end = row.gen_length if shifted else min((row.block + 1) * cfg.block_length, row.gen_length)
  least = 2 if shifted else row.knobs['min_accept']
  deficit = lambda odds: np.exp(-np.logaddexp(0, odds))
  lowered = z.copy()
  if shifted:
    t = np.linspace(1, 1e-3, row.knobs['steps'] + 1)[min(row.step, row.knobs['steps'])]
    lowered[:, cfg.model.pad_id] += row.knobs['eos_penalty'] * np.log(1 - t + 1e-3)
  masks = [c for c in range(end) if row.canvas[c] == cfg.model.mask_id]
  token = {c: candidate(lowered[c], cfg) for c in masks}
  score = {c: odds(lowered[c], t) for c, t in token.items()}
  known = row.kept[:end][np.isfinite(row.kept[:end])]
  accept = [c for c in masks if len(known) and deficit(score[c]) < known.mean()]
  if len(accept) < least:
    accept = _best(score, least)
  for column in accept:
    row.canvas[column] = token[column]
    if not shifted or np.isinf(row.kept[column]):
      row.kept[column] = deficit(score[column])

  standing = [c for c in range(end) if row.canvas[c] != cfg.model.mask_id]
  block_done = len(accept) == len(masks)
  now = {c: odds(z[c], int(np.argmax(z[c]))) for c in range(end)}
  if not block_done and shifted:
    doubt = {c: -odds(z[c], row.canvas[c]) for c in standing}
    remask = _best(doubt, max(1, min(-(-len(accept) // 8), len(accept) - 1)))
  elif not block_done:
    most = max(least, len(accept))
    fall = {c: deficit(now[c]) - row.previous[c] for c in standing if np.isfinite(row.previous[c])}
    if all(row.previous[c] == 1 for c in fall):
      # A deficit of 1 would swallow the others.
      fall = {c: -now[c] for c in fall}
    remask = _best(fall, min(max(least // 2, -(-most // 8)), most - 1))
  for column in remask if not block_done else ():
    row.canvas[column] = cfg.model.mask_id
  row.previous[:] = np.inf
  row.previous[:end] = [deficit(now[c]) for c in range(end)]
  return block_done


def plain_forward(
  params, model: ModelConfig, tokens, positions, mask, kept=None
) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
  """The transformer of one row in numpy float64: logits [T, V], and keys and values [T, K, H] of every layer.

  With `kept`, every query sees those keys and values (a layer each, [P, K, H]) in the place of its first P ones.
  """
  params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  norm = lambda x, scale: x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + model.norm_eps) * scale
  half = model.head_dim // 2
  angle = np.asarray(positions)[:, None, None] * model.rope_theta ** (-np.arange(half) * 2.0 / model.head_dim)
  cos, sin = np.cos(angle), np.sin(angle)

  def rotate(x):
    low, high = x[..., :half], x[..., half:]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

  def project(x, weights):
    return np.tensordot(x, weights['kernel'], 1) + weights.get('bias', 0.0)

  embedding = np.asarray(params['embedding'])
  x = np.concatenate([embedding, np.zeros_like(embedding[:1])])[np.asarray(tokens)]
  fresh = []
  for layer in range(model.n_layers):
    block = params[f'blocks_{layer}']
    normed = norm(x, block['attn_norm']['scale'])
    q, k, v = (project(normed, block['attn'][name]) for name in ('q_proj', 'k_proj', 'v_proj'))
    if model.qk_norm:
      q, k = norm(q, block['attn']['q_norm']['scale']), norm(k, block['attn']['k_norm']['scale'])
    q, k = rotate(q), rotate(k)
    fresh.append((k.copy(), v.copy()))
    if kept is not None:
      prompt = kept[layer][0].shape[0]
      k[:prompt], v[:prompt] = kept[layer]
    k, v = (np.repeat(part, model.n_heads // model.n_kv_heads, axis=1) for part in (k, v))
    scores = np.einsum('tnh,snh->nts', q, k) / np.sqrt(model.head_dim)
    # Not minus infinity: a query without any key stays finite, and is not read.
    scores = np.where(mask, scores, -1e30)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    x = x + np.einsum('tnh,nhd->td', np.einsum('nts,snh->tnh', weights, v), block['attn']['o_proj']['kernel'])
    normed = norm(x, block['mlp_norm']['scale'])
    gate, up = (project(normed, block['mlp'][name]) for name in ('gate_proj', 'up_proj'))
    x = x + project(gate / (1 + np.exp(-gate)) * up, block['mlp']['down_proj'])
  return norm(x, params['final_norm']['scale']) @ params['head']['kernel'], fresh

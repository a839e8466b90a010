"""Log-likelihood of an answer under a masked diffusion model, by Monte Carlo.

A masked diffusion model bounds log p(answer | prompt) from below by the mean over l, uniform in 1..L, and over which l
of the L answer tokens are masked, of L / l times the log-probabilities of the masked tokens (arXiv 2502.09992, section
2.4 and appendix B.5). For an answer of one token it is that token's exact log-probability.

Axes: B batch, P prompt, G canvas, V vocab.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import functools
import itertools
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from archer_jax import specs
from archer_jax.config import ModelConfig
from archer_jax.engine.batching import CANVAS_LENGTHS
from archer_jax.engine.batching import PROMPT_LENGTHS
from archer_jax.engine.batching import bucket
from archer_jax.model import Transformer
from archer_jax.model.sequence import Inputs
from archer_jax.model.sequence import head_rows
from archer_jax.model.sequence import lay_out
from archer_jax.numerics import position_gumbel
from archer_jax.numerics import position_keys
from archer_jax.numerics import rank_descending
from archer_jax.types import Views

# Streams of randomness beside those of `numerics`: which tokens a sample masks, and how many.
MASK_STREAM = 3
COUNT_STREAM = 4


def draw_masks(seeds: Array, sample: Array, n_samples: Array, lengths: Array, width: int) -> tuple[Array, Array]:
  """Which answer tokens a sample masks.

  The numbers of masks of an answer's samples are stratified: sample j of n draws from the j-th of n equal parts of a
  shifted unit interval. Each is uniform in 1..L, but their mean hardly varies.

  Args:
    seeds: uint32 [B]; a row's masks depend on its seed, sample and length alone.
    sample: int32 [B], which of the samples.
    n_samples: int32 [B], how many samples the row's answer has.
    lengths: int32 [B], L, 0 for filler.
    width: G.

  Returns:
    bool [B, G], True = masked, and float32 [B] weights L / l.
  """
  column = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (seeds.shape[0], width))
  first = jnp.zeros_like(column[:, :1])
  shift = jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(
    position_keys(seeds, COUNT_STREAM, first[:, 0], first)[:, 0]
  )
  length = lengths.astype(jnp.float32)
  share = (shift + sample.astype(jnp.float32) / n_samples.astype(jnp.float32)) % jnp.float32(1)
  # A share just below 1 can round up to the whole length.
  count = jnp.minimum(1 + jnp.floor(share * length), length)
  noise = position_gumbel(seeds, MASK_STREAM, sample, column)
  rank = rank_descending(noise, column < lengths[:, None])
  return rank < count.astype(jnp.int32)[:, None], length / jnp.maximum(count, jnp.float32(1))


@functools.partial(jax.jit, static_argnames=('config', 'guidance'))
def likelihood_terms(
  params: dict,
  prompt_tokens: Array,
  prompt_valid: Array,
  answer_tokens: Array,
  lengths: Array,
  seeds: Array,
  sample: Array,
  n_samples: Array,
  cfg_scale: Array,
  *,
  config: ModelConfig,
  guidance: bool,
) -> Array:
  """One sample of the bound per row; the mean over a row's samples estimates it without bias.

  Args:
    params: the model's parameters.
    prompt_tokens: int32 [B, P], left-padded.
    prompt_valid: bool [B, P], False at padding.
    answer_tokens: int32 [B, G], padded on the right.
    lengths: int32 [B], tokens of the answer, 0 for filler.
    seeds: uint32 [B].
    sample: int32 [B], which of the samples, from 0.
    n_samples: int32 [B], how many samples the row's answer has.
    cfg_scale: float32 scalar, read with guidance: the unconditional row's prompt is all masks.
    config: the model's config.
    guidance: whether an unconditional forward rides along.

  Returns:
    float32 [B] in nats.
  """
  width = answer_tokens.shape[1]
  masked, weight = draw_masks(seeds, sample, n_samples, lengths, width)
  column = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), masked.shape)
  canvas = jnp.where(masked, config.mask_id, answer_tokens)

  def logits(prompt):
    inputs = Inputs(
      prompt_tokens=prompt, prompt_valid=prompt_valid, canvas=canvas, canvas_valid=column < lengths[:, None]
    )
    rows = lay_out(inputs, None, config)
    asked = head_rows(inputs, Views(columns=column), inputs.prompt_length, config)
    model = Transformer(config)
    return model.apply({'params': params}, rows.tokens, rows.positions, rows.attn_mask, head_rows=asked)[0]

  z = logits(prompt_tokens)
  if guidance:
    unguided = logits(jnp.full_like(prompt_tokens, config.mask_id))
    z = unguided + (cfg_scale + 1) * (z - unguided)
  own = jnp.take_along_axis(z, answer_tokens[..., None], axis=-1)[..., 0]
  log_p = own - jax.nn.logsumexp(z, axis=-1)
  return weight * jnp.sum(jnp.where(masked, log_p, 0), axis=1)


def log_likelihoods(
  model: Transformer,
  params: dict,
  pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
  *,
  seeds: Sequence[int],
  n_samples: int = 128,
  cfg_scale: float = 0.0,
  batch_size: int = 8,
  progress: Callable[[int], Any] = lambda count: None,
) -> np.ndarray:
  """Estimates log p(answer | prompt) of every pair.

  Args:
    model: from `archer_jax.load`, like the next.
    params: its parameters.
    pairs: token ids of prompt and answer; a prompt may be empty.
    seeds: one per pair, unsigned 32-bit. Pairs with the same seed and length have the same masks, which takes noise out
      of their comparison.
    n_samples: of each answer; one of a single token takes one, since all its samples are equal. 128 is what LLaDA uses.
    cfg_scale: classifier-free guidance; 0 is off.
    batch_size: forwards run together; beyond rounding no result depends on it, nor on the other pairs.
    progress: is told the number of samples after each batch.

  Returns:
    float64 [N] in nats.

  Raises:
    ValueError: a pair that is no pair of token ids or too long, naming it by its index; n_samples or batch_size below
      1; guidance of a model that has none.
  """
  for name, value in (('n_samples', n_samples), ('batch_size', batch_size)):
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
      raise ValueError(f'{name} must be a positive integer, got {value!r}')
  if cfg_scale > 0 and not _has_guidance(model.config):
    raise ValueError(
      f'guidance (cfg_scale > 0) must not be asked of a model with {model.config.logit_alignment} logits, whose '
      f'decoders have none, got {cfg_scale}'
    )
  if len(seeds) != len(pairs):
    raise ValueError(f'seeds must be as many as pairs, {len(pairs)}, got {len(seeds)}')
  for index, pair in enumerate(pairs):
    _check_pair(index, *pair, model.config)
  terms = [np.zeros(1 if len(answer) == 1 else n_samples) for _, answer in pairs]
  rows = [(index, sample) for index, samples in enumerate(terms) for sample in range(len(samples))]
  for shape, batch in _batches(rows, pairs, batch_size):
    arrays = _arrays(batch, pairs, seeds, [len(samples) for samples in terms], (batch_size, *shape), model.config)
    terms_of = likelihood_terms(params, *arrays, np.float32(cfg_scale), config=model.config, guidance=cfg_scale > 0)
    values = jax.device_get(terms_of)
    for (index, sample), value in zip(batch, values, strict=False):
      terms[index][sample] = value
    progress(len(batch))
  return np.array([samples.mean() for samples in terms])


def _has_guidance(config: ModelConfig) -> bool:
  decoders = specs.specs(specs.DECODERS)
  return any(spec.guidance and config.logit_alignment in spec.alignments for spec in decoders)


def _check_pair(index: int, prompt: Sequence[int], answer: Sequence[int], config: ModelConfig) -> None:
  if not len(answer):
    raise ValueError(f'pairs[{index}]: the answer must not be empty')
  for token in (*prompt, *answer):
    if not 0 <= token < config.vocab_size or token == config.mask_id:
      raise ValueError(
        f'pairs[{index}] must be token ids in [0, {config.vocab_size}) without the mask {config.mask_id}, got {token}'
      )
  if len(prompt) + len(answer) > config.max_length:
    raise ValueError(
      f'pairs[{index}]: {len(prompt)} prompt and {len(answer)} answer tokens must together be at most the '
      f'{config.max_length} tokens of the model'
    )


def _batches(
  rows: list[tuple[int, int]], pairs: Sequence[tuple[Sequence[int], Sequence[int]]], batch_size: int
) -> Iterator[tuple[tuple[int, int], list[tuple[int, int]]]]:
  """Batches of rows that share a program, with the lengths of its prompt and canvas."""

  def shape(row):
    prompt, answer = pairs[row[0]]
    return bucket('prompt', len(prompt), PROMPT_LENGTHS), bucket('answer', len(answer), CANVAS_LENGTHS)

  for lengths, group in itertools.groupby(sorted(rows, key=shape), key=shape):
    while batch := list(itertools.islice(group, batch_size)):
      yield lengths, batch


def _arrays(batch, pairs, seeds, counts, shape: tuple[int, int, int], model: ModelConfig) -> tuple[np.ndarray, ...]:
  """Arguments of `likelihood_terms` from prompts to n_samples, filled up to B rows of P and G columns."""
  n_rows, prompt_length, canvas_length = shape
  prompt_tokens = np.zeros((n_rows, prompt_length), np.int32)
  prompt_valid = np.zeros((n_rows, prompt_length), bool)
  answers = np.zeros((n_rows, canvas_length), np.int32)
  lengths, sample = np.zeros(n_rows, np.int32), np.zeros(n_rows, np.int32)
  row_seeds, n_samples = np.zeros(n_rows, np.uint32), np.ones(n_rows, np.int32)
  for row, (index, number) in enumerate(batch):
    prompt, answer = pairs[index]
    prompt_tokens[row, prompt_length - len(prompt) :] = prompt
    prompt_valid[row, prompt_length - len(prompt) :] = True
    answers[row, : len(answer)] = answer
    lengths[row], sample[row], row_seeds[row], n_samples[row] = len(answer), number, seeds[index], counts[index]
  return prompt_tokens, prompt_valid, answers, lengths, row_seeds, sample, n_samples

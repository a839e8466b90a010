"""What a program is made from: the model's shape, and the names and switches of its methods.

Plain Python: nothing here imports JAX, so that a command line can check its flags before it pays for that import.
"""

import dataclasses
from typing import TYPE_CHECKING

from archer_jax import specs
from archer_jax.specs import SAME_POSITION
from archer_jax.specs import SHIFTED

if TYPE_CHECKING:
  from archer_jax.decoders.base import Decoder
  from archer_jax.reuse.base import Reuse

DTYPES = ('float32', 'bfloat16')
DEFAULT_REUSE = 'prompt'
# Decoder of a model where nobody names one, by its logit alignment.
DEFAULT_DECODERS = {SAME_POSITION: 'wino', SHIFTED: 'dream'}


def decoders_for(alignment: str) -> list[str]:
  """Names of the decoders that can read logits of that alignment."""
  return [spec.name for spec in specs.specs(specs.DECODERS) if alignment in spec.alignments]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """Shape and ids of one masked diffusion transformer.

  Attributes:
    family: `llada` or `dream`.
    vocab_size: rows of the embedding and columns of the head (V).
    d_model, n_layers, n_heads, n_kv_heads, head_dim, d_ff: D, L, N, K, H and F of the axis alphabet.
    rope_theta: base of the rotary frequencies.
    norm_eps: epsilon of RMSNorm.
    qkv_bias: whether the q, k and v projections carry a bias.
    qk_norm: whether every head's queries and keys pass an RMSNorm of their own before RoPE, so that the logits of
      attention cannot grow without bound. Neither published family has it; the bundled model trains faster with it.
    max_length: largest number of prompt and canvas tokens together.
    mask_id, eos_id: token ids.
    pad_id: token id, or None; padding is never read, but `saber` may lower this token's logit.
    logit_alignment: `same_position`, or `shifted` where position i is read from row i - 1.
  """

  family: str
  vocab_size: int
  d_model: int
  n_layers: int
  n_heads: int
  n_kv_heads: int
  head_dim: int
  d_ff: int
  rope_theta: float
  norm_eps: float
  qkv_bias: bool
  max_length: int
  mask_id: int
  eos_id: int
  pad_id: int | None
  logit_alignment: str
  qk_norm: bool = False

  def __post_init__(self):
    for field in ('vocab_size', 'd_model', 'n_layers', 'n_heads', 'n_kv_heads', 'head_dim', 'd_ff', 'max_length'):
      if getattr(self, field) < 1:
        raise ValueError(f'{field} must be positive, got {getattr(self, field)}')
    if self.n_heads % self.n_kv_heads:
      raise ValueError(f'n_heads must be a multiple of n_kv_heads, got {self.n_heads} and {self.n_kv_heads}')
    if self.head_dim % 2:
      raise ValueError(f'head_dim must be even for rotary embeddings, got {self.head_dim}')
    for field in ('mask_id', 'eos_id', 'pad_id'):
      value = getattr(self, field)
      if value is None and field == 'pad_id':
        continue
      if not 0 <= value < self.vocab_size:
        raise ValueError(f'{field} must be in [0, {self.vocab_size}), got {value}')
    if self.eos_id == self.mask_id:
      raise ValueError(f'eos_id must be another token than the mask, got {self.eos_id} for both')
    if self.logit_alignment not in (SAME_POSITION, SHIFTED):
      raise ValueError(f'logit_alignment must be {SAME_POSITION} or {SHIFTED}, got {self.logit_alignment!r}')

  @property
  def default_decoder(self) -> str:
    return DEFAULT_DECODERS[self.logit_alignment]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Program:
  """What shapes a decoding program; frozen and hashable, so it can be a static argument of `jax.jit`.

  Numbers that a user may tune are not here but in `Knobs`, traced and per row. Beside the attributes below there is a
  field for every switch of `specs.switches()`, such as `mask_prediction`, `early_stop`, `shadow` or `anchors`.

  Attributes:
    model: the model's config.
    decoder: name of a module of `decoders`: which tokens a step commits and takes back.
    canvas_length: G, the columns of the canvas; a row uses its first `knobs.gen_length` ones.
    block_length: columns of a block; the whole canvas for decoders without blocks.
    reuse: name of a module of `reuse`: what is kept between steps.
    dtype: dtype of parameters, matmuls and kept keys and values, `float32` or `bfloat16`.
    guidance: whether an unconditional forward rides along (classifier-free guidance).
    end_ids: the end tokens, by default the model's own.
    unknown_ids: ranges (first, past the last) of ids that stand for no text, as where a vocabulary is padded beyond its
      tokenizer. They are never written, but keep their share of every probability.
    logprobs: whether the state keeps every token's log-probability and the step that committed it.
    trace_steps: length of the per-step records kept in the state, 0 for none.
  """

  model: ModelConfig
  decoder: str
  canvas_length: int
  block_length: int
  reuse: str = DEFAULT_REUSE
  dtype: str = 'float32'
  guidance: bool = False
  end_ids: tuple[int, ...] = ()
  unknown_ids: tuple[tuple[int, int], ...] = ()
  logprobs: bool = False
  trace_steps: int = 0

  def __post_init__(self):
    spec, alignment = specs.load(specs.DECODERS, self.decoder).spec, self.model.logit_alignment
    method = specs.load(specs.REUSE, self.reuse)
    # Before the decoder, which a method may imply.
    if alignment not in method.spec.alignments:
      fitting = [other.name for other in specs.specs(specs.REUSE) if alignment in other.alignments]
      raise ValueError(
        f'reuse must be one of {", ".join(fitting)} for a model with {alignment} logits, got {self.reuse!r}'
      )
    if alignment not in spec.alignments:
      *others, last = decoders_for(alignment)
      fitting = f'{", ".join(others)} or {last}' if others else last
      raise ValueError(f'decoder must be {fitting} for a model with {alignment} logits, got {self.decoder!r}')
    for name, switch in specs.switches().items():
      switch.check(name, getattr(self, name))
    if self.dtype not in DTYPES:
      raise ValueError(f'dtype must be one of {", ".join(DTYPES)}, got {self.dtype!r}')
    if self.canvas_length < 1:
      raise ValueError(f'canvas_length must be positive, got {self.canvas_length}')
    if not 1 <= self.block_length <= self.canvas_length:
      raise ValueError(f'block_length must be in [1, canvas_length={self.canvas_length}], got {self.block_length}')
    if alignment not in spec.block_alignments and self.block_length != self.canvas_length:
      raise ValueError(f'block_length must equal canvas_length for {self.decoder}, got {self.block_length}')
    for name, value in method.spec.implies.items():
      if getattr(self, name) != value:
        raise ValueError(f'{name} must be {value} with reuse {self.reuse}, got {getattr(self, name)!r}')
    if self.guidance and not spec.guidance:
      able = ' or '.join(other.name for other in specs.specs(specs.DECODERS) if other.guidance)
      raise ValueError(f'guidance (cfg_scale > 0) needs decoder {able}, got {self.decoder!r}')
    for token in self.end_ids:
      if not 0 <= token < self.model.vocab_size or token == self.model.mask_id:
        raise ValueError(f'end_ids must be token ids other than the mask {self.model.mask_id}, got {token}')
    if self.trace_steps < 0:
      raise ValueError(f'trace_steps must not be negative, got {self.trace_steps}')

  @property
  def decoder_method(self) -> 'Decoder':
    return specs.load(specs.DECODERS, self.decoder)

  @property
  def reuse_method(self) -> 'Reuse':
    return specs.load(specs.REUSE, self.reuse)

  @property
  def allows_mask(self) -> bool:
    """Whether the mask token itself may be predicted."""
    return self.mask_prediction == 'official'

  @property
  def seen(self) -> dict[str, str]:
    """Facts of a step that its decoder and its reuse method tell of, and their dtypes."""
    return {**self.reuse_method.spec.seen, **self.decoder_method.spec.seen}


DecodeConfig = dataclasses.make_dataclass(
  'DecodeConfig',
  [(name, type(switch.default), switch.default) for name, switch in specs.switches().items()],
  bases=(_Program,),
  frozen=True,
  kw_only=True,
)
DecodeConfig.__doc__, DecodeConfig.__module__ = _Program.__doc__, __name__

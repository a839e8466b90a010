"""What a program is made from: the model's shape, the decoder's switches and the table of tunable numbers.

Plain Python: nothing here imports JAX, so that a command line can check its flags before it pays for that import.
"""

from collections.abc import Mapping
import dataclasses
import numbers
from typing import Any

SAME_POSITION = 'same_position'
SHIFTED = 'shifted'

# Which decoder reads which logit alignment. Any other pair decodes garbage without an error, hence the table.
SUPPORTED_PAIRS = ((SAME_POSITION, 'wino'), (SAME_POSITION, 'llada'), (SHIFTED, 'dream'))


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
    mask_id, eos_id, pad_id: token ids.
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
  pad_id: int
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
      if not 0 <= getattr(self, field) < self.vocab_size:
        raise ValueError(f'{field} must be in [0, {self.vocab_size}), got {getattr(self, field)}')
    if self.logit_alignment not in (SAME_POSITION, SHIFTED):
      raise ValueError(f'logit_alignment must be {SAME_POSITION} or {SHIFTED}, got {self.logit_alignment!r}')

  @property
  def default_decoder(self) -> str:
    return 'wino' if self.logit_alignment == SAME_POSITION else 'dream'


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig:
  """What shapes a decoding program; frozen and hashable, so it can be a static argument of `jax.jit`.

  Numbers that a user may tune are not here but in `Knobs`, traced and per row.

  Attributes:
    model: the model's config.
    decoder: `wino`, `llada` or `dream`.
    canvas_length: G, the columns of the canvas; a row uses its first `knobs.gen_length` ones.
    block_length: columns of a block, and rows of WINO's shadow; the whole canvas for `dream`.
    dtype: dtype of parameters, matmuls and cache, `float32` or `bfloat16`.
    mask_prediction: `never` (the mask token is not a candidate) or `official` (as the public decoders).
    shadow: what WINO's verification rows see of each other, `official` (all) or `self`.
    remasking: order of the `llada` decoder, `low_confidence` or `random`.
    alg: order of the `dream` decoder, `origin`, `maskgit_plus`, `topk_margin` or `entropy`.
    guidance: whether an unconditional forward rides along (classifier-free guidance, `llada` only).
    suppress_eos: the end token is never written (`logits_eos_inf` of LLaDA).
    defer_end: end tokens are written last (`confidence_eos_eot_inf` of LLaDA).
    early_stop: whether a row ends at an end token that no mask stands before.
    end_ids: the end tokens.
    drift: the drift measure of the refresh rule, `token`, `embedding` or `hidden`.
    anchors: anchors per row whose prompt keys and values are kept, the active one among them.
    on_low_margin: what follows a reuse whose margin does not suffice, a refresh in the `next_step`, or one in the
      `same_step`, whose decision it replaces.
    trace_steps: length of the per-step records kept in the state, 0 for none.
  """

  model: ModelConfig
  decoder: str
  canvas_length: int
  block_length: int
  dtype: str = 'float32'
  mask_prediction: str = 'never'
  shadow: str = 'official'
  remasking: str = 'low_confidence'
  alg: str = 'entropy'
  guidance: bool = False
  suppress_eos: bool = False
  defer_end: bool = False
  early_stop: bool = True
  end_ids: tuple[int, ...] = ()
  drift: str = 'token'
  anchors: int = 1
  on_low_margin: str = 'next_step'
  trace_steps: int = 0

  def __post_init__(self):
    alignment = self.model.logit_alignment
    if (alignment, self.decoder) not in SUPPORTED_PAIRS:
      fitting = ' or '.join(decoder for pair, decoder in SUPPORTED_PAIRS if pair == alignment)
      raise ValueError(f'decoder must be {fitting} for a model with {alignment} logits, got {self.decoder!r}')
    for field, choices in CHOICES.items():
      if hasattr(self, field) and getattr(self, field) not in choices:
        raise ValueError(f'{field} must be one of {", ".join(choices)}, got {getattr(self, field)!r}')
    if self.canvas_length < 1:
      raise ValueError(f'canvas_length must be positive, got {self.canvas_length}')
    if not 1 <= self.block_length <= self.canvas_length:
      raise ValueError(f'block_length must be in [1, canvas_length={self.canvas_length}], got {self.block_length}')
    if self.decoder == 'dream' and self.block_length != self.canvas_length:
      raise ValueError(f'block_length must equal canvas_length for dream, got {self.block_length}')
    if self.guidance and self.decoder != 'llada':
      raise ValueError(f'guidance (cfg_scale > 0) needs decoder llada, got {self.decoder!r}')
    for token in self.end_ids:
      if not 0 <= token < self.model.vocab_size or token == self.model.mask_id:
        raise ValueError(f'end_ids must be token ids other than the mask {self.model.mask_id}, got {token}')
    if self.anchors < 1:
      raise ValueError(f'anchors must be at least 1, got {self.anchors}')
    if self.trace_steps < 0:
      raise ValueError(f'trace_steps must not be negative, got {self.trace_steps}')

  @property
  def shadow_length(self) -> int:
    """Rows of the verification view behind the canvas."""
    return self.block_length if self.decoder == 'wino' else 0

  @property
  def probe(self) -> int | None:
    """Layers before the hidden states that a forward must give; None where the drift needs none."""
    return self.model.n_layers // 2 if self.drift == 'hidden' else None

  @property
  def allows_mask(self) -> bool:
    """Whether the mask token itself may be predicted."""
    return self.mask_prediction == 'official'


# The choices of every named switch; `DecodeConfig`, the flags and their help read this one table.
CHOICES = {
  'decoder': ('wino', 'llada', 'dream'),
  'dtype': ('float32', 'bfloat16'),
  'mask_prediction': ('never', 'official'),
  'shadow': ('official', 'self'),
  'remasking': ('low_confidence', 'random'),
  'alg': ('origin', 'maskgit_plus', 'topk_margin', 'entropy'),
  'drift': ('token', 'embedding', 'hidden'),
  'on_low_margin': ('next_step', 'same_step'),
  'refresh': ('archer', 'always', 'once', 'interval', 'certified'),
}


@dataclasses.dataclass(frozen=True)
class KnobSpec:
  """One tunable number: its default, its range and who reads it.

  Attributes:
    default: value where nobody gave one; None means the row's gen_length.
    integer: whether it is a whole number (int32), else float32.
    low, high: the range, both ends included.
    decoders: the decoders that read it.
    help: one line for the command line.
  """

  default: float | int | None
  integer: bool
  low: float
  high: float
  help: str
  decoders: tuple[str, ...] = ('wino', 'llada', 'dream')

  def check(self, name: str, value: Any) -> float | int:
    """Returns `value` as int or float, or raises ValueError naming field, value and range."""
    kind = 'an integer' if self.integer else 'a number'
    # numpy's scalars are numbers too.
    wrong_type = isinstance(value, bool) or not isinstance(value, numbers.Integral if self.integer else numbers.Real)
    # `not (low <= value <= high)` also catches NaN.
    if wrong_type or not self.low <= value <= self.high:
      raise ValueError(f'{name} must be {kind} in [{self.low}, {self.high}], got {value!r}')
    return int(value) if self.integer else float(value)


_INT32_MAX = 2**31 - 1
# Far above any use, and products with logits stay finite.
_LARGE = 1_000_000

# Every number that is traced and per row. Order is that of the command line's help.
KNOBS: Mapping[str, KnobSpec] = {
  'gen_length': KnobSpec(128, True, 1, _INT32_MAX, 'tokens to generate'),
  'steps': KnobSpec(
    None,
    True,
    1,
    _INT32_MAX,
    'denoising steps of llada and dream, as far as masks are left (default: gen_length)',
    ('llada', 'dream'),
  ),
  'threshold': KnobSpec(0.6, False, 0, 1, 'wino commits tokens whose probability is above this', ('wino',)),
  'threshold_back': KnobSpec(0.9, False, 0, 1, 'wino takes back tokens verified below this probability', ('wino',)),
  'max_accept': KnobSpec(20, True, 1, _INT32_MAX, 'wino commits at most this many tokens a step', ('wino',)),
  'temperature': KnobSpec(0.0, False, 0, _LARGE, 'sampling temperature; 0 takes the best token'),
  'top_p': KnobSpec(1.0, False, 0, 1, 'dream samples from this mass of the best tokens; 1 is off', ('dream',)),
  'top_k': KnobSpec(0, True, 0, _INT32_MAX, 'dream samples from this many best tokens; 0 is off', ('dream',)),
  'cfg_scale': KnobSpec(0.0, False, 0, _LARGE, 'classifier-free guidance of llada; 0 is off', ('llada',)),
  'alg_temp': KnobSpec(0.0, False, 0, _LARGE, 'randomness of the order of dream; 0 is none', ('dream',)),
  'refresh_interval': KnobSpec(0, True, 0, _INT32_MAX, 'refresh at every so many steps of a row; 0 is never'),
  'refresh_at_block_start': KnobSpec(0, True, 0, 1, 'refresh at the first step of every block'),
  'drift_radius': KnobSpec(0.0, False, 0, 1, 'refresh when the canvas drifted further than this; 0 is never'),
  'min_margin': KnobSpec(0.0, False, 0, _LARGE, 'refresh after a reuse step with a smaller margin; 0 is never'),
  'kappa': KnobSpec(
    0.0, False, 0, _LARGE, 'refresh after a reuse step whose margin is at most this times its drift; 0 is never'
  ),
  'max_age': KnobSpec(0, True, 0, _INT32_MAX, 'refresh when the kept prompt is this many steps old; 0 is never'),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RefreshPolicy:
  """Every schedule as one set of clauses; a row refreshes when any of them holds. 0 switches a clause off.

  A row without an anchor always refreshes.

  Attributes:
    interval: at the row's steps 0, interval, 2 interval, ... through all blocks; 1 is every step.
    max_age: when the kept prompt was used for this many steps, the refresh's own included; 1 is every step.
    drift_radius: when the canvas about to be read is further from its anchor than this, in [0, 1].
    min_margin: when the last step reused with a smaller margin and the canvas is not its anchor.
    at_block_start: at the first step of every block.
    kappa: when the last step reused with a margin of at most kappa times its drift, and the canvas is not its anchor.
  """

  interval: int = 0
  max_age: int = 0
  drift_radius: float = 0.0
  min_margin: float = 0.0
  at_block_start: bool = False
  kappa: float = 0.0

  def knobs(self) -> dict[str, float | int]:
    """The clauses under their knobs' names, checked.

    Raises:
      ValueError: a number out of its range, naming both.
    """
    values = {
      'refresh_interval': self.interval,
      'max_age': self.max_age,
      'drift_radius': self.drift_radius,
      'min_margin': self.min_margin,
      'refresh_at_block_start': int(self.at_block_start),
      'kappa': self.kappa,
    }
    return {name: KNOBS[name].check(name, value) for name, value in values.items()}


# The named rules; `interval` and `certified` have no numbers of their own, kappa is calibrated for a checkpoint.
POLICIES: Mapping[str, RefreshPolicy] = {
  'archer': RefreshPolicy(drift_radius=0.25),
  'always': RefreshPolicy(interval=1),
  'once': RefreshPolicy(),
  'interval': RefreshPolicy(),
  'certified': RefreshPolicy(),
}

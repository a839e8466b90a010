"""What each table decodes with, in the grammar of `--compare`; no JAX.

No list of methods stands here: decoders and reuse methods are those that there are, each method under the decoders
that it was published with.
"""

from collections.abc import Sequence

from archer_jax import specs
from archer_jax.config import DEFAULT_REUSE
from archer_jax.config import decoders_for

TABLES = ('main', 'radius', 'feedback', 'validity', 'activity', 'prompt_length', 'response_length')
# Of these nobody writes a number, since it is the whole answer's that the paper gives.
INFINITE = 'once+decoder=saber'
SABER = 'always+decoder=saber'
RADII = (1, 2, 4, 8, 16, 32)
# The largest distance that the paper probed is 14.
PROBED = 'archer:16+decoder=saber'
# Answers of tasks that do not say how long theirs are, such as those of files.
GEN_LENGTH = 256
# With what the paper ran a decoder, where that is not the decoder's own default.
_PUBLISHED = {'parallel': '+factor=1'}


def archer(k: int | None) -> str:
  """Archer on Saber, at K or at the default."""
  return f'archer{"" if k is None else f":{k}"}+decoder=saber'


def one_token(alignment: str) -> str:
  """The decoder with a schedule of steps, a token in each: llada, or dream for shifted models; nothing is kept."""
  names = decoders_for(alignment)
  return f'always+decoder={next(n for n in names if specs.load(specs.DECODERS, n).spec.number == "steps")}'


def main_labels(alignment: str, k: int | None) -> list[str]:
  """Saber and Archer on it, one token a step, every other decoder, and every reuse method as it was published."""
  decoders = decoders_for(alignment)
  named = lambda decoder: f'decoder={decoder}{_PUBLISHED.get(decoder, "")}'
  labels = [one_token(alignment), *(f'always+{named(decoder)}' for decoder in decoders)]
  for spec in specs.specs(specs.REUSE):
    if alignment in spec.alignments and spec.name != DEFAULT_REUSE:
      labels += [f'{spec.name}+{named(decoder)}' for decoder in spec.published if decoder in decoders]
  # The two that the paper is about stand last, as there.
  labels = [label for label in dict.fromkeys(labels) if label != SABER]
  return [*labels, SABER, archer(k)]


def radius_labels() -> list[str]:
  """Saber, and Archer at every radius; the last one refreshes in the first step alone."""
  return [SABER, *(archer(k) for k in RADII), INFINITE]


def labels(tables: Sequence[str], alignment: str, k: int | None) -> list[str]:
  """Every setting that any of the tables needs, once each."""
  needed = {
    'main': main_labels(alignment, k),
    'radius': radius_labels(),
    'validity': [PROBED],
  }
  others = [SABER, archer(k)]
  return list(dict.fromkeys(label for table in tables for label in needed.get(table, others)))

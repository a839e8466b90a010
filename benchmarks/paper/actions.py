"""What Saber does in a step, as it is before tokens are taken back; and Saber without taking any back.

Axes: B batch, G canvas.
"""

import dataclasses

from jax import Array
import jax.numpy as jnp

from archer_jax.config import DecodeConfig
from archer_jax.decoders.saber import METHOD
from archer_jax.decoders.saber import Falls
from archer_jax.decoders.saber import Saber
from archer_jax.types import DecodeState
from archer_jax.types import Update
from archer_jax.types import Views


def written(state: DecodeState, views: Views, logits: Array, update: Update, cfg: DecodeConfig) -> Array:
  """int32 [B, G]: the canvas with what a step of Saber committed, before it took anything back.

  A token that was committed and taken back in one step stands here alone.
  """
  return jnp.where(update.accepted, METHOD.candidates(state, views, logits, cfg).token, state.canvas)


@dataclasses.dataclass(frozen=True)
class _Kept(Saber):
  """Saber that takes nothing back; its threshold goes on as it would."""

  def update(self, state: DecodeState, views: Views, logits: Array, cfg: DecodeConfig) -> Update:
    update = super().update(state, views, logits, cfg)
    decoder = update.decoder
    if isinstance(decoder, Falls):
      decoder = decoder._replace(pending=decoder.pending & ~update.remasked)
    return dataclasses.replace(
      update,
      canvas=jnp.where(update.remasked, written(state, views, logits, update, cfg), update.canvas),
      remasked=jnp.zeros_like(update.remasked),
      decoder=decoder,
    )


_KEPT = _Kept()


class _WithoutRemasking(DecodeConfig):
  """The config of a program whose Saber takes nothing back."""

  @property
  def decoder_method(self) -> Saber:
    return _KEPT


def without_remasking(cfg: DecodeConfig) -> DecodeConfig:
  """The same program with a Saber that takes nothing back."""
  return _WithoutRemasking(**{field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)})

"""`lax.while_loop` around the step."""

import functools

import jax
from jax import lax
import jax.numpy as jnp

from archer_jax.config import DecodeConfig
from archer_jax.loop.step import decode_step
from archer_jax.loop.step import init_state
from archer_jax.types import DecodeState
from archer_jax.types import Knobs


@functools.partial(jax.jit, static_argnames='cfg', donate_argnames='state')
def decode(params, state: DecodeState, *, cfg: DecodeConfig) -> DecodeState:
  """Steps until every row is done; each row's number of steps is bounded by its decoder.

  The state is donated: its buffers become the result's, so it must not be used again.
  """
  return lax.while_loop(lambda s: jnp.any(~s.done), lambda s: decode_step(params, s, cfg=cfg)[0], state)


def step_limit(knobs: Knobs, cfg: DecodeConfig) -> int:
  """The largest number of steps that any of the rows can take, for sizing a trace; knobs must be concrete."""
  batch = knobs.gen_length.shape[0]
  prompt = jnp.zeros((batch, 0), jnp.int32)
  state = init_state(prompt, prompt.astype(bool), knobs, jnp.zeros((batch,), jnp.uint32), cfg=cfg)
  return int(cfg.decoder_method.step_limit(state, cfg).max())

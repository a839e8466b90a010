"""Archer: the canvas is always fed, the prompt's keys and values are kept until a clause asks for a refresh."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING
from typing import Any
from typing import ClassVar

from etils import epy

from archer_jax.reuse import base
from archer_jax.reuse.prompt.reasons import Reason
from archer_jax.specs import INT32_MAX
from archer_jax.specs import LARGE
from archer_jax.specs import Knob
from archer_jax.specs import ReuseSpec
from archer_jax.specs import Rule
from archer_jax.specs import Switch

with epy.lazy_imports():
  import jax
  from jax import lax
  import jax.numpy as jnp

  from archer_jax import numerics
  from archer_jax import types
  from archer_jax.model import kv
  from archer_jax.reuse import _passes as passes
  from archer_jax.reuse.prompt import clauses
  from archer_jax.reuse.prompt import drift as drifts
  from archer_jax.reuse.prompt import forward as forwards
  from archer_jax.reuse.prompt import pool
  from archer_jax.reuse.prompt import state as states

if TYPE_CHECKING:
  from collections.abc import Callable
  from collections.abc import Mapping

  from jax import Array

  from archer_jax.config import DecodeConfig
  from archer_jax.reuse.prompt.state import Anchors
  from archer_jax.reuse.prompt.state import Kept
  from archer_jax.specs import DecoderSpec
  from archer_jax.types import DecodeState
  from archer_jax.types import Knobs
  from archer_jax.types import Outcome
  from archer_jax.types import Plan
  from archer_jax.types import Update
  from archer_jax.types import Views

# Clauses that go with every rule but `always`.
_ALSO = ('refresh_at_block_start', 'max_age')


@dataclasses.dataclass(frozen=True)
class Prompt(base.Reuse):
  """Keeps the prompt (arXiv 2608.08086); every schedule is a set of clauses, of which any one asks for a refresh.

  A row without an anchor always refreshes. A clause whose number is 0 is off.
  """

  spec: ClassVar[ReuseSpec] = ReuseSpec(
    name='prompt',
    help='keeps the prompt until the answer has moved away from the state that it was computed with',
    knobs={
      'refresh_distance': Knob(
        0,
        True,
        0,
        INT32_MAX,
        'K: refresh when at least so many positions differ from those of the last refresh; 0 is never',
        told='that of the decoder',
      ),
      'drift_radius': Knob(
        0.0, False, 0, 1, 'refresh when the drift by embeddings or hidden states is larger than this; 0 is never'
      ),
      'min_margin': Knob(0.0, False, 0, LARGE, 'refresh after a reuse step with a smaller margin; 0 is never'),
      'kappa': Knob(
        0.0,
        False,
        0,
        LARGE,
        'refresh after a reuse step whose margin is at most this times its drift',
        told='what archer-calibrate found for the checkpoint',
      ),
      'refresh_interval': Knob(0, True, 0, INT32_MAX, 'refresh at every so many steps of a row; 0 is never'),
      'refresh_at_block_start': Knob(0, True, 0, 1, 'refresh at the first step of every block'),
      'max_age': Knob(0, True, 0, INT32_MAX, 'refresh when the kept prompt is this many steps old; 0 is never'),
    },
    switches={
      'drift': Switch(
        'token',
        'distance of the canvas from that of its last refresh: by changed tokens, embeddings or hidden states',
        ('token', 'embedding', 'hidden'),
      ),
      'on_low_margin': Switch(
        'next_step',
        'where a reuse step decided by too small a margin, refresh in the next step, or decide anew in the same',
        ('next_step', 'same_step'),
      ),
      'anchors': Switch(
        1,
        'kept prompts of a row, each of another canvas, of which a step takes the nearest; each takes as much memory',
      ),
    },
    seen={'distance': 'int32', 'drift': 'float32', 'age': 'int32'},
    rules={
      'archer': Rule(
        help='by distance',
        reads=('refresh_distance', 'drift', 'drift_radius', 'min_margin', 'anchors', 'on_low_margin', *_ALSO),
        number='refresh_distance',
      ),
      'always': Rule(help='in every step', fixed={'refresh_interval': 1}),
      'once': Rule(help='in the first', reads=_ALSO),
      'interval': Rule(
        help='by the clock', reads=('refresh_interval', *_ALSO), needs=('refresh_interval',), number='refresh_interval'
      ),
      'certified': Rule(
        help='by a certificate',
        reads=('refresh_distance', 'drift', 'drift_radius', 'kappa', 'quantile', 'anchors', 'on_low_margin', *_ALSO),
        number='kappa',
      ),
    },
    reasons=tuple(reason.name.lower() for reason in Reason),
  )

  def unread(self, name: str, switches: Mapping[str, Any]) -> str | None:
    drift = switches['drift']
    if name == 'drift_radius' and drift == 'token':
      return 'drift_radius must not be given with drift token, whose distance is a count: give refresh_distance'
    if name == 'refresh_distance' and drift != 'token':
      return f'refresh_distance must not be given with drift {drift}: it counts changed tokens; give drift_radius'
    return None

  def preset(self, refresh: str, switches: Mapping[str, Any], decoder: DecoderSpec) -> Mapping[str, float | int]:
    if refresh == 'archer' and switches['drift'] == 'token':
      return {'refresh_distance': decoder.refresh_distance}
    return super().preset(refresh, switches, decoder)

  def needs(self, refresh: str, switches: Mapping[str, Any]) -> Mapping[str, str]:
    if refresh == 'archer' and switches['drift'] != 'token':
      return {'drift_radius': f'refresh archer and drift {switches["drift"]}'}
    return super().needs(refresh, switches)

  def check(self, knobs: Knobs, cfg: DecodeConfig) -> None:
    # A distance is counted whatever the drift.
    if cfg.drift == 'token' and (value := float(knobs.drift_radius.max())) > 0:
      raise ValueError(f'drift_radius must be 0 with drift token in the config, got {value}: give refresh_distance')

  def init(self, prompt_valid: Array, cfg: DecodeConfig) -> tuple[Anchors, Kept]:
    return states.init(prompt_valid, cfg)

  def kept_axes(self, cfg: DecodeConfig) -> Kept:
    return states.axes(cfg)

  def kept_bytes(self, batch: int, prompt_length: int, cfg: DecodeConfig) -> int:
    rows = batch * cfg.anchors * passes.n_streams(cfg) * prompt_length
    return kv.kv_bytes(rows, cfg.model, cfg.dtype)

  def plan(self, params, state: DecodeState, cfg: DecodeConfig) -> Plan:
    return pool.plan(params, state, cfg)

  def forward(self, params, state: DecodeState, plan: Plan, views: Views, cfg: DecodeConfig) -> Outcome:
    logits, kept, work = forwards.forward(params, state, plan.kept, plan.reason != 0, views, cfg)
    drift = plan.seen['drift']
    if states.probe(cfg) is not None:
      # Of the canvas that was read; `hidden` knows it only now.
      seen = dataclasses.replace(state, reuse=plan.reuse, kept=kept)
      drift = drifts.DRIFTS[cfg.drift](params, seen, cfg)
    reuse = dataclasses.replace(plan.reuse, drift=drift)
    return types.Outcome(logits=logits, reuse=reuse, kept=kept, reason=plan.reason, work=work)

  def review(
    self,
    params,
    state: DecodeState,
    outcome: Outcome,
    update: Update,
    decide: Callable[[Array], Update],
    views: Views,
    cfg: DecodeConfig,
  ) -> tuple[Outcome, Update]:
    """With `same_step` the rows whose reuse decided by too small a margin are fed whole, and decide anew."""
    if cfg.on_low_margin != 'same_step':
      return outcome, update
    # Without a prompt every forward is a full one.
    exact = (outcome.reason != 0) | state.done | (not state.prompt_tokens.shape[1])
    seen = dataclasses.replace(state, reuse=outcome.reuse, kept=outcome.kept)
    unsure = jnp.where(exact, 0, clauses.is_unsure(seen, update.margin, outcome.reuse.drift))
    redo = unsure != 0
    seen = pool.make_room(seen, redo, cfg)
    logits, kept, work = forwards.redo_rows(params, state, outcome.logits, seen.kept, redo, views, outcome.work, cfg)
    update = _decided_again(redo, update, functools.partial(decide, logits))
    reason = jnp.where(redo, unsure | Reason.SAME_STEP.value, outcome.reason)
    return types.Outcome(logits=logits, reuse=seen.reuse, kept=kept, reason=reason, work=work), update

  def commit(
    self, params, state: DecodeState, outcome: Outcome, update: Update, live: Array, cfg: DecodeConfig
  ) -> tuple[Anchors, Kept]:
    del params
    # A row that is done keeps all it had. So does one whose logits are not finite, except that the keys and values of a
    # failed refresh are spoilt.
    reuse, kept, refreshed = outcome.reuse, outcome.kept, outcome.reason != 0
    renewed, later = refreshed & live, live.astype(jnp.int32)
    places = reuse.pool
    if places is not None:
      age = jnp.where(places.age < 0, places.age, places.age + later[:, None])
      places = dataclasses.replace(places, age=age)
    reuse = dataclasses.replace(
      reuse,
      anchor=numerics.select_rows(renewed, state.canvas, reuse.anchor),
      age=jnp.where(renewed, 0, reuse.age) + later,
      refreshed=jnp.where(live, refreshed, state.reuse.refreshed),
      margin=jnp.where(live, update.margin, state.reuse.margin),
      drift=jnp.where(live, jnp.where(refreshed, 0, reuse.drift), state.reuse.drift),
      pool=places,
    )
    if kept.anchor_hidden is not None:
      kept = dataclasses.replace(
        kept, anchor_hidden=numerics.select_rows(renewed, kept.last_hidden, kept.anchor_hidden)
      )
    return reuse, kept

  def passes(self, cfg: DecodeConfig) -> Mapping[str, Callable[..., Any]]:
    first = lambda: jnp.zeros((), jnp.int32)

    def redo(params, state, views):
      rows = views.columns.shape[1] + (0 if views.shadow is None else views.shadow.columns.shape[1])
      logits = jnp.zeros((state.canvas.shape[0], rows, cfg.model.vocab_size), jnp.float32)
      return forwards.redo_row(params, state, logits, state.kept, first(), views, cfg)

    return {
      'refresh': lambda params, state, views: forwards.refresh_all(
        params, state, state.kept.kv, ~state.done, views, cfg
      ),
      'reuse': lambda params, state, views: forwards.reuse_all(params, state, state.kept.kv, views, cfg),
      'row': lambda params, state, views: forwards.refresh_row(params, state, state.kept.kv, first(), cfg),
      'redo': redo,
    }


def _decided_again(redo: Array, update: Update, decide: Callable[[], Update]) -> Update:
  """The new decision for the rows in `redo`, bool [B]; that of the others as it was."""
  again = lambda: jax.tree.map(functools.partial(numerics.select_rows, redo), decide(), update)
  return lax.cond(jnp.any(redo), again, lambda: update)


METHOD = Prompt()

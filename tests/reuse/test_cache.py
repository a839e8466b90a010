"""The kept prompt: what is written when, what a reuse step reads, and that nothing of the canvas is kept."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import uncached

LENGTHS = (3, 17, 0, 64)


@pytest.fixture(params=['wino', 'llada', 'dream', 'saber', pytest.param('saber shifted', marks=pytest.mark.slow)])
def setting(request):
  golden = programs.golden_of(request, request.param)
  return golden.params, programs.config(golden, request.param)


def step(setting, state, flags=None):
  """One step, with the refresh flags of the rows where given; a row without an anchor refreshes anyway."""
  params, cfg = setting
  if flags is not None:
    state = programs.set_knobs(state, refresh_interval=flags)
  return programs.stepper(cfg, False)(params, state)


def begin(setting, **knobs):
  state = programs.start(programs.prompts(1, LENGTHS), setting[1], **knobs)
  return programs.prefill(state, {5: 40, 11: 200})


def arrays(state):
  """Kept keys, then kept values, of every layer."""
  return [np.asarray(part) for part in jax.tree.leaves(state.kept.kv)]


def stream(state, row, number=0):
  """What is kept for a row: keys and values of every layer."""
  kv = state.kept.kv[number]
  rows_first = lambda part: np.asarray(part[row]).swapaxes(0, 1)
  return [(rows_first(k), rows_first(v)) for k, v in zip(kv.k, kv.v, strict=True)]


def test_mutated_canvas_leaves_the_cache_alone_until_a_refresh(setting):
  _, cfg = setting
  state, _ = step(setting, begin(setting))
  kept = arrays(state)
  noise = np.random.default_rng(0).integers(0, 256, state.canvas.shape)
  state = dataclasses.replace(state, canvas=jnp.asarray(noise, jnp.int32))
  same, _ = step(setting, state, [0, 0, 0, 0])
  for before, after in zip(kept, arrays(same), strict=True):
    np.testing.assert_array_equal(before, after)
  mixed, _ = step(setting, state, [0, 1, 0, 1])
  for i, (before, after) in enumerate(zip(kept, arrays(mixed), strict=True)):
    np.testing.assert_array_equal(before[[0, 2]], after[[0, 2]])
    if i % cfg.model.n_layers == 0:
      # The first layer's depend on nothing but the prompt.
      np.testing.assert_allclose(before[:, :, -17:], after[:, :, -17:], atol=1e-4)
    else:
      for row in (1, 3):
        assert np.abs(before[row, :, -17:] - after[row, :, -17:]).max() > 1e-3


def test_no_canvas_column_is_kept(setting):
  """Nothing in the state is as large as keys of the canvas would be, so that a re-mask can leave none behind."""
  _, cfg = setting
  state, _ = step(setting, begin(setting))
  shape = (4, cfg.model.n_kv_heads, programs.PROMPT_LENGTH, cfg.model.head_dim)
  assert [part.shape for part in arrays(state)] == [shape] * 2 * cfg.model.n_layers
  rest = jax.tree.leaves(dataclasses.replace(state, kept=dataclasses.replace(state.kept, kv=())))
  assert all(leaf.ndim < 4 for leaf in rest)


def test_ages_and_anchors(setting):
  """Age, anchor and kept arrays of every step against a plain account of when each row refreshed."""
  clauses = {
    'refresh_interval': np.array([4, 0, 0, 0]),
    'max_age': np.array([0, 3, 0, 0]),
    'refresh_distance': np.array([0, 0, 0, 7]),
  }
  state = begin(setting, **clauses)
  last = [None] * 4
  ages = [[] for _ in range(4)]
  while not np.all(state.done):
    canvas, done = np.asarray(state.canvas), np.asarray(state.done)
    state, _ = step(setting, state)
    cache, refreshed = arrays(state), np.asarray(state.reuse.refreshed)
    for b in np.flatnonzero(~done):
      now = len(ages[b])
      ages[b].append(-1 if last[b] is None else now - last[b][0])
      if refreshed[b]:
        last[b] = now, canvas[b], [part[b] for part in cache]
      taken, anchor, parts = last[b]
      assert state.reuse.age[b] == now + 1 - taken
      np.testing.assert_array_equal(state.reuse.anchor[b], anchor)
      for part, expected in zip(cache, parts, strict=True):
        np.testing.assert_array_equal(part[b], expected)
  for b, expected in enumerate(ages):
    assert np.asarray(state.trace['age'][b, : len(expected)]).tolist() == expected
  assert [max(ages[b]) for b in (0, 1)] == [4, 3]
  assert max(ages[2]) == len(ages[2]) - 1


def test_reuse_reads_the_kept_prompt_and_this_steps_canvas(setting):
  """Logits of refresh and reuse steps against a plain forward in which kept keys stand in for the prompt's.

  The canvas is read as it is, so that nothing computed before a re-mask is used after it.
  """
  params, cfg = setting
  state = begin(setting)
  after_remask = 0
  for number in range(6):
    before = state
    state, logits = step(setting, state, [0, 0, 0, number == 3])
    after_remask += int(np.sum(before.trace['remask'][:, max(number - 1, 0)]))
    for b, row in enumerate(uncached.rows_of(before)):
      kept = None
      if not state.reuse.refreshed[b]:
        kept = stream(before, b)
      full, _ = uncached.plain_forward(params, cfg.model, *uncached.layout(row, cfg), kept=kept)
      np.testing.assert_allclose(logits[b], full[uncached.head_rows(row, cfg)], atol=1e-4, err_msg=f'{number} {b}')
  assert after_remask or cfg.decoder not in ('wino', 'saber')


def test_first_canvas_position_of_a_shifted_model_reads_a_recomputed_row(dream_tiny):
  """It is read from the last prompt row, which is fed again in reuse steps: a new canvas moves its logits."""
  cfg = programs.config(dream_tiny, 'dream')
  setting = dream_tiny.params, cfg
  state, _ = step(setting, begin(setting))
  _, logits = step(setting, state, [0, 0, 0, 0])
  state = dataclasses.replace(state, canvas=state.canvas.at[:, 20].set(99))
  moved, moved_logits = step(setting, state, [0, 0, 0, 0])
  assert not np.any(np.asarray(moved.reuse.refreshed))
  assert np.all(np.abs(np.asarray(moved_logits - logits))[:, 0].max(axis=-1) > 1e-3)


def test_what_stands_at_pads_and_before_the_first_refresh_is_never_read(setting):
  params, cfg = setting
  state = begin(setting, gen_length=np.array([24, 24, 24, 0]))
  spoil = lambda state, value, where: dataclasses.replace(
    state, kept=jax.tree.map(lambda part: jnp.where(where, value, part), state.kept)
  )
  fresh = spoil(state, jnp.nan, True)
  state, logits = step((params, cfg), state)
  other, other_logits = step((params, cfg), fresh)
  np.testing.assert_array_equal(logits[:3], other_logits[:3])
  np.testing.assert_array_equal(state.canvas, other.canvas)
  np.testing.assert_array_equal(state.status, other.status)

  pads = ~state.prompt_valid[:, None, :, None]
  _, logits = step((params, cfg), state, [0, 0, 0, 0])
  _, spoiled = step((params, cfg), spoil(state, 1e3, pads), [0, 0, 0, 0])
  np.testing.assert_array_equal(logits[:3], spoiled[:3])


@pytest.fixture(scope='module')
def guided(llada_tiny):
  return llada_tiny.params, programs.config(llada_tiny, 'llada', guidance=True)


def test_unconditional_rows_keep_their_own_prompt(guided):
  """Two prompts of one length: their unconditional rows agree in the first layer alone, since they see the canvas."""
  state = programs.start(programs.prompts(3, (20, 20)), guided[1], refresh_interval=3, cfg_scale=1.5)
  for number in range(7):
    state, _ = step(guided, state)
    assert len(state.kept.kv) == 2
    for part in (state.kept.kv[1].k, state.kept.kv[1].v):
      first, *deeper = (np.asarray(layer)[:, :, -20:] for layer in part)
      np.testing.assert_array_equal(first[0], first[1])
      # The canvases agree only while they are all masks.
      assert all(np.array_equal(layer[0], layer[1]) for layer in deeper) == (number < 3)
    for mine, other in zip(state.kept.kv[0].k, state.kept.kv[1].k, strict=True):
      assert not np.array_equal(mine, other)
  np.testing.assert_array_equal(state.counters.refreshes, 3)
  np.testing.assert_array_equal(state.counters.nfe, 14)


def test_guided_reuse(guided):
  params, cfg = guided
  scale = np.array([1.5, 0.7], np.float32)
  state = programs.start(programs.prompts(3, (20, 7)), cfg, cfg_scale=scale)
  for _ in range(3):
    before = state
    state, logits = step(guided, state)
  for b, row in enumerate(uncached.rows_of(before)):
    parts = []
    for number, prompt in enumerate((row.prompt, np.full_like(row.prompt, cfg.model.mask_id))):
      fed = uncached.layout(dataclasses.replace(row, prompt=prompt), cfg)
      parts.append(uncached.plain_forward(params, cfg.model, *fed, kept=stream(before, b, number))[0])
    full = parts[1] + (scale[b] + 1) * (parts[0] - parts[1])
    np.testing.assert_allclose(logits[b], full[uncached.head_rows(row, cfg)], atol=3e-4)


def test_scale_of_zero_in_a_guided_batch_is_no_guidance(guided):
  params, cfg = guided
  plain = params, dataclasses.replace(cfg, guidance=False)
  ids = programs.prompts(3, (20, 7))
  state = programs.start(ids, cfg, refresh_interval=4, cfg_scale=np.array([0.0, 2.0]))
  alone = programs.start(ids, plain[1], refresh_interval=4)
  while not np.all(state.done):
    state, logits = step(guided, state)
    alone, expected = step(plain, alone)
    np.testing.assert_array_equal(logits[0], expected[0])
    np.testing.assert_array_equal(state.canvas[0], alone.canvas[0])
  assert not np.array_equal(state.canvas[1], alone.canvas[1])

"""The transformer against a plain forward, and the ways of asking it for less."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import uncached

from archer_jax.model import Transformer
from archer_jax.model import abstract_params
from archer_jax.model import init_params
from archer_jax.model.params import logical_axes

LENGTH = 12


def normed(golden):
  """The same model with queries and keys normed, by scales that are not all one."""
  config = dataclasses.replace(golden.config, qk_norm=True)
  rng = np.random.default_rng(7)
  blocks = {}
  for name in (f'blocks_{layer}' for layer in range(config.n_layers)):
    draw = lambda: {'scale': jnp.asarray(rng.uniform(0.5, 2, config.head_dim), jnp.float32)}
    attn = {**golden.params[name]['attn'], 'q_norm': draw(), 'k_norm': draw()}
    blocks[name] = {**golden.params[name], 'attn': attn}
  return dataclasses.replace(golden, config=config, params={**golden.params, **blocks})


@pytest.fixture(params=['llada_tiny', 'dream_tiny', 'qk_norm'])
def golden(request):
  if request.param == 'qk_norm':
    return normed(request.getfixturevalue('llada_tiny'))
  return request.getfixturevalue(request.param)


def inputs(model, batch=2):
  rng = np.random.default_rng(3)
  tokens = jnp.asarray(rng.integers(0, model.vocab_size, (batch, LENGTH)), jnp.int32)
  positions = jnp.asarray(np.broadcast_to(np.arange(LENGTH), (batch, LENGTH)), jnp.int32)
  mask = np.ones((batch, LENGTH, LENGTH), bool)
  mask[1, :, :3] = False
  mask[:, 5, 6] = False
  return tokens, positions, jnp.asarray(mask[:, None])


@functools.cache
def program(config, **static):
  return jax.jit(functools.partial(Transformer(config).apply, **static), compiler_options=programs.QUICK)


def apply(golden, *args, **kwargs):
  static = {name: kwargs.pop(name) for name in ('key_start', 'method') if name in kwargs}
  return program(golden.config, **static)({'params': golden.params}, *args, **kwargs)


def test_equals_a_plain_forward(golden):
  tokens, positions, mask = inputs(golden.config)
  logits, fresh = apply(golden, tokens, positions, mask)
  assert logits.dtype == jnp.float32
  for b in range(2):
    expected, keys = uncached.plain_forward(golden.params, golden.config, tokens[b], positions[b], mask[b, 0])
    real = slice(3 * b, None)
    np.testing.assert_allclose(logits[b, real], expected[real], atol=1e-4)
    for (k, v), (expected_k, expected_v) in zip(zip(fresh.k, fresh.v, strict=True), keys, strict=True):
      np.testing.assert_allclose(k[b, :, real].swapaxes(0, 1), expected_k[real], atol=1e-4)
      np.testing.assert_allclose(v[b, :, real].swapaxes(0, 1), expected_v[real], atol=1e-4)


def test_asked_rows_are_rows_of_the_whole(golden):
  args = inputs(golden.config)
  logits, fresh = apply(golden, *args)
  rows = jnp.array([[0, 11, 4], [7, 7, 3]])
  asked, keys = apply(golden, *args, head_rows=rows)
  assert asked.shape == (2, 3, golden.config.vocab_size)
  np.testing.assert_allclose(asked, jnp.take_along_axis(logits, rows[..., None], axis=1), atol=1e-4)
  for part, whole in zip(jax.tree.leaves(keys), jax.tree.leaves(fresh), strict=True):
    np.testing.assert_allclose(part, whole, atol=1e-4)


def test_keys_alone_are_those_of_the_whole(golden):
  args = inputs(golden.config)
  _, fresh = apply(golden, *args)
  alone = apply(golden, *args, method='key_value')
  assert jax.tree.structure(alone) == jax.tree.structure(fresh)
  for part, whole in zip(jax.tree.leaves(alone), jax.tree.leaves(fresh), strict=True):
    np.testing.assert_allclose(part, whole, atol=1e-4)


@pytest.mark.parametrize('lead', [0, 1])
def test_kept_keys_stand_in_for_rows_that_are_not_fed(golden, lead):
  """Fresh kept keys make a reuse forward equal to the whole one; stale ones show that they are what is read."""
  tokens, positions, mask = inputs(golden.config)
  logits, fresh = apply(golden, tokens, positions, mask)
  prompt = 5
  kept = fresh.first(prompt)
  start = prompt - lead
  feed = lambda kept: apply(
    golden, tokens[:, start:], positions[:, start:], mask[:, :, start:], kept=kept, key_start=lead
  )
  reused, keys = feed(kept)
  np.testing.assert_allclose(reused, logits[:, start:], atol=2e-4)
  assert {part.shape[2] for part in jax.tree.leaves(keys)} == {LENGTH - prompt}
  stale = dataclasses.replace(kept, k=tuple(k + 0.5 for k in kept.k))
  assert np.abs(np.asarray(feed(stale)[0] - reused)).max() > 1e-2


kind = lambda leaf: (leaf.shape, leaf.dtype)


def test_declared_shapes_are_those_of_a_checkpoint(golden):
  assert jax.tree.map(kind, abstract_params(golden.config)) == jax.tree.map(kind, golden.params)
  axes = jax.tree.leaves(logical_axes(golden.config), is_leaf=lambda node: isinstance(node, tuple))
  assert [len(names) for names in axes] == [leaf.ndim for leaf in jax.tree.leaves(golden.params)]


def test_made_parameters_are_the_declared_ones(golden):
  make = functools.partial(init_params, golden.config, dtype='bfloat16')
  made = jax.eval_shape(make, jax.random.key(0))
  assert jax.tree.map(kind, made) == jax.tree.map(kind, abstract_params(golden.config, 'bfloat16'))


def test_bfloat16_stays_bfloat16_up_to_the_logits(golden):
  args = inputs(golden.config)
  params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), golden.params)
  logits, fresh = apply(dataclasses.replace(golden, params=params), *args)
  assert logits.dtype == jnp.float32
  assert {leaf.dtype for leaf in jax.tree.leaves(fresh)} == {jnp.dtype('bfloat16')}
  exact, _ = apply(golden, *args)
  assert np.abs(np.asarray(logits - exact)[:, 3:]).max() < 0.1 * np.abs(np.asarray(exact)).max()

"""Fast-dLLM's decoder on hand-made logits: threshold, factor, blocks, and the first token of a shifted block."""

import itertools

import numpy as np
import pytest
from stub import MASK
from stub import make_config
from stub import make_state
from stub import play

from archer_jax.engine.settings import make_settings
from archer_jax.types import Status

G = 6


def logits_of(probabilities):
  """Logits [1, 8, G, 12] at which token 3 + column has these probabilities, in every step."""
  probabilities = np.asarray(probabilities, np.float64)
  rest = np.log((1 - probabilities) / 11)
  table = np.repeat(rest[:, None], 12, axis=1)
  table[np.arange(G), 3 + np.arange(G)] = np.log(probabilities)
  return np.broadcast_to(table.astype(np.float32), (1, 8, G, 12))


def written(states):
  """Columns that each step wrote."""
  masks = [np.asarray(state.canvas)[0] == MASK for state in states]
  return [np.flatnonzero(before & ~after).tolist() for before, after in itertools.pairwise(masks)]


def test_what_passes_the_threshold_is_written_and_always_the_best():
  states = play(
    make_state(make_config('parallel', G), threshold=0.9),
    make_config('parallel', G),
    logits_of([0.95, 0.5, 0.91, 0.6, 0.89, 0.3]),
  )
  steps = written(states)
  assert steps[:5] == [[0, 2], [4], [3], [1], [5]]
  assert np.asarray(states[-1].canvas)[0].tolist() == [3, 4, 5, 6, 7, 8]
  assert int(states[-1].status[0]) == Status.LENGTH


@pytest.mark.parametrize(
  ('factor', 'first'),
  [
    # (n + 1) (1 - p(n)) is 0.1, 0.24, 0.48, 2.5, ... for the best, the second, ...
    (0.1001, [0]),
    (0.2, [0]),
    (0.25, [0, 2]),
    (0.5, [0, 2, 4]),
    (0.01, [0]),
    (10.0, [0, 1, 2, 3, 4, 5]),
  ],
)
def test_a_factor_writes_the_longest_run_that_stays_below_it(factor, first):
  cfg = make_config('parallel', G)
  states = play(make_state(cfg, factor=factor), cfg, logits_of([0.95, 0.5, 0.92, 0.45, 0.88, 0.3]))
  assert written(states)[0] == first


def test_blocks_are_written_one_after_the_other():
  cfg = make_config('parallel', G, 3)
  states = play(make_state(cfg, threshold=0.9), cfg, logits_of([0.95, 0.5, 0.91, 0.99, 0.99, 0.99]))
  assert written(states)[:3] == [[0, 2], [1], [3, 4, 5]]


@pytest.mark.parametrize('block', [3, G])
def test_a_shifted_block_begins_with_its_first_token_alone(block):
  cfg = make_config('parallel', G, block, alignment='shifted')
  states = play(make_state(cfg, threshold=0.9), cfg, logits_of([0.2, 0.99, 0.99, 0.2, 0.99, 0.99]))
  expected = {3: [[0], [1, 2], [3], [4, 5]], G: [[0], [1, 2, 4, 5], [3]]}[block]
  assert written(states)[: len(expected)] == expected


def test_factor_and_threshold_do_not_go_together():
  model = make_config('parallel', G).model
  with pytest.raises(ValueError, match='factor must not be given with threshold: it stands in its place'):
    make_settings(model, {'decoder': 'parallel', 'factor': 1.0, 'threshold': 0.5})
  settings = make_settings(model, {'decoder': 'parallel'})
  assert settings.row({})['threshold'] == 0.9 and settings.row({'factor': 2})['factor'] == 2
  with pytest.raises(ValueError, match='factor must not be given with threshold'):
    settings.row({'factor': 2.0, 'threshold': 0.5})


def test_what_is_recommended_for_another_decoder_is_not_its_threshold():
  model = make_config('parallel', G).model
  row = lambda given, **recommended: make_settings(model, given, recommended=recommended).row({})['threshold']
  assert row({'decoder': 'parallel'}, threshold=0.7) == 0.9
  assert row({'decoder': 'parallel'}, threshold=0.7, decoder='parallel') == 0.7
  assert row({'decoder': 'wino'}, threshold=0.7) == 0.7

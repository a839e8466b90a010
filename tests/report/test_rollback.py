import numpy as np

from archer_jax.report.rollback import drawing
from archer_jax.report.rollback import find_rollbacks

MASK = 9
TRACE = {
  # Writes 1 2, takes 2 back and writes 3, takes 1 back, writes 1 again and 4 where the 2 was.
  'canvas_after_step': np.array([[1, 2, MASK], [1, MASK, 3], [MASK, MASK, 3], [1, 4, 3]]),
  'refresh_per_step': np.array([True, False, True, False]),
}


def spell(token):
  return {1: 'a', 2: 'b', 3: '\n', 4: 'd'}[int(token)]


def test_rollbacks_of_a_trace():
  first, second = find_rollbacks(TRACE, MASK)
  assert (first.step, first.is_refresh, first.taken) == (2, False, (1,))
  assert (second.step, second.is_refresh, second.taken) == (3, True, (0,))
  assert first.before.tolist() == [1, 2, MASK] and second.before.tolist() == [1, MASK, 3]
  assert first.final.tolist() == second.final.tolist() == [1, 4, 3]


def test_a_trace_without_rollbacks_has_none():
  assert find_rollbacks({**TRACE, 'canvas_after_step': np.array([[1, MASK], [1, 2]])}, MASK) == []


def test_drawing_shows_what_was_taken_and_what_came_instead():
  first, second = find_rollbacks(TRACE, MASK)
  assert drawing(first, MASK, spell).plain == 'step 2 took back 1 token (b became d)\na[b]·'
  assert drawing(second, MASK, spell).plain == 'step 3 took back 1 token (a became a)\n[a]·\n'


def test_many_tokens_are_counted_not_listed():
  canvas = np.array([[1, 1, 1, 1, 1], [MASK] * 5, [1, 1, 2, 2, 2]])
  (rollback,) = find_rollbacks({'canvas_after_step': canvas, 'refresh_per_step': np.array([True, False, False])}, MASK)
  text = drawing(rollback, MASK, spell).plain
  assert text.startswith('step 2 took back 5 tokens, of which 2 came again in the end\n[a][a]')


def test_white_space_is_named():
  canvas = np.array([[3], [MASK], [1]])
  (rollback,) = find_rollbacks({'canvas_after_step': canvas, 'refresh_per_step': np.ones(3, bool)}, MASK)
  assert drawing(rollback, MASK, spell).plain == "step 2 took back 1 token ('\\n' became a)\n[\n]"

"""Arrays of a small trace, worked out by hand."""

import json

import numpy as np

MASK = 9


def arrays(**others):
  """Four steps: writes 1 2, takes 2 back and writes 3, takes 1 back, writes 1 again and 4 where the 2 was."""
  return {
    'id': np.asarray('a<b'),
    'canvas_after_step': np.array([[1, 2, MASK], [1, MASK, 3], [MASK, MASK, 3], [1, 4, 3]], np.int32),
    'refresh_per_step': np.array([True, False, True, False]),
    'accept_per_step': np.array([2, 1, 0, 2], np.int32),
    'remask_per_step': np.array([0, 1, 1, 0], np.int32),
    'distance_per_step': np.array([0, 2, 3, 2], np.int32),
    'drift_per_step': np.array([0, 2 / 3, 1, 0.5], np.float32),
    'age_per_step': np.array([-1, 1, 2, 1], np.int32),
    'margin_per_step': np.array([np.inf, 0.5, 0, 0.25], np.float32),
    'reason_per_step': np.array([1, 0, 2, 0], np.int32),
    'reason_names': np.asarray(['first', 'distance', 'drift']),
    'mask_id': np.asarray(MASK, np.int32),
    'prompt_ids': np.array([4, 1], np.int32),
    'settings': np.asarray(
      json.dumps({'decoder': 'wino', 'refresh': 'archer', 'refresh_distance': 3, 'drift': 'token'})
    ),
    'token_ids': np.array([1, 2, 3, 4, MASK], np.int32),
    'token_texts': np.asarray(['</script>', 'b', '\n', '\u202e', '<mask>']),
    **others,
  }

import io
import json

import numpy as np
import pytest
from recordings import arrays

from archer_jax.report.recording import Standing
from archer_jax.report.recording import make_recording
from archer_jax.report.recording import read_recording


def saved(path, **others):
  np.savez(path, **arrays(**others))
  return path


def test_what_a_position_held():
  M, C, T, S, N = Standing.MASKED, Standing.COMMITTED, Standing.TAKEN_BACK, Standing.SAME_AGAIN, Standing.OTHER_AGAIN
  recording = make_recording(arrays(), 'x')
  np.testing.assert_array_equal(recording.standings(), [[C, C, M], [C, T, C], [T, T, C], [S, N, C]])


def test_read_back(tmp_path):
  recording = read_recording(saved(tmp_path / 'x.npz'))
  assert (recording.name, recording.n_steps, recording.limit, recording.mask_id) == ('a<b', 4, 3, 9)
  assert recording.texts[3] == '\n' and recording.reason.tolist() == [1, 0, 2, 0]
  assert recording.before.tolist() == [[9, 9, 9], [1, 2, 9], [1, 9, 3], [9, 9, 3]]
  assert recording.summary() == 'wino, refresh archer: 4 steps, 2 refreshes (50%), 5 tokens committed, 2 taken back'


def test_a_trace_without_texts(tmp_path):
  given = arrays()
  del given['token_texts']
  assert make_recording(given, 'x').texts is None


def test_no_trace(tmp_path):
  with pytest.raises(ValueError, match=r'trace must be a file that --trace of archer-decode wrote, there is none at'):
    read_recording(tmp_path / 'x.npz')
  (tmp_path / 'x.npz').write_text('hello')
  with pytest.raises(ValueError, match=r'x\.npz is no \.npz file'):
    read_recording(tmp_path / 'x.npz')
  (tmp_path / 'x.npz').write_bytes(b'')
  with pytest.raises(ValueError, match=r'x\.npz is no \.npz file'):
    read_recording(tmp_path / 'x.npz')


@pytest.mark.parametrize('share', [0.01, 0.3, 0.9, 0.999])
def test_a_torn_trace(tmp_path, share):
  whole = saved(tmp_path / 'whole.npz').read_bytes()
  path = tmp_path / 'x.npz'
  path.write_bytes(whole[: int(share * len(whole))])
  with pytest.raises(ValueError, match=r'trace .*x\.npz is torn'):
    read_recording(path)


def test_a_trace_whose_bytes_were_changed(tmp_path):
  content = bytearray(saved(tmp_path / 'x.npz').read_bytes())
  place = content.index(b'\x09\x00\x00\x00')
  content[place] = 8
  (tmp_path / 'x.npz').write_bytes(content)
  with pytest.raises(ValueError, match=r'is torn: .*CRC'):
    read_recording(tmp_path / 'x.npz')


def test_arrays_with_objects_are_not_loaded(tmp_path):
  with pytest.raises(ValueError, match='is torn'):
    read_recording(saved(tmp_path / 'x.npz', id=np.array([{}], object)))


@pytest.mark.parametrize(
  ('others', 'message'),
  [
    ({'margin_per_step': np.zeros(3)}, r'must have one margin_per_step for each of its 4 steps, got \(3,\)'),
    ({'canvas_after_step': np.zeros((0, 3), np.int32)}, r'canvas_after_step of steps x positions, got \(0, 3\)'),
    ({'settings': np.asarray('{')}, 'must have its settings as an object of JSON'),
    ({'settings': np.asarray('[]')}, 'must have its settings as an object of JSON'),
    ({'settings': np.asarray('{"drift_radius": "x"}')}, 'must have its settings as an object of JSON'),
    ({'drift_per_step': np.full(4, np.nan)}, 'finite numbers in drift_per_step'),
    ({'drift_per_step': np.asarray(['a'] * 4)}, r'floating-point numbers with 1 axes in drift_per_step, got <U1'),
    ({'refresh_per_step': np.ones(4, int)}, r'true or false with 1 axes in refresh_per_step, got int64'),
    ({'canvas_after_step': np.zeros((4, 3))}, r'whole numbers with 2 axes in canvas_after_step, got float64'),
    ({'mask_id': np.array([9])}, r'whole numbers with 0 axes in mask_id, got int64 of shape \(1,\)'),
    ({'id': np.array(['a', 'b'])}, r'any value with 0 axes in id'),
    ({'prompt_ids': np.ones((2, 2), int)}, r'whole numbers with 1 axes in prompt_ids'),
    ({'token_texts': np.asarray(['a'])}, 'one of token_texts for each of token_ids'),
    ({'token_ids': np.array([1, 2, 3, 5, 9])}, 'must have the text of every token, but lacks that of 4'),
  ],
)
def test_arrays_that_do_not_belong_together(others, message):
  with pytest.raises(ValueError, match=f'trace x {message}|trace x must .*{message}'):
    make_recording(arrays(**others), 'x')


def test_missing_arrays():
  given = arrays()
  del given['age_per_step'], given['mask_id']
  with pytest.raises(ValueError, match=r'lacks age_per_step, mask_id$'):
    make_recording(given, 'x')


def test_without_anchors_the_last_refresh_is_what_is_told_of():
  """Methods that keep the answer have no anchor; what changed since their last refresh is worked out."""
  told = {'distance_per_step', 'drift_per_step', 'age_per_step'}
  recording = make_recording({name: array for name, array in arrays().items() if name not in told}, 'x')
  # Canvases that the steps read: none, (1 2 .), (1 . 3), (. . 3); refreshes in steps 0 and 2.
  assert recording.distance.tolist() == [0, 2, 2, 1]
  assert recording.age.tolist() == [-1, 1, 2, 1]
  np.testing.assert_allclose(recording.drift, np.array([0, 2, 2, 1]) / 3, rtol=1e-6)
  settings = np.asarray(json.dumps({'decoder': 'llada', 'refresh': None, 'reuse': 'dual'}))
  others = {name: array for name, array in arrays(settings=settings).items() if name not in told}
  assert make_recording(others, 'x').summary().startswith('llada, reuse dual: 4 steps')


def test_a_file_of_one_array_is_no_trace(tmp_path):
  file = io.BytesIO()
  np.savez(file, a=1)
  (tmp_path / 'x.npz').write_bytes(file.getvalue())
  with pytest.raises(ValueError, match='lacks id, canvas_after_step'):
    read_recording(tmp_path / 'x.npz')

import subprocess
import sys
from unittest import mock

import jax
import pytest

from archer_jax.mesh import make_mesh
from archer_jax.mesh import parse_mesh


@pytest.mark.parametrize(
  ('text', 'data', 'model'),
  [
    ('data:4,model:2', 4, 2),
    ('model:2,data:4', 4, 2),
    ('data:8', 8, 1),
    ('model:4', 1, 4),
    ('data:-1,model:2', -1, 2),
    ('data:-1', -1, 1),
  ],
)
def test_text_of_a_mesh(text, data, model):
  assert parse_mesh(text) == {'data': data, 'model': model}
  mesh = make_mesh(text)
  assert dict(mesh.shape) == {'data': 8 // model if data == -1 else data, 'model': model}
  assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
  assert list(mesh.devices.flat) == jax.devices()[: mesh.size]


@pytest.mark.parametrize(
  'text',
  ['', '4x2', 'data', 'data:', 'data:0', 'data:-2', 'model:-1', 'data:1,data:1', 'data:2,', 'rows:2', 'data:1.5'],
)
def test_what_is_no_mesh_is_refused(text):
  with pytest.raises(ValueError, match='mesh must be like data:4,model:2, got') as error:
    parse_mesh(text)
  assert repr(text) in str(error.value)


def test_mesh_that_does_not_match_the_devices():
  with pytest.raises(ValueError, match='no more devices than there are, 8, got data:4,model:4 with 16'):
    make_mesh('data:4,model:4')
  with pytest.raises(ValueError, match='no more devices than there are, 2, got data:1,model:4 with 4'):
    make_mesh('model:4', jax.devices()[:2])
  with pytest.raises(ValueError, match='model of mesh data:-1,model:3 must divide the number of devices, got 3 and 8'):
    make_mesh('data:-1,model:3')
  assert make_mesh('data:-1', jax.devices()[2:5]).devices.tolist() == [[device] for device in jax.devices()[2:5]]


def test_own_devices_are_taken_before_those_of_other_processes():
  own = jax.devices()[4:]
  with mock.patch('jax.process_count', lambda: 2), mock.patch('jax.local_devices', lambda: own):
    assert make_mesh('data:-1,model:2').devices.flatten().tolist() == own
    assert make_mesh('data:2').devices.flatten().tolist() == own[:2]
    assert make_mesh('data:4,model:2').devices.flatten().tolist() == jax.devices()
    assert dict(make_mesh('data:-1,model:8').shape) == {'data': 1, 'model': 8}
    with pytest.raises(ValueError, match='must have all 8 devices, got data:6,model:1 with 6'):
      make_mesh('data:6')


def test_text_is_read_without_jax():
  code = "import sys; from archer_jax.mesh import parse_mesh; parse_mesh('data:2'); assert 'jax' not in sys.modules"
  assert subprocess.run([sys.executable, '-c', code], check=False).returncode == 0

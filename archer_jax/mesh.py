"""The devices of a run as a mesh with the axes `data` and `model`.

Reading its text needs no JAX, so that a command line can look at it before it pays for that import.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import math
from typing import TYPE_CHECKING
from typing import Any

if TYPE_CHECKING:
  from jax.sharding import Mesh

AXES = ('data', 'model')


def parse_mesh(text: str) -> dict[str, int]:
  """Reads a mesh such as `data:4,model:2`; an axis that is not named has the size 1.

  Returns:
    The size of each of `AXES`; -1 for `data` means as many as there are devices for.

  Raises:
    ValueError: anything else.
  """
  sizes = {}
  for part in text.split(','):
    axis, _, size = part.partition(':')
    fills = axis == 'data' and size == '-1'
    if axis not in AXES or axis in sizes or not (fills or (size.isdecimal() and int(size) > 0)):
      raise ValueError(f'mesh must be like data:4,model:2, got {text!r}')
    sizes[axis] = int(size)
  return {axis: sizes.get(axis, 1) for axis in AXES}


def make_mesh(sizes: str | Mapping[str, int], devices: Sequence[Any] | None = None) -> 'Mesh':
  """Makes the mesh over the first of the devices that it needs.

  Args:
    sizes: the text of a mesh, or what `parse_mesh` made of it.
    devices: by default this process's own; those of all processes if the mesh is larger than these.

  Raises:
    ValueError: a mesh for which there are not as many devices; one over several processes must have all of theirs.
  """
  import jax

  sizes = parse_mesh(sizes) if isinstance(sizes, str) else dict(sizes)
  text = ','.join(f'{axis}:{sizes[axis]}' for axis in AXES)
  everywhere = devices is None and jax.process_count() > 1
  if devices is None:
    devices = jax.local_devices()
    if math.prod(abs(size) for size in sizes.values()) > len(devices):
      devices = jax.devices()
  if sizes['data'] == -1:
    if len(devices) % sizes['model']:
      raise ValueError(
        f'model of mesh {text} must divide the number of devices, got {sizes["model"]} and {len(devices)}'
      )
    sizes['data'] = len(devices) // sizes['model']
  count = math.prod(sizes.values())
  if count > len(devices):
    raise ValueError(f'mesh must have no more devices than there are, {len(devices)}, got {text} with {count}')
  if everywhere and len(jax.local_devices()) < count < len(devices):
    # A process without a device of the mesh could not take part in what the others compute.
    raise ValueError(f'mesh over several processes must have all {len(devices)} devices, got {text} with {count}')
  shape = tuple(sizes[axis] for axis in AXES)
  axis_types = (jax.sharding.AxisType.Auto,) * len(AXES)
  return jax.make_mesh(shape, AXES, axis_types=axis_types, devices=devices[:count])

"""What the devices of a compiled program tell each other, read from its HLO text."""

from collections.abc import Iterator
import dataclasses
import itertools
import math
import re

from jax.sharding import Mesh
import numpy as np

_KINDS = ('all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'collective-permute', 'collective-broadcast')
_COMPUTATION = re.compile(r'^(ENTRY )?%?([\w.\-]+) \(')
_INSTRUCTION = re.compile(r'^\s+(?:ROOT )?%?[\w.\-]+ = (.*)$')
_COLLECTIVE = re.compile(rf'^(.*?) ((?:ragged-)?(?:{"|".join(_KINDS)}))(-start)?\(')
_ARRAY = re.compile(r'\b([a-z]\w*)\[([\d,]*)\]')
_LOOP = re.compile(r'(?:body|condition)=%?([\w.\-]+)')
_BRANCHES = re.compile(r'branch_computations=\{([^}]*)\}')
_CHOICE = re.compile(r'(true|false)_computation=%?([\w.\-]+)')
_CALLED = re.compile(r'(?:calls|to_apply)=%?([\w.\-]+)')
_IOTA = re.compile(r'replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?')
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{((?:'\w+',? ?)*)\}")
_LISTED = re.compile(r'(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
  """One exchange between devices.

  Attributes:
    kind: such as `all-reduce`.
    place: the loops and branches that it stands in, such as ('while', 'cond:1').
    axes: the mesh axes along which devices take part.
    shapes: of the arrays that it gives to one device.
    bytes: of these arrays. What goes over the wires depends on the algorithm; a ring moves 2 (n - 1) / n
      of it for an all-reduce among n, and (n - 1) / n for an all-gather.
    text: the instruction.
  """

  kind: str
  place: tuple[str, ...]
  axes: tuple[str, ...]
  shapes: tuple[tuple[int, ...], ...]
  bytes: int
  text: str


def collectives(hlo: str, mesh: Mesh) -> list[Collective]:
  """Every collective of a compiled program, once for each place that it is called from.

  Args:
    hlo: what `.as_text()` of the compiled program gives.
    mesh: the mesh that it was compiled for.

  Raises:
    ValueError: a collective whose devices cannot be read.
  """
  found = []
  for place, text in instructions(hlo):
    if match := _COLLECTIVE.match(text):
      arrays = [(dtype, _numbers(shape)) for dtype, shape in _ARRAY.findall(match[1])]
      if match[3] and match[2] != 'all-reduce' and len(arrays) > 1:
        # What starts a gather or a permutation names its operand too, first.
        arrays = arrays[1:2]
      found.append(
        Collective(
          kind=match[2],
          place=place,
          axes=_axes(_groups(text, mesh.size), mesh),
          shapes=tuple(shape for _, shape in arrays),
          bytes=sum(_item_bytes(dtype) * math.prod(shape) for dtype, shape in arrays),
          text=text,
        )
      )
  return found


def instructions(hlo: str) -> Iterator[tuple[tuple[str, ...], str]]:
  """Every instruction, behind the name of its result, with the loops and branches that it stands in."""
  computations, entry, lines = {}, None, None
  for line in hlo.splitlines():
    if line.endswith('{') and (match := _COMPUTATION.match(line)):
      lines = computations.setdefault(match[2], [])
      entry = match[2] if match[1] else entry
    elif lines is not None and (match := _INSTRUCTION.match(line)):
      lines.append(match[1])

  def walk(name: str, place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    for text in computations[name]:
      yield place, text
      for inner in _LOOP.findall(text):
        yield from walk(inner, (*place, 'while'))
      for number, inner in _branches(text):
        yield from walk(inner, (*place, f'cond:{number}'))
      for inner in _CALLED.findall(text):
        yield from walk(inner, place)

  if entry is None:
    raise ValueError('hlo must be the text of a compiled program, got one without an ENTRY')
  yield from walk(entry, ())


def _branches(text: str) -> list[tuple[int, str]]:
  if match := _BRANCHES.search(text):
    return list(enumerate(name.strip().lstrip('%') for name in match[1].split(',')))
  return [(int(which == 'true'), name) for which, name in _CHOICE.findall(text)]


def _numbers(listed: str) -> tuple[int, ...]:
  return tuple(int(number) for number in listed.split(',') if number)


def _item_bytes(dtype: str) -> int:
  """Bytes of an element of an HLO type, such as 2 of bf16; a bool takes one."""
  digits = re.search(r'\d+', dtype)
  return max(int(digits[0]), 8) // 8 if digits else 1


def _groups(text: str, n_devices: int) -> list[list[int]]:
  """Numbers of the devices, in the order of the mesh, that exchange something with each other."""
  if match := _IOTA.search(text):
    order = np.arange(n_devices).reshape(_numbers(match[2]))
    return order.transpose(_numbers(match[3]) if match[3] else None).reshape(_numbers(match[1])).tolist()
  if match := _NAMED.search(text):
    # The compiler's own axes, of which those in braces are exchanged along.
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", match[1])}
    names, along = list(sizes), re.findall(r'\w+', match[2])
    order = [names.index(name) for name in names if name not in along] + [names.index(name) for name in along]
    members = math.prod(sizes[name] for name in along)
    return np.arange(n_devices).reshape(tuple(sizes.values())).transpose(order).reshape(-1, members).tolist()
  if match := _LISTED.search(text):
    groups = [list(_numbers(group)) for group in re.findall(r'\{([\d,]*)\}', match[1])]
    # No group at all means one of everybody.
    return groups or [list(range(n_devices))]
  raise ValueError(f'devices of a collective cannot be read from {text}')


def _axes(groups: list[list[int]], mesh: Mesh) -> tuple[str, ...]:
  """The axes of the mesh along which members of any group differ."""
  shape = tuple(mesh.shape.values())
  places = [np.stack(np.unravel_index(group, shape)) for group in groups]
  differs = [any(np.ptp(place[axis]) > 0 for place in places) for axis in range(len(shape))]
  return tuple(itertools.compress(mesh.axis_names, differs))

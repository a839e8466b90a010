"""Reading compiled programs (HLO text) and traced ones (jaxprs)."""

from collections.abc import Iterator
import dataclasses
import re

import jax.extend


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of an HLO computation whose result is an array."""

  dtype: str
  shape: tuple[int, ...]
  opcode: str
  text: str


_COMPUTATION = re.compile(r'^(?:ENTRY )?%?([\w.\-]+) \(')
_INSTRUCTION = re.compile(r'^\s+(?:ROOT )?%?[\w.\-]+ = (.*)$')
_ARRAY = re.compile(r'^(\w+)\[([\d,]*)\]\S* ([\w\-]+)\(')
_CALLED = re.compile(r'(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)')
_BRANCHES = re.compile(r'branch_computations=\{([^}]*)\}')


def _computations(hlo: str) -> dict[str, list[str]]:
  computations, lines = {}, None
  for line in hlo.splitlines():
    if line.endswith('{') and (match := _COMPUTATION.match(line)):
      lines = computations.setdefault(match[1], [])
    elif lines is not None and (match := _INSTRUCTION.match(line)):
      lines.append(match[1])
  return computations


def _called(text: str) -> list[str]:
  branches = _BRANCHES.search(text)
  names = branches[1].split(',') if branches else []
  return _CALLED.findall(text) + [name.strip().lstrip('%') for name in names]


def instructions_inside_loops(hlo: str) -> list[Instruction]:
  """Array-valued instructions of every loop body, and of all that it calls."""
  computations = _computations(hlo)
  waiting = [name for lines in computations.values() for text in lines if ' while(' in text for name in _called(text)]
  seen = set()
  while waiting:
    name = waiting.pop()
    if name not in seen:
      seen.add(name)
      waiting += [other for text in computations[name] for other in _called(text)]
  found = []
  for name in seen:
    for text in computations[name]:
      if match := _ARRAY.match(text):
        shape = tuple(int(size) for size in match[2].split(',') if size)
        found.append(Instruction(dtype=match[1], shape=shape, opcode=match[3], text=text))
  return found


def equations(jaxpr, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], jax.extend.core.JaxprEqn]]:
  """Every equation with the loops and branches that it stands in, such as ('while', 'cond:1')."""
  for equation in jaxpr.eqns:
    yield path, equation
    name = equation.primitive.name
    for value in equation.params.values():
      inner = value if isinstance(value, tuple | list) else [value]
      for number, part in enumerate(inner):
        part = getattr(part, 'jaxpr', part)
        if hasattr(part, 'eqns'):
          step = {'cond': f'cond:{number}', 'while': 'while'}.get(name)
          yield from equations(part, (*path, step) if step else path)

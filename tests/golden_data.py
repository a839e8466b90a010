"""The golden data in tests/goldens: tiny random checkpoints, and what public PyTorch decoders computed with them."""

from collections.abc import Mapping
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from archer_jax.config import ModelConfig

GOLDENS = Path(__file__).parent / 'goldens'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """One call of a public function.

  Attributes:
    id: unique within its checkpoint.
    function: the public function, such as `wino.decoding_wino`.
    args: what it was called with, arrays aside.
    stats: counts that it reported; empty for most functions.
    arrays: its inputs and outputs by name.
  """

  id: str
  function: str
  args: Mapping[str, Any]
  stats: Mapping[str, Any]
  arrays: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Golden:
  """A converted checkpoint and its cases by id."""

  path: Path
  config: ModelConfig
  params: dict
  cases: Mapping[str, Case]


def case_ids(name: str, function: str) -> list[str]:
  """Ids of the cases of one function; reads no array, for `pytest.mark.parametrize`."""
  cases = json.loads((GOLDENS / name / 'cases.json').read_text('utf-8'))['cases']
  return [case['id'] for case in cases if case['function'] == function]


def read_cases(name: str) -> dict[str, Case]:
  cases = {}
  for case in json.loads((GOLDENS / name / 'cases.json').read_text('utf-8'))['cases']:
    with np.load(GOLDENS / name / case['file']) as file:
      arrays = {key: file[key] for key in file.files}
    fields = {key: case.get(key, {}) for key in ('args', 'stats')}
    cases[case['id']] = Case(id=case['id'], function=case['function'], arrays=arrays, **fields)
  return cases

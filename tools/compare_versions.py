"""Compares what two checkouts of the project decode, as after a change that must change no result.

    python tools/compare_versions.py --before=../archer_jax-before --after=. [--work=DIR] [--only=REGEX]

It runs the same decodings by the command line of both and compares their answers byte for byte and their traces array
by array: every decoder under every refresh rule, with the bundled model and with the tiny checkpoints of tests/goldens.
New arrays and settings in a trace are told and allowed; whatever else differs makes the exit code 1. With --work the
results of --before are kept, so that another run has only the other checkout to wait for.

It needs what the versions of both checkouts import, and both to take the same flags: those since token drift has a
distance. A side takes some minutes of CPU.
"""

from collections import Counter
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import hashlib
import json
import os
from pathlib import Path
import re
import shutil
import subprocess
import sys
import tempfile
from typing import Any

from absl import app
from absl import flags
import numpy as np

_BEFORE = flags.DEFINE_string('before', None, 'folder of the checkout whose results are right')
_AFTER = flags.DEFINE_string('after', None, 'folder of the checkout to check')
_WORK = flags.DEFINE_string('work', None, 'folder to keep results in; those of --before are taken from there again')
_ONLY = flags.DEFINE_string('only', None, 'regular expression that the names of the cases to run must contain')
_TOLERANCE = flags.DEFINE_float('tolerance', 1e-6, 'largest relative difference of floats in traces', lower_bound=0)

_CONVERTED = ('llada_tiny', 'dream_tiny')

# Runs the cases of stdin one after another: what was compiled for one serves the next.
_DRIVER = """
import contextlib, json, pathlib, sys, time, traceback
import archer_jax
from archer_jax.cli import main
found, wanted = pathlib.Path(archer_jax.__file__).resolve(), pathlib.Path.cwd().resolve()
if not found.is_relative_to(wanted):
  sys.exit(f'error: archer_jax is taken from {found}, not from {wanted}')
for case in json.load(sys.stdin):
  folder, start = pathlib.Path(case['folder']), time.perf_counter()
  with (folder / 'stderr.txt').open('w') as log, contextlib.redirect_stderr(log):
    try:
      code = main(['run_decode.py', *case['flags']])
    except BaseException:
      traceback.print_exc()
      code = 'an exception'
  run = {'key': case['key'], 'code': code, 'seconds': round(time.perf_counter() - start, 2)}
  (folder / 'run.json').write_text(json.dumps(run))
  print(case['name'], run['seconds'], flush=True)
"""

# Of the bundled model's tasks.
_SORTED = 'sort: 45 12 33 90 71 28 64 55 19 82 37 46 73\n12 19 28 33 37 45 46 55 64 71 73 82 90\n\n'
_SORT = 'sort: 81 17 62 40 39 95 23 58 76 11 44 67 30 52 89\n'
_EASY_SUDOKU = 'sudoku6:\n000523\n050001\n105600\n040105\n400350\n060200\n=\n'
_HARD_SUDOKU = 'sudoku6:\n000000\n000000\n060000\n004006\n000000\n050063\n=\n'
_PIPELINE = (
  'pipeline:\nb: multiply a by 2\nc: cap b at 50\nd: sort c down\nsolve([12, 45, 8, 30]) == [50, 50, 24, 16]\n'
  'solve([3, 9, 41, 7]) == [50, 18, 14, 6]\ncode:\n'
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """One decoding by the command line.

  Attributes:
    name: its own, with slashes.
    checkpoint: `bundled` or one of the converted ones.
    records: name of the input in `inputs`.
    settings: flags by name.
  """

  name: str
  checkpoint: str
  records: str
  settings: Mapping[str, Any]


def cases() -> list[Case]:
  """All cases, those of a checkpoint one after another."""
  # Whatever has a default is given, so that a default may change.
  canvas = {'gen_length': 42, 'block_length': 21}
  every = {'temperature': 0.0, 'mask_prediction': 'never', 'early_stop': True, 'seed': 0, 'batch_size': 4}
  ends = {'logits_eos_inf': False, 'confidence_eos_eot_inf': False}
  wino = {'decoder': 'wino', 'threshold': 0.7, 'threshold_back': 0.9, 'max_accept': 20, **canvas, **every, **ends}
  llada = {'decoder': 'llada', 'steps': 21, 'cfg_scale': 0.0, **canvas, **every, **ends}
  dream = {'decoder': 'dream', 'steps': 18, 'alg_temp': 0.0, 'top_p': 1.0, 'top_k': 0, 'gen_length': 24, **every}

  clauses = {'max_age': 0, 'refresh_at_block_start': False}
  kept = {'drift': 'token', 'anchors': 1, 'on_low_margin': 'next_step', **clauses}
  once = {'refresh': 'once', **clauses}
  interval = {'refresh': 'interval', 'refresh_interval': 3, **clauses}
  # Token drift has a distance, the others have a radius.
  by = lambda limit: {'refresh_distance' if isinstance(limit, int) else 'drift_radius': limit}
  archer = lambda limit, margin=0.0, **more: {'refresh': 'archer', 'min_margin': margin, **kept, **by(limit), **more}
  certified = lambda kappa, limit=10, **more: {'refresh': 'certified', 'kappa': kappa, **kept, **by(limit), **more}
  # Of one program, which knobs alone tell apart.
  rules = lambda kappa: {
    'always': {'refresh': 'always'},
    'once': once,
    'interval': interval,
    'archer-4': archer(4),
    'archer-10': archer(10),
    'certified': certified(kappa),
  }
  margins = lambda margin: {
    'margin': archer(0, margin),
    'margin-all': archer(10, margin, max_age=6, refresh_at_block_start=True),
  }
  clocks = lambda margin: {
    **margins(margin),
    'max-age': {**once, 'max_age': 4},
    'block-start': {**once, 'refresh_at_block_start': True},
    'interval-max-age': {**interval, 'refresh_interval': 5, 'max_age': 2},
  }
  two_anchors = lambda kappa: {
    'archer-4': archer(4, anchors=2),
    'archer-10': archer(10, anchors=2),
    'certified': certified(kappa, anchors=2),
  }
  same_step = lambda kappa, margin, anchors=1: {
    'margin': archer(10, margin, on_low_margin='same_step', anchors=anchors),
    'certified': certified(kappa, on_low_margin='same_step', anchors=anchors),
  }
  drifting = lambda drift, kappa, anchors=1, **more: {
    'archer-0.1': archer(0.1, drift=drift, anchors=anchors, **more),
    'certified': certified(kappa, 0.3, drift=drift, anchors=anchors, **more),
  }
  both = lambda drift, kappa: {'certified': certified(kappa, 0.3, drift=drift, anchors=2, on_low_margin='same_step')}

  # Checkpoint, records, group, flags of the group, refresh rules.
  calibrated = {'refresh': 'certified', 'quantile': 0.9, **kept}
  official, own = {**wino, 'shadow': 'official'}, {**wino, 'shadow': 'self'}
  ordered = {**llada, 'remasking': 'low_confidence'}
  # An order at random has no confidence to write ends last by.
  random = {name: value for name, value in llada.items() if name != 'confidence_eos_eot_inf'} | {'remasking': 'random'}
  guided = {**ordered, 'cfg_scale': 1.0}
  mixed = {'block_length': 10}
  groups = [
    ('bundled', 'wino', 'wino-self', own, {**rules(4.0), **margins(1.0), 'calibrated': calibrated}),
    ('bundled', 'wino', 'wino-official', official, rules(4.0)),
    ('bundled', 'wino', 'wino-self-anchors', own, two_anchors(4.0)),
    ('bundled', 'wino', 'wino-self-same-step', own, same_step(4.0, 1.0)),
    ('bundled', 'wino', 'wino-self-embedding', own, drifting('embedding', 4.0)),
    ('bundled', 'wino', 'wino-self-hidden', own, drifting('hidden', 4.0)),
    ('bundled', 'wino', 'wino-self-hidden-anchors', own, both('hidden', 4.0)),
    ('bundled', 'wino', 'wino-self-temperature', {**own, 'temperature': 0.7}, {'archer-4': archer(4)}),
    ('bundled', 'wino', 'wino-self-mask', {**own, 'mask_prediction': 'official'}, {'archer-4': archer(4)}),
    ('bundled', 'wino', 'wino-self-block', {**own, 'block_length': 42}, {'archer-4': archer(4), 'once': once}),
    ('bundled', 'llada', 'llada', ordered, {**rules(1.0), **margins(0.5)}),
    ('bundled', 'llada', 'llada-temperature', {**ordered, 'temperature': 0.7}, {'archer-4': archer(4)}),
    ('bundled', 'llada', 'llada-random', random, {'once': once, 'archer-4': archer(4)}),
    ('bundled', 'llada', 'llada-anchors', ordered, two_anchors(1.0)),
    ('bundled', 'llada', 'llada-same-step', ordered, same_step(1.0, 0.5)),
    ('bundled', 'llada', 'llada-guidance', guided, rules(1.0)),
    ('bundled', 'guidance', 'llada-guidance-of-records', ordered, {'archer-4': archer(4)}),
    ('bundled', 'llada', 'llada-guidance-anchors', guided, {'archer-4': archer(4, anchors=2)}),
    ('bundled', 'llada', 'llada-guidance-hidden', guided, both('hidden', 1.0)),
    ('bundled', 'llada', 'llada-ends', {**ordered, 'confidence_eos_eot_inf': True}, {'archer-4': archer(4)}),
    ('llada_tiny', 'tokens', 'wino-official', {**official, 'threshold': 0.6}, {**rules(2.0), **clocks(0.5)}),
    ('llada_tiny', 'tokens', 'wino-official-anchors', official, two_anchors(2.0)),
    ('llada_tiny', 'tokens', 'wino-official-same-step-anchors', official, same_step(2.0, 0.5, 2)),
    ('llada_tiny', 'tokens', 'wino-official-hidden', official, drifting('hidden', 2.0)),
    ('llada_tiny', 'tokens', 'wino-official-embedding-anchors', official, both('embedding', 2.0)),
    ('llada_tiny', 'shapes', 'wino-official-shapes', {**official, **mixed}, {'archer-4': archer(4)}),
    ('llada_tiny', 'tokens', 'llada', ordered, {**rules(0.5), **clocks(0.1)}),
    ('llada_tiny', 'tokens', 'llada-anchors', ordered, two_anchors(0.5)),
    ('llada_tiny', 'tokens', 'llada-guidance', guided, {**rules(0.5), 'margin': archer(0, 0.1)}),
    ('llada_tiny', 'tokens', 'llada-guidance-anchors', guided, two_anchors(0.5)),
    ('llada_tiny', 'tokens', 'llada-guidance-same-step-anchors', guided, same_step(0.5, 0.1, 2)),
  ]
  for alg in ('entropy', 'maskgit_plus', 'topk_margin', 'origin'):
    # An order at random has no score to make random.
    flags_of_alg = {name: value for name, value in dream.items() if alg != 'origin' or name != 'alg_temp'}
    shown = {**rules(0.1), **(clocks(0.01) if alg == 'entropy' else {})}
    groups.append(('dream_tiny', 'tokens', f'dream-{alg}', {**flags_of_alg, 'alg': alg}, shown))
  entropy = {**dream, 'alg': 'entropy'}
  sampled = {**entropy, 'temperature': 0.7, 'top_p': 0.9, 'top_k': 30, 'alg_temp': 0.5}
  groups += [
    ('dream_tiny', 'tokens', 'dream-entropy-sampled', sampled, rules(0.1)),
    ('dream_tiny', 'dream', 'dream-entropy-records', entropy, {'archer-4': archer(4)}),
    ('dream_tiny', 'tokens', 'dream-entropy-anchors', entropy, two_anchors(0.1)),
    ('dream_tiny', 'tokens', 'dream-entropy-same-step', entropy, same_step(0.1, 0.01)),
    ('dream_tiny', 'tokens', 'dream-entropy-embedding', entropy, drifting('embedding', 0.1)),
    ('dream_tiny', 'tokens', 'dream-entropy-hidden-anchors', entropy, both('hidden', 0.1)),
    ('dream_tiny', 'shapes', 'dream-entropy-shapes', entropy, {'archer-4': archer(4)}),
  ]
  return [
    Case(name=f'{checkpoint}/{group}/{rule}', checkpoint=checkpoint, records=records, settings=settings | refresh)
    for checkpoint, records, group, settings, rules_of_group in groups
    for rule, refresh in rules_of_group.items()
  ]


def inputs(checkpoint: str, goldens: Path) -> dict[str, list[dict[str, Any]]]:
  """The records for a checkpoint, by name.

  Up to three of a file are shorter than the bulk of it and ride along in one program with it; `shapes` makes several.

  Args:
    checkpoint: `bundled` or one of the converted ones.
    goldens: folder of their sources and of prompts for them.
  """
  if checkpoint != 'bundled':
    prompts = _golden_prompts(goldens / checkpoint)
    long, short = prompts[-4:], prompts[:3]
    few = {'dream_tiny': (21, 24, 20)}.get(checkpoint, (30, 42, 36))
    tokens = [
      *({'prompt_ids': prompt, 'gen_length': length} for prompt, length in zip(short, few, strict=True)),
      *({'prompt_ids': prompt} for prompt in long),
    ]
    tokens[1] |= {'seed': 7}
    tokens[4] |= {'temperature': 0.5, 'seed': 11}
    knobs = [{}, {'steps': 9}, {'top_k': 5, 'temperature': 1.0}, {'top_p': 0.8, 'temperature': 0.3}, {'alg_temp': 0.7}]
    shapes = [{'prompt_ids': prompt, 'gen_length': 10 + 13 * i} for i, prompt in enumerate([*prompts, *short])]
    drifts = [{}, {'refresh_distance': 6}, {'max_age': 2}]
    return {
      'tokens': tokens,
      'dream': [{'prompt_ids': prompt, **more} for prompt, more in zip([*long, short[0]], knobs, strict=True)],
      'shapes': [record | drifts[i % len(drifts)] for i, record in enumerate(shapes)],
    }
  texts = [
    _EASY_SUDOKU,
    _SORTED + _SORT,
    _HARD_SUDOKU,
    _SORTED + _HARD_SUDOKU,
    _SORTED + _EASY_SUDOKU,
    _SORTED + _PIPELINE,
    _SORT + '\n' + _HARD_SUDOKU,
  ]
  common = [{'id': 'first'}, {'gen_length': 45}, {'id': 2}, {}, {'gen_length': 48}, {'seed': 3}, {'temperature': 0.5}]
  records = [{'prompt': text, **more} for text, more in zip(texts, common, strict=True)]
  extended = lambda more: [record | more.get(i, {}) for i, record in enumerate(records)]
  return {
    'wino': extended({3: {'threshold': 0.95}, 4: {'threshold_back': 0.7, 'max_accept': 3}}),
    'llada': extended({3: {'steps': 42}, 4: {'steps': 9}}),
    'guidance': extended({i: {'cfg_scale': 0.5 * i} for i in (2, 3, 4, 5, 6)}),
  }


def _golden_prompts(folder: Path) -> list[list[int]]:
  """Prompts of the cases beside a golden checkpoint, of different lengths, the shortest first."""
  by_length = {}
  for path in sorted((folder / 'cases').glob('*.npz')):
    with np.load(path) as file:
      # Padded ones have a mask.
      if 'prompt' in file.files and 'attention_mask' not in file.files:
        prompt = file['prompt'][0].tolist()
        by_length.setdefault(len(prompt), prompt)
  prompts = [by_length[length] for length in sorted(by_length)]
  longest = prompts[-1]
  # The longest ones in one program, whatever the lengths of the others.
  return [*prompts[:4], *(longest[cut:] + longest[:extra] for cut, extra in ((0, 0), (1, 0), (2, 1), (0, 3)))]


def _flags(settings: Mapping[str, Any]) -> list[str]:
  spell = lambda value: str(value).lower() if isinstance(value, bool) else str(value)
  return [f'--{name}={spell(value)}' for name, value in settings.items()]


def prepare(work: Path, before: Path, chosen: Sequence[Case]) -> None:
  """Writes the inputs and converts the golden checkpoints that are needed, unless they are there.

  Raises:
    ValueError: a checkpoint that cannot be converted.
  """
  goldens = before / 'tests' / 'goldens'
  for checkpoint in dict.fromkeys(case.checkpoint for case in chosen):
    folder = work / 'inputs' / checkpoint
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in inputs(checkpoint, goldens).items():
      (folder / f'{name}.jsonl').write_text(''.join(json.dumps(record) + '\n' for record in records), 'utf-8')
    target = work / 'checkpoints' / checkpoint
    if checkpoint == 'bundled' or target.exists():
      continue
    target.parent.mkdir(exist_ok=True)
    command = ['tools/convert_weights.py', f'--source={goldens / checkpoint}', f'--output={target}', '--dtype=float32']
    done = subprocess.run([sys.executable, *command], cwd=before, env=_environment(before), capture_output=True)
    if done.returncode:
      raise ValueError(f'{checkpoint} cannot be converted: {done.stderr.decode(errors="replace").strip()}')


def _environment(checkout: Path) -> dict[str, str]:
  # Results are equal to the last bit on the same device only, and every machine has a CPU. Most of the time goes into
  # compiling, which optimizing for it would make longer.
  fast = f'{os.environ.get("XLA_FLAGS", "")} --xla_backend_optimization_level=0'
  return {**os.environ, 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': fast, 'PYTHONPATH': str(checkout)}


def run_cases(work: Path, checkout: Path, side: str, chosen: Sequence[Case]) -> None:
  """Runs cases by the command line of a checkout, those of a checkpoint in one process.

  Args:
    work: folder of inputs and results.
    checkout: the project's.
    side: `before`, of which results that are there are kept, or `after`.
    chosen: the cases.
  """
  plans: dict[str, list[dict[str, Any]]] = {}
  for case in chosen:
    source = work / 'inputs' / case.checkpoint / f'{case.records}.jsonl'
    key = hashlib.sha256()
    for part in (str(checkout).encode(), *map(str.encode, _flags(case.settings)), source.read_bytes()):
      key.update(part + b'\0')
    folder = work / side / case.name
    run = _read_run(folder)
    if side == 'before' and run.get('key') == key.hexdigest() and run['code'] == 0:
      continue
    if folder.exists():
      shutil.rmtree(folder)
    folder.mkdir(parents=True)
    own = [f'--input={source}', f'--output={folder / "output.jsonl"}', f'--trace={folder / "trace"}', '--dtype=float32']
    if case.checkpoint != 'bundled':
      own.append(f'--checkpoint={work / "checkpoints" / case.checkpoint}')
    plan = {'name': case.name, 'folder': str(folder), 'key': key.hexdigest(), 'flags': own + _flags(case.settings)}
    plans.setdefault(case.checkpoint, []).append(plan)
  for plan in plans.values():
    process = subprocess.Popen(
      [sys.executable, '-c', _DRIVER],
      cwd=checkout,
      env=_environment(checkout),
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    with process:
      # One that ends before it has read its cases says why by itself.
      with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(plan))
        process.stdin.close()
      for line in process.stdout:
        print(f'{side}: {line.rstrip()} s', file=sys.stderr, flush=True)
    if process.returncode:
      print(f'{side}: the process of {plan[0]["name"]} and others ended with {process.returncode}', file=sys.stderr)


def _read_run(folder: Path) -> dict[str, Any]:
  path = folder / 'run.json'
  return json.loads(path.read_text('utf-8')) if path.exists() else {}


@dataclasses.dataclass
class Comparison:
  """What was found about a case.

  Attributes:
    differences: what must not be; empty where all is equal.
    gained: names that only traces of the later version have.
    largest: the largest relative difference of floats that counts as none.
  """

  differences: list[str] = dataclasses.field(default_factory=list)
  gained: set[str] = dataclasses.field(default_factory=set)
  largest: float = 0.0

  def sentence(self) -> str:
    """The finding in one line."""
    if self.differences:
      first = list(dict.fromkeys(self.differences))
      more = f'; and {len(first) - 3} more' if len(first) > 3 else ''
      return 'DIFFERS: ' + '; '.join(first[:3]) + more
    parts = ['equal']
    if self.largest:
      parts.append(f'floats within {self.largest:.1g}')
    if self.gained:
      parts.append(f'only after: {", ".join(sorted(self.gained))}')
    return ', '.join(parts)


def compare_case(before: Path, after: Path, tolerance: float) -> Comparison:
  """Compares the two folders of a case."""
  found = Comparison()
  for side, folder in (('before', before), ('after', after)):
    code = _read_run(folder).get('code', 'no exit code')
    if code != 0:
      log = folder / 'stderr.txt'
      lines = log.read_text('utf-8').strip().splitlines() if log.exists() else []
      found.differences.append(f'{side} ended with {code}: {lines[-1] if lines else "nothing was written"}')
  if found.differences:
    return found
  old, new = ((folder / 'output.jsonl').read_bytes() for folder in (before, after))
  if old != new:
    found.differences.append(_tell_lines(old.splitlines(), new.splitlines()))
  traces = [{path.name for path in (folder / 'trace').glob('*.npz')} for folder in (before, after)]
  if traces[0] != traces[1] or not traces[0]:
    found.differences.append(f'traces of {sorted(traces[0])} before and of {sorted(traces[1])} after')
  for name in sorted(traces[0] & traces[1]):
    with np.load(before / 'trace' / name) as old, np.load(after / 'trace' / name) as new:
      compare_arrays(dict(old), dict(new), found, tolerance, name)
  return found


def _tell_lines(old: Sequence[bytes], new: Sequence[bytes]) -> str:
  """Where two files of JSON lines differ first."""
  if len(old) != len(new):
    return f'{len(old)} records before and {len(new)} after'
  for index, (one, other) in enumerate(zip(old, new, strict=True)):
    if one != other:
      one, other = json.loads(one), json.loads(other)
      fields = [name for name in {**one, **other} if [name in one, one.get(name)] != [name in other, other.get(name)]]
      return f'record {index} in {", ".join(fields) or "its spelling"}'
  return 'the ends of lines'


def compare_arrays(
  old: Mapping[str, np.ndarray], new: Mapping[str, np.ndarray], found: Comparison, tolerance: float, trace: str
) -> None:
  """Compares the arrays of two traces and notes in `found` what it finds.

  Args:
    old: arrays of the earlier version.
    new: those of the later one.
    found: of the case.
    tolerance: relative, of floats.
    trace: names the traces.
  """
  found.gained |= new.keys() - old.keys()
  for name, array in old.items():
    if name not in new:
      found.differences.append(f'{name} only before')
      continue
    other = new[name]
    if name == 'settings':
      one, two = json.loads(str(array)), json.loads(str(other))
      found.gained |= {f'settings.{key}' for key in two.keys() - one.keys()}
      wrong = [key for key in one if key not in two or one[key] != two[key]]
      found.differences += [f'{trace}: settings.{key} {one[key]!r} -> {two.get(key, "missing")!r}' for key in wrong]
    elif name == 'reason_names':
      # They name bits, whose order must stay.
      if other[: len(array)].tolist() != array.tolist():
        found.differences.append(f'reason_names {array.tolist()} -> {other.tolist()}')
      found.gained |= {f'reason_names.{reason}' for reason in other[len(array) :].tolist()}
    elif array.shape != other.shape:
      found.differences.append(f'{trace}: {name} of shape {array.shape} -> {other.shape}')
    elif array.dtype != other.dtype and not array.dtype.kind == other.dtype.kind == 'U':
      found.differences.append(f'{trace}: {name} of {array.dtype} -> {other.dtype}')
    elif array.dtype.kind == 'f':
      distance = _relative(array.astype(np.float64), other.astype(np.float64))
      if distance > tolerance:
        found.differences.append(f'{trace}: {name} by {distance:.2g}')
      else:
        found.largest = max(found.largest, distance)
    elif not np.array_equal(array, other):
      found.differences.append(f'{trace}: {name} in {np.count_nonzero(array != other)} of {array.size}')


def _relative(old: np.ndarray, new: np.ndarray) -> float:
  """The largest relative difference; infinite where one is infinite or no number and the other is another."""
  same = (old == new) | (np.isnan(old) & np.isnan(new))
  finite = np.isfinite(old) & np.isfinite(new)
  if not np.all(same | finite):
    return np.inf
  old, new = old[finite & ~same], new[finite & ~same]
  return float(np.max(np.abs(old - new) / np.maximum(np.abs(old), np.abs(new)), initial=0.0))


def _figures(folder: Path) -> Iterator[str]:
  """How much a case had to decide: rows, steps, refreshes, tokens taken back."""
  path = folder / 'output.jsonl'
  records = [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []
  total = Counter()
  for record in records:
    total.update({name: record[name] for name in ('steps', 'refreshes', 'remasked')})
  yield from map(str, (len(records), total['steps'], total['refreshes'], total['remasked']))


def compare(work: Path, before: Path, after: Path, chosen: Sequence[Case], tolerance: float) -> bool:
  """Runs the cases, prints the table, and tells whether all are equal.

  Raises:
    ValueError: a checkpoint that cannot be converted.
  """
  prepare(work, before, chosen)
  for side, checkout in (('before', before), ('after', after)):
    run_cases(work, checkout, side, chosen)
  width = max(len(case.name) for case in chosen)
  print(f'{"case":<{width}} rows steps refreshes  back')
  different = 0
  gained = set()
  for case in chosen:
    found = compare_case(work / 'before' / case.name, work / 'after' / case.name, tolerance)
    different += bool(found.differences)
    gained |= found.gained
    rows, steps, refreshes, back = _figures(work / 'before' / case.name)
    print(f'{case.name:<{width}} {rows:>4} {steps:>5} {refreshes:>9} {back:>5}  {found.sentence()}')
  print(f'{len(chosen) - different} of {len(chosen)} cases are equal')
  if gained:
    print(f'only after: {", ".join(sorted(gained))}')
  return not different


def main(argv: list[str]) -> None:
  """Runs the command."""
  if len(argv) != 1:
    raise app.UsageError('there are no positional arguments')
  before, after = (Path(folder).resolve() for folder in (_BEFORE.value, _AFTER.value))
  for name, folder in (('before', before), ('after', after)):
    if not (folder / 'run_decode.py').is_file():
      sys.exit(f'error: {name} must be a checkout of the project, got {folder}')
  try:
    chosen = [case for case in cases() if re.search(_ONLY.value or '', case.name)]
  except re.error as error:
    sys.exit(f'error: only must be a regular expression, got {_ONLY.value!r}: {error}')
  if not chosen:
    sys.exit(f'error: only must match the name of a case, got {_ONLY.value!r}')
  with tempfile.TemporaryDirectory() as temporary:
    try:
      equal = compare(Path(_WORK.value or temporary).resolve(), before, after, chosen, _TOLERANCE.value)
    except ValueError as error:
      sys.exit(f'error: {error}')
  sys.exit(0 if equal else 1)


if __name__ == '__main__':
  flags.mark_flags_as_required(['before', 'after'])
  app.run(main)

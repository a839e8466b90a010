"""The figures of the paper (arXiv 2608.08086 v2), declared once; no JAX.

Pass@1 is in per cent, base and ET tests. Benchmarks go by the name of their task here, the part before a colon.
"""

from collections.abc import Mapping
import dataclasses

MBPP, HUMANEVAL, LIVECODEBENCH = 'mbpp', 'humaneval', 'livecodebench'
MATH, FINQA, PUBMEDQA = 'math500', 'finqa', 'pubmedqa'


def benchmark(task: str) -> str:
  """The benchmark of a task, such as `mbpp` of `mbpp:sanitized.jsonl`, and of the same with more tests."""
  return task.partition(':')[0].removesuffix('_et')


def score(task: str, base: float | None, more_tests: float | None) -> float | None:
  """Of two figures the one that a task's tests are of."""
  return more_tests if task.partition(':')[0].endswith('_et') else base


@dataclasses.dataclass(frozen=True)
class Line:
  """A line of the main table, measured on LLaDA-8B-Instruct.

  Attributes:
    name: of the method, as printed.
    mean: Pass@1 over MBPP, HumanEval, their ET and LiveCodeBench.
    speed: mean, against one token a step.
    scores: Pass@1 by benchmark, base and ET.
    seconds: a problem, by benchmark.
  """

  name: str
  mean: float
  speed: float
  scores: Mapping[str, tuple[float, float | None]]
  seconds: Mapping[str, float]


def _line(name, mbpp, mbpp_s, humaneval, humaneval_s, livecodebench, livecodebench_s, mean, speed) -> Line:
  return Line(
    name=name,
    mean=mean,
    speed=speed,
    scores={MBPP: mbpp, HUMANEVAL: humaneval, LIVECODEBENCH: (livecodebench, None)},
    seconds={MBPP: mbpp_s, HUMANEVAL: humaneval_s, LIVECODEBENCH: livecodebench_s},
  )


ONE_TOKEN, SABER, ARCHER = 'LLaDA-Confidence', 'Saber', 'Archer'
_LINES = (
  _line(ONE_TOKEN, (43.56, 30.44), 14.31, (43.29, 35.37), 19.86, 8.75, 28.98, 32.28, 1.00),
  _line('Fast-dLLM cache', (44.50, 31.62), 11.85, (41.46, 36.59), 11.95, 7.75, 12.75, 32.38, 1.71),
  _line('Fast-dLLM parallel', (40.05, 29.27), 3.40, (41.46, 36.59), 4.60, 8.25, 4.85, 31.12, 4.84),
  _line('dKV-Cache-Decode', (45.67, 32.32), 12.62, (42.07, 35.98), 14.54, 10.00, 17.66, 33.21, 1.38),
  _line('dKV-Cache-Greedy', (23.19, 18.27), 12.36, (15.24, 14.63), 15.82, 2.00, 21.25, 14.67, 1.26),
  _line('dLLM-Cache', (44.03, 32.32), 9.28, (40.24, 34.15), 10.16, 10.00, 11.53, 32.15, 2.00),
  _line(SABER, (44.03, 31.38), 8.45, (44.51, 37.20), 12.13, 7.25, 17.75, 32.87, 1.65),
  _line(ARCHER, (44.50, 32.55), 6.20, (43.29, 37.80), 8.07, 10.00, 9.81, 33.63, 2.57),
)
MAIN = {line.name: line for line in _LINES}
# Which of them a decoder and what is kept are; None where everything is recomputed. The paper does not say which of
# Fast-dLLM's two caches it ran; the one that it calls its cache keeps what stands before the block.
METHODS = {
  ('llada', None): ONE_TOKEN,
  ('llada', 'prefix'): 'Fast-dLLM cache',
  ('parallel', None): 'Fast-dLLM parallel',
  ('llada', 'dkv'): 'dKV-Cache-Decode',
  ('llada', 'dkv_greedy'): 'dKV-Cache-Greedy',
  ('llada', 'dllm'): 'dLLM-Cache',
  ('saber', None): SABER,
  ('saber', 'prompt'): ARCHER,
}


@dataclasses.dataclass(frozen=True)
class Pair:
  """Saber and Archer of one model on one benchmark.

  Attributes:
    saber, archer: Pass@1, base and ET.
    speed: of Archer against Saber.
    k: the radius.
  """

  saber: tuple[float, float | None]
  archer: tuple[float, float | None]
  speed: float
  k: int


# By logit alignment; DiffuCoder-7B has Dream's layout and is not compared with by name:
# MBPP 59.48/44.73 -> 60.19/45.20, 1.38x (K 8); HumanEval 57.32/51.83 -> 60.37/54.27, 1.68x (K 15).
PAIRS: Mapping[str, Mapping[str, Pair]] = {
  'same_position': {
    MBPP: Pair((44.03, 31.38), (44.50, 32.55), 1.36, 11),
    HUMANEVAL: Pair((44.51, 37.20), (43.29, 37.80), 1.50, 8),
    LIVECODEBENCH: Pair((7.25, None), (10.00, None), 1.81, 10),
    MATH: Pair((25.60, None), (25.00, None), 1.27, 16),
    FINQA: Pair((29.56, None), (30.17, None), 2.50, 16),
    PUBMEDQA: Pair((69.40, None), (69.50, None), 1.48, 4),
  },
  'shifted': {
    MBPP: Pair((52.93, 41.69), (53.63, 42.15), 1.48, 17),
    HUMANEVAL: Pair((29.88, 28.05), (31.10, 28.05), 1.78, 9),
  },
}

# K (None is infinity) -> Pass@1 and speed against Saber.
RADIUS: Mapping[str, Mapping[int | None, tuple[float, float]]] = {
  MBPP: {
    1: (44.03, 1.00),
    2: (44.26, 1.01),
    4: (44.96, 1.19),
    8: (44.96, 1.30),
    16: (43.33, 1.42),
    32: (42.62, 1.43),
    None: (42.62, 1.41),
  },
  LIVECODEBENCH: {
    1: (7.25, 1.00),
    2: (7.25, 1.00),
    4: (8.00, 1.39),
    8: (9.50, 1.70),
    16: (9.25, 1.99),
    32: (8.00, 2.31),
    None: (7.00, 2.22),
  },
  HUMANEVAL: {
    1: (44.51, 1.01),
    2: (44.51, 1.00),
    4: (42.68, 1.33),
    8: (43.29, 1.51),
    16: (41.46, 1.73),
    32: (40.24, 1.82),
    None: (39.63, 1.83),
  },
}
RADIUS_SABER = {MBPP: 44.03, LIVECODEBENCH: 7.25, HUMANEVAL: 44.51}

# Matched-state feedback on MBPP: 427 pairs.
FEEDBACK = {
  'pairs': 427,
  'fresh': 43.33,
  'cached': 44.50,
  'only_fresh': 18,
  'only_cached': 23,
  'revised': 99.53,
  'after_fresh': 1.028,
  'after_cached': 1.056,
}

# Shadow forwards on MBPP: largest D of a bin -> share of differing actions in per cent, distance of the next canvases.
VALIDITY = {3: (19.88, 0.47), 7: (48.53, 1.26), 11: (56.45, 1.54), 15: (65.09, 1.90)}
VALIDITY_PROBES = 5122
# Partial Spearman of distance and age, each given the other.
PARTIAL = {'action': {'distance': 0.145, 'age': 0.040}, 'canvas': {'distance': 0.145, 'age': 0.045}}

# Share of positions revised in per cent and updates of a problem, K = 8.
ACTIVITY: Mapping[str, Mapping[str, tuple[float, float]]] = {
  MBPP: {'without re-masking': (0.0, 65.97), 'saber': (29.18, 146.98), 'archer': (30.03, 147.51)},
  HUMANEVAL: {'saber': (27.87, 157.55), 'archer': (30.24, 158.49)},
  LIVECODEBENCH: {'saber': (28.21, 158.83), 'archer': (26.93, 163.25)},
}

# Cached against full step by prompt length, G = 256.
PROMPT_LENGTH = {128: 1.30, 256: 1.59, 512: 2.07, 1024: 3.15, 2048: 4.62}
PROMPT_LENGTH_CANVAS = 256
# Whole decodings at that prompt length: the range over response lengths, which are not given one by one.
RESPONSE_LENGTH = (1.46, 1.67)
RESPONSE_LENGTH_PROMPT = 512

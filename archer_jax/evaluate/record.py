"""What is told of a task: one record per setting, from the trials of all rounds."""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from archer_jax.engine.settings import Settings
from archer_jax.evaluate.compare import Plan
from archer_jax.evaluate.compare import Trial
from archer_jax.evaluate.statistics import sign_test
from archer_jax.evaluate.statistics import speedup
from archer_jax.evaluate.statistics import wilson_interval

# Means over the problems.
_MEANS = (
  'steps',
  'nfe',
  'remasked',
  'flip_flops',
  'accepted',
  'rows_fed',
  'rows_recomputed',
  'prompt_tokens',
  'generated_tokens',
)


def base_of(settings: Mapping[str, Settings]) -> str | None:
  """The label that ratios are taken to: the first setting that refreshes in every step."""
  return next((label for label, setting in settings.items() if setting.refresh == 'always'), None)


def records(plan: Plan, rounds: Sequence[Mapping[str, Trial]]) -> list[dict[str, Any]]:
  """Sums up the rounds of a task.

  Args:
    plan: of the task.
    rounds: at least one; after an interrupt not all.

  Returns:
    A record for each setting, in the plan's order. Without a setting that refreshes in every step there is nothing to
    take ratios to, and they are None.
  """
  base = base_of(plan.settings)
  return [_record(plan, label, rounds, base) for label in plan.settings]


def _score(verdicts: Sequence[bool], first: Sequence[bool]) -> dict[str, Any]:
  """Quality, and wins and losses against the verdicts on the first setting's answers."""
  n, correct = len(verdicts), sum(verdicts)
  low, high = wilson_interval(correct, n)
  wins = sum(mine and not other for mine, other in zip(verdicts, first, strict=True))
  losses = sum(other and not mine for mine, other in zip(verdicts, first, strict=True))
  return {
    'n': n,
    'correct': correct,
    'pass_at_1': correct / n,
    'ci_low': low,
    'ci_high': high,
    'wins': wins,
    'losses': losses,
    'p_value': sign_test(wins, losses),
  }


def _record(plan: Plan, label: str, rounds: Sequence[Mapping[str, Trial]], base: str | None) -> dict[str, Any]:
  trials, firsts = [trials[label] for trials in rounds], [next(iter(trials.values())) for trials in rounds]
  results = [result for trial in trials for result in trial.results]
  n = len(results)
  joined = lambda trials, verdicts: [verdict for trial in trials for verdict in verdicts(trial)]
  score = lambda verdicts: _score(joined(trials, verdicts), joined(firsts, verdicts))
  total = lambda name: sum(getattr(result, name) for result in results)
  seconds, operations = [trial.seconds for trial in trials], [trial.operations for trial in trials]
  speed = None
  if base is not None:
    others = [trials[base] for trials in rounds]
    speed = speedup([t.seconds for t in others], [t.operations for t in others], seconds, operations)
  setting = plan.settings[label]
  return {
    'task': plan.source.name,
    'setting': label,
    **score(lambda trial: trial.solved),
    'also': {name: score(lambda trial, name=name: trial.also[name]) for name in plan.source.also},
    **{name: total(name) / n for name in _MEANS},
    'refresh_share': total('refreshes') / max(total('steps'), 1),
    'flip_flop_rate': total('flip_flops') / max(total('remasked'), 1),
    'errors': sum(result.error is not None for result in results),
    'seconds': sum(seconds),
    'tokens_per_s': total('generated_tokens') / sum(seconds),
    'operations': sum(operations),
    'speedup_wall': speed and speed.wall,
    'speedup_wall_low': speed and speed.low,
    'speedup_wall_high': speed and speed.high,
    'speedup_counted': speed and speed.counted,
    'kept_bytes': max(trial.kept_bytes for trial in trials),
    'gen_length': setting.knobs['gen_length'],
    'batch_size': plan.batch_size,
    'settings': {
      **{name: getattr(setting, name) for name in ('decoder', 'refresh', 'block_length', 'seed', 'chat')},
      'reuse': setting.methods.reuse,
      **setting.switches,
      **setting.row({}),
    },
  }

"""Delayed feedback: what becomes of wrong tokens that were committed with confidence, with fresh and with kept prompts.

    python benchmarks/feedback.py --n 304 --json feedback.json --figure feedback.png

Where a question has one right answer each token that WINO commits is right or wrong; puzzles of `sudoku6` with several
completions are left out. From the step behind its commit on, the leave-one-out view (the shadow row of its position,
which does not see it) says how probable it still is; that is measured with the kept prompt that the decoding uses and,
beside it, with a fresh one of the same canvas. A token that was taken back is followed on, since the view does not
depend on what stands there, until another is committed in its place or the row ends; so the curves of later steps are
over those that lasted as long. Curves are of log-odds, since probabilities saturate.
"""

from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
from pathlib import Path
from typing import Any

from absl import app
from absl import flags
import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
from trajectory import COLORS
from trajectory import batches
from trajectory import check_files
from trajectory import prepared
from trajectory import print_rows
from trajectory import write_json

from archer_jax import numerics
from archer_jax.calibration.measure import fresh_logits
from archer_jax.config import DecodeConfig
from archer_jax.decoders import base
from archer_jax.evaluate.compare import Plan
from archer_jax.evaluate.run import Evaluation
from archer_jax.loop.step import staged_step
from archer_jax.tasks import sudoku6
from archer_jax.types import DecodeState

_TASKS = flags.DEFINE_string('tasks', 'sudoku6,sort', 'tasks between commas')
_N = flags.DEFINE_integer('n', 304, 'problems of each task', lower_bound=2)
_BATCH = flags.DEFINE_integer('batch_size', 16, 'problems decoded together', lower_bound=1)
_COMPARE = flags.DEFINE_string('compare', 'always,archer:8,once', 'settings as of archer_jax.evaluate, of wino')
_CONFIDENT = flags.DEFINE_float(
  'confident', 0.95, 'probability from which a commit is confident', lower_bound=0, upper_bound=1
)
_JSON = flags.DEFINE_string('json', None, 'write the figures to this file')
_FIGURE = flags.DEFINE_string('figure', None, 'draw to this file')
_DELAYS = 8


@dataclasses.dataclass(kw_only=True)
class Commit:
  """A token that was committed.

  Attributes:
    problem, position, token: which one.
    is_right: whether it is that of the answer.
    probability: of the token when it was committed.
    taken_back: steps until it was re-masked, None if it never was.
    kept, fresh: its log-odds in the leave-one-out view, by steps since the commit from 1.
  """

  problem: int
  position: int
  token: int
  is_right: bool
  probability: float
  taken_back: int | None = None
  kept: list[float] = dataclasses.field(default_factory=list)
  fresh: list[float] = dataclasses.field(default_factory=list)


def probability(odds: Any) -> np.ndarray:
  """Of log-odds."""
  return 1 / (1 + np.exp(-np.asarray(odds, np.float64)))


@functools.partial(jax.jit, static_argnames='cfg', donate_argnames='state')
def probe(params, state: DecodeState, watched: Array, *, cfg: DecodeConfig) -> tuple[DecodeState, dict[str, Array]]:
  """A step, and log-odds [B, G]: of `watched` tokens [B, G] leave-one-out, and of those that are committed."""
  after, record, stages = staged_step(params, state, cfg=cfg)
  kept, fresh = stages.outcome.logits, fresh_logits(params, state, stages, cfg=cfg)
  index, twin = stages.views.columns, stages.views.shadow.columns
  rows = index.shape[1]
  nothing = jnp.zeros(state.canvas.shape, jnp.float32)

  def support(logits, tokens, columns):
    odds = numerics.log_odds(logits, base.from_canvas(tokens, columns, 0))
    return base.to_canvas(odds, columns, jnp.ones_like(columns, bool), nothing)

  return after, {
    'kept': support(kept[:, rows:], watched, twin),
    'fresh': support(fresh[:, rows:], watched, twin),
    'committed': support(kept[:, :rows], after.canvas, index),
    'accepted': record.accepted & record.live[:, None],
    'canvas': after.canvas,
  }


def with_one_answer(plan: Plan) -> Plan:
  """The plan of a task without the questions that have several right answers."""
  kept = [i for i, p in enumerate(plan.problems) if plan.source.name != 'sudoku6' or sudoku6.is_unique(p)]
  requests = {label: [requests[i] for i in kept] for label, requests in plan.requests.items()}
  return dataclasses.replace(plan, problems=[plan.problems[i] for i in kept], requests=requests)


def follow(evaluation: Evaluation, plan: Plan, label: str) -> list[Commit]:
  """Decodes a task and follows every token that was committed."""
  tokenizer, mask = evaluation.tokenizer, plan.settings[label].model.mask_id
  commits = []
  for problems, state, cfg in batches(plan, label, tokenizer):
    if cfg.decoder != 'wino' or cfg.block_length < plan.settings[label].knobs['gen_length']:
      raise app.UsageError(f'{label} must be of wino and one block, got {cfg.decoder} and {cfg.block_length} columns')
    answers = [[*tokenizer.encode(plan.problems[i].answer), plan.settings[label].model.eos_id] for i in problems]
    watched = np.zeros(state.canvas.shape, np.int32)
    followed: dict[tuple[int, int], tuple[int, Commit]] = {}
    step = 0
    while not np.all(done := jax.device_get(state.done)):
      state, seen = probe(evaluation.params, state, jnp.asarray(watched), cfg=cfg)
      seen = jax.device_get(seen)
      for (row, position), (since, commit) in list(followed.items()):
        if done[row]:
          continue
        commit.kept.append(float(seen['kept'][row, position]))
        commit.fresh.append(float(seen['fresh'][row, position]))
        if commit.taken_back is None and seen['canvas'][row, position] == mask:
          commit.taken_back = step - since
      for row, position in np.argwhere(seen['accepted'] & (seen['canvas'] != mask)).tolist():
        # Behind the answer's end there is nothing right or wrong.
        if row < len(problems) and position < len(answers[row]):
          token = int(seen['canvas'][row, position])
          commit = Commit(
            problem=problems[row],
            position=position,
            token=token,
            is_right=token == answers[row][position],
            probability=float(probability(seen['committed'][row, position])),
          )
          commits.append(commit)
          followed[row, position] = step, commit
          watched[row, position] = token
      step += 1
  return commits


def summary(task: str, label: str, n: int, commits: Sequence[Commit]) -> dict[str, Any]:
  """What became of a setting's commits."""
  last = {(commit.problem, commit.position): commit for commit in commits}
  wrong = [commit for commit in commits if not commit.is_right]
  sure = [commit for commit in wrong if commit.probability >= _CONFIDENT.value]
  back = [commit for commit in sure if commit.taken_back is not None]
  right = [commit for commit in commits if commit.is_right]
  share = lambda part, whole: len(part) / len(whole) if whole else None
  curves = {'kept': defaultdict(list), 'fresh': defaultdict(list)}
  for commit in sure:
    for kind, curve in curves.items():
      for delay, value in enumerate(getattr(commit, kind)[:_DELAYS], 1):
        curve[delay].append(value)
  return {
    'task': task,
    'setting': label,
    'n': n,
    'commits': len(commits),
    'wrong': len(wrong),
    'sure_wrong': len(sure),
    'taken_back': share(back, sure),
    'steps_until': float(np.mean([commit.taken_back for commit in back])) if back else None,
    'then_right': share([c for c in back if last[c.problem, c.position].is_right], back),
    'right_taken_back': share([c for c in right if c.taken_back is not None], right),
    'curve': [
      {
        'delay': delay,
        'tokens': len(curves['kept'][delay]),
        **{f'{kind}_log_odds': float(np.mean(curve[delay])) for kind, curve in curves.items()},
        **{f'{kind}_probability': float(np.mean(probability(curve[delay]))) for kind, curve in curves.items()},
      }
      for delay in sorted(curves['kept'])
    ],
  }


def draw(path: Path, told: Sequence[Mapping[str, Any]]) -> None:
  """How probable confident wrong tokens stay in the leave-one-out view, a panel for each task."""
  from matplotlib.figure import Figure

  tasks = list(dict.fromkeys(row['task'] for row in told))
  figure = Figure(figsize=(max(6, 4.6 * len(tasks)), 4.6), layout='constrained')
  panels = figure.subplots(1, len(tasks), squeeze=False, sharey=True)[0]
  for panel, task in zip(panels, tasks, strict=True):
    mine = [row for row in told if row['task'] == task]
    for number, row in enumerate(mine):
      delays = [point['delay'] for point in row['curve']]
      for kind, line in (('kept', '-o'), ('fresh', '--s')):
        # A setting that refreshes in every step keeps nothing.
        if kind == 'kept' and row['setting'].startswith('always'):
          continue
        values = [point[f'{kind}_log_odds'] for point in row['curve']]
        label = f'{row["setting"]}, {kind} prompt'
        panel.plot(delays, values, line, color=COLORS[number % len(COLORS)], markersize=4, label=label)
    counts = ', '.join(f'{row["setting"]} {row["sure_wrong"]}' for row in mine)
    panel.set_title(f'{task}, {mine[0]["n"]} problems; confident wrong tokens:\n{counts}', fontsize=9)
    panel.axhline(0, color='gray', linewidth=1)
    panel.set_xlabel('steps since the commit')
    panel.grid(alpha=0.25)
  panels[0].set_ylabel('support of a wrong token without itself\n(mean log-odds; 0 is one half)')
  handles, labels = panels[0].get_legend_handles_labels()
  figure.legend(handles, labels, loc='outside lower center', ncols=2, frameon=False, fontsize=9)
  figure.savefig(path, dpi=150)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'there are no positional arguments, got {argv[1]!r}')
  check_files(_JSON.value, _FIGURE.value)
  evaluation, told = prepared(_TASKS.value, _N.value, _COMPARE.value, _BATCH.value, '--decoder=wino'), []
  for plan in map(with_one_answer, evaluation.plans):
    mine = [
      summary(plan.source.name, label, len(plan.problems), follow(evaluation, plan, label)) for label in plan.settings
    ]
    told += mine
    short = [{key: value for key, value in row.items() if key not in ('curve', 'task', 'n')} for row in mine]
    print_rows(
      f'{plan.source.name}: n = {len(plan.problems)}; wrong tokens of probability >= {_CONFIDENT.value} are sure', short
    )
    for row in mine:
      if row['curve']:
        print_rows(f'leave-one-out support of sure wrong tokens, {row["setting"]}', row['curve'])
    write_json(_JSON.value, {'settings': told, 'confident': _CONFIDENT.value, 'run': dict(evaluation.facts)})
    if _FIGURE.value is not None:
      draw(Path(_FIGURE.value), told)


if __name__ == '__main__':
  app.run(main)

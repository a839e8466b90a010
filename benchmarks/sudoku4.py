"""How many of the public 4x4 sudoku puzzles the bundled model solves, by decoder and refresh rule.

    python benchmarks/sudoku4.py [--json FILE]

The puzzles are never in training. A puzzle with several solutions counts as solved by any valid completion.
"""

import json
from pathlib import Path

from absl import app
from absl import flags

import archer_jax
from archer_jax.tasks import sudoku4

_JSON = flags.DEFINE_string('json', None, 'write the figures to this file')
_CHECKPOINT = flags.DEFINE_string('checkpoint', None, 'checkpoint to evaluate (default: the bundled model)')
_PUZZLES = flags.DEFINE_string(
  'puzzles',
  str(Path(__file__).resolve().parents[1] / 'tests/tasks/sudoku4_public_a.csv'),
  'CSV file with the columns Puzzle and Solution',
)

_WINO = {'decoder': 'wino', 'threshold': 0.9, 'shadow': 'self'}
_ONE = {'decoder': 'llada', 'steps': 17}
SETTINGS = {
  'one token per step, always': {**_ONE, 'refresh': 'always'},
  'one token per step, archer': {**_ONE, 'refresh': 'archer'},
  'wino, always': {**_WINO, 'refresh': 'always'},
  'wino, archer': {**_WINO, 'refresh': 'archer'},
  'wino, once': {**_WINO, 'refresh': 'once'},
  'wino, archer, threshold 0.6': {**_WINO, 'refresh': 'archer', 'threshold': 0.6},
  'wino, archer, official shadow': {**_WINO, 'refresh': 'archer', 'shadow': 'official'},
}


def main(argv: list[str]) -> None:
  del argv
  model, params, tokenizer = archer_jax.load(_CHECKPOINT.value, dtype='float32')
  problems = sudoku4.read_problems(Path(_PUZZLES.value))
  prompts = [problem.prompt for problem in problems]
  groups = [sudoku4.group(problem) for problem in problems]
  records = []
  print(f'{"setting":>30} {"unique":>9} {"ambiguous":>10} {"steps":>6} {"refresh share":>14} {"re-masked":>10}')
  for name, settings in SETTINGS.items():
    results = archer_jax.generate(
      model, params, tokenizer, prompts, gen_length=17, block_length=17, batch_size=50, **settings
    )
    solved = [sudoku4.is_solved(problem, result.text) for problem, result in zip(problems, results, strict=True)]
    count = {g: (sum(s for s, of in zip(solved, groups, strict=True) if of == g), groups.count(g)) for g in set(groups)}
    steps = sum(result.steps for result in results)
    record = {
      'setting': name,
      'equal_to_reference': sum(r.text == p.answer for r, p in zip(results, problems, strict=True)),
      **{f'{g}_solved': n for g, (n, _) in count.items()},
      **{f'{g}_puzzles': n for g, (_, n) in count.items()},
      'steps': steps / len(results),
      'refresh_share': sum(result.refreshes for result in results) / steps,
      'remasked': sum(result.remasked for result in results),
    }
    records.append(record)
    share = {g: f'{n}/{of}' for g, (n, of) in count.items()}
    print(
      f'{name:>30} {share["unique"]:>9} {share["ambiguous"]:>10} {record["steps"]:6.2f} '
      f'{record["refresh_share"]:14.2f} {record["remasked"]:10d}',
      flush=True,
    )
  if _JSON.value:
    Path(_JSON.value).write_text(json.dumps(records, indent=1) + '\n')


if __name__ == '__main__':
  app.run(main)

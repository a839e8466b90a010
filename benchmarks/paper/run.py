"""A run: its pieces in their order, each on the disk at once, and the tables from what is there."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import hashlib
import importlib
import json
from pathlib import Path
import sys
import time
from types import ModuleType
from typing import Any

from tqdm import tqdm

from archer_jax.checkpoints import checkpoint
from archer_jax.evaluate.run import checkpoint_name
from archer_jax.evaluate.run import prepare_tasks
from archer_jax.jobs.output import make_folder
from archer_jax.mesh import make_mesh
from archer_jax.sharding import check_rows
from paper.bench import Bench
from paper.command import Order
from paper.pieces import Journal
from paper.pieces import Measured
from paper.pieces import Piece
from paper.pieces import seconds_left
from paper.report import Report
from paper.settings import GEN_LENGTH


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """A run of which everything was looked at that can be wrong before anything is measured; made by `prepare`.

  Attributes:
    bench: what measures.
    journal: what is measured.
    pieces: of every table, in order.
    options: the flags that are no settings, by name.
    facts: what the figures depend on beside the command.
  """

  bench: Bench
  journal: Journal
  pieces: Mapping[str, Sequence[Piece]]
  options: Mapping[str, Any]
  facts: Mapping[str, Any]

  def run(self) -> int:
    """Measures what is missing, and prints and writes every table that is finished.

    After an interrupt the table that was under way is told of what it has. Returns the exit code.
    """
    told: dict[str, Report] = {}
    try:
      with self._bar() as bar:
        for name, pieces in self.pieces.items():
          try:
            self._measure(name, pieces, bar)
          finally:
            if self.journal.of(pieces):
              self._tell(told, name, pieces)
    except ValueError as error:
      # Such as logits that are no numbers, which only shows in decoding.
      print(f'error: {error}', file=sys.stderr)
      return 1
    return 0

  def _bar(self) -> tqdm:
    every = [piece for pieces in self.pieces.values() for piece in pieces]
    finished = sum(piece.units for piece in every if piece.key in self.journal.found)
    # A log wants a line now and then, a terminal a bar that moves. The time left is that of all tables together.
    return tqdm(
      total=sum(piece.units for piece in every),
      initial=finished,
      mininterval=0.1 if sys.stderr.isatty() else 30,
      bar_format='{desc}{percentage:3.0f}%|{bar}| {elapsed}{postfix}',
      desc='paper: ',
    )

  def _measure(self, name: str, pieces: Sequence[Piece], bar: tqdm) -> None:
    every = [piece for pieces in self.pieces.values() for piece in pieces]
    for piece in pieces:
      if piece.key in self.journal.found:
        continue
      bar.set_description(f'{name}, {piece.task or piece.part}', refresh=False)
      start = time.perf_counter()
      value = table(name).measure(self.bench, piece)
      self.journal.add(piece, Measured(value=value, seconds=time.perf_counter() - start))
      left = seconds_left(every, self.journal.found)
      bar.set_postfix_str(f'about {tqdm.format_interval(left)} left', refresh=False)
      bar.update(piece.units)

  def _tell(self, told: dict[str, Report], name: str, pieces: Sequence[Piece]) -> None:
    """Makes a table of what is there of it, prints it, and writes it with those before."""
    found = self.journal.of(pieces)
    told[name] = report = table(name).report(self.bench, found)
    if missing := len(pieces) - len(found):
      notes = [f'Not finished: {missing} of {len(pieces)} parts are missing.', *report.notes]
      told[name] = report = dataclasses.replace(report, notes=notes)
    text = report.markdown()
    with tqdm.external_write_mode(sys.stdout):
      print(text, flush=True)
    if self.options['json'] is not None:
      file = Path(self.options['json'])
      content = {'tables': {name: one.content() for name, one in told.items()}, 'run': self.facts}
      # Replaced as a whole, so that it is never half of one.
      part = file.with_name(f'{file.name}.part')
      part.write_text(json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + '\n', encoding='utf-8')
      part.replace(file)
    if self.options['figure'] is not None:
      folder = Path(self.options['figure'])
      (folder / f'{name}.md').write_text(text, encoding='utf-8')
      table(name).draw(report).savefig(folder / f'{name}.png', dpi=150)


def table(name: str) -> ModuleType:
  """The module of a table."""
  return importlib.import_module(f'paper.{name}')


def prepare(order: Order, dtype: str, facts: Callable[[], Mapping[str, Any]]) -> Run:
  """Opens the tasks, checks them and the files of an earlier run, and loads the checkpoint.

  Args:
    order: from the command line.
    dtype: of parameters and matmuls.
    facts: tells versions and devices.

  Raises:
    ValueError, OSError: what is wrong, in one sentence.
  """
  options, command = order.options, order.command
  mesh = None if options['mesh'] is None else make_mesh(options['mesh'])
  if mesh is not None:
    check_rows(options['batch_size'], mesh)
    if any(device.process_index != mesh.devices.flat[0].process_index for device in mesh.devices.flat):
      raise ValueError(f'mesh must have devices of one process, got {options["mesh"]}')
  length = lambda source: options['gen_length'] or source.gen_length or GEN_LENGTH
  plans, tokenizer = prepare_tasks(command, dtype, length)
  folder = checkpoint.BUNDLED if options['checkpoint'] is None else Path(options['checkpoint'])
  known = {
    'checkpoint': checkpoint_name(options['checkpoint']),
    'checkpoint_sha256': hashlib.sha256((folder / 'manifest.json').read_bytes()).hexdigest()[:16],
    'dtype': dtype,
    'tables': list(order.tables),
    'seed': 0,
    **command.base,
    'problems': {plan.source.name: len(plan.problems) for plan in plans},
    'problems_sha256': {plan.source.name: _digest(plan.problems) for plan in plans},
    **{
      name: options[name]
      for name in ('batch_size', 'mesh', 'gen_length', 'refresh_distance', 'worked_examples', 'extract')
    },
    **facts(),
  }
  path = None if options['json'] is None else Path(f'{options["json"]}.pieces.jsonl')
  if path is not None and Path(options['json']).exists() and not path.exists():
    raise ValueError(
      f'json {options["json"]} exists already, without the parts that it was made from, and is never overwritten'
    )
  if options['figure'] is not None:
    make_folder('figure', Path(options['figure']))
    there = [name for name in order.tables if (Path(options['figure']) / f'{name}.md').exists()]
    if there and (path is None or not path.exists()):
      raise ValueError(
        f'figure {options["figure"]} has {there[0]}.md of another run already, which is never overwritten'
      )
  journal = Journal(path, known)
  _, params, _ = checkpoint.load(options['checkpoint'], dtype=dtype, mesh=mesh)
  bench = Bench(plans=plans, params=params, tokenizer=tokenizer, k=options['refresh_distance'], mesh=mesh)
  pieces = {name: table(name).pieces(bench) for name in order.tables}
  return Run(bench=bench, journal=journal, pieces=pieces, options=options, facts=known)


def _digest(problems: Sequence[Any]) -> str:
  """Tells sets of problems apart."""
  return hashlib.sha256(json.dumps([[p.prompt, p.answer] for p in problems]).encode()).hexdigest()[:16]

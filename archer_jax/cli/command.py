"""The command line of archer-decode: flags, their precedence, and the run that they describe.

JAX is imported once the flags are known to be right, so that --help and mistakes answer at once.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import math
from pathlib import Path
import sys
from typing import TYPE_CHECKING
from typing import Any
from typing import NoReturn

from absl import flags

from archer_jax import runtime
from archer_jax.calibration import file as calibration
from archer_jax.checkpoints.manifest import read_manifest
from archer_jax.engine.settings import Settings
from archer_jax.engine.settings import make_settings
from archer_jax.flags import Definer
from archer_jax.flags import Groups
from archer_jax.flags import help_text
from archer_jax.flags import leave
from archer_jax.flags import read_flags
from archer_jax.flags import run_command
from archer_jax.jobs import begin
from archer_jax.jobs import output
from archer_jax.jobs import preemption
from archer_jax.jobs.folder import is_folder
from archer_jax.jobs.folder import open_path
from archer_jax.jobs.part import part_lock
from archer_jax.mesh import parse_mesh
from archer_jax.report.image import check_matplotlib

if TYPE_CHECKING:
  from archer_jax.cli.job import Job

_USAGE = 'archer-decode [--flag=value ...]'
_PRECEDENCE = (
  'Decodes prompts with a diffusion language model; without a flag, a built-in example with the bundled model. '
  'A flag wins over the file of --config, that over what the checkpoint recommends, that over the defaults below.'
)


def define_flags(values: flags.FlagValues) -> Groups:
  """Defines every flag on `values` and returns them in groups, in the order of the help."""
  define = Definer(values)
  return {
    'What to decode': [
      define.text('checkpoint', 'folder that archer-convert made (default: the bundled model)'),
      define.texts('prompt', 'a prompt; may be given again'),
      define.text('input', 'file of JSON lines with id, prompt | messages | prompt_ids, seed, stop, knobs; - is stdin'),
      define.switch('chat', False, "prompts are a user's turn in the checkpoint's chat template"),
      define.texts('stop', 'a text before which an answer ends; may be given again'),
    ],
    'Where to': [
      define.text(
        'output',
        'file of JSON lines to make, or the folder of a job, which ends in / or exists; - is stdout '
        '(default: text on stdout)',
      ),
      define.switch('logprobs', False, "write each token's log-probability and the step that committed it"),
      define.switch('resume', False, "go on with the job in the output's folder, if there is one"),
      define.text('trace', 'folder for an .npz file of every step per request'),
      define.text('report', 'folder for a picture and a page of every step per request; needs matplotlib'),
      define.switch('watch', False, 'show every step as it is taken'),
      define.switch(
        'stats', False, 'print the figures of the run; with an output file also write them to OUTPUT.stats.json'
      ),
      define.text('profile', 'folder for a profile of ten seconds from the first results on'),
    ],
    **define.decoding(),
    'Run': [
      *define.running('requests without a seed draw theirs from this and their place in the input'),
      define.text(
        'mesh', 'devices by axis, such as data:4,model:2; more than this process has are those of all (default: one)'
      ),
    ],
    'Many processes': [
      define.text(
        'coordinator',
        'host:port of process 0; auto takes it and the next two from SLURM, Open MPI, Kubernetes or a TPU',
      ),
      define.whole('num_processes', None, 1, 'processes of the job, each of which decodes its share'),
      define.whole('process_id', None, 0, 'which of them this is, from 0'),
      define.whole('start_timeout', 300, 1, 'seconds to wait for the others at the start'),
    ],
  }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
  """What the command line asks for, checked as far as it can be without JAX."""

  options: Mapping[str, Any]
  settings: Settings
  example: str | None


def parse(argv: Sequence[str]) -> Command:
  """Reads the flags, the config file and the checkpoint's manifest.

  Args:
    argv: the program's name and its arguments.

  Raises:
    ValueError, OSError, flags.Error: what is wrong, in one sentence.
  """
  options, given = read_flags(argv, define_flags)
  # The same without JAX, so that nothing heavy is done for a wrong flag.
  manifest = read_manifest(options['checkpoint'])
  settings = make_settings(
    manifest.config, given, recommended=manifest.defaults, stop=options['stop'] or (), logprobs=options['logprobs']
  )
  for name in ('input', 'output', 'trace', 'profile'):
    if options[name] == '':
      raise ValueError(f'{name} must not be empty')
  if options['input'] is not None and options['prompt']:
    raise ValueError('prompt and input must not be given together')
  example = None
  if options['input'] is None and not options['prompt']:
    example = manifest.defaults.get('prompt')
    if not isinstance(example, str):
      raise ValueError('prompt or input must be given: the checkpoint brings no example')
  if options['watch'] and options['output'] == '-':
    raise ValueError('watch and output - must not be given together: both write to stdout')
  sizes = parse_mesh(options['mesh'] or 'data:1').values()
  if options['watch'] and math.prod(sizes) != 1:
    raise ValueError(f'watch must not be given with mesh {options["mesh"]}: the live view runs on one device')
  _check_processes(options)
  _check_files(options)
  return Command(options=options, settings=settings, example=example)


def _check_processes(options: Mapping[str, Any]) -> None:
  """Raises ValueError if flags of processes and of the job's folder do not go together."""
  coordinator, count, index = (options[name] for name in ('coordinator', 'num_processes', 'process_id'))
  if coordinator in (None, 'auto'):
    for name, value in (('num_processes', count), ('process_id', index)):
      if value is not None:
        raise ValueError(f'{name} must be given with coordinator host:port, got {name}={value} without')
  else:
    if not coordinator.rpartition(':')[0] or not coordinator.rpartition(':')[2].isdecimal():
      raise ValueError(f'coordinator must be host:port, such as node0:1234, or auto, got {coordinator!r}')
    if count is None or index is None:
      raise ValueError(f'num_processes and process_id must be given with coordinator {coordinator}')
    if index >= count:
      raise ValueError(f'process_id must be below num_processes, got {index} and {count}')
  if is_folder(options['output']):
    if options['input'] in (None, '-'):
      raise ValueError(f'input must be a file if output is a folder, {options["output"]}, so that it can be read again')
  elif coordinator is not None:
    raise ValueError('output must be a folder, such as answers/, if coordinator is given')
  elif options['resume']:
    raise ValueError(f'output must be the folder of a job if resume is given, got {options["output"]}')
  if coordinator is not None and options['watch']:
    raise ValueError('watch must not be given with coordinator: a job of many processes has no live view')


def _check_files(options: Mapping[str, Any]) -> None:
  """Raises ValueError or OSError if the input cannot be read or an output cannot be made."""
  if options['report'] is not None:
    check_matplotlib()
  if options['input'] not in (None, '-'):
    path = open_path(options['input'])
    if path.is_dir() or not path.exists():
      raise ValueError(f'input must be a file of JSON lines that exists, got {options["input"]}')
  is_job = is_folder(options['output'])
  if options['output'] not in (None, '-') and not is_job:
    output.check_new_file('output', Path(options['output']))
    if options['stats']:
      output.check_new_file('stats', output.stats_file(options['output']))
  if options['profile'] is not None:
    output.make_folder('profile', Path(options['profile']))
  # Those of a job may have files if the job goes on.
  if not is_job:
    output.check_result_folders(options)


def run(argv: Sequence[str] | None = None) -> NoReturn:
  """The program: runs `main` and exits with its code."""
  leave(main(sys.argv if argv is None else argv))


def main(argv: Sequence[str]) -> int:
  """Runs a command.

  Args:
    argv: the program's name and its arguments.

  Returns:
    The exit code: 0, 1 if anything is wrong or any record was, 130 after an interrupt, 75 after a preemption.
  """
  return run_command(argv, lambda: help_text(_USAGE, _PRECEDENCE, define_flags), _prepare)


def _prepare(argv: Sequence[str]) -> Callable[[], int]:
  command = parse(argv)
  runtime.set_up()
  options, settings = dict(command.options), command.settings
  if not is_folder(options['output']):
    # Flags that are right have paid for no JAX so far.
    from archer_jax.cli.job import prepare

    options['dtype'] = options['dtype'] or runtime.default_dtype()
    settings = _calibrated(options, settings)
    job = prepare(options, settings, command.example)
    return lambda: job.run(runtime.facts)

  with contextlib.ExitStack() as stack:
    notice = stack.enter_context(preemption.watch())
    processes, together = _meet(options, stack)
    try:
      settings = _calibrated(options, settings)
      job = _begin(options, settings, processes, together)
    except ValueError:
      # All of them come to this.
      processes.leave()
      raise
    kept = stack.pop_all()

  def run():
    with kept:
      return job.run(runtime.facts, notice)

  return run


def _calibrated(options: Mapping[str, Any], settings: Settings) -> Settings:
  """The settings with the checkpoint's kappa where `certified` goes without one."""
  if settings.is_calibrated:
    return settings
  manifest = read_manifest(options['checkpoint'])
  return calibration.calibrated(settings, options['checkpoint'], manifest, options['dtype'])


def _meet(options: dict[str, Any], stack: contextlib.ExitStack) -> tuple[runtime.Processes, bool]:
  """Meets the other processes of a job, if there are any.

  Args:
    options: the flags that are no settings, by name; what depends on the process is filled in.
    stack: keeps other processes from this one's part.

  Returns:
    The processes, and whether they decode together on one mesh.
  """
  folder = open_path(options['output'])
  coordinator = options['coordinator']
  if coordinator is None and runtime.on_tpu_slice():
    coordinator = 'auto'
  if coordinator != 'auto':
    # Before they meet: JAX aborts processes of which two have the same id.
    stack.enter_context(part_lock(folder, options['process_id'] or 0))
  processes = runtime.Processes()
  if coordinator is not None:
    processes = runtime.join(
      coordinator, options['num_processes'], options['process_id'], timeout=options['start_timeout']
    )
  if coordinator == 'auto':
    stack.enter_context(part_lock(folder, processes.index))
  sizes = parse_mesh(options['mesh'] or 'data:1').values()
  together = processes.count > 1 and math.prod(map(abs, sizes)) > runtime.count_local_devices()
  options['dtype'] = options['dtype'] or runtime.default_dtype()
  if options['profile'] is not None:
    # Processes of one machine would write the same files.
    options['profile'] = str(Path(options['profile']) / f'process-{processes.index:05d}')
  return processes, together


def _begin(options: Mapping[str, Any], settings: Settings, processes: runtime.Processes, together: bool) -> 'Job':
  """Checks a job, loads the checkpoint, and begins the job or goes on with it."""
  # As above.
  from archer_jax.cli.job import prepare

  start = begin.check_start(options, settings, processes, runtime.facts, together=together)
  job = problem = None
  try:
    job = prepare(options, settings, None)
  except (ValueError, OSError) as error:
    problem = str(error)
  part = begin.begin(start, problem)
  return dataclasses.replace(job, part=part, group=processes, together=together)

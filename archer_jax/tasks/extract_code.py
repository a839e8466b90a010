"""The code in a model's answer, read as leniently as a person would: the first reading that is Python counts."""

import ast
from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import re
import threading
from types import CodeType
import warnings

from archer_jax.tasks import with_line_feeds

FENCE = '```'
# How an answer begins that stands in a code block from its first character on.
OPEN_FENCE = f'{FENCE}python\n'

# A block that may have no end, and whose first line may say more than the language.
_BLOCK = re.compile(r'(?<![`\w])```[^\n`]*\n(.*?)(?:```|\Z)', re.DOTALL)
_QUIET = threading.Lock()
DEFINITION = re.compile(r'^[ \t]*(?:(?:async )?def |class |@|import \w|from [\w.]+ import )', re.MULTILINE)


def blocks(answer: str) -> list[str]:
  """The code blocks of an answer; the last may be open."""
  return _BLOCK.findall(answer)


def before_fence(answer: str) -> str:
  """What of an answer stands in the code block that it begins in."""
  return answer.partition(FENCE)[0].rstrip()


def begun_code(answer: str, is_meant: Callable[[str], bool]) -> str:
  """The code of an answer that begins in an open code block.

  It is looked for up to the closing fence, and then in the blocks behind, since an answer may talk first and open a
  block of its own. Text before and behind the code is left out, and so is the indentation of all of it.

  Args:
    answer: the text behind the open fence.
    is_meant: whether a text is code of the kind that was asked for.

  Returns:
    The first text for which it holds; the text up to the closing fence if there is none.
  """
  answer = with_line_feeds(answer)
  texts = [before_fence(answer), *blocks(answer)]
  for text in texts:
    definition = DEFINITION.search(text)
    for start in (0, *([definition.start()] if definition else [])):
      for lines in beginnings(text[start:]):
        if is_meant(code := '\n'.join(lines)):
          return code
  return texts[0]


def beginnings(text: str) -> Iterator[list[str]]:
  """Lines of a block, as many as there may be: what stands behind it begins with a line that is not indented in it."""
  lines = _block_lines(text)
  yield lines
  for end in range(len(lines) - 1, 0, -1):
    if lines[end].strip() and not lines[end][0].isspace():
      yield lines[:end]


def _block_lines(text: str) -> list[str]:
  """The lines of a block without its indentation, up to the first line that has less."""
  lines = text.strip('\n').split('\n')
  indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
  end = next((i for i, line in enumerate(lines) if line.strip() and not line.startswith(indent)), len(lines))
  return [line.removeprefix(indent) for line in lines[:end]]


def parse(program: str) -> list[ast.stmt]:
  """The statements of a program; none if it is not Python."""
  try:
    with _quiet():
      tree = ast.parse(program)
      # Which knows more mistakes, such as a return outside of a function.
      compile(tree, '', 'exec')
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    return []
  return tree.body


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  """Without warnings of what a model wrote; one thread at a time, as filters of warnings belong to all of them."""
  with _QUIET, warnings.catch_warnings(action='ignore'):
    yield


def defines(program: str, name: str) -> bool:
  """Whether a text is a program that gives a name a value."""
  return any(name in _bound(statement) for statement in parse(program))


def needed(program: str, name: str) -> str:
  """The imports of a program, and of its definitions those that a name needs, directly or not, as they are written.

  What a program does beside defining is left out: calls, tests, and whatever reads input.
  """
  statements = parse(program)
  wanted = {name}
  while True:
    kept = [statement for statement in statements if wanted & _bound(statement) or _is_import(statement)]
    names = wanted.union(*map(_names, kept))
    if names == wanted:
      break
    wanted = names
  lines = program.split('\n')
  spans = ((min([s.lineno, *(d.lineno for d in getattr(s, 'decorator_list', ()))]), s.end_lineno) for s in kept)
  numbers = {number for first, last in spans for number in range(first, last + 1)}
  return '\n'.join(lines[number - 1] for number in sorted(numbers))


def _is_import(statement: ast.stmt) -> bool:
  return isinstance(statement, ast.Import | ast.ImportFrom)


def _bound(statement: ast.stmt) -> set[str]:
  """Names to which a statement of a module may give a value, or whose value it may change."""
  # What stands in branches counts, such as a function that both define.
  compound = isinstance(statement, ast.If | ast.Try | ast.With | ast.For | ast.While)
  return set().union(*map(_bound_by_itself, ast.walk(statement) if compound else [statement]))


def _bound_by_itself(part: ast.AST) -> set[str]:
  if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
    return {part.name}
  if isinstance(part, ast.Import | ast.ImportFrom):
    return {(alias.asname or alias.name).partition('.')[0] for alias in part.names}
  if isinstance(part, ast.Assign):
    targets = part.targets
  elif isinstance(part, ast.AugAssign | ast.AnnAssign):
    targets = [part.target]
  else:
    return set()
  return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}


def _names(statement: ast.stmt) -> set[str]:
  """Names that a statement of a module may read from the module; those local to functions are not among them."""
  with _quiet():
    return _global_names(compile(ast.Module([statement], []), '', 'exec'))


def _global_names(code: CodeType) -> set[str]:
  return set(code.co_names).union(*(_global_names(part) for part in code.co_consts if isinstance(part, CodeType)))

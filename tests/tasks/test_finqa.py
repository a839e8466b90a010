"""FinQA on made-up questions in its published format."""

import json

import pytest

from archer_jax.tasks import finqa
from archer_jax.tasks.sources import open_source

ENTRY = {
  'pre_text': ['revenue of the company grew .'],
  'post_text': ['amounts are in millions .'],
  'filename': 'ABC/2009/page_1.pdf',
  'table': [['', '2009', '2008'], ['revenue', '$ 117', '$ 107']],
  'qa': {
    'question': 'what was the growth of revenue?',
    'answer': '9.35%',
    'program': 'subtract(117, 107), divide(#0, 107)',
    'exe_ans': 0.09346,
  },
  'id': 'ABC/2009/page_1.pdf-1',
}


def entry(**qa):
  return ENTRY | {'qa': ENTRY['qa'] | qa}


def open_entries(path, *entries):
  """A list as published, or an entry a line."""
  path.write_text(json.dumps(entries) if path.suffix == '.json' else '\n'.join(map(json.dumps, entries)))
  return open_source(f'finqa:{path}')


@pytest.mark.parametrize('name', ['test.json', 'test.jsonl'])
def test_prompts(tmp_path, name):
  source = open_entries(tmp_path / name, ENTRY)
  (problem,) = source.problems(None, 0)
  assert problem.prompt == (
    'revenue of the company grew .\n | 2009 | 2008\nrevenue | $ 117 | $ 107\namounts are in millions .\n\n'
    'what was the growth of revenue?\n'
    'Answer with a number, or with yes or no. End with "The answer is" and the answer.\n\n'
  )
  assert source.is_solved(problem, problem.answer) and not source.is_solved(problem, '')


PERCENT, NUMBER, NEGATIVE = {}, {'exe_ans': 1234.5, 'answer': '1234.5'}, {'exe_ans': -3.2, 'answer': '-3.2'}
SIGNLESS = {'exe_ans': 0.09346, 'answer': '0.093'}


@pytest.mark.parametrize(
  ('qa', 'answer', 'solved'),
  [
    (PERCENT, 'The answer is 9.35%.', True),
    (PERCENT, 'The answer is 9.3 %', True),
    (PERCENT, 'So \\boxed{9.35\\%}', True),
    (PERCENT, '9.346 percent', True),
    (PERCENT, 'The answer is 0.09346', True),
    (PERCENT, '0.0935', True),
    (PERCENT, '0.093458', True),
    (PERCENT, 'The answer is 9.35', True),
    (PERCENT, 'The answer is 10/107.', True),
    (PERCENT, '9.36%', False),
    (PERCENT, '9%', False),
    (PERCENT, '0.1', False),
    (PERCENT, '-9.35%', False),
    (PERCENT, '93.5%', False),
    (PERCENT, 'no idea', False),
    ({'exe_ans': 9.34579, 'answer': '9.35%'}, '9.35%', True),
    (SIGNLESS, '9.35%', True),
    (SIGNLESS, '9.35', False),
    (NUMBER, 'The answer is $1,234.5 million.', True),
    (NUMBER, 'The answer is 1234.50', True),
    (NUMBER, '1,235', True),
    (NUMBER, '1234', True),
    (NUMBER, '1236', False),
    (NUMBER, '1234.6', False),
    (NUMBER, '1234500000', False),
    (NUMBER, '123450%', True),
    (NEGATIVE, 'The answer is -3.2', True),
    (NEGATIVE, '-$3.20', True),
    (NEGATIVE, '3.2', False),
    ({'exe_ans': 0.0, 'answer': '0'}, '0', True),
    ({'exe_ans': 0.0, 'answer': '0'}, '0.1', False),
    ({'exe_ans': 5, 'answer': ''}, '5.0', True),
    ({'exe_ans': 'yes', 'answer': ''}, 'The answer is Yes.', True),
    ({'exe_ans': 'yes', 'answer': ''}, 'There is no doubt, so yes', True),
    ({'exe_ans': 'yes', 'answer': ''}, 'no', False),
    ({'exe_ans': 'no', 'answer': ''}, 'No', True),
    ({'exe_ans': 'no', 'answer': ''}, 'none', False),
    ({'exe_ans': 'no', 'answer': ''}, '', False),
  ],
)
def test_answers(tmp_path, qa, answer, solved):
  (problem,) = open_entries(tmp_path / 'test.json', entry(**qa)).problems(None, 0)
  assert finqa.is_solved(problem, answer) is solved


@pytest.mark.parametrize(
  ('bad', 'message'),
  [
    ({}, 'must have the field pre_text, got none'),
    (ENTRY | {'pre_text': 'x'}, ': pre_text must be a list of texts, got "x"'),
    (ENTRY | {'table': 'x'}, ': table must be a list of rows, got x'),
    (ENTRY | {'qa': []}, r': qa must be an object, got \[\]'),
    (ENTRY | {'qa': {'question': 'x'}}, ': qa must have the field answer, got question'),
    (entry(exe_ans='maybe'), ": qa: exe_ans must be a number, yes or no, got 'maybe'"),
    (entry(exe_ans=True), ": qa: exe_ans must be a number, yes or no, got 'True'"),
    (entry(exe_ans=float('nan')), ": qa: exe_ans must be a number, yes or no, got 'nan'"),
    (7, ' must be a JSON object, got 7'),
  ],
)
@pytest.mark.parametrize(('name', 'place'), [('bad.json', 'entry'), ('bad.jsonl', 'line')])
def test_bad_entries(tmp_path, bad, message, name, place):
  with pytest.raises(ValueError, match=rf'{name} {place} 2{message if message[0] in ": " else " " + message}'):
    open_entries(tmp_path / name, ENTRY, bad)


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('{"a": 1}\n{"b"', 'is not JSON: .*line 2 column 1.*; a file with an object a line must be named .jsonl'),
    ('7', 'must be a list or an object of JSON objects, got 7'),
    ('[]', 'has no problems'),
  ],
)
def test_other_files(tmp_path, text, message):
  path = tmp_path / 'bad.json'
  path.write_text(text)
  with pytest.raises(ValueError, match=rf'bad\.json {message}'):
    open_source(f'finqa:{path}')

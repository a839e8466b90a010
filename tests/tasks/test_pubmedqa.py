"""PubMedQA on made-up questions in its published format."""

import json

import pytest

from archer_jax.tasks import pubmedqa
from archer_jax.tasks.sources import open_source

ENTRY = {
  'QUESTION': 'Does tea help against headache?',
  'CONTEXTS': ['Tea was given to 12 persons.', 'Seven felt better.'],
  'LABELS': ['METHODS', 'RESULTS'],
  'final_decision': 'maybe',
  'LONG_ANSWER': 'It may.',
}


@pytest.mark.parametrize(
  ('name', 'text'),
  [
    ('ori_pqal.json', json.dumps({'21645374': ENTRY, '16418930': ENTRY | {'final_decision': 'no'}})),
    ('test.jsonl', f'{json.dumps(ENTRY)}\n{json.dumps(ENTRY | {"final_decision": "no"})}\n'),
  ],
)
def test_both_formats(tmp_path, name, text):
  (tmp_path / name).write_text(text)
  source = open_source(f'pubmedqa:{tmp_path / name}')
  problems = source.problems(None, 0)
  assert [problem.answer for problem in problems] == ['maybe', 'no']
  assert problems[0].prompt == (
    'Tea was given to 12 persons.\nSeven felt better.\n\nDoes tea help against headache?\n'
    'Answer with yes, no or maybe.\n\n'
  )
  for problem in problems:
    assert source.is_solved(problem, problem.answer) and not source.is_solved(problem, '')


@pytest.mark.parametrize(
  ('decision', 'answer', 'solved'),
  [
    ('yes', 'yes', True),
    ('yes', ' Yes.\n', True),
    ('yes', '**Yes**, since seven felt better.', True),
    ('yes', 'Seven felt better. The answer is yes.', True),
    ('yes', 'No doubt. Answer: YES', True),
    ('yes', 'So \\boxed{\\text{yes}}', True),
    ('yes', 'no', False),
    ('yes', 'maybe', False),
    ('yes', 'yesterday', False),
    ('yes', 'Seven felt better, yes', False),
    ('yes', 'yes, but the answer is no', False),
    ('no', 'No.', True),
    ('no', 'not', False),
    ('no', 'none', False),
    ('no', '', False),
    ('maybe', 'Maybe', True),
    ('maybe', 'may be', False),
    ('maybe', 'The answer is maybe', True),
    ('maybe', 'yes', False),
  ],
)
def test_answers(tmp_path, decision, answer, solved):
  (tmp_path / 'test.jsonl').write_text(json.dumps(ENTRY | {'final_decision': decision}))
  (problem,) = pubmedqa.read_problems(tmp_path / 'test.jsonl')
  assert pubmedqa.is_solved(problem, answer) is solved


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'final_decision': 'Yes'}, "final_decision must be one of yes, no, maybe, got 'Yes'"),
    ({'CONTEXTS': []}, r'CONTEXTS must be a list of texts that is not empty, got \[\]'),
    ({'QUESTION': ''}, 'QUESTION must be a text that is not empty'),
  ],
)
def test_bad_entries(tmp_path, changes, message):
  path = tmp_path / 'bad.json'
  path.write_text(json.dumps({'1': ENTRY, '22': ENTRY | changes}))
  with pytest.raises(ValueError, match=rf'bad\.json entry 22: {message}'):
    open_source(f'pubmedqa:{path}')

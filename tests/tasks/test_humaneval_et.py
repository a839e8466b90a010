"""HumanEval with more tests: both scores of one answer."""

import json
from pathlib import Path

import pytest
from test_humaneval import Chat

from archer_jax.tasks import humaneval
from archer_jax.tasks import humaneval_et
from archer_jax.tasks.grading import grade
from archer_jax.tasks.sources import open_source

SAMPLE = Path(__file__).parent / 'published/humaneval_et.jsonl'
RECORDS = [json.loads(line) for line in SAMPLE.read_text().splitlines()]


def test_published_solutions_pass_and_empty_answers_do_not():
  source = open_source(f'humaneval_et:{SAMPLE}')
  problems = source.problems(None, 0)
  assert [problem.hidden.task_id for problem in problems] == ['HumanEval/24', 'HumanEval/53', 'HumanEval/139']
  answers = [(problem, problem.answer) for problem in problems] + [(problem, '') for problem in problems]
  # A published test of HumanEval/53 uses a name that is nowhere, so that no answer passes it.
  assert 'assert add(x, y) == x + y' in problems[1].hidden.more_tests
  assert grade(source, answers) == [(True, True), (True, False), (True, True)] + [(False, False)] * 3
  assert (source.gen_length, list(source.also)) == (256, ['et'])


def test_an_answer_that_only_the_further_tests_find_wrong():
  source = open_source(f'humaneval_et:{SAMPLE}')
  # HumanEval's own tests of add have no number above a thousand.
  answer = '    return x + y if x < 2000 else 0\n'
  problem = humaneval.make_problem(RECORDS[1], 'saber', more_tests=['assert add(5000, 1) == 5001'])
  assert grade(source, [(problem, answer)]) == [(True, False)]


def test_prompts():
  head = RECORDS[1]['prompt']
  assert humaneval_et.read_problems(SAMPLE)[1].prompt == f'```python\n{head}```\n\n```python\n{head}'
  assert humaneval_et.read_problems(SAMPLE, Chat())[1].prompt == humaneval.render(head, 'saber', Chat())


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'test_case_list': []}, 'test_case_list must be a list of texts that is not empty'),
    ({'test': ''}, 'test must be a text that is not empty, got ""'),
    ({'entry_point': 7}, 'entry_point must be a text that is not empty, got 7'),
  ],
)
def test_bad_lines(tmp_path, changes, message):
  path = tmp_path / 'bad.jsonl'
  path.write_text('\n'.join(json.dumps(record) for record in (RECORDS[0], RECORDS[1] | changes)))
  with pytest.raises(ValueError, match=rf'bad\.jsonl line 2: {message}'):
    open_source(f'humaneval_et:{path}')


def test_files_of_other_kinds(tmp_path):
  mbpp = SAMPLE.with_name('mbpp.jsonl')
  with pytest.raises(ValueError, match=r'mbpp\.jsonl line 1: task_id must be a text that is not empty, got 2'):
    open_source(f'humaneval_et:{mbpp}')
  with pytest.raises(ValueError, match=r'humaneval_et\.jsonl line 1 must have the field code, got task_id, prompt'):
    open_source(f'mbpp:{SAMPLE}')
  with pytest.raises(ValueError, match=r"there is no file 'nowhere\.jsonl'"):
    open_source('humaneval_et:nowhere.jsonl')

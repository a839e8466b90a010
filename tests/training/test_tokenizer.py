"""The tokenizer of the bundled tasks, read as any Hugging Face tokenizer."""

import importlib

import numpy as np
import pytest
from transformers import AutoTokenizer

from archer_jax.tasks import problem_at
from archer_jax.tasks.sources import GENERATED
from archer_jax.training import tokenizer as words


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
  folder = tmp_path_factory.mktemp('tokenizer')
  words.save_tokenizer(folder)
  return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def pieces(tokenizer, text):
  return tokenizer.convert_ids_to_tokens(tokenizer.encode(text))


def test_special_tokens_stand_first(tokenizer):
  assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id) == (0, 1, 2)
  assert [words.VOCAB[token] for token in (words.PAD, words.EOS, words.MASK)] == [0, 1, 2]


def test_every_token_is_reached_by_its_own_text(tokenizer):
  assert len(tokenizer) == len(words.VOCAB) == 3 + 99 + len(words.WORDS) + 90
  assert len(set(words.WORDS)) == len(words.WORDS)
  for token, index in words.VOCAB.items():
    assert tokenizer.encode(token) == [index]


def test_every_printable_ascii_character_can_be_spelled(tokenizer):
  for code in (*range(32, 127), ord('\n'), ord('\t')):
    assert pieces(tokenizer, chr(code)) == [chr(code)]


def test_two_digits_that_stand_alone_are_one_token(tokenizer):
  assert pieces(tokenizer, 'sort: 45 12\n') == ['sort', ':', ' ', '45', ' ', '12', '\n']
  assert pieces(tokenizer, '[10, 99]') == ['[', '10', ', ', '99', ']']
  assert pieces(tokenizer, '350042 7 07 123') == [*'350042', ' ', '7', ' ', '0', '7', ' ', *'123']


def test_the_longest_word_wins(tokenizer):
  assert pieces(tokenizer, '    b = list(map(lambda v: v + 3, a))\n') == [
    '    ',
    'b',
    ' =',
    ' list(map(',
    'lambda',
    ' v:',
    ' v',
    ' +',
    ' ',
    '3',
    ', ',
    'a',
    '))',
    '\n',
  ]
  assert pieces(tokenizer, 'apple red 45, pear') == ['apple', ' red', ' ', '45', ', ', 'pear']


def random_text(rng):
  """Words and characters in any order, so that tokens begin and end wherever they can."""
  choices = [*words.WORDS, *words.CHARACTERS, '  ', " n't", ' ,', '<|', '|>', '0', '42', '100', '007']
  return ''.join(rng.choice(choices, size=rng.integers(0, 30)))


def test_round_trip_without_hidden_tokens(tokenizer):
  for seed in range(1000):
    text = random_text(np.random.default_rng(seed))
    ids = tokenizer.encode(text)
    assert ''.join(tokenizer.convert_ids_to_tokens(ids)) == text
    assert tokenizer(text, add_special_tokens=False)['input_ids'] == ids
    assert tokenizer.decode(ids) == text
    # There are none to skip.
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize('text', ['', ' ', 'a  b , c .', "it 's  n't", '\n\n \tx\n', ' 0123', 'sudoku4:31=', '<pad>'])
def test_round_trip_of_what_other_tokenizers_change(tokenizer, text):
  assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize('task', GENERATED)
def test_an_answer_is_the_same_tokens_after_its_prompt_and_alone(tokenizer, task):
  # Otherwise a worked example would show other tokens than the ones that are asked for.
  for index in range(30):
    problem = problem_at(importlib.import_module(f'archer_jax.tasks.{task}'), 6, index)
    prompt, answer = tokenizer.encode(problem.prompt), tokenizer.encode(problem.answer)
    assert tokenizer.encode(f'{problem.prompt}{problem.answer}\n\n')[: len(prompt + answer)] == prompt + answer


def test_a_character_outside_the_vocabulary_is_refused(tokenizer):
  # Losing it would answer another question than the one asked.
  with pytest.raises(Exception, match='vocabulary'):
    tokenizer.encode('4\N{MULTIPLICATION SIGN}4')

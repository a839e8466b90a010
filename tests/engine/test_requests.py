import json

import pytest
from text_model import CONFIG

from archer_jax import specs
from archer_jax.engine.requests import Refusal
from archer_jax.engine.requests import Request
from archer_jax.engine.requests import file_stem
from archer_jax.engine.requests import read_requests
from archer_jax.engine.settings import make_settings


def read(records, settings=None, tokenizer=None):
  lines = [line if isinstance(line, bytes) else json.dumps(line).encode() + b'\n' for line in records]
  return list(read_requests(lines, settings or make_settings(CONFIG, {'decoder': 'wino', 'gen_length': 16}), tokenizer))


@pytest.fixture
def tokenizer(text):
  return text[2]


def test_the_three_forms_of_a_prompt(tokenizer):
  text, chat, ids = read(
    [
      {'prompt': 'ab'},
      {'id': 'x', 'messages': [{'role': 'user', 'content': 'hi'}], 'seed': 7, 'threshold': 0.5, 'gen_length': 8},
      {'id': None, 'prompt_ids': [3, 4, 5]},
    ],
    tokenizer=tokenizer,
  )
  assert (text.id, text.seed, tokenizer.hf.decode(text.prompt_ids)) == (0, None, 'ab')
  assert tokenizer.hf.decode(chat.prompt_ids) == 'user: hi<|eos|>assistant: '
  assert (chat.id, chat.seed, chat.knobs['threshold'], chat.knobs['gen_length']) == ('x', 7, 0.5, 8)
  assert (ids.id, ids.prompt_ids, ids.index) == (None, [3, 4, 5], 2)


@pytest.mark.parametrize('begun', ['Sure:', 'The end: ', '', 'e', 'eos', '<', 'archer', '\n'])
def test_a_last_message_of_the_assistant_is_continued(tokenizer, begun):
  messages = [{'role': 'user', 'content': 'hi'}, {'role': 'assistant', 'content': begun}]
  (request,) = read([{'messages': messages}], tokenizer=tokenizer)
  shown = f'user: hi<|eos|>assistant: {begun}'
  assert tokenizer.hf.decode(request.prompt_ids) == shown
  # One that is answered already is closed.
  (request,) = read([{'messages': [*messages, {'role': 'user', 'content': 'so?'}]}], tokenizer=tokenizer)
  assert tokenizer.hf.decode(request.prompt_ids) == f'{shown}<|eos|>user: so?<|eos|>assistant: '


def test_chat_makes_a_turn_of_a_text(tokenizer):
  settings = make_settings(CONFIG, {'decoder': 'wino', 'gen_length': 16, 'chat': True})
  (request,) = read([{'prompt': 'hi'}], settings, tokenizer)
  assert tokenizer.hf.decode(request.prompt_ids) == 'user: hi<|eos|>assistant: '


def test_what_writes_tables_fills_cells_and_widens_columns(tokenizer):
  knobs = dict.fromkeys(specs.knobs())
  expected = {'threshold': 0.5, 'gen_length': 8, 'max_accept': 3}
  empty = {'prompt': None, 'messages': None, 'prompt_ids': None, 'seed': None, **knobs}
  text, chat, ids = read(
    [
      {**empty, 'id': 7, 'prompt': 'ab', 'seed': 5.0, 'threshold': 0.5, 'gen_length': 8.0, 'max_accept': 3.0},
      {**empty, 'id': None, 'messages': [{'role': 'user', 'content': 'hi', 'name': None, 'tool_calls': None}]},
      {**empty, 'prompt_ids': [3.0, 4.0]},
    ],
    tokenizer=tokenizer,
  )
  plain_text, plain_chat, plain_ids = read(
    [
      {'id': 7, 'prompt': 'ab', 'seed': 5, **expected},
      {'id': None, 'messages': [{'role': 'user', 'content': 'hi'}]},
      {'prompt_ids': [3, 4]},
    ],
    tokenizer=tokenizer,
  )
  assert (text, chat, ids) == (plain_text, plain_chat, plain_ids)
  assert (text.id, text.seed, chat.id, chat.seed, ids.id) == (7, 5, None, None, 2)
  numbers = (text.seed, text.knobs['gen_length'], text.knobs['max_accept'], *ids.prompt_ids)
  assert [type(number) for number in numbers] == [int] * 5


MASK, SIZE = CONFIG.mask_id, CONFIG.vocab_size
BAD = {
  'not json': (b'{"prompt": \n', 'the line is not JSON'),
  'no object': ([1], 'the line must be a JSON object'),
  'not utf-8': (b'{"prompt": "\xff"}', 'the line is not JSON'),
  'a number that JSON does not have': (b'{"prompt_ids": [3], "threshold": NaN}', 'the line is not JSON'),
  'a number out of range': (b'{"prompt_ids": [3], "threshold": 1e999}', 'the line is not JSON'),
  'a name twice': (b'{"prompt_ids": [3], "prompt_ids": [4]}', 'a name stands twice'),
  'a lone surrogate': (b'{"prompt": "\\ud800"}', 'the line is not JSON'),
  'too deep': (b'[' * 100_000, 'the line is not JSON'),
  'no prompt': ({'id': 'x'}, 'a record must have one of prompt, messages, prompt_ids, got none'),
  'two prompts': ({'prompt': 'a', 'prompt_ids': [3]}, 'got prompt and prompt_ids'),
  'empty prompt': ({'prompt': ''}, 'prompt must not be empty'),
  'blank prompt': ({'prompt': ' \n'}, 'prompt must not be empty'),
  'no ids': ({'prompt_ids': []}, 'prompt_ids must not be empty'),
  'no messages': ({'messages': []}, 'messages must have a turn of the role user'),
  'no user': ({'messages': [{'role': 'system', 'content': 'be brief'}]}, 'messages must have a turn of the role user'),
  'an empty turn': ({'messages': [{'role': 'user', 'content': ' '}]}, 'none of these may be empty'),
  'a message without content': (
    {'messages': [{'role': 'user', 'content': 'a'}, {'role': 'user'}]},
    'none of these may be empty',
  ),
  'messages as text': ({'messages': 'hi'}, 'messages must be a list'),
  'a prompt as list': ({'prompt': ['hi']}, 'prompt must be a text'),
  'ids as text': ({'prompt_ids': '3 4'}, 'prompt_ids must be a list of integers'),
  'ids that are no integers': (
    {'prompt_ids': [3, 4.5]},
    rf'prompt_ids\[1\] must be an integer in \[0, {SIZE}\), got 4.5',
  ),
  'ids that are truths': ({'prompt_ids': [True]}, r'prompt_ids\[0\] must be an integer'),
  'ids that there are not': (
    {'prompt_ids': [3, SIZE]},
    rf'prompt_ids\[1\] must be an integer in \[0, {SIZE}\), got {SIZE}',
  ),
  'negative ids': ({'prompt_ids': [-1]}, r'prompt_ids\[0\] must be an integer'),
  'the mask id': ({'prompt_ids': [3, MASK]}, f'prompt_ids must not contain the mask token {MASK}, found at position 1'),
  'the mask in text': ({'prompt': 'a<|mask|>b'}, f'prompt must not contain the mask token {MASK}, found at position 1'),
  'too long': (
    {'prompt_ids': [3] * 241},
    'prompt_ids of 241 tokens and gen_length=16 must together be at most the 256 tokens',
  ),
  'too long an answer': ({'prompt': 'abc', 'gen_length': 254}, 'prompt of 3 tokens and gen_length=254'),
  'no answer': ({'prompt': 'a', 'gen_length': 0}, 'gen_length must be an integer in .*, got 0'),
  'a negative answer': ({'prompt': 'a', 'gen_length': -4}, 'gen_length must be an integer in .*, got -4'),
  'threshold': ({'prompt': 'a', 'threshold': 1.5}, r'threshold must be a number in \[0, 1\], got 1.5'),
  'a text for a number': ({'prompt': 'a', 'threshold': '0.5'}, r"threshold must be a number in \[0, 1\], got '0.5'"),
  'refresh_distance': (
    {'prompt': 'a', 'refresh_distance': -1},
    r'refresh_distance must be an integer in \[0, 2147483647\], got -1',
  ),
  'part of a distance': (
    {'prompt': 'a', 'refresh_distance': 0.25},
    r'refresh_distance must be an integer in .*, got 0.25',
  ),
  'drift_radius': ({'prompt': 'a', 'drift_radius': 0.5}, 'drift_radius must not be given with drift token'),
  'a knob of another decoder': ({'prompt': 'a', 'steps': 4}, 'steps must not be given with decoder wino'),
  'a knob of another rule': ({'prompt': 'a', 'refresh_interval': 2}, 'refresh_interval must not be given with refresh'),
  'a static switch': (
    {'prompt': 'a', 'shadow': 'self'},
    'shadow is no field of a record, but of the whole run; there are id',
  ),
  'a foreign field': ({'prompt': 'a', 'logprobs': 5}, 'logprobs is no field of a record; there are id'),
  'a foreign field without a value': ({'prompt': 'a', 'logprobs': None}, 'logprobs is no field of a record'),
  'part of a token': ({'prompt': 'a', 'gen_length': 16.5}, 'gen_length must be an integer in .*, got 16.5'),
  'half a seed': ({'prompt': 'a', 'seed': 0.5}, 'seed must be an integer in .*, got 0.5'),
  'a number that no float tells from the next': (
    {'prompt_ids': [3], 'seed': 1e300},
    r'seed must be an integer in .*, got 1e\+300',
  ),
  'no value at all': (
    {'prompt': None, 'messages': None, 'prompt_ids': None},
    'a record must have one of prompt, messages, prompt_ids, got none',
  ),
  'a turn without a value': ({'messages': [{'role': 'user', 'content': None}]}, 'none of these may be empty'),
  'no token': ({'prompt_ids': [3, None]}, r'prompt_ids\[1\] must be an integer in .*, got None'),
  'seed': ({'prompt': 'a', 'seed': -1}, 'seed must be an integer in'),
  'what no token spells': ({'prompt': 'caf\u00e9'}, "has no token for '\u00e9'"),
}


@pytest.mark.parametrize('name', BAD)
def test_a_bad_record_is_refused_and_the_next_one_is_not(name, tokenizer):
  record, message = BAD[name]
  refusal, request = read([record, {'prompt': 'ok'}], tokenizer=tokenizer)
  assert isinstance(refusal, Refusal) and isinstance(request, Request)
  assert (refusal.index, request.index) == (0, 1)
  assert '\n' not in refusal.error
  with pytest.raises(ValueError, match=message):
    raise ValueError(refusal.error)


def test_a_refusal_keeps_the_id(tokenizer):
  (refusal,) = read([{'id': {'a': [1]}, 'prompt': ''}], tokenizer=tokenizer)
  assert refusal.id == {'a': [1]}


def test_text_without_a_tokenizer():
  text, chat, ids = read([{'prompt': 'a'}, {'messages': [{'role': 'user', 'content': 'a'}]}, {'prompt_ids': [3]}])
  assert 'prompt needs a tokenizer' in text.error
  assert 'messages needs a tokenizer' in chat.error
  assert isinstance(ids, Request)


def test_ids_must_differ():
  entries = read(
    [
      {'id': 'a', 'prompt_ids': [3]},
      {'id': 'a', 'prompt_ids': [3]},
      {'id': 3, 'prompt_ids': [3]},
      {'prompt_ids': [3]},
      {'id': '2', 'prompt_ids': [3]},
      {'id': {'x': 1, 'y': 2}, 'prompt_ids': [3]},
      {'id': {'y': 2, 'x': 1}, 'prompt_ids': [3]},
      {'id': None, 'prompt_ids': [3]},
      {'id': None, 'prompt_ids': [3]},
      {'id': '00000007', 'prompt_ids': [3]},
    ]
  )
  refused = {entry.index: entry.error for entry in entries if isinstance(entry, Refusal)}
  # 3 is the default id of record 3; the last one would take the trace file of record 7.
  assert set(refused) == {1, 3, 6, 9}
  assert refused[1] == 'id "a" is taken by record 0; ids must differ'


def test_blank_lines_are_no_records():
  entries = read([b'\n', {'prompt_ids': [3]}, b'  \n', {'prompt_ids': [4]}])
  assert [entry.index for entry in entries] == [0, 1]


def test_lines_are_read_as_they_are_asked_for():
  taken = []

  def lines():
    for index in range(5):
      taken.append(index)
      yield json.dumps({'prompt_ids': [3 + index]}).encode()

  requests = read_requests(lines(), make_settings(CONFIG, {'decoder': 'wino', 'gen_length': 16}), None)
  assert taken == []
  assert [next(requests).index for _ in range(2)] == [0, 1]
  assert taken == [0, 1]


@pytest.mark.parametrize(
  ('id', 'stem'),
  [
    ('case_1.a-B', 'case_1.a-B'),
    (7, '7'),
    ('a/b', '00000003'),
    ('', '00000003'),
    ('x' * 201, '00000003'),
    (True, '00000003'),
    (1.5, '00000003'),
    (None, '00000003'),
    (['a'], '00000003'),
  ],
)
def test_names_of_trace_files(id, stem):
  assert file_stem(id, 3) == stem

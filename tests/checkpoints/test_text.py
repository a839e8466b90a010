import json
import os
from pathlib import Path
import shutil
import subprocess
import sys

from golden_data import GOLDENS
import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers
from tokenizers import processors

from archer_jax.checkpoints import checkpoint
from archer_jax.checkpoints.convert import convert
from archer_jax.checkpoints.text import load_tokenizer
from archer_jax.families import config_from_hf

# The published templates; LLaDA's writes the start of an answer whether it is asked to or not.
LLADA_TEMPLATE = (
  "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
  "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
  '{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}'
  "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)
DREAM_TEMPLATE = (
  "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
  "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MESSAGES = [{'role': 'user', 'content': ' What is 1+1? '}]
TEXT = "Hello  world, it's\n\n 12+3=15 \u00e9\u4e2d \U0001f600."
MERGES = [('h', 'e'), ('l', 'l'), ('he', 'll'), ('\u0120', 'w'), ('o', 'r'), ('1', '2')]

# 256 bytes and the merges, and then the special tokens, in order.
LLADA_SPECIALS = (
  '<|startoftext|>',
  '<|endoftext|>',
  '<|mdm_mask|>',
  '<|start_header_id|>',
  '<|end_header_id|>',
  '<|eot_id|>',
)
DREAM_SPECIALS = ('<|endoftext|>', '<|im_start|>', '<|im_end|>', '<|mask|>')


def byte_vocab():
  symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in MERGES)]
  return {symbol: index for index, symbol in enumerate(symbols)}


def special_ids(specials):
  return {token: len(byte_vocab()) + index for index, token in enumerate(specials)}


def config(name, **ids):
  return config_from_hf(json.loads((GOLDENS / name / 'config.json').read_text()) | ids)


LLADA = special_ids(LLADA_SPECIALS)
DREAM = special_ids(DREAM_SPECIALS)
LLADA_CONFIG = config('llada_tiny', mask_token_id=LLADA['<|mdm_mask|>'], eos_token_id=LLADA['<|endoftext|>'])
DREAM_CONFIG = config('dream_tiny', mask_token_id=DREAM['<|mask|>'], eos_token_id=DREAM['<|endoftext|>'])


@pytest.fixture
def llada_folder(tmp_path):
  """Tokenizer files as LLaDA ships them: tokenizer.json, whose post-processor adds a start token."""
  folder = tmp_path / 'llada'
  folder.mkdir()
  backend = Backend(models.BPE(byte_vocab(), MERGES))
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = decoders.ByteLevel()
  backend.add_special_tokens([AddedToken(token, normalized=False) for token in LLADA_SPECIALS])
  start = ('<|startoftext|>', LLADA['<|startoftext|>'])
  backend.post_processor = processors.TemplateProcessing('<|startoftext|> $A', special_tokens=[start])
  backend.save(str(folder / 'tokenizer.json'))
  tokenizer_config = {
    'bos_token': '<|startoftext|>',
    'eos_token': '<|endoftext|>',
    'chat_template': LLADA_TEMPLATE,
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'trust_remote_code': True,
    'model_max_length': 8,
  }
  (folder / 'tokenizer_config.json').write_text(json.dumps(tokenizer_config))
  return folder


@pytest.fixture
def dream_folder(tmp_path):
  """Tokenizer files as Dream ships them: Qwen2's, under a class of its own whose code stands in the folder."""
  folder = tmp_path / 'dream'
  folder.mkdir()
  (folder / 'vocab.json').write_text(json.dumps(byte_vocab()))
  (folder / 'merges.txt').write_text('#version: 0.2\n' + ''.join(f'{a} {b}\n' for a, b in MERGES))
  added = {
    str(index): {'content': token, 'special': True, 'lstrip': False, 'rstrip': False, 'normalized': False}
    for token, index in DREAM.items()
  }
  tokenizer_config = {
    'added_tokens_decoder': added,
    'auto_map': {'AutoTokenizer': ['tokenization_dream.DreamTokenizer', None]},
    'chat_template': DREAM_TEMPLATE,
    'eos_token': '<|endoftext|>',
    'mask_token': '<|mask|>',
    'tokenizer_class': 'DreamTokenizer',
  }
  (folder / 'tokenizer_config.json').write_text(json.dumps(tokenizer_config))
  (folder / 'tokenization_dream.py').write_text(
    f'open({str(folder / "ran")!r}, "w")\nraise RuntimeError("code was run")\n'
  )
  return folder


@pytest.fixture
def llada(llada_folder):
  return load_tokenizer(llada_folder, LLADA_CONFIG)


@pytest.fixture
def dream(dream_folder):
  return load_tokenizer(dream_folder, DREAM_CONFIG)


@pytest.mark.parametrize('name', ['llada', 'dream'])
@pytest.mark.parametrize('prompt', [TEXT, '', ' ', '\n\n', 'a'])
def test_raw_prompt_has_no_hidden_tokens(name, prompt, request):
  tokenizer = request.getfixturevalue(name)
  ids = tokenizer.encode(prompt)
  assert all(index < len(byte_vocab()) for index in ids)
  assert tokenizer.decode_text(ids) == prompt


@pytest.mark.parametrize('name', ['llada', 'dream'])
def test_merges_are_used(name, request):
  vocab = byte_vocab()
  ids = request.getfixturevalue(name).encode('hell world 12')
  assert ids[:2] == [vocab['hell'], vocab['\u0120w']]
  # Qwen2 splits numbers into digits before it merges, the byte-level pattern does not.
  assert ids[-1] == (vocab['12'] if name == 'llada' else vocab['2'])


def test_chat_has_exactly_one_start_token(llada):
  start, end, header, behind = (LLADA[t] for t in ('<|startoftext|>', '<|eot_id|>', *LLADA_SPECIALS[3:5]))
  ids = llada.encode_chat(MESSAGES)
  assert ids.count(start) == 1 and ids[0] == start
  role, content, answer = (llada.encode(text) for text in ('user', '\n\nWhat is 1+1?', 'assistant'))
  assert ids == [start, header, *role, behind, *content, end, header, *answer, behind, *llada.encode('\n\n')]
  direct = llada.hf.apply_chat_template(MESSAGES, tokenize=True, add_generation_prompt=True)['input_ids']
  assert ids == direct
  # The tokenizer's own habit would have added a second one.
  assert llada.hf(llada.hf.apply_chat_template(MESSAGES, tokenize=False))['input_ids'].count(start) == 2


def test_chat_of_dream_equals_its_template(dream):
  ids = dream.encode_chat(MESSAGES)
  begin, end, line = DREAM['<|im_start|>'], DREAM['<|im_end|>'], dream.encode('\n')
  text = dream.encode('user\n What is 1+1? ')
  assert ids == [begin, *text, end, *line, begin, *dream.encode('assistant\n')]
  assert ids == dream.hf.apply_chat_template(MESSAGES, tokenize=True, add_generation_prompt=True)['input_ids']


@pytest.mark.parametrize('begun', ['Sure:', 'a ', '', 'end', 'im', '|', ' \n'])
def test_an_answer_that_has_begun_goes_on(llada, dream, begun):
  # Where a template strips messages, the beginning of one still ends as it was given.
  for tokenizer, kept in ((llada, begun.lstrip()), (dream, begun)):
    text = tokenizer.hf.decode(tokenizer.encode_chat([*MESSAGES, {'role': 'assistant', 'content': begun}]))
    assert text == tokenizer.hf.decode(tokenizer.encode_chat(MESSAGES)) + kept


def test_a_beginning_that_the_template_does_not_show_is_told(dream):
  dream.hf.chat_template = "{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}"
  with pytest.raises(ValueError, match='the chat template of the checkpoint does not show the last message'):
    dream.encode_chat([*MESSAGES, {'role': 'assistant', 'content': 'Sure:'}])


def test_end_tokens_are_those_of_model_and_template(llada, dream):
  assert llada.end_ids == (LLADA['<|endoftext|>'], LLADA['<|eot_id|>'])
  assert dream.end_ids == (DREAM['<|endoftext|>'], DREAM['<|im_end|>'])


@pytest.mark.parametrize('named', [7, [7, 9], None])
def test_end_tokens_are_a_union(llada_folder, named):
  file = llada_folder / 'tokenizer_config.json'
  file.write_text(json.dumps(json.loads(file.read_text()) | {'eos_token': '<|start_header_id|>'}))
  (llada_folder / 'generation_config.json').write_text(json.dumps({'eos_token_id': named}))
  tokenizer = load_tokenizer(llada_folder, LLADA_CONFIG)
  more = {7: [7], None: []}.get(named if not isinstance(named, list) else 0, named)
  own = (LLADA_CONFIG.eos_id, *more, LLADA['<|start_header_id|>'], LLADA['<|eot_id|>'])
  assert tokenizer.end_ids == own


@pytest.mark.parametrize('named', [LLADA_CONFIG.mask_id, 100000, '7', [True]])
def test_end_tokens_that_are_none(llada_folder, named):
  (llada_folder / 'generation_config.json').write_text(json.dumps({'eos_token_id': named}))
  with pytest.raises(ValueError, match=r'eos_token_id in .*generation_config.json must be'):
    load_tokenizer(llada_folder, LLADA_CONFIG)


def test_ids_without_a_token_are_known(llada_folder):
  size = LLADA_CONFIG.vocab_size
  last = max(LLADA.values())
  tokenizer = load_tokenizer(llada_folder, LLADA_CONFIG)
  assert tokenizer.size == last + 1
  assert tokenizer.unknown_ids == ((last + 1, size),)
  # Masks and end tokens are no such ids, wherever they are.
  padded = config('llada_tiny', eos_token_id=size - 1, mask_token_id=last + 2)
  assert load_tokenizer(llada_folder, padded).unknown_ids == ((last + 1, last + 2), (last + 3, size - 1))


def test_text_ends_before_the_first_end_token(llada):
  words, after = llada.encode('two words'), llada.encode('more')
  for end in llada.end_ids:
    assert llada.decode_text([*words, end, *after]) == 'two words'
  assert (
    llada.decode_text(np.array([*words, LLADA['<|start_header_id|>'], LLADA_CONFIG.mask_id, *after])) == 'two wordsmore'
  )
  assert llada.decode_text([]) == ''


def test_masks_are_no_text_even_where_the_tokenizer_calls_them_ordinary(llada_folder):
  tokenizer = load_tokenizer(llada_folder, config('llada_tiny', mask_token_id=byte_vocab()['x'], eos_token_id=263))
  assert tokenizer.decode_text(tokenizer.encode('axxb')) == 'ab'


def test_mask_token_in_a_text_becomes_the_mask_id(llada, dream):
  assert LLADA_CONFIG.mask_id in llada.encode('fill <|mdm_mask|> in')
  assert DREAM_CONFIG.mask_id in dream.encode('fill <|mask|> in')


def test_code_in_the_folder_is_never_run(dream_folder):
  load_tokenizer(dream_folder, DREAM_CONFIG)
  assert not (dream_folder / 'ran').exists()


def test_missing_template_and_bad_messages_are_refused(llada_folder, dream):
  (llada_folder / 'tokenizer_config.json').write_text('{}')
  plain = load_tokenizer(llada_folder, LLADA_CONFIG)
  assert plain.end_ids == (LLADA_CONFIG.eos_id,)
  with pytest.raises(ValueError, match='the checkpoint has no chat template'):
    plain.encode_chat(MESSAGES)
  with pytest.raises(ValueError, match=r"messages\[1\] must have the strings role and content, got \{'role': 'user'\}"):
    dream.encode_chat([*MESSAGES, {'role': 'user'}])
  dream.hf.chat_template = "{{ raise_exception('only one system message') }}"
  with pytest.raises(ValueError, match='the chat template of the checkpoint refuses the messages: only one system'):
    dream.encode_chat(MESSAGES)


def test_template_in_a_file_of_its_own(llada_folder):
  tokenizer_config = json.loads((llada_folder / 'tokenizer_config.json').read_text())
  (llada_folder / 'chat_template.jinja').write_text(tokenizer_config.pop('chat_template'))
  (llada_folder / 'tokenizer_config.json').write_text(json.dumps(tokenizer_config))
  assert load_tokenizer(llada_folder, LLADA_CONFIG).end_ids == (LLADA['<|endoftext|>'], LLADA['<|eot_id|>'])


def test_folder_without_or_with_damaged_tokenizer(llada_folder, tmp_path):
  assert load_tokenizer(tmp_path, LLADA_CONFIG) is None
  with pytest.raises(ValueError, match=r'has token id 267, the model only 264 tokens'):
    small = {'vocab_size': 264, 'embedding_size': 264}
    ids = {'mask_token_id': 1, 'eos_token_id': 2, 'pad_token_id': 2}
    load_tokenizer(llada_folder, config('llada_tiny', **small, **ids))
  (llada_folder / 'tokenizer.json').write_text('version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n')
  with pytest.raises(ValueError, match=r'tokenizer\.json is a git-lfs pointer and not the file itself'):
    load_tokenizer(llada_folder, LLADA_CONFIG)
  (llada_folder / 'tokenizer.json').write_text('{')
  with pytest.raises(ValueError, match=r'the tokenizer in .* cannot be read: '):
    load_tokenizer(llada_folder, LLADA_CONFIG)


def test_tokenizer_files_go_through_the_converter(dream_folder, tmp_path):
  for name in ('config.json', 'generation_config.json', 'model.safetensors'):
    shutil.copyfile(GOLDENS / 'dream_tiny' / name, dream_folder / name)
  convert(dream_folder, tmp_path / 'output')
  _, _, tokenizer = checkpoint.load(tmp_path / 'output')
  assert tokenizer.encode(TEXT) == load_tokenizer(dream_folder, DREAM_CONFIG).encode(TEXT)
  copied = {file.name: file.read_bytes() for file in (tmp_path / 'output' / 'tokenizer').iterdir()}
  assert sorted(copied) == ['generation_config.json', 'merges.txt', 'tokenizer_config.json', 'vocab.json']
  assert all(content == (dream_folder / name).read_bytes() for name, content in copied.items())
  assert not (dream_folder / 'ran').exists()


def test_import_is_late_and_quiet(llada_folder):
  code = 'import sys; from archer_jax.checkpoints import text; print("transformers" in sys.modules);'
  code += (
    f'text.load_tokenizer({str(llada_folder)!r}, text.ModelConfig(**{LLADA_CONFIG.__dict__!r})).encode("hello" * 9)'
  )
  env = os.environ | {'PYTHONPATH': str(Path(__file__).parents[2])}
  result = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, env=env, check=True)
  assert result.stdout == 'False\n' and result.stderr == ''

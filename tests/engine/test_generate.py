"""The loop from requests to results. Prompts are short and share few shapes: a program costs seconds."""

import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
from programs import CHUNK
from programs import quick
import pytest
from text_model import CONFIG

import archer_jax
from archer_jax.engine import generate as module
from archer_jax.engine.batching import PROMPT_LENGTHS
from archer_jax.engine.batching import bucket
from archer_jax.engine.batching import row_seed
from archer_jax.engine.engine import Setup
from archer_jax.engine.engine import Timing
from archer_jax.engine.generate import decode_requests
from archer_jax.engine.requests import Refusal
from archer_jax.engine.requests import make_request
from archer_jax.engine.results import Result
from archer_jax.engine.results import make_result
from archer_jax.engine.settings import make_settings
from archer_jax.loop.decode import decode
from archer_jax.types import Counters
from archer_jax.types import Status

DECODE = quick(decode)
PROMPTS = ['12+3=', [{'role': 'user', 'content': 'abc'}], [7, 8, 9], 'xyz', '12+3=']


@pytest.fixture
def generate(text):
  return functools.partial(archer_jax.generate, *text, decoder='wino', gen_length=16)


def programs():
  return CHUNK._cache_size()


def test_one_result_per_prompt_in_order(text, generate):
  results = generate(PROMPTS, batch_size=2)
  assert [result.index for result in results] == [result.id for result in results] == list(range(5))
  for result in results:
    assert len(result.token_ids) == result.canvas_tokens == 16
    assert result.error is None and result.finish_reason in ('stop', 'length')
    assert 1 <= result.refreshes < result.steps == result.nfe <= 16
    assert result.rows_fed < result.rows_recomputed
    assert result.text == text[2].decode_text(result.token_ids)
  assert [result.prompt_tokens for result in results] == [4, len(text[2].encode('user: abcassistant: ')) + 1, 3, 3, 4]
  # Equal prompts give equal rows, in another batch and slot and beside another row too.
  assert results[0].token_ids == results[4].token_ids
  assert results[0].seed != results[4].seed
  # None is not given.
  others = generate([PROMPTS[3], 'q'], batch_size=2, stop=None, reuse=None, block_length=None, temperature=None)
  assert others[0].token_ids == results[3].token_ids


def test_sampled_rows_differ_and_a_seed_gives_them_again(generate):
  results = generate(['12+3='] * 4, batch_size=2, temperature=1.0, seed=5)
  assert len({tuple(result.token_ids) for result in results}) == 4
  assert [result.seed for result in results] == [row_seed(5, index) for index in range(4)]
  # The last one again, in the other slot beside another prompt and under another run's seed.
  again = generate([{'prompt': '12+3=', 'seed': results[3].seed}, 'x'], batch_size=2, temperature=1.0, seed=9)[0]
  assert (again.token_ids, again.seed) == (results[3].token_ids, results[3].seed)


def test_an_answer_that_has_begun_goes_on(text, generate):
  turns = [{'role': 'user', 'content': 'abc'}, {'role': 'assistant', 'content': '12 '}]
  plain = text[2].encode('user: abc<|eos|>assistant: 12 ')
  conversation, ids = generate([turns, plain], batch_size=2)
  assert list(conversation.prompt_ids) == plain
  # The text is that of the continuation alone.
  assert (conversation.token_ids, conversation.text) == (ids.token_ids, ids.text)


def test_prompts_without_tokens(text, generate):
  empty, ids = generate(['', []], batch_size=2)
  assert empty.token_ids == ids.token_ids
  assert empty.prompt_tokens == 0 and empty.error is None
  # Every column ties in the first step: the lowest one goes first, in any batch.
  alone = generate([''], batch_size=1, decoder='llada', trace=True)[0]
  first = alone.trace['canvas_after_step'][0]
  assert (first != CONFIG.mask_id).nonzero()[0].tolist() == [0]
  for size in (2, 5):
    others = generate(['', *['12+3='] * (size - 1)], batch_size=size, decoder='llada', trace=True)
    assert list(others[0].token_ids) == list(alone.token_ids)


def test_lengths_of_a_bucket_share_a_program(generate):
  generate(['12+3='], gen_length=17)
  start = programs()
  for length in (18, 19, 20, 32):
    generate(['12+3='], gen_length=length)
  assert programs() == start


def test_padding_holds_nothing(text):
  model, params, tokenizer = text
  decoded = lambda params: archer_jax.generate(model, params, tokenizer, ['12+3=', '1'], decoder='wino', gen_length=16)
  broken = {**params, 'embedding': params['embedding'].at[jnp.array([0, CONFIG.pad_id])].set(jnp.nan)}
  for found, expected in zip(decoded(broken), decoded(params), strict=True):
    assert found.error is None and list(found.token_ids) == list(expected.token_ids)


@pytest.mark.parametrize('decoder', ['wino', 'llada', 'saber'])
def test_stop_strings(text, generate, decoder):
  whole = generate(['12+3='], decoder=decoder, early_stop=False, block_length=4)[0]
  stop = whole.text[2:4]
  expected = whole.text[: whole.text.index(stop)]
  for stops in (stop, ['no such text', stop]):
    cut = generate(['12+3='], decoder=decoder, early_stop=False, block_length=4, stop=stops)[0]
    assert cut.text == expected and cut.finish_reason == 'stop'
    assert 0 < cut.generated_tokens < whole.generated_tokens
    assert text[2].decode_text(cut.token_ids[: cut.generated_tokens]).startswith(expected)
    # The first block has it, and no other is decoded.
    assert cut.steps <= whole.steps and (decoder == 'saber' or cut.steps < whole.steps)
  # The same beside others, of which nobody has stop strings; a record's own go before those of the run.
  records = [{'prompt': '12+3=', 'stop': stop}, {'prompt': '12+3=', 'stop': []}, 'xyz']
  many = generate(records, batch_size=3, decoder=decoder, early_stop=False, block_length=4, stop='no such text')
  assert (many[0].text, list(many[0].token_ids), many[0].steps) == (cut.text, list(cut.token_ids), cut.steps)
  assert many[1].text == whole.text and many[1].finish_reason == 'length'


@pytest.mark.parametrize('decoder', ['llada', 'wino'])
def test_logprobs(generate, decoder):
  plain = generate(['12+3='], decoder=decoder, early_stop=False)[0]
  assert plain.token_logprobs is None and 'token_logprobs' not in plain.record()
  result = generate(['12+3='], decoder=decoder, early_stop=False, logprobs=True, trace=True)[0]
  assert list(result.token_ids) == list(plain.token_ids)
  record, canvas = result.record(), result.trace['canvas_after_step']
  assert all(value < 0 for value in record['token_logprobs']) and len(record['token_logprobs']) == 16
  np.testing.assert_array_equal(result.trace['token_logprobs_per_step'][-1], record['token_logprobs'])
  for column, step in enumerate(record['commit_steps']):
    # It stands from that step on and was a mask before.
    assert (canvas[step:, column] == result.token_ids[column]).all()
    assert step == 0 or canvas[step - 1, column] == CONFIG.mask_id


@pytest.mark.parametrize('stop', ['', ['a', ''], 3, [1], [None]])
def test_stop_strings_that_are_none(generate, stop):
  with pytest.raises(ValueError, match='stop must be a text or a list of texts, none of them empty'):
    generate(['12+3='], stop=stop)


@pytest.mark.parametrize('prompts', [(np.array([7, 8]), jnp.array([7, 8])), ((7, 8), [np.int32(7), 8])])
def test_ids_in_arrays(generate, prompts):
  first, second = generate(prompts, batch_size=2)
  assert first.token_ids == second.token_ids and first.prompt_tokens == 2


@pytest.mark.parametrize(
  ('prompts', 'settings', 'error', 'message'),
  [
    (['a', 'b<|mask|>'], {}, ValueError, r'prompts\[1\]: prompt must not contain the mask token'),
    (['a', [3, 'x']], {}, ValueError, r'prompts\[1\]: prompt_ids\[1\] must be an integer'),
    (['a' * 250], {}, ValueError, r'prompts\[0\]: prompt of 250 tokens and gen_length=16'),
    ([{'prompt': 'a', 'treshold': 1}], {}, ValueError, r'prompts\[0\]: treshold is no field'),
    ('a', {}, ValueError, 'prompts must be a list'),
    (['a'], {'batch_size': 0}, ValueError, 'batch_size must be a positive integer'),
    (['a'], {'threshold': 2}, ValueError, 'threshold must be'),
    (['a'], {'decoder': 'beam'}, ValueError, 'decoder must be one of'),
    (['a'], {'alg': 'entropy'}, ValueError, 'alg must not be given with decoder wino'),
    (['a'], {'top_q': 2}, TypeError, 'top_q is no setting'),
  ],
)
def test_mistakes_raise_before_anything_is_decoded(generate, monkeypatch, prompts, settings, error, message):
  monkeypatch.setattr(module, 'decode_requests', None)
  with pytest.raises(error, match=message):
    generate(prompts, **settings)


def test_chat_without_a_template_raises(text):
  model, params, _ = text
  with pytest.raises(ValueError, match=r'prompts\[0\]: prompt needs a tokenizer'):
    archer_jax.generate(model, params, None, ['a'], chat=True)


def test_no_recompilation(generate):
  rng = random.Random(0)
  prompts = [[rng.randrange(3, 99) for _ in range(rng.randrange(1, 201))] for _ in range(40)]
  # Answers of many lengths too, all of one bucket.
  records = [{'prompt_ids': prompt, 'gen_length': rng.randrange(1, 17)} for prompt in prompts]
  start = programs()
  results = generate(records, batch_size=4, refresh='interval', refresh_interval=3)
  assert len(results) == 40
  lengths = {bucket('prompt', len(prompt), PROMPT_LENGTHS) for prompt in prompts}
  assert programs() - start <= len(lengths) <= 6
  start = programs()
  # Numbers are values of the program: of the run, of a request, and those behind the name of a refresh rule.
  for changes in (
    {'temperature': 0.7, 'seed': 3},
    {'threshold': 0.3, 'threshold_back': 0.5, 'max_accept': 4},
    {'refresh': 'always', 'refresh_interval': None},
    {'refresh': 'archer', 'refresh_interval': None, 'min_margin': 0.1, 'refresh_distance': 9},
    {'max_age': 2},
  ):
    settings = {'refresh': 'interval', 'refresh_interval': 5, **changes}
    given = {name: value for name, value in settings.items() if value is not None}
    generate([*prompts[:3], {'prompt_ids': prompts[3], 'gen_length': 9, 'threshold': 0.9}], batch_size=4, **given)
  assert programs() == start


def setup_of(text, settings, **options):
  _, params, tokenizer = text
  return Setup(params=params, tokenizer=tokenizer, settings=settings, **options)


def stream(settings, records, taken):
  for index, record in enumerate(records):
    taken.append(index)
    if record is None:
      yield Refusal(index=index, id=f'bad {index}', error='it is bad')
    else:
      yield make_request({'prompt_ids': record}, index, settings, None)


def test_batches_come_as_they_are_read_and_keep_their_program(text):
  settings = make_settings(CONFIG, {'decoder': 'wino', 'gen_length': 16})
  taken, timing = [], Timing()
  records = [[3], None, [4, 5], [6], None, None, [7]]
  batches = decode_requests(setup_of(text, settings), stream(settings, records, taken), batch_size=2, timing=timing)
  seen = []
  for number, results in enumerate(batches):
    # Nothing of the next batch is read before this one is given out.
    assert len(taken) == min(2 * number + 2, 7)
    seen += results
  assert [result.index for result in seen] == list(range(7))
  assert [result.finish_reason == 'error' for result in seen] == [record is None for record in records]
  assert seen[1].record() == {
    'id': 'bad 1', 'text': '', 'token_ids': (), 'finish_reason': 'error', 'seed': None, 'prompt_tokens': 0,
    'generated_tokens': 0, 'canvas_tokens': 0, 'steps': 0, 'nfe': 0, 'refreshes': 0, 'accepted': 0, 'remasked': 0,
    'flip_flops': 0, 'error': 'it is bad',
  }  # fmt: skip
  assert len(timing.programs) == 1
  assert timing.decode_seconds > 0
  # What a row decodes to does not depend on the filler beside it.
  plain = archer_jax.generate(*text, [[3], [4, 5], [6], [7]], decoder='wino', gen_length=16, batch_size=2)
  good = [result for result in seen if result.error is None]
  assert [result.token_ids for result in good] == [result.token_ids for result in plain]


def test_a_short_input_makes_a_short_batch(text):
  timing = Timing()
  settings = make_settings(CONFIG, {'decoder': 'wino', 'gen_length': 16})
  entries = stream(settings, [None, [3], [4]], [])
  batches = list(decode_requests(setup_of(text, settings), entries, batch_size=8, timing=timing))
  # What was refused waits for nothing.
  assert [[result.index for result in results] for results in batches] == [[0], [1, 2]]
  assert [shape for _, shape in timing.programs] == [(2, 16)]


def test_the_engine_survives_an_exception(text, generate):
  expected = generate(PROMPTS[:2], batch_size=2)
  settings = make_settings(CONFIG, {'decoder': 'wino', 'gen_length': 16})
  calls = []

  def fails(params, state, *, cfg):
    calls.append(DECODE(params, state, cfg=cfg))
    if len(calls) == 2:
      raise RuntimeError('in the middle')
    return calls[-1]

  entries = stream(settings, [[3], [4], [5], [6]], [])
  batches = decode_requests(setup_of(text, settings, decode=fails), entries, batch_size=2)
  assert len(next(batches)) == 2
  with pytest.raises(RuntimeError, match='in the middle'):
    next(batches)
  assert [result.token_ids for result in generate(PROMPTS[:2], batch_size=2)] == [r.token_ids for r in expected]


def test_weights_that_are_no_numbers(text):
  model, params, tokenizer = text
  broken = jax.tree.map(lambda x: x, params)
  broken['blocks_1']['mlp'] = jax.tree.map(lambda x: x.at[0, 0].set(jnp.nan), params['blocks_1']['mlp'])
  result, _ = archer_jax.generate(model, broken, tokenizer, ['a', 'b'], decoder='wino', gen_length=16)
  assert result.finish_reason == 'error' and result.text == ''
  assert result.error == "the logits of step 0 are not finite; check the checkpoint's weights"
  assert result.record()['error'] == result.error


def test_traces(generate):
  short, long = generate([{'prompt': 'a', 'gen_length': 5}, 'b'], batch_size=2, trace=True)
  for result in (short, long):
    trace = result.trace
    assert {name: array.shape for name, array in trace.items()} == {
      'canvas_after_step': (result.steps, result.canvas_tokens),
      **dict.fromkeys(
        (
          *('refresh_per_step', 'accept_per_step', 'remask_per_step', 'drift_per_step', 'age_per_step'),
          *('margin_per_step', 'reason_per_step', 'distance_per_step'),
        ),
        (result.steps,),
      ),
    }
    assert trace['canvas_after_step'][-1].tolist() == result.token_ids
    assert trace['refresh_per_step'].sum() == result.refreshes
    assert trace['accept_per_step'].sum() == result.accepted
    assert (trace['age_per_step'][0], trace['drift_per_step'][0], trace['distance_per_step'][0]) == (-1, 0, 0)
    np.testing.assert_allclose(trace['drift_per_step'] * result.canvas_tokens, trace['distance_per_step'], rtol=1e-6)


def test_saber_tells_its_threshold(generate):
  (result,) = generate(['b'], decoder='saber', min_accept=2, refresh_distance=4, trace=True)
  trace = result.trace
  for name in ('threshold_per_step', 'distance_per_step'):
    assert trace[name].shape == (result.steps,), name
  # A probability of 1, which nothing is above, before the first commits.
  assert trace['threshold_per_step'][0] == 1 and np.all(trace['threshold_per_step'][1:] < 1)
  refreshed = trace['refresh_per_step']
  np.testing.assert_array_equal(refreshed[1:], trace['distance_per_step'][1:] >= 4)
  assert 1 < result.refreshes < result.steps and result.remasked > 0
  assert (trace['accept_per_step'] > trace['remask_per_step']).all()


def result_of(token_ids, *, gen_length, prompt=(3,) * 100, end_ids=(1,), status=Status.STOP, **settings):
  """The result of a row whose canvas is given, after 4 steps."""
  settings = make_settings(CONFIG, {'decoder': 'wino', 'gen_length': gen_length, **settings})
  request = make_request({'prompt_ids': list(prompt)}, 0, settings, None)
  cfg = settings.config(32, dtype='float32', end_ids=end_ids)
  counts = {field.name: np.array([9, 4 + n]) for n, field in enumerate(dataclasses.fields(Counters))}
  canvas = np.full((2, 32), 50)
  canvas[1, : len(token_ids)] = token_ids
  host = {'canvas': canvas, 'status': np.array([0, status]), 'counters': Counters(**counts), 'trace': None}
  return make_result(request, 1, {**host, 'seed': np.array([0, 7])}, None, cfg)


def test_counts_of_tokens():
  mask, end = CONFIG.mask_id, CONFIG.eos_id
  result = result_of([5, 6, 7, 8, 9, end] + [mask] * 26, gen_length=32)
  assert (result.generated_tokens, result.canvas_tokens, result.prompt_tokens) == (5, 32, 100)
  assert result.finish_reason == 'stop'
  # Without early stop everything is written, and what stands behind the end token counts no more.
  assert result_of([5, 6, end] + [7] * 29, gen_length=32, status=Status.LENGTH).generated_tokens == 2
  assert result_of([5, 6, end] + [7] * 29, gen_length=32, status=Status.LENGTH).finish_reason == 'stop'
  # The end of a turn ends as well.
  assert result_of([5, 44, 7], gen_length=3, end_ids=(end, 44)).generated_tokens == 1
  # Masks that official mask prediction leaves are no tokens.
  assert result_of([5, mask, 7], gen_length=3, status=Status.LENGTH).generated_tokens == 2
  # Columns behind gen_length belong to nobody.
  result = result_of([5, 6, 7, end], gen_length=3, status=Status.LENGTH)
  assert (result.finish_reason, result.token_ids, result.generated_tokens) == ('length', [5, 6, 7], 3)


def test_a_result_has_the_counters_of_its_row():
  result = result_of([5] * 32, gen_length=32)
  assert [getattr(result, field.name) for field in dataclasses.fields(Counters)] == list(range(4, 12))


def test_counts_of_rows(generate):
  # Canvas and shadow in every step, and the prompt in those that refresh.
  for result in generate(PROMPTS[:4], batch_size=2):
    assert result.rows_fed == 32 * result.steps + result.prompt_tokens * result.refreshes
    assert result.rows_recomputed == (32 + result.prompt_tokens) * result.steps
  full = generate(PROMPTS[:2], batch_size=2, refresh='always')
  assert all(result.rows_fed == result.rows_recomputed for result in full)
  # A decoder without a shadow; and all of it twice for who asks for guidance.
  records = [{'prompt': 'abc', 'cfg_scale': scale} for scale in (0, 0.5)]
  for times, result in enumerate(generate(records, batch_size=2, decoder='llada', refresh='once'), 1):
    assert (result.nfe, result.refreshes) == (times * result.steps, 1)
    assert result.rows_fed == times * (16 * result.steps + 3)
    assert result.rows_recomputed == times * 19 * result.steps


def test_a_result_has_the_fields_of_the_design():
  assert list(result_of([5], gen_length=1).record()) == [
    'id', 'text', 'token_ids', 'finish_reason', 'seed', 'prompt_tokens', 'generated_tokens', 'canvas_tokens', 'steps',
    'nfe', 'refreshes', 'accepted', 'remasked', 'flip_flops',
  ]  # fmt: skip
  assert 'error' in Result(index=0, id=0, finish_reason='error', error='x').record()

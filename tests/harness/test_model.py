"""The model `archer` of lm-evaluation-harness, driven as the harness drives it, on the tiny text model."""

import pytest

pytest.importorskip('lm_eval', reason="lm_eval is not installed: pip install 'archer_jax[eval]'")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from text_model import save_text_model

import archer_jax
from archer_jax.engine.likelihood import log_likelihoods
from archer_jax.harness import model as module
from archer_jax.harness.model import Archer
from archer_jax.harness.model import Mistake

CONTEXTS = ['12+3=', 'a longer prompt, of more than sixteen tokens', '7*6=']


@pytest.fixture(scope='module')
def path(tmp_path_factory):
  return save_text_model(tmp_path_factory.mktemp('harness') / 'model')


@pytest.fixture(scope='module')
def loaded(path):
  return archer_jax.load(path, dtype='float32')


@pytest.fixture(scope='module')
def lm(path):
  # Batches of one need one program per pair of lengths.
  return Archer(str(path), batch_size=1, gen_length=16, mc_num=4, check_greedy=False)


def ask(contexts, **arguments):
  """Requests as a task makes them; equal ones are repeats."""
  kind = 'generate_until'
  made = {}
  for index, context in enumerate(contexts):
    made.setdefault(context, Instance(kind, {}, (context, {'until': [], **arguments}), 0, ('task', index, 1)))
  return [made[context] for context in contexts]


def choose(*pairs):
  return [Instance('loglikelihood', {}, pair, 0, ('task', index, 1)) for index, pair in enumerate(pairs)]


def quiet(method, requests):
  return method(requests, disable_tqdm=True)


def test_the_harness_knows_it(path):
  assert get_model('archer') is Archer
  # As the command line reads `--model_args`.
  text = f'checkpoint={path},decoder=llada,refresh=interval,refresh_interval=4,steps=16,gen_length=16,early_stop=false'
  lm = get_model('archer').create_from_arg_string(text, {'batch_size': '2', 'device': 'cuda:0', 'max_batch_size': None})
  settings = lm._settings
  assert (settings.decoder, settings.refresh, settings.switches['early_stop']) == ('llada', 'interval', False)
  assert (settings.knobs['refresh_interval'], settings.knobs['steps'], lm._batch_size) == (4, 16, 2)


@pytest.mark.parametrize(
  ('arguments', 'sentence'),
  [
    ({'thresold': 0.5}, 'thresold is no argument of the model archer; there are checkpoint, dtype, mc_num'),
    ({'chat': True}, 'chat is no argument of the model archer; --apply_chat_template'),
    ({'threshold': 2}, r'threshold must be a number in \[0, 1\], got 2'),
    ({'steps': 4}, 'steps must not be given with decoder wino'),
    ({'decoder': 'dream'}, 'decoder must be llada, parallel, saber or wino'),
    ({'mc_num': 0}, 'mc_num must be a positive integer, got 0'),
    ({'mc_num': True}, 'mc_num must be a positive integer, got True'),
    ({'check_greedy': 'yes'}, "check_greedy must be true or false, got 'yes'"),
    ({'batch_size': 'auto'}, "batch_size must be a positive integer, got 'auto'"),
    ({'dtype': 'float16'}, "dtype must be one of float32, bfloat16, got 'float16'"),
    ({'checkpoint': 'nowhere'}, 'checkpoint nowhere does not exist'),
  ],
)
def test_wrong_arguments_are_told(path, arguments, sentence):
  with pytest.raises(Mistake, match=sentence):
    Archer(**{'checkpoint': str(path), **arguments})


def test_a_flag_is_no_model_argument():
  with pytest.raises(Mistake, match='batch_size must be given as --batch_size, not in --model_args'):
    Archer.create_from_arg_obj({'batch_size': 2}, {'batch_size': 1})


def test_answers_are_those_of_generate(lm, loaded):
  found = quiet(lm.generate_until, ask(CONTEXTS))
  expected = archer_jax.generate(*loaded, CONTEXTS, decoder='wino', gen_length=16, batch_size=1)
  assert found == [result.text for result in expected]
  # In another order and company. That of no prompt at all is decoded too.
  assert quiet(lm.generate_until, ask([*CONTEXTS[::-1], '']))[:3] == found[::-1]


def test_answers_end_before_the_first_stop(lm):
  (whole,) = quiet(lm.generate_until, ask(CONTEXTS[:1]))
  stop = whole[3:5]
  assert quiet(lm.generate_until, ask(CONTEXTS[:1], until=[stop])) == [whole[: whole.index(stop)]]


@pytest.mark.parametrize('until', [[], [''], None])
def test_no_stop_sequences(lm, until):
  assert quiet(lm.generate_until, ask(CONTEXTS[:1], until=until)) == quiet(lm.generate_until, ask(CONTEXTS[:1]))


@pytest.mark.parametrize(
  ('arguments', 'length', 'temperature'),
  [
    ({}, 16, 0),
    ({'max_gen_toks': 24}, 24, 0),
    ({'max_new_tokens': 24, 'num_beams': 1}, 24, 0),
    ({'max_gen_toks': 24, 'gen_length': 32}, 32, 0),
    ({'max_gen_toks': 24, 'max_new_tokens': 24, 'max_tokens': 24}, 24, 0),
    ({'max_completion_tokens': 24}, 24, 0),
    # As tasks write that nothing is sampled.
    ({'do_sample': False, 'temperature': 1, 'top_p': 1.0, 'top_k': 0}, 16, 0),
    ({'do_sample': False, 'temperature': 0.0}, 16, 0),
    ({'temperature': 0, 'until': 'x'}, 16, 0),
    ({'do_sample': True, 'temperature': 0.7}, 16, 0.7),
    ({'temperature': 0.7}, 16, 0.7),
  ],
)
def test_a_task_may_give_length_and_sampling(path, arguments, length, temperature):
  # 16 is what the checkpoint recommends.
  knobs = Archer(str(path))._request(0, '12+3=', arguments, 1).knobs
  assert (knobs['gen_length'], knobs['temperature']) == (length, pytest.approx(temperature))


def test_model_arguments_win_over_those_of_a_task(path):
  lm = Archer(str(path), gen_length=20, temperature=0.5)
  knobs = lm._request(0, '12+3=', {'max_gen_toks': 256, 'do_sample': False}, 1).knobs
  assert (knobs['gen_length'], knobs['temperature']) == (20, 0.5)
  # Greedy, whatever the task samples with.
  lm = Archer(str(path), temperature=0)
  assert lm._request(0, '12+3=', {'do_sample': True, 'temperature': 0.8, 'top_p': 0.95}, 1).knobs['temperature'] == 0


def test_what_a_task_does_not_know_is_given_once(path):
  lm = Archer(str(path), threshold=0.5)
  assert lm._request(0, '12+3=', {'threshold': 0.5}, 1).knobs['threshold'] == 0.5
  with pytest.raises(ValueError, match=r'threshold must be given once, got 0\.5 in --model_args and 0\.9 in --gen'):
    lm._request(0, '12+3=', {'threshold': 0.9}, 1)


def test_sampling_at_the_temperature_that_the_checkpoint_recommends(tmp_path):
  path = save_text_model(tmp_path / 'model', defaults={'decoder': 'wino', 'gen_length': 16, 'temperature': 0.25})
  temperature = lambda arguments: Archer(str(path))._request(0, '12+3=', arguments, 1).knobs['temperature']
  assert (temperature({'do_sample': True}), temperature({})) == (0.25, 0)


@pytest.mark.parametrize(
  ('arguments', 'sentence'),
  [
    ({'max_gen_toks': 0}, 'task task, document 0: max_gen_toks must be an integer'),
    (
      {'max_gen_toks': 32, 'max_new_tokens': 8},
      'length of an answer must be given once, got max_gen_toks=32 and max_new_tokens=8; give max_gen_toks its value',
    ),
    ({'max_tokens': 8, 'max_completion_tokens': 9}, 'got max_tokens=8 and max_completion_tokens=9'),
    ({'max_tokens': 'long'}, "max_tokens must be an integer in .*, got 'long'"),
    ({'max_length': 8}, 'max_length is no generation argument of the model archer'),
    ({'repetition_penalty': 1.1}, 'repetition_penalty is no generation argument of the model archer'),
    ({'stop': ['x']}, 'stop is no generation argument of the model archer; there are until'),
    ({'until': 5}, 'until must be a text or a list of texts, got 5'),
    ({'until': ['x', 5]}, r"until must be a text or a list of texts, got \['x', 5\]"),
    ({'do_sample': 'no'}, "do_sample must be true or false, got 'no'"),
    ({'do_sample': True}, 'temperature must be above 0 where do_sample is true, got 0'),
    ({'do_sample': True, 'temperature': 0}, 'temperature must be above 0 where do_sample is true, got 0'),
    ({'do_sample': False, 'temperature': 0.7}, 'temperature=0.7 must not be given without do_sample=true'),
    ({'top_p': 0.9}, 'top_p=0.9 must not be given without do_sample=true, where nothing is sampled'),
    ({'temperature': 0, 'top_k': 40}, 'top_k=40 must not be given without do_sample=true'),
    ({'temperature': 'hot'}, "temperature must be a number in .*, got 'hot'"),
    ({'num_beams': 4}, 'num_beams is no generation argument of the model archer; there are until, do_sample'),
    ({'do_sample': True, 'temperature': 1, 'top_p': 0.9}, 'top_p must not be given with decoder wino: it'),
  ],
)
def test_wrong_arguments_of_a_task_are_told(path, arguments, sentence):
  with pytest.raises(Mistake, match=sentence):
    quiet(Archer(str(path)).generate_until, ask(CONTEXTS[:1], **arguments))


def test_repeats_are_drawn_anew_and_again_the_same(lm):
  sampled = {'do_sample': True, 'temperature': 1.0}
  first = quiet(lm.generate_until, ask(['12+3='] * 3, **sampled))
  assert len(set(first)) == 3
  # Whatever else is asked.
  assert quiet(lm.generate_until, ask(['7*6=', *['12+3='] * 2], **sampled))[1:] == first[:2]


def test_what_cannot_be_read_is_told_before_anything_is_decoded(lm, monkeypatch):
  monkeypatch.setattr(module, 'decode_requests', None)
  monkeypatch.setattr(module, 'log_likelihoods', None)
  missing = r"has no token for '→' \(U\+2192\), 'é' \(U\+00E9\)$"
  with pytest.raises(Mistake, match=missing):
    quiet(lm.generate_until, ask(['12+3=', '2→1', 'é→']))
  with pytest.raises(Mistake, match=missing):
    quiet(lm.loglikelihood, choose(('2→', ' 1'), ('2', 'é')))
  with pytest.raises(Mistake, match=missing):
    quiet(lm.loglikelihood_rolling, roll('12', '2→é'))
  with pytest.raises(Mistake, match='task task, document 1: the text must not contain the mask token'):
    quiet(lm.loglikelihood_rolling, roll('12', '12<|mask|>'))
  with pytest.raises(Mistake, match='task task, document 1: prompt of 300 tokens and gen_length=16 must together'):
    quiet(lm.generate_until, ask(['12+3=', 'x' * 300]))
  with pytest.raises(Mistake, match='task task, document 0: context and continuation of 301 tokens must together'):
    quiet(lm.loglikelihood, choose(('x' * 300, '1')))
  with pytest.raises(Mistake, match='must have a token of its own'):
    quiet(lm.loglikelihood, choose(('12', '')))
  with pytest.raises(Mistake, match='must not contain the mask token'):
    quiet(lm.loglikelihood, choose(('12<|mask|>', '1')))


def test_likelihoods(lm, loaded):
  requests = choose(('12+3=', '15'), ('12+3=', '9'), ('', '15'), ('12 ', '15'), ('12', ' 15'))
  found = quiet(lm.loglikelihood, requests)
  model, params, tokenizer = loaded
  encode = tokenizer.encode
  pairs = [(encode('12+3='), encode('15')), (encode('12+3='), encode('9')), ([], encode('15'))]
  seeds = [module._seed(0, context) for context in ('12+3=', '12+3=', '')]
  expected = log_likelihoods(model, params, pairs, seeds=seeds, n_samples=4, batch_size=1)
  assert [value for value, _ in found[:3]] == list(expected)
  assert not any(is_greedy for _, is_greedy in found)
  # White space between the two belongs to the continuation; only the masks drawn differ.
  assert lm._encode_pair('12 ', '15') == lm._encode_pair('12', ' 15') == (encode('12'), encode(' 15'))
  # The same alone.
  assert quiet(lm.loglikelihood, requests[1:2]) == found[1:2]


@pytest.mark.parametrize('decoder', ['wino', 'llada'])
def test_what_the_model_would_write_is_greedy(path, loaded, decoder):
  options = {'decoder': 'llada', 'refresh': 'always', 'early_stop': False, 'block_length': 3}
  written = archer_jax.generate(*loaded, ['12+3='], gen_length=3, **options)[0]
  text = loaded[2].hf.decode(written.token_ids)
  other = text[:-1] + ('x' if text[-1] != 'x' else 'y')
  assert len(loaded[2].encode(text)) == 3
  lm = Archer(str(path), decoder=decoder, mc_num=1)
  found = quiet(lm.loglikelihood, choose(('12+3=', text), ('12+3=', other)))
  assert [is_greedy for _, is_greedy in found] == [True, False]


def roll(*texts):
  return [Instance('loglikelihood_rolling', {}, (text,), 0, ('task', index, 1)) for index, text in enumerate(texts)]


def test_likelihoods_of_whole_texts(lm, loaded, monkeypatch):
  model, params, tokenizer = loaded
  # Three windows of 16 tokens of a model that reads no more.
  monkeypatch.setattr(Archer, 'max_length', 16)
  text = '3141592653589793238462643383279502884'
  ids = tokenizer.encode(text)
  assert len(ids) == 37
  pairs = [([], ids[:16]), ([], ids[16:32]), (ids[21:32], ids[32:])]
  seeds = [module._seed(0, text, window) for window in (1, 2, 3)]
  expected = log_likelihoods(model, params, pairs, seeds=seeds, n_samples=4, batch_size=1)
  short, empty, long = quiet(lm.loglikelihood_rolling, roll('12+3=', '', text))
  assert long == pytest.approx(sum(expected), rel=1e-12)
  assert empty == 0 and short == pytest.approx(
    log_likelihoods(
      model, params, [([], tokenizer.encode('12+3='))], seeds=[module._seed(0, '12+3=')], n_samples=4, batch_size=1
    )[0]
  )
  # The same alone.
  assert quiet(lm.loglikelihood_rolling, roll(text)) == [long]


def test_a_text_of_one_token_is_exact(lm, loaded):
  (value,) = quiet(lm.loglikelihood_rolling, roll('7'))
  pair = ([], loaded[2].encode('7'))
  assert value == log_likelihoods(*loaded[:2], [pair], seeds=[5], n_samples=1, batch_size=1)[0] < 0


def test_conversations(lm, path, tmp_path):
  turns = [{'role': 'user', 'content': 'hi'}]
  assert lm.apply_chat_template(turns) == 'user: hi<|eos|>assistant: '
  begun = [*turns, {'role': 'assistant', 'content': 'so'}]
  assert lm.apply_chat_template(begun, add_generation_prompt=False) == 'user: hi<|eos|>assistant: so'
  # Its end stands in what closes a turn too.
  begun = [*turns, {'role': 'assistant', 'content': 'eos'}]
  assert lm.apply_chat_template(begun, add_generation_prompt=False) == 'user: hi<|eos|>assistant: eos'
  assert lm.chat_template(True) == lm._tokenizer.hf.chat_template
  assert lm.chat_template(False) is None
  assert lm.tokenizer_name == str(path).replace('/', '__')
  bare = Archer(str(save_text_model(tmp_path / 'model', chat=False)))
  with pytest.raises(Mistake, match='must have a chat template for --apply_chat_template'):
    bare.apply_chat_template(turns)


def test_partial_results_are_cached(lm, monkeypatch):
  kept = []
  monkeypatch.setattr(lm.cache_hook, 'add_partial', lambda *entry: kept.append(entry))
  requests, choices = ask(CONTEXTS[:1]), choose(('12+3=', '9'))
  (answer,), (value,) = quiet(lm.generate_until, requests), quiet(lm.loglikelihood, choices)
  (whole,) = quiet(lm.loglikelihood_rolling, roll('7'))
  assert kept == [
    ('generate_until', requests[0].args, answer),
    ('loglikelihood', choices[0].args, value),
    ('loglikelihood_rolling', ('7',), whole),
  ]

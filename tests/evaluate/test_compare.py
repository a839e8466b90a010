"""Rounds: what is decoded in which order, and what is measured."""

import dataclasses
import itertools

import pytest
from text_model import CONFIG

import archer_jax
from archer_jax.engine.engine import Timing
from archer_jax.engine.results import Result
from archer_jax.engine.settings import make_settings
from archer_jax.evaluate import compare
from archer_jax.evaluate.compare import plan
from archer_jax.evaluate.compare import play
from archer_jax.evaluate.record import base_of
from archer_jax.evaluate.record import records
from archer_jax.tasks import Problem
from archer_jax.tasks.sources import Source

SETTINGS = {
  'always': {'refresh': 'always'},
  'archer': {'refresh': 'archer', 'refresh_distance': 4},
  'llada': {'decoder': 'llada', 'refresh': 'once', 'steps': 8},
}
PROMPTS = ['12+3=', 'abc', 'xyz 7', '12+3=', 'q']


def source_of(is_solved=lambda problem, text: text == problem.answer, **also):
  return Source(name='sums', problems=None, is_solved=is_solved, gen_length=16, also=also)


def plan_of(tokenizer, *, prompts=PROMPTS, batch_size=2, settings=SETTINGS, source=None):
  problems = [Problem(prompt=prompt, answer='15') for prompt in prompts]
  settings = {
    label: make_settings(CONFIG, {'decoder': 'wino', 'gen_length': 16, **given}) for label, given in settings.items()
  }
  return plan(source or source_of(), problems, settings, tokenizer, batch_size)


@pytest.mark.parametrize('name', SETTINGS)
def test_results_are_those_of_generate(text, name):
  model, params, tokenizer = text
  plan = plan_of(tokenizer)
  results = [r for trials in play(plan, params, tokenizer, timing=Timing()) for r in trials[name].results]
  given = {'decoder': 'wino', 'gen_length': 16, **SETTINGS[name]}
  expected = archer_jax.generate(model, params, tokenizer, PROMPTS, batch_size=3, **given)
  assert [dataclasses.asdict(r) for r in results] == [dataclasses.asdict(r) for r in expected]
  assert len({r.seed for r in results}) == len(PROMPTS)


def test_figures_of_a_task(text):
  _, params, tokenizer = text
  verdicts = {'12+3=': True, 'abc': False, 'xyz 7': True, 'q': False}
  source = source_of(lambda problem, text: verdicts[problem.prompt])
  plan = plan_of(tokenizer, source=source)
  rounds = list(play(plan, params, tokenizer, timing=Timing()))
  always, archer, llada = records(plan, rounds)
  assert [r['setting'] for r in (always, archer, llada)] == list(SETTINGS)
  for record in (always, archer, llada):
    assert (record['n'], record['correct'], record['pass_at_1']) == (5, 3, 0.6)
    assert (record['wins'], record['losses'], record['p_value']) == (0, 0, 1.0)
    assert record['seconds'] > 0 and record['prompt_tokens'] == pytest.approx((4 + 3 + 5 + 4 + 1) / 5)
  assert always['refresh_share'] == 1 and llada['refresh_share'] == 1 / 8
  assert llada['steps'] == llada['nfe'] == 8 and llada['remasked'] == 0
  assert 0 < archer['refresh_share'] < 1
  assert (always['speedup_wall'], always['speedup_counted']) == (1, 1)
  # Whatever steps they take, a batch of llada costs one refresh and seven reuses, of a smaller program.
  always_operations = sum(trials['always'].operations for trials in rounds)
  assert llada['operations'] * llada['speedup_counted'] == pytest.approx(always_operations)
  assert llada['tokens_per_s'] == pytest.approx(5 * llada['generated_tokens'] / llada['seconds'])


def fake(calls, on_call=lambda label, number: 0.25):
  """A decoder of requests that notes (label, indices) and takes as long as `on_call` says."""
  numbers = itertools.count()

  def decode_requests(setup, requests, *, batch_size, timing):
    label = next(label for label, given in SETTINGS.items() if given['refresh'] == setup.settings.refresh)
    requests = iter(requests)
    while batch := list(itertools.islice(requests, batch_size)):
      calls.append((label, [request.index for request in batch]))
      timing.decode_seconds += on_call(label, next(numbers))
      yield [Result(index=request.index, id=request.index, finish_reason='stop', text='15') for request in batch]

  return decode_requests


def test_settings_take_turns_in_rotating_order(text, monkeypatch):
  calls, solved = [], []
  monkeypatch.setattr(compare, 'decode_requests', fake(calls))
  source = source_of(lambda problem, text: solved.append(problem) or True)
  plan = plan_of(text[2], source=source)
  timing, told = Timing(), []
  rounds = list(play(plan, *text[1:], timing=timing, progress=told.append))
  # What comes before is warming up; the timing of this decoder knows no programs.
  warm, measured = calls[:-9], calls[-9:]
  assert {label for label, _ in warm} == set(SETTINGS)
  assert measured == [
    ('always', [0, 1]), ('archer', [0, 1]), ('llada', [0, 1]),
    ('archer', [2, 3]), ('llada', [2, 3]), ('always', [2, 3]),
    ('llada', [4]), ('always', [4]), ('archer', [4]),
  ]  # fmt: skip
  assert [list(trials) for trials in rounds] == [list(SETTINGS)] * 3
  assert all(trial.seconds == 0.25 for trials in rounds for trial in trials.values())
  assert told == [2, 2, 2, 2, 2, 2, 1, 1, 1]
  # The same answer to the same problem is graded once.
  assert len(solved) == len(PROMPTS)


def test_warming_up_runs_each_program_once(text, monkeypatch):
  _, params, tokenizer = text
  decoded = []
  real = compare.decode_requests

  def spy(setup, requests, **others):
    requests = list(requests)
    decoded.append((setup.settings.decoder, [request.index for request in requests]))
    return real(setup, requests, **others)

  monkeypatch.setattr(compare, 'decode_requests', spy)
  timing = Timing()
  # The third batch, of one problem, needs a program for longer prompts.
  plan = plan_of(
    tokenizer, prompts=['a', 'b', 'c', 'd', 'e' * 20], settings={k: SETTINGS[k] for k in ('always', 'llada')}
  )
  list(play(plan, params, tokenizer, timing=timing))
  assert decoded[:-2] == [('wino', [0, 1]), ('wino', [4, 4]), ('llada', [0, 1]), ('llada', [4, 4])]
  assert {shape for _, shape in timing.programs} == {(2, 16), (2, 32)} and len(timing.programs) == 4
  # For another task of the same shapes nothing is compiled.
  decoded.clear()
  list(play(plan, params, tokenizer, timing=timing))
  assert decoded[:-2] == [('wino', [0, 1]), ('llada', [0, 1])] and len(timing.programs) == 4


def test_wins_and_losses_are_paired(text, monkeypatch):
  monkeypatch.setattr(compare, 'decode_requests', fake([]))
  plan = plan_of(text[2])
  trials = list(play(plan, *text[1:], timing=Timing()))
  verdicts = {
    'always': [True, True, False, False, False],
    'archer': [True, False, True, True, True],
    'llada': [True, True, False, False, False],
  }
  rounds = []
  for start, round in zip((0, 2, 4), trials, strict=True):
    rounds.append(
      {
        label: dataclasses.replace(trial, solved=verdicts[label][start : start + 2], operations=7)
        for label, trial in round.items()
      }
    )
  always, archer, llada = records(plan, rounds)
  assert (archer['wins'], archer['losses'], archer['p_value']) == (3, 1, 2 * (1 + 4) / 16)
  assert (always['wins'], always['losses'], llada['wins'], llada['losses']) == (0, 0, 0, 0)
  assert (archer['correct'], archer['pass_at_1']) == (4, 0.8)
  assert archer['ci_low'] < 0.8 < archer['ci_high']
  # Three batches are too few for an interval.
  assert archer['speedup_wall'] == 1 and archer['speedup_wall_low'] is None


def test_a_second_score_from_one_decoding(text, monkeypatch):
  calls = []
  monkeypatch.setattr(compare, 'decode_requests', fake(calls))
  source = source_of(lambda problem, text: True, et=lambda problem, text: problem.prompt != 'abc')
  plan = plan_of(text[2], source=source)
  rounds = [
    {label: dataclasses.replace(trial, operations=7) for label, trial in trials.items()}
    for trials in play(plan, *text[1:], timing=Timing())
  ]
  assert len(calls) == 9 + 9
  # The second setting alone passes everything.
  rounds[0]['archer'] = dataclasses.replace(rounds[0]['archer'], also={'et': [True, True]})
  always, archer, llada = records(plan, rounds)
  assert (always['correct'], always['also']['et']['correct'], llada['also']['et']['pass_at_1']) == (5, 4, 0.8)
  assert archer['also'] == {
    'et': {key: archer[key] for key in ('n', 'correct', 'pass_at_1', 'ci_low', 'ci_high')}
    | {'wins': 1, 'losses': 0, 'p_value': 1.0}
  }


def test_ratios_need_a_setting_that_always_refreshes(text, monkeypatch):
  monkeypatch.setattr(compare, 'decode_requests', fake([]))
  plan = plan_of(text[2], settings={'archer': SETTINGS['archer'], 'llada': SETTINGS['llada']})
  assert base_of(plan.settings) is None
  rounds = [
    {label: dataclasses.replace(trial, operations=7) for label, trial in trials.items()}
    for trials in play(plan, *text[1:], timing=Timing())
  ]
  for record in records(plan, rounds):
    assert record['speedup_wall'] is record['speedup_counted'] is record['speedup_wall_low'] is None


def test_an_answer_that_is_an_error_is_wrong(text, monkeypatch):
  def broken(*args, **kwargs):
    for results in fake([])(*args, **kwargs):
      yield [dataclasses.replace(result, error='not finite', finish_reason='error') for result in results]

  monkeypatch.setattr(compare, 'decode_requests', broken)
  right = lambda problem, text: True
  plan = plan_of(text[2], source=source_of(right, et=right))
  rounds = [
    {label: dataclasses.replace(trial, operations=7) for label, trial in trials.items()}
    for trials in play(plan, *text[1:], timing=Timing())
  ]
  told = records(plan, rounds)
  assert [(record['correct'], record['also']['et']['correct'], record['errors']) for record in told] == [(0, 0, 5)] * 3


def test_a_problem_that_is_too_long_is_named(text):
  with pytest.raises(ValueError, match=r'^sums: problem 1: prompt of 250 tokens and gen_length=16 must together be'):
    plan_of(text[2], prompts=['a', 'b' * 250])

"""The model `archer` of lm-evaluation-harness; importing this module registers it.

Its arguments are `checkpoint`, `dtype`, `mc_num`, `check_greedy`, and every setting of the command line by its name:

    --model_args checkpoint=llada-8b,decoder=wino,refresh=archer,threshold=0.7

A setting given there wins over what a task asks for (its max_gen_toks and temperature), and that over what the
checkpoint recommends. No argument of a task or of `--gen_kwargs` is passed over: what cannot be followed is refused.
"""

from collections import Counter
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import hashlib
import itertools
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
import numpy as np
from tqdm import tqdm

from archer_jax import runtime
from archer_jax import specs
from archer_jax.calibration.file import calibrated
from archer_jax.checkpoints.checkpoint import load
from archer_jax.checkpoints.manifest import read_manifest
from archer_jax.checkpoints.spelling import check_spelling
from archer_jax.engine.batching import CANVAS_LENGTHS
from archer_jax.engine.batching import PROMPT_LENGTHS
from archer_jax.engine.batching import bucket
from archer_jax.engine.engine import Setup
from archer_jax.engine.generate import decode_requests
from archer_jax.engine.likelihood import log_likelihoods
from archer_jax.engine.requests import Request
from archer_jax.engine.requests import make_request
from archer_jax.engine.results import Result
from archer_jax.engine.settings import SETTINGS
from archer_jax.engine.settings import Settings
from archer_jax.engine.settings import make_settings

# What tasks call the length of the answer.
_LENGTHS = ('max_gen_toks', 'max_new_tokens', 'max_tokens', 'max_completion_tokens')
# What says how to sample, and the values that tasks give where they sample nothing.
_SAMPLING = {'temperature': (0, 1), 'top_p': (1,), 'top_k': (0,)}
_MODEL_SETTINGS = tuple(name for name in SETTINGS if name != 'chat')


class Mistake(ValueError):
  """Something that the caller has to change, said in one sentence."""


@contextlib.contextmanager
def _said_plainly() -> Iterator[None]:
  try:
    yield
  except (ValueError, OSError) as error:
    raise Mistake(str(error)) from error


@register_model('archer')
class Archer(LM):
  """A checkpoint with a decoder.

  Args:
    checkpoint: folder that archer-convert made; by default the bundled model.
    batch_size: requests, or samples of the likelihood, decoded together; no result depends on it.
    max_batch_size, device: what the harness tells every model; a batch has one size, and JAX chooses the device.
    dtype: of parameters and matmuls, by default float32 on CPU and bfloat16 elsewhere.
    mc_num: Monte Carlo samples of a log-likelihood; see `archer_jax.engine.likelihood`.
    check_greedy: whether a log-likelihood also says if the continuation is what the model writes one token a step,
      the surest first. Few metrics read it, and it takes a step per token.
    **settings: see `archer_jax.engine.settings.SETTINGS`.

  Raises:
    Mistake: an argument that there is not or that is wrong, or a checkpoint that cannot be used.
  """

  def __init__(
    self,
    checkpoint: str | None = None,
    *,
    batch_size: int | str = 8,
    max_batch_size: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
    mc_num: int = 128,
    check_greedy: bool = True,
    **settings: Any,
  ):
    super().__init__()
    del max_batch_size, device
    with _said_plainly():
      if 'chat' in settings:
        raise ValueError('chat is no argument of the model archer; --apply_chat_template makes conversations')
      if unknown := [name for name in settings if name not in _MODEL_SETTINGS]:
        names = ('checkpoint', 'dtype', 'mc_num', 'check_greedy', *_MODEL_SETTINGS)
        raise ValueError(f'{unknown[0]} is no argument of the model archer; there are {", ".join(names)}')
      if not isinstance(check_greedy, bool):
        raise ValueError(f'check_greedy must be true or false, got {check_greedy!r}')
      self._batch_size, self._mc_num = _whole('batch_size', batch_size), _whole('mc_num', mc_num)
      self._check_greedy = check_greedy
      # The harness reads a folder whose name is a number as one.
      path = None if checkpoint is None else str(checkpoint)
      manifest = read_manifest(path)
      self._given = {name: value for name, value in settings.items() if value is not None}
      dtype = dtype or runtime.default_dtype()
      settings = make_settings(manifest.config, self._given, recommended=manifest.defaults)
      self._settings = calibrated(settings, path, manifest, dtype)
      self._model, self._params, self._tokenizer = load(path, dtype=dtype)
      if self._tokenizer is None:
        raise ValueError(f'checkpoint {path} must have a tokenizer, which lm-evaluation-harness needs')
    self._name = 'bundled' if path is None else path

  @classmethod
  def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> 'Archer':
    """The model of the command line, from --model_args and the flags that every model gets.

    Raises:
      Mistake: an argument that is a flag of its own.
    """
    if twice := sorted(set(arg_dict) & set(additional_config or ())):
      raise Mistake(f'{twice[0]} must be given as --{twice[0]}, not in --model_args')
    return super().create_from_arg_obj(arg_dict, additional_config)

  @property
  def max_length(self) -> int:
    """The most tokens of prompt and answer together."""
    return self._model.config.max_length

  @property
  def tokenizer_name(self) -> str:
    """Names the tokenizer in the harness's caches."""
    return self._name.replace('/', '__')

  def chat_template(self, chat_template: bool | str = False) -> str | None:
    """The checkpoint's template, which the harness keeps with the results."""
    return self._tokenizer.hf.chat_template if chat_template else None

  def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """The text of a conversation, up to where the answer begins, or with its beginning as the last message.

    Raises:
      Mistake: the checkpoint has no template, or it refuses the messages.
    """
    if self._tokenizer.hf.chat_template is None:
      raise Mistake('the checkpoint must have a chat template for --apply_chat_template')
    with _said_plainly():
      return self._tokenizer.chat_text(chat_history, goes_on=not add_generation_prompt)

  def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
    """Decodes the answers; each ends before the first of its stop sequences.

    Raises:
      Mistake: a prompt that cannot be spelled or is too long, or an argument that nothing would read.
    """
    with _said_plainly():
      check_spelling(self._tokenizer, (request.args[0] for request in requests))
      repeat = Counter()
      entries = []
      for index, request in enumerate(requests):
        # Repeats of a sampled request differ; other tasks, the order and the batch change nothing.
        source = (request.task_name, request.doc_id, request.args[0])
        repeat[source] += 1
        with _named(request):
          entries.append(self._request(index, *request.args[:2], repeat[source]))
    texts = [''] * len(requests)
    for result in self._decode(entries, self._settings, 'Generating', disable_tqdm):
      request = requests[result.index]
      texts[result.index] = result.text
      self.cache_hook.add_partial('generate_until', request.args, texts[result.index])
    return texts

  def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
    """Log-likelihoods of continuations, and whether each is what the model itself would write.

    Raises:
      Mistake: a text that cannot be spelled or is too long.
    """
    with _said_plainly():
      check_spelling(self._tokenizer, (''.join(request.args) for request in requests))
      pairs = []
      for request in requests:
        with _named(request):
          pairs.append(self._encode_pair(*request.args))
    # One seed for all continuations of a context: their comparison is free of the choice of masks.
    seeds = [_seed(self._settings.seed, request.args[0]) for request in requests]
    values = self._estimate(pairs, seeds, disable_tqdm)
    greedy = [False] * len(pairs)
    if self._check_greedy:
      greedy = self._are_greedy(pairs, self._settings.knobs['cfg_scale'], disable_tqdm)
    answers = [(float(value), is_greedy) for value, is_greedy in zip(values, greedy, strict=True)]
    for request, answer in zip(requests, answers, strict=True):
      self.cache_hook.add_partial('loglikelihood', request.args, answer)
    return answers

  def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
    """Log-likelihoods of whole texts.

    A text that is longer than the model is estimated in windows, each by itself and the sum of them all; only the last
    one, which is shorter, has before it as much of the text as fits.

    Raises:
      Mistake: a text that cannot be spelled or has the mask token.
    """
    with _said_plainly():
      check_spelling(self._tokenizer, (request.args[0] for request in requests))
      pairs, seeds, places = [], [], []
      for index, request in enumerate(requests):
        ids = self._tokenizer.encode(request.args[0])
        if self._model.config.mask_id in ids:
          with _named(request):
            raise ValueError('the text must not contain the mask token')
        for window, start in enumerate(range(0, len(ids), self.max_length), start=1):
          end = min(start + self.max_length, len(ids))
          pairs.append((ids[max(end - self.max_length, 0) : start], ids[start:end]))
          seeds.append(_seed(self._settings.seed, request.args[0], window))
          places.append(index)
    sums = [0.0] * len(requests)
    for index, value in zip(places, self._estimate(pairs, seeds, disable_tqdm), strict=True):
      sums[index] += float(value)
    for request, value in zip(requests, sums, strict=True):
      self.cache_hook.add_partial('loglikelihood_rolling', request.args, value)
    return sums

  def _estimate(
    self, pairs: Sequence[tuple[list[int], list[int]]], seeds: Sequence[int], disable_tqdm: bool
  ) -> np.ndarray:
    """float64 [N], the log-likelihood of the second of every pair behind the first."""
    samples = sum(1 if len(answer) == 1 else self._mc_num for _, answer in pairs)
    with tqdm(total=samples, desc='Sampling likelihoods', disable=disable_tqdm) as bar:
      return log_likelihoods(
        self._model,
        self._params,
        pairs,
        seeds=seeds,
        n_samples=self._mc_num,
        cfg_scale=self._settings.knobs['cfg_scale'],
        batch_size=self._batch_size,
        progress=bar.update,
      )

  def _request(self, index: int, context: str, arguments: Mapping[str, Any], repeat: int) -> Request:
    """A request from a task's text and generation arguments."""
    arguments = dict(arguments)
    stop = _stops(arguments.pop('until', None))
    self._take_length(arguments)
    self._take_sampling(arguments)
    if arguments.get('num_beams') == 1:
      del arguments['num_beams']
    if unknown := [name for name in arguments if name not in specs.knobs()]:
      names = ('until', 'do_sample', *_LENGTHS, *specs.knobs())
      raise ValueError(f'{unknown[0]} is no generation argument of the model archer; there are {", ".join(names)}')
    record = {'prompt': context, 'seed': _seed(self._settings.seed, context, repeat), 'stop': stop}
    for name, value in arguments.items():
      if name not in self._given:
        record[name] = value
      elif name not in ('gen_length', *_SAMPLING) and specs.knobs()[name].check(name, value) != self._given[name]:
        # A task knows none of these, so the user has given both.
        given = self._given[name]
        raise ValueError(f'{name} must be given once, got {given} in --model_args and {value} in --gen_kwargs')
    return make_request(record, index, self._settings, self._tokenizer, allow_empty=True)

  def _take_length(self, arguments: dict[str, Any]) -> None:
    """Turns what says how long an answer may be into gen_length, which only a user gives and which wins."""
    given = {name: arguments.pop(name) for name in _LENGTHS if name in arguments}
    lengths = {name: specs.knobs()['gen_length'].check(name, value) for name, value in given.items()}
    if 'gen_length' in arguments or not lengths:
      return
    if len(set(lengths.values())) > 1:
      told = ' and '.join(f'{name}={length}' for name, length in lengths.items())
      raise ValueError(f'the length of an answer must be given once, got {told}; give {next(iter(lengths))} its value')
    arguments['gen_length'] = next(iter(lengths.values()))

  def _take_sampling(self, arguments: dict[str, Any]) -> None:
    """Takes do_sample out, and with it what else tasks say of sampling where there is none."""
    sample = arguments.pop('do_sample', None)
    if sample is not None and not isinstance(sample, bool):
      raise ValueError(f'do_sample must be true or false, got {sample!r}')
    if 'temperature' in self._given:
      temperature = self._given['temperature']
      sample = temperature > 0
    else:
      temperature = arguments.get('temperature', self._settings.knobs['temperature'] if sample else 0)
      temperature = specs.knobs()['temperature'].check('temperature', temperature)
      sample = temperature > 0 if sample is None else sample
      if sample and not temperature:
        raise ValueError(f'temperature must be above 0 where do_sample is true, got {temperature}')
    if sample:
      return
    for name, unread in _SAMPLING.items():
      value = arguments.pop(name, None)
      if value is not None and value not in unread and 'temperature' not in self._given:
        raise ValueError(f'{name}={value} must not be given without do_sample=true, where nothing is sampled')
    arguments['temperature'] = 0.0

  def _decode(self, entries: list[Request], settings: Settings, what: str, disable_tqdm: bool) -> Iterator[Result]:
    """Results as they come: requests that share a program are decoded together."""

    def shape(request):
      return bucket('prompt', len(request.prompt_ids), PROMPT_LENGTHS), bucket(
        'gen_length', request.knobs['gen_length'], CANVAS_LENGTHS
      )

    setup = Setup(params=self._params, tokenizer=self._tokenizer, settings=settings)
    with tqdm(total=len(entries), desc=what, disable=disable_tqdm) as bar:
      for _, group in itertools.groupby(sorted(entries, key=shape), key=shape):
        for batch in decode_requests(setup, group, batch_size=self._batch_size):
          for result in batch:
            if result.error:
              raise Mistake(f'request {result.index}: {result.error}')
            yield result
          bar.update(len(batch))

  def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Token ids of both; white space that ends the context goes to the continuation, as everywhere in the harness."""
    bare = context.rstrip()
    whole, prompt = self._tokenizer.encode(context + continuation), self._tokenizer.encode(bare)
    if len(whole) <= len(prompt):
      raise ValueError(f'the continuation must have a token of its own, got {continuation!r} behind {context[-20:]!r}')
    if self._model.config.mask_id in whole:
      raise ValueError(f'context and continuation must not contain the mask token, got {context + continuation!r}')
    if len(whole) > self.max_length:
      raise ValueError(
        f'context and continuation of {len(whole)} tokens must together be at most the {self.max_length} tokens of the '
        'model'
      )
    return prompt, whole[len(prompt) :]

  def _are_greedy(
    self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], cfg_scale: float, disable_tqdm: bool
  ) -> list[bool]:
    """Whether every answer is what the model writes if it commits one token a step, the surest first."""
    config = self._model.config
    given = {'refresh': 'always', 'early_stop': False}
    if config.default_decoder == 'dream':
      given |= {'alg': 'maskgit_plus'}
    else:
      given |= {'decoder': 'llada', 'cfg_scale': cfg_scale}
    # One block, however long the answer is.
    settings = make_settings(
      config, given, recommended={'gen_length': config.max_length, 'block_length': config.max_length}
    )
    entries = [
      make_request({'prompt_ids': prompt, 'gen_length': len(answer)}, index, settings, None, allow_empty=True)
      for index, (prompt, answer) in enumerate(pairs)
    ]
    greedy = [False] * len(pairs)
    for result in self._decode(entries, settings, 'Checking greedy answers', disable_tqdm):
      greedy[result.index] = list(result.token_ids) == list(pairs[result.index][1])
    return greedy


@contextlib.contextmanager
def _named(request: Instance) -> Iterator[None]:
  """Says which request a mistake is about."""
  try:
    yield
  except ValueError as error:
    raise ValueError(f'task {request.task_name}, document {request.doc_id}: {error}') from error


def _stops(until: str | Sequence[str] | None) -> list[str]:
  """The stop sequences that a task gives, none of them empty."""
  stops = [until] if isinstance(until, str) else until or []
  if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) for stop in stops):
    raise ValueError(f'until must be a text or a list of texts, got {until!r}')
  return [stop for stop in stops if stop]


def _seed(seed: int, context: str, repeat: int = 1) -> int:
  """A seed in [0, 2^32) that belongs to a text."""
  return int.from_bytes(hashlib.sha256(f'{seed} {repeat} {context}'.encode()).digest()[:4], 'little')


def _whole(name: str, value: Any) -> int:
  """A count, which the harness passes as text too."""
  if isinstance(value, str) and value.isdecimal():
    value = int(value)
  if isinstance(value, bool) or not isinstance(value, int) or value < 1:
    raise ValueError(f'{name} must be a positive integer, got {value!r}')
  return value

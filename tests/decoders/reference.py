"""The decoders' rules and margins in plain float64, one row at a time, written from their published code.

A step's *path* is everything it compares: which confidences pass a threshold, the cut of a ranking, what is written.
Each comparison carries the margin that its definition gives it and the change of the logits that turns it first.
"""

import dataclasses
import functools

import numpy as np


@dataclasses.dataclass(frozen=True)
class Comparison:
  """One comparison of a step.

  Attributes:
    kind: what is compared.
    margin: the largest change of the logits that cannot turn it.
    worst: (logits row, tokens, sign) each: the direction in which these tokens move against all others of the row.
  """

  kind: str
  margin: float
  worst: tuple[tuple[int, tuple[int, ...], int], ...]

  def change(self, size, shape):
    """The worst change of that size: float64 [rows, V] with (max - min) / 2 = size in every row it touches."""
    delta = np.zeros(shape)
    for row, tokens, sign in self.worst:
      delta[row] = -sign * size
      delta[row, list(tokens)] = sign * size
    return delta


@dataclasses.dataclass(frozen=True)
class Step:
  """What a step of one row decided."""

  canvas: np.ndarray  # int [G]
  accepted: np.ndarray  # bool [G]
  remasked: np.ndarray  # bool [G]
  path: tuple  # equal for two logits if no comparison of the step differs
  comparisons: list[Comparison]

  @property
  def margin(self):
    return min((comparison.margin for comparison in self.comparisons), default=np.inf)

  @property
  def binding(self):
    return min(self.comparisons, key=lambda comparison: comparison.margin, default=None)


def logit(p):
  if p <= 0 or p >= 1:
    return -np.inf if p <= 0 else np.inf
  return np.log(p) - np.log1p(-p)


def logsumexp(x):
  top = np.max(x, initial=-np.inf)
  return top if np.isinf(top) else top + np.log(np.sum(np.exp(x - top)))


def log_odds(z, tokens):
  """Log-odds of a set of tokens against all others."""
  return logsumexp(z[tokens]) - logsumexp(np.delete(z, tokens))


def _best(scores):
  """The best token, lower ids first, and its lead."""
  token = int(np.argmax(scores))
  return token, scores[token] - max(scores[:token].max(initial=-np.inf), scores[token + 1 :].max(initial=-np.inf))


def _threshold(kind, odds, threshold, row, token):
  if not 0 < threshold < 1:
    return []
  gap = odds - logit(threshold)
  return [Comparison(kind, abs(gap) / 2, ((row, (token,), -int(np.sign(gap))),))]


def _cut(kind, score, chosen, out, tokens, slope):
  """The cut of a ranking; `score` and `tokens` map logits rows to numbers."""
  if not chosen or not out:
    return []
  low, high = min(chosen, key=score.get), max(out, key=score.get)
  if score[low] == score[high] == np.inf:
    # Certain both, whatever happens.
    return []
  worst = ((low, (tokens[low],), -1), (high, (tokens[high],), 1))
  return [Comparison(kind, (score[low] - score[high]) / slope, worst)]


def _ranked(score, rows):
  """Rows from the highest score to the lowest, lower rows first."""
  return sorted(rows, key=lambda row: (-score[row], row))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
  """What the rules read of a config."""

  block_length: int
  mask_id: int
  allows_mask: bool


def _candidates(z, noise, temperature, rules):
  """Token, lead and confidence per logits row."""
  tokens, gaps, odds = {}, {}, {}
  for row in range(len(z)):
    choice = z[row] + temperature * noise[row]
    if not rules.allows_mask:
      choice = np.where(np.arange(len(choice)) == rules.mask_id, -np.inf, choice)
    tokens[row], gaps[row] = _best(choice)
    odds[row] = log_odds(z[row], [tokens[row]])
  return tokens, gaps, odds


def _argmax(tokens, gaps, rows, temperature):
  kind = 'gumbel' if temperature > 0 else 'argmax'
  return [Comparison(kind, gaps[row] / 2, ((row, (tokens[row],), -1),)) for row in rows]


def wino(rules, z, index, noise, *, canvas, pending, block, last_accept, gen_length, knobs):
  """One step of WINO.

  Args:
    rules: the config.
    z: float64 [R + block_length, V], the shadow's rows last.
    index: canvas columns of the first R rows.
    noise: float64 [R, V].
    canvas, pending, block, last_accept, gen_length: of the state.
    knobs: threshold, threshold_back, max_accept and temperature.
  """
  rows = len(index)
  start = block * rules.block_length
  end = min(start + rules.block_length, gen_length)
  tokens, gaps, odds = _candidates(z[:rows], noise, knobs['temperature'], rules)
  eligible = [row for row in range(rows) if index[row] < len(canvas) and pending[index[row]]]
  cap = min(max(int(np.float32(0.7) * np.float32(len(eligible))), 5), knobs['max_accept'])
  passed = [row for row in eligible if odds[row] > logit(knobs['threshold'])]
  cut = not passed or len(passed) > cap
  accept = sorted(_ranked(odds, eligible)[: cap if passed else 1]) if cut else passed
  out = [row for row in eligible if row not in accept]

  comparisons = []
  for row in eligible:
    one = _threshold('accept', odds[row], knobs['threshold'], row, tokens[row])
    # What passes but is cut off may take its next token before it falls below the threshold.
    if row in passed and row not in accept and any(gaps[row] / 2 <= c.margin for c in one):
      one = [dataclasses.replace(c, kind='loose accept') for c in one]
    comparisons += one
  if cut:
    comparisons += _cut('cap' if passed else 'fallback', odds, accept, out, tokens, 4)
  comparisons += _argmax(tokens, gaps, eligible if knobs['temperature'] > 0 else accept, knobs['temperature'])

  standing = {rows + column - start: column for column in range(start, end) if not pending[column]}
  current = {row: int(canvas[column]) for row, column in standing.items()}
  support = {row: log_odds(z[row], [token]) for row, token in current.items()}
  doubtful = [row for row in standing if support[row] < logit(knobs['threshold_back'])]
  remask = []
  verified = len(accept) > 1 and last_accept > 1
  if verified:
    against = {row: -value for row, value in support.items()}
    remask = doubtful
    if len(doubtful) >= last_accept:
      remask = _ranked(against, doubtful)[: last_accept - 1]
      rest = [row for row in standing if row not in remask]
      turned = _cut('remask cap', against, remask, rest, current, 4)
      # A low support ranks first: what would be kept falls, what would be re-masked rises.
      comparisons += [
        dataclasses.replace(c, worst=tuple((row, token, -sign) for row, token, sign in c.worst)) for c in turned
      ]
    for row in standing:
      comparisons += _threshold('back', support[row], knobs['threshold_back'], row, current[row])

  after = np.array(canvas)
  for row in accept:
    after[index[row]] = tokens[row]
  for row in remask:
    after[standing[row]] = rules.mask_id
  matter = eligible if knobs['temperature'] > 0 else accept
  path = (passed, accept, [tokens[row] for row in matter], doubtful if verified else (), sorted(remask))
  return Step(
    canvas=after,
    accepted=np.isin(np.arange(len(canvas)), [index[row] for row in accept]),
    remasked=np.isin(np.arange(len(canvas)), [standing[row] for row in remask]),
    path=path,
    comparisons=comparisons,
  )


def llada(rules, z, index, noise, *, canvas, block, block_step, gen_length, knobs, order=None):
  """One step of LLaDA's decoder; `order` [R] replaces the confidence where the order is random."""
  start = block * rules.block_length
  end = min(start + rules.block_length, gen_length)
  n_blocks = -(-gen_length // rules.block_length)
  steps = [knobs['steps'] // n_blocks + (n < knobs['steps'] % n_blocks) for n in range(n_blocks)][block]
  n_write = [(end - start) // steps + (n < (end - start) % steps) for n in range(steps)][block_step]
  tokens, gaps, odds = _candidates(z, noise, knobs['temperature'], rules)
  score = odds if order is None else dict(enumerate(order))
  eligible = [row for row in range(len(index)) if index[row] < end and canvas[index[row]] == rules.mask_id]
  write = sorted(_ranked(score, eligible)[:n_write])
  out = [row for row in eligible if row not in write]
  depends = eligible if knobs['temperature'] > 0 and order is None else write
  comparisons = _argmax(tokens, gaps, depends, knobs['temperature'])
  if order is None:
    comparisons += _cut('rank', odds, write, out, tokens, 4)
  return _written(canvas, write, index, tokens, (), depends, comparisons)


def parallel(rules, z, index, noise, *, canvas, block, gen_length, knobs):
  """One step of Fast-dLLM's decoder: by threshold, or by factor where that is above 0."""
  end = min((block + 1) * rules.block_length, gen_length)
  tokens, gaps, odds = _candidates(z, noise, knobs['temperature'], rules)
  eligible = [row for row in range(len(index)) if index[row] < end and canvas[index[row]] == rules.mask_id]
  ranked, comparisons = _ranked(odds, eligible), []
  if knobs['factor'] > 0:
    passed = []
    for row in ranked:
      bound = 1 - knobs['factor'] / (len(passed) + 2)
      comparisons += _threshold('loose factor', odds[row], bound, row, tokens[row])
      if odds[row] <= logit(bound):
        break
      passed.append(row)
  else:
    passed = [row for row in ranked if odds[row] >= logit(knobs['threshold'])]
    for row in eligible:
      comparisons += _threshold('threshold', odds[row], knobs['threshold'], row, tokens[row])
  write = sorted(ranked[: max(len(passed), 1)])
  depends = eligible if knobs['temperature'] > 0 else write
  comparisons += _argmax(tokens, gaps, depends, knobs['temperature'])
  if knobs['factor'] > 0 or not passed:
    comparisons += _cut('rank', odds, write, [row for row in eligible if row not in write], tokens, 4)
  return _written(canvas, write, index, tokens, len(passed), depends, comparisons)


def _written(canvas, write, index, tokens, filters, depends, comparisons):
  after = np.array(canvas)
  for row in write:
    after[index[row]] = tokens[row]
  accepted = np.isin(np.arange(len(canvas)), [index[row] for row in write])
  path = (write, [tokens[row] for row in depends], filters)
  return Step(canvas=after, accepted=accepted, remasked=np.zeros_like(accepted), path=path, comparisons=comparisons)


def _filtered(choice, top_p, top_k):
  """The tokens that top_p leaves, those that top_k leaves of them, and the comparisons in units of `choice`."""
  order = [int(token) for token in np.argsort(-choice, kind='stable') if np.isfinite(choice[token])]
  cuts = []
  if top_p < 1:
    mass = np.cumsum(np.exp(choice[order] - logsumexp(choice)))
    # A token goes where the mass before it exceeds top_p; the first one always stays.
    kept = [n for n in range(len(order)) if n == 0 or mass[n - 1] <= top_p]
    for n in (len(kept) - 1, len(kept)):
      if 0 < n < len(order):
        odds = log_odds(choice, order[:n])
        if top_p > 0:
          cuts.append(('top_p', abs(odds - logit(top_p)) / 2, tuple(order[:n]), -int(np.sign(odds - logit(top_p)))))
    if len(kept) < len(order):
      cuts.append(('nucleus', (choice[order[len(kept) - 1]] - choice[order[len(kept)]]) / 2, order[len(kept) - 1], -1))
    order = order[: len(kept)]
  nucleus = order
  if top_k and top_k < len(order):
    cuts.append(('top_k', (choice[order[top_k - 1]] - choice[order[top_k]]) / 2, order[top_k - 1], -1))
    order = order[:top_k]
  return nucleus, order, cuts


def dream(rules, z, index, noise, *, canvas, row_step, gen_length, alg, knobs, order=None, uniform=None):
  """One step of Dream's decoder; `order` [R] is the Gumbel noise of alg_temp, `uniform` [R] the draws of origin."""
  vocab = z.shape[1]
  is_mask = np.arange(vocab) == rules.mask_id
  times = np.linspace(1, 1e-3, knobs['steps'] + 1)
  share = 1 - times[row_step + 1] / times[row_step]
  last = row_step + 1 == knobs['steps']
  sampled = knobs['temperature'] > 0
  scale = knobs['temperature'] if sampled else 1.0
  tokens, gaps, score, cuts, filters = {}, {}, {}, {}, {}
  for row in range(len(z)):
    scaled = z[row] / scale
    choice = scaled if rules.allows_mask else np.where(is_mask, -np.inf, scaled)
    # Without sampling the best token is the best one after every filter too: its lead is that before them.
    best = _best(choice)
    nucleus, allowed, cuts[row] = _filtered(choice, knobs['top_p'], knobs['top_k'])
    filters[row] = sorted(nucleus), sorted(allowed)
    gone = np.ones(vocab, bool)
    gone[allowed] = False
    choice = np.where(gone, -np.inf, choice)
    tokens[row], gaps[row] = _best(choice + noise[row]) if sampled else best
    full = choice if rules.allows_mask else np.where(is_mask, scaled, choice)
    p = np.exp(full - logsumexp(full))
    if alg == 'maskgit_plus':
      score[row] = log_odds(full, [tokens[row]]) if knobs['alg_temp'] == 0 else p[tokens[row]]
    elif alg == 'topk_margin':
      ordered = np.sort(p[~is_mask] if not rules.allows_mask else p)
      score[row] = ordered[-1] - ordered[-2]
    elif alg == 'entropy':
      q = np.exp(choice - logsumexp(choice))
      score[row] = np.sum(q[q > 0] * np.log(q[q > 0]))
    if alg != 'origin' and knobs['alg_temp'] > 0:
      score[row] += knobs['alg_temp'] * order[row]

  eligible = [row for row in range(len(index)) if index[row] < gen_length and canvas[index[row]] == rules.mask_id]
  comparisons = []
  if alg == 'origin':
    write = [row for row in eligible if last or uniform[row] < share]
    depends = write
  else:
    write = sorted(_ranked(score, eligible)[: len(eligible) if last else int(len(eligible) * share)])
    out = [row for row in eligible if row not in write]
    if alg == 'maskgit_plus' and knobs['alg_temp'] == 0:
      comparisons += _cut('rank', score, write, out, tokens, 4)
    else:
      slope = {'maskgit_plus': 1, 'topk_margin': 2, 'entropy': 2 * entropy_slope(vocab)}[alg]
      comparisons += _cut('loose rank', score, write, out, tokens, slope)
    depends = eligible if write and out else write
  argmax_of = depends if sampled else write
  comparisons += _argmax(tokens, gaps, argmax_of, knobs['temperature'])
  # Then the filters matter to the scores alone.
  cut_rows = depends if sampled or alg != 'origin' else []
  comparisons += [
    Comparison(kind, margin, ((row, (token,) if isinstance(token, int) else token, sign),))
    for row in cut_rows
    for kind, margin, token, sign in cuts[row]
  ]
  comparisons = [dataclasses.replace(c, margin=scale * c.margin) for c in comparisons]
  return _written(canvas, write, index, tokens, [filters[row] for row in cut_rows], argmax_of, comparisons)


@functools.cache
def entropy_slope(vocab):
  """The steepest change of the entropy of `vocab` tokens, by golden section rather than on a grid."""
  steepness = lambda q: 2 * q * (1 - q) * (np.log(vocab - 1) + logit(q))
  low, high = 0.5, 1 - 1e-9
  for _ in range(200):
    a, b = low + 0.382 * (high - low), low + 0.618 * (high - low)
    low, high = (a, high) if steepness(a) < steepness(b) else (low, b)
  return steepness((low + high) / 2)


def deficit(odds):
  """1 - p of log-odds."""
  return np.exp(-np.logaddexp(0, odds))


def _above_mean(odds, eligible, kept, least, tokens):
  """Rows that pass, rows that are accepted, threshold as a mean deficit, and the comparisons."""
  mean = np.mean(kept) if len(kept) else 0.0
  passed = [row for row in eligible if deficit(odds[row]) < mean]
  accept = passed if len(passed) >= least else sorted(_ranked(odds, eligible)[:least])
  comparisons = []
  if 0 < mean < 1:
    bound = np.log1p(-mean) - np.log(mean)
    for row in eligible:
      gap = odds[row] - bound
      comparisons.append(Comparison('mean', abs(gap) / 2, ((row, (tokens[row],), -int(np.sign(gap))),)))
  if len(passed) < least:
    comparisons += _cut('fallback', odds, accept, [row for row in eligible if row not in accept], tokens, 4)
  return passed, accept, mean, comparisons


def fall_turns(a, b, old_a, old_b):
  """The change at which a pair's falls turn, by bisection: of deficits old_a, old_b to log-odds a, b."""
  turned = lambda e: deficit(b - 2 * e) - deficit(a + 2 * e) >= old_b - old_a
  low, high = np.zeros(np.broadcast(a, b).shape), np.full(np.broadcast(a, b).shape, 200.0)
  for _ in range(80):
    middle = (low + high) / 2
    at = turned(middle)
    low, high = np.where(at, low, middle), np.where(at, middle, high)
  # No change turns what is apart by a whole probability.
  return np.where(low > 199, np.inf, low)


def saber_same_position(rules, z, noise, *, canvas, pending, kept, previous, block, gen_length, least, temperature):
  """One step of Saber's rule for LLaDA; kept and previous are deficits, infinite ones are none."""
  columns = len(canvas)
  end = min((block + 1) * rules.block_length, gen_length)
  tokens, gaps, odds = _candidates(z, noise, temperature, rules)
  # What may not be committed may still be what a column is watched for.
  best, leads, watched = _candidates(z, noise, temperature, dataclasses.replace(rules, allows_mask=True))
  eligible = [row for row in range(end) if pending[row]]
  known = [kept[row] for row in range(end) if np.isfinite(kept[row])]
  passed, accept, mean, comparisons = _above_mean(odds, eligible, known, least, tokens)
  after = np.array(canvas)
  after[accept] = [tokens[row] for row in accept]
  left = [row for row in eligible if row not in accept]
  remask, compared = [], []
  if left:
    most = max(least, len(accept))
    count = min(max(least // 2, -(-most // 8)), most - 1)
    standing = [row for row in range(end) if after[row] != rules.mask_id and np.isfinite(previous[row])]
    # Ordered by pairs, since a rise of 1 less a small deficit is 1 even in float64.
    first = lambda x, y: (previous[x] - previous[y] - (deficit(watched[x]) - deficit(watched[y])), x - y) < (0, 0)
    rank = {row: sum(first(other, row) for other in standing if other != row) for row in standing}
    remask = [row for row in standing if rank[row] < count]
    spared = [row for row in standing if row not in remask]
    if remask and spared:
      compared = standing
      x, y = np.array(remask)[:, None], np.array(spared)
      values = np.array([watched[row] for row in range(columns)])
      turns = fall_turns(values[x], values[y], previous[x], previous[y])
      for i, j in np.ndindex(*turns.shape):
        # What is spared may take its next token before it has fallen far enough.
        mine, others = remask[i], spared[j]
        loose = leads[others] / 2 <= turns[i, j]
        worst = ((mine, (best[mine],), 1), (others, (best[others],), -1))
        comparisons.append(Comparison('loose fall' if loose else 'fall', turns[i, j], worst))
  after[remask] = rules.mask_id
  depends = eligible if temperature > 0 else accept
  compared = compared if temperature > 0 else []
  comparisons += _argmax(tokens, gaps, depends, temperature) + _argmax(best, leads, compared, temperature)
  return Step(
    canvas=after,
    accepted=np.isin(np.arange(columns), accept),
    remasked=np.isin(np.arange(columns), remask),
    path=(passed, accept, [tokens[row] for row in depends], [best[row] for row in compared], remask),
    comparisons=[c for c in comparisons if np.isfinite(c.margin)],
  ), {
    'pending': np.array([(pending[row] and row not in accept) or row in remask for row in range(columns)]),
    'kept': np.array([deficit(odds[row]) if row in accept else kept[row] for row in range(columns)]),
    'previous': np.array([deficit(watched[row]) if row < end else np.inf for row in range(columns)]),
    'threshold': 1 - mean,
    'block_done': not left,
  }


def saber_shifted(rules, z, noise, *, canvas, first, row_step, gen_length, steps, penalty, pad_id, temperature):
  """One step of Saber's rule for Dream."""
  columns = len(canvas)
  t = np.linspace(1, 1e-3, steps + 1)[min(row_step, steps)]
  lowered = np.array(z)
  lowered[:, pad_id] += penalty * np.log(1 - t + 1e-3)
  tokens, gaps, odds = _candidates(lowered, noise, temperature, rules)
  eligible = [row for row in range(gen_length) if canvas[row] == rules.mask_id]
  known = [value for value in first if np.isfinite(value)]
  passed, accept, mean, comparisons = _above_mean(odds, eligible, known, 2, tokens)
  after = np.array(canvas)
  after[accept] = [tokens[row] for row in accept]
  remask = []
  done = not (after[:gen_length] == rules.mask_id).any()
  if not done:
    count = max(1, min(-(-len(accept) // 8), len(accept) - 1))
    standing = [row for row in range(gen_length) if after[row] != rules.mask_id]
    doubt = {row: -log_odds(z[row], [int(after[row])]) for row in standing}
    remask = sorted(_ranked(doubt, standing)[:count])
    token = {row: int(after[row]) for row in standing}
    for c in _cut('doubt', doubt, remask, [row for row in standing if row not in remask], token, 4):
      (low, its, _), (high, other, _) = c.worst
      comparisons.append(Comparison('doubt', c.margin, ((low, its, 1), (high, other, -1))))
  after[remask] = rules.mask_id
  depends = eligible if temperature > 0 else accept
  comparisons += _argmax(tokens, gaps, depends, temperature)
  return Step(
    canvas=after,
    accepted=np.isin(np.arange(columns), accept),
    remasked=np.isin(np.arange(columns), remask),
    path=(passed, accept, [tokens[row] for row in depends], remask),
    comparisons=comparisons,
  ), {
    'first': np.array(
      [deficit(odds[row]) if row in accept and np.isinf(first[row]) else first[row] for row in range(columns)]
    ),
    'threshold': 1 - mean,
    'block_done': done,
  }

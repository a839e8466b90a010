import io

import pytest
from rich.console import Console

from archer_jax.evaluate import table

RECORD = {
  'task': 'sort', 'setting': 'always', 'n': 300, 'pass_at_1': 0.815, 'ci_low': 0.767, 'ci_high': 0.855, 'wins': 0,
  'losses': 0, 'p_value': 1.0, 'steps': 17.25, 'nfe': 17.25, 'refresh_share': 1.0, 'remasked': 3.14,
  'flip_flop_rate': 0.4, 'tokens_per_s': 12345.6, 'speedup_wall': 1.0, 'speedup_wall_low': 1.0,
  'speedup_wall_high': 1.0, 'speedup_counted': 1.0, 'prompt_tokens': 226.6, 'gen_length': 42, 'batch_size': 8,
}  # fmt: skip
OTHER = RECORD | {
  'setting': 'archer+threshold=0.9+shadow=official', 'wins': 112, 'losses': 101, 'p_value': 0.0004,
  'refresh_share': 0.126, 'speedup_wall': 11.836, 'speedup_wall_low': 9.876, 'speedup_wall_high': 13.251,
  'speedup_counted': 12.5,
}  # fmt: skip


def printed(width, records=(RECORD, OTHER)):
  file = io.StringIO()
  table.print_task(Console(file=file, width=width, highlight=False), records)
  return [line.rstrip() for line in file.getvalue().splitlines()]


def test_a_table_of_a_hundred_columns_has_everything():
  lines = printed(100)
  assert lines[1] == 'sort: 300 problems, prompts of 227 tokens, canvas of 42, batches of 8'
  assert max(map(len, lines)) <= 100 and '…' not in ''.join(lines)
  # What compares with the first setting is left out for itself.
  assert lines[5].split() == [
    'always', '81.5', '77-86', '17.2', '17.2', '100%', '3.1', '40%', '12346', '1.00x', '1.00-1.00', '1.00x',
  ]  # fmt: skip
  assert lines[6].split() == [
    'archer', '81.5', '77-86', '112-101', '<.001', '17.2', '17.2', '13%', '3.1', '40%', '12346', '11.8x', '9.88-13.3',
    '12.5x',
  ]  # fmt: skip
  # A long setting is broken where its parts begin.
  assert lines[7:9] == ['+threshold=0.9', '+shadow=official']


@pytest.mark.parametrize('width', [80, 72])
def test_a_narrow_terminal_loses_columns_not_digits(width):
  lines = printed(width)
  assert max(map(len, lines)) <= width and '…' not in ''.join(lines)
  row = lines[-3].split()
  assert row[:2] == ['archer', '81.5'] and row[-2:] == ['11.8x', '12.5x'] and '112-101' in row


def test_a_second_score_has_a_column():
  lines = printed(100, [record | {'also': {'et': {'pass_at_1': 0.5}}} for record in (RECORD, OTHER)])
  assert max(map(len, lines)) <= 100 and lines[2].split()[-1] == 'et'
  assert lines[-3].split()[:2] == ['archer', '81.5'] and lines[-3].split()[-2:] == ['12.5x', '50.0']


def test_without_a_ratio():
  lines = printed(
    100, [RECORD | dict.fromkeys(('speedup_wall', 'speedup_wall_low', 'speedup_wall_high', 'speedup_counted'))]
  )
  assert lines[5].split()[-3:] == ['-', '-', '-']

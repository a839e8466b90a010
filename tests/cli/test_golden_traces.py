"""The goldens through --input and --trace."""

from cli_files import read_lines
from cli_files import write_lines
from golden_data import case_ids
import numpy as np
import pytest

from archer_jax.checkpoints.manifest import read_manifest


def golden_records(cases):
  """Records of prompt_ids with the cases' numbers, and the canvas after every step that each must show."""
  expected = {}
  records = []
  for case in cases:
    args = case.args
    mask = case.arrays.get('attention_mask', np.ones_like(case.arrays['prompt']))
    steps = case.arrays['tokens_after_step']
    for row, prompt in enumerate(case.arrays['prompt']):
      name = f'{case.id}.{row}'
      knobs = {'gen_length': args.get('gen_length', args.get('max_new_tokens'))}
      knobs |= {k: args[k] for k in ('steps', 'threshold', 'threshold_back', 'cfg_scale') if k in args}
      interval = args.get('refresh_every', 1)
      knobs |= {'refresh_interval': interval or 0, 'refresh_at_block_start': int(args.get('refresh_at_block_start', 0))}
      valid = mask[row, : len(prompt)].astype(bool)
      records.append({'id': name, 'prompt_ids': prompt[valid].tolist(), **knobs})
      canvases = steps[:, row] if steps.ndim == 3 else steps
      per_step = {key: case.arrays[key] for key in ('refresh_per_step', 'accept_per_step', 'remask_per_step')
                  if key in case.arrays}  # fmt: skip
      expected[name] = (canvases[:, len(prompt) :], per_step)
  return records, expected


def golden_group(golden, function, **static):
  """The cases of some functions that share a program: block_length, alg and mask_prediction are static."""
  return [
    case
    for case in golden.cases.values()
    if case.function in function
    and all(case.args[name] == value for name, value in static.items())
    and not case.id.endswith('_maskpred')
  ]


WINO = ('wino.decoding_wino', 'asymmetric_prompt_cache_wino')
slow = pytest.mark.slow


@pytest.mark.parametrize(
  ('name', 'functions', 'static', 'arguments'),
  [
    ('llada_tiny', WINO, {'block_length': 32}, ['--decoder=wino']),
    pytest.param('llada_tiny', WINO, {'block_length': 16}, ['--decoder=wino'], marks=slow),
    pytest.param('llada_tiny', WINO, {'block_length': 64}, ['--decoder=wino'], marks=slow),
    ('llada_tiny', ('llada.generate',), {'block_length': 8}, ['--decoder=llada']),
    pytest.param('llada_tiny', ('llada.generate',), {'block_length': 12}, ['--decoder=llada'], marks=slow),
    pytest.param('llada_tiny', ('llada.generate',), {'block_length': 16}, ['--decoder=llada'], marks=slow),
    pytest.param('llada_tiny', ('llada.generate',), {'block_length': 24}, ['--decoder=llada'], marks=slow),
    ('dream_tiny', ('dream.diffusion_generate',), {'alg': 'entropy'}, []),
    pytest.param('dream_tiny', ('dream.diffusion_generate',), {'alg': 'maskgit_plus'}, [], marks=slow),
    pytest.param('dream_tiny', ('dream.diffusion_generate',), {'alg': 'topk_margin'}, [], marks=slow),
  ],
  ids=lambda value: '_'.join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_goldens(cli_main, request, tmp_path, name, functions, static, arguments):
  golden = request.getfixturevalue(name)
  records, expected = golden_records(golden_group(golden, functions, **static))
  check_goldens(cli_main, golden, tmp_path, records, expected, static, arguments)


@slow
def test_golden_of_a_predicted_mask(cli_main, llada_tiny, tmp_path):
  (name,) = [id for id in case_ids('llada_tiny', WINO[0]) if id.endswith('_maskpred')]
  records, expected = golden_records([llada_tiny.cases[name]])
  arguments = ['--decoder=wino', '--mask_prediction=official']
  check_goldens(cli_main, llada_tiny, tmp_path, records, expected, {'block_length': 16}, arguments)


def check_goldens(cli_main, golden, tmp_path, records, expected, static, arguments):
  assert records
  path = write_lines(tmp_path / 'in.jsonl', records)
  shape = max(record['gen_length'] for record in records)
  code, _, stderr = cli_main(
    f'--checkpoint={golden.path}', f'--input={path}', f'--output={tmp_path / "out.jsonl"}', f'--trace={tmp_path / "t"}',
    '--noearly_stop', '--refresh=interval', '--refresh_interval=2', f'--batch_size={len(records)}',
    f'--gen_length={shape}', '--stats', *(f'--{name}={value}' for name, value in static.items()), *arguments,
  )  # fmt: skip
  assert code == 0, stderr
  assert f'end tokens: {", ".join(map(str, read_manifest(golden.path).end_ids))}\n' in stderr
  for result in read_lines(tmp_path / 'out.jsonl'):
    canvases, per_step = expected[result['id']]
    with np.load(tmp_path / 't' / f'{result["id"]}.npz') as trace:
      assert trace['id'] == result['id']
      np.testing.assert_array_equal(trace['canvas_after_step'], canvases, err_msg=result['id'])
      for name, values in per_step.items():
        np.testing.assert_array_equal(trace[name], values, err_msg=f'{result["id"]} {name}')
    assert result['steps'] == len(canvases)

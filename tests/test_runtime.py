"""What the commands make of the process: compiled programs that are kept, the precision of products, facts."""

import json

import jax

from archer_jax import runtime


def test_the_cache_folder(monkeypatch, tmp_path):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  assert runtime.cache_folder() == tmp_path / 'archer_jax' / 'xla'
  monkeypatch.setenv('HOME', str(tmp_path / 'home'))
  for value in ('', 'relative'):
    monkeypatch.setenv('XDG_CACHE_HOME', value)
    assert runtime.cache_folder() == tmp_path / 'home' / '.cache' / 'archer_jax' / 'xla'


def test_a_cache_of_ones_own_is_kept_and_one_that_cannot_be_made_is_done_without(monkeypatch, tmp_path):
  (tmp_path / 'file').touch()
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'file'))
  before = jax.config.jax_compilation_cache_dir
  runtime.set_up()
  assert jax.config.jax_compilation_cache_dir == before
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  jax.config.update('jax_compilation_cache_dir', str(tmp_path / 'own'))
  try:
    runtime.set_up()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / 'own')
    assert not (tmp_path / 'cache').exists()
  finally:
    jax.config.update('jax_compilation_cache_dir', before)


def test_float32_is_multiplied_in_float32_unless_the_user_says_otherwise(monkeypatch, tmp_path):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  before, folder = jax.config.jax_default_matmul_precision, jax.config.jax_compilation_cache_dir
  jax.config.update('jax_compilation_cache_dir', str(tmp_path))
  try:
    for given, expected in ((None, 'highest'), ('tensorfloat32', 'tensorfloat32')):
      jax.config.update('jax_default_matmul_precision', given)
      runtime.set_up()
      assert jax.config.jax_default_matmul_precision == runtime.facts()['matmul_precision'] == expected
  finally:
    jax.config.update('jax_default_matmul_precision', before)
    jax.config.update('jax_compilation_cache_dir', folder)


def test_facts():
  facts = runtime.facts()
  assert facts['jax'] == jax.__version__ and facts['backend'] == 'cpu' and facts['matmul_precision'] == 'highest'
  assert json.loads(json.dumps(facts)) == facts

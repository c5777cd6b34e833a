"""The attention device check: its trees, its bars, and a run on CPU."""

import json

from absl import app
from absl import flags
from absl.testing import flagsaver
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmarks import attention_check as benchmark


@pytest.mark.parametrize('fork', [0.0, 0.1, 0.5])
def test_trees_are_nested_intervals(fork):
  end = benchmark.random_end(np.random.default_rng(0), 64, fork)
  assert (end[:60] > np.arange(60)).all() and not end[60:].any()
  assert end[0] == 60  # One tree: all are below its root.
  for j in range(60):
    assert end[j:end[j]].max() == end[j]
  assert (end[:60] == 60).all() == (fork == 0)


def test_small_check_passes(tmp_path, capsys):
  out = tmp_path / 'check.json'
  flags.FLAGS.mark_as_parsed()
  with flagsaver.flagsaver(out=str(out), quick=True):
    with pytest.raises(SystemExit) as exit_:
      benchmark.main(['attention_check'])
  printed = capsys.readouterr().out
  assert exit_.value.code == 0, printed
  assert printed.endswith('ok\n') and 'device: cpu' in printed
  figures = json.loads(out.read_text(encoding='utf-8'))
  assert 0 < figures['tiny_64_float32_difference'] < 1e-4
  assert {name.split('_')[3] for name in figures} == {
      'difference', 'dense', 'blocks', 'pallas'}


def test_unknown_arguments_are_refused():
  with pytest.raises(app.UsageError, match='qick'):
    benchmark.main(['attention_check', 'qick'])


def test_bars():
  figures = {
      'a_b_2048_float32_difference': 2e-4,
      'a_b_2048_float32_dense_milliseconds': 1.0,
      'a_b_2048_float32_pallas_milliseconds': 2.0,
      'a_b_1024_bfloat16_difference': 0.02,
      'a_b_1024_bfloat16_dense_milliseconds': 1.0,
      'a_b_1024_bfloat16_pallas_milliseconds': 2.0}
  apart = 'a_b_2048_float32_difference is not within 0.0001'
  slow = 'a_b_2048_float32_dense_milliseconds is less than that of pallas'
  assert benchmark.shortfalls(figures, interpreted=False) == [apart, slow]
  assert benchmark.shortfalls(figures, interpreted=True) == [apart]


def test_what_is_not_finite_is_no_match():
  want = jnp.arange(1.0, 5.0)
  assert benchmark.difference((want,), (want,)) == 0
  assert benchmark.difference((want.at[3].add(2.0),), (want,)) == 0.5
  assert benchmark.difference((want.at[0].set(jnp.nan),), (want,)) == np.inf


def test_blocks_stand_in_where_dense_is_too_large(monkeypatch):
  monkeypatch.setattr(benchmark, 'MAX_DENSE_SCORES', 10)
  asked = []

  def run(queries, *rest):
    asked.append(rest[-1])
    return (jnp.ones_like(queries),)

  monkeypatch.setattr(benchmark, 'run', run)
  figures = benchmark.check(benchmark.TINY[0], 'float32', 1)
  assert 'dense' not in asked and asked[0] == 'blocks'
  assert figures['tiny_64_float32_difference'] == 0
  assert jax.tree.leaves(figures)

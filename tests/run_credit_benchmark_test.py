"""The credit benchmark: the trees it times, its bars, and absent peers."""

import json
import os
import subprocess
import sys
import types as python_types

from absl import flags
from absl.testing import flagsaver
import jax
import numpy as np
import pytest

from bpo_jax import advantages
from bpo_jax import tree as tree_lib
from experiments.benchmarks import credit as benchmark

_NUM_TREES = 6


@pytest.mark.parametrize('make', [benchmark.star, benchmark.backbone])
def test_trees_have_sixteen_leaves(make):
  batch = benchmark.make_batch(make(3), _NUM_TREES)
  batch.validate()
  leaf = np.asarray(tree_lib.is_leaf(batch))
  assert (leaf.sum(axis=1) == benchmark.NUM_LEAVES).all()
  np.testing.assert_array_equal(leaf, batch.terminal)
  assert set(np.unique(batch.rewards[leaf])) == {0, 1}
  assert not batch.rewards[~leaf].any()


def test_the_backbone_has_five_groups_of_four():
  batch = benchmark.make_batch(benchmark.backbone(3), 1)
  children = np.asarray(tree_lib.num_children(batch))[0]
  assert sorted(children[children > 0]) == [1, 4, 4, 4, 4, 4]


def _compute(rewards, num_leaves):
  """Group-relative advantages in float64, as tunix has them."""
  groups = rewards.reshape(-1, num_leaves).astype(np.float64)
  centred = groups - groups.mean(axis=1, keepdims=True)
  spread = groups.std(axis=1, ddof=1, keepdims=True)
  return (centred / (spread + 1e-6)).ravel()


def _loo(rewards, num_leaves):
  groups = rewards.reshape(-1, num_leaves)
  others = groups.sum(axis=1, keepdims=True) - groups
  return (groups - others / (num_leaves - 1)).ravel()


@pytest.fixture
def tunix(monkeypatch):
  """Something with the functions of tunix, and no verl."""
  module = python_types.ModuleType('tunix.rl.algo_core')
  module.compute_advantages = _compute
  module.compute_rloo_advantages = _loo
  monkeypatch.setitem(sys.modules, 'tunix.rl.algo_core', module)
  monkeypatch.setitem(sys.modules, 'tunix.rl', python_types.ModuleType('rl'))
  monkeypatch.setitem(sys.modules, 'tunix', python_types.ModuleType('tunix'))
  monkeypatch.setitem(sys.modules, 'torch', None)
  return module


def _measure():
  return benchmark.measure(3, _NUM_TREES, num_calls=2, num_rounds=1)


def test_peers_get_the_same_rewards_and_agree(tunix):
  figures, missing = _measure()
  assert figures['num_leaves'] == _NUM_TREES * 16
  for name in ('tunix_grpo', 'tunix_rloo'):
    assert figures[f'{name}_difference'] < 1e-5
    assert figures[f'{name}_ratio'] > 0
  assert [line.split(':')[0] for line in missing] == ['verl']
  assert benchmark.shortfalls({**figures, 'bpo_milliseconds': 1.0}) == []


def test_a_peer_that_disagrees_is_told(tunix):
  tunix.compute_advantages = lambda *args: _compute(*args) + 0.01
  figures, _ = _measure()
  assert figures['tunix_grpo_difference'] == pytest.approx(0.01, abs=1e-4)
  assert 'tunix_grpo_difference' in ' '.join(benchmark.shortfalls(figures))


def test_difference_compares_leaf_for_leaf():
  tree = benchmark.make_batch(benchmark.star(2), _NUM_TREES)
  credit = jax.jit(advantages.rloo)(tree)
  theirs = _loo(tree.rewards[tree.terminal], 16)
  assert benchmark.difference(credit, tree, theirs) < 1e-6
  each_token = np.repeat(theirs[:, None], 2, axis=1)
  assert benchmark.difference(credit, tree, each_token) < 1e-6
  assert benchmark.difference(credit, tree, np.roll(each_token, 1, 0)) > 0.5


@pytest.mark.parametrize('bar, code', [(1e9, 0), (0.0, 1)])
def test_main(bar, code, tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(benchmark, 'use_one_core', lambda: None)
  monkeypatch.setattr(benchmark, 'MAX_MILLISECONDS', bar)
  monkeypatch.setattr(benchmark, 'find_peers', lambda _: ([], ['verl: absent']))
  measure = benchmark.measure
  monkeypatch.setattr(
      benchmark, 'measure',
      lambda num_tokens, **sizes: measure(num_tokens, _NUM_TREES, 2))
  out = tmp_path / 'credit.json'
  flags.FLAGS.mark_as_parsed()
  with flagsaver.flagsaver(out=str(out), quick=True):
    with pytest.raises(SystemExit) as exit_info:
      benchmark.main(['credit'])
  assert exit_info.value.code == code
  lines = capsys.readouterr().out.splitlines()
  assert lines[:2] == ['measuring our estimators', 'verl: absent']
  if code:
    assert lines[-3:] == [
        f'{n}_milliseconds is not below 0.0' for n in ('grpo', 'rloo', 'bpo')]
  else:
    assert lines[-1] == 'ok'
  figures = json.loads(out.read_text())
  assert [line.split(':')[0] for line in lines[2:2 + len(figures)]] == list(
      figures)


def test_one_core_is_all_that_it_uses():
  code = (
      'import time\n'
      'from experiments.benchmarks import credit\n'
      'credit.use_one_core()\n'
      'import jax, jax.numpy as jnp\n'
      'x = jnp.ones((1500, 1500)); f = jax.jit(lambda x: x @ x @ x)\n'
      'jax.block_until_ready(f(x))\n'
      'start, spent = time.perf_counter(), time.process_time()\n'
      'jax.block_until_ready(f(x))\n'
      'print((time.process_time() - spent) / (time.perf_counter() - start))')
  result = subprocess.run(
      [sys.executable, '-c', code], capture_output=True, text=True, check=True,
      env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)})
  assert float(result.stdout) < 1.1

"""algorithms: every row of the table runs and says where it comes from."""

import builders
import jax
import numpy as np
import pytest

from bpo_jax import advantages
from bpo_jax import algorithms


def test_names():
  assert algorithms.names() == ('bpo', 'bpo_rb', 'grpo', 'rloo')


@pytest.mark.parametrize('name', algorithms.names())
def test_rows(name):
  row = algorithms.get(name)
  assert row.name == name and row.source
  assert row.exactness in ('exact', 'restated', 'read', 'ours')
  tree = builders.random_trees(0)
  credit = jax.jit(row.credit)(tree)
  np.testing.assert_allclose(
      credit.advantages, getattr(advantages, name)(tree).advantages, atol=1e-6)
  value = row.objective(np.zeros(2), np.zeros(2), np.ones(2))
  np.testing.assert_array_equal(value, 1)
  plan = row.plan(tree)
  if row.defaults['num_branch_points']:
    assert plan.node.shape == (3, row.defaults['num_branch_points'])
    assert set(np.unique(plan.count)) <= {0, row.defaults['num_forks']}
  else:
    assert plan is None


def test_defaults_cannot_be_changed():
  with pytest.raises(TypeError):
    algorithms.get('bpo').defaults['num_forks'] = 1


def test_overrides_reach_the_functions():
  tree = builders.random_trees(1)
  row = algorithms.get('bpo')
  assert row.plan(tree, num_branch_points=2).node.shape == (3, 2)
  got = row.credit(tree, node_weighting='split')
  expected = advantages.bpo(tree, node_weighting='split')
  np.testing.assert_array_equal(got.weights, expected.weights)


@pytest.mark.parametrize('call, message', [
    (lambda tree: algorithms.get('bpo_rbb'), "bpo_rb.*got 'bpo_rbb'"),
    (lambda tree: algorithms.get('zzz'), 'bpo, bpo_rb, grpo, rloo'),
    (lambda tree: algorithms.get('bpo').credit(tree, lamda_=1.0), 'lambda_'),
    (lambda tree: algorithms.get('bpo').plan(tree, num_fork=1), 'num_forks'),
    (lambda tree: algorithms.get('rloo').plan(tree, num_forks=1),
     'does not branch'),
])
def test_typos_list_the_near_names(call, message):
  with pytest.raises(ValueError, match=message):
    call(builders.random_trees(0))

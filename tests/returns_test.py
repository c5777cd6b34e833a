"""returns: equal to the recursive oracle."""

import typing

import builders
import jax
import numpy as np
import oracles
import pytest

from bpo_jax import returns
from bpo_jax import tree as tree_lib

_SEEDS = range(10)


@pytest.mark.parametrize('seed', _SEEDS)
@pytest.mark.parametrize('aggregate', typing.get_args(returns.Aggregate))
@pytest.mark.parametrize('discount', [1.0, 0.9])
def test_node_values(seed, aggregate, discount):
  tree = builders.random_trees(seed)
  expected = oracles.per_node(
      tree, lambda node: oracles.node_value(node, aggregate, discount))
  for function in (returns.node_values, jax.jit(
      returns.node_values, static_argnames=('aggregate',))):
    got = function(builders.poison(tree), aggregate=aggregate,
                   discount=discount)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('seed', _SEEDS)
def test_path_and_leaf_returns(seed):
  tree = builders.random_trees(seed)
  total = oracles.per_node(tree, lambda node: node.total)
  leaf = oracles.per_node(tree, lambda node: node.total * (not node.children))
  np.testing.assert_allclose(returns.path_returns(tree), total, atol=1e-5)
  np.testing.assert_allclose(returns.leaf_returns(tree), leaf, atol=1e-5)


@pytest.mark.parametrize('seed', _SEEDS)
def test_centred_returns_keep_their_digits(seed):
  tree = builders.random_trees(seed, offset=1e4)

  def expected(node):
    first = min(node.path[0].leaves, key=lambda leaf: leaf.index)
    return 0.0 if node.children else node.total - first.total
  got = jax.jit(returns.centred_leaf_returns)(tree)
  np.testing.assert_allclose(
      got, oracles.per_node(tree, expected), rtol=1e-6, atol=1e-6)


def test_a_node_and_its_only_child_have_equal_centred_values():
  builder = tree_lib.TreeBuilder()
  root = builder.add(-1, [0], reward=5.0)
  for first, second in ((1.0, 2.0), (0.5, -1.0)):
    node = builders.add_action(builder, root, reward=first)
    builders.add_action(builder, node, reward=second)
  values = returns.centred_values(tree_lib.stack([builder]), 'split_mean')[0]
  np.testing.assert_array_equal(values[:5], [-1.75, 0, 0, -3.5, -3.5])


def test_an_unknown_aggregate_lists_the_known_ones():
  with pytest.raises(ValueError, match="leaf_mean, split_mean, own; got 'mea'"):
    returns.node_values(builders.random_trees(0), aggregate='mea')

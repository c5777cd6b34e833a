"""siblings: equal to the float64 oracle, whatever the offset and the order."""

import builders
import jax
import numpy as np
import oracles
import pytest

from bpo_jax import siblings

_SEEDS = range(10)


def _values(tree, seed, offset=0.0):
  rng = np.random.default_rng(seed)
  return (rng.normal(size=tree.parents.shape) + offset).astype(np.float32)


def _oracle(values, tree):
  return np.stack([oracles.leave_one_out_mean(*row) for row in zip(
      values.astype(np.float64), tree.parents, tree.node_mask)])


@pytest.mark.parametrize('seed', _SEEDS)
@pytest.mark.parametrize('offset', [0.0, 1e4])
def test_leave_one_out_mean(seed, offset):
  tree = builders.random_trees(seed)
  values = _values(tree, seed, offset)
  poisoned = np.where(tree.node_mask, values, np.nan)
  got = siblings.leave_one_out_mean(poisoned, tree.parents, tree.node_mask)
  expected = _oracle(values, tree)
  np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)
  jitted = jax.jit(siblings.leave_one_out_mean)
  np.testing.assert_array_equal(
      jitted(poisoned, tree.parents, tree.node_mask), got)


@pytest.mark.parametrize('seed', _SEEDS)
def test_advantage_keeps_its_digits_under_an_offset(seed):
  tree = builders.random_trees(seed)
  values = _values(tree, seed, 1e4)
  grouped = np.asarray(siblings.count(tree.parents, tree.node_mask)) > 1
  expected = np.where(grouped, values - _oracle(values, tree), 0)
  got = siblings.leave_one_out_advantage(values, tree.parents, tree.node_mask)
  np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize('seed', _SEEDS)
def test_count_and_sum(seed):
  tree = builders.random_trees(seed)
  values = _values(tree, seed)
  size = oracles.per_node(
      tree, lambda node: bool(node.parent) * (1 + len(node.siblings)))
  np.testing.assert_array_equal(
      siblings.count(tree.parents, tree.node_mask), size)
  total = _oracle(values, tree) * (size - 1) + values
  np.testing.assert_allclose(
      np.where(size > 1, siblings.group_sum(
          values, tree.parents, tree.node_mask), 0),
      np.where(size > 1, total, 0), rtol=1e-5, atol=1e-5)


def test_members_are_told_by_the_mask():
  parents = np.array([-1, 0, 0, 0, -1])
  mask = np.array([True, True, False, True, True])
  values = np.array([9.0, 1.0, np.nan, 3.0, 9.0], np.float32)
  np.testing.assert_array_equal(
      siblings.leave_one_out_mean(values, parents, mask), [0, 3, 0, 1, 0])


def test_any_leading_axes():
  tree = builders.random_trees(3)
  values = _values(tree, 3)
  expected = siblings.leave_one_out_mean(values, tree.parents, tree.node_mask)
  two = [np.stack([x, x]) for x in (values, tree.parents, tree.node_mask)]
  np.testing.assert_array_equal(
      siblings.leave_one_out_mean(*two), np.stack([expected, expected]))
  one = [x[0] for x in (values, tree.parents, tree.node_mask)]
  np.testing.assert_array_equal(siblings.leave_one_out_mean(*one), expected[0])


def test_equal_values_contrast_to_exactly_zero():
  parents = np.array([-1, 0, 0, 0, 1])
  values = np.array([0, 0.1, 0.1, 0.1, 4], np.float32)
  got = siblings.leave_one_out_advantage(values, parents, parents > -2)
  np.testing.assert_array_equal(got, np.zeros(5))

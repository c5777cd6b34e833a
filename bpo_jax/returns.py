"""Rewards to returns, and returns back up the tree.

The value of a node is its reward-to-go: the reward received on entering it plus
what follows. The rewards of its ancestors are left out; siblings share them, so
no contrast between siblings sees the difference.
"""

from typing import Literal

import chex
import jax.numpy as jnp

from bpo_jax import checks
from bpo_jax import masked
from bpo_jax import tree as tree_lib
from bpo_jax import types
from bpo_jax import walks

Aggregate = Literal['leaf_mean', 'split_mean', 'own']


def path_returns(tree: tree_lib.Tree) -> types.Array:
  """Returns the sum of rewards from the root to every node.

  Returns:
    [B, N] float32, reward units; at a leaf, the return of its path. 0 on
    padding.
  """
  high, low = _path_returns(tree)
  return high + low


def leaf_returns(tree: tree_lib.Tree) -> types.Array:
  """Returns `path_returns` at leaves and 0 elsewhere, [B, N] float32."""
  return masked.fill(path_returns(tree), tree_lib.is_leaf(tree))


def centred_leaf_returns(tree: tree_lib.Tree) -> types.Array:
  """Returns every leaf's return less that of the tree's first leaf.

  Every advantage is a contrast between leaves of one tree, so that it may be
  formed from these; they keep the digits that a large common return would eat.

  Returns:
    [B, N] float32, reward units; 0 off the leaves.
  """
  high, low = _path_returns(tree)
  leaf = tree_lib.is_leaf(tree)
  first = jnp.argmax(leaf, axis=-1, keepdims=True)
  contrast = ((high - jnp.take_along_axis(high, first, axis=-1))
              + (low - jnp.take_along_axis(low, first, axis=-1)))
  return masked.fill(contrast, leaf)


def node_values(tree: tree_lib.Tree, aggregate: Aggregate = 'leaf_mean',
                discount: float = 1.0) -> types.Array:
  """Returns the value of every node, its reward-to-go.

  V(n) = r(n) + discount * mean of V over the children of n, in which
  * 'leaf_mean': a child counts as often as it has leaves below, so that V is
    the plain mean over leaves.
  * 'split_mean': children count alike, however many leaves they have.
  * 'own': the child laid down first counts alone, so that V is the return of
    the continuation that was drawn together with the node.

  Args:
    tree: [B, N, T].
    aggregate: which of the three.
    discount: factor per node.

  Returns:
    [B, N] float32, reward units; 0 on padding.

  Raises:
    ValueError: if the aggregate is unknown.
  """
  rewards = masked.fill(jnp.asarray(tree.rewards), tree.node_mask)
  return _aggregate(tree, rewards, aggregate, discount)


def centred_values(tree: tree_lib.Tree, aggregate: Aggregate) -> types.Array:
  """Returns the mean return of the paths through a node, centred.

  Like `node_values`, but of whole paths and less the return of the tree's first
  leaf: equal on a node and its only child, and exact to float32 however large
  the returns of the tree are.

  Args:
    tree: [B, N, T].
    aggregate: as in `node_values`.

  Returns:
    [B, N] float32, reward units; 0 on padding.
  """
  values = centred_leaf_returns(tree)
  if aggregate == 'own':  # What the first children lead to, but quicker.
    return walks.accumulate_back(jnp.add, values, tree_lib.first_child(tree))
  return _aggregate(tree, values, aggregate, 1.0)


def backup(values: chex.Array, votes: chex.Array, parents: chex.Array,
           discounts: chex.Array) -> types.Array:
  """Carries values from the leaves up, averaging over children.

  y(n) = x(n) + discount(n) sum_c votes(c) y(c) / sum_c votes(c), c the children
  of n; without votes below, y(n) = x(n).

  Args:
    values: [..., N] float32 x; 0 on padding.
    votes: [..., N] float32, what a node counts among its siblings.
    parents: [..., N] int32.
    discounts: [..., N] float32.

  Returns:
    [..., N] float32 y.
  """
  parents = jnp.asarray(parents)
  size = walks.sum_of_children(votes, parents, parents >= 0)
  size = jnp.where(size == 0, 1, size)
  total = walks.visit_nodes(
      _vote, jnp.zeros_like(values),
      (values, votes, walks.slots(parents), discounts, size), reverse=True)
  return values + discounts * (total / size)


def _vote(node, total, constants):
  """Adds a node's value, as often as it counts, to its parent's total."""
  values, votes, index, discounts, size = constants
  value = values[node] + discounts[node] * (total[node] / size[node])
  return total.at[index[node]].add(votes[node] * value, mode='drop')


def _aggregate(tree, values, aggregate, discount):
  discounts = jnp.full_like(values, discount)
  return backup(values, _votes(tree, aggregate), tree.parents, discounts)


def _votes(tree, aggregate):
  """Returns what every node counts among its siblings, [B, N] float32."""
  checks.one_of('aggregate', aggregate, Aggregate)
  if aggregate == 'leaf_mean':
    return tree_lib.num_leaves(tree).astype(jnp.float32)
  if aggregate == 'split_mean':
    return jnp.asarray(tree.node_mask, jnp.float32)
  return tree_lib.is_first_child(tree).astype(jnp.float32)


def _path_returns(tree):
  """Returns path returns as unevaluated sums of two float32, [B, N] each."""
  tree_lib.check_batch(tree)
  rewards = masked.fill(jnp.asarray(tree.rewards), tree.node_mask)
  return walks.accumulate_down(
      _add_pairs, (rewards, jnp.zeros_like(rewards)), tree.parents)


def _add_pairs(above, own):
  """Adds with the rounding error kept (Knuth's two-sum)."""
  high = above[0] + own[0]
  rest = high - above[0]
  error = (above[0] - (high - rest)) + (own[0] - rest)
  return high, above[1] + own[1] + error

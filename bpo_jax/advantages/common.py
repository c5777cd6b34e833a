"""What the credit estimators share: spreading over tokens and weighing."""

from typing import Literal

import chex
import jax
import jax.numpy as jnp

from bpo_jax import checks
from bpo_jax import masked
from bpo_jax import siblings
from bpo_jax import tree as tree_lib
from bpo_jax import types
from bpo_jax import walks

NodeWeighting = Literal['uniform', 'split']
Incumbent = Literal['keep', 'drop']
PathWeighting = Literal['token', 'sequence']


def take(values: chex.Array, index: chex.Array) -> types.Array:
  """Returns values at node indices [B, N], 0 where the index is -1."""
  taken = jnp.take_along_axis(values, jnp.maximum(index, 0), axis=-1)
  return masked.fill(taken, index >= 0)


def per_token(tree: tree_lib.Tree, per_node: chex.Array) -> types.Array:
  """Spreads [B, N] over the tokens of each node, [B, N, T]."""
  return jnp.broadcast_to(per_node[..., None], tree.action_mask.shape)


def credit(tree: tree_lib.Tree, advantages: chex.Array, weights: chex.Array
           ) -> types.Credit:
  """Returns the credit of [B, N, T] arrays, without gradient.

  Both are 0 off the action tokens, and the advantage where nothing weighs.
  """
  tree_lib.check_batch(tree)
  mask = jnp.asarray(tree.action_mask)
  fields = (masked.fill(x.astype(jnp.float32), mask & (weights != 0))
            for x in (advantages, weights))
  return types.Credit(*map(jax.lax.stop_gradient, fields))


def path_credit(tree: tree_lib.Tree, advantages: chex.Array,
                path_weighting: PathWeighting = 'token',
                mask: chex.Array | None = None) -> types.Credit:
  """Returns the credit of training on every leaf's path.

  Args:
    tree: [B, N, T].
    advantages: [B, N] float32, read at leaves.
    path_weighting: 'token', every token of a path weighs 1, or 'sequence', it
      weighs 1 / (number of action tokens of the path).
    mask: [B, N] bool, the leaves to train on; None for all.

  Returns:
    Credit; a token shared by several paths gets the sum of their weights and
    the weighted mean of their advantages, the gradient of training on each.

  Raises:
    ValueError: if the weighting is unknown.
  """
  weights = path_weights(tree, path_weighting, mask)
  total, weighted = (walks.sum_below(x, tree.parents)
                     for x in (weights, weights * advantages))
  mean = masked.divide(weighted, total)
  return credit(tree, per_token(tree, mean), per_token(tree, total))


def path_weights(tree: tree_lib.Tree, path_weighting: PathWeighting,
                 mask: chex.Array | None = None) -> types.Array:
  """Returns what a token of every leaf's path weighs, [B, N]; 0 off leaves."""
  checks.one_of('path_weighting', path_weighting, PathWeighting)
  leaf = tree_lib.is_leaf(tree)
  if mask is not None:
    leaf = leaf & mask
  weights = leaf.astype(jnp.float32)
  if path_weighting == 'sequence':
    actions = jnp.sum(tree.action_mask, axis=-1, dtype=jnp.int32)
    length = walks.sum_above(actions, tree.parents)
    weights = weights / jnp.maximum(length, 1)
  return weights


def node_weights(tree: tree_lib.Tree, node_weighting: NodeWeighting
                 ) -> types.Array:
  """Returns what every node weighs, [B, N] float32; 0 on padding.

  'uniform': 1. 'split': a child carries 1 / (number of children) of its
  parent's weight, the root's being 1, so that the leaves together weigh 1.
  """
  checks.one_of('node_weighting', node_weighting, NodeWeighting)
  weights = jnp.asarray(tree.node_mask, jnp.float32)
  if node_weighting == 'uniform':
    return weights
  count = siblings.count(tree.parents, tree.node_mask)
  return walks.accumulate_down(
      jnp.multiply, weights / jnp.maximum(count, 1), tree.parents)


def is_incumbent(tree: tree_lib.Tree) -> types.Array:
  """Returns [B, N] bool, True for a node older than its newest sibling."""
  newest = walks.max_of_children(tree.birth, tree.parents, tree.node_mask)
  return tree.birth < walks.at_parent(newest, tree.parents, -1)

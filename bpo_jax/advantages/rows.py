"""Rows: what is trained once where first trajectories are forked.

A first trajectory is a row, and so is every fork, from its branch point to its
end. On the tree a row is a chain of first children. It starts at a child of the
root (a first trajectory; one that was started afresh later is as good) or at
any other child that is not its parent's first. A branch point is a node other
than the root with two children or more. Every token but the root's lies on one
row; the copy of the prefix that a fork continues is none of its row.
"""

import chex
import jax.numpy as jnp

from bpo_jax import masked
from bpo_jax import tree as tree_lib
from bpo_jax import types
from bpo_jax import walks


def is_branch_point(tree: tree_lib.Tree) -> types.Array:
  """Returns [B, N] bool, True for nodes below the root that are forked."""
  return (tree_lib.num_children(tree) > 1) & (tree.parents >= 0)


def leaves_branch_point(tree: tree_lib.Tree) -> types.Array:
  """Returns [B, N] bool, True for the children of branch points."""
  return tree_lib.in_group(tree) & (tree.parents > 0)


def is_fork(tree: tree_lib.Tree) -> types.Array:
  """Returns [B, N] bool, True for the first node of every fork's row."""
  return leaves_branch_point(tree) & ~tree_lib.is_first_child(tree)


def fork_above(tree: tree_lib.Tree) -> types.Array:
  """Returns the first node of the fork's row that a node is on, or below.

  [B, N] int32; -1 for first trajectories, the root and padding.
  """
  return walks.nearest_above(is_fork(tree), tree.parents)


def on_first_trajectory(tree: tree_lib.Tree) -> types.Array:
  """Returns [B, N] bool, True for the nodes of first trajectories."""
  return (fork_above(tree) < 0) & (tree.parents >= 0)


def ahead(tree: tree_lib.Tree, mask: chex.Array) -> types.Array:
  """Returns the nearest marked node at or below along the row.

  Args:
    tree: [B, N, T].
    mask: [B, N] bool, True for marked nodes; with leaves marked, what is found
      is the end of the row.

  Returns:
    [B, N] int32 node indices, -1 where none is marked down to the row's end.
  """
  index = jnp.arange(mask.shape[-1], dtype=jnp.int32)
  marked = jnp.where(mask, index, types.NO_PARENT)
  return walks.visit_nodes(
      _look_ahead, marked, tree_lib.first_child(tree), reverse=True)


def _look_ahead(node, nearest, first):
  below = jnp.where(first[node] < 0, -1, nearest[first[node]])
  return nearest.at[node].set(
      jnp.where(nearest[node] < 0, below, nearest[node]))


def since(starts: chex.Array, values: chex.Array, parents: chex.Array
          ) -> types.Array:
  """Returns the sum from the nearest start above down to a node, [B, N].

  Args:
    starts: [B, N] bool, where the sum begins anew, that node included.
    values: [B, N].
    parents: [B, N] int32.
  """
  return walks.accumulate_down(_add_unless_start, (values, starts), parents)[0]


def _add_unless_start(above, own):
  (before, _), (value, starts) = above, own
  return jnp.where(starts, value, before + value), starts


def mean_of_children(tree: tree_lib.Tree, values: chex.Array) -> types.Array:
  """Returns at branch points the mean over the children, 0 elsewhere."""
  total = walks.sum_of_children(values, tree.parents, leaves_branch_point(tree))
  return masked.divide(total, tree_lib.num_children(tree))


def length(tree: tree_lib.Tree) -> types.Array:
  """Returns the number of action tokens of a node's row, [B, N] int32."""
  actions = jnp.sum(tree.action_mask, axis=-1, dtype=jnp.int32)
  so_far = since((tree.parents == 0) | is_fork(tree), actions, tree.parents)
  end = ahead(tree, tree_lib.is_leaf(tree))
  return masked.fill(
      jnp.take_along_axis(so_far, jnp.maximum(end, 0), axis=-1), end >= 0)

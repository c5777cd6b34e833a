"""Reductions over siblings, the nodes of one parent.

Everything takes `[..., N]` arrays and the parents' indices. A node is a member
of its parent's group when `mask` holds and it has a parent, so the root and
padding belong to no group. Returns of one group differ by little against their
size, so every mean is formed from differences to one member, which are exact.
"""

import chex
import jax.numpy as jnp

from bpo_jax import masked
from bpo_jax import types
from bpo_jax import walks


def group_sum(values: chex.Array, parents: chex.Array, mask: chex.Array
              ) -> types.Array:
  """Returns the sum over a node's group, itself included; 0 for no member.

  Args:
    values: [..., N].
    parents: [..., N] int32, NO_PARENT for the root and for padding.
    mask: [..., N] bool, True for members.

  Returns:
    [..., N] in the dtype of `values`; gradients flow.
  """
  total = walks.sum_of_children(values, parents, mask)
  return masked.fill(walks.at_parent(total, parents), mask)


def count(parents: chex.Array, mask: chex.Array) -> types.Array:
  """Returns the size of a node's group, [..., N] int32; 0 for no member."""
  return group_sum(jnp.ones_like(parents, jnp.int32), parents, mask)


def leave_one_out_mean(values: chex.Array, parents: chex.Array,
                       mask: chex.Array) -> types.Array:
  """Returns the mean over a node's siblings without itself.

  b_k = 1 / (K - 1) sum_{j != k} x_j. A node without siblings gets 0; `count`
  tells such a 0 from a mean that is 0.

  Args:
    values: [..., N] float.
    parents: [..., N] int32, NO_PARENT for the root and for padding.
    mask: [..., N] bool, True for members.

  Returns:
    [..., N] float; 0 for singletons and for nodes that are no members.
    Gradients flow.
  """
  centred, reference = _centred(values, parents, mask)
  others = _leave_one_out(centred, parents, mask)
  return masked.fill(reference + others, count(parents, mask) > 1)


def leave_one_out_advantage(values: chex.Array, parents: chex.Array,
                            mask: chex.Array) -> types.Array:
  """Returns x_k - 1 / (K - 1) sum_{j != k} x_j, and 0 for singletons.

  Equals `values - leave_one_out_mean(...)` but keeps its digits where the group
  lies far from 0. Shapes as in `leave_one_out_mean`.
  """
  centred, _ = _centred(values, parents, mask)
  advantage = centred - _leave_one_out(centred, parents, mask)
  return masked.fill(advantage, count(parents, mask) > 1)


def _centred(values, parents, mask):
  """Returns values minus those of the group's first member, and the latter."""
  parents, values = jnp.asarray(parents), masked.fill(values, mask)
  first = walks.first_child(parents, mask)
  index = jnp.maximum(walks.at_parent(first, parents), 0)
  reference = jnp.take_along_axis(values, index, axis=-1)
  reference = masked.fill(reference, mask & (parents >= 0))
  return values - reference, reference


def _leave_one_out(values, parents, mask):
  others = group_sum(values, parents, mask) - values
  return others / jnp.maximum(count(parents, mask) - 1, 1)

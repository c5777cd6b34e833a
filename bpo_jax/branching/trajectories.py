"""The action tokens of a tree as sequences, one trajectory after the other.

A trajectory is what was drawn in one go, a chain of first children, and a
segment what lies between two branchings. Policies that look at the next tokens
of one, at those before, or at all of them lay a tree out like this, compute
along the last axis, and put the result back. What stands off the action tokens
is never read.
"""

import chex
import jax
import jax.numpy as jnp

from bpo_jax import masked
from bpo_jax import tree as tree_lib
from bpo_jax import types
from bpo_jax import walks
from bpo_jax.branching import decisions as decisions_lib


@chex.dataclass(frozen=True, mappable_dataclass=False)
class Trajectories:
  """Where a tree's N * T = L tokens stand when laid out as sequences.

  Attributes:
    order: flattened index into N * T of what stands there.
    number: the node with which the token's sequence began; N for tokens that
      are no actions, which come last.
  """

  order: chex.Array  # [B, L] int32
  number: chex.Array  # [B, L] int32


def lay_out(tree: tree_lib.Tree) -> Trajectories:
  """Returns the action tokens by trajectory, then by their place in it."""
  return _lay_out(tree, decisions_lib.trajectory(tree))


def lay_out_segments(tree: tree_lib.Tree) -> Trajectories:
  """Returns the action tokens by segment, then by their place in it.

  A segment begins at the root and at every node with siblings. A trajectory has
  one from its start to its first branching, one from there to the second, and
  so on.
  """
  starts = tree_lib.in_group(tree) | (jnp.asarray(tree.parents) < 0)
  return _lay_out(tree, walks.nearest_above(starts, tree.parents))


def _lay_out(tree, start):
  """Returns the action tokens by the node that their sequence began with."""
  tree_lib.check_batch(tree)
  trees, num_nodes, num_tokens = tree.tokens.shape
  number = jnp.where(tree.action_mask, start[..., None], num_nodes)
  place = tree_lib.tokens_above(tree)[..., None] + jnp.arange(num_tokens)
  flat = lambda x: x.reshape(trees, num_nodes * num_tokens)
  order = jnp.lexsort((flat(place), flat(number)), axis=-1)
  return Trajectories(
      order=order, number=jnp.take_along_axis(flat(number), order, axis=-1))


def read(laid_out: Trajectories, values: chex.Array, tree: tree_lib.Tree
         ) -> types.Array:
  """Returns [B, N, T] values as [B, L], and 0 off the action tokens."""
  values = masked.fill(jnp.asarray(values), tree.action_mask)
  return jnp.take_along_axis(
      values.reshape(laid_out.order.shape), laid_out.order, axis=-1)


def put_back(laid_out: Trajectories, values: chex.Array, tree: tree_lib.Tree
             ) -> types.Array:
  """Returns [B, L] values as [B, N, T], and 0 off the action tokens."""
  put = jax.vmap(lambda v, order: jnp.zeros_like(v).at[order].set(v))
  values = put(values, laid_out.order).reshape(tree.tokens.shape)
  return masked.fill(values, tree.action_mask)


def window_mean(values: chex.Array, group: chex.Array, size: int
                ) -> types.Array:
  """Returns the mean over a token and the next ones of its group.

  Args:
    values: [B, L] float32.
    group: [B, L] int32, equal and contiguous within a group.
    size: tokens of a window; fewer where the group ends.
  """
  values, mask = _windows(values, group, size)
  return masked.mean(values, mask, axis=-1)


def window_sum(values: chex.Array, group: chex.Array, size: int
               ) -> types.Array:
  """Returns the sum over a token and the next ones; as `window_mean`."""
  values, mask = _windows(values, group, size)
  return masked.sum(values, mask, axis=-1)


def _windows(values, group, size):
  """Returns [B, L, size] values and which of them are the token's group's."""
  length = values.shape[-1]
  index = jnp.arange(length)[:, None] + jnp.arange(min(size, length))
  ahead = jnp.minimum(index, length - 1)
  mask = (index < length) & (group[:, ahead] == group[..., None])
  return values[:, ahead], mask


def discounted_to_end(values: chex.Array, group: chex.Array,
                      discount: float = 1.0) -> types.Array:
  """Returns y_i = x_i + discount y_{i+1} within every group, [B, L]."""
  same = group[:, 1:] == group[:, :-1]
  decay = jnp.pad(jnp.where(same, discount, 0.0), ((0, 0), (0, 1)))

  def join(later, earlier):
    return (later[0] * earlier[0], earlier[1] + earlier[0] * later[1])

  return jax.lax.associative_scan(
      join, (decay, jnp.asarray(values, jnp.float32)), reverse=True, axis=1)[1]


def one_on(values: chex.Array, group: chex.Array) -> types.Array:
  """Returns the value of the token before, 0 at the first of a group, [B, L].
  """
  before = jnp.pad(values[:, :-1], ((0, 0), (1, 0)))
  same = jnp.pad(group[:, 1:] == group[:, :-1], ((0, 0), (1, 0)))
  return masked.fill(before, same)


def sums(values: chex.Array, number: chex.Array) -> types.Array:
  """Returns at every token the sum over its trajectory, [B, L]."""
  return _reduce(values, number, 'add', 0)


def maxima(values: chex.Array, number: chex.Array) -> types.Array:
  """Returns at every token the largest value of its trajectory, [B, L]."""
  values = jnp.asarray(values, jnp.float32)
  return _reduce(values, number, 'max', -jnp.inf)


def _reduce(values, number, reduction, start):
  def single(values, number):
    # A trajectory's number is a node's index, of which there are at most L.
    room = jnp.full(number.shape[0] + 1, start, values.dtype)
    return getattr(room.at[number], reduction)(values)[number]
  return jax.vmap(single)(values, number)


def whiten(values: chex.Array, number: chex.Array) -> types.Array:
  """Returns z-scores within every trajectory, and 0 where all are equal.

  z = (x - mean) / std, the population's, in two passes.

  Args:
    values: [B, L] float32.
    number: [B, L] int32, as in `Trajectories`.
  """
  size = sums(jnp.ones_like(values), number)
  centred = values - masked.divide(sums(values, number), size)
  variance = masked.divide(sums(jnp.square(centred), number), size)
  z = masked.divide(centred, jnp.sqrt(variance))
  # Told by the extremes: the mean of equal numbers is not exactly theirs.
  return jnp.where(is_constant(values, number), 0, z)


def is_constant(values: chex.Array, number: chex.Array) -> types.Array:
  """Returns where all values of the token's trajectory are equal, [B, L]."""
  return maxima(values, number) == -maxima(-values, number)


def rank(scores: chex.Array, group: chex.Array,
         tie_noise: chex.Array | None = None) -> types.Array:
  """Returns how many of a group come before one, the best first.

  Args:
    scores: [B, L] float32, the largest is the best.
    group: [B, L] int32.
    tie_noise: [B, L] float32; of equal scores the larger wins, then the first.
      None for zeros.

  Returns:
    [B, L] int32, 0 for the best of a group.
  """
  def single(scores, group, noise):
    order = jnp.lexsort((-noise, -scores, group))
    group = group[order]
    index = jnp.arange(group.shape[0])
    is_first = jnp.pad(group[1:] != group[:-1], (1, 0), constant_values=True)
    start = jax.lax.cummax(jnp.where(is_first, index, 0))
    return jnp.zeros_like(index).at[order].set(index - start)
  if tie_noise is None:
    tie_noise = jnp.zeros_like(scores)
  return jax.vmap(single)(scores, group, tie_noise)


def first_on_path(values: chex.Array, tree: tree_lib.Tree) -> types.Array:
  """Returns the value at the first action token of every node's path.

  Args:
    values: [B, N, T] float32.
    tree: [B, N, T].

  Returns:
    [B, N] float32; 0 where neither the node nor one above it has an action.
  """
  index = tree_lib.first_action_index(tree)
  own = jnp.take_along_axis(
      values, jnp.maximum(index, 0)[..., None], axis=-1)[..., 0]
  found = index >= 0
  return walks.accumulate_down(
      _above_if_found, (masked.fill(own, found), found), tree.parents)[0]


def _above_if_found(above, own):
  value = jnp.where(above[1], above[0], own[0])
  return value, above[1] | own[1]

"""Forks by depth alone: a way to branch, and how deep a token lies."""

import chex
import jax.numpy as jnp

from bpo_jax import checks
from bpo_jax import tree as tree_lib
from bpo_jax import types


@chex.dataclass(frozen=True, mappable_dataclass=False)
class Design:
  """A way to branch first trajectories, fixed before a tree is grown.

  Attributes:
    num_siblings: K, forks and a trajectory's own continuation; 1 for no forks.
    bins: bins of depth with a branch point on every first trajectory.
    costs: what one fork from a bin on costs, in episodes; 1 where nothing is
      known, 0 where no episode comes.
    depth_width: actions in a bin of depth.
  """

  num_siblings: chex.Array  # [] int32
  bins: chex.Array  # [D] bool
  costs: chex.Array  # [D] float32
  depth_width: chex.Array  # [] int32


def unknown(num_depths: int = 8, depth_width: int = 4) -> Design:
  """Returns the design of a run that knows nothing yet: no branch points.

  Args:
    num_depths: D, bins of depth.
    depth_width: actions in a bin of depth.

  Raises:
    ValueError: if a size is out of range.
  """
  checks.whole('num_depths', num_depths)
  checks.whole('depth_width', depth_width)
  return Design(
      num_siblings=jnp.asarray(1, jnp.int32), bins=jnp.zeros(num_depths, bool),
      costs=jnp.ones(num_depths), depth_width=jnp.asarray(
          depth_width, jnp.int32))


def actions_before(tree: tree_lib.Tree) -> types.Array:
  """Returns the actions of a path before that of each token, [B, N, T] int32.

  Tokens of an action have as many actions before them as its first one.
  """
  starts = tree_lib.action_starts(tree)
  begun = jnp.cumsum(starts, axis=-1, dtype=jnp.int32)
  return jnp.maximum(actions_above(tree)[..., None] + begun - 1, 0)


def actions_above(tree: tree_lib.Tree) -> types.Array:
  """Returns the actions of a path before each node, [B, N] int32."""
  return tree_lib.actions_through(tree) - tree_lib.num_actions(tree)

"""Branch policies: a tree in, a `BranchPlan` out.

A decision is the first token of an action. Forking there keeps everything
before that token, so a decision at the start of a node lies on its parent's end
and is counted once, for the parent's first child.

Both policies take decisions one at a time, best first, and strike out what lies
too close on the same path. They differ in what is best: the most uncertain
decision of a finished trajectory, or the first one above a threshold.
"""

import chex
import jax
import jax.numpy as jnp

from bpo_jax import tree as tree_lib
from bpo_jax import types
from bpo_jax import walks

BranchPlan = types.BranchPlan

STATISTICS = ('first_token', 'action')


def top_entropy(tree: tree_lib.Tree, *, num_branch_points: int = 4,
                num_forks: int = 3, min_spacing: int = 64,
                statistic: str = 'first_token', backbones_only: bool = True,
                key: chex.PRNGKey | None = None) -> types.BranchPlan:
  """Forks at the most uncertain decisions, seen after the fact.

  Greedy: the decision of the largest entropy, then the largest among those at
  least `min_spacing` tokens away along every path through a chosen one. Whether
  a decision is chosen depends on what came after it, so the action taken there
  is no fresh draw and an estimator that treats it as one is biased.

  Args:
    tree: [B, N, T].
    num_branch_points: M, at most so many branch points a tree.
    num_forks: forks at each, K - 1 for sibling groups of K.
    min_spacing: tokens along a path between branch points.
    statistic: 'first_token', the entropy of an action's first token, or
      'action', the sum over its tokens, an unbiased estimate of the entropy of
      the whole action. Nats.
    backbones_only: whether only decisions of first trajectories are eligible.
    key: a typed key to break ties at random; None for the first in order.

  Returns:
    BranchPlan [B, M] in the order of choice.

  Raises:
    ValueError: if the statistic is unknown.

  References:
    Branching Policy Optimization (arXiv 2607.14171), restated.
  """
  decisions = _decisions(tree, statistic)
  eligible = decisions.mask
  if backbones_only:
    eligible = eligible & (tree.birth == 0)[..., None]
  noise = jnp.zeros(eligible.shape) if key is None else _noise(eligible, key)
  chosen = jax.vmap(_greedy, in_axes=(0, 0, 0, 0, None, None, None))(
      decisions, eligible, decisions.entropies, noise,
      num_branch_points, min_spacing, num_branch_points)
  return _plan(chosen, eligible.shape, num_forks)


def causal_threshold(tree: tree_lib.Tree, threshold: chex.Numeric, *,
                     num_branch_points: int = 4, num_forks: int = 1,
                     max_per_path: int | None = None, min_spacing: int = 64,
                     statistic: str = 'first_token',
                     backbones_only: bool = True,
                     open_mask: chex.Array | None = None) -> types.BranchPlan:
  """Forks at the first decisions whose entropy exceeds a threshold.

  Decisions are taken in node and token order, each if its entropy exceeds the
  threshold and it keeps its distance from those taken before it on its path.
  With the threshold fixed before the tree is grown, what happens after a
  decision has no say in whether it is taken: it is a stopping time, and the
  action taken there is as fresh a draw as its forks.

  Args:
    tree: [B, N, T].
    threshold: nats, scalar or [B].
    num_branch_points: M, at most so many branch points a tree.
    num_forks: forks at each.
    max_per_path: at most so many branch points on one path; None for M. With
      several backbones, M / backbones gives each the same chance.
    min_spacing: tokens along a path between branch points.
    statistic: 'first_token' is causal; 'action' looks at the action itself and
      is not.
    backbones_only: whether only decisions of first trajectories are eligible.
    open_mask: [B, N] bool, nodes before whose actions the outcome is still
      open, told from the prefix alone; None for all.

  Returns:
    BranchPlan [B, M] in node and token order.

  Raises:
    ValueError: if the statistic is unknown.
  """
  decisions = _decisions(tree, statistic)
  eligible = decisions.mask & (
      decisions.entropies > jnp.reshape(jnp.asarray(threshold), (-1, 1, 1)))
  if backbones_only:
    eligible = eligible & (tree.birth == 0)[..., None]
  if open_mask is not None:
    eligible = eligible & jnp.asarray(open_mask)[..., None]
  flat = jnp.zeros(eligible.shape)
  cap = num_branch_points if max_per_path is None else max_per_path
  chosen = jax.vmap(_greedy, in_axes=(0, 0, 0, 0, None, None, None))(
      decisions, eligible, flat, flat, num_branch_points, min_spacing, cap)
  return _plan(chosen, eligible.shape, num_forks)


@chex.dataclass(frozen=True, mappable_dataclass=False)
class _Decisions:
  """Where a policy may fork, and where that lies on the tree.

  Attributes:
    mask: decisions.
    entropies: nats, at decisions.
    position: tokens of the path before the decision.
    enter: depth-first rank of the node whose tokens end at the decision.
    end: one past the rank of that node's last descendant.
  """

  mask: chex.Array  # [B, N, T] bool
  entropies: chex.Array  # [B, N, T] float32
  position: chex.Array  # [B, N, T] int32
  enter: chex.Array  # [B, N, T] int32
  end: chex.Array  # [B, N, T] int32


def _decisions(tree, statistic):
  if statistic not in STATISTICS:
    raise ValueError(f'statistic: expected one of {", ".join(STATISTICS)}; '
                     f'got {statistic!r}')
  offset = jnp.arange(tree.tokens.shape[-1])
  first = tree_lib.is_first_child(tree)[..., None]
  mask = tree_lib.action_starts(tree) & ((offset > 0) | first)
  entropies = jnp.where(tree.action_mask, tree.entropies, 0)
  if statistic == 'action':
    entropies = _sum_to_end_of_action(entropies, tree.action_mask)
  enter, end = walks.preorder(tree.parents, tree.node_mask)

  def host(values):
    above = walks.at_parent(values, tree.parents)
    return jnp.where(offset > 0, values[..., None], above[..., None])

  return _Decisions(
      mask=mask, entropies=entropies, enter=host(enter), end=host(end),
      position=tree_lib.tokens_above(tree)[..., None] + offset)


def _sum_to_end_of_action(values, mask):
  """Returns the sum from every token to the end of its action, [B, N, T]."""
  def visit(carry, column):
    value, inside = column
    carry = jnp.where(inside, carry + value, 0)
    return carry, carry
  columns = jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), (values, mask))
  _, sums = jax.lax.scan(
      visit, jnp.zeros(values.shape[:-1]), columns, reverse=True)
  return jnp.moveaxis(sums, 0, -1)


def _noise(mask, key):
  """Returns uniform noise [B, N, T] that more padding does not change."""
  # A key for every token, from its own three indices alone.
  for size in mask.shape:
    fold_in = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    for _ in range(key.ndim):
      fold_in = jax.vmap(fold_in, in_axes=(0, None))
    key = fold_in(key, jnp.arange(size))
  return jax.vmap(jax.random.uniform)(key.ravel()).reshape(mask.shape)


def _greedy(decisions, eligible, scores, noise, num_slots, min_spacing, cap):
  """Takes the best decision that is left, `num_slots` times, in one tree.

  Args:
    decisions: `_Decisions` of [N, T] arrays.
    eligible: [N, T] bool.
    scores: [N, T] float32; the largest is the best.
    noise: [N, T] float32; the larger wins a tie, then the first in order.
    num_slots: M.
    min_spacing: tokens along a path.
    cap: most decisions on one path.

  Returns:
    [M] int32 indices into the flattened [N * T]; -1 for nothing left.
  """
  decisions, left, scores, noise = jax.tree.map(
      jnp.ravel, (decisions, eligible, scores, noise))

  def take(state, _):
    left, num_on_path = state
    best = jnp.max(jnp.where(left, scores, -jnp.inf))
    ties = left & (scores == best)
    index = jnp.argmax(jnp.where(ties, noise, -1.0))
    found = left[index]
    same_path = _on_same_path(decisions, index) & found
    gap = jnp.abs(decisions.position - decisions.position[index])
    num_on_path = num_on_path + same_path
    left = left & ~(same_path & (gap < min_spacing)) & (num_on_path < cap)
    left = left.at[index].set(False)
    return (left, num_on_path), jnp.where(found, index, -1)

  state = (left, jnp.zeros(left.shape, jnp.int32))
  return jax.lax.scan(take, state, length=num_slots)[1]


def _on_same_path(decisions, index):
  """Returns which decisions share a path with that of `index`, [N * T]."""
  enter, end = decisions.enter, decisions.end
  above = (enter <= enter[index]) & (enter[index] < end)
  below = (enter[index] <= enter) & (enter < end[index])
  return above | below


def _plan(chosen, shape, num_forks):
  used, num_tokens = chosen >= 0, shape[-1]
  return types.BranchPlan(
      node=jnp.where(used, chosen // num_tokens, types.UNUSED_SLOT),
      offset=jnp.where(used, chosen % num_tokens, 0),
      count=jnp.where(used, num_forks, 0).astype(jnp.int32))

"""Branch policies that spend M (K - 1) forks on a schedule of decisions.

All of them take decisions one at a time, best first, and strike out what lies
too close on the same path. They differ in what is best.
"""

import chex
import jax.numpy as jnp

from bpo_jax import checks
from bpo_jax import masked
from bpo_jax import tree as tree_lib
from bpo_jax import types
from bpo_jax import walks
from bpo_jax.branching import decisions as decisions_lib


def top_entropy(tree: tree_lib.Tree, *, num_branch_points: int = 4,
                num_forks: int = 3, min_spacing: int = 64,
                statistic: decisions_lib.Statistic = 'first_token',
                birth: chex.Numeric | None = 0,
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
    birth: the stage whose nodes are eligible, 0 for first trajectories; None
      for all.
    key: a typed key to break ties at random; None for the first in order.

  Returns:
    BranchPlan [B, M] in the order of choice.

  Raises:
    ValueError: if a size or the statistic is out of range.

  References:
    Branching Policy Optimization (arXiv 2607.14171), restated.
  """
  decisions = decisions_lib.find(tree, birth)
  scores = decisions_lib.entropies(tree, statistic)
  return decisions_lib.best(
      decisions, scores, num_branch_points, num_forks, min_spacing, key)


def lowest_entropy(tree: tree_lib.Tree, *, num_branch_points: int = 4,
                   num_forks: int = 3, min_spacing: int = 64,
                   statistic: decisions_lib.Statistic = 'first_token',
                   birth: chex.Numeric | None = 0,
                   key: chex.PRNGKey | None = None) -> types.BranchPlan:
  """Forks at the least uncertain decisions: the control of `top_entropy`.

  Args:
    tree: [B, N, T].
    num_branch_points: M, at most so many branch points a tree.
    num_forks: forks at each, K - 1 for sibling groups of K.
    min_spacing: tokens along a path between branch points.
    statistic: 'first_token', the entropy of an action's first token, or
      'action', the sum over its tokens, an unbiased estimate of the entropy of
      the whole action. Nats.
    birth: the stage whose nodes are eligible, 0 for first trajectories; None
      for all.
    key: a typed key to break ties at random; None for the first in order.

  Returns:
    BranchPlan [B, M] in the order of choice.

  Raises:
    ValueError: if a size or the statistic is out of range.

  References:
    Branching Policy Optimization (arXiv 2607.14171), schedules, restated.
  """
  decisions = decisions_lib.find(tree, birth)
  scores = -decisions_lib.entropies(tree, statistic)
  return decisions_lib.best(
      decisions, scores, num_branch_points, num_forks, min_spacing, key)


def random(tree: tree_lib.Tree, *, num_branch_points: int = 4,
           num_forks: int = 3, min_spacing: int = 64,
           birth: chex.Numeric | None = 0,
           key: chex.PRNGKey | None = None) -> types.BranchPlan:
  """Forks at decisions drawn at random, each as likely as another.

  Args:
    tree: [B, N, T].
    num_branch_points: M, at most so many branch points a tree.
    num_forks: forks at each, K - 1 for sibling groups of K.
    min_spacing: tokens along a path between branch points.
    birth: the stage whose nodes are eligible, 0 for first trajectories; None
      for all.
    key: a typed key.

  Returns:
    BranchPlan [B, M] in the order of choice.

  Raises:
    ValueError: if a size is out of range or there is no key.

  References:
    Branching Policy Optimization (arXiv 2607.14171), schedules, restated.
  """
  checks.one_key('random', key)
  decisions = decisions_lib.find(tree, birth)
  scores = decisions_lib.noise(decisions.mask.shape, key)
  return decisions_lib.best(
      decisions, scores, num_branch_points, num_forks, min_spacing)


def equally_spaced(tree: tree_lib.Tree, *, num_branch_points: int = 4,
                   num_forks: int = 3, birth: chex.Numeric | None = 0
                   ) -> types.BranchPlan:
  """Forks at decisions at equal distances along every first trajectory.

  The M branch points go round the F trajectories that have a decision, so that
  each gets M / F of them, the first M mod F one more. Of the m of a trajectory,
  whose action tokens begin at x_0 and which ends at x_1, the i-th is the
  decision nearest to x_0 + (x_1 - x_0) i / (m + 1) that is left, the earlier
  one of two; i = 0 would be a fresh rollout.

  Args:
    tree: [B, N, T].
    num_branch_points: M, at most so many branch points a tree.
    num_forks: forks at each, K - 1 for sibling groups of K.
    birth: the stage whose nodes are eligible, 0 for first trajectories; None
      for all.

  Returns:
    BranchPlan [B, M]: the first of every trajectory, then the second ones.

  Raises:
    ValueError: if a size is out of range.

  References:
    Branching Policy Optimization (arXiv 2607.14171), schedules; the distances
    are read.
  """
  decisions_lib.check_sizes(num_branch_points, num_forks)
  decisions = decisions_lib.find(tree, birth)
  span = _span(tree)
  number = decisions_lib.trajectory(tree)
  has_one = _at_head(jnp.any(decisions.mask, axis=-1), number, 'max', False)
  arrays = _per_place(tree, (
      decisions.mask, decisions.position, number, *span))
  chosen = decisions_lib.allocate(
      _nearness(num_branch_points), (*arrays, has_one), num_branch_points,
      num_branch_points, num_steps=number.shape[-1] * arrays[0].shape[-1])
  return decisions_lib.merged_plan(
      chosen, num_forks, num_branch_points * num_forks, tree.tokens.shape[-1])


def _nearness(num_branch_points):
  """Returns the score of `allocate` for decisions at equal distances."""
  def score(slot, forks, arrays):
    mask, position, number, start, stop, has_one = arrays
    size = jnp.maximum(jnp.sum(has_one), 1)
    turn, index = slot % size, slot // size + 1
    share = num_branch_points // size + (turn < num_branch_points % size)
    mine = jnp.cumsum(has_one)[number] - 1 == turn
    # All times m + 1, so that it is exact.
    target = start * (share + 1) + (stop - start) * index
    away = jnp.abs(position * (share + 1) - target)
    free = mask & mine & (forks == 0)
    return jnp.where(free, -away.astype(jnp.float32), -jnp.inf)
  return score


def _span(tree):
  """Returns where a node's trajectory has its first action token, and its end.

  Both [B, N] int32, in tokens of the path.
  """
  number = decisions_lib.trajectory(tree)
  above = tree_lib.tokens_above(tree)
  first = tree_lib.first_action_index(tree)
  far = jnp.iinfo(jnp.int32).max
  first = jnp.where(first >= 0, above + first, far)
  start = _at_head(first, number, 'min', far)
  stop = _at_head(above + tree_lib.num_tokens(tree), number, 'max', 0)
  return tuple(
      jnp.take_along_axis(x, number, axis=-1) for x in (start, stop))


def _at_head(values, number, reduction, start):
  """Reduces [B, N] values to the heads of their trajectories."""
  def single(values, number):
    return getattr(jnp.full_like(values, start).at[number], reduction)(values)
  return walks.per_tree(single, number.ndim)(values, number)


def _per_place(tree, arrays):
  """Returns [B, N] and [B, N, T] arrays as [B, N * T]."""
  shape = tree.tokens.shape
  wide = lambda x: x if x.ndim == 3 else jnp.broadcast_to(x[..., None], shape)
  return tuple(wide(x).reshape(shape[0], -1) for x in arrays)


def oracle_value_gap(tree: tree_lib.Tree, *, values: chex.Array | None = None,
                     num_branch_points: int = 4, num_forks: int = 3,
                     min_spacing: int = 64, birth: chex.Numeric | None = 0,
                     key: chex.PRNGKey | None = None) -> types.BranchPlan:
  """Forks where an action changes the true value most: an upper bound.

  The gap of the decision at state s is max_c |r(c) + V(c) - V(s)| over the
  nodes c that follow s: with V(s) = E[r + V'], how far off its mean a return
  can be pushed by what is drawn there. Decisions inside a node have no value
  recorded on either side and are not eligible.

  Args:
    tree: [B, N, T].
    values: [B, N] float32 reward units, the true value (expected rewards still
      to come) of the state at the end of every node; 0 where the episode ended.
    num_branch_points: M, at most so many branch points a tree.
    num_forks: forks at each, K - 1 for sibling groups of K.
    min_spacing: tokens along a path between branch points.
    birth: the stage whose nodes are eligible, 0 for first trajectories; None
      for all.
    key: a typed key to break ties at random; None for the first in order.

  Returns:
    BranchPlan [B, M] in the order of choice.

  Raises:
    ValueError: if a size is out of range, or there are no values or of another
      shape.

  References:
    Branching Policy Optimization (arXiv 2607.14171), schedules; the gap is
    read.
  """
  checks.given('values', values, 'oracle_value_gap',
               'the true value of the state at the end of every node, [B, N]')
  decisions = decisions_lib.find(tree, birth)
  checks.shape('values', values, tree.node_mask.shape)
  at_start = jnp.arange(tree.tokens.shape[-1]) == 0
  values = masked.fill(jnp.asarray(values), tree.node_mask)
  rewards = masked.fill(jnp.asarray(tree.rewards), tree.node_mask)
  change = jnp.abs(rewards + values - walks.at_parent(values, tree.parents))
  gap = walks.max_of_children(change, tree.parents, tree.node_mask)
  scores = walks.at_parent(gap, tree.parents)[..., None]
  return decisions_lib.best(
      decisions.replace(mask=decisions.mask & at_start),
      jnp.broadcast_to(scores, decisions.mask.shape), num_branch_points,
      num_forks, min_spacing, key)


def causal_threshold(tree: tree_lib.Tree, threshold: chex.Numeric, *,
                     num_branch_points: int = 4, num_forks: int = 1,
                     max_per_path: int | None = None, min_spacing: int = 64,
                     statistic: decisions_lib.Statistic = 'first_token',
                     birth: chex.Numeric | None = 0,
                     open_mask: chex.Array | None = None) -> types.BranchPlan:
  """Forks at the first decisions whose entropy exceeds a threshold.

  Decisions are taken in node and token order, each if its entropy exceeds the
  threshold and it keeps its distance from those taken before it on its path.
  With the threshold fixed before the tree is grown, what happens after a
  decision has no say in whether it is taken: it is a stopping time, and the
  action taken there is as fresh a draw as its forks.

  Args:
    tree: [B, N, T].
    threshold: nats, scalar or [B]; no entropy exceeds NaN, which is refused
      where it is seen, outside of jit.
    num_branch_points: M, at most so many branch points a tree.
    num_forks: forks at each.
    max_per_path: at most so many branch points on one path; None for M. With
      several backbones, M / backbones gives each the same chance.
    min_spacing: tokens along a path between branch points.
    statistic: 'first_token' is causal; 'action' looks at the action itself and
      is not.
    birth: the stage whose nodes are eligible, 0 for first trajectories; None
      for all.
    open_mask: [B, N] bool, nodes before whose actions the outcome is still
      open, told from the prefix alone; None for all.

  Returns:
    BranchPlan [B, M] in node and token order.

  Raises:
    ValueError: if a size or the statistic is out of range, the threshold is
      NaN, or it or the mask is of another shape.
  """
  decisions_lib.check_sizes(num_branch_points, num_forks)
  checks.not_nan('threshold', threshold)
  decisions = decisions_lib.find(tree, birth)
  threshold = decisions_lib.one_or_per_tree('threshold', threshold, tree)
  entropies = decisions_lib.entropies(tree, statistic)
  mask = decisions.mask & (entropies > threshold[..., None])
  if open_mask is not None:
    checks.shape('open_mask', open_mask, tree.node_mask.shape)
    mask = mask & jnp.asarray(open_mask)[..., None]
  chosen = decisions_lib.greedy(
      decisions.replace(mask=mask), jnp.zeros(mask.shape), num_branch_points,
      min_spacing, max_per_path)
  return decisions_lib.plan(
      chosen, num_forks, num_branch_points * num_forks, mask.shape[-1])

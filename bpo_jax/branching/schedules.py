"""Branch policies that spend M (K - 1) forks on a schedule of decisions.

All of them take decisions one at a time, best first, and strike out what lies
too close on the same path. They differ in what is best.
"""

import chex
import jax.numpy as jnp

from bpo_jax import tree as tree_lib
from bpo_jax import types
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
  return _best(decisions, scores, num_branch_points, num_forks, min_spacing, key)


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
    threshold: nats, scalar or [B].
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
    ValueError: if a size or the statistic is out of range.
  """
  decisions_lib.check_sizes(num_branch_points, num_forks)
  decisions = decisions_lib.find(tree, birth)
  entropies = decisions_lib.entropies(tree, statistic)
  mask = decisions.mask & (
      entropies > jnp.reshape(jnp.asarray(threshold), (-1, 1, 1)))
  if open_mask is not None:
    mask = mask & jnp.asarray(open_mask)[..., None]
  chosen = decisions_lib.greedy(
      decisions.replace(mask=mask), jnp.zeros(mask.shape), num_branch_points,
      min_spacing, max_per_path)
  return decisions_lib.plan(
      chosen, num_forks, num_branch_points * num_forks, mask.shape[-1])


def _best(decisions, scores, num_branch_points, num_forks, min_spacing, key):
  """Returns the plan that forks at the decisions of the largest scores."""
  decisions_lib.check_sizes(num_branch_points, num_forks)
  chosen = decisions_lib.greedy(
      decisions, scores, num_branch_points, min_spacing,
      tie_noise=decisions_lib.noise(scores.shape, key))
  return decisions_lib.plan(
      chosen, num_forks, num_branch_points * num_forks, scores.shape[-1])

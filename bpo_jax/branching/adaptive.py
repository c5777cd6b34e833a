"""Forks where the outcome is still open and little is left to pay for.

Entropy says where actions differ, not where outcomes do. A predictor that was
fitted on earlier updates says the latter: V(1 - V), the variance of success
still to come, per action still to be taken.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from bpo_jax import checks
from bpo_jax import masked
from bpo_jax import tree as tree_lib
from bpo_jax import types
from bpo_jax import walks
from bpo_jax.branching import decisions as decisions_lib

_NUM_PRICES = 8  # The other trees are asked at min_gain times 1, 2, 4, ..


def adaptive(tree: tree_lib.Tree, *, values: chex.Array | None = None,
             remaining_costs: chex.Array | None = None, num_rollouts: int = 16,
             num_branch_points: int = 8, num_forks: int = 1,
             min_gain: float = 1.0, min_spacing: int = 1,
             max_per_path: int | None = None,
             birth: chex.Numeric | None = 0,
             prices: chex.Array | None = None,
             num_fresh: chex.Array | None = None) -> types.BranchPlan:
  """Spends a fixed budget where it is predicted to remove most variance.

  Decisions are taken in node and token order, each if its `predicted_gain`
  exceeds the tree's price and the forks there can still be paid for. The rest
  of the budget goes to fresh rollouts, forks before the root's first action.

  What keeps it unbiased. Draws have an order, that of the nodes. An estimator
  with split weights is unbiased if the number of forks at each state is fixed
  by what was drawn before that state's first action: weights are then known in
  advance, a subtree's split mean has the expectation of the return given its
  state, and later draws of different subtrees are uncorrelated, so that
  baselines stay independent of the action. Here
  * a gain looks at predictions for the state, which are from its prefix alone
    and from earlier updates;
  * what was spent before a decision depends on decisions before it;
  * the price and the number of fresh rollouts must be known at the root. The
    budget that a tree turns out to leave over is known only after its first
    trajectories, and their weights, 1 / (number of the root's children), would
    depend on how they went. So both are set by the OTHER trees of the batch,
    which are independent of this one: the least price at which these would on
    average spend no more than the budget, and what they then leave over. A tree
    that still has something left leaves it unspent.

  Args:
    tree: [B, N, T].
    values: [B, N] predicted probability of success from the state at the END
      of each node; never from returns of these trees.
    remaining_costs: [B, N] predicted actions from there to the end of the
      episode; None for a whole rollout each, wherever the fork starts.
    num_rollouts: budget of a tree in whole rollouts, the leaves that are there
      included; a fork counts as the part of a rollout that it runs.
    num_branch_points: M, at most so many branch points a tree.
    num_forks: forks at each, K - 1 for sibling groups of K.
    min_gain: fork only where the predicted saving per action is more than so
      many times that of a fresh rollout.
    min_spacing: tokens along a path between branch points.
    max_per_path: at most so many branch points on one path; None for M.
    birth: the stage whose nodes are eligible, 0 for first trajectories; None
      for all.
    prices: scalar or [B], the gain to exceed in place of what the other trees
      say; from earlier updates.
    num_fresh: int32, scalar or [B], fresh rollouts in place of what the other
      trees say; from earlier updates. Never more than the budget.

  Returns:
    BranchPlan [B, M + 1], branch points in node and token order, the fresh
    rollouts last; `unspent` in whole rollouts, rounded down. Without a
    prediction, V being 0, everything goes to fresh rollouts.

  Raises:
    ValueError: if a size is out of range, or `values` is not given.

  References:
    Ours. The idea to spend where mixed outcomes are likely is TRACE's (arXiv
    2606.11119).
  """
  decisions_lib.check_sizes(num_branch_points, num_forks)
  checks.at_least('num_rollouts', num_rollouts, 1)
  _check_shape('values', values, tree)
  if remaining_costs is None:
    remaining_costs = jnp.ones_like(values)
  _check_shape('remaining_costs', remaining_costs, tree)
  gains, parts = _gains_and_parts(tree, values, remaining_costs, num_forks)
  decisions = decisions_lib.find(tree, birth)

  def choose(price):
    """Returns decisions [B, M] above a price, and what each would cost."""
    mask = decisions.mask & (gains > price[:, None])[..., None]
    chosen = decisions_lib.greedy(
        decisions.replace(mask=mask), jnp.zeros(mask.shape), num_branch_points,
        min_spacing, max_per_path)
    node = jnp.maximum(chosen, 0) // mask.shape[-1]
    each = num_forks * jnp.take_along_axis(parts, node, axis=-1)
    return chosen, masked.fill(each, chosen >= 0)

  leaves = tree_lib.num_leaves(tree)[:, 0]
  real = jnp.asarray(tree.node_mask)[:, 0]
  budget = masked.fill(jnp.maximum(num_rollouts - leaves, 0), real)
  if prices is None or num_fresh is None:
    asked, spare = _from_the_others(choose, budget, real, min_gain)
    prices = asked if prices is None else prices
    num_fresh = spare if num_fresh is None else num_fresh
  fresh = decisions_lib.fresh(tree)
  num_fresh = jnp.where(fresh >= 0, jnp.minimum(num_fresh, budget), 0)
  chosen, costs = choose(jnp.broadcast_to(jnp.asarray(prices), budget.shape))
  left = (budget - num_fresh).astype(jnp.float32)
  paid = _within(costs, left)
  left = left - jnp.sum(masked.fill(costs, paid), axis=-1)
  chosen = jnp.concatenate([
      jnp.where(paid, chosen, -1),
      jnp.where(num_fresh > 0, fresh, -1)[:, None]], axis=-1)
  counts = jnp.concatenate([
      jnp.full(paid.shape, num_forks), num_fresh[:, None]], axis=-1)
  plan = decisions_lib.plan(chosen, counts, budget, tree.tokens.shape[-1])
  return plan.replace(unspent=_floor(left))


def predicted_gain(values: chex.Array, parts: chex.Array,
                   root_values: chex.Array, num_forks: int) -> types.Array:
  """Returns what a fork saves per action over what a fresh rollout saves.

  With v = V(1 - V) the variance of success given the state, l the part of an
  episode after it and m = K - 1 forks: the actions after the state get an
  advantage of variance v K / (K - 1) in K copies of weight 1 / K, so that v
  becomes v / m; those before it see the mean of K returns, so that v becomes
  v / K. A fresh rollout dilutes a whole path's variance v_0 at the cost of 1:

    gain = v [l (1 - 1/m) + (1 - l) m / (m + 1)] / (m l) / v_0.

  What the prefix has decided already is left out: it is removed by a better
  baseline without any fork.

  Args:
    values: V at the state, in [0, 1].
    parts: l, in (0, 1].
    root_values: V at the root.
    num_forks: m.

  Returns:
    The gain, float32; 0 where nothing is open, or no cost is predicted.

  References:
    Ours; the variances are theorem 4.3's of Branching Policy Optimization
    (arXiv 2607.14171).
  """
  m = num_forks
  after = parts * (1 - 1 / m)
  before = jnp.maximum(1 - parts, 0) * m / (m + 1)
  saved = _open(values) * (after + before)
  return masked.divide(saved, m * parts * _open(root_values))


def _open(values):
  """Returns V(1 - V), the variance of success."""
  values = jnp.clip(values, 0, 1)
  return values * (1 - values)


def _check_shape(name, value, tree):
  checks.given(name, value, 'adaptive', 'an array [B, N]')
  if np.shape(value) != np.shape(tree.parents):
    raise ValueError(f'{name}: expected one a node, shape '
                     f'{np.shape(tree.parents)}, got {np.shape(value)}')


def _gains_and_parts(tree, values, remaining_costs, num_forks):
  """Returns the gain and the cost of a fork before each node's actions.

  Both are those of the state at the parent's end: what a node shows before its
  own actions is later than that, but its own end would be too late.
  """
  values, costs = (
      masked.fill(jnp.asarray(x, jnp.float32), tree.node_mask)
      for x in (values, remaining_costs))
  parts = jnp.maximum(masked.divide(costs, costs[:, :1]), 0)
  gains = predicted_gain(values, parts, values[:, :1], num_forks)
  return (walks.at_parent(x, tree.parents) for x in (gains, parts))


def _from_the_others(choose, budget, real, min_gain):
  """Returns the price and the number of fresh rollouts of every tree, [B]."""
  levels = min_gain * 2.0 ** jnp.arange(_NUM_PRICES)
  demand = jax.lax.map(
      lambda price: jnp.sum(
          choose(jnp.full(budget.shape, price))[1], axis=-1), levels)  # [P, B]
  dear = _mean_of_others(demand, real) > budget
  # Demand need not fall with the price where slots are few: the first to fit.
  level = jnp.minimum(
      jnp.sum(jnp.cumprod(dear, axis=0), axis=0), _NUM_PRICES - 1)
  spent = _mean_of_others(jnp.minimum(demand, budget), real)
  spent = jnp.take_along_axis(spent, level[None], axis=0)[0]
  alone = jnp.sum(real) < 2
  return levels[level], jnp.where(alone, 0, _floor(budget - spent))


def _mean_of_others(values, real):
  """Returns the mean over the other real trees, [P, B] like `values`."""
  values = masked.fill(values, real)
  others = jnp.sum(values, axis=-1, keepdims=True) - values
  return others / jnp.maximum(jnp.sum(real) - real, 1)


def _within(costs, budget):
  """Returns which of costs [B, M] are paid before the budget is exceeded."""
  return jnp.cumsum(costs, axis=-1) <= budget[:, None] * (1 + 1e-6)


def _floor(rollouts):
  """Returns whole rollouts, int32; a rounding error is not one less."""
  return jnp.floor(jnp.maximum(rollouts, 0) + 1e-4).astype(jnp.int32)

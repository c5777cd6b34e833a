"""Credit of whole paths refined within them: by step, or by token.

A step is a node with action tokens: one action, what was observed after it and
what it earned. A fork inside an action makes two steps of it. A node that paths
share has the mean of the paths' credit, and the step's own as it is.
"""

import math
from typing import Literal

import chex
import jax.numpy as jnp

from bpo_jax import checks
from bpo_jax import masked
from bpo_jax import returns
from bpo_jax import siblings
from bpo_jax import tree as tree_lib
from bpo_jax import types
from bpo_jax import walks
from bpo_jax.advantages import common
from bpo_jax.advantages import critic
from bpo_jax.advantages import group_relative

Episode = Literal['grpo', 'rloo']


def gigpo(tree: tree_lib.Tree, *, omega: float = 1.0, discount: float = 0.95,
          scale: group_relative.Scale = 'std',
          epsilon: float = group_relative.EPSILON,
          path_weighting: common.PathWeighting = 'token') -> types.Credit:
  """Group-in-group: whole paths, and steps from one and the same observation.

  A = A_E + omega A_S. A_E compares the returns of the leaves, one vote a leaf.
  A_S compares G_i, the discounted return from step i on, with those of all
  steps of the tree taken in a state of equal anchor, a step that several paths
  share counting once: (G_i - mean(G)) / (std(G) + epsilon). Returns are
  discounted first and normalised then. A step whose state is like no other, or
  of unknown anchor, gets A_S = 0.

  Args:
    tree: [B, N, T]; `anchor` is that of the observation a node ends with, so a
      step is taken in its parent's.
    omega: what a step's own advantage counts beside the path's.
    discount: factor on all that comes later, per step.
    scale: 'std' divides by the standard deviation of the group, 'none' does
      not, for the paths' groups and the steps' alike.
    epsilon: added to the standard deviation; reward units.
    path_weighting: 'token', every token of a path weighs 1, or 'sequence', it
      weighs 1 / (number of action tokens of the path).

  Returns:
    Credit; a step that several paths share has the mean of their A_E, and in
    G_i the mean of what follows on each.

  Raises:
    ValueError: if an option is unknown.

  References:
    Feng et al. 2025, Group-in-Group Policy Optimization (arXiv 2505.10978).
    Exact where the tree branches at its root alone; shared steps are read.
  """
  checks.between('omega', omega, -math.inf)
  checks.between('discount', discount, 0, 1)
  episode = group_relative.standardised(tree, scale, epsilon)
  groups, mask = _same_anchor(tree)
  deviation = _return_deviation(tree, discount, groups, mask)
  step = _standardised(deviation, groups, mask, scale, epsilon)
  return _with_steps(tree, episode, omega * step, path_weighting)


def istar(tree: tree_lib.Tree, *, implicit_rewards: chex.Array | None = None,
          alpha: float = 1.0, episode: Episode = 'grpo',
          epsilon: float = group_relative.EPSILON,
          path_weighting: common.PathWeighting = 'token') -> types.Credit:
  """Implicit step rewards: whole paths, and what a reward model adds a step.

  A = A_E + alpha A_S, A_S(i) = (r_i - mean(r)) / (std(r) + epsilon) over all
  steps of the tree, r_i = sum over the action's tokens of
  beta log(pi_phi / pi_old). No discounted sum: r_i speaks of its step alone.

  Args:
    tree: [B, N, T].
    implicit_rewards: [B, N, T] float32, nats times beta; beta log(pi_phi /
      pi_old) of each action token, not read elsewhere.
    alpha: what a step's own advantage counts beside the path's.
    episode: what compares whole paths: 'grpo', mean and standard deviation, or
      'rloo', the mean of the others.
    epsilon: added to the standard deviation; reward units.
    path_weighting: 'token', every token of a path weighs 1, or 'sequence', it
      weighs 1 / (number of action tokens of the path).

  Returns:
    Credit; a step that several paths share counts once among the steps.

  Raises:
    ValueError: if the implicit rewards are missing or of another shape, or an
      option is unknown.

  References:
    Agentic RL with Implicit Step Rewards, iStar (arXiv 2509.19199). Restated;
    that the steps of one task are normalised together, with n - 1 in the
    denominator of the variance, is read.
  """
  checks.one_of('episode', episode, Episode)
  checks.between('alpha', alpha, -math.inf)
  critic.check_per_token('implicit_rewards', implicit_rewards, tree, 'istar',
                         'beta log(pi_phi / pi_old) of each action token')
  paths = (group_relative.leave_one_out(tree) if episode == 'rloo'
           else group_relative.standardised(tree, 'std', epsilon))
  mask = _is_step(tree)
  rewards = masked.sum(jnp.asarray(implicit_rewards), tree.action_mask, axis=-1)
  everywhere = jnp.zeros_like(tree.parents)
  deviation = _deviation(rewards, everywhere, mask)
  step = _standardised(deviation, everywhere, mask, 'std', epsilon)
  return _with_steps(tree, paths, alpha * step, path_weighting)


def iapo(tree: tree_lib.Tree, *, entropy_share: float = 0.5,
         epsilon: float = group_relative.EPSILON,
         path_weighting: common.PathWeighting = 'token') -> types.Credit:
  """GRPO's advantage of a path, shared out over its tokens by their entropy.

  A_t = A w_t, w_t = 1 - s + s H_t / mean(H) with the mean over the action
  tokens of the path, s being `entropy_share`; w_t = 1 where mean(H) is 0.

  What holds on every path: w_t >= 0, so that no token's sign changes; w_t has
  mean 1, so that the path's total is GRPO's; w_t grows with H_t. What holds on
  a tree: the total over its tokens is GRPO's, as are the weights. Not so the
  sign at a token that several paths share: it has the mean of what they give
  it, and they may share out differently.

  Args:
    tree: [B, N, T].
    entropy_share: how much of a path's advantage goes by entropy, from 0, all
      tokens alike, to 1, a token of no entropy gets none.
    epsilon: added to the standard deviation; reward units.
    path_weighting: 'token', every token of a path weighs 1, or 'sequence', it
      weighs 1 / (number of action tokens of the path).

  Returns:
    Credit; shared tokens as in `grpo`.

  Raises:
    ValueError: if an option is unknown or out of range.

  References:
    IAPO (arXiv 2608.24588). Read: of the paper only the laws are public, that
    weights conserve the mass and the sign; this is the plainest such rule.
  """
  checks.between('entropy_share', entropy_share, 0, 1)
  advantages = group_relative.standardised(tree, 'std', epsilon)
  mask = jnp.asarray(tree.action_mask)
  entropies = jnp.maximum(masked.fill(jnp.asarray(tree.entropies), mask), 0)
  mean = _path_mean(entropies, mask, tree.parents)
  # A path without entropy shares out alike: all of it, and H_t is 0 there.
  alike = jnp.where(mean > 0, 1.0 - entropy_share, 1.0)
  flat, peaked = (common.path_credit(tree, x, path_weighting) for x in (
      alike * advantages, masked.divide(entropy_share * advantages, mean)))
  advantages = flat.advantages + peaked.advantages * entropies
  return common.credit(tree, advantages, flat.weights)


def _with_steps(tree, episode, step, path_weighting):
  """Returns the credit of A_E at leaves plus A_S at steps, [B, N] each."""
  credit = common.path_credit(tree, episode, path_weighting)
  advantages = credit.advantages + common.per_token(tree, step)
  return common.credit(tree, advantages, credit.weights)


def _is_step(tree):
  return tree.node_mask & jnp.any(tree.action_mask, axis=-1)


def _return_deviation(tree, discount, groups, mask):
  """Returns G of every step less the mean over its group, [B, N] float32.

  G(n) = r(n) + mean over the leaves below of discount G(c), without discount
  where the child c is no step. A return R common to all leaves would eat the
  digits, so it is kept apart: G = G' + R - R lost, G' being that of the rewards
  with R taken from every leaf's, and lost(n) the mean of 1 - discount^distance.
  """
  leaf = tree_lib.is_leaf(tree)
  first = jnp.argmax(leaf, axis=-1, keepdims=True)
  common_return = jnp.take_along_axis(
      returns.path_returns(tree), first, axis=-1)
  rewards = masked.fill(jnp.asarray(tree.rewards), tree.node_mask)
  rewards = jnp.where(leaf, rewards - common_return, rewards)
  is_step = _is_step(tree)
  factor = jnp.where(is_step, discount, 1.0)
  loss = jnp.where(is_step, 1.0 - discount, 0.0)
  votes = tree_lib.num_leaves(tree).astype(jnp.float32)

  def from_children(handed):
    carried = returns.backup(handed, votes, tree.parents, factor)
    return critic.mean_of_children(carried, votes, tree.parents)
  remaining, lost = (
      _deviation(x, groups, mask) for x in
      (rewards + from_children(factor * rewards), from_children(loss)))
  return remaining - common_return * lost


def _same_anchor(tree):
  """Returns a group index [B, N] for steps from equal anchors, and a mask."""
  state = walks.at_parent(tree.anchor, tree.parents, types.UNKNOWN_ANCHOR)
  mask = _is_step(tree) & (state != types.UNKNOWN_ANCHOR)
  # At N = 256 this is several times as fast as comparing all pairs.
  order = jnp.argsort(state, axis=-1)
  ranked = jnp.take_along_axis(state, order, axis=-1)
  is_new = jnp.diff(ranked, axis=-1, prepend=ranked[..., :1]) != 0
  groups = jnp.cumsum(is_new, axis=-1, dtype=jnp.int32)
  rank = jnp.argsort(order, axis=-1)
  return jnp.take_along_axis(groups, rank, axis=-1), mask


def _deviation(values, groups, mask):
  """Returns x - mean(x) within groups, [B, N]; 0 off the mask."""
  count = siblings.count(groups, mask)
  # x_k - LOO(k) keeps the digits; it is n / (n - 1) times x_k - mean.
  apart = siblings.leave_one_out_advantage(values, groups, mask)
  return apart * (count - 1) / jnp.maximum(count, 1)


def _standardised(deviation, groups, mask, scale, epsilon):
  """Returns (x - mean) / (std + epsilon) within groups, [B, N] float32.

  std with n - 1 in its denominator; 0 for a group of one and off the mask.
  """
  if scale == 'none':
    return deviation
  squares = siblings.group_sum(jnp.square(deviation), groups, mask)
  freedom = jnp.maximum(siblings.count(groups, mask) - 1, 1)
  return masked.over_spread(deviation, jnp.sqrt(squares / freedom), epsilon)


def _path_mean(values, mask, parents):
  """Returns the mean over all masked tokens down to each node, [B, N]."""
  total = walks.sum_above(masked.sum(values, mask, axis=-1), parents)
  return masked.divide(
      total, walks.sum_above(masked.count(mask, axis=-1), parents))

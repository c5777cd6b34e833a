"""Credit among siblings: BPO as published, and its unbiased relative."""

from typing import Literal

import chex
import jax
import jax.numpy as jnp

from bpo_jax import checks
from bpo_jax import masked
from bpo_jax import returns
from bpo_jax import siblings
from bpo_jax import tree as tree_lib
from bpo_jax import types
from bpo_jax import walks
from bpo_jax.advantages import common

PrefixCredit = Literal['none', 'nearest', 'mean', 'sum', 'all_rows']


def bpo(tree: tree_lib.Tree, *, lambda_: float = 0.95,
        prefix_credit: PrefixCredit = 'nearest', root_group: bool = True,
        node_weighting: common.NodeWeighting = 'uniform',
        node_values: returns.Aggregate = 'own',
        incumbent: common.Incumbent = 'keep') -> types.Credit:
  """Branching Policy Optimization: leave-one-out among siblings.

  A(s_t, a_k) = G_k - 1 / (K - 1) sum_{j != k} G_j, held by the whole of sibling
  k's continuation; no critic, no division by a standard deviation. The defaults
  are the paper's where it speaks. How several branch points combine on a prefix
  is not public; 'nearest' is our reading: on one backbone all of them compare
  the same return, so a sum would grow with the number of branch points and a
  mean would blur the one whose state is closest.

  Args:
    tree: [B, N, T].
    lambda_: factor on the prefix per action of distance to a branch point.
    prefix_credit: what a prefix token at distances d_1 < d_2 < .. from the
      branch points further down its backbone gets, A_j being the advantage of
      the backbone's own continuation at the j-th: 'none' 0; 'nearest'
      lambda^d_1 A_1; 'mean' or 'sum' over j of lambda^d_j A_j; 'all_rows' what
      it gets when every sibling's row carries lambda^d A_k, which is 0 because
      the advantages of a group sum to 0.
    root_group: whether the root's children are a sibling group, which makes
      several backbones each other's baseline and leaves no prefix.
    node_weighting: 'uniform' (the paper) or 'split' (the policy gradient).
    node_values: what stands for G_k: 'own', the return of the continuation
      drawn with sibling k (the paper), or the 'split_mean' or 'leaf_mean' of
      the leaves below it.
    incumbent: 'drop' takes what was there before the last forks of a state,
      from there to its next branch point, out of the loss; its return stays in
      the others' baseline. Where branch points are chosen with the whole
      backbone in sight, the backbone's own action is no fresh draw.

  Returns:
    Credit; 0 for a group of one or of equal returns. With 'uniform' every token
    weighs 1, with 'split' the leaves of a tree together; what an incumbent
    drops weighs 0.

  Raises:
    ValueError: if an option is unknown.

  References:
    Branching Policy Optimization, theorems 4.1 and 4.3 (arXiv 2607.14171).
  """
  checks.one_of('prefix_credit', prefix_credit, PrefixCredit)
  checks.between('lambda_', lambda_, 0, 1)
  values = returns.centred_values(tree, node_values)
  member = tree_lib.in_group(tree)
  if not root_group:
    member = member & (tree.parents != 0)
  local = siblings.leave_one_out_advantage(values, tree.parents, member)
  owner = walks.nearest_above(member, tree.parents)
  weights = _weights(tree, node_weighting, incumbent, owner)
  advantages = common.per_token(tree, common.take(local, owner))
  if prefix_credit not in ('none', 'all_rows'):
    prefix = _prefix_advantages(tree, local, member, lambda_, prefix_credit)
    advantages = jnp.where(owner[..., None] < 0, prefix, advantages)
  return common.credit(tree, advantages, weights)


def bpo_rb(tree: tree_lib.Tree, *, rho: float | chex.Array = 0.5,
           node_weighting: common.NodeWeighting = 'split',
           node_values: returns.Aggregate = 'split_mean',
           incumbent: common.Incumbent = 'keep') -> types.Credit:
  """Rao-Blackwellised BPO: means below, shrunk baselines, split weights.

  A(n) = V(n) - b(k), k the nearest group member at or above n, and
  b(k) = rho LOO(k) + (1 - rho) b(k'), k' the nearest member above k; the first
  group on a path has nothing above it and takes its LOO whole.

  Why it is unbiased. Split weights make the expected step of a tree that of one
  path. V(n), the split-weighted mean of the leaves below n, has the expectation
  of the return given the path to n. LOO(k) looks at k's siblings and b(k') at
  subtrees beside k', neither below k: given the state before k, both are
  independent of k's action and cost no bias, whatever rho, if rho was fixed
  before these returns were seen. This needs several backbones (else the prefix
  of the single one gets 0) and branch points chosen causally. From k to the
  next branch point all nodes have one child, so V(n) = V(k) there.

  Args:
    tree: [B, N, T].
    rho: trust in the siblings, in [0, 1]; as an array one for each level
      [max_depth], level l being a group with l groups above it, the last entry
      for all beyond. Entry 0 is not used.
    node_weighting: as in `bpo`.
    node_values: as in `bpo`.
    incumbent: as in `bpo`.

  Returns:
    Credit; 0 where there is no group above, or all returns are equal. Weights
    as in `bpo`.

  Raises:
    ValueError: if an option is unknown.
  """
  checks.between('rho', rho, 0, 1)
  member = tree_lib.in_group(tree)
  values, _, baseline = _values_and_baselines(tree, member, rho, node_values)
  owner = walks.nearest_above(member, tree.parents)
  advantages = common.take(values - baseline, owner)
  weights = _weights(tree, node_weighting, incumbent, owner)
  return common.credit(tree, common.per_token(tree, advantages), weights)


def baseline_sums(tree: tree_lib.Tree, *, rho: chex.Numeric = 0.5,
                  node_values: returns.Aggregate = 'split_mean',
                  num_levels: int = 4) -> types.Array:
  """Returns what the best rho of each level of `bpo_rb` is learnt from.

  The best rho for b = rho LOO + (1 - rho) b' is that of the least E[(V - b)^2],
    rho = E[(V - b')(LOO - b')] / E[(LOO - b')^2],
  V of one child, so that it is independent of LOO given the state. The sums of
  both over the members of each level add up over updates; a rho from earlier
  ones costs no bias.

  Args:
    tree: [B, N, T].
    rho: as `bpo_rb` had it on the way down to the level.
    node_values: as in `bpo_rb`.
    num_levels: L; deeper levels count with the last.

  Returns:
    [2, L] float32, reward units squared: numerators and denominators. Level 0,
    which has nothing above it, is 0.
  """
  member = tree_lib.in_group(tree)
  values, loo, baseline = _values_and_baselines(tree, member, rho, node_values)
  above = walks.at_parent(baseline, tree.parents)
  others = loo - above
  level = walks.sum_above(member.astype(jnp.int32), tree.parents) - 1
  level = jnp.where(member & (level > 0),
                    jnp.minimum(level, num_levels - 1), num_levels)
  sums = jnp.zeros((2, num_levels), jnp.float32)
  terms = jnp.stack([(values - above) * others, jnp.square(others)])
  return jax.lax.stop_gradient(sums.at[:, level].add(terms, mode='drop'))


def _values_and_baselines(tree, member, rho, node_values):
  """Returns V, LOO and b = rho LOO + (1 - rho) b', [B, N] each."""
  values = returns.centred_values(tree, node_values)
  loo = values - siblings.leave_one_out_advantage(
      values, tree.parents, member)
  rho = _rho_per_node(rho, member, tree.parents)
  return values, loo, _shrunk_baseline(loo, rho, member, tree.parents)


def _weights(tree, node_weighting, incumbent, owner):
  """Returns what every token weighs, [B, N, T]."""
  checks.one_of('incumbent', incumbent, common.Incumbent)
  weights = common.node_weights(tree, node_weighting)
  if incumbent == 'drop':
    dropped = common.take(common.is_incumbent(tree), owner)
    weights = masked.fill(weights, ~dropped)
  return common.per_token(tree, weights)


def _prefix_advantages(tree, local, member, lambda_, combine):
  """Returns lambda-weighted credit from the branch points below, [B, N, T].

  With f the first child of n and s(n) the number of actions of n, what reaches
  the end of n is C(n) = A(f) at a branch point and lambda^s(f) C(f) elsewhere;
  'sum' adds both. A token e actions before the end of n gets lambda^e C(n).
  """
  starts = tree_lib.action_starts(tree)
  num_actions = jnp.sum(starts, axis=-1, dtype=jnp.int32)
  powers = jnp.power(jnp.float32(lambda_), jnp.arange(starts.shape[-1] + 2))
  decay = jnp.take(powers, num_actions, mode='clip')
  if combine == 'nearest':
    decay = masked.fill(decay, ~member)
  carried = _carry_back(tree, masked.fill(local, member), decay)
  if combine == 'mean':
    branch_points = _carry_back(
        tree, member.astype(jnp.float32), jnp.ones_like(decay))
    carried = masked.divide(carried, branch_points)
  # Counting along T costs more than all the rest; one action a node is usual.
  factor = jax.lax.cond(
      jnp.any(num_actions > 1), _decay_to_end, _decay_of_one, starts, powers)
  return carried[..., None] * factor


def _decay_to_end(starts, powers):
  """Returns lambda^e, e the actions from a token's own to the node's end."""
  begun = jnp.cumsum(starts, axis=-1, dtype=jnp.int32)
  return jnp.take(powers, begun[..., -1:] - begun + 1, mode='clip')


def _decay_of_one(starts, powers):
  return jnp.broadcast_to(powers[1], starts.shape)


def _carry_back(tree, values, decays):
  """Returns C(n) = values(f) + decays(f) C(f), f the first child of n."""
  first = tree_lib.first_child(tree)
  carried, _ = walks.accumulate_back(_compose, (values, decays), first)
  return common.take(carried, first)


def _rho_per_node(rho, member, parents):
  """Returns rho by a node's level, [B, N]; 1 at the first group of a path."""
  level = walks.sum_above(member.astype(jnp.int32), parents) - 1
  rho = jnp.atleast_1d(jnp.asarray(rho, jnp.float32))
  if rho.ndim > 1 or not rho.size:
    raise ValueError('rho: expected a scalar or one for each level, shape '
                     f'[max_depth], got shape {rho.shape}')
  by_level = jnp.take(rho, jnp.maximum(level, 0), mode='clip')
  return jnp.where(level > 0, by_level, 1.0)


def _shrunk_baseline(loo, rho, member, parents):
  """Returns b(k) = rho LOO(k) + (1 - rho) b(k') at members, [B, N].

  Elsewhere it is that of the nearest member above, 0 where there is none. Every
  step of the way down is affine, b -> shift + slope b; steps are composed.
  """
  shift = masked.fill(rho * loo, member)
  slope = jnp.where(member, 1.0 - rho, 1.0)
  return walks.accumulate_down(_compose, (shift, slope), parents)[0]


def _compose(above, own):
  return own[0] + own[1] * above[0], own[1] * above[1]

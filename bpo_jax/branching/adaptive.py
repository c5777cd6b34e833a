"""A fixed budget of rollouts, spent by a recommended way to branch.

The recommendation is made of the trees of earlier updates: so many forks at
such depths of every first trajectory, or none. A small share goes to forks at
random depths, so that the next recommendation has something to go by.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from bpo_jax import checks
from bpo_jax import masked
from bpo_jax import tree as tree_lib
from bpo_jax import types
from bpo_jax.branching import decisions as decisions_lib
from bpo_jax.branching import depths

_ROUNDING = 1e-4  # Of sums of costs, in rollouts.


def adaptive(tree: tree_lib.Tree, *, design: depths.Design | None = None,
             num_rollouts: int = 16, num_branch_points: int = 32,
             explore: float = 0.03, open_mask: chex.Array | None = None,
             birth: chex.Numeric | None = None,
             key: chex.PRNGKey | None = None) -> types.BranchPlan:
  """Spends a fixed budget by a recommended design, in two stages.

  With c_d the cost of a fork at depth bin d, R the budget and epsilon the share
  to explore with, a tree gets

    n = floor(R (1 - epsilon) / (1 + (K - 1) sum_d c_d))

  first trajectories, and as many more as are whole in what that leaves over.
  Asked for the first time, the policy plans those that are not there yet, fresh
  rollouts; asked again, K - 1 forks of every first trajectory, those included,
  at one decision in every recommended bin, drawn from the bin's depths. Of the
  first epsilon R / mean_d(c_d) trajectories, a coin deciding on a part of one,
  each gets a fork at a depth drawn from all. A tree that has enough
  trajectories is forked at once, and one that was forked is left alone.

  What keeps it unbiased. Draws have an order, that of the nodes. An estimator
  with split weights is unbiased if the number of forks at each state is fixed
  by what was drawn before that state's own action: weights are then known in
  advance, a subtree's split mean has the expectation of the return given its
  state, and later draws of different subtrees are uncorrelated, so that
  baselines stay independent of the action. Here
  * design, budget and coins are fixed before the tree is grown, and with them
    the number of first trajectories: the root's weights, 1 / (number of its
    children), depend on nothing that was drawn;
  * a decision's depth is known at its state: to fork at a fixed or a drawn
    depth is a stopping time;
  * what was paid before a decision depends on decisions before it.
  What a tree has left over in the end, because its episodes were short, it
  leaves unspent: the number of its fresh rollouts would tell how they went.

  Nothing but depth has a say in where forks are. So the trees are fit for
  `variance.update`, which the next design is made of; with `open_mask` they are
  not.

  Args:
    tree: [B, N, T].
    design: from trees of earlier updates, by `designs.to_arrays`; None for no
      branch points but those that explore.
    num_rollouts: budget of a tree in whole rollouts, the leaves that are there
      included; a fork counts as the part of a rollout that it runs.
    num_branch_points: M, at most so many branch points a tree.
    explore: share of the budget that is spent on forks at random depths, to
      learn where forks pay; 0 for none.
    open_mask: [B, N] bool, nodes before whose actions the outcome is still
      open, told from the prefix alone; None for all. The others are not forked
      by the design.
    birth: the newest stage whose trajectories are eligible; None for all.
    key: a typed key.

  Returns:
    BranchPlan [B, M + 1], branch points in node and token order, the fresh
    rollouts last; `unspent` in whole rollouts, rounded down, of a tree that is
    forked or that nothing can be planned for.

  Raises:
    ValueError: if a size is out of range, an array of another shape, or there
      is no key.

  References:
    Ours; the variance that the design goes by extends theorem 4.3 of Branching
    Policy Optimization (arXiv 2607.14171).
  """
  decisions_lib.check_sizes(num_branch_points, 1)
  decisions_lib.check_rollouts(num_rollouts)
  tree_lib.check_batch(tree)
  if not 0 <= explore < 1:
    raise ValueError(
        f'explore: expected a share from 0 to below 1, got {explore}')
  checks.one_key('adaptive', key)
  if open_mask is not None:
    checks.shape('open_mask', open_mask, tree.node_mask.shape)
  design = depths.unknown() if design is None else design
  first = _first_trajectories(tree)
  coin_key, depth_key = jax.random.split(key)
  wanted = _num_wanted(design, num_rollouts * (1 - explore))
  num_explorers = _num_explorers(
      design, num_rollouts * explore, first.count.shape, coin_key)
  real = jnp.asarray(tree.node_mask)[:, 0]
  missing = masked.fill(jnp.maximum(wanted - first.count, 0), real)
  is_forked = tree_lib.num_leaves(tree)[:, 0] > first.count
  forks, costs = _forks(
      tree, first, design, num_explorers, open_mask, birth, depth_key)
  left = masked.fill(jnp.maximum(num_rollouts - first.count, 0), real)
  may_fork = (missing == 0) & ~is_forked
  paid = jnp.cumsum(costs, axis=-1) <= left[:, None] + _ROUNDING
  taken = (forks > 0) & paid & may_fork[:, None]
  taken = taken & (jnp.cumsum(taken, axis=-1) <= num_branch_points)
  left = left - jnp.sum(masked.fill(costs, taken), axis=-1)
  plan = _plan(tree, masked.fill(forks, taken), num_branch_points,
               jnp.where(is_forked, 0, missing))
  unspent = jnp.floor(left + _ROUNDING).astype(jnp.int32)
  # Of rollouts yet to come it is not known what they will leave.
  is_idle = ~is_forked & ~jnp.any(plan.count > 0, axis=-1)
  return plan.replace(unspent=masked.fill(unspent, may_fork | is_idle))


class _Trajectories(NamedTuple):
  """The trajectories that begin at the root, of any stage.

  Attributes:
    head: node with which a node's trajectory began.
    rank: of that trajectory among those from the root, in node order.
    mask: nodes of trajectories from the root.
    count: how many there are.
  """

  head: chex.Array  # [B, N] int32
  rank: chex.Array  # [B, N] int32
  mask: chex.Array  # [B, N] bool
  count: chex.Array  # [B] int32


def _first_trajectories(tree):
  head = decisions_lib.trajectory(tree)
  begins = (head == jnp.arange(head.shape[-1])) & tree.node_mask
  begins = begins & (depths.actions_above(tree) == 0)
  rank = jnp.cumsum(begins, axis=-1, dtype=jnp.int32) - 1
  at_head = lambda x: jnp.take_along_axis(x, head, axis=-1)
  return _Trajectories(
      head=head, rank=at_head(rank), mask=at_head(begins) & tree.node_mask,
      count=jnp.sum(begins, axis=-1, dtype=jnp.int32))


def _num_wanted(design, budget):
  """Returns how many first trajectories a tree is to have, [] int32."""
  whole = lambda x: jnp.floor(x + _ROUNDING)
  each = 1 + (design.num_siblings - 1) * masked.sum(
      jnp.asarray(design.costs), design.bins)
  wanted = whole(budget / each)
  wanted = wanted + whole(budget - wanted * each)
  # One trajectory is there in any case.
  return jnp.maximum(wanted, 1).astype(jnp.int32)


def _num_explorers(design, budget, shape, key):
  """Returns how many trajectories explore, [B] float32, whole numbers."""
  costs = jnp.asarray(design.costs)
  number = masked.divide(budget, masked.mean(costs, costs > 0))
  return jnp.floor(number + decisions_lib.noise(shape, key))


def _forks(tree, first, design, num_explorers, open_mask, birth, key):
  """Returns forks at every decision and what they cost, [B, N * T] each."""
  decisions = decisions_lib.find(tree, birth=None)
  mask = decisions.mask & first.mask[..., None]
  if birth is not None:
    mask = mask & (tree.birth <= decisions_lib.stage(birth, tree))[..., None]
  before = depths.actions_before(tree)
  num_bins, width = len(design.costs), design.depth_width
  level = jnp.minimum(before // width, num_bins - 1)
  drawn_key, explored_key = jax.random.split(key)
  shape = first.head.shape
  drawn = decisions_lib.noise((*shape, num_bins), drawn_key)
  starts = jnp.arange(num_bins) * width
  drawn = _at_least_one(starts + jnp.floor(drawn * width))  # [B, N, D]
  drawn = jax.vmap(lambda x, i: x[i])(drawn, first.head)
  own = jnp.take_along_axis(drawn, level, axis=-1)
  by_design = jnp.asarray(design.bins)[level] & (before == own)
  if open_mask is not None:
    by_design = by_design & jnp.asarray(open_mask)[..., None]
  reach = jnp.sum(jnp.asarray(design.costs) > 0) * width
  explored = 1 + jnp.floor(
      decisions_lib.noise(shape, explored_key) * (reach - 1))
  explored = jnp.take_along_axis(explored, first.head, axis=-1)[..., None]
  by_chance = (before == explored) & (
      first.rank < num_explorers[:, None])[..., None]
  forks = (design.num_siblings - 1) * by_design + by_chance
  forks = masked.fill(forks, mask).astype(jnp.int32).reshape(shape[0], -1)
  costs = jnp.asarray(design.costs)[level].reshape(shape[0], -1)
  return forks, masked.fill(forks * costs, forks > 0)


def _at_least_one(depth):
  """Returns depths, none of which is the root's."""
  return jnp.maximum(depth.astype(jnp.int32), 1)


def _plan(tree, forks, num_branch_points, num_fresh):
  """Returns the plan of forks [B, N * T] and of fresh rollouts [B]."""
  width = min(num_branch_points, forks.shape[-1])
  order = jnp.argsort(forks == 0, axis=-1, stable=True)[:, :width]
  counts = jnp.take_along_axis(forks, order, axis=-1)
  extra = ((0, 0), (0, num_branch_points - width))
  chosen = jnp.pad(
      jnp.where(counts > 0, order, -1), extra, constant_values=-1)
  fresh = decisions_lib.fresh(tree)
  chosen = jnp.concatenate([
      chosen, jnp.where(num_fresh > 0, fresh, -1)[:, None]], axis=-1)
  counts = jnp.concatenate([
      jnp.pad(counts, extra), num_fresh[:, None]], axis=-1)
  return decisions_lib.plan(chosen, counts, 0, tree.tokens.shape[-1])

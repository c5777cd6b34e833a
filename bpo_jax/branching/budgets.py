"""Branch policies that give out a budget of rollouts, one where it pays most.

All but `branpo_tail` bring a tree to `num_rollouts` leaves, those that are
there included. A fresh rollout is a fork before the root's first action.
"""

import math

import chex
import jax.numpy as jnp

from bpo_jax import checks
from bpo_jax import masked
from bpo_jax import returns
from bpo_jax import tree as tree_lib
from bpo_jax import types
from bpo_jax import walks
from bpo_jax.branching import decisions as decisions_lib
from bpo_jax.branching import depths
from bpo_jax.branching import trajectories


def cbpo_allocation(tree: tree_lib.Tree, *, num_rollouts: int = 16,
                    boundary_interval: int = 64, entropy_window: int = 20,
                    vocab_size: int = 151_936, base_probability: float = 0.2,
                    entropy_gain: float = 2.0, num_candidates: int = 3,
                    probability_decay: float = 0.2,
                    max_forks_per_point: int = 3, max_forks_per_path: int = 4,
                    min_probability: float = 0.25,
                    birth: chex.Numeric | None = 0) -> types.BranchPlan:
  """Forks where entropy rose since the start, less where it has forked already.

  A boundary lies before every d-th model token of a trajectory, the first one
  excepted: a fork there is a fresh rollout. With H the mean entropy of the next
  W model tokens over log|V|, and H_1 that of the path's first W,

    P_raw = clip(0.2 + 2 (H - H_1), 0, 1), the 3 largest per trajectory kept;
    P = P_raw / ((1 + L)^0.2 (1 + l)^0.2),

  L forks on the trajectory so far and l at the boundary. The largest P gets a
  fork, while P > 0.25, l < 3 and L < 4; the rest are fresh rollouts.

  The paper sums p log p over the ten likeliest tokens, which is what its engine
  reports; a tree records the entropy of the whole distribution, which is used
  here.

  Args:
    tree: [B, N, T].
    num_rollouts: M, leaves of a tree in the end, those there included.
    boundary_interval: d, model tokens between boundaries.
    entropy_window: W, model tokens an entropy is averaged over; fewer at the
      end of a trajectory.
    vocab_size: |V|, tokens of the vocabulary, for entropies as shares of
      log|V|.
    base_probability: P_raw where the entropy is that of the start.
    entropy_gain: what P_raw rises by as the entropy does by log|V|.
    num_candidates: boundaries kept of each trajectory.
    probability_decay: power of the two decays.
    max_forks_per_point: forks at one boundary at most.
    max_forks_per_path: forks on one trajectory at most.
    min_probability: P that a fork needs to exceed.
    birth: the stage whose nodes are eligible, 0 for first trajectories; None
      for all.

  Returns:
    BranchPlan [B, num_rollouts], forks in the order in which they were given
    out, fresh rollouts last.

  Raises:
    ValueError: if a size is out of range.

  References:
    Contrastive Branch Policy Optimization (arXiv 2608.24300); exact but for the
    entropy.
  """
  decisions_lib.check_rollouts(num_rollouts)
  checks.whole('boundary_interval', boundary_interval)
  for name, number in dict(
      num_candidates=num_candidates, max_forks_per_point=max_forks_per_point,
      max_forks_per_path=max_forks_per_path).items():
    checks.whole(name, number)
  for name, number in dict(
      base_probability=base_probability, min_probability=min_probability,
      probability_decay=probability_decay).items():
    checks.between(name, number, 0)
  checks.between('entropy_gain', entropy_gain, -math.inf)
  entropy = _window_entropy(tree, entropy_window, vocab_size)
  first = trajectories.first_on_path(entropy, tree)[..., None]
  p_raw = jnp.clip(base_probability + entropy_gain * (entropy - first), 0, 1)
  mask = _boundaries(tree, boundary_interval, birth)
  number = jnp.broadcast_to(
      decisions_lib.trajectory(tree)[..., None], mask.shape)
  p_raw, mask, number = (
      x.reshape(mask.shape[0], -1) for x in (p_raw, mask, number))
  rank = trajectories.rank(jnp.where(mask, p_raw, -1), number)
  p_raw = jnp.where(mask & (rank < num_candidates), p_raw, -jnp.inf)

  def score(slot, forks, arrays):
    del slot  # One fork is worth as much as the next.
    p_raw, number = arrays
    on_path = jnp.zeros_like(forks).at[number].add(forks)[number]
    p = p_raw / ((1 + on_path) * (1 + forks)) ** probability_decay
    allowed = ((p > min_probability) & (forks < max_forks_per_point)
               & (on_path < max_forks_per_path))
    return jnp.where(allowed, p, -jnp.inf)

  budget = decisions_lib.forks_left(tree, num_rollouts)
  chosen = decisions_lib.allocate(
      score, (p_raw, number), num_rollouts, budget,
      num_steps=p_raw.shape[-1] * int(max_forks_per_point))
  return _with_fresh(tree, chosen, budget)


def arpo_after_tool(tree: tree_lib.Tree, *, num_rollouts: int = 16,
                    entropy_window: int = 20, vocab_size: int = 151_936,
                    entropy_weight: float = 0.2, fork_threshold: float = 0.5,
                    mean_entropy: bool = False,
                    birth: chex.Numeric | None = 0,
                    key: chex.PRNGKey | None = None) -> types.BranchPlan:
  """Forks after observations by chance, more likely where entropy rose.

  After every observation, that is before every action but the path's first,
  fork once if clip(u - 0.2 dH, 0, 1) <= 0.5, u uniform and dH = H - H_1, where
  H sums the entropies of the first <= 20 tokens of the action to come over
  log|V| and H_1 is that of the path's first action. Actions of the same turn
  are asked together, turn by turn, while the budget lasts; the rest are fresh
  rollouts.

  A sum grows with the length of an action, so that a long one seems uncertain;
  `mean_entropy` compares like with like.

  Args:
    tree: [B, N, T].
    num_rollouts: leaves of a tree in the end, those there included.
    entropy_window: tokens of an action an entropy is taken over, at most.
    vocab_size: |V|, tokens of the vocabulary, for entropies as shares of
      log|V|.
    entropy_weight: what a rise of the entropy adds to the chance of a fork.
    fork_threshold: the chance of a fork where the entropy is that of the start.
    mean_entropy: take the mean over the window, not the sum.
    birth: the stage whose nodes are eligible, 0 for first trajectories; None
      for all.
    key: a typed key.

  Returns:
    BranchPlan [B, num_rollouts] by turn, fresh rollouts last.

  Raises:
    ValueError: if a size is out of range or there is no key.

  References:
    ARPO (arXiv 2507.19849); exact but for the entropy, which is that of the
    whole distribution and not of its ten likeliest tokens.
  """
  decisions_lib.check_rollouts(num_rollouts)
  checks.one_key('arpo_after_tool', key)
  checks.between('entropy_weight', entropy_weight, -math.inf)
  checks.between('fork_threshold', fork_threshold, 0, 1)
  entropy = _window_entropy(
      tree, entropy_window, vocab_size, per_action=True, mean=mean_entropy)
  rise = entropy - trajectories.first_on_path(entropy, tree)[..., None]
  uniform = decisions_lib.noise(tree.tokens.shape, key)
  fork = jnp.clip(uniform - entropy_weight * rise, 0, 1) <= fork_threshold
  decisions = decisions_lib.find(tree, birth)
  turn = depths.actions_before(tree)
  chosen = decisions_lib.greedy(
      decisions.replace(mask=decisions.mask & fork & (turn > 0)),
      -turn.astype(jnp.float32), num_rollouts)
  budget = decisions_lib.forks_left(tree, num_rollouts)
  in_budget = jnp.arange(num_rollouts) < budget[:, None]
  return _with_fresh(tree, jnp.where(in_budget, chosen, -1), budget)


def trace_budget(tree: tree_lib.Tree, *, values: chex.Array | None = None,
                 num_rollouts: int = 16, success_threshold: float = 0.8,
                 birth: chex.Numeric | None = 0) -> types.BranchPlan:
  """Gives every fork to where it most raises the chance of mixed outcomes.

  m rollouts from the root have mixed outcomes with probability
  1 - v^m - (1 - v)^m, v the predicted success there. At a decision of a
  trajectory of outcome r, k forks bring another outcome with probability
  1 - q^k, q = r V + (1 - r)(1 - V). One more is therefore worth

    v^m (1 - v) + (1 - v)^m v   at the root, q^k (1 - q)   at a decision,

  and the next fork goes to the largest, until the budget is spent or none is
  worth anything. The value is that of the state at the end of a node, so that
  decisions inside a node have none and are not eligible.

  Args:
    tree: [B, N, T].
    values: [B, N] float32 in [0, 1], predicted probability of success from the
      state at the end of every node, known before the tree was grown.
    num_rollouts: leaves of a tree in the end, those there included.
    success_threshold: return from which an episode counts as a success.
    birth: the stage whose nodes are eligible, 0 for first trajectories; None
      for all. Fresh rollouts are eligible always.

  Returns:
    BranchPlan [B, num_rollouts] in the order of choice.

  Raises:
    ValueError: if a size is out of range, or there are no values or of another
      shape.

  References:
    TRACE (arXiv 2606.11119), restated.
  """
  decisions_lib.check_rollouts(num_rollouts)
  checks.given('values', values, 'trace_budget',
               'the predicted success at the end of every node, [B, N]')
  checks.between('success_threshold', success_threshold, -math.inf)
  tree_lib.check_batch(tree)
  checks.shape('values', values, tree.node_mask.shape)
  values = jnp.clip(masked.fill(jnp.asarray(values), tree.node_mask), 0, 1)
  success = _outcome(tree, success_threshold)
  same = jnp.where(success, walks.at_parent(values, tree.parents),
                   1 - walks.at_parent(values, tree.parents))
  siblings = walks.at_parent(tree_lib.num_children(tree), tree.parents) - 1
  decisions = decisions_lib.find(tree, birth)
  mask = decisions.mask & (jnp.arange(tree.tokens.shape[-1]) == 0)
  flat = lambda x: jnp.broadcast_to(x, mask.shape).reshape(mask.shape[0], -1)
  root = decisions_lib.fresh(tree)
  arrays = (flat(mask), flat(same[..., None]), flat(siblings[..., None]),
            root, values[:, 0], tree_lib.num_children(tree)[:, 0])
  budget = decisions_lib.forks_left(tree, num_rollouts)
  chosen = decisions_lib.allocate(_mixed_gain, arrays, num_rollouts, budget)
  return decisions_lib.merged_plan(chosen, 1, budget, mask.shape[-1])


def _mixed_gain(slot, forks, arrays):
  """Returns what one more fork adds to the chance of mixed outcomes."""
  del slot
  mask, same, siblings, root, value, num_children = arrays
  gain = jnp.where(mask, same ** (siblings + forks) * (1 - same), 0)
  size = jnp.maximum(num_children, 1) + forks[root]
  at_root = value ** size * (1 - value) + (1 - value) ** size * value
  gain = gain.at[root].set(jnp.where(root >= 0, at_root, gain[root]))
  return jnp.where(gain > 0, gain, -jnp.inf)


def branpo_tail(tree: tree_lib.Tree, *, success_threshold: float = 0.8,
                num_branch_points: int = 4, branches_when_solved: int = 2,
                branches_when_failed: int = 3, branches_when_long: int = 6,
                birth: chex.Numeric | None = 0) -> types.BranchPlan:
  """Forks one to three actions before the end, by how the task is going.

  With p the share of the task's first rollouts that succeed, and lengths in
  actions:

    p = 1: two branches before the last action of each;
    p < 1/2: three before the last action of every failure; where none of them
      succeeds, three before the second last, then before the third last;
    1/2 < p < 1: six before the second last action of every success that is
      longer than the mean of the successes.

  A rollout's own tail is one of its branches, so that these are one, two and
  five forks. A plan cannot see how its forks will end: "where none succeeds" is
  said by the next call, about the forks of the calls before. Three calls in a
  row with birth = 0 walk back from the end; one that finds nothing left to try
  leaves its budget unspent. (`recursive` would look for the tails of forks.)

  Where the released code goes on and this does not: it forks three times, one
  and two actions before the end, also every rollout at p = 1/2, successes at
  p < 1/2, and at 1/2 < p < 1 failures and, up to p = 3/4, shorter successes; it
  forks again before the first action of a failure that is too short to walk
  back; it stops at the first fork that contrasts with the own tail; and it
  counts no fork that a limit ended.

  Args:
    tree: [B, N, T].
    success_threshold: return from which an episode counts as a success.
    num_branch_points: M, rollouts of a task to fork at most.
    branches_when_solved: branches where every rollout succeeds, the own tail
      being one.
    branches_when_failed: branches of a failure, the own tail being one.
    branches_when_long: branches of a success that is longer than the mean, the
      own tail being one.
    birth: the stage whose nodes are eligible, 0 for first trajectories; None
      for all.

  Returns:
    BranchPlan [B, M] in node and token order; the budget is M times the largest
    number of forks.

  Raises:
    ValueError: if a size is out of range.

  References:
    BranPO (arXiv 2602.03719), restated; that the own tail is one of the
    branches, where the six of them start and what lengths are, exact by the
    released code.
  """
  numbers = dict(
      branches_when_solved=branches_when_solved,
      branches_when_failed=branches_when_failed,
      branches_when_long=branches_when_long)
  for name, number in numbers.items():
    checks.whole(name, number, 2, ' (the own tail and a fork)')
    decisions_lib.check_sizes(num_branch_points, number - 1, f'({name} - 1)')
  checks.between('success_threshold', success_threshold, -math.inf)
  most = max(numbers.values()) - 1
  solved, failed, long = _situations(tree, success_threshold, birth)
  steps, missed, tried = _tail(tree, success_threshold)
  until_here = (steps == 1) | (steps == 2) & missed[1] | (
      steps == 3) & missed[1] & missed[2]
  branches = jnp.select(
      [solved & (steps == 1), failed & until_here, long & (steps == 2)],
      list(numbers.values()), 1)
  place = _shared_place(tree)
  count = jnp.where(tried | (place < 0), 0, branches - 1)
  decisions = decisions_lib.find(tree, birth)
  chosen = decisions_lib.greedy(
      decisions.replace(mask=count > 0), jnp.zeros(count.shape),
      num_branch_points)
  pick = lambda x: jnp.take_along_axis(
      x.reshape(x.shape[0], -1), jnp.maximum(chosen, 0), axis=-1)
  return decisions_lib.merged_plan(
      jnp.where(chosen < 0, -1, pick(place)), pick(count),
      num_branch_points * most, tree.tokens.shape[-1])


def _situations(tree, success_threshold, birth):
  """Returns whose trajectories are solved, failed or long, [B, N, 1] each."""
  leaf = tree_lib.is_leaf(tree)
  if birth is not None:
    leaf &= tree.birth == decisions_lib.stage(birth, tree)
  success = _outcome(tree, success_threshold)
  right = leaf & success
  num_leaves, num_right = (
      jnp.sum(x, axis=-1, keepdims=True) for x in (leaf, right))
  length = _at_leaf(
      tree_lib.actions_through(tree).astype(jnp.float32), tree)
  is_long = length > masked.mean(length, right, axis=-1, keepdims=True)
  eligible = _at_leaf(leaf.astype(jnp.float32), tree) > 0
  mostly = 2 * num_right - num_leaves
  all_right = num_right == num_leaves
  return tuple((eligible & x)[..., None] for x in (
      all_right, (mostly < 0) & ~success,
      (mostly > 0) & ~all_right & success & is_long))


def _tail(tree, success_threshold):
  """Returns how far actions are from the end, and how forks there went.

  Returns:
    steps: [B, N, T] int32, 1 at the start of a trajectory's last action, 0 off
      the starts of actions.
    missed: {1: ..., 2: ...}, [B, N, T] bool, whether forks of the trajectory's
      last and second last action were tried and none succeeded.
    tried: [B, N, T] bool, whether the state before the token has been forked.
  """
  laid_out = trajectories.lay_out(tree)
  starts = tree_lib.action_starts(tree)
  to_end = trajectories.discounted_to_end(
      trajectories.read(laid_out, starts, tree), laid_out.number)
  steps = jnp.where(starts, trajectories.put_back(laid_out, to_end, tree), 0)
  tried, succeeded = _forks_before(tree, success_threshold)

  def missed_at(step):
    here = trajectories.read(
        laid_out, tried & ~succeeded & (steps == step), tree)
    any_ = trajectories.maxima(here, laid_out.number) > 0
    return trajectories.put_back(laid_out, any_, tree)

  return steps, {step: missed_at(step) for step in (1, 2)}, tried


def _forks_before(tree, success_threshold):
  """Returns where the state was forked, and where a fork succeeded."""
  success = tree_lib.is_leaf(tree) & (
      returns.path_returns(tree) >= success_threshold)
  right = walks.sum_below(success.astype(jnp.int32), tree.parents)
  eldest = jnp.maximum(
      walks.at_parent(tree_lib.first_child(tree), tree.parents, -1), 0)
  is_fork = (jnp.asarray(tree.parents) >= 0) & (
      tree.birth > jnp.take_along_axis(jnp.asarray(tree.birth), eldest, -1))
  at_start = jnp.arange(tree.tokens.shape[-1]) == 0

  def any_fork(values):
    found = walks.sum_of_children(
        values.astype(jnp.int32), tree.parents, is_fork)
    above = walks.at_parent(found, tree.parents) > 0
    return above[..., None] & at_start

  return any_fork(is_fork), any_fork(right > 0)


def _shared_place(tree):
  """Returns every token's decision as a flat index, [B, N, T] int32.

  That of a node's first token lies at the first child of the node's parent; -1
  where that has no action there, or there is no parent.
  """
  size = tree.tokens.shape[-1]
  offset = jnp.arange(size)
  node = jnp.arange(tree.parents.shape[-1])[:, None]
  eldest = walks.at_parent(tree_lib.first_child(tree), tree.parents, -1)
  acts = jnp.take_along_axis(
      jnp.asarray(tree.action_mask)[..., 0], jnp.maximum(eldest, 0), axis=-1)
  eldest = jnp.where(acts & (eldest >= 0), eldest * size, -1)
  return jnp.where(offset > 0, node * size + offset, eldest[..., None])


def _window_entropy(tree, entropy_window, vocab_size, per_action=False,
                    mean=True):
  """Returns the entropy from a token on, as a share of log|V|, [B, N, T]."""
  checks.whole('entropy_window', entropy_window)
  checks.whole('vocab_size', vocab_size, 2)
  laid_out = trajectories.lay_out(tree)
  group = laid_out.number
  if per_action:
    starts = trajectories.read(laid_out, tree_lib.action_starts(tree), tree)
    group = jnp.where(group < tree.parents.shape[-1],
                      jnp.cumsum(starts, axis=-1), -1)
  window = trajectories.window_mean if mean else trajectories.window_sum
  entropy = window(
      trajectories.read(laid_out, tree.entropies, tree), group, entropy_window)
  return trajectories.put_back(laid_out, entropy, tree) / jnp.log(vocab_size)


def _boundaries(tree, boundary_interval, birth):
  """Returns the decisions before every so many model tokens, [B, N, T]."""
  actions = jnp.asarray(tree.action_mask, jnp.int32)
  own = jnp.sum(actions, axis=-1)
  above = walks.sum_above(own, tree.parents) - own
  before = above[..., None] + jnp.cumsum(actions, axis=-1) - actions
  mask = decisions_lib.find(tree, birth, 'token').mask
  return mask & (before > 0) & (before % boundary_interval == 0)


def _outcome(tree, success_threshold):
  """Returns whether a node's own trajectory succeeded, [B, N] bool."""
  return _at_leaf(returns.path_returns(tree), tree) >= success_threshold


def _at_leaf(values, tree):
  """Returns the value at the leaf that a node's trajectory ends in, [B, N]."""
  values = masked.fill(jnp.asarray(values), tree_lib.is_leaf(tree))
  return returns.backup(
      values, tree_lib.is_first_child(tree).astype(jnp.float32), tree.parents,
      jnp.ones_like(values))


def _with_fresh(tree, chosen, budget):
  """Returns the plan of single forks, spare ones being fresh rollouts."""
  chosen = decisions_lib.fill(chosen, decisions_lib.fresh(tree), budget)
  return decisions_lib.merged_plan(
      chosen, 1, budget, tree.tokens.shape[-1])

"""Decisions of a tree, and taking the best of them within a budget.

A decision is the first token of an action, or any token of one. Forking there
keeps everything before that token, so a decision at the start of a node lies on
its parent's end and is counted once, for the parent's first child.
"""

from collections.abc import Callable
from typing import Literal

import chex
import jax
import jax.numpy as jnp

from bpo_jax import checks
from bpo_jax import tree as tree_lib
from bpo_jax import types
from bpo_jax import walks

Unit = tree_lib.Unit
Statistic = Literal['first_token', 'action']

_MOST_SLOTS = 2 ** 20  # Of a plan, which holds all of them, used or not.


@chex.dataclass(frozen=True, mappable_dataclass=False)
class Decisions:
  """Where a policy may fork, and where that lies on the tree.

  Attributes:
    mask: decisions.
    position: tokens of the path before the decision.
    enter: depth-first rank of the node whose tokens end at the decision.
    end: one past the rank of that node's last descendant.
  """

  mask: chex.Array  # [B, N, T] bool
  position: chex.Array  # [B, N, T] int32
  enter: chex.Array  # [B, N, T] int32
  end: chex.Array  # [B, N, T] int32


def find(tree: tree_lib.Tree, birth: chex.Numeric | None = 0,
         unit: Unit = 'action') -> Decisions:
  """Returns the decisions of a tree.

  Args:
    tree: [B, N, T].
    birth: scalar or [B] int32, only decisions in nodes that this stage laid
      down: 0 for first trajectories, k for forks of the k-th stage. None: all.
    unit: whether only the first token of an action is a decision, or each.

  Raises:
    ValueError: if the unit is unknown, the stage out of range, or the tree no
      batch.
  """
  checks.one_of('unit', unit, Unit)
  tree_lib.check_batch(tree)
  offset = jnp.arange(tree.tokens.shape[-1])
  first = tree_lib.is_first_child(tree)[..., None]
  starts = tree_lib.action_starts(tree)
  mask = starts if unit == 'action' else jnp.asarray(tree.action_mask)
  mask = mask & ((offset > 0) | first)
  if birth is not None:
    mask = mask & (tree.birth == stage(birth, tree))[..., None]
  enter, end = walks.preorder(tree.parents, tree.node_mask)

  def host(values):
    above = walks.at_parent(values, tree.parents)
    return jnp.where(offset > 0, values[..., None], above[..., None])

  return Decisions(
      mask=mask, enter=host(enter), end=host(end),
      position=tree_lib.tokens_above(tree)[..., None] + offset)


def stage(birth: chex.Numeric, tree: tree_lib.Tree) -> types.Array:
  """Returns a stage, or one for each tree, to compare [B, N] births with.

  Raises:
    ValueError: if it is out of range, or neither a scalar nor [B].
  """
  checks.between('birth', birth, 0, checks.MOST)
  return one_or_per_tree('birth', birth, tree)


def one_or_per_tree(name: str, values: chex.Numeric, tree: tree_lib.Tree
                    ) -> types.Array:
  """Returns a number for all trees, or one for each, [1 or B, 1].

  Raises:
    ValueError: if it is neither a scalar nor [B].
  """
  num_trees = len(tree.node_mask)
  if jnp.shape(values) not in ((), (num_trees,)):
    raise ValueError(f'{name}: expected one number, or one for each tree of '
                     f'shape ({num_trees},), got shape {jnp.shape(values)}')
  return jnp.reshape(jnp.asarray(values), (-1, 1))


def entropies(tree: tree_lib.Tree, statistic: Statistic = 'first_token'
              ) -> types.Array:
  """Returns the uncertainty of every action token, [B, N, T] float32, nats.

  Args:
    tree: [B, N, T].
    statistic: 'first_token', the entropy of the token's own distribution, or
      'action', the sum from the token to the end of its action, an unbiased
      estimate of the entropy of the whole action.

  Raises:
    ValueError: if the statistic is unknown.
  """
  checks.one_of('statistic', statistic, Statistic)
  values = jnp.where(tree.action_mask, tree.entropies, 0)
  if statistic == 'first_token':
    return values
  return walks.sum_to_end_of_run(values, tree.action_mask)


def noise(shape: tuple[int, ...], key: chex.PRNGKey | None) -> types.Array:
  """Returns uniform noise of `shape` that more padding does not change.

  Args:
    shape: (B, N, T) or (B, N).
    key: a typed key; consumed. None gives zeros.

  Raises:
    ValueError: if it is no key, or several.
  """
  if key is None:
    return jnp.zeros(shape)
  checks.one_key('branch policy', key)
  # A key for every entry, from its own indices alone.
  for size in shape:
    fold_in = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    for _ in range(key.ndim):
      fold_in = jax.vmap(fold_in, in_axes=(0, None))
    key = fold_in(key, jnp.arange(size))
  return jax.vmap(jax.random.uniform)(key.ravel()).reshape(shape)


def greedy(decisions: Decisions, scores: chex.Array, num_slots: int,
           min_spacing: chex.Numeric = 0, max_per_path: int | None = None,
           tie_noise: chex.Array | None = None) -> types.Array:
  """Takes the best decision that is left, `num_slots` times in each tree.

  Args:
    decisions: where to choose.
    scores: [B, N, T] float32; the largest is the best.
    num_slots: M.
    min_spacing: tokens between two chosen decisions of one path.
    max_per_path: most decisions on one path; None for M.
    tie_noise: [B, N, T] float32; of equal scores the larger wins, then the
      first in node and token order. None for zeros.

  Returns:
    [B, M] int32 indices into the flattened [N * T], in the order of choice; -1
    for nothing left.

  Raises:
    ValueError: if a size is out of range.
  """
  check_most('max_per_path', max_per_path)
  checks.whole('min_spacing', min_spacing, 0, ' (tokens)')
  cap = num_slots if max_per_path is None else max_per_path
  if tie_noise is None:
    tie_noise = jnp.zeros(scores.shape)
  # A decision is taken once: more steps than decisions would find nothing.
  steps = min(num_slots, scores.shape[-2] * scores.shape[-1])
  single = lambda d, s, n: _greedy(d, s, n, steps, min_spacing, cap)
  chosen = jax.vmap(single)(decisions, scores, tie_noise)
  return _with_unused(chosen, num_slots)


def _with_unused(chosen, num_slots):
  """Returns [B, num_slots] with unused slots behind those that there are."""
  extra = num_slots - chosen.shape[-1]
  return jnp.pad(chosen, ((0, 0), (0, extra)), constant_values=-1)


def _greedy(decisions, scores, noise_, num_slots, min_spacing, cap):
  decisions, scores, noise_ = jax.tree.map(
      jnp.ravel, (decisions, scores, noise_))

  def take(state, _):
    left, num_on_path = state
    best = jnp.max(jnp.where(left, scores, -jnp.inf))
    ties = left & (scores == best)
    index = jnp.argmax(jnp.where(ties, noise_, -1.0))
    found = left[index]
    same_path = _on_same_path(decisions, index) & found
    gap = jnp.abs(decisions.position - decisions.position[index])
    num_on_path = num_on_path + same_path
    left = left & ~(same_path & (gap < min_spacing)) & (num_on_path < cap)
    left = left.at[index].set(False)
    return (left, num_on_path), jnp.where(found, index, -1)

  left = decisions.mask
  state = (left, jnp.zeros(left.shape, jnp.int32))
  return jax.lax.scan(take, state, length=num_slots)[1]


def _on_same_path(decisions, index):
  """Returns which decisions share a path with that of `index`, [N * T]."""
  enter, end = decisions.enter, decisions.end
  above = (enter <= enter[index]) & (enter[index] < end)
  below = (enter[index] <= enter) & (enter < end[index])
  return above | below


def best(decisions: Decisions, scores: chex.Array, num_branch_points: int,
         num_forks: int, min_spacing: chex.Numeric = 0,
         key: chex.PRNGKey | None = None, max_per_path: int | None = None
         ) -> types.BranchPlan:
  """Returns the plan that forks at what `greedy` takes.

  Args:
    decisions: where to choose.
    scores: [B, N, T] float32; the largest is the best.
    num_branch_points: M.
    num_forks: forks at each.
    min_spacing: tokens between two chosen decisions of one path.
    key: a typed key to break ties at random; None for the first in order.
    max_per_path: most decisions on one path; None for M.

  Raises:
    ValueError: if a size is out of range.
  """
  check_sizes(num_branch_points, num_forks)
  chosen = greedy(decisions, scores, num_branch_points, min_spacing,
                  max_per_path, noise(scores.shape, key))
  return plan(
      chosen, num_forks, num_branch_points * num_forks, scores.shape[-1])


def allocate(score: Callable[..., types.Array], arrays: types.ArrayTree,
             num_slots: int, budget: chex.Numeric, num_steps: int | None = None
             ) -> types.Array:
  """Gives out forks one at a time, each where one more is worth most.

  Args:
    score: (slot, forks, arrays) -> [S] float32, what one more fork is worth at
      each of S places of one tree, -inf for a place that gets no more; `forks`
      [S] int32 are those given out so far.
    arrays: pytree of [B, ...] arrays that `score` reads, each [S] or [N] in it;
      the first of them is [B, S].
    num_slots: M, forks to give out at most.
    budget: int32, forks a tree may have; a scalar or [B].
    num_steps: slots after which there is nothing left for certain; None for M.

  Returns:
    [B, M] int32 places in the order of choice, the same place as often as it
    was chosen; -1 for nothing left. Of equal scores the first place wins.
  """
  places = jax.tree.leaves(arrays)[0]
  steps = num_slots if num_steps is None else min(num_slots, num_steps)
  single = lambda a, b: _allocate(score, a, steps, b)
  chosen = jax.vmap(single)(
      arrays, jnp.broadcast_to(jnp.asarray(budget), places.shape[:1]))
  return _with_unused(chosen, num_slots)


def _allocate(score, arrays, num_steps, budget):
  def take(forks, slot):
    scores = score(slot, forks, arrays)
    index = jnp.argmax(scores)
    found = (scores[index] > -jnp.inf) & (slot < budget)
    return forks.at[index].add(found), jnp.where(found, index, -1)

  forks = jnp.zeros(jax.tree.leaves(arrays)[0].shape, jnp.int32)
  return jax.lax.scan(take, forks, jnp.arange(num_steps))[1]


def fresh(tree: tree_lib.Tree) -> types.Array:
  """Returns the decision at which a fork is a fresh rollout.

  That is the first one of the trajectory that begins at the root: nothing the
  policy drew comes before it.

  Returns:
    [B] int32 indices into the flattened [N * T]; -1 for a tree without actions.
  """
  decisions = find(tree, birth=None)
  first = decisions.mask & (trajectory(tree) == 0)[..., None]
  far = jnp.iinfo(jnp.int32).max
  flat = lambda x: x.reshape(x.shape[0], -1)
  index = jnp.argmin(flat(jnp.where(first, decisions.position, far)), axis=-1)
  return jnp.where(flat(first).any(axis=-1), index, -1)


def trajectory(tree: tree_lib.Tree) -> types.Array:
  """Returns the node with which a node's trajectory began, [B, N] int32.

  A trajectory is what was drawn in one go: a chain of first children. Every
  first trajectory is one, and so is every fork. Padding gets its own index.
  """
  return walks.nearest_above(~tree_lib.is_first_child(tree), tree.parents)


def fill(chosen: chex.Array, place: chex.Array, budget: chex.Array
         ) -> types.Array:
  """Spends what is left of a budget of single forks at one place.

  Args:
    chosen: [B, M] int32, one fork each, -1 for an unused slot.
    place: [B] int32, where the spare ones go; -1 for nowhere.
    budget: [B] int32, forks a tree may have; at most M.
  """
  free = chosen < 0
  spare = budget[:, None] - jnp.sum(~free, axis=-1, keepdims=True)
  gets_one = free & (jnp.cumsum(free, axis=-1) <= spare)
  return jnp.where(gets_one, place[:, None], chosen)


def plan(chosen: chex.Array, count: chex.Numeric, budget: chex.Numeric,
         num_tokens: int) -> types.BranchPlan:
  """Returns the plan that forks at flat indices.

  Args:
    chosen: [B, M] int32 indices into [N * T], -1 for an unused slot.
    count: int32, forks at each; a scalar or [B, M].
    budget: int32, forks a tree may have; a scalar or [B].
    num_tokens: T.
  """
  used = chosen >= 0
  count = jnp.where(used, count, 0).astype(jnp.int32)
  return types.BranchPlan(
      node=jnp.where(used, chosen // num_tokens, types.UNUSED_SLOT),
      offset=jnp.where(used, chosen % num_tokens, 0),
      count=count, unspent=budget - jnp.sum(count, axis=-1))


def merged_plan(chosen: chex.Array, count: chex.Numeric, budget: chex.Numeric,
                num_tokens: int) -> types.BranchPlan:
  """Returns `plan` with equal indices in one slot, and used slots first."""
  count = jnp.where(chosen >= 0, count, 0)
  chosen, count = jax.vmap(_merged)(chosen, count)
  order = jnp.argsort(chosen < 0, axis=-1, stable=True)
  chosen, count = (
      jnp.take_along_axis(x, order, axis=-1) for x in (chosen, count))
  return plan(chosen, count, budget, num_tokens)


def _merged(chosen, count):
  """Returns [M] indices, -1 but at the first of equals, and their sums."""
  order = jnp.argsort(chosen, stable=True)
  ranked = chosen[order]
  is_first = jnp.pad(
      ranked[1:] != ranked[:-1], (1, 0), constant_values=True)
  group = jnp.cumsum(is_first) - 1
  total = jnp.zeros_like(count).at[group].add(count[order])[group]
  put = lambda x: jnp.zeros_like(x).at[order].set(x)
  return put(jnp.where(is_first, ranked, -1)), put(total)


def check_sizes(num_branch_points: int, num_forks: int,
                name: str = 'num_forks') -> None:
  """Refuses numbers of branch points and forks that make no sibling group.

  Args:
    num_branch_points: M.
    num_forks: forks at each.
    name: what the latter is called.

  Raises:
    ValueError: if there is no branch point, or fewer than one fork at each, or
      more of either than can be counted.
  """
  checks.whole('num_branch_points', num_branch_points, 1, ' (M)', _MOST_SLOTS)
  checks.whole(name, num_forks, 1, ' (K - 1: a group of K < 2 '
               'siblings has nothing to compare)')
  forks = int(num_branch_points) * int(num_forks)
  if forks > checks.MOST:
    raise ValueError(
        f'num_branch_points x {name}: expected at most {checks.MOST} forks a '
        f'tree, got {num_branch_points} x {num_forks} = {forks}')


def check_most(name: str, number: int | None) -> None:
  """Refuses a cap on branch points that leaves none; None is no cap.

  Raises:
    ValueError: if it is below one.
  """
  if number is not None:
    checks.whole(name, number, 1, ' branch point')


def check_rollouts(num_rollouts: int) -> None:
  """Refuses a budget that is too small for one rollout.

  Raises:
    ValueError: if it is below one, or more than a plan can hold.
  """
  checks.whole('num_rollouts', num_rollouts, 1, ' (leaves of a tree, those '
               'that are there included)', _MOST_SLOTS)


def forks_left(tree: tree_lib.Tree, num_rollouts: int) -> types.Array:
  """Returns how many forks bring a tree to `num_rollouts` leaves, [B] int32."""
  leaves = tree_lib.num_leaves(tree)[:, 0]
  return jnp.maximum(num_rollouts - leaves, 0)

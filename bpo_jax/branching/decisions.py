"""Decisions of a tree, and taking the best of them within a budget.

A decision is the first token of an action, or any token of one. Forking there
keeps everything before that token, so a decision at the start of a node lies on
its parent's end and is counted once, for the parent's first child.
"""

from typing import Literal

import chex
import jax
import jax.numpy as jnp

from bpo_jax import checks
from bpo_jax import tree as tree_lib
from bpo_jax import types
from bpo_jax import walks

Unit = Literal['action', 'token']
Statistic = Literal['first_token', 'action']


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
    ValueError: if the unit is unknown.
  """
  checks.one_of('unit', unit, Unit)
  offset = jnp.arange(tree.tokens.shape[-1])
  first = tree_lib.is_first_child(tree)[..., None]
  starts = tree_lib.action_starts(tree)
  mask = starts if unit == 'action' else jnp.asarray(tree.action_mask)
  mask = mask & ((offset > 0) | first)
  if birth is not None:
    stage = jnp.reshape(jnp.asarray(birth), (-1, 1))
    mask = mask & (tree.birth == stage)[..., None]
  enter, end = walks.preorder(tree.parents, tree.node_mask)

  def host(values):
    above = walks.at_parent(values, tree.parents)
    return jnp.where(offset > 0, values[..., None], above[..., None])

  return Decisions(
      mask=mask, enter=host(enter), end=host(end),
      position=tree_lib.tokens_above(tree)[..., None] + offset)


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
  return sum_to_end_of_action(values, tree.action_mask)


def sum_to_end_of_action(values: chex.Array, mask: chex.Array) -> types.Array:
  """Returns the sum from every token to the end of its action, [B, N, T]."""
  def visit(carry, column):
    value, inside = column
    carry = jnp.where(inside, carry + value, 0)
    return carry, carry
  columns = jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), (values, mask))
  _, sums = jax.lax.scan(
      visit, jnp.zeros(values.shape[:-1]), columns, reverse=True)
  return jnp.moveaxis(sums, 0, -1)


def noise(shape: tuple[int, ...], key: chex.PRNGKey | None) -> types.Array:
  """Returns uniform noise of `shape` that more padding does not change.

  Args:
    shape: (B, N, T) or (B, N).
    key: a typed key; consumed. None gives zeros.
  """
  if key is None:
    return jnp.zeros(shape)
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
  """
  cap = num_slots if max_per_path is None else max_per_path
  if tie_noise is None:
    tie_noise = jnp.zeros(scores.shape)
  single = lambda d, s, n: _greedy(d, s, n, num_slots, min_spacing, cap)
  return jax.vmap(single)(decisions, scores, tie_noise)


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


def check_sizes(num_branch_points: int, num_forks: int) -> None:
  """Refuses numbers of branch points and forks that make no sibling group.

  Raises:
    ValueError: if there is no branch point, or fewer than one fork at each.
  """
  checks.at_least('num_branch_points', num_branch_points, 1, ' (M)')
  checks.at_least('num_forks', num_forks, 1, ' (K - 1: a group of K < 2 '
                  'siblings has nothing to compare)')

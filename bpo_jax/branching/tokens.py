"""Branch policies that look at single tokens, or draw their decisions.

They fork at any token of an action, not at its first alone, unless they say
otherwise.
"""

import math
from typing import Literal

import chex
import jax.numpy as jnp

from bpo_jax import checks
from bpo_jax import masked
from bpo_jax import tree as tree_lib
from bpo_jax import types
from bpo_jax import walks
from bpo_jax.branching import decisions as decisions_lib
from bpo_jax.branching import trajectories

Variant = Literal['released', 'paper']


def appo_score(tree: tree_lib.Tree, *,
               current_log_probs: chex.Array | None = None,
               whitespace_mask: chex.Array | None = None,
               variant: Variant = 'released',
               influence_decay: float | None = None,
               num_branch_points: int = 8, num_forks: int = 1,
               birth: chex.Numeric | None = 0,
               key: chex.PRNGKey | None = None) -> types.BranchPlan:
  """Forks after tokens that are uncertain and whose future gained weight.

  BS_i = Z(H_i) Z(Omega_i), both z-scored within the trajectory,
  Omega_i = clip(exp(clip(sum_{j >= i} gamma^(j - i) d_j, -20, 20)), 0.8, 1.2),
  d = log pi_current - log pi_behaviour over the trajectory's action tokens.
  Candidates need both z > 0. The M best of all the task's trajectories are
  kept, and the fork starts at the next action token of the trajectory.

  Where Omega is constant over a trajectory, as it is for a policy that has not
  been updated since, it tells nothing; there BS_i = Z(H_i) and candidates need
  Z(H_i) > 0. That is our reading: the product would leave no candidate.

  Args:
    tree: [B, N, T].
    current_log_probs: [B, N, T] float32 nats, of the tokens under the policy as
      it is now; None for the one that drew them. Read at action tokens alone.
    whitespace_mask: [B, N, T] bool, tokens of white space alone, which are
      skipped; None for none.
    variant: 'released', the code, which has gamma = 1 and scores before any
      update, so that Omega measures how sampler and learner differ; or 'paper',
      gamma = 2^(-1/64) under the policy of the current minibatch.
    influence_decay: gamma, by which a later token counts less, per token; None
      for the variant's.
    num_branch_points: M, at most so many branch points a tree.
    num_forks: forks at each.
    birth: the stage whose nodes are eligible, 0 for first trajectories; None
      for all.
    key: a typed key to break ties at random; None for the first in order.

  Returns:
    BranchPlan [B, M] in the order of choice.

  Raises:
    ValueError: if a size or the variant is out of range, or an array of
      another shape.

  References:
    Agentic Procedural Policy Optimization (arXiv 2606.12384); the released code
    exact, the paper restated.
  """
  checks.one_of('variant', variant, Variant)
  decisions_lib.check_sizes(num_branch_points, num_forks)
  if influence_decay is None:
    influence_decay = 1.0 if variant == 'released' else 2 ** (-1 / 64)
  checks.between('influence_decay', influence_decay, 0, 1)
  laid_out = trajectories.lay_out(tree)
  for name, array in (('current_log_probs', current_log_probs),
                      ('whitespace_mask', whitespace_mask)):
    if array is not None:
      checks.shape(name, array, tree.tokens.shape)
  scores, candidates = _appo_scores(
      tree, laid_out, current_log_probs, influence_decay)
  if whitespace_mask is not None:
    candidates &= ~trajectories.read(laid_out, whitespace_mask, tree)
  # A fork starts one token on, and keeps the token that earned it.
  scores, candidates = (
      trajectories.put_back(
          laid_out, trajectories.one_on(x, laid_out.number), tree)
      for x in (scores, candidates))
  decisions = decisions_lib.find(tree, birth, 'token')
  decisions = decisions.replace(mask=decisions.mask & candidates)
  return decisions_lib.best(
      decisions, scores, num_branch_points, num_forks, key=key)


def _appo_scores(tree, laid_out, current_log_probs, influence_decay):
  """Returns BS and the candidates, [B, L] each."""
  number = laid_out.number
  z_entropy = trajectories.whiten(
      trajectories.read(laid_out, tree.entropies, tree), number)
  if current_log_probs is None:
    return jnp.round(z_entropy, 5), z_entropy > 0
  log_ratio = trajectories.read(
      laid_out, current_log_probs - jnp.asarray(tree.behaviour_log_probs), tree)
  future = trajectories.discounted_to_end(log_ratio, number, influence_decay)
  omega = jnp.clip(jnp.exp(jnp.clip(future, -20, 20)), 0.8, 1.2)
  z_omega = jnp.where(trajectories.is_constant(omega, number), 1,
                      trajectories.whiten(omega, number))
  # Short trajectories have equal scores, which rounding must not tell apart.
  return jnp.round(z_entropy * z_omega, 5), (z_entropy > 0) & (z_omega > 0)


def tree_grpo_random(tree: tree_lib.Tree, *, num_branch_points: int = 4,
                     max_per_backbone: int | None = 2, num_forks: int = 1,
                     birth: chex.Numeric | None = None,
                     key: chex.PRNGKey | None = None) -> types.BranchPlan:
  """Forks at nodes drawn at random, N in each of the task's trees.

  A task's trees are what hangs below each child of the root here. The state at
  the root itself is none of their nodes: a fork there would be one more tree.

  Args:
    tree: [B, N, T].
    num_branch_points: M, at most so many branch points a tree; the paper's 2
      trees with 2 nodes each make 4.
    max_per_backbone: N, at most so many branch points below one child of the
      root; None for M.
    num_forks: forks at each.
    birth: the stage whose nodes are eligible, 0 for first trajectories; None
      for all, so that every further call expands forks as well.
    key: a typed key.

  Returns:
    BranchPlan [B, M] in the order of choice.

  Raises:
    ValueError: if a size is out of range or there is no key.

  References:
    Tree-GRPO (arXiv 2509.21240); which states count as nodes is read.
  """
  checks.one_key('tree_grpo_random', key)
  decisions = decisions_lib.find(tree, birth)
  inner = decisions.position > tree_lib.num_tokens(tree)[:, :1, None]
  decisions = decisions.replace(mask=decisions.mask & inner)
  scores = decisions_lib.noise(decisions.mask.shape, key)
  decisions = _best_per_backbone(tree, decisions, scores, max_per_backbone)
  return decisions_lib.best(decisions, scores, num_branch_points, num_forks)


def treerl_surprisal(tree: tree_lib.Tree, *, num_branch_points: int = 12,
                     max_per_backbone: int | None = 2, num_forks: int = 2,
                     min_spacing: int = 0, birth: chex.Numeric | None = 0,
                     key: chex.PRNGKey | None = None) -> types.BranchPlan:
  """Forks at the tokens of highest surprisal, -log pi.

  A fork starts before the token, so that the surprising draw is drawn anew.

  Args:
    tree: [B, N, T].
    num_branch_points: M, at most so many branch points a tree.
    max_per_backbone: at most so many branch points below one child of the root;
      None for M.
    num_forks: forks at each.
    min_spacing: tokens along a path between branch points.
    birth: the stage whose nodes are eligible, 0 for first trajectories; None
      for all.
    key: a typed key to break ties at random; None for the first in order.

  Returns:
    BranchPlan [B, M] in the order of choice. With six first trajectories the
    defaults make 6 (1 + 2 * 2) = 30 leaves.

  Raises:
    ValueError: if a size is out of range.

  References:
    TreeRL (arXiv 2506.11902), restated; the sizes are read.
  """
  decisions = decisions_lib.find(tree, birth, 'token')
  scores = tree_lib.surprisal(tree)
  decisions = _best_per_backbone(
      tree, decisions, scores, max_per_backbone, key)
  return decisions_lib.best(
      decisions, scores, num_branch_points, num_forks, min_spacing, key)


def spo_cutpoints(tree: tree_lib.Tree, *, cutpoints_per_segment: int = 5,
                  cutpoint_probability: float = 0.9,
                  num_branch_points: int = 6, num_forks: int = 5,
                  max_per_path: int | None = 1,
                  birth: chex.Numeric | None = None) -> types.BranchPlan:
  """Forks where every path has gone through so many cutpoints since it forked.

  A cutpoint is a token of probability below a threshold. A segment ends with
  the m-th cutpoint since the last cut, and the fork starts at the next action
  token. Where a path branched last was a cut, so that a state is never forked
  twice and every further call of the policy lays one more level below all that
  is there, first trajectories included. First cuts come before later ones.

  The 6-6-6 tree is six first trajectories and two calls with M = 36: six cuts
  of five forks, then 36 of them, 216 leaves.

  Args:
    tree: [B, N, T].
    cutpoints_per_segment: m, cutpoints of a segment.
    cutpoint_probability: a token is a cutpoint if it was less likely.
    num_branch_points: M, at most so many branch points a tree.
    num_forks: forks at each.
    max_per_path: at most so many branch points on one path; None for M.
    birth: the stage whose nodes are eligible, 0 for first trajectories; None
      for all, so that every further call expands forks as well.

  Returns:
    BranchPlan [B, M]: first cuts, then second ones.

  Raises:
    ValueError: if a size is out of range.

  References:
    SPO-tree (arXiv 2505.23564), restated; on which side of its last cutpoint a
    segment ends is read.
  """
  checks.whole('cutpoints_per_segment', cutpoints_per_segment)
  checks.positive('cutpoint_probability', cutpoint_probability)
  checks.between('cutpoint_probability', cutpoint_probability, 0, 1)
  laid_out = trajectories.lay_out_segments(tree)
  surprising = tree_lib.surprisal(tree) > -jnp.log(cutpoint_probability)
  cutpoint = trajectories.read(laid_out, surprising, tree).astype(jnp.float32)
  count = _count_up_to(cutpoint, laid_out.number)
  is_last = (cutpoint > 0) & (count % cutpoints_per_segment == 0)
  # The first action token of a segment is nowhere: it was forked already.
  is_cut, number = (
      trajectories.put_back(
          laid_out, trajectories.one_on(x, laid_out.number), tree)
      for x in (is_last, count))
  decisions = decisions_lib.find(tree, birth, 'token')
  decisions = decisions.replace(mask=decisions.mask & is_cut)
  return decisions_lib.best(
      decisions, -number, num_branch_points, num_forks,
      max_per_path=max_per_path)


def sipo(tree: tree_lib.Tree, *, sibling_penalty: float = 1.0,
         unit: decisions_lib.Unit = 'token', num_branch_points: int = 4,
         num_forks: int = 2, min_spacing: int = 0,
         birth: chex.Numeric | None = 0, key: chex.PRNGKey | None = None
         ) -> types.BranchPlan:
  """Forks at surprising tokens that have few siblings yet.

  score = Z(-log pi) - lambda Z(siblings), both z-scored over the candidates of
  the tree; the siblings of a decision are the other continuations of its state
  that are there already.

  Args:
    tree: [B, N, T].
    sibling_penalty: lambda, how much siblings count against surprisal, in
      standard deviations of each.
    unit: 'token', every token of an action is a candidate, or 'action', its
      first alone, with the surprisal of the whole action.
    num_branch_points: M, at most so many branch points a tree.
    num_forks: B > 1, fresh continuations at each.
    min_spacing: tokens along a path between branch points.
    birth: the stage whose nodes are eligible, 0 for first trajectories; None
      for all.
    key: a typed key to break ties at random; None for the first in order.

  Returns:
    BranchPlan [B, M] in the order of choice.

  Raises:
    ValueError: if a size or the unit is out of range.

  References:
    SIPO (arXiv 2609.34805), restated; that siblings are z-scored as well, and
    over one tree, is read.
  """
  checks.whole('num_forks', num_forks, 2,
               ' (B > 1 fresh continuations of every decision)')
  checks.between('sibling_penalty', sibling_penalty, -math.inf)
  decisions = decisions_lib.find(tree, birth, unit)
  surprisal = tree_lib.surprisal(tree, unit)
  siblings = walks.at_parent(tree_lib.num_children(tree), tree.parents) - 1
  at_start = jnp.arange(tree.tokens.shape[-1]) == 0
  siblings = jnp.where(at_start, siblings[..., None], 0).astype(jnp.float32)
  scores = (_whiten(surprisal, decisions.mask)
            - sibling_penalty * _whiten(siblings, decisions.mask))
  return decisions_lib.best(
      decisions, scores, num_branch_points, num_forks, min_spacing, key)


def _whiten(values, mask):
  return masked.whiten(values, mask, axis=(1, 2), epsilon=1e-6)


def _count_up_to(marked, number):
  """Returns how many tokens of a sequence are marked so far, [B, L]."""
  from_here = trajectories.discounted_to_end(marked, number)
  return trajectories.sums(marked, number) - from_here + marked


def _best_per_backbone(tree, decisions, scores, max_per_backbone, key=None):
  """Returns the decisions that are among the best below a child of the root."""
  if max_per_backbone is None:
    return decisions
  decisions_lib.check_most('max_per_backbone', max_per_backbone)
  below_root = jnp.asarray(tree.parents) == 0
  backbone = walks.nearest_above(below_root, tree.parents)
  flat = lambda x: jnp.broadcast_to(
      x, scores.shape).reshape(scores.shape[0], -1)
  rank = trajectories.rank(
      flat(jnp.where(decisions.mask, scores, -jnp.inf)),
      flat(backbone[..., None]),
      flat(decisions_lib.noise(scores.shape, key)))
  is_best = rank.reshape(scores.shape) < max_per_backbone
  return decisions.replace(mask=decisions.mask & is_best)

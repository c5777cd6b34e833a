"""Credit of the systems that fork first trajectories and contrast the forks.

They train on rows (`rows`): first trajectories, and forks from their branch
points on. Where credit goes by row the root, which holds the prompt, weighs 0.
"""

import math
from typing import Literal

import chex
import jax
import jax.numpy as jnp

from bpo_jax import checks
from bpo_jax import masked
from bpo_jax import returns
from bpo_jax import tree as tree_lib
from bpo_jax import types
from bpo_jax import walks
from bpo_jax.advantages import common
from bpo_jax.advantages import rows

Contrast = Literal['surrogate', 'logistic_margin']

_MIN_SPREAD = 1e-6  # Below it the contrasts of a batch do not differ.


def cbpo(tree: tree_lib.Tree, *, cbv_clip: float = 0.5, cbv_scale: float = 0.2,
         epsilon: float = 1e-6,
         path_weighting: common.PathWeighting = 'sequence') -> types.Credit:
  """Contrastive Branch Policy Optimization: GRPO, more where forks disagree.

  With A the group-relative advantage of a row among all leaves of its tree, and
  CBV(p) the population standard deviation of the returns of the rows that leave
  branch point p, one a child,
    C = clip(Z(p), -cbv_clip |A|, cbv_clip |A|),
    A_final(p) = A + cbv_scale sign(A) C,
  Z being the z-score of CBV over all branch points of the BATCH (0 where they
  do not differ). The sign of A never changes. A row with branch points b_1, ..,
  b_J behind the prefix that it copies gets, m_j being the mean of A over the
  rows that leave b_j,
    A                             if it neither has nor leaves a branch point,
    m_1                           before b_1, on a first trajectory,
    (A_final(b_j) + m_{j+1}) / 2  between b_j and b_{j+1},
    A_final(b_J)                  behind the last.
  A fork is such a row whose b_0 is the point it leaves: A_final(b_0) to its
  end, or to the point where it is forked itself (our extension).

  Args:
    tree: [B, N, T].
    cbv_clip: how much of a token's own |advantage| the branch contrast of CBPO
      may reach before it is scaled; not negative.
    cbv_scale: factor on the clipped branch contrast of CBPO; not negative.
    epsilon: added to the standard deviation; reward units.
    path_weighting: 'token', every token of a path weighs 1, or 'sequence', it
      weighs 1 / (number of action tokens of the path), here of the
      row; 'sequence' is the paper's mean per sequence.

  Returns:
    Credit; 0 for trees of one leaf or of equal returns. Trees of a batch depend
    on each other through Z alone. A row is a first trajectory or a fork without
    what came before it: its tokens weigh 1 together ('sequence') or each
    ('token'), those of the root 0.

  Raises:
    ValueError: if an option is unknown or negative.

  References:
    Contrastive Branch Policy Optimization (arXiv 2608.24300); exact. That Z
    divides by the population's standard deviation is read, and so are the clip
    and KL weight that `algorithms` steps with, 0.2 and 0.001: the paper gives
    none.
  """
  checks.between('cbv_clip', cbv_clip, 0)
  checks.between('cbv_scale', cbv_scale, 0)
  weights = _row_weights(tree, path_weighting)
  values, leaf = returns.centred_leaf_returns(tree), tree_lib.is_leaf(tree)
  end = rows.ahead(tree, leaf)
  base = common.take(_group_relative(values, leaf, epsilon), end)
  z = _branch_contrast(tree, common.take(values, end))
  limit = cbv_clip * jnp.abs(base)
  contrast = jnp.clip(walks.at_parent(z, tree.parents), -limit, limit)
  final = base + cbv_scale * jnp.sign(base) * contrast
  mean = rows.mean_of_children(tree, base)

  left = walks.nearest_above(rows.leaves_branch_point(tree), tree.parents)
  ahead = rows.ahead(tree, rows.is_branch_point(tree))
  behind, before = common.take(final, left), common.take(mean, ahead)
  advantages = jnp.where(
      left < 0, jnp.where(ahead < 0, base, before),
      jnp.where(ahead < 0, behind, (behind + before) / 2))
  return _row_credit(tree, advantages, weights)


def appo(tree: tree_lib.Tree, *, epsilon: float = 1e-6) -> types.Credit:
  """Agentic Procedural Policy Optimization: forks tell where credit belongs.

  First trajectories and forks are two separate groups of GRPO, A_init and
  A_branch. A token t of a first trajectory gets
    A(t) = A_init + mean of A_branch over its forks split at or after t,
  the second term being 0 where none is. Forks of forks count as forks of the
  first trajectory (read).

  Args:
    tree: [B, N, T].
    epsilon: added to the standard deviation; reward units.

  Returns:
    Credit; every token of a first trajectory weighs 1, tokens of forks weigh 0:
    they do not enter the actor loss. 0 for groups of one or of equal returns.

  References:
    Agentic Procedural Policy Optimization (arXiv 2606.12384); exact by the
    released code.
  """
  values, leaf = returns.centred_leaf_returns(tree), tree_lib.is_leaf(tree)
  first = rows.on_first_trajectory(tree)
  initial = _group_relative(values, leaf & first, epsilon)
  branch = _group_relative(values, leaf & ~first, epsilon)
  total = walks.sum_below(branch, tree.parents)
  count = walks.sum_below((leaf & ~first).astype(jnp.float32), tree.parents)
  advantages = (common.take(initial, rows.ahead(tree, leaf))
                + masked.divide(total, count))
  return _row_credit(tree, advantages, first.astype(jnp.float32))


def arpo_soft(tree: tree_lib.Tree, *, epsilon: float = 1e-6) -> types.Credit:
  """Agentic Reinforced Policy Optimization, soft: GRPO over the leaves.

  Every leaf's path is a row of its own with its group-relative advantage. At
  ratio 1 the d rows through a shared token add up to d times the mean of their
  advantages: the direction of `arpo_hard`, at d times its weight. Away from
  ratio 1 the rows are clipped one by one, by the sign of each, where the tree
  clips the token once, by the sign of the mean.

  Args:
    tree: [B, N, T].
    epsilon: added to the standard deviation; reward units.

  Returns:
    Credit; a token weighs the number of leaves at or below it.

  References:
    Dong et al. 2025, Agentic Reinforced Policy Optimization, soft advantage
    estimation (arXiv 2507.19849); restated.
  """
  values, leaf = returns.centred_leaf_returns(tree), tree_lib.is_leaf(tree)
  return common.path_credit(tree, _group_relative(values, leaf, epsilon))


def arpo_hard(tree: tree_lib.Tree, *, epsilon: float = 1e-6) -> types.Credit:
  """Agentic Reinforced Policy Optimization, hard: shared tokens get the mean.

  A token shared by d leaves gets 1 / d sum_i A_i, A_i being the group-relative
  advantage of leaf i, and is trained once. Advantages are those of `arpo_soft`;
  what differs is that a shared token does not count d times.

  Args:
    tree: [B, N, T].
    epsilon: added to the standard deviation; reward units.

  Returns:
    Credit; every token weighs 1.

  References:
    Dong et al. 2025, Agentic Reinforced Policy Optimization, hard advantage
    estimation (arXiv 2507.19849); restated, the weight read.
  """
  shared = arpo_soft(tree, epsilon=epsilon).advantages
  once = jnp.asarray(tree.node_mask, jnp.float32)
  return common.credit(tree, shared, common.per_token(tree, once))


def branpo(tree: tree_lib.Tree, *, success_threshold: float = 0.8,
           epsilon: float = 1e-6) -> types.Credit:
  """Branching Relative Policy Optimization: contrast the tails of a prefix.

  A base is a first trajectory up to its first branch point; its tail from there
  on is one of its branches. A fork is kept where it contrasts with the tail it
  competes with, the row of its parent's first child:
  * one of them succeeds and the other fails: the winner is chosen;
  * both succeed after different numbers of actions, and of the task's first
    trajectories more than half succeed but not all: the shorter is chosen.
  The other of such a pair is rejected. A base's reward is the mean return of
  its own tail and the kept forks. Bases form one group of GRPO, own tails and
  kept forks of the task another. Redundant-step masking: the first action of a
  rejected branch gets 0 where its advantage is positive.

  A child of the root of a later birth is a fork at the root, and no first
  trajectory. It competes with the first of these, whichever it was forked for,
  and that one's base is empty (read).

  A first trajectory without branch point is a base to its end (read; the
  released code cuts it two steps before). The released code stops at the first
  fork that contrasts; here all that contrast are kept, and a tail that loses to
  one of them is rejected (read). Success need not be equal to the last digit
  (read).

  Args:
    tree: [B, N, T].
    success_threshold: a return of at least this is a success; reward units.
    epsilon: added to the standard deviation; reward units.

  Returns:
    Credit; every token of first trajectories and of kept forks weighs 1, tokens
    of the other forks 0. A masked action keeps its weight, so it counts in the
    denominator of the loss. 0 for groups of one or of equal returns.

  References:
    Zhao et al. 2026, BranPO (arXiv 2602.03719); exact by the released code
    where not said to be read.
  """
  checks.between('success_threshold', success_threshold, -math.inf)
  values, leaf = returns.centred_leaf_returns(tree), tree_lib.is_leaf(tree)
  end = rows.ahead(tree, leaf)
  forks, tails = _forks_and_tails(tree)
  kept, rejected = _preferences(tree, end, forks, tails, success_threshold)
  fork = walks.nearest_above(forks, tree.parents)
  used = jnp.where(fork < 0, tree.parents >= 0, common.take(kept, fork))
  member = walks.nearest_above(tails, tree.parents)
  start = (tree.parents == 0) & ~forks
  base = _group_relative(
      _base_rewards(tree, values, leaf & used, start), start, epsilon)
  branch = _group_relative(values, leaf & used & (member >= 0), epsilon)

  base = common.take(base, walks.nearest_above(start, tree.parents))
  branch = common.take(branch, end)
  redundant = common.take(rejected, member) & (branch > 0)
  advantages = jnp.where(
      redundant[..., None] & _in_first_action(tree, tails), 0,
      common.per_token(tree, jnp.where(member < 0, base, branch)))
  weights = common.per_token(tree, used.astype(jnp.float32))
  return common.credit(tree, advantages, weights)


def gcpo(tree: tree_lib.Tree, *, golden: chex.Array | None = None,
         success_threshold: float = 0.5, contrast: Contrast = 'surrogate',
         contrast_beta: float = 1.0, epsilon: float = 1e-6) -> types.Credit:
  """Group Contrastive Policy Optimization: a golden path where all fail.

  With F rollouts of a tree, the golden path being none of them,
    A_i = (R_i - mean(R)) / (std(R) + epsilon)   if a rollout succeeds,
    A_i = -c / F and A_golden = +c               if all of them fail.
  With length-normalised weights the first-order effect of the second is to
  raise the margin m = (1 / |o|) log pi(golden) less the mean over the failures
  of the same: c = 1 for its own sake ('surrogate'), and c = beta sigmoid(-beta
  m), the slope of log sigmoid(beta m), to raise that ('logistic_margin'), which
  lets go of a task once its golden path is likelier than the failures.
  Several golden paths share the +c. A tree without a golden path, or without a
  rollout, has nothing to contrast: it gets 0 where all fail.

  Args:
    tree: [B, N, T]; golden paths are children of the root like others, with
      `behaviour_log_probs` from teacher forcing at the start of the update.
      These bound the step; they are no importance correction for the teacher.
    golden: [B, N] bool, True for the nodes of the golden trajectory; only
      leaves are read, and its rewards are not.
    success_threshold: a return of at least this is a success; reward units.
    contrast: what is raised where all fail, 'surrogate' or 'logistic_margin'.
    contrast_beta: beta of the logistic margin, per nat.
    epsilon: added to the standard deviation; reward units.

  Returns:
    Credit; a token weighs the sum over the paths through it of 1 / (number of
    action tokens of the path). The golden path weighs 0 where a rollout
    succeeds.

  Raises:
    ValueError: if `golden` is None or the contrast is unknown.

  References:
    Group Contrastive Policy Optimization; read, from its abstract alone.
  """
  checks.one_of('contrast', contrast, Contrast)
  checks.given('golden', golden, 'gcpo',
               'a [B, N] bool array that marks the golden trajectory')
  checks.shape('golden', golden, tree.parents.shape)
  checks.between('contrast_beta', contrast_beta, 0)
  checks.between('success_threshold', success_threshold, -math.inf)
  leaf = tree_lib.is_leaf(tree)
  teacher = leaf & jnp.asarray(golden, bool)
  rollout = leaf & ~teacher
  succeeds = rollout & (returns.path_returns(tree) >= success_threshold)
  failed = ~jnp.any(succeeds, axis=-1, keepdims=True)
  relative = _group_relative(
      returns.centred_leaf_returns(tree), rollout, epsilon)
  signs = _signs(teacher, rollout)
  if contrast == 'logistic_margin':
    margin = jnp.sum(signs * _mean_log_probs(tree), axis=-1, keepdims=True)
    signs = signs * contrast_beta * jax.nn.sigmoid(-contrast_beta * margin)
  return common.path_credit(
      tree, jnp.where(failed, signs, relative), 'sequence',
      rollout | (teacher & failed))


def _mean_log_probs(tree):
  """Returns (1 / |o|) log pi(o) of the path to every node, [B, N], nats."""
  mask = jnp.asarray(tree.action_mask)
  of_node = masked.sum(tree.behaviour_log_probs, mask, axis=-1)
  total, length = (walks.sum_above(x, tree.parents)
                   for x in (of_node, masked.count(mask, axis=-1)))
  return masked.divide(total, length)


def _signs(teacher, rollout):
  """Returns +1 shared by the teacher's leaves and -1 by the rollouts'."""
  golden, failures = (
      masked.divide(mask, masked.count(mask, axis=-1, keepdims=True))
      for mask in (teacher, rollout))
  pair = (jnp.any(teacher, axis=-1, keepdims=True)
          & jnp.any(rollout, axis=-1, keepdims=True))
  return masked.fill(golden - failures, pair)


def _group_relative(values, member, epsilon):
  """Returns (x - mean(x)) / (std(x) + epsilon) over the members of a tree."""
  return masked.whiten(values, member, axis=-1, epsilon=epsilon, ddof=1)


def _branch_contrast(tree, values):
  """Returns Z(CBV) over the branch points of the batch, [B, N]."""
  mean = walks.at_parent(rows.mean_of_children(tree, values), tree.parents)
  variance = rows.mean_of_children(tree, jnp.square(values - mean))
  cbv = jnp.sqrt(variance)
  point = rows.is_branch_point(tree)
  spread = masked.std(cbv, point)
  z = masked.divide(cbv - masked.mean(cbv, point),
                    jnp.where(spread < _MIN_SPREAD, 0, spread))
  return masked.fill(z, point)


def _row_weights(tree, path_weighting):
  """Returns what every token of a node weighs by its row, [B, N]."""
  checks.one_of('path_weighting', path_weighting, common.PathWeighting)
  if path_weighting == 'token':
    return jnp.asarray(tree.node_mask, jnp.float32)
  return masked.divide(1.0, rows.length(tree))


def _row_credit(tree, advantages, weights):
  """Returns the credit of [B, N] arrays; the root weighs 0."""
  weights = masked.fill(weights, tree.parents >= 0)
  return common.credit(tree, common.per_token(tree, advantages),
                       common.per_token(tree, weights))


def _forks_and_tails(tree):
  """Returns where forks, and where all that compete start, [B, N] bool each.

  As in `rows`, and at the root, where a later birth tells a fork.
  """
  top = tree.parents == 0
  late = top & (tree.birth > 0)
  own = top & common.is_incumbent(tree) & tree_lib.is_first_child(tree)
  return rows.is_fork(tree) | late, rows.leaves_branch_point(tree) | late | own


def _base_rewards(tree, values, leaf, start):
  """Returns the mean over the leaves of each base, [B, N] at its start.

  Those of forks at the root are leaves of the root's first child.
  """
  late = (tree.parents == 0) & ~start
  heir = tree_lib.is_first_child(tree)

  def below(x):
    x = walks.sum_below(masked.fill(x, leaf), tree.parents)
    of_late = walks.sum_of_children(x, tree.parents, late)
    return x + masked.fill(walks.at_parent(of_late, tree.parents), heir)
  return masked.divide(below(values), below(leaf.astype(jnp.float32)))


def _preferences(tree, end, fork, tails, success_threshold):
  """Returns which forks are kept, and which branches are rejected, [B, N]."""
  leaf = tree_lib.is_leaf(tree)
  success = leaf & (returns.path_returns(tree) >= success_threshold)
  steps = tree_lib.actions_through(tree)
  first = walks.nearest_above(fork, tree.parents) < 0
  accuracy = masked.mean(
      success.astype(jnp.float32), leaf & first & (tree.parents >= 0),
      axis=-1, keepdims=True)
  by_length = (accuracy > 0.5) & (accuracy < 1)

  rival = common.take(end, walks.at_parent(
      tree_lib.first_child(tree), tree.parents, -1))
  wins, rival_wins = common.take(success, end), common.take(success, rival)
  gain = common.take(steps, rival) - common.take(steps, end)
  both = wins & rival_wins & by_length
  chosen = fork & ((wins & ~rival_wins) | (both & (gain > 0)))
  lost = fork & ((~wins & rival_wins) | (both & (gain < 0)))
  beaten = walks.sum_of_children(
      chosen.astype(jnp.int32), tree.parents, fork) > 0
  own = tails & ~fork
  return chosen | lost, lost | (own & walks.at_parent(beaten, tree.parents))


def _in_first_action(tree, tails):
  """Returns [B, N, T] bool, True in the first action of a tail."""
  starts = tree_lib.action_starts(tree)
  actions = jnp.sum(starts, axis=-1, dtype=jnp.int32)
  done = rows.since(tails, actions, tree.parents)
  number = (done - actions)[..., None] + jnp.cumsum(starts, axis=-1)
  return number == 1

"""What branching buys: told from a batch of ordinary trees, before a run.

A return is drawn in steps, and each step decides a part of it. What the prefix
has decided, branching removes from the noise of what comes after; what it has
not decided, forks average out, and the later they start the less they cost.
`report` measures both from trees with some forks, `variance_ratio` says what a
way to branch would make of it, and `recommend` picks one.
"""

from collections.abc import Sequence
import dataclasses
import itertools
from typing import Any, Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from bpo_jax import checks
from bpo_jax import masked
from bpo_jax import predictors
from bpo_jax import returns
from bpo_jax import tree as tree_lib
from bpo_jax import types
from bpo_jax import walks
from bpo_jax.advantages import common

Finished = Literal['explained', 'excluded']


@chex.dataclass(frozen=True, mappable_dataclass=False)
class Shares:
  """What prefixes explain of the return variance, in each of several bins.

  Attributes:
    share: Var(E[R | s]) / Var(R) within a task, unbiased up to the ratio's
      O(1 / trees), so that it may lie outside [0, 1]; 0 without data.
    lower: end of the interval; 0 where fewer than two trees have forks.
    upper: end of the interval; 1 where fewer than two trees have forks.
    num_groups: sibling groups that this is from.
    num_trees: trees that have them.
  """

  share: chex.Array  # [D] float32
  lower: chex.Array  # [D] float32
  upper: chex.Array  # [D] float32
  num_groups: chex.Array  # [D] int32
  num_trees: chex.Array  # [D] int32


@chex.dataclass(frozen=True, mappable_dataclass=False)
class Report:
  """The variance components of a batch of trees, and what episodes cost.

  Attributes:
    total: Var(R | task), reward units squared.
    num_trees: trees of at least two backbones, which that is from.
    within: E[Var(R | s_t)], reward units squared; where paths that ended count
      as explained they are in it with 0.
    between: total less within, Var(E[R | s_t] | task).
    by_depth: the shares by number of actions before the decision.
    by_entropy: the shares by entropy of the decision, low to high; of decisions
      alone, so that no finished path is among them.
    entropy_edges: nats, the bounds between those bins.
    alive: share of paths with an action at t.
    remaining: expected number of actions from t on; of all paths, those that
      ended with 0.
    information: expected squared size of the scores from t on, with respect to
      the logits: the sum over action tokens of 1 - p(token), whose mean is
      1 - sum_a p(a)^2. How much of the gradient, and of its noise, comes there.
    openness: by how much more information follows where the outcome is open,
      E[Var(R | s) I(s)] / (E[Var(R | s)] E[I(s)]); 1 without data.
    num_actions: expected number of actions of a path.
    total_information: that of all of them.
    depth_width: actions in a bin of depth; quantities are means over a bin.
  """

  total: chex.Array  # [] float32
  num_trees: chex.Array  # [] int32
  within: chex.Array  # [D] float32
  between: chex.Array  # [D] float32
  by_depth: Shares
  by_entropy: Shares
  entropy_edges: chex.Array  # [Q - 1] float32
  alive: chex.Array  # [D] float32
  remaining: chex.Array  # [D] float32
  information: chex.Array  # [D] float32
  openness: chex.Array  # [D] float32
  num_actions: chex.Array  # [] float32
  total_information: chex.Array  # [] float32
  depth_width: chex.Array  # [] int32


def group_variances(tree: tree_lib.Tree) -> types.Array:
  """Returns an unbiased estimate of Var(R | s) at every branch point.

  With m the mean of a node's leaves, each child counting alike (split mean), K
  the number of children c, S the variance of the leaves about m, counted alike,

    W = S + sum_c (m_c - m)^2 / (K (K - 1)),   S = mean_c [S_c + (m_c - m)^2].

  That is half the mean squared difference of two leaves below different
  children, sum_{c != d} E[(x - y)^2] / (2 K (K - 1)): two independent draws of
  the return given s. It needs no more than two children, uses every leaf, and
  groups may be of any size. With one leaf a child it is the usual variance with
  K - 1 below; at the root it is that of the returns within a task.

  Unbiased if how often a state is forked depends on nothing that was drawn
  after it (causal selection): then the mean over leaves of any function of the
  return has the expectation of that function given s, and leaves of different
  children are uncorrelated given s.

  Args:
    tree: [B, N, T].

  Returns:
    [B, N] float32, reward units squared; 0 for nodes of fewer than two
    children.

  References:
    The one-way random-effects model's within-group mean square, nested.
  """
  means = returns.centred_values(tree, 'split_mean')
  parents, real = jnp.asarray(tree.parents), jnp.asarray(tree.node_mask)
  squares = jnp.square(means - walks.at_parent(means, parents))
  children = tree_lib.num_children(tree).astype(jnp.float32)
  spread = masked.divide(  # mean_c (m_c - m)^2
      walks.sum_of_children(squares, parents, real), children)
  variance = returns.backup(
      spread, real.astype(jnp.float32), parents, jnp.ones_like(spread))
  return masked.fill(
      variance + masked.divide(spread, children - 1), children > 1)


def report(tree: tree_lib.Tree, *, num_depths: int = 8, depth_width: int = 4,
           num_quantiles: int = 4, finished: Finished = 'explained',
           confidence: float = 0.9) -> Report:
  """Returns how much of the return variance within a task prefixes explain.

    share_t = Var(E[R | s_t]) / Var(R) = 1 - E[Var(R | s_t)] / Var(R | task).

  Both components are means of `group_variances`: the first over the branch
  points at depth t below the root, each counting as often as a path comes
  through it, times the share of paths alive at t; the second over the roots.
  Their difference is the between-prefix component. Intervals are those of the
  delete-one-tree jackknife of the whole ratio, with Student's t: trees (tasks)
  are independent, the groups within a tree are not.

  What is forked must represent what is not: given its depth (or its entropy)
  alone, the choice of a branch point should not depend on the state. Trees that
  were forked where V(1 - V) is high report a lower share.

  Args:
    tree: [B, N, T], one task a tree; several backbones, forks at some decisions
      chosen causally.
    num_depths: D, bins of depth; all that is deeper falls into the last one.
    depth_width: actions in a bin of depth.
    num_quantiles: Q, bins of entropy, of equal numbers of decisions.
    finished: whether paths that ended before a depth count there as
      'explained', with all of their variance, or are 'excluded', so that shares
      are those among the paths that go on.
    confidence: probability that an interval covers the share.

  Returns:
    Report; 0 and a count of 0 where there is nothing to tell from, never NaN.

  Raises:
    ValueError: if an option is out of range.
  """
  _check_options(num_depths, depth_width, num_quantiles, finished, confidence)
  variances, weights = group_variances(tree), common.node_weights(tree, 'split')
  grouped = tree_lib.num_children(tree) > 1
  forked = grouped & (jnp.asarray(tree.parents) >= 0)
  paths = _paths(tree, weights, num_depths * depth_width)
  exact = jnp.arange(num_depths * depth_width).reshape(num_depths, depth_width)
  alive = jnp.mean(paths.alive[:, exact], axis=-1)  # [B, D]
  has_root = grouped[:, 0]
  root = variances[:, :1], has_root.astype(jnp.float32)[:, None]
  total = root
  if finished == 'excluded':
    total = _totals_alive(tree, weights, exact[:, 0])
    alive = jnp.ones_like(alive)
  depth = jnp.minimum(
      predictors.actions_through(tree) // depth_width, num_depths - 1)
  ahead = _information_below(tree)
  by_depth = _binned(variances, weights, ahead, forked, depth, num_depths)
  real = jnp.asarray(tree.node_mask)[:, 0]
  depth_shares, within = _shares(by_depth, alive, total, real, confidence)
  entropy, edges = _entropy_bins(tree, weights, num_quantiles)
  by_entropy = _binned(
      variances, weights, ahead, forked & (entropy >= 0), entropy,
      num_quantiles)
  entropy_shares, _ = _shares(
      by_entropy, jnp.ones((len(real), 1)), root, real, confidence)
  overall, against = (
      masked.divide(*(jnp.sum(x, axis=0) for x in t)) for t in (root, total))
  paths = jax.tree.map(lambda x: masked.mean(x, real[:, None], 0), paths)
  average = lambda x: jnp.mean(x[exact], axis=-1)
  information = average(paths.information)
  return Report(
      total=overall[0], num_trees=jnp.sum(has_root, dtype=jnp.int32),
      within=within,
      between=masked.fill(against - within, depth_shares.num_groups > 0),
      by_depth=depth_shares, by_entropy=entropy_shares, entropy_edges=edges,
      alive=average(paths.alive), remaining=average(paths.remaining),
      information=information, openness=_openness(by_depth, information),
      num_actions=paths.remaining[0], total_information=paths.information[0],
      depth_width=jnp.asarray(depth_width, jnp.int32))


class _Bins(NamedTuple):
  """Sums over the branch points of each tree in each bin."""

  weighted: chex.Array  # [B, D] float32, of weight times variance
  weight: chex.Array  # [B, D] float32
  information: chex.Array  # [B, D] float32, of weight, variance, what follows
  num_groups: chex.Array  # [B, D] int32


class _Paths(NamedTuple):
  """What the paths of each tree do at and after every exact depth."""

  alive: chex.Array  # [B, L] float32
  remaining: chex.Array  # [B, L] float32
  information: chex.Array  # [B, L] float32


def _check_options(num_depths, depth_width, num_quantiles, finished,
                   confidence):
  checks.at_least('num_depths', num_depths, 1)
  checks.at_least('depth_width', depth_width, 1)
  checks.at_least('num_quantiles', num_quantiles, 1)
  checks.one_of('finished', finished, Finished)
  if not 0 < confidence < 1:
    raise ValueError(
        f'confidence: expected a number between 0 and 1, got {confidence}')


def _paths(tree, weights, num_depths):
  """Returns what paths do, weighing each by the odds that `split` gives it."""
  starts = tree_lib.action_starts(tree)
  through = predictors.actions_through(tree)
  own = jnp.sum(starts, axis=-1, dtype=jnp.int32)
  begun = jnp.cumsum(starts, axis=-1, dtype=jnp.int32)
  # Tokens of an action have as many actions before them as its first one.
  depth = jnp.maximum((through - own)[..., None] + begun - 1, 0)
  action = jnp.asarray(tree.action_mask)
  weights = jnp.broadcast_to(weights[..., None], action.shape)
  flat = lambda x: x.reshape(x.shape[0], -1)

  def single(index, mask, values):
    values = masked.fill(values, mask)
    return jnp.zeros(num_depths + 1).at[
        jnp.minimum(index, num_depths)].add(values)

  histogram = lambda mask, values: jax.vmap(single)(
      flat(depth), flat(mask), flat(values))
  alive = histogram(starts, weights)
  information = histogram(action, weights * _information(tree))
  from_on = lambda x: jnp.cumsum(x[:, ::-1], axis=-1)[:, ::-1][:, :-1]
  return _Paths(alive=alive[:, :-1], remaining=from_on(alive),
                information=from_on(information))


def _totals_alive(tree, weights, depths):
  """Returns Var(R | task, alive at t) as pairs of paths, [B, D] each.

  Half the mean squared difference of two leaves below different children of the
  root, both of paths with an action at t.
  """
  leaf = tree_lib.is_leaf(tree)
  values = returns.centred_leaf_returns(tree)
  values = values - returns.centred_values(tree, 'split_mean')[:, :1]
  through, parents = predictors.actions_through(tree), jnp.asarray(tree.parents)
  top = parents == 0

  def pairs(depth):
    alive = masked.fill(weights, leaf & (through > depth))
    by_child = lambda x: masked.fill(walks.sum_below(x, parents), top)
    mass, first, second = (
        by_child(alive * jnp.where(leaf, x, 0))
        for x in (jnp.ones_like(values), values, jnp.square(values)))
    others = jnp.sum(mass, -1, keepdims=True) - mass
    cross = jnp.square(jnp.sum(first, -1)) - jnp.sum(jnp.square(first), -1)
    return jnp.sum(second * others, -1) - cross, jnp.sum(mass * others, -1)

  return jax.vmap(pairs, out_axes=1)(depths)


def _binned(variances, weights, ahead, mask, index, num_bins):
  """Returns sums over the branch points of each bin."""
  def single(values, index):
    return jnp.zeros(num_bins, values.dtype).at[index].add(values)
  gather = lambda x: jax.vmap(single)(
      masked.fill(x, mask), jnp.maximum(index, 0))
  weighted = weights * variances
  return _Bins(weighted=gather(weighted), weight=gather(weights),
               information=gather(weighted * ahead),
               num_groups=gather(mask.astype(jnp.int32)))


def _information(tree):
  """Returns the expected squared score of every action token, [B, N, T]."""
  action = jnp.asarray(tree.action_mask)
  log_probs = masked.fill(jnp.asarray(tree.behaviour_log_probs), action)
  return masked.fill(-jnp.expm1(log_probs), action)


def _information_below(tree):
  """Returns what follows the end of every node, [B, N], a split mean."""
  own = jnp.sum(_information(tree), axis=-1)
  votes = jnp.asarray(tree.node_mask, jnp.float32)
  below = returns.backup(own, votes, tree.parents, jnp.ones_like(own))
  return below - own


def _openness(bins, information):
  """Returns E[Var(R | s) I(s)] / (E[Var(R | s)] E[I(s)]) of every bin."""
  where_open = masked.divide(
      jnp.sum(bins.information, 0), jnp.sum(bins.weighted, 0))
  known = (where_open > 0) & (information > 0)
  return masked.fill(masked.divide(where_open, information), known, 1.0)


def _entropy_bins(tree, weights, num_quantiles):
  """Returns the bin of the decision at each node's end, or -1, and the edges.

  A bin holds the same number of decisions, each counted as often as a path
  comes through it.
  """
  decision, known = predictors.next_entropies(tree)
  mass = masked.fill(weights, known).ravel()
  order = jnp.argsort(jnp.where(known, decision, jnp.inf).ravel())
  reached = jnp.cumsum(mass[order])
  wanted = jnp.arange(1, num_quantiles) / num_quantiles * reached[-1]
  at = jnp.minimum(jnp.searchsorted(reached, wanted), len(order) - 1)
  edges = jnp.where(reached[-1] > 0, decision.ravel()[order][at], 0)
  index = jnp.sum(decision[..., None] > edges, axis=-1)
  return jnp.where(known, index, -1), edges


def _shares(bins, alive, total, real, confidence):
  """Returns the shares of all bins with their intervals, and E[Var(R | s)]."""
  parts = (bins.weighted, bins.weight, masked.fill(alive, real[:, None]),
           *total, real.astype(jnp.float32)[:, None])
  sums = [jnp.sum(part, axis=0) for part in parts]
  share, within = _share(*sums)
  without, _ = _share(*(
      jnp.maximum(s - part, 0) for s, part in zip(sums, parts)))
  num_trees = jnp.sum(bins.weight > 0, axis=0, dtype=jnp.int32)
  count = jnp.maximum(jnp.sum(real), 1)
  error = jnp.sqrt((count - 1) * masked.var(without, real[:, None], axis=0))
  reach = _student(confidence, jnp.maximum(num_trees - 1, 1)) * error
  enough = num_trees > 1
  return Shares(
      share=share, lower=jnp.where(enough, share - reach, 0.0),
      upper=jnp.where(enough, share + reach, 1.0), num_trees=num_trees,
      num_groups=jnp.sum(bins.num_groups, axis=0)), within


def _share(weighted, weight, alive, numerator, denominator, count):
  """Returns 1 - within / total from sums over trees, and within."""
  within = masked.divide(alive, count) * masked.divide(weighted, weight)
  total = masked.divide(numerator, denominator)
  known = (weight > 0) & (total > 0)
  return masked.fill(1 - masked.divide(within, total), known), within


def _student(confidence, freedom):
  """Returns Student's two-sided quantile, by its expansion about the normal."""
  z = jax.scipy.special.ndtri(0.5 + confidence / 2)
  return (z + (z ** 3 + z) / (4 * freedom)
          + (5 * z ** 5 + 16 * z ** 3 + 3 * z) / (96 * freedom ** 2))


def variance_ratio(within: Sequence[float], remaining: Sequence[float],
                   information: Sequence[float] | None = None,
                   openness: Sequence[float] | None = None, *,
                   num_siblings: int, num_backbones: int, rho: float = 0.5
                   ) -> float:
  """Returns the variance of branching over that of fresh rollouts.

  Both are of `bpo_rb` (split weights and means, shrunk baselines) and at equal
  cost; below 1, branching gains. n backbones are forked at the same M depths
  into groups of K siblings. With Var(R | task) = 1, write f_j = E[Var(R | s_j)]
  for the j-th branch point, l_j and i_j for the parts of an episode's actions
  and of its information that come after it, f_0 = l_0 = i_0 = 1 for the root,
  i_{M+1} = 0.

  A sibling's mean over leaves: a fork at j has variance f_j given s_j, the
  backbone's own continuation

    D_M = f_M,  D_{j-1} = (f_{j-1} - f_j) + (D_j + (K - 1) f_j) / K^2:

  what the actions from j - 1 to j decide, and the mean of the K siblings at j.
  A baseline's squared error about V(s_j), with L_j the variance of the
  siblings' mean, f_j / (K - 1) for the backbone and (D_j + (K - 2) f_j) /
  (K - 1)^2 for a fork, and q_0 = D_0 / (n - 1):

    q_j = rho^2 L_j + (1 - rho)^2 (q_{j-1} + f_{j-1} - f_j).

  So E[A^2] = D_j + q_j on the backbone from j to j + 1, and f_j + q'_j on a
  fork of j. This is theorem 4.3 of BPO where rho = 1 and all siblings are
  leaves: f K / (K - 1) in place of K / (K - 1), f = 1 - Var(V(s)) / Var(R).
  Scores have mean zero given their state, so steps add up: a token of weight w
  adds w^2 E[A^2] times its information. Each backbone weighs 1 / n, and 1 / K
  of that after every branch point:

    n G = sum_{j=0}^M K^{-2j} [(D_j + q_j) (i_j - i_{j+1})
                               + (K - 1) (f_j + q'_j) i_j 1(j > 0)].

  Where more information follows states of open outcome than others, the terms
  of D_j, f_j and L_j grow by o_j = E[Var(R | s) I(s)] / (E[Var(R | s)]
  E[I(s)]). Left out are other ties between scores and returns, and the square
  of the mean gradient, by which fresh rollouts are a little better than this.

  The cost is C = n [1 + (K - 1) sum_j l_j] episodes, for which root
  leave-one-out has the variance 1 / (C - 1): the ratio is G (C - 1).

  Args:
    within: [M] E[Var(R | s_j)] / Var(R | task), finished paths counting 0,
      along the depths of the branch points; none for fresh rollouts.
    remaining: [M] l_j, expected actions from there on over those of an episode.
    information: [M] i_j, the same of what the gradient comes from; None for
      `remaining`.
    openness: [M] o_j; None for 1.
    num_siblings: K, the backbone's own continuation included.
    num_backbones: n, at least 2: they are each other's baseline.
    rho: trust in the siblings against the baseline above, as in `bpo_rb`.

  Returns:
    The ratio.

  Raises:
    ValueError: if a size is out of range, or lengths differ.

  References:
    Branching Policy Optimization, theorem 4.3 (arXiv 2607.14171), restated; the
    rest is ours.
  """
  checks.at_least('num_siblings', num_siblings, 2, ' (K)')
  checks.at_least('num_backbones', num_backbones, 2,
                  ', so that they are each other\'s baseline')
  information = remaining if information is None else information
  openness = [1.0] * len(within) if openness is None else openness
  lengths = {len(x) for x in (within, remaining, information, openness)}
  if len(lengths) > 1:
    raise ValueError(f'expected one entry a branch point, got {lengths}')
  n, k = num_backbones, num_siblings
  f, i, o = [1.0, *within], [1.0, *information, 0.0], [1.0, *openness]
  own = _own_variances(f, k)
  error = own[0] / (n - 1)
  noise = (own[0] + error) * (i[0] - i[1])
  for j in range(1, len(f)):
    shrunk = (1 - rho) ** 2 * (error + f[j - 1] - f[j])
    others = (own[j] + (k - 2) * f[j]) / (k - 1) ** 2
    fork = o[j] * (f[j] + rho ** 2 * others) + shrunk
    backbone = o[j] * (own[j] + rho ** 2 * f[j] / (k - 1)) + shrunk
    noise += (backbone * (i[j] - i[j + 1])
              + (k - 1) * fork * i[j]) / k ** (2 * j)
    error = rho ** 2 * f[j] / (k - 1) + shrunk
  cost = n * (1 + (k - 1) * sum(remaining))
  return noise / n * (cost - 1)


def _own_variances(within, num_siblings):
  """Returns D_j of `variance_ratio` for every branch point, root included."""
  own = [within[-1]]
  for before, at in zip(within[-2::-1], within[:0:-1]):
    mean = (own[0] + (num_siblings - 1) * at) / num_siblings ** 2
    own.insert(0, before - at + mean)
  return own


@dataclasses.dataclass(frozen=True)
class Recommendation:
  """How to spend a budget on one task.

  Attributes:
    num_siblings: K, forks and the backbone's own continuation; 1 for no forks.
    points_per_backbone: M, branch points on each backbone; 0 for no forks.
    num_backbones: first trajectories.
    depths: actions before each branch point.
    ratio: predicted variance over that of fresh rollouts at equal cost.
    worst_ratio: that at the worse end of the shares' intervals.
    cost: what is spent, in whole episodes.
  """

  num_siblings: int
  points_per_backbone: int
  num_backbones: int
  depths: tuple[int, ...]
  ratio: float
  worst_ratio: float
  cost: float


def recommend(found: Report, num_rollouts: float, *, rho: float = 0.5,
              max_siblings: int = 8, max_points: int = 3,
              min_gain: float = 0.05) -> Recommendation:
  """Returns the way to branch of the smallest predicted variance.

  All depths that the report has data for are tried, up to `max_points` of them
  together, each with the most backbones that the budget pays for. The best one
  is recommended only if it gains over fresh rollouts at both ends of the
  shares' intervals; else the whole budget goes to fresh rollouts.

  Args:
    found: of trees as they are grown now, finished paths 'explained'.
    num_rollouts: budget of a task in whole episodes; for a budget in steps,
      divide by `found.num_actions`.
    rho: trust in the siblings, as in `bpo_rb`.
    max_siblings: largest K to try.
    max_points: most branch points on one backbone to try.
    min_gain: least predicted gain, 0.05 for a ratio of at most 0.95.

  Returns:
    Recommendation.

  Raises:
    ValueError: if the budget does not pay for one backbone, or a size is out of
      range.
  """
  checks.at_least('num_rollouts', num_rollouts, 1, ' backbone')
  checks.at_least('max_siblings', max_siblings, 2, ' (K)')
  checks.at_least('max_points', max_points, 1, ' (M)')
  found = jax.device_get(found)
  whole = int(num_rollouts)
  fresh = Recommendation(1, 0, whole, (), 1.0, 1.0, float(whole))
  bins = [d for d in range(len(found.within))
          if found.by_depth.num_trees[d] > 1 and found.alive[d] > 0]
  designs = [
      _design(found, depths, k, num_rollouts, rho)
      for m in range(1, max_points + 1)
      for depths in itertools.combinations(bins, m)
      for k in range(2, max_siblings + 1)]
  best = min((d for d in designs if d), key=lambda d: d.ratio, default=fresh)
  gains = best.ratio <= 1 - min_gain and best.worst_ratio < 1
  return best if gains else fresh


def _design(found, depths, num_siblings, budget, rho):
  """Returns what a way to branch is predicted to give; None if too dear."""
  at = np.array(depths)
  remaining = (found.remaining[at] / found.num_actions).tolist()
  information = remaining
  if found.total_information > 0:
    information = (found.information[at] / found.total_information).tolist()
  each = 1 + (num_siblings - 1) * sum(remaining)
  num_backbones = int(budget / each)
  if num_backbones < 2:
    return None

  def ratio(share):
    # Prefixes explain ever more: what they leave cannot grow with depth.
    within = np.minimum.accumulate(np.clip(1 - share[at], 0, 1)).tolist()
    return variance_ratio(
        within, remaining, information, found.openness[at].tolist(),
        num_siblings=num_siblings, num_backbones=num_backbones, rho=rho)

  shares = found.by_depth
  first = np.maximum(at * int(found.depth_width), 1)  # Not at the root.
  ratios = [ratio(s) for s in (shares.share, shares.lower, shares.upper)]
  return Recommendation(
      num_siblings, len(depths), num_backbones, tuple(first.tolist()),
      float(ratios[0]), float(max(ratios)), float(num_backbones * each))


def summary(found: Report) -> str:
  """Returns the report as a table of plain text; for the host."""
  found: Any = jax.device_get(found)
  if not found.num_trees:
    return 'no tree has two backbones: the return variance is not known'
  lines = [
      f'return variance within a task {found.total:.4g} '
      f'({found.num_trees} trees), {found.num_actions:.1f} actions a path',
      'share of it that the prefix explains',
      f'{"":>14} {"share":>6}  {"interval":<14} {"groups":>6} {"trees":>6} '
      f'{"alive":>6} {"actions left":>12}']
  width = int(found.depth_width)
  for d in range(len(found.within)):
    name = f'from action {d * width}'
    lines.append(_row(name, found.by_depth, d)
                 + f' {found.alive[d]:6.2f} {found.remaining[d]:12.1f}')
  edges = ['0', *(f'{edge:.2f}' for edge in found.entropy_edges), '']
  for q, (low, high) in enumerate(zip(edges, edges[1:])):
    name = f'{low} to {high} nats' if high else f'over {low} nats'
    lines.append(_row(name, found.by_entropy, q))
  return '\n'.join(lines)


def _row(name, shares, index):
  """Returns one line of the table."""
  counts = f'{shares.num_groups[index]:6d} {shares.num_trees[index]:6d}'
  if not shares.num_groups[index]:
    return f'{name:>14} {"-":>6}  {"":<14} {counts}'
  interval = f'[{shares.lower[index]:.2f}, {shares.upper[index]:.2f}]'
  return f'{name:>14} {shares.share[index]:6.2f}  {interval:<14} {counts}'

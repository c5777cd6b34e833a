"""Ways to branch: what each is predicted to give, and which is the best.

`variance` measures how much of a return a prefix decides. From that,
`variance_ratio` says what a way to branch would make of the gradient's noise,
`recommend` picks one for a budget, and `to_arrays` makes of it what
`branching.adaptive` spends a budget by.
"""

from collections.abc import Sequence
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from bpo_jax import checks
from bpo_jax import variance
from bpo_jax.branching import depths


def variance_ratio(within: Sequence[float], remaining: Sequence[float],
                   information: Sequence[float] | None = None,
                   openness: Sequence[float] | None = None, *,
                   num_siblings: int, num_backbones: int,
                   rho: float | Sequence[float] = 0.5) -> float:
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
    rho: trust in the siblings against the baseline above, as in `bpo_rb`: one
      for all, or one for each level, the j-th branch point's being entry j.

  Returns:
    The ratio.

  Raises:
    ValueError: if a size is out of range, or lengths differ.

  References:
    Branching Policy Optimization, theorem 4.3 (arXiv 2607.14171), restated; the
    rest is ours.
  """
  checks.whole('num_siblings', num_siblings, 2, ' (K)')
  checks.whole('num_backbones', num_backbones, 2,
               ', so that they are each other\'s baseline')
  checks.between('rho', rho, 0, 1)
  information = remaining if information is None else information
  openness = [1.0] * len(within) if openness is None else openness
  lengths = {len(x) for x in (within, remaining, information, openness)}
  if len(lengths) > 1:
    raise ValueError(f'expected one entry a branch point, got {lengths}')
  for name, numbers in (('within', within), ('remaining', remaining),
                        ('information', information), ('openness', openness)):
    checks.between(name, numbers, 0)
  n, k = num_backbones, num_siblings
  f, i, o = [1.0, *within], [1.0, *information, 0.0], [1.0, *openness]
  by_level = np.ravel(rho).tolist()
  own = _own_variances(f, k)
  error = own[0] / (n - 1)
  noise = (own[0] + error) * (i[0] - i[1])
  for j in range(1, len(f)):
    rho_j = by_level[min(j, len(by_level) - 1)]
    shrunk = (1 - rho_j) ** 2 * (error + f[j - 1] - f[j])
    others = (own[j] + (k - 2) * f[j]) / (k - 1) ** 2
    fork = o[j] * (f[j] + rho_j ** 2 * others) + shrunk
    backbone = o[j] * (own[j] + rho_j ** 2 * f[j] / (k - 1)) + shrunk
    noise += (backbone * (i[j] - i[j + 1])
              + (k - 1) * fork * i[j]) / k ** (2 * j)
    error = rho_j ** 2 * f[j] / (k - 1) + shrunk
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


def recommend(found: variance.Report, num_rollouts: float, *,
              rho: float | Sequence[float] = 0.5, max_siblings: int = 8,
              max_points: int = 3, min_gain: float = 0.05) -> Recommendation:
  """Returns the way to branch of the smallest predicted variance.

  All depths that the report has data for are tried, up to `max_points` of them
  together, each with the most backbones that the budget pays for. The best one
  is recommended only if it gains over fresh rollouts at both ends of the
  shares' intervals; else the whole budget goes to fresh rollouts.

  Args:
    found: of trees as they are grown now, finished paths 'explained'.
    num_rollouts: budget of a task in whole episodes; for a budget in steps,
      divide by `found.num_actions`.
    rho: trust in the siblings, as in `variance_ratio`.
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
  checks.between('num_rollouts', num_rollouts, 1, checks.MOST)
  checks.whole('max_siblings', max_siblings, 2, ' (K)')
  checks.whole('max_points', max_points, 1, ' (M)')
  checks.between('rho', rho, 0, 1)
  checks.between('min_gain', min_gain, 0, 1)
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
  known = (d for d in designs if d and np.isfinite(d.worst_ratio))
  best = min(known, key=lambda d: d.ratio, default=fresh)
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
  ends = np.stack([shares.share[at], shares.lower[at], shares.upper[at]])
  if not np.all(np.isfinite(ends)):
    return None  # What is not known is not taken for a gain.
  first = np.maximum(at * int(found.depth_width), 1)  # Not at the root.
  ratios = [ratio(s) for s in (shares.share, shares.lower, shares.upper)]
  return Recommendation(
      num_siblings, len(depths), num_backbones, tuple(first.tolist()),
      float(ratios[0]), float(np.max(ratios)), float(num_backbones * each))


def to_arrays(chosen: Recommendation, found: variance.Report) -> depths.Design:
  """Returns the design that `branching.adaptive` spends its budget by.

  Args:
    chosen: by `recommend`, of the same report.
    found: the report.
  """
  found = jax.device_get(found)
  width = int(found.depth_width)
  bins = np.zeros(len(found.remaining), bool)
  bins[[depth // width for depth in chosen.depths]] = True
  known = found.num_actions > 0
  costs = found.remaining / found.num_actions if known else np.ones(len(bins))
  return depths.Design(
      num_siblings=jnp.asarray(chosen.num_siblings, jnp.int32),
      bins=jnp.asarray(bins), costs=jnp.asarray(costs, jnp.float32),
      depth_width=jnp.asarray(width, jnp.int32))


def next_design(sums: variance.Sums, *, num_rollouts: int = 16,
                explore: float = 0.03, rho: float | Sequence[float] = 0.5,
                min_gain: float = 0.05) -> depths.Design:
  """Returns the design for the next update, by the trees of earlier ones.

  On the host, a few hundredths of a second for eight bins of depth; the number
  of ways to branch that are tried grows with the cube of the bins.

  Args:
    sums: by `variance.update`.
    num_rollouts: budget of a tree, as in `branching.adaptive`.
    explore: share of it that goes to forks at random depths, likewise.
    rho: trust in the siblings, as the credit will have it; see
      `variance_ratio`.
    min_gain: least predicted gain, 0.05 for a ratio of at most 0.95.

  Raises:
    ValueError: if a number is out of range.
  """
  checks.between('num_rollouts', num_rollouts, 1, checks.MOST)
  checks.between('explore', explore, 0, 1)
  found = jax.device_get(variance.report_of(sums))
  budget = max(num_rollouts * (1 - explore), 1)
  return to_arrays(recommend(found, budget, rho=rho, min_gain=min_gain), found)

"""How much of the return variance prefixes explain: told from trees with forks.

A return is drawn in steps, and each step decides a part of it. What the prefix
has decided, branching removes from the noise of what comes after; what it has
not decided, forks average out, and the later they start the less they cost.
`report` measures both from trees with some forks, or `report_of` from sums that
add up over updates; `designs` says what a way to branch would make of it, and
picks one.
"""

from typing import Any, Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp

from bpo_jax import checks
from bpo_jax import masked
from bpo_jax import predictors
from bpo_jax import returns
from bpo_jax import tree as tree_lib
from bpo_jax import types
from bpo_jax import walks
from bpo_jax.advantages import common
from bpo_jax.branching import depths

Finished = Literal['explained', 'excluded']
# Of the parts of `Sums`.
_IS_VARIANCE = (True, False, False, True, False, False)


@chex.dataclass(frozen=True, mappable_dataclass=False)
class Shares:
  """What prefixes explain of the return variance, in each of several bins.

  Attributes:
    share: Var(E[R | s]) / Var(R) within a task, unbiased up to the ratio's
      O(1 / trees), so that it may lie outside [0, 1]; 0 without data.
    lower: end of the interval; 0 where fewer than two trees tell anything.
    upper: end of the interval; 1 where fewer than two trees tell anything.
    num_groups: sibling groups that this is from.
    num_trees: trees that have them and whose returns differ.
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
  return _group_variances(tree, returns.centred_values(tree, 'split_mean'))


def _group_variances(tree, means):
  """Returns `group_variances` of the split means of every node, [B, N]."""
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
  linearised ratio over trees, with Student's t: trees (tasks) are independent,
  the groups within a tree are not.

  Only trees whose returns differ tell a share, one of large differences more
  than others: their number n is the smaller of that of such trees with forks
  there and Kish's (sum_i v_i)^2 / sum_i v_i^2, v_i the return variance in tree
  i. With n < 2 nothing is known, [0, 1]. Few trees may agree by chance, so an
  interval reaches at least as far as n draws that all agree leave open,
  1 - ((1 - confidence) / 2)^(1 / n), about 3 / n at 90%.

  What trees it is valid for: those whose branch points, given their depth, were
  chosen without a look at the state, as by `branching.adaptive`, `random` or
  coins; then what was forked represents what was not. (By entropy: given their
  entropy.) Of trees that were forked where the entropy or V(1 - V) is high, as
  by `causal_threshold` or `top_entropy`, the report is confidently wrong: it
  finds the variance of the open states alone, and a share that may be below 0.

  Args:
    tree: [B, N, T], one task a tree; several backbones, forks at some decisions
      chosen as above.
    num_depths: D, bins of depth; all that is deeper falls into the last one.
    depth_width: actions in a bin of depth.
    num_quantiles: Q, bins of entropy, of equal numbers of decisions.
    finished: whether paths that ended before a depth count there as
      'explained', with all of their variance, or are 'excluded', so that shares
      are those among the paths that go on.
    confidence: probability that an interval covers the share.

  Returns:
    Report; 0, a count of 0 and intervals [0, 1] where there is nothing to tell
    from, never NaN.
    Shares do not depend on the unit of the returns. A tree of returns whose
    differences float32 does not hold counts for nothing.

  Raises:
    ValueError: if an option is out of range.

  References:
    Kish 1965, Survey Sampling; Clopper and Pearson 1934, The use of confidence
    or fiducial limits illustrated in the case of the binomial.
  """
  checks.whole('num_quantiles', num_quantiles)
  empty = init(num_depths=num_depths, depth_width=depth_width)
  empty = _rescaled(empty, _reach(tree))
  facts = _facts(tree, empty.reach)
  found = report_of(
      _added(empty, tree, facts, finished), confidence=confidence)
  entropy, edges = _entropy_bins(tree, facts.weights, num_quantiles)
  bins = _binned(facts, facts.forked & (entropy >= 0), entropy, num_quantiles)
  shares, _ = _shares(*_moments(
      bins, jnp.ones(bins.weight.shape), facts.root, facts.real), confidence)
  return found.replace(by_entropy=shares, entropy_edges=edges)


@chex.dataclass(frozen=True, mappable_dataclass=False)
class Sums:
  """What a report is made of, as sums over trees that add up over updates.

  Of fixed shape, so that they are saved in a checkpoint like any pytree. What
  is linear in a tree's weight fades with it, what is quadratic with its square.
  Variances are in units of their own, the square of `reach` down to a power of
  two, so that neither they nor their squares leave float32.

  Attributes:
    reach: the largest difference between two returns of one tree, reward units;
      its square fades like a variance.
    parts: of every bin, what its share is a ratio of: weight times variance and
      weight of its branch points, paths alive, the pairs that the total is
      from and their number, trees.
    products: of every two of them, each in one tree.
    information: of weight, variance and what follows.
    num_groups: sibling groups.
    num_trees: trees that have some and whose returns differ, and the squares
      of their weights.
    roots: of the root's variance, trees of several backbones.
    paths: alive, remaining, information in every bin, then actions and
      information of all of a path, the same for every bin.
    depth_width: actions in a bin of depth.
  """

  reach: chex.Array  # [] float32
  parts: chex.Array  # [D, 6] float32
  products: chex.Array  # [D, 6, 6] float32
  information: chex.Array  # [D] float32
  num_groups: chex.Array  # [D] float32
  num_trees: chex.Array  # [D, 2] float32
  roots: chex.Array  # [2] float32
  paths: chex.Array  # [D, 5] float32
  depth_width: chex.Array  # [] int32


def init(*, num_depths: int = 8, depth_width: int = 4) -> Sums:
  """Returns empty sums.

  Args:
    num_depths: D, bins of depth; all that is deeper falls into the last one.
    depth_width: actions in a bin of depth.

  Raises:
    ValueError: if a size is out of range.
  """
  checks.whole('num_depths', num_depths)
  checks.whole('depth_width', depth_width)
  # An array each: a learner that donates its state gives every buffer once.
  zeros = lambda *shape: jnp.zeros(shape, jnp.float32)
  d = num_depths
  return Sums(
      reach=zeros(), parts=zeros(d, 6), products=zeros(d, 6, 6),
      information=zeros(d), num_groups=zeros(d), num_trees=zeros(d, 2),
      roots=zeros(2), paths=zeros(d, 5),
      depth_width=jnp.asarray(depth_width, jnp.int32))


def update(sums: Sums, tree: tree_lib.Tree, *, forgetting: float = 0.95
           ) -> Sums:
  """Returns the sums with one more batch of trees.

  x' = forgetting x + (what the trees add); products fade by its square, which
  is how the variance of a weighted sum fades.

  Args:
    sums: of earlier updates.
    tree: [B, N, T], of the kind that `report` is valid for.
    forgetting: what is left of the past at each update, in [0, 1].

  Raises:
    ValueError: if `forgetting` is out of range.
  """
  checks.between('forgetting', forgetting, 0, 1)
  fade = lambda x: x * forgetting
  squares = jnp.asarray([forgetting, forgetting ** 2])
  faded = sums.replace(
      parts=fade(sums.parts), products=fade(fade(sums.products)),
      information=fade(sums.information), num_groups=fade(sums.num_groups),
      num_trees=sums.num_trees * squares, roots=fade(sums.roots),
      paths=fade(sums.paths))
  reach = jnp.maximum(_reach(tree), sums.reach * jnp.sqrt(forgetting))
  faded = _rescaled(faded, reach)
  return _added(faded, tree, _facts(tree, reach), 'explained')


def _reach(tree):
  """Returns the largest difference of returns that float32 holds, []."""
  contrast = jnp.abs(returns.centred_leaf_returns(tree))
  return jnp.max(masked.fill(contrast, contrast < jnp.inf), initial=0.0)


def _unit(reach):
  """Returns the power of two at or below, exactly; 1 for 0."""
  bits = jax.lax.bitcast_convert_type(reach, jnp.int32) & 0x7F800000
  power = jax.lax.bitcast_convert_type(bits, jnp.float32)
  return jnp.where(power > 0, power, 1)


def _rescaled(sums, reach):
  """Returns the sums with variances in the units of another reach."""
  # Sums that grow by more than this are those of nothing, or all forgotten.
  ratio = jnp.minimum(_unit(sums.reach) / _unit(reach), 2.0 ** 30) ** 2
  by = jnp.where(jnp.asarray(_IS_VARIANCE), ratio, 1)
  return sums.replace(
      reach=reach, parts=sums.parts * by,
      products=sums.products * by * by[:, None],
      information=sums.information * ratio,
      roots=sums.roots * jnp.stack([ratio, jnp.ones_like(ratio)]))


def report_of(sums: Sums, *, confidence: float = 0.9) -> Report:
  """Returns the report of sums over updates; by depth alone.

  Counts are those of trees of full weight that would say as much, rounded down;
  there are no bins of entropy.

  Args:
    sums: by `update`.
    confidence: probability that an interval covers the share.

  Raises:
    ValueError: if `confidence` is out of range.
  """
  if not 0 < confidence < 1:
    raise ValueError(
        f'confidence: expected a number between 0 and 1, got {confidence}')
  unit = _unit(sums.reach)
  in_rewards = lambda x: x * unit * unit
  shares, within = _shares(
      sums.parts, sums.products, sums.num_groups, sums.num_trees, confidence)
  paths = masked.divide(sums.paths, sums.parts[:, 5:])
  against = masked.divide(sums.parts[:, 3], sums.parts[:, 4])
  where_open = masked.divide(sums.information, sums.parts[:, 0])
  known = (where_open > 0) & (paths[:, 2] > 0)
  openness = masked.divide(where_open, paths[:, 2])
  return Report(
      total=in_rewards(masked.divide(*sums.roots)),
      num_trees=_whole(sums.roots[1]), within=in_rewards(within),
      between=in_rewards(
          masked.fill(against - within, shares.num_groups > 0)),
      by_depth=shares, by_entropy=jax.tree.map(lambda x: x[:0], shares),
      entropy_edges=jnp.zeros(0), alive=paths[:, 0], remaining=paths[:, 1],
      information=paths[:, 2], openness=masked.fill(openness, known, 1.0),
      num_actions=paths[0, 3], total_information=paths[0, 4],
      depth_width=sums.depth_width)


class _Facts(NamedTuple):
  """What is known of every node and tree, variances in units of their own."""

  unit: chex.Array  # [] float32, reward units
  variances: chex.Array  # [B, N] float32, of `group_variances`
  weights: chex.Array  # [B, N] float32
  ahead: chex.Array  # [B, N] float32, information below
  forked: chex.Array  # [B, N] bool, branch points below the root
  root: tuple[chex.Array, chex.Array]  # [B, 1] each: its variance, if it has
  real: chex.Array  # [B] bool


class _Bins(NamedTuple):
  """Sums over the branch points of each tree in each bin."""

  weighted: chex.Array  # [B, D] float32, of weight times variance
  weight: chex.Array  # [B, D] float32
  information: chex.Array  # [B, D] float32, of weight, variance, what follows
  num_groups: chex.Array  # [B, D] int32


def _facts(tree, reach):
  unit, weights = _unit(reach), common.node_weights(tree, 'split')
  means = returns.centred_values(tree, 'split_mean')
  known = jnp.all(jnp.isfinite(means), axis=-1, keepdims=True)
  variances = _group_variances(tree, masked.fill(means, known) / unit)
  grouped = (tree_lib.num_children(tree) > 1) & known
  return _Facts(
      unit=unit, variances=variances, weights=weights,
      ahead=_information_below(tree),
      forked=grouped & (jnp.asarray(tree.parents) >= 0),
      root=(variances[:, :1], grouped[:, :1].astype(jnp.float32)),
      real=jnp.asarray(tree.node_mask)[:, 0] & known[:, 0])


def _added(sums, tree, facts, finished):
  """Returns the sums with what trees add."""
  checks.one_of('finished', finished, Finished)
  num_depths, width = len(sums.information), sums.depth_width
  paths = _paths(tree, facts.weights, num_depths, width)
  total, alive = facts.root, paths[..., 0]
  if finished == 'excluded':
    depths = jnp.arange(num_depths) * width
    total = _totals_alive(tree, facts, depths)
    alive = jnp.ones_like(alive)
  depth = jnp.minimum(
      tree_lib.actions_through(tree) // width, num_depths - 1)
  bins = _binned(facts, facts.forked, depth, num_depths)
  parts, products, num_groups, num_trees = _moments(
      bins, alive, total, facts.real)
  paths = masked.sum(paths, facts.real[:, None, None], axis=0)
  roots = jnp.sum(jnp.stack(facts.root), axis=(1, 2))
  information = jnp.sum(bins.information, axis=0)
  return sums.replace(**{
      name: getattr(sums, name) + added for name, added in dict(
          parts=parts, products=products, information=information,
          num_groups=num_groups, num_trees=num_trees, roots=roots,
          paths=paths).items()})


def _moments(bins, alive, total, real):
  """Returns the fields of `Sums` that a share and its interval come from."""
  single = real.astype(jnp.float32)[:, None]
  parts = jnp.stack(jnp.broadcast_arrays(
      bins.weighted, bins.weight, alive * single, *total, single), axis=-1)
  differ = (parts[..., 0] > 0) | (parts[..., 3] > 0)
  trees = jnp.sum((bins.weight > 0) & differ, axis=0, dtype=jnp.float32)
  return (jnp.sum(parts, axis=0), jnp.einsum('bdi,bdj->dij', parts, parts),
          jnp.sum(bins.num_groups, axis=0, dtype=jnp.float32),
          jnp.stack([trees, trees], axis=-1))


def _paths(tree, weights, num_depths, width):
  """Returns what paths do from the depths of every bin on, [B, D, 5].

  Each counts by the odds that `split` gives it. A bin is the mean of its
  depths: an action at t comes at or after min(t + 1 - first, width) of them.
  """
  starts = tree_lib.action_starts(tree)
  depth = depths.actions_before(tree)
  weights = weights[..., None]
  begun = masked.fill(weights * jnp.ones(starts.shape), starts)
  scores = masked.fill(weights * _information(tree), tree.action_mask)
  total = lambda x: jnp.sum(x, axis=(1, 2))

  def single(first):
    share = jnp.clip(depth + 1 - first, 0, width) / width
    inside = (depth >= first) & (depth < first + width)
    return jnp.stack([
        total(begun * inside) / width, total(begun * share),
        total(scores * share), total(begun), total(scores)], axis=-1)

  return jax.vmap(single, out_axes=1)(jnp.arange(num_depths) * width)


def _totals_alive(tree, facts, depths):
  """Returns Var(R | task, alive at t) as pairs of paths, [B, D] each.

  Half the mean squared difference of two leaves below different children of the
  root, both of paths with an action at t.
  """
  leaf = tree_lib.is_leaf(tree) & facts.real[:, None]
  values = returns.centred_leaf_returns(tree)
  values = values - returns.centred_values(tree, 'split_mean')[:, :1]
  values = values / facts.unit
  through, parents = tree_lib.actions_through(tree), jnp.asarray(tree.parents)
  top = parents == 0

  def pairs(depth):
    alive = masked.fill(facts.weights, leaf & (through > depth))
    by_child = lambda x: masked.fill(walks.sum_below(x, parents), top)
    mass, first, second = (
        by_child(alive * jnp.where(leaf, x, 0))
        for x in (jnp.ones_like(values), values, jnp.square(values)))
    others = jnp.sum(mass, -1, keepdims=True) - mass
    cross = jnp.square(jnp.sum(first, -1)) - jnp.sum(jnp.square(first), -1)
    return jnp.sum(second * others, -1) - cross, jnp.sum(mass * others, -1)

  return jax.vmap(pairs, out_axes=1)(depths)


def _binned(facts, mask, index, num_bins):
  """Returns sums over the branch points of each bin."""
  def single(values, index):
    return jnp.zeros(num_bins, values.dtype).at[index].add(values)
  gather = lambda x: jax.vmap(single)(
      masked.fill(x, mask), jnp.maximum(index, 0))
  weighted = facts.weights * facts.variances
  return _Bins(weighted=gather(weighted), weight=gather(facts.weights),
               information=gather(weighted * facts.ahead),
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


def _shares(parts, products, num_groups, num_trees, confidence):
  """Returns the shares of all bins with their intervals, and E[Var(R | s)].

  A share is 1 - f of sums over trees, f of degree 0 in them: with g its
  gradient, g . sums = 0, and its variance is g' (sum of the products) g. The
  factor n / (n - 1), Student's t and the least reach are those of n trees, as
  in `report`.
  """
  weighted, weight, alive, numerator, denominator, count = (
      parts[:, i] for i in range(6))
  within = masked.divide(alive, count) * masked.divide(weighted, weight)
  total = masked.divide(numerator, denominator)
  known = (weight > 0) & (total > 0)
  left = masked.fill(masked.divide(within, total), known)
  by_weighted = masked.divide(
      masked.divide(alive, count), weight * jnp.where(known, total, 1))
  signs = jnp.asarray([0, -1, 1, -1, 1, -1])
  slope = masked.divide(signs * left[:, None], parts).at[:, 0].set(by_weighted)
  slope = masked.fill(slope, known[:, None])
  square = jnp.einsum('di,dij,dj->d', slope, products, slope)
  num_trees = masked.divide(jnp.square(num_trees[:, 0]), num_trees[:, 1])
  effective = jnp.minimum(num_trees, masked.divide(
      jnp.square(numerator), products[:, 3, 3]))
  freedom = jnp.maximum(effective - 1, 1)
  error = jnp.sqrt(jnp.maximum(square * effective / freedom, 0))
  # What so many trees that all say the same leave open.
  least = 1 - ((1 - confidence) / 2) ** (1 / jnp.maximum(effective, 1))
  reach = jnp.maximum(_student(confidence, freedom) * error, least)
  share = masked.fill(1 - left, known)
  enough = known & (_whole(effective) > 1)
  enough &= jnp.isfinite(share) & jnp.isfinite(reach)
  return Shares(
      share=share, lower=jnp.where(enough, share - reach, 0.0),
      upper=jnp.where(enough, share + reach, 1.0),
      num_groups=_whole(num_groups), num_trees=_whole(num_trees)), within


def _whole(count):
  """Returns a faded count as a whole number, int32."""
  return jnp.floor(count + 1e-3).astype(jnp.int32)


def _student(confidence, freedom):
  """Returns Student's two-sided quantile, by its expansion about the normal."""
  z = jax.scipy.special.ndtri(0.5 + confidence / 2)
  return (z + (z ** 3 + z) / (4 * freedom)
          + (5 * z ** 5 + 16 * z ** 3 + 3 * z) / (96 * freedom ** 2))


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
  num_quantiles = len(found.by_entropy.share)  # None of sums over updates.
  for q, (low, high) in enumerate(zip(edges[:num_quantiles], edges[1:])):
    name = f'{low} to {high} nats' if high else f'over {low} nats'
    lines.append(_row(name, found.by_entropy, q))
  return '\n'.join(lines)


def _row(name, shares, index):
  """Returns one line of the table."""
  counts = f'{shares.num_groups[index]:6d} {shares.num_trees[index]:6d}'
  if not shares.num_trees[index]:
    return f'{name:>14} {"-":>6}  {"":<14} {counts}'
  interval = f'[{shares.lower[index]:.2f}, {shares.upper[index]:.2f}]'
  return f'{name:>14} {shares.share[index]:6.2f}  {interval:<14} {counts}'

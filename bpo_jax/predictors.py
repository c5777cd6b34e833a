"""Predicts how an episode goes on from how episodes went on before.

Success statistics of earlier updates, in bins of depth, of the entropy of the
next decision and of progress: sums and counts of fixed shape, which fade with
every update and are saved in a checkpoint like any pytree. What they predict
says where to fork; it never enters a gradient.
"""

import math

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


@chex.dataclass(frozen=True, mappable_dataclass=False)
class Statistics:
  """Sums and counts in bins of depth, entropy and progress.

  The last bin of entropy is for states whose next decision is not known. The
  widths are arrays, so that a restored checkpoint goes on with its own bins.

  Attributes:
    visits: how often a path came through a state of the bin, faded.
    successes: how many of those ended in success, faded.
    steps: the actions that they took from there, summed, faded.
    depth_width: actions in a bin of depth.
    entropy_width: nats in a bin of entropy.
  """

  visits: chex.Array  # [D, E + 1, P] float32
  successes: chex.Array  # [D, E + 1, P] float32
  steps: chex.Array  # [D, E + 1, P] float32
  depth_width: chex.Array  # [] int32
  entropy_width: chex.Array  # [] float32


def init(*, num_depth_bins: int = 8, num_entropy_bins: int = 4,
         num_progress_bins: int = 3, depth_width: int = 4,
         entropy_width: float = 0.5) -> Statistics:
  """Returns empty statistics.

  Args:
    num_depth_bins: D, bins of depth; all that is deeper falls into the last.
    num_entropy_bins: E, bins of entropy; all above falls into the last.
    num_progress_bins: P, equal parts of [0, 1].
    depth_width: actions in a bin of depth.
    entropy_width: nats in a bin of entropy.

  Raises:
    ValueError: if a size is out of range.
  """
  checks.whole('num_depth_bins', num_depth_bins)
  checks.whole('num_entropy_bins', num_entropy_bins)
  checks.whole('num_progress_bins', num_progress_bins)
  checks.whole('depth_width', depth_width)
  checks.positive('entropy_width', entropy_width)
  shape = (num_depth_bins, num_entropy_bins + 1, num_progress_bins)
  # An array each: a learner that donates its state gives every buffer once.
  zeros = lambda: jnp.zeros(shape, jnp.float32)
  return Statistics(
      visits=zeros(), successes=zeros(), steps=zeros(),
      depth_width=jnp.asarray(depth_width, jnp.int32),
      entropy_width=jnp.asarray(entropy_width, jnp.float32))


def update(statistics: Statistics, tree: tree_lib.Tree, *,
           success_threshold: float = 0.5, forgetting: float = 0.9,
           progress: chex.Array | None = None) -> Statistics:
  """Returns the statistics with one more batch of trees.

  x' = forgetting x + (what the trees add): a state in which an action was taken
  adds, for every leaf below it, a visit, whether the leaf's path succeeded, and
  the actions from the state to the leaf. So its target is the visit-weighted
  mean of its children's, the mean over its leaves.

  Args:
    statistics: of earlier updates.
    tree: [B, N, T].
    success_threshold: reward units; a path of at least this return succeeded.
    forgetting: what is left of the past at each update, in [0, 1].
    progress: [B, N] in [0, 1]; None for `new_observations`.

  Raises:
    ValueError: if `forgetting` or the threshold is out of range.

  References:
    TRACE (arXiv 2606.11119), the target of its predictor, restated.
  """
  checks.between('forgetting', forgetting, 0, 1)
  checks.between('success_threshold', success_threshold, -math.inf)
  index = _bins(statistics, tree, progress)
  leaf, acts = tree_lib.is_leaf(tree), tree_lib.num_children(tree) > 0
  below = lambda x: masked.fill(walks.sum_below(x, tree.parents), acts)
  visits = leaf.astype(jnp.float32)
  won = returns.path_returns(tree) >= success_threshold
  through = tree_lib.actions_through(tree).astype(jnp.float32)
  to_leaf = masked.fill(through, leaf)
  steps = below(to_leaf) - below(visits) * through
  added = (below(visits), below(visits * won), masked.fill(steps, acts))
  names = ('visits', 'successes', 'steps')
  return statistics.replace(**{
      name: (forgetting * getattr(statistics, name)).at[index].add(x)
      for name, x in zip(names, added)})


def predict(statistics: Statistics, tree: tree_lib.Tree, *,
            smoothing: float = 8.0, progress: chex.Array | None = None
            ) -> types.Array:
  """Returns the probability of success from the state at the end of each node.

  Each bin is smoothed towards the coarser one that holds it, as if that had
  been seen `smoothing` times more: (depth, entropy, progress) towards (depth,
  entropy) towards depth towards the overall rate,

    p_fine = (successes + smoothing p_coarse) / (visits + smoothing).

  Nothing of the tree's rewards is read. Depth, the entropy of the next decision
  and progress are known at the state, before anything is drawn from it, so a
  branch policy that goes by the prediction is causal.

  Args:
    statistics: of earlier updates.
    tree: [B, N, T].
    smoothing: visits that a coarser bin counts for.
    progress: [B, N] in [0, 1]; None for `new_observations`.

  Returns:
    [B, N] float32; 0 on padding, and everywhere before the first update: what
    is not known is not taken for open.

  Raises:
    ValueError: if `smoothing` is negative or not finite.
  """
  return _predict(
      statistics, statistics.successes, tree, smoothing, progress)


def remaining_steps(statistics: Statistics, tree: tree_lib.Tree, *,
                    smoothing: float = 8.0, progress: chex.Array | None = None
                    ) -> types.Array:
  """Returns the expected number of actions from the end of each node on.

  What a fork there costs; smoothed as in `predict`.

  Returns:
    [B, N] float32, actions; 0 on padding and before the first update.

  Raises:
    ValueError: if `smoothing` is negative or not finite.
  """
  return _predict(statistics, statistics.steps, tree, smoothing, progress)


def new_observations(tree: tree_lib.Tree) -> types.Array:
  """Returns the share of a path's observations that were new on it.

  A node's observation is old if a node above it has the same `anchor`; one that
  is not known is new. Agents that run in circles have little progress.

  Returns:
    [B, N] float32 in (0, 1]; 0 on padding.
  """
  parents = jnp.asarray(tree.parents)
  old = jax.lax.map(_is_old, (tree.anchor, *walks.preorder(
      parents, tree.node_mask)))
  depth = tree_lib.depth(tree) + 1
  share = 1 - walks.sum_above(old.astype(jnp.float32), parents) / depth
  return masked.fill(share, tree.node_mask)


def _is_old(arrays):
  """Returns [N] bool for one tree, True where the anchor came before."""
  anchor, enter, end = arrays
  index = jnp.arange(len(anchor))
  above = (enter[:, None] <= enter) & (enter < end[:, None])
  same = (anchor[:, None] == anchor) & (anchor != types.UNKNOWN_ANCHOR)
  return jnp.any(above & same & (index[:, None] != index), axis=0)


def next_entropies(tree: tree_lib.Tree) -> tuple[types.Array, types.Array]:
  """Returns the entropy of the decision at each node's end, and if it is known.

  It belongs to the state: whichever child is asked, it was drawn from the same
  distribution.

  Returns:
    [B, N] float32, nats, and [B, N] bool.
  """
  at = tree_lib.first_action_index(tree)
  entropies = masked.fill(jnp.asarray(tree.entropies), tree.action_mask)
  own = jnp.take_along_axis(
      entropies, jnp.maximum(at, 0)[..., None], axis=-1)[..., 0]
  child = tree_lib.first_child(tree)
  known = (child >= 0) & (common.take(at, child) >= 0)
  return common.take(own, child), known


def _bins(statistics, tree, progress):
  """Returns the bin of the state at the end of each node, three of [B, N]."""
  num_depths, num_entropies, num_progress = statistics.visits.shape
  depth = tree_lib.actions_through(tree) // statistics.depth_width
  entropies, known = next_entropies(tree)
  level = jnp.floor(entropies / statistics.entropy_width).astype(jnp.int32)
  level = jnp.clip(level, 0, num_entropies - 2)
  if progress is None:
    progress = new_observations(tree)
  progress = masked.fill(jnp.asarray(progress), tree.node_mask)
  # Two thirds of three bins are two, whichever way they were rounded.
  part = jnp.floor(progress * num_progress + 1e-3).astype(jnp.int32)
  return (jnp.minimum(depth, num_depths - 1),
          jnp.where(known, level, num_entropies - 1),
          jnp.clip(part, 0, num_progress - 1))


def _predict(statistics, sums, tree, smoothing, progress):
  checks.between('smoothing', smoothing, 0)
  index = _bins(statistics, tree, progress)
  table = _smoothed(sums, statistics.visits, smoothing)
  return masked.fill(table[index], tree.node_mask)


def _smoothed(sums, counts, smoothing) -> types.Array:
  """Returns means [D, E + 1, P], each shrunk towards the coarser bin's."""
  mean = masked.divide(jnp.sum(sums), jnp.sum(counts))
  for axes in ((1, 2), (2,), ()):
    total, count = (
        jnp.sum(x, axis=axes, keepdims=True) for x in (sums, counts))
    shrunk = masked.divide(total + smoothing * mean, count + smoothing)
    mean = jnp.where(count + smoothing > 0, shrunk, mean)
  return mean

"""Credit of the systems that search: trees grown node by node.

A segment is what lies between two branchings: a node with siblings and the
chain of single children below it. Splitting a segment into more nodes changes
no credit. What lies above the first branching is no segment, and gets 0 where
credit goes by segment.
"""

import math

import chex
import jax
import jax.numpy as jnp
import jax.scipy.special

from bpo_jax import checks
from bpo_jax import masked
from bpo_jax import returns
from bpo_jax import siblings
from bpo_jax import tree as tree_lib
from bpo_jax import types
from bpo_jax import walks
from bpo_jax.advantages import common
from bpo_jax.advantages import rows

Unit = tree_lib.Unit


def tree_grpo(tree: tree_lib.Tree, *, epsilon: float = 1e-6,
              path_weighting: common.PathWeighting = 'token') -> types.Credit:
  """Tree-GRPO: a leaf against its own tree and against all of the task's.

  A_i = A_intra + A_inter, each (R_i - mean(R)) / (std(R) + epsilon): A_intra
  over the leaves below the same child of the root (which is what the paper
  calls a tree), A_inter over all leaves. Without the second term nothing would
  be learned between trees. std has n - 1 in its denominator.

  Args:
    tree: [B, N, T].
    epsilon: added to the standard deviation; reward units.
    path_weighting: 'token', every token of a path weighs 1, or 'sequence', it
      weighs 1 / (number of action tokens of the path).

  Returns:
    Credit of training on every leaf's path: shared tokens get the sum of the
    paths' weights and the weighted mean of their advantages. 0 for one leaf or
    equal returns.

  Raises:
    ValueError: if an option is unknown.

  References:
    Ji et al. 2025, Tree Search for LLM Agent Reinforcement Learning, tree-based
    group relative advantages (arXiv 2509.21240); restated.
  """
  values, leaf = returns.centred_leaf_returns(tree), tree_lib.is_leaf(tree)
  top = walks.nearest_above(tree.parents == 0, tree.parents)
  within = lambda x: common.take(walks.sum_below(x, tree.parents), top)
  count = within(leaf.astype(jnp.float32))
  centred = masked.fill(values - masked.divide(within(values), count), leaf)
  variance = masked.divide(within(jnp.square(centred)), count - 1)
  intra = masked.over_spread(centred, jnp.sqrt(variance), epsilon)
  inter = masked.whiten(values, leaf, axis=-1, epsilon=epsilon, ddof=1)
  return common.path_credit(
      tree, masked.fill(intra, top >= 0) + inter, path_weighting)


def treerl(tree: tree_lib.Tree, *,
           path_weighting: common.PathWeighting = 'token') -> types.Credit:
  """TreeRL: a step's gain over the root and over where it started.

  R(s) = (V(s) - V(root) + V(s) - V(parent(s))) / sqrt(leaves(s)), V the mean
  return of the leaves below. The divisor keeps steps that many paths share, and
  train, from being trained too hard.

  Args:
    tree: [B, N, T].
    path_weighting: 'token', every token of a path weighs 1, or 'sequence', it
      weighs 1 / (number of action tokens of the path).

  Returns:
    Credit, the same for all tokens of a segment; every path is trained, so a
    token weighs the sum over the paths through it, as in `rloo` ('token': the
    number of leaves). 0 above the first branching.

  Raises:
    ValueError: if an option is unknown.

  References:
    Hou et al. 2025, TreeRL, equations for global and local advantage
    (arXiv 2506.11902); exact, weights read.
  """
  weights = walks.sum_below(
      common.path_weights(tree, path_weighting), tree.parents)
  values = returns.centred_values(tree, 'leaf_mean')
  gain = values - walks.at_parent(values, tree.parents)
  step = values - values[..., :1] + gain
  leaves = tree_lib.num_leaves(tree).astype(jnp.float32)
  reward = masked.divide(step, jnp.sqrt(leaves))
  return _segment_credit(tree, reward, common.per_token(tree, weights))


def spo_tree(tree: tree_lib.Tree, *, max_probability: float = 0.9,
             node_values: returns.Aggregate = 'split_mean',
             node_weighting: common.NodeWeighting = 'uniform'
             ) -> types.Credit:
  """Segment Policy Optimization on a tree: what a segment adds to the value.

  A(segment) = V(end of the segment) - V(its start), V of a state being the mean
  of the values of its children, a leaf's its return. Only tokens that could
  well have been others are trained: those of a probability above
  `max_probability` weigh 0.

  Args:
    tree: [B, N, T].
    max_probability: tokens that the policy drew with a probability above this
      are not trained; 1 trains all.
    node_values: what a state is worth: the 'split_mean' (the paper) or
      'leaf_mean' of the leaves below, or its 'own' continuation's return.
    node_weighting: 'uniform' (the paper), every token weighs 1, or 'split', a
      child carries 1 / (number of children) of its parent's weight.

  Returns:
    Credit; 0 above the first branching, and for equal returns. Tokens that are
    trained weigh 1 each ('uniform'), or what a leaf of the tree does ('split');
    the others 0.

  Raises:
    ValueError: if an option is unknown, or `max_probability` negative.

  References:
    Guo et al. 2025, Segment Policy Optimization, SPO-tree and its probability
    mask (arXiv 2505.23564); exact.
  """
  checks.between('max_probability', max_probability, 0)
  values = returns.centred_values(tree, node_values)
  gain = values - walks.at_parent(values, tree.parents)
  limit = jnp.log(jnp.float32(max_probability))
  open_ = tree.action_mask & (tree.behaviour_log_probs <= limit)
  weights = common.per_token(tree, common.node_weights(tree, node_weighting))
  return _segment_credit(tree, gain, masked.fill(weights, open_))


def sipo(tree: tree_lib.Tree, *, a2: chex.Array | float | None = None,
         w: float = 1.0, unit: Unit = 'token',
         node_values: returns.Aggregate = 'own',
         node_weighting: common.NodeWeighting = 'uniform') -> types.Credit:
  """SIPO: siblings compared after the selection bias of the incumbent is off.

  A branch point chosen for the surprisal of the token drawn there was chosen
  after the fact: the continuation that is there already, the incumbent, is no
  fresh draw. Its value is off by what surprisal and value share, and becomes
    V'(incumbent) = V - w a2 Blom(r),  Blom(r) = Phi^-1((r - 3/8) / (n + 1/4)),
  the expected z-score of the r-th smallest of n candidates times the slope of
  the value on it. Then A(k) = V'(k) - mean over its siblings of V', held until
  the next branching. At the root no trajectory was selected, unless it is
  forked there: then its first child, for which the decision counts, is an
  incumbent too.

  Read: r is the rank of the surprisal of the incumbent's first action token, or
  of that whole action, among the candidates laid down in the same stage (ties
  share their mean rank), what each trajectory begins with being one of them,
  though the policy has but one decision there; the comparison is leave-one-out.

  Args:
    tree: [B, N, T].
    a2: slope of the value on the z-score of the surprisal, by `selection_slope`
      from the PREVIOUS batch, so that these returns have no say in it; reward
      units. 0 corrects nothing.
    w: how much of the selection bias that SIPO predicts is subtracted.
    unit: whether the candidates are whole actions, 'action', or their tokens
      one by one, 'token'; as the branch policy had it.
    node_values: what a continuation is worth: its 'own' return, or the
      'split_mean' or 'leaf_mean' of the leaves below it.
    node_weighting: 'uniform', every token weighs 1, or 'split', a child carries
      1 / (number of children) of its parent's weight.

  Returns:
    Credit; 0 above the first branching and for a group of one, and with a2 = 0
    for equal returns. Weights as in `bpo`.

  Raises:
    ValueError: if an option is unknown, or there is no a2.

  References:
    SIPO (arXiv 2609.34805); restated where not said to be read.
    Blom 1958, Statistical Estimates and Transformed Beta-Variables.
  """
  checks.given('a2', a2, 'sipo', 'the slope that selection_slope found in the '
               'batch before, 0.0 to correct nothing')
  checks.between('a2', a2, -math.inf)
  checks.shape('a2', jnp.asarray(a2), ())
  checks.between('w', w, -math.inf)
  values = returns.centred_values(tree, node_values)
  selected = common.is_incumbent(tree) & tree_lib.is_first_child(tree)
  bias = w * a2 * masked.fill(_blom(tree, unit), selected)
  advantages = siblings.leave_one_out_advantage(
      values - bias, tree.parents, tree_lib.in_group(tree))
  weights = common.node_weights(tree, node_weighting)
  return _segment_credit(tree, advantages, common.per_token(tree, weights))


def selection_slope(tree: tree_lib.Tree, *, unit: Unit = 'token',
                    node_values: returns.Aggregate = 'own'
                    ) -> tuple[types.Array, types.Array]:
  """Returns the sums whose quotient is a2, the slope of value on surprisal.

  a2 = Cov(Z, Y) / Var(Z) over all candidates of a batch, the tokens or actions
  of its first trajectories: Z the surprisal, z-scored within the tree, and Y
  the value of the candidate's node less the mean over the tree's candidates.
  Sums of several batches may be added before a2 = masked.divide(covariance,
  variance).

  Args:
    tree: [B, N, T].
    unit: as in `sipo`.
    node_values: as in `sipo`.

  Returns:
    covariance, variance: float32 scalars, sum Z Y in reward units and sum Z^2;
    both are 0 where one is not finite, so that running sums stay so. No
    gradient flows.

  Raises:
    ValueError: if an option is unknown.

  References:
    SIPO (arXiv 2609.34805); restated. Which tokens are candidates, and that Z
    and Y are centred tree by tree, is read.
  """
  mask = _candidates(tree, unit) & (tree.birth == 0)[..., None]
  values = common.per_token(tree, returns.centred_values(tree, node_values))
  per_tree = (-2, -1)
  surprisal = tree_lib.surprisal(tree, unit)
  z = masked.whiten(surprisal, mask, per_tree, epsilon=1e-6)
  y = values - masked.mean(values, mask, per_tree, keepdims=True)
  sums = masked.sum(z * y, mask), masked.sum(jnp.square(z), mask)
  known = jnp.isfinite(sums[0]) & jnp.isfinite(sums[1])
  return jax.lax.stop_gradient(tuple(masked.fill(x, known) for x in sums))


def _segment_credit(tree, advantages, weights):
  """Returns the credit of [B, N] advantages, read where a segment starts."""
  start = walks.nearest_above(tree_lib.in_group(tree), tree.parents)
  segment = common.take(advantages, start)
  return common.credit(tree, common.per_token(tree, segment), weights)


def _candidates(tree, unit):
  """Returns where a branch point could have been selected, [B, N, T] bool."""
  checks.one_of('unit', unit, Unit)
  if unit == 'action':
    return tree_lib.action_starts(tree)
  return jnp.asarray(tree.action_mask)


def _blom(tree, unit):
  """Returns the normal score of the first candidate from a node on, [B, N].

  0 where the node's row has no action token any more.
  """
  mask = _candidates(tree, unit)
  surprisal = masked.fill(tree_lib.surprisal(tree, unit), mask)
  first = tree_lib.first_action_index(tree)
  own = jnp.take_along_axis(
      surprisal, jnp.maximum(first, 0)[..., None], axis=-1)[..., 0]
  drawn = rows.ahead(tree, first >= 0)
  own = common.take(own, drawn)
  birth = jnp.asarray(tree.birth)

  def rank(node):  # Of one node of all trees; [B, N, N, T] would not fit.
    rivals = mask & (birth == birth[..., node, None])[..., None]
    value = own[..., node, None, None]
    smaller, equal, size = (
        masked.count(x, axis=(-2, -1)) for x in
        (rivals & (surprisal < value), rivals & (surprisal == value), rivals))
    return smaller + (equal + 1) / 2, size

  nodes = jnp.arange(tree.parents.shape[-1])
  rank, size = (jnp.moveaxis(x, 0, -1) for x in jax.lax.map(rank, nodes))
  quantile = (rank - 0.375) / (size + 0.25)
  return jax.scipy.special.ndtri(jnp.where(drawn >= 0, quantile, 0.5))

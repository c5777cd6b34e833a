"""Credit from the values of states: predicted by a critic, or sampled by forks.

The values of a critic stand at action tokens, each that of the state before the
token. What lies between two actions is no state that was decided in, so the
recursions run over action tokens alone: an observation, however long, neither
decays credit nor is its value read.
"""

import chex
import jax
import jax.numpy as jnp

from bpo_jax import checks
from bpo_jax import masked
from bpo_jax import returns
from bpo_jax import siblings
from bpo_jax import tree as tree_lib
from bpo_jax import types
from bpo_jax import walks
from bpo_jax.advantages import common


def ppo_gae(tree: tree_lib.Tree, *, values: chex.Array | None = None,
            discount: float = 1.0, lambda_: float = 0.95) -> types.Credit:
  """Generalised advantage estimation over the action tokens of every path.

  delta_t = r_t + discount V_{t+1} - V_t
  A_t = delta_t + discount lambda A_{t+1}
  with t + 1 the next action token of the path, across observations undecayed.
  The reward of a node is received at its last action token, that of a node
  without action tokens at the last one above it; what comes before the first
  action is nobody's. Beyond a leaf V is 0, also where a limit truncated the
  episode: what would have followed is unknown.

  Args:
    tree: [B, N, T].
    values: [B, N, T] float32, reward units; the value of the state before each
      action token, not read elsewhere.
    discount: factor on all that comes later, per action token.
    lambda_: factor on later temporal differences, per action token: 0 trusts
      the values, 1 the returns.

  Returns:
    Credit; a token shared by several paths weighs as much as they are, and gets
    the mean of what it gets on each. Not whitened.

  Raises:
    ValueError: if the values are missing or of another shape.

  References:
    Schulman et al. 2016, equations 11 to 16 (arXiv 1506.02438). Exact on a
    path; shared tokens are read as the gradient of training on each path.
  """
  check_per_token('values', values, tree, 'ppo_gae',
                  'the critic\'s value before each action token')
  leaves = tree_lib.num_leaves(tree).astype(jnp.float32)
  advantages = _gae(tree, values, leaves, discount, lambda_)
  return common.credit(tree, advantages, common.per_token(tree, leaves))


def tree_gae(tree: tree_lib.Tree, *, values: chex.Array | None = None,
             discount: float = 1.0, lambda_: float = 0.95) -> types.Credit:
  """Generalised advantage estimation over a tree whose children count alike.

  A_t = delta_t + discount lambda mean_c A_c
  delta_t = r_t + discount mean_c V_c - V_t
  over the next action tokens c, one below each child: several at a branching,
  else one. A token weighs 1 / W, W the product of the numbers of children at
  the branchings above it. On one path it is `ppo_gae`, as are rewards and ends.

  Args:
    tree: [B, N, T].
    values: [B, N, T] float32, reward units; the value of the state before each
      action token, not read elsewhere.
    discount: factor on all that comes later, per action token.
    lambda_: factor on later temporal differences, per action token: 0 trusts
      the values, 1 the returns.

  Returns:
    Credit; the weights of a tree's leaves sum to 1. The policy gradient where
    branch points are chosen causally and lambda is 1 or the values are true.

  Raises:
    ValueError: if the values are missing or of another shape.

  References:
    OPTS-TTPO (arXiv 2609.40035). Restated; that delta takes the mean of the
    children's values as well is read.
  """
  check_per_token('values', values, tree, 'tree_gae',
                  'the critic\'s value before each action token')
  alike = jnp.asarray(tree.node_mask, jnp.float32)
  advantages = _gae(tree, values, alike, discount, lambda_)
  weights = common.node_weights(tree, 'split')
  return common.credit(tree, advantages, common.per_token(tree, weights))


def lambda_returns(tree: tree_lib.Tree, values: chex.Array, *,
                   discount: float = 1.0, lambda_: float = 0.95,
                   node_weighting: common.NodeWeighting = 'uniform'
                   ) -> types.Array:
  """Returns what a critic's values are to be regressed on: A_t + V_t.

  Args:
    tree: [B, N, T].
    values: [B, N, T] float32, reward units; as in `ppo_gae`.
    discount: as in `ppo_gae`.
    lambda_: as in `ppo_gae`.
    node_weighting: 'uniform', all leaves below a token count alike, as in
      `ppo_gae`; 'split', all children do, as in `tree_gae`.

  Returns:
    [B, N, T] float32, reward units; 0 off action tokens. No gradient flows.

  Raises:
    ValueError: if the values are of another shape or the option is unknown.

  References:
    Schulman et al. 2016, section 5 (arXiv 1506.02438), with the lambda-return
    in place of the discounted sum.
  """
  checks.one_of('node_weighting', node_weighting, common.NodeWeighting)
  estimator = ppo_gae if node_weighting == 'uniform' else tree_gae
  credit = estimator(tree, values=values, discount=discount, lambda_=lambda_)
  targets = credit.advantages + masked.fill(values, tree.action_mask)
  return jax.lax.stop_gradient(targets)


def vineppo(tree: tree_lib.Tree, *, node_values: returns.Aggregate = 'own'
            ) -> types.Credit:
  """Differences of values that forks have sampled; no critic.

  A_t = V(s') - V(s), s the branch point at or before the token and s' the next
  one down its trajectory, beyond which V is the return itself. V(s) is the mean
  return of the forks at s, which the trajectory's own continuation is no part
  of; at the root the other trajectories, too, are samples. Returns are those of
  whole paths, so r_t is inside V(s') - V(s).

  Args:
    tree: [B, N, T].
    node_values: what a fork that branches again tells of the value: 'own', the
      return of the continuation drawn with it, or the 'split_mean' or
      'leaf_mean' of the leaves below it.

  Returns:
    Credit. Tokens of trajectories (birth 0) weigh 1; forks weigh 0, they are
    samples of a value and no training data. Before the first branch point there
    is no sample of a value and the advantage is 0, at weight 1.

  Raises:
    ValueError: if an option is unknown.

  References:
    Kazemnejad et al. 2024, VinePPO (arXiv 2410.01679). Exact where every step
    of a trajectory is forked; with fewer branch points, the steps between two
    of them share one difference.
  """
  values = returns.centred_values(tree, node_values)
  member = tree_lib.in_group(tree)
  sampled = siblings.leave_one_out_mean(values, tree.parents, member)
  owner = walks.nearest_above(member, tree.parents)
  ahead = _next_value(tree, sampled, member)
  advantages = masked.fill(ahead - common.take(sampled, owner), owner >= 0)
  weights = (tree.node_mask & (tree.birth == 0)).astype(jnp.float32)
  return common.credit(tree, *(
      common.per_token(tree, x) for x in (advantages, weights)))


def mean_of_children(values: chex.Array, votes: chex.Array, parents: chex.Array
                     ) -> types.Array:
  """Returns sum_c votes(c) x(c) / sum_c votes(c) over the children, [B, N].

  Args:
    values: [B, N] float32 x.
    votes: [B, N] float32, what a node counts among its siblings.
    parents: [B, N] int32.

  Returns:
    [B, N] float32; 0 without votes below.
  """
  has_parent = jnp.asarray(parents) >= 0
  total, size = (walks.sum_of_children(x, parents, has_parent)
                 for x in (votes * values, votes))
  return masked.divide(total, size)


def check_per_token(name: str, array: chex.Array | None, tree: tree_lib.Tree,
                    algorithm: str, meaning: str) -> None:
  """Raises ValueError unless an array has one entry per token of the tree."""
  tree_lib.check_batch(tree)
  shape = jnp.shape(tree.tokens)
  expected = f'{meaning}, float32 of shape {shape}'
  checks.given(name, array, algorithm, expected)
  if jnp.shape(array) != shape:
    raise ValueError(f'{algorithm}: {name}: expected {expected}, got shape '
                     f'{jnp.shape(array)}')


def _gae(tree, values, votes, discount, lambda_):
  """Returns A_t at action tokens, [B, N, T]; anything elsewhere.

  All is affine in x, what follows the node's last token (r and discount V + ..
  A of the next one), so every node is first folded to what it hands up for any
  x; then one walk up the tree finds every x.
  """
  checks.between('discount', discount, 0, 1)
  checks.between('lambda_', lambda_, 0, 1)
  handed, slope, by_token = _fold(tree, values, discount, lambda_)
  above = returns.backup(handed, votes, tree.parents, slope)
  follows = mean_of_children(above, votes, tree.parents)
  return by_token[0] + by_token[1] * follows[..., None]


def _fold(tree, values, discount, lambda_):
  """Folds each node's action tokens, last to first.

  Returns:
    shift, slope [B, N]: x -> shift + slope x, what a node hands to its parent.
    The same of every token's advantage, two [B, N, T].
  """
  mask = jnp.asarray(tree.action_mask)
  values = masked.fill(jnp.asarray(values, jnp.float32), mask)
  rewards = masked.fill(jnp.asarray(tree.rewards), tree.node_mask)

  def visit(carry, column):
    (shift, slope), (value, inside) = carry, column
    advantage = shift - value, slope
    handed = (discount * value + discount * lambda_ * advantage[0],
              discount * lambda_ * slope)
    carry = tuple(jnp.where(inside, x, y) for x, y in zip(handed, carry))
    return carry, advantage
  columns = jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), (values, mask))
  (shift, slope), advantages = jax.lax.scan(
      visit, (rewards, jnp.ones_like(rewards)), columns, reverse=True)
  return shift, slope, [jnp.moveaxis(x, 0, -1) for x in advantages]


def _next_value(tree, sampled, member):
  """Returns the sampled value at the next branch point down, [B, N].

  Down the child that was laid down first; the return itself at a leaf.
  """
  leaf_returns = returns.centred_leaf_returns(tree)
  first = tree_lib.is_first_child(tree).astype(jnp.float32)
  handed = returns.backup(
      jnp.where(member, sampled, leaf_returns), first, tree.parents,
      jnp.where(member, 0.0, 1.0))
  below = common.take(handed, tree_lib.first_child(tree))
  return jnp.where(tree_lib.is_leaf(tree), leaf_returns, below)

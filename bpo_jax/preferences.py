"""Losses between trajectories, as credit for the log-likelihood of tokens.

A loss that depends on the network through sums of log-probs along paths has,
by the chain rule, the gradient of sum_t c_t log pi(a_t), c_t the derivative of
the loss by the path's sum. The c_t come from one forward pass over the batch;
training on them is exact however the batch is split into micro-batches.
"""

import chex
import jax
import jax.numpy as jnp

from bpo_jax import checks
from bpo_jax import masked
from bpo_jax import returns
from bpo_jax import tree as tree_lib
from bpo_jax import types
from bpo_jax import walks


def path_sums(tree: tree_lib.Tree, per_token: chex.Array) -> types.Array:
  """Returns the sum over the action tokens from the root on, [B, N].

  Args:
    tree: [B, N, T].
    per_token: [B, N, T] float32, read at action tokens.
  """
  of_node = masked.sum(per_token, tree.action_mask, axis=-1)
  return walks.sum_above(of_node, tree.parents)


def trajectory_dpo(tree: tree_lib.Tree, log_ratios: chex.Array | None = None,
                   *, beta: float = 0.05) -> types.Credit:
  """Direct preference optimisation between the trajectories of a task.

  loss = - mean log sigmoid(beta (s_w - s_l)) over all pairs of leaves of one
  tree with R_w > R_l, s the sum of log_ratios along the path. What a path's
  tokens are credited with is -d loss / d s, so that ascending the weighted
  log-likelihood descends the loss.

  Args:
    tree: [B, N, T].
    log_ratios: [B, N, T] float32, nats, log pi_phi - log pi_old of every action
      token.
    beta: scale of the implicit reward, not negative.

  Returns:
    Credit of weight 1 at every action token of the batch's pairs. A token on
    several paths gets the sum of theirs. 0 where no pair differs.

  Raises:
    ValueError: if there are no log_ratios, or beta is out of range.

  References:
    Rafailov et al. 2023, equation 7 (arXiv 2305.18290).
    iStar, trajectory preferences (arXiv 2509.19199), restated.
  """
  checks.given('log_ratios', log_ratios, 'trajectory_dpo',
               '[B, N, T], log pi_phi - log pi_old')
  checks.shape('log_ratios', log_ratios, tree.tokens.shape)
  checks.between('beta', beta, 0)
  leaf = tree_lib.is_leaf(tree)
  total = returns.centred_leaf_returns(tree)
  score = beta * path_sums(tree, jax.lax.stop_gradient(log_ratios))
  better = (total[..., :, None] > total[..., None, :])
  better = better & leaf[..., :, None] & leaf[..., None, :]
  margin = score[..., :, None] - score[..., None, :]
  pull = beta * masked.fill(jax.nn.sigmoid(-margin), better)  # [B, N, N]
  pull = masked.divide(pull, jnp.sum(better, dtype=jnp.float32))
  per_leaf = jnp.sum(pull, axis=-1) - jnp.sum(pull, axis=-2)
  coefficient = walks.sum_below(per_leaf, tree.parents)[..., None]
  mask = jnp.asarray(tree.action_mask)
  return types.Credit(
      advantages=jax.lax.stop_gradient(masked.fill(
          jnp.broadcast_to(coefficient, mask.shape), mask)),
      weights=mask.astype(jnp.float32))

"""Credit of whole paths: every leaf against the other leaves of its task."""

from typing import Literal

import chex
import jax.numpy as jnp

from bpo_jax import checks
from bpo_jax import masked
from bpo_jax import returns
from bpo_jax import tree as tree_lib
from bpo_jax import types
from bpo_jax.advantages import common

Scale = Literal['std', 'none']
ZeroVariance = Literal['keep', 'drop']

EPSILON = 1e-6  # Reward units; returns no further apart count as equal.


def rloo(tree: tree_lib.Tree, *,
         path_weighting: common.PathWeighting = 'token') -> types.Credit:
  """REINFORCE with the leave-one-out mean of the tree's other leaves.

  A_i = R_i - 1 / (G - 1) sum_{j != i} R_j over the G leaves of a tree; a tree
  of one leaf gets 0. Unbiased where the tree branches at its root alone; leaves
  that share a prefix are no independent baselines of each other.

  Args:
    tree: [B, N, T].
    path_weighting: 'token', every token of a path weighs 1, or 'sequence', it
      weighs 1 / (number of action tokens of the path).

  Returns:
    Credit; a token shared by several paths gets the sum of their weights and
    the weighted mean of their advantages, the gradient of training on each.

  Raises:
    ValueError: if an option is unknown.

  References:
    Ahmadian et al. 2024, Back to Basics, equation 8 (arXiv 2402.14740). Exact.
  """
  return common.path_credit(tree, leave_one_out(tree), path_weighting)


def grpo(tree: tree_lib.Tree, *, scale: Scale = 'std', epsilon: float = EPSILON,
         path_weighting: common.PathWeighting = 'token',
         zero_variance: ZeroVariance = 'keep') -> types.Credit:
  """Group-relative advantages over the leaves of a tree.

  A_i = (R_i - mean(R)) / (std(R) + epsilon), std with G - 1 in its denominator.
  A tree of one leaf or of equal returns gets 0.

  Args:
    tree: [B, N, T].
    scale: 'std' divides by the standard deviation of the group, 'none' does
      not (Dr. GRPO).
    epsilon: added to the standard deviation; reward units.
    path_weighting: 'token', every token of a path weighs 1, or 'sequence', it
      weighs 1 / (number of action tokens of the path), the paper's 1 / |o_i|.
    zero_variance: 'keep' leaves the tokens of a group of equal returns their
      weights, so that they count in the denominator of the loss and in the KL
      term; 'drop' takes the weights away (DAPO's filter).

  Returns:
    Credit; shared tokens as in `rloo`. A path's tokens weigh 1 each ('token')
    or together ('sequence'), and 0 where its task was dropped.

  Raises:
    ValueError: if an option is unknown.

  References:
    Shao et al. 2024, DeepSeekMath, section 4.1 (arXiv 2402.03300). Exact.
    Liu et al. 2025, Understanding R1-Zero-Like Training (arXiv 2503.20783).
    Yu et al. 2025, DAPO, section 3.2 (arXiv 2503.14476).
  """
  checks.one_of('zero_variance', zero_variance, ZeroVariance)
  advantages = standardised(tree, scale, epsilon)
  kept = None if zero_variance == 'keep' else _has_contrast(tree)
  return common.path_credit(tree, advantages, path_weighting, kept)


def dr_grpo(tree: tree_lib.Tree, *, zero_variance: ZeroVariance = 'keep'
            ) -> types.Credit:
  """GRPO done right: no division by a spread, none by a length.

  A_i = R_i - mean(R), and every token of a path weighs 1; the constant that the
  sum over tokens is divided by is the reducer's.

  Args:
    tree: [B, N, T].
    zero_variance: 'keep' leaves the tokens of a group of equal returns their
      weights, so that they count in the denominator of the loss and in the KL
      term; 'drop' takes the weights away (DAPO's filter).

  Returns:
    Credit; shared tokens as in `rloo`, (G - 1) / G times its advantages;
    weights as in `grpo`.

  Raises:
    ValueError: if an option is unknown.

  References:
    Liu et al. 2025, Understanding R1-Zero-Like Training, section 3.2 (arXiv
    2503.20783). Exact.
  """
  return grpo(tree, scale='none', zero_variance=zero_variance)


def leave_one_out(tree: tree_lib.Tree) -> types.Array:
  """Returns R_i - 1 / (G - 1) sum_{j != i} R_j at leaves, [B, N] float32.

  0 off the leaves and in a tree of one leaf.
  """
  values, leaf = returns.centred_leaf_returns(tree), tree_lib.is_leaf(tree)
  count = masked.count(leaf, axis=-1, keepdims=True)
  others = masked.sum(values, leaf, axis=-1, keepdims=True) - values
  advantages = values - others / jnp.maximum(count - 1, 1)
  return masked.fill(advantages, leaf & (count > 1))


def standardised(tree: tree_lib.Tree, scale: Scale = 'std',
                 epsilon: chex.Numeric = EPSILON) -> types.Array:
  """Returns (R_i - mean(R)) / (std(R) + epsilon) at leaves, [B, N] float32.

  Args:
    tree: [B, N, T].
    scale: 'std', or 'none' for R_i - mean(R).
    epsilon: reward units.

  Returns:
    0 off the leaves.

  Raises:
    ValueError: if the scale is unknown.
  """
  checks.one_of('scale', scale, Scale)
  checks.between('epsilon', epsilon, 0)
  values, leaf = returns.centred_leaf_returns(tree), tree_lib.is_leaf(tree)
  if scale == 'std':
    return masked.whiten(values, leaf, axis=-1, epsilon=epsilon, ddof=1)
  mean = masked.mean(values, leaf, axis=-1, keepdims=True)
  return masked.fill(values - mean, leaf)


def _has_contrast(tree):
  """Returns [B, N] bool, True in trees whose returns are not all equal."""
  values = returns.centred_leaf_returns(tree)
  differs = jnp.any(jnp.abs(values) > EPSILON, axis=-1, keepdims=True)
  return jnp.broadcast_to(differs, values.shape)

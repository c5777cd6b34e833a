"""Credit of whole paths: every leaf against the other leaves of its task."""

from typing import Literal

import jax.numpy as jnp

from bpo_jax import checks
from bpo_jax import masked
from bpo_jax import returns
from bpo_jax import tree as tree_lib
from bpo_jax import types
from bpo_jax.advantages import common

Scale = Literal['std', 'none']


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
    Ahmadian et al. 2024, Back to Basics, equation 8 (arXiv 2402.14740).
  """
  values, leaf = returns.centred_leaf_returns(tree), tree_lib.is_leaf(tree)
  count = masked.count(leaf, axis=-1, keepdims=True)
  others = masked.sum(values, leaf, axis=-1, keepdims=True) - values
  advantages = values - others / jnp.maximum(count - 1, 1)
  return common.path_credit(tree, masked.fill(advantages, leaf & (count > 1)),
                      path_weighting)


def grpo(tree: tree_lib.Tree, *, scale: Scale = 'std', epsilon: float = 1e-6,
         path_weighting: common.PathWeighting = 'token') -> types.Credit:
  """Group-relative advantages over the leaves of a tree.

  A_i = (R_i - mean(R)) / (std(R) + epsilon), std with G - 1 in its denominator.
  A tree of one leaf or of equal returns gets 0; its tokens keep their weights,
  so they count in the denominator of the loss and in the KL term.

  Args:
    tree: [B, N, T].
    scale: 'std', or 'none' for the advantages of Dr. GRPO.
    epsilon: added to the standard deviation; reward units.
    path_weighting: as in `rloo`; 'sequence' is the paper's 1 / |o_i|.

  Returns:
    Credit; shared tokens as in `rloo`.

  Raises:
    ValueError: if an option is unknown.

  References:
    Shao et al. 2024, DeepSeekMath, section 4.1 (arXiv 2402.03300).
    Liu et al. 2025, Understanding R1-Zero-Like Training (arXiv 2503.20783).
  """
  checks.one_of('scale', scale, Scale)
  values, leaf = returns.centred_leaf_returns(tree), tree_lib.is_leaf(tree)
  advantages = values - masked.mean(values, leaf, axis=-1, keepdims=True)
  if scale == 'std':
    spread = masked.std(values, leaf, axis=-1, keepdims=True, ddof=1)
    advantages = advantages / (spread + epsilon)
  return common.path_credit(tree, masked.fill(advantages, leaf), path_weighting)

"""What an estimator's row in the contract suite is, and the first rows."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import oracles

from bpo_jax import advantages


class Case(NamedTuple):
  """One estimator with its options, held to the contract.

  Attributes:
    estimator: (tree, **options, **arrays) -> Credit.
    oracle: the same in recursive float64, -> [2, B, N, T].
    options: scalars.
    arrays: name -> 'token' or 'node': random arrays [B, N, T] or [B, N] that
      the estimator reads beside the tree; those per token off action tokens,
      and those per node on padding, are not to be read.
    contrast: whether it compares returns within a tree, so that one path, or
      paths of equal returns, get exactly 0.
    independent: whether trees of a batch are independent of each other.
    path_weights: 'token' or 'sequence' where the weights are those of training
      on every path; 'split' where the leaves share a weight of 1; None where
      the oracle alone says what they are.
  """

  estimator: Callable[..., Any]
  oracle: Callable[..., np.ndarray]
  options: dict[str, Any] = {}
  arrays: dict[str, str] = {}
  contrast: bool = True
  independent: bool = True
  path_weights: str | None = None


CASES = {
    'rloo': Case(advantages.rloo, oracles.rloo, path_weights='token'),
    'rloo-sequence': Case(
        advantages.rloo, oracles.rloo, dict(path_weighting='sequence'),
        path_weights='sequence'),
    'grpo': Case(advantages.grpo, oracles.grpo, path_weights='token'),
    'grpo-paper': Case(
        advantages.grpo, oracles.grpo, dict(path_weighting='sequence'),
        path_weights='sequence'),
    'grpo-no-std': Case(
        advantages.grpo, oracles.grpo, dict(scale='none'),
        path_weights='token'),
    'bpo': Case(advantages.bpo, oracles.bpo),
    'bpo-split': Case(
        advantages.bpo, oracles.bpo,
        dict(node_weighting='split', node_values='split_mean'),
        path_weights='split'),
    'bpo-drop': Case(
        advantages.bpo, oracles.bpo,
        dict(incumbent='drop', node_values='leaf_mean')),
    **{f'bpo-{credit}': Case(
        advantages.bpo, oracles.bpo,
        dict(prefix_credit=credit, root_group=False, lambda_=0.7))
       for credit in advantages.PREFIX_CREDITS},
    'bpo-lambda-0': Case(
        advantages.bpo, oracles.bpo,
        dict(prefix_credit='sum', root_group=False, lambda_=0.0)),
    'bpo_rb': Case(advantages.bpo_rb, oracles.bpo_rb, path_weights='split'),
    'bpo_rb-levels': Case(
        advantages.bpo_rb, oracles.bpo_rb,
        dict(rho=np.float32([0.9, 0.2, 0.6])), path_weights='split'),
    'bpo_rb-uniform': Case(
        advantages.bpo_rb, oracles.bpo_rb,
        dict(rho=0.0, node_weighting='uniform', node_values='own')),
}

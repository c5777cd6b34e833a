"""What an estimator's row in the contract suite is, and the first rows."""

from collections.abc import Callable
import typing
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
    path_weights: what the weights of a tree sum to, one of `SUMS` or (root,
      **arrays of the tree) -> sum; 'split' where every token of a leaf weighs
      what the leaf does, and all leaves 1.
  """

  estimator: Callable[..., Any]
  oracle: Callable[..., np.ndarray]
  options: dict[str, Any] = {}
  arrays: dict[str, str] = {}
  contrast: bool = True
  independent: bool = True
  path_weights: str | Callable[..., float] = 'once'


def lengths(root):
  """Returns the number of action tokens of the path to every leaf."""
  return [sum(sum(n.mask) for n in leaf.path) for leaf in root.leaves]


def count(root, is_counted=lambda node: True):
  """Returns the number of action tokens in some of the nodes."""
  return sum(sum(n.mask) for n in oracles.walk(root) if is_counted(n))


def _kept(node):
  """Whether no fork made of a node, or of what it continues, an incumbent."""
  for above in reversed(node.path):
    if above.siblings:
      return above.birth == max(x.birth for x in above.parent.children)
  return True


def unless_equal(root):
  """Every path's own tokens, where returns differ."""
  totals = [leaf.total for leaf in root.leaves]
  return sum(lengths(root)) * (max(totals) > min(totals))


SUMS = {
    # Every token of every path, and every path.
    'token': lambda root: sum(lengths(root)),
    'sequence': lambda root: sum(length > 0 for length in lengths(root)),
    # Every token of the tree; those laid down first; those of no incumbent.
    'once': count,
    'first': lambda root: count(root, lambda node: node.birth == 0),
    'kept': lambda root: count(root, _kept),
}


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
        dict(incumbent='drop', node_values='leaf_mean'), path_weights='kept'),
    **{f'bpo-{credit}': Case(
        advantages.bpo, oracles.bpo,
        dict(prefix_credit=credit, root_group=False, lambda_=0.7))
       for credit in typing.get_args(advantages.PrefixCredit)},
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

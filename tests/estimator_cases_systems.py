"""Rows of the estimator contract: the branching systems."""

import estimator_cases
import jax.numpy as jnp
import numpy as np
import oracles as slow
import oracles_systems as oracles

from bpo_jax import advantages
from bpo_jax import tree as tree_lib

_Case = estimator_cases.Case
_NEVER = -1e9  # A return that every rollout reaches.


def _gcpo(tree, golden, **options):
  """gcpo with the leaf of the largest score for a golden path, if above 0."""
  scores = jnp.where(tree_lib.is_leaf(tree), golden, -jnp.inf)
  best = jnp.max(scores, axis=-1, keepdims=True)
  marked = (scores == best) & (best > 0)
  return advantages.gcpo(tree, golden=marked, **options)


def _gcpo_oracle(tree, golden, **options):
  return oracles.gcpo(tree, oracles.golden_leaf(tree, golden), **options)


def _rows(root):
  """Every row weighs 1: a first trajectory, or a fork without its prefix."""
  return sum(oracles.length(oracles.row_of(leaf)) > 0 for leaf in root.leaves
             if leaf is not root)


def _below_root(root):
  return estimator_cases.count(root, lambda node: node is not root)


def _trained_by_branpo(threshold):
  """First trajectories and the forks that contrast with what they left."""
  def trained(root):
    tree = oracles.Branpo(root, threshold, 0.0)
    return estimator_cases.count(root, lambda node: (
        node is not root and tree.used(oracles.row_start(node))))
  return trained


def _trained_by_gcpo(threshold):
  """Every path 1, but the golden one where a rollout succeeds."""
  def trained(root, golden):
    best = max(root.leaves, key=lambda leaf: golden[leaf.index])
    marked = best if golden[best.index] > 0 else None
    solved = any(leaf.total >= threshold for leaf in root.leaves
                 if leaf is not marked)
    return sum(oracles.length(leaf.path) > 0 for leaf in root.leaves
               if leaf is not marked or not solved)
  return trained


def _likely(probability):
  """Every token of the tree that was less likely than that."""
  return lambda root: sum(
      inside and p < np.log(probability) for node in slow.walk(root)
      for p, inside in zip(node.log_probs, node.mask))


CASES = {
    'cbpo': _Case(
        advantages.cbpo, oracles.cbpo, independent=False, path_weights=_rows),
    'cbpo-token': _Case(
        advantages.cbpo, oracles.cbpo,
        dict(path_weighting='token', cbv_clip=0.9, cbv_scale=0.7),
        independent=False, path_weights=_below_root),
    'appo': _Case(
        advantages.appo, oracles.appo, path_weights=lambda root:
        estimator_cases.count(root, lambda node: node is not root
                              and oracles.is_first(node))),
    'arpo_soft': _Case(
        advantages.arpo_soft, oracles.arpo_soft, path_weights='token'),
    'arpo_hard': _Case(advantages.arpo_hard, oracles.arpo_hard),
    'branpo': _Case(advantages.branpo, oracles.branpo,
                    path_weights=_trained_by_branpo(0.8)),
    'branpo-low': _Case(
        advantages.branpo, oracles.branpo, dict(success_threshold=0.0),
        path_weights=_trained_by_branpo(0.0)),
    'gcpo': _Case(_gcpo, _gcpo_oracle, arrays=dict(golden='node'),
                  contrast=False, path_weights=_trained_by_gcpo(0.5)),
    'gcpo-fail': _Case(
        _gcpo, _gcpo_oracle, dict(success_threshold=-_NEVER),
        arrays=dict(golden='node'), contrast=False,
        path_weights=_trained_by_gcpo(-_NEVER)),
    'gcpo-margin': _Case(
        _gcpo, _gcpo_oracle,
        dict(success_threshold=-_NEVER, contrast='logistic_margin',
             contrast_beta=0.7),
        arrays=dict(golden='node'), contrast=False,
        path_weights=_trained_by_gcpo(-_NEVER)),
    'gcpo-succeed': _Case(
        _gcpo, _gcpo_oracle, dict(success_threshold=_NEVER),
        arrays=dict(golden='node'), path_weights=_trained_by_gcpo(_NEVER)),
    'tree_grpo': _Case(
        advantages.tree_grpo, oracles.tree_grpo, path_weights='token'),
    'tree_grpo-sequence': _Case(
        advantages.tree_grpo, oracles.tree_grpo,
        dict(path_weighting='sequence'), path_weights='sequence'),
    'treerl': _Case(advantages.treerl, oracles.treerl, path_weights='token'),
    'treerl-sequence': _Case(
        advantages.treerl, oracles.treerl, dict(path_weighting='sequence'),
        path_weights='sequence'),
    'spo_tree': _Case(
        advantages.spo_tree, oracles.spo_tree, path_weights=_likely(0.9)),
    'spo_tree-split': _Case(
        advantages.spo_tree, oracles.spo_tree,
        dict(max_probability=1.0, node_weighting='split',
             node_values='leaf_mean'), path_weights='split'),
    'sipo': _Case(advantages.sipo, oracles.sipo, dict(a2=0.0)),
    'sipo-corrected': _Case(
        advantages.sipo, oracles.sipo, dict(a2=0.7, w=0.5), contrast=False),
    'sipo-actions': _Case(
        advantages.sipo, oracles.sipo,
        dict(a2=np.float32(-1.5), unit='action', node_values='leaf_mean',
             node_weighting='split'), contrast=False, path_weights='split'),
}

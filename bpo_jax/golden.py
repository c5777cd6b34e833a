"""Golden trajectories: known successes beside the rollouts of a task."""

from collections.abc import Sequence
import dataclasses

import numpy as np

from bpo_jax import tree as tree_lib


def graft(tree: tree_lib.Tree, chains: Sequence[tree_lib.Tree | None],
          bucket: int = 8) -> tuple[tree_lib.Tree, np.ndarray]:
  """Hangs one more trajectory below the root of some trees, on the host.

  Args:
    tree: [B, N, T].
    chains: for each tree another of the same prompt, [1, N', T'], whose root is
      taken to be the tree's own; None for none.
    bucket: sizes are rounded up to this times a power of two.

  Returns:
    The trees, with the chains' nodes after their own, and golden [B, N''] bool,
    True at the nodes that were added.

  Raises:
    ValueError: if there is not one chain, or None, for every tree, if it is no
      single path, or if its root differs from that of its tree.
  """
  tree_lib.check_batch(tree)
  num_trees, num_nodes, num_tokens = np.shape(tree.tokens)
  if len(chains) != num_trees:
    raise ValueError(f'chains: expected {num_trees}, one a tree or None, got '
                     f'{len(chains)}')
  for b, chain in enumerate(chains):
    _check_chain(tree, chain, b)
  sizes = [chain.tokens.shape[1:] for chain in chains if chain is not None]
  extra, length = np.max([(1, 1), *sizes], axis=0)
  room = tree_lib.bucketed(num_nodes + int(extra) - 1, bucket)
  width = tree_lib.bucketed(max(int(length), num_tokens), bucket)
  num_sets = max(1 if x.allowed is None else x.allowed.shape[2]
                 for x in (tree, *chains) if x is not None)
  fields = _padded(tree, (num_trees, room, width), num_sets)
  golden = np.zeros((num_trees, room), bool)
  for b, chain in enumerate(chains):
    if chain is not None:
      count = int(np.sum(chain.node_mask[0])) - 1
      start = 1 + int(np.flatnonzero(tree.node_mask[b])[-1])
      _place(fields, chain, b, start, count)
      golden[b, start:start + count] = True
  return tree_lib.Tree(**fields), golden


def teacher_forced(tree: tree_lib.Tree, golden: np.ndarray,
                   log_probs: np.ndarray) -> tree_lib.Tree:
  """Returns the tree with the policy's own log-probs on golden trajectories.

  They bound the step that is taken, and are no importance correction for
  whoever laid the trajectory down.

  Args:
    tree: [B, N, T].
    golden: [B, N] bool.
    log_probs: [B, N, T] float32, nats, of the policy before the update.
  """
  on_golden = golden[..., None] & np.asarray(tree.action_mask)
  return tree.replace(behaviour_log_probs=np.where(
      on_golden, log_probs, tree.behaviour_log_probs).astype(np.float32))


def _padded(tree, shape, num_sets):
  """Returns the fields of padding of that shape, with the tree written in."""
  words = 0 if tree.allowed is None else tree.allowed.shape[-1]
  empty = tree_lib.empty(shape, words, num_sets)
  fields = {}
  for field in dataclasses.fields(tree):
    value = getattr(tree, field.name)
    if value is not None:
      fields[field.name] = getattr(empty, field.name)
      fields[field.name][tuple(map(slice, np.shape(value)))] = value
  return fields


def _check_chain(tree, chain, b):
  """Refuses what is neither None nor one path from the prompt of the tree."""
  if chain is None:
    return
  if not isinstance(chain, tree_lib.Tree):
    raise ValueError(f'chains: expected a Tree or None for tree {b}, got '
                     f'{type(chain).__name__}')
  tree_lib.check_batch(chain)
  real = int(np.sum(chain.node_mask[0])) if len(chain.node_mask) == 1 else 0
  path = np.arange(-1, real - 1)
  if not real or not np.array_equal(chain.parents[0, :real], path):
    raise ValueError(f'chains: expected one path for tree {b}, [1, N, T] with '
                     'parents -1, 0, 1, .., got another tree')
  mask, other = tree.token_mask[b, 0], chain.token_mask[0, 0]
  if not np.array_equal(tree.tokens[b, 0][mask], chain.tokens[0, 0][other]):
    raise ValueError(f'chains: expected the prompt of tree {b} at the root, '
                     'got another; a golden trajectory is of the same task')
  words, others = (
      0 if x.allowed is None else x.allowed.shape[-1] for x in (tree, chain))
  if words != others:
    raise ValueError(
        f'chains: expected allowed sets of {words} words, as those of tree '
        f'{b}, got {others}; 0 is none')


def _place(fields, chain, b, start, count):
  """Writes `count` nodes of a chain behind the `start` nodes of tree `b`."""
  for name, field in fields.items():
    value = np.asarray(getattr(chain, name))[0, 1:count + 1]
    if name == 'parents':
      value = np.where(value == 0, 0, value + start - 1)
    index = (b, slice(start, start + count), *map(slice, value.shape[1:]))
    field[index] = value

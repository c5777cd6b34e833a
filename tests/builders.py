"""Random ragged trees, and the metamorphoses that must not change a result."""

import dataclasses

import jax
import numpy as np

from bpo_jax import tree as tree_lib
from bpo_jax import types


def random_builder(seed: int, max_nodes: int = 24, max_tokens: int = 7,
                   offset: float = 0.0) -> tree_lib.TreeBuilder:
  """Returns a ragged tree: random depths, branching, spans, rewards, births.

  `offset` is added to the reward of every leaf.
  """
  rng = np.random.default_rng(seed)
  root_rng = np.random.default_rng([seed, 1])  # So that other draws stay.
  num_nodes = int(rng.integers(1, max_nodes + 1))
  parents = [-1] + [int(rng.integers(max(0, n - 4), n))
                    for n in range(1, num_nodes)]
  births = [0] * num_nodes
  builder = tree_lib.TreeBuilder()
  for node, parent in enumerate(parents):
    # A later child of a parent is a fork, of the stage after its parent's; of
    # the root it may be a first trajectory as well.
    is_fork = parent >= 0 and parent in parents[:node]
    is_fork = is_fork and (parent > 0 or root_rng.random() < 0.3)
    births[node] = births[parent] + is_fork if node else 0
    leaf = node not in parents
    ended = leaf and node > 0 and rng.random() < 0.8
    length = int(rng.integers(0, max_tokens + 1))
    mask = rng.random(length) < (0.6 if node else 0.0)
    builder.add(
        parent, rng.integers(0, 50, length), action_mask=mask,
        behaviour_log_probs=-rng.random(length), entropies=rng.random(length),
        reward=float(rng.normal()) + offset * leaf,
        terminal=ended and rng.random() < 0.7, truncated=False,
        birth=int(births[node]), anchor=int(rng.integers(-1, 5)))
  return builder


def random_trajectories(seed: int) -> tree_lib.TreeBuilder:
  """Returns first trajectories of several lengths, some actions in one node."""
  rng = np.random.default_rng(seed)
  builder = tree_lib.TreeBuilder()
  root = builder.add(types.NO_PARENT, [1, 2])
  for _ in range(rng.integers(1, 6)):
    node = root
    for _ in range(rng.integers(1, 6)):
      mask = rng.random(4) < 0.6
      mask[rng.integers(4)] = True
      size = np.where(mask, -1.0, 0.0)
      node = builder.add(
          node, range(4), action_mask=mask, behaviour_log_probs=size,
          entropies=-size)
  return builder


def random_trees(seed: int, num_trees: int = 3, make=random_builder, **kwargs
                 ) -> tree_lib.Tree:
  """Returns a validated batch of random trees, all of one shape."""
  tree = tree_lib.stack(
      [make(1000 * seed + i, **kwargs) for i in range(num_trees)],
      num_nodes=28, num_tokens=8)
  tree.validate()
  return tree


def chains(returns, num_tokens: int = 2, **sizes) -> tree_lib.Tree:
  """Returns trees that branch at the root alone; returns [B][G] rewards."""
  builders = []
  for rewards in returns:
    builder = tree_lib.TreeBuilder()
    root = builder.add(types.NO_PARENT, [1])
    for reward in rewards:
      add_action(builder, root, reward=reward, num_tokens=num_tokens,
                 terminal=True)
    builders.append(builder)
  return tree_lib.stack(builders, **sizes)


def add_action(builder, parent, num_tokens=1, entropy=0.0, **kwargs) -> int:
  """Adds a node of action tokens, each of probability 1 / e."""
  return builder.add(
      parent, range(num_tokens), action_mask=[True] * num_tokens,
      behaviour_log_probs=[-1.0] * num_tokens,
      entropies=[entropy] + [0.0] * (num_tokens - 1), **kwargs)


def pad(tree: tree_lib.Tree, num_trees=0, num_nodes=0, num_tokens=0
        ) -> tree_lib.Tree:
  """Returns the tree with so many more trees, nodes and tokens of padding."""
  extra = (num_trees, num_nodes, num_tokens, 0)

  def grow(name, value):
    fill = {'parents': -1, 'anchor': -1}.get(name, 0)
    width = [(0, n) for n in extra[:np.ndim(value)]]
    return np.pad(np.asarray(value), width, constant_values=fill)
  return tree.replace(**{
      field.name: grow(field.name, getattr(tree, field.name))
      for field in dataclasses.fields(tree)
      if getattr(tree, field.name) is not None})


def poison(tree: tree_lib.Tree) -> tree_lib.Tree:
  """Returns the tree with NaN wherever a number is not to be read."""
  nan = np.float32(np.nan)
  return tree.replace(
      behaviour_log_probs=np.where(
          tree.action_mask, tree.behaviour_log_probs, nan),
      entropies=np.where(tree.action_mask, tree.entropies, nan),
      rewards=np.where(tree.node_mask, tree.rewards, nan))


def take(tree: tree_lib.Tree, index) -> tree_lib.Tree:
  """Returns the trees of those indices."""
  return jax.tree.map(lambda x: np.asarray(x)[np.asarray(index)], tree)


def permute_nodes(tree: tree_lib.Tree, seed: int
                  ) -> tuple[tree_lib.Tree, np.ndarray]:
  """Returns the trees in another topological order, and that order [B, N].

  Siblings of equal birth may change places; but where the root is forked, the
  first of its children is what was forked, and stays the first. order[b, i] is
  the old index of what stands at i now.
  """
  rng = np.random.default_rng(seed)
  orders = np.stack([
      _random_topological(*x, rng) for x in zip(tree.parents, tree.birth)])
  rank = np.argsort(orders, axis=1)

  def move(value):
    value = np.asarray(value)
    index = orders.reshape(orders.shape + (1,) * (value.ndim - 2))
    return np.take_along_axis(value, index, axis=1)
  moved = jax.tree.map(move, tree)
  parents = np.take_along_axis(rank, np.maximum(moved.parents, 0), axis=1)
  parents = np.where(moved.parents < 0, -1, parents).astype(np.int32)
  return moved.replace(parents=parents), orders


def _random_topological(parents, birth, rng):
  num_nodes, parents = len(parents), np.array(parents)
  tops = np.flatnonzero(parents == 0)
  if birth[tops].any():
    first = min(tops, key=lambda n: (birth[n], n))
    alike = tops[(birth[tops] == birth[first]) & (tops != first)]
    parents[alike] = first  # For the order alone.
  ready = [0]
  order = []
  while ready:
    node = ready.pop(int(rng.integers(len(ready))))
    order.append(node)
    ready += [n for n in range(num_nodes) if parents[n] == node]
  return np.array(order + [n for n in range(num_nodes) if n not in order])

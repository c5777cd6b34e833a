"""The record of a tree of rollouts, its checks, views and builder.

A node is a contiguous segment of tokens with one parent; a chain of nodes below
the root is an ordinary trajectory. `Tree` is the padded batch that kernels see,
`TreeBuilder` grows one tree on the host, `stack` turns builders into a batch.
"""

from collections.abc import Sequence
import dataclasses
from typing import Literal

import chex
import jax.numpy as jnp
import numpy as np

from bpo_jax import checks
from bpo_jax import tree_checks
from bpo_jax import types
from bpo_jax import walks

Unit = Literal['action', 'token']


@chex.dataclass(frozen=True, mappable_dataclass=False)
class Tree:
  """A batch of B padded trees of N nodes of T tokens.

  Node 0 is the root and holds the prompt; `parents[n] < n` for every other real
  node. The tokens along a path are exactly what the policy saw and produced.
  Padding is False in every mask and NO_PARENT in `parents`.

  Attributes:
    tokens: what was seen and produced.
    token_mask: real tokens, a prefix of T.
    action_mask: tokens drawn by the policy, a subset of `token_mask`.
    behaviour_log_probs: nats, under the policy that drew the token; 0 off
      `action_mask`.
    entropies: nats, of the distribution the token was drawn from; 0 off
      `action_mask`.
    parents: index of the parent node.
    node_mask: real nodes.
    rewards: reward units, received on entering the node.
    terminal: the environment ended the episode here.
    truncated: a limit ended it here; the return beyond is unknown.
    birth: 0 for a first trajectory, k for the k-th branching stage.
    anchor: equal for equal observations within one tree, -1 when unknown.
    allowed: None where the policy drew from the whole vocabulary, else a bit
      set for each of a node's first U tokens, beyond which none is an action:
      bit v % 32 of word v // 32 says that token v could be drawn there.
  """

  tokens: chex.Array  # [B, N, T] int32
  token_mask: chex.Array  # [B, N, T] bool
  action_mask: chex.Array  # [B, N, T] bool
  behaviour_log_probs: chex.Array  # [B, N, T] float32
  entropies: chex.Array  # [B, N, T] float32
  parents: chex.Array  # [B, N] int32
  node_mask: chex.Array  # [B, N] bool
  rewards: chex.Array  # [B, N] float32
  terminal: chex.Array  # [B, N] bool
  truncated: chex.Array  # [B, N] bool
  birth: chex.Array  # [B, N] int32
  anchor: chex.Array  # [B, N] int32
  allowed: chex.Array | None = None  # [B, N, U, W] uint32

  def validate(self) -> None:
    """Checks on the host that the arrays are a batch of trees.

    Raises:
      ValueError: naming the field, what was expected, what came, and where.
    """
    tree_checks.validate(self)


def check_batch(tree: Tree) -> None:
  """Refuses a tree without a batch axis, as `TreeBuilder.build` returns it.

  Raises:
    ValueError: if the tokens are not [B, N, T], or hold not even one.
  """
  shape = np.shape(tree.tokens)
  if len(shape) != 3:
    axes = '[N, T]' if len(shape) == 2 else f'{len(shape)} axes'
    raise ValueError(
        f'tree: expected a batch [B, N, T], got {axes}, shape {shape}; make '
        'one of builders by bpo_jax.tree.stack([builder])')
  tree_checks.refuse_empty(shape)


def depth(tree: Tree) -> types.Array:
  """Returns the number of ancestors, [B, N] int32; 0 on padding."""
  check_batch(tree)
  has_parent = jnp.asarray(tree.parents >= 0, jnp.int32)
  return walks.sum_above(has_parent, tree.parents)


def num_children(tree: Tree) -> types.Array:
  """Returns the number of children, [B, N] int32."""
  check_batch(tree)
  return walks.sum_of_children(
      tree.node_mask.astype(jnp.int32), tree.parents, tree.node_mask)


def is_leaf(tree: Tree) -> types.Array:
  """Returns [B, N] bool, True for real nodes without children."""
  return tree.node_mask & (num_children(tree) == 0)


def num_leaves(tree: Tree) -> types.Array:
  """Returns the number of leaves at or below a node, [B, N] int32."""
  return walks.sum_below(is_leaf(tree).astype(jnp.int32), tree.parents)


def first_child(tree: Tree) -> types.Array:
  """Returns the child that was laid down first, [B, N] int32, or -1.

  That is the child of the smallest birth, then of the smallest index: where
  forks were added to a trajectory, the trajectory's own continuation.
  """
  check_batch(tree)
  return walks.first_child(tree.parents, tree.node_mask, tree.birth)


def is_first_child(tree: Tree) -> types.Array:
  """Returns [B, N] bool, True for a node that is its parent's first child."""
  first = walks.at_parent(first_child(tree), tree.parents, -1)
  return first == jnp.arange(tree.parents.shape[-1])


def in_group(tree: Tree) -> types.Array:
  """Returns [B, N] bool, True for real nodes with at least one sibling."""
  return walks.at_parent(num_children(tree), tree.parents) > 1


def num_tokens(tree: Tree) -> types.Array:
  """Returns the number of real tokens of a node, [B, N] int32."""
  return jnp.sum(tree.token_mask, axis=-1, dtype=jnp.int32)


def tokens_above(tree: Tree) -> types.Array:
  """Returns the number of tokens of a node's ancestors, [B, N] int32."""
  check_batch(tree)
  tokens = num_tokens(tree)
  return walks.sum_above(tokens, tree.parents) - tokens


def action_starts(tree: Tree) -> types.Array:
  """Returns [B, N, T] bool, True at the first token of every action.

  An action is a maximal run of action tokens within one node; a node that
  begins inside an action, because it was forked there, begins a new one.
  """
  check_batch(tree)
  before = jnp.pad(tree.action_mask[..., :-1], ((0, 0), (0, 0), (1, 0)))
  return tree.action_mask & ~before


def num_actions(tree: Tree) -> types.Array:
  """Returns the number of a node's own actions, [B, N] int32."""
  return jnp.sum(action_starts(tree), axis=-1, dtype=jnp.int32)


def actions_through(tree: Tree) -> types.Array:
  """Returns the actions of a path up to the end of each node, [B, N] int32."""
  return walks.sum_above(num_actions(tree), tree.parents)


def first_action_index(tree: Tree) -> types.Array:
  """Returns the offset of a node's first action token, [B, N] int32, or -1."""
  found = jnp.any(tree.action_mask, axis=-1)
  return jnp.where(found, jnp.argmax(tree.action_mask, axis=-1), -1)


def surprisal(tree: Tree, unit: Unit = 'token') -> types.Array:
  """Returns -log pi of what was drawn, [B, N, T] float32 nats, 0 off actions.

  Args:
    tree: [B, N, T].
    unit: 'token', of the token itself, or 'action', of all that its action has
      from there on, which at the first token is the whole of it.

  Raises:
    ValueError: if the unit is unknown.
  """
  checks.one_of('unit', unit, Unit)
  values = jnp.where(tree.action_mask, -tree.behaviour_log_probs, 0)
  if unit == 'token':
    return values
  return walks.sum_to_end_of_run(values, tree.action_mask)


@dataclasses.dataclass
class _Node:
  """One node of a tree under construction; owns its arrays."""

  parent: int  # Handle.
  tokens: np.ndarray  # [L] int32
  action_mask: np.ndarray  # [L] bool
  behaviour_log_probs: np.ndarray  # [L] float32
  entropies: np.ndarray  # [L] float32
  allowed: np.ndarray | None  # [to the last action, W] uint32
  reward: float
  terminal: bool
  truncated: bool
  birth: int
  anchor: int

  def cut(self, start: int, stop: int) -> dict[str, np.ndarray | None]:
    """Returns copies of the per-token fields of tokens start to stop - 1."""
    names = ('tokens', 'action_mask', 'behaviour_log_probs', 'entropies',
             'allowed')
    fields = {name: getattr(self, name) for name in names}
    fields = {name: None if field is None else field[start:stop].copy()
              for name, field in fields.items()}
    if self.allowed is not None:  # A part may end with no action.
      num_sets = tree_checks.num_sets(fields['action_mask'])
      fields['allowed'] = fields['allowed'][:num_sets]
    return fields


class TreeBuilder:
  """Grows one tree on the host.

  A handle stands for the state at the END of a node, and keeps doing so when
  the node is split. Until the first split a handle is also the node's index in
  the built tree; `index` tells it at any time.
  """

  def __init__(self):
    self._nodes: list[_Node] = []  # By handle.
    self._order: list[int] = []  # Handles in topological order.

  def __len__(self) -> int:
    return len(self._nodes)

  def add(self, parent: int, tokens: Sequence[int],
          action_mask: Sequence[bool] | None = None,
          behaviour_log_probs: Sequence[float] | None = None,
          entropies: Sequence[float] | None = None, reward: float = 0.0,
          terminal: bool = False, truncated: bool = False, birth: int = 0,
          anchor: int = types.UNKNOWN_ANCHOR,
          allowed: np.ndarray | None = None) -> int:
    """Adds a node and returns its handle.

    Args:
      parent: handle of the parent; NO_PARENT for the root, which comes first.
      tokens: [L] token ids; L may be 0.
      action_mask: [L] bool, tokens drawn by the policy; None for none.
      behaviour_log_probs: [L] nats; needed where there are action tokens, not
        read elsewhere.
      entropies: [L] nats; None for 0; not read off action tokens.
      reward: reward units, received on entering the node.
      terminal: whether the environment ended the episode here.
      truncated: whether a limit ended it here.
      birth: 0 for a first trajectory, k for the k-th branching stage.
      anchor: equal for equal observations within the tree; -1 when unknown.
      allowed: [L, W] uint32, which tokens could be drawn; None for all. Not
        kept behind the last action token.

    Raises:
      ValueError: if a length differs from that of `tokens`, a log-prob is
        missing or not finite, or the parent is unknown or has ended.
    """
    self._check_parent(parent)
    length = len(tokens)
    mask = _row('action_mask', action_mask, length, bool)
    if behaviour_log_probs is None and mask.any():
      raise ValueError(
          'behaviour_log_probs: expected one per token of a node with action '
          'tokens, got None; record them as the tokens are drawn')
    log_probs = _row(
        'behaviour_log_probs', behaviour_log_probs, length, np.float32)
    if not np.isfinite(log_probs[mask]).all():
      raise ValueError('behaviour_log_probs: expected finite values at action '
                       f'tokens, got {log_probs[mask]}')
    if not np.isfinite(np.float32(reward)):
      raise ValueError(f'reward: expected a finite number, got {reward}')
    entropy = _row('entropies', entropies, length, np.float32)
    if not np.isfinite(entropy[mask]).all():
      raise ValueError('entropies: expected finite values at action tokens, '
                       f'got {entropy[mask]}')
    self._nodes.append(_Node(
        parent=parent, tokens=_row('tokens', tokens, length, np.int32),
        action_mask=mask, behaviour_log_probs=np.where(mask, log_probs, 0),
        entropies=np.where(mask, entropy, 0),
        allowed=_words(allowed, mask), reward=float(reward),
        terminal=bool(terminal), truncated=bool(truncated), birth=int(birth),
        anchor=int(anchor)))
    self._order.append(len(self._nodes) - 1)
    return len(self._nodes) - 1

  def split(self, node: int, offset: int, head_reward: float = 0.0) -> int:
    """Splits a node in two and returns the handle of the head.

    The head takes the tokens below `offset`. The node keeps its handle, the
    tokens from `offset` on, its children, its anchor and the way it ended, so
    forks of the state at `offset` are added to the head.

    Args:
      node: handle of the node to split.
      offset: 0 < offset < length.
      head_reward: the part of the node's reward that came before `offset`.

    Raises:
      ValueError: if the handle is unknown or the offset leaves a part empty.
    """
    self._check_handle(node)
    tail = self._nodes[node]
    if not 0 < offset < len(tail.tokens):
      raise ValueError(f'offset: expected 0 < offset < {len(tail.tokens)}, the '
                       f'length of node {node}, got {offset}')
    head = dataclasses.replace(
        tail, **tail.cut(0, offset), reward=float(head_reward), terminal=False,
        truncated=False, anchor=types.UNKNOWN_ANCHOR)
    handle = len(self._nodes)
    self._nodes.append(head)
    self._nodes[node] = dataclasses.replace(
        tail, **tail.cut(offset, len(tail.tokens)), parent=handle,
        reward=tail.reward - float(head_reward))
    self._order.insert(self._order.index(node), handle)
    return handle

  def fork_points(self, nodes: Sequence[int], offsets: Sequence[int]
                  ) -> list[int]:
    """Splits where a `BranchPlan` says and returns what to fork from.

    Args:
      nodes: [M] indices into the tree as built now; -1 for an unused slot.
      offsets: [M] token offsets; a fork keeps the tokens below.

    Returns:
      [M] handles to add forks to, in the order given; -1 for unused slots.

    Raises:
      ValueError: if an offset lies outside its node.
    """
    handles = [self._order[node] if node >= 0 else -1 for node in nodes]
    points, cuts = [-1] * len(handles), {}
    for slot in sorted(range(len(handles)), key=lambda slot: offsets[slot]):
      handle, offset = handles[slot], int(offsets[slot])
      if handle >= 0:
        points[slot] = self._cut(handle, offset - cuts.get(handle, 0))
        cuts[handle] = offset
    return points

  def handle(self, index: int) -> int:
    """Returns the handle of the node at an index of the tree as built now."""
    if not 0 <= index < len(self):
      raise ValueError(
          f'expected an index from 0 to {len(self) - 1}, got {index}')
    return self._order[index]

  def index(self, handle: int) -> int:
    """Returns the node's index in the tree as built now."""
    self._check_handle(handle)
    return self._order.index(handle)

  def build(self) -> Tree:
    """Returns the tree without a batch axis: arrays [N, ...], T the longest.

    What reads trees reads batches of them: `stack` makes one.

    Raises:
      ValueError: if there is no node.
    """
    length = max((len(node.tokens) for node in self._nodes), default=0)
    return self._padded(len(self), max(length, 1), self._num_words())

  def _cut(self, handle, offset):
    if offset == 0 and self._nodes[handle].parent != types.NO_PARENT:
      return self._nodes[handle].parent
    return self.split(handle, offset)

  def _check_handle(self, handle):
    if not 0 <= handle < len(self):
      raise ValueError(
          f'expected a handle from 0 to {len(self) - 1}, got {handle}')

  def _check_parent(self, parent):
    if not self._nodes:
      if parent != types.NO_PARENT:
        raise ValueError(f'parent: expected NO_PARENT ({types.NO_PARENT}) for '
                         f'the first node, the root, got {parent}')
      return
    self._check_handle(parent)
    if self._nodes[parent].terminal or self._nodes[parent].truncated:
      raise ValueError(
          f'parent: expected a node whose episode goes on, got {parent}, which '
          'is terminal or truncated')

  def _num_words(self):
    words = {n.allowed.shape[1] for n in self._nodes if n.allowed is not None}
    if len(words) > 1:
      raise ValueError(
          f'allowed: expected one number of words, got {sorted(words)}')
    return words.pop() if words else 0

  def _padded(self, num_nodes, num_tokens, num_words):
    """Returns the tree padded to [num_nodes, num_tokens]."""
    if not self._nodes:
      raise ValueError('expected at least a root, got an empty builder')
    masks = [node.action_mask for node in self._nodes]
    tree = empty((num_nodes, num_tokens), num_words,
                 max(map(tree_checks.num_sets, masks)))
    index = {handle: i for i, handle in enumerate(self._order)}
    for i, handle in enumerate(self._order):
      node = self._nodes[handle]
      length = len(node.tokens)
      for name in ('tokens', 'action_mask', 'behaviour_log_probs', 'entropies'):
        getattr(tree, name)[i, :length] = getattr(node, name)
      tree.token_mask[i, :length] = True
      if node.allowed is not None:
        tree.allowed[i, :len(node.allowed)] = node.allowed
      tree.parents[i] = index.get(node.parent, types.NO_PARENT)
      tree.node_mask[i] = True
      tree.rewards[i] = node.reward
      for name in ('terminal', 'truncated', 'birth', 'anchor'):
        getattr(tree, name)[i] = getattr(node, name)
    return tree


def stack(builders: Sequence[TreeBuilder], num_nodes: int | None = None,
          num_tokens: int | None = None, num_trees: int | None = None,
          bucket: int = 8) -> Tree:
  """Returns a batch of trees, padded to common sizes; arrays on the host.

  Args:
    builders: the trees; at least one.
    num_nodes: N; None for the most nodes of any tree, bucketed.
    num_tokens: T; None for the most tokens of any node, bucketed.
    num_trees: B; None for one a builder. Trees beyond those are padding.
    bucket: bucketed sizes are rounded up to this times a power of two, so that
      a run compiles for few shapes; 0 leaves them as they are.

  Raises:
    ValueError: if a given size is too small, or there is no builder.
  """
  if not builders:
    raise ValueError('expected at least one builder, got none')
  trees = [builder.build() for builder in builders]
  nodes, tokens = np.max([tree.tokens.shape for tree in trees], axis=0)
  words = {tree.allowed.shape[-1] for tree in trees if tree.allowed is not None}
  if len(words) > 1:
    raise ValueError(f'allowed: expected one number of words, got {words}')
  batch = empty((
      _size('num_trees', num_trees, len(trees), 0),
      _size('num_nodes', num_nodes, nodes, bucket),
      _size('num_tokens', num_tokens, tokens, bucket)), sum(words),
      max(tree_checks.num_sets(tree.action_mask) for tree in trees))
  for b, tree in enumerate(trees):
    for name in tree_checks.DTYPES:
      value = getattr(tree, name)
      if value is not None:
        getattr(batch, name)[(b, *map(slice, value.shape))] = value
  return batch


def empty(shape: tuple[int, ...], num_words: int = 0, num_sets: int = 1
          ) -> Tree:
  """Returns padding of shape (..., N, T), of sets of allowed tokens as well.

  Args:
    shape: (..., N, T).
    num_words: W; 0 for no sets.
    num_sets: U.
  """
  def make(name):
    fill = dict(parents=types.NO_PARENT, anchor=types.UNKNOWN_ANCHOR)
    size = shape if name in tree_checks.PER_TOKEN else shape[:-1]
    return np.full(size, fill.get(name, 0), tree_checks.DTYPES[name])
  names = [name for name in tree_checks.DTYPES if name != 'allowed']
  fields = {name: make(name) for name in names}
  allowed = None
  if num_words:
    # All tokens allowed: a softmax over none of them would be NaN.
    allowed = np.full(
        (*shape[:-1], num_sets, num_words), 0xFFFFFFFF, np.uint32)
  return Tree(**fields, allowed=allowed)


def bucketed(size: int, bucket: int) -> int:
  """Returns bucket x a power of two, the least that holds `size`; 0: itself."""
  room = max(bucket, 1)
  while bucket and room < size:
    room *= 2
  return room if bucket else int(size)


def _size(name, given, needed, bucket):
  if given is None:
    return bucketed(needed, bucket)
  if given < needed:
    raise ValueError(f'{name}: expected at least {needed}, got {given}')
  return given


def _row(name, values, length, dtype):
  """Returns a fresh [length] array; zeros for None."""
  row = np.zeros(length, dtype) if values is None else np.array(values, dtype)
  if row.shape != (length,):
    raise ValueError(
        f'{name}: expected {length} entries, one a token, got {row.shape}')
  return row


def _words(allowed, action_mask):
  """Returns the sets up to the last action: those of a vocabulary are large."""
  if allowed is None:
    return None
  words = np.asarray(allowed, np.uint32)
  if words.ndim != 2 or len(words) != len(action_mask):
    raise ValueError(
        f'allowed: expected shape [{len(action_mask)}, W], got {words.shape}')
  return words[:tree_checks.num_sets(action_mask)].copy()

"""Which tokens of the trees go where in rows, worked out on the host.

A piece is a part of a tree that has all ancestors of each of its nodes, so that
a network can run it alone; several pieces lie one after the other in a row. The
pieces of a tree are its paths, or the whole of it, or, where it is longer than
a row, subtrees that repeat the path above them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bpo_jax import attention


class Preorder(NamedTuple):
  """The M real nodes of all trees, depth first, children in node order."""

  node: np.ndarray  # [M] int      index into [B * N]
  parent: np.ndarray  # [M] int      place of the nearest ancestor with tokens
  length: np.ndarray  # [M] int      tokens of the node
  above: np.ndarray  # [M] int      tokens of its ancestors
  stop: np.ndarray  # [M] int      one past the last place of its subtree
  size: np.ndarray  # [M] int      tokens of its subtree

  @property
  def until(self) -> np.ndarray:
    """[M] int, tokens of the path to the end of each node."""
    return self.above + self.length


class Layout(NamedTuple):
  """Where the K tokens of some pieces lie; a token may lie in several rows."""

  row: np.ndarray  # [K] int
  place: np.ndarray  # [K] int      in the row
  source: np.ndarray  # [K] int      index into [B * N * T]
  position: np.ndarray  # [K] int      on the path, from 0
  end: np.ndarray  # [K] int      one past the last place that sees it
  predictor: np.ndarray  # [K] int      place of the token before it on the path
  is_new: np.ndarray  # [K] bool     no row before has it


def bucket(length: int) -> int:
  """Returns the least length of a few that holds `length` tokens.

  Multiples of 32 up to 128, of 128 (a block of attention) up to 512, and four
  to the octave beyond: few shapes are compiled, and on average a tenth of a
  long row is padding.
  """
  step = _step(max(1, length) - 1)
  return max(1, -(-length // step)) * step


def bucket_below(length: int) -> int:
  """Returns the largest of the lengths of `bucket` that is not above `length`.

  0 where there is none.
  """
  step = _step(length)
  return length // step * step


def _step(length: int) -> int:
  """Returns how far apart the lengths on both sides of one are."""
  if length < attention.BLOCK:
    return attention.BLOCK // 4
  return max(attention.BLOCK, 1 << length.bit_length() >> 3)


def preorder(
    parents: np.ndarray, node_mask: np.ndarray, lengths: np.ndarray
) -> Preorder:
  """Returns the nodes of a batch of trees depth first.

  Args:
    parents: [B, N] int, below the node's own index; -1 at roots and padding.
    node_mask: [B, N] bool, real nodes.
    lengths: [B, N] int, tokens of each.
  """
  num_trees, num_nodes = parents.shape
  real = node_mask.T.ravel()
  # Flat, nodes before trees, and beyond them what the roots hang from.
  above_all = np.zeros(num_trees, np.int64)
  flat = lambda x: np.concatenate([x.T.ravel() * real, above_all])
  counts, lengths = flat(node_mask), flat(lengths)
  sizes, above = lengths.copy(), np.zeros_like(lengths)
  place, nearest = above - 1, above - 1
  parent = np.where(parents < 0, num_nodes, parents).T * num_trees
  parent += np.arange(num_trees)
  nodes = [slice(n * num_trees, (n + 1) * num_trees) for n in range(num_nodes)]
  for here, at in zip(nodes[::-1], parent[::-1]):
    counts[at] += counts[here]
    sizes[at] += sizes[here]
  free = np.zeros_like(counts)
  free[-num_trees:] = np.cumsum(counts[-num_trees:]) - counts[-num_trees:]
  has_tokens = lengths > 0
  for here, at in zip(nodes, parent):
    place[here] = free[at]
    free[at] += counts[here]
    free[here] = place[here] + 1
    above[here] = above[at] + lengths[at]
    nearest[here] = np.where(has_tokens[at], place[at], nearest[at])
  chosen = np.flatnonzero(real)
  chosen = chosen[np.argsort(place[chosen])]
  return Preorder(
      node=chosen % num_trees * num_nodes + chosen // num_trees,
      parent=nearest[chosen],
      length=lengths[chosen],
      above=above[chosen],
      stop=(place + counts)[chosen],
      size=sizes[chosen],
  )


def paths(order: Preorder) -> list[np.ndarray]:
  """Returns the places on the path to each leaf, leaves in node order.

  Nodes without tokens are left out where they are no leaf.
  """
  leaves = np.flatnonzero(order.stop == np.arange(len(order.stop)) + 1)
  leaves = leaves[np.argsort(order.node[leaves])]
  parents, found = order.parent.tolist(), []
  for place in leaves.tolist():
    path = []
    while place >= 0:
      path.append(place)
      place = parents[place]
    found.append(np.array(path[::-1]))
  return found


def filled_rows(order: Preorder, row_length: int) -> list[list[np.ndarray]]:
  """Returns the places of nodes in each piece of each row, pieces ascending.

  A piece is a tree, or a part of one that is longer than a row. The largest
  pieces come first, each in the first row that has room.

  Args:
    order: trees, whose paths have at most `row_length` tokens.
    row_length: tokens that a row may have.
  """
  pieces, root = [], 0
  while root < len(order.stop):
    if order.size[root] > row_length:
      pieces += _cut(order, root, row_length)
    elif order.size[root]:
      pieces.append(np.arange(root, order.stop[root]))
    root = int(order.stop[root])
  sizes = [int(order.length[piece].sum()) for piece in pieces]
  return [[pieces[i] for i in row] for row in first_fit(sizes, row_length)]


def _cut(order: Preorder, root: int, row_length: int) -> list[np.ndarray]:
  """Returns the pieces of a tree that is longer than a row.

  From the leaves to the root, what hangs from a node is put together to as few
  pieces as first fit finds, and all but one of them repeat the node. So a
  subtree that goes in a row is never cut, and cuts are as near to the root,
  where they repeat least, as the length of a row lets them be.
  """
  stop, sizes = order.stop[root], order.size
  is_long = order.above[root:stop] + sizes[root:stop] > row_length
  pieces = {}  # By node: tokens from the node on, and ranges of places.
  for place in (root + np.flatnonzero(is_long)[::-1]).tolist():
    parts, child = [], place + 1
    while child < order.stop[place]:
      beyond = int(order.stop[child])
      whole = [(int(sizes[child]), [range(child, beyond)])]
      parts += pieces.pop(child, whole)
      child = beyond
    length = int(order.length[place])
    room = row_length - int(order.above[place]) - length
    bins = first_fit([size for size, _ in parts], room)
    pieces[place] = []
    for chosen in bins:
      size = length + sum(parts[i][0] for i in chosen)
      ranges = [r for i in chosen for r in parts[i][1]]
      pieces[place].append((size, [range(place, place + 1), *ranges]))
  return [
      np.sort(np.concatenate([np.arange(r.start, r.stop) for r in ranges]))
      for _, ranges in pieces[root]
  ]


def first_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
  """Returns what goes in each bin: the largest first, into the first with room.

  At most 11/9 of the fewest bins that are possible, and one more.

  Args:
    sizes: of the items, none larger than `capacity`.
    capacity: of a bin.
  """
  bins, free = [], np.full(len(sizes), capacity)
  for item in np.argsort(-np.asarray(sizes, int), kind='stable').tolist():
    chosen = int(np.argmax(free >= sizes[item]))
    if chosen == len(bins):
      bins.append([])
    bins[chosen].append(item)
    free[chosen] -= sizes[item]
  return bins


def lay_out(
    order: Preorder,
    rows: Sequence[Sequence[np.ndarray]],
    token_mask: np.ndarray,
) -> Layout:
  """Returns where every token of the pieces in each row lies.

  Args:
    order: the trees.
    rows: places of nodes, ascending, in each piece of each row.
    token_mask: [B, N, T] bool.
  """
  pieces = [piece for row in rows for piece in row]
  row_of_piece = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
  entries = np.concatenate([np.zeros(0, int), *pieces])
  piece = np.repeat(np.arange(len(pieces)), [len(p) for p in pieces])
  row, lengths = row_of_piece[piece], order.length[entries]
  # Of tokens in all rows: where each node begins, and where its row does.
  begin = np.concatenate([[0], np.cumsum(lengths)])
  origin = begin[np.searchsorted(row, row)]
  keys = piece * (len(order.stop) + 1) + entries
  find = lambda places: np.searchsorted(keys, keys - entries + places)
  end = begin[find(order.stop[entries])] - origin
  above = order.parent[entries]
  last = begin[find(np.maximum(above, 0)) + 1] - 1
  before = np.where(above < 0, begin[:-1], last) - origin
  is_new = np.zeros(len(entries), bool)
  is_new[np.unique(entries, return_index=True)[1]] = True

  entry = np.repeat(np.arange(len(entries)), lengths)
  place = np.arange(len(entry)) - origin[entry]
  offset = np.arange(len(entry)) - begin[entry]
  num_tokens = token_mask.sum(axis=2).ravel()
  first = (np.cumsum(num_tokens) - num_tokens)[order.node[entries]]
  return Layout(
      row=row[entry],
      place=place,
      source=np.flatnonzero(token_mask)[first[entry] + offset],
      position=order.above[entries][entry] + offset,
      end=end[entry],
      predictor=np.where(offset > 0, place - 1, before[entry]),
      is_new=is_new[entry],
  )

"""Walks over trees given as arrays of parents.

Everything takes `[..., N]` arrays. Nodes stand in topological order
(`parents[n] < n`), so a walk is one loop over node indices: forwards from the
root down, backwards from the leaves up. Such a loop does O(N) work a tree,
holds no [N, N] array, and all trees of a batch take each step together.

The bodies of the loops are functions of the module that are given all they
read, so that a walk outside of jit is compiled once for a shape, not at every
call.
"""

from collections.abc import Callable
import functools

import chex
import jax
import jax.numpy as jnp

from bpo_jax import masked
from bpo_jax import types


def per_tree(function: Callable[..., types.ArrayTree], ndim: int
             ) -> Callable[..., types.ArrayTree]:
  """Lifts a function of `[N]` arrays to arrays of `ndim` dimensions."""
  for _ in range(ndim - 1):
    function = jax.vmap(function)
  return function


def slots(parents: chex.Array) -> types.Array:
  """Returns scatter indices [..., N] int32: N, which is dropped, for -1."""
  return jnp.where(parents < 0, parents.shape[-1], parents)


def at_parent(values: chex.Array, parents: chex.Array,
              default: float = 0) -> types.Array:
  """Returns the parent's entry of `values`, `default` for the parentless."""
  parents = jnp.asarray(parents)
  above = jnp.take_along_axis(values, jnp.maximum(parents, 0), axis=-1)
  return masked.fill(above, parents >= 0, default)


def sum_of_children(values: chex.Array, parents: chex.Array,
                    mask: chex.Array) -> types.Array:
  """Returns for every node the sum over its children, [..., N]."""
  def single(values, index):
    return jnp.zeros_like(values).at[index].add(values, mode='drop')
  parents = jnp.asarray(parents)
  values = masked.fill(values, mask)
  return per_tree(single, parents.ndim)(values, slots(parents))


def max_of_children(values: chex.Array, parents: chex.Array,
                    mask: chex.Array) -> types.Array:
  """Returns for every node the largest entry of its children, or -1.

  Args:
    values: [..., N], not negative.
    parents: [..., N] int32, NO_PARENT for the root and for padding.
    mask: [..., N] bool, True for children that count.
  """
  def single(values, index):
    return jnp.full_like(values, -1).at[index].max(values, mode='drop')
  parents = jnp.asarray(parents)
  values = jnp.where(mask, values, -1)
  return per_tree(single, parents.ndim)(values, slots(parents))


def first_child(parents: chex.Array, mask: chex.Array,
                order: chex.Array | None = None) -> types.Array:
  """Returns the index of every node's first child.

  Args:
    parents: [..., N] int32, NO_PARENT for the root and for padding.
    mask: [..., N] bool, True for members.
    order: [..., N] int32, not negative; the child of the smallest order comes
      first, then the one of the smallest index. None: by index alone.

  Returns:
    [..., N] int32; -1 for a node without children.
  """
  def single(key, index):
    smallest = jnp.full(size, never).at[index].min(key, mode='drop')
    return jnp.where(smallest == never, -1, smallest % size)
  parents = jnp.asarray(parents)
  size, never = parents.shape[-1], jnp.iinfo(jnp.int32).max
  key = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), parents.shape)
  if order is not None:
    key = key + jnp.asarray(order, jnp.int32) * size
  key = jnp.where(mask, key, never)
  return per_tree(single, parents.ndim)(key, slots(parents))


def visit_nodes(visit: Callable, state: types.ArrayTree,
                constants: types.ArrayTree, reverse: bool = False
                ) -> types.ArrayTree:
  """Runs state = visit(node, state, constants) over the nodes of every tree.

  Args:
    visit: takes an index and two pytrees of [N] arrays; a function of a module,
      or a cached one.
    state: pytree of [..., N] arrays, all of one shape.
    constants: pytree of such arrays.
    reverse: from the last node to the first.

  Returns:
    The last state.
  """
  state, constants = jax.tree.map(jnp.asarray, (state, constants))
  *leading, num_nodes = jax.tree.leaves(state)[0].shape

  def single(state, constants):
    (state, _), _ = jax.lax.scan(
        _step(visit), (state, constants), jnp.arange(num_nodes),
        reverse=reverse)
    return state

  return per_tree(single, len(leading) + 1)(state, constants)


@functools.cache
def _step(visit):
  def step(carry, node):
    state, constants = carry
    return (visit(node, state, constants), constants), None
  return step


def accumulate_down(combine: Callable, values: types.ArrayTree,
                    parents: chex.Array) -> types.ArrayTree:
  """Accumulates from the root down: y[n] = combine(y[parents[n]], x[n]).

  Args:
    combine: takes the parent's result and the node's own entry, element by
      element; a function of a module.
    values: pytree of [..., N] arrays x.
    parents: [..., N] int32, NO_PARENT for the root and for padding.

  Returns:
    A pytree like `values`; y[n] = x[n] where there is no parent.
  """
  return _accumulate(combine, values, parents, reverse=False)


def accumulate_back(combine: Callable, values: types.ArrayTree,
                    heirs: chex.Array) -> types.ArrayTree:
  """Accumulates against the way down: y[n] = combine(y[heirs[n]], x[n]).

  Args:
    combine: takes the heir's result and the node's own entry, element by
      element; a function of a module.
    values: pytree of [..., N] arrays x.
    heirs: [..., N] int32, one child of every node, or -1.

  Returns:
    A pytree like `values`; y[n] = x[n] where there is no heir.
  """
  return _accumulate(combine, values, heirs, reverse=True)


def _accumulate(combine, values, pointers, reverse):
  # A step reads one row [...], next to each other in memory, not one column.
  values, pointers = jax.tree.map(
      lambda x: jnp.moveaxis(jnp.asarray(x), -1, 0), (values, pointers))
  rows = jnp.arange(pointers.shape[0]), pointers, values
  results, _ = jax.lax.scan(
      _combine_one(combine), values, rows, reverse=reverse)
  return jax.tree.map(lambda x: jnp.moveaxis(x, 0, -1), results)


@functools.cache
def _combine_one(combine):
  def step(results, row):
    node, pointer, own = row
    index = jnp.maximum(pointer, 0)[None]
    ahead = jax.tree.map(
        lambda y: jnp.take_along_axis(y, index, axis=0)[0], results)
    # Else every use of what is gathered would gather it again.
    merged = combine(jax.lax.optimization_barrier(ahead), own)
    merged = jax.tree.map(
        lambda m, x: jnp.where(pointer < 0, x, m), merged, own)
    # Else the results would be copied, to be read while they are written.
    merged = jax.lax.optimization_barrier(merged)
    return jax.tree.map(lambda y, m: y.at[node].set(m), results, merged), None
  return step


def sum_above(values: chex.Array, parents: chex.Array) -> types.Array:
  """Returns the sum over a node and its ancestors, [..., N]."""
  return accumulate_down(jnp.add, values, parents)


def sum_below(values: chex.Array, parents: chex.Array) -> types.Array:
  """Returns the sum over a node and its descendants, [..., N]."""
  return visit_nodes(
      _add_to_parent, values, slots(jnp.asarray(parents)), reverse=True)


def _add_to_parent(node, values, index):
  return values.at[index[node]].add(values[node], mode='drop')


def sum_to_end_of_run(values: chex.Array, mask: chex.Array) -> types.Array:
  """Returns the sum from every entry to the end of its run along the last axis.

  Args:
    values: [..., T] float32.
    mask: [..., T] bool; a run is a maximal row of True.

  Returns:
    [..., T] float32; 0 off the runs. Sums begin at the end of the run.
  """
  def visit(after, column):
    value, inside = column
    total = masked.fill(after + value, inside)
    return total, total
  columns = (jnp.moveaxis(x, -1, 0) for x in (values, mask))
  _, sums = jax.lax.scan(
      visit, jnp.zeros(values.shape[:-1]), tuple(columns), reverse=True)
  return jnp.moveaxis(sums, 0, -1)


def nearest_above(mask: chex.Array, parents: chex.Array) -> types.Array:
  """Returns the nearest marked node on the way up, the node itself included.

  Args:
    mask: [..., N] bool, True for marked nodes.
    parents: [..., N] int32.

  Returns:
    [..., N] int32 node indices, -1 where no node up to the root is marked.
  """
  index = jnp.arange(mask.shape[-1], dtype=jnp.int32)
  marked = jnp.where(mask, index, types.NO_PARENT)
  return accumulate_down(_own_if_marked, marked, parents)


def _own_if_marked(above, own):
  return jnp.where(own < 0, above, own)


def preorder(parents: chex.Array, mask: chex.Array
             ) -> tuple[types.Array, types.Array]:
  """Returns the depth-first interval of every subtree.

  Node a is d itself or one of its ancestors iff enter[a] <= enter[d] < end[a].

  Args:
    parents: [..., N] int32.
    mask: [..., N] bool, True for real nodes.

  Returns:
    enter, end: [..., N] int32, the rank of a node in depth-first order and one
    past the rank of its last descendant; an empty interval on padding.
  """
  parents = jnp.asarray(parents)
  size = sum_below(jnp.asarray(mask, jnp.int32), parents)
  zeros = jnp.zeros_like(parents)
  enter, _ = visit_nodes(
      _enter, (zeros, zeros), (parents, slots(parents), size))
  return enter, enter + size


def _enter(node, state, constants):
  """Gives a node the next free rank below its parent."""
  enter, free = state
  parents, index, size = constants
  rank = jnp.where(parents[node] < 0, 0, free[parents[node]])
  free = free.at[index[node]].add(size[node], mode='drop')
  return enter.at[node].set(rank), free.at[node].set(rank + 1)

"""The cache rows of episodes that have ended, or gone on: what forks inherit.

A row of a cache is all that a fork needs of its parent's past. Rows that are
overwritten are copied out first, whole caches are kept as they are, and what no
fork can want any more is forgotten.
"""

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from bpo_jax import sampling
from bpo_jax.models import transformer

# Donated: rows are written where the cache lies.
_copy_rows = jax.jit(
    sampling.copy_rows, static_argnames='mesh', donate_argnums=0)


def _copy(cache, source, to: Sequence[int], origin: Sequence[int], mesh):
  """Copies rows by `_copy_rows`, in the same shapes however many there are."""
  num_rows = len(cache.lengths)
  index = np.zeros((2, num_rows), np.int32)
  index[:, : len(to)] = to, origin
  return _copy_rows(cache, source, *index, len(to), mesh=mesh)


class Archive:
  """The cache rows of all leaves so far, each as it was when last written."""

  def __init__(self, model: transformer.Transformer):
    """Begins with nothing.

    Args:
      model: the network that the caches are of, on whose mesh they lie.
    """
    self._config, self._mesh = model.config, model.mesh
    self._caches: dict[int, sampling.Cache] = {}
    self._place: dict[int, tuple[int, int]] = {}
    self._number = 0  # of the last cache
    self._open: tuple[int, int] | None = None  # a cache, and its rows in use

  def add(self, cache: sampling.Cache, leaves: Mapping[int, int]) -> None:
    """Keeps a whole cache, which has the leaf `leaves[row]` in each row."""
    self._number += 1
    self._caches[self._number] = cache
    for row, leaf in leaves.items():
      self._place[leaf] = self._number, row

  def put(self, cache: sampling.Cache, leaves: Mapping[int, int]) -> None:
    """Keeps copies of the rows of a cache that is about to be overwritten."""
    for row, leaf in leaves.items():
      number, used = self._room_like(cache)
      self._caches[number] = _copy(
          self._caches[number], cache, [used], [row], self._mesh)
      self._place[leaf] = number, used
      self._open = number, used + 1

  def _room_like(self, cache: sampling.Cache) -> tuple[int, int]:
    """Returns a cache of as many and as long rows, and a free row of it."""
    shape = lambda cache: cache.key_values.keys[0].shape
    if self._open is not None:
      number, used = self._open
      same = shape(self._caches[number]) == shape(cache)
      if same and used < len(cache.lengths):
        return self._open
    num_rows, _, length, _ = shape(cache)
    empty = sampling.empty_cache(self._config, num_rows, length, self._mesh)
    self.add(empty, {})
    return self._number, 0

  def keep(self, leaves: Sequence[int]) -> None:
    """Forgets all caches that none of the leaves needs."""
    needed = {self._place[leaf][0] for leaf in leaves}
    self._caches = {n: c for n, c in self._caches.items() if n in needed}
    self._open = None

  def length(self, leaves: Sequence[int]) -> int:
    """Returns the room that the longest of the leaves' rows has."""
    numbers = {self._place[leaf][0] for leaf in leaves}
    return max(sampling.cache_length(self._caches[n]) for n in numbers)

  def fork(
      self, cache: sampling.Cache, to: Sequence[int], leaves: Sequence[int]
  ) -> sampling.Cache:
    """Returns the cache, whose rows `to` are copies of those of the leaves.

    Every step has the shape of whole caches, whichever rows are wanted, so that
    no update compiles anything for the number of forks that it happens to have.
    """
    places = np.array([self._place[leaf] for leaf in leaves])
    for number in np.unique(places[:, 0]):
      here = places[:, 0] == number
      cache = _copy(
          cache, self._caches[number], np.asarray(to)[here], places[here, 1],
          self._mesh)
    return cache

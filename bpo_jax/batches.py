"""Rows of a batch of episodes: how many, and who goes where.

Few shapes beat little padding: what is compiled is compiled for buckets.
"""

from collections.abc import Sequence
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bpo_jax import sampling
from bpo_jax import sharding

_MIN_ROWS = 16
_MIN_CHUNK = 32  # Tokens read in a turn.

_take_rows = jax.jit(sampling.take_rows, static_argnames='mesh')


def row_bucket(count: int, multiple: int = 1) -> int:
  """Returns the least of 16, 24, 32, 48, 64, 96, .. that holds `count` rows.

  Rounded up to a multiple, of the devices that rows are parted over.
  """
  size = _MIN_ROWS
  while size < count:
    size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
  return round_up(size, multiple)


def shrunk_bucket(count: int, multiple: int = 1) -> int:
  """Returns the least of 16, 32, 64, .. that holds `count` rows.

  Coarser than `row_bucket`: a batch that shrinks passes through every size.
  """
  size = max(_MIN_ROWS, 1 << (int(count) - 1).bit_length())
  return round_up(size, multiple)


def chunk_bucket(count: int, most: int) -> int:
  """Returns the least of 32, 64, 128, .., most that holds `count` tokens."""
  return min(most, max(_MIN_CHUNK, 1 << (int(count) - 1).bit_length()))


def round_up(value: int, multiple: int) -> int:
  """Returns the least multiple of `multiple` that is at least `value`."""
  return -(-value // multiple) * multiple


@jax.jit
def reseat(
    is_new: jax.Array, new: sampling.Rows, rows: sampling.Rows
) -> sampling.Rows:
  """Returns the rows with new ones in some places; caches are left out."""
  return jax.tree.map(
      lambda x, y: jnp.where(
          is_new.reshape(-1, *(1,) * (y.ndim - 1)), x, y), new, rows)


class HostRows(NamedTuple):
  """`sampling.Rows` without what stays on the device, as copies."""

  lengths: np.ndarray
  pending: np.ndarray
  pending_length: np.ndarray
  commands: np.ndarray
  handles: np.ndarray
  active: np.ndarray
  turns: np.ndarray
  num_forced: np.ndarray


def to_host(rows: sampling.Rows) -> HostRows:
  """Returns what a turn starts from."""
  # Copies: on CPU a view would lie in a buffer that the turn is about to write.
  return HostRows(
      np.array(rows.cache.lengths),
      *(np.array(getattr(rows, name)) for name in HostRows._fields[1:]),
  )


def narrow(rows: sampling.Rows, before: HostRows) -> sampling.Rows:
  """Returns the rows with as much that is pending as any of them has."""
  chunk = before.pending.shape[1]
  width = chunk_bucket(before.pending_length.max(), chunk)
  if width == chunk:
    return rows
  return rows._replace(pending=rows.pending[:, :width])


def widen(
    rows: sampling.Rows, size: int, mesh: jax.sharding.Mesh | None = None
) -> sampling.Rows:
  """Returns the rows with a cache of `size` tokens each."""
  return rows._replace(cache=_grow_cache(mesh, rows.cache, size))


@functools.partial(jax.jit, static_argnums=(0, 2))
def _grow_cache(mesh, cache, size):
  return sharding.constrain_rows(mesh, sampling.grow_cache(cache, size))


def close_ranks(
    rows: sampling.Rows,
    kept: Sequence[int],
    num_rows: int,
    mesh: jax.sharding.Mesh | None = None,
) -> sampling.Rows:
  """Returns the rows `kept` alone, padded to `num_rows`."""
  index = np.pad(kept, (0, num_rows - len(kept)))
  is_real = jnp.arange(num_rows) < len(kept)
  small = jax.tree.map(lambda x: x[index], rows._replace(cache=None))
  cache = _take_rows(rows.cache, index, len(kept), mesh=mesh)
  return small._replace(cache=cache, active=is_real)

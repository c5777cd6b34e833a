"""Pallas kernels of ancestor attention for GPU (Triton) and TPU (Mosaic).

In rows packed depth first token i may attend to token j where
`j <= i < end[j]`, or j = i. So the query blocks that see anything of one key
block are a range, and the key blocks that a query block sees are listed in a
table. Each kernel holds one tile in registers and walks over the tiles of the
other kind that matter; the [L, L] scores never exist.

  forward   per query tile, over key tiles:  out, and log sum exp of the scores
  backward  per query tile, over key tiles:  the queries' gradient
            per key tile, over query tiles:  the keys' and values' gradients

Whole rows of the other kind are kept at hand, which bounds them on TPU: from v5
on 8,192 tokens fit with 7 query heads of 128 bfloat16 a group, half of that in
float32; earlier ones have a quarter of the memory.

The softmax of a tile is merged into that of the tiles before it (FlashAttention
2, arXiv 2307.08691, algorithms 1 and 2).
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu
import jax.numpy as jnp

# Not -inf: the difference of two of them would be NaN.
MASKED_SCORE = -1e30

Platform = Literal['gpu', 'tpu', 'interpret']

# Whole rows of keys and values are held beside the tiles.
_TPU_VMEM_BYTES = 64 << 20
_MIN_GPU_TILE = 16
_MAX_GPU_TILE = 64
_GPU_TILE_BYTES = 64 * 64 * 4  # A larger tile of queries spills registers.
_TPU_LANES = 128


class _Setting(NamedTuple):
  """What the kernels of one call have in common."""

  platform: Platform
  num_rows: int  # R
  num_heads: int  # H
  num_groups: int  # G
  length: int  # L
  dim: int  # head_dim, padded
  scale: float  # of the scores
  tile: int  # tokens of a tile; divides the table's blocks
  tiles_per_block: int

  @property
  def num_tiles(self) -> int:
    return self.length // self.tile

  @property
  def heads_per_group(self) -> int:
    return self.num_heads // self.num_groups


def forward(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    end: jax.Array,
    blocks: jax.Array,
    platform: Platform,
) -> tuple[jax.Array, jax.Array]:
  """Attention of every token over its ancestors.

  Args:
    queries: [R, H, L, D].
    keys: [R, G, L, D].
    values: [R, G, L, D], finite.
    end: one past the last token that sees each token, [R, L] int32.
    blocks: key blocks that each query block sees, ascending, the last of them
      itself, -1 after it, [R, Q, W] int32; L is a multiple of Q.
    platform: what the kernel is compiled for.

  Returns:
    out: [R, H, L, D], of the queries' dtype.
    log_sums: log sum exp of the scores, [R, H, L] float32 nats.

  Raises:
    ValueError: if the blocks do not suit the platform.
  """
  setting, (queries, keys, values), dim = _prepare(
      queries, (queries, keys, values), blocks, platform
  )
  s, plan = setting, _counted(blocks)
  out, log_sums = _call(
      _forward_kernel,
      s,
      s.num_heads,
      [_plan(s, plan), _tile(s), _row(s), _row(s), _ends(s)],
      [_tile(s), _scalars(s)],
      [
          jax.ShapeDtypeStruct(queries.shape, queries.dtype),
          jax.ShapeDtypeStruct(
              (s.num_rows, s.num_heads, 1, s.length), jnp.float32
          ),
      ],
  )(plan, queries, keys, values, end[:, None])
  return out[..., :dim], log_sums[:, :, 0]


def backward(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    end: jax.Array,
    blocks: jax.Array,
    log_sums: jax.Array,
    deltas: jax.Array,
    cotangent: jax.Array,
    platform: Platform,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Gradients of `forward`.

  With weights P = exp(S - log_sums) of the scores S = c Q K^T, c = D^-1/2, and
  dO the cotangent: dS = c P (dO V^T - deltas), dQ = dS K, dK = dS^T Q and
  dV = P^T dO.

  Args:
    queries: as in `forward`, finite.
    keys: as in `forward`, finite.
    values: as in `forward`.
    end: as in `forward`.
    blocks: as in `forward`.
    log_sums: as `forward` returned it, [R, H, L] float32.
    deltas: sum of out x cotangent over the head, [R, H, L] float32.
    cotangent: of out, finite, [R, H, L, D].
    platform: as in `forward`.

  Returns:
    Gradients of queries [R, H, L, D], keys and values [R, G, L, D], of their
    dtypes.
  """
  setting, (queries, keys, values, cotangent), dim = _prepare(
      queries, (queries, keys, values, cotangent), blocks, platform
  )
  s, plan = setting, _counted(blocks)
  like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
  end, log_sums, deltas = end[:, None], log_sums[:, :, None], deltas[:, :, None]
  d_queries = _call(
      _queries_kernel,
      s,
      s.num_heads,
      [_plan(s, plan), _tile(s), _row(s), _row(s), _ends(s), _tile(s),
       _scalars(s), _scalars(s)],
      [_tile(s)],
      [like(queries)],
  )(plan, queries, keys, values, end, cotangent, log_sums, deltas)
  # The last query tile that sees anything of a key tile.
  last = jnp.max(end.reshape(s.num_rows, s.num_tiles, s.tile), axis=-1)
  stop = jnp.maximum(-(-last // s.tile), jnp.arange(s.num_tiles) + 1)
  stop = stop[..., None, None].astype(jnp.int32)
  d_keys, d_values = _call(
      _keys_kernel,
      s,
      s.num_groups,
      [_stops(s, stop), _heads(s), _tile(s), _tile(s), _end_tile(s), _heads(s),
       _head_scalars(s), _head_scalars(s)],
      [_tile(s), _tile(s)],
      [like(keys), like(values)],
  )(stop, queries, keys, values, end, cotangent, log_sums, deltas)
  return d_queries[0][..., :dim], d_keys[..., :dim], d_values[..., :dim]


def _forward_kernel(setting, plan, q, k, v, end, out, log_sums):
  """Walks over the key tiles of a query tile; the diagonal comes first."""
  s = setting
  q_tile = pl.program_id(2)
  num_key_tiles = _num_key_tiles(s, plan, q_tile)
  queries = q[...]

  def step(t, carry):
    top, total, mixed = carry
    start = _key_start(s, plan, num_key_tiles - 1 - t)
    scores = _dot(queries, k[pl.ds(start, s.tile), :].T) * s.scale
    seen = _visible(s, q_tile * s.tile, start, end[:, pl.ds(start, s.tile)])
    scores = jnp.where(seen, scores, MASKED_SCORE)
    new_top = jnp.maximum(top, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.exp(scores - new_top)
    shrink = jnp.exp(top - new_top)
    total = total * shrink + jnp.sum(weights, axis=1, keepdims=True)
    part = _dot(weights.astype(v.dtype), v[pl.ds(start, s.tile), :])
    return new_top, total, mixed * shrink + part

  column = jnp.full((s.tile, 1), MASKED_SCORE, jnp.float32)
  carry = column, jnp.zeros_like(column), jnp.zeros(q.shape, jnp.float32)
  top, total, mixed = lax.fori_loop(0, num_key_tiles, step, carry)
  out[...] = (mixed / total).astype(out.dtype)
  log_sums[...] = _turned(s, top + jnp.log(total))


def _queries_kernel(
    setting, plan, q, k, v, end, cotangent, log_sums, deltas, d_queries
):
  """dQ = dS K of a query tile."""
  s = setting
  q_tile = pl.program_id(2)
  queries, d_out = q[...], cotangent[...]
  log_sum, delta = _turned(s, log_sums[...]), _turned(s, deltas[...])

  def step(t, total):
    start = _key_start(s, plan, t)
    keys = k[pl.ds(start, s.tile), :]
    seen = _visible(s, q_tile * s.tile, start, end[:, pl.ds(start, s.tile)])
    weights = jnp.exp(_dot(queries, keys.T) * s.scale - log_sum)
    d_scores = weights * (_dot(d_out, v[pl.ds(start, s.tile), :].T) - delta)
    d_scores = jnp.where(seen, d_scores, 0.0)
    return total + _dot(d_scores.astype(keys.dtype), keys)

  zero = jnp.zeros(q.shape, jnp.float32)
  total = lax.fori_loop(0, _num_key_tiles(s, plan, q_tile), step, zero)
  d_queries[...] = (total * s.scale).astype(d_queries.dtype)


def _keys_kernel(
    setting, stop, q, k, v, end, cotangent, log_sums, deltas, d_keys, d_values
):
  """dK = dS^T Q and dV = P^T dO of a key tile, over all heads of its group.

  Scores are kept transposed, [keys, queries], so that nothing is turned.
  """
  s = setting
  k_tile = pl.program_id(2)
  keys, values, ends = k[...], v[...], _turned(s, end[...])

  def step(t, carry, head):
    start = pl.multiple_of(t * s.tile, s.tile)
    queries = q[head, pl.ds(start, s.tile), :]
    d_out = cotangent[head, pl.ds(start, s.tile), :]
    at = head, slice(None), pl.ds(start, s.tile)
    seen = _visible(s, start, k_tile * s.tile, ends, key_axis=0)
    weights = jnp.exp(_dot(keys, queries.T) * s.scale - log_sums[at])
    weights = jnp.where(seen, weights, 0.0)
    d_scores = weights * (_dot(values, d_out.T) - deltas[at])
    return (
        carry[0] + _dot(d_scores.astype(queries.dtype), queries),
        carry[1] + _dot(weights.astype(d_out.dtype), d_out),
    )

  carry = (jnp.zeros(k.shape, jnp.float32),) * 2
  for head in range(s.heads_per_group):
    body = functools.partial(step, head=head)
    carry = lax.fori_loop(k_tile, stop[0, 0], body, carry)
  d_keys[...] = (carry[0] * s.scale).astype(d_keys.dtype)
  d_values[...] = carry[1].astype(d_values.dtype)


def _num_key_tiles(s: _Setting, plan: Any, q_tile: jax.Array) -> jax.Array:
  """Returns how many key tiles a query tile looks at, itself the last."""
  behind = s.tiles_per_block - 1 - lax.rem(q_tile, s.tiles_per_block)
  return plan[0, 0] * s.tiles_per_block - behind


def _key_start(s: _Setting, plan: Any, place: jax.Array) -> jax.Array:
  """Returns the first token of the key tile at a place in the table."""
  block = plan[0, 1 + lax.div(place, s.tiles_per_block)]
  tile = block * s.tiles_per_block + lax.rem(place, s.tiles_per_block)
  return pl.multiple_of(tile * s.tile, s.tile)


def _visible(s, q_start, k_start, end, key_axis=1):
  """Returns which queries of a tile see which keys of another."""
  shape = s.tile, s.tile
  i = q_start + lax.broadcasted_iota(jnp.int32, shape, 1 - key_axis)
  j = k_start + lax.broadcasted_iota(jnp.int32, shape, key_axis)
  return ((j <= i) & (i < end)) | (i == j)


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
  """Returns x @ y summed in float32; float32 inputs are not rounded."""
  exact = x.dtype == jnp.float32
  return jnp.dot(
      x,
      y,
      precision=lax.Precision.HIGHEST if exact else None,
      preferred_element_type=jnp.float32,
  )


def _turned(s: _Setting, x: jax.Array) -> jax.Array:
  """Returns a tile's column [n, 1] as a row [1, n], or the other way round."""
  if s.platform != 'tpu':
    return x.reshape(x.shape[::-1])
  # TPUs before v5 turn whole tiles alone.
  square = jnp.broadcast_to(x, (s.tile, s.tile)).T
  return square[:, :1] if x.shape[0] == 1 else square[:1]


def _prepare(queries, arrays, blocks, platform):
  """Returns the setting, the arrays with padded heads, and the true width."""
  num_rows, num_heads, length, dim = queries.shape
  block = length // blocks.shape[1]
  padded = dim
  if platform == 'gpu':  # Triton tensors are powers of two, dots 16 at least.
    padded = max(_MIN_GPU_TILE, pl.next_power_of_2(dim))
  tile = _tile_size(block, padded * queries.dtype.itemsize, platform)
  setting = _Setting(
      platform=platform,
      num_rows=num_rows,
      num_heads=num_heads,
      num_groups=arrays[1].shape[1],
      length=length,
      dim=padded,
      scale=dim**-0.5,
      tile=tile,
      tiles_per_block=block // tile,
  )
  width = [(0, 0)] * 3 + [(0, padded - dim)]
  return setting, [jnp.pad(x, width) for x in arrays], dim


def _tile_size(block: int, token_bytes: int, platform: Platform) -> int:
  """Returns how many tokens of a block of the table a tile has.

  Raises:
    ValueError: if the platform has no such tiles.
  """
  if platform == 'gpu':
    if block < _MIN_GPU_TILE or block & (block - 1):
      raise ValueError(
          'attention on GPU: expected blocks of a power of two of at least'
          f' {_MIN_GPU_TILE} tokens, got {block}; make the table with'
          ' block_table(end, block=128)'
      )
    most = pl.next_power_of_2(_GPU_TILE_BYTES // token_bytes)
    return min(block, max(_MIN_GPU_TILE, most), _MAX_GPU_TILE)
  if platform == 'tpu' and block % _TPU_LANES:
    raise ValueError(
        f'attention on TPU: expected blocks of a multiple of {_TPU_LANES}'
        f' tokens, got {block}; make the table with'
        ' block_table(end, block=128)'
    )
  return _TPU_LANES if platform == 'tpu' else block


def _counted(blocks: jax.Array) -> jax.Array:
  """Returns [R, Q, 1, 1 + W]: how many blocks a line lists, and the line."""
  count = jnp.sum(blocks >= 0, axis=-1, keepdims=True, dtype=jnp.int32)
  return jnp.concatenate([count, blocks], axis=-1)[:, :, None]


def _call(kernel, s, num_heads, in_specs, out_specs, out_shape):
  """Returns a pallas_call of one program per row, head and tile."""
  params = None
  if s.platform == 'gpu':
    params = plgpu.CompilerParams(num_warps=4, num_stages=2)
  elif s.platform == 'tpu':
    params = pltpu.CompilerParams(
        dimension_semantics=('parallel',) * 3, vmem_limit_bytes=_TPU_VMEM_BYTES
    )
  return pl.pallas_call(
      functools.partial(kernel, s),
      grid=(s.num_rows, num_heads, s.num_tiles),
      in_specs=in_specs,
      out_specs=out_specs,
      out_shape=out_shape,
      compiler_params=params,
      interpret=s.platform == 'interpret',
      name='ancestor_attention' + kernel.__name__.removesuffix('_kernel'),
  )


# What a program (r, h, t) is handed of each array. The kernels of queries run
# over query heads, that of keys over key heads.


def _tile(s):
  """Its own tile of [R, heads, L, D]."""
  return pl.BlockSpec((None, None, s.tile, s.dim), lambda r, h, t: (r, h, t, 0))


def _row(s):
  """All keys or values of the group that a query head belongs to."""
  return pl.BlockSpec(
      (None, None, s.length, s.dim),
      lambda r, h, t: (r, h // s.heads_per_group, 0, 0),
      **_held_once(s),
  )


def _heads(s):
  """All queries of the heads of its group."""
  return pl.BlockSpec(
      (None, s.heads_per_group, s.length, s.dim),
      lambda r, g, t: (r, g, 0, 0),
      **_held_once(s),
  )


def _held_once(s):
  """Whole rows change too seldom for a second buffer to fetch the next."""
  return dict(pipeline_mode=pl.Buffered(1)) if s.platform == 'tpu' else {}


def _scalars(s):
  """One number a query of its tile, of [R, H, 1, L]."""
  return pl.BlockSpec((None, None, 1, s.tile), lambda r, h, t: (r, h, 0, t))


def _head_scalars(s):
  """One number a query of every head of its group."""
  return pl.BlockSpec(
      (None, s.heads_per_group, 1, s.length), lambda r, g, t: (r, g, 0, 0)
  )


def _ends(s):
  """`end` of the whole row, of [R, 1, L]."""
  return pl.BlockSpec((None, 1, s.length), lambda r, h, t: (r, 0, 0))


def _end_tile(s):
  """`end` of its tile."""
  return pl.BlockSpec((None, 1, s.tile), lambda r, h, t: (r, 0, t))


def _integers(s, array, index):
  """A line of a table; [R, lines, 1, n], as TPUs slice only the last two."""
  kwargs = dict(memory_space=pltpu.SMEM) if s.platform == 'tpu' else {}
  return pl.BlockSpec((None, None, 1, array.shape[-1]), index, **kwargs)


def _plan(s, table):
  """The table's line of the block that its query tile is in."""
  return _integers(s, table, lambda r, h, t: (r, t // s.tiles_per_block, 0, 0))


def _stops(s, table):
  """The line of its key tile."""
  return _integers(s, table, lambda r, g, t: (r, t, 0, 0))

"""Attention of tokens over their ancestors, in rows packed depth first.

Laid out depth first, what a token's descendants are is one interval, so token i
may attend to token j where `j <= i < end[j]`: O(L) integers stand for the whole
mask. Most of an [L, L] mask of a bushy tree is false, and a dense product pays
for all of it. Here rows are cut in blocks, and a query block looks only at the
key blocks that its table lists.

Three implementations of one function, `attend`: `reference` is dense, for small
rows and as the oracle of the others; `_forward` and `_backward` are plain JAX,
for CPU; the kernels of `attention_pallas` are for GPU and TPU.
"""

import functools
from typing import Literal, NamedTuple

import jax
from jax import ad_checkpoint
from jax import lax
import jax.numpy as jnp
import numpy as np

from bpo_jax import attention_pallas
from bpo_jax import checks

BLOCK = 128
_WIDE = 4  # Key blocks looked at together: XLA shares out large products alone.
MASKED_SCORE = attention_pallas.MASKED_SCORE

Implementation = Literal['auto', 'dense', 'blocks', 'pallas']

# What `jax.checkpoint_policies.save_only_these_names` may keep, so that a
# rematerialised layer does not run its attention twice.
CHECKPOINT_NAME = 'attention'


class Ancestors(NamedTuple):
  """What each token may look at; every token sees itself."""

  end: jax.Array  # [R, L] int32: i sees j where j <= i < end[j]; 0 on padding
  blocks: jax.Array | None = None  # [R, Q, W] int32 from block_table, or dense


def block_table(end: np.ndarray, block: int = BLOCK) -> np.ndarray:
  """Lists the key blocks that each query block looks at, on the host.

  A key block is listed if any query of the block may attend to any of its
  tokens. Packed depth first, that is so if one of its intervals reaches into
  the query block.

  Args:
    end: one past the last token that sees each token, [R, L] int32.
    block: tokens of a block; L is a multiple of it.

  Returns:
    [R, Q, W] int32, ascending, each query block itself the last, -1 behind it.
    W is the least power of two that holds every line, or Q: at most
    log2(Q) + 2 widths are ever compiled.

  Raises:
    ValueError: if L is no multiple of `block`, or `end` no interval of the row.
  """
  end = np.asarray(end)
  if end.ndim != 2 or block < 1 or end.shape[1] % block or not end.size:
    raise ValueError(
        'end: expected the shape [R, L] with R >= 1 and L a multiple of block ='
        f' {block}, got {end.shape}; round the row length up'
    )
  if end.min() < 0 or end.max() > end.shape[1]:
    raise ValueError(
        f'end: expected entries from 0 to L = {end.shape[1]}, got'
        f' {end.min()} to {end.max()}'
    )
  visible = _visible_blocks(end, block)
  order = np.argsort(~visible, axis=-1, kind='stable').astype(np.int32)
  table = np.where(np.take_along_axis(visible, order, axis=-1), order, -1)
  longest = int(visible.sum(axis=-1).max())
  return table[..., : min(1 << (longest - 1).bit_length(), table.shape[1])]


def _visible_blocks(end, block: int):
  """Returns [R, Q, Q] bool: whether query block q looks at key block k."""
  num_rows, length = end.shape
  num_blocks = length // block
  reach = end.reshape(num_rows, 1, num_blocks, block).max(axis=-1)
  start = block * np.arange(num_blocks)[:, None]
  earlier = np.tri(num_blocks, k=-1, dtype=bool)
  return earlier & (reach > start) | np.eye(num_blocks, dtype=bool)


def visible(end: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
  """Returns whether token i may attend to token j; `end` is that of j."""
  return ((j <= i) & (i < end)) | (i == j)


def attend(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    ancestors: Ancestors,
    implementation: Implementation = 'auto',
    mesh: jax.sharding.Mesh | None = None,
) -> jax.Array:
  """Softmax attention of every token over its ancestors and itself.

  out_i = sum_j softmax_j(q_i k_j / sqrt(D)) v_j over j <= i < end[j] and j = i;
  head h of the queries looks at head h // (H / G) of keys and values. The
  softmax is float32 whatever the dtype. What is not finite stays with the
  tokens that see it.

  With a table as many steps are taken as it has entries, however wide it is,
  and nothing larger than the scores of a few blocks is kept: the backward pass
  computes them again from the log sums (FlashAttention 2, arXiv 2307.08691).

  On a mesh each device does its own rows and heads. Left to itself XLA gathers
  all rows on every device, since it cannot tell that what is sliced by a table
  lies in the same row; here nothing is exchanged.

  Args:
    queries: [R, H, L, D].
    keys: [R, G, L, D]; H is a multiple of G.
    values: [R, G, L, D].
    ancestors: what each token may look at.
    implementation: 'dense', 'blocks' or 'pallas' (interpreted on CPU, slowly),
      or 'auto': without a table dense, with one pallas on GPU and TPU and
      blocks elsewhere.
    mesh: `data` parts rows, and `model` heads; it must divide the G of the
      keys. Rows that `data` does not divide are done by all devices. None for
      one device.

  Returns:
    [R, H, L, D] of the queries' dtype. A padding token sees itself alone.
    Gradients flow in reverse mode only, except through 'dense'.

  Raises:
    ValueError: if shapes do not agree, or an implementation that needs a table
      of blocks has none, or one that does not fit.
  """
  checks.one_of('implementation', implementation, Implementation)
  _check_shapes(queries, keys, values, ancestors)
  if mesh is not None:
    if keys.shape[1] % mesh.shape['model']:
      raise ValueError(
          'keys: expected as many heads as a multiple of the'
          f' {mesh.shape["model"]} parts of the mesh, got {keys.shape[1]}')
    rows = None if len(queries) % mesh.shape['data'] else 'data'
    heads = jax.P(rows, 'model')
    return jax.shard_map(
        functools.partial(attend, implementation=implementation),
        mesh=mesh,
        in_specs=(heads, heads, heads, jax.P(rows)),
        out_specs=heads,
        check_vma=False,  # Kernels do not say along which axes they vary.
    )(queries, keys, values, ancestors)
  platform = jax.default_backend()
  if implementation == 'auto':
    kernel = 'pallas' if platform in ('gpu', 'tpu') else 'blocks'
    implementation = 'dense' if ancestors.blocks is None else kernel
  if implementation == 'dense':
    return reference(queries, keys, values, ancestors.end)
  how = 'blocks'
  if implementation == 'pallas':
    how = platform if platform in ('gpu', 'tpu') else 'interpret'
  return _attend_blocks(how, queries, keys, values, *_table(ancestors))


def reference(
    queries: jax.Array, keys: jax.Array, values: jax.Array, end: jax.Array
) -> jax.Array:
  """Dense attention over ancestors: the [L, L] mask, spelt out.

  Args:
    queries: [R, H, L, D].
    keys: [R, G, L, D].
    values: [R, G, L, D].
    end: [R, L] int32.

  Returns:
    [R, H, L, D] of the queries' dtype.
  """
  num_rows, num_heads, length, dim = queries.shape
  num_groups = keys.shape[1]
  place = jnp.arange(length)
  mask = visible(end[:, None], place[:, None], place)[:, None, None]
  grouped = (num_rows, num_groups, num_heads // num_groups, length)
  as_float = lambda x: x.astype(jnp.float32)
  taint = _taint(queries).reshape(grouped)[..., None]
  taint = taint + (_taint(keys) + _taint(values))[:, :, None, None]
  scores = jnp.einsum(
      'rghid,rgjd->rghij',
      as_float(_finite(queries)).reshape(*grouped, dim) * dim**-0.5,
      as_float(_finite(keys)),
  )
  scores = jnp.where(mask, scores + taint, MASKED_SCORE)
  weights = jnp.where(mask, jax.nn.softmax(scores, axis=-1), 0.0)
  out = jnp.einsum('rghij,rgjd->rghid', weights, as_float(_finite(values)))
  return out.reshape(queries.shape).astype(queries.dtype)


def _table(ancestors: Ancestors) -> tuple[jax.Array, jax.Array]:
  """Returns `end` and the table, which must be there and fit."""
  end, blocks = ancestors
  if blocks is None:
    raise ValueError(
        'ancestors.blocks: expected a table of key blocks, got None; make it'
        " with block_table(end) or choose implementation='dense'"
    )
  if blocks.ndim != 3 or len(blocks) != len(end) or (
      end.shape[1] % blocks.shape[1]
  ):
    raise ValueError(
        'ancestors.blocks: expected [R, Q, W] of R rows whose length is a'
        f' multiple of Q, got {blocks.shape} for end {end.shape}; make it with'
        ' block_table(end)'
    )
  return jnp.asarray(end), jnp.asarray(blocks)


def _check_shapes(queries, keys, values, ancestors) -> None:
  """Refuses arrays that are not of the same rows, tokens and heads."""
  num_rows, num_heads, length, dim = queries.shape
  checks.shape('values', values, keys.shape)
  checks.shape('ancestors.end', ancestors.end, (num_rows, length))
  checks.shape('keys', keys, (num_rows, keys.shape[1], length, dim))
  if num_heads % keys.shape[1]:
    raise ValueError(
        'queries: expected as many heads as a multiple of the'
        f' {keys.shape[1]} key heads, got {num_heads}'
    )


def _finite(x: jax.Array) -> jax.Array:
  """Returns `x` with 0 for NaN and infinities, which 0 weights do not kill."""
  return jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))


def _taint(x: jax.Array) -> jax.Array:
  """Returns NaN for each vector that is not finite, else 0, float32."""
  return jnp.where(jnp.isfinite(x).all(axis=-1), 0.0, jnp.nan)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_blocks(how, queries, keys, values, end, blocks):
  """Attends by 'blocks', or by the kernels of a platform."""
  return _attend_forward(how, queries, keys, values, end, blocks)[0]


def _attend_forward(how, queries, keys, values, end, blocks):
  """Returns the output and what the backward pass needs."""
  # A value that is not finite taints the score, not the product: only those
  # that see the token become NaN.
  taint = (_taint(keys) + _taint(values))[..., None].astype(keys.dtype)
  args = queries, keys + taint, _finite(values), end, blocks
  if how == 'blocks':
    out, log_sums = _forward(*args)
  else:
    out, log_sums = attention_pallas.forward(*args, platform=how)
  out = ad_checkpoint.checkpoint_name(
      out.astype(queries.dtype), CHECKPOINT_NAME
  )
  log_sums = ad_checkpoint.checkpoint_name(log_sums, CHECKPOINT_NAME)
  return out, (queries, keys, values, end, blocks, out, log_sums)


def _attend_backward(how, residuals, cotangent):
  """Returns the gradients of queries, keys and values."""
  queries, keys, values, end, blocks, out, log_sums = residuals
  d_out = _finite(cotangent)
  product = out.astype(jnp.float32) * d_out.astype(jnp.float32)
  deltas = _finite(jnp.sum(product, axis=-1))
  log_sums = log_sums + _taint(cotangent)
  args = _finite(queries), _finite(keys), _finite(values), end, blocks
  args += log_sums, deltas, d_out
  if how == 'blocks':
    gradients = _backward(*args)
  else:
    gradients = attention_pallas.backward(*args, platform=how)
  arrays = queries, keys, values
  return *(d.astype(x.dtype) for d, x in zip(gradients, arrays)), None, None


_attend_blocks.defvjp(_attend_forward, _attend_backward)


class _Blocks(NamedTuple):
  """Where blocks lie once rows and blocks are one axis of N = R * Q."""

  start: jax.Array  # [N] int32     place of a block's first token in its row
  key_blocks: jax.Array  # [N, W] int32  blocks of the N that it looks at
  count: jax.Array  # [N] int32     how many
  end: jax.Array  # [N, block] int32


def _layout(end: jax.Array, blocks: jax.Array) -> _Blocks:
  num_rows, num_blocks, width = blocks.shape
  block = end.shape[1] // num_blocks
  first = num_blocks * jnp.arange(num_rows)[:, None, None]
  place = block * jnp.arange(num_blocks, dtype=jnp.int32)
  return _Blocks(
      start=jnp.tile(place, num_rows),
      key_blocks=(blocks + first).reshape(-1, width),
      count=jnp.sum(blocks >= 0, axis=-1).reshape(-1),
      end=end.reshape(-1, block),
  )


def _split(x: jax.Array, num_groups: int, num_blocks: int) -> jax.Array:
  """[R, H, L, D] to float32 [R * Q, G, H / G * block, D]."""
  num_rows, num_heads, length, dim = x.shape
  per_group = num_heads // num_groups
  x = x.astype(jnp.float32).reshape(
      num_rows, num_groups, per_group, num_blocks, -1, dim
  )
  block = length // num_blocks
  x = x.transpose(0, 3, 1, 2, 4, 5)
  return x.reshape(-1, num_groups, per_group * block, dim)


def _join(x: jax.Array, shape: tuple[int, ...], num_blocks: int) -> jax.Array:
  """The inverse of `_split`, to [R, H, L, D]."""
  num_rows, num_heads, length, dim = shape
  num_groups = x.shape[1]
  x = x.reshape(
      num_rows,
      num_blocks,
      num_groups,
      num_heads // num_groups,
      length // num_blocks,
      dim,
  )
  return x.transpose(0, 2, 3, 1, 4, 5).reshape(shape)


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
  return lax.dynamic_index_in_dim(x, index, keepdims=False)


def _put(x: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
  return lax.dynamic_update_index_in_dim(x, value, index, 0)


def _walk(count, step, carry):
  """Takes `step(width, first, carry)` over key blocks, several at a time.

  The last ones go together too where at least half of `_WIDE` are left.
  """
  num_wide = (count + _WIDE // 2) // _WIDE
  carry = lax.fori_loop(
      0, num_wide, lambda t, x: step(_WIDE, t * _WIDE, x), carry)
  return lax.fori_loop(
      num_wide * _WIDE, count, lambda t, x: step(1, t, x), carry)


def _looked_at(layout, n, first, width):
  """Returns which blocks a step looks at, and whether each is to be seen.

  The diagonal comes first: every token sees itself, so that running maxima are
  real from then. Beyond the table the first block stands in, unseen.
  """
  place = layout.count[n] - 1 - first - jnp.arange(width)
  return layout.key_blocks[n, jnp.maximum(place, 0)], place >= 0


def _tile(x, blocks, axis=1):
  """[N, G, block, D] to [G, blocks * block, D], the blocks one on another.

  With axis 2, [N, G, D, block] to [G, D, blocks * block].
  """
  return jnp.concatenate([_at(x, k) for k in blocks], axis=axis)


def _add_tile(x, tile, blocks):
  """Adds to blocks of `x` what `_tile` would have taken from there.

  One block at a time, in a loop: of writes in a row XLA makes copies of all of
  `x`, and what a step costs would grow with the rows.
  """
  parts = jnp.stack(jnp.split(tile, len(blocks), axis=1))
  add = lambda t, x: _put(x, _at(x, blocks[t]) + parts[t], blocks[t])
  return lax.fori_loop(0, len(blocks), add, x)


def _mask(layout, n, blocks, is_seen, num_queries):
  """Returns [H / G * block, blocks * block] bool: what query block n sees."""
  offset = jnp.arange(layout.end.shape[1])
  i = layout.start[n] + offset

  def of_block(k, seen):
    j = layout.start[k] + offset
    return visible(_at(layout.end, k), i[:, None], j) & seen

  mask = [of_block(*each) for each in zip(blocks, is_seen)]
  mask = jnp.concatenate(mask, axis=1)
  return jnp.tile(mask, (num_queries // len(offset), 1))


def _forward(queries, keys, values, end, blocks):
  """Returns out [R, H, L, D] and log sums [R, H, L], both float32."""
  shape, num_blocks = queries.shape, blocks.shape[1]
  layout = _layout(end, blocks)
  split = functools.partial(
      _split, num_groups=keys.shape[1], num_blocks=num_blocks
  )
  queries, keys, values = split(queries), split(keys), split(values)
  queries *= shape[-1] ** -0.5
  keys = keys.swapaxes(2, 3)  # A turned operand costs up to thrice as much.

  def query_block(n, result):
    q = _at(queries, n)

    def step(width, first, carry):
      top, total, mixed = carry
      ks, is_seen = _looked_at(layout, n, first, width)
      scores = jnp.einsum('gid,gdj->gij', q, _tile(keys, ks, axis=2))
      mask = _mask(layout, n, ks, is_seen, q.shape[1])
      scores = jnp.where(mask, scores, MASKED_SCORE)
      new_top = jnp.maximum(top, scores.max(axis=-1, keepdims=True))
      weights = jnp.exp(scores - new_top)
      shrink = jnp.exp(top - new_top)
      total = total * shrink + weights.sum(axis=-1, keepdims=True)
      part = jnp.einsum('gij,gjd->gid', weights, _tile(values, ks))
      return new_top, total, mixed * shrink + part

    top = jnp.full_like(q[..., :1], MASKED_SCORE)
    carry = top, jnp.zeros_like(top), jnp.zeros_like(q)
    top, total, mixed = _walk(layout.count[n], step, carry)
    out, log_sums = result
    return (
        _put(out, mixed / total, n),
        _put(log_sums, top + jnp.log(total), n),
    )

  result = jnp.zeros_like(queries), jnp.zeros_like(queries[..., :1])
  out, log_sums = lax.fori_loop(0, len(queries), query_block, result)
  log_sums = _join(log_sums, (*shape[:-1], 1), num_blocks)
  return _join(out, shape, num_blocks), log_sums[..., 0]


def _backward(
    queries, keys, values, end, blocks, log_sums, deltas, cotangent
):
  """Returns the gradients of `_forward`, as attention_pallas.backward does.

  Scores are [keys, queries] here, and queries, gradients of the output, and
  the keys that gradients of queries are made of are turned once, before: then
  no product has a turned operand, which costs up to thrice as much on CPU.
  """
  shapes = queries.shape, keys.shape
  num_blocks = blocks.shape[1]
  layout = _layout(end, blocks)
  split = functools.partial(
      _split, num_groups=keys.shape[1], num_blocks=num_blocks
  )
  queries, keys, values = split(queries), split(keys), split(values)
  scale = queries.shape[-1] ** -0.5
  queries, cotangent = queries * scale, split(cotangent)
  turned = [x.swapaxes(2, 3) for x in (queries, cotangent, keys)]
  turned_queries, turned_cotangent, turned_keys = turned
  log_sums = split(log_sums[..., None]).swapaxes(2, 3)
  deltas = split(deltas[..., None]).swapaxes(2, 3)

  def query_block(n, result):
    q, d_out = _at(queries, n), _at(cotangent, n)
    turned_q, turned_d_out = _at(turned_queries, n), _at(turned_cotangent, n)
    log_sum, delta = _at(log_sums, n), _at(deltas, n)

    def step(width, first, carry):
      d_q, d_keys, d_values = carry
      ks, is_seen = _looked_at(layout, n, first, width)
      key, value = _tile(keys, ks), _tile(values, ks)
      mask = _mask(layout, n, ks, is_seen, q.shape[1]).T
      scores = jnp.einsum('gjd,gdi->gji', key, turned_q)
      weights = jnp.where(mask, jnp.exp(scores - log_sum), 0.0)
      d_weights = jnp.einsum('gjd,gdi->gji', value, turned_d_out)
      d_scores = weights * (d_weights - delta)
      d_key = jnp.einsum('gji,gid->gjd', d_scores, q)
      d_value = jnp.einsum('gji,gid->gjd', weights, d_out)
      turned_key = _tile(turned_keys, ks, axis=2)
      return (
          d_q + jnp.einsum('gdj,gji->gdi', turned_key, d_scores),
          _add_tile(d_keys, d_key, ks),
          _add_tile(d_values, d_value, ks),
      )

    d_queries, *rest = result
    carry = (jnp.zeros_like(turned_q), *rest)
    d_q, *rest = _walk(layout.count[n], step, carry)
    return (_put(d_queries, d_q * scale, n), *rest)

  result = jax.tree.map(jnp.zeros_like, (turned_queries, keys, values))
  turned, *rest = lax.fori_loop(0, len(queries), query_block, result)
  result = turned.swapaxes(2, 3), *rest
  return tuple(
      _join(x, shape, num_blocks)
      for x, shape in zip(result, (shapes[0], shapes[1], shapes[1]))
  )

"""Trees to rows of tokens that a network can run, and its log-probs back.

Here a row is one path from the root to a leaf. Siblings repeat the prefix that
they share, but each action token is trained in exactly one of the rows that
hold it, so the gradient is that of the tree: every unique token once, with its
own weight.
"""

from collections.abc import Iterator
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bpo_jax import sampling
from bpo_jax import tree as trees
from bpo_jax import types
from bpo_jax.models import transformer


class PackedRows(NamedTuple):
  """R rows of L tokens; padding is at the end, and zero unless said.

  Token i may attend to token j where `j <= i < end[j]`.
  """

  tokens: np.ndarray  # [R, L] int32
  token_mask: np.ndarray  # [R, L] bool      real tokens, a prefix of L
  positions: np.ndarray  # [R, L] int32      place on the path, from 0
  end: np.ndarray  # [R, L] int32      one past the last token that sees it
  predictor: np.ndarray  # [R, L] int32      whose hidden state predicts token i
  action_mask: np.ndarray  # [R, L] bool      action tokens trained in this row
  path_mask: np.ndarray  # [R, L] bool      all of the path, trained here or not
  behaviour_log_probs: np.ndarray  # [R, L] float32, on path_mask
  advantages: np.ndarray  # [R, L] float32
  weights: np.ndarray  # [R, L] float32
  source: np.ndarray  # [R, L] int32      index into [B * N * T]; -1 on padding
  allowed: np.ndarray | None = None  # [R, L, W] uint32
  value_targets: np.ndarray | None = None  # [R, L] float32
  old_values: np.ndarray | None = None  # [R, L] float32


class TokenOutputs(NamedTuple):
  """What a policy says of each action token; zero elsewhere."""

  log_probs: jax.Array  # [R, L] float32 nats
  entropies: jax.Array  # [R, L] float32 nats
  values: jax.Array | None = None  # [R, L] float32, of the state before it


def _paths(parents: np.ndarray, node_mask: np.ndarray) -> Iterator[list[int]]:
  """Yields the nodes from the root to each leaf of one tree."""
  is_leaf = node_mask.copy()
  is_leaf[parents[parents >= 0]] = False
  for leaf in np.flatnonzero(is_leaf):
    path, node = [], int(leaf)
    while node != types.NO_PARENT:
      path.append(node)
      node = int(parents[node])
    yield path[::-1]


def _path_tokens(tree: trees.Tree) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Yields each path's tokens, as `source` has them, and which are new."""
  num_nodes, num_tokens = tree.tokens.shape[1:]
  for b in range(len(tree.parents)):
    is_new = np.ones(num_nodes, bool)
    for path in _paths(tree.parents[b], tree.node_mask[b]):
      node, offset = np.nonzero(tree.token_mask[b, path])
      node = np.asarray(path)[node]
      yield (b * num_nodes + node) * num_tokens + offset, is_new[node]
      is_new[path] = False


def pack(
    tree: trees.Tree,
    credit: types.Credit,
    row_length: int | None = None,
    *,
    value_targets: np.ndarray | None = None,
    old_values: np.ndarray | None = None,
) -> PackedRows:
  """Lays out a batch of trees as rows, on the host.

  Args:
    tree: B trees.
    credit: advantages and weights of their tokens, [B, N, T] each.
    row_length: L; None takes the longest path.
    value_targets: [B, N, T] float, returns that a critic is to predict, reward
      units; None without a critic.
    old_values: [B, N, T] float, its predictions before the update, reward
      units; None where its step is not bound.

  Returns:
    A row per leaf, in the order of trees and leaves. Each action token is in
    `action_mask` of the first row that holds it and of no other; `path_mask`
    has all action tokens of the path, for what looks at whole sequences.

  Raises:
    ValueError: if a path is longer than `row_length`, if one begins with an
      action, if a parent does not come before its child, or if an array has
      another shape than the tree's tokens.
  """
  tree, credit = jax.tree.map(np.asarray, (tree, credit))
  extra = {'value_targets': value_targets, 'old_values': old_values}
  extra = {k: np.asarray(x) for k, x in extra.items() if x is not None}
  _check_shapes(
      tree,
      {'advantages': credit.advantages, 'weights': credit.weights, **extra},
  )
  if np.any(tree.parents >= np.arange(tree.parents.shape[1])):
    raise ValueError(
        'expected parents[n] < n at every node, got trees in another order;'
        ' Tree.validate() tells where'
    )
  sources, trained = zip(*_path_tokens(tree))
  longest = max(map(len, sources))
  row_length = longest if row_length is None else row_length
  if longest > row_length:
    raise ValueError(
        f'expected paths of at most row_length = {row_length} tokens, got one'
        f' of {longest}; raise row_length'
    )
  shape = (len(sources), row_length)
  source = np.full(shape, -1, np.int32)
  is_trained = np.zeros(shape, bool)
  for row, (index, new) in enumerate(zip(sources, trained)):
    source[row, : len(index)] = index
    is_trained[row, : len(index)] = new
  rows = _gather(tree, credit, extra, source, is_trained)
  if rows.action_mask[:, :1].any():
    raise ValueError(
        'expected a prompt before the first action, got a path that begins with'
        ' an action token, which nothing predicts; put a token in the root'
    )
  return rows


def _check_shapes(tree, arrays) -> None:
  """Refuses arrays by name that are not one entry a token."""
  for name, values in arrays.items():
    if values.shape != tree.tokens.shape:
      raise ValueError(
          f'{name}: expected the shape of the tokens, {tree.tokens.shape}, got'
          f' {values.shape}'
      )


def _gather(tree, credit, extra, source, is_trained) -> PackedRows:
  """Fills the rows whose tokens are at `source` in the trees."""
  mask = source >= 0

  def take(x: np.ndarray) -> np.ndarray:
    flat = x.reshape(-1, *x.shape[3:])[source]
    return np.where(mask.reshape(*mask.shape, *(1,) * (x.ndim - 3)), flat, 0)

  places = np.broadcast_to(
      np.arange(source.shape[1], dtype=np.int32), source.shape
  )
  lengths = mask.sum(axis=1, dtype=np.int32)
  path_mask = take(tree.action_mask).astype(bool)
  action_mask = path_mask & is_trained
  on = lambda mask, x: np.where(mask, take(x), 0).astype(np.float32)
  return PackedRows(
      tokens=take(tree.tokens),
      token_mask=mask,
      positions=np.where(mask, places, 0),
      end=np.where(mask, lengths[:, None], 0),
      predictor=np.where(mask, np.maximum(places - 1, 0), 0),
      action_mask=action_mask,
      path_mask=path_mask,
      behaviour_log_probs=on(path_mask, tree.behaviour_log_probs),
      advantages=on(action_mask, credit.advantages),
      weights=on(action_mask, credit.weights),
      source=source,
      allowed=None if tree.allowed is None else take(tree.allowed),
      **{name: on(action_mask, values) for name, values in extra.items()},
  )


def micro_batches(
    rows: PackedRows, max_tokens: int, bucket: int = 32
) -> list[PackedRows]:
  """Splits rows into batches of like length, padded to few shapes.

  Rows are sorted by length, longest first; a batch is as long as its first row,
  rounded up to `bucket`, and has as many rows as go into `max_tokens`, rounded
  down to a power of two; half as many where no more are left. So few shapes are
  compiled. Rows that train no token are left out. Padding changes no gradient:
  sums and denominators travel apart.

  Args:
    rows: R rows.
    max_tokens: bound on rows x length of a batch (but one row at least).
    bucket: lengths are multiples of it, which bounds what is compiled.

  Returns:
    Batches that together train what `rows` do.
  """
  lengths = rows.token_mask.sum(axis=1)
  order = np.argsort(-lengths, kind='stable')
  order = order[rows.action_mask[order].any(axis=1)]
  batches = []
  while len(order):
    length = -(-int(lengths[order[0]]) // bucket) * bucket
    most = 1 << (max(1, max_tokens // length).bit_length() - 1)
    num_rows = most if len(order) > most // 2 else max(1, most // 2)
    batches.append(_sub_batch(rows, order[:num_rows], num_rows, length))
    order = order[num_rows:]
  return batches


def _sub_batch(rows, index, num_rows, length) -> PackedRows:
  """Returns `rows[index]`, cut or padded to [num_rows, length]."""

  def fit(x):
    x = x[index, :length]
    widths = [(0, num_rows - len(x)), (0, length - x.shape[1])]
    return np.pad(x, widths + [(0, 0)] * (x.ndim - 2))

  batch = jax.tree.map(fit, rows)
  return batch._replace(source=np.where(batch.token_mask, batch.source, -1))


def attention_mask(rows: PackedRows) -> jax.Array:
  """Returns [R, L, L] bool: j <= i < end[j], or j = i so no row is empty."""
  place = jnp.arange(rows.tokens.shape[1])
  i, j = place[:, None], place[None]
  return (j <= i) & (i < rows.end[:, None]) | (i == j)


def token_outputs(
    model: transformer.Transformer,
    params: dict,
    rows: PackedRows,
    temperature: float = 1.0,
) -> TokenOutputs:
  """All that the network says of the rows' action tokens, in one run.

  Args:
    model: the policy network.
    params: its parameters; gradients flow to them.
    rows: packed rows.
    temperature: as sampled.

  Returns:
    Log-probs and entropies as the sampler computes them, 0 off `path_mask`, and
    with a value head the values.
  """
  hidden = _predictors(model, params, rows)
  logits = model.apply({'params': params}, hidden, method='logits')
  allowed = None if rows.allowed is None else sampling.unpack_bits(rows.allowed)
  log_probs, entropies = sampling.token_distribution(
      logits, allowed, temperature
  )
  log_probs = jnp.take_along_axis(log_probs, rows.tokens[..., None], axis=-1)
  zero_off = lambda x: jnp.where(rows.path_mask, x, 0.0)
  values = None
  if model.config.value_head:
    values = zero_off(model.apply({'params': params}, hidden, method='values'))
  return TokenOutputs(zero_off(log_probs[..., 0]), zero_off(entropies), values)


def token_log_probs(
    model: transformer.Transformer,
    params: dict,
    rows: PackedRows,
    temperature: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
  """Log-probs of the rows' tokens under `params`, as the sampler computes them.

  Args:
    model: the policy network.
    params: its parameters; gradients flow to them.
    rows: packed rows.
    temperature: as sampled.

  Returns:
    log_probs: [R, L] float32, 0 off `path_mask`.
    entropies: [R, L] float32 in nats, 0 off `path_mask`.
  """
  if model.config.value_head:  # A reference policy may have been made without.
    config = dataclasses.replace(model.config, value_head=False)
    model = model.clone(config=config)
  outputs = token_outputs(model, params, rows, temperature)
  return outputs.log_probs, outputs.entropies


def token_values(
    model: transformer.Transformer, params: dict, rows: PackedRows
) -> jax.Array:
  """Returns V of the state before each action token, from what predicts it.

  Args:
    model: a network with a value head.
    params: its parameters; gradients flow to them.
    rows: packed rows.

  Returns:
    [R, L] float32, reward units, 0 off `path_mask`.

  Raises:
    ValueError: if the network has no value head.
  """
  hidden = _predictors(model, params, rows)
  values = model.apply({'params': params}, hidden, method='values')
  return jnp.where(rows.path_mask, values, 0.0)


def _predictors(model, params, rows):
  """Returns [R, L, width], the hidden state that predicts each token."""
  hidden, _ = model.apply(
      {'params': params}, rows.tokens, rows.positions, attention_mask(rows)
  )
  return jnp.take_along_axis(hidden, rows.predictor[..., None], axis=1)


def unpack(values: jax.Array, rows: PackedRows, shape: tuple[int, ...]):
  """Brings per-token values of the rows back to the trees.

  Args:
    values: [R, L].
    rows: the rows that they belong to.
    shape: (B, N, T).

  Returns:
    [B, N, T], holding the value of each trained token, 0 elsewhere.
  """
  size = int(np.prod(shape))
  index = jnp.where(rows.action_mask, rows.source, size)
  flat = jnp.zeros(size, values.dtype).at[index].set(values, mode='drop')
  return flat.reshape(shape)

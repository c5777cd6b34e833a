"""Trees to rows of tokens that a network can run, and its log-probs back.

In the layout 'trees' every unique token is run once: a tree lies depth first in
a row, where "may attend" is one interval a token, and the last token of a node
predicts the first one of each of its children. In the layout 'paths' a row is
one path from the root to a leaf, for objectives that look at whole sequences;
siblings repeat the prefix that they share. Either way each action token is
trained in exactly one row, with its own weight: the gradient is the tree's.
"""

from collections.abc import Sequence
import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bpo_jax import attention
from bpo_jax import checks
from bpo_jax import layouts
from bpo_jax import log_probs as log_probs_lib
from bpo_jax import tree as trees
from bpo_jax import types
from bpo_jax.models import transformer

Layout = Literal['trees', 'paths']

_MOST_TOKENS = 8192  # Of a row, unless four paths are longer.


class PackedRows(NamedTuple):
  """R rows of L tokens; padding is at the end, and zero unless said.

  Token i may attend to token j where `j <= i < end[j]`. Micro-batches have the
  last two fields as well, and `allowed` of the tokens in `trained` alone.
  """

  tokens: np.ndarray  # [R, L] int32
  token_mask: np.ndarray  # [R, L] bool      real tokens, a prefix of L
  positions: np.ndarray  # [R, L] int32      place on the path, from 0
  end: np.ndarray  # [R, L] int32      one past the last token that sees it
  predictor: np.ndarray  # [R, L] int32      whose hidden state predicts token i
  action_mask: np.ndarray  # [R, L] bool      action tokens trained in this row
  path_mask: np.ndarray  # [R, L] bool      all of the row, trained here or not
  behaviour_log_probs: np.ndarray  # [R, L] float32, on path_mask
  advantages: np.ndarray  # [R, L] float32
  weights: np.ndarray  # [R, L] float32
  source: np.ndarray  # [R, L] int32      index into [B * N * T]; -1 on padding
  allowed: np.ndarray | None = None  # [R, L or P, W] uint32, on path_mask
  value_targets: np.ndarray | None = None  # [R, L] float32
  old_values: np.ndarray | None = None  # [R, L] float32
  trained: np.ndarray | None = None  # [R, P] int32, where path_mask is, or L
  ancestors_blocks: np.ndarray | None = None  # [R, Q, W] int32, or dense


class TokenOutputs(NamedTuple):
  """What a policy says of each action token; zero elsewhere."""

  log_probs: jax.Array  # [R, L] float32 nats
  entropies: jax.Array  # [R, L] float32 nats
  values: jax.Array | None = None  # [R, L] float32, of the state before it


def pack(
    tree: trees.Tree,
    credit: types.Credit,
    row_length: int | None = None,
    *,
    layout: Layout = 'paths',
    value_targets: np.ndarray | None = None,
    old_values: np.ndarray | None = None,
) -> PackedRows:
  """Lays out a batch of trees as rows, on the host.

  Args:
    tree: B trees.
    credit: advantages and weights of their tokens, [B, N, T] each.
    row_length: L; None takes the longest path, or `row_length_of` the trees.
    layout: 'trees' or 'paths'.
    value_targets: [B, N, T] float, returns that a critic is to predict, reward
      units; None without a critic.
    old_values: [B, N, T] float, its predictions before the update, reward
      units; None where its step is not bound.

  Returns:
    Of 'paths' a row per leaf, in the order of trees and leaves. Of 'trees' rows
    of as many trees as go in, the largest first; a tree longer than a row is
    cut to subtrees that repeat the path above the cut and no more. Each action
    token is in `action_mask` of the first row that holds it and of no other;
    `path_mask` has all action tokens that stand in a row. Without a table of
    blocks attention is dense; `micro_batches` makes it.

  Raises:
    ValueError: if a path is longer than `row_length`, if one begins with an
      action, if a parent does not come before its child, if an array has
      another shape than the tree's tokens, or if the layout is unknown.
  """
  checks.one_of('layout', layout, Layout)
  tree, credit = jax.tree.map(np.asarray, (tree, credit))
  fields = {
      'advantages': credit.advantages, 'weights': credit.weights,
      'value_targets': value_targets, 'old_values': old_values,
  }
  fields = {k: np.asarray(x) for k, x in fields.items() if x is not None}
  for name, values in fields.items():
    checks.shape(name, values, tree.tokens.shape)
  order = _preorder(tree)
  if row_length is None:
    longest = int(order.until.max(initial=0))
    row_length = longest if layout == 'paths' else _row_length(order)
  checks.whole('row_length', row_length, low=0)
  _check_paths(order, row_length, tree.tokens.shape[1])
  if layout == 'paths':
    rows = [[path] for path in layouts.paths(order)]
  else:
    rows = layouts.filled_rows(order, row_length)
  laid = layouts.lay_out(order, rows, tree.token_mask)
  return _fill(tree, fields, laid, len(rows), row_length)


def row_length_of(
    tree: trees.Tree, max_tokens: int | None = None, num_shards: int = 1
) -> int:
  """Returns a length for rows of trees, one of those of `layouts.bucket`.

  That of one row that holds them all: the longer a row, the less of it is
  padding, and with a table of blocks attention costs no more. Memory does, so
  `max_tokens` bounds it; or else 8192 tokens, and four times the longest path,
  so that a cut repeats a quarter of a row at most. A path has to go in, always.

  Args:
    tree: B trees.
    max_tokens: of a micro-batch, or of each shard of it; None where memory does
      not bind.
    num_shards: as of `micro_batches`; there are to be rows for all of them.
  """
  order = _preorder(jax.tree.map(np.asarray, tree))
  return _row_length(order, max_tokens, num_shards)


def _row_length(order, most: int | None = None, num_shards: int = 1) -> int:
  longest_path = layouts.bucket(int(order.until.max(initial=0)))
  most = max(_MOST_TOKENS, 4 * longest_path) if most is None else most
  share = -(-int(order.length.sum()) // num_shards)
  length = layouts.bucket(max(share, int(order.size.max(initial=0))))
  return max(min(length, layouts.bucket_below(most)), longest_path)


def _preorder(tree: trees.Tree) -> layouts.Preorder:
  if np.any(tree.parents >= np.arange(tree.parents.shape[1])):
    raise ValueError(
        'expected parents[n] < n at every node, got trees in another order;'
        ' Tree.validate() tells where'
    )
  return layouts.preorder(
      tree.parents, tree.node_mask, tree.token_mask.sum(axis=2)
  )


def _check_paths(order, row_length: int, num_nodes: int) -> None:
  """Refuses rows that the longest path does not go in."""
  longest = int(order.until.max(initial=0))
  if longest > row_length:
    tree = int(order.node[np.argmax(order.until)]) // num_nodes
    raise ValueError(
        f'expected paths of at most row_length = {row_length} tokens, got one'
        f' of {longest} in tree {tree}; raise row_length to {longest} at least'
    )


def _fill(tree, fields, laid: layouts.Layout, num_rows: int, row_length: int
          ) -> PackedRows:
  """Returns rows that hold what the trees do, where the layout says."""
  at = laid.row * row_length + laid.place

  def put(values, dtype, fill=0):
    rows = np.full(num_rows * row_length, fill, dtype)
    rows[at] = values
    return rows.reshape(num_rows, row_length)

  of = lambda values: values.reshape(-1)[laid.source]
  is_action = of(tree.action_mask)
  is_trained = is_action & laid.is_new
  if np.any(is_action & (laid.position == 0)):
    raise ValueError(
        'expected a prompt before the first action, got a path that begins with'
        ' an action token, which nothing predicts; put a token in the root'
    )
  number = lambda values, mask: put(np.where(mask, of(values), 0), np.float32)
  return PackedRows(
      tokens=put(of(tree.tokens), np.int32),
      token_mask=put(True, bool),
      positions=put(laid.position, np.int32),
      end=put(laid.end, np.int32),
      predictor=put(laid.predictor, np.int32),
      action_mask=put(is_trained, bool),
      path_mask=put(is_action, bool),
      behaviour_log_probs=number(tree.behaviour_log_probs, is_action),
      source=put(laid.source, np.int32, -1),
      allowed=_allowed_sets(tree, laid, (num_rows, row_length)),
      **{name: number(x, is_trained) for name, x in fields.items()},
  )


def _allowed_sets(tree, laid, shape) -> np.ndarray | None:
  """Returns [R, L, W], zero off the action tokens."""
  if tree.allowed is None:
    return None
  rows = np.zeros((*shape, tree.allowed.shape[-1]), np.uint32)
  at = tree.action_mask.reshape(-1)[laid.source]
  tree_index, node, token = np.unravel_index(
      laid.source[at], tree.tokens.shape)
  rows[laid.row[at], laid.place[at]] = tree.allowed[tree_index, node, token]
  return rows


def micro_batches(
    rows: PackedRows,
    max_tokens: int,
    bucket: int | None = None,
    num_shards: int = 1,
) -> list[PackedRows]:
  """Splits rows into batches of like length, padded to few shapes.

  Rows are sorted by length, longest first. A batch is as long as its first row,
  and has as many rows as go into `max_tokens`, rounded down to a power of two;
  a half or a quarter as many where no more are left. Rows that train no token
  are left out. Padding changes no gradient: sums and denominators travel apart.

  Args:
    rows: R rows, as by `pack`.
    max_tokens: bound on rows x length of a batch, or of each shard of it (but
      one row at least).
    bucket: lengths are multiples of it; None for `layouts.bucket`. Either
      bounds what is compiled.
    num_shards: devices that the rows of a batch go to in equal parts.

  Returns:
    Batches that together train what `rows` do.

  Raises:
    ValueError: if the rows are those of a micro-batch, or a number is not whole
      and positive.
  """
  if rows.trained is not None:
    raise ValueError(
        'expected rows as by pack, got those of a micro-batch; split once')
  checks.whole('max_tokens', max_tokens)
  checks.whole('num_shards', num_shards)
  if bucket is not None:
    checks.whole('bucket', bucket)
  lengths = rows.token_mask.sum(axis=1)
  order = np.argsort(-lengths, kind='stable')
  order = order[rows.action_mask[order].any(axis=1)]
  most = _power_above(-(-len(order) // num_shards))
  batches = []
  while len(order):
    longest = int(lengths[order[0]])
    length = layouts.bucket(longest) if bucket is None else (
        -(-longest // bucket) * bucket)
    num_rows = num_shards * _rows_of_batch(
        -(-len(order) // num_shards), min(most, max_tokens // length))
    batches.append(_sub_batch(rows, order[:num_rows], num_rows, length))
    order = order[num_rows:]
  return batches


def _rows_of_batch(left: int, most: int) -> int:
  """Returns one of three powers of two, the largest that wastes no row.

  None at the end of the batches either, beyond what the least of them does.
  """
  most = 1 << max(1, most).bit_length() - 1
  fewest = max(1, most // 4, min(2, most // 2))
  if left >= most:
    return most
  num_rows = max(fewest, _power_above(left))
  needed = -(-left // fewest) * fewest
  return num_rows if num_rows <= needed else num_rows // 2


def _power_above(number: int) -> int:
  return 1 << max(0, number - 1).bit_length()


def _sub_batch(rows, index, num_rows, length) -> PackedRows:
  """Returns `rows[index]`, cut or padded to [num_rows, length]."""

  def fit(x):
    x = x[index, :length]
    widths = [(0, num_rows - len(x)), (0, length - x.shape[1])]
    return np.pad(x, widths + [(0, 0)] * (x.ndim - 2))

  batch = jax.tree.map(fit, rows._replace(allowed=None))
  trained = _places(batch.path_mask)
  allowed, blocks = rows.allowed, None
  if allowed is not None:
    row, rank = np.nonzero(trained < length)
    sets = np.zeros((*trained.shape, allowed.shape[-1]), allowed.dtype)
    sets[row, rank] = allowed[index[row], trained[row, rank]]
    allowed = sets
  if length % attention.BLOCK == 0:
    blocks = attention.block_table(batch.end)
  return batch._replace(
      source=np.where(batch.token_mask, batch.source, -1),
      allowed=allowed,
      trained=trained,
      ancestors_blocks=blocks,
  )


def _places(mask: np.ndarray) -> np.ndarray:
  """Returns [R, P] int32, where [R, L] is True; L beyond, P eighths of L."""
  num_rows, length = mask.shape
  counts = mask.sum(axis=1)
  step = -(-length // 8)
  most = min(length, -(-int(counts.max()) // step) * step)
  places = np.full((num_rows, most), length, np.int32)
  row, place = np.nonzero(mask)
  places[row, np.arange(len(row)) - (np.cumsum(counts) - counts)[row]] = place
  return places


def sharing_ratio(tree: trees.Tree) -> float:
  """Returns the tokens of all paths over those of the trees, 1 or more.

  That is how many times a token is run, on average, where each path is run
  alone; 1 where there is no token.
  """
  order = _preorder(jax.tree.map(np.asarray, tree))
  on_paths = sum(int(order.length[path].sum()) for path in layouts.paths(order))
  return on_paths / int(order.length.sum()) if on_paths else 1.0


def metrics(batches: Sequence[PackedRows]) -> dict[str, float]:
  """Returns what the rows of an update are like, by name.

  rows/tokens: those that are run. rows/trained_tokens: action tokens among
  them. rows/repeated: the share of them that a cut, or a path of its own, made
  to be run again. rows/computed_tokens: places for tokens. rows/padding: the
  share of places that hold none.
  """
  sources = [batch.source[batch.token_mask] for batch in batches]
  num_tokens = sum(map(len, sources))
  places = sum(batch.tokens.size for batch in batches)
  unique = len(np.unique(np.concatenate(sources))) if sources else 0
  return {
      'rows/tokens': float(num_tokens),
      'rows/trained_tokens': float(
          sum(batch.action_mask.sum() for batch in batches)),
      'rows/computed_tokens': float(places),
      'rows/repeated': 1 - unique / num_tokens if num_tokens else 0.0,
      'rows/padding': 1 - num_tokens / places if places else 0.0,
  }


def attention_mask(rows: PackedRows) -> jax.Array:
  """Returns [R, L, L] bool: j <= i < end[j], or j = i so no row is empty."""
  place = jnp.arange(rows.tokens.shape[1])
  return attention.visible(rows.end[:, None], place[:, None], place)


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
  log_probs, entropies = log_probs_lib.token_log_probs(
      hidden,
      model.apply({'params': params}, method='unembedding'),
      _at_trained(rows.tokens, rows),
      allowed=rows.allowed,
      temperature=temperature,
  )
  values = None
  if model.config.value_head:
    values = model.apply({'params': params}, hidden, method='values')
    values = _on_path(values, rows)
  return TokenOutputs(
      _on_path(log_probs, rows), _on_path(entropies, rows), values)


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


def _predictors(model, params, rows):
  """Returns [R, P or L, width], the hidden state that predicts each token."""
  if rows.ancestors_blocks is None:
    mask = attention_mask(rows)
  else:
    mask = attention.Ancestors(rows.end, rows.ancestors_blocks)
  hidden, _ = model.apply({'params': params}, rows.tokens, rows.positions, mask)
  predictor = _at_trained(rows.predictor, rows)
  return jnp.take_along_axis(hidden, predictor[..., None], axis=1)


def _at_trained(values, rows):
  """Returns [R, P] of [R, L], the last of a row beyond the trained ones."""
  if rows.trained is None:
    return values
  last = rows.tokens.shape[1] - 1
  places = jnp.minimum(rows.trained, last)
  return jnp.take_along_axis(values, places, axis=1)


def _on_path(values, rows):
  """Returns [R, L] of [R, P], zero off `path_mask`."""
  if rows.trained is not None:
    put = lambda x, places: jnp.zeros(rows.tokens.shape[1], x.dtype).at[
        places].set(x, mode='drop')
    values = jax.vmap(put)(values, rows.trained)
  return jnp.where(rows.path_mask, values, 0.0)


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

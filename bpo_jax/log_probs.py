"""Log-probs and entropies of tokens, without the logits of a whole row.

The logits are the largest arrays of a training step by far, V numbers a token,
of which a token needs three: the logit drawn, the log of the normaliser and the
entropy. So they exist for a tile at a time, some tokens of every row by some of
the vocabulary; they are reduced and thrown away, and the backward pass forms
them again.

A tile stays in a processor's cache. Tiles of the vocabulary are the inner loop:
the gradient of the unembedding is then written once for many tokens, and where
rows are sharded, added up over devices as seldom. A tile holds tokens of every
row, and words from all over the vocabulary, so that neither axis need be
gathered where it is sharded.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bpo_jax import attention
from bpo_jax import checks
from bpo_jax import sampling
from bpo_jax import types

_MAX_WIDTH = 1280  # Tokens of the vocabulary in a tile.
_MIN_WIDTH = 64  # Narrower products are slow.
_TILE_BYTES = 2**24
_MIN_CHUNK = 64


class _Rows(NamedTuple):
  """What is asked; P tokens of each row, or C of a chunk."""

  hidden: jax.Array  # [R, P, D]
  tokens: jax.Array  # [R, P] int32
  allowed: jax.Array | None  # [R, P, V / 32] uint32


class _Sums(NamedTuple):
  """What is known of the logits z of the tiles seen so far."""

  peak: jax.Array  # [R, C] float32, the largest z
  exp: jax.Array  # [R, C] float32, sum exp(z - peak)
  weighted: jax.Array  # [R, C] float32, sum exp(z - peak) (z - peak)
  chosen: jax.Array  # [R, C] float32, z of the token


class _Normaliser(NamedTuple):
  """What turns logits z into log p = z - peak - log_sum."""

  peak: jax.Array  # [R, P] float32
  log_sum: jax.Array  # [R, P] float32
  entropies: jax.Array  # [R, P] float32, nats


def token_log_probs(
    hidden: jax.Array,
    unembedding: jax.Array,
    tokens: jax.Array,
    *,
    allowed: jax.Array | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Returns the log-prob of each token, and the entropy it was drawn with.

  z = hidden unembedding^T / temperature, log p = log softmax(z) over what is
  allowed, H = -sum p log p: those of `sampling.token_distribution`, and so are
  the gradients, to float32 rounding. A token whose two cotangents are zero adds
  nothing to a gradient, whatever its hidden state holds, NaN included.

  Args:
    hidden: [..., P, D] float32 or bfloat16, the state that predicts each token.
    unembedding: [V, D] float32 or bfloat16, a row for each token of the
      vocabulary. Products accumulate in float32.
    tokens: [..., P] int32.
    allowed: [..., P, V / 32] uint32, as by `sampling.pack_bits`, the tokens
      that could be drawn; None where all could. A token that allows nothing
      (padding) gets finite numbers of no meaning.
    temperature: positive number of the host, as sampled.
    chunk: tokens of each row that are taken at a time; by default as many as
      have a tile of logits of 16 MiB, at least 64.

  Returns:
    log_probs: [..., P] float32, nats.
    entropies: [..., P] float32, nats. Gradients of both flow to `hidden` and
    `unembedding`.

  Raises:
    ValueError: if shapes disagree or a number is out of range.
  """
  _check(hidden, unembedding, tokens, allowed, temperature, chunk)
  *lead, length, _ = hidden.shape
  rows = jax.tree.map(
      lambda x: x.reshape(-1, *x.shape[len(lead):]),
      _Rows(hidden, tokens, allowed),
  )
  if chunk is None:
    chunk = _default_chunk(len(rows.tokens), _Tiles.of(len(unembedding)))
  outputs = _score(float(temperature), chunk, unembedding, rows)
  return tuple(x.reshape(*lead, length) for x in outputs)


def _check(hidden, unembedding, tokens, allowed, temperature, chunk):
  if hidden.ndim < 2:
    raise ValueError(f'hidden: expected shape [..., P, D], got {hidden.shape}')
  vocab_size = len(unembedding)
  checks.shape('unembedding', unembedding, (vocab_size, hidden.shape[-1]))
  if not vocab_size:
    raise ValueError('unembedding: expected a token at least, got none')
  checks.shape('tokens', tokens, hidden.shape[:-1])
  if allowed is not None:
    if vocab_size % types.WORD:
      raise ValueError(
          f'unembedding: expected a multiple of {types.WORD} rows where allowed'
          f' is given, got {vocab_size}'
      )
    checks.shape('allowed', allowed, (*tokens.shape, vocab_size // types.WORD))
  if not temperature > 0:
    raise ValueError(
        f'temperature: expected a positive number, got {temperature}'
    )
  if chunk is not None:
    checks.at_least('chunk', chunk, 1)


class _Tiles(NamedTuple):
  """A vocabulary in tiles; word w belongs to tile w % count.

  Attributes:
    vocab_size: tokens; behind them is padding that nothing is summed over.
    count: how many tiles.
    num_words: words of each.
    word: tokens of a word.
  """

  vocab_size: int
  count: int
  num_words: int
  word: int = types.WORD

  @classmethod
  def of(cls, vocab_size: int) -> '_Tiles':
    """Returns the widest tiles up to _MAX_WIDTH that divide the vocabulary.

    Where none of _MIN_WIDTH does, those that pad it least.
    """
    if vocab_size <= _MAX_WIDTH:
      if vocab_size % types.WORD:
        return cls(vocab_size, 1, 1, vocab_size)
      return cls(vocab_size, 1, vocab_size // types.WORD)
    total = -(-vocab_size // types.WORD)
    most = _MAX_WIDTH // types.WORD
    if vocab_size % types.WORD == 0:
      for num_words in range(most, 0, -1):
        if total % num_words == 0 and num_words * types.WORD >= _MIN_WIDTH:
          return cls(vocab_size, total // num_words, num_words)
    count = -(-total // most)
    return cls(vocab_size, count, -(-total // count))

  @property
  def width(self) -> int:
    return self.num_words * self.word

  @property
  def padding(self) -> int:
    return self.count * self.width - self.vocab_size

  def pad(self, unembedding: jax.Array) -> jax.Array:
    """Returns [V + padding, D] of [V, D]."""
    if not self.padding:
      return unembedding
    return jnp.pad(unembedding, ((0, self.padding), (0, 0)))

  def rows(self, unembedding: jax.Array, i: jax.Array) -> jax.Array:
    """Returns the rows of tile i, [width, D], of what is padded."""
    x = unembedding.reshape(self.num_words, self.count, self.word, -1)
    return jax.lax.dynamic_index_in_dim(x, i, 1).reshape(self.width, -1)

  def join(self, rows: jax.Array) -> jax.Array:
    """Returns [V, D] of the rows of all tiles, [count, width, D]."""
    x = rows.reshape(self.count, self.num_words, self.word, -1)
    x = x.swapaxes(0, 1).reshape(-1, rows.shape[-1])
    return x[:self.vocab_size] if self.padding else x

  def possible(
      self, words: jax.Array | None, i: jax.Array
  ) -> jax.Array | None:
    """Returns what can be drawn of tile i, [..., width] bool; None for all.

    Args:
      words: what is allowed, [..., V / 32] uint32; None for all of V.
      i: [] int32.
    """
    if words is None:
      return self._is_token_at(i) if self.padding else None
    if self.padding:
      before = [(0, 0)] * (words.ndim - 1)
      words = jnp.pad(words, (*before, (0, self.padding // types.WORD)))
    x = words.reshape(*words.shape[:-1], self.num_words, self.count)
    return sampling.unpack_bits(
        jax.lax.dynamic_index_in_dim(x, i, x.ndim - 1, keepdims=False)
    )

  def _is_token_at(self, i):
    """Returns [width] bool, False on padding."""
    word = jnp.arange(self.num_words)[:, None] * self.count + i
    token = word * self.word + jnp.arange(self.word)
    return token.reshape(-1) < self.vocab_size

  def is_token(self, tokens: jax.Array, i: jax.Array) -> jax.Array:
    """Returns [..., width] bool, True at the token if tile i has it."""
    word, place = jnp.divmod(tokens, self.word)
    local = jnp.where(
        word % self.count == i, word // self.count * self.word + place, -1
    )
    return jnp.arange(self.width) == local[..., None]


def _default_chunk(num_rows: int, tiles: _Tiles) -> int:
  fitting = _TILE_BYTES // (4 * tiles.width * max(num_rows, 1))
  return max(fitting, _MIN_CHUNK)


def _split(x: jax.Array, chunk: int) -> jax.Array:
  """Returns [n, R, C, ...] of [R, P, ...], zeros after the last token.

  C is at most `chunk`, and less where that needs less padding.
  """
  num_rows, length, *rest = x.shape
  num_chunks = max(-(-length // chunk), 1)
  size = -(-length // num_chunks)
  after = num_chunks * size - length
  x = jnp.pad(x, ((0, 0), (0, after)) + ((0, 0),) * len(rest))
  return x.reshape(num_rows, num_chunks, size, *rest).swapaxes(0, 1)


def _join(x: jax.Array, length: int) -> jax.Array:
  """The inverse of `_split`."""
  num_chunks, num_rows, size, *rest = x.shape
  x = x.swapaxes(0, 1).reshape(num_rows, num_chunks * size, *rest)
  return x[:, :length]


def _product(
    x: jax.Array, y: jax.Array, x_axes: tuple[int, ...], y_axes: tuple[int, ...]
) -> jax.Array:
  """Returns the float32 product of two arrays over some of their axes."""
  product = functools.partial(
      jax.lax.dot_general,
      dimension_numbers=((x_axes, y_axes), ((), ())),
      preferred_element_type=jnp.float32,
  )
  widened = lambda *xs: product(*(x.astype(jnp.float32) for x in xs))
  if x.dtype == y.dtype == jnp.float32:
    return product(x, y)
  if x.dtype != y.dtype:
    return widened(x, y)
  # XLA has no such product of bfloat16 for every shape on CPU, nor a fast one.
  return jax.lax.platform_dependent(x, y, cpu=widened, default=product)


def _logits(temperature, chunk, part, allowed):
  """Returns the logits of a tile as sampled, [R, C, width] float32."""
  logits = _product(chunk.hidden, part, (2,), (1,)) / temperature
  if allowed is None:
    return logits
  return jnp.where(allowed, logits, attention.MASKED_SCORE)


def _tile(tiles, table, chunk, i):
  """Returns the rows of tile i, and where it is possible (None: all of it)."""
  possible = tiles.possible(chunk.allowed, i)
  return tiles.rows(table, i), possible


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _score(temperature, chunk_size, unembedding, rows):
  """Returns log_probs and entropies, [R, P] float32 each."""
  return _forward(temperature, chunk_size, unembedding, rows)[0]


def _forward(temperature, chunk_size, unembedding, rows):
  """Returns what `_score` does, and what its gradient needs."""
  tiles = _Tiles.of(len(unembedding))
  table = tiles.pad(unembedding)

  def of_chunk(_, chunk):

    def fold(i, sums):
      part, allowed = _tile(tiles, table, chunk, i)
      logits = _logits(temperature, chunk, part, allowed)
      return _fold(sums, logits, tiles.is_token(chunk.tokens, i))

    zero = jnp.zeros(chunk.tokens.shape, jnp.float32)
    start = _Sums(zero + attention.MASKED_SCORE, zero, zero, zero)
    return None, _finish(jax.lax.fori_loop(0, tiles.count, fold, start))

  _, outputs = jax.lax.scan(
      of_chunk, None, jax.tree.map(lambda x: _split(x, chunk_size), rows)
  )
  length = rows.tokens.shape[1]
  log_probs, normaliser = jax.tree.map(lambda x: _join(x, length), outputs)
  return (log_probs, normaliser.entropies), (unembedding, rows, normaliser)


def _fold(sums, logits, is_token):
  """Returns the sums with one more tile in them (online softmax)."""
  peak = jnp.maximum(sums.peak, jnp.max(logits, axis=-1))
  moved = sums.peak - peak
  scale = jnp.exp(moved)
  shifted = logits - peak[..., None]
  exp = jnp.exp(shifted)
  weighted = scale * (sums.weighted + moved * sums.exp)
  return _Sums(
      peak=peak,
      exp=scale * sums.exp + jnp.sum(exp, axis=-1),
      weighted=weighted + jnp.sum(exp * shifted, axis=-1),
      # Unlike a gather, a sum is local to every shard of the vocabulary.
      chosen=sums.chosen + jnp.sum(jnp.where(is_token, logits, 0.0), axis=-1),
  )


def _finish(sums):
  """Returns the log-probs of a chunk and its normaliser."""
  log_sum = jnp.log(sums.exp)
  # Both terms are positive: nothing cancels, however sure the policy is.
  entropies = log_sum - sums.weighted / sums.exp
  # Where nothing is allowed it is a sum over nothing.
  is_empty = sums.peak == attention.MASKED_SCORE
  normaliser = _Normaliser(
      sums.peak, log_sum, jnp.where(is_empty, 0.0, entropies)
  )
  return sums.chosen - sums.peak - log_sum, normaliser


def _backward(temperature, chunk_size, residuals, cotangents):
  """Returns the gradients, forming the logits of each tile once more."""
  unembedding, rows, normaliser = residuals
  tiles = _Tiles.of(len(unembedding))
  table = tiles.pad(unembedding)
  # Before any product: zero times what stands at a padded token may be NaN.
  live = (cotangents[0] != 0) | (cotangents[1] != 0)
  rows = rows._replace(hidden=jnp.where(live[..., None], rows.hidden, 0))
  normaliser = jax.tree.map(lambda x: jnp.where(live, x, 0.0), normaliser)

  def of_chunk(total, inputs):
    chunk, normaliser, cotangents = inputs

    def of_tile(to_hidden, i):
      part, allowed = _tile(tiles, table, chunk, i)
      slopes = _slopes(
          _logits(temperature, chunk, part, allowed),
          normaliser,
          cotangents,
          tiles.is_token(chunk.tokens, i),
      )
      if allowed is not None:
        slopes = jnp.where(allowed, slopes, 0.0)
      slopes = (slopes / temperature).astype(unembedding.dtype)
      to_hidden += _product(slopes, part, (2,), (0,))
      # In this order it is the smaller factor that is transposed.
      return to_hidden, _product(chunk.hidden, slopes, (0, 1), (0, 1)).T

    zero = jnp.zeros(chunk.hidden.shape, jnp.float32)
    to_hidden, to_rows = jax.lax.scan(of_tile, zero, jnp.arange(tiles.count))
    return total + tiles.join(to_rows), to_hidden

  to_unembedding, to_hidden = jax.lax.scan(
      of_chunk,
      jnp.zeros(unembedding.shape, jnp.float32),
      jax.tree.map(
          lambda x: _split(x, chunk_size), (rows, normaliser, cotangents)
      ),
  )
  to_hidden = _join(to_hidden, rows.tokens.shape[1]).astype(rows.hidden.dtype)
  return to_unembedding.astype(unembedding.dtype), _Rows(to_hidden, None, None)


def _slopes(logits, normaliser, cotangents, is_token):
  """Returns the gradient of what is differentiated in the logits of a tile.

  g [v is the token] - p_v (g + h (log p_v + H)), for the cotangents g of log p
  and h of H.
  """
  peak, log_sum, entropies = (x[..., None] for x in normaliser)
  g, h = (x[..., None] for x in cotangents)
  log_probs = logits - peak - log_sum
  to_all = -jnp.exp(log_probs) * (g + h * (log_probs + entropies))
  return to_all + jnp.where(is_token, g, 0.0)


_score.defvjp(_forward, _backward)

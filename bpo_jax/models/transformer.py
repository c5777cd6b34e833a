"""A decoder-only transformer: RMSNorm, RoPE, grouped heads, SwiGLU.

The layers are stacked and scanned, so compile time does not grow with depth.
The module never writes its cache: it reads one, and hands back the keys and
values of the tokens it was given. Who owns a cache decides where they go, which
is what lets a fork inherit its parent's and a decode loop write once a turn.

Linen rather than NNX: `params` stays one plain dict of arrays that the
optimiser, the checkpoint and the sharding rules see without a module object.
"""

import dataclasses
from typing import NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp

# Not -inf: a row whose every key is masked would become NaN in the softmax.
MASKED_SCORE = -1e30


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
  """The shape of the network.

  Attributes:
    vocab_size: tokens V, a multiple of 32 (allowed sets are bit masks).
    width: model width D.
    num_layers: blocks.
    num_heads: query heads H.
    num_kv_heads: key and value heads G; H must be a multiple of it.
    head_dim: width of one head, even (RoPE turns pairs).
    mlp_width: inner width of the SwiGLU.
    rope_theta: base of the rotary wavelengths.
    norm_epsilon: added to the mean square in RMSNorm.
    value_head: whether a critic reads the hidden states, see `values`.
  """

  vocab_size: int
  width: int = 96
  num_layers: int = 2
  num_heads: int = 4
  num_kv_heads: int = 2
  head_dim: int = 24
  mlp_width: int = 256
  rope_theta: float = 10_000.0
  norm_epsilon: float = 1e-6
  value_head: bool = False

  def __post_init__(self):
    if self.vocab_size % 32:
      raise ValueError(
          f'vocab_size must be a multiple of 32, got {self.vocab_size}'
      )
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
          'num_heads must be a multiple of num_kv_heads, got'
          f' {self.num_heads} and {self.num_kv_heads}'
      )
    if self.head_dim % 2:
      raise ValueError(f'head_dim must be even, got {self.head_dim}')


class KeyValues(NamedTuple):
  """Keys and values of some tokens in every layer."""

  keys: jax.Array  # [layers, R, G, S, head_dim] float32
  values: jax.Array  # [layers, R, G, S, head_dim] float32


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
  """Turns pairs of features by position (RoPE, arXiv 2104.09864, eq. 34).

  Args:
    x: features, [R, heads, C, head_dim].
    positions: place on the path from 0, [R, C] int32.
    theta: base of the wavelengths.

  Returns:
    [R, heads, C, head_dim], pairing feature i with i + head_dim / 2.
  """
  half = x.shape[-1] // 2
  frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angles = positions[:, None, :, None].astype(jnp.float32) * frequencies
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  x_1, x_2 = x[..., :half], x[..., half:]
  return jnp.concatenate(
      [x_1 * cos - x_2 * sin, x_2 * cos + x_1 * sin], axis=-1
  )


def attend(
    queries: jax.Array,
    sources: list[tuple[jax.Array, jax.Array, jax.Array]],
) -> jax.Array:
  """Grouped-head attention over several sources of keys as if concatenated.

  Only the scores are concatenated: a long cache is read where it lies.

  Args:
    queries: [R, H, C, head_dim].
    sources: (keys [R, G, S, head_dim], values [R, G, S, head_dim], mask
      [R, C, S] bool, True where the query may look) for each source.

  Returns:
    [R, H, C, head_dim] float32.
  """
  rows, heads, chunk, dim = queries.shape
  groups = sources[0][0].shape[1]
  grouped = queries.reshape(rows, groups, heads // groups * chunk, dim)
  grouped = grouped * dim**-0.5
  scores = []
  for keys, _, mask in sources:
    score = jnp.einsum('rgqd,rgsd->rgqs', grouped, keys)
    score = score.reshape(rows, groups, heads // groups, chunk, -1)
    scores.append(
        jnp.where(mask[:, None, None], score.astype(jnp.float32), MASKED_SCORE)
    )
  weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
  weights = weights.reshape(rows, groups, heads // groups * chunk, -1)
  out, start = 0.0, 0
  for _, values, mask in sources:
    part = jax.lax.slice_in_dim(weights, start, start + mask.shape[-1], axis=-1)
    out += jnp.einsum('rgqs,rgsd->rgqd', part, values)
    start += mask.shape[-1]
  return out.reshape(rows, heads, chunk, dim)


class Attention(nn.Module):
  """Grouped-head self-attention over earlier key-values and this chunk's."""

  config: TransformerConfig

  @nn.compact
  def __call__(self, x, past, positions, past_masks, mask):
    c = self.config

    def heads(name, count):
      y = nn.Dense(count * c.head_dim, use_bias=False, name=name)(x)
      y = y.reshape(*x.shape[:2], count, c.head_dim)
      return y.swapaxes(1, 2)  # [R, count, C, head_dim]

    queries = rotate(heads('query', c.num_heads), positions, c.rope_theta)
    keys = rotate(heads('key', c.num_kv_heads), positions, c.rope_theta)
    values = heads('value', c.num_kv_heads)
    sources = [(*kv, m) for kv, m in zip(past, past_masks)]
    sources.append((keys, values, mask))
    out = attend(queries, sources).swapaxes(1, 2)
    out = out.reshape(*x.shape[:2], c.num_heads * c.head_dim)
    out = nn.Dense(c.width, use_bias=False, name='out')(out)
    return out, (keys, values)


class Block(nn.Module):
  """x + attention(norm(x)), then x + swiglu(norm(x))."""

  config: TransformerConfig

  @nn.compact
  def __call__(self, x, past, positions, past_masks, mask):
    c = self.config
    norm = lambda name: nn.RMSNorm(epsilon=c.norm_epsilon, name=name)
    dense = lambda width, name: nn.Dense(width, use_bias=False, name=name)
    attended, new = Attention(c, name='attention')(
        norm('attention_norm')(x), past, positions, past_masks, mask
    )
    x = x + attended
    y = norm('mlp_norm')(x)
    gate = nn.silu(dense(c.mlp_width, 'gate')(y))
    x = x + dense(c.width, 'down')(gate * dense(c.mlp_width, 'up')(y))
    return x, new


class Transformer(nn.Module):
  """Tokens to hidden states, and hidden states to logits."""

  config: TransformerConfig

  def setup(self):
    c = self.config
    self.embedding = nn.Embed(
        c.vocab_size,
        c.width,
        embedding_init=nn.initializers.normal(c.width**-0.5),
    )
    # Rematerialised: stacking the attention weights of every layer for the
    # backward pass costs twice what computing them again does, even on CPU.
    self.blocks = nn.scan(
        nn.remat(Block, prevent_cse=False),
        variable_axes={'params': 0},
        split_rngs={'params': True},
        in_axes=(0, nn.broadcast, nn.broadcast, nn.broadcast),
        length=c.num_layers,
    )(c)
    self.final_norm = nn.RMSNorm(epsilon=c.norm_epsilon)
    if c.value_head:
      # Zero at first: a critic that knows nothing must not make up advantages.
      self.value_head = nn.Dense(1, kernel_init=nn.initializers.zeros)

  def __call__(
      self,
      tokens: jax.Array,
      positions: jax.Array,
      mask: jax.Array,
      past: tuple[KeyValues, ...] = (),
      past_masks: tuple[jax.Array, ...] = (),
  ) -> tuple[jax.Array, KeyValues]:
    """Runs a chunk of tokens after the tokens in `past`.

    Args:
      tokens: [R, C] int32.
      positions: place of each token on its path, [R, C] int32.
      mask: [R, C, C] bool, True where token i may attend to token j.
      past: key-values of earlier tokens, as many groups as are kept apart.
      past_masks: [R, C, S] bool for each group, True where token i may attend
        to past token j.

    Returns:
      hidden: [R, C, width] float32, after the last norm; feed it to `logits`.
      new: the chunk's own key-values, S = C.
    """
    # sqrt(width): embeddings tied to the logits are small, the stream is not.
    x = self.embedding(tokens) * self.config.width**0.5
    x, (keys, values) = self.blocks(x, past, positions, past_masks, mask)
    return self.final_norm(x), KeyValues(keys, values)

  def logits(self, hidden: jax.Array) -> jax.Array:
    """Returns [..., V] float32 scores of the next token (tied embedding)."""
    return self.embedding.attend(hidden).astype(jnp.float32)

  def values(self, hidden: jax.Array) -> jax.Array:
    """Returns [...] float32 values of the states, 0 for fresh parameters.

    The hidden state that predicts an action token is that of the state before
    the action.

    Args:
      hidden: [..., width] float32, after the last norm.

    Raises:
      ValueError: if the config has no value head.
    """
    if not self.config.value_head:
      raise ValueError(
          'values need a value head: expected a TransformerConfig with'
          ' value_head=True, got False'
      )
    return self.value_head(hidden)[..., 0].astype(jnp.float32)

  def heads(
      self, tokens: jax.Array, positions: jax.Array, mask: jax.Array
  ) -> tuple[jax.Array, jax.Array | None]:
    """Returns the logits, and the values where there is a value head.

    Args:
      tokens: [R, C] int32.
      positions: [R, C] int32, as in `__call__`.
      mask: [R, C, C] bool, as in `__call__`.
    """
    hidden, _ = self(tokens, positions, mask)
    values = self.values(hidden) if self.config.value_head else None
    return self.logits(hidden), values


def init_params(config: TransformerConfig, rng_key: jax.Array) -> dict:
  """Returns fresh parameters, a dict of float32 arrays.

  A value head adds its own and changes no other.
  """
  tokens = jnp.zeros((1, 1), jnp.int32)
  mask = jnp.ones((1, 1, 1), bool)
  variables = Transformer(config).init(
      rng_key, tokens, tokens, mask, method='heads'
  )
  return variables['params']


def num_parameters(params: dict) -> int:
  """Returns how many numbers the parameters hold."""
  return sum(leaf.size for leaf in jax.tree.leaves(params))

"""A decoder-only transformer: RMSNorm, RoPE, grouped heads, SwiGLU.

One module for all that differ in switches alone: the small policies trained
from scratch, Qwen2 and 2.5, Qwen3, Llama 3.x, SmolLM2. `hugging_face` reads and
writes their published weights, `lora` adapts them.

The layers are stacked and scanned, so compile time does not grow with depth.
On a CPU a scan copies the weights of each layer before it reads them, which is
lost in the matrix products of a long chunk, but half of the time of a single
token: to decode, `unstack` the layers once.

The module never writes its cache: it reads one, and hands back the keys and
values of the tokens it was given. Who owns a cache decides where they go, which
is what lets a fork inherit its parent's and a decode loop write once a turn.

Linen rather than NNX: `params` stays one plain dict of arrays that the
optimiser, the checkpoint and the sharding rules see without a module object.
"""

import dataclasses
from typing import Literal, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bpo_jax import attention
from bpo_jax import checks

# What a block's backward pass finds again in memory, see `TransformerConfig`.
Remat = Literal['none', 'matmuls', 'block']

# The linear maps of a block, where low-rank adapters can go.
PROJECTIONS = ('query', 'key', 'value', 'out', 'gate', 'up', 'down')


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """How Llama 3.1 and later stretch the slow wavelengths of RoPE.

  Attributes:
    factor: long wavelengths are this many times longer.
    low_frequency_factor: wavelengths above `original_positions` / this are
      stretched in full.
    high_frequency_factor: those below `original_positions` / this, not at all.
    original_positions: tokens of a sequence before the stretching.
  """

  factor: float
  low_frequency_factor: float
  high_frequency_factor: float
  original_positions: int


@dataclasses.dataclass(frozen=True)
class LoraConfig:
  """Low-rank adapters: x W becomes x W + (alpha / rank) x A B.

  References: arXiv 2106.09685, section 4.1.

  Attributes:
    rank: columns of A.
    alpha: scale; alpha / rank multiplies what the adapter says.
    targets: projections that have one, of `PROJECTIONS`.
  """

  rank: int
  alpha: float
  targets: tuple[str, ...] = PROJECTIONS

  def __post_init__(self):
    checks.whole('rank', self.rank)
    checks.positive('alpha', self.alpha)
    if not self.targets:
      raise ValueError(
          f'targets: expected some of {", ".join(PROJECTIONS)}, got none')
    for target in self.targets:
      checks.one_of('targets', target, PROJECTIONS)


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
  """The shape of the network.

  Attributes:
    vocab_size: tokens V; a multiple of 32 where actions are constrained
      (allowed sets are bit masks).
    width: model width D.
    num_layers: blocks.
    num_heads: query heads H.
    num_kv_heads: key and value heads G; H must be a multiple of it.
    head_dim: width of one head, even (RoPE turns pairs).
    mlp_width: inner width of the SwiGLU.
    rope_theta: base of the rotary wavelengths.
    rope_scaling: how they are stretched; None leaves them.
    norm_epsilon: added to the mean square in RMSNorm.
    scale_embeddings: whether embeddings are multiplied by sqrt(width).
    tied: whether the logits use the embedding's own matrix.
    attention_bias: whether queries, keys and values have a bias (Qwen2).
    qk_norm: whether each head's queries and keys pass an RMSNorm (Qwen3).
    value_head: whether a critic reads the hidden states, see `values`.
    lora: adapters beside the projections; None for none.
    dtype: what blocks compute in, 'float32' or 'bfloat16'; norms, softmax,
      logits and parameters are float32.
    remat: what the backward pass computes again: nothing, all of a block but
      its matrix products, or the whole block.
    scan: whether layers are stacked and scanned, or each has arrays of its own,
      see `unstack`.
  """

  vocab_size: int
  width: int = 96
  num_layers: int = 2
  num_heads: int = 4
  num_kv_heads: int = 2
  head_dim: int = 24
  mlp_width: int = 256
  rope_theta: float = 10_000.0
  rope_scaling: RopeScaling | None = None
  norm_epsilon: float = 1e-6
  scale_embeddings: bool = True
  tied: bool = True
  attention_bias: bool = False
  qk_norm: bool = False
  value_head: bool = False
  lora: LoraConfig | None = None
  dtype: str = 'float32'
  remat: Remat = 'block'
  scan: bool = True

  def __post_init__(self):
    checks.one_of('dtype', self.dtype, ('float32', 'bfloat16'))
    checks.one_of('remat', self.remat, Remat)
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
          'num_heads must be a multiple of num_kv_heads, got'
          f' {self.num_heads} and {self.num_kv_heads}'
      )
    if self.head_dim % 2:
      raise ValueError(f'head_dim must be even, got {self.head_dim}')


class KeyValues(NamedTuple):
  """Keys and values of some tokens in every layer.

  Where layers are not scanned, tuples of as many [R, G, S, head_dim].
  """

  keys: jax.Array  # [layers, R, G, S, head_dim] of the config's dtype
  values: jax.Array  # [layers, R, G, S, head_dim] of the config's dtype


def rope_frequencies(config: TransformerConfig) -> np.ndarray:
  """Returns [head_dim / 2] float32, radians that a position turns each pair.

    f_i = theta^(-2 i / head_dim)

  Llama 3 divides f by `factor` where the wavelength 2 pi / f is long, leaves it
  where it is short, and blends the two in between. Positions multiply what is
  rounded off, so the powers are taken in float64.

  References: arXiv 2104.09864, eq. 15; the scaling as Llama 3.1 was published.
  """
  half = config.head_dim // 2
  frequencies = config.rope_theta ** (-np.arange(half) / half)
  scaling = config.rope_scaling
  if scaling is not None:
    turns = scaling.original_positions * frequencies / (2 * np.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    frequencies *= kept + (1 - kept) / scaling.factor
  return frequencies.astype(np.float32)


def rotations(
    config: TransformerConfig, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns cosine and sine of what each position turns each pair by.

  Args:
    config: of the network.
    positions: place on the path from 0, [R, C] int32.

  Returns:
    [R, 1, C, head_dim / 2] float32 each, the same for all heads and layers.
  """
  frequencies = rope_frequencies(config)
  angles = positions[:, None, :, None].astype(jnp.float32) * frequencies
  return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: jax.Array, rotation: tuple[jax.Array, jax.Array]
) -> jax.Array:
  """Turns pairs of features by position (RoPE, arXiv 2104.09864, eq. 34).

  Args:
    x: features, [R, heads, C, head_dim].
    rotation: see `rotations`.

  Returns:
    [R, heads, C, head_dim] of x's dtype, pairing feature i with
    i + head_dim / 2.
  """
  cos, sin = rotation
  x_1, x_2 = jnp.split(x, 2, axis=-1)
  return jnp.concatenate(
      [x_1 * cos - x_2 * sin, x_2 * cos + x_1 * sin], axis=-1
  ).astype(x.dtype)


def _rounded(x: jax.Array) -> jax.Array:
  """Returns `x` in the digits of its dtype, which XLA may not.

  Where one program both makes a bfloat16 array and reads it as float32, XLA
  leaves out the rounding in between. A cache is rounded: so must be the keys
  that a learner attends to.
  """
  if x.dtype == jnp.float32:
    return x
  digits = jnp.finfo(x.dtype)
  wide = x.astype(jnp.float32)
  return jax.lax.reduce_precision(
      wide, digits.nexp, digits.nmant).astype(x.dtype)


def attend(
    queries: jax.Array,
    sources: list[tuple[jax.Array, jax.Array, jax.Array]],
) -> jax.Array:
  """Grouped-head attention over several sources of keys as if concatenated.

  Only the scores are concatenated: a long cache is read where it lies. Scores,
  softmax and weights are float32 whatever the dtype, as in `attention.attend`:
  what is sampled and what is trained then differ by float32 rounding alone.

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
  scores = []
  for keys, _, mask in sources:
    # Scaled once they are float32, since queries of bfloat16 would be rounded.
    score = dim**-0.5 * jnp.einsum(
        'rgqd,rgsd->rgqs', grouped, keys, preferred_element_type=jnp.float32)
    score = score.reshape(rows, groups, heads // groups, chunk, -1)
    scores.append(jnp.where(mask[:, None, None], score, attention.MASKED_SCORE))
  weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
  weights = weights.reshape(rows, groups, heads // groups * chunk, -1)
  out, start = 0.0, 0
  for _, values, mask in sources:
    part = jax.lax.slice_in_dim(weights, start, start + mask.shape[-1], axis=-1)
    out += jnp.einsum('rgqs,rgsd->rgqd', part, values)
    start += mask.shape[-1]
  return out.reshape(rows, heads, chunk, dim)


class Linear(nn.Module):
  """x W, with a bias and a low-rank adapter where the config has them."""

  config: TransformerConfig
  features: int
  use_bias: bool = False

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    initializers = nn.initializers
    dtype, width = jnp.dtype(self.config.dtype), x.shape[-1]
    kernel = self.param(
        'kernel', initializers.lecun_normal(), (width, self.features))
    y = x @ kernel.astype(dtype)
    if self.use_bias:
      bias = self.param('bias', initializers.zeros, (self.features,))
      y = y + bias.astype(dtype)
    lora = self.config.lora
    if lora is not None and self.name in lora.targets:
      # B is zero at first: an adapter that has learnt nothing says nothing.
      a = self.param(
          'lora_a', initializers.he_uniform(), (width, lora.rank))
      b = self.param('lora_b', initializers.zeros, (lora.rank, self.features))
      scale = lora.alpha / lora.rank
      y = y + (x @ a.astype(dtype)) @ b.astype(dtype) * scale
    return y


def _norm(config: TransformerConfig, name: str | None = None) -> nn.RMSNorm:
  return nn.RMSNorm(
      epsilon=config.norm_epsilon, dtype=jnp.dtype(config.dtype), name=name)


class Attention(nn.Module):
  """Grouped-head self-attention over earlier key-values and this chunk's."""

  config: TransformerConfig
  mesh: jax.sharding.Mesh | None = None

  @nn.compact
  def __call__(self, x, past, rotation, past_masks, mask):
    c = self.config
    rows, _, chunk, _ = rotation[0].shape

    def heads(name, count):
      y = Linear(c, count * c.head_dim, c.attention_bias, name=name)(x)
      y = y.reshape(rows, chunk, count, c.head_dim)
      return y.swapaxes(1, 2)  # [R, count, C, head_dim]

    def turned(name, count):
      y = heads(name, count)
      y = _norm(c, f'{name}_norm')(y) if c.qk_norm else y
      return rotate(y, rotation)

    queries, keys = turned('query', c.num_heads), turned('key', c.num_kv_heads)
    values = heads('value', c.num_kv_heads)
    queries, keys, values = map(_rounded, (queries, keys, values))
    if isinstance(mask, attention.Ancestors):
      out = attention.attend(
          queries, keys, values, mask, mesh=self.mesh)
    else:
      sources = [(*kv, m) for kv, m in zip(past, past_masks)]
      out = attend(queries, [*sources, (keys, values, mask)])
    out = out.swapaxes(1, 2).reshape(-1, c.num_heads * c.head_dim)
    out = Linear(c, c.width, name='out')(out.astype(x.dtype))
    return out, (keys, values)


class Block(nn.Module):
  """x + attention(norm(x)), then x + swiglu(norm(x)).

  The tokens of all rows lie along one axis, x is [R * C, width]: over two axes
  XLA's products for CPU take half as long again in the backward pass.
  """

  config: TransformerConfig
  mesh: jax.sharding.Mesh | None = None

  @nn.compact
  def __call__(self, x, past, rotation, past_masks, mask):
    c = self.config
    attended, new = Attention(c, self.mesh, name='attention')(
        _norm(c, 'attention_norm')(x), past, rotation, past_masks, mask
    )
    x = x + attended
    y = _norm(c, 'mlp_norm')(x)
    gate = nn.silu(Linear(c, c.mlp_width, name='gate')(y))
    up = Linear(c, c.mlp_width, name='up')(y)
    return x + Linear(c, c.width, name='down')(gate * up), new


def _rematerialised(remat: Remat) -> type[Block]:
  """Returns the block, as much of it to be computed again as is asked for."""
  if remat == 'none':
    return Block
  policies = jax.checkpoint_policies
  # Attention is dear to compute again, and no larger than the stream.
  policy = policies.save_only_these_names(attention.CHECKPOINT_NAME)
  if remat == 'matmuls':
    policy = policies.save_from_both_policies(
        policy, policies.dots_with_no_batch_dims_saveable)
  return nn.remat(Block, prevent_cse=False, policy=policy)


class Transformer(nn.Module):
  """Tokens to hidden states, and hidden states to logits.

  Attributes:
    config: of the network.
    mesh: where parameters and rows lie, see `sharding`; None for one device.
  """

  config: TransformerConfig
  mesh: jax.sharding.Mesh | None = None

  def setup(self):
    c = self.config
    self.embedding = nn.Embed(
        c.vocab_size,
        c.width,
        embedding_init=nn.initializers.normal(c.width**-0.5),
    )
    block = _rematerialised(c.remat)
    if c.scan:
      self.blocks = nn.scan(
          block,
          variable_axes={'params': 0},
          split_rngs={'params': True},
          in_axes=(0, nn.broadcast, nn.broadcast, nn.broadcast),
          length=c.num_layers,
      )(c, self.mesh)
    else:
      self.blocks = [block(c, self.mesh) for _ in range(c.num_layers)]
    self.final_norm = nn.RMSNorm(epsilon=c.norm_epsilon)
    if not c.tied:
      self.output = self.param(
          'output', nn.initializers.normal(c.width**-0.5),
          (c.vocab_size, c.width))
    if c.value_head:
      # Zero at first: a critic that knows nothing must not make up advantages.
      self.value_head = nn.Dense(1, kernel_init=nn.initializers.zeros)

  def __call__(
      self,
      tokens: jax.Array,
      positions: jax.Array,
      mask: jax.Array | attention.Ancestors,
      past: tuple[KeyValues, ...] = (),
      past_masks: tuple[jax.Array, ...] = (),
  ) -> tuple[jax.Array, KeyValues]:
    """Runs a chunk of tokens after the tokens in `past`.

    Args:
      tokens: [R, C] int32.
      positions: place of each token on its path, [R, C] int32.
      mask: [R, C, C] bool, True where token i may attend to token j; or the
        ancestors of packed trees, which have no past.
      past: key-values of earlier tokens, as many groups as are kept apart.
      past_masks: [R, C, S] bool for each group, True where token i may attend
        to past token j.

    Returns:
      hidden: [R, C, width] float32, after the last norm; feed it to `logits`.
      new: the chunk's own key-values, S = C.
    """
    if past and isinstance(mask, attention.Ancestors):
      raise ValueError(
          'expected a [R, C, C] mask with past key-values, got ancestors of'
          ' packed trees, which are whole'
      )
    c = self.config
    x = self.embedding(tokens)
    if c.scale_embeddings:
      # Embeddings tied to the logits are small, the stream is not.
      x = x * c.width**0.5
    x = x.astype(jnp.dtype(c.dtype)).reshape(-1, c.width)
    shared = rotations(c, positions), past_masks, mask
    if c.scan:
      x, (keys, values) = self.blocks(x, past, *shared)
    else:
      new = []
      for layer, block in enumerate(self.blocks):
        own = tuple(KeyValues(*(a[layer] for a in group)) for group in past)
        x, of_layer = block(x, own, *shared)
        new.append(of_layer)
      keys, values = zip(*new)
    x = x.astype(jnp.float32).reshape(*tokens.shape, c.width)
    return self.final_norm(x), KeyValues(keys, values)

  def unembedding(self) -> jax.Array:
    """Returns [V, width] float32, whose rows the hidden states are held to."""
    return self.embedding.embedding if self.config.tied else self.output

  def logits(self, hidden: jax.Array) -> jax.Array:
    """Returns [..., V] float32 scores of the next token."""
    return hidden.astype(jnp.float32) @ self.unembedding().T

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
      self,
      tokens: jax.Array,
      positions: jax.Array,
      mask: jax.Array | attention.Ancestors,
  ) -> tuple[jax.Array, jax.Array | None]:
    """Returns the logits, and the values where there is a value head.

    Args:
      tokens: [R, C] int32.
      positions: [R, C] int32, as in `__call__`.
      mask: as in `__call__`.
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


def with_value_head(config: TransformerConfig, params: dict) -> dict:
  """Returns the parameters with a fresh value head, unless they have one."""
  shapes = jax.eval_shape(
      lambda: init_params(config, jax.random.key(0)))['value_head']
  fresh = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
  return {'value_head': fresh, **params}


def unstack(
    config: TransformerConfig, params: dict
) -> tuple[TransformerConfig, dict]:
  """Gives each layer arrays of its own: slower to compile, faster to decode.

  Args:
    config: of a network whose layers are scanned.
    params: its parameters.

  Returns:
    The config and the parameters of the same network, its layers not scanned.
  """
  rest = {name: leaf for name, leaf in params.items() if name != 'blocks'}
  layers = {
      f'blocks_{i}': jax.tree.map(lambda leaf, i=i: leaf[i], params['blocks'])
      for i in range(config.num_layers)
  }
  return dataclasses.replace(config, scan=False), {**rest, **layers}


def num_parameters(params: dict) -> int:
  """Returns how many numbers the parameters hold."""
  return sum(leaf.size for leaf in jax.tree.leaves(params))

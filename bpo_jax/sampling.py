"""What one turn of many episodes is made of: rows, caches, draws.

`decoding` reads the observation and draws an action with these; `make_advance`
then steps the sandboxes through the one host callback. Rows are ragged: each
has its own write index, so padding never reaches a cache, and a fork is a copy
of its parent's row.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bpo_jax import attention
from bpo_jax import checks
from bpo_jax import sharding
from bpo_jax import types
from bpo_jax.models import transformer

_BLOCK = 1024  # Tokens of a vocabulary that are summed up flat.


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
  """How actions are drawn.

  Attributes:
    action_length: tokens of the longest action, U.
    constrained: draw only tokens that continue an admissible command, with the
      distribution renormalised over them; the learner renormalises alike.
    temperature: divides the logits, here and in the learner.
    stop: sequences of tokens that end a free action, their own tokens being
      drawn like all others; where there are none, token 0 ends it. An action
      that is constrained ends with its command.
  """

  action_length: int = 3
  constrained: bool = True
  temperature: float = 1.0
  stop: tuple[tuple[int, ...], ...] = ()

  def __post_init__(self):
    checks.at_least('action_length', self.action_length, 1)
    if not 0 < self.temperature < math.inf:
      raise ValueError(
          'temperature: expected a finite number above 0, got'
          f' {self.temperature}; for the likeliest tokens grow with greedy=True'
      )
    if self.stop and self.constrained:
      raise ValueError(
          'stop: expected none where actions are constrained, which end with'
          f' their commands, got {self.stop}; set constrained=False or leave'
          ' them out'
      )
    for sequence in self.stop:
      if not 0 < len(sequence) <= self.action_length or min(sequence) < 0:
        raise ValueError(
            'stop: expected sequences of 1 to'
            f' action_length={self.action_length} token ids, got {sequence};'
            ' an action could never end with it'
        )


class Cache(NamedTuple):
  """Keys and values of R paths; row r holds its first `lengths[r]` tokens.

  Every layer has arrays of its own: an array of all layers would be copied
  layer by layer with every token that reads it.
  """

  key_values: transformer.KeyValues  # [R, G, S, head_dim] a layer
  lengths: jax.Array  # [R] int32


class Rows(NamedTuple):
  """All that R episodes need to go on."""

  cache: Cache
  pending: jax.Array  # [R, C] int32    tokens not yet in the cache
  pending_length: jax.Array  # [R] int32      at least 1 in an active row
  commands: jax.Array  # [R, A, U] int32 admissible actions, 0-padded
  handles: jax.Array  # [R] int32      sandbox states
  active: jax.Array  # [R] bool       the episode goes on
  keys: jax.Array  # [R] key        one per leaf, never used itself
  turns: jax.Array  # [R] int32      actions taken on this path so far
  greedy: jax.Array  # [R] bool       take the likeliest token, do not draw
  forced: jax.Array  # [R, U] int32   how the next action begins, 0-padded
  num_forced: jax.Array  # [R] int32      tokens of it that are not drawn


class Actions(NamedTuple):
  """The actions of one turn, forced tokens included; zeros off `mask`."""

  tokens: jax.Array  # [R, U] int32
  mask: jax.Array  # [R, U] bool
  log_probs: jax.Array  # [R, U] float32
  entropies: jax.Array  # [R, U] float32, nats
  allowed: jax.Array | None  # [R, U, V / 32] uint32; None if unconstrained


def pack_bits(allowed: jax.Array) -> jax.Array:
  """Packs [..., V] bool into [..., V / 32] uint32; token v is bit v % 32.

  Raises:
    ValueError: if V is not a multiple of 32.
  """
  if allowed.shape[-1] % types.WORD:
    raise ValueError(
        f'expected a vocabulary of a multiple of {types.WORD} tokens where'
        f' actions are constrained, got {allowed.shape[-1]}; pad it with tokens'
        ' that are never used, or draw unconstrained'
    )
  words = allowed.reshape(*allowed.shape[:-1], -1, types.WORD)
  bits = words.astype(jnp.uint32) << jnp.arange(types.WORD, dtype=jnp.uint32)
  return jnp.sum(bits, axis=-1).astype(jnp.uint32)


def unpack_bits(words: jax.Array) -> jax.Array:
  """The inverse of `pack_bits`: [..., W] uint32 to [..., 32 W] bool."""
  bits = (words[..., None] >> jnp.arange(types.WORD, dtype=jnp.uint32)) & 1
  return bits.reshape(*words.shape[:-1], -1).astype(bool)


def token_distribution(
    logits: jax.Array, allowed: jax.Array | None, temperature: float
) -> tuple[jax.Array, jax.Array]:
  """Returns the log-probs and entropy that both sampler and learner use.

  log p = logits / temperature - logsumexp over the allowed tokens; H = -sum p
  log p. One function for both sides, so they cannot drift apart.

  Args:
    logits: [..., V] float32.
    allowed: [..., V] bool, or None where every token may be drawn. A row that
      allows nothing (padding) gives finite numbers of no meaning.
    temperature: positive scalar.

  Returns:
    log_probs: [..., V] float32, very negative (finite) off `allowed`.
    entropy: [...] float32, nats.
  """
  logits = logits / temperature
  if allowed is not None:
    logits = jnp.where(allowed, logits, attention.MASKED_SCORE)
  log_probs = jax.nn.log_softmax(logits, axis=-1)
  weighted = jnp.exp(log_probs) * log_probs
  if allowed is not None:
    weighted = jnp.where(allowed, weighted, 0.0)
  return log_probs, -jnp.sum(weighted, axis=-1)


def turn_uniforms(keys: jax.Array, turns: jax.Array, length: int) -> jax.Array:
  """Returns the uniform draws that decide the tokens of a turn.

  Draw u of turn t uses fold_in(fold_in(key, t), u): no two leaves, turns or
  tokens share a key, and the make-up of the batch changes nothing.

  Args:
    keys: [R] keys, one per leaf.
    turns: [R] int32.
    length: U.

  Returns:
    [R, U] float32 in [0, 1).
  """

  def of_row(key, turn):
    turn_key = jax.random.fold_in(key, turn)
    token_keys = jax.vmap(jax.random.fold_in, (None, 0))(
        turn_key, jnp.arange(length)
    )
    return jax.vmap(jax.random.uniform)(token_keys)

  return jax.vmap(of_row)(keys, turns)


def _pick(
    weights: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns where the running sum of weights first exceeds a share of itself.

  Args:
    weights: [R, n] float32, at least 0, one above 0 in each row.
    targets: [R] float32, a target below the sum; one that is not, by a rounding
      error, picks the last weight above 0.

  Returns:
    index: [R] int32 of a weight above 0.
    rest: [R] float32, by how much the target exceeds the sum before it.
  """
  # A sum over blocks is not quite flat where nothing is added.
  sums = jnp.where(weights > 0, jnp.cumsum(weights, axis=-1), 0.0)
  # Of the sum as it came out, which may be a rounding short of the target.
  most = jnp.max(sums, axis=-1) * (1 - 2.0**-23)
  targets = jnp.clip(targets, 0.0, most)[:, None]
  index = jnp.argmax(sums > targets, axis=-1)[:, None]
  before = jnp.take_along_axis(sums - weights, index, axis=-1)
  return index[:, 0].astype(jnp.int32), (targets - before)[:, 0]


def inverse_cdf(log_probs: jax.Array, uniforms: jax.Array) -> jax.Array:
  """Returns the tokens that uniform draws pick from their distributions.

  One draw a token instead of one a vocabulary entry, as Gumbel noise needs. Of
  a large vocabulary a block is picked first and then a token in it, since a
  running sum of all tokens costs more than all else that a draw does. A token
  of probability zero is never picked.

  Args:
    log_probs: [R, V] float32; very negative where a token cannot be drawn.
    uniforms: [R] float32 in [0, 1).

  Returns:
    [R] int32, the first token whose cumulative probability exceeds the draw.
  """
  probs = jnp.exp(log_probs)
  num_rows, vocab_size = probs.shape
  if vocab_size <= _BLOCK:
    return _pick(probs, uniforms * _total(probs))[0]
  padded = jnp.pad(probs, ((0, 0), (0, -vocab_size % _BLOCK)))
  blocks = padded.reshape(num_rows, -1, _BLOCK)
  sums = jnp.sum(blocks, axis=-1)
  block, rest = _pick(sums, uniforms * _total(sums))
  inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
  return block * _BLOCK + _pick(inside, rest)[0]


def _total(weights: jax.Array) -> jax.Array:
  """Returns [R], the running sum at its end, as `_pick` comes to it."""
  sums = jnp.cumsum(weights, axis=-1)
  return jnp.max(jnp.where(weights > 0, sums, 0.0), axis=-1)


def continuations(
    commands: jax.Array, drawn: jax.Array, step: jax.Array, vocab_size: int
) -> jax.Array:
  """Tokens that continue the drawn prefix towards an admissible command.

  Args:
    commands: [R, A, U] int32, 0 past a command's end and in unused rows.
    drawn: [R, U] int32, the first `step` columns drawn so far, 0 after.
    step: [] int32, how many tokens have been drawn.
    vocab_size: V.

  Returns:
    [R, V] bool; all False where the action is complete.
  """
  following = _following(commands, drawn, step)
  # By vmap, so that XLA knows rows apart and sends none to another device.
  nothing = jnp.zeros(vocab_size, bool)
  return jax.vmap(lambda row: nothing.at[row].max(row != 0))(following)


def _following(
    commands: jax.Array, drawn: jax.Array, step: jax.Array
) -> jax.Array:
  """Returns [R, A] int32, each command's next token; 0 where it has none."""
  size = commands.shape[-1]
  is_drawn = jnp.arange(size) < step
  matches = jnp.all((commands == drawn[:, None]) | ~is_drawn, axis=-1)
  matches &= step < size  # An index beyond would be that of the last token.
  following = jax.lax.dynamic_index_in_dim(commands, step, 2, keepdims=False)
  return jnp.where(matches, following, 0)


def is_unfinished(
    config: SamplerConfig,
    commands: jax.Array,
    drawn: jax.Array,
    step: jax.Array,
) -> jax.Array:
  """Whether the actions begun go on after `step` tokens.

  Args:
    config: says what ends an action.
    commands: [R, A, U] int32, read where actions are constrained.
    drawn: [R, U] int32, of which the first `step` columns count.
    step: [] int32, at least 0.

  Returns:
    [R] bool. An action that ended before is for the caller to remember.
  """
  if config.constrained:
    return jnp.any(_following(commands, drawn, step) != 0, axis=-1)
  stopped = jnp.zeros(drawn.shape[0], bool)
  for sequence in config.stop or ((0,),):
    place = step - len(sequence) + jnp.arange(len(sequence))
    tail = jnp.take(drawn, place, axis=1, mode='clip')
    matches = jnp.all(tail == jnp.asarray(sequence, jnp.int32), axis=1)
    stopped |= matches & (step >= len(sequence))
  return ~stopped


def allowed_sets(
    commands: jax.Array, tokens: jax.Array, vocab_size: int
) -> jax.Array:
  """The sets from which the tokens of given actions could have been drawn.

  Args:
    commands: [R, A, U] int32, admissible actions.
    tokens: [R, U] int32, the action taken in each row, 0 past its end.
    vocab_size: V.

  Returns:
    [R, U, V / 32] uint32, as in `Actions.allowed`.
  """
  of_step = lambda step: continuations(commands, tokens, step, vocab_size)
  steps = jnp.arange(tokens.shape[1])
  return pack_bits(jax.vmap(of_step, out_axes=1)(steps))


def empty_cache(
    config: transformer.TransformerConfig,
    num_rows: int,
    length: int,
    mesh: jax.sharding.Mesh | None = None,
) -> Cache:
  """Returns a cache for `num_rows` paths of up to `length` tokens.

  On a mesh it lies as `sharding.of_rows` says.
  """
  layer = jax.ShapeDtypeStruct(
      (num_rows, config.num_kv_heads, length, config.head_dim),
      jnp.dtype(config.dtype))
  layers = (layer,) * config.num_layers
  lengths = jax.ShapeDtypeStruct((num_rows,), jnp.int32)
  return sharding.zero_rows(
      mesh, Cache(transformer.KeyValues(layers, layers), lengths))


def cache_length(cache: Cache) -> int:
  """Returns S, the tokens that a row has room for."""
  return cache.key_values.keys[0].shape[2]


def grow_cache(cache: Cache, length: int) -> Cache:
  """Returns the same cache with room for `length` tokens."""
  extra = length - cache_length(cache)
  widen = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, extra), (0, 0)))
  return cache._replace(key_values=jax.tree.map(widen, cache.key_values))


def copy_rows(
    cache: Cache,
    source: Cache,
    to: jax.Array,
    origin: jax.Array,
    count: jax.Array,
    mesh: jax.sharding.Mesh | None = None,
) -> Cache:
  """Copies rows of one cache into another, of which a fork is made.

  Args:
    cache: where rows go; its others stay.
    source: where they come from. Of rows of another size, as much is copied as
      both have; the caller sees to the room.
    to: [K] int32, rows of `cache`.
    origin: [K] int32, rows of `source`.
    count: [] int32, how many of the K are copied; the others are padding.
    mesh: where both lie, which then exchanges these rows and no more; None for
      one device.
  """
  args = cache, source, *map(jnp.asarray, (to, origin, count))
  if mesh is None:
    return _copy_rows(None, *args)
  of_cache, of_source = sharding.row_specs(cache), sharding.row_specs(source)
  return jax.shard_map(
      functools.partial(_copy_rows, 'data'),
      mesh=mesh,
      in_specs=(of_cache, of_source, jax.P(), jax.P(), jax.P()),
      out_specs=of_cache,
  )(*args)


def _copy_rows(axis, cache, source, to, origin, count):
  """Copies rows that lie here, or that an axis of a mesh parts."""

  def local(x, i):
    """Returns row i as it is numbered here, if it is here."""
    if axis is None:
      return i, True
    i = i - len(x) * jax.lax.axis_index(axis)
    return jnp.clip(i, 0, len(x) - 1), (0 <= i) & (i < len(x))

  def row_of(x, i, sizes):
    return jax.lax.dynamic_slice(x, (i, *[0] * len(sizes)), (1, *sizes))

  def fetch(x, y, i):
    i, is_here = local(y, i)
    row = row_of(y, i, tuple(map(min, x.shape[1:], y.shape[1:])))
    return jnp.where(is_here, row, jnp.zeros_like(row))

  def put(x, row, i):
    i, is_here = local(x, i)
    row = jnp.where(is_here, row, row_of(x, i, row.shape[1:]))
    return jax.lax.dynamic_update_slice_in_dim(x, row, i, 0)

  def copy(k, cache):
    rows = jax.tree.map(lambda x, y: fetch(x, y, origin[k]), cache, source)
    rows = rows if axis is None else jax.lax.psum(rows, axis)
    return jax.tree.map(lambda x, row: put(x, row, to[k]), cache, rows)

  return jax.lax.fori_loop(0, count, copy, cache)


def take_rows(
    cache: Cache,
    rows: jax.Array,
    count: jax.Array,
    mesh: jax.sharding.Mesh | None = None,
) -> Cache:
  """Returns a cache of the first `count` of the rows [K] int32 of a cache.

  It has K rows; those beyond hold nothing of use.
  """
  if mesh is None:
    return jax.tree.map(lambda x: x[rows], cache)
  empty = jax.tree.map(
      lambda x: jnp.zeros((len(rows), *x.shape[1:]), x.dtype), cache)
  return copy_rows(empty, cache, jnp.arange(len(rows)), rows, count, mesh)


def write_cache(
    cache: Cache,
    new: transformer.KeyValues,
    keep: jax.Array,
) -> Cache:
  """Appends the kept tokens of each row at the row's own write index.

  Args:
    cache: S slots per row.
    new: key-values of C tokens, [R, G, C, head_dim] in each layer.
    keep: [R, C] bool; a token that is not kept leaves no trace.

  Returns:
    The cache with `lengths` moved on. Kept tokens beyond the last slot are
    dropped; the caller sees to the room.
  """
  rank = jnp.cumsum(keep, axis=1) - 1
  slots = jnp.where(
      keep, cache.lengths[:, None] + rank, cache_length(cache)
  )
  write = jax.vmap(lambda old, x, slot: old.at[:, slot].set(x, mode='drop'))
  return Cache(
      jax.tree.map(lambda old, x: write(old, x, slots), cache.key_values, new),
      cache.lengths + jnp.sum(keep, axis=1, dtype=jnp.int32),
  )


def next_pending(actions: Actions, observation: jax.Array) -> jax.Array:
  """Returns [R, 1 + O] int32: the action's last token, then what it showed."""
  last = jnp.maximum(jnp.sum(actions.mask, axis=1) - 1, 0)
  token = jnp.take_along_axis(actions.tokens, last[:, None], axis=1)
  return jnp.concatenate([token, observation], axis=1)


def make_advance(
    step_environment: Callable[..., Any], max_turns: int
) -> Callable[[Rows, Actions], tuple[Rows, Any]]:
  """Returns `advance(rows, actions)`: steps every active sandbox once.

  Apart from `act`, since XLA keeps no compiled program that calls back into
  Python: so the network, which takes seconds to compile, is compiled once for
  all runs, and this, which takes none, in each.

  Args:
    step_environment: `(handles [R], actions [R, U], active [R], lengths [R])`,
      the last of them the tokens of each action, to a step result
      (environments.callbacks.StepResult has its fields); traceable, and called
      exactly once.
    max_turns: actions after which an episode is truncated.
  """

  def advance(rows, actions):
    lengths = jnp.sum(actions.mask, axis=1, dtype=jnp.int32)
    result = step_environment(
        rows.handles, actions.tokens, rows.active, lengths)
    turns = rows.turns + rows.active
    at_limit = rows.active & ~result.terminal & (turns >= max_turns)
    result = result._replace(truncated=result.truncated | at_limit)
    active = rows.active & ~result.terminal & ~result.truncated
    rows = rows._replace(
        pending=next_pending(actions, result.observation),
        pending_length=jnp.where(active, 1 + result.observation_length, 0),
        commands=result.commands,
        handles=jnp.where(active, result.handles, 0),
        active=active,
        turns=turns,
        num_forced=jnp.zeros_like(rows.num_forced),
    )
    return rows, result

  return advance

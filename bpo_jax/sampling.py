"""One turn of many episodes at once: read the observation, draw an action.

`act` is one jitted call a turn with a donated state. It feeds the tokens that
the environment added since the last turn, draws an action token by token, and
writes all their keys and values to the cache in one scatter; `advance` then
steps the sandboxes through the one host callback. Rows are ragged: each has its
own write index, so padding never reaches a cache, and a fork is a copy of its
parent's row.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bpo_jax.models import transformer


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
  """How actions are drawn.

  Attributes:
    action_length: tokens of the longest action, U.
    constrained: draw only tokens that continue an admissible command, with the
      distribution renormalised over them; the learner renormalises alike.
    temperature: divides the logits, here and in the learner.
  """

  action_length: int = 3
  constrained: bool = True
  temperature: float = 1.0


class Cache(NamedTuple):
  """Keys and values of R paths; row r holds its first `lengths[r]` tokens."""

  key_values: transformer.KeyValues  # [layers, R, G, S, head_dim]
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
  """Packs [..., V] bool into [..., V / 32] uint32; token v is bit v % 32."""
  words = allowed.reshape(*allowed.shape[:-1], -1, 32).astype(jnp.uint32)
  return jnp.sum(words << jnp.arange(32, dtype=jnp.uint32), axis=-1).astype(
      jnp.uint32
  )


def unpack_bits(words: jax.Array) -> jax.Array:
  """The inverse of `pack_bits`: [..., W] uint32 to [..., 32 W] bool."""
  bits = (words[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
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
    logits = jnp.where(allowed, logits, transformer.MASKED_SCORE)
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


def inverse_cdf(log_probs: jax.Array, uniforms: jax.Array) -> jax.Array:
  """Returns the tokens that uniform draws pick from their distributions.

  One draw a token instead of one a vocabulary entry, as Gumbel noise needs.
  A token of probability zero is never picked.

  Args:
    log_probs: [R, V] float32; very negative where a token cannot be drawn.
    uniforms: [R] float32 in [0, 1).

  Returns:
    [R] int32, the first token whose cumulative probability exceeds the draw.
  """
  probs = jnp.exp(log_probs)
  # A sum over blocks is not quite flat where nothing is added.
  cumulative = jnp.where(probs > 0, jnp.cumsum(probs, axis=-1), 0.0)
  # Of the sum as it came out, which may be a rounding short of 1.
  total = jnp.max(cumulative, axis=-1, keepdims=True)
  return jnp.argmax(
      cumulative > uniforms[:, None] * total, axis=-1
  ).astype(jnp.int32)


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
  is_drawn = jnp.arange(commands.shape[-1]) < step
  matches = jnp.all(
      (commands == drawn[:, None]) | ~is_drawn, axis=-1
  )  # [R, A]
  following = jax.lax.dynamic_index_in_dim(commands, step, 2, keepdims=False)
  matches &= following != 0
  rows = jnp.arange(commands.shape[0])[:, None]
  allowed = jnp.zeros((commands.shape[0], vocab_size), bool)
  return allowed.at[rows, following].max(matches)


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
    config: transformer.TransformerConfig, num_rows: int, length: int
) -> Cache:
  """Returns a cache for `num_rows` paths of up to `length` tokens."""
  shape = (
      config.num_layers,
      num_rows,
      config.num_kv_heads,
      length,
      config.head_dim,
  )
  return Cache(
      transformer.KeyValues(jnp.zeros(shape), jnp.zeros(shape)),
      jnp.zeros(num_rows, jnp.int32),
  )


def grow_cache(cache: Cache, length: int) -> Cache:
  """Returns the same cache with room for `length` tokens."""
  extra = length - cache.key_values.keys.shape[3]
  widen = lambda x: jnp.pad(x, ((0, 0),) * 3 + ((0, extra), (0, 0)))
  return cache._replace(key_values=jax.tree.map(widen, cache.key_values))


def write_cache(
    cache: Cache, new: transformer.KeyValues, keep: jax.Array
) -> Cache:
  """Appends the kept tokens of each row at the row's own write index.

  Args:
    cache: S slots per row.
    new: key-values of C tokens.
    keep: [R, C] bool; a token that is not kept leaves no trace.

  Returns:
    The cache with `lengths` moved on. Kept tokens beyond the last slot are
    dropped; the caller sees to the room.
  """
  size = cache.key_values.keys.shape[3]
  rank = jnp.cumsum(keep, axis=1) - 1
  slots = jnp.where(keep, cache.lengths[:, None] + rank, size)
  write = jax.vmap(
      lambda old, x, slot: old.at[:, :, slot].set(x, mode='drop'),
      in_axes=(1, 1, 0),
      out_axes=1,
  )
  return Cache(
      jax.tree.map(lambda old, x: write(old, x, slots), cache.key_values, new),
      cache.lengths + jnp.sum(keep, axis=1, dtype=jnp.int32),
  )


def _causal(tokens: jax.Array) -> jax.Array:
  """Returns [R, C, C] bool: each token of a chunk sees those before it."""
  num_rows, size = tokens.shape
  mask = jnp.tril(jnp.ones((size, size), bool))
  return jnp.broadcast_to(mask, (num_rows, size, size))


def make_prefill(model: transformer.Transformer) -> Callable[..., Cache]:
  """Returns `prefill(params, cache, tokens [R, P], lengths [R]) -> Cache`."""

  def prefill(params, cache, tokens, lengths):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    _, new = model.apply({'params': params}, tokens, positions, _causal(tokens))
    return write_cache(cache, new, positions < lengths[:, None])

  return prefill


def make_draw(
    model: transformer.Transformer, config: SamplerConfig
) -> Callable[..., Actions]:
  """Returns `draw(params, rows, uniforms, hidden, drawn, step)`.

  It draws token `step` of the actions of which `drawn` [R, U] holds the tokens
  before, from the hidden states [R, width] of what precedes it and the uniforms
  [R, U] of the turn, and returns `Actions` without the axis U. A forced token
  takes the place of what was drawn, with the log-prob that it has.
  """

  def draw(params, rows, uniforms, hidden, drawn, step):
    logits = model.apply({'params': params}, hidden, method='logits')
    if config.constrained:
      allowed = continuations(rows.commands, drawn, step, logits.shape[-1])
      goes_on = rows.active & jnp.any(allowed, axis=-1)
    else:
      # Token 0 ends a free action early; nothing follows it.
      allowed = None
      previous = jnp.take(drawn, jnp.maximum(step - 1, 0), axis=1)
      goes_on = rows.active & ((step == 0) | (previous != 0))
    log_probs, entropy = token_distribution(logits, allowed, config.temperature)
    token = jnp.where(
        rows.greedy,
        jnp.argmax(log_probs, axis=-1),
        inverse_cdf(log_probs, uniforms[:, step]),
    ).astype(jnp.int32)
    forced = jnp.take(rows.forced, step, axis=1)
    token = jnp.where(step < rows.num_forced, forced, token)
    log_prob = jnp.take_along_axis(log_probs, token[:, None], axis=-1)[:, 0]
    drawn_now = Actions(
        tokens=token,
        mask=goes_on,
        log_probs=log_prob,
        entropies=entropy,
        allowed=None if allowed is None else pack_bits(allowed),
    )
    return jax.tree.map(
        lambda x: jnp.where(
            goes_on.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.zeros_like(x)
        ),
        drawn_now,
    )

  return draw


def make_act(
    model: transformer.Transformer, config: SamplerConfig
) -> Callable[[dict, Rows], tuple[Rows, Actions]]:
  """Returns `act(params, rows)`: reads what is pending and draws an action.

  The rows come back with all that was read, and all of the action but its last
  token, in the cache.

  The cache is only read here. The chunk's and the action's keys and values go
  to a small side buffer, and from there to the cache in one scatter at the end:
  a scatter per token would cost more than the network does. The last token of
  an action is not fed yet; it leads the next turn's chunk.
  """
  draw = make_draw(model, config)

  def act(params, rows):
    num_rows, chunk = rows.pending.shape
    cached = rows.cache.key_values
    lengths, pending_length = rows.cache.lengths, rows.pending_length
    in_cache = jnp.arange(cached.keys.shape[3]) < lengths[:, None]
    is_pending = jnp.arange(chunk) < pending_length[:, None]
    uniforms = turn_uniforms(rows.keys, rows.turns, config.action_length)

    hidden, read = model.apply(
        {'params': params},
        rows.pending,
        lengths[:, None] + jnp.arange(chunk),
        _causal(rows.pending),
        (cached,),
        (jnp.repeat(in_cache[:, None], chunk, axis=1),),
    )
    last = hidden[jnp.arange(num_rows), jnp.maximum(pending_length - 1, 0)]
    drawn = jnp.zeros((num_rows, config.action_length), jnp.int32)
    first = draw(params, rows, uniforms, last, drawn, 0)
    extra = config.action_length - 1
    side = jax.tree.map(
        lambda x: jnp.pad(x, ((0, 0),) * 3 + ((0, extra), (0, 0))), read
    )
    is_side = jnp.pad(is_pending, ((0, 0), (0, extra)))

    def next_token(carry, step):
      """Feeds token step - 1 and draws token `step`."""
      side, is_side, drawn, token = carry
      hidden, new = model.apply(
          {'params': params},
          token[:, None],
          (lengths + pending_length + step - 1)[:, None],
          jnp.ones((num_rows, 1, 1), bool),
          (cached, side),
          (in_cache[:, None], is_side[:, None]),
      )
      actions = draw(params, rows, uniforms, hidden[:, 0], drawn, step)
      place = chunk + step - 1
      side = jax.tree.map(
          lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, place, 3),
          side,
          new,
      )
      # Token step - 1 is kept only once a token follows it.
      is_side = is_side.at[:, place].set(actions.mask)
      drawn = drawn.at[:, step].set(actions.tokens)
      return (side, is_side, drawn, actions.tokens), actions

    drawn = drawn.at[:, 0].set(first.tokens)
    carry = (side, is_side, drawn, first.tokens)
    steps = jnp.arange(1, config.action_length)
    (side, is_side, _, _), later = jax.lax.scan(next_token, carry, steps)
    actions = jax.tree.map(
        lambda x, xs: jnp.concatenate([x[None], xs]).swapaxes(0, 1),
        first,
        later,
    )
    keep = is_side & rows.active[:, None]
    return rows._replace(cache=write_cache(rows.cache, side, keep)), actions

  return act


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
    step_environment: `(handles [R], actions [R, U], active [R])` to a
      step result (environments.callbacks.StepResult has its fields);
      traceable, and called exactly once.
    max_turns: actions after which an episode is truncated.
  """

  def advance(rows, actions):
    result = step_environment(rows.handles, actions.tokens, rows.active)
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

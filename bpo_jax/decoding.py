"""Reads prompts and observations, and draws actions token by token.

`act` is one jitted call a turn with a donated state. It feeds the tokens that
the environment added since the last turn, draws an action, and writes all their
keys and values to the cache in one scatter.

A step of a few tokens costs what it takes to read the parameters once, and a
scan over stacked layers would copy every layer out of the stack first. So the
layers are taken apart, once for many turns (`prepare`), and the network that
draws is written out layer by layer. Prompts are long and come in many widths:
they are read by the scanned network, which compiles in no time.
"""

from collections.abc import Callable
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bpo_jax import sampling
from bpo_jax.models import lora
from bpo_jax.models import transformer


class _Decoding(NamedTuple):
  """What changes while an action is drawn."""

  step: jax.Array  # [] int32: tokens drawn so far
  goes_on: jax.Array  # [R] bool: another follows
  actions: sampling.Actions
  side: transformer.KeyValues  # [R, G, C + U - 1, head_dim] a layer
  is_side: jax.Array  # [R, C + U - 1] bool: a token of the row's path
  fed: transformer.KeyValues  # [R, G, 1, head_dim] a layer: not in `side` yet


def drawn_by(
    config: transformer.TransformerConfig,
) -> transformer.TransformerConfig:
  """Returns the config of the network that `prepare` makes parameters for."""
  return dataclasses.replace(config, lora=None, remat='none', scan=False)


def prepare(config: transformer.TransformerConfig, params: dict) -> dict:
  """Returns the parameters as `act` reads them fastest.

  Adapters are merged, and layers that are stacked taken apart, which takes as
  much memory again. Parameters that are prepared already come back as they are.
  """
  if config.lora is not None and lora.has_adapters(params):
    _, params = lora.merge(config, params)
  if 'blocks' in params:
    _, params = transformer.unstack(config, params)
  return params


def _causal(tokens: jax.Array) -> jax.Array:
  """Returns [R, C, C] bool: each token of a chunk sees those before it."""
  num_rows, size = tokens.shape
  mask = jnp.tril(jnp.ones((size, size), bool))
  return jnp.broadcast_to(mask, (num_rows, size, size))


def make_prefill(
    model: transformer.Transformer,
) -> Callable[..., sampling.Cache]:
  """Returns `prefill(params, cache, tokens [R, P], lengths [R]) -> Cache`.

  It takes the parameters as the model has them.
  """

  def prefill(params, cache, tokens, lengths):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    _, new = model.apply({'params': params}, tokens, positions, _causal(tokens))
    layers = range(model.config.num_layers)
    new = transformer.KeyValues(*(tuple(x[i] for i in layers) for x in new))
    return sampling.write_cache(cache, new, positions < lengths[:, None])

  return prefill


def make_draw(
    model: transformer.Transformer, config: sampling.SamplerConfig
) -> Callable[..., sampling.Actions]:
  """Returns `draw(params, rows, uniforms, hidden, drawn, step, goes_on)`.

  It draws token `step` of the actions of which `drawn` [R, U] holds the tokens
  before, from the hidden states [R, width] of what precedes it and the uniforms
  [R, U] of the turn, and returns `Actions` without the axis U. A forced token
  takes the place of what was drawn, with the log-prob that it has. Rows that do
  not go on draw nothing.
  """

  def draw(params, rows, uniforms, hidden, drawn, step, goes_on):
    logits = model.apply({'params': params}, hidden, method='logits')
    allowed = None
    if config.constrained:
      allowed = sampling.continuations(
          rows.commands, drawn, step, logits.shape[-1])
    log_probs, entropy = sampling.token_distribution(
        logits, allowed, config.temperature)
    token = jnp.where(
        rows.greedy,
        jnp.argmax(log_probs, axis=-1),
        sampling.inverse_cdf(log_probs, uniforms[:, step]),
    ).astype(jnp.int32)
    forced = jnp.take(rows.forced, step, axis=1)
    token = jnp.where(step < rows.num_forced, forced, token)
    log_prob = jnp.take_along_axis(log_probs, token[:, None], axis=-1)[:, 0]
    drawn_now = sampling.Actions(
        tokens=token,
        mask=goes_on,
        log_probs=log_prob,
        entropies=entropy,
        allowed=None if allowed is None else sampling.pack_bits(allowed),
    )
    return jax.tree.map(
        lambda x: jnp.where(
            goes_on.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.zeros_like(x)
        ),
        drawn_now,
    )

  return draw


def _no_actions(
    config: sampling.SamplerConfig, num_rows: int, vocab_size: int
) -> sampling.Actions:
  """Returns actions of which nothing is drawn yet."""
  shape = (num_rows, config.action_length)
  allowed = None
  if config.constrained:
    allowed = jnp.zeros((*shape, vocab_size // 32), jnp.uint32)
  return sampling.Actions(
      tokens=jnp.zeros(shape, jnp.int32),
      mask=jnp.zeros(shape, bool),
      log_probs=jnp.zeros(shape),
      entropies=jnp.zeros(shape),
      allowed=allowed,
  )


def _check_stop(config: sampling.SamplerConfig, vocab_size: int) -> None:
  """Raises ValueError for a token that ends actions and that nobody draws."""
  for sequence in config.stop:
    if max(sequence) >= vocab_size:
      raise ValueError(
          f'stop: expected token ids below vocab_size={vocab_size}, got'
          f' {sequence}; is it of another tokenizer?'
      )


def _with_fed(now: _Decoding, chunk: int) -> transformer.KeyValues:
  """Returns the side buffer with the token that was fed last.

  It is put there before the next is fed, not at once: a buffer that is written
  after it was read would be copied with every token.
  """
  place = chunk + jnp.maximum(now.step - 2, 0)  # At first of nothing.
  return jax.tree.map(
      lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, place, 2),
      now.side, now.fed)


def make_act(
    model: transformer.Transformer, config: sampling.SamplerConfig
) -> Callable[[dict, sampling.Rows], tuple[sampling.Rows, sampling.Actions]]:
  """Returns `act(params, rows)`: reads what is pending and draws an action.

  The rows come back with all that was read, and all of the action but its last
  token, in the cache. Parameters are best passed through `prepare` before.

  The cache is only read here. The chunk's and the action's keys and values go
  to a small side buffer, and from there to the cache in one scatter at the end:
  a scatter per token would cost more than the network does. The last token of
  an action is not fed yet; it leads the next turn's chunk. Drawing ends when
  the last of the actions does.

  Raises:
    ValueError: if an action ends with tokens that the model does not have.
  """
  _check_stop(config, model.config.vocab_size)
  network = model.clone(config=drawn_by(model.config))
  draw = make_draw(network, config)

  def act(params, rows):
    params = prepare(model.config, params)
    num_rows, chunk = rows.pending.shape
    cached, lengths = rows.cache.key_values, rows.cache.lengths
    in_cache = jnp.arange(sampling.cache_length(rows.cache)) < lengths[:, None]
    is_pending = jnp.arange(chunk) < rows.pending_length[:, None]
    uniforms = sampling.turn_uniforms(
        rows.keys, rows.turns, config.action_length)

    def draw_next(params, hidden, now):
      """Draws the next token of every action that goes on."""
      new = draw(params, rows, uniforms, hidden, now.actions.tokens, now.step,
                 now.goes_on)
      actions = jax.tree.map(
          lambda xs, x: xs.at[:, now.step].set(x), now.actions, new)
      goes_on = now.goes_on & sampling.is_unfinished(
          config, rows.commands, actions.tokens, now.step + 1)
      return now._replace(
          step=now.step + 1, goes_on=goes_on, actions=actions)

    def feed_and_draw(now):
      """Feeds the token drawn last and draws the next."""
      now = now._replace(side=_with_fed(now, chunk))
      hidden, new = network.apply(
          {'params': params},
          jnp.take(now.actions.tokens, now.step - 1, axis=1)[:, None],
          (lengths + rows.pending_length + now.step - 1)[:, None],
          jnp.ones((num_rows, 1, 1), bool),
          (cached, now.side),
          (in_cache[:, None], now.is_side[:, None]),
      )
      # A token is kept only once another follows it.
      is_side = now.is_side.at[:, chunk + now.step - 1].set(now.goes_on)
      return draw_next(
          params, hidden[:, 0], now._replace(fed=new, is_side=is_side))

    hidden, read = network.apply(
        {'params': params},
        rows.pending,
        lengths[:, None] + jnp.arange(chunk),
        _causal(rows.pending),
        (cached,),
        (jnp.repeat(in_cache[:, None], chunk, axis=1),),
    )
    last = hidden[jnp.arange(num_rows), jnp.maximum(rows.pending_length - 1, 0)]
    extra = config.action_length - 1
    widen = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, extra), (0, 0)))
    actions = _no_actions(config, num_rows, model.config.vocab_size)
    now = draw_next(params, last, _Decoding(
        step=jnp.zeros((), jnp.int32),
        goes_on=rows.active & sampling.is_unfinished(
            config, rows.commands, actions.tokens, 0),
        actions=actions,
        side=jax.tree.map(widen, read),
        is_side=jnp.pad(is_pending, ((0, 0), (0, extra))),
        fed=jax.tree.map(lambda x: jnp.zeros_like(x[:, :, :1]), read),
    ))
    now = jax.lax.while_loop(
        lambda now: (now.step < config.action_length) & jnp.any(now.goes_on),
        feed_and_draw, now)
    keep = now.is_side & rows.active[:, None]
    side = _with_fed(now, chunk) if extra else now.side
    cache = sampling.write_cache(rows.cache, side, keep)
    return rows._replace(cache=cache), now.actions

  return act

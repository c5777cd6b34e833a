"""Terms of the training objective per token, and one reducer after them.

Every term takes arrays of any one shape and a mask; what stands at a masked
token, NaN included, reaches neither the result nor a gradient. A term says in
its first line whether it is to be maximised or minimised. A loss is put
together as

  loss = reduce(-surrogate + kl_coef * kl - entropy_coef * entropy, ...)
"""

import chex
import jax
import jax.numpy as jnp

from bpo_jax import masked
from bpo_jax import types

KL_ESTIMATORS = ('k1', 'k2', 'k3')
REDUCERS = ('token_mean', 'sequence_mean', 'sum_norm')

# exp(20) is far outside any trust region and far inside float32.
_MAX_LOG_RATIO = 20.0

Metric = tuple[types.Array, types.Array]  # (sum, count).


def clipped_surrogate(log_probs: chex.Array, behaviour_log_probs: chex.Array,
                      advantages: chex.Array, clip_epsilon_low: float = 0.2,
                      clip_epsilon_high: float = 0.2,
                      dual_clip: float | None = None,
                      mask: chex.Array | None = None) -> types.Array:
  """Returns PPO's clipped surrogate per token, to be maximised.

  min(r A, clip(r, 1 - low, 1 + high) A), r the ratio of the two probabilities;
  with a dual clip c > 1, no less than c A where A < 0.

  Args:
    log_probs: nats, under the policy that is trained.
    behaviour_log_probs: nats, under the policy that drew the tokens.
    advantages: reward units.
    clip_epsilon_low: how far below 1 the ratio may push.
    clip_epsilon_high: how far above 1 the ratio may push.
    dual_clip: c, or None for no bound.
    mask: bool, True at action tokens; None for all.

  Returns:
    Float32 in the shape of `log_probs`, 0 off the mask. Gradients flow to
    `log_probs` alone; at ratio 1 they are those of A log_probs.

  References:
    Schulman et al. 2017, equation 7 (arXiv 1707.06347).
    Ye et al. 2020, equation 5 (arXiv 1912.09729), for the dual clip.
  """
  mask = _mask_like(log_probs, mask)
  advantages = jax.lax.stop_gradient(masked.fill(advantages, mask))
  ratio = jnp.exp(_log_ratio(
      log_probs, jax.lax.stop_gradient(behaviour_log_probs), mask))
  clipped = jnp.clip(ratio, 1 - clip_epsilon_low, 1 + clip_epsilon_high)
  surrogate = jnp.minimum(ratio * advantages, clipped * advantages)
  if dual_clip is not None:
    floor = jnp.maximum(surrogate, dual_clip * advantages)
    surrogate = jnp.where(advantages < 0, floor, surrogate)
  return masked.fill(surrogate, mask)


def kl(log_probs: chex.Array, reference_log_probs: chex.Array,
       estimator: str = 'k3', mask: chex.Array | None = None) -> types.Array:
  """Returns a sampled KL(policy || reference) per token, to be minimised.

  With d = log_probs - reference_log_probs at tokens the policy drew:

    k1 = d               k2 = d^2 / 2               k3 = exp(-d) - 1 + d

  In expectation k1 and k3 are KL(policy || reference); k2 is to second order.
  Their gradients as terms of a loss, tokens held fixed, are other things:
  that of k1 vanishes; that of k2 is the gradient of KL(policy || reference);
  that of k3 is the gradient of KL(reference || policy). All pull to the
  reference but k1; near it k2 and k3 agree.

  Args:
    log_probs: nats, under the policy that is trained.
    reference_log_probs: nats, under the reference.
    estimator: 'k1', 'k2' or 'k3'.
    mask: bool, True at action tokens; None for all.

  Returns:
    Float32 in the shape of `log_probs`, nats, 0 off the mask. Gradients flow to
    `log_probs` alone.

  Raises:
    ValueError: if the estimator is unknown.

  References:
    Schulman 2020, Approximating KL Divergence.
  """
  mask = _mask_like(log_probs, mask)
  difference = _log_ratio(
      log_probs, jax.lax.stop_gradient(reference_log_probs), mask)
  if estimator == 'k1':
    return difference
  if estimator == 'k2':
    return 0.5 * jnp.square(difference)
  if estimator == 'k3':
    back = jnp.minimum(-difference, _MAX_LOG_RATIO)
    return jnp.expm1(back) + difference
  raise ValueError(f'estimator: expected one of {", ".join(KL_ESTIMATORS)}; '
                   f'got {estimator!r}')


def entropy_bonus(logits: chex.Array, mask: chex.Array | None = None
                  ) -> types.Array:
  """Returns the entropy of every token's distribution, to be maximised.

  H = -sum_v p_v log p_v, with 0 log 0 = 0.

  Args:
    logits: [..., V]; -inf for a token that cannot be drawn.
    mask: [...] bool, True at action tokens; None for all.

  Returns:
    [...] float32, nats, 0 off the mask. Gradients flow.
  """
  mask = _mask_like(logits[..., 0], mask)
  logits = masked.fill(jnp.asarray(logits, jnp.float32), mask[..., None])
  possible = logits > -jnp.inf
  log_probs = jax.nn.log_softmax(logits, where=possible, axis=-1)
  log_probs = masked.fill(log_probs, possible)
  return -masked.sum(jnp.exp(log_probs) * log_probs, possible, axis=-1)


def reduce(values: chex.Array, weights: chex.Array, mask: chex.Array,
           reducer: str = 'token_mean', norm: chex.Numeric | None = None
           ) -> Metric:
  """Returns a weighted sum and the denominator it is yet to be divided by.

  Both add up over micro-batches and devices; divide once, at the end.
  * 'token_mean': sum w x / sum w.
  * 'sequence_mean': the weighted mean along the last axis, averaged over the
    rows in which something weighs.
  * 'sum_norm': sum w x / norm, such as trees times a maximal length, so that a
    long answer is not discounted.

  Args:
    values: [..., T] float.
    weights: [..., T] float, not negative.
    mask: [..., T] bool, True where real.
    reducer: which of the three.
    norm: denominator of this micro-batch, for 'sum_norm' alone.

  Returns:
    (sum, denominator), float32 scalars. Gradients flow to `values`.

  Raises:
    ValueError: if the reducer is unknown, or `norm` is missing or in excess.
  """
  if reducer not in REDUCERS:
    raise ValueError(f'reducer: expected one of {", ".join(REDUCERS)}; '
                     f'got {reducer!r}')
  if (norm is None) == (reducer == 'sum_norm'):
    raise ValueError('norm: expected a number with sum_norm and None without; '
                     f'got {norm} with {reducer}')
  weights = masked.fill(jax.lax.stop_gradient(weights), mask)
  mask = mask & (weights != 0)
  weighted = masked.fill(values, mask) * weights
  if reducer == 'sequence_mean':
    total = jnp.sum(weights, axis=-1)
    rows = masked.divide(jnp.sum(weighted, axis=-1), total)
    return jnp.sum(rows), masked.count(total > 0)
  denominator = jnp.sum(weights) if norm is None else norm
  return jnp.sum(weighted), jnp.asarray(denominator, jnp.float32)


def ratio_metrics(log_probs: chex.Array, behaviour_log_probs: chex.Array,
                  advantages: chex.Array, mask: chex.Array,
                  clip_epsilon_low: float = 0.2, clip_epsilon_high: float = 0.2
                  ) -> dict[str, Metric]:
  """Returns how far the policy has moved, as (sum, count) over tokens.

  Args:
    log_probs: nats, under the policy that is trained.
    behaviour_log_probs: nats, under the policy that drew the tokens.
    advantages: reward units; their sign says which bound is active.
    mask: bool, True at action tokens.
    clip_epsilon_low: as in `clipped_surrogate`.
    clip_epsilon_high: as in `clipped_surrogate`.

  Returns:
    clip_fraction: tokens whose gradient the clip cuts off. approx_kl: k3 of
    KL(behaviour || policy), nats. ratio: the probability ratio.
  """
  ratio = jnp.exp(_log_ratio(log_probs, behaviour_log_probs, mask))
  advantages = masked.fill(advantages, mask)
  clipped = (((advantages > 0) & (ratio > 1 + clip_epsilon_high))
             | ((advantages < 0) & (ratio < 1 - clip_epsilon_low)))
  divergence = kl(behaviour_log_probs, log_probs, 'k3', mask)
  count = masked.count(mask)
  tokens = dict(clip_fraction=clipped.astype(jnp.float32),
                approx_kl=divergence, ratio=ratio)
  return {f'objective/{name}': (masked.sum(value, mask), count)
          for name, value in tokens.items()}


def _mask_like(values, mask):
  return jnp.ones(jnp.shape(values), bool) if mask is None else mask


def _log_ratio(log_probs, other, mask):
  """Returns log_probs - other, capped above, and 0 off the mask."""
  difference = masked.fill(log_probs, mask) - masked.fill(other, mask)
  return jnp.minimum(difference.astype(jnp.float32), _MAX_LOG_RATIO)

"""Terms of the training objective per token, and one reducer after them.

Every term takes arrays of any one shape and a mask; what stands at a masked
token, NaN included, reaches neither the result nor a gradient. A term says in
its first line whether it is to be maximised or minimised. A loss is put
together as

  loss = reduce(-surrogate + kl_coef * kl - entropy_coef * entropy, ...)

Every surrogate is called as `(log_probs, behaviour_log_probs, advantages,
mask=..., **scalars)`, so that a learner can take any of them.
"""

import typing
from typing import Literal

import chex
import jax
import jax.numpy as jnp

from bpo_jax import checks
from bpo_jax import masked
from bpo_jax import types

KlEstimator = Literal['k1', 'k2', 'k3']
Reducer = Literal[
    'token_mean', 'sequence_mean', 'sequence_sum_norm', 'path_weighted']
Contrast = Literal['surrogate', 'logistic_margin']
KL_ESTIMATORS = typing.get_args(KlEstimator)
REDUCERS = typing.get_args(Reducer)

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
    dual_clip: multiple of a negative advantage beyond which a growing ratio
      pushes no more; None for no bound.
    mask: bool, True at action tokens; None for all.

  Returns:
    Float32 in the shape of `log_probs`, 0 off the mask. Gradients flow to
    `log_probs` alone; at ratio 1 they are those of A log_probs.

  References:
    Schulman et al. 2017, equation 7 (arXiv 1707.06347), exact.
    Ye et al. 2020, equation 5 (arXiv 1912.09729), for the dual clip, exact.
  """
  mask = _mask_like(log_probs, mask)
  advantages = jax.lax.stop_gradient(masked.fill(advantages, mask))
  ratio = jnp.exp(_log_ratio(
      log_probs, jax.lax.stop_gradient(behaviour_log_probs), mask))
  surrogate = _clip(
      ratio, advantages, clip_epsilon_low, clip_epsilon_high, dual_clip)
  return masked.fill(surrogate, mask)


def sequence_ratio_surrogate(
    log_probs: chex.Array, behaviour_log_probs: chex.Array,
    advantages: chex.Array, *, clip_epsilon_low: float = 3e-4,
    clip_epsilon_high: float = 4e-4, mask: chex.Array | None = None
) -> types.Array:
  """Returns GSPO's surrogate per token, to be maximised.

    min(s_t A_t, clip(s_t, 1 - low, 1 + high) A_t)
    s_t = stopgrad(s) r_t / stopgrad(r_t),  s = exp(mean_t log r_t)

  The mean is over the mask along the last axis, so s_t has the value of the
  length-normalised ratio of the whole sequence and the gradient of its own
  token. Averaged over the tokens of a sequence of one advantage, value and
  gradient are those of min(s A, clip(s) A).

  Args:
    log_probs: nats, under the policy that is trained, [..., T].
    behaviour_log_probs: nats, under the policy that drew the tokens, [..., T].
    advantages: reward units, [..., T].
    clip_epsilon_low: how far below 1 the ratio may push.
    clip_epsilon_high: how far above 1 the ratio may push.
    mask: [..., T] bool, True at the action tokens of the sequence; None for
      all.

  Returns:
    [..., T] float32, 0 off the mask. Gradients flow to `log_probs` alone; at
    ratio 1 they are those of A log_probs.

  References:
    Zheng et al. 2025, equations 13 and 14, GSPO-token, with equation 7 for s
    (arXiv 2507.18071), exact.
  """
  mask = _mask_like(log_probs, mask)
  advantages = jax.lax.stop_gradient(masked.fill(advantages, mask))
  log_ratio = _log_ratio(
      log_probs, jax.lax.stop_gradient(behaviour_log_probs), mask)
  frozen = jax.lax.stop_gradient(log_ratio)
  log_sequence = masked.mean(frozen, mask, axis=-1, keepdims=True)
  ratio = jnp.exp(log_sequence + log_ratio - frozen)
  surrogate = _clip(ratio, advantages, clip_epsilon_low, clip_epsilon_high)
  return masked.fill(surrogate, mask)


def future_kl_surrogate(
    log_probs: chex.Array, behaviour_log_probs: chex.Array,
    advantages: chex.Array, *, clip_epsilon_low: float = 0.2,
    clip_epsilon_high: float = 0.28, dual_clip: float | None = 3.0,
    future_half_life: float = 64.0, future_max_ratio: float = 3.0,
    future_low: float = 1.0, future_high: float = 1.2,
    future_clamp: bool = False, mask: chex.Array | None = None
) -> types.Array:
  """Returns APPO's future-weighted surrogate per token, to be maximised.

  The clipped surrogate of A_t (1 + F_t), the clip and the dual clip as there:

    F_t = stopgrad clip(exp(sum_{k >= t} 2^{-(k - t) / h} m_k d_k), low, high)
    d_k = log r_k,  m_k = [r_k <= max_ratio]

  k runs over the action tokens of the sequence, which the last axis has in path
  order; tokens between them neither add nor take time.

  Args:
    log_probs: nats, under the policy that is trained, [..., T].
    behaviour_log_probs: nats, under the policy that drew the tokens, [..., T].
    advantages: reward units, [..., T].
    clip_epsilon_low: how far below 1 the ratio may push.
    clip_epsilon_high: how far above 1 the ratio may push.
    dual_clip: multiple of a negative advantage beyond which a growing ratio
      pushes no more; None for no bound.
    future_half_life: action tokens after which a later token's change of
      log-prob counts half.
    future_max_ratio: a token whose ratio exceeds it does not count.
    future_low: the weight of the future is at least this.
    future_high: the weight of the future is at most this.
    future_clamp: whether the weight of the future of a token with a negative
      advantage and a ratio above 6 is clamped to [0.8, 1], as released.
    mask: [..., T] bool, True at action tokens; None for all.

  Returns:
    [..., T] float32, 0 off the mask. Gradients flow to `log_probs` alone; at
    ratio 1 they are those of 2 A log_probs.

  References:
    Agentic Procedural Policy Optimization (arXiv 2606.12384): the released
    code exact, the paper restated.
  """
  mask = _mask_like(log_probs, mask)
  advantages = jax.lax.stop_gradient(masked.fill(advantages, mask))
  log_ratio = _log_ratio(
      log_probs, jax.lax.stop_gradient(behaviour_log_probs), mask)
  frozen = jax.lax.stop_gradient(log_ratio)
  checks.between('future_half_life', future_half_life, 1e-3)
  checks.between('future_max_ratio', future_max_ratio, 0)
  checks.between('future_high', future_high, 0)
  checks.between('future_low', future_low, 0, future_high)
  counted = masked.fill(frozen, frozen <= jnp.log(future_max_ratio))
  future = _discounted_future(counted, 2.0 ** (-1.0 / future_half_life), mask)
  weight = jnp.clip(
      jnp.exp(jnp.minimum(future, _MAX_LOG_RATIO)), future_low, future_high)
  if future_clamp:
    runaway = (advantages < 0) & (frozen > jnp.log(6.0))
    weight = jnp.where(runaway, jnp.clip(weight, 0.8, 1.0), weight)
  surrogate = _clip(jnp.exp(log_ratio), advantages * (1.0 + weight),
                    clip_epsilon_low, clip_epsilon_high, dual_clip)
  return masked.fill(surrogate, mask)


def kl(log_probs: chex.Array, reference_log_probs: chex.Array,
       estimator: KlEstimator = 'k2', mask: chex.Array | None = None
       ) -> types.Array:
  """Returns a sampled KL(policy || reference) per token, to be minimised.

  With d = log_probs - reference_log_probs at tokens the policy drew:

    k1 = d               k2 = d^2 / 2               k3 = exp(-d) - 1 + d

  (where d < -20, exp is continued by its tangent, so that it stays finite).
  In expectation k1 and k3 are KL(policy || reference); k2 is to second order.
  Their gradients as terms of a loss, tokens held fixed, are other things:
  that of k1 vanishes; that of k2 is the gradient of KL(policy || reference);
  that of k3 is the gradient of KL(reference || policy). So k2 is the one to
  put into a loss, and the default; k3 is the one to read. All pull to the
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
    Schulman 2020, Approximating KL Divergence, exact.
  """
  checks.one_of('estimator', estimator, KlEstimator)
  mask = _mask_like(log_probs, mask)
  difference = _difference(
      log_probs, jax.lax.stop_gradient(reference_log_probs), mask)
  if estimator == 'k1':
    return difference
  if estimator == 'k2':
    return 0.5 * jnp.square(difference)
  # Beyond the cap exp goes on along its tangent: it still pulls, and is finite.
  back = jnp.minimum(-difference, _MAX_LOG_RATIO)
  beyond = jnp.exp(_MAX_LOG_RATIO) * jnp.maximum(
      -difference - _MAX_LOG_RATIO, 0)
  return jnp.expm1(back) + beyond + difference


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


def golden_contrast(
    golden_log_probs: chex.Array, golden_behaviour_log_probs: chex.Array,
    failure_log_probs: chex.Array, failure_behaviour_log_probs: chex.Array, *,
    contrast: Contrast = 'surrogate', clip_epsilon_low: float = 0.2,
    clip_epsilon_high: float = 0.2, contrast_beta: float = 1.0,
    golden_mask: chex.Array | None = None,
    failure_mask: chex.Array | None = None) -> types.Array:
  """Returns GCPO's contrast of a golden trajectory with a group's failures.

  To be maximised. With l the mean log-prob of a trajectory's action tokens and
  S(A) the mean of its clipped surrogate of a constant advantage A:

    surrogate:        S_golden(+1) + mean_f S_f(-1)
    logistic_margin:  log sigmoid(beta (l_golden - mean_f l_f))

  At ratio 1 the gradient of the first is that of l_golden - mean_f l_f, the
  length-normalised likelihood margin. The golden behaviour log-probs come from
  teacher forcing under the policy before the update: they bound the step, and
  correct nothing for the teacher's having drawn the tokens.

  Its derivative by the log-probs, `jax.grad(golden_contrast, (0, 2))`, is what
  each token is to be credited with in `learner.weighted_log_likelihood`.

  Args:
    golden_log_probs: [..., G] nats, teacher-forced, under the policy that is
      trained.
    golden_behaviour_log_probs: [..., G] nats, under the policy before the
      update.
    failure_log_probs: [..., F, T] nats, under the policy that is trained.
    failure_behaviour_log_probs: [..., F, T] nats, as drawn.
    contrast: 'surrogate', a clipped step on both sides, or 'logistic_margin',
      which pushes less the larger the margin.
    clip_epsilon_low: how far below 1 the ratio may push; surrogate only.
    clip_epsilon_high: how far above 1 the ratio may push; surrogate only.
    contrast_beta: how steeply the push fades with the margin, per nat;
      logistic_margin only.
    golden_mask: [..., G] bool, True at action tokens; None for all.
    failure_mask: [..., F, T] bool, True at action tokens; None for all. A
      failure without any is padding.

  Returns:
    [...] float32, one a group; 0 without a golden token or without a failure.
    Gradients flow to the two log-probs of the policy that is trained.

  Raises:
    ValueError: if the contrast is unknown, or a number out of range.

  References:
    Group Contrastive Policy Optimization, known by its abstract: read.
  """
  checks.one_of('contrast', contrast, Contrast)
  checks.between('contrast_beta', contrast_beta, 0)
  golden_mask = _mask_like(golden_log_probs, golden_mask)
  failure_mask = _mask_like(failure_log_probs, failure_mask)
  if contrast == 'surrogate':
    clip = dict(clip_epsilon_low=clip_epsilon_low,
                clip_epsilon_high=clip_epsilon_high)
    golden = clipped_surrogate(
        golden_log_probs, golden_behaviour_log_probs,
        jnp.ones_like(golden_log_probs), mask=golden_mask, **clip)
    failures = -clipped_surrogate(
        failure_log_probs, failure_behaviour_log_probs,
        -jnp.ones_like(failure_log_probs), mask=failure_mask, **clip)
  else:
    golden, failures = golden_log_probs, failure_log_probs
  is_failure = jnp.any(failure_mask, axis=-1)
  means = masked.mean(failures, failure_mask, axis=-1)
  margin = (masked.mean(golden, golden_mask, axis=-1)
            - masked.mean(means, is_failure, axis=-1))
  if contrast == 'logistic_margin':
    margin = jax.nn.log_sigmoid(contrast_beta * margin)
  both = jnp.any(golden_mask, axis=-1) & jnp.any(is_failure, axis=-1)
  return masked.fill(margin, both)


def value_loss(values: chex.Array, targets: chex.Array,
               old_values: chex.Array | None = None, *,
               value_clip: float | None = None,
               mask: chex.Array | None = None) -> types.Array:
  """Returns the critic's squared error per token, to be minimised.

  (V - G)^2 / 2; with a clip c, the larger of that and the same of V clipped to
  V_old +- c, so that a step beyond c is not rewarded.

  Args:
    values: reward units, V of the state before each token.
    targets: reward units, the returns G that V is to predict.
    old_values: reward units, V before the update; read with a clip alone.
    value_clip: how far from its old value a prediction may move in one update,
      in reward units; None for no bound.
    mask: bool, True at action tokens; None for all.

  Returns:
    Float32 in the shape of `values`, 0 off the mask. Gradients flow to `values`
    alone.

  Raises:
    ValueError: if there is a clip and no old values, or it is negative.

  References:
    Schulman et al. 2017, equation 9 (arXiv 1707.06347), exact; the clip is that
    of their released code.
  """
  mask = _mask_like(values, mask)
  values = masked.fill(values, mask)
  targets = jax.lax.stop_gradient(masked.fill(targets, mask))
  error = 0.5 * jnp.square(values - targets)
  if value_clip is None:
    return error
  checks.between('value_clip', value_clip, 0)
  checks.given('old_values', old_values, 'value_clip',
               'the values before the update')
  old_values = jax.lax.stop_gradient(masked.fill(old_values, mask))
  clipped = jnp.clip(values, old_values - value_clip, old_values + value_clip)
  return jnp.maximum(error, 0.5 * jnp.square(clipped - targets))


def reduce(values: chex.Array, weights: chex.Array, mask: chex.Array,
           reducer: Reducer = 'token_mean', norm: chex.Numeric | None = None
           ) -> Metric:
  """Returns a weighted sum and the denominator it is yet to be divided by.

  Both add up over micro-batches and devices; divide once, at the end. A row is
  what lies along the last axis; one in which nothing weighs counts nowhere.
  * 'token_mean': sum w x / sum w.
  * 'sequence_mean': the weighted mean of each row, averaged over the rows.
  * 'sequence_sum_norm': sum w x of each row over `norm`, averaged over the
    rows; with a constant norm, such as the longest answer that is possible, a
    long answer is not discounted.
  * 'path_weighted': sum w x over the sum of the rows' path weights, a path
    weight being that of the row's last token that weighs. Where a shared token
    has the sum of the weights of its paths, this is the mean over paths of the
    sum along the path, whatever the lengths.

  Args:
    values: [..., T] float.
    weights: [..., T] float, not negative.
    mask: [..., T] bool, True where real.
    reducer: which of the four.
    norm: tokens, what the sum of a row is divided by; 'sequence_sum_norm'
      alone.

  Returns:
    (sum, denominator), float32 scalars. Gradients flow to `values`.

  Raises:
    ValueError: if the reducer is unknown, or `norm` is missing or in excess.
  """
  denominator = jnp.sum(denominators(weights, mask, reducer, norm))
  weights = masked.fill(jax.lax.stop_gradient(weights), mask)
  weighted = masked.fill(values, mask & (weights != 0)) * weights
  if reducer == 'sequence_mean':
    weighted = masked.divide(
        jnp.sum(weighted, axis=-1), jnp.sum(weights, axis=-1))
  return jnp.sum(weighted), denominator


def denominators(weights: chex.Array, mask: chex.Array,
                 reducer: Reducer = 'token_mean',
                 norm: chex.Numeric | None = None) -> types.Array:
  """Returns what each row adds to the denominator of `reduce`.

  Args:
    weights: [..., T] float, not negative.
    mask: [..., T] bool, True where real.
    reducer: as in `reduce`.
    norm: as in `reduce`.

  Returns:
    [...] float32; 0 for a row in which nothing weighs. No gradient.

  Raises:
    ValueError: as by `check_reducer`.
  """
  check_reducer(reducer, norm)
  weights = jax.lax.stop_gradient(masked.fill(weights, mask))
  weights = weights.astype(jnp.float32)
  if reducer == 'token_mean':
    return jnp.sum(weights, axis=-1)
  weighs = weights != 0
  if reducer == 'path_weighted':
    place = jnp.where(weighs, jnp.arange(weights.shape[-1]), -1)
    is_last = weighs & (place == jnp.max(place, axis=-1, keepdims=True))
    return masked.sum(weights, is_last, axis=-1)
  rows = jnp.any(weighs, axis=-1).astype(jnp.float32)
  return rows if norm is None else rows * norm


def check_reducer(reducer: str, norm: chex.Numeric | None = None) -> None:
  """Raises ValueError for an unknown reducer, or one without its norm."""
  checks.one_of('reducer', reducer, Reducer)
  if (norm is None) == (reducer == 'sequence_sum_norm'):
    raise ValueError('norm: expected a number with sequence_sum_norm and None '
                     f'without; got {norm} with {reducer}')
  if norm is not None:
    checks.positive('norm', norm)


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
    clip_fraction: tokens whose own ratio is past the bound, where the clipped
    surrogate has no gradient. approx_kl: k3 of KL(behaviour || policy), nats.
    ratio: the probability ratio.
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


def value_metrics(values: chex.Array, targets: chex.Array, mask: chex.Array,
                  centre: chex.Numeric) -> dict[str, Metric]:
  """Returns how well the critic predicts, as (sum, denominator) over tokens.

  Args:
    values: reward units.
    targets: reward units.
    mask: bool, True at action tokens.
    centre: mean target of the whole batch, reward units; one number for all
      micro-batches, so that their parts add up.

  Returns:
    value_error: the mean of (V - G)^2. explained_variance: 1 - sum (V - G)^2 /
    sum (G - centre)^2, which is 1 for a perfect critic, 0 for one that knows
    the mean and below 0 for a worse one; its denominator is 0 where every
    target is the centre.
  """
  targets = masked.fill(targets, mask)
  error = masked.sum(jnp.square(masked.fill(values, mask) - targets), mask)
  spread = masked.sum(jnp.square(targets - centre), mask)
  return {
      'objective/value_error': (error, masked.count(mask)),
      'objective/explained_variance': (spread - error, spread),
  }


def _mask_like(values, mask):
  return jnp.ones(jnp.shape(values), bool) if mask is None else mask


def _difference(log_probs, other, mask):
  """Returns log_probs - other, float32, and 0 off the mask."""
  difference = masked.fill(log_probs, mask) - masked.fill(other, mask)
  return difference.astype(jnp.float32)


def _log_ratio(log_probs, other, mask):
  """Returns `_difference`, capped above so that exp of it is finite."""
  return jnp.minimum(_difference(log_probs, other, mask), _MAX_LOG_RATIO)


def _clip(ratio, advantages, low, high, dual_clip=None):
  """Returns min(r A, clip(r) A), no less than c A where A < 0."""
  checks.between('clip_epsilon_low', low, 0)
  checks.between('clip_epsilon_high', high, 0)
  if dual_clip is not None:
    checks.between('dual_clip', dual_clip, 1)
  clipped = jnp.clip(ratio, 1 - low, 1 + high)
  surrogate = jnp.minimum(ratio * advantages, clipped * advantages)
  if dual_clip is None:
    return surrogate
  floor = jnp.maximum(surrogate, dual_clip * advantages)
  return jnp.where(advantages < 0, floor, surrogate)


def _discounted_future(values, discount, mask):
  """Returns y_t = x_t + discount y_{t+1}; a masked token passes y on."""
  decay = jnp.where(mask, discount, 1.0)

  def combine(later, earlier):
    decay_l, sum_l = later
    decay_e, sum_e = earlier
    return decay_l * decay_e, sum_e + decay_e * sum_l

  _, future = jax.lax.associative_scan(
      combine, (decay, masked.fill(values, mask)), reverse=True,
      axis=decay.ndim - 1)
  return future

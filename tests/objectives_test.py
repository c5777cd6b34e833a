"""objectives: values and gradients against what they estimate."""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpo_jax import objectives

_SEEDS = range(10)


def _tokens(seed, size=12):
  rng = np.random.default_rng(seed)
  log_probs, behaviour, advantages = rng.normal(size=(3, size)).astype('f')
  return -np.abs(log_probs), -np.abs(behaviour), advantages


@pytest.mark.parametrize('seed', _SEEDS)
@pytest.mark.parametrize('dual_clip', [None, 3.0])
def test_clipped_surrogate(seed, dual_clip):
  log_probs, behaviour, advantages = _tokens(seed)
  got = objectives.clipped_surrogate(
      log_probs, behaviour, advantages, 0.2, 0.28, dual_clip)
  for lp, b, a, value in zip(log_probs, behaviour, advantages, got):
    ratio = np.exp(float(lp) - float(b))
    expected = min(ratio * a, np.clip(ratio, 0.8, 1.28) * a)
    if dual_clip and a < 0:
      expected = max(expected, dual_clip * a)
    assert value == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_at_ratio_one_the_gradient_is_the_policy_gradient():
  log_probs, _, advantages = _tokens(0)
  surrogate = lambda lp: jnp.sum(
      objectives.clipped_surrogate(lp, log_probs, advantages))
  np.testing.assert_allclose(
      jax.grad(surrogate)(log_probs), advantages, rtol=1e-6)


@pytest.mark.parametrize('advantage, ratio, moves', [
    (1.0, 1.3, False), (1.0, 0.5, True), (-1.0, 0.7, False), (-1.0, 1.5, True),
])
def test_the_clip_stops_only_moves_that_went_far_enough(
    advantage, ratio, moves):
  surrogate = lambda lp: objectives.clipped_surrogate(lp, 0.0, advantage)
  assert bool(jax.grad(surrogate)(jnp.log(ratio)) != 0) == moves


def test_no_gradient_flows_into_the_rest():
  log_probs, behaviour, advantages = _tokens(1)
  loss = lambda b, a: jnp.sum(objectives.clipped_surrogate(log_probs, b, a))
  for gradient in jax.grad(loss, argnums=(0, 1))(behaviour, advantages):
    assert (np.asarray(gradient) == 0).all()


_SURROGATES = {
    'clipped': objectives.clipped_surrogate,
    'dual': functools.partial(objectives.clipped_surrogate, dual_clip=3.0),
    'sequence': objectives.sequence_ratio_surrogate,
    'future': objectives.future_kl_surrogate,
    'future_clamped': functools.partial(
        objectives.future_kl_surrogate, future_clamp=True),
}
_TERMS = {
    **{name: lambda lp, other, mask, term=term: term(
        lp, other, other, mask=mask) for name, term in _SURROGATES.items()},
    **{name: lambda lp, other, mask, name=name: objectives.kl(
        lp, other, name, mask) for name in objectives.KL_ESTIMATORS},
    'entropy': lambda lp, other, mask: objectives.entropy_bonus(
        jnp.stack([lp, other], axis=-1), mask),
    'value': lambda lp, other, mask: objectives.value_loss(
        lp, other, other, value_clip=0.1, mask=mask),
}
_NORMS = {'sequence_sum_norm': 4.0}


_JUNK = (np.nan, np.inf, -np.inf, 1e30)


@pytest.mark.parametrize('name, reducer, junk', [
    *((name, 'token_mean', junk) for name in _TERMS for junk in _JUNK),
    *(('clipped', name, junk) for name in objectives.REDUCERS[1:]
      for junk in _JUNK)])
def test_masked_junk_never_leaks(name, reducer, junk):
  log_probs, other, _ = _tokens(2)
  mask = np.arange(12) % 3 > 0

  def loss(lp, rest, weights):
    term = _TERMS[name](lp, rest, mask)
    total, denominator = objectives.reduce(
        term, weights, mask, reducer, _NORMS.get(reducer))
    return total / denominator
  clean = jax.value_and_grad(loss)(log_probs, other, np.ones(12, 'f'))
  dirty = jax.value_and_grad(loss)(*(
      np.where(mask, x, np.float32(junk))
      for x in (log_probs, other, np.ones(12, 'f'))))
  np.testing.assert_allclose(dirty[0], clean[0], rtol=1e-6)
  np.testing.assert_allclose(dirty[1], clean[1], rtol=1e-6)
  assert np.isfinite(clean[1]).all() and (clean[1][~mask] == 0).all()


def test_a_runaway_ratio_stays_finite():
  for advantage in (0.0, 1.0, -1.0):
    surrogate = lambda lp: objectives.clipped_surrogate(lp, -500.0, advantage)
    value, gradient = jax.value_and_grad(surrogate)(-1.0)
    assert np.isfinite(value) and np.isfinite(gradient)
  assert np.isfinite(jax.grad(objectives.kl)(-500.0, -1.0))


def _expected(theta, reference, estimator):
  """E over tokens drawn from softmax(theta), held fixed, of an estimator."""
  drawn = jax.lax.stop_gradient(jax.nn.softmax(theta))
  return jnp.sum(drawn * objectives.kl(
      jax.nn.log_softmax(theta), jax.nn.log_softmax(reference), estimator))


def _kl(p_logits, q_logits):
  p, q = jax.nn.log_softmax(p_logits), jax.nn.log_softmax(q_logits)
  return jnp.sum(jnp.exp(p) * (p - q))


@pytest.mark.parametrize('seed', _SEEDS)
def test_kl_values_and_gradients_against_the_exact_divergence(seed):
  theta, reference = np.random.default_rng(seed).normal(
      size=(2, 6)).astype('f')
  value = _kl(theta, reference)
  for estimator in ('k1', 'k3'):
    np.testing.assert_allclose(
        _expected(theta, reference, estimator), value, rtol=1e-5)
  close = theta + 1e-2 * (reference - theta)
  np.testing.assert_allclose(
      _expected(close, theta, 'k2'), _kl(close, theta), rtol=0.05)
  gradients = {
      'k1': np.zeros(6),
      'k2': jax.grad(_kl)(theta, reference),
      'k3': jax.grad(_kl, argnums=1)(reference, theta),
  }
  for estimator, expected in gradients.items():
    got = jax.grad(_expected)(theta, reference, estimator)
    np.testing.assert_allclose(got, expected, atol=2e-6)


@pytest.mark.parametrize('seed', _SEEDS)
def test_entropy_bonus(seed):
  logits = np.random.default_rng(seed).normal(size=(3, 5)).astype('f')
  p = np.exp(logits.astype(float))
  p /= p.sum(-1, keepdims=True)
  expected = -(p * np.log(p)).sum(-1)
  np.testing.assert_allclose(
      objectives.entropy_bonus(logits), expected, rtol=1e-5)
  masked = np.concatenate([logits, np.full((3, 2), -np.inf, 'f')], -1)
  loss = lambda x: jnp.sum(objectives.entropy_bonus(x))
  value, gradient = jax.value_and_grad(loss)(masked)
  np.testing.assert_allclose(value, expected.sum(), rtol=1e-5)
  np.testing.assert_allclose(
      gradient[:, :5], jax.grad(loss)(logits), atol=1e-6)
  assert (gradient[:, 5:] == 0).all()


def test_ratio_metrics_by_hand():
  log_probs = np.log(np.float32([1.5, 1.1, 0.5, 1.5, np.nan]))
  advantages = np.float32([1, 1, -1, -1, np.nan])
  mask = np.array([True] * 4 + [False])
  got = objectives.ratio_metrics(
      log_probs, np.zeros(5, 'f'), advantages, mask)
  mean = {key: float(total / count) for key, (total, count) in got.items()}
  assert mean['objective/clip_fraction'] == 0.5
  assert mean['objective/ratio'] == pytest.approx(4.6 / 4)
  ratio = np.array([1.5, 1.1, 0.5, 1.5])
  # k3 of KL(behaviour || policy): r - 1 - log r at tokens the behaviour drew.
  assert mean['objective/approx_kl'] == pytest.approx(
      (ratio - 1 - np.log(ratio)).mean(), rel=1e-5)


# GSPO.


def _sequences(seed, spread=0.3, shape=(4, 7)):
  """Log-probs of two near policies, an advantage a row, a ragged mask."""
  rng = np.random.default_rng(seed)
  behaviour = -rng.random(shape)
  log_probs = behaviour + spread * rng.normal(size=shape)
  advantages = np.repeat(rng.normal(size=(shape[0], 1)), shape[1], axis=1)
  mask = rng.random(shape) < 0.7
  mask[0] = False
  return *(x.astype('f') for x in (log_probs, behaviour, advantages)), mask


def _sequence_objective(log_probs, behaviour, advantages, mask, low, high):
  """GSPO's equation 5 for every sequence: its ratio is what is clipped."""
  length = jnp.maximum(mask.sum(-1), 1)
  ratio = jnp.exp(
      jnp.where(mask, log_probs - behaviour, 0).sum(-1) / length)
  advantage = advantages[:, 0]
  value = jnp.minimum(
      ratio * advantage, jnp.clip(ratio, 1 - low, 1 + high) * advantage)
  return jnp.where(mask.any(-1), value, 0)


@pytest.mark.parametrize('seed', _SEEDS)
@pytest.mark.parametrize('clip', [(3e-4, 4e-4), (0.2, 0.3)])
def test_sequence_ratio_surrogate_is_that_of_the_sequence(seed, clip):
  log_probs, behaviour, advantages, mask = _sequences(seed)
  low, high = clip
  weights = np.ones(mask.shape, 'f')

  def per_token(lp):
    term = objectives.sequence_ratio_surrogate(
        lp, behaviour, advantages, clip_epsilon_low=low,
        clip_epsilon_high=high, mask=mask)
    return objectives.reduce(term, weights, mask, 'sequence_mean')[0]
  whole = lambda lp: jnp.sum(_sequence_objective(
      lp, behaviour, advantages, mask, low, high))
  got, expected = (jax.value_and_grad(f)(log_probs) for f in (per_token, whole))
  np.testing.assert_allclose(got[0], expected[0], rtol=1e-5)
  np.testing.assert_allclose(got[1], expected[1], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize('name', ['sequence', 'future'])
@pytest.mark.parametrize('seed', _SEEDS)
def test_054_a_masked_token_moves_those_of_its_sequence(name, seed):
  log_probs, behaviour, advantages, mask = _sequences(seed)
  term = lambda lp, m=mask: _SURROGATES[name](
      lp, behaviour, advantages, mask=m)
  moved = np.where(mask, log_probs, log_probs + 1)
  np.testing.assert_array_equal(term(moved), term(log_probs))
  gradient = jax.grad(lambda lp: term(lp).sum())(log_probs)
  assert (np.asarray(gradient)[~mask] == 0).all()
  # A row of its real tokens alone gives what it gives among masked ones.
  for row in range(len(mask)):
    keep = mask[row]
    alone = _SURROGATES[name](
        log_probs[row][keep], behaviour[row][keep], advantages[row][keep])
    np.testing.assert_allclose(term(log_probs)[row][keep], alone, rtol=1e-5)
    # It is no copy of the token's own clipped ratio: the others do count.
    if keep.sum() > 1 and name == 'sequence':
      tokens = objectives.clipped_surrogate(
          log_probs[row], behaviour[row], advantages[row], 3e-4, 4e-4)
      assert np.abs(tokens[keep] - alone).max() > 1e-5


# APPO.


def _future_oracle(log_probs, behaviour, advantages, mask, clamp):
  """Loops over tokens in float64."""
  out = np.zeros(mask.shape)
  for row, place in np.argwhere(mask):
    later = [k for k in np.flatnonzero(mask[row]) if k >= place]
    total = 0.0
    for steps, k in enumerate(later):
      change = float(log_probs[row, k]) - float(behaviour[row, k])
      total += 2 ** (-steps / 4) * change * (change <= np.log(3))
    weight = np.clip(np.exp(total), 1, 1.2)
    ratio = np.exp(
        float(log_probs[row, place]) - float(behaviour[row, place]))
    advantage = float(advantages[row, place])
    if clamp and advantage < 0 and ratio > 6:
      weight = np.clip(weight, 0.8, 1.0)
    advantage *= 1 + weight
    value = min(ratio * advantage, np.clip(ratio, 0.8, 1.28) * advantage)
    out[row, place] = max(value, 3 * advantage) if advantage < 0 else value
  return out


@functools.cache
def _quick_future(clamp):
  return jax.jit(functools.partial(
      objectives.future_kl_surrogate, future_half_life=4.0,
      future_clamp=clamp))


@pytest.mark.parametrize('seed', _SEEDS)
@pytest.mark.parametrize('clamp', [False, True])
@pytest.mark.parametrize('spread', [0.05, 1.5])
def test_future_kl_surrogate_is_that_of_the_oracle(seed, clamp, spread):
  log_probs, behaviour, advantages, mask = _sequences(seed, spread, (6, 9))
  got = _quick_future(clamp)(log_probs, behaviour, advantages, mask=mask)
  expected = _future_oracle(log_probs, behaviour, advantages, mask, clamp)
  np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-6)


def test_the_future_by_hand():
  # Half a life of one token. Ratios 1, 1.1, 4 (too large to count), 1.1.
  log_probs = np.log(np.float32([1, 1.1, 4, 1.1]))
  term = functools.partial(
      objectives.future_kl_surrogate, log_probs, np.zeros(4, 'f'))
  got = term(np.ones(4, 'f'), future_half_life=1.0)
  future = np.log(1.1) * np.array([.5 + .125, 1 + .25, .5, 1])
  expected = np.array([1, 1.1, 1.28, 1.1]) * (1 + np.exp(future))
  np.testing.assert_allclose(got, expected, rtol=1e-5)
  # The gradient does not see the weight; a clipped token has none.
  gradient = jax.grad(lambda lp: jnp.sum(objectives.future_kl_surrogate(
      lp, np.zeros(4, 'f'), np.ones(4, 'f'), future_half_life=1.0)))(log_probs)
  np.testing.assert_allclose(
      gradient, np.where([1, 1, 0, 1], expected, 0), rtol=1e-5)


def test_the_released_clamp_takes_the_future_from_runaway_tokens_alone():
  log_probs = np.log(np.float32([[7, 1.3, 1.3], [5, 1.3, 1.3]]))
  term = lambda advantage, clamp: np.asarray(objectives.future_kl_surrogate(
      log_probs, np.zeros((2, 3), 'f'), np.full((2, 3), advantage, 'f'),
      future_clamp=clamp, dual_clip=None))
  before, after = term(-1.0, False), term(-1.0, True)
  np.testing.assert_allclose(before[0, 0], -7 * 2.2, rtol=1e-5)
  np.testing.assert_allclose(after[0, 0], -7 * 2.0, rtol=1e-5)
  np.testing.assert_array_equal(before.ravel()[1:], after.ravel()[1:])
  np.testing.assert_array_equal(term(1.0, False), term(1.0, True))


@pytest.mark.parametrize('name', _SURROGATES)
def test_every_surrogate_starts_as_the_policy_gradient(name):
  log_probs, _, advantages, mask = _sequences(0)
  gradient = jax.grad(lambda lp: jnp.sum(_SURROGATES[name](
      lp, log_probs, advantages, mask=mask)))(log_probs)
  scale = 2 if name.startswith('future') else 1
  np.testing.assert_allclose(
      gradient, np.where(mask, scale * advantages, 0), rtol=1e-5)


@pytest.mark.parametrize('name', _SURROGATES)
def test_surrogates_under_jit_and_vmap_and_without_other_gradients(name):
  log_probs, behaviour, advantages, mask = _sequences(3)
  term = lambda lp, b, a, m: _SURROGATES[name](lp, b, a, mask=m)
  got = term(log_probs, behaviour, advantages, mask)
  assert got.dtype == jnp.float32 and got.shape == mask.shape
  for other in (jax.jit(term), jax.vmap(term)):
    np.testing.assert_allclose(
        other(log_probs, behaviour, advantages, mask), got, rtol=1e-5,
        atol=1e-7)
  for argument in (1, 2):
    gradient = jax.grad(lambda *x: term(*x, mask).sum(), argument)(
        log_probs, behaviour, advantages)
    assert not np.asarray(gradient).any()


# GCPO.


def _group(seed, num_failures=3, shape=(5, 6)):
  """Logits of a tabular policy, and the tokens of golden and failures."""
  rng = np.random.default_rng(seed)
  logits = rng.normal(size=shape)
  golden = rng.integers(shape[1], size=shape[0])
  failures = rng.integers(shape[1], size=(num_failures, shape[0]))
  golden_mask = np.arange(shape[0]) < rng.integers(1, shape[0] + 1)
  lengths = rng.integers(1, shape[0] + 1, size=(num_failures, 1))
  return logits, golden, failures, golden_mask, np.arange(shape[0]) < lengths


def _margin(logits, golden, failures, golden_mask, failure_mask):
  """l_golden - mean l_failure in float64."""
  z = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  mean = lambda tokens, mask: z[np.arange(len(z)), tokens][mask].mean()
  return mean(golden, golden_mask) - np.mean(
      [mean(*failure) for failure in zip(failures, failure_mask)])


def _contrast(logits, group, old=None, **options):
  _, golden, failures, golden_mask, failure_mask = group
  places = np.arange(len(golden))
  z = jax.nn.log_softmax(logits)
  old = jax.lax.stop_gradient(z) if old is None else jax.nn.log_softmax(old)
  return objectives.golden_contrast(
      z[places, golden], old[places, golden], z[places, failures],
      old[places, failures], golden_mask=golden_mask, failure_mask=failure_mask,
      **options)


@pytest.mark.parametrize('seed', _SEEDS)
def test_the_contrast_raises_the_margin_to_first_order(seed):
  group = _group(seed)
  logits = group[0]
  expected = np.zeros_like(logits)
  for place in np.ndindex(*logits.shape):
    step = np.zeros_like(logits)
    step[place] = 1e-5
    expected[place] = (_margin(logits + step, *group[1:])
                       - _margin(logits - step, *group[1:])) / 2e-5
  assert np.abs(expected).max() > 0.05
  gradient = jax.grad(_contrast)(logits.astype('f'), group)
  np.testing.assert_allclose(gradient, expected, atol=2e-6)
  # And a step along it does raise it.
  assert _margin(logits + 0.1 * gradient, *group[1:]) > _margin(*group)
  # The other reading pushes along the same line, less the larger the margin.
  beta, margin = 2.0, _margin(*group)
  slope = beta / (1 + np.exp(beta * margin))
  value, gradient = jax.value_and_grad(_contrast)(
      logits.astype('f'), group, contrast='logistic_margin', contrast_beta=beta)
  np.testing.assert_allclose(gradient, slope * expected, atol=5e-6)
  np.testing.assert_allclose(
      value, -np.log1p(np.exp(-beta * margin)), rtol=1e-5)


@pytest.mark.parametrize('seed', _SEEDS)
def test_the_contrast_surrogate_is_clipped_on_both_sides(seed):
  group = _group(seed)
  _, golden, failures, golden_mask, failure_mask = group
  old = group[0] + np.random.default_rng(seed).normal(size=group[0].shape)
  z, z_old = (x - np.log(np.exp(x).sum(-1, keepdims=True))
              for x in (group[0], old))

  def mean(tokens, mask, sign):
    places = np.arange(len(tokens))
    ratio = np.exp((z - z_old)[places, tokens][mask])
    return np.minimum(sign * ratio, sign * np.clip(ratio, 0.8, 1.3)).mean()
  expected = mean(golden, golden_mask, 1) + np.mean(
      [mean(*failure, -1) for failure in zip(failures, failure_mask)])
  got = _contrast(group[0].astype('f'), group, old.astype('f'),
                  clip_epsilon_high=0.3)
  np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('contrast', typing.get_args(objectives.Contrast))
def test_padding_changes_no_contrast(contrast):
  rng = np.random.default_rng(0)
  golden, failures = -rng.random(4), -rng.random((2, 5))
  golden_mask, failure_mask = np.ones(4, bool), rng.random((2, 5)) < 0.7
  term = lambda g, f, gm, fm: objectives.golden_contrast(
      g, g, f, f, contrast=contrast, golden_mask=gm, failure_mask=fm)
  whole = jax.value_and_grad(term, (0, 1))(
      golden, failures, golden_mask, failure_mask)
  nan = np.nan
  padded = jax.value_and_grad(term, (0, 1))(
      np.pad(golden, (0, 2), constant_values=nan),
      np.pad(failures, ((0, 1), (0, 3)), constant_values=nan),
      np.pad(golden_mask, (0, 2)), np.pad(failure_mask, ((0, 1), (0, 3))))
  np.testing.assert_allclose(padded[0], whole[0], rtol=1e-6)
  for got, expected in zip(padded[1], whole[1]):
    index = tuple(map(slice, expected.shape))
    np.testing.assert_allclose(got[index], expected, rtol=1e-5)
    assert np.isfinite(got).all()
    assert np.abs(got).sum() == pytest.approx(np.abs(expected).sum(), rel=1e-5)
  # Nothing to contrast with: nothing to do. And groups are independent.
  for masks in ((golden_mask, failure_mask & False),
                (golden_mask & False, failure_mask)):
    value, gradient = jax.value_and_grad(term)(golden, failures, *masks)
    assert value == 0 and not np.asarray(gradient).any()
  batch = jax.vmap(term)(*(
      np.stack([x, x[..., ::-1]]) for x in (
          golden, failures, golden_mask, failure_mask)))
  np.testing.assert_allclose(batch, [whole[0]] * 2, rtol=1e-6)


# The critic.


@pytest.mark.parametrize('seed', _SEEDS)
@pytest.mark.parametrize('value_clip', [None, 0.2])
def test_value_loss(seed, value_clip):
  values, targets, old = np.random.default_rng(seed).normal(
      size=(3, 20)).astype('f')
  got = objectives.value_loss(values, targets, old, value_clip=value_clip)
  for v, g, o, loss in zip(values, targets, old, got):
    expected = (v - g) ** 2 / 2
    if value_clip:
      near = np.clip(v, o - value_clip, o + value_clip)
      expected = max(expected, (near - g) ** 2 / 2)
    assert loss == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_the_value_clip_stops_only_moves_that_went_far_enough():
  loss = lambda v, target: objectives.value_loss(
      v, target, 0.0, value_clip=0.5)
  for value, target, moves in (
      (0.4, 2.0, True), (0.6, 2.0, False), (0.6, -2.0, True)):
    assert bool(jax.grad(loss)(value, target) != 0) == moves
  assert jax.grad(loss, argnums=1)(0.4, 2.0) == 0


def test_value_metrics_add_up_over_micro_batches():
  rng = np.random.default_rng(0)
  targets = rng.normal(size=(6, 5)).astype('f') + 100
  values = targets + 0.3 * rng.normal(size=(6, 5)).astype('f')
  mask = rng.random((6, 5)) < 0.7
  centre = targets[mask].mean()
  of = lambda rows: objectives.value_metrics(
      np.where(mask, values, np.nan)[rows], targets[rows], mask[rows], centre)
  parts = [of(slice(0, 2)), of(slice(2, 6))]
  ratio = lambda name: float(
      sum(p[name][0] for p in parts) / sum(p[name][1] for p in parts))
  error = (values - targets)[mask].astype(float)
  np.testing.assert_allclose(
      ratio('objective/value_error'), (error ** 2).mean(), rtol=1e-4)
  np.testing.assert_allclose(
      ratio('objective/explained_variance'),
      1 - (error ** 2).mean() / targets[mask].astype(float).var(), rtol=1e-4)


@pytest.mark.parametrize('call, message', [
    (lambda: objectives.kl(0.0, 0.0, 'k4'), "estimator: .*, k3; got 'k4'"),
    (lambda: objectives.reduce(
        np.ones(1), np.ones(1), np.ones(1, bool), 'token_means'),
     "reducer: .*path_weighted; got 'token_means'; did you mean token_mean"),
    (lambda: objectives.reduce(
        np.ones(1), np.ones(1), np.ones(1, bool), 'sequence_sum_norm'),
     'norm: expected a number with sequence_sum_norm'),
    (lambda: objectives.reduce(
        np.ones(1), np.ones(1), np.ones(1, bool), norm=2.0),
     'norm: .*got 2.0 with token_mean'),
    (lambda: objectives.golden_contrast(
        *[np.ones(1)] * 2, *[np.ones((1, 1))] * 2, contrast='margin'),
     'contrast: expected one of surrogate, logistic_margin; got .margin'),
    (lambda: objectives.value_loss(0.0, 0.0, value_clip=0.1),
     'value_clip needs old_values: expected the values before .* got None'),
])
def test_errors(call, message):
  with pytest.raises(ValueError, match=message):
    call()


def test_the_default_divergence_is_the_one_that_is_right_in_a_loss():
  np.testing.assert_array_equal(
      objectives.kl(-1.0, -3.0), objectives.kl(-1.0, -3.0, 'k2'))


@pytest.mark.parametrize('gap', [-60.0, -25.0, -20.0, -1.0, 1.0, 25.0, 60.0])
@pytest.mark.parametrize('estimator', objectives.KL_ESTIMATORS)
def test_kl_pulls_however_far_away(estimator, gap):
  value, slope = jax.value_and_grad(
      lambda x: objectives.kl(x, jnp.zeros(()), estimator))(jnp.float32(gap))
  back = np.exp(min(-gap, 20.0))
  expected = {
      'k1': (gap, 1), 'k2': (gap ** 2 / 2, gap),
      'k3': (back * (1 + max(-gap - 20, 0)) - 1 + gap, 1 - back)}[estimator]
  np.testing.assert_allclose((value, slope), expected, rtol=1e-5)


@pytest.mark.parametrize('bad', [np.nan, np.inf, -1.0])
def test_numbers_that_mean_nothing_are_refused(bad):
  x = jnp.zeros((1, 2))
  with pytest.raises(ValueError, match='contrast_beta: expected'):
    objectives.golden_contrast(x, x, x[None], x[None], contrast_beta=bad)
  with pytest.raises(ValueError, match='value_clip: expected'):
    objectives.value_loss(x, x, x, value_clip=bad)

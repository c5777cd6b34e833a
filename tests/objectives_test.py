"""objectives: values and gradients against what they estimate."""

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


_TERMS = {
    'surrogate': lambda lp, other, mask: objectives.clipped_surrogate(
        lp, other, other, mask=mask),
    **{name: lambda lp, other, mask, name=name: objectives.kl(
        lp, other, name, mask) for name in objectives.KL_ESTIMATORS},
    'entropy': lambda lp, other, mask: objectives.entropy_bonus(
        jnp.stack([lp, other], axis=-1), mask),
}


@pytest.mark.parametrize('name', _TERMS)
@pytest.mark.parametrize('reducer', objectives.REDUCERS)
@pytest.mark.parametrize('junk', [np.nan, np.inf, -np.inf, 1e30])
def test_masked_junk_never_leaks(name, reducer, junk):
  log_probs, other, _ = _tokens(2)
  mask = np.arange(12) % 3 > 0
  norm = 4.0 if reducer == 'sum_norm' else None

  def loss(lp, rest, weights):
    term = _TERMS[name](lp, rest, mask)
    total, denominator = objectives.reduce(
        term, weights, mask, reducer, norm)
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


def test_reducers_by_hand():
  values = np.float32([[1, 2, 9], [4, 9, 9], [9, 9, 9]])
  mask = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0]], bool)
  weights = np.float32([[1, 3, 5], [2, 5, 5], [5, 5, 5]])

  def ratio(reducer, norm=None):
    total, count = objectives.reduce(values, weights, mask, reducer, norm)
    return float(total / count)
  assert ratio('token_mean') == pytest.approx(15 / 6)
  assert ratio('sequence_mean') == pytest.approx((7 / 4 + 4) / 2)
  assert ratio('sum_norm', 10.0) == pytest.approx(1.5)


@pytest.mark.parametrize('reducer', objectives.REDUCERS)
def test_micro_batches_and_padding_change_nothing(reducer):
  rng = np.random.default_rng(0)
  values, weights = rng.random((2, 6, 5)).astype('f')
  mask = rng.random((6, 5)) < 0.5
  norm = dict(norm=3.0) if reducer == 'sum_norm' else {}
  half = {key: value / 2 for key, value in norm.items()}
  reduce = lambda rows, kwargs: np.stack(objectives.reduce(
      values[rows], weights[rows], mask[rows], reducer, **kwargs))
  whole = reduce(slice(None), norm)
  parts = reduce(slice(0, 2), half) + reduce(slice(2, 6), half)
  np.testing.assert_allclose(parts, whole, rtol=1e-6)
  padded = [np.pad(x, ((0, 2), (0, 3))) for x in (values, weights, mask)]
  np.testing.assert_allclose(
      objectives.reduce(*padded, reducer, **norm), whole, rtol=1e-6)


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


@pytest.mark.parametrize('call, message', [
    (lambda: objectives.kl(0.0, 0.0, 'k4'), "k1, k2, k3; got 'k4'"),
    (lambda: objectives.reduce(np.ones(1), np.ones(1), np.ones(1, bool), 'x'),
     "sum_norm; got 'x'"),
    (lambda: objectives.reduce(
        np.ones(1), np.ones(1), np.ones(1, bool), 'sum_norm'), 'norm: '),
    (lambda: objectives.reduce(
        np.ones(1), np.ones(1), np.ones(1, bool), norm=2.0), 'norm: '),
])
def test_errors(call, message):
  with pytest.raises(ValueError, match=message):
    call()

"""masked: equal to NumPy on the real entries, blind to the rest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpo_jax import masked

_REDUCTIONS = {
    'sum': (masked.sum, np.sum),
    'mean': (masked.mean, np.mean),
    'var': (masked.var, np.var),
    'std': (masked.std, np.std),
}


@pytest.fixture(params=range(10))
def sample(request):
  rng = np.random.default_rng(request.param)
  values = rng.normal(5, 2, (4, 9)).astype(np.float32)
  mask = rng.random((4, 9)) < 0.6
  mask[:, 0] = True
  return values, mask


@pytest.mark.parametrize('name', _REDUCTIONS)
def test_equals_numpy_on_the_subset(sample, name):
  values, mask = sample
  ours, theirs = _REDUCTIONS[name]
  expected = [theirs(v[m].astype(np.float64)) for v, m in zip(values, mask)]
  poisoned = np.where(mask, values, np.nan)
  np.testing.assert_allclose(
      ours(poisoned, mask, axis=1), expected, rtol=1e-5, atol=1e-6)
  everything = theirs(values[mask].astype(np.float64))
  np.testing.assert_allclose(ours(poisoned, mask), everything, rtol=1e-5)


@pytest.mark.parametrize('name', [*_REDUCTIONS, 'whiten'])
def test_no_nan_in_gradients(sample, name):
  values, mask = sample
  function = getattr(masked, name)
  values[0] = 3.0  # A row of equal entries: its deviation is 0.
  mask[1] = False  # A row without entries.
  poisoned = np.where(mask, values, np.nan)
  loss = lambda x: jnp.sum(function(x, mask, axis=1))
  gradient = jax.grad(loss)(poisoned)
  assert np.isfinite(loss(poisoned))
  assert np.isfinite(gradient).all()
  assert (gradient[~mask] == 0).all()


def test_variance_survives_a_large_mean():
  values = np.array([1e4, 1e4 + 1, 1e4 + 2, 7.0], np.float32)
  mask = np.array([True, True, True, False])
  np.testing.assert_allclose(masked.var(values, mask), 2 / 3, rtol=1e-5)
  np.testing.assert_allclose(masked.var(values, mask, ddof=1), 1, rtol=1e-5)


def test_whiten_zeroes_masked_entries(sample):
  values, mask = sample
  white = np.asarray(masked.whiten(values, mask, axis=1))
  assert (white[~mask] == 0).all()
  for row, real in zip(white, mask):
    np.testing.assert_allclose(row[real].mean(), 0, atol=1e-5)


def test_divide_by_zero_is_zero_with_zero_gradient():
  divide = lambda x: masked.divide(x, 0.0)
  assert divide(2.0) == 0
  assert jax.grad(divide)(2.0) == 0


def test_nothing_real_gives_zero():
  nothing = np.zeros(3, bool)
  for function in (masked.sum, masked.mean, masked.var, masked.std):
    assert function(np.full(3, np.nan, np.float32), nothing) == 0

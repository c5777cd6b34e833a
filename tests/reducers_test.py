"""The reducers of objectives: sums and denominators that add up."""

import numpy as np
import pytest

from bpo_jax import objectives

_SEEDS = range(10)
_NORMS = {'sequence_sum_norm': 4.0}
_VALUES = np.float32([[1, 2, 9], [4, 9, 9], [9, 9, 9]])
_MASK = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0]], bool)
_WEIGHTS = np.float32([[1, 3, 5], [2, 5, 5], [5, 5, 5]])


@pytest.mark.parametrize('reducer, expected, denominator', [
    ('token_mean', 15 / 6, 6),
    ('sequence_mean', (7 / 4 + 4) / 2, 2),
    ('sequence_sum_norm', (7 / 4 + 8 / 4) / 2, 8),
    ('path_weighted', 15 / (3 + 2), 5),
])
def test_reducers_by_hand(reducer, expected, denominator):
  total, count = objectives.reduce(
      _VALUES, _WEIGHTS, _MASK, reducer, _NORMS.get(reducer))
  assert float(count) == denominator
  assert float(total / count) == pytest.approx(expected)
  rows = objectives.denominators(
      _WEIGHTS, _MASK, reducer, _NORMS.get(reducer))
  assert rows.shape == (3,) and rows[2] == 0 and rows.sum() == count


@pytest.mark.parametrize('reducer', objectives.REDUCERS)
@pytest.mark.parametrize('seed', _SEEDS)
def test_micro_batches_and_padding_change_nothing(reducer, seed):
  rng = np.random.default_rng(seed)
  values, weights = rng.random((2, 6, 5)).astype('f')
  mask = rng.random((6, 5)) < 0.5
  weights[rng.random((6, 5)) < 0.2] = 0
  reduce = lambda values, weights, mask: np.stack(objectives.reduce(
      values, weights, mask, reducer, _NORMS.get(reducer)))
  part = lambda rows: reduce(values[rows], weights[rows], mask[rows])
  whole = part(slice(None))
  parts = part(slice(0, 2)) + part(slice(2, 3)) + part(slice(3, 6))
  np.testing.assert_allclose(parts, whole, rtol=1e-6)
  padded = [np.pad(x, ((0, 2), (1, 3))) for x in (values, weights, mask)]
  np.testing.assert_allclose(reduce(*padded), whole, rtol=1e-6)
  # What does not weigh is as good as masked, whatever stands there.
  junk = np.where(weights != 0, values, np.float32(np.nan))
  np.testing.assert_allclose(
      reduce(junk, weights, mask), reduce(values, weights, mask & (
          weights != 0)), rtol=1e-6)


@pytest.mark.parametrize('reducer', objectives.REDUCERS)
def test_nothing_to_reduce_is_nothing(reducer):
  total, count = objectives.reduce(
      _VALUES, _WEIGHTS, np.zeros_like(_MASK), reducer, _NORMS.get(reducer))
  assert total == 0 and count == 0


def test_path_weighted_is_the_mean_over_paths_of_their_sums():
  # Tokens 1 and 2 are shared by two paths of weight 1/2, laid out as two rows.
  values = np.float32([[1, 2, 3, 0], [1, 2, 4, 5]])
  weights = np.float32([[1, 1, .5, 0], [0, 0, .5, .5]])
  mask = np.array([[1, 1, 1, 0], [0, 0, 1, 1]], bool)
  total, count = objectives.reduce(values, weights, mask, 'path_weighted')
  assert float(total / count) == ((1 + 2 + 3) + (1 + 2 + 4 + 5)) / 2


def test_045_the_sum_of_a_row_is_multiplied_and_pads_leak():
  # Two rows of two tokens and of one, padded to four with a loss of 7 there.
  values = np.float32([[1, 3, 7, 7], [5, 7, 7, 7]])
  mask = np.array([[1, 1, 0, 0], [1, 0, 0, 0]], bool)
  total, count = objectives.reduce(
      values, np.ones((2, 4)), mask, 'sequence_mean')
  assert float(total / count) == ((1 + 3) / 2 + 5) / 2


@pytest.mark.parametrize('devices', [1, 2, 4])
def test_048_the_denominator_is_multiplied_by_the_devices(devices):
  values = np.arange(8, dtype='f').reshape(4, 2)
  ones, mask = np.ones((4, 2), 'f'), np.ones((4, 2), bool)
  parts = [objectives.reduce(v, w, m, 'sequence_mean') for v, w, m in zip(*(
      np.split(x, devices) for x in (values, ones, mask)))]
  total, count = np.sum(parts, axis=0)
  assert total / count == 3.5  # The mean of 0 to 7.


def test_049_sums_of_sequences_are_not_averaged_over_the_batch():
  # Twice the same sequence has the loss of one: (1 + 2) / 10.
  once = np.float32([[1, 2]])
  for rows in (once, np.repeat(once, 2, axis=0)):
    total, count = objectives.reduce(
        rows, np.ones_like(rows), np.ones(rows.shape, bool),
        'sequence_sum_norm', 10.0)
    assert float(total / count) == pytest.approx(0.3)

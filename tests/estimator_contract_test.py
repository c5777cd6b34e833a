"""The contract of every credit estimator.

A new estimator is one row in a table of `estimator_cases.Case`: the function,
its options and its recursive float64 oracle.
"""

import functools

import builders
import estimator_cases
import estimator_cases_steps
import estimator_cases_systems
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from bpo_jax import options as option_lib
from bpo_jax import tree as tree_lib

_CASES = {**estimator_cases.CASES, **estimator_cases_steps.CASES,
          **estimator_cases_systems.CASES}


@pytest.fixture(params=_CASES)
def case(request):
  return _CASES[request.param]


@functools.cache
def _jitted(estimator, options):
  return jax.jit(functools.partial(estimator, **dict(options)))


def _run(case, tree, arrays):
  """Returns the estimator's credit, on the host."""
  options = tuple((k, _hashable(v)) for k, v in case.options.items())
  return jax.device_get(_jitted(case.estimator, options)(tree, **arrays))


def _hashable(value):
  return tuple(value.tolist()) if isinstance(value, np.ndarray) else value


def _arrays(case, tree, seed):
  """Returns random arrays of what the case reads beside the tree."""
  rng = np.random.default_rng(seed)
  shape = {'token': np.shape(tree.tokens), 'node': np.shape(tree.parents)}
  return {name: rng.normal(size=shape[kind]).astype(np.float32)
          for name, kind in case.arrays.items()}


def _map(case, arrays, per_token, per_node):
  """Applies one function to arrays per token, another to those per node."""
  change = {'token': per_token, 'node': per_node}
  return {name: change[case.arrays[name]](x) for name, x in arrays.items()}


def _equal(got, expected, **kwargs):
  """Compares credits, or a credit with [2, B, N, T]."""
  if not isinstance(expected, np.ndarray):
    expected = np.stack([expected.advantages, expected.weights])
  np.testing.assert_allclose(
      np.stack([got.advantages, got.weights]), expected, **kwargs)


@pytest.mark.parametrize('seed, offset', [
    *((seed, 0.0) for seed in range(10)), *((seed, 1e4) for seed in range(5))])
def test_equals_the_oracle(case, seed, offset):
  """To float32, however large the returns are that all have in common."""
  tree = builders.random_trees(seed, offset=offset)
  arrays = _arrays(case, tree, seed)
  expected = case.oracle(tree, **case.options, **arrays)
  credit = _run(case, tree, arrays)
  for got, wanted in zip((credit.advantages, credit.weights), expected):
    for b, in_tree in enumerate(wanted):
      # Of returns of order 1, what cancels leaves their rounding.
      scale = max(np.abs(in_tree).max(), 0.1)
      np.testing.assert_allclose(got[b], in_tree, rtol=0, atol=1e-6 * scale)


@pytest.mark.parametrize('seed', range(3))
def test_poison_changes_nothing(case, seed):
  tree = builders.random_trees(seed)
  arrays = _arrays(case, tree, seed)
  expected = _run(case, tree, arrays)
  poisoned = _run(case, builders.poison(tree), _map(
      case, arrays,
      lambda x: np.where(tree.action_mask, x, np.float32(np.nan)),
      lambda x: np.where(tree.node_mask, x, np.float32(np.nan))))
  _equal(poisoned, expected, rtol=0)
  off = ~tree.action_mask
  assert (np.asarray(poisoned.advantages)[off] == 0).all()
  assert (np.asarray(poisoned.weights)[off] == 0).all()


def test_jit_changes_nothing(case):
  tree = builders.random_trees(0)
  arrays = _arrays(case, tree, 0)
  _equal(_run(case, tree, arrays),
         case.estimator(tree, **case.options, **arrays), rtol=1e-5, atol=1e-6)


def test_vmap_changes_nothing(case):
  tree = builders.random_trees(2)
  arrays = _arrays(case, tree, 2)
  double = lambda x: np.stack([x, x])
  both = jax.vmap(functools.partial(case.estimator, **case.options))(
      jax.tree.map(double, tree), **jax.tree.map(double, arrays))
  _equal(jax.tree.map(lambda x: x[1], both), _run(case, tree, arrays),
         rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('seed', range(3))
def test_padding_changes_nothing(case, seed):
  tree = builders.random_trees(seed)
  arrays = _arrays(case, tree, seed)
  b, n, t = tree.tokens.shape
  grown = [(0, 2), (0, 5), (0, 3)]
  padded = _run(case, builders.pad(tree, 2, 5, 3), _map(
      case, arrays, lambda x: np.pad(x, grown), lambda x: np.pad(x, grown[:2])))
  inner = jax.tree.map(lambda x: x[:b, :n, :t], padded)
  # Sums over leaves may be taken in another order.
  _equal(inner, _run(case, tree, arrays), rtol=1e-5, atol=1e-6)
  for total, part in zip(jax.tree.leaves(padded), jax.tree.leaves(inner)):
    assert np.abs(total).sum() == pytest.approx(float(np.abs(part).sum()))


def test_trees_are_independent(case):
  if not case.independent:
    pytest.skip('scales by a statistic of the batch, as its paper has it')
  tree = builders.random_trees(4)
  arrays = _arrays(case, tree, 4)
  order = np.array([2, 0, 2])
  part = _run(case, builders.take(tree, order),
              {name: x[order] for name, x in arrays.items()})
  expected = jax.tree.map(lambda x: x[order], _run(case, tree, arrays))
  _equal(part, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize('seed', range(3))
def test_permuted_siblings_permute_results(case, seed):
  tree = builders.random_trees(seed)
  arrays = _arrays(case, tree, seed)
  permuted, order = builders.permute_nodes(tree, seed)
  permuted.validate()
  move = lambda x: np.take_along_axis(
      x, order.reshape(order.shape + (1,) * (x.ndim - 2)), axis=1)
  expected = jax.tree.map(move, _run(case, tree, arrays))
  got = _run(case, permuted, _map(case, arrays, move, move))
  _equal(got, expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize('seed', range(3))
def test_equal_returns_give_exactly_zero(case, seed):
  if not case.contrast:
    pytest.skip('compares returns with something else than each other')
  tree = builders.random_trees(seed)
  leaf = np.asarray(tree_lib.is_leaf(tree))
  tree = tree.replace(rewards=np.where(leaf, np.float32(0.3), 0))
  credit = _run(case, tree, _arrays(case, tree, seed))
  assert (credit.advantages == 0).all()


def test_one_path_gives_exactly_zero(case):
  if not case.contrast:
    pytest.skip('compares returns with something else than each other')
  tree = builders.chains([[0.7]], num_trees=3, num_nodes=28, num_tokens=8)
  credit = _run(case, tree, _arrays(case, tree, 0))
  assert (credit.advantages == 0).all()


def test_no_gradient_leaks(case):
  tree = builders.random_trees(1)
  arrays = _arrays(case, tree, 1)

  def loss(rewards, entropies, log_probs, arrays):
    credit = case.estimator(
        tree.replace(rewards=rewards, entropies=entropies,
                     behaviour_log_probs=log_probs), **case.options, **arrays)
    return jnp.sum(credit.advantages ** 2) + jnp.sum(credit.weights)
  gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(
      tree.rewards, tree.entropies, tree.behaviour_log_probs, arrays)
  for gradient in jax.tree.leaves(gradients):
    assert (np.asarray(gradient) == 0).all()


@pytest.mark.parametrize('seed', range(3))
def test_weights_sum_as_stated(case, seed):
  tree = builders.random_trees(seed)
  chance = np.random.default_rng(seed).random(tree.tokens.shape)
  tree = tree.replace(
      action_mask=tree.token_mask,
      behaviour_log_probs=np.where(
          tree.token_mask, np.log(chance), 0).astype('f'))
  arrays = _arrays(case, tree, seed)
  weights = _run(case, tree, arrays).weights
  assert (weights >= 0).all() and weights.any()
  for b, root in enumerate(oracles.roots(tree)):
    if case.path_weights == 'split':
      # Every token of a leaf weighs what the leaf does; they share 1.
      leaves = {leaf.index: leaf for leaf in root.leaves if leaf.length}
      for n, leaf in leaves.items():
        np.testing.assert_allclose(
            weights[b, n, :leaf.length], oracles.split_weight(leaf), rtol=1e-6)
    else:
      stated = case.path_weights
      if isinstance(stated, str):
        total = estimator_cases.SUMS[stated](root)
      else:
        total = stated(root, **{name: x[b] for name, x in arrays.items()})
      np.testing.assert_allclose(weights[b].sum(), total, rtol=1e-5)


@pytest.mark.parametrize('shape', [(0, 4, 4), (2, 0, 4), (2, 4, 0)])
def test_a_batch_of_nothing_is_refused(case, shape):
  tree = tree_lib.empty(shape)
  with pytest.raises(ValueError, match='expected at least one tree, node'):
    case.estimator(tree, **case.options, **_arrays(case, tree, 0))


def test_a_tree_without_a_batch_axis_is_refused(case):
  tree = builders.random_trees(0)
  one = lambda x: x[0]
  arrays = {k: one(x) for k, x in _arrays(case, tree, 0).items()}
  with pytest.raises(ValueError, match=r'got \[N, T\].*bpo_jax.tree.stack'):
    case.estimator(jax.tree.map(one, tree), **case.options, **arrays)


def test_numbers_that_mean_nothing_are_refused(case):
  tree = builders.random_trees(0)
  arrays = _arrays(case, tree, 0)
  found = option_lib.of(case.estimator)
  for name, option in found.items():
    if option.annotation in (float, float | None):
      for bad in (np.nan, np.float32(np.inf), np.full(2, np.nan), '1',
                  np.array(['1'])):
        with pytest.raises(ValueError, match=f'{name}: expected'):
          case.estimator(tree, **{**case.options, name: bad}, **arrays)

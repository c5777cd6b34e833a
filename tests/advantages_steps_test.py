"""Credit by values, steps and weights: what sets each apart, by hand.

The contract that every estimator keeps is in estimator_contract_test.
"""

import functools

import advantages_test
import builders
import jax
import numpy as np
import oracles
import oracles_steps
import pytest

from bpo_jax import advantages
from bpo_jax import tree as tree_lib


@functools.cache
def _jitted(estimator, options):
  return jax.jit(functools.partial(estimator, **dict(options)))


def _run(estimator, tree, arrays=None, **options):
  """Returns estimator(tree, **arrays, **options), compiled once, on host."""
  function = _jitted(estimator, tuple(sorted(options.items())))
  return jax.device_get(function(tree, **(arrays or {})))


def _stack(*tree_builders):
  """Returns a batch of the shape that most are compiled for."""
  return tree_lib.stack(
      tree_builders, num_trees=3, num_nodes=28, num_tokens=8)


def _add(builder, parent, mask, **kwargs):
  """Adds a node of the tokens of a mask."""
  return builder.add(
      parent, range(len(mask)), action_mask=np.array(mask, bool),
      behaviour_log_probs=[-1.0] * len(mask), **kwargs)


def _rooted(anchor=-1):
  builder = tree_lib.TreeBuilder()
  return builder, builder.add(-1, [0], anchor=anchor)


def _values(tree, seed=0):
  return np.random.default_rng(seed).normal(
      size=np.shape(tree.tokens)).astype(np.float32)


# Generalised advantage estimation.


@pytest.mark.parametrize('cut', [
    [[1, 0, 1]], [[1], [0, 1]], [[1, 0], [1]], [[1], [0], [1]]])
def test_credit_crosses_observations_undecayed(cut):
  builder, node = _rooted()
  for mask in cut:
    node = _add(builder, node, mask, reward=float(mask is cut[-1]))
  tree = _stack(builder)
  credit = _run(
      advantages.ppo_gae, tree, dict(values=np.zeros(tree.tokens.shape, 'f')),
      discount=0.5, lambda_=1.0)
  np.testing.assert_allclose(
      credit.advantages[tree.action_mask], [0.5, 1.0], rtol=1e-6)


def test_gae_by_hand():
  # A prompt that pays 5, an action of two tokens, an observation that pays 3,
  # an action that pays 1.
  builder = tree_lib.TreeBuilder()
  root = builder.add(-1, [0], reward=5.0)
  node = _add(builder, root, [1, 1, 0], reward=2.0)
  node = _add(builder, node, [0, 0], reward=3.0)
  _add(builder, node, [1], reward=1.0, truncated=True)
  tree = _stack(builder)
  values = np.full(tree.tokens.shape, 1e9, 'f')  # At observations, too.
  values[tree.action_mask] = [4.0, 2.0, 0.5]
  discount, lambda_ = 0.5, 0.4
  third = 1.0 - 0.5
  second = (2.0 + 3.0 + discount * 0.5 - 2.0) + discount * lambda_ * third
  first = (discount * 2.0 - 4.0) + discount * lambda_ * second
  options = dict(discount=discount, lambda_=lambda_)
  credit = _run(advantages.ppo_gae, tree, dict(values=values), **options)
  np.testing.assert_allclose(
      credit.advantages[tree.action_mask], [first, second, third], rtol=1e-6)
  targets = _run(
      advantages.lambda_returns, tree, dict(values=values), **options)
  np.testing.assert_allclose(
      targets[tree.action_mask], [first + 4, second + 2, third + 0.5],
      rtol=1e-6)
  assert (targets[~tree.action_mask] == 0).all()


def test_a_branching_averages_over_leaves_or_over_children():
  # One prefix token; two children, of which the second has two leaves.
  builder, root = _rooted()
  stem = _add(builder, root, [1])
  _add(builder, stem, [1], reward=1.0)
  fork = _add(builder, stem, [0], birth=1)  # Its own leaves act.
  _add(builder, fork, [1], reward=4.0, birth=1)
  _add(builder, fork, [1], reward=10.0, birth=2)
  tree = _stack(builder)
  values = np.zeros(tree.tokens.shape, 'f')
  values[0, [2, 4, 5], 0] = [0.5, 2.0, 3.0]
  own = [1.0 - 0.5, 4.0 - 2.0, 10.0 - 3.0]
  for estimator, odds, stem_weight, weights in (
      (advantages.ppo_gae, [1 / 3, 1 / 3, 1 / 3], 3.0, [1.0, 1.0, 1.0]),
      (advantages.tree_gae, [1 / 2, 1 / 4, 1 / 4], 1.0, [1 / 2, 1 / 4, 1 / 4])):
    prefix = np.dot(odds, [0.5, 2.0, 3.0]) + 0.3 * np.dot(odds, own)
    credit = _run(estimator, tree, dict(values=values), lambda_=0.3)
    np.testing.assert_allclose(
        credit.advantages[0, [1, 2, 4, 5], 0], [prefix, *own], rtol=1e-6)
    np.testing.assert_allclose(
        credit.weights[0, [1, 2, 4, 5], 0], [stem_weight, *weights], rtol=1e-6)


@pytest.mark.parametrize('seed', range(3))
def test_targets_are_returns_at_lambda_one(seed):
  tree = builders.random_trees(seed)
  values = dict(values=_values(tree))
  targets = _run(advantages.lambda_returns, tree, values, lambda_=1.0)
  no_values = oracles_steps.ppo_gae(
      tree, np.zeros(tree.tokens.shape), 1.0, 1.0)[0]
  np.testing.assert_allclose(targets, no_values, rtol=1e-4, atol=1e-5)
  split = _run(advantages.lambda_returns, tree, values, lambda_=1.0,
               node_weighting='split')
  no_values = oracles_steps.tree_gae(
      tree, np.zeros(tree.tokens.shape), 1.0, 1.0)[0]
  np.testing.assert_allclose(split, no_values, rtol=1e-4, atol=1e-5)


def test_targets_carry_no_gradient():
  tree = builders.random_trees(0)
  gradient = jax.grad(
      lambda values: advantages.lambda_returns(tree, values).sum())(
          _values(tree))
  assert (np.asarray(gradient) == 0).all()


# Exact gradients of an enumerable task.


@pytest.fixture(scope='module')
def task():
  return advantages_test._Task(seed=2)


@pytest.fixture(scope='module')
def causal_trees(task):
  return task.forked(task.backbones(2), advantages_test._CAUSAL, 2)


def _state_values(task, trees, error=0.0):
  """Returns the exact value before every token [B, N, 1], plus an error."""
  shape = tree_lib.stack(
      [builder for _, builder, _ in trees]).tokens.shape
  values, rng = np.zeros(shape, 'f'), np.random.default_rng(0)
  wrong = {h: error * rng.normal() for h in task.state}
  for i, (_, _, nodes) in enumerate(trees):
    for node, history, _ in nodes:
      values[i, node, 0] = wrong[history] + sum(
          p * task.rewards[history + rest]
          for p, rest in task.suffixes(history))
  return values


def _bias(task, trees, estimator, num_paths=1, error=0.0, **options):
  """Largest error of the expected step, exactly summed over all trees."""
  step = functools.partial(
      estimator, values=_state_values(task, trees, error), **options)
  expected = task.expected(trees, step) / num_paths
  return np.abs(expected - task.gradient()).max()


@pytest.mark.parametrize('lambda_', [0.0, 0.5, 1.0])
def test_gae_is_unbiased_with_true_values(task, causal_trees, lambda_):
  trees = task.backbones(1)
  assert _bias(task, trees, advantages.ppo_gae, lambda_=lambda_) < 1e-6
  assert _bias(
      task, causal_trees, advantages.tree_gae, lambda_=lambda_) < 1e-6


def test_gae_is_unbiased_with_wrong_values_at_lambda_one(task, causal_trees):
  trees = task.backbones(1)
  for estimator, trees in ((advantages.ppo_gae, trees),
                           (advantages.tree_gae, causal_trees)):
    assert _bias(task, trees, estimator, error=1.0, lambda_=1.0) < 1e-6
    assert _bias(task, trees, estimator, error=1.0, lambda_=0.5) > 0.01


def test_leaf_counts_overweight_what_is_downstream(task, causal_trees):
  # Each of the two backbones weighs what it and its forks do.
  assert _bias(
      task, causal_trees, advantages.ppo_gae, num_paths=2, lambda_=1.0) > 0.02


@pytest.mark.parametrize('node_values', ['own', 'split_mean'])
def test_vineppo_is_unbiased_under_causal_selection(
    task, causal_trees, node_values):
  def estimator(tree, values):
    del values
    return advantages.vineppo(tree, node_values=node_values)
  assert any(len(builder) > 7 for _, builder, _ in causal_trees)
  assert _bias(task, causal_trees, estimator, num_paths=2) < 1e-6


# VinePPO.


def test_vineppo_by_hand():
  # Two trajectories; the first is forked twice before its second action, of
  # which one fork is forked again, and once before its third.
  builder, root = _rooted()
  first = _add(builder, root, [1])
  second = _add(builder, first, [1])
  third = _add(builder, second, [1], reward=8.0)
  other = _add(builder, root, [1], reward=1.0)
  fork = _add(builder, first, [1], birth=1)
  end = _add(builder, fork, [1], reward=2.0, birth=1)
  again = _add(builder, fork, [1], reward=4.0, birth=2)
  fork_2 = _add(builder, first, [1], reward=6.0, birth=1)
  late = _add(builder, second, [1], reward=3.0, birth=1)
  tree = _stack(builder)
  credit = _run(advantages.vineppo, tree)
  # Of the forks, the first is worth its own continuation, 2.
  value = {first: 1.0, other: 8.0, second: (2 + 6) / 2, third: 3.0}
  expected = {first: value[second] - value[first],
              second: value[third] - value[second],
              third: 8.0 - value[third], other: 1.0 - value[other]}
  for node, advantage in expected.items():
    np.testing.assert_allclose(credit.advantages[0, node, 0], advantage)
    assert credit.weights[0, node, 0] == 1
  for node in (fork, end, again, fork_2, late):
    assert credit.weights[0, node, 0] == credit.advantages[0, node, 0] == 0
  # Told by all that came of it, the first fork is worth (2 + 4) / 2.
  mean = _run(advantages.vineppo, tree, node_values='split_mean')
  np.testing.assert_allclose(mean.advantages[0, third, 0], 5.0)
  np.testing.assert_allclose(
      mean.advantages[0, second, 0], 3.0 - (3 + 6) / 2)


def test_vineppo_has_no_value_before_the_first_branch_point():
  builder, root = _rooted()
  prefix = _add(builder, root, [1])
  _add(builder, prefix, [1], reward=1.0)
  _add(builder, prefix, [1], reward=0.0, birth=1)
  credit = _run(advantages.vineppo, _stack(builder))
  np.testing.assert_array_equal(credit.advantages[0, 1:4, 0], [0, 1, 0])
  np.testing.assert_array_equal(credit.weights[0, 1:4, 0], [1, 1, 0])


# Group-relative.


def test_dr_grpo_by_hand():
  builder, root = _rooted()
  for reward, length in ((1.0, 1), (0.0, 3), (0.5, 2)):
    _add(builder, root, [1] * length, reward=reward)
  tree = _stack(builder)
  credit = _run(advantages.dr_grpo, tree)
  np.testing.assert_allclose(
      credit.advantages[tree.action_mask], [0.5, -0.5, -0.5, -0.5, 0, 0])
  np.testing.assert_array_equal(credit.weights, tree.action_mask)


@pytest.mark.parametrize('estimator', [advantages.grpo, advantages.dr_grpo])
def test_groups_without_variance_are_kept_or_dropped_whole(estimator):
  tree = builders.chains([[1.0, 1.0, 1.0], [1.0, 0.0, 1.0], [0.3]])
  keep = _run(estimator, tree)
  drop = _run(estimator, tree, zero_variance='drop')
  np.testing.assert_array_equal(keep.advantages, drop.advantages)
  np.testing.assert_array_equal(keep.weights, tree.action_mask)
  # Also in the mixed group, those of its trajectories that are alike stay.
  np.testing.assert_array_equal(drop.weights[1], keep.weights[1])
  assert (drop.weights[[0, 2]] == 0).all()


def test_returns_equal_but_for_rounding_are_dropped():
  builder, root = _rooted()
  for rewards in ((0.1, 0.2, 0.3), (0.3, 0.2, 0.1), (0.6, 0.0, 0.0)):
    node = root
    for reward in rewards:
      node = _add(builder, node, [1], reward=reward)
  tree = _stack(builder)
  assert (_run(advantages.grpo, tree, zero_variance='drop').weights == 0).all()
  assert np.abs(_run(advantages.dr_grpo, tree).advantages).max() < 1e-6


# GiGPO.


def _revisited():
  """Two trajectories that meet: states 7 and 3, then 7 again."""
  builder, root = _rooted(anchor=7)
  node = _add(builder, root, [1, 0], anchor=3)
  _add(builder, node, [1], reward=1.0)
  node = _add(builder, root, [1, 1, 0], anchor=3)
  node = _add(builder, node, [1, 1, 1], anchor=7)
  _add(builder, node, [1])
  return _stack(builder)


def test_gigpo_by_hand():
  # Returns of the steps, halved a step: from 7 0.5, 0, 0; from 3 1, 0.
  # The leaves vote once each, 1 and 0, however many steps they took.
  expected = [0.5 + 1 / 3, 0.5 + 1 / 2, -0.5 - 1 / 6, -0.5 - 1 / 2,
              -0.5 - 1 / 6]
  credit = _run(advantages.gigpo, _revisited(), scale='none', discount=0.5)
  np.testing.assert_allclose(credit.advantages[0, 1:6, 0], expected, rtol=1e-6)


def test_gigpo_discounts_first_and_normalises_then():
  credit = _run(advantages.gigpo, _revisited(), discount=0.5)
  half, spread = 1 / np.sqrt(2), np.std([0.5, 0, 0], ddof=1)
  expected = [half + 1 / 3 / spread, 2 * half, -half - 1 / 6 / spread,
              -2 * half, -half - 1 / 6 / spread]
  np.testing.assert_allclose(credit.advantages[0, 1:6, 0], expected, rtol=1e-4)


def test_gigpo_counts_a_shared_step_once_and_a_lone_one_not():
  # Forks after the first step; another trajectory from the same state.
  builder, root = _rooted(anchor=2)
  shared = _add(builder, root, [1], anchor=4)
  for birth, reward in enumerate((3.0, 0.0, 0.0)):
    _add(builder, shared, [1], reward=reward, birth=birth)
  _add(builder, root, [1], reward=3.0, anchor=5)
  tree = _stack(builder)
  step = (_run(advantages.gigpo, tree, scale='none', discount=1.0).advantages
          - _run(advantages.dr_grpo, tree).advantages)[0, 1:6, 0]
  # From 2: the mean 1 of three leaves against 3; from 4: 3, 0, 0.
  np.testing.assert_allclose(step, [-1, 2, -1, -1, 1], atol=1e-6)
  unlike = tree.replace(anchor=np.full_like(tree.anchor, -1))
  np.testing.assert_array_equal(
      _run(advantages.gigpo, unlike).advantages,
      _run(advantages.grpo, unlike).advantages)


@pytest.mark.parametrize('seed', range(3))
def test_gigpo_without_steps_is_grpo(seed):
  tree = builders.random_trees(seed)
  got = _run(advantages.gigpo, tree, omega=0.0)
  expected = _run(advantages.grpo, tree)
  np.testing.assert_allclose(got.advantages, expected.advantages, rtol=1e-6)
  np.testing.assert_array_equal(got.weights, expected.weights)


@pytest.mark.parametrize('scale', ['std', 'none'])
@pytest.mark.parametrize('discount', [0.95, 0.0])
@pytest.mark.parametrize('seed', range(5))
def test_gigpo_keeps_its_digits_far_from_zero(seed, discount, scale):
  tree = builders.random_trees(seed, offset=1e4)
  options = dict(discount=discount, scale=scale)
  expected, _ = oracles_steps.gigpo(tree, **options)
  got = _run(advantages.gigpo, tree, **options).advantages
  np.testing.assert_allclose(
      got, expected, rtol=1e-6, atol=2e-6 * np.abs(expected).max())


# iStar.


def test_istar_by_hand():
  # Steps of rewards 3, 0 and 0, the first from two tokens around another.
  builder, root = _rooted()
  node = _add(builder, root, [1, 0, 1])
  _add(builder, node, [1], reward=1.0)
  _add(builder, root, [1])
  tree = _stack(builder)
  rewards = np.full(tree.tokens.shape, np.nan, 'f')
  rewards[0, 1, :3] = [1.0, np.nan, 2.0]
  rewards[0, 2:4, 0] = 0.0
  credit = _run(advantages.istar, tree, dict(implicit_rewards=rewards),
                alpha=0.1, episode='rloo')
  step = 0.1 * np.array([2, -1, -1]) / np.std([3, 0, 0], ddof=1)
  np.testing.assert_allclose(
      credit.advantages[0, 1:4, 0], [1, 1, -1] + step, rtol=1e-5)
  # A step's own reward does not reach the steps before it.
  np.testing.assert_allclose(
      credit.advantages[0, 1, [0, 2]], 1 + step[0], rtol=1e-5)


def test_istar_of_equal_steps_is_its_episode():
  tree = builders.random_trees(1)
  first = tree.action_mask & (tree.action_mask.cumsum(-1) == 1)
  rewards = np.where(first, np.float32(0.1), 0)
  got = _run(advantages.istar, tree, dict(implicit_rewards=rewards))
  expected = _run(advantages.grpo, tree).advantages
  assert np.abs(expected).max() > 0.1
  np.testing.assert_allclose(got.advantages, expected, rtol=1e-6)


# IAPO.


@pytest.mark.parametrize('entropy_share', [0.0, 0.3, 1.0])
def test_iapo_conserves_mass_and_sign_on_a_path(entropy_share):
  rng = np.random.default_rng(0)
  builder, root = _rooted()
  for length in (1, 4, 3):
    node = root
    for _ in range(length):
      node = builder.add(
          node, range(3), action_mask=[True, False, True],
          behaviour_log_probs=[-1.0] * 3, entropies=rng.random(3) ** 4,
          reward=float(rng.normal()))
  tree = _stack(builder)
  credit = _run(advantages.iapo, tree, entropy_share=entropy_share)
  plain = _run(advantages.grpo, tree).advantages
  factor = np.divide(credit.advantages, plain, where=tree.action_mask,
                     out=np.zeros(plain.shape, 'f'))
  for leaf in oracles.roots(tree)[0].leaves:
    path = [(n.index, t) for n, t in oracles_steps.action_tokens(leaf)]
    weights = np.array([factor[0, n, t] for n, t in path])
    entropies = np.array([tree.entropies[0, n, t] for n, t in path])
    np.testing.assert_allclose(weights.mean(), 1, rtol=1e-5)
    assert (weights >= 0).all()
    order = np.argsort(entropies)
    assert (np.diff(weights[order]) >= -1e-5).all()
    assert (np.ptp(weights) > 0.1) == (entropy_share > 0)
  np.testing.assert_allclose(
      weights.min(), 1 - entropy_share, atol=0.2)


@pytest.mark.parametrize('weighting', ['token', 'sequence'])
@pytest.mark.parametrize('seed', range(3))
def test_iapo_conserves_the_mass_of_a_tree(seed, weighting):
  tree = builders.random_trees(seed)
  got, plain = (_run(estimator, tree, path_weighting=weighting)
                for estimator in (advantages.iapo, advantages.grpo))
  np.testing.assert_array_equal(got.weights, plain.weights)
  mass = [np.sum(c.advantages * c.weights, axis=(1, 2))
          for c in (got, plain)]
  np.testing.assert_allclose(*mass, atol=1e-4)


def test_iapo_without_entropy_is_grpo():
  tree = builders.random_trees(0)
  tree = tree.replace(entropies=np.zeros_like(tree.entropies))
  np.testing.assert_allclose(
      _run(advantages.iapo, tree).advantages,
      _run(advantages.grpo, tree).advantages, rtol=1e-6)


# Bad input.


@pytest.mark.parametrize('name, estimator', [
    ('values', advantages.ppo_gae), ('values', advantages.tree_gae),
    ('implicit_rewards', advantages.istar)])
def test_what_is_needed_and_not_given_is_an_error(name, estimator):
  tree = builders.random_trees(0)
  with pytest.raises(ValueError, match=(
      rf'{estimator.__name__} needs {name}: .*\(3, 28, 8\), got None')):
    estimator(tree)
  with pytest.raises(ValueError, match=(
      rf'{estimator.__name__}: {name}: .*\(3, 28, 8\), got shape \(3, 28\)')):
    estimator(tree, **{name: np.zeros((3, 28))})


@pytest.mark.parametrize('function, options', [
    (advantages.grpo, dict(zero_variance='filter')),
    (advantages.dr_grpo, dict(zero_variance='filter')),
    (advantages.vineppo, dict(node_values='mean')),
    (advantages.gigpo, dict(scale='sd')),
    (advantages.iapo, dict(path_weighting='tokens')),
    (functools.partial(advantages.istar, implicit_rewards=np.zeros((3, 28, 8))),
     dict(episode='bpo')),
    (lambda tree, **options: advantages.lambda_returns(
        tree, np.zeros((3, 28, 8)), **options), dict(node_weighting='leaf')),
])
def test_unknown_options_are_errors(function, options):
  value, = options.values()
  with pytest.raises(ValueError, match=f'expected one of .*got {value!r}'):
    function(builders.random_trees(0), **options)


@pytest.mark.parametrize('share', [-0.1, 1.5, float('nan')])
def test_a_share_beyond_one_is_an_error(share):
  with pytest.raises(ValueError, match=f'from 0 to 1, got {share}'):
    advantages.iapo(builders.random_trees(0), entropy_share=share)

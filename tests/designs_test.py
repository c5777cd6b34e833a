"""designs: predicted ratios against exact noise, and the right calls."""

import dataclasses
import functools

import forked_trees
import jax
import numpy as np
import pytest

from bpo_jax import advantages
from bpo_jax import designs
from bpo_jax import types
from bpo_jax import variance
from experiments import enumerable
from experiments import exact_noise

_HORIZON = forked_trees.HORIZON
_by_step = forked_trees.by_step
_forked = forked_trees.forked


def _exact(task, step):
  """Returns the arguments of variance_ratio for a branch before a step."""
  square = (1 - (task.policy ** 2).sum(1)) * ~task.terminal
  ahead = np.zeros(task.num_states)
  for state in np.flatnonzero(~task.terminal)[::-1]:
    after = task.policy[state] @ ahead[task.next_states[state]]
    ahead[state] = square[state] + after
  at = task.visits * (task.depth == step)
  within, information = at @ task.variances, at @ ahead
  joint = at @ (task.variances * ahead)
  openness = joint / (within * information) if within > 0 else 1.0
  return dict(
      within=[within / task.return_variance], openness=[openness],
      remaining=[at @ task.remaining / task.remaining[0]],
      information=[information / ahead[0]])


def test_no_branching_is_what_it_is_compared_with():
  assert designs.variance_ratio(
      [], [], num_siblings=2, num_backbones=5) == pytest.approx(1)
  # A fork at the root with all trust in the group above is a fresh rollout.
  many = designs.variance_ratio(
      [1.0], [1.0], num_siblings=2, num_backbones=10 ** 6, rho=0.0)
  assert many == pytest.approx(1, rel=1e-5)


def test_theorem_4_3_is_a_special_case():
  """One step of no length, branched from: its advantage has f K / (K - 1)."""
  within, k, n = 0.4, 4, 10 ** 6
  ratio = designs.variance_ratio(
      [within], [0.0], [1.0], num_siblings=k, num_backbones=n, rho=1.0)
  assert ratio == pytest.approx(within * k / (k - 1) / k, rel=1e-4)


@pytest.mark.parametrize('name', list(enumerable.TASKS))
@pytest.mark.parametrize('num_siblings', [2, 3, 4])
def test_predicted_ratio_is_near_the_exact_one(name, num_siblings):
  task, n = enumerable.make(name), 4
  fresh = exact_noise.branching_noise(task, 16)[0] * 15
  exact, predicted = [], []
  for step in range(1, _HORIZON):
    noise, steps = exact_noise.branching_noise(task, n, step, num_siblings)
    exact.append(noise * (steps / task.remaining[0] - 1) / fresh)
    predicted.append(designs.variance_ratio(
        **_exact(task, step), num_siblings=num_siblings, num_backbones=n,
        rho=1.0))
  print(name, num_siblings, np.round(exact, 3), np.round(predicted, 3))
  # The mean gradient, which is left out, is an eighth of the noise in 'late'.
  np.testing.assert_allclose(predicted, exact, rtol=0.15)
  assert np.all(np.array(predicted) < np.array(exact) * 1.01)


@pytest.mark.slow
@pytest.mark.parametrize('rho', [0.5, 1.0, (0.0, 0.9, 0.2)])
def test_predicted_ratio_of_several_points_is_near_the_measured(rho):
  task, rng = enumerable.make('decided'), np.random.default_rng(0)
  n, size = 4, 4096
  forest = enumerable.backbones(task, rng, size, n)
  steps = (3, 7)
  depth = task.depth[forest.states_before]
  acts = forest.tree.action_mask[..., 0]
  node = np.concatenate([
      np.nonzero(acts & (depth == step))[1].reshape(size, n)
      for step in steps], axis=1)
  plan = types.BranchPlan(node=node, offset=np.zeros_like(node),
                          count=np.ones_like(node))
  forest = enumerable.fork(forest, plan, rng)
  credit = jax.device_get(jax.jit(functools.partial(
      advantages.bpo_rb, rho=rho))(forest.tree))
  noise = enumerable.gradient(forest, credit).var(0, ddof=1).sum()
  cost = forest.num_steps.mean() / task.remaining[0]
  fresh = exact_noise.branching_noise(task, 16)[0] * 15 / (cost - 1)
  each = [_exact(task, step) for step in steps]
  predicted = designs.variance_ratio(
      *([x for e in each for x in e[name]] for name in (
          'within', 'remaining', 'information', 'openness')),
      num_siblings=2, num_backbones=n, rho=rho)
  print(rho, noise / fresh, predicted)
  np.testing.assert_allclose(predicted, noise / fresh, rtol=0.1)


def test_a_rho_for_each_level_is_that_of_its_branch_points():
  ratio = lambda rho, num_points=2: designs.variance_ratio(
      [0.5, 0.3][:num_points], [0.6, 0.2][:num_points], num_siblings=3,
      num_backbones=4, rho=rho)
  assert ratio((0.9, 0.3), 1) == ratio(0.3, 1)
  assert ratio((0.9, 0.3)) == ratio(0.3)  # The last holds for all beyond.
  assert len({ratio(rho) for rho in (0.3, 0.8, (0, 0.3, 0.8), (0, 0.8, 0.3))}
             ) == 4


@pytest.fixture(scope='module')
def reports():
  rng = np.random.default_rng(5)
  return {name: _by_step(_forked(enumerable.make(name), rng, 256).tree)
          for name in enumerable.TASKS}


def test_recommends_branching_late_where_it_pays(reports):
  found = designs.recommend(reports['late'], 16)
  assert found.points_per_backbone >= 1 and found.num_siblings >= 2
  assert min(found.depths) >= 7
  assert found.worst_ratio >= found.ratio and found.ratio < 0.85
  assert found.cost <= 16
  # It pays indeed.
  if found.points_per_backbone == 1:
    task = enumerable.make('late')
    noise, steps = exact_noise.branching_noise(
        task, found.num_backbones, found.depths[0], found.num_siblings)
    fresh, fresh_steps = exact_noise.branching_noise(task, 16)
    assert noise * steps < 0.9 * fresh * fresh_steps


def test_recommends_fresh_rollouts_where_branching_does_not_pay(reports):
  found = designs.recommend(reports['early'], 16)
  assert dataclasses.astuple(found)[:4] == (1, 0, 16, ())
  assert found.ratio == 1.0 and found.cost == 16


def test_recommends_branching_where_siblings_show_that_nothing_matters(reports):
  found = designs.recommend(reports['decided'], 16)
  assert found.points_per_backbone >= 1 and found.ratio < 0.8


def test_recommendations_keep_to_the_budget(reports):
  for budget in (1, 2, 3, 5.5, 9, 40):
    found = designs.recommend(reports['late'], budget)
    assert found.cost <= budget
    assert found.num_backbones >= 1
  assert designs.recommend(reports['late'], 2).points_per_backbone == 0


def test_wrong_budgets_and_sizes_are_errors(reports):
  with pytest.raises(ValueError, match='num_rollouts: expected at least 1'):
    designs.recommend(reports['late'], 0.5)
  with pytest.raises(ValueError, match='max_siblings: expected at least 2'):
    designs.recommend(reports['late'], 8, max_siblings=1)
  with pytest.raises(ValueError, match='num_siblings: expected at least 2'):
    designs.variance_ratio([], [], num_siblings=1, num_backbones=2)
  with pytest.raises(ValueError, match='num_backbones: expected at least 2'):
    designs.variance_ratio([], [], num_siblings=2, num_backbones=1)
  with pytest.raises(ValueError, match='expected one entry a branch point'):
    designs.variance_ratio([0.5], [], num_siblings=2, num_backbones=2)


@pytest.mark.parametrize('field', ['share', 'lower', 'upper'])
def test_an_interval_that_is_not_known_recommends_no_forks(field):
  task = enumerable.make('late')
  found = _by_step(_forked(
      task, np.random.default_rng(1), 256, chance=0.3).tree)
  assert designs.recommend(found, 16).points_per_backbone > 0
  unknown = np.full(_HORIZON, np.nan, np.float32)
  found = found.replace(by_depth=found.by_depth.replace(**{field: unknown}))
  assert designs.recommend(found, 16).points_per_backbone == 0


@pytest.mark.parametrize('bad', [np.nan, np.inf, -0.5, np.float32(7), [0.5, 2]])
def test_numbers_that_mean_nothing_are_refused(bad):
  with pytest.raises(ValueError, match='rho: expected a number from 0 to 1'):
    designs.variance_ratio(
        [0.5], [0.5], num_siblings=2, num_backbones=2, rho=bad)
  with pytest.raises(ValueError, match='within: expected a finite number'):
    designs.variance_ratio(
        [np.nan], [0.5], num_siblings=2, num_backbones=2)
  found = variance.report_of(variance.init())
  for budget in (np.inf, np.nan, 2.0 ** 40):
    with pytest.raises(ValueError, match='num_rollouts: expected'):
      designs.recommend(found, budget)


def test_a_recommendation_becomes_arrays(reports):
  chosen = designs.recommend(reports['late'], 16)
  design = designs.to_arrays(chosen, reports['late'])
  assert design.num_siblings == chosen.num_siblings
  assert tuple(np.flatnonzero(design.bins)) == chosen.depths
  np.testing.assert_allclose(
      design.costs, 1 - np.arange(_HORIZON) / _HORIZON, rtol=1e-5)

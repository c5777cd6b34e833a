"""adaptive: the right call on known tasks, a kept budget, and no bias."""

import dataclasses
import functools

import builders
import jax
import numpy as np
import oracles_branching as slow
import pytest

from bpo_jax import advantages
from bpo_jax import branching
from bpo_jax import tree as tree_lib
from bpo_jax.branching import depths
from experiments import enumerable
from experiments import exact_noise
from experiments import theory_claims
from experiments import theory_methods

_jitted = jax.jit(branching.adaptive, static_argnames=(
    'num_rollouts', 'num_branch_points', 'explore'))
_bpo_rb = jax.jit(advantages.bpo_rb)


def _adaptive(tree, seed=0, **kwargs):
  return jax.device_get(_jitted(tree, key=jax.random.key(seed), **kwargs))


def _design(num_siblings, bins, costs, depth_width=1):
  """Returns the design of recommended bins, by their indices."""
  mask = np.isin(np.arange(len(costs)), bins)
  return depths.Design(
      num_siblings=np.int32(num_siblings), bins=mask,
      costs=np.array(costs, np.float32), depth_width=np.int32(depth_width))


_ragged = functools.partial(
    builders.random_trees, make=builders.random_trajectories)


def _slots(plan, b):
  columns = (plan.node[b, :-1], plan.offset[b, :-1], plan.count[b, :-1])
  return [tuple(map(int, slot)) for slot in zip(*columns) if slot[2]]


@pytest.mark.parametrize('seed', range(10))
@pytest.mark.parametrize('num_rollouts, num_branch_points', [
    (7, 32), (16, 32), (7, 2)])
def test_takes_what_a_slow_oracle_takes(seed, num_rollouts, num_branch_points):
  tree = _ragged(seed)
  rng = np.random.default_rng(seed)
  bins = rng.choice(np.arange(1, 12), 2, replace=False)
  design = _design(
      rng.integers(2, 4), bins, np.sort(rng.random(12))[::-1].round(3))
  plan = _adaptive(tree, design=design, num_rollouts=num_rollouts, explore=0.0,
                   num_branch_points=num_branch_points)
  expected = slow.adaptive(tree, design, num_rollouts, num_branch_points)
  for b, (slots, budget) in enumerate(expected):
    columns = plan.node[b], plan.offset[b], plan.count[b]
    assert [slot for slot in zip(*columns) if slot[2]] == slots
    assert plan.unspent[b] == budget - plan.count[b].sum()


@pytest.mark.parametrize('seed', range(10))
def test_the_budget_is_kept_at_every_stage(seed):
  task = enumerable.random_task(0, horizon=6)
  costs = 1 - np.arange(6) / 6
  rng = np.random.default_rng(seed)
  design = _design(rng.integers(1, 5), rng.choice([1, 2, 3, 4, 5], 2), costs)
  budget = (7, 20)[seed % 2]  # Each is compiled anew.
  forest = enumerable.backbones(task, rng, 8, 4)
  for stage in range(3):
    plan = _adaptive(forest.tree, 3 * seed + stage, design=design, explore=0.2,
                     num_rollouts=budget)
    assert (plan.unspent >= 0).all()
    assert ((plan.node >= 0) == (plan.count > 0)).all()
    if (plan.count > 0).any():
      forest = enumerable.pad(enumerable.fork(forest, plan, rng), 128)
  assert (forest.num_steps <= 6 * budget + 1e-3).all()
  # Forks end at the first that is too dear, an explorer's with it; where none
  # is, a part of a rollout is left, and of what explorers might have had.
  dearest = int(design.num_siblings) * design.costs[design.bins].max()
  assert (forest.num_steps > 6 * (budget - max(dearest, 1 + 0.2 * budget))
          ).all()
  assert not plan.count.any()  # Nothing is left to do.


def test_it_first_lays_trajectories_and_then_forks_all_of_them():
  task, rng = enumerable.make('late'), np.random.default_rng(0)
  design = _design(4, [9], 1 - np.arange(12) / 12)
  forest = enumerable.backbones(task, rng, 4, 4)
  plan = _adaptive(forest.tree, design=design, explore=0.0)
  assert (plan.count[:, -1] == 5).all() and not plan.count[:, :-1].any()
  forest = enumerable.fork(forest, plan, rng)
  plan = _adaptive(forest.tree, 1, design=design, explore=0.0)
  assert ((plan.count > 0).sum(1) == 9).all() and (plan.count <= 3).all()
  forest = enumerable.fork(forest, plan, rng)
  assert ((forest.tree.parents == 0).sum(1) == 9).all()
  assert (forest.num_steps == 9 * 12 + 27 * 3).all()
  plan = _adaptive(enumerable.pad(forest, 64).tree, 2, design=design)
  assert not plan.count.any() and not plan.unspent.any()


@pytest.mark.parametrize('design', [
    None, depths.unknown(), _design(1, [], np.ones(8)),
    _design(4, [], np.ones(8))])
def test_no_branch_point_recommended_is_all_fresh(design):
  tree = _ragged(0)
  plan = _adaptive(tree, design=design, explore=0.0, num_rollouts=10)
  heads = (tree.parents == 0).sum(1)
  np.testing.assert_array_equal(plan.count[:, -1], 10 - heads)
  assert not plan.count[:, :-1].any()


def test_depths_are_drawn_from_a_bin_and_explorers_from_all():
  task, rng = enumerable.make('late'), np.random.default_rng(0)
  forest = enumerable.backbones(task, rng, 256, 8)
  depth = task.depth[forest.states_before]
  at = lambda plan: [
      sorted(depth[b, n] for n, _, _ in _slots(plan, b)) for b in range(256)]
  design = _design(3, [1], np.ones(3), depth_width=4)
  found = at(_adaptive(forest.tree, design=design, explore=0.0))
  assert {len(row) for row in found} == {4}  # Of (16 - 8) / 2.
  assert set(sum(found, [])) == {4, 5, 6, 7}
  design = _design(1, [], np.full(3, 0.5), depth_width=4)
  found = at(_adaptive(forest.tree, design=design, explore=0.5,
                       num_rollouts=10))
  assert set(sum(found, [])) == set(range(1, 12))


def test_a_part_of_an_explorer_is_a_coin():
  task, rng = enumerable.make('late'), np.random.default_rng(0)
  forest = enumerable.backbones(task, rng, 512, 8)
  plan = _adaptive(forest.tree, explore=0.1, num_rollouts=9,
                   design=_design(1, [], np.full(12, 0.5)))
  explorers = (plan.count > 0).sum(1)
  assert set(explorers) == {1, 2} and abs(explorers.mean() - 1.8) < 0.1


def test_states_that_are_not_open_are_not_forked():
  task, rng = enumerable.make('late'), np.random.default_rng(0)
  forest = enumerable.backbones(task, rng, 64, 11)
  is_open = task.variances[forest.states_before] > 0.1
  plan = _adaptive(forest.tree, explore=0.0, open_mask=is_open,
                   design=_design(3, [9], 1 - np.arange(12) / 12))
  nodes = [n for b in range(64) for n, _, _ in _slots(plan, b)]
  assert nodes
  for b in range(64):
    assert all(is_open[b, n] for n, _, _ in _slots(plan, b))


_EXPLORING = dict(design=_design(3, [1, 3], np.linspace(1, 0.3, 8)),
                  explore=0.2)


def _plans_equal(got, expected):
  for name in ('node', 'offset', 'count', 'unspent'):
    np.testing.assert_array_equal(
        getattr(got, name)[:3], getattr(expected, name))


@pytest.mark.parametrize('num_rollouts', [7, 20])
def test_padding_and_unread_numbers_change_nothing(num_rollouts):
  for seed in range(3):
    tree = _ragged(seed)
    options = dict(_EXPLORING, num_rollouts=num_rollouts)
    padded = _adaptive(
        builders.poison(builders.pad(tree, 1, 3, 0)), **options)
    _plans_equal(padded, _adaptive(tree, **options))
    assert padded.unspent[3] == 0 and (padded.count[3] == 0).all()
    assert padded.count.any()


@pytest.mark.slow
@pytest.mark.parametrize('seed', range(3))
def test_jit_changes_nothing(seed):
  tree, options = _ragged(seed), dict(_EXPLORING, num_rollouts=7)
  eager = branching.adaptive(tree, **options, key=jax.random.key(0))
  _plans_equal(eager, _adaptive(tree, **options))


def test_what_comes_after_a_decision_has_no_say():
  rng = np.random.default_rng(0)
  for cut in range(2, 8):
    plans = []
    for _ in range(2):
      builder = tree_lib.TreeBuilder()
      node = builder.add(-1, [0])
      for n in range(8 if len(plans) else cut):
        past = n < cut
        node = builders.add_action(
            builder, node, entropy=0.5 if past else rng.random(),
            reward=0.0 if past else rng.random())
      tree = tree_lib.stack([builder], num_nodes=9)
      plans.append(_adaptive(
          tree, design=_design(2, [1, 3, 5, 6], np.full(8, 0.5)), explore=0.1,
          num_rollouts=3))
    before = [[slot for slot in _slots(plan, 0) if slot[0] <= cut]
              for plan in plans]
    assert before[0] == before[1]


# --------------------------------------------------- unbiased, to the last path


def _perilous():
  """The first two steps may end the episode, with a return of their own."""
  end = enumerable.NO_STATE
  return enumerable.Task(
      np.array([[1, 2], [end, end], [3, 4], [end, end], [5, 6], [end, end],
                [end, end]]),
      np.array([0.0, 0.4, 0.0, -0.3, 0.0, 1.0, -1.0]),
      np.array([[0.3, 0.0], [0, 0], [0.0, 0.5], [0, 0], [0.2, 0.0], [0, 0],
                [0, 0]]))


@functools.cache
def _alone(num_rollouts, explore):
  """Returns the policy of every tree of a batch as if it were alone."""
  @jax.jit
  @functools.partial(jax.vmap, in_axes=(0, None, None))
  def plan(tree, design, key):
    tree = jax.tree.map(lambda x: x[None], tree)
    found = branching.adaptive(
        tree, design=design, key=key, num_rollouts=num_rollouts,
        explore=explore)
    return jax.tree.map(lambda x: x[0], found)
  return plan


def _bias(forest):
  """Returns the largest exact bias of bpo_rb over all outcomes."""
  chance = forest.probabilities
  assert np.isclose(chance.sum(), 1)
  credit = jax.device_get(_bpo_rb(forest.tree))
  mean = chance @ enumerable.gradient(forest, credit)
  return np.abs(mean - forest.task.gradient.ravel()).max()


@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize('num_rollouts, explore', [(3, 0.0), (4, 0.2)])
def test_it_is_unbiased_with_every_draw_of_its_coins(
    seed, num_rollouts, explore):
  forest = enumerable.all_backbones(_perilous(), 2)
  design = _design(2, [1], [1.0, 0.5, 0.4])
  plan_all, spent = _alone(num_rollouts, explore), []
  for stage in range(2):
    plan = jax.device_get(plan_all(
        forest.tree, design, jax.random.key(2 * seed + stage)))
    spent.append(plan.count[:, :-1].sum(1))
    if plan.count.any():
      forest = enumerable.all_forks(forest, plan)
  # All have as many trajectories, and not all as many forks.
  assert len(np.unique((forest.tree.parents == 0).sum(1))) == 1
  assert max(len(np.unique(forks)) for forks in spent) > 1
  assert _bias(forest) < 1e-6


def test_spending_what_a_tree_itself_leaves_over_would_be_biased():
  forest = enumerable.all_backbones(_perilous(), 2)
  plan = jax.device_get(_alone(4, 0.0)(
      forest.tree, _design(3, [1], [1.0, 0.5, 0.4]), jax.random.key(0)))
  assert _bias(enumerable.all_forks(forest, plan)) < 1e-6
  left = 2 - plan.count[:, :-1].sum(1) // 2
  assert len(np.unique(left)) > 1
  count, node = plan.count.copy(), plan.node.copy()
  count[:, -1], node[:, -1] = left, np.where(left > 0, 1, -1)
  greedy = plan.replace(node=node, count=count)
  assert _bias(enumerable.all_forks(forest, greedy)) > 1e-3


# -------------------------------------------- the right call, from nothing on


@pytest.mark.slow
@pytest.mark.parametrize('name, low, high', [
    ('late', 0.6, 0.88), ('early', 0.95, 1.07)])
def test_a_run_that_starts_with_nothing_ends_with_the_right_call(
    name, low, high):
  task = enumerable.make(name)
  design = theory_methods.design_of(task)
  chosen = np.flatnonzero(design.bins)
  root = np.prod(exact_noise.branching_noise(task, 16))
  method = dataclasses.replace(
      theory_methods.all_methods()['bpo_adaptive'], num_stages=2)
  forest = method.grow(task, seed=0, num_trees=2048)
  estimates = enumerable.gradient(forest, method.credit(forest))
  noise, steps = estimates.var(0, ddof=1).sum(), forest.num_steps.mean()
  error = estimates.mean(0) - task.gradient.ravel()
  print(name, design.num_siblings, chosen, noise * steps / root, steps)
  assert (design.num_siblings > 1) == (name == 'late') == (len(chosen) > 0)
  assert low < noise * steps / root < high
  assert 0.94 * 192 < steps <= 192
  assert error @ error * len(estimates) / noise < 3  # About 1 without any bias.


@pytest.mark.parametrize('late, early, error, failed', [
    (112.0, 90.0, 5.0, []), (140.0, 90.0, 5.0, ['late']),
    (112.0, 99.0, 5.0, ['early']), (112.0, 90.0, 40.0, ['late', 'early'])])
def test_a_wrong_call_is_a_claim_that_fails(late, early, error, failed):
  rows = [theory_methods.Measurement(
      task=task, method='bpo_adaptive', bias=0.0, bias_low=0.0, bias_high=0.0,
      score=0.0, cosine=1.0, cosine_low=1.0, signal=1.0, noise=1.0,
      steps=190.0, cost=cost, cost_error=error)
      for task, cost in (('late', late), ('early', early))]
  claims = theory_claims.adaptive_claims(rows)
  assert [c.claim.split()[-1] for c in claims if not c.holds] == failed


def test_a_design_of_the_host_is_a_constant_of_jit():
  tree, design = _ragged(0), _design(3, [1, 3], np.linspace(1, 0.3, 8))
  key = jax.random.key(0)
  closed = jax.jit(
      lambda tree: branching.adaptive(tree, design=design, key=key))(tree)
  jax.tree.map(np.testing.assert_array_equal, closed,
               _adaptive(tree, design=design))


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize('options, message', [
    (dict(num_branch_points=0), 'num_branch_points: expected at least 1'),
    (dict(num_rollouts=0), 'num_rollouts: expected at least 1 .*, got 0'),
    (dict(explore=1.0), 'explore: expected a share .* got 1.0'),
    (dict(open_mask=np.ones((3, 1), bool)), r'open_mask: expected shape \(3, '),
    (dict(birth=np.zeros(2)), r'birth: expected one .*got shape \(2,\)'),
    (dict(key=None), 'adaptive needs key: expected one typed key'),
])
def test_bad_input_is_an_error(options, message):
  with pytest.raises(ValueError, match=message):
    branching.adaptive(_ragged(0), **{'key': jax.random.key(0), **options})


@pytest.mark.parametrize('shape', [(0, 4, 4), (2, 0, 4), (2, 4, 0)])
def test_a_batch_of_nothing_is_refused(shape):
  with pytest.raises(ValueError, match='expected at least one tree, node'):
    branching.adaptive(tree_lib.empty(shape), key=jax.random.key(0))


def test_sizes_of_a_design_that_knows_nothing_are_checked():
  with pytest.raises(ValueError, match='num_depths: expected at least 1'):
    depths.unknown(0)
  with pytest.raises(ValueError, match='depth_width: expected at least 1'):
    depths.unknown(4, 0)

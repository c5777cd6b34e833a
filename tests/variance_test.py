"""variance: components against all pairs, truth, exact gradients, coverage."""

import dataclasses
import functools

import builders
import jax
import numpy as np
import oracles
import pytest

from bpo_jax import advantages
from bpo_jax import branching
from bpo_jax import designs
from bpo_jax import types
from bpo_jax import variance
from experiments import enumerable
from experiments import exact_noise

_SEEDS = range(10)
_HORIZON = 12
_group_variances = jax.jit(variance.group_variances)
_report = jax.jit(variance.report, static_argnames=(
    'num_depths', 'depth_width', 'num_quantiles', 'finished', 'confidence'))


def _by_step(tree, **kwargs):
  return jax.device_get(
      _report(tree, num_depths=_HORIZON, depth_width=1, **kwargs))


def _forked(task, rng, num_trees, num_backbones=4, chance=0.1, forks=1):
  """Returns trees forked at each decision with the same chance."""
  forest = enumerable.backbones(task, rng, num_trees, num_backbones)
  nodes = forest.tree.action_mask[..., 0] & (forest.tree.parents > 0)
  coin = nodes & (rng.random(nodes.shape) < chance)
  order = np.argsort(~coin, axis=1, kind='stable')
  order = order[:, :max(coin.sum(1).max(), 1)]
  used = np.take_along_axis(coin, order, axis=1)
  plan = types.BranchPlan(
      node=np.where(used, order, -1), offset=np.zeros_like(order),
      count=np.where(used, forks, 0))
  # Few shapes: compiling takes longer than all the rest.
  return enumerable.pad(enumerable.fork(forest, plan, rng), 128)


def _pairs(node):
  """Half the mean squared difference of leaves below different children."""
  size = len(node.children)
  if size < 2:
    return 0.0
  weigh = lambda child: [(oracles.split_weight(leaf), leaf.total)
                         for leaf in child.leaves]
  total = mass = 0.0
  for child in node.children:
    for other in node.children:
      if other is not child:
        for w, x in weigh(child):
          for v, y in weigh(other):
            total += w * v * (x - y) ** 2 / 2
            mass += w * v
  return total / mass


@pytest.mark.parametrize('seed', _SEEDS)
@pytest.mark.parametrize('offset', [0.0, 1e4])
def test_group_variances_are_those_of_all_pairs(seed, offset):
  tree = builders.random_trees(seed, offset=offset)
  expected = oracles.per_node(tree, _pairs)
  got = _group_variances(builders.poison(tree))
  # Rewards offset by 1e4 were rounded to float32 before they came here.
  np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
  assert (expected > 0).any()


def test_group_variances_by_hand():
  tree = builders.chains([[1, 0, 0, 1], [2, 2, 2, 2]])
  np.testing.assert_allclose(
      _group_variances(tree)[:, 0], [1 / 3, 0], rtol=1e-6)


def test_components_are_unbiased_to_the_last_path():
  task = enumerable.random_task(3)
  forest = enumerable.all_backbones(task, 2)
  policy = jax.jit(functools.partial(
      branching.causal_threshold, num_branch_points=2, num_forks=1,
      min_spacing=1))
  threshold = np.quantile(task.entropies[~task.terminal], 0.3)
  plan = jax.device_get(policy(forest.tree, threshold))
  assert (plan.count.sum(1) > 1).any()
  forest = enumerable.all_forks(forest, plan)
  chance, tree = forest.probabilities, forest.tree
  found = np.asarray(_group_variances(tree), float)
  assert np.isclose(chance @ found[:, 0], task.return_variance, rtol=1e-5)
  group = _groups(tree)[:, 1:]
  truth = np.where(group, task.variances[forest.states[:, 1:]], 0)
  weights = advantages.common.node_weights(tree, 'split')[:, 1:]
  mean = lambda x: (chance @ (np.asarray(weights, float) * x)).sum()
  assert mean(truth) > 0.02
  np.testing.assert_allclose(mean(found[:, 1:]), mean(truth), rtol=1e-5)


def _groups(tree):
  """Returns [B, N] bool, nodes of at least two children."""
  counts = np.stack([np.bincount(p[p >= 0], minlength=len(p))
                     for p in np.asarray(tree.parents)])
  return counts > 1


@pytest.mark.parametrize('name', ['late', 'early'])
def test_report_finds_the_truth(name):
  task = enumerable.make(name)
  forest = _forked(task, np.random.default_rng(0), 512, chance=0.3)
  found = _by_step(forest.tree)
  np.testing.assert_allclose(found.total, task.return_variance, rtol=0.08)
  np.testing.assert_allclose(
      found.by_depth.share, task.explained[:-1], atol=0.12)
  np.testing.assert_allclose(
      (found.within + found.between)[1:], found.total, rtol=1e-5)
  np.testing.assert_allclose(found.remaining, np.arange(12, 0, -1), rtol=1e-5)
  np.testing.assert_allclose(found.alive, 1, rtol=1e-5)
  square = (1 - (task.policy ** 2).sum(1)) * ~task.terminal
  for depth in range(_HORIZON):
    expected = (task.visits * square)[task.depth >= depth].sum()
    np.testing.assert_allclose(found.information[depth], expected, rtol=0.1)
  groups = _groups(forest.tree)
  groups[:, 0] = False
  counts = np.bincount(task.depth[forest.states[groups]], minlength=_HORIZON)
  np.testing.assert_array_equal(found.by_depth.num_groups, counts)
  assert found.by_entropy.num_groups.sum() == groups.sum()
  assert found.num_trees == 512


def test_entropy_tells_open_decisions_from_rote():
  task = enumerable.make('late')
  forest = _forked(task, np.random.default_rng(1), 512, chance=0.3)
  edges = np.array([0.15, 0.45])  # Rote 0.2, mistakes 0.49, tosses 0.69 nats.
  found = _by_step(forest.tree, num_quantiles=8)
  groups = _groups(forest.tree)
  groups[:, 0] = False
  tosses = groups & (task.entropies[forest.states] > 0.6)
  truth = 1 - task.variances[forest.states[tosses]].mean() / found.total
  top = np.flatnonzero(found.by_entropy.num_groups)[-1]
  assert found.entropy_edges[top - 1] > edges[1]
  assert found.by_entropy.num_groups[top] == tosses.sum()
  assert abs(found.by_entropy.share[top] - truth) < 0.1


def _perilous(horizon=5, survive=0.8):
  """Every step may end the episode in failure; who survives all succeeds."""
  end = enumerable.NO_STATE
  next_states, rewards = [[1, 2]], [0.0]
  for depth in range(1, horizon + 1):
    dead, alive = 2 * depth - 1, 2 * depth
    assert dead == len(next_states)
    next_states.append([end, end])
    next_states.append(
        [end, end] if depth == horizon else [alive + 1, alive + 2])
    rewards += [0.0, float(depth == horizon)]
  logits = np.tile([0.0, np.log(survive / (1 - survive))],
                   (len(next_states), 1))
  return enumerable.Task(np.array(next_states), np.array(rewards), logits)


@pytest.mark.slow
def test_finished_paths_are_explained_or_excluded():
  task = _perilous()
  forest = _forked(task, np.random.default_rng(0), 2048, chance=0.3)
  found = jax.device_get(_report(forest.tree, num_depths=5, depth_width=1))
  np.testing.assert_allclose(
      found.by_depth.share, task.explained[:-1], atol=0.06)
  np.testing.assert_allclose(found.alive, 0.8 ** np.arange(5), atol=0.02)
  # All who are alive are in one state, so nothing sets them apart.
  found = jax.device_get(_report(
      forest.tree, num_depths=5, depth_width=1, finished='excluded'))
  np.testing.assert_allclose(found.by_depth.share, 0, atol=0.12)


def test_excluding_nobody_changes_nothing():
  forest = _forked(enumerable.make('late'), np.random.default_rng(0), 256)
  found, other = _by_step(forest.tree), _by_step(
      forest.tree, finished='excluded')
  np.testing.assert_allclose(
      found.by_depth.share, other.by_depth.share, atol=1e-5)
  np.testing.assert_allclose(
      found.by_depth.lower, other.by_depth.lower, atol=1e-4)


def test_deeper_decisions_fall_into_the_last_bin():
  forest = _forked(enumerable.make('late'), np.random.default_rng(0), 256)
  fine = _by_step(forest.tree)
  found = jax.device_get(_report(forest.tree, num_depths=3, depth_width=3))
  counts = fine.by_depth.num_groups
  np.testing.assert_array_equal(
      found.by_depth.num_groups,
      [counts[:3].sum(), counts[3:6].sum(), counts[6:].sum()])
  np.testing.assert_allclose(found.remaining, [11, 8, 5], rtol=1e-5)
  np.testing.assert_allclose(found.num_actions, 12, rtol=1e-5)
  coarse = designs.recommend(found, 16)
  assert coarse.depths == (6,) and coarse.ratio < 0.9


@pytest.mark.slow
def test_intervals_cover_the_truth():
  num_batches, size = 200, 48
  task = enumerable.make('late')
  forest = _forked(task, np.random.default_rng(7), num_batches * size)
  batches = jax.tree.map(
      lambda x: x.reshape(num_batches, size, *x.shape[1:]), forest.tree)
  single = functools.partial(
      variance.report, num_depths=_HORIZON, depth_width=1, confidence=0.9)
  found = jax.device_get(jax.jit(jax.vmap(single))(batches)).by_depth
  truth = task.explained[:_HORIZON]
  covered = (found.lower <= truth) & (truth <= found.upper)
  assert (found.num_trees[:, 1:] > 1).all()
  covered = covered[:, 1:].mean(0)
  print('coverage by depth', covered.round(3), 'mean', covered.mean())
  assert (covered >= 0.8).all() and (covered <= 0.97).all()
  assert 0.85 < covered.mean() < 0.95
  error = (found.share[:, 1:] - truth[1:]).mean(0)
  noise = found.share[:, 1:].std(0) / np.sqrt(num_batches)
  assert (np.abs(error) < 4 * noise + 0.01).all()


def _arrays(found):
  return jax.tree.leaves(jax.device_get(found))


@pytest.mark.parametrize('finished', ['explained', 'excluded'])
def test_padding_and_unread_numbers_change_nothing(finished):
  tree = builders.random_trees(4, num_trees=6)
  found = _report(tree, finished=finished, depth_width=1)
  again = _report(builders.poison(builders.pad(tree, 2, 3, 1)),
                  finished=finished, depth_width=1)
  for one, two in zip(*map(_arrays, (found, again))):
    np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_jit_changes_nothing():
  tree = builders.random_trees(4, num_trees=6)
  options = dict(num_depths=3, finished='excluded')
  for one, two in zip(*map(_arrays, (
      _report(tree, **options), variance.report(tree, **options)))):
    np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('returns', [
    [[1.0]], [[1.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]]])
def test_nothing_to_tell_from_gives_zeros_and_counts(returns):
  found = jax.device_get(_report(builders.chains(returns)))
  assert all(np.isfinite(x).all() for x in _arrays(found))
  for shares in (found.by_depth, found.by_entropy):
    np.testing.assert_array_equal(shares.num_groups, 0)
    np.testing.assert_array_equal(shares.share, 0)
    np.testing.assert_array_equal(shares.lower, 0)
    np.testing.assert_array_equal(shares.upper, 1)
  assert designs.recommend(found, 8).points_per_backbone == 0
  assert found.num_trees == sum(len(r) > 1 for r in returns)
  assert len(variance.summary(found).splitlines()) >= 1


_update = jax.jit(variance.update, static_argnames='forgetting')


def test_sums_over_updates_say_what_one_batch_of_all_trees_says():
  forest = _forked(enumerable.make('late'), np.random.default_rng(0), 256)
  sums = variance.init(num_depths=_HORIZON, depth_width=1)
  for part in (slice(0, 64), slice(64, 256)):
    batch = jax.tree.map(lambda x, part=part: x[part], forest.tree)
    sums = _update(sums, batch, forgetting=1.0)
  got = jax.device_get(variance.report_of(sums))
  expected = _by_step(forest.tree)
  for field in dataclasses.fields(variance.Report):
    if 'entropy' not in field.name:
      jax.tree.map(
          functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4),
          getattr(got, field.name), getattr(expected, field.name))
  assert len(variance.summary(got).splitlines()) == 3 + _HORIZON


def test_what_was_seen_fades():
  forest = _forked(enumerable.make('late'), np.random.default_rng(0), 256)
  empty = variance.init(num_depths=_HORIZON, depth_width=1)
  once = jax.device_get(_update(empty, forest.tree, forgetting=1.0))
  twice = jax.device_get(_update(once, forest.tree, forgetting=0.5))
  np.testing.assert_allclose(twice.parts, 1.5 * once.parts, rtol=1e-5)
  np.testing.assert_allclose(twice.products, 1.25 * once.products, rtol=1e-5)
  one, two = (jax.device_get(variance.report_of(s)) for s in (once, twice))
  np.testing.assert_allclose(
      two.by_depth.share, one.by_depth.share, atol=1e-4)
  # 1.5^2 / 1.25 as many trees, were they others.
  np.testing.assert_allclose(
      two.by_depth.num_trees, 1.8 * one.by_depth.num_trees, atol=1)
  wide = one.by_depth.upper - one.by_depth.lower
  narrow = two.by_depth.upper - two.by_depth.lower
  some = one.by_depth.num_trees > 20
  np.testing.assert_allclose(
      (narrow / wide)[some], np.sqrt(1 / 1.8), rtol=0.06)


def test_forks_chosen_by_the_state_are_no_fit_trees():
  """Why the report says what trees it is valid for."""
  task = enumerable.make('late')
  forest = enumerable.backbones(task, np.random.default_rng(0), 512, 4)
  plan = jax.device_get(jax.jit(functools.partial(
      branching.causal_threshold, num_branch_points=8, min_spacing=1,
      max_per_path=2))(forest.tree, 0.6))
  grown = enumerable.fork(forest, plan, np.random.default_rng(1))
  found = _by_step(enumerable.pad(grown, 128).tree).by_depth
  assert found.upper[9] < task.explained[9] - 0.1


def test_nothing_seen_recommends_nothing():
  sums = variance.init()
  assert all(np.isfinite(x).all() for x in _arrays(variance.report_of(sums)))
  design = designs.next_design(sums)
  assert design.num_siblings == 1 and not design.bins.any()
  np.testing.assert_array_equal(design.costs, 1)


def test_a_recommendation_becomes_arrays(reports):
  chosen = designs.recommend(reports['late'], 16)
  design = designs.to_arrays(chosen, reports['late'])
  assert design.num_siblings == chosen.num_siblings
  assert tuple(np.flatnonzero(design.bins)) == chosen.depths
  np.testing.assert_allclose(
      design.costs, 1 - np.arange(_HORIZON) / _HORIZON, rtol=1e-5)


def test_wrong_sums_are_errors():
  with pytest.raises(ValueError, match='num_depths: expected at least 1'):
    variance.init(num_depths=0)
  with pytest.raises(ValueError, match='forgetting: .* got 1.5'):
    variance.update(variance.init(), builders.chains([[0.0]]), forgetting=1.5)


def test_summary_says_what_was_found():
  forest = _forked(enumerable.make('late'), np.random.default_rng(0), 256)
  found = _by_step(forest.tree)
  text = variance.summary(found)
  assert f'{found.by_depth.share[9]:.2f}' in text
  assert 'from action 9' in text and '(256 trees), 12.0 actions' in text
  alone = _by_step(builders.chains([[1.0]]))
  assert 'not known' in variance.summary(alone)


@pytest.mark.parametrize('options, message', [
    (dict(num_depths=0), 'num_depths: expected at least 1, got 0'),
    (dict(depth_width=0), 'depth_width: expected at least 1, got 0'),
    (dict(num_quantiles=0), 'num_quantiles: expected at least 1'),
    (dict(confidence=1.0), 'confidence: expected .* got 1.0'),
    (dict(finished='explain'), 'did you mean explained'),
])
def test_wrong_options_are_errors(options, message):
  with pytest.raises(ValueError, match=message):
    variance.report(builders.chains([[0.0, 1.0]]), **options)


# ------------------------------------------------- what branching would buy


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
@pytest.mark.parametrize('rho', [0.5, 1.0])
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


def _scaled(tree, by):
  return tree.replace(rewards=(tree.rewards * by).astype(np.float32))


@pytest.mark.parametrize('exponent', [-90, -40, 40])
def test_shares_and_designs_do_not_depend_on_the_unit_of_returns(exponent):
  task = enumerable.make('late')
  tree = _forked(task, np.random.default_rng(1), 32, chance=0.3).tree
  scaled = _scaled(tree, 2.0 ** exponent)
  expected, found = _by_step(tree), _by_step(scaled)
  for name in ('by_depth', 'by_entropy'):
    jax.tree.map(np.testing.assert_array_equal,
                 getattr(found, name), getattr(expected, name))
  assert (expected.by_depth.upper > expected.by_depth.lower)[1:].all()
  assert designs.recommend(found, 16) == designs.recommend(expected, 16)


def test_running_sums_forget_an_update_of_huge_returns():
  task = enumerable.make('late')
  tree = _forked(task, np.random.default_rng(1), 32, chance=0.3).tree
  update = jax.jit(functools.partial(variance.update, forgetting=0.3))
  plain = hit = variance.init(num_depths=_HORIZON, depth_width=1)
  hit = update(hit, _scaled(tree, 1e14))
  for _ in range(90):
    plain, hit = update(plain, tree), update(hit, tree)
  for got, expected in zip(*(
      jax.tree.leaves(variance.report_of(x)) for x in (hit, plain))):
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


def test_what_float32_does_not_hold_counts_for_nothing():
  task = enumerable.make('late')
  tree = _forked(task, np.random.default_rng(1), 8, chance=0.3).tree
  rewards = tree.rewards.copy()
  rewards[0] = np.where(tree.terminal[0], 3e38 * (-1.0) ** np.arange(
      rewards.shape[1]), 0)
  found = _by_step(tree.replace(rewards=rewards))
  part = _by_step(builders.take(tree, range(1, 8)))
  assert found.num_trees == part.num_trees == 7
  for value in jax.tree.leaves(found):
    assert not np.isnan(value).any()
  np.testing.assert_allclose(
      found.by_depth.share, part.by_depth.share, rtol=1e-5)


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

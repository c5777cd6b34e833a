"""variance: components against all pairs, truth, exact gradients, coverage."""

import dataclasses
import functools

import builders
import forked_trees
import jax
import numpy as np
import oracles
import pytest

from bpo_jax import advantages
from bpo_jax import branching
from bpo_jax import designs
from bpo_jax import tree as tree_lib
from bpo_jax import types
from bpo_jax import variance
from experiments import enumerable

_SEEDS = range(10)
_HORIZON = forked_trees.HORIZON
_by_step = forked_trees.by_step
_forked = forked_trees.forked
_report = forked_trees.report
_group_variances = jax.jit(variance.group_variances)


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


def _told(tree):
  """Returns the shares of the one bin with forks, and what is recommended."""
  sums = _update(variance.init(num_depths=3, depth_width=1), tree)
  found = jax.device_get(variance.report_of(sums))
  design = designs.next_design(sums)
  shares = jax.tree.map(lambda x: x[2], found.by_depth)
  assert (design.num_siblings > 1) == bool(design.bins.any())
  return shares, designs.recommend(found, 16).points_per_backbone + int(
      design.bins.any())


def _outcomes(returns):
  """Two backbones of three actions, each forked twice before the last."""
  builder = tree_lib.TreeBuilder()
  root = builder.add(types.NO_PARENT, [1])
  act = functools.partial(builders.add_action, builder)
  for own, *others in returns:
    fork = act(act(root))
    for birth, reward in enumerate((own, *others)):
      act(fork, reward=reward, birth=int(birth > 0))
  return builder


_FAILED = [[0, 0, 0], [0, 0, 0]]
_LUCK = [[0, 1, 0], [0, 0, 0]]  # All within a prefix,
_SKILL = [[1, 1, 1], [0, 0, 0]]  # and all between.


def _forest(*outcomes):
  """Returns trees of outcomes, and padding: one shape, compiled once."""
  return tree_lib.stack([_outcomes(x) for x in outcomes], num_trees=48)


@pytest.mark.parametrize('value', [0.0, 1.0, -3e4])
@pytest.mark.parametrize('spread', [0.0, 1e-39, 1e-45])
def test_equal_returns_tell_nothing(value, spread):
  """And so do differences that float32 does not square."""
  outcomes = [[value + spread, value, value], [value] * 3]
  shares, forks = _told(_forest(*[outcomes] * 16))
  assert (shares.lower, shares.upper) == (0, 1)
  assert shares.num_groups == 32 and shares.num_trees == 0
  assert forks == 0


@pytest.mark.parametrize('odd', [_LUCK, _SKILL])
def test_few_trees_that_tell_something_are_few(odd):
  """However many others failed at everything, and however well they agree."""
  told = {}
  for number in (1, 2, 16):
    told[number], forks = _told(_forest(*[odd] * number))
    padded, again = _told(_forest(*[odd] * number, *[_FAILED] * 32))
    assert padded.num_trees == told[number].num_trees == number
    for name in ('share', 'lower', 'upper'):
      np.testing.assert_allclose(
          getattr(padded, name), getattr(told[number], name), atol=1e-5)
    assert number > 2 or forks == again == 0
  assert (told[1].lower, told[1].upper) == (0, 1)
  for number in (2, 16):
    shares = told[number]
    assert shares.share == pytest.approx(0.0 if odd is _LUCK else 1.0)
    # Clopper and Pearson's bound at none of n.
    reach = 1 - 0.05 ** (1 / number)
    assert shares.share - shares.lower == pytest.approx(reach, abs=1e-5)
    assert shares.upper - shares.share == pytest.approx(reach, abs=1e-5)


def test_one_tree_of_huge_returns_is_one_tree():
  told = [[[1, 2, 0], [0, 1, 2]], [[2, 1, 1], [0, 0, 1]]] * 8
  huge = [[1e4, 0, 0], [0, 0, 0]]
  narrow, _ = _told(_forest(*told))
  shares, forks = _told(_forest(*told, huge))
  assert narrow.upper - narrow.lower < 1
  assert (shares.lower, shares.upper) == (0, 1) and forks == 0


def test_intervals_cover_the_truth_where_success_is_rare():
  num_batches, size = 60, 96
  task = _perilous(survive=0.45)
  forest = _forked(
      task, np.random.default_rng(3), num_batches * size, chance=0.3)
  batches = jax.tree.map(
      lambda x: x.reshape(num_batches, size, *x.shape[1:]), forest.tree)
  single = functools.partial(variance.report, num_depths=5, depth_width=1)
  found = jax.device_get(jax.jit(jax.vmap(single))(batches)).by_depth
  truth = task.explained[:5]
  # With a tree or none that tells something an interval is all of [0, 1].
  told = (found.num_trees > 1)[:, 1:]
  mean = lambda x: (x[:, 1:] * told).sum(0) / told.sum(0)
  covered = mean((found.lower <= truth) & (truth <= found.upper))
  width = mean(found.upper - found.lower)
  print('coverage by depth', covered.round(3), 'width', width.round(2),
        'trees', found.num_trees.mean(0))
  assert told.mean() > 0.9
  assert (covered > 0.87).all()
  # Half as wide again would be too wide.
  assert width.mean() < 2.5
  assert mean(np.minimum(found.upper, 1) - np.maximum(found.lower, 0)
              ).mean() < 0.9


@pytest.mark.parametrize('shape', [(0, 4, 4), (2, 0, 4), (2, 4, 0)])
def test_a_batch_of_nothing_is_refused(shape):
  tree = tree_lib.empty(shape)
  for function in (variance.report, variance.group_variances,
                   functools.partial(variance.update, variance.init())):
    with pytest.raises(ValueError, match='expected at least one tree, node'):
      function(tree)


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

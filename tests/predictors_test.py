"""predictors: equal to counting by hand, blind to the tree's own returns."""

import builders
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from bpo_jax import predictors
from bpo_jax import tree as tree_lib
from experiments import enumerable

_SEEDS = range(10)
_BINS = dict(num_depth_bins=4, num_entropy_bins=3, num_progress_bins=3,
             depth_width=2, entropy_width=0.3)
_update = jax.jit(predictors.update, static_argnames='forgetting')
_predict = jax.jit(predictors.predict, static_argnames='smoothing')
_remaining = jax.jit(
    predictors.remaining_steps, static_argnames='smoothing')


def _new_observations(node):
  anchors = [n.anchor for n in node.path]
  old = sum(a >= 0 and a in anchors[:i] for i, a in enumerate(anchors))
  return 1 - old / len(anchors)


def _nodes(tree):
  """Yields (b, node) with what a predictor needs to know of each."""
  for b, root in enumerate(oracles.roots(tree)):
    for node in oracles.walk(root):
      node.anchor = int(tree.anchor[b, node.index])
      yield b, node


def _bin(node):
  """The bin of the state at a node's end, _BINS being the sizes."""
  depth = sum(n.num_actions for n in node.path)
  entropy = 3
  if node.children and any(node.heir.mask):
    first = node.heir.mask.index(True)
    entropy = min(int(node.heir.entropies[first] // 0.3), 2)
  progress = min(int(_new_observations(node) * 3 + 1e-3), 2)
  return min(depth // 2, 3), entropy, progress


def _count(trees, forgetting):
  """Visits, successes and steps, [3, D, E + 1, P]."""
  tables = np.zeros((3, 4, 4, 3))
  for tree in trees:
    tables *= forgetting
    for _, node in _nodes(tree):
      depth = sum(n.num_actions for n in node.path)
      for leaf in node.leaves if node.children else ():
        steps = sum(n.num_actions for n in leaf.path) - depth
        tables[(slice(None), *_bin(node))] += 1, leaf.total >= 0.5, steps
  return tables


def _shrunk(sums, visits, where, smoothing):
  """Mean of a bin, shrunk towards the coarser ones."""
  depth, entropy, progress = where
  mean = sums.sum() / visits.sum()
  for index in ((depth,), (depth, entropy), (depth, entropy, progress)):
    total, count = sums[index].sum(), visits[index].sum()
    mean = (total + smoothing * mean) / (count + smoothing)
  return mean


@pytest.mark.parametrize('seed', _SEEDS)
def test_statistics_and_predictions_are_counts(seed):
  trees = [builders.random_trees(seed + 10 * i) for i in range(3)]
  statistics = predictors.init(**_BINS)
  for tree in trees:
    statistics = _update(statistics, builders.poison(tree), forgetting=0.7)
  tables = _count(trees, 0.7)
  for name, table in zip(('visits', 'successes', 'steps'), tables):
    np.testing.assert_allclose(
        getattr(statistics, name), table, rtol=1e-4, atol=1e-4)
  new = builders.random_trees(seed + 100)
  chances = _predict(statistics, builders.poison(new), smoothing=5.0)
  steps = _remaining(statistics, builders.poison(new), smoothing=5.0)
  for b, node in _nodes(new):
    for got, sums in ((chances, tables[1]), (steps, tables[2])):
      expected = _shrunk(sums, tables[0], _bin(node), 5.0)
      np.testing.assert_allclose(
          got[b, node.index], expected, rtol=1e-4, atol=1e-5)
  assert (np.asarray(chances)[~new.node_mask] == 0).all()


@pytest.mark.parametrize('seed', range(3))
def test_returns_of_the_tree_itself_are_not_looked_at(seed):
  statistics = _update(
      predictors.init(**_BINS), builders.random_trees(seed + 50))
  tree = builders.random_trees(seed)
  rng = np.random.default_rng(seed)
  other = tree.replace(
      rewards=rng.normal(size=tree.rewards.shape).astype(np.float32),
      terminal=~tree.terminal & tree.node_mask)
  for predict in (_predict, _remaining):
    np.testing.assert_array_equal(
        predict(statistics, tree), predict(statistics, other))


def test_what_comes_after_a_state_is_not_looked_at():
  """Of two trees with a common prefix, predictions for it are equal."""
  statistics = _update(predictors.init(**_BINS), builders.random_trees(50))
  predictions = []
  for future in ((0.9, 3), (0.1, 1)):
    builder = tree_lib.TreeBuilder()
    node = builder.add(-1, [0], anchor=0)
    for depth in range(3):
      node = builders.add_action(builder, node, entropy=0.4, anchor=depth)
    decision = builders.add_action(builder, node, entropy=0.8)
    builders.add_action(builder, decision, entropy=future[0],
                        anchor=future[1], reward=future[1])
    predictions.append(np.asarray(
        _predict(statistics, tree_lib.stack([builder])))[0, :4])
  np.testing.assert_array_equal(*predictions)


def test_before_the_first_update_nothing_is_open():
  tree = builders.random_trees(0)
  statistics = predictors.init()
  for predict in (_predict, _remaining):
    for smoothing in (0.0, 8.0):
      got = predict(statistics, tree, smoothing=smoothing)
      np.testing.assert_array_equal(got, 0)


def test_an_unseen_bin_has_the_overall_rate():
  statistics = _update(
      predictors.init(**_BINS), builders.chains([[1.0, 0.0, 0.0, 0.0]]))
  builder = tree_lib.TreeBuilder()
  node = builder.add(-1, [0])
  for _ in range(9):
    node = builders.add_action(builder, node, entropy=0.9)
  got = _predict(statistics, tree_lib.stack([builder]))
  np.testing.assert_allclose(got[0, 9], 0.25, rtol=1e-6)


@pytest.mark.parametrize('seed', range(3))
def test_padding_changes_nothing(seed):
  tree, empty = builders.random_trees(seed), predictors.init(**_BINS)
  statistics = _update(empty, tree)
  padded = builders.pad(tree, 1, 3, 2)
  again = _update(empty, padded)
  for one, two in zip(*map(jax.tree.leaves, (statistics, again))):
    np.testing.assert_allclose(one, two, rtol=1e-5)
  expected = np.asarray(_predict(statistics, tree))
  got = np.asarray(_predict(statistics, padded))
  np.testing.assert_array_equal(got[:3, :tree.parents.shape[1]], expected)


def test_progress_by_hand():
  builder = tree_lib.TreeBuilder()
  node = builder.add(-1, [0], anchor=7)
  for anchor in (3, 7, -1, -1, 3):
    node = builders.add_action(builder, node, anchor=anchor)
  got = predictors.new_observations(tree_lib.stack([builder]))
  np.testing.assert_allclose(
      got[0, :6], [1, 1, 2 / 3, 3 / 4, 4 / 5, 4 / 6], rtol=1e-6)
  np.testing.assert_array_equal(got[0, 6:], 0)


def test_progress_may_be_given():
  tree = builders.chains([[1.0, 0.0]])
  progress = np.zeros(tree.parents.shape, np.float32)
  progress[0, 0] = 1.0
  statistics = _update(predictors.init(**_BINS), tree, progress=progress)
  assert statistics.visits[0, :, 2].sum() == statistics.visits.sum() == 2


def test_it_learns_which_prefixes_are_open():
  task, rng = enumerable.make('late'), np.random.default_rng(0)
  statistics = predictors.init(
      num_depth_bins=12, depth_width=1, entropy_width=0.1, num_entropy_bins=8)
  for _ in range(3):
    statistics = _update(
        statistics, enumerable.backbones(task, rng, 128, 8).tree)
  forest = enumerable.backbones(task, rng, 64, 8)
  acts = tree_lib.num_children(forest.tree) > 0
  late = np.asarray(acts) & (task.depth[forest.states] == 9)
  chances = np.asarray(_predict(statistics, forest.tree))[late]
  truth = task.values[forest.states][late]
  # Only paths that are alive have an open decision there.
  np.testing.assert_allclose(chances, truth, atol=0.1)
  steps = np.asarray(_remaining(statistics, forest.tree))
  np.testing.assert_allclose(
      steps[acts], task.remaining[forest.states][acts], atol=0.4)


def test_statistics_are_a_pytree_of_fixed_shape():
  statistics = predictors.init(**_BINS)
  after = _update(statistics, builders.random_trees(0))
  shapes = [[(x.shape, jnp.asarray(x).dtype) for x in jax.tree.leaves(s)]
            for s in (statistics, after)]
  assert shapes[0] == shapes[1]
  assert statistics.visits.shape == (4, 4, 3)


@pytest.mark.parametrize('name', [
    'num_depth_bins', 'num_entropy_bins', 'num_progress_bins', 'depth_width'])
def test_sizes_below_one_are_errors(name):
  with pytest.raises(ValueError, match=f'{name}: expected at least 1, got 0'):
    predictors.init(**{name: 0})


def test_wrong_scalars_are_errors():
  statistics, tree = predictors.init(), builders.chains([[1.0, 0.0]])
  with pytest.raises(ValueError, match='entropy_width: expected a positive'):
    predictors.init(entropy_width=0.0)
  with pytest.raises(ValueError, match='forgetting: expected .* got 1.5'):
    predictors.update(statistics, tree, forgetting=1.5)
  with pytest.raises(ValueError, match='smoothing: expected a finite'):
    predictors.predict(statistics, tree, smoothing=-1)

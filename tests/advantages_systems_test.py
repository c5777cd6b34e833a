"""advantages of the branching systems: what sets each apart, by hand.

The contract that every estimator keeps is in estimator_contract_test.
"""

import functools

import builders
import jax
import numpy as np
import oracles
import oracles_systems
import pytest

from bpo_jax import advantages
from bpo_jax import branching
from bpo_jax import masked
from bpo_jax import tree as tree_lib
from bpo_jax.advantages import rows

_HALF = np.sqrt(0.5)  # Group-relative advantage of two different returns.
_SIZES = dict(num_trees=3, num_nodes=28, num_tokens=8)  # Compiled for once.


@functools.cache
def _jit(function, options):
  return jax.jit(functools.partial(function, **dict(options)))


def _jitted(function, **options):
  return _jit(function, tuple(options.items()))


class _Named(dict):
  """Grows a tree by names: name -> handle."""

  def __init__(self):
    super().__init__()
    self.builder = tree_lib.TreeBuilder()
    self['root'] = self.builder.add(-1, [0])

  def add(self, name, parent, **kwargs):
    self[name] = builders.add_action(self.builder, self[parent], **kwargs)
    return self

  def of(self, values, names):
    """Values [N, T] of the named nodes' first tokens."""
    return [float(values[self.builder.index(self[name]), 0]) for name in names]


def _forked_twice(returns=(1, 0, 1, 0)):
  """P = p1 p2 p3, forked behind p1 and behind p2; Q stands alone."""
  p, f1, f2, q = returns
  return (_Named().add('p1', 'root').add('p2', 'p1')
          .add('p3', 'p2', reward=p).add('q', 'root', num_tokens=2, reward=q)
          .add('f1', 'p1', birth=1, reward=f1)
          .add('f2', 'p2', birth=1, reward=f2))


_NAMES = ('p1', 'p2', 'p3', 'f1', 'f2', 'q')


def _check(estimator, trees, names, expected, weights=None, **options):
  """Compares the first tree's advantages and weights at named nodes."""
  credit = jax.device_get(_jitted(estimator, **options)(
      tree_lib.stack([named.builder for named in trees], **_SIZES)))
  got = trees[0].of(credit.advantages[0], names)
  np.testing.assert_allclose(got, expected, atol=2e-5)
  if weights is not None:
    np.testing.assert_allclose(trees[0].of(credit.weights[0], names), weights)


def test_cbpo_by_hand():
  # Returns 1, 0, 1, 0: |A| = 0.5 / sqrt(1 / 3). CBV 0.5 and 0: Z = 1 and -1,
  # beyond |A| / 2: A_final is 1.1 A behind p1, 0.9 A behind p2. The means of A
  # are 0 at p1 and A at p2.
  a = 0.5 * np.sqrt(3)
  _check(advantages.cbpo, [_forked_twice()], _NAMES,
         np.multiply(a, [0, (1.1 + 1) / 2, 0.9, -1.1, 0.9, -1]),
         [1 / 3, 1 / 3, 1 / 3, 1, 1, 1 / 2])
  # Not clipped: C = Z.
  _check(advantages.cbpo, [_forked_twice()], ('p3', 'f1'),
         [a - 0.1, -a - 0.1], [1, 1], cbv_clip=9.0, cbv_scale=0.1,
         path_weighting='token')


def test_cbpo_scores_branch_points_over_the_batch():
  single = (_Named().add('p1', 'root').add('p2', 'p1', reward=1.0)
            .add('f1', 'p1', birth=1))
  other = (_Named().add('p1', 'root').add('p2', 'p1', reward=1.0)
           .add('f1', 'p1', birth=1, reward=1.0).add('q', 'root'))
  # Alone it has nothing to be compared with.
  _check(advantages.cbpo, [single], ('p1', 'p2', 'f1'), [0, _HALF, -_HALF])
  _check(advantages.cbpo, [single, other], ('p1', 'p2', 'f1'),
         [0, 1.1 * _HALF, -1.1 * _HALF])


def test_cbpo_takes_fresh_rollouts_as_they_are():
  named = _Named().add('p', 'root', reward=1.0).add('late', 'root', birth=1)
  _check(advantages.cbpo, [named], ('p', 'late'), [_HALF, -_HALF], [1, 1])
  _check(advantages.appo, [named], ('p', 'late'), [_HALF, -_HALF], [1, 1])


@pytest.mark.parametrize('seed', range(5))
def test_cbpo_keeps_the_sign_and_a_tenth(seed):
  tree = builders.random_trees(seed)
  got = np.asarray(_jitted(advantages.cbpo)(tree).advantages)
  plain = np.asarray(_jitted(advantages.cbpo, cbv_scale=0.0)(tree).advantages)
  leaf = np.asarray(tree_lib.is_leaf(tree))[..., None] & (plain != 0)
  ratio = (got / np.where(plain == 0, 1, plain))[leaf]
  assert (ratio > 0.9 - 1e-5).all() and (ratio < 1.1 + 1e-5).all()
  if oracles.per_node(tree, oracles_systems.is_branch_point).sum() > 1:
    assert np.ptp(ratio) > 1e-3


def test_appo_by_hand():
  # First trajectories 1, 0 and forks 0, 1 are normalised apart; p1 is above
  # both forks, p2 above the good one alone.
  _check(advantages.appo, [_forked_twice()], _NAMES,
         [_HALF, 2 * _HALF, _HALF, 0, 0, -_HALF], [1, 1, 1, 0, 0, 1])


def test_arpo_soft_and_hard_differ_in_the_weight_of_shared_tokens():
  a = 0.5 * np.sqrt(3)
  expected = np.multiply(a, [1 / 3, 1, 1, -1, 1, -1])
  _check(advantages.arpo_soft, [_forked_twice()], _NAMES, expected,
         [3, 2, 1, 1, 1, 1])
  _check(advantages.arpo_hard, [_forked_twice()], _NAMES, expected, [1] * 6)


def _tails(last=0.0):
  """P = p1 p2 p3 won in two steps behind p1; three forks there; q, s."""
  return (_Named().add('p1', 'root').add('p2', 'p1')
          .add('p3', 'p2', reward=1.0)
          .add('q', 'root', reward=1.0).add('s', 'root', reward=last)
          .add('fails', 'p1', birth=1)
          .add('shorter', 'p1', birth=1, reward=1.0)
          .add('alike', 'p1', birth=1).add('alike2', 'alike', birth=1,
                                           reward=1.0))


def test_branpo_by_hand():
  names = ('p1', 'p2', 'p3', 'q', 's', 'fails', 'shorter', 'alike', 'alike2')
  # Bases: mean(1, 0, 1), 1, 0. Tails: 1, 0, 1, the fork that is no contrast
  # being left out. p2 is the redundant first step of a tail that was beaten.
  base = np.array([2 / 3, 1, 0])
  base = (base - base.mean()) / base.std(ddof=1)
  tail = np.array([1, 0, 1])
  tail = (tail - tail.mean()) / tail.std(ddof=1)
  _check(advantages.branpo, [_tails()], names,
         [base[0], 0, tail[0], base[1], base[2], tail[1], tail[2], 0, 0],
         [1, 1, 1, 1, 1, 1, 1, 0, 0])


def test_branpo_contrasts_lengths_where_the_task_is_mixed_alone():
  # All first trajectories succeed: the shorter fork is no contrast any more.
  _check(advantages.branpo, [_tails(last=1.0)], ('p2', 'shorter', 'fails'),
         [_HALF, 0, -_HALF], [1, 0, 1])


def test_branpo_masks_the_first_action_of_the_loser_alone():
  # A lost fork above the mean of the tails: 0 in its first action.
  named = (_Named().add('p1', 'root').add('p2', 'p1', reward=-9.0)
           .add('q1', 'root').add('q2', 'q1', reward=1.0)
           .add('f1', 'q1', birth=1).add('f2', 'f1', birth=1, reward=0.7)
           .add('g1', 'p1', birth=1, reward=-9.5))
  tails = np.array([-9.0, 1.0, 0.7])
  _, winner, loser = (tails - tails.mean()) / tails.std(ddof=1)
  assert loser > 0
  _check(advantages.branpo, [named], ('q2', 'f1', 'f2', 'g1'),
         [winner, 0, loser, 0], [1, 1, 1, 0])


def _forked_root(*forks):
  """Failures p1 p2 and q, a success s; forks at the root, where all begin."""
  named = (_Named().add('p1', 'root').add('p2', 'p1').add('q', 'root')
           .add('s', 'root', num_tokens=2, reward=1.0))
  for i, value in enumerate(forks):
    named.add(f'f{i}', 'root', birth=1, reward=value)
  return named


def test_branpo_counts_no_fork_at_the_root_for_a_first_trajectory():
  names = ('p1', 'p2', 'q', 's', 'f0', 'f1')
  # p is forked before its first action: its base is empty, its reward the mean
  # of its tail and the fork that won. f1 fails as p does and is no contrast.
  base = np.array([1 / 2, 0, 1])
  base = (base - base.mean()) / base.std(ddof=1)
  _check(advantages.branpo, [_forked_root(1.0, 0.0)], names,
         [-_HALF, -_HALF, base[1], base[2], _HALF, 0], [1, 1, 1, 1, 1, 0])


def test_branpo_tells_how_a_task_goes_by_its_first_trajectories():
  # Two of three succeed, so that among successes the shorter wins, however many
  # forks at the root fail.
  named = (_Named().add('p1', 'root').add('p2', 'p1')
           .add('p3', 'p2', reward=1.0)
           .add('q', 'root').add('s', 'root', reward=1.0)
           .add('shorter', 'p1', birth=1, reward=1.0))
  for i in range(4):
    named.add(f'f{i}', 'root', birth=1)
  tails = np.array([1.0] * 2 + [0.0] * 4)
  tails = (tails - tails.mean()) / tails.std(ddof=1)
  # p's tail was beaten by the shorter one, and lost its first action.
  _check(advantages.branpo, [named], ('p2', 'p3', 'shorter', 'f0', 'f3'),
         [0, tails[1], tails[0], tails[2], tails[2]], [1] * 5)


def _golden(returns):
  named = _Named().add('g', 'root', num_tokens=3)
  for i, value in enumerate(returns):
    named.add(f'r{i}', 'root', num_tokens=i + 1, reward=value)
  tree = tree_lib.stack([named.builder], **_SIZES)
  golden = np.zeros(tree.parents.shape, bool)
  golden[0, named['g']] = True
  return named, tree, golden


def _gcpo(tree, golden):
  return jax.device_get(_jitted(advantages.gcpo)(tree, golden=golden))


def test_gcpo_contrasts_the_golden_path_where_all_fail():
  named, tree, golden = _golden([0.0, 0.25])
  credit = _gcpo(tree, golden)
  names = ('g', 'r0', 'r1')
  np.testing.assert_allclose(
      named.of(credit.advantages[0], names), [1, -0.5, -0.5])
  np.testing.assert_allclose(
      named.of(credit.weights[0], names), [1 / 3, 1, 1 / 2])
  # To first order: the length-normalised margin, over all tokens of a path.
  step = (credit.advantages * credit.weights)[0].sum(-1)
  np.testing.assert_allclose(step[:4], [0, 1, -0.5, -0.5], atol=1e-6)


def test_gcpo_is_grpo_where_one_succeeds():
  named, tree, golden = _golden([0.0, 1.0])
  credit = _gcpo(tree, golden)
  names = ('g', 'r0', 'r1')
  np.testing.assert_allclose(
      named.of(credit.advantages[0], names), [0, -_HALF, _HALF], rtol=1e-5)
  np.testing.assert_allclose(
      named.of(credit.weights[0], names), [0, 1, 1 / 2])


def test_gcpo_without_a_golden_path_or_a_rollout_is_zero():
  _, tree, golden = _golden([0.0, 0.25])
  assert not _gcpo(tree, np.zeros_like(golden)).advantages.any()
  _, tree, golden = _golden([])
  assert not _gcpo(tree, golden).advantages.any()
  with pytest.raises(ValueError, match='gcpo needs golden.*got None'):
    advantages.gcpo(tree)


def _two_trees():
  return (_Named().add('a', 'root').add('a1', 'a', reward=1.0).add('a0', 'a')
          .add('b', 'root').add('b1', 'b', reward=1.0)
          .add('b2', 'b', reward=1.0))


def test_016_tree_grpo_keeps_what_lies_between_trees():
  # Within b all returns are equal; it is still better than the mean.
  _check(advantages.tree_grpo, [_two_trees()],
         ('a', 'a1', 'a0', 'b', 'b1', 'b2'),
         [-0.5, _HALF + 0.5, -_HALF - 1.5, 0.5, 0.5, 0.5], [2, 1, 1, 2, 1, 1])


def _uneven():
  return (_Named().add('a', 'root').add('a1', 'a', reward=1.0).add('a0', 'a')
          .add('b', 'root', reward=1.0))


def test_treerl_by_hand():
  # V(root) = 2 / 3, V(a) = 1 / 2.
  _check(advantages.treerl, [_uneven()], ('a', 'a1', 'a0', 'b'),
         [-2 / 6 / np.sqrt(2), 1 / 3 + 1 / 2, -2 / 3 - 1 / 2, 2 / 3],
         [2, 1, 1, 1])


def test_spo_tree_by_hand():
  # V(root) = (1 / 2 + 1) / 2.
  _check(advantages.spo_tree, [_uneven()], ('a', 'a1', 'a0', 'b'),
         [-0.25, 0.5, -0.5, 0.25], [1, 1, 1, 1])


def test_spo_tree_masks_tokens_that_were_foregone():
  builder = tree_lib.TreeBuilder()
  root = builder.add(-1, [0])
  for reward in (0.0, 1.0):
    builder.add(root, [1, 2, 3], [True] * 3, np.log([0.89, 0.91, 0.5]),
                reward=reward)
  tree = tree_lib.stack([builder], **_SIZES)
  for limit, expected in ((0.9, [1, 0, 1]), (1.0, [1, 1, 1])):
    credit = _jitted(advantages.spo_tree, max_probability=limit)(tree)
    np.testing.assert_array_equal(credit.weights[0, 1, :3], expected)


def _incumbent(surprisals, returns):
  """Prefixes i0, i1, .. with an action each; a fork beside the first's."""
  builder = tree_lib.TreeBuilder()
  root = builder.add(-1, [0])
  for i, (surprisal, value) in enumerate(zip(surprisals, returns)):
    prefix = builder.add(root, [1])
    builder.add(prefix, [2], [True], [-surprisal], reward=value)
    if i == int(np.argmax(surprisals)):
      forked = prefix
  builder.add(forked, [3], [True], [-9.0], reward=returns[len(surprisals)],
              birth=1)
  return builder


def test_sipo_by_hand():
  # The incumbent has the largest of three surprisals: the quantile of
  # 2.625 / 3.25 is 0.8694. The fork's own surprisal is no candidate's.
  tree = tree_lib.stack(
      [_incumbent([3.0, 1.0, 2.0], [1.0, 0.5, 0.0, 0.25])], **_SIZES)
  blom = 0.86942

  def run(a2):
    credit = _jitted(advantages.sipo, w=0.5)(tree, a2=np.float32(a2))
    return np.asarray(credit.advantages)[0, :, 0]
  got, plain = run(0.2), run(0.0)
  np.testing.assert_allclose(
      got[[2, 7]], [0.75 - 0.1 * blom, 0.1 * blom - 0.75], atol=1e-5)
  np.testing.assert_allclose(plain[[2, 7]], [0.75, -0.75], atol=1e-6)
  # The first trajectories were not selected: no correction among them.
  np.testing.assert_array_equal(got[[4, 6]], plain[[4, 6]])


@pytest.mark.parametrize('num_others, blom', [(0, 0.86942), (2, 1.17976)])
def test_sipo_corrects_the_first_trajectory_of_a_forked_root(num_others, blom):
  # The most surprising of all actions is the first: quantiles 2.625 / 3.25 and
  # 4.625 / 5.25. The others that begin at the root were not chosen for theirs.
  named = _Named()
  for name, above, surprisal in (
      ('a', 'root', 5.0), ('b', 'a', 1.0), ('c', 'b', 2.0)):
    named[name] = named.builder.add(
        named[above], [0], [True], [-surprisal])
  for i in range(num_others):
    named[f'other{i}'] = named.builder.add(
        named['root'], [0], [True], [-3.0 - i])
  stack = lambda: tree_lib.stack([named.builder], **_SIZES)
  plan = jax.device_get(_jitted(
      branching.sipo, sibling_penalty=0.0, num_branch_points=1)(stack()))
  assert (plan.node[0, 0], plan.offset[0, 0], plan.count[0, 0]) == (1, 0, 2)
  for fork in ('f0', 'f1'):
    named.add(fork, 'root', birth=1)
  run = lambda a2: named.of(_jitted(advantages.sipo)(
      stack(), a2=np.float32(a2)).advantages[0], named)
  names = list(named)
  expected = [{'root': 0.0, **dict.fromkeys('abc', -blom)}.get(
      name, blom / (num_others + 2)) for name in names]
  np.testing.assert_allclose(run(1.0), expected, atol=1e-5)
  np.testing.assert_array_equal(run(0.0), np.zeros(len(names)))


@functools.cache
def _selected_trees(seed, num_trees=300, slope=0.5):
  """Trees whose returns grow with the surprisal, forked at its largest."""
  rng = np.random.default_rng(seed)
  result = []
  for _ in range(num_trees):
    z = rng.normal(size=8)
    returns = slope * z + 0.1 * rng.normal(size=8)
    fresh = slope * rng.normal() + 0.1 * rng.normal()
    result.append(_incumbent(5 + z, [*returns, fresh]))
  return tree_lib.stack(result)


def test_sipo_takes_the_selection_bias_off():
  slope = float(masked.divide(*advantages.selection_slope(_selected_trees(0))))
  # Z is scored within eight candidates, of spread below 1.
  np.testing.assert_allclose(slope, 0.5, rtol=0.15)
  tree = _selected_trees(1)

  def mean_of_incumbents(a2):
    credit = _jitted(advantages.sipo)(tree, a2=np.float32(a2))
    forked = oracles.per_node(tree, lambda node: (
        node.birth == 0 and any(s.birth for s in node.siblings)))
    return float(np.asarray(credit.advantages[..., 0])[forked > 0].mean())

  # E max of eight normals is 1.42; the standard error is about 0.03.
  np.testing.assert_allclose(mean_of_incumbents(0.0), 0.5 * 1.42, atol=0.1)
  np.testing.assert_allclose(mean_of_incumbents(slope), 0, atol=0.1)


@pytest.mark.parametrize('unit', ['token', 'action'])
@pytest.mark.parametrize('offset', [0.0, 1e4])
def test_selection_slope_equals_the_oracle(unit, offset):
  for seed in range(10):
    tree = builders.random_trees(seed, offset=offset)
    got = _jitted(advantages.selection_slope, unit=unit)(builders.poison(tree))
    expected = oracles_systems.selection_slope(tree, unit)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7)


def test_the_slope_of_sipo_is_one_number():
  tree = builders.chains([[1.0], [0.0]])
  with pytest.raises(ValueError, match=r'a2: expected shape \(\), got \(2,'):
    advantages.sipo(tree, a2=np.zeros((2, 3), np.float32))


def test_sipo_needs_a_slope():
  with pytest.raises(ValueError, match='sipo needs a2: .*slope.*got None'):
    advantages.sipo(builders.random_trees(0))


def test_selection_slope_carries_no_gradient():
  tree = builders.random_trees(0)
  loss = lambda rewards: sum(
      advantages.selection_slope(tree.replace(rewards=rewards)))
  gradient = jax.jit(jax.grad(loss))(tree.rewards)
  assert (np.asarray(gradient) == 0).all()


@pytest.mark.parametrize('name, options', [
    ('branpo', dict(success_threshold=1e4 + 0.3)),
    ('gcpo', dict(success_threshold=1e4 + 0.3)),
    ('sipo', dict(a2=0.4)),
])
def test_a_large_common_return_costs_no_digits(name, options):
  tree = builders.random_trees(3, offset=1e4)
  arrays = {}
  if name == 'gcpo':
    arrays['golden'] = oracles_systems.golden_leaf(
        tree, np.random.default_rng(0).normal(size=tree.parents.shape))
  got = _jitted(getattr(advantages, name), **options)(tree, **arrays)
  expected = getattr(oracles_systems, name)(tree, **options, **arrays)
  for b, in_tree in enumerate(expected[0]):
    scale = max(np.abs(in_tree).max(), 0.1)  # As in the contract.
    np.testing.assert_allclose(
        got.advantages[b], in_tree, rtol=0, atol=1e-6 * scale)
  np.testing.assert_allclose(got.weights, expected[1], rtol=1e-6)


def _split_builder(seed, rng):
  """A random tree, and the same with nodes split in two; handles of heads."""
  whole, split = (
      builders.random_builder(seed, max_nodes=14) for _ in range(2))
  heads = {}
  tree = whole.build()
  for node in range(len(whole)):
    length = int(tree.token_mask[node].sum())
    if length > 1 and rng.random() < 0.6:
      heads[node] = split.split(node, int(rng.integers(1, length)))
  return whole, split, heads


@pytest.mark.parametrize('name, options', [
    ('cbpo', {}), ('appo', {}), ('arpo_hard', {}), ('tree_grpo', {}),
    ('treerl', {}), ('spo_tree', {}), ('sipo', dict(a2=0.7))])
def test_splitting_nodes_changes_no_token(name, options):
  rng = np.random.default_rng(0)
  cases = [_split_builder(seed, rng) for seed in (1, 3, 5)]
  run = _jitted(getattr(advantages, name), **options)
  before = run(tree_lib.stack([whole for whole, _, _ in cases], **_SIZES))
  after = run(tree_lib.stack([split for _, split, _ in cases], **_SIZES))
  assert sum(len(heads) for _, _, heads in cases) > 10
  for b, (whole, split, heads) in enumerate(cases):
    length = whole.build().token_mask.sum(-1)
    for node in range(len(whole)):
      parts = [heads[node], node] if node in heads else [node]
      index = [split.index(part) for part in parts]
      mask = split.build().token_mask
      for name_ in ('advantages', 'weights'):
        got = np.concatenate([
            np.asarray(getattr(after, name_))[b, i, :mask[i].sum()]
            for i in index])
        expected = np.asarray(getattr(before, name_))[b, node, :length[node]]
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('seed', range(3))
def test_rows_hold_every_token_once(seed):
  tree = builders.random_trees(seed)
  length = np.asarray(_jitted(rows.length)(tree))
  for b, root in enumerate(oracles.roots(tree)):
    trained = [oracles_systems.row_of(leaf) for leaf in root.leaves
               if leaf is not root]
    nodes = [node for row in trained for node in row]
    assert len(nodes) == len(set(nodes)) == tree.node_mask[b].sum() - 1
    for row in trained:
      expected = oracles_systems.length(row)
      assert all(length[b, node.index] == expected for node in row)
    # Of weight 1 each, as a mean over its tokens.
    weights = np.asarray(_jitted(advantages.cbpo)(tree).weights[b])
    np.testing.assert_allclose(
        weights.sum(), sum(oracles_systems.length(row) > 0 for row in trained),
        rtol=1e-5)


@pytest.mark.parametrize('name, options', [
    ('cbpo', dict(path_weighting='sequences')),
    ('tree_grpo', dict(path_weighting='sequences')),
    ('treerl', dict(path_weighting='sequences')),
    ('spo_tree', dict(node_values='mean')),
    ('spo_tree', dict(node_weighting='splits')),
    ('sipo', dict(unit='step', a2=0.0)),
    ('sipo', dict(node_values='mean', a2=0.0)),
    ('selection_slope', dict(unit='step')),
])
def test_unknown_options_are_errors(name, options):
  value = next(iter(options.values()))
  with pytest.raises(ValueError, match=f'expected one of .*got {value!r}'):
    _trace(name, options)


@pytest.mark.parametrize('name, option', [
    ('cbpo', 'cbv_clip'), ('cbpo', 'cbv_scale'),
    ('spo_tree', 'max_probability')])
def test_negative_options_are_errors(name, option):
  with pytest.raises(ValueError, match=f'{option}: expected a finite number'):
    _trace(name, {option: -0.1})


def _trace(name, options):
  """Calls an estimator without running it."""
  function = functools.partial(getattr(advantages, name), **options)
  jax.eval_shape(function, builders.random_trees(0))

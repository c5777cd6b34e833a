"""advantages: what sets bpo and bpo_rb apart, by hand and by enumeration.

The contract that every estimator keeps is in estimator_contract_test.
"""

import functools
import itertools

import builders
import jax
import numpy as np
import oracles
import pytest

from bpo_jax import advantages
from bpo_jax import branching
from bpo_jax import tree as tree_lib

_jitted = functools.cache(jax.jit)


def _equal(got, expected, **kwargs):
  for name in ('advantages', 'weights'):
    np.testing.assert_allclose(
        getattr(got, name), getattr(expected, name), **kwargs)


@pytest.mark.parametrize('seed', range(3))
def test_bpo_is_rloo_where_only_the_root_branches(seed):
  rewards = np.random.default_rng(seed).normal(size=(3, 5))
  tree = builders.chains(rewards)
  expected = advantages.rloo(tree)
  for values in ('own', 'split_mean', 'leaf_mean'):
    _equal(advantages.bpo(tree, node_values=values), expected, atol=1e-6)
  rb = advantages.bpo_rb(tree)
  np.testing.assert_allclose(rb.advantages, expected.advantages, atol=1e-6)
  np.testing.assert_allclose(rb.weights, expected.weights / 5, atol=1e-6)


def test_prefix_credit_by_hand():
  # Two prefix actions, a branch point, one action, another branch point.
  builder = tree_lib.TreeBuilder()
  root = builder.add(-1, [0])
  a = builders.add_action(builder, root)
  b = builders.add_action(builder, a)
  c = builders.add_action(builder, b)
  builders.add_action(builder, c, reward=1.0)
  builders.add_action(builder, b, reward=0.0, birth=1)
  builders.add_action(builder, c, reward=0.5, birth=1)
  tree = tree_lib.stack([builder])
  # A of the backbone: 1 - 0 at the first branch point, 1 - 0.5 at the second.
  expected = {
      'none': [0, 0], 'all_rows': [0, 0], 'nearest': [0.25, 0.5],
      'sum': [0.25 + 0.125 * 0.5, 0.5 + 0.25 * 0.5],
      'mean': [(0.25 + 0.125 * 0.5) / 2, (0.5 + 0.25 * 0.5) / 2]}
  for option, prefix in expected.items():
    got = advantages.bpo(tree, prefix_credit=option, lambda_=0.5).advantages
    np.testing.assert_allclose(
        got[0, 1:7, 0], [*prefix, 1, 0.5, -1, -0.5], atol=1e-6)


def _two_branch_points(r):
  """Prefix a, b; forks beside c; a fork beside what follows c."""
  builder = tree_lib.TreeBuilder()
  a = builders.add_action(builder, builder.add(-1, [0]))
  b = builders.add_action(builder, a)
  c = builders.add_action(builder, b)
  builders.add_action(builder, c, reward=r[0])
  builders.add_action(builder, b, reward=r[1], birth=1)
  builders.add_action(builder, b, reward=r[2], birth=1)
  builders.add_action(builder, c, reward=r[3], birth=1)
  return builder


def test_all_rows_cancel_on_the_prefix():
  r = np.random.default_rng(0).normal(size=(4, 3))  # Of three trees.
  first = [r[0] - (r[1] + r[2]) / 2, r[1] - (r[0] + r[2]) / 2,
           r[2] - (r[0] + r[1]) / 2]
  second = [r[0] - r[3], r[3] - r[0]]
  # A row per sibling: lambda^distance A_k, as it carries it to a and to b.
  rows = np.array([[0.7 ** 2 * x, 0.7 * x] for x in first]
                  + [[0.7 ** 3 * x, 0.7 ** 2 * x] for x in second])
  assert np.abs(rows).min() > 1e-3
  np.testing.assert_allclose(rows.sum(0), 0, atol=1e-12)

  # Shapes and options of the cases, which are compiled already.
  tree = tree_lib.stack([_two_branch_points(x) for x in r.T],
                        num_nodes=28, num_tokens=8)

  def prefix_and_rest(option):
    credit = _jitted(functools.partial(
        advantages.bpo, prefix_credit=option, root_group=False, lambda_=0.7))(
            tree)
    assert (credit.weights[:, 1:8, 0] == 1).all()
    return np.split(np.asarray(credit.advantages[:, 1:8, 0]).T, [2])

  prefix, rest = prefix_and_rest('all_rows')
  np.testing.assert_allclose(prefix, rows.sum(0), atol=1e-6)
  np.testing.assert_allclose(
      rest, [first[0], second[0], first[1], first[2], second[1]], atol=1e-5)
  np.testing.assert_array_equal(rest, prefix_and_rest('none')[1])
  # The backbone's rows alone do not cancel.
  np.testing.assert_allclose(
      prefix_and_rest('sum')[0], rows[0] + rows[3], atol=1e-5)


@pytest.mark.parametrize('seed', range(3))
def test_split_weights_of_the_leaves_sum_to_one(seed):
  tree = builders.random_trees(seed)
  tree = tree.replace(action_mask=tree.token_mask)
  weights = advantages.bpo(tree, node_weighting='split').weights.max(-1)
  expected = oracles.per_node(tree, oracles.split_weight)
  seen = tree.token_mask.any(-1)
  np.testing.assert_allclose(weights[seen], expected[seen], rtol=1e-6)
  leaves = oracles.per_node(
      tree, lambda node: oracles.split_weight(node) * (not node.children))
  np.testing.assert_allclose(leaves.sum(-1), 1, rtol=1e-6)


@pytest.mark.parametrize('seed', range(5))
def test_what_rho_is_learnt_from_is_that_of_the_oracle(seed):
  tree, rho = builders.random_trees(seed), 0.3
  expected = np.zeros((2, 3))
  for root in oracles.roots(tree):
    for node in oracles.walk(root):
      above = node.parent and oracles.member_above(node.parent)
      if node.siblings and above:
        level = sum(bool(n.siblings) for n in node.path) - 1
        base = oracles.shrunk_baseline(above, rho, 'split_mean')
        others = np.mean([
            oracles.path_value(s, 'split_mean') for s in node.siblings]) - base
        value = oracles.path_value(node, 'split_mean') - base
        expected[:, min(level, 2)] += value * others, others ** 2
  got = advantages.baseline_sums(tree, rho=rho, num_levels=3)
  np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('function, options', [
    (advantages.rloo, dict(path_weighting='tokens')),
    (advantages.grpo, dict(scale='sd')),
    (advantages.bpo, dict(prefix_credit='nearby')),
    (advantages.bpo, dict(node_weighting='splits')),
    (advantages.bpo, dict(node_values='mean')),
    (advantages.bpo_rb, dict(incumbent='hold')),
])
def test_unknown_options_are_errors(function, options):
  value, = options.values()
  with pytest.raises(ValueError, match=f'expected one of .*got {value!r}'):
    function(builders.random_trees(0), **options)


class _Task:
  """Three binary actions; every tree that a rule can grow, with its odds."""

  horizon = 3

  def __init__(self, seed=0):
    rng = np.random.default_rng(seed)
    histories = [h for n in range(self.horizon)
                 for h in itertools.product((0, 1), repeat=n)]
    self.state = {h: i for i, h in enumerate(histories)}
    self.logits = rng.normal(size=len(histories))
    self.logits[0] = 1.5  # Of an entropy below what is forked at.
    self.rewards = {h: rng.normal() for h in
                    itertools.product((0, 1), repeat=self.horizon)}

  def probability(self, history):
    """Of action 1."""
    return 1 / (1 + np.exp(-self.logits[self.state[history]]))

  def entropy(self, history):
    p = self.probability(history)
    return -p * np.log(p) - (1 - p) * np.log(1 - p)

  def score(self, history, action):
    """Gradient of the log-prob of an action with respect to the logits."""
    score = np.zeros(len(self.state))
    score[self.state[history]] = action - self.probability(history)
    return score

  def suffixes(self, history):
    """Yields (probability, actions) of every way to go on."""
    for rest in itertools.product((0, 1), repeat=self.horizon - len(history)):
      probability, path = 1.0, history
      for action in rest:
        p = self.probability(path)
        probability *= p if action else 1 - p
        path += (action,)
      yield probability, rest

  def gradient(self):
    """The exact gradient of the expected return."""
    total = np.zeros(len(self.state))
    for probability, path in self.suffixes(()):
      for t, action in enumerate(path):
        total += probability * self.rewards[path] * self.score(path[:t], action)
    return total

  def lay(self, builder, parent, history, rest, birth):
    """Adds a continuation; returns [(node, history, action)]."""
    added = []
    for action in rest:
      path = history + (action,)
      reward = self.rewards.get(path, 0.0)
      parent = builders.add_action(
          builder, parent, entropy=self.entropy(history), reward=reward,
          terminal=len(path) == self.horizon, birth=birth)
      added.append((parent, history, action))
      history = path
    return added

  def backbones(self, count):
    """Returns [(probability, builder, scores by node)] of every outcome."""
    trees = []
    for combination in itertools.product(self.suffixes(()), repeat=count):
      builder = tree_lib.TreeBuilder()
      root, nodes = builder.add(-1, [0]), []
      for _, path in combination:
        nodes += self.lay(builder, root, (), path, 0)
      trees.append((np.prod([p for p, _ in combination]), builder, nodes))
    return trees

  def forked(self, trees, policy, max_forks):
    """Returns the outcomes of forking every tree once as a plan says."""
    plans = jax.device_get(jax.jit(policy)(
        tree_lib.stack([builder for _, builder, _ in trees])))
    result = []
    for i, (probability, builder, nodes) in enumerate(trees):
      points = [int(n) for n in plans.node[i] if n >= 0][:max_forks]
      histories = [next(h for n, h, _ in nodes if n == p) for p in points]
      parents = builder.build().parents
      for forks in itertools.product(*map(self.suffixes, histories)):
        copy = tree_lib.TreeBuilder()
        root = copy.add(-1, [0])
        grown, index = [], {0: root}
        for node, history, action in nodes:
          index[node], = [n for n, _, _ in self.lay(
              copy, index[parents[node]], history, (action,), 0)]
          grown.append((index[node], history, action))
        for point, history, (_, rest) in zip(points, histories, forks):
          grown += self.lay(copy, index[parents[point]], history, rest, 1)
        odds = probability * np.prod([p for p, _ in forks])
        result.append((odds, copy, grown))
    return result

  def expected(self, trees, estimator):
    """Returns the exact expectation of an estimator's gradient."""
    credit = jax.device_get(jax.jit(estimator)(
        tree_lib.stack([builder for _, builder, _ in trees])))
    step = (credit.advantages * credit.weights)[..., 0]
    total = np.zeros(len(self.state))
    for i, (probability, _, nodes) in enumerate(trees):
      for node, history, action in nodes:
        total += probability * step[i, node] * self.score(history, action)
    return total


def _bias(task, trees, estimator):
  return np.abs(task.expected(trees, estimator) - task.gradient()).max()


@pytest.fixture(scope='module')
def task():
  return _Task(seed=2)


_CAUSAL = functools.partial(
    branching.causal_threshold, threshold=0.6, num_branch_points=2,
    max_per_path=1, min_spacing=1)
_TOP = functools.partial(
    branching.top_entropy, num_branch_points=1, num_forks=1, min_spacing=1)


@pytest.fixture(scope='module')
def causal_trees(task):
  return task.forked(task.backbones(2), _CAUSAL, 2)


def test_rloo_is_unbiased(task):
  trees = task.backbones(3)
  assert np.isclose(sum(p for p, _, _ in trees), 1)
  np.testing.assert_allclose(
      task.expected(trees, advantages.rloo) / 3, task.gradient(), atol=1e-6)


@pytest.mark.parametrize('rho', [0.0, 0.5, 1.0])
def test_bpo_rb_is_unbiased_under_causal_selection(task, causal_trees, rho):
  assert any(len(b) > 7 for _, b, _ in causal_trees)
  estimator = functools.partial(advantages.bpo_rb, rho=rho)
  assert np.isclose(sum(p for p, _, _ in causal_trees), 1)
  assert _bias(task, causal_trees, estimator) < 1e-6


def test_bpo_is_unbiased_with_split_weights_alone(task, causal_trees):
  split = functools.partial(advantages.bpo, node_weighting='split')
  assert _bias(task, causal_trees, split) < 1e-6

  def uniform(tree):
    # At the scale of `split` where nothing branches below the root.
    credit = advantages.bpo(tree)
    return credit.replace(weights=credit.weights / 2)
  assert _bias(task, causal_trees, uniform) > 0.02


def test_choosing_after_the_fact_is_biased(task):
  trees = task.forked(task.backbones(2), _TOP, 1)
  assert _bias(task, trees, advantages.bpo_rb) > 0.01

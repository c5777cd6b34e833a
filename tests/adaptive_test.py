"""adaptive: the right call on known tasks, a kept budget, and no bias."""

import functools

import builders
import jax
import numpy as np
import oracles
import pytest

from bpo_jax import advantages
from bpo_jax import branching
from bpo_jax import tree as tree_lib
# The package's name for the policy hides the module's.
from bpo_jax.branching.adaptive import predicted_gain
from experiments import enumerable

_SCALARS = ('num_rollouts', 'num_branch_points', 'num_forks', 'min_gain',
            'min_spacing', 'max_per_path')
_jitted = jax.jit(branching.adaptive, static_argnames=_SCALARS)
_bpo_rb = jax.jit(advantages.bpo_rb)


def _adaptive(tree, **kwargs):
  return jax.device_get(_jitted(tree, **kwargs))


def _plan(forest, **kwargs):
  """Returns the plan that goes by the true values and costs."""
  task = forest.task
  return _adaptive(
      forest.tree, values=forest.at_end(task.values),
      remaining_costs=forest.at_end(task.remaining), **kwargs)


def _random(seed, num_trees=3):
  """Returns random trees with predictions for them."""
  tree = builders.random_trees(seed, num_trees)
  rng = np.random.default_rng(seed)
  arrays = dict(
      values=rng.random(tree.parents.shape).astype(np.float32),
      remaining_costs=10 * rng.random(tree.parents.shape).astype(np.float32))
  arrays['remaining_costs'][:, 0] = 10
  return tree, arrays


@pytest.fixture(scope='module')
def forests():
  rng = np.random.default_rng(0)
  return {name: enumerable.backbones(enumerable.make(name), rng, 2048, 4)
          for name in ('late', 'early')}


def _noise(forest):
  """Returns variance, steps and squared bias over noise of bpo_rb."""
  credit = jax.device_get(_bpo_rb(forest.tree))
  estimates = enumerable.gradient(forest, credit)
  noise = estimates.var(0, ddof=1).sum()
  error = estimates.mean(0) - forest.task.gradient.ravel()
  bias = (error @ error) * len(estimates) / noise
  return noise, forest.num_steps.mean(), bias


def test_where_branching_pays_it_forks_late_and_open_prefixes(forests):
  forest, task = forests['late'], forests['late'].task
  plan = _plan(forest, num_rollouts=8, max_per_path=1, num_forks=2)
  points, used = plan.node[:, :-1], plan.node[:, :-1] >= 0
  at = np.take_along_axis(forest.states_before, np.maximum(points, 0), 1)[used]
  assert used.sum() > len(used)
  assert (task.depth[at] >= 6).all()
  assert (task.variances[at] > 0.2).all()  # None from a dead prefix.
  rng = np.random.default_rng(1)
  noise, steps, bias = _noise(enumerable.fork(forest, plan, rng))
  fresh, fresh_steps, _ = _noise(enumerable.backbones(task, rng, 2048, 8))
  print('late', noise * steps, fresh * fresh_steps, steps, bias)
  assert noise * steps < 0.95 * fresh * fresh_steps
  assert steps <= 8 * task.remaining[0]
  assert bias < 3  # About 1 without any.


def test_where_it_does_not_pay_everything_is_fresh(forests):
  forest = forests['early']
  plan = _plan(forest, num_rollouts=10)
  assert (plan.count[:, :-1] == 0).all()
  assert (plan.count[:, -1] == 6).all() and (plan.unspent == 0).all()
  grown = enumerable.fork(forest, plan, np.random.default_rng(0))
  roots = (grown.tree.parents == 0).sum(1)
  assert (roots == 10).all()


def _greedy_oracle(tree, b, gains, parts, price, options, budget):
  """Returns [(node, offset)] of one tree, and what they cost."""
  root = oracles.roots(tree)[b]
  able = [d for d in oracles.decisions(root)
          if d[0].parent is not None and gains[b, d[0].parent.index] > price]
  taken = oracles.greedy(able, options['num_branch_points'],
                         options['min_spacing'], options.get('max_per_path'))
  cost, paid = 0.0, []
  for node, offset in taken:
    cost += options['num_forks'] * parts[b, tree.parents[b, node]]
    if cost > budget:
      break
    paid.append((node, offset))
  return paid


@pytest.mark.parametrize('seed', range(10))
@pytest.mark.parametrize('max_per_path', [None, 1])
def test_takes_what_a_greedy_oracle_takes(seed, max_per_path):
  tree, arrays = _random(seed)
  options = dict(num_branch_points=4, num_forks=2, min_spacing=2)
  if max_per_path:
    options['max_per_path'] = max_per_path
  price, budget = 0.4, 7
  leaves = np.asarray(tree_lib.num_leaves(tree))[:, 0]
  plan = _adaptive(tree, **arrays, **options, num_rollouts=20,
                   prices=np.float32(price), num_fresh=np.int32(2))
  v, parts = arrays['values'].astype(float), arrays['remaining_costs'] / 10.0
  m = options['num_forks']
  saved = v * (1 - v) * (parts * (1 - 1 / m) + (1 - parts) * m / (m + 1))
  v0 = v[:, :1]
  gains = saved / (m * parts * v0 * (1 - v0))
  for b in range(3):
    budget = max(20 - leaves[b], 0)
    expected = _greedy_oracle(
        tree, b, gains, parts, price, options, budget - min(2, budget))
    got = [(int(n), int(o)) for n, o, c in zip(
        plan.node[b, :-1], plan.offset[b, :-1], plan.count[b, :-1]) if c]
    assert got == expected
    cost = sum(m * parts[b, tree.parents[b, n]] for n, _ in expected)
    assert plan.unspent[b] == int(budget - plan.count[b, -1] - cost + 1e-4)


@pytest.mark.parametrize('seed', range(5))
@pytest.mark.parametrize('num_rollouts', [1, 6, 30])
def test_the_budget_is_kept(seed, num_rollouts):
  tree, arrays = _random(seed)
  plan = _adaptive(tree, **arrays, num_rollouts=num_rollouts, min_gain=0.1,
                   num_forks=2)
  parts = arrays['remaining_costs'] / 10
  leaves = np.asarray(tree_lib.num_leaves(tree))[:, 0]
  budget = np.maximum(num_rollouts - leaves, 0)
  above = np.take_along_axis(tree.parents, np.maximum(plan.node, 0), 1)
  each = np.take_along_axis(parts, np.maximum(above, 0), 1)
  each[:, -1] = 1.0
  cost = (plan.count * each).sum(1)
  assert (cost <= budget + 1e-4).all()
  assert (plan.unspent >= 0).all()
  assert (plan.unspent <= budget - cost + 1e-3).all()
  assert (plan.count >= 0).all()
  assert ((plan.node >= 0) == (plan.count > 0)).all()


def test_without_costs_a_fork_counts_as_a_rollout():
  tree, arrays = _random(3)
  plan = _adaptive(tree, values=arrays['values'], num_rollouts=20, num_forks=2,
                   min_gain=0.1)
  leaves = np.asarray(tree_lib.num_leaves(tree))[:, 0]
  np.testing.assert_array_equal(
      plan.count.sum(1) + plan.unspent, np.maximum(20 - leaves, 0))


def test_nothing_known_is_nothing_open():
  tree = builders.random_trees(0)
  zeros = np.zeros(tree.parents.shape, np.float32)
  plan = _adaptive(tree, values=zeros, remaining_costs=zeros, num_rollouts=40)
  leaves = np.asarray(tree_lib.num_leaves(tree))[:, 0]
  assert (plan.count[:, :-1] == 0).all()
  acts = np.asarray(tree.action_mask).any((1, 2))
  fresh = plan.count[:, -1] + plan.unspent
  np.testing.assert_array_equal(fresh[acts], (40 - leaves)[acts])


@pytest.mark.parametrize('seed', range(3))
def test_padding_and_unread_numbers_change_nothing(seed):
  tree, arrays = _random(seed)
  options = dict(num_rollouts=20, num_forks=2, min_gain=0.2)
  expected = _adaptive(tree, **arrays, **options)
  eager = branching.adaptive(tree, **arrays, **options)
  nodes = [(0, 1), (0, 3)]
  more = {k: np.pad(np.where(tree.node_mask, x, np.nan), nodes,
                    constant_values=np.nan) for k, x in arrays.items()}
  padded = _adaptive(
      builders.poison(builders.pad(tree, 1, 3, 0)), **more, **options)
  for name in ('node', 'offset', 'count', 'unspent'):
    one = getattr(expected, name)
    np.testing.assert_array_equal(one, getattr(eager, name))
    np.testing.assert_array_equal(one, getattr(padded, name)[:3])
  assert padded.unspent[3] == 0 and (padded.count[3] == 0).all()


def test_a_tree_sets_neither_its_price_nor_its_fresh_rollouts():
  tree, arrays = _random(1, num_trees=4)
  options = dict(num_rollouts=30, num_forks=1, min_gain=0.2)
  before = _adaptive(tree, **arrays, **options)
  for b in range(4):
    other = {k: x.copy() for k, x in arrays.items()}
    other['values'][b, 1:] = 0.5
    after = _adaptive(tree, **other, **options)
    assert after.count[b, -1] == before.count[b, -1]
  # The others do.
  flat = {**arrays, 'values': np.zeros_like(arrays['values'])}
  flat['values'][0] = arrays['values'][0]
  alone = _adaptive(tree, **flat, **options)
  leaves = np.asarray(tree_lib.num_leaves(tree))[0, 0]
  assert alone.count[0, -1] == 30 - leaves


def test_what_comes_after_a_decision_has_no_say():
  rng = np.random.default_rng(0)
  for cut in range(2, 8):
    plans = []
    for _ in range(2):
      builder = tree_lib.TreeBuilder()
      node = builder.add(-1, [0])
      for _ in range(8):
        node = builders.add_action(builder, node, entropy=0.5)
      tree = tree_lib.stack([builder], num_nodes=9)
      values = np.full((1, 9), 0.5, np.float32)
      past = np.random.default_rng(cut).random(cut)
      values[0, :cut], values[0, cut:] = past, rng.random(9 - cut)
      costs = np.float32([[9 - n for n in range(9)]])
      plans.append(_adaptive(
          tree, values=values, remaining_costs=costs, num_rollouts=3,
          prices=np.float32(0.3), num_fresh=np.int32(0)))
    before = [[int(n) for n in p.node[0, :-1] if 0 <= n <= cut] for p in plans]
    assert before[0] == before[1]


# --------------------------------------------------- unbiased, to the last path


def _task():
  """Every action matters; predictions are of any kind, as they may be wrong."""
  task = enumerable.random_task(2)
  # Open are the state after action 1, and that after actions 0 and 1.
  values = np.full(task.num_states, 0.02)
  values[[0, 2, 4]] = 0.3, 0.5, 0.5
  return task, values


def _bias(forest, plan):
  """Returns the largest exact bias of bpo_rb over all outcomes."""
  grown = enumerable.all_forks(forest, plan)
  chance = grown.probabilities
  assert np.isclose(chance.sum(), 1)
  credit = jax.device_get(_bpo_rb(grown.tree))
  mean = chance @ enumerable.gradient(grown, credit)
  return np.abs(mean - grown.task.gradient.ravel()).max()


def _arrays(forest, values):
  return dict(values=forest.at_end(values),
              remaining_costs=forest.at_end(forest.task.remaining))


_OPTIONS = dict(num_rollouts=4, num_branch_points=2, num_forks=1, min_gain=0.25,
                max_per_path=1)


def test_it_is_unbiased_with_given_prices():
  task, values = _task()
  forest = enumerable.all_backbones(task, 2)
  for num_fresh in (0, 1):
    plan = _adaptive(
        forest.tree, **_arrays(forest, values), **_OPTIONS,
        prices=np.float32(0.25), num_fresh=np.int32(num_fresh))
    spent = plan.count[:, :-1].sum(1)
    assert len(np.unique(spent)) > 1
    assert _bias(forest, plan) < 1e-6


def test_it_is_unbiased_with_what_the_other_trees_say():
  task, values = _task()
  forest = enumerable.all_backbones(task, 2)
  arrays = _arrays(forest, values)
  select = lambda index: jax.tree.map(
      lambda x: np.asarray(x)[index], (forest.tree, arrays))

  @jax.jit
  @functools.partial(jax.vmap, in_axes=(0, None))
  def beside(own, other):
    """Plans for a tree in a batch with another."""
    tree, both = jax.tree.map(lambda *x: jax.numpy.stack(x), own, other)
    plan = branching.adaptive(tree, **both, **_OPTIONS)
    return jax.tree.map(lambda x: x[0], plan)

  fresh = set()
  for other in range(0, len(forest.tree.parents), 9):
    plan = jax.device_get(beside(select(slice(None)), select(other)))
    assert len(np.unique(plan.count[:, -1])) == 1
    fresh.add(int(plan.count[0, -1]))
    assert _bias(forest, plan) < 1e-6
  assert len(fresh) > 1


def test_spending_what_a_tree_itself_leaves_over_would_be_biased():
  task, values = _task()
  forest = enumerable.all_backbones(task, 2)
  plan = _adaptive(
      forest.tree, **_arrays(forest, values), **_OPTIONS,
      prices=np.float32(0.25), num_fresh=np.int32(0))
  count = plan.count.copy()
  count[:, -1] = 2 - count[:, :-1].sum(1)
  node = plan.node.copy()
  node[:, -1] = np.where(count[:, -1] > 0, 1, -1)
  assert _bias(forest, plan.replace(node=node, count=count)) > 1e-3


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize('options, message', [
    (dict(num_forks=0), 'num_forks: expected at least 1'),
    (dict(num_branch_points=0), 'num_branch_points: expected at least 1'),
    (dict(num_rollouts=0), 'num_rollouts: expected at least 1, got 0'),
    (dict(values=None), 'adaptive needs values: expected an array'),
    (dict(values=np.zeros((3, 2))), r'values: .*\(3, 28\), got \(3, 2\)'),
    (dict(remaining_costs=np.zeros(3)), r'remaining_costs: .* got \(3,\)'),
])
def test_bad_input_is_an_error(options, message):
  tree, arrays = _random(0)
  with pytest.raises(ValueError, match=message):
    branching.adaptive(tree, **{**arrays, **options})


def test_gain_by_hand():
  gain = functools.partial(predicted_gain, num_forks=1)
  # One fork a quarter before the end: half of v less for 3/4 of the actions.
  np.testing.assert_allclose(gain(0.5, 0.25, 0.5), 0.75 / 2 / 0.25, rtol=1e-6)
  for nothing in ((1.0, 0.25, 0.5), (0.5, 0.25, 0.0), (0.5, 0.0, 0.5)):
    assert gain(*nothing) == 0
  # A fork at the root in pairs saves nothing; in a larger group, less than a
  # fresh rollout.
  assert gain(0.5, 1.0, 0.5) == 0
  three = predicted_gain(0.5, 1.0, 0.5, num_forks=3)
  np.testing.assert_allclose(three, 2 / 9, rtol=1e-6)

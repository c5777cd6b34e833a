"""enumerable: exact quantities by brute force; forests are what they say."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from bpo_jax import advantages
from bpo_jax import branching
from bpo_jax import types
from experiments import enumerable
from experiments import exact_noise

_CAUSAL = jax.jit(functools.partial(
    branching.causal_threshold, threshold=0.5, num_branch_points=4,
    num_forks=2, max_per_path=2, min_spacing=1))


def _ragged():
  """Returns a task with rewards on the way and early ends."""
  rng = np.random.default_rng(0)
  return enumerable.Task(
      next_states=np.array([[1, 2, 3], [4, 5, 4], [-1] * 3, [5, 6, 6],
                            [-1] * 3, [7, 7, 7], [-1] * 3, [-1] * 3]),
      rewards=np.append(0, rng.normal(size=7)),
      logits=rng.normal(size=(8, 3)))


def _tasks():
  return {'random': enumerable.random_task(0), 'ragged': _ragged(),
          'three actions': enumerable.random_task(1, 2, 3)}


@pytest.fixture(params=_tasks())
def task(request):
  return _tasks()[request.param]


def _paths(task, state=0):
  """Yields (probability, states, return) by plain recursion."""
  if task.next_states[state, 0] < 0:
    yield 1.0, (state,), 0.0
    return
  logits = np.exp(task.logits[state])
  for share, ahead in zip(logits / logits.sum(), task.next_states[state]):
    for probability, states, total in _paths(task, ahead):
      yield share * probability, (state, *states), total + task.rewards[ahead]


def _moments(paths):
  chance, value = np.array([(p, total) for p, _, total in paths]).T
  mean = chance @ value / chance.sum()
  return mean, chance @ (value - mean) ** 2 / chance.sum()


def test_values_and_variances_are_those_of_all_paths(task):
  for state in range(task.num_states):
    mean, variance = _moments(list(_paths(task, state)))
    np.testing.assert_allclose(task.values[state], mean, atol=1e-12)
    np.testing.assert_allclose(task.variances[state], variance, atol=1e-12)
  paths = list(_paths(task))
  visits = np.zeros(task.num_states)
  for probability, states, _ in paths:
    visits[list(states)] += probability
  np.testing.assert_allclose(task.visits, visits, atol=1e-12)
  assert task.horizon == max(len(states) for _, states, _ in paths) - 1


def test_explained_is_the_share_between_prefixes(task):
  paths = list(_paths(task))
  mean, variance = _moments(paths)
  for step in range(task.horizon + 1):
    groups = {}
    for path in paths:
      groups.setdefault(path[1][:step + 1], []).append(path)
    between = sum(
        sum(p for p, _, _ in group) * (_moments(group)[0] - mean) ** 2
        for group in groups.values())
    np.testing.assert_allclose(
        task.explained[step], between / variance, atol=1e-12)


def test_gradient_is_that_of_finite_differences(task):
  step, expected = 1e-5, np.zeros_like(task.logits)
  for index in np.ndindex(task.logits.shape):
    values = []
    for sign in (1, -1):
      logits = task.logits.copy()
      logits[index] += sign * step
      values.append(
          dataclasses.replace(task, logits=logits).expected_return)
    expected[index] = (values[0] - values[1]) / (2 * step)
  np.testing.assert_allclose(task.gradient, expected, atol=1e-9)
  assert np.abs(expected).max() > 1e-3


@pytest.mark.parametrize('fault, message', [
    (dict(rewards=np.zeros(3)), 'expected rewards'),
    (dict(next_states=np.array([[1, -1], [-1, -1]])), 'whole rows'),
    (dict(next_states=np.array([[0, 1], [-1, -1]])), 'above the state'),
])
def test_what_is_no_task_is_refused(fault, message):
  fields = dict(next_states=np.array([[1, 1], [-1, -1]]), rewards=np.zeros(2),
                logits=np.zeros((2, 2)))
  with pytest.raises(ValueError, match=message):
    enumerable.Task(**fields | fault)


def test_an_unknown_task_is_refused():
  with pytest.raises(ValueError, match='did you mean late'):
    enumerable.make('lat')


def _forest(task, seed=0, num_trees=64):
  rng = np.random.default_rng(seed)
  forest = enumerable.backbones(task, rng, num_trees, 2, num_nodes=16)
  plan = jax.device_get(_CAUSAL(forest.tree))
  return forest, plan, enumerable.fork(forest, plan, rng, num_nodes=40)


@pytest.mark.parametrize('name', enumerable.TASKS)
def test_named_tasks_grow_valid_trees(name):
  task, rng = enumerable.make(name), np.random.default_rng(0)
  forest = enumerable.backbones(task, rng, 16, 3)
  forest.tree.validate()
  assert (forest.num_steps == 3 * task.horizon).all()
  assert 0 < task.expected_return < 1


def test_forests_are_valid_and_say_what_was_done(task):
  before, plan, forest = _forest(task)
  forest.tree.validate()
  tree = forest.tree
  assert forest.stage == 1 and tree.birth.max() == 1
  # What was there stays; every path ends where an episode does.
  n = before.tree.parents.shape[1]
  kept = before.tree.node_mask
  np.testing.assert_array_equal(
      tree.parents[:, :n][kept], before.tree.parents[kept])
  parents = {(b, p) for b, p in zip(*np.nonzero(tree.parents >= 0))}
  for b, n in parents:
    above = tree.parents[b, n]
    state, action = forest.states[b, above], tree.tokens[b, n, 0]
    assert forest.states_before[b, n] == state
    assert task.next_states[state, action] == forest.states[b, n]
    assert tree.rewards[b, n] == np.float32(task.rewards[forest.states[b, n]])
    np.testing.assert_allclose(
        tree.behaviour_log_probs[b, n, 0], task.log_policy[state, action],
        rtol=1e-6)
    np.testing.assert_allclose(
        tree.entropies[b, n, 0], task.entropies[state], rtol=1e-6)
  has_child = np.zeros_like(tree.node_mask)
  rows, nodes = np.nonzero(tree.parents >= 0)
  has_child[rows, tree.parents[rows, nodes]] = True
  np.testing.assert_array_equal(tree.terminal, tree.node_mask & ~has_child)
  # A fork for every one in the plan, at the state before the plan's action.
  assert (plan.count > 0).any()
  for b in range(len(plan.node)):
    expected = sorted(
        int(tree.parents[b, n]) for n, c in zip(plan.node[b], plan.count[b])
        for _ in range(c))
    got = sorted(int(tree.parents[b, n]) for n in np.flatnonzero(
        (tree.birth[b] == 1) & (tree.birth[b, tree.parents[b]] == 0)))
    assert got == expected


def test_exact_quantities_on_nodes(task):
  _, _, forest = _forest(task)
  at_end, before = forest.at_end(task.values), forest.before(task.values)
  b, n = np.nonzero(forest.tree.parents >= 0)
  np.testing.assert_array_equal(
      before[b, n, 0], at_end[b, forest.tree.parents[b, n]])
  assert (at_end[~forest.tree.node_mask] == 0).all()
  assert (before[:, 0] == 0).all()


def test_actions_are_drawn_from_the_policy(task):
  forest = enumerable.backbones(task, np.random.default_rng(0), 20_000, 1)
  states = np.bincount(
      forest.states[forest.tree.node_mask], minlength=task.num_states)
  share = states / 20_000
  error = np.sqrt(task.visits * (1 - task.visits) / 20_000)
  assert (np.abs(share - task.visits) <= 5 * error + 1e-12).all()


def test_gradient_sums_credit_times_scores(task):
  _, _, forest = _forest(task, num_trees=5)
  rng, tree = np.random.default_rng(1), forest.tree
  credit = types.Credit(
      advantages=rng.normal(size=tree.tokens.shape).astype(np.float32),
      weights=rng.random(tree.tokens.shape).astype(np.float32))
  expected = np.zeros((5, *task.logits.shape))
  for b, n in zip(*np.nonzero(tree.action_mask[..., 0])):
    state, action = forest.states_before[b, n], tree.tokens[b, n, 0]
    score = np.eye(task.num_actions)[action] - task.policy[state]
    expected[b, state] += (
        float(credit.advantages[b, n, 0]) * credit.weights[b, n, 0] * score)
  np.testing.assert_allclose(
      enumerable.gradient(forest, credit), expected.reshape(5, -1), atol=1e-6)


def test_forks_elsewhere_are_refused(task):
  forest = enumerable.backbones(task, np.random.default_rng(0), 2, 1)
  for node, offset in ((1, 1), (0, 0)):
    plan = types.BranchPlan(
        node=np.array([[-1], [node]]), offset=np.array([[0], [offset]]),
        count=np.array([[0], [1]]))
    with pytest.raises(ValueError, match='offset 0 .*tree 1, slot 0'):
      enumerable.fork(forest, plan, np.random.default_rng(0))
  with pytest.raises(ValueError, match='num_nodes: expected at least'):
    enumerable.backbones(task, np.random.default_rng(0), 2, 4, num_nodes=3)


def test_an_empty_plan_changes_nothing(task):
  forest = enumerable.backbones(task, np.random.default_rng(0), 3, 2)
  nothing = np.full((3, 2), -1)
  plan = types.BranchPlan(node=nothing, offset=0 * nothing, count=0 * nothing)
  same = enumerable.fork(forest, plan, np.random.default_rng(0))
  jax.tree.map(np.testing.assert_array_equal, same.tree, forest.tree)


def test_every_outcome_once(task):
  forest = enumerable.all_backbones(task, 2)
  forest.tree.validate()
  num_paths = len(list(_paths(task)))
  assert len(forest.probabilities) == num_paths ** 2
  np.testing.assert_allclose(forest.probabilities.sum(), 1)
  plan = jax.device_get(_CAUSAL(forest.tree))
  plan = plan.replace(count=np.minimum(plan.count, 1) * (np.arange(4) < 2))
  grown = enumerable.all_forks(forest, plan)
  grown.tree.validate()
  np.testing.assert_allclose(grown.probabilities.sum(), 1)
  outcomes = np.concatenate(
      [grown.tree.parents, grown.tree.tokens[..., 0]], axis=1)
  assert len(np.unique(outcomes, axis=0)) == len(outcomes) > num_paths ** 2


def _trace(estimates, chance):
  return chance @ ((estimates - chance @ estimates) ** 2).sum(1)


# (step, siblings, whether some states alone are forked)
_DESIGNS = ((0, 1, False), (1, 2, False), (2, 3, False), (1, 2, True),
            (2, 2, True))


def _every_tree(task, step, size, some):
  """Returns every tree of two backbones forked so, and the open states."""
  forest = enumerable.all_backbones(task, 2)
  open_states = np.arange(task.num_states) % 2 == 1 if some else None
  node = np.add([[1, 1 + task.horizon]] * len(forest.tree.parents), step)
  count = np.full_like(node, size - 1)
  if some:
    count *= open_states[np.take_along_axis(forest.states_before, node, axis=1)]
    assert 0 < count.mean() < 1
  plan = types.BranchPlan(node=node, offset=0 * node, count=count)
  return enumerable.pad(enumerable.all_forks(forest, plan), 16), open_states


@pytest.fixture(scope='module')
def credits():
  """Returns task, forests, open states and credit by design."""
  task = enumerable.random_task(0)
  forests, opened = zip(*(_every_tree(task, *d) for d in _DESIGNS))
  # One batch, so that it compiles once.
  batch = jax.tree.map(
      lambda *parts: np.concatenate(parts), *(f.tree for f in forests))
  credit = jax.device_get(
      jax.jit(functools.partial(advantages.bpo_rb, rho=1.0))(batch))
  ends = np.cumsum([len(f.tree.parents) for f in forests])[:-1]
  parts = zip(np.split(credit.advantages, ends), np.split(credit.weights, ends))
  return task, {
      design: (forest, states, types.Credit(advantages=a, weights=w))
      for design, forest, states, (a, w) in zip(
          _DESIGNS, forests, opened, parts)}


@pytest.mark.parametrize('design', _DESIGNS)
def test_closed_forms_of_the_noise_are_those_of_enumeration(credits, design):
  task, by_design = credits
  forest, open_states, credit = by_design[design]
  chance = forest.probabilities
  estimates = enumerable.gradient(forest, credit)
  np.testing.assert_allclose(
      chance @ estimates, task.gradient.ravel(), atol=1e-6)
  np.testing.assert_allclose(
      exact_noise.branching_noise(task, 2, *design[:2], open_states),
      (_trace(estimates, chance), chance @ forest.num_steps), rtol=1e-6)


@jax.jit
def _three_credits(tree):
  uniform, split = (functools.partial(
      advantages.bpo, node_weighting=x)(tree) for x in ('uniform', 'split'))
  return uniform, split, advantages.bpo_rb(tree)


@pytest.mark.parametrize('threshold, num_forks', [
    (0.98, {0, 1, 2}), (0.5, {1, 2, 3})])
def test_a_threshold_is_causal_where_episodes_end_early(threshold, num_forks):
  """The lower one is exceeded everywhere, so that `max_per_path` stops it."""
  task = _ragged()
  policy = jax.jit(functools.partial(
      branching.causal_threshold, threshold=threshold, num_branch_points=4,
      num_forks=1, max_per_path=2, min_spacing=1))
  forest = enumerable.all_backbones(task, 2)
  lengths = forest.tree.action_mask.sum((1, 2))
  plan = jax.device_get(policy(forest.tree))
  assert len(np.unique(lengths)) > 2
  assert set(plan.count.sum(1)) == num_forks
  forest = enumerable.all_forks(forest, plan)
  truth, chance = task.gradient.ravel(), forest.probabilities
  uniform, split, rb = (
      chance @ enumerable.gradient(forest, credit)
      for credit in jax.device_get(_three_credits(forest.tree)))
  for mean in (split, rb):
    np.testing.assert_allclose(mean, truth, atol=1e-6)
  # Whatever the size of the step.
  along = (uniform @ truth) / (truth @ truth) * truth
  assert np.linalg.norm(uniform - along) > 0.02 * np.linalg.norm(along)


@pytest.mark.parametrize('task_seed', range(3))
def test_theorem_4_3_holds_to_float64(task_seed):
  task = enumerable.random_task(task_seed)
  for step in range(task.horizon):
    for size in (2, 3, 4):
      theorem = exact_noise.theorem_4_3(task, step, size)
      assert abs(theorem.error) < 1e-12
      factor = size / (size - 1)
      np.testing.assert_allclose(
          theorem.root, factor * task.return_variance, atol=1e-12)
  assert theorem.explained > 1e-3


def test_theorem_4_3_with_early_ends_and_rewards_on_the_way():
  for step in range(3):
    theorem = exact_noise.theorem_4_3(_ragged(), step, 3)
    assert abs(theorem.error) < 1e-12


def test_rloo_estimates_the_exact_gradient_within_its_noise():
  task = enumerable.make('late')
  forest = enumerable.backbones(task, np.random.default_rng(0), 4096, 4)
  credit = jax.device_get(jax.jit(advantages.rloo)(forest.tree))
  estimates = enumerable.gradient(forest, credit) / 4
  noise, steps = exact_noise.branching_noise(task, 4)
  square = np.sum((estimates.mean(0) - task.gradient.ravel()) ** 2)
  assert 0.5 < square / (noise / 4096) < 2
  assert steps == pytest.approx(forest.num_steps.mean())

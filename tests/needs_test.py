"""needs: what a batch's own returns must have no say in, and what is golden."""

import functools
import types as python_types

import builders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_agents

from bpo_jax import advantages
from bpo_jax import designs
from bpo_jax import tree as trees
from bpo_jax.branching import depths
from experiments import assembly
from experiments import configs
from experiments import methods
from experiments import needs as needs_lib
from experiments import train
from experiments import warm_start

_KEY = jax.random.key(0)


@functools.cache
def _made(algorithm, **options):
  """Returns the needs of an algorithm, and the state of its first update."""
  config = configs.TrainConfig(algorithm=algorithm, **options)
  network = tiny_agents.model(num_layers=1)
  agent = python_types.SimpleNamespace(
      model=network, grower=python_types.SimpleNamespace(max_turns=6))
  method = methods.make(config, vocab_size=64)
  return needs_lib.Needs(config, agent, method), assembly.init_state(
      config, agent, tiny_agents.params_of(network))


def _two_outcomes():
  """Returns trees that differ in their rewards alone."""
  tree = builders.random_trees(0, num_trees=4)
  return tree, tree.replace(rewards=np.where(
      tree.node_mask, np.roll(tree.rewards, 1, axis=1), 0).astype(np.float32))


def _given(needs, state, tree):
  return jax.device_get(needs.give(state, tree, [None] * len(tree.parents)))


@pytest.mark.parametrize('algorithm, array', [
    ('bpo_rb', 'rho'), ('bpo_adaptive', 'rho'), ('sipo', 'a2')])
def test_a_batch_has_no_say_in_its_own_baseline(algorithm, array):
  needs, state = _made(algorithm)
  one, other = _two_outcomes()
  # Nothing was seen yet, and so it is the same whatever is seen now;
  first = [_given(needs, state, tree) for tree in (one, other)]
  np.testing.assert_array_equal(*(x.arrays[array] for x in first))
  # from the next update on what was seen then tells, and that alone.
  second = [
      [_given(needs, x.state, tree).arrays[array] for tree in (one, other)]
      for x in first]
  for after_first in second:
    np.testing.assert_array_equal(*after_first)
  assert np.abs(second[0][0] - second[1][0]).max() > 1e-3


def test_the_trust_in_siblings_is_learnt_from_what_was_told():
  needs, state = _made('bpo_rb')
  one, other = _two_outcomes()
  first = _given(needs, state, one)
  np.testing.assert_array_equal(first.arrays['rho'], [0.5] * 4)
  sums = np.asarray(advantages.baseline_sums(one, rho=first.arrays['rho']))
  # As if a half had been seen once before.
  expected = np.clip((sums[0] + 0.5) / (sums[1] + 1), 0, 1)
  second = _given(needs, first.state, other)
  np.testing.assert_allclose(second.arrays['rho'], expected, rtol=1e-5)
  assert second.metrics['baseline/rho_1'] == second.arrays['rho'][1]


def test_a_rho_that_was_given_stays():
  needs, state = _made('bpo_rb', rho=0.25)
  given = _given(needs, state, _two_outcomes()[0])
  assert not given.arrays
  np.testing.assert_array_equal(given.state.auxiliary['baseline_sums'], 0)


def test_the_slope_is_that_of_the_batch_before():
  needs, state = _made('sipo')
  one, other = _two_outcomes()
  first = _given(needs, state, one)
  assert first.arrays['a2'] == 0
  covariance, variance = advantages.selection_slope(one)
  second = _given(needs, first.state, other)
  np.testing.assert_allclose(
      second.arrays['a2'], covariance / variance, rtol=1e-5)


def test_a_batch_has_no_say_in_its_own_design(monkeypatch):
  needs, state = _made('bpo_adaptive')
  one, other = _two_outcomes()
  asked = []

  def next_design(sums, **options):
    asked.append(sums)
    return depths.unknown()
  monkeypatch.setattr(designs, 'next_design', next_design)
  plan = lambda state, tree: jax.device_get(needs.plan(state, _KEY, tree))
  jax.tree.map(np.testing.assert_array_equal, *(
      plan(state, tree) for tree in (one, other)))
  after = [_given(needs, state, tree).state for tree in (one, other)]
  plan(after[0], other)
  # By nothing that was not there before the trees were.
  for got, of in zip(asked, (state, state, after[0])):
    jax.tree.map(np.testing.assert_array_equal, got,
                 of.auxiliary['variance_sums'])
  assert any(not np.array_equal(x, y) for x, y in zip(*(
      jax.tree.leaves(x.auxiliary['variance_sums']) for x in after)))


def test_a_design_is_made_for_the_rho_of_the_credit(monkeypatch):
  asked = []

  def next_design(sums, rho, **options):
    asked.append(rho)
    return depths.unknown()
  monkeypatch.setattr(designs, 'next_design', next_design)
  tree, _ = _two_outcomes()
  needs, state = _made('bpo_adaptive', rho=1.0)
  needs.plan(state, _KEY, tree)
  assert asked == [1.0]
  needs, state = _made('bpo_adaptive')
  state = _given(needs, state, tree).state
  needs.plan(state, _KEY, tree)
  used = _given(needs, state, tree).arrays['rho']
  np.testing.assert_array_equal(asked[1], used)
  assert np.abs(used - 0.5).max() > 1e-3


def _entropies(low, high):
  """Returns trees of three decisions each, all as uncertain as their tree."""
  made = []
  for entropy in (low, high):
    builder = trees.TreeBuilder()
    node = builder.add(-1, [1])
    for _ in range(3):
      node = builders.add_action(builder, node, entropy=entropy)
    made.append(builder)
  return trees.stack(made)


def test_a_batch_has_no_say_in_its_own_threshold():
  needs, state = _made('bpo_rb', min_spacing=0)
  forks = lambda state, *tree: np.asarray(
      needs.plan(state, _KEY, _entropies(*tree)).count).sum(1) > 0
  state = state._replace(branch_threshold=jnp.float32(0.5))
  # The threshold is the state's, however uncertain the batch is.
  assert forks(state, 0.4, 0.6).tolist() == [False, True]
  assert forks(state, 0.4, 9.0).tolist() == [False, True]
  assert forks(state, 0.1, 0.4).tolist() == [False, False]
  assert forks(state, 0.6, 0.6).tolist() == [True, True]


def test_the_threshold_is_the_quantile_of_earlier_updates():
  needs, state = _made('bpo_rb', entropy_quantile=0.5)
  run = python_types.SimpleNamespace(
      config=configs.TrainConfig(algorithm='bpo_rb', entropy_quantile=0.5),
      needs=needs)
  compute = python_types.SimpleNamespace(
      environment_steps=1, generated_tokens=1)
  seen = []
  for number, entropy in enumerate((0.6, 0.2, 0.2)):
    grown = python_types.SimpleNamespace(
        tree=_entropies(entropy, entropy), compute=compute)
    # The update that learns from the trees comes first.
    state = train.count_up(
        run, state._replace(update=state.update + 1), grown, number + 1)
    seen.append(float(state.branch_threshold))
  np.testing.assert_allclose(seen[0], 0.6, rtol=1e-6)
  assert 0.2 < seen[2] < seen[1] < 0.6


def test_an_action_that_was_forked_inside_is_one_decision():
  builder = trees.TreeBuilder()
  node, heads = builder.add(-1, [1]), []
  for entropy in (0.5, 0.7):
    node = builder.add(
        node, [2, 3, 4, 5], [True] * 3 + [False], [-1.0] * 4,
        [entropy, 0.1, 0.1, 0.0])
    heads.append(builder.split(node, 1))
  builders.add_action(builder, heads[0], entropy=0.9, birth=1)
  found = needs_lib.first_token_entropies(trees.stack([builder]))
  np.testing.assert_allclose(found, [0.5, 0.7], rtol=1e-6)


def test_a_turn_without_an_observation_is_followed_by_a_decision():
  builder = trees.TreeBuilder()
  node = builder.add(-1, [1])
  for turn, entropy in enumerate((0.1, 0.2, 0.3)):
    node = builder.add(node, [2, 3], [True, True], [-1.0] * 2, [entropy, 0.9],
                       anchor=turn)
  found = needs_lib.first_token_entropies(trees.stack([builder]))
  np.testing.assert_allclose(found, [0.1, 0.2, 0.3], rtol=1e-6)


@pytest.mark.parametrize('success_threshold', [0.5, 0.0, -0.5])
def test_padding_solves_no_task(monkeypatch, success_threshold):
  monkeypatch.setattr(warm_start, 'make_expert', lambda agent, noise: None)
  needs, state = _made('gcpo', success_threshold=success_threshold)
  # One path of -1, and one that reaches the threshold; much padding.
  tree = builders.chains(
      [[-1.0], [-1.0, success_threshold]], num_nodes=8, num_tokens=2)
  asked = []

  def demonstrate(agent, expert, tasks, rng, max_turns):
    asked.extend(tasks)
    return builders.chains([[1.0]])
  monkeypatch.setattr(warm_start, 'demonstrate', demonstrate)
  given = needs.give(state, tree, ['failed', 'solved'])
  assert asked == ['failed']
  assert given.arrays['golden'].any(1).tolist() == [True, False]

"""branching: equal to a greedy oracle, and causal where it says so."""

import functools
import inspect

import builders
import jax
import numpy as np
import oracles
import pytest

from bpo_jax import branching
from bpo_jax import tree as tree_lib

_SEEDS = range(10)


@functools.cache
def _jitted(policy):
  arrays = ('tree', 'key', 'threshold', 'open_mask', 'birth')
  return jax.jit(policy, static_argnames=[
      name for name in inspect.signature(policy).parameters
      if name not in arrays])


def _top(tree, **kwargs):
  return jax.device_get(_jitted(branching.top_entropy)(tree, **kwargs))


def _causal(tree, threshold, **kwargs):
  return jax.device_get(
      _jitted(branching.causal_threshold)(tree, threshold, **kwargs))


def _slots(plan, b):
  """Returns (node, offset) of every used slot of a tree."""
  return [(int(n), int(o)) for n, o in zip(plan.node[b], plan.offset[b])
          if n >= 0]


@pytest.mark.parametrize('seed', _SEEDS)
@pytest.mark.parametrize('statistic', branching.STATISTICS)
@pytest.mark.parametrize('min_spacing, backbones_only', [(1, False), (6, True)])
def test_top_entropy(seed, statistic, min_spacing, backbones_only):
  tree = builders.random_trees(seed)
  plan = _top(builders.poison(tree), num_branch_points=3, num_forks=2,
              min_spacing=min_spacing, statistic=statistic,
              birth=0 if backbones_only else None)
  for b, root in enumerate(oracles.roots(tree)):
    ranked = sorted(oracles.decisions(root, backbones_only), key=lambda d: (
        -oracles.action_entropy(d[0], d[1], statistic)))
    expected = oracles.greedy(ranked, 3, min_spacing)
    assert _slots(plan, b) == expected
    used = len(expected)
    np.testing.assert_array_equal(plan.count[b], [2] * used + [0] * (3 - used))
    np.testing.assert_array_equal(plan.node[b, used:], -1)
    np.testing.assert_array_equal(plan.offset[b, used:], 0)


@pytest.mark.parametrize('seed', _SEEDS)
@pytest.mark.parametrize('max_per_path', [None, 1])
@pytest.mark.parametrize('min_spacing', [1, 5])
def test_causal_threshold(seed, max_per_path, min_spacing):
  tree = builders.random_trees(seed)
  open_mask = np.random.default_rng(seed).random(tree.parents.shape) < 0.8
  plan = _causal(tree, 0.3, num_branch_points=4, min_spacing=min_spacing,
                 max_per_path=max_per_path, open_mask=open_mask)
  for b, root in enumerate(oracles.roots(tree)):
    above = [d for d in oracles.decisions(root)
             if d[0].entropies[d[1]] > 0.3 and open_mask[b, d[0].index]]
    assert _slots(plan, b) == oracles.greedy(above, 4, min_spacing,
                                             max_per_path or 4)


def _backbone(entropies):
  builder = tree_lib.TreeBuilder()
  node = builder.add(-1, [0])
  for entropy in entropies:
    node = builders.add_action(builder, node, num_tokens=4, entropy=entropy)
  return tree_lib.stack([builder])


def test_the_future_has_no_say_in_a_causal_plan():
  rng = np.random.default_rng(0)
  for cut in range(1, 8):
    past = list(rng.random(8))
    future = past[:cut] + list(rng.random(8 - cut))
    plans = [_causal(_backbone(e), 0.5, num_branch_points=3, min_spacing=8)
             for e in (past, future)]
    before = [[s for s in _slots(p, 0) if s[0] <= cut] for p in plans]
    assert before[0] == before[1]


def test_spacing_by_hand():
  # Actions of four tokens: decisions lie at tokens 1, 5, 9, 13, 17.
  tree = _backbone([.1, .9, .8, .2, .5])
  plan = _top(tree, num_branch_points=4, min_spacing=5)
  assert _slots(plan, 0) == [(2, 0), (5, 0)]
  plan = _top(tree, num_branch_points=4, min_spacing=4)
  assert _slots(plan, 0) == [(2, 0), (3, 0), (5, 0), (4, 0)]


def test_two_backbones_do_not_space_each_other():
  builder = tree_lib.TreeBuilder()
  root = builder.add(-1, [0])
  for _ in range(2):
    node = builders.add_action(builder, root, entropy=0.1)
    builders.add_action(builder, node, entropy=0.9)
  plan = _top(tree_lib.stack([builder]), num_branch_points=4, min_spacing=9)
  assert _slots(plan, 0) == [(2, 0), (4, 0)]


def test_one_state_is_one_decision():
  builder = tree_lib.TreeBuilder()
  root = builder.add(-1, [0])
  for _ in range(3):
    builders.add_action(builder, root, entropy=0.9)
  plan = _top(tree_lib.stack([builder]), num_branch_points=4, min_spacing=1)
  assert _slots(plan, 0) == [(1, 0)]


def test_a_decision_inside_a_node_forks_at_its_offset():
  builder = tree_lib.TreeBuilder()
  builder.add(-1, range(6), action_mask=[0, 0, 1, 1, 0, 1],
              behaviour_log_probs=[-1.] * 6, entropies=[9, 9, .1, 9, 9, .2])
  tree = tree_lib.stack([builder])
  assert _slots(_top(tree, min_spacing=1), 0) == [(0, 5), (0, 2)]


@pytest.mark.parametrize('seed', range(3))
def test_padding_and_other_trees_change_nothing(seed):
  tree = builders.random_trees(seed)
  key = jax.random.key(seed)
  tree = tree.replace(entropies=np.zeros_like(tree.entropies))
  for policy in (functools.partial(_top, key=key, min_spacing=1),
                 functools.partial(_causal, threshold=-1.0, min_spacing=1)):
    expected, padded = policy(tree), policy(builders.pad(tree, 1, 3, 2))
    first = policy(builders.take(tree, [0]))
    for b in range(3):
      assert _slots(padded, b) == _slots(expected, b)
    assert _slots(padded, 3) == []
    assert _slots(first, 0) == _slots(expected, 0)


def test_ties_are_broken_by_the_key_alone():
  tree = _backbone([0.5] * 6)
  first = {_slots(_top(tree, num_branch_points=1, min_spacing=1), 0)[0]
           for _ in range(2)}
  assert first == {(1, 0)}
  drawn = {_slots(_top(tree, num_branch_points=1, min_spacing=1,
                       key=jax.random.key(seed)), 0)[0] for seed in range(60)}
  assert drawn == {(n, 0) for n in range(1, 7)}


def test_threshold_per_tree():
  tree = _backbone([0.5, 0.7])
  tree = jax.tree.map(lambda x: np.concatenate([x, x]), tree)
  plan = _causal(tree, np.float32([0.4, 0.6]), num_branch_points=1,
                 min_spacing=1)
  assert (_slots(plan, 0), _slots(plan, 1)) == ([(1, 0)], [(2, 0)])


def test_an_unknown_statistic_is_an_error():
  with pytest.raises(ValueError, match="first_token, action; got 'token'"):
    branching.top_entropy(_backbone([1.0]), statistic='token')

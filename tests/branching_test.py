"""branching: equal to a greedy oracle, and causal where it says so."""

import functools
import inspect
import itertools
import typing

import builders
import jax
import numpy as np
import oracles
import pytest

from bpo_jax import advantages
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
@pytest.mark.parametrize('statistic', typing.get_args(branching.Statistic))
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


@functools.cache
def _compiled(policy, options):
  return jax.jit(functools.partial(policy, **dict(options)))


def _plan(policy, tree, arrays=None, **options):
  """Returns (node, offset, count) of the used slots, and what is unspent."""
  policy = _compiled(policy, tuple(options.items()))
  plan = jax.device_get(policy(tree, **(arrays or {})))
  counts = plan.count[0][plan.node[0] >= 0].tolist()
  return ([(*slot, count) for slot, count in zip(_slots(plan, 0), counts)],
          int(plan.unspent[0]))


def _stack(builder):
  """Returns a batch of one tree, all of one shape."""
  return tree_lib.stack([builder], num_nodes=16, num_tokens=4)


def test_equal_distances_by_hand():
  # Decisions at 1, 5, 9, 13, 17, the end at 21; thirds of 20 are 6.7 and 13.3.
  tree = _backbone([.0] * 5)
  assert _plan(branching.equally_spaced, tree, num_branch_points=2,
               num_forks=1) == ([(3, 0, 1), (4, 0, 1)], 0)


def test_oracle_value_gap_by_hand():
  # Values before the three actions 0.5, 0.6, 0.2; then the reward of 1.
  builder = tree_lib.TreeBuilder()
  node = builder.add(-1, [0])
  for reward in (0.0, 0.0, 1.0):
    node = builders.add_action(builder, node, reward=reward)
  values = np.float32([[.5, .6, .2] + [0] * 13])
  slots, _ = _plan(branching.oracle_value_gap, _stack(builder),
                   dict(values=values), num_branch_points=3, min_spacing=0)
  assert [node for node, *_ in slots] == [3, 2, 1]


def _by_token(entropies, log_probs=None, num_backbones=1):
  """Returns trajectories of one action of one token after the other."""
  builder = tree_lib.TreeBuilder()
  root = builder.add(-1, [0])
  for _ in range(num_backbones):
    node = root
    for i, entropy in enumerate(entropies):
      log_prob = -1.0 if log_probs is None else log_probs[i]
      node = builder.add(node, [0], [True], [log_prob], [entropy])
  return _stack(builder)


def test_cbpo_by_hand():
  # Windows of two, over log 10: 0.1 before token 0, and 0.35, 0.6, 0.1 before
  # 2, 4 and 6. So P_raw = 0.2 + 2 (H - 0.1) = 0.7, 1 and 0.2.
  unit = np.log(10)
  entropies = np.array([.1, .1, .3, .4, .5, .7, .1, .1]) * unit
  slots, unspent = _plan(
      branching.cbpo_allocation, _by_token(entropies), num_rollouts=7,
      boundary_interval=2, entropy_window=2, vocab_size=10)
  # At token 4: 1, then 0.757 (L = l = 1), above 0.609 at token 2 (L = 1), then
  # 0.644 (L = l = 2) above 0.562; node 4 is full, so that token 2 gets the
  # fourth, 0.530. The trajectory is full; the last two are fresh rollouts.
  assert slots == [(5, 0, 3), (3, 0, 1), (1, 0, 2)]
  assert unspent == 0


def test_appo_forks_after_the_token():
  tree = _by_token([.1, .9, .1, .8, .1])
  assert _plan(branching.appo_score, tree, num_branch_points=4) == (
      [(3, 0, 1), (5, 0, 1)], 2)


def test_appo_weighs_by_what_the_future_gained():
  tree = _by_token([.9, .1, .1, .9, .1], [-1.0] * 5)
  current = np.asarray(tree.behaviour_log_probs).copy()
  current[0, 4] += 0.1  # The fourth token, so that Omega falls after it.
  current[0, 1] -= 0.1  # The first one, so that Omega is lower there.
  slots, _ = _plan(
      branching.appo_score, tree, dict(current_log_probs=current))
  assert slots == [(5, 0, 1)]


def test_arpo_asks_after_observations_alone():
  tree = _by_token([.5] * 4)
  slots, unspent = _plan(
      branching.arpo_after_tool, tree, dict(key=jax.random.key(0)),
      num_rollouts=9, fork_threshold=1.0)
  # Before each action but the first, in turn; then five fresh rollouts.
  assert slots == [(2, 0, 1), (3, 0, 1), (4, 0, 1), (1, 0, 5)]
  assert unspent == 0


def test_trace_by_hand():
  # A success that was predicted with 0.5, 0.9 and 0.2: one more rollout from
  # the root adds 0.5, then 0.25; one fork 0.1 before the second action, and
  # 0.8, then 0.16, then 0.032 before the third.
  builder = tree_lib.TreeBuilder()
  node = builder.add(-1, [0])
  for reward in (0.0, 0.0, 1.0):
    node = builders.add_action(builder, node, reward=reward)
  values = np.float32([[.5, .9, .2] + [0] * 13])
  plan = functools.partial(
      _plan, branching.trace_budget, _stack(builder),
      dict(values=values))
  assert plan(num_rollouts=5) == ([(3, 0, 2), (1, 0, 2)], 0)
  assert plan(num_rollouts=2) == ([(3, 0, 1)], 0)


_SPO_TOKENS = 24


def _spo_rest(start, levels):
  """Tokens of a trajectory from a position on: five cutpoints, then none."""
  probabilities = np.float32([.5] * 5 + [.95])
  rest = np.log(np.tile(probabilities, levels))[start:]
  return [0] * len(rest), [True] * len(rest), rest


@pytest.mark.parametrize('arity, levels, num_cuts', [
    (6, 2, [6, 36]), (2, 2, [2, 4]), (2, 3, [2, 4, 8])])
def test_spo_lays_one_level_a_call(arity, levels, num_cuts):
  builder = tree_lib.TreeBuilder()
  root = builder.add(-1, [0])
  for _ in range(arity):
    builder.add(root, *_spo_rest(0, levels))
  found = []
  for stage in range(1, levels + 1):
    tree = tree_lib.stack(
        [builder], num_nodes=64, num_tokens=_SPO_TOKENS)
    slots, unspent = _plan(
        branching.spo_cutpoints, tree, num_branch_points=36,
        num_forks=arity - 1)
    assert unspent == (36 - len(slots)) * (arity - 1)
    found.append(len(slots))
    nodes, offsets, counts = zip(*slots)
    above = np.asarray(tree_lib.tokens_above(tree))[0, list(nodes)]
    for handle, start, count in zip(
        builder.fork_points(nodes, offsets), above + offsets, counts):
      # The cut after five cutpoints, the root's token not counted.
      assert start - 1 == 6 * stage - 1
      for _ in range(count):
        builder.add(handle, *_spo_rest(start - 1, levels), birth=stage)
  assert found == num_cuts
  parents = builder.build().parents
  assert len(parents) - len(set(parents[1:])) == arity ** (levels + 1)
  assert np.bincount(parents[1:]).max() == arity


def test_branpo_walks_back_from_a_failure():
  # Two failures of three actions. Forks of the first one's last action fail,
  # then one at the second last succeeds.
  builder = tree_lib.TreeBuilder()
  root = builder.add(-1, [0])
  ends = []
  for _ in range(2):
    first = builders.add_action(builder, root)
    second = builders.add_action(builder, first)
    ends.append((first, second, builders.add_action(builder, second)))
  tail = functools.partial(_plan, branching.branpo_tail)
  assert tail(_stack(builder)) == ([(3, 0, 2), (6, 0, 2)], 16)
  for _, second, _ in ends:
    builders.add_action(builder, second, birth=1, reward=0.0)
  assert tail(_stack(builder))[0] == [(2, 0, 2), (5, 0, 2)]
  builders.add_action(builder, ends[0][0], birth=2, reward=1.0)
  builders.add_action(builder, ends[1][0], birth=2, reward=0.0)
  # The second one goes on, before its first action: at the root.
  assert tail(_stack(builder))[0] == [(1, 0, 2)]
  builders.add_action(builder, root, birth=3, reward=0.0)
  assert tail(_stack(builder)) == ([], 20)


def _tail_of(*rollouts):
  """Plans for rollouts of (return, actions, tokens of each)."""
  builder = tree_lib.TreeBuilder()
  root = builder.add(-1, [0])
  for value, num_actions, num_tokens in rollouts:
    node = root
    for step in range(num_actions):
      node = builders.add_action(
          builder, node, num_tokens=num_tokens,
          reward=value if step == num_actions - 1 else 0.0)
  return _plan(branching.branpo_tail, _stack(builder))[0]


def test_branpo_by_accuracy():
  # The first one is longer by one action.
  assert _tail_of((1., 4, 1), (1., 3, 1)) == [(4, 0, 1), (7, 0, 1)]
  assert _tail_of((1., 4, 1), (1., 3, 1), (0., 3, 1)) == [(3, 0, 5)]
  assert _tail_of((1., 4, 1), (0., 3, 1), (0., 3, 1)) == [
      (7, 0, 2), (10, 0, 2)]
  assert _tail_of((1., 4, 1), (0., 3, 1)) == []


def test_branpo_compares_the_actions_of_successes():
  # More tokens in fewer actions are not longer, nor does a failure count: the
  # mean over the successes is 2.5 actions, over all 4.
  assert _tail_of((1., 2, 4), (1., 3, 1), (0., 7, 1)) == [(4, 0, 5)]
  # As long as all successes is not longer than their mean.
  assert _tail_of((1., 3, 1), (1., 3, 1), (0., 1, 1)) == []


@pytest.mark.parametrize('order', itertools.permutations(range(3)))
@pytest.mark.parametrize(
    'unit, blom', [('action', 0.86942), ('token', 1.28155)])
def test_sipo_corrects_what_it_picked_by_the_largest_score(order, unit, blom):
  # By its first token the first is the least surprising action, as a whole the
  # most: quantile 2.625 / 3.25. Of six tokens, 5.625 / 6.25.
  actions = np.float32([[-.1, -5], [-2, -.1], [-.5, -.1]])
  builder = tree_lib.TreeBuilder()
  node = builder.add(builder.add(-1, [0]), [0])
  for i in order:
    node = builder.add(node, [0, 0], [True, True], actions[i])
  slots, _ = _plan(branching.sipo, _stack(builder), unit=unit,
                   num_branch_points=1)
  offset = int(unit == 'token')
  assert slots == [(2 + order.index(0), offset, 2)]
  (head,) = builder.fork_points([slots[0][0]], [offset])
  builder.add(head, [0], [True], [-.3], birth=1)
  credit = _compiled(advantages.sipo, (('unit', unit),))(
      _stack(builder), a2=np.float32(1))
  # Returns are equal, so that the correction alone is left.
  incumbent = builder.index(2 + order.index(0))
  np.testing.assert_allclose(
      credit.advantages[0, incumbent, 0], -blom, rtol=1e-4)


def test_recursion_forks_the_newest_stage_until_it_is_deep_enough():
  policy = branching.recursive(
      functools.partial(branching.top_entropy, min_spacing=0), depth=2)
  builder = tree_lib.TreeBuilder()
  root = builder.add(-1, [0])
  node = builders.add_action(builder, root)
  builders.add_action(builder, node, entropy=0.5)
  plan = functools.partial(_plan, policy, num_branch_points=2, num_forks=1)
  assert plan(_stack(builder)) == ([(2, 0, 1), (1, 0, 1)], 0)
  fork = builders.add_action(builder, node, birth=1)
  fork = builders.add_action(builder, fork, birth=1)
  assert plan(_stack(builder)) == ([(fork, 0, 1)], 1)
  builders.add_action(builder, fork, birth=2)
  assert plan(_stack(builder)) == ([], 2)


def test_a_recursion_of_a_policy_that_leaves_unspent_out():
  def silent(tree, *, birth=0):
    plan = branching.top_entropy(tree, birth=birth, min_spacing=0)
    return plan.replace(unspent=None)
  tree = builders.random_trees(0)
  plan = branching.recursive(silent, depth=9)(tree)
  assert plan.unspent is None and np.asarray(plan.count).any()
  done = branching.recursive(silent, depth=1)(tree.replace(
      birth=tree.birth + 1))
  assert done.unspent is None and not np.asarray(done.count).any()


def test_a_recursion_has_the_options_of_its_policy():
  policy = branching.recursive(
      functools.partial(branching.top_entropy, num_forks=1), depth=2)
  options = inspect.signature(policy).parameters
  assert 'birth' not in options and options['num_forks'].default == 1
  tree = _backbone([1.0])
  with pytest.raises(ValueError, match='birth: expected none.*got 1'):
    policy(tree, birth=1)
  with pytest.raises(ValueError, match='depth: expected at least 1, got 0'):
    branching.recursive(branching.top_entropy, 0)
  with pytest.raises(ValueError, match='expected a branch policy with the opt'):
    branching.recursive(lambda tree: None, 1)


def test_a_fresh_rollout_forks_before_the_first_action():
  builder = tree_lib.TreeBuilder()
  root = builder.add(-1, [0, 1])
  seen = builder.add(root, [2, 3])  # An observation alone.
  builder.add(seen, [4, 5], [False, True], [0., -1.], [0., 1.])
  tree = _stack(builder)
  slots, _ = _plan(
      branching.arpo_after_tool, tree, dict(key=jax.random.key(0)),
      num_rollouts=3)
  assert slots == [(2, 1, 2)]

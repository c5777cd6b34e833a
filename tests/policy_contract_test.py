"""The contract of every branch policy.

A new policy is one row in the table: the function, its options and its slow
oracle.
"""

from collections.abc import Callable
import functools
import inspect
from typing import Any, NamedTuple

import builders
import jax
import numpy as np
import oracles
import oracles_branching as slow
import pytest

from bpo_jax import branching
from bpo_jax import tree as tree_lib
from bpo_jax.branching import depths


class Case(NamedTuple):
  """One branch policy with its options, held to the contract.

  Attributes:
    policy: (tree, **options, **arrays, key) -> BranchPlan.
    oracle: the same in recursive float64, -> per tree (slots, budget).
    options: scalars, and a design.
    arrays: name -> 'token', 'mask' or 'node': random arrays [B, N, T] or [B, N]
      that the policy reads beside the tree; those per token off action tokens,
      and those per node on padding, are not to be read.
    key: 'needed', 'ties' where it only breaks ties, or 'none'.
    make: seed -> TreeBuilder, of trees that leave the policy something to do.
  """

  policy: Callable[..., Any]
  oracle: Callable[..., Any]
  options: dict[str, Any] = {}
  arrays: dict[str, str] = {}
  key: str = 'none'
  make: Callable[[int], tree_lib.TreeBuilder] = builders.random_builder


_WINDOWS = dict(entropy_window=3, vocab_size=3)
_CBPO = dict(boundary_interval=2, **_WINDOWS)

_CASES = {
    'top_entropy': Case(
        branching.top_entropy, slow.top_entropy,
        dict(num_branch_points=3, num_forks=2, min_spacing=4), key='ties'),
    'top_entropy-action': Case(
        branching.top_entropy, slow.top_entropy,
        dict(statistic='action', min_spacing=1, birth=None), key='ties'),
    'lowest_entropy': Case(
        branching.lowest_entropy, slow.lowest_entropy,
        dict(num_branch_points=3, min_spacing=4), key='ties'),
    'random': Case(
        branching.random, slow.random, dict(min_spacing=3), key='needed'),
    'equally_spaced': Case(branching.equally_spaced, slow.equally_spaced),
    'equally_spaced-few': Case(
        branching.equally_spaced, slow.equally_spaced,
        dict(num_branch_points=7, birth=None)),
    'oracle_value_gap': Case(
        branching.oracle_value_gap, slow.oracle_value_gap,
        dict(num_branch_points=3, min_spacing=2), dict(values='node'), 'ties'),
    'causal_threshold': Case(
        branching.causal_threshold, slow.causal_threshold,
        dict(threshold=0.4, min_spacing=3, max_per_path=2)),
    'appo_score': Case(
        branching.appo_score, slow.appo_score, dict(num_branch_points=4),
        dict(current_log_probs='token', whitespace_mask='mask'), 'ties'),
    'appo_score-paper': Case(
        branching.appo_score, slow.appo_score,
        dict(num_branch_points=4, variant='paper', influence_decay=0.5,
             birth=None), dict(current_log_probs='token'), 'ties'),
    'appo_score-entropy': Case(
        branching.appo_score, slow.appo_score, key='ties'),
    'tree_grpo_random': Case(
        branching.tree_grpo_random, slow.tree_grpo_random,
        dict(num_branch_points=5), key='needed'),
    'treerl_surprisal': Case(
        branching.treerl_surprisal, slow.treerl_surprisal,
        dict(num_branch_points=5, min_spacing=2), key='ties'),
    'spo_cutpoints': Case(
        branching.spo_cutpoints, slow.spo_cutpoints,
        dict(cutpoints_per_segment=2, cutpoint_probability=0.7, birth=0)),
    'spo_cutpoints-again': Case(
        branching.spo_cutpoints, slow.spo_cutpoints,
        dict(cutpoints_per_segment=1, num_branch_points=20)),
    'spo_cutpoints-all': Case(
        branching.spo_cutpoints, slow.spo_cutpoints,
        dict(cutpoints_per_segment=1, max_per_path=None)),
    'sipo': Case(
        branching.sipo, slow.sipo, dict(birth=None, min_spacing=2), key='ties'),
    'sipo-action': Case(
        branching.sipo, slow.sipo,
        dict(unit='action', sibling_penalty=0.3, birth=None), key='ties'),
    'cbpo_allocation': Case(
        branching.cbpo_allocation, slow.cbpo_allocation, _CBPO),
    'cbpo_allocation-caps': Case(
        branching.cbpo_allocation, slow.cbpo_allocation,
        dict(_CBPO, num_rollouts=24, entropy_gain=9.0, probability_decay=0.01,
             num_candidates=2, birth=None)),
    'arpo_after_tool': Case(
        branching.arpo_after_tool, slow.arpo_after_tool, _WINDOWS,
        key='needed'),
    'arpo_after_tool-mean': Case(
        branching.arpo_after_tool, slow.arpo_after_tool,
        dict(_WINDOWS, num_rollouts=7, mean_entropy=True, entropy_weight=2.0,
             birth=None), key='needed'),
    'trace_budget': Case(
        branching.trace_budget, slow.trace_budget, dict(success_threshold=0.0),
        dict(values='node')),
    'branpo_tail': Case(
        branching.branpo_tail, slow.branpo_tail, dict(success_threshold=0.0)),
    'branpo_tail-hard': Case(
        branching.branpo_tail, slow.branpo_tail,
        dict(success_threshold=1.5, num_branch_points=2, birth=None)),
    # Without explorers, and with bins of one depth, nothing is drawn.
    'adaptive': Case(
        functools.partial(branching.adaptive, key=jax.random.key(0)),
        slow.adaptive, dict(num_rollouts=7, explore=0.0, design=depths.Design(
            num_siblings=np.int32(3), depth_width=np.int32(1),
            bins=np.array([False, False, True, True]),
            costs=np.array([1.0, 0.8, 0.3, 0.2], np.float32))),
        make=builders.random_trajectories),
    'recursive': Case(
        branching.recursive(branching.top_entropy, depth=2),
        slow.recursive(slow.top_entropy, 2), dict(min_spacing=1), key='ties'),
    'recursive-cbpo': Case(
        branching.recursive(branching.cbpo_allocation, depth=3),
        slow.recursive(slow.cbpo_allocation, 3), _CBPO),
}


@pytest.fixture(params=_CASES)
def name(request):
  return request.param


@pytest.fixture(params=[name for name in _CASES if '-' not in name])
def first_name(request):
  """The first row of every policy, for what its options have no say in."""
  return request.param


@functools.cache
def _jitted(name):
  case = _CASES[name]
  return jax.jit(functools.partial(case.policy, **case.options))


def _run(name, tree, given):
  return jax.device_get(_jitted(name)(tree, **given))


def _given(case, tree, seed):
  """Returns random arrays, and the key, of what a policy reads."""
  rng = np.random.default_rng(seed)
  draw = {
      'token': lambda: rng.normal(size=np.shape(tree.tokens)).astype('f') - 1,
      'mask': lambda: rng.random(np.shape(tree.tokens)) < 0.3,
      'node': lambda: rng.random(np.shape(tree.parents)).astype('f')}
  given = {name: draw[kind]() for name, kind in case.arrays.items()}
  if case.key == 'needed':
    given['key'] = jax.random.key(seed)
  return given


def _map(case, given, per_token, per_node):
  """Applies one function to arrays per token, another to those per node."""
  change = {'token': per_token, 'mask': per_token, 'node': per_node}
  return {name: change[case.arrays[name]](x) if name in case.arrays else x
          for name, x in given.items()}


@functools.cache
def _planned(name, seed):
  """Returns trees, what else was given, and the plan."""
  case = _CASES[name]
  tree = builders.random_trees(seed, make=case.make)
  given = _given(case, tree, seed)
  return tree, given, _run(name, tree, given)


def _slots(plan, b):
  """Returns (node, offset, count) of the used slots of a tree."""
  columns = (plan.node[b], plan.offset[b], plan.count[b])
  return [tuple(map(int, slot)) for slot in zip(*columns) if slot[0] >= 0]


def _all_slots(plan):
  return [_slots(plan, b) for b in range(len(plan.node))]


def _equal(got, expected):
  """Compares plans slot by slot."""
  jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize('seed', range(10))
def test_equals_the_oracle(name, seed):
  tree, given, plan = _planned(name, seed)
  case = _CASES[name]
  expected = case.oracle(tree, **case.options, **given)
  for b, (slots, budget) in enumerate(expected):
    assert _slots(plan, b) == slots
    assert plan.unspent[b] == budget - sum(count for *_, count in slots)


@pytest.mark.parametrize('seed', range(10))
def test_is_a_plan_within_its_budget(name, seed):
  tree, given, plan = _planned(name, seed)
  case = _CASES[name]
  budgets = [b for _, b in case.oracle(tree, **case.options, **given)]
  np.testing.assert_array_equal(plan.count.sum(1) + plan.unspent, budgets)
  assert (plan.count >= 0).all() and (plan.unspent >= 0).all()
  unused = plan.node < 0
  assert (plan.node[unused] == -1).all()
  assert (plan.offset[unused] == 0).all() and (plan.count[unused] == 0).all()
  assert (plan.count[~unused] > 0).all()
  for field in (plan.node, plan.offset, plan.count, plan.unspent):
    assert field.dtype == np.int32
  for b, _, tokens in slow.forest(tree):
    places = [slot[:2] for slot in _slots(plan, b)]
    assert len(set(places)) == len(places)
    assert set(places) <= {x.slot for x in slow.decisions(tokens, 'token')}
  # Every place that a plan names can be forked.
  for b in range(3):
    builder = case.make(1000 * seed + b)
    handles = builder.fork_points(plan.node[b], plan.offset[b])
    assert [h >= 0 for h in handles] == [n >= 0 for n in plan.node[b]]


def test_the_table_is_not_vacuous(name):
  plans = [_planned(name, seed)[2] for seed in range(10)]
  assert sum(plan.count.sum() for plan in plans) > 0
  assert len({slot[0] for plan in plans for slot in _slots(plan, 0)}) > 1


@pytest.mark.parametrize('seed', range(3))
def test_poison_changes_nothing(name, seed):
  tree, given, plan = _planned(name, seed)
  nan = np.float32(np.nan)
  _equal(_run(name, builders.poison(tree), _map(
      _CASES[name], given,
      lambda x: np.where(tree.action_mask, x, nan if x.dtype == 'f' else True),
      lambda x: np.where(tree.node_mask, x, nan))), plan)


def test_neither_padding_nor_jit_changes_anything(first_name):
  tree, given, plan = _planned(first_name, 1)
  grown = [(0, 1), (0, 3), (0, 2)]
  case = _CASES[first_name]
  # Not compiled as one, so that the policies share what is compiled.
  padded = jax.device_get(case.policy(
      builders.pad(tree, 1, 3, 2), **case.options, **_map(
          case, given, lambda x: np.pad(x, grown),
          lambda x: np.pad(x, grown[:2]))))
  assert _all_slots(padded) == _all_slots(plan) + [[]]
  np.testing.assert_array_equal(padded.unspent[:3], plan.unspent)


@pytest.mark.parametrize('seed', range(2))
def test_trees_are_independent(name, seed):
  tree, given, plan = _planned(name, seed)
  # A key is folded with the tree's place in the batch: the place stays.
  order = np.array([2, 0, 1] if _CASES[name].key != 'needed' else [0, 2, 2])
  same = order == np.arange(3) if 'key' in given else np.full(3, True)
  select = lambda x: x[order]
  part = _run(name, builders.take(tree, order),
              _map(_CASES[name], given, select, select))
  for i in np.flatnonzero(same):
    assert _slots(part, i) == _slots(plan, order[i])
    assert part.unspent[i] == plan.unspent[order[i]]


def test_vmap_changes_nothing(first_name):
  tree, given, plan = _planned(first_name, 1)
  case = _CASES[first_name]
  key = {k: v for k, v in given.items() if k == 'key'}
  arrays = {k: v for k, v in given.items() if k != 'key'}
  double = functools.partial(jax.tree.map, lambda x: np.stack([x, x]))
  both = jax.jit(jax.vmap(lambda tree, arrays: case.policy(
      tree, **case.options, **key, **arrays)))(double(tree), double(arrays))
  for i in range(2):
    _equal(jax.tree.map(lambda x: np.asarray(x[i]), both), plan)


def test_same_key_same_plan_and_different_keys_differ(name):
  case = _CASES[name]
  if case.key == 'none':
    pytest.skip('takes no key')
  tree = builders.random_trees(9)
  # Nothing to tell decisions apart but the key.
  tree = tree.replace(
      entropies=np.round(tree.entropies), rewards=np.zeros_like(tree.rewards),
      behaviour_log_probs=np.where(tree.action_mask, -1, 0).astype('f'))
  given = jax.tree.map(np.zeros_like, {
      k: v for k, v in _given(case, tree, 9).items() if k != 'key'})
  plans = []
  for seed in range(6):
    given['key'] = jax.random.key(seed)
    plan = _run(name, tree, given)
    _equal(_run(name, tree, given), plan)
    expected = case.oracle(tree, **case.options, **given)
    assert _all_slots(plan) == [slots for slots, _ in expected]
    plans.append(str(_all_slots(plan)))
  assert len(set(plans)) > 1


def test_a_tree_of_one_node_gets_an_empty_plan(name):
  builder = tree_lib.TreeBuilder()
  builder.add(-1, [1, 2])
  tree = tree_lib.stack([builder], num_trees=3, num_nodes=28, num_tokens=8)
  plan = _run(name, tree, _given(_CASES[name], tree, 0))
  assert _all_slots(plan) == [[], [], []]
  # `adaptive` leaves nothing of trees that are padding.
  told = plan.unspent[:1] if name == 'adaptive' else plan.unspent
  assert (told > 0).all()


def test_a_budget_of_nothing_gives_an_empty_plan(name):
  case = _CASES[name]
  if 'num_rollouts' not in _options(case.policy):
    pytest.skip('its budget is no number of rollouts')
  tree, given, _ = _planned(name, 0)
  assert all(len(root.leaves) > 1 for root in oracles.roots(tree))
  plan = case.policy(tree, **{**case.options, 'num_rollouts': 1}, **given)
  assert (np.asarray(plan.node) == -1).all()
  assert (np.asarray(plan.unspent) == 0).all()


def _options(policy):
  return inspect.signature(policy).parameters


_REFUSED = [
    (dict(num_branch_points=0), 'num_branch_points: expected at least 1'),
    (dict(num_forks=0), 'num_forks: expected at least'),
    (dict(num_rollouts=0), 'num_rollouts: expected at least 1'),
    (dict(statistic='token'), "statistic: expected one of .*got 'token'"),
    (dict(unit='acton'), 'unit: expected one of .*did you mean action'),
    (dict(variant='papers'), 'variant: expected one of .*did you mean paper'),
    (dict(entropy_window=0), 'entropy_window: expected at least 1'),
    (dict(vocab_size=1), 'vocab_size: expected at least 2'),
    (dict(boundary_interval=0), 'boundary_interval: expected at least 1'),
    (dict(cutpoints_per_segment=0), 'cutpoints_per_segment: expected at'),
    (dict(max_per_backbone=0), 'max_per_backbone: expected at least 1'),
    (dict(branches_when_failed=1), 'branches_when_failed: expected at least 2'),
    (dict(key=None), 'needs key: expected one typed key, key=jax.*got None'),
    (dict(key=0), 'key: expected one typed key, .*got 0'),
    (dict(key=np.zeros(2, np.uint32)), 'key: expected one typed.*got uint32'),
    (dict(key=jax.random.split(jax.random.key(0))), 'key: expected one typed'),
    (dict(max_per_path=0), 'max_per_path: expected at least 1 branch point'),
    (dict(cutpoint_probability=1.5), 'cutpoint_probability: expected a number'),
    (dict(cutpoint_probability=0.0), 'cutpoint_probability: expected a pos'),
    (dict(branches_when_long=2 ** 31 - 1), 'expected at most 2147483647 forks'),
    (dict(num_rollouts=2 ** 31), 'num_rollouts: expected at most 1048576'),
    (dict(num_forks=3_000_000_000), 'num_forks: expected at most 2147483647'),
    (dict(num_forks=2 ** 31 - 1, num_branch_points=4),
     'num_branch_points x num_forks: expected at most 2147483647 forks a tree'),
    (dict(values=None), 'needs values: expected the .*got None'),
]


@pytest.mark.parametrize('bad, message', _REFUSED)
def test_a_bad_option_is_an_error(bad, message):
  option = next(iter(bad))
  tree = builders.random_trees(0)
  takers = [case for case in _CASES.values()
            if option in _options(case.policy)
            and (option != 'key' or case.key == 'needed')]
  assert takers
  for case in takers:
    given = {**case.options, **_given(case, tree, 0), **bad}
    with pytest.raises(ValueError, match=message):
      case.policy(tree, **given)


def _whole_options(policy):
  return [name for name, option in _options(policy).items()
          if option.annotation in (int, int | None)]


@pytest.mark.parametrize('bad', [1.5, 2 ** 31, 3_000_000_000, -1])
def test_sizes_out_of_range_are_refused(first_name, bad):
  case = _CASES[first_name]
  tree = builders.random_trees(0)
  options = _whole_options(case.policy)
  assert options
  for option in options:
    given = {**case.options, **_given(case, tree, 0), option: bad}
    with pytest.raises(ValueError, match=f'{option}.*expected'):
      case.policy(tree, **given)


def test_a_tree_without_a_batch_axis_is_refused(first_name):
  case, tree = _CASES[first_name], builders.random_trees(0)
  given = _given(case, tree, 0)
  one = jax.tree.map(lambda x: x[0], tree)
  with pytest.raises(ValueError, match=r'got \[N, T\].*bpo_jax.tree.stack'):
    case.policy(one, **case.options, **given)


@pytest.mark.parametrize('shape', [(0, 4, 4), (2, 0, 4), (2, 4, 0)])
def test_a_batch_of_nothing_is_refused(first_name, shape):
  case, tree = _CASES[first_name], tree_lib.empty(shape)
  with pytest.raises(ValueError, match='expected at least one tree, node'):
    case.policy(tree, **case.options, **_given(case, tree, 0))


def _of_wrong_shape(case, tree, given):
  """Yields every array that a policy reads, one at a time, too short."""
  options = _options(case.policy)
  arrays = {name: x for name, x in given.items() if name in case.arrays}
  arrays |= {name: np.ones(tree.node_mask.shape, bool)
             for name in options if name == 'open_mask'}
  arrays |= {name: np.zeros(3, np.int32) for name in ('birth', 'threshold')
             if name in options}
  for name, array in arrays.items():
    yield name, array[:2]
    yield name, array[..., None]


def test_arrays_of_another_shape_are_refused(first_name):
  case, tree = _CASES[first_name], builders.random_trees(0)
  given = _given(case, tree, 0)
  for name, array in _of_wrong_shape(case, tree, given):
    with pytest.raises(ValueError, match=f'{name}: expected .*got'):
      case.policy(tree, **{**case.options, **given, name: array})


def test_a_threshold_that_is_no_number_is_refused():
  tree = builders.random_trees(0)
  for bad in (np.nan, np.float32([0, np.nan, 0]), '1'):
    with pytest.raises(ValueError, match='threshold: expected a number'):
      branching.causal_threshold(tree, bad)
  # Traced, it is exceeded by nothing; and so is infinity anywhere.
  for plan in (jax.jit(branching.causal_threshold)(tree, np.nan),
               branching.causal_threshold(tree, np.inf)):
    assert not np.asarray(plan.count).any()


@pytest.mark.slow
@pytest.mark.parametrize('name', [
    'top_entropy', 'equally_spaced', 'branpo_tail', 'cbpo_allocation',
    'arpo_after_tool'])
def test_more_slots_than_decisions_cost_only_their_room(name):
  tree, given, _ = _planned(name, 0)
  case = _CASES[name]
  size = 'num_rollouts' if 'num_rollouts' in _options(
      case.policy) else 'num_branch_points'
  few, many = (
      jax.device_get(case.policy(tree, **{**case.options, size: n}, **given))
      for n in (1_000, 100_000))
  # Distances depend on how many there are to be; all are forked either way.
  order = sorted if name == 'equally_spaced' else list
  for b in range(3):
    last = lambda plan: order(slot[:2] for slot in _slots(plan, b))
    assert last(few) == last(many)

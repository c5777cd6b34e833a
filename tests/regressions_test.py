"""Faults that other systems of this kind shipped, one test a number.

The numbers are those of a catalogue of faults seen in comparable systems; each
test names its fault. Right values are worked out by hand.
"""

import functools
import inspect

import builders
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpo_jax import advantages
from bpo_jax import masked
from bpo_jax import objectives
from bpo_jax import returns
from bpo_jax import siblings
from bpo_jax import tree as tree_lib
from bpo_jax import types
from experiments import scoring

# What `advantages` offers that is held to no test of a tree alone, and why.
_NEEDS_MORE = {
    'ppo_gae': 'needs a critic\'s values',
    'tree_gae': 'needs a critic\'s values',
    'istar': 'needs the rewards of a model',
    'gcpo': 'needs to be told the golden trajectory',
    'sipo': 'needs the slope of the batch before',
}


def _estimators():
  """Returns the estimators by name, as they are found in `advantages`."""
  found = {}
  for name, function in vars(advantages).items():
    if inspect.isfunction(function) and not name.startswith('_'):
      signature = inspect.signature(function)
      if (list(signature.parameters)[0] == 'tree'
          and signature.return_annotation is types.Credit):
        found[name] = function
  return found


_ESTIMATORS = [name for name in _estimators() if name not in _NEEDS_MORE]
each_estimator = pytest.mark.parametrize('name', _ESTIMATORS)


@functools.cache
def _room(module):
  """Returns what runs all estimators of a module, compiled at once."""
  room = {name: function for name, function in _estimators().items()
          if name in _ESTIMATORS and function.__module__ == module}
  return jax.jit(lambda tree: {name: f(tree) for name, f in room.items()})


@functools.cache
def _compiled(name, options):
  return jax.jit(functools.partial(getattr(advantages, name), **dict(options)))


def _credit(name, tree, options=(), **arrays):
  """Returns an estimator's credit; one shape of trees is compiled, `_stack`'s.
  """
  if options or arrays:
    function = _compiled(name, tuple(dict(options).items()))
    return jax.device_get(function(tree, **arrays))
  module = getattr(advantages, name).__module__
  return jax.device_get(_room(module)(tree)[name])


def _stack(builder):
  return tree_lib.stack([builder], num_trees=2, num_nodes=16, num_tokens=8)


def _chains(*returns):
  return builders.chains(returns, num_trees=2, num_nodes=16)


def _paths(*lengths_and_rewards, **root):
  """Returns a tree of paths of so many one-token actions and a last reward."""
  builder = tree_lib.TreeBuilder()
  top = builder.add(-1, [1], **root)
  for length, reward in lengths_and_rewards:
    node = top
    for turn in range(length):
      node = builders.add_action(
          builder, node, reward=reward * (turn == length - 1))
  return _stack(builder)


def _first_tokens(credit, tree=0):
  """Advantages of the leaves of `_chains`."""
  return credit.advantages[tree, :, 0][credit.weights[tree, :, 0] > 0]


def test_001_spread_by_differences_of_squares():
  tree = _chains([0.0] + [0.95] * 7)
  np.testing.assert_allclose(
      _first_tokens(_credit('rloo', tree))[0], -0.95, rtol=1e-6)
  # Without the first nothing varies: a spread of 4.6e-4 would be noise.
  rest = np.full(7, 0.95, np.float32)
  assert jax.jit(masked.std)(rest, np.ones(7, bool)) < 1e-6
  # mean 0.83125; std with ddof 1 = 0.95 / sqrt(8).
  grpo = _first_tokens(_credit('grpo', tree))
  np.testing.assert_allclose(
      grpo[0], -0.83125 / (0.95 / np.sqrt(8)), rtol=1e-4)


def test_002_groups_of_uneven_size_mix():
  credit = _credit('rloo', _chains([1.0, 3.0], [5.0]))
  np.testing.assert_array_equal(_first_tokens(credit, 0), [-2, 2])
  np.testing.assert_array_equal(_first_tokens(credit, 1), [0])


def test_every_estimator_is_held_to_what_follows():
  assert set(_NEEDS_MORE) <= set(_estimators())
  assert len(_ESTIMATORS) >= 16


@each_estimator
def test_003_a_group_of_one_is_nan(name):
  # Nor does it borrow from the group beside it.
  credit = _credit(name, _chains([5.0], [0.0, 1.0]))
  np.testing.assert_array_equal(credit.advantages[0], np.zeros((16, 8)))
  assert np.isfinite(credit.advantages).all()
  assert credit.advantages[1].any()


@each_estimator
def test_005_tasks_of_equal_text_merge(name):
  # Both trees have one prompt and the same tokens; they stay two groups.
  credit = _credit(name, _chains([0.0, 1.0], [1.0, 1.0]))
  low, high = _first_tokens(credit)
  assert low < 0 < high
  np.testing.assert_array_equal(credit.advantages[1], np.zeros((16, 8)))


def test_006_an_empty_response_is_paid_through_a_pad_slot():
  builder = tree_lib.TreeBuilder()
  root = builder.add(-1, [1])
  builder.add(root, [], reward=1.0, terminal=True)
  for reward in (0.0, 0.0):
    builders.add_action(builder, root, reward=reward, terminal=True)
  credit = _credit('rloo', _stack(builder))
  # Its score counts for the others; it has no token to be credited itself.
  np.testing.assert_array_equal(credit.advantages[0, 1], np.zeros(8))
  np.testing.assert_array_equal(credit.weights[0, 1], np.zeros(8))
  np.testing.assert_array_equal(_first_tokens(credit), [-0.5, -0.5])


@each_estimator
def test_007_rewards_behind_the_mask_drive_the_group(name):
  tree = _chains([1.0, 0.0], [0.5])
  rewards = tree.rewards.copy()
  rewards[0, 3:], rewards[1, 2:] = 100.0, np.nan
  credit = _credit(name, tree.replace(rewards=rewards))
  jax.tree.map(np.testing.assert_array_equal, credit, _credit(name, tree))


def test_008_a_negative_mean_flips_the_sign():
  credit = _credit('grpo', _chains([-3.0, -1.0]))
  low, high = _first_tokens(credit)
  assert low < 0 < high


@each_estimator
def test_009_groups_without_variance_have_no_stated_policy(name):
  # The policy: no advantage, but full weight in the denominator and the KL.
  credit = _credit(name, _chains([1.0, 1.0], [0.0, 1.0]))
  np.testing.assert_array_equal(credit.advantages[0], np.zeros((16, 8)))
  np.testing.assert_array_equal(credit.weights[0], credit.weights[1])
  assert credit.weights[0].any()


def test_009_dropped_groups_stay_in_the_denominator():
  # The other policy, stated: weights of 0 leave the denominator and the KL.
  credit = _credit(
      'grpo', _chains([1.0, 1.0], [0.0, 1.0]), {'zero_variance': 'drop'})
  assert not credit.weights[0].any() and credit.weights[1].any()
  values = np.ones(credit.weights.shape, np.float32)
  _, denominator = objectives.reduce(values, credit.weights, values > 0)
  assert denominator == 4  # Two tokens each of the two paths that differ.


def test_012_a_spread_over_steps():
  # Returns 0 after one step and 2 after three. Over the two trajectories: mean
  # 1, spread sqrt(2), so -+ 1 / sqrt(2); over the four steps: mean 1.5,
  # spread 1, so -1.5 and 0.5.
  tree = _paths((1, 0.0), (3, 2.0))
  credit = _credit('grpo', tree)
  np.testing.assert_allclose(
      credit.advantages[0, 1:5, 0], np.sqrt([0.5] * 4) * [-1, 1, 1, 1],
      rtol=1e-5)
  # A filter by variance sees trajectories as well: these returns differ.
  kept = _credit('grpo', tree, {'zero_variance': 'drop'})
  np.testing.assert_array_equal(kept.weights, credit.weights)


def test_012_one_ratio_for_sequences_of_all_lengths():
  # Log ratios .4 and 0 .1 .2: .4 and .1 on average, .175 over all four.
  log_ratio = np.float32([[0.4, 9.0, 9.0], [0.0, 0.1, 0.2]])
  mask = np.array([[True, False, False], [True, True, True]])
  surrogate = objectives.sequence_ratio_surrogate(
      log_ratio, np.zeros((2, 3)), np.ones((2, 3)), clip_epsilon_high=1.0,
      mask=mask)
  np.testing.assert_allclose(
      surrogate, np.exp([[0.4], [0.1]]) * mask, rtol=1e-6)


def test_012_an_evaluation_averages_steps():
  # Of two episodes the one of three turns is won: half, not three in four.
  tree = jax.tree.map(lambda x: x[:1], _paths((1, 0.0), (3, 1.0)))
  won, turns = scoring.returns_and_turns(tree)
  assert won.tolist() == [[0, 1]] and turns.tolist() == [[1, 3]]


def test_013_normalised_before_discounting():
  # Two steps from one state, returns 1 a step later and 0. With a discount of g
  # they are g and 0: apart from their mean by g / 2, spread g sqrt(1/2), so
  # +- sqrt(1/2) as with any g. Discounted after that: g times it, 0.95.
  tree = _paths((2, 1.0), (2, 0.0), anchor=7)
  steps = _credit('gigpo', tree).advantages
  steps = steps - _credit('grpo', tree).advantages
  np.testing.assert_allclose(
      steps[0, 1:5, 0], np.sqrt(0.5) * np.array([1, 0, -1, 0]), atol=1e-5)


def test_013_implicit_rewards_are_summed_over_later_steps():
  # One path of three steps, implicit rewards 1, 2, 6: mean 3, spread sqrt(7).
  # A step gets its own; a discounted sum would be of the normalised ones.
  tree = _paths((3, 1.0))
  rewards = np.zeros(tree.tokens.shape, np.float32)
  rewards[0, 1:4, 0] = 1, 2, 6
  credit = _credit('istar', tree, implicit_rewards=rewards)
  np.testing.assert_allclose(
      credit.advantages[0, 1:4, 0], np.array([-2, -1, 3]) / np.sqrt(7),
      rtol=1e-5)


def test_015_long_trajectories_vote_more_than_once():
  builder = tree_lib.TreeBuilder()
  root = builder.add(-1, [1])
  builders.add_action(builder, root, reward=1.0)
  node = root
  for reward in (0.0, 0.0, 0.0, 3.0):
    node = builders.add_action(builder, node, reward=reward, num_tokens=5)
  builders.add_action(builder, root, reward=2.0)
  credit = _credit('rloo', _stack(builder))
  # Returns 1, 3, 2 whatever the lengths: 1 - 2.5, 3 - 1.5, 2 - 2.
  np.testing.assert_allclose(
      credit.advantages[0, :7, 0], [0, -1.5, 1.5, 1.5, 1.5, 1.5, 0])


def test_016_what_differs_between_trees_is_lost():
  # Two trees of one task, returns 1 1 and 0 0: nothing differs within either,
  # and over all the mean is 1/2 and the spread sqrt(1/3).
  builder = tree_lib.TreeBuilder()
  root = builder.add(-1, [1])
  for reward in (1.0, 0.0):
    top = builders.add_action(builder, root)
    for birth in (0, 1):
      builders.add_action(builder, top, reward=reward, birth=birth)
  credit = _credit('tree_grpo', _stack(builder))
  expected = np.sqrt(0.75) * np.array([1, 1, 1, -1, -1, -1])
  np.testing.assert_allclose(
      credit.advantages[0, 1:7, 0], expected, rtol=1e-5)


def test_016_what_differs_within_a_tree_is_lost():
  # Returns 1 0 and 1 0: both terms say the same, 1/2 by sqrt(1/2) within a
  # tree and 1/2 by sqrt(1/3) over all; at what the two share, 0.
  builder = tree_lib.TreeBuilder()
  root = builder.add(-1, [1])
  for _ in range(2):
    top = builders.add_action(builder, root)
    for birth, reward in enumerate((1.0, 0.0)):
      builders.add_action(builder, top, reward=reward, birth=birth)
  credit = _credit('tree_grpo', _stack(builder))
  leaf = np.sqrt(0.5) + np.sqrt(0.75)
  np.testing.assert_allclose(
      credit.advantages[0, 1:7, 0], leaf * np.array([0, 1, -1] * 2), atol=1e-5)


def test_017_the_last_reward_is_counted_at_every_step():
  builder = tree_lib.TreeBuilder()
  node = builder.add(-1, [1], anchor=7)
  for reward in (0.0, 0.0, 1.0):
    node = builders.add_action(builder, node, reward=reward, anchor=7)
  tree = _stack(builder)
  assert jax.jit(returns.node_values)(tree)[0, :4].tolist() == [1] * 4
  # Copied to every step and summed from there on it would be 3, 2, 1.
  credit = _credit('ppo_gae', tree, {'lambda_': 1.0}, values=0.0 * tree.tokens)
  np.testing.assert_array_equal(credit.advantages[0, 1:4, 0], [1, 1, 1])
  # Three steps from one state and of one return: nothing sets them apart.
  credit = _credit('gigpo', tree, {'discount': 1.0})
  np.testing.assert_array_equal(credit.advantages[0], np.zeros((16, 8)))


def test_017_a_step_alone_in_its_state_is_compared():
  # Both set out from 7 and come to 3 and to 5: the second steps are alone.
  builder = tree_lib.TreeBuilder()
  root = builder.add(-1, [1], anchor=7)
  for anchor, reward in ((3, 1.0), (5, 0.0)):
    first = builders.add_action(builder, root, anchor=anchor)
    builders.add_action(builder, first, reward=reward)
  tree = _stack(builder)
  steps = _credit('gigpo', tree).advantages - _credit('grpo', tree).advantages
  np.testing.assert_allclose(
      steps[0, 1:5, 0], np.sqrt(0.5) * np.array([1, 0, -1, 0]), atol=1e-5)
  np.testing.assert_array_equal(steps[0, [2, 4]], np.zeros((2, 8)))


def test_018_a_response_is_as_long_as_its_span():
  builder = tree_lib.TreeBuilder()
  root = builder.add(-1, [1])
  mask = [True, False, False, False, True]
  builder.add(root, range(5), action_mask=mask, behaviour_log_probs=[-1.] * 5)
  credit = _credit('rloo', _stack(builder), {'path_weighting': 'sequence'})
  # Two action tokens; the three between them are the environment's.
  np.testing.assert_array_equal(
      credit.weights[0, 1, :5], [0.5, 0, 0, 0, 0.5])


@pytest.mark.parametrize('spans', [
    [[True, False, True]], [[True], [False], [True]]])
def test_020_returns_stop_at_an_observation(spans):
  # Of 1 at the end a half is left one action before, whatever lies between.
  builder = tree_lib.TreeBuilder()
  node = builder.add(-1, [1])
  for mask in spans:
    node = builder.add(
        node, mask, mask, np.where(mask, -1.0, 0.0),
        reward=float(mask is spans[-1]))
  tree = _stack(builder)
  credit = _credit('ppo_gae', tree, dict(discount=0.5, lambda_=1.0),
                   values=0.0 * tree.tokens)
  assert credit.advantages[tree.action_mask].tolist() == [0.5, 1.0]


def test_021_values_on_observations_enter_the_recursion():
  # Actions a and b with two tokens of the environment between them and one at
  # the end. V 1/2 and 1/4, reward 1 with b, lambda 1/2:
  # A_b = 1 - 1/4, A_a = (1/4 - 1/2) + A_b / 2 = 1/8.
  builder = tree_lib.TreeBuilder()
  node = builder.add(-1, [1])
  for reward in (0.0, 1.0):
    node = builder.add(
        node, [2, 3, 3], action_mask=[True, False, False],
        behaviour_log_probs=[-1.0] * 3, reward=reward)
  tree = _stack(builder)
  for elsewhere in (0.0, 100.0, np.nan):
    values = np.full(tree.tokens.shape, elsewhere, np.float32)
    values[0, 1:3, 0] = 0.5, 0.25
    for name in ('ppo_gae', 'tree_gae'):
      credit = _credit(name, tree, {'lambda_': 0.5}, values=values)
      np.testing.assert_array_equal(
          credit.advantages[0, 1:3, :3], [[0.125, 0, 0], [0.75, 0, 0]])


def test_022_a_divergence_on_tool_tokens_accumulates():
  # Two actions of log 1/2 each, k3 = 2 - 1 - log 2; 5 nats on a tool's token.
  difference = np.float32([np.log(0.5), 5.0, np.log(0.5)])
  mask = np.array([True, False, True])
  total, count = objectives.reduce(
      objectives.kl(difference, np.zeros(3), 'k3', mask), np.ones(3), mask)
  np.testing.assert_allclose(total / count, 1 - np.log(2), rtol=1e-6)


def test_023_whitening_leaves_masked_entries():
  mask = np.array([True, False, True])
  white = masked.whiten(np.float32([1, 7, 3]), mask)
  np.testing.assert_allclose(white, [-1, 0, 1], atol=1e-5)


def test_025_padding_is_guessed_from_token_ids():
  # Token 0, which fills padding, is also a token of the text.
  builder = tree_lib.TreeBuilder()
  builder.add(-1, [0, 5, 0])
  tree = tree_lib.stack([builder], num_nodes=1, num_tokens=4)
  np.testing.assert_array_equal(
      tree.token_mask[0, 0], [True, True, True, False])


@each_estimator
def test_041_what_the_policy_did_not_draw_is_credited(name):
  # The prompt, and the last token of each action, which the environment said.
  tree = _chains([0.0, 1.0, 3.0], [2.0, 1.0])
  drawn = tree.action_mask & (np.arange(8) == 0)
  assert drawn.sum() == 5
  credit = _credit(name, tree.replace(action_mask=drawn))
  for values in (credit.advantages, credit.weights):
    assert not values[~drawn].any() and values.any()


def test_043_arrays_of_a_step_fall_out_of_step():
  builder = tree_lib.TreeBuilder()
  with pytest.raises(ValueError, match='behaviour_log_probs: expected 2'):
    builder.add(-1, [1, 2], action_mask=[True, True],
                behaviour_log_probs=[-1.0])


@pytest.mark.parametrize('reducer, norm, expected', [
    ('token_mean', None, (1 + 2 + 3) / 3),
    ('sequence_mean', None, (1.5 + 3) / 2),
    ('sequence_sum_norm', 4.0, (3 / 4 + 3 / 4) / 2),
    ('path_weighted', None, (3 + 3) / 2)])
def test_045_padding_leaks_from_the_sum_of_a_row(reducer, norm, expected):
  values = np.float32([[1, 2, np.nan], [3, 9, 9]])
  mask = np.array([[True, True, False], [True, False, False]])
  total, count = objectives.reduce(
      values, np.ones((2, 3), np.float32), mask, reducer, norm)
  np.testing.assert_allclose(total / count, expected, rtol=1e-6)


def test_045_padding_leaks_from_the_ratio_of_a_sequence():
  log_ratio = np.float32([[0.1, 0.3, np.nan], [0.2, 9, -9]])
  mask = np.array([[True, True, False], [True, False, False]])
  surrogate = objectives.sequence_ratio_surrogate(
      log_ratio, 0 * log_ratio, np.ones((2, 3)), clip_epsilon_high=1.0,
      mask=mask)
  np.testing.assert_allclose(surrogate, np.exp(0.2) * mask, rtol=1e-6)


def test_047_means_of_means():
  # 100 tokens at 2.0 and 900 at 0.5: 0.65, not 1.25.
  parts = [objectives.reduce(np.full(n, x, np.float32), np.ones(n),
                             np.ones(n, bool)) for n, x in
           ((100, 2.0), (900, 0.5))]
  total, count = np.sum(parts, axis=0)
  assert total / count == pytest.approx(0.65)


@pytest.mark.parametrize('reducer, norm, expected', [
    ('token_mean', None, 10 / 4), ('sequence_mean', None, (2 + 4) / 2),
    ('sequence_sum_norm', 4.0, (6 / 4 + 4 / 4) / 2),
    ('path_weighted', None, (6 + 4) / 2)])
def test_048_the_denominator_knows_of_devices(reducer, norm, expected):
  # Rows of 1 2 3 and of 4: one device has both, or each of two has one.
  values = np.float32([[1, 2, 3], [4, 0, 0]])
  mask = np.array([[True, True, True], [True, False, False]])
  part = lambda rows: np.array(objectives.reduce(
      values[rows], np.ones((len(rows), 3), np.float32), mask[rows], reducer,
      norm))
  for parts in (part([0, 1]), part([0]) + part([1])):
    np.testing.assert_allclose(parts[0] / parts[1], expected, rtol=1e-6)


def test_049_a_batch_of_more_trees_is_a_larger_step():
  # Sums of 3 and 1 over a norm of 4, on average 1/2, however often repeated.
  values = np.float32([[1, 2, 0], [1, 0, 0]])
  for times in (1, 3):
    batch = np.tile(values, (times, 1))
    total, count = objectives.reduce(
        batch, np.ones(batch.shape, np.float32), batch > 0,
        'sequence_sum_norm', 4.0)
    assert total / count == 0.5
  # Nor is there a spread or a length in the advantages: mean 1.
  credit = _credit('dr_grpo', _paths((1, 0.0), (2, 0.0), (1, 3.0)))
  np.testing.assert_allclose(
      credit.advantages[0, 1:5, 0], [-1, -1, -1, 2], rtol=1e-6)
  np.testing.assert_array_equal(credit.weights[0, 1:5, 0], np.ones(4))


def test_050_a_group_of_two_has_no_spread():
  # Mean 1/2, spread sqrt(1/2) with n - 1: +- sqrt(1/2). Without contrast: 0.
  credit = _credit('grpo', _chains([0.0, 1.0], [1.0, 1.0]))
  np.testing.assert_allclose(
      _first_tokens(credit), np.sqrt(0.5) * np.array([-1, 1]), rtol=1e-5)
  np.testing.assert_array_equal(_first_tokens(credit, 1), [0, 0])


def test_051_the_ratio_is_always_one():
  behaviour = jnp.float32([-1.0, -2.0])
  surrogate = jax.jit(
      lambda lp: objectives.clipped_surrogate(lp, behaviour, 1.0))
  np.testing.assert_array_equal(surrogate(behaviour), [1, 1])
  np.testing.assert_allclose(surrogate(behaviour + 0.1), np.exp([.1, .1]))
  np.testing.assert_allclose(surrogate(behaviour + 1), [1.2, 1.2])
  gradient = jax.grad(lambda lp: surrogate(lp).sum())(behaviour)
  np.testing.assert_array_equal(gradient, [1, 1])


def test_054_a_masked_token_moves_the_loss_of_others():
  mask = np.array([[True, False, True]])

  @jax.jit
  def loss(last):
    lp = jnp.stack([jnp.array([-1.0, -1.5]), last * jnp.ones(2)], 1).ravel()
    surrogate = objectives.clipped_surrogate(
        lp[None, :3], -jnp.ones((1, 3)), jnp.ones((1, 3)), mask=mask)
    return objectives.reduce(surrogate, jnp.ones((1, 3)), mask,
                             'sequence_mean')[0]

  assert loss(-3.0) == loss(-0.1)
  assert jax.grad(loss)(-3.0) == 0


def test_054_the_ratio_of_a_sequence_grows_with_its_length():
  # Log ratios .1 .3 .2 on average .2, masked or not a fourth of 9.
  log_probs = jnp.float32([[0.1, 0.3, 0.2, 9.0]])
  mask = np.array([[True, True, True, False]])

  def loss(log_probs):
    surrogate = objectives.sequence_ratio_surrogate(
        log_probs, np.zeros((1, 4)), np.ones((1, 4)), clip_epsilon_high=1.0,
        mask=mask)
    return objectives.reduce(
        surrogate, np.ones((1, 4), np.float32), mask, 'sequence_mean')[0]
  both = jax.jit(jax.value_and_grad(loss))
  value, gradient = both(log_probs)
  np.testing.assert_allclose(value, np.exp(0.2), rtol=1e-6)
  # Not exp(.6): the gradient of exp(mean), a third of it a token.
  np.testing.assert_allclose(
      gradient, np.exp(0.2) / 3 * mask, rtol=1e-6)
  assert both(jnp.float32([[0.1, 0.3, 0.2, -9.0]]))[0] == value


def test_055_the_sequence_is_clipped_where_tokens_are_meant():
  # Ratios 1.5 and 0.9: their product is 1.35, their own clips 1.2 and 0.9.
  log_probs = np.log(np.float32([1.5, 0.9]))
  np.testing.assert_allclose(
      objectives.clipped_surrogate(log_probs, np.zeros(2), np.ones(2)),
      [1.2, 0.9], rtol=1e-6)


def test_057_the_gradient_of_a_sampled_divergence_is_taken_on_trust():
  # Two tokens, policy (1/2, 1/2), reference (1/4, 3/4). By the first logit:
  # KL(policy || reference) grows by p0 p1 (log p0/q0 - log p1/q1) = log(3) / 4,
  # KL(reference || policy) by p0 - q0 = 1/4.
  reference = np.log(np.float32([0.25, 0.75]))

  def slope(estimator):
    def loss(logit):
      log_probs = jax.nn.log_softmax(jnp.stack([logit, 0.0]))
      return jnp.mean(objectives.kl(log_probs, reference, estimator))
    return jax.jit(jax.grad(loss))(0.0)
  np.testing.assert_allclose(slope('k1'), 0, atol=1e-7)
  np.testing.assert_allclose(slope('k2'), np.log(3) / 4, rtol=1e-5)
  np.testing.assert_allclose(slope('k3'), 1 / 4, rtol=1e-5)


def test_060_nan_at_a_masked_token_poisons_the_loss():
  log_probs = np.float32([-1.0, np.nan])
  mask = np.array([True, False])

  def loss(lp):
    surrogate = objectives.clipped_surrogate(lp, log_probs, log_probs,
                                             mask=mask)
    divergence = objectives.kl(lp, log_probs, mask=mask)
    return objectives.reduce(divergence - surrogate, np.ones(2), mask)[0]
  assert loss(log_probs) == 1.0
  np.testing.assert_array_equal(jax.grad(loss)(log_probs), [1, 0])


def test_062_the_mean_ratio_is_divided_by_all_slots():
  total, count = objectives.ratio_metrics(
      np.log(np.float32([2, 4, 9])), np.zeros(3), np.ones(3),
      np.array([True, True, False]))['objective/ratio']
  np.testing.assert_allclose(total / count, 3, rtol=1e-6)


def test_078_siblings_share_a_list():
  tokens, builder = [1, 2], tree_lib.TreeBuilder()
  root = builder.add(-1, tokens)
  left, right = builder.add(root, tokens), builder.add(root, tokens)
  tokens[0] = 9
  head = builder.split(left, 1)
  builder.add(head, [7])
  built = builder.build()
  np.testing.assert_array_equal(built.tokens[builder.index(root)], [1, 2])
  np.testing.assert_array_equal(built.tokens[builder.index(right)], [1, 2])


def test_090_every_branch_is_paid_the_last_reward():
  builder = tree_lib.TreeBuilder()
  root = builder.add(-1, [1])
  shared = builders.add_action(builder, root)
  for birth, reward in enumerate((1.0, 0.0, 0.25)):
    builders.add_action(builder, shared, reward=reward, birth=birth)
  tree = _stack(builder)
  np.testing.assert_array_equal(
      jax.jit(returns.leaf_returns)(tree)[0, 2:5], [1.0, 0.0, 0.25])


def test_092_missing_log_probs_pass_for_equal_rewards():
  with pytest.raises(ValueError, match='behaviour_log_probs'):
    tree_lib.TreeBuilder().add(-1, [1], action_mask=[True])


def test_a_singleton_among_groups_is_told_by_its_count():
  parents = np.array([-1, 0, 1, 1])
  mask = np.ones(4, bool)
  np.testing.assert_array_equal(siblings.count(parents, mask), [0, 1, 2, 2])
  mean = jax.jit(siblings.leave_one_out_mean)
  np.testing.assert_array_equal(
      mean(np.float32([9, 9, 0, 4]), parents, mask), [0, 0, 4, 0])

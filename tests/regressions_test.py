"""Faults that other systems of this kind shipped, one test a number.

The numbers are those of a catalogue of faults seen in comparable systems; each
test names its fault. Right values are worked out by hand.
"""

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

_ESTIMATORS = (advantages.rloo, advantages.grpo, advantages.bpo,
               advantages.bpo_rb)


def _first_tokens(credit, tree=0):
  """Advantages of the leaves of `builders.chains`."""
  advantage = np.asarray(credit.advantages)[tree, :, 0]
  return advantage[np.asarray(credit.weights)[tree, :, 0] > 0]


def test_001_spread_by_differences_of_squares():
  tree = builders.chains([[0.0] + [0.95] * 7])
  np.testing.assert_allclose(
      _first_tokens(advantages.rloo(tree))[0], -0.95, rtol=1e-6)
  # Without the first nothing varies: a spread of 4.6e-4 would be noise.
  rest = np.full(7, 0.95, np.float32)
  assert masked.std(rest, np.ones(7, bool)) < 1e-6
  # mean 0.83125; std with ddof 1 = 0.95 / sqrt(8).
  grpo = _first_tokens(advantages.grpo(tree))
  np.testing.assert_allclose(
      grpo[0], -0.83125 / (0.95 / np.sqrt(8)), rtol=1e-4)


def test_002_groups_of_uneven_size_mix():
  credit = advantages.rloo(builders.chains([[1.0, 3.0], [5.0]]))
  np.testing.assert_array_equal(_first_tokens(credit, 0), [-2, 2])
  np.testing.assert_array_equal(_first_tokens(credit, 1), [0])


@pytest.mark.parametrize('estimator', _ESTIMATORS)
def test_003_a_group_of_one_is_nan(estimator):
  credit = estimator(builders.chains([[5.0]]))
  np.testing.assert_array_equal(_first_tokens(credit), [0])


@pytest.mark.parametrize('estimator', _ESTIMATORS)
def test_005_tasks_of_equal_text_merge(estimator):
  # Both trees have one prompt and the same tokens; they stay two groups.
  tree = builders.chains([[0.0, 1.0], [1.0, 1.0]])
  assert (tree.tokens[0] == tree.tokens[1]).all()
  np.testing.assert_array_equal(_first_tokens(estimator(tree), 1), [0, 0])


def test_006_an_empty_response_is_paid_through_a_pad_slot():
  builder = tree_lib.TreeBuilder()
  root = builder.add(-1, [1])
  builder.add(root, [], reward=1.0, terminal=True)
  for reward in (0.0, 0.0):
    builders.add_action(builder, root, reward=reward, terminal=True)
  credit = advantages.rloo(tree_lib.stack([builder]))
  # Its score counts for the others; it has no token to be credited itself.
  np.testing.assert_array_equal(credit.advantages[0, 1], np.zeros(8))
  np.testing.assert_array_equal(credit.weights[0, 1], np.zeros(8))
  np.testing.assert_array_equal(_first_tokens(credit), [-0.5, -0.5])


def test_007_rewards_behind_the_mask_drive_the_group():
  tree = builders.chains([[1.0, 0.0]])
  rewards = tree.rewards.copy()
  rewards[0, 3:] = 100.0
  for estimator in _ESTIMATORS:
    credit = estimator(tree.replace(rewards=rewards))
    np.testing.assert_array_equal(
        credit.advantages, estimator(tree).advantages)


def test_008_a_negative_mean_flips_the_sign():
  credit = advantages.grpo(builders.chains([[-3.0, -1.0]]))
  low, high = _first_tokens(credit)
  assert low < 0 < high


@pytest.mark.parametrize('estimator', _ESTIMATORS)
def test_009_groups_without_variance_have_no_stated_policy(estimator):
  # The policy: no advantage, but full weight in the denominator and the KL.
  tree = builders.chains([[1.0, 1.0], [0.0, 1.0]])
  credit = estimator(tree)
  np.testing.assert_array_equal(credit.advantages[0], 0 * credit.weights[0])
  np.testing.assert_array_equal(credit.weights[0], credit.weights[1])


def test_015_long_trajectories_vote_more_than_once():
  builder = tree_lib.TreeBuilder()
  root = builder.add(-1, [1])
  builders.add_action(builder, root, reward=1.0)
  node = root
  for reward in (0.0, 0.0, 0.0, 3.0):
    node = builders.add_action(builder, node, reward=reward, num_tokens=5)
  builders.add_action(builder, root, reward=2.0)
  credit = advantages.rloo(tree_lib.stack([builder]))
  # Returns 1, 3, 2 whatever the lengths: 1 - 2.5, 3 - 1.5, 2 - 2.
  np.testing.assert_allclose(
      credit.advantages[0, :7, 0], [0, -1.5, 1.5, 1.5, 1.5, 1.5, 0])


def test_017_the_last_reward_is_counted_at_every_step():
  builder = tree_lib.TreeBuilder()
  node = builder.add(-1, [1])
  for reward in (0.0, 0.0, 1.0):
    node = builders.add_action(builder, node, reward=reward)
  tree = tree_lib.stack([builder])
  np.testing.assert_array_equal(
      returns.node_values(tree)[0, :4], [1, 1, 1, 1])


def test_018_a_response_is_as_long_as_its_span():
  builder = tree_lib.TreeBuilder()
  root = builder.add(-1, [1])
  mask = [True, False, False, False, True]
  builder.add(root, range(5), action_mask=mask, behaviour_log_probs=[-1.] * 5)
  credit = advantages.rloo(
      tree_lib.stack([builder]), path_weighting='sequence')
  # Two action tokens; the three between them are the environment's.
  np.testing.assert_array_equal(
      credit.weights[0, 1, :5], [0.5, 0, 0, 0, 0.5])


def test_020_returns_stop_at_an_observation():
  builder = tree_lib.TreeBuilder()
  first = builders.add_action(builder, builder.add(-1, [1]))
  builders.add_action(builder, first, reward=1.0)
  values = returns.node_values(tree_lib.stack([builder]), discount=0.5)
  np.testing.assert_array_equal(values[0, 1:3], [0.5, 1.0])


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


def test_043_arrays_of_a_step_fall_out_of_step():
  builder = tree_lib.TreeBuilder()
  with pytest.raises(ValueError, match='behaviour_log_probs: expected 2'):
    builder.add(-1, [1, 2], action_mask=[True, True],
                behaviour_log_probs=[-1.0])


def test_047_means_of_means():
  # 100 tokens at 2.0 and 900 at 0.5: 0.65, not 1.25.
  parts = [objectives.reduce(np.full(n, x, np.float32), np.ones(n),
                             np.ones(n, bool)) for n, x in
           ((100, 2.0), (900, 0.5))]
  total, count = np.sum(parts, axis=0)
  assert total / count == pytest.approx(0.65)


def test_051_the_ratio_is_always_one():
  behaviour = jnp.float32([-1.0, -2.0])
  surrogate = lambda lp: objectives.clipped_surrogate(lp, behaviour, 1.0)
  np.testing.assert_array_equal(surrogate(behaviour), [1, 1])
  np.testing.assert_allclose(surrogate(behaviour + 0.1), np.exp([.1, .1]))
  np.testing.assert_allclose(surrogate(behaviour + 1), [1.2, 1.2])
  gradient = jax.grad(lambda lp: surrogate(lp).sum())(behaviour)
  np.testing.assert_array_equal(gradient, [1, 1])


def test_054_a_masked_token_moves_the_loss_of_others():
  mask = np.array([[True, False, True]])

  def loss(last):
    lp = jnp.stack([jnp.array([-1.0, -1.5]), last * jnp.ones(2)], 1).ravel()
    surrogate = objectives.clipped_surrogate(
        lp[None, :3], -jnp.ones((1, 3)), jnp.ones((1, 3)), mask=mask)
    return objectives.reduce(surrogate, jnp.ones((1, 3)), mask,
                             'sequence_mean')[0]

  assert loss(-3.0) == loss(-0.1)
  assert jax.grad(loss)(-3.0) == 0


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
    return jax.grad(loss)(0.0)
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
  tree = tree_lib.stack([builder])
  np.testing.assert_array_equal(
      returns.leaf_returns(tree)[0, 2:5], [1.0, 0.0, 0.25])


def test_092_missing_log_probs_pass_for_equal_rewards():
  with pytest.raises(ValueError, match='behaviour_log_probs'):
    tree_lib.TreeBuilder().add(-1, [1], action_mask=[True])


def test_a_singleton_among_groups_is_told_by_its_count():
  parents = np.array([-1, 0, 1, 1])
  mask = np.ones(4, bool)
  np.testing.assert_array_equal(siblings.count(parents, mask), [0, 1, 2, 2])
  np.testing.assert_array_equal(
      siblings.leave_one_out_mean(np.float32([9, 9, 0, 4]), parents, mask),
      [0, 0, 4, 0])

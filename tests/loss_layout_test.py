"""Which losses train whole trees, and which one path a row."""

import functools

import jax
import pytest
import tiny_agents as tiny

from bpo_jax import learner
from bpo_jax import objectives


def _wrapped(*args, **kwargs):
  return objectives.sequence_ratio_surrogate(*args, **kwargs)


@pytest.mark.parametrize('objective', [
    objectives.sequence_ratio_surrogate, objectives.future_kl_surrogate,
    _wrapped])
def test_objectives_of_sequences_want_paths(objective):
  loss = learner.make_policy_loss(
      learner.LossConfig(), functools.partial(objective, clip_epsilon_low=0.1))
  assert loss.layout == 'paths'
  tree = tiny.random_trees(5)
  model, optimizer = tiny.model(), learner.make_optimizer(
      learner.OptimizerConfig())
  state = learner.init_state(
      tiny.params_of(model), optimizer, jax.random.key(0))
  update = learner.make_update_fn(model, optimizer, loss)
  batches = learner.make_batches(tree, tiny.random_credit(tree, 5), 256)
  with pytest.raises(ValueError, match="sequences: .*layout='paths'"):
    update(state, batches, 1.0)


def test_objectives_of_tokens_train_whole_trees():
  config = learner.LossConfig()
  assert learner.make_policy_loss(config).layout == 'trees'
  clipped = functools.partial(
      objectives.clipped_surrogate, clip_epsilon_high=0.3)
  assert learner.make_policy_loss(config, clipped).layout == 'trees'
  own = lambda log_probs, behaviour, advantages, mask: log_probs * advantages
  assert learner.make_policy_loss(config, own).layout == 'paths'
  assert learner.make_policy_loss(
      config, own, by_token=True).layout == 'trees'


def test_a_loss_written_by_hand_wants_paths_unless_it_says_by_token():
  terms = learner.imitation_loss.terms
  assert learner.Loss(terms).layout == 'paths'
  assert learner.Loss(terms, by_token=True).layout == 'trees'
  assert learner.imitation_loss.layout == 'trees'
  assert learner.weighted_log_likelihood('token_mean').layout == 'trees'

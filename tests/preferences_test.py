"""preferences: credit whose log-likelihood has the gradient of the loss."""

import builders
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from bpo_jax import preferences


def _loss(log_ratios, tree, beta):
  """Mean over pairs, by a loop over the leaves of every tree."""
  terms = []
  for b, root in enumerate(oracles.roots(tree)):
    leaves = root.leaves
    sums = [sum(jnp.sum(jnp.where(tree.action_mask[b, n.index],
                                  log_ratios[b, n.index], 0))
                for n in leaf.path) for leaf in leaves]
    for w, s_w in zip(leaves, sums):
      terms += [-jax.nn.log_sigmoid(beta * (s_w - s_l))
                for other, s_l in zip(leaves, sums) if w.total > other.total]
  return sum(terms) / max(len(terms), 1)


@pytest.mark.parametrize('seed', range(5))
def test_dpo_credit_is_the_gradient_of_the_loss(seed):
  tree = builders.random_trees(seed, max_nodes=9)
  log_ratios = np.random.default_rng(seed).normal(
      size=tree.tokens.shape).astype('f')
  expected = jax.grad(_loss)(log_ratios, tree, 0.5)
  poisoned = np.where(tree.action_mask, log_ratios, np.float32(np.nan))
  got = preferences.trajectory_dpo(tree, poisoned, beta=0.5)
  np.testing.assert_allclose(
      got.advantages * got.weights, -np.asarray(expected), atol=1e-6)
  assert np.abs(expected).max() > 0


def test_equal_returns_prefer_nothing():
  tree = builders.chains([[1.0, 1.0, 1.0]])
  credit = preferences.trajectory_dpo(tree, np.ones(tree.tokens.shape, 'f'))
  assert (np.asarray(credit.advantages) == 0).all()


def test_missing_log_ratios_are_an_error():
  with pytest.raises(ValueError, match='trajectory_dpo needs log_ratios'):
    preferences.trajectory_dpo(builders.chains([[0.0, 1.0]]))


@pytest.mark.parametrize('bad', [np.nan, np.inf, -1.0])
def test_a_beta_that_means_nothing_is_refused(bad):
  tree = builders.random_trees(0)
  with pytest.raises(ValueError, match='beta: expected a finite number'):
    preferences.trajectory_dpo(tree, np.zeros(tree.tokens.shape), beta=bad)

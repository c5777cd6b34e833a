"""Adapters: merged equals apart, and nothing else is trained."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_agents as tiny

from bpo_jax import learner
from bpo_jax import packing
from bpo_jax.models import lora
from bpo_jax.models import transformer

ADAPTERS = transformer.LoraConfig(rank=2, alpha=6.0)
NETWORK = tiny.model(lora=ADAPTERS, value_head=True)


def random_params():
  return tiny.params_of(NETWORK)


@functools.cache
def rows(num_trees=3):
  tree = tiny.random_trees(0, num_trees=num_trees)
  return packing.pack(tree, tiny.random_credit(tree, 0), row_length=64)


def log_probs(network, params):
  return jax.jit(packing.token_log_probs, static_argnums=0)(
      network, params, rows())[0]


def paths_of(tree):
  return {jax.tree_util.keystr(path) for path, _ in
          jax.tree_util.tree_leaves_with_path(tree)}


def test_joined_parts_are_the_whole():
  params = random_params()
  trained, frozen = lora.split(params)
  assert not paths_of(trained) & paths_of(frozen)
  again = lora.join(trained, frozen)
  assert jax.tree.structure(again) == jax.tree.structure(params)
  jax.tree.map(np.testing.assert_array_equal, again, params)


def test_all_is_trained_without_adapters():
  params = tiny.params_of(tiny.model())
  trained, frozen = lora.split(params)
  assert trained is params and not frozen
  jax.tree.map(np.testing.assert_array_equal, lora.join(trained, frozen),
               params)


@pytest.mark.parametrize('targets', [
    transformer.PROJECTIONS, ('query', 'value'), ('down',)])
def test_each_target_has_an_adapter_and_nothing_else(targets):
  network = tiny.model(lora=transformer.LoraConfig(3, 3.0, targets))
  trained, _ = lora.split(tiny.params_of(network))
  names = {path.split("'")[-4] for path in paths_of(trained)}
  assert names == set(targets)
  assert len(paths_of(trained)) == 2 * len(targets)


def test_merged_computes_the_same():
  params = random_params()
  config, merged = lora.merge(NETWORK.config, params)
  assert config.lora is None and not lora.has_adapters(merged)
  np.testing.assert_allclose(
      log_probs(transformer.Transformer(config), merged),
      log_probs(NETWORK, params), atol=1e-5)
  silent = jax.tree_util.tree_map_with_path(
      lambda path, x: 0 * x if path[-1].key == 'lora_b' else x, params)
  config, bare = lora.merge(NETWORK.config, silent)
  difference = np.abs(log_probs(transformer.Transformer(config), bare)
                      - log_probs(NETWORK, params))
  assert difference.max() > 1e-2


def test_fresh_adapters_say_nothing():
  base = tiny.params_of(tiny.model())
  params = lora.init_params(NETWORK.config, base, jax.random.key(1))
  assert paths_of(params) == paths_of(random_params())
  np.testing.assert_array_equal(
      log_probs(NETWORK, params), log_probs(tiny.model(), base))
  # A is not zero: else its B would never get a gradient.
  trained, _ = lora.split(params)
  for path, leaf in jax.tree_util.tree_leaves_with_path(trained):
    assert bool(np.any(leaf)) == (path[-1].key == 'lora_a')


def test_a_base_of_another_network_is_refused():
  key = jax.random.key(0)
  with pytest.raises(ValueError, match='another network'):
    lora.init_params(NETWORK.config, tiny.params_of(tiny.model(
        mlp_width=32)), key)
  with pytest.raises(ValueError, match='got none'):
    lora.init_params(
        NETWORK.config, tiny.params_of(tiny.model(num_layers=2)) | {
            'final_norm': {}}, key)
  with pytest.raises(ValueError, match='adapters'):
    lora.merge(tiny.model().config, tiny.params_of(tiny.model()))


@pytest.mark.parametrize('fields, message', [
    ({'rank': 0, 'alpha': 1.0}, 'at least 1'),
    ({'rank': 2.5, 'alpha': 1.0}, 'rank: expected a whole number, got 2.5'),
    ({'rank': 1, 'alpha': float('nan')}, 'alpha: expected a finite number'),
    ({'rank': 1, 'alpha': 0.0}, 'alpha: expected a positive number'),
    ({'rank': 1, 'alpha': 1.0, 'targets': ()}, 'targets: .* got none'),
    ({'rank': 1, 'alpha': 1.0, 'targets': ('querry',)}, 'mean query')])
def test_wrong_adapters_are_told(fields, message):
  with pytest.raises(ValueError, match=message):
    transformer.LoraConfig(**fields)


def test_an_update_moves_the_adapters_alone():
  params = random_params()
  optimizer = learner.make_optimizer(learner.OptimizerConfig())
  update = learner.make_update_fn(
      NETWORK, optimizer, learner.make_policy_loss(learner.LossConfig()))
  copies = jax.tree.map(jnp.copy, params)
  state = learner.init_state(copies, optimizer, jax.random.key(0))
  trained, frozen = lora.split(params)
  moments = [leaf for leaf in jax.tree.leaves(state.optimizer_state)
             if leaf.ndim]
  assert sum(leaf.size for leaf in moments) == (
      2 * transformer.num_parameters(trained))
  for _ in range(2):
    state, _ = update(state, [rows()], 0.1)
  new_trained, new_frozen = lora.split(state.params)
  jax.tree.map(np.testing.assert_array_equal, new_frozen, frozen)
  moved = jax.tree.map(lambda x, y: bool(np.any(x != y)), new_trained, trained)
  assert all(jax.tree.leaves(
      {name: leaf for name, leaf in moved.items() if name != 'value_head'}))


def test_the_gradient_of_adapters_is_that_of_the_merged_kernels():
  """d/dB = scale A^T (dL/dW): the same loss, seen through the product."""
  network = tiny.model(num_layers=1, lora=ADAPTERS)
  params = tiny.params_of(network)
  batch, scale = rows(), ADAPTERS.alpha / ADAPTERS.rank

  def loss(network, params):
    values, _ = packing.token_log_probs(network, params, batch)
    return (values * batch.advantages).sum()

  apart = jax.jit(jax.grad(lambda p: loss(network, p)))(params)
  config, merged = lora.merge(network.config, params)
  whole = jax.jit(jax.grad(
      lambda p: loss(transformer.Transformer(config), p)))(merged)
  for name in ('gate', 'down'):
    a, b = (params['blocks'][name][n][0] for n in ('lora_a', 'lora_b'))
    kernel = whole['blocks'][name]['kernel'][0]
    got = apart['blocks'][name]
    np.testing.assert_allclose(
        got['lora_b'][0], scale * a.T @ kernel, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        got['lora_a'][0], scale * kernel @ b.T, rtol=1e-4, atol=1e-4)

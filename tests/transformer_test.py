"""The network against a slow one in float64, and its cache."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles_network as oracle
import pytest
import tiny_agents as tiny

from bpo_jax import attention
from bpo_jax.models import transformer


def make(**sizes):
  network = tiny.model(**sizes)
  return network, tiny.params_of(network)


def causal(num_rows, size):
  return np.broadcast_to(np.tril(np.ones((size, size), bool)),
                         (num_rows, size, size))


@functools.partial(jax.jit, static_argnums=0)
def apply(network, params, tokens, positions, mask, past, past_masks):
  hidden, new = network.apply(
      {'params': params}, tokens, positions, mask, past, past_masks)
  return network.apply({'params': params}, hidden, method='logits'), new


def run(network, params, tokens, positions=None, mask=None, past=(),
        past_masks=()):
  tokens = np.asarray(tokens)
  if positions is None:
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
  if mask is None:
    mask = causal(*tokens.shape)
  return apply(network, params, tokens, positions, mask, past, past_masks)


LLAMA_3 = transformer.RopeScaling(
    factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0,
    original_positions=64)
# The network of the policies trained from scratch, and what others switch.
NETWORKS = {
    'scratch': {'num_heads': 4, 'num_kv_heads': 2},
    'one group': {'num_heads': 4, 'num_kv_heads': 1},
    'no groups': {'num_heads': 3, 'num_kv_heads': 3},
    'qwen2': {'attention_bias': True, 'tied': False, 'scale_embeddings': False},
    'qwen3': {'qk_norm': True, 'scale_embeddings': False},
    'llama3': {'rope_scaling': LLAMA_3, 'tied': False, 'num_layers': 3},
    'all': {'attention_bias': True, 'qk_norm': True, 'rope_scaling': LLAMA_3},
}


def shaken(params):
  """Returns parameters none of which is 0 or 1, biases and norms included."""
  rng = np.random.default_rng(9)
  return jax.tree.map(
      lambda x: x + rng.normal(scale=0.1, size=x.shape).astype('f'), params)


@pytest.mark.parametrize('sizes', NETWORKS.values(), ids=NETWORKS)
def test_network_is_that_of_the_oracle(sizes):
  network, params = make(**{'head_dim': 6, 'rope_theta': 50.0, **sizes})
  params = shaken(params)
  rng = np.random.default_rng(0)
  tokens = rng.integers(64, size=(2, 7))
  # Some beyond the positions that Llama 3 leaves as they are.
  positions = np.sort(rng.integers(200, size=(2, 7)), axis=1)
  mask = causal(2, 7) & (rng.random((2, 7, 7)) < 0.7) | np.eye(7, dtype=bool)
  logits, _ = run(network, params, tokens, positions, mask)
  for row in range(2):
    expected = oracle.logits(
        network.config, params, tokens[row], positions[row], mask[row])
    np.testing.assert_allclose(logits[row], expected, atol=2e-4, rtol=2e-4)


def test_llama_3_stretches_slow_wavelengths_alone():
  config = tiny.model(head_dim=64, rope_theta=5e5, rope_scaling=LLAMA_3).config
  plain = dataclasses.replace(config, rope_scaling=None)
  ratio = (transformer.rope_frequencies(plain)
           / transformer.rope_frequencies(config))
  assert ratio[0] == 1.0 and abs(ratio[-1] - 8.0) < 1e-4
  assert (np.diff(ratio) >= -1e-5).all()
  assert ((ratio > 1.01) & (ratio < 7.99)).any()
  np.testing.assert_allclose(
      transformer.rope_frequencies(config),
      [oracle.frequency(config, i) for i in range(32)], rtol=1e-5)


def test_layers_apart_are_as_stacked():
  network, params = make()
  config, apart = transformer.unstack(network.config, params)
  other = transformer.Transformer(config)
  assert jax.eval_shape(
      lambda: transformer.init_params(config, jax.random.key(0))
  ) == jax.eval_shape(lambda: apart)
  tokens = np.random.default_rng(8).integers(64, size=(2, 9))
  logits, new = run(network, params, tokens)
  same, layers = run(other, apart, tokens)
  np.testing.assert_allclose(same, logits, atol=1e-5)
  np.testing.assert_allclose(np.stack(layers.keys), new.keys, atol=1e-5)
  # A chunk after a past whose layers are apart too, or stacked.
  for past in (run(other, apart, tokens[:, :5])[1],
               run(network, params, tokens[:, :5])[1]):
    rest, _ = run(
        other, apart, tokens[:, 5:],
        np.broadcast_to(np.arange(5, 9), (2, 4)),
        past=(past,), past_masks=(np.ones((2, 4, 5), bool),))
    np.testing.assert_allclose(rest, logits[:, 5:], atol=1e-5)


def test_what_is_computed_again_changes_no_gradient():
  network, params = make(num_layers=1, qk_norm=True, attention_bias=True)
  params = shaken(params)
  tokens = np.random.default_rng(10).integers(64, size=(2, 6))

  def gradient(remat):
    config = dataclasses.replace(network.config, remat=remat)
    other = transformer.Transformer(config)
    loss = lambda p: jnp.sum(jnp.sin(run(other, p, tokens)[0]))
    return jax.jit(jax.grad(loss))(params)

  whole = gradient('none')
  assert all(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(whole))
  for remat in ('matmuls', 'block'):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        gradient(remat), whole)


def test_bfloat16_blocks_are_near_float32():
  network, params = make(qk_norm=True, attention_bias=True)
  half = tiny.model(qk_norm=True, attention_bias=True, dtype='bfloat16')
  tokens = np.random.default_rng(11).integers(64, size=(2, 6))
  logits, _ = run(network, params, tokens)
  rounded, new = run(half, params, tokens)
  assert rounded.dtype == jnp.float32 and new.keys.dtype == jnp.bfloat16
  difference = np.abs(rounded - logits).max()
  assert 1e-4 < difference < 0.1


def test_both_attentions_are_one_in_bfloat16():
  """That of the sampler and that of the learner: float32 but for the inputs."""
  rng = np.random.default_rng(12)
  draw = lambda heads: jnp.asarray(
      2 * rng.normal(size=(2, heads, 64, 24)), jnp.bfloat16)
  queries, keys, values = draw(6), draw(2), draw(2)
  sources = [(keys[:, :, :40], values[:, :, :40], causal(2, 64)[..., :40]),
             (keys[:, :, 40:], values[:, :, 40:], causal(2, 64)[..., 40:])]
  # Not jitted: a program may leave out a rounding that is asked for.
  got = transformer.attend(queries, sources)
  end = np.full((2, 64), 64, np.int32)
  expected = attention.reference(
      *(x.astype(jnp.float32) for x in (queries, keys, values)), end)
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
  for ancestors in (attention.Ancestors(end), attention.Ancestors(
      end, attention.block_table(end, 16))):
    # The learner's is rounded once more, by half a step of 2^-8.
    rounded = attention.attend(queries, keys, values, ancestors)
    np.testing.assert_allclose(
        rounded.astype(jnp.float32), got, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize('cuts', [(4,), (3, 4, 8)])
def test_chunks_over_a_cache_give_what_the_whole_gives(cuts):
  network, params = make()
  tokens = np.random.default_rng(1).integers(64, size=(3, 9))
  whole, _ = run(network, params, tokens)
  past, parts, start = (), [], 0
  for stop in (*cuts, 9):
    size = stop - start
    # Every earlier chunk stays a group of its own.
    masks = tuple(np.ones((3, size, kv.keys.shape[3]), bool) for kv in past)
    logits, new = run(
        network, params, tokens[:, start:stop],
        np.broadcast_to(np.arange(start, stop), (3, size)),
        past=past, past_masks=masks)
    parts.append(logits)
    past, start = (*past, new), stop
  np.testing.assert_allclose(
      np.concatenate(parts, axis=1), whole, atol=1e-5, rtol=1e-5)


def test_sources_apart_are_as_one():
  rng = np.random.default_rng(2)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  queries, keys, values = draw(2, 4, 3, 6), draw(2, 2, 8, 6), draw(2, 2, 8, 6)
  mask = rng.random((2, 3, 8)) < 0.6
  mask[:, :, 5] = True
  whole = transformer.attend(queries, [(keys, values, mask)])
  parts = [slice(0, 1), slice(1, 5), slice(5, 8)]
  apart = transformer.attend(
      queries, [(keys[:, :, s], values[:, :, s], mask[:, :, s]) for s in parts])
  np.testing.assert_allclose(apart, whole, atol=1e-6)


def test_what_is_masked_is_not_read():
  network, params = make()
  rng = np.random.default_rng(3)
  tokens = rng.integers(64, size=(2, 6))
  mask = causal(2, 6).copy()
  mask[:, :, 2] = False
  mask[:, 2, 2] = True
  logits, _ = run(network, params, tokens, mask=mask)
  other = tokens.copy()
  other[:, 2] = (other[:, 2] + 1) % 64
  changed, _ = run(network, params, other, mask=mask)
  others = [0, 1, 3, 4, 5]
  np.testing.assert_array_equal(logits[:, others], changed[:, others])
  assert np.abs(logits[:, 2] - changed[:, 2]).max() > 1e-3
  seen, _ = run(network, params, other)
  assert np.abs(logits[:, 3:] - seen[:, 3:]).max() > 1e-3


def test_padding_rows_and_tokens_change_nothing():
  network, params = make()
  tokens = np.random.default_rng(4).integers(64, size=(2, 6))
  logits, _ = run(network, params, tokens)
  padded = np.pad(tokens, ((0, 3), (0, 4)))
  mask = np.zeros((5, 10, 10), bool)  # A padding token may see nothing at all.
  mask[:2, :6, :6] = causal(2, 6)
  more, _ = run(network, params, padded, mask=mask)
  np.testing.assert_allclose(more[:2, :6], logits, atol=1e-5)
  assert np.isfinite(more).all()


def test_only_distances_between_positions_matter():
  network, params = make()
  tokens = np.random.default_rng(5).integers(64, size=(2, 6))
  places = np.arange(6) + np.zeros((2, 1), int)
  logits, _ = run(network, params, tokens, places)
  moved, _ = run(network, params, tokens, places + 100)
  stretched, _ = run(network, params, tokens, places * 3)
  np.testing.assert_allclose(moved, logits, atol=1e-4)
  assert np.abs(stretched - logits).max() > 1e-2


def test_initial_logits_are_of_order_one():
  network = tiny.model(width=32)
  params = jax.jit(transformer.init_params, static_argnums=0)(
      network.config, jax.random.key(0))
  assert transformer.num_parameters(params) == sum(
      np.prod(leaf.shape) for leaf in jax.tree.leaves(params))
  tokens = np.random.default_rng(6).integers(64, size=(4, 8))
  logits, _ = run(network, params, tokens)
  assert logits.dtype == jnp.float32
  # The last token's own embedding stands out of the tied logits, by design.
  assert 0.5 < float(np.std(logits)) < 2.0


def test_a_value_head_adds_its_parameters_and_changes_no_other():
  plain, critic = tiny.model(), tiny.model(value_head=True)
  bare, params = (
      jax.jit(transformer.init_params, static_argnums=0)(
          network.config, jax.random.key(3)) for network in (plain, critic))
  own = params.pop('value_head')
  assert jax.tree.structure(params) == jax.tree.structure(bare)
  jax.tree.map(np.testing.assert_array_equal, params, bare)
  assert {name: leaf.shape for name, leaf in own.items()} == {
      'kernel': (16, 1), 'bias': (1,)}
  assert not any(leaf.any() for leaf in jax.tree.leaves(own))
  # Parameters of a network without a head serve a config without.
  tokens = np.arange(6).reshape(1, 6)
  logits, _ = run(plain, params, tokens)
  same, _ = run(critic, {**params, 'value_head': own}, tokens)
  np.testing.assert_array_equal(logits, same)


def test_values_are_linear_in_the_hidden_states():
  network, params = make(value_head=True)
  hidden = np.random.default_rng(7).normal(size=(3, 4, 16)).astype('f')
  values = network.apply({'params': params}, hidden, method='values')
  head = params['value_head']
  expected = hidden @ head['kernel'][:, 0] + head['bias']
  np.testing.assert_allclose(values, expected, atol=1e-5)
  assert values.dtype == jnp.float32 and values.shape == (3, 4)
  with pytest.raises(ValueError, match='value_head=True, got False'):
    make()[0].apply({'params': params}, hidden, method='values')


@pytest.mark.parametrize('sizes, message', [
    ({'num_heads': 3}, 'multiple'), ({'head_dim': 5}, 'even'),
    ({'dtype': 'float16'}, 'bfloat16'), ({'remat': 'all'}, 'matmuls')])
def test_impossible_sizes_are_told(sizes, message):
  with pytest.raises(ValueError, match=message):
    transformer.TransformerConfig(**{'vocab_size': 64, **sizes})

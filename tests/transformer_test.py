"""The network against a slow one in float64, and its cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_agents as tiny

from bpo_jax.models import transformer


@pytest.fixture(scope='module', autouse=True)
def _quick_compilation():
  with tiny.quick_compilation():
    yield


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


# The oracle: one row, one query at a time, as the papers have it.


def norm(x, scale, epsilon):
  return x / np.sqrt(np.mean(x * x) + epsilon) * scale


def turn(x, position, theta):
  half = len(x) // 2
  out = np.empty_like(x)
  for i in range(half):
    angle = position * theta ** (-2 * i / len(x))
    cos, sin = np.cos(angle), np.sin(angle)
    out[i] = x[i] * cos - x[i + half] * sin
    out[i + half] = x[i] * sin + x[i + half] * cos
  return out


def oracle(config, params, tokens, positions, mask):
  """Returns [C, V] logits of one row."""
  c = config
  embedding = params['embedding']['embedding']
  x = [embedding[t] * np.sqrt(c.width) for t in tokens]
  for layer in range(c.num_layers):
    p = jax.tree.map(lambda leaf, i=layer: leaf[i], params['blocks'])
    x = oracle_block(c, p, x, positions, mask)
  scale = params['final_norm']['scale']
  return np.stack([embedding @ norm(h, scale, c.norm_epsilon) for h in x])


def oracle_block(c, p, x, positions, mask):
  y = [norm(h, p['attention_norm']['scale'], c.norm_epsilon) for h in x]
  split = lambda name, h: (h @ p['attention'][name]['kernel']).reshape(
      -1, c.head_dim)
  queries = [[turn(q, t, c.rope_theta) for q in split('query', h)]
             for h, t in zip(y, positions)]
  keys = [[turn(k, t, c.rope_theta) for k in split('key', h)]
          for h, t in zip(y, positions)]
  values = [split('value', h) for h in y]
  after = []
  for i, h in enumerate(x):
    heads = []
    for head in range(c.num_heads):
      group = head // (c.num_heads // c.num_kv_heads)
      seen = np.flatnonzero(mask[i])
      scores = np.array([queries[i][head] @ keys[j][group] for j in seen])
      scores = np.exp(scores / np.sqrt(c.head_dim))
      weights = scores / scores.sum()
      heads.append(sum(w * values[j][group] for w, j in zip(weights, seen)))
    h = h + np.concatenate(heads) @ p['attention']['out']['kernel']
    z = norm(h, p['mlp_norm']['scale'], c.norm_epsilon)
    gate = z @ p['gate']['kernel']
    gate = gate / (1 + np.exp(-gate))
    after.append(h + (gate * (z @ p['up']['kernel'])) @ p['down']['kernel'])
  return after


@pytest.mark.parametrize('heads', [(4, 2), (4, 1), (3, 3)])
def test_network_is_that_of_the_oracle(heads):
  network, params = make(
      num_heads=heads[0], num_kv_heads=heads[1], head_dim=6, rope_theta=50.0)
  rng = np.random.default_rng(0)
  tokens = rng.integers(64, size=(2, 7))
  positions = np.sort(rng.integers(40, size=(2, 7)), axis=1)
  mask = causal(2, 7) & (rng.random((2, 7, 7)) < 0.7) | np.eye(7, dtype=bool)
  logits, _ = run(network, params, tokens, positions, mask)
  doubles = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  for row in range(2):
    expected = oracle(
        network.config, doubles, tokens[row], positions[row], mask[row])
    np.testing.assert_allclose(logits[row], expected, atol=2e-4, rtol=2e-4)


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
    ({'vocab_size': 65}, '32'), ({'num_heads': 3}, 'multiple'),
    ({'head_dim': 5}, 'even')])
def test_impossible_sizes_are_told(sizes, message):
  with pytest.raises(ValueError, match=message):
    transformer.TransformerConfig(**{'vocab_size': 64, **sizes})

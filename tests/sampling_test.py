"""Allowed sets, distributions, draws and the cache that a policy draws from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_agents as tiny

from bpo_jax import sampling

VOCAB = 64
LENGTH = 3


def random_commands(rng, most=9):
  """A prefix-free set of commands of 1 to 3 tokens, as tuples."""
  commands = set()
  for _ in range(most):
    new = tuple(rng.integers(1, 6, rng.integers(1, LENGTH + 1)).tolist())
    if not any(new[:len(c)] == c or c[:len(new)] == new for c in commands):
      commands.add(new)
  return sorted(commands)


def table(rows, num_commands=12):
  padded = np.zeros((len(rows), num_commands, LENGTH), np.int32)
  for r, commands in enumerate(rows):
    for a, command in enumerate(commands):
      padded[r, a, :len(command)] = command
  return padded


def oracle(commands, prefix):
  """The tokens after which some command can still be completed."""
  size = len(prefix)
  return {c[size] for c in commands
          if len(c) > size and c[:size] == tuple(prefix)}


@pytest.mark.parametrize('seed', range(5))
def test_continuations_and_allowed_sets_are_those_of_the_oracle(seed):
  rng = np.random.default_rng(seed)
  rows = [random_commands(rng) for _ in range(6)]
  taken = [commands[rng.integers(len(commands))] for commands in rows]
  tokens = np.array([c + (0,) * (LENGTH - len(c)) for c in taken], np.int32)
  sets = sampling.unpack_bits(
      sampling.allowed_sets(table(rows), tokens, VOCAB))
  for step in range(LENGTH):
    drawn = np.where(np.arange(LENGTH) < step, tokens, 0)
    allowed = sampling.continuations(table(rows), drawn, step, VOCAB)
    np.testing.assert_array_equal(allowed, sets[:, step])
    for r, commands in enumerate(rows):
      expected = oracle(commands, taken[r][:step])
      if step >= len(taken[r]):
        expected = set()
      assert set(np.flatnonzero(allowed[r])) == expected
      if step < len(taken[r]):
        assert taken[r][step] in expected


def test_without_commands_nothing_is_allowed():
  none = np.zeros((2, 4, LENGTH), np.int32)
  drawn = np.zeros((2, LENGTH), np.int32)
  assert not sampling.continuations(none, drawn, 0, VOCAB).any()


@pytest.mark.parametrize('shape', [(32,), (3, 64), (2, 5, 224)])
def test_bits_are_packed_without_loss(shape):
  allowed = np.random.default_rng(0).random(shape) < 0.5
  words = sampling.pack_bits(allowed)
  assert words.shape == (*shape[:-1], shape[-1] // 32)
  assert words.dtype == jnp.uint32
  np.testing.assert_array_equal(sampling.unpack_bits(words), allowed)
  for token in (0, 31, shape[-1] - 1):
    one = sampling.pack_bits(np.arange(shape[-1]) == token)
    assert int(one[token // 32]) == 1 << token % 32


@pytest.mark.parametrize('vocab', [1, 33, 100])
def test_a_vocabulary_that_fills_no_word_is_told(vocab):
  with pytest.raises(ValueError, match=f'multiple of 32.*got {vocab}'):
    sampling.pack_bits(np.ones((2, vocab), bool))


def random_distribution(seed, num_rows=7, vocab=VOCAB, share=0.3, spread=3.0):
  rng = np.random.default_rng(seed)
  logits = spread * rng.normal(size=(num_rows, vocab))
  allowed = rng.random((num_rows, vocab)) < share
  allowed[np.arange(num_rows), rng.integers(vocab, size=num_rows)] = True
  return logits.astype(np.float32), allowed


@pytest.mark.parametrize('temperature', [0.3, 1.0, 2.5])
@pytest.mark.parametrize('constrained', [True, False])
def test_distribution_is_that_of_float64(temperature, constrained):
  logits, allowed = random_distribution(1)
  log_probs, entropy = sampling.token_distribution(
      logits, allowed if constrained else None, temperature)
  if not constrained:
    allowed = np.ones_like(allowed)
  scaled = np.where(allowed, logits.astype(np.float64) / temperature, -np.inf)
  expected = scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))
  probs = np.exp(expected)
  np.testing.assert_allclose(
      np.asarray(log_probs)[allowed], expected[allowed], atol=2e-5)
  assert np.isfinite(log_probs).all()
  assert not np.exp(np.asarray(log_probs)[~allowed]).any()
  np.testing.assert_allclose(
      np.where(allowed, np.exp(log_probs), 0).sum(axis=1), 1, atol=1e-5)
  with np.errstate(invalid='ignore'):
    terms = np.where(allowed, probs * expected, 0)
  np.testing.assert_allclose(entropy, -terms.sum(axis=1), atol=1e-5)


def test_gradient_of_the_distribution_is_finite_and_stays_within_the_set():
  logits, allowed = random_distribution(2)
  allowed[0] = np.arange(VOCAB) == 5  # A foregone choice.
  allowed[1] = False  # Padding.

  def total(logits):
    log_probs, entropy = sampling.token_distribution(logits, allowed, 0.5)
    return jnp.sum(jnp.where(allowed, log_probs, 0)) + jnp.sum(entropy)
  gradient = np.asarray(jax.grad(total)(logits))
  assert np.isfinite(gradient).all()
  np.testing.assert_array_equal(gradient[~allowed], 0)
  np.testing.assert_allclose(gradient[0], 0, atol=1e-6)
  assert np.abs(gradient[2:]).max() > 0.1


def test_draws_have_the_frequencies_of_the_distribution():
  logits, allowed = random_distribution(3, num_rows=1, spread=1.0)
  log_probs, _ = sampling.token_distribution(logits, allowed, 1.0)
  count = 40_000
  uniforms = jax.random.uniform(jax.random.key(0), (count,))
  tokens = sampling.inverse_cdf(
      jnp.broadcast_to(log_probs, (count, VOCAB)), uniforms)
  seen = np.bincount(tokens, minlength=VOCAB)
  assert not seen[~allowed[0]].any()
  expected = count * np.exp(np.asarray(log_probs[0]))[allowed[0]]
  chi_square = np.sum((seen[allowed[0]] - expected) ** 2 / expected)
  degrees = allowed.sum() - 1
  assert chi_square < degrees + 5 * np.sqrt(2 * degrees)


# From 1024 tokens on, XLA sums by blocks, and a sum is not flat between them.
@pytest.mark.parametrize('vocab', [64, 224, 4096])
def test_an_impossible_token_is_never_drawn(vocab):
  logits, allowed = random_distribution(4, 60, vocab, share=0.5, spread=6.0)
  log_probs, _ = sampling.token_distribution(logits, allowed, 1.0)
  sums = np.asarray(jnp.cumsum(jnp.exp(log_probs), axis=-1))
  # The sums themselves, and what is next to them, are the edges of the draws.
  edges = np.nextafter(sums / sums[:, -1:], np.float32(0))
  picks = np.random.default_rng(0).integers(vocab, size=(60, 200))
  edges = np.take_along_axis(edges, picks, axis=1)
  almost_one = np.float32(1 - 2**-23)
  uniforms = np.concatenate(
      [np.zeros((60, 1)), np.full((60, 1), almost_one), edges,
       np.nextafter(edges, np.float32(1))], axis=1)
  uniforms = np.clip(uniforms, 0, almost_one).astype(np.float32)
  tokens = jax.vmap(sampling.inverse_cdf, (None, 1), 1)(log_probs, uniforms)
  drawn = np.take_along_axis(np.exp(log_probs), np.asarray(tokens), axis=1)
  assert (drawn > 0).all()
  assert np.take_along_axis(allowed, np.asarray(tokens), axis=1).all()


@pytest.mark.parametrize('vocab', [1025, 3000, 49152])
def test_a_token_of_a_large_vocabulary_is_that_of_the_oracle(vocab):
  logits, allowed = random_distribution(5, 3, vocab, share=0.7)
  log_probs, _ = sampling.token_distribution(logits, allowed, 1.0)
  uniforms = np.random.default_rng(1).random((50, 3)).astype(np.float32)
  tokens = jax.vmap(sampling.inverse_cdf, (None, 0))(log_probs, uniforms)
  sums = np.cumsum(np.exp(np.asarray(log_probs, np.float64)), axis=-1)
  sums /= sums[:, -1:]
  for r in range(3):
    # Between the sums before and after it, but for what float32 rounds.
    after = sums[r, tokens[:, r]]
    before = after - np.diff(sums[r], prepend=0)[tokens[:, r]]
    assert (before <= uniforms[:, r] + 1e-5).all()
    assert (uniforms[:, r] <= after + 1e-5).all()
    assert len(np.unique(tokens[:, r])) > 15


def test_a_draw_of_zero_takes_the_first_possible_token():
  logits = np.zeros((1, VOCAB), np.float32)
  allowed = np.isin(np.arange(VOCAB), [7, 9])[None]
  log_probs, _ = sampling.token_distribution(logits, allowed, 1.0)
  draw = lambda u: int(sampling.inverse_cdf(log_probs, np.float32([u]))[0])
  assert [draw(u) for u in (0, 0.49, 0.51, 1 - 2**-23)] == [7, 7, 9, 9]


def test_no_two_draws_are_the_same():
  keys = jax.vmap(jax.random.fold_in, (None, 0))(
      jax.random.key(0), jnp.arange(40))
  draw = jax.jit(sampling.turn_uniforms, static_argnums=2)
  uniforms = [draw(keys, jnp.full(40, turn), 3) for turn in range(20)]
  values = np.stack(uniforms).ravel()
  assert ((0 <= values) & (values < 1)).all()
  # 2400 draws of 2^23 values: a third of a pair is expected.
  assert len(values) - len(np.unique(values)) <= 3
  some = np.array([7, 30])
  np.testing.assert_array_equal(
      sampling.turn_uniforms(keys[some], jnp.array([2, 5]), 3),
      [uniforms[2][7], uniforms[5][30]])


def filled_cache(seed, lengths, size):
  network = tiny.model()
  cache = sampling.empty_cache(network.config, len(lengths), size)
  shape = cache.key_values.keys[0].shape
  rng = np.random.default_rng(seed)
  return cache._replace(
      key_values=jax.tree.map(
          lambda _: jnp.asarray(rng.normal(size=shape), jnp.float32),
          cache.key_values),
      lengths=jnp.asarray(lengths, jnp.int32))


def test_each_row_is_written_at_its_own_index():
  lengths = [0, 3, 5, 7]
  cache = filled_cache(0, lengths, 8)
  rng = np.random.default_rng(1)
  shape = (*cache.key_values.keys[0].shape[:2], 4, 4)
  new = jax.tree.map(lambda _: rng.normal(size=shape).astype(np.float32),
                     cache.key_values)
  keep = np.array(
      [[1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]], bool)
  after = sampling.write_cache(cache, new, keep)
  for old, add, got in zip(*map(jax.tree.leaves, (
      cache.key_values, new, after.key_values))):
    expected = np.array(old)
    for row, length in enumerate(lengths):
      for place in np.flatnonzero(keep[row]):
        if length < 8:  # The last row has room for one token of two.
          expected[row, :, length] = add[row, :, place]
        length += 1
    np.testing.assert_array_equal(got, expected)
  assert after.lengths.tolist() == [2, 7, 5, 9]


def test_a_grown_cache_holds_what_it_held():
  cache = filled_cache(2, [1, 8], 8)
  grown = sampling.grow_cache(cache, 12)
  for old, new in zip(*map(jax.tree.leaves, (
      cache.key_values, grown.key_values))):
    assert new.shape[2] == 12
    np.testing.assert_array_equal(new[:, :, :8], old)
    assert not new[:, :, 8:].any()
  np.testing.assert_array_equal(grown.lengths, cache.lengths)


def test_copied_rows_are_those_of_the_source_and_no_others():
  cache, source = filled_cache(3, [1, 2, 3, 4], 8), filled_cache(4, [5, 6], 12)
  to, origin = np.int32([2, 0, 1, 1]), np.int32([1, 1, 0, 0])
  after = sampling.copy_rows(cache, source, to, origin, 2)
  assert after.lengths.tolist() == [6, 2, 6, 4]
  for old, other, new in zip(*map(jax.tree.leaves, (
      cache.key_values, source.key_values, after.key_values))):
    np.testing.assert_array_equal(new[1::2], old[1::2])
    np.testing.assert_array_equal(new[::2], np.stack([other[1, :, :8]] * 2))
  back = sampling.copy_rows(source, cache, to[1:2], origin[1:2], 1)
  for old, other, new in zip(*map(jax.tree.leaves, (
      source.key_values, cache.key_values, back.key_values))):
    np.testing.assert_array_equal(new[0, :, :8], other[1])
    np.testing.assert_array_equal(new[0, :, 8:], old[0, :, 8:])

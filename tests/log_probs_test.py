"""Log-probs without logits: held to the sampler's own, values and gradients."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpo_jax import log_probs
from bpo_jax import sampling

_VOCAB = 96
_WIDTH = 5


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
  """Tiles of two words, so that there are several."""
  monkeypatch.setattr(log_probs, '_MAX_WIDTH', 64)
  monkeypatch.setattr(log_probs, '_MIN_WIDTH', 32)


def _case(seed=0, shape=(2, 7), vocab_size=_VOCAB, density=None, scale=1.0):
  """Returns hidden, unembedding, tokens and packed allowed sets (or None)."""
  rng = np.random.default_rng(seed)
  hidden = scale * rng.normal(size=(*shape, _WIDTH)).astype(np.float32)
  unembedding = rng.normal(size=(vocab_size, _WIDTH)).astype(np.float32)
  tokens = rng.integers(0, vocab_size, shape).astype(np.int32)
  if density is None:
    return hidden, unembedding, tokens, None
  allowed = rng.random((*shape, vocab_size)) < density
  np.put_along_axis(allowed, tokens[..., None], True, axis=-1)
  return hidden, unembedding, tokens, sampling.pack_bits(jnp.asarray(allowed))


def _as_sampled(hidden, unembedding, tokens, allowed=None, temperature=1.0):
  """The same of full logits."""
  logits = jnp.einsum(
      '...d,vd->...v', hidden, unembedding, preferred_element_type=jnp.float32)
  allowed = None if allowed is None else sampling.unpack_bits(allowed)
  full, entropies = sampling.token_distribution(logits, allowed, temperature)
  chosen = jnp.take_along_axis(full, tokens[..., None], axis=-1)
  return chosen[..., 0], entropies


def _in_float64(hidden, unembedding, tokens, allowed, temperature):
  """A loop over tokens in NumPy."""
  shape = tokens.shape
  hidden = hidden.reshape(-1, hidden.shape[-1]).astype(np.float64)
  allowed = (np.ones((hidden.shape[0], len(unembedding)), bool)
             if allowed is None else
             np.asarray(sampling.unpack_bits(allowed)).reshape(len(hidden), -1))
  chosen, entropies = [], []
  for state, token, can in zip(hidden, tokens.ravel(), allowed):
    logits = unembedding.astype(np.float64) @ state / temperature
    shifted = logits - logits[can].max()
    weights = np.where(can, np.exp(shifted), 0)
    probs = weights / weights.sum()
    chosen.append(shifted[token] - np.log(weights.sum()))
    entropies.append(-sum(p * np.log(p) for p in probs if p > 0))
  return np.reshape(chosen, shape), np.reshape(entropies, shape)


def _weighted(function, seed=3):
  """Returns a scalar of both outputs, to differentiate."""

  def loss(hidden, unembedding, *args):
    outputs = function(hidden, unembedding, *args)
    rng = np.random.default_rng(seed)
    return sum(
        jnp.sum(x * rng.normal(size=x.shape).astype(np.float32))
        for x in outputs)

  return loss


def _ours(allowed=None, **kwargs):
  return jax.jit(
      lambda hidden, unembedding, tokens: log_probs.token_log_probs(
          hidden, unembedding, tokens, allowed=allowed, **kwargs))


def _both(function):
  """Returns what gives the outputs, and the gradients of both in both arrays.

  In one: compiling is what takes time here.
  """
  grad = jax.grad(_weighted(function), (0, 1))
  return jax.jit(lambda *args: (function(*args), grad(*args)))


@pytest.mark.parametrize('shape, density, temperature, chunk', [
    ((2, 7), None, 1.0, None),
    ((2, 7), 0.3, 0.7, 3),
    ((3, 2, 5), 0.3, 1.0, 2),
    ((9,), None, 0.7, 4),
])
def test_is_what_the_sampler_uses(shape, density, temperature, chunk):
  *arrays, allowed = _case(len(shape), shape, density=density)
  ours = _ours(allowed, temperature=temperature, chunk=chunk)
  theirs = functools.partial(
      _as_sampled, allowed=allowed, temperature=temperature)
  (got, grads), (want, want_grads) = (
      _both(f)(*arrays) for f in (ours, theirs))
  for x, y in zip(got, want):
    assert x.shape == y.shape and x.dtype == jnp.float32
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
  for x, y in zip(grads, want_grads):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('seed', range(3))
def test_is_what_the_definition_says(seed):
  rng = np.random.default_rng(seed)
  density = [None, 0.05, 0.5][seed]
  temperature = float(rng.uniform(0.3, 2))
  arrays = _case(seed, density=density, scale=rng.uniform(0.1, 9))
  got = _ours(arrays[-1], temperature=temperature, chunk=4)(*arrays[:-1])
  for x, want in zip(got, _in_float64(*arrays, temperature)):
    np.testing.assert_allclose(x, want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    'which', [pytest.param(0, marks=pytest.mark.slow), 1])
def test_gradient_of_either_output_alone(which):
  *arrays, allowed = _case(density=0.4)
  got, want = (
      jax.jit(jax.grad(lambda *args: f(*args)[which].sum(), (0, 1)))(*arrays)
      for f in (_ours(allowed), functools.partial(_as_sampled, allowed=allowed))
  )
  for x, y in zip(got, want):
    assert np.abs(y).max() > 0.1
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('vocab_size, density', [
    pytest.param(33, None, marks=pytest.mark.slow), (101, None),
    pytest.param(1184, None, marks=pytest.mark.slow), (160, 0.3)])
def test_any_vocabulary(vocab_size, density, monkeypatch):
  # Tiles of 64 divide none of them: 101 and 1184 and 160 are padded.
  monkeypatch.setattr(log_probs, '_MIN_WIDTH', 64)
  assert (log_probs._Tiles.of(vocab_size).padding > 0) == (vocab_size > 64)
  *arrays, allowed = _case(vocab_size=vocab_size, density=density)
  (got, grads), (want, want_grads) = (
      _both(f)(*arrays)
      for f in (_ours(allowed), functools.partial(_as_sampled, allowed=allowed))
  )
  for x, y in zip(got, want):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
  for x, y in zip(grads, want_grads):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_no_tile_is_the_whole_of_a_vocabulary_that_nothing_divides(monkeypatch):
  monkeypatch.undo()
  for vocab_size in (32_003, 32 * 1571):  # Prime, and a prime of words.
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (
        ((8, 512, 4), jnp.float32), ((vocab_size, 4), jnp.float32),
        ((8, 512), jnp.int32))]
    step = jax.grad(_weighted(_ours()), (0, 1))
    largest = max(_sizes(jax.make_jaxpr(step)(*shapes).jaxpr))
    assert 8 * 64 * vocab_size > 2**24 / 4 >= largest > 2**19


def _sizes(jaxpr):
  """Yields how many numbers each array of a program has."""
  for equation in jaxpr.eqns:
    for value in equation.outvars:
      yield value.aval.size
    for inner in jax.tree.leaves(
        list(equation.params.values()), is_leaf=_is_program):
      if _is_program(inner):
        yield from _sizes(getattr(inner, 'jaxpr', inner))


def _is_program(x):
  return hasattr(x, 'eqns') or hasattr(x, 'jaxpr')


def test_large_logits_lose_nothing():
  *arrays, _ = _case(scale=200.0)
  got, grads = _both(_ours())(*arrays)
  want = _in_float64(*arrays, None, 1.0)
  np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-3)
  np.testing.assert_allclose(got[1], want[1], rtol=1e-3, atol=1e-6)
  assert all(np.isfinite(x).all() for x in grads)


def test_tokens_that_allow_nothing_are_finite_and_inert():
  *arrays, allowed = _case(density=0.3)
  allowed = allowed.at[1, 2:].set(0)
  (outputs, got), (_, want) = (
      _both(f)(*arrays)
      for f in (_ours(allowed), functools.partial(_as_sampled, allowed=allowed))
  )
  assert all(np.isfinite(x).all() for x in outputs)
  for x, y in zip(got, want):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
  assert not got[0][1, 2:].any()


@pytest.mark.parametrize(
    'density', [pytest.param(None, marks=pytest.mark.slow), 0.3])
def test_what_stands_at_padding_reaches_nothing(density):
  hidden, unembedding, tokens, allowed = _case(density=density)
  mask = np.ones(tokens.shape, bool)
  mask[0, 4:] = mask[1, 0] = False

  def loss(function, hidden, unembedding, tokens):
    outputs = function(hidden, unembedding, tokens)
    return sum(
        jnp.sum(jnp.where(mask, x, 0.0) * (1.0 + i) * hidden.shape[1])
        for i, x in enumerate(outputs))

  spoilt = np.where(mask[..., None], hidden, np.nan)
  wrong = np.where(mask, tokens, -1)
  step = jax.jit(
      jax.value_and_grad(functools.partial(loss, _ours(allowed)), (0, 1)))
  want, want_grads = step(hidden, unembedding, tokens)
  got, grads = step(spoilt, unembedding, wrong)
  assert got == want
  assert not grads[0][~mask].any()
  for x, y in zip(grads, want_grads):
    np.testing.assert_array_equal(x, y)


def test_more_padding_and_other_rows_change_nothing():
  hidden, unembedding, tokens, _ = _case(shape=(3, 7))
  alone = _ours(chunk=4)(hidden[1:2], unembedding, tokens[1:2])
  among = _ours(chunk=4)(hidden, unembedding, tokens)
  longer = _ours(chunk=4)(
      np.pad(hidden, ((0, 0), (0, 6), (0, 0))), unembedding,
      np.pad(tokens, ((0, 0), (0, 6))))
  for x, y, z in zip(alone, among, longer):
    np.testing.assert_allclose(x[0], y[1], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(y, z[:, :7], rtol=1e-6, atol=1e-6)


def test_jit_and_vmap():
  *arrays, allowed = _case(shape=(3, 2, 5), density=0.3)
  hidden, unembedding, tokens = arrays
  grad = jax.jit(lambda h, t, a: jax.grad(
      _weighted(_ours(a, chunk=2)), (0, 1))(h, unembedding, t))
  want = [grad(*each) for each in zip(hidden, tokens, allowed)]
  got = jax.jit(jax.vmap(grad))(hidden, tokens, allowed)
  for i, each in enumerate(want):
    for x, y in zip(each, got):
      np.testing.assert_allclose(x, y[i], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('dtypes', [
    (jnp.bfloat16, jnp.bfloat16),
    pytest.param((jnp.float32, jnp.bfloat16), marks=pytest.mark.slow),
])
def test_low_precision_inputs(dtypes):
  *arrays, allowed = _case(density=0.3)
  low = [jnp.asarray(x, dtype) for x, dtype in zip(arrays, dtypes)]
  exact = [x.astype(jnp.float32) for x in low]
  both = _both(_ours(allowed))
  got, grads = both(*low, arrays[2])
  want, want_grads = both(*exact, arrays[2])
  for x, y in zip(got, want):
    assert x.dtype == jnp.float32
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
  for x, y, dtype in zip(grads, want_grads, dtypes):
    assert x.dtype == dtype
    np.testing.assert_allclose(
        x.astype(np.float32), y, rtol=0.03, atol=0.03 * np.abs(y).max())


def test_no_logits_of_a_row_exist(monkeypatch):
  monkeypatch.undo()
  vocab_size, width, length = 8192, 16, 1024
  shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (
      ((4, length, width), jnp.float32), ((vocab_size, width), jnp.float32),
      ((4, length), jnp.int32))]
  step = jax.value_and_grad(
      _weighted(_ours(chunk=64)), (0, 1))
  used = jax.jit(step).lower(*shapes).compile().memory_analysis()
  full = jax.jit(jax.value_and_grad(_weighted(_as_sampled), (0, 1)))
  needed = full.lower(*shapes).compile().memory_analysis().temp_size_in_bytes
  logits = 4 * length * vocab_size * 4
  assert needed > logits
  assert used.temp_size_in_bytes < logits / 16


def test_default_chunk_bounds_a_tile(monkeypatch):
  monkeypatch.undo()
  for vocab_size in (32_000, 49_152, 128_256, 151_936):
    tiles = log_probs._Tiles.of(vocab_size)
    assert tiles.count * tiles.width == vocab_size and not tiles.padding
    assert 64 <= tiles.width <= 1280
    for num_rows in (1, 8):
      chunk = log_probs._default_chunk(num_rows, tiles)
      assert 4 * num_rows * chunk * tiles.width <= 2**24


_SHARDED = '''
import re
import jax, jax.numpy as jnp, numpy as np
from bpo_jax import log_probs
mesh = jax.make_mesh(
    (4, 2), ('data', 'model'), axis_types=(jax.sharding.AxisType.Auto,) * 2)
put = lambda x, *names: jax.device_put(
    x, jax.sharding.NamedSharding(mesh, jax.P(*names)))
rng = np.random.default_rng(0)
rows, length, vocab, width = 8, 24, 512, 16
hidden = rng.normal(size=(rows, length, width)).astype(np.float32)
table = rng.normal(size=(vocab, width)).astype(np.float32)
tokens = rng.integers(0, vocab, (rows, length))
allowed = np.full((rows, length, vocab // 32), 2**32 - 1, np.uint32)
log_probs._MAX_WIDTH = 128
def loss(hidden, table, tokens, allowed):
  return sum(map(jnp.sum, log_probs.token_log_probs(
      hidden, table, tokens, allowed=allowed, chunk=8)))
step = jax.jit(jax.value_and_grad(loss, (0, 1)))
want = jax.tree.leaves(step(hidden, table, tokens, allowed))
for names in ((), ('model',)):
  args = (put(hidden, 'data'), put(table, *names), put(tokens, 'data'),
          put(allowed, 'data'))
  got = jax.tree.leaves(step(*args))
  for x, y in zip(got, want):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
  text = step.lower(*args).compile().as_text()
  for shape in re.findall(r'= (\\S+) all-gather', text):
    print('gathers', names, shape)
  print('sums', names, len(re.findall(r'all-reduce\\(', text)))
'''


def test_sharded_rows_stay_where_they_are():
  """On eight virtual devices, which have to be asked for before JAX starts."""
  result = subprocess.run(
      [sys.executable, '-c', _SHARDED], capture_output=True, text=True,
      env={**os.environ, 'PYTHONPATH': ':'.join(sys.path),
           'JAX_PLATFORMS': 'cpu',
           'XLA_FLAGS': '--xla_force_host_platform_device_count=8'})
  assert result.returncode == 0, result.stderr
  print(result.stdout)
  assert 'gathers' not in result.stdout
  assert result.stdout.count('sums') == 2


@pytest.mark.parametrize('change, message', [
    (dict(hidden=np.zeros(3, np.float32)), r'hidden: expected shape'),
    (dict(tokens=np.zeros((2, 6), np.int32)), r'tokens: .*\(2, 7\).*\(2, 6\)'),
    (dict(unembedding=np.zeros((96, 4), np.float32)),
     r'unembedding: .*\(96, 5\).*\(96, 4\)'),
    (dict(unembedding=np.zeros((0, 5), np.float32)),
     'unembedding: expected a token at least, got none'),
    (dict(allowed=np.zeros((2, 7, 2), np.uint32)), r'allowed: .*\(2, 7, 3\)'),
    (dict(allowed=np.zeros((2, 7, 2), np.uint32),
          unembedding=np.zeros((70, 5), np.float32)), 'multiple of 32.*70'),
    (dict(temperature=0.0), 'temperature: expected a positive number, got 0'),
    (dict(chunk=0), 'chunk: expected at least 1, got 0'),
])
def test_what_is_wrong_is_said(change, message):
  names = ('hidden', 'unembedding', 'tokens', 'allowed')
  kwargs = dict(zip(names, _case())) | change
  with pytest.raises(ValueError, match=message):
    log_probs.token_log_probs(**kwargs)

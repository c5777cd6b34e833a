"""Tests of attention over ancestors, against sets of ancestors spelt out."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpo_jax import attention
from bpo_jax import attention_pallas

_IMPLEMENTATIONS = ('dense', 'blocks', 'pallas')
_BLOCK = 8


def _random_tree(rng, num_tokens, fork):
  """Returns the parents of tokens in depth-first order."""
  parents = [-1]
  path = [0]
  for token in range(1, num_tokens):
    if rng.random() < fork:
      del path[int(rng.integers(1, len(path) + 1)):]
    parents.append(path[-1])
    path.append(token)
  return parents


def random_parents(seed, num_rows=2, length=32, fork=0.25):
  """Returns [R, L] int: the token before each; -1 of roots, -2 of padding.

  A row holds several ragged trees in depth-first order, then padding.
  """
  rng = np.random.default_rng(seed)
  rows = np.full((num_rows, length), -2)
  for row in rows:
    start = 0
    while start < length - int(rng.integers(1, length // 4)):
      size = int(rng.integers(1, length - start + 1))
      parents = np.array(_random_tree(rng, size, fork))
      row[start:start + size] = np.where(parents < 0, -1, parents + start)
      start += size
  return rows


def ancestor_sets(parents):
  """Returns [R][L] lists of the tokens that each token may attend to."""
  def walk(row, i):
    found = [i]
    while row[i] >= 0:
      i = int(row[i])
      found.append(i)
    return found[::-1]
  return [[walk(row, i) for i in range(len(row))] for row in parents]


def ends(parents):
  """Returns `end`: one past a token's last descendant, 0 on padding."""
  end = np.zeros(parents.shape, np.int32)
  for r, row in enumerate(ancestor_sets(parents)):
    for i, seen in enumerate(row):
      if parents[r, i] > -2:
        end[r, seen] = i + 1
  return end


def oracle(queries, keys, values, sets):
  """Loops over tokens in float64."""
  queries, keys, values = (
      np.asarray(x, np.float64) for x in (queries, keys, values))
  out = np.zeros(queries.shape)
  num_rows, num_heads, length, dim = queries.shape
  for r in range(num_rows):
    for h in range(num_heads):
      g = h // (num_heads // keys.shape[1])
      for i in range(length):
        seen = sets[r][i]
        scores = keys[r, g, seen] @ queries[r, h, i] / np.sqrt(dim)
        weights = np.exp(scores - scores.max())
        out[r, h, i] = weights @ values[r, g, seen] / weights.sum()
  return out


def oracle_gradients(queries, keys, values, sets, cotangent):
  """Returns the gradients of sum(out * cotangent), token by token."""
  arrays = [np.asarray(x, np.float64) for x in (queries, keys, values)]
  d_q, d_k, d_v = (np.zeros(x.shape) for x in arrays)
  queries, keys, values = arrays
  num_rows, num_heads, length, dim = queries.shape
  for r in range(num_rows):
    for h in range(num_heads):
      g = h // (num_heads // keys.shape[1])
      for i in range(length):
        seen, d_out = sets[r][i], np.asarray(cotangent[r, h, i], np.float64)
        k, v, q = keys[r, g, seen], values[r, g, seen], queries[r, h, i]
        weights = np.exp(k @ q / np.sqrt(dim))
        weights /= weights.sum()
        d_weights = v @ d_out
        d_scores = weights * (d_weights - weights @ d_weights) / np.sqrt(dim)
        d_q[r, h, i] = d_scores @ k
        np.add.at(d_k[r, g], seen, np.outer(d_scores, q))
        np.add.at(d_v[r, g], seen, np.outer(weights, d_out))
  return d_q, d_k, d_v


def random_arrays(seed, num_rows=2, heads=4, groups=2, length=32, dim=6,
                  dtype=np.float32):
  """Returns queries, keys, values and a cotangent."""
  rng = np.random.default_rng(seed)
  return tuple(
      jnp.asarray(rng.normal(size=(num_rows, n, length, dim)), dtype)
      for n in (heads, groups, groups, heads))


def make_ancestors(parents, block=_BLOCK):
  end = ends(parents)
  return attention.Ancestors(
      jnp.asarray(end), jnp.asarray(attention.block_table(end, block)))


@functools.partial(jax.jit, static_argnames='implementation')
def run(queries, keys, values, cotangent, ancestors, implementation):
  """Returns the output and the gradients of queries, keys and values."""
  attend = lambda *x: attention.attend(*x, ancestors, implementation)
  out, vjp = jax.vjp(attend, queries, keys, values)
  return out, *vjp(cotangent)


def _tokens(mask):
  """Returns an index of [R, heads, L, D] arrays from [R, L] bool."""
  return np.asarray(mask)[:, None, :, None]


@pytest.mark.parametrize('implementation', _IMPLEMENTATIONS)
@pytest.mark.parametrize('seed', range(10))
def test_equals_oracle(seed, implementation):
  parents = random_parents(seed)
  sets = ancestor_sets(parents)
  *arrays, cotangent = random_arrays(seed)
  result = run(*arrays, cotangent, make_ancestors(parents), implementation)
  expected = (oracle(*arrays, sets),
              *oracle_gradients(*arrays, sets, cotangent))
  for got, want in zip(result, expected):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('implementation', _IMPLEMENTATIONS)
@pytest.mark.parametrize('heads, groups, length, dim, block', [
    (1, 1, 8, 1, 8), (9, 3, 48, 64, 16)])
def test_shapes(heads, groups, length, dim, block, implementation):
  parents = random_parents(3, 1, length)
  *arrays, cotangent = random_arrays(3, 1, heads, groups, length, dim)
  result = run(*arrays, cotangent, make_ancestors(parents, block),
               implementation)
  sets = ancestor_sets(parents)
  expected = (oracle(*arrays, sets),
              *oracle_gradients(*arrays, sets, cotangent))
  for got, want in zip(result, expected):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('implementation', _IMPLEMENTATIONS)
def test_depth_four_shows_each_token_its_ancestors_alone(implementation):
  # P -> (A -> (B -> (C, D), E), F), one token each, in depth-first order.
  parents = np.array([[-1, 0, 1, 2, 2, 1, 0, -2]])
  values = jnp.asarray(2.0 ** np.arange(8))[None, None, :, None]
  zeros = jnp.zeros_like(values)
  out = attention.attend(zeros, zeros, values, make_ancestors(parents, 4),
                         implementation)
  expected = [1, 3 / 2, 7 / 3, 15 / 4, 23 / 4, 35 / 3, 65 / 2, 128]
  np.testing.assert_allclose(out[0, 0, :, 0], expected, rtol=1e-6)


@pytest.mark.parametrize('implementation', _IMPLEMENTATIONS)
def test_large_scores_do_not_overflow(implementation):
  parents = random_parents(5)
  queries, keys, values, cotangent = random_arrays(5)
  arrays = 60 * queries, 60 * keys, values
  result = run(*arrays, cotangent, make_ancestors(parents), implementation)
  expected = oracle(*arrays, ancestor_sets(parents))
  np.testing.assert_allclose(result[0], expected, rtol=1e-3, atol=1e-3)
  assert all(np.isfinite(x).all() for x in result)


@pytest.mark.parametrize('implementation', _IMPLEMENTATIONS)
@pytest.mark.parametrize('seed', range(5))
def test_bfloat16_is_summed_in_float32(seed, implementation):
  parents = random_parents(seed)
  arrays = random_arrays(seed, dtype=jnp.bfloat16)
  result = run(*arrays, make_ancestors(parents), implementation)
  sets = ancestor_sets(parents)
  expected = (oracle(*arrays[:3], sets),
              *oracle_gradients(*arrays[:3], sets, arrays[3]))
  assert all(x.dtype == jnp.bfloat16 for x in result)
  for got, want in zip(result, expected):
    np.testing.assert_allclose(got, want, rtol=0.02, atol=0.02)


def _relations(parents, row, token):
  """Returns [R, L] bool: descendants and itself, ancestors, all others."""
  descendants = np.zeros(parents.shape, bool)
  ancestors = np.zeros(parents.shape, bool)
  sets = ancestor_sets(parents)[row]
  descendants[row] = [token in seen for seen in sets]
  ancestors[row, sets[token][:-1]] = True
  return descendants, ancestors, ~(descendants | ancestors)


@pytest.mark.parametrize('implementation', _IMPLEMENTATIONS)
@pytest.mark.parametrize('seed', range(5))
def test_perturbation_reaches_descendants_alone(seed, implementation):
  parents = random_parents(seed)
  token = 5 + seed
  descendants, _, _ = _relations(parents, 0, token)
  ancestors = make_ancestors(parents)
  arrays = random_arrays(seed)
  changed = tuple(x.at[0, :, token].multiply(-7.5) for x in arrays[:3])
  before = run(*arrays, ancestors, implementation)[0]
  after = run(*changed, arrays[3], ancestors, implementation)[0]
  same = (before == after).all(axis=(1, 3))
  np.testing.assert_array_equal(same, ~descendants)


@pytest.mark.parametrize('implementation', _IMPLEMENTATIONS)
@pytest.mark.parametrize('which, bad', [
    (0, np.nan), (1, np.nan), (1, np.inf), (2, np.nan), (2, -np.inf),
    (3, np.nan)])
def test_nan_stays_with_its_relations(which, bad, implementation):
  """In queries, keys, values and cotangents; gradients included."""
  if which == 3 and implementation == 'dense':
    pytest.skip('its gradient is what JAX derives')
  parents = random_parents(2, fork=0.5)
  token = 12
  descendants, above, others = _relations(parents, 0, token)
  assert others[0].sum() > 5 and above[0].any()
  ancestors = make_ancestors(parents)
  arrays = random_arrays(2)
  poisoned = list(arrays)
  poisoned[which] = arrays[which].at[0, :, token].set(bad)
  clean = run(*arrays, ancestors, implementation)
  result = run(*poisoned, ancestors, implementation)
  for got, want in zip(result, clean):
    np.testing.assert_array_equal(
        np.where(_tokens(others), got, 0), np.where(_tokens(others), want, 0))
  at_token = np.zeros_like(others)
  at_token[0, token] = True
  reached = [at_token, descendants, descendants, np.zeros_like(others)][which]
  is_nan = np.isnan(result[0]).all(axis=(1, 3))
  np.testing.assert_array_equal(is_nan, reached)
  assert any(np.isnan(x).any() for x in result)  # Nothing is hidden.


@pytest.mark.parametrize('implementation', _IMPLEMENTATIONS)
def test_padding_changes_nothing(implementation):
  parents = random_parents(7)
  padding = parents == -2
  assert padding.any()
  arrays = random_arrays(7)
  poisoned = [jnp.where(_tokens(padding), jnp.nan, x) for x in arrays]
  if implementation == 'dense':  # Whose gradient is what JAX derives.
    poisoned[3] = arrays[3]
  ancestors = make_ancestors(parents)
  clean = run(*arrays, ancestors, implementation)
  for got, want in zip(run(*poisoned, ancestors, implementation), clean):
    real = _tokens(~padding)
    np.testing.assert_array_equal(
        np.where(real, got, 0), np.where(real, want, 0))


@pytest.mark.parametrize('implementation', _IMPLEMENTATIONS)
def test_rows_are_independent(implementation):
  parents, other = random_parents(9), random_parents(10)
  arrays, others = random_arrays(9), random_arrays(10)
  other[1], ancestors = parents[1], make_ancestors(parents)
  mixed = [y.at[1].set(x[1]) for x, y in zip(arrays, others)]
  results = [run(*arrays, ancestors, implementation),
             run(*mixed, make_ancestors(other), implementation)]
  for got, want in zip(*results):
    np.testing.assert_allclose(got[1], want[1], rtol=1e-6, atol=1e-6)
    assert not np.allclose(got[0], want[0])


@pytest.mark.slow
@pytest.mark.parametrize('implementation', _IMPLEMENTATIONS)
def test_jit_and_vmap_change_nothing(implementation):
  *arrays, cotangent = random_arrays(4)
  ancestors = make_ancestors(random_parents(4))
  attend = functools.partial(
      attention.attend, implementation=implementation)
  out = run(*arrays, cotangent, ancestors, implementation)[0]
  np.testing.assert_allclose(attend(*arrays, ancestors), out, atol=1e-6)
  stacked = jax.tree.map(lambda x: x[:, None], (*arrays, ancestors))
  mapped = jax.jit(jax.vmap(attend))(*stacked)
  np.testing.assert_allclose(mapped[:, 0], out, atol=1e-6)


def test_no_step_copies_all_that_is_added_to():
  """Else what a step costs would grow with the rows."""
  length, dim = 1152, 24  # Numbers that no other array has.
  end = np.full((1, length), length, np.int32)
  ancestors = attention.Ancestors(end, attention.block_table(end))
  loss = lambda *x: jnp.sum(jnp.sin(attention.attend(*x, ancestors, 'blocks')))
  of = jax.ShapeDtypeStruct
  heads, groups = (of((1, n, length, dim), jnp.float32) for n in (4, 2))
  text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(
      heads, groups, groups).compile().as_text()
  whole = rf'f32\[{length // 128},2,128,{dim}\]'
  bodies = set(re.findall(r'body=%?([\w.-]+)', text))
  assert len(bodies) > 4 and re.search(whole, text)
  for computation in text.split('\n\n'):
    name = re.match(r'\s*(?:ENTRY )?%?([\w.-]+)', computation)
    if name and name[1] in bodies:
      assert not re.findall(whole + r'\S* copy\(.*', computation), name[1]


def _rematerialised(ancestors, **options):
  attend = jax.checkpoint(attention.attend, **options)
  loss = lambda *x: jnp.sum(jnp.sin(attend(*x, ancestors)))
  return jax.grad(loss, (0, 1, 2))


def test_remat_changes_nothing():
  *arrays, _ = random_arrays(4)
  ancestors = make_ancestors(random_parents(4))
  out = attention.attend(*arrays, ancestors, 'blocks')
  plain = run(*arrays, jnp.cos(out), ancestors, 'blocks')[1:]
  again = jax.jit(_rematerialised(ancestors))(*arrays)
  for got, want in zip(again, plain):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def _count(jaxpr, name):
  """Returns how often a primitive stands in a jaxpr and those within."""
  inner = lambda x: hasattr(x, 'jaxpr') or hasattr(x, 'eqns')
  total = 0
  for eqn in jaxpr.eqns:
    total += eqn.primitive.name == name
    for x in jax.tree.leaves(list(eqn.params.values()), is_leaf=inner):
      total += _count(getattr(x, 'jaxpr', x), name) if inner(x) else 0
  return total


def test_policy_spares_the_second_forward_pass():
  """Each pass walks over key blocks in one while loop."""
  *arrays, _ = random_arrays(4)
  ancestors = make_ancestors(random_parents(4))
  policy = jax.checkpoint_policies.save_only_these_names(
      attention.CHECKPOINT_NAME)
  num_loops = [
      _count(jax.make_jaxpr(_rematerialised(ancestors, **options))(
          *arrays).jaxpr, 'while') for options in ({'policy': policy}, {})]
  assert num_loops == [4, 6]  # Two loops a pass: wide steps, then single ones.


@pytest.mark.parametrize('seed', range(10))
def test_table_lists_just_the_visible_blocks(seed):
  parents = random_parents(seed, 3, 96, fork=0.1)
  table = attention.block_table(ends(parents), _BLOCK)
  sets = ancestor_sets(parents)
  for r, row in enumerate(table):
    for n, line in enumerate(row):
      tokens = range(n * _BLOCK, (n + 1) * _BLOCK)
      seen = sorted({j // _BLOCK for i in tokens for j in sets[r][i]} | {n})
      assert list(line) == seen + [-1] * (len(line) - len(seen))


def test_few_widths_are_compiled():
  widths = set()
  for seed in range(60):
    fork = np.random.default_rng(seed).random()
    end = ends(random_parents(seed, 1, 19 * _BLOCK, fork**3))
    table = attention.block_table(end, _BLOCK)
    assert table.dtype == np.int32
    widths.add(table.shape[2])
  assert 2 < len(widths) <= 6 and widths <= {1, 2, 4, 8, 16, 19}


def test_table_of_a_chain_and_of_padding():
  length = 3 * attention.BLOCK
  chain, padding = np.full((1, length), length), np.zeros((1, length))
  table = attention.block_table(np.concatenate([chain, padding]))
  assert table.tolist() == [
      [[0, -1, -1], [0, 1, -1], [0, 1, 2]],
      [[0, -1, -1], [1, -1, -1], [2, -1, -1]]]


@pytest.mark.parametrize('end, message', [
    (np.zeros((1, 12), np.int32), r'multiple of block = 8, got \(1, 12\)'),
    (np.zeros(16, np.int32), r'\[R, L\]'),
    (np.zeros((0, 16), np.int32), 'R >= 1'),
    (np.full((1, 16), 17), 'from 0 to L = 16, got 17 to 17'),
    (np.full((1, 16), -1), 'from 0 to L = 16, got -1 to -1')])
def test_bad_ends(end, message):
  with pytest.raises(ValueError, match=message):
    attention.block_table(end, 8)


def _bad(**changes):
  ancestors = make_ancestors(random_parents(1))
  queries, keys, values, _ = random_arrays(1)
  given = dict(queries=queries, keys=keys, values=values, ancestors=ancestors,
               implementation='blocks')
  return given | {k: f(given[k]) for k, f in changes.items()}


@pytest.mark.parametrize('changes, message', [
    (dict(implementation=lambda _: 'block'), "did you mean blocks"),
    (dict(values=lambda x: x[:, :1]), r'values: expected shape \(2, 2, 32, 6'),
    (dict(queries=lambda x: x[:, :3]), 'multiple of the 2 key heads, got 3'),
    (dict(queries=lambda x: x[..., :5]), 'keys: expected shape'),
    (dict(ancestors=lambda x: x._replace(end=x.end[:, :-1])),
     'ancestors.end: expected shape'),
    (dict(ancestors=lambda x: x._replace(blocks=None)), 'block_table'),
    (dict(ancestors=lambda x: x._replace(blocks=x.blocks[:, :3])),
     'multiple of Q'),
    (dict(ancestors=lambda x: x._replace(blocks=x.blocks[:1])),
     r'\[R, Q, W\] of R rows')])
def test_bad_input(changes, message):
  with pytest.raises(ValueError, match=message):
    attention.attend(**_bad(**changes))


def test_heads_that_a_mesh_does_not_part_are_told():
  mesh = jax.sharding.AbstractMesh((1, 16), ('data', 'model'))
  with pytest.raises(ValueError, match='keys: .* multiple of the 16 parts'):
    attention.attend(**_bad(), mesh=mesh)


def test_auto_takes_the_table_where_there_is_one(monkeypatch):
  given = _bad()
  given['implementation'] = 'auto'
  monkeypatch.setattr(attention, 'reference', lambda *_: 'dense')
  monkeypatch.setattr(
      attention, '_attend_blocks', lambda how, *_: how)
  assert attention.attend(**given) == 'blocks'
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  assert attention.attend(**given) == 'gpu'
  given['ancestors'] = given['ancestors']._replace(blocks=None)
  assert attention.attend(**given) == 'dense'


def _abstract(length, dim, dtype, block, backward):
  """Returns the shapes that a kernel is given."""
  of = jax.ShapeDtypeStruct
  heads, groups = of((2, 6, length, dim), dtype), of((2, 2, length, dim), dtype)
  numbers = of((2, 6, length), jnp.float32)
  args = [heads, groups, groups, of((2, length), jnp.int32),
          of((2, length // block, 4), jnp.int32)]
  return args + [numbers, numbers, heads] * backward


@pytest.mark.parametrize('kernel', ['forward', 'backward'])
@pytest.mark.parametrize(
    'dim, dtype', [(24, jnp.float32), (128, jnp.bfloat16)])
@pytest.mark.parametrize('platform', ['gpu', 'tpu'])
def test_kernels_lower_for_devices(platform, dim, dtype, kernel):
  function = functools.partial(
      getattr(attention_pallas, kernel), platform=platform)
  args = _abstract(512, dim, dtype, 128, kernel == 'backward')
  device = jax.sharding.AbstractDevice(
      device_kind='TPU v5 lite', num_cores=1, platform='tpu')
  mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
  with jax.sharding.use_abstract_mesh(mesh):
    lowered = jax.jit(function).trace(*args).lower(
        lowering_platforms=('cuda' if platform == 'gpu' else 'tpu',))
  calls = {'gpu': 'triton', 'tpu': 'tpu_custom_call'}[platform]
  assert lowered.as_text().count(calls) >= (2 if kernel == 'backward' else 1)


@pytest.mark.parametrize('platform, block, message', [
    ('gpu', 8, 'power of two of at least 16 tokens, got 8'),
    ('gpu', 96, 'power of two of at least 16 tokens, got 96'),
    ('tpu', 64, 'multiple of 128 tokens, got 64')])
def test_blocks_that_a_device_has_not(platform, block, message):
  args = _abstract(4 * block, 16, jnp.float32, block, False)
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(functools.partial(
        attention_pallas.forward, platform=platform), *args)


def test_tiles_smaller_than_blocks(monkeypatch):
  """As on GPU, where a block of the table is several tiles."""
  monkeypatch.setattr(attention_pallas, '_tile_size', lambda *_: 4)
  parents, arrays = random_parents(11), random_arrays(11)
  result = run(*arrays, make_ancestors(parents, 16), 'pallas')
  for got, want in zip(result, run(*arrays, make_ancestors(parents), 'dense')):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)

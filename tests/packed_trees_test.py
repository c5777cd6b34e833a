"""Trees run once as against every path run alone, through the same network.

The oracle knows nothing of rows: it runs one path after the other under a plain
causal mask, takes whole logits, computes nothing twice, and gives a token that
lies on n paths an n-th of its weight on each.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_agents as tiny

from bpo_jax import attention
from bpo_jax import learner
from bpo_jax import packing
from bpo_jax import sampling
from bpo_jax import tree as trees
from bpo_jax import types
from bpo_jax.models import transformer

NETWORK = tiny.model(value_head=True)
ADAPTED = tiny.model(
    value_head=True, lora=transformer.LoraConfig(rank=2, alpha=3.0))
TEMPERATURE = 0.7
SIZE = 96  # Tokens that every path alone is padded to.
BLOCK = 32  # Of attention: several in a row of 128.


def rematerialised(network, remat):
  return transformer.Transformer(
      dataclasses.replace(network.config, remat=remat))


@functools.cache
def params_of(seed=0, network=NETWORK):
  """Random parameters, the B of adapters among them."""
  return tiny.params_of(network, seed)


def deep_trees(seed, num_trees=3, num_nodes=12, constrained=True):
  """Ragged trees of depth 4 at least, some of their nodes without tokens."""
  rng = np.random.default_rng(seed)
  builders = []
  for _ in range(num_trees):
    builder = trees.TreeBuilder()
    builder.add(types.NO_PARENT, rng.integers(2, 64, rng.integers(1, 9)))
    for n in range(1, num_nodes):
      actions = int(rng.integers(0, 4))
      length = actions + int(rng.integers(0, 6)) if n % 5 else 0
      tokens = rng.integers(2, 64, length)
      allowed = rng.random((length, 64)) < 0.3
      allowed[np.arange(length), tokens] = True
      has_sets = constrained and length > 0
      bits = np.asarray(sampling.pack_bits(allowed)) if has_sets else None
      parent = n - 1 if n < 5 else int(rng.integers(max(0, n - 4), n))
      builder.add(parent, tokens, action_mask=np.arange(length) < actions,
                  behaviour_log_probs=-3 * rng.random(length), allowed=bits)
    builders.append(builder)
  return trees.stack(builders)


def row_lengths(tree):
  """Rows that cut the trees, hold one at most, several, and all of them."""
  sizes = tree.token_mask.sum(axis=(1, 2))
  longest = max(len(tiny.path_tokens(tree, b, leaf))
                for b in range(len(sizes)) for leaf in tiny.leaves(tree, b))
  return {'cut': longest + 2, 'one': int(sizes.max()),
          'several': int(np.sort(sizes)[-2:].sum()), 'all': 256}


LENGTHS = ('cut', 'one', 'several', 'all')


def pack(tree, length, seed=0, **kwargs):
  credit = tiny.random_credit(tree, seed)
  return packing.pack(
      tree, credit, row_lengths(tree).get(length, length), layout='trees',
      **kwargs)


def padded(rows):
  """The rows, padded to one of few shapes: a test is to compile little."""
  num_rows, length = rows.tokens.shape
  widths = ((0, (1 << (num_rows - 1).bit_length()) - num_rows),
            (0, -length % 128))
  rows = jax.tree.map(
      lambda x: np.pad(x, (*widths, *[(0, 0)] * (x.ndim - 2))), rows)
  return rows._replace(source=np.where(rows.token_mask, rows.source, -1))


@jax.jit
def outputs_of(params, rows):
  return packing.token_outputs(NETWORK, params, rows, TEMPERATURE)


def token_loss(outputs, advantages, weights):
  """Returns the sum of a term that has all outputs in it; 0 off the weights."""
  terms = (advantages * outputs.log_probs - 0.1 * outputs.entropies
           + jnp.square(outputs.values - advantages))
  return jnp.sum(jnp.where(weights != 0, weights * terms, 0.0))


@functools.partial(jax.jit, static_argnames='network')
def run(params, rows, network=NETWORK):
  """Returns the loss, the outputs and the gradient."""
  def loss(params):
    outputs = packing.token_outputs(network, params, rows, TEMPERATURE)
    return token_loss(outputs, rows.advantages, rows.weights), outputs
  (total, outputs), gradient = jax.value_and_grad(loss, has_aux=True)(params)
  return total, outputs, gradient


def run_alone(network, params, tokens, allowed):
  """Returns what the network says of the tokens of one path, [SIZE] each."""
  causal = np.tril(np.ones((1, SIZE, SIZE), bool))
  apply = functools.partial(network.apply, {'params': params})
  hidden, _ = apply(tokens[None], np.arange(SIZE)[None], causal)
  logits = apply(hidden, method='logits')[0]
  values = apply(hidden, method='values')[0]
  shift = lambda x: jnp.concatenate([jnp.zeros_like(x[:1]), x[:-1]])
  logits = shift(logits) / TEMPERATURE
  possible = sampling.unpack_bits(allowed)
  scores = jnp.where(possible, logits, -1e9)
  log_probs = scores - jax.nn.logsumexp(scores, axis=-1, keepdims=True)
  entropies = -jnp.sum(
      jnp.where(possible, jnp.exp(log_probs) * log_probs, 0), axis=-1)
  chosen = jnp.take_along_axis(log_probs, tokens[:, None], axis=1)[:, 0]
  return packing.TokenOutputs(chosen, entropies, shift(values))


@functools.partial(jax.jit, static_argnums=0)
def alone(network, params, tokens, allowed, advantages, weights):
  def loss(params):
    outputs = run_alone(network, params, tokens, allowed)
    return token_loss(outputs, advantages, weights), outputs
  return jax.value_and_grad(loss, has_aux=True)(params)


def path_by_path(tree, params, network=NETWORK, seed=0):
  """Returns outputs [B, N, T] each, the loss and its gradient, of all paths."""
  network = rematerialised(network, 'none')
  credit = tiny.random_credit(tree, seed)
  shape, total, gradient = tree.tokens.shape, 0.0, None
  outputs = [np.zeros(shape, np.float32) for _ in range(3)]
  num_paths = np.zeros(shape[:2], int)
  paths = [(b, tiny.path(tree, b, leaf)) for b in range(shape[0])
           for leaf in tiny.leaves(tree, b)]
  for b, path in paths:
    num_paths[b, path] += 1
  for b, path in paths:
    node, token = np.nonzero(tree.token_mask[b, path])
    node = np.asarray(path)[node]
    at = lambda x: np.concatenate(
        [x[b, node, token], np.zeros((SIZE, *x.shape[3:]), x.dtype)])[:SIZE]
    allowed = np.full((*shape, 2), 0xFFFFFFFF, np.uint32)
    if tree.allowed is not None:
      allowed = np.where(
          tree.action_mask[..., None], tiny.allowed_sets(tree), allowed)
    weights = (credit.weights / np.maximum(num_paths, 1)[..., None])
    (loss, said), slope = alone(
        network, params, at(tree.tokens), at(allowed), at(credit.advantages),
        at(weights.astype(np.float32)))
    total += float(loss)
    gradient = slope if gradient is None else jax.tree.map(
        np.add, gradient, slope)
    for output, values in zip(outputs, said):
      output[b, node, token] = np.where(
          tree.action_mask[b, node, token], values[:len(node)], 0)
  return packing.TokenOutputs(*outputs), total, gradient


def assert_same_gradients(got, expected):
  """Every parameter's, relative to its norm."""
  norm = float(optax.global_norm(expected))
  assert norm > 0.1

  def check(path, x, y):
    difference = np.linalg.norm(np.asarray(x - y, np.float64))
    bound = 1e-5 * np.linalg.norm(np.asarray(y, np.float64))
    assert difference <= bound + 1e-8 * norm, jax.tree_util.keystr(path)
    assert np.any(y), jax.tree_util.keystr(path)
  jax.tree_util.tree_map_with_path(check, got, expected)


@functools.cache
def expected_of(seed, constrained=True, network=NETWORK):
  tree = deep_trees(seed, constrained=constrained)
  return tree, *path_by_path(tree, params_of(network=network), network)


def test_the_trees_are_what_they_are_meant_to_be():
  for seed in range(3):
    tree = deep_trees(seed)
    tree.validate()
    assert int(np.max(trees.depth(tree))) >= 4
    assert (tree.node_mask & ~tree.token_mask.any(axis=2)).any()
    lengths = row_lengths(tree)
    rows = {name: len(pack(tree, name).tokens) for name in LENGTHS}
    assert rows['all'] == 1 and rows['several'] == 2 and rows['one'] == 3
    assert rows['cut'] > 3 and lengths['cut'] < lengths['one']
    assert packing.sharing_ratio(tree) > 1.5


def cases():
  """Seed, length, network, remat and table: all of them, few of them fast."""
  fast = [(ADAPTED, 'none', True), (ADAPTED, 'matmuls', False),
          (ADAPTED, 'block', True)]
  for seed, length in itertools.product(range(3), LENGTHS):
    is_fast = (seed, length) in [(0, 'cut'), (0, 'all'), (1, 'several')]
    yield pytest.param(
        seed, length, NETWORK, 'block', False,
        marks=[] if is_fast else pytest.mark.slow)
  for length, *case in itertools.product(
      ('cut', 'all'), (NETWORK, ADAPTED), ('none', 'matmuls', 'block'),
      (False, True)):
    if case != [NETWORK, 'block', False]:
      is_fast = length == 'cut' and tuple(case) in fast
      yield pytest.param(
          0, length, *case, marks=[] if is_fast else pytest.mark.slow)


def name_of(value):
  if isinstance(value, transformer.Transformer):
    return 'lora' if value.config.lora else 'plain'
  return {True: 'table', False: 'dense'}[value] if isinstance(
      value, bool) else str(value)


@pytest.mark.parametrize(
    'seed, length, network, remat, has_table', cases(), ids=name_of)
def test_outputs_and_gradient_are_those_of_every_path_alone(
    seed, length, network, remat, has_table):
  """Whatever is computed again, looked up or adapted, in every parameter."""
  tree, outputs, loss, gradient = expected_of(seed, network=network)
  rows = padded(pack(tree, length))
  if has_table:
    rows = rows._replace(
        ancestors_blocks=attention.block_table(rows.end, BLOCK))
    assert rows.ancestors_blocks.shape[1] > 2
  my_loss, got, my_gradient = run(
      params_of(network=network), rows, rematerialised(network, remat))
  for name, mine, theirs in zip(got._fields, got, outputs):
    back = packing.unpack(mine, rows, tree.tokens.shape)
    np.testing.assert_allclose(
        back, theirs, rtol=1e-5, atol=5e-6, err_msg=name)
    assert not np.asarray(mine)[~rows.path_mask].any()
    # What is repeated, too, has the outputs of its path.
    np.testing.assert_allclose(
        np.asarray(mine)[rows.path_mask],
        theirs.ravel()[rows.source[rows.path_mask]], rtol=1e-5, atol=5e-6)
  np.testing.assert_allclose(my_loss, loss, rtol=1e-5)
  assert_same_gradients(my_gradient, gradient)


@pytest.mark.parametrize('length, max_tokens, bucket, constrained', [
    ('cut', 128, 64, True), ('all', 10_000, None, True),
    pytest.param('cut', 128, 64, False, marks=pytest.mark.slow),
    pytest.param('several', 128, 128, True, marks=pytest.mark.slow)])
def test_the_split_changes_no_gradient(
    length, max_tokens, bucket, constrained):
  tree, outputs, loss, gradient = expected_of(0, constrained)
  batches = packing.micro_batches(pack(tree, length), max_tokens, bucket)
  assert len(batches) == {'cut': 3, 'several': 2, 'all': 1}[length]
  for batch in batches:
    assert (batch.ancestors_blocks is None) == (length == 'cut')
  losses, said, gradients = zip(*(run(params_of(), b) for b in batches))
  np.testing.assert_allclose(sum(losses), loss, rtol=1e-5)
  assert_same_gradients(
      jax.tree.map(lambda *parts: sum(parts), *gradients), gradient)
  for name, expected in outputs._asdict().items():
    got = sum(packing.unpack(getattr(x, name), batch, expected.shape)
              for x, batch in zip(said, batches))
    np.testing.assert_allclose(
        got, expected, rtol=1e-5, atol=5e-6, err_msg=name)


def long_trees(seed=0):
  """Trees of 200 to 400 tokens: rows of several blocks of attention."""
  rng = np.random.default_rng(seed)
  builders = []
  for _ in range(3):
    builder = trees.TreeBuilder()
    nodes = [builder.add(types.NO_PARENT, rng.integers(2, 64, 12))]
    for _ in range(24):
      length = int(rng.integers(3, 23))
      depth = int(rng.integers(1, 5))
      nodes.append(builder.add(
          nodes[max(0, len(nodes) - depth)] if len(nodes) % 6 else nodes[0],
          rng.integers(2, 64, length), action_mask=np.arange(length) < 4,
          behaviour_log_probs=-np.ones(length)))
    builders.append(builder)
  return trees.stack(builders)


@pytest.mark.parametrize(
    'length', [384, pytest.param(1024, marks=pytest.mark.slow)])
def test_a_table_of_blocks_changes_nothing(length):
  tree = long_trees()
  batches = packing.micro_batches(pack(tree, length), 2048)
  shape = batches[0].ancestors_blocks.shape
  assert shape[1] > 2
  assert (batches[0].ancestors_blocks < 0).any()
  for batch in batches:
    dense = batch._replace(ancestors_blocks=None)
    (loss, _, gradient), (other, _, expected) = (
        run(params_of(), rows) for rows in (batch, dense))
    np.testing.assert_allclose(loss, other, rtol=1e-5)
    assert_same_gradients(gradient, expected)


def below(tree, b, node):
  """Returns the nodes of a subtree."""
  nodes = [node]
  for n in range(node + 1, tree.parents.shape[1]):
    if tree.parents[b, n] in nodes:
      nodes.append(n)
  return nodes


@pytest.mark.parametrize('has_table', [True, False])
@pytest.mark.parametrize('length', [256, 1024])
def test_siblings_see_nothing_of_each_other(length, has_table):
  # Bitwise; and what is below the tokens that change does change.
  tree = long_trees(1)
  rows, = packing.micro_batches(pack(tree, length), 4096)
  assert len(rows.tokens) == (1 if length == 1024 else 4)
  assert rows.ancestors_blocks.shape[1] > 1
  if not has_table:
    rows = rows._replace(ancestors_blocks=None)
  before = outputs_of(params_of(), rows)
  num_nodes, num_tokens = tree.tokens.shape[1:]
  node_of = np.where(rows.source < 0, -1, rows.source // num_tokens)
  for b, n in [(0, 2), (0, 13), (1, 5), (1, 18), (2, 3), (2, 7)]:
    nodes = [b * num_nodes + m for m in below(tree, b, n)]
    inside = np.isin(node_of, nodes)
    tokens = np.where(inside, (rows.tokens + 1) % 64, rows.tokens)
    after = outputs_of(params_of(), rows._replace(tokens=tokens))
    for x, y in zip(before, after):
      x, y = np.asarray(x), np.asarray(y)
      np.testing.assert_array_equal(x[~inside], y[~inside])
      assert (x != y).sum() > 0.7 * (rows.path_mask & inside).sum() > 2


@pytest.mark.parametrize('length', ['cut', 'all'])
def test_the_first_token_of_every_fork_is_trained(length):
  # Its gradient alone reaches the network by the last token of its parent.
  tree, outputs, _, _ = expected_of(2)
  rows = padded(pack(tree, length))
  got = packing.unpack(
      run(params_of(), rows)[1].log_probs, rows, tree.tokens.shape)
  forks = [(b, n) for b, n in zip(*np.nonzero(tree.action_mask[:, :, 0]))
           if tree.parents[b, n] in tree.parents[b, :n]]
  assert len(forks) > 3
  for b, n in forks:
    assert got[b, n, 0] != 0
    np.testing.assert_allclose(
        got[b, n, 0], outputs.log_probs[b, n, 0], rtol=1e-5)
    token = (b * tree.parents.shape[1] + n) * tree.tokens.shape[2]
    row, place = np.argwhere((rows.source == token) & rows.action_mask)[0]
    above = tiny.path_tokens(tree, b, int(tree.parents[b, n]))
    assert rows.positions[row, place] == len(above)
    assert rows.tokens[row, rows.predictor[row, place]] == above[-1]


def test_more_padding_changes_nothing():
  # Nor does what is there: other tokens, NaN in every number.
  tree = deep_trees(0)
  rows = pack(tree, 'several')
  loss, _, gradient = run(params_of(), rows)
  longer = pack(tree, rows.tokens.shape[1] + 37)
  longer = jax.tree.map(
      lambda x: np.pad(x, [(0, 2)] + [(0, 0)] * (x.ndim - 1)), longer)
  nan = lambda x: np.where(longer.action_mask, x, np.float32(np.nan))
  longer = longer._replace(
      tokens=np.where(longer.token_mask, longer.tokens, 7),
      positions=np.where(longer.token_mask, longer.positions, 900),
      behaviour_log_probs=nan(longer.behaviour_log_probs))
  other, _, padded_gradient = run(params_of(), longer)
  np.testing.assert_allclose(other, loss, rtol=1e-6)
  assert_same_gradients(padded_gradient, gradient)


def test_nan_in_the_trees_off_the_actions_reaches_no_row():
  tree = deep_trees(0)
  credit = tiny.random_credit(tree, 0)
  clean = packing.pack(tree, credit, 80, layout='trees')
  nan = lambda x: np.where(tree.action_mask, x, np.float32(np.nan))
  spoilt = packing.pack(
      tree.replace(behaviour_log_probs=nan(tree.behaviour_log_probs)),
      credit.replace(advantages=nan(credit.advantages),
                     weights=nan(credit.weights)), 80, layout='trees')
  jax.tree.map(np.testing.assert_array_equal, spoilt, clean)


@pytest.mark.slow
@pytest.mark.parametrize('length', ['cut', 'all'])
def test_an_update_is_that_of_the_paths(length):
  # The loss of the learner, its divergence and its critic, by token mean.
  tree = deep_trees(0)
  rng = np.random.default_rng(0)
  targets = rng.normal(size=tree.tokens.shape)
  loss = learner.make_policy_loss(learner.LossConfig(
      kl_coef=0.1, entropy_coef=0.01, value_coef=0.5))
  optimizer = optax.identity()
  update = learner.make_update_fn(NETWORK, optimizer, loss, TEMPERATURE)

  def step(rows, max_tokens):
    state = learner.init_state(
        tiny.params_of(NETWORK), optimizer, jax.random.key(0))
    batches = packing.micro_batches(rows, max_tokens)
    state, metrics = update(state, batches, 1.0, tiny.params_of(NETWORK, 1))
    moved = jax.tree.map(lambda p, q: np.asarray(p - q), params_of(),
                         state.params)
    return moved, metrics
  paths = packing.pack(
      tree, tiny.random_credit(tree, 0), value_targets=targets)
  expected, theirs = step(paths, 128)
  got, mine = step(pack(tree, length, value_targets=targets), 256)
  difference = optax.global_norm(jax.tree.map(np.subtract, got, expected))
  assert difference < 1e-5 * optax.global_norm(expected)
  assert mine.keys() == theirs.keys()
  for name, value in theirs.items():
    np.testing.assert_allclose(mine[name], value, rtol=3e-5, err_msg=name)

"""Rows of trees and of paths: every action token once, below all it follows."""

import jax
import numpy as np
import pytest
import tiny_agents as tiny

from bpo_jax import attention
from bpo_jax import layouts
from bpo_jax import packing
from bpo_jax import tree as trees
from bpo_jax import types

SEEDS = range(6)


def make(seed, row_length=None, layout='paths', **kwargs):
  tree = tiny.random_trees(seed, **kwargs)
  credit = tiny.random_credit(tree, seed)
  return tree, credit, packing.pack(tree, credit, row_length, layout=layout)


def longest_path(tree):
  return max(len(tiny.path_tokens(tree, b, leaf))
             for b in range(len(tree.parents)) for leaf in tiny.leaves(tree, b))


# Trees whole and alone in a row, several to a row, and cut.
LAYOUTS = ('paths', 'trees', 'several', 'cut')


def lay(seed, kind, **kwargs):
  tree = tiny.random_trees(seed, **kwargs)
  credit = tiny.random_credit(tree, seed)
  length = {'trees': int(tree.token_mask.sum(axis=(1, 2)).max()),
            'several': 150, 'cut': longest_path(tree) + 2}.get(kind)
  layout = 'paths' if kind == 'paths' else 'trees'
  return tree, credit, packing.pack(tree, credit, length, layout=layout)


def real(values, rows):
  return [values[row][rows.token_mask[row]] for row in range(len(values))]


def path_sources(tree, source):
  """Returns the indices of the tokens on the path that ends with one."""
  num_nodes, num_tokens = tree.tokens.shape[1:]
  b, node = divmod(source // num_tokens, num_nodes)
  tokens = [(b * num_nodes + n) * num_tokens + int(t)
            for n in tiny.path(tree, b, node)
            for t in np.flatnonzero(tree.token_mask[b, n])]
  return tokens[:tokens.index(source) + 1]


@pytest.mark.parametrize('seed', SEEDS)
def test_rows_are_the_paths(seed):
  tree, _, rows = make(seed)
  expected = [tiny.path_tokens(tree, b, leaf)
              for b in range(len(tree.parents))
              for leaf in tiny.leaves(tree, b)]
  assert [row.tolist() for row in real(rows.tokens, rows)] == expected
  lengths = rows.token_mask.sum(axis=1)
  assert rows.tokens.shape[1] == lengths.max()
  for row, length in enumerate(lengths):
    assert rows.positions[row, :length].tolist() == list(range(length))
    assert (rows.end[row, :length] == length).all()
    assert rows.predictor[row, 1:length].tolist() == list(range(length - 1))


def depth_first(tree, b, node=0):
  tokens = tree.tokens[b, node][tree.token_mask[b, node]].tolist()
  for child in np.flatnonzero(tree.parents[b] == node):
    tokens += depth_first(tree, b, child)
  return tokens


@pytest.mark.parametrize('seed', SEEDS)
def test_rows_are_trees_depth_first(seed):
  # Each in a row of its own, two and one, or all in one; largest first.
  tree, credit, _ = make(seed)
  wholes = [depth_first(tree, b) for b in range(len(tree.parents))]
  wholes.sort(key=len, reverse=True)
  first, second, third = map(len, wholes)
  for length, expected in (
      (first, wholes),
      (first + third, [wholes[0] + wholes[2], wholes[1]]
       if second > third else [wholes[0] + wholes[1], wholes[2]]),
      (first + second + third, [sum(wholes, [])])):
    rows = packing.pack(tree, credit, length, layout='trees')
    assert [row.tolist() for row in real(rows.tokens, rows)] == expected
    assert rows.tokens.shape[1] == length


@pytest.mark.parametrize('kind', LAYOUTS)
@pytest.mark.parametrize('seed', SEEDS)
def test_a_token_sees_its_path_and_nothing_else(seed, kind):
  tree, _, rows = lay(seed, kind)
  seen = np.asarray(packing.attention_mask(rows))
  for row, place in np.argwhere(rows.token_mask):
    path = path_sources(tree, int(rows.source[row, place]))
    assert rows.source[row][seen[row, place]].tolist() == path
    assert rows.positions[row, place] == len(path) - 1
    predictor = rows.source[row, rows.predictor[row, place]]
    assert predictor == path[-2 if len(path) > 1 else -1]
    assert rows.tokens[row, place] == tree.tokens.ravel()[path[-1]]


@pytest.mark.parametrize('kind', LAYOUTS)
def test_padding_is_zero_and_at_the_end(kind):
  _, _, rows = lay(0, kind)
  padding = ~rows.token_mask
  assert (np.sort(padding, axis=1) == padding).all()
  assert (rows.source[padding] == -1).all()
  for name in ('tokens', 'positions', 'end', 'predictor', 'action_mask',
               'path_mask', 'behaviour_log_probs', 'advantages', 'weights',
               'allowed'):
    assert not getattr(rows, name)[padding].any(), name
  for name, values in rows._asdict().items():
    expected = {'allowed': 'uint32'}.get(name, (
        'bool' if name.endswith('mask') else 'int32' if name in (
            'tokens', 'positions', 'end', 'predictor', 'source')
        else 'float32'))
    assert values is None or values.dtype == expected, name


@pytest.mark.parametrize('kind', LAYOUTS)
@pytest.mark.parametrize('seed', SEEDS)
def test_every_action_token_is_trained_once(seed, kind):
  tree, credit, rows = lay(seed, kind)
  trained = np.sort(rows.source[rows.action_mask])
  np.testing.assert_array_equal(trained, np.flatnonzero(tree.action_mask))
  for name, values in (('advantages', credit.advantages),
                       ('weights', credit.weights),
                       ('behaviour_log_probs', tree.behaviour_log_probs)):
    back = packing.unpack(getattr(rows, name), rows, tree.tokens.shape)
    np.testing.assert_array_equal(back, values, err_msg=name)
  for name in ('advantages', 'weights'):
    assert not getattr(rows, name)[~rows.action_mask].any()
    np.testing.assert_allclose(
        getattr(rows, name).sum(dtype=np.float64),
        getattr(credit, name).sum(dtype=np.float64), rtol=1e-12)


@pytest.mark.parametrize('kind', LAYOUTS)
@pytest.mark.parametrize('seed', SEEDS)
def test_the_path_mask_has_what_other_rows_train(seed, kind):
  tree, _, rows = lay(seed, kind)
  index = rows.source[rows.token_mask]
  for name, values in (('path_mask', tree.action_mask),
                       ('behaviour_log_probs', tree.behaviour_log_probs)):
    np.testing.assert_array_equal(
        getattr(rows, name)[rows.token_mask], values.ravel()[index])
  words = tiny.allowed_sets(tree).reshape(-1, tree.allowed.shape[-1])
  np.testing.assert_array_equal(
      rows.allowed[rows.path_mask], words[rows.source[rows.path_mask]])
  assert (rows.path_mask & ~rows.action_mask).any() == (
      kind in ('paths', 'cut'))
  assert not (rows.action_mask & ~rows.path_mask).any()


@pytest.mark.parametrize('seed', SEEDS)
def test_a_cut_repeats_the_path_above_it_and_no_more(seed):
  tree, _, rows = lay(seed, 'cut')
  before = set()
  for sources in real(rows.source, rows):
    sources = sources.tolist()
    assert len(set(sources)) == len(sources)
    new = set(sources) - before
    above = {s for token in new for s in path_sources(tree, token)}
    assert above == set(sources)
    before |= new
  assert before == set(np.flatnonzero(tree.token_mask).tolist())


@pytest.mark.parametrize('kind', ['trees', 'several'])
def test_what_goes_in_a_row_is_not_cut(kind):
  tree, _, rows = lay(1, kind)
  np.testing.assert_array_equal(
      np.sort(rows.source[rows.token_mask]), np.flatnonzero(tree.token_mask))


def star(prompt, length, num_leaves, depth=1):
  """A prompt and chains of `depth` nodes of `length` tokens below it."""
  builder = trees.TreeBuilder()
  root = builder.add(types.NO_PARENT, range(1, prompt + 1))
  for _ in range(num_leaves):
    above = root
    for _ in range(depth):
      above = builder.add(
          above, range(length), action_mask=[True] * length,
          behaviour_log_probs=[-1.0] * length)
  return builder


def test_cuts_are_as_near_to_the_root_as_they_can_be():
  # Two chains of 20 go in with the prompt of 10; a third one would only begin.
  tree = trees.stack([star(10, 5, 8, depth=4)])
  rows = packing.pack(
      tree, tiny.random_credit(tree, 0), 65, layout='trees')
  assert rows.token_mask.sum(axis=1).tolist() == [50] * 4
  # And a small tree goes in what is left.
  tree = trees.stack([star(10, 5, 8, depth=4), star(3, 2, 5)])
  rows = packing.pack(
      tree, tiny.random_credit(tree, 0), 65, layout='trees')
  assert rows.token_mask.sum(axis=1).tolist() == [63, 50, 50, 50]


def filled_depth_first(tree, b, row_length):
  """Returns the tokens run where rows are filled node by node."""
  lengths = tree.token_mask[b].sum(axis=1)
  total, row, nodes = 0, 0, set()

  def visit(node):
    nonlocal total, row, nodes
    if row + lengths[node] > row_length:
      nodes = set(tiny.path(tree, b, node)[:-1])
      row = sum(lengths[n] for n in nodes)
      total += row
    nodes.add(node)
    row += lengths[node]
    total += lengths[node]
    for child in np.flatnonzero(tree.parents[b] == node):
      visit(child)
  visit(0)
  return total


def test_cuts_repeat_less_than_rows_filled_node_by_node():
  mine, other = 0, 0
  for seed in range(10):
    tree = tiny.random_trees(seed, num_trees=1, num_nodes=40)
    length = 2 * longest_path(tree)
    rows = packing.pack(
        tree, tiny.random_credit(tree, seed), length, layout='trees')
    unique = int(tree.token_mask.sum())
    mine += int(rows.token_mask.sum()) - unique
    other += filled_depth_first(tree, 0, length) - unique
  assert mine < 0.75 * other


def test_nodes_and_trees_without_tokens_take_no_place():
  builder = trees.TreeBuilder()
  root = builder.add(types.NO_PARENT, [1, 2])
  empty = builder.add(root, [])
  builder.add(empty, [3], action_mask=[True], behaviour_log_probs=[-1.0])
  builder.add(empty, [])
  tree = trees.stack([builder], num_trees=3)
  credit = tiny.random_credit(tree, 0)
  rows = packing.pack(tree, credit, 4, layout='trees')
  assert rows.tokens.tolist() == [[1, 2, 3, 0]]
  assert rows.predictor.tolist() == [[0, 0, 1, 0]]
  nothing = trees.stack([builder], num_trees=3).replace(
      token_mask=np.zeros_like(tree.token_mask),
      action_mask=np.zeros_like(tree.action_mask))
  for layout in ('trees', 'paths'):
    rows = packing.pack(nothing, credit, layout=layout)
    assert not rows.token_mask.any() and not packing.micro_batches(rows, 64)


def test_an_unknown_layout_is_refused():
  tree, credit, _ = make(0)
  with pytest.raises(ValueError, match="layout: .*did you mean trees"):
    packing.pack(tree, credit, layout='tree')


def test_value_targets_come_along():
  tree, credit, _ = make(0)
  rng = np.random.default_rng(0)
  extra = {name: rng.normal(size=tree.tokens.shape)
           for name in ('value_targets', 'old_values')}
  for batch in packing.micro_batches(packing.pack(tree, credit, **extra), 64):
    index = batch.source[batch.action_mask]
    for name, values in extra.items():
      got = getattr(batch, name)
      np.testing.assert_array_equal(
          got[batch.action_mask], values.ravel()[index].astype(np.float32))
      assert got.dtype == np.float32 and not got[~batch.action_mask].any()


@pytest.mark.parametrize('name', ['value_targets', 'old_values'])
def test_arrays_of_another_shape_are_refused(name):
  tree, credit, _ = make(0)
  with pytest.raises(ValueError, match=rf'{name}: expected shape .*\(2,\)'):
    packing.pack(tree, credit, **{name: np.zeros(2)})
  with pytest.raises(ValueError, match='advantages: expected shape'):
    packing.pack(tree, credit.replace(advantages=np.zeros((1, 1, 1))))


def test_the_first_token_of_a_fork_is_predicted_by_its_parents_last():
  tree, _, rows = make(0)
  num_forks = 0
  for b, n in zip(*np.nonzero(tree.parents > 0)):
    first = (b * tree.parents.shape[1] + n) * tree.tokens.shape[2]
    row, place = np.argwhere((rows.source == first) & rows.action_mask)[0]
    above = int(tree.parents[b, n])
    while not tree.token_mask[b, above].any():
      above = int(tree.parents[b, above])
    last = tree.tokens[b, above][tree.token_mask[b, above]][-1]
    assert rows.tokens[row, rows.predictor[row, place]] == last
    num_forks += tree.parents[b, n] in tree.parents[b, :n]
  assert num_forks > 3


def test_a_longer_row_only_pads():
  tree, credit, rows = make(1)
  length = rows.tokens.shape[1]
  longer = packing.pack(tree, credit, length + 5)
  for name, short, long in zip(rows._fields, rows, longer):
    if short is None:
      assert long is None
      continue
    np.testing.assert_array_equal(long[:, :length], short, err_msg=name)
  assert not longer.token_mask[:, length:].any()


@pytest.mark.parametrize('layout', ['trees', 'paths'])
def test_a_row_that_cannot_hold_a_path_is_refused(layout):
  tree, credit, rows = make(1)
  length = rows.tokens.shape[1]
  row = np.argmax(rows.token_mask.sum(axis=1))
  b = rows.source[row, 0] // tree.tokens[0].size
  for size in (length - 1, 1, 0):
    with pytest.raises(
        ValueError, match=rf'row_length = {size} tokens, got one of {length} in'
        rf' tree {b}; raise row_length to {length}'):
      packing.pack(tree, credit, size, layout=layout)
  packing.pack(tree, credit, length, layout=layout)


def test_an_action_that_nothing_precedes_is_refused():
  builder = trees.TreeBuilder()
  root = builder.add(types.NO_PARENT, [])
  builder.add(root, [3], action_mask=[True], behaviour_log_probs=[-1.0])
  tree = trees.stack([builder])
  with pytest.raises(ValueError, match='prompt'):
    packing.pack(tree, tiny.random_credit(tree, 0))


def log_probs_of(rows, temperature=1.0, seed=0):
  network = tiny.model()
  function = jax.jit(packing.token_log_probs, static_argnums=(0, 3))
  return function(network, tiny.params_of(network, seed), rows, temperature)


@pytest.mark.parametrize('constrained', [True, False])
def test_log_probs_are_those_of_each_path_alone(constrained):
  tree, _, rows = make(2, constrained=constrained)
  assert (rows.allowed is None) != constrained
  values = log_probs_of(rows, 0.7)
  for row in range(len(rows.tokens)):
    alone = jax.tree.map(lambda x, r=row: x[r:r + 1], rows)
    # Not even the padding: all but the path is something else.
    noise = np.where(alone.token_mask, alone.tokens, 7)
    alone = alone._replace(tokens=noise)
    for got, expected in zip(values, log_probs_of(alone, 0.7)):
      np.testing.assert_allclose(got[row], expected[0], atol=1e-5)
  for value in values:
    assert not np.asarray(value)[~rows.path_mask].any()
    assert np.abs(np.asarray(value)[rows.path_mask]).min() > 0
    assert np.isfinite(value).all()


def test_values_are_of_the_state_before_the_token():
  network = tiny.model(value_head=True)
  params = tiny.params_of(network)
  _, _, rows = make(5)
  value = jax.jit(lambda rows: packing.token_outputs(
      network, params, rows, 0.7).values)
  values = value(rows)
  assert not np.asarray(values)[~rows.path_mask].any()
  assert np.ptp(np.asarray(values)[rows.path_mask]) > 0.1
  # Nothing of the token itself, nor of what comes after it.
  row, place = np.argwhere(rows.action_mask)[-1]
  tokens = rows.tokens.copy()
  tokens[row, place:] = (tokens[row, place:] + 1) % 64
  changed = value(rows._replace(tokens=tokens))
  np.testing.assert_allclose(changed[row, place], values[row, place], atol=1e-6)
  tokens[row, place - 1] = (tokens[row, place - 1] + 1) % 64
  changed = value(rows._replace(tokens=tokens))
  assert abs(changed[row, place] - values[row, place]) > 1e-3


def test_without_a_head_there_are_no_values():
  _, _, rows = make(5)
  network = tiny.model()
  params = tiny.params_of(network)
  outputs = jax.jit(packing.token_outputs, static_argnums=0)(
      network, params, rows)
  assert outputs.values is None


@pytest.mark.parametrize('max_tokens', [1, 64, 100, 10_000])
@pytest.mark.parametrize('bucket', [1, 8, None])
@pytest.mark.parametrize('kind', ['paths', 'several', 'cut'])
def test_micro_batches_hold_what_the_rows_train(max_tokens, bucket, kind):
  _, _, rows = lay(3, kind)
  batches = packing.micro_batches(rows, max_tokens, bucket)
  join = lambda name: np.concatenate(
      [getattr(b, name)[b.action_mask] for b in batches])
  order = np.argsort(join('source'))
  trained = np.argsort(rows.source[rows.action_mask])
  for name in ('source', 'tokens', 'advantages', 'weights', 'positions'):
    np.testing.assert_array_equal(
        join(name)[order], getattr(rows, name)[rows.action_mask][trained])
  for batch in batches:
    num_rows, length = batch.tokens.shape
    assert num_rows == 1 or num_rows * length <= max_tokens
    assert num_rows & (num_rows - 1) == 0
    assert length % (bucket or 32) == 0
    assert (batch.source[~batch.token_mask] == -1).all()
    # Whole rows: what precedes a trained token is there as well.
    for row in range(num_rows):
      assert batch.token_mask[row, :batch.token_mask[row].sum()].all()


@pytest.mark.parametrize('kind', ['paths', 'several', 'cut'])
def test_micro_batches_say_where_log_probs_are_needed(kind):
  tree, _, rows = lay(3, kind)
  for batch in packing.micro_batches(rows, 128):
    length = batch.tokens.shape[1]
    words = tiny.allowed_sets(tree).reshape(-1, tree.allowed.shape[-1])
    assert batch.allowed.shape == (*batch.trained.shape, tree.allowed.shape[-1])
    for row, places in enumerate(batch.trained):
      needed = np.flatnonzero(batch.path_mask[row])
      count = len(needed)
      assert places[:count].tolist() == needed.tolist()
      assert (places[count:] == length).all()
      np.testing.assert_array_equal(
          batch.allowed[row, :count], words[batch.source[row, needed]])
      assert not batch.allowed[row, count:].any()
    most = batch.path_mask.sum(axis=1).max()
    assert most <= batch.trained.shape[1] < most + length / 8
    if length % attention.BLOCK:
      assert batch.ancestors_blocks is None
    else:
      np.testing.assert_array_equal(
          batch.ancestors_blocks, attention.block_table(batch.end))


def test_rows_that_train_nothing_are_left_out():
  _, _, rows = make(4)
  mask = rows.action_mask.copy()
  mask[1::2] = False
  batches = packing.micro_batches(rows._replace(action_mask=mask), 10_000)
  kept = sum(batch.token_mask.any(axis=1).sum() for batch in batches)
  assert kept == mask.any(axis=1).sum() < len(mask)
  none = rows._replace(action_mask=np.zeros_like(mask))
  assert not packing.micro_batches(none, 10_000)


def test_the_last_batch_has_few_rows_of_padding():
  tree = trees.stack([star(3, 2, 1) for _ in range(13)])
  rows = packing.pack(tree, tiny.random_credit(tree, 0))
  shapes = lambda *args, **kwargs: [
      b.tokens.shape for b in packing.micro_batches(rows, *args, **kwargs)]
  assert shapes(256) == [(8, 32), (4, 32), (2, 32)]
  assert shapes(128) == [(4, 32)] * 3 + [(2, 32)]
  assert shapes(64) == [(2, 32)] * 6 + [(1, 32)]
  assert shapes(512) == [(16, 32)]
  # Of shards: each has a part of every batch.
  assert shapes(64, num_shards=4) == [(8, 32), (8, 32)]
  assert shapes(32, num_shards=3) == [(3, 32)] * 5


def test_a_micro_batch_is_not_split_again():
  _, _, rows = make(4)
  batch, *_ = packing.micro_batches(rows, 10_000)
  with pytest.raises(ValueError, match='expected rows as by pack'):
    packing.micro_batches(batch, 64)


@pytest.mark.parametrize('numbers', [
    {'max_tokens': 0}, {'max_tokens': 64.5}, {'bucket': 0}, {'bucket': -32},
    {'num_shards': 0}, {'num_shards': 1.5}])
def test_numbers_of_micro_batches_are_whole_and_positive(numbers):
  _, _, rows = make(4)
  (name, value), = numbers.items()
  with pytest.raises(ValueError, match=f'{name}: expected .*got {value}'):
    packing.micro_batches(rows, **({'max_tokens': 64} | numbers))


def test_row_lengths_are_whole():
  tree, credit, _ = make(4)
  with pytest.raises(ValueError, match='row_length: expected a whole number'):
    packing.pack(tree, credit, 1e6)


def agent_trees(seed, num_trees=16, num_nodes=64, num_tokens=48):
  """Trees as of agents: observations, short actions, forks of forks."""
  rng = np.random.default_rng(seed)
  shape = (num_trees, num_nodes)
  counts = rng.integers(6, 50, (num_trees, 1))
  node_mask = np.arange(num_nodes) < counts
  parents = np.maximum(np.arange(num_nodes) - rng.integers(1, 6, shape), 0)
  parents = np.where(node_mask & (np.arange(num_nodes) > 0), parents, -1)
  actions = rng.integers(2, 8, shape)
  actions[:, 0] = 0
  place = np.arange(num_tokens)
  lengths = np.where(node_mask, actions + rng.integers(5, 40, shape), 0)
  token_mask = place < lengths[..., None]
  action_mask = token_mask & (place < actions[..., None])
  return trees.empty((*shape, num_tokens)).replace(
      node_mask=node_mask, parents=parents.astype(np.int32),
      token_mask=token_mask, action_mask=action_mask)


def test_few_shapes_are_compiled():
  found, padding = set(), []
  for seed in range(200):
    tree = agent_trees(seed)
    length = packing.row_length_of(tree, 8192)
    rows = packing.pack(
        tree, tiny.random_credit(tree, seed), length, layout='trees')
    batches = packing.micro_batches(rows, 8192)
    found |= {tuple(x.shape for x in jax.tree.leaves(batch))
              for batch in batches}
    padding.append(packing.metrics(batches)['rows/padding'])
  assert len(found) <= 30
  assert np.mean(padding) < 0.08


def test_lengths_of_rows_are_few_and_close():
  lengths = [layouts.bucket(n) for n in range(1, 2600)]
  for n, length in enumerate(lengths, 1):
    step = 32 if n <= 128 else max(128, n / 4)
    assert n <= length < n + step
    assert length % (32 if n <= 128 else 128) == 0
    below = layouts.bucket_below(n)
    assert below == (length if length == n else max(
        (other for other in lengths if other <= n), default=0))
  assert len(set(lengths)) == 4 + 3 + 4 * 2 + 2
  assert lengths == sorted(lengths)


def test_a_row_is_as_long_as_all_the_trees_where_memory_lets_it():
  small = trees.stack([star(3, 2, 5), star(100, 10, 30, depth=10)])
  assert packing.row_length_of(small) == layouts.bucket(3113) == 3584
  assert packing.row_length_of(small, 2500) == 2048
  assert packing.row_length_of(small, 64) == 256  # A path of 200 goes in.
  # No longer than 8192, or four paths: beyond them little is repeated.
  large = trees.stack([star(100, 10, 100, depth=10)])
  assert packing.row_length_of(large) == 8192
  longer = trees.stack([star(100, 300, 5, depth=10)])
  assert packing.row_length_of(longer) == 4 * layouts.bucket(3100)
  rows = packing.pack(large, tiny.random_credit(large, 0), layout='trees')
  assert rows.tokens.shape == (2, 8192)


def test_there_are_rows_for_all_shards():
  tree = trees.stack([star(10, 10, 9) for _ in range(16)])
  assert packing.row_length_of(tree) == 1792
  length = packing.row_length_of(tree, num_shards=4)
  assert length == 512
  rows = packing.pack(tree, tiny.random_credit(tree, 0), length, layout='trees')
  assert len(rows.tokens) == 4
  assert packing.row_length_of(tree, num_shards=100) == 128  # None is cut.


def test_metrics_tell_what_is_shared_repeated_and_padded():
  tree = trees.stack([star(10, 5, 4), star(10, 5, 2)])
  credit = tiny.random_credit(tree, 0)
  np.testing.assert_allclose(packing.sharing_ratio(tree), (60 + 30) / (30 + 20))
  told = lambda length, layout: packing.metrics(packing.micro_batches(
      packing.pack(tree, credit, length, layout=layout), 64, bucket=64))
  assert told(64, 'trees') == {
      'rows/tokens': 50, 'rows/trained_tokens': 30, 'rows/repeated': 0,
      'rows/computed_tokens': 64, 'rows/padding': 1 - 50 / 64}
  # Rows of two leaves: the prompt of the first is run twice.
  cut = told(20, 'trees')
  assert cut['rows/tokens'] == 60
  np.testing.assert_allclose(cut['rows/repeated'], 10 / 60)
  paths = told(None, 'paths')
  np.testing.assert_allclose(paths['rows/repeated'], 1 - 50 / 90)
  assert packing.metrics([]) == {
      'rows/tokens': 0, 'rows/trained_tokens': 0, 'rows/repeated': 0,
      'rows/computed_tokens': 0, 'rows/padding': 0}
  assert packing.sharing_ratio(trees.stack([star(1, 1, 1)], num_trees=2)) == 1

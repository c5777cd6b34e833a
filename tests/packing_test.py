"""Rows of paths: every action token once, predicted by what is above it."""

import jax
import numpy as np
import pytest
import tiny_agents as tiny

from bpo_jax import packing
from bpo_jax import tree as trees
from bpo_jax import types

SEEDS = range(6)


@pytest.fixture(scope='module', autouse=True)
def _quick_compilation():
  with tiny.quick_compilation():
    yield


def make(seed, row_length=None, **kwargs):
  tree = tiny.random_trees(seed, **kwargs)
  credit = tiny.random_credit(tree, seed)
  return tree, credit, packing.pack(tree, credit, row_length)


def real(values, rows):
  return [values[row][rows.token_mask[row]] for row in range(len(values))]


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
    assert rows.token_mask[row, :length].all()
    assert rows.positions[row, :length].tolist() == list(range(length))
    assert (rows.end[row, :length] == length).all()
    assert rows.predictor[row, 1:length].tolist() == list(range(length - 1))
  padding = ~rows.token_mask
  assert (rows.source[padding] == -1).all()
  for name in ('tokens', 'positions', 'end', 'predictor', 'action_mask',
               'path_mask', 'behaviour_log_probs', 'advantages', 'weights',
               'allowed'):
    assert not getattr(rows, name)[padding].any(), name


@pytest.mark.parametrize('seed', SEEDS)
def test_every_action_token_is_trained_once(seed):
  tree, credit, rows = make(seed)
  trained = np.sort(rows.source[rows.action_mask])
  np.testing.assert_array_equal(trained, np.flatnonzero(tree.action_mask))
  for name, values in (('advantages', credit.advantages),
                       ('weights', credit.weights),
                       ('behaviour_log_probs', tree.behaviour_log_probs)):
    back = packing.unpack(getattr(rows, name), rows, tree.tokens.shape)
    np.testing.assert_array_equal(back, values, err_msg=name)
  assert rows.allowed.dtype == np.uint32
  index = rows.source[rows.token_mask]
  words = tree.allowed.reshape(-1, tree.allowed.shape[-1])
  np.testing.assert_array_equal(rows.allowed[rows.token_mask], words[index])


@pytest.mark.parametrize('seed', SEEDS)
def test_the_path_mask_has_what_other_rows_train(seed):
  tree, _, rows = make(seed)
  index = rows.source[rows.token_mask]
  for name, values in (('path_mask', tree.action_mask),
                       ('behaviour_log_probs', tree.behaviour_log_probs)):
    np.testing.assert_array_equal(
        getattr(rows, name)[rows.token_mask], values.ravel()[index])
  assert (rows.path_mask & ~rows.action_mask).any()
  assert not (rows.action_mask & ~rows.path_mask).any()


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
  with pytest.raises(ValueError, match=rf'{name}: expected the shape .*\(2,\)'):
    packing.pack(tree, credit, **{name: np.zeros(2)})
  with pytest.raises(ValueError, match='advantages: expected the shape'):
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
  for size in (length - 1, 1, 0):
    with pytest.raises(ValueError, match=f'row_length = {size} tokens'):
      packing.pack(tree, credit, size)


def test_an_action_that_nothing_precedes_is_refused():
  builder = trees.TreeBuilder()
  root = builder.add(types.NO_PARENT, [])
  builder.add(root, [3], action_mask=[True], behaviour_log_probs=[-1.0])
  tree = trees.stack([builder])
  with pytest.raises(ValueError, match='prompt'):
    packing.pack(tree, tiny.random_credit(tree, 0))


def log_probs_of(rows, temperature=1.0, seed=0):
  network = tiny.model()
  function = jax.jit(packing.token_log_probs, static_argnums=0)
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
  outputs = jax.jit(packing.token_outputs, static_argnums=0)(
      network, params, rows, 0.7)
  values = jax.jit(packing.token_values, static_argnums=0)(
      network, params, rows)
  np.testing.assert_allclose(values, outputs.values, atol=1e-6)
  assert not np.asarray(values)[~rows.path_mask].any()
  assert np.ptp(np.asarray(values)[rows.path_mask]) > 0.1
  # Nothing of the token itself, nor of what comes after it.
  row, place = np.argwhere(rows.action_mask)[-1]
  tokens = rows.tokens.copy()
  tokens[row, place:] = (tokens[row, place:] + 1) % 64
  changed = jax.jit(packing.token_values, static_argnums=0)(
      network, params, rows._replace(tokens=tokens))
  np.testing.assert_allclose(changed[row, place], values[row, place], atol=1e-6)
  tokens[row, place - 1] = (tokens[row, place - 1] + 1) % 64
  changed = jax.jit(packing.token_values, static_argnums=0)(
      network, params, rows._replace(tokens=tokens))
  assert abs(changed[row, place] - values[row, place]) > 1e-3


def test_without_a_head_there_are_no_values():
  _, _, rows = make(5)
  network = tiny.model()
  params = tiny.params_of(network)
  outputs = jax.jit(packing.token_outputs, static_argnums=0)(
      network, params, rows)
  assert outputs.values is None
  with pytest.raises(ValueError, match='value_head=True, got False'):
    packing.token_values(network, params, rows)


@pytest.mark.parametrize('max_tokens', [1, 64, 100, 10_000])
@pytest.mark.parametrize('bucket', [1, 8])
def test_micro_batches_hold_what_the_rows_train(max_tokens, bucket):
  _, _, rows = make(3)
  batches = packing.micro_batches(rows, max_tokens, bucket)
  join = lambda name: np.concatenate(
      [getattr(b, name)[b.action_mask] for b in batches])
  order = np.argsort(join('source'))
  trained = np.argsort(rows.source[rows.action_mask])
  for name in ('source', 'tokens', 'advantages', 'weights', 'allowed'):
    np.testing.assert_array_equal(
        join(name)[order], getattr(rows, name)[rows.action_mask][trained])
  for batch in batches:
    num_rows, length = batch.tokens.shape
    assert num_rows == 1 or num_rows * length <= max_tokens
    assert num_rows & (num_rows - 1) == 0 and length % bucket == 0
    assert (batch.source[~batch.token_mask] == -1).all()
    # Whole rows: what precedes a trained token is there as well.
    for row in range(num_rows):
      assert batch.token_mask[row, :batch.token_mask[row].sum()].all()


def test_rows_that_train_nothing_are_left_out():
  _, _, rows = make(4)
  mask = rows.action_mask.copy()
  mask[1::2] = False
  batches = packing.micro_batches(rows._replace(action_mask=mask), 10_000)
  kept = sum(batch.token_mask.any(axis=1).sum() for batch in batches)
  assert kept == mask.any(axis=1).sum() < len(mask)
  none = rows._replace(action_mask=np.zeros_like(mask))
  assert not packing.micro_batches(none, 10_000)

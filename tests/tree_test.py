"""tree: views equal to the oracle, a builder that splits, checks that bite."""

import dataclasses

import builders
import jax
import numpy as np
import oracles
import pytest

from bpo_jax import tree as tree_lib
from bpo_jax import walks

_SEEDS = range(10)

_VIEWS = {
    'depth': (tree_lib.depth, lambda node: len(node.path) - 1),
    'num_children': (tree_lib.num_children, lambda node: len(node.children)),
    'is_leaf': (tree_lib.is_leaf, lambda node: not node.children),
    'num_leaves': (tree_lib.num_leaves, lambda node: len(node.leaves)),
    'in_group': (tree_lib.in_group, lambda node: bool(node.siblings)),
    'is_first_child': (
        tree_lib.is_first_child,
        lambda node: bool(node.parent) and node.parent.heir is node),
    'num_tokens': (tree_lib.num_tokens, lambda node: node.length),
    'tokens_above': (
        tree_lib.tokens_above,
        lambda node: sum(n.length for n in node.path[:-1])),
}


@pytest.mark.parametrize('seed', _SEEDS)
@pytest.mark.parametrize('name', _VIEWS)
def test_views(seed, name):
  tree = builders.random_trees(seed)
  view, oracle = _VIEWS[name]
  np.testing.assert_array_equal(
      jax.jit(view)(tree), oracles.per_node(tree, oracle))


@pytest.mark.parametrize('seed', _SEEDS)
def test_index_views(seed):
  tree = builders.random_trees(seed)
  first = np.asarray(tree_lib.first_child(tree))
  action = np.asarray(tree_lib.first_action_index(tree))
  for b, root in enumerate(oracles.roots(tree)):
    for node in oracles.walk(root):
      heir = node.heir.index if node.children else -1
      assert first[b, node.index] == heir
      start = node.mask.index(True) if True in node.mask else -1
      assert action[b, node.index] == start


@pytest.mark.parametrize('seed', _SEEDS)
def test_nearest_above_and_preorder(seed):
  tree = builders.random_trees(seed)
  marked = np.random.default_rng(seed).random(tree.parents.shape) < 0.3
  marked &= tree.node_mask
  nearest = np.asarray(walks.nearest_above(marked, tree.parents))
  enter, end = map(np.asarray, walks.preorder(tree.parents, tree.node_mask))
  for b, root in enumerate(oracles.roots(tree)):
    nodes = list(oracles.walk(root))
    for node in nodes:
      above = [n.index for n in node.path if marked[b, n.index]]
      assert nearest[b, node.index] == (above or [-1])[-1]
      below = {n.index for n in nodes if enter[b, node.index]
               <= enter[b, n.index] < end[b, node.index]}
      assert below == {n.index for n in oracles.walk(node)}


def _scaled_sum(ahead, own):
  return own + 0.5 * ahead


@pytest.mark.parametrize('seed', _SEEDS)
def test_accumulate_along_parents_and_first_children(seed):
  tree = builders.random_trees(seed)
  values = np.random.default_rng(seed).normal(size=tree.parents.shape)
  values = np.where(tree.node_mask, values, 0).astype(np.float32)
  down = walks.accumulate_down(_scaled_sum, values, tree.parents)
  back = walks.accumulate_back(_scaled_sum, values, tree_lib.first_child(tree))

  def chain(node, following):
    own = float(values[batch, node.index])
    then = following(node)
    return own + (0.5 * chain(then, following) if then else 0.0)
  for batch, root in enumerate(oracles.roots(tree)):
    for node in oracles.walk(root):
      place = batch, node.index
      np.testing.assert_allclose(
          down[place], chain(node, lambda n: n.parent), rtol=1e-5, atol=1e-6)
      np.testing.assert_allclose(
          back[place], chain(node, lambda n: n.heir if n.children else None),
          rtol=1e-5, atol=1e-6)


def _chain():
  builder = tree_lib.TreeBuilder()
  root = builder.add(-1, [10, 11])
  a = builder.add(root, [1, 2, 3, 4], action_mask=[True, True, False, True],
                  behaviour_log_probs=[-1, -2, np.nan, -4],
                  entropies=[.1, .2, .3, .4], reward=3.0, anchor=7)
  b = builder.add(a, [5], terminal=True, reward=1.0)
  return builder, root, a, b


def test_build_records_what_was_added():
  builder, _, _, _ = _chain()
  tree = builder.build()
  np.testing.assert_array_equal(tree.parents, [-1, 0, 1])
  np.testing.assert_array_equal(
      tree.tokens, [[10, 11, 0, 0], [1, 2, 3, 4], [5, 0, 0, 0]])
  np.testing.assert_array_equal(
      tree.behaviour_log_probs[1], np.float32([-1, -2, 0, -4]))
  np.testing.assert_array_equal(
      tree.entropies[1], np.float32([.1, .2, 0, .4]))
  np.testing.assert_array_equal(tree.rewards, [0, 3, 1])
  np.testing.assert_array_equal(tree.terminal, [False, False, True])
  np.testing.assert_array_equal(tree.anchor, [-1, 7, -1])
  assert tree.allowed is None


@pytest.mark.parametrize('offset', [1, 2, 3])
def test_split_keeps_every_path(offset):
  builder, root, a, b = _chain()
  head = builder.split(a, offset)
  fork = builders.add_action(builder, head, birth=1, terminal=True)
  tree = tree_lib.stack([builder])
  tree.validate()
  index = {name: builder.index(handle) for name, handle in
           dict(root=root, head=head, a=a, b=b, fork=fork).items()}
  parents = tree.parents[0]
  assert parents[index['a']] == parents[index['fork']] == index['head']
  assert parents[index['head']] == index['root']
  assert parents[index['b']] == index['a']
  tokens = [int(t) for name in ('root', 'head', 'a', 'b')
            for t in tree.tokens[0, index[name]][
                tree.token_mask[0, index[name]]]]
  assert tokens == [10, 11, 1, 2, 3, 4, 5]
  assert tree.rewards[0, index['head']] == 0
  assert tree.rewards[0, index['a']] == 3


def test_split_shares_out_the_reward():
  builder, _, a, _ = _chain()
  head = builder.split(a, 2, head_reward=0.5)
  rewards = builder.build().rewards
  assert rewards[builder.index(head)] == 0.5
  assert rewards[builder.index(a)] == 2.5


@pytest.mark.parametrize('offset', [-1, 0, 4])
def test_split_refuses_an_empty_part(offset):
  builder, _, a, _ = _chain()
  with pytest.raises(ValueError, match='0 < offset < 4'):
    builder.split(a, offset)


def test_fork_points_resolve_a_plan_of_one_node():
  builder, root, a, _ = _chain()
  points = builder.fork_points([1, -1, 1, 1], [3, 0, 0, 1])
  assert points[1] == -1 and points[2] == root
  late, early = points[0], points[3]
  tree = builder.build()
  lengths = tree.token_mask.sum(-1)
  np.testing.assert_array_equal(lengths, [2, 1, 2, 1, 1])
  chain = [root, early, late, a]
  assert [builder.index(h) for h in chain] == [0, 1, 2, 3]
  np.testing.assert_array_equal(tree.parents, [-1, 0, 1, 2, 3])


@pytest.mark.parametrize('kwargs, message', [
    (dict(parent=9, tokens=[1]), 'handle from 0 to 2, got 9'),
    (dict(parent=-1, tokens=[1]), 'handle from 0 to 2, got -1'),
    (dict(parent=2, tokens=[1]), 'terminal or truncated'),
    (dict(parent=1, tokens=[1, 2], action_mask=[True]), '2 entries'),
    (dict(parent=1, tokens=[1], action_mask=[True]), 'got None'),
    (dict(parent=1, tokens=[1], action_mask=[True],
          behaviour_log_probs=[np.nan]), 'finite'),
    (dict(parent=1, tokens=[1], reward=np.inf), 'finite'),
    (dict(parent=1, tokens=[1], allowed=np.zeros((2, 1))), r'\[1, W\]'),
])
def test_add_refuses(kwargs, message):
  builder, _, _, _ = _chain()
  with pytest.raises(ValueError, match=message):
    builder.add(**kwargs)


def test_the_root_comes_first():
  with pytest.raises(ValueError, match='NO_PARENT'):
    tree_lib.TreeBuilder().add(0, [1])
  with pytest.raises(ValueError, match='root'):
    tree_lib.TreeBuilder().build()


def test_stack_buckets_and_pads():
  small, large = tree_lib.TreeBuilder(), tree_lib.TreeBuilder()
  small.add(-1, [1])
  large.add(-1, range(9))
  tree = tree_lib.stack([small, large], num_trees=3)
  assert tree.tokens.shape == (3, 8, 16)
  tree.validate()
  assert tree_lib.stack([small, large], bucket=0).tokens.shape == (2, 1, 9)
  exact = tree_lib.stack([small], num_nodes=2, num_tokens=3)
  assert exact.tokens.shape == (1, 2, 3)
  with pytest.raises(ValueError, match='num_tokens: expected at least 9'):
    tree_lib.stack([large], num_tokens=4)
  with pytest.raises(ValueError, match='got none'):
    tree_lib.stack([])


def test_allowed_is_kept_for_actions_and_padded_with_all_tokens():
  """Those of a vocabulary are large, and what is observed was never drawn."""
  everything, builder = 0xFFFFFFFF, tree_lib.TreeBuilder()
  builder.add(-1, [1, 2], allowed=[[1, 0], [2, 5]])
  for num_sets, fields in (
      (2, dict(action_mask=[True, True, False, False],
               allowed=[[8, 0], [16, 1], [7, 7], [9, 9]])),
      (3, dict(action_mask=[False, False, True, False]))):
    builder.add(len(builder) - 1, [3, 4, 5, 6],
                behaviour_log_probs=[-1, -1, -1, -1], **fields)
    tree = tree_lib.stack([builder], num_nodes=4, num_tokens=8)
    tree.validate()
    assert tree.allowed.shape == (1, 4, num_sets, 2)
    np.testing.assert_array_equal(tree.allowed[0, 1, :2], [[8, 0], [16, 1]])
    assert (tree.allowed[0, 2:] == everything).all()
  mask = tree.action_mask.copy()
  mask[0, 1, 3] = True
  with pytest.raises(ValueError, match='no action beyond the 3 tokens'):
    tree.replace(action_mask=mask).validate()


def test_a_part_without_an_action_has_no_sets_that_others_lack():
  builder = tree_lib.TreeBuilder()
  root = builder.add(-1, [1])
  node = builder.add(root, [1, 2, 3], action_mask=[False, False, True],
                     behaviour_log_probs=[0, 0, -1], allowed=[[2], [4], [8]])
  builder.split(node, 2)
  tree = tree_lib.stack([builder])
  tree.validate()
  assert tree.allowed[0, builder.index(node), 0] == 8


def test_sets_of_allowed_tokens_survive_a_split():
  builder = tree_lib.TreeBuilder()
  builder.add(-1, [1])
  node = builder.add(0, [3, 4, 5, 6], action_mask=[True, True, True, False],
                     behaviour_log_probs=[-1, -1, -1, 0],
                     allowed=[[8], [16], [32], [0]])
  head = builder.split(node, 2)
  tree = tree_lib.stack([builder])
  tree.validate()
  sets = tree.allowed[0, :, :, 0]
  assert sets[builder.index(head), :2].tolist() == [8, 16]
  assert sets[builder.index(node), 0] == 32


def _broken(name, index, value):
  """Returns a sound tree with one entry of one field changed."""
  builder, _, _, _ = _chain()
  tree = tree_lib.stack([builder])
  tree.validate()
  field = getattr(tree, name).copy()
  field[index] = value
  return tree.replace(**{name: field})


@pytest.mark.parametrize('name, index, value, message', [
    ('parents', (0, 2), 2, 'below the node\'s own, got 2; .* tree 0, node 2'),
    ('parents', (0, 1), 2, 'below the node\'s own, got 2; .* tree 0, node 1'),
    ('parents', (0, 1), -7, 'index from 0 .* got -7'),
    ('parents', (0, 2), -1, 'root at node 0 alone, got -1; .* node 2'),
    ('parents', (0, 5), 0, 'NO_PARENT on padding, got 0; .* node 5'),
    ('node_mask', (0, 0), False, 'a root at node 0, got -1; .* tree 0'),
    ('node_mask', (0, 1), False, 'NO_PARENT on padding'),
    ('terminal', (0, 1), True, 'no child of a terminal node, got 1; .* node 2'),
    ('truncated', (0, 0), True, 'no child of a truncated node, got 0; .* 1'),
    ('truncated', (0, 2), True, 'False where terminal is True, got True'),
    ('terminal', (0, 5), True, 'terminal: expected False on padding'),
    ('truncated', (0, 5), True, 'truncated: expected False on padding'),
    ('token_mask', (0, 1, 1), False, 'prefix of the node.* token 2, 1 in all'),
    ('token_mask', (0, 5, 0), True, 'padding nodes'),
    ('action_mask', (0, 1, 6), True, 'subset of token_mask, got True'),
    ('tokens', (0, 0, 1), -3, 'tokens: expected 0 or more .* got -3'),
    ('behaviour_log_probs', (0, 1, 0), np.nan, 'tree 0, node 1, token 0'),
    ('behaviour_log_probs', (0, 1, 0), -np.inf, 'finite values .* got -inf'),
    ('behaviour_log_probs', (0, 1, 3), 0.01, 'at most 0 .* got 0.0099'),
    ('behaviour_log_probs', (0, 1, 2), -1, '0 off action tokens, got -1.0'),
    ('behaviour_log_probs', (0, 5, 0), np.nan, '0 off action tokens, got nan'),
    ('entropies', (0, 1, 0), np.inf, 'finite values .* got inf'),
    ('entropies', (0, 1, 3), -0.01, 'at least 0 .* got -0.0099'),
    ('entropies', (0, 1, 2), 0.5, 'entropies: expected 0 off action tokens'),
    ('rewards', (0, 1), np.nan, 'got nan; first at tree 0, node 1, 1 in all'),
    ('rewards', (0, 2), -np.inf, 'finite rewards, got -inf'),
    ('birth', (0, 1), -1, '0 or more, got -1'),
    ('birth', (0, 0), 1, '0 at the root, got 1'),
    ('birth', (0, 1), 1, 'at least that of the parent, got 0; .* node 2'),
    ('anchor', (0, 1), -2, '-1 or more, got -2'),
])
def test_validate_bites(name, index, value, message):
  with pytest.raises(ValueError, match=message) as error:
    _broken(name, index, value).validate()
  assert 'first at tree 0' in str(error.value)


def test_validate_refuses_a_child_of_padding():
  builder, _, a, _ = _chain()
  builder.add(a, [6], terminal=True)
  tree = tree_lib.stack([builder])
  tree.validate()
  hole = tree.replace(
      node_mask=tree.node_mask & (np.arange(8) != 1),
      parents=np.where(np.arange(8) == 1, -1, tree.parents))
  with pytest.raises(ValueError, match='real node, not padding, got 1; .* 2'):
    hole.validate()


@pytest.mark.parametrize('token, words, is_sound', [
    (5, [1 << 5, 0], True), (5, [~(1 << 5) & 0xFFFFFFFF, 0xFFFFFFFF], False),
    (37, [0, 1 << 5], True), (37, [1 << 5, 0], False),
    (64, [0xFFFFFFFF, 0xFFFFFFFF], False),
])
def test_validate_compares_draws_with_what_was_allowed(token, words, is_sound):
  builder = tree_lib.TreeBuilder()
  builder.add(-1, [1])
  builder.add(0, [3, token], action_mask=[False, True], allowed=[[0, 0], words],
              behaviour_log_probs=[0, -1])
  tree = tree_lib.stack([builder])
  if is_sound:
    tree.validate()
    return
  with pytest.raises(ValueError, match=f'of `allowed` .* got {token}; '):
    tree.validate()


def test_validate_forgives_the_rounding_of_a_softmax():
  tree = _broken('behaviour_log_probs', (0, 1, 0), 1e-7)
  entropies = tree.entropies.copy()
  entropies[0, 1, 0] = -1e-7
  tree.replace(entropies=entropies).validate()


def test_a_handle_is_that_of_its_index():
  builder, _, a, _ = _chain()
  builder.split(a, 2)
  for index in range(4):
    assert builder.index(builder.handle(index)) == index
  assert builder.handle(2) == a
  for index in (-1, 4):
    with pytest.raises(ValueError, match=f'0 to 3, got {index}'):
      builder.handle(index)


@pytest.mark.parametrize('shape', [(0, 4, 4), (2, 0, 4), (2, 4, 0)])
def test_a_batch_of_nothing_is_refused(shape):
  tree = tree_lib.empty(shape)
  for check in (tree.validate, lambda: tree_lib.check_batch(tree),
                lambda: tree_lib.depth(tree), lambda: tree_lib.is_leaf(tree),
                lambda: tree_lib.first_child(tree),
                lambda: tree_lib.tokens_above(tree)):
    with pytest.raises(ValueError, match=r'at least one tree.*\([0-9, ]*0'):
      check()
  tree_lib.empty((1, 1, 1)).validate()  # Padding alone is a batch.


def test_validate_checks_shapes_and_dtypes():
  tree = builders.random_trees(0)
  with pytest.raises(ValueError, match='rewards: expected dtype float32'):
    tree.replace(rewards=tree.rewards.astype(np.float64)).validate()
  with pytest.raises(ValueError, match='birth: expected shape'):
    tree.replace(birth=tree.birth[:, :-1]).validate()
  with pytest.raises(ValueError, match=r'\[B, N, T\]'):
    tree.replace(tokens=tree.tokens[0]).validate()


def test_siblings_share_no_list():
  builder, tokens = tree_lib.TreeBuilder(), np.array([1, 2])
  root = builder.add(-1, tokens)
  builder.add(root, tokens)
  tokens[:] = 9
  built = builder.build()
  built.tokens[0] = 8
  np.testing.assert_array_equal(builder.build().tokens, [[1, 2], [1, 2]])


@pytest.mark.parametrize('field', sorted(
    f.name for f in dataclasses.fields(tree_lib.Tree)))
@pytest.mark.parametrize('bad', [None, 0, [[1]]])
def test_a_field_that_is_no_array_is_refused(field, bad):
  if field == 'allowed' and bad is None:
    pytest.skip('allowed may be None')
  tree = builders.random_trees(0).replace(**{field: bad})
  with pytest.raises(ValueError, match=f'^{field}: expected an array'):
    tree.validate()


def test_allowed_sets_of_no_word_are_refused():
  tree = builders.random_trees(0)
  empty = np.zeros((*tree.tokens.shape, 0), np.uint32)
  with pytest.raises(ValueError, match='allowed: expected shape .* one word'):
    tree.replace(allowed=empty).validate()


def test_log_probs_that_nothing_drawn_can_have_are_refused():
  tree = builders.random_trees(0)
  absurd = np.where(tree.action_mask, -3e38, 0).astype(np.float32)
  with pytest.raises(ValueError, match='log_probs: expected at least'):
    tree.replace(behaviour_log_probs=absurd).validate()

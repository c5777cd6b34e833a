"""golden: a grafted trajectory is one more path, and nothing else moves."""

import builders
import numpy as np
import pytest

from bpo_jax import golden
from bpo_jax import tree as tree_lib


def _chain(prompt, length, reward=1.0):
  builder = tree_lib.TreeBuilder()
  node = builder.add(-1, prompt)
  for step in range(length):
    node = builders.add_action(
        builder, node, num_tokens=step + 1, terminal=step == length - 1,
        reward=reward * (step == length - 1))
  return tree_lib.stack([builder])


def _prompt(tree, b):
  return tree.tokens[b, 0][tree.token_mask[b, 0]]


@pytest.mark.parametrize('seed', range(5))
@pytest.mark.parametrize('length', [1, 3, 12])
def test_a_graft_is_one_more_path(seed, length):
  tree = builders.random_trees(seed)
  chains = [None, _chain(_prompt(tree, 1), length), None]
  grown, mask = golden.graft(tree, chains)
  grown.validate()
  assert mask.sum() == length and mask[1].sum() == length
  assert not (mask & ~grown.node_mask).any()
  children = np.flatnonzero(mask[1] & (grown.parents[1] == 0))
  assert len(children) == 1
  leaf = np.flatnonzero(mask[1])[-1]
  assert grown.terminal[1, leaf] and grown.rewards[1, leaf] == 1
  assert grown.action_mask[mask].sum() == length * (length + 1) // 2
  # The rollouts stand where they stood.
  b, n, t = tree.tokens.shape
  np.testing.assert_array_equal(
      np.where(mask[:, :n], -1, grown.parents[:b, :n]), tree.parents)
  np.testing.assert_array_equal(
      grown.tokens[:, :n, :t][~mask[:, :n]], tree.tokens[~mask[:, :n]])


def test_nothing_to_graft_changes_nothing():
  tree = builders.random_trees(0)
  grown, mask = golden.graft(tree, [None] * 3)
  assert not mask.any()
  assert grown.node_mask.sum() == tree.node_mask.sum()


def test_teacher_forcing_touches_golden_actions_alone():
  tree = builders.random_trees(1)
  grown, mask = golden.graft(tree, [_chain(_prompt(tree, 0), 4), None, None])
  forced = golden.teacher_forced(
      grown, mask, np.full(grown.tokens.shape, -7, np.float32))
  changed = forced.behaviour_log_probs != grown.behaviour_log_probs
  np.testing.assert_array_equal(
      changed, mask[..., None] & grown.action_mask)


def test_another_prompt_and_a_wrong_count_are_errors():
  tree = builders.random_trees(2)
  with pytest.raises(ValueError, match='prompt of tree 1'):
    golden.graft(tree, [None, _chain([99, 98], 2), None])
  with pytest.raises(ValueError, match='expected 3, one a tree'):
    golden.graft(tree, [None])


def test_what_is_no_chain_is_refused():
  tree = builders.random_trees(0)
  with pytest.raises(ValueError, match='a Tree or None for tree 0, got int'):
    golden.graft(tree, [5, None, None])
  words = lambda x, n: x.replace(
      allowed=np.full((*x.tokens.shape, n), 0xFFFFFFFF, np.uint32))
  chain = builders.chains([[1.0]])
  tree = builders.chains([[1.0, 0.0]])
  with pytest.raises(ValueError, match='of 2 words, .*got 1'):
    golden.graft(words(tree, 2), [words(chain, 1)])

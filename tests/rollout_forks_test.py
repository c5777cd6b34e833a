"""Forks inside an action: what they keep, replay, record and cost."""

import collections

import jax
import numpy as np
import pytest
import rollout_test
import tiny_agents as tiny

from bpo_jax import tree as trees
from bpo_jax import types

MAX_TURNS = 6


def inside_plan(seed, points, max_forks, birth):
  """A branch policy: random action tokens of one stage, forked a few times.

  Most points lie inside an action. Its attribute `seen` keeps the trees
  and the plan.
  """
  def policy(tree):
    rng = np.random.default_rng(seed)
    shape = (len(tree.parents), points)
    node, offset, count = np.full(shape, -1), np.zeros(shape, int), np.zeros(
        shape, int)
    for b in range(shape[0]):
      real = tree.action_mask[b] & (tree.birth[b] == birth)[:, None]
      where = np.argwhere(real)
      chance = np.where(where[:, 1] > 0, 9.0, 1.0)
      picks = rng.choice(len(where), min(points, len(where)), replace=False,
                         p=chance / chance.sum())
      node[b, :len(picks)], offset[b, :len(picks)] = where[picks].T
      count[b, :len(picks)] = rng.integers(1, max_forks + 1, len(picks))
    # One point twice: its forks are siblings.
    node[:, -1], offset[:, -1], count[:, -1] = node[:, 0], offset[:, 0], 1
    plan = types.BranchPlan(node=node, offset=offset, count=count)
    policy.seen = tree, plan
    return plan
  return policy


@pytest.fixture(
    scope='module',
    params=[(True, 0.6), (False, 1.7)],
    ids=['constrained', 'free'],
)
def grown_inside(request):
  """Household trees forked inside actions, in three stages."""
  constrained, temperature = request.param
  agent = tiny.household(
      MAX_TURNS, constrained=constrained, temperature=temperature)
  agent.grower.debug = True
  params = tiny.params_of(agent.model)
  tasks = agent.environment.tasks('train')[4:6]  # Long commands.
  branch = [inside_plan(0, 6, 2, birth=0), inside_plan(1, 5, 2, birth=1),
            inside_plan(2, 6, 2, birth=0)]
  result = agent.grower.grow(
      params, tasks, jax.random.key(0), num_backbones=2, branch=branch)
  yield agent, params, tasks, branch, result
  agent.close()


def kept_by_forks(branch, b):
  """Yields (stage, tokens kept, whether they end inside an action, count)."""
  for stage, policy in enumerate(branch, start=1):
    before, plan = policy.seen
    for node, offset, count in zip(
        plan.node[b], plan.offset[b], plan.count[b]):
      above = tiny.path_tokens(before, b, before.parents[b, node])
      kept = above + before.tokens[b, node, :offset].tolist()
      yield stage, tuple(kept), offset > 0, int(count)


def heads(tree, branch, b):
  """Returns the nodes of tree b that end inside an action."""
  inside = {kept for _, kept, is_inside, _ in kept_by_forks(branch, b)
            if is_inside}
  return {node for node in np.flatnonzero(tree.node_mask[b]).tolist()
          if tuple(tiny.path_tokens(tree, b, node)) in inside}


def unsplit(tree, b, leaf, inside):
  """Returns a path as a tree of its own, one node for every whole action."""
  builder = trees.TreeBuilder()
  last, begun = types.NO_PARENT, []
  for node in tiny.path(tree, b, leaf):
    begun.append(node)
    if node in inside:
      assert tree.rewards[b, node] == 0
      continue
    field = lambda name: np.concatenate([
        getattr(tree, name)[b, n][tree.token_mask[b, n]] for n in begun])
    last = builder.add(
        last, field('tokens'), action_mask=field('action_mask'),
        behaviour_log_probs=field('behaviour_log_probs'),
        reward=tree.rewards[b, node], terminal=tree.terminal[b, node],
        truncated=tree.truncated[b, node])
    begun = []
  assert not begun
  return trees.stack([builder])


def test_forks_keep_what_stands_before_them(grown_inside):
  *_, branch, result = grown_inside
  tree = result.tree
  num_inside = 0
  for b in range(2):
    expected = collections.Counter()
    for stage, kept, is_inside, count in kept_by_forks(branch, b):
      expected[stage, kept] += count
      num_inside += count * is_inside
    births, parents = tree.birth[b], tree.parents[b]
    starts = np.flatnonzero((births > 0) & (births != births[parents]))
    assert expected == collections.Counter(
        (int(births[n]), tuple(tiny.path_tokens(tree, b, parents[n])))
        for n in starts)
  assert num_inside > 20


def test_a_split_keeps_every_path(grown_inside):
  *_, branch, result = grown_inside
  for policy in branch:
    before, _ = policy.seen
    for b in range(2):
      paths, later = (
          {tuple(tiny.path_tokens(t, b, leaf)) for leaf in tiny.leaves(t, b)}
          for t in (before, result.tree))
      assert paths <= later


def test_forks_inside_an_action_replay_from_the_reset(grown_inside):
  agent, _, tasks, branch, result = grown_inside
  tree = result.tree
  num_leaves = 0
  for b, task in enumerate(tasks):
    inside = heads(tree, branch, b)
    for leaf in tiny.leaves(tree, b):
      path = unsplit(tree, b, leaf, inside)
      tiny.replay(path, 0, task, agent.environment, agent.batched.codec,
                  MAX_TURNS)
      num_leaves += 1
  planned = sum(policy.seen[1].count.sum() for policy in branch)
  assert num_leaves == 4 + planned


def test_a_fork_inside_an_action_steps_once(grown_inside):
  *_, branch, result = grown_inside
  tree = result.tree
  num_heads = sum(len(heads(tree, branch, b)) for b in range(2))
  assert num_heads > 15
  num_actions = tree.node_mask.sum() - len(tree.parents) - num_heads
  assert result.compute.environment_steps == num_actions
  assert result.compute.generated_tokens == tree.action_mask.sum()
  assert sum(result.statuses.values()) == result.compute.environment_steps


def test_learner_computes_what_forks_inside_an_action_recorded(grown_inside):
  agent, params, _, _, result = grown_inside
  rollout_test.learner_computes_what_was_recorded(
      agent, params, result.tree, range(4))
  assert tiny.num_held(agent.grower) == 0

"""What a score says of the episodes that were played."""

import json

import jax
import numpy as np
import pytest
import tiny_agents as tiny
import toy_environments as toys

from bpo_jax import metrics
from bpo_jax import tree as trees
from experiments import scoring

TASKS = [f'train/{i}' for i in range(4)]
TYPES = ['short', 'short', 'long', 'long']


@pytest.fixture(scope='module')
def grower():
  return tiny.corridor(max_turns=6)


@pytest.fixture(scope='module')
def params():
  return tiny.params_of(tiny.model(96))


def evaluate(grower, params, seed=0, tasks=TASKS, **kwargs):
  types = TYPES[:len(tasks)]
  return scoring.evaluate(
      grower, params, tasks, types, jax.random.key(seed), **kwargs)


def chains(lengths):
  """Trees of chains that grow in turn, as rows of a batch do.

  The last node of chain k of tree b has the reward 10 b + k.
  """
  builders = []
  for b, of_tree in enumerate(lengths):
    builder = trees.TreeBuilder()
    ends = [builder.add(-1, [1])] * len(of_tree)
    for turn in range(max(of_tree)):
      for k, length in enumerate(of_tree):
        if turn < length:
          last = turn == length - 1
          ends[k] = builder.add(
              ends[k], [2], reward=(10 * b + k) * last, terminal=last)
    builders.append(builder)
  return trees.stack(builders)


def test_returns_and_turns_are_those_of_each_chain():
  lengths = [[3, 1, 2], [1, 4, 4]]
  returns, turns = scoring.returns_and_turns(chains(lengths))
  assert turns.tolist() == lengths
  assert returns.tolist() == [[0, 1, 2], [10, 11, 12]]


def test_a_score_is_of_the_episodes(grower, params, monkeypatch):
  grown = []
  grow = grower.grow

  def watched(*args, **kwargs):
    grown.append(grow(*args, **kwargs))
    return grown[-1]
  monkeypatch.setattr(grower, 'grow', watched)
  score = evaluate(grower, params, passes=4)
  tree = grown[0].tree
  won, turns = [], []
  for b in range(4):
    paths = [tiny.path(tree, b, leaf) for leaf in tiny.leaves(tree, b)]
    won.append([tree.rewards[b, path].sum() > 0.5 for path in paths])
    turns += [len(path) - 1 for path in paths]
  won = np.array(won)
  assert won.shape == (4, 4)
  assert 0 < won.sum() < 16
  assert score.success == won.mean()
  assert score.turns == np.mean(turns)
  assert score.by_type == {
      'long': (won[2:].mean(), 2), 'short': (won[:2].mean(), 2)}
  assert score.interval == metrics.clustered_interval(won)
  assert score.interval[0] < score.success < score.interval[1]
  np.testing.assert_allclose(score.returns, won.mean(axis=1))
  assert (score.num_tasks, score.passes) == (4, 4)
  assert tiny.num_held(grower) == 0


def test_batches_play_every_task_in_order(grower, params, monkeypatch):
  monkeypatch.setattr(scoring, '_BATCH', 3)
  told, played = [], []
  grow = grower.grow

  def watched(params, tasks, *args, **kwargs):
    played.append(list(tasks))
    return grow(params, tasks, *args, **kwargs)
  monkeypatch.setattr(grower, 'grow', watched)
  score = evaluate(grower, params, progress=lambda *x: told.append(x))
  assert played == [TASKS[:3], TASKS[3:]]
  assert told == [(3, 4), (4, 4)]
  assert score.returns.shape == (4,)


def test_equal_keys_give_equal_scores(grower, params):
  first, second = evaluate(grower, params), evaluate(grower, params)
  assert scoring.to_dict(first) == scoring.to_dict(second)
  scores = {str(scoring.to_dict(evaluate(grower, params, seed, passes=4)))
            for seed in range(3)}
  assert len(scores) > 1


def test_greedy_evaluation_needs_no_key(grower, params):
  scores = [scoring.to_dict(evaluate(grower, params, seed, greedy=True))
            for seed in range(3)]
  assert scores[0] == scores[1] == scores[2]
  passes = evaluate(grower, params, 3, greedy=True, passes=2)
  assert scoring.to_dict(passes)['returns'] == scores[0]['returns']


def test_without_tasks_there_is_no_score(grower, params):
  with pytest.raises(ValueError, match='at least one task'):
    evaluate(grower, params, tasks=[])


@pytest.mark.parametrize('size', [1, 7, 40])
def test_spread_covers_the_split_evenly(size):
  tasks = [f'task {i:02}' for i in range(size)]
  assert scoring.spread(tasks, None) == tasks
  for count in range(1, size + 3):
    chosen = scoring.spread(tasks, count)
    assert len(set(chosen)) == len(chosen) == min(count, size)
    assert list(chosen) == sorted(chosen)
    places = np.array([tasks.index(task) for task in chosen] + [size])
    gaps = np.diff(places)
    assert places[0] == 0 and gaps.max() - gaps.min() <= 1


def test_task_types_are_told_and_states_released():
  agent = tiny.household()
  tasks = agent.environment.tasks('valid_seen')[:4]
  types = scoring.task_types(agent.environment, tasks)
  for task, kind in zip(tasks, types):
    assert kind == agent.environment.reset(task)[1].info['task_type']
  agent.close()
  corridor = toys.Corridor()
  assert scoring.task_types(corridor, TASKS) == ['all'] * 4
  assert corridor.num_live == 0


def test_a_score_can_be_read_and_kept(grower, params):
  score = evaluate(grower, params, passes=2)
  assert json.loads(json.dumps(scoring.to_dict(score)))['num_tasks'] == 4
  assert f'{100 * score.success:.1f}%' in str(score)
  assert '4 tasks x 2' in str(score)
  table = scoring.comparison({'before': score, 'after': score})
  lines = table.splitlines()
  assert 'short (2)' in lines[0] and 'long (2)' in lines[0]
  assert sum(f'{100 * score.success:.1f}' in line for line in lines) == 2

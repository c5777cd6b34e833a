"""The scripted searcher: sees no more than an agent, and wins all the same."""

import dataclasses

import numpy as np
import pytest

from environments import base
from environments.alfworld import environment as environment_lib
from environments.alfworld import expert as expert_lib
from environments.alfworld import household


@pytest.fixture(scope='module')
def made():
  return household.HouseholdEnvironment(num_valid=60)


@pytest.fixture(scope='module')
def likelihoods(made):
  return _fit(made)


def _fit(environment):
  return expert_lib.fit(
      environment.game(task.id) for task in environment.tasks('train')[:150])


def _play_all(environment, split, expert, seed=0):
  """Returns the share of games won and the mean number of turns."""
  rng = np.random.default_rng(seed)
  episodes = [expert.play(environment, task, rng)
              for task in environment.tasks(split)]
  return (np.mean([last.reward for _, last in episodes]),
          np.mean([len(turns) for turns, _ in episodes]))


class _Uninformed:
  """An environment whose TimeSteps carry nothing but what agents may see."""

  def __init__(self, inner):
    self._inner = inner
    self.release = inner.release

  def reset(self, task, seed=0):
    state, timestep = self._inner.reset(task, seed)
    return state, dataclasses.replace(timestep, info={})

  def step(self, state, action):
    assert action in self._available(state)
    state, timestep = self._inner.step(state, action)
    return state, dataclasses.replace(timestep, info={})

  def _available(self, state):
    return self._inner.step(state, 'look')[1].available


@pytest.mark.parametrize('split', ['valid_seen', 'valid_unseen'])
@pytest.mark.parametrize('noise, least', [(0.0, 0.99), (0.1, 0.95)])
def test_wins_generated_games(made, likelihoods, split, noise, least):
  won, turns = _play_all(made, split, expert_lib.Expert(likelihoods, noise))
  assert won >= least
  assert 5 < turns < 12


def test_knowing_where_things_lie_saves_turns():
  # In rooms large enough that there is something to search.
  large = household.HouseholdEnvironment(
      num_receptacles=(10, 14), num_objects=(12, 25), num_valid=60)
  knowing, ignorant = (
      expert_lib.Expert(known, noise=0.0)
      for known in (_fit(large), expert_lib.Likelihoods({})))
  assert (_play_all(large, 'valid_seen', knowing)[1] + 1
          < _play_all(large, 'valid_seen', ignorant)[1])


def test_noise_costs_turns(made, likelihoods):
  turns = [_play_all(made, 'valid_seen', expert_lib.Expert(likelihoods, n))[1]
           for n in (0.0, 0.2, 0.4)]
  assert turns[0] < turns[1] < turns[2]


@pytest.mark.parametrize('noise', [0.0, 0.5])
def test_reads_no_info_and_says_only_what_is_admissible(
    made, likelihoods, noise):
  expert = expert_lib.Expert(likelihoods, noise)
  blind = _Uninformed(made)
  for task in made.tasks('valid_seen')[:15]:
    turns, last = expert.play(blind, task, np.random.default_rng(1))
    same, also = expert.play(made, task, np.random.default_rng(1))
    assert [c for _, c in turns] == [c for _, c in same]
    assert last.reward == also.reward


def test_equal_seeds_play_alike(made, likelihoods):
  expert = expert_lib.Expert(likelihoods, 0.3)
  commands = [[c for _, c in expert.play(
      made, 'valid_seen/000003', np.random.default_rng(seed))[0]]
      for seed in (2, 2, 3)]
  assert commands[0] == commands[1] != commands[2]


def test_takes_over_from_any_policy(made, likelihoods):
  rng = np.random.default_rng(4)
  won = 0
  tasks = made.tasks('valid_unseen')[:30]
  for task in tasks:
    state, timestep = made.reset(task)
    memory = expert_lib.start(timestep)
    for turn in range(100):
      if timestep.done:
        break
      command = (rng.choice(timestep.available) if turn < 15 else
                 expert_lib.act(memory, timestep, likelihoods, rng))
      state, timestep = made.step(state, str(command))
      memory = expert_lib.observe(memory, str(command), timestep)
    won += timestep.terminal
  assert won >= 0.95 * len(tasks)


def test_what_is_not_understood_teaches_nothing(made):
  state, timestep = made.reset('train/000000')
  memory = expert_lib.start(timestep)
  _, after = made.step(state, 'take unicorn 1 from cloud 9')
  assert after.status == base.Status.INVALID_ACTION
  assert expert_lib.observe(
      memory, 'take unicorn 1 from cloud 9', after) == memory


def test_rates_are_objects_per_receptacle(made):
  game = made.game('train/000001')
  rates = expert_lib.fit([game]).rates
  for kind, row in rates.items():
    for place, rate in row.items():
      holders = [game.initial.contents[r]
                 for r in game.receptacles_by_type[place]]
      count = sum(game.objects[t].type == kind for c in holders for t in c)
      assert rate == pytest.approx(count / len(holders))
  unseen = expert_lib.fit([game]).rate('unicorn', 'desk')
  assert 0 < unseen < 0.01


def test_wrong_arguments_are_refused():
  with pytest.raises(ValueError, match='at least one game'):
    expert_lib.fit([])
  with pytest.raises(ValueError, match='noise within 0 and 1'):
    expert_lib.Expert(expert_lib.Likelihoods({}), noise=1.5)


def test_wins_real_games(alfworld_games):
  real = environment_lib.AlfworldEnvironment(alfworld_games)
  counted = expert_lib.fit(
      real.game(task_id) for task_id in real.tasks('train').ids[::30])
  won, turns = _play_all(real, 'valid_unseen', expert_lib.Expert(counted))
  assert won >= 0.94
  assert turns < 12

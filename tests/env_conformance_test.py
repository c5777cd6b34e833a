"""The laws hold where they should, and fall on every way to break them."""

import random
import unittest

import pytest
import toy_environments as toys

import environments
from environments import base
from environments import conformance
from environments.alfworld import household


class TestCorridor(conformance.EnvironmentLaws):

  def make_environment(self):
    return toys.Corridor()


class TestCorridorOtherSeed(TestCorridor):
  seed = 5


def test_report_of_a_lawful_environment():
  environment = toys.Corridor()
  report = conformance.check(environment)
  assert report == dict.fromkeys(conformance.LAWS, 'ok')
  assert environment.closed and environment.num_live == 0


class _Guide:
  """Proposes along the walkthrough of the game that was reset last.

  A random walk hardly ever wins, so nothing would be known about endings.
  """

  def __init__(self, environment):
    self._environment, self._reset = environment, environment.reset
    environment.reset = self._watch
    self._plan = []

  def _watch(self, task, seed=0):
    following = self._reset(task, seed)
    task_id = task if isinstance(task, str) else task.id
    self._plan = list(self._environment.game(task_id).walkthrough)
    return following

  def propose(self, timestep, rng):
    if self._plan and self._plan[0] in timestep.available:
      return self._plan.pop(0)
    return rng.choice(timestep.available)


class TestHousehold(conformance.EnvironmentLaws):

  def make_environment(self):
    made = household.HouseholdEnvironment(num_train=40, num_valid=20)
    self.propose = _Guide(made).propose
    return made


@pytest.mark.parametrize('name', ['household', 'alfworld'])
def test_report_of_games(name, request):
  options = {}
  if name == 'alfworld':
    options['data'] = request.getfixturevalue('alfworld_games')
  made = environments.make(name, **options)
  report = conformance.check(made, propose=_Guide(made).propose)
  assert report == dict.fromkeys(conformance.LAWS, 'ok')


def test_a_huge_split_is_not_listed_to_its_end():

  class Huge(toys.Corridor):
    made = 0

    def tasks(self, split):
      outer = self

      class Tasks:
        def __len__(self):
          return 10**6

        def __getitem__(self, index):
          if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
          outer.made += 1
          return base.Task(f'{split}/{index}', split, 'open the door')

        def __iter__(self):
          pytest.fail('listed to its end')

      return Tasks()

    def task(self, task_id):
      return base.Task(task_id, task_id.partition('/')[0], 'open the door')

  environment = Huge()
  conformance.check_tasks(environment)
  assert environment.made < 1000


@pytest.mark.parametrize('broken, law', [
    (toys.ListingTwice, 'tasks'),
    (toys.Shuffling, 'tasks'),
    (toys.Obliging, 'unknown_names'),
    (toys.OneWorld, 'resets'),
    (toys.EndingTwice, 'timesteps'),
    (toys.Priceless, 'timesteps'),
    (toys.Unsorted, 'timesteps'),
    (toys.Boasting, 'admissible'),
    (toys.Raising, 'unknown_action'),
    (toys.Killing, 'unknown_action'),
    (toys.Mutating, 'pure_step'),
    (toys.Remembering, 'pure_step'),
    (toys.SharedSiblings, 'siblings'),
    (toys.Mutating, 'siblings'),
    (toys.Restless, 'replay'),
    (toys.Restless, 'eviction'),
    (toys.OneWorld, 'eviction'),
    (toys.Undying, 'endings'),
    (toys.Leaking, 'release'),
    (toys.PullingDown, 'release'),
    (toys.ClosingOnce, 'close'),
])
@pytest.mark.parametrize('seed', range(3))
def test_every_fault_breaks_its_law(broken, law, seed):
  with pytest.raises(conformance.LawBroken) as error:
    conformance.LAWS[law](broken(), random.Random(seed))
  assert error.value.law == law
  assert conformance.check(broken(), seed)[law].startswith('broken: ')


def test_every_law_can_be_broken():
  marks = test_every_fault_breaks_its_law.pytestmark
  broken = {law for mark in marks if mark.args[0] == 'broken, law'
            for _, law in mark.args[1]}
  assert broken == set(conformance.LAWS)


def test_mixin_has_a_test_per_law():
  tests = {name for name in vars(conformance.EnvironmentLaws)
           if name.startswith('test_')}
  assert tests == {f'test_{law}' for law in conformance.LAWS}


def test_what_cannot_be_tested_is_told_apart_from_what_holds():

  class Modest(toys.Restless):
    capabilities = base.Capabilities(deterministic=False)

  report = conformance.check(Modest())
  unchecked = {law for law, said in report.items() if said != 'ok'}
  assert unchecked == {'admissible', 'unknown_action', 'pure_step', 'siblings',
                       'replay', 'eviction'}
  assert all(report[law].startswith('unchecked: ') for law in unchecked)


def test_free_form_actions_need_a_propose():

  class Silent(toys.Corridor):
    capabilities = base.Capabilities()

    def _enter(self, state, told):
      self.num_live += 1
      return state, base.TimeStep(told)

  with pytest.raises(conformance.Unchecked, match='propose'):
    conformance.check_replay(Silent())
  conformance.check_replay(
      Silent(), random.Random(0), lambda timestep, rng: 'go right')


def test_mixin_skips_what_it_cannot_check():

  class Laws(conformance.EnvironmentLaws):

    def make_environment(self):
      environment = toys.Corridor()
      environment.capabilities = base.Capabilities(deterministic=False)
      return environment

  with pytest.raises(unittest.SkipTest, match='deterministic'):
    Laws().test_replay()

"""Generated games: winnable, split by layout, and planned shortest."""

import collections
import dataclasses
import hashlib
import random

import pytest

import environments
from environments.alfworld import domain
from environments.alfworld import engine
from environments.alfworld import game as game_lib
from environments.alfworld import goals
from environments.alfworld import household
from environments.alfworld import household_games
from environments.alfworld import household_layout
from environments.alfworld import household_rooms
from environments.alfworld import household_text
from environments.alfworld import planner
from environments.alfworld import terse

_SPLITS = household_layout.SPLITS
_SIZES = household_games.Sizes()


def _scenes(split, count, seed=0, sizes=_SIZES):
  return [household_games.draw(random.Random(f'{seed} {split} {i}'), split,
                               sizes) for i in range(count)]


def _play(game, commands):
  """Returns the last state; every command must be admissible."""
  state = engine.initial(game)
  for command in commands:
    assert not engine.won(game, state)
    assert command in engine.admissible(game, state)
    state, _ = engine.step(game, state, command)
  return state


def _matters(state):
  """The state without what no goal and no admissible command depends on."""
  return state._replace(
      places=frozenset(), taken=frozenset(), sliced=frozenset())


def _search(game, max_states):
  """Length of a shortest win by trying everything; None if it gives up."""
  seen = {_matters(engine.initial(game))}
  queue = collections.deque([(engine.initial(game), 0)])
  while queue:
    state, depth = queue.popleft()
    if engine.won(game, state):
      return depth
    for command in engine.admissible(game, state):
      after, _ = engine.step(game, state, command)
      key = _matters(after)
      if key not in seen:
        seen.add(key)
        queue.append((after, depth + 1))
    if len(seen) > max_states:
      return None
  raise AssertionError('the game cannot be won')


def test_make_gives_the_embedded_default():
  made = environments.make('household')
  assert isinstance(made, household.HouseholdEnvironment)
  assert made.splits() == _SPLITS
  assert [len(made.tasks(split)) for split in _SPLITS] == [100_000, 200, 200]


def test_domain_states_the_rules_of_the_engine():
  domain.check(household_text.DOMAIN)


def test_data_tables_agree_with_each_other_and_with_the_phrasebook():
  for room, furniture in household_rooms.ROOMS.items():
    assert set(furniture) <= set(household_rooms.HEIGHTS)
    for thing in household_rooms.STOCK[room] + household_rooms.LAMPS[room]:
      places = household_rooms.THINGS[thing].places
      assert set(places) & set(furniture), (room, thing)
  names = {name.lower() for name in household_rooms.HEIGHTS}
  assert names <= set(terse.RECEPTACLES)
  assert {n.lower() for n in household_rooms.THINGS} <= set(terse.OBJECTS)
  for thing in household_rooms.THINGS.values():
    assert set(thing.places) <= set(household_rooms.HEIGHTS)
    assert set(ability.lower() for ability in thing.abilities) <= set(
        domain.PREDICATES)


@pytest.mark.parametrize('split', _SPLITS)
def test_walkthroughs_win_and_nothing_is_won_before(split):
  made = household.HouseholdEnvironment(seed=1)
  kinds = collections.Counter()
  for task in made.tasks(split)[:100]:
    game = made.game(task.id)
    assert engine.won(game, _play(game, game.walkthrough))
    kinds[game.goal.task_type] += 1
  assert set(kinds) == set(goals.TASK_TYPES)


def test_sentences_state_the_goal():
  made = household.HouseholdEnvironment(seed=2)
  kinds = {'put': goals.PICK_AND_PLACE, 'two': goals.PICK_TWO,
           'look': goals.LOOK_IN_LIGHT, 'clean': goals.CLEAN,
           'heat': goals.HEAT, 'cool': goals.COOL}
  for task in made.tasks('train')[:100]:
    _, timestep = made.reset(task)
    said, meant = terse.goal_of(timestep), made.game(task.id).goal
    assert said == terse.parse_goal(task.goal)
    assert kinds[said.kind] == meant.task_type
    assert said.object == meant.object_type
    assert said.place == (meant.receptacle_type or meant.lamp_type)


def test_no_layout_is_shared_between_splits():
  layouts = {split: {scene.layout for seed in range(2)
                     for scene in _scenes(split, 200, seed)}
             for split in _SPLITS}
  for split in _SPLITS:
    assert all(layout.split == split for layout in layouts[split])
    assert len(layouts[split]) > 300
  assert not layouts['train'] & layouts['valid_seen']
  assert not layouts['train'] & layouts['valid_unseen']
  assert not layouts['valid_seen'] & layouts['valid_unseen']


def test_goals_of_valid_unseen_are_never_asked_elsewhere():
  asked = {split: {scene.goal for scene in _scenes(split, 300)}
           for split in _SPLITS}
  assert not asked['valid_unseen'] & (asked['train'] | asked['valid_seen'])
  assert asked['valid_seen'] & asked['train']


def test_hash_of_a_layout_is_the_same_everywhere():
  piece = household_layout.Receptacle('Desk', (4, 1, 1), (200, 75, 50))
  layout = household_layout.Layout('bedroom', (piece,))
  digest = hashlib.sha256(
      b"Layout(room='bedroom', receptacles=(Receptacle(type='Desk', "
      b"cell=(4, 1, 1), position=(200, 75, 50)),))").hexdigest()
  share = int(digest[:16], 16) / 2 ** 64
  assert household_layout.hash_share(layout) == share


@pytest.mark.parametrize('split', _SPLITS)
def test_sizes_are_kept(split):
  places, counts = set(), set()
  for scene in _scenes(split, 300):
    places.add(len(scene.layout.receptacles))
    counts.add(len(scene.objects))
    spots = [(p.location, p.position) for p in scene.layout.receptacles]
    assert len(spots) == len(set(spots))
  assert places == set(range(5, 11))
  assert min(counts) == 6 and 14 <= max(counts) <= 16


def test_receptacles_may_share_a_location():
  shared = [scene for scene in _scenes('train', 100)
            if len({p.location for p in scene.layout.receptacles})
            < len(scene.layout.receptacles)]
  assert 20 < len(shared) < 100


@pytest.mark.parametrize('kwargs', [
    {'num_receptacles': (4, 8)}, {'num_receptacles': (9, 8)},
    {'num_objects': (3, 8)}, {'num_objects': (8, 61)}, {'num_train': 0},
    {'num_valid': 10 ** 7}, {'max_games': 0}])
def test_sizes_out_of_bounds_are_refused(kwargs):
  with pytest.raises(ValueError, match='expected|at least'):
    household.HouseholdEnvironment(**kwargs)


@pytest.mark.parametrize('task_id', [
    'train/100000', 'train/1', 'train/-00001', 'train/٠٠٠٠٠١', 'test/000000',
    'valid_seen/000200', '', 'train/000001/x'])
def test_unknown_tasks_are_refused(task_id):
  with pytest.raises(ValueError, match='train/000000 to train/099999'):
    household.HouseholdEnvironment().task(task_id)


def test_games_are_a_function_of_seed_and_id():
  one, two = (household.HouseholdEnvironment(seed=4) for _ in range(2))
  other = household.HouseholdEnvironment(seed=5)
  ids = [f'train/{index:06d}' for index in range(20)]
  for task_id in reversed(ids):  # The order of asking must not matter.
    one.game(task_id)
  told = [made.reset(task_id)[1] for made in (one, two) for task_id in ids]
  assert told[:20] == told[20:]
  differing = sum(one.reset(i)[1] != other.reset(i)[1] for i in ids)
  assert differing == 20


def test_a_won_game_is_over():
  made = household.HouseholdEnvironment()
  state, timestep = made.reset('valid_unseen/000000')
  for command in made.game('valid_unseen/000000').walkthrough:
    assert not timestep.done and timestep.reward == 0.0
    state, timestep = made.step(state, command)
  assert timestep.terminal and timestep.reward == 1.0
  with pytest.raises(ValueError, match='is over'):
    made.step(state, 'look')


def test_ids_slice_lazily():
  tasks = household.HouseholdEnvironment().tasks('train')
  assert [t.id for t in tasks[5:8]] == [f'train/{i:06d}' for i in (5, 6, 7)]
  assert tasks[-1].id == 'train/099999'
  assert len(tasks[10:][:20]) == 20


def test_few_games_are_kept():
  made = household.HouseholdEnvironment(max_games=3)
  first = made.game('train/000000')
  assert made.game('train/000000') is first
  for index in range(1, 5):
    made.game(f'train/{index:06d}')
  again = made.game('train/000000')
  assert again is not first and again.initial == first.initial


def test_a_saved_game_is_the_same_game(tmp_path):
  made = household.HouseholdEnvironment()
  path = tmp_path / 'game.tw-pddl'
  for index in range(0, 30, 5):
    game = made.game(f'train/{index:06d}')
    made.save(f'train/{index:06d}', path)
    read = game_lib.load(path)
    assert (read.task, read.goal, read.initial, read.walkthrough) == (
        game.task, game.goal, game.initial, game.walkthrough)
    assert engine.won(read, _play(read, read.walkthrough))


def _small_games(kind, count):
  """Games that can be searched to the end: few places and few things."""
  sizes = household_games.Sizes((5, 5), (4, 4))
  made = household.HouseholdEnvironment(
      seed=7, num_receptacles=sizes.num_receptacles,
      num_objects=sizes.num_objects)
  found = (made.game(f'train/{index:06d}') for index in range(10_000))
  return [game for game, _ in zip(
      (g for g in found if g.goal.task_type == kind), range(count))]


@pytest.mark.parametrize('kind', goals.TASK_TYPES)
def test_plans_are_as_short_as_trying_everything(kind):
  lengths = [(len(planner.shortest(game)), _search(game, max_states=20_000))
             for game in _small_games(kind, 8)]
  checked = [pair for pair in lengths if pair[1] is not None]
  assert len(checked) >= 6
  assert all(planned == searched for planned, searched in checked), checked


def test_plans_of_real_games_win_and_are_no_longer_than_theirs(alfworld_games):
  for path in sorted(alfworld_games.glob('valid_unseen/*/*/game.tw-pddl'))[::3]:
    game = game_lib.load(path)
    plan = planner.shortest(game)
    assert engine.won(game, _play(game, plan))
    assert len(plan) <= len(game.walkthrough)


def test_a_game_that_cannot_be_won_has_no_plan():
  game = household.HouseholdEnvironment().game('train/000000')
  stuck = dataclasses.replace(
      game, objects=tuple(o._replace(pickupable=False) for o in game.objects))
  with pytest.raises(ValueError, match='cannot be won'):
    planner.shortest(stuck)

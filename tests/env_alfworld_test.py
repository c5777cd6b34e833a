"""The ALFWorld engine: recordings, walkthroughs, rules, and its environment."""

import json
import lzma
import random

from absl import flags
from absl.testing import flagsaver
import pytest

import environments
from environments import base
from environments import conformance
from environments.alfworld import engine
from environments.alfworld import environment
from environments.alfworld import game as game_lib
from environments.alfworld import goals
from environments.alfworld import household_text
from experiments.benchmarks import alfworld_engine as benchmark
import kitchen


def _play(game, commands, state=None):
  """Returns the state after the commands and the last text."""
  state, text = state or engine.initial(game), ''
  for command in commands:
    assert command in engine.admissible(game, state), command
    state, text = engine.step(game, state, command)
  return state, text


# ------------------------------------------------------------ real data


@pytest.fixture(scope='module')
def recordings(data_dir):
  path = data_dir / 'alfworld_transcripts.jsonl.xz'
  if not path.is_file():
    pytest.skip(f'no {path.name} in {data_dir}')
  with lzma.open(path, 'rt', encoding='utf-8') as lines:
    return [json.loads(line) for line in lines]


@pytest.fixture(scope='module')
def all_games(alfworld_games):
  return sorted(alfworld_games.glob('*/*/*/game.tw-pddl'))


def test_recordings_are_reproduced(recordings, alfworld_games):
  assert len(recordings) == 42
  alfworld = environment.AlfworldEnvironment(alfworld_games)
  for recording in recordings:
    task_id = recording['game'].removesuffix('/game.tw-pddl')
    state, told = alfworld.reset(task_id)
    assert told.observation == recording['intro']
    assert list(told.available) == recording['admissible']
    for step in recording['steps']:
      state, told = alfworld.step(state, step['cmd'])
      where = f'{task_id}: {step["cmd"]}'
      assert told.observation == step['obs'], where
      assert list(told.available) == step['admissible'], where
      assert told.info['won'] == step['won'], where
      assert told.reward == step['reward'], where
      assert told.done == step['done'], where


def _check_walkthroughs(paths):
  for path in paths:
    game = game_lib.load(path)
    state = engine.initial(game)
    for command in game.walkthrough:
      assert not engine.won(game, state), path
      assert command in engine.admissible(game, state), (path, command)
      state, _ = engine.step(game, state, command)
    assert engine.won(game, state), path


def test_walkthroughs_win(all_games):
  _check_walkthroughs(all_games[::len(all_games) // 200])


@pytest.mark.slow
def test_all_walkthroughs_win(all_games):
  assert len(all_games) == 4027
  _check_walkthroughs(all_games)


def test_task_types_are_those_of_the_folders(all_games):
  named = {'pick_and_place_simple': goals.PICK_AND_PLACE,
           'look_at_obj_in_light': goals.LOOK_IN_LIGHT,
           'pick_clean_then_place_in_recep': goals.CLEAN,
           'pick_heat_then_place_in_recep': goals.HEAT,
           'pick_cool_then_place_in_recep': goals.COOL,
           'pick_two_obj_and_place': goals.PICK_TWO}
  for path in all_games[::97]:
    kind, thing, _, where, _ = path.parts[-3].split('-')
    goal = game_lib.load(path).goal
    assert goal.task_type == named[kind]
    assert goal.object_type == thing.lower()
    assert where.lower() in (goal.receptacle_type, goal.lamp_type)


def test_real_games_at_random(all_games):
  for path in all_games[::571]:
    _check_random_play(game_lib.load(path), random.Random(path.parts[-2]), 150)


class TestAlfworldLaws(conformance.EnvironmentLaws):
  """The contract of every environment, with a few of the real games."""

  @pytest.fixture(autouse=True)
  def _games(self, all_games, tmp_path):
    for path in all_games[::500]:
      copy = tmp_path.joinpath(*path.parts[-4:])
      copy.parent.mkdir(parents=True)
      copy.write_bytes(path.read_bytes())
    self.data = tmp_path

  def make_environment(self):
    self.alfworld = environment.AlfworldEnvironment(self.data)
    self.plans = {}
    for split in self.alfworld.splits():
      for task in self.alfworld.tasks(split):
        game = self.alfworld.game(task.id)
        _, first = self.alfworld.reset(task)
        self.plans[first.observation] = game.walkthrough
    return self.alfworld

  def propose(self, timestep, rng):
    """Follows a walkthrough where it can, so that some episodes end."""
    plan = self.plans.get(timestep.observation)
    if plan:
      self.plan = list(plan)
    following = getattr(self, 'plan', [])
    if following and following[0] in timestep.available:
      return following.pop(0)
    return rng.choice(timestep.available)


# ------------------------------------------------------- rules and words


def test_every_kind_of_task_is_recognised_and_won():
  assert set(kitchen.GOALS) == set(goals.TASK_TYPES)
  for task_type, plan in kitchen.PLANS.items():
    game = kitchen.make_game(task_type)
    assert game.goal.task_type == task_type
    state = engine.initial(game)
    for command in plan:
      assert not engine.won(game, state), (task_type, command)
      state, _ = _play(game, [command], state)
    assert engine.won(game, state), task_type


def test_goals_that_are_nearly_reached_are_not():
  two = kitchen.make_game(goals.PICK_TWO)
  state, _ = _play(two, kitchen.PLANS[goals.PICK_TWO][:4])
  assert not engine.won(two, state)
  light = kitchen.make_game(goals.LOOK_IN_LIGHT)
  state, _ = _play(light, kitchen.PLANS[goals.LOOK_IN_LIGHT])
  assert engine.won(light, state)
  state, _ = _play(light, ['go to fridge 1'], state)
  assert not engine.won(light, state)
  heated = kitchen.make_game(goals.HEAT)
  plan = list(kitchen.PLANS[goals.HEAT])
  plan.insert(5, 'cool tomato 1 with fridge 1')
  state, _ = _play(heated, plan)
  assert not engine.won(heated, state)


def test_names_are_numbered_downwards_per_base_name():
  game = kitchen.make_game()
  assert [one.name for one in game.receptacles] == [
      'cabinet 2', 'cabinet 1', 'diningtable 1', 'fridge 1', 'microwave 1',
      'sinkbasin 1']
  assert [one.name for one in game.objects if one.type == 'mug'] == [
      'mug 2', 'mug 1']
  assert game.task == 'Your task is to: tidy up.'


def test_sentences_come_from_the_grammar():
  grammar = household_text.grammar('Your task is to: tidy up.')
  changed = grammar.replace('You shut the {r.name}.',
                            "Bang, {r.definite + ' '}{r.name or r.id}!")
  assert changed != grammar
  changed = changed.replace('"close {r}"', '"slam {r} shut"')
  game = kitchen.make_game(grammar=changed)
  _, text = _play(game, ['go to fridge 1', 'open fridge 1',
                         'slam fridge 1 shut'])
  assert text == 'Bang, the fridge 1!'


def test_two_receptacles_share_a_place():
  game = kitchen.make_game()
  state, _ = _play(game, ['go to cabinet 2'])
  commands = engine.admissible(game, state)
  assert {'examine cabinet 1', 'examine cabinet 2', 'open cabinet 2',
          'take mug 1 from cabinet 1'} <= set(commands)
  assert not {'go to cabinet 1', 'go to cabinet 2', 'open cabinet 1',
              'take mug 2 from cabinet 2'} & set(commands)
  _, text = _play(game, ['look'], state)
  assert 'cabinet 2, and cabinet 1' in text


def test_only_what_was_taken_out_lies_about():
  game = kitchen.make_game()
  before = _play(game, ['go to cabinet 1', 'look'])[1]
  after = _play(game, [
      'go to cabinet 1', 'open cabinet 2', 'take mug 1 from cabinet 1',
      'move mug 1 to cabinet 2', 'look'])[1]
  assert 'mug' not in before
  assert after.endswith('a mug 1.')


def test_an_object_may_be_in_two_receptacles():
  game = kitchen.make_game(
      facts=kitchen.FACTS + '(inReceptacle Mug_bar_2 DiningTable_bar_1)')
  state, _ = _play(game, ['go to cabinet 1', 'take mug 1 from cabinet 1'])
  assert engine.won(game, state)  # It still is on the table as well.


def test_a_lamp_in_two_receptacles_is_used_by_one_command():
  game = kitchen.make_game(facts=kitchen.FACTS + (
      '(inReceptacle DeskLamp_bar_1 Cabinet_bar_1)'
      '(inReceptacle DeskLamp_bar_1 Cabinet_bar_2)'))
  state, _ = _play(game, ['go to cabinet 1'])
  assert engine.admissible(game, state).count('use desklamp 1') == 1


def test_what_is_cool_from_the_start_must_be_coolable():
  for ability, won in (('(coolable Tomato_bar_1)', True), ('', False)):
    facts = kitchen.FACTS.replace('(coolable Tomato_bar_1)', ability)
    game = kitchen.make_game(
        goals.COOL, facts=facts + '(isCool Tomato_bar_1)')
    state, _ = _play(game, [
        'go to diningtable 1', 'take tomato 1 from diningtable 1',
        'go to microwave 1', 'open microwave 1',
        'move tomato 1 to microwave 1'])
    assert engine.won(game, state) == won


def test_shut_doors_hide_but_do_not_hinder():
  game = kitchen.make_game()
  state, text = _play(game, ['go to cabinet 2'])
  assert 'mug 2' not in text
  state, text = _play(game, ['open cabinet 2'], state)
  assert 'mug 2' in text
  state, _ = _play(game, kitchen.PLANS[goals.HEAT][:4])
  tomato, = game.objects_by_type['tomato']
  microwave, = game.receptacles_by_type['microwave']
  assert tomato in state.hot and microwave not in state.opened
  assert state.holding == tomato


def test_slicing_needs_a_knife_in_hand_and_leaves_its_mark():
  game = kitchen.make_game()
  state, _ = _play(game, ['go to diningtable 1'])
  assert not any(command.startswith('slice')
                 for command in engine.admissible(game, state))
  state, _ = _play(game, ['take knife 1 from diningtable 1',
                          'slice tomato 1 with knife 1'], state)
  assert state.sliced == game.objects_by_type['tomato']
  assert 'slice tomato 1 with knife 1' in engine.admissible(game, state)


def test_a_mug_tells_what_it_holds():
  game = kitchen.make_game()
  _, text = _play(game, ['go to cabinet 2', 'open cabinet 2',
                         'take mug 1 from cabinet 1', 'examine mug 1'])
  assert 'spoon 1' in text


def test_commands_are_exact_but_for_blanks_around_them():
  game = kitchen.make_game()
  state = engine.initial(game)
  assert engine.step(game, state, ' look\n') == engine.step(
      game, state, 'look')
  for command in ('Look', 'go  to fridge 1', 'go to fridge 2', '', 'go to'):
    assert engine.step(game, state, command) == (
        state, engine.NOTHING_HAPPENS)


def _check_random_play(game, rng, num_steps):
  """Admissible commands are understood, no others are, states stay."""
  state, seen = engine.initial(game), set()
  for _ in range(num_steps):
    commands = engine.admissible(game, state)
    assert list(commands) == sorted(set(commands))
    assert engine.actions(game, state).keys() == set(commands)
    seen.update(commands)
    others = sorted(seen.difference(commands))
    for command in rng.sample(others, min(5, len(others))):
      assert engine.step(game, state, command) == (
          state, engine.NOTHING_HAPPENS)
    kept, key = tuple(state), hash(state)
    command = rng.choice(commands)
    after, text = engine.step(game, state, command)
    assert text and text != engine.NOTHING_HAPPENS, command
    assert (after, text) == engine.step(game, state, command)
    assert tuple(state) == kept and hash(state) == key
    _check_state(game, after)
    state = after


def _check_state(game, state):
  """Whatever is played, a state is one that can be."""
  assert 0 <= state.location < len(game.locations)
  assert len(state.contents) == len(game.receptacles)
  for things in state.contents:
    assert list(things) == sorted(set(things))
  assert not state.hot & state.cool
  assert all(game.receptacles[one].openable for one in state.opened)
  for thing, receptacle in state.taken:
    assert thing not in state.contents[receptacle]


def test_random_play():
  for seed in range(5):
    _check_random_play(kitchen.make_game(), random.Random(seed), 300)


def test_what_a_game_remembers_is_bounded():
  game, rng = kitchen.make_game(), random.Random(0)
  state = engine.initial(game)
  for number in range(3000):
    # Ever new contents, as long play in a big house would bring about.
    things = tuple(thing for thing in range(6) if number >> thing & 1)
    state = state._replace(location=2, contents=(
        *state.contents[:2], things, *state.contents[3:]),
        holding=rng.choice((None, 0, 1, 2, 3)))
    engine.admissible(game, state)
  assert len(game.memory) <= 1024 + 200  # Commands come on top.


# ------------------------------------------------------------ environment


@pytest.fixture
def folder(tmp_path):
  """A data folder with a game of every kind, and a broken one."""
  for task_type in goals.TASK_TYPES:
    for trial in ('trial_1', 'trial_2'):
      path = tmp_path / 'json_2.1.1' / 'valid_seen' / task_type / trial
      path.mkdir(parents=True)
      text = json.dumps(kitchen.content(task_type))
      path.joinpath('game.tw-pddl').write_text(text, encoding='utf-8')
  broken = tmp_path / 'json_2.1.1' / 'train' / 'broken' / 'trial_1'
  broken.mkdir(parents=True)
  broken.joinpath('game.tw-pddl').write_text('{', encoding='utf-8')
  return tmp_path


def test_listing_reads_no_game(folder):
  alfworld = environments.make('alfworld', data=folder)
  assert alfworld.splits() == ('train', 'valid_seen')
  assert len(alfworld.tasks('train')) == 1
  with pytest.raises(ValueError, match='broken/trial_1'):
    alfworld.tasks('train')[0]
  with pytest.raises(ValueError, match='broken/trial_1'):
    alfworld.reset('train/broken/trial_1')
  tasks = alfworld.tasks('valid_seen')
  assert [task.id for task in tasks] == sorted(tasks.ids)
  assert tasks[1:3][0] == tasks[1] == alfworld.task(tasks.ids[1])
  assert tasks[0] == base.Task(
      'valid_seen/clean/trial_1', 'valid_seen', 'Your task is to: tidy up.')
  assert alfworld.splits() == environment.AlfworldEnvironment(
      folder / 'json_2.1.1').splits()


def test_episodes_end_at_the_goal(folder):
  alfworld = environment.AlfworldEnvironment(folder, max_games=1)
  states = {}
  for task_type, plan in kitchen.PLANS.items():
    state, told = alfworld.reset(f'valid_seen/{task_type}/trial_1')
    assert told.observation.endswith('Your task is to: tidy up.')
    assert told.info == {'won': False, 'task_type': task_type}
    for command in plan:
      assert not told.terminal and told.reward == 0.0
      state, told = alfworld.step(state, command)
      assert told.status == base.Status.OK
    assert told.terminal and told.reward == 1.0 and told.info['won']
    states[task_type] = state
  for state in states.values():  # Their games were let go of meanwhile.
    with pytest.raises(ValueError, match='is over'):
      alfworld.step(state, 'look')


def test_equal_episodes_have_equal_states(folder):
  plan = kitchen.PLANS[goals.HEAT]
  ends = []
  for _ in range(2):
    alfworld = environment.AlfworldEnvironment(folder)
    state, _ = alfworld.reset('valid_seen/heat/trial_1', seed=len(ends))
    for command in plan:
      state, _ = alfworld.step(state, command)
    ends.append(state)
  assert ends[0] == ends[1] and hash(ends[0]) == hash(ends[1])


def test_a_goal_reached_at_the_start_is_won_by_the_first_step(tmp_path):
  facts = kitchen.FACTS + '(inReceptacle Mug_bar_1 DiningTable_bar_1)'
  path = tmp_path / 'train' / 'task' / 'trial'
  path.mkdir(parents=True)
  path.joinpath('game.tw-pddl').write_text(
      json.dumps(kitchen.content(facts=facts)), encoding='utf-8')
  alfworld = environment.AlfworldEnvironment(tmp_path)
  state, told = alfworld.reset('train/task/trial')
  assert told.info['won'] and not told.terminal
  _, told = alfworld.step(state, 'look')
  assert told.terminal and told.reward == 1.0


def test_unknown_commands_leave_the_state(folder):
  alfworld = environment.AlfworldEnvironment(folder)
  state, first = alfworld.reset('valid_seen/heat/trial_1')
  after, told = alfworld.step(state, 'dance')
  assert after == state
  assert told.status == base.Status.INVALID_ACTION
  assert told.observation == 'Nothing happens.'
  assert told.available == first.available and not told.done


@pytest.mark.parametrize('ask, match', [
    (lambda alfworld: alfworld.tasks('valid_sen'), 'valid_seen'),
    (lambda alfworld: alfworld.tasks('valid_unseen'), 'train, valid_seen'),
    (lambda alfworld: alfworld.task('valid_seen/heat/trial_3'),
     'near it: valid_seen/heat/trial_'),
    (lambda alfworld: alfworld.task('nowhere/heat'), 'start with one of train'),
    (lambda alfworld: alfworld.reset('valid_seen/../../train'), 'no task'),
])
def test_unknown_names(folder, ask, match):
  with pytest.raises(ValueError, match=match):
    ask(environment.AlfworldEnvironment(folder))


def test_wrong_folders(tmp_path):
  with pytest.raises(ValueError, match='no folder .*nowhere'):
    environments.make('alfworld', data=tmp_path / 'nowhere')
  with pytest.raises(ValueError, match='no games in'):
    environments.make('alfworld', data=tmp_path)
  with pytest.raises(ValueError, match='data=DIR'):
    environments.make('alfworld')
  with pytest.raises(ValueError, match='max_games'):
    environments.make('alfworld', data=tmp_path, max_games=0)
  with pytest.raises(ValueError, match='near it: alfworld'):
    environments.make('alfword')
  with pytest.raises(ValueError, match='there are alfworld, household'):
    environments.make('chess')


def test_benchmark(folder, tmp_path, capsys, monkeypatch):
  (folder / 'json_2.1.1' / 'train' / 'broken' / 'trial_1' /
   'game.tw-pddl').unlink()
  out = tmp_path / 'figures.json'
  flags.FLAGS.mark_as_parsed()
  for bar, code, said in ((1, 0, 'ok'), (10 ** 9, 1, 'is below')):
    monkeypatch.setattr(benchmark, 'MIN_STEPS_PER_SECOND', bar)
    monkeypatch.setattr(benchmark, 'MAX_PARSE_MILLISECONDS', 1e9)
    with flagsaver.flagsaver(data=str(folder), out=str(out), quick=True):
      with pytest.raises(SystemExit) as exit_status:
        benchmark.main(['alfworld_engine'])
    assert exit_status.value.code == code
    assert said in capsys.readouterr().out.splitlines()[-1]
    assert json.loads(out.read_text())['num_games'] == 12

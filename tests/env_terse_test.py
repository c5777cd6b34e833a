"""The compact wording: complete, short, and never ambiguous."""

import json
import random

import numpy as np
import pytest

from bpo_jax import tokenizers
from environments import base
from environments import codec as codecs
from environments.alfworld import engine
from environments.alfworld import game as game_lib
from environments.alfworld import household
from environments.alfworld import household_games
from environments.alfworld import terse
import kitchen

_BOOK = terse.Terse()


def _timestep(observation='', available=(), **kwargs):
  return base.TimeStep(observation, available=tuple(available), **kwargs)


def _check_commands(available):
  """Words are known, few, distinct, and none begins with another's."""
  words = _BOOK.commands(available)
  assert sorted(words.values()) == sorted(available)
  for key, command in words.items():
    assert 1 <= len(key) <= 3
    assert set(key) <= set(_BOOK.vocabulary())
    assert _BOOK.action(command, available) == key
    assert not any(key[:n] in words for n in range(1, len(key)))


def _check_random_play(game, rng, turns):
  state = engine.initial(game)
  for _ in range(turns):
    available = engine.admissible(game, state)
    _check_commands(available)
    state, _ = engine.step(game, state, rng.choice(available))


def test_vocabulary_is_sorted_and_leaves_room_for_padding():
  words = _BOOK.vocabulary()
  assert list(words) == sorted(set(words))
  assert len(words) <= 254
  assert {'go', 'put', 'cabinet', 'mug', '1', '60', 'closed'} <= set(words)


@pytest.mark.parametrize('command, words', [
    ('go to cabinet 3', ('go', 'cabinet', '3')),
    ('take mug 2 from shelf 1', ('take', 'mug', '2')),
    ('move mug 2 to drawer 5', ('put', 'drawer', '5')),
    ('heat mug 1 with microwave 1', ('heat', 'microwave', '1')),
    ('clean mug 1 with sinkbasin 2', ('clean', 'sinkbasin', '2')),
    ('slice apple 1 with knife 1', ('slice', 'apple', '1')),
    ('use desklamp 1', ('use', 'desklamp', '1')),
    ('open drawer 2', ('open', 'drawer', '2')),
    ('examine drawer 2', ('examine', 'drawer', '2')),
    ('inventory', ('inventory',)),
])
def test_words_of_commands(command, words):
  assert _BOOK.action(command, (command,)) == words


def test_one_object_in_several_receptacles_is_taken_from_each():
  available = tuple(f'take pan 1 from stoveburner {n}' for n in range(1, 5))
  assert _BOOK.action(available[0], available) == ('take', 'pan', '1')
  assert _BOOK.action(available[2], available) == ('take3', 'pan', '1')
  _check_commands(available + ('take pot 1 from stoveburner 1',))


def test_unknown_words_are_passed_on():
  assert _BOOK.action('go to unicorn 1', ()) == ('go', 'unicorn', '1')
  assert _BOOK.commands(('go to cabinet 61', 'go to unicorn 1')) == {
      ('go', 'cabinet', '61'): 'go to cabinet 61',
      ('go', 'unicorn', '1'): 'go to unicorn 1'}
  available = tuple(f'take pan 1 from shelf {n}' for n in range(1, 12))
  words = _BOOK.commands(available)
  assert list(words.values()) == list(available)
  assert list(words)[-1] == ('take11', 'pan', '1')
  step = _timestep('You see a unicorn 1 and a mug 2.',
                   ('go to lair 2', 'take unicorn 1 from lair 1'))
  assert _BOOK.observation(step, 'go to lair 1') == ['mug', 'unicorn']


_SAID = [
    ('put two cd in safe.', ('two', 'cd', 'safe')),
    ('find two mug and put them in cabinet.', ('two', 'mug', 'cabinet')),
    ('put some vase on shelf.', ('put', 'vase', 'shelf')),
    ('put a egg in fridge.', ('put', 'egg', 'fridge')),
    ('put a clean pan in cabinet.', ('clean', 'pan', 'cabinet')),
    ('clean some cloth and put it in toilet.', ('clean', 'cloth', 'toilet')),
    ('cool some pot and put it in fridge.', ('cool', 'pot', 'fridge')),
    ('put a cool mug in coffeemachine.', ('cool', 'mug', 'coffeemachine')),
    ('heat some apple and put it in fridge.', ('heat', 'apple', 'fridge')),
    ('put a hot cup in cabinet.', ('heat', 'cup', 'cabinet')),
    ('look at bowl under the desklamp.', ('look', 'bowl', 'desklamp')),
    ('examine the book with the floorlamp.', ('look', 'book', 'floorlamp')),
]


@pytest.mark.parametrize('sentence, goal', _SAID)
def test_every_way_a_task_is_said(sentence, goal):
  assert terse.parse_goal(f'Your task is to: {sentence}') == terse.Goal(*goal)


@pytest.mark.parametrize('sentence, goal', _SAID + [
    (sentence.format(o='mug', r='shelf'), (kind, 'mug', 'shelf'))
    for kind, sentences in household_games._SENTENCES.items()
    for sentence in sentences
])
def test_unknown_types_are_found_by_where_they_stand(sentence, goal):
  kind, object_, place = goal
  for new_object, new_place in [
      ('gizmo', 'lair'), (object_, 'lair'), ('gizmo', place)]:
    said = sentence.replace(object_, new_object).replace(place, new_place)
    expected = terse.Goal(kind, new_object, new_place)
    assert terse.parse_goal(f'Your task is to: {said}') == expected


@pytest.mark.parametrize('sentence', ['', 'put the mug away.', 'mug, cabinet'])
def test_a_sentence_without_a_goal_is_refused(sentence):
  with pytest.raises(ValueError, match='expected a task sentence'):
    terse.parse_goal(sentence)


def test_prompt_has_the_goal_and_counts_the_receptacles():
  timestep = _timestep(
      'You see a shelf 1.\n\nYour task is to: put a clean mug in cabinet.',
      ('go to cabinet 1', 'go to cabinet 2', 'go to fridge 1', 'help', 'look'))
  assert _BOOK.prompt(timestep) == [
      'clean', 'mug', 'cabinet', 'cabinet', '2', 'fridge', '1']


def test_observation_names_what_is_in_sight_once():
  text = 'On the desk 1, you see a mug 2, a mug 1, and a pencil 1.'
  step = _timestep(text, ('take mug 1 from desk 1',))
  assert _BOOK.observation(step, 'go to desk 1') == ['mug', 'pencil']
  # With full hands nothing can be taken, yet everything is seen.
  assert _BOOK.observation(_timestep(text), 'go to desk 1') == ['mug', 'pencil']


def test_observation_adds_what_is_within_reach_beside():
  step = _timestep('The shelf 1 holds a cd 1.', (
      'take cd 1 from shelf 1', 'take pen 3 from shelf 2'))
  assert _BOOK.observation(step, 'go to shelf 1') == ['cd', 'pen']


def test_observation_marks():
  shut = _timestep('The drawer 1 is closed.', ('open drawer 1',))
  assert _BOOK.observation(shut, 'go to drawer 1') == ['closed']
  empty = _timestep('On the desk 1, you see nothing.')
  assert _BOOK.observation(empty, 'go to desk 1') == ['nothing']
  invalid = _timestep('Nothing happens.', status=base.Status.INVALID_ACTION)
  assert _BOOK.observation(invalid, 'dance with fridge 1') == ['invalid']
  taken = _timestep('You pick up the mug 1 from the desk 1.')
  assert _BOOK.observation(taken, 'take mug 1 from desk 1') == []


def test_observation_has_at_most_nine_words():
  names = ' '.join(f'{name} 1' for name in terse.OBJECTS[:20])
  words = _BOOK.observation(_timestep(names), 'go to desk 1')
  assert words == list(terse.OBJECTS[:9])


def test_words_of_generated_games_are_never_ambiguous():
  environment = household.HouseholdEnvironment()
  rng = random.Random(3)
  for index in range(0, 60, 3):
    game = environment.game(f'train/{index:06d}')
    _check_random_play(game, rng, turns=40)


def test_words_of_real_games_are_never_ambiguous(alfworld_games):
  files = sorted(alfworld_games.glob('*/*/*/game.tw-pddl'))
  rng = random.Random(5)
  for path in rng.sample(files, 40):
    _check_random_play(game_lib.load(path), rng, turns=40)


def test_real_burners_that_share_a_pan_and_a_pot(alfworld_games):
  """Kitchen 10 has a pan and a pot that stand across two burners each."""
  files = sorted(alfworld_games.glob('valid_*/*-10/*/game.tw-pddl'))
  verbs = set()
  for path in files[:5]:
    game = game_lib.load(path)
    state = engine.initial(game)
    for index in game.receptacles_by_type['stoveburner']:
      name = game.receptacles[index].name
      after, _ = engine.step(game, state, f'go to {name}')
      available = engine.admissible(game, after)
      _check_commands(available)
      verbs.update(words[0] for words in _BOOK.commands(available))
  assert 'take2' in verbs


def _strange_game():
  """The tests' kitchen with types that nobody has ever heard of."""
  text = json.dumps(kitchen.content())
  for old, new in [('Mug', 'Gizmo'), ('Cabinet', 'Lair'), ('Spoon', 'Widget'),
                   ('DiningTable', 'Nook')]:
    text = text.replace(old, new).replace(old.lower(), new.lower())
  return game_lib.parse(
      text.replace('tidy up.', 'put a gizmo in nook.'), 'strange')


def test_a_game_of_unknown_types_can_be_played_and_won():
  game = _strange_game()
  tokenizer = tokenizers.WordTokenizer(_BOOK.vocabulary())
  codec = codecs.TextCodec(_BOOK, tokenizer, 9, 3, 40)
  state = engine.initial(game)
  first = _timestep(engine.intro(game, state), engine.admissible(game, state))
  prompt = codec.encode_prompt(first)
  assert tokenizer.decode(prompt)[:3] == ['put', '<unk>', '<unk>']
  for command in game.walkthrough:
    available = engine.admissible(game, state)
    tokens = tokenizer.encode(_BOOK.action(command, available))
    # `go to lair 1` and `go to nook 1` read alike: the first of them is meant.
    chosen = codec.decode(available, np.asarray(tokens))
    assert chosen.replace('nook', 'lair') == command.replace('nook', 'lair')
    state, text = engine.step(game, state, command)
    codec.encode_observation(_timestep(text, available), command)
    codec.encode_commands(engine.admissible(game, state))
  assert engine.won(game, state)
  assert codec.command_collisions > 0
  assert set(tokenizer.unknown) == {'gizmo', 'lair', 'nook'}

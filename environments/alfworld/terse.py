"""The wording by which a small policy plays: fewer than 200 words in all.

A household game in full sentences costs about 300 words of reading at the start
and 30 a turn; this phrasebook says the same in about 25 and 5, so that a
two-layer transformer learns the games on a CPU. It reads only what any agent
may read, `TimeStep.observation` and `TimeStep.available`, never `info`, and
depends on no sentence of either grammar: names are recognised as a known type
followed by a number.

A game may have types, or numbers, that are not in the vocabulary. They are
passed on as they are, for the tokenizer to report and to read as unknown.
"""

import collections
from collections.abc import Sequence
import dataclasses
import functools
import re

from environments import base

RECEPTACLES = (
    'armchair', 'bathtubbasin', 'bed', 'cabinet', 'cart', 'coffeemachine',
    'coffeetable', 'countertop', 'desk', 'diningtable', 'drawer', 'dresser',
    'fridge', 'garbagecan', 'handtowelholder', 'laundryhamper', 'microwave',
    'ottoman', 'paintinghanger', 'safe', 'shelf', 'sidetable', 'sinkbasin',
    'sofa', 'stoveburner', 'toaster', 'toilet', 'toiletpaperhanger',
    'towelholder', 'tvstand')

OBJECTS = (
    'alarmclock', 'apple', 'baseballbat', 'basketball', 'bathtub', 'blinds',
    'book', 'boots', 'bowl', 'box', 'bread', 'butterknife', 'candle', 'cd',
    'cellphone', 'chair', 'cloth', 'creditcard', 'cup', 'curtains', 'desklamp',
    'dishsponge', 'egg', 'floorlamp', 'footstool', 'fork', 'glassbottle',
    'handtowel', 'houseplant', 'kettle', 'keychain', 'knife', 'ladle', 'laptop',
    'laundryhamperlid', 'lettuce', 'lightswitch', 'mirror', 'mug', 'newspaper',
    'painting', 'pan', 'papertowel', 'papertowelroll', 'pen', 'pencil',
    'peppershaker', 'pillow', 'plate', 'plunger', 'poster', 'pot', 'potato',
    'remotecontrol', 'saltshaker', 'scrubbrush', 'showerdoor', 'showerglass',
    'sink', 'soapbar', 'soapbottle', 'spatula', 'spoon', 'spraybottle',
    'statue', 'stoveknob', 'teddybear', 'television', 'tennisracket',
    'tissuebox', 'toiletpaper', 'toiletpaperroll', 'tomato', 'towel', 'vase',
    'watch', 'wateringcan', 'window', 'winebottle')

# An object may lie in several receptacles at one place (a pan across two
# burners), so taking it names which of them by the verb: first, second, ...
_TAKE = ('take',) + tuple(f'take{n}' for n in range(2, 9))
_VERBS = _TAKE + (
    'clean', 'close', 'cool', 'examine', 'go', 'heat', 'help', 'inventory',
    'look', 'open', 'put', 'slice', 'use')
_MARKERS = ('closed', 'invalid', 'nothing', 'two')
_MAX_NUMBER = 60
_NUMBERS = tuple(str(n) for n in range(1, _MAX_NUMBER + 1))
_WORDS = tuple(sorted(_VERBS + _MARKERS + RECEPTACLES + OBJECTS + _NUMBERS))
_TYPES = frozenset(RECEPTACLES + OBJECTS)
_OBJECT_SET = frozenset(OBJECTS)
_NAME = re.compile(r'\b([a-z]+) \d+')
# How every sentence ends, for types that are not known: `mug and put it in the
# cabinet`, `mug under the desklamp`.
_ENDING = re.compile(
    r'([a-z]+)(?: things)?(?: (?:and|then) put (?:it|them))?'
    r' (?:in|on|at|under|with|for|(?:in|by) the light of)'
    r' (?:the |one )?(?:same )?([a-z]+)$')
_REVEALING = frozenset(('go', 'open', 'examine', 'look', 'inventory'))
_MAX_NAMES = 9
_NUM_NAMES = {'go': 1, 'move': 2, 'heat': 2, 'clean': 2, 'cool': 2}

# The first key found among the words of the sentence decides, so `two` and the
# treatments stand before the plain words `put` and `look`.
_KINDS = {
    'two': 'two', 'clean': 'clean', 'hot': 'heat', 'heat': 'heat',
    'cool': 'cool', 'cold': 'cool', 'look': 'look', 'examine': 'look',
    'put': 'put'}


@dataclasses.dataclass(frozen=True)
class Goal:
  """What a task asks for, read from its sentence.

  Attributes:
    kind: `put`, `two`, `clean`, `heat`, `cool` or `look`.
    object: type of the object, such as `mug`.
    place: type of the receptacle, or of the lamp where kind is `look`.
  """

  kind: str
  object: str
  place: str


@functools.lru_cache(maxsize=4096)
def parse_goal(sentence: str) -> Goal:
  """Returns the goal a task sentence states, in either game's wording.

  Types that are not known are taken from where the wording has them.

  Raises:
    ValueError: if no kind of task, or not two types, are found in it.
  """
  words = re.findall(r'[a-z]+', sentence.lower())
  kind = next((_KINDS[key] for key in _KINDS if key in words), None)
  types = [word for word in words if word in _TYPES]
  if len(types) != 2:
    ending = _ENDING.search(' '.join(words))
    types = ending.groups() if ending else ()
  if kind is None or not types:
    raise ValueError(
        'expected a task sentence such as "put a clean mug in cabinet", with '
        f'a known kind of task and two type names; got {sentence!r}. Is this '
        'the first observation of a household game?')
  return Goal(kind, *types)


def goal_of(timestep: base.TimeStep) -> Goal:
  """Returns the goal that ends the first observation of a game."""
  return parse_goal(timestep.observation.rstrip().rpartition('\n')[2])


def split_command(command: str) -> tuple[str, ...]:
  """Returns (verb, name, name): `('take', 'mug 2', 'shelf 1')`.

  Names beyond the verb are left out where the command has none.
  """
  verb, _, rest = command.partition(' ')
  if not rest:
    return (verb,)
  words = rest.removeprefix('to ').split(' ')
  return (verb,) + tuple(
      f'{words[i]} {words[i + 1]}' for i in range(0, len(words) - 1, 3))


def named(text: str, type_: str) -> frozenset[str]:
  """Returns the names of one type that occur in a text, such as `mug 2`."""
  return frozenset(re.findall(rf'\b{re.escape(type_)} \d+', text))


class Terse:
  """The phrasebook; without state of its own, so one serves all episodes."""

  def vocabulary(self) -> tuple[str, ...]:
    """Every word it produces in games of ALFWorld's types, sorted."""
    return _WORDS

  def prompt(self, timestep: base.TimeStep) -> list[str]:
    """Words for a game's first TimeStep: the goal, then what is in the room.

    Example: `['clean', 'mug', 'cabinet', 'cabinet', '4', 'fridge', '1']`, the
    receptacles as (type, count) in the order of their names. About 25 words.
    """
    goal = goal_of(timestep)
    return [goal.kind, goal.object, goal.place, *_room(timestep.available)]

  def observation(self, timestep: base.TimeStep, action: str) -> list[str]:
    """What `action` revealed, at most nine words; often none.

    Types of the objects now in sight, each once, in the order they are told;
    `closed` where a closed door hides them, `nothing` where there are none and
    `invalid` where the action was not understood. An object of a type that is
    not known is noticed where it can be taken.
    """
    if timestep.status == base.Status.INVALID_ACTION:
      return ['invalid']
    verb, *names = split_command(action)
    if verb not in _REVEALING:
      return []
    if names and f'open {names[0]}' in timestep.available:
      return ['closed']
    seen = dict.fromkeys(_object_types(timestep.observation))
    if verb in ('go', 'open'):  # What stands beside it is within reach as well.
      seen.update(dict.fromkeys(_takeable(timestep.available)))
    return list(seen)[:_MAX_NAMES] or ['nothing']

  def action(self, command: str, available: Sequence[str]) -> tuple[str, ...]:
    """The words, at most three, that stand for one of `available`.

    `go to cabinet 3` is `(go, cabinet, 3)`, `take mug 2 from shelf 1` is
    `(take, mug, 2)`, `move mug 2 to drawer 5` is `(put, drawer, 5)`: what is
    left out follows from where the agent stands and what it holds. Where the
    same object can be taken from several receptacles, `take` is the first in
    the order of `available`, `take2` the second.
    """
    words = _command_words(command)
    if words[0] != 'take':
      return words
    stem = command.partition(' from ')[0] + ' from '
    before = 0
    for other in available:
      if other == command:
        break
      before += other.startswith(stem)
    return (_nth_take(before),) + words[1:]

  def commands(self, available: Sequence[str]) -> dict[tuple[str, ...], str]:
    """Maps the words of every admissible command back to the command.

    No two commands share their words and none begins with all of another's.
    """
    return dict(_commands(tuple(available)))


@functools.lru_cache(maxsize=4096)
def _room(available: tuple[str, ...]) -> tuple[str, ...]:
  counts = collections.Counter(
      _command_words(command)[1]
      for command in available if command.startswith('go to '))
  pairs = ((name, str(count)) for name, count in sorted(counts.items()))
  return tuple(word for pair in pairs for word in pair)


@functools.lru_cache(maxsize=65536)
def _object_types(text: str) -> tuple[str, ...]:
  names = _NAME.findall(text)
  return tuple(name for name in names if name in _OBJECT_SET)


def _takeable(available: Sequence[str]) -> list[str]:
  return [command.split(' ', 2)[1]
          for command in available if command.startswith('take ')]


@functools.lru_cache(maxsize=65536)
def _command_words(command: str) -> tuple[str, ...]:
  """The command's words where no other command competes for them."""
  verb, *names = split_command(command)
  if len(names) < _NUM_NAMES.get(verb, 0):
    raise ValueError(
        f'expected {verb} with {_NUM_NAMES[verb]} names such as "mug 2", as in '
        f'ALFWorld, got {command!r}; the phrasebook cannot put it in few words')
  if verb == 'move':
    words = ('put', names[1])
  elif verb in ('heat', 'clean', 'cool'):
    words = (verb, names[1])
  else:
    words = (verb, *names[:1])
  return tuple(' '.join(words).split(' '))


@functools.lru_cache(maxsize=4096)
def _commands(
    available: tuple[str, ...]) -> tuple[tuple[tuple[str, ...], str], ...]:
  taken = collections.Counter()
  pairs = []
  for command in available:
    words = _command_words(command)
    if words[0] == 'take':
      before = taken[words]
      taken[words] += 1
      words = (_nth_take(before),) + words[1:]
    pairs.append((words, command))
  return tuple(pairs)


def _nth_take(index: int) -> str:
  return 'take' if index == 0 else f'take{index + 1}'

"""Finds a shortest way to win a household game.

A plan is a chain of errands: at one receptacle, do one thing. Between errands
the agent walks, and opens a door where the errand needs it open. `shortest`
searches all chains that can win and keeps the shortest. Why none shorter
exists:

- Looking, examining, closing and slicing, a treatment the goal does not ask
  for, and moving any object that no chain moves can be cut out of a winning
  plan: they never make true what a remaining action or the goal needs, as doors
  need only be open and hands only be empty, and cutting them keeps both.
- Walking costs one turn between any two places. So a plan has at least as many
  walks as its errands, in their order, change place; a chain has no more. It
  opens each door once, and only doors that a necessary errand needs open.
- Each errand of a chain is necessary, and in this order: the object has to be
  taken before it is treated, and treated while in hand, before it is put down
  for good. The light may as well be switched on last, since the agent has to
  stand there at the end anyway.
- Two objects: the hands hold one, so each is carried to the receptacle on its
  own. Setting one down on the way costs two turns more (put and take) and saves
  no walk: it must still be carried in after the other, or before it.
"""

from collections.abc import Iterable, Iterator
import itertools
from typing import NamedTuple

from environments.alfworld import game as game_lib
from environments.alfworld import goals

_TREATMENTS = {
    # Ability, state's set, command and the furniture it takes.
    goals.CLEAN: ('cleanable', 'clean', 'clean', ('sinkbasin', 'sink')),
    goals.HEAT: ('heatable', 'hot', 'heat', ('microwave',)),
    goals.COOL: ('coolable', 'cool', 'cool', ('fridge',)),
}


class Errand(NamedTuple):
  """One thing to do at one receptacle.

  Attributes:
    receptacle: index of it.
    door: whether its door has to be open, if it has one.
    command: what to do there.
  """

  receptacle: int
  door: bool
  command: str


Chain = tuple[Errand, ...]


def shortest(game: game_lib.Game) -> tuple[str, ...]:
  """Returns commands that win from the start, as few as possible.

  Among several of that length it is the first in alphabetical order, so that
  equal games have equal plans. It is empty if the game is won already.

  Raises:
    ValueError: if the game cannot be won.
  """
  plans = [_commands(game, chain) for chain in _chains(game)]
  if not plans:
    raise ValueError(f'{game.name}: cannot be won: {game.goal} has no object, '
                     'receptacle or appliance that would fulfil it')
  return min(plans, key=lambda plan: (len(plan), plan))


def _chains(game: game_lib.Game) -> Iterable[Chain]:
  kind = game.goal.task_type
  if kind == goals.LOOK_IN_LIGHT:
    return _lighting(game)
  if kind == goals.PICK_TWO:
    return _gathering(game)
  return _bringing(game)


def _commands(game: game_lib.Game, chain: Chain) -> tuple[str, ...]:
  """Returns the chain's commands with the walks and doors in between."""
  location, opened = game.initial.location, set(game.initial.opened)
  commands = []
  for receptacle, door, command in chain:
    there = game.receptacles[receptacle]
    if there.location != location:
      location = there.location
      commands.append(f'go to {there.name}')
    if door and there.openable and receptacle not in opened:
      opened.add(receptacle)
      commands.append(f'open {there.name}')
    commands.append(command)
  return tuple(commands)


def _bringing(game: game_lib.Game) -> Iterator[Chain]:
  """Chains that treat an object where asked, and bring it where asked."""
  treated = _TREATMENTS.get(game.goal.task_type)
  for thing in _targets(game):
    if treated and not getattr(game.objects[thing], treated[0]):
      continue
    where = _holders(game, thing)
    done = not treated or thing in getattr(game.initial, treated[1])
    if done and not where.isdisjoint(_destinations(game)):
      yield ()
    treating = [()] if done else list(_treating(game, thing, treated))
    for taking, how in itertools.product(_taking(game, thing), treating):
      # Taken out of one receptacle it stays in any other that it lay in too.
      rest = where - {taking.receptacle}
      puts = _putting(game, thing)
      ends = [()] if rest & _destinations(game) else [(put,) for put in puts]
      yield from ((taking, *how, *end) for end in ends)


def _treating(game: game_lib.Game, thing: int, treated) -> Iterator[Chain]:
  _, _, verb, furniture = treated
  for kind in furniture:
    for station in game.receptacles_by_type.get(kind, ()):
      name = game.receptacles[station].name
      command = f'{verb} {game.objects[thing].name} with {name}'
      yield (Errand(station, False, command),)


def _gathering(game: game_lib.Game) -> Iterator[Chain]:
  """Chains that bring two objects of a type to one receptacle."""
  targets = list(_targets(game))
  for receptacle in _destinations(game):
    inside = [thing for thing in _all_targets(game)
              if receptacle in _holders(game, thing)]
    missing = max(0, 2 - len(inside))
    outside = [thing for thing in targets if thing not in inside]
    for things in itertools.permutations(outside, missing):
      trips = [list(_trips(game, thing, receptacle)) for thing in things]
      for chain in itertools.product(*trips):
        yield tuple(itertools.chain.from_iterable(chain))


def _trips(game: game_lib.Game, thing: int, receptacle: int) -> Iterator[Chain]:
  for put in _putting(game, thing):
    if put.receptacle == receptacle:
      yield from ((taking, put) for taking in _taking(game, thing))


def _lighting(game: game_lib.Game) -> Iterator[Chain]:
  """Chains that bring an object under a lamp and switch it on."""
  for thing in _targets(game):
    for lamp in game.objects_by_type.get(game.goal.lamp_type, ()):
      if not game.objects[lamp].toggleable:
        continue
      command = f'use {game.objects[lamp].name}'
      for taking in _taking(game, thing):
        for holder in _holders(game, lamp):
          yield taking, Errand(holder, False, command)


def _all_targets(game: game_lib.Game) -> list[int]:
  return sorted(game.objects_by_type.get(game.goal.object_type, ()))


def _targets(game: game_lib.Game) -> Iterator[int]:
  return (thing for thing in _all_targets(game)
          if game.objects[thing].pickupable)


def _destinations(game: game_lib.Game) -> frozenset[int]:
  return game.receptacles_by_type.get(
      game.goal.receptacle_type, frozenset())


def _holders(game: game_lib.Game, thing: int) -> frozenset[int]:
  """The receptacles, usually one, that the object lies in at the start."""
  contents = game.initial.contents
  return frozenset(r for r, things in enumerate(contents) if thing in things)


def _taking(game: game_lib.Game, thing: int) -> Iterator[Errand]:
  for holder in sorted(_holders(game, thing)):
    names = game.objects[thing].name, game.receptacles[holder].name
    yield Errand(holder, True, 'take {} from {}'.format(*names))


def _putting(game: game_lib.Game, thing: int) -> Iterator[Errand]:
  for receptacle in sorted(_destinations(game)):
    if game.fits(receptacle, thing):
      names = game.objects[thing].name, game.receptacles[receptacle].name
      yield Errand(receptacle, True, 'move {} to {}'.format(*names))

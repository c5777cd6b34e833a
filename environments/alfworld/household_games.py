"""Draws household games: a goal, a room that can fulfil it, and its contents.

Every drawn game can be won, by construction: what is asked for lies in the
room, its destination may hold it, and the furniture that treats it is there.
None is won from the start: nothing of the asked type lies in any receptacle of
the asked type, or nothing is treated or lit yet.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import functools
import random

from environments.alfworld import household_layout
from environments.alfworld import household_rooms
from environments.alfworld import household_text

KINDS = ('put', 'look', 'clean', 'heat', 'cool', 'two')

# A treatment needs this ability, sets this predicate, at this furniture.
_TREATMENTS: Mapping[str, tuple[str, str, str]] = {
    'clean': ('cleanable', 'isClean', 'SinkBasin'),
    'heat': ('heatable', 'isHot', 'Microwave'),
    'cool': ('coolable', 'isCool', 'Fridge'),
}

# How a task may be said; {o} is what, {r} where to, or the lamp.
_SENTENCES: Mapping[str, tuple[str, ...]] = {
    'put': ('put one {o} at the {r}.', 'find a {o}, then put it at the {r}.'),
    'two': ('put two {o} things at the same {r}.',
            'find two {o} things for one {r}.'),
    'clean': ('put a clean {o} at the {r}.',
              'clean one {o}, then put it at the {r}.'),
    'heat': ('put a hot {o} at the {r}.',
             'heat one {o}, then put it at the {r}.'),
    'cool': ('put a cool {o} at the {r}.',
             'cool one {o}, then put it at the {r}.'),
    'look': ('look at a {o} in the light of the {r}.',
             'examine one {o} by the light of the {r}.'),
}

_HELD_OUT_SHARE = 0.15
_MOST_ALIKE = 3  # Objects of one type that nobody asks for.
_LAMP_CHANCE = 0.5
_MAX_DRAWS = 1000


@dataclasses.dataclass(frozen=True)
class Sizes:
  """How big the games are; both ends of each range are included.

  Attributes:
    num_receptacles: least and most receptacles of a room, within 5 and 20.
    num_objects: least and most objects in it, within 4 and 60. A room that has
      few kinds of things (a bathroom, say) stops at three of each kind.
  """

  num_receptacles: tuple[int, int] = (5, 10)
  num_objects: tuple[int, int] = (6, 16)

  def __post_init__(self):
    _check_range('num_receptacles', self.num_receptacles, 5, 20)
    _check_range('num_objects', self.num_objects, 4, 60)


@dataclasses.dataclass(frozen=True)
class Goal:
  """What is asked for: a kind of task, an object type, and where to."""

  kind: str
  object: str
  place: str

  @property
  def held_out(self) -> bool:
    """Whether only `valid_unseen` may ask for it."""
    return _held_out(self.kind, self.object, self.place)


@dataclasses.dataclass(frozen=True)
class Placed:
  """An object and the receptacle it lies in."""

  type: str
  id: str
  receptacle: household_layout.Receptacle


@dataclasses.dataclass(frozen=True)
class Scene:
  """A drawn game, before it is put in words.

  Attributes:
    goal: what is asked for.
    sentence: the same as the agent is told it.
    layout: the room.
    objects: what lies in it.
  """

  goal: Goal
  sentence: str
  layout: household_layout.Layout
  objects: tuple[Placed, ...]


def draw(rng: random.Random, split: str, sizes: Sizes) -> Scene:
  """Returns a random scene that `split` may use.

  Kinds of task come equally often; within a kind, so do the goals that the
  room allows and the split may ask for.

  Raises:
    ValueError: if no room of these sizes gave such a goal.
  """
  kind = rng.choice(KINDS)
  rooms = _rooms(kind)
  for _ in range(_MAX_DRAWS):
    layout = household_layout.draw(
        rng, rng.choice(rooms), rng.randint(*sizes.num_receptacles))
    if layout.split != split:
      continue
    goals = _goals(kind, layout, split == 'valid_unseen')
    if goals:
      goal = rng.choice(goals)
      return Scene(goal, _sentence(rng, goal), layout,
                   _fill(rng, goal, layout, rng.randint(*sizes.num_objects)))
  raise ValueError(
      f'no goal of kind {kind!r} for split {split!r} in {_MAX_DRAWS} rooms of '
      f'{sizes.num_receptacles} receptacles; allow larger rooms')


@functools.cache
def _rooms(kind: str) -> tuple[str, ...]:
  return tuple(
      room for room, furniture in household_rooms.ROOMS.items()
      if (kind != 'look' or household_rooms.LAMPS[room])
      and (kind not in _TREATMENTS or _TREATMENTS[kind][2] in furniture)
      and _askable(kind, room))


@functools.cache
def _askable(kind: str, room: str) -> tuple[str, ...]:
  """Object types of the room that the kind of task can ask for."""
  need = _TREATMENTS[kind][0] if kind in _TREATMENTS else 'pickupable'
  return tuple(type_ for type_ in household_rooms.STOCK[room]
               if need in household_rooms.THINGS[type_].abilities)


def _goals(kind: str, layout: household_layout.Layout,
           held_out: bool) -> list[Goal]:
  goals = [Goal(kind, object_, place)
           for object_ in _askable(kind, layout.room)
           for place in _destinations(kind, object_, layout)]
  return [goal for goal in goals if goal.held_out == held_out]


def _destinations(kind: str, object_: str,
                  layout: household_layout.Layout) -> list[str]:
  """Types the object may be asked into, given that it lies in another."""
  possible = [type_ for type_ in household_rooms.THINGS[object_].places
              if type_ in layout.types]
  if len(possible) < 2:
    return []
  if kind == 'look':
    return [lamp for lamp in household_rooms.LAMPS[layout.room]
            if _can_lie(lamp, layout)]
  station = _TREATMENTS[kind][2] if kind in _TREATMENTS else None
  return [type_ for type_ in possible if type_ != station]


def _can_lie(type_: str, layout: household_layout.Layout) -> bool:
  return not layout.types.isdisjoint(household_rooms.THINGS[type_].places)


@functools.cache
def _held_out(*triple: str) -> bool:
  return household_layout.hash_share(triple) < _HELD_OUT_SHARE


def _sentence(rng: random.Random, goal: Goal) -> str:
  return rng.choice(_SENTENCES[goal.kind]).format(
      o=goal.object.lower(), r=goal.place.lower())


def _fill(rng: random.Random, goal: Goal, layout: household_layout.Layout,
          count: int) -> tuple[Placed, ...]:
  """Returns `count` objects in their places, the asked for among them."""
  targets = rng.randint(2, 3) if goal.kind == 'two' else rng.randint(1, 2)
  types = [goal.object] * targets + _lamps(rng, goal, layout)
  types += _others(rng, goal, layout, count - len(types))
  ids = set()
  return tuple(_place(rng, type_, goal, layout, ids) for type_ in types)


def _lamps(rng: random.Random, goal: Goal,
           layout: household_layout.Layout) -> list[str]:
  if goal.kind == 'look':
    return [goal.place]
  lamps = [lamp for lamp in household_rooms.LAMPS[layout.room]
           if _can_lie(lamp, layout)]
  return [rng.choice(lamps)] if lamps and rng.random() < _LAMP_CHANCE else []


def _others(rng: random.Random, goal: Goal, layout: household_layout.Layout,
            count: int) -> list[str]:
  choices = [type_ for type_ in household_rooms.STOCK[layout.room]
             if type_ != goal.object and _can_lie(type_, layout)]
  return rng.sample(choices * _MOST_ALIKE,
                    max(0, min(count, _MOST_ALIKE * len(choices))))


def _place(rng: random.Random, type_: str, goal: Goal,
           layout: household_layout.Layout, ids: set[str]) -> Placed:
  places = household_rooms.THINGS[type_].places
  fulfils = type_ == goal.object and goal.kind in ('put', 'two')
  possible = [piece for piece in layout.receptacles if piece.type in places
              and not (fulfils and piece.type == goal.place)]
  receptacle = rng.choices(possible, [places[p.type] for p in possible])[0]
  return Placed(type_, _fresh_id(rng, type_, receptacle, ids), receptacle)


def _fresh_id(rng: random.Random, type_: str,
              receptacle: household_layout.Receptacle, ids: set[str]) -> str:
  """Returns an id a little aside of the receptacle's, and adds it to `ids`."""
  x, y, z = receptacle.position
  while True:
    spot = x + rng.randint(-20, 20), y + 2, z + rng.randint(-20, 20)
    id_ = household_layout.object_id(type_, spot)
    if id_ not in ids:
      ids.add(id_)
      return id_


def payload(scene: Scene, name: str) -> dict[str, object]:
  """Returns the game as the mapping a game.tw-pddl file holds, yet unplanned.

  `walkthrough` is empty: the shortest is found by playing the game.
  """
  return {
      'pddl_domain': household_text.DOMAIN,
      'grammar': household_text.grammar(f'Your task is to: {scene.sentence}'),
      'pddl_problem': _problem(scene, name),
      'solvable': True,
      'walkthrough': [],
  }


def _problem(scene: Scene, name: str) -> str:
  facts = '\n'.join(f'    ({fact})' for fact in _facts(scene))
  objects = '\n'.join(f'    {line}' for line in _declarations(scene))
  return (f'(define (problem {name})\n  (:domain alfred)\n'
          f'  (:objects\n    agent1 - agent\n{objects})\n'
          f'  (:init\n{facts})\n  (:goal {_goal_text(scene.goal)}))\n')


_START = household_layout.location_id((0, 0, 0))

# Types that the domain's actions mention, whether or not the room has them.
_NAMED_IN_DOMAIN = (
    'ButterKnifeType - otype', 'KnifeType - otype', 'SinkType - otype',
    'FridgeType - rtype', 'MicrowaveType - rtype', 'SinkBasinType - rtype')


def _declarations(scene: Scene) -> Iterable[str]:
  pieces = scene.layout.receptacles
  lines = set(_NAMED_IN_DOMAIN)
  lines.update(f'{thing.type}Type - otype' for thing in scene.objects)
  lines.update(f'{piece.type}Type - rtype' for piece in pieces)
  yield from sorted(lines)
  yield from sorted(f'{thing.id} - object' for thing in scene.objects)
  yield from (f'{piece.id} - receptacle' for piece in pieces)
  locations = {piece.location for piece in pieces} | {_START}
  yield from sorted(f'{location} - location' for location in locations)


def _facts(scene: Scene) -> Iterable[str]:
  yield f'atLocation agent1 {_START}'
  for piece in scene.layout.receptacles:
    yield f'receptacleType {piece.id} {piece.type}Type'
    yield f'receptacleAtLocation {piece.id} {piece.location}'
    if piece.type in household_rooms.OPENABLE:
      yield f'openable {piece.id}'
  for type_ in sorted({thing.type for thing in scene.objects}):
    for place in household_rooms.THINGS[type_].places:
      if place in scene.layout.types:
        yield f'canContain {place}Type {type_}Type'
  for thing in scene.objects:
    yield f'objectType {thing.id} {thing.type}Type'
    yield f'inReceptacle {thing.id} {thing.receptacle.id}'
    yield f'objectAtLocation {thing.id} {thing.receptacle.location}'
    for ability in household_rooms.THINGS[thing.type].abilities:
      yield f'{ability} {thing.id}'


_LIGHT_GOAL = """(and
    (exists (?ot - object ?r - receptacle ?a - agent ?l - location)
      (and (objectType ?ot {r}Type) (toggleable ?ot) (isToggled ?ot)
           (receptacleAtLocation ?r ?l) (atLocation ?a ?l)
           (inReceptacle ?ot ?r)))
    (exists (?o - object ?a - agent)
      (and (objectType ?o {o}Type) (holds ?a ?o))))"""

_TWO_GOAL = """(and
    (exists (?r - receptacle)
      (exists (?o1 - object)
        (and (objectType ?o1 {o}Type) (receptacleType ?r {r}Type)
             (inReceptacle ?o1 ?r)
             (exists (?o2 - object)
               (and (not (= ?o1 ?o2)) (objectType ?o2 {o}Type)
                    (receptacleType ?r {r}Type) (inReceptacle ?o2 ?r)))))))"""

_PUT_GOAL = """(and
    (exists (?r - receptacle)
      (exists (?o - object)
        (and {treated}(inReceptacle ?o ?r) (objectType ?o {o}Type)
             (receptacleType ?r {r}Type)))))"""


def _goal_text(goal: Goal) -> str:
  treated = ''
  if goal.kind in _TREATMENTS:
    ability, done, _ = _TREATMENTS[goal.kind]
    treated = f'({ability} ?o) ({done} ?o) '
  template = {'look': _LIGHT_GOAL, 'two': _TWO_GOAL}.get(goal.kind, _PUT_GOAL)
  return template.format(o=goal.object, r=goal.place, treated=treated)


def _check_range(name: str, given: tuple[int, int], low: int, high: int):
  least, most = given
  if not low <= least <= most <= high:
    raise ValueError(
        f'expected {name} = (least, most) with {low} <= least <= most <= '
        f'{high}, got {given}')

"""A scripted searcher: demonstrations for the household games.

It sees what any agent sees, the observation and the admissible commands, and
knows beforehand only how often a type of object lies in a type of receptacle,
as counted in training games. It goes to the likeliest place first, opens what
is shut, takes what is asked for, treats it and brings it where it belongs.

`start`, `observe` and `act` keep what an episode has shown in a value, so that
the searcher may take over at any point of an episode that another policy began.
"""

import collections
from collections.abc import Iterable, Mapping, Sequence
import dataclasses

import numpy as np

from environments import base
from environments.alfworld import game as game_lib
from environments.alfworld import terse

_STATIONS = {'clean': 'sinkbasin', 'heat': 'microwave', 'cool': 'fridge'}
_SHUT = frozenset(('cabinet', 'drawer', 'fridge', 'microwave', 'safe'))
_UNSEEN_RATE = 0.003  # For pairs that no training game had.


@dataclasses.dataclass(frozen=True)
class Likelihoods:
  """How often objects lie where, counted in games.

  Attributes:
    rates: by object type and receptacle type, objects of the type in one such
      receptacle, on average over the games that have the object at all.
  """

  rates: Mapping[str, Mapping[str, float]]

  def rate(self, object_type: str, receptacle_type: str) -> float:
    """Returns objects per receptacle; small, not zero, where none was seen."""
    rates = self.rates.get(object_type, {})
    return rates.get(receptacle_type, 0.0) + _UNSEEN_RATE


def fit(games: Iterable[game_lib.Game]) -> Likelihoods:
  """Counts where the objects of `games` lie at the start.

  Raises:
    ValueError: if there are no games.
  """
  found = collections.defaultdict(collections.Counter)
  stands = collections.defaultdict(collections.Counter)
  for game in games:
    contents = _contents(game)
    receptacles = collections.Counter(map(_type, contents))
    here = {_type(thing) for things in contents.values() for thing in things}
    for object_type in here:
      stands[object_type].update(receptacles)
    for receptacle, things in contents.items():
      for thing in things:
        found[_type(thing)][_type(receptacle)] += 1
  if not stands:
    raise ValueError('expected at least one game to count objects in, got none')
  return Likelihoods({
      thing: {place: count / stands[thing][place]
              for place, count in counts.items()}
      for thing, counts in found.items()})


@dataclasses.dataclass(frozen=True)
class Memory:
  """What an episode has shown so far.

  Attributes:
    goal: what is asked for.
    places: every receptacle of the room.
    searched: the receptacles whose contents were seen.
    known: by receptacle, the objects of the asked type it holds.
    treated: objects that were cleaned, heated or cooled as asked.
    lamp: a receptacle where the asked lamp stands, once seen.
    here: the receptacle last gone to.
    holding: the object in hand.
  """

  goal: terse.Goal
  places: tuple[str, ...]
  searched: frozenset[str] = frozenset()
  known: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)
  treated: frozenset[str] = frozenset()
  lamp: str | None = None
  here: str | None = None
  holding: str | None = None

  @property
  def destination(self) -> str | None:
    """For two objects, where one of them lies already."""
    if self.goal.kind != 'two':
      return None
    return next((place for place, things in self.known.items()
                 if things and _type(place) == self.goal.place), None)


def start(timestep: base.TimeStep) -> Memory:
  """Returns the memory of an episode that begins with `timestep`."""
  places = tuple(command.removeprefix('go to ')
                 for command in timestep.available
                 if command.startswith('go to '))
  return Memory(terse.goal_of(timestep), places)


def observe(memory: Memory, command: str, timestep: base.TimeStep) -> Memory:
  """Returns the memory after `command`, whoever chose it, led to `timestep`."""
  if timestep.status != base.Status.OK:
    return memory
  verb, *names = terse.split_command(command)
  if verb == 'take':
    return _without(memory, *names)
  if verb == 'move':
    memory = _with(memory, names[1], {names[0]})
    return dataclasses.replace(memory, holding=None)
  if verb == memory.goal.kind and verb in _STATIONS:
    return dataclasses.replace(memory, treated=memory.treated | {names[0]})
  if verb == 'go':
    memory = dataclasses.replace(memory, here=names[0])
  if verb in ('go', 'open', 'examine') and names[0] in memory.places:
    return _look(memory, names[0], timestep)
  return memory


def act(memory: Memory, timestep: base.TimeStep, likelihoods: Likelihoods,
        rng: np.random.Generator) -> str:
  """Returns the searcher's next command, one of `timestep.available`.

  Ties are broken by `rng`.
  """
  available = frozenset(timestep.available)
  if memory.holding is None:
    return _fetch(memory, available, likelihoods, rng)
  if _type(memory.holding) != memory.goal.object:
    return _drop(memory, available, rng)
  if memory.goal.kind == 'look':
    return _light(memory, available, likelihoods, rng)
  if memory.goal.kind in _STATIONS and memory.holding not in memory.treated:
    return _treat(memory, available, rng)
  return _deliver(memory, available, rng)


class Expert:
  """The searcher with its likelihoods, and as much noise as is wanted.

  Attributes:
    likelihoods: as counted by `fit`.
    noise: probability that a turn goes to, or opens, something at random.
  """

  def __init__(self, likelihoods: Likelihoods, noise: float = 0.1):
    if not 0.0 <= noise <= 1.0:
      raise ValueError(f'expected noise within 0 and 1, got {noise}')
    self.likelihoods = likelihoods
    self.noise = noise

  def act(self, memory: Memory, timestep: base.TimeStep,
          rng: np.random.Generator) -> str:
    """Returns the next command; consumes `rng`."""
    if rng.random() < self.noise:
      exploring = [command for command in timestep.available
                   if command.startswith(('go to ', 'open '))]
      if exploring:
        return _any(exploring, rng)
    return act(memory, timestep, self.likelihoods, rng)

  def play(self, environment: base.Environment, task: base.Task | str,
           rng: np.random.Generator, max_turns: int = 50,
           ) -> tuple[list[tuple[base.TimeStep, str]], base.TimeStep]:
    """Plays one episode.

    Returns:
      The (TimeStep, command) pairs in order, and the last TimeStep.
    """
    state, timestep = environment.reset(task)
    memory = start(timestep)
    turns = []
    while not timestep.done and len(turns) < max_turns:
      command = self.act(memory, timestep, rng)
      turns.append((timestep, command))
      parent, (state, timestep) = state, environment.step(state, command)
      environment.release(parent)
      memory = observe(memory, command, timestep)
    environment.release(state)
    return turns, timestep


def _fetch(memory: Memory, available: frozenset[str],
           likelihoods: Likelihoods, rng: np.random.Generator) -> str:
  """Takes what is asked for, goes where it was seen, or searches."""
  kept = memory.destination
  wanted = [(thing, place) for place, things in sorted(memory.known.items())
            for thing in sorted(things) if place != kept]
  takes = [f'take {thing} from {place}' for thing, place in wanted]
  reachable = [command for command in takes if command in available]
  if reachable:
    return _any(reachable, rng)
  if wanted:
    return _reach(_any([place for _, place in wanted], rng), available, rng)
  return _search(memory, memory.goal.object, available, likelihoods, rng)


def _search(memory: Memory, object_type: str, available: frozenset[str],
            likelihoods: Likelihoods, rng: np.random.Generator) -> str:
  """Goes on to the place that promises most per turn spent on it."""
  places = [place for place in memory.places if place not in memory.searched]
  places = places or list(memory.places)
  scores = np.array([
      likelihoods.rate(object_type, _type(place)) / _turns(place, available)
      for place in places])
  best = np.flatnonzero(scores >= scores.max() * (1 - 1e-9))
  return _reach(places[rng.choice(best)], available, rng)


def _turns(place: str, available: frozenset[str]) -> int:
  """Turns until the contents of the place are seen, as far as names tell."""
  return max(1, (f'go to {place}' in available) + (_type(place) in _SHUT))


def _light(memory: Memory, available: frozenset[str],
           likelihoods: Likelihoods, rng: np.random.Generator) -> str:
  switches = [command for command in sorted(available)
              if command.startswith(f'use {memory.goal.place} ')]
  if switches:
    return _any(switches, rng)
  if memory.lamp is not None:
    return _reach(memory.lamp, available, rng)
  return _search(memory, memory.goal.place, available, likelihoods, rng)


def _treat(memory: Memory, available: frozenset[str],
           rng: np.random.Generator) -> str:
  stem = f'{memory.goal.kind} {memory.holding} with '
  possible = [command for command in sorted(available)
              if command.startswith(stem)]
  if possible:
    return _any(possible, rng)
  return _go_to_type(memory, _STATIONS[memory.goal.kind], available, rng)


def _deliver(memory: Memory, available: frozenset[str],
             rng: np.random.Generator) -> str:
  place = memory.destination
  if place is not None:
    put = f'move {memory.holding} to {place}'
    return put if put in available else _reach(place, available, rng)
  stem = f'move {memory.holding} to {memory.goal.place} '
  possible = [command for command in sorted(available)
              if command.startswith(stem)]
  if possible:
    return _any(possible, rng)
  return _go_to_type(memory, memory.goal.place, available, rng)


def _drop(memory: Memory, available: frozenset[str],
          rng: np.random.Generator) -> str:
  """Gets rid of what another policy picked up."""
  possible = [command for command in sorted(available)
              if command.startswith('move ')]
  return _any(possible or _walks(available), rng)


def _go_to_type(memory: Memory, receptacle_type: str,
                available: frozenset[str], rng: np.random.Generator) -> str:
  places = [p for p in memory.places if _type(p) == receptacle_type]
  if not places:
    return _any(_walks(available), rng)
  if memory.here in places and f'open {memory.here}' in available:
    return f'open {memory.here}'
  return _reach(_any(places, rng), available, rng)


def _reach(place: str, available: frozenset[str],
           rng: np.random.Generator) -> str:
  """Goes to the place, or opens or examines it where the agent is there."""
  for verb in ('go to', 'open', 'examine'):
    if f'{verb} {place}' in available:
      return f'{verb} {place}'
  return _any(_walks(available), rng)


def _walks(available: frozenset[str]) -> list[str]:
  walks = [c for c in sorted(available) if c.startswith('go to ')]
  return walks or sorted(available)


def _look(memory: Memory, place: str, timestep: base.TimeStep) -> Memory:
  """Notes what is now in sight at `place` and within reach beside it."""
  goal = memory.goal
  if any(c.startswith(f'use {goal.place} ') for c in timestep.available):
    memory = dataclasses.replace(memory, lamp=memory.here)
  if f'open {place}' not in timestep.available:
    seen = terse.named(timestep.observation, goal.object) - {memory.holding}
    known = {**memory.known, place: seen}
    memory = dataclasses.replace(
        memory, searched=memory.searched | {place}, known=known)
  stem = f'take {goal.object} '
  for command in timestep.available:
    if command.startswith(stem):
      _, thing, beside = terse.split_command(command)
      memory = _with(memory, beside, {thing})
  return memory


def _with(memory: Memory, place: str, things: Iterable[str]) -> Memory:
  asked = {thing for thing in things if _type(thing) == memory.goal.object}
  known = {**memory.known, place: memory.known.get(place, frozenset()) | asked}
  return dataclasses.replace(memory, known=known)


def _without(memory: Memory, thing: str, place: str) -> Memory:
  """The memory after taking `thing` from `place`."""
  left = memory.known.get(place, frozenset()) - {thing}
  return dataclasses.replace(
      memory, holding=thing, known={**memory.known, place: left})


def _any(choices: Sequence[str], rng: np.random.Generator) -> str:
  return choices[rng.integers(len(choices))]


def _type(name: str) -> str:
  return name.partition(' ')[0]


def _contents(game: game_lib.Game) -> dict[str, tuple[str, ...]]:
  """Returns what each receptacle holds at the start, by display names."""
  return {
      receptacle.name: tuple(game.objects[thing].name for thing in things)
      for receptacle, things in zip(game.receptacles, game.initial.contents)}

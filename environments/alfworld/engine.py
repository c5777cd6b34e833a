"""Plays household games: what can be done, what it does, what is told.

States are values: `step` returns a new one. The rules are those of domain.py;
the sentences are the game's own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import functools
from typing import Any, NamedTuple

from environments.alfworld import domain
from environments.alfworld import game as game_lib
from environments.alfworld import goals
from environments.alfworld import state as state_lib

Game = game_lib.Game
State = state_lib.State

NOTHING_HAPPENS = 'Nothing happens.'


class Action(NamedTuple):
  """An action of the domain with what it is done to.

  Attributes:
    name: the action's name in domain.RULES.
    arguments: an index per parameter of the rule, in its order.
  """

  name: str
  arguments: tuple[int, ...]


Actions = Mapping[str, Action]  # By command.


def initial(game: Game) -> State:
  """Returns the state in which the game begins."""
  return game.initial


def intro(game: Game, state: State) -> str:
  """Returns what the agent is told on entering the game."""
  return game.grammar.intro(game, state)


def step(game: Game, state: State, command: str) -> tuple[State, str]:
  """Carries out a command.

  Args:
    game: what is played.
    state: where it stands; it stays as it is.
    command: one of `admissible`; blanks around it do not matter.

  Returns:
    The state after it and what the agent is told. Any other command leaves the
    state as it is and tells NOTHING_HAPPENS.
  """
  action = _find(game, state, command.strip())
  if action is None:
    return state, NOTHING_HAPPENS
  after = _EFFECTS[action.name](state, action.arguments)
  text = game.grammar.feedback[action.name]
  return after, text(game, after, action.arguments)


def understands(game: Game, state: State, command: str) -> bool:
  """Whether `step` would carry the command out."""
  return _find(game, state, command.strip()) is not None


def admissible(game: Game, state: State) -> tuple[str, ...]:
  """Returns the commands that are understood in the state, sorted."""
  commands = set(_walks(game, state.location))
  for part in _parts(game, state):
    commands.update(part)  # A lamp in two receptacles is used by one command.
  return tuple(sorted(commands))


def actions(game: Game, state: State) -> Actions:
  """Returns the admissible actions by command; see `admissible`."""
  return {command: _find(game, state, command)
          for command in admissible(game, state)}


def won(game: Game, state: State) -> bool:
  """Whether the goal is reached."""
  goal = game.goal
  things = game.wanted_objects
  if goal.task_type == goals.LOOK_IN_LIGHT:
    return state.holding in things and _is_lit(game, state)
  treated = _TREATED.get(goal.task_type)
  if treated:
    things &= state[treated]
    if not things:
      return False
  enough = 2 if goal.task_type == goals.PICK_TWO else 1
  contents = state.contents
  return any(
      len(things.intersection(contents[receptacle])) >= enough
      for receptacle in game.receptacles_by_type[goal.receptacle_type])


# The state's set that a goal wants its object to be in.
_TREATED = {
    goals.CLEAN: State._fields.index('clean'),
    goals.HEAT: State._fields.index('hot'),
    goals.COOL: State._fields.index('cool')}


def _is_lit(game: Game, state: State) -> bool:
  """Whether a lamp of the goal's type was switched on where the agent is."""
  lamps = game.wanted_lamps & state.toggled
  return bool(lamps) and any(
      not lamps.isdisjoint(state.contents[receptacle])
      for receptacle in game.receptacles_at.get(state.location, ()))


# ------------------------------------------------------------ what it does


def _nothing(state: State, arguments: tuple[int, ...]) -> State:
  del arguments
  return state


def _go(state: State, arguments: tuple[int, ...]) -> State:
  return state._replace(location=arguments[2])


def _open(state: State, arguments: tuple[int, ...]) -> State:
  return state._replace(opened=state.opened | {arguments[2]})


def _close(state: State, arguments: tuple[int, ...]) -> State:
  return state._replace(opened=state.opened - {arguments[2]})


def _take(state: State, arguments: tuple[int, ...]) -> State:
  _, location, thing, receptacle = arguments
  left = tuple([one for one in state.contents[receptacle] if one != thing])
  return state._replace(
      holding=thing, contents=_with(state.contents, receptacle, left),
      places=state.places - {(thing, location)},
      taken=state.taken | {(thing, receptacle)})


def _put(state: State, arguments: tuple[int, ...]) -> State:
  _, location, thing, receptacle, _, _ = arguments
  inside = tuple(sorted({*state.contents[receptacle], thing}))
  return state._replace(
      holding=None, contents=_with(state.contents, receptacle, inside),
      places=state.places | {(thing, location)},
      taken=state.taken - {(thing, receptacle)})


def _with(contents: tuple[tuple[int, ...], ...], receptacle: int,
          things: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
  return (*contents[:receptacle], things, *contents[receptacle + 1:])


def _clean(state: State, arguments: tuple[int, ...]) -> State:
  return state._replace(clean=state.clean | {arguments[3]})


def _heat(state: State, arguments: tuple[int, ...]) -> State:
  thing = {arguments[3]}
  return state._replace(hot=state.hot | thing, cool=state.cool - thing)


def _cool(state: State, arguments: tuple[int, ...]) -> State:
  thing = {arguments[3]}
  return state._replace(cool=state.cool | thing, hot=state.hot - thing)


def _toggle(state: State, arguments: tuple[int, ...]) -> State:
  return state._replace(toggled=state.toggled | {arguments[2]})


def _slice(state: State, arguments: tuple[int, ...]) -> State:
  return state._replace(sliced=state.sliced | {arguments[2]})


_EFFECTS: Mapping[str, Callable[[State, tuple[int, ...]], State]] = {
    **dict.fromkeys(domain.RULES, _nothing), 'gotolocation': _go,
    'openobject': _open, 'closeobject': _close, 'pickupobject': _take,
    'putobject': _put, 'cleanobject': _clean, 'heatobject': _heat,
    'coolobject': _cool, 'toggleobject': _toggle, 'sliceobject': _slice}

# ---------------------------------------------------------- what can be done

_AGENT = 0
_KNIVES = frozenset(('knife', 'butterknife'))
_APPLIANCES = {  # What each type of receptacle does, and to which objects.
    'sink': ('cleanobject', 'cleanable'),
    'sinkbasin': ('cleanobject', 'cleanable'),
    'microwave': ('heatobject', 'heatable'),
    'fridge': ('coolobject', 'coolable')}
_MAX_REMEMBERED = 1024  # Per game; about 700 kB when full.


def _find(game: Game, state: State, command: str) -> Action | None:
  """Returns what a command does, or None if it cannot be done."""
  receptacle = _ways(game).get(command)
  if receptacle is not None:
    there = game.receptacles[receptacle].location
    return None if there == state.location else Action(
        'gotolocation', (_AGENT, state.location, there, receptacle))
  for part in _parts(game, state):
    if command in part:
      return part[command]
  return None


def _remembered(make: Callable[..., Any]) -> Callable[..., Any]:
  """Makes a function of a game keep its results with the game."""
  @functools.wraps(make)
  def recall(game: Game, *arguments: Any) -> Any:
    key = (make, *arguments)
    result = game.memory.get(key)
    if result is None:
      if len(game.memory) >= _MAX_REMEMBERED:
        game.memory.clear()
      result = game.memory[key] = make(game, *arguments)
    return result

  return recall


@_remembered
def _ways(game: Game) -> Mapping[str, int]:
  """Returns the receptacle that each command to go somewhere leads to."""
  nowhere = len(game.locations)  # No command names the place one comes from.
  return {
      _command(game, 'gotolocation', (_AGENT, nowhere, there, receptacle)):
      receptacle
      for receptacle, there in game.tables['receptacleatlocation'].rows}


@_remembered
def _walks(game: Game, location: int) -> Sequence[str]:
  """Returns the commands to go anywhere else."""
  here = game.receptacles_at.get(location, ())
  return sorted(command for command, receptacle in _ways(game).items()
                if receptacle not in here)


def _parts(game: Game, state: State) -> list[Actions]:
  """Returns all that can be done but walking, in parts.

  Each part depends on little of the state, so many states share it.
  """
  location, holding = state.location, state.holding
  parts = [_anywhere(game, location)]
  for receptacle in game.receptacles_at.get(location, ()):
    parts.append(_at_receptacle(
        game, location, receptacle, receptacle in state.opened,
        state.contents[receptacle], holding))
  if holding is not None:
    parts.append(_with_held(game, holding))
    if game.objects[holding].type in _KNIVES:
      parts.append(_with_knife(game, location, holding, tuple(sorted(
          thing for thing, where in state.places
          if where == location and game.objects[thing].sliceable))))
  return parts


def _command(game: Game, name: str, arguments: tuple[int, ...]) -> str:
  """Returns the words for an action; made once for all that share them."""
  grammar = game.grammar
  key = name, *[arguments[place] for place in grammar.parameters[name]]
  command = game.memory.get(key)
  if command is None:
    command = grammar.templates[name](game, game.initial, arguments)
    game.memory[key] = command
  return command


def _part(choose: Callable[..., Iterator[Action]]) -> Callable[..., Actions]:
  """Makes the actions that a function yields a part, by their commands."""
  @_remembered
  @functools.wraps(choose)
  def part(game: Game, *arguments: Any) -> Actions:
    return {_command(game, *action): action
            for action in choose(game, *arguments)}

  return part


@_part
def _anywhere(game: Game, location: int) -> Iterator[Action]:
  """What can be done wherever one is."""
  del game
  yield Action('look', (_AGENT, location))
  yield Action('inventory', (_AGENT,))
  yield Action('help', (_AGENT,))


@_part
def _with_held(game: Game, holding: int) -> Iterator[Action]:
  """What can be done to the object in hand, anywhere."""
  del game
  yield Action('examineobject', (_AGENT, holding))


@_part
def _with_knife(game: Game, location: int, holding: int,
                sliceable: tuple[int, ...]) -> Iterator[Action]:
  """What the knife in hand can slice; a shut door does not prevent it."""
  del game
  for thing in sliceable:
    yield Action('sliceobject', (_AGENT, location, thing, holding))


@_part
def _at_receptacle(
    game: Game, location: int, receptacle: int, is_open: bool,
    contents: tuple[int, ...], holding: int | None
) -> Iterator[Action]:
  """What can be done at a receptacle, with what is in it or in hand."""
  place = (_AGENT, location, receptacle)
  openable = game.receptacles[receptacle].openable
  yield Action('examinereceptacle', (_AGENT, receptacle))
  if openable:
    yield Action('closeobject' if is_open else 'openobject', place)
  for thing in contents:
    if game.objects[thing].toggleable:
      yield Action('toggleobject', (_AGENT, location, thing, receptacle))
  if holding is not None:
    yield from _treatments(game, location, receptacle, holding)
  if openable and not is_open:
    return
  if holding is None:
    for thing in contents:
      if game.objects[thing].pickupable:
        yield Action('pickupobject', (_AGENT, location, thing, receptacle))
  elif game.fits(receptacle, holding):
    types = game.types_of(holding, receptacle)
    yield Action(
        'putobject', (_AGENT, location, holding, receptacle, *types))


def _treatments(game: Game, location: int, receptacle: int,
                holding: int) -> Iterator[Action]:
  """What the receptacle does to the object in hand; no door need be open."""
  name, ability = _APPLIANCES.get(game.receptacles[receptacle].type, ('', ''))
  if name and getattr(game.objects[holding], ability):
    yield Action(name, (_AGENT, location, receptacle, holding))

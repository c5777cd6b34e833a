"""Plays household games: what can be done, what it does, what is told.

States are values: `step` returns a new one. The rules are those of domain.py;
the sentences are the game's own.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

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
  parts = _parts(game, state)
  return tuple(sorted([command for part in parts for command in part]))


def actions(game: Game, state: State) -> Actions:
  """Returns the admissible actions by command; see `admissible`."""
  return {command: action for part in _parts(game, state)
          for command, action in part.items()}


def won(game: Game, state: State) -> bool:
  """Whether the goal is reached."""
  goal = game.goal
  things = game.objects_by_type[goal.object_type]
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
  lamps = game.objects_by_type[game.goal.lamp_type] & state.toggled
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
_MAX_PARTS = 2048  # Remembered per game; about a megabyte when full.


def _find(game: Game, state: State, command: str) -> Action | None:
  for part in _parts(game, state):
    if command in part:
      return part[command]
  return None


def _parts(game: Game, state: State) -> list[Actions]:
  """Returns the admissible actions, in parts that many states share.

  Each part depends on little of the state, and is remembered by that little.
  """
  parts = game.parts
  if len(parts) > _MAX_PARTS:
    parts.clear()
  location, holding = state.location, state.holding
  keys = [(_anywhere, location)]
  for receptacle in game.receptacles_at.get(location, ()):
    keys.append((
        _at_receptacle, location, receptacle, receptacle in state.opened,
        state.contents[receptacle], holding))
  if holding is not None:
    keys.append((_with_held, holding))
    if game.objects[holding].type in _KNIVES:
      keys.append((_with_knife, location, holding, tuple(
          sorted(game.sliceable.intersection(
              thing for thing, where in state.places if where == location)))))
  found = []
  for key in keys:
    part = parts.get(key)
    if part is None:
      part = parts[key] = dict(_command(game, *action)
                               for action in key[0](game, *key[1:]))
    found.append(part)
  return found


_Choices = Iterator[tuple[str, tuple[int, ...]]]  # Names and arguments.


def _command(game: Game, name: str,
             arguments: tuple[int, ...]) -> tuple[str, Action]:
  """Returns an action and its command, which is made once per game."""
  grammar = game.grammar
  key = name, *[arguments[place] for place in grammar.parameters[name]]
  command = game.commands.get(key)
  if command is None:
    command = grammar.templates[name](game, game.initial, arguments)
    game.commands[key] = command
  return command, Action(name, arguments)


def _anywhere(game: Game, location: int) -> _Choices:
  """What can be done wherever one is, walking to other places included."""
  yield 'look', (_AGENT, location)
  yield 'inventory', (_AGENT,)
  yield 'help', (_AGENT,)
  for receptacle, there in game.tables['receptacleatlocation'].rows:
    if there != location:
      yield 'gotolocation', (_AGENT, location, there, receptacle)


def _with_held(game: Game, holding: int) -> _Choices:
  """What can be done to the object in hand, anywhere."""
  del game
  yield 'examineobject', (_AGENT, holding)


def _with_knife(game: Game, location: int, holding: int,
                sliceable: tuple[int, ...]) -> _Choices:
  """What the knife in hand can slice; a shut door does not prevent it."""
  del game
  for thing in sliceable:
    yield 'sliceobject', (_AGENT, location, thing, holding)


def _at_receptacle(
    game: Game, location: int, receptacle: int, is_open: bool,
    contents: tuple[int, ...], holding: int | None
) -> _Choices:
  """What can be done at a receptacle, with what is in it or in hand."""
  place = (_AGENT, location, receptacle)
  openable = game.receptacles[receptacle].openable
  yield 'examinereceptacle', (_AGENT, receptacle)
  if openable:
    yield 'closeobject' if is_open else 'openobject', place
  for thing in contents:
    if game.objects[thing].toggleable:
      yield 'toggleobject', (_AGENT, location, thing, receptacle)
  if holding is not None:
    yield from _treatments(game, location, receptacle, holding)
  if openable and not is_open:
    return
  if holding is None:
    for thing in contents:
      if game.objects[thing].pickupable:
        yield 'pickupobject', (_AGENT, location, thing, receptacle)
  elif game.fits(receptacle, holding):
    yield 'putobject', (_AGENT, location, holding, receptacle,
                        *game.types_of(holding, receptacle))


def _treatments(game: Game, location: int, receptacle: int,
                holding: int) -> _Choices:
  """What the receptacle does to the object in hand; no door need be open."""
  name, ability = _APPLIANCES.get(game.receptacles[receptacle].type, ('', ''))
  if name and getattr(game.objects[holding], ability):
    yield name, (_AGENT, location, receptacle, holding)

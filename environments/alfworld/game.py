"""One household game: a game file read, checked and indexed.

A file is `game.tw-pddl` of ALFWorld, or one of the same form. It is JSON with
the rules (checked against those the engine has), the grammar (compiled), the
problem (who and what is where, and the goal) and a walkthrough. Files are
untrusted: nothing of them is evaluated, and whatever is wrong is a ValueError
that names the file.
"""

from collections.abc import Mapping, Sequence
import collections
import dataclasses
import functools
import hashlib
import json
import pathlib
from typing import Any, NamedTuple

from environments.alfworld import domain
from environments.alfworld import goals
from environments.alfworld import grammar as grammar_lib
from environments.alfworld import pddl
from environments.alfworld import relations
from environments.alfworld import state as state_lib


class Receptacle(NamedTuple):
  """Something that things are put in or on.

  Attributes:
    id: its identifier in the problem, in lower case.
    name: what the text calls it, such as `cabinet 3`.
    type: its lower-case type, such as `cabinet`.
    location: where it stands: an index into `Game.locations`, or None.
    openable: whether it has a door; it is shut unless in `State.opened`.
  """

  id: str
  name: str
  type: str
  location: int | None
  openable: bool


class Object(NamedTuple):
  """Something that lies about; see Receptacle for id, name and type.

  Attributes:
    pickupable: whether it can be taken.
    cleanable: whether it can be cleaned.
    heatable: whether it can be heated.
    coolable: whether it can be cooled.
    toggleable: whether it can be switched on.
    sliceable: whether it can be sliced.
    holds_things: whether it is itself something to put things in.
  """

  id: str
  name: str
  type: str
  pickupable: bool
  cleanable: bool
  heatable: bool
  coolable: bool
  toggleable: bool
  sliceable: bool
  holds_things: bool


def _uncompared(**kwargs: Any) -> Any:
  return dataclasses.field(compare=False, repr=False, **kwargs)


@dataclasses.dataclass(frozen=True)
class Game:
  """What never changes while a game is played.

  Receptacles, objects and locations are referred to by their indices, which
  are in the order of the identifiers. Games of the same text are equal.

  Attributes:
    digest: of the game's text; all that equality looks at.
    name: the file, or whatever the game was parsed from.
    task: the sentence that tells the agent what to do.
    goal: the same for programs.
    walkthrough: commands that win.
    receptacles: by index.
    objects: by index.
    locations: identifiers by index.
    can_contain: the (receptacle type, object type) pairs that fit.
    initial: the state in which the game begins.
    grammar: the compiled sentences.
    ids: identifiers of all entities by type; `names` likewise.
    names: what the text calls each entity.
    tables: the predicates that no action changes.
    memory: what the engine worked out about the game; it bounds its size.
  """

  digest: bytes
  name: str = _uncompared()
  task: str = _uncompared()
  goal: goals.Goal = _uncompared()
  walkthrough: tuple[str, ...] = _uncompared()
  receptacles: tuple[Receptacle, ...] = _uncompared()
  objects: tuple[Object, ...] = _uncompared()
  locations: tuple[str, ...] = _uncompared()
  can_contain: frozenset[tuple[str, str]] = _uncompared()
  initial: state_lib.State = _uncompared()
  grammar: grammar_lib.Grammar = _uncompared()
  ids: Mapping[str, tuple[str, ...]] = _uncompared()
  names: Mapping[str, tuple[str, ...]] = _uncompared()
  tables: Mapping[str, relations.Table] = _uncompared()
  memory: dict[Any, Any] = _uncompared(init=False, default_factory=dict)

  @functools.cached_property
  def objects_by_type(self) -> Mapping[str, frozenset[int]]:
    """The indices of the objects of each type."""
    return _by_type(self.objects)

  @functools.cached_property
  def receptacles_by_type(self) -> Mapping[str, frozenset[int]]:
    """The indices of the receptacles of each type."""
    return _by_type(self.receptacles)

  @functools.cached_property
  def receptacles_at(self) -> Mapping[int, tuple[int, ...]]:
    """The indices of the receptacles at each location that has some."""
    return self.tables['receptacleatlocation'].firsts

  @functools.cached_property
  def wanted_objects(self) -> frozenset[int]:
    """The indices of the objects that the goal may be reached with."""
    return self._able(self.goal.object_type,
                      goals.ABILITIES.get(self.goal.task_type))

  @functools.cached_property
  def wanted_lamps(self) -> frozenset[int]:
    """The indices of the lamps that the goal may be reached with."""
    return self._able(self.goal.lamp_type, 'toggleable')

  def _able(self, kind: str, ability: str | None) -> frozenset[int]:
    return frozenset(
        index for index in self.objects_by_type.get(kind, ())
        if ability is None or getattr(self.objects[index], ability))

  def types_of(self, thing: int, receptacle: int) -> tuple[int, int]:
    """Returns the indices of the two's types, as the rules number them."""
    return (dict(self.tables['objecttype'].rows)[thing],
            dict(self.tables['receptacletype'].rows)[receptacle])

  def fits(self, receptacle: int, thing: int) -> bool:
    """Whether the object may be put in or on the receptacle."""
    pair = self.receptacles[receptacle].type, self.objects[thing].type
    return pair in self.can_contain


def _by_type(
    entities: Sequence[Receptacle | Object]
) -> Mapping[str, frozenset[int]]:
  found = collections.defaultdict(set)
  for index, entity in enumerate(entities):
    found[entity.type].add(index)
  return {kind: frozenset(indices) for kind, indices in found.items()}


def load(path: str | pathlib.Path) -> Game:
  """Reads a game file.

  Raises:
    ValueError: if it cannot be read, or is no game; it names the file.
  """
  return parse(_read_text(path), str(path))


def read_task(path: str | pathlib.Path) -> str:
  """Returns the task sentence of a game file; cheaper than `load`.

  Raises:
    ValueError: if it cannot be read, or has no task; it names the file.
  """
  text = _read_text(path)
  try:
    return grammar_lib.split_task(_read_json(text)['grammar'])[1]
  except ValueError as error:
    raise ValueError(f'{path}: {error}') from error


def _read_text(path: str | pathlib.Path) -> str:
  try:
    if not pathlib.Path(path).is_file():  # A pipe would be read for ever.
      raise FileNotFoundError('there is no such file')
    return pathlib.Path(path).read_text(encoding='utf-8')
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f'{path}: cannot be read: {error}') from error


def parse(text: str, name: str) -> Game:
  """Reads a game.

  Args:
    text: the JSON text of a game file.
    name: how errors call it, such as its path.

  Raises:
    ValueError: if it is no game that the engine can play; it names the game.
  """
  try:
    return _parse(text, name)
  except ValueError as error:
    raise ValueError(f'{name}: {error}') from error


_KEYS: Mapping[str, type] = {
    'pddl_domain': str, 'grammar': str, 'pddl_problem': str,
    'walkthrough': list, 'solvable': bool}


def _read_json(text: str) -> dict[str, Any]:
  """Returns the JSON object of a game file, whose keys are as they should be.

  Raises:
    ValueError: if it is no JSON object, or a key is missing or of a wrong type.
  """
  try:
    data = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise ValueError(f'not JSON: {error}') from error
  if not isinstance(data, dict):
    raise ValueError(f'expected a JSON object, got {type(data).__name__}')
  for key, kind in _KEYS.items():
    if key not in data:
      raise ValueError(f'missing key {key!r}; a game has {sorted(_KEYS)}')
    if not isinstance(data[key], kind):
      raise ValueError(f'{key!r} must be {kind.__name__}, got '
                       f'{type(data[key]).__name__}')
  if not all(isinstance(command, str) for command in data['walkthrough']):
    raise ValueError("'walkthrough' must list commands in words")
  return data


def _parse(text: str, name: str) -> Game:
  data = _read_json(text)
  domain.check(data['pddl_domain'])
  skeleton, task = grammar_lib.split_task(data['grammar'])
  grammar = grammar_lib.compile_grammar(skeleton)
  problem = pddl.read_problem(data['pddl_problem'])
  ids = _entities(problem)
  displayed = _display_names(ids)
  names = {kind: tuple(map(displayed.__getitem__, listed))
           for kind, listed in ids.items()}
  rows = _rows(problem.facts, ids)
  tables = {predicate: relations.table(rows.get(predicate, ()))
            for predicate in relations.STATIC}
  goal = goals.recognise(problem.goal)
  receptacles = _receptacles(ids, names, tables)
  objects = _objects(ids, names, tables)
  _check_goal(goal, receptacles, objects)
  return Game(
      digest=hashlib.blake2b(text.encode(), digest_size=16).digest(),
      name=name, task=task, goal=goal,
      walkthrough=tuple(data['walkthrough']), receptacles=receptacles,
      objects=objects, locations=ids['location'],
      can_contain=_can_contain(ids, tables),
      initial=_initial(rows, len(receptacles)), grammar=grammar, ids=ids,
      names=names, tables=tables)


def _check_goal(goal: goals.Goal, receptacles: Sequence[Receptacle],
                objects: Sequence[Object]) -> None:
  """Refuses a goal of things that the game does not have."""
  for wanted, what, entities in (
      (goal.object_type, 'object', objects),
      (goal.lamp_type, 'object', objects),
      (goal.receptacle_type, 'receptacle', receptacles)):
    if wanted and all(entity.type != wanted for entity in entities):
      raise ValueError(f'pddl_problem: the goal asks for the {what} type '
                       f'{wanted!r}, of which the game has none')


def _entities(problem: pddl.Problem) -> dict[str, tuple[str, ...]]:
  """Returns the identifiers that facts speak of, ascending, by type.

  Raises:
    ValueError: if a fact has an unknown predicate or identifier, or arguments
      of wrong types; if there is not one agent.
  """
  found: dict[str, set[str]] = {kind: set() for kind in domain.TYPES}
  for predicate, facts in problem.facts.items():
    if predicate not in domain.PREDICATES:
      raise ValueError(f'pddl_problem: unknown predicate {predicate!r}')
    types = domain.PREDICATES[predicate]
    if set(map(len, facts)) != {len(types)}:
      raise ValueError(f'pddl_problem: {predicate} takes {len(types)} '
                       f'arguments, got {sorted(set(map(len, facts)))}')
    for kind, column in zip(types, zip(*facts)):
      found[kind].update(column)
      wrong = [name for name in column if problem.objects.get(name) != kind]
      if wrong:
        raise ValueError(
            f'pddl_problem: {predicate} needs a declared {kind}, got '
            f'{wrong[0]!r} of type {problem.objects.get(wrong[0])}')
  if not problem.facts.get('atlocation'):
    raise ValueError('pddl_problem: no (atLocation ..) says where the agent is')
  if len(found['agent']) != 1:
    raise ValueError('pddl_problem: needs one agent, got '
                     f'{sorted(found["agent"])}')
  return {kind: tuple(sorted(names)) for kind, names in found.items()}


_BAR = '_bar_'  # Parts an identifier: the first part is what the thing is.
_ESCAPES = (('_minus_', '-'), ('_plus_', '+'), ('_dot_', '.'),
            ('_comma_', ','))


def _display_names(ids: Mapping[str, Sequence[str]]) -> dict[str, str]:
  """Returns what the text calls each entity.

  Entities are numbered per base name, all types together: the first identifier
  gets the highest number. One without a base name keeps its identifier.
  """
  bases = {name: _base_name(name)
           for name in sorted(name for names in ids.values() for name in names)}
  left = collections.Counter(bases.values())
  names = {}
  for identifier, base in bases.items():
    number = left[base] if _BAR in identifier else ''
    left[base] -= 1
    names[identifier] = f'{base} {number}'
  return names


def _base_name(identifier: str) -> str:
  base, bar, _ = identifier.partition(_BAR)
  if '_' in base:
    for escape, character in _ESCAPES:
      base = base.replace(escape, character)
  return f'{base}basin' if bar and 'basin' in identifier else base


def _rows(
    facts: Mapping[str, Sequence[tuple[str, ...]]],
    ids: Mapping[str, Sequence[str]]
) -> dict[str, list[relations.Row]]:
  """Returns the facts with indices instead of identifiers."""
  index = {kind: {name: number for number, name in enumerate(names)}
           for kind, names in ids.items()}
  rows = {}
  for predicate, listed in facts.items():
    indices = [index[kind] for kind in domain.PREDICATES[predicate]]
    rows[predicate] = [
        tuple([known[name] for known, name in zip(indices, arguments)])
        for arguments in listed]
  return rows


def _unique(table: relations.Table, what: str,
            ids: Sequence[str]) -> dict[int, int]:
  """Returns a relation of pairs as a function.

  Raises:
    ValueError: if it relates something to two different things.
  """
  if len(table.rows) != len({row[0] for row in table.rows}):
    counts = collections.Counter(row[0] for row in table.rows)
    twice, _ = counts.most_common(1)[0]
    raise ValueError(f'pddl_problem: {ids[twice]!r} has two {what}s')
  return dict(table.rows)


def _types(entity: str, kind: str, ids: Mapping[str, Sequence[str]],
           tables: Mapping[str, relations.Table]) -> list[str]:
  """Returns the type of each entity, as words use it; '' where it has none."""
  of = _unique(tables[f'{entity}type'], 'type', ids[entity])
  return [
      ids[kind][of[index]].removesuffix('type') if index in of else ''
      for index in range(len(ids[entity]))]


def _receptacles(
    ids: Mapping[str, Sequence[str]], names: Mapping[str, Sequence[str]],
    tables: Mapping[str, relations.Table]
) -> tuple[Receptacle, ...]:
  where = _unique(
      tables['receptacleatlocation'], 'location', ids['receptacle'])
  openable = tables['openable'].members
  types = _types('receptacle', 'rtype', ids, tables)
  return tuple(
      Receptacle(identifier, name, kind, where.get(index), (index,) in openable)
      for index, (identifier, name, kind) in enumerate(
          zip(ids['receptacle'], names['receptacle'], types)))


_FLAGS = ('pickupable', 'cleanable', 'heatable', 'coolable', 'toggleable',
          'sliceable', 'isreceptacleobject')


def _objects(
    ids: Mapping[str, Sequence[str]], names: Mapping[str, Sequence[str]],
    tables: Mapping[str, relations.Table]
) -> tuple[Object, ...]:
  flags = [tables[flag].members for flag in _FLAGS]
  types = _types('object', 'otype', ids, tables)
  return tuple(
      Object(identifier, name, kind, *[(index,) in flag for flag in flags])
      for index, (identifier, name, kind) in enumerate(
          zip(ids['object'], names['object'], types)))


def _can_contain(
    ids: Mapping[str, Sequence[str]], tables: Mapping[str, relations.Table]
) -> frozenset[tuple[str, str]]:
  receptacle_types, object_types = (
      [name.removesuffix('type') for name in ids[kind]]
      for kind in ('rtype', 'otype'))
  return frozenset(
      (receptacle_types[outer], object_types[inner])
      for outer, inner in tables['cancontain'].rows)


def _initial(rows: Mapping[str, Sequence[relations.Row]],
             num_receptacles: int) -> state_lib.State:
  """Returns the state that the initial facts describe.

  Raises:
    ValueError: if the agent is at two places, or its hands are not as one can
      hold them.
  """
  if len(set(rows['atlocation'])) != 1:
    raise ValueError('pddl_problem: the agent is at several locations')
  held = set(rows.get('holds', ()))
  if len(held) > 1 or bool(held) != bool(rows.get('holdsany')):
    raise ValueError('pddl_problem: the agent must hold one object and '
                     '(holdsAny ..), or neither')
  contents = [set() for _ in range(num_receptacles)]
  for thing, receptacle in rows.get('inreceptacle', ()):
    contents[receptacle].add(thing)
  sets = {field: frozenset(row[0] for row in rows.get(predicate, ()))
          for predicate, field in relations.FIELDS.items()}
  return state_lib.State(
      location=rows['atlocation'][0][1],
      holding=held.pop()[1] if held else None,
      contents=tuple(tuple(sorted(things)) for things in contents),
      places=frozenset(rows.get('objectatlocation', ())), **sets)

"""Conditions of a grammar: conjunctive queries over a game and a state.

A query such as `holds(a:agent, o:object) & ishot(o:object)` is matched depth
first, the first predicate varying slowest, each one's rows in ascending order.
The entities found are written into the values, a list with a place for every
variable.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import re
from typing import NamedTuple

from environments.alfworld import relations
from environments.alfworld import state as state_lib

Facts = relations.Facts
Values = list[int]
Scope = Mapping[str, tuple[int, str]]  # (place in the values, type) by name.
Check = Callable[[Facts, state_lib.State, Values], bool]
Matches = Callable[[Facts, state_lib.State, Values], Iterator[None]]

# A match takes time exponential in the variables; real grammars have four.
_MAX_ATOMS, _MAX_VARIABLES = 12, 5

_ATOM = re.compile(r'\s*(\w+)\s*\(([^()]*)\)\s*')
_VARIABLE = re.compile(r'\s*(\w+)\s*:\s*(\w+)\s*')


class Step(NamedTuple):
  """One predicate of a query.

  Attributes:
    predicate: what is asked, by name.
    relation: the same.
    places: where its arguments are in the values.
    fresh: which of them are found by it; the others were found before.
    rivals: for each fresh argument the places of what it must differ from: two
      variables never stand for the same entity.
  """

  predicate: str
  relation: relations.Relation
  places: Sequence[int]
  fresh: Sequence[bool]
  rivals: Sequence[Sequence[int]]


def read(condition: str, scope: Scope) -> tuple[Sequence[Step], Scope]:
  """Reads a query.

  Args:
    condition: `predicate(variable:type, ..) & ..`.
    scope: the variables that are bound already.

  Returns:
    A step per predicate, and the scope in which their variables are bound as
    well.

  Raises:
    ValueError: if it is no such query, or asks what the engine does not keep.
  """
  inner = dict(scope)
  steps = []
  atoms = condition.split('&')
  if len(atoms) > _MAX_ATOMS:
    raise ValueError(
        f'expected a condition of at most {_MAX_ATOMS} predicates, got '
        f'{len(atoms)}')
  for atom in atoms:
    found = _ATOM.fullmatch(atom)
    if not found:
      raise ValueError(f'{atom!r} is no predicate(variable:type, ..)')
    steps.append(_read_step(*found.groups(), inner))
  if len(inner) - len(scope) > _MAX_VARIABLES:
    raise ValueError(
        f'expected a condition of at most {_MAX_VARIABLES} variables of its '
        f'own, got {len(inner) - len(scope)}')
  return steps, inner


def _read_step(predicate: str, arguments: str,
               scope: dict[str, tuple[int, str]]) -> Step:
  """Reads one predicate of a query and binds its variables in `scope`."""
  relation = relations.RELATIONS.get(predicate)
  if relation is None:
    raise ValueError(f'the engine keeps no predicate {predicate!r}')
  found = [_VARIABLE.fullmatch(part) for part in arguments.split(',')]
  if (None in found
      or tuple(part.group(2) for part in found) != relation.types):
    raise ValueError(f'{predicate} takes variables of types {relation.types}, '
                     f'got ({arguments})')
  bound = {place for place, _ in scope.values()}
  places = []
  for part in found:
    name, kind = part.groups()
    place, known = scope.setdefault(name, (len(scope), kind))
    if kind != known:
      raise ValueError(f'variable {name!r} is {known} elsewhere, not {kind}')
    places.append(place)
  fresh = [place not in bound for place in places]
  rivals = [
      [place for place, known in scope.values()
       if is_fresh and known == kind and place != places[index]
       and place in bound.union(places[:index])]
      for index, (kind, is_fresh) in enumerate(zip(relation.types, fresh))]
  return Step(predicate, relation, places, fresh, rivals)


def exists(steps: Sequence[Step]) -> Check:
  """Returns whether a query has a match."""
  if not any(any(step.fresh) for step in steps):
    return _all([_test(step) for step in steps])
  found = matches(steps)

  def has_match(game, state, values):
    for _ in found(game, state, values):
      return True
    return False

  return has_match


def _all(checks: Sequence[Check]) -> Check:
  if len(checks) == 1:
    return checks[0]

  def holds(game, state, values):
    for check in checks:
      if not check(game, state, values):
        return False
    return True

  return holds


def _test(step: Step) -> Check:
  """All variables are bound: one look."""
  holds, places = step.relation.holds, step.places
  if len(places) == 1:
    place, = places
    return lambda game, state, values: holds(game, state, (values[place],))
  first, second = places
  return lambda game, state, values: holds(
      game, state, (values[first], values[second]))


def matches(steps: Sequence[Step]) -> Matches:
  """Returns a query's matches, each of which is written into the values."""
  found = _found
  for step in reversed(steps):
    found = _joined(step, found)
  return found


def _found(game: Facts, state: state_lib.State,
           values: Values) -> Iterator[None]:
  """The end of a query: everything before it matched."""
  del game, state, values
  yield


def _joined(step: Step, rest: Matches) -> Matches:
  """Returns the matches of a step together with the steps that follow."""
  if not any(step.fresh):
    return _guarded(_test(step), rest)
  if (step.relation.firsts and list(step.fresh) == [True, False]
      and not step.rivals[0]):
    return _first_arguments(step, rest)
  return _rows(step, rest)


def _guarded(check: Check, rest: Matches) -> Matches:
  def join(game, state, values):
    if check(game, state, values):
      yield from rest(game, state, values)

  return join


def _first_arguments(step: Step, rest: Matches) -> Matches:
  """The second variable is bound, the first is not and has no rival."""
  firsts = step.relation.firsts
  first, second = step.places

  def last_matches(game, state, values):
    for values[first] in firsts(game, state, values[second]):
      yield

  def join(game, state, values):
    for _ in last_matches(game, state, values):
      yield from rest(game, state, values)

  return last_matches if rest is _found else join


def _rows(step: Step, rest: Matches) -> Matches:
  """The general case."""
  _, relation, places, fresh, rivals = step

  def join(game, state, values):
    for row in relation.rows(game, state):
      for place, is_fresh, others, value in zip(places, fresh, rivals, row):
        if is_fresh:
          if any(values[other] == value for other in others):
            break
          values[place] = value
        elif values[place] != value:
          break
      else:
        yield from rest(game, state, values)

  return join

"""Predicates as relations over a game and a state, for whoever asks by name.

A row is a tuple of numbers, one per argument, each an index into the game's
entities of that type. Rows come in ascending order, which is the order of the
identifiers: lists in the text are printed so.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from environments.alfworld import domain
from environments.alfworld import state as state_lib

Row = tuple[int, ...]
Facts = Any  # A game.Game; only its `tables` are read here.


class Table(NamedTuple):
  """The rows of a predicate that no action changes.

  Attributes:
    rows: all of them, ascending.
    members: the same as a set.
    firsts: the ascending first arguments by the second one, of pairs.
  """

  rows: tuple[Row, ...]
  members: frozenset[Row]
  firsts: Mapping[int, tuple[int, ...]]


def table(rows: Iterable[Row]) -> Table:
  """Indexes rows; the same row given twice counts once."""
  members = frozenset(rows)
  ascending = tuple(sorted(members))
  firsts: dict[int, tuple[int, ...]] = {}
  for row in ascending:
    if len(row) == 2:
      firsts[row[1]] = (*firsts.get(row[1], ()), row[0])
  return Table(ascending, members, firsts)


class Relation(NamedTuple):
  """How to ask one predicate.

  Attributes:
    types: the type of each argument.
    rows: all rows that hold, ascending.
    holds: whether one row holds.
    firsts: the ascending first arguments beside a given second one; None where
      the relation has no two arguments.
  """

  types: tuple[str, ...]
  rows: Callable[[Facts, state_lib.State], Iterable[Row]]
  holds: Callable[[Facts, state_lib.State, Row], bool]
  firsts: Callable[[Facts, state_lib.State, int], Sequence[int]] | None = None


def _static(predicate: str) -> Relation:
  types = domain.PREDICATES[predicate]
  return Relation(
      types,
      rows=lambda game, state: game.tables[predicate].rows,
      holds=lambda game, state, row: (
          row in game.tables[predicate].members),
      firsts=(lambda game, state, second:
              game.tables[predicate].firsts.get(second, ()))
      if len(types) == 2 else None)


def _one_of(field: str) -> Relation:
  """A relation that is one of the state's sets of objects or receptacles."""
  position = state_lib.State._fields.index(field)
  return Relation(
      ('receptacle',) if field == 'opened' else ('object',),
      rows=lambda game, state: [(one,) for one in sorted(state[position])],
      holds=lambda game, state, row: row[0] in state[position])


def _never(types: tuple[str, ...]) -> Relation:
  """What no action of the domain ever denies of anything."""
  return Relation(types, rows=lambda game, state: (),
                  holds=lambda game, state, row: False)


def _in_receptacle_rows(game: Facts, state: state_lib.State) -> list[Row]:
  del game
  return sorted((thing, receptacle)
                for receptacle, things in enumerate(state.contents)
                for thing in things)


def _things_at(
    game: Facts, state: state_lib.State, location: int
) -> list[int]:
  del game
  return sorted(thing for thing, where in state.places if where == location)


# The predicates of one argument that are sets of the state.
FIELDS: Mapping[str, str] = {
    'opened': 'opened', 'isclean': 'clean', 'ishot': 'hot', 'iscool': 'cool',
    'issliced': 'sliced', 'istoggled': 'toggled'}

_AGENT = 0  # Games have one agent.

_DYNAMIC: Mapping[str, Relation] = {
    'atlocation': Relation(
        ('agent', 'location'),
        rows=lambda game, state: ((_AGENT, state.location),),
        holds=lambda game, state, row: row[1] == state.location),
    'holds': Relation(
        ('agent', 'object'),
        rows=lambda game, state: () if state.holding is None else (
            (_AGENT, state.holding),),
        holds=lambda game, state, row: row[1] == state.holding),
    'holdsany': Relation(
        ('agent',),
        rows=lambda game, state: () if state.holding is None else ((_AGENT,),),
        holds=lambda game, state, row: state.holding is not None),
    'inreceptacle': Relation(
        ('object', 'receptacle'), rows=_in_receptacle_rows,
        holds=lambda game, state, row: row[0] in state.contents[row[1]],
        firsts=lambda game, state, second: state.contents[second]),
    'not_inreceptacle': Relation(
        ('object', 'receptacle'),
        rows=lambda game, state: sorted(state.taken),
        holds=lambda game, state, row: row in state.taken),
    'objectatlocation': Relation(
        ('object', 'location'),
        rows=lambda game, state: sorted(state.places),
        holds=lambda game, state, row: row in state.places,
        firsts=_things_at),
    **{predicate: _one_of(field) for predicate, field in FIELDS.items()},
    'not_isclean': _never(('object',)),
    'not_issliced': _never(('object',)),
    'not_istoggled': _never(('object',)),
}

# Written by actions and read by none; neither text nor goal may ask for them.
UNTRACKED = frozenset(('checked', 'examined', 'ison'))

STATIC = frozenset(
    domain.PREDICATES.keys() - _DYNAMIC.keys() - UNTRACKED)

RELATIONS: Mapping[str, Relation] = {
    **{predicate: _static(predicate) for predicate in sorted(STATIC)},
    **_DYNAMIC}

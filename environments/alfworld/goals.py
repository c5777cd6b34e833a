"""The six kinds of task, recognised in a goal and checked in a state."""

from collections.abc import Iterator, Mapping
import functools
from typing import NamedTuple

from environments.alfworld import pddl

PICK_AND_PLACE = 'pick_and_place'
LOOK_IN_LIGHT = 'look_in_light'
CLEAN = 'clean'
HEAT = 'heat'
COOL = 'cool'
PICK_TWO = 'pick_two'
TASK_TYPES = (PICK_AND_PLACE, LOOK_IN_LIGHT, CLEAN, HEAT, COOL, PICK_TWO)

# What an object must be able to do for each kind, besides its type.
ABILITIES: Mapping[str, str] = {
    CLEAN: 'cleanable', HEAT: 'heatable', COOL: 'coolable'}


class Goal(NamedTuple):
  """What has to hold at the end.

  Attributes:
    task_type: one of TASK_TYPES.
    object_type: the type of the thing to bring, or to hold under the light;
      lower case, such as `alarmclock`.
    receptacle_type: where to bring it, such as `desk`; empty for a light.
    lamp_type: the type of the light to switch on, such as `desklamp`; empty
      for all other kinds.
  """

  task_type: str
  object_type: str
  receptacle_type: str = ''
  lamp_type: str = ''


def _placed(*conditions: str) -> str:
  """A goal of one object somewhere, with more asked of it."""
  return ('(exists (?o - object ?r - receptacle) (and (inreceptacle ?o ?r)'
          ' (objecttype ?o {object}) (receptacletype ?r {receptacle}) '
          f'{" ".join(conditions)}))')


# Braces stand for types; two objects of one kind are named alike.
_SHAPES: Mapping[str, str] = {
    PICK_AND_PLACE: _placed(),
    CLEAN: _placed('(cleanable ?o)', '(isclean ?o)'),
    HEAT: _placed('(heatable ?o)', '(ishot ?o)'),
    COOL: _placed('(coolable ?o)', '(iscool ?o)'),
    PICK_TWO: (
        '(exists (?r - receptacle ?o - object ?p - object) (and'
        ' (inreceptacle ?o ?r) (objecttype ?o {object})'
        ' (inreceptacle ?p ?r) (objecttype ?p {object})'
        ' (receptacletype ?r {receptacle}) (not (= ?o ?p))))'),
    LOOK_IN_LIGHT: (
        '(and (exists (?o - object ?a - agent)'
        ' (and (objecttype ?o {object}) (holds ?a ?o)))'
        ' (exists (?t - object ?r - receptacle ?a - agent ?l - location)'
        ' (and (objecttype ?t {lamp}) (toggleable ?t) (istoggled ?t)'
        ' (receptacleatlocation ?r ?l) (atlocation ?a ?l)'
        ' (inreceptacle ?t ?r))))'),
}

_Atom = tuple[str, ...]
_Block = frozenset[_Atom]  # One `exists`, its variables named by their roles.


def recognise(goal: pddl.Expression) -> Goal:
  """Returns the kind of task that a goal states, and its types.

  Names of variables, the order of conditions, and how conjunctions and
  quantifiers nest make no difference.

  Raises:
    ValueError: if the goal is none of the six kinds.
  """
  blocks = _blocks(goal)
  atoms = set().union(*blocks)
  targets = [atom[-1] for atom in sorted(atoms) if atom[0] == 'receptacletype']
  things = [atom[-1] for block in sorted(blocks, key=len)
            for atom in sorted(block) if atom[0] == 'objecttype']
  for task_type, shape in _SHAPES.items():
    types = {'object': things[0] if things else '',
             'receptacle': targets[0] if targets else '',
             'lamp': things[-1] if things else ''}
    if blocks == _shape_blocks(shape.format(**types)):
      lit = task_type == LOOK_IN_LIGHT
      return Goal(task_type, _type(types['object']),
                  '' if lit else _type(types['receptacle']),
                  _type(types['lamp']) if lit else '')
  raise ValueError(f'pddl_problem: the goal {pddl.show(goal)} is none of the '
                   f'six kinds {", ".join(TASK_TYPES)}')


@functools.lru_cache(maxsize=1024)
def _shape_blocks(shape: str) -> frozenset[_Block]:
  return _blocks(pddl.read(shape, 'shape'))


def _type(constant: str) -> str:
  return constant.removesuffix('type')


def _blocks(goal: pddl.Expression) -> frozenset[_Block]:
  """Returns the goal's outermost quantified conjunctions."""
  return frozenset(
      _named_by_role(dict(_variables(part)), set(_atoms(part)))
      for part in _conjuncts(goal))


def _conjuncts(formula: pddl.Expression) -> Iterator[pddl.Expression]:
  if formula[:1] == ['and']:
    for part in formula[1:]:
      yield from _conjuncts(part)
  elif formula:
    yield formula


def _variables(formula: pddl.Expression) -> Iterator[tuple[str, str]]:
  for part in _conjuncts(formula):
    if part[:1] == ['exists'] and len(part) == 3:
      yield from pddl.typed(part[1], 'pddl_problem: (exists ..)')
      yield from _variables(part[2])


def _atoms(formula: pddl.Expression) -> Iterator[_Atom]:
  for part in _conjuncts(formula):
    if part[:1] == ['exists'] and len(part) == 3:
      yield from _atoms(part[2])
    elif part[:1] == ['not'] and len(part) == 2 and part[1][:1] == ['=']:
      yield ('differ', *sorted(map(pddl.show, part[1][1:])))
    else:
      yield tuple(map(pddl.show, part))


def _named_by_role(kinds: Mapping[str, str], atoms: set[_Atom]) -> _Block:
  """Renames each variable to its type and what is said of it."""
  def role(variable: str) -> str:
    said = sorted(
        str([atom[0], *('self' if word == variable else kinds.get(word, word)
                        for word in atom[1:])])
        for atom in atoms if variable in atom)
    return f'{kinds[variable]}: {" ".join(said)}'

  roles = {variable: role(variable) for variable in kinds}
  return frozenset(
      tuple(roles.get(word, word) for word in atom) for atom in atoms)

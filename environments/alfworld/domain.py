"""The rules that the engine implements, and the proof that a file has them.

ALFWorld's game files state their rules in PDDL. The engine plays these rules
by functions of its own (engine.py), so a file whose rules differ must be
refused: `check` compares every action with the table below, whatever the
comments, the layout and the order of conditions.
"""

from collections.abc import Mapping
import functools
from typing import NamedTuple

from environments.alfworld import pddl

TYPES = frozenset(
    ('agent', 'location', 'receptacle', 'object', 'rtype', 'otype'))

# The types of each predicate's arguments.
PREDICATES: Mapping[str, tuple[str, ...]] = {
    'atlocation': ('agent', 'location'),
    'receptacleatlocation': ('receptacle', 'location'),
    'objectatlocation': ('object', 'location'),
    'openable': ('receptacle',),
    'opened': ('receptacle',),
    'inreceptacle': ('object', 'receptacle'),
    'isreceptacleobject': ('object',),
    'inreceptacleobject': ('object', 'object'),
    'isreceptacleobjectfull': ('object',),
    'wasinreceptacle': ('object', 'receptacle'),
    'checked': ('receptacle',),
    'examined': ('location',),
    'receptacletype': ('receptacle', 'rtype'),
    'cancontain': ('rtype', 'otype'),
    'objecttype': ('object', 'otype'),
    'holds': ('agent', 'object'),
    'holdsany': ('agent',),
    'holdsanyreceptacleobject': ('agent',),
    'full': ('receptacle',),
    'isclean': ('object',),
    'cleanable': ('object',),
    'ishot': ('object',),
    'heatable': ('object',),
    'iscool': ('object',),
    'coolable': ('object',),
    'pickupable': ('object',),
    'moveable': ('object',),
    'toggleable': ('object',),
    'ison': ('object',),
    'istoggled': ('object',),
    'sliceable': ('object',),
    'issliced': ('object',),
}


class Rule(NamedTuple):
  """One action of the domain; costs are left out, since nothing reads them."""

  parameters: str
  precondition: str
  effect: str


_HERE = '(atlocation ?a ?l) (receptacleatlocation ?r ?l)'
_ACCESSIBLE = '(or (not (openable ?r)) (opened ?r))'
_THING_IN_HAND = '(holds ?a ?o)'

# Only what is in hand can be examined: in the original text the other case
# quantifies over a type written `location,`, of which there is nothing.
RULES: Mapping[str, Rule] = {
    'look': Rule(
        '?a - agent ?l - location', '(atlocation ?a ?l)', '(checked ?l)'),
    'inventory': Rule('?a - agent', '()', '(checked ?a)'),
    'help': Rule('?a - agent', '()', '(checked ?a)'),
    'examinereceptacle': Rule(
        '?a - agent ?r - receptacle',
        f'(exists (?l - location) (and {_HERE}))', '(checked ?r)'),
    'examineobject': Rule(
        '?a - agent ?o - object', _THING_IN_HAND, '(checked ?o)'),
    'gotolocation': Rule(
        '?a - agent ?lstart - location ?lend - location ?r - receptacle',
        '(and (atlocation ?a ?lstart) (receptacleatlocation ?r ?lend))',
        '(and (not (atlocation ?a ?lstart)) (atlocation ?a ?lend))'),
    'openobject': Rule(
        '?a - agent ?l - location ?r - receptacle',
        f'(and {_HERE} (openable ?r) (not (opened ?r)))',
        '(and (opened ?r) (checked ?r))'),
    'closeobject': Rule(
        '?a - agent ?l - location ?r - receptacle',
        f'(and {_HERE} (openable ?r) (opened ?r))', '(not (opened ?r))'),
    'pickupobject': Rule(
        '?a - agent ?l - location ?o - object ?r - receptacle',
        f'(and {_HERE} {_ACCESSIBLE} (inreceptacle ?o ?r) (pickupable ?o)'
        ' (not (holdsany ?a)))',
        '(and (holds ?a ?o) (holdsany ?a) (not (inreceptacle ?o ?r))'
        ' (not (objectatlocation ?o ?l)))'),
    'putobject': Rule(
        '?a - agent ?l - location ?o - object ?r - receptacle ?ot - otype'
        ' ?rt - rtype',
        f'(and {_HERE} {_ACCESSIBLE} {_THING_IN_HAND} (objecttype ?o ?ot)'
        ' (receptacletype ?r ?rt) (cancontain ?rt ?ot))',
        '(and (inreceptacle ?o ?r) (objectatlocation ?o ?l)'
        ' (not (holds ?a ?o)) (not (holdsany ?a)))'),
    'cleanobject': Rule(
        '?a - agent ?l - location ?r - receptacle ?o - object',
        f'(and {_HERE} {_THING_IN_HAND} (cleanable ?o)'
        ' (or (receptacletype ?r sinktype)'
        ' (receptacletype ?r sinkbasintype)))', '(isclean ?o)'),
    'heatobject': Rule(
        '?a - agent ?l - location ?r - receptacle ?o - object',
        f'(and {_HERE} {_THING_IN_HAND} (heatable ?o)'
        ' (receptacletype ?r microwavetype))',
        '(and (ishot ?o) (not (iscool ?o)))'),
    'coolobject': Rule(
        '?a - agent ?l - location ?r - receptacle ?o - object',
        f'(and {_HERE} {_THING_IN_HAND} (coolable ?o)'
        ' (receptacletype ?r fridgetype))',
        '(and (iscool ?o) (not (ishot ?o)))'),
    'toggleobject': Rule(
        '?a - agent ?l - location ?o - object ?r - receptacle',
        f'(and {_HERE} (toggleable ?o) (inreceptacle ?o ?r))',
        '(and (istoggled ?o) (when (ison ?o) (not (ison ?o)))'
        ' (when (not (ison ?o)) (ison ?o)))'),
    'sliceobject': Rule(
        '?a - agent ?l - location ?co - object ?ko - object',
        '(and (atlocation ?a ?l) (objectatlocation ?co ?l) (holds ?a ?ko)'
        ' (sliceable ?co) (or (objecttype ?ko knifetype)'
        ' (objecttype ?ko butterknifetype)))', '(issliced ?co)'),
}


def parameters(action: str) -> tuple[tuple[str, str], ...]:
  """Returns the (name, type) of each parameter, without the `?`."""
  names = RULES[action].parameters.split()
  return tuple(
      (name[1:], kind) for name, kind in pddl.typed(names, action))


@functools.lru_cache(maxsize=8)
def check(text: str) -> None:
  """Passes if the domain `text` has exactly the rules of this module.

  Raises:
    ValueError: naming the first type, predicate or action that differs.
  """
  types, predicates, actions = set(), {}, {}
  what = 'pddl_domain'
  for keyword, rest in pddl.sections(pddl.read(text, what), what):
    if keyword == ':types':
      types.update(map(pddl.show, rest))
    elif keyword == ':predicates':
      predicates.update(map(_predicate, rest))
    elif keyword == ':action':
      actions.update((_action(rest),))
    elif keyword not in (':requirements', ':functions'):
      raise ValueError(f'pddl_domain has a section {keyword}, which the engine '
                       'does not implement')
  _compare('type', dict.fromkeys(types), dict.fromkeys(TYPES))
  _compare('predicate', predicates, PREDICATES)
  _compare('action', actions, _known_actions())


def _compare(what: str, got: Mapping, expected: Mapping) -> None:
  """Raises ValueError on the first key whose value is not as expected."""
  for name in sorted(got.keys() | expected.keys()):
    if name not in got:
      raise ValueError(f'pddl_domain lacks the {what} {name!r}')
    if name not in expected:
      raise ValueError(f'pddl_domain has the {what} {name!r}, which the engine '
                       'does not implement')
    if got[name] != expected[name]:
      raise ValueError(
          f'pddl_domain: {what} {name!r} differs from the rules that the engine'
          f' implements: expected {expected[name]}, got {got[name]}')


def _predicate(expression: pddl.Expression) -> tuple[str, tuple[str, ...]]:
  if not isinstance(expression, list) or not expression:
    raise ValueError('pddl_domain (:predicates ..) has '
                     f'{pddl.show(expression)}, expected (name ?x - type ..)')
  name = pddl.show(expression[0])
  arguments = pddl.typed(expression[1:], f'predicate {name!r}')
  return name, tuple(kind for _, kind in arguments)


def _action(rest: list[pddl.Expression]) -> tuple[str, Rule]:
  """Returns an action's name and its canonical rule."""
  name = pddl.show(rest[0]) if rest else ''
  fields = dict(zip(rest[1::2], rest[2::2])) if all(
      isinstance(key, str) for key in rest[1::2]) else {}
  expected = {':parameters', ':precondition', ':effect'}
  if len(rest) != 7 or set(fields) != expected:
    raise ValueError(f'pddl_domain: action {name!r} must have '
                     f'{sorted(expected)}, got {sorted(fields)}')
  return name, _canonical_rule(*(fields[key] for key in (
      ':parameters', ':precondition', ':effect')))


def _canonical_rule(
    names: pddl.Expression, precondition: pddl.Expression,
    effect: pddl.Expression
) -> Rule:
  listed = pddl.typed(names, 'pddl_domain: parameters')
  return Rule(
      ' '.join(f'{name} - {kind}' for name, kind in listed),
      canonical(precondition), canonical(effect))


@functools.lru_cache(maxsize=1)
def _known_actions() -> Mapping[str, Rule]:
  known = {}
  for name, rule in RULES.items():
    parts = (pddl.read(f'({part})', name) for part in rule)
    names, (precondition,), (effect,) = parts
    known[name] = _canonical_rule(names, precondition, effect)
  return known


_FALSE = '(or)'


def canonical(formula: pddl.Expression) -> str:
  """Returns one spelling for formulas that differ only in form.

  Conjunctions and disjunctions are flattened and sorted, those of one member
  are that member, costs vanish, and an `exists` over a type that the domain
  does not have is false.
  """
  if not formula:
    return '(and)'
  head, rest = formula[0], formula[1:]
  if head in ('and', 'or'):
    return _junction(head, [canonical(part) for part in rest])
  if head in ('not', 'when'):
    return f'({head} {" ".join(map(canonical, rest))})'
  if head == 'exists' and len(rest) == 2:
    names = list(pddl.typed(rest[0], 'pddl_domain: (exists ..)'))
    if any(kind not in TYPES for _, kind in names):
      return _FALSE
    listed = ' '.join(f'{name} - {kind}' for name, kind in sorted(names))
    return f'(exists ({listed}) {canonical(rest[1])})'
  return '' if head == 'increase' else pddl.show(formula)


def _junction(head: str, parts: list[str]) -> str:
  """Joins canonical formulas, lifting the members of equal junctions."""
  members = set()
  for part in parts:
    if part.startswith((f'({head} ', f'({head})')):
      members.update(map(pddl.show, pddl.read(part, 'formula')[1:]))
    elif part:
      members.add(part)
  if len(members) == 1:
    return members.pop()
  return f'({" ".join((head, *sorted(members)))})'

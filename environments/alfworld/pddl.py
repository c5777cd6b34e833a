"""Reads PDDL text: nested lists, typed names, and the parts of a problem."""

from collections.abc import Iterator, Mapping, Sequence
import re
from typing import NamedTuple, Union

Expression = Union[str, list['Expression']]

_COMMENT = re.compile(r';[^\n]*')
# A list without lists in it is one token: most of a problem are such facts.
_TOKEN = re.compile(r'\([^()]*\)|[()]|[^\s()]+')
_MAX_DEPTH = 50  # Real files nest 9 deep; the bound keeps recursion harmless.


class Problem(NamedTuple):
  """A `define (problem ..)`, in lower case, as PDDL reads it.

  Attributes:
    objects: type by identifier, in the order of declaration.
    facts: the initial facts' argument tuples, by predicate.
    goal: what has to hold at the end.
  """

  objects: Mapping[str, str]
  facts: Mapping[str, Sequence[tuple[str, ...]]]
  goal: Expression


def read(text: str, what: str) -> list[Expression]:
  """Returns the one parenthesised expression of `text`, in lower case.

  Args:
    text: PDDL text; `;` starts a comment that ends with its line.
    what: how errors name the text.

  Raises:
    ValueError: if parentheses do not balance, or it is not one expression.
  """
  stack: list[list[Expression]] = [[]]
  for token in _TOKEN.findall(_COMMENT.sub('', text).lower()):
    if token[0] == '(' and len(token) > 1:
      stack[-1].append(token[1:-1].split())
    elif token == '(':
      stack.append([])
      if len(stack) > _MAX_DEPTH:
        raise ValueError(f'{what} nests more than {_MAX_DEPTH} deep')
    elif token != ')':
      stack[-1].append(token)
    elif len(stack) == 1:
      raise ValueError(f'{what} has unbalanced parentheses: one `)` too many')
    else:
      closed = stack.pop()
      stack[-1].append(closed)
  if len(stack) > 1:
    raise ValueError(f'{what} has unbalanced parentheses: {len(stack) - 1} '
                     'are never closed')
  if len(stack[0]) != 1 or not isinstance(stack[0][0], list):
    raise ValueError(f'{what} must be one parenthesised (define ..), got '
                     f'{len(stack[0])} expressions')
  return stack[0][0]


def show(expression: Expression) -> str:
  """Returns the expression as one line of PDDL."""
  if isinstance(expression, str):
    return expression
  return '(' + ' '.join(map(show, expression)) + ')'


def typed(names: Expression, what: str) -> Iterator[tuple[str, str]]:
  """Yields (name, type) of a list such as `a b - object c - location`.

  Raises:
    ValueError: if a name has no type, or is not a name.
  """
  untyped: list[str] = []
  tokens = iter(names)
  for token in tokens:
    if not isinstance(token, str):
      raise ValueError(f'{what} must list names, got {show(token)}')
    if token != '-':
      untyped.append(token)
      continue
    kind = next(tokens, None)
    if not isinstance(kind, str):
      raise ValueError(f'{what} has no type after its last `-`')
    yield from ((name, kind) for name in untyped)
    untyped = []
  if untyped:
    raise ValueError(f'{what} gives no type for {untyped[0]!r}')


def sections(
    define: Sequence[Expression], what: str
) -> Iterator[tuple[str, list[Expression]]]:
  """Yields (keyword, rest) of each `(:keyword ..)` within a `(define ..)`.

  Raises:
    ValueError: if it is no `define`, or a part of it is no section.
  """
  if define[:1] != ['define'] or len(define) < 2:
    raise ValueError(f'{what} must start with (define (..)')
  for part in define[2:]:
    if (not isinstance(part, list) or not part or not isinstance(part[0], str)
        or not part[0].startswith(':')):
      raise ValueError(f'{what} must consist of (:section ..), got '
                       f'{show(part)[:60]}')
    yield part[0], part[1:]


def read_problem(text: str) -> Problem:
  """Reads a PDDL problem.

  Raises:
    ValueError: if a section is missing, twice there, or not of its form.
  """
  found: dict[str, list[Expression]] = {}
  for keyword, rest in sections(read(text, 'pddl_problem'), 'pddl_problem'):
    if keyword in found:
      raise ValueError(f'pddl_problem has two ({keyword} ..)')
    found[keyword] = rest
  for keyword in (':objects', ':init', ':goal'):
    if keyword not in found:
      raise ValueError(f'pddl_problem has no ({keyword} ..), only '
                       f'{sorted(found)}')
  if len(found[':goal']) != 1:
    raise ValueError('pddl_problem needs one goal, got '
                     f'{len(found[":goal"])} expressions')
  return Problem(
      objects=dict(typed(found[':objects'], 'pddl_problem (:objects ..)')),
      facts=_facts(found[':init']), goal=found[':goal'][0])


def _facts(init: Sequence[Expression]) -> dict[str, list[tuple[str, ...]]]:
  facts: dict[str, list[tuple[str, ...]]] = {}
  for fact in init:
    if not isinstance(fact, list) or not fact or list in map(type, fact):
      raise ValueError(f'pddl_problem (:init ..) has {show(fact)}, which is no '
                       '(predicate name ..)')
    facts.setdefault(fact[0], []).append(tuple(fact[1:]))
  return facts

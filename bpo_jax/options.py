"""The scalar options of a function, read from its signature and docstring.

An option of an estimator, a branch policy or an objective is declared once, as
a parameter with a default, an annotation and a line under Args; whoever wants
a flag or a table of options asks here.
"""

from collections.abc import Callable
import functools
import inspect
import re
import types as python_types
import typing
from typing import Any, Literal, NamedTuple

_ARGUMENT = re.compile(r'^  (\w+): (.*)$')
_SCALARS = (bool, int, float, str)


class Option(NamedTuple):
  """One scalar option of a function.

  Attributes:
    annotation: bool, int, float or a Literal, perhaps with None.
    default: what it is when not given.
    help: its lines under Args, in one.
  """

  annotation: Any
  default: Any
  help: str


def of(function: Callable[..., Any]) -> dict[str, Option]:
  """Returns the scalar options of a function, parameters with a default.

  Of `functools.partial`s too, whose keywords are the defaults then. Parameters
  that take arrays or keys are none; one that takes a scalar or an array is an
  option that takes the scalar.
  """
  inner = unwrap(function)
  annotations, texts = typing.get_type_hints(inner), arguments(inner)
  options = {}
  for name, parameter in inspect.signature(function).parameters.items():
    annotation = _scalar(annotations.get(name))
    has_default = parameter.default is not inspect.Parameter.empty
    if has_default and annotation is not None:
      options[name] = Option(annotation, parameter.default, texts.get(name, ''))
  return options


def keywords(function: Callable[..., Any]) -> tuple[str, ...]:
  """Returns the names of all parameters after the first, arrays included."""
  return tuple(inspect.signature(function).parameters)[1:]


def unwrap(function: Callable[..., Any]) -> Callable[..., Any]:
  """Returns the function inside of `functools.partial`s."""
  while isinstance(function, functools.partial):
    function = function.func
  return function


def arguments(function: Callable[..., Any]) -> dict[str, str]:
  """Returns what the docstring says of each argument, in one line each."""
  text = inspect.getdoc(function) or ''
  _, _, section = text.partition('\nArgs:\n')
  found, name = {}, None
  for line in section.splitlines():
    start = _ARGUMENT.match(line)
    if line and not line.startswith(' '):  # The next section.
      break
    if start:
      name = start[1]
      found[name] = start[2]
    elif name and line.strip():
      found[name] += ' ' + line.strip()
  return found


def _scalar(annotation: Any) -> Any:
  """Returns the annotation without its arrays, None if no one scalar is left.

  A union of int and float is what takes any number, traced ones too: no option.
  """
  union = typing.get_origin(annotation) in (
      typing.Union, python_types.UnionType)
  members = typing.get_args(annotation) if union else (annotation,)
  scalars = [m for m in members
             if m in _SCALARS or typing.get_origin(m) is Literal]
  if len(scalars) != 1:
    return None
  return scalars[0] | None if type(None) in members else scalars[0]

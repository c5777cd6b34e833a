"""Fields of config dataclasses that check themselves.

A field says what it means, and what values it takes, where it is declared:

  @dataclasses.dataclass(frozen=True)
  class TrainConfig:
    learning_rate: float = field(1e-3, 'Step size of Adam.', min=0.0)
    __post_init__ = check

`config_flags` makes a flag of every field.
"""

from collections.abc import Sequence
import dataclasses
import difflib
import math
import types
import typing
from typing import Any, Literal


def field(
    default: Any = dataclasses.MISSING,
    help: str = '',  # pylint: disable=redefined-builtin
    *,
    min: float | None = None,  # pylint: disable=redefined-builtin
    max: float | None = None,  # pylint: disable=redefined-builtin
    choices: Sequence[Any] | None = None,
    not_blank: bool = False,
) -> Any:
  """Declares a config field.

  Args:
    default: its value unless given; left out, the flag is required.
    help: one sentence with the unit, shown by --help.
    min: smallest value allowed; for a tuple, of each element.
    max: largest value allowed; for a tuple, of each element.
    choices: the only values allowed; for a tuple, of each element.
    not_blank: whether text must say something; else a flag without any stands
      for None where that is allowed.
  """
  metadata = {'help': help, 'min': min, 'max': max, 'choices': choices,
              'not_blank': not_blank}
  return dataclasses.field(default=default, metadata=metadata)


def check(config: Any) -> None:
  """Raises ValueError naming the first field with a wrong type or range.

  Meant as `__post_init__`, so that no config with such a value can be made.
  """
  annotations = annotations_of(type(config))
  for spec in dataclasses.fields(config):
    fault = find_fault(
        getattr(config, spec.name), annotations[spec.name], spec.metadata
    )
    if fault:
      raise ValueError(f'{type(config).__name__}.{spec.name}: {fault}')


def find_fault(
    value: Any, annotation: Any, metadata: typing.Mapping[str, Any]
) -> str:
  """Returns what is wrong with a field's value, or '' if nothing is."""
  if not _has_type(value, annotation):
    literal = optional_of(annotation) or annotation
    choices = (typing.get_args(literal)
               if typing.get_origin(literal) is Literal else ())
    return f'expected {describe(annotation)}, got {value!r}.' + near(
        str(value), [str(choice) for choice in choices])
  for element in value if isinstance(value, tuple) else (value,):
    fault = _range_fault(element, metadata)
    if fault:
      return fault
  return ''


def _range_fault(value: Any, metadata: typing.Mapping[str, Any]) -> str:
  if value is None:
    return ''
  if metadata.get('not_blank') and not value.strip():
    return f'expected some text, got {value!r}.'
  if isinstance(value, float) and not math.isfinite(value):
    return f'expected a finite number, got {value}.'
  low, high = metadata.get('min'), metadata.get('max')
  if low is not None and value < low:
    return f'expected at least {low}, got {value}.'
  if high is not None and value > high:
    return f'expected at most {high}, got {value}.'
  choices = metadata.get('choices')
  if choices is not None and value not in choices:
    return f'expected one of {_join(choices)}, got {value}.' + near(
        str(value), [str(choice) for choice in choices])
  return ''


def near(name: str, names: Sequence[str]) -> str:
  """Returns ' Did you mean ...?' with the names most like `name`, or ''."""
  close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
  return f' Did you mean {" or ".join(close)}?' if close else ''


def annotations_of(config_class: type) -> dict[str, Any]:
  """Returns field name -> type, with annotations that are text resolved."""
  return typing.get_type_hints(config_class)


def optional_of(annotation: Any) -> Any:
  """Returns T if the annotation is `T | None`, else None."""
  if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
    return None
  members = [a for a in typing.get_args(annotation) if a is not type(None)]
  if len(members) != 1 or len(typing.get_args(annotation)) != 2:
    raise TypeError(f'a config field may be T or T | None, not {annotation}.')
  return members[0]


def tuple_elements(annotation: Any, length: int) -> list[Any]:
  """Returns the types of a tuple's elements for a value of that length."""
  arguments = typing.get_args(annotation)
  if len(arguments) == 2 and arguments[1] is Ellipsis:
    return [arguments[0]] * length
  return list(arguments)


def describe(annotation: Any) -> str:
  """Returns the type in words, such as `int or none`."""
  inner = optional_of(annotation)
  if inner is not None:
    return f'{describe(inner)} or none'
  if typing.get_origin(annotation) is Literal:
    return 'one of ' + _join(typing.get_args(annotation))
  if typing.get_origin(annotation) is tuple:
    arguments = typing.get_args(annotation)
    if arguments[-1] is Ellipsis:
      return f'{describe(arguments[0])} values with commas between'
    return ','.join(describe(argument) for argument in arguments)
  return {bool: 'true or false', str: 'text'}.get(
      annotation, annotation.__name__)


def _join(values: Sequence[Any]) -> str:
  return ', '.join(str(value) for value in values)


def _has_type(value: Any, annotation: Any) -> bool:
  inner = optional_of(annotation)
  if inner is not None:
    return value is None or _has_type(value, inner)
  if typing.get_origin(annotation) is Literal:
    return value in typing.get_args(annotation)
  if typing.get_origin(annotation) is tuple:
    if not isinstance(value, tuple):
      return False
    elements = tuple_elements(annotation, len(value))
    return len(elements) == len(value) and all(map(_has_type, value, elements))
  if annotation in (int, float):
    numbers = int if annotation is int else (int, float)
    return isinstance(value, numbers) and not isinstance(value, bool)
  return isinstance(value, annotation)

"""What callers get told when an argument is wrong.

Every message says what was expected, what came, and for a misspelt name the
names that are near.
"""

from collections.abc import Sequence
import difflib
import math
import typing
from typing import Any


def one_of(name: str, value: Any, allowed: Any) -> None:
  """Raises ValueError unless `value` is one of a Literal's or a sequence's."""
  allowed = typing.get_args(allowed) or tuple(allowed)
  if value not in allowed:
    raise ValueError(unknown(name, value, allowed))


def at_least(name: str, value: Any, low: float, why: str = '') -> None:
  """Raises ValueError unless the host number `value` is at least `low`."""
  if not value >= low:
    raise ValueError(f'{name}: expected at least {low}{why}, got {value}')


def between(name: str, value: Any, low: float, high: float = math.inf) -> None:
  """Raises ValueError unless a host number lies in [low, high].

  Arrays, traced ones too, are let through: what they hold is not known here.
  """
  if isinstance(value, (int, float)) and not low <= value <= high:
    raise ValueError(f'{name}: expected a number from {low} to {high}, got '
                     f'{value}')


def shape(name: str, value: Any, expected: tuple[int, ...]) -> None:
  """Raises ValueError unless an array has just that shape."""
  got = getattr(value, 'shape', ())
  if tuple(got) != tuple(expected):
    raise ValueError(f'{name}: expected shape {tuple(expected)}, got '
                     f'{tuple(got)}')


def given(name: str, value: Any, algorithm: str, how: str) -> None:
  """Raises ValueError if what an algorithm cannot do without is None."""
  if value is None:
    raise ValueError(f'{algorithm} needs {name}: expected {how}, got None')


def unknown(name: str, value: Any, allowed: Sequence[str]) -> str:
  """Returns the message for a name that is none of `allowed`."""
  near = difflib.get_close_matches(str(value), allowed, n=3)
  meant = f'; did you mean {" or ".join(near)}?' if near else ''
  return (f'{name}: expected one of {", ".join(map(str, allowed))}; '
          f'got {value!r}{meant}')

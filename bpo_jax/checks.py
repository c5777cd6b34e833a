"""What callers get told when an argument is wrong.

Every message says what was expected, what came, and for a misspelt name the
names that are near.
"""

from collections.abc import Sequence
import difflib
import math
import operator
import typing
from typing import Any

import jax
import numpy as np

MOST = 2**31 - 1  # What int32, in which nodes and forks are counted, holds.


def one_of(name: str, value: Any, allowed: Any) -> None:
  """Raises ValueError unless `value` is one of a Literal's or a sequence's."""
  allowed = typing.get_args(allowed) or tuple(allowed)
  if value not in allowed:
    raise ValueError(unknown(name, value, allowed))


def at_least(name: str, value: Any, low: float, why: str = '') -> None:
  """Raises ValueError unless the host number `value` is at least `low`."""
  if not value >= low:
    raise ValueError(f'{name}: expected at least {low}{why}, got {value}')


def whole(name: str, value: Any, low: int = 1, why: str = '',
          high: int = MOST) -> None:
  """Raises ValueError unless a host number is whole and in [low, high].

  Traced arrays are let through: what they hold is not known here.
  """
  if isinstance(value, jax.core.Tracer):
    return
  try:
    number = operator.index(value)
  except TypeError as error:
    raise ValueError(
        f'{name}: expected a whole number{why}, got {value!r}') from error
  at_least(name, number, low, why)
  if number > high:
    raise ValueError(f'{name}: expected at most {high}{why}, got {number}')


def between(name: str, value: Any, low: float, high: float = math.inf) -> None:
  """Raises ValueError unless numbers are finite and in [low, high].

  Of an array all of them; traced ones are let through, for what they hold is
  not known here.
  """
  if isinstance(value, jax.core.Tracer):
    return
  numbers = _numbers(name, value)
  # The bounds as float32 has them: 1e-3 of an array may be a little less.
  near = (numbers >= np.float32(low)) | (numbers >= low)
  near &= (numbers <= np.float32(high)) | (numbers <= high)
  if not np.all(near & np.isfinite(numbers)):
    limits = f'a number from {low} to {high}'
    if high == math.inf:
      limits = 'a finite number' + ('' if low == -high else f', at least {low}')
    raise ValueError(f'{name}: expected {limits}, got {value}')


def not_nan(name: str, value: Any) -> None:
  """Raises ValueError if a number is NaN; traced ones are let through."""
  if not isinstance(value, jax.core.Tracer) and np.any(
      np.isnan(_numbers(name, value))):
    raise ValueError(f'{name}: expected a number, got {value}')


def _numbers(name, value):
  """Returns numbers as float64; text is none, though it may spell one."""
  try:
    numbers = np.asarray(value)
    if numbers.dtype.kind not in 'US':
      return numbers.astype(np.float64)
  except (TypeError, ValueError):
    pass
  raise ValueError(f'{name}: expected a number, got {value!r}')


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


def positive(name: str, value: Any) -> None:
  """Raises ValueError unless numbers are finite and above 0, as `between`."""
  between(name, value, 0)
  if not isinstance(value, jax.core.Tracer) and not np.all(
      _numbers(name, value) > 0):
    raise ValueError(f'{name}: expected a positive number, got {value}')


def one_key(algorithm: str, key: Any) -> None:
  """Raises ValueError unless given one typed key."""
  how = 'one typed key, key=jax.random.key(seed)'
  given('key', key, algorithm, how)
  dtype = getattr(key, 'dtype', None)
  is_key = dtype is not None and jax.dtypes.issubdtype(
      dtype, jax.dtypes.prng_key)
  if not is_key or np.ndim(key):
    got = (f'{dtype} of shape {np.shape(key)}' if dtype is not None
           else repr(key))
    raise ValueError(f'{algorithm}: key: expected {how}, got {got}')


def unknown(name: str, value: Any, allowed: Sequence[str]) -> str:
  """Returns the message for a name that is none of `allowed`."""
  near = difflib.get_close_matches(str(value), allowed, n=3)
  meant = f'; did you mean {" or ".join(near)}?' if near else ''
  return (f'{name}: expected one of {", ".join(map(str, allowed))}; '
          f'got {value!r}{meant}')

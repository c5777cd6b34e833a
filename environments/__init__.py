"""Sandboxes for language agents; `make` builds one by its name."""

from collections.abc import Callable
import difflib
from typing import Any

from environments import base


def _alfworld(**kwargs: Any) -> base.Environment:
  from environments.alfworld import environment
  if not kwargs.get('data'):
    raise ValueError(
        "environments.make('alfworld') needs data=DIR: ALFWorld's folder "
        'json_2.1.1, or the one that it is in; '
        "environments.make('household') needs none")
  return environment.AlfworldEnvironment(**kwargs)


def _household(**kwargs: Any) -> base.Environment:
  from environments.alfworld import household
  return household.HouseholdEnvironment(**kwargs)


# Each imports its environment when it is made: some need much to be there.
_MAKERS: dict[str, Callable[..., base.Environment]] = {
    'alfworld': _alfworld,
    'household': _household,
}


def names() -> tuple[str, ...]:
  """Returns the names that `make` accepts."""
  return tuple(sorted(_MAKERS))


def make(name: str, **kwargs: Any) -> base.Environment:
  """Returns a new environment.

  Args:
    name: one of `names()`.
    **kwargs: the environment's own arguments, such as `data` for `alfworld`.

  Raises:
    ValueError: if there is no environment of that name, or an argument that it
      needs is missing or wrong.
  """
  if name not in _MAKERS:
    near = difflib.get_close_matches(name, names(), n=3, cutoff=0.4)
    hint = f'; near it: {", ".join(near)}' if near else ''
    raise ValueError(f'no environment {name!r}{hint}; there are '
                     f'{", ".join(names())}')
  return _MAKERS[name](**kwargs)

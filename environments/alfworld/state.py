"""What changes while a household game is played, as one immutable value."""

from typing import NamedTuple


class State(NamedTuple):
  """One moment of a game; equal moments are equal, and hash alike.

  Objects, receptacles and locations are numbers: indices into the game's
  `objects`, `receptacles` and `locations`. Ask `o in state.hot`, `r in
  state.opened`, `state.contents[r]`.

  Attributes:
    location: where the agent is.
    holding: the object in its hands, or None.
    opened: the receptacles that stand open; of openable ones only.
    contents: for each receptacle the objects in it, ascending.
    places: the (object, location) pairs of everything that lies somewhere.
    taken: the (object, receptacle) pairs of every object that was taken out of
      a receptacle and not put back; the text tells of no others lying about.
    clean: objects that were cleaned.
    hot: objects that were heated, and not cooled since.
    cool: objects that were cooled, and not heated since.
    sliced: objects that were sliced.
    toggled: objects that were switched on; nothing switches them off.
  """

  location: int
  holding: int | None
  opened: frozenset[int]
  contents: tuple[tuple[int, ...], ...]
  places: frozenset[tuple[int, int]]
  taken: frozenset[tuple[int, int]] = frozenset()
  clean: frozenset[int] = frozenset()
  hot: frozenset[int] = frozenset()
  cool: frozenset[int] = frozenset()
  sliced: frozenset[int] = frozenset()
  toggled: frozenset[int] = frozenset()

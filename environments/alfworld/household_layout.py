"""Draws the rooms of the generated games: which furniture stands where.

A layout decides which split may use it, by a hash of its furniture. So no room
is ever shared between splits, whatever the seed and however many games there
are.
"""

from collections.abc import Sequence
import dataclasses
import hashlib
import random

from environments.alfworld import household_rooms

# Furniture stands along the walls of a room of 8 by 6 cells, half a metre each.
_WIDTH, _DEPTH, _CELL = 8, 6, 0.5
_HIGHEST_STACK = 4
_STACKED_SHARE = 0.5

SPLITS = ('train', 'valid_seen', 'valid_unseen')
_SHARES = (0.5, 0.25, 0.25)  # Of all layouts, by split.


@dataclasses.dataclass(frozen=True, order=True)
class Receptacle:
  """One piece of furniture.

  Attributes:
    type: such as `Cabinet`.
    cell: where the agent stands to reach it: (column, row, wall).
    position: (x, y, z) in centimetres, y upwards.
  """

  type: str
  cell: tuple[int, int, int]
  position: tuple[int, int, int]

  @property
  def id(self) -> str:
    """Its name in the problem; basins are parts of a sink or a bathtub."""
    if self.type.endswith('Basin'):
      return f'{object_id(self.type[:-5], self.position)}_bar_{self.type}'
    return object_id(self.type, self.position)

  @property
  def location(self) -> str:
    """The problem's name of the place where the agent stands."""
    return location_id(self.cell)


@dataclasses.dataclass(frozen=True)
class Layout:
  """A room and its furniture, sorted, before anything lies in it."""

  room: str
  receptacles: tuple[Receptacle, ...]

  @property
  def types(self) -> frozenset[str]:
    """The types of its receptacles."""
    return frozenset(piece.type for piece in self.receptacles)

  @property
  def split(self) -> str:
    """The only split whose games may use it.

    By what an agent can tell of a room, its kind and how many of each type of
    furniture it has: two rooms that differ in coordinates alone are one.
    """
    types = tuple(sorted(piece.type for piece in self.receptacles))
    share = hash_share((self.room, types))
    if share < _SHARES[0]:
      return SPLITS[0]
    return SPLITS[1] if share < _SHARES[0] + _SHARES[1] else SPLITS[2]


def hash_share(value: object) -> float:
  """Maps a value's `repr` to [0, 1), the same on every machine and run."""
  digest = hashlib.sha256(repr(value).encode()).digest()
  return int.from_bytes(digest[:8], 'big') / 2 ** 64


def object_id(type_: str, position: Sequence[int]) -> str:
  """Returns `Mug_bar__plus_01_dot_25_bar_...` for centimetres (x, y, z)."""
  return '_bar_'.join([type_, *map(_coordinate, position)])


def location_id(cell: Sequence[int]) -> str:
  """Returns `loc_bar_3_bar__minus_2_bar_...` for cell indices."""
  numbers = (f'_minus_{-n}' if n < 0 else str(n) for n in cell)
  return '_bar_'.join(['loc', *numbers])


def draw(rng: random.Random, room: str, count: int) -> Layout:
  """Returns a random layout with `count` receptacles, or all a room can hold.

  Args:
    rng: consumed.
    room: a key of `household_rooms.ROOMS`.
    count: receptacles wanted; what every such room needs comes on top.
  """
  types = _draw_types(rng, household_rooms.ROOMS[room], count)
  cells = _wall_cells()
  rng.shuffle(cells)
  stacks: list[tuple[str, tuple[int, int, int], int]] = []
  pieces = []
  for type_ in types:
    cell, level = _stand(rng, type_, stacks, cells)
    pieces.append(Receptacle(type_, cell, _position(type_, cell, level)))
  return Layout(room, tuple(sorted(pieces)))


def _draw_types(rng, furniture, count: int) -> list[str]:
  drawn = [type_ for type_, piece in furniture.items()
           for _ in range(piece.needed)]
  room_left = {type_: piece.most - piece.needed
               for type_, piece in furniture.items()}
  while len(drawn) < count:
    types = [t for t in furniture if room_left[t] and furniture[t].weight]
    if not types:
      break
    weights = [furniture[t].weight for t in types]
    type_ = rng.choices(types, weights)[0]
    room_left[type_] -= 1
    drawn.append(type_)
  return drawn


def _stand(rng, type_: str, stacks: list, cells: list):
  """Returns the cell and level of the next piece; updates both lists."""
  if type_ in household_rooms.STACKED and rng.random() < _STACKED_SHARE:
    for i, (other, cell, height) in enumerate(stacks):
      if other == type_ and height < _HIGHEST_STACK:
        stacks[i] = (other, cell, height + 1)
        return cell, height
  cell = cells.pop()
  stacks.append((type_, cell, 1))
  return cell, 0


def _position(type_: str, cell, level: int) -> tuple[int, int, int]:
  aside, up = household_rooms.STACKED.get(type_, (0.0, 0.0))
  x = cell[0] * _CELL + level * aside
  y = household_rooms.HEIGHTS[type_] + level * up
  z = cell[1] * _CELL
  return round(100 * x), round(100 * y), round(100 * z)


def _wall_cells() -> list[tuple[int, int, int]]:
  """The cells along the four walls, as (column, row, wall), centred on 0."""
  right, back = _WIDTH // 2, _DEPTH // 2
  rows = [(x, z, wall) for wall, z in ((0, back), (2, -back))
          for x in range(-right, right + 1)]
  columns = [(x, z, wall) for wall, x in ((1, right), (3, -right))
             for z in range(-back + 1, back)]
  return rows + columns


def _coordinate(centimetres: int) -> str:
  sign = 'minus' if centimetres < 0 else 'plus'
  metres, rest = divmod(abs(centimetres), 100)
  return f'_{sign}_{metres:02d}_dot_{rest:02d}'

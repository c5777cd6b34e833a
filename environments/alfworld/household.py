"""Generated household games: the environment that needs no data.

`environments.make('household')` plays any number of games of the six kinds of
ALFWorld, on the same engine, with the same names, in sentences of its own.
"""

from collections.abc import Sequence
import dataclasses
import json
import pathlib
import random

from environments.alfworld import environment
from environments.alfworld import game as game_lib
from environments.alfworld import household_games
from environments.alfworld import household_layout
from environments.alfworld import planner

_DIGITS = 6


class _Ids(Sequence[str]):
  """The ids `<split>/000000`, `<split>/000001`, .., none of them stored."""

  def __init__(self, split: str, numbers: range):
    self._split = split
    self._numbers = numbers

  def __len__(self) -> int:
    return len(self._numbers)

  def __getitem__(self, index):
    if isinstance(index, slice):
      return _Ids(self._split, self._numbers[index])
    return f'{self._split}/{self._numbers[index]:0{_DIGITS}d}'

  def __contains__(self, task_id: object) -> bool:
    split, _, number = str(task_id).partition('/')
    return (split == self._split and number.isascii() and number.isdigit()
            and len(number) == _DIGITS and int(number) in self._numbers)


class HouseholdEnvironment(environment.GameEnvironment):
  """Seeded, unlimited household games.

  A game is a function of the environment's seed and its task id, so that
  processes which agree on both play the same games. Each can be won, none is
  won from the start, and its walkthrough is a shortest one.

  No room layout (which furniture stands where) is shared between splits,
  whatever the seeds: a hash of the layout says which split may use it. In
  `valid_seen` the goals are of the kind that training asks for, the rooms are
  new. In `valid_unseen` every goal is new as well: its combination of task
  type, object and receptacle (or lamp) is never asked for in the other two.
  """

  def __init__(
      self, seed: int = 0, num_receptacles: tuple[int, int] = (5, 10),
      num_objects: tuple[int, int] = (6, 16), num_train: int = 100_000,
      num_valid: int = 200, max_games: int = 256):
    """Generates nothing yet.

    Args:
      seed: of all games.
      num_receptacles: least and most receptacles of a room.
      num_objects: least and most objects in it.
      num_train: tasks in `train`.
      num_valid: tasks in `valid_seen`, and in `valid_unseen`.
      max_games: how many generated games are kept, the last used ones.

    Raises:
      ValueError: if a number is out of its bounds; it says which.
    """
    super().__init__(max_games)
    self._seed = seed
    self._sizes = household_games.Sizes(
        tuple(num_receptacles), tuple(num_objects))
    counts = (num_train, num_valid, num_valid)
    for count in counts:
      if not 1 <= count <= 10 ** _DIGITS:
        raise ValueError(f'expected between 1 and {10 ** _DIGITS} tasks a '
                         f'split, got {count}')
    self._listed = {split: _Ids(split, range(count))
                    for split, count in zip(household_layout.SPLITS, counts)}

  def splits(self) -> tuple[str, ...]:
    """Returns the names that `tasks` accepts."""
    return household_layout.SPLITS

  def save(self, task_id: str, path: str | pathlib.Path) -> None:
    """Writes a task's game as a file of ALFWorld's form, `game.tw-pddl`.

    Raises:
      ValueError: if there is no such task.
    """
    walkthrough = list(self.game(task_id).walkthrough)
    content = self._content(task_id) | {'walkthrough': walkthrough}
    pathlib.Path(path).write_text(json.dumps(content), encoding='utf-8')

  def _ids(self, split: str) -> Sequence[str]:
    return self._listed[split]

  def _check_id(self, task_id: str) -> None:
    if not any(task_id in ids for ids in self._listed.values()):
      counts = ', '.join(f'{ids[0]} to {ids[-1]}'
                         for ids in self._listed.values())
      raise ValueError(f'no task {task_id!r}; there are {counts}')

  def _goal(self, task_id: str) -> str:
    return self.game(task_id).task

  def _content(self, task_id: str) -> dict[str, object]:
    # Text seeds alike on every machine; Python's hash() of it would not.
    rng = random.Random(f'household {self._seed} {task_id}')
    split = task_id.partition('/')[0]
    scene = household_games.draw(rng, split, self._sizes)
    name = task_id.replace('/', '_')
    return household_games.payload(scene, f'household_{self._seed}_{name}')

  def _read_game(self, task_id: str) -> game_lib.Game:
    game = game_lib.parse(json.dumps(self._content(task_id)), task_id)
    return dataclasses.replace(game, walkthrough=planner.shortest(game))

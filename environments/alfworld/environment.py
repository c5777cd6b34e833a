"""Household games as environments: splits of tasks, states as values."""

import abc
from collections.abc import Callable, Iterator, Sequence
import difflib
import functools
import pathlib
from typing import NamedTuple, overload

from environments import base
from environments.alfworld import engine
from environments.alfworld import game as game_lib

_MAX_GAMES = 256  # Parsed games kept, about half a megabyte each.


class State(NamedTuple):
  """Where an episode stands; a value that can be stepped from at will.

  Attributes:
    task_id: the task that is played.
    game: what never changes about it.
    moment: what does.
    terminal: whether the goal was reached, so that no step may follow.
  """

  task_id: str
  game: game_lib.Game
  moment: engine.State
  terminal: bool = False


class Tasks(Sequence[base.Task]):
  """The tasks of a split, each made when it is asked for."""

  def __init__(self, ids: Sequence[str], make: Callable[[str], base.Task]):
    self._ids = ids
    self._make = make

  @property
  def ids(self) -> Sequence[str]:
    """The tasks' ids, for which nothing is read."""
    return self._ids

  def __len__(self) -> int:
    return len(self._ids)

  @overload
  def __getitem__(self, index: int) -> base.Task: ...

  @overload
  def __getitem__(self, index: slice) -> 'Tasks': ...

  def __getitem__(self, index):
    if isinstance(index, slice):
      return Tasks(self._ids[index], self._make)
    return self._make(self._ids[index])

  def __iter__(self) -> Iterator[base.Task]:
    return map(self._make, self._ids)


class GameEnvironment(abc.ABC):
  """An environment of games, wherever they come from.

  Tasks are called `<split>/<name>`. A subclass says which there are and hands
  out the games; everything else is here.
  """

  def __init__(self, max_games: int = _MAX_GAMES):
    """Starts with no game parsed.

    Args:
      max_games: how many parsed games are kept, the last used ones.

    Raises:
      ValueError: if `max_games` is not positive.
    """
    if max_games < 1:
      raise ValueError(f'max_games must be at least 1, got {max_games}')
    self._recall = functools.lru_cache(max_games)(self._checked_game)

  @property
  def capabilities(self) -> base.Capabilities:
    """States are plain values, and every admissible action is listed."""
    return base.Capabilities(enumerable_actions=True, value_states=True)

  @abc.abstractmethod
  def splits(self) -> tuple[str, ...]:
    """Returns the names that `tasks` accepts."""

  @abc.abstractmethod
  def _ids(self, split: str) -> Sequence[str]:
    """Returns the ids of the tasks of one of the splits, in a fixed order."""

  @abc.abstractmethod
  def _goal(self, task_id: str) -> str:
    """Returns the sentence of a task that exists; should be cheap."""

  @abc.abstractmethod
  def _read_game(self, task_id: str) -> game_lib.Game:
    """Returns the game of a task that exists."""

  def tasks(self, split: str) -> Tasks:
    """Returns the split's tasks; each sentence is read when asked for.

    Raises:
      ValueError: if there is no such split, or it is empty.
    """
    if split not in self.splits():
      raise ValueError(f'no split {split!r}; there are '
                       f'{", ".join(self.splits())}')
    ids = self._ids(split)
    if not ids:
      raise ValueError(f'split {split!r} has no tasks')
    return Tasks(ids, self._task)

  def task(self, task_id: str) -> base.Task:
    """Returns the task of that id.

    Raises:
      ValueError: if there is none; it lists ids that are near.
    """
    self._check_id(task_id)
    return self._task(task_id)

  def game(self, task_id: str) -> game_lib.Game:
    """Returns the game of a task, for planners and scripted players.

    Raises:
      ValueError: if there is no such task, or its game is broken.
    """
    return self._recall(task_id)

  def reset(
      self, task: base.Task | str, seed: int = 0
  ) -> tuple[State, base.TimeStep]:
    """Returns the task's first state; games begin alike for every seed.

    As in the original, a game is over only after a step, even if its goal
    should be reached from the beginning.

    Raises:
      ValueError: if there is no such task, or its game is broken.
    """
    del seed  # Nothing is random.
    task_id = task if isinstance(task, str) else task.id
    game = self.game(task_id)
    moment = engine.initial(game)
    return State(task_id, game, moment), base.TimeStep(
        observation=engine.intro(game, moment),
        available=engine.admissible(game, moment),
        info=_info(game, engine.won(game, moment)))

  def step(self, state: State, action: str) -> tuple[State, base.TimeStep]:
    """Returns the state after `action`; `state` itself stays as it was.

    Raises:
      ValueError: if the episode is over.
    """
    task_id, game, moment, terminal = state
    if terminal:
      raise ValueError(f'{task_id} is over: its goal is reached; reset it, or '
                       'step from an earlier state')
    after, text = engine.step(game, moment, action)
    won = engine.won(game, after)
    invalid = text == engine.NOTHING_HAPPENS and not engine.understands(
        game, moment, action)
    return State(task_id, game, after, won), base.TimeStep(
        observation=text, reward=float(won), terminal=won,
        available=engine.admissible(game, after),
        status=base.Status.INVALID_ACTION if invalid else base.Status.OK,
        info=_info(game, won))

  def release(self, state: State) -> None:
    """Does nothing: states are plain values."""

  def close(self) -> None:
    """Forgets the parsed games."""
    self._recall.cache_clear()

  def _checked_game(self, task_id: str) -> game_lib.Game:
    self._check_id(task_id)
    return self._read_game(task_id)

  def _task(self, task_id: str) -> base.Task:
    return base.Task(task_id, _split_of(task_id), self._goal(task_id))

  def _check_id(self, task_id: str) -> None:
    """Raises ValueError, with near names, if there is no such task."""
    split = _split_of(task_id)
    if split not in self.splits():
      raise ValueError(f'no task {task_id!r}: ids start with one of '
                       f'{", ".join(self.splits())} and a slash')
    ids = self._ids(split)
    if task_id not in ids:
      near = difflib.get_close_matches(task_id, ids, n=3)
      raise ValueError(f'no task {task_id!r}; near it: '
                       f'{", ".join(near or ids[:3])}')


def _split_of(task_id: str) -> str:
  return task_id.partition('/')[0]


def _info(game: game_lib.Game, won: bool) -> dict[str, bool | str]:
  return {'won': won, 'task_type': game.goal.task_type}


_SPLITS = ('train', 'valid_train', 'valid_seen', 'valid_unseen')
_FOLDER = 'json_2.1.1'
_FILE = 'game.tw-pddl'


class AlfworldEnvironment(GameEnvironment):
  """ALFWorld's own games, read from the benchmark's files.

  The splits are those that the data have, of `train`, `valid_train`,
  `valid_seen` and `valid_unseen`; a task's id is
  `<split>/<task dir>/<trial dir>`. Files are only ever read.
  """

  def __init__(self, data: str | pathlib.Path, max_games: int = _MAX_GAMES):
    """Lists the games; none is read yet.

    Args:
      data: the folder json_2.1.1, or the one that it is in (what ALFWorld
        calls $ALFWORLD_DATA).
      max_games: how many parsed games are kept.

    Raises:
      ValueError: if there is no such folder, or it has no games.
    """
    super().__init__(max_games)
    self._root = _games_folder(pathlib.Path(data).expanduser())
    self._listed: dict[str, tuple[str, ...]] = {}
    for split in _SPLITS:
      files = self._root.glob(f'{split}/*/*/{_FILE}')
      ids = sorted('/'.join(file.parts[-4:-1]) for file in files)
      if ids:
        self._listed[split] = tuple(ids)
    if not self._listed:
      raise ValueError(
          f'no games in {self._root}: expected files such as '
          f'valid_seen/<task dir>/<trial dir>/{_FILE}')
    self._goals: dict[str, str] = {}

  def splits(self) -> tuple[str, ...]:
    """Returns the names of the splits that have games."""
    return tuple(self._listed)

  def path(self, task_id: str) -> pathlib.Path:
    """Returns the file of a task.

    Raises:
      ValueError: if there is no such task.
    """
    self._check_id(task_id)
    return self._root / task_id / _FILE

  def _ids(self, split: str) -> Sequence[str]:
    return self._listed[split]

  def _goal(self, task_id: str) -> str:
    if task_id not in self._goals:
      self._goals[task_id] = game_lib.read_task(self.path(task_id))
    return self._goals[task_id]

  def _read_game(self, task_id: str) -> game_lib.Game:
    return game_lib.load(self.path(task_id))


def _games_folder(data: pathlib.Path) -> pathlib.Path:
  """Returns the folder that the splits are in."""
  if not data.is_dir():
    raise ValueError(f'no folder {data}: expected {_FOLDER} of ALFWorld, or '
                     'the folder that it is in')
  inner = data / _FOLDER
  return inner if inner.is_dir() else data

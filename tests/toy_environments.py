"""A tiny environment that watches how it is used, and one of each way to err.

In a corridor lie a key and, at its end, a door. States are objects that must be
released exactly once: the environment counts them and refuses a state that was
released, as a sandbox would.
"""

import copy
import dataclasses
import itertools
import random

from environments import base

_MAX_TURNS = 12
_NUM_TASKS = 4


@dataclasses.dataclass(eq=False)
class Place:
  """A state."""

  length: int
  key_at: int
  at: int = 0
  has_key: bool = False
  turn: int = 0
  is_open: bool = False
  released: bool = False
  shared: list = dataclasses.field(default_factory=list)
  parent: 'Place | None' = None


class Corridor:
  """Find the key, walk to the door, open it."""

  capabilities = base.Capabilities(enumerable_actions=True)

  def __init__(self):
    self.num_live = 0
    self.num_released = 0
    self.num_resets = 0
    self.num_steps = 0
    self.closed = False

  def splits(self):
    return ('train', 'test')

  def tasks(self, split):
    if split not in self.splits():
      raise ValueError(f'no split {split!r}')
    return [self._task(split, i) for i in range(_NUM_TASKS)]

  def task(self, task_id):
    for split in self.splits():
      for task in self.tasks(split):
        if task.id == task_id:
          return task
    raise ValueError(f'no task {task_id!r}')

  def reset(self, task, seed=0):
    self.num_resets += 1
    task = self.task(task.id if isinstance(task, base.Task) else task)
    length = 2 + int(task.id.rpartition('/')[2])
    key_at = random.Random(f'{task.id} {seed}').randrange(length)
    return self._enter(Place(length, key_at), 'You are in a corridor.')

  def step(self, state, action):
    if state.released:
      raise RuntimeError('this state was released')
    if state.is_open:
      raise ValueError('the episode is over')
    self.num_steps += 1
    if action not in self._available(state):
      return self._refuse(state)
    following = self._copy(state)
    following.turn += 1
    told = self._act(following, action)
    return self._enter(following, told)

  def release(self, state):
    if state.released:
      raise RuntimeError('released twice')
    state.released = True
    self.num_live -= 1
    self.num_released += 1

  def close(self):
    self.closed = True

  def _task(self, split, index):
    return base.Task(f'{split}/{index}', split, 'open the door')

  def _copy(self, state):
    return dataclasses.replace(state, shared=list(state.shared), parent=state)

  def _refuse(self, state):
    # The very same state: nothing happened.
    return state, base.TimeStep(
        'Nothing happens.', available=self._available(state),
        status=base.Status.INVALID_ACTION)

  def _act(self, state, action):
    """Changes `state`, which is new and nobody else's."""
    state.shared.append(action)
    if action == 'take key':
      state.has_key = True
    elif action == 'open door':
      state.is_open = True
    else:
      state.at += 1 if action == 'go right' else -1
    return f'You {action}. Turn {state.turn}, place {state.at}.'

  def _available(self, state):
    available = []
    if state.at > 0:
      available.append('go left')
    if state.at < state.length - 1:
      available.append('go right')
    elif state.has_key:
      available.append('open door')
    if state.at == state.key_at and not state.has_key:
      available.append('take key')
    return tuple(available)

  def _enter(self, state, told):
    self.num_live += 1
    return state, base.TimeStep(
        told, reward=float(state.is_open), terminal=state.is_open,
        truncated=state.turn >= _MAX_TURNS and not state.is_open,
        available=self._available(state))


class Mutating(Corridor):
  """Changes the state that it was given."""

  def _copy(self, state):
    self.num_live -= 1
    return state


class Remembering(Corridor):
  """Counts the turns in its state, but the state keeps a count of visits."""

  def _act(self, state, action):
    state.parent.shared.append('visit')
    return super()._act(state, action) + f' Visits {len(state.parent.shared)}.'


class SharedSiblings(Corridor):
  """All descendants of a first state write into one list."""

  def _copy(self, state):
    return copy.copy(state)

  def _act(self, state, action):
    told = super()._act(state, action)
    return told + f' {len(state.shared)} things happened.'


class Restless(Corridor):
  """Tells the time."""

  def __init__(self):
    super().__init__()
    self._clock = itertools.count()

  def _act(self, state, action):
    return super()._act(state, action) + f' It is {next(self._clock)} o\'clock.'


class OneWorld(Corridor):
  """Every reset spoils where the key lies in the next one."""

  def reset(self, task, seed=0):
    state, _ = super().reset(task, seed)
    state.key_at = self.num_resets % state.length
    self.num_live -= 1
    return self._enter(state, f'The key is at {state.key_at}.')


class Leaking(Corridor):
  """Forgets that it let a state go."""

  def release(self, state):
    super().release(state)
    self.num_live += 1


class PullingDown(Corridor):
  """A released state takes its parent with it."""

  def release(self, state):
    super().release(state)
    if state.parent is not None and not state.parent.released:
      super().release(state.parent)


class ListingTwice(Corridor):
  """Two tasks with one id."""

  def tasks(self, split):
    return [*super().tasks(split), self._task(split, 0)]


class Shuffling(Corridor):
  """Another order with every listing."""

  def tasks(self, split):
    self.num_resets += 1
    tasks = super().tasks(split)
    return tasks[self.num_resets % 3:] + tasks[:self.num_resets % 3]


class Obliging(Corridor):
  """Takes any name for a task."""

  def task(self, task_id):
    try:
      return super().task(task_id)
    except ValueError:
      return self._task('train', 0)


class Raising(Corridor):
  """Raises on what it does not understand."""

  def _refuse(self, state):
    raise KeyError('what?')


class Killing(Corridor):
  """Ends the episode on what it does not understand."""

  def _refuse(self, state):
    state, timestep = super()._refuse(state)
    return state, dataclasses.replace(timestep, truncated=True)


class Unsorted(Corridor):
  """Lists its actions in reverse."""

  def _available(self, state):
    return super()._available(state)[::-1]


class Boasting(Corridor):
  """Lists an action that it does not accept."""

  def step(self, state, action):
    if action == 'fly':
      return self._refuse(state)
    return super().step(state, action)

  def _available(self, state):
    return ('fly', *super()._available(state))


class Undying(Corridor):
  """Goes on after the end."""

  def step(self, state, action):
    if state.is_open:
      return self._enter(self._copy(state), 'Still here.')
    return super().step(state, action)


class EndingTwice(Corridor):
  """Both terminal and truncated."""

  def _enter(self, state, told):
    state, timestep = super()._enter(state, told)
    return state, dataclasses.replace(
        timestep, terminal=state.turn > 2, truncated=state.turn > 2)


class Priceless(Corridor):
  """A reward that is no number."""

  def _enter(self, state, told):
    state, timestep = super()._enter(state, told)
    return state, dataclasses.replace(timestep, reward=float('nan'))


class ClosingOnce(Corridor):
  """Cannot be closed twice."""

  def close(self):
    if self.closed:
      raise RuntimeError('closed already')
    super().close()


class Phrasebook:
  """The words as they come."""

  def prompt(self, timestep):
    return timestep.observation.split()

  def observation(self, timestep, action):
    return [*action.split(), *timestep.observation.split()]

  def commands(self, available):
    return {tuple(command.split()): command for command in available}


class Tokenizer:
  """Numbers words from 2 as it meets them; 1 for the words in `unknown`."""

  def __init__(self, unknown=()):
    self._tokens = dict.fromkeys(unknown, 1)

  def encode(self, words):
    return [
        self._tokens.setdefault(word, len(self._tokens) + 2) for word in words
    ]

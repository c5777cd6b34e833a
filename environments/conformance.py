"""The laws every environment obeys, as checks that anybody can run.

`check(environment)` reports on all of them, and `check_<law>(environment)` puts
one. A test of an environment inherits `EnvironmentLaws` and says how to make
one:

  class TestMyEnvironment(conformance.EnvironmentLaws):

    def make_environment(self):
      return my_environment.MyEnvironment()

A law looks at behaviour only, at what `reset` and `step` tell, never into a
state. That is enough: a state spoilt in a way that no action reveals was not
spoilt.
"""

from collections.abc import Callable, Sequence
import dataclasses
import math
import random
import unittest

from environments import base
from environments import store as stores

# Draws an action to try after a TimeStep.
Propose = Callable[[base.TimeStep, random.Random], str]

# What no environment with enumerable actions understands.
UNKNOWN_ACTION = 'zxq unheard-of gibberish 7'

_NUM_TASKS = 3  # How many tasks of a split a law tries.
_NUM_LISTED = 50  # How many of a split's tasks are listed at least.
_WALK_LENGTH = 8  # Steps; the laws that need no ending walk this far.
_EPISODE_LENGTH = 200  # Steps within which an ending is hoped for.


class LawBroken(AssertionError):
  """An environment broke one of the laws.

  Attributes:
    law: the name of the law.
    detail: what was expected and what came.
  """

  def __init__(self, law: str, detail: str):
    super().__init__(f'{law}: {detail}')
    self.law = law
    self.detail = detail


class Unchecked(Exception):
  """The law could not be put to the test here; says why."""


class _Broken(Exception):
  """What is wrong, raised by a check that does not know its law's name."""


def propose_admissible(timestep: base.TimeStep, rng: random.Random) -> str:
  """Draws an admissible action.

  Raises:
    Unchecked: if none is listed, as where actions are free-form.
  """
  if not timestep.available:
    raise Unchecked('no admissible actions are listed; pass `propose`')
  return rng.choice(timestep.available)


@dataclasses.dataclass(frozen=True)
class _Walk:
  """One path from a first state, every state on it still held.

  Attributes:
    task: what was reset to.
    seed: the seed it was reset with.
    states: [n + 1] the states.
    timesteps: [n + 1] what entering them told.
    actions: [n] what led from each to the next.
  """

  task: base.Task
  seed: int
  states: list[base.State]
  timesteps: list[base.TimeStep]
  actions: list[str]


@dataclasses.dataclass(frozen=True)
class _Probe:
  """What a law does to an environment."""

  environment: base.Environment
  rng: random.Random
  propose: Propose

  def promises(self, capability: str) -> bool:
    return getattr(self.environment.capabilities, capability)

  def need(self, capability: str) -> None:
    """Leaves a law untested that only holds where this is promised."""
    if not self.promises(capability):
      raise Unchecked(f'the environment does not promise to be {capability}')

  def tasks(self) -> list[base.Task]:
    """Returns a few tasks, spread over every split."""
    chosen = []
    for split in self.environment.splits():
      tasks = self.environment.tasks(split)
      chosen += tasks[::max(1, (len(tasks) - 1) // (_NUM_TASKS - 1))]
    return chosen

  def walk(
      self, task: base.Task, length: int = _WALK_LENGTH, seed: int = 0
  ) -> _Walk:
    """Walks at random until the episode is over or the length is reached."""
    state, timestep = self.environment.reset(task, seed)
    walk = _Walk(task, seed, [state], [timestep], [])
    while len(walk.actions) < length and not walk.timesteps[-1].done:
      action = self.propose(walk.timesteps[-1], self.rng)
      state, timestep = self.environment.step(walk.states[-1], action)
      walk.states.append(state)
      walk.timesteps.append(timestep)
      walk.actions.append(action)
    return walk

  def replay(
      self, walk: _Walk, length: int | None = None
  ) -> tuple[base.State, list[base.TimeStep]]:
    """Returns the state after a walk's first actions, made anew, and all told.
    """
    state, timestep = self.environment.reset(walk.task, walk.seed)
    states, timesteps = [state], [timestep]
    for action in walk.actions[:length]:
      state, timestep = self.environment.step(states[-1], action)
      states.append(state)
      timesteps.append(timestep)
    self.release(states, spare=state)
    return state, timesteps

  def follow(
      self, state: base.State, actions: Sequence[str]
  ) -> list[base.TimeStep]:
    """Returns what the actions tell, taken from a state that is kept."""
    states, timesteps = [state], []
    for action in actions:
      following, timestep = self.environment.step(states[-1], action)
      states.append(following)
      timesteps.append(timestep)
    self.release(states, spare=state)
    return timesteps

  def futures(
      self, state: base.State, timestep: base.TimeStep, count: int
  ) -> list[list[str]]:
    """Draws sequences of up to three actions that a state can take."""
    futures = []
    for _ in range(count):
      actions, states, now = [], [state], timestep
      while len(actions) < 3 and not now.done:
        actions.append(self.propose(now, self.rng))
        following, now = self.environment.step(states[-1], actions[-1])
        states.append(following)
      self.release(states, spare=state)
      futures.append(actions)
    return futures

  def release(
      self, states: Sequence[base.State], spare: base.State = None
  ) -> None:
    """Releases each state once, however often it was handed out, but one."""
    for state in {id(state): state for state in states}.values():
      if state is not spare:
        self.environment.release(state)

  def stored_walk(
      self, walk: _Walk, max_live: int | None = None
  ) -> tuple[stores.StateStore, list[int]]:
    """Takes a walk again in a store of its own; returns a handle per state."""
    store = stores.StateStore(self.environment, max_live)
    handles = [store.reset(walk.task, walk.seed)[0]]
    for action in walk.actions:
      handles.append(store.step(handles[-1], action)[0])
    return store, handles


LAWS: dict[str, Callable[..., None]] = {}  # By name, in order of definition.


def _law(check_probe: Callable[[_Probe], None]) -> Callable[..., None]:
  """Makes a check of an environment out of one of a probe; enters it in LAWS.

  Whatever a check lets through breaks its law, for no environment may raise it.
  """
  law = check_probe.__name__.removeprefix('check_')

  def check_environment(
      environment: base.Environment,
      rng: random.Random | None = None,
      propose: Propose = propose_admissible,
  ) -> None:
    try:
      check_probe(_Probe(environment, rng or random.Random(0), propose))
    except _Broken as broken:
      raise LawBroken(law, str(broken)) from broken.__cause__
    except Unchecked:
      raise
    except Exception as error:
      raise LawBroken(law, f'raised {error!r}') from error

  check_environment.__name__ = check_probe.__name__
  check_environment.__qualname__ = check_probe.__qualname__
  check_environment.__doc__ = check_probe.__doc__
  LAWS[law] = check_environment
  return check_environment


def _require(holds: bool, detail: str) -> None:
  if not holds:
    raise _Broken(detail)


def _require_equal(
    expected: base.TimeStep, got: base.TimeStep, where: str
) -> None:
  expected, got = _told(expected), _told(got)
  _require(expected == got, f'{where}: expected {expected}, got {got}')


def _told(timestep: base.TimeStep) -> tuple:
  """Returns all that must be reproduced; `info` may hold a clock's reading."""
  return (
      timestep.observation, timestep.reward, timestep.terminal,
      timestep.truncated, timestep.available, timestep.status,
  )


@_law
def check_tasks(probe: _Probe) -> None:
  """Task ids are unique, found again by id, and listed in a fixed order."""
  splits = probe.environment.splits()
  _require(len(splits) > 0, 'there is no split')
  _require(len(set(splits)) == len(splits), f'a split is twice in {splits}')
  seen = set()
  for split in splits:
    tasks = _listed(probe.environment.tasks(split))
    again = _listed(probe.environment.tasks(split))
    _require(len(tasks) > 0, f'split {split!r} is empty')
    _require(tasks == again, f'split {split!r} changes its order')
    for task in tasks:
      _require(task.id not in seen, f'{task.id!r} is listed twice')
      _require(task.split == split, f'{task} is listed in {split!r}')
      seen.add(task.id)
  for task in probe.tasks():
    found = probe.environment.task(task.id)
    _require(found == task, f'task({task.id!r}) returned {found}')


def _listed(tasks: Sequence[base.Task]) -> list[base.Task]:
  """Returns all tasks, or of a huge split the first and some of the rest."""
  stride = max(1, len(tasks) // _NUM_LISTED)
  return [*tasks[:_NUM_LISTED], *tasks[_NUM_LISTED::stride]]


@_law
def check_unknown_names(probe: _Probe) -> None:
  """An unknown split or task raises ValueError."""
  environment = probe.environment
  for method in (environment.tasks, environment.task, environment.reset):
    try:
      method('no such name')
    except ValueError:
      continue
    raise _Broken(f'{method.__name__} accepted a name that does not exist')


@_law
def check_resets(probe: _Probe) -> None:
  """Equal seeds give equal first states, whatever is played in between."""
  tasks = probe.tasks()
  for task, other in zip(tasks, tasks[1:] + tasks[:1]):
    first, noise = probe.walk(task, seed=3), probe.walk(other, seed=4)
    # Without a promise to be deterministic only the reset itself must agree.
    length = None if probe.promises('deterministic') else 0
    state, timesteps = probe.replay(first, length)
    for expected, got in zip(first.timesteps, timesteps):
      _require_equal(expected, got, f'{task.id} after {other.id}')
    probe.release([*first.states, *noise.states, state])


@_law
def check_timesteps(probe: _Probe) -> None:
  """Every TimeStep is well formed."""
  for task in probe.tasks():
    walk = probe.walk(task)
    for timestep in walk.timesteps:
      _check_timestep(timestep, probe.promises('enumerable_actions'))
    probe.release(walk.states)


def _check_timestep(timestep: base.TimeStep, enumerable: bool) -> None:
  available = timestep.available
  for value, kind in (
      (timestep.observation, str), (timestep.status, base.Status),
      (timestep.terminal, bool), (timestep.truncated, bool), (available, tuple),
  ):
    _require(isinstance(value, kind), f'{value!r} is no {kind.__name__}')
  _require(math.isfinite(timestep.reward), f'reward is {timestep.reward}')
  _require(
      not (timestep.terminal and timestep.truncated),
      f'both terminal and truncated: {timestep}',
  )
  _require(
      list(available) == sorted(set(available)),
      f'available is not sorted and unique: {available}',
  )
  _require(
      not enumerable or timestep.done or len(available) > 0,
      f'actions are enumerable but nothing is admissible: {timestep}',
  )


@_law
def check_admissible(probe: _Probe) -> None:
  """Each action that is listed as admissible is accepted with Status.OK."""
  probe.need('enumerable_actions')
  for task in probe.tasks():
    walk = probe.walk(task)
    for state, timestep in zip(walk.states, walk.timesteps):
      for action in () if timestep.done else timestep.available:
        status = probe.follow(state, [action])[0].status
        _require(
            status == base.Status.OK,
            f'{action!r} is admissible at {task.id} but gave {status!r}',
        )
    probe.release(walk.states)


@_law
def check_unknown_action(probe: _Probe) -> None:
  """An unknown action gives a status, no exception, and costs no life."""
  probe.need('enumerable_actions')
  for task in probe.tasks():
    state, timestep = probe.environment.reset(task, 0)
    after, told = probe.environment.step(state, UNKNOWN_ACTION)
    _require(
        told.status == base.Status.INVALID_ACTION,
        f'expected Status.INVALID_ACTION, got {told.status!r}',
    )
    _require(not told.done, f'it ended the episode: {told}')
    action = probe.propose(timestep, probe.rng)
    for survivor in (state, after):
      status = probe.follow(survivor, [action])[0].status
      _require(
          status == base.Status.OK,
          f'{action!r} gave {status!r} after an unknown action',
      )
    probe.release([state, after])


@_law
def check_pure_step(probe: _Probe) -> None:
  """`step` leaves its state as if it had never been stepped from."""
  probe.need('deterministic')
  for task in probe.tasks():
    walk = probe.walk(task)
    for depth, timestep in enumerate(walk.timesteps[:-1]):
      stepped = walk.states[depth]
      futures = probe.futures(stepped, timestep, count=3)
      for actions in [walk.actions[depth:], *futures]:
        fresh, _ = probe.replay(walk, depth)
        for expected, got in zip(
            probe.follow(fresh, actions), probe.follow(stepped, actions)
        ):
          _require_equal(expected, got, f'{task.id}[{depth}], {actions}')
        probe.environment.release(fresh)
    probe.release(walk.states)


@_law
def check_siblings(probe: _Probe) -> None:
  """Forks of one state, stepped in turns, are independent of each other."""
  probe.need('forkable')
  probe.need('deterministic')
  for task in probe.tasks():
    walk = probe.walk(task, length=2)
    depth = len(walk.actions) - walk.timesteps[-1].done
    root = walk.states[depth]
    plans = probe.futures(root, walk.timesteps[depth], count=4)
    alone = [_follow_alone(probe, walk, depth, actions) for actions in plans]
    held = list(walk.states)
    forks = [root] * len(plans)
    for turn in range(3):
      for i in probe.rng.sample(range(len(plans)), len(plans)):
        if turn < len(plans[i]):
          forks[i], got = probe.environment.step(forks[i], plans[i][turn])
          held.append(forks[i])
          _require_equal(alone[i][turn], got, f'{task.id}, {i} of {plans}')
    probe.release(held)


def _follow_alone(
    probe: _Probe, walk: _Walk, depth: int, actions: Sequence[str]
) -> list[base.TimeStep]:
  """Returns what the actions tell in a state that has no siblings."""
  fresh, _ = probe.replay(walk, depth)
  timesteps = probe.follow(fresh, actions)
  probe.environment.release(fresh)
  return timesteps


@_law
def check_replay(probe: _Probe) -> None:
  """Replaying a log of actions reproduces every TimeStep."""
  probe.need('deterministic')
  for task in probe.tasks():
    walk = probe.walk(task, length=4 * _WALK_LENGTH)
    for _ in range(2):
      state, timesteps = probe.replay(walk)
      for expected, got in zip(walk.timesteps, timesteps):
        _require_equal(expected, got, f'{task.id}, {walk.actions}')
      probe.environment.release(state)
    probe.release(walk.states)


@_law
def check_eviction(probe: _Probe) -> None:
  """A store that keeps two states tells the same as one that keeps all."""
  probe.need('deterministic')
  for task in probe.tasks():
    walk = probe.walk(task)
    store, handles = probe.stored_walk(walk, max_live=2)
    for depth in probe.rng.sample(range(len(walk.actions)), len(walk.actions)):
      _, got = store.step(handles[depth], walk.actions[depth])
      _require_equal(walk.timesteps[depth + 1], got, f'{task.id}[{depth}]')
    store.close()
    probe.release(walk.states)


@_law
def check_endings(probe: _Probe) -> None:
  """Stepping on from a terminal state raises ValueError."""
  num_ended = 0
  for task in probe.tasks():
    walk = probe.walk(task, length=_EPISODE_LENGTH)
    if walk.timesteps[-1].terminal:
      num_ended += 1
      try:
        probe.environment.step(walk.states[-1], (walk.actions or [''])[-1])
      except ValueError:
        pass
      else:
        raise _Broken(f'{task.id} can be stepped on from its terminal state')
    probe.release(walk.states)
  if not num_ended:
    raise Unchecked(
        f'no walk of {_EPISODE_LENGTH} steps came to a terminal state; pass a '
        '`propose` that finds one'
    )


@_law
def check_release(probe: _Probe) -> None:
  """Releasing a state harms no other, and what was held is free again.

  An environment that can count the states it holds has an int attribute
  `num_live`; it must be back where it was once everything is released.
  """
  before = getattr(probe.environment, 'num_live', None)
  for task in probe.tasks():
    walk = probe.walk(task)
    store, handles = probe.stored_walk(walk)
    released = set(probe.rng.sample(handles, len(handles) // 2))
    for handle in released:
      store.release(handle)
    for depth, action in enumerate(walk.actions):
      if handles[depth] not in released and probe.promises('deterministic'):
        _, got = store.step(handles[depth], action)
        _require_equal(walk.timesteps[depth + 1], got, f'{task.id}[{depth}]')
    store.close()
    probe.release(walk.states)
  after = getattr(probe.environment, 'num_live', None)
  _require(
      after == before,
      f'{before} states were held before, {after} after all were released',
  )


@_law
def check_close(probe: _Probe) -> None:
  """`close` may be called twice. This ends the environment."""
  probe.environment.close()
  probe.environment.close()


def check(
    environment: base.Environment,
    seed: int = 0,
    propose: Propose = propose_admissible,
) -> dict[str, str]:
  """Puts every law to an environment, and closes it in the end.

  Args:
    environment: a fresh one.
    seed: of the random walks.
    propose: draws an action after a TimeStep; the default draws an admissible
      one.

  Returns:
    For each law `ok`, or why it is `broken: ` or `unchecked: `.
  """
  report = {}
  for law, check_law in LAWS.items():
    try:
      check_law(environment, random.Random(seed), propose)
      report[law] = 'ok'
    except LawBroken as broken:
      report[law] = f'broken: {broken.detail}'
    except Unchecked as unchecked:
      report[law] = f'unchecked: {unchecked}'
  return report


class EnvironmentLaws:
  """A mixin: one test per law, each with an environment of its own.

  Attributes:
    make_environment: what the inheriting class defines; returns a fresh
      environment, which the test closes.
    seed: of the random walks.
  """

  make_environment: Callable[[], base.Environment]
  seed: int = 0

  def propose(self, timestep: base.TimeStep, rng: random.Random) -> str:
    """Draws an action; override it where actions are free-form."""
    return propose_admissible(timestep, rng)

  def hold(self, check_law: Callable[..., None]) -> None:
    """Fails if the law is broken, skips if it cannot be put to the test."""
    environment = self.make_environment()
    try:
      check_law(environment, random.Random(self.seed), self.propose)
    except Unchecked as unchecked:
      # pytest knows this exception as well, and need not be imported here.
      raise unittest.SkipTest(str(unchecked)) from None
    finally:
      environment.close()

  def test_tasks(self) -> None:
    self.hold(check_tasks)

  def test_unknown_names(self) -> None:
    self.hold(check_unknown_names)

  def test_resets(self) -> None:
    self.hold(check_resets)

  def test_timesteps(self) -> None:
    self.hold(check_timesteps)

  def test_admissible(self) -> None:
    self.hold(check_admissible)

  def test_unknown_action(self) -> None:
    self.hold(check_unknown_action)

  def test_pure_step(self) -> None:
    self.hold(check_pure_step)

  def test_siblings(self) -> None:
    self.hold(check_siblings)

  def test_replay(self) -> None:
    self.hold(check_replay)

  def test_eviction(self) -> None:
    self.hold(check_eviction)

  def test_endings(self) -> None:
    self.hold(check_endings)

  def test_release(self) -> None:
    self.hold(check_release)

  def test_close(self) -> None:
    self.hold(check_close)

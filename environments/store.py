"""Keeps environment states behind integer handles, as few as one likes.

A tree of rollouts may hold thousands of states, and a state may be a parked
process. The store counts references, keeps at most `max_live` states
materialised, and remembers every other one as its action log: the task, the
seed and the actions since. An evicted state that is asked for again is
replayed, and every replayed step must tell the agent what it told it before.
"""

from collections.abc import Iterator, Sequence
import collections
import dataclasses
import itertools
import threading
from typing import Any

from environments import base

NO_STATE = 0  # The handle that stands for no state.
_MAX_HANDLE = 2**31 - 1  # Handles travel as int32.
_EVICTED = object()  # In place of a state that only its log remembers.


class BadHandle(KeyError):
  """A handle that was never given out, or was released."""

  def __str__(self) -> str:
    return self.args[0] if self.args else ''  # KeyError would quote it.


class StateDiverged(RuntimeError):
  """A replay did not tell what was told before; the state is lost."""


def digest(timestep: base.TimeStep) -> int:
  """Returns 64 bits that tell apart what the agent was told.

  Good within this process only, which is as long as a store lives. Python's
  hash of strings it has seen costs next to nothing, and this runs every step.
  """
  return hash((
      timestep.observation,
      repr(float(timestep.reward)),  # As numbers, -1 and -2 hash alike.
      timestep.terminal, timestep.truncated, timestep.status,
      timestep.available,
  ))


@dataclasses.dataclass(frozen=True)
class Log:
  """What is enough to make a state again.

  Attributes:
    task: the task's id.
    seed: the seed it was reset with.
    actions: every action since, oldest first.
  """

  task: str
  seed: int
  actions: tuple[str, ...]


@dataclasses.dataclass(slots=True, eq=False)
class _Node:
  """One link of a log. It outlives its handle while a descendant needs it."""

  parent: '_Node | None'
  step: str | tuple[str, int]  # An action; at the root, task id and seed.
  digest: int
  state: base.State = _EVICTED
  priority: float = 0.0


@dataclasses.dataclass(slots=True, eq=False)
class _Entry:
  """What a handle stands for."""

  node: _Node
  timestep: base.TimeStep
  references: int = 1


class StateStore:
  """Reference-counted environment states, the excess evicted to their logs.

  One lock is held throughout every method, calls into the environment
  included: threads may share a store, and its environment is called by one
  thread at a time. The environment stays the caller's: `close` does not end it.

  Attributes:
    environment: whose states these are.
    max_live: how many states may be materialised; None is no limit.
    evicted: how many states were ever evicted.
    replays: how many states were ever replayed.
    peak: the most states that were ever materialised at once.
  """

  def __init__(
      self, environment: base.Environment, max_live: int | None = None
  ):
    """Starts an empty store.

    Raises:
      ValueError: if `max_live` is below one, or if it is given for an
        environment whose states a replay would not reproduce.
    """
    if max_live is not None:
      if max_live < 1:
        raise ValueError(
            f'max_live must be at least 1, got {max_live}; pass None to keep '
            'every state'
        )
      if not environment.capabilities.deterministic:
        raise ValueError(
            f'max_live={max_live} evicts states to their action log, but this '
            'environment does not replay deterministically; pass None'
        )
    self.environment = environment
    self.max_live = max_live
    self.evicted = 0
    self.replays = 0
    self.peak = 0
    self._lock = threading.RLock()
    self._last_handle = NO_STATE
    self._entries: dict[int, _Entry] = {}
    # Materialised nodes, least recently used first. Those to keep are apart, so
    # that finding the next victim does not walk past them.
    self._plain: collections.OrderedDict[_Node, None] = (
        collections.OrderedDict()
    )
    self._kept: collections.OrderedDict[_Node, None] = collections.OrderedDict()
    # An action without effect may give back the very state it was given. Such
    # a state is released with the last of its nodes; keyed by id(state), which
    # is unambiguous while the nodes hold it.
    self._owners: collections.Counter[int] = collections.Counter()

  def __len__(self) -> int:
    """How many handles are held."""
    return len(self._entries)

  @property
  def live(self) -> int:
    """How many states are materialised."""
    return len(self._plain) + len(self._kept)

  def metrics(self) -> dict[str, int]:
    """Returns the counters by metric name."""
    with self._lock:
      return {
          'store/handles': len(self),
          'store/live': self.live,
          'store/peak': self.peak,
          'store/evicted': self.evicted,
          'store/replays': self.replays,
      }

  def reset(
      self, task: base.Task | str, seed: int = 0
  ) -> tuple[int, base.TimeStep]:
    """Returns a new handle of the task's first state, and what it tells."""
    with self._lock:
      state, timestep = self.environment.reset(task, seed)
      return self._adopt(state, timestep, task=task, seed=seed), timestep

  def step(self, handle: int, action: str) -> tuple[int, base.TimeStep]:
    """Returns a new handle of the state after `action`; the old one stays.

    Raises:
      BadHandle: if `handle` is not held.
      StateDiverged: if its state was evicted and cannot be replayed.
    """
    with self._lock:
      state, timestep = self.environment.step(self.get(handle), action)
      return self._adopt(
          state, timestep, parent=handle, action=action), timestep

  def put(
      self,
      state: base.State,
      timestep: base.TimeStep,
      parent: int | None = None,
      action: str | None = None,
      *,
      task: base.Task | str | None = None,
      seed: int = 0,
  ) -> int:
    """Takes over a state that the environment made and returns its handle.

    Args:
      state: what `reset` or `step` of the environment returned.
      timestep: what it returned with it.
      parent: handle of the state that was stepped from; None for a first state.
      action: the action that was taken there.
      task: for a first state, what was reset to.
      seed: for a first state, the seed it was reset with.

    Returns:
      A handle that was never used before, with one reference.

    Raises:
      BadHandle: if `parent` is not held.
      ValueError: unless either parent and action, or task, is given.
      OverflowError: after 2**31 - 1 handles.
    """
    if (parent is None) != (action is None) or (parent is None) == (
        task is None):
      raise ValueError(
          'put needs either parent and action or task, got '
          f'parent={parent!r}, action={action!r}, task={task!r}'
      )
    with self._lock:
      if self._last_handle >= _MAX_HANDLE:
        raise OverflowError('the store gave out all of its int32 handles')
      if parent is None:
        task_id = task.id if isinstance(task, base.Task) else task
        node = _Node(None, (task_id, int(seed)), digest(timestep))
      else:
        node = _Node(self._entry(parent).node, action, digest(timestep))
      self._last_handle += 1
      self._entries[self._last_handle] = _Entry(node, timestep)
      self._materialise(node, state)
      return self._last_handle

  def get(self, handle: int) -> base.State:
    """Returns the state, replayed if it was evicted; the store still owns it.

    Raises:
      BadHandle: if `handle` is not held.
      StateDiverged: if a replay fails or tells anything else than before.
    """
    with self._lock:
      node = self._entry(handle).node
      if node.state is _EVICTED:
        self._replay(node)
      else:
        self._pool(node).move_to_end(node)
      return node.state

  def timestep(self, handle: int) -> base.TimeStep:
    """Returns what entering the state told; this replays nothing."""
    with self._lock:
      return self._entry(handle).timestep

  def log(self, handle: int) -> Log:
    """Returns the task, seed and actions that lead to the state."""
    with self._lock:
      *actions, (task, seed) = [
          node.step for node in _ancestry(self._entry(handle).node)
      ]
      return Log(task, seed, tuple(reversed(actions)))

  def retain(self, handle: int) -> None:
    """Adds a reference."""
    with self._lock:
      self._entry(handle).references += 1

  def release(self, handle: int) -> None:
    """Drops a reference; with the last one the handle and the state go.

    Raises:
      BadHandle: if `handle` is not held, as after one release too many.
    """
    with self._lock:
      entry = self._entry(handle)
      entry.references -= 1
      if not entry.references:
        del self._entries[handle]
        self._dematerialise(entry.node)

  def keep(
      self, handles: Sequence[int], priority: float | Sequence[float] = 1.0
  ) -> None:
    """Marks states to stay materialised while others can be evicted.

    Unmarked states are evicted before marked ones, the least recently used
    first, and marked ones by rising priority. A mark evicts nothing by itself.

    Args:
      handles: the states, such as those at the most uncertain decisions.
      priority: one for all, or one each, such as entropies in nats; 0 or less
        takes the mark away.

    Raises:
      BadHandle: if a handle is not held; then nothing is marked.
      ValueError: if there are priorities for more or fewer handles.
    """
    with self._lock:
      nodes = [self._entry(handle).node for handle in handles]
      if not hasattr(priority, '__len__'):
        priority = [priority] * len(nodes)
      if len(priority) != len(nodes):
        raise ValueError(
            f'keep needs one priority for each of {len(nodes)} handles, got '
            f'{len(priority)}'
        )
      for node, value in zip(nodes, priority):
        live = node.state is not _EVICTED
        if live:
          del self._pool(node)[node]
        node.priority = float(value)
        if live:
          self._pool(node)[node] = None

  def evict(self, handles: Sequence[int]) -> None:
    """Drops the states now; the handles stay and replay when asked for."""
    with self._lock:
      if not self.environment.capabilities.deterministic:
        raise ValueError('this environment does not replay its logs')
      for node in [self._entry(handle).node for handle in handles]:
        if node.state is not _EVICTED:
          self._evict(node)

  def close(self) -> None:
    """Releases every state; every handle is bad from here on.

    Raises:
      ExceptionGroup: of what the environment raised, once all were tried.
    """
    with self._lock:
      entries, self._entries = self._entries, {}
      errors = []
      for entry in entries.values():
        try:
          self._dematerialise(entry.node)
        except Exception as error:  # pylint: disable=broad-except
          errors.append(error)
      if errors:
        raise ExceptionGroup('states that could not be released', errors)

  def _adopt(
      self, state: base.State, timestep: base.TimeStep, **origin: Any
  ) -> int:
    """Puts a state that nobody else knows of, or frees it."""
    try:
      return self.put(state, timestep, **origin)
    except BaseException:
      if id(state) not in self._owners:
        self.environment.release(state)
      raise

  def _entry(self, handle: int) -> _Entry:
    try:
      return self._entries[handle]
    except KeyError:
      known = 0 < handle <= self._last_handle
      raise BadHandle(
          f'handle {handle} ' + ('was released' if known else 'never existed')
      ) from None

  def _pool(self, node: _Node) -> collections.OrderedDict[_Node, None]:
    return self._kept if node.priority > 0 else self._plain

  def _materialise(self, node: _Node, state: base.State) -> None:
    """Makes `node` the most recently used, evicting others over the limit."""
    node.state = state
    self._owners[id(state)] += 1
    self._pool(node)[node] = None
    while self.max_live is not None and self.live > self.max_live:
      self._evict(self._victim(spare=node))
    self.peak = max(self.peak, self.live)

  def _dematerialise(self, node: _Node) -> None:
    """Forgets the node's state, and frees it if no other node has it."""
    if node.state is _EVICTED:
      return
    state, node.state = node.state, _EVICTED
    del self._pool(node)[node]
    self._owners[id(state)] -= 1
    if not self._owners[id(state)]:
      del self._owners[id(state)]
      self.environment.release(state)

  def _evict(self, node: _Node) -> None:
    self.evicted += 1
    self._dematerialise(node)

  def _victim(self, spare: _Node) -> _Node:
    """Returns the node to evict next, never the one in use now."""
    for node in self._plain:
      if node is not spare:
        return node
    return min(
        (node for node in self._kept if node is not spare),
        key=lambda node: node.priority,
    )

  def _replay(self, node: _Node) -> None:
    """Materialises `node` from its nearest live ancestor, or from the reset."""
    links = list(itertools.takewhile(
        lambda link: link.state is _EVICTED, _ancestry(node)
    ))
    start = links[-1].parent
    origin = start.state if start else None
    state = origin
    for link in reversed(links):
      state = self._replay_link(link, state, origin)
    self.replays += 1
    self._materialise(node, state)

  def _replay_link(
      self, link: _Node, previous: base.State, origin: base.State
  ) -> base.State:
    """Takes one step of a log again and checks what it tells.

    Frees `previous`, and the new state too if it is not the recorded one;
    never `origin`, which belongs to another node.
    """
    try:
      if link.parent is None:
        state, timestep = self.environment.reset(*link.step)
      else:
        state, timestep = self.environment.step(previous, link.step)
    except Exception as error:
      self._discard(previous, origin)
      raise StateDiverged(
          f'replaying {link.step!r} raised {error!r}'
      ) from error
    self._discard(previous, origin, state)
    if digest(timestep) != link.digest:
      self._discard(state, origin)
      raise StateDiverged(
          f'replaying {link.step!r} told something else than before: '
          f'{timestep.observation!r}'
      )
    return state

  def _discard(self, state: base.State, *needed: base.State) -> None:
    if all(state is not other for other in needed):
      self.environment.release(state)


def _ancestry(node: _Node | None) -> Iterator[_Node]:
  """Yields the node and its ancestors up to the first state."""
  while node is not None:
    yield node
    node = node.parent

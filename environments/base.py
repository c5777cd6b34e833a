"""What every sandbox looks like: states are values, text goes in and out.

`step(state, action)` never changes `state`. Forking a sandbox is calling `step`
twice on one state, so nothing in this project copies, rewinds or resets an
environment. How a state is kept (an immutable value, a parked process, a log to
replay) is the environment's own business.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import enum
from typing import Any, Protocol

State = Any  # Opaque to everyone but the environment that made it.


class Status(enum.IntEnum):
  """What became of one request; numbers, because they cross a host callback."""

  OK = 0
  INVALID_ACTION = 1  # Not understood: nothing changed, the episode lives on.
  ERROR = 2  # The environment raised; the episode is over, the run is not.
  DEAD = 3  # The sandbox is gone and cannot be replayed.
  TIMEOUT = 4  # The action outlived its deadline.
  BAD_HANDLE = 5  # The handle was never given out, or was released.


@dataclasses.dataclass(frozen=True)
class Task:
  """One problem an environment can be reset to.

  Attributes:
    id: unique and stable within the environment, such as
      `valid_seen/<task dir>/<trial dir>`.
    split: the split it belongs to, such as `train`.
    goal: the task in words, as the agent is told it.
  """

  id: str
  split: str
  goal: str


@dataclasses.dataclass(frozen=True)
class TimeStep:
  """What the agent is told on entering a state.

  Attributes:
    observation: text the agent reads.
    reward: reward units, received on entering this state.
    terminal: the environment ended the episode here.
    truncated: a limit ended it; the return beyond is unknown, not zero.
    available: admissible actions, sorted; empty where actions are free-form.
    status: what became of the action.
    info: facts for people and metrics, never for the policy.
  """

  observation: str
  reward: float = 0.0
  terminal: bool = False
  truncated: bool = False
  available: tuple[str, ...] = ()
  status: Status = Status.OK
  info: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def done(self) -> bool:
    """Whether no action may follow, for either reason."""
    return self.terminal or self.truncated


@dataclasses.dataclass(frozen=True)
class Capabilities:
  """What an environment promises; the conformance suite holds it to this.

  Attributes:
    forkable: two steps from one state are independent of each other.
    deterministic: replaying a log of actions gives the same observations.
    enumerable_actions: `TimeStep.available` lists every admissible action.
    value_states: states are plain immutable values that need no release.
  """

  forkable: bool = True
  deterministic: bool = True
  enumerable_actions: bool = False
  value_states: bool = False


class Environment(Protocol):
  """A set of tasks whose states can be stepped from any number of times."""

  @property
  def capabilities(self) -> Capabilities:
    """What this environment promises."""

  def splits(self) -> tuple[str, ...]:
    """Returns the names that `tasks` accepts."""

  def tasks(self, split: str) -> Sequence[Task]:
    """Returns the split's tasks in a fixed order.

    Raises:
      ValueError: if there is no such split, or it is empty.
    """

  def task(self, task_id: str) -> Task:
    """Returns the task of that id, or raises ValueError."""

  def reset(self, task: Task | str, seed: int = 0) -> tuple[State, TimeStep]:
    """Returns the task's first state; equal seeds give equal states."""

  def step(self, state: State, action: str) -> tuple[State, TimeStep]:
    """Returns the state after `action`; `state` itself stays as it was.

    An action that is not understood is no exception: it gives a TimeStep whose
    status says so. Stepping from a terminal state raises ValueError.
    """

  def release(self, state: State) -> None:
    """Frees what the state holds; a no-op where states are plain values."""

  def close(self) -> None:
    """Ends the environment and everything it started."""

"""The one door between a jitted rollout and Python: a batch of steps a call.

Everything that crosses has a fixed shape, and nothing is raised across: what
goes wrong in a row is that row's status, because an exception would lose its
type on the way and end the whole batch.
"""

from collections.abc import Sequence
import collections
import functools
import time
import traceback
from typing import NamedTuple
import zlib

from absl import logging
import jax
from jax import experimental
import jax.numpy as jnp
import numpy as np

from environments import base
from environments import codec as codecs
from environments import store as stores

NO_ANCHOR = -1  # Nothing was observed.

# What the environment is told for tokens that name no admissible command. It
# answers as to any action it does not understand, and may count the turn.
UNKNOWN_ACTION = ''


class StepResult(NamedTuple):
  """What a batch of R steps led to; O, A and L are the codec's sizes.

  A row whose episode is lost (status ERROR, DEAD or BAD_HANDLE) is truncated,
  and has, like an inactive row, no state, no tokens, no reward and no anchor.

  Attributes:
    handles: the new states, each with one reference that the receiver owns.
    observation: what was observed, padded with 0.
    observation_length: tokens of the observation that are no padding.
    commands: admissible commands, padded with 0.
    rewards: reward units, received on entering the new states.
    terminal: the environment ended the episode here.
    truncated: a limit or a failure ended it.
    status: a base.Status each.
    anchor: 31-bit hash, equal for equal observations with equal admissible
      commands; -1 when nothing was observed.
  """

  handles: np.ndarray | jax.Array  # [R] int32
  observation: np.ndarray | jax.Array  # [R, O] int32
  observation_length: np.ndarray | jax.Array  # [R] int32
  commands: np.ndarray | jax.Array  # [R, A, L] int32
  rewards: np.ndarray | jax.Array  # [R] float32
  terminal: np.ndarray | jax.Array  # [R] bool
  truncated: np.ndarray | jax.Array  # [R] bool
  status: np.ndarray | jax.Array  # [R] int32
  anchor: np.ndarray | jax.Array  # [R] int32


def anchor(timestep: base.TimeStep) -> int:
  """Returns a hash in [0, 2**31) of the observation and what can be done.

  The same in every process and on every machine, unlike Python's `hash`.
  """
  text = '\n'.join((timestep.observation, *timestep.available))
  return zlib.crc32(text.encode('utf-8', 'surrogatepass')) & 0x7FFFFFFF


def _lengths(actions, xp=jnp):
  """Returns [R] int32 of [R, L]: one past the last token that is not 0."""
  place = xp.arange(1, actions.shape[1] + 1, dtype=xp.int32)
  return xp.max(xp.where(actions != 0, place, 0), axis=1, initial=0)


class BatchedEnvironment:
  """Steps many states of one store at once, from inside jit or outside.

  Attributes:
    store: holds the states; the caller's to close.
    codec: fixes every shape.
    errors: how often each kind of exception ended an episode.
    seconds: time spent in environments, their codec and their store so far.
    pending_error: what no status can tell and `raise_pending` will raise.
  """

  def __init__(self, store: stores.StateStore, codec: codecs.TextCodec):
    self.store = store
    self.codec = codec
    self.errors: collections.Counter[str] = collections.Counter()
    self.seconds = 0.0
    self.pending_error: BaseException | None = None

  def reset(
      self, tasks: Sequence[base.Task | str], seeds: Sequence[int]
  ) -> tuple[StepResult, list[list[int]]]:
    """Returns the tasks' first states, and the tokens of their prompts.

    On the host, so it raises what the environment raises. The prompt tells the
    first observation, so `observation` is empty.

    Args:
      tasks: R tasks or their ids.
      seeds: R seeds.

    Returns:
      A StepResult of NumPy arrays and R lists of tokens, uncut.

    Raises:
      ValueError: if there is no such task, or not a seed for each.
    """
    if len(tasks) != len(seeds):
      raise ValueError(
          f'reset needs a seed per task, got {len(tasks)} tasks and '
          f'{len(seeds)} seeds'
      )
    result = self._blank(len(tasks))
    prompts = []
    try:
      for row, (task, seed) in enumerate(zip(tasks, seeds)):
        handle, timestep = self.store.reset(task, int(seed))
        result.handles[row] = handle
        self._fill(result, row, timestep)
        result.status[row] = timestep.status
        prompts.append(self.codec.encode_prompt(timestep))
    except BaseException:
      self.release(result.handles)
      raise
    return result, prompts

  def step(
      self,
      handles: jax.Array,
      actions: jax.Array,
      active: jax.Array,
      lengths: jax.Array | None = None,
  ) -> StepResult:
    """Steps every active row once, under jit or not.

    The old states stay. Do not vmap this: it is a batch already, and vmap would
    call Python once per element.

    Args:
      handles: [R] int32, the states to step from.
      actions: [R, L] int32, tokens of a command each, padded with 0.
      active: [R] bool, the rows to step; the others touch nothing.
      lengths: [R] int32, tokens of each action, so that one that ends with
        token 0 keeps it; None where no action does.

    Returns:
      A StepResult of R rows.

    Raises:
      ValueError: if a shape is not as above.
    """
    if lengths is None:
      lengths = _lengths(actions)
    num_rows = self._check_shapes(handles, actions, active, lengths)
    shapes = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype),
        self._blank(num_rows),
    )
    # Unordered: a step reads handles that the step before it returned, so the
    # data already order the calls, and an ordered callback would thread a token
    # through every loop around it. An io_callback, unlike a pure_callback, is
    # neither dropped when nobody reads its results nor ever repeated.
    return experimental.io_callback(
        self.host_step, shapes, handles, actions, active, lengths, ordered=False
    )

  def host_step(
      self,
      handles: np.ndarray,
      actions: np.ndarray,
      active: np.ndarray,
      lengths: np.ndarray | None = None,
  ) -> StepResult:
    """`step` on NumPy arrays; it raises nothing, see `raise_pending`."""
    start = time.perf_counter()
    # Inside the callback these may be JAX arrays; indexing one would run JAX
    # from within its own callback, which can wait for itself for ever.
    handles, actions, active = map(np.asarray, (handles, actions, active))
    lengths = np.asarray(_lengths(actions, np) if lengths is None else lengths)
    result = self._blank(len(handles))
    # Lists and ints: NumPy's scalars would double what a row costs.
    handle_of, length_of = handles.tolist(), lengths.tolist()
    for row in np.flatnonzero(active).tolist():
      try:
        # One lost run is enough: whatever comes after the error ends at once.
        status = base.Status.ERROR if self.pending_error is not None else (
            self._step_row(
                result, row, handle_of[row], actions[row, :length_of[row]]))
      except BaseException as error:  # pylint: disable=broad-except
        self.pending_error = error
        status = base.Status.ERROR
      result.status[row] = status
      if not result.handles[row]:
        result.truncated[row] = True
    self.seconds += time.perf_counter() - start
    return result

  def release(self, handles: Sequence[int] | np.ndarray) -> None:
    """Drops one reference of each handle; 0 is skipped.

    Raises:
      BadHandle: if a handle is not held; those before it are released.
    """
    for handle in np.asarray(handles).ravel().tolist():
      if handle != stores.NO_STATE:
        self.store.release(handle)

  def raise_pending(self) -> None:
    """Raises, once, what could not be raised from inside the callback."""
    error, self.pending_error = self.pending_error, None
    if error is not None:
      raise error

  def _step_row(
      self, result: StepResult, row: int, handle: int, tokens: np.ndarray
  ) -> base.Status:
    """Steps one row and returns its status; raises what is no row's fault."""
    try:
      available = self.store.timestep(handle).available
    except stores.BadHandle:
      return base.Status.BAD_HANDLE
    command = self.codec.decode(available, tokens)
    action = UNKNOWN_ACTION if command is None else command
    try:
      handle, timestep = self.store.step(handle, action)
    except stores.StateDiverged as error:
      self._count(error)
      return base.Status.DEAD
    except Exception as error:  # pylint: disable=broad-except
      self._count(error)
      return base.Status.ERROR
    if timestep.status in (base.Status.ERROR, base.Status.DEAD):
      self.store.release(handle)
      return timestep.status
    try:
      self._fill(result, row, timestep, action, tokens)
    except BaseException as error:
      self.store.release(handle)
      if not isinstance(error, Exception):
        raise
      # What cannot be told in the codec's shapes ends an episode, not the run.
      self._count(error)
      return base.Status.ERROR
    result.handles[row] = handle
    return base.Status.INVALID_ACTION if command is None else timestep.status

  def _fill(
      self,
      result: StepResult,
      row: int,
      timestep: base.TimeStep,
      action: str | None = None,
      tokens: np.ndarray | None = None,
  ) -> None:
    """Writes all of a row but handle and status, or nothing if it raises."""
    if not np.isfinite(np.float32(timestep.reward)):
      raise ValueError(
          'expected a finite reward from the environment, got '
          f'{timestep.reward}'
      )
    commands = self.codec.encode_commands(timestep.available)
    if action is not None:
      tokens, length = self.codec.encode_observation(
          timestep, action, tokens)
      result.observation[row] = tokens
      result.observation_length[row] = length
    result.commands[row] = commands
    result.rewards[row] = timestep.reward
    result.terminal[row] = timestep.terminal
    result.truncated[row] = timestep.truncated
    result.anchor[row] = anchor(timestep)

  def _count(self, error: Exception) -> None:
    """Counts an exception that ended an episode; logs the first of a kind."""
    kind = type(error).__name__
    self.errors[kind] += 1
    if self.errors[kind] == 1:
      logging.error(
          'An environment step failed and its episode ends; further %s are '
          'counted, not logged.\n%s', kind,
          ''.join(traceback.format_exception(error)),
      )

  def _blank(self, num_rows: int) -> StepResult:
    """Returns NumPy arrays for rows that no step was taken in."""
    codec = self.codec
    ints = functools.partial(np.zeros, dtype=np.int32)
    return StepResult(
        handles=ints(num_rows),
        observation=ints((num_rows, codec.observation_length)),
        observation_length=ints(num_rows),
        commands=ints((num_rows, codec.max_commands, codec.action_length)),
        rewards=np.zeros(num_rows, np.float32),
        terminal=np.zeros(num_rows, bool),
        truncated=np.zeros(num_rows, bool),
        status=ints(num_rows),
        anchor=np.full(num_rows, NO_ANCHOR, np.int32),
    )

  def _check_shapes(
      self,
      handles: jax.Array,
      actions: jax.Array,
      active: jax.Array,
      lengths: jax.Array,
  ) -> int:
    """Returns R, or says which shape is wrong."""
    num_rows = len(handles)
    of_rows = (num_rows,)
    expected = (of_rows, (num_rows, self.codec.action_length), of_rows, of_rows)
    got = (handles.shape, actions.shape, active.shape, lengths.shape)
    if got != expected:
      raise ValueError(
          'handles, actions, active and lengths must have shapes'
          f' {expected}, got {got}'
      )
    return num_rows

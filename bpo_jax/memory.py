"""Running out of device memory, told in words that say what to change."""

from collections.abc import Callable, Iterator, Sequence
import contextlib

import jax

_MARK = 'RESOURCE_EXHAUSTED'


@contextlib.contextmanager
def explained(
    work: Callable[[], str], remedies: Callable[[], Sequence[str]]
) -> Iterator[None]:
  """Turns the device's want of memory into an error that says what to do.

  Args:
    work: tells what was computed, with its sizes.
    remedies: tells what to change, the cheapest first.

  Raises:
    MemoryError: in place of the RESOURCE_EXHAUSTED of XLA, as its cause's
      first line stands at the end; any other error passes as it is.
  """
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    if _MARK not in str(error):
      raise
    reason = str(error).splitlines()[0]
    raise MemoryError(
        f'out of memory on the device: {work()}. Change, the first that you can:'
        f' {"; ".join(remedies())}. ({reason})'
    ) from error

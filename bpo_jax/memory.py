"""Running out of device memory, told in words that say what to change."""

from collections.abc import Callable, Iterator, Sequence
import contextlib

import jax
import numpy as np

from bpo_jax import layouts
from bpo_jax import packing
from bpo_jax import sharding
from bpo_jax.models import lora
from bpo_jax.models import transformer

_MARK = 'RESOURCE_EXHAUSTED'
_SMALLER = (
    "a smaller network, or a mesh that parts it, such as 'data:1,model:2'")


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
        f'out of memory on the device: {work()}. What to change, the first that'
        f' you can: {"; ".join(remedies())}. ({reason})'
    ) from error


def explained_rows(
    model: transformer.Transformer, batches: Sequence[packing.PackedRows]
) -> contextlib.AbstractContextManager[None]:
  """Says which of batch, row length or remat to change, should memory lack.

  Args:
    model: what runs the rows.
    batches: micro-batches; the largest is taken to be the one that was too
      much.
  """

  def sizes():
    rows = max(batches, key=lambda rows: rows.tokens.size)
    num_rows, length = rows.tokens.shape
    shards = sharding.num_row_parts(model.mesh)
    return num_rows // shards, length, int(np.max(rows.positions)) + 1

  def work():
    num_rows, length, _ = sizes()
    return f'a micro-batch of {num_rows} x {length} tokens, rows x length'

  def remedies():
    (num_rows, length, longest), found = sizes(), []
    if model.config.remat != 'block':
      found.append(
          f"remat='block', which keeps least; it is {model.config.remat!r}")
    if num_rows > 1:
      found.append(
          f'max_tokens={num_rows * length // 2}, for half of the rows at once')
    shorter = layouts.bucket(max(longest, length // 2))
    if shorter < length:
      found.append(f'row_length={shorter}, for shorter rows; the longest path'
                   f' has {longest} tokens')
    return [*found, _SMALLER]

  return explained(work, remedies)


def explained_parameters(
    remedy: str = _SMALLER) -> contextlib.AbstractContextManager[None]:
  """Says what to change where the parameters do not go in.

  Args:
    remedy: what to change.
  """
  return explained(lambda: 'the parameters and their copies', lambda: [remedy])


def explained_step(params: dict) -> contextlib.AbstractContextManager[None]:
  """Says what to change where memory lacks for the optimiser's step.

  Args:
    params: what is trained.
  """
  adapters = [] if lora.has_adapters(params) else [
      'adapters, such as lora_rank=16, in place of all weights']
  return explained(
      lambda: ('gradient, moments and step of'
               f' {transformer.num_parameters(params)} trained parameters'),
      lambda: [*adapters, _SMALLER])


def explained_episodes(
    num_rows: Callable[[], int], num_tasks: int, multiple: int = 1
) -> contextlib.AbstractContextManager[None]:
  """Says what to change where memory lacks while episodes are played.

  Args:
    num_rows: tells how many episodes run at once, each with a cache.
    num_tasks: trees, whose caches are kept until they are whole.
    multiple: of the devices that the episodes are parted over.
  """

  def remedies():
    half = num_rows() // 2 // multiple * multiple
    fewer_rows = [f'max_rows={half}'] if half else []
    fewer_trees = [f'fewer trees than {num_tasks} at a time, whose caches are'
                   ' kept for their forks'] if num_tasks > 1 else []
    return [*fewer_rows, *fewer_trees, 'shorter observations or fewer turns',
            _SMALLER]

  return explained(
      lambda: f'{num_rows()} episodes at once, each with a cache of its tokens',
      remedies)

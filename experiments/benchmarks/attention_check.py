"""Whether the attention kernels are right and fast on the device at hand.

  python -m experiments.benchmarks.attention_check
  python -m experiments.benchmarks.attention_check --quick --out=check.json

The bar, for rows of random ragged trees: values and gradients of the Pallas
kernels within 1e-4 of the dense reference for float32 and 0.03 for bfloat16,
relative to the largest entry, the reference summing float32 at full precision.
Then the milliseconds of a forward and backward pass of every implementation,
side by side: on GPU and TPU Pallas must not be slower than dense on rows of
2,048 tokens or more. On CPU the kernels are interpreted, on tiny rows, and only
their numbers are held to anything. A few minutes at most; `--quick`, the first
shape alone in three rounds, ends within one.
"""

from collections.abc import Callable, Sequence
import functools
import time
from typing import NamedTuple

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from bpo_jax import attention
from experiments.benchmarks import report

MAX_DIFFERENCE = {'float32': 1e-4, 'bfloat16': 0.03}
MIN_LENGTH = 2048  # Of rows on which Pallas is held to beat dense.
MAX_DENSE_SCORES = 2**29  # Of more, blocks stand in for the reference.

flags.adopt_module_key_flags(report)


class Case(NamedTuple):
  """One shape to check."""

  name: str
  num_rows: int
  num_heads: int
  num_groups: int
  length: int
  head_dim: int
  fork: float  # chance that a token starts a branch
  block: int = attention.BLOCK


TINY = (
    Case('tiny', 2, 4, 2, 64, 8, 0.1, 16),
    Case('odd_heads', 1, 3, 1, 96, 24, 0.05, 32),
)
FULL = (
    Case('smollm2', 2, 9, 3, 2048, 64, 0.01),
    Case('narrow', 2, 4, 2, 1024, 24, 0.02),
    Case('smollm2_chain', 1, 9, 3, 8192, 64, 0.0),
    Case('smollm2_bushy', 1, 9, 3, 8192, 64, 0.02),
    Case('qwen_7b', 1, 28, 4, 4096, 128, 0.005),
)


def random_end(rng: np.random.Generator, length: int, fork: float
               ) -> np.ndarray:
  """Returns `end` of one ragged tree, [L] int32; the last 16th is padding."""
  num_tokens = length - length // 16
  end = np.zeros(length, np.int32)
  path = []
  for token in range(num_tokens):
    if len(path) > 1 and rng.random() < fork:
      cut = int(rng.integers(1, len(path)))
      end[path[cut:]] = token
      del path[cut:]
    path.append(token)
  end[path] = num_tokens
  return end


def make_inputs(case: Case, dtype: str, seed: int = 0) -> tuple:
  """Returns queries, keys, values, a cotangent and the ancestors."""
  rng = np.random.default_rng(seed)
  end = np.stack([random_end(rng, case.length, case.fork)
                  for _ in range(case.num_rows)])
  heads = (case.num_heads, case.num_groups, case.num_groups, case.num_heads)
  arrays = [
      jnp.asarray(rng.normal(
          size=(case.num_rows, n, case.length, case.head_dim)), dtype)
      for n in heads]
  table = attention.block_table(end, case.block)
  return *arrays, attention.Ancestors(jnp.asarray(end), jnp.asarray(table))


@functools.partial(jax.jit, static_argnames='implementation')
def run(queries, keys, values, cotangent, ancestors, implementation):
  """Returns the output and the gradients of queries, keys and values."""
  attend = functools.partial(
      attention.attend, ancestors=ancestors, implementation=implementation)
  out, vjp = jax.vjp(attend, queries, keys, values)
  return out, *vjp(cotangent)


def expected(inputs: tuple, implementation: str) -> tuple:
  """Returns what `run` is to give, float32 at full precision."""
  *arrays, ancestors = inputs
  arrays = [x.astype(jnp.float32) for x in arrays]
  with jax.default_matmul_precision('highest'):
    return run(*arrays, ancestors, implementation)


def difference(got: tuple, want: tuple) -> float:
  """Returns the largest difference, relative to each array's largest entry."""
  return max(
      float(jnp.abs(x.astype(jnp.float32) - y).max() / jnp.abs(y).max())
      if bool(jnp.isfinite(x).all()) else float('inf')
      for x, y in zip(got, want))


def take_turns(calls: dict[str, Callable], num_rounds: int) -> dict[str, float]:
  """Returns the least milliseconds of each, first calls left out."""
  spent = {name: [] for name in calls}
  for call in calls.values():
    jax.block_until_ready(call())
  for _ in range(num_rounds):
    for name, call in calls.items():
      start = time.perf_counter()
      jax.block_until_ready(call())
      spent[name].append(1e3 * (time.perf_counter() - start))
  return {name: min(times) for name, times in spent.items()}


def check(case: Case, dtype: str, num_rounds: int) -> dict[str, float]:
  """Returns the figures of one shape and dtype."""
  inputs = make_inputs(case, dtype)
  num_scores = case.num_rows * case.num_heads * case.length**2
  names = ['dense', 'blocks', 'pallas'][num_scores > MAX_DENSE_SCORES:]
  calls = {name: functools.partial(run, *inputs, name) for name in names}
  want = expected(inputs, names[0])
  figures = {'difference': difference(calls['pallas'](), want)}
  for name, spent in take_turns(calls, num_rounds).items():
    figures[f'{name}_milliseconds'] = spent
  return {f'{case.name}_{case.length}_{dtype}_{name}': value
          for name, value in figures.items()}


def measure(cases: Sequence[Case], num_rounds: int) -> dict[str, float]:
  """Returns the figures of every shape in both dtypes, saying them at once."""
  figures = {}
  for case in cases:
    for dtype in MAX_DIFFERENCE:
      print(f'measuring {case.name} in {dtype}', flush=True)
      found = check(case, dtype, num_rounds)
      for name, value in found.items():
        report.tell(name, value)
      figures |= found
  return figures


def shortfalls(figures: dict[str, float], interpreted: bool) -> list[str]:
  """Returns a sentence for each bar that the figures do not reach."""
  short = []
  for name, value in figures.items():
    *_, length, dtype, what = name.removesuffix('_milliseconds').split('_')
    if what == 'difference' and not value <= MAX_DIFFERENCE[dtype]:
      short.append(f'{name} is not within {MAX_DIFFERENCE[dtype]}')
    slower = what == 'dense' and value < figures[
        name.replace('_dense_', '_pallas_')]
    if slower and not interpreted and int(length) >= MIN_LENGTH:
      short.append(f'{name} is less than that of pallas')
  return short


def main(argv: Sequence[str]) -> None:
  """Checks the shapes that suit the device, and holds them to their bars."""
  report.begin(argv)
  device = jax.devices()[0]
  interpreted = device.platform not in ('gpu', 'tpu')
  cases = TINY if interpreted else FULL
  cases = cases[:1] if report.QUICK.value else cases
  print(f'device: {device.device_kind}', flush=True)
  figures = measure(cases, num_rounds=3 if report.QUICK.value else 10)
  report.finish(figures, shortfalls(figures, interpreted), told=True)


if __name__ == '__main__':
  app.run(main)

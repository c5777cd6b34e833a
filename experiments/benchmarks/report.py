"""What surrounds the measuring of a benchmark: flags, figures and the verdict.

A benchmark adopts the flags, so that its --helpshort lists them:

  flags.adopt_module_key_flags(report)
"""

from collections.abc import Callable, Mapping, Sequence
import json
import os
import sys
import time
from typing import Any, NoReturn

from absl import app
from absl import flags
import jax

from bpo_jax import metrics

# Overriding: tests import commands with flags of these names.
OUT = flags.DEFINE_string(
    'out', None, 'JSON file to write the figures to.', allow_override=True)
QUICK = flags.DEFINE_bool(
    'quick', False, 'Measure less; what is left out is said above.',
    allow_override=True)


def seconds(call: Callable[[], Any]) -> float:
  """Returns how long a call takes until its result is there."""
  start = time.perf_counter()
  jax.block_until_ready(call())
  return time.perf_counter() - start


def begin(argv: Sequence[str]) -> None:
  """Refuses a wrong command line, and an --out that cannot be written."""
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments {argv[1:]}')
  if OUT.value:
    try:
      metrics.check_writable(OUT.value)
    except OSError as error:
      raise app.UsageError(f'--out: {error}') from error


def use_one_thread() -> None:
  """Leaves XLA one thread; before JAX computes anything."""
  os.environ['XLA_FLAGS'] = (
      os.environ.get('XLA_FLAGS', '') + ' --xla_cpu_multi_thread_eigen=false')
  os.environ['OMP_NUM_THREADS'] = '1'


def tell(name: str, value: Any) -> None:
  """Prints a figure at once: the next may take minutes."""
  if isinstance(value, float):
    value = f'{value:,.0f}' if abs(value) >= 1000 else f'{value:.4g}'
  print(f'{name}: {value}', flush=True)


def finish(figures: Mapping[str, Any], short: Sequence[str],
           told: bool = False) -> NoReturn:
  """Tells the verdict, writes --out and exits, with 1 where a bar is missed.

  Args:
    figures: all that was measured, by name.
    short: a sentence for each bar that is not reached.
    told: whether the figures have been printed as they came.
  """
  for name, value in () if told else figures.items():
    tell(name, value)
  print('\n'.join(short) or 'ok')
  save(figures)
  sys.exit(1 if short else 0)


def save(figures: Mapping[str, Any]) -> None:
  """Writes --out, where one is wanted; again when there are more figures."""
  if OUT.value:
    metrics.write_text(OUT.value, json.dumps(figures, indent=2) + '\n')

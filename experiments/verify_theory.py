"""Checks every estimator's bias, variance and cost against exact gradients.

  python -m experiments.verify_theory
  python -m experiments.verify_theory --seeds=8 --out=theory/

Three parts. Theorems: equalities of variances, both sides exact. Enumerated:
on a small task every tree that a method can grow is listed with its chance, so
that biases are exact to float32. Sampled: every row of the table of algorithms
and the variants of `bpo` and `bpo_rb`, among them BPO's schedules, on tasks of
twelve steps, bias with its 95% interval, variance and cost in steps. Ends with
a line for every claim of `theory_claims`, and exits 1 when one of them fails.
With --out it leaves measurements.csv, schedules.csv, claims.csv and, where
matplotlib is installed (extra `plot`), theory.png.
"""

import collections
from collections.abc import Callable, Sequence
from concurrent import futures
import csv
import dataclasses
import functools
import io
import itertools
import pathlib
import time
from typing import Any

from absl import flags
import jax
import numpy as np

from bpo_jax import metrics
from experiments import config_flags
from experiments import enumerable
from experiments import figures
from experiments import theory_claims
from experiments import theory_methods
from experiments.config_fields import check
from experiments.config_fields import field

_TABLES = ('measurements.csv', 'schedules.csv', 'claims.csv')
_FIGURE = 'theory.png'
_WORKERS = 2  # Compiling is most of the work.


@dataclasses.dataclass(frozen=True)
class TheoryConfig:
  """What to measure."""

  seeds: int = field(4, 'Independent samples of trees.', min=1)
  trees: int = field(512, 'Trees of a sample.', min=2)
  tasks: tuple[str, ...] = field(
      theory_claims.SAMPLED, 'Tasks to sample trees of.',
      choices=tuple(enumerable.TASKS))
  methods: tuple[str, ...] = field(
      (), 'Names of the methods to sample; all of them when empty.')
  out: str | None = field(
      None, 'Folder for measurements.csv, schedules.csv, claims.csv and '
      'theory.png.', not_blank=True)

  def __post_init__(self):
    check(self)
    if not self.tasks:
      raise ValueError(
          f'tasks: expected one of {", ".join(enumerable.TASKS)}, got none')
    for name in ('tasks', 'methods'):
      values = getattr(self, name)
      twice = sorted({value for value in values if values.count(value) > 1})
      if twice:  # Its samples would be counted twice.
        raise ValueError(
            f'{name}: expected each once, got {twice[0]} more than once')


def enumerated_methods() -> dict[str, theory_methods.Method]:
  """Returns the variants of two backbones, small enough to be listed.

  All but the forks at random: their draws would have to be listed too.
  """
  smaller = functools.cache(lambda policy: functools.partial(
      policy, num_branch_points=4 if 'max_per_path' in policy.keywords else 2))
  methods = {
      name: dataclasses.replace(
          method, policy=smaller(method.policy), num_backbones=2)
      for name, method in theory_methods.variants().items()
      if name.startswith('bpo') and 'random' not in name}
  top = dataclasses.replace(
      methods['bpo_rb rho=0.5'], name='bpo_rb top_m',
      policy=methods['bpo top_m split'].policy)
  root = theory_methods.variants()['root leave-one-out 2']
  return methods | {top.name: top, root.name: root}


def enumerate_methods(progress: Callable[[str], None]
                      ) -> list[theory_methods.Measurement]:
  """Returns the exact measurement of every variant on a small task."""
  task = enumerable.random_task(theory_claims.EXACT_SEED)
  methods = enumerated_methods()
  start = enumerable.all_backbones(task, 2)
  forests = {None: start}
  for policy in dict.fromkeys(m.policy for m in methods.values() if m.policy):
    method = dataclasses.replace(next(iter(methods.values())), policy=policy)
    plan = method.plan(start, jax.random.key(0))
    forests[policy] = enumerable.all_forks(start, plan)

  def measure(method):
    forest = forests[method.policy]
    moments = theory_methods.moments(
        forest, method.credit_of_listed(forest), forest.probabilities)
    progress(f'{theory_claims.EXACT}: {method.name}')
    return theory_methods.measure(
        theory_claims.EXACT, method.name, task.gradient.ravel(), [moments])

  with futures.ThreadPoolExecutor(_WORKERS) as pool:
    return list(pool.map(measure, methods.values()))


def sample_methods(config: TheoryConfig, progress: Callable[[str], None]
                   ) -> list[theory_methods.Measurement]:
  """Returns the measurement of every method asked for on every task."""
  tasks = {name: enumerable.make(name) for name in config.tasks}

  def measure(group):
    parts = collections.defaultdict(list)
    for (name, task), seed in itertools.product(
        tasks.items(), range(config.seeds)):
      forest = group[0].grow(task, seed, config.trees)
      for method in group:
        parts[name, method.name].append(
            theory_methods.moments(forest, method.credit(forest)))
    progress(', '.join(method.name for method in group))
    return [theory_methods.measure(*names, tasks[names[0]].gradient.ravel(), x)
            for names, x in parts.items()]

  chosen = theory_methods.select(config.methods)
  groups = collections.defaultdict(list)
  for method in chosen:
    groups[method.growth].append(method)
  order = {method.name: i for i, method in enumerate(chosen)}
  with futures.ThreadPoolExecutor(_WORKERS) as pool:
    largest_first = sorted(groups.values(), key=len, reverse=True)
    rows = itertools.chain.from_iterable(pool.map(measure, largest_first))
    return sorted(rows, key=lambda row: (
        config.tasks.index(row.task), order[row.method]))


def markdown(rows: Sequence[theory_methods.Measurement]) -> str:
  """Returns the measurements as a table."""
  lines = ['| task | method | bias [95%] | cosine | signal | variance | steps '
           '| variance x steps |', '|---|---|---|---|---|---|---|---|']
  for row in rows:
    lines.append(
        f'| {row.task} | {row.method} | {theory_claims.interval(row)} '
        f'| {row.cosine:.3f} | {row.signal:.2f} | {row.noise:.2f} '
        f'| {row.steps:.1f} | {theory_claims.cost(row)} |')
  return '\n'.join(lines)


def schedule_markdown(rows: Sequence[theory_methods.Measurement]) -> str:
  """Returns BPO's table of schedules, as measured here."""
  lines = ['| task | weights | schedule | value gap | bias [95%] | cosine '
           '| steps | variance x steps | WebShop, published |',
           '|---|---|---|---|---|---|---|---|---|']
  for schedule, weights, row in theory_claims.schedule_rows(rows):
    lines.append(
        f'| {row.task} | {weights} | {schedule} | {row.gap:.3f} '
        f'| {theory_claims.interval(row)} | {row.cosine:.3f} | {row.steps:.1f} '
        f'| {theory_claims.cost(row)} | {theory_methods.SCHEDULES[schedule]} |')
  return '\n'.join(lines)


def write_csv(path: pathlib.Path, header: Sequence[str],
              rows: Sequence[Sequence[Any]]) -> None:
  """Writes a table."""
  text = io.StringIO()
  writer = csv.writer(text)
  writer.writerow(header)
  writer.writerows(rows)
  metrics.write_text(path, text.getvalue())


def draw(rows: Sequence[theory_methods.Measurement], path: pathlib.Path
         ) -> None:
  """Writes the figure: bias beside variance x cost, a row per method.

  Raises:
    ImportError: if matplotlib is not installed.
  """
  tasks = list(dict.fromkeys(row.task for row in rows))
  order = sorted((row for row in rows if row.task == tasks[0]),
                 key=lambda row: -row.cost)
  place = {row.method: i for i, row in enumerate(order)}
  figure = figures.load().Figure(
      figsize=(9, 1.5 + 0.22 * len(place)), layout='constrained')
  left, right = figure.subplots(1, 2, sharey=True)
  for shift, task in enumerate(tasks):
    mine = [row for row in rows if row.task == task and row.method in place]
    y = [place[row.method] + 0.3 * shift for row in mine]
    low, middle, high = np.array(
        [[r.bias_low, max(r.bias, 0), r.bias_high] for r in mine]).T
    left.errorbar(middle, y, xerr=np.maximum([middle - low, high - middle], 0),
                  fmt='o', markersize=4, label=task)
    right.errorbar([r.cost for r in mine], y, fmt='o', markersize=4,
                   xerr=[r.cost_error for r in mine], label=task)
  left.set_yticks(list(place.values()), list(place))
  left.set_ylim(-1, len(place))
  left.set_xscale('symlog', linthresh=0.1)
  left.set_xlim(0, 2 * max(1, *(row.bias_high for row in rows)))
  left.set_xlabel('|bias| / |gradient|, 95% interval')
  right.set_xscale('log')
  right.set_xlabel('variance x steps at equal signal / |gradient|$^2$')
  for axes in (left, right):
    axes.grid(alpha=0.3)
  right.legend(frameon=False)
  figure.savefig(path, dpi=120)


def _can_draw() -> bool:
  """Returns whether there can be a figure, and says why not."""
  try:
    figures.load()
  except ImportError as error:
    print(f'no {_FIGURE}: {error}', flush=True)
    return False
  return True


def write(out: str | pathlib.Path,
          rows: Sequence[theory_methods.Measurement],
          claims: Sequence[theory_claims.Claim]) -> None:
  """Leaves the tables and, where it can be drawn, the figure in a folder."""
  folder = pathlib.Path(out)
  folder.mkdir(parents=True, exist_ok=True)
  names = [f.name for f in dataclasses.fields(theory_methods.Measurement)]
  tables = (
      (names, [dataclasses.astuple(row) for row in rows]),
      (['schedule', 'weights', 'published', *names],
       [[schedule, weights, theory_methods.SCHEDULES[schedule],
         *dataclasses.astuple(row)]
        for schedule, weights, row in theory_claims.schedule_rows(rows)]),
      (theory_claims.Claim._fields, claims))
  for name, table in zip(_TABLES, tables, strict=True):
    write_csv(folder / name, *table)
  sampled = [row for row in rows if row.task != theory_claims.EXACT]
  if _can_draw():
    draw(sampled, folder / _FIGURE)


def run(config: TheoryConfig) -> int:
  """Measures, prints and writes; returns the exit status."""
  start = time.monotonic()

  def progress(done):
    print(f'[{time.monotonic() - start:5.1f} s] {done}', flush=True)

  theory_methods.select(config.methods)  # Refuse a typo before the work.
  if config.out is not None:
    for name in (*_TABLES, _FIGURE):
      metrics.check_writable(pathlib.Path(config.out) / name)
    _can_draw()  # Told before the work, not only after it.
  claims = list(theory_claims.theorem_claims())
  progress('theorems')
  rows = [*enumerate_methods(progress), *sample_methods(config, progress)]
  claims += theory_claims.claims(rows)
  print(markdown(rows))
  print(f'\nSchedules:\n{schedule_markdown(rows)}\n')
  for holds, claim, evidence in claims:
    print(f'{"ok  " if holds else "FAIL"} {claim}: {evidence}')
  if config.out is not None:
    write(config.out, rows, claims)
  failed = sum(not claim.holds for claim in claims)
  progress(f'{len(claims) - failed} of {len(claims)} claims hold')
  return int(failed > 0)


def main(argv: Sequence[str]) -> int:
  """Checks every claim; exits with 1 where one fails."""
  del argv
  config = config_flags.read(TheoryConfig)
  try:
    return run(config)
  except (OSError, ValueError) as error:
    raise flags.IllegalFlagValueError(str(error)) from error


if __name__ == '__main__':
  config_flags.define(TheoryConfig)
  config_flags.run(main)

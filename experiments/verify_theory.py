"""Checks every estimator's bias, variance and cost against exact gradients.

  python -m experiments.verify_theory
  python -m experiments.verify_theory --seeds=8 --out=theory/

Three parts. Theorems: equalities of variances, both sides exact. Enumerated:
on a small task every tree that a method can grow is listed with its chance, so
that biases are exact to float32. Sampled: every row of the table of algorithms
and the variants of `bpo` and `bpo_rb`, among them BPO's schedules, on tasks of
twelve steps, bias with its
95% interval, variance and cost in steps. Ends with a line for every claim of
docs/theory.md, and exits 1 when one of them fails. With --out it leaves
measurements.csv, schedules.csv, claims.csv and, where matplotlib is installed
(extra `plot`), theory.png.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
import csv
import dataclasses
import functools
import io
import itertools
import pathlib
import time
from typing import Any, NamedTuple

from absl import flags
import jax
import numpy as np

from bpo_jax import metrics
from bpo_jax import types
from experiments import config_flags
from experiments import enumerable
from experiments import exact_noise
from experiments import figures
from experiments import theory_methods
from experiments.config_fields import check
from experiments.config_fields import field

_EXACT = 'exact'  # The name that the enumerated task has in tables.
_EXACT_SEED = 2
_MAX_ERROR = 1e-10  # Of theorems, in float64.
_FLOAT32 = 1e-5  # Of biases and variances whose credit is float32.
_MAX_SCORE = 6.0  # Standard errors of a squared bias that chance explains.
_TABLES = ('measurements.csv', 'schedules.csv', 'claims.csv')
_FIGURE = 'theory.png'
_WORKERS = 2  # Compiling is most of the work.


@dataclasses.dataclass(frozen=True)
class TheoryConfig:
  """What to measure."""

  seeds: int = field(4, 'Independent samples of trees.', min=1)
  trees: int = field(512, 'Trees of a sample.', min=2)
  tasks: tuple[str, ...] = field(
      ('late', 'early'), 'Tasks to sample trees of.',
      choices=tuple(enumerable.TASKS))
  methods: tuple[str, ...] = field(
      (), 'Names of the methods to sample; all of them when empty.')
  out: str | None = field(
      None, 'Folder for measurements.csv, schedules.csv, claims.csv and '
      'theory.png.')

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


class Claim(NamedTuple):
  """One sentence of the theory and whether the run bears it out."""

  holds: bool
  claim: str
  evidence: str


def theorem_claims() -> Iterator[Claim]:
  """Yields the equalities of variances, both sides exact."""
  errors, saved, closed = [], [], []
  for seed, horizon, size in itertools.product(range(3), (3, 4), (2, 3, 4)):
    task = enumerable.random_task(seed, horizon)
    for step in range(horizon):
      theorem = exact_noise.theorem_4_3(task, step, size)
      errors.append(abs(theorem.error))
  worst = max(errors)
  yield Claim(worst < _MAX_ERROR, 'Theorem 4.3 for one sibling\'s advantage',
              f'{len(errors)} cases, largest error {worst:.1e}')
  task = enumerable.random_task(_EXACT_SEED)
  errors = []
  for step, size in ((1, 2), (2, 3)):
    sibling, own, means, whole = _fixed_step(task, step, size)
    theorem = exact_noise.theorem_4_3(task, step, size)
    errors.append(sibling - theorem.branching)
    saved.append(own - means - exact_noise.saved_by_means(task, 2, step, size))
    noise, _ = exact_noise.branching_noise(task, 2, step, size)
    closed.append(whole - noise)
  for what, values in (
      ('the sibling advantage of bpo has Theorem 4.3\'s variance', errors),
      ('split means save (1 - 1/K) of what is drawn below a branch', saved),
      ('the closed form of the noise of branching', closed)):
    worst = np.abs(values).max()
    yield Claim(worst < _FLOAT32, what, f'largest error {worst:.1e}')


def _fixed_step(task, step, size):
  """Returns variances over every tree of two backbones forked at a step.

  Of the advantage of one sibling, and of the gradient: with own returns, with
  split means, and of bpo_rb with rho = 1.
  """
  forest = enumerable.all_backbones(task, 2)
  node = np.add([[1, 1 + task.horizon]] * len(forest.tree.parents), step)
  forest = enumerable.all_forks(forest, types.BranchPlan(
      node=node, offset=np.zeros_like(node),
      count=np.full_like(node, size - 1)))
  chance, variances = forest.probabilities, []
  for name in ('bpo causal split', 'bpo causal split means', 'bpo_rb rho=1.0'):
    credit = theory_methods.variants()[name].credit_of_listed(forest)
    if not variances:
      sibling = credit.advantages[:, 1 + step, 0].astype(float)
      variances.append(chance @ sibling ** 2 - (chance @ sibling) ** 2)
    moments = theory_methods.moments(forest, credit, chance)
    variances.append(np.trace(moments.covariance))
  return variances


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
  task = enumerable.random_task(_EXACT_SEED)
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
    progress(f'{_EXACT}: {method.name}')
    return theory_methods.measure(
        _EXACT, method.name, task.gradient.ravel(), [moments])

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


def bias_claims(rows: Sequence[theory_methods.Measurement]) -> Iterator[Claim]:
  """Yields what the measured biases say of the claims to be unbiased."""
  unbiased = {m.name for m in theory_methods.all_methods().values()
              if m.unbiased}
  exact = {row.method: row for row in rows if row.task == _EXACT}
  free = [row for row in exact.values() if row.method in unbiased]
  if free:
    worst = max(free, key=lambda row: row.bias)
    yield Claim(worst.bias < _FLOAT32, 'causal selection and split weights are '
                'unbiased, with rho at 0, 0.4, 0.5, 1, and at equal distances',
                f'largest exact bias {worst.bias:.1e} ({worst.method})')
  for name, why, least in (
      ('bpo top_m split', 'selecting after the fact is biased', 0.01),
      ('bpo lowest_entropy split', 'at the lowest entropy as well', 0.01),
      ('bpo oracle_value_gap split', 'and by the true value gap', 0.01),
      ('bpo_rb top_m', 'so it is with bpo_rb', 0.01),
      ('bpo causal uniform', 'uniform weights are biased', 0.1)):
    if name in exact:
      row = exact[name]
      yield Claim(row.bias > least, why, f'{name}: exact bias '
                  f'{row.bias:.3f}, cosine {row.cosine:.4f}')
  for task in dict.fromkeys(row.task for row in rows if row.task != _EXACT):
    here = [row for row in rows if row.task == task]
    free = [row for row in here if row.method in unbiased]
    uniform = [row for row in here if row.method == 'bpo causal uniform']
    for row in free:
      yield Claim(row.score < _MAX_SCORE, f'{row.method} is unbiased on {task}',
                  f'bias {_interval(row)}, {row.score:.1f} standard errors')
    for row in uniform:
      most = max((r.bias_high for r in free), default=0.0)
      yield Claim(row.bias_low > most, f'uniform weights are biased on {task}',
                  f'bias {_interval(row)}; of the unbiased at most {most:.3f}')


def adaptive_claims(rows: Sequence[theory_methods.Measurement]
                    ) -> Iterator[Claim]:
  """Yields whether `adaptive` makes the right call, by the same budget."""
  for row in rows:
    most = {'late': 0.9, 'early': 1.05}.get(row.task)
    if row.method == 'bpo_adaptive' and most is not None:
      task = enumerable.make(row.task)
      noise, steps = exact_noise.branching_noise(task, 16)
      root = noise * steps / np.sum(task.gradient ** 2)
      call = 'gains' if most < 1 else 'loses little'
      yield Claim(bool(row.cost - row.cost_error < most * root),
                  f'bpo_adaptive {call} on {row.task}',
                  f'measured {row.cost:.1f}, root leave-one-out 16 exactly '
                  f'{root:.1f}, at most {most} of that')


def cost_claims(rows: Sequence[theory_methods.Measurement]) -> Iterator[Claim]:
  """Yields where branching pays: exactly, by design, and as measured."""
  for name, pays in (('late', True), ('decided', True), ('early', False)):
    task = enumerable.make(name)
    root, branch = best_designs(task)
    holds = branch.cost < 0.8 * root.cost if pays else branch.cost >= root.cost
    yield Claim(
        holds, f'branching {"pays" if pays else "does not pay"} on {name}',
        f'exact variance x steps {branch.cost:.1f} ({branch.what}), root alone '
        f'{root.cost:.1f}')
    costs = {row.method: row.cost for row in rows if row.task == name}
    measured = {
        kind: min((c for m, c in costs.items() if m.startswith(kind)),
                  default=None)
        for kind in ('bpo_rb', 'root leave-one-out')}
    if None not in measured.values():
      better = measured['bpo_rb'] < measured['root leave-one-out']
      yield Claim(
          better == pays, f'bpo_rb {"wins" if pays else "loses"} on {name}',
          f'measured {measured["bpo_rb"]:.1f}, best root leave-one-out '
          f'{measured["root leave-one-out"]:.1f}')
  for row in rows:
    size = row.method.removeprefix('root leave-one-out ')
    if row.task in enumerable.TASKS and size.isdigit():
      noise, steps = exact_noise.branching_noise(
          enumerable.make(row.task), int(size))
      exact = noise * steps / np.sum(enumerable.make(row.task).gradient ** 2)
      error = max(3 * row.cost_error, 0.1 * exact)
      yield Claim(abs(row.cost - exact) < error,
                  f'{row.method} has its exact noise on {row.task}',
                  f'measured {row.cost:.1f}, exact {exact:.1f}')


def schedule_claims(rows: Sequence[theory_methods.Measurement]
                    ) -> Iterator[Claim]:
  """Yields what knowing the true value gaps is worth to a schedule."""
  for task in dict.fromkeys(row.task for row in rows):
    split = {schedule: row for schedule, weights, row in schedule_rows(rows)
             if (row.task, weights) == (task, 'split')}
    oracle = split.pop('oracle_value_gap', None)
    if oracle and split:
      widest = max(split, key=lambda name: split[name].gap)
      yield Claim(oracle.gap > split[widest].gap,
                  f'the oracle forks at the widest value gaps on {task}',
                  f'{oracle.gap:.3f}, next {split[widest].gap:.3f} ({widest})')


def shrinkage_claims(rows: Sequence[theory_methods.Measurement]
                     ) -> Iterator[Claim]:
  """Yields whether a shrunk baseline is cheaper than the siblings alone."""
  found = {(row.task, row.method): row for row in rows}
  for task in dict.fromkeys(row.task for row in rows):
    shrunk, alone = (
        found.get((task, f'bpo_rb rho={rho}')) for rho in ('0.4', '1.0'))
    if shrunk and alone:
      yield Claim(shrunk.cost < alone.cost,
                  f'at K = 2 rho = 0.4 is cheaper than rho = 1 on {task}',
                  f'variance x steps {_cost(shrunk)}, {_cost(alone)}')


def _cost(row):
  return f'{row.cost:.1f}' + (
      f' +- {row.cost_error:.1f}' if row.cost_error else '')


class Design(NamedTuple):
  """A way to branch at a fixed step, and its exact variance x steps."""

  cost: float
  what: str


def best_designs(task: enumerable.Task) -> tuple[Design, Design]:
  """Returns the best root leave-one-out and the best branching, exactly.

  Noise is relative to |g|^2. Branching forks every backbone, or those alone
  whose return is still open, before a step of its own.
  """
  size = np.sum(task.gradient ** 2)
  root, branch = [], []
  for backbones in (4, 8, 16):
    noise, steps = exact_noise.branching_noise(task, backbones)
    root.append(Design(noise * steps / size, f'{backbones} trajectories'))
  states = {'all': None, 'open': task.variances > task.return_variance / 2}
  for step, siblings in itertools.product(range(1, task.horizon), (2, 3, 4)):
    for where, open_states in states.items():
      noise, steps = exact_noise.branching_noise(
          task, 16, step, siblings, open_states)
      branch.append(Design(noise * steps / size,
                           f'16 backbones, K = {siblings} at step {step}, '
                           f'{where}'))
  return min(root), min(branch)


def _interval(row):
  if row.task == _EXACT:
    return f'{row.bias:.1e}'
  return f'{row.bias:.3f} [{row.bias_low:.3f}, {row.bias_high:.3f}]'


def markdown(rows: Sequence[theory_methods.Measurement]) -> str:
  """Returns the measurements as a table."""
  lines = ['| task | method | bias [95%] | cosine | signal | variance | steps '
           '| variance x steps |', '|---|---|---|---|---|---|---|---|']
  for row in rows:
    lines.append(
        f'| {row.task} | {row.method} | {_interval(row)} | {row.cosine:.3f} '
        f'| {row.signal:.2f} | {row.noise:.2f} | {row.steps:.1f} '
        f'| {_cost(row)} |')
  return '\n'.join(lines)


def schedule_rows(rows: Sequence[theory_methods.Measurement]
                  ) -> list[tuple[str, str, theory_methods.Measurement]]:
  """Returns (schedule, weights, measurement) of the schedules measured."""
  found = []
  for row in rows:
    schedule = theory_methods.schedule_of(row.method)
    found += [(*schedule, row)] if schedule else []
  order = list(theory_methods.SCHEDULES)
  tasks = list(dict.fromkeys(row.task for row in rows))
  return sorted(found, key=lambda entry: (
      tasks.index(entry[2].task), entry[1], order.index(entry[0])))


def schedule_markdown(rows: Sequence[theory_methods.Measurement]) -> str:
  """Returns BPO's table of schedules, as measured here."""
  lines = ['| task | weights | schedule | value gap | bias [95%] | cosine '
           '| steps | variance x steps | WebShop, published |',
           '|---|---|---|---|---|---|---|---|---|']
  for schedule, weights, row in schedule_rows(rows):
    lines.append(
        f'| {row.task} | {weights} | {schedule} | {row.gap:.3f} '
        f'| {_interval(row)} | {row.cosine:.3f} | {row.steps:.1f} '
        f'| {_cost(row)} | {theory_methods.SCHEDULES[schedule]} |')
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
          claims: Sequence[Claim]) -> None:
  """Leaves the tables and, where it can be drawn, the figure in a folder."""
  folder = pathlib.Path(out)
  folder.mkdir(parents=True, exist_ok=True)
  names = [f.name for f in dataclasses.fields(theory_methods.Measurement)]
  tables = (
      (names, [dataclasses.astuple(row) for row in rows]),
      (['schedule', 'weights', 'published', *names],
       [[schedule, weights, theory_methods.SCHEDULES[schedule],
         *dataclasses.astuple(row)]
        for schedule, weights, row in schedule_rows(rows)]),
      (Claim._fields, claims))
  for name, table in zip(_TABLES, tables, strict=True):
    write_csv(folder / name, *table)
  sampled = [row for row in rows if row.task != _EXACT]
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
  claims = list(theorem_claims())
  progress('theorems')
  rows = [*enumerate_methods(progress), *sample_methods(config, progress)]
  for part in (bias_claims, schedule_claims, shrinkage_claims, cost_claims,
               adaptive_claims):
    claims += part(rows)
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

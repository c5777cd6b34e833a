"""What the theory claims of measured methods, and whether a run bears it out.

A claim is a sentence of docs/theory.md. It is held to exact numbers, or to
measured ones by their intervals or a margin that noise does not reach, of as
many trees as are sampled by default. None is made of costs whose intervals are
wide, nor of cosines; fewer trees than that may fail others.
"""

from collections.abc import Iterator, Sequence
import itertools
from typing import NamedTuple

import numpy as np

from bpo_jax import types
from experiments import enumerable
from experiments import exact_noise
from experiments import theory_methods

EXACT = 'exact'  # The name that the enumerated task has in tables.
EXACT_SEED = 2
SAMPLED = ('late', 'early')  # What claims about sampled methods are made of.
_MAX_ERROR = 1e-10  # Of theorems, in float64.
_FLOAT32 = 1e-5  # Of biases and variances whose credit is float32.
_MAX_SCORE = 6.0  # Standard errors of a squared bias that chance explains.
# From those that keep the direction of the gradient to those that turn it most.
_DIRECTIONS = (('grpo', 'gspo', 'dr_grpo', 'dapo'), ('gigpo', 'appo'),
               ('bpo', 'bpo causal uniform'))
_ROOT_SIZES = (4, 8, 16)  # Trajectories of root leave-one-out, at its best.
_KEPT = 0.998  # A cosine of at least this keeps it.
_SHARP = 0.01  # How far below a cosine its interval may end.
_PRICED = 0.2  # Half the interval of a cost, by the cost, at most.


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
  task = enumerable.random_task(EXACT_SEED)
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


def claims(rows: Sequence[theory_methods.Measurement]) -> Iterator[Claim]:
  """Yields every claim about measurements, those that are there."""
  known = [row for row in rows if row.task in (EXACT, *SAMPLED)]
  priced = [row for row in known if _is_priced(row)]
  yield from bias_claims(rows)
  yield from direction_claims(
      [row for row in known if row.cosine - row.cosine_low < _SHARP])
  yield from schedule_claims(known)
  for part in (shrinkage_claims, cost_claims, adaptive_claims):
    yield from part(priced)


def _is_priced(row):
  """Returns whether a cost is exact, or sampled often enough to tell."""
  return row.task == EXACT or 0 < row.cost_error < _PRICED * row.cost


def bias_claims(rows: Sequence[theory_methods.Measurement]) -> Iterator[Claim]:
  """Yields what the measured biases say of the claims to be unbiased."""
  unbiased = {m.name for m in theory_methods.all_methods().values()
              if m.unbiased}
  exact = {row.method: row for row in rows if row.task == EXACT}
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
      ('bpo causal split drop', 'without the incumbent it is biased', 0.1),
      ('bpo causal uniform', 'uniform weights are biased', 0.1)):
    if name in exact:
      row = exact[name]
      yield Claim(row.bias > least, why, f'{name}: exact bias '
                  f'{row.bias:.3f}, cosine {row.cosine:.4f}')
  for task in _sampled(rows):
    here = [row for row in rows if row.task == task]
    free = [row for row in here if row.method in unbiased]
    uniform = [row for row in here if row.method == 'bpo causal uniform']
    for row in free:
      yield Claim(row.score < _MAX_SCORE, f'{row.method} is unbiased on {task}',
                  f'bias {interval(row)}, {row.score:.1f} standard errors')
    for row in uniform:
      most = max((r.bias_high for r in free), default=0.0)
      yield Claim(row.bias_low > most, f'uniform weights are biased on {task}',
                  f'bias {interval(row)}; of the unbiased at most {most:.3f}')


def direction_claims(rows: Sequence[theory_methods.Measurement]
                     ) -> Iterator[Claim]:
  """Yields who keeps the direction of the gradient, and who turns it more."""
  for task in _sampled(rows):
    here = {row.method: row for row in rows if row.task == task}
    least = None
    for names in _DIRECTIONS:
      found = [here[name] for name in names if name in here]
      for row in found:
        keeps = names == _DIRECTIONS[0]
        yield Claim(
            row.cosine_low > _KEPT if keeps else row.cosine < (least or _KEPT),
            f'{row.method} {"keeps" if keeps else "turns"} the direction on '
            f'{task}', f'cosine {row.cosine:.4f}, at least '
            f'{row.cosine_low:.4f}' + (
                f'; those that turn it less, {least:.4f}' if least else ''))
      least = min((row.cosine_low for row in found), default=least)


def _sampled(rows):
  """Returns the tasks of which trees were sampled, in order."""
  return list(dict.fromkeys(row.task for row in rows if row.task != EXACT))


def root_cost(name: str, size: int) -> float:
  """Returns the exact variance x steps of root leave-one-out, over |g|^2."""
  task = enumerable.make(name)
  noise, steps = exact_noise.branching_noise(task, size)
  return noise * steps / np.sum(task.gradient ** 2)


def adaptive_claims(rows: Sequence[theory_methods.Measurement]
                    ) -> Iterator[Claim]:
  """Yields whether `adaptive` makes the right call, by the same budget."""
  for row in rows:
    most = {'late': 1.0, 'early': 1.15}.get(row.task)
    if row.method == 'bpo_adaptive' and most is not None:
      root = root_cost(row.task, 16)
      call = 'loses little' if most > 1 else 'gains'
      yield Claim(bool(row.cost + row.cost_error < most * root),
                  f'bpo_adaptive {call} on {row.task}',
                  f'measured {cost(row)}, less than {most * root:.1f}: root '
                  f'leave-one-out 16 has exactly {root:.1f}')


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
    best = min((row for row in rows if row.task == name
                and row.method.startswith('bpo_rb')),
               key=lambda row: row.cost, default=None)
    if best:
      reach = best.cost_error if pays else -best.cost_error
      exact = min(root_cost(name, size) for size in _ROOT_SIZES)
      yield Claim(
          (best.cost + reach < exact) == pays,
          f'bpo_rb {"wins" if pays else "loses"} on {name}',
          f'measured {cost(best)}, best root leave-one-out exactly {exact:.1f}')
  for row in rows:
    size = row.method.removeprefix('root leave-one-out ')
    if row.task in enumerable.TASKS and size.isdigit():
      exact = root_cost(row.task, int(size))
      error = max(1.5 * row.cost_error, 0.1 * exact)
      yield Claim(abs(row.cost - exact) < error,
                  f'{row.method} has its exact noise on {row.task}',
                  f'measured {cost(row)}, exact {exact:.1f}')


def schedule_claims(rows: Sequence[theory_methods.Measurement]
                    ) -> Iterator[Claim]:
  """Yields what schedules find, what they cost, and what weights do to them."""
  for task in dict.fromkeys(row.task for row in rows):
    split, uniform = (
        {schedule: row for schedule, weighted, row in schedule_rows(rows)
         if (row.task, weighted) == (task, weights)}
        for weights in ('split', 'uniform'))
    yield from _gap_claims(task, split)
    yield from _weight_claims(task, split, uniform)
    if task in SAMPLED:
      yield from _schedule_cost_claims(
          [row for row in rows if _is_priced(row)], task,
          {name: row for name, row in split.items() if _is_priced(row)})


def _gap_claims(task, split):
  """Yields what knowing the true value gaps is worth to a schedule."""
  others = {name: row for name, row in split.items()
            if name != 'oracle_value_gap'}
  if 'oracle_value_gap' in split and others:
    oracle, widest = split['oracle_value_gap'], max(
        others, key=lambda name: others[name].gap)
    evidence = f'{oracle.gap:.3f}, next {others[widest].gap:.3f} ({widest})'
    yield Claim(
        oracle.gap > others[widest].gap,
        f'the oracle forks at the widest value gaps on {task}', evidence)
    if 'top_m' in others:
      yield Claim(widest == 'top_m',
                  f'and the highest entropy at the next on {task}', evidence)


def _weight_claims(task, split, uniform):
  """Yields whether weights matter more than schedules where they matter."""
  both = split.keys() & uniform.keys()
  if both:
    most = max(split[name].bias_high for name in both)
    apart = [name for name in both
             if abs(uniform[name].bias - split[name].bias) > 1e-3]
    least = min((uniform[name].bias_low for name in apart), default=0.0)
    equal = ', '.join(sorted(both - set(apart))) or 'none'
    yield Claim(
        least > most,
        f'uniform weights are off by more than schedules on {task}',
        f'bias at least {least:.3f}, of schedules at most {most:.3f}; no '
        f'difference to {equal}')


def _schedule_cost_claims(rows, task, split):
  """Yields what schedules cost, beside each other and beside others."""
  top, oracle, lowest = map(
      split.get, ('top_m', 'oracle_value_gap', 'lowest_entropy'))
  if top and lowest and task == 'late':
    yield Claim(top.cost < 0.95 * lowest.cost,
                f'the highest entropy is cheaper than the lowest on {task}',
                f'variance x steps {cost(top)}, {cost(lowest)}')
  if top and oracle:
    yield Claim(
        oracle.cost > 0.85 * top.cost,
        f'the oracle gains little over entropy on {task}',
        f'variance x steps {cost(oracle)}, {cost(top)}')
  shrunk = [row.cost for row in rows
            if (row.task, row.method) == (task, 'bpo_rb rho=0.4')]
  if split:
    cheapest = min(row.cost for row in split.values())
    dearest = max(*(root_cost(task, size) for size in _ROOT_SIZES), *shrunk)
    yield Claim(
        cheapest > 1.05 * dearest,
        f'schedules cost more than root leave-one-out or bpo_rb on {task}',
        f'variance x steps at least {cheapest:.1f}, of root leave-one-out 4, 8 '
        f'and 16 and of rho = 0.4 at most {dearest:.1f}')


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
                  f'variance x steps {cost(shrunk)}, {cost(alone)}')


def cost(row: theory_methods.Measurement) -> str:
  """Returns variance x steps with half its 95% interval, where it has one."""
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
  for backbones in _ROOT_SIZES:
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


def interval(row: theory_methods.Measurement) -> str:
  """Returns the bias with its 95% interval, where it has one."""
  if row.task == EXACT:
    return f'{row.bias:.1e}'
  return f'{row.bias:.3f} [{row.bias_low:.3f}, {row.bias_high:.3f}]'


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

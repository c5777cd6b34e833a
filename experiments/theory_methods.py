"""What `verify_theory` measures: methods on enumerable tasks, and how.

A method is a number of first trajectories, a branch policy and an estimator:
every row of `algorithms`, variants of `bpo` and `bpo_rb`, and root
leave-one-out of several sizes. What a row needs, a critic say, it gets from
the exact task. A node is one action of one token there, so that distances and
windows counted in tokens become one.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
import dataclasses
import functools
import inspect
from typing import Any

import jax
import numpy as np
from scipy import special

from bpo_jax import advantages
from bpo_jax import algorithms
from bpo_jax import branching
from bpo_jax import checks
from bpo_jax import designs
from bpo_jax import types
from bpo_jax import variance
from bpo_jax.branching import depths
from experiments import enumerable

# Trees are padded to a multiple of nodes, to compile for few shapes: what is to
# be forked, what was, and what was listed, that many trees at a time.
_BUCKET, _FORKED_BUCKET, _LISTED_BUCKET = 64, 200, 24
_LISTED_TREES = 2048
_ONE_TOKEN = {'min_spacing': 1, 'boundary_interval': 1, 'entropy_window': 1,
              'vocab_size': 2}
# A tree of six branches at each of three levels has 216 leaves; three will do.
_SMALLER = {'spo_tree': dict(num_branch_points=9, num_forks=2)}
_SMALLER_BACKBONES = {'spo_tree': 3}


@functools.cache
def _in_haste():
  """Returns XLA's options to compile fast: a kernel runs a few times only."""
  slow_code = {'xla_backend_optimization_level': 0}
  old_code = slow_code | {'xla_cpu_use_fusion_emitters': False}
  try:
    jax.jit(lambda: 0, compiler_options=old_code)()
  except jax.errors.JaxRuntimeError:  # Options of XLA come and go.
    return slow_code
  return old_code


# Compiled once for all methods that share an estimator or a branch policy.
@functools.cache
def _compiled(function):
  return jax.jit(function, compiler_options=_in_haste())


@functools.cache
def _compiled_policy(policy):
  known = inspect.signature(policy).parameters
  options = {k: v for k, v in _ONE_TOKEN.items() if k in known}
  return _compiled(functools.partial(policy, **options))


@dataclasses.dataclass(frozen=True)
class Method:
  """A way to estimate the gradient.

  Attributes:
    name: what tables call it.
    estimator: tree -> Credit.
    policy: tree -> BranchPlan; None where the root alone branches.
    num_backbones: first trajectories of a tree.
    num_stages: how often the policy is asked.
    options: numbers for the estimator, in name and value.
    unbiased: whether the estimate claims to be of the gradient itself, up to
      the number of paths that it sums over.
  """

  name: str
  estimator: Callable[..., types.Credit]
  policy: Callable[..., types.BranchPlan] | None = None
  num_backbones: int = 8
  num_stages: int = 1
  options: tuple[tuple[str, float], ...] = ()
  unbiased: bool = False

  def plan(self, forest: enumerable.Forest, key: jax.Array
           ) -> types.BranchPlan:
    """Returns where the method forks, on the host."""
    supply = asks_for(self.policy, _FOR_POLICIES | {'key': lambda _: key})
    supply = {name: of(forest) for name, of in supply.items()}
    return jax.device_get(_compiled_policy(self.policy)(forest.tree, **supply))

  def credit(self, forest: enumerable.Forest) -> types.Credit:
    """Returns the credit of grown trees, on the host."""
    supply = {name: of(forest)
              for name, of in asks_for(self.estimator).items()}
    supply |= {k: np.float32(v) for k, v in self.options}
    return jax.device_get(_compiled(self.estimator)(forest.tree, **supply))

  @property
  def growth(self) -> tuple[Hashable, ...]:
    """Returns what the trees depend on; methods that share it share them."""
    golden = 'golden' in inspect.signature(self.estimator).parameters
    return self.policy, self.num_backbones, self.num_stages, golden

  def grow(self, task: enumerable.Task, seed: int, num_trees: int
           ) -> enumerable.Forest:
    """Returns trees drawn and forked as the method does.

    Methods of as many backbones get the same ones, by the seed alone, so that
    much of the noise cancels where they are compared.
    """
    policy, num_backbones, num_stages, golden = self.growth
    rng, key = np.random.default_rng([seed, 1]), jax.random.key(seed)
    forest = enumerable.backbones(task, rng, num_trees, num_backbones)
    if golden:
      forest = _with_golden(forest)
    if policy is None:
      return enumerable.pad(forest, _BUCKET)
    for stage in range(num_stages):
      forest = enumerable.pad(forest, _BUCKET)
      plan = self.plan(forest, jax.random.fold_in(key, stage))
      forest = enumerable.fork(forest, plan, rng)
    return enumerable.pad(forest, _FORKED_BUCKET)

  def credit_of_listed(self, forest: enumerable.Forest) -> types.Credit:
    """Returns the credit of however many trees, compiled for one shape."""
    num_trees, num_nodes = forest.tree.parents.shape
    padded = enumerable.pad(forest, _LISTED_BUCKET)
    parts = []
    for start in range(0, num_trees, _LISTED_TREES):
      rows = np.arange(start, start + _LISTED_TREES) % num_trees
      parts.append(self.credit(dataclasses.replace(
          padded, tree=jax.tree.map(lambda x: x[rows], padded.tree))))
    return jax.tree.map(
        lambda *x: np.concatenate(x)[:num_trees, :num_nodes], *parts)


def _implicit_rewards(forest):
  """Returns the true advantage of every action."""
  task, tree = forest.task, forest.tree
  taken = tree.tokens[..., 0] * tree.action_mask[..., 0]
  gain = task.advantages[forest.states_before, taken][..., None]
  return np.where(tree.action_mask, gain, 0).astype(np.float32)


def _golden(forest):
  """Returns the nodes of what `_with_golden` laid last."""
  return forest.tree.birth == max(forest.stage, 1)


@functools.cache
def _slope_of(task):
  """Returns SIPO's a2, of trees that no estimate is made from."""
  sample = enumerable.backbones(task, np.random.default_rng(0), 256, 4)
  covariance, variance = _compiled(advantages.selection_slope)(sample.tree)
  return np.float32(covariance / max(variance, 1e-12))


@functools.cache
def design_of(task: enumerable.Task, num_updates: int = 8, num_trees: int = 128
              ) -> depths.Design:
  """Returns what `adaptive` is recommended after some updates of a run.

  A run that starts with nothing: every update grows trees by the design of the
  trees before, and adds what they say to the sums that make the next one.

  Args:
    task: what the trees are of; of one policy, as if nothing were learnt.
    num_updates: of the run.
    num_trees: of each update.
  """
  rng, key = np.random.default_rng(0), jax.random.key(0)
  policy = _compiled_policy(branching.adaptive)
  sums = variance.init(num_depths=task.horizon, depth_width=1)
  design = depths.unknown(task.horizon, depth_width=1)
  for update in range(num_updates):
    forest = enumerable.backbones(task, rng, num_trees, 4)
    for stage in range(2):
      forest = enumerable.pad(forest, 2 * _BUCKET)
      stage_key = jax.random.fold_in(key, 2 * update + stage)
      plan = policy(forest.tree, design=design, key=stage_key)
      forest = enumerable.fork(forest, jax.device_get(plan), rng)
    forest = enumerable.pad(forest, 2 * _BUCKET)
    sums = _compiled(variance.update)(sums, forest.tree)
    design = designs.next_design(sums)
  return jax.device_get(design)


# What branch policies and estimators may ask for, by argument name.
_FOR_POLICIES = dict(
    design=lambda forest: design_of(forest.task),
    values=lambda forest: forest.at_end(forest.task.values))
_FOR_ESTIMATORS = dict(
    values=lambda forest: forest.before(forest.task.values),
    implicit_rewards=_implicit_rewards, golden=_golden,
    a2=lambda forest: _slope_of(forest.task))


def asks_for(function: Callable[..., Any],
             supply: Mapping[str, Callable[[enumerable.Forest], Any]]
             = _FOR_ESTIMATORS
             ) -> dict[str, Callable[[enumerable.Forest], Any]]:
  """Returns what a function asks for, each to be computed from a forest."""
  known = inspect.signature(function).parameters
  return {name: of for name, of in supply.items() if name in known}


def _with_golden(forest):
  """Returns the forest with one more path, that of the greatest return."""
  every = enumerable.all_backbones(forest.task, 1)
  best = int(np.argmax(every.tree.rewards.sum(1)))
  actions = every.tree.tokens[best, 1:, 0]
  shape = (len(forest.tree.parents), 1, forest.task.horizon)
  above = np.zeros(shape[:2], int)
  return enumerable.lay_forks(forest, above, np.broadcast_to(actions, shape))


@dataclasses.dataclass(frozen=True)
class Moments:
  """Of the gradient of one tree.

  Attributes:
    mean: [P]
    covariance: [P, P]
    weight: mean total weight of a tree's first actions, the number of paths
      that it sums over.
    steps: mean environment steps.
    num_trees: how many they were taken over; inf where they are exact.
    gap: mean of max_a |Q(s, a) - V(s)| over the forks, s where they start,
      reward units; 0 without forks.
  """

  mean: np.ndarray
  covariance: np.ndarray
  weight: float
  steps: float
  num_trees: float
  gap: float = 0.0

  def scaled(self) -> 'Moments':
    """Returns those of the estimate divided by its weight."""
    weight = self.weight or 1.0
    return dataclasses.replace(
        self, mean=self.mean / weight, weight=1.0,
        covariance=self.covariance / weight ** 2)


def moments(forest: enumerable.Forest, credit: types.Credit,
            chance: np.ndarray | None = None) -> Moments:
  """Returns the moments over trees, each as likely as `chance` [B] says.

  Without chances the trees are a sample and the covariance the unbiased one.
  """
  estimates = enumerable.gradient(forest, credit)
  num_trees = len(estimates)
  if chance is None:
    share, ddof = np.full(num_trees, 1 / num_trees), 1
  else:
    share, ddof, num_trees = chance, 0, np.inf
  mean = share @ estimates
  centred = estimates - mean
  covariance = (centred * share[:, None]).T @ centred
  if ddof:
    covariance *= num_trees / (num_trees - 1)
  first = (forest.tree.parents == 0)[..., None]
  weights = np.sum(credit.weights * first, axis=(1, 2), dtype=float)
  return Moments(mean, covariance, float(share @ weights),
                 float(share @ forest.num_steps), num_trees,
                 _value_gap(forest, share))


def _value_gap(forest, share):
  """Returns the mean value gap of the states that forks start from."""
  tree = forest.tree
  above = np.take_along_axis(tree.birth, np.maximum(tree.parents, 0), axis=1)
  starts = tree.node_mask & (tree.birth > above)
  gaps = np.abs(forest.task.advantages).max(1)[forest.states_before]
  total, count = (share @ x.sum(1) for x in (gaps * starts, starts))
  return float(total / count) if count else 0.0


def pooled(parts: list[Moments]) -> Moments:
  """Returns the moments of several samples of one size together."""
  fields = {
      field.name: sum(getattr(part, field.name) for part in parts) / len(parts)
      for field in dataclasses.fields(Moments)}
  return Moments(**fields | {'num_trees': sum(p.num_trees for p in parts)})


@dataclasses.dataclass(frozen=True)
class Measurement:
  """A method on a task, against the exact gradient g.

  Attributes:
    task, method: their names.
    bias: |E x - g| / |g| of the estimate x divided by its weight; negative
      where the unbiased estimate of its square is.
    bias_low, bias_high: 95% interval.
    score: the estimated squared bias over its standard error without bias.
    cosine, cosine_low: of E x and g, and the lower end of its 95% interval.
    signal: E x . g / |g|^2.
    noise: tr Cov(x) / (signal |g|)^2.
    steps: environment steps of a tree.
    cost: noise times steps.
    cost_error: half its 95% interval, from the spread over seeds.
    gap: as in `Moments`.
  """

  task: str
  method: str
  bias: float
  bias_low: float
  bias_high: float
  score: float
  cosine: float
  cosine_low: float
  signal: float
  noise: float
  steps: float
  cost: float
  cost_error: float = 0.0
  gap: float = 0.0


def measure(task_name: str, method_name: str, gradient: np.ndarray,
            parts: list[Moments]) -> Measurement:
  """Returns the measurement that moments by seed, or exact ones, amount to."""
  whole = pooled(parts).scaled()
  size = np.linalg.norm(gradient)
  signal = float(whole.mean @ gradient / size ** 2)
  off, error, null = _squared_norm(whole.mean - gradient, whole)
  root = lambda x: float(np.sign(x) * np.sqrt(abs(x)) / size)
  costs = [_noise(part.scaled(), gradient) * part.steps for part in parts]
  cosine, cosine_low = _cosine(whole, gradient, signal)
  noise = _noise(whole, gradient)
  return Measurement(
      task=task_name, method=method_name, bias=root(off),
      bias_low=max(root(off - 1.96 * error), 0.0),
      bias_high=max(root(off + 1.96 * error), 0.0),
      score=float(off / null) if null else 0.0,
      cosine=cosine, cosine_low=cosine_low, signal=signal, noise=noise,
      steps=whole.steps, cost=noise * whole.steps,
      cost_error=half_interval(costs), gap=whole.gap)


def half_interval(values: Sequence[float]) -> float:
  """Returns half the 95% interval of the mean of n values, 0 of a single one.

  By Student's t with n - 1 degrees of freedom, exact for normal values: of two
  seeds it is 6.5 times as wide as by the normal quantile, of four 1.6 times.
  """
  if len(values) < 2:
    return 0.0
  error = np.std(values, ddof=1) / np.sqrt(len(values))
  return float(special.stdtrit(len(values) - 1, 0.975) * error)


def _squared_norm(vector, of):
  """Returns |E v|^2 without bias, its standard error, and that where E v = 0.

  With v a mean over n trees: E|v|^2 = |E v|^2 + tr C / n, and the variance is
  4 v'C v / n - 2 tr C^2 / n^2 to leading order, 2 tr C^2 / n^2 where E v = 0.
  """
  square = vector @ vector - np.trace(of.covariance) / of.num_trees
  null = 2 * np.sum(of.covariance ** 2) / of.num_trees ** 2
  variance = 4 * vector @ of.covariance @ vector / of.num_trees - null
  return square, np.sqrt(max(variance, null)), np.sqrt(null)


def _noise(scaled, gradient):
  signal = scaled.mean @ gradient / np.linalg.norm(gradient)
  return float(np.trace(scaled.covariance) / signal ** 2) if signal else np.inf


def _cosine(whole, gradient, signal):
  """Returns the cosine and the lower end of its interval."""
  size = np.linalg.norm(gradient)
  unit = gradient / size
  aside = np.eye(len(unit)) - np.outer(unit, unit)
  across = dataclasses.replace(
      whole, covariance=aside @ whole.covariance @ aside)
  square, error, _ = _squared_norm(aside @ whole.mean, across)

  def cosine(square):
    total = np.sqrt((signal * size) ** 2 + max(square, 0))
    return float(signal * size / total) if total else 0.0
  return cosine(square), cosine(square + 1.96 * error)


# The branch points of the row `bpo_rb`, wherever a variant places them.
_CAUSAL = algorithms.get('bpo_rb').branch_policy
_POINTS = dict(num_branch_points=8, num_forks=1)
_TOP_M = functools.partial(branching.top_entropy, **_POINTS)
# Where BPO's schedules fork, the worst in training first; success on WebShop.
SCHEDULES = {
    'lowest_entropy': 60.8, 'random': 64.5, 'equally_spaced': 65.2,
    'top_m': 67.8, 'oracle_value_gap': 68.4}
_POLICIES = {'top_m': _TOP_M} | {
    name: functools.partial(getattr(branching, name), **_POINTS)
    for name in SCHEDULES if name != 'top_m'}
# Where episodes are equally long these look at nothing that was drawn.
_BLIND = ('random', 'equally_spaced')


# Rows that claim the gradient itself, whatever is drawn.
_UNBIASED = ('rloo', 'bpo_rb', 'bpo_adaptive')


# Each is compiled once for all variants that share it.
_BPO = advantages.bpo
_BPO_SPLIT = functools.partial(_BPO, node_weighting='split')
_BPO_DROP = functools.partial(_BPO_SPLIT, incumbent='drop')
_BPO_MEANS = functools.partial(_BPO_SPLIT, node_values='split_mean')


def schedule_of(name: str) -> tuple[str, str] | None:
  """Returns the schedule and the weights of such a variant's name, or None."""
  words = name.split()
  if len(words) == 3 and words[0] == 'bpo' and words[1] in SCHEDULES:
    return words[1], words[2]
  return None


def _schedules(make):
  """Yields the schedules beside `top_m`, in both weightings."""
  for name, policy in _POLICIES.items():
    if name != 'top_m':
      yield make(f'bpo {name} uniform', _BPO, policy)
      yield make(f'bpo {name} split', _BPO_SPLIT, policy,
                 unbiased=name in _BLIND)


def variants() -> dict[str, Method]:
  """Returns what the table's rows leave open, four backbones each."""
  make = functools.partial(Method, num_backbones=4)
  methods = [
      make('bpo top_m uniform', _BPO, _TOP_M),
      make('bpo top_m split', _BPO_SPLIT, _TOP_M),
      make('bpo top_m split drop', _BPO_DROP, _TOP_M),
      *_schedules(make),
      make('bpo causal uniform', _BPO, _CAUSAL),
      make('bpo causal split', _BPO_SPLIT, _CAUSAL, unbiased=True),
      make('bpo causal split means', _BPO_MEANS, _CAUSAL, unbiased=True),
      make('bpo causal split drop', _BPO_DROP, _CAUSAL),
      *(make(f'bpo_rb rho={rho}', advantages.bpo_rb, _CAUSAL, unbiased=True,
             options=(('rho', rho),)) for rho in (0.0, 0.4, 0.5, 1.0)),
      *(Method(f'root leave-one-out {size}', advantages.rloo,
               num_backbones=size, unbiased=True) for size in (2, 4, 8, 16)),
  ]
  return {method.name: method for method in methods}


def _from_table(name: str) -> Method:
  """Returns a row of the table as a method."""
  row = algorithms.get(name)
  policy = row.branch_policy
  if name in _SMALLER:
    policy = functools.partial(policy, **_SMALLER[name])
  return Method(
      name, row.estimator, policy, num_stages=row.defaults['num_stages'],
      num_backbones=_SMALLER_BACKBONES.get(
          name, row.defaults['num_backbones']),
      unbiased=name in _UNBIASED)


def all_methods() -> Mapping[str, Method]:
  """Returns every row of the table, then the variants, by name."""
  table = {name: _from_table(name) for name in algorithms.names()}
  return table | variants()


def select(names: Sequence[str]) -> list[Method]:
  """Returns the methods of those names, all of them for none.

  Raises:
    ValueError: if there is no method of a name.
  """
  known = all_methods()
  for name in names:
    checks.one_of('methods', name, tuple(known))
  return [known[name] for name in names or known]

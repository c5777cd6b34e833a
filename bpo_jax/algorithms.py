"""The table of algorithms: where to fork, who gets credit, how to step.

A method is one estimator, perhaps one branch policy, and one row below.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import types as python_types
from typing import Any, Literal

import jax
import numpy as np

from bpo_jax import advantages
from bpo_jax import branching
from bpo_jax import checks
from bpo_jax import objectives
from bpo_jax import options
from bpo_jax import tree as tree_lib
from bpo_jax import types

Exactness = Literal['exact', 'restated', 'read', 'ours']

# What an algorithm cannot do without -> who has to provide what.
NEEDS = python_types.MappingProxyType({
    'value head': 'values [B, N, T] of the state before every action token',
    'golden trajectory': 'golden [B, N], a trajectory that is known to succeed',
    'anchors': 'Tree.anchor, which tells equal observations',
    'implicit reward': 'implicit_rewards [B, N, T], of a second policy that is '
                       'trained by preference between trajectories',
    'value predictor': 'values [B, N] predicted by earlier updates',
    'reference policy': 'its parameters, while kl_coef is not 0',
    'design': 'design, recommended by the trees of earlier updates; without '
              'one there are no forks but those that explore',
    'selection slope': 'a2, by selection_slope of the batch before',
})


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """One row of the table.

  Attributes:
    name: what `get` knows it by.
    branch_policy: tree -> BranchPlan; None where only the root branches.
    estimator: tree -> Credit.
    objective: surrogate per token, to be maximised.
    defaults: what a training run needs besides: num_backbones first
      trajectories a task, num_stages of branching, kl_coef, kl_estimator,
      reducer; and the defaults of all options of the three.
    source: where it comes from.
    exactness: 'exact', from the paper's text or code; 'restated', from a third
      party's reading of it; 'read', our reading where the source is silent;
      'ours'.
    needs: keys of `NEEDS`.
  """

  name: str
  branch_policy: types.BranchPolicy | None
  estimator: types.Estimator
  objective: Callable[..., types.Array]
  defaults: Mapping[str, Any]
  source: str
  exactness: Exactness
  needs: tuple[str, ...] = ()

  @property
  def parts(self) -> tuple[Callable[..., Any], ...]:
    """Branch policy, if there is one, estimator and objective."""
    parts = (self.branch_policy, self.estimator, self.objective)
    return tuple(part for part in parts if part is not None)

  def credit(self, tree: tree_lib.Tree, **overrides: Any) -> types.Credit:
    """Returns the tree's credit.

    Args:
      tree: [B, N, T].
      **overrides: options of the estimator, and the arrays that it needs.

    Raises:
      ValueError: if the estimator has no such option, or lacks what it needs,
        or the tree is no batch.
    """
    _check_options(self.name, self.estimator, overrides)
    tree_lib.check_batch(tree)
    if 'anchors' in self.needs:
      check_anchors(self.name, tree)
    return self.estimator(tree, **overrides)

  def plan(self, tree: tree_lib.Tree, **overrides: Any
           ) -> types.BranchPlan | None:
    """Returns where to fork the tree next, or None if it never is.

    Args:
      tree: [B, N, T].
      **overrides: options of the branch policy, and the arrays that it needs.

    Raises:
      ValueError: if the policy has no such option, lacks what it needs, or
        there is none, or the tree is no batch.
    """
    tree_lib.check_batch(tree)
    if self.branch_policy is None:
      if overrides:
        raise ValueError(f'{self.name} does not branch; expected no options, '
                         f'got {", ".join(sorted(overrides))}')
      return None
    _check_options(self.name, self.branch_policy, overrides)
    return self.branch_policy(tree, **overrides)


def get(name: str) -> Algorithm:
  """Returns the algorithm of that name.

  Raises:
    ValueError: if there is none; the message lists the near names.
  """
  checks.one_of('algorithm', name, names())
  return _TABLE[name]


def estimator(name: str) -> types.Estimator:
  """Returns the credit estimator of that name, such as 'arpo_hard'.

  Raises:
    ValueError: if no row has it; the message lists the near names.
  """
  return _part('estimator', name, [row.estimator for row in _ROWS])


def branch_policy(name: str) -> types.BranchPolicy:
  """Returns the branch policy of that name, such as 'top_entropy'.

  Raises:
    ValueError: if there is none; the message lists the near names.
  """
  used = [row.branch_policy for row in _ROWS if row.branch_policy is not None]
  return _part('branch_policy', name, [*used, *_SCHEDULES])


def branch_policies() -> tuple[str, ...]:
  """Returns the names that `branch_policy` knows, sorted."""
  used = [row.branch_policy for row in _ROWS if row.branch_policy is not None]
  return tuple(sorted(_by_name([*used, *_SCHEDULES])))


def num_stages(policy: types.BranchPolicy | None) -> int:
  """Returns how often a policy is asked that tells from the tree where it is.

  1 for any other, which `branching.recursive` asks again.
  """
  return _STAGES.get(policy and options.unwrap(policy), 1)


def names() -> tuple[str, ...]:
  """Returns the names that `get` knows, sorted."""
  return tuple(sorted(_TABLE))


def describe() -> str:
  """Returns the table as text: name, exactness, source and needs of each."""
  width = max(map(len, names()))
  lines = []
  for row in map(get, names()):
    needs = f'; needs {", ".join(row.needs)}' if row.needs else ''
    lines.append(f'{row.name:{width}}  {row.source} ({row.exactness}){needs}')
  return '\n'.join(lines)


def _by_name(parts):
  """Returns functions by their own names, without what rows fill in."""
  return {f.__name__: f for f in map(options.unwrap, parts)}


def _part(kind, name, parts):
  known = _by_name(parts)
  checks.one_of(kind, name, sorted(known))
  return known[name]


def check_anchors(name: str, tree: tree_lib.Tree) -> None:
  """Refuses trees in which no observation is known; inside of jit, none.

  Raises:
    ValueError: if all anchors are unknown.
  """
  if isinstance(tree.anchor, jax.core.Tracer):
    return
  if not np.any(np.asarray(tree.anchor) != types.UNKNOWN_ANCHOR):
    raise ValueError(
        f'{name} needs anchors: expected Tree.anchor of at least 0 where an '
        f'observation is known, got {types.UNKNOWN_ANCHOR} at every node')


def _check_options(name, function, overrides):
  """Refuses options that the function does not take by keyword."""
  for option in overrides:
    checks.one_of(f'option of {name}', option, options.keywords(function))


def _row(name, source, exactness, estimator, branch_policy=None, *,
         objective=objectives.clipped_surrogate, needs=(), num_backbones=8,
         kl_coef=0.0, kl_estimator='k2', reducer='token_mean'):
  """Returns a row; the defaults of its parts' options join its own."""
  defaults = {}
  for part in (branch_policy, estimator, objective):
    found = {} if part is None else options.of(part)
    defaults |= {key: option.default for key, option in found.items()}
  defaults |= dict(
      num_backbones=num_backbones, num_stages=num_stages(branch_policy),
      kl_coef=kl_coef, kl_estimator=kl_estimator, reducer=reducer)
  needs = [*needs, *(['reference policy'] if kl_coef else [])]
  return Algorithm(
      name=name, branch_policy=branch_policy, estimator=estimator,
      objective=objective, defaults=python_types.MappingProxyType(defaults),
      source=source, exactness=exactness, needs=tuple(needs))


_STAGES = {branching.spo_cutpoints: 2, branching.branpo_tail: 3,
           branching.adaptive: 2}
# Of the ablation of schedules; no row has them for its own.
_SCHEDULES = (branching.random, branching.equally_spaced,
              branching.lowest_entropy, branching.oracle_value_gap)
_CLIP_HIGHER = functools.partial(
    objectives.clipped_surrogate, clip_epsilon_high=0.28)

_ROWS = (
    # Trajectories alone: the root is the only branch point.
    _row('ppo', 'Schulman et al. 2017, arXiv 1707.06347; GAE, arXiv 1506.02438',
         'exact', advantages.ppo_gae, needs=['value head'], kl_coef=0.05),
    _row('rloo', 'Back to Basics, arXiv 2402.14740', 'exact', advantages.rloo,
         kl_coef=0.05),
    _row('grpo', 'DeepSeekMath, arXiv 2402.03300; averaged over tokens, as in '
         'verl', 'exact', advantages.grpo,
         kl_coef=0.04, kl_estimator='k3'),
    _row('dr_grpo', 'Understanding R1-Zero-Like Training, arXiv 2503.20783',
         'exact', advantages.dr_grpo, reducer='sequence_sum_norm'),
    _row('dapo', 'DAPO, arXiv 2503.14476', 'exact',
         functools.partial(advantages.grpo, zero_variance='drop'),
         objective=_CLIP_HIGHER),
    _row('gspo', 'Group Sequence Policy Optimization, arXiv 2507.18071',
         'exact', advantages.grpo,
         objective=objectives.sequence_ratio_surrogate,
         reducer='sequence_mean'),
    _row('gigpo', 'GiGPO, arXiv 2505.10978', 'exact', advantages.gigpo,
         needs=['anchors'], kl_coef=0.01, kl_estimator='k3'),
    _row('istar', 'iStar, arXiv 2509.19199', 'read', advantages.istar,
         needs=['implicit reward'], kl_coef=0.01, kl_estimator='k3'),
    _row('iapo', 'IAPO, arXiv 2608.24588', 'read', advantages.iapo),
    _row('gcpo', 'Group Contrastive Policy Optimization, known by its abstract',
         'read', advantages.gcpo, needs=['golden trajectory']),
    # Trees.
    _row('bpo', 'Branching Policy Optimization, arXiv 2607.14171', 'restated',
         advantages.bpo, branching.top_entropy, num_backbones=1, kl_coef=0.05),
    # Two forks from each of four backbones; 0.5 nats separates a choice between
    # two tokens from a foregone one, until a run has its own quantile.
    _row('bpo_rb', 'this project', 'ours', advantages.bpo_rb,
         functools.partial(
             branching.causal_threshold, threshold=0.5, num_branch_points=8,
             max_per_path=2),
         num_backbones=4, kl_coef=0.05),
    _row('bpo_adaptive', 'this project', 'ours', advantages.bpo_rb,
         branching.adaptive, needs=['design'], num_backbones=4, kl_coef=0.05),
    # Forks at every decision of up to fifty.
    _row('vineppo', 'VinePPO, arXiv 2410.01679; three samples of a state for '
         'its nine', 'exact', advantages.vineppo,
         functools.partial(
             branching.equally_spaced, num_branch_points=50, num_forks=3),
         num_backbones=1, kl_coef=0.05),
    _row('cbpo', 'Contrastive Branch Policy Optimization, arXiv 2608.24300; '
         'clip and KL weight read, whole entropies for their ten largest terms',
         'exact', advantages.cbpo, branching.cbpo_allocation, num_backbones=6,
         kl_coef=1e-3, kl_estimator='k3', reducer='token_mean'),
    _row('appo', 'Agentic Procedural Policy Optimization, arXiv 2606.12384',
         'exact', advantages.appo, branching.appo_score,
         objective=functools.partial(
             objectives.future_kl_surrogate, future_clamp=True), kl_coef=1e-3,
         kl_estimator='k3'),
    _row('arpo_soft', 'ARPO, arXiv 2507.19849', 'restated',
         advantages.arpo_soft, branching.arpo_after_tool),
    _row('arpo_hard', 'ARPO, arXiv 2507.19849', 'restated',
         advantages.arpo_hard, branching.arpo_after_tool),
    _row('branpo', 'BranPO, arXiv 2602.03719', 'restated', advantages.branpo,
         branching.branpo_tail, num_backbones=4),
    _row('trace', 'TRACE, arXiv 2606.11119', 'restated', advantages.arpo_soft,
         branching.trace_budget, needs=['value predictor']),
    _row('tree_grpo', 'Tree-GRPO, arXiv 2509.21240', 'restated',
         advantages.tree_grpo, branching.tree_grpo_random, num_backbones=2),
    _row('treerl', 'TreeRL, arXiv 2506.11902', 'restated', advantages.treerl,
         branching.treerl_surprisal, num_backbones=6),
    _row('spo_tree', 'SPO-tree, arXiv 2505.23564', 'restated',
         advantages.spo_tree,
         functools.partial(branching.spo_cutpoints, num_branch_points=36),
         num_backbones=6),
    _row('sipo', 'SIPO, arXiv 2609.34805', 'read', advantages.sipo,
         branching.sipo, needs=['selection slope'], num_backbones=4),
    _row('opts_ttpo', 'OPTS-TTPO, arXiv 2609.40035', 'read',
         advantages.tree_gae, branching.top_entropy, needs=['value head'],
         num_backbones=2),
)
_TABLE = {row.name: row for row in _ROWS}

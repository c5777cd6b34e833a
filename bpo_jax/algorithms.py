"""The table of algorithms: where to fork, who gets credit, how to step.

A method is one estimator, perhaps one branch policy, and one row below.
"""

from collections.abc import Callable, Mapping
import dataclasses
import difflib
import functools
import inspect
import types as python_types
from typing import Any

from bpo_jax import advantages
from bpo_jax import branching
from bpo_jax import objectives
from bpo_jax import tree as tree_lib
from bpo_jax import types


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """One row of the table.

  Attributes:
    name: what `get` knows it by.
    branch_policy: tree -> BranchPlan; None where only the root branches.
    estimator: tree -> Credit.
    objective: surrogate per token, to be maximised.
    defaults: what a training run needs besides: num_backbones first
      trajectories a task, num_branch_points and num_forks at each, the clip,
      kl_coef, learning_rate, reducer.
    source: where it comes from.
    exactness: 'exact', from the paper's text or code; 'restated', from a third
      party's reading of it; 'read', our reading where the source is silent;
      'ours'.
  """

  name: str
  branch_policy: types.BranchPolicy | None
  estimator: types.Estimator
  objective: Callable[..., types.Array]
  defaults: Mapping[str, Any]
  source: str
  exactness: str

  def credit(self, tree: tree_lib.Tree, **overrides: Any) -> types.Credit:
    """Returns the tree's credit; overrides are options of the estimator.

    Raises:
      ValueError: if the estimator has no such option.
    """
    _check_options(self.name, self.estimator, overrides)
    return self.estimator(tree, **overrides)

  def plan(self, tree: tree_lib.Tree, **overrides: Any
           ) -> types.BranchPlan | None:
    """Returns where to fork the tree next, or None if it never is.

    Raises:
      ValueError: if the branch policy has no such option, or there is none.
    """
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
  if name not in _TABLE:
    raise ValueError(_unknown('algorithm', name, names()))
  return _TABLE[name]


def names() -> tuple[str, ...]:
  """Returns the names that `get` knows, sorted."""
  return tuple(sorted(_TABLE))


def _unknown(kind, name, known):
  near = difflib.get_close_matches(name, known) or sorted(known)
  return f'unknown {kind}: expected one of {", ".join(near)}; got {name!r}'


def _check_options(name, function, overrides):
  """Refuses options that the function does not take by keyword."""
  known = list(inspect.signature(function).parameters)[1:]
  for option in overrides:
    if option not in known:
      raise ValueError(_unknown(f'option of {name}', option, known))


def _row(name, source, exactness, estimator, branch_policy=None, **defaults):
  """Returns a row whose clip and branch points follow its defaults."""
  clip = {key: defaults[key] for key in
          ('clip_epsilon_low', 'clip_epsilon_high')}
  if branch_policy is not None:
    branch_policy = functools.partial(
        branch_policy, num_branch_points=defaults['num_branch_points'],
        num_forks=defaults['num_forks'])
  return Algorithm(
      name=name, branch_policy=branch_policy, estimator=estimator,
      objective=functools.partial(objectives.clipped_surrogate, **clip),
      defaults=python_types.MappingProxyType(defaults), source=source,
      exactness=exactness)


_ROWS = (
    _row('bpo', 'Branching Policy Optimization, arXiv 2607.14171', 'restated',
         advantages.bpo, branching.top_entropy, num_backbones=1,
         num_branch_points=4, num_forks=3, clip_epsilon_low=0.2,
         clip_epsilon_high=0.2, kl_coef=0.05, learning_rate=2e-6,
         reducer='token_mean'),
    # Two forks from each of four backbones; 0.5 nats separates a choice between
    # two tokens from a foregone one, until a run has its own quantile.
    _row('bpo_rb', 'this project', 'ours', advantages.bpo_rb,
         functools.partial(
             branching.causal_threshold, threshold=0.5, max_per_path=2),
         num_backbones=4, num_branch_points=8, num_forks=1,
         clip_epsilon_low=0.2, clip_epsilon_high=0.2, kl_coef=0.05,
         learning_rate=2e-6, reducer='token_mean'),
    _row('grpo', 'DeepSeekMath, arXiv 2402.03300', 'exact', advantages.grpo,
         num_backbones=8, num_branch_points=0, num_forks=0,
         clip_epsilon_low=0.2, clip_epsilon_high=0.2, kl_coef=0.04,
         learning_rate=1e-6, reducer='token_mean'),
    _row('rloo', 'Back to Basics, arXiv 2402.14740', 'exact', advantages.rloo,
         num_backbones=8, num_branch_points=0, num_forks=0,
         clip_epsilon_low=0.2, clip_epsilon_high=0.2, kl_coef=0.05,
         learning_rate=1e-6, reducer='token_mean'),
)
_TABLE = {row.name: row for row in _ROWS}

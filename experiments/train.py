"""Trains a policy by branching policy optimisation or a baseline.

  python -m experiments.train
  python -m experiments.train --algorithm=grpo --seed=1
  python -m experiments.train --env=alfworld --data=DIR --algorithm=bpo_rb

Warm-starts a small transformer by imitating a scripted searcher, then improves
it on trees of its own episodes, and scores it before and after on a split that
it never trained on. A run's --workdir has its checkpoints/, warm_start/,
metrics.csv, tensorboard/ and result.json. A run that was killed goes on, bit
for bit, with --resume and the same flags.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import json
import pathlib
import shutil
import sys
import time
from typing import Any

from absl import flags
from absl import logging
import jax
import jax.numpy as jnp
import numpy as np

from bpo_jax import algorithms
from bpo_jax import checkpoint
from bpo_jax import learner
from bpo_jax import memory
from bpo_jax import metrics
from bpo_jax import packing
from bpo_jax import returns
from bpo_jax import rollout
from bpo_jax import sharding
from bpo_jax import tree as trees
from experiments import assembly
from experiments import config_flags
from experiments import configs
from experiments import methods
from experiments import needs as needs_lib
from experiments import scoring
from experiments import warm_start

# For --help: the table is data, and grows.
__doc__ += (
    '\nAlgorithms, their sources, how exact our reading is, what they need:\n\n'
    + algorithms.describe() + '\n')

_THRESHOLD_DECAY = 0.9  # Of the running quantile of entropies, per update.
# Keys are folded in: tasks from 0 up, stages of branching from here down.
_PLAN = 2**31 - 2
_EVALUATION = 2**31 - 1
_TASKS_LOOKED_AT = 8  # For how long their episodes may be.


@dataclasses.dataclass
class Run:
  """A run ready to go.

  Attributes:
    config: as the flags have it.
    agent: the policy without its parameters.
    method: the algorithm with the config's choices filled in.
    needs: makes what the method takes besides trees.
    train_tasks: tasks to draw from.
    eval_tasks: tasks to score on.
    eval_types: the type of each of these.
    workdir: where everything goes.
    reference: parameters of the warm-started policy.
    origin: what its checkpoints say of where it began.
    state: what training has come to.
  """

  config: configs.TrainConfig
  agent: assembly.Agent
  method: methods.Method
  needs: needs_lib.Needs
  train_tasks: Sequence[Any]
  eval_tasks: Sequence[Any]
  eval_types: Sequence[str]
  workdir: pathlib.Path
  reference: dict
  origin: Mapping[str, str]
  state: learner.TrainState


@memory.explained_parameters()
def set_up(config: configs.TrainConfig) -> Run:
  """Returns the run that the config describes, restored if it is to go on.

  Raises:
    MemoryError: if the device has too little; it says what to change.
    ValueError: if the data, a split or the workdir is not what it should be.
    OSError: if the workdir cannot be written to.
  """
  mesh = sharding.make_mesh(config.mesh) if config.mesh else None
  alone = assembly.make_agent(config)
  agent = alone.on(mesh)
  method = methods.make(config, agent.tokenizer.vocab_size)
  methods.check(method)
  agent.grower.debug = config.debug
  train_tasks = agent.environment.tasks(config.train_split)
  eval_tasks = scoring.spread(
      agent.environment.tasks(config.eval_split), config.eval_tasks
  )
  eval_types = scoring.task_types(agent.environment, eval_tasks)
  check_lengths(config, agent, train_tasks)
  workdir = make_workdir(config)
  logging.info('Everything goes to %s', workdir)
  is_new = checkpoint.latest_step(workdir / 'checkpoints') is None
  params = assembly.init_params(config, alone)
  origin = assembly.origin_of(alone, params)
  if not is_new:  # Before a warm start is made, for want of the run's own.
    assembly.check_origin(workdir, alone, origin)
  if config.resume:
    warm_start.check_kept(workdir, alone, origin)
  if is_new:
    check_config(config, workdir)
  # The warm start is made on one device: runs of all meshes share it.
  reference = sharding.place(
      mesh, warm_start.load(config, alone, workdir, params, origin))
  del params  # Memory may not hold them beside those of the mesh.
  state = sharding.place(mesh, assembly.init_state(config, agent, reference))
  if not is_new:
    state = assembly.restore(workdir, state).state
    logging.info('Going on after update %d.', int(state.update))
    check_config(config, workdir)  # Not before: the run may refuse it.
  return Run(
      config=config,
      agent=agent,
      method=method,
      needs=needs_lib.Needs(config, agent, method),
      train_tasks=train_tasks,
      eval_tasks=eval_tasks,
      eval_types=eval_types,
      workdir=workdir,
      reference=reference,
      origin=origin,
      state=state,
  )


def check_lengths(
    config: configs.TrainConfig, agent: assembly.Agent, tasks: Sequence[Any]
) -> None:
  """Refuses rows that an episode may not go in, before there is one.

  It is the first few tasks that are looked at, since each has to be set up. A
  prompt of another that is longer still is refused when its tree is packed.
  Warns of episodes that are longer than what a language model was made for.

  Raises:
    ValueError: saying how many tokens an episode can have.
  """
  model = agent.language_model
  most = model.max_positions if model is not None else None
  if config.row_length is None and most is None:
    return
  first = range(min(_TASKS_LOOKED_AT, len(tasks)))
  some = (agent.playable(tasks, index) for index in first)
  longest = max(
      (agent.longest_path(task) for task in some if task is not None),
      default=0)
  if most is not None and most < longest:
    logging.warning(
        '%s: max_position_embeddings is %d, but an episode may have %d tokens,'
        ' which the model has never seen; lower --max_turns,'
        ' --observation_length or --max_action_tokens.',
        model.directory, most, longest)
  if config.row_length is not None and config.row_length < longest:
    raise ValueError(
        f'row_length: expected room for a path of {longest} tokens, which'
        f' {config.turn_limit} turns may have in the first {_TASKS_LOOKED_AT}'
        f' tasks, got {config.row_length}; raise'
        ' --row_length or leave it out, or lower --max_turns,'
        ' --observation_length or --max_action_tokens')


def make_workdir(config: configs.TrainConfig) -> pathlib.Path:
  """Returns the run's folder, refusing one that is another run's.

  Whose it is `check_config` writes down, once all else is in order.

  Raises:
    ValueError: if there is a run in it and --resume is not given, or if that
      run is of another config; the message says where they differ.
  """
  if config.workdir is None:
    name = f'{config.env}-{config.algorithm}-{time.strftime("%Y%m%d-%H%M%S")}'
    workdir = pathlib.Path('runs') / name
  else:
    workdir = pathlib.Path(config.workdir)
  config_file = workdir / 'checkpoints' / 'config.json'
  has_run = checkpoint.latest_step(workdir / 'checkpoints') is not None
  if has_run and not config_file.exists():
    raise ValueError(
        f'{workdir} has checkpoints but no {config_file.name} to tell what run'
        ' they are of; put it back, or take another --workdir'
    )
  # Of a run that did not come to its first checkpoint, and is not gone on with.
  if not has_run and not config.resume and config_file.exists():
    shutil.rmtree(workdir / warm_start.FOLDER, ignore_errors=True)
    config_file.unlink()
  if has_run and not config.resume:
    raise ValueError(
        f'{workdir} holds a run already; pass --resume to go on with it, or'
        ' another --workdir'
    )
  check_config(config, workdir, claim=False)
  return workdir


def check_config(
    config: configs.TrainConfig, workdir: pathlib.Path, claim: bool = True
) -> None:
  """Refuses a workdir of another config, or else claims it for this one."""
  values = config_flags.to_dict(config)
  checkpoint.check_config(
      workdir / 'checkpoints', values, configs.MAY_CHANGE, claim)


def budget_spent(config: configs.TrainConfig, state) -> float:
  """Returns the share of the budget that is spent, of the scarcest kind."""
  spent = (
      (int(state.update), config.max_updates),
      (int(state.environment_steps), config.budget_steps),
      (int(state.generated_tokens), config.budget_tokens),
  )
  return max(done / limit for done, limit in spent if limit is not None)


def next_tasks(run: Run) -> tuple[list[Any], int]:
  """Returns the tasks of the next update, and how many were seen after it.

  Every task comes once, then every task again, in an order that the seed gives:
  nothing but a number has to be kept. A task whose game is broken is passed
  over, and the one after it takes its place.

  Raises:
    ValueError: if no task can be played.
  """
  size, seen = len(run.train_tasks), int(run.state.tasks_seen)
  chosen = []
  for place in range(seen, seen + 2 * size + run.config.tasks_per_update):
    epoch, offset = divmod(place, size)
    index = int(_order(run.config.seed, epoch, size)[offset])
    task = run.agent.playable(run.train_tasks, index)
    chosen += [] if task is None else [task]
    if len(chosen) == run.config.tasks_per_update:
      return chosen, place + 1
  raise ValueError(
      f'only {len(chosen)} tasks of the split {run.config.train_split!r} can be'
      f' played; the others are broken, such as {min(run.agent.faults)}'
  )


@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, size: int) -> np.ndarray:
  return np.random.default_rng([seed, epoch]).permutation(size)


def tree_metrics(tree: trees.Tree) -> dict[str, float]:
  """Returns what a batch of trees tells about the policy that grew it.

  Success and return are those of the first trajectories alone: forks start
  where the policy was in doubt, so they are no fair sample.
  """
  tree = jax.tree.map(np.asarray, tree.replace(allowed=None))
  totals = np.asarray(returns.path_returns(tree))
  leaf = np.asarray(trees.is_leaf(tree))
  first = leaf & (tree.birth == 0)
  values = {
      'success': float((totals[first] > 0.5).mean()),
      'return': float(totals[first].mean()),
      'tree/leaves': float(leaf.sum(axis=1).mean()),
      'tree/nodes': float(tree.node_mask.sum(axis=1).mean()),
      'policy/first_token_entropy': float(
          needs_lib.first_token_entropies(tree).mean()),
  }
  forks = leaf & ~first
  if forks.any():
    values['tree/fork_success'] = float((totals[forks] > 0.5).mean())
  return values


class Clock:
  """Where the seconds of an update go."""

  def __init__(self):
    self.restart()

  def restart(self) -> None:
    """Forgets the laps so far."""
    self.laps: dict[str, float] = {}
    self._start = self._last = time.perf_counter()

  def lap(self, name: str) -> None:
    """Puts the time since the last lap down to `name`."""
    now = time.perf_counter()
    self.laps[name] = now - self._last
    self._last = now

  def total(self) -> float:
    """Returns the seconds since the start."""
    return time.perf_counter() - self._start


def train(run: Run) -> Iterator[tuple[int, dict[str, float]]]:
  """Yields the number and the metrics of each update until the budget is spent.

  `run.state` moves on. A checkpoint is written every `save_every` updates, when
  the metrics have been dealt with: a run that goes on from a checkpoint writes
  later metrics again, but cannot make up for earlier ones.

  Raises:
    FloatingPointError: if a gradient is not finite. Nothing is lost but the
      updates since the last checkpoint.
  """
  config, agent, method = run.config, run.agent, run.method
  loss = learner.make_policy_loss(method.loss, method.objective)
  update_fn = learner.make_update_fn(
      assembly.learning_model(config, agent),
      assembly.make_optimizer(config), loss, config.temperature)
  reference = run.reference if method.loss.kl_coef else None
  mesh = agent.model.mesh
  num_shards = sharding.num_row_parts(mesh)
  credit_fn = jax.jit(method.credit)
  codec, clock = agent.batched.codec, Clock()
  clock.lap('time/saving')  # Later, that of the update before.
  while budget_spent(config, run.state) < 1.0:
    environment_seconds = agent.batched.seconds
    cut, collisions = codec.truncated_observations, codec.command_collisions
    number = int(run.state.update) + 1
    tasks, tasks_seen = next_tasks(run)
    grown = grow(run, tasks)
    clock.lap('time/sampling')
    clock.laps['time/environment'] = agent.batched.seconds - environment_seconds
    given = run.needs.give(run.state, grown.tree, tasks)
    clock.lap('time/needs')
    batches = learner.make_batches(
        given.tree, credit_fn(needs_lib.bare(given.tree), **given.arrays),
        config.max_tokens, layout=loss.layout, row_length=config.row_length,
        num_shards=num_shards,
        value_targets=given.value_targets,
        old_values=given.arrays.get('values'), debug=config.debug)
    clock.lap('time/packing')
    state, rate = given.state, config.learning_rate * learner.warmup_cosine(
        budget_spent(config, run.state), config.warmup
    )
    for _ in range(config.epochs):
      state, values = update_fn(state, batches, rate, reference)
    refuse_infinite(run, number, values)
    clock.lap('time/learning')
    skipped = tasks_seen - int(state.tasks_seen) - len(tasks)
    run.state = sharding.place(
        mesh, count_up(run, state, grown, tasks_seen))
    yield number, {
        **update_metrics(run, grown, given, batches),
        **values,
        'learning_rate': rate,
        'skipped_tasks': skipped,
        'codec/truncated_observations': codec.truncated_observations - cut,
        'codec/command_collisions': codec.command_collisions - collisions,
        **clock.laps,
        'time/update': clock.total(),
    }
    clock.restart()
    if number % config.save_every == 0 or budget_spent(config, run.state) >= 1:
      save(run)
    clock.lap('time/saving')


def update_metrics(
    run: Run, grown: rollout.Rollout, given: needs_lib.Given,
    batches: Sequence[packing.PackedRows]
) -> dict[str, float]:
  """Returns what the trees of an update and their rows tell, by name."""
  return {
      **tree_metrics(grown.tree),
      **given.metrics,
      'steps': grown.compute.environment_steps,
      'tokens': grown.compute.generated_tokens,
      'total/steps': int(run.state.environment_steps),
      'total/tokens': int(run.state.generated_tokens),
      'tree/unspent_forks': grown.unspent,
      'rows/sampled_share': grown.utilisation,
      'rows/sharing': packing.sharing_ratio(needs_lib.bare(given.tree)),
      **packing.metrics(batches),
      'branch_threshold': float(run.state.branch_threshold),
      'errors': sum(n for status, n in grown.statuses.items() if status > 1),
  }


def grow(run: Run, tasks: Sequence[Any]) -> rollout.Rollout:
  """Returns the trees of an update, branched as often as the method says."""
  state, method = run.state, run.method
  update_key = jax.random.fold_in(state.rng_key, state.update)
  stages = [
      functools.partial(run.needs.plan, state, jax.random.fold_in(
          update_key, _PLAN - stage))
      for stage in range(method.num_stages)
  ]
  return run.agent.grower.grow(
      state.params, tasks, update_key, method.num_backbones, stages)


def refuse_infinite(
    run: Run, number: int, values: Mapping[str, float]) -> None:
  """Raises FloatingPointError if the step of an update is not finite."""
  # The step as well: too high a rate makes a good gradient a bad step.
  if not np.isfinite(values['gradient/norm'] + values['parameters/norm']):
    raise FloatingPointError(
        f'the step of update {number} is not finite. The last checkpoint'
        f' in {run.workdir}, if one was due before, is whole; start another'
        ' run with a lower --learning_rate.'
    )


def count_up(
    run: Run, state: learner.TrainState, grown: rollout.Rollout, tasks_seen: int
) -> learner.TrainState:
  """Returns the state with an update's tasks, cost and trees counted in."""
  config = run.config
  quantile = np.quantile(
      needs_lib.first_token_entropies(grown.tree), config.entropy_quantile
  )
  is_first = state.tasks_seen == 0
  keep = jnp.where(is_first, 0.0, _THRESHOLD_DECAY)
  return state._replace(
      statistics=run.needs.observe(state.statistics, grown.tree),
      # Epochs step the optimiser several times; an update is one batch of data.
      update=state.update - config.epochs + 1,
      tasks_seen=jnp.asarray(tasks_seen, jnp.int32),
      environment_steps=state.environment_steps
      + grown.compute.environment_steps,
      generated_tokens=state.generated_tokens + grown.compute.generated_tokens,
      branch_threshold=(
          keep * state.branch_threshold + (1 - keep) * quantile
      ).astype(jnp.float32),
  )


def save(run: Run) -> None:
  """Writes a checkpoint; a full disk costs the checkpoint, not the run."""
  try:
    checkpoint.save(
        run.workdir / 'checkpoints',
        int(run.state.update),
        assembly.saved(run.state),
        {
            'config': config_flags.to_dict(run.config),
            'vocabulary': run.agent.tokenizer.to_dict(),
            **run.origin,
        },
    )
  except OSError as error:
    logging.error('%s The run goes on; older checkpoints are whole.', error)


def score(run: Run, label: str) -> scoring.Score:
  """Plays the evaluation split with the policy as it is."""
  return scoring.evaluate(
      run.agent.grower,
      run.state.params,
      run.eval_tasks,
      run.eval_types,
      # Not a key of training: updates are folded in from 0 up.
      jax.random.fold_in(run.state.rng_key, _EVALUATION),
      run.config.eval_passes,
      progress=scoring.report(label),
  )


def make_writers(run: Run) -> list[metrics.Writer]:
  """Returns where metrics go, each continuing after the restored update."""
  last = int(run.state.update)
  writers = [metrics.CsvWriter(run.workdir / 'metrics.csv', last)]
  if run.config.tensorboard:
    try:
      folder = run.workdir / 'tensorboard'
      writers.append(metrics.TensorBoardWriter(folder, last))
    except ImportError as error:
      logging.warning('%s', error)
  return writers


def write_metrics(
    writers: Sequence[metrics.Writer], update: int, values: dict[str, float]
) -> None:
  """Writes the metrics of an update; a full disk costs them, not the run."""
  for writer in writers:
    try:
      writer.write(update, values)
    except OSError as error:
      logging.error('Metrics of update %d are not written: %s', update, error)


def run_training(run: Run) -> dict[str, Any]:
  """Trains and scores; returns what result.json holds."""
  config = run.config
  writers = make_writers(run)
  start = time.perf_counter()
  before = first_score(run)
  print(f'warm start on {config.eval_split}: {before}', flush=True)
  line = metrics.ProgressLine(1, int(run.state.update))
  for update, values in train(run):
    spent = budget_spent(config, run.state)
    line.num_updates = max(update, round(update / min(spent, 1.0)))
    line.write(
        update, values['success'], values['return'], values['tokens'],
        values['steps'],
    )
    if config.eval_every and update % config.eval_every == 0 and spent < 1:
      values['eval/success'] = score(run, f'update {update}').success
    write_metrics(writers, update, values)
  line.close()
  after = score(run, 'last update')
  for writer in writers:
    with contextlib.suppress(OSError):  # It was told with the last update.
      writer.close()
  print(f'trained on {config.eval_split}: {after}\n')
  print(scoring.comparison({'warm start': before, config.algorithm: after}))
  result = {
      'config': config_flags.to_dict(config),
      'updates': int(run.state.update),
      'steps': int(run.state.environment_steps),
      'tokens': int(run.state.generated_tokens),
      'seconds': time.perf_counter() - start,
      'before': scoring.to_dict(before),
      'after': scoring.to_dict(after),
  }
  try:
    text = json.dumps(result, indent=2) + '\n'
    (run.workdir / 'result.json').write_text(text)
  except OSError as error:
    logging.error('The result is not written: %s', error)
  print(f'\nEverything is in {run.workdir}')
  return result


def first_score(run: Run) -> scoring.Score:
  """Returns the warm-started policy's score, from its key alone."""
  state = run.state
  run.state = state._replace(params=run.reference)
  try:
    return score(run, 'warm start')
  finally:
    run.state = state


def how_to_go_on(run: Run) -> str:
  """Returns what --resume would do now.

  Told by the disk: a step that was stopped may have consumed the state.
  """
  saved = checkpoint.latest_step(run.workdir / 'checkpoints')
  what = 'begin anew' if saved is None else f'go on after update {saved}'
  return f'the same flags with --workdir={run.workdir} --resume {what}'


def main(argv: Sequence[str]) -> None:
  """Trains; what ends a run early is one line, and how to go on."""
  del argv
  assembly.begin_logging()
  config = config_flags.read(configs.TrainConfig)
  assembly.use_compilation_cache(config)
  try:
    run = set_up(config)
  except (ImportError, MemoryError, OSError, ValueError) as error:
    raise flags.IllegalFlagValueError(str(error)) from error
  try:
    run_training(run)
  except (FloatingPointError, MemoryError, OSError, ValueError) as error:
    logging.debug('Where it happened:', exc_info=True)  # With --verbosity=1.
    sys.exit(f'error: {error}')
  except KeyboardInterrupt:
    print(f'\nStopped: {how_to_go_on(run)}.', file=sys.stderr)
    sys.exit(config_flags.INTERRUPTED)
  finally:
    run.agent.close()


if __name__ == '__main__':
  config_flags.define(configs.TrainConfig)
  config_flags.run(main)

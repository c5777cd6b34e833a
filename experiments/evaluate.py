"""Scores the policy of a run on a split, by task type.

Of the whole split there is a 95% interval, over its games.

  python -m experiments.evaluate --workdir=runs/NAME
  python -m experiments.evaluate --workdir=runs/NAME --split=valid_seen \\
      --passes=5 --out=scores.json

Plays every task with the likeliest tokens, and `--passes` times with tokens
drawn from the policy. Equal seeds give equal scores.
"""

from collections.abc import Mapping, Sequence
import json
import pathlib
from typing import Any

from absl import flags
import jax

from bpo_jax import checkpoint
from bpo_jax import memory
from bpo_jax import metrics
from experiments import assembly
from experiments import config_flags
from experiments import configs
from experiments import scoring
from experiments import warm_start

# For want of memory, where there is neither a mesh nor a choice of network.
MORE_MEMORY = ('a machine with more memory, or JAX_PLATFORMS=cpu in the'
               " environment for the host's")

_EVALUATION = 2**31 - 2


def run_config(config: configs.RunConfig) -> configs.TrainConfig:
  """Returns the config that a run was trained with, its files as given now.

  On one device, whatever mesh it was trained on.

  Raises:
    FileNotFoundError: if the workdir holds no run.
    ValueError: if its config is not one of this version.
  """
  values = checkpoint.read_config(pathlib.Path(config.workdir) / 'checkpoints')
  given = {'data': config.data, 'model': config.model, 'mesh': ''}
  values |= {name: path for name, path in given.items() if path is not None}
  return config_flags.from_dict(configs.TrainConfig, values)


@memory.explained_parameters(MORE_MEMORY)
def load_policy(
    config: configs.RunConfig,
    training: configs.TrainConfig,
    agent: assembly.Agent,
) -> tuple[int, dict]:
  """Returns the update and the parameters to score; 0 for the warm start.

  Raises:
    FileNotFoundError: if there is no such checkpoint.
    MemoryError: if the device has too little; it says what to change.
    ValueError: if it is corrupted, or of another model size.
  """
  workdir = pathlib.Path(config.workdir)
  has_update = checkpoint.latest_step(workdir / 'checkpoints') is not None
  if not config.warm_start and not has_update:
    raise FileNotFoundError(
        f'{workdir} has no checkpoint yet; --warm_start takes the policy that'
        ' training began with')
  params = assembly.init_params(training, agent)
  origin = assembly.origin_of(agent, params)
  if has_update:
    assembly.check_origin(workdir, agent, origin, config.step)
  if config.warm_start:
    return 0, warm_start.restore(training, agent, workdir, params, origin)
  target = assembly.init_state(training, agent, params)
  found = assembly.restore(workdir, target, config.step)
  return found.step, found.state.params


def score(
    config: configs.EvaluateConfig, agent: assembly.Agent, params: dict
) -> dict[str, scoring.Score]:
  """Returns the scores by the way of choosing tokens.

  Raises:
    ValueError: if there is no such split, or a game of it is broken.
  """
  tasks = scoring.spread(agent.environment.tasks(config.split), config.tasks)
  types = scoring.task_types(agent.environment, tasks)
  ways = {'greedy': config.greedy != 'no', 'sampled': config.greedy != 'yes'}
  return {
      way: scoring.evaluate(
          agent.grower, params, tasks, types, _evaluation_key(config.seed),
          passes=1 if way == 'greedy' else config.passes,
          greedy=way == 'greedy',
          progress=scoring.report(way),
      )
      for way, is_wanted in ways.items() if is_wanted
  }


def _evaluation_key(seed: int) -> jax.Array:
  """Returns a key that training with the same seed never uses."""
  return jax.random.fold_in(jax.random.key(seed), _EVALUATION)


def table(scores: Mapping[str, scoring.Score]) -> str:
  """Returns success in percent, a row per task type and a column per way."""
  first = next(iter(scores.values()))
  rows = [
      {'task type': kind, 'tasks': count}
      | {f'{way} %': 100 * s.by_type[kind][0] for way, s in scores.items()}
      for kind, (_, count) in first.by_type.items()
  ]
  rows.append(
      {'task type': 'all', 'tasks': first.num_tasks}
      | {f'{way} %': 100 * s.success for way, s in scores.items()}
  )
  return metrics.table(rows, list(rows[0]), '.1f')


def evaluate(config: configs.EvaluateConfig) -> dict[str, Any]:
  """Scores, prints, and returns what --out gets.

  Raises:
    ValueError: if the run, its data or the split is not what it should be.
    OSError: if there is no such run, or --out cannot be written to.
  """
  if config.out is not None:
    metrics.check_writable(config.out)
  training = run_config(config)
  assembly.use_compilation_cache(training)
  agent = assembly.make_agent(training)
  try:
    update, params = load_policy(config, training, agent)
    scores = score(config, agent, params)
  finally:
    agent.close()
  print(table(scores) + '\n')
  for way, result in scores.items():
    print(f'{way}: {result} on {config.split}')
  result = config_flags.to_dict(config) | {
      'update': update,
      'scores': {way: scoring.to_dict(s) for way, s in scores.items()},
  }
  if config.out is not None:
    metrics.write_text(config.out, json.dumps(result, indent=2) + '\n')
  return result


def main(argv: Sequence[str]) -> None:
  """Scores a run; what is wrong with it is one line."""
  del argv
  assembly.begin_logging()
  config = config_flags.read(configs.EvaluateConfig)
  try:
    evaluate(config)
  except (ImportError, MemoryError, OSError, ValueError) as error:
    raise flags.IllegalFlagValueError(str(error)) from error


if __name__ == '__main__':
  config_flags.define(configs.EvaluateConfig)
  config_flags.run(main)

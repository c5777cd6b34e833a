"""Runs of a minute's training squeezed into seconds, and calls of binaries."""

import csv
import dataclasses
from unittest import mock

from absl import flags
import jax
import numpy as np

from bpo_jax import algorithms
from bpo_jax import options
from environments.alfworld import household
from experiments import assembly
from experiments import config_flags
from experiments import configs
from experiments import train

SIZES = dict(
    width=16, num_layers=1, num_heads=2, num_kv_heads=1, mlp_width=16,
    max_turns=6, observation_length=4)
_RUN = dict(
    warm_start_updates=0, tasks_per_update=2, eval_tasks=2, num_branch_points=2,
    save_every=2, updates=4, tensorboard=False, entropy_coef=0.1)
_AGENTS = {}
_make_agent = assembly.make_agent


def config(folder, **overrides) -> configs.TrainConfig:
  """A run in folder/run, its caches in folder/cache."""
  values = {**SIZES, **_RUN, 'workdir': str(folder / 'run'),
            'cache_dir': str(folder / 'cache'), **overrides}
  policy = algorithms.get(values.get('algorithm', 'bpo')).branch_policy
  known = {} if policy is None else options.of(policy)
  if 'num_branch_points' not in known:
    del values['num_branch_points']
    values.setdefault('num_backbones', 3)
  if 'num_rollouts' in known:
    values.setdefault('num_backbones', 3)
    values.setdefault('num_rollouts', 5)
  if values.get('algorithm') == 'spo_tree':  # 216 leaves otherwise.
    values = {'num_backbones': 2, 'group_size': 2, **values}
  return configs.TrainConfig(**values)


def arguments(config_) -> list[str]:
  """The command line of a config."""
  default = type(config_)(workdir='elsewhere')
  return [
      f'--{spec.name}={str(getattr(config_, spec.name)).lower()}'
      if isinstance(getattr(config_, spec.name), bool)
      else f'--{spec.name}={getattr(config_, spec.name)}'
      for spec in dataclasses.fields(config_)
      if getattr(config_, spec.name) != getattr(default, spec.name)]


def share_agents(monkeypatch) -> None:
  """Lets agents of equal config be one, and leaves compiling as it is."""
  names = [spec.name for spec in dataclasses.fields(configs.AgentConfig)]

  def make_agent(config_):
    key = tuple(getattr(config_, name) for name in names)
    if key not in _AGENTS:
      _AGENTS[key] = _make_agent(config_)
    return _AGENTS[key]

  monkeypatch.setattr(assembly, 'make_agent', make_agent)
  monkeypatch.setattr(assembly.Agent, 'close', lambda self: None)
  monkeypatch.setattr(assembly, 'use_compilation_cache', lambda config_: None)


def forget_agents() -> None:
  """For tests that change what an agent has read."""
  _AGENTS.clear()


def call(module, config_class, *argv) -> int:
  """Runs a binary's main on a command line; returns its exit status."""
  flag_values = flags.FlagValues()
  config_flags.define(config_class, flag_values)
  read = config_flags.read
  try:
    config_flags.parse(['binary', *argv], flag_values)
    with mock.patch.object(
        config_flags, 'read', lambda cls: read(cls, flag_values)):
      config_flags._run_main(module.main, ['binary'])
  except SystemExit as status:
    if isinstance(status.code, str):
      raise
    return status.code
  return 0


def finish(run: train.Run, stop: int | None = None) -> None:
  """Trains and writes metrics as the binary does, killed after row `stop`."""
  writers = train.make_writers(run)
  for update, values in train.train(run):
    train.write_metrics(writers, update, values)
    if update == stop:
      return


def metrics(workdir) -> list[dict[str, str]]:
  """The rows of a run's metrics but for what the clock says."""
  with open(f'{workdir}/metrics.csv', newline='', encoding='utf-8') as file:
    return [{name: value for name, value in row.items()
             if not name.startswith('time/')} for row in csv.DictReader(file)]


def bits(state) -> list[bytes]:
  """Every leaf of a state, to the last bit."""
  leaves = jax.tree.leaves(state)
  return [
      np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(
          x.dtype, jax.dtypes.prng_key) else x).tobytes() for x in leaves]


def write_games(folder, **counts) -> list:
  """Writes generated games as ALFWorld's files; returns the training ones."""
  games = household.HouseholdEnvironment(seed=5)
  for split, count in counts.items():
    for number in range(count):
      trial = folder / 'json_2.1.1' / split / f'task-{number}' / 'trial'
      trial.mkdir(parents=True)
      games.save(f'{split}/{number:06d}', trial / 'game.tw-pddl')
  return sorted((folder / 'json_2.1.1' / 'train').glob('*/*/game.tw-pddl'))

"""Where the seconds of a training update go.

  python -m experiments.benchmarks.update_profile
  python -m experiments.benchmarks.update_profile --algorithm=bpo_rb \\
      --env=alfworld --data=DIR --profiled_updates=20 --out=profile.json

Takes the flags of experiments.train. After a few updates that compile what is
needed, it times some more and prints the median second per update of each part:

  network       the policy reading and drawing, in rollouts
  environment   sandboxes, their store, text to tokens and back
  records       nodes of the trees and what forks need
  other         the rest of the rollout: prompts, forks, stacking, branching
  needs         what some algorithms have beside the trees: a critic's values,
                golden trajectories, what earlier updates predict
  packing       credit, and trees to rows
  learning      loss, gradient and optimiser step
  saving        checkpoints
  telling       the update's own metrics and counts

The bars: the network (acting and learning) takes at least half of an update,
the environment at most a third, packing and saving at most a twentieth each.
Exits with 1 if one is missed. `--quick` times 3 updates after 3 others, and has
no warm start.
"""

from collections.abc import Sequence
import dataclasses
import json
import pathlib
import sys
import tempfile

from absl import flags
import jax
import numpy as np

from bpo_jax import metrics
from experiments import assembly
from experiments import config_flags
from experiments import configs
from experiments import train
from experiments.config_fields import field

_PARTS = (
    'network', 'environment', 'records', 'other', 'needs', 'packing',
    'learning', 'saving', 'telling',
)
_MOST = {'environment': 1 / 3, 'packing': 1 / 20, 'saving': 1 / 20}


@dataclasses.dataclass(frozen=True)
class ProfileConfig(configs.TrainConfig):
  """A training run of which some updates are timed."""

  profiled_updates: int = field(20, 'Updates to time.', min=1)
  skipped_updates: int = field(
      10, 'Updates before these, in which programs are compiled.', min=0
  )
  quick: bool = field(
      False, 'Time 3 updates after 3 others, without a warm start.')
  out: str | None = field(
      None, 'JSON file for the figures.', not_blank=True)


def measure(config: ProfileConfig) -> dict[str, float]:
  """Returns the median seconds of each part, and of all, per update."""
  skipped = 3 if config.quick else config.skipped_updates
  wanted = 3 if config.quick else config.profiled_updates
  total = skipped + wanted
  print(f'measuring {wanted} updates, after a warm start and {skipped} others',
        flush=True)
  run = train.set_up(config)
  samples, before = [], dict(run.agent.grower.seconds)
  for number, (_, values) in enumerate(train.train(run), 1):
    print(f'update {number} of {total}: {values["time/update"]:.2f} s',
          flush=True)
    spent = dict(run.agent.grower.seconds)
    if number > skipped:
      samples.append(_parts(values, before, spent))
    before = spent
    if len(samples) == wanted:
      break
  run.agent.close()
  return {
      name: float(np.median([sample[name] for sample in samples]))
      for name in samples[0]
  }


def _parts(values, before, spent) -> dict[str, float]:
  """Returns the seconds of one update by part; the parts add up to it."""
  parts = {
      name: spent[name] - before.get(name, 0.0)
      for name in ('network', 'environment', 'records')
  }
  parts['other'] = values['time/sampling'] - sum(parts.values())
  for name in ('needs', 'packing', 'learning', 'saving'):
    parts[name] = values[f'time/{name}']
  parts['telling'] = values['time/update'] - sum(parts.values())
  return parts | {
      'update': values['time/update'],
      'steps_per_second': values['steps'] / values['time/update'],
  }


def main(argv: Sequence[str]) -> None:
  """Profiles a run that leaves nothing behind, and holds it to the bars."""
  del argv
  config = config_flags.read(ProfileConfig)
  if config.out:
    try:
      metrics.check_writable(config.out)
    except OSError as error:
      raise flags.IllegalFlagValueError(f'out: {error}') from error
  assembly.use_compilation_cache(config)
  with tempfile.TemporaryDirectory() as workdir:
    # A folder of its own and no end in sight: only the timed updates count.
    config = dataclasses.replace(
        config, updates=1_000_000, workdir=str(pathlib.Path(workdir) / 'run')
    )
    if config.quick:
      config = dataclasses.replace(config, warm_start_updates=0)
    figures = measure(config)
  total = figures['update']
  shares = {name: figures[name] / total for name in _PARTS}
  for name in _PARTS:
    print(f'{name}: {figures[name]:.3f} s ({shares[name]:.1%})')
  print(f'update: {total:.3f} s')
  print(f'steps_per_second: {figures["steps_per_second"]:.0f}')
  if config.out:
    facts = {**figures, 'algorithm': config.algorithm, 'env': config.env,
             'seed': config.seed, 'jax': jax.__version__}
    metrics.write_text(config.out, json.dumps(facts, indent=2) + '\n')
  faults = [
      f'{name} takes {shares[name]:.1%}, at most {most:.1%} expected'
      for name, most in _MOST.items() if shares[name] > most
  ]
  compute = shares['network'] + shares['learning']
  if compute < 0.5:
    faults.append(f'the network takes {compute:.1%}, at least 50% expected')
  print('; '.join(faults) or 'ok')
  sys.exit(1 if faults else 0)


if __name__ == '__main__':
  config_flags.define(ProfileConfig)
  config_flags.run(main)

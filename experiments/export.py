"""Writes a run's language model as a directory that transformers loads.

  python -m experiments.export --workdir=runs/NAME --out=DIR
  python -m experiments.export --workdir=runs/NAME --out=DIR --dtype=bfloat16

Adapters are merged into the weights; tokenizer and chat template are those of
the model that the run was trained from.
"""

from collections.abc import Sequence
import pathlib

from absl import flags

from bpo_jax import memory
from bpo_jax.models import directories
from bpo_jax.models import hugging_face
from bpo_jax.models import lora
from experiments import assembly
from experiments import config_flags
from experiments import configs
from experiments import evaluate


@memory.explained_parameters(evaluate.MORE_MEMORY)
def export(config: configs.ExportConfig) -> int:
  """Writes the directory; returns the update whose parameters it has.

  Raises:
    FileNotFoundError: if the workdir holds no run, or no such checkpoint.
    MemoryError: if the device has too little; it says what to change.
    ValueError: if the run is of no language model, a checkpoint is corrupted,
      or the directory is taken.
  """
  try:
    directories.check_writable(config.out)
  except ValueError as error:
    raise ValueError(f'--out: {error}') from error
  training = evaluate.run_config(config)
  if training.model is None:
    raise ValueError(
        f'{config.workdir}: expected a run with --model, got one of a small'
        ' transformer with a vocabulary of its own, which transformers has no'
        ' architecture for')
  agent = assembly.make_agent(training)
  try:
    step, params = evaluate.load_policy(config, training, agent)
  finally:
    agent.close()
  network = agent.model.config
  params = {name: leaf for name, leaf in params.items()
            if name != 'value_head'}
  if network.lora is not None:
    network, params = lora.merge(network, params)
  hugging_face.save(
      config.out, network, params, like=agent.language_model.directory,
      dtype=config.dtype)
  print(f'update {step} of {config.workdir} is in {pathlib.Path(config.out)}')
  return step


def main(argv: Sequence[str]) -> None:
  """Writes a model out; what is wrong with it is one line."""
  del argv
  assembly.begin_logging()
  config = config_flags.read(configs.ExportConfig)
  try:
    export(config)
  except (ImportError, MemoryError, OSError, ValueError) as error:
    raise flags.IllegalFlagValueError(str(error)) from error


if __name__ == '__main__':
  config_flags.define(configs.ExportConfig)
  config_flags.run(main)

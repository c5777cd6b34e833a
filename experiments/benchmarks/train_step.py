"""What share of the machine's matrix products an update reaches.

An update of a network of SmolLM2-135M's size, loss, gradient and step, on
packed trees; the bar is a third of the peak. Peak is the best rate of a large
float32 product on this machine, measured in turns with the update. The update
is credited with the products that it cannot do without: three times those of a
forward pass over the tokens, attention only where a token looks, the vocabulary
only where an action's log-prob is asked for. What is computed again in the
backward pass is not counted, nor is padding.

  python -m experiments.benchmarks.train_step
  python -m experiments.benchmarks.train_step --remat=block --lora_rank=16

With adapters the gradient of the frozen kernels is not asked for, nor counted.
"""

from collections.abc import Callable, Sequence
import dataclasses
import json
import pathlib
import sys
import time

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from bpo_jax import learner
from bpo_jax import tree as trees
from bpo_jax.models import lora
from bpo_jax.models import transformer
from experiments.benchmarks import tree_training

MIN_SHARE = 1 / 3  # Of the measured peak.

_OUT = flags.DEFINE_string(
    'out', None, 'JSON file to write the figures to.', allow_override=True)
_QUICK = flags.DEFINE_bool(
    'quick', False, 'Six layers and few tokens: ends within a minute.',
    allow_override=True)
_REMAT = flags.DEFINE_enum(
    'remat', 'matmuls', ['none', 'matmuls', 'block'],
    'What the backward pass computes again.', allow_override=True)
_LORA_RANK = flags.DEFINE_integer(
    'lora_rank', 0, 'Rank of adapters; 0 trains the weights.', lower_bound=0,
    allow_override=True)
_LENGTH = flags.DEFINE_integer(
    'length', 768, 'Tokens of a path.', lower_bound=64)


def matmul_peak(size: int = 2048, calls: int = 5) -> float:
  """Returns the best rate of [size, size] float32 products, per second."""
  x = jnp.ones((size, size), jnp.float32)
  product = jax.jit(jnp.matmul)
  product(x, x).block_until_ready()
  least = min(_seconds(lambda: product(x, x)) for _ in range(calls))
  return 2 * size**3 / least


def _seconds(call: Callable) -> float:
  start = time.perf_counter()
  jax.block_until_ready(call())
  return time.perf_counter() - start


def measure(config: transformer.TransformerConfig, tree: trees.Tree,
            rounds: int) -> dict[str, float]:
  """Returns the figures; the share is the median of those of the rounds."""
  model = transformer.Transformer(config)
  params = jax.jit(transformer.init_params, static_argnums=0)(
      config, jax.random.key(0))
  optimizer = learner.make_optimizer(learner.OptimizerConfig())
  update = learner.make_update_fn(
      model, optimizer, learner.make_policy_loss(learner.LossConfig()))
  batches = learner.make_batches(
      tree, tree_training.make_credit(tree), 8192, layout='trees')
  state = learner.init_state(params, optimizer, jax.random.key(0))
  state, _ = update(state, batches, 1e-5)
  needed = tree_training.needed_products(config, batches)
  seconds, peaks = [], []
  for _ in range(rounds):
    peaks.append(matmul_peak())
    start = time.perf_counter()
    state, _ = update(state, batches, 1e-5)
    jax.block_until_ready(state.params)
    seconds.append(time.perf_counter() - start)
  tokens = sum(int(rows.token_mask.sum()) for rows in batches)
  return {
      'parameters': transformer.num_parameters(state.params),
      'trained_parameters': transformer.num_parameters(
          lora.split(state.params)[0]),
      'tokens': tokens,
      'action_tokens': sum(int(rows.path_mask.sum()) for rows in batches),
      'padding': sum(rows.tokens.size for rows in batches) / tokens,
      'update_seconds': float(np.median(seconds)),
      'tokens_per_second': tokens / float(np.median(seconds)),
      'needed_gigaflop': needed / 1e9,
      'peak_gigaflop_per_second': max(peaks) / 1e9,
      'share_of_peak': float(np.median([
          needed / s / peak for s, peak in zip(seconds, peaks)])),
  }


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments {argv[1:]}')
  config = dataclasses.replace(tree_training.SMOLLM2, remat=_REMAT.value)
  if _LORA_RANK.value:
    adapters = transformer.LoraConfig(_LORA_RANK.value, 2.0 * _LORA_RANK.value)
    config = dataclasses.replace(config, lora=adapters)
  length, rounds = _LENGTH.value, 3
  if _QUICK.value:
    config = dataclasses.replace(config, num_layers=6)
    length, rounds = min(length, 256), 2
  case = tree_training.Case('smollm2', 2.3, length=length, num_trees=1)
  figures = measure(
      config, tree_training.make_trees(case, config.vocab_size), rounds)
  if _OUT.value:
    text = json.dumps(figures, indent=2) + '\n'
    pathlib.Path(_OUT.value).write_text(text, encoding='utf-8')
  for name, value in figures.items():
    print(f'{name}: {value:.4g}' if isinstance(value, float)
          else f'{name}: {value}')
  short = figures['share_of_peak'] < MIN_SHARE
  print(f'share_of_peak is not {MIN_SHARE:.2f}' if short else 'ok')
  sys.exit(1 if short else 0)


if __name__ == '__main__':
  app.run(main)

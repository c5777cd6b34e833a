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
`--quick` has 6 of the 30 layers, paths of 256 tokens at most and two updates.
"""

from collections.abc import Sequence
import dataclasses
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
from experiments.benchmarks import report
from experiments.benchmarks import workloads

MIN_SHARE = 1 / 3  # Of the measured peak.

flags.adopt_module_key_flags(report)
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
  least = min(report.seconds(lambda: product(x, x)) for _ in range(calls))
  return 2 * size**3 / least


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
      tree, workloads.make_credit(tree), 8192, layout='trees')
  state = learner.init_state(params, optimizer, jax.random.key(0))
  print('measuring: the first update compiles', flush=True)
  state, _ = update(state, batches, 1e-5)
  jax.block_until_ready(state.params)
  needed = workloads.needed_products(config, batches)
  seconds, peaks = [], []
  for number in range(rounds):
    print(f'measuring update {number + 1} of {rounds}', flush=True)
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
  """Measures one network on one tree and holds it to its share."""
  report.begin(argv)
  config = dataclasses.replace(workloads.SMOLLM2, remat=_REMAT.value)
  if _LORA_RANK.value:
    adapters = transformer.LoraConfig(_LORA_RANK.value, 2.0 * _LORA_RANK.value)
    config = dataclasses.replace(config, lora=adapters)
  length, rounds = _LENGTH.value, 3
  if report.QUICK.value:
    config = dataclasses.replace(config, num_layers=6)
    length, rounds = min(length, 256), 2
  case = workloads.Case('smollm2', 2.3, length=length, num_trees=1)
  figures = measure(
      config, workloads.make_trees(case, config.vocab_size), rounds)
  is_short = not figures['share_of_peak'] >= MIN_SHARE
  report.finish(
      figures, [f'share_of_peak is below {MIN_SHARE:.2f}'] if is_short else [])


if __name__ == '__main__':
  app.run(main)

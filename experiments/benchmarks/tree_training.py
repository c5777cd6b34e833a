"""What training each shared token once saves, against path by path.

Loss and gradient of one model over the same trees, twice: packed depth first,
every token once; and a row a path, rows of like length together, as others
train trajectories. The gradients must agree. Calls of both sides take turns.

Sharing is tokens of all paths over tokens of the tree. The bars: the packed
side is faster by at least 90% of the sharing, at width 256 with 4 layers and at
the size of SmolLM2-135M; and where nothing is shared it takes no longer than
1 / 0.95 of the other's time. `products_sharing` says what could be had: shared
tokens come early on a path and so look at few, hence attention shares less than
tokens do, and the more so the longer paths are.

  python -m experiments.benchmarks.tree_training
  python -m experiments.benchmarks.tree_training --quick --out=sharing.json
  python -m experiments.benchmarks.tree_training --sweep --figure=sharing.png

Each side is as fast as it can be: of micro-batches of 8 and of 4 paths' tokens
it takes the faster one, and the paths' attention, dense and causal, the faster
of two ways: the blocks that the trees use, or whole masked products where they
take less than 4 GB. Rows of both sides are rounded up to blocks of 128 tokens.
Memory is what XLA sets aside for the temporaries of one micro-batch, at most.
`--sweep` varies sharing, depth and length at the small size, and `--figure`
draws the ratios. `--quick` has the small size alone, one tree a case and at
most three calls of each side.
"""

from collections.abc import Callable, Sequence
import dataclasses
import gc
import operator
from typing import Any

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
import numpy as np
import optax

from bpo_jax import attention
from bpo_jax import learner
from bpo_jax import metrics
from bpo_jax import packing
from bpo_jax import tree as trees
from bpo_jax.models import transformer
from experiments import figures as figures_lib
from experiments.benchmarks import report
from experiments.benchmarks import workloads

MIN_SHARE = 0.90  # Of the sharing, that the packed side must be faster by.
MIN_UNSHARED = 0.95
_MICRO_BATCHES = (8, 4)  # Tokens of one, in paths, to choose from.
_MOST_MEGABYTES = 4096  # Of a way to compute the paths; beyond it is left out.
MAX_DIFFERENCE = 1e-5  # Between the gradients, relative to their norm.

flags.adopt_module_key_flags(report)
_SWEEP = flags.DEFINE_bool(
    'sweep', False, 'Also vary sharing, depth and length at the small size.')
_FIGURE = flags.DEFINE_string(
    'figure', None, 'PNG to draw the ratios to; needs matplotlib.')
_SIZES = flags.DEFINE_multi_enum(
    'size', list(workloads.SIZES), list(workloads.SIZES),
    'Networks to measure.')
_ROUNDS = flags.DEFINE_integer(
    'rounds', 5, 'Timed calls of each side.', lower_bound=1)

CASES = (
    workloads.Case('small', 2.3, length=512, num_trees=8),
    workloads.Case('small', 2.3, length=1024, num_trees=4),
    workloads.Case('small', 1.0, length=1024, num_trees=8),
    workloads.Case('smollm2', 2.3, length=512, num_trees=1),
    workloads.Case('smollm2', 1.0, length=512, num_trees=2))
SWEEP = (
    *(workloads.Case('small', sharing, num_trees=2)
      for sharing in (1.5, 3.0, 4.0, 6.0, 8.0)),
    *(workloads.Case('small', 2.3, depth=depth, num_trees=2)
      for depth in (1, 4)),
    *(workloads.Case('small', 2.3, length=length, num_trees=1)
      for length in (2048, 4096, 8192)))


@dataclasses.dataclass
class Side:
  """One way to train on the trees.

  Attributes:
    batches: its micro-batches.
    gradient: of all of them.
    megabytes: temporaries of a micro-batch at most.
  """

  batches: list[packing.PackedRows]
  gradient: Callable[[], Any]
  megabytes: float

  @property
  def tokens(self) -> int:
    """Tokens that are none of the padding."""
    return sum(int(rows.token_mask.sum()) for rows in self.batches)

  @property
  def computed(self) -> int:
    """Places of the rows, padding included."""
    return sum(rows.tokens.size for rows in self.batches)


def make_side(
    model: transformer.Transformer, params: dict, tree: trees.Tree,
    layout: str, max_tokens: int, has_table: bool
) -> Side:
  """Returns a side, compiled."""
  row_length = None if layout == 'paths' else max_tokens
  rows = packing.pack(
      tree, workloads.make_credit(tree), row_length, layout=layout)
  # Rounded up as little as the blocks of attention allow, on both sides.
  batches = packing.micro_batches(rows, max_tokens, attention.BLOCK)
  if not has_table:
    batches = [rows._replace(ancestors_blocks=None) for rows in batches]
  loss = learner.make_policy_loss(learner.LossConfig())
  facts = learner.batch_facts(batches)
  gradient_fn = learner.make_gradient_fn(model, loss)

  def add(total, params, rows):
    new, _ = gradient_fn(params, {}, None, rows, facts)
    return jax.tree.map(jnp.add, total, new)

  zeros = jax.jit(lambda: jax.tree.map(jnp.zeros_like, params))
  of_rows = jax.jit(add, donate_argnums=0)
  programs = {}
  for rows in batches:
    shape = jax.tree.map(np.shape, rows)
    if str(shape) not in programs:
      programs[str(shape)] = of_rows.lower(zeros(), params, rows).compile()
  memory = max(p.memory_analysis().temp_size_in_bytes
               for p in programs.values())

  def gradient():
    total = zeros()
    for rows in batches:
      program = programs[str(jax.tree.map(np.shape, rows))]
      total = program(total, params, rows)
    return jax.block_until_ready(total)

  return Side(batches, gradient, memory / 2**20)


def _fastest(sides: Sequence[Side], rounds: int) -> Side:
  """Returns the side whose best call is fastest, of those that fit."""
  fitting = [x for x in sides if x.megabytes < _MOST_MEGABYTES] or [
      min(sides, key=lambda side: side.megabytes)]
  calls = np.array([[report.seconds(side.gradient) for side in fitting]
                    for _ in range(rounds)])
  return fitting[np.argmin(calls.min(axis=0))]


def measure(case: workloads.Case, rounds: int) -> dict[str, float]:
  """Returns the figures of a case; the ratio is the median of the pairs'."""
  config = workloads.SIZES[case.size]
  model = transformer.Transformer(config)
  params = jax.jit(transformer.init_params, static_argnums=0)(
      config, jax.random.key(0))
  tree = workloads.make_trees(case, config.vocab_size)
  make = lambda layout, has_table: [
      make_side(model, params, tree, layout, num * case.length, has_table)
      for num in _MICRO_BATCHES]
  packed = _fastest(make('trees', True), rounds)
  paths = _fastest(make('paths', True) + make('paths', False), rounds)
  left, right = packed.gradient(), paths.gradient()
  apart = optax.global_norm(jax.tree.map(np.subtract, left, right))
  pairs = [[report.seconds(side.gradient) for side in (packed, paths)]
           for _ in range(rounds)]
  sharing = packing.sharing_ratio(tree)
  ratio = float(np.median([theirs / ours for ours, theirs in pairs]))
  packed_products, paths_products = (
      workloads.needed_products(config, side.batches)
      for side in (packed, paths))
  figures = {
      'sharing': sharing,
      'products_sharing': paths_products / packed_products,
      'ratio': ratio,
      'ratio_least': min(theirs / ours for ours, theirs in pairs),
      'share_of_sharing': ratio / sharing,
      'packed_seconds': float(np.median([ours for ours, _ in pairs])),
      'paths_seconds': float(np.median([theirs for _, theirs in pairs])),
      'packed_tokens_per_second': packed.tokens / float(
          np.median([ours for ours, _ in pairs])),
      'packed_padding': packed.computed / packed.tokens,
      'paths_padding': paths.computed / paths.tokens,
      'packed_micro_batches': len(packed.batches),
      'paths_micro_batches': len(paths.batches),
      'packed_megabytes': packed.megabytes,
      'paths_megabytes': paths.megabytes,
      'gradient_difference': float(apart / optax.global_norm(right)),
  }
  return {f'{case.name}/{name}': value for name, value in figures.items()}


def shortfalls(figures: dict[str, float], cases: Sequence[workloads.Case]
               ) -> list[str]:
  """Returns a sentence for each bar that the figures do not reach."""
  short = []
  for case in cases:
    of = lambda name, case=case: figures[f'{case.name}/{name}']
    if case.sharing > 1 and not of('share_of_sharing') >= MIN_SHARE:
      short.append(f'{case.name}: faster by {of("ratio"):.2f}, that is not '
                   f'{MIN_SHARE:.0%} of {of("sharing"):.2f}')
    if case.sharing == 1 and not of('ratio') >= MIN_UNSHARED:
      short.append(f'{case.name}: {of("ratio"):.2f} is not {MIN_UNSHARED}')
    if not of('gradient_difference') < MAX_DIFFERENCE:
      short.append(f'{case.name}: the gradients differ by '
                   f'{of("gradient_difference"):.1e} of their norm')
  return short


def draw(figures: dict[str, float], cases: Sequence[workloads.Case], path: str
         ) -> None:
  """Draws the ratio against the sharing, and its share by depth and length.

  Raises:
    ImportError: without matplotlib.
  """
  canvas = figures_lib.load().Figure(figsize=(12, 3.6), layout='constrained')
  left, *others = canvas.subplots(1, 3)
  of = lambda case, name: figures[f'{case.name}/{name}']
  top = max(of(case, 'sharing') for case in cases)
  left.plot([1, top], [1, top], color='0.6', label='all that is shared')
  for size, length in sorted({(case.size, case.length) for case in cases}):
    some = [case for case in cases
            if (case.size, case.length, case.depth) == (size, length, 2)]
    left.scatter([of(c, 'sharing') for c in some],
                 [of(c, 'ratio') for c in some], label=f'{size}, {length}')
  left.set(xlabel='tokens of all paths / tokens of the tree',
           ylabel='faster than path by path')
  left.legend(title='network, tokens of a path')
  small = [c for c in cases if (c.size, c.sharing) == ('small', 2.3)]
  panels = (
      ('depth', [c for c in small if c.length == 1024],
       'turns of a path, of 1,024 tokens'),
      ('length', [c for c in small if c.depth == 2],
       'tokens of a path, of two turns'))
  for axes, (along, some, label) in zip(others, panels):
    some.sort(key=operator.attrgetter(along))
    axes.plot([getattr(c, along) for c in some],
              [of(c, 'share_of_sharing') for c in some], marker='o')
    axes.axhline(MIN_SHARE, color='0.6')
    axes.set(xlabel=label, ylabel='share of the sharing, 2.3 times',
             ylim=(0, None))
  canvas.savefig(path, dpi=150)


def main(argv: Sequence[str]) -> None:
  """Measures case by case and tells whether each bar is reached."""
  report.begin(argv)
  if _FIGURE.value:
    try:
      metrics.check_writable(_FIGURE.value)
      figures_lib.load()
    except (ImportError, OSError) as error:
      raise app.UsageError(f'--figure: {error}') from error
  cases = CASES + (SWEEP if _SWEEP.value else ())
  cases = tuple(case for case in cases if case.size in _SIZES.value)
  rounds = _ROUNDS.value
  if report.QUICK.value:
    cases = tuple(c._replace(num_trees=1) for c in CASES if c.size == 'small')
    rounds = min(rounds, 3)
  figures = {}
  for case in cases:
    print(f'measuring {case.name}', flush=True)
    found = measure(case, rounds)
    figures |= found
    for name, value in found.items():
      report.tell(name, value)
    report.save(figures)  # The next case may take minutes.
    gc.collect()
  if _FIGURE.value:
    draw(figures, cases, _FIGURE.value)
  report.finish(figures, shortfalls(figures, cases), told=True)


if __name__ == '__main__':
  app.run(main)

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

The paths' attention is dense and causal, by whichever of two ways is faster
here: whole masked products, or the blocks that the trees use. Rows of both
sides are rounded up to blocks of 128 tokens. Memory is what
XLA sets aside for the temporaries of one micro-batch, at most. `--sweep` varies
sharing, depth and length at the small size and draws the ratios.
"""

from collections.abc import Callable, Sequence
import dataclasses
import gc
import importlib
import json
import pathlib
import sys
import time
from typing import Any, NamedTuple

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
import numpy as np
import optax

from bpo_jax import attention
from bpo_jax import learner
from bpo_jax import packing
from bpo_jax import tree as trees
from bpo_jax import types
from bpo_jax.models import transformer

MIN_SHARE = 0.90  # Of the sharing, that the packed side must be faster by.
MIN_UNSHARED = 0.95
MAX_DIFFERENCE = 1e-5  # Between the gradients, relative to their norm.

_OUT = flags.DEFINE_string(
    'out', None, 'JSON file to write the figures to.', allow_override=True)
_QUICK = flags.DEFINE_bool(
    'quick', False, 'The small size and few calls: ends within a minute.',
    allow_override=True)
_SWEEP = flags.DEFINE_bool(
    'sweep', False, 'Also vary sharing, depth and length at the small size.')
_FIGURE = flags.DEFINE_string(
    'figure', None, 'PNG to draw the sweep to; needs matplotlib.')
_SIZES = flags.DEFINE_multi_enum(
    'size', ['small', 'smollm2'], ['small', 'smollm2'], 'Networks to measure.')
_ROUNDS = flags.DEFINE_integer(
    'rounds', 5, 'Timed calls of each side.', lower_bound=1)

SMALL = transformer.TransformerConfig(
    vocab_size=4096, width=256, num_layers=4, num_heads=4, num_kv_heads=2,
    head_dim=64, mlp_width=704)
SMOLLM2 = transformer.TransformerConfig(
    vocab_size=49_152, width=576, num_layers=30, num_heads=9, num_kv_heads=3,
    head_dim=64, mlp_width=1536, rope_theta=100_000.0, norm_epsilon=1e-5,
    scale_embeddings=False)
SIZES = {'small': SMALL, 'smollm2': SMOLLM2}


class Case(NamedTuple):
  """Trees of one shape.

  Attributes:
    size: of the model, by name.
    sharing: tokens of all paths over tokens of the tree, about.
    depth: nodes of a path below the root.
    length: tokens of a path, about.
    num_trees: of an update.
  """

  size: str
  sharing: float
  depth: int = 2
  length: int = 1024
  num_trees: int = 2

  @property
  def name(self) -> str:
    return (f'{self.size}/sharing_{self.sharing:g}/depth_{self.depth}'
            f'/length_{self.length}')


CASES = (
    Case('small', 2.3, length=512, num_trees=8),
    Case('small', 2.3, length=1024, num_trees=4),
    Case('small', 1.0, length=1024, num_trees=8),
    Case('smollm2', 2.3, length=512, num_trees=1),
    Case('smollm2', 1.0, length=512, num_trees=2))
SWEEP = (
    *(Case('small', s, num_trees=2) for s in (1.5, 3.0, 4.0, 6.0, 8.0)),
    *(Case('small', 2.3, depth=d, num_trees=2) for d in (1, 4)),
    *(Case('small', 2.3, length=n, num_trees=1) for n in (2048, 4096, 8192)))


def make_trees(case: Case, vocab_size: int, seed: int = 0) -> trees.Tree:
  """Returns trees with about the sharing of the case.

  A path is a prompt and `depth` turns of one length, half action and half
  observation; every turn has `b` siblings. With n = b^depth leaves and m the
  mean number of nodes of a level, a prompt that is a share x of the path makes
  the sharing n / (x + (1 - x) m): the least b that can have it is taken.
  """
  rng = np.random.default_rng(seed)
  num_siblings, prompt = _shape(case)
  turn = (1 - prompt) / case.depth
  # Ragged, as episodes are.
  draw = lambda share: rng.integers(1, vocab_size, max(2, int(
      share * case.length * rng.uniform(0.8, 1.2))))
  builders = []
  for _ in range(case.num_trees):
    builder = trees.TreeBuilder()
    level = [builder.add(types.NO_PARENT, draw(prompt))]
    for _ in range(case.depth):
      level = [_add(builder, node, draw(turn))
               for node in level for _ in range(num_siblings)]
    builders.append(builder)
  return trees.stack(builders)


def _shape(case: Case) -> tuple[int, float]:
  """Returns the siblings of a turn, and the prompt's share of a path."""
  if case.sharing == 1:
    return 1, 1 / (case.depth + 1)
  for num_siblings in range(2, 1000):
    sizes = [num_siblings ** (level + 1) for level in range(case.depth)]
    mean = sum(sizes) / case.depth
    prompt = (mean - sizes[-1] / case.sharing) / (mean - 1)
    if sizes[-1] / mean <= case.sharing <= 0.7 * sizes[-1]:
      return num_siblings, prompt
  raise ValueError(f'sharing = {case.sharing}: no tree has it at depth ='
                   f' {case.depth}')


def _add(builder, parent, tokens):
  is_action = np.arange(len(tokens)) < len(tokens) // 2
  return builder.add(
      parent, tokens, action_mask=is_action,
      behaviour_log_probs=np.where(is_action, -1.0, 0.0))


def make_credit(tree: trees.Tree, seed: int = 0) -> types.Credit:
  """Returns random advantages under which every action token counts."""
  rng = np.random.default_rng(seed)
  noise = rng.normal(size=tree.tokens.shape).astype(np.float32)
  return types.Credit(
      advantages=np.where(tree.action_mask, noise, 0),
      weights=np.asarray(tree.action_mask, np.float32))


def needed_products(
    config: transformer.TransformerConfig,
    batches: Sequence[packing.PackedRows],
) -> float:
  """Returns the multiplications and additions that no update can avoid.

  Args:
    config: of the network.
    batches: micro-batches of the update.
  """
  c = config
  heads = c.num_heads * c.head_dim
  kernels = c.num_layers * c.width * (
      2 * heads + 2 * c.num_kv_heads * c.head_dim + 3 * c.mlp_width)
  total = 0.0
  for rows in batches:
    tokens, actions = rows.token_mask.sum(), rows.path_mask.sum()
    seen = rows.positions[rows.token_mask].sum(dtype=float) + tokens
    attention = 2 * c.num_layers * heads * seen  # Scores, and their sums.
    head = c.vocab_size * c.width * actions
    # Forward, by what comes in, and by the weights; frozen ones have no third.
    times = 2 if c.lora is not None else 3
    total += 2 * (times * (kernels * tokens + head) + 3 * attention)
  return total


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
    return sum(int(rows.token_mask.sum()) for rows in self.batches)

  @property
  def computed(self) -> int:
    return sum(rows.tokens.size for rows in self.batches)


def make_side(
    model: transformer.Transformer, params: dict, tree: trees.Tree,
    layout: str, max_tokens: int, has_table: bool = True
) -> Side:
  """Returns a side, compiled."""
  row_length = None if layout == 'paths' else max_tokens
  rows = packing.pack(tree, make_credit(tree), row_length, layout=layout)
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


def _seconds(call: Callable) -> float:
  start = time.perf_counter()
  call()
  return time.perf_counter() - start


def measure(case: Case, rounds: int) -> dict[str, float]:
  """Returns the figures of a case; the ratio is the median of the pairs'."""
  config = SIZES[case.size]
  model = transformer.Transformer(config)
  params = jax.jit(transformer.init_params, static_argnums=0)(
      config, jax.random.key(0))
  tree = make_trees(case, config.vocab_size)
  sizes = dict(max_tokens=8 * case.length)
  packed = make_side(model, params, tree, 'trees', **sizes)
  ways = [make_side(model, params, tree, 'paths', **sizes, has_table=has)
          for has in (False, True)]
  left, right = [side.gradient() for side in (packed, *ways)][:2]
  apart = optax.global_norm(jax.tree.map(np.subtract, left, right))
  paths = min(ways, key=lambda side: _seconds(side.gradient))
  pairs = [(_seconds(packed.gradient), _seconds(paths.gradient))
           for _ in range(rounds)]
  sharing = packing.sharing_ratio(tree)
  ratio = float(np.median([theirs / ours for ours, theirs in pairs]))
  packed_products, paths_products = (
      needed_products(config, side.batches) for side in (packed, paths))
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
      'packed_megabytes': packed.megabytes,
      'paths_megabytes': paths.megabytes,
      'gradient_difference': float(apart / optax.global_norm(right)),
  }
  return {f'{case.name}/{name}': value for name, value in figures.items()}


def shortfalls(figures: dict[str, float], cases: Sequence[Case]) -> list[str]:
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


def draw(figures: dict[str, float], cases: Sequence[Case], path: str) -> None:
  """Draws the ratio against the sharing, and against the length.

  Raises:
    ImportError: without matplotlib.
  """
  figures_lib = importlib.import_module('matplotlib.figure')
  canvas = figures_lib.Figure(figsize=(9, 3.6), layout='constrained')
  left, right = canvas.subplots(1, 2)
  of = lambda case, name: figures[f'{case.name}/{name}']
  top = max(of(case, 'sharing') for case in cases)
  left.plot([1, top], [1, top], color='0.6', label='all that is shared')
  for size in sorted({case.size for case in cases}):
    some = [case for case in cases if case.size == size]
    left.scatter([of(c, 'sharing') for c in some],
                 [of(c, 'ratio') for c in some], label=size)
  left.set(xlabel='tokens of all paths / tokens of the tree',
           ylabel='faster than path by path')
  left.legend()
  lengths = sorted(
      {case for case in cases if case.size == 'small' and case.depth == 2
       and case.sharing == 2.3}, key=lambda case: case.length)
  right.plot([c.length for c in lengths],
             [of(c, 'share_of_sharing') for c in lengths], marker='o')
  right.axhline(MIN_SHARE, color='0.6')
  right.set(xlabel='tokens of a path', ylabel='share of the sharing',
            ylim=(0, None))
  canvas.savefig(path, dpi=150)


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments {argv[1:]}')
  cases = CASES + (SWEEP if _SWEEP.value else ())
  cases = tuple(case for case in cases if case.size in _SIZES.value)
  rounds = _ROUNDS.value
  if _QUICK.value:
    cases = tuple(c._replace(num_trees=1) for c in CASES if c.size == 'small')
    rounds = min(rounds, 3)
  figures = {}
  for case in cases:
    print(f'measuring {case.name}', flush=True)
    found = measure(case, rounds)
    figures |= found
    for name, value in found.items():  # At once: the next may take minutes.
      print(f'{name}: {value:.3g}', flush=True)
    gc.collect()
  if _OUT.value:
    text = json.dumps(figures, indent=2) + '\n'
    pathlib.Path(_OUT.value).write_text(text, encoding='utf-8')
  if _FIGURE.value:
    draw(figures, cases, _FIGURE.value)
  short = shortfalls(figures, cases)
  print('\n'.join(short) or 'ok')
  sys.exit(1 if short else 0)


if __name__ == '__main__':
  app.run(main)

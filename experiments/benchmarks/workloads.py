"""Networks and trees that several benchmarks measure, and the work in them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bpo_jax import packing
from bpo_jax import tree as trees
from bpo_jax import types
from bpo_jax.models import transformer

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
    """What the figures of the case begin with."""
    return (f'{self.size}/sharing_{self.sharing:g}/depth_{self.depth}'
            f'/length_{self.length}')


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
  """Adds a node whose first half is an action, the rest observation."""
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

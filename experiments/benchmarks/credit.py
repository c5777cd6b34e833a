"""How fast 65,536 leaves in trees of 16 are given credit, on one core.

The bar: 20 milliseconds for each of grpo, rloo and bpo, jitted, the median of
repeated calls. For grpo and rloo a tree is 16 paths from the prompt; for bpo a
backbone with five branch points of four siblings each. Trees are padded as a
rollout pads them, and credit goes to every token of every node.

  python -m experiments.benchmarks.credit
  python -m experiments.benchmarks.credit --quick --out=credit.json

The advantage functions of verl and tunix are given the same rewards where they
are installed: calls of both sides take turns, must agree on the numbers, and
the ratio is that of the medians, theirs to ours. (trl has no such function: it
forms advantages inside its trainer.) The process is bound to one core, and its
seconds are processor time, so that others on the machine count less; a second
thread would count in full. `--quick` makes 15 calls of ours, not 50, and 2 in
turn with each peer, not 5.
"""

from collections.abc import Callable, Sequence
import functools
import importlib
import os
import time
from typing import NamedTuple

from absl import app
from absl import flags
import jax
import numpy as np

from bpo_jax import advantages
from bpo_jax import tree as trees
from bpo_jax import types
from experiments.benchmarks import report

MAX_MILLISECONDS = 20.0
MAX_DIFFERENCE = 1e-4  # Between our advantages and a peer's.
NUM_TREES = 4096
NUM_LEAVES = 16

flags.adopt_module_key_flags(report)
_NUM_TOKENS = flags.DEFINE_integer(
    'num_tokens', 8, 'Action tokens of every node.', lower_bound=1)


class Peer(NamedTuple):
  """An advantage function of another library.

  Attributes:
    name: library and function.
    estimator: ours that it is held against.
    function: of rewards [leaves] float32; gives [leaves] or [leaves, T].
  """

  name: str
  estimator: str
  function: Callable[[np.ndarray], np.ndarray]


def use_one_core() -> None:
  """Binds this process to one core; before JAX computes anything."""
  if hasattr(os, 'sched_setaffinity'):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
  report.use_one_thread()


def star(num_tokens: int) -> trees.TreeBuilder:
  """Returns a tree of 16 paths that part at the prompt."""
  builder = trees.TreeBuilder()
  root = builder.add(types.NO_PARENT, [1] * num_tokens)
  for _ in range(NUM_LEAVES):
    _add(builder, root, num_tokens, terminal=True)
  return builder


def backbone(num_tokens: int, num_points: int = 5, num_siblings: int = 4
             ) -> trees.TreeBuilder:
  """Returns a backbone that is forked at `num_points` of its decisions."""
  builder = trees.TreeBuilder()
  above = builder.add(types.NO_PARENT, [1] * num_tokens)
  path = []
  for point in range(num_points + 1):
    above = _add(builder, above, num_tokens, terminal=point == num_points)
    path.append(above)
  for node in path[:num_points]:
    for _ in range(num_siblings - 1):
      _add(builder, node, num_tokens, terminal=True, birth=1)
  return builder


def _add(builder, parent, num_tokens, **fields):
  """Adds a node of which every token is an action."""
  return builder.add(
      parent, [2] * num_tokens, action_mask=[True] * num_tokens,
      behaviour_log_probs=[-1.0] * num_tokens, **fields)


def make_batch(builder: trees.TreeBuilder, num_trees: int, seed: int = 0
               ) -> trees.Tree:
  """Returns trees of one shape, with rewards of 0 and 1 at their leaves.

  Tasks differ in how often they are solved; of some, all leaves have one
  reward.
  """
  rng = np.random.default_rng(seed)
  one = trees.stack([builder])
  batch = jax.tree.map(lambda x: np.repeat(x, num_trees, axis=0), one)
  chance = rng.beta(0.5, 0.5, (num_trees, 1))
  solved = rng.random(batch.rewards.shape) < chance
  return batch.replace(
      rewards=np.where(batch.terminal, solved, 0).astype(np.float32))


def find_peers(num_tokens: int) -> tuple[list[Peer], list[str]]:
  """Returns the peers that can be imported, and a sentence for each other."""
  found, missing = [], []
  for name, make in (('verl', _verl), ('tunix', _tunix)):
    try:
      found += make(num_tokens)
    except ImportError as error:
      missing.append(f'{name}: not compared, {error}')
  return found, missing


def _verl(num_tokens):
  """Returns verl's functions, which loop over rows, and its vectorised ones."""
  torch = importlib.import_module('torch')
  algos = importlib.import_module('verl.trainer.ppo.core_algos')
  torch.set_num_threads(1)

  def function(compute, rewards):
    at_tokens = torch.zeros(len(rewards), num_tokens)
    at_tokens[:, -1] = torch.from_numpy(rewards)
    mask = torch.ones(len(rewards), num_tokens)
    index = np.repeat(np.arange(len(rewards) // NUM_LEAVES), NUM_LEAVES)
    return lambda: compute(at_tokens, mask, index)[0].numpy()

  names = {'': '_outcome_advantage', '_vectorized':
           '_vectorized_outcome_advantage'}
  return [
      Peer(f'verl_{estimator}{kind}', estimator, functools.partial(
          function, getattr(algos, f'compute_{estimator}{ending}')))
      for kind, ending in names.items() for estimator in ('grpo', 'rloo')]


def _tunix(num_tokens):
  """Returns tunix's functions; they give one number a row, not one a token."""
  del num_tokens
  algos = importlib.import_module('tunix.rl.algo_core')
  grpo = lambda rewards: lambda: algos.compute_advantages(rewards, NUM_LEAVES)
  rloo = lambda rewards: functools.partial(
      _numpy_of, jax.jit(algos.compute_rloo_advantages, static_argnums=1),
      jax.device_put(rewards), NUM_LEAVES)
  return [Peer('tunix_grpo', 'grpo', grpo), Peer('tunix_rloo', 'rloo', rloo)]


def _numpy_of(function, *args):
  """Waits for what a function gives, as `jax.block_until_ready` would."""
  return np.asarray(function(*args))


def _clock(call: Callable) -> float:
  """Returns the milliseconds of processor time that a call takes."""
  start = time.process_time()
  jax.block_until_ready(call())
  return 1e3 * (time.process_time() - start)


def take_turns(calls: Sequence[Callable], num_rounds: int) -> list[list[float]]:
  """Returns the milliseconds of every call of each, first calls left out."""
  for call in calls:
    jax.block_until_ready(call())
  rounds = [[_clock(call) for call in calls] for _ in range(num_rounds)]
  return [list(column) for column in zip(*rounds)]


def difference(credit: types.Credit, tree: trees.Tree, theirs: np.ndarray
               ) -> float:
  """Returns the largest difference between our advantages and a peer's."""
  ours = np.asarray(credit.advantages)[tree.terminal]  # [leaves, T]
  theirs = np.reshape(theirs, (len(ours), -1))
  return float(np.abs(ours[:, :theirs.shape[1]] - theirs).max())


def measure(num_tokens: int, num_trees: int = NUM_TREES, num_calls: int = 50,
            num_rounds: int = 5) -> tuple[dict[str, float], list[str]]:
  """Returns the figures and a sentence for every peer that is absent.

  Args:
    num_tokens: T.
    num_trees: B.
    num_calls: timed calls of each of our estimators alone.
    num_rounds: timed calls of each in turn with a peer.
  """
  figures = dict(num_leaves=num_trees * NUM_LEAVES, num_tokens=num_tokens)
  batches = {name: make_batch(make(num_tokens), num_trees) for name, make in (
      ('grpo', star), ('rloo', star), ('bpo', backbone))}
  calls = {name: functools.partial(
      jax.jit(getattr(advantages, name)), jax.device_put(batch))
           for name, batch in batches.items()}
  print('measuring our estimators', flush=True)
  for name, spent in zip(calls, take_turns(list(calls.values()), num_calls)):
    figures[f'{name}_milliseconds'] = float(np.median(spent))
    figures[f'{name}_least_milliseconds'] = min(spent)
  peers, missing = find_peers(num_tokens)
  for peer in peers:
    print(f'measuring {peer.name}', flush=True)
    tree, ours = batches[peer.estimator], calls[peer.estimator]
    theirs = peer.function(tree.rewards[tree.terminal])
    spent = take_turns([ours, theirs], num_rounds)
    figures[f'{peer.name}_milliseconds'] = float(np.median(spent[1]))
    figures[f'{peer.name}_ratio'] = float(
        np.median(spent[1]) / np.median(spent[0]))
    figures[f'{peer.name}_difference'] = difference(ours(), tree, theirs())
  return figures, missing


def shortfalls(figures: dict[str, float]) -> list[str]:
  """Returns a sentence for each bar that the figures do not reach."""
  late = [f'{name}_milliseconds is not below {MAX_MILLISECONDS}'
          for name in ('grpo', 'rloo', 'bpo')
          if not figures[f'{name}_milliseconds'] < MAX_MILLISECONDS]
  apart = [f'{name} is not below {MAX_DIFFERENCE}'
           for name, value in figures.items()
           if name.endswith('_difference') and not value < MAX_DIFFERENCE]
  return late + apart


def main(argv: Sequence[str]) -> None:
  """Measures on one core, peers after our own estimators."""
  report.begin(argv)
  use_one_core()
  sizes = dict(num_calls=15, num_rounds=2) if report.QUICK.value else {}
  figures, missing = measure(_NUM_TOKENS.value, **sizes)
  for sentence in missing:
    print(sentence)
  report.finish(figures, shortfalls(figures))


if __name__ == '__main__':
  app.run(main)

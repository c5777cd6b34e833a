"""Trees forked at random decisions of enumerable tasks, and their reports."""

import jax
import numpy as np

from bpo_jax import types
from bpo_jax import variance
from experiments import enumerable

HORIZON = 12  # Of the tasks that have a name.
report = jax.jit(variance.report, static_argnames=(
    'num_depths', 'depth_width', 'num_quantiles', 'finished', 'confidence'))


def by_step(tree, **kwargs):
  return jax.device_get(
      report(tree, num_depths=HORIZON, depth_width=1, **kwargs))


def forked(task, rng, num_trees, num_backbones=4, chance=0.1, forks=1):
  """Returns trees forked at each decision with the same chance."""
  forest = enumerable.backbones(task, rng, num_trees, num_backbones)
  nodes = forest.tree.action_mask[..., 0] & (forest.tree.parents > 0)
  coin = nodes & (rng.random(nodes.shape) < chance)
  order = np.argsort(~coin, axis=1, kind='stable')
  order = order[:, :max(coin.sum(1).max(), 1)]
  used = np.take_along_axis(coin, order, axis=1)
  plan = types.BranchPlan(
      node=np.where(used, order, -1), offset=np.zeros_like(order),
      count=np.where(used, forks, 0))
  # Few shapes: compiling takes longer than all the rest.
  return enumerable.pad(enumerable.fork(forest, plan, rng), 128)

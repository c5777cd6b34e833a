"""How well a policy does on a split: success, interval, and by task type."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

from absl import logging
import jax
import numpy as np

from bpo_jax import metrics
from bpo_jax import rollout
from bpo_jax import tree as trees

_BATCH = 128  # Episodes at a time; bounds the memory of an evaluation.


@dataclasses.dataclass(frozen=True)
class Score:
  """Success of one policy on one set of tasks.

  Attributes:
    success: share of episodes won.
    interval: 95% confidence interval of it, over tasks (passes of one task are
      no independent draws).
    num_tasks: tasks played.
    passes: episodes of each.
    turns: mean actions of an episode.
    by_type: success and number of tasks of each task type.
    returns: mean return of each task over its passes, in task order; for
      paired comparisons.
  """

  success: float
  interval: tuple[float, float]
  num_tasks: int
  passes: int
  turns: float
  by_type: Mapping[str, tuple[float, int]]
  returns: np.ndarray

  def __str__(self) -> str:
    low, high = self.interval
    return (
        f'{100 * self.success:.1f}% [{100 * low:.1f}, {100 * high:.1f}]'
        f' over {self.num_tasks} tasks x {self.passes}'
    )


def returns_and_turns(tree: trees.Tree) -> tuple[np.ndarray, np.ndarray]:
  """Returns each chain's return and number of actions, [B, leaves] each.

  Args:
    tree: B trees that branch at the root alone, all with as many leaves.
  """
  tree = jax.tree.map(np.asarray, tree)
  totals, turns = [], []
  for parents, mask, rewards in zip(tree.parents, tree.node_mask, tree.rewards):
    chain = np.arange(len(parents))  # The first node of each node's chain.
    for node in np.flatnonzero(mask & (parents > 0)):
      chain[node] = chain[parents[node]]
    starts = np.flatnonzero(mask & (parents == 0))
    real = np.flatnonzero(mask)[1:]
    totals.append([rewards[real][chain[real] == s].sum() for s in starts])
    turns.append([np.sum(chain[real] == s) for s in starts])
  return np.asarray(totals), np.asarray(turns)


def evaluate(
    grower: rollout.Grower,
    params: dict,
    tasks: Sequence[Any],
    task_types: Sequence[str],
    rng_key: jax.Array,
    passes: int = 1,
    greedy: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Score:
  """Plays every task `passes` times.

  Args:
    grower: plays the episodes.
    params: the policy's parameters.
    tasks: tasks or ids.
    task_types: the type of each task.
    rng_key: consumed; equal keys give equal scores.
    passes: episodes per task; 1 suffices where `greedy`.
    greedy: take the likeliest tokens instead of drawing.
    progress: called with tasks done and in all.

  Raises:
    ValueError: if there are no tasks.
  """
  if not tasks:
    raise ValueError('expected at least one task to evaluate on, got none')
  size = max(1, _BATCH // passes)
  totals, turns = [], []
  for number, start in enumerate(range(0, len(tasks), size)):
    grown = grower.grow(
        params,
        tasks[start:start + size],
        jax.random.fold_in(rng_key, number),
        num_backbones=passes,
        greedy=greedy,
    )
    batch = returns_and_turns(grown.tree)
    totals.append(batch[0])
    turns.append(batch[1])
    progress(min(start + size, len(tasks)), len(tasks))
  won = np.concatenate(totals) > 0.5
  kinds = np.asarray(task_types)
  by_type = {
      str(kind): (float(won[kinds == kind].mean()), int((kinds == kind).sum()))
      for kind in sorted(set(task_types))
  }
  return Score(
      success=float(won.mean()),
      interval=metrics.clustered_interval(won),
      num_tasks=len(tasks),
      passes=passes,
      turns=float(np.concatenate(turns).mean()),
      by_type=by_type,
      returns=np.concatenate(totals).mean(axis=1),
  )


def report(label: str) -> Callable[[int, int], None]:
  """Returns a `progress` for `evaluate` that logs how far it has come."""
  return lambda done, total: logging.info(
      '%s: %d of %d tasks', label, done, total
  )


def task_types(environment: Any, tasks: Sequence[Any]) -> list[str]:
  """Returns the type of each task, as its first time step tells.

  Raises:
    ValueError: if a task's game is broken: a score without it would be of
      another set of tasks.
  """
  types = []
  for task in tasks:
    state, timestep = environment.reset(task)
    types.append(timestep.info.get('task_type', 'all'))
    environment.release(state)
  return types


def spread(tasks: Sequence[Any], count: int | None) -> Sequence[Any]:
  """Returns `count` tasks evenly spread over a split, or all for None.

  Tasks are sorted by name, so the first ones would all be of one type.
  """
  if count is None or count >= len(tasks):
    return tasks
  return [tasks[i * len(tasks) // count] for i in range(count)]


def comparison(scores: Mapping[str, Score]) -> str:
  """Returns a table of success in percent, a row per policy."""
  rows = []
  for name, score in scores.items():
    low, high = (100 * bound for bound in score.interval)
    row = {
        'policy': name,
        'success %': 100 * score.success,
        '95% interval': f'{low:.1f} .. {high:.1f}',
        'turns': score.turns,
    }
    for kind, (success, count) in score.by_type.items():
      row[f'{kind} ({count})'] = 100 * success
    rows.append(row)
  return metrics.table(rows, list(rows[0]), '.1f')


def to_dict(score: Score) -> dict[str, Any]:
  """Returns the score as JSON-able values."""
  return {
      'success': score.success,
      'interval': list(score.interval),
      'num_tasks': score.num_tasks,
      'passes': score.passes,
      'turns': score.turns,
      'by_type': {kind: list(pair) for kind, pair in score.by_type.items()},
      'returns': score.returns.tolist(),
  }

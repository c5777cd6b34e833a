"""The exact noise of branching at a fixed step, in closed form.

What a measured variance is to be compared with, and how a task is found in
which branching pays without drawing a single tree.
"""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from bpo_jax import checks
from experiments import enumerable


@dataclasses.dataclass(frozen=True, eq=False)
class _Paths:
  """Every episode of a task, each once.

  Attributes:
    chance: [L]
    acts: [L, H] bool, steps before the end.
    before: [L, H] state that a step acts in.
    actions: [L, H]
    rewards: [L, H] float64
    at_step: [L] state before the branch step, the last one if it came sooner.
  """

  chance: np.ndarray
  acts: np.ndarray
  before: np.ndarray
  actions: np.ndarray
  rewards: np.ndarray
  at_step: np.ndarray


@functools.lru_cache(maxsize=32)
def _all_paths(task, step):
  forest = enumerable.all_backbones(task, 1)
  acts = forest.tree.action_mask[:, 1:, 0]
  last = np.minimum(acts.sum(1), step)[:, None]
  return _Paths(
      forest.probabilities, acts, forest.states_before[:, 1:],
      forest.tree.tokens[:, 1:, 0], task.rewards[forest.states[:, 1:]] * acts,
      np.take_along_axis(forest.states, last, axis=1)[:, 0])


def _score_norms(task, paths, mask):
  """Returns |sum of the scores of the masked steps|^2 = sum of |.|^2, [L]."""
  norms = (1 - 2 * task.policy[paths.before, paths.actions]
           + (task.policy[paths.before] ** 2).sum(-1))
  return (norms * mask).sum(1)


def _mean_scores(task, paths, weights, mask, group):
  """Returns E[weight x score of the masked steps; group], [groups, S, A]."""
  shape = (task.num_states, task.num_states, task.num_actions)
  path, step = np.nonzero(mask)
  where = group[path], paths.before[path, step], paths.actions[path, step]
  taken = np.bincount(
      np.ravel_multi_index(where, shape), (paths.chance * weights)[path],
      int(np.prod(shape))).reshape(shape)
  return taken - taken.sum(-1, keepdims=True) * task.policy


def branching_noise(task: enumerable.Task, num_backbones: int, step: int = 0,
                    num_siblings: int = 1,
                    open_states: np.ndarray | None = None
                    ) -> tuple[float, float]:
  """Returns the exact noise of branching at a fixed step, and its cost.

  Every one of n backbones is forked before its action number `step` into
  groups of K siblings, where its state there is open; credit is that of
  `bpo_rb` with rho = 1. With V the mean return of a backbone's siblings, S and
  S' the scores of the actions before and from the step on, c a return less its
  mean (given the state, for siblings), all scores of different steps being
  orthogonal and of mean 0,

    n tr Cov = E[(V - m)^2 |S|^2] + Var(V) E|S|^2 / (n - 1)
               + E[E[c^2 |S'|^2 | s] / K
                   + Var(G | s) E[|S'|^2 | s] / (K (K - 1))
                   + (1 - 1/K) (1 + 1/(K - 1)^2) |E[c S' | s]|^2]
               + (n - 1) (|g|^2 + |E[V S]|^2 / (n - 1)^2) - n |g|^2.

  Where a state is not open, its actions from the step on count to S. Without
  forks it is RLOO.

  Args:
    task: of any kind whose paths can be listed.
    num_backbones: n, at least 2.
    step: actions before the fork.
    num_siblings: K; 1 for no forks.
    open_states: [S] bool, where to fork; None for everywhere.

  Returns:
    The trace of the covariance of a tree's gradient, reward units squared, and
    the expected number of environment steps of a tree.

  Raises:
    ValueError: if there are fewer than two backbones.
  """
  checks.at_least('num_backbones', num_backbones, 2, ' to be compared')
  n, k = num_backbones, num_siblings
  paths = _all_paths(task, step)
  chance, state = paths.chance, paths.at_step
  is_open = ~task.terminal[state] & (k > 1)
  if open_states is not None:
    is_open &= open_states[state]
  own = paths.acts & is_open[:, None] & (np.arange(task.horizon) >= step)
  shared = paths.acts & ~own

  centred = paths.rewards.sum(1) - task.expected_return  # G - m
  ahead = (paths.rewards * own).sum(1)
  within = np.where(is_open, ahead - task.values[state], 0)  # c
  spread = np.where(is_open, task.variances[state], 0)  # Var(G | s)
  squares = (centred - within) ** 2 + spread / k  # (V - m)^2, over siblings
  norms, norms_own = (_score_norms(task, paths, x) for x in (shared, own))

  second = chance @ (squares * norms)
  second += (chance @ squares) * (chance @ norms) / (n - 1)
  signal = np.sum(task.gradient ** 2)
  above = _mean_scores(task, paths, centred, shared, np.zeros_like(state))
  second += (n - 1) * (signal + np.sum(above ** 2) / (n - 1) ** 2)
  if k > 1:
    second += chance @ (within ** 2 * norms_own) / k
    second += chance @ (spread * norms_own) / (k * (k - 1))
    visits = np.bincount(state, chance, task.num_states)
    below = _mean_scores(task, paths, within, own, state)
    below = (below ** 2).sum((1, 2)) / np.where(visits > 0, visits, 1)
    second += (1 - 1 / k) * (1 + 1 / (k - 1) ** 2) * below.sum()
  forks = chance @ (is_open * task.remaining[state])
  steps = n * (task.remaining[0] + (k - 1) * forks)
  return float(second / n - signal), float(steps)


def saved_by_means(task: enumerable.Task, num_backbones: int, step: int,
                   num_siblings: int) -> float:
  """Returns what split means save of the noise of branching at a fixed step.

  A backbone's value is either the return of its own continuation or the mean of
  its K siblings'. The first is the second plus what the unordered siblings do
  not tell, of variance (1 - 1/K) Var(G | s), which meets the scores S of the
  prefix, as the backbone's own value and as the others' baseline:

    (1 - 1/K) (E[Var(G | s) |S|^2] + E[Var(G | s)] E|S|^2 / (n - 1)) / n.

  Args:
    task, num_backbones, step, num_siblings: as in `branching_noise`.

  Returns:
    The difference of the traces of the covariance, reward units squared.
  """
  paths = _all_paths(task, step)
  prefix = paths.acts & (np.arange(task.horizon) < step)
  norms = _score_norms(task, paths, prefix)
  spread = task.variances[paths.at_step]
  saved = paths.chance @ (spread * norms)
  saved += ((paths.chance @ spread) * (paths.chance @ norms)
            / (num_backbones - 1))
  return float((1 - 1 / num_siblings) * saved / num_backbones)


class Theorem(NamedTuple):
  """The terms of BPO's Theorem 4.3, reward units squared.

  Attributes:
    branching: Var(A) of one of K siblings below s_t, t fixed.
    root: Var(A) of one of K trajectories from s_0.
    explained: Var(V(s_t) | s_0).
    error: branching - (root - K / (K - 1) explained).
  """

  branching: float
  root: float
  explained: float
  error: float


def theorem_4_3(task: enumerable.Task, step: int, num_siblings: int) -> Theorem:
  """Returns both sides of Var(BPO) = Var(root LOO) - K/(K-1) Var(V(s_t)|s_0).

  The variances on the left and first on the right are sums over every K-tuple
  of continuations of A = G_1 - mean(G_2 .. G_K); the last is by recursion over
  states. G is the return of the whole path, t a fixed step, and the variance
  that of one sibling's advantage, not of a gradient.
  """
  paths = _all_paths(task, step)
  returns = paths.rewards.sum(1)
  before = np.where(paths.acts[:, :step], paths.actions[:, :step], -1)
  _, group = np.unique(before, axis=0, return_inverse=True)
  branching = _contrast_variance(
      paths.chance, returns, group.ravel(), num_siblings)
  root = _contrast_variance(
      paths.chance, returns, np.zeros_like(paths.at_step), num_siblings)
  explained = float(task.explained[step] * task.return_variance)
  factor = num_siblings / (num_siblings - 1)
  return Theorem(branching, root, explained,
                 branching - (root - factor * explained))


def _contrast_variance(chance, returns, group, num_siblings):
  """Returns Var(G_1 - mean of the others) of tuples drawn within a group."""
  mean = square = 0.0
  for member in range(group.max() + 1):
    inside = group == member
    total = chance[inside].sum()
    share, value = chance[inside] / total, returns[inside]
    axes = np.ix_(*[np.arange(len(value))] * num_siblings)
    odds = functools.reduce(np.multiply, (share[axis] for axis in axes))
    others = sum(value[axis] for axis in axes[1:]) / (num_siblings - 1)
    advantages = value[axes[0]] - others
    mean += total * np.sum(odds * advantages)
    square += total * np.sum(odds * advantages ** 2)
  return float(square - mean ** 2)

"""A sandbox of which everything is known: values, variances, the gradient.

A task is a deterministic system of states in layers with a softmax policy whose
logits are the parameters, one row a state. Everything exact is float64 and one
pass over the states; forests of trees are drawn, forked and turned into
gradients by NumPy, thousands at a time.

  task = enumerable.make('late')
  rng = np.random.default_rng(0)
  forest = enumerable.backbones(task, rng, num_trees=1024, num_backbones=4)
  plan = branching.causal_threshold(forest.tree, 0.5, min_spacing=1)
  forest = enumerable.fork(forest, plan, rng)
  estimates = enumerable.gradient(forest, advantages.bpo_rb(forest.tree))
  bias = estimates.mean(0) - task.gradient.ravel()
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import itertools

import jax
import numpy as np

from bpo_jax import checks
from bpo_jax import tree as tree_lib
from bpo_jax import types

NO_STATE = -1  # In `Task.next_states`, where the episode has ended.
_PROMPT = 0  # The root's token.


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
  """A layered deterministic system and a policy in it.

  State 0 is the first. A state's depth is the number of actions before it, and
  the same along every path that leads there; later layers have larger indices.

  Attributes:
    next_states: [S, A] int; NO_STATE in the whole row of a state that ends the
      episode.
    rewards: [S] float64, reward units, received on entering a state; that of
      state 0 is 0.
    logits: [S, A] float64, the parameters; not read at states that end it.
  """

  next_states: np.ndarray
  rewards: np.ndarray
  logits: np.ndarray

  def __post_init__(self):
    shape = np.shape(self.next_states)
    if np.shape(self.logits) != shape or np.shape(self.rewards) != shape[:1]:
      raise ValueError(
          f'expected rewards [S] and logits [S, A] of next_states {shape}, got '
          f'{np.shape(self.rewards)} and {np.shape(self.logits)}')
    ended = self.next_states == NO_STATE
    if (ended.any(1) != ended.all(1)).any():
      raise ValueError('next_states: expected NO_STATE in whole rows')
    before = self.next_states <= np.arange(shape[0])[:, None]
    if (before & ~ended).any():
      raise ValueError('next_states: expected an index above the state\'s own')

  @property
  def num_states(self) -> int:
    return self.next_states.shape[0]

  @property
  def num_actions(self) -> int:
    return self.next_states.shape[1]

  @functools.cached_property
  def terminal(self) -> np.ndarray:
    """Returns [S] bool, True where the episode has ended."""
    return self.next_states[:, 0] == NO_STATE

  @functools.cached_property
  def depth(self) -> np.ndarray:
    """Returns the number of actions before every state, [S] int."""
    depth = np.zeros(self.num_states, int)
    for state in np.flatnonzero(~self.terminal):
      depth[self.next_states[state]] = depth[state] + 1
    return depth

  @functools.cached_property
  def horizon(self) -> int:
    """Returns the most actions of an episode."""
    return int(self.depth.max())

  @functools.cached_property
  def log_policy(self) -> np.ndarray:
    """Returns log pi(a | s), [S, A], nats."""
    shifted = self.logits - self.logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))

  @functools.cached_property
  def policy(self) -> np.ndarray:
    """Returns pi(a | s), [S, A]."""
    return np.exp(self.log_policy)

  @functools.cached_property
  def entropies(self) -> np.ndarray:
    """Returns the entropy of pi(. | s), [S], nats."""
    return -(self.policy * self.log_policy).sum(1)

  @functools.cached_property
  def visits(self) -> np.ndarray:
    """Returns the probability that an episode passes through s, [S]."""
    visits = np.zeros(self.num_states)
    visits[0] = 1
    for state in np.flatnonzero(~self.terminal):
      np.add.at(visits, self.next_states[state],
                visits[state] * self.policy[state])
    return visits

  @functools.cached_property
  def values(self) -> np.ndarray:
    """Returns V(s), the expected sum of the rewards after s, [S]."""
    return self._backwards(self.rewards[self.next_states])

  @functools.cached_property
  def q_values(self) -> np.ndarray:
    """Returns Q(s, a) = r(s') + V(s'), [S, A]; 0 where the episode ended."""
    q_values = (self.rewards + self.values)[self.next_states]
    return np.where(self.terminal[:, None], 0, q_values)

  @functools.cached_property
  def advantages(self) -> np.ndarray:
    """Returns Q(s, a) - V(s), [S, A]."""
    return self.q_values - self.values[:, None]

  @functools.cached_property
  def variances(self) -> np.ndarray:
    """Returns Var(sum of the rewards after s | s), [S].

    Var(s) = E_a[Var(s') + (Q(s, a) - V(s))^2]: nothing else is random.
    """
    return self._backwards(self.advantages ** 2)

  @functools.cached_property
  def remaining(self) -> np.ndarray:
    """Returns the expected number of actions after s, [S]."""
    return self._backwards(np.ones_like(self.logits))

  @functools.cached_property
  def expected_return(self) -> float:
    """Returns J, the expected return of an episode."""
    return float(self.values[0])

  @functools.cached_property
  def return_variance(self) -> float:
    """Returns the variance of the return of an episode."""
    return float(self.variances[0])

  @functools.cached_property
  def explained(self) -> np.ndarray:
    """Returns Var(E[G | s_t]) / Var(G) for every t, [horizon + 1].

    That is 1 - E[Var(G | s_t)] / Var(G), for what was received before s_t is no
    longer random; an episode that ended before t counts as explained.
    """
    within = np.bincount(
        self.depth, self.visits * self.variances, self.horizon + 1)
    if self.return_variance == 0:
      return np.zeros_like(within)
    return 1 - within / self.return_variance

  @functools.cached_property
  def gradient(self) -> np.ndarray:
    """Returns dJ / dlogits, [S, A]: visits(s) pi(a | s) (Q(s, a) - V(s))."""
    return self.visits[:, None] * self.policy * self.advantages

  def _backwards(self, gains):
    """Returns x(s) = sum_a pi(a | s) (gain(s, a) + x(s')), [S]."""
    result = np.zeros(self.num_states)
    for state in np.flatnonzero(~self.terminal)[::-1]:
      ahead = gains[state] + result[self.next_states[state]]
      result[state] = self.policy[state] @ ahead
    return result


@dataclasses.dataclass(frozen=True, eq=False)
class Forest:
  """Trees of one task; every node below the root is one action.

  Attributes:
    task: what they are of.
    tree: Tree [B, N, 1] of NumPy arrays; `anchor` is the state that a node ends
      in, the root's is 0.
    stage: branching stages that the forest went through.
  """

  task: Task
  tree: tree_lib.Tree
  stage: int = 0

  @functools.cached_property
  def states(self) -> np.ndarray:
    """Returns the state at the end of every node, [B, N]; 0 on padding."""
    return np.maximum(self.tree.anchor, 0)

  @functools.cached_property
  def states_before(self) -> np.ndarray:
    """Returns the state that a node acts in, [B, N]; 0 where none."""
    above = np.maximum(self.tree.parents, 0)
    return np.take_along_axis(self.states, above, axis=1)

  @functools.cached_property
  def num_steps(self) -> np.ndarray:
    """Returns the environment steps that a tree took, [B]."""
    return self.tree.action_mask.sum((1, 2))

  @functools.cached_property
  def probabilities(self) -> np.ndarray:
    """Returns the probability of a tree's actions, given its forks, [B]."""
    taken = self.tree.tokens[..., 0] * self.tree.action_mask[..., 0]
    log_probs = self.task.log_policy[self.states_before, taken]
    return np.exp((log_probs * self.tree.action_mask[..., 0]).sum(1))

  def at_end(self, per_state: np.ndarray) -> np.ndarray:
    """Returns an exact [S] quantity at the end of nodes, [B, N] float32."""
    return np.where(self.tree.node_mask, per_state[self.states], 0).astype(
        np.float32)

  def before(self, per_state: np.ndarray) -> np.ndarray:
    """Returns it before every action token, [B, N, 1] float32."""
    per_node = per_state[self.states_before][..., None]
    return np.where(self.tree.action_mask, per_node, 0).astype(np.float32)


def backbones(task: Task, rng: np.random.Generator, num_trees: int,
              num_backbones: int, num_nodes: int | None = None) -> Forest:
  """Returns trees that branch at the root alone.

  Args:
    task: what they are of.
    rng: draws the actions.
    num_trees: B.
    num_backbones: first trajectories of each tree.
    num_nodes: N, at least what is needed; None for that.
  """
  draws = rng.random((num_trees, num_backbones, task.horizon))
  return lay_backbones(task, draws, num_nodes)


def lay_backbones(task: Task, draws: np.ndarray,
                  num_nodes: int | None = None) -> Forest:
  """Returns the trees of given draws.

  Args:
    task: what they are of.
    draws: [B, backbones, horizon], in [0, 1) to be turned into actions by the
      policy, or int, the actions themselves; not read after an episode's end.
    num_nodes: as in `backbones`.
  """
  forest = Forest(task, _roots(len(draws)))
  above = np.zeros(draws.shape[:2], int)
  return _lay(forest, above, draws, num_nodes)


def fork(forest: Forest, plan: types.BranchPlan, rng: np.random.Generator,
         num_nodes: int | None = None) -> Forest:
  """Returns the forest with the forks of a plan, each to the episode's end.

  Args:
    forest: what to fork.
    plan: nodes hold one token, so that every offset is 0: a fork repeats the
      node's action and what follows.
    rng: draws the actions.
    num_nodes: N, at least what is needed; None for that.

  Raises:
    ValueError: if an offset is not 0, or a node is none that acts.
  """
  above = fork_points(forest, plan)
  shape = (*above.shape, forest.task.horizon)
  return lay_forks(forest, above, rng.random(shape), num_nodes)


def fork_points(forest: Forest, plan: types.BranchPlan) -> np.ndarray:
  """Returns the node that every fork starts below, [B, F]; -1 for none."""
  node, offset, count = map(np.asarray, (plan.node, plan.offset, plan.count))
  used = (node >= 0) & (count > 0)
  acts = np.take_along_axis(
      forest.tree.action_mask[..., 0], np.maximum(node, 0), axis=1)
  wrong = np.argwhere(used & (~acts | (offset != 0)))
  if len(wrong):
    raise ValueError('plan: expected forks at offset 0 of nodes that act, got '
                     f'another in tree {wrong[0][0]}, slot {wrong[0][1]}')
  last = np.cumsum(np.where(used, count, 0), axis=1)
  index = np.arange(max(last[:, -1].max(initial=0), 1))
  slot = (index[:, None] >= last[:, None, :]).sum(-1)
  is_fork = slot < node.shape[1]
  node = np.take_along_axis(node, np.minimum(slot, node.shape[1] - 1), axis=1)
  above = np.take_along_axis(forest.tree.parents, np.maximum(node, 0), axis=1)
  return np.where(is_fork, above, types.NO_PARENT)


def lay_forks(forest: Forest, above: np.ndarray, draws: np.ndarray,
              num_nodes: int | None = None) -> Forest:
  """Returns the forest with forks below nodes [B, F] by draws [B, F, H]."""
  grown = _lay(forest, above, draws, num_nodes, birth=forest.stage + 1)
  return dataclasses.replace(grown, stage=forest.stage + 1)


def all_backbones(task: Task, num_backbones: int) -> Forest:
  """Returns every tree that branches at the root alone, each once.

  `Forest.probabilities` are their chances and sum to 1.
  """
  forest = Forest(task, _roots(1))
  return _lay_all(forest, np.zeros((1, num_backbones), int), birth=0)


def all_forks(forest: Forest, plan: types.BranchPlan) -> Forest:
  """Returns every outcome of forking every tree as the plan says, each once."""
  grown = _lay_all(forest, fork_points(forest, plan), forest.stage + 1)
  return dataclasses.replace(grown, stage=forest.stage + 1)


def pad(forest: Forest, multiple: int) -> Forest:
  """Returns the forest with N padded to a multiple."""
  num_nodes = forest.tree.parents.shape[1]
  padded = _padded(forest.tree, -(-num_nodes // multiple) * multiple)
  return dataclasses.replace(forest, tree=padded)


def gradient(forest: Forest, credit: types.Credit) -> np.ndarray:
  """Returns every tree's sum over tokens of weight x advantage x score.

  Args:
    forest: B trees.
    credit: [B, N, 1].

  Returns:
    [B, S * A] float64, in the order of `Task.gradient`.
  """
  task, tree = forest.task, forest.tree
  step = np.asarray(credit.weights, float) * np.asarray(credit.advantages)
  tree_index, node = np.nonzero(tree.action_mask[..., 0])
  before = forest.states_before[tree_index, node]
  action = tree.tokens[tree_index, node, 0]
  shape = (len(tree.parents), task.num_states, task.num_actions)
  taken = np.bincount(
      np.ravel_multi_index((tree_index, before, action), shape),
      step[tree_index, node, 0], int(np.prod(shape))).reshape(shape)
  expected = taken.sum(-1, keepdims=True) * task.policy
  return (taken - expected).reshape(shape[0], -1)


def _roots(num_trees):
  """Returns trees of nothing but a prompt."""
  builder = tree_lib.TreeBuilder()
  builder.add(types.NO_PARENT, [_PROMPT], anchor=0)
  return tree_lib.stack([builder] * num_trees, num_nodes=1, num_tokens=1)


def _walk(task, states, draws):
  """Returns (actions, states after, whether acted), [..., H] each."""
  edges = np.cumsum(task.policy, axis=1)[:, :-1]
  chosen = np.issubdtype(draws.dtype, np.integer)
  trace = []
  for draw in np.moveaxis(draws, -1, 0):
    acts = ~task.terminal[states]
    actions = draw if chosen else (draw[..., None] >= edges[states]).sum(-1)
    states = np.where(acts, task.next_states[states, actions], states)
    trace.append((actions, states, acts))
  return [np.stack(column, axis=-1) for column in zip(*trace)]


def _lay(forest, above, draws, num_nodes, birth=0):
  """Returns the forest with a continuation below each of [B, F] nodes."""
  task, tree = forest.task, forest.tree
  start = np.take_along_axis(forest.states, np.maximum(above, 0), axis=1)
  actions, states, acts = _walk(task, start, draws)
  acts &= (above >= 0)[..., None]
  lengths = acts.sum(-1)
  first = (tree.node_mask.sum(1, keepdims=True)
           + np.cumsum(lengths, axis=1) - lengths)
  index = first[..., None] + np.arange(draws.shape[-1])
  needed = int((first + lengths).max())
  if num_nodes is None:
    num_nodes = max(needed, tree.parents.shape[1])
  checks.at_least('num_nodes', num_nodes, needed)
  before = np.concatenate([start[..., None], states[..., :-1]], axis=-1)
  parents = np.where(np.arange(draws.shape[-1]) > 0, index - 1,
                     above[..., None])
  new = dict(
      tokens=actions, token_mask=True, action_mask=True,
      behaviour_log_probs=task.log_policy[before, actions],
      entropies=task.entropies[before], parents=parents, node_mask=True,
      rewards=task.rewards[states], terminal=task.terminal[states], birth=birth,
      anchor=states)
  tree = _padded(tree, num_nodes)
  at = np.nonzero(acts)[0], index[acts]
  for name, value in new.items():
    getattr(tree, name)[at] = (
        np.broadcast_to(value, acts.shape)[acts].reshape(
            (-1,) + (1,) * (getattr(tree, name).ndim - 2)))
  return dataclasses.replace(forest, tree=tree)


def _lay_all(forest, above, birth):
  """Returns the forest with all continuations below each of [B, F] nodes."""
  task, shape = forest.task, (above.shape[1], forest.task.horizon)
  size = shape[0] * shape[1]
  draws = np.indices((task.num_actions,) * size).reshape(size, -1).T
  tree = np.repeat(np.arange(len(above)), len(draws))
  draws = np.tile(draws, (len(above), 1)).reshape(-1, *shape)
  start = np.take_along_axis(forest.states, np.maximum(above, 0), axis=1)
  _, _, acts = _walk(task, start[tree], draws)
  acts &= (above >= 0)[tree][..., None]
  once = ~((draws > 0) & ~acts).any((1, 2))  # Actions after the end are none.
  tree, draws = tree[once], draws[once]
  chosen = jax.tree.map(lambda x: x[tree], forest.tree)
  return _lay(dataclasses.replace(forest, tree=chosen), above[tree], draws,
              None, birth)


def _padded(tree, num_nodes):
  """Returns a copy with room for so many nodes."""
  extra = num_nodes - tree.parents.shape[1]

  def pad(name):
    value = getattr(tree, name)
    if value is None:
      return None
    width = [(0, 0), (0, extra)] + [(0, 0)] * (value.ndim - 2)
    empty = -1 if name in ('parents', 'anchor') else 0
    return np.pad(value, width, constant_values=empty)
  return tree.replace(**{
      field.name: pad(field.name) for field in dataclasses.fields(tree)})


def decisions(horizon: int, steps: Sequence[int],
              logits: Callable[[int, tuple[int, ...]], Sequence[float]],
              returns: Callable[[tuple[int, ...]], float],
              num_actions: int = 2) -> Task:
  """Returns a task in which the actions of some steps alone matter.

  Args:
    horizon: actions of every episode.
    steps: the steps, counted from 0, whose actions are remembered; any action
      of another step leads to the same state.
    logits: (step, what was done at earlier steps that matter) -> [A].
    returns: (what was done at all of them) -> the return, received at the end.
    num_actions: A.
  """
  layers = [list(itertools.product(
      range(num_actions), repeat=sum(step < depth for step in steps)))
            for depth in range(horizon + 1)]
  first = np.cumsum([0] + [len(layer) for layer in layers])
  next_states, rewards, rows = [], [], []
  for depth, layer in enumerate(layers):
    for index, history in enumerate(layer):
      last = depth == horizon
      ahead = (index * num_actions + np.arange(num_actions)
               if depth in steps else np.full(num_actions, index))
      next_states.append(
          np.full(num_actions, NO_STATE) if last else first[depth + 1] + ahead)
      rewards.append(returns(history) if last else 0.0)
      rows.append(np.zeros(num_actions) if last else logits(depth, history))
  return Task(np.array(next_states), np.array(rewards, float),
              np.array(rows, float))


def random_task(seed: int, horizon: int = 3, num_actions: int = 2) -> Task:
  """Returns a task in which every action matters, of normal logits, returns."""
  rng = np.random.default_rng(seed)
  return decisions(
      horizon, range(horizon), lambda *_: rng.normal(size=num_actions),
      lambda _: rng.normal(), num_actions)


def _odds(probability):
  """Returns logits of action 1 having that probability."""
  return [0.0, np.log(probability / (1 - probability))]


def _late() -> Task:
  """Two early mistakes are fatal; else three late coin tosses decide.

  A branch from before the tosses costs a quarter of an episode and is taken
  only where the outcome is open: a dead prefix is followed by rote.
  """
  def logits(step, history):
    if step < 2:
      return _odds(0.81)  # 0.49 nats.
    alive = history[:2] == (1, 1)
    return _odds(0.5 if step >= 9 and alive else 0.95)

  return decisions(
      12, (0, 1, 9, 10, 11), logits,
      lambda history: float(history[:2] == (1, 1) and sum(history[2:]) >= 2))


def _early() -> Task:
  """Three tosses at the start decide; what follows is rote.

  A branch from after the tosses costs most of an episode and has nothing left
  to explain; one from between them costs as much as starting anew.
  """
  return _tosses_first(0.99)


def _decided() -> Task:
  """Three tosses at the start decide; what follows is noise of no effect.

  A branch after the tosses compares equal returns. It still pays: it tells the
  estimator that the actions after it deserve no credit.
  """
  return _tosses_first(0.5)


def _tosses_first(probability):
  return decisions(
      12, (0, 1, 2), lambda step, _: _odds(0.6 if step < 3 else probability),
      lambda history: float(sum(history) >= 2))


TASKS = {'late': _late, 'early': _early, 'decided': _decided}


def make(name: str) -> Task:
  """Returns a task by name.

  'late': branching pays. 'early': it does not. 'decided': it pays, although
  siblings have equal returns.

  Raises:
    ValueError: if there is no task of that name.
  """
  checks.one_of('task', name, tuple(TASKS))
  return TASKS[name]()

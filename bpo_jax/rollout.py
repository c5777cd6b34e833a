"""Grows one tree of episodes per task: backbones, then forks, then forks again.

All the episodes of a stage are rows of one batch. A backbone is a fork of the
root: the prompt is read once per task, and everything after it inherits a copy
of the cache row of its parent. Sandbox states are values behind handles, so a
fork steps again from the state before the action, whoever stepped from it. A
fork inside an action reads again what the action's decision read, is made to
begin with the tokens that it keeps, and steps once, with the whole action.
"""

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bpo_jax import sampling
from bpo_jax import tree as trees
from bpo_jax import types
from bpo_jax.models import transformer

_PROMPT_BUCKET = 16  # Tokens; bounds how many prefill shapes are compiled.
_CACHE_BUCKET = 256  # Tokens a cache grows by.
_MIN_ROWS = 16  # As for tokens: few shapes beat little padding.


class Compute(NamedTuple):
  """What a rollout cost, counted alike for every algorithm."""

  environment_steps: int
  generated_tokens: int


class Rollout(NamedTuple):
  """Trees and what it took to grow them."""

  tree: trees.Tree
  compute: Compute
  statuses: Mapping[int, int]  # how many steps ended with each status
  unspent: int = 0  # forks that the branch policies' budgets left over


class _Decision(NamedTuple):
  """All that a fork of one action needs, but for the cache."""

  tree: int
  leaf: int  # whose cache row has the path
  length: int  # tokens of that row that come before `pending`
  pending: np.ndarray  # [C] int32, padded
  pending_length: int
  commands: np.ndarray  # [A, U] int32
  handle: int
  turn: int
  # Of the action that was taken, and of how much of it a fork keeps.
  action: np.ndarray  # [U] int32, 0-padded
  kept: int  # in `_Growth._decisions`: the tokens before the node begins


class _Leaf:
  """An episode in progress; its cache row is found by its number."""

  def __init__(self, number: int, tree: int, node: int):
    self.number = number
    self.tree = tree
    self.node = node  # the last one so far


def row_bucket(count: int) -> int:
  """Returns the least of 16, 24, 32, 48, 64, 96, .. that holds `count` rows."""
  size = _MIN_ROWS
  while size < count:
    size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
  return size


def shrunk_bucket(count: int) -> int:
  """Returns the least of 16, 32, 64, .. that holds `count` rows.

  Coarser than `row_bucket`: a batch that shrinks passes through every size.
  """
  return max(_MIN_ROWS, 1 << (int(count) - 1).bit_length())


def _round_up(value: int, multiple: int) -> int:
  return -(-value // multiple) * multiple


@jax.jit
def _take_rows(cache: sampling.Cache, rows: jax.Array) -> sampling.Cache:
  return sampling.Cache(
      jax.tree.map(lambda x: x[:, rows], cache.key_values), cache.lengths[rows]
  )


_grow_cache = jax.jit(sampling.grow_cache, static_argnums=1)


@jax.jit
def _select(
    mask: jax.Array, cache: sampling.Cache, other: sampling.Cache
) -> sampling.Cache:
  """Returns the rows of `cache` where the mask is True, else of `other`."""
  wide = mask[None, :, None, None, None]
  return sampling.Cache(
      jax.tree.map(
          lambda x, y: jnp.where(wide, x, y), cache.key_values, other.key_values
      ),
      jnp.where(mask, cache.lengths, other.lengths),
  )


class _Archive:
  """The caches of all leaves so far, each as it was when last written."""

  def __init__(self):
    self._caches: list[sampling.Cache] = []
    self._place: dict[int, tuple[int, int]] = {}

  def add(self, cache: sampling.Cache, leaves: Sequence[int]) -> None:
    """Keeps `cache`, whose first rows are those of `leaves`."""
    for row, leaf in enumerate(leaves):
      self._place[leaf] = len(self._caches), row
    self._caches.append(cache)

  def fork(self, leaves: Sequence[int], num_rows: int) -> sampling.Cache:
    """Copies the rows of `leaves` to the first rows of a cache of `num_rows`.

    Every step has the shape of whole caches, whichever rows are wanted, so that
    no update compiles anything for the number of forks that it happens to have.
    """
    places = np.array([self._place[leaf] for leaf in leaves])
    numbers = np.unique(places[:, 0])
    size = max(self._caches[n].key_values.keys.shape[3] for n in numbers)
    forked = None
    for number in numbers:
      is_here = np.zeros(num_rows, bool)
      is_here[: len(leaves)] = places[:, 0] == number
      index = np.zeros(num_rows, np.int32)
      index[is_here] = places[places[:, 0] == number, 1]
      part = _take_rows(self._caches[number], index)
      part = _grow_cache(part, size)
      forked = part if forked is None else _select(is_here, part, forked)
    return forked


class Grower:
  """Grows trees with one policy network in one batched environment.

  Attributes:
    seconds: where the time went so far, by part: `network`, `environment` and
      `records` (nodes and what forks need).
  """

  def __init__(
      self,
      model: transformer.Transformer,
      environment: Any,
      sampler: sampling.SamplerConfig,
      max_turns: int,
      debug: bool = False,
  ):
    """Compiles nothing yet.

    Args:
      model: the policy network.
      environment: an `environments.callbacks.BatchedEnvironment` or its like.
      sampler: how actions are drawn.
      max_turns: actions after which an episode is truncated.
      debug: whether every call checks the trees that it grew.
    """
    self.debug = debug
    self.model_config = model.config
    self.environment = environment
    self.max_turns = max_turns
    self.seconds: collections.Counter[str] = collections.Counter()
    self.chunk = 1 + environment.codec.observation_length
    self.action_length = sampler.action_length
    self.turn_length = self.chunk + self.action_length
    self.prefill = jax.jit(sampling.make_prefill(model), donate_argnums=1)
    # The rows are donated: a turn writes the cache where it lies.
    self.act = jax.jit(sampling.make_act(model, sampler), donate_argnums=1)
    self.advance = jax.jit(
        sampling.make_advance(environment.step, max_turns), donate_argnums=0
    )

  def grow(
      self,
      params: dict,
      tasks: Sequence[Any],
      rng_key: jax.Array,
      num_backbones: int = 1,
      branch: Sequence[Callable[[trees.Tree], types.BranchPlan]] = (),
      greedy: bool = False,
  ) -> Rollout:
    """Grows a tree for each task.

    Args:
      params: the policy's parameters.
      tasks: B tasks or task ids.
      rng_key: a key for this call alone; consumed.
      num_backbones: first trajectories of each task.
      branch: a branch policy for each stage after the backbones; each sees the
        trees as they are and says where to fork.
      greedy: take the likeliest tokens instead of drawing.

    Returns:
      B trees, in the order of `tasks`. Every state taken from the environment
      is given back, also when an error ends the call.

    Raises:
      ValueError: if there is no task or no backbone, if a plan forks anywhere
        but at an action token, or, in debug mode, if a tree is unsound.
    """
    if not tasks or num_backbones < 1:
      raise ValueError(
          f'expected at least one task and one backbone, got {len(tasks)} and'
          f' {num_backbones}'
      )
    growth = _Growth(self, params, tasks, rng_key, greedy)
    try:
      growth.lay_backbones(num_backbones, is_last=not branch)
      tree, unspent = growth.tree(), 0
      for stage, policy in enumerate(branch, start=1):
        plan = jax.tree.map(np.asarray, policy(tree))
        unspent += 0 if plan.unspent is None else int(np.sum(plan.unspent))
        if (plan.count > 0).any():
          growth.fork(tree, plan, birth=stage, is_last=stage == len(branch))
          tree = growth.tree()
      if self.debug:
        tree.validate()
      return Rollout(tree, growth.compute, growth.statuses, unspent)
    finally:
      growth.release()


class _Growth:
  """The trees of one call, while they grow."""

  def __init__(self, grower: Grower, params, tasks, rng_key, greedy: bool):
    self._grower = grower
    self._params = params
    self._tasks = tasks
    self._greedy = greedy
    self._task_keys = jax.vmap(jax.random.fold_in, (None, 0))(
        rng_key, np.arange(len(tasks))
    )
    self._archive = _Archive()
    self._builders = [trees.TreeBuilder() for _ in tasks]
    # By the handle of a node that begins at or inside the decision's action.
    self._decisions: list[dict[int, _Decision]] = [{} for _ in tasks]
    self._num_leaves_of = [0] * len(tasks)
    self._num_leaves = 0
    self._handles: list[int] = []
    self.compute = Compute(0, 0)
    self.statuses: collections.Counter[int] = collections.Counter()

  def tree(self) -> trees.Tree:
    """Returns the trees as they are now, padded to a bucket."""
    return trees.stack(self._builders)

  def release(self) -> None:
    """Gives back every state that was taken."""
    self._grower.environment.release(self._handles)
    self._handles = []

  def lay_backbones(self, num_backbones: int, is_last: bool) -> None:
    """Reads each prompt once and runs the first trajectories from it."""
    num_tasks = len(self._tasks)
    environment = self._grower.environment
    first, prompts = environment.reset(self._tasks, [0] * num_tasks)
    self._handles.extend(first.handles.tolist())
    # A prompt's cache row is that of leaf -1 - tree: of no episode.
    owners = [-1 - tree for tree in range(num_tasks)]
    self._archive.add(self._read_prompts(prompts), owners)
    decisions, roots = [], []
    for tree, prompt in enumerate(prompts):
      pending = np.zeros(self._grower.chunk, np.int32)
      pending[0] = prompt[-1]
      root = self._builders[tree].add(
          types.NO_PARENT, prompt, anchor=int(first.anchor[tree])
      )
      decision = _Decision(
          tree, owners[tree], len(prompt) - 1, pending, 1,
          first.commands[tree], int(first.handles[tree]), 0,
          np.zeros(self._grower.action_length, np.int32), 0,
      )
      decisions += [decision] * num_backbones
      roots += [root] * num_backbones
    self._run(decisions, roots, 0, is_last)

  def fork(
      self, tree: trees.Tree, plan: types.BranchPlan, birth: int, is_last: bool
  ) -> None:
    """Runs the forks of a plan.

    Args:
      tree: the trees as they are, which the plan speaks of.
      plan: on the host, with at least one fork.
      birth: the number of the stage.
      is_last: whether nothing is forked after it.
    """
    _check_plan(tree, plan)
    decisions, nodes = [], []
    for b, counts in enumerate(plan.count):
      used = np.flatnonzero(counts > 0)
      for slot, decision, node in zip(
          used, *self._split(b, plan.node[b, used], plan.offset[b, used])
      ):
        decisions += [decision] * int(counts[slot])
        nodes += [node] * int(counts[slot])
    self._run(decisions, nodes, birth, is_last)

  def _split(
      self, tree: int, nodes: np.ndarray, offsets: np.ndarray
  ) -> tuple[list[_Decision], list[int]]:
    """Splits a tree where it is forked.

    Args:
      tree: which tree.
      nodes: [F] indices into the tree as it is.
      offsets: [F] of an action token of the node each.

    Returns:
      What each fork decides, with the tokens that it keeps of the action, and
      the handle of the node that it is a child of.
    """
    builder, known = self._builders[tree], self._decisions[tree]
    tails = [builder.handle(node) for node in nodes]
    decisions = [
        known[tail]._replace(kept=known[tail].kept + int(offset))
        for tail, offset in zip(tails, offsets)
    ]
    heads = builder.fork_points(nodes, offsets)
    # From left to right: a head begins where the part before it ended.
    for i in np.argsort(offsets, kind='stable'):
      head, tail = heads[i], tails[i]
      if offsets[i] > 0 and head not in known:
        known[head] = known[tail]
        known[tail] = decisions[i]
    return decisions, heads

  def _read_prompts(self, prompts: list[list[int]]) -> sampling.Cache:
    """Returns a cache of all prompts, each without its last token."""
    num_rows = row_bucket(len(prompts))
    lengths = np.zeros(num_rows, np.int32)
    lengths[: len(prompts)] = [len(prompt) - 1 for prompt in prompts]
    width = _round_up(max(1, lengths.max()), _PROMPT_BUCKET)
    tokens = np.zeros((num_rows, width), np.int32)
    for row, prompt in enumerate(prompts):
      tokens[row, : lengths[row]] = prompt[:-1]
    size = _round_up(width + self._grower.turn_length, _CACHE_BUCKET)
    cache = sampling.empty_cache(self._grower.model_config, num_rows, size)
    return self._grower.prefill(self._params, cache, tokens, lengths)

  def _run(
      self,
      decisions: list[_Decision],
      nodes: list[int],
      birth: int,
      is_last: bool,
  ) -> None:
    """Runs an episode from each decision, below its node, to its end."""
    rows, leaves = self._start(decisions, nodes)
    while True:
      rows = self._make_room(rows)
      before = _to_host(rows)
      with self._timed('network'):
        rows, actions = self._grower.act(self._params, rows)
        jax.block_until_ready(actions)
      with self._timed('environment'):
        rows, result = self._grower.advance(rows, actions)
        actions, result = jax.device_get((actions, result))
      # First of all, so that whatever fails from here on leaks no state.
      self._handles += result.handles[result.handles > 0].tolist()
      with self._timed('records'):
        self._record(before, actions, result, leaves, birth)
      self._grower.environment.raise_pending()
      active = np.array(rows.active)
      if not active.any():
        break
      num_rows = shrunk_bucket(active.sum())
      if num_rows < len(active):
        if not is_last:
          self._archive.add(rows.cache, [leaf.number for leaf in leaves])
        rows, leaves = _close_ranks(rows, leaves, active, num_rows)
    if not is_last:
      self._archive.add(rows.cache, [leaf.number for leaf in leaves])

  @contextlib.contextmanager
  def _timed(self, part: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    self._grower.seconds[part] += time.perf_counter() - start

  def _start(
      self, decisions: list[_Decision], nodes: list[int]
  ) -> tuple[sampling.Rows, list[_Leaf]]:
    """Returns the rows of new leaves that go on from `nodes`."""
    numbered = []
    for decision in decisions:
      numbered.append((decision, self._num_leaves_of[decision.tree]))
      self._num_leaves_of[decision.tree] += 1
    num_rows = row_bucket(len(decisions))
    cache = self._archive.fork([d.leaf for d in decisions], num_rows)
    # Rows that pad the bucket repeat the last decision, and are never active.
    padded = numbered + numbered[-1:] * (num_rows - len(numbered))
    column = lambda name: np.array([getattr(d, name) for d, _ in padded])
    is_forced = np.arange(self._grower.action_length) < column('kept')[:, None]
    fold_in = jax.vmap(jax.random.fold_in)
    rows = sampling.Rows(
        cache=cache._replace(lengths=jnp.asarray(column('length'), jnp.int32)),
        pending=jnp.asarray(column('pending')),
        pending_length=jnp.asarray(column('pending_length'), jnp.int32),
        commands=jnp.asarray(column('commands')),
        handles=jnp.asarray(column('handle'), jnp.int32),
        active=jnp.arange(num_rows) < len(decisions),
        keys=fold_in(
            self._task_keys[column('tree')], np.array([i for _, i in padded])
        ),
        turns=jnp.asarray(column('turn'), jnp.int32),
        greedy=jnp.full(num_rows, self._greedy),
        forced=jnp.asarray(np.where(is_forced, column('action'), 0)),
        num_forced=jnp.asarray(column('kept'), jnp.int32),
    )
    leaves = [
        _Leaf(self._num_leaves + i, decision.tree, node)
        for i, (decision, node) in enumerate(zip(decisions, nodes))
    ]
    self._num_leaves += len(leaves)
    return rows, leaves

  def _make_room(self, rows: sampling.Rows) -> sampling.Rows:
    """Returns the rows with a cache that holds one more turn of each."""
    size = rows.cache.key_values.keys.shape[3]
    used = np.array(rows.cache.lengths) * np.array(rows.active)
    needed = int(used.max()) + self._grower.turn_length
    if needed <= size:
      return rows
    size = _round_up(needed, _CACHE_BUCKET)
    return rows._replace(cache=_grow_cache(rows.cache, size))

  def _record(self, before, actions, result, leaves, birth) -> None:
    """Adds a node for each action of a turn, and what a fork there needs."""
    ended = result.terminal | result.truncated
    # What an episode's last action showed was never read by the policy.
    shown = np.where(ended, 0, result.observation_length)
    is_shown = np.arange(result.observation.shape[1]) < shown[:, None]
    step = np.arange(actions.mask.shape[1])
    # What was forced stands above the node already.
    is_drawn = actions.mask & (step >= before.num_forced[:, None])
    keep = np.concatenate([is_drawn, is_shown], axis=1)
    tokens = np.concatenate([actions.tokens, result.observation], axis=1)
    off = is_shown.shape[1]  # Observations have no log-probs.
    is_action, log_probs, entropies = (
        np.pad(x, ((0, 0), (0, off)))
        for x in (is_drawn, actions.log_probs, actions.entropies)
    )
    allowed = actions.allowed
    if allowed is not None:
      allowed = np.pad(allowed, ((0, 0), (0, off), (0, 0)))
    for row in np.flatnonzero(before.active):
      leaf, kept = leaves[row], keep[row]
      node = self._builders[leaf.tree].add(
          leaf.node,
          tokens[row, kept],
          action_mask=is_action[row, kept],
          behaviour_log_probs=log_probs[row, kept],
          entropies=entropies[row, kept],
          allowed=None if allowed is None else allowed[row, kept],
          reward=float(result.rewards[row]),
          terminal=bool(result.terminal[row]),
          truncated=bool(result.truncated[row] and not result.terminal[row]),
          birth=birth,
          anchor=int(result.anchor[row]),
      )
      self._decisions[leaf.tree][node] = _Decision(
          leaf.tree, leaf.number, int(before.lengths[row]),
          before.pending[row], int(before.pending_length[row]),
          before.commands[row], int(before.handles[row]),
          int(before.turns[row]), actions.tokens[row],
          int(before.num_forced[row]),
      )
      leaf.node = node
    self.statuses.update(result.status[before.active].tolist())
    self.compute = Compute(
        self.compute.environment_steps + int(before.active.sum()),
        self.compute.generated_tokens + int(is_drawn.sum()),
    )


def _check_plan(tree: trees.Tree, plan: types.BranchPlan) -> None:
  """Raises ValueError where a plan forks elsewhere than at an action token."""
  _, num_nodes, num_tokens = tree.action_mask.shape
  for b, slot in np.argwhere(plan.count > 0):
    node, offset = int(plan.node[b, slot]), int(plan.offset[b, slot])
    is_inside = 0 <= node < num_nodes and 0 <= offset < num_tokens
    if not (is_inside and tree.action_mask[b, node, offset]):
      raise ValueError(
          'expected forks at an action token, before or inside an action; got'
          f' node {node} at offset {offset} of tree {b}, which is none'
      )


class _HostRows(NamedTuple):
  """`sampling.Rows` without what stays on the device, as copies."""

  lengths: np.ndarray
  pending: np.ndarray
  pending_length: np.ndarray
  commands: np.ndarray
  handles: np.ndarray
  active: np.ndarray
  turns: np.ndarray
  num_forced: np.ndarray


def _to_host(rows: sampling.Rows) -> _HostRows:
  # Copies: on CPU a view would lie in a buffer that the turn is about to write.
  return _HostRows(
      np.array(rows.cache.lengths),
      *(np.array(getattr(rows, name)) for name in _HostRows._fields[1:]),
  )


def _close_ranks(
    rows: sampling.Rows,
    leaves: list[_Leaf],
    active: np.ndarray,
    num_rows: int,
) -> tuple[sampling.Rows, list[_Leaf]]:
  """Returns the active rows alone, padded to `num_rows`.

  The tail of long episodes would otherwise pay for rows that ended long ago.
  """
  kept = np.flatnonzero(active)
  index = np.pad(kept, (0, num_rows - len(kept)))
  is_real = jnp.arange(num_rows) < len(kept)
  small = jax.tree.map(lambda x: x[index], rows._replace(cache=None))
  small = small._replace(cache=_take_rows(rows.cache, index), active=is_real)
  return small, [leaves[row] for row in kept]

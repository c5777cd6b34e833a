"""Grows one tree of episodes per task: backbones, then forks, then forks again.

All the episodes of a stage are rows of one batch. A backbone is a fork of the
root: the prompt is read once per task, and everything after it inherits a copy
of the cache row of its parent. Sandbox states are values behind handles, so a
fork steps again from the state before the action, whoever stepped from it. A
fork inside an action reads again what the action's decision read, is made to
begin with the tokens that it keeps, and steps once, with the whole action.

Where not all episodes fit in a batch (`max_rows`), the row of one that ends is
taken by the next that waits, at once. Trees do not tell: every leaf has a key
of its own, and nodes are laid down in the order in which they would have come
had all run side by side.

Memory: a token of a row costs 2 x layers x kv_heads x head_dim numbers, and
while forks may still come a row of every episode is kept. Once the last stage
has begun, only what its own forks inherit is.
"""

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import functools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bpo_jax import archive
from bpo_jax import batches
from bpo_jax import checks
from bpo_jax import decoding
from bpo_jax import memory
from bpo_jax import sampling
from bpo_jax import sharding
from bpo_jax import tree as trees
from bpo_jax import types
from bpo_jax.models import transformer

_PROMPT_BUCKET = 16  # Tokens; bounds how many prefill shapes are compiled.
_CACHE_BUCKET = 256  # Tokens a cache grows by.


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
  utilisation: float = 1.0  # share of the rows that were run and had an episode


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


class _Turn(NamedTuple):
  """What an episode's turn leaves behind."""

  fields: Mapping[str, Any]  # of its node
  decision: _Decision


class _Leaf:
  """An episode; its cache row is found by its number."""

  def __init__(self, number: int, index: int, start: _Decision, node: int):
    self.number = number
    self.index = index  # among the leaves of its tree
    self.start = start
    self.tree = start.tree
    self.node = node  # above the next one
    self.turns: list[_Turn] = []


@functools.partial(jax.jit, static_argnums=(0, 1))
def _prepare(config, mesh, params):
  return sharding.constrain(mesh, decoding.prepare(config, params))


class Grower:
  """Grows trees with one policy network in one batched environment.

  Attributes:
    seconds: where the time went so far, by part: `network`, `environment` and
      `records` (nodes and what forks need).
  """

  def __init__(
      self,
      model: transformer.Transformer,
      environment: types.Environment,
      sampler: sampling.SamplerConfig,
      max_turns: int,
      debug: bool = False,
      max_rows: int | None = None,
  ):
    """Compiles nothing yet.

    Args:
      model: the policy network, on whose mesh, if it has one, rows and their
        caches lie.
      environment: an `environments.callbacks.BatchedEnvironment` or its like.
      sampler: how actions are drawn.
      max_turns: actions after which an episode is truncated.
      debug: whether every call checks the trees that it grew.
      max_rows: episodes that run at once, at most; the others wait for a row.
        None runs all of a stage at once. Trees do not depend on it, but for
        what log-probs owe to rounding.

    Raises:
      ValueError: if `max_rows` is below 1 or is not divided by the `data` axis
        of the mesh, or the sampler is not the model's.
    """
    self.model, self.mesh = model, model.mesh
    self.row_multiple = sharding.num_row_parts(self.mesh)
    if max_rows is not None:
      checks.at_least('max_rows', max_rows, 1)
      if max_rows % self.row_multiple:
        raise ValueError(
            f'max_rows: expected a multiple of {self.row_multiple}, which rows'
            f' are parted over by --mesh, got {max_rows}; take another'
            ' --max_rows or --mesh')
    self.debug = debug
    self.max_rows = max_rows
    self.model_config = model.config
    self.environment = environment
    self.max_turns = max_turns
    self.seconds: collections.Counter[str] = collections.Counter()
    self.chunk = 1 + environment.codec.observation_length
    self.action_length = sampler.action_length
    self.turn_length = self.chunk + self.action_length
    held = functools.partial(sharding.held, self.mesh)
    self.prefill = jax.jit(held(decoding.make_prefill(model)), donate_argnums=1)
    # The rows are donated: a turn writes the cache where it lies.
    self.act = jax.jit(
        held(decoding.make_act(model, sampler)), donate_argnums=1)
    self._advance = jax.jit(
        sampling.make_advance(environment.step, max_turns), donate_argnums=0
    )

  def num_rows(self, count: int) -> int:
    """Returns how many rows are run for `count` episodes."""
    num_rows = batches.row_bucket(count, self.row_multiple)
    return min(num_rows, self.max_rows or num_rows)

  def empty_cache(self, num_rows: int, length: int) -> sampling.Cache:
    """Returns a cache for the network, on its mesh."""
    return sampling.empty_cache(
        self.model_config, num_rows, length, self.mesh)

  def advance(
      self, rows: sampling.Rows, actions: sampling.Actions
  ) -> tuple[sampling.Rows, Any]:
    """Steps every active sandbox once, see `sampling.make_advance`.

    On one device, without the cache: among the devices of a mesh, all others
    would wait for the environment in the middle of a program.
    """
    given = rows._replace(cache=None), actions._replace(allowed=None)
    stepped, result = self._advance(*sharding.on_one(self.mesh, given))
    return stepped._replace(cache=rows.cache), result

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
      MemoryError: if the device has too little; it says what to change.
    """
    if not tasks or num_backbones < 1:
      raise ValueError(
          f'expected at least one task and one backbone, got {len(tasks)} and'
          f' {num_backbones}'
      )
    growth = _Growth(self, params, tasks, rng_key, greedy)
    with contextlib.closing(growth), memory.explained_episodes(
        lambda: growth.num_rows, len(tasks), self.row_multiple):
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
      return Rollout(tree, growth.compute, growth.statuses, unspent,
                     growth.utilisation())


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
    self._archive = archive.Archive(grower.model)
    self._builders = [trees.TreeBuilder() for _ in tasks]
    # By the handle of a node that begins at or inside the decision's action.
    self._decisions: list[dict[int, _Decision]] = [{} for _ in tasks]
    self._num_leaves_of = [0] * len(tasks)
    self._num_leaves = 0
    self._handles: list[int] = []
    self.num_rows = grower.num_rows(len(tasks))  # Later, of the stage.
    self._rows_run = 0
    self.compute = Compute(0, 0)
    self.statuses: collections.Counter[int] = collections.Counter()

  def tree(self) -> trees.Tree:
    """Returns the trees as they are now, padded to a bucket."""
    return trees.stack(self._builders)

  def utilisation(self) -> float:
    """Returns the share of all rows of all turns that had an episode."""
    return self.compute.environment_steps / max(1, self._rows_run)

  def close(self) -> None:
    """Gives back every state that was taken."""
    self._grower.environment.release(self._handles)
    self._handles = []

  def lay_backbones(self, num_backbones: int, is_last: bool) -> None:
    """Reads each prompt once and runs the first trajectories from it."""
    num_tasks, environment = len(self._tasks), self._grower.environment
    with memory.explained_parameters():
      self._prepared = _prepare(
          self._grower.model_config, self._grower.mesh, self._params)
    first, prompts = environment.reset(self._tasks, [0] * num_tasks)
    self._handles.extend(first.handles.tolist())
    # A prompt's cache row is that of leaf -1 - tree: of no episode.
    owners = [-1 - tree for tree in range(num_tasks)]
    self._read_prompts(prompts, owners)
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

  def _read_prompts(
      self, prompts: list[list[int]], owners: Sequence[int]
  ) -> None:
    """Keeps a cache row of each prompt, without the prompt's last token."""
    num_rows = self._grower.num_rows(len(prompts))
    width = max(len(prompt) for prompt in prompts) - 1
    width = batches.round_up(max(1, width), _PROMPT_BUCKET)
    size = batches.round_up(width + self._grower.turn_length, _CACHE_BUCKET)
    for start in range(0, len(prompts), num_rows):
      lengths = np.zeros(num_rows, np.int32)
      tokens = np.zeros((num_rows, width), np.int32)
      for row, prompt in enumerate(prompts[start:start + num_rows]):
        lengths[row] = len(prompt) - 1
        tokens[row, : lengths[row]] = prompt[:-1]
      cache = self._grower.empty_cache(num_rows, size)
      cache = self._grower.prefill(self._params, cache, tokens, lengths)
      read = owners[start:start + num_rows]
      self._archive.add(cache, dict(enumerate(read)))

  def _run(
      self,
      decisions: list[_Decision],
      nodes: list[int],
      birth: int,
      is_last: bool,
  ) -> None:
    """Runs an episode from each decision, below its node, to its end."""
    leaves = self._new_leaves(decisions, nodes)
    waiting = collections.deque(leaves)
    if is_last:
      self._archive.keep([leaf.start.leaf for leaf in leaves])
    rows, seats = self._first_rows(waiting)
    active = np.zeros(len(seats), bool)
    while waiting or active.any():
      if not active.all():
        rows, seats = self._fill(rows, seats, active, waiting, is_last)
      rows = self._make_room(rows)
      before = batches.to_host(rows)
      with self._timed('network'):
        rows = sharding.place_rows(
            self._grower.mesh, batches.narrow(rows, before))
        rows, actions = self._grower.act(self._prepared, rows)
        jax.block_until_ready(actions)
      with self._timed('environment'):
        rows, result = self._grower.advance(rows, actions)
        actions, result = jax.device_get((actions, result))
      # First of all, so that whatever fails from here on leaks no state.
      self._handles += result.handles[result.handles > 0].tolist()
      with self._timed('records'):
        self._record(before, actions, result, seats)
      self._grower.environment.raise_pending()
      active = np.array(rows.active)
    if not is_last:
      self._archive.add(rows.cache, _numbers(seats))
    with self._timed('records'):
      self._lay(leaves, birth)

  def _fill(
      self,
      rows: sampling.Rows,
      seats: list[_Leaf | None],
      active: np.ndarray,
      waiting: collections.deque[_Leaf],
      is_last: bool,
  ) -> tuple[sampling.Rows, list[_Leaf | None]]:
    """Gives free rows to who waits; where nobody does, closes the ranks.

    The tail of long episodes would otherwise pay for rows that ended long ago.

    Args:
      rows: the batch.
      seats: whose rows these are.
      active: [R] bool, rows whose episode goes on.
      waiting: episodes to come; those that get a row are taken off.
      is_last: whether nothing is forked from these episodes.
    """
    num_rows = len(seats) if waiting else batches.shrunk_bucket(
        active.sum(), self._grower.row_multiple)
    if not waiting and num_rows >= len(seats):
      return rows, seats
    ended = {row: leaf for row, leaf in enumerate(seats) if not active[row]}
    if not is_last:
      self._archive.put(rows.cache, _numbers(ended))
    if not waiting:
      kept = np.flatnonzero(active)
      nobody = [None] * (num_rows - len(kept))
      rows = batches.close_ranks(rows, kept, num_rows, self._grower.mesh)
      return rows, [*(seats[row] for row in kept), *nobody]
    new = [waiting.popleft() for _ in range(min(len(ended), len(waiting)))]
    seats = [None if row in ended else leaf for row, leaf in enumerate(seats)]
    taken = list(ended)[: len(new)]
    for row, leaf in zip(taken, new):
      seats[row] = leaf
    rows = self._seat(rows, taken, new)
    if is_last:
      self._archive.keep([leaf.start.leaf for leaf in waiting])
    return rows, seats

  @contextlib.contextmanager
  def _timed(self, part: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    self._grower.seconds[part] += time.perf_counter() - start

  def _new_leaves(
      self, decisions: list[_Decision], nodes: list[int]
  ) -> list[_Leaf]:
    """Returns leaves that go on from `nodes`; none has a row yet."""
    leaves = []
    for decision, node in zip(decisions, nodes):
      index = self._num_leaves_of[decision.tree]
      leaves.append(_Leaf(self._num_leaves, index, decision, node))
      self._num_leaves_of[decision.tree] += 1
      self._num_leaves += 1
    return leaves

  def _first_rows(
      self, waiting: Sequence[_Leaf]
  ) -> tuple[sampling.Rows, list[None]]:
    """Returns rows without an episode, of the sizes that are going to run."""
    self.num_rows = num_rows = self._grower.num_rows(len(waiting))
    size = self._archive.length([leaf.start.leaf for leaf in waiting])
    rows = self._columns([waiting[0]] * num_rows)
    cache = self._grower.empty_cache(num_rows, size)
    rows = rows._replace(cache=cache, active=jnp.zeros(num_rows, bool))
    return rows, [None] * num_rows

  def _columns(self, leaves: Sequence[_Leaf]) -> sampling.Rows:
    """Returns rows at the start of each of the leaves, without their cache."""
    starts = [leaf.start for leaf in leaves]
    column = lambda name: np.array([getattr(start, name) for start in starts])
    is_forced = np.arange(self._grower.action_length) < column('kept')[:, None]
    num_rows = len(leaves)
    return sampling.Rows(
        cache=None,
        pending=jnp.asarray(column('pending')),
        pending_length=jnp.asarray(column('pending_length'), jnp.int32),
        commands=jnp.asarray(column('commands')),
        handles=jnp.asarray(column('handle'), jnp.int32),
        active=jnp.ones(num_rows, bool),
        keys=jax.vmap(jax.random.fold_in)(
            self._task_keys[column('tree')],
            np.array([leaf.index for leaf in leaves]),
        ),
        turns=jnp.asarray(column('turn'), jnp.int32),
        greedy=jnp.full(num_rows, self._greedy),
        forced=jnp.asarray(np.where(is_forced, column('action'), 0)),
        num_forced=jnp.asarray(column('kept'), jnp.int32),
    )

  def _seat(
      self, rows: sampling.Rows, taken: Sequence[int], leaves: Sequence[_Leaf]
  ) -> sampling.Rows:
    """Returns the rows with `leaves` at the start in the rows `taken`."""
    place = np.zeros(len(rows.active), int)
    place[taken] = np.arange(len(leaves))
    is_new = np.isin(np.arange(len(place)), taken)
    new = self._columns([leaves[i] for i in place])
    cache, starts = rows.cache, [leaf.start for leaf in leaves]
    cache = self._archive.fork(cache, taken, [start.leaf for start in starts])
    lengths = np.array(cache.lengths)
    lengths[taken] = [start.length for start in starts]
    rows = batches.reseat(is_new, new, rows._replace(cache=None))
    return rows._replace(cache=cache._replace(lengths=jnp.asarray(lengths)))

  def _make_room(self, rows: sampling.Rows) -> sampling.Rows:
    """Returns the rows with a cache that holds one more turn of each."""
    used = np.array(rows.cache.lengths) * np.array(rows.active)
    needed = int(used.max()) + self._grower.turn_length
    if needed <= sampling.cache_length(rows.cache):
      return rows
    size = batches.round_up(needed, _CACHE_BUCKET)
    return batches.widen(rows, size, self._grower.mesh)

  def _record(self, before, actions, result, seats) -> None:
    """Keeps a node for each action of a turn, and what a fork there needs."""
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
      leaf, kept = seats[row], keep[row]
      fields = dict(
          tokens=tokens[row, kept],
          action_mask=is_action[row, kept],
          behaviour_log_probs=log_probs[row, kept],
          entropies=entropies[row, kept],
          allowed=None if allowed is None else allowed[row, kept],
          reward=float(result.rewards[row]),
          terminal=bool(result.terminal[row]),
          truncated=bool(result.truncated[row] and not result.terminal[row]),
          anchor=int(result.anchor[row]),
      )
      leaf.turns.append(_Turn(fields, _Decision(
          leaf.tree, leaf.number, int(before.lengths[row]),
          before.pending[row], int(before.pending_length[row]),
          before.commands[row], int(before.handles[row]),
          int(before.turns[row]), actions.tokens[row],
          int(before.num_forced[row]),
      )))
    self.statuses.update(result.status[before.active].tolist())
    self._rows_run += len(seats)
    self.compute = Compute(
        self.compute.environment_steps + int(before.active.sum()),
        self.compute.generated_tokens + int(is_drawn.sum()),
    )

  def _lay(self, leaves: Sequence[_Leaf], birth: int) -> None:
    """Adds the nodes of all turns, as if the leaves had run side by side."""
    for turn in range(max(len(leaf.turns) for leaf in leaves)):
      for leaf in leaves:
        if turn < len(leaf.turns):
          fields, decision = leaf.turns[turn]
          leaf.node = self._builders[leaf.tree].add(
              leaf.node, birth=birth, **fields)
          self._decisions[leaf.tree][leaf.node] = decision


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


def _numbers(seats: Sequence[_Leaf | None] | Mapping[int, _Leaf | None]
             ) -> dict[int, int]:
  """Returns the number of the leaf of each row that has one."""
  rows = seats.items() if isinstance(seats, Mapping) else enumerate(seats)
  return {row: leaf.number for row, leaf in rows if leaf is not None}

"""Supervised training on a scripted searcher's episodes, kept for reuse.

The searcher acts on what an agent can see, so that every demonstration is one
that the policy could have given. Only episodes that it won are imitated.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import pathlib
import shutil
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np

from bpo_jax import checkpoint
from bpo_jax import learner
from bpo_jax import packing
from bpo_jax import sampling
from bpo_jax import tree as trees
from bpo_jax import types
from bpo_jax import version
from bpo_jax.models import lora
from environments import base
from environments.alfworld import expert as experts
from experiments import assembly
from experiments import configs

FOLDER = 'warm_start'  # In a run's workdir.

_FITTED_GAMES = 300  # Enough to know where things usually lie.
# Counted up when the same flags come to give other parameters.
_VERSION = 2
_PURPOSE = 2**32 - 1  # Apart from the epochs of training, from 0 up.
_MOST_LOST = 20  # Batches without a win before giving up.
_DECISION_BUCKET = 512  # Actions; bounds how many shapes are compiled.


def make_expert(agent: assembly.Agent, noise: float) -> experts.Expert:
  """Returns a searcher that knows the training games' usual places."""
  tasks = agent.environment.tasks('train')
  stride = max(1, len(tasks) // _FITTED_GAMES)
  some = range(0, len(tasks), stride)[:_FITTED_GAMES]
  games = map(agent.environment.game, _playable_ids(agent, tasks, some))
  return experts.Expert(experts.fit(games), noise)


def _playable_ids(
    agent: assembly.Agent, tasks: Sequence[Any], indices: Iterable[int]
) -> Iterator[str]:
  """Yields the ids of the tasks at `indices`, without the broken ones."""
  found = (agent.playable(tasks, int(index)) for index in indices)
  return (task.id for task in found if task is not None)


def demonstrate(
    agent: assembly.Agent,
    expert: experts.Expert,
    tasks: Sequence[Any],
    rng: np.random.Generator,
    max_turns: int,
) -> trees.Tree | None:
  """Returns the searcher's won episodes on `tasks`, a chain each, if any.

  Args:
    agent: gives environment, phrasebook and tokenizer.
    expert: the searcher.
    tasks: tasks or ids to play.
    rng: breaks ties and makes noise.
    max_turns: episodes that take longer are dropped, and so are those with an
      action of more tokens than the policy draws.
  """
  codec = agent.batched.codec
  episodes, commands, actions = [], [], []
  for task in tasks:
    turns, last = expert.play(agent.environment, task, rng, max_turns)
    if not last.terminal or last.reward <= 0:
      continue
    drawn = [_action_tokens(agent, timestep, command)
             for timestep, command in turns]
    if None in drawn:
      continue
    episodes.append((turns, last))
    actions += drawn
    commands += [codec.encode_commands(timestep.available)
                 for timestep, _ in turns]
  if not episodes:
    return None
  allowed = [None] * len(actions)
  if agent.sampler.constrained:
    allowed = _allowed(commands, actions, agent.model.config.vocab_size)
  decisions = iter(zip(actions, allowed))
  return trees.stack(
      [_chain(codec, turns, last, decisions) for turns, last in episodes]
  )


def _action_tokens(
    agent: assembly.Agent, timestep: base.TimeStep, command: str
) -> list[int] | None:
  """Returns an action's tokens as the sampler would have drawn them, if it can.

  A policy that may draw any token says that an action ends: a language model as
  its replies do, any other by token 0. At the most tokens of an action it need
  not say so.
  """
  codec, sampler = agent.batched.codec, agent.sampler
  words = agent.phrasebook.action(command, timestep.available)
  tokens = codec.encode_action(words)
  if not sampler.constrained:
    tokens = (tokens if sampler.stop else tokens + [0])[:sampler.action_length]
  can_be_drawn = codec.decode(timestep.available, np.array(tokens)) == command
  return tokens if can_be_drawn else None


def _allowed(commands, actions, vocab_size: int) -> np.ndarray:
  """Returns [len(actions), U, W] uint32 for lists of both."""
  length = commands[0].shape[1]
  tokens = np.array([a + [0] * (length - len(a)) for a in actions], np.int32)
  padding = -len(tokens) % _DECISION_BUCKET
  widen = lambda x: np.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1))
  bits = _allowed_sets(widen(np.stack(commands)), widen(tokens), vocab_size)
  return np.asarray(bits)[: len(tokens)]


_allowed_sets = jax.jit(sampling.allowed_sets, static_argnums=2)


def _chain(codec, turns, last, decisions) -> trees.TreeBuilder:
  """Lays one episode down as a chain of nodes."""
  builder = trees.TreeBuilder()
  node = builder.add(types.NO_PARENT, codec.encode_prompt(turns[0][0]))
  following = [timestep for timestep, _ in turns[1:]] + [last]
  for (_, command), timestep in zip(turns, following):
    action, allowed = next(decisions)
    shown = []
    if not timestep.done:
      padded, length = codec.encode_observation(timestep, command, action)
      shown = padded[:length].tolist()
    count = len(action)
    if allowed is not None:
      allowed = np.pad(allowed[:count], ((0, len(shown)), (0, 0)))
    node = builder.add(
        node,
        action + shown,
        action_mask=np.arange(count + len(shown)) < count,
        behaviour_log_probs=np.zeros(count + len(shown)),
        allowed=allowed,
        reward=timestep.reward,
        terminal=timestep.terminal,
    )
  return builder


def imitation(tree: trees.Tree) -> types.Credit:
  """Returns credit under which every action token counts alike."""
  ones = jnp.asarray(tree.action_mask, jnp.float32)
  return types.Credit(advantages=ones, weights=ones)


def _demonstrations(
    agent: assembly.Agent, config: configs.TrainConfig
) -> Iterator[trees.Tree]:
  """Yields a batch of demonstrations per update, one batch ahead of time."""
  if not config.num_warm_start_updates:
    return
  expert = make_expert(agent, config.warm_start_noise)
  tasks = agent.environment.tasks('train')
  rng = np.random.default_rng([config.seed, _PURPOSE])
  size = config.warm_start_batch
  order = rng.permutation(len(tasks))
  stream = itertools.cycle(order)

  def batch():
    for _ in range(_MOST_LOST):
      some = itertools.islice(stream, size)
      chosen = list(_playable_ids(agent, tasks, some))
      tree = demonstrate(agent, expert, chosen, rng, agent.grower.max_turns)
      if tree is not None:
        return tree
    raise ValueError(
        f'the searcher won none of {_MOST_LOST * size} games within'
        f' {agent.grower.max_turns} turns by actions of at most'
        f' {agent.sampler.action_length} tokens; raise --max_turns or'
        ' --max_action_tokens, or lower --warm_start_noise'
    )

  with futures.ThreadPoolExecutor(1) as pool:
    ahead = pool.submit(batch)
    for number in range(1, config.num_warm_start_updates + 1):
      tree = ahead.result()
      if number < config.num_warm_start_updates:
        ahead = pool.submit(batch)
      yield tree


def train(
    agent: assembly.Agent,
    params: dict,
    config: configs.TrainConfig,
    progress: Callable[[int, int, float], None],
) -> dict:
  """Returns parameters trained to imitate the searcher.

  Args:
    agent: the policy's network and its environment.
    params: where to start; consumed.
    config: how much and how fast, and the seed of the games' order and of the
      searcher's noise.
    progress: called with updates done, in all, and nats per action token.
  """
  optimizer = learner.make_optimizer(learner.OptimizerConfig())
  update_fn = learner.make_update_fn(
      agent.model, optimizer, learner.imitation_loss
  )
  state = learner.init_state(params, optimizer, jax.random.key(config.seed))
  batches = _demonstrations(agent, config)
  # A demonstration is short: one micro-batch holds all, with little padding.
  max_tokens = min(config.max_tokens, 128 * config.warm_start_batch)
  for update, tree in enumerate(batches, start=1):
    rows = packing.pack(tree, imitation(tree))
    rate = learner.warmup_cosine(
        update / config.num_warm_start_updates, warmup=0.1)
    state, metrics = update_fn(
        state,
        packing.micro_batches(rows, max_tokens),
        config.warm_start_learning_rate * rate,
    )
    progress(update, config.num_warm_start_updates, metrics['loss/imitation'])
  return state.params


def load(
    config: configs.TrainConfig,
    agent: assembly.Agent,
    workdir: pathlib.Path,
    params: dict,
    origin: Mapping[str, str],
) -> dict:
  """Returns the warm-started parameters of a run, kept in its workdir.

  They are made once for all runs that agree on what they depend on.

  Args:
    config: of the run.
    agent: of the run.
    workdir: of the run.
    params: as by `assembly.init_params`.
    origin: as by `assembly.origin_of`.
  """
  if agent.language_model is not None and not config.num_warm_start_updates:
    return params  # It is kept where it came from.
  # What stays as it is need not be kept again.
  trained, frozen = lora.split(params)

  def make():
    # Training consumes what it gets. What is to go on a mesh lies on the host;
    # a copy of it does on the device that trains.
    copy = functools.partial(jax.tree.map, jnp.copy)
    rest = copy(frozen) if config.mesh else frozen
    done = train(agent, lora.join(copy(trained), rest), config, _report)
    return lora.split(done)[0]

  name = fingerprint(config, agent, origin)
  facts = {'fingerprint': name, 'vocabulary': agent.tokenizer.to_dict(),
           **origin}
  shared = assembly.cache_dir(config) / 'warm_start' / name
  _drop_stale(workdir, name)
  return lora.join(
      cached(workdir / FOLDER, trained,
             lambda: cached(shared, trained, make, facts), facts),
      frozen)


def _kept_facts(workdir: pathlib.Path) -> dict[str, Any] | None:
  """Returns what a run's warm start says of itself; None if none is whole."""
  try:
    return checkpoint.find(workdir / FOLDER).extra
  except (OSError, ValueError):
    return None


def _drop_stale(workdir: pathlib.Path, name: str) -> None:
  """Deletes a warm start in a workdir that is not the one of a fingerprint.

  Once there is a checkpoint, though, it is what the run began from, whatever
  version of the code made it.
  """
  kept = _kept_facts(workdir)
  has_begun = checkpoint.latest_step(workdir / 'checkpoints') is not None
  if kept is not None and kept.get('fingerprint') != name and not has_begun:
    logging.warning('The warm start in %s is of another config: it is made'
                    ' anew.', workdir)
    shutil.rmtree(workdir / FOLDER)


def check_kept(
    workdir: pathlib.Path, agent: assembly.Agent, origin: Mapping[str, str]
) -> None:
  """Raises ValueError if a workdir's warm start is of another model.

  See `assembly.check_kept`. One that is missing or spoilt is of none.
  """
  kept = _kept_facts(workdir)
  if kept is not None:
    assembly.check_kept(workdir / FOLDER, kept, agent, origin)


def restore(
    config: configs.TrainConfig,
    agent: assembly.Agent,
    workdir: pathlib.Path,
    params: dict,
    origin: Mapping[str, str],
) -> dict:
  """Returns the parameters that `load` gave a run.

  Args:
    config: of the run.
    agent: of the run.
    workdir: of the run.
    params: as by `assembly.init_params`.
    origin: as by `assembly.origin_of`.

  Raises:
    FileNotFoundError: if they are not there.
    ValueError: if they are corrupted, or of another model.
  """
  if agent.language_model is not None and not config.num_warm_start_updates:
    return params
  trained, frozen = lora.split(params)
  found = checkpoint.restore(workdir / FOLDER, trained)
  assembly.check_kept(workdir / FOLDER, found.extra, agent, origin)
  return lora.join(found.state, frozen)


def _report(update: int, num_updates: int, loss: float) -> None:
  if update % 10 == 0 or update == num_updates:
    logging.info(
        'warm start: update %d of %d, %.3f nats per action token',
        update, num_updates, loss,
    )


def fingerprint(
    config: configs.TrainConfig,
    agent: assembly.Agent,
    origin: Mapping[str, str],
) -> str:
  """Returns a name for all that a warm start depends on."""
  # Where a model and games lie is no matter, but which they are: its origin and
  # their ids say that. Nor is what memory is spent on.
  names = [field.name for field in dataclasses.fields(configs.AgentConfig)
           if field.name not in ('model', 'data', 'remat', 'max_rows')]
  names += [n for n in dir(config) if n.startswith('warm_start_')]
  facts = {name: getattr(config, name) for name in (*names, 'seed')}
  facts |= origin
  if config.data is not None:
    facts['games'] = list(agent.environment.tasks('train').ids)
  facts['vocabulary'] = agent.tokenizer.fingerprint()
  facts['version'] = version.__version__, _VERSION
  text = json.dumps(facts, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def cached(
    directory: pathlib.Path,
    params: dict,
    make: Callable[[], dict],
    facts: Mapping[str, Any] | None = None,
) -> dict:
  """Returns the parameters kept in `directory`, or makes and keeps them.

  A spoilt or half-written cache is made anew, and a full disk costs the cache
  alone, not the run.

  Args:
    directory: where they are kept.
    params: parameters like them.
    make: makes them.
    facts: what is kept beside them, JSON-able.
  """
  if checkpoint.latest_step(directory) is not None:
    try:
      return checkpoint.restore(directory, params).state
    except (OSError, ValueError) as error:
      logging.warning('The kept warm start is of no use: %s', error)
      shutil.rmtree(directory, ignore_errors=True)
  params = make()
  _keep(directory, params, facts)
  return params


def _keep(
    directory: pathlib.Path, params: dict, facts: Mapping[str, Any] | None
) -> None:
  """Saves parameters, unless another run that began alike was faster.

  Runs may start at the same time, so each writes to a folder of its own first.
  """
  own = directory.with_name(f'{directory.name}.{os.getpid()}')
  try:
    checkpoint.save(own, 0, params, facts)
    own.rename(directory)
  except OSError as error:
    if checkpoint.latest_step(directory) is None:
      logging.warning('The warm start could not be kept: %s', error)
    shutil.rmtree(own, ignore_errors=True)

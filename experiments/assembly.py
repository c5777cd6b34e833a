"""Puts environment, phrasebook, network, sampler and optimiser together."""

from collections.abc import Mapping, Sequence
import dataclasses
import logging as python_logging
import os
import pathlib
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
import optax

from bpo_jax import advantages
from bpo_jax import algorithms
from bpo_jax import checkpoint
from bpo_jax import learner
from bpo_jax import options
from bpo_jax import rollout
from bpo_jax import sampling
from bpo_jax import sharding
from bpo_jax import tokenizers
from bpo_jax import variance
from bpo_jax.models import lora
from bpo_jax.models import transformer
import environments
from environments import callbacks
from environments import chat_codec
from environments import codec as codecs
from environments import store as stores
from environments.alfworld import terse
from experiments import configs
from experiments import language_models
from experiments import methods


_NUM_LEVELS = 4  # Of groups within groups that rho is learnt for.


@dataclasses.dataclass(frozen=True)
class Agent:
  """A policy network at home in an environment, without parameters.

  Attributes:
    environment: the sandboxes.
    phrasebook: puts their text in few words.
    tokenizer: puts words in tokens.
    batched: steps many sandboxes at once.
    model: the network.
    sampler: how actions are drawn.
    grower: plays episodes and grows trees.
    language_model: where the network comes from; None for a small one.
    faults: what was wrong with the tasks that `playable` turned down.
  """

  environment: Any
  phrasebook: terse.Terse | chat_codec.Conversation
  tokenizer: tokenizers.Tokenizer
  batched: callbacks.BatchedEnvironment
  model: transformer.Transformer
  sampler: sampling.SamplerConfig
  grower: rollout.Grower
  language_model: language_models.LanguageModel | None = None
  faults: set[str] = dataclasses.field(default_factory=set)

  def playable(self, tasks: Sequence[Any], index: int) -> Any | None:
    """Returns the task at an index, or None where its game is broken.

    What is wrong with a game is reported the first time.
    """
    try:
      task = tasks[index]
      first, _ = self.batched.reset([task], [0])
    except ValueError as error:
      if str(error) not in self.faults:
        logging.warning('A task is passed over: %s', error)
      self.faults.add(str(error))
      return None
    self.batched.release(first.handles)
    return task

  def longest_path(self, task: Any) -> int:
    """Returns how many tokens an episode can have at most, prompt included.

    What the last action leads to is no part of it: nobody acts on it.
    """
    first, (prompt,) = self.batched.reset([task], [0])
    self.batched.release(first.handles)
    turns, codec = self.grower.max_turns, self.batched.codec
    return (len(prompt) + turns * codec.action_length
            + (turns - 1) * codec.observation_length)

  def on(self, mesh: jax.sharding.Mesh | None) -> 'Agent':
    """Returns the agent with its network, and the rows it plays, on a mesh.

    Raises:
      ValueError: if the mesh does not part the network or its rows evenly.
    """
    if mesh is None:
      return self
    sharding.check(mesh, self.model.config)
    model, alone = self.model.clone(mesh=mesh), self.grower
    grower = rollout.Grower(
        model, self.batched, self.sampler, alone.max_turns, alone.debug,
        alone.max_rows)
    return dataclasses.replace(self, model=model, grower=grower)

  def close(self) -> None:
    """Gives everything back; reports the words that had no token."""
    if self.batched.codec.command_collisions:
      logging.warning(
          '%d commands had the tokens of another, and could not be chosen',
          self.batched.codec.command_collisions,
      )
    if self.language_model is None and self.tokenizer.unknown:
      logging.warning(
          '%d words were not in the vocabulary and read as <unk>: %s',
          self.tokenizer.unknown.total(),
          ', '.join(word for word, _ in self.tokenizer.unknown.most_common(9)),
      )
    self.batched.store.close()
    self.environment.close()


def cache_dir(config: Any) -> pathlib.Path:
  """Returns where things are kept that many runs share."""
  if config.cache_dir is not None:
    return pathlib.Path(config.cache_dir)
  home = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  return pathlib.Path(home) / 'bpo_jax'


def begin_logging() -> None:
  """Tells how far a program is, but not which devices JAX did not find."""
  logging.set_verbosity(logging.INFO)
  python_logging.getLogger('jax._src.xla_bridge').setLevel(
      python_logging.WARNING)


def use_compilation_cache(config: Any) -> None:
  """Keeps what XLA compiles for the next run."""
  jax.config.update('jax_compilation_cache_dir', str(cache_dir(config) / 'xla'))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)


def make_environment(config: configs.AgentConfig) -> Any:
  """Returns the environment that the config names."""
  if config.env == 'household':
    return environments.make('household', seed=config.env_seed)
  return environments.make(config.env, data=config.data)


def make_agent(config: configs.AgentConfig) -> Agent:
  """Returns the agent that the config describes.

  Raises:
    ValueError: if the environment's data are not there, or a size is wrong.
  """
  model = None
  if config.model is not None:  # First of all: it may not be there.
    model = language_models.load(config, cache_dir(config))
    network, tokenizer = model.config, model.tokenizer
    phrasebook, codec = model.conversation, model.codec(config)
  else:
    phrasebook = terse.Terse()
    tokenizer = tokenizers.WordTokenizer(phrasebook.vocabulary())
    network = _small_network(config, tokenizer.vocab_size)
    codec = codecs.TextCodec(
        phrasebook, tokenizer,
        observation_length=config.chunk_length,
        action_length=config.action_length,
        max_commands=config.max_commands,
        constrained=config.constrained)
  environment = make_environment(config)
  batched = callbacks.BatchedEnvironment(stores.StateStore(environment), codec)
  sampler = sampling.SamplerConfig(
      action_length=config.action_length,
      constrained=config.constrained,
      temperature=config.temperature,
      stop=() if model is None or config.constrained else tuple(
          (id_,) for id_ in model.turns.stop_ids),
  )
  network = transformer.Transformer(network)
  grower = rollout.Grower(
      network, batched, sampler, config.turn_limit,
      max_rows=config.episodes_at_once)
  return Agent(
      environment, phrasebook, tokenizer, batched, network, sampler, grower,
      model)


def _small_network(
    config: configs.AgentConfig, vocab_size: int
) -> transformer.TransformerConfig:
  """Returns the network that is trained from scratch."""
  return transformer.TransformerConfig(
      vocab_size=vocab_size,
      width=config.width,
      num_layers=config.num_layers,
      num_heads=config.num_heads,
      num_kv_heads=config.num_kv_heads,
      head_dim=config.width // config.num_heads,
      mlp_width=config.mlp_width,
      lora=config.lora,
      remat=config.remat,
      dtype=config.dtype,
  )


def saved(state: learner.TrainState) -> learner.TrainState:
  """Returns what of a state a checkpoint holds: all but frozen weights."""
  own = lambda s: s._replace(params=lora.split(s.params)[0])
  second = state.auxiliary.get('implicit_reward')
  others = {} if second is None else {'implicit_reward': own(second)}
  return own(state)._replace(auxiliary={**state.auxiliary, **others})


def _whole(
    kept: learner.TrainState, like: learner.TrainState
) -> learner.TrainState:
  """The inverse of `saved`, with the frozen weights of a state like it."""
  own = lambda s, t: s._replace(
      params=lora.join(s.params, lora.split(t.params)[1]))
  second = kept.auxiliary.get('implicit_reward')
  others = {} if second is None else {
      'implicit_reward': own(second, like.auxiliary['implicit_reward'])}
  return own(kept, like)._replace(auxiliary={**kept.auxiliary, **others})


def restore(
    workdir: pathlib.Path,
    target: learner.TrainState,
    step: int | None = None,
) -> checkpoint.Restored:
  """Returns a run's checkpoint, which `check_origin` has let pass.

  Args:
    workdir: of the run.
    target: a state like it.
    step: of which update; None for the last one.

  Raises:
    FileNotFoundError: if there is none.
    ValueError: if it is corrupted, or of another model size.
  """
  found = checkpoint.restore(workdir / 'checkpoints', saved(target), step)
  return dataclasses.replace(found, state=_whole(found.state, target))


def origin_of(agent: Agent, params: dict) -> dict[str, str]:
  """Returns what a run from these parameters says in its checkpoints.

  Of weights that are in no checkpoint it is a fingerprint: those of a language
  model lie elsewhere, and those beside the adapters of a small network are
  drawn again.
  """
  if agent.language_model is not None:
    return agent.language_model.origin(params)
  if lora.has_adapters(params):
    return {'base': language_models.fingerprint(params)}
  return {}


def check_origin(
    workdir: pathlib.Path,
    agent: Agent,
    origin: Mapping[str, str],
    step: int | None = None,
) -> None:
  """Refuses a run's checkpoint that did not begin as the agent does.

  Args:
    workdir: of the run.
    agent: that is to go on with it.
    origin: as by `origin_of`.
    step: of which update; None for the last one.

  Raises:
    FileNotFoundError: if there is none.
    ValueError: if it began otherwise.
  """
  extra = checkpoint.find(workdir / 'checkpoints', step).extra
  check_kept(workdir, extra, agent, origin)


def check_kept(
    folder: pathlib.Path,
    kept: Mapping[str, Any],
    agent: Agent,
    origin: Mapping[str, str],
) -> None:
  """Raises ValueError if what was kept did not begin as the agent does.

  Its tokens would stand for other words, or it began from other weights or with
  another chat template.

  Args:
    folder: where it lies.
    kept: what it says of itself, of older ones not all.
    agent: that is to go on with it.
    origin: as by `origin_of`.
  """
  own = agent.tokenizer.to_dict()
  if kept.get('vocabulary', own) != own:
    raise ValueError(
        f'the checkpoint in {folder} is of another vocabulary: its tokens'
        ' would stand for other words; use the version of the code that wrote'
        ' it, or the model that it was trained from'
    )
  if agent.language_model is not None:
    agent.language_model.check_origin(kept, origin, folder)
  elif kept.get('base') not in (None, origin.get('base')):
    raise ValueError(
        f'the checkpoint in {folder} has adapters of other weights: expected'
        f' weights with the fingerprint {kept["base"]}, got'
        f' {origin.get("base")} drawn from the seed; use the versions of the'
        ' code and of JAX, and the kind of device, that wrote it')


def init_params(config: configs.TrainConfig, agent: Agent) -> dict:
  """Returns the parameters that training begins with, before a warm start.

  A language model that is to go on a mesh may be more than one device of it
  holds: it comes to rest in the host's memory.
  """
  rng_key = jax.random.key(config.seed)
  if agent.language_model is not None:
    return agent.language_model.init_params(
        rng_key, _host() if config.mesh else None)
  return transformer.init_params(agent.model.config, rng_key)


def _host() -> jax.Device | None:
  """Returns a device whose memory is the host's; None if JAX has none."""
  try:
    return jax.local_devices(backend='cpu')[0]
  except RuntimeError:  # JAX_PLATFORMS leaves it out.
    return None


def make_optimizer(config: configs.TrainConfig) -> optax.GradientTransformation:
  """Returns the optimiser of reinforcement learning."""
  return learner.make_optimizer(
      learner.OptimizerConfig(
          max_gradient_norm=config.max_gradient_norm,
          weight_decay=config.weight_decay,
      )
  )


def learning_model(
    config: configs.TrainConfig, agent: Agent
) -> transformer.Transformer:
  """Returns the network with the value head that the algorithm may need."""
  has_critic = 'value head' in algorithms.get(config.algorithm).needs
  return agent.model.clone(config=dataclasses.replace(
      agent.model.config, value_head=has_critic))


def init_state(
    config: configs.TrainConfig, agent: Agent, params: dict
) -> learner.TrainState:
  """Returns the state of a run that starts from a policy's parameters.

  What the algorithm needs besides, a value head or a second policy, is added.
  The update consumes the arrays that it is given: these are copies.
  """
  row = algorithms.get(config.algorithm)
  optimizer, rng_key = make_optimizer(config), jax.random.key(config.seed)
  network = learning_model(config, agent).config
  if network.value_head:
    params = transformer.with_value_head(network, params)

  def copy(params):
    trained, frozen = lora.split(params)
    return lora.join(jax.tree.map(jnp.copy, trained), frozen)

  auxiliary = {}
  if 'implicit reward' in row.needs:
    auxiliary['implicit_reward'] = learner.init_state(
        copy(params), optimizer, jnp.copy(rng_key)
    )
  if 'design' in methods.make(config).wants:
    auxiliary['variance_sums'] = variance.init()
  if options.unwrap(row.estimator) is advantages.bpo_rb:
    auxiliary['baseline_sums'] = jnp.zeros((2, _NUM_LEVELS))
  if 'selection slope' in row.needs:
    auxiliary['selection_slope'] = jnp.zeros(2)  # (covariance, variance) sums.
  state = learner.init_state(copy(params), optimizer, jnp.copy(rng_key))
  return state._replace(auxiliary=auxiliary)

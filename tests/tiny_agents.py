"""Policies so small that a test can wait for them, and what a tree must tell.

`household` is the real thing, `corridor` the environment of toys that counts
its states. `replay` plays every path of a tree again from the reset.
"""


import jax
import jax.numpy as jnp
import numpy as np
import toy_environments as toys

from bpo_jax import rollout
from bpo_jax import sampling
from bpo_jax import tree as trees
from bpo_jax import types
from bpo_jax.models import transformer
from environments import base
from environments import callbacks
from environments import codec as codecs
from environments import store as stores
from experiments import assembly
from experiments import configs

SIZES = {'width': 16, 'num_layers': 2, 'num_heads': 4, 'num_kv_heads': 2,
         'mlp_width': 24}


def model(vocab_size=64, **sizes) -> transformer.Transformer:
  sizes = {**SIZES, 'head_dim': 4, **sizes}
  return transformer.Transformer(
      transformer.TransformerConfig(vocab_size=vocab_size, **sizes))


def household(max_turns=6, **overrides) -> assembly.Agent:
  return assembly.make_agent(configs.AgentConfig(
      **{**SIZES, 'max_turns': max_turns, **overrides}))


def corridor(environment=None, like=None, max_turns=8, **sampler
             ) -> rollout.Grower:
  """A grower in the corridor; its words are numbered as if told already.

  Args:
    environment: the corridor.
    like: a grower of like sizes whose compiled functions are taken over.
    max_turns: actions after which an episode is truncated.
    **sampler: fields of the SamplerConfig.
  """
  sampler = sampling.SamplerConfig(**{'action_length': 2, **sampler})
  tokenizer = toys.Tokenizer()
  for text in ('You are in a corridor. go left go right open door take key',
               'You go left. You go right. You open door. You take key.',
               'Turn place Nothing happens.',
               *(f'{i}, {i}.' for i in range(9))):
    tokenizer.encode(text.split())
  codec = codecs.TextCodec(
      toys.Phrasebook(), tokenizer, observation_length=9, action_length=2,
      max_commands=4)
  store = stores.StateStore(environment or toys.Corridor())
  batched = callbacks.BatchedEnvironment(store, codec)
  grower = rollout.Grower(model(96), batched, sampler, max_turns)
  if like is not None:
    grower.act, grower.prefill = like.act, like.prefill
  return grower


def exhaust(*_, **__):
  """Asks the device for more than there is of memory anywhere."""
  return jax.jit(jnp.sort)(jnp.broadcast_to(jnp.float32(1), (1 << 44,)))


def params_of(network: transformer.Transformer, seed=0) -> dict:
  """Random parameters; no norm is all ones, as they are at the start."""
  shapes = jax.eval_shape(
      lambda: transformer.init_params(network.config, jax.random.key(0)))
  rng = np.random.default_rng(seed)

  def draw(path, leaf):
    is_scale = path[-1].key == 'scale'
    noise = rng.normal(size=leaf.shape) * (0.1 if is_scale else 0.25)
    return jnp.asarray(is_scale + noise, jnp.float32)
  return jax.tree_util.tree_map_with_path(draw, shapes)


def num_held(grower: rollout.Grower) -> int:
  return grower.environment.store.metrics()['store/handles']


def random_plan(seed: int, points: int, max_forks: int, birth: int):
  """A branch policy: random decisions of one stage, each forked a few times.

  Its attribute `plans` keeps what it returned.
  """
  def policy(tree):
    tree = jax.tree.map(np.asarray, tree)
    rng = np.random.default_rng(seed)
    num_trees = len(tree.parents)
    node = np.full((num_trees, points), types.UNUSED_SLOT)
    count = np.zeros((num_trees, points), int)
    for b in range(num_trees):
      eligible = tree.node_mask[b] & (tree.birth[b] == birth)
      eligible[0] = False
      nodes = np.flatnonzero(eligible)
      nodes = rng.choice(nodes, min(points, len(nodes)), replace=False)
      node[b, :len(nodes)] = nodes
      count[b, :len(nodes)] = rng.integers(1, max_forks + 1, len(nodes))
    policy.plans.append(types.BranchPlan(
        node=node, offset=np.zeros_like(node), count=count))
    return policy.plans[-1]
  policy.plans = []
  return policy


def leaves(tree: trees.Tree, b: int) -> list[int]:
  nodes = np.flatnonzero(tree.node_mask[b])
  return sorted(set(nodes.tolist()) - set(tree.parents[b, nodes].tolist()))


def path(tree: trees.Tree, b: int, node: int) -> list[int]:
  nodes = []
  while node != types.NO_PARENT:
    nodes.append(node)
    node = int(tree.parents[b, node])
  return nodes[::-1]


def path_tokens(tree: trees.Tree, b: int, leaf: int) -> list[int]:
  return [int(token) for node in path(tree, b, leaf)
          for token in tree.tokens[b, node][tree.token_mask[b, node]]]


def replay(tree, b, task, environment, codec, max_turns=None) -> float:
  """Checks every path of tree b against the environment, text for token.

  Returns:
    The sum of the rewards of all leaves' paths.
  """
  total = 0.0
  for leaf in leaves(tree, b):
    root, *nodes = path(tree, b, leaf)
    state, timestep = environment.reset(task)
    prompt = tree.tokens[b, root][tree.token_mask[b, root]]
    assert prompt.tolist() == codec.encode_prompt(timestep)
    for node in nodes:
      state, timestep, reward = replay_node(
          tree, b, node, state, timestep, environment, codec)
      total += reward
    at_limit = not timestep.terminal and len(nodes) == max_turns
    assert tree.truncated[b, leaf] == (timestep.truncated or at_limit)
    assert tree.terminal[b, leaf] or tree.truncated[b, leaf]
    environment.release(state)
  return total


def replay_node(tree, b, node, state, timestep, environment, codec):
  mask, is_action = tree.token_mask[b, node], tree.action_mask[b, node]
  action = tree.tokens[b, node][is_action]
  command = codec.decode(timestep.available, action)
  following = environment.step(
      state, callbacks.UNKNOWN_ACTION if command is None else command)
  environment.release(state)
  timestep = following[1]
  invalid = timestep.status == base.Status.INVALID_ACTION
  assert (command is None) == invalid
  assert tree.rewards[b, node] == np.float32(timestep.reward)
  assert tree.terminal[b, node] == timestep.terminal
  shown = tree.tokens[b, node][mask & ~is_action].tolist()
  ended = tree.terminal[b, node] or tree.truncated[b, node]
  padded, length = codec.encode_observation(timestep, command or '')
  assert shown == ([] if ended else padded[:length].tolist())
  return (*following, timestep.reward)


def random_trees(seed: int, num_trees=3, num_nodes=9, vocab_size=64,
                 constrained=True) -> trees.Tree:
  """Ragged trees as a rollout leaves them, of random tokens."""
  rng = np.random.default_rng(seed)
  builders = []
  for _ in range(num_trees):
    builder = trees.TreeBuilder()
    prompt = rng.integers(2, vocab_size, rng.integers(1, 6))
    builder.add(types.NO_PARENT, prompt)
    for n in range(1, num_nodes):
      actions = int(rng.integers(1, 4))
      length = actions + int(rng.integers(0, 4))
      tokens = rng.integers(2, vocab_size, length)
      allowed = rng.random((length, vocab_size)) < 0.3
      allowed[np.arange(length), tokens] = True
      bits = np.asarray(sampling.pack_bits(allowed)) if constrained else None
      builder.add(
          int(rng.integers(max(0, n - 3), n)), tokens,
          action_mask=np.arange(length) < actions,
          behaviour_log_probs=-3 * rng.random(length), allowed=bits,
          reward=float(rng.normal()))
    builders.append(builder)
  return trees.stack(builders)


def allowed_sets(tree: trees.Tree) -> np.ndarray:
  """[B, N, T, W]: the sets of a tree, and all tokens where it has none."""
  num_sets, num_words = tree.allowed.shape[2:]
  sets = np.full((*tree.tokens.shape, num_words), 0xFFFFFFFF, np.uint32)
  sets[:, :, :num_sets] = tree.allowed
  return sets


def random_credit(tree: trees.Tree, seed: int) -> types.Credit:
  rng = np.random.default_rng(seed)
  mask = np.asarray(tree.action_mask)
  draw = lambda low, high: np.where(
      mask, rng.uniform(low, high, mask.shape), 0).astype(np.float32)
  return types.Credit(advantages=draw(-2, 2), weights=draw(0.1, 2))

"""Demonstrations, imitation of them, and what is kept of it."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_agents as tiny
import tiny_runs

from bpo_jax import checkpoint
from bpo_jax import learner
from bpo_jax import packing
from bpo_jax import sampling
from experiments import assembly
from experiments import configs
from experiments import train
from experiments import warm_start

NUM_TASKS = 4


@pytest.fixture(scope='module')
def agent():
  made = tiny.household(max_turns=40)
  yield made
  made.close()


@pytest.fixture(scope='module')
def expert(agent):
  patch = pytest.MonkeyPatch()
  patch.setattr(warm_start, '_FITTED_GAMES', 8)
  yield warm_start.make_expert(agent, noise=0.1)
  patch.undo()


def demonstrate(agent, expert, tasks, seed=0, max_turns=40):
  rng = np.random.default_rng(seed)
  return warm_start.demonstrate(agent, expert, tasks, rng, max_turns)


@pytest.fixture(scope='module')
def demonstrations(agent, expert):
  """The tasks that the searcher wins, and its episodes on them."""
  tasks = agent.environment.tasks('train')[:NUM_TASKS]
  return won(agent, expert, tasks), demonstrate(agent, expert, tasks)


def won(agent, expert, tasks):
  """The tasks of which a demonstration is kept."""
  rng = np.random.default_rng(0)
  kept = []
  for task in tasks:
    _, last = expert.play(agent.environment, task, rng, 40)
    if last.reward > 0:
      kept.append(task)
  return kept


def test_demonstrations_are_won_episodes_token_for_token(
    agent, demonstrations):
  tasks, tree = demonstrations
  tree.validate()
  assert len(tree.parents) == len(tasks) >= NUM_TASKS // 2
  for b, task in enumerate(tasks):
    assert len(tiny.leaves(tree, b)) == 1
    reward = tiny.replay(
        tree, b, task, agent.environment, agent.batched.codec)
    assert reward == 1.0
    assert tree.terminal[b, tiny.leaves(tree, b)[0]]


def test_what_is_imitated_could_have_been_drawn(agent, demonstrations):
  tasks, tree = demonstrations
  allowed = np.asarray(sampling.unpack_bits(tiny.allowed_sets(tree)))
  taken = np.take_along_axis(allowed, tree.tokens[..., None], axis=-1)[..., 0]
  assert taken[tree.action_mask].all()
  environment, codec = agent.environment, agent.batched.codec
  for b, task in enumerate(tasks):
    state, timestep = environment.reset(task)
    for node in tiny.path(tree, b, tiny.leaves(tree, b)[0])[1:]:
      tokens = tree.tokens[b, node][tree.action_mask[b, node]]
      commands = [c[c > 0].tolist()
                  for c in codec.encode_commands(timestep.available)]
      for i in range(len(tokens)):
        expected = {c[i] for c in commands
                    if len(c) > i and c[:i] == tokens[:i].tolist()}
        assert set(np.flatnonzero(allowed[b, node, i])) == expected
      command = codec.decode(timestep.available, tokens)
      state, timestep = environment.step(state, command)


def test_a_free_action_is_ended_by_token_zero(agent, expert):
  free = tiny.household(
      max_turns=40, constrained=False, max_action_tokens=4)
  tasks = agent.environment.tasks('train')[:2]
  tree, expected = (demonstrate(a, expert, tasks) for a in (free, agent))
  tree.validate()
  free.close()
  assert tree.allowed is None and len(tree.parents) == len(expected.parents)
  for b in range(len(tree.parents)):
    for node in range(1, tree.node_mask[b].sum()):
      got, words = (
          t.tokens[b, node][t.action_mask[b, node]] for t in (tree, expected))
      assert got.tolist() == [*words, 0]


def test_games_that_take_too_long_are_left_out(agent, expert):
  tasks = agent.environment.tasks('train')[:2]
  assert demonstrate(agent, expert, tasks, max_turns=1) is None


def test_every_action_token_counts_alike(demonstrations):
  _, tree = demonstrations
  credit = warm_start.imitation(tree)
  np.testing.assert_array_equal(credit.weights, tree.action_mask)
  np.testing.assert_array_equal(credit.advantages, tree.action_mask)


@pytest.mark.slow  # Compiles a gradient of long rows.
def test_imitation_learns_a_batch_by_heart(agent, demonstrations):
  _, tree = demonstrations
  rows = packing.pack(tree, warm_start.imitation(tree))
  optimizer = learner.make_optimizer(learner.OptimizerConfig())
  update = learner.make_update_fn(
      agent.model, optimizer, learner.imitation_loss)
  state = learner.init_state(
      tiny.params_of(agent.model), optimizer, jax.random.key(0))
  losses = []
  for _ in range(12):
    state, metrics = update(
        state, packing.micro_batches(rows, 100_000), 1e-2)
    losses.append(metrics['loss/imitation'])
  assert losses[-1] < 0.7 * losses[0]
  assert np.mean(np.diff(losses) < 0) > 0.7


def config(**overrides):
  return configs.TrainConfig(
      **{**tiny.SIZES, 'max_turns': 40, 'warm_start_updates': 3,
         'warm_start_batch': 2, 'warm_start_noise': 0.0, 'max_tokens': 4096,
         **overrides})


@pytest.mark.slow  # Compiles a gradient for several lengths.
def test_a_warm_start_is_a_function_of_its_config(
    agent, monkeypatch, tmp_path):
  monkeypatch.setattr(warm_start, '_FITTED_GAMES', 8)
  seen = []
  make = lambda: warm_start.train(
      agent, jax.tree.map(jnp.copy, tiny.params_of(agent.model)), config(),
      lambda *facts: seen.append(facts))
  first, second = make(), make()
  jax.tree.map(np.testing.assert_array_equal, first, second)
  assert [facts[:2] for facts in seen] == [(1, 3), (2, 3), (3, 3)] * 2
  assert all(0 < loss < 10 for _, _, loss in seen)
  assert not np.array_equal(
      first['embedding']['embedding'],
      tiny.params_of(agent.model)['embedding']['embedding'])
  # A run keeps it in its own folder and in one that runs share.
  chosen = config(cache_dir=str(tmp_path / 'shared'))
  load = lambda folder: warm_start.load(
      chosen, agent, tmp_path / folder,
      jax.tree.map(jnp.copy, tiny.params_of(agent.model)), {})
  loaded = load('one')
  monkeypatch.setattr(warm_start, 'train', None)  # Is not called again.
  for folder in ('one', 'two'):
    jax.tree.map(np.testing.assert_array_equal, load(folder), loaded)


def test_a_warm_start_of_another_run_is_made_anew(
    agent, monkeypatch, tmp_path):
  monkeypatch.setattr(
      warm_start, 'train',
      lambda agent, params, config, report: jax.tree.map(
          lambda x: x + config.seed, params))
  start = tiny.params_of(agent.model)

  def load(seed):
    chosen = config(seed=seed, cache_dir=str(tmp_path / 'shared'))
    params = warm_start.load(chosen, agent, tmp_path / 'run', start, {})
    return float((params['final_norm']['scale']
                  - start['final_norm']['scale']).mean().round(2))

  assert [load(seed) for seed in (1, 2, 2, 1)] == [1, 2, 2, 1]
  # From a checkpoint on it is what the run began with, whoever goes on.
  checkpoint.save(tmp_path / 'run' / 'checkpoints', 1, start)
  assert load(2) == 1


@pytest.mark.parametrize('says_whose', [True, False])
def test_a_run_in_the_folder_of_a_dead_one_begins_anew(
    says_whose, tmp_path, monkeypatch):
  def die(*_):
    raise RuntimeError('killed')

  first = tiny_runs.config(tmp_path, seed=1)
  with monkeypatch.context() as patch, pytest.raises(RuntimeError):
    patch.setattr(assembly, 'init_state', die)
    train.set_up(first)
  folder = tmp_path / 'run' / warm_start.FOLDER
  assert checkpoint.latest_step(folder) == 0
  if not says_whose:  # As versions before this one kept it.
    shutil.rmtree(folder)
    agent = assembly.make_agent(first)
    checkpoint.save(folder, 0, assembly.init_params(first, agent))
    agent.close()
  ready = train.set_up(dataclasses.replace(first, seed=2))
  ready.agent.close()
  wanted = assembly.init_params(ready.config, ready.agent)
  assert tiny_runs.bits(ready.reference) == tiny_runs.bits(wanted)


def test_the_fingerprint_tells_what_a_warm_start_depends_on(agent):
  name = warm_start.fingerprint(config(), agent, {})
  for field, value in (
      ('seed', 1), ('width', 32), ('warm_start_batch', 3), ('env_seed', 1),
      ('warm_start_noise', 0.2), ('max_turns', 41)):
    other = config(**{field: value})
    assert warm_start.fingerprint(other, agent, {}) != name
  for field, value in (
      ('algorithm', 'grpo'), ('updates', 9), ('workdir', 'x'), ('max_rows', 2),
      ('max_tokens', 64), ('row_length', 64), ('remat', 'none')):
    other = config(**{field: value})
    assert warm_start.fingerprint(other, agent, {}) == name
  assert warm_start.fingerprint(config(), agent, {'base': 'other'}) != name


def test_the_fingerprint_tells_games_and_not_where_they_are(tmp_path):
  def name_of(folder, num_games):
    tiny_runs.write_games(tmp_path / folder, train=num_games)
    chosen = config(env='alfworld', data=str(tmp_path / folder))
    made = assembly.make_agent(chosen)
    made.close()
    return warm_start.fingerprint(chosen, made, {})

  assert name_of('there', 2) == name_of('moved', 2) != name_of('more', 3)


# What is kept.


def params(value):
  return {'layer': {'kernel': jnp.full((3, 2), value)}, 'scale': jnp.ones(4)}


def test_what_was_made_is_kept(tmp_path):
  made = warm_start.cached(tmp_path / 'x', params(0.0), lambda: params(2.0))
  kept = warm_start.cached(tmp_path / 'x', params(0.0), None)
  for result in (made, kept):
    jax.tree.map(np.testing.assert_array_equal, result, params(2.0))


@pytest.mark.parametrize('spoil', ['garbage', 'missing', 'other shapes'])
def test_a_spoilt_cache_is_made_anew(tmp_path, spoil):
  warm_start.cached(tmp_path, params(0.0), lambda: params(2.0))
  files = [path for path in tmp_path.rglob('*') if path.is_file()]
  target = params(0.0)
  if spoil == 'garbage':
    for path in files:
      path.write_bytes(b'\0spoilt')
  elif spoil == 'missing':
    for path in files:
      path.unlink()
  else:
    target['scale'] = jnp.ones(5)
  wanted = jax.tree.map(lambda x: x + 3, target)
  for make in (lambda: wanted, None):  # Made once, then kept again.
    result = warm_start.cached(tmp_path, target, make)
    jax.tree.map(np.testing.assert_array_equal, result, wanted)


def test_a_full_disk_costs_the_cache_alone(tmp_path, monkeypatch):
  def save(*_, **__):
    raise OSError(28, 'No space left on device')
  monkeypatch.setattr(checkpoint, 'save', save)
  made = warm_start.cached(tmp_path / 'x', params(0.0), lambda: params(2.0))
  jax.tree.map(np.testing.assert_array_equal, made, params(2.0))


def test_a_file_in_the_way_costs_the_cache_alone(tmp_path):
  (tmp_path / 'file').write_text('')
  made = warm_start.cached(
      tmp_path / 'file' / 'x', params(0.0), lambda: params(2.0))
  jax.tree.map(np.testing.assert_array_equal, made, params(2.0))

"""Trees grown by a tiny policy: token in, token out, and nothing kept."""

import collections

import jax
import numpy as np
import pytest
import tiny_agents as tiny
import toy_environments as toys

from bpo_jax import archive
from bpo_jax import batches
from bpo_jax import packing
from bpo_jax import rollout
from bpo_jax import sampling
from bpo_jax import tree as trees
from bpo_jax import types
from environments import base

MAX_TURNS = 6


class Stop(BaseException):
  """As KeyboardInterrupt: no Exception."""


@pytest.fixture(
    scope='module',
    params=[(True, 0.6), (False, 1.7)],
    ids=['constrained', 'free'],
)
def grown(request):
  """Household trees with forks, and forks of forks, and the way they grew."""
  constrained, temperature = request.param
  agent = tiny.household(
      MAX_TURNS, constrained=constrained, temperature=temperature)
  params = tiny.params_of(agent.model)
  tasks = agent.environment.tasks('train')[:2]
  branch = [tiny.random_plan(0, points=3, max_forks=2, birth=0),
            tiny.random_plan(1, points=3, max_forks=2, birth=1)]
  result = agent.grower.grow(
      params, tasks, jax.random.key(3), num_backbones=2, branch=branch)
  yield agent, params, tasks, branch, result
  agent.close()


def test_trees_are_sound(grown):
  _, _, _, branch, result = grown
  tree = result.tree
  tree.validate()
  planned = sum(policy.plans[0].count.sum(axis=1) for policy in branch)
  for b in range(2):
    assert len(tiny.leaves(tree, b)) == 2 + planned[b]
  for stage, policy in enumerate(branch, start=1):
    # A fork of a node is a child of the node's parent.
    for b in range(2):
      plan = policy.plans[0]
      expected = collections.Counter()
      for node, count in zip(plan.node[b], plan.count[b]):
        if count:
          expected[int(tree.parents[b, node])] += int(count)
      new = np.flatnonzero(tree.birth[b] == stage)
      above = tree.parents[b, new]
      starts = above[tree.birth[b, above] != stage]
      assert collections.Counter(starts.tolist()) == expected
  depths = [len(tiny.path(tree, b, leaf))
            for b in range(2) for leaf in tiny.leaves(tree, b)]
  assert max(depths) == 1 + MAX_TURNS
  assert (tree.birth == 2).any()


def test_what_is_counted_is_in_the_tree(grown):
  result = grown[-1]
  assert result.compute.environment_steps == (
      result.tree.node_mask.sum() - len(result.tree.parents))
  assert result.compute.generated_tokens == result.tree.action_mask.sum()
  assert sum(result.statuses.values()) == result.compute.environment_steps


def learner_computes_what_was_recorded(agent, params, tree, births):
  ones = np.asarray(tree.action_mask, np.float32)
  rows = packing.pack(tree, types.Credit(advantages=ones, weights=ones))
  values = jax.jit(
      lambda p, r: packing.token_log_probs(
          agent.model, p, r, agent.sampler.temperature)
  )(params, rows)
  log_probs, entropies = (
      np.asarray(packing.unpack(x, rows, tree.tokens.shape)) for x in values)
  for birth in births:
    mask = tree.action_mask & (tree.birth == birth)[..., None]
    assert mask.sum() > 10
    np.testing.assert_allclose(
        log_probs[mask], tree.behaviour_log_probs[mask], atol=1e-5)
    np.testing.assert_allclose(entropies[mask], tree.entropies[mask], atol=1e-5)
  assert np.ptp(tree.behaviour_log_probs[tree.action_mask]) > 0.5
  off = ~tree.action_mask
  assert not tree.behaviour_log_probs[off].any() and not log_probs[off].any()


def test_learner_computes_what_the_sampler_recorded(grown):
  agent, params, _, _, result = grown
  learner_computes_what_was_recorded(agent, params, result.tree, range(3))


def test_every_path_replays_from_the_reset(grown):
  agent, _, tasks, _, result = grown
  for b, task in enumerate(tasks):
    tiny.replay(result.tree, b, task, agent.environment, agent.batched.codec,
                MAX_TURNS)


def test_only_admissible_commands_are_drawn(grown):
  agent, _, _, _, result = grown
  invalid = result.statuses.get(base.Status.INVALID_ACTION, 0)
  if agent.sampler.constrained:
    assert not invalid
  else:
    assert invalid  # A free policy of random weights knows no command.
    assert result.tree.allowed is None
    return
  allowed = np.asarray(
      sampling.unpack_bits(tiny.allowed_sets(result.tree)))
  taken = np.take_along_axis(allowed, result.tree.tokens[..., None], axis=-1)
  assert taken[result.tree.action_mask].all()
  sizes = allowed.sum(axis=-1)[result.tree.action_mask]
  assert (sizes < 112).all()


def test_all_states_are_given_back(grown):
  assert tiny.num_held(grown[0].grower) == 0


# In the corridor: episodes end at different turns and are often won.


@pytest.fixture(scope='module')
def corridor():
  grower = tiny.corridor()
  model_params = tiny.params_of(tiny.model(96))
  return grower, model_params


def tokens_of(tree, b):
  """Everything a tree holds, padding aside, in the order of its nodes."""
  num_nodes = tree.node_mask[b].sum()
  nodes = []
  for n in range(num_nodes):
    tokens = tree.tokens[b, n][tree.token_mask[b, n]].tolist()
    nodes.append((
        int(tree.parents[b, n]), tokens, float(tree.rewards[b, n]),
        bool(tree.terminal[b, n]), int(tree.birth[b, n])))
  return nodes


def stages():
  return [tiny.random_plan(0, 2, 2, birth=0)]


def test_corridor_is_won_and_replays(corridor):
  grower, params = corridor
  environment = toys.Corridor()
  tasks = environment.tasks('train')
  result = grower.grow(
      params, tasks, jax.random.key(0), num_backbones=2,
      branch=[tiny.random_plan(0, 1, 2, birth=0)])
  won = sum(
      tiny.replay(result.tree, b, task, environment, grower.environment.codec,
                  grower.max_turns)
      for b, task in enumerate(tasks))
  assert won >= 2
  assert environment.num_live == 0
  assert grower.environment.store.environment.num_live == 0


def test_other_tasks_of_the_batch_change_nothing(corridor):
  grower, params = corridor
  key = jax.random.key(1)

  def grow(*names):
    tasks = [f'train/{name}' for name in names]
    return grower.grow(params, tasks, key, num_backbones=2).tree
  reference = grow(0, 3)
  for names, index in (((1, 3), 1), ((2, 3, 1, 0), 1), ((0,), 0), ((0, 1), 0)):
    assert tokens_of(grow(*names), index) == tokens_of(reference, index)
  assert tokens_of(grow(3, 0), 0) != tokens_of(reference, 1)


def test_leaves_of_one_task_differ(corridor):
  grower, params = corridor
  tree = grower.grow(
      params, ['train/3'] * 2, jax.random.key(2), num_backbones=4).tree
  paths = {tuple(tiny.path_tokens(tree, b, leaf))
           for b in range(2) for leaf in tiny.leaves(tree, b)}
  # Two draws may agree by chance; were keys shared, four would.
  assert len(paths) > 5


def test_equal_keys_grow_equal_trees(corridor):
  grower, params = corridor
  grow = lambda seed: grower.grow(
      params, ['train/2', 'train/3'], jax.random.key(seed), 2, stages()).tree
  first, second, other = grow(0), grow(0), grow(1)
  jax.tree.map(np.testing.assert_array_equal, first, second)
  assert tokens_of(first, 0) != tokens_of(other, 0)


@pytest.mark.slow  # Compiles for every shape that a batch passes through.
def test_compaction_and_growth_of_the_cache_change_nothing(
    corridor, monkeypatch):
  grower, params = corridor
  grow = lambda: grower.grow(
      params, ['train/1', 'train/3'], jax.random.key(4), 4,
      [tiny.random_plan(0, 2, 1, birth=0), tiny.random_plan(1, 2, 1, birth=1)])
  expected = grow()
  monkeypatch.setattr(batches, '_MIN_ROWS', 4)
  monkeypatch.setattr(rollout, '_CACHE_BUCKET', 64)
  shapes = set()
  act = grower.act

  def watched(params, rows):
    shapes.add(rows.cache.key_values.keys[0].shape[0:3:2])
    return act(params, rows)
  monkeypatch.setattr(grower, 'act', watched)
  result = grow()
  assert len({rows for rows, _ in shapes}) > 1
  assert len({size for _, size in shapes}) > 1
  for b in range(2):
    assert tokens_of(result.tree, b) == tokens_of(expected.tree, b)
  np.testing.assert_allclose(
      result.tree.behaviour_log_probs, expected.tree.behaviour_log_probs,
      atol=1e-5)
  assert result.compute == expected.compute


def assert_same_trees(result, expected):
  for name in ('tokens', 'token_mask', 'action_mask', 'parents', 'node_mask',
               'rewards', 'terminal', 'truncated', 'birth', 'anchor'):
    np.testing.assert_array_equal(
        getattr(result.tree, name), getattr(expected.tree, name))
  for name in ('behaviour_log_probs', 'entropies'):
    np.testing.assert_allclose(
        getattr(result.tree, name), getattr(expected.tree, name), atol=1e-5)
  assert result[1:4] == expected[1:4]


@pytest.mark.parametrize('max_rows', [1, 3])
def test_how_many_rows_are_run_at_once_changes_no_tree(
    corridor, like_with, max_rows):
  grower, params = corridor
  grow = lambda grower: grower.grow(
      params, ['train/1', 'train/3'], jax.random.key(4), 3,
      [tiny.random_plan(0, 3, 2, birth=0), tiny.random_plan(1, 3, 2, birth=1)])
  expected, few = grow(grower), like_with(max_rows)
  shapes = set()
  act = few.act

  def watched(params, rows):
    shapes.add((len(rows.active), sampling.cache_length(rows.cache)))
    assert len(rows.active) == max_rows
    return act(params, rows)
  few.act = watched
  result = grow(few)
  assert len(shapes) == 1
  assert_same_trees(result, expected)
  # Whoever ends early makes room: hardly a row is run for nobody.
  assert result.utilisation > max(0.75, expected.utilisation)
  assert held(few) == (0, 0)


@pytest.fixture(name='like_with')
def _like_with(corridor):
  """Returns a corridor with as many rows at once."""
  def make(max_rows):
    grower = tiny.corridor(like=corridor[0])
    grower.max_rows = max_rows
    return grower
  return make


def test_rows_that_are_filled_again_lose_nothing_of_a_growing_cache(
    corridor, like_with, monkeypatch):
  grower, params = corridor
  plans = lambda: [tiny.random_plan(s, 4, 2, birth=s) for s in range(3)]
  grow = lambda grower: grower.grow(
      params, ['train/3'], jax.random.key(6), 5, plans())
  expected = grow(grower)
  monkeypatch.setattr(rollout, '_CACHE_BUCKET', 32)
  assert_same_trees(grow(like_with(3)), expected)


def test_only_what_a_fork_inherits_is_kept(corridor, like_with, monkeypatch):
  _, params = corridor
  grower = like_with(2)
  kept, archives = [], []

  class Watched(archive.Archive):
    """Counts its caches."""

    def __init__(self, config):
      super().__init__(config)
      archives.append(self)

    def keep(self, leaves):
      before = len(self._caches)
      super().keep(leaves)
      kept.append((before, len(self._caches), len(leaves)))
      assert set(self._caches) == {self._place[leaf][0] for leaf in leaves}
  monkeypatch.setattr(archive, 'Archive', Watched)
  grower.grow(params, ['train/1', 'train/3'], jax.random.key(0), 4)
  grower.grow(params, ['train/1', 'train/3'], jax.random.key(0), 4,
              [tiny.random_plan(0, 2, 2, birth=0)])
  # pylint: disable=protected-access
  assert [len(one._caches) for one in archives] == [0, 0]
  # Eight episodes through two rows: their rows took four caches, not eight.
  assert max(before for before, _, _ in kept) <= 1 + 4 + 1


@pytest.mark.parametrize('max_rows', [0, -3])
def test_rows_for_nobody_are_told(corridor, max_rows):
  with pytest.raises(ValueError, match=f'max_rows.*at least 1, got {max_rows}'):
    rollout.Grower(
        tiny.model(96), corridor[0].environment,
        sampling.SamplerConfig(action_length=2), 8, max_rows=max_rows)


def test_greedy_needs_no_key(corridor):
  grower, params = corridor
  grow = lambda seed: grower.grow(
      params, ['train/2', 'train/3'], jax.random.key(seed), greedy=True).tree
  one, other = grow(0), grow(1)
  jax.tree.map(np.testing.assert_array_equal, one, other)
  mask = one.action_mask
  # The likeliest of n tokens has a probability of 1 / n at least.
  sizes = np.asarray(
      sampling.unpack_bits(tiny.allowed_sets(one))).sum(axis=-1)
  assert (one.behaviour_log_probs[mask] > -np.log(sizes[mask]) - 1e-6).all()


def test_row_buckets():
  assert [batches.row_bucket(n) for n in (1, 16, 17, 25, 33, 49, 65)] == [
      16, 16, 24, 32, 48, 64, 96]
  assert [batches.shrunk_bucket(n) for n in (1, 16, 17, 33)] == [16, 16, 32, 64]
  assert [batches.chunk_bucket(n, 100) for n in (1, 32, 33, 65, 100)] == [
      32, 32, 64, 100, 100]
  assert batches.chunk_bucket(3, 10) == 10


# What goes wrong.


class Trap(toys.Corridor):
  """Raises on one action; with `error`, something worse than a RuntimeError."""

  def __init__(self, action, error=RuntimeError):
    super().__init__()
    self.action, self.error = action, error

  def step(self, state, action):
    if action == self.action:
      raise self.error('a trap')
    return super().step(state, action)


def held(grower):
  return (tiny.num_held(grower),
          grower.environment.store.environment.num_live)


def test_an_error_of_the_environment_ends_that_episode_alone(corridor):
  grower, params = corridor
  tasks = [f'train/{i}' for i in range(4)]
  grow = lambda grower: grower.grow(
      params, tasks, jax.random.key(5), num_backbones=3)
  trapped = tiny.corridor(Trap('take key'), like=grower)
  plain, result = grow(grower), grow(trapped)
  result.tree.validate()
  key = toys_tokens(grower, 'take', 'key')
  num_trapped = 0
  for b in range(4):
    kept = []
    for leaf in tiny.leaves(plain.tree, b):
      nodes = []
      for node in tiny.path(plain.tree, b, leaf):
        nodes.append(action_of(plain.tree, b, node))
        if nodes[-1] == key:
          break
      kept.append(nodes)
    got = [[action_of(result.tree, b, node)
            for node in tiny.path(result.tree, b, leaf)]
           for leaf in tiny.leaves(result.tree, b)]
    assert sorted(got) == sorted(kept)
    for leaf in tiny.leaves(result.tree, b):
      if action_of(result.tree, b, leaf) == key:
        num_trapped += 1
        assert result.tree.truncated[b, leaf]
        assert not result.tree.terminal[b, leaf]
        assert result.tree.rewards[b, leaf] == 0
  assert 0 < num_trapped < 12
  assert result.statuses[base.Status.ERROR] == num_trapped
  assert held(trapped) == (0, 0)


def toys_tokens(grower, *words):
  # pylint: disable=protected-access
  return grower.environment.codec._tokenizer.encode(words)


def action_of(tree, b, node):
  return tree.tokens[b, node][tree.action_mask[b, node]].tolist()


@pytest.mark.parametrize('environment, error', [
    (lambda: Trap('go right', Stop), Stop),
    (lambda: Trap('go right', KeyboardInterrupt), KeyboardInterrupt),
    (toys.Priceless, ValueError),
])
def test_an_end_by_the_environment_leaves_no_state(
    corridor, environment, error):
  grower = tiny.corridor(environment(), like=corridor[0])
  with pytest.raises(error):
    grower.grow(corridor[1], ['train/2', 'train/3'], jax.random.key(0), 3)
  assert held(grower) == (0, 0)
  assert grower.environment.pending_error is None


@pytest.mark.parametrize('error', [ValueError, KeyboardInterrupt])
def test_an_end_by_the_branch_policy_leaves_no_state(corridor, error):
  grower, params = corridor

  def policy(_):
    assert held(grower) > (0, 0)
    raise error('no plan')
  with pytest.raises(error, match='no plan'):
    grower.grow(params, ['train/2'], jax.random.key(0), 1, [policy])
  assert held(grower) == (0, 0)


@pytest.mark.filterwarnings('ignore:Explicitly requested dtype')
@pytest.mark.parametrize('part, multiple, advice', [
    ('act', 1, 'episodes at once.*max_rows=8; fewer trees'),
    # Rows that a mesh parts three ways cannot be halved.
    ('act', 3, 'episodes at once.*max_rows=6; fewer trees'),
    ('act', 16, 'episodes at once.*: fewer trees'),
    ('_prepare', 1, r'the parameters and their copies\..*: a smaller network')])
def test_want_of_memory_says_what_to_change_and_leaves_no_state(
    corridor, monkeypatch, part, multiple, advice):
  grower, params = corridor
  monkeypatch.setattr(grower, 'num_rows', lambda count: 16)
  monkeypatch.setattr(grower, 'row_multiple', multiple)
  monkeypatch.setattr(
      grower if part == 'act' else rollout, part, tiny.exhaust)
  with pytest.raises(MemoryError, match=advice):
    grower.grow(params, ['train/1', 'train/2'], jax.random.key(0))
  assert held(grower) == (0, 0)


def test_parameters_that_are_no_numbers_leave_no_state(corridor):
  grower, params = corridor
  spoilt = jax.tree.map(lambda x: x * np.nan, params)
  with pytest.raises(ValueError, match='finite'):
    grower.grow(spoilt, ['train/2'], jax.random.key(0))
  assert held(grower) == (0, 0)


def one_fork(node, offset, count=1, unspent=None):
  """A branch policy: the first tree is forked there, and nothing else."""
  def policy(tree):
    shape = (len(tree.parents), 1)
    at = lambda value, other: np.where(np.arange(shape[0]) == 0, value, other)
    return types.BranchPlan(
        node=at(node, -1).reshape(shape), offset=at(offset, 0).reshape(shape),
        count=at(count, 0).reshape(shape), unspent=unspent)
  return policy


@pytest.mark.parametrize('node, offset', [
    (0, 0), (0, 1), (-1, 0), (1, -1), (2, 2), (2, 99), (200, 0)])
def test_a_fork_must_be_at_an_action_token(corridor, node, offset):
  grower, params = corridor
  where = f'node {node} at offset {offset} of tree 0, which is none'
  with pytest.raises(ValueError, match=f'action token, .* got {where}'):
    grower.grow(params, ['train/3'], jax.random.key(0), 1,
                [one_fork(node, offset)])
  assert held(grower) == (0, 0)


def test_a_plan_without_forks_costs_nothing(corridor):
  grower, params = corridor
  none = np.zeros((1, 2), int)
  plan = types.BranchPlan(node=none - 1, offset=none, count=none)
  grow = lambda *branch: grower.grow(
      params, ['train/3'], jax.random.key(0), 2, branch)
  expected, result = grow(), grow(lambda _: plan, lambda _: plan)
  jax.tree.map(np.testing.assert_array_equal, expected.tree, result.tree)
  assert result[1:] == expected[1:]


def test_what_policies_left_unspent_is_summed(corridor):
  grower, params = corridor
  grow = lambda *branch: grower.grow(
      params, ['train/2', 'train/3'], jax.random.key(0), 1, branch).unspent
  assert grow() == 0
  assert grow(one_fork(1, 0)) == 0
  assert grow(one_fork(1, 0, unspent=np.array([2, 3])),
              one_fork(1, 0, count=0, unspent=np.array([0, 4]))) == 9


def test_a_fork_of_the_first_action_is_a_fresh_rollout(corridor):
  grower, params = corridor
  tree = grower.grow(params, ['train/3'], jax.random.key(0), 1,
                     [one_fork(1, 0, count=3)]).tree
  fresh = np.flatnonzero((tree.birth[0] == 1) & (tree.parents[0] == 0))
  assert len(fresh) == 3
  other = grower.grow(params, ['train/3'], jax.random.key(0), 4).tree
  paths = lambda tree: sorted(
      tuple(tiny.path_tokens(tree, 0, leaf)) for leaf in tiny.leaves(tree, 0))
  assert paths(tree) == paths(other)


def test_the_number_of_forks_compiles_nothing(corridor):
  grower, params = corridor
  grow = lambda *plans: grower.grow(
      params, ['train/2', 'train/3'], jax.random.key(0), 2,
      [one_fork(*plan) for plan in plans])
  grow((1, 0), (1, 1))
  compiled = grower.act._cache_size()  # pylint: disable=protected-access
  grow((1, 1, 7), (2, 0, 5))
  grow((1, 0, 2), (2, 1, 11))
  assert grower.act._cache_size() == compiled


def test_debug_mode_checks_the_trees_of_every_call_once(corridor, monkeypatch):
  like, params = corridor
  calls = []

  def validate(tree):
    calls.append(tree)
    if len(calls) > 1:
      raise ValueError('unsound')
  monkeypatch.setattr(trees.Tree, 'validate', validate)
  grow = lambda grower: grower.grow(
      params, ['train/3'], jax.random.key(0), 1, [one_fork(1, 1)])
  grow(tiny.corridor(like=like))
  assert not calls
  grower = tiny.corridor(like=like)
  grower.debug = True
  result = grow(grower)
  assert len(calls) == 1 and calls[0] is result.tree
  with pytest.raises(ValueError, match='unsound'):
    grow(grower)
  assert held(grower) == (0, 0)
  assert rollout.Grower(
      tiny.model(96), like.environment, sampling.SamplerConfig(action_length=2),
      like.max_turns, debug=True).debug


def test_nothing_to_grow_is_told(corridor):
  grower, params = corridor
  for tasks, backbones in (([], 1), (['train/0'], 0)):
    with pytest.raises(ValueError, match='at least one task'):
      grower.grow(params, tasks, jax.random.key(0), backbones)

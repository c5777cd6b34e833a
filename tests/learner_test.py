"""One step from many micro-batches, against every path alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_agents as tiny

from bpo_jax import learner
from bpo_jax import objectives
from bpo_jax import packing
from bpo_jax import sampling
from bpo_jax import tree as trees
from bpo_jax import types

NETWORK = tiny.model(num_layers=1)
LOSS = learner.LossConfig(clip_epsilon_low=0.2, clip_epsilon_high=0.3)


@functools.cache
def update_fn(loss=LOSS, temperature=1.0, network=NETWORK):
  """The gradient itself: a step of 1 along it, down."""
  if isinstance(loss, learner.LossConfig):
    loss = learner.make_policy_loss(loss)
  return learner.make_update_fn(
      network, optax.identity(), loss, temperature)


def fresh(seed=0, optimizer=optax.identity()):
  return learner.init_state(
      tiny.params_of(NETWORK, seed), optimizer, jax.random.key(0))


def gradient(batches, loss=LOSS, temperature=1.0, reference=None):
  before = tiny.params_of(NETWORK)
  state, metrics = update_fn(loss, temperature)(
      fresh(), batches, 1.0, reference)
  return jax.tree.map(lambda p, q: np.asarray(p - q), before, state.params), (
      metrics)


CRITIC = tiny.model(num_layers=1, value_head=True)
NORMS = {'sequence_sum_norm': 12.0}


def critic_gradient(batches, loss, reference=None):
  """As `gradient`, of the network with a value head."""
  params = tiny.params_of(CRITIC)
  state = learner.init_state(
      jax.tree.map(jnp.copy, params), optax.identity(), jax.random.key(0))
  state, metrics = update_fn(loss, network=CRITIC)(
      state, batches, 1.0, reference)
  return jax.tree.map(lambda p, q: np.asarray(p - q), params, state.params), (
      metrics)


def with_targets(rows, seed=0):
  """The rows, with what a critic is trained on."""
  rng = np.random.default_rng(seed)
  draw = lambda: np.where(
      rows.action_mask, rng.normal(size=rows.weights.shape), 0).astype('f')
  return rows._replace(value_targets=draw(), old_values=0.1 * draw())


def parts_of(rows, stride=1):
  """The 16 rows as four micro-batches of one shape; an odd stride mixes."""
  order = np.arange(16) * stride % 16
  return [jax.tree.map(lambda x, i=i: x[order[i:i + 4]], rows)
          for i in range(0, 16, 4)]


@functools.cache
def outputs_of(network, temperature=1.0):
  return jax.jit(functools.partial(
      packing.token_outputs, network, temperature=temperature))


def same(left, right, tolerance=1e-5):
  """Whether two gradients agree relative to their norm."""
  norm = float(optax.global_norm(right))
  assert norm > 1e-3
  difference = optax.global_norm(
      jax.tree.map(lambda x, y: np.asarray(x - y), left, right))
  assert difference <= tolerance * norm + 3e-7  # p - (p - g) rounds.


def rows_of(seed, temperature=1.0, num_trees=2, off_policy=0.3):
  """Rows whose behaviour policy is the network's with some noise."""
  tree = tiny.random_trees(seed, num_trees)
  rows = packing.pack(tree, tiny.random_credit(tree, seed), row_length=64)
  log_probs = jax.jit(packing.token_log_probs, static_argnums=(0, 3))(
      NETWORK, tiny.params_of(NETWORK), rows, temperature)[0]
  rng = np.random.default_rng(seed)
  noise = off_policy * rng.normal(size=log_probs.shape)
  behaviour = np.where(rows.action_mask, log_probs + noise, 0)
  rows = rows._replace(behaviour_log_probs=behaviour.astype(np.float32))
  padding = 16 - len(rows.tokens)  # One shape compiles once.
  return tree, jax.tree.map(
      lambda x: np.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)), rows)


def naive_loss(params, tree, rows, temperature):
  """The clipped surrogate over all paths, each run alone and unpadded.

  A token on n paths has an n-th of its weight on each.
  """
  by_source = lambda values: {
      int(s): float(v) for s, v in zip(
          rows.source[rows.action_mask], values[rows.action_mask])}
  behaviour, advantages, weights = map(by_source, (
      rows.behaviour_log_probs, rows.advantages, rows.weights))
  num_nodes, num_tokens = tree.tokens.shape[1:]
  sets, total = tiny.allowed_sets(tree), 0.0
  for b in range(len(tree.parents)):
    leaves = tiny.leaves(tree, b)
    paths = [tiny.path(tree, b, leaf) for leaf in leaves]
    for path in paths:
      tokens, allowed, sources, is_action = [], [], [], []
      for n in path:
        for t in np.flatnonzero(tree.token_mask[b, n]):
          tokens.append(tree.tokens[b, n, t])
          allowed.append(sets[b, n, t])
          is_action.append(bool(tree.action_mask[b, n, t]))
          sources.append((b * num_nodes + n) * num_tokens + t)
      log_probs = path_log_probs(params, tokens, allowed, temperature)
      for i in np.flatnonzero(is_action):
        s = sources[i]
        node = s // num_tokens - b * num_nodes
        share = weights[s] / sum(node in other for other in paths)
        ratio = jnp.exp(log_probs[i - 1] - behaviour[s])
        total -= share * jnp.minimum(
            ratio * advantages[s],
            jnp.clip(ratio, 0.8, 1.3) * advantages[s])
  return total / sum(weights.values())


def path_log_probs(params, tokens, allowed, temperature):
  """[C - 1] log-probs of all tokens but the first; padded to compile once."""
  size = 64
  padded = np.zeros((1, size), np.int32)
  padded[0, :len(tokens)] = tokens
  bits = np.full((size, len(allowed[0])), 0xFFFFFFFF, np.uint32)
  bits[:len(tokens)] = allowed
  places = np.arange(size)[None]
  mask = np.tril(np.ones((1, size, size), bool))
  hidden, _ = NETWORK.apply({'params': params}, padded, places, mask)
  logits = NETWORK.apply({'params': params}, hidden, method='logits')[0, :-1]
  possible = sampling.unpack_bits(bits)[1:]
  scores = jnp.where(possible, logits / temperature, -1e9)
  log_probs = scores - jax.nn.logsumexp(scores, axis=-1, keepdims=True)
  return log_probs[np.arange(size - 1), padded[0, 1:]]


def test_gradient_is_that_of_every_path_alone():
  temperature = 0.7
  tree, rows = rows_of(0, temperature, num_trees=1)
  batches = packing.micro_batches(rows, 64, 64)
  assert len(batches) > 1
  got, metrics = gradient(batches, temperature=temperature)
  loss, expected = jax.jit(jax.value_and_grad(
      lambda p: naive_loss(p, tree, rows, temperature)))(
          tiny.params_of(NETWORK))
  same(got, expected, 2e-5)
  np.testing.assert_allclose(metrics['loss/surrogate'], loss, rtol=1e-5)
  assert metrics['objective/clip_fraction'] > 0.1
  np.testing.assert_allclose(
      metrics['gradient/norm'], optax.global_norm(expected), rtol=1e-5)


@pytest.mark.parametrize('max_tokens, bucket', [(1, 64), (256, 32)])
def test_the_split_changes_no_gradient(max_tokens, bucket):
  _, rows = rows_of(1)
  expected, metrics = gradient([rows])
  batches = packing.micro_batches(rows, max_tokens, bucket)
  got, other = gradient(batches[::-1])
  same(got, expected)
  assert metrics.keys() == other.keys()
  for name, value in metrics.items():
    np.testing.assert_allclose(other[name], value, rtol=2e-5, err_msg=name)


def test_what_is_masked_reaches_no_gradient():
  _, rows = rows_of(2)
  nan = np.float32(np.nan)
  spoilt = rows._replace(**{
      name: np.where(rows.action_mask, getattr(rows, name), nan)
      for name in ('advantages', 'weights')},
      behaviour_log_probs=np.where(
          rows.path_mask, rows.behaviour_log_probs, nan))
  loss = learner.LossConfig(kl_coef=1.0)
  reference = tiny.params_of(NETWORK, 1)
  expected, metrics = gradient([rows], loss, reference=reference)
  got, other = gradient([spoilt], loss, reference=reference)
  same(got, expected, 0)
  assert metrics == other
  # Nor does what nobody trains.
  names = [n for n in metrics if n != 'gradient/norm']
  assert all(np.isfinite(metrics[n]) for n in names)


def test_on_policy_the_ratio_is_one_and_after_a_step_it_is_not():
  _, rows = rows_of(3, off_policy=0.0)
  step = update_fn()
  state, first = step(fresh(), [rows], 0.5)
  assert first['objective/clip_fraction'] == 0
  np.testing.assert_allclose(first['objective/approx_kl'], 0, atol=1e-9)
  mean = np.sum(rows.weights * rows.advantages) / np.sum(rows.weights)
  np.testing.assert_allclose(first['loss/surrogate'], -mean, rtol=1e-5)
  state, second = step(state, [rows], 0.5)
  assert second['objective/approx_kl'] > 1e-4
  assert second['objective/clip_fraction'] > 0
  assert second['loss/surrogate'] < first['loss/surrogate']
  assert int(state.update) == 2


@pytest.mark.parametrize('shift, advantage, is_held', [
    (0.5, 1, True), (0.5, -1, False), (-0.5, -1, True), (-0.5, 1, False)])
def test_clipping_holds_what_went_far_enough(shift, advantage, is_held):
  _, rows = rows_of(4, off_policy=0.0)
  behaviour = np.where(
      rows.action_mask, rows.behaviour_log_probs - shift, 0)
  rows = rows._replace(
      behaviour_log_probs=behaviour.astype(np.float32),
      advantages=np.where(rows.action_mask, advantage, 0).astype(np.float32))
  _, metrics = gradient([rows])
  np.testing.assert_allclose(
      metrics['objective/clip_fraction'], float(is_held), atol=1e-6)
  assert (metrics['gradient/norm'] == 0) == is_held


def test_kl_pulls_to_the_reference_alone():
  _, rows = rows_of(5)
  rows = rows._replace(advantages=np.zeros_like(rows.advantages))
  loss = learner.LossConfig(kl_coef=1.0)
  here, there = tiny.params_of(NETWORK), tiny.params_of(NETWORK, 1)
  _, metrics = gradient([rows], loss, reference=here)
  assert metrics['loss/kl'] < 1e-9 and metrics['gradient/norm'] < 1e-5
  _, metrics = gradient([rows], loss, reference=there)
  assert metrics['loss/kl'] > 1e-2 and metrics['gradient/norm'] > 1e-2
  state, before = update_fn(loss)(fresh(), [rows], 0.02, there)
  _, after = update_fn(loss)(state, [rows], 0.02, there)
  assert after['loss/kl'] < before['loss/kl']
  # The same reference serves every update.
  same(there, tiny.params_of(NETWORK, 1), 0)


def test_the_entropy_bonus_raises_the_entropy():
  _, rows = rows_of(6)
  rows = rows._replace(advantages=np.zeros_like(rows.advantages))
  step = update_fn(learner.LossConfig(entropy_coef=1.0))
  state, before = step(fresh(), [rows], 0.1)
  np.testing.assert_allclose(before['loss/entropy'], -before['policy/entropy'])
  _, after = step(state, [rows], 0.1)
  assert after['policy/entropy'] > before['policy/entropy']


def test_imitation_is_the_mean_of_all_weights():
  _, rows = rows_of(7, off_policy=0.0)
  _, metrics = gradient([rows], learner.imitation_loss)
  expected = -np.sum(rows.weights * rows.behaviour_log_probs) / np.sum(
      rows.weights)
  np.testing.assert_allclose(metrics['loss/imitation'], expected, rtol=1e-5)


ADAM = learner.OptimizerConfig(
    max_gradient_norm=0.01, weight_decay=0.5, beta_1=0.5)


@functools.cache
def adam_step():
  optimizer = learner.make_optimizer(ADAM)
  return optimizer, learner.make_update_fn(
      NETWORK, optimizer, learner.make_policy_loss(LOSS))


def test_the_gradient_is_clipped_once_and_whole():
  _, rows = rows_of(8)
  optimizer, step = adam_step()
  whole, metrics = step(fresh(optimizer=optimizer), [rows], 1e-3)
  parts, _ = step(
      fresh(optimizer=optimizer), packing.micro_batches(rows, 64, 64), 1e-3)
  assert metrics['gradient/norm'] > 10 * ADAM.max_gradient_norm
  for state in (whole, parts):
    mean = state.optimizer_state[1].mu  # Half of the clipped gradient.
    np.testing.assert_allclose(
        2 * optax.global_norm(mean), ADAM.max_gradient_norm, rtol=1e-4)
  same(parts.optimizer_state[1].mu, jax.tree.map(
      np.asarray, whole.optimizer_state[1].mu), 1e-4)


def test_weight_decay_is_decoupled():
  _, rows = rows_of(9)
  rows = rows._replace(advantages=np.zeros_like(rows.advantages))
  optimizer, step = adam_step()
  state, _ = step(fresh(optimizer=optimizer), [rows], 0.1)
  expected = jax.tree.map(
      lambda p: np.asarray(p) * (1 - 0.1 * 0.5), tiny.params_of(NETWORK))
  same(state.params, expected, 1e-6)


@pytest.mark.parametrize('reducer', objectives.REDUCERS)
def test_no_reducer_nor_term_feels_the_split(reducer):
  _, rows = rows_of(1)
  rows = with_targets(rows)
  loss = learner.LossConfig(
      kl_coef=0.3, entropy_coef=0.1, value_coef=0.5, value_clip=0.2,
      reducer=reducer, sequence_norm=NORMS.get(reducer))
  reference = tiny.params_of(CRITIC, 1)
  expected, metrics = critic_gradient(parts_of(rows), loss, reference)
  got, other = critic_gradient(parts_of(rows, stride=5), loss, reference)
  same(got, expected)
  assert metrics.keys() == other.keys()
  for name, value in metrics.items():
    np.testing.assert_allclose(other[name], value, rtol=5e-5, err_msg=name)
  # The value term, by hand in float64.
  values = np.asarray(
      outputs_of(CRITIC)(tiny.params_of(CRITIC), rows).values, np.float64)
  near = np.clip(values, rows.old_values - 0.2, rows.old_values + 0.2)
  error = np.maximum(
      (values - rows.value_targets) ** 2, (near - rows.value_targets) ** 2) / 4
  np.testing.assert_allclose(
      metrics['loss/value'], reduced(error, rows, reducer), rtol=1e-4)
  targets = rows.value_targets[rows.action_mask].astype(float)
  residual = (values - rows.value_targets)[rows.action_mask]
  np.testing.assert_allclose(
      metrics['objective/explained_variance'],
      1 - np.mean(residual ** 2) / targets.var(), rtol=1e-4)


def reduced(values, rows, reducer):
  """A reducer, row by row in float64."""
  total = denominator = 0.0
  for row in range(len(values)):
    keep = rows.action_mask[row]
    if not keep.any():
      continue
    weights = rows.weights[row][keep].astype(np.float64)
    part = np.sum(weights * values[row][keep])
    share, count = {
        'token_mean': (1, weights.sum()),
        'sequence_mean': (weights.sum(), 1),
        'sequence_sum_norm': (NORMS['sequence_sum_norm'], 1),
        'path_weighted': (1, weights[-1])}[reducer]
    total, denominator = total + part / share, denominator + count
  return total / denominator


def test_the_critic_learns_and_the_policy_stays_where_it_is_not_asked():
  _, rows = rows_of(2)
  rows = with_targets(rows)
  rows = rows._replace(advantages=np.zeros_like(rows.advantages))
  loss = learner.LossConfig(value_coef=1.0)
  params = tiny.params_of(CRITIC)
  state = learner.init_state(
      jax.tree.map(jnp.copy, params), optax.identity(), jax.random.key(0))
  step = update_fn(loss, network=CRITIC)
  state, first = step(state, [rows], 0.02)
  for _ in range(5):
    state, last = step(state, [rows], 0.02)
  assert last['loss/value'] < first['loss/value']
  assert last['objective/value_error'] < first['objective/value_error']
  assert last['objective/explained_variance'] > (
      first['objective/explained_variance'])
  # The trunk is shared: the critic shapes it as well.
  assert np.abs(state.params['blocks']['gate']['kernel']
                - params['blocks']['gate']['kernel']).max() > 1e-5
  assert first['loss/surrogate'] == 0


def test_sequences_are_whole_paths_though_a_row_trains_a_part():
  _, rows = rows_of(3, num_trees=1)
  assert (rows.path_mask & ~rows.action_mask).any()
  objective = functools.partial(
      objectives.sequence_ratio_surrogate, clip_epsilon_low=0.9,
      clip_epsilon_high=9.0)
  loss = learner.make_policy_loss(learner.LossConfig(), objective)
  got, _ = gradient(parts_of(rows), loss)
  log_probs = np.asarray(
      outputs_of(NETWORK)(tiny.params_of(NETWORK), rows).log_probs)
  # Each token: the mean log-ratio of its path's action tokens, times A.
  log_ratio = np.where(
      rows.path_mask, log_probs - rows.behaviour_log_probs, 0)
  length = np.maximum(rows.path_mask.sum(1, keepdims=True), 1)
  ratio = np.exp(log_ratio.sum(1, keepdims=True) / length)
  assert np.ptp(ratio[rows.action_mask.any(1)]) > 0.01
  linear = rows._replace(
      advantages=(ratio * rows.advantages).astype(np.float32))
  expected, _ = gradient(
      parts_of(linear), learner.weighted_log_likelihood('token_mean'))
  same(got, expected, 1e-4)


def chains(num_leaves=4):
  """A tree that branches at the root alone, as rows."""
  rng = np.random.default_rng(0)
  builder = trees.TreeBuilder()
  root = builder.add(types.NO_PARENT, [3, 4, 5])
  for _ in range(num_leaves):
    length = int(rng.integers(2, 7))
    builder.add(root, rng.integers(2, 60, length), [True] * length,
                -rng.random(length))
  tree = trees.stack([builder])
  credit = types.Credit(
      advantages=np.zeros(tree.tokens.shape, 'f'),
      weights=tree.action_mask.astype('f'))
  return packing.pack(tree, credit)


def test_a_loss_over_pairs_is_exact_under_micro_batches():
  rows = chains()
  params = tiny.params_of(NETWORK)

  def contrast(log_probs):
    return objectives.golden_contrast(
        log_probs[0], log_probs[0], log_probs[1:], log_probs[1:],
        contrast='logistic_margin', contrast_beta=2.0,
        golden_mask=rows.action_mask[0], failure_mask=rows.action_mask[1:])
  log_probs_of = lambda p: packing.token_log_probs(NETWORK, p, rows)[0]
  expected = jax.jit(jax.grad(lambda p: -contrast(log_probs_of(p))))(params)
  coefficients = jax.grad(contrast)(jax.jit(log_probs_of)(params))
  # path_weighted divides by the number of rows.
  linear = rows._replace(
      advantages=np.asarray(len(rows.tokens) * coefficients))
  batches = packing.micro_batches(linear, 1, 16)
  assert len(batches) == len(rows.tokens)
  got, metrics = gradient(batches, learner.weighted_log_likelihood())
  same(got, expected, 2e-5)
  assert np.isfinite(metrics['loss/likelihood'])


def test_batch_facts_are_those_of_all_micro_batches():
  _, rows = rows_of(10)
  rows = with_targets(rows)
  batches = packing.micro_batches(rows, 64, 64)
  mask = rows.action_mask
  for reducer, expected in (
      ('token_mean', rows.weights[mask].sum(dtype=np.float64)),
      ('sequence_mean', mask.any(1).sum()),
      ('sequence_sum_norm', 12 * mask.any(1).sum())):
    for parts in (batches, [rows]):
      facts = learner.batch_facts(parts, reducer, NORMS.get(reducer))
      np.testing.assert_allclose(facts.denominator, expected, rtol=1e-6)
      np.testing.assert_allclose(
          facts.value_centre, rows.value_targets[mask].mean(), rtol=1e-5)
  assert learner.batch_facts([]) == (0, 0)


def test_without_rows_there_is_no_step():
  state, metrics = update_fn()(fresh(), [], 1.0)
  same_tree = jax.tree.map(
      np.testing.assert_array_equal, state.params, tiny.params_of(NETWORK))
  assert same_tree and metrics['gradient/norm'] == 0
  assert int(state.update) == 1


def test_outputs_come_back_to_the_trees():
  tree = tiny.random_trees(4)
  params = tiny.params_of(CRITIC)
  got = learner.make_outputs_fn(CRITIC, 0.7)(params, tree, 256)
  rows = packing.pack(tree, tiny.random_credit(tree, 4))
  rows = rows._replace(tokens=rows.tokens)
  for mine, theirs in zip(got, outputs_of(CRITIC, 0.7)(params, rows)):
    expected = packing.unpack(theirs, rows, tree.tokens.shape)
    np.testing.assert_allclose(mine, expected, atol=1e-5)
    assert not mine[~tree.action_mask].any() and np.ptp(mine) > 0.1
  bare = learner.make_outputs_fn(NETWORK)(
      tiny.params_of(NETWORK), tree, 10_000)
  assert bare.values is None


@pytest.mark.parametrize('layout', ['trees', 'paths'])
def test_batches_are_those_of_the_packed_rows(layout):
  tree = tiny.random_trees(5, num_trees=9)
  credit = tiny.random_credit(tree, 5)
  targets = credit.weights + 1
  got = learner.make_batches(
      tree, credit, 96, layout=layout, value_targets=targets, debug=True)
  length = None if layout == 'paths' else packing.row_length_of(tree, 96)
  expected = packing.micro_batches(packing.pack(
      tree, credit, length, layout=layout, value_targets=targets), 96)
  assert len(got) == len(expected) > 1
  jax.tree.map(np.testing.assert_array_equal, got, expected)
  assert got[0].old_values is None


@pytest.mark.parametrize('reducer', [
    'sequence_mean', 'sequence_sum_norm', 'path_weighted'])
def test_reducers_of_sequences_want_paths(reducer):
  """A row of trees holds many sequences: their sums would be of none."""
  tree = tiny.random_trees(5)
  credit = tiny.random_credit(tree, 5)
  loss = learner.LossConfig(reducer=reducer, sequence_norm=NORMS.get(reducer))
  update = update_fn(loss)
  with pytest.raises(ValueError, match="layout='paths'"):
    update(fresh(), learner.make_batches(tree, credit, 256), 1.0)
  update(fresh(), learner.make_batches(tree, credit, 256, layout='paths'), 1.0)


@pytest.mark.parametrize('name', [
    'advantages', 'weights', 'value_targets', 'old_values'])
@pytest.mark.parametrize('junk', [np.nan, np.inf])
def test_debug_refuses_credit_that_is_not_finite(name, junk):
  tree = tiny.random_trees(5)
  numbers = {'advantages': 0, 'weights': 0, 'value_targets': 0, 'old_values': 0}
  numbers = {key: np.zeros(tree.tokens.shape, 'f') for key in numbers}

  def batches(debug=True):
    extra = dict(numbers)
    credit = types.Credit(
        advantages=extra.pop('advantages'), weights=extra.pop('weights'))
    return learner.make_batches(tree, credit, 256, **extra, debug=debug)
  numbers[name][~tree.action_mask] = junk
  batches()  # Nobody reads it there.
  place = np.argwhere(tree.action_mask)[7]
  numbers[name][tuple(place)] = junk
  where = ', '.join(
      f'{axis} {i}' for axis, i in zip(('tree', 'node', 'token'), place))
  with pytest.raises(ValueError, match=f'{name}: expected finite.* {where}'):
    batches()
  batches(debug=False)


def test_debug_validates_the_trees():
  tree = tiny.random_trees(5)
  broken = tree.replace(rewards=np.full_like(tree.rewards, np.nan))
  credit = tiny.random_credit(tree, 5)
  learner.make_batches(broken, credit, 256)
  with pytest.raises(ValueError, match='rewards: expected finite'):
    learner.make_batches(broken, credit, 256, debug=True)


@pytest.mark.parametrize('options, message', [
    ({'reducer': 'token_men'}, 'reducer: .*did you mean token_mean'),
    ({'kl_estimator': 'k4'}, "kl_estimator: .* k1, k2, k3; got 'k4'"),
    ({'reducer': 'sequence_sum_norm'}, 'norm: expected a number'),
    ({'sequence_norm': 3.0}, 'norm: .* None without'),
])
def test_impossible_losses_are_told(options, message):
  with pytest.raises(ValueError, match=message):
    learner.LossConfig(**options)


@pytest.mark.parametrize('network, options, change, message', [
    (NETWORK, {'kl_coef': 1.0}, {}, 'kl_coef needs reference'),
    (NETWORK, {'value_coef': 1.0}, {}, 'value_coef needs values'),
    (CRITIC, {'value_coef': 1.0}, {'value_targets': None},
     'value_coef needs value_targets'),
    (CRITIC, {'value_coef': 1.0, 'value_clip': 0.2}, {'old_values': None},
     'value_clip needs old_values'),
])
def test_what_a_loss_needs_is_told(network, options, change, message):
  rows = with_targets(rows_of(6)[1])._replace(**change)
  state = learner.init_state(
      tiny.params_of(network), optax.identity(), jax.random.key(0))
  step = update_fn(learner.LossConfig(**options), network=network)
  with pytest.raises(ValueError, match=message):
    step(state, [rows], 1.0)


def test_warmup_rises_then_falls_to_the_floor():
  shares = np.linspace(0, 1, 101)
  rates = np.array([learner.warmup_cosine(x, 0.2) for x in shares])
  assert rates[0] > 0
  assert (np.diff(rates[:20]) > 0).all() and (np.diff(rates[20:]) <= 0).all()
  np.testing.assert_allclose([rates.max(), rates[-1]], [1, 0.1], atol=1e-3)
  assert learner.warmup_cosine(0.0, warmup=0.0) == 1


def greedy_loss(num_numbers):
  """A loss that asks the device for so many numbers at once."""

  def terms(outputs, rows, reference_log_probs, facts):
    del reference_log_probs, facts
    much = jnp.broadcast_to(jnp.sum(outputs.log_probs), (num_numbers,))
    return {'loss/greedy': outputs.log_probs * jnp.sort(much)[-1]}, {}

  return learner.Loss(terms, by_token=True)


@pytest.mark.filterwarnings('ignore:Explicitly requested dtype')
@pytest.mark.parametrize('sizes, network, advice', [
    (dict(max_tokens=256, row_length=96), NETWORK, 'max_tokens=96'),
    (dict(max_tokens=96), tiny.model(num_layers=1, remat='none'),
     "remat='block'"),
    (dict(max_tokens=256), NETWORK, 'row_length=128')])
def test_want_of_memory_says_what_to_change(sizes, network, advice):
  tree = tiny.random_trees(5, num_trees=9)
  batches = learner.make_batches(tree, tiny.random_credit(tree, 5), **sizes)
  with pytest.raises(MemoryError, match='out of memory on the device') as e:
    update_fn(greedy_loss(1 << 44), network=network)(fresh(), batches, 1.0)
  assert advice in str(e.value), str(e.value)
  assert 'RESOURCE_EXHAUSTED' in str(e.value)

"""One step from many micro-batches, against every path alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_agents as tiny

from bpo_jax import learner
from bpo_jax import packing
from bpo_jax import sampling

NETWORK = tiny.model(num_layers=1)
LOSS = learner.LossConfig(clip_epsilon_low=0.2, clip_epsilon_high=0.3)


@pytest.fixture(scope='module', autouse=True)
def _quick_compilation():
  with tiny.quick_compilation():
    yield


@functools.cache
def update_fn(loss=LOSS, temperature=1.0):
  """The gradient itself: a step of 1 along it, down."""
  loss_fn = learner.make_policy_loss(loss) if loss else learner.imitation_loss
  return learner.make_update_fn(
      NETWORK, optax.identity(), loss_fn, temperature)


def fresh(seed=0, optimizer=optax.identity()):
  return learner.init_state(
      tiny.params_of(NETWORK, seed), optimizer, jax.random.key(0))


def gradient(batches, loss=LOSS, temperature=1.0, reference=None):
  before = tiny.params_of(NETWORK)
  state, metrics = update_fn(loss, temperature)(
      fresh(), batches, 1.0, reference)
  return jax.tree.map(lambda p, q: np.asarray(p - q), before, state.params), (
      metrics)


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
  log_probs = jax.jit(packing.token_log_probs, static_argnums=0)(
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
  total = 0.0
  for b in range(len(tree.parents)):
    leaves = tiny.leaves(tree, b)
    paths = [tiny.path(tree, b, leaf) for leaf in leaves]
    for path in paths:
      tokens, allowed, sources, is_action = [], [], [], []
      for n in path:
        for t in np.flatnonzero(tree.token_mask[b, n]):
          tokens.append(tree.tokens[b, n, t])
          allowed.append(tree.allowed[b, n, t])
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
  assert metrics['policy/clip_fraction'] > 0.1
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
      for name in ('behaviour_log_probs', 'advantages', 'weights')})
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
  assert first['policy/clip_fraction'] == 0
  np.testing.assert_allclose(first['policy/kl_to_behaviour'], 0, atol=1e-9)
  mean = np.sum(rows.weights * rows.advantages) / np.sum(rows.weights)
  np.testing.assert_allclose(first['loss/surrogate'], -mean, rtol=1e-5)
  state, second = step(state, [rows], 0.5)
  assert second['policy/kl_to_behaviour'] > 1e-4
  assert second['policy/clip_fraction'] > 0
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
      metrics['policy/clip_fraction'], float(is_held), atol=1e-6)
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
  _, metrics = gradient([rows], loss=None)
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


def test_total_weight_is_that_of_action_tokens():
  _, rows = rows_of(10)
  batches = packing.micro_batches(rows, 64, 64)
  expected = rows.weights[rows.action_mask].sum(dtype=np.float64)
  np.testing.assert_allclose(learner.total_weight(batches), expected)
  np.testing.assert_allclose(learner.total_weight([rows]), expected)
  assert learner.total_weight([]) == 0


def test_warmup_rises_then_falls_to_the_floor():
  shares = np.linspace(0, 1, 101)
  rates = np.array([learner.warmup_cosine(x, 0.2) for x in shares])
  assert rates[0] > 0
  assert (np.diff(rates[:20]) > 0).all() and (np.diff(rates[20:]) <= 0).all()
  np.testing.assert_allclose([rates.max(), rates[-1]], [1, 0.1], atol=1e-3)
  assert learner.warmup_cosine(0.0, warmup=0.0) == 1

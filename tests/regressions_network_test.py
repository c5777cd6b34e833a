"""Faults that other systems shipped between a tree and its gradient.

The numbers are those of `regressions_test`. Most tests put a table in the place
of the network: a token's log-probs are a row of it, so that every loss can be
worked out by hand, and what is shown is the work of packing and learner alone.
What a table cannot tell, positions and attention, is asked of a tiny network.
"""

import functools
import types as python_types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_agents as tiny
import toy_environments as toys

from bpo_jax import learner
from bpo_jax import packing
from bpo_jax import sampling
from bpo_jax import tree as tree_lib
from bpo_jax import types

# Of the tokens 0 to 3 after each of them; the other 28 are never drawn.
PROBS = np.array([[0.25, 0.25, 0.25, 0.25],
                  [0.1, 0.2, 0.3, 0.4],
                  [0.4, 0.3, 0.2, 0.1],
                  [0.5, 0.25, 0.125, 0.125]])
OTHER_PROBS = PROBS[[0, 2, 1, 3]]
VOCAB = 32


class Bigram:
  """A policy network whose logits are the row of the last token."""

  config = python_types.SimpleNamespace(value_head=False)
  mesh = None

  def apply(self, variables, inputs=None, *_, method=None):
    if method == 'unembedding':
      return variables['params']['table'].T
    return jax.nn.one_hot(inputs, VOCAB), None


BIGRAM = Bigram()


def table(probs=PROBS):
  logits = np.full((VOCAB, VOCAB), -1e9, np.float32)
  logits[:4, :4] = np.log(probs)
  return {'table': jnp.asarray(logits)}


def nll(*pairs, probs=PROBS):
  """Returns the mean of -log p(token | the one before) over pairs of them."""
  return -np.mean([np.log(probs[before, token]) for before, token in pairs])


def builder(*nodes):
  """Returns a tree of nodes (parent, tokens, which of them are 'a'ctions)."""
  grown = tree_lib.TreeBuilder()
  for parent, tokens, kinds in nodes:
    grown.add(parent, tokens, action_mask=[kind == 'a' for kind in kinds],
              behaviour_log_probs=[-1.0] * len(tokens))
  return grown


def credit_of(tree, advantages=1.0, weights=1.0):
  mask = np.asarray(tree.action_mask, np.float32)
  return types.Credit(advantages=mask * np.float32(advantages),
                      weights=mask * np.float32(weights))


def rows_of(*builders):
  tree = tree_lib.stack(builders)
  return padded(packing.pack(tree, credit_of(tree), row_length=8))


def padded(rows):
  """Returns the rows and some that weigh nothing: few shapes to compile."""
  pad = lambda x: np.pad(x, [(0, -len(x) % 4)] + [(0, 0)] * (x.ndim - 1))
  rows = jax.tree.map(pad, rows)
  return rows._replace(source=np.where(rows.token_mask, rows.source, -1))


def take(rows, *index):
  return jax.tree.map(lambda x: x[list(index)], rows)


SURROGATE = learner.make_policy_loss(learner.LossConfig())
DIVERGENCE = learner.make_policy_loss(learner.LossConfig(kl_coef=1.0))
SEQUENCE_MEAN = learner.Loss(learner.imitation_loss.terms, 'sequence_mean')


@functools.cache
def update_fn(loss):
  return learner.make_update_fn(BIGRAM, optax.identity(), loss)


def step(*batches, loss=learner.imitation_loss, probs=PROBS, reference=None):
  """Returns the gradient by the table, of tokens 0 to 3, and the metrics."""
  before = table(probs)
  state = learner.init_state(table(probs), optax.identity(), jax.random.key(0))
  state, metrics = update_fn(loss)(
      state, list(map(padded, batches)), 1.0, reference)
  change = np.asarray(before['table'] - state.params['table'])
  return change[:4, :4], metrics


def imitation(*batches, **kwargs):
  return step(*batches, **kwargs)[1]['loss/imitation']


_log_probs = jax.jit(packing.token_log_probs, static_argnums=(0, 3))


def test_011_uneven_numbers_of_rows_do_not_fill_a_batch():
  # Five rows in batches of four: 4 + 1, and a row of padding that weighs 0.
  rows = rows_of(builder((-1, [1], 'o'), *((0, [n], 'a') for n in range(4)),
                         (0, [3], 'a')))
  batches = packing.micro_batches(rows, 32, 8)
  assert [batch.tokens.shape for batch in batches] == [(4, 8), (2, 8)]
  assert not batches[1].weights[1].any() and (batches[1].source[1] == -1).all()
  pairs = [(1, 0), (1, 1), (1, 2), (1, 3), (1, 3)]
  np.testing.assert_allclose(imitation(*batches), nll(*pairs), rtol=1e-6)
  # Counted as a row, the padding would make it 5 / 6 of that.
  np.testing.assert_allclose(
      imitation(*batches, loss=SEQUENCE_MEAN), nll(*pairs), rtol=1e-6)


def test_022_a_divergence_on_observations_is_charged():
  # The policies differ after tokens 1 and 2, which only observations follow.
  rows = rows_of(builder((-1, [3], 'o'), (0, [1, 2, 0], 'aoo'),
                         (1, [3], 'a')))
  gradient, metrics = step(
      rows._replace(advantages=0 * rows.advantages), loss=DIVERGENCE,
      reference=table(OTHER_PROBS))
  assert metrics['loss/kl'] == 0
  np.testing.assert_array_equal(gradient, np.zeros((4, 4)))
  # On an action it is: d = log(0.2 / 0.3) after 1, 0 after 3; d^2 / 2 each.
  rows = rows_of(builder((-1, [3], 'o'), (0, [1], 'a'), (1, [1], 'a')))
  _, metrics = step(rows, loss=DIVERGENCE, reference=table(OTHER_PROBS))
  np.testing.assert_allclose(
      metrics['loss/kl'], (0 + np.log(0.2 / 0.3)**2 / 2) / 2, rtol=1e-5)


def test_024_without_an_end_all_of_a_row_is_trained():
  # Nothing marks an end; two tokens of eight are there.
  rows = rows_of(builder((-1, [1], 'o'), (0, [2, 3], 'aa')))
  np.testing.assert_allclose(
      imitation(rows), nll((1, 2), (2, 3)), rtol=1e-6)


def test_025_the_id_of_padding_is_taken_for_padding():
  # Token 0 pads, but here it is drawn, and ends the action.
  rows = rows_of(builder((-1, [0, 1], 'oo'), (0, [0, 3, 0], 'aaa')))
  expected = nll((1, 0), (0, 3), (3, 0))
  np.testing.assert_allclose(imitation(rows), expected, rtol=1e-6)
  assert abs(nll((0, 3)) - expected) > 0.05  # Without what looks like padding.


def test_026_a_mask_out_of_step_misses_the_first_token():
  rows = rows_of(builder((-1, [1, 2], 'oo'), (0, [3, 1], 'aa')))
  gradient, metrics = step(rows)
  np.testing.assert_allclose(
      metrics['loss/imitation'], nll((2, 3), (3, 1)), rtol=1e-6)
  # p - 1 at the token drawn, half of it, after 2 and after 3 alone: the first
  # token has its gradient and so has the last; the prompt has none.
  expected = np.zeros((4, 4))
  expected[2] = np.array([0.4, 0.3, 0.2, -0.9]) / 2
  expected[3] = np.array([0.5, -0.75, 0.125, 0.125]) / 2
  np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_028_the_tokens_of_a_tool_are_trained():
  rows = rows_of(builder(
      (-1, [1], 'o'), (0, [2, 0, 3, 2], 'aoao'), (1, [1], 'a')))
  gradient, metrics = step(rows)
  np.testing.assert_allclose(
      metrics['loss/imitation'], nll((1, 2), (0, 3), (2, 1)), rtol=1e-6)
  # p - 1 at the token drawn, a third of it; a tool drew 0 after 2 and 2
  # after 3, so the row of 3 gets nothing.
  np.testing.assert_allclose(
      gradient[2], np.array([0.4, -0.7, 0.2, 0.1]) / 3, atol=1e-6)
  np.testing.assert_array_equal(gradient[3], np.zeros(4))


def test_029_positions_are_padded_on_the_other_side():
  rows = rows_of(
      builder((-1, [1, 2, 3], 'ooo'), (0, [3, 1], 'ao'), (1, [2], 'a')),
      builder((-1, [2], 'o'), (0, [1], 'a')))
  for values, first, second in (
      (rows.tokens, [1, 2, 3, 3, 1, 2, 0, 0], [2, 1, 0, 0, 0, 0, 0, 0]),
      (rows.positions, [0, 1, 2, 3, 4, 5, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0]),
      (rows.token_mask, [1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0])):
    np.testing.assert_array_equal(values[:2], [first, second])


def predictions(rows):
  """Returns what predicts each trained token, and what that one sees.

  By the token's index in the trees: the predictor's, and a set of them.
  """
  seen = np.asarray(packing.attention_mask(rows))
  found = {}
  for row, place in np.argwhere(rows.action_mask):
    predictor = rows.predictor[row, place]
    found[int(rows.source[row, place])] = (
        int(rows.source[row, predictor]),
        set(rows.source[row][seen[row, predictor]].tolist()))
  return found


def test_034_the_last_of_one_sequence_predicts_the_first_of_the_next():
  rows = rows_of(builder((-1, [1], 'o'), (0, [2], 'a')),
                 builder((-1, [2, 3], 'oo'), (0, [1], 'a')))
  # Trees of 8 nodes of 8 tokens: tree 1 begins at index 64, its node 1 at 72.
  assert predictions(rows) == {8: (0, {0}), 72: (65, {64, 65})}
  # The first token of a sequence has nothing before it, and is never trained.
  with pytest.raises(ValueError, match='begins with'):
    rows_of(builder((-1, [1], 'o'), (0, [2], 'a')),
            builder((-1, [2], 'a'), (0, [1], 'a')))


def test_035_a_leaf_sees_its_sibling_in_a_deeper_tree():
  # P -> (A -> (R0, R1), B -> (R2, R3)), R0 of two tokens; node n is at 8 n.
  rows = rows_of(builder(
      (-1, [1], 'o'), (0, [2], 'a'), (0, [3], 'a'), (1, [1, 2], 'aa'),
      (1, [2], 'a'), (2, [3], 'a'), (2, [0], 'a')))
  prompt, a, b, r_0, r_1, r_2, r_3 = range(0, 56, 8)
  assert predictions(rows) == {
      a: (prompt, {prompt}), b: (prompt, {prompt}),
      r_0: (a, {prompt, a}), r_0 + 1: (r_0, {prompt, a, r_0}),
      r_1: (a, {prompt, a}), r_2: (b, {prompt, b}), r_3: (b, {prompt, b})}


FORKED = ((-1, [3, 1], 'oo'), (0, [0, 2], 'aa'), (0, [2, 3], 'aa'),
          (0, [3, 1], 'aa'))


def test_036_a_shared_prefix_predicts_one_branch_alone():
  gradient, metrics = step(rows_of(builder(*FORKED)))
  first = [(1, 0), (1, 2), (1, 3)]
  later = [(0, 2), (2, 3), (3, 1)]
  np.testing.assert_allclose(
      metrics['loss/imitation'], nll(*first, *later), rtol=1e-6)
  # The last prompt token predicts three labels: 3 p - 1 each, a sixth of it.
  np.testing.assert_allclose(
      gradient[1], (3 * PROBS[1] - [1, 0, 1, 1]) / 6, atol=1e-6)


def test_037_what_a_token_is_told_ends_up_in_another_branch():
  tree = tree_lib.stack([builder(*FORKED)])
  rows = padded(packing.pack(tree, credit_of(tree), row_length=8))
  values = _log_probs(BIGRAM, table(), rows, 1.0)
  log_probs, entropies = (
      packing.unpack(x, rows, tree.tokens.shape) for x in values)
  before = np.array([[1, 0], [1, 2], [1, 3]])
  drawn = np.array([[0, 2], [2, 3], [3, 1]])
  np.testing.assert_allclose(
      log_probs[0, 1:4, :2], np.log(PROBS[before, drawn]), rtol=1e-5)
  np.testing.assert_allclose(
      entropies[0, 1:4, :2],
      -np.sum(PROBS * np.log(PROBS), axis=1)[before], rtol=1e-5)
  assert not log_probs[0, :, 2:].any() and not log_probs[0, 0].any()


def test_041_the_prompt_is_trained():
  tree = tree_lib.stack([builder((-1, [1, 2, 3], 'ooo'), (0, [1], 'a'))])
  everywhere = np.ones(tree.tokens.shape, np.float32)
  rows = packing.pack(
      tree, types.Credit(advantages=everywhere, weights=everywhere), 8)
  np.testing.assert_array_equal(rows.weights[0], [0, 0, 0, 1, 0, 0, 0, 0])
  np.testing.assert_allclose(imitation(rows), nll((3, 1)), rtol=1e-6)


def test_042_only_the_last_turn_is_trained():
  rows = rows_of(builder((-1, [1], 'o'), (0, [2, 1], 'ao'), (1, [3, 1], 'ao'),
                         (2, [0], 'a')))
  expected = nll((1, 2), (1, 3), (1, 0))
  np.testing.assert_allclose(imitation(rows), expected, rtol=1e-6)
  assert abs(nll((1, 0)) - expected) > 0.5


def test_048_the_denominator_knows_of_devices():
  # One token, or two of them: a mean of means, however it is split.
  rows = rows_of(builder((-1, [1], 'o'), (0, [3], 'a'), (0, [0, 2], 'aa')))
  parts = [take(rows, 0), take(rows, 1)]
  whole, metrics = step(rows, loss=SEQUENCE_MEAN)
  split, other = step(*parts, loss=SEQUENCE_MEAN)
  expected = (nll((1, 3)) + nll((1, 0), (0, 2))) / 2
  for got in (metrics, other):
    np.testing.assert_allclose(got['loss/imitation'], expected, rtol=1e-6)
  np.testing.assert_allclose(split, whole, atol=1e-6)


def test_050_what_was_compiled_keeps_its_parameters():
  rows = rows_of(builder((-1, [1], 'o'), (0, [3, 1], 'aa')))
  for probs in (PROBS, OTHER_PROBS, PROBS):
    np.testing.assert_allclose(
        imitation(rows, probs=probs), nll((1, 3), (3, 1), probs=probs),
        rtol=1e-6)
  for reference in (PROBS, OTHER_PROBS):
    _, metrics = step(rows, loss=DIVERGENCE, reference=table(reference))
    np.testing.assert_allclose(
        metrics['loss/kl'], np.log(0.4 / reference[1, 3])**2 / 4, atol=1e-6)


def on_policy(rows, probs=PROBS):
  log_probs, _ = _log_probs(BIGRAM, table(probs), rows, 1.0)
  return rows._replace(behaviour_log_probs=np.asarray(log_probs))


def test_050_without_a_correction_there_is_no_gradient():
  # At ratio 1: the gradient of -A log p, halved: 2 (p - 1 at 3) and -1 of it.
  rows = on_policy(rows_of(builder((-1, [1], 'o'), (0, [3, 1], 'aa'))))
  advantages = 0 * rows.advantages
  advantages[0, 1:3] = 2, -1
  gradient, _ = step(rows._replace(advantages=advantages), loss=SURROGATE)
  np.testing.assert_allclose(gradient[1], [0.1, 0.2, 0.3, -0.6], atol=1e-6)
  np.testing.assert_allclose(
      gradient[3], [-0.25, 0.375, -0.0625, -0.0625], atol=1e-6)


def test_053_advantages_are_taken_for_a_mask():
  rows = on_policy(rows_of(builder((-1, [1], 'o'), (0, [3, 1, 0], 'aaa'))))
  advantages = 0 * rows.advantages
  advantages[0, 1:4] = 2, 0, -1
  _, metrics = step(rows._replace(advantages=advantages), loss=SURROGATE)
  # As a mask they would leave out the second, and give (4 + 1) / (2 - 1).
  np.testing.assert_allclose(
      metrics['loss/surrogate'], -(2 + 0 - 1) / 3, rtol=1e-6)


def test_058_temperature_is_on_one_side_alone():
  # Halved, it squares the odds: 1 4 9 16 after 1, 16 9 4 1 after 2.
  rows = rows_of(builder((-1, [1], 'o'), (0, [3, 1, 2], 'aoa')))
  cold, _ = _log_probs(BIGRAM, table(), rows, 0.5)
  np.testing.assert_allclose(
      np.exp(cold[0, [1, 3]]), [16 / 30, 9 / 30], rtol=1e-6)
  drawn, _ = sampling.token_distribution(table()['table'][1], None, 0.5)
  np.testing.assert_allclose(drawn[3], cold[0, 1], rtol=1e-6)
  warm, _ = _log_probs(BIGRAM, table(), rows, 1.0)
  np.testing.assert_allclose(
      np.exp(cold - warm)[0, 1], 16 / 30 / 0.4, rtol=1e-6)


def test_059_the_learner_does_not_renormalise_over_the_support():
  # Of the tokens after 1 only 2 and 3 could be drawn, of mass 0.7.
  rows = rows_of(builder((-1, [1], 'o'), (0, [3], 'a')))
  allowed = np.zeros((4, 8, VOCAB), bool)
  allowed[0, 1, 2:4] = True
  rows = rows._replace(allowed=np.asarray(sampling.pack_bits(allowed)))
  log_probs, _ = _log_probs(BIGRAM, table(), rows, 1.0)
  np.testing.assert_allclose(np.exp(log_probs[0, 1]), 0.4 / 0.7, rtol=1e-6)
  everywhere, _ = _log_probs(BIGRAM, table(), rows._replace(allowed=None), 1.0)
  np.testing.assert_allclose(
      np.exp(everywhere - log_probs)[0, 1], 0.7, rtol=1e-6)


def test_064_the_gradient_is_clipped_once_a_micro_batch():
  config = learner.OptimizerConfig(max_gradient_norm=0.1, beta_1=0.5)
  optimizer = learner.make_optimizer(config)
  rows = rows_of(builder((-1, [1], 'o'), *[(0, [3], 'a')] * 3),
                 builder((-1, [2], 'o'), (0, [0], 'a')))
  update = learner.make_update_fn(
      BIGRAM, optimizer, learner.imitation_loss)
  state = learner.init_state(table(), optimizer, jax.random.key(0))
  state, metrics = update(
      state, [padded(take(rows, n)) for n in range(4)], 1e-3)
  # Three quarters of (.1 .2 .3 -.6) and one of (-.6 .3 .2 .1), whose norms are
  # sqrt(1 / 2): sqrt(9 + 1) / 4 of that. Cut off one by one, each part would
  # have a norm of 0.1, and the sum one of 0.316.
  norm = np.sqrt(10) / 4 * np.sqrt(0.5)
  np.testing.assert_allclose(metrics['gradient/norm'], norm, rtol=1e-5)
  clipped = 2 * np.asarray(state.optimizer_state[1].mu['table'])[:4, :4]
  expected = np.zeros((4, 4))
  expected[1] = 0.75 * np.array([0.1, 0.2, 0.3, -0.6])
  expected[2] = 0.25 * np.array([-0.6, 0.3, 0.2, 0.1])
  np.testing.assert_allclose(clipped, expected * 0.1 / norm, atol=1e-6)


@pytest.mark.parametrize('name', ['advantages', 'behaviour_log_probs'])
def test_065_066_a_micro_batch_pairs_tokens_with_numbers_of_others(name):
  # 65: advantages, 66: old log-probs. Each token's own number is its place.
  tree = tiny.random_trees(3)
  place = np.arange(tree.tokens.size, dtype=np.float32)
  credit = credit_of(tree, advantages=place.reshape(tree.tokens.shape))
  rows = packing.pack(
      tree.replace(behaviour_log_probs=-credit.advantages), credit)
  trained = []
  for batch in packing.micro_batches(rows, 64, 8):
    source = batch.source[batch.action_mask]
    sign = -1 if name == 'behaviour_log_probs' else 1
    np.testing.assert_array_equal(
        sign * getattr(batch, name)[batch.action_mask], source)
    np.testing.assert_array_equal(
        batch.tokens[batch.action_mask], tree.tokens.ravel()[source])
    trained += source.tolist()
  assert sorted(trained) == np.flatnonzero(tree.action_mask).tolist()


# What a table cannot tell: a tiny network draws after ragged prompts.

NUM_ROWS, WIDTH, TEMPERATURE = 16, 16, 0.5  # The shapes of the corridor's.
LENGTHS = np.arange(NUM_ROWS, dtype=np.int32)


@pytest.fixture(scope='module')
def grower():
  return tiny.corridor(temperature=TEMPERATURE)


@pytest.fixture(scope='module')
def params():
  return tiny.params_of(tiny.model(96))


def draw(grower, params, garbage=0.0, lengths=LENGTHS):
  """Returns prompts of 0 to 15 tokens, 1 to 6 tokens more, and actions."""
  rng = np.random.default_rng(0)
  prompts = rng.integers(2, 96, (NUM_ROWS, WIDTH)).astype(np.int32)
  pending = rng.integers(2, 96, (NUM_ROWS, grower.chunk)).astype(np.int32)
  pending_length = 1 + LENGTHS % 6
  commands = np.broadcast_to(
      np.int32([[2, 3], [2, 4], [5, 6], [7, 0]]), (NUM_ROWS, 4, 2))
  cache = sampling.empty_cache(grower.model_config, NUM_ROWS, 256)
  cache = cache._replace(key_values=jax.tree.map(
      lambda x: x + garbage, cache.key_values))
  cache = grower.prefill(params, cache, prompts, lengths)
  zeros = lambda: jnp.zeros(NUM_ROWS, jnp.int32)
  keys = jax.random.split(jax.random.key(1), NUM_ROWS)
  rows = sampling.Rows(
      cache=cache, pending=jnp.asarray(pending),
      pending_length=jnp.asarray(pending_length),
      commands=jnp.asarray(commands), handles=zeros(),
      active=jnp.ones(NUM_ROWS, bool), keys=keys, turns=zeros(),
      greedy=jnp.zeros(NUM_ROWS, bool),
      forced=jnp.zeros((NUM_ROWS, 2), jnp.int32), num_forced=zeros())
  actions = jax.device_get(grower.act(params, rows)[1])
  cut = lambda rows, lengths: [row[:n] for row, n in zip(rows, lengths)]
  return cut(prompts, LENGTHS), cut(pending, pending_length), actions


@pytest.fixture(scope='module')
def drawn(grower, params):
  """What was drawn, and the trees and rows that are made of it."""
  prompts, pending, actions = draw(grower, params)
  builders = []
  for r, (prompt, observed) in enumerate(zip(prompts, pending)):
    grown, mask = tree_lib.TreeBuilder(), actions.mask[r]
    grown.add(-1, [*prompt, *observed])
    grown.add(0, actions.tokens[r, mask], action_mask=mask[mask],
              behaviour_log_probs=actions.log_probs[r, mask],
              entropies=actions.entropies[r, mask],
              allowed=actions.allowed[r, mask])
    builders.append(grown)
  tree = tree_lib.stack(builders)
  tree.validate()
  weights = np.random.default_rng(1).uniform(-1, 1, tree.tokens.shape)
  return actions, tree, packing.pack(tree, credit_of(tree, weights=weights), 24)


def ratios(params, rows, temperature=TEMPERATURE):
  """Returns the learner's probability of each drawn token by the sampler's."""
  log_probs, _ = _log_probs(tiny.model(96), params, rows, temperature)
  difference = np.asarray(log_probs - rows.behaviour_log_probs)
  return np.exp(difference[rows.action_mask])


def test_030_padding_takes_up_positions(params, drawn):
  rows, lengths = drawn[-1], LENGTHS[:, None]
  np.testing.assert_allclose(ratios(params, rows), 1, atol=1e-4)
  # Were prompts padded to one width and then counted along:
  shifted = rows.positions + (np.arange(24) >= lengths) * (WIDTH - lengths)
  spoilt = ratios(params, rows._replace(positions=shifted.astype(np.int32)))
  assert np.abs(spoilt - 1).max() > 0.05


def test_031_real_tokens_attend_to_padding(grower, params, drawn):
  actions, _, rows = drawn
  _, _, others = draw(grower, params, garbage=5.0)
  jax.tree.map(np.testing.assert_array_equal, actions, others)
  noise = rows._replace(tokens=np.where(rows.token_mask, rows.tokens, 7))
  np.testing.assert_array_equal(ratios(params, noise), ratios(params, rows))
  # Had all of the prompts' width been read:
  _, _, others = draw(grower, params, lengths=0 * LENGTHS + WIDTH)
  assert np.abs(others.log_probs - actions.log_probs).max() > 0.05


@jax.jit
@jax.value_and_grad
def loss_and_gradient(params, rows):
  log_probs, entropies = packing.token_log_probs(
      tiny.model(96), params, rows, TEMPERATURE)
  return jnp.sum(rows.weights * (log_probs + 0.5 * entropies))


def assert_close(got, expected):
  difference = optax.global_norm(jax.tree.map(jnp.subtract, got, expected))
  assert float(difference) < 1e-5 * float(optax.global_norm(expected))


def test_032_sequences_of_one_batch_attend_across(params, drawn):
  _, tree, rows = drawn
  loss, gradient = loss_and_gradient(params, rows)
  parts, in_first = [], rows.source < 5 * tree.tokens[0].size
  for half in (in_first, ~in_first):
    # The trees of the other half become something else, and weigh nothing.
    kept = half & rows.token_mask
    parts.append(loss_and_gradient(params, rows._replace(
        tokens=np.where(kept, rows.tokens, 7),
        weights=np.where(kept, rows.weights, 0))))
  np.testing.assert_allclose(loss, parts[0][0] + parts[1][0], rtol=1e-5)
  assert_close(jax.tree.map(jnp.add, parts[0][1], parts[1][1]), gradient)


def test_037_the_mask_is_lost_when_the_forward_pass_is_run_again(
    params, drawn):
  # A mask that held forwards alone would let padding into the gradient.
  rows = drawn[-1]
  loss, gradient = loss_and_gradient(params, rows)
  noise = rows._replace(tokens=np.where(rows.token_mask, rows.tokens, 7))
  other, noisy = loss_and_gradient(params, noise)
  assert loss == other
  assert_close(noisy, gradient)
  # The gradient is that of the loss, by a difference along itself.
  size = 1e-3 / float(optax.global_norm(gradient))
  up, down = (loss_and_gradient(jax.tree.map(
      lambda p, g, s=s: p + s * g, params, gradient), rows)[0]
      for s in (size, -size))
  np.testing.assert_allclose(
      (up - down) / 2e-3, optax.global_norm(gradient), rtol=0.02)


def test_052_the_ratio_is_not_one_before_the_first_step(params, drawn):
  actions, _, rows = drawn
  np.testing.assert_allclose(ratios(params, rows), 1, atol=1e-4)
  assert np.ptp(actions.log_probs[actions.mask]) > 0.5
  # Nor may any of temperature and support be on one side alone (58, 59).
  assert np.abs(ratios(params, rows, 1.0) - 1).max() > 0.05
  free = ratios(params, rows._replace(allowed=~np.zeros_like(rows.allowed)))
  assert free.max() < 1 and free.min() < 0.5


@pytest.fixture(scope='module')
def played(grower, params):
  """A path of one episode, the rest of which was forked, and what was read."""
  calls, act = [], grower.act

  def watched(params, rows):
    before = jax.device_get(
        (rows.cache.lengths[0], rows.pending[0], rows.pending_length[0]))
    rows, actions = act(params, rows)
    calls.append((*before, actions.tokens[0][actions.mask[0]]))
    return rows, actions
  grower.act = watched
  try:
    tree = grower.grow(params, ['train/3'], jax.random.key(3), 1,
                       [tiny.random_plan(0, 1, 1, birth=0)]).tree
  finally:
    grower.act = act
  return tree, calls


def test_039_what_was_read_is_encoded_again(played):
  tree, calls = played
  paths = [tiny.path_tokens(tree, 0, leaf) for leaf in tiny.leaves(tree, 0)]
  assert len(paths) == 2
  assert len(calls) == tree.action_mask[0].any(axis=-1).sum()
  for length, pending, pending_length, action in calls:
    # What is in the cache is a prefix of the path, and this comes next.
    read = [*pending[:pending_length].tolist(), *np.asarray(action).tolist()]
    assert any(path[length:length + len(read)] == read for path in paths)
  tree.validate()  # Masks and log-probs are as long as the tokens.


def test_040_turns_are_told_otherwise_than_they_were(grower, played):
  tree, _ = played
  codec = grower.environment.codec
  for leaf in tiny.leaves(tree, 0):
    environment = toys.Corridor()
    state, timestep = environment.reset('train/3')
    words = codec.encode_prompt(timestep)
    for node in tiny.path(tree, 0, leaf)[1:]:
      action = tree.tokens[0, node][tree.action_mask[0, node]]
      command = codec.decode(timestep.available, action)
      state, timestep = environment.step(state, command)
      ended = tree.terminal[0, node] or tree.truncated[0, node]
      shown, length = codec.encode_observation(timestep, command)
      words += [*action.tolist(), *([] if ended else shown[:length].tolist())]
    assert tiny.path_tokens(tree, 0, leaf) == words

"""Actions as drawn: how they end, and what they were as likely as."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_agents as tiny

from bpo_jax import attention
from bpo_jax import decoding
from bpo_jax import packing
from bpo_jax import sampling
from bpo_jax import tree as trees
from bpo_jax import types
from bpo_jax.models import lora
from bpo_jax.models import transformer

VOCAB = 7  # So few that stop sequences of two tokens come up.
LENGTH = 6
TEMPERATURE = 1.4
CHUNK = 5
STOP = ((3,), (5, 2), (1, 1, 4))


def free(stop=STOP, length=LENGTH):
  return sampling.SamplerConfig(
      action_length=length, constrained=False, temperature=TEMPERATURE,
      stop=stop)


@functools.cache
def turned_on(config, vocab_size=VOCAB):
  """Returns the model, its parameters, and prefill and act, jitted."""
  model = tiny.model(vocab_size)
  params = tiny.params_of(model)
  return (model, params, jax.jit(decoding.make_prefill(model)),
          jax.jit(decoding.make_act(model, config)))


def ragged_rows(config, seed, num_rows=12, vocab_size=VOCAB, commands=None):
  """Prompts of 0 to 8 tokens and 1 to 5 tokens after them, as lists."""
  model, params, prefill, _ = turned_on(config, vocab_size)
  rng = np.random.default_rng(seed)
  lengths = rng.integers(0, 9, num_rows)
  waiting = rng.integers(1, CHUNK + 1, num_rows)
  prompts = rng.integers(0, vocab_size, (num_rows, 8)).astype(np.int32)
  pending = rng.integers(0, vocab_size, (num_rows, CHUNK)).astype(np.int32)
  cache = sampling.empty_cache(model.config, num_rows, 48)
  cache = prefill(params, cache, prompts, lengths)
  zeros = np.zeros(num_rows, np.int32)
  if commands is None:
    commands = np.zeros((num_rows, 1, config.action_length), np.int32)
  rows = sampling.Rows(
      cache=cache, pending=pending, pending_length=waiting.astype(np.int32),
      commands=commands, handles=zeros, active=np.ones(num_rows, bool),
      keys=jax.random.split(jax.random.key(seed), num_rows), turns=zeros,
      greedy=np.zeros(num_rows, bool),
      forced=np.zeros((num_rows, config.action_length), np.int32),
      num_forced=zeros)
  paths = [[*p[:n], *q[:m]] for p, n, q, m in zip(
      prompts.tolist(), lengths, pending.tolist(), waiting)]
  return rows, paths


@functools.cache
def _whole_path(vocab_size):
  model = tiny.model(vocab_size)

  @jax.jit
  def logits(params, tokens):
    size = tokens.shape[1]
    mask = jnp.tril(jnp.ones((1, size, size), bool))
    hidden, _ = model.apply(
        {'params': params}, tokens, jnp.arange(size)[None], mask)
    return model.apply({'params': params}, hidden, method='logits')[0]
  return logits


def recomputed(path, action, vocab_size=VOCAB, allowed=None):
  """Log-probs and entropies of an action in float64, from its whole path."""
  params = turned_on(free())[1] if vocab_size == VOCAB else tiny.params_of(
      tiny.model(vocab_size))
  tokens = np.zeros((1, 64), np.int32)
  tokens[0, :len(path) + len(action)] = [*path, *action]
  logits = np.asarray(_whole_path(vocab_size)(params, tokens), np.float64)
  logits = logits[len(path) - 1:][:len(action)] / TEMPERATURE
  if allowed is not None:
    logits = np.where(allowed, logits, -np.inf)
  log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  probs = np.exp(log_probs)
  terms = np.where(probs > 0, probs * np.where(probs > 0, log_probs, 0), 0)
  return log_probs[np.arange(len(action)), action], -terms.sum(-1), log_probs


def end_of(tokens, stop, length=LENGTH):
  """How many of the tokens the first stop sequence leaves; an oracle."""
  for count in range(1, length + 1):
    if any(tuple(tokens[:count][-len(s):]) == s for s in stop):
      return count
  return length


def assert_exact(actions, paths):
  """Every token's log-prob and entropy are those of its whole path."""
  for row, path in enumerate(paths):
    count = int(actions.mask[row].sum())
    assert actions.mask[row, :count].all()
    log_probs, entropies, _ = recomputed(
        path, actions.tokens[row, :count].tolist())
    np.testing.assert_allclose(
        actions.log_probs[row, :count], log_probs, atol=1e-5)
    np.testing.assert_allclose(
        actions.entropies[row, :count], entropies, atol=1e-5)
  for x in (actions.tokens, actions.log_probs, actions.entropies):
    assert not np.asarray(x)[~actions.mask].any()


def turn(rows, actions, paths, seed, taken=None):
  """Returns the rows with an observation appended, and their paths.

  Of rows that are `taken`, some of them more than once: forks.
  """
  rng = np.random.default_rng(seed)
  num_rows = len(paths)
  taken = np.arange(num_rows) if taken is None else taken
  shown = rng.integers(0, VOCAB, (num_rows, CHUNK - 1)).astype(np.int32)
  counts = rng.integers(0, CHUNK, num_rows)
  source = rows.cache
  cache = sampling.copy_rows(
      jax.tree.map(jnp.zeros_like, source), source, np.arange(num_rows), taken,
      num_rows)
  actions = jax.tree.map(lambda x: x[taken], actions)
  rows = rows._replace(
      cache=cache, pending=sampling.next_pending(actions, shown),
      pending_length=(1 + counts).astype(np.int32), turns=rows.turns + 1,
      forced=0 * rows.forced, num_forced=0 * rows.num_forced)
  paths = [[*paths[i], *np.asarray(actions.tokens)[k][actions.mask[k]].tolist(),
            *shown[k, :counts[k]].tolist()] for k, i in enumerate(taken)]
  return rows, paths


@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize('stop', [(), STOP], ids=['zero', 'stops'])
def test_three_turns_and_forks_of_forks_are_exact(seed, stop):
  config = free(stop)
  _, params, _, act = turned_on(config)
  rows, paths = ragged_rows(config, seed)
  rng = np.random.default_rng(seed)
  ends = []
  for number in range(3):
    rows, actions = act(params, rows)
    actions = jax.device_get(actions)
    assert_exact(actions, paths)
    for tokens, mask in zip(actions.tokens, actions.mask):
      count = end_of(tokens.tolist(), stop or ((0,),))
      assert mask.sum() == count
      ends.append(count)
    # A row holds all of its path but what is pending.
    kept = [len(p) + m.sum() - 1 for p, m in zip(paths, actions.mask)]
    np.testing.assert_array_equal(rows.cache.lengths, kept)
    taken = np.sort(rng.integers(0, len(paths), len(paths)))
    rows, paths = turn(rows, actions, paths, seed + number, taken)
  assert len(set(ends)) > 3  # Ragged, and some ended early.


@pytest.mark.parametrize('stop', STOP)
def test_a_stop_ends_the_action_with_its_own_tokens(stop):
  config = free((stop,))
  _, params, _, act = turned_on(config)
  tokens = []
  for seed in range(12):
    rows, paths = ragged_rows(config, seed)
    actions = jax.device_get(act(params, rows)[1])
    if not seed:
      assert_exact(actions, paths)
    tokens += [t[m].tolist() for t, m in zip(actions.tokens, actions.mask)]
  size = len(stop)
  ended = [t for t in tokens if tuple(t[-size:]) == stop]
  assert ended and all(len(t) == LENGTH for t in tokens if t not in ended)
  for t in tokens:
    for i in range(len(t) - size):
      assert tuple(t[i:i + size]) != stop
  # Zero is a token as any other where it ends nothing.
  assert any(0 in t[:-1] for t in tokens)


def test_forced_tokens_count_towards_a_stop():
  config = free(((5, 2),))
  _, params, _, act = turned_on(config)
  rows, paths = ragged_rows(config, 0)
  forced = np.zeros((len(paths), LENGTH), np.int32)
  forced[:, 0] = 5
  rows = rows._replace(forced=forced, num_forced=1 + 0 * rows.num_forced)
  actions = jax.device_get(act(params, rows)[1])
  assert_exact(actions, paths)
  assert (actions.tokens[:, 0] == 5).all()
  ended = actions.tokens[:, 1] == 2
  assert ended.any()
  assert (actions.mask.sum(axis=1)[ended] == 2).all()


def test_greedy_rows_take_the_likeliest_and_leave_the_others():
  config = free()
  _, params, _, act = turned_on(config)
  rows, paths = ragged_rows(config, 1)
  greedy = np.arange(len(paths)) % 2 == 0
  drawn = jax.device_get(act(params, rows)[1])
  mixed = jax.device_get(act(params, rows._replace(greedy=greedy))[1])
  assert_exact(mixed, paths)
  for row in np.flatnonzero(greedy):
    action = mixed.tokens[row][mixed.mask[row]].tolist()
    log_probs = recomputed(paths[row], action)[2]
    assert log_probs.argmax(axis=-1).tolist() == action
  np.testing.assert_array_equal(drawn.tokens[~greedy], mixed.tokens[~greedy])


def test_other_rows_change_nothing():
  config = free()
  _, params, _, act = turned_on(config)
  rows, _ = ragged_rows(config, 2)
  whole = jax.device_get(act(params, rows)[1])
  active = np.arange(12) % 3 == 0
  part = jax.device_get(act(params, rows._replace(active=active))[1])
  np.testing.assert_array_equal(part.tokens[active], whole.tokens[active])
  np.testing.assert_allclose(
      part.log_probs[active], whole.log_probs[active], atol=1e-6)
  assert not part.mask[~active].any() and not part.tokens[~active].any()


def test_constrained_actions_are_exact_and_end_with_their_commands():
  config = sampling.SamplerConfig(
      action_length=3, temperature=TEMPERATURE)
  table = np.int32([[4, 0, 0], [2, 3, 0], [2, 5, 6], [2, 5, 1]])
  commands = np.broadcast_to(table, (12, 4, 3)).copy()
  commands[-1] = 0  # Nothing can be done.
  rows, paths = ragged_rows(config, 3, vocab_size=32, commands=commands)
  _, params, _, act = turned_on(config, 32)
  actions = jax.device_get(act(params, rows)[1])
  allowed = np.asarray(sampling.unpack_bits(actions.allowed))
  for row, path in enumerate(paths[:-1]):
    action = actions.tokens[row][actions.mask[row]].tolist()
    assert [*action, 0, 0][:3] in table.tolist()
    log_probs, entropies, _ = recomputed(
        path, action, 32, allowed[row, :len(action)])
    np.testing.assert_allclose(
        actions.log_probs[row, :len(action)], log_probs, atol=1e-5)
    np.testing.assert_allclose(
        actions.entropies[row, :len(action)], entropies, atol=1e-5)
  assert not actions.mask[-1].any()
  assert len(set(actions.mask.sum(axis=1))) > 2


def test_drawing_ends_with_the_longest_action(monkeypatch):
  steps = []
  draw = sampling.inverse_cdf

  def counted(log_probs, uniforms):
    jax.debug.callback(lambda: steps.append(1))
    return draw(log_probs, uniforms)
  monkeypatch.setattr(sampling, 'inverse_cdf', counted)
  config = free(((0,), (1,), (2,), (3,), (4,), (5, 6)))
  model, params, _, _ = turned_on(config)
  rows, _ = ragged_rows(config, 0)
  _, actions = jax.jit(decoding.make_act(model, config))(params, rows)
  jax.effects_barrier()
  longest = int(actions.mask.sum(axis=1).max())
  assert longest < LENGTH
  assert len(steps) == longest


@pytest.mark.parametrize('switches', [
    {}, {'lora': transformer.LoraConfig(2, 3.0, ('query', 'down'))},
    {'qk_norm': True, 'tied': False, 'attention_bias': True}],
    ids=['plain', 'lora', 'others'])
def test_prepared_parameters_draw_the_same(switches):
  config = free()
  rows, _ = ragged_rows(config, 0)
  model = tiny.model(VOCAB, **switches)
  params = tiny.params_of(model)
  assert lora.has_adapters(params) == ('lora' in switches)
  act = jax.jit(decoding.make_act(model, config))
  prepared = decoding.prepare(model.config, params)
  again = decoding.prepare(model.config, prepared)
  jax.tree.map(np.testing.assert_array_equal, prepared, again)
  assert 'blocks' not in prepared and not lora.has_adapters(prepared)
  one, other = act(params, rows), act(prepared, rows)
  jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6),
      one[1], other[1])
  expected = first_log_probs(model, params, rows)
  np.testing.assert_allclose(one[1].log_probs[:, 0], expected, atol=1e-5)


def first_log_probs(model, params, rows):
  """Log-probs of the first tokens drawn, by the stacked network."""
  in_cache = np.arange(48) < np.asarray(rows.cache.lengths)[:, None]
  past = transformer.KeyValues(*map(np.stack, rows.cache.key_values))
  causal = np.tril(np.ones((CHUNK, CHUNK), bool))
  hidden, _ = model.apply(
      {'params': params}, rows.pending,
      np.asarray(rows.cache.lengths)[:, None] + np.arange(CHUNK),
      np.broadcast_to(causal, (12, CHUNK, CHUNK)), (past,),
      (np.repeat(in_cache[:, None], CHUNK, axis=1),))
  last = hidden[np.arange(12), rows.pending_length - 1]
  logits = model.apply({'params': params}, last, method='logits')
  log_probs, _ = sampling.token_distribution(logits, None, TEMPERATURE)
  uniforms = sampling.turn_uniforms(rows.keys, rows.turns, LENGTH)
  tokens = sampling.inverse_cdf(log_probs, uniforms[:, 0])
  return np.take_along_axis(
      np.asarray(log_probs), np.asarray(tokens)[:, None], axis=1)[:, 0]


@pytest.mark.parametrize('block', [None, 16], ids=['dense', 'table'])
def test_what_is_sampled_in_bfloat16_is_what_is_trained(block):
  """Prefill, pending tokens and draws against the learner's one run.

  Both round the same numbers to bfloat16; their float32 sums differ in order,
  so that what lies between two bfloat16 now and then goes to the other, 2^-8
  away, and is carried on. Measured: 0.0074 nat on average, 0.023 at most; with
  scores of bfloat16 in the sampler alone, 0.0104 and 0.056.
  """
  config = free(((VOCAB - 1,) * LENGTH,))
  model = tiny.model(
      VOCAB, dtype='bfloat16', width=48, head_dim=12, num_layers=3)
  params = tiny.params_of(model)
  # Large scores, which bfloat16 would tell apart badly.
  query = params['blocks']['attention']['query']
  query['kernel'] = 3 * query['kernel']
  rng = np.random.default_rng(0)
  num_rows, size, waiting = 8, 50, 3
  tokens = rng.integers(0, VOCAB, (num_rows, size)).astype(np.int32)
  zeros = np.zeros(num_rows, np.int32)
  cache = jax.jit(decoding.make_prefill(model))(
      params, sampling.empty_cache(model.config, num_rows, 64),
      tokens[:, :-waiting], zeros + size - waiting)
  rows = sampling.Rows(
      cache=cache, pending=tokens[:, -waiting:], pending_length=zeros + waiting,
      commands=np.zeros((num_rows, 1, LENGTH), np.int32), handles=zeros,
      active=np.ones(num_rows, bool),
      keys=jax.random.split(jax.random.key(0), num_rows), turns=zeros,
      greedy=np.zeros(num_rows, bool),
      forced=np.zeros((num_rows, LENGTH), np.int32), num_forced=zeros)
  assert cache.key_values.keys[0].dtype == jnp.bfloat16
  _, actions = jax.device_get(jax.jit(decoding.make_act(model, config))(
      params, rows))
  assert actions.mask.all()
  builders = []
  for told, drawn in zip(tokens, actions.tokens):
    builder = trees.TreeBuilder()
    root = builder.add(types.NO_PARENT, told)
    builder.add(root, drawn, action_mask=np.ones(LENGTH, bool),
                behaviour_log_probs=np.zeros(LENGTH), terminal=True)
    builders.append(builder)
  tree = trees.stack(builders)
  packed = packing.pack(tree, tiny.random_credit(tree, 0), 64, layout='trees')
  if block:
    packed = packed._replace(
        ancestors_blocks=attention.block_table(packed.end, block))
  scored, _ = jax.jit(packing.token_log_probs, static_argnums=(0, 3))(
      model, params, packed, TEMPERATURE)
  scored = packing.unpack(scored, packed, tree.tokens.shape)[:, 1, :LENGTH]
  difference = np.abs(scored - actions.log_probs)
  assert difference.mean() < 0.009 and difference.max() < 0.04


@pytest.mark.parametrize('values, name', [
    ({'stop': ((1,),)}, 'constrained'),
    ({'constrained': False, 'stop': ((),)}, '1 to action_length=3'),
    ({'constrained': False, 'stop': ((1, 2, 3, 4),)}, '1 to action_length=3'),
    ({'constrained': False, 'stop': ((-1,),)}, 'token ids'),
    ({'temperature': 0.0}, 'temperature'),
    ({'temperature': float('nan')}, 'temperature'),
    ({'action_length': 0}, 'action_length')])
def test_a_sampler_that_cannot_work_is_told(values, name):
  with pytest.raises(ValueError, match=name):
    sampling.SamplerConfig(**values)


def test_a_stop_of_another_tokenizer_is_told():
  with pytest.raises(ValueError, match=f'vocab_size={VOCAB}.*tokenizer'):
    decoding.make_act(tiny.model(VOCAB), free(((VOCAB,),)))

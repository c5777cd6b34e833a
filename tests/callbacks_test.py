"""Batches of steps, from inside jit and from outside."""

import dataclasses
import functools
import random
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_environments as toys

from environments import base
from environments import callbacks
from environments import codec as codecs
from environments import store as stores

OK, INVALID, ERROR, DEAD, _, BAD = base.Status


def make_batched(environment=None, max_live=None, **sizes):
  sizes = {'observation_length': 9, 'action_length': 2, 'max_commands': 4,
           **sizes}
  codec = codecs.TextCodec(toys.Phrasebook(), toys.Tokenizer(), **sizes)
  store = stores.StateStore(environment or toys.Corridor(), max_live)
  return callbacks.BatchedEnvironment(store, codec)


def tokens_of(batched, handle, command):
  available = batched.store.timestep(handle).available
  row = available.index(command)
  return batched.codec.encode_commands(available)[row]


def same(left, right):
  for name, a, b in zip(left._fields, left, right):
    np.testing.assert_array_equal(a, b, err_msg=name)
    assert np.asarray(a).dtype == np.asarray(b).dtype, name


def test_reset_tells_prompt_commands_and_anchor():
  batched = make_batched()
  result, prompts = batched.reset(['train/0', 'train/3'], [0, 1])
  environment = toys.Corridor()
  for row, (task, seed) in enumerate([('train/0', 0), ('train/3', 1)]):
    _, timestep = environment.reset(task, seed)
    assert prompts[row] == batched.codec.encode_prompt(timestep)
    np.testing.assert_array_equal(
        result.commands[row], batched.codec.encode_commands(timestep.available))
    assert result.anchor[row] == callbacks.anchor(timestep)
  assert result.handles.tolist() == [1, 2]
  assert not result.observation.any() and not result.observation_length.any()
  assert not result.status.any() and not result.truncated.any()


def test_reset_that_fails_keeps_nothing():
  batched = make_batched()
  with pytest.raises(ValueError, match='no task'):
    batched.reset(['train/0', 'train/zero'], [0, 0])
  with pytest.raises(ValueError, match='2 tasks and 1 seeds'):
    batched.reset(['train/0', 'train/1'], [0])
  assert len(batched.store) == 0


@pytest.mark.parametrize('seed', range(3))
def test_a_row_is_what_the_store_says_of_that_state(seed):
  rng = random.Random(seed)
  batched, oracle = make_batched(), stores.StateStore(toys.Corridor())
  tasks = [f'train/{rng.randrange(4)}' for _ in range(6)]
  seeds = [rng.randrange(9) for _ in range(6)]
  result, _ = batched.reset(tasks, seeds)
  states = [oracle.reset(*pair) for pair in zip(tasks, seeds)]
  for _ in range(13):
    active = np.array([not timestep.done and rng.random() < 0.8
                       for _, timestep in states])
    before = result.handles
    actions = np.zeros((6, 2), np.int32)
    commands = [''] * 6
    for i in np.flatnonzero(active):
      if rng.random() < 0.8:
        commands[i] = rng.choice(states[i][1].available)
        actions[i] = tokens_of(batched, before[i], commands[i])
      else:
        actions[i] = 99
    got = batched.host_step(before, actions, active)
    for i in range(6):
      if not active[i]:
        continue
      states[i] = oracle.step(states[i][0], commands[i])
      timestep = states[i][1]
      observation, length = batched.codec.encode_observation(
          timestep, commands[i])
      np.testing.assert_array_equal(got.observation[i], observation)
      assert got.observation_length[i] == length
      np.testing.assert_array_equal(
          got.commands[i], batched.codec.encode_commands(timestep.available))
      assert got.rewards[i] == timestep.reward
      assert got.terminal[i] == timestep.terminal
      assert got.truncated[i] == timestep.truncated
      assert got.status[i] == (OK if commands[i] else INVALID)
      assert got.anchor[i] == callbacks.anchor(timestep)
      assert got.handles[i] not in before
    batched.release(np.where(active, before, 0))
    result = result._replace(handles=np.where(active, got.handles, before))
    assert len(batched.store) == 6
  batched.release(result.handles)
  assert batched.store.live == batched.store.environment.num_live == 0


def test_inactive_rows_touch_nothing():
  batched = make_batched()
  result, _ = batched.reset(['train/0'], [0])
  steps = batched.store.environment.num_steps
  got = batched.host_step(np.array([1, 77, 0], np.int32),
                          np.full((3, 2), 5, np.int32), np.zeros(3, bool))
  same(got, batched._blank(3))
  assert (got.anchor == callbacks.NO_ANCHOR).all()
  assert batched.store.environment.num_steps == steps
  assert len(batched.store) == 1


class Faulty(toys.Corridor):
  """Raises, dies or says it failed, as its tasks are numbered."""

  def step(self, state, action):
    fault = {3: ZeroDivisionError('3'), 4: KeyboardInterrupt('4')}.get(
        state.length)
    if fault:
      raise fault
    after, timestep = super().step(state, action)
    if state.length == 5:
      timestep = dataclasses.replace(timestep, status=DEAD)
    return after, timestep


def step_faulty(batched, tasks):
  result, _ = batched.reset(tasks, [0] * len(tasks))
  actions = np.stack([tokens_of(batched, handle, 'go right')
                      for handle in result.handles])
  return result.handles, actions


def test_an_exception_ends_its_row_only_and_is_logged_once(caplog):
  batched = make_batched(Faulty())
  handles, actions = step_faulty(
      batched, ['train/0', 'train/1', 'train/3', 'train/1', 'train/0'])
  got = batched.host_step(handles, actions, np.ones(5, bool))
  assert got.status.tolist() == [OK, ERROR, DEAD, ERROR, OK]
  assert got.truncated.tolist() == [False, True, True, True, False]
  assert (got.handles > 0).tolist() == [True, False, False, False, True]
  lost = batched._blank(5)._replace(
      status=got.status, truncated=got.truncated)
  for row in (1, 2, 3):
    for name, field in got._asdict().items():
      np.testing.assert_array_equal(
          field[row], getattr(lost, name)[row], err_msg=name)
  same(jax.tree.map(lambda a: a[0], got._replace(handles=np.zeros(5))),
       jax.tree.map(lambda a: a[4], got._replace(handles=np.zeros(5))))
  assert batched.errors == {'ZeroDivisionError': 2}
  assert batched.errors.total() == 2
  tracebacks = [r for r in caplog.records if 'ZeroDivision' in r.getMessage()]
  assert len(tracebacks) == 1 and 'raise fault' in tracebacks[0].getMessage()
  assert batched.pending_error is None
  batched.release(handles)
  batched.release(got.handles)
  assert batched.store.environment.num_live == 0


@pytest.mark.parametrize('jit', [False, True])
def test_an_interrupt_is_raised_on_the_host(jit):
  batched = make_batched(Faulty())
  handles, actions = step_faulty(batched, ['train/0', 'train/2', 'train/0'])
  step = jax.jit(batched.step) if jit else batched.host_step
  got = jax.tree.map(np.asarray, step(handles, actions, np.ones(3, bool)))
  # What came before is there, what comes after is not begun.
  assert got.status.tolist() == [OK, ERROR, ERROR]
  assert (got.handles > 0).tolist() == [True, False, False]
  again = batched.host_step(handles, actions, np.ones(3, bool))
  assert again.status.tolist() == [ERROR] * 3
  with pytest.raises(KeyboardInterrupt, match='4'):
    batched.raise_pending()
  batched.raise_pending()
  assert batched.host_step(
      handles, actions, np.array([True, False, False])).status[0] == OK


def test_a_limit_of_the_codec_ends_the_episode_alone(caplog):
  batched = make_batched(max_commands=1)
  batched.store.reset('train/0')
  handles = [h for h in range(2, 9) if batched.store.reset('train/3', h)]
  some = [h for h in handles
          if batched.store.timestep(h).available == ('go right',)]
  actions = tokens_of(batched, some[0], 'go right')[None]
  held = len(batched.store)
  got = batched.host_step(some[:1], actions, np.ones(1, bool))
  assert got.status.tolist() == [ERROR] and got.handles.tolist() == [0]
  assert len(batched.store) == held  # The new state was let go.
  batched.raise_pending()
  assert 'raise --max_commands' in caplog.text


def test_free_actions_need_no_table():
  # Each command in the corridor has two tokens.
  batched = make_batched(max_commands=1, action_length=1, constrained=False)
  result, _ = batched.reset(['train/3'], [0])
  got = batched.host_step(
      result.handles, np.array([[5]], np.int32), np.ones(1, bool))
  assert got.status.tolist() == [INVALID] and not got.truncated.any()
  assert not result.commands.any() and not got.commands.any()
  free = make_batched(max_commands=1, constrained=False)
  result, _ = free.reset(['train/3'], [0])
  available = free.store.timestep(int(result.handles[0])).available
  action = free.codec.encode_action(available[0].split())
  got = free.host_step(
      result.handles, np.array([action], np.int32), np.ones(1, bool))
  assert got.status.tolist() == [OK] and not free.errors


class Unpriced(toys.Corridor):
  """Gives no number as a reward."""

  def step(self, state, action):
    state, timestep = super().step(state, action)
    return state, dataclasses.replace(timestep, reward=float('nan'))


def test_a_reward_that_is_no_number_ends_the_episode_alone(caplog):
  batched = make_batched(Unpriced())
  result, _ = batched.reset(['train/0'], [0])
  available = batched.store.timestep(int(result.handles[0])).available
  actions = tokens_of(batched, int(result.handles[0]), available[0])[None]
  got = batched.host_step(result.handles, actions, np.ones(1, bool))
  assert got.status.tolist() == [ERROR] and got.truncated.tolist() == [True]
  assert got.rewards.tolist() == [0.0]
  assert 'finite reward' in caplog.text


def test_bad_handles_end_their_rows():
  batched = make_batched()
  result, _ = batched.reset(['train/0', 'train/0'], [0, 0])
  batched.release(result.handles[:1])
  got = batched.host_step([1, 2, 0, -5, 99], np.full((5, 2), 3, np.int32),
                          np.ones(5, bool))
  assert got.status.tolist() == [BAD, INVALID, BAD, BAD, BAD]
  assert got.truncated.tolist() == [True, False, True, True, True]
  assert (got.handles > 0).tolist() == [False, True, False, False, False]
  with pytest.raises(stores.BadHandle):
    batched.release(result.handles[:1])


def test_a_state_that_cannot_be_replayed_is_dead():
  batched = make_batched(toys.Restless())
  result, _ = batched.reset(['train/3'], [0])
  actions = tokens_of(batched, 1, 'go right')[None]
  second = batched.host_step(result.handles, actions, np.ones(1, bool))
  batched.store.evict(second.handles)
  actions = tokens_of(batched, 2, 'go right')[None]
  got = batched.host_step(second.handles, actions, np.ones(1, bool))
  assert got.status.tolist() == [DEAD] and got.truncated.tolist() == [True]


def test_anchor_is_the_same_in_every_process_and_for_equal_observations():
  timestep = base.TimeStep('You see \udc80.', available=('a', 'b'))
  assert callbacks.anchor(timestep) == callbacks.anchor(
      dataclasses.replace(timestep, reward=1., info={'a': 1}))
  for change in (dict(observation='x'), dict(available=('a',))):
    other = dataclasses.replace(timestep, **change)
    assert callbacks.anchor(timestep) != callbacks.anchor(other)
  anchors = [callbacks.anchor(base.TimeStep(str(i))) for i in range(2000)]
  assert len(set(anchors)) == 2000
  assert 0 <= min(anchors) and max(anchors) < 2**31
  # The check value that the definition of CRC-32 is published with.
  assert callbacks.anchor(base.TimeStep('123456789')) == 0xCBF43926 - 2**31


def walk_in_scan(batched, length, handles, commands):
  """Steps the first admissible command, `length` times, inside lax.scan."""
  def body(carry, _):
    handles, commands, active = carry
    got = batched.step(handles, commands[:, 0], active)
    active = active & ~got.terminal & ~got.truncated
    return (got.handles, got.commands, active), got

  active = jnp.ones(handles.shape, bool)
  return jax.lax.scan(body, (handles, commands, active), length=length)[1]


def test_jit_scan_and_host_agree_and_step_each_row_once():
  tasks, seeds = [f'train/{i % 4}' for i in range(8)], list(range(8))
  host, traced = make_batched(), make_batched()
  result, _ = host.reset(tasks, seeds)
  start, _ = traced.reset(tasks, seeds)
  walk = jax.jit(functools.partial(walk_in_scan, traced, 14))
  got = jax.tree.map(np.asarray, walk(start.handles, start.commands))
  active, total = np.ones(8, bool), 0
  for t in range(14):
    result = host.host_step(result.handles, result.commands[:, 0], active)
    total += active.sum()
    active &= ~result.terminal & ~result.truncated
    same(result, jax.tree.map(lambda a: a[t], got))
  steps = traced.store.environment.num_steps
  assert steps == host.store.environment.num_steps == total
  assert len(traced.store) == 8 + total


def test_a_step_nobody_reads_is_taken_once():
  batched = make_batched()
  result, _ = batched.reset(['train/0', 'train/0'], [0, 0])

  @jax.jit
  def step(handles, actions):
    batched.step(handles, actions, handles > 0)
    return handles

  step(result.handles, result.commands[:, 0]).block_until_ready()
  jax.effects_barrier()
  assert batched.store.environment.num_steps == 2


def test_donated_arguments():
  batched, plain = make_batched(), make_batched()
  tasks = ['train/1', 'train/2']
  result, _ = batched.reset(tasks, [0, 0])
  plain.reset(tasks, [0, 0])
  actions = result.commands[:, 0]
  step = jax.jit(batched.step, donate_argnums=(0, 2))
  got = step(jnp.asarray(result.handles), jnp.asarray(actions),
             jnp.ones(2, bool))
  same(plain.host_step(result.handles, actions, np.ones(2, bool)), got)


@pytest.mark.parametrize('handles, actions, active, lengths', [
    ((2,), (2, 3), (2,), (2,)), ((2,), (3, 2), (2,), (2,)),
    ((2,), (2, 2), (3,), (2,)), ((2, 1), (2, 2), (2,), (2,)),
    ((2,), (2, 2), (2,), (3,)),
])
def test_wrong_shapes_are_told(handles, actions, active, lengths):
  with pytest.raises(ValueError, match='must have shapes'):
    make_batched().step(
        np.zeros(handles, np.int32), np.zeros(actions, np.int32),
        np.zeros(active, bool), np.zeros(lengths, np.int32))


_STRESS = '''
import jax, jax.numpy as jnp, numpy as np
import callbacks_test
batched = callbacks_test.make_batched()
rows = 512
start, _ = batched.reset(['train/3'] * rows, range(rows))

@jax.jit
def turns(handles, commands, weights):
  def body(carry, _):
    handles, commands, weights = carry
    weights = jnp.tanh(weights @ weights)
    first = jnp.where(weights[0, 0] < 2, commands[:, 0], 0)
    got = batched.step(handles, first, handles > 0)
    weights = jnp.tanh(weights @ weights + got.rewards.sum())
    return (got.handles, got.commands, weights), got.status
  return jax.lax.scan(body, (handles, commands, weights), length=10)

weights = jax.random.normal(jax.random.key(0), (384, 384))
for call in range(20):
  (handles, _, _), status = turns(start.handles, start.commands, weights)
  if call % 5 == 0:
    np.asarray(status)
  handles = None
jax.block_until_ready(status)
batched.raise_pending()
print('steps', batched.store.environment.num_steps)
'''


@pytest.mark.slow
def test_callbacks_among_heavy_work_never_wait_for_themselves():
  # In a process of its own: a deadlock could not be ended from inside.
  done = subprocess.run(
      [sys.executable, '-c', _STRESS], capture_output=True, text=True,
      timeout=300, env={**dict(PYTHONPATH=':'.join(sys.path)),
                        'JAX_PLATFORMS': 'cpu'})
  assert done.returncode == 0, done.stderr
  assert done.stdout.strip() == f'steps {512 * 10 * 20}'

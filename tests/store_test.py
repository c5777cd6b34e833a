"""Handles count references right, and eviction is never noticed."""

import dataclasses
import random
import threading

import pytest
import toy_environments as toys

from environments import base
from environments import store as stores


class Oracle:
  """A store that keeps everything, in the plainest way."""

  def __init__(self, environment):
    self.environment = environment
    self.held = {}  # handle: [references, state, timestep]

  def add(self, handle, state, timestep):
    assert handle not in self.held
    self.held[handle] = [1, state, timestep]


def told(timestep):
  return dataclasses.replace(timestep, info={})


@pytest.mark.parametrize('max_live', [None, 1, 2, 5])
@pytest.mark.parametrize('seed', range(4))
def test_any_history_is_as_if_everything_were_kept(seed, max_live):
  rng = random.Random(seed)
  environment, other = toys.Corridor(), toys.Corridor()
  store, oracle = stores.StateStore(environment, max_live), Oracle(other)
  last = 0
  for _ in range(400):
    act = rng.choices(('reset', 'step', 'retain', 'release', 'keep', 'evict'),
                      (2, 10, 2, 5, 1, 1))[0]
    handles = list(oracle.held)
    if act == 'reset' or not handles:
      task, task_seed = f'train/{rng.randrange(4)}', rng.randrange(3)
      handle, got = store.reset(task, task_seed)
      state, expected = other.reset(task, task_seed)
    elif act == 'step':
      parent = rng.choice(handles)
      _, state, timestep = oracle.held[parent]
      if timestep.done:
        continue
      action = rng.choice((*timestep.available, 'dance'))
      handle, got = store.step(parent, action)
      state, expected = other.step(state, action)
      assert store.log(handle).actions == (*store.log(parent).actions, action)
    else:
      some = rng.choice(handles)
      if act == 'retain':
        store.retain(some)
        oracle.held[some][0] += 1
      elif act == 'release':
        store.release(some)
        oracle.held[some][0] -= 1
        if not oracle.held[some][0]:
          del oracle.held[some]
      elif act == 'keep':
        store.keep([some], rng.random() - 0.2)
      else:
        store.evict([some])
      continue
    assert told(got) == told(expected) == told(store.timestep(handle))
    assert handle == last + 1  # Never used before, counted from 1.
    last = handle
    oracle.add(handle, state, expected)
    assert len(store) == len(oracle.held)
    if max_live is None:
      assert store.live <= len(store)
    else:
      assert store.live <= max_live and store.peak <= max_live
      assert environment.num_live <= max_live
  for handle, (references, _, timestep) in oracle.held.items():
    assert store.timestep(handle) == timestep
    assert environment._available(store.get(handle)) == timestep.available
    for _ in range(references):
      store.release(handle)
  assert environment.num_live == store.live == len(store) == 0
  assert (store.replays > 0) == (store.evicted > 0)


def grow(store, task='train/3', length=6):
  """Walks back and forth; returns all handles."""
  handles = [store.reset(task)[0]]
  for i in range(length):
    action = 'go left' if i % 2 else 'go right'
    handles.append(store.step(handles[-1], action)[0])
  return handles


def test_the_last_release_frees_once_and_the_handle_is_bad():
  environment = toys.Corridor()
  store = stores.StateStore(environment)
  handle, _ = store.reset('train/0')
  store.retain(handle)
  store.release(handle)
  assert environment.num_released == 0
  store.release(handle)
  assert environment.num_released == 1
  for use in (store.get, store.retain, store.release, store.timestep, store.log,
              lambda handle: store.step(handle, 'go right')):
    with pytest.raises(stores.BadHandle, match=f'{handle} was released'):
      use(handle)
  assert environment.num_released == 1


@pytest.mark.parametrize('handle', [0, -1, 7])
def test_a_handle_never_given_out_is_bad(handle):
  store = stores.StateStore(toys.Corridor())
  with pytest.raises(KeyError, match='never existed'):
    store.get(handle)


def test_a_log_outlives_the_handles_of_its_ancestors():
  environment = toys.Corridor()
  store = stores.StateStore(environment, max_live=1)
  handles = grow(store)
  timestep = store.timestep(handles[-1])
  for handle in handles[:-1]:
    store.release(handle)
  store.evict(handles[-1:])
  assert environment.num_live == 0
  after, _ = store.step(handles[-1], 'go right')
  assert store.replays == 1 and environment.num_live == 1
  assert store.timestep(handles[-1]) == timestep
  assert store.log(after) == stores.Log(
      'train/3', 0, ('go right', 'go left') * 3 + ('go right',))


def test_a_replay_starts_at_the_nearest_live_ancestor():
  environment = toys.Corridor()
  store = stores.StateStore(environment)
  handles = grow(store)
  store.evict(handles[4:])
  resets, steps = environment.num_resets, environment.num_steps
  store.get(handles[6])
  assert environment.num_resets == resets
  assert environment.num_steps == steps + 3
  assert environment.num_live == 5  # Those on the way were let go again.


def test_kept_states_stay_and_the_least_uncertain_goes_first():
  environment = toys.Corridor()
  store = stores.StateStore(environment, max_live=4)
  handles = grow(store, length=3)
  store.keep(handles[:3], [0.3, 0.1, 0.2])  # handles[3] is not kept.
  grown = grow(store, length=5)  # One after the other in the one free place.

  def is_live(handle):
    before = store.replays
    store.get(handle)
    return store.replays == before

  assert [is_live(handle) for handle in handles[:3]] == [True] * 3
  store.keep(grown[-1:], 0.05)
  for expected in (grown[-1], handles[1], handles[2]):
    evicted = store.evicted
    newest, _ = store.reset('train/1')
    store.keep([newest], 1.0)
    assert store.evicted == evicted + 1
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(store, '_replay', lambda node: pytest.fail('evicted'))
      with pytest.raises(pytest.fail.Exception):
        store.get(expected)
  assert is_live(handles[0])


def test_keep_marks_all_or_nothing():
  store = stores.StateStore(toys.Corridor())
  handle, _ = store.reset('train/0')
  with pytest.raises(ValueError, match='1 handles, got 2'):
    store.keep([handle], [1., 2.])
  with pytest.raises(stores.BadHandle):
    store.keep([handle, 99])
  assert not store._kept


class Diverging(toys.Corridor):
  """Tells something else from the second reset on."""

  def reset(self, task, seed=0):
    state, timestep = super().reset(task, seed)
    if self.num_resets > 1:
      timestep = dataclasses.replace(timestep, reward=0.5)
    return state, timestep


class Dying(toys.Corridor):
  """Cannot be reset twice."""

  def reset(self, task, seed=0):
    if self.num_resets:
      raise OSError('no more processes')
    return super().reset(task, seed)


@pytest.mark.parametrize('faulty', [Diverging, Dying, toys.Restless])
def test_a_replay_that_differs_is_an_error_and_leaks_nothing(faulty):
  environment = faulty()
  store = stores.StateStore(environment)
  handles = grow(store)
  store.evict(handles)
  for _ in range(2):
    with pytest.raises(stores.StateDiverged, match='replaying'):
      store.get(handles[-1])
    assert environment.num_live == store.live == 0
  for handle in handles:
    store.release(handle)


@pytest.mark.parametrize('change', [
    dict(observation='b'), dict(reward=-2), dict(terminal=True),
    dict(truncated=True), dict(available=('xy',)), dict(available=('x',)),
    dict(available=('x', 'y', '')), dict(observation='ax', available=('y',)),
    dict(status=base.Status.INVALID_ACTION), dict(observation='a\udc80'),
])
def test_digest_tells_apart_what_was_told(change):
  timestep = base.TimeStep('a', reward=-1, available=('x', 'y'))
  other = dataclasses.replace(timestep, **change)
  assert stores.digest(timestep) != stores.digest(other)
  assert stores.digest(timestep) == stores.digest(
      dataclasses.replace(timestep, info={'seconds': 3}))


def test_a_state_given_back_unchanged_is_released_once():
  environment = toys.Corridor()
  store = stores.StateStore(environment)
  handle, _ = store.reset('train/0')
  same, timestep = store.step(handle, 'dance')
  assert timestep.status == base.Status.INVALID_ACTION
  assert store.get(same) is store.get(handle)
  store.release(handle)
  assert environment.num_live == 1
  store.step(same, 'go right')
  store.release(same)
  store.close()
  assert environment.num_live == 0


def test_close_releases_all_and_twice_is_fine():
  environment = toys.Corridor()
  store = stores.StateStore(environment)
  handles = grow(store)
  store.retain(handles[2])
  store.close()
  store.close()
  assert environment.num_live == 0 and environment.num_released == 7
  with pytest.raises(stores.BadHandle):
    store.get(handles[2])
  assert not environment.closed


def test_close_tries_every_state():
  class Sticky(toys.Corridor):
    def release(self, state):
      super().release(state)
      raise OSError('sticky')

  environment = Sticky()
  store = stores.StateStore(environment)
  grow(store)
  with pytest.raises(ExceptionGroup, match='could not be released'):
    store.close()
  assert environment.num_live == 0


def test_put_takes_over_what_the_caller_made():
  environment = toys.Corridor()
  store = stores.StateStore(environment)
  state, timestep = environment.reset('train/0', 4)
  root = store.put(state, timestep, task='train/0', seed=4)
  after, timestep = environment.step(state, 'go right')
  child = store.put(after, timestep, parent=root, action='go right')
  assert store.get(child) is after
  store.evict([root, child])
  assert store.get(child).at == after.at and store.timestep(child) == timestep
  for wrong in (dict(), dict(parent=root), dict(action='go right'),
                dict(parent=root, action='go right', task='train/0')):
    with pytest.raises(ValueError, match='either parent and action or task'):
      store.put(state, timestep, **wrong)


@pytest.mark.parametrize('max_live', [0, -3])
def test_max_live_below_one_is_refused(max_live):
  with pytest.raises(ValueError, match='at least 1'):
    stores.StateStore(toys.Corridor(), max_live)


def test_what_cannot_be_replayed_is_not_evicted():
  environment = toys.Corridor()
  environment.capabilities = base.Capabilities(deterministic=False)
  with pytest.raises(ValueError, match='deterministic'):
    stores.StateStore(environment, max_live=3)
  store = stores.StateStore(environment)
  handle, _ = store.reset('train/0')
  with pytest.raises(ValueError, match='replay'):
    store.evict([handle])


def test_handles_end_before_they_overflow(monkeypatch):
  monkeypatch.setattr(stores, '_MAX_HANDLE', 2)
  environment = toys.Corridor()
  store = stores.StateStore(environment)
  handle, _ = store.reset('train/0')
  store.step(handle, 'go right')
  with pytest.raises(OverflowError):
    store.reset('train/0')
  store.close()
  assert environment.num_live == 0


def test_threads_share_a_store():
  environment = toys.Corridor()
  store = stores.StateStore(environment, max_live=3)
  failures = []

  def work(seed):
    rng = random.Random(seed)
    try:
      for _ in range(30):
        handle, timestep = store.reset(f'train/{rng.randrange(4)}', seed)
        while not timestep.done:
          parent = handle
          handle, timestep = store.step(
              parent, rng.choice(timestep.available))
          store.release(parent)
        store.release(handle)
    except BaseException as error:
      failures.append(error)

  threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert not failures
  assert len(store) == store.live == environment.num_live == 0


def test_counters_by_name():
  store = stores.StateStore(toys.Corridor(), max_live=2)
  handles = grow(store, length=3)
  store.get(handles[0])
  assert store.metrics() == {
      'store/handles': 4, 'store/live': 2, 'store/peak': 2,
      'store/evicted': 3, 'store/replays': 1}

"""Training as a user runs it: killed, resumed, misused, on a full disk."""

import dataclasses
import errno
import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest

from bpo_jax import algorithms
from bpo_jax import checkpoint
from bpo_jax import learner
from environments.alfworld import environment as alfworld_environment
from experiments import configs
from experiments import train
from experiments import warm_start
import tiny_runs

_REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
# Adam makes whole steps of the rounding of a KL term whose gradient is 0.
_CREDIT_ALONE = {'entropy_coef': 0.0, 'kl_coef': 0.0}


@pytest.fixture(scope='module', autouse=True)
def _no_agent_is_left():
  yield
  tiny_runs.forget_agents()


@pytest.fixture(autouse=True)
def _one_agent(monkeypatch):
  tiny_runs.share_agents(monkeypatch)


def _call(*arguments):
  return tiny_runs.call(train, configs.TrainConfig, *arguments)


def _start(folder, **overrides):
  return train.set_up(tiny_runs.config(folder, **overrides))


def _check_resumption(folder, updates, save_every, **overrides):
  """A run killed after the metrics of an update that no checkpoint has."""
  overrides |= {'updates': updates, 'save_every': save_every}
  whole = _start(folder / 'whole', **overrides)
  tiny_runs.finish(whole)
  tiny_runs.finish(_start(folder, **overrides), stop=save_every + 1)
  resumed = _start(folder, resume=True, **overrides)
  assert int(resumed.state.update) == save_every
  tiny_runs.finish(resumed)
  assert tiny_runs.bits(resumed.state) == tiny_runs.bits(whole.state)
  rows = tiny_runs.metrics(whole.workdir)
  assert [int(row['update']) for row in rows] == list(range(1, updates + 1))
  assert tiny_runs.metrics(resumed.workdir) == rows
  assert tiny_runs.bits(whole.state.params) != tiny_runs.bits(whole.reference)


def test_a_run_goes_on_with_less_memory(tmp_path):
  overrides = dict(updates=2, save_every=1)
  killed = _start(tmp_path, **overrides)
  tiny_runs.finish(killed, stop=2)
  first = tiny_runs.metrics(killed.workdir)[1]
  resumed = _start(
      tmp_path, resume=True, max_tokens=64, row_length=64, max_rows=2,
      **overrides)
  assert int(resumed.state.update) == 1
  tiny_runs.finish(resumed)
  second = tiny_runs.metrics(resumed.workdir)[1]
  for name in ('rows/sampled_share', 'rows/computed_tokens'):
    assert first[name] != second[name], name
  # It is the same work, parted otherwise.
  for name in ('tokens', 'tree/nodes', 'gradient/norm', 'parameters/norm'):
    np.testing.assert_allclose(
        float(second[name]), float(first[name]), rtol=1e-4, err_msg=name)


def test_a_killed_run_goes_on_bit_for_bit(tmp_path):
  _check_resumption(tmp_path, updates=2, save_every=1, algorithm='rloo')


@pytest.fixture(name='lucky_words')
def _lucky_words(monkeypatch):
  """Rewards some actions, so that returns differ where nothing is solved."""
  plain = alfworld_environment.GameEnvironment.step

  def step(self, state, action):
    state, timestep = plain(self, state, action)
    is_lucky = sum(map(ord, action)) % 8 == 0
    return state, dataclasses.replace(timestep, reward=float(is_lucky))

  monkeypatch.setattr(alfworld_environment.GameEnvironment, 'step', step)


@pytest.mark.parametrize('algorithm', algorithms.names())
def test_every_algorithm_trains_for_two_updates(
    algorithm, tmp_path, lucky_words):
  del lucky_words
  run = _start(tmp_path, algorithm=algorithm, updates=2, debug=True,
               **_CREDIT_ALONE)
  before = tiny_runs.bits(run.state.params)
  seen = run.state.statistics  # As if half of all had succeeded before.
  run.state = run.state._replace(statistics=seen.replace(
      visits=seen.visits + 8, successes=seen.successes + 4,
      steps=seen.steps + 24))
  rows = [values for _, values in train.train(run)]
  assert len(rows) == 2 and int(run.state.update) == 2
  for values in rows:
    assert np.isfinite(values['loss/surrogate'])
    assert np.isfinite(values['gradient/norm'])
    assert values['tree/unspent_forks'] >= 0
  if run.method.plan is not None:
    assert rows[0]['tree/leaves'] > run.method.num_backbones
  assert max(values['return'] for values in rows) > 0
  assert tiny_runs.bits(run.state.params) != before
  if 'value head' in run.method.needs:  # Which moves what is below it, too.
    assert any(abs(values['loss/surrogate']) > 1e-4 for values in rows)
  assert checkpoint.latest_step(run.workdir / 'checkpoints') == 2


def test_without_credit_nothing_moves(tmp_path, lucky_words):
  """So that what moves in the test above was moved by credit."""
  del lucky_words
  run = _start(tmp_path, algorithm='rloo', updates=2, **_CREDIT_ALONE)
  before, credit = tiny_runs.bits(run.state.params), run.method.credit

  def nothing(tree, **arrays):
    found = credit(tree, **arrays)
    return found.replace(advantages=jnp.zeros_like(found.advantages))

  run.method = dataclasses.replace(run.method, credit=nothing)
  tiny_runs.finish(run)
  assert tiny_runs.bits(run.state.params) == before


@pytest.mark.slow
@pytest.mark.parametrize('algorithm', algorithms.names())
def test_so_does_one_of_every_algorithm(algorithm, tmp_path):
  _check_resumption(tmp_path, updates=4, save_every=2, algorithm=algorithm)


def test_the_binary_from_first_to_last(tmp_path, capsys):
  config = tiny_runs.config(tmp_path, updates=1)
  arguments = tiny_runs.arguments(config)
  assert _call(*arguments) == 0
  shown = capsys.readouterr().out
  assert 'warm start on valid_unseen' in shown and 'bpo' in shown
  workdir = tmp_path / 'run'
  result = json.loads((workdir / 'result.json').read_text())
  assert result['updates'] == 1 and result['after']['num_tasks'] == 2
  assert checkpoint.latest_step(workdir / 'checkpoints') == 1

  assert _call(*arguments) == 2
  assert 'holds a run already; pass --resume' in capsys.readouterr().err
  assert _call(*arguments, '--resume', '--temperature=0.5') == 2
  error = capsys.readouterr().err
  assert 'temperature: 1.0 there, 0.5 now' in error and error.count('\n') == 1
  # A longer run is the same run.
  assert _call(*arguments, '--resume', '--updates=2') == 0
  again = json.loads((workdir / 'result.json').read_text())
  assert again['updates'] == 2 and again['before'] == result['before']


def _interrupt(monkeypatch, epoch):
  """Raises KeyboardInterrupt where the step of an epoch of the run begins."""
  make = learner.make_update_fn

  def make_update_fn(*args):
    update, epochs = make(*args), itertools.count(1)

    def interrupted(*args):
      if next(epochs) == epoch:
        raise KeyboardInterrupt
      return update(*args)
    return interrupted

  monkeypatch.setattr(learner, 'make_update_fn', make_update_fn)


def test_an_interrupted_run_says_how_to_go_on(tmp_path, capsys):
  config = tiny_runs.config(
      tmp_path, algorithm='rloo', epochs=2, save_every=2, updates=4)
  # In second epochs: of the first update, and of that after a checkpoint.
  for epoch, resume, words in ((2, [], 'begin anew'),
                               (8, ['--resume'], 'go on after update 2')):
    with pytest.MonkeyPatch.context() as patch:
      _interrupt(patch, epoch)
      assert _call(*tiny_runs.arguments(config), *resume) == 130
    error = capsys.readouterr().err
    assert error.endswith(f'--workdir={config.workdir} --resume {words}.\n')
  resumed = train.set_up(dataclasses.replace(config, resume=True))
  assert resumed.state.update == 2


@pytest.mark.parametrize('arguments, words', [
    (['--learning_rte=1'], ['Did you mean learning_rate']),
    (['--updates=many'], ['updates', 'expected int', "'many'"]),
    (['--width=17'], ['width must be a multiple']),
    (['--algorithm=gprpo'], ['Did you mean grpo']),
    (['--algorithm=grpo', '--rho=0.5'], ['--rho is no option of grpo']),
    (['--algorithm=rloo', '--group_size=4'], ['branches at the root alone']),
    (['--prefix_credit=nearst'], ['Did you mean nearest']),
    (['--env=alfworld'], ['needs data=DIR']),
    (['--env=alfworld', '--data=/no/such/place'], ['no folder /no/such/place']),
    (['--eval_split=valid'], ["no split 'valid'", 'valid_unseen']),
    (['--train_split=test'], ["no split 'test'", 'train']),
    (['--workdir=none', '--resume'], ['--resume needs the --workdir']),
    (['--row_length=32'], ['room for a path of', 'raise --row_length']),
])
def test_what_is_wrong_is_one_line_and_leaves_nothing(
    arguments, words, tmp_path, capsys):
  usual = tiny_runs.arguments(tiny_runs.config(tmp_path, algorithm='rloo'))
  usual = [a for a in usual if not a.startswith(('--num_backb', '--algor'))]
  assert _call(*usual, *arguments) == 2
  error = capsys.readouterr().err
  assert error.startswith('error: ') and error.count('\n') == 1
  for word in words:
    assert word in error
  assert not (tmp_path / 'run').exists()


def _alfworld(folder, **overrides):
  return _start(folder, env='alfworld', data=str(folder), **overrides)


def test_an_empty_split_is_no_split(tmp_path):
  tiny_runs.write_games(tmp_path, train=1)
  (tmp_path / 'json_2.1.1' / 'valid_unseen').mkdir()
  with pytest.raises(ValueError, match="no split 'valid_unseen'; .* train$"):
    _alfworld(tmp_path)
  assert not (tmp_path / 'run').exists()


@pytest.mark.slow
def test_a_broken_training_game_is_passed_over(tmp_path, caplog):
  games = tiny_runs.write_games(tmp_path, train=4, valid_unseen=1)
  games[1].write_text(games[1].read_text()[:5000])
  run = _alfworld(tmp_path, updates=5, warm_start_updates=1, max_turns=40)
  tiny_runs.finish(run)
  rows = tiny_runs.metrics(run.workdir)
  assert len(rows) == 5
  # Ten places of a stream in which every fourth cannot be played.
  skipped = sum(int(row['skipped_tasks']) for row in rows)
  assert skipped >= 2 and int(run.state.tasks_seen) == 10 + skipped
  warnings = [r for r in caplog.records if 'passed over' in r.getMessage()]
  assert len(warnings) == 1 and str(games[1]) in warnings[0].getMessage()


def test_tasks_come_once_each_without_the_broken(tmp_path):
  games = tiny_runs.write_games(tmp_path, train=5, valid_unseen=1)
  games[3].write_text('{}')
  run = _alfworld(tmp_path, tasks_per_update=2)
  seen = []
  for _ in range(4):
    tasks, place = train.next_tasks(run)
    run.state = run.state._replace(tasks_seen=jnp.int32(place))
    seen += [task.id for task in tasks]
  assert len(set(seen[:4])) == len(set(seen[4:])) == 4
  for game in games:
    game.write_text('{}')
  run.agent.environment.close()
  with pytest.raises(ValueError, match='only 0 tasks .*game.tw-pddl'):
    train.next_tasks(run)


def test_a_broken_evaluation_game_is_refused_at_once(tmp_path):
  tiny_runs.write_games(tmp_path, train=1, valid_unseen=2)
  broken = max(tmp_path.glob('json*/valid_unseen/*/*/game.tw-pddl'))
  broken.write_text('{}')
  with pytest.raises(ValueError, match=str(broken)):
    _alfworld(tmp_path)
  assert not (tmp_path / 'run').exists()


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(tmp_path, monkeypatch):
  save, attempts = checkpoint.save, []

  def sometimes_full(directory, step, *args, **kwargs):
    attempts.append(step)
    if step == 2:
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    save(directory, step, *args, **kwargs)

  run = _start(tmp_path, save_every=1, updates=3)
  monkeypatch.setattr(checkpoint, 'save', sometimes_full)
  tiny_runs.finish(run)
  assert attempts == [1, 2, 3] and int(run.state.update) == 3
  assert checkpoint.steps(run.workdir / 'checkpoints') == [1, 3]


def test_a_small_disk_fills_up_and_is_cleared(tmp_path):
  disk = tmp_path / 'disk'
  disk.mkdir()
  mounted = shutil.which('mount') and subprocess.run(
      ['mount', '-t', 'tmpfs', '-o', 'size=4m', 'tmpfs', str(disk)],
      capture_output=True, check=False).returncode == 0
  if not mounted:
    pytest.skip('mounting a small file system needs root')
  try:
    run = _start(disk, save_every=1, updates=5, cache_dir=str(tmp_path))
    writers = train.make_writers(run)
    filler = disk / 'filler'
    for update, values in train.train(run):
      if update == 3:
        with pytest.raises(OSError), filler.open('wb') as file:
          while True:
            file.write(bytes(1 << 12))
            file.flush()
      if update == 5:
        # What was saved before the disk was full is there and whole.
        assert checkpoint.find(run.workdir / 'checkpoints').step == 2
        filler.unlink()
      train.write_metrics(writers, update, values)
    assert checkpoint.find(run.workdir / 'checkpoints').step == 5
    assert [row['update'] for row in tiny_runs.metrics(run.workdir)][-1] == '5'
  finally:
    subprocess.run(['umount', '-l', str(disk)], check=True)


def test_a_gradient_that_is_not_finite_ends_the_run(tmp_path, monkeypatch):
  tiny_runs.finish(_start(tmp_path, save_every=1), stop=2)
  monkeypatch.setattr(
      learner, 'make_policy_loss',
      lambda *_: learner.Loss(
          lambda outputs, *_: ({'loss/x': outputs.log_probs * jnp.nan}, {})))
  config = tiny_runs.config(tmp_path, save_every=1)
  with pytest.raises(SystemExit, match='step of update 2 is not finite'):
    _call(*tiny_runs.arguments(config), '--resume')
  assert checkpoint.find(tmp_path / 'run' / 'checkpoints').step == 1


def test_a_step_that_is_not_finite_ends_the_run(tmp_path, monkeypatch):
  # A finite gradient and a rate that float32 cannot hold.
  config = tiny_runs.config(tmp_path, save_every=1, learning_rate=1e300)
  with pytest.raises(SystemExit, match='step of update 1 is not finite'):
    _call(*tiny_runs.arguments(config))
  assert checkpoint.latest_step(tmp_path / 'run' / 'checkpoints') is None


def test_checkpoints_without_their_config_are_refused(tmp_path):
  tiny_runs.finish(_start(tmp_path, save_every=1), stop=2)
  (tmp_path / 'run' / 'checkpoints' / 'config.json').unlink()
  with pytest.raises(ValueError, match='no config.json'):
    _start(tmp_path, resume=True, seed=7)


def test_a_run_that_never_began_leaves_its_folder_free(tmp_path, monkeypatch):
  with monkeypatch.context() as patch, pytest.raises(ValueError):
    patch.setattr(warm_start, 'load', lambda *_: int('no warm start'))
    _start(tmp_path, seed=1)
  _start(tmp_path, seed=2)


def test_a_spoilt_warm_start_is_made_again(tmp_path, caplog):
  run = _start(tmp_path)
  for file in tmp_path.rglob('warm_start/**/d/*'):
    file.write_bytes(b'spoilt')
  again = _start(tmp_path, resume=True)
  assert tiny_runs.bits(again.reference) == tiny_runs.bits(run.reference)
  assert any('of no use' in r.getMessage() for r in caplog.records)


def test_warm_starts_are_shared_by_the_runs_that_agree(tmp_path, monkeypatch):
  made = []
  trained = warm_start.train
  monkeypatch.setattr(
      warm_start, 'train', lambda *args: made.append(1) or trained(*args))
  _start(tmp_path)
  _start(tmp_path, algorithm='rloo', workdir=str(tmp_path / 'other'))
  assert len(made) == 1
  _start(tmp_path, seed=1, workdir=str(tmp_path / 'third'))
  assert len(made) == 2


def _launch(config, *more):
  command = [sys.executable, '-m', 'experiments.train',
             *tiny_runs.arguments(config), *more]
  environment = os.environ | {
      'PYTHONPATH': str(_REPOSITORY), 'JAX_PLATFORMS': 'cpu'}
  return subprocess.Popen(
      command, env=environment, cwd=_REPOSITORY, stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL)


def _kill_when(process, condition):
  deadline = time.monotonic() + 300
  while not condition():
    assert process.poll() is None and time.monotonic() < deadline
    time.sleep(0.001)
  process.send_signal(signal.SIGKILL)
  assert process.wait() == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize('algorithm', ['bpo', 'bpo_rb'])
def test_killed_twice_by_force(algorithm, tmp_path):
  """Once between checkpoints, once while one is being written."""
  sizes = dict(algorithm=algorithm, updates=7, warm_start_updates=1,
               cache_dir=str(tmp_path / 'cache'))
  whole = tiny_runs.config(tmp_path / 'whole', **sizes)
  assert _launch(whole).wait() == 0
  config = tiny_runs.config(tmp_path / 'killed', **sizes)
  workdir = pathlib.Path(config.workdir)
  rows = lambda: (workdir / 'metrics.csv').exists() and len(
      tiny_runs.metrics(workdir))
  _kill_when(_launch(config), lambda: rows() >= 3)
  saving = lambda: any((workdir / 'checkpoints').glob('*.partial'))
  _kill_when(_launch(config, '--resume'), lambda: rows() >= 4 and saving())
  assert _launch(config, '--resume').wait() == 0
  assert tiny_runs.metrics(workdir) == tiny_runs.metrics(whole.workdir)
  target = train.set_up(tiny_runs.config(
      tmp_path / 'target', **sizes)).state
  states = [
      checkpoint.restore(f'{path}/checkpoints', target)
      for path in (whole.workdir, workdir)]
  assert [found.step for found in states] == [7, 7]
  a, b = (tiny_runs.bits(found.state) for found in states)
  assert a == b
  results = [json.loads(pathlib.Path(path, 'result.json').read_text())
             for path in (whole.workdir, workdir)]
  for name in ('updates', 'steps', 'tokens', 'before', 'after'):
    assert results[0][name] == results[1][name]

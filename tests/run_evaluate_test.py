"""Evaluation of a run as a user asks for it, and what can be wrong with it."""

import dataclasses
import json
import pathlib
import shutil

import pytest

from bpo_jax import checkpoint
from experiments import assembly
from experiments import config_flags
from experiments import configs
from experiments import evaluate
from experiments import warm_start
import tiny_runs


@pytest.fixture(scope='module', autouse=True)
def _no_agent_is_left():
  yield
  tiny_runs.forget_agents()


@pytest.fixture(autouse=True)
def _one_agent(monkeypatch):
  tiny_runs.share_agents(monkeypatch)


def _save_run(folder, **overrides):
  """A run that has learnt nothing, saved after its updates 3 and 4."""
  config = tiny_runs.config(folder, **overrides)
  workdir = pathlib.Path(config.workdir)
  agent = assembly.make_agent(config)
  checkpoint.check_config(
      workdir / 'checkpoints', config_flags.to_dict(config))
  params = assembly.init_params(config, agent)
  checkpoint.save(workdir / warm_start.FOLDER, 0, params)
  other = assembly.init_params(dataclasses.replace(config, seed=1), agent)
  for step, values in ((3, params), (4, other)):
    state = assembly.init_state(config, agent, values)
    checkpoint.save(workdir / 'checkpoints', step, state,
                    {'vocabulary': agent.tokenizer.to_dict()})
  return workdir


def _call(*arguments):
  return tiny_runs.call(evaluate, configs.EvaluateConfig, *arguments)


def _scores(workdir, *arguments):
  out = workdir / 'out.json'
  assert _call(f'--workdir={workdir}', '--tasks=3', f'--out={out}',
               *arguments) == 0
  return json.loads(out.read_text())


def test_greedy_and_sampled_on_the_console_and_in_json(tmp_path, capsys):
  workdir = _save_run(tmp_path)
  result = _scores(workdir, '--passes=2')
  shown = capsys.readouterr().out
  assert 'greedy %' in shown and 'sampled %' in shown and 'all' in shown
  assert result['update'] == 4 and result['split'] == 'valid_unseen'
  for way, passes in (('greedy', 1), ('sampled', 2)):
    score = result['scores'][way]
    assert (score['num_tasks'], score['passes']) == (3, passes)
    low, high = score['interval']
    assert 0 <= low <= score['success'] <= high <= 1
    assert sum(count for _, count in score['by_type'].values()) == 3
  assert _scores(workdir, '--passes=2') == result


def test_which_policy_is_scored(tmp_path, monkeypatch):
  workdir = _save_run(tmp_path)
  scored = []

  def score(config, agent, params):
    scored.append(tiny_runs.bits(params))
    return {}

  monkeypatch.setattr(evaluate, 'score', score)
  monkeypatch.setattr(evaluate, 'table', lambda scores: '')
  for arguments in ((), ('--step=3',), ('--warm_start',)):
    assert _call(f'--workdir={workdir}', *arguments) == 0
  last, third, first = scored
  assert third == first != last


def test_one_way_alone_and_another_split(tmp_path):
  workdir = _save_run(tmp_path)
  result = _scores(workdir, '--greedy=yes', '--split=valid_seen')
  assert list(result['scores']) == ['greedy']
  result = _scores(workdir, '--greedy=no', '--passes=1')
  assert list(result['scores']) == ['sampled']


def _refused(capsys, *arguments):
  assert _call(*arguments) == 2
  error = capsys.readouterr().err
  assert error.startswith('error: ') and error.count('\n') == 1
  return error


def test_what_is_wrong_is_one_line(tmp_path, capsys):
  workdir = _save_run(tmp_path)
  run = f'--workdir={workdir}'
  for arguments, words in [
      ((), 'workdir'),
      ((f'--workdir={tmp_path}',), 'no run in'),
      ((run, '--step=9'), 'no checkpoint of step 9'),
      ((run, '--split=test'), "no split 'test'; there are train, valid_seen"),
      ((run, '--greedy=maybe'), 'one of both, yes, no'),
      ((run, '--warm_start', '--step=3'), 'exclude each other'),
      ((run, '--wrkdir=x'), 'Did you mean workdir'),
  ]:
    assert words in _refused(capsys, *arguments)
  shutil.rmtree(workdir / 'checkpoints' / '3')
  shutil.rmtree(workdir / 'checkpoints' / '4')
  assert 'no checkpoint yet; --warm_start' in _refused(capsys, run)


def test_a_checkpoint_of_another_size_is_refused(tmp_path, capsys):
  workdir = _save_run(tmp_path)
  larger = _save_run(tmp_path / 'larger', mlp_width=24)
  shutil.rmtree(workdir / 'checkpoints' / '4')
  shutil.copytree(larger / 'checkpoints' / '4', workdir / 'checkpoints' / '4')
  error = _refused(capsys, f'--workdir={workdir}')
  assert 'another model' in error and 'params/' in error


def test_data_that_are_gone_or_elsewhere(tmp_path, capsys):
  data = tmp_path / 'data'
  tiny_runs.write_games(data, train=1, valid_unseen=3)
  workdir = _save_run(tmp_path, env='alfworld', data=str(data))
  elsewhere = tmp_path / 'elsewhere'
  data.rename(elsewhere)
  tiny_runs.forget_agents()
  assert f'no folder {data}' in _refused(capsys, f'--workdir={workdir}')
  result = _scores(workdir, f'--data={elsewhere}', '--greedy=yes')
  assert result['scores']['greedy']['num_tasks'] == 3
  broken = min(elsewhere.glob('*/valid_unseen/*/*/game.tw-pddl'))
  broken.write_text('{}')
  tiny_runs.forget_agents()
  assert str(broken) in _refused(
      capsys, f'--workdir={workdir}', f'--data={elsewhere}')


def test_an_extra_that_is_missing_is_one_line(tmp_path, capsys, monkeypatch):
  workdir = _save_run(tmp_path)

  def make_agent(config):
    raise ImportError('model directories need the extra "hf"')

  monkeypatch.setattr(assembly, 'make_agent', make_agent)
  assert 'the extra "hf"' in _refused(capsys, f'--workdir={workdir}')


def test_a_config_of_another_version_is_refused(tmp_path, capsys):
  workdir = _save_run(tmp_path)
  path = workdir / 'checkpoints' / 'config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | {'widht': 3}))
  assert 'no field widht. Did you mean width' in _refused(
      capsys, f'--workdir={workdir}')
  path.write_text('{')
  assert 'damaged' in _refused(capsys, f'--workdir={workdir}')

"""What an agent says of its episodes, and a run of where it began."""

import dataclasses
import json
import pathlib

import jax
import pytest
import tiny_agents as tiny
import tiny_runs

from bpo_jax import checkpoint
from experiments import assembly
from experiments import configs
from experiments import evaluate
from experiments import train


@pytest.fixture(autouse=True)
def _one_agent(monkeypatch):
  tiny_runs.share_agents(monkeypatch)
  yield
  tiny_runs.forget_agents()


@pytest.mark.parametrize('max_turns', [1, 2])
def test_no_path_is_longer_than_the_longest(max_turns):
  """And one of many is as long: what these games say is cut."""
  agent = tiny.household(
      max_turns=max_turns, observation_length=2, max_action_tokens=3)
  task = agent.environment.tasks('train')[0]
  grown = agent.grower.grow(
      tiny.params_of(agent.model), [task], jax.random.key(0), num_backbones=64)
  lengths = [len(tiny.path_tokens(grown.tree, 0, leaf))
             for leaf in tiny.leaves(grown.tree, 0)]
  assert max(lengths) == agent.longest_path(task)


def test_rows_hold_the_longest_path_or_are_refused(tmp_path):
  config = tiny_runs.config(tmp_path, updates=1)
  agent = assembly.make_agent(config)
  tasks = agent.environment.tasks('train')[:8]
  longest = max(map(agent.longest_path, tasks))
  with pytest.raises(
      ValueError, match=f'path of {longest} tokens.* got {longest - 1}'):
    train.set_up(dataclasses.replace(config, row_length=longest - 1))
  tiny_runs.finish(
      train.set_up(dataclasses.replace(config, row_length=longest)))
  assert checkpoint.latest_step(tmp_path / 'run' / 'checkpoints') == 1


def saved_run(folder):
  """The config of a saved run whose adapters are trained beside a seed's."""
  config = tiny_runs.config(folder, lora_rank=2)
  train.save(train.set_up(config))
  return config


def shift(monkeypatch):
  """Draws other weights from the same seed, as other versions may."""
  draw = assembly.transformer.init_params
  monkeypatch.setattr(
      assembly.transformer, 'init_params',
      lambda *args: jax.tree.map(lambda x: x + 1e-3, draw(*args)))


def test_adapters_go_back_to_the_weights_of_their_seed(tmp_path, monkeypatch):
  config = saved_run(tmp_path)
  again = dataclasses.replace(config, resume=True)
  first = train.set_up(again)
  assert set(first.origin) == {'base'}
  shift(monkeypatch)
  words = f"of other weights: expected .*{first.origin['base']}, got"
  with pytest.raises(ValueError, match=words):
    train.set_up(again)
  for first_policy in (False, True):
    scored = configs.EvaluateConfig(
        workdir=config.workdir, warm_start=first_policy)
    with pytest.raises(ValueError, match=words):
      evaluate.load_policy(scored, config, assembly.make_agent(config))


def test_a_seed_that_was_written_over_is_told(tmp_path, capsys):
  workdir = pathlib.Path(saved_run(tmp_path).workdir)
  path = workdir / 'checkpoints' / 'config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | {'seed': 1}))
  assert tiny_runs.call(
      evaluate, configs.EvaluateConfig, f'--workdir={workdir}') == 2
  error = capsys.readouterr().err
  assert error.startswith('error: ') and error.count('\n') == 1
  assert 'adapters of other weights' in error


def test_adapters_that_do_not_say_theirs_are_read(tmp_path):
  config = tiny_runs.config(tmp_path, lora_rank=2)
  ready = train.set_up(config)
  ready.origin = {}
  train.save(ready)
  train.set_up(dataclasses.replace(config, resume=True))


def test_whole_weights_are_kept_and_need_no_origin(tmp_path, monkeypatch):
  config = tiny_runs.config(tmp_path)
  ready = train.set_up(config)
  train.save(ready)
  shift(monkeypatch)
  again = train.set_up(dataclasses.replace(config, resume=True))
  assert not ready.origin and not again.origin
  assert tiny_runs.bits(again.state) == tiny_runs.bits(ready.state)

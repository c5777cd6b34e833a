"""A mesh changes where arrays lie and nothing that they say."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
import tiny_agents as tiny
import tiny_runs

from bpo_jax import batches
from bpo_jax import rollout
from bpo_jax import sharding
from experiments import configs
from experiments import train

_TESTS = pathlib.Path(__file__).parent


@functools.cache
def findings(part):
  """What eight virtual devices gave, by name."""
  paths = os.pathsep.join([str(_TESTS.parent), str(_TESTS)])
  done = subprocess.run(
      [sys.executable, str(_TESTS / 'sharded_child.py'), part], check=False,
      capture_output=True, text=True, env={**os.environ, 'PYTHONPATH': paths})
  assert done.returncode == 0, done.stderr[-3000:]
  return json.loads(done.stdout)


def slow(*values):
  return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize('part, what, bound', [
    ('fast', 'outputs', 1e-5), ('fast', 'outputs_fn', 1e-5),
    ('fast', 'gathers', 0),
    ('fast', 'gradient', 1e-5), ('fast', 'update', 1e-5),
    ('fast', 'metrics', 1e-5), ('fast', 'checkpoint', 0),
    ('fast', 'tree', 1e-5), ('fast', 'elsewhere', 0), ('fast', 'held', 0),
    slow('slow', 'outputs', 1e-5), slow('slow', 'gathers', 0),
    slow('slow', 'tree', 1e-5), slow('slow', 'elsewhere', 0),
    slow('slow', 'held', 0), slow('slow', 'attention', 1e-5),
    slow('slow', 'gradient', 1e-5), slow('slow', 'update', 1e-5),
    slow('slow', 'metrics', 1e-5), slow('slow', 'checkpoint', 0),
    slow('runs', 'losses', 1e-5), slow('runs', 'scores', 0)])
def test_a_mesh_gives_what_one_device_gives(part, what, bound):
  values = {
      k: v for k, v in findings(part).items() if k.startswith(what + '/')}
  assert values
  assert max(values.values()) <= bound, values


def test_rows_are_gathered_where_the_network_does_not_know_its_mesh():
  assert findings('fast')['found/data:4,model:2'] > 0


def test_meshes_are_read_from_flags():
  assert sharding.parse('data:4,model:2') == {'data': 4, 'model': 2}
  assert sharding.parse('model:3') == {'data': 1, 'model': 3}
  assert sharding.parse('') == {'data': 1, 'model': 1}


@pytest.mark.parametrize('spec, message', [
    ('data', 'size of at least 1'), ('data:0', 'size of at least 1'),
    ('data:-1', 'size of at least 1'), ('data:x', 'size of at least 1'),
    ('data:²', 'size of at least 1'), ('data:٣', 'size of at least 1'),
    (',', "got ''"), ('data:1,', "got ''"),
    ('data:4294967296,model:4294967296', 'has 18446744073709551616 places'),
    ('data:2,data:2', 'each axis once'), ('modle:2', 'did you mean model'),
    ('data:1000000', 'got')])
def test_wrong_meshes_are_told(spec, message):
  with pytest.raises(ValueError, match=message):
    sharding.make_mesh(spec)


def test_a_mesh_that_does_not_part_the_heads_is_refused():
  mesh = jax.sharding.AbstractMesh((1, 4), sharding.AXES)
  with pytest.raises(ValueError, match='num_kv_heads.*divisor of 2'):
    tiny.household().on(mesh)
  sharding.check(mesh, tiny.model(num_kv_heads=4).config)


@pytest.mark.parametrize('max_rows', [4, 16])
def test_a_mesh_that_does_not_part_the_rows_is_refused(max_rows):
  mesh = jax.sharding.AbstractMesh((3, 1), sharding.AXES)
  agent = tiny.household()
  with pytest.raises(
      ValueError, match=f'max_rows.*multiple of 3.*--mesh, got {max_rows}'):
    rollout.Grower(
        agent.model.clone(mesh=mesh), agent.batched, agent.sampler, 6,
        max_rows=max_rows)


@pytest.mark.parametrize('mesh, words', [
    ('data:1000', ['data:1000 has 1000 places', 'as there are devices']),
    ('model:0', ['size of at least 1', 'model:0']),
    ('rows:2', ['mesh', 'data'])])
def test_a_run_on_no_such_mesh_does_not_begin(mesh, words, tmp_path, capsys):
  arguments = tiny_runs.arguments(tiny_runs.config(tmp_path, mesh=mesh))
  assert tiny_runs.call(train, configs.TrainConfig, *arguments) == 2
  error = capsys.readouterr().err
  assert error.startswith('error: mesh') and error.count('\n') == 1
  for word in words:
    assert word in error
  assert not (tmp_path / 'run').exists()


def test_every_large_leaf_lies_along_the_model_axis():
  mesh = jax.make_mesh((1, 1), sharding.AXES)
  params = tiny.params_of(tiny.model(
      attention_bias=True, qk_norm=True, tied=False))
  flat = jax.tree_util.tree_flatten_with_path(sharding.of(mesh, params))[0]
  parted = {jax.tree_util.keystr(path, simple=True, separator='/'): leaf.spec
            for path, leaf in flat}
  whole = {name for name, spec in parted.items() if 'model' not in spec}
  assert all('norm' in name for name in whole), whole
  assert len(whole) < len(parted)


def test_rows_are_made_up_to_the_data_axis():
  mesh = jax.make_mesh((1, 1), sharding.AXES)
  rows = {'x': np.ones((3, 2), np.float32)}
  np.testing.assert_array_equal(sharding.place_rows(mesh, rows)['x'], rows['x'])
  assert sharding.place_rows(None, rows) is rows


def test_numbers_of_rows_are_multiples_of_the_data_axis():
  for count in range(1, 200):
    for multiple in (1, 2, 3, 8):
      for bucket in (batches.row_bucket, batches.shrunk_bucket):
        assert bucket(count, multiple) % multiple == 0
        assert count <= bucket(count) <= bucket(count, multiple)
        assert bucket(count, multiple) < bucket(count) + multiple

"""A mesh changes where arrays lie and nothing that they say."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
import tiny_agents as tiny

from bpo_jax import sharding

_TESTS = pathlib.Path(__file__).parent


@pytest.fixture(scope='module')
def found():
  """What eight virtual devices gave, by name."""
  paths = os.pathsep.join([str(_TESTS.parent), str(_TESTS)])
  done = subprocess.run(
      [sys.executable, str(_TESTS / 'sharded_child.py')], check=False,
      capture_output=True, text=True, env={**os.environ, 'PYTHONPATH': paths})
  assert done.returncode == 0, done.stderr[-3000:]
  return json.loads(done.stdout)


@pytest.mark.parametrize('what, bound', [
    ('outputs', 1e-5), ('gradient', 1e-5), ('update', 1e-5),
    ('metrics', 1e-5), ('moved', 0), ('checkpoint', 0)])
def test_a_mesh_gives_what_one_device_gives(found, what, bound):
  values = {k: v for k, v in found.items() if k.startswith(what + '/')}
  assert values
  assert max(values.values()) <= bound, values


def test_meshes_are_read_from_flags():
  assert sharding.parse('data:4,model:2') == {'data': 4, 'model': 2}
  assert sharding.parse('model:3') == {'data': 1, 'model': 3}
  assert sharding.parse('') == {'data': 1, 'model': 1}


@pytest.mark.parametrize('spec, message', [
    ('data', 'size of at least 1'), ('data:0', 'size of at least 1'),
    ('data:-1', 'size of at least 1'), ('data:x', 'size of at least 1'),
    ('data:2,data:2', 'each axis once'), ('modle:2', 'did you mean model'),
    ('data:1000000', 'got')])
def test_wrong_meshes_are_told(spec, message):
  with pytest.raises(ValueError, match=message):
    sharding.make_mesh(spec)


def test_a_mesh_that_does_not_part_the_heads_is_refused():
  mesh = jax.sharding.AbstractMesh((1, 4), sharding.AXES)
  with pytest.raises(ValueError, match='num_kv_heads.*divisor of 2'):
    sharding.check(mesh, tiny.model().config)
  sharding.check(mesh, tiny.model(num_kv_heads=4).config)


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

"""algorithms: every row of the table runs and says where it comes from."""

import os
import pathlib
import subprocess
import sys

import builders
import jax
import numpy as np
import pytest

from bpo_jax import algorithms
from bpo_jax import types

_DOCS = pathlib.Path(__file__).resolve().parent.parent / 'docs'


def _arrays(row, tree):
  """What a row needs beside the tree, from nothing but its shape."""
  ones = np.ones(tree.tokens.shape, np.float32)
  golden = np.zeros(tree.parents.shape, bool)
  arrays = {'value head': {'values': ones},
            'implicit reward': {'implicit_rewards': ones},
            'selection slope': {'a2': np.float32(0)},
            'golden trajectory': {'golden': golden}}
  found = {}
  for need in row.needs:
    found |= arrays.get(need, {})
  return found


def _context(row, tree):
  values = np.full(tree.parents.shape, 0.5, np.float32)
  key = jax.random.key(0)
  wanted = {'value predictor': {'values': values}}
  context = {'key': key} if 'key' in _keywords(row.branch_policy) else {}
  for need in row.needs:
    context |= wanted.get(need, {})
  return context


def _keywords(function):
  return algorithms.options.keywords(function)


@pytest.mark.parametrize('name', algorithms.names())
def test_rows(name):
  row = algorithms.get(name)
  assert row.name == name and row.source
  assert row.exactness in ('exact', 'restated', 'read', 'ours')
  assert set(row.needs) <= set(algorithms.NEEDS)
  tree = builders.random_trees(0)
  credit = row.credit(tree, **_arrays(row, tree))
  assert credit.advantages.shape == tree.tokens.shape
  assert np.isfinite(credit.advantages).all()
  value = row.objective(np.zeros(2), np.zeros(2), np.ones(2),
                        mask=np.ones(2, bool))
  # At ratio 1 APPO's future factor is 1, and adds to the advantage.
  np.testing.assert_allclose(value, 2 if name == 'appo' else 1, rtol=1e-6)
  if row.branch_policy is None:
    assert row.plan(tree) is None
  else:
    plan = row.plan(tree, **_context(row, tree))
    assert plan.node.shape == plan.count.shape
    assert (np.asarray(plan.unspent) >= 0).all()


@pytest.mark.parametrize('name', algorithms.names())
def test_the_docs_and_the_help_list_every_row(name):
  row = algorithms.get(name)
  lines = [line for line in (_DOCS / 'algorithms.md').read_text().splitlines()
           if line.startswith(f'| `{name}` |')]
  assert len(lines) == 1
  for text in (row.source, row.exactness, *row.needs):
    assert text in lines[0]
  assert f'{name} ' in algorithms.describe()


def test_the_help_of_the_trainer_lists_every_row():
  text = subprocess.run(
      [sys.executable, '-m', 'experiments.train', '--helpshort'],
      capture_output=True, text=True, check=False, cwd=_DOCS.parent,
      env={**os.environ, 'JAX_PLATFORMS': 'cpu'}).stdout
  lines = [line.strip() for line in text.splitlines()]
  for name in algorithms.names():
    (line,) = [line for line in lines if line.split(' ')[0] == name]
    row = algorithms.get(name)
    for told in (row.source, f'({row.exactness})', *row.needs):
      assert told in line


def test_numbers_that_a_paper_does_not_give_are_called_read():
  row = algorithms.get('cbpo')
  assert 'clip and KL weight read' in row.source
  assert row.defaults['clip_epsilon_low'] == 0.2
  assert row.defaults['kl_coef'] == 0.001
  docstring = ' '.join(row.estimator.__doc__.split())
  assert 'read, and so are the clip and KL weight' in docstring


def test_a_number_that_is_not_the_paper_s_is_told():
  row = algorithms.get('vineppo')
  assert 'three samples of a state for its nine' in row.source
  assert row.defaults['num_forks'] == 3


def test_stages_are_those_of_the_branch_policy():
  stages = {'spo_tree': 2, 'branpo': 3, 'bpo_adaptive': 2, 'bpo': 1, 'grpo': 1}
  for name, number in stages.items():
    row = algorithms.get(name)
    assert row.defaults['num_stages'] == number
    assert algorithms.num_stages(row.branch_policy) == number


def test_parts_are_found_by_name():
  assert algorithms.estimator('arpo_hard') is algorithms.advantages.arpo_hard
  for name in algorithms.branch_policies():
    assert algorithms.branch_policy(name).__name__ == name


@pytest.mark.parametrize('name', [
    name for name in algorithms.names()
    if set(algorithms.get(name).needs) & {
        'value head', 'implicit reward', 'golden trajectory',
        'selection slope'}])
def test_what_is_not_given_is_an_error(name):
  with pytest.raises(ValueError, match='needs'):
    algorithms.get(name).credit(builders.random_trees(0))


@pytest.mark.parametrize('name', ['trace'])
def test_a_plan_without_predictions_is_an_error(name):
  with pytest.raises(ValueError, match='values'):
    algorithms.get(name).plan(builders.random_trees(0))


def test_unknown_observations_are_an_error_where_anchors_are_needed():
  tree = builders.random_trees(0)
  blind = tree.replace(anchor=np.full_like(tree.anchor, types.UNKNOWN_ANCHOR))
  with pytest.raises(ValueError, match='gigpo needs anchors'):
    algorithms.get('gigpo').credit(blind)


def test_defaults_cannot_be_changed():
  with pytest.raises(TypeError):
    algorithms.get('bpo').defaults['num_forks'] = 1


def test_overrides_reach_the_functions():
  tree = builders.random_trees(1)
  row = algorithms.get('bpo')
  assert row.plan(tree, num_branch_points=2).node.shape == (3, 2)
  got = row.credit(tree, node_weighting='split')
  expected = algorithms.advantages.bpo(tree, node_weighting='split')
  np.testing.assert_array_equal(got.weights, expected.weights)


@pytest.mark.parametrize('call, message', [
    (lambda tree: algorithms.get('bpo_rbb'), "got 'bpo_rbb'.*bpo_rb"),
    (lambda tree: algorithms.get('zzz'), 'bpo, .*rloo'),
    (lambda tree: algorithms.estimator('arpo_hrd'),
     "estimator: .*got 'arpo_hrd'.*did you mean arpo_hard"),
    (lambda tree: algorithms.branch_policy('top_entrpy'),
     "branch_policy: .*got 'top_entrpy'.*did you mean top_entropy"),
    (lambda tree: algorithms.get('bpo').credit(tree, lamda_=1.0), 'lambda_'),
    (lambda tree: algorithms.get('bpo').plan(tree, num_fork=1), 'num_forks'),
    (lambda tree: algorithms.get('rloo').plan(tree, num_forks=1),
     'does not branch'),
    (lambda tree: algorithms.get('bpo').plan(tree, num_forks=0),
     'num_forks: expected at least 1'),
    (lambda tree: algorithms.get('cbpo').plan(tree, num_rollouts=0),
     'num_rollouts: expected at least 1'),
])
def test_bad_input_is_an_error(call, message):
  with pytest.raises(ValueError, match=message):
    call(builders.random_trees(0))

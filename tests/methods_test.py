"""methods: every option of the table is a flag, and reaches its function."""

import builders
import numpy as np
import pytest

from bpo_jax import algorithms
from bpo_jax import options
from experiments import configs
from experiments import methods


@pytest.mark.parametrize('name', algorithms.names())
def test_every_algorithm_is_a_method_by_its_name_alone(name):
  method = methods.make(configs.TrainConfig(algorithm=name), vocab_size=64)
  row = algorithms.get(name)
  assert method.num_backbones == row.defaults['num_backbones']
  assert method.num_stages == (
      row.defaults['num_stages'] if row.branch_policy else 0)
  assert (method.plan is None) == (row.branch_policy is None)
  assert method.loss.kl_estimator == row.defaults['kl_estimator']
  assert (method.loss.value_coef > 0) == ('value head' in row.needs)
  assert set(method.wants) <= set(methods.CONTEXT)


@pytest.mark.parametrize('name', algorithms.names())
def test_every_option_of_a_row_is_a_flag_with_help(name):
  fields = {field[0]: field for field in methods.option_fields()}
  own = {'num_branch_points', 'num_forks', 'vocab_size', 'a2'}
  for part in algorithms.get(name).parts:
    for option, found in options.of(part).items():
      if option not in own:
        assert option in fields, option
        help_text = fields[option][2].metadata['help']
        assert name in help_text and len(help_text) > 30, option
        assert fields[option][1] == found.annotation | None, option


@pytest.mark.parametrize('name', algorithms.names())
def test_parts_of_a_row_share_only_options_that_mean_one_thing(name):
  shared = {'success_threshold', 'node_values', 'unit', 'epsilon'}
  seen = set()
  for part in algorithms.get(name).parts:
    found = set(options.of(part))
    assert not (seen & found) - shared
    seen |= found


def test_an_option_reaches_its_function():
  config = configs.TrainConfig(
      algorithm='cbpo', num_rollouts=9, cbv_scale=0.0, boundary_interval=2)
  method = methods.make(config)
  given = method.plan.keywords
  assert given['num_rollouts'] == 9 and given['boundary_interval'] == 2
  assert method.credit.keywords == {'cbv_scale': 0.0}


def test_another_branch_policy_takes_the_place_of_a_rows_own():
  config = configs.TrainConfig(algorithm='bpo', branch_policy='lowest_entropy')
  method = methods.make(config)
  assert options.unwrap(method.plan).__name__ == 'lowest_entropy'
  assert method.plan.keywords['num_branch_points'] == 4
  tree = builders.random_trees(0)
  assert method.plan(tree).node.shape == (3, 4)
  short = methods.make(configs.TrainConfig(algorithm='bpo', selection='causal'))
  assert short.wants == ('threshold',)


@pytest.mark.parametrize('algorithm, name, terse, prose', [
    ('bpo', 'min_spacing', 8, 64), ('cbpo', 'boundary_interval', 6, 64),
    ('cbpo', 'entropy_window', 6, 20)])
def test_lengths_are_those_of_prose_where_a_language_model_speaks(
    algorithm, name, terse, prose):
  length = lambda **options_: options.of(methods.make(configs.TrainConfig(
      algorithm=algorithm, **options_)).plan)[name].default
  assert length() == terse
  assert length(model='smollm2') == prose
  assert length(model='smollm2', **{name: 5}) == length(**{name: 5}) == 5


def test_a_critic_alone_has_something_to_compare_one_rollout_with():
  config = configs.TrainConfig(
      algorithm='opts_ttpo', branch_policy='cbpo_allocation', num_rollouts=1,
      num_backbones=1)
  assert methods.make(config).plan.keywords['num_rollouts'] == 1


def test_appo_is_told_which_tokens_are_white_space():
  method = methods.make(configs.TrainConfig(algorithm='appo'))
  assert method.wants == ('key', 'whitespace_mask')


def test_stages_branch_again():
  config = configs.TrainConfig(algorithm='bpo', num_stages=2, group_size=2)
  plan = methods.make(config).plan(builders.random_trees(0))
  assert set(np.unique(plan.count)) <= {0, 1}
  assert plan.unspent is not None


@pytest.mark.parametrize('options_, message', [
    (dict(algorithm='rloo', lambda_=0.5), '--lambda_ is no option of rloo'),
    (dict(algorithm='rloo', num_branch_points=2), 'branches at the root alone'),
    (dict(algorithm='rloo', num_stages=2), '--num_stages'),
    (dict(algorithm='cbpo', group_size=2), '--group_size is no option of cbpo'),
    (dict(algorithm='rloo', num_backbones=1), 'raise --num_backbones'),
    (dict(algorithm='cbpo', num_rollouts=5),
     'num_rollouts: expected at least 6'),
    *((dict(algorithm=name, num_rollouts=1, num_backbones=1),
       'num_rollouts: expected at least 2 .*nothing to be compared with.*got 1')
      for name in ('cbpo', 'trace', 'bpo_adaptive', 'arpo_soft')),
    (dict(algorithm='bpo', group_size=1), 'group_size.*at least 2, got 1'),
    (dict(algorithm='bpx'), 'Did you mean'),
    (dict(algorithm='bpo', node_values='leafmean'), 'node_values'),
    (dict(algorithm='bpo', branch_policy='randm'), 'random'),
])
def test_bad_input_is_an_error(options_, message):
  with pytest.raises(ValueError, match=message):
    configs.TrainConfig(**options_)

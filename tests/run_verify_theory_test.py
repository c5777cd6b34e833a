"""verify_theory: intervals, claims, and the binary as a user runs it."""

import csv
import dataclasses
import functools
import importlib.util

from absl import flags
from absl.testing import flagsaver
import numpy as np
import pytest

from bpo_jax import advantages
from bpo_jax import types
from experiments import config_flags
from experiments import enumerable
from experiments import figures
from experiments import theory_claims
from experiments import theory_methods
from experiments import verify_theory

_FAST = ('rloo', 'bpo causal uniform')


def _row(**fields):
  row = theory_methods.Measurement(
      task='late', method='rloo', bias=0.01, bias_low=0.0, bias_high=0.02,
      score=0.5, cosine=1.0, cosine_low=0.99, signal=1.0, noise=2.0, steps=50.0,
      cost=100.0, cost_error=1.0)
  return dataclasses.replace(row, **fields)


def _exact_rows(**biases):
  biases = {'bpo causal split': 1e-8, 'bpo_rb rho=0.5': 1e-8,
            'bpo top_m split': 0.2, 'bpo_rb top_m': 0.1,
            'bpo equally_spaced split': 1e-8, 'bpo lowest_entropy split': 0.1,
            'bpo oracle_value_gap split': 0.1, 'bpo causal split drop': 0.9,
            'bpo causal uniform': 0.6} | biases
  return [_row(task='exact', method=name, bias=bias)
          for name, bias in biases.items()]


def _failures(claims):
  return [claim.claim for claim in claims if not claim.holds]


def test_claims_hold_on_rows_that_bear_them_out():
  claims = list(theory_claims.bias_claims(_exact_rows()))
  assert len(claims) == 7 and not _failures(claims)


@pytest.mark.parametrize('name, bias, failure', [
    ('bpo causal split', 1e-3, 'causal selection'),
    ('bpo_rb rho=0.5', 1e-3, 'causal selection'),
    ('bpo equally_spaced split', 1e-3, 'causal selection'),
    ('bpo top_m split', 1e-8, 'after the fact'),
    ('bpo lowest_entropy split', 1e-8, 'lowest entropy'),
    ('bpo oracle_value_gap split', 1e-8, 'true value gap'),
    ('bpo_rb top_m', 1e-8, 'bpo_rb'),
    ('bpo causal split drop', 1e-8, 'without the incumbent'),
    ('bpo causal uniform', 1e-8, 'uniform weights'),
])
def test_a_claim_fails_where_its_row_says_otherwise(name, bias, failure):
  claims = theory_claims.bias_claims(_exact_rows(**{name: bias}))
  only, = _failures(claims)
  assert failure in only


@pytest.mark.parametrize('broken, failures', [
    ({}, []),
    (dict(bias=0.3, bias_low=0.25, bias_high=0.35, score=30.0), ['rloo is']),
    (dict(bias_high=0.6), ['uniform weights']),
])
def test_sampled_biases_are_held_against_their_intervals(broken, failures):
  rows = [_row(**broken), _row(method='bpo causal uniform', bias=0.6,
                               bias_low=0.5, bias_high=0.7, score=99.0)]
  got = _failures(theory_claims.bias_claims(rows))
  assert len(got) == len(failures)
  assert all(text.startswith(start) for text, start in zip(got, failures))


def test_costs_are_held_against_the_exact_ones(monkeypatch):
  design = theory_claims.Design
  monkeypatch.setattr(theory_claims, 'best_designs', lambda task: (
      design(100.0, ''), design(50.0 if task.explained[3] < 0.9 else 100.0, '')
  ))
  rows = [_row(method='root leave-one-out 8', cost=156.0),
          _row(method='bpo_rb rho=0.5', cost=115.0)]
  # 'decided' looks like 'early' to the stand-in.
  assert _failures(theory_claims.cost_claims(rows)) == [
      'branching pays on decided']
  rows = [dataclasses.replace(rows[0], cost=110.0),
          dataclasses.replace(rows[1], cost=143.8)]
  assert _failures(theory_claims.cost_claims(rows)) == [
      'bpo_rb wins on late', 'branching pays on decided',
      'root leave-one-out 8 has its exact noise on late']


def _changed(rows, method, **fields):
  return [dataclasses.replace(row, **fields) if row.method == method else row
          for row in rows]


def _directions(**cosines):
  """Returns rows of a cosine each, whose interval ends 0.001 below."""
  cosines = {'grpo': 1.0, 'gspo': 1.0, 'dr_grpo': 1.0, 'dapo': 1.0,
             'gigpo': 0.992, 'appo': 0.99, 'bpo': 0.93} | cosines
  return [_row(method=name, cosine=cosine, cosine_low=cosine - 0.001)
          for name, cosine in cosines.items()]


@pytest.mark.parametrize('cosines, failures', [
    ({}, []),
    (dict(dr_grpo=0.99), ['dr_grpo keeps', 'gigpo turns', 'appo turns']),
    (dict(gigpo=0.9995), ['gigpo turns']),
    (dict(bpo=0.9895), ['bpo turns']),
])
def test_directions_are_held_against_each_other(cosines, failures):
  got = _failures(theory_claims.direction_claims(_directions(**cosines)))
  assert got == [f'{text} the direction on late' for text in failures]
  exact = [dataclasses.replace(row, task='exact') for row in _directions()]
  assert not list(theory_claims.direction_claims(exact))


def _schedules(task='late'):
  """Returns rows of every schedule, as docs/theory.md has them."""
  gaps = {'lowest_entropy': 0.0, 'random': 0.1, 'equally_spaced': 0.0,
          'top_m': 0.3, 'oracle_value_gap': 0.31}
  costs = dict(zip(gaps, (264.0, 252.0, 236.0, 217.0, 229.0)))
  row = lambda name, weights, bias: _row(
      task=task, method=f'bpo {name} {weights}', gap=gaps[name], bias=bias,
      bias_low=bias - 0.05, bias_high=bias + 0.05, cost=costs[name],
      cost_error=5.0)
  return [*(row(name, 'split', 0.06) for name in gaps),
          *(row(name, 'uniform', 0.06 if name == 'random' else 1.3)
            for name in gaps), _row(method='bpo_rb rho=0.4', cost=115.0)]


def test_schedules_are_held_to_gaps_weights_and_costs():
  claims = list(theory_claims.schedule_claims(_schedules()))
  assert len(claims) == 6 and not _failures(claims)
  evidence = [claim.evidence for claim in claims]
  assert evidence[0] == evidence[1] == '0.310, next 0.300 (top_m)'
  assert evidence[2].endswith('no difference to random')
  assert not list(theory_claims.schedule_claims([_row(), _row(method='bpo')]))
  # What schedules cost is said of some tasks alone.
  assert len(list(theory_claims.schedule_claims(_schedules('exact')))) == 3


@pytest.mark.parametrize('method, fields, failures', [
    ('bpo oracle_value_gap split', dict(gap=0.29), ['the oracle forks']),
    ('bpo random split', dict(gap=0.305), ['and the highest entropy']),
    ('bpo lowest_entropy split', dict(cost=225.0),
     ['the highest entropy is cheaper']),
    ('bpo oracle_value_gap split', dict(cost=184.0),
     ['the oracle gains', 'schedules cost more']),
    ('bpo random split', dict(cost=185.0), ['schedules cost more']),
    ('bpo_rb rho=0.4', dict(cost=210.0), ['schedules cost more']),
    ('bpo top_m uniform', dict(bias_low=0.1), ['uniform weights are off']),
])
def test_a_schedule_that_is_otherwise_is_a_claim_that_fails(
    method, fields, failures):
  rows = _changed(_schedules(), method, **fields)
  got = _failures(theory_claims.schedule_claims(rows))
  assert len(got) == len(failures)
  assert all(text.startswith(start) for text, start in zip(got, failures))


@pytest.mark.parametrize('fields', [
    dict(cost_error=0.0), dict(cost_error=70.0), dict(task='decided')])
def test_nothing_is_claimed_of_what_too_few_trees_tell(monkeypatch, fields):
  monkeypatch.setattr(theory_claims, 'best_designs', lambda task: (
      theory_claims.Design(1.0, ''), theory_claims.Design(1.0, '')))
  rows = _schedules() + [
      _row(method=name) for name in ('bpo_rb rho=1.0', 'bpo_adaptive')]
  wide = [dataclasses.replace(row, cosine_low=0.9, **fields) for row in rows]
  said = ' '.join(claim.claim for claim in theory_claims.claims(wide))
  assert 'oracle gains' not in said and 'cost more' not in said
  assert 'rho = 0.4 is cheaper' not in said and 'bpo_rb wins' not in said
  assert 'bpo_adaptive gains' not in said and 'turns' not in said
  told = ' '.join(claim.claim for claim in theory_claims.claims(rows))
  assert 'oracle gains' in told and 'rho = 0.4 is cheaper' in told


def test_weights_that_nowhere_matter_are_a_claim_that_fails():
  rows = [dataclasses.replace(row, bias=0.06) for row in _schedules()]
  only, = _failures(theory_claims.schedule_claims(rows))
  assert only.startswith('uniform weights')


def test_shrinking_is_held_to_its_cost():
  rows = [_row(task=task, method=f'bpo_rb rho={rho}', cost=cost)
          for task, rho, cost in (('exact', 0.4, 90.0), ('exact', 1.0, 91.0),
                                  ('late', 0.4, 92.0), ('late', 1.0, 91.0))]
  claims = list(theory_claims.shrinkage_claims(rows))
  assert len(claims) == 2
  assert _failures(claims) == [
      'at K = 2 rho = 0.4 is cheaper than rho = 1 on late']


def test_the_table_of_schedules_is_in_the_paper_s_order():
  rows = [_row(task=task, method=f'bpo {name} {weights}', gap=0.125)
          for task in ('late', 'exact') for weights in ('uniform', 'split')
          for name in reversed(theory_methods.SCHEDULES)]
  rows += [_row(), _row(method='bpo causal split'),
           _row(method='bpo top_m split drop')]
  table = verify_theory.schedule_markdown(rows).splitlines()[2:]
  cells = [[cell.strip() for cell in line.split('|')] for line in table]
  assert [cell[1:4] for cell in cells] == [
      [task, weights, name] for task in ('late', 'exact')
      for weights in ('split', 'uniform') for name in theory_methods.SCHEDULES]
  assert cells[0][4] == '0.125' and cells[0][-2] == '60.8'


def test_schedules_share_all_but_where_they_fork():
  methods = theory_methods.variants()
  chosen = {name: method for name, method in methods.items()
            if theory_methods.schedule_of(name)}
  assert len(chosen) == 2 * len(theory_methods.SCHEDULES)
  task, estimators = enumerable.make('late'), set()
  for name, method in chosen.items():
    schedule, weights = theory_methods.schedule_of(name)
    estimators.add((weights, method.estimator))
    assert method.num_backbones == 4
    assert method.policy.keywords == dict(num_branch_points=8, num_forks=1)
    expected = 'top_entropy' if schedule == 'top_m' else schedule
    assert method.policy.func.__name__ == expected
  assert len(estimators) == 2
  for name in ('bpo random split', 'bpo oracle_value_gap split'):
    forest = methods[name].grow(task, 0, 4)
    forks = forest.tree.birth > np.take_along_axis(
        forest.tree.birth, np.maximum(forest.tree.parents, 0), axis=1)
    assert (forks.sum(1) == 8).all()


def test_the_value_gap_is_that_of_the_states_forked():
  task = enumerable.make('early')
  forest = enumerable.backbones(task, np.random.default_rng(0), 3, 2)
  gap = lambda forest: theory_methods.moments(forest, types.Credit(
      *np.zeros((2, *forest.tree.tokens.shape), np.float32))).gap
  assert gap(forest) == 0
  node = np.array([[1, -1], [3, 14], [12, -1]])  # Steps 0; 2 and 1; 11.
  plan = types.BranchPlan(node=node, offset=np.zeros_like(node),
                          count=np.array([[2, 0], [1, 1], [1, 0]]))
  grown = enumerable.fork(forest, plan, np.random.default_rng(1))
  expected = 0.0
  for tree, place, count in ((0, 1, 2), (1, 3, 1), (1, 14, 1), (2, 12, 1)):
    state = forest.tree.anchor[tree, forest.tree.parents[tree, place]]
    expected += count * max(abs(task.advantages[state])) / 5
  assert gap(grown) == pytest.approx(expected) and expected > 0.1


def test_methods_that_fork_alike_share_their_trees():
  methods = theory_methods.all_methods()
  task = enumerable.make('late')
  for one, other in (('rloo', 'grpo'), ('bpo_rb', 'bpo causal uniform')):
    assert methods[one].growth == methods[other].growth
  assert methods['rloo'].growth != methods['gcpo'].growth
  first, second = (methods[name].grow(task, 3, 4) for name in ('rloo', 'iapo'))
  np.testing.assert_array_equal(first.tree.tokens, second.tree.tokens)
  other = methods['rloo'].grow(task, 4, 4)
  assert (first.tree.tokens != other.tree.tokens).any()


def test_listed_trees_get_their_credit_in_parts(monkeypatch):
  forest = enumerable.all_backbones(enumerable.random_task(2), 2)
  method = theory_methods.variants()['root leave-one-out 2']
  whole = method.credit(forest)
  monkeypatch.setattr(theory_methods, '_LISTED_TREES', 24)  # Of 64.
  parts = method.credit_of_listed(forest)
  np.testing.assert_allclose(parts.advantages, whole.advantages, rtol=1e-6)
  np.testing.assert_array_equal(parts.weights, whole.weights)


def test_where_branching_pays_is_found_exactly():
  root, branch = theory_claims.best_designs(enumerable.make('late'))
  assert branch.cost < 0.8 * root.cost and 'step 9, open' in branch.what


@pytest.mark.parametrize('offset', [0.0, 0.05, 1.0])
def test_intervals_cover_the_bias(offset):
  rng = np.random.default_rng(0)
  gradient = np.array([3.0, 0.0, 4.0])
  scale = np.array([1.0, 3.0, 0.5])
  bias = offset * np.array([1.0, -2.0, 2.0])
  covered = scores = 0
  for _ in range(300):
    draws = gradient + bias + scale * rng.normal(size=(400, 3))
    parts = [
        theory_methods.Moments(
            x.mean(0) * 7, np.cov(x.T) * 49, 7.0, 10.0, len(x))
        for x in np.split(draws, 2)]
    row = theory_methods.measure('late', 'rloo', gradient, parts)
    truth = np.linalg.norm(bias) / 5
    covered += row.bias_low <= truth <= row.bias_high
    scores += row.score > 6
  assert 0.9 * 300 < covered
  assert {0.0: scores < 4, 0.05: True, 1.0: scores == 300}[offset]
  expected = (gradient + bias) @ gradient / 25
  assert row.signal == pytest.approx(expected, abs=0.05)
  assert row.noise == pytest.approx(
      (scale ** 2).sum() / (expected * 5) ** 2, rel=0.2)


@pytest.mark.parametrize('size', [2, 4, 8])
def test_intervals_of_costs_cover_their_mean(size):
  values = np.random.default_rng(0).normal(5.0, 2.0, (4000, size))
  covered = [abs(x.mean() - 5.0) <= theory_methods.half_interval(x)
             for x in values]
  assert np.mean(covered) == pytest.approx(0.95, abs=0.015)
  assert theory_methods.half_interval([5.0]) == 0


def test_exact_moments_have_exact_measures():
  gradient = np.array([3.0, 4.0])
  moments = theory_methods.Moments(
      np.array([6.0, 9.0]), np.diag([4.0, 8.0]), 2.0, 5.0, np.inf)
  row = theory_methods.measure('exact', 'x', gradient, [moments])
  signal = (3 * 3 + 4.5 * 4) / 25
  assert row.bias == row.bias_high == pytest.approx(0.1)
  assert row.signal == pytest.approx(signal)
  assert row.cosine == pytest.approx(27 / 5 / np.hypot(3, 4.5))
  assert row.noise == pytest.approx(3 / (signal * 5) ** 2)
  assert row.cost == pytest.approx(5 * row.noise)


def test_every_row_of_the_table_is_a_method_with_what_it_needs():
  methods = theory_methods.all_methods()
  assert set(theory_methods.algorithms.names()) <= set(methods)
  task = enumerable.make('late')
  needy = [m for m in methods.values()
           if theory_methods.asks_for(m.estimator)]
  assert {'ppo', 'gcpo', 'istar'} <= {m.name for m in needy}
  forest = methods['gcpo'].grow(task, 0, 2)
  forest.tree.validate()
  golden = theory_methods.asks_for(methods['gcpo'].estimator)['golden'](forest)
  assert (golden.sum(1) == task.horizon).all()
  leaf = golden & forest.tree.terminal
  assert (forest.tree.rewards[leaf] == 1).all()


def _enumerated(monkeypatch, **estimators):
  """Has the enumerated part look at these alone, causally selected."""
  causal = verify_theory.enumerated_methods()['bpo causal split']
  methods = {
      name.replace('_', ' '): dataclasses.replace(
          causal, name=name.replace('_', ' '), estimator=estimator)
      for name, estimator in estimators.items()}
  monkeypatch.setattr(verify_theory, 'enumerated_methods', lambda: methods)


_SPLIT = functools.partial(advantages.bpo, node_weighting='split')


@pytest.mark.parametrize('estimator, failed', [
    (_SPLIT, 0), (advantages.bpo, 1)])
def test_an_estimator_broken_on_purpose_fails_the_run(
    monkeypatch, capsys, estimator, failed):
  _enumerated(monkeypatch, bpo_causal_split=estimator)
  monkeypatch.setattr(theory_claims, 'theorem_claims', lambda: [])
  monkeypatch.setattr(theory_claims, 'cost_claims', lambda rows: [])
  config = verify_theory.TheoryConfig(
      seeds=2, trees=32, tasks=('late',), methods=('rloo',))
  assert verify_theory.run(config) == failed
  assert ('FAIL causal selection' in capsys.readouterr().out) == bool(failed)


def _main(**values):
  if 'trees' not in flags.FLAGS:
    config_flags.define(verify_theory.TheoryConfig)
  # Not parsed: other binaries that this process imported require their flags.
  flags.FLAGS.mark_as_parsed()
  with flagsaver.flagsaver(**values):
    return verify_theory.main([])


def test_the_binary_prints_tables_and_leaves_them(
    monkeypatch, capsys, tmp_path):
  _enumerated(monkeypatch, bpo_causal_split=_SPLIT,
              bpo_causal_uniform=advantages.bpo)
  monkeypatch.setattr(theory_claims, 'best_designs', lambda task: (
      theory_claims.Design(100.0, ''), theory_claims.Design(
          50.0 if task.explained[3] < 0.9 else 100.0, '')))
  status = _main(seeds=2, trees=64, tasks=('late',), methods=_FAST,
                 out=str(tmp_path / 'out'))
  printed = capsys.readouterr().out
  assert '| late | rloo | ' in printed
  assert '| exact | bpo causal split' in printed
  assert 'ok   Theorem 4.3' in printed
  # The stand-in takes 'decided' for a task where branching does not pay.
  assert status == 1 and printed.count('FAIL') == 1
  with (tmp_path / 'out' / 'measurements.csv').open() as file:
    rows = list(csv.DictReader(file))
  assert [r['method'] for r in rows if r['task'] == 'late'] == list(_FAST)
  assert (tmp_path / 'out' / 'claims.csv').stat().st_size
  header, = (tmp_path / 'out' / 'schedules.csv').read_text().splitlines()
  assert header.startswith('schedule,weights,published,task,method,bias')
  has_figure = (tmp_path / 'out' / 'theory.png').exists()
  assert has_figure == bool(importlib.util.find_spec('matplotlib'))


def test_without_matplotlib_the_tables_are_written(
    monkeypatch, capsys, tmp_path):
  def missing(name):
    raise ImportError(name)
  monkeypatch.setattr(figures.importlib, 'import_module', missing)
  verify_theory.write(tmp_path, [_row()], [])
  assert "pip install -e '.[plot]'" in capsys.readouterr().out
  assert sorted(p.name for p in tmp_path.iterdir()) == [
      'claims.csv', 'measurements.csv', 'schedules.csv']


def test_an_unknown_method_is_one_clear_line():
  with pytest.raises(flags.IllegalFlagValueError, match='did you mean rloo'):
    _main(methods=('rlo',))


@pytest.mark.slow
def test_all_methods_run_and_all_claims_hold(capsys):
  config = verify_theory.TheoryConfig(seeds=2, trees=256)
  assert verify_theory.run(config) == 0
  assert 'FAIL' not in capsys.readouterr().out


@pytest.mark.parametrize('bad, message', [
    (dict(methods=('rloo', 'rloo')), 'methods: .*rloo more than once'),
    (dict(tasks=('late', 'late')), 'tasks: .*late more than once'),
    (dict(tasks=()), 'tasks: expected one of'),
])
def test_what_would_be_counted_twice_or_not_at_all_is_refused(bad, message):
  with pytest.raises(ValueError, match=message):
    verify_theory.TheoryConfig(**bad)


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(flags.IllegalFlagValueError, match='file'):
    _main(out=str(tmp_path / 'file' / 'out'))


@pytest.mark.parametrize('name', [
    'measurements.csv', 'schedules.csv', 'claims.csv', 'theory.png'])
def test_every_output_is_tried_before_the_work(name, tmp_path, monkeypatch):
  monkeypatch.setattr(theory_claims, 'theorem_claims', lambda: 1 / 0)
  (tmp_path / name).mkdir()
  with pytest.raises(flags.IllegalFlagValueError, match=f'{name} is a folder'):
    _main(out=str(tmp_path))


@pytest.mark.parametrize('name', list(enumerable.TASKS))
def test_a_single_task_is_a_command_line(name):
  flag_values = flags.FlagValues()
  config_flags.define(verify_theory.TheoryConfig, flag_values=flag_values)
  config_flags.parse(['verify_theory', f'--tasks={name}'], flag_values)
  config = config_flags.read(
      verify_theory.TheoryConfig, flag_values=flag_values)
  assert config.tasks == (name,)

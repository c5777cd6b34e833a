"""The benchmarks of training each token once: trees, bars, shares, figure."""

import dataclasses
import json

from absl import app
from absl import flags
from absl.testing import flagsaver
import jax
import numpy as np
import pytest
import tiny_agents as tiny

from bpo_jax import learner
from bpo_jax import packing
from bpo_jax.models import transformer
from experiments import figures as figures_lib
from experiments.benchmarks import train_step
from experiments.benchmarks import tree_training as benchmark
from experiments.benchmarks import workloads

NETWORK = tiny.model(num_layers=1).config


@pytest.mark.parametrize(
    'case', benchmark.CASES + benchmark.SWEEP, ids=lambda case: case.name)
def test_trees_share_what_the_case_says(case):
  tree = workloads.make_trees(case, vocab_size=100)
  tree.validate()
  assert packing.sharing_ratio(tree) == pytest.approx(case.sharing, rel=0.08)
  credit = workloads.make_credit(tree)
  paths = packing.pack(tree, credit, layout='paths')
  lengths = paths.token_mask.sum(axis=1)
  assert lengths.mean() == pytest.approx(case.length, rel=0.15)
  assert len(tree.parents) == case.num_trees
  assert (credit.weights > 0).sum() == tree.action_mask.sum() > 0


def test_a_sharing_that_no_tree_has_is_refused():
  with pytest.raises(ValueError, match='sharing = 1.01: no tree'):
    workloads.make_trees(workloads.Case('small', 1.01, depth=4), 100)


def test_both_sides_have_the_same_gradient(monkeypatch):
  monkeypatch.setitem(workloads.SIZES, 'small', NETWORK)
  case = workloads.Case('small', 2.3, length=96, num_trees=2)
  figures = benchmark.measure(case, rounds=1)
  of = lambda name: figures[f'{case.name}/{name}']
  assert of('gradient_difference') < 1e-5
  assert of('sharing') == pytest.approx(case.sharing, rel=0.08)
  assert 1 < of('products_sharing') < of('sharing')
  assert of('ratio') * of('packed_seconds') > 0
  assert of('packed_megabytes') > 0 < of('paths_megabytes')
  assert of('packed_padding') >= 1 <= of('paths_padding')


@pytest.mark.parametrize('case, name, value', [
    (0, 'share_of_sharing', 0.89), (1, 'ratio', 0.94),
    (0, 'gradient_difference', 2e-4), (1, 'gradient_difference', float('nan'))])
def test_each_bar_is_told(case, name, value):
  cases = [workloads.Case('small', sharing) for sharing in (2.3, 1.0)]
  good = {'sharing': 2.3, 'share_of_sharing': 0.9, 'ratio': 0.95,
          'gradient_difference': 0.0}
  figures = {f'{each.name}/{k}': v for each in cases for k, v in good.items()}
  assert not benchmark.shortfalls(figures, cases)
  figures[f'{cases[case].name}/{name}'] = value
  short, = benchmark.shortfalls(figures, cases)
  assert short.startswith(cases[case].name)


def test_the_figure_is_drawn(tmp_path):
  pytest.importorskip('matplotlib')
  cases = benchmark.CASES + benchmark.SWEEP
  figures = {
      f'{case.name}/{name}': value for case in cases for name, value in (
          ('sharing', case.sharing), ('ratio', 0.9 * case.sharing),
          ('share_of_sharing', 0.9))}
  out = tmp_path / 'sharing.png'
  benchmark.draw(figures, cases, str(out))
  assert out.read_bytes().startswith(b'\x89PNG')


def test_main_tells_figures_and_verdict(tmp_path, capsys, monkeypatch):
  seen = []

  def measure(case, rounds):
    seen.append((case.size, rounds))
    return {f'{case.name}/{name}': value for name, value in (
        ('share_of_sharing', 0.95), ('ratio', 0.9),
        ('gradient_difference', 0.0), ('sharing', case.sharing))}

  monkeypatch.setattr(benchmark, 'measure', measure)
  out = tmp_path / 'sharing.json'
  flags.FLAGS.mark_as_parsed()
  with flagsaver.flagsaver(out=str(out), quick=True):
    with pytest.raises(SystemExit) as exit_info:
      benchmark.main(['tree_training'])
  assert set(seen) == {('small', 3)}
  assert exit_info.value.code == 1
  name = 'small/sharing_1/depth_2/length_1024'
  assert f'{name}: 0.90 is not 0.95' in capsys.readouterr().out
  assert json.loads(out.read_text())[f'{name}/ratio'] == 0.9


def test_needed_products_are_those_of_one_token_after_another():
  tree = workloads.make_trees(
      workloads.Case('small', 2.3, length=48, num_trees=1), 50)
  batches = learner.make_batches(tree, workloads.make_credit(tree), 512)
  c, total = NETWORK, 0.0
  heads = c.num_heads * c.head_dim
  for rows in batches:
    for i, j in np.argwhere(rows.token_mask):
      per_layer = c.width * (2 * heads + 2 * c.num_kv_heads * c.head_dim)
      per_layer += 3 * c.width * c.mlp_width
      per_layer += 2 * heads * (rows.positions[i, j] + 1)
      total += c.num_layers * per_layer
      total += c.vocab_size * c.width * rows.path_mask[i, j]
  assert workloads.needed_products(c, batches) == pytest.approx(6 * total)


def test_frozen_kernels_need_no_gradient():
  """Of the three products of a kernel one falls away; of attention none."""
  tree = workloads.make_trees(
      workloads.Case('small', 2.3, length=48, num_trees=1), 50)
  rows, = learner.make_batches(tree, workloads.make_credit(tree), 512)
  adapted = dataclasses.replace(
      NETWORK, lora=transformer.LoraConfig(rank=2, alpha=4.0))
  params = tiny.params_of(transformer.Transformer(NETWORK))['blocks']
  kernels = sum(x.size for x in jax.tree.leaves(params) if x.ndim == 3)
  head = NETWORK.vocab_size * NETWORK.width * rows.path_mask.sum()
  saved = workloads.needed_products(NETWORK, [rows]) - (
      workloads.needed_products(adapted, [rows]))
  assert saved == 2 * (kernels * rows.token_mask.sum() + head)


@pytest.mark.parametrize('remat, bar, status', [
    ('matmuls', 0.0, 0), ('block', 1.0, 1)])
def test_train_step_holds_a_network_to_its_share(
    remat, bar, status, tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(workloads, 'SMOLLM2', NETWORK)
  monkeypatch.setattr(train_step, 'MIN_SHARE', bar)
  monkeypatch.setattr(train_step, 'matmul_peak', lambda: 1e12)
  flags.FLAGS.mark_as_parsed()
  out = tmp_path / 'step.json'
  with flagsaver.flagsaver(
      out=str(out), quick=True, remat=remat, lora_rank=2, length=64):
    with pytest.raises(SystemExit) as exit_info:
      train_step.main(['train_step'])
  assert exit_info.value.code == status
  assert capsys.readouterr().out.endswith(
      'share_of_peak is below 1.00\n' if status else 'ok\n')
  figures = json.loads(out.read_text())
  assert 0 < figures['trained_parameters'] < figures['parameters']


def test_a_share_of_the_peak_is_told():
  tree = workloads.make_trees(
      workloads.Case('small', 2.3, length=48, num_trees=1), NETWORK.vocab_size)
  figures = train_step.measure(NETWORK, tree, rounds=1)
  assert 0 < figures['share_of_peak'] < 1
  assert figures['action_tokens'] < figures['tokens']
  assert figures['trained_parameters'] == figures['parameters']


def test_a_figure_that_cannot_be_drawn_is_refused_before_the_work(
    tmp_path, monkeypatch):
  def missing(name):
    raise ImportError(name)

  monkeypatch.setattr(figures_lib.importlib, 'import_module', missing)
  monkeypatch.setattr(benchmark, 'measure', missing)
  flags.FLAGS.mark_as_parsed()
  with flagsaver.flagsaver(figure=str(tmp_path / 'sharing.png')):
    with pytest.raises(app.UsageError, match=r"--figure: .*'\.\[plot\]'"):
      benchmark.main(['tree_training'])
  with flagsaver.flagsaver(figure=str(tmp_path)):
    with pytest.raises(app.UsageError, match='--figure: .* is a folder'):
      benchmark.main(['tree_training'])

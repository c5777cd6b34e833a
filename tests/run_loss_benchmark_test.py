"""The loss benchmark: what its sides compute, its bars, and absent peers."""

import json

from absl import flags
from absl.testing import flagsaver
import numpy as np
import pytest

from experiments.benchmarks import loss as benchmark


@pytest.fixture(name='batch', scope='module')
def _batch():
  return benchmark.make_batch(2, 6, vocab_size=64, width=4)


def _in_float64(batch):
  """Loss and mean entropy, token by token."""
  losses, entropies = [], []
  for row, advantage, old in zip(*batch[2:]):
    for i, behaviour in enumerate(old):
      place = benchmark.NUM_PROMPT + i
      logits = batch.unembedding @ batch.embedding[row[place - 1]].astype(float)
      probs = np.exp(logits) / np.exp(logits).sum()
      ratio = probs[row[place]] / np.exp(behaviour)
      clipped = np.clip(ratio, 0.8, 1.2)
      losses.append(-min(ratio * advantage, clipped * advantage))
      entropies.append(-np.sum(probs * np.log(probs)))
  return np.mean(losses), np.mean(entropies)


def test_ours_is_the_clipped_surrogate(batch):
  step, read = benchmark.ours(batch)
  result = read(step())
  want = _in_float64(batch)
  np.testing.assert_allclose(result[:2], want, rtol=1e-5)
  assert result.to_embedding.shape == batch.embedding.shape
  seen = np.unique(batch.tokens[:, benchmark.NUM_PROMPT - 1:-1])
  assert set(np.flatnonzero(result.to_embedding.any(axis=1))) <= set(seen)


def test_ratios_are_clipped_here_and_there():
  batch = benchmark.make_batch(2, 200, vocab_size=64, width=4)
  before = batch.tokens[:, benchmark.NUM_PROMPT - 1:-1]
  logits = batch.embedding[before] @ batch.unembedding.T
  probs = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
  drawn = batch.tokens[:, benchmark.NUM_PROMPT:, None]
  ratios = np.take_along_axis(probs, drawn, axis=-1)[..., 0]
  ratios /= np.exp(batch.old_log_probs)
  assert 0.1 < np.mean(np.abs(ratios - 1) > benchmark.CLIP_EPSILON) < 0.6
  assert benchmark.PAD not in batch.tokens


@pytest.mark.parametrize('side, module', [
    ('tunix', 'tunix'), ('trl', 'trl'), ('trl_logits', 'trl')])
def test_peers_agree(side, module, batch):
  pytest.importorskip(module)
  (step, read), (other_step, other_read) = (
      benchmark.SIDES[name](batch) for name in ('ours', side))
  assert benchmark.difference(read(step()), other_read(other_step())) < 1e-4


def test_difference_is_relative_and_of_everything(batch):
  step, read = benchmark.ours(batch)
  result = read(step())
  assert benchmark.difference(result, result) == 0
  for field in result._fields:
    value = getattr(result, field)
    other = result._replace(**{field: value * 1.01})
    assert benchmark.difference(result, other) == pytest.approx(0.01, rel=1e-3)


def test_a_process_for_each_side(batch):
  figures, absent = benchmark.measure(batch, 2, sides=['ours'])
  assert not absent
  assert set(figures) == {
      f'ours_{x}' for x in ('seconds', 'least_seconds', 'megabytes')}
  assert 0 < figures['ours_least_seconds'] <= figures['ours_seconds']
  assert figures['ours_megabytes'] > 0


def test_figures_are_of_pairs():
  result = benchmark.Result(1.0, 1.0, np.ones((2, 2)), np.ones((2, 2)))
  rounds = [
      {'ours': dict(seconds=a, megabytes=10.0 + a),
       'trl': dict(seconds=b, megabytes=50.0)}
      for a, b in ((1.0, 2.0), (4.0, 12.0), (1.0, 9.0))]
  figures = benchmark._figures(rounds, {'ours': result, 'trl': result})
  assert figures['trl_ratio'] == 3.0
  assert figures['ours_megabytes'] == 11.0
  assert figures['memory_share'] == pytest.approx(11 / 50)
  assert not benchmark.shortfalls(figures)


@pytest.mark.parametrize('name, value', [
    ('d8_trl_ratio', 0.99), ('d8_trl_difference', 0.01),
    ('d8_memory_share', 0.51), ('d8_trl_ratio', float('nan'))])
def test_each_bar_is_told(name, value):
  short, = benchmark.shortfalls({name: value})
  assert short.startswith(name)


@pytest.mark.parametrize('absent', [{}, {'trl': "No module named 'trl'"}])
def test_main(absent, tmp_path, capsys, monkeypatch):
  calls = []

  def measure(batch, num_rounds):
    calls.append((batch.tokens.shape, batch.embedding.shape, num_rounds))
    return {'tunix_ratio': 1.5, 'memory_share': 0.2}, absent

  monkeypatch.setattr(benchmark, 'measure', measure)
  out = tmp_path / 'loss.json'
  flags.FLAGS.mark_as_parsed()
  with flagsaver.flagsaver(out=str(out), quick=True, width=[4, 8]):
    with pytest.raises(SystemExit) as exit_info:
      benchmark.main(['loss'])
  assert calls == [((2, 512), (32_000, 4), 3)]
  assert exit_info.value.code == bool(absent)
  lines = capsys.readouterr().out.splitlines()
  assert 'd4_tunix_ratio: 1.5' in lines
  if absent:
    assert lines[-1].startswith('trl is not compared (No module named')
  else:
    assert lines[-1] == 'ok'
  assert json.loads(out.read_text())['d4_memory_share'] == 0.2

"""The decode benchmark: what it times, its bars, and absent peers."""

import dataclasses
import json
import time

from absl import flags
from absl.testing import flagsaver
import jax
import numpy as np
import pytest

from bpo_jax import sampling
from bpo_jax.models import transformer
from experiments.benchmarks import decode as benchmark
from experiments.benchmarks import workloads

NEW = 3
SMALL = dataclasses.replace(
    workloads.SMOLLM2, vocab_size=64, width=16, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=4, mlp_width=24)


@pytest.fixture(name='ours', scope='module')
def _ours():
  params = transformer.init_params(SMALL, jax.random.key(0))
  return benchmark.make_ours(SMALL, params, NEW)


class Peer:
  """Takes ten seconds to read and twenty to draw."""

  def __init__(self, generate=40.0):
    self.generated, self.calls = generate, []

  def loop(self, num_new, prompts):
    self.calls.append((num_new, prompts.shape))
    return 10.0, 20.0

  def generate(self, num_new, prompts):
    del num_new, prompts
    return self.generated


def test_all_tokens_are_drawn_and_read_where_they_lie(ours):
  prompts = np.random.default_rng(0).integers(2, 64, (2, 9)).astype(np.int32)
  rows = benchmark.start(ours, prompts, NEW)
  assert rows.cache.lengths.tolist() == [8, 8]
  assert sampling.cache_length(rows.cache) == 9 + NEW
  rows, actions = ours.act(ours.prepared, rows)
  assert actions.mask.all()
  assert rows.cache.lengths.tolist() == [8 + NEW] * 2
  assert all(s > 0 for s in benchmark.run_ours(ours, NEW, prompts))


def test_both_sides_take_turns_and_the_faster_peer_counts(ours):
  peer = Peer()
  figures = benchmark.compare(ours, peer, 2, NEW, 3)
  assert peer.calls == [(NEW, (2, 128))] * 3
  assert figures['batch_2_transformers_tokens_per_second'] == 2 * NEW / 20
  assert figures['batch_2_ratio'] > 1
  assert benchmark.shortfalls(figures) == []
  # `generate` reads and draws in a tenth of the loop's time.
  faster = benchmark.compare(ours, Peer(3.0), 2, NEW, 2)
  assert faster['batch_2_generate_by_loop'] == pytest.approx(0.1)
  spent = 20 / faster['batch_2_ratio'] * 0.1
  assert spent == pytest.approx(
      2 * NEW / faster['batch_2_tokens_per_second'], rel=0.5)


@pytest.mark.parametrize('name, value, is_short', [
    ('batch_8_ratio', 0.99, True), ('batch_8_ratio', 1.0, False),
    ('batch_8_whole_ratio', float('nan'), True), ('fork_ratio', 0.5, False)])
def test_bars(name, value, is_short):
  assert bool(benchmark.shortfalls({name: value})) == is_short


def test_forks_and_pages_are_reported():
  params = transformer.init_params(SMALL, jax.random.key(0))
  figures = benchmark.forks(SMALL, params, 32, 1)
  assert figures['fork_ratio'] > 0
  assert 0 < figures['fork_copy_share'] < 1
  assert benchmark.paged(3, 64, 1)['block_table_attention_ratio'] > 0


@pytest.mark.parametrize('ratio, code', [(1.5, 0), (0.5, 1)])
def test_main(ratio, code, tmp_path, capsys, monkeypatch):
  asked = []

  def measure(directory, threads, **sizes):
    asked.append((directory, threads, sizes))
    return {'threads': threads, 'batch_1_ratio': ratio}, ['llama.cpp: absent']
  monkeypatch.setattr(benchmark, 'measure', measure)
  out = tmp_path / 'decode.json'
  flags.FLAGS.mark_as_parsed()
  with flagsaver.flagsaver(
      out=str(out), quick=True, model=str(tmp_path), threads=2):
    with pytest.raises(SystemExit) as exit_info:
      benchmark.main(['decode'])
  assert exit_info.value.code == code
  assert asked == [(tmp_path, 2, {
      'batches': (1,), 'num_new': 16, 'num_rounds': 2, 'past': 128})]
  lines = capsys.readouterr().out.splitlines()
  assert lines[:2] == [f'weights: {tmp_path}', 'llama.cpp: absent']
  assert lines[-1] == (
      'batch_1_ratio is below 1.0' if code else 'ok')
  assert json.loads(out.read_text()) == {'threads': 2, 'batch_1_ratio': ratio}


def test_one_thread_counts_processor_time(monkeypatch):
  monkeypatch.setenv('XLA_FLAGS', '--xla_some_flag')
  monkeypatch.setenv('OMP_NUM_THREADS', '2')
  monkeypatch.setattr(benchmark.Clock, 'now', staticmethod(time.perf_counter))
  benchmark.use_one_thread()
  assert benchmark.Clock.now is time.process_time
  assert benchmark.os.environ['XLA_FLAGS'] == (
      '--xla_some_flag --xla_cpu_multi_thread_eigen=false')
  assert benchmark.os.environ['OMP_NUM_THREADS'] == '1'

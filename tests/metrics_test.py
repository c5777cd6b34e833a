"""Tests of metrics: sums add up, files resume, intervals cover."""

import csv
import errno
import io
import math
import os
import pathlib
import stat
import subprocess
import sys

from bpo_jax import metrics
import jax.numpy as jnp
import numpy as np
import pytest

_REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


def _rows(path):
  with path.open(newline='') as file:
    return list(csv.DictReader(file))


def test_csv_round_trip_and_growing_header(tmp_path):
  path = tmp_path / 'new' / 'metrics.csv'
  writer = metrics.CsvWriter(path)
  writer.write(1, {'loss': 0.1})
  assert _rows(path) == [{'update': '1', 'loss': '0.1'}]  # Flushed already.
  writer.write(2, {'success': 0.5, 'loss': 1 / 3})
  writer.write(4, {'success': 1.0})
  writer.close()
  rows = _rows(path)
  assert [row['update'] for row in rows] == ['1', '2', '4']
  assert [row['success'] for row in rows] == ['', '0.5', '1.0']
  assert float(rows[1]['loss']) == 1 / 3
  assert [p.name for p in path.parent.iterdir()] == ['metrics.csv']


@pytest.mark.parametrize('tail', ['', '4,0.', '4', '4,0.4,9', 'x'])
def test_csv_resumes_without_a_double_row(tmp_path, tail):
  path = tmp_path / 'metrics.csv'
  writer = metrics.CsvWriter(path)
  for update in range(4):
    writer.write(update, {'loss': float(update)})
  writer.close()
  with path.open('a') as file:
    file.write(tail)  # What a kill in the middle of a row leaves.
  resumed = metrics.CsvWriter(path, last_update=1)
  resumed.write(2, {'loss': 20.0, 'late': 1.0})
  resumed.write(3, {'loss': 30.0})
  resumed.close()
  rows = _rows(path)
  assert [row['update'] for row in rows] == ['0', '1', '2', '3']
  assert [row['loss'] for row in rows] == ['0.0', '1.0', '20.0', '30.0']


def test_csv_last_row_cut_by_a_kill_is_dropped(tmp_path):
  path = tmp_path / 'metrics.csv'
  path.write_text('update,loss\n0,1.0\n1,2.5')  # Was 2.55\n.
  metrics.CsvWriter(path, last_update=5).close()
  assert _rows(path) == [{'update': '0', 'loss': '1.0'}]


def test_csv_new_run_starts_empty(tmp_path):
  path = tmp_path / 'metrics.csv'
  for _ in range(2):
    writer = metrics.CsvWriter(path)
    writer.write(0, {'loss': 1.0})
    writer.close()
  assert len(_rows(path)) == 1


def test_csv_refuses_an_update_twice(tmp_path):
  writer = metrics.CsvWriter(tmp_path / 'metrics.csv')
  writer.write(3, {'loss': 1.0})
  with pytest.raises(ValueError, match='row for update 3; .*got 3'):
    writer.write(3, {'success': 1.0})


def test_csv_refuses_a_foreign_file(tmp_path):
  path = tmp_path / 'metrics.csv'
  path.write_text('name,age\nx,3\n')
  with pytest.raises(ValueError, match="first column update, got 'name'"):
    metrics.CsvWriter(path)
  assert path.read_text() == 'name,age\nx,3\n'


def test_tensorboard_writes_event_files(tmp_path):
  pytest.importorskip('tensorboardX')
  writer = metrics.TensorBoardWriter(tmp_path, last_update=1)
  writer.write(2, {'objective/loss': jnp.float32(0.5)})
  writer.close()
  events = list(tmp_path.glob('events.out.tfevents.*'))
  assert len(events) == 1
  assert b'objective/loss' in events[0].read_bytes()


def test_tensorboard_absent_says_what_to_install(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'tensorboardX', None)
  with pytest.raises(ImportError, match=r'pip install -e .\.\[tensorboard\]'):
    metrics.TensorBoardWriter(tmp_path)


class _Terminal(io.StringIO):
  """A stream that says it is a terminal."""

  def isatty(self):
    return True


def _show_progress(stream, num_updates, interval=10.0):
  """Shows a run of one update a second, 500 tokens and 20 steps each."""
  now = [0.0]
  line = metrics.ProgressLine(
      num_updates, stream=stream, interval=interval, clock=lambda: now[0])
  for update in range(1, num_updates + 1):
    now[0] += 1.0
    line.write(update, success=0.25, mean_return=0.5, tokens=500, steps=20)
  line.close()
  return stream.getvalue()


def test_progress_off_a_terminal_comes_at_a_modest_rate():
  lines = _show_progress(io.StringIO(), 35).splitlines()
  assert [line.split()[1] for line in lines] == ['1/35', '11/35', '21/35',
                                                 '31/35', '35/35']
  assert lines[1] == ('update 11/35  success 25.0%  return 0.500  '
                      '500 tokens/s  20 steps/s  24s left')
  assert lines[-1].endswith(' 0s left')


def test_progress_on_a_terminal_is_rewritten_in_place(monkeypatch):
  monkeypatch.setenv('COLUMNS', '40')
  shown = _show_progress(_Terminal(), 5)
  assert shown.count('\n') == 1 and shown.endswith('\n')
  parts = shown[:-1].split('\r')[1:]
  assert len(parts) == 5
  assert all(len(part.removesuffix('\x1b[K')) <= 39 for part in parts)


def test_progress_of_a_resumed_run_counts_only_its_own_updates():
  stream, now = io.StringIO(), [0.0]
  line = metrics.ProgressLine(
      100, last_update=90, stream=stream, clock=lambda: now[0])
  now[0] = 2.0
  line.write(91, success=0.0, mean_return=0.0, tokens=10, steps=4)
  assert 'update 91/100' in stream.getvalue()
  assert '5 tokens/s  2 steps/s  ? left' in stream.getvalue()


@pytest.mark.parametrize('seconds, text', [
    (0.2, '0s'), (59.6, '1m00s'), (61, '1m01s'), (7500, '2h05m'),
    (90000, '1d01h')])
def test_duration(seconds, text):
  assert metrics.duration(seconds) == text


def test_table_aligns():
  rows = [{'name': 'bpo', 'success': 0.5, 'n': 12},
          {'name': 'reinforce', 'success': None, 'n': np.int64(3)},
          {'name': 'x', 'success': np.float32(1.0)}]
  assert metrics.table(rows, ['name', 'success', 'n']).splitlines() == [
      'name       success   n',
      '---------  -------  --',
      'bpo          0.500  12',
      'reinforce        -   3',
      'x            1.000   -',
  ]
  assert metrics.table([], ['a']).splitlines() == ['a', '-']


@pytest.mark.parametrize('successes, trials, expected', [
    # Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
    (81, 263, (0.2553, 0.3662)),
    (15, 148, (0.0624, 0.1605)),
    (0, 20, (0.0000, 0.1611)),
    (1, 29, (0.0061, 0.1718)),
])
def test_wilson_against_published_values(successes, trials, expected):
  interval = metrics.proportion_interval(successes, trials)
  assert interval == pytest.approx(expected, abs=6e-5)


def test_wilson_is_symmetric_nested_and_inside():
  for trials in (1, 7, 134):
    for successes in range(trials + 1):
      low, high = metrics.proportion_interval(successes, trials)
      assert 0 <= low <= successes / trials <= high <= 1
      mirrored = metrics.proportion_interval(trials - successes, trials)
      assert (low, high) == pytest.approx((1 - mirrored[1], 1 - mirrored[0]))
      inner = metrics.proportion_interval(successes, trials, level=0.8)
      assert low <= inner[0] and inner[1] <= high


@pytest.mark.parametrize('arguments', [
    (3, 2), (-1, 2), (0, 0), (1, 2, 1.0), (math.nan, 3)])
def test_wilson_refuses(arguments):
  with pytest.raises(ValueError, match='expected|level must be'):
    metrics.proportion_interval(*arguments)


def test_clustered_equals_wilson_for_independent_games():
  draw = np.random.default_rng(0)
  wins = draw.random(2000) < 0.3
  clustered = metrics.clustered_interval(wins[:, None])
  wilson = metrics.proportion_interval(wins.sum(), wins.size)
  assert clustered == pytest.approx(wilson, abs=1e-4)


def test_clustered_ignores_passes_that_only_repeat():
  wins = np.random.default_rng(0).random((50, 1)) < 0.6
  once = metrics.clustered_interval(wins)
  assert metrics.clustered_interval(np.repeat(wins, 8, axis=1)) == (
      pytest.approx(once))


@pytest.mark.parametrize('value', [0.0, 1.0])
def test_clustered_at_the_ends_counts_games(value):
  interval = metrics.clustered_interval(np.full((20, 5), value))
  assert interval == metrics.proportion_interval(20 * value, 20)


@pytest.mark.parametrize('spread', [0.2, 1.0, 20.0])
def test_clustered_covers_where_plain_wilson_may_not(spread):
  draw = np.random.default_rng(1)
  mean, games, passes, runs = 0.7, 60, 6, 600
  rates = draw.beta(mean * spread, (1 - mean) * spread, size=(runs, games, 1))
  values = draw.random((runs, games, passes)) < rates
  covered = [
      low <= mean <= high for low, high in map(
          metrics.clustered_interval, values)]
  assert np.mean(covered) > 0.92
  if spread < 1:
    plain = [metrics.proportion_interval(v.sum(), v.size) for v in values]
    assert np.mean([low <= mean <= high for low, high in plain]) < 0.75


@pytest.mark.parametrize('values', [
    np.zeros(3), np.zeros((0, 2)), [[2.0, 0.0]], [[np.nan, 0.0]]])
def test_clustered_refuses(values):
  with pytest.raises(ValueError, match='expected values'):
    metrics.clustered_interval(values)


def test_a_full_disk_costs_a_row_and_not_the_file(tmp_path, monkeypatch):
  writer = metrics.CsvWriter(tmp_path / 'm.csv')
  writer.write(1, {'a': 1.0})

  def full(descriptor):
    raise OSError(errno.ENOSPC, 'No space left on device')

  with monkeypatch.context() as patch, pytest.raises(OSError):
    patch.setattr(os, 'fsync', full)
    writer.write(2, {'a': 2.0, 'b': 3.0})
  writer.write(3, {'a': 4.0, 'b': 5.0})
  writer.close()
  text = (tmp_path / 'm.csv').read_text()
  assert text == 'update,a,b\n1,1.0,\n3,4.0,5.0\n'


def test_the_time_left_leaves_out_the_update_that_compiles():
  stream, now = io.StringIO(), [0.0]
  line = metrics.ProgressLine(11, stream=stream, clock=lambda: now[0])
  for update, seconds in enumerate((60.0, 2.0, 2.0), 1):
    now[0] += seconds
    line.write(update, success=0.0, mean_return=0.0, tokens=1, steps=1)
  now[0] += 20.0
  line.write(4, success=0.0, mean_return=0.0, tokens=1, steps=1)
  assert [x.split('steps/s')[1].split()[0] for x in stream.getvalue(
      ).splitlines()] == ['?', '56s']


def test_a_file_is_written_whole_and_its_place_is_tried_before(tmp_path):
  path = tmp_path / 'new' / 'out.json'
  metrics.check_writable(path)
  assert not path.exists() and not list(path.parent.iterdir())
  metrics.write_text(path, 'old')
  metrics.check_writable(path)
  assert path.read_text() == 'old'
  with pytest.raises(OSError, match='is a folder'):
    metrics.check_writable(tmp_path)
  with pytest.raises(OSError):
    metrics.check_writable(path / 'inside' / 'a_file')
  assert [p.name for p in path.parent.iterdir()] == ['out.json']


def _device(path):
  """Makes another /dev/null; skips where that is not allowed."""
  try:
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    path.write_text('nothing')
  except OSError:
    pytest.skip('making a device needs root')


def test_a_device_stays_one(tmp_path):
  path, link = tmp_path / 'null', tmp_path / 'link'
  _device(path)
  link.symlink_to(path)
  for place in (path, link):
    metrics.check_writable(place)
    metrics.write_text(place, 'gone')
  assert stat.S_ISCHR(path.stat().st_mode) and link.is_symlink()
  assert sorted(p.name for p in tmp_path.iterdir()) == ['link', 'null']


def test_a_link_stays_one_and_its_file_is_written(tmp_path):
  for name in ('there', 'missing'):
    folder = tmp_path / name
    (folder / 'sub').mkdir(parents=True)
    link, target = folder / 'link', folder / 'sub' / 'target'
    link.symlink_to(pathlib.Path('sub') / 'target')
    if name == 'there':
      target.write_text('old')
    metrics.check_writable(link)
    assert target.exists() == (name == 'there')
    metrics.write_text(link, 'new')
    assert link.is_symlink() and target.read_text() == 'new'
    assert [p.name for p in (folder / 'sub').iterdir()] == ['target']


def test_a_pipe_is_written_to(tmp_path):
  path = tmp_path / 'pipe'
  os.mkfifo(path)
  reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
  try:
    metrics.check_writable(path)
    metrics.write_text(path, 'through')
    assert os.read(reader, 99) == b'through'
  finally:
    os.close(reader)
  assert path.is_fifo()


@pytest.mark.parametrize('to_file', [True, False])
def test_where_the_process_prints_is_printed_to(to_file, tmp_path):
  if not os.path.exists('/dev/stdout'):
    pytest.skip('no /dev/stdout here')
  code = ('from bpo_jax import metrics; print("one")\n'
          'metrics.check_writable("/dev/stdout")\n'
          'metrics.write_text("/dev/stdout", "two\\n"); print("three")')
  path = tmp_path / 'log'
  with path.open('w') as file:
    done = subprocess.run(
        [sys.executable, '-c', code], check=True, cwd=_REPOSITORY,
        stdout=file if to_file else subprocess.PIPE, text=True)
  shown = path.read_text() if to_file else done.stdout
  assert shown == 'one\ntwo\nthree\n'


def test_what_is_in_the_way_is_found_beforehand(tmp_path):
  (tmp_path / 'out.json.partial').mkdir()
  longest = 'x' * os.pathconf(tmp_path, 'PC_NAME_MAX')
  for name in ('out.json', longest, longest + 'x'):
    with pytest.raises(OSError):
      metrics.write_text(tmp_path / name, 'text')
    with pytest.raises(OSError):
      metrics.check_writable(tmp_path / name)
  assert [p.name for p in tmp_path.iterdir()] == ['out.json.partial']

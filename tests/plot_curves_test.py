"""plot_curves: the numbers of the table, the figure, and damaged runs."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from experiments import plot_curves

_REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
_STEPS = [10, 25, 40, 60, 90]
_SUCCESS = [0.0, 0.5, 0.25, 0.75, 1.0]


def _result(algorithm='bpo', seed=3):
  return {
      'config': {'algorithm': algorithm, 'seed': seed,
                 'eval_split': 'valid_seen'},
      'steps': 90,
      'before': {'success': 0.25, 'interval': [0.125, 0.5]},
      'after': {'success': 0.75, 'interval': [0.5, 0.875]},
  }


def _write_run(folder, num_updates=5, **config):
  folder.mkdir()
  (folder / 'result.json').write_text(json.dumps(_result(**config)))
  rows = [f'{i + 1},{_SUCCESS[i]},{_STEPS[i]}' for i in range(num_updates)]
  (folder / 'metrics.csv').write_text(
      '\n'.join(['update,success,total/steps', *rows]) + '\n')
  return folder


@pytest.fixture
def folder(tmp_path):
  return _write_run(tmp_path / 'run')


def test_a_point_is_the_mean_of_its_window(folder):
  curve = plot_curves.read_curve(str(folder), window=2)
  assert curve.label == 'bpo, seed 3'
  assert curve.result == _result()
  # The last window is short.
  np.testing.assert_array_equal(curve.steps, [25, 60, 90])
  np.testing.assert_array_equal(curve.success, [0.25, 0.5, 1.0])


def test_the_table_has_a_row_per_run_and_empty_cells_after_a_shorter(
    folder, tmp_path):
  short = _write_run(tmp_path / 'short', 2, algorithm='grpo', seed=0)
  curves = [plot_curves.read_curve(str(f), 2) for f in (folder, short)]
  assert plot_curves.markdown(curves).splitlines() == [
      '| run | 1 | 2 | 3 |',
      '|---|---|---|---|',
      '| bpo, seed 3 | 25 | 50 | 100 |',
      '| grpo, seed 0 | 25 |  |  |',
  ]


def test_draws_a_png(folder, tmp_path):
  pytest.importorskip('matplotlib', reason='figures need matplotlib')
  path = tmp_path / 'curves.png'
  plot_curves.draw([plot_curves.read_curve(str(folder), 2)], str(path))
  data = path.read_bytes()
  assert data[:8] == b'\x89PNG\r\n\x1a\n'
  width, height = (int.from_bytes(data[i:i + 4]) for i in (16, 20))
  assert (width, height) == (960, 600)


def _without(mapping, *keys):
  """Returns the mapping as JSON, without the entry that the keys lead to."""
  inner = mapping
  for key in keys[:-1]:
    inner = inner[key]
  del inner[keys[-1]]
  return json.dumps(mapping)


@pytest.mark.parametrize('name, content, match', [
    ('result.json', json.dumps(_result())[:-9], 'JSONDecodeError'),
    ('result.json', b'\xff\xfe', 'UnicodeDecodeError'),
    ('result.json', '[]', 'TypeError'),
    ('result.json', _without(_result(), 'config', 'seed'), 'seed'),
    ('result.json', _without(_result(), 'after', 'interval'), 'interval'),
    ('metrics.csv', '', 'no update'),
    ('metrics.csv', 'success,total/steps\n', 'no update'),
    ('metrics.csv', 'success\n0.5\n', 'total/steps'),
    ('metrics.csv', 'total/steps\n5\n', 'success'),
    ('metrics.csv', 'success,total/steps\n0.5\n', 'TypeError'),
    ('metrics.csv', 'success,total/steps\n0.5,many\n', 'many'),
])
def test_a_damaged_file_is_named(folder, name, content, match):
  content = content if isinstance(content, bytes) else content.encode()
  (folder / name).write_bytes(content)
  with pytest.raises(ValueError, match=f'{name} is not what .*{match}'):
    plot_curves.read_curve(str(folder), 2)


@pytest.mark.parametrize('name', ['result.json', 'metrics.csv'])
def test_a_missing_file_is_named(folder, name):
  (folder / name).unlink()
  with pytest.raises(FileNotFoundError, match=name):
    plot_curves.read_curve(str(folder), 2)


def _main(*arguments):
  return subprocess.run(
      [sys.executable, '-m', 'experiments.plot_curves', *arguments],
      cwd=_REPOSITORY, capture_output=True, text=True, check=False)


def test_main_prints_the_table(folder, tmp_path):
  arguments = [f'--workdirs={folder}', '--window=5']
  if importlib.util.find_spec('matplotlib'):
    arguments.append(f'--out={tmp_path / "curves.png"}')
  done = _main(*arguments)
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines()[-1] == '| bpo, seed 3 | 50 |'
  assert (tmp_path / 'curves.png').exists() == (len(arguments) == 3)


@pytest.mark.parametrize('name, content', [
    ('result.json', None), ('result.json', '{'), ('metrics.csv', 'a\n1\n')])
def test_main_says_in_one_line_what_is_wrong(folder, name, content):
  (folder / name).unlink()
  if content is not None:
    (folder / name).write_text(content)
  done = _main(f'--workdirs={folder}')
  assert done.returncode == 2
  line, = done.stderr.splitlines()
  assert line.startswith('error: ') and str(folder / name) in line

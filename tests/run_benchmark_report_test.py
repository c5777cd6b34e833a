"""What benchmarks share: their flags, how figures are told, exit statuses."""

import json
import os
import subprocess
import sys

from absl import app
from absl import flags
from absl.testing import flagsaver
import pytest

from experiments.benchmarks import report
from experiments.benchmarks import update_profile

_NAMES = ('alfworld_engine', 'attention_check', 'credit', 'decode', 'loss',
          'train_step', 'tree_training')


@pytest.fixture(autouse=True)
def _parsed():
  flags.FLAGS.mark_as_parsed()


def _python(*arguments):
  return subprocess.run(
      [sys.executable, *arguments], capture_output=True, text=True, check=False,
      env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)})


def test_all_benchmarks_go_into_one_process_and_list_the_shared_flags():
  done = _python('-c', (
      'import importlib, json\n'
      'from absl import flags\n'
      f'names = {[f"experiments.benchmarks.{name}" for name in _NAMES]}\n'
      'for name in names: importlib.import_module(name)\n'
      'print(json.dumps([[flag.name for flag in\n'
      '    flags.FLAGS.get_key_flags_for_module(name)] for name in names]))'))
  assert done.returncode == 0, done.stderr
  for listed in json.loads(done.stdout):
    assert {'out', 'quick'} <= set(listed)


def test_a_benchmark_has_no_flag_of_another():
  done = _python('-m', 'experiments.benchmarks.train_step', '--rounds=3')
  assert done.returncode != 0
  assert 'rounds' in done.stderr


def test_arguments_that_are_no_flags_are_refused():
  with pytest.raises(app.UsageError, match='qick'):
    report.begin(['credit', 'qick'])


def test_what_cannot_be_written_is_refused_before_the_work(tmp_path):
  with flagsaver.flagsaver(out=str(tmp_path)):
    with pytest.raises(app.UsageError, match='--out: .* is a folder'):
      report.begin(['credit'])


@pytest.mark.parametrize('value, text', [
    (3, '3'), (0.123456, '0.1235'), (123456.7, '123,457'), ('cpu', 'cpu'),
    (float('nan'), 'nan')])
def test_a_figure_is_told(value, text, capsys):
  report.tell('it', value)
  assert capsys.readouterr().out == f'it: {text}\n'


@pytest.mark.parametrize('short', [[], ['a is below 1', 'b is below 2']])
@pytest.mark.parametrize('told', [False, True])
def test_the_verdict_comes_last(short, told, tmp_path, capsys):
  out = tmp_path / 'folder' / 'figures.json'
  figures = {'a': 0.5, 'n': 2}
  with flagsaver.flagsaver(out=str(out)):
    report.begin(['credit'])
    with pytest.raises(SystemExit) as exit_info:
      report.finish(figures, short, told)
  assert exit_info.value.code == bool(short)
  lines = capsys.readouterr().out.splitlines()
  assert lines == ([] if told else ['a: 0.5', 'n: 2']) + (short or ['ok'])
  assert json.loads(out.read_text(encoding='utf-8')) == figures


def test_the_parts_of_an_update_add_up_to_it():
  laps = {'sampling': 5.0, 'needs': 2.0, 'packing': 0.5, 'learning': 3.0,
          'saving': 0.25, 'update': 11.0}
  values = {f'time/{name}': value for name, value in laps.items()}
  before = {'network': 1.0, 'environment': 1.0}
  spent = {'network': 3.0, 'environment': 2.0, 'records': 0.5}
  parts = update_profile._parts(values | {'steps': 22}, before, spent)
  total = sum(parts[name] for name in update_profile._PARTS)
  assert total == parts['update'] == 11.0
  assert parts['needs'] == 2.0
  assert parts['telling'] == 0.25
  assert parts['other'] == 1.5
  assert parts['steps_per_second'] == 2.0

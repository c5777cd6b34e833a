"""Draws and tabulates how success grew in one or more runs.

  python -m experiments.plot_curves --workdirs=runs/a,runs/b --out=curves.png

Success is that of first trajectories on training tasks, mean over `--window`
updates, against environment steps; the squares are the scores before and after
on the evaluation split, with their 95% intervals. Prints the same as a table in
Markdown. The figure needs matplotlib (extra `plot`).
"""

from collections.abc import Sequence
import csv
import dataclasses
import json
import pathlib
from typing import Any

from absl import flags
import numpy as np

from bpo_jax import metrics
from experiments import config_flags
from experiments import figures
from experiments.config_fields import check
from experiments.config_fields import field


@dataclasses.dataclass(frozen=True)
class PlotConfig:
  """What to draw."""

  workdirs: tuple[str, ...] = field(help='Folders of finished runs.')
  out: str | None = field(
      None, 'PNG file; None for the table alone.', not_blank=True)
  window: int = field(10, 'Updates that a point of a curve is the mean of.',
                      min=1)

  def __post_init__(self):
    check(self)
    if not self.workdirs:
      raise ValueError('workdirs: expected at least one folder, got none')


@dataclasses.dataclass(frozen=True)
class Curve:
  """One run.

  Attributes:
    label: algorithm and seed.
    steps: [P] environment steps at the end of each window.
    success: [P] mean success of the window.
    result: what result.json holds.
  """

  label: str
  steps: np.ndarray
  success: np.ndarray
  result: dict[str, Any]


def read_curve(workdir: str, window: int) -> Curve:
  """Returns the curve of a finished run.

  Raises:
    FileNotFoundError: if the folder holds no finished run.
    ValueError: if a file of it is damaged; names the file.
  """
  folder = pathlib.Path(workdir)
  if not (folder / 'result.json').is_file():
    raise FileNotFoundError(
        f'{folder / "result.json"} is missing: expected a finished run; go on'
        ' with it by experiments.train --resume')
  result = _read_result(folder / 'result.json')
  steps, success = _read_columns(folder / 'metrics.csv')
  starts = range(0, len(steps), window)
  return Curve(
      label=f'{result["config"]["algorithm"]}, seed {result["config"]["seed"]}',
      steps=np.array([steps[start:start + window][-1] for start in starts]),
      success=np.array([success[start:start + window].mean()
                        for start in starts]),
      result=result,
  )


def _read_result(path: pathlib.Path) -> dict[str, Any]:
  """Returns what result.json holds, having looked up all that is drawn."""
  try:
    result = json.loads(path.read_text(encoding='utf-8'))
    for name in ('algorithm', 'seed', 'eval_split'):
      result['config'][name]
    for score in (result['before'], result['after']):
      low, high = score['interval']
      float(score['success'] + low + high + result['steps'])
  except (ValueError, LookupError, TypeError) as error:
    raise _damaged(path, error) from error
  return result


def _read_columns(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
  """Returns (environment steps, success) of every update."""
  try:
    with path.open(newline='', encoding='utf-8') as file:
      rows = list(csv.DictReader(file))
    steps, success = (
        np.array([float(row[name]) for row in rows])
        for name in ('total/steps', 'success'))
    if not rows:
      raise ValueError('it holds no update')
  except (ValueError, LookupError, TypeError, csv.Error) as error:
    raise _damaged(path, error) from error
  return steps, success


def _damaged(path: pathlib.Path, error: Exception) -> ValueError:
  return ValueError(
      f'{path} is not what a finished run leaves ({type(error).__name__}: '
      f'{error}); run it again, or leave its folder out of --workdirs')


def markdown(curves: Sequence[Curve]) -> str:
  """Returns a table with a row per run and a column per window."""
  most = max(len(curve.success) for curve in curves)
  lines = ['| run | ' + ' | '.join(str(i + 1) for i in range(most)) + ' |',
           '|---|' + '---|' * most]
  for curve in curves:
    cells = [f'{100 * value:.0f}' for value in curve.success]
    cells += [''] * (most - len(cells))
    lines.append(f'| {curve.label} | ' + ' | '.join(cells) + ' |')
  return '\n'.join(lines)


def draw(curves: Sequence[Curve], path: str) -> None:
  """Writes the figure.

  Raises:
    ImportError: if matplotlib is not installed.
  """
  figure = figures.load().Figure(figsize=(6.4, 4.0), layout='constrained')
  axes = figure.subplots()
  for curve in curves:
    line, = axes.plot(curve.steps, 100 * curve.success, label=curve.label)
    for name, place in (('before', 0), ('after', curve.result['steps'])):
      score = curve.result[name]
      low, high = score['interval']
      success = score['success']
      axes.errorbar(
          place, 100 * success, color=line.get_color(), fmt='s', capsize=3,
          yerr=[[100 * (success - low)], [100 * (high - success)]],
      )
  split = curves[0].result['config']['eval_split']
  axes.set_xlabel('environment steps')
  axes.set_ylabel('success, %')
  axes.set_title(f'lines: training tasks; squares: {split}, 95% intervals',
                 fontsize=10)
  axes.set_ylim(0, 100)
  axes.grid(alpha=0.3)
  axes.legend(frameon=False)
  figure.savefig(path, dpi=150)


def main(argv: Sequence[str]) -> None:
  """Draws the curves of runs and prints their table."""
  del argv
  config = config_flags.read(PlotConfig)
  try:
    if config.out is not None:
      metrics.check_writable(config.out)
      figures.load()
    curves = [read_curve(name, config.window) for name in config.workdirs]
    print(markdown(curves))
    if config.out is not None:
      draw(curves, config.out)
  except (OSError, ImportError, ValueError) as error:
    raise flags.IllegalFlagValueError(str(error)) from error


if __name__ == '__main__':
  config_flags.define(PlotConfig)
  config_flags.run(main)

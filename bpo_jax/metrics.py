"""Metrics as (sum, count) pairs, the writers they go to, and their intervals.

A mean of means is not the mean, so nothing is divided until all micro-batches,
devices and trees have been added up. Writers are for the host only.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import csv
import importlib
import math
import os
import pathlib
import shutil
import statistics
import sys
import time
from typing import Any, NamedTuple, Protocol, TextIO

import numpy as np

_WINDOW = 20  # Updates over which the progress line takes its rates.


# ----------------------------------------------------------------- writers


class Writer(Protocol):
  """Somewhere that the metrics of each update go."""

  def write(self, update: int, values: Mapping[str, float]) -> None:
    """Takes the metrics of one update; updates come in ascending order."""

  def close(self) -> None:
    """Puts everything where it belongs; nothing may be written after."""


class CsvWriter:
  """Writes one row per update, with the update in the first column.

  A name that turns up late gets a column of its own; rows without a value have
  an empty cell there. A run that is resumed goes on in the same file.
  """

  def __init__(self, path: str | os.PathLike[str], last_update: int = -1):
    """Opens the file and drops the rows that the run will write again.

    Args:
      path: the file; its folder is made if there is none.
      last_update: the last update already done, whose row and those before it
        stay; -1 for a new run.
    """
    self._path = pathlib.Path(path)
    self._path.parent.mkdir(parents=True, exist_ok=True)
    columns, rows = _read_rows(self._path, last_update)
    self._last_update = int(rows[-1]['update']) if rows else -1
    self._rewrite(columns, rows)

  def write(self, update: int, values: Mapping[str, float]) -> None:
    """Appends a row and hands it to the system at once.

    Raises:
      ValueError: if the update is not after the last one written.
      OSError: if the disk is full; later rows may be written nevertheless.
    """
    if update <= self._last_update:
      raise ValueError(
          f'{self._path} has a row for update {self._last_update}; expected a '
          f'later one, got {update}. Write all metrics of an update at once.'
      )
    new = [name for name in values if name not in self._columns]
    if new:
      _, rows = _read_rows(self._path, self._last_update)
      old = self._file
      self._rewrite(self._columns + new, rows)
      old.close()
    self._writer.writerow({'update': update, **values})
    self._file.flush()
    self._last_update = update

  def close(self) -> None:
    """Closes the file."""
    self._file.close()

  def _rewrite(
      self, columns: list[str], rows: Sequence[Mapping[str, str]]
  ) -> None:
    """Replaces the file by one with these rows, and goes on appending to it.

    Where the disk is full, everything stays as it was.
    """
    partial = self._path.with_name(self._path.name + '.partial')
    with partial.open('w', newline='', encoding='utf-8') as file:
      writer = _dict_writer(file, columns)
      writer.writeheader()
      writer.writerows(rows)
      file.flush()
      os.fsync(file.fileno())
    partial.rename(self._path)
    self._file = self._path.open('a', newline='', encoding='utf-8')
    self._writer = _dict_writer(self._file, columns)
    self._columns = columns


def _dict_writer(file: TextIO, columns: Sequence[str]) -> csv.DictWriter:
  return csv.DictWriter(file, columns, restval='', lineterminator='\n')


def _read_rows(
    path: pathlib.Path, last_update: int
) -> tuple[list[str], list[dict[str, str]]]:
  """Returns the columns and the whole rows up to `last_update`."""
  if not path.exists():
    return ['update'], []
  with path.open(newline='', encoding='utf-8') as file:
    # A killed writer leaves its last line without an end: not a whole row.
    lines = [line for line in file if line.endswith('\n')]
  reader = csv.DictReader(lines)
  columns = list(reader.fieldnames or ['update'])
  if columns[0] != 'update':
    raise ValueError(
        f'{path} is no file of metrics: expected a first column update, got '
        f'{columns[0]!r}. Move it away or write elsewhere.'
    )
  rows = [row for row in reader if (row['update'] or '').isdecimal()]
  return columns, [r for r in rows if int(r['update']) <= last_update]


def check_writable(path: str | os.PathLike[str]) -> None:
  """Refuses a file that `write_text` cannot write, before the work.

  Makes its folder if there is none; what the file holds stays.

  Raises:
    OSError: if it is a folder, or its own folder cannot be written to.
  """
  path = pathlib.Path(path)
  if path.is_dir():
    raise IsADirectoryError(f'{path} is a folder; expected a file to write to')
  if path.exists() and not os.access(path, os.W_OK):
    raise PermissionError(f'{path} cannot be written to')
  if _is_whole_file(path):
    _, partial = _places(path)
    was_there = partial.exists()
    with partial.open('a', encoding='utf-8'):
      pass
    if not was_there:
      partial.unlink()


def write_text(path: str | os.PathLike[str], text: str) -> None:
  """Writes a file that is there whole or not at all.

  A link stays one: the file it leads to is written. What is no regular file,
  such as /dev/null, or is where this process prints, such as /dev/stdout, is
  written to as it is.

  Raises:
    OSError: if it cannot be written; what was there before stays.
  """
  path = pathlib.Path(path)
  if not _is_whole_file(path):
    _write_through(path, text)
    return
  target, partial = _places(path)
  with partial.open('w', newline='', encoding='utf-8') as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  partial.replace(target)


def _is_whole_file(path: pathlib.Path) -> bool:
  """Returns whether a path is that of a file to replace, or of none yet."""
  if not path.exists():
    return True
  return path.is_file() and _printed_to(path) is None


def _printed_to(path: pathlib.Path) -> TextIO | None:
  """Returns the stream of this process that goes to a file, if one does."""
  for stream in (sys.__stdout__, sys.__stderr__):
    try:
      if stream and os.path.samestat(path.stat(), os.fstat(stream.fileno())):
        return stream
    except (OSError, ValueError):  # It is closed, or none of the system's.
      pass
  return None


def _write_through(path: pathlib.Path, text: str) -> None:
  """Writes to a device, a pipe, or where the process prints."""
  stream = _printed_to(path)
  if stream is None:
    path.write_text(text, encoding='utf-8')
  else:  # Opened anew, it would be written over from the start.
    stream.write(text)
    stream.flush()


def _places(path: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
  """Returns the file that a path leads to and where it is written first."""
  target = pathlib.Path(os.path.realpath(path))
  target.parent.mkdir(parents=True, exist_ok=True)
  return target, target.with_name(target.name + '.partial')


class TensorBoardWriter:
  """Writes TensorBoard event files."""

  def __init__(self, directory: str | os.PathLike[str], last_update: int = -1):
    """Opens an event file in the directory.

    Args:
      directory: where the event files of the run are.
      last_update: the last update already done; viewers drop what was written
        for later ones by the part of the run that was lost. -1 for a new run.

    Raises:
      ImportError: if tensorboardX is not installed.
    """
    try:
      tensorboard = importlib.import_module('tensorboardX')
    except ImportError as error:
      raise ImportError(
          'writing TensorBoard files needs tensorboardX, which is not '
          "installed: pip install -e '.[tensorboard]' in the clone, or turn "
          'them off with --notensorboard.'
      ) from error
    self._writer = tensorboard.SummaryWriter(
        os.fspath(directory), purge_step=last_update + 1
    )

  def write(self, update: int, values: Mapping[str, float]) -> None:
    """Writes one scalar per name."""
    for name, value in values.items():
      self._writer.add_scalar(name, float(value), update)
    self._writer.flush()

  def close(self) -> None:
    """Closes the event file."""
    self._writer.close()


class _Progress(NamedTuple):
  """How far the run was at one moment; tokens and steps since it started."""

  seconds: float
  update: int
  tokens: float
  steps: float


class ProgressLine:
  """One line that tells how the run is going and when it will be over.

  On a terminal the line is rewritten in place; elsewhere, such as in a log
  file, a new line comes every `interval` seconds and after the last update.

  Attributes:
    num_updates: updates of the whole run; may be set anew as a run with another
      budget learns how far that will go.
  """

  def __init__(
      self,
      num_updates: int,
      last_update: int = 0,
      stream: TextIO | None = None,
      interval: float = 10.0,
      clock: Callable[[], float] = time.monotonic,
  ):
    """Starts the clock.

    Args:
      num_updates: updates of the whole run, counted from 1.
      last_update: updates already done before, when resuming.
      stream: where the line goes; stderr by default.
      interval: least seconds between lines off a terminal.
      clock: gives seconds.
    """
    self.num_updates = num_updates
    self._stream = sys.stderr if stream is None else stream
    self._interval = interval
    self._clock = clock
    self._is_terminal = self._stream.isatty()
    self._last_shown = -math.inf
    self._start = last_update
    self._history = collections.deque(
        [_Progress(clock(), last_update, 0, 0)], maxlen=_WINDOW + 1
    )

  def write(
      self,
      update: int,
      success: float,
      mean_return: float,
      tokens: float,
      steps: float,
  ) -> None:
    """Shows the state after an update.

    Args:
      update: how many updates are done.
      success: fraction of episodes that reached the goal.
      mean_return: mean return of the episodes, in reward units.
      tokens: tokens processed in this update.
      steps: environment steps taken in this update.
    """
    before = self._history[-1]
    now = _Progress(
        self._clock(), update, before.tokens + tokens, before.steps + steps
    )
    self._history.append(now)
    is_due = now.seconds - self._last_shown >= self._interval
    if self._is_terminal or is_due or update >= self.num_updates:
      self._last_shown = now.seconds
      self._show(self._text(success, mean_return))

  def close(self) -> None:
    """Leaves the last line standing on a terminal."""
    if self._is_terminal and self._last_shown > -math.inf:
      self._stream.write('\n')
      self._stream.flush()

  def _text(self, success: float, mean_return: float) -> str:
    first, now = self._history[0], self._history[-1]
    seconds = max(now.seconds - first.seconds, 1e-9)
    return (
        f'update {now.update}/{self.num_updates}  success {success:.1%}  '
        f'return {mean_return:.3f}  '
        f'{(now.tokens - first.tokens) / seconds:,.0f} tokens/s  '
        f'{(now.steps - first.steps) / seconds:,.0f} steps/s  '
        f'{self._time_left()} left'
    )

  def _time_left(self) -> str:
    """Returns the time left at the rate of all updates but the run's first.

    That one compiles what the others use; after it alone nothing is known.
    """
    updates_left = max(self.num_updates - self._history[-1].update, 0)
    rated = [past for past in self._history if past.update > self._start]
    if not updates_left:
      return duration(0)
    if len(rated) < 2:
      return '?'
    seconds = rated[-1].seconds - rated[0].seconds
    return duration(
        updates_left * seconds / max(rated[-1].update - rated[0].update, 1)
    )

  def _show(self, text: str) -> None:
    if self._is_terminal:
      width = shutil.get_terminal_size().columns
      # Back to the margin, the line cut so that it cannot wrap, the rest wiped.
      text = f'\r{text[:width - 1]}\x1b[K'
    else:
      text += '\n'
    self._stream.write(text)
    self._stream.flush()


def duration(seconds: float) -> str:
  """Returns a time span in its two largest units, such as `2h05m`."""
  whole = round(seconds)
  minutes, hours, days = whole // 60, whole // 3600, whole // 86400
  if days:
    return f'{days}d{hours % 24:02}h'
  if hours:
    return f'{hours}h{minutes % 60:02}m'
  return f'{minutes}m{whole % 60:02}s' if minutes else f'{whole}s'


def table(
    rows: Sequence[Mapping[str, Any]],
    columns: Sequence[str],
    float_format: str = '.3f',
) -> str:
  """Returns a table in plain text: a header, a rule, one line per row.

  Columns of numbers are flush right, others flush left; a value that is absent
  or None shows as `-`.

  Args:
    rows: column -> value for each row.
    columns: which columns, in this order.
    float_format: format of float values.
  """
  cells = [[_cell(row.get(c), float_format) for c in columns] for row in rows]
  lines = [list(columns)] + cells
  widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
  aligns = [
      '>' if all(_is_number(row.get(c)) for row in rows) else '<'
      for c in columns
  ]
  rule = ['-' * width for width in widths]
  return '\n'.join(
      '  '.join(
          f'{cell:{align}{width}}'
          for cell, align, width in zip(line, aligns, widths, strict=True)
      ).rstrip()
      for line in [lines[0], rule, *cells]
  )


def _cell(value: Any, float_format: str) -> str:
  if value is None:
    return '-'
  if isinstance(value, (float, np.floating)):
    return format(float(value), float_format)
  return str(value)


def _is_number(value: Any) -> bool:
  return value is None or isinstance(value, (int, float, np.number))


# --------------------------------------------------------------- intervals


def proportion_interval(
    successes: float, trials: float, level: float = 0.95
) -> tuple[float, float]:
  """Returns the Wilson score interval of a proportion.

  Unlike mean +- 1.96 standard errors it stays in [0, 1] and is not empty at 0
  or `trials` successes.

  Args:
    successes: how many trials succeeded.
    trials: how many independent trials there were, above 0.
    level: probability that the interval covers the truth.

  Raises:
    ValueError: if the counts or the level make no sense.

  References:
    Wilson, Probable inference, the law of succession, and statistical
    inference, JASA 1927.
  """
  if not 0 <= successes <= trials or trials <= 0:
    raise ValueError(
        'expected 0 <= successes <= trials and trials > 0, got '
        f'{successes} of {trials}.'
    )
  if not 0 < level < 1:
    raise ValueError(f'level must be in (0, 1), got {level}.')
  z = statistics.NormalDist().inv_cdf((1 + level) / 2)
  rate, shrink = successes / trials, 1 + z**2 / trials
  centre = (rate + z**2 / (2 * trials)) / shrink
  half = z / shrink * math.sqrt(
      rate * (1 - rate) / trials + z**2 / (4 * trials**2)
  )
  # At the ends the two terms are equal but for rounding.
  low = 0.0 if successes == 0 else max(centre - half, 0.0)
  high = 1.0 if successes == trials else min(centre + half, 1.0)
  return low, high


def clustered_interval(
    values: Any, level: float = 0.95
) -> tuple[float, float]:
  """Returns an interval of the mean over games, each played several times.

  Passes over one game are not independent of each other, games are. The Wilson
  interval is taken at the number of independent trials that would have given
  the variance seen between the means of the games,

    trials = p (1 - p) / (var_games(mean over passes) / games),

  and at most one trial per value. Where all values are 0 or all are 1, nothing
  is seen of the variance, and each game counts as one trial.

  Args:
    values: [games, passes] float or bool, successes or scores in [0, 1].
    level: probability that the interval covers the truth.

  Raises:
    ValueError: if the values have another shape or range.

  References:
    Korn and Graubard, Confidence intervals for proportions with small expected
    number of positive counts estimated from survey data, 1998.
  """
  values = np.asarray(values, np.float64)
  if values.ndim != 2 or not values.size:
    raise ValueError(f'expected values [games, passes], got {values.shape}.')
  if not ((values >= 0) & (values <= 1)).all():
    raise ValueError('expected values in [0, 1]; scale returns before.')
  rate = float(values.mean())
  trials = _effective_trials(values)
  return proportion_interval(min(rate, 1.0) * trials, trials, level)


def _effective_trials(values: np.ndarray) -> float:
  """Independent trials that [games, passes] values in [0, 1] amount to."""
  num_games, rate = values.shape[0], values.mean()
  spread = rate * (1 - rate)
  if num_games == 1 or spread == 0:
    return float(num_games)
  variance = values.mean(axis=1).var(ddof=1) / num_games
  return float(spread / max(variance, spread / values.size))

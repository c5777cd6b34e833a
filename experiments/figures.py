"""matplotlib, which nothing but figures needs."""

import importlib
import types


def load() -> types.ModuleType:
  """Returns matplotlib.figure, which draws to files and needs no display.

  To be called before the work that a figure is to show.

  Raises:
    ImportError: if matplotlib is not installed; names the extra.
  """
  try:
    return importlib.import_module('matplotlib.figure')
  except ImportError as error:
    raise ImportError(
        "figures need matplotlib: pip install -e '.[plot]' in the clone, or"
        ' ask for none') from error

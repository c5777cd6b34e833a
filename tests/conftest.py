"""Shared fixtures: where the data lie, and CPU-only JAX."""

import os
import pathlib
import tarfile
import tempfile

import pytest

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax  # noqa: E402  pylint: disable=wrong-import-position

# Compiles in half the time: a test computes too little to win it back.
jax.config.update('jax_disable_most_optimizations', True)

_REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


def _data_dir() -> pathlib.Path:
  default = _REPOSITORY.parent / 'shared' / 'data'
  return pathlib.Path(os.environ.get('BPO_JAX_DATA', default))


@pytest.fixture(scope='module', autouse=True)
def _forget_programs():
  """Frees what a file compiled: thousands of programs crash a process."""
  yield
  jax.clear_caches()


@pytest.fixture(scope='session')
def data_dir() -> pathlib.Path:
  """The folder of benchmark data, which the repository does not bundle."""
  path = _data_dir()
  if not path.is_dir():
    pytest.skip(f'benchmark data not found at {path}; set BPO_JAX_DATA')
  return path


@pytest.fixture(scope='session')
def alfworld_games(data_dir) -> pathlib.Path:
  """json_2.1.1 of ALFWorld, unpacked once into the user's cache."""
  archive = data_dir / 'alfworld_games.tar.xz'
  if not archive.is_file():
    pytest.skip(f'no {archive.name} in {data_dir}')
  cache = pathlib.Path(
      os.environ.get('XDG_CACHE_HOME', pathlib.Path.home() / '.cache')
  ) / 'bpo_jax' / 'tests'
  games = cache / 'json_2.1.1'
  if not games.is_dir():
    _unpack(archive, games)
  return games


def _unpack(archive: pathlib.Path, games: pathlib.Path) -> None:
  """Unpacks beside and renames: no other test worker sees half of it."""
  games.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(
      prefix='unpacking-', dir=games.parent) as staging:
    with tarfile.open(archive) as tar:
      tar.extractall(staging, filter='data')
    try:
      pathlib.Path(staging, games.name).rename(games)
    except OSError:
      if not games.is_dir():  # Else another worker was faster.
        raise

"""Shared fixtures: where the data lie, CPU-only JAX, and what it compiled."""

import hashlib
import importlib.metadata
import os
import pathlib
import platform
import tarfile
import tempfile
import time

import pytest

_REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
_CACHE = pathlib.Path(
    os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache',
    'bpo_jax', 'tests')
_DAYS = 7  # That programs are kept.


def _programs() -> pathlib.Path:
  """Returns where compiled programs are kept, of these versions and this CPU.

  Most of a run is compiling what the run before compiled already.
  """
  cpu = pathlib.Path('/proc/cpuinfo')
  flags = [line for line in cpu.read_text().splitlines()
           if line.startswith('flags')][:1] if cpu.exists() else []
  versions = [importlib.metadata.version(n) for n in ('jax', 'jaxlib')]
  name = repr((versions, platform.machine(), flags)).encode()
  return _CACHE / f'programs-{hashlib.sha256(name).hexdigest()[:16]}'


def _forget_old_programs() -> None:
  """Removes programs of a week ago, so that the folder stays small."""
  before = time.time() - 86400 * _DAYS
  for folder in _CACHE.glob('programs-*'):
    for path in folder.iterdir():
      if path.stat().st_mtime < before:
        path.unlink(missing_ok=True)


os.environ.setdefault('JAX_PLATFORMS', 'cpu')
# By the environment, so that the programs that tests start have it too.
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(_programs()))
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')

import jax  # noqa: E402  pylint: disable=wrong-import-position

# Compiles in half the time: a test computes too little to win it back.
jax.config.update('jax_disable_most_optimizations', True)


def pytest_sessionstart(session) -> None:
  if not hasattr(session.config, 'workerinput'):  # Once, by no worker.
    _forget_old_programs()


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
  games = _CACHE / 'json_2.1.1'
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

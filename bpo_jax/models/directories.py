"""Directories that are there whole or not at all."""

from collections.abc import Iterator
import contextlib
import errno
import os
import pathlib
import tempfile


@contextlib.contextmanager
def whole(directory: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
  """Yields a folder that gets its name once all is written, never before.

  Where that fails nothing is left, folders above it that were made included.

  Args:
    directory: a path that is free, or an empty folder; of a link, where it
      leads to.

  Raises:
    ValueError: if something is there under that name, or nothing can be.
  """
  with _staging(directory) as (folder, target):
    yield folder
    for path in folder.rglob('*'):
      if path.is_file():
        with path.open('rb') as file:
          os.fsync(file.fileno())
    folder.rename(target)


def check_writable(directory: str | os.PathLike[str]) -> None:
  """Refuses what `whole` cannot write, before the work; leaves nothing.

  Raises:
    ValueError: as `whole` does.
  """
  with _staging(directory):
    pass


@contextlib.contextmanager
def _staging(
    directory: str | os.PathLike[str]
) -> Iterator[tuple[pathlib.Path, pathlib.Path]]:
  """Yields a folder beside where a path leads to, and that place."""
  target = _free(directory)
  with contextlib.ExitStack() as made:
    try:
      for parent in reversed(target.parents):
        if not parent.is_dir():
          _make(parent)
          made.callback(_remove_if_empty, parent)
      staging = made.enter_context(tempfile.TemporaryDirectory(
          prefix=f'.{target.name}-', dir=target.parent))
    except OSError as error:
      raise ValueError(
          f'{directory}: expected a path that can be written to, got'
          f' {error.strerror} on making {error.filename}; name another'
      ) from error
    folder = pathlib.Path(staging, target.name)
    folder.mkdir()
    yield folder, target


def _free(directory: str | os.PathLike[str]) -> pathlib.Path:
  """Returns where a path leads to, refusing one that is taken."""
  target = pathlib.Path(os.path.realpath(directory))
  taken = None
  if target.is_dir():
    taken = 'one with something in it' if any(target.iterdir()) else None
  elif os.path.lexists(target):
    taken = 'a link to itself' if target.is_symlink() else 'a file'
  if taken:
    raise ValueError(
        f'{directory}: expected a path that is free or an empty folder, got'
        f' {taken}; name another')
  return target


def _make(folder: pathlib.Path) -> None:
  if os.path.lexists(folder) and not folder.is_dir():
    code = errno.ENOTDIR
    raise NotADirectoryError(code, os.strerror(code), str(folder))
  folder.mkdir(exist_ok=True)


def _remove_if_empty(folder: pathlib.Path) -> None:
  with contextlib.suppress(OSError):
    folder.rmdir()

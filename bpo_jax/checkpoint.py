"""Checkpoints: everything a run needs to go on as if it had never stopped.

A directory holds one folder per step, named by its number, and each folder is
an orbax checkpoint with one more file, `bpo_jax.json`: what the caller keeps
beside the arrays (data position, config), the version of the code, the shape of
every leaf, and a checksum of every file. A folder gets its number by a rename
after all of it has been written, so whatever has a number is whole; the
checksums find what a disk spoils later, which orbax itself reads back without a
word. `config.json` beside the steps says which run the directory belongs to.

Paths are on a file system that every process sees. One run writes to a
directory; any number may read from it meanwhile.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import json
import logging as std_logging
import os
import pathlib
import re
import shutil
import threading
from typing import Any
import zlib

from absl import logging
from bpo_jax import version
import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

PyTree = Any
_MANIFEST = 'bpo_jax.json'
_CONFIG = 'config.json'
_PARTIAL = '.partial'  # Being written, or being deleted: never restored.
_STALE = '.stale'  # A whole step that gives way to a new one of its number.
_MAX_NAMED = 8  # Differing leaves that an error spells out.
_ORBAX_LOCK = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """An intact step on disk, before its arrays are read.

  Attributes:
    step: the number it was saved under.
    path: its folder.
    extra: what `save` was given beside the arrays.
    code_version: the version of bpo_jax that wrote it.
    leaves: path of each leaf -> its shape and dtype, as text.
  """

  step: int
  path: pathlib.Path
  extra: dict[str, Any]
  code_version: str
  leaves: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Restored:
  """A step read back: its number, its arrays, and what was kept beside them."""

  step: int
  state: PyTree
  extra: dict[str, Any]


# ---------------------------------------------------------------- saving


def save(
    directory: str | os.PathLike[str],
    step: int,
    state: PyTree,
    extra: Mapping[str, Any] | None = None,
    max_to_keep: int = 2,
) -> None:
  """Writes one step and then deletes those that it makes superfluous.

  Returns once the step is on disk. Older steps go only after that, so at every
  moment at least one whole step is there. Steps with higher numbers belong to a
  future that this run has left (it was restored from an earlier step), and are
  deleted too. Every process of a run must call this.

  Args:
    directory: where the steps are; made if there is none.
    step: number of the step, at least 0; an old step of that number is
      replaced.
    state: pytree of `jax.Array`, typed PRNG keys included.
    extra: JSON-able values to keep beside the arrays, such as the data position
      and the config. JSON turns tuples into lists and keys into text.
    max_to_keep: how many steps to keep, at least 1.

  Raises:
    ValueError: if an argument is not as described.
    OSError: if the disk is full or refuses to be written to. Nothing that was
      restorable before is lost, and the run may go on.
  """
  directory = _directory(directory)
  leaves = _describe(state, (jax.Array,))
  _check_save(step, max_to_keep)
  manifest = {
      'step': step,
      'version': version.__version__,
      'extra': _as_json(extra or {}, 'extra'),
      'leaves': leaves,
  }
  try:
    with _orbax():
      _write_step(directory, state, manifest)
  except Exception as error:
    _raise_if_storage_error(error, directory, step)
    raise
  if _is_writer():
    _prune(directory, step, max_to_keep)


def _write_step(
    directory: pathlib.Path, state: PyTree, manifest: dict[str, Any]
) -> None:
  """Writes the arrays and the manifest aside, then renames the whole."""
  partial = directory / f'{manifest["step"]}{_PARTIAL}'
  if _is_writer():
    directory.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(directory)
  _barrier('bpo_jax_checkpoint_begin')
  with _uncompressed():
    ocp.save(partial, state)
  try:
    if _is_writer():
      manifest = manifest | {'files': _checksums(partial)}
      _write_json(partial / _MANIFEST, _seal(manifest))
      _commit(partial, directory / str(manifest['step']))
  finally:
    _barrier('bpo_jax_checkpoint_end')


def _uncompressed() -> ocp.Context:
  """Compressing floats costs a quarter of a save and saves 7% of space."""
  context = ocp.Context()
  context.array.saving.use_compression = False
  return context


def _commit(partial: pathlib.Path, final: pathlib.Path) -> None:
  """Gives a whole step its number, with an old step of that number kept aside.

  A kill between the two renames leaves the old one as `.stale`, which readers
  accept as long as nothing else has its number.
  """
  stale = final.with_name(final.name + _STALE)
  if final.exists():
    final.rename(stale)
  partial.rename(final)
  _sync_directory(final.parent)
  _delete(stale)


def _prune(directory: pathlib.Path, step: int, max_to_keep: int) -> None:
  present = steps(directory)
  later = [s for s in present if s > step]
  if later:
    logging.warning(
        'Deleting steps %s of %s: the run went on from before them.',
        later, directory
    )
  kept = [s for s in present if s <= step][-max_to_keep:]
  for superfluous in set(present) - set(kept):
    _delete(_step_path(directory, superfluous))


def _delete(path: pathlib.Path) -> None:
  """Removes a folder; a kill half-way leaves nothing that looks restorable."""
  if not path.exists():
    return
  doomed = path
  if not path.name.endswith(_PARTIAL):
    doomed = path.with_name(f'{path.name}.deleted{_PARTIAL}')
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
  shutil.rmtree(doomed, ignore_errors=True)


def _remove_leftovers(directory: pathlib.Path) -> None:
  """Clears what a killed or failed save has left behind."""
  for path in directory.iterdir():
    if re.fullmatch(rf'\d+{_STALE}', path.name):
      final = path.with_name(path.name.removesuffix(_STALE))
      if final.exists():
        _delete(path)
      else:
        path.rename(final)
    elif re.match(rf'\d+.*{re.escape(_PARTIAL)}', path.name):
      shutil.rmtree(path, ignore_errors=True)
    elif path.name.endswith('.json' + _PARTIAL):
      path.unlink(missing_ok=True)


def _raise_if_storage_error(
    error: Exception, directory: pathlib.Path, step: int
) -> None:
  """Raises OSError if `error` came from the file system, else returns."""
  code = _storage_error_code(error)
  if code is None:
    return
  with contextlib.suppress(OSError):
    if _is_writer():
      _remove_leftovers(directory)  # Give the space back.
  good = latest_step(directory)
  kept = 'none is there yet' if good is None else f'step {good} is intact'
  raise OSError(
      code,
      f'could not save step {step} to {directory}: {os.strerror(code)}. '
      f'Of the checkpoints saved before, {kept}. Free some space or set '
      'another directory; the run itself is unharmed.',
  ) from error


def _storage_error_code(error: BaseException | None) -> int | None:
  """The errno behind `error`, whether Python or the array store raised it."""
  while error is not None:
    if isinstance(error, OSError) and error.errno:
      return error.errno
    found = re.search(r"os_error_code='(\d+)'", str(error))
    if found:
      return int(found.group(1))
    error = error.__cause__ or error.__context__
  return None


def _check_save(step: int, max_to_keep: int) -> None:
  if step < 0:
    raise ValueError(f'step must be at least 0, got {step}.')
  if max_to_keep < 1:
    raise ValueError(f'max_to_keep must be at least 1, got {max_to_keep}.')


# ------------------------------------------------------------- restoring


def steps(directory: str | os.PathLike[str]) -> list[int]:
  """Returns the numbers of the whole steps, ascending; [] if there are none."""
  directory = _directory(directory)
  if not directory.is_dir():
    return []
  names = (path.name.removesuffix(_STALE) for path in directory.iterdir())
  return sorted({int(name) for name in names if re.fullmatch(r'\d+', name)})


def latest_step(directory: str | os.PathLike[str]) -> int | None:
  """Returns the highest step that was saved whole, or None without any."""
  present = steps(directory)
  return present[-1] if present else None


def find(
    directory: str | os.PathLike[str], step: int | None = None
) -> Checkpoint:
  """Returns the step that `restore` would read, checked file by file.

  Args:
    directory: where the steps are.
    step: which one; None for the newest intact one. One that fails its
      checksums is passed over with a warning.

  Raises:
    FileNotFoundError: if there is no such step.
    ValueError: if the one asked for, or every one, is corrupted.
  """
  directory = _directory(directory)
  present = steps(directory)
  if not present:
    raise FileNotFoundError(
        f'no checkpoint in {directory}: expected folders named by step, such '
        f'as {directory / "100"}. Check the directory.'
    )
  if step is not None and step not in present:
    raise FileNotFoundError(
        f'no checkpoint of step {step} in {directory}; it has {present}.'
    )
  faults = []
  for candidate in [step] if step is not None else reversed(present):
    path = _step_path(directory, candidate)
    try:
      return _open(path)
    except (OSError, ValueError) as error:
      if step is None and not path.exists():
        return find(directory)  # The run has saved and pruned meanwhile.
      faults.append(f'step {candidate}: {error}')
      logging.warning('Corrupted checkpoint passed over, %s', faults[-1])
  raise ValueError(
      f'no intact checkpoint in {directory}: ' + '; '.join(faults) + '. '
      'Restore the folder from a copy, or start anew in another directory.'
  )


def restore(
    directory: str | os.PathLike[str],
    target: PyTree,
    step: int | None = None,
) -> Restored:
  """Reads a step back, bit for bit, onto the devices that `target` names.

  Args:
    directory: where the steps are.
    target: pytree like the one that was saved, of `jax.Array` or of
      `jax.ShapeDtypeStruct` with a sharding. The result has its structure,
      dtypes and shardings, which need not be those at the time of saving.
    step: which step; None for the newest intact one.

  Raises:
    FileNotFoundError: if there is no such step.
    ValueError: if the step is corrupted and no other will do, or if its leaves
      are not those of `target`; the first differing ones are named.
  """
  wanted = _describe(target, (jax.Array, jax.ShapeDtypeStruct))
  found = find(directory, step)
  _check_leaves(found, wanted)
  abstract = jax.tree_util.tree_map_with_path(_abstract, target)
  try:
    with _orbax():
      state = ocp.load(found.path, abstract)
  except Exception:
    if step is None and not found.path.exists():
      return restore(directory, target)  # Pruned while it was being read.
    raise
  return Restored(found.step, jax.tree.map(_like, state, target), found.extra)


def _like(array: jax.Array, target: jax.Array | jax.ShapeDtypeStruct):
  # Committed alike, or what was compiled for the target is compiled again.
  if getattr(target, 'committed', True):
    return jax.device_put(array, target.sharding)
  if not jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
    return jnp.asarray(np.asarray(array))
  data = np.asarray(jax.random.key_data(array))
  return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))


def _abstract(
    path: tuple[Any, ...], leaf: jax.Array | jax.ShapeDtypeStruct
) -> jax.ShapeDtypeStruct:
  if leaf.sharding is None:
    raise ValueError(
        f'target leaf {_name(path)} has no sharding, and where to put it is '
        'never guessed: give an array, or a ShapeDtypeStruct with sharding=.'
    )
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _check_leaves(found: Checkpoint, wanted: Mapping[str, str]) -> None:
  names = list(wanted) + [name for name in found.leaves if name not in wanted]
  faults = [
      f'  {name}: expected {wanted.get(name, "no such leaf")}, '
      f'got {found.leaves.get(name, "no such leaf")}'
      for name in names
      if wanted.get(name) != found.leaves.get(name)
  ]
  if faults:
    more = len(faults) - _MAX_NAMED
    raise ValueError(
        f'checkpoint {found.path} is of another model or optimiser; '
        f'{len(faults)} of {len(names)} leaves differ:\n'
        + '\n'.join(faults[:_MAX_NAMED])
        + (f'\n  and {more} more' if more > 0 else '')
        + '\nRestore with the settings it was trained with.'
    )


def _open(path: pathlib.Path) -> Checkpoint:
  """Reads and checks the manifest and all files; ValueError if any is bad."""
  manifest = _unseal(_read_json(path / _MANIFEST), path / _MANIFEST)
  found = _checksums(path)
  for name, expected in manifest['files'].items():
    if found.get(name) != expected:
      raise ValueError(
          f'{path / name} is damaged: expected [bytes, crc32] {expected}, got '
          f'{found.get(name, "no such file")}'
      )
  return Checkpoint(
      manifest['step'], path, manifest['extra'], manifest['version'],
      manifest['leaves']
  )


# ---------------------------------------------------------------- config


def check_config(
    directory: str | os.PathLike[str],
    config: Mapping[str, Any],
    may_change: Sequence[str] = (),
    claim: bool = True,
) -> None:
  """Claims the directory for a config, or refuses one that is not its own.

  Args:
    directory: where the run's checkpoints are or will be; made if need be.
    config: JSON-able, possibly nested.
    claim: whether to write the config down, too, where nothing is against it.
    may_change: dotted names that a resumed run may set anew, such as the number
      of updates; a name covers all that is nested in it.

  Raises:
    ValueError: if the directory holds another config. The message lists the
      keys that differ with both values.
  """
  path = _directory(directory) / _CONFIG
  config = _as_json(config, 'config')
  if path.exists():
    changed = config_diff(_read_json(path), config)
    refused = {
        name: values for name, values in changed.items()
        if not any(f'{name}.'.startswith(f'{free}.') for free in may_change)
    }
    if refused:
      lines = (f'  {name}: {a} there, {b} now' for name, (a, b) in
               refused.items())
      raise ValueError(
          f'{path.parent} belongs to a run of another config:\n'
          + '\n'.join(lines)
          + '\nUse another directory, or the config it was started with.')
    claim = claim and bool(changed)
  if claim and _is_writer():
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_json(path, config)


def read_config(directory: str | os.PathLike[str]) -> dict[str, Any]:
  """Returns the config that the directory was claimed for.

  Raises:
    FileNotFoundError: if it holds no run.
  """
  path = _directory(directory) / _CONFIG
  if path.exists():
    return _read_json(path)
  raise FileNotFoundError(f'no run in {path.parent}: it has no {path.name}')


def config_diff(
    old: Mapping[str, Any], new: Mapping[str, Any]
) -> dict[str, tuple[str, str]]:
  """Returns dotted key -> (old, new) as JSON text, for keys that differ."""
  old, new = dict(_flatten(old)), dict(_flatten(new))
  names = list(new) + [name for name in old if name not in new]
  pairs = {n: (old.get(n, 'absent'), new.get(n, 'absent')) for n in names}
  return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _flatten(
    values: Mapping[str, Any], prefix: str = ''
) -> Iterator[tuple[str, str]]:
  for name, value in values.items():
    if isinstance(value, Mapping) and value:
      yield from _flatten(value, f'{prefix}{name}.')
    else:
      yield f'{prefix}{name}', json.dumps(value)


# ------------------------------------------------------- files and leaves


def _directory(directory: str | os.PathLike[str]) -> pathlib.Path:
  return pathlib.Path(directory).expanduser().absolute()


def _step_path(directory: pathlib.Path, step: int) -> pathlib.Path:
  """The folder of a step, under whichever name it is found."""
  for path in directory.iterdir():
    if re.fullmatch(r'\d+', path.name) and int(path.name) == step:
      return path
  return directory / f'{step}{_STALE}'


def _name(path: tuple[Any, ...]) -> str:
  return jax.tree_util.keystr(path, simple=True, separator='/')


def _describe(tree: PyTree, kinds: tuple[type, ...]) -> dict[str, str]:
  """Returns path -> 'dtype[shape]' of each leaf; ValueError if not of kinds."""
  described = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    if not isinstance(leaf, kinds):
      wanted = ' or '.join(f'jax.{k.__name__.split(".")[-1]}' for k in kinds)
      raise ValueError(
          f'leaf {_name(path)} must be {wanted}, got {type(leaf).__name__}; '
          'plain numbers and text belong in `extra`.'
      )
    described[_name(path)] = f'{leaf.dtype}{list(leaf.shape)}'
  return described


def _checksums(directory: pathlib.Path) -> dict[str, list[int]]:
  """Returns relative name -> [bytes, crc32] of every file but the manifest."""
  files = sorted(path for path in directory.rglob('*') if path.is_file())
  return {
      path.relative_to(directory).as_posix(): _checksum(path)
      for path in files if path.name != _MANIFEST
  }


def _checksum(path: pathlib.Path) -> list[int]:
  size, checksum = 0, 0
  with path.open('rb') as file:
    while chunk := file.read(1 << 20):
      size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
  return [size, checksum]


def _seal(manifest: dict[str, Any]) -> dict[str, Any]:
  text = json.dumps(manifest, sort_keys=True)
  return {'crc32': zlib.crc32(text.encode()), 'manifest': manifest}


def _unseal(sealed: Any, path: pathlib.Path) -> dict[str, Any]:
  if isinstance(sealed, dict) and isinstance(sealed.get('manifest'), dict):
    if _seal(sealed['manifest']) == sealed:
      return sealed['manifest']
  raise ValueError(f'{path} is damaged: its checksum does not match')


def _as_json(values: Mapping[str, Any], name: str) -> dict[str, Any]:
  """Returns the values as JSON will give them back."""
  try:
    return json.loads(json.dumps(dict(values)))
  except TypeError as error:
    raise ValueError(
        f'{name} must hold only what JSON can: {error}; arrays belong in the '
        'state.'
    ) from error


def _read_json(path: pathlib.Path) -> Any:
  try:
    return json.loads(path.read_text(encoding='utf-8'))
  except ValueError as error:
    raise ValueError(f'{path} is damaged: not JSON ({error})') from error


def _write_json(path: pathlib.Path, values: Mapping[str, Any]) -> None:
  """Writes beside and renames, so that the file is the old or the new one."""
  partial = path.with_name(path.name + _PARTIAL)
  with partial.open('w', encoding='utf-8') as file:
    json.dump(values, file, indent=1)
    file.flush()
    os.fsync(file.fileno())
  partial.rename(path)
  _sync_directory(path.parent)


def _sync_directory(directory: pathlib.Path) -> None:
  """Makes renames within the directory survive a power cut."""
  descriptor = os.open(directory, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def _is_writer() -> bool:
  return jax.process_index() == 0


def _barrier(name: str) -> None:
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)


@contextlib.contextmanager
def _orbax() -> Iterator[None]:
  """Where orbax is called: by one thread at a time, and without its chatter.

  Its saves and loads count their operations in one place, so that two at once
  take each other's folders. Its worker threads report a failed write once for
  every task that waited for it; the one exception that reaches the caller says
  all of it.
  """
  absl_logger = std_logging.getLogger('absl')
  asyncio_logger = std_logging.getLogger('asyncio')

  def is_wanted(record: std_logging.LogRecord) -> bool:
    orbax = f'{os.sep}orbax{os.sep}' in record.pathname
    return not orbax or record.levelno >= std_logging.WARNING

  with _ORBAX_LOCK:
    was_disabled = asyncio_logger.disabled
    absl_logger.addFilter(is_wanted)
    asyncio_logger.disabled = True
    try:
      yield
    finally:
      absl_logger.removeFilter(is_wanted)
      asyncio_logger.disabled = was_disabled
